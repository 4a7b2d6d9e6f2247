//! Processes that write strided blocks of one file, as a checkpoint of a parallel program is written, beside as many that write a file
//! each: on one node, and on several.

use std::process::{Child, Stdio};

use super::load::{figures, number};
use super::steady::turns;
use super::together::{recalls, said_by};
use super::world::World;
use super::{Bench, Measured};
use crate::config::Leases;
use crate::failure::{Context, Result};
use crate::local::Plan;

/// Processes.
const WRITERS: usize = 4;
/// Bytes of a block.
const BLOCK: usize = 64 << 10;
/// Bytes of the file that they share.
const SHARED: usize = 32 << 20;

/// Writers of one file (`shared`), or of one each, by their nodes: what they write together in a second, in bytes.
fn write(world: &World, nodes: &[u32], shared: bool, millis: &str) -> Result<f64> {
    let start = |(n, node): (usize, &u32)| -> Result<Child> {
        let (name, load, many, size) = match shared {
            true => ("all".to_owned(), format!("stride-{n}"), WRITERS, SHARED),
            false => (format!("own-{n}"), "stride-0".to_owned(), 1, SHARED / WRITERS),
        };
        let (path, block) = (world.file(*node, &name), BLOCK.to_string());
        let (many, size) = (many.to_string(), size.to_string());
        let mut command = world.under_run(*node, &[&load, &path, &block, millis, &many, &size])?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("a writer")
    };
    let all: Vec<Child> = nodes.iter().enumerate().map(start).collect::<Result<_>>()?;
    let mut bytes = 0.0;
    for child in all {
        let got = said_by(child, "a writer")?;
        bytes += number(&got, "ops")? * number(&got, "bytes")? / number(&got, "seconds")?;
    }
    Ok(bytes)
}

/// Runs the bench.
pub fn shared_file_procs(bench: &Bench<'_>) -> Result<Measured> {
    let nodes: Vec<u32> = (1..=bench.replicas.min(3)).collect();
    let plan = Plan { leases: Leases::Ranges, ..World::plan(bench) };
    let world = World::start(bench, plan, &nodes)?;
    let millis = if bench.quick { "300" } else { "1500" };
    // Inside the size of a file: what makes it longer is another matter.
    let own = (0..WRITERS).map(|n| (format!("own-{n}"), SHARED / WRITERS));
    for (name, size) in std::iter::once(("all".to_owned(), SHARED)).chain(own) {
        let count = (size / BLOCK).to_string();
        let path = world.file(1, &name);
        figures(world.under_run(1, &["fill", &path, &BLOCK.to_string(), &count])?)?;
    }
    let one = [1; WRITERS];
    let spread: Vec<u32> = (0..WRITERS).map(|n| nodes[n % nodes.len()]).collect();
    let ratio = |on: &[u32]| -> Result<[f64; 3]> {
        let apart = write(&world, on, false, millis)?;
        let before = recalls(&world, bench.replicas)?;
        let shared = write(&world, on, true, millis)?;
        // (Those of the first time, and of opening, are among them.)
        let seconds = millis.parse::<f64>().unwrap_or(f64::NAN) / 1e3;
        let writes = shared * seconds / BLOCK as f64;
        let recalled = (recalls(&world, bench.replicas)? - before) * 1e3 / writes;
        Ok([shared / 1e6, shared / apart, recalled])
    };
    let [one_mb_s, one_ratio, one_recalls, spread_mb_s, spread_ratio, recalled] = turns(|| {
        let ([a, b, c], [d, e, f]) = (ratio(&one)?, ratio(&spread)?);
        Ok([a, b, c, d, e, f])
    })?;
    Ok(vec![
        ("one_node_mb_s", one_mb_s),
        ("one_node_ratio", one_ratio),
        ("three_nodes_mb_s", spread_mb_s),
        ("three_nodes_ratio", spread_ratio),
        ("one_node_recalls_per_1000", one_recalls),
        ("recalls_per_1000", recalled),
        ("replicas", f64::from(bench.replicas)),
    ])
}
