//! Space that is promised is there: what a client counts on is refused by no head, whatever others write and whatever becomes of
//! messages, heads and nodes; and what is not used comes back.

use std::sync::Arc;

use base::random::Random;
use base::{Epoch, InodeId, NodeId, Sequence};
use service::core::{Event, Node};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::limits::BLOCK_BYTES;
use storage::media::Media;

use crate::between::Between;
use crate::rig::{Hand, Rig, config, format};

/// A process that writes one file from its beginning to its end.
struct Writer {
    hand: Hand,
    ino: InodeId,
    at: u64,
    /// Bytes so far: its log has no laps.
    written: u64,
    promised: Vec<u64>,
}

impl Writer {
    fn new(rig: &mut Rig, n: usize, name: &str) -> Self {
        let mut hand = rig.attach(n, 0);
        let ino = hand.create(rig, name.as_bytes(), 0o100_644);
        hand.sync(rig);
        Self { hand, ino, at: 0, written: 0, promised: Vec::new() }
    }

    /// As the library does it: `true` if there is room.
    fn promise(&self, blocks: u64) -> bool {
        let promised = self.hand.word(control::PROMISED) + blocks;
        let fits = promised <= self.hand.word(control::ROOM);
        if fits {
            self.hand.set(control::PROMISED, promised);
        }
        fits
    }

    /// Appends a write of so many blocks, if the lease is there. `force`: also without room.
    fn write(&mut self, blocks: u64, force: bool) -> bool {
        let promised = self.promise(blocks);
        if !promised && !force {
            return false;
        }
        let data = vec![7; (blocks * BLOCK_BYTES) as usize];
        let op = Op::Write { ino: self.ino, offset: self.at, data: &data, clear_setid: false };
        let hand = &mut self.hand;
        hand.seq += 1;
        let epoch = Epoch(hand.word(control::EPOCH) as u32);
        let for_it = if promised { blocks } else { 0 };
        let (seq, incarnation) = (Sequence(hand.seq), hand.descriptor.incarnation);
        let bytes = op.to_promised_entry(for_it, seq, epoch, 0, 77, incarnation);
        hand.put(&bytes);
        self.at += blocks * BLOCK_BYTES;
        self.written += blocks * BLOCK_BYTES;
        if promised {
            self.promised.push(self.hand.seq);
        }
        true
    }

    /// Begins anew: what the file had is free when that is published.
    fn cut(&mut self) {
        let hand = &mut self.hand;
        hand.append(&Op::Truncate { ino: self.ino, size: 0, clear_setid: false });
        self.at = 0;
    }

    /// Nothing that was promised is refused; a write without a promise may be, and nothing else.
    fn judge(&self) {
        let (refused, errno) =
            (self.hand.word(control::REFUSED_SEQ), self.hand.word(control::REFUSED_ERRNO));
        assert!(!self.promised.contains(&refused), "{refused} is refused with {errno}");
        assert!(refused == 0 || errno == 28, "{refused} is refused with {errno}");
    }

    fn room(&self) -> u64 {
        self.hand.word(control::ROOM) - self.hand.word(control::PROMISED)
    }
}

/// Takes all but 4 MiB of the volume.
fn shrink(rig: &mut Rig) {
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(rig, b"much", 0o100_644);
    hand.append_in(rig, ino, &Op::Fallocate { ino, offset: 0, len: 12 << 20, mode: 0 });
    hand.sync(rig);
    assert_eq!(hand.refusals(), 0);
}

fn view(rig: &mut Rig, epoch: u32, chain: &[u32]) {
    let chain: Vec<_> = chain.iter().copied().map(NodeId).collect();
    for n in 0..rig.nodes.len() {
        let chain = chain.clone();
        let epoch = Epoch(epoch);
        rig.event(n, Event::View { epoch, chain, syncing: Vec::new(), lapse: 0 });
    }
}

