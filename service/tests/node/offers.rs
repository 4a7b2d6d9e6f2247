//! A node that comes back takes over what it has, and is sent what it lacks: whatever changed meanwhile, wherever it was
//! interrupted.

use std::sync::Arc;

use base::random::Random;
use base::{InodeId, NodeId, crc32c};
use service::core::Node;
use service::core::limits::Limits;
use service::core::message::{SNAPSHOT_HAD, SNAPSHOT_SINCE};
use storage::format::entry::{Op, Stamp, mask};
use storage::limits::BLOCK_BYTES;
use storage::media::{Media, MediaError, Segment, Spare};
use storage::memory::MemoryRegion;

use crate::pass_on::pass_on;
use crate::rig::{Hand, Rig, config_with, format};
use crate::scrub::{agree, flip_in, view, write};

const BLOCK: usize = BLOCK_BYTES as usize;
const TWO: NodeId = NodeId(2);

/// (What has not changed since is not offered: see `since`.)
pub fn limits(offer_blocks: u64) -> Limits {
    Limits { returns: 0, offer_blocks, history: 0, ..Limits::SHIPPED }
}

/// Two nodes and files that both have; then the second is away.
pub fn parted(offer_blocks: u64, seed: u64, files: u8, blocks: usize) -> (Rig, Hand, Vec<InodeId>) {
    parted_with(limits(offer_blocks), seed, files, blocks)
}

pub fn parted_with(
    limits: Limits,
    seed: u64,
    files: u8,
    blocks: usize,
) -> (Rig, Hand, Vec<InodeId>) {
    let mut rig = Rig::with(2, seed, config_with(limits));
    let mut hand = rig.attach(0, 0);
    let mut inodes = Vec::new();
    for n in 0..files {
        let mode = if n % 3 == 0 { 0o100_600 } else { 0o100_644 };
        let ino = hand.create(&mut rig, format!("f{n}").as_bytes(), mode);
        for block in 0..blocks {
            let data = content(n, block);
            hand.append_in(&mut rig, ino, &write(ino, (block * BLOCK) as u64, &data));
        }
        hand.append_in(&mut rig, ino, &write(ino, (blocks * BLOCK) as u64, &[n; 300]));
        inodes.push(ino);
        hand.sync(&mut rig);
    }
    rig.settle();
    for n in 0..2 {
        view(&mut rig, n, 2, &[1], &[]);
    }
    rig.settle();
    (rig, hand, inodes)
}

/// The second is back.
pub fn back(rig: &mut Rig, epoch: u32) {
    for n in 0..2 {
        view(rig, n, epoch, &[1], &[2]);
    }
}

pub fn comes_in(rig: &mut Rig, epoch: u32) {
    for _ in 0..400 {
        rig.pass(20_000_000);
        rig.deliver_all();
        if rig.caught_up.iter().any(|c| (c.0, c.2.0) == (TWO, epoch)) {
            break;
        }
    }
    let_in(rig, epoch);
}

/// The second has caught up, and becomes a member.
pub fn let_in(rig: &mut Rig, epoch: u32) {
    assert!(rig.caught_up.iter().any(|c| (c.0, c.2.0) == (TWO, epoch)), "it has everything");
    for n in 0..2 {
        view(rig, n, epoch + 1, &[1, 2], &[]);
    }
    rig.settle();
    for node in &rig.nodes {
        assert_eq!(node.volume().held(), 0, "nothing is held back any more");
        node.volume().invariants().expect("what is always true");
    }
    agree(rig);
}

/// (taken over, sent) of the second node.
pub fn came(rig: &Rig) -> (u64, u64) {
    let counters = rig.nodes[1].status().counters;
    (counters.taken_over_bytes, counters.snapshot_bytes)
}

