//! The benches without faults. Each baseline is measured in the same run, in turns with the load,
//! and the median of the turns is taken: on a shared machine a single turn says little.

use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::floor::Floor;
use super::load::{self, figures, number};
use super::trace::count_syscalls;
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Result};
use crate::process::Identity;

/// Turns of load and baseline.
const TURNS: usize = 5;

/// The one in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs `turn` several times; medians of each of its numbers.
pub fn turns<const N: usize>(mut turn: impl FnMut() -> Result<[f64; N]>) -> Result<[f64; N]> {
    let mut all: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..TURNS {
        crate::signals::check()?;
        for (values, value) in all.iter_mut().zip(turn()?) {
            values.push(value);
        }
    }
    Ok(all.map(median))
}

/// The median of a load.
pub fn p50(figures: &Value) -> Result<f64> {
    number(figures, "p50_ns")
}

/// Append + fsync, beside a chain that does nothing, in turns.
pub fn fsync_chain(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let path = world.file(1, "fsync-chain");
    let mut args = ["append", path.as_str(), "4096", "500"];
    figures(world.under_run(1, &args)?)?;
    args[3] = "4000";
    let mut floor = Floor::start(bench, world.scratch())?;
    floor.turn(500)?;
    let [floor_p50, floor_p99, p50, p99] = turns(|| {
        let [floor_p50, floor_p99] = floor.turn(4000)?;
        let got = figures(world.under_run(1, &args)?)?;
        Ok([floor_p50, floor_p99, number(&got, "p50_ns")? / 1e3, number(&got, "p99_ns")? / 1e3])
    })?;
    Ok(vec![
        ("p50_us", p50),
        ("p99_us", p99),
        ("floor_us", floor_p50),
        ("floor_p99_us", floor_p99),
        ("ratio", p50 / floor_p50),
        ("replicas", f64::from(bench.replicas)),
    ])
}

/// Sequential writes and one fsync, beside a plain copy of the same bytes into memory, in turns; and what processor time the
/// services took for them, by their places in the chain.
pub fn seq_write(bench: &Bench<'_>) -> Result<Measured> {
    const BYTES: usize = 512 << 20;
    const MIB: f64 = (BYTES >> 20) as f64;
    let world = World::start(bench, World::plan(bench), &[1])?;
    let count = (BYTES / 16384).to_string();
    let rate = |seconds: f64| BYTES as f64 / 1e6 / seconds;
    let once = |turn: u32| -> Result<f64> {
        let path = world.file(1, &format!("seq-write-{turn}"));
        let got = figures(world.under_run(1, &["seq", &path, "16384", &count])?)?;
        std::fs::remove_file(&path).context(&path)?;
        Ok(rate(number(&got, "seconds")?))
    };
    // Memory that is there already.
    let plain = world.scratch().join("copy").display().to_string();
    figures(world.bare(&["fill", &plain, "16384", &(BYTES / 8 / 16384).to_string()]))?;
    let copy = || -> Result<f64> {
        let got = figures(world.bare(&["copy", &plain, "16384", &count]))?;
        Ok(rate(number(&got, "seconds")?))
    };
    // A region of persistent memory is there from the beginning; one on tmpfs takes its pages from
    // the machine when they are first touched, in a virtual machine from the hypervisor, which
    // says more about that than about us. So it is a figure of its own.
    let first_touch = once(0)?;
    let services = |node: u32| -> u64 {
        let of_node = |(name, _): &&(String, Identity)| name.starts_with(&format!("n{node} "));
        world.local.processes().iter().filter(of_node).map(|(_, p)| p.cpu_ticks()).sum()
    };
    let nodes = 1..=bench.replicas;
    let before: Vec<u64> = nodes.clone().map(services).collect();
    let (mut speeds, mut copies) = (Vec::new(), Vec::new());
    for turn in 1..4 {
        copies.push(copy()?);
        speeds.push(once(turn)?);
    }
    // What is behind the acknowledgement is part of it.
    std::thread::sleep(Duration::from_millis(500));
    // USER_HZ is 100.
    let spent = |node: u32| (services(node) - before[node as usize - 1]) as f64 * 1e4 / (3.0 * MIB);
    let (speed, copy) = (median(speeds), median(copies));
    let last = bench.replicas;
    Ok(vec![
        ("mb_s", speed),
        ("first_touch_mb_s", first_touch),
        ("copy_mb_s", copy),
        ("ratio", speed / copy),
        ("cpu_us_per_mib", nodes.map(spent).sum()),
        ("head_cpu_us_per_mib", spent(1)),
        ("tail_cpu_us_per_mib", spent(last)),
        ("replicas", f64::from(last)),
    ])
}

/// Append + fsync beside a client of another process that writes as fast as it can, against the same without it, in turns.
pub fn fairness(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let path = world.file(1, "polite");
    let count = if bench.quick { "1000" } else { "4000" };
    let append = || -> Result<f64> {
        let got = figures(world.under_run(1, &["append", &path, "4096", count])?)?;
        Ok(number(&got, "p99_ns")? / 1e3)
    };
    append()?;
    let mut turn = 0;
    let [alone, beside] = turns(|| {
        let alone = append()?;
        turn += 1;
        let flood = Flood::start(&world, turn)?;
        let beside = append();
        drop(flood);
        Ok([alone, beside?])
    })?;
    Ok(vec![
        ("alone_p99_us", alone),
        ("beside_p99_us", beside),
        ("p99_ratio", beside / alone),
        ("replicas", f64::from(bench.replicas)),
    ])
}

/// A process that writes without end; ends when dropped.
struct Flood(std::process::Child);

