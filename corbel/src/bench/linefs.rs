//! LineFS's tables (SOSP'21), with our own modes in place of its builds: LineFS (`pipelined`), LineFS-NotParallel (`serial`),
//! Assise-BgRepl (`host-background`) and Assise (`host`). What the paper measured, on three machines of 48 cores with SmartNICs of
//! 16, is told beside each ratio: its claim is about cores that applications do not have to share.
//!
//! In the rows that it measures on busy machines the modes have what they are about: of the cores of this machine all but one are the
//! applications', and LineFS's services keep to the one (the SmartNIC), where Assise's share theirs with the applications.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::load::{self, figures, number};
use super::steady::median;
use super::world::World;
use super::{Bench, Measured};
use crate::config::{Authentication, Compression, Copies, Pipeline, Transport};
use crate::failure::{Context, Failure, Result};
use crate::local::Plan;

/// Bytes that all writers of a turn write.
const BYTES: usize = 256 << 20;
/// Bytes that a memory-bound program goes through.
const STREAMED: &str = "67108864";

/// Names of the figures of a mode.
macro_rules! keys {
    ($mode:literal) => {
        [
            concat!($mode, "_w1_mb_s"),
            concat!($mode, "_w2_mb_s"),
            concat!($mode, "_w4_mb_s"),
            concat!($mode, "_w8_mb_s"),
            concat!($mode, "_4k_mb_s"),
            concat!($mode, "_fsync_mean_us"),
            concat!($mode, "_fsync_p99_us"),
            concat!($mode, "_fsync_p999_us"),
            concat!($mode, "_busy_mean_us"),
            concat!($mode, "_busy_p99_us"),
            concat!($mode, "_busy_p999_us"),
            concat!($mode, "_server_per_s"),
            concat!($mode, "_varmail_per_s"),
            concat!($mode, "_program_slowed"),
            concat!($mode, "_busy_mb_s"),
        ]
    };
}

const ROWS: usize = 15;

/// The modes.
const MODES: [(Pipeline, [&str; ROWS]); 4] = [
    (Pipeline::Pipelined, keys!("linefs")),
    (Pipeline::Serial, keys!("serial")),
    (Pipeline::HostBackground, keys!("bgrepl")),
    (Pipeline::Host, keys!("assise")),
];
/// Their places.
const LINEFS: usize = 0;
const SERIAL: usize = 1;
const BGREPL: usize = 2;
const ASSISE: usize = 3;

/// What is shown as a ratio of two modes: its name, the row, whose figure over whose, and what the paper has.
const RATIOS: [(&str, usize, usize, usize, &str); 11] = [
    ("w1_over_assise", 0, LINEFS, ASSISE, "up to 2.33"),
    ("w1_bgrepl_over_assise", 0, BGREPL, ASSISE, "up to 2.24"),
    ("w1_serial_over_linefs", 0, SERIAL, LINEFS, "at most 0.4"),
    ("w8_over_assise", 3, LINEFS, ASSISE, "1.33 over the best other, replicas busy"),
    ("fsync_mean_over_assise", 5, LINEFS, ASSISE, "1.96"),
    ("busy_mean_over_assise", 8, LINEFS, ASSISE, "0.46"),
    ("busy_p99_over_assise", 9, LINEFS, ASSISE, "0.026"),
    ("server_over_assise", 11, LINEFS, ASSISE, "1.79"),
    ("varmail_over_assise", 12, LINEFS, ASSISE, "0.79"),
    ("program_slowed_over_assise", 13, LINEFS, ASSISE, "0.68"),
    ("busy_mb_s_over_assise", 14, LINEFS, ASSISE, "1.46"),
];

/// Cores of this machine that applications have, and the one that stands for the SmartNIC.
fn cores() -> (Vec<u16>, Vec<u16>) {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let all: Vec<u16> = (0..u16::try_from(count).unwrap_or(u16::MAX)).collect();
    match all.split_last() {
        Some((last, others)) if !others.is_empty() => (others.to_vec(), vec![*last]),
        _ => (all.clone(), all),
    }
}

/// Does something by a thread, and by programs that it starts, on some cores.
fn on<T: Send>(cores: &[u16], what: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let kept = || service::process::keep_to(cores).map_err(|why| Failure::failed(why, ""));
    std::thread::scope(|scope| scope.spawn(|| kept().and_then(|()| what())).join())
        .map_err(|_| Failure::failed("a thread ended in a panic", "report it"))?
}

/// Keeps all threads of the services of all nodes to some cores.
fn keep_services(world: &World, cores: &[u16]) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|core| set.set(usize::from(*core)));
    for (name, process) in world.local.processes() {
        let tasks = format!("/proc/{}/task", process.pid);
        for task in std::fs::read_dir(&tasks).context(&name)?.flatten() {
            // (None would be this thread.)
            let number = task.file_name().to_string_lossy().parse().ok();
            if let Some(thread) = number.and_then(Pid::from_raw) {
                // One that has ended meanwhile needs no core.
                let _ = rustix::thread::sched_setaffinity(Some(thread), &set);
            }
        }
    }
    Ok(())
}

