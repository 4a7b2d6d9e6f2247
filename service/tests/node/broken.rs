//! Logs that do not go on: an entry that was changed under its checksum, or never came. Whoever it is, nobody waits
//! for ever, what was before it counts, and the client learns that the rest does not.

use std::sync::Arc;

use base::{Epoch, InodeId, Sequence};
use client::libfs::log::Log;
use client::libfs::over_media::ByHand;
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{HEADER_BYTES, Op};
use storage::format::rpc::Request;
use storage::media::Media;

use crate::between::Between;
use crate::rig::{Hand, Rig, format};

const MS: u64 = 1_000_000;
/// More than the service may take to notice.
const NOTICED: u64 = 1000 * MS;
/// An in-operation word.
const WORD: u64 = control::in_op(5);

fn write(ino: InodeId, offset: u64, data: &[u8]) -> Op<'_> {
    Op::Write { ino, offset, data, clear_setid: false }
}

/// Time passes on all nodes, with the timer at work.
fn pass(rig: &mut Rig, nanos: u64) {
    let end = rig.now + nanos;
    while rig.now < end {
        rig.pass(5 * MS);
        rig.deliver_all();
    }
}

/// The entry that the client would append next, in a lane.
fn entry(hand: &mut Hand, lane: u8, op: &Op<'_>) -> Vec<u8> {
    hand.seq += 1;
    let epoch = Epoch(hand.word(control::EPOCH) as u32);
    op.to_entry(Sequence(hand.seq), epoch, lane, 77, hand.descriptor.incarnation)
}

/// Bytes at a position of a lane.
fn put_at(hand: &Hand, lane: usize, position: u64, bytes: &[u8]) {
    let at = hand.descriptor.lane_offset(lane) + position;
    hand.media.write(hand.log, at, bytes).expect("space in the lane");
}

fn append_spoilt(hand: &mut Hand, op: &Op<'_>) {
    let mut bytes = entry(hand, 0, op);
    // The program has changed its buffer after it was copied, and before it was summed.
    bytes[64] ^= 1;
    hand.put(&bytes);
}

fn size(rig: &Rig, n: usize, ino: InodeId) -> u64 {
    rig.nodes[n].volume().attr(ino).expect("a sound volume").expect("it is there").size
}

/// Whether the client is expelled within that time.
fn expelled(rig: &mut Rig, hand: &Hand, within: u64) -> bool {
    let end = rig.now + within;
    while rig.now < end {
        // Its log goes as soon as it is published.
        let replicated = hand.media.load64(hand.log, control::REPLICATED).unwrap_or(0);
        assert!(replicated < hand.seq, "fsync of what does not count has returned");
        rig.pass(5 * MS);
        rig.deliver_all();
        if rig.detached.contains(&hand.client) {
            return true;
        }
    }
    false
}

/// A client on the head or on the other member, with a file that it may write.
fn begin(n: usize, lanes: u32) -> (Rig, Hand, InodeId) {
    let mut rig = Rig::new(2, 11);
    let mut hand = rig.attach_with(n, 0, lanes);
    let ino = hand.create(&mut rig, b"f", 0o100_600);
    hand.sync(&mut rig);
    hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    (rig, hand, ino)
}

