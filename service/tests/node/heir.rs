//! A process ends and is started again where it was: what it had open and locked is its heir's, and nobody gets it in between.

use base::{Epoch, Errno, InodeId, NodeId};
use service::core::message::Message;
use service::core::{Event, NodeConfig, PerUser};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};
use storage::format::rpc::{Request, WANT_PIN, WANT_READ, WANT_WRITE};

use crate::rig::{Hand, Rig, config};

use LockKind::{None as Un, Write};

const SECOND: u64 = 1_000_000_000;
const SECRET: u128 = 0x1234_5678_9abc_def0_0fed_cba9_8765_4321;

fn record(owner: u64, kind: LockKind, start: u64, end: u64) -> Lock {
    Lock { space: LockSpace::Record, kind, owner, pid: owner as u32, start, end }
}

fn set(hand: &Hand, rig: &mut Rig, ino: InodeId, lock: Lock, wait: u64) -> Result<(), Errno> {
    hand.call(rig, &Request::Lock { ino, wait, lock }).map(|_| ())
}

fn open(hand: &Hand, rig: &mut Rig, ino: InodeId) -> Result<(), Errno> {
    let flags = WANT_PIN | WANT_WRITE;
    hand.call(rig, &Request::Inode { ino, mode: LeaseMode::Read, flags }).map(|_| ())
}

fn open_to_read(hand: &Hand, rig: &mut Rig, ino: InodeId) {
    let flags = WANT_PIN | WANT_READ;
    hand.call(rig, &Request::Inode { ino, mode: LeaseMode::Read, flags }).expect("it may");
}

fn inherit(hand: &Hand, rig: &mut Rig, heir: u128) {
    hand.call(rig, &Request::Inherit { heir }).expect("an answer");
}

fn name_heir(hand: &Hand, secret: u128) {
    hand.set(control::HEIR, secret as u64);
    hand.set(control::HEIR + 8, (secret >> 64) as u64);
}

fn pass(rig: &mut Rig, time: u64) {
    for _ in 0..10 {
        rig.pass(time / 10);
        rig.deliver_all();
        rig.settle();
    }
}

struct World {
    rig: Rig,
    /// Of node 2, with an heir.
    dead: Hand,
    /// Of node 3.
    rival: Hand,
    /// Locked by the first, for which the second waits.
    ino: InodeId,
    /// Open there, without a name.
    nameless: InodeId,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rig = Rig::with(3, seed, |n| NodeConfig { grace: 60 * SECOND, ..config(n) });
        let mut dead = rig.attach(1, 1000);
        name_heir(&dead, SECRET);
        let ino = dead.create(&mut rig, b"f", 0o100_666);
        let (nameless, _) = dead.numbers(&mut rig, 1)[0];
        let (parent, mode, linkable) = (InodeId::ROOT, 0o100_600, true);
        let made = Op::Tmpfile { ino: nameless, parent, mode, uid: 1000, gid: 1000, linkable };
        dead.append(&made);
        dead.sync(&mut rig);
        open(&dead, &mut rig, ino).expect("it is its own");
        let rival = rig.attach(2, 1000);
        open(&rival, &mut rig, ino).expect("it may be opened");
        set(&dead, &mut rig, ino, record(1, Write, 0, 9), 0).expect("it is free");
        let mut world = Self { rig, dead, rival, ino, nameless };
        assert_eq!(world.tries(), Err(Errno::AGAIN));
        world
    }

    /// The rival wants the lock, and goes on waiting for it.
    fn tries(&mut self) -> Result<(), Errno> {
        set(&self.rival, &mut self.rig, self.ino, record(2, Write, 5, 5), 7)
    }

    /// How often it was told that it may have it.
    fn told(&self) -> u64 {
        self.rival.word(control::LOCK_EVENT)
    }

    fn dies(&mut self) {
        self.rig.event(1, Event::ClientGone(self.dead.client));
        self.rig.settle();
    }

    fn has_nameless(&self) -> bool {
        self.rig.nodes[0].volume().attr(self.nameless).expect("a sound volume").is_some()
    }
}