/// Programs that run until they are told to end, or this is dropped.
struct Beside(Vec<Child>);

impl Beside {
    fn ended(mut self) -> Result<Vec<Value>> {
        let all = std::mem::take(&mut self.0).into_iter().map(|child| {
            let output = child.wait_with_output().context("a program beside")?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let said = || Failure::failed(format!("a program beside printed {text:?}"), "");
            serde_json::from_str(text.trim()).map_err(|_| said())
        });
        all.collect()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::KILL));
            let _ = child.wait();
        }
    }
}

fn spawned(mut command: Command) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().context(load::name(&command))
}

/// A memory-bound program on each core that applications have.
fn streams(world: &World, cores: &[u16], millis: &str) -> Result<Beside> {
    let mut all = Beside(Vec::new());
    for core in cores {
        let args = ["stream", "-", STREAMED, millis];
        all.0.push(on(&[*core], || spawned(world.bare(&args)))?);
    }
    Ok(all)
}

/// Passes over its memory that such programs make in a second, all together.
fn streamed(beside: Beside) -> Result<f64> {
    let rate = |got: &Value| Ok(number(got, "ops")? / number(got, "seconds")?);
    beside.ended()?.iter().map(rate).sum()
}

/// MB a second of so many processes that write a file each, acknowledged by every replica.
fn writers(world: &World, count: usize, piece: usize, bytes: usize) -> Result<f64> {
    let (size, times) = (piece.to_string(), (bytes / count / piece).to_string());
    let path = |n: usize| world.file(1, &format!("writer-{n}"));
    let mut all = Beside(Vec::new());
    for n in 0..count {
        all.0.push(spawned(world.under_run(1, &["seq", &path(n), &size, &times])?)?);
    }
    // They begin within milliseconds.
    let mut slowest: f64 = 0.0;
    for got in all.ended()? {
        slowest = slowest.max(number(&got, "seconds")?);
    }
    for n in 0..count {
        std::fs::remove_file(path(n)).context(path(n))?;
    }
    Ok(bytes as f64 / 1e6 / slowest)
}

/// Mean, p99 and p99.9 of a write of 16 KiB and fsync, in microseconds.
fn lone(world: &World, count: &str) -> Result<[f64; 3]> {
    let path = world.file(1, "lone");
    let got = figures(world.under_run(1, &["append", &path, "16384", count])?)?;
    std::fs::remove_file(&path).context(&path)?;
    let us = |key| number(&got, key).map(|ns| ns / 1e3);
    Ok([us("mean_ns")?, us("p99_ns")?, us("p999_ns")?])
}

/// Operations a second of a load that makes and removes files.
fn served(world: &World, load: &str, bytes: &str, millis: &str) -> Result<f64> {
    let dir = world.file(1, load);
    std::fs::create_dir_all(&dir).context(&dir)?;
    let got = figures(world.under_run(1, &[load, &dir, bytes, millis])?)?;
    std::fs::remove_dir_all(&dir).context(&dir)?;
    Ok(number(&got, "ops")? / number(&got, "seconds")?)
}

/// All rows of one mode, on a cluster of its own.
fn rows(bench: &Bench<'_>, pipeline: Pipeline) -> Result<[f64; ROWS]> {
    let world = World::start(bench, Plan { pipeline, ..World::plan(bench) }, &[1])?;
    let (bytes, count, millis) =
        if bench.quick { (BYTES / 4, "500", "300") } else { (BYTES, "3000", "1000") };
    // Memory of the region comes from the machine when it is first touched.
    writers(&world, 1, 16384, BYTES)?;
    let w = [1, 2, 4, 8].map(|count| writers(&world, count, 16384, bytes));
    let [w1, w2, w4, w8] = w;
    let small = writers(&world, 1, 4096, bytes / 4)?;
    let idle = lone(&world, count)?;
    let server = served(&world, "server", "131072", millis)?;
    let mail = served(&world, "varmail", "16384", millis)?;
    let (applications, nic) = cores();
    let apart = matches!(pipeline, Pipeline::Pipelined | Pipeline::Serial);
    keep_services(&world, if apart { &nic } else { &applications })?;
    // Longer than what runs beside them.
    let beside = streams(&world, &applications, "60000")?;
    let busy = on(&applications, || lone(&world, count))?;
    drop(beside);
    let alone = streamed(streams(&world, &applications, millis)?)?;
    let beside = streams(&world, &applications, millis)?;
    let busy_mb_s = on(&applications, || {
        let mut rates = Vec::new();
        let begun = std::time::Instant::now();
        let lasts = Duration::from_millis(millis.parse().unwrap_or_default());
        while begun.elapsed() < lasts {
            rates.push(writers(&world, 1, 16384, bytes / 4)?);
        }
        Ok(median(rates))
    })?;
    let slowed = 1.0 - streamed(beside)? / alone;
    Ok([
        w1?, w2?, w4?, w8?, small, idle[0], idle[1], idle[2], busy[0], busy[1], busy[2], server,
        mail, slowed, busy_mb_s,
    ])
}

