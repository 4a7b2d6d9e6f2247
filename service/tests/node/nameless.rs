//! Files without a name (O_TMPFILE): who may name them, and when they go.

use base::InodeId;
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{Request, WANT_PIN};

use crate::rig::{Hand, Rig};

fn tmpfile(hand: &mut Hand, rig: &mut Rig, linkable: bool) -> InodeId {
    let (ino, _) = hand.numbers(rig, 1)[0];
    let (parent, mode) = (InodeId::ROOT, 0o100_644);
    hand.append(&Op::Tmpfile { ino, parent, mode, uid: hand.uid, gid: hand.uid, linkable });
    hand.append(&Op::Write { ino, offset: 0, data: b"content", clear_setid: true });
    hand.sync(rig);
    rig.settle();
    ino
}

fn there(rig: &Rig, ino: InodeId) -> Vec<Option<u32>> {
    let nlink = |n: &service::core::Node| n.volume().attr(ino).unwrap().map(|r| r.nlink);
    rig.nodes.iter().map(nlink).collect()
}

#[test]
fn a_nameless_file_lives_while_it_is_open_and_stays_once_named() {
    let mut rig = Rig::new(2, 1);
    let mut hand = rig.attach(1, 1000);
    let (named, closed, dies) = (
        tmpfile(&mut hand, &mut rig, true),
        tmpfile(&mut hand, &mut rig, true),
        tmpfile(&mut hand, &mut rig, true),
    );
    assert_eq!(there(&rig, named), [Some(0); 2]);
    let link = Op::Link { ino: named, parent: InodeId::ROOT, name: b"named" };
    hand.append_in(&mut rig, InodeId::ROOT, &link);
    hand.sync(&mut rig);
    hand.call(&mut rig, &Request::Unpin { inodes: vec![closed, named] }).unwrap();
    rig.settle();
    assert_eq!(there(&rig, closed), [None; 2], "closed");
    assert_eq!(there(&rig, named), [Some(1); 2]);
    assert_eq!(there(&rig, dies), [Some(0); 2], "still open");
    assert_eq!(hand.refusals(), 0);
    rig.event(1, Event::ClientGone(hand.client));
    rig.settle();
    assert_eq!(there(&rig, dies), [None; 2], "its process ended");
    assert_eq!(there(&rig, named), [Some(1); 2]);
    rig.check();
}

/// Another client may know the number of a nameless file, but has no way to open it.
#[test]
fn others_cannot_name_it_nor_can_anybody_if_it_says_so() {
    let mut rig = Rig::new(1, 1);
    let mut good = rig.attach(0, 1000);
    let mut bad = rig.attach(0, 2000);
    let (ino, sealed) = (tmpfile(&mut good, &mut rig, true), tmpfile(&mut good, &mut rig, false));
    let (number, _) = bad.numbers(&mut rig, 1)[0];
    for (hand, ino, name) in [(&mut bad, ino, &b"stolen"[..]), (&mut good, sealed, b"sealed")] {
        let before = hand.refusals();
        hand.lease(&mut rig, ino, LeaseMode::Write).ok();
        hand.append_in(&mut rig, InodeId::ROOT, &Op::Link { ino, parent: InodeId::ROOT, name });
        hand.sync(&mut rig);
        assert_eq!(hand.refusals(), before + 1);
    }
    // Made for somebody else, of another type, or under a number that is not the client's own.
    let (parent, mode, linkable) = (InodeId::ROOT, 0o100_644, true);
    for op in [
        Op::Tmpfile { ino: number, parent, mode, uid: 0, gid: 0, linkable },
        Op::Tmpfile { ino: number, parent, mode: 0o040_755, uid: 2000, gid: 2000, linkable },
        Op::Tmpfile { ino: number, parent: ino, mode, uid: 2000, gid: 2000, linkable },
        Op::Tmpfile { ino: InodeId(1 << 40), parent, mode, uid: 2000, gid: 2000, linkable },
    ] {
        let before = bad.refusals();
        bad.append(&op);
        bad.sync(&mut rig);
        assert_eq!(bad.refusals(), before + 1, "{op:?}");
    }
    assert_eq!(there(&rig, ino), [Some(0)]);
    rig.settle();
    rig.check();
}

/// Closed and opened again: the close waits for an operation of another thread, the open does not.
#[test]
fn a_pin_that_was_asked_for_after_an_unpin_stays() {
    let mut rig = Rig::new(2, 1);
    let mut hand = rig.attach(1, 1000);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    let other = hand.create(&mut rig, b"other", 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    let after = hand.seq + 1;
    hand.set(control::LAST_SEQUENCE, after);
    hand.post(5, &Request::Unpin { inodes: vec![ino] }, after);
    hand.post(2, &Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN }, 0);
    rig.event(1, Event::Doorbell(hand.client));
    rig.settle();
    hand.append(&Op::Write { ino: other, offset: 0, data: b"late", clear_setid: true });
    hand.sync(&mut rig);
    rig.settle();
    assert!(hand.reply(5).is_some() && hand.reply(2).is_some());
    let mut second = rig.attach(0, 1000);
    second.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    let (parent, name, open) = (InodeId::ROOT, &b"file"[..], false);
    second.append_in(&mut rig, parent, &Op::Unlink { ino, parent, name, open });
    second.sync(&mut rig);
    rig.settle();
    assert_eq!(second.refusals(), 0);
    assert_eq!(there(&rig, ino), [Some(0); 2], "the first client has it open");
    hand.call(&mut rig, &Request::Unpin { inodes: vec![ino] }).unwrap();
    rig.settle();
    assert_eq!(there(&rig, ino), [None; 2]);
    rig.check();
}
