//! Space of removed files: what a client has closed is not kept, though it told nobody.

use base::InodeId;
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{Request, WANT_PIN};

use crate::rig::{Hand, Rig};

fn is_there(rig: &Rig, ino: InodeId) -> bool {
    rig.nodes[0].volume().attr(ino).expect("a sound volume").is_some()
}

/// A file of one node that a client of another opens.
fn opened(rig: &mut Rig) -> (Hand, Hand, InodeId) {
    let mut owner = rig.attach(0, 0);
    let ino = owner.create(rig, b"file", 0o100_644);
    owner.append_in(rig, ino, &Op::Write { ino, offset: 0, data: b"content", clear_setid: false });
    owner.sync(rig);
    owner.call(rig, &Request::Unpin { inodes: vec![ino] }).expect("closed");
    let reader = rig.attach(1, 0);
    open(&reader, rig, ino);
    (owner, reader, ino)
}

fn open(hand: &Hand, rig: &mut Rig, ino: InodeId) {
    let request = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN };
    hand.call(rig, &request).expect("an open file");
}

/// As the library does it.
fn close(hand: &Hand, slot: u64, ino: InodeId) {
    assert_eq!(hand.word(control::CLOSED + slot * 8), 0);
    hand.set(control::CLOSED + slot * 8, ino.0);
}

fn remove(hand: &mut Hand, rig: &mut Rig, ino: InodeId) {
    let parent = InodeId::ROOT;
    let op = Op::Unlink { ino, parent, name: b"file", open: false };
    hand.lease(rig, parent, LeaseMode::Write).expect("a lease");
    hand.append_in(rig, ino, &op);
    hand.sync(rig);
    assert_eq!(hand.refusals(), 0);
    rig.settle();
}

#[test]
fn what_another_node_has_closed_goes_with_its_name() {
    for slot in [0, 17, 63] {
        let mut rig = Rig::new(3, 1);
        let (mut owner, reader, ino) = opened(&mut rig);
        close(&reader, slot, ino);
        remove(&mut owner, &mut rig, ino);
        assert!(!is_there(&rig, ino), "nobody has it open");
        assert_eq!(reader.word(control::CLOSED + slot * 8), 0, "the word is free again");
        rig.check();
    }
}

#[test]
fn what_is_open_again_stays() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    close(&reader, 3, ino);
    // Taken out by who opens it again.
    reader.set(control::CLOSED + 24, 0);
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
    rig.event(1, Event::ClientGone(reader.client));
    rig.settle();
    assert!(!is_there(&rig, ino));
}

/// The service has taken the number out when the client opens the inode again, and says so: it is pinned anew.
#[test]
fn what_is_opened_again_after_the_service_has_looked_stays() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let other = owner.create(&mut rig, b"other", 0o100_644);
    owner.sync(&mut rig);
    let shown = reader.lease(&mut rig, other, LeaseMode::Read).expect("a lease").granted;
    close(&reader, 0, ino);
    // Any lease that goes back.
    reader.call(&mut rig, &Request::Release { slots: vec![shown.slot] }).expect("released");
    rig.settle();
    assert_eq!(reader.word(control::CLOSED), 0);
    open(&reader, &mut rig, ino);
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
}

/// Numbers that make no sense change nothing.
#[test]
fn lies_about_what_is_closed_harm_nobody() {
    let mut rig = Rig::new(2, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let liar = rig.attach(1, 1000);
    for slot in 0..control::CLOSED_SLOTS as u64 {
        liar.set(control::CLOSED + slot * 8, [ino.0, 1, u64::MAX, slot][slot as usize % 4]);
    }
    liar.lease(&mut rig, ino, LeaseMode::Read).expect("a lease");
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "the reader has it open");
    close(&reader, 0, ino);
    rig.settle();
    rig.event(1, Event::ClientGone(reader.client));
    rig.settle();
    assert!(!is_there(&rig, ino));
    rig.check();
}
