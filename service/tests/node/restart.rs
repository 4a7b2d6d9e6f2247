//! A node that starts again takes up the logs of its clients: of those that live, which go on, and
//! of those that ended; unless others have served in its place.

use std::sync::Arc;

use base::random::Random;
use base::{Epoch, InodeId, NodeId};
use service::core::{Event, Node, Role};
use storage::format::clients::{self, row_at};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{self, Request, WANT_PIN, WANT_READ, WANT_WRITE};
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;

use crate::rig::{Hand, Rig, config, create};

fn write<'a>(ino: InodeId, offset: u64, data: &'a [u8]) -> Op<'a> {
    Op::Write { ino, offset, data, clear_setid: false }
}

fn content(rig: &Rig, n: usize, name: &[u8]) -> Option<Vec<u8>> {
    let volume = rig.nodes[n].volume();
    let (ino, _) = volume.lookup(InodeId::ROOT, name).expect("a sound volume")?;
    let size = volume.attr(ino).expect("a sound volume").expect("an inode").size;
    let mut data = vec![0; size as usize];
    volume.read_file(ino, 0, &mut data).expect("a sound volume");
    Some(data)
}

/// nicfs is killed and started again on the same memory.
fn restarted(rig: Rig, seed: u64) -> Rig {
    let regions = rig.regions.clone();
    drop(rig);
    Rig::on(regions, seed)
}

/// A process asks and ends, and its bell is heard after its end: nobody waits for the answer for ever.
/// Seed 1795291928306.
#[test]
fn what_a_dead_client_asked_is_forgotten() {
    let mut rig = Rig::new(1, 1);
    let mut hand = rig.attach(0, 7);
    let ino = hand.numbers(&mut rig, 1)[0].0;
    hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
    hand.append(&create(ino, InodeId::ROOT, b"last", 0o100_644, 7));
    hand.post(0, &Request::Inode { ino, mode: LeaseMode::Write, flags: 0 }, 0);
    rig.event(0, Event::ClientGone(hand.client));
    assert_eq!(rig.nodes[0].status().clients.len(), 1, "its last entry is not published yet");
    rig.event(0, Event::Doorbell(hand.client));
    rig.settle();
    let status = rig.nodes[0].status();
    assert_eq!((status.requests, status.clients.len()), (0, 0));
    assert!(content(&rig, 0, b"last").is_some(), "what it did counts");
}

/// Entries that nobody asked to be fetched, of a client that lives: they are there afterwards, the
/// session goes on with its leases, and nothing is refused.
#[test]
fn a_living_client_goes_on_in_its_session() {
    let mut rig = Rig::new(1, 1);
    let mut hand = rig.attach(0, 7);
    let numbers = hand.numbers(&mut rig, 2);
    let root = hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease").granted;
    let (first, second) = (numbers[0].0, numbers[1].0);
    hand.append(&create(first, InodeId::ROOT, b"first", 0o100_644, 7));
    hand.append(&write(first, 0, b"one"));
    for round in 0..3 {
        rig = restarted(rig, 10 + round);
        assert!(hand.holds(root), "the lease stands");
        assert_eq!(hand.word(control::STATE), control::STATE_ATTACHED);
        let text = format!("round {round}");
        hand.append(&write(first, 0, text.as_bytes()));
        rig.settle();
        assert_eq!(content(&rig, 0, b"first"), Some(text.into_bytes()));
        assert_eq!(hand.word(control::PUBLISHED), hand.seq, "log space is given back");
    }
    // A number of the first run is still this client's.
    hand.append(&create(second, InodeId::ROOT, b"second", 0o100_600, 7));
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    assert_eq!(content(&rig, 0, b"second"), Some(Vec::new()));
    // Leases are given on, words are never the same again.
    let mut other = rig.attach(0, 0);
    other.create(&mut rig, b"third", 0o100_644);
    assert!(!hand.holds(root));
    let again = hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Read);
    assert_ne!(again.expect("a lease").granted.word, root.word);
    rig.check();
}

