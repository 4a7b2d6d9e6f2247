//! What snapshots cost: to make one, in a volume of any size; to write over what one has; and what others wait for
//! while one is removed.

use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{Caller, FileSystem, Handle, O_RDWR};

use super::failover::{Ack, Writer, monotonic};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Failure, Result};
use crate::process::wait_until;

/// Snapshots made, of which the middle one counts.
const MADE: usize = 51;
/// Files that fill the volume between the two counts.
const FILES: u64 = 40;
const BLOCK: usize = 4096;
/// Every block of a file is written by a call of its own.
const BLOCKS: usize = 8192;
/// Turns of overwriting, of which the middle one counts.
const TURNS: usize = 7;
/// For so long is measured what a writer waits for, before and while a snapshot is removed.
const WATCHED: Duration = Duration::from_secs(3);
/// Snapshots removed meanwhile.
const REMOVED: u8 = 8;

fn bad(what: &str) -> impl FnOnce(Errno) -> Failure {
    move |errno| {
        Failure::failed(
            format!("{what}: {errno}"),
            "see the logs of the services; --keep leaves them",
        )
    }
}

/// What was done is published by all nodes: what is measured next does not pay for it.
fn rest(world: &World) -> Result<()> {
    wait_until("a cluster at rest", Duration::from_secs(60), || {
        let mut all = true;
        for node in world.local.nodes() {
            let status = world.local.status(node)?;
            all &= status["published"] == status["stream_seq"];
        }
        Ok(all.then_some(()))
    })?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}

/// Makes snapshots and gives them up; microseconds that the middle one took to be made on all members.
fn make(fs: &dyn FileSystem) -> Result<f64> {
    let mut took = Vec::with_capacity(MADE);
    for n in 0..MADE {
        let name = format!("made-{n}").into_bytes();
        let begun = Instant::now();
        fs.make_snapshot(&Caller::ROOT, InodeId::ROOT, &name).map_err(bad("a snapshot"))?;
        took.push(begun.elapsed().as_secs_f64() * 1e6);
        fs.drop_snapshot(&Caller::ROOT, &name).map_err(bad("the end of a snapshot"))?;
        crate::signals::check()?;
    }
    took.sort_by(f64::total_cmp);
    Ok(took[MADE / 2])
}

/// Writes `bytes` into every block of a file; seconds until all members have it.
fn overwrite(fs: &dyn FileSystem, handle: Handle, bytes: usize, fill: u8) -> Result<f64> {
    let data = vec![fill; bytes];
    let begun = Instant::now();
    for block in 0..BLOCKS {
        let at = (block * BLOCK + (BLOCK - bytes) / 2) as u64;
        fs.write(handle, at, &data, false).map_err(bad("a write"))?;
    }
    fs.fsync(handle, true).map_err(bad("an fsync"))?;
    Ok(begun.elapsed().as_secs_f64())
}

fn middle(mut all: [f64; TURNS]) -> f64 {
    all.sort_by(f64::total_cmp);
    all[TURNS / 2]
}

/// The longest wait for an acknowledgement that came between two moments, in milliseconds; 0: none came.
fn longest(acks: &[Ack], from: u64, to: u64) -> f64 {
    let came = acks.windows(2).filter(|two| (from..to).contains(&two[1].at));
    came.map(|two| two[1].at - two[0].at).max().unwrap_or(0) as f64 / 1e6
}

