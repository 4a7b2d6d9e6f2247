//! LineFS's tables (SOSP'21), with our own modes in place of its builds: LineFS (`pipelined`), LineFS-NotParallel (`serial`),
//! Assise-BgRepl (`host-background`) and Assise (`host`). What the paper measured, on three machines of 48 cores with SmartNICs of
//! 16, is told beside each ratio: its claim is about cores that applications do not have to share.
//!
//! In the rows that it measures on busy machines the modes have what they are about: of the cores of this machine all but one are the
//! applications', and LineFS's services keep to the one (the SmartNIC), where Assise's share theirs with the applications.
//!
//! Where the paper's program is not one that can be had here, what stands for it has a name of its own: a log-structured merge tree that
//! is no LevelDB (`lsm`, see bench/lsm.c), and four processes that sort as Tencent Sort does (`sort`). Mail delivery is Assise's (OSDI'20).

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::load::{self, figures, number};
use super::steady::median;
use super::together;
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
            concat!($mode, "_lsm_fillseq_us"),
            concat!($mode, "_lsm_fillrandom_us"),
            concat!($mode, "_lsm_fillsync_us"),
            concat!($mode, "_lsm_readseq_us"),
            concat!($mode, "_lsm_readrandom_us"),
            concat!($mode, "_lsm_readhot_us"),
            concat!($mode, "_mail_sharded_per_s"),
            concat!($mode, "_mail_robin_per_s"),
        ]
    };
}

const ROWS: usize = 23;

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

/// Rows that are shown for one mode as well.
const MAIL_SHARDED: usize = 21;
const MAIL_ROBIN: usize = 22;

/// What is shown as a ratio of two modes: its name, the row, whose figure over whose, and what the paper has.
const RATIOS: [(&str, usize, usize, usize, &str); 19] = [
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
    ("lsm_fillseq_over_assise", 15, LINEFS, ASSISE, "LevelDB 0.56, 80 % better"),
    ("lsm_fillrandom_over_assise", 16, LINEFS, ASSISE, "LevelDB 0.79, 27 % better"),
    ("lsm_fillsync_over_assise", 17, LINEFS, ASSISE, "LevelDB 0.79, 27 % better"),
    ("lsm_readseq_over_assise", 18, LINEFS, ASSISE, "LevelDB, similar"),
    ("lsm_readrandom_over_assise", 19, LINEFS, ASSISE, "LevelDB, similar"),
    ("lsm_readhot_over_assise", 20, LINEFS, ASSISE, "LevelDB, similar"),
    ("mail_sharded_over_assise", MAIL_SHARDED, LINEFS, ASSISE, "not measured"),
    ("mail_robin_over_assise", MAIL_ROBIN, LINEFS, ASSISE, "not measured"),
];

/// Bytes of a value of the tree, and keys are of 16, as in the paper.
const VALUE: &str = "1024";
/// Records of the sort: those of its benchmarks.
const RECORD: &str = "100";
/// How much of them compression can take away.
const PERCENT: [u32; 3] = [40, 60, 80];
/// Writers where publishing is compared, and what they write.
const WRITERS: usize = 4;
const PUBLISHED: usize = 64 << 20;

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

