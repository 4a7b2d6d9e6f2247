//! `corbel cluster`: a local cluster for trying things (see [`crate::local`]).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::config::{CAPACITY, Leases, Transport};
use crate::failure::{Failure, Kind, Result};
use crate::local::{self, Local, NODE_PROCESSES, Plan};
use crate::output::Output;
use crate::units::{parse_bytes, show_bytes};

/// Verbs of `corbel cluster`.
#[derive(Subcommand, Debug)]
pub enum ClusterVerb {
    /// Make and start a cluster on this machine, and mount it on every node
    #[command(
        after_help = "Examples:\n  corbel cluster up\n  corbel cluster up --nodes 5 --replicas 3 \
        --dir /dev/shm/try\n  corbel cluster up --mount /mnt/corbel   node 1's mount elsewhere"
    )]
    Up(UpArgs),
    /// End everything that `up` started, unmount, and remove the cluster's directory
    #[command(after_help = "Example:\n  corbel cluster down --keep    leaves regions and logs")]
    Down {
        /// Which cluster
        #[command(flatten)]
        place: Place,
        /// Leave the directory
        #[arg(long)]
        keep: bool,
    },
    /// Show what runs, and what each node says about itself
    Status {
        /// Which cluster
        #[command(flatten)]
        place: Place,
    },
    /// Send a signal to the services of one node (KILL by default, and wait until they are gone)
    #[command(
        after_help = "Examples:\n  corbel cluster kill 1                 the node is gone\n  \
        corbel cluster kill 3 --signal STOP   it hangs\n  \
        corbel cluster kill 3 --signal CONT   it goes on\n  \
        corbel cluster start 1                it comes back"
    )]
    Kill {
        /// Number of the node
        node: u32,
        /// KILL, TERM, STOP or CONT
        #[arg(long, default_value = "KILL", value_parser = ["KILL", "TERM", "STOP", "CONT"])]
        signal: String,
        /// Which cluster
        #[command(flatten)]
        place: Place,
    },
    /// Cut the link of a node of a cluster made with --apart: nothing reaches it and nothing leaves it
    #[command(
        after_help = "Examples:\n  corbel cluster up --apart             each node in a network namespace\n  \
        corbel cluster cut 2                  node 2 is alone, and does not know\n  \
        corbel cluster mend 2"
    )]
    Cut {
        /// Number of the node
        node: u32,
        /// Which cluster
        #[command(flatten)]
        place: Place,
    },
    /// Mend the link of a node
    Mend {
        /// Number of the node
        node: u32,
        /// Which cluster
        #[command(flatten)]
        place: Place,
    },
    /// Start the services of a node again, and its mount
    Start {
        /// Number of the node
        node: u32,
        /// Which cluster
        #[command(flatten)]
        place: Place,
    },
}

/// Which local cluster is meant.
#[derive(Args, Debug, Clone)]
pub struct Place {
    /// Directory of the cluster (default: $XDG_RUNTIME_DIR/corbel or /dev/shm/corbel-UID)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

impl Place {
    fn path(&self) -> Result<PathBuf> {
        let dir = self.dir.clone().unwrap_or_else(Local::default_dir);
        std::path::absolute(&dir).map_err(|error| Failure::io(dir.display(), &error))
    }
}

/// Arguments of `corbel cluster up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    nodes: u32,
    /// Members of the chain (default: every node)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16))]
    replicas: Option<u32>,
    /// Fabric between the nodes
    #[arg(long, default_value = "shm", value_parser = ["shm", "tcp"])]
    transport: String,
    /// Each node in a network namespace of its own, so that links can be cut (as root, by TCP)
    #[arg(long)]
    apart: bool,
    /// What programs of different processes are given that write one file at the same time: all of it, or the bytes that each uses
    #[arg(long, default_value = "files", value_parser = ["files", "ranges"])]
    leases: String,
    /// Space for data on each node
    #[arg(long, default_value = "4GiB", value_parser = parse_bytes)]
    capacity: u64,
    /// Where node 1's view is mounted (default: DIR/n1/mnt)
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    /// Mount nothing
    #[arg(long, conflicts_with = "mount")]
    no_mount: bool,
    /// Which cluster
    #[command(flatten)]
    place: Place,
}