#[test]
fn what_has_not_changed_is_not_sent() {
    let (mut rig, mut hand, files) = parted(1024, 1, 6, 60);
    let whole = 6 * 61 * BLOCK_BYTES;
    // A block of one, a few bytes of another, one that grows, one that is cut.
    hand.append_in(&mut rig, files[0], &write(files[0], 5 * BLOCK_BYTES, &[9; BLOCK]));
    hand.append_in(&mut rig, files[1], &write(files[1], 7 * BLOCK_BYTES + 100, &[9; 10]));
    hand.append_in(&mut rig, files[2], &write(files[2], 60 * BLOCK_BYTES + 300, &[9; 10]));
    let cut = Op::Truncate { ino: files[3], size: 1000, clear_setid: false };
    hand.append_in(&mut rig, files[3], &cut);
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    let (taken, sent) = came(&rig);
    // The blocks that were cut off are there no more.
    assert_eq!(taken, whole - 60 * BLOCK_BYTES - 4 * BLOCK_BYTES, "of {whole}, {sent} were sent");
    assert!(sent < 40_000, "{sent} of {whole} bytes were sent");
    // And once more: what came as bytes is taken over as well, and what was taken over before.
    view(&mut rig, 0, 5, &[1], &[]);
    view(&mut rig, 1, 5, &[1], &[]);
    hand.append_in(&mut rig, files[0], &write(files[0], 6 * BLOCK_BYTES, &[8; BLOCK]));
    hand.sync(&mut rig);
    back(&mut rig, 6);
    comes_in(&mut rig, 6);
    let (again, sent) = (came(&rig).0 - taken, came(&rig).1 - sent);
    assert_eq!(again, whole - 60 * BLOCK_BYTES - BLOCK_BYTES);
    assert!(sent < 40_000, "{sent} bytes were sent");
}