impl Flood {
    fn start(world: &World, turn: u32) -> Result<Self> {
        // The same 16 MiB again and again, so that no volume runs full.
        let path = world.file(1, &format!("flood-{}", turn % 2));
        let mut command = world.under_run(1, &["write", &path, "65536", "2000000"])?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // `corbel run` waits for the program: both end together.
        let child = command.process_group(0).spawn().context("the flood")?;
        // Until it floods.
        std::thread::sleep(Duration::from_millis(300));
        Ok(Self(child))
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let group = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        let _ = group.map(|group| rustix::process::kill_process_group(group, Signal::KILL));
        let _ = self.0.wait();
    }
}

/// Random reads of published data.
pub fn rand_read(bench: &Bench<'_>) -> Result<Measured> {
    const BYTES: usize = 256 << 20;
    let world = World::start(bench, World::plan(bench), &[1])?;
    let path = world.file(1, "rand-read");
    let blocks = (BYTES / 65536).to_string();
    let cold = world.scratch().join("cold").display().to_string();
    figures(world.bare(&["fill", &cold, "65536", &blocks]))?;
    // Written by a process that has ended: what is read is published, not in the reader's log.
    figures(world.under_run(1, &["fill", &path, "65536", &blocks])?)?;
    let [read, memcpy] = turns(|| {
        let read = p50(&figures(world.under_run(1, &["read", &path, "4096", "200000"])?)?)?;
        Ok([read, p50(&figures(world.bare(&["memcpy", &cold, "4096", "200000"]))?)?])
    })?;
    let calls = |count: &str| -> Result<f64> {
        let calls = count_syscalls(world.under_run(1, &["read", &path, "4096", count])?)?;
        Ok(calls as f64)
    };
    let (few, many) = (calls("1000")?, calls("21000")?);
    Ok(vec![
        ("p50_ns", read),
        ("memcpy_ns", memcpy),
        ("ratio", read / memcpy),
        ("syscalls_per_op", ((many - few) / 20_000.0).max(0.0)),
    ])
}

/// Small files.
pub fn files(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let dir = world.file(1, "");
    let [rate] = turns(|| {
        let got = figures(world.under_run(1, &["files", &dir, "4096", "3000"])?)?;
        Ok([number(&got, "ops")? / number(&got, "seconds")?])
    })?;
    Ok(vec![("per_s", rate), ("replicas", f64::from(bench.replicas))])
}

/// SQLite transactions.
pub fn sqlite(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let script = load::sqlite_script(world.scratch())?;
    let (database, path) = (world.file(1, "bench.db"), world.file(1, "bench.append"));
    // Questions about locks that the head has answered.
    let asked = || -> Result<f64> {
        let of = |node| {
            let status = world.local.status(node)?;
            let counter = |key| number(&status["counters"], key);
            Ok(counter("locks")? + counter("locks_refused")?)
        };
        (1..=bench.replicas).map(of).sum()
    };
    const TRANSACTIONS: f64 = 3000.0;
    let [rate, p50_us, p99_us, over, asked_per_tx, fsync_us] = turns(|| {
        let fsync = p50(&figures(world.under_run(1, &["append", &path, "4096", "2000"])?)?)? / 1e3;
        let before = asked()?;
        let mut command = world.run_command(1)?;
        command.arg(load::python()?).arg(&script).arg(&database).arg(TRANSACTIONS.to_string());
        let got = figures(command)?;
        let [rate, tx, p99] =
            [number(&got, "tx_per_s")?, number(&got, "p50_us")?, number(&got, "p99_us")?];
        Ok([rate, tx, p99, tx / fsync, (asked()? - before) / TRANSACTIONS, fsync])
    })?;
    Ok(vec![
        ("tx_per_s", rate),
        ("p50_us", p50_us),
        ("p99_us", p99_us),
        ("fsync_us", fsync_us),
        ("p50_over_fsync", over),
        ("locks_asked_per_tx", asked_per_tx),
        ("replicas", f64::from(bench.replicas)),
    ])
}

/// CPU of an idle cluster.
pub fn idle(bench: &Bench<'_>) -> Result<Measured> {
    const WATCHED: Duration = Duration::from_secs(10);
    let plan = World::plan(bench);
    let mounts: Vec<u32> = (1..=bench.replicas).collect();
    let world = World::start(bench, plan, &mounts)?;
    // Used once, then left alone: idle, not merely never touched.
    let path = world.file(1, "idle");
    figures(world.under_run(1, &["append", &path, "4096", "200"])?)?;
    std::thread::sleep(Duration::from_secs(2));
    let all = world.local.processes();
    let ticks = |kind: &str| -> u64 {
        let chosen = all.iter().filter(|(name, _)| name.ends_with(kind));
        chosen.map(|(_, process)| process.cpu_ticks()).sum()
    };
    const KINDS: [(&str, &str); 5] = [
        ("coordinator", "coordinator_percent"),
        ("nicfs", "nicfs_percent"),
        ("hostd", "hostd_percent"),
        ("serve", "supervisor_percent"),
        ("mount", "mount_percent"),
    ];
    let before = KINDS.map(|(kind, _)| ticks(kind));
    let since = std::time::Instant::now();
    while since.elapsed() < WATCHED {
        crate::signals::check()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    // USER_HZ is 100 on every Linux that Rust's std runs on; the kernel scales to it.
    let watched = since.elapsed().as_secs_f64();
    let after = KINDS.map(|(kind, _)| ticks(kind));
    let percent = |i: usize| (after[i] - before[i]) as f64 / watched;
    let mut measured = vec![("cpu_percent", (0..KINDS.len()).map(percent).sum())];
    measured.extend(KINDS.iter().enumerate().map(|(i, (_, key))| (*key, percent(i))));
    measured.push(("processes", all.len() as f64));
    Ok(measured)
}
