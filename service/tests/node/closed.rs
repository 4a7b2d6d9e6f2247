//! Space of removed files: what a client has closed is not kept, though it told nobody.

use std::sync::Arc;

use base::{Errno, InodeId, NodeId, Sequence};
use client::libfs::requests;
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{self, Request, WANT_PIN};
use storage::limits::RPC_SLOT_BYTES;
use storage::media::Media;

use crate::between::Between;
use crate::rig::{Hand, Rig, create, format};

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

/// What was closed and is opened again is found closed only when the open is with the head already: the pin that it
/// gets is not taken away by that. Seed 8300933.
#[test]
fn what_is_opened_again_before_the_service_has_looked_stays() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    close(&reader, 5, ino);
    let again = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN };
    reader.post(0, &again, reader.seq);
    rig.event(1, Event::Doorbell(reader.client));
    // The question is on its way. What is closed is looked for now, as at any recall.
    reader.set(control::CLOSED_NOW, 1);
    rig.event(1, Event::Tick);
    rig.deliver_all();
    rig.settle();
    assert!(reader.reply(0).is_some(), "opened");
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
    rig.event(1, Event::ClientGone(reader.client));
    rig.settle();
    assert!(!is_there(&rig, ino));
}

/// A thread tells what is closed in a slot that the service has just looked at, and another, which waited for it with that, opens the
/// inode again in one that is still to come: the service takes the second without the first, and must not find that later.
#[test]
fn what_is_opened_again_while_the_service_looks_stays() {
    let regions: Vec<_> = (1..=3).map(format).collect();
    let between = Between::new(&regions[1]);
    let mut media: Vec<Arc<dyn Media>> = Vec::new();
    media.extend(regions.iter().map(|region| Arc::clone(region) as Arc<dyn Media>));
    media[1] = Arc::clone(&between) as Arc<dyn Media>;
    let mut rig = Rig::through(regions, media, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let (memory, log) = (reader.memory().clone(), reader.log);
    let body = |request: &Request<'_>| {
        let mut body = Vec::new();
        request.encode(Sequence(reader.seq), &mut body);
        body
    };
    let closed = body(&Request::Unpin { inodes: vec![ino] });
    let again = body(&Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_PIN });
    between.before(log, control::RPC + 5 * RPC_SLOT_BYTES as u64, move || {
        requests::put(&memory, 2, &closed);
        requests::put(&memory, 5, &again);
    });
    rig.event(1, Event::Doorbell(reader.client));
    assert!(between.is_done(), "nobody has looked");
    rig.event(1, Event::Doorbell(reader.client));
    rig.deliver_all();
    rig.settle();
    assert!(reader.reply(5).is_some(), "opened");
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
    rig.event(1, Event::ClientGone(reader.client));
    rig.settle();
    assert!(!is_there(&rig, ino));
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

/// What node 2 has said to the head is lost with their link, which comes up again.
fn lose_link(rig: &mut Rig) {
    let ends = [(NodeId(1), NodeId(2)), (NodeId(2), NodeId(1))];
    let cut = |(to, from, _): &&mut (NodeId, NodeId, _)| ends.contains(&(*to, *from));
    rig.links.iter_mut().filter(cut).for_each(|(.., queue)| queue.clear());
    for (n, other) in [(0, 2), (1, 1)] {
        rig.event(n, Event::PeerDown(NodeId(other)));
        rig.event(n, Event::PeerUp(NodeId(other)));
    }
}

/// Tells the service of a member, which tells the head; nothing arrives there.
fn say(hand: &Hand, rig: &mut Rig, request: &Request<'_>) {
    hand.post(0, request, hand.seq);
    for _ in 0..10 {
        rig.event(hand.n, Event::Doorbell(hand.client));
        rig.work(hand.n);
    }
}

#[test]
fn a_close_that_is_lost_with_its_link_counts() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let kept = owner.create(&mut rig, b"kept", 0o100_644);
    owner.sync(&mut rig);
    open(&reader, &mut rig, kept);
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
    say(&reader, &mut rig, &Request::Unpin { inodes: vec![ino] });
    assert!(reader.reply(0).is_some(), "the client goes on");
    lose_link(&mut rig);
    rig.settle();
    assert!(!is_there(&rig, ino), "nobody has it open");
    assert!(is_there(&rig, kept));
    rig.check();
}

/// A file that a client of node 2 made, unlinked and closed, of which the head has heard nothing.
fn made_and_closed_unheard(rig: &mut Rig) -> (Hand, InodeId) {
    let mut hand = rig.attach(1, 0);
    let (ino, _) = hand.numbers(rig, 1)[0];
    let (parent, mode) = (InodeId::ROOT, 0o100_644);
    hand.append(&Op::Tmpfile { ino, parent, mode, uid: 0, gid: 0, linkable: true });
    hand.append(&Op::Write { ino, offset: 0, data: b"content", clear_setid: true });
    close(&hand, 0, ino);
    hand.set(control::CLOSED_NOW, 1);
    rig.event(1, Event::Doorbell(hand.client));
    rig.pass(1_000_000);
    assert_eq!(hand.word(control::CLOSED), 0, "the service has taken it");
    (hand, ino)
}

