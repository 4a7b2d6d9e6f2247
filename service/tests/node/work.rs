//! Work that ends when the test lets it: what is sent, said and published meanwhile.

use base::random::Random;
use base::{Epoch, InodeId, NodeId, StreamSeq};
use service::core::limits::Limits;
use service::core::work::Kind;
use service::core::{Event, Node};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{self, Request};
use storage::media::Media;

use crate::rig::{Hand, Rig, config_with};

const LONG: usize = 200_000;

/// A chain whose members work apart on all that is longer than `inline`, and a client of the head with a file.
fn chain(nodes: u32, seed: u64, inline: usize) -> (Rig, Hand, InodeId) {
    chain_with(nodes, seed, Limits { inline_bytes: inline, ..Limits::SHIPPED })
}

fn chain_with(nodes: u32, seed: u64, limits: Limits) -> (Rig, Hand, InodeId) {
    let mut rig = Rig::with(nodes, seed, config_with(limits));
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"f", 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    rig.holds_work = true;
    (rig, hand, ino)
}

fn write(rig: &mut Rig, hand: &mut Hand, ino: InodeId, offset: u64, len: usize, byte: u8) -> u64 {
    let data = vec![byte; len];
    let seq = hand.append(&Op::Write { ino, offset, data: &data, clear_setid: false });
    hand.set(control::SYNC_REQUEST, seq.0);
    rig.event(hand.n, Event::Doorbell(hand.client));
    fetch(rig);
    seq.0
}

/// Ends all work that fetches.
fn fetch(rig: &mut Rig) {
    while let Some(at) = rig.pieces.iter().position(|(_, piece)| piece.kind() == Kind::Fetch) {
        rig.end_work(at);
    }
}

fn published(rig: &Rig, n: usize) -> StreamSeq {
    rig.nodes[n].volume().root().stream_seq
}

fn read(rig: &Rig, n: usize, ino: InodeId, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let found = rig.nodes[n].volume().read_file(ino, 0, &mut bytes).expect("content");
    bytes.truncate(found);
    bytes
}

#[test]
fn what_is_short_is_done_at_once() {
    let (mut rig, mut hand, ino) = chain(2, 1, 128 << 10);
    let seq = write(&mut rig, &mut hand, ino, 0, 100_000, 1);
    assert!(rig.pieces.is_empty());
    rig.deliver_all();
    assert!(rig.pieces.is_empty() && hand.word(control::REPLICATED) >= seq);
}

/// Where a fence takes long: all members have it, and each works on it, before anybody has ended; then it is acknowledged.
#[test]
fn what_is_short_waits_for_no_disk_before_it_is_sent() {
    for nodes in [2, 3] {
        let limits = Limits { keep_inline: 0, ..Limits::SHIPPED };
        let (mut rig, mut hand, ino) = chain_with(nodes, 1, limits);
        let seq = write(&mut rig, &mut hand, ino, 0, 100, 1);
        rig.deliver_all();
        let keeps = |n: usize, rig: &Rig| {
            rig.pieces.iter().any(|(at, piece)| *at == n && piece.kind() == Kind::Keep)
        };
        assert!((0..nodes as usize).all(|n| keeps(n, &rig)), "{nodes} nodes");
        assert!(hand.word(control::REPLICATED) < seq);
        rig.holds_work = false;
        while rig.end_work(0) {}
        rig.deliver_all();
        assert!(hand.word(control::REPLICATED) >= seq, "{nodes} nodes");
        rig.check();
    }
}

/// Beside others a quarter of what is long else is long enough, for as long as there are others.
#[test]
fn what_is_short_beside_others_is_worked_upon() {
    for (inline, apart) in [(128 << 10, true), (usize::MAX, false)] {
        let (mut rig, mut hand, ino) = chain(2, 1, inline);
        rig.holds_work = false;
        let mut other = rig.attach(0, 0);
        let second = other.create(&mut rig, b"g", 0o100_644);
        other.sync(&mut rig);
        rig.settle();
        other.lease(&mut rig, second, LeaseMode::Write).expect("a lease");
        rig.holds_work = true;
        write(&mut rig, &mut hand, ino, 0, 100_000, 1);
        assert!(rig.pieces.is_empty(), "the first is alone");
        write(&mut rig, &mut other, second, 0, 100_000, 2);
        let kept = |rig: &Rig| rig.pieces.iter().any(|(_, piece)| piece.kind() == Kind::Keep);
        assert_eq!(kept(&rig), apart);
        rig.holds_work = false;
        while rig.end_work(0) {}
        rig.settle();
        rig.holds_work = true;
        write(&mut rig, &mut hand, ino, 0, 100_000, 3);
        assert!(rig.pieces.is_empty(), "alone again");
        rig.holds_work = false;
        rig.settle();
        rig.check();
    }
}

