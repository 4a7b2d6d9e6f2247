//! Checksums of data blocks: right after every publication, however copies are cut; and what is rotten stays known as such, whatever is
//! written around it or copied from it.

mod common;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use base::random::Random;
use base::{Epoch, InodeId, StreamSeq};
use common::{Dir, Driver, FILE, chmod, create, params, truncate, write};
use storage::check::{Data, Report, Severity, check, check_with_data};
use storage::format::entry::Op;
use storage::format::sum::sum_at;
use storage::format::superblock::{SUPERBLOCK_AT, Superblock};
use storage::limits::BLOCK_BYTES;
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;
use storage::volume::{CopyItem, Summing, Volume, add_sums, back_copies, run_copies, summing_at};

const BLOCK: usize = BLOCK_BYTES as usize;

fn judge(media: &dyn Media) -> Report {
    check_with_data(media, &mut Data { pending: &[], progress: &mut |_, _| {} }).unwrap()
}

#[track_caller]
fn assert_right(d: &Driver) {
    let report = judge(&*d.media);
    assert!(report.is_sound(), "{:#?}", report.findings);
    assert_eq!((report.counts.rotten, report.counts.unsummed), (0, 0));
}

/// Where a byte of a file lies.
fn place(d: &Driver, ino: u64, offset: u64) -> (Segment, u64) {
    let extents = d.volume.extents(InodeId(ino), offset, 1).unwrap();
    let extent = extents[0];
    assert!(extent.offset <= offset && offset < extent.offset + extent.len);
    (Segment::Arena(extent.arena), extent.arena_offset + offset - extent.offset)
}

fn flip(d: &Driver, ino: u64, offset: u64) {
    let (segment, at) = place(d, ino, offset);
    let mut byte = [0];
    d.media.read(segment, at, &mut byte).unwrap();
    byte[0] ^= 0x10;
    d.media.write(segment, at, &byte).unwrap();
}

/// The blocks of files that are not what their checksums say.
fn rotten(d: &Driver) -> Vec<String> {
    let report = judge(&*d.media);
    assert_eq!(report.counts.rotten, report.total, "{:#?}", report.findings);
    report.findings.into_iter().map(|f| f.place).collect()
}

fn clone(ino: u64, source: u64, len: u64) -> Op<'static> {
    let (ino, source) = (InodeId(ino), InodeId(source));
    Op::CloneRange { ino, offset: 0, len, source, source_offset: 0, zeroes: false }
}

#[test]
fn a_flipped_bit_is_found_and_one_that_was_flipped_back_is_none() {
    let mut d = Driver::new(8 << 20);
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    let data: Vec<u8> = (0..9 * BLOCK + 100).map(|i| (i * 7) as u8).collect();
    d.must(&write(2, 0, &data)).unwrap();
    d.publish();
    assert_right(&d);
    for offset in [0, 4095, 4096, 5 * 4096 + 17, 9 * 4096 + 99, 9 * 4096 + 4000] {
        flip(&d, 2, offset);
        assert!(check(&*d.media).unwrap().is_sound(), "the tree is");
        assert_eq!(rotten(&d), [format!("inode 2, block {}", offset / 4096)]);
        flip(&d, 2, offset);
    }
    assert_right(&d);
}

#[test]
fn a_block_stays_rotten_until_all_of_it_is_written() {
    let mut d = Driver::new(8 << 20);
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    d.must(&write(2, 0, &vec![1; 4 * BLOCK])).unwrap();
    d.publish();
    flip(&d, 2, 5000);
    // A part of it, elsewhere, and over what is wrong.
    for (offset, len) in [(4096, 100), (8000, 500), (4990, 20)] {
        d.must(&write(2, offset, &vec![2; len])).unwrap();
        d.publish();
        assert_eq!(rotten(&d), ["inode 2, block 1"]);
    }
    // Parts of the end become zeroes.
    d.must(&truncate(2, 6000)).unwrap();
    d.publish();
    assert_eq!(rotten(&d), ["inode 2, block 1"]);
    d.must(&write(2, 4096, &vec![3; BLOCK])).unwrap();
    d.publish();
    assert_right(&d);
}