/// The bench.
pub fn snapshot(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[])?;
    let socket = world.local.config(1)?.node.socket;
    let fs = crate::mount::open_source(&socket.display().to_string())?;
    let fs = &*fs;
    let new = |name: &str| -> Result<Handle> {
        let made = fs.create(&Caller::ROOT, InodeId::ROOT, name.as_bytes(), 0o644, O_RDWR);
        Ok(made.map_err(bad("a file"))?.1)
    };
    let empty_us = make(fs)?;
    let handle = new("overwritten")?;
    overwrite(fs, handle, BLOCK, 1)?;
    for n in 0..if bench.quick { FILES / 10 } else { FILES } {
        let file = new(&format!("f{n}"))?;
        overwrite(fs, file, BLOCK, n as u8)?;
        fs.release(file);
        crate::signals::check()?;
    }
    rest(&world)?;
    let filled_us = make(fs)?;
    rest(&world)?;
    // In turns: nothing that a snapshot has, what one has, and again what one has no more.
    let [mut plain, mut first, mut later, mut still, mut parts, mut plain_parts] =
        [[0.0; TURNS]; 6];
    for turn in 0..TURNS {
        plain[turn] = overwrite(fs, handle, BLOCK, 2)?;
        rest(&world)?;
        plain_parts[turn] = overwrite(fs, handle, 512, 3)?;
        rest(&world)?;
        let name = format!("turn-{turn}").into_bytes();
        let again = format!("again-{turn}").into_bytes();
        let make = |name: &[u8]| {
            fs.make_snapshot(&Caller::ROOT, InodeId::ROOT, name).map_err(bad("a snapshot"))
        };
        make(&name)?;
        first[turn] = overwrite(fs, handle, BLOCK, 4)?;
        rest(&world)?;
        // (The second time something is written to new blocks, whatever they are of, it costs more than the third.)
        later[turn] = overwrite(fs, handle, BLOCK, 5)?;
        rest(&world)?;
        still[turn] = overwrite(fs, handle, BLOCK, 5)?;
        rest(&world)?;
        make(&again)?;
        parts[turn] = overwrite(fs, handle, 512, 6)?;
        rest(&world)?;
        for name in [&name, &again] {
            fs.drop_snapshot(&Caller::ROOT, name).map_err(bad("the end of a snapshot"))?;
        }
        rest(&world)?;
        crate::signals::check()?;
    }
    // Snapshots each of which alone has every other block of a file, removed beside a program that writes and syncs.
    for n in 0..REMOVED {
        let name = format!("removed-{n}").into_bytes();
        fs.make_snapshot(&Caller::ROOT, InodeId::ROOT, &name).map_err(bad("a snapshot"))?;
        for block in (0..BLOCKS).step_by(2) {
            let data = [n; BLOCK];
            fs.write(handle, (block * BLOCK) as u64, &data, false).map_err(bad("a write"))?;
        }
        fs.fsync(handle, true).map_err(bad("an fsync"))?;
    }
    rest(&world)?;
    world.local.mount(1)?;
    let path = world.file(1, "records");
    let mut writer = Writer::start(world.under_run(1, &["records", &path, "100000000", "600"])?)?;
    writer.wait_acks(100, Duration::from_secs(20))?;
    let begun = monotonic();
    std::thread::sleep(WATCHED);
    let (mut started, mut took) = (Vec::new(), 0.0f64);
    for n in 0..REMOVED {
        started.push(monotonic());
        let name = format!("removed-{n}").into_bytes();
        let one = Instant::now();
        fs.drop_snapshot(&Caller::ROOT, &name).map_err(bad("the end of a snapshot"))?;
        took = took.max(one.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(WATCHED / u32::from(REMOVED));
    }
    // (What waits still has its end.)
    writer.wait_acks(writer.acks().len() + 1, Duration::from_secs(20))?;
    started.push(monotonic());
    let errors = f64::from(u8::from(writer.has_ended()));
    writer.kill();
    // Of each removal the longest, and as many times without one. (A wait counts where it ends.)
    let acks = writer.acks();
    let without: Vec<u64> = (0..=u64::from(REMOVED))
        .map(|n| begun + (started[0] - begun) * n / u64::from(REMOVED))
        .collect();
    let stalls = |at: &[u64]| {
        let mut all: Vec<f64> = at.windows(2).map(|at| longest(&acks, at[0], at[1])).collect();
        all.sort_by(f64::total_cmp);
        (all[all.len() / 2], all[all.len() - 1])
    };
    let ((alone_middle, alone), (beside_middle, beside)) = (stalls(&without), stalls(&started));
    Ok(vec![
        ("create_us", filled_us),
        ("create_empty_us", empty_us),
        ("write_cost", middle(first) / middle(plain)),
        ("later_cost", middle(later) / middle(plain)),
        ("later_still_cost", middle(still) / middle(plain)),
        ("part_cost", middle(parts) / middle(plain_parts)),
        ("delete_stall_ms", beside),
        ("stall_without_ms", alone),
        ("delete_stall_middle_ms", beside_middle),
        ("stall_without_middle_ms", alone_middle),
        ("delete_ms", took),
        ("errors", errors),
    ])
}