/// It is on its way to the next node before it is in the ring of this one, and fsync waits for both.
#[test]
fn a_chunk_is_sent_before_it_is_kept_and_acknowledged_when_all_have_it() {
    for head_first in [false, true] {
        let (mut rig, mut hand, ino) = chain(2, 2, 128 << 10);
        let before = rig.nodes[0].position();
        let seq = write(&mut rig, &mut hand, ino, 0, LONG, 2);
        assert_eq!(rig.pieces.len(), 1, "the head works");
        assert!(rig.links.iter().any(|(to, _, queue)| *to == NodeId(2) && !queue.is_empty()));
        assert_eq!(rig.nodes[0].position(), before, "it does not say that it has it");
        assert!(hand.word(control::SETTLED) < seq, "nor to its client");
        rig.deliver_all();
        assert_eq!(rig.pieces.len(), 2, "the member works");
        for left in [usize::from(!head_first), 0] {
            assert!(hand.word(control::REPLICATED) < seq, "one of them does not have it");
            assert!(rig.end_work(left));
            rig.deliver_all();
        }
        assert!(hand.word(control::REPLICATED) >= seq);
        assert!(rig.nodes.iter().all(|node| node.position().0 == before.0 + 1));
        rig.holds_work = false;
        rig.settle();
        assert_eq!(read(&rig, 1, ino, LONG), vec![2; LONG]);
        rig.check();
    }
}

#[test]
fn one_piece_is_under_way_and_the_next_has_all_that_came_meanwhile() {
    let limits = Limits { inline_bytes: 1000, keepers: 1, ..Limits::SHIPPED };
    let (mut rig, mut hand, ino) = chain_with(1, 3, limits);
    let first = rig.nodes[0].position();
    for n in 0..6u64 {
        // Short ones, too: they come behind.
        let len = if n == 3 { 10 } else { 5000 };
        write(&mut rig, &mut hand, ino, n * 5000, len, n as u8 + 1);
        assert_eq!(rig.pieces.len(), 1);
    }
    assert!(rig.end_work(0));
    assert_eq!((rig.pieces.len(), rig.nodes[0].position().0), (1, first.0 + 1));
    assert!(rig.end_work(0));
    assert_eq!((rig.pieces.len(), rig.nodes[0].position().0), (0, first.0 + 6));
    assert_eq!(hand.word(control::REPLICATED), hand.seq);
}

