//! Who may map a block may open a file that it is in: by the file's mode, and by all directories on the way, also after
//! these have changed or moved.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use base::InodeId;
use base::random::Random;
use common::*;
use storage::acl;
use storage::check::check;
use storage::format::entry::{Op, mask};
use storage::format::item::ReadClass;
use storage::permission::Creds;
use storage::volume::reach::Unplaced;

/// Users, each with a group and further ones.
const USERS: [(u32, u32, &[u32]); 5] =
    [(10, 20, &[]), (11, 20, &[]), (12, 21, &[20]), (13, 21, &[]), (14, 22, &[])];

/// Puts everything where it belongs, as the head does.
fn place_all(d: &mut Driver) {
    for _ in 0..10_000 {
        let Some((ino, what)) = d.volume.unplaced_after(InodeId(0)).unwrap() else {
            assert_eq!(d.volume.unplaced(), 0, "the count is that of the items");
            return;
        };
        match what {
            Unplaced::Reach(reach) => {
                d.must(&Op::Place { ino, reach, later: false }).unwrap();
            }
            Unplaced::Directory => {
                let by = d.volume.lets_in(ino).unwrap().unwrap();
                let mut held = Vec::new();
                let each = &mut |n: &storage::format::rpc::Name<'_>| {
                    held.extend((n.name != b"." && n.name != b"..").then_some(n.ino));
                    true
                };
                d.volume.readdir(ino, 0, usize::MAX, each).unwrap();
                for child in held {
                    if let Some(op) = d.volume.placement(child, by).unwrap() {
                        d.must(&op).unwrap();
                    }
                }
                let reach = d.volume.reach(ino).unwrap().unwrap();
                d.must(&Op::Place { ino, reach, later: false }).unwrap();
            }
        }
    }
    panic!("it does not come to an end");
}

/// Whether a user may do `what` with an inode itself.
fn lets(d: &Driver, ino: u64, (uid, gid, groups): (u32, u32, &[u32]), what: u32) -> bool {
    let record = d.volume.attr(InodeId(ino)).unwrap().unwrap();
    Creds { uid, gid, groups }.may(&record, what).is_ok()
}

/// All names there are, from above: directory, inode.
fn names(d: &Driver) -> Vec<(u64, u64)> {
    let (mut found, mut dirs) = (Vec::new(), vec![1]);
    while let Some(dir) = dirs.pop() {
        let each = &mut |n: &storage::format::rpc::Name<'_>| {
            if n.name != b"." && n.name != b".." {
                found.push((dir, n.ino.0));
                dirs.extend((n.kind == 0o040_000).then_some(n.ino.0));
            }
            true
        };
        d.volume.readdir(InodeId(dir), 0, usize::MAX, each).unwrap();
    }
    found
}