/// What was done counts, and the file is gone in the end.
fn assert_goes(hand: &Hand, rig: &mut Rig, ino: InodeId) {
    rig.settle();
    hand.sync(rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    assert!(!is_there(rig, ino), "nobody has it open");
    rig.check();
}

#[test]
fn a_close_is_told_again_with_what_was_done_before_it() {
    let mut rig = Rig::new(3, 1);
    let (hand, ino) = made_and_closed_unheard(&mut rig);
    lose_link(&mut rig);
    assert_goes(&hand, &mut rig, ino);
}

#[test]
fn a_close_is_told_again_by_a_service_that_starts_anew() {
    let mut rig = Rig::new(3, 1);
    let (hand, ino) = made_and_closed_unheard(&mut rig);
    let mut rig = Rig::on(rig.regions.clone(), 2);
    assert_goes(&hand, &mut rig, ino);
}

/// Nobody waits for the answer of such a request, so nobody puts it again. Seed 905923.
#[test]
fn a_close_that_a_killed_service_had_taken_counts() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, mut reader, ino) = opened(&mut rig);
    let (number, _) = reader.numbers(&mut rig, 1)[0];
    remove(&mut owner, &mut rig, ino);
    // It waits for what another thread is writing.
    let next = reader.seq + 1;
    reader.set(control::LAST_SEQUENCE, next);
    reader.post(0, &Request::Unpin { inodes: vec![ino] }, next);
    rig.event(1, Event::Doorbell(reader.client));
    rig.settle();
    assert_eq!(reader.word(control::RPC) as u32, rpc::SLOT_TAKEN);
    let mut rig = Rig::on(rig.regions.clone(), 2);
    let (parent, mode) = (InodeId::ROOT, 0o100_644);
    reader.append(&Op::Tmpfile { ino: number, parent, mode, uid: 0, gid: 0, linkable: true });
    reader.ring(&mut rig);
    assert_goes(&reader, &mut rig, ino);
    assert!(is_there(&rig, number));
}

/// A process was told to give an open up, and has closed what it asked for.
#[test]
fn a_close_behind_an_open_that_was_given_up_counts() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let kept = owner.create(&mut rig, b"kept", 0o100_644);
    owner.sync(&mut rig);
    owner.call(&mut rig, &Request::Unpin { inodes: vec![kept] }).expect("closed");
    let inside = control::in_op(0);
    // The owner, in the middle of an operation, does not give the lease back that the open waits for.
    owner.lease(&mut rig, kept, LeaseMode::Write).expect("a lease");
    owner.set(inside, 1);
    reader.post(0, &Request::Inode { ino: kept, mode: LeaseMode::Write, flags: WANT_PIN }, 0);
    rig.event(1, Event::Doorbell(reader.client));
    rig.pass(1_000_000);
    rig.deliver_all();
    reader.post(1, &Request::Unpin { inodes: vec![kept, ino] }, 0);
    rig.event(1, Event::Doorbell(reader.client));
    rig.pass(1_000_000);
    rig.deliver_all();
    owner.set(inside, 2);
    rig.settle();
    assert!(reader.reply(0).is_some() && reader.reply(1).is_some());
    owner.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
    let op = Op::Unlink { ino: kept, parent: InodeId::ROOT, name: b"kept", open: false };
    owner.append_in(&mut rig, kept, &op);
    remove(&mut owner, &mut rig, ino);
    assert!(!is_there(&rig, kept) && !is_there(&rig, ino), "nobody has them open");
}

/// Of what is gone nothing is said, and not that it has nothing. Seed 905484.
#[test]
fn what_is_gone_has_no_attributes_and_no_content() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    close(&reader, 0, ino);
    remove(&mut owner, &mut rig, ino);
    assert!(!is_there(&rig, ino));
    for request in [
        Request::XattrList { ino },
        Request::XattrGet { ino, name: b"system.posix_acl_access" },
        Request::XattrPart { ino, name: b"", from: 0 },
        Request::Extents { ino, from: 0 },
        Request::Read { ino, offset: 0, len: 10 },
        Request::Names { dir: ino, cookie: 0 },
    ] {
        assert_eq!(reader.call(&mut rig, &request), Err(Errno::NOENT), "{request:?}");
    }
}