/// Keeps all threads of the services of all nodes to the cores that are theirs by their names.
fn keep_services<'a>(world: &World, cores: impl Fn(&str) -> &'a [u16]) -> Result<()> {
    for (name, process) in world.local.processes() {
        let mut set = rustix::thread::CpuSet::new();
        cores(&name).iter().for_each(|core| set.set(usize::from(*core)));
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
            serde_json::from_str(text.trim()).map_err(|_| {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                Failure::failed(format!("a program beside printed {text:?}: {said}"), "")
            })
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
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
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

/// Microseconds of an operation on a log-structured merge tree, by load.
fn trees(world: &World, values: &str, synced: &str) -> Result<[f64; 6]> {
    let program = load::compile_lsm(world.scratch())?;
    let us = |load: &str, tree: &str, count: &str| -> Result<f64> {
        let mut command = world.run_command(1)?;
        command.arg(&program).args([load, tree, VALUE, count]);
        let got = figures(command)?;
        // (The tree that is read has all keys.)
        if load.starts_with("read") && got["found"].as_u64() != count.parse().ok() {
            return Err(Failure::failed(format!("{load} of {count} values: {got}"), ""));
        }
        Ok(number(&got, "mean_ns")? / 1e3)
    };
    let within = |loads: &[(&str, &str)]| -> Result<Vec<f64>> {
        let tree = world.file(1, "tree");
        std::fs::create_dir(&tree).context(&tree)?;
        let all = loads.iter().map(|(load, count)| us(load, &tree, count)).collect();
        std::fs::remove_dir_all(&tree).context(&tree)?;
        all
    };
    let reads = ["readseq", "readrandom", "readhot"].map(|load| (load, values));
    let ordered = within(&[&[("fillseq", values)], &reads[..]].concat())?;
    let random = within(&[("fillrandom", values)])?;
    let durable = within(&[("fillsync", synced)])?;
    Ok([ordered[0], random[0], durable[0], ordered[1], ordered[2], ordered[3]])
}

/// Messages a second, sharded and round robin, by a deliverer on each node: on a cluster of its own, since the others mount one node.
fn mailed(bench: &Bench<'_>, pipeline: Pipeline) -> Result<[f64; 2]> {
    let nodes: Vec<u32> = (1..=bench.replicas).collect();
    let world = World::start(bench, Plan { pipeline, ..World::plan(bench) }, &nodes)?;
    let millis = if bench.quick { "500" } else { "2000" };
    // Memory of the regions comes from the machine when it is first touched.
    together::over_nodes(&world, &nodes, 0, millis)?;
    together::over_nodes(&world, &nodes, 1, millis)
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
    keep_services(&world, |_| if apart { &nic } else { &applications })?;
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
    // (The paper has its replicas busy for that.)
    let values = if bench.quick { "16384" } else { "65536" };
    let beside = streams(&world, &applications, "600000")?;
    let trees = on(&applications, || trees(&world, values, count))?;
    drop(beside);
    drop(world);
    let [sharded, robin] = mailed(bench, pipeline)?;
    let [fillseq, fillrandom, fillsync, readseq, readrandom, readhot] = trees;
    Ok([
        w1?, w2?, w4?, w8?, small, idle[0], idle[1], idle[2], busy[0], busy[1], busy[2], server,
        mail, slowed, busy_mb_s, fillseq, fillrandom, fillsync, readseq, readrandom, readhot,
        sharded, robin,
    ])
}

/// Of the sorts of one turn, by how well the records can be compressed.
#[derive(Default)]
struct Sorts {
    /// Seconds of the second phase: of LineFS, that compresses, and of Assise, that does not.
    seconds: [[f64; 3]; 2],
    /// Bytes on the wire over those of Assise.
    shares: [f64; 3],
}

/// Sorts on a cluster that compresses and on one of Assise's mode that does not, in turns.
fn sorts(bench: &Bench<'_>) -> Result<Sorts> {
    let start = |pipeline, compression| {
        let (transport, authentication) = (Transport::Tcp, Authentication::None);
        let plan = World::plan(bench);
        let plan = Plan { transport, compression, authentication, pipeline, ..plan };
        World::start(bench, plan, &[1])
    };
    let worlds =
        [start(Pipeline::Pipelined, Compression::Zstd)?, start(Pipeline::Host, Compression::None)?];
    let count = if bench.quick { "320000" } else { "1280000" };
    let sort = |world: &World, percent: u32| -> Result<[f64; 2]> {
        let sent = || number(&world.local.status(1)?["counters"], "message_wire_bytes");
        let dir = world.file(1, "sort");
        std::fs::create_dir(&dir).context(&dir)?;
        let before = sent()?;
        let got = figures(world.under_run(1, &[&format!("sort-{percent}"), &dir, RECORD, count])?)?;
        let sent = sent()? - before;
        std::fs::remove_dir_all(&dir).context(&dir)?;
        Ok([number(&got, "seconds")?, sent])
    };
    // Memory of the regions comes from the machine when it is first touched.
    worlds.iter().try_for_each(|world| sort(world, 0).map(drop))?;
    let mut all: [[Vec<f64>; 3]; 3] = Default::default();
    for round in 0..3 {
        for (at, percent) in PERCENT.into_iter().enumerate() {
            crate::signals::check()?;
            let mut got = [[0.0; 2]; 2];
            for turn in 0..2 {
                let which = (turn + round) % 2;
                got[which] = sort(&worlds[which], percent)?;
            }
            let [[seconds, sent], [assise_seconds, assise_sent]] = got;
            all[0][at].push(seconds);
            all[1][at].push(assise_seconds);
            all[2][at].push(sent / assise_sent);
        }
    }
    let [linefs, assise, shares] = all.map(|row| row.map(median));
    Ok(Sorts { seconds: [linefs, assise], shares })
}

/// Processes that stand still until this is dropped.
struct Stopped(Vec<Pid>);

impl Stopped {
    /// The hostd of some nodes.
    fn hosts(world: &World, nodes: &[u32]) -> Result<Self> {
        let processes = world.local.processes();
        let mut stopped = Self(Vec::new());
        for node in nodes {
            let name = format!("n{node} hostd");
            let found = processes.iter().find(|(process, _)| *process == name);
            let pid = found.and_then(|(_, host)| Pid::from_raw(host.pid));
            let pid = pid.ok_or_else(|| Failure::failed(format!("there is no {name}"), ""))?;
            let told = rustix::process::kill_process(pid, Signal::STOP);
            told.map_err(std::io::Error::from).context(&name)?;
            stopped.0.push(pid);
        }
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = rustix::process::kill_process(*pid, Signal::CONT);
        }
    }
}

/// What some writers write, in MB a second; passes that memory-bound programs make in a second, beside them on the cores of applications;
/// and the share of what is written that nicfs copied meanwhile to where it is published, on all nodes. With `none` hostd stands still
/// for as long as that takes.
fn beside_streams(world: &World, nodes: &[u32], none: bool) -> Result<[f64; 3]> {
    const READY: &[u8] = b"ready\n";
    let (applications, _) = cores();
    let path = |n: usize| world.file(1, &format!("published-{n}"));
    let times = (PUBLISHED / WRITERS / 16384).to_string();
    let held = |mut command: Command, cores: &[u16]| -> Result<Child> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        on(cores, || command.spawn().context(load::name(&command)))
    };
    let mut all = Beside(Vec::new());
    for n in 0..WRITERS {
        let writer = world.under_run(1, &["held-seq", &path(n), "16384", &times])?;
        all.0.push(held(writer, &applications)?);
    }
    for core in &applications {
        all.0.push(held(world.bare(&["held-stream", "-", STREAMED, "300"]), &[*core])?);
    }
    for child in &mut all.0 {
        let mut said = [0; READY.len()];
        let read = child.stdout.as_mut().map(|stdout| stdout.read_exact(&mut said));
        if !matches!(read, Some(Ok(()))) || said != READY {
            return Err(Failure::failed("a program did not say that it is ready", ""));
        }
    }
    let copied = || -> Result<f64> {
        let of = |node: &u32| number(&world.local.status(*node)?["counters"], "copied_bytes");
        nodes.iter().map(of).sum()
    };
    let before = copied()?;
    let stopped = if none { Some(Stopped::hosts(world, nodes)?) } else { None };
    for child in &mut all.0 {
        let told = child.stdin.as_mut().map(|stdin| stdin.write_all(b"\n"));
        told.transpose().context("a program that is ready")?;
    }
    let ended = all.ended()?;
    let share = (copied()? - before) / (PUBLISHED * nodes.len()) as f64;
    drop(stopped);
    let (mut slowest, mut passes): (f64, f64) = (0.0, 0.0);
    for (n, got) in ended.iter().enumerate() {
        let seconds = number(got, "seconds")?;
        match n < WRITERS {
            true => slowest = slowest.max(seconds),
            false => passes += number(got, "ops")? / seconds,
        }
    }
    for n in 0..WRITERS {
        std::fs::remove_file(path(n)).context(path(n))?;
    }
    Ok([PUBLISHED as f64 / 1e6 / slowest, passes, share])
}