#[test]
fn a_copy_of_what_is_rotten_is_rotten() {
    let mut d = Driver::new(8 << 20);
    for (ino, name, mode) in [(2, b"a", FILE), (3, b"b", FILE), (4, b"c", 0o100600)] {
        d.must(&create(ino, 1, name, mode)).unwrap();
    }
    d.must(&write(2, 0, &vec![1; 4 * BLOCK])).unwrap();
    d.publish();
    flip(&d, 2, 2 * 4096 + 1);
    // Shared, so one block; and copied, since others may read it.
    d.must(&clone(3, 2, 4 * BLOCK_BYTES)).unwrap();
    d.must(&clone(4, 2, 4 * BLOCK_BYTES)).unwrap();
    d.publish();
    assert_eq!(rotten(&d), ["inode 2, block 2", "inode 4, block 2"]);
    // Shared no more: the rest of the block is copied.
    d.must(&write(3, 2 * 4096 + 2000, &[5; 10])).unwrap();
    d.publish();
    let mut found = rotten(&d);
    found.sort();
    assert_eq!(found, ["inode 2, block 2", "inode 3, block 2", "inode 4, block 2"]);
    // To another arena as a whole.
    d.must(&chmod(2, 0o600)).unwrap();
    d.publish();
    assert_eq!(rotten(&d).len(), 3);
}

/// Random writes, cuts, holes and clones; copies run in random pieces, now and then from a place before, as after somebody was killed.
fn churn(seed: u64, media: Arc<dyn Media>, ops: usize) {
    let mut random = Random::new(seed);
    media.ensure(Segment::Stream, common::STREAM).unwrap();
    let volume = Volume::format(media.clone(), &params(4 << 20)).unwrap();
    let (sequence, position, time) = (0, 0, 2_000_000_000);
    let mut d = Driver { dir: Dir::new(), media, volume, sequence, position, time };
    for ino in 2..8 {
        let mode = if ino % 2 == 0 { FILE } else { 0o100600 };
        d.must(&create(ino, 1, format!("f{ino}").as_bytes(), mode)).unwrap();
    }
    let mut since = 0;
    for n in 0..ops {
        let ino = 2 + random.below(6);
        let offset = random.below(100_000) & !(if random.chance(1, 2) { 4095 } else { 0 });
        let len = match random.below(3) {
            0 => random.below(200) + 1,
            1 => BLOCK_BYTES * (1 + random.below(20)),
            _ => random.below(30_000) + 1,
        };
        let data = vec![n as u8; len as usize];
        let id = InodeId(ino);
        let op = match random.below(12) {
            0 => truncate(ino, offset),
            1 => Op::Fallocate { ino: id, offset, len, mode: 3 },
            2 => Op::Fallocate { ino: id, offset, len, mode: 16 },
            3 => Op::Fallocate { ino: id, offset, len, mode: 0 },
            4 => {
                let size = d.volume.attr(InodeId(2)).unwrap().unwrap().size;
                clone(ino, 2, size.max(1))
            }
            5 => chmod(ino, if random.chance(1, 2) { 0o644 } else { 0o600 }),
            _ => write(ino, offset, &data),
        };
        let _ = d.must(&op);
        since += 1;
        if since > random.below(30) {
            since = 0;
            in_pieces(&mut d, &mut random);
        }
    }
    in_pieces(&mut d, &mut random);
}

