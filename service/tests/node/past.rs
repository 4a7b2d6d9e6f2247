//! What a process has open stays there when its session ends and it lives: its node was started anew, or lost, or the
//! head was, or the client was expelled.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::random::Random;
use base::{ClientId, Epoch, InodeId, NodeId};
use service::core::{Event, Node, NodeConfig, Role};
use storage::format::Reader;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{self, Request, WANT_PIN};
use storage::media::Media;

use crate::rig::{Hand, Rig, config};

const MS: u64 = 1_000_000;
/// Longer than nodes are away here.
const GRACE: u64 = 10_000 * MS;

/// Three nodes (or so), of which the test decides who lives.
struct Place {
    rig: Rig,
    epoch: u32,
    dead: BTreeSet<usize>,
    starts: u64,
}

impl Place {
    fn new(count: u32) -> Self {
        let mut place =
            Self { rig: Rig::new(count, 31), epoch: 1, dead: BTreeSet::new(), starts: 1 };
        (0..count as usize).for_each(|n| place.renew(n));
        let all: Vec<_> = (0..count as usize).collect();
        place.view(&all, &[]);
        place
    }

    /// A new process of the node, on the region as it is.
    fn renew(&mut self, n: usize) {
        self.starts += 1;
        let media = Arc::clone(&self.rig.regions[n]) as Arc<dyn Media>;
        let config = NodeConfig { grace: GRACE, incarnation: self.starts, ..config(n as u32 + 1) };
        self.rig.nodes[n] = Node::new(config, media, Random::new(self.starts)).expect("a node");
        let own = NodeId(n as u32 + 1);
        let others = self.rig.links.iter_mut().filter(|(to, from, _)| *to == own || *from == own);
        others.for_each(|(_, _, queue)| queue.clear());
    }

    fn view(&mut self, chain: &[usize], syncing: &[usize]) {
        self.epoch += 1;
        let ids = |of: &[usize]| of.iter().map(|n| NodeId(*n as u32 + 1)).collect::<Vec<_>>();
        for n in chain.iter().chain(syncing).filter(|n| !self.dead.contains(n)) {
            let (chain, syncing) = (ids(chain), ids(syncing));
            let view = Event::View { epoch: Epoch(self.epoch), chain, syncing, lapse: 0 };
            self.rig.event(*n, view);
        }
        self.pass(40);
    }

    /// Time passes for those who live.
    fn pass(&mut self, steps: usize) {
        for _ in 0..steps {
            let gone: Vec<_> = self.dead.iter().map(|n| NodeId(*n as u32 + 1)).collect();
            let of_dead =
                |(to, from, _): &&mut (NodeId, NodeId, _)| gone.contains(to) || gone.contains(from);
            self.rig.links.iter_mut().filter(of_dead).for_each(|(_, _, queue)| queue.clear());
            self.rig.pass(MS);
            self.rig.links.iter_mut().filter(of_dead).for_each(|(_, _, queue)| queue.clear());
            self.rig.deliver_all();
        }
    }

    /// The node is asked to end.
    fn ends(&mut self, n: usize) {
        self.rig.event(n, Event::Closing);
        self.rig.settle();
        assert!(self.rig.nodes[n].is_closed());
        self.rig.event(n, Event::Shutdown);
        self.dead.insert(n);
    }

    /// The node starts again and joins; the others are `chain`.
    fn returns(&mut self, n: usize, chain: &[usize]) {
        self.renew(n);
        self.dead.remove(&n);
        self.view(chain, &[n]);
        assert_eq!(self.rig.nodes[n].role(), Role::Syncing);
        for _ in 0..100 {
            if !self.rig.caught_up.is_empty() {
                break;
            }
            self.pass(10);
        }
        assert!(!self.rig.caught_up.is_empty(), "it does not join");
        self.rig.caught_up.clear();
        let whole: Vec<_> = chain.iter().copied().chain([n]).collect();
        self.view(&whole, &[]);
    }

    fn has(&self, n: usize, ino: InodeId) -> bool {
        self.rig.nodes[n].volume().attr(ino).expect("a sound volume").is_some()
    }
}

