//! A node that ends at any moment: what an fsync covered is there afterwards, and the region is
//! sound. Each name has a history of states; a state found after the crash is one of those from
//! the last fsync on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base::random::Random;
use base::{Epoch, InodeId, NodeId};
use service::core::{Event, Role};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::media::{Media, MediaError, Segment};
use storage::memory::MemoryRegion;

use crate::pass_on::pass_on;
use crate::rig::{Hand, Rig, create};

/// The region, of which a picture is taken at one of the node's stores or fences, as a power cut
/// there would leave it.
struct Watched {
    region: Arc<MemoryRegion>,
    state: Mutex<(u64, Random, Option<MemoryRegion>)>,
}

impl Watched {
    fn count(&self) {
        let mut state = self.state.lock().expect("no panic under the lock");
        let (left, random, picture) = &mut *state;
        *left = left.wrapping_sub(1);
        if *left == 0 {
            *picture = Some(self.region.cut(random));
        }
    }

    fn picture(&self) -> Option<MemoryRegion> {
        self.state.lock().expect("no panic under the lock").2.take()
    }
}

type Done<T> = Result<T, MediaError>;

impl Media for Watched {
    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Done<()> {
        self.count();
        self.region.write(segment, offset, data)
    }
    fn fence(&self) -> Done<()> {
        self.count();
        self.region.fence()
    }
    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Done<()> {
        self.count();
        self.region.store64(segment, offset, value)
    }
    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Done<()> {
        self.count();
        self.region.copy(from, to, len)
    }
    pass_on!(size read persist load64 cas64 room segments);
}

/// Content of a name; None: it is not there.
type Content = Option<Vec<u8>>;

/// Per name the state that an fsync covers.
type Covered = BTreeMap<String, usize>;

#[derive(Default)]
struct Model {
    /// Per name its states, and which of them the last fsync covers.
    names: BTreeMap<String, (Vec<Content>, usize)>,
    inodes: BTreeMap<String, InodeId>,
}

impl Model {
    fn now(&self, name: &str) -> Content {
        self.names.get(name).and_then(|(states, _)| states.last().cloned()).flatten()
    }

    fn push(&mut self, name: &str, content: Content) {
        let (states, _) = self.names.entry(name.into()).or_insert_with(|| (vec![None], 0));
        states.push(content);
    }

    fn synced(&mut self) {
        for (states, covered) in self.names.values_mut() {
            *covered = states.len() - 1;
        }
    }

    fn covered(&self) -> Covered {
        self.names.iter().map(|(name, (_, covered))| (name.clone(), *covered)).collect()
    }

    /// One random operation of the client.
    fn step(&mut self, hand: &mut Hand, rig: &mut Rig, random: &mut Random) {
        let name = format!("f{}", random.below(6));
        let Some(mut content) = self.now(&name) else {
            let (ino, _) = hand.numbers(rig, 1)[0];
            let op = create(ino, InodeId::ROOT, name.as_bytes(), 0o100_644, 0);
            // The state counts from before the entry is written: a crash may come with it.
            self.push(&name, Some(Vec::new()));
            hand.append_in(rig, InodeId::ROOT, &op);
            self.inodes.insert(name, ino);
            return;
        };
        let ino = self.inodes[&name];
        match random.below(6) {
            0 => {
                self.push(&name, None);
                hand.lease(rig, ino, LeaseMode::Write).expect("a lease");
                let name = name.as_bytes();
                let op = Op::Unlink { ino, parent: InodeId::ROOT, name, open: false };
                hand.append_in(rig, InodeId::ROOT, &op);
            }
            1 => {
                let size = random.below(20_000);
                content.resize(size as usize, 0);
                self.push(&name, Some(content));
                hand.append_in(rig, ino, &Op::Truncate { ino, size, clear_setid: false });
            }
            _ => {
                let (offset, len) =
                    (random.below(10_000) as usize, 1 + random.below(9000) as usize);
                let data = vec![random.next_u64() as u8 | 1; len];
                content.resize(content.len().max(offset + len), 0);
                content[offset..offset + len].copy_from_slice(&data);
                self.push(&name, Some(content));
                let offset = offset as u64;
                hand.append_in(
                    rig,
                    ino,
                    &Op::Write { ino, offset, data: &data, clear_setid: false },
                );
            }
        }
    }