/// Another block with the checksum of this one: CRC32C is linear, so that it is found in no time.
pub fn forged(mut block: Vec<u8>) -> Vec<u8> {
    let before = crc32c(0, &block);
    // The last four bytes make up for any others.
    block[..8].copy_from_slice(b"evildoer");
    let forged = (0..32).fold(Vec::new(), |mut rows: Vec<(u32, u32)>, bit| {
        let mut one = block.clone();
        one[BLOCK - 4 + bit / 8] ^= 1 << (bit % 8);
        rows.push((crc32c(0, &one) ^ crc32c(0, &block), 1 << bit));
        rows
    });
    let (mut want, mut flips, mut rows) = (crc32c(0, &block) ^ before, 0, forged);
    for bit in 0..32 {
        let Some(at) = rows.iter().position(|(row, _)| row >> bit & 1 == 1) else { continue };
        let (pivot, what) = rows.swap_remove(at);
        for row in rows.iter_mut().filter(|(row, _)| row >> bit & 1 == 1) {
            *row = (row.0 ^ pivot, row.1 ^ what);
        }
        if want >> bit & 1 == 1 {
            (want, flips) = (want ^ pivot, flips ^ what);
        }
    }
    for bit in (0..32).filter(|bit| flips >> bit & 1 == 1) {
        block[BLOCK - 4 + bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!(crc32c(0, &block), before, "the checksum is forged");
    block
}

/// Block `block` of file `n` of [`parted`].
pub fn content(n: u8, block: usize) -> Vec<u8> {
    (0..BLOCK).map(|i| n ^ (block * 7 + i / 100) as u8).collect()
}

/// Somebody writes what has the checksum of what was there.
#[test]
fn the_same_checksum_is_not_enough() {
    let (mut rig, mut hand, files) = parted(1024, 11, 3, 9);
    let block = forged(content(1, 4));
    hand.append_in(&mut rig, files[1], &write(files[1], 4 * BLOCK_BYTES, &block));
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    // What is compared with it at once is sent as well.
    assert_eq!(came(&rig).0, 2 * 10 * BLOCK_BYTES);
}

#[test]
fn a_node_without_anything_is_offered_nothing() {
    let mut rig = Rig::with(2, 7, config_with(limits(1024)));
    for n in 0..2 {
        view(&mut rig, n, 2, &[1], &[]);
    }
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.append_in(&mut rig, ino, &write(ino, 0, &[7; 4 * BLOCK]));
    hand.sync(&mut rig);
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    assert_eq!(came(&rig).0, 0);
    assert!(came(&rig).1 > 4 * BLOCK_BYTES);
}

/// Rot of the node that comes back is not taken over.
#[test]
fn what_is_rotten_is_not_taken_over() {
    let (mut rig, hand, files) = parted(4, 3, 4, 9);
    for (at, ino) in (0..).zip(&files) {
        flip_in(&rig, 1, *ino, at * BLOCK_BYTES + 10);
    }
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    assert_eq!(came(&rig).0, (4 * 10 - 4) * BLOCK_BYTES);
    assert_eq!(hand.refusals(), 0);
}

/// Blocks that files share are shared on the node, whether it has them or not.
#[test]
fn what_files_share_is_taken_over_once() {
    for seed in 0..4 {
        let (mut rig, mut hand, files) = parted(4, seed, 4, 9);
        let clone = |ino: InodeId, source: InodeId| Op::CloneRange {
            ino,
            offset: 0,
            len: 9 * BLOCK_BYTES,
            source,
            source_offset: 0,
            zeroes: false,
        };
        // Of the same arena, before and after what is in the way.
        hand.append_in(&mut rig, files[2], &clone(files[2], files[1]));
        if seed % 2 == 1 {
            hand.append_in(&mut rig, files[1], &write(files[1], 2 * BLOCK_BYTES, &[1; 3 * BLOCK]));
            hand.append_in(&mut rig, files[2], &clone(files[2], files[1]));
        }
        if seed >= 2 {
            hand.append_in(&mut rig, files[2], &write(files[2], 5000, &[1; 100]));
        }
        hand.sync(&mut rig);
        rig.settle();
        back(&mut rig, 3);
        comes_in(&mut rig, 3);
        let free: Vec<u64> = rig.nodes.iter().map(|n| n.volume().statfs().blocks_free).collect();
        assert_eq!(free[0], free[1]);
        assert_eq!(hand.refusals(), 0);
    }
}

/// A region on a file system with so many bytes left.
struct Below {
    region: Arc<MemoryRegion>,
    free: u64,
}

impl Media for Below {
    fn spare(&self) -> Result<Option<Spare>, MediaError> {
        let mut data = 0;
        for segment in self.region.segments()? {
            data += if matches!(segment, Segment::Arena(_)) { 1 << 20 } else { 0 };
        }
        Ok(Some(Spare { data, reserved: 0, free: self.free }))
    }
    pass_on!(@ back(ranges: &[(Segment, u64, u64)]) -> ());
    pass_on!(@ taken_from(offset: u64) -> u64);
    pass_on!(@ discard(segment: Segment, offset: u64, len: u64) -> ());
    pass_on!(size read write persist fence load64 store64 cas64 copy segments);
}

/// Where the file system below might not have room for both, what was here is given up before the rest comes.
#[test]
fn what_was_here_is_not_in_the_way_of_what_comes() {
    for (free, keeps) in [(20 << 20, false), (64 << 20, true)] {
        let regions: Vec<_> = (1..=2).map(format).collect();
        let below = Arc::new(Below { region: Arc::clone(&regions[1]), free });
        let media = vec![Arc::clone(&regions[0]) as Arc<dyn Media>, below as _];
        let mut rig = Rig::configured(regions, media, 3, config_with(limits(1024)));
        let mut hand = rig.attach(0, 0);
        let file = hand.create(&mut rig, b"file", 0o100_644);
        hand.append_in(&mut rig, file, &write(file, 0, &[5; 9 * BLOCK]));
        hand.sync(&mut rig);
        rig.settle();
        for n in 0..2 {
            view(&mut rig, n, 2, &[1], &[]);
        }
        back(&mut rig, 3);
        comes_in(&mut rig, 3);
        let taken = if keeps { 9 * BLOCK_BYTES } else { 0 };
        assert_eq!(came(&rig).0, taken, "with {free} bytes");
    }
}

/// What is held back is given up where there is no room for it beside what comes.
#[test]
fn a_volume_that_is_nearly_full_finds_room() {
    // 16 MiB: 13 of them in four files.
    let (mut rig, mut hand, files) = parted(64, 5, 4, 830);
    // The first is removed, which the others have never had room beside; then all of another is written anew.
    let op = Op::Unlink { ino: files[0], parent: InodeId::ROOT, name: b"f0", open: false };
    hand.append_in(&mut rig, InodeId::ROOT, &op);
    hand.sync(&mut rig);
    rig.settle();
    for round in 0..2u64 {
        for block in 0..830u64 {
            let data = vec![(round + block) as u8; BLOCK];
            hand.append_in(&mut rig, files[1], &write(files[1], block * BLOCK_BYTES, &data));
            if block % 40 == 0 {
                hand.sync(&mut rig);
            }
        }
    }
    let more = hand.create(&mut rig, b"more", 0o100_600);
    for block in 0..1100u64 {
        hand.append_in(&mut rig, more, &write(more, block * BLOCK_BYTES, &[7; BLOCK]));
        if block % 40 == 0 {
            hand.sync(&mut rig);
        }
    }
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    assert_eq!(hand.refusals(), 0);
    let (taken, sent) = came(&rig);
    assert!(taken >= 830 * BLOCK_BYTES, "{taken} bytes were taken over");
    assert!(sent >= 1900 * BLOCK_BYTES, "{sent} bytes were sent");
}

/// A change of anything.
pub fn change(
    rig: &mut Rig,
    hand: &mut Hand,
    files: &mut Vec<InodeId>,
    random: &mut Random,
    n: u64,
) {
    let ino = files[random.below(files.len() as u64) as usize];
    let offset = random.below(10 * BLOCK_BYTES);
    let most = if random.chance(1, 2) { 200 } else { 12_000 };
    let len = 1 + random.below(most);
    match random.below(12) {
        0 => {
            let size = random.below(12 * BLOCK_BYTES);
            hand.append_in(rig, ino, &Op::Truncate { ino, size, clear_setid: false });
        }
        1 => {
            // A hole, zeroes, or blocks without content.
            let mode = [3, 16, 1][random.below(3) as usize];
            hand.append_in(rig, ino, &Op::Fallocate { ino, offset, len, mode });
        }
        2 => {
            let source = files[random.below(files.len() as u64) as usize];
            let len = (1 + random.below(3)) * BLOCK_BYTES;
            let (offset, source_offset) = (random.below(5) * BLOCK_BYTES, 0);
            let zeroes = false;
            // Refused if the source is shorter.
            if source != ino {
                let clone = Op::CloneRange { ino, offset, len, source, source_offset, zeroes };
                hand.append_in(rig, ino, &clone);
            }
        }
        3 => {
            // Who may read it, and so the arena.
            let mode = if random.chance(1, 2) { 0o600 } else { 0o644 };
            let (uid, gid, time) = (0, 0, Stamp { sec: n as i64, nsec: 7 });
            let (atime, mtime) = (time, time);
            let set = Op::SetAttr { ino, mask: mask::ALL, mode, uid, gid, atime, mtime };
            hand.append_in(rig, ino, &set);
        }
        4 => {
            let name = format!("n{n}");
            files.push(hand.create(rig, name.as_bytes(), 0o100_644));
        }
        _ => {
            hand.append_in(rig, ino, &write(ino, offset, &vec![n as u8; len as usize]));
        }
    }
}

/// nicfs of the second node dies, and its machine perhaps; it comes back with what is left.
pub fn dies(rig: &mut Rig, random: &mut Random, limits: Limits) {
    if random.chance(1, 2) {
        rig.regions[1] = Arc::new(rig.regions[1].cut(random));
    }
    starts_again(rig, random, limits);
}

/// The process of the second ends, and there is another one.
pub fn starts_again(rig: &mut Rig, random: &Random, limits: Limits) {
    for (to, from, queue) in &mut rig.links {
        if *to == TWO || *from == TWO {
            queue.clear();
        }
    }
    rig.pieces.retain(|(n, _)| *n != 1);
    let media = Arc::clone(&rig.regions[1]) as Arc<dyn Media>;
    let config = config_with(limits);
    rig.nodes[1] = Node::new(config(2), media, random.clone()).expect("a node");
}

/// How something changes: with nodes, a client and its files, and a number that is new.
pub type Change = fn(&mut Rig, &mut Hand, &mut Vec<InodeId>, &mut Random, u64);

#[test]
fn it_goes_on_wherever_it_is_interrupted() {
    let (taken, deaths) = interrupted(0..60, change, |_| {});
    assert!(taken > 60 * 20 * BLOCK_BYTES && deaths > 30, "{taken} bytes, {deaths} deaths");
}

/// Histories of a node that goes and comes back, while its links end, and it dies, in the middle of that; how many bytes it took over in all, and how
/// often it died. `check` looks at both nodes whenever it is back.
pub fn interrupted(seeds: std::ops::Range<u64>, change: Change, check: fn(&mut Rig)) -> (u64, u64) {
    interrupted_with(seeds, |_, _| {}, |_, _| Vec::new(), change, check)
}

/// The same with so many publications known, and more files, which both have.
pub fn interrupted_with(
    seeds: std::ops::Range<u64>,
    draw: fn(&mut Random, &mut Limits),
    begin: fn(&mut Rig, &mut Hand) -> Vec<InodeId>,
    change: Change,
    check: fn(&mut Rig),
) -> (u64, u64) {
    let (mut taken, mut deaths) = (0, 0);
    for seed in seeds {
        let mut random = Random::new(0x0ffe4 + seed);
        let blocks = [1, 3, 64, 1024][random.below(4) as usize];
        let mut limits = limits(blocks);
        draw(&mut random.clone(), &mut limits);
        let (mut rig, mut hand, mut files) = parted_with(limits, seed, 6, 9);
        let mut epoch = 2;
        let more = begin(&mut rig, &mut hand);
        if !more.is_empty() {
            files.extend(more);
            epoch += 1;
            back(&mut rig, epoch);
            comes_in(&mut rig, epoch);
            epoch += 2;
            for n in 0..2 {
                view(&mut rig, n, epoch, &[1], &[]);
            }
        }
        let mut n = 0;
        for _ in 0..1 + random.below(3) {
            for _ in 0..random.below(30) {
                n += 1;
                change(&mut rig, &mut hand, &mut files, &mut random, n);
            }
            hand.sync(&mut rig);
            if random.chance(1, 3) {
                rig.settle();
            }
            if random.chance(1, 3) {
                dies(&mut rig, &mut random, limits);
            }
            epoch += 1;
            back(&mut rig, epoch);
            // Something of it arrives, while more changes.
            for _ in 0..random.below(60) {
                for link in 0..rig.links.len() {
                    (0..random.below(3)).for_each(|_| _ = rig.deliver(link));
                }
                match random.below(20) {
                    0 => rig.renew(NodeId(1), TWO),
                    1 => {
                        dies(&mut rig, &mut random, limits);
                        deaths += 1;
                        epoch += 1;
                        view(&mut rig, 0, epoch, &[1], &[]);
                        epoch += 1;
                        back(&mut rig, epoch);
                    }
                    2..8 => {
                        n += 1;
                        change(&mut rig, &mut hand, &mut files, &mut random, n);
                        hand.ring(&mut rig);
                    }
                    _ => {}
                }
                rig.pass(random.below(3_000_000));
                for node in &rig.nodes {
                    assert_eq!(node.cheap_invariants(), Ok(()));
                }
            }
            hand.sync(&mut rig);
            comes_in(&mut rig, epoch);
            rig.pass(200_000_000);
            rig.settle();
            epoch += 2;
            for n in 0..2 {
                view(&mut rig, n, epoch, &[1], &[]);
            }
            rig.settle();
            check(&mut rig);
            taken += came(&rig).0;
        }
    }
    (taken, deaths)
}

/// A head of the version before this one does not know that somebody may have something, and is asked in its own words as well.
#[test]
fn a_head_that_offers_nothing_sends_everything() {
    let (mut rig, _, _) = parted(1024, 2, 3, 9);
    back(&mut rig, 3);
    for _ in 0..60 {
        for (_, _, queue) in &mut rig.links {
            queue.retain(|(kind, _)| ![SNAPSHOT_HAD, SNAPSHOT_SINCE].contains(kind));
        }
        rig.deliver_all();
        rig.pass(20_000_000);
    }
    comes_in(&mut rig, 3);
    let (taken, sent) = came(&rig);
    assert!(taken == 0 && sent > 3 * 9 * BLOCK_BYTES, "{taken} taken over, {sent} sent");
}

/// Who says so limits what a node that joins takes of a link, and sees how far it is.
#[test]
fn a_snapshot_has_a_pace() {
    let limits = Limits { join_rate: 1 << 20, ..limits(0) };
    let mut rig = Rig::with(2, 3, config_with(limits));
    let mut hand = rig.attach(0, 0);
    for n in 0..4u8 {
        let ino = hand.create(&mut rig, &[b'a' + n], 0o100_644);
        hand.append_in(&mut rig, ino, &write(ino, 0, &[n; 128 << 10]));
        hand.append_in(&mut rig, ino, &write(ino, 128 << 10, &[n; 128 << 10]));
        hand.sync(&mut rig);
    }
    rig.settle();
    for n in 0..2 {
        view(&mut rig, n, 2, &[1], &[]);
    }
    back(&mut rig, 3);
    let (begun, mut seen) = (rig.now, Vec::new());
    for _ in 0..100 {
        rig.pass(10_000_000);
        rig.deliver_all();
        seen.extend(rig.nodes[0].status().joins);
        if let Some(at) = rig.nodes[0].deadline() {
            assert!(at > rig.now, "nothing is due");
        }
        if rig.caught_up.iter().any(|c| c.0 == TWO) {
            break;
        }
    }
    // The last of four pieces is not waited for.
    let took = rig.now - begun;
    assert!((700_000_000..1_200_000_000).contains(&took), "{took} ns for a MiB");
    assert!(seen.iter().any(|s| s.passed > 0 && s.passed < s.inodes && s.sent > 100_000));
    comes_in(&mut rig, 3);
}

/// What goes wrong without it is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn what_is_taken_over_wrongly_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 6] = [
        (Bug::TakenOverRotten, what_is_rotten_is_not_taken_over),
        (Bug::TakenOverUnseen, what_has_not_changed_is_not_sent),
        (Bug::OfferUnawaited, what_has_not_changed_is_not_sent),
        (Bug::CloneUnawaited, what_files_share_is_taken_over_once),
        (Bug::WantedLeavesTimes, what_has_not_changed_is_not_sent),
        (Bug::DoubtedTaken, the_same_checksum_is_not_enough),
    ];
    assert_eq!(missed(&tests), []);
}
