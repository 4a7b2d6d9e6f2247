//! Snapshots of a volume: what they show, what they hold back, and what is free when they are gone. (Histories of everything,
//! with snapshots in them, are in `model`.)

mod common;

use base::random::Random;
use base::{Epoch, InodeId, StreamSeq};
use common::whole::{differences, differences_are_complete};
use common::*;
use storage::check::{Data, Touched, check_with_data};
use storage::format::entry::Op;
use storage::format::item::{Run, kind};
use storage::format::page::Key;
use storage::format::rpc::Difference;
use storage::volume::image::SentBlocks;
use storage::volume::{Refusal, Volume, read_roots, run_copies};

const BLOCK: usize = 4096;

fn snapshot(name: &[u8]) -> Op<'_> {
    Op::Snapshot { ino: InodeId::ROOT, name }
}

fn drop_snapshot(name: &[u8]) -> Op<'_> {
    Op::DropSnapshot { ino: InodeId::ROOT, name }
}

/// The state that a snapshot is.
fn state<'a>(volume: &'a mut Volume, name: &[u8]) -> Option<&'a Volume> {
    let slot = volume.snapshot_named(name).unwrap().slot;
    volume.read_snapshot(slot)
}

/// The content of a file as a snapshot has it.
fn read(d: &mut Driver, name: &[u8], ino: u64) -> Vec<u8> {
    let state = state(&mut d.volume, name).unwrap();
    let size = state.attr(InodeId(ino)).unwrap().unwrap().size;
    let (mut bytes, mut wrong) = (vec![0xaa; size as usize], Vec::new());
    assert_eq!(state.read_checked(InodeId(ino), 0, &mut bytes, &mut wrong), Ok(bytes.len()));
    assert_eq!(wrong, [], "what a snapshot has is what its checksums say");
    bytes
}

fn assert_sound(d: &Driver) {
    let mut data = Data { pending: &[], progress: &mut |_, _| {} };
    let report = check_with_data(&*d.media, &mut data).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    assert_eq!(report.counts.snapshot_pages, d.volume.tree().kept_pages());
    assert_eq!(report.counts.snapshot_blocks, d.volume.snapshot_blocks());
    d.volume.invariants().unwrap();
}

/// Nothing is lost: what a new start finds free is free here.
fn assert_same_after_reopen(d: &mut Driver) {
    let digest = d.volume.digest();
    let free = (d.volume.tree().free_pages(), d.volume.statfs().blocks_free);
    d.reopen();
    assert_eq!(d.volume.digest(), digest);
    assert_eq!((d.volume.tree().free_pages(), d.volume.statfs().blocks_free), free);
}

#[test]
fn what_is_overwritten_stays_in_the_snapshot() {
    let mut d = Driver::new(4 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&write(2, 0, &[1; 3 * BLOCK])).unwrap();
    // Neither what came before nor what comes after is published when it is made.
    d.must(&snapshot(b"s")).unwrap();
    d.must(&write(2, 100, &[2; 50])).unwrap();
    d.must(&write(2, BLOCK as u64, &[3; BLOCK])).unwrap();
    d.must(&truncate(2, 2 * BLOCK as u64 + 7)).unwrap();
    assert!(state(&mut d.volume, b"s").is_none(), "not all of it is on media");
    d.publish();
    for _ in 0..2 {
        assert_eq!(read(&mut d, b"s", 2), [1; 3 * BLOCK]);
        let now = d.read(2);
        assert_eq!((now.len(), now[99], now[100], now[150]), (2 * BLOCK + 7, 1, 2, 1));
        assert!(now[BLOCK..2 * BLOCK] == [3; BLOCK] && now[2 * BLOCK..] == [1; 7]);
        assert_sound(&d);
        assert_same_after_reopen(&mut d);
    }
    // Each block is copied once, and not again.
    let free = d.volume.statfs().blocks_free;
    d.must(&write(2, 0, &[4; 2 * BLOCK])).unwrap();
    d.publish();
    assert_eq!(d.volume.statfs().blocks_free, free);
    assert_eq!(read(&mut d, b"s", 2), [1; 3 * BLOCK]);
}

#[test]
fn names_and_attributes_stay_whatever_becomes_of_them() {
    let mut d = Driver::new(4 << 20);
    let names: Vec<String> = (0..500).map(|i| format!("name {i}")).collect();
    for (i, name) in names.iter().enumerate() {
        d.must(&create(10 + i as u64, 1, name.as_bytes(), FILE)).unwrap();
    }
    d.publish();
    d.must(&snapshot(b"s")).unwrap();
    d.publish();
    let before = {
        let state = state(&mut d.volume, b"s").unwrap();
        (state.digest().unwrap(), state.inodes_after(InodeId(0), usize::MAX).unwrap().len())
    };
    assert_eq!(before.1, 501);
    // All its pages are replaced, several times over.
    for round in 0..3u64 {
        for (i, name) in names.iter().enumerate() {
            let ino = 10 + i as u64 + 1000 * round;
            d.must(&unlink(ino, 1, name.as_bytes())).unwrap();
            d.must(&Op::Reap { ino: InodeId(ino) }).unwrap();
            d.must(&create(ino + 1000, 1, name.as_bytes(), 0o100600)).unwrap();
            if i % 50 == 0 {
                d.publish();
            }
        }
        d.publish();
        for _ in 0..2 {
            let state = state(&mut d.volume, b"s").unwrap();
            assert_eq!(state.digest().unwrap(), before.0, "round {round}");
            assert_eq!(state.lookup(InodeId::ROOT, b"name 7"), Ok(Some((InodeId(17), 0o100000))));
            assert_sound(&d);
            assert_same_after_reopen(&mut d);
        }
    }
}