#[test]
fn an_entry_that_never_gets_whole_ends_the_session_and_not_the_program() {
    for (n, fsync) in [(0, true), (0, false), (1, true), (1, false)] {
        let (mut rig, mut hand, ino) = begin(n, 1);
        let good = hand.append(&write(ino, 0, &[1; 100]));
        append_spoilt(&mut hand, &write(ino, 100, &[2; 100]));
        hand.append(&write(ino, 200, &[3; 100]));
        hand.append(&write(ino, 300, &[4; 100]));
        if fsync {
            hand.set(control::SYNC_REQUEST, hand.seq);
            rig.event(n, Event::Doorbell(hand.client));
        } else {
            // As after operations that nobody has announced: the last word is of before.
            hand.set(control::LAST_SEQUENCE, good.0);
            hand.ring(&mut rig);
        }
        assert!(expelled(&mut rig, &hand, NOTICED), "node {n}, fsync {fsync}");
        let counters = rig.nodes[n].status().counters;
        assert_eq!((counters.expelled, counters.broken_logs), (1, 1));
        rig.settle();
        for m in 0..2 {
            assert_eq!(size(&rig, m, ino), 100, "a prefix, on node {m}");
        }
        assert_eq!(rig.nodes[n].status().clients.len(), 0, "its log is gone");
        // It attaches anew and goes on.
        let mut again = rig.attach(n, 0);
        again.append_in(&mut rig, ino, &write(ino, 100, &[5; 100]));
        again.sync(&mut rig);
        rig.settle();
        assert_eq!((size(&rig, 0, ino), size(&rig, 1, ino)), (200, 200));
        rig.check();
    }
}

#[test]
fn nobody_is_expelled_for_a_thread_that_is_stopped() {
    for n in 0..2 {
        let (mut rig, mut hand, ino) = begin(n, 1);
        hand.set(WORD, 1);
        let whole = entry(&mut hand, 0, &write(ino, 0, &[1; 1000]));
        put_at(&hand, 0, hand.at, &whole[..200]);
        hand.set(control::LAST_SEQUENCE, hand.seq);
        hand.set(control::SYNC_REQUEST, hand.seq);
        rig.event(n, Event::Doorbell(hand.client));
        assert!(!expelled(&mut rig, &hand, 5 * NOTICED), "its thread may go on");
        // It does.
        hand.put(&whole);
        hand.set(WORD, 2);
        rig.event(n, Event::Doorbell(hand.client));
        pass(&mut rig, NOTICED);
        assert!(hand.word(control::REPLICATED) >= hand.seq);
        assert_eq!(rig.nodes[n].status().counters.broken_logs, 0);
        rig.check();
    }
}

/// A thread that is stopped while it copies its bytes into the log has no number yet: the others' fsync goes on. And if
/// it never comes back, the log is as long as it is.
#[test]
fn a_thread_that_is_stopped_while_it_copies_holds_up_nobody() {
    for (n, comes_back) in [(0, true), (1, true), (0, false), (1, false)] {
        let (mut rig, mut hand, ino) = begin(n, 2);
        let log = Log::<ByHand>::resume(hand.descriptor, hand.at, Sequence(hand.seq));
        let raw = |offset: u64, bytes: &[u8]| write(ino, offset, bytes).encode(&mut Vec::new());
        let (first, second) = ([1; 5000], [2; 100]);
        let memory = hand.memory().clone();
        let room = log.room(&memory, 0, first.len()).expect("room in the lane");
        let stopped = room.put(&first);
        let room = log.try_room(&memory, 0, second.len()).expect("the other lane is free");
        let place = room.append(raw(5000, &second), &second).persist();
        assert_eq!((place.lane, place.sequence.0), (1, hand.seq + 1));
        hand.seq = place.sequence.0;
        hand.set(control::LAST_SEQUENCE, hand.seq);
        hand.sync(&mut rig);
        if comes_back {
            let place = stopped.commit(raw(0, &first)).persist();
            assert_eq!((place.lane, place.sequence.0), (0, hand.seq + 1));
            hand.seq = place.sequence.0;
            hand.set(control::LAST_SEQUENCE, hand.seq);
            hand.sync(&mut rig);
        } else {
            drop(stopped);
            rig.event(n, Event::ClientGone(hand.client));
        }
        rig.settle();
        pass(&mut rig, NOTICED);
        for m in 0..2 {
            assert_eq!(size(&rig, m, ino), 5100, "on node {m}");
        }
        assert_eq!(rig.nodes[n].status().counters.broken_logs, 0);
        rig.check();
    }
}

