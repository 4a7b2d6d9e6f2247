//! Files whose locks are left to one client: what it grants itself is known to whoever asks, whatever becomes of it.

use std::sync::Arc;

use base::random::Random;
use base::wire::Reader;
use base::{Epoch, Errno, InodeId, NodeId};
use service::core::limits::Limits;
use service::core::{Event, Node};
use storage::format::control::{self, LeaseMode};
use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};
use storage::format::rpc::{self, Request, WANT_PIN, WANT_WRITE};
use storage::format::sole::{self, SOLE_FILES, SOLE_LOCKS, SoleWord};
use storage::media::Media;

use crate::rig::{Hand, Rig, config_with};

use LockKind::{None as Un, Read, Write};

const SECOND: u64 = 1_000_000_000;
/// A lock that is got asks for the sole use each time.
const LIMITS: Limits = Limits { sole_again: 0, soles: SOLE_FILES, ..Limits::SHIPPED };

fn record(owner: u64, kind: LockKind, start: u64, end: u64) -> Lock {
    Lock { space: LockSpace::Record, kind, owner, pid: owner as u32, start, end }
}

fn flock(owner: u64, kind: LockKind) -> Lock {
    Lock { kind, ..Lock::all_of(LockSpace::Flock, owner) }
}

fn set(hand: &Hand, rig: &mut Rig, ino: InodeId, lock: Lock, wait: u64) -> Result<(), Errno> {
    hand.call(rig, &Request::Lock { ino, wait, lock }).map(|_| ())
}

/// Locks, whoever knows of them.
fn locked(rig: &Rig) -> usize {
    rig.nodes.iter().map(|node| node.status()).map(|s| s.locks + s.own_locks).sum()
}