/// The head's ring is full of what node 3 does not take: it puts off what node 2 writes, and a close that comes
/// behind that, but not an open.
#[test]
fn a_close_that_is_put_off_takes_nothing_from_a_later_open() {
    let mut rig = Rig::new(3, 1);
    let (mut owner, reader, ino) = opened(&mut rig);
    let mut writers = Vec::new();
    for (n, name) in [(0, b"1"), (0, b"2"), (0, b"3"), (0, b"4"), (0, b"5"), (1, b"6")] {
        let file = owner.create(&mut rig, name, 0o100_644);
        owner.sync(&mut rig);
        let hand = rig.attach(n, 0);
        let shown = hand.lease(&mut rig, file, LeaseMode::Write).expect("a lease").granted;
        assert!(hand.holds(shown));
        writers.push((hand, file));
    }
    rig.settle();
    // What node 3 says does not arrive: the ring keeps everything, until it is full.
    let heard = |rig: &mut Rig| {
        rig.pass(1_000_000);
        for link in (0..100).flat_map(|_| 0..6) {
            while rig.links[link].1 != NodeId(3) && rig.deliver(link) {}
        }
    };
    let data = vec![7; 1 << 20];
    for (hand, file) in &mut writers {
        for _ in 0..3 {
            hand.append(&Op::Write { ino: *file, offset: 0, data: &data, clear_setid: true });
            rig.event(hand.n, Event::Doorbell(hand.client));
            heard(&mut rig);
        }
    }
    let (last, _) = writers.last().expect("some");
    assert!(last.word(control::SETTLED) < last.seq, "the head takes no more");
    for request in [
        Request::Unpin { inodes: vec![ino] },
        Request::Inode { ino, mode: LeaseMode::None, flags: WANT_PIN },
    ] {
        reader.post(0, &request, reader.seq);
        rig.event(1, Event::Doorbell(reader.client));
        (0..20).for_each(|_| heard(&mut rig));
        assert!(reader.reply(0).is_some(), "{request:?}");
    }
    rig.settle();
    remove(&mut owner, &mut rig, ino);
    assert!(is_there(&rig, ino), "it is open");
    rig.check();
}

/// As a file does: who removes a directory says whether he has it open himself.
#[test]
fn a_directory_stays_for_as_long_as_its_remover_has_it_open() {
    for open in [false, true] {
        let mut rig = Rig::new(2, 1);
        let mut hand = rig.attach(0, 0);
        let ino = hand.create(&mut rig, b"dir", 0o040_755);
        hand.sync(&mut rig);
        self::open(&hand, &mut rig, ino);
        let parent = InodeId::ROOT;
        hand.lease(&mut rig, parent, LeaseMode::Write).expect("a lease");
        hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
        hand.append_in(&mut rig, parent, &Op::Rmdir { ino, parent, name: b"dir", open });
        hand.sync(&mut rig);
        rig.settle();
        assert_eq!(hand.refusals(), 0);
        assert_eq!(is_there(&rig, ino), open);
        if open {
            hand.call(&mut rig, &Request::Unpin { inodes: vec![ino] }).expect("closed");
            rig.settle();
            assert!(!is_there(&rig, ino), "closed");
        }
        rig.check();
    }
}

/// A member that is behind has not seen the operation that made it, and takes its number for a fresh one; but what the client
/// has closed is not open, whoever asks. Seed 5003334: the file stayed for ever.
#[test]
fn what_is_closed_while_its_node_is_behind_is_not_open() {
    const COPIES: u64 = 20;
    let mut rig = Rig::new(2, 1);
    let mut owner = rig.attach(0, 0);
    let source = owner.create(&mut rig, b"source", 0o100_644);
    let data = &[7; 100];
    owner.append_in(
        &mut rig,
        source,
        &Op::Write { ino: source, offset: 0, data, clear_setid: false },
    );
    owner.sync(&mut rig);
    let mut hand = rig.attach(1, 0);
    let (ino, _) = hand.numbers(&mut rig, 1)[0];
    hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
    // Each waits for the one before to be published: the member does one a slice.
    for i in 0..COPIES {
        owner.append(&Op::CloneRange {
            ino: source,
            offset: (i + 1) * 4096 + 1,
            len: 100,
            source,
            source_offset: i * 4096 + i.min(1),
            zeroes: false,
        });
    }
    owner.set(control::SYNC_REQUEST, owner.seq);
    rig.event(0, Event::Doorbell(owner.client));
    rig.work(0);
    hand.append(&create(ino, InodeId::ROOT, b"file", 0o100_644, 0));
    hand.set(control::SYNC_REQUEST, hand.seq);
    hand.post(0, &Request::Unpin { inodes: vec![ino] }, hand.seq);
    while !hand.has_reply(0) || hand.word(control::SETTLED) < hand.seq {
        rig.event(1, Event::Doorbell(hand.client));
        rig.slice(1);
        rig.deliver_all();
        rig.work(0);
        rig.deliver_all();
    }
    let made = rig.nodes[1].volume().attr(ino).expect("sound");
    assert_eq!(made, None, "it is behind");
    lose_link(&mut rig);
    rig.settle();
    remove(&mut owner, &mut rig, ino);
    assert!(!is_there(&rig, ino), "nobody has it open");
    rig.check();
}

/// What is taken out is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn looks_that_are_taken_out_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 3] = [
        (Bug::ClosedReported, what_is_closed_while_its_node_is_behind_is_not_open),
        (Bug::ClosedLater, what_is_opened_again_before_the_service_has_looked_stays),
        (Bug::ClosesOvertaken, what_is_opened_again_while_the_service_looks_stays),
    ];
    assert_eq!(missed(&tests), []);
}