/// Runs `corbel cluster …`.
pub fn run(out: &Output, verb: &ClusterVerb) -> Result<()> {
    match verb {
        ClusterVerb::Up(args) => up(out, args),
        ClusterVerb::Down { place, keep } => down(out, place, *keep),
        ClusterVerb::Status { place } => status(out, &place.path()?),
        ClusterVerb::Kill { node, signal, place } => kill(out, *node, signal, place),
        ClusterVerb::Cut { node, place } => link(out, *node, place, false),
        ClusterVerb::Mend { node, place } => link(out, *node, place, true),
        ClusterVerb::Start { node, place } => start(out, *node, place),
    }
}

fn up(out: &Output, args: &UpArgs) -> Result<()> {
    crate::signals::catch();
    let begin = Instant::now();
    let replicas = args.replicas.unwrap_or(args.nodes);
    if replicas > args.nodes {
        return Err(Failure::new(
            Kind::Usage,
            format!("{replicas} replicas on {} nodes", args.nodes),
            "each replica is on a node of its own: raise --nodes",
        ));
    }
    if !CAPACITY.contains(&args.capacity) {
        return Err(Failure::new(
            Kind::Usage,
            format!("--capacity is {}", show_bytes(args.capacity)),
            format!(
                "a node holds from {} to {}",
                show_bytes(*CAPACITY.start()),
                show_bytes(*CAPACITY.end())
            ),
        ));
    }
    let plan = Plan {
        replicas,
        transport: match args.transport.as_str() {
            // Through shared memory they would go on to meet.
            "shm" if !args.apart => Transport::Shm,
            _ => Transport::Tcp,
        },
        apart: args.apart,
        leases: if args.leases == "ranges" { Leases::Ranges } else { Leases::Files },
        capacity: args.capacity,
        mounted: !args.no_mount,
        mount: args.mount.as_deref().map(std::path::absolute).transpose().map_err(|error| {
            Failure::io(args.mount.as_deref().unwrap_or("".as_ref()).display(), &error)
        })?,
        ..Plan::of(args.nodes)
    };
    let local = Local::create(&args.place.path()?, plan)?;
    out.step(format!("{}: {} nodes, {replicas} replicas", local.dir().display(), args.nodes));
    let started = local.up(Duration::from_secs(30)).and_then(|()| {
        let mounts = local.is_mounted().then(|| local.nodes());
        mounts.into_iter().flatten().map(|node| local.mount(node)).collect::<Result<Vec<_>>>()
    });
    let mounts = match started {
        Ok(mounts) => mounts,
        Err(failure) => {
            // Nothing is left, running or lying about, but the logs: they say why.
            local.down(true)?;
            let logs = local.keep_logs();
            return Err(match logs {
                Some(dir) if failure.kind != Kind::Interrupted => {
                    // What it says of a log is where that was.
                    let remedy = Some(failure.remedy.as_str()).filter(|r| !r.contains("log is"));
                    let remedy = remedy.map_or_else(String::new, |remedy| format!("{remedy}; "));
                    let remedy = format!("{remedy}the logs are in {}", dir.display());
                    Failure { remedy, ..failure }
                }
                _ => failure,
            });
        }
    };
    let object = json!({
        "dir": local.dir(), "nodes": args.nodes, "replicas": replicas, "mounts": mounts,
        "config": local.config_file(1), "ready_ms": begin.elapsed().as_millis() as u64,
    });
    out.result(&object, || {
        println!("ready after {:.2} s", begin.elapsed().as_secs_f64());
        for (mount, node) in mounts.iter().zip(local.nodes()) {
            println!("  node {node}: {}", mount.display());
        }
        if let Some(mount) = mounts.first() {
            println!("try:  corbel run --mount {0} -- sqlite3 {0}/a.db", mount.display());
        }
        println!("end:  corbel cluster down{}", dir_flag(&args.place));
    });
    Ok(())
}

fn dir_flag(place: &Place) -> String {
    place.dir.as_ref().map_or_else(String::new, |dir| format!(" --dir {}", dir.display()))
}

fn down(out: &Output, place: &Place, keep: bool) -> Result<()> {
    let local = Local::open(&place.path()?)?;
    let ended = local.down(keep)?;
    let kept = keep.then(|| local.dir().display().to_string());
    out.result(&json!({"ended": ended, "kept": kept}), || {
        println!(
            "ended: {}",
            if ended.is_empty() { "nothing ran".into() } else { ended.join(", ") }
        );
    });
    Ok(())
}

/// A process that is killed is gone by then, unless the machine is in trouble.
const KILLED_WITHIN: Duration = Duration::from_secs(10);

