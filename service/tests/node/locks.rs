//! File locks between nodes: who bars whom, who is told, and what ends a lock.

use base::wire::Reader;
use base::{Errno, InodeId};
use service::core::{Event, Role};
use storage::format::control;
use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};
use storage::format::rpc::{self, Request, WANT_PIN, WANT_WRITE};

use crate::rig::{Hand, Rig};

fn record(owner: u64, kind: LockKind, start: u64, end: u64) -> Lock {
    Lock { space: LockSpace::Record, kind, owner, pid: owner as u32, start, end }
}

fn set(hand: &Hand, rig: &mut Rig, ino: InodeId, lock: Lock, wait: u64) -> Result<(), Errno> {
    hand.call(rig, &Request::Lock { ino, wait, lock }).map(|_| ())
}

fn test(hand: &Hand, rig: &mut Rig, ino: InodeId, lock: Lock) -> Option<Lock> {
    let body = hand.call(rig, &Request::LockTest { ino, lock }).expect("an answer");
    rpc::take_lock_test(&mut Reader::new("reply", &body)).expect("a well formed reply")
}

fn open(hand: &Hand, rig: &mut Rig, ino: InodeId) {
    let mode = control::LeaseMode::Read;
    let flags = WANT_PIN | WANT_WRITE;
    hand.call(rig, &Request::Inode { ino, mode, flags }).expect("it may be opened");
}

/// A file that a client on each node has open.
fn world(nodes: u32, seed: u64) -> (Rig, Vec<Hand>, InodeId) {
    let mut rig = Rig::new(nodes, seed);
    let mut hands: Vec<Hand> = (0..nodes as usize).map(|n| rig.attach(n, 0)).collect();
    let ino = hands[0].create(&mut rig, b"f", 0o100_644);
    hands[0].sync(&mut rig);
    hands.iter().for_each(|hand| open(hand, &mut rig, ino));
    (rig, hands, ino)
}

use LockKind::{None as Un, Read, Write};

#[test]
fn a_lock_bars_others_on_all_nodes_and_its_end_is_told() {
    let (mut rig, hands, ino) = world(3, 1);
    set(&hands[1], &mut rig, ino, record(5, Write, 10, 19), 0).expect("it is free");
    let wish = record(6, Read, 0, 10);
    for n in [0, 2] {
        assert_eq!(set(&hands[n], &mut rig, ino, wish, 0), Err(Errno::AGAIN));
        assert_eq!(set(&hands[n], &mut rig, ino, wish, 77), Err(Errno::AGAIN));
        let bar = test(&hands[n], &mut rig, ino, wish).expect("it is barred");
        assert_eq!((bar.kind, bar.start, bar.end, bar.pid), (Write, 10, 19, 0));
    }
    // Another owner of the same client is as foreign as one of another client.
    assert_eq!(set(&hands[1], &mut rig, ino, wish, 0), Err(Errno::AGAIN));
    assert_eq!(test(&hands[1], &mut rig, ino, wish).expect("it is barred").pid, 5);
    let events: Vec<u64> = hands.iter().map(|h| h.word(control::LOCK_EVENT)).collect();
    set(&hands[1], &mut rig, ino, record(5, Read, 10, 19), 0).expect("a weaker lock");
    for n in [0, 2] {
        assert!(hands[n].word(control::LOCK_EVENT) > events[n], "node {n} is told");
        set(&hands[n], &mut rig, ino, wish, 77).expect("now it is free");
    }
    assert_eq!(hands[1].word(control::LOCK_EVENT), events[1], "it did not wait");
    assert_eq!(rig.nodes[0].status().locks, 3);
    for (n, owner) in [(0, 6), (1, 5), (2, 6)] {
        set(&hands[n], &mut rig, ino, record(owner, Un, 0, LOCK_END), 0).expect("an unlock");
    }
    assert_eq!(rig.nodes[0].status().locks, 0);
}