fn tmpfile(hand: &mut Hand, rig: &mut Rig) -> InodeId {
    let (ino, _) = hand.numbers(rig, 1)[0];
    let (parent, mode, linkable) = (InodeId::ROOT, 0o100_644, true);
    hand.append(&Op::Tmpfile { ino, parent, mode, uid: hand.uid, gid: hand.uid, linkable });
    hand.append(&Op::Write { ino, offset: 0, data: b"content", clear_setid: true });
    hand.sync(rig);
    rig.settle();
    ino
}

/// A file that `hand` has open, and `other` then takes the name of.
fn unlink(other: &mut Hand, rig: &mut Rig, ino: InodeId, name: &[u8]) {
    other.lease(rig, ino, LeaseMode::Write).expect("a lease");
    let op = Op::Unlink { ino, parent: InodeId::ROOT, name, open: false };
    other.append_in(rig, InodeId::ROOT, &op);
    other.sync(rig);
    assert_eq!(other.refusals(), 0);
}

fn open_named(hand: &mut Hand, rig: &mut Rig, name: &[u8]) -> InodeId {
    let ino = hand.create(rig, name, 0o100_666);
    hand.sync(rig);
    let open = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN };
    hand.call(rig, &open).expect("it is there");
    rig.settle();
    ino
}

/// The process says what it still has open.
fn keep(hand: &Hand, rig: &mut Rig, before: ClientId, inodes: &[InodeId]) -> Vec<InodeId> {
    let (kept, lost) = keep_or_lose(hand, rig, before, inodes);
    assert_eq!(lost, [], "nobody has lost anything");
    kept
}

/// The same, and of which of it others have lost something.
fn keep_or_lose(
    hand: &Hand,
    rig: &mut Rig,
    before: ClientId,
    inodes: &[InodeId],
) -> (Vec<InodeId>, Vec<InodeId>) {
    let request = Request::Keep { before: vec![before], inodes: inodes.to_vec(), last: true };
    let body = hand.call(rig, &request).expect("an answer");
    rpc::take_kept(Reader::new("reply", &body)).expect("whole numbers")
}

/// A planned restart of a member: what its process has open stays, and what it closes goes.
#[test]
fn a_planned_restart_keeps_what_is_open() {
    let mut place = Place::new(2);
    let mut hand = place.rig.attach(1, 1000);
    let (kept, closed) = (tmpfile(&mut hand, &mut place.rig), tmpfile(&mut hand, &mut place.rig));
    let named = open_named(&mut hand, &mut place.rig, b"named");
    place.ends(1);
    place.view(&[0], &[]);
    let mut other = place.rig.attach(0, 1000);
    unlink(&mut other, &mut place.rig, named, b"named");
    place.pass(50);
    for ino in [kept, closed, named] {
        assert!(place.has(0, ino), "the node is away, and {ino} is open there");
    }
    place.returns(1, &[0]);
    assert!(place.rig.watched.contains(&(hand.client, hand.pid)), "hostd says when it ends");
    place.pass(50);
    for ino in [kept, closed, named] {
        assert!(place.has(0, ino) && place.has(1, ino), "its process has not spoken yet");
    }
    let again = place.rig.attach_again(&hand);
    assert_eq!(keep(&again, &mut place.rig, hand.client, &[kept, named]), [kept, named]);
    place.pass(50);
    assert!(!place.has(0, closed), "what it has open no more is free");
    for ino in [kept, named] {
        assert!(place.has(0, ino) && place.has(1, ino));
        again
            .call(&mut place.rig, &Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN })
            .expect("it is open");
        again.call(&mut place.rig, &Request::Unpin { inodes: vec![ino] }).expect("an answer");
    }
    place.pass(50);
    assert!(!place.has(0, kept) && !place.has(1, named), "closed");
    place.rig.check();
}