fn in_pieces(d: &mut Driver, random: &mut Random) {
    let sealed = d.volume.seal(StreamSeq(d.sequence), Epoch(1), &[]).unwrap();
    back_copies(&*d.media, &sealed.copies).unwrap();
    let mut pieces = Vec::new();
    for item in &sealed.copies {
        let mut at = 0;
        loop {
            let part = item.part(at, 1 + random.below(20_000));
            pieces.push(part);
            at += part.bytes();
            if at >= item.bytes() {
                break;
            }
        }
    }
    let run = |from: usize, to: usize, again: bool| {
        let mut items = Vec::new();
        let all = summing_at(&pieces, from).into_iter().chain(pieces[from..to].iter().copied());
        items.extend(all.map(|item| match item {
            CopyItem::Summing(s) => CopyItem::Summing(Summing { again: s.again || again, ..s }),
            item => item,
        }));
        run_copies(&*d.media, &items).unwrap();
    };
    let mut at = 0;
    while at < pieces.len() {
        let to = at + 1 + random.below(10).min((pieces.len() - at - 1) as u64) as usize;
        if random.chance(1, 5) {
            // Half of it, by somebody who is killed; without his last sums.
            let half = at + (to - at) / 2;
            let kept: Vec<_> = pieces[at..half]
                .iter()
                .filter(|item| matches!(item, CopyItem::Copy { .. } | CopyItem::Zero { .. }))
                .copied()
                .collect();
            run_copies(&*d.media, &kept).unwrap();
            run(at, to, true);
        } else {
            run(at, to, false);
        }
        at = to;
    }
    d.volume.publish(sealed).unwrap();
    assert_right(d);
}

#[test]
fn sums_are_right_however_copies_are_cut() {
    for seed in 0..12 {
        println!("seed {seed}");
        churn(seed, Arc::new(MemoryRegion::new()), 250);
    }
    let dir = Dir::new();
    churn(100, dir.region(), 400);
}

/// Of the version before: it is read and written as it was, and nothing of it is compared.
#[test]
fn a_volume_without_sums_goes_on_without() {
    let mut d = Driver::new(8 << 20);
    let old = Superblock { sums: false, ..d.volume.superblock().clone() };
    for at in SUPERBLOCK_AT {
        d.media.write(Segment::Super, at, &old.encode()).unwrap();
    }
    d.reopen();
    assert_eq!(d.volume.sums_base(), None);
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    d.must(&write(2, 0, &vec![1; 3 * BLOCK])).unwrap();
    d.publish();
    flip(&d, 2, 5000);
    let report = judge(&*d.media);
    assert!(report.findings.iter().all(|f| f.severity == Severity::Note));
    assert_eq!(report.counts.compared, 0);
    d.reopen();
    assert_eq!(d.read(2)[0], 1);
    // It is given some in place; from then on a flipped bit is found.
    assert_eq!(add_sums(&d.media, &mut |_, _| {}).unwrap(), Some(3));
    assert_eq!(add_sums(&d.media, &mut |_, _| {}).unwrap(), None);
    d.reopen();
    assert_right(&d);
    d.must(&write(2, 100, &vec![2; 5 * BLOCK])).unwrap();
    d.publish();
    assert_right(&d);
    flip(&d, 2, 17);
    assert_eq!(rotten(&d), ["inode 2, block 0"]);
}

/// The entry of a block that has content is gone: whatever is written around it or copied from it, it stays known as rotten.
#[test]
fn a_block_that_has_lost_its_checksum_is_rotten() {
    let mut d = Driver::new(8 << 20);
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    d.must(&create(3, 1, b"b", 0o100600)).unwrap();
    d.must(&write(2, 0, &vec![1; 3 * BLOCK])).unwrap();
    d.publish();
    let (segment, at) = place(&d, 2, 5000);
    let entry = sum_at(d.volume.sums_base().unwrap(), at / BLOCK_BYTES);
    d.media.write(segment, entry, &[0; 8]).unwrap();
    assert_eq!(rotten(&d), ["inode 2, block 1"]);
    d.must(&write(2, 4096, &[2; 100])).unwrap();
    d.must(&clone(3, 2, 3 * BLOCK_BYTES)).unwrap();
    d.publish();
    assert_eq!(rotten(&d), ["inode 2, block 1", "inode 3, block 1"]);
    d.must(&write(2, 4096, &vec![3; BLOCK])).unwrap();
    d.must(&write(3, 4096, &vec![3; BLOCK])).unwrap();
    d.publish();
    assert_right(&d);
}