/// A mount tells that a file was closed, and which locks go with it a moment later (RELEASE comes after `close` has
/// returned). Who will not wait is not told in between that they bar him.
#[test]
fn whose_locks_are_about_to_go_bars_nobody_elsewhere() {
    let flock = |owner, kind| Lock { kind, ..Lock::all_of(LockSpace::Flock, owner) };
    for (seed, ends) in [(11, true), (12, false)] {
        let (mut rig, hands, ino) = world(3, seed);
        set(&hands[1], &mut rig, ino, flock(1, Write), 0).expect("it is free");
        set(&hands[1], &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
        let leaving = Request::LockCancel { ino, wait: rpc::LOCK_LEAVING };
        hands[0].call(&mut rig, &leaving).expect("an answer");
        let tried = set(&hands[2], &mut rig, ino, flock(2, Read), 0);
        assert_eq!(tried, Err(Errno::AGAIN), "who has none leaves none");
        hands[1].call(&mut rig, &leaving).expect("an answer");
        let tried = set(&hands[1], &mut rig, ino, flock(3, Read), 0);
        assert_eq!(tried, Err(Errno::AGAIN), "its own client knows better");
        let asks = [
            Request::Lock { ino, wait: 0, lock: flock(2, Read) },
            Request::LockTest { ino, lock: record(2, Write, 5, 5) },
        ];
        for (slot, ask) in (1..).zip(&asks) {
            hands[2].post(slot, ask, 0);
        }
        rig.event(2, Event::Doorbell(hands[2].client));
        rig.deliver_all();
        assert!((1..=2).all(|slot| hands[2].reply(slot).is_none()), "nothing is known yet");
        if ends {
            set(&hands[1], &mut rig, ino, flock(1, Un), 0).expect("an unlock");
            let answer = hands[2].reply(1).expect("an answer at once");
            assert_eq!(rpc::reply_status(&answer).expect("a status").0, Ok(()));
            set(&hands[1], &mut rig, ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        } else {
            // Another descriptor is still open.
            rig.pass(300_000_000);
            rig.deliver_all();
            let answer = hands[2].reply(1).expect("an answer in the end");
            assert_eq!(rpc::reply_status(&answer).expect("a status").0, Err(Errno::AGAIN));
            let tried = set(&hands[2], &mut rig, ino, flock(2, Read), 0);
            assert_eq!(tried, Err(Errno::AGAIN), "it is not leaving any more");
        }
        let answer = hands[2].reply(2).expect("an answer");
        let (status, mut r) = rpc::reply_status(&answer).expect("a status");
        assert_eq!(status, Ok(()));
        let found = rpc::take_lock_test(&mut r).expect("a well formed reply");
        assert_eq!(found.is_some(), !ends);
    }
}

/// Other descriptors of a file are closed all the time by who bars it: a question is put off once, for as long as the first of
/// them may take.
#[test]
fn a_question_is_put_off_once() {
    let flock = |owner, kind| Lock { kind, ..Lock::all_of(LockSpace::Flock, owner) };
    let (mut rig, hands, ino) = world(2, 13);
    set(&hands[1], &mut rig, ino, flock(1, Write), 0).expect("it is free");
    let leaving = Request::LockCancel { ino, wait: rpc::LOCK_LEAVING };
    hands[1].call(&mut rig, &leaving).expect("an answer");
    hands[0].post(1, &Request::Lock { ino, wait: 0, lock: flock(2, Read) }, 0);
    rig.event(0, Event::Doorbell(hands[0].client));
    for round in 0.. {
        assert!(round < 10, "it is put off for ever");
        rig.pass(100_000_000);
        rig.deliver_all();
        if hands[0].has_reply(1) {
            break;
        }
        hands[1].call(&mut rig, &leaving).expect("an answer");
    }
    let answer = hands[0].reply(1).expect("an answer");
    assert_eq!(rpc::reply_status(&answer).expect("a status").0, Err(Errno::AGAIN));
}

/// One that is put off again is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn a_question_that_is_put_off_again_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 1] = [(Bug::PutOffAgain, a_question_is_put_off_once)];
    assert_eq!(missed(&tests), []);
}

#[test]
fn deadlocks_across_nodes_are_refused() {
    let (mut rig, hands, ino) = world(2, 2);
    set(&hands[0], &mut rig, ino, record(1, Write, 1, 1), 0).expect("it is free");
    set(&hands[1], &mut rig, ino, record(1, Write, 2, 2), 0).expect("it is free");
    let first = set(&hands[0], &mut rig, ino, record(1, Write, 2, 2), 9);
    assert_eq!(first, Err(Errno::AGAIN), "it waits");
    let second = set(&hands[1], &mut rig, ino, record(1, Write, 1, 1), 9);
    assert_eq!(second, Err(Errno::DEADLK));
    hands[0].call(&mut rig, &Request::LockCancel { ino, wait: 9 }).expect("an answer");
    let again = set(&hands[1], &mut rig, ino, record(1, Write, 1, 1), 9);
    assert_eq!(again, Err(Errno::AGAIN), "the other no longer waits");
}

#[test]
fn the_end_of_a_client_frees_its_locks() {
    let (mut rig, hands, ino) = world(2, 3);
    set(&hands[1], &mut rig, ino, record(1, Write, 0, LOCK_END), 0).expect("it is free");
    let flock = Lock { kind: Write, ..Lock::all_of(LockSpace::Flock, 1) };
    set(&hands[1], &mut rig, ino, flock, 0).expect("another space");
    assert_eq!(set(&hands[0], &mut rig, ino, record(1, Write, 7, 7), 1), Err(Errno::AGAIN));
    let before = hands[0].word(control::LOCK_EVENT);
    rig.event(1, Event::ClientGone(hands[1].client));
    rig.deliver_all();
    assert_eq!(hands[0].word(control::LOCK_EVENT), before + 1);
    set(&hands[0], &mut rig, ino, record(1, Write, 7, 7), 1).expect("now it is free");
    set(&hands[0], &mut rig, ino, flock, 0).expect("this, too");
}

#[test]
fn a_new_head_knows_the_locks_of_the_living_only() {
    let (mut rig, hands, ino) = world(3, 4);
    set(&hands[0], &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
    set(&hands[1], &mut rig, ino, record(1, Write, 10, 19), 0).expect("it is free");
    set(&hands[2], &mut rig, ino, record(1, Write, 20, 29), 0).expect("it is free");
    let (mut freed, mut kept) = (record(2, Write, 0, 9), record(2, Read, 10, 15));
    for n in [1, 2] {
        freed.owner = n;
        assert_eq!(set(&hands[n as usize], &mut rig, ino, freed, 4), Err(Errno::AGAIN));
    }
    let before = hands[2].word(control::LOCK_EVENT);
    // Asked of the old head, which never answers.
    hands[2].post(1, &Request::Lock { ino, wait: 0, lock: record(3, Write, 90, 99) }, 0);
    rig.event(2, Event::Doorbell(hands[2].client));
    rig.cut_to(2, &[2, 3]);
    assert_eq!(rig.nodes[1].role(), Role::Head);
    assert!(hands[2].word(control::LOCK_EVENT) > before, "waiters must ask the new head");
    let answer = hands[2].reply(1).expect("an answer of the new head");
    assert_eq!(rpc::reply_status(&answer).expect("a status").0, Ok(()));
    kept.owner = 7;
    assert_eq!(set(&hands[2], &mut rig, ino, kept, 0), Err(Errno::AGAIN), "of node 2");
    let of_third = record(7, Read, 29, 29);
    assert_eq!(set(&hands[1], &mut rig, ino, of_third, 0), Err(Errno::AGAIN), "of node 3");
    let late = record(7, Read, 95, 95);
    assert_eq!(set(&hands[1], &mut rig, ino, late, 0), Err(Errno::AGAIN), "the one asked twice");
    set(&hands[2], &mut rig, ino, freed, 4).expect("node 1 is dead, and its locks are gone");
    // A member dies: the head stays and drops what it held.
    rig.cut_to(3, &[2]);
    set(&hands[1], &mut rig, ino, record(8, Write, 20, LOCK_END), 0).expect("node 3 is dead");
    assert_eq!(rig.nodes[1].failure(), None);
}

#[test]
fn who_is_head_no_more_counts_no_locks() {
    let (mut rig, hands, ino) = world(2, 5);
    set(&hands[0], &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
    // (Two clients use the file, so it is left to neither.)
    set(&hands[1], &mut rig, ino, record(1, Read, 20, 29), 0).expect("it is free");
    assert_eq!(rig.nodes[0].status().locks, 2);
    rig.cut_to(2, &[2, 1]);
    assert_eq!(rig.nodes[1].role(), Role::Head);
    assert_eq!(rig.nodes[1].status().locks, 2, "the new head is told");
    assert_eq!(rig.nodes[0].status().locks, 0, "and counts them alone");
}

#[test]
fn nobody_locks_what_he_has_not_open_or_may_not_open() {
    let (mut rig, hands, ino) = world(2, 5);
    let stranger = rig.attach(1, 1000);
    let lock = record(1, Read, 0, 0);
    assert_eq!(set(&stranger, &mut rig, ino, lock, 0), Err(Errno::BADF), "not open");
    let mode = control::LeaseMode::Read;
    stranger
        .call(&mut rig, &Request::Inode { ino, mode, flags: WANT_PIN })
        .expect("attributes are for everybody");
    set(&stranger, &mut rig, ino, lock, 0).expect("it may read it");
    let mut hands = hands;
    let secret = hands[0].create(&mut rig, b"s", 0o100_600);
    hands[0].sync(&mut rig);
    let pin = Request::Inode { ino: secret, mode, flags: WANT_PIN };
    stranger.call(&mut rig, &pin).expect("attributes are for everybody");
    assert_eq!(set(&stranger, &mut rig, secret, lock, 0), Err(Errno::ACCES));
    let gone = InodeId(1 << 40);
    assert_eq!(set(&stranger, &mut rig, gone, lock, 0), Err(Errno::BADF));
    let refused = rig.nodes[0].counters().locks_refused;
    assert!(refused >= 3, "{refused}");
}

#[test]
fn impossible_locks_are_refused_and_counted() {
    let (mut rig, hands, ino) = world(1, 6);
    let good = Request::Lock { ino, wait: 0, lock: record(1, Write, 5, 9) };
    let mut body = Vec::new();
    good.encode(base::Sequence(0), &mut body);
    let at = 24 + 16;
    let cases: [(&str, usize, &[u8]); 5] = [
        ("space", at, &[2]),
        ("kind", at + 1, &[3]),
        ("an end before the start", at + 22, &[4]),
        ("an end beyond all files", at + 29, &[0x80]),
        ("a part of a file for flock", at, &[1]),
    ];
    for (n, (what, at, bytes)) in cases.into_iter().enumerate() {
        let mut bad = body.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        hands[0].post_raw(0, &bad);
        rig.event(0, Event::Doorbell(hands[0].client));
        let reply = hands[0].reply(0).expect("an answer");
        let status = rpc::reply_status(&reply).expect("a status").0;
        assert_eq!(status, Err(Errno::INVAL), "{what}");
        assert_eq!(rig.nodes[0].counters().bad_requests, n as u64 + 1, "{what}");
    }
    set(&hands[0], &mut rig, ino, record(1, Write, 5, 9), 0).expect("the one unspoiled");
}