/// Nobody keeps space for a process that is no more, nor for a node that stays away.
#[test]
fn what_nobody_has_open_any_more_is_freed() {
    let mut place = Place::new(2);
    let mut hand = place.rig.attach(1, 1000);
    let ino = tmpfile(&mut hand, &mut place.rig);
    place.ends(1);
    place.view(&[0], &[]);
    place.returns(1, &[0]);
    assert!(place.has(0, ino));
    place.rig.event(1, Event::ClientGone(hand.client));
    place.pass(20);
    assert!(!place.has(0, ino) && !place.has(1, ino), "its process ended");

    let mut hand = place.rig.attach(1, 1000);
    let ino = tmpfile(&mut hand, &mut place.rig);
    place.dead.insert(1);
    place.view(&[0], &[]);
    place.pass(100);
    assert!(place.has(0, ino), "its node was lost a moment ago");
    place.rig.now += GRACE;
    place.pass(20);
    assert!(!place.has(0, ino), "its node does not come back");
    place.rig.check();
}

/// What is removed after a change of head is free at once, as soon as the old head is back: a node that has joined a chain
/// which waits for nobody does not wait for nodes that were lost before it began.
#[test]
fn what_is_removed_under_a_new_head_is_freed() {
    let mut place = Place::new(3);
    for (n, others) in [(1, [0, 2]), (2, [0, 1])] {
        place.ends(n);
        place.view(&others, &[]);
        place.returns(n, &others);
    }
    let mut maker = place.rig.attach(2, 0);
    let ino = maker.create(&mut place.rig, b"file", 0o100_644);
    maker.sync(&mut place.rig);
    place.rig.event(2, Event::ClientGone(maker.client));
    place.pass(10);
    place.ends(0);
    place.view(&[1, 2], &[]);
    assert_eq!(place.rig.nodes[1].role(), Role::Head);
    place.returns(0, &[1, 2]);
    let mut other = place.rig.attach(1, 0);
    unlink(&mut other, &mut place.rig, ino, b"file");
    place.pass(50);
    assert!((0..3).all(|n| !place.has(n, ino)), "nobody has it open");
    place.rig.check();
}

/// A head that still waits for somebody says so to a node that joins, and that waits as well when it is head.
#[test]
fn who_joins_a_head_that_waits_waits_too() {
    let mut place = Place::new(3);
    let mut away = place.rig.attach(2, 0);
    let ino = open_named(&mut away, &mut place.rig, b"file");
    place.dead.insert(2);
    place.view(&[0, 1], &[]);
    place.ends(1);
    place.view(&[0], &[]);
    place.returns(1, &[0]);
    let mut other = place.rig.attach(1, 0);
    unlink(&mut other, &mut place.rig, ino, b"file");
    place.ends(0);
    place.view(&[1], &[]);
    place.returns(0, &[1]);
    place.pass(100);
    assert!(place.has(1, ino), "node 3 may come back");
    place.pass((2 * GRACE / MS) as usize);
    assert!(!place.has(1, ino), "it has not");
}

/// A new head does not know what the clients of the old one have open, nor what they had open of what others remove.
#[test]
fn a_new_head_waits_for_the_old_one() {
    let mut place = Place::new(3);
    let mut hand = place.rig.attach(0, 1000);
    let ino = tmpfile(&mut hand, &mut place.rig);
    let named = open_named(&mut hand, &mut place.rig, b"named");
    place.ends(0);
    place.view(&[1, 2], &[]);
    let mut other = place.rig.attach(1, 1000);
    unlink(&mut other, &mut place.rig, named, b"named");
    // What is made now nobody can have open but those who are here.
    let new = other.create(&mut place.rig, b"new", 0o100_644);
    other.sync(&mut place.rig);
    let close = Request::Unpin { inodes: vec![new] };
    other.call(&mut place.rig, &close).expect("an answer");
    unlink(&mut other, &mut place.rig, new, b"new");
    place.pass(100);
    assert!(place.has(1, ino) && place.has(1, named));
    assert!(!place.has(1, new), "nobody waits for who cannot have it");
    place.returns(0, &[1, 2]);
    assert!(place.has(1, ino) && place.has(0, named));
    let again = place.rig.attach_again(&hand);
    assert_eq!(keep(&again, &mut place.rig, hand.client, &[named]), [named]);
    place.pass(50);
    assert!(!place.has(1, ino) && place.has(1, named));
    // And one more head, which hears it of the node itself.
    place.dead.insert(1);
    place.view(&[2, 0], &[]);
    place.pass(50);
    assert!(place.has(2, named));
    again.call(&mut place.rig, &Request::Unpin { inodes: vec![named] }).expect("an answer");
    place.pass(50);
    assert!(place.has(2, named), "somebody on the lost node may have it");
    place.rig.now += GRACE;
    place.pass(20);
    assert!(!place.has(2, named), "it does not come back");
    place.rig.check();
}

