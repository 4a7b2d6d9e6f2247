//! What checksums at rest cost, and what they are for: bits flipped in file data and tree pages of one member, found and
//! mended by a scrub. Beside it runs a cluster on regions of the version before, which have none.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::InodeId;
use base::random::Random;
use serde_json::Value;
use storage::check::{Data, check_with_data};
use storage::format::superblock::{Durability, SUPERBLOCK_AT};
use storage::limits::BLOCK_BYTES;
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{Volume, read_superblocks};

use super::load::{figures, number};
use super::steady::{median, turns};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Failure, Result};
use crate::local::Local;

/// Bits flipped.
const FLIPS: usize = 1000;
/// Of these, so many at most in pages of the tree.
const IN_PAGES: usize = 100;
/// Bytes that are written one after the other.
const BYTES: u64 = 256 << 20;
/// The member whose bits are flipped.
const VICTIM: u32 = 2;

/// Says where it went wrong.
fn bad<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> Failure {
    move |e| Failure::failed(format!("{what}: {e}"), "the region was not what this expects")
}

fn region(local: &Local, node: u32) -> Result<Arc<FileRegion>> {
    let path = local.config(node)?.node.region;
    Ok(Arc::new(FileRegion::open(&path, Durability::Replicated).map_err(bad(path.display()))?))
}

/// Makes the regions of a cluster what the version before has made.
fn without_sums(local: &Local) -> Result<()> {
    for node in local.nodes() {
        let region = region(local, node)?;
        let what = || format!("superblock of node {node}");
        let [first, _] = read_superblocks(&*region).map_err(bad(what()))?;
        let mut superblock = first.map_err(bad(what()))?;
        superblock.sums = false;
        for at in SUPERBLOCK_AT {
            region.write(Segment::Super, at, &superblock.encode()).map_err(bad(what()))?;
        }
    }
    Ok(())
}

/// Waits until all nodes of both clusters have published what is in their streams, and do nothing any more: what one load leaves
/// behind is no part of the next.
fn rest(worlds: [&World; 2]) -> Result<()> {
    let at_rest = |status: &Value| -> Result<bool> {
        Ok(number(status, "published")? == number(status, "stream_seq")?)
    };
    for _ in 0..600 {
        let mut all = true;
        for world in worlds {
            for node in world.local.nodes() {
                all &= at_rest(&world.local.status(node)?)?;
            }
        }
        // Freed blocks are cleared after that.
        std::thread::sleep(Duration::from_millis(50));
        if all {
            std::thread::sleep(Duration::from_millis(100));
            return Ok(());
        }
    }
    Err(Failure::failed("the clusters do not come to rest", "is the machine overloaded?"))
}

/// MB/s of sequential writes.
fn sequential(world: &World, turn: u32) -> Result<f64> {
    let path = world.file(1, &format!("seq-{turn}"));
    let count = (BYTES / 16384).to_string();
    let got = figures(world.under_run(1, &["seq", &path, "16384", &count])?)?;
    Ok(BYTES as f64 / 1e6 / number(&got, "seconds")?)
}

/// Microseconds of an append with fsync.
fn appended(world: &World, _turn: u32) -> Result<f64> {
    let path = world.file(1, "append");
    let got = figures(world.under_run(1, &["append", &path, "4096", "400"])?)?;
    Ok(number(&got, "p50_ns")? / 1e3)
}

/// So often in a turn each cluster appends: a process has its p50 from where it and the services came to run, and the next one another.
const APPENDS: u32 = 7;

/// One load on both clusters, so often on each, each time after a rest: the one that was first is second the next time, and both
/// have been as often behind the other.
fn both(
    worlds: [&World; 2],
    (turn, times): (u32, u32),
    load: impl Fn(&World, u32) -> Result<f64>,
) -> Result<[Vec<f64>; 2]> {
    let mut all = [Vec::new(), Vec::new()];
    for time in turn..turn + times {
        let first = (time % 2) as usize;
        for which in [first, 1 - first] {
            rest(worlds)?;
            all[which].push(load(worlds[which], turn % 2)?);
        }
    }
    Ok(all)
}

/// The lower quartile: what else the machine does only makes things slower.
fn quartile(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 4]
}

