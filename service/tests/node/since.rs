//! A node that comes back keeps what has not changed since the state that it has, unseen: told by when pages and blocks were
//! written, and by nothing that is read of either.

use std::collections::BTreeMap;

use base::random::Random;
use base::{InodeId, NodeId};
use service::core::limits::Limits;
use service::core::message::Message;
use storage::format::entry::Op;
use storage::limits::BLOCK_BYTES;

use crate::offers::{back, came, change, interrupted_with, let_in, parted_with};
use crate::rig::{Hand, Rig};
use crate::scrub::{view, write};

const BLOCK: usize = BLOCK_BYTES as usize;
const TWO: NodeId = NodeId(2);
/// The message that says what has not changed.
const SAME: u16 = 45;

fn limits() -> Limits {
    Limits { returns: 0, in_place: false, ..Limits::SHIPPED }
}

/// A file with content in every other block, so that what says where they lie takes several pages.
pub fn sparse(rig: &mut Rig, hand: &mut Hand, name: &[u8], blocks: u64) -> InodeId {
    let ino = hand.create(rig, name, 0o100_644);
    for block in 0..blocks {
        let data = vec![name[0] ^ block as u8; BLOCK];
        hand.append_in(rig, ino, &write(ino, 2 * block * BLOCK_BYTES, &data));
        if block % 40 == 39 {
            hand.sync(rig);
        }
    }
    hand.sync(rig);
    ino
}

/// Two nodes with sparse files, of so many blocks each; then the second is away.
fn parted(seed: u64, files: u8, blocks: u64) -> (Rig, Hand, Vec<InodeId>) {
    parted_of(seed, (1, 3), (files, blocks))
}

/// The same, of so many other files of so many blocks before.
fn parted_of(seed: u64, dense: (u8, usize), sparse_of: (u8, u64)) -> (Rig, Hand, Vec<InodeId>) {
    let (mut rig, mut hand, mut files_of) = parted_with(limits(), seed, dense.0, dense.1);
    let (files, blocks) = sparse_of;
    for n in 0..2 {
        view(&mut rig, n, 2, &[1], &[2]);
    }
    until_in(&mut rig, 2);
    for n in 0..files {
        files_of.push(sparse(&mut rig, &mut hand, &[b'A' + n], blocks));
    }
    rig.settle();
    for n in 0..2 {
        view(&mut rig, n, 4, &[1], &[]);
    }
    rig.settle();
    (rig, hand, files_of)
}

/// Until the second node is in, in the epoch after this one; how many messages of each kind it was sent.
fn until_in(rig: &mut Rig, epoch: u32) -> BTreeMap<u16, usize> {
    let mut sent = BTreeMap::new();
    until_in_seen(rig, epoch, &mut |kind, _| *sent.entry(kind).or_default() += 1);
    sent
}

/// The same; what it is sent is seen.
pub fn until_in_seen(rig: &mut Rig, epoch: u32, see: &mut dyn FnMut(u16, &[u8])) {
    for _ in 0..4000 {
        rig.pass(1_000_000);
        for link in 0..rig.links.len() {
            while let Some((kind, body)) = rig.links[link].2.front() {
                if rig.links[link].0 == TWO {
                    see(*kind, body);
                }
                rig.deliver(link);
            }
        }
        if rig.caught_up.iter().any(|c| (c.0, c.2.0) == (TWO, epoch)) {
            break;
        }
    }
    let_in(rig, epoch);
}

#[test]
fn what_has_not_changed_is_neither_read_nor_offered() {
    let (mut rig, mut hand, files) = parted(1, 3, 300);
    let before = came(&rig);
    // In place, in the middle of one: where it lies stays as it was written down.
    for block in [100, 250] {
        let data = [7; 100];
        hand.append_in(&mut rig, files[1], &write(files[1], 2 * block * BLOCK_BYTES, &data));
    }
    // Somewhere else: a hole is filled in another.
    hand.append_in(&mut rig, files[2], &write(files[2], 401 * BLOCK_BYTES, &[8; BLOCK]));
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 5);
    let sent = until_in(&mut rig, 5);
    assert!(sent.get(&SAME).is_some_and(|n| *n > 2), "{sent:?}");
    let (taken, came) = (came(&rig).0 - before.0, came(&rig).1 - before.1);
    let all = 904 * BLOCK_BYTES;
    assert!((all - 3 * BLOCK_BYTES..=all).contains(&taken), "{taken} of {all}");
    assert!(came < 60_000, "{came} bytes were sent");
}