/// A client made something, removed it again and still holds the lease on its number: whenever the
/// service starts anew, the number is used. What it was handed out beside it is not.
#[test]
fn a_number_that_was_used_is_not_fresh_after_a_restart() {
    for (seed, published, restarts) in
        [(30, true, 1), (31, false, 1), (32, true, 2), (33, false, 2)]
    {
        let mut rig = Rig::new(1, seed);
        let mut hand = rig.attach(0, 0);
        let numbers = hand.numbers(&mut rig, 2);
        let (used, spare) = (numbers[0].0, numbers[1].0);
        hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
        hand.append(&create(used, InodeId::ROOT, b"file", 0o100_644, 0));
        let gone = Op::Unlink { ino: used, parent: InodeId::ROOT, name: b"file", open: false };
        hand.append(&gone);
        hand.sync(&mut rig);
        if published {
            rig.settle();
        }
        for n in 0..restarts {
            rig = restarted(rig, seed + 10 * n);
            rig.settle();
        }
        assert!(hand.holds(numbers[0].1) && hand.holds(numbers[1].1), "the leases stand");
        hand.append(&create(spare, InodeId::ROOT, b"spare", 0o100_644, 0));
        hand.append(&create(used, InodeId::ROOT, b"again", 0o100_644, 0));
        hand.sync(&mut rig);
        rig.settle();
        assert_eq!(hand.refusals(), 1, "seed {seed}");
        assert_eq!(content(&rig, 0, b"spare"), Some(Vec::new()));
        assert_eq!(content(&rig, 0, b"again"), None, "seed {seed}");
        rig.check();
    }
}

/// The same, and the process ends while the service is away: all of it counts, then it vanishes.
#[test]
fn the_log_of_a_dead_client_is_drained_and_removed() {
    let mut rig = Rig::new(1, 2);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.append(&write(ino, 0, b"last words"));
    let client = hand.client;
    rig = restarted(rig, 3);
    assert_eq!(rig.nodes[0].status().clients.len(), 1);
    rig.event(0, Event::ClientGone(client));
    rig.settle();
    assert_eq!(content(&rig, 0, b"file"), Some(b"last words".to_vec()));
    assert!(rig.nodes[0].status().clients.is_empty(), "{:?}", rig.nodes[0].status());
    assert_eq!(rig.nodes[0].status().leases, 0);
    assert!(rig.regions[0].size(hand.log).is_err(), "the log is gone");
    rig = restarted(rig, 4);
    rig.settle();
    assert!(rig.nodes[0].status().clients.is_empty());
    assert_eq!(content(&rig, 0, b"file"), Some(b"last words".to_vec()));
    rig.check();
}

/// Two clients with entries about different inodes; one of them was in the middle of a recall.
#[test]
fn a_lease_on_its_way_back_counts_until_its_log_is_read() {
    let mut rig = Rig::new(1, 5);
    let (mut a, b) = (rig.attach(0, 0), rig.attach(0, 0));
    let ino = a.create(&mut rig, b"file", 0o100_644);
    let lease = a.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
    rig.settle();
    // A is inside an operation when B asks.
    let inside = control::in_op(0);
    a.set(inside, 1);
    b.post(0, &Request::Inode { ino, mode: LeaseMode::Write, flags: WANT_WRITE }, 0);
    rig.event(0, Event::Doorbell(b.client));
    rig.pass(1_000_000);
    assert!(!a.holds(lease), "recalled");
    a.append(&write(ino, 0, b"in time"));
    rig = restarted(rig, 6);
    a.set(inside, 2);
    rig.settle();
    assert_eq!(content(&rig, 0, b"file"), Some(b"in time".to_vec()));
    assert_eq!(a.refusals(), 0);
    let word = b.word(control::RPC) as u32;
    assert!(word == rpc::SLOT_AGAIN || word == rpc::SLOT_REPLY, "posted again or answered: {word}");
    rig.check();
}

/// A request that the dead service had taken is posted again, and answered by the next.
#[test]
fn a_request_under_way_is_asked_for_again() {
    let mut rig = Rig::new(1, 7);
    let hand = rig.attach(0, 0);
    hand.post(0, &Request::StatFs, 0);
    let taken = u64::from(rpc::SLOT_TAKEN) | (hand.word(control::RPC) & !0xffff_ffff);
    hand.set(control::RPC, taken);
    rig = restarted(rig, 8);
    assert_eq!(hand.word(control::RPC) as u32, rpc::SLOT_AGAIN);
    hand.call(&mut rig, &Request::StatFs).expect("an answer");
}