#[test]
fn an_heir_has_what_was_locked_and_open_and_nobody_has_it_before() {
    for seed in 0..4 {
        let mut world = World::new(seed);
        if seed % 2 == 1 {
            // It died in the middle of something.
            world.dead.set(control::in_op(3), 1);
        }
        world.dies();
        pass(&mut world.rig, 20 * SECOND);
        let told = world.told();
        assert_eq!(world.tries(), Err(Errno::AGAIN));
        let heir = world.rig.attach(1, 1000);
        open(&heir, &mut world.rig, world.ino).expect("it is there");
        open(&heir, &mut world.rig, world.nameless).expect("it is there, too");
        inherit(&heir, &mut world.rig, SECRET);
        assert_eq!((world.tries(), world.told()), (Err(Errno::AGAIN), told));
        set(&heir, &mut world.rig, world.ino, record(1, Write, 0, 9), 0).expect("it has it");
        pass(&mut world.rig, 100 * SECOND);
        assert!(world.has_nameless());
        assert_eq!(world.rig.nodes[1].past_clients().count(), 0);
        assert_eq!(world.tries(), Err(Errno::AGAIN));
        set(&heir, &mut world.rig, world.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        assert!(world.told() > told);
        assert_eq!(world.tries(), Ok(()));
        // With this one it goes: it has named no heir.
        world.rig.event(1, Event::ClientGone(heir.client));
        pass(&mut world.rig, SECOND);
        assert!(!world.has_nameless());
        world.rig.check();
    }
}

/// What it had granted itself the head did not know.
#[test]
fn an_heir_has_what_the_dead_one_granted_itself() {
    use storage::format::sole::{self, SOLE_FILES, SoleWord};
    let mut world = World::new(9);
    let (dead, ino) = (&world.dead, world.nameless);
    open(dead, &mut world.rig, ino).expect("it is its own");
    set(dead, &mut world.rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
    let file = (0..SOLE_FILES).find(|file| dead.word(sole::file_at(*file)) == ino.0);
    let file = file.expect("nobody else uses it");
    let word = SoleWord(dead.word(sole::file_at(file) + 8));
    assert!(word.is_given());
    for (at, value) in
        (sole::record_at(0)..).step_by(8).zip(sole::record(file, &record(1, Write, 0, 9)))
    {
        dead.set(at, value);
    }
    dead.set(sole::used_at(file), word.0);
    world.dies();
    let heir = world.rig.attach(1, 1000);
    open(&heir, &mut world.rig, ino).expect("it is there");
    inherit(&heir, &mut world.rig, SECRET);
    let other = world.rig.attach(1, 1000);
    open(&other, &mut world.rig, ino).expect("it is there");
    let tried = set(&other, &mut world.rig, ino, record(3, Write, 0, 0), 0);
    assert_eq!(tried, Err(Errno::AGAIN));
    set(&other, &mut world.rig, ino, record(3, Write, 50, 50), 0).expect("that it had given up");
    world.rig.check();
}

#[test]
fn without_the_secret_nobody_is_an_heir_and_nobody_waits_for_ever() {
    let mut world = World::new(17);
    world.dies();
    let thief = world.rig.attach(1, 1000);
    inherit(&thief, &mut world.rig, SECRET ^ 1 << 100);
    inherit(&thief, &mut world.rig, 0);
    let other = world.rig.attach(1, 1001);
    inherit(&other, &mut world.rig, SECRET);
    let elsewhere = world.rig.attach(0, 1001);
    inherit(&elsewhere, &mut world.rig, SECRET);
    open(&thief, &mut world.rig, world.ino).expect("it is there");
    let wants = record(1, Write, 0, 9);
    assert_eq!(set(&thief, &mut world.rig, world.ino, wants, 0), Err(Errno::AGAIN));
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    pass(&mut world.rig, 50 * SECOND);
    assert!(world.has_nameless(), "an heir may come");
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    pass(&mut world.rig, 20 * SECOND);
    assert!(!world.has_nameless());
    assert_eq!(world.tries(), Ok(()));
    world.rig.check();
}

/// The heir is there before the service has heard that the other one is dead.
#[test]
fn an_heir_waits_for_the_end() {
    let mut world = World::new(23);
    let heir = world.rig.attach(1, 1000);
    open(&heir, &mut world.rig, world.nameless).expect("it is there");
    heir.post(0, &Request::Inherit { heir: SECRET }, 0);
    world.rig.event(1, Event::Doorbell(heir.client));
    pass(&mut world.rig, SECOND);
    assert!(!heir.has_reply(0));
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    world.dies();
    pass(&mut world.rig, SECOND);
    assert!(heir.has_reply(0));
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    assert!(world.has_nameless());
    world.rig.check();
}

/// Somebody wants what a dead one has a lease on: that comes back at once, and the rest stays.
#[test]
fn leases_of_a_dead_one_come_back() {
    let mut world = World::new(29);
    world.dead.lease(&mut world.rig, world.ino, LeaseMode::Write).expect("a lease");
    world.dead.append(&Op::Write { ino: world.ino, offset: 0, data: b"last", clear_setid: true });
    world.dead.set(control::in_op(5), 1);
    world.dies();
    let reply = world.rival.lease(&mut world.rig, world.ino, LeaseMode::Write).expect("a lease");
    assert_eq!(reply.record.size, 4);
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    world.rig.check();
}

/// Whoever is not at its end in time is not waited for; and one Inherit of a client waits.
#[test]
fn an_heir_does_not_wait_for_ever() {
    let mut world = World::new(31);
    let heir = world.rig.attach(1, 1000);
    heir.post(0, &Request::Inherit { heir: SECRET }, 0);
    world.rig.event(1, Event::Doorbell(heir.client));
    pass(&mut world.rig, SECOND);
    assert!(!heir.has_reply(0));
    heir.post(1, &Request::Inherit { heir: SECRET }, 0);
    world.rig.event(1, Event::Doorbell(heir.client));
    pass(&mut world.rig, SECOND);
    assert!(heir.has_reply(1) && !heir.has_reply(0), "one waits");
    pass(&mut world.rig, 70 * SECOND);
    for slot in 0..2 {
        let body = heir.reply(slot).expect("an answer");
        let status = storage::format::rpc::reply_status(&body).expect("a status").0;
        assert_eq!(status, Err(Errno::AGAIN), "slot {slot}");
    }
    // The other one is as it was.
    set(&world.dead, &mut world.rig, world.ino, record(1, Un, 0, 3), 0).expect("an unlock");
    world.rig.check();
}

#[test]
fn one_is_heir_of_many() {
    let mut world = World::new(37);
    let (mut all, first) = (Vec::new(), world.ino);
    for n in 1..4 {
        let one = world.rig.attach(1, 1000);
        name_heir(&one, SECRET);
        open(&one, &mut world.rig, first).expect("it is there");
        let lock = record(n, Write, 100 * n, 100 * n + 9);
        set(&one, &mut world.rig, first, lock, 0).expect("it is free");
        all.push(one);
    }
    world.dies();
    all.iter().for_each(|one| world.rig.event(1, Event::ClientGone(one.client)));
    world.rig.settle();
    let heir = world.rig.attach(1, 1000);
    open(&heir, &mut world.rig, first).expect("it is there");
    inherit(&heir, &mut world.rig, SECRET);
    for n in 0..4 {
        let wants = record(9, Write, 100 * n, 100 * n);
        let tried = set(&world.rival, &mut world.rig, first, wants, 0);
        assert_eq!(tried, Err(Errno::AGAIN), "lock {n}");
        set(&heir, &mut world.rig, first, record(n.max(1), Un, 100 * n, 100 * n + 9), 0)
            .expect("an unlock");
        assert_eq!(set(&world.rival, &mut world.rig, first, wants, 0), Ok(()), "lock {n}");
    }
    world.rig.check();
}

impl World {
    /// The first one's guest moves to another machine.
    fn leaves(&mut self) {
        name_heir(&self.dead, SECRET);
        self.dead.set(control::LEAVES, 1);
    }

    /// A client of the third node has shown the secret, and waits for the answer.
    fn seeks(&mut self) -> Hand {
        let heir = self.rig.attach(2, 1000);
        open(&heir, &mut self.rig, self.ino).expect("it is there");
        heir.post(0, &Request::Inherit { heir: SECRET }, 0);
        self.rig.event(2, Event::Doorbell(heir.client));
        heir
    }

    /// It is answered in time, and has the lock, until it gives it up.
    fn has_found(&mut self, heir: &Hand, seed: u64) {
        pass(&mut self.rig, 3 * SECOND);
        let body = heir.reply(0).expect("an answer");
        let status = storage::format::rpc::reply_status(&body).expect("a status").0;
        assert_eq!(status, Ok(()), "seed {seed}");
        assert_eq!(self.tries(), Err(Errno::AGAIN), "seed {seed}");
        set(heir, &mut self.rig, self.ino, record(1, Write, 0, 9), 0).expect("it has it");
        set(heir, &mut self.rig, self.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        assert_eq!(self.tries(), Ok(()), "seed {seed}");
        self.rig.check();
    }

    /// Who comes on node `n` has the lock, whatever the rival tries, until it gives it up, and nobody has it after the rival.
    fn is_inherited(&mut self, n: usize, uid: u32) {
        let told = self.told();
        let heir = self.rig.attach(n, uid);
        open(&heir, &mut self.rig, self.ino).expect("it is there");
        inherit(&heir, &mut self.rig, SECRET);
        assert_eq!((self.tries(), self.told()), (Err(Errno::AGAIN), told), "node {n}");
        set(&heir, &mut self.rig, self.ino, record(1, Write, 0, 9), 0).expect("it has it");
        set(&heir, &mut self.rig, self.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        assert!(self.told() > told);
        assert_eq!(self.tries(), Ok(()), "node {n}");
        let again = set(&self.dead, &mut self.rig, self.ino, record(1, Write, 0, 9), 0);
        assert_eq!(again, Err(Errno::AGAIN));
    }
}

/// A guest moves: its device there has what the one here had locked, which lives, and nobody has it in between. On any node.
#[test]
fn who_leaves_is_inherited_while_it_lives() {
    for n in 0..3 {
        let mut world = World::new(50 + n as u64);
        world.leaves();
        world.is_inherited(n, 1000);
        world.rig.check();
    }
}

/// What it had left is not reported as its own afterwards.
#[test]
fn what_was_left_to_another_node_does_not_come_back() {
    let mut world = World::new(54);
    world.leaves();
    world.is_inherited(2, 1000);
    set(&world.rival, &mut world.rig, world.ino, record(2, Un, 0, LOCK_END), 0).expect("an unlock");
    world.rig.renew(NodeId(1), NodeId(2));
    world.rig.settle();
    assert_eq!(world.tries(), Ok(()));
    world.rig.check();
}

/// So are the dead, whose guest is started again elsewhere.
#[test]
fn the_dead_are_inherited_on_another_node() {
    let mut world = World::new(55);
    world.dies();
    let heir = world.rig.attach(2, 1000);
    open(&heir, &mut world.rig, world.nameless).expect("it is there");
    open(&heir, &mut world.rig, world.ino).expect("it is there, too");
    inherit(&heir, &mut world.rig, SECRET);
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    set(&heir, &mut world.rig, world.ino, record(1, Write, 0, 9), 0).expect("it has it");
    pass(&mut world.rig, 70 * SECOND);
    assert!(world.has_nameless());
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    world.rig.check();
}

#[test]
fn nobody_is_inherited_on_another_node_who_does_not_leave() {
    let mut world = World::new(56);
    let heir = world.rig.attach(0, 1000);
    open(&heir, &mut world.rig, world.ino).expect("it is there");
    inherit(&heir, &mut world.rig, SECRET);
    let wants = record(1, Write, 0, 9);
    assert_eq!(set(&heir, &mut world.rig, world.ino, wants, 0), Err(Errno::AGAIN));
    set(&world.dead, &mut world.rig, world.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
    assert_eq!(set(&heir, &mut world.rig, world.ino, wants, 0), Ok(()));
    world.rig.check();
}

#[test]
fn nobody_is_the_heir_of_another_user_elsewhere() {
    let mut world = World::new(57);
    world.leaves();
    for n in 0..3 {
        let thief = world.rig.attach(n, 1001);
        open(&thief, &mut world.rig, world.ino).expect("it may be opened");
        inherit(&thief, &mut world.rig, SECRET);
        let wants = record(1, Write, 0, 9);
        assert_eq!(set(&thief, &mut world.rig, world.ino, wants, 0), Err(Errno::AGAIN));
    }
    world.is_inherited(2, 1000);
    world.rig.check();
}

/// What it had granted itself the head did not know.
#[test]
fn who_leaves_leaves_what_it_granted_itself() {
    use storage::format::sole::{self, SOLE_FILES, SoleWord};
    for n in [1, 2] {
        let mut world = World::new(58);
        let (leaver, ino) = (&world.dead, world.nameless);
        open(leaver, &mut world.rig, ino).expect("it is its own");
        set(leaver, &mut world.rig, ino, record(1, Write, 50, 59), 0).expect("it is free");
        let file = (0..SOLE_FILES).find(|file| leaver.word(sole::file_at(*file)) == ino.0);
        let file = file.expect("nobody else uses it");
        let word = SoleWord(leaver.word(sole::file_at(file) + 8));
        for (at, value) in
            (sole::record_at(0)..).step_by(8).zip(sole::record(file, &record(1, Write, 0, 9)))
        {
            leaver.set(at, value);
        }
        leaver.set(sole::used_at(file), word.0);
        world.leaves();
        let heir = world.rig.attach(n, 1000);
        open(&heir, &mut world.rig, ino).expect("it is there");
        inherit(&heir, &mut world.rig, SECRET);
        let other = world.rig.attach(0, 1000);
        open(&other, &mut world.rig, ino).expect("it is there");
        let tried = set(&other, &mut world.rig, ino, record(3, Write, 0, 0), 0);
        assert_eq!(tried, Err(Errno::AGAIN), "node {n}");
        set(&heir, &mut world.rig, ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        set(&other, &mut world.rig, ino, record(3, Write, 0, 0), 0).expect("it is free now");
        // What came back before it was left is not the leaver's again, whatever is told of it.
        set(&other, &mut world.rig, ino, record(3, Un, 0, LOCK_END), 0).expect("an unlock");
        world.rig.renew(NodeId(1), NodeId(2));
        world.rig.settle();
        set(&other, &mut world.rig, ino, record(3, Write, 0, 0), 0).expect("it is free still");
        world.rig.check();
    }
}

/// A new view, with the same head, comes in the middle: what was said in the one before may be lost.
#[test]
fn a_new_view_loses_nothing_that_is_left() {
    for seed in 0..24 {
        let mut world = World::new(200 + seed);
        world.leaves();
        let heir = world.seeks();
        for n in 0..seed {
            world.rig.deliver(n as usize % 6);
        }
        world.rig.cut_to(2, &[1, 2, 3]);
        world.has_found(&heir, seed);
    }
}

/// One that had taken over, and was killed before it had asked for anything, bars nobody from whom the rest still is.
#[test]
fn the_heir_of_an_heir_that_was_killed_finds_both() {
    let mut world = World::new(230);
    world.leaves();
    // It knows the secret, has something open, and has inherited nothing.
    let killed = world.rig.attach(2, 1000);
    open(&killed, &mut world.rig, world.ino).expect("it is there");
    name_heir(&killed, SECRET);
    world.rig.event(2, Event::ClientGone(killed.client));
    world.rig.settle();
    world.is_inherited(2, 1000);
    world.rig.check();
}

/// Its agent is out of reach for a moment, or the heir's, or both: it is asked again, and what was said is said again.
#[test]
fn who_seeks_asks_again() {
    for seed in 0..40 {
        let mut world = World::new(60 + seed);
        world.leaves();
        let heir = world.seeks();
        for _ in 0..seed / 4 {
            for link in 0..6 {
                world.rig.deliver(link);
            }
        }
        for (bit, node) in [(1, 2), (2, 3)] {
            if seed & bit != 0 {
                world.rig.renew(NodeId(1), NodeId(node));
            }
        }
        world.has_found(&heir, seed);
    }
}

/// The heir's node has a view in which the other one is head, and the locks lie with that.
#[test]
fn a_new_head_is_asked_again() {
    let mut world = World::new(110);
    world.leaves();
    let heir = world.seeks();
    world.rig.cut_to(2, &[2, 3]);
    pass(&mut world.rig, 3 * SECOND);
    assert!(heir.has_reply(0));
    assert_eq!(world.tries(), Err(Errno::AGAIN));
    set(&heir, &mut world.rig, world.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
    assert_eq!(world.tries(), Ok(()));
    world.rig.check();
}

/// An agent has something to give only to whom the head has asked for.
#[test]
fn an_agent_gives_nothing_unasked() {
    let mut world = World::new(111);
    let other = world.rig.attach(0, 1000);
    open(&other, &mut world.rig, world.ino).expect("it is there");
    let message = Message::LockHeir { client: world.dead.client, heir: other.client };
    let (kind, body) = message.encode(Epoch(1));
    world.rig.event(0, Event::Frame { from: NodeId(2), kind, body: body.into() });
    world.rig.settle();
    let wants = record(1, Write, 0, 9);
    assert_eq!(set(&other, &mut world.rig, world.ino, wants, 0), Err(Errno::AGAIN));
    set(&world.dead, &mut world.rig, world.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
    assert_eq!(world.tries(), Ok(()));
    world.rig.check();
}

/// Others have nothing to say while it looks: it ends, and says that it does not know.
#[test]
fn who_seeks_does_not_wait_for_ever() {
    let mut world = World::new(112);
    world.leaves();
    let heir = world.seeks();
    // The other node hangs.
    for _ in 0..50 {
        world.rig.pass(100_000_000);
        for link in 0..6 {
            if world.rig.links[link].0 != NodeId(2) {
                world.rig.deliver(link);
            }
        }
    }
    let body = heir.reply(0).expect("an answer");
    let status = storage::format::rpc::reply_status(&body).expect("a status").0;
    assert_eq!(status, Err(Errno::AGAIN));
}

#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn rules_of_heirs_that_are_taken_out_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 9] = [
        (Bug::HeirOfAnyUser, nobody_is_the_heir_of_another_user_elsewhere),
        (Bug::HeirOfTheLiving, nobody_is_inherited_on_another_node_who_does_not_leave),
        (Bug::HeirSolesLeft, who_leaves_leaves_what_it_granted_itself),
        (Bug::HeirUnasked, an_agent_gives_nothing_unasked),
        (Bug::HeirRemembered, what_was_left_to_another_node_does_not_come_back),
        (Bug::SeekerReported, who_seeks_asks_again),
        (Bug::HeirUntold, an_heir_has_what_was_locked_and_open_and_nobody_has_it_before),
        (Bug::SeekerForgotten, a_new_view_loses_nothing_that_is_left),
        (Bug::LeftComesBack, who_leaves_leaves_what_it_granted_itself),
    ];
    assert_eq!(missed(&tests), []);
}

/// The link to the head ends in the moment in which it is told of the heir, or is down then.
#[test]
fn what_the_head_did_not_hear_it_hears_again() {
    for seed in 0..3 {
        let mut world = World::new(41 + seed);
        world.dies();
        let heir = world.rig.attach(1, 1000);
        open(&heir, &mut world.rig, world.ino).expect("it is there");
        open(&heir, &mut world.rig, world.nameless).expect("it is there, too");
        heir.post(0, &Request::Inherit { heir: SECRET }, 0);
        world.rig.event(1, Event::Doorbell(heir.client));
        if seed == 1 {
            // Meanwhile all is over for the dead one here.
            for _ in 0..50 {
                world.rig.pass(1_000_000);
            }
        }
        world.rig.renew(NodeId(1), NodeId(2));
        world.rig.deliver_all();
        if seed == 2 {
            world.rig.renew(NodeId(1), NodeId(2));
        }
        world.rig.settle();
        assert!(heir.has_reply(0));
        assert_eq!(world.tries(), Err(Errno::AGAIN), "seed {seed}");
        assert!(world.has_nameless());
        set(&heir, &mut world.rig, world.ino, record(1, Un, 0, LOCK_END), 0).expect("an unlock");
        assert_eq!(world.tries(), Ok(()), "seed {seed}");
        world.rig.check();
    }
}

/// Those who wait for heirs take no place from who attaches, and those who leave nothing do not wait.
#[test]
fn who_waits_for_an_heir_takes_no_place() {
    let mut rig = Rig::with(1, 43, |n| NodeConfig { grace: 60 * SECOND, ..config(n) });
    let there = |rig: &Rig| rig.nodes[0].status().clients.len();
    let idle = rig.attach(0, 7);
    name_heir(&idle, SECRET);
    rig.event(0, Event::ClientGone(idle.client));
    rig.settle();
    assert_eq!(there(&rig), 0, "it leaves nothing");
    for round in 0..3 {
        for n in 0..6 {
            assert!(rig.try_attach(0, 7), "client {n} of round {round}");
            let mut hand = rig.last_attached(0, 7);
            name_heir(&hand, SECRET);
            let ino = hand.create(&mut rig, format!("{round}.{n}").as_bytes(), 0o100_666);
            hand.sync(&mut rig);
            open(&hand, &mut rig, ino).expect("it is its own");
        }
        assert!(!rig.try_attach(0, 7), "six are there");
        for client in rig.nodes[0].status().clients {
            rig.event(0, Event::ClientGone(client.client));
        }
        rig.settle();
        assert_eq!(there(&rig), 6, "as many wait as may be there");
    }
    let heir = rig.attach(0, 7);
    inherit(&heir, &mut rig, SECRET);
    rig.settle();
    assert_eq!(there(&rig), 1);
    rig.check();
}

/// What the dead have of leases counts.
#[test]
fn leases_of_the_dead_are_their_users() {
    let per_user = PerUser { leases: 10, ..PerUser::SHIPPED };
    let mut rig = Rig::with(1, 47, |n| NodeConfig { grace: 60 * SECOND, per_user, ..config(n) });
    let mut root = rig.attach(0, 0);
    let made = (0..30).map(|n| root.create(&mut rig, format!("f{n}").as_bytes(), 0o100_644));
    let made: Vec<_> = made.collect();
    root.sync(&mut rig);
    for some in made.chunks(10) {
        let hand = rig.attach(0, 7);
        name_heir(&hand, SECRET);
        open_to_read(&hand, &mut rig, some[0]);
        for ino in some {
            hand.lease(&mut rig, *ino, LeaseMode::Read).expect("a lease");
        }
        rig.event(0, Event::ClientGone(hand.client));
        rig.settle();
    }
    let clients = rig.nodes[0].status().clients;
    let held: usize = clients.iter().filter(|c| c.uid == 7).map(|c| c.leases).sum();
    assert!((8..=12).contains(&held), "{held} leases");
    rig.check();
}
