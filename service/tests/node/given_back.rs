//! Leases that are given back or taken back, when there is much else to do: each goes once, when what was done under it is with the
//! head, and nobody is kept waiting by who does not stop.

use base::{Epoch, InodeId, NodeId, Sequence};
use service::core::limits::Limits;
use service::core::{Event, NodeConfig};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{Op, Stamp, mask};
use storage::format::rpc::{self, Granted, InodeReply, Request, WANT_PIN, WANT_READ, WANT_WRITE};

use crate::rig::{Hand, LANE, Rig, config, config_with, create};

const THREE: NodeId = NodeId(3);
/// A tenth of the pages that a turn may look at as shipped.
const SMALL: Limits = Limits { turn: 2000, ..Limits::SHIPPED };

/// Everything arrives but at node 3, whose messages are kept.
fn deliver_two(rig: &mut Rig) {
    for link in (0..50).flat_map(|_| 0..6) {
        while rig.links[link].0 != THREE && rig.deliver(link) {}
    }
}

/// Node 3 hears nothing, until the head takes no more.
fn fill_up(rig: &mut Rig, filler: &mut Hand, ino: InodeId) {
    filler.lease(rig, ino, LeaseMode::Write).expect("a lease");
    for n in 0..14u64 {
        let data = vec![1; 65_536];
        filler.append(&Op::Write { ino, offset: n * 65_536, data: &data, clear_setid: false });
    }
    filler.set(control::SYNC_REQUEST, filler.seq);
    rig.event(0, Event::Doorbell(filler.client));
    for _ in 0..20 {
        deliver_two(rig);
        rig.pass(100_000);
    }
}

/// The link between the first two is lost with what was on it, and comes back.
fn flap(rig: &mut Rig) {
    rig.links.iter_mut().filter(|l| l.0 != THREE && l.1 != THREE).for_each(|l| l.2.clear());
    for (n, peer) in [(0, NodeId(2)), (1, NodeId(1))] {
        rig.event(n, Event::PeerDown(peer));
        rig.event(n, Event::PeerUp(peer));
    }
}

fn wants(ino: InodeId) -> Request<'static> {
    Request::Inode { ino, mode: LeaseMode::Write, flags: WANT_READ | WANT_WRITE }
}

/// The lease that was asked for in a slot, if it is granted.
fn granted(hand: &Hand, slot: usize) -> Option<Granted> {
    let body = hand.reply(slot)?;
    let (status, mut rest) = rpc::reply_status(&body).expect("a status");
    assert_eq!(status, Ok(()));
    Some(InodeReply::decode(&mut rest).expect("a well formed reply").granted)
}

/// A client gives a lease back while the head takes nothing; it asks for it again, gets it, and its node reports it. What it gave
/// back is void then: somebody else who asks waits for a recall.
#[test]
fn a_return_that_waits_is_void_once_its_lease_is_reported() {
    let little = |n| NodeConfig { memory: 1 << 20, ..config(n) };
    let mut rig = Rig::with(3, 5, little);
    let (mut filler, mut a, b) = (rig.attach(0, 0), rig.attach(1, 0), rig.attach(0, 0));
    let (full, ino) =
        (filler.create(&mut rig, b"full", 0o100_644), a.create(&mut rig, b"a", 0o100_644));
    filler.sync(&mut rig);
    a.sync(&mut rig);
    rig.settle();
    let first = a.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
    // From here on the head has it from the report, as most leases are had.
    flap(&mut rig);
    rig.settle();
    fill_up(&mut rig, &mut filler, full);
    let write = Op::Write { ino, offset: 0, data: b"first", clear_setid: false };
    a.append(&write);
    a.set(control::SYNC_REQUEST, a.seq);
    rig.event(1, Event::Doorbell(a.client));
    deliver_two(&mut rig);
    assert!(a.word(control::SETTLED) < a.seq, "the head takes nothing now");
    rig.pass(1_000_000);
    a.post(0, &Request::Release { slots: vec![first.slot] }, 0);
    rig.event(1, Event::Doorbell(a.client));
    deliver_two(&mut rig);
    assert!(!a.holds(first) && a.has_reply(0));
    let _ = a.reply(0);
    a.post(1, &wants(ino), 0);
    let mut again = None;
    for _ in 0..100 {
        rig.event(1, Event::Doorbell(a.client));
        deliver_two(&mut rig);
        rig.pass(100_000);
        again = again.or_else(|| granted(&a, 1));
    }
    let again = again.expect("the head holds it for taken by who asks");
    assert!(a.holds(again));
    flap(&mut rig);
    for _ in 0..20 {
        deliver_two(&mut rig);
        rig.pass(100_000);
    }
    assert!(a.holds(again));
    // Node 3 hears all, so that the head goes on.
    rig.deliver_all();
    rig.pass(1_000_000);
    rig.deliver_all();
    assert!(a.word(control::SETTLED) >= a.seq);
    b.post(0, &wants(ino), 0);
    let mut other = None;
    for _ in 0..200 {
        rig.event(0, Event::Doorbell(b.client));
        rig.deliver_all();
        other = other.or_else(|| granted(&b, 0));
        let two = other.is_some_and(|g| b.holds(g)) && a.holds(again);
        assert!(!two, "two writers of one file");
        rig.pass(100_000);
    }
    assert!(other.is_some());
    rig.settle();
    assert_eq!(a.refusals(), 0);
    rig.check();
}

