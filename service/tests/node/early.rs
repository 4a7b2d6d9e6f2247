//! Who asks so is granted a file before every member has what other clients did to it (`rpc::WANT_EARLY`).

use base::{InodeId, NodeId};
use service::core::Event;
use service::core::limits::Limits;
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::rpc::{self, Request};

use crate::rig::{Hand, Rig, config_with};

const SLOTS: [usize; 4] = [0, 1, 2, 3];

/// A cluster of three, a client of each node and a second one of the head's (first A and B, of the head), and a file to which A has just done
/// what nobody has read of its log.
fn unheard(limits: Limits) -> (Rig, [Hand; 4], InodeId) {
    let mut rig = Rig::with(3, 7, config_with(limits));
    let (mut a, b) = (rig.attach(0, 0), rig.attach(0, 0));
    let (c, d) = (rig.attach(1, 0), rig.attach(2, 0));
    let file = a.create(&mut rig, b"file", 0o100_644);
    a.sync(&mut rig);
    rig.settle();
    let lease = a.lease(&mut rig, file, LeaseMode::Write).expect("a lease").granted;
    assert!(a.holds(lease));
    a.append(&Op::Write { ino: file, offset: 0, data: b"by A", clear_setid: false });
    (rig, [a, b, c, d], file)
}

/// The head hears the others, and they hear nothing of it.
fn pass_unheard(rig: &mut Rig) {
    for _ in 0..20 {
        rig.pass(1_000_000);
        for link in 0..rig.links.len() {
            while rig.links[link].0 == NodeId(1) && rig.deliver(link) {}
        }
    }
}

fn ask(rig: &mut Rig, hand: &Hand, slot: usize, (ino, mode, flags): (InodeId, LeaseMode, u8)) {
    hand.post(slot, &Request::Inode { ino, mode, flags }, 0);
    rig.event(hand.n, Event::Doorbell(hand.client));
}

fn read(rig: &Rig, n: usize, ino: InodeId) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    let found = rig.nodes[n].volume().read_file(ino, 0, &mut bytes).expect("content");
    bytes.truncate(found);
    bytes
}

#[test]
fn who_asks_so_sees_what_the_head_alone_has() {
    for (mode, early) in
        [LeaseMode::Read, LeaseMode::Write].map(|m| [(m, true), (m, false)]).concat()
    {
        let (mut rig, [a, b, ..], file) = unheard(Limits::SHIPPED);
        let flags = if early { rpc::WANT_EARLY } else { 0 };
        ask(&mut rig, &b, SLOTS[0], (file, mode, flags));
        pass_unheard(&mut rig);
        assert_eq!(b.has_reply(SLOTS[0]), early, "{mode:?}: only who asks so");
        if early {
            assert_eq!(read(&rig, 0, file), b"by A", "it reads what is published");
        }
        ask(&mut rig, &b, SLOTS[1], (file, LeaseMode::None, rpc::WANT_REACH));
        pass_unheard(&mut rig);
        assert!(!b.has_reply(SLOTS[1]), "the others have it not: nobody may vouch for it");
        rig.settle();
        rig.event(0, Event::Doorbell(b.client));
        rig.settle();
        assert!(b.has_reply(SLOTS[0]) && b.has_reply(SLOTS[1]));
        assert_eq!(read(&rig, 2, file), b"by A");
        assert_eq!(a.refusals() + b.refusals(), 0);
        rig.check();
    }
}

/// B waits in fsync for what A did before: its lease goes on meanwhile to A, who wants to write again.
#[test]
fn who_waits_for_the_others_keeps_nobody_from_the_file() {
    let (mut rig, [a, b, ..], file) = unheard(Limits::SHIPPED);
    ask(&mut rig, &b, SLOTS[0], (file, LeaseMode::Read, rpc::WANT_EARLY));
    pass_unheard(&mut rig);
    ask(&mut rig, &b, SLOTS[1], (file, LeaseMode::None, rpc::WANT_REACH));
    pass_unheard(&mut rig);
    assert!(b.has_reply(SLOTS[0]) && !b.has_reply(SLOTS[1]));
    ask(&mut rig, &a, SLOTS[0], (file, LeaseMode::Write, rpc::WANT_EARLY));
    pass_unheard(&mut rig);
    assert!(a.has_reply(SLOTS[0]), "A writes while B waits");
    assert!(!b.has_reply(SLOTS[1]));
    rig.settle();
    assert!(b.has_reply(SLOTS[1]));
    rig.check();
}

/// A client of another node outlives the head, and what it has seen with it: that is on its own node, wherever else it is.
#[test]
fn who_outlives_the_head_sees_what_its_node_has() {
    for n in [1, 2] {
        let (mut rig, [_, _, c, d], file) = unheard(Limits::SHIPPED);
        let hand = if n == 1 { c } else { d };
        ask(&mut rig, &hand, SLOTS[0], (file, LeaseMode::Read, rpc::WANT_EARLY));
        let (two, three) = (NodeId(2), NodeId(3));
        let pass_but = |rig: &mut Rig, ends: &[(NodeId, NodeId)]| {
            for _ in 0..20 {
                rig.pass(1_000_000);
                for link in 0..rig.links.len() {
                    let (to, from, _) = rig.links[link];
                    while !ends.contains(&(to, from)) && rig.deliver(link) {}
                }
            }
        };
        // The last of the chain is sent nothing by the second, which sends what the head does.
        pass_but(&mut rig, &[(three, two)]);
        assert_eq!(hand.has_reply(SLOTS[0]), n == 1, "the client of node {}", n + 1);
        if n == 1 {
            assert_eq!(read(&rig, n, file), b"by A");
            ask(&mut rig, &hand, SLOTS[1], (file, LeaseMode::None, rpc::WANT_REACH));
            pass_but(&mut rig, &[(three, two)]);
            assert!(!hand.has_reply(SLOTS[1]), "not all have it");
        }
        rig.settle();
        assert!(hand.has_reply(SLOTS[0]));
        rig.check();
    }
}

/// What is on its way to the ring of the head is lost with its service; what is done next to it lies in a log that is not.
#[test]
fn what_is_not_in_the_ring_is_shown_to_nobody() {
    let (mut rig, [_, b, ..], file) = unheard(Limits { inline_bytes: 0, ..Limits::SHIPPED });
    rig.holds_work = true;
    ask(&mut rig, &b, SLOTS[0], (file, LeaseMode::Write, rpc::WANT_EARLY));
    for _ in 0..20 {
        pass_unheard(&mut rig);
        // Everything is done but that.
        while let Some(at) =
            rig.pieces.iter().position(|(_, piece)| piece.kind() != service::core::work::Kind::Keep)
        {
            rig.end_work(at);
        }
    }
    assert!(!rig.pieces.is_empty() && !b.has_reply(SLOTS[0]));
    rig.holds_work = false;
    while rig.end_work(0) {}
    pass_unheard(&mut rig);
    assert!(b.has_reply(SLOTS[0]), "it is there");
    rig.settle();
    rig.check();
}