/// A leaf that has many small files is written when one of them changes. The others in it are what they were.
#[test]
fn files_beside_one_that_has_changed_are_neither_read_nor_offered() {
    let (mut rig, mut hand, files) = parted_of(7, (60, 2), (1, 300));
    let before = came(&rig);
    for ino in files[..60].iter().step_by(3) {
        hand.append_in(&mut rig, *ino, &write(*ino, BLOCK_BYTES + 10, &[9; 10]));
    }
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 5);
    let (mut offered, mut doubted) = (0, 0);
    until_in_seen(&mut rig, 5, &mut |kind, body| {
        if let Ok((_, Message::SnapshotOffer { offers, sure, .. })) = Message::decode(kind, body) {
            offered += offers.iter().map(|offer| offer.crcs.len()).sum::<usize>();
            doubted += sure.iter().map(|part| part.count).sum::<u32>();
        }
    });
    // Those that were written to, and one that was published last before the node went.
    assert_eq!((offered, doubted), (21, 1));
    let (taken, came) = (came(&rig).0 - before.0, came(&rig).1 - before.1);
    assert_eq!(taken, (300 + 60 * 3 - 20) * BLOCK_BYTES, "{came} bytes were sent");
}

/// Who has joined, and has heard nothing since, has the state that it was sent.
#[test]
fn who_goes_again_at_once_keeps_what_it_has() {
    let (mut rig, mut hand, _) = parted(2, 2, 300);
    back(&mut rig, 5);
    until_in(&mut rig, 5);
    for n in 0..2 {
        view(&mut rig, n, 7, &[1], &[]);
    }
    for n in 0..20u8 {
        hand.create(&mut rig, &[b'z', b'0' + n], 0o100_644);
    }
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 8);
    let sent = until_in(&mut rig, 8);
    assert!(sent.get(&SAME).is_some_and(|n| *n > 2), "{sent:?}");
}

/// Until a message of that kind is the next that comes to the second; on which link.
pub fn until_next(rig: &mut Rig, wanted: u16) -> usize {
    let pieces = rig.links.iter().position(|(to, _, _)| *to == TWO).expect("a link");
    for _ in 0..1000 {
        if rig.links[pieces].2.front().is_some_and(|(kind, _)| *kind == wanted) {
            return pieces;
        }
        if !rig.deliver(pieces) {
            rig.pass(1_000_000);
            (0..rig.links.len())
                .filter(|link| *link != pieces)
                .for_each(|link| _ = rig.deliver(link));
        }
    }
    panic!("no message {wanted} is on its way");
}

/// Nothing comes for a while, and the node asks again, in the middle of what it is sent: what it said first still holds.
#[test]
fn who_asks_again_in_the_middle_keeps_what_it_has() {
    let (mut rig, _, _) = parted(6, 3, 300);
    let before = came(&rig);
    back(&mut rig, 5);
    let pieces = until_next(&mut rig, SAME);
    rig.pass(600_000_000);
    for link in 0..rig.links.len() {
        while link != pieces && rig.deliver(link) {}
    }
    until_in(&mut rig, 5);
    let (taken, came) = (came(&rig).0 - before.0, came(&rig).1 - before.1);
    assert!(taken >= 900 * BLOCK_BYTES && came < 60_000, "{taken} taken over, {came} sent");
}