/// An entry of 128 bytes in lane 0, which goes round.
fn put_round(hand: &mut Hand, op: &Op<'_>) {
    hand.seq += 1;
    let epoch = Epoch(hand.word(control::EPOCH) as u32);
    let bytes = op.to_entry(Sequence(hand.seq), epoch, 0, 77, hand.descriptor.incarnation);
    assert_eq!(LANE % bytes.len() as u64, 0, "nothing has to be skipped at the end");
    let at = hand.descriptor.lane_offset(0) + hand.at % LANE;
    hand.media.write(hand.log, at, &bytes).expect("space in the lane");
    hand.at += bytes.len() as u64;
    hand.set(control::LAST_SEQUENCE, hand.seq);
}

/// Appends as fast as it is read: changes of the mode of one file, in lane 0.
struct Busy {
    ino: InodeId,
    each: u64,
}

impl Busy {
    fn new(hand: &mut Hand, ino: InodeId) -> Self {
        let each = Self::op(ino, 0).to_entry(Sequence(1), Epoch(1), 0, 1, 1).len() as u64;
        while !hand.at.is_multiple_of(each) {
            hand.append(&Op::Truncate { ino, size: 0, clear_setid: false });
        }
        Self { ino, each }
    }

    fn op(ino: InodeId, mode: u32) -> Op<'static> {
        let time = Stamp::default();
        let mask = mask::MODE;
        Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: time, mtime: time }
    }

    fn fill(&self, hand: &mut Hand) {
        let room = hand.word(control::reclaim(0)) + LANE / 2;
        let mut added = 0;
        while hand.at + self.each <= room && added < 4000 {
            let mode = 0o600 + (hand.seq % 2) as u32;
            put_round(hand, &Self::op(self.ino, mode));
            added += 1;
        }
    }
}

