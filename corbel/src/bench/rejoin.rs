//! What it costs that a node was away, for so long that the stream does not have what it missed: a volume of many files of which
//! one in a hundred was written anew. The node is to be sent what changed, be in the chain soon, and disturb nobody; and the same
//! where there is a snapshot.

use std::io::Write;
use std::time::{Duration, Instant};

use base::InodeId;
use client::fs::Caller;

use super::failover::{Writer, monotonic};
use super::world::World;
use super::{Bench, Measured};
use crate::config::Transport;
use crate::failure::{Context, Failure, Kind, Result};
use crate::local::Plan;
use crate::process::wait_until;

const FILE: usize = 100 << 10;
/// Files in a directory.
const DIRECTORY: usize = 500;
/// One in so many changes.
const CHANGED: usize = 100;
const STREAM: u64 = 64 << 20;
/// The node that is away.
const AWAY: u32 = 3;
/// For so long is measured what a writer waits for without a node that joins.
const BEFORE: Duration = Duration::from_secs(3);
/// And for so long it goes on when the node is in.
const AFTER: Duration = Duration::from_millis(200);

fn path(world: &World, n: usize) -> String {
    world.file(1, &format!("d{}/f{n}", n / DIRECTORY))
}

/// Writes a file; what is in it nothing can be made shorter of.
fn write(world: &World, n: usize, round: u64) -> Result<()> {
    let mut random = base::random::Random::new(round << 32 | n as u64);
    let bytes: Vec<u8> = (0..FILE / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    let path = path(world, n);
    let mut options = std::fs::OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).open(&path);
    file.and_then(|mut file| file.write_all(&bytes)).context(path)
}

/// All that was written is on all members.
fn sync(world: &World) -> Result<()> {
    let path = world.file(1, "d0");
    let dir = std::fs::File::open(&path).context(&path)?;
    rustix::fs::syncfs(&dir).map_err(std::io::Error::from).context(path)
}

/// A chain of so many members, as that node knows it: it takes time of the node to say so, every few milliseconds.
fn chain(world: &World, node: u32, members: usize) -> Result<()> {
    wait_until(&format!("a chain of {members}"), Duration::from_secs(60), || {
        let status = world.local.status(node).ok();
        let whole = |s: &serde_json::Value| {
            s["chain"].as_array().is_some_and(|chain| chain.len() == members) && s["ready"] == true
        };
        Ok(status.filter(whole).map(drop))
    })
}

fn counter(world: &World, node: u32, name: &str) -> Result<f64> {
    Ok(world.local.status(node)?["counters"][name].as_f64().unwrap_or(f64::NAN))
}

/// The node goes, and one in a hundred files is written anew, so often that the ring has forgotten what came first.
fn away(world: &World, files: usize, round: u64) -> Result<f64> {
    if let Some(serve) = world.local.process(AWAY, "serve") {
        serve.end(Duration::from_secs(10));
    }
    chain(world, 1, 2)?;
    let changed = files.div_ceil(CHANGED) * FILE;
    let times = (STREAM as usize * 3 / 2).div_ceil(changed) as u64;
    for again in 0..times {
        for n in (0..files).step_by(CHANGED) {
            write(world, n, round + again)?;
        }
        sync(world)?;
        crate::signals::check()?;
    }
    Ok(changed as f64)
}

/// It comes back: milliseconds until it is in the chain.
fn back(world: &World) -> Result<f64> {
    let begun = Instant::now();
    world.local.start_node(AWAY)?;
    chain(world, AWAY, 3)?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// The time that one in a hundred acknowledgements took longer than, in milliseconds, between two moments, and the longest.
fn p99(writer: &Writer, from: u64, to: u64) -> (f64, f64) {
    let acks = writer.acks();
    // (With the first after the end: what it waited for may have been in between.)
    let end = acks.partition_point(|a| a.at < to);
    let ats: Vec<u64> = acks.iter().take(end + 1).map(|a| a.at).filter(|at| *at >= from).collect();
    let mut waits: Vec<u64> = ats.windows(2).map(|two| two[1] - two[0]).collect();
    waits.sort_unstable();
    let at = (waits.len() * 99 / 100).min(waits.len().saturating_sub(1));
    let millis = |wait: Option<&u64>| wait.map_or(f64::NAN, |wait| *wait as f64 / 1e6);
    (millis(waits.get(at)), millis(waits.last()))
}

/// The bench.
pub fn rejoin(bench: &Bench<'_>) -> Result<Measured> {
    if bench.replicas != 3 {
        return Err(Failure::new(
            Kind::Usage,
            format!("a node that comes back with {} replicas", bench.replicas),
            "the others go on without it: --replicas 3",
        ));
    }
    let files = if bench.quick { 2000 } else { 20_000 };
    // It is about what goes over a network.
    let plan = Plan { stream: STREAM, transport: Transport::Tcp, ..World::plan(bench) };
    let world = World::start(bench, plan, &[1])?;
    for n in 0..files {
        if n % DIRECTORY == 0 {
            let dir = world.file(1, &format!("d{}", n / DIRECTORY));
            std::fs::create_dir(&dir).context(dir)?;
            crate::signals::check()?;
        }
        write(&world, n, 0)?;
    }
    sync(&world)?;
    bench.out.step(format!("  {} MiB in {files} files", (files * FILE) >> 20));
    let changed = away(&world, files, 1)?;
    let sent = counter(&world, 1, "message_wire_bytes")?;
    let back_ms = back(&world)?;
    let sent = counter(&world, 1, "message_wire_bytes")? - sent;
    let taken = counter(&world, AWAY, "taken_over_bytes")?;
    // And once more, beside a program that writes and syncs.
    away(&world, files, 1000)?;
    let path = world.file(1, "records");
    let command = world.under_run(1, &["records", &path, "100000000", "600"])?;
    let mut writer = Writer::start(command)?;
    writer.wait_acks(100, Duration::from_secs(20))?;
    let begun = monotonic();
    std::thread::sleep(BEFORE);
    let started = monotonic();
    let beside_ms = back(&world)?;
    let ended = monotonic();
    std::thread::sleep(AFTER);
    let errors = f64::from(u8::from(writer.has_ended()));
    writer.kill();
    let (alone, _) = p99(&writer, begun, started);
    let (beside, stall) = p99(&writer, started, ended);
    // And in a volume with a snapshot, which the node has as well.
    let socket = world.local.config(1)?.node.socket;
    let fs = crate::mount::open_source(&socket.display().to_string())?;
    let made = fs.make_snapshot(&Caller::ROOT, InodeId::ROOT, b"before");
    made.map_err(|errno| {
        Failure::failed(format!("a snapshot: {errno}"), "see the log of node 1: --keep leaves it")
    })?;
    drop(fs);
    sync(&world)?;
    let changed_beside = away(&world, files, 2000)?;
    let before = counter(&world, 1, "message_wire_bytes")?;
    let snapshot_back_ms = back(&world)?;
    let snapshot_sent = counter(&world, 1, "message_wire_bytes")? - before;
    Ok(vec![
        ("bytes_ratio", sent / changed),
        ("back_ms", back_ms),
        ("writer_p99_ratio", beside / alone),
        ("writer_p99_ms", beside),
        ("writer_alone_p99_ms", alone),
        ("writer_stall_ms", stall),
        ("taken_over_mb", taken / 1e6),
        ("back_beside_writer_ms", beside_ms),
        ("snapshot_bytes_ratio", snapshot_sent / changed_beside),
        ("snapshot_back_ms", snapshot_back_ms),
        ("errors", errors),
    ])
}