/// Writers on all nodes fill the volume while messages come late, heads change and logs are read when it suits the
/// services.
fn fill(seed: u64, trouble: bool, cuts: bool) -> (u64, u64) {
    let mut rig = Rig::new(3, seed);
    shrink(&mut rig);
    let mut random = Random::new(seed);
    let mut writers: Vec<_> =
        (0..5).map(|n| Writer::new(&mut rig, n % 3, &format!("f{n}"))).collect();
    for w in &writers {
        w.hand.lease(&mut rig, w.ino, LeaseMode::Write).expect("a lease");
    }
    let (mut epoch, mut chain) = (1, vec![1, 2, 3]);
    let mut promised = 0;
    for _ in 0..1500 {
        let w = random.below(5) as usize;
        match random.below(20) {
            0..=9 => {
                let (blocks, force) = (1 + random.below(24), random.chance(1, 3));
                let before = writers[w].promised.len();
                if writers[w].written < 3 << 20 && writers[w].write(blocks, force) {
                    promised += blocks * (writers[w].promised.len() - before) as u64;
                }
                writers[w].hand.ring(&mut rig);
            }
            10..=14 => {
                let link = random.below(rig.links.len() as u64) as usize;
                (0..random.below(4)).for_each(|_| _ = rig.deliver(link));
            }
            15 => rig.pass(random.below(4_000_000)),
            16 => (0..3).for_each(|n| rig.work(n)),
            17 if trouble && random.chance(1, 12) => {
                // Another head; what is under way is of the old epoch.
                epoch += 1;
                chain.rotate_left(1);
                view(&mut rig, epoch, &chain.clone());
            }
            18 => rig.deliver_all(),
            19 if cuts && random.chance(1, 2) => writers[w].cut(),
            _ => {}
        }
        writers.iter().for_each(Writer::judge);
    }
    rig.deliver_all();
    rig.settle();
    for w in &writers {
        w.hand.sync(&mut rig);
        w.judge();
    }
    rig.settle();
    let free = rig.nodes[0].volume().statfs().blocks_free;
    rig.check();
    (promised, free)
}

#[test]
fn what_is_promised_is_never_refused() {
    let mut full = 0;
    for seed in 1..40 {
        let (promised, free) = fill(seed, seed % 2 == 0, false);
        assert!(promised > 256, "seed {seed}: {promised} blocks only were promised");
        full += u32::from(free < 24);
    }
    assert!(full > 20, "only {full} volumes became full");
}

/// The same where operations wait for a publication, which frees what was cut.
#[test]
fn what_is_promised_is_there_once_it_is_free() {
    for seed in 66..90 {
        eprintln!("seed {seed}");
        fill(seed, seed % 2 == 0, true);
    }
}

/// What an idle client has goes to those who write: in the end all of the volume is used.
#[test]
fn what_is_not_used_comes_back() {
    let mut rig = Rig::new(3, 1);
    shrink(&mut rig);
    let idle: Vec<_> = (0..4).map(|n| Writer::new(&mut rig, n % 3, &format!("i{n}"))).collect();
    assert!(idle.iter().any(|w| w.room() > 50), "nothing was set aside");
    let mut writers: Vec<_> = (0..3).map(|n| Writer::new(&mut rig, n, &format!("f{n}"))).collect();
    for w in &writers {
        w.hand.lease(&mut rig, w.ino, LeaseMode::Write).expect("a lease");
    }
    for _ in 0..400 {
        for w in &mut writers {
            if w.at < 3 << 20 {
                w.write(4, true);
                w.hand.ring(&mut rig);
            }
        }
        rig.pass(10_000_000);
        rig.deliver_all();
        writers.iter().for_each(Writer::judge);
    }
    assert_eq!(idle.iter().map(Writer::room).sum::<u64>(), 0);
    let free = rig.nodes[0].volume().statfs().blocks_free;
    assert!(free < 4, "{free} blocks are free, and nobody gets them");
}