/// A node is killed, and killed again while it has joined: the table has it all.
#[test]
fn a_second_restart_changes_nothing() {
    let mut place = Place::new(2);
    let mut hand = place.rig.attach(1, 1000);
    let ino = tmpfile(&mut hand, &mut place.rig);
    place.dead.insert(1);
    place.view(&[0], &[]);
    for _ in 0..2 {
        place.returns(1, &[0]);
        let past: Vec<_> = place.rig.nodes[1].past_clients().map(|(client, ..)| client).collect();
        assert!(past.contains(&hand.client));
        let other = place.rig.attach(1, 0);
        assert_ne!(other.log, hand.log, "one log is not two clients'");
        place.dead.insert(1);
        place.view(&[0], &[]);
        place.rig.now += GRACE / 2;
        place.pass(20);
        assert!(place.has(0, ino));
    }
    place.returns(1, &[0]);
    let again = place.rig.attach_again(&hand);
    assert_eq!(keep(&again, &mut place.rig, hand.client, &[ino]), [ino]);
    place.pass(50);
    assert!(place.has(0, ino) && place.has(1, ino));
    place.rig.check();
}

/// Whoever names the session of another process neither gets what that has open nor takes it away.
#[test]
fn nobody_speaks_for_another_process() {
    let mut place = Place::new(2);
    let mut hand = place.rig.attach(1, 1000);
    let ino = tmpfile(&mut hand, &mut place.rig);
    place.ends(1);
    place.view(&[0], &[]);
    place.returns(1, &[0]);
    let thief = place.rig.attach(1, 1000);
    assert_eq!(keep(&thief, &mut place.rig, hand.client, &[ino]), []);
    // Nor does it say what was never open.
    let again = place.rig.attach_again(&hand);
    assert_eq!(keep(&again, &mut place.rig, hand.client, &[InodeId::ROOT, ino]), [ino]);
    assert_eq!(keep(&again, &mut place.rig, again.client, &[ino]), [], "its own is no earlier one");
    place.pass(50);
    assert!(place.has(0, ino));
    place.rig.check();
}

/// A client that was stopped inside an operation is expelled; what its process has open is not gone for it.
#[test]
fn who_is_expelled_keeps_what_is_open() {
    for n in 0..2 {
        let mut place = Place::new(2);
        let mut hand = place.rig.attach(n, 1000);
        let ino = tmpfile(&mut hand, &mut place.rig);
        let named = open_named(&mut hand, &mut place.rig, b"named");
        hand.lease(&mut place.rig, named, LeaseMode::Write).expect("a lease");
        hand.set(control::in_op(9), 1);
        let mut other = place.rig.attach(1 - n, 1000);
        unlink(&mut other, &mut place.rig, named, b"named");
        assert!(place.rig.detached.contains(&hand.client), "expelled");
        let again = place.rig.attach_again(&hand);
        assert_eq!(keep(&again, &mut place.rig, hand.client, &[ino, named]), [ino, named]);
        place.pass(200);
        assert!(place.has(0, ino) && place.has(1, named), "node {}", n + 1);
        place.rig.event(n, Event::ClientGone(again.client));
        place.rig.event(n, Event::ClientGone(hand.client));
        place.pass(200);
        assert!(!place.has(0, ino) && !place.has(1, named), "node {}", n + 1);
        place.rig.check();
    }
}

#[test]
fn a_user_whose_sessions_end_again_and_again_pushes_out_its_own_alone() {
    let mut place = Place::new(2);
    let other = place.rig.attach(1, 8).client;
    for _ in 0..4 {
        let own: Vec<ClientId> = (0..5).map(|_| place.rig.attach(1, 7).client).collect();
        // The node loses its place, and is let in again.
        place.view(&[0], &[1]);
        place.pass(60);
        place.view(&[0, 1], &[]);
        assert_eq!(place.rig.nodes[1].role(), Role::Member);
        let past: Vec<ClientId> = place.rig.nodes[1].past_clients().map(|p| p.0).collect();
        assert!(past.contains(&other), "another user's is there still: {past:?}");
        assert!(
            past.iter().rev().take(5).eq(own.iter().rev()) || own.iter().all(|c| past.contains(c))
        );
        assert!(past.len() <= 7, "as many as the limit for a user is, and one of another");
    }
}