/// Blocks of snapshots are nobody else's, as long as one of them has them.
#[test]
fn what_two_snapshots_have_stays_with_the_first() {
    let mut d = Driver::new(64 * BLOCK as u64);
    let fill = |d: &mut Driver, ino: u64, name: &[u8]| {
        d.must(&create(ino, 1, name, FILE)).unwrap();
        let mut at = 0;
        while d.must(&write(ino, at, &[ino as u8; BLOCK])).is_ok() {
            at += BLOCK as u64;
            d.publish();
        }
        d.publish();
        at / BLOCK as u64
    };
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&write(2, 0, &[2; 8 * BLOCK])).unwrap();
    d.must(&snapshot(b"a")).unwrap();
    d.must(&write(2, 0, &[3; 2 * BLOCK])).unwrap();
    d.must(&snapshot(b"b")).unwrap();
    d.must(&truncate(2, 0)).unwrap();
    d.publish();
    assert_eq!(d.volume.statfs().blocks_free, 64 - 10);
    // What each alone has.
    let own: Vec<u64> = d.volume.snapshots(0, 9).iter().map(|s| s.own_blocks).collect();
    assert_eq!(own, [2, 2]);
    assert_eq!(fill(&mut d, 5, b"x"), 64 - 10);
    assert_eq!(read(&mut d, b"a", 2), [2; 8 * BLOCK]);
    d.must(&drop_snapshot(b"b")).unwrap();
    d.publish();
    assert_eq!(fill(&mut d, 6, b"y"), 2);
    for _ in 0..2 {
        assert_eq!(read(&mut d, b"a", 2), [2; 8 * BLOCK]);
        assert_sound(&d);
        assert_same_after_reopen(&mut d);
    }
    d.must(&drop_snapshot(b"a")).unwrap();
    d.publish();
    assert_eq!((d.volume.statfs().blocks_free, d.volume.tree().kept_pages()), (8, 0));
    assert_same_after_reopen(&mut d);
}

/// After a crash an operation reads again what it has read: until it is published that stays as it is, also when the snapshot is
/// gone that had it.
#[test]
fn what_is_read_of_a_snapshot_stays_until_that_is_published() {
    let mut d = Driver::new(4 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&create(3, 1, b"g", 0o100600)).unwrap();
    d.must(&write(2, 0, &[1; BLOCK])).unwrap();
    d.must(&snapshot(b"s")).unwrap();
    d.publish();
    // Others may read the one file than the other: it is copied.
    let (ino, source, len) = (InodeId(3), InodeId(2), BLOCK as u64);
    let (offset, source_offset, zeroes) = (0, 0, false);
    d.apply(&Op::CloneRange { ino, offset, len, source, source_offset, zeroes }).unwrap();
    d.apply(&drop_snapshot(b"s")).unwrap();
    assert_eq!(d.apply(&write(2, 0, &[2; BLOCK])), Err(Refusal::NeedsPublish));
    d.publish();
    d.apply(&write(2, 0, &[2; BLOCK])).unwrap();
    d.publish();
    assert_eq!((d.read(2), d.read(3)), (vec![2; BLOCK], vec![1; BLOCK]));
    assert_sound(&d);
}

/// A page that what is sealed has dropped is free only when the snapshot that has it is gone from the medium as well.
#[test]
fn pages_of_a_snapshot_outlive_its_end_until_that_is_published() {
    let mut d = Driver::new(4 << 20);
    for i in 0..200 {
        d.must(&create(2 + i, 1, format!("file {i}").as_bytes(), FILE)).unwrap();
    }
    d.must(&snapshot(b"s")).unwrap();
    d.publish();
    d.must(&chmod(50, 0o600)).unwrap();
    let first = d.volume.seal(StreamSeq(d.sequence), Epoch(1), &[]).unwrap();
    // While the first is on its way to the medium.
    let dropped = d.apply(&drop_snapshot(b"s"));
    run_copies(&*d.media, &first.copies).unwrap();
    d.volume.publish(first).unwrap();
    assert_eq!(dropped, Err(Refusal::NeedsPublish));
    d.must(&drop_snapshot(b"s")).unwrap();
    for i in 0..200 {
        d.must(&chmod(2 + i, 0o640)).unwrap();
    }
    let second = d.volume.seal(StreamSeq(d.sequence), Epoch(1), &[]).unwrap();
    second.write_pages(&*d.media).unwrap();
    // The power goes before the root is written.
    drop(second);
    d.reopen();
    assert!(state(&mut d.volume, b"s").is_some());
    assert_sound(&d);
}

#[test]
fn names_of_snapshots_are_taken_once_and_numbers_are_not_given_again() {
    let mut d = Driver::new(4 << 20);
    d.must(&snapshot(b"a")).unwrap();
    assert_eq!(d.must(&snapshot(b"a")), Err(Refusal::Exists));
    let missing = Op::Snapshot { ino: InodeId(99), name: b"b" };
    assert_eq!(d.must(&missing), Err(Refusal::NoEntry));
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    let file = Op::Snapshot { ino: InodeId(2), name: b"b" };
    assert_eq!(d.must(&file), Err(Refusal::NotDirectory));
    let numbers = |d: &Driver| -> Vec<u64> {
        d.volume.snapshots(0, usize::MAX).iter().map(|s| s.number).collect()
    };
    d.must(&snapshot(b"b")).unwrap();
    let [first, second] = numbers(&d)[..] else { panic!() };
    d.must(&drop_snapshot(b"b")).unwrap();
    assert!(d.must(&drop_snapshot(b"b")).unwrap().already);
    d.publish();
    d.reopen();
    d.must(&snapshot(b"b")).unwrap();
    let after = numbers(&d);
    assert_eq!((after.len(), after[0]), (2, first));
    assert!(after[1] > second, "{second} was given before");
    assert_eq!(d.volume.snapshots(first, 1)[0].number, after[1]);
    d.publish();
    assert_sound(&d);
}