/// Who makes the copies of what is published, with a memory-bound program on the cores of applications, where hostd is and nicfs is not:
/// hostd, nicfs, or nobody. What the writers write, in MB a second, and the passes of that program; and the share of what was
/// written that was copied where nobody should.
///
/// Nothing of the product leaves publishing out, so that is done from outside: hostd is stopped on all nodes. Nicfs waits half a
/// second for it before it copies for itself, and logs and rings have room for all that is written meanwhile. So it is an upper
/// bound, as the paper's "no copy" is, and only one if all is over by then; the share says so.
fn published(bench: &Bench<'_>, rounds: usize) -> Result<([[f64; 3]; 2], f64)> {
    let nodes: Vec<u32> = (1..=bench.replicas).collect();
    let (applications, nic) = cores();
    let mut all: [[Vec<f64>; 2]; 3] = Default::default();
    let mut most: f64 = 0.0;
    for round in 0..rounds {
        for turn in 0..3 {
            crate::signals::check()?;
            let way = (turn + round) % 3;
            let copies = if way == 1 { Copies::Nicfs } else { Copies::Hostd };
            let (stream, lane_bytes) = (512 << 20, 128 << 20);
            let plan = Plan { copies, stream, lane_bytes, ..World::plan(bench) };
            let world = World::start(bench, plan, &[1])?;
            // Memory of the regions comes from the machine when it is first touched.
            writers(&world, WRITERS, 16384, 2 * BYTES)?;
            keep_services(&world, |name| match name.ends_with("hostd") {
                true => &applications,
                false => &nic,
            })?;
            for _ in 0..3 {
                let [mb_s, passes, share] = beside_streams(&world, &nodes, way == 2)?;
                all[way][0].push(mb_s);
                all[way][1].push(passes);
                most = if way == 2 { most.max(share) } else { most };
            }
        }
    }
    let all = all.map(|row| row.map(median));
    let of = |row: usize| [all[0][row], all[1][row], all[2][row]];
    Ok(([of(0), of(1)], most))
}