/// A process writes and syncs nothing, and their node loses its place: who has that file open beside it is told once, also when the
/// service dies before that arrives. Nobody is told of what is whole, or of his own.
fn losses_are_told(n: usize, read: bool, restarted: bool, gone: bool) {
    let mut place = Place::new(3);
    let rig = &mut place.rig;
    let (mut writer, mut checkpointer) = (rig.attach(n, 1000), rig.attach(n, 1000));
    let (file, whole) =
        (open_named(&mut writer, rig, b"file"), open_named(&mut writer, rig, b"whole"));
    for ino in [file, whole] {
        let open = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN };
        checkpointer.call(rig, &open).expect("it is there");
        rig.settle();
        let granted = writer.lease(rig, ino, LeaseMode::Write).expect("a lease").granted;
        assert!(writer.holds(granted));
        writer.append(&Op::Write { ino, offset: 0, data: b"some", clear_setid: true });
        if ino == file {
            // Beside it something of the other's own.
            let other = open_named(&mut checkpointer, rig, b"other");
            checkpointer.lease(rig, other, LeaseMode::Write).expect("a lease");
        }
        writer.sync(rig);
        rig.settle();
    }
    let granted = writer.lease(rig, file, LeaseMode::Write).expect("a lease").granted;
    assert!(writer.holds(granted));
    writer.append(&Op::Write { ino: file, offset: 0, data: b"lost", clear_setid: true });
    if read {
        // What it sends reaches nobody.
        rig.event(n, Event::Doorbell(writer.client));
    }
    if gone {
        // Its process ends; what it did is published by a head, which the others do not hear of.
        rig.event(n, Event::ClientGone(writer.client));
        for _ in 0..20 {
            rig.links.iter_mut().for_each(|(.., queue)| queue.clear());
            rig.pass(MS);
        }
    }
    let chain: Vec<usize> = (0..3).filter(|m| *m != n).collect();
    let loses_its_place = |place: &mut Place| {
        place.dead.insert(n);
        place.view(&chain, &[]);
        if restarted {
            place.returns(n, &chain);
        } else {
            place.dead.remove(&n);
            place.view(&chain, &[n]);
            place.pass(100);
            place.rig.caught_up.clear();
            place.view(&[chain[0], chain[1], n], &[]);
        }
    };
    loses_its_place(&mut place);
    assert_eq!(place.rig.nodes[n].role(), Role::Member);
    let again = place.rig.attach_again(&checkpointer);
    let told = keep_or_lose(&again, &mut place.rig, checkpointer.client, &[file, whole]);
    assert_eq!(told, (vec![file, whole], vec![file]), "what the other one lost is told");
    // That answer did not arrive.
    loses_its_place(&mut place);
    let third = place.rig.attach_again(&checkpointer);
    let before = vec![again.client, checkpointer.client];
    let mut say = |inodes: &[InodeId]| {
        let request = Request::Keep { before: before.clone(), inodes: inodes.to_vec(), last: true };
        let body = third.call(&mut place.rig, &request).expect("an answer");
        rpc::take_kept(Reader::new("reply", &body)).expect("whole numbers")
    };
    assert_eq!(say(&[file, whole]), (vec![file, whole], vec![file]));
    assert_eq!(say(&[]), (vec![], vec![]), "it has arrived");
    assert_eq!(say(&[file, whole]), (vec![], vec![]), "these sessions are over");
    if gone {
        return;
    }
    let own = place.rig.attach_again(&writer);
    let kept = keep(&own, &mut place.rig, writer.client, &[file, whole]);
    assert_eq!(kept, [file, whole], "what it has lost itself it knows");
    place.rig.check();
}