/// Many snapshots, given up in any order, leave nothing behind.
#[test]
fn thousands_come_and_go() {
    let mut d = Driver::new(256 << 20);
    let mut random = Random::new(7);
    for i in 0..20 {
        d.must(&create(2 + i, 1, format!("f{i}").as_bytes(), FILE)).unwrap();
    }
    d.publish();
    let mut names = Vec::new();
    for i in 0..2000u64 {
        let ino = 2 + random.below(20);
        let data = vec![i as u8; 1 + random.below(9000) as usize];
        d.must(&write(ino, random.below(60_000), &data)).unwrap();
        let name = format!("s{i}").into_bytes();
        d.must(&snapshot(&name)).unwrap();
        names.push(name);
        if random.chance(1, 10) {
            d.publish();
        }
    }
    d.publish();
    assert_sound(&d);
    assert_same_after_reopen(&mut d);
    while !names.is_empty() {
        let name = names.swap_remove(random.below(names.len() as u64) as usize);
        d.must(&drop_snapshot(&name)).unwrap();
        if random.chance(1, 20) {
            d.publish();
        }
        if names.len() % 500 == 0 {
            d.publish();
            assert_sound(&d);
            assert_same_after_reopen(&mut d);
        }
    }
    d.publish();
    let stat = d.volume.statfs();
    let blocks: u64 = (2..22).map(|i| d.volume.attr(InodeId(i)).unwrap().unwrap().blocks / 8).sum();
    assert_eq!(stat.blocks - stat.blocks_free, blocks);
    assert_eq!(d.volume.tree().kept_pages(), 0);
}

/// What a snapshot shows, of all snapshots.
fn states(volume: &mut Volume) -> Vec<(Vec<u8>, u64)> {
    let all = volume.snapshots(0, usize::MAX);
    let digest = |volume: &mut Volume, slot| volume.read_snapshot(slot).unwrap().digest().unwrap();
    all.into_iter().map(|s| (s.snapshot.name, digest(volume, s.snapshot.slot))).collect()
}

/// Sends all snapshots of a volume to a new one, in small steps.
fn send(from: &mut Volume, to: &mut Volume, random: &mut Random) {
    let (mut sent, mut before) = (SentBlocks::default(), None);
    let _empty = to.begin_image();
    for stat in from.snapshots(0, usize::MAX) {
        let slot = stat.snapshot.slot;
        let mut at = Some(Key::MIN);
        while let Some(key) = at {
            let bounds = (1 + random.below(3000) as usize, 1 + random.below(20) as usize);
            let (changes, next) =
                from.snapshot_changes(before, slot, key, bounds).unwrap().unwrap();
            at = next;
            for (key, value) in changes {
                if to.image_item(key, value.as_deref()).is_err() {
                    to.image_pages(true).unwrap();
                    to.image_item(key, value.as_deref()).unwrap();
                }
                let Some(value) = value.filter(|_| key.kind == kind::EXTENT) else { continue };
                for blocks in sent.new_of(&Run::decode(key.item, &value).unwrap()) {
                    let bytes = from.blocks_at(blocks).unwrap().unwrap();
                    to.image_blocks(blocks.arena, blocks.block, &bytes).unwrap();
                }
            }
            if random.chance(1, 10) {
                to.image_pages(true).unwrap();
            }
        }
        to.image_state(stat.number, stat.snapshot).unwrap();
        before = Some(slot);
    }
    to.note_used(from.last_inode());
    to.end_image(&from.image_end(), StreamSeq(9), Epoch(3)).unwrap();
}

/// Pieces of differences, of any size.
fn bounds(random: &mut Random) -> impl FnMut() -> (usize, usize) {
    || (1 + random.below(3000) as usize, 1 + random.below(20) as usize)
}