/// The thread that was inside when it was seen is out; another one is inside by now, as some always is.
#[test]
fn who_came_in_later_does_not_count() {
    let (mut rig, mut hand, ino) = begin(0, 1);
    hand.set(WORD, 1);
    append_spoilt(&mut hand, &write(ino, 0, &[2; 100]));
    hand.append(&write(ino, 100, &[3; 100]));
    hand.ring(&mut rig);
    assert!(!expelled(&mut rig, &hand, 3 * NOTICED));
    hand.set(WORD, 3);
    assert!(expelled(&mut rig, &hand, NOTICED));
}

/// A number that was handed out and is in no lane.
#[test]
fn an_entry_that_is_missing_is_noticed_when_it_is_waited_for() {
    let (mut rig, mut hand, ino) = begin(1, 1);
    hand.append(&write(ino, 0, &[1; 100]));
    hand.seq += 1;
    hand.set(control::LAST_SEQUENCE, hand.seq);
    let get = Request::XattrGet { ino, name: b"user.a" };
    hand.post(0, &get, hand.seq);
    rig.event(1, Event::Doorbell(hand.client));
    assert!(expelled(&mut rig, &hand, NOTICED));
    rig.settle();
    assert_eq!(size(&rig, 0, ino), 100);
    assert_eq!(rig.nodes[1].status().requests, 0);
}

/// What lies in a lane where nothing was appended since the last lap are bytes of programs.
#[test]
fn old_bytes_that_look_like_the_next_entry_bar_nothing() {
    let (mut rig, mut hand, ino) = begin(0, 2);
    // The entry after the next one, as an earlier lap of lane 0 might have left its number.
    let mut old = write(ino, 0, b"old").to_entry(Sequence(hand.seq + 2), Epoch(1), 0, 77, 0);
    old.resize(64, 0);
    // Lane 1 has taken nothing yet; what comes goes there.
    put_at(&hand, 0, hand.at, &old);
    let mut at = 0;
    for k in 0..3 {
        let bytes = entry(&mut hand, 1, &write(ino, 100 * k, &[9; 100]));
        put_at(&hand, 1, at, &bytes);
        at += bytes.len() as u64;
        hand.set(control::LAST_SEQUENCE, hand.seq);
        hand.sync(&mut rig);
    }
    rig.settle();
    assert_eq!(size(&rig, 1, ino), 300);
    // Neither are they an entry when nothing comes after them.
    let mut old = write(ino, 0, b"old").to_entry(Sequence(hand.seq + 1), Epoch(1), 0, 77, 0);
    old.resize(64, 0);
    put_at(&hand, 0, hand.at, &old);
    hand.ring(&mut rig);
    hand.seq += 1;
    assert!(!expelled(&mut rig, &hand, 5 * NOTICED));
}

#[test]
fn a_process_that_ends_with_a_broken_log_is_told_of() {
    for n in 0..2 {
        let (mut rig, mut hand, ino) = begin(n, 1);
        hand.append(&write(ino, 0, &[1; 100]));
        append_spoilt(&mut hand, &write(ino, 100, &[2; 100]));
        hand.append(&write(ino, 200, &[3; 100]));
        rig.event(n, Event::ClientGone(hand.client));
        rig.settle();
        assert_eq!(rig.nodes[n].status().counters.broken_logs, 1);
        assert_eq!((size(&rig, 0, ino), size(&rig, 1, ino)), (100, 100), "a prefix");
        assert_eq!(rig.nodes[n].status().clients.len(), 0);
        rig.check();
    }
}

/// What its other threads did counts, although the number of what it was doing comes before.
#[test]
fn a_process_that_is_killed_while_it_appends_loses_that_alone() {
    for n in 0..2 {
        let (mut rig, mut hand, ino) = begin(n, 2);
        hand.set(WORD, 1);
        let torn = entry(&mut hand, 0, &write(ino, 0, &[1; 1000]));
        let other = entry(&mut hand, 1, &write(ino, 0, &[2; 50]));
        put_at(&hand, 0, hand.at, &torn[..128]);
        put_at(&hand, 1, 0, &other);
        rig.event(n, Event::ClientGone(hand.client));
        rig.settle();
        assert_eq!((size(&rig, 0, ino), size(&rig, 1, ino)), (50, 50));
        assert_eq!(rig.nodes[n].status().counters.broken_logs, 0, "that is how processes end");
        assert_eq!(rig.nodes[n].status().clients.len(), 0);
        rig.check();
    }
}