    fn compare(&self, covered: &Covered, rig: &Rig) {
        let volume = rig.nodes[0].volume();
        for (name, (states, _)) in &self.names {
            // A name that is new was covered by nothing.
            let from = covered.get(name).copied().unwrap_or(0);
            let found = volume.lookup(InodeId::ROOT, name.as_bytes()).expect("a sound volume");
            let found = found.map(|(ino, _)| {
                let record = volume.attr(ino).expect("a sound volume").expect("an inode");
                let mut data = vec![0; record.size as usize];
                volume.read_file(ino, 0, &mut data).expect("a sound volume");
                data
            });
            assert!(
                states[from..].contains(&found),
                "{name}: {:?} bytes found; {} states, {from} covered by fsync",
                found.map(|f| f.len()),
                states.len()
            );
        }
    }
}

/// Opens the region anew, looks for what must be there, and sees that the node works.
fn reopen(region: Arc<MemoryRegion>, seed: u64, model: &Model, covered: &Covered) -> Rig {
    let mut rig = Rig::on(vec![region], seed);
    rig.settle();
    model.compare(covered, &rig);
    rig.check();
    let mut hand = rig.attach(0, 0);
    let name = format!("after{}", rig.nodes[0].position());
    hand.create(&mut rig, name.as_bytes(), 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    rig.check();
    rig
}

#[test]
fn power_cuts_at_any_store_keep_what_was_fsynced() {
    for seed in 0..40 {
        eprintln!("seed {seed}");
        let mut random = Random::new(seed);
        let region = crate::rig::format(1);
        let at = 1 + random.below(1500);
        let state = Mutex::new((at, Random::new(seed), None));
        let watched = Arc::new(Watched { region: Arc::clone(&region), state });
        let mut rig =
            Rig::through(vec![region], vec![Arc::clone(&watched) as Arc<dyn Media>], seed);
        let (mut hand, mut model) = (rig.attach(0, 0), Model::default());
        for _ in 0..400 {
            let covered = model.covered();
            if random.chance(1, 5) {
                hand.sync(&mut rig);
            } else {
                model.step(&mut hand, &mut rig, &mut random);
            }
            rig.pass(random.below(2_000_000));
            if let Some(picture) = watched.picture() {
                reopen(Arc::new(picture), seed, &model, &covered);
                break;
            }
            if hand.word(storage::format::control::REPLICATED) >= hand.seq {
                model.synced();
            }
        }
    }
}

/// kill -9: the memory of the region stays as it was.
#[test]
fn a_killed_node_comes_back_with_everything_fsynced() {
    for seed in 0..10 {
        eprintln!("seed {seed}");
        let mut random = Random::new(seed);
        let mut rig = Rig::new(1, seed);
        let mut model = Model::default();
        for _ in 0..4 {
            let mut hand = rig.attach(0, 0);
            for _ in 0..1 + random.below(40) {
                model.step(&mut hand, &mut rig, &mut random);
                if random.chance(1, 5) {
                    hand.sync(&mut rig);
                    model.synced();
                }
                if random.chance(1, 2) {
                    rig.pass(random.below(8_000_000));
                }
            }
            let region = Arc::clone(&rig.regions[0]);
            drop(rig);
            let covered = model.covered();
            rig = reopen(region, seed, &model, &covered);
            // What was not covered is settled now, one way or the other.
            let volume = rig.nodes[0].volume();
            for (name, (states, covered)) in &mut model.names {
                let found = volume.lookup(InodeId::ROOT, name.as_bytes()).expect("sound");
                let content = found.map(|(ino, _)| {
                    model.inodes.insert(name.clone(), ino);
                    let size = volume.attr(ino).expect("sound").expect("an inode").size;
                    let mut data = vec![0; size as usize];
                    volume.read_file(ino, 0, &mut data).expect("sound");
                    data
                });
                (*states, *covered) = (vec![content], 0);
            }
        }
    }
}

/// A process ends beside a follower, and the head with what was on its way to it: the new head
/// takes what the process had written, and nothing of it is left over.
#[test]
fn a_new_head_takes_the_log_of_a_process_that_ended() {
    let mut rig = Rig::new(2, 1);
    let mut hand = rig.attach(1, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
    hand.append(&Op::Write { ino, offset: 0, data: b"last words", clear_setid: false });
    rig.event(1, Event::ClientGone(hand.client));
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    let view =
        Event::View { epoch: Epoch(2), chain: vec![NodeId(2)], syncing: Vec::new(), lapse: 0 };
    rig.event(1, view);
    rig.settle();
    let volume = rig.nodes[1].volume();
    let mut data = [0; 32];
    assert_eq!(volume.read_file(ino, 0, &mut data).expect("a sound volume"), 10);
    assert_eq!(&data[..10], b"last words");
    assert!(rig.nodes[1].status().clients.is_empty());
    rig.check();
}

/// Kind of the message (service/src/core/message.rs).
const PROGRESS: u16 = 14;

/// Delivers all messages but those from the head to that node which are `lost`.
fn deliver_but(rig: &mut Rig, to: NodeId, lost: impl Fn(u16) -> bool) {
    for _ in 0..100 {
        for link in 0..rig.links.len() {
            if (rig.links[link].0, rig.links[link].1) == (to, NodeId(1)) {
                rig.links[link].2.retain(|(kind, _)| !lost(*kind));
            }
            rig.deliver(link);
        }
    }
}

/// Node 1 of three is lost, with what was on its way.
fn go_on_without_the_head(rig: &mut Rig) {
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    for n in 1..3 {
        let chain = vec![NodeId(2), NodeId(3)];
        rig.event(n, Event::View { epoch: Epoch(2), chain, syncing: Vec::new(), lapse: 0 });
    }
    rig.settle();
    assert_eq!(rig.nodes[1].role(), Role::Head);
}

/// All members have what a client wrote, the word of it to the client's node is lost, and the head with
/// it: its node, which is the head then, knows that all have it.
#[test]
fn an_fsync_ends_when_the_word_of_it_died_with_the_head() {
    let mut rig = Rig::new(3, 43);
    let (mut waits, mut other) = (rig.attach(1, 0), rig.attach(2, 0));
    let ino = waits.create(&mut rig, b"file", 0o100_644);
    waits.sync(&mut rig);
    let second = other.create(&mut rig, b"other", 0o100_644);
    other.sync(&mut rig);
    rig.settle();
    for (hand, ino) in [(&mut waits, ino), (&mut other, second)] {
        hand.append(&Op::Write { ino, offset: 0, data: b"text", clear_setid: false });
        hand.set(control::SYNC_REQUEST, hand.seq);
        rig.event(hand.n, Event::Doorbell(hand.client));
        deliver_but(&mut rig, NodeId(2), |kind| kind == PROGRESS);
    }
    assert_eq!(other.word(control::REPLICATED), other.seq);
    assert!(waits.word(control::REPLICATED) < waits.seq, "it was told");
    go_on_without_the_head(&mut rig);
    assert_eq!(waits.word(control::REPLICATED), waits.seq, "its fsync never ends");
}

/// An operation is refused, and the head is gone before it can tell the client's node anything but the chunk: the
/// client is told all the same, once.
#[test]
fn a_refusal_is_told_when_the_head_is_gone() {
    let mut rig = Rig::new(3, 44);
    let mut hand = rig.attach(2, 5);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    // Only the super-user gives files away.
    let own = Op::SetAttr {
        ino,
        mask: storage::format::entry::mask::UID,
        mode: 0,
        uid: 6,
        gid: 0,
        atime: storage::format::entry::Stamp::default(),
        mtime: storage::format::entry::Stamp::default(),
    };
    hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    hand.append(&own);
    hand.set(control::SYNC_REQUEST, hand.seq);
    rig.event(hand.n, Event::Doorbell(hand.client));
    deliver_but(&mut rig, NodeId(3), |_| true);
    assert!(hand.word(control::REPLICATED) < hand.seq, "it was told by the head");
    go_on_without_the_head(&mut rig);
    let errno = u64::from(base::Errno::PERM.0);
    assert_eq!(hand.word(control::REPLICATED), hand.seq);
    assert_eq!((hand.refusals(), hand.word(control::REFUSED_ERRNO)), (1, errno));
    assert_eq!(hand.word(control::REFUSED_SEQ), hand.seq);
}