/// Mail operations a second while the hostd of a replica stands still, over those before and after it.
fn host_stands(bench: &Bench<'_>) -> Result<f64> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let rate = || served(&world, "varmail", "16384", "700");
    rate()?;
    let before = rate()?;
    let stopped = Stopped::hosts(&world, &[bench.replicas])?;
    let meanwhile = rate();
    drop(stopped);
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
    for (name, mode) in
        [("mail_robin_over_sharded", LINEFS), ("assise_mail_robin_over_sharded", ASSISE)]
    {
        let paper = "of Assise, below 1";
        told(name, middle(mode, MAIL_ROBIN) / middle(mode, MAIL_SHARDED), paper);
    }
    bench.out.step("  publishing by hostd, by nicfs, by nobody");
    // All of the paper's methods are the host's, by DMA or, as hostd does it, by memcpy; those of throughput over "no copy" are in
    // the README of its sources.
    let ([writes, passes], share) = published(bench, rounds)?;
    told("hostd_over_nicfs_publishing", writes[0] / writes[1], "none; DMA over memcpy 1.4");
    told("hostd_over_none_publishing", writes[0] / writes[2], "memcpy 0.68, DMA 0.95");
    told("nicfs_over_none_publishing", writes[1] / writes[2], "none");
    told("program_hostd_over_none", passes[0] / passes[2], "memcpy 0.39, DMA 0.77");
    told("program_nicfs_over_none", passes[1] / passes[2], "none");
    told("none_published_share", share, "0; with more it is no upper bound");
    if bench.replicas > 1 {
        bench.out.step("  sorts");
        let Sorts { seconds: [linefs, assise], shares } = sorts(bench)?;
        told("sort_40_over_assise", linefs[0] / assise[0], "comparable");
        told("sort_60_over_assise", linefs[1] / assise[1], "comparable");
        told("sort_80_over_assise", linefs[2] / assise[2], "0.89, 16.69 s over 18.72 s");
        told("wire_share_40", shares[0], "0.71");
        told("wire_share_60", shares[1], "0.51");
        told("wire_share_80", shares[2], "0.28");
        told("host_stands_ratio", host_stands(bench)?, "no dip");
        measured.extend(["sort_40_s", "sort_60_s", "sort_80_s"].into_iter().zip(linefs));
        measured.push(("sort_assise_s", median(assise.to_vec())));
    }
    let mb_s = ["published_hostd_mb_s", "published_nicfs_mb_s", "published_none_mb_s"];
    measured.extend(mb_s.into_iter().zip(writes));
    measured.push(("replicas", f64::from(bench.replicas)));
    measured.push(("cores", std::thread::available_parallelism().map_or(1, usize::from) as f64));
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are named by their place: whoever adds one must not shift a ratio to another's.
    #[test]
    fn ratios_are_of_the_rows_that_they_name() {
        let prefixes = ["linefs_", "serial_", "bgrepl_", "assise_"];
        let mut names: Vec<&str> = Vec::new();
        for ((_, keys), prefix) in MODES.iter().zip(prefixes) {
            assert!(keys.iter().all(|key| key.starts_with(prefix)), "{keys:?}");
            names.extend(keys);
        }
        for (name, row, one, other, _) in RATIOS {
            let stem = name.split("_over_").next().unwrap();
            let stem = stem.trim_end_matches("_bgrepl").trim_end_matches("_serial");
            for mode in [one, other] {
                let key = MODES[mode].1[row].strip_prefix(prefixes[mode]).unwrap();
                assert!(key.starts_with(stem), "{name} is of {key}");
            }
            names.push(name);
        }
        for row in [MAIL_SHARDED, MAIL_ROBIN] {
            assert!(MODES[LINEFS].1[row].contains("mail"));
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