/// A program appends as fast as it is read, so that its log is never empty: what else it has leased goes to others all the same,
/// once all has been read that was there.
#[test]
fn a_lease_comes_back_from_who_never_stops_writing() {
    let mut rig = Rig::with(1, 3, config_with(SMALL));
    let (mut many, one) = (rig.attach(0, 0), rig.attach(0, 0));
    let (ino, other) =
        (many.create(&mut rig, b"f", 0o100_644), many.create(&mut rig, b"g", 0o100_644));
    many.sync(&mut rig);
    many.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    many.lease(&mut rig, other, LeaseMode::Write).expect("a lease");
    let mut numbers = Vec::new();
    while numbers.len() < 400 {
        numbers.extend(many.numbers(&mut rig, 100).into_iter().map(|(ino, _)| ino));
    }
    let root = many.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease").granted;
    rig.settle();
    let busy = Busy::new(&mut many, ino);
    busy.fill(&mut many);
    one.post(0, &wants(other), 0);
    rig.event(0, Event::Doorbell(one.client));
    let (mut events, mut made) = (0, Vec::new());
    while !one.has_reply(0) {
        busy.fill(&mut many);
        // It makes files, too, and closes each at once; what it says of that is heard before the log is read as far.
        if let Some(ino) = numbers.pop() {
            let name = format!("{ino}").into_bytes();
            put_round(&mut many, &create(ino, InodeId::ROOT, &name, 0o100_600, 0));
            let slot = control::CLOSED + (events % control::CLOSED_SLOTS) as u64 * 8;
            assert_eq!(many.word(slot), 0, "what is closed is heard of");
            many.set(slot, ino.0);
            made.push((ino, name));
        }
        rig.event(0, Event::Doorbell(many.client));
        rig.turn(0);
        rig.now += 100_000;
        rig.event(0, Event::Tick);
        assert!(many.word(control::SETTLED) < many.seq, "its log is never empty");
        events += 1;
        assert!(events < 3000, "the lease does not come back");
    }
    assert!(many.holds(root) && made.len() > 100);
    rig.settle();
    many.sync(&mut rig);
    // Nobody has them open: without their names they are gone.
    let mut one = one;
    for (ino, name) in &made {
        let unlink = Op::Unlink { ino: *ino, parent: InodeId::ROOT, name, open: false };
        one.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
        one.append_in(&mut rig, *ino, &unlink);
    }
    one.sync(&mut rig);
    rig.settle();
    assert_eq!(rig.nodes[0].volume().orphans().expect("a sound volume"), []);
    assert_eq!((many.refusals(), one.refusals()), (0, 0));
    rig.check();
}

/// A program appends as fast as it is read, and says at once what it closes, which somebody else has removed: it is freed, though the
/// log is never empty, once all has been read that was there.
#[test]
fn what_is_closed_is_told_by_who_never_stops_writing() {
    let mut rig = Rig::with(1, 12, config_with(SMALL));
    let (mut many, mut one) = (rig.attach(0, 0), rig.attach(0, 0));
    let (ino, gone) =
        (many.create(&mut rig, b"f", 0o100_644), one.create(&mut rig, b"g", 0o100_644));
    many.sync(&mut rig);
    one.sync(&mut rig);
    many.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    let open = Request::Inode { ino: gone, mode: LeaseMode::Read, flags: WANT_PIN };
    many.call(&mut rig, &open).expect("an open file");
    let name = b"g";
    let unlink = Op::Unlink { ino: gone, parent: InodeId::ROOT, name, open: false };
    one.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
    one.append_in(&mut rig, gone, &unlink);
    one.sync(&mut rig);
    rig.event(0, Event::ClientGone(one.client));
    rig.settle();
    let orphans = |rig: &Rig| rig.nodes[0].volume().orphans().expect("a sound volume");
    assert_eq!(orphans(&rig), [gone]);
    let busy = Busy::new(&mut many, ino);
    busy.fill(&mut many);
    many.set(control::CLOSED, gone.0);
    many.set(control::CLOSED_NOW, 1);
    let mut events = 0;
    while !orphans(&rig).is_empty() {
        busy.fill(&mut many);
        rig.event(0, Event::Doorbell(many.client));
        rig.turn(0);
        rig.now += 100_000;
        rig.event(0, Event::Tick);
        assert!(many.word(control::SETTLED) < many.seq, "its log is never empty");
        events += 1;
        assert!(events < 3000, "it is told never");
    }
    rig.settle();
    assert_eq!(many.refusals(), 0);
    rig.check();
}