/// Several pieces end in any order, and chunks count in that of the stream.
#[test]
fn who_ends_first_waits_for_those_before_it() {
    for order in [[0, 0, 0], [2, 1, 0], [1, 1, 0], [0, 1, 0], [2, 0, 0], [1, 0, 0]] {
        let (mut rig, mut hand, ino) = chain(2, 3, 1000);
        let first = rig.nodes[0].position().0;
        for n in 0..3u64 {
            write(&mut rig, &mut hand, ino, n * 5000, 5000, n as u8 + 1);
        }
        assert_eq!(rig.pieces.len(), 3);
        rig.deliver_all();
        // Those of the head are first; the member works, too.
        assert_eq!(rig.pieces.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        let mut left = vec![0, 1, 2];
        for at in order {
            assert!(rig.end_work(at));
            left.remove(at);
            let kept = left.first().map_or(3, |first| *first);
            assert_eq!(rig.nodes[0].position().0, first + kept, "{order:?}: {left:?} are missing");
            rig.deliver_all();
            assert_eq!(hand.word(control::REPLICATED), hand.seq - 3, "the member has none");
        }
        for at in order {
            assert!(rig.end_work(at));
            rig.deliver_all();
        }
        assert_eq!(hand.word(control::REPLICATED), hand.seq);
        rig.holds_work = false;
        rig.settle();
        for n in 0..2 {
            let bytes = read(&rig, n, ino, 15_000);
            assert!(bytes.chunks(5000).zip(1u8..).all(|(part, byte)| part == [byte; 5000]));
        }
        rig.check();
    }
}

/// A chunk that is laid down, and those before it are not, is not there for who opens the ring after the end of the process.
#[test]
fn what_lies_behind_a_hole_is_not_there() {
    for ended in 0..3 {
        let (mut rig, mut hand, ino) = chain(1, 5, 1000);
        let first = rig.nodes[0].position().0;
        for n in 0..3u64 {
            write(&mut rig, &mut hand, ino, n * 5000, 5000, n as u8 + 1);
        }
        assert!(rig.end_work(ended));
        let media = std::sync::Arc::clone(&rig.regions[0]) as std::sync::Arc<dyn Media>;
        let node = Node::new(config_with(Limits::SHIPPED)(1), media, Random::new(99));
        let there = u64::from(ended == 0);
        assert_eq!(node.expect("a node").position().0, first + there, "piece {ended} had ended");
    }
}

/// Its bytes are not where the copies would take them from.
#[test]
fn nothing_is_published_before_it_is_kept() {
    let (mut rig, mut hand, ino) = chain(2, 4, 1000);
    write(&mut rig, &mut hand, ino, 0, 5000, 7);
    rig.deliver_all();
    let before = [published(&rig, 0), published(&rig, 1)];
    for _ in 0..10 {
        rig.pass(10_000_000);
        rig.deliver_all();
        let keeps = rig.pieces.iter().all(|(_, piece)| piece.kind() == Kind::Keep);
        assert!(keeps, "nor is anything copied for that");
    }
    assert_eq!([published(&rig, 0), published(&rig, 1)], before);
    rig.holds_work = false;
    rig.settle();
    assert!(published(&rig, 0) > before[0] && published(&rig, 1) > before[1]);
    for n in 0..2 {
        assert_eq!(read(&rig, n, ino, 5000), vec![7; 5000]);
    }
    rig.check();
}

/// A chain of one, without hostd, of which so much is applied that its publication is work; that work.
fn copying(seed: u64, limits: Limits) -> (Rig, Hand, InodeId) {
    let (mut rig, mut hand, ino) = chain_with(1, seed, limits);
    write(&mut rig, &mut hand, ino, 0, 20_000, 1);
    assert!(rig.end_work(0));
    rig.now += 10_000_000;
    rig.slice(0);
    let kinds: Vec<Kind> = rig.pieces.iter().map(|(_, piece)| piece.kind()).collect();
    assert_eq!(kinds, [Kind::Publish], "long copies are work");
    (rig, hand, ino)
}

/// They are made one piece after the other, and the root is flipped when the last has ended.
#[test]
fn nothing_is_published_before_it_is_copied() {
    let limits =
        Limits { inline_bytes: 1000, piece_bytes: 6000, slice_bytes: 500, ..Limits::SHIPPED };
    let (mut rig, _, ino) = copying(12, limits);
    let (before, due) = (published(&rig, 0), rig.nodes[0].position());
    let mut pieces = 0;
    while !rig.pieces.is_empty() {
        for _ in 0..10 {
            rig.pass(10_000_000);
        }
        assert_eq!((rig.pieces.len(), published(&rig, 0)), (1, before), "piece {pieces}");
        rig.nodes[0].invariants().expect("as it should be");
        assert!(rig.end_work(0));
        rig.slice(0);
        pieces += 1;
    }
    assert_eq!((pieces, published(&rig, 0)), (3, due), "20000 bytes by two blocks");
    assert!(read(&rig, 0, ino, 20_000) == vec![1; 20_000]);
    rig.check();
}

/// The service ends: the piece is done by whoever needs it, or was before, and what it was for is published.
#[test]
fn who_publishes_at_once_waits_for_who_copies() {
    for begun in [false, true] {
        let limits = Limits { inline_bytes: 1000, ..Limits::SHIPPED };
        let (mut rig, _, ino) = copying(13, limits);
        let due = rig.nodes[0].position();
        let (_, piece) = rig.pieces.pop_front().expect("one");
        if begun {
            piece.run(&*rig.regions[0]);
        }
        rig.event(0, Event::Closing);
        rig.event(0, Event::Shutdown);
        assert_eq!(published(&rig, 0), due);
        rig.event(0, Event::WorkEnded(piece.id()));
        assert!(read(&rig, 0, ino, 20_000) == vec![1; 20_000]);
        rig.check();
    }
}

/// A node takes a snapshot instead of what it has: what it was copying must not come into that later.
#[test]
fn who_takes_a_snapshot_waits_for_who_copies() {
    let limits = Limits { inline_bytes: 1000, returns: 0, ..Limits::SHIPPED };
    let (mut rig, mut hand, ino) = chain_with(2, 14, limits);
    write(&mut rig, &mut hand, ino, 0, 20_000, 1);
    rig.deliver_all();
    while rig.end_work(0) {}
    rig.deliver_all();
    rig.pass(10_000_000);
    let at = rig.pieces.iter().position(|(n, piece)| (*n, piece.kind()) == (1, Kind::Publish));
    let (_, piece) = rig.pieces.remove(at.expect("node 2 copies")).expect("it is there");
    for (epoch, syncing) in [(2, vec![]), (3, vec![NodeId(2)])] {
        for n in 0..2 {
            let (chain, syncing) = (vec![NodeId(1)], syncing.clone());
            rig.event(n, Event::View { epoch: Epoch(epoch), chain, syncing, lapse: 0 });
        }
    }
    rig.holds_work = false;
    while rig.end_work(0) {}
    rig.settle();
    assert!(piece.is_begun(), "nobody has waited for it");
    let chain = vec![NodeId(1), NodeId(2)];
    for n in 0..2 {
        let chain = chain.clone();
        rig.event(n, Event::View { epoch: Epoch(4), chain, syncing: Vec::new(), lapse: 0 });
    }
    rig.settle();
    assert!(read(&rig, 1, ino, 20_000) == vec![1; 20_000]);
    assert_eq!(rig.nodes[0].volume().differences(rig.nodes[1].volume()).expect("sound"), [""; 0]);
    rig.check();
}

/// Two clients' logs are fetched side by side, each in its order whatever ends first; and whoever needs one read to its end waits.
#[test]
fn logs_are_fetched_side_by_side_and_each_in_its_order() {
    let limits = Limits { inline_bytes: 1000, fetch_bytes: 6000, ..Limits::SHIPPED };
    let mut rig = Rig::with(1, 7, config_with(limits));
    let mut hands = [rig.attach(0, 0), rig.attach(0, 0)];
    let files = [0, 1].map(|n| hands[n].create(&mut rig, &[b'a' + n as u8], 0o100_644));
    hands.iter().for_each(|hand| hand.sync(&mut rig));
    for (hand, ino) in hands.iter().zip(files) {
        hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    }
    rig.settle();
    rig.holds_work = true;
    for n in 0..4u8 {
        for (hand, ino) in hands.iter_mut().zip(files) {
            let data = vec![n; 5000];
            let op = Op::Write { ino, offset: 0, data: &data, clear_setid: false };
            let seq = hand.append(&op);
            hand.set(control::SYNC_REQUEST, seq.0);
            rig.event(0, Event::Doorbell(hand.client));
        }
    }
    assert_eq!(rig.pieces.len(), 2, "one for each log");
    // The other one first: nobody waits for the first one's.
    assert!(rig.end_work(1));
    let kinds: Vec<Kind> = rig.pieces.iter().map(|(_, piece)| piece.kind()).collect();
    assert_eq!(kinds, [Kind::Fetch, Kind::Keep]);
    // The first client ends: its log is read to its end by whoever looks, and what was being read is not read twice.
    rig.event(0, Event::ClientGone(hands[0].client));
    rig.holds_work = false;
    rig.settle();
    assert_eq!(rig.nodes[0].counters().refused, 0);
    for ino in files {
        assert_eq!(read(&rig, 0, ino, 5000), vec![3; 5000]);
    }
    assert_eq!(rig.nodes[0].counters().bad_messages, 0);
    rig.check();
}

/// In a new view each says how far it is, and that is so; who works on is heard too late.
#[test]
fn a_view_does_not_wait_for_who_works() {
    let (mut rig, mut hand, ino) = chain(3, 5, 1000);
    let seq = write(&mut rig, &mut hand, ino, 0, 5000, 9);
    rig.deliver_all();
    let last = rig.nodes[0].status().stream;
    assert_eq!(rig.pieces.len(), 3);
    let chain = vec![NodeId(1), NodeId(2)];
    for n in 0..2 {
        let (chain, syncing) = (chain.clone(), Vec::new());
        rig.event(n, Event::View { epoch: Epoch(2), chain, syncing, lapse: 0 });
        assert_eq!(rig.nodes[n].position(), last);
    }
    rig.deliver_all();
    assert!(hand.word(control::REPLICATED) >= seq, "both have it");
    rig.holds_work = false;
    rig.settle();
    assert_eq!(rig.nodes[0].volume().differences(rig.nodes[1].volume()).expect("sound"), [""; 0]);
    rig.check();
}

/// nicfs dies, and with it who worked: in the middle, or before he began. Nothing counts that was not acknowledged, and the
/// client's log has it still, numbers that it made use of included.
#[test]
fn who_dies_at_work_loses_nothing_that_was_said() {
    for share in [None, Some(0), Some(100), Some(255)] {
        let limits = Limits { inline_bytes: 0, slice_bytes: 500, ..Limits::SHIPPED };
        let (mut rig, mut hand, ino) = chain_with(1, 6, limits);
        let (fresh, _) = hand.numbers(&mut rig, 1)[0];
        hand.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
        write(&mut rig, &mut hand, ino, 0, 5000, 1);
        assert!(rig.end_work(0));
        let (synced, kept) = (hand.seq, rig.nodes[0].position());
        // Its publication begins, and comes to its end while this is under way.
        rig.now += 10_000_000;
        rig.slice(0);
        let made = crate::rig::create(fresh, InodeId::ROOT, b"g", 0o100_644, 0);
        let seq = hand.append(&made);
        hand.set(control::SYNC_REQUEST, seq.0);
        rig.event(0, Event::Doorbell(hand.client));
        fetch(&mut rig);
        assert!(published(&rig, 0) < kept, "it is not over yet");
        while let Some(at) = rig.pieces.iter().position(|(_, p)| p.kind() == Kind::Publish) {
            assert!(rig.end_work(at));
            rig.slice(0);
        }
        assert_eq!(published(&rig, 0), kept);
        assert_eq!((rig.pieces.len(), hand.word(control::REPLICATED)), (1, synced));
        let (_, piece) = rig.pieces.pop_front().expect("one");
        if let Some(share) = share {
            piece.die(&*rig.regions[0], share);
        }
        let media = std::sync::Arc::clone(&rig.regions[0]) as std::sync::Arc<dyn Media>;
        let config = config_with(limits)(1);
        rig.nodes[0] = Node::new(config, media, Random::new(99)).expect("a node");
        rig.holds_work = false;
        let chain = vec![NodeId(1)];
        rig.event(0, Event::View { epoch: Epoch(2), chain, syncing: Vec::new(), lapse: 0 });
        rig.settle();
        hand.sync(&mut rig);
        rig.settle();
        assert_eq!(hand.refusals(), 0);
        assert_eq!(read(&rig, 0, ino, 5000), vec![1; 5000]);
        assert!(rig.nodes[0].volume().attr(fresh).expect("a sound volume").is_some());
        rig.check();
    }
}

/// The link to the next node was lost, with the chunk; it is sent again while it is still on its way into the ring.
#[test]
fn a_chunk_on_its_way_into_the_ring_can_be_sent_again() {
    let (mut rig, mut hand, ino) = chain(2, 8, 1000);
    let seq = write(&mut rig, &mut hand, ino, 0, 5000, 8);
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    for (n, peer) in [(0, NodeId(2)), (1, NodeId(1))] {
        rig.event(n, Event::PeerDown(peer));
        rig.event(n, Event::PeerUp(peer));
    }
    rig.deliver_all();
    assert_eq!(rig.pieces.len(), 2, "both have it, and are at it");
    while rig.end_work(0) {}
    rig.deliver_all();
    assert!(hand.word(control::REPLICATED) >= seq);
    assert_eq!(rig.nodes[1].counters().bad_messages, 0);
}

/// What was fetched before and is lost with a view is fetched again, and what is being read then behind it, too.
#[test]
fn what_is_read_while_the_view_changes_is_read_again() {
    let limits = Limits { inline_bytes: 1000, forward_bytes: 6000, ..Limits::SHIPPED };
    let mut rig = Rig::with(2, 9, config_with(limits));
    let mut hand = rig.attach(1, 0);
    let ino = hand.create(&mut rig, b"f", 0o100_644);
    hand.sync(&mut rig);
    rig.settle();
    hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    rig.holds_work = true;
    for n in 1..4u8 {
        let data = vec![n; 5000];
        let offset = u64::from(n) * 5000;
        hand.append(&Op::Write { ino, offset, data: &data, clear_setid: false });
    }
    hand.set(control::SYNC_REQUEST, hand.seq);
    rig.event(1, Event::Doorbell(hand.client));
    assert_eq!(rig.pieces.len(), 1);
    assert!(rig.end_work(0));
    assert_eq!(
        rig.pieces.len(),
        1,
        "the next is being read, and the first is on its way to the head"
    );
    rig.links.iter_mut().for_each(|(_, _, queue)| queue.clear());
    for n in 0..2 {
        let (chain, syncing) = (vec![NodeId(1), NodeId(2)], Vec::new());
        rig.event(n, Event::View { epoch: Epoch(2), chain, syncing, lapse: 0 });
    }
    rig.deliver_all();
    rig.holds_work = false;
    rig.settle();
    hand.sync(&mut rig);
    rig.settle();
    let mut all = read(&rig, 0, ino, 20_000);
    assert_eq!(all.len(), 20_000);
    for n in 1..4u8 {
        let tail = all.split_off(all.len().min(5000));
        all = tail;
        assert!(all[..5000].iter().all(|byte| *byte == n), "piece {n}");
    }
    assert_eq!(hand.refusals(), 0);
}

/// Somebody wants a lease under which much was written that is still being read: he gets it with all of that.
#[test]
fn a_recall_waits_for_what_is_being_read() {
    let (mut rig, mut hand, ino) = chain(1, 10, 1000);
    let other = rig.attach(0, 0);
    let before = rig.nodes[0].position();
    let data = vec![5; 5000];
    let seq = hand.append(&Op::Write { ino, offset: 0, data: &data, clear_setid: false });
    hand.set(control::SYNC_REQUEST, seq.0);
    rig.event(0, Event::Doorbell(hand.client));
    assert_eq!(rig.pieces.front().map(|(_, piece)| piece.kind()), Some(Kind::Fetch));
    let flags = rpc::WANT_READ;
    other.post(0, &Request::Inode { ino, mode: LeaseMode::Read, flags }, 0);
    for _ in 0..100 {
        rig.event(0, Event::Doorbell(other.client));
        // Who reads the log never comes to an end by himself.
        let others = rig.pieces.iter().position(|(_, piece)| piece.kind() != Kind::Fetch);
        others.map(|at| rig.end_work(at));
        if other.has_reply(0) {
            break;
        }
        rig.pass(1_000_000);
    }
    assert!(other.has_reply(0) && rig.nodes[0].position() > before);
    rig.holds_work = false;
    rig.settle();
    assert_eq!(read(&rig, 0, ino, 5000), data);
}

/// The head has in its state what is on its way into its ring. Before it says anything of that, it is there.
#[test]
fn what_is_answered_is_in_the_ring() {
    let gone = Request::Inode { ino: InodeId(1 << 40), mode: LeaseMode::Read, flags: 0 };
    // An answer, and that there is nothing to ask about, here and for another node. Seed joint 8500155.
    for (n, request) in [(0, Request::StatFs), (0, gone.clone()), (1, gone)] {
        let (mut rig, mut hand, ino) = chain(2, 11, 1000);
        let other = rig.attach(n, 0);
        write(&mut rig, &mut hand, ino, 0, 5000, 6);
        assert!(rig.nodes[0].position() < rig.nodes[0].status().stream);
        other.post(0, &request, 0);
        rig.event(n, Event::Doorbell(other.client));
        while !other.has_reply(0) {
            assert!((0..rig.links.len()).any(|link| rig.deliver(link)), "{n}: {request:?}");
        }
        assert_eq!(rig.nodes[0].position(), rig.nodes[0].status().stream, "{n}: {request:?}");
    }
}

/// Time passes, as the head and the members see it.
fn passes(rig: &mut Rig, millis: u64) {
    for _ in 0..millis / 50 {
        rig.pass(50_000_000);
        fetch(rig);
        rig.deliver_all();
    }
}

/// A member that is given little of the processor has a chunk for seconds before it can acknowledge it. It says so, and is not
/// reported.
#[test]
fn who_is_slow_at_work_is_not_reported() {
    let (mut rig, mut hand, ino) = chain(3, 1, 128 << 10);
    let seq = write(&mut rig, &mut hand, ino, 0, LONG, 2);
    rig.deliver_all();
    assert_eq!(rig.pieces.len(), 3);
    for slow in [2, 1] {
        // The head is first, and after it whoever is left.
        assert!(rig.end_work(0));
        passes(&mut rig, 2_000);
        assert_eq!(rig.suspected, [], "{slow} of them are slow");
        assert!(hand.word(control::REPLICATED) < seq);
    }
    assert!(rig.end_work(0));
    passes(&mut rig, 2_000);
    assert!(hand.word(control::REPLICATED) >= seq);
    assert_eq!(rig.suspected, []);
}

/// One that never gets there is, though later; and one that says nothing is at once.
#[test]
fn who_is_stuck_at_work_is_reported_and_who_is_silent_at_once() {
    let (mut rig, mut hand, ino) = chain(3, 1, 128 << 10);
    write(&mut rig, &mut hand, ino, 0, LONG, 2);
    rig.deliver_all();
    assert!(rig.end_work(0));
    let stuck = rig.pieces.iter().position(|(n, _)| *n == 2).expect("all three work");
    assert!(rig.end_work(1 - stuck));
    passes(&mut rig, 5_000);
    assert_eq!(rig.suspected, []);
    passes(&mut rig, 2_000);
    assert_eq!(rig.suspected, [NodeId(3)]);

    let (mut rig, mut hand, ino) = chain(3, 1, usize::MAX);
    write(&mut rig, &mut hand, ino, 0, LONG, 2);
    for _ in 0..20 {
        rig.pass(50_000_000);
        while (0..rig.links.len()).any(|link| rig.links[link].0 != NodeId(2) && rig.deliver(link)) {
        }
    }
    assert_eq!(rig.suspected, [NodeId(2)], "it is heard of no more");
}

/// What work does not wait for, or is not waited for, is found.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn work_that_counts_too_early_is_found() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 14] = [
        (Bug::PublishedUncopied, nothing_is_published_before_it_is_copied),
        (Bug::CopiesOutlive, who_publishes_at_once_waits_for_who_copies),
        (Bug::CopiesOutlive, who_takes_a_snapshot_waits_for_who_copies),
        (Bug::KeptEarly, a_chunk_is_sent_before_it_is_kept_and_acknowledged_when_all_have_it),
        (Bug::PublishedUnkept, nothing_is_published_before_it_is_kept),
        (Bug::SettledUnkept, a_chunk_is_sent_before_it_is_kept_and_acknowledged_when_all_have_it),
        (Bug::MadeUnkept, who_dies_at_work_loses_nothing_that_was_said),
        (Bug::KeptReadEarly, a_chunk_on_its_way_into_the_ring_can_be_sent_again),
        (Bug::ReadOutlives, what_is_read_while_the_view_changes_is_read_again),
        (Bug::DrainUnread, a_recall_waits_for_what_is_being_read),
        (Bug::AnsweredUnkept, what_is_answered_is_in_the_ring),
        (Bug::KeptOutOfOrder, who_ends_first_waits_for_those_before_it),
        (Bug::NeverAtWork, who_is_slow_at_work_is_not_reported),
        (Bug::AtWorkForEver, who_is_stuck_at_work_is_reported_and_who_is_silent_at_once),
    ];
    assert_eq!(missed(&tests), []);
}