/// Who has the earlier of two snapshots, and is told the differences, has the later one.
#[test]
fn differences_make_the_earlier_state_the_later_one() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut d = Driver::new(16 << 20);
        for i in 0..3 {
            d.must(&create(2 + i, 1, format!("d{i}").as_bytes(), 0o040_755)).unwrap();
        }
        let mut next = 5;
        for i in 0..600u64 {
            let ino = 5 + random.below(next);
            let (dir, name) = (1 + random.below(4), format!("f{}", random.below(60)));
            let (name, other) = (name.as_bytes(), format!("f{}", random.below(60)));
            let at = random.below(60_000);
            let known = d.volume.lookup(InodeId(dir), name).unwrap();
            match random.below(9) {
                0..2 => {
                    let mode = [FILE, 0o100_600][i as usize % 2];
                    next += u64::from(d.must(&create(next, dir, name, mode)).is_ok());
                }
                2 => drop(d.must(&unlink(known.map_or(ino, |(ino, _)| ino.0), dir, name))),
                3 => {
                    let Some((ino, _)) = known else { continue };
                    let to = 1 + random.below(4);
                    let there = d.volume.lookup(InodeId(to), other.as_bytes()).unwrap();
                    let over = there.map_or(0, |(ino, _)| ino.0);
                    let _ = d.must(&rename(ino.0, (dir, name), (to, other.as_bytes()), over));
                }
                4 => drop(d.must(&truncate(ino, at))),
                5 => {
                    let mut source = InodeId(5 + random.below(next));
                    let all = d.volume.snapshots(0, usize::MAX);
                    if !all.is_empty() && random.chance(1, 2) {
                        let one = &all[random.below(all.len() as u64) as usize];
                        source = source.in_snapshot(one.snapshot.slot);
                    }
                    let (ino, offset, len) = (InodeId(ino), 4096 * random.below(9), 8192);
                    let (source_offset, zeroes) = (4096 * random.below(4), false);
                    let op = Op::CloneRange { ino, offset, len, source, source_offset, zeroes };
                    drop(d.must(&op));
                }
                6 => {
                    let (offset, len, mode) = (at, 9000, [1, 3][random.below(2) as usize]);
                    drop(d.must(&Op::Fallocate { ino: InodeId(ino), offset, len, mode }));
                }
                _ => {
                    let data = vec![i as u8; 1 + random.below(20_000) as usize];
                    drop(d.must(&write(ino, at, &data)));
                }
            }
            if random.chance(1, 60) {
                d.must(&snapshot(format!("s{i}").as_bytes())).unwrap();
            }
        }
        d.must(&snapshot(b"the last one")).unwrap();
        d.publish();
        let all = d.volume.snapshots(0, usize::MAX);
        let slots: Vec<_> = all.iter().map(|stat| stat.snapshot.slot).collect();
        for (i, slot) in slots.iter().enumerate() {
            let then = i.checked_sub(1 + random.below(1 + i as u64) as usize).map(|at| slots[at]);
            let complete =
                differences_are_complete(&mut d.volume, then, *slot, bounds(&mut random));
            complete.unwrap_or_else(|why| panic!("seed {seed}, snapshot {i}: {why}"));
        }
    }
}

/// A block at the end of a large file, which lies behind it: that block, and not the file.
#[test]
fn what_both_have_is_no_difference() {
    let mut d = Driver::new(4 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&write(2, 0, &[1; 100 * BLOCK])).unwrap();
    d.must(&snapshot(b"a")).unwrap();
    d.must(&write(2, 100 * BLOCK as u64, &[2; BLOCK])).unwrap();
    d.must(&write(2, 50 * BLOCK as u64, &[3; BLOCK])).unwrap();
    d.must(&snapshot(b"b")).unwrap();
    d.publish();
    let slot = |name| d.volume.snapshot_named(name).unwrap().slot;
    let (a, b) = (slot(b"a"), slot(b"b"));
    let content = |block: u64| Difference::Content {
        ino: InodeId(2),
        offset: block * BLOCK as u64,
        len: BLOCK as u64,
    };
    let (all, next) =
        d.volume.snapshot_difference(Some(a), b, Key::MIN, (1 << 20, 100)).unwrap().unwrap();
    assert_eq!(next, None);
    assert_eq!(all, [Difference::Touched { ino: InodeId(2) }, content(50), content(100)]);
    let same = d.volume.snapshot_difference(Some(b), b, Key::MIN, (1 << 20, 100));
    assert_eq!(same.unwrap().unwrap().0, []);
}

/// A file in very many pieces, each of another place, is compared in many turns, and nothing of it is told twice or left out.
#[test]
fn content_in_many_pieces_is_told_of_in_many_turns() {
    let mut random = Random::new(1);
    let mut d = Driver::new(64 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&create(3, 1, b"g", FILE)).unwrap();
    let blocks = 4000;
    let all = vec![1; 64 * BLOCK];
    for at in (0..blocks).step_by(64) {
        d.must(&write(2, at * BLOCK as u64, &all)).unwrap();
    }
    d.must(&snapshot(b"one run")).unwrap();
    // Every other block lies elsewhere, and the rest does not.
    for at in (0..blocks).step_by(2) {
        d.must(&write(2, at * BLOCK as u64, &[at as u8; BLOCK])).unwrap();
        if at % 100 == 0 {
            d.must(&write(3, at * BLOCK as u64, &[3; BLOCK])).unwrap();
        }
    }
    d.must(&snapshot(b"many")).unwrap();
    for at in (0..blocks).step_by(64) {
        d.must(&write(2, at * BLOCK as u64, &all)).unwrap();
    }
    d.must(&snapshot(b"one again")).unwrap();
    d.publish();
    let slot = |name| d.volume.snapshot_named(name).unwrap().slot;
    let [one, many, again] = [&b"one run"[..], b"many", b"one again"].map(slot);
    for (then, now, right) in [
        (one, many, (0..blocks).step_by(2).collect::<Vec<_>>()),
        (many, one, (0..blocks).step_by(2).collect()),
        (many, again, (0..blocks.next_multiple_of(64)).collect()),
        (one, again, (0..blocks.next_multiple_of(64)).collect()),
    ] {
        let mut told = Vec::new();
        let all = differences(&mut d.volume, Some(then), now, bounds(&mut random)).unwrap();
        for one in all {
            let Difference::Content { ino: InodeId(2), offset, len } = one else { continue };
            told.extend((offset / BLOCK as u64)..(offset + len) / BLOCK as u64);
        }
        let twice = told.len();
        told.sort_unstable();
        told.dedup();
        assert_eq!(told, right, "{then} {now}");
        assert!(twice < right.len() * 3 / 2, "{twice} blocks are told of for {}", right.len());
    }
}