/// A client that gives back very many leases is stopped inside an operation, so that none of them goes: those of others do.
#[test]
fn leases_that_wait_keep_none_of_others_waiting() {
    let mut rig = Rig::with(1, 9, config_with(SMALL));
    let (many, mut one, two) = (rig.attach(0, 0), rig.attach(0, 0), rig.attach(0, 0));
    let mut held = Vec::new();
    while held.len() < 1000 {
        held.extend(many.numbers(&mut rig, 100).into_iter().map(|(_, granted)| granted.slot));
    }
    let ino = one.create(&mut rig, b"f", 0o100_644);
    one.sync(&mut rig);
    one.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    rig.settle();
    rig.now += 1_000_000;
    many.set(control::in_op(0), many.word(control::in_op(0)) | 1);
    many.post(0, &Request::Release { slots: held }, 0);
    rig.event(0, Event::Doorbell(many.client));
    two.post(0, &wants(ino), 0);
    let mut events = 0;
    while !two.has_reply(0) {
        rig.now += 100_000;
        rig.event(0, Event::Doorbell(two.client));
        rig.event(0, Event::Tick);
        events += 1;
        assert!(events < 300, "it waits for what another client does not give back");
    }
    many.set(control::in_op(0), many.word(control::in_op(0)) + 1);
    rig.settle();
    rig.check();
}

/// A client is stopped inside an operation for too long while the head takes nothing, and goes on before its log could be read:
/// it was told that it is expelled, and is.
#[test]
fn an_expulsion_that_has_begun_ends() {
    let little = |n| NodeConfig { memory: 1 << 20, ..config(n) };
    let mut rig = Rig::with(3, 10, little);
    let (mut filler, mut a, b) = (rig.attach(0, 0), rig.attach(0, 0), rig.attach(0, 0));
    let (full, ino) =
        (filler.create(&mut rig, b"full", 0o100_644), a.create(&mut rig, b"a", 0o100_644));
    filler.sync(&mut rig);
    a.sync(&mut rig);
    rig.settle();
    a.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    fill_up(&mut rig, &mut filler, full);
    a.append(&Op::Write { ino, offset: 0, data: b"first", clear_setid: false });
    a.set(control::in_op(0), a.word(control::in_op(0)) | 1);
    b.post(0, &wants(ino), 0);
    rig.event(0, Event::Doorbell(b.client));
    for _ in 0..120 {
        deliver_two(&mut rig);
        rig.pass(10_000_000);
    }
    assert_eq!(a.word(control::STATE), control::STATE_EXPELLED, "it is told so");
    assert!(!rig.detached.contains(&a.client), "its log is not read yet");
    a.set(control::in_op(0), a.word(control::in_op(0)) + 1);
    for _ in 0..20 {
        deliver_two(&mut rig);
        rig.pass(10_000_000);
    }
    rig.settle();
    assert!(rig.detached.contains(&a.client), "it waits for the seal");
    rig.check();
}

/// A client gives back all that it has at once: others are heard before all of it has gone.
#[test]
fn many_leases_go_in_turns() {
    let mut rig = Rig::with(1, 4, config_with(SMALL));
    let (many, one) = (rig.attach(0, 0), rig.attach(0, 0));
    let mut held = Vec::new();
    while held.len() < 1000 {
        held.extend(many.numbers(&mut rig, 100).into_iter().map(|(_, granted)| granted));
    }
    rig.settle();
    rig.now += 1_000_000;
    many.post(0, &Request::Release { slots: held.iter().map(|g| g.slot).collect() }, 0);
    one.post(0, &Request::StatFs, 0);
    rig.event(0, Event::Doorbell(many.client));
    let left = |many: &Hand| held.iter().filter(|granted| many.holds(**granted)).count();
    assert!(left(&many) > 500, "{} of 1000 are left after a turn", left(&many));
    rig.event(0, Event::Doorbell(one.client));
    assert!(one.has_reply(0));
    let mut turns = 0;
    while left(&many) > 0 {
        rig.turn(0);
        turns += 1;
        assert!(turns < 500, "{} are left", left(&many));
    }
    assert!(turns > 4, "{turns}");
    rig.settle();
    rig.check();
}

/// A file that is open and has no name.
const fn nameless(ino: InodeId) -> Op<'static> {
    let (parent, mode) = (InodeId::ROOT, 0o100_600);
    Op::Tmpfile { ino, parent, mode, uid: 0, gid: 0, linkable: true }
}

