//! A volume that is brought to another one's state in place: of names and attributes nothing else is left, and it is sound at any time.

mod common;

use base::InodeId;
use base::random::Random;
use common::*;
use storage::check::{Data, check_with_data};
use storage::format::entry::Op;
use storage::format::page::Key;
use storage::format::rpc::Amount;
use storage::volume::reconcile::RangeEnd;
use storage::volume::{Refusal, Volume};

const ROOT: InodeId = InodeId::ROOT;

fn assert_sound(d: &Driver) {
    let mut data = Data { pending: &[], progress: &mut |_, _| {} };
    let report = check_with_data(&*d.media, &mut data).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    d.volume.invariants().unwrap();
}

/// Does something, which may be refused.
fn change(d: &mut Driver, random: &mut Random, next: &mut u64) {
    let ino = 2 + random.below(next.saturating_sub(1).max(1));
    let name = format!("n{}", random.below(40));
    let (name, parent) = (name.as_bytes(), [1, 1, 2, 3][random.below(4) as usize]);
    let value = vec![7; random.below(2000) as usize];
    let _ = match random.below(12) {
        0 | 1 => {
            *next += 1;
            d.apply(&create(*next, parent, name, 0o100_644))
        }
        2 => {
            *next += 1;
            d.apply(&create(*next, parent, name, 0o040_755))
        }
        3 => d.apply(&Op::Link { ino: InodeId(ino), parent: InodeId(parent), name }),
        4 => match d.volume.lookup(InodeId(parent), name) {
            Ok(Some((ino, _))) => d.apply(&unlink(ino.0, parent, name)),
            _ => d.apply(&chmod(ino, 0o600)),
        },
        5 => d.apply(&Op::SetXattr { ino: InodeId(ino), name: b"user.a", value: &value }),
        6 => d.apply(&Op::RemoveXattr { ino: InodeId(ino), name: b"user.a" }),
        7 => d.apply(&chmod(ino, 0o600 + random.below(64) as u32)),
        8 => d.apply(&truncate(ino, random.below(40_000))),
        9 => {
            let limit = Amount { blocks: random.below(3) * 1000, inodes: 0 };
            let user = random.chance(1, 2).then_some(5);
            d.apply(&Op::SetQuota { ino: ROOT, user, limit })
        }
        10 => {
            let (ino, offset, len) = (InodeId(ino), 4096 * random.below(9), 4096);
            d.apply(&Op::Fallocate { ino, offset, len, mode: 1 })
        }
        _ => d.apply(&write(ino, random.below(30_000), &value)),
    };
}

/// Everything about inodes but what they have as content.
fn facts(d: &Driver) -> Vec<String> {
    let volume = &d.volume;
    let all = volume.inodes_after(InodeId::NONE, usize::MAX).unwrap();
    let mut found: Vec<String> = volume.limits().map(|limit| format!("{limit:?}")).collect();
    for ino in all {
        let mut record = volume.attr(ino).unwrap().unwrap();
        if record.mode & 0o170_000 == 0o100_000 {
            record.blocks = 0;
        }
        let mut names = Vec::new();
        volume
            .readdir(ino, 2, usize::MAX, &mut |name| {
                names.push((name.next, name.ino, name.name.to_vec()));
                true
            })
            .unwrap();
        let xattrs = volume.xattrs(ino).unwrap();
        let xattrs = xattrs.iter().map(|name| volume.xattr(ino, name).unwrap());
        found.push(format!("{record:?} {names:?} {:?}", xattrs.collect::<Vec<_>>()));
    }
    found
}

#[test]
fn names_and_attributes_are_those_of_the_other() {
    let (mut told, mut same) = (0, 0);
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let (mut a, mut b) = (Driver::new(8 << 20), Driver::new(8 << 20));
        let mut next = 1;
        let common: Vec<u64> = (0..random.below(200)).map(|_| random.next_u64()).collect();
        for d in [&mut a, &mut b] {
            next = 1;
            for seed in &common {
                change(d, &mut Random::new(*seed), &mut next);
            }
            d.publish();
        }
        for d in [&mut a, &mut b] {
            let (few, mut next) = (random.below(30), next);
            (0..few).for_each(|_| change(d, &mut random, &mut next));
            d.publish();
        }
        b.volume.note_used(a.volume.last_inode());
        let before = b.volume.begin_reconciling().unwrap();
        let most = [1, 200, 1000, 50_000][random.below(4) as usize];
        let mut from = Some(Key::MIN);
        while let Some(at) = from {
            let key = random.next_u64();
            let (comes_to, end) = a.volume.items_come_to(at, RangeEnd::After(most), key).unwrap();
            from = end;
            let there = b.volume.items_come_to(at, RangeEnd::Before(end), key).unwrap().0;
            if there == comes_to {
                same += 1;
                continue;
            }
            told += 1;
            let items = a.volume.items_in(at, end).unwrap();
            let items: Vec<_> = items.iter().map(|(key, value)| (*key, &value[..])).collect();
            let given_up = b.volume.replace_items(at, end, &items).unwrap();
            if random.chance(1, 3) {
                b.publish();
                b.volume.hold_back(&given_up);
                // (Names and what they lead to may lie in different ranges.)
                b.volume.invariants().unwrap();
                if random.chance(1, 9) {
                    Volume::open(b.media.clone()).unwrap();
                }
            }
        }
        b.publish();
        assert_eq!(facts(&a), facts(&b), "seed {seed}");
        assert_sound(&b);
        drop(before);
        b.volume.let_all_go();
        b.publish();
        let digest = b.volume.digest();
        b.reopen();
        assert_eq!(b.volume.digest(), digest);
        assert_sound(&b);
    }
    assert!(told > 100 && same > 100, "{told} ranges were told, {same} not");
}

/// Where one has very much in a range in which the other has little, it is not told of it: it would be done in one go.
#[test]
fn what_is_too_much_at_once_is_refused_and_changes_nothing() {
    let mut d = Driver::new(64 << 20);
    for n in 0..17_000u64 {
        d.must(&create(n + 2, 1, format!("f{n}").as_bytes(), 0o100_644)).unwrap();
        if n % 2000 == 0 {
            d.publish();
        }
    }
    d.publish();
    let digest = d.volume.digest();
    let end = RangeEnd::Before(None);
    assert_eq!(d.volume.items_come_to(Key::MIN, end, 9), Err(Refusal::TooBig));
    assert_eq!(d.volume.replace_items(Key::MIN, None, &[]), Err(Refusal::TooBig));
    // So is what no state can have.
    let (odd, value) = (Key::new(9, 1, 3), [0; 104]);
    let bad: [&[(Key, &[u8])]; 4] = [
        &[(odd, &value)],
        &[(Key::new(9, 4, 0), &[0; 24])],
        &[(Key::new(9, 3, 5), b"x"), (Key::new(9, 3, 5), b"y")],
        &[(Key::new(0, 18, 5), &[1; 12])],
    ];
    for items in bad {
        let end = Some(Key::new(10, 0, 0));
        let done = d.volume.replace_items(Key::new(9, 0, 0), end, items);
        assert!(matches!(done, Err(Refusal::Fault(_))), "{items:?}: {done:?}");
    }
    assert_eq!(d.volume.digest(), digest);
    assert_sound(&d);
}