#[test]
fn who_has_it_open_is_told_of_what_others_lose() {
    for n in 0..2 {
        for read in [true, false] {
            losses_are_told(n, read, false, false);
            losses_are_told(n, read, true, false);
        }
    }
}

#[test]
fn who_has_it_open_is_told_of_what_the_dead_lose() {
    for n in 0..2 {
        losses_are_told(n, true, false, true);
    }
}

/// What a client of another node did was shown here before all had it, and this node loses its place: who has that file open is told, since
/// it may be gone; and not of what all are known to have.
#[test]
fn who_has_seen_what_is_lost_is_told() {
    let mut place = Place::new(3);
    let rig = &mut place.rig;
    let (mut writer, reader) = (rig.attach(1, 1000), rig.attach(0, 1000));
    let (file, whole) =
        (open_named(&mut writer, rig, b"file"), open_named(&mut writer, rig, b"whole"));
    let early =
        |ino| Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN | rpc::WANT_EARLY };
    for ino in [file, whole] {
        reader.call(rig, &early(ino)).expect("it is there");
        rig.settle();
        let granted = writer.lease(rig, ino, LeaseMode::Write).expect("a lease").granted;
        assert!(writer.holds(granted));
        writer.append(&Op::Write { ino, offset: 0, data: b"some", clear_setid: true });
        writer.sync(rig);
        rig.settle();
    }
    reader.call(rig, &early(whole)).expect("it is there");
    rig.settle();
    let granted = writer.lease(rig, file, LeaseMode::Write).expect("a lease").granted;
    assert!(writer.holds(granted));
    writer.append(&Op::Write { ino: file, offset: 0, data: b"seen", clear_setid: true });
    reader.post(0, &early(file), 0);
    rig.event(0, Event::Doorbell(reader.client));
    for _ in 0..20 {
        rig.pass(MS);
        // Nothing comes to the third.
        for link in 0..rig.links.len() {
            while rig.links[link].0 != NodeId(3) && rig.deliver(link) {}
        }
    }
    assert!(reader.has_reply(0), "shown");
    place.dead.insert(0);
    place.view(&[1, 2], &[]);
    place.dead.remove(&0);
    place.view(&[1, 2], &[0]);
    place.pass(100);
    place.rig.caught_up.clear();
    place.view(&[1, 2, 0], &[]);
    let again = place.rig.attach_again(&reader);
    let told = keep_or_lose(&again, &mut place.rig, reader.client, &[file, whole]);
    assert_eq!(told, (vec![file, whole], vec![file]));
    place.rig.check();
}

/// Whoever writes anything into the word that says how far his log is replicated ends no service. (The siege found that it did.)
#[test]
fn a_word_that_says_more_than_there_is_ends_nobody() {
    let mut place = Place::new(2);
    for n in 0..2 {
        for word in [u64::MAX, u64::MAX - 1, 0] {
            let mut hand = place.rig.attach(n, 1000);
            let ino = open_named(&mut hand, &mut place.rig, format!("{n}-{word}").as_bytes());
            hand.lease(&mut place.rig, ino, LeaseMode::Write).expect("a lease");
            hand.append(&Op::Write { ino, offset: 0, data: b"some", clear_setid: true });
            hand.set(control::REPLICATED, word);
            place.rig.event(n, Event::ClientGone(hand.client));
            hand.set(control::REPLICATED, word);
            place.pass(50);
            assert_eq!(place.rig.nodes[n].failure(), None);
            let hand = place.rig.attach(n, 1000);
            hand.set(control::REPLICATED, word);
        }
    }
    place.view(&[0], &[1]);
    place.pass(50);
    assert_eq!(place.rig.nodes[1].failure(), None);
    place.rig.check();
}

#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn losses_that_nobody_is_told_of_are_missed() {
    use base::planted::{Bug, missed};
    let test: fn() = who_has_it_open_is_told_of_what_others_lose;
    let gone: fn() = who_has_it_open_is_told_of_what_the_dead_lose;
    let seen: fn() = who_has_seen_what_is_lost_is_told;
    let all = [
        (Bug::LossBesideUntold, test),
        (Bug::LossUnread, test),
        (Bug::LossOfGone, gone),
        (Bug::SeenUntold, seen),
    ];
    assert_eq!(missed(&all), []);
}