/// A client ends that had many files open that have no name: they are freed in turns.
#[test]
fn what_a_client_leaves_behind_is_freed_in_turns() {
    let mut rig = Rig::with(1, 8, config_with(SMALL));
    let (mut many, one) = (rig.attach(0, 0), rig.attach(0, 0));
    let mut files = Vec::new();
    while files.len() < 800 {
        let numbers = many.numbers(&mut rig, 100);
        files.extend(numbers.into_iter().map(|(ino, _)| ino));
    }
    for ino in &files {
        many.append(&nameless(*ino));
    }
    many.sync(&mut rig);
    rig.settle();
    assert_eq!(many.refusals(), 0);
    let left = |rig: &Rig| rig.nodes[0].volume().orphans().expect("a sound volume").len();
    assert_eq!(left(&rig), 800);
    one.post(0, &Request::StatFs, 0);
    rig.event(0, Event::ClientGone(many.client));
    assert!((1..=750).contains(&left(&rig)), "{} are left after a turn", left(&rig));
    rig.event(0, Event::Doorbell(one.client));
    assert!(one.has_reply(0), "others are heard");
    let mut turns = 0;
    while left(&rig) > 0 {
        rig.turn(0);
        turns += 1;
        assert!(turns < 100, "{} are left", left(&rig));
    }
    assert!(turns > 1, "{turns}");
    rig.settle();
    rig.check();
}

/// A client ends that had many files open that have no name, while the tree is full: freeing them takes pages before it gives any, so
/// that some wait for a publication. None is forgotten.
#[test]
fn what_cannot_be_freed_at_once_is_freed_later() {
    let mut rig = Rig::new(1, 13);
    let mut many = rig.attach(0, 0);
    let mut files = Vec::new();
    while files.len() < 1200 {
        files.extend(many.numbers(&mut rig, 100).into_iter().map(|(ino, _)| ino));
    }
    let parent = InodeId::ROOT;
    many.lease(&mut rig, parent, LeaseMode::Write).expect("a lease");
    // Each leaf of the tree has something of a file with a name, and of one without.
    let value = vec![1; 1200];
    for (n, ino) in files.iter().copied().enumerate() {
        let name = format!("{n}").into_bytes();
        if n % 2 == 0 {
            many.append(&nameless(ino));
        } else {
            many.append(&create(ino, parent, &name, 0o100_600, 0));
        }
        many.append(&Op::SetXattr { ino, name: b"user.a", value: &value });
    }
    many.sync(&mut rig);
    rig.settle();
    assert_eq!(many.refusals(), 0);
    let (mut full, value) = (0, vec![1; 3500]);
    while full < 100 {
        let mut filler = rig.attach(0, 0);
        for _ in 0..1000 {
            let (ino, _) = filler.numbers(&mut rig, 1)[0];
            filler.append(&nameless(ino));
            filler.append(&Op::SetXattr { ino, name: b"user.a", value: &value });
        }
        filler.sync(&mut rig);
        full = filler.refusals();
    }
    rig.settle();
    let orphans = |rig: &Rig| rig.nodes[0].volume().orphans().expect("a sound volume");
    let left = |rig: &Rig| orphans(rig).iter().filter(|ino| files.contains(ino)).count();
    assert_eq!(left(&rig), 600);
    rig.event(0, Event::ClientGone(many.client));
    rig.settle();
    assert_eq!(left(&rig), 0);
    rig.check();
}

/// Each rule of these, taken out, is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn what_keeps_returns_apart_is_missed() {
    use base::planted::{Bug, missed};
    let all: [(Bug, fn()); 7] = [
        (Bug::ReapRefused, what_cannot_be_freed_at_once_is_freed_later),
        (Bug::ClosedUntold, what_is_closed_is_told_by_who_never_stops_writing),
        (Bug::ClosedUnread, a_lease_comes_back_from_who_never_stops_writing),
        (Bug::ReapsAtOnce, what_a_client_leaves_behind_is_freed_in_turns),
        (Bug::ReturnOutlives, a_return_that_waits_is_void_once_its_lease_is_reported),
        (Bug::ReadUntilEmpty, a_lease_comes_back_from_who_never_stops_writing),
        (Bug::RecallsAtOnce, many_leases_go_in_turns),
    ];
    assert_eq!(missed(&all), []);
}