/// Nobody may map what they cannot open; and where all may open a file its blocks are everybody's.
fn judge(d: &Driver, linked: &BTreeSet<u64>, what: &str) {
    let held = names(d);
    let home: BTreeMap<u64, u64> = held.iter().map(|(dir, ino)| (*ino, *dir)).collect();
    for (dir, ino) in &held {
        let classes: BTreeSet<ReadClass> = d
            .volume
            .extents(InodeId(*ino), 0, 100)
            .unwrap()
            .iter()
            .map(|e| d.volume.arena_class(e.arena).unwrap())
            .collect();
        let mut all = true;
        for user in USERS {
            let (mut at, mut opens) = (*dir, lets(d, *ino, user, 4));
            loop {
                opens &= lets(d, at, user, 1);
                if at == 1 {
                    break;
                }
                at = home[&at];
            }
            all &= opens;
            for class in &classes {
                let maps = class.readable_by(user.0, user.1, user.2);
                assert!(opens || !maps, "{what}: {user:?} cannot open {ino}, and maps {class:?}");
            }
        }
        // With modes as they are usual, nobody who may read has to ask the service for it.
        let record = |ino: u64| d.volume.attr(InodeId(ino)).unwrap().unwrap();
        let is_open = |ino: u64, bits| record(ino).mode & bits == bits && record(ino).acl.is_none();
        let (mut at, mut open) = (*dir, all && is_open(*ino, 0o444) && is_open(1, 0o111));
        while at != 1 {
            open &= is_open(at, 0o111);
            at = home[&at];
        }
        if open && !linked.contains(ino) {
            let world = classes.iter().all(|class| *class == ReadClass::World);
            assert!(world, "{what}: all may open {ino}, and its blocks are of {classes:?}");
        }
    }
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

/// An access list by which user 13 may do everything, beside what the mode says.
fn list(mode: u32) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    let none = u32::MAX;
    let entries = [
        (1u16, mode >> 6, none),
        (2, 7, 13),
        (4, mode >> 3, none),
        (16, 7, none),
        (32, mode, none),
    ];
    for (tag, bits, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(((bits & 7) as u16).to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn chown(ino: u64, uid: u32, gid: u32) -> Op<'static> {
    let Op::SetAttr { ino, atime, mtime, .. } = chmod(ino, 0) else { unreachable!() };
    Op::SetAttr { ino, mask: mask::UID | mask::GID, mode: 0, uid, gid, atime, mtime }
}

fn one(random: &mut Random, d: &mut Driver, next: &mut u64, linked: &mut BTreeSet<u64>) {
    let held = names(d);
    let dirs: Vec<u64> = [1]
        .into_iter()
        .chain(held.iter().map(|(_, ino)| *ino).filter(|ino| {
            d.volume.attr(InodeId(*ino)).unwrap().unwrap().mode & 0o170_000 == 0o040_000
        }))
        .collect();
    let dir = pick(random, &dirs);
    let other = pick(random, &dirs);
    let any = held.get(random.below(held.len().max(1) as u64) as usize).copied();
    let uid = [0, 10, 11, 12][random.below(4) as usize];
    let gid = [0, 20, 21][random.below(3) as usize];
    let dir_mode = pick(random, &[0o755, 0o755, 0o755, 0o750, 0o700, 0o711, 0o710, 0o701, 0o000]);
    let file_mode = pick(random, &[0o644, 0o644, 0o640, 0o600, 0o604, 0o444, 0o000]);
    let name_of = |ino: u64| format!("n{ino}").into_bytes();
    // A name is its inode's number, but for further links.
    let called = |d: &Driver, dir: u64, ino: u64| {
        let mut found = None;
        let each = &mut |n: &storage::format::rpc::Name<'_>| {
            if n.ino.0 == ino && n.name != b"." && n.name != b".." {
                found = Some(n.name.to_vec());
            }
            true
        };
        d.volume.readdir(InodeId(dir), 0, usize::MAX, each).unwrap();
        found.unwrap()
    };
    match random.below(14) {
        0 | 1 => {
            *next += 1;
            let name = name_of(*next);
            let Op::Create { ino, parent, name, target, rdev, .. } = create(*next, dir, &name, DIR)
            else {
                unreachable!()
            };
            let mode = 0o040_000 | dir_mode;
            let made = Op::Create { ino, parent, mode, rdev, uid, gid, name, target };
            d.must(&made).unwrap();
        }
        2..=4 => {
            *next += 1;
            let name = name_of(*next);
            let Op::Create { ino, parent, name, target, rdev, .. } =
                create(*next, dir, &name, FILE)
            else {
                unreachable!()
            };
            let mode = 0o100_000 | file_mode;
            d.must(&Op::Create { ino, parent, mode, rdev, uid, gid, name, target }).unwrap();
            d.must(&write(*next, 0, &[3; 5000])).unwrap();
        }
        5 | 6 => {
            d.must(&chmod(dir, dir_mode)).unwrap();
        }
        7 => {
            d.must(&chown(dir, uid, gid)).unwrap();
        }
        8 => {
            let Some((_, ino)) = any.filter(|(_, ino)| !dirs.contains(ino)) else { return };
            d.must(&chmod(ino, file_mode)).unwrap();
            d.must(&write(ino, 4096 * random.below(9), &[4; 4096])).unwrap();
        }
        9 | 10 => {
            let Some((from, ino)) = any else { return };
            let name = called(d, from, ino);
            *next += 1;
            let to = name_of(*next);
            drop(d.must(&rename(ino, (from, &name), (other, &to), 0)));
        }
        11 => {
            let (Some((a, x)), Some((b, y))) =
                (any, held.get(random.below(held.len().max(1) as u64) as usize).copied())
            else {
                return;
            };
            let (m, n) = (called(d, a, x), called(d, b, y));
            let swap = Op::Rename {
                ino: InodeId(x),
                parent: InodeId(a),
                name: &m,
                new_parent: InodeId(b),
                new_name: &n,
                replaced: InodeId(y),
                noreplace: false,
                exchange: true,
                open: false,
            };
            drop(d.must(&swap));
        }
        12 => {
            let Some((_, ino)) = any.filter(|(_, ino)| !dirs.contains(ino)) else { return };
            *next += 1;
            let name = name_of(*next);
            d.must(&Op::Link { ino: InodeId(ino), parent: InodeId(other), name: &name }).unwrap();
            linked.insert(ino);
        }
        _ => {
            if random.chance(1, 2)
                && let Some((from, ino)) = any.filter(|(_, ino)| !dirs.contains(ino))
            {
                let name = called(d, from, ino);
                if d.must(&unlink(ino, from, &name)).unwrap().orphaned.is_some() {
                    d.must(&Op::Reap { ino: InodeId(ino) }).unwrap();
                }
            } else {
                let (value, name) = (list(dir_mode), acl::ACCESS);
                d.must(&Op::SetXattr { ino: InodeId(dir), name, value: &value }).unwrap();
            }
        }
    }
}

#[test]
fn who_may_map_a_block_may_open_its_file() {
    let seeds = if cfg!(debug_assertions) { 30 } else { 300 };
    for seed in 0..seeds {
        let mut random = Random::new(seed);
        let mut d = Driver::new(64 << 20);
        d.must(&chmod(1, 0o755)).unwrap();
        let (mut next, mut linked) = (1, BTreeSet::new());
        for step in 0..150 {
            one(&mut random, &mut d, &mut next, &mut linked);
            if random.chance(1, 4) {
                place_all(&mut d);
                judge(&d, &linked, &format!("seed {seed}, step {step}"));
            }
            if random.chance(1, 10) {
                d.publish();
                let report = check(&*d.media).unwrap();
                assert!(report.is_sound(), "seed {seed}, step {step}: {:?}", report.findings);
                let before = d.volume.unplaced();
                d.reopen();
                assert_eq!(d.volume.unplaced(), before, "seed {seed}, step {step}");
            }
        }
    }
}