/// The account outlives nicfs: what was promised before a restart is there afterwards.
#[test]
fn a_restart_takes_nothing_back() {
    let mut rig = Rig::new(1, 7);
    shrink(&mut rig);
    let mut one = Writer::new(&mut rig, 0, "one");
    one.hand.lease(&mut rig, one.ino, LeaseMode::Write).expect("a lease");
    assert!(one.write(20, false), "there is room");
    one.hand.sync(&mut rig);
    rig.settle();
    // In the log only, when nicfs ends.
    let last = one.room();
    assert!(last > 50 && one.write(last, false), "there is room");
    let media = Arc::clone(&rig.regions[0]) as Arc<dyn Media>;
    rig.nodes[0] = Node::new(config(1), media, Random::new(9)).expect("a node");
    // Its log is not read before somebody else has written all that he can get.
    let chain = vec![NodeId(1)];
    rig.event(0, Event::View { epoch: Epoch(2), chain, syncing: Vec::new(), lapse: 0 });
    let mut other = Writer::new(&mut rig, 0, "other");
    other.hand.lease(&mut rig, other.ino, LeaseMode::Write).expect("a lease");
    while other.hand.refusals() == 0 && other.at < 3 << 20 {
        other.write(64, true);
        other.hand.sync(&mut rig);
    }
    one.hand.sync(&mut rig);
    one.judge();
    other.judge();
    rig.settle();
    // And what it has is counted right again.
    while one.hand.refusals() == 0 && one.at < 3 << 20 {
        one.write(1 + one.at % 7, true);
        one.hand.sync(&mut rig);
    }
    one.judge();
    rig.check();
}

/// A client may promise in the moment in which its room is taken back: what it has promised it keeps.
#[test]
fn who_promises_while_room_is_taken_back_has_it() {
    let region = format(1);
    let between = Between::new(&region);
    let media = vec![Arc::clone(&between) as Arc<dyn Media>];
    let mut rig = Rig::through(vec![region], media, 3);
    shrink(&mut rig);
    let mut one = Writer::new(&mut rig, 0, "one");
    one.hand.lease(&mut rig, one.ino, LeaseMode::Write).expect("a lease");
    let room = one.room();
    assert!(room > 60, "{room} blocks");
    *between.armed.lock().expect("one thread") = Some((one.hand.log, 60));
    for _ in 0..100 {
        rig.pass(100_000_000);
    }
    assert!(between.armed.lock().expect("one thread").is_none(), "nothing was taken back");
    assert_eq!(one.room(), 0);
    // Somebody else takes what is there, and the client does what it has promised.
    let mut other = Writer::new(&mut rig, 0, "other");
    other.hand.lease(&mut rig, other.ino, LeaseMode::Write).expect("a lease");
    for _ in 0..2000 {
        if other.hand.refusals() > 0 || other.at > 3 << 20 {
            break;
        }
        other.write(40, true);
        other.hand.sync(&mut rig);
    }
    let promised = one.hand.word(control::PROMISED) - 60;
    one.hand.set(control::PROMISED, promised);
    one.hand.set(control::ROOM, promised + 60);
    assert!(one.write(60, false));
    one.hand.sync(&mut rig);
    one.judge();
}

/// What a log says when it is taken up is the client's to change at any time: what counts is the entry as it was copied and
/// checked. (The look before that was believed; the sum went over its end, and so did nicfs, at each start.)
#[test]
fn a_promise_counts_as_it_was_checked() {
    let region = format(1);
    let between = Between::new(&region);
    let media = Arc::clone(&between) as Arc<dyn Media>;
    let mut rig = Rig::through(vec![region], vec![Arc::clone(&media)], 5);
    let mut one = Writer::new(&mut rig, 0, "one");
    one.hand.lease(&mut rig, one.ino, LeaseMode::Write).expect("a lease");
    rig.settle();
    let place = one.hand.descriptor.lane_offset(0) + one.hand.at;
    for _ in 0..2 {
        assert!(one.write(20, false), "there is room");
    }
    // In the stream, and not published.
    one.hand.sync(&mut rig);
    // As if nicfs had been killed between the two words that say so.
    one.hand.set(control::SETTLED, one.hand.seq - 2);
    *between.boasts.lock().expect("one thread") = Some((one.hand.log, place));
    rig.nodes[0] = Node::new(config(1), media, Random::new(9)).expect("a node");
    assert!(between.boasts.lock().expect("one thread").is_none(), "nobody has looked");
    view(&mut rig, 2, &[1]);
    one.hand.lease(&mut rig, one.ino, LeaseMode::Write).expect("a lease");
    assert!(one.write(1, true));
    one.hand.sync(&mut rig);
    one.judge();
}