/// Asks, and does not wait for the answer.
fn ask(hand: &Hand, rig: &mut Rig, n: usize, (slot, request): (usize, &Request<'_>)) {
    hand.post(slot, request, 0);
    rig.event(n, Event::Doorbell(hand.client));
    rig.deliver_all();
}

fn answer(hand: &Hand, slot: usize) -> Option<Result<(), Errno>> {
    hand.reply(slot).map(|body| rpc::reply_status(&body).expect("a status").0)
}

/// A file that a client on each node has open.
fn world(nodes: u32, seed: u64) -> (Rig, Vec<Hand>, InodeId) {
    let mut rig = Rig::with(nodes, seed, config_with(LIMITS));
    let mut hands: Vec<Hand> = (0..nodes as usize).map(|n| rig.attach(n, 0)).collect();
    let ino = hands[0].create(&mut rig, b"f", 0o100_644);
    hands[0].sync(&mut rig);
    for hand in &hands {
        let flags = WANT_PIN | WANT_WRITE;
        let open = Request::Inode { ino, mode: LeaseMode::Read, flags };
        hand.call(&mut rig, &open).expect("it may be opened");
    }
    (rig, hands, ino)
}

/// Where the client is told that a file's locks are its own.
fn place(hand: &Hand, ino: InodeId) -> Option<(usize, SoleWord)> {
    let of = |file: &usize| hand.word(sole::file_at(*file)) == ino.0;
    let file = (0..SOLE_FILES).find(of)?;
    let word = SoleWord(hand.word(sole::file_at(file) + 8));
    word.is_given().then_some((file, word))
}

/// What a client does that grants itself locks.
fn grant(hand: &Hand, (file, word): (usize, SoleWord), locks: &[Lock]) {
    for (n, lock) in locks.iter().enumerate() {
        write(hand, n, sole::record(file, lock));
    }
    hand.set(sole::used_at(file), word.0);
}

fn write(hand: &Hand, n: usize, words: [u64; 4]) {
    for (at, word) in (sole::record_at(n)..).step_by(8).zip(words) {
        hand.set(at, word);
    }
}

/// The client of node 1 has the sole use, and has granted itself a lock of bytes 0 to 9 instead of what it had.
fn granted(rig: &mut Rig, hands: &[Hand], ino: InodeId) -> (usize, SoleWord) {
    set(&hands[1], rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let place = place(&hands[1], ino).expect("nobody else uses it");
    grant(&hands[1], place, &[record(1, Write, 0, 9)]);
    place
}

#[test]
fn what_a_client_granted_itself_bars_others_when_they_ask() {
    let (mut rig, hands, ino) = world(3, 1);
    let (file, _) = granted(&mut rig, &hands, ino);
    assert_eq!(locked(&rig), 1);
    assert_eq!(rig.nodes[0].status().locks, 0, "the head does not know");
    let test = Request::LockTest { ino, lock: record(7, Read, 5, 70) };
    let body = hands[2].call(&mut rig, &test).expect("an answer");
    let mut r = Reader::new("reply", &body);
    let found = rpc::take_lock_test(&mut r).expect("well formed").expect("it is barred");
    assert_eq!((found.owner, found.start, found.end, found.pid), (1, 0, 9, 0));
    assert_eq!(hands[1].word(sole::file_at(file) + 8), 0, "it is the client's no more");
    let tried = set(&hands[2], &mut rig, ino, record(1, Write, 0, 0), 0);
    assert_eq!(tried, Err(Errno::AGAIN));
    set(&hands[2], &mut rig, ino, record(1, Write, 50, 59), 0).expect("that was given up here");
    assert_eq!(place(&hands[2], ino), None, "somebody else uses it, too");
    set(&hands[1], &mut rig, ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
    set(&hands[2], &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
    assert!(place(&hands[2], ino).is_some(), "now one alone does");
    assert_eq!(locked(&rig), 2);
}

#[test]
fn what_was_not_used_leaves_what_the_head_knows() {
    let (mut rig, hands, ino) = world(2, 2);
    set(&hands[1], &mut rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let (file, word) = place(&hands[1], ino).expect("nobody else uses it");
    // As if it had used what it was given before.
    grant(&hands[1], (file, SoleWord::given((word.0 >> 8) - 1)), &[record(1, Write, 0, 9)]);
    set(&hands[0], &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
    let tried = set(&hands[0], &mut rig, ino, record(1, Write, 50, 50), 0);
    assert_eq!(tried, Err(Errno::AGAIN));
}

#[test]
fn who_is_granting_itself_a_lock_is_waited_for_and_expelled_if_it_stops() {
    for (seed, stops) in [(3, false), (4, true)] {
        let (mut rig, hands, ino) = world(2, seed);
        let place = granted(&mut rig, &hands, ino);
        hands[1].set(control::in_op(5), 1);
        let wish = Request::Lock { ino, wait: 0, lock: record(1, Write, 20, 29) };
        ask(&hands[0], &mut rig, 0, (1, &wish));
        assert_eq!(answer(&hands[0], 1), None, "it is not known yet");
        assert!(!SoleWord(hands[1].word(sole::file_at(place.0) + 8)).is_given());
        if stops {
            rig.pass(2 * SECOND);
            rig.settle();
            assert_eq!(answer(&hands[0], 1), Some(Ok(())), "its end ended its locks");
            assert_eq!(rig.nodes[1].counters().expelled, 1);
        } else {
            // It had looked before the word went.
            grant(&hands[1], place, &[record(1, Write, 0, 9), record(1, Write, 25, 25)]);
            hands[1].set(control::in_op(5), 2);
            rig.pass(SECOND / 100);
            rig.settle();
            assert_eq!(answer(&hands[0], 1), Some(Err(Errno::AGAIN)));
        }
        rig.check();
    }
}

#[test]
fn the_end_of_a_client_ends_what_it_granted_itself() {
    let (mut rig, hands, ino) = world(2, 5);
    granted(&mut rig, &hands, ino);
    hands[1].set(control::in_op(5), 1);
    let wish = Request::Lock { ino, wait: 0, lock: record(1, Write, 0, 9) };
    ask(&hands[0], &mut rig, 0, (1, &wish));
    assert_eq!(answer(&hands[0], 1), None);
    rig.event(1, Event::ClientGone(hands[1].client));
    rig.settle();
    assert_eq!(answer(&hands[0], 1), Some(Ok(())));
    assert_eq!(locked(&rig), 1);
}

#[test]
fn who_asks_the_head_gives_it_back_first_and_who_waits_keeps_it_away() {
    let (mut rig, hands, ino) = world(2, 6);
    let (file, _) = granted(&mut rig, &hands, ino);
    let wish = record(2, Write, 5, 5);
    assert_eq!(set(&hands[1], &mut rig, ino, wish, 9), Err(Errno::AGAIN), "another owner waits");
    assert_eq!(hands[1].word(sole::file_at(file) + 8), 0);
    let tried = set(&hands[1], &mut rig, ino, record(2, Write, 50, 59), 0);
    assert_eq!(tried, Ok(()), "that was given up");
    assert_eq!(place(&hands[1], ino), None, "somebody waits");
    // A circle over both owners is seen at the head.
    let second = set(&hands[1], &mut rig, ino, record(1, Write, 50, 50), 8);
    assert_eq!(second, Err(Errno::DEADLK));
    let event = hands[1].word(control::LOCK_EVENT);
    set(&hands[1], &mut rig, ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
    assert!(hands[1].word(control::LOCK_EVENT) > event, "the waiter is told");
    set(&hands[1], &mut rig, ino, wish, 9).expect("it is free");
    assert!(place(&hands[1], ino).is_some(), "nobody waits any more");
}

/// A client can write what it likes: it harms itself.
#[test]
fn what_is_no_lock_in_the_table_does_not_count() {
    let (mut rig, hands, ino) = world(2, 7);
    let place = granted(&mut rig, &hands, ino);
    let other = place.0 + 1;
    let all = [
        sole::record(place.0, &record(1, Write, 0, 9)),
        sole::record(place.0, &record(2, Write, 5, 30)),
        sole::record(other, &record(3, Write, 40, 49)),
        [u64::MAX; 4],
        [1 << 48 | (place.0 as u64) << 32, 1, 9, 3],
        [2 << 48 | 1 << 40 | (place.0 as u64) << 32, 1, 0, 9],
        sole::record(place.0, &flock(1, Read)),
        sole::record(place.0, &flock(2, Read)),
    ];
    all.iter().enumerate().for_each(|(n, words)| write(&hands[1], n, *words));
    let tried = |hands: &[Hand], rig: &mut Rig, lock| set(&hands[0], rig, ino, lock, 0);
    assert_eq!(tried(&hands, &mut rig, record(1, Read, 0, 0)), Err(Errno::AGAIN));
    assert_eq!(tried(&hands, &mut rig, record(1, Read, 10, 100)), Ok(()), "the second is barred");
    assert_eq!(tried(&hands, &mut rig, flock(1, Write)), Err(Errno::AGAIN));
    assert_eq!(locked(&rig), 4);
    rig.check();
}

#[test]
fn a_new_head_hears_of_it_and_asks_for_it() {
    let (mut rig, hands, ino) = world(3, 8);
    granted(&mut rig, &hands, ino);
    rig.cut_to(2, &[2, 3]);
    let tried = set(&hands[2], &mut rig, ino, record(1, Read, 0, 0), 0);
    assert_eq!(tried, Err(Errno::AGAIN));
    set(&hands[2], &mut rig, ino, record(1, Write, 50, 59), 0).expect("that was given up");
    rig.check();
}

/// Who may not be known to want it any more must not get it later.
#[test]
fn what_is_given_up_while_it_is_awaited_is_not_granted() {
    let (mut rig, hands, ino) = world(2, 9);
    granted(&mut rig, &hands, ino);
    hands[1].set(control::in_op(5), 1);
    let wish = record(1, Write, 20, 29);
    ask(&hands[0], &mut rig, 0, (1, &Request::Lock { ino, wait: 0, lock: wish }));
    assert_eq!(answer(&hands[0], 1), None);
    let free = Request::Lock { ino, wait: 0, lock: record(1, Un, 20, 29) };
    ask(&hands[0], &mut rig, 0, (2, &free));
    assert_eq!(answer(&hands[0], 1), Some(Err(Errno::AGAIN)));
    assert_eq!(answer(&hands[0], 2), Some(Ok(())));
    hands[1].set(control::in_op(5), 2);
    rig.pass(SECOND / 100);
    rig.settle();
    assert_eq!(locked(&rig), 1, "the other client's");
}

#[test]
fn few_places_go_to_who_asked_last_and_none_at_all_if_it_is_so_set() {
    let limits = Limits { sole_again: 0, soles: 1, ..Limits::SHIPPED };
    let mut rig = Rig::with(1, 10, config_with(limits));
    let mut hand = rig.attach(0, 0);
    let names: [&[u8]; 2] = [b"a", b"b"];
    let [a, b] = names.map(|name| hand.create(&mut rig, name, 0o100_644));
    hand.sync(&mut rig);
    let lock = |rig: &mut Rig, ino| set(&hand, rig, ino, record(1, Write, 0, 9), 0);
    lock(&mut rig, a).expect("it is free");
    assert!(place(&hand, a).is_some());
    lock(&mut rig, b).expect("it is free");
    assert!(place(&hand, a).is_some() && place(&hand, b).is_none(), "it may be in use");
    rig.pass(2 * SECOND);
    lock(&mut rig, b).expect("it has it");
    lock(&mut rig, b).expect("it has it");
    assert!(place(&hand, a).is_none() && place(&hand, b).is_some());
    assert_eq!(locked(&rig), 2);
    let mut rig = Rig::with(1, 11, config_with(Limits { soles: 0, ..limits }));
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"a", 0o100_644);
    hand.sync(&mut rig);
    set(&hand, &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
    assert_eq!(place(&hand, ino), None);
}

/// A client whose table says more than there can be, once it is cut: each lock splits another of the same owner.
#[test]
fn a_table_of_locks_that_split_others_keeps_nobody_waiting() {
    let (mut rig, hands, ino) = world(3, 9);
    set(&hands[1], &mut rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let place = place(&hands[1], ino).expect("nobody else uses it");
    let splits = (0..SOLE_LOCKS as u64 - 1).map(|i| record(1, Write, 2 * i + 1, 2 * i + 1));
    let all: Vec<Lock> = std::iter::once(record(1, Read, 0, LOCK_END)).chain(splits).collect();
    grant(&hands[1], place, &all);
    assert_eq!(set(&hands[2], &mut rig, ino, record(1, Write, 5, 5), 0), Err(Errno::AGAIN));
    assert_eq!(set(&hands[0], &mut rig, ino, record(1, Write, 5, 5), 0), Err(Errno::AGAIN));
}

/// nicfs of the head is started anew while a client grants itself a lock, by the word of the run before: nobody else is granted
/// one meanwhile.
#[test]
fn a_head_that_is_started_anew_waits_for_who_may_grant_itself_a_lock() {
    let (mut rig, hands, ino) = world(1, 12);
    let (first, second) = (&hands[0], rig.attach(0, 0));
    let open = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN | WANT_WRITE };
    second.call(&mut rig, &open).expect("it may be opened");
    set(first, &mut rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let place = place(first, ino).expect("nobody else uses it");
    first.set(control::in_op(5), 1);
    let regions = rig.regions.clone();
    drop(rig);
    let mut rig = Rig::on(regions, 13);
    let wish = record(1, Write, 0, 9);
    ask(&second, &mut rig, 0, (1, &Request::Lock { ino, wait: 0, lock: wish }));
    rig.pass(SECOND / 10);
    rig.deliver_all();
    assert_eq!(answer(&second, 1), None, "the first may be granting itself the same");
    assert!(!SoleWord(first.word(sole::file_at(place.0) + 8)).is_given(), "and nothing after it");
    first.set(control::in_op(5), 2);
    rig.pass(SECOND / 10);
    rig.settle();
    assert_eq!(answer(&second, 1), Some(Ok(())));
    // What that run had not granted it asks for again, as LibFS does.
    assert_eq!(set(first, &mut rig, ino, wish, 0), Err(Errno::AGAIN));
    rig.check();
}

/// nicfs of the second node dies, and is started anew.
fn restart(rig: &mut Rig, seed: u64) {
    for (_, _, queue) in &mut rig.links {
        queue.clear();
    }
    let media = Arc::clone(&rig.regions[1]) as Arc<dyn Media>;
    rig.nodes[1] = Node::new(config_with(LIMITS)(2), media, Random::new(seed)).expect("a node");
    let chain = vec![NodeId(1), NodeId(2)];
    rig.event(1, Event::View { epoch: Epoch(1), chain, syncing: Vec::new(), lapse: 0 });
}

/// The link between the nodes breaks, with what is under way, and comes back.
fn break_link(rig: &mut Rig) {
    for (_, _, queue) in &mut rig.links {
        queue.clear();
    }
    for (n, peer) in [(0, NodeId(2)), (1, NodeId(1))] {
        rig.event(n, Event::PeerDown(peer));
        rig.event(n, Event::PeerUp(peer));
    }
    rig.settle();
}

/// The client of node 2 has the sole use, and nothing locked any more; the head knows of a lock of bytes 50 to 59.
fn given_up(rig: &mut Rig, hands: &[Hand], ino: InodeId) {
    set(&hands[1], rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let place = place(&hands[1], ino).expect("nobody else uses it");
    write(&hands[1], 0, [0; 4]);
    grant(&hands[1], place, &[]);
}

/// A client has given up what it had locked, without a question, and nicfs of its node is started anew: the head, which does not
/// know, loses what it is told then. Nobody is barred.
#[test]
fn what_comes_back_after_a_restart_is_told_until_it_is_heard() {
    for (seed, restarts, lost) in [(20, 1, 0), (21, 1, 1), (22, 1, 3), (23, 2, 1)] {
        let (mut rig, hands, ino) = world(2, seed);
        for n in 0..restarts {
            given_up(&mut rig, &hands, ino);
            restart(&mut rig, seed + 10 * n);
            rig.pass(1_000_000);
            (0..lost).for_each(|_| break_link(&mut rig));
            rig.settle();
        }
        let tried = set(&hands[0], &mut rig, ino, record(1, Write, 50, 59), 0);
        assert_eq!(tried, Ok(()), "{restarts} restarts, {lost} times lost");
        rig.check();
    }
}

/// The same where the head has asked for it, since somebody else wants a lock, and the client is of an earlier run.
#[test]
fn what_comes_back_when_it_is_asked_for_is_told_until_it_is_heard() {
    let (mut rig, hands, ino) = world(2, 30);
    restart(&mut rig, 31);
    break_link(&mut rig);
    given_up(&mut rig, &hands, ino);
    hands[0].post(1, &Request::Lock { ino, wait: 0, lock: record(1, Write, 50, 59) }, 0);
    rig.event(0, Event::Doorbell(hands[0].client));
    let told = rig.links.iter().position(|(to, _, all)| *to == NodeId(2) && !all.is_empty());
    assert!(told.is_some_and(|link| rig.deliver(link)), "it is asked for");
    break_link(&mut rig);
    rig.pass(2 * SECOND);
    rig.settle();
    assert_eq!(answer(&hands[0], 1), Some(Ok(())));
    rig.check();
}

/// What is taken out is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn rules_that_are_taken_out_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 4] = [
        (Bug::SoleUnwaited, who_is_granting_itself_a_lock_is_waited_for_and_expelled_if_it_stops),
        (Bug::ReturnToldOnce, what_comes_back_after_a_restart_is_told_until_it_is_heard),
        (
            Bug::SoleOfBeforeUnheard,
            a_head_that_is_started_anew_waits_for_who_may_grant_itself_a_lock,
        ),
        (Bug::AwaitedGrantedLate, what_is_given_up_while_it_is_awaited_is_not_granted),
    ];
    assert_eq!(missed(&tests), []);
}
