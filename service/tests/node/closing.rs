//! A service that ends in order takes nothing from its clients.

use base::{Epoch, Errno, InodeId, NodeId};
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{Request, WANT_EARLY, WANT_PIN};

use crate::rig::{Hand, Rig, create};

const MS: u64 = 1_000_000;
const WORD: u64 = control::in_op(9);

fn write(ino: InodeId, offset: u64, data: &[u8]) -> Op<'_> {
    Op::Write { ino, offset, data, clear_setid: false }
}

fn size(rig: &Rig, n: usize, ino: InodeId) -> u64 {
    rig.nodes[n].volume().attr(ino).expect("a sound volume").expect("it is there").size
}

/// A client on node `n` of two (or of one) that has appended what nobody has asked for.
fn begin(nodes: u32, n: usize) -> (Rig, Hand, InodeId) {
    let mut rig = Rig::new(nodes, 21);
    let mut hand = rig.attach(n, 0);
    let ino = hand.create(&mut rig, b"f", 0o100_600);
    hand.sync(&mut rig);
    hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    for k in 0..5 {
        hand.append(&write(ino, 100 * k, &[k as u8; 100]));
    }
    (rig, hand, ino)
}

/// The driver's wait for an end in order; says whether it came.
fn closes(rig: &mut Rig, n: usize) -> bool {
    rig.event(n, Event::Closing);
    for _ in 0..100 {
        rig.deliver_all();
        if rig.nodes[n].is_closed() {
            return true;
        }
        rig.pass(MS);
    }
    false
}

/// The others go on without node `n`.
fn without(rig: &mut Rig, n: usize) {
    let chain: Vec<NodeId> = (1..=2).map(NodeId).filter(|id| id.0 != n as u32 + 1).collect();
    let view = Event::View { epoch: Epoch(2), chain, syncing: Vec::new(), lapse: 0 };
    rig.event(1 - n, view);
    rig.deliver_all();
}

#[test]
fn what_was_appended_is_on_every_member_before_the_session_ends() {
    for n in 0..2 {
        let (mut rig, hand, ino) = begin(2, n);
        // One thread waits in fsync, one is about to ask for something.
        hand.set(control::SYNC_REQUEST, hand.seq);
        assert!(closes(&mut rig, n), "node {n}");
        assert_eq!(
            hand.word(control::STATE),
            control::STATE_ATTACHED,
            "fsync returns, and no error"
        );
        assert_eq!(hand.word(control::REPLICATED), hand.seq);
        rig.event(n, Event::Shutdown);
        assert_eq!(hand.word(control::STATE), control::STATE_GONE);
        assert_eq!(hand.word(control::SEALED_AT), hand.seq, "nothing is to be repeated");
        without(&mut rig, n);
        rig.now += MS;
        rig.event(1 - n, Event::Tick);
        for _ in 0..20 {
            rig.pass(MS);
        }
        assert_eq!(size(&rig, 1 - n, ino), 500, "nothing is lost without node {}", n + 1);
        assert_eq!(hand.refusals(), 0);
    }
}

/// What a process did that is gone was shown to another, and not all have it: the others do not go on without this head.
#[test]
fn a_head_that_owes_the_others_what_the_gone_did_does_not_leave() {
    let mut rig = Rig::new(3, 21);
    let (mut gone, reader) = (rig.attach(0, 0), rig.attach(0, 0));
    let ino = gone.create(&mut rig, b"f", 0o100_600);
    gone.sync(&mut rig);
    rig.settle();
    gone.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    gone.append(&write(ino, 0, &[7; 100]));
    rig.event(0, Event::ClientGone(gone.client));
    reader.post(0, &Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_EARLY }, 0);
    rig.event(0, Event::Doorbell(reader.client));
    let unheard = |rig: &mut Rig| {
        for _ in 0..50 {
            rig.pass(MS);
            for link in 0..rig.links.len() {
                while rig.links[link].0 == NodeId(1) && rig.deliver(link) {}
            }
        }
    };
    unheard(&mut rig);
    assert!(reader.has_reply(0), "shown");
    rig.event(0, Event::Closing);
    unheard(&mut rig);
    assert!(!rig.nodes[0].is_closed() && !rig.nodes[0].may_leave());
    // They hear of it.
    assert!(closes(&mut rig, 0));
    rig.event(0, Event::Shutdown);
    assert!(rig.nodes[0].may_leave());
    assert_eq!(size(&rig, 2, ino), 100);
}

#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn a_head_that_leaves_all_the_same_is_missed() {
    use base::planted::{Bug, missed};
    let test: fn() = a_head_that_owes_the_others_what_the_gone_did_does_not_leave;
    assert_eq!(missed(&[(Bug::ClosedOwing, test)]), []);
}

