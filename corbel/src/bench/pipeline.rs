//! What it brings that stages are done side by side, and what a byte costs on its way.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::cores::speedup;
use super::load::{figures, number};
use super::steady::median;
use super::world::World;
use super::{Bench, Measured};
use crate::config::Pipeline;
use crate::failure::{Context, Result};
use crate::local::Plan;
use crate::process::Identity;

const TURNS: u32 = 5;
/// Cores of each node, and what is shown of them.
const VIRTUAL: [(usize, &str, &str); 2] =
    [(4, "virtual_speedup_4", "virtual_mb_s_4"), (8, "virtual_speedup_8", "virtual_mb_s_8")];
/// Bytes of one turn.
const BYTES: usize = 256 << 20;
const MIB: f64 = (BYTES >> 20) as f64;

/// One of the two clusters.
struct Side {
    world: World,
    speeds: Vec<f64>,
    fsyncs: Vec<f64>,
    /// Processor time of the services of all nodes, in microseconds.
    spent: f64,
}

impl Side {
    fn start(bench: &Bench<'_>, pipeline: Pipeline) -> Result<Self> {
        let plan = Plan { pipeline, ..World::plan(bench) };
        let world = World::start(bench, plan, &[1])?;
        let side = Self { world, speeds: Vec::new(), fsyncs: Vec::new(), spent: 0.0 };
        // Memory of the region comes from the machine when it is first touched.
        side.write()?;
        side.fsync()?;
        Ok(side)
    }

    /// MB a second that are on every replica when fsync returns.
    fn write(&self) -> Result<f64> {
        let (path, count) = (self.world.file(1, "pipeline"), (BYTES / 16384).to_string());
        let got = figures(self.world.under_run(1, &["seq", &path, "16384", &count])?)?;
        std::fs::remove_file(&path).context(&path)?;
        Ok(BYTES as f64 / 1e6 / number(&got, "seconds")?)
    }

    /// Of append + fsync, in microseconds.
    fn fsync(&self) -> Result<f64> {
        let path = self.world.file(1, "lone");
        let got = figures(self.world.under_run(1, &["append", &path, "4096", "1000"])?)?;
        Ok(number(&got, "p50_ns")? / 1e3)
    }

    fn ticks(&self) -> u64 {
        let of_a_node = |(name, _): &&(String, Identity)| name.starts_with('n');
        self.world.local.processes().iter().filter(of_a_node).map(|(_, p)| p.cpu_ticks()).sum()
    }

    fn turn(&mut self) -> Result<()> {
        let before = self.ticks();
        let speed = self.write()?;
        // What is behind the acknowledgement is part of it.
        std::thread::sleep(std::time::Duration::from_millis(300));
        // USER_HZ is 100.
        self.spent += (self.ticks() - before) as f64 * 1e4;
        self.speeds.push(speed);
        self.fsyncs.push(self.fsync()?);
        Ok(())
    }

    fn counters(&self, nodes: RangeInclusive<u32>) -> Result<Vec<Value>> {
        nodes.map(|node| Ok(self.world.local.status(node)?["counters"].clone())).collect()
    }
}

/// Sequential writes over two clusters in turns, of which one has all stages done by its deciding thread; copies of a byte of a
/// chunk, as each place of the chain has counted them.
pub fn pipeline(bench: &Bench<'_>) -> Result<Measured> {
    let mut apart = Side::start(bench, Pipeline::Pipelined)?;
    let mut serial = Side::start(bench, Pipeline::Serial)?;
    let nodes = 1..=bench.replicas;
    let before = apart.counters(nodes.clone())?;
    let turns = if bench.quick { 2 } else { TURNS };
    for turn in 0..turns {
        crate::signals::check()?;
        // Who is second finds the machine warm.
        let mut both = [&mut apart, &mut serial];
        both.rotate_left(turn as usize % 2);
        both.into_iter().try_for_each(Side::turn)?;
    }
    let after = apart.counters(nodes)?;
    let grown = |at: usize, keys: &[&str]| -> Result<f64> {
        let of = |all: &[Value], key: &&str| number(&all[at], key);
        keys.iter().map(|key| Ok(of(&after, key)? - of(&before, key)?)).sum()
    };
    // To the arenas, whoever does it.
    let published = ["copied_bytes", "hosted_bytes"];
    let copies = |at: usize, keys: &[&str]| -> Result<f64> {
        Ok((grown(at, keys)? + grown(at, &published)?) / grown(at, &["entry_bytes"])?)
    };
    let last = before.len() - 1;
    let mib = f64::from(turns) * MIB;
    let (fast, slow) = (median(apart.speeds.clone()), median(serial.speeds.clone()));
    let out = if last > 0 {
        &["fetched_bytes", "kept_bytes", "bytes_out"][..]
    } else {
        &["fetched_bytes", "kept_bytes"]
    };
    let mut measured = vec![
        ("real_ratio", fast / slow),
        ("mb_s", fast),
        ("serial_mb_s", slow),
        ("fsync_ratio", median(apart.fsyncs.clone()) / median(serial.fsyncs.clone())),
        ("fsync_p50_us", median(apart.fsyncs.clone())),
        ("serial_fsync_p50_us", median(serial.fsyncs.clone())),
        ("head_copies", copies(0, out)?),
    ];
    if last > 1 {
        measured.push(("middle_copies", copies(1, &["bytes_in", "kept_bytes", "bytes_out"])?));
    }
    if last > 0 {
        measured.push(("tail_copies", copies(last, &["bytes_in", "kept_bytes"])?));
    }
    let (spent, serial_spent) = (apart.spent, serial.spent);
    // They would want some of the processor.
    drop((apart, serial));
    bench.out.step("  the same stages on a virtual clock".to_string());
    for (cores, key, speed) in VIRTUAL {
        crate::signals::check()?;
        let (speedup, run) = speedup(cores, turns)?;
        measured.extend([(key, speedup), (speed, run.mb_s)]);
        if cores == 8 {
            measured.push(("virtual_deciding_8", run.deciding));
            measured.push(("virtual_pieces_8", run.pieces as f64));
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    measured.extend([
        ("cpu_us_per_mib", spent / mib),
        ("serial_cpu_us_per_mib", serial_spent / mib),
        ("head_fetch_us_per_mib", grown(0, &["work_fetch_us"])? / mib),
        ("head_keep_us_per_mib", grown(0, &["work_keep_us"])? / mib),
        ("head_work_share", grown(0, &["work_keep_bytes"])? / grown(0, &["kept_bytes"])?),
        ("replicas", f64::from(bench.replicas)),
        ("cores", cores as f64),
    ]);
    Ok(measured)
}