/// A node that joins has the same snapshots, and what they share is shared there as well.
#[test]
fn an_image_is_the_same_to_the_block() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let mut d = Driver::new(16 << 20);
        for i in 0..30 {
            let mode = [FILE, 0o100600, 0o100640][i as usize % 3];
            d.must(&create(2 + i, 1, format!("f{i}").as_bytes(), mode)).unwrap();
        }
        for i in 0..400u64 {
            let ino = 2 + random.below(30);
            let data = vec![i as u8; 1 + random.below(20_000) as usize];
            let at = random.below(60_000);
            match random.below(8) {
                0 => assert!(d.must(&truncate(ino, at)).is_ok()),
                1 => {
                    let (source, offset, len) = (InodeId(2 + (ino + 3) % 30), 0, 8192);
                    let ino = InodeId(ino);
                    let (source_offset, zeroes) = (0, false);
                    let op = Op::CloneRange { ino, offset, len, source, source_offset, zeroes };
                    let _ = d.must(&op);
                }
                2 => {
                    let (offset, len, mode) = (at, 9000, 1);
                    d.must(&Op::Fallocate { ino: InodeId(ino), offset, len, mode }).unwrap();
                }
                3 => assert!(d.must(&chmod(ino, 0o600 | random.below(0o100) as u32)).is_ok()),
                _ => assert!(d.must(&write(ino, at, &data)).is_ok()),
            }
            if random.chance(1, 30) {
                d.must(&snapshot(format!("s{i}").as_bytes())).unwrap();
            }
            if random.chance(1, 60) {
                let some = d.volume.snapshots(random.below(9), 1);
                for stat in some {
                    d.must(&drop_snapshot(&stat.snapshot.name)).unwrap();
                }
            }
        }
        d.must(&snapshot(b"the last one")).unwrap();
        d.publish();
        let mut other = Driver::new(16 << 20);
        if random.chance(1, 2) {
            // The other slot of the root record is the next.
            other.publish();
        }
        let empty = *other.volume.root();
        send(&mut d.volume, &mut other.volume, &mut random);
        // Until its own root is whole there is the one before.
        let roots = read_roots(&*other.media, &empty.uuid).unwrap();
        assert!(roots.contains(&Ok(empty)), "seed {seed}");
        other.reopen();
        assert_eq!(states(&mut other.volume), states(&mut d.volume), "seed {seed}");
        assert_eq!(other.volume.digest(), d.volume.digest());
        assert_eq!(other.volume.differences(&d.volume), Ok(vec![]));
        assert_eq!(other.volume.statfs().blocks_free, d.volume.statfs().blocks_free);
        assert_eq!(other.volume.root().stream_seq, StreamSeq(9));
        assert_sound(&other);
        assert_same_after_reopen(&mut other);
        // And it goes on.
        (other.time, other.sequence) = (d.time, d.sequence);
        for d in [&mut d, &mut other] {
            d.must(&write(2, 0, &[7; 30_000])).unwrap();
            d.must(&snapshot(b"z")).unwrap();
            d.must(&drop_snapshot(b"the last one")).unwrap();
            d.publish();
        }
        assert_eq!(other.volume.digest(), d.volume.digest());
        assert_sound(&other);
    }
}

/// An image that is cut off leaves the empty volume that it began with.
#[test]
fn half_an_image_is_nothing() {
    let mut d = Driver::new(4 << 20);
    for i in 0..300 {
        d.must(&create(2 + i, 1, format!("file {i}").as_bytes(), FILE)).unwrap();
        d.must(&write(2 + i, 0, &[i as u8; 100])).unwrap();
    }
    d.must(&snapshot(b"s")).unwrap();
    d.publish();
    for published in 0..2 {
        let mut other = Driver::new(4 << 20);
        (0..published).for_each(|_| other.publish());
        let empty = other.volume.begin_image();
        let slot = d.volume.snapshot_named(b"s").unwrap().slot;
        let (changes, _) =
            d.volume.snapshot_changes(None, slot, Key::MIN, (1 << 20, 1000)).unwrap().unwrap();
        for (key, value) in &changes {
            other.volume.image_item(*key, value.as_deref()).unwrap();
            if key.item % 40 == 0 {
                other.volume.image_pages(true).unwrap();
            }
        }
        other.volume.image_pages(true).unwrap();
        drop(empty);
        other.reopen();
        assert_eq!(other.volume.root().inodes, 1);
        assert_eq!(other.volume.lookup(InodeId::ROOT, b"file 1"), Ok(None));
        assert_sound(&other);
    }
}

/// What comes from another node is not believed.
#[test]
fn items_that_no_state_has_are_refused() {
    let mut d = Driver::new(4 << 20);
    let _empty = d.volume.begin_image();
    let long = [0; 961];
    let lost = Run { file: 0, arena: 9, block: 3, len: 1, unwritten: false }.encode();
    for (key, value) in [
        (Key::new(0, kind::SNAPSHOT, 1), Some(&[0; 40][..])),
        (Key::new(0, kind::SNAPSHOT_ROOT, 1), Some(&[0; 24][..])),
        (Key::new(0, kind::CLIENT, 1), None),
        (Key::new(5, kind::NAME, 1), Some(&long[..])),
        (Key::new(0, kind::ARENA, 1 << 40), Some(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..])),
        (Key::new(0, kind::ARENA, 3), Some(&[9; 12][..])),
        (Key::new(0, kind::ARENA, 0), None),
        (Key::new(9, kind::EXTENT, 0), Some(&[1; 24][..])),
        // Of an arena that the image has not told of.
        (Key::new(9, kind::EXTENT, 0), Some(&lost[..])),
        (Key::new(0, kind::SHARED, 9 << 40), None),
        (Key::new(0, kind::SHARED, u64::MAX), Some(&[2; 16][..])),
    ] {
        assert!(d.volume.image_item(key, value).is_err(), "{key:?}");
    }
    for (arena, block, bytes) in
        [(0, 1024, 4096), (0, u64::MAX, 4096), (0, 0, 100), (77, 0, 4096), (0, 1020, 5 * 4096)]
    {
        let bytes = vec![1; bytes];
        assert!(d.volume.image_blocks(arena, block, &bytes).is_err(), "{arena} {block}");
    }
    assert!(d.volume.image_blocks(0, 1020, &[1; 4 * 4096]).is_ok());
    // What is no volume is not opened.
    d.volume.image_item(Key::new(9, kind::ATTR, 0), Some(&[1; 24])).unwrap();
    d.volume.end_image(&Default::default(), StreamSeq(1), Epoch(1)).unwrap();
    assert!(Volume::open(d.media.clone()).is_err());
}