/// Bytes on the wire over bytes that are sent, for the shuffle files of a sort: so many per cent compressible.
fn shuffled(bench: &Bench<'_>) -> Result<[f64; 3]> {
    let authentication = Authentication::None;
    let (transport, compression) = (Transport::Tcp, Compression::Zstd);
    let plan = Plan { transport, compression, authentication, ..World::plan(bench) };
    let world = World::start(bench, plan, &[1])?;
    let bytes = if bench.quick { BYTES / 16 } else { BYTES / 4 };
    let sent = || -> Result<[f64; 2]> {
        let status = world.local.status(1)?;
        let counter = |key| number(&status["counters"], key);
        Ok([counter("message_bytes")?, counter("message_wire_bytes")?])
    };
    let share = |percent: u32| -> Result<f64> {
        let before = sent()?;
        super::line::mixed(&world, percent, bytes)?;
        let after = sent()?;
        Ok((after[1] - before[1]) / (after[0] - before[0]))
    };
    Ok([share(40)?, share(60)?, share(80)?])
}

/// MB a second where hostd makes the copies of what is published, and where nicfs makes all.
fn published(bench: &Bench<'_>) -> Result<[f64; 2]> {
    let speed = |copies| -> Result<f64> {
        let world = World::start(bench, Plan { copies, ..World::plan(bench) }, &[1])?;
        let bytes = if bench.quick { BYTES / 4 } else { BYTES };
        writers(&world, 1, 16384, BYTES)?;
        (0..3).map(|_| writers(&world, 1, 16384, bytes)).collect::<Result<Vec<_>>>().map(median)
    };
    Ok([speed(Copies::Hostd)?, speed(Copies::Nicfs)?])
}

/// Mail operations a second while the hostd of a replica stands still, over those before and after it.
fn host_stands(bench: &Bench<'_>) -> Result<f64> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let rate = || served(&world, "varmail", "16384", "700");
    rate()?;
    let name = format!("n{} hostd", bench.replicas);
    let all = world.local.processes();
    let host = all.iter().find(|(process, _)| *process == name);
    let (_, host) = host.ok_or_else(|| Failure::failed(format!("there is no {name}"), ""))?;
    let tell = |signal| -> Result<()> {
        let pid = Pid::from_raw(host.pid);
        let told = pid.map_or(Ok(()), |pid| rustix::process::kill_process(pid, signal));
        told.map_err(std::io::Error::from).context(&name)
    };
    let before = rate()?;
    tell(Signal::STOP)?;
    let meanwhile = rate();
    tell(Signal::CONT)?;
    Ok(meanwhile? / before.midpoint(rate()?))
}

/// The tables.
pub fn linefs(bench: &Bench<'_>) -> Result<Measured> {
    let rounds = if bench.quick { 1 } else { 3 };
    let mut all: [Vec<[f64; ROWS]>; 4] = Default::default();
    for round in 0..rounds {
        for turn in 0..MODES.len() {
            crate::signals::check()?;
            let at = (turn + round) % MODES.len();
            bench.out.step(format!("  {}, round {}", MODES[at].0.word(), round + 1));
            all[at].push(rows(bench, MODES[at].0)?);
        }
    }
    let middle = |mode: usize, row: usize| median(all[mode].iter().map(|rows| rows[row]).collect());
    let mut measured = Vec::new();
    for (mode, (_, keys)) in MODES.iter().enumerate() {
        measured.extend(keys.iter().enumerate().map(|(row, key)| (*key, middle(mode, row))));
    }
    let mut told = |name: &'static str, value: f64, paper: &str| {
        bench.out.step(format!("  {name}: {value:.3} (the paper: {paper})"));
        measured.push((name, value));
    };
    for (name, row, one, other, paper) in RATIOS {
        told(name, middle(one, row) / middle(other, row), paper);
    }
    let [host, nic] = published(bench)?;
    told(
        "hostd_over_nicfs_publishing",
        host / nic,
        "1.4 (by interrupts and batches over the NIC's copies)",
    );
    if bench.replicas > 1 {
        let [some, more, most] = shuffled(bench)?;
        told("wire_share_40", some, "0.71");
        told("wire_share_60", more, "0.51");
        told("wire_share_80", most, "0.28");
        told("host_stands_ratio", host_stands(bench)?, "no dip");
    }
    measured.push(("replicas", f64::from(bench.replicas)));
    measured.push(("cores", std::thread::available_parallelism().map_or(1, usize::from) as f64));
    Ok(measured)
}