/// A file without a name lives on while a client of an earlier run has it open, and a right to
/// write outlives the restart as it outlives a change of the mode.
#[test]
fn what_is_open_stays_open() {
    // At once; and to read first, and to write through a second descriptor.
    stays_open(&[WANT_PIN | WANT_WRITE]);
    stays_open(&[WANT_PIN | WANT_READ, WANT_WRITE]);
}

fn stays_open(opened: &[u8]) {
    let mut rig = Rig::new(1, 9);
    let (mut owner, mut user) = (rig.attach(0, 5), rig.attach(0, 6));
    let ino = owner.create(&mut rig, b"file", 0o100_666);
    owner.sync(&mut rig);
    for flags in opened {
        let request = Request::Inode { ino, mode: LeaseMode::Write, flags: *flags };
        user.call(&mut rig, &request).expect("everybody may write");
    }
    owner.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    let gone = Op::Unlink { ino, parent: InodeId::ROOT, name: b"file", open: false };
    let chmod = Op::SetAttr {
        ino,
        mask: storage::format::entry::mask::MODE,
        mode: 0o600,
        uid: 0,
        gid: 0,
        atime: storage::format::entry::Stamp::default(),
        mtime: storage::format::entry::Stamp::default(),
    };
    owner.append(&chmod);
    owner.append_in(&mut rig, InodeId::ROOT, &gone);
    owner.sync(&mut rig);
    rig.settle();
    rig = restarted(rig, 10);
    rig.settle();
    let volume = rig.nodes[0].volume();
    assert!(volume.attr(ino).expect("sound").is_some(), "an orphan that is open");
    user.call(&mut rig, &Request::Inode { ino, mode: LeaseMode::Write, flags: 0 }).expect("open");
    user.append(&write(ino, 0, b"still"));
    user.sync(&mut rig);
    assert_eq!((owner.refusals(), user.refusals()), (0, 0));
    user.call(&mut rig, &Request::Unpin { inodes: vec![ino] }).expect("an answer");
    rig.settle();
    assert!(rig.nodes[0].volume().attr(ino).expect("sound").is_none(), "closed");
    rig.check();
}

fn one_entry_behind(seed: u64) -> (Rig, Hand) {
    let mut rig = Rig::new(1, seed);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    hand.append(&write(ino, 0, b"behind"));
    (rig, hand)
}

/// The table is full of nonsense: the node starts, what was in the stream is there.
#[test]
fn a_garbage_table_takes_nothing_up() {
    for seed in 0..20 {
        let (rig, _) = one_entry_behind(seed);
        let region = Arc::clone(&rig.regions[0]);
        let size = region.size(Segment::Clients).expect("a table");
        let mut garbage = vec![0; size as usize];
        Random::new(seed).fill(&mut garbage);
        region.damage(Segment::Clients, 0, &garbage).expect("a table");
        let mut rig = restarted(rig, seed);
        assert!(rig.nodes[0].status().clients.is_empty());
        let segments = region.segments().expect("a region");
        assert!(!segments.iter().any(|s| matches!(s, Segment::Log(_))), "logs of nobody");
        rig.settle();
        assert_eq!(content(&rig, 0, b"file"), Some(Vec::new()));
        let mut hand = rig.attach(0, 0);
        hand.create(&mut rig, b"new", 0o100_644);
        rig = restarted(rig, seed);
        rig.settle();
        assert!(content(&rig, 0, b"new").is_some(), "the table works again");
        rig.check();
    }
}