/// A build that knows no snapshots would give their blocks to others: it does not open the volume.
#[test]
fn a_volume_with_snapshots_is_of_another_version() {
    let mut d = Driver::new(4 << 20);
    let version = |d: &Driver| -> Vec<u32> {
        [0, 1]
            .map(|slot| {
                let mut bytes = [0; 12];
                let at = storage::format::superblock::ROOT_AT[slot];
                d.media.read(storage::media::Segment::Super, at, &mut bytes).unwrap();
                u32::from_le_bytes(bytes[8..].try_into().unwrap())
            })
            .to_vec()
    };
    d.publish();
    assert_eq!(version(&d), [1, 1]);
    d.must(&snapshot(b"s")).unwrap();
    d.publish();
    d.publish();
    assert_eq!(version(&d), [2, 2]);
    d.must(&drop_snapshot(b"s")).unwrap();
    d.publish();
    d.publish();
    assert_eq!(version(&d), [1, 1]);
    assert!(Volume::open(d.media.clone()).is_ok());
}

/// Each variant is seen by one of these.
#[cfg(feature = "planted")]
#[test]
#[ignore = "a variant is one for the whole process"]
fn planted() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 13] = [
        (Bug::CloneGivenAway, clones_from_snapshots_in_any_order_leave_nothing_behind),
        (Bug::CloneOfNow, clones_from_snapshots_in_any_order_leave_nothing_behind),
        (Bug::DifferenceShared, differences_make_the_earlier_state_the_later_one),
        (Bug::DifferenceWhole, what_both_have_is_no_difference),
        (Bug::SnapshotSealedDropped, pages_of_a_snapshot_outlive_its_end_until_that_is_published),
        (Bug::SnapshotPagesReused, names_and_attributes_stay_whatever_becomes_of_them),
        (Bug::SnapshotInPlace, what_is_overwritten_stays_in_the_snapshot),
        (Bug::SnapshotBlocksFreed, what_two_snapshots_have_stays_with_the_first),
        (Bug::SnapshotBeforeForgotten, what_two_snapshots_have_stays_with_the_first),
        (Bug::ImageOverRoot, an_image_is_the_same_to_the_block),
        (Bug::SnapshotLivesJoined, clones_from_snapshots_in_any_order_leave_nothing_behind),
        (Bug::SnapshotLifeForgotten, clones_from_snapshots_in_any_order_leave_nothing_behind),
        (Bug::SnapshotReadDropped, what_is_read_of_a_snapshot_stays_until_that_is_published),
    ];
    assert_eq!(missed(&tests), []);
}

fn clone_of(
    ino: u64,
    source: InodeId,
    (source_offset, offset, len): (u64, u64, u64),
) -> Op<'static> {
    let ino = InodeId(ino);
    Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false }
}

/// The number of an inode as a snapshot has it.
fn there(d: &Driver, name: &[u8], ino: u64) -> InodeId {
    InodeId(ino).in_snapshot(d.volume.snapshot_named(name).unwrap().slot)
}

/// What is cloned from a snapshot takes no block, whether a file still has it or not, and is nobody's to change.
#[test]
fn a_clone_of_what_a_snapshot_has_takes_no_space() {
    let mut d = Driver::new(64 * BLOCK as u64);
    for (ino, name) in [(2, b"f"), (3, b"g"), (4, b"h")] {
        d.must(&create(ino, 1, name, FILE)).unwrap();
    }
    let content = [[1; BLOCK], [2; BLOCK], [3; BLOCK], [4; BLOCK]].concat();
    d.must(&write(2, 0, &content)).unwrap();
    d.must(&snapshot(b"s")).unwrap();
    let source = there(&d, b"s", 2);
    let len = content.len() as u64;
    // Not before the state is on media.
    assert_eq!(d.apply(&clone_of(3, source, (0, 0, len))), Err(Refusal::NeedsPublish));
    d.publish();
    // The file gives two blocks up, one for good.
    d.must(&write(2, 0, &[9; BLOCK])).unwrap();
    d.must(&truncate(2, 3 * BLOCK as u64)).unwrap();
    d.publish();
    let free = d.volume.statfs().blocks_free;
    d.must(&clone_of(3, source, (0, 0, len))).unwrap();
    d.publish();
    assert_eq!(d.volume.statfs().blocks_free, free, "nothing was copied");
    assert_eq!(d.volume.snapshot_blocks(), 0, "all that the snapshot has is in files");
    // A state between two lives of a block.
    d.must(&truncate(3, 0)).unwrap();
    d.must(&snapshot(b"t")).unwrap();
    d.publish();
    d.must(&clone_of(3, source, (0, 0, len))).unwrap();
    d.must(&clone_of(4, source, (BLOCK as u64, 0, 2 * BLOCK as u64))).unwrap();
    d.publish();
    for _ in 0..2 {
        assert_eq!(d.read(3), content);
        assert_eq!(d.read(4), content[BLOCK..3 * BLOCK]);
        assert_eq!(read(&mut d, b"s", 2), content);
        assert_sound(&d);
        assert_same_after_reopen(&mut d);
    }
    d.must(&write(3, 7, &[8; 3 * BLOCK])).unwrap();
    d.publish();
    assert_eq!(read(&mut d, b"s", 2), content);
    assert_eq!(d.read(4), content[BLOCK..3 * BLOCK]);
    // Without the snapshots it is the files' alone.
    for name in [b"s", b"t"] {
        d.must(&drop_snapshot(name)).unwrap();
        d.publish();
        assert_eq!(d.must(&clone_of(4, source, (0, 0, 1))), Err(Refusal::NoEntry));
        assert_sound(&d);
        assert_same_after_reopen(&mut d);
    }
    let held = |ino| d.volume.attr(InodeId(ino)).unwrap().unwrap().blocks / 8;
    let stat = d.volume.statfs();
    assert!(stat.blocks - stat.blocks_free < [2, 3, 4].map(held).iter().sum::<u64>());
    assert_eq!(d.read(4), content[BLOCK..3 * BLOCK]);
}