/// Content that went from one file to another since, or from one place of a file to another, is not what was there.
#[test]
fn what_was_moved_since_is_no_longer_what_it_was() {
    let (mut rig, mut hand, files) = parted(3, 3, 200);
    let clone = |ino: InodeId, at: u64, source: InodeId| Op::CloneRange {
        ino,
        offset: at * BLOCK_BYTES,
        len: 20 * BLOCK_BYTES,
        source,
        source_offset: 100 * BLOCK_BYTES,
        zeroes: false,
    };
    hand.append_in(&mut rig, files[2], &clone(files[2], 200, files[1]));
    hand.append_in(&mut rig, files[3], &clone(files[3], 300, files[3]));
    let (offset, len) = (20 * BLOCK_BYTES, 12 * BLOCK_BYTES);
    // Out with a part of it, and the rest moves up.
    let (ino, size) = (files[1], 387 * BLOCK_BYTES);
    hand.append_in(&mut rig, ino, &Op::Shift { ino, offset, len, insert: false, size });
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    back(&mut rig, 5);
    until_in(&mut rig, 5);
}

/// A head that went on by itself has written in place what nobody else has, and published it. When it comes back it is a member, and what the
/// others have not changed is not what it has.
#[test]
fn what_it_has_beyond_the_others_is_not_the_same() {
    let (mut rig, mut hand, files) = parted(4, 3, 200);
    back(&mut rig, 5);
    until_in(&mut rig, 5);
    // (Sequences of the two go on alike.)
    for n in 0..2 {
        view(&mut rig, n, 7, &[2, 1], &[]);
    }
    rig.settle();
    let mut own = rig.attach(1, 0);
    let lease = own.lease(&mut rig, files[1], storage::format::control::LeaseMode::Write);
    let granted = lease.expect("a lease").granted;
    assert!(own.holds(granted));
    rig.settle();
    // The others hear nothing of it any more, and it is head alone.
    view(&mut rig, 1, 8, &[2], &[]);
    for block in 0..150u64 {
        let data = [0xee; 1000];
        own.append(&Op::Write {
            ino: files[1],
            offset: 2 * block * BLOCK_BYTES,
            data: &data,
            clear_setid: false,
        });
        own.set(storage::format::control::SYNC_REQUEST, own.seq);
        rig.event(1, service::core::Event::Doorbell(own.client));
        rig.pass(1_000_000);
    }
    for _ in 0..20 {
        rig.pass(50_000_000);
    }
    let status = rig.nodes[1].status();
    assert_eq!(status.published, status.stream, "it has published what nobody else has");
    for (_, _, queue) in &mut rig.links {
        queue.clear();
    }
    // A person has the others go on, who do other things.
    view(&mut rig, 0, 9, &[1], &[]);
    hand = rig.attach_again(&hand);
    for n in 0..200u64 {
        hand.create(&mut rig, format!("more {n}").as_bytes(), 0o100_644);
    }
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 10);
    until_in(&mut rig, 10);
}

/// As those of offers, with files that lie in many pieces.
#[test]
fn it_goes_on_wherever_it_is_interrupted() {
    let draw = |random: &mut Random, limits: &mut Limits| {
        limits.history = [1024, 1024, 4, 1][random.below(4) as usize];
        limits.in_place = false;
    };
    let spread =
        |rig: &mut Rig, hand: &mut Hand, files: &mut Vec<InodeId>, random: &mut Random, n: u64| {
            let ino = files[random.below(files.len() as u64) as usize];
            if random.chance(1, 3) {
                return change(rig, hand, files, random, n);
            }
            let offset = random.below(180) * BLOCK_BYTES + random.below(4000);
            let len = 1 + random.below(6000);
            hand.append_in(rig, ino, &write(ino, offset, &vec![n as u8; len as usize]));
        };
    let begin = |rig: &mut Rig, hand: &mut Hand| {
        (0..4u8).map(|n| sparse(rig, hand, &[b'A' + n], 90)).collect::<Vec<_>>()
    };
    let (taken, deaths) = interrupted_with(0..40, draw, begin, spread, |_| {});
    assert!(taken > 40 * 100 * BLOCK_BYTES && deaths > 20, "{taken} bytes, {deaths} deaths");
}

/// What goes wrong without it is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn what_has_changed_all_the_same_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 3] = [
        (Bug::SinceMoved, what_was_moved_since_is_no_longer_what_it_was),
        (Bug::SinceWritten, what_has_not_changed_is_neither_read_nor_offered),
        (Bug::SinceOfOthers, what_it_has_beyond_the_others_is_not_the_same),
    ];
    assert_eq!(missed(&tests), []);
}