#[test]
fn nothing_new_begins_while_a_service_ends() {
    for n in 0..2 {
        let (mut rig, hand, ino) = begin(2, n);
        let lease = hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
        assert!(hand.holds(lease));
        rig.event(n, Event::Closing);
        assert!(!hand.holds(lease), "who appends checks that, and does not");
        hand.post(0, &Request::Inode { ino, mode: LeaseMode::Write, flags: 0 }, hand.seq);
        rig.event(n, Event::Doorbell(hand.client));
        assert!(closes(&mut rig, n));
        assert_eq!(hand.reply(0), None, "asked of the next service");
        let attach = Event::Attach {
            token: 99,
            pid: 99,
            start_time: 1,
            uid: 0,
            gid: 0,
            groups: vec![],
            lanes: 1,
        };
        rig.event(n, attach);
        assert_eq!(rig.refused, [Errno::AGAIN]);
        // Others get what they need all the same.
        let other = rig.attach(1 - n, 0);
        other.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    }
}

/// What is in the middle of an operation counts when it is done with it.
#[test]
fn an_operation_under_way_is_waited_for() {
    for n in 0..2 {
        let (mut rig, mut hand, ino) = begin(2, n);
        hand.set(WORD, 1);
        assert!(!closes(&mut rig, n));
        hand.append(&write(ino, 500, &[9; 100]));
        hand.set(WORD, 2);
        assert!(closes(&mut rig, n));
        rig.event(n, Event::Shutdown);
        assert_eq!(hand.word(control::SEALED_AT), hand.seq);
        assert_eq!(hand.word(control::REPLICATED), hand.seq);
        assert_eq!(size(&rig, 0, ino), 600);
    }
}

/// A client that is stopped, and all of a chain that is not whole: the next service goes on with their logs.
#[test]
fn who_cannot_be_brought_to_rest_is_left_as_it_is() {
    let (mut rig, mut hand, ino) = begin(2, 0);
    hand.set(WORD, 1);
    let other = rig.attach(0, 0);
    assert!(!closes(&mut rig, 0));
    rig.event(0, Event::Shutdown);
    assert_eq!(hand.word(control::STATE), control::STATE_ATTACHED);
    assert_eq!(other.word(control::STATE), control::STATE_GONE, "it was at rest");
    // Both nodes end, so nobody has served in between.
    let rig = &mut Rig::on(rig.regions.clone(), 22);
    hand.append(&write(ino, 500, &[9; 100]));
    hand.set(WORD, 2);
    hand.sync(rig);
    rig.settle();
    assert_eq!((size(rig, 0, ino), size(rig, 1, ino)), (600, 600));
    assert_eq!(hand.refusals(), 0);

    // A member that nobody answers.
    let (mut rig, mut hand, ino) = begin(2, 1);
    rig.event(1, Event::Closing);
    for _ in 0..50 {
        rig.pass(MS);
    }
    assert!(!rig.nodes[1].is_closed());
    rig.event(1, Event::Shutdown);
    assert_eq!(hand.word(control::STATE), control::STATE_ATTACHED);
    let rig = &mut Rig::on(rig.regions.clone(), 23);
    hand.lease(rig, ino, LeaseMode::Write).expect("a lease");
    hand.append(&write(ino, 500, &[9; 100]));
    hand.sync(rig);
    rig.settle();
    assert_eq!((size(rig, 0, ino), size(rig, 1, ino)), (600, 600));
}

/// A node that is alone goes on in the same session: with its leases, its numbers and what it has open.
#[test]
fn a_node_that_is_alone_keeps_its_clients() {
    let (mut rig, mut hand, ino) = begin(1, 0);
    let number = hand.numbers(&mut rig, 1)[0].0;
    let pin = Request::Inode { ino, mode: LeaseMode::Write, flags: WANT_PIN };
    hand.call(&mut rig, &pin).expect("it is there");
    let gone = Op::Unlink { ino, parent: InodeId::ROOT, name: b"f", open: true };
    hand.append_in(&mut rig, InodeId::ROOT, &gone);
    assert!(closes(&mut rig, 0));
    rig.event(0, Event::Shutdown);
    assert_eq!(hand.word(control::STATE), control::STATE_ATTACHED);
    assert_eq!(hand.word(control::REPLICATED), hand.seq);
    let mut rig = Rig::on(rig.regions.clone(), 24);
    rig.settle();
    assert_eq!(size(&rig, 0, ino), 500, "open, without a name");
    let op = create(number, InodeId::ROOT, b"g", 0o100_600, 0);
    hand.append_in(&mut rig, InodeId::ROOT, &op);
    hand.sync(&mut rig);
    assert_eq!(hand.refusals(), 0);
    rig.check();
}