/// Two files have parts of a third one's blocks: those between are read as well.
#[test]
fn blocks_between_shared_ones_are_read() {
    for flipped in [30, 0, 9, 10, 49, 50, 63, 64, 99] {
        let mut d = Driver::new(8 << 20);
        for (ino, name) in [(2, b"a"), (3, b"b"), (4, b"c")] {
            d.must(&create(ino, 1, name, FILE)).unwrap();
        }
        d.must(&write(4, 0, &vec![1; 100 * BLOCK])).unwrap();
        for (ino, from, to) in [(2, 0, 10), (3, 50, 64), (2, 5, 9), (3, 64, 70)] {
            let (ino, source) = (InodeId(ino), InodeId(4));
            let (at, len) = (from * BLOCK_BYTES, (to - from) * BLOCK_BYTES);
            let op =
                Op::CloneRange { ino, offset: at, len, source, source_offset: at, zeroes: false };
            d.must(&op).unwrap();
        }
        d.publish();
        assert_right(&d);
        flip(&d, 4, flipped * BLOCK_BYTES + 17);
        let found = rotten(&d);
        assert_eq!(found.len(), 1, "block {flipped}: {found:?}");
        assert!(found[0].ends_with(&format!("block {flipped}")), "{found:?}");
        let report = judge(&*d.media);
        assert_eq!(report.counts.compared, 100, "each is read once");
    }
}

/// Interrupted between the two copies of the superblock: it is of the new version, `fsck` says what is to be done, and that ends it.
#[test]
fn an_upgrade_that_was_interrupted_is_ended() {
    for newer in [0, 1] {
        let mut d = Driver::new(8 << 20);
        d.must(&create(2, 1, b"a", FILE)).unwrap();
        d.must(&write(2, 0, &vec![1; 3 * BLOCK])).unwrap();
        d.publish();
        let old = Superblock { sums: false, ..d.volume.superblock().clone() };
        d.media.write(Segment::Super, SUPERBLOCK_AT[1 - newer], &old.encode()).unwrap();
        d.reopen();
        assert!(d.volume.sums_base().is_some());
        let report = judge(&*d.media);
        let damage = report.findings.iter().any(|f| f.severity == Severity::Damage);
        assert!(!damage && report.total == 1, "{:#?}", report.findings);
        assert!(report.findings[0].remedy.contains("corbel upgrade"));
        assert_eq!(report.counts.compared, 3);
        assert_eq!(add_sums(&d.media, &mut |_, _| {}).unwrap(), Some(0));
        assert_eq!(add_sums(&d.media, &mut |_, _| {}).unwrap(), None);
        assert_right(&d);
        assert_eq!(judge(&*d.media).total, 0);
    }
    // Copies that differ otherwise are of no upgrade.
    let d = Driver::new(8 << 20);
    let other = Superblock { created: 5, sums: false, ..d.volume.superblock().clone() };
    d.media.write(Segment::Super, SUPERBLOCK_AT[1], &other.encode()).unwrap();
    assert!(Volume::open(d.media.clone()).is_err());
    assert!(!judge(&*d.media).is_sound());
}

/// What a list of copies touches has memory before, also blocks that it says to be fresh and whose content comes with the next list.
#[test]
fn fresh_blocks_are_backed() {
    let mut d = Driver::new(8 << 20);
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    d.must(&write(2, 100, &[1; 10])).unwrap();
    let sealed = d.volume.seal(StreamSeq(d.sequence), Epoch(1), &[]).unwrap();
    let fresh = sealed.copies.iter().position(|c| matches!(c, CopyItem::Fresh { .. })).unwrap();
    let CopyItem::Fresh { to, .. } = sealed.copies[fresh] else { unreachable!() };
    let taken = || {
        let file = d.dir.0.join(storage::region::file_name(to.0));
        std::fs::metadata(file).unwrap().blocks() * 512
    };
    let before = taken();
    back_copies(&*d.media, &sealed.copies[..=fresh]).unwrap();
    assert!(taken() >= before + 2 * BLOCK_BYTES, "a block, and one of entries");
}