fn kill(out: &Output, node: u32, signal: &str, place: &Place) -> Result<()> {
    let local = Local::open(&place.path()?)?;
    check_node(&local, node)?;
    let number = match signal {
        "TERM" => Signal::TERM,
        "STOP" => Signal::STOP,
        "CONT" => Signal::CONT,
        _ => Signal::KILL,
    };
    let reached = local.signal_node(node, number);
    // Until the last thread is gone the region is in use.
    if number == Signal::KILL && !reached.iter().all(|process| process.wait_gone(KILLED_WITHIN)) {
        return Err(Failure::new(
            Kind::Timeout,
            format!("node {node} was killed, and is not gone after {KILLED_WITHIN:?}"),
            "it waits in the kernel, perhaps for memory or a disk; look at `ps -o stat,wchan`",
        ));
    }
    let reached = reached.len();
    if reached == 0 {
        return Err(Failure::new(
            Kind::Unreachable,
            format!("nothing of node {node} runs"),
            format!("start it with `corbel cluster start {node}`"),
        ));
    }
    out.result(&json!({"node": node, "signal": signal, "processes": reached}), || {
        println!("SIG{signal} to {reached} processes of node {node}");
    });
    Ok(())
}

fn start(out: &Output, node: u32, place: &Place) -> Result<()> {
    let local = Local::open(&place.path()?)?;
    check_node(&local, node)?;
    let begin = Instant::now();
    // A mount outlives the services of its node, and goes on with the new ones.
    let mounted = local.is_mounting(node);
    if !mounted {
        local.unmount(node);
    }
    local.start_coordinator()?;
    local.start_node(node)?;
    local.wait_ready(node, Duration::from_secs(30))?;
    let mount = match local.is_mounted() {
        true if mounted => Some(local.mount_point(node)),
        true => Some(local.mount(node)?),
        false => None,
    };
    let object =
        json!({"node": node, "mount": mount, "ready_ms": begin.elapsed().as_millis() as u64});
    out.result(&object, || {
        println!("node {node} is back after {:.2} s", begin.elapsed().as_secs_f64());
    });
    Ok(())
}

fn link(out: &Output, node: u32, place: &Place, up: bool) -> Result<()> {
    let local = Local::open(&place.path()?)?;
    check_node(&local, node)?;
    if !local.is_apart() {
        return Err(Failure::failed(
            "the nodes of this cluster share one network",
            "make it with `corbel cluster up --apart`",
        ));
    }
    local.links().set(node, up)?;
    out.result(&json!({"node": node, "link": up}), || {
        println!("node {node} is {}", if up { "reached again" } else { "cut off" });
    });
    Ok(())
}

fn check_node(local: &Local, node: u32) -> Result<()> {
    if local.nodes().contains(&node) {
        return Ok(());
    }
    let remedy = format!("this cluster has nodes 1 to {}", local.nodes().end());
    Err(Failure::new(Kind::Usage, format!("no node {node}"), remedy))
}

/// Shows every node of the local cluster in `dir`.
pub fn status(out: &Output, dir: &Path) -> Result<()> {
    let local = Local::open(dir)?;
    let mut nodes = Vec::new();
    for node in local.nodes() {
        let running: Vec<&str> = NODE_PROCESSES
            .into_iter()
            .chain(["mount"])
            .filter(|name| local.process(node, name).is_some())
            .collect();
        let said = local.status(node).unwrap_or(Value::Null);
        let mounted = local::is_mount_point(&local.mount_point(node));
        nodes.push(json!({"node": node, "running": running, "mounted": mounted, "status": said}));
    }
    let coordinator = local.coordinator().map(|process| process.pid);
    let object = json!({"dir": local.dir(), "coordinator": coordinator, "nodes": nodes});
    out.result(&object, || {
        println!("{}", local.dir().display());
        println!("  coordinator {}", coordinator.map_or("down".into(), |pid| format!("pid {pid}")));
        for node in &nodes {
            println!("  node {}: {}", node["node"], summary(node));
            for warning in crate::status::warnings(&node["status"]) {
                println!("    warning: {warning}");
            }
        }
    });
    Ok(())
}

fn summary(node: &Value) -> String {
    let running: Vec<&str> =
        node["running"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if running.is_empty() {
        return "down".into();
    }
    let said = crate::status::line(&node["status"]);
    format!("{said} [{}]", running.join(" "))
}
