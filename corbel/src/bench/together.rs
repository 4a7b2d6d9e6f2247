//! Several processes in one directory, or at one file: mail delivery (Assise's own headline), and a block that goes to and fro.

use std::process::{Child, Command, Stdio};

use super::load::{figures, number};
use super::steady::{p50, turns};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};

/// Bytes of a message.
const MESSAGE: &str = "204800";

/// What a load that runs beside others has printed.
pub fn said_by(child: Child, who: &str) -> Result<serde_json::Value> {
    let output = child.wait_with_output().context(who)?;
    crate::signals::check()?;
    let (text, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let line = text.trim().lines().last().unwrap_or("");
    serde_json::from_str(line)
        .map_err(|_| Failure::failed(format!("{who} printed {line:?}: {}", said.trim()), ""))
}

/// Deliverers, each by its node and its directory.
fn deliver(world: &World, who: &[(u32, String)], millis: &str) -> Result<f64> {
    let start = |(node, dir): &(u32, String)| -> Result<Child> {
        let mut command: Command = world.under_run(*node, &["mail", dir, MESSAGE, millis])?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("a deliverer")
    };
    let all: Vec<Child> = who.iter().map(start).collect::<Result<_>>()?;
    let mut per_s = 0.0;
    for child in all {
        let got = said_by(child, "a deliverer")?;
        per_s += number(&got, "ops")? / number(&got, "seconds")?;
    }
    Ok(per_s)
}

/// On a quiet machine all messages together are more than the volume holds.
fn clear(who: &[(u32, String)]) -> Result<()> {
    for (_, dir) in who {
        match std::fs::remove_dir_all(dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e).context(dir),
            _ => {}
        }
    }
    Ok(())
}

/// How fast they deliver; what they have is removed.
fn delivered(world: &World, who: &[(u32, String)], millis: &str) -> Result<f64> {
    let per_s = deliver(world, who, millis)?;
    clear(who)?;
    Ok(per_s)
}

/// A new mail directory, seen from a node.
fn mailbox(world: &World, node: u32, name: &str) -> Result<String> {
    let dir = world.file(node, name);
    for part in ["tmp", "new"] {
        let path = std::path::Path::new(&dir).join(part);
        std::fs::create_dir_all(&path).context(path.display())?;
    }
    Ok(dir)
}

/// How often the nodes' clients were asked for a lease back, in all.
pub fn recalls(world: &World, nodes: u32) -> Result<f64> {
    let of =
        |node| Ok(world.local.status(node)?["counters"]["recalls"].as_f64().unwrap_or(f64::NAN));
    (1..=nodes).map(of).sum()
}

/// Messages a second with a deliverer on each node: sharded (each with the mail directory of its own users), and round robin (all
/// in one).
pub fn over_nodes(world: &World, nodes: &[u32], round: u32, millis: &str) -> Result<[f64; 2]> {
    let own = |node: &u32| Ok((*node, mailbox(world, *node, &format!("user{node}-{round}"))?));
    let sharded: Vec<(u32, String)> = nodes.iter().map(own).collect::<Result<_>>()?;
    let sharded = delivered(world, &sharded, millis)?;
    mailbox(world, 1, &format!("all-{round}"))?;
    let all = |node: &u32| (*node, world.file(*node, &format!("all-{round}")));
    let robin = delivered(world, &nodes.iter().map(all).collect::<Vec<_>>(), millis)?;
    Ok([sharded, robin])
}

/// Messages of 200 KiB into mail directories: write to `tmp`, fsync, rename to `new`.
pub fn maildir(bench: &Bench<'_>) -> Result<Measured> {
    let nodes: Vec<u32> = (1..=bench.replicas).collect();
    let world = World::start(bench, World::plan(bench), &nodes)?;
    let millis = if bench.quick { "500" } else { "2000" };
    let mut round = 0;
    let mut recalled = Vec::new();
    let [one, two_apart, two, eight, sharded, robin] = turns(|| {
        round += 1;
        let fresh = |name: &str| mailbox(&world, 1, &format!("{name}-{round}"));
        let same = |dir: &str, count: usize| vec![(1, dir.to_owned()); count];
        let one = delivered(&world, &same(&fresh("one")?, 1), millis)?;
        let apart = vec![(1, fresh("a")?), (1, fresh("b")?)];
        let two_apart = delivered(&world, &apart, millis)?;
        let who = same(&fresh("two")?, 2);
        let before = recalls(&world, bench.replicas)?;
        let two = deliver(&world, &who, millis)?;
        let seconds = millis.parse::<f64>().unwrap_or(f64::NAN) / 1e3;
        // (Not those of who removes the messages.)
        recalled.push((recalls(&world, bench.replicas)? - before) / (two * seconds));
        clear(&who)?;
        let eight = delivered(&world, &same(&fresh("eight")?, 8), millis)?;
        let [sharded, robin] = over_nodes(&world, &nodes, round, millis)?;
        Ok([one, two_apart, two, eight, sharded, robin])
    })?;
    recalled.sort_by(f64::total_cmp);
    Ok(vec![
        ("p1_per_s", one),
        ("p2_apart_per_s", two_apart),
        ("p2_per_s", two),
        ("p8_per_s", eight),
        ("nodes_sharded_per_s", sharded),
        ("nodes_per_s", robin),
        ("p2_ratio", two / one),
        ("p8_ratio", eight / one),
        ("nodes_sharded_ratio", sharded / one),
        ("nodes_ratio", robin / one),
        ("recalls_per_message", recalled[recalled.len() / 2]),
        ("replicas", f64::from(bench.replicas)),
    ])
}

/// Two processes read and write one block in turns: on one node, and on two.
pub fn handover(bench: &Bench<'_>) -> Result<Measured> {
    let nodes: Vec<u32> = (1..=bench.replicas.min(2)).collect();
    let world = World::start(bench, World::plan(bench), &nodes)?;
    let count = if bench.quick { "200" } else { "2000" };
    let path = world.file(1, "block");
    let [to] = turns(|| {
        let got = figures(world.under_run(1, &["turns", &path, "4096", count])?)?;
        Ok([p50(&got)? / 1e3])
    })?;
    let mut measured = vec![("p50_us", to), ("replicas", f64::from(bench.replicas))];
    if nodes.len() > 1 {
        let mut round = 0;
        let [between] = turns(|| {
            round += 1;
            Ok([over_two(&world, &format!("block-{round}"), count)? / 1e3])
        })?;
        measured.push(("nodes_p50_us", between));
    }
    Ok(measured)
}

/// The same of a process on each of two nodes, which are the first and the second of the chain; nanoseconds a turn, the middle one.
fn over_two(world: &World, name: &str, count: &str) -> Result<f64> {
    let turn = world.scratch().join(format!("{name}.turn"));
    std::fs::write(&turn, [0; 4096]).context(turn.display())?;
    let turn = turn.to_string_lossy().into_owned();
    let start = |(load, node): (&str, u32)| -> Result<Child> {
        let path = world.file(node, name);
        let mut command = world.under_run(node, &[load, &path, "4096", count, &turn])?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("one of two who take turns")
    };
    let both: Vec<Child> =
        [("peer-0", 1), ("peer-1", 2)].into_iter().map(start).collect::<Result<_>>()?;
    let one = |child| p50(&said_by(child, "one of two who take turns")?);
    let got: Vec<f64> = both.into_iter().map(one).collect::<Result<_>>()?;
    Ok(got.iter().sum::<f64>() / got.len() as f64)
}