/// Where each flipped bit lies: no two in one block or page.
fn flip(region: &Arc<FileRegion>, random: &mut Random) -> Result<usize> {
    let media = Arc::clone(region) as Arc<dyn Media>;
    let volume = Volume::open(media).map_err(bad("region of the victim"))?;
    let pages: Vec<u64> =
        (0..volume.page_numbers()).filter(|number| volume.tree().is_used(*number)).collect();
    let (mut blocks, mut at) = (Vec::new(), (InodeId::NONE, 0));
    loop {
        let (found, next) =
            volume.content_after(at.0, at.1, 1000).map_err(bad("tree of the victim"))?;
        if let Some((_, run)) = found {
            blocks.extend((0..run.len).map(|n| (run.arena, run.block + n)));
        }
        let Some(next) = next else { break };
        at = next;
    }
    let (mut places, mut tries) = (BTreeSet::new(), 0);
    while places.len() < FLIPS && tries < 100 * FLIPS {
        tries += 1;
        let page = pages[random.below(pages.len() as u64) as usize];
        let (arena, block) = blocks[random.below(blocks.len() as u64) as usize];
        let in_pages = places.range((Segment::Tree, 0)..=(Segment::Tree, u64::MAX)).count();
        match in_pages < IN_PAGES.min(pages.len() / 2) {
            true => places.insert((Segment::Tree, page)),
            false => places.insert((Segment::Arena(arena), block)),
        };
    }
    for (segment, block) in &places {
        let at = block * BLOCK_BYTES + random.below(BLOCK_BYTES);
        let mut byte = [0];
        region.read(*segment, at, &mut byte).map_err(bad("a byte"))?;
        byte[0] ^= 1 << random.below(8);
        region.write(*segment, at, &byte).map_err(bad("a byte"))?;
    }
    Ok(places.len())
}

/// Processor time of nicfs, in seconds.
fn spent(world: &World) -> f64 {
    // USER_HZ is 100.
    world.local.process(VICTIM, "nicfs").map_or(f64::NAN, |nicfs| nicfs.cpu_ticks() as f64 / 100.0)
}

fn scrub(world: &World) -> Result<Value> {
    let said = world.local.corbel(VICTIM, &["scrub", "--json"])?;
    let last = said.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(bad("corbel scrub --json"))
}

/// The bench `integrity`.
pub fn integrity(bench: &Bench<'_>) -> Result<Measured> {
    if bench.replicas < 2 {
        return Err(Failure::new(
            crate::failure::Kind::Usage,
            "healing with one replica",
            "it takes the block from another one: --replicas 2 or 3",
        ));
    }
    let world = World::start(bench, World::plan(bench), &[1])?;
    let before = World::start_on(bench, World::plan(bench), &[1], without_sums)?;
    // What is touched for the first time takes longer.
    for world in [&world, &before] {
        for turn in 0..2 {
            sequential(world, turn)?;
        }
        appended(world, 0)?;
    }
    let (mut turn, mut times) = (0, [Vec::new(), Vec::new()]);
    let [speed, speed_before, write_cost] = turns(|| {
        turn += 1;
        let worlds = [&world, &before];
        let [speed, speed_before] = both(worlds, (turn, 3), sequential)?.map(median);
        for (all, some) in times.iter_mut().zip(both(worlds, (turn, APPENDS), appended)?) {
            all.extend(some);
        }
        // Of each turn: what else the machine does changes from one to the next.
        Ok([speed, speed_before, 1.0 - speed / speed_before])
    })?;
    let [p50, p50_before] = times.map(quartile);
    let fsync_cost = p50 / p50_before - 1.0;
    drop(before);
    // What is on its way to the media is there.
    std::thread::sleep(Duration::from_millis(500));
    let region = region(&world.local, VICTIM)?;
    let flips = flip(&region, &mut Random::new(7))?;
    let found = scrub(&world)?;
    let begun = spent(&world);
    let again = scrub(&world)?;
    let (bytes, seconds) = (number(&again, "bytes")?, spent(&world) - begun);
    let mut data = Data { pending: &[], progress: &mut |_, _| {} };
    let report = check_with_data(&*region, &mut data).map_err(bad("region of the victim"))?;
    Ok(vec![
        ("flips", flips as f64),
        ("noticed", number(&found, "rotten")?),
        ("healed", number(&found, "mended")?),
        ("left", report.total as f64 + number(&again, "rotten")?),
        ("not_healed", flips as f64 - number(&found, "mended")?),
        ("write_cost", write_cost),
        ("fsync_cost", fsync_cost),
        ("scrub_mb_s", bytes / 1e6 / seconds.max(0.01)),
        ("scrub_ms", number(&again, "ms")?),
        ("mb_s", speed),
        ("mb_s_without", speed_before),
        ("p50_us", p50),
        ("p50_us_without", p50_before),
    ])
}