/// One flipped bit anywhere in the row or the header: the log is taken up as it was, or the entry
/// behind the stream does not count; nothing else happens.
#[test]
fn flipped_bits_in_the_table_cost_no_more_than_the_log() {
    let mut random = Random::new(11);
    for seed in 0..60 {
        let (rig, hand) = one_entry_behind(seed);
        let region = &rig.regions[0];
        let row = row_at(0);
        let (at, len) = *[
            (0, 128),
            (row, 128),
            (row + clients::PROGRESS, 256),
            (row + clients::LEASES, 64),
            (row + clients::PINS, 64),
        ]
        .get(random.below(5) as usize)
        .expect("one of five");
        let at = at + random.below(len);
        let mut byte = [0];
        region.read(Segment::Clients, at, &mut byte).expect("a table");
        byte[0] ^= 1 << random.below(8);
        region.damage(Segment::Clients, at, &byte).expect("a table");
        let mut rig = restarted(rig, seed);
        rig.settle();
        let found = content(&rig, 0, b"file").expect("it is in the stream");
        assert!(found.is_empty() || found == b"behind", "{found:?}");
        rig.event(0, Event::ClientGone(hand.client));
        rig.settle();
        assert!(rig.nodes[0].status().clients.is_empty(), "byte {at}");
        let mut other = rig.attach(0, 0);
        other.create(&mut rig, b"other", 0o100_644);
        rig.settle();
        assert_eq!(other.refusals(), 0);
        rig.check();
    }
}

/// A client cannot claim in its own memory what the table does not say.
#[test]
fn lease_words_of_the_clients_own_making_claim_nothing() {
    let mut rig = Rig::new(1, 12);
    let (mut honest, mut thief) = (rig.attach(0, 0), rig.attach(0, 0));
    let ino = honest.create(&mut rig, b"file", 0o100_644);
    honest.sync(&mut rig);
    honest.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    for slot in 0..64 {
        thief.set(control::lease_word(slot) - 8, ino.0);
        thief.set(control::lease_word(slot), 0x0100_0000_0002);
    }
    thief.append(&write(ino, 0, b"stolen"));
    honest.append(&write(ino, 0, b"honest"));
    rig = restarted(rig, 13);
    rig.settle();
    assert_eq!(content(&rig, 0, b"file"), Some(b"honest".to_vec()));
    assert_eq!((honest.refusals(), thief.refusals()), (0, 1));
}

fn start(region: &Arc<MemoryRegion>, n: u32, boot: u128) -> Node {
    let media = Arc::clone(region) as Arc<dyn Media>;
    let config = service::core::NodeConfig { boot, ..config(n) };
    Node::new(config, media, Random::new(77)).expect("a node")
}

/// The machine was started anew: nobody lives, and in `pmem` mode the logs count.
#[test]
fn after_a_reboot_everybody_has_ended() {
    let (rig, _) = one_entry_behind(14);
    let region = Arc::clone(&rig.regions[0]);
    let mut rig = rig;
    rig.nodes[0] = start(&region, 1, 2);
    rig.event(
        0,
        Event::View { epoch: Epoch(2), chain: vec![NodeId(1)], syncing: Vec::new(), lapse: 0 },
    );
    rig.settle();
    assert_eq!(content(&rig, 0, b"file"), Some(b"behind".to_vec()));
    assert!(rig.nodes[0].status().clients.is_empty());
    rig.check();
}

/// Node 2 dies with entries in a client's log; node 1 goes on alone and gives the file to another.
/// What node 2 finds when it returns must not be replayed.
#[test]
fn an_evicted_node_does_not_replay() {
    let mut rig = Rig::new(2, 15);
    let mut lost = rig.attach(1, 0);
    let ino = lost.create(&mut rig, b"file", 0o100_644);
    lost.append(&write(ino, 0, b"synced"));
    lost.sync(&mut rig);
    rig.settle();
    lost.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    lost.append(&write(ino, 0, b"behind"));
    // Node 2 is dead; the chain goes on.
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    let alone = |epoch| Event::View {
        epoch: Epoch(epoch),
        chain: vec![NodeId(1)],
        syncing: if epoch > 2 { vec![NodeId(2)] } else { Vec::new() },
        lapse: 0,
    };
    rig.event(0, alone(2));
    rig.settle();
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    let mut other = rig.attach(0, 0);
    other.lease(&mut rig, ino, LeaseMode::Write).expect("the dead node's lease is free");
    other.append(&write(ino, 0, b"others"));
    other.sync(&mut rig);
    rig.nodes[1] = start(&rig.regions[1], 2, 1);
    assert_eq!(rig.nodes[1].status().clients.len(), 1, "it does not know better yet");
    rig.pass(10_000_000);
    assert_eq!(lost.word(control::STATE), control::STATE_ATTACHED);
    for n in 0..2 {
        rig.event(n, alone(3));
    }
    rig.settle();
    assert_eq!(rig.nodes[1].role(), Role::Syncing);
    assert!(rig.nodes[1].status().clients.is_empty());
    assert!(rig.regions[1].size(lost.log).is_err(), "the log is dropped");
    for n in 0..2 {
        let chain = vec![NodeId(1), NodeId(2)];
        rig.event(n, Event::View { epoch: Epoch(4), chain, syncing: Vec::new(), lapse: 0 });
    }
    rig.settle();
    assert_eq!(rig.nodes[1].role(), Role::Member);
    for n in 0..2 {
        assert_eq!(content(&rig, n, b"file"), Some(b"others".to_vec()), "node {}", n + 1);
    }
    rig.check();
}