/// The stores of a payload may arrive after the word that says that its writer is out.
#[test]
fn a_lease_is_not_given_on_before_the_payload_is_there() {
    for n in 0..2 {
        let (mut rig, mut hand, ino) = begin(n, 1);
        let other = rig.attach(n, 0);
        pass(&mut rig, MS);
        let whole = entry(&mut hand, 0, &write(ino, 0, &[1; 1000]));
        put_at(&hand, 0, hand.at, &whole[..64]);
        other.post(0, &Request::Inode { ino, mode: LeaseMode::Write, flags: 0 }, 0);
        rig.event(n, Event::Doorbell(other.client));
        rig.deliver_all();
        rig.event(n, Event::Tick);
        rig.deliver_all();
        hand.put(&whole);
        pass(&mut rig, 10 * MS);
        assert!(other.reply(0).is_some(), "it has the lease");
        rig.settle();
        assert_eq!(hand.refusals(), 0, "the write was under a lease, on node {n}");
        assert_eq!((size(&rig, 0, ino), size(&rig, 1, ino)), (1000, 1000));
    }
}

/// A program changes the header of an entry between two looks of the service at it: what was not summed, or is another entry than
/// the one that was looked for, comes into no chunk, and ends nobody else's work.
#[test]
fn a_header_that_changes_while_it_is_read_smuggles_nothing_in() {
    // What is shown first: a longer entry; one that is expected, where there is one with the last number of all.
    for (shows_length, last) in [(true, false), (false, true)] {
        let region = format(1);
        let between = Between::new(&region);
        let media = Arc::clone(&between) as Arc<dyn Media>;
        let mut rig = Rig::through(vec![region], vec![media], 31);
        let mut hand = rig.attach(0, 0);
        let (ino, other) =
            (hand.create(&mut rig, b"a", 0o100_644), hand.create(&mut rig, b"b", 0o100_644));
        hand.sync(&mut rig);
        for ino in [ino, other] {
            hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
        }
        rig.settle();
        let place = hand.descriptor.lane_offset(0) + hand.at;
        let expected = hand.seq + 1;
        let mut sound = entry(&mut hand, 0, &write(ino, 0, &[1; 64]));
        if last {
            hand.seq = Sequence::END.0 - 2;
            sound = entry(&mut hand, 0, &write(ino, 0, &[1; 64]));
        }
        let mut smuggled = match last {
            true => Vec::new(),
            false => entry(&mut hand, 0, &write(other, 0, &[2; 64])),
        };
        smuggled.get_mut(64).into_iter().for_each(|byte| *byte ^= 1);
        let shown = if shows_length {
            let longer = (sound.len() + smuggled.len() - HEADER_BYTES) as u32;
            [&sound[..4], &longer.to_le_bytes()].concat()
        } else {
            [&sound[..8], &expected.to_le_bytes()].concat()
        };
        *between.flips.lock().expect("one thread") = Some(((hand.log, place), shown));
        put_at(&hand, 0, hand.at, &[sound, smuggled].concat());
        rig.event(0, Event::Doorbell(hand.client));
        pass(&mut rig, 2 * NOTICED);
        rig.settle();
        assert!(hand.word(control::SETTLED) < expected, "neither is what was looked for");
        assert_eq!(size(&rig, 0, other), 0, "it was never summed");
        let mut next = rig.attach(0, 0);
        next.create(&mut rig, b"c", 0o100_644);
        next.sync(&mut rig);
        rig.check();
    }
}