/// What comes back from a snapshot is the file's alone when that goes, and may be written to before any of it is published. After a
/// crash the snapshot is there, and has what is half written: that is excused as long as it is done again, and nothing else.
#[test]
fn what_came_back_may_be_half_written_until_its_snapshot_is_gone() {
    let mut d = Driver::new(4 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&write(2, 0, &[1; 2 * BLOCK])).unwrap();
    d.must(&snapshot(b"s")).unwrap();
    d.must(&truncate(2, 0)).unwrap();
    d.publish();
    let len = 2 * BLOCK as u64;
    let ops = [
        clone_of(2, there(&d, b"s", 2), (0, 0, len)),
        drop_snapshot(b"s"),
        write(2, 100, &[2; 50]),
    ];
    ops.iter().for_each(|op| assert!(d.apply(op).is_ok()));
    let sealed = d.volume.seal(StreamSeq(d.sequence), Epoch(1), &[]).unwrap();
    // The power goes in the middle of its copies.
    drop(sealed);
    d.media.write(storage::media::Segment::Arena(0), 100, &[2; 20]).unwrap();
    d.reopen();
    let excused = |d: &Driver, pending: &[Touched]| {
        let mut data = Data { pending, progress: &mut |_, _| {} };
        let report = check_with_data(&*d.media, &mut data).unwrap();
        (report.is_sound(), report.counts.excused, report.counts.rotten)
    };
    let touched: Vec<_> = ops.iter().flat_map(Touched::by).collect();
    assert_eq!(excused(&d, &touched), (true, 1, 0));
    assert_eq!(excused(&d, &touched[touched.len() - 1..]), (false, 0, 1));
    d.volume.begin_replay();
    ops.iter().for_each(|op| assert!(d.apply(op).is_ok()));
    d.volume.end_replay();
    d.publish();
    let mut want = vec![1; 2 * BLOCK];
    want[100..150].fill(2);
    assert!(d.read(2) == want);
    assert_sound(&d);
    assert_same_after_reopen(&mut d);
}

/// Where others may read the one file than the other the bytes are copied, as between files.
#[test]
fn a_clone_for_others_than_the_snapshot_has_it_for_is_a_copy() {
    let mut d = Driver::new(4 << 20);
    d.must(&create(2, 1, b"f", FILE)).unwrap();
    d.must(&create(3, 1, b"g", 0o100600)).unwrap();
    d.must(&write(2, 100, &[1; 2 * BLOCK])).unwrap();
    d.must(&snapshot(b"s")).unwrap();
    d.must(&truncate(2, 0)).unwrap();
    d.publish();
    let free = d.volume.statfs().blocks_free;
    let source = there(&d, b"s", 2);
    d.must(&clone_of(3, source, (0, 0, 100 + 2 * BLOCK as u64))).unwrap();
    // And to another place in a block.
    d.must(&clone_of(2, source, (50, 60, 100))).unwrap();
    // What it reads stays until that is published, also without the snapshot.
    d.must(&drop_snapshot(b"s")).unwrap();
    d.publish();
    assert_eq!(
        d.volume.statfs().blocks_free,
        free - 1,
        "three for one, one for the other; three less"
    );
    let want = [vec![0; 100], vec![1; 2 * BLOCK]].concat();
    assert_eq!(
        (d.read(3), d.read(2)),
        (want.clone(), [vec![0; 60], want[50..150].to_vec()].concat())
    );
    assert_sound(&d);
    assert_same_after_reopen(&mut d);
}