/// Both nodes die and keep their places: everything in both logs counts.
#[test]
fn a_whole_chain_that_restarts_takes_up_every_log() {
    let mut rig = Rig::new(2, 16);
    let (mut a, mut b) = (rig.attach(0, 0), rig.attach(1, 0));
    let (x, y) = (a.create(&mut rig, b"a", 0o100_644), b.create(&mut rig, b"b", 0o100_644));
    rig.settle();
    for (hand, ino) in [(&mut a, x), (&mut b, y)] {
        hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
        hand.append(&write(ino, 0, b"behind"));
    }
    rig = restarted(rig, 17);
    rig.settle();
    for n in 0..2 {
        assert_eq!(content(&rig, n, b"a"), Some(b"behind".to_vec()));
        assert_eq!(content(&rig, n, b"b"), Some(b"behind".to_vec()));
    }
    assert_eq!((a.refusals(), b.refusals()), (0, 0));
    a.sync(&mut rig);
    b.sync(&mut rig);
    rig.check();
}

/// The head publishes what nobody else has yet, and is started anew: whoever gets a lease on that is promised that all have it, and
/// so is who syncs it.
#[test]
fn what_the_head_alone_has_is_granted_to_nobody_after_a_restart() {
    let mut rig = Rig::new(3, 1);
    let (mut a, b) = (rig.attach(0, 0), rig.attach(0, 0));
    let file = a.create(&mut rig, b"file", 0o100_644);
    a.sync(&mut rig);
    rig.settle();
    let lease = a.lease(&mut rig, file, LeaseMode::Write).expect("a lease").granted;
    assert!(a.holds(lease));
    a.append(&write(file, 0, b"alone"));
    rig.event(0, Event::Doorbell(a.client));
    (0..20).for_each(|_| rig.pass(1_000_000));
    assert_eq!(content(&rig, 0, b"file"), Some(b"alone".to_vec()));
    let regions = rig.regions.clone();
    drop(rig);
    let media = regions.iter().map(|r| Arc::clone(r) as Arc<dyn Media>).collect();
    let mut rig = Rig::unheard(regions, media, 2, config);
    // What the others say arrives, and nothing of the head's.
    let hear = |rig: &mut Rig| {
        for link in 0..rig.links.len() {
            while rig.links[link].0 == NodeId(1) && rig.deliver(link) {}
        }
        rig.event(0, Event::Doorbell(b.client));
        rig.pass(1_000_000);
    };
    b.post(0, &Request::Inode { ino: file, mode: LeaseMode::Read, flags: 0 }, 0);
    b.post(1, &Request::Inode { ino: file, mode: LeaseMode::None, flags: rpc::WANT_REACH }, 0);
    (0..40).for_each(|_| hear(&mut rig));
    assert_eq!(rig.nodes[0].role(), Role::Head);
    assert!(!b.has_reply(0) && !b.has_reply(1), "the others have it not");
    rig.settle();
    rig.event(0, Event::Doorbell(b.client));
    rig.settle();
    assert!(b.has_reply(0) && b.has_reply(1));
    assert_eq!(content(&rig, 2, b"file"), Some(b"alone".to_vec()));
    rig.check();
}

#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn a_head_that_forgets_what_others_lack_is_missed() {
    use base::planted::{Bug, missed};
    let test: fn() = what_the_head_alone_has_is_granted_to_nobody_after_a_restart;
    assert_eq!(missed(&[(Bug::UnackedForgotten, test)]), []);
}
