//! What one client asks for is done in turns, and others are heard between them.

use base::{InodeId, Sequence};
use service::core::Event;
use service::core::limits::Limits;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::Request;
use storage::limits::BLOCK_BYTES;

use crate::rig::{Hand, LANE, Rig, config_with};

/// A tenth of the pages that a turn may look at as shipped.
const SMALL: Limits = Limits { turn: 2000, ..Limits::SHIPPED };

fn chmod(ino: InodeId, mode: u32) -> Op<'static> {
    let (mask, time) =
        (storage::format::entry::mask::MODE, storage::format::entry::Stamp::default());
    Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: time, mtime: time }
}

/// A file that is the client's to write.
fn file(rig: &mut Rig, hand: &mut Hand, name: &[u8]) -> InodeId {
    let ino = hand.create(rig, name, 0o100_644);
    hand.sync(rig);
    hand.lease(rig, ino, LeaseMode::Write).expect("a lease");
    ino
}

/// Another client is answered when the first has been served for a turn, and not when all of its log is done.
#[test]
fn a_log_of_many_cheap_entries_is_taken_up_in_turns() {
    let mut rig = Rig::with(1, 3, config_with(SMALL));
    let (mut many, one) = (rig.attach(0, 0), rig.attach(0, 0));
    let ino = file(&mut rig, &mut many, b"file");
    rig.settle();
    let before = many.word(control::SETTLED);
    let entries = LANE / 4 / 128;
    for i in 0..entries {
        many.append(&chmod(ino, 0o644 + (i % 2) as u32));
    }
    one.post(0, &Request::StatFs, 0);
    many.set(control::SYNC_REQUEST, many.seq);
    rig.event(0, Event::Doorbell(many.client));
    let first = many.word(control::SETTLED) - before;
    assert!(first > 0 && first < entries / 4, "{first} of {entries} in the first turn");
    rig.event(0, Event::Doorbell(one.client));
    assert!(one.reply(0).is_some(), "who came second waits for a turn, and not for all of them");
    assert!(many.word(control::SETTLED) < many.seq);
    // The rest needs no timer and no bell.
    let mut turns = 1;
    while many.word(control::SETTLED) < many.seq {
        rig.turn(0);
        turns += 1;
        assert!(turns < 10_000, "it does not go on");
    }
    assert!(turns > 4, "{turns} turns");
    assert_eq!(many.refusals(), 0);
    rig.settle();
    rig.check();
}

/// Entries that have to wait for a publication leave the node free for others while its copies are made in slices.
#[test]
fn copies_that_space_has_to_wait_for_are_made_in_slices() {
    let mut rig = Rig::with(2, 5, config_with(Limits { slice_bytes: 4096, ..SMALL }));
    let (mut many, one) = (rig.attach(0, 0), rig.attach(0, 0));
    let ino = file(&mut rig, &mut many, b"file");
    // More than half of what is free: each change of class needs what the one before gave up.
    let free = rig.nodes[0].volume().statfs().blocks_free;
    let blocks = free * 2 / 5;
    let len = blocks * BLOCK_BYTES;
    many.append(&Op::Fallocate { ino, offset: 0, len, mode: 0 });
    let data = vec![7u8; 64 * 1024];
    for i in 0..8 {
        many.append(&Op::Write { ino, offset: i * 65536, data: &data, clear_setid: false });
    }
    many.sync(&mut rig);
    assert_eq!(many.refusals(), 0);
    for i in 0..9 {
        many.append(&chmod(ino, if i % 2 == 0 { 0o600 } else { 0o644 }));
    }
    many.set(control::SYNC_REQUEST, many.seq);
    rig.event(0, Event::Doorbell(many.client));
    let (mut slices, mut heard) = (0, 0);
    while many.word(control::SETTLED) < many.seq {
        one.post(0, &Request::StatFs, 0);
        rig.event(0, Event::Doorbell(one.client));
        heard += usize::from(one.reply(0).is_some());
        let copied = rig.nodes[0].status().counters.copied_bytes;
        rig.turn(0);
        rig.deliver_all();
        let slice = rig.nodes[0].status().counters.copied_bytes - copied;
        assert!(slice <= 2 * 4096, "{slice} bytes in one slice");
        slices += 1;
        assert!(slices < 100_000, "it does not go on");
    }
    assert_eq!(heard, slices, "somebody else is heard between any two of them");
    assert_eq!(
        many.refusals(),
        0,
        "no change was refused: there is space, once what was is published"
    );
    assert!(slices > 100, "{slices}");
    many.sync(&mut rig);
    assert!(Sequence(many.word(control::REPLICATED)) >= Sequence(many.seq));
    rig.settle();
    rig.check();
}