/// Histories of files, snapshots and clones from one to the other: at each moment a new start finds what is known, and an image of it
/// is the same.
#[test]
fn clones_from_snapshots_in_any_order_leave_nothing_behind() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut d = Driver::new(16 << 20);
        for i in 0..8 {
            let mode = [FILE, FILE, FILE, 0o100600][i as usize % 4];
            d.must(&create(2 + i, 1, format!("f{i}").as_bytes(), mode)).unwrap();
        }
        let mut states: std::collections::BTreeMap<Vec<u8>, Vec<Vec<u8>>> = Default::default();
        let mut files: Vec<Vec<u8>> = vec![Vec::new(); 8];
        for i in 0..300u64 {
            let which = random.below(8) as usize;
            let ino = 2 + which as u64;
            let pick = random.below(states.len().max(1) as u64) as usize;
            let picked = states.keys().nth(pick).cloned();
            match (random.below(10), picked) {
                (0, _) if states.len() < 6 => {
                    let name = format!("s{i}").into_bytes();
                    d.must(&snapshot(&name)).unwrap();
                    states.insert(name, files.clone());
                }
                (1, Some(name)) => {
                    d.must(&drop_snapshot(&name)).unwrap();
                    states.remove(&name);
                }
                (2..=5, Some(name)) => {
                    let from = random.below(8) as usize;
                    let had = &states[&name][from];
                    let size = had.len() as u64;
                    let (mut at, mut to) = (random.below(4), random.below(4));
                    (at, to) = (at * BLOCK as u64, to * BLOCK as u64);
                    if random.chance(1, 6) {
                        to += random.below(BLOCK as u64);
                    }
                    if at >= size {
                        continue;
                    }
                    let len =
                        if random.chance(1, 2) { size - at } else { 1 + random.below(size - at) };
                    d.must(&clone_of(ino, there(&d, &name, 2 + from as u64), (at, to, len)))
                        .unwrap();
                    let bytes = had[at as usize..(at + len) as usize].to_vec();
                    let end = (to + len) as usize;
                    if files[which].len() < end {
                        files[which].resize(end, 0);
                    }
                    files[which][to as usize..end].copy_from_slice(&bytes);
                }
                (6, _) => {
                    let size = random.below(20_000);
                    d.must(&truncate(ino, size)).unwrap();
                    files[which].resize(size as usize, 0);
                }
                (7, _) => {
                    let other = (which + 1 + random.below(7) as usize) % 8;
                    let len = files[other].len() as u64;
                    if len > 0 {
                        d.must(&clone_of(ino, InodeId(2 + other as u64), (0, 0, len))).unwrap();
                        let bytes = files[other].clone();
                        if files[which].len() < bytes.len() {
                            files[which].resize(bytes.len(), 0);
                        }
                        files[which][..bytes.len()].copy_from_slice(&bytes);
                    }
                }
                _ => {
                    let at = random.below(12_000) as usize;
                    let data = vec![1 + (i % 255) as u8; 1 + random.below(9000) as usize];
                    d.must(&write(ino, at as u64, &data)).unwrap();
                    if files[which].len() < at + data.len() {
                        files[which].resize(at + data.len(), 0);
                    }
                    files[which][at..at + data.len()].copy_from_slice(&data);
                }
            }
            d.volume.invariants().unwrap();
            if random.chance(1, 12) {
                d.publish();
                for (i, file) in files.iter().enumerate() {
                    assert!(d.read(2 + i as u64) == *file, "seed {seed}: file {i}");
                }
                for (name, had) in &states {
                    for (i, file) in had.iter().enumerate() {
                        assert!(read(&mut d, name, 2 + i as u64) == *file, "seed {seed}: file {i}");
                    }
                }
                let own = |d: &Driver| -> Vec<_> {
                    d.volume.snapshots(0, 99).iter().map(|s| s.own_blocks).collect()
                };
                let before = own(&d);
                assert_sound(&d);
                assert_same_after_reopen(&mut d);
                assert_eq!(own(&d), before, "seed {seed}");
            }
        }
        d.must(&snapshot(b"the last one")).unwrap();
        d.publish();
        let mut other = Driver::new(16 << 20);
        send(&mut d.volume, &mut other.volume, &mut random);
        other.reopen();
        assert_eq!(crate::states(&mut other.volume), crate::states(&mut d.volume), "seed {seed}");
        assert_eq!(other.volume.digest(), d.volume.digest());
        assert_eq!(other.volume.statfs().blocks_free, d.volume.statfs().blocks_free);
        for name in states.keys() {
            for d in [&mut d, &mut other] {
                d.must(&drop_snapshot(name)).unwrap();
                d.publish();
            }
            assert_eq!(other.volume.statfs().blocks_free, d.volume.statfs().blocks_free);
        }
        assert_sound(&other);
        assert_same_after_reopen(&mut other);
    }
}

/// There are 32,767 slots, and one for each millisecond: whoever has something of a snapshot open for longer finds no other there.
#[test]
fn a_slot_that_was_given_up_lately_is_not_the_next_ones() {
    const ALL: u64 = 0x7fff * 1_000_000;
    let mut d = Driver::new(8 << 20);
    let make = |d: &mut Driver, time: u64| {
        // (What the next operation adds.)
        d.time = d.volume.snapshot_time(time) - 1_000_003;
        d.must(&snapshot(b"s")).unwrap();
        d.volume.snapshots(0, usize::MAX).pop().expect("it was made")
    };
    let mut time = d.volume.snapshot_time(0);
    let mut had = Vec::new();
    for _ in 0..20 {
        let one = make(&mut d, time);
        assert!(
            had.iter().all(|(number, slot)| *number < one.number && *slot != one.snapshot.slot)
        );
        assert!(one.snapshot.time >= time && one.snapshot.time < time + 100_000_000, "{one:?}");
        had.push((one.number, one.snapshot.slot));
        d.publish();
        d.must(&drop_snapshot(b"s")).unwrap();
        d.publish();
        // The same slot would be its turn again.
        time += ALL;
    }
    // Who opens it anew is told; numbers are not given again in any case.
    let slots = d.volume.slots_given_up();
    assert_eq!(slots.len(), had.len());
    d.reopen();
    assert_eq!(d.volume.slots_given_up(), []);
    let first = d.volume.snapshot_time(0) / 1_000_000;
    assert!(had.iter().all(|(number, _)| *number < first));
    d.volume.note_slots_given_up(&slots);
    let one = make(&mut d, time);
    assert!(!slots.contains(&one.snapshot.slot), "{one:?} after {slots:?}");
}
