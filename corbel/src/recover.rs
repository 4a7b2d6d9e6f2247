//! `corbel recover`: the coordinator goes on by itself with every chain of which a member still has its data. If all
//! have lost it while a node that was put out before has an older copy, a person must say whether to go on with that.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::NodeId;
use clap::Args;
use cluster::coordinator::client;
use cluster::coordinator::message::{Choice, Copies, Copy, DataState};
use cluster::tls::{Keys, Role};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::config::Config;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;

/// How long the coordinator may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of `corbel recover`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  corbel recover                          \
    what copy each node has\n  corbel recover --go-on-with 2 --confirm   node 2's copy is the volume from now on\n\n\
    The volume goes on by itself as long as a member of its chain has its data. It waits if all of\n\
    them have lost it, or are gone. Then an older copy can be gone on with: what was written after it\n\
    was left behind is lost for good, and all other copies are replaced.")]
pub struct RecoverArgs {
    /// Number of the node whose copy is to be the volume
    #[arg(long, value_name = "NODE")]
    pub go_on_with: Option<u32>,
    /// Do it, knowing what is lost
    #[arg(long, requires = "go_on_with")]
    pub confirm: bool,
}

/// Runs `corbel recover`.
pub fn run(global: &Global, args: &RecoverArgs, out: &Output) -> Result<()> {
    let config = global.load()?;
    let (at, id) = (&config.cluster.coordinator, &config.cluster.id);
    let cluster = cluster::coordinator::identity(id);
    let keys = keys(&config)?;
    let keys = keys.as_ref();
    let copies = client::survey(at, cluster, keys, id, PATIENCE).map_err(|e| unreachable(&e))?;
    let Some(node) = args.go_on_with else {
        show(out, id, &copies, None);
        return Ok(());
    };
    let copy = find(&copies, node)?;
    let DataState::Intact { epoch } = copy.state else {
        return Err(Failure::failed(
            format!("node {node} has no copy"),
            "choose a node that has one",
        ));
    };
    if !args.confirm {
        show_on_error(out, id, &copies);
        return Err(Failure::new(
            Kind::Usage,
            format!(
                "node {node}'s copy ends with epoch {}, position {} ({}); what was written later is lost for good, \
                 and every other copy is replaced by it",
                epoch.0,
                copy.position.0,
                age(copy)
            ),
            "if that is what you want, add --confirm",
        ));
    }
    let (incarnation, position) = (copy.incarnation, copy.position);
    let choice = Choice { node: copy.node, incarnation, epoch, position };
    client::choose(at, cluster, keys, id, choice, PATIENCE)
        .map_err(|e| Failure::failed(e.to_string(), "`corbel recover` shows what there is"))?;
    show(out, id, &copies, Some(copy));
    Ok(())
}

/// Of who administers, if they are here; else of this node, which may look.
fn keys(config: &Config) -> Result<Option<Keys>> {
    let node = Role::Node(NodeId(config.node.id));
    let admin =
        crate::serve::key_place(config, Role::Admin).is_some_and(|place| place.own().exists());
    crate::serve::keys(config, if admin { Role::Admin } else { node })
}

fn unreachable(error: &std::io::Error) -> Failure {
    let remedy = match error.kind() {
        std::io::ErrorKind::PermissionDenied => "`corbel cert show` says what the keys here are",
        _ => "start it: `corbel serve coordinator`",
    };
    Failure::new(Kind::Unreachable, error.to_string(), remedy)
}

/// The node's copy, if it may be chosen.
fn find(copies: &Copies, node: u32) -> Result<&Copy> {
    let nothing = "only when no member of the chain has its data is there anything to choose";
    if copies.lives {
        return Err(Failure::failed("the volume's chain lives", nothing));
    }
    let found = copies.copies.iter().find(|copy| copy.node == NodeId(node));
    let copy = found.ok_or_else(|| {
        let what = format!("node {node} has not registered with the coordinator");
        Failure::failed(what, "start its services: `corbel serve`")
    })?;
    if copy.may_be_chosen || copy.state == DataState::Fresh {
        return Ok(copy);
    }
    let why = if !copy.reachable {
        "its services do not answer"
    } else if copy.seated {
        "it is in the chain and goes on by itself"
    } else {
        "its services were running when it was put out, or a member of the chain may come back by itself"
    };
    let remedy = "restart its services, wait a moment, and look again";
    Err(Failure::failed(format!("node {node}'s copy cannot be gone on with: {why}"), remedy))
}

/// When a copy was published last, before its node registered; its stream may go on after that.
fn age(copy: &Copy) -> String {
    let published = copy.info.parse().map(Duration::from_nanos).unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    match now.checked_sub(published) {
        Some(ago) if !published.is_zero() => {
            let at = published.as_secs();
            format!("published last {} s ago, at {at} s since 1970", ago.as_secs())
        }
        _ => "when it was published last is not known".to_owned(),
    }
}

/// What nodes said of their copies when they registered says nothing as long as the chain lives.
fn object(copy: &Copy, lives: bool) -> Value {
    let epoch = match copy.state {
        DataState::Intact { epoch } if !lives => Some(epoch.0),
        _ => None,
    };
    json!({
        "node": copy.node.0,
        "reachable": copy.reachable,
        "in_chain": copy.seated,
        "epoch": epoch,
        "position": copy.position.0,
        "published_ns": copy.info.parse::<u64>().ok().filter(|_| !lives),
        "may_be_chosen": copy.may_be_chosen,
    })
}

fn line(copy: &Copy, lives: bool) -> String {
    let what = match copy.state {
        _ if lives => String::new(),
        DataState::Fresh => "no copy; ".to_owned(),
        DataState::Intact { epoch } => {
            format!("epoch {}, position {}, {}; ", epoch.0, copy.position.0, age(copy))
        }
    };
    let place = match (copy.reachable, copy.seated) {
        (false, _) => "does not answer",
        (true, true) => "in the chain",
        (true, false) => "not in the chain",
    };
    let choice = if copy.may_be_chosen { "; may be gone on with" } else { "" };
    format!("node {}: {what}{place}{choice}", copy.node.0)
}

fn lines(volume: &str, copies: &Copies) -> Vec<String> {
    let state = if copies.lives { "its chain lives" } else { "no member of its chain serves" };
    let first = format!("volume {volume}: epoch {}; {state}", copies.epoch.0);
    [first].into_iter().chain(copies.copies.iter().map(|copy| line(copy, copies.lives))).collect()
}

fn show(out: &Output, volume: &str, copies: &Copies, chosen: Option<&Copy>) {
    let all: Vec<Value> = copies.copies.iter().map(|copy| object(copy, copies.lives)).collect();
    let object = json!({
        "volume": volume,
        "epoch": copies.epoch.0,
        "lives": copies.lives,
        "copies": all,
        "gone_on_with": chosen.map(|copy| copy.node.0),
    });
    out.result(&object, || {
        lines(volume, copies).iter().for_each(|line| println!("{line}"));
        if let Some(copy) = chosen {
            println!("node {}'s copy is the volume from now on", copy.node.0);
        }
    });
}

fn show_on_error(out: &Output, volume: &str, copies: &Copies) {
    lines(volume, copies).iter().for_each(|line| out.step(line));
}
