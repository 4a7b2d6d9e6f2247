//! What comes over the wire: any bytes, and well-formed messages that make no sense.

use base::random::Random;
use base::wire::Reader;
use base::{ClientId, Epoch, InodeId, NodeId, Sequence, StreamSeq};
use service::core::Event;
use service::core::message::{Identity, LockAsk, Message, SoleSays};
use service::core::offer::{Doubt, Offered, Part};
use service::core::reconcile::Part as Told;
use storage::format::chunk::ChunkHeader;
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::page::Key;
use storage::format::rpc::Span;

use crate::rig::Rig;

fn odd(random: &mut Random) -> u64 {
    match random.below(5) {
        0 => u64::MAX,
        1 => u64::MAX - random.below(1000),
        2 => random.next_u64(),
        _ => random.below(40),
    }
}

fn any(random: &mut Random, clients: &[ClientId]) -> Message {
    let client = match random.below(3) {
        0 => ClientId(odd(random)),
        _ => clients[random.below(clients.len() as u64) as usize],
    };
    let (ino, token) = (InodeId(odd(random)), odd(random));
    let (seq, settled) = (StreamSeq(odd(random) >> 1), Sequence(odd(random) >> 1));
    let mode = LeaseMode::from_u8(random.below(3) as u8).expect("a mode");
    let mut raw = vec![0; random.below(300) as usize];
    random.fill(&mut raw);
    let inodes: Vec<InodeId> = (0..random.below(20)).map(|_| InodeId(odd(random))).collect();
    let leases = inodes.iter().map(|i| (*i, mode)).collect();
    let lock = Lock {
        space: LockSpace::Record,
        kind: [LockKind::None, LockKind::Read, LockKind::Write][random.below(3) as usize],
        owner: random.below(3),
        pid: token as u32,
        start: random.below(9),
        end: 9 + random.below(9),
    };
    match random.below(33) {
        27 => {
            let locks = inodes.iter().map(|_| lock).collect();
            let says = match random.below(4) {
                0 => SoleSays::Wants,
                1 => SoleSays::Has,
                2 => SoleSays::Unused,
                _ => SoleSays::Returns { locks, vouched: token % 2 == 0 },
            };
            Message::LockSole { client, ino, token, says }
        }
        29 => {
            let (heir, secret) =
                (ClientId(odd(random)), u128::from(token) << 64 | u128::from(ino.0));
            match random.below(6) {
                0 => Message::HeirSeek { client, token, secret },
                1 => Message::HeirSought { heir, token, user: token as u32, secret },
                2 => Message::HeirAnswer { heir, token },
                3 => Message::HeirFound { client, token, given: token % 2 == 0 },
                _ => Message::LockHeir { client, heir },
            }
        }
        28 => Message::LockSoleTold { client, ino, token, given: random.chance(1, 2) },
        0 => Message::Chunk { all_acked: seq, chunk: raw },
        1 => Message::ChunkAck { seq },
        2 => Message::ClientUp {
            client,
            incarnation: token as u32,
            settled,
            identity: Identity { uid: 1, gid: 2, groups: vec![3; raw.len()] },
            leases,
            pins: inodes.clone(),
            rights: inodes,
            room: (odd(random), odd(random)),
        },
        3 => Message::ClientGone { client },
        4 => Message::Entries {
            client,
            first: Sequence(odd(random) >> 1),
            last: settled,
            raw: raw.into(),
        },
        5 => {
            let span = Span { from: odd(random), to: odd(random) };
            Message::LeaseWant { client, ino, token, mode, flags: token as u8, span }
        }
        6 => {
            let (errno, span) = (token as u16, Span { from: odd(random), to: odd(random) });
            Message::Granted { client, ino, token, mode, errno, stream: seq, span }
        }
        7 => Message::NumbersWant { client, token, count: ino.0 as u32 },
        8 => Message::Numbers { client, token, first: ino, count: seq.0 as u32 },
        9 => Message::Recall { client, ino, token },
        10 => Message::Recalled { client, ino, token },
        11 => Message::Unpin { client, inodes },
        12 => Message::Released { client, ino, token },
        13 => Message::Progress { client, settled, replicated: Sequence(odd(random) >> 1) },
        14 => Message::Position { seq },
        15 => Message::StreamWant { from: seq },
        16 => Message::Resume { seq, last: StreamSeq(random.next_u64() >> 1) },
        17 if token % 4 == 0 => Message::SnapshotHad { incarnation: random.next_u64() },
        17 if token % 4 == 3 => Message::ImageHad {
            incarnation: random.next_u64(),
            published: seq,
            last: StreamSeq(random.next_u64() >> 1),
            epoch: Epoch(2),
        },
        17 if token % 8 == 1 => Message::SnapshotInPlace {
            incarnation: random.next_u64(),
            published: seq,
            last: seq,
            epoch: Epoch(3),
        },
        17 if token % 4 == 1 => Message::SnapshotSince {
            incarnation: random.next_u64(),
            had: token % 2 == 0,
            published: seq,
            last: seq,
            epoch: Epoch(3),
        },
        17 => Message::SnapshotWant { incarnation: random.next_u64() },
        18 => {
            let ask = match random.below(3) {
                0 => LockAsk::Set { lock, wait: random.below(3) },
                1 => LockAsk::Test { lock },
                _ => LockAsk::Cancel { wait: token },
            };
            Message::LockWant { client, ino, token, ask }
        }
        19 => {
            let found = random.chance(1, 2).then_some(lock);
            Message::LockDone { client, token, errno: token as u16, found }
        }
        20 => {
            let locks = inodes.iter().map(|i| (*i, lock)).collect();
            Message::LockHeld { client, first: random.chance(1, 2), locks }
        }
        21 => Message::LockFree { client },
        22 => Message::Room { client, token, blocks: odd(random) },
        24 => Message::RoomSought,
        25 => Message::AskAgain,
        26 => Message::Return {
            incarnation: random.next_u64(),
            last: seq,
            epoch: Epoch(7),
            published: seq,
        },
        23 => Message::RoomBack { client, token, blocks: odd(random) },
        30 => {
            let offer = |random: &mut Random| Offered {
                ino,
                first: random.below(1000),
                crcs: (0..=random.below(40)).map(|_| random.next_u64() as u32).collect(),
            };
            let offers = (0..random.below(4)).map(|_| offer(random)).collect();
            let sure = vec![Part { ino, first: token % 9, count: 3 }];
            Message::SnapshotOffer { seq, piece: token as u32, id: token, offers, sure }
        }
        31 if token % 9 == 1 => {
            let ranges = (0..random.below(9) as u32).collect();
            Message::SnapshotDiffers { seq, piece: token as u32, id: token, ranges }
        }
        31 if token % 9 == 2 => {
            let (from, end) = (Key::new(ino.0, 1, 0), Key::new(ino.0, 5, token));
            let (mut raw, value) = (Vec::new(), [7; 9]);
            for part in [
                Told::Range(Key::MIN, Some(from), random.next_u64()),
                Told::Items(from, Some(end), vec![(from, &value[..]), (from, &value[..3])]),
                Told::Items(end, None, Vec::new()),
                Told::Anew(ino),
            ] {
                part.encode(&mut raw);
                let mut r = Reader::new("parts", &raw);
                let mut last = None;
                while r.left() > 0 {
                    last = Some(Told::decode(&mut r).expect("what was put there"));
                }
                assert_eq!(last, Some(part));
            }
            Message::SnapshotItems { seq, piece: token as u32, id: token, last_inode: ino, raw }
        }
        31 if token.is_multiple_of(3) => {
            let parts = (0..random.below(4)).map(|first| Part { ino, first, count: 3 }).collect();
            Message::SnapshotSame { seq, piece: token as u32, id: token, parts }
        }
        31 => {
            let part = |n: u64| Part { ino, first: n, count: 1 + n as u32 };
            let lacks = (0..random.below(4)).map(part).collect();
            let doubt = |n: u64| Doubt { part: part(n), keyed: odd(random) };
            let doubts = (0..token % 4).map(doubt).collect();
            Message::SnapshotLack { seq, piece: token as u32, id: token, lacks, doubts }
        }
        32 => {
            let (piece, end, waits) = (token as u32, token % 2 == 0, token % 3 == 0);
            Message::Image { seq, piece, last_inode: ino, end, waits, raw }
        }
        _ => Message::Snapshot {
            seq,
            piece: token as u32,
            last_inode: ino,
            end: token % 2 == 0,
            waits: token % 3 == 0,
            raw,
        },
    }
}

#[test]
fn messages_survive_the_wire_and_damage_is_an_error() {
    let mut random = Random::new(5);
    let mut kinds = std::collections::BTreeMap::new();
    for n in 0..3000 {
        let message = any(&mut random, &[ClientId(7)]);
        let (kind, mut body) = message.encode(Epoch(n));
        // A number is one message's. (Two branches had once taken the same one, each rightly.)
        let whose = std::mem::discriminant(&message);
        assert_eq!(*kinds.entry(kind).or_insert(whose), whose, "kind {kind}");
        assert_ne!(kind, service::core::message::PACKED);
        assert_eq!(Message::decode(kind, &body), Ok((Epoch(n), message)));
        let cut = random.below(body.len() as u64) as usize;
        let _ = Message::decode(kind, &body[..cut]);
        body[cut] ^= 1 << random.below(8);
        let _ = Message::decode(kind, &body);
        random.fill(&mut body);
        let _ = Message::decode(random.below(26) as u16, &body);
    }
    assert!(Message::decode(0, &[0; 4]).is_err());
    assert!(Message::decode(2, &[0; 13]).is_err(), "too long");
    assert!(Message::decode(2, &[0; 11]).is_err(), "too short");
    // Nothing behind the wire asks whether there is a position after one.
    for seq in [StreamSeq::END, StreamSeq(u64::MAX)] {
        let (kind, body) = Message::Position { seq }.encode(Epoch(1));
        assert!(Message::decode(kind, &body).is_err(), "{seq}");
    }
}

/// A peer gone mad may stop a node (it says why); it never makes it panic.
#[test]
fn nodes_survive_messages_that_make_no_sense() {
    let mut heard = 0;
    for seed in 0..40 {
        eprintln!("seed {seed}");
        let mut random = Random::new(seed);
        let mut rig = Rig::new(2, seed);
        let clients: Vec<ClientId> = (0..2).map(|n| rig.attach(n, 0).client).collect();
        for _ in 0..200 {
            let n = random.below(2) as usize;
            let from = NodeId(1 + random.below(3) as u32);
            let (kind, body) = any(&mut random, &clients).encode(Epoch(1));
            rig.event(n, Event::Frame { from, kind, body: body.into() });
            if random.chance(1, 10) {
                rig.pass(1_000_000);
            }
            if rig.nodes[n].failure().is_some() {
                break;
            }
            heard += 1;
        }
        rig.check();
    }
    assert!(heard > 500, "{heard}");
}

/// A node that speaks for a client of another one is not heard: it cannot end it, take its leases,
/// ask for numbers in its name, or append to its log.
#[test]
fn a_node_speaks_for_its_own_clients_only() {
    let mut rig = Rig::new(2, 3);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    let lease = hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
    rig.settle();
    let client = hand.client;
    let forged = Op::Write { ino, offset: 0, data: b"forged", clear_setid: false };
    let raw = forged.to_entry(Sequence(hand.seq + 1), Epoch(1), 0, 1, hand.descriptor.incarnation);
    let (first, last) = (Sequence(hand.seq + 1), Sequence(hand.seq + 1));
    let forged = [
        Message::Entries { client, first, last, raw: raw.into() },
        Message::Released { client, ino, token: 0 },
        Message::Recalled { client, ino, token: 1 },
        Message::Unpin { client, inodes: vec![ino] },
        Message::Kept { client, inodes: vec![ino] },
        Message::Pinned { client, inodes: vec![ino], rights: vec![ino] },
        Message::LeaseWant {
            client,
            ino: InodeId(1),
            token: 1,
            mode: LeaseMode::Write,
            flags: 0,
            span: Span::NONE,
        },
        Message::NumbersWant { client, token: 1, count: 100 },
        Message::ClientUp {
            client,
            incarnation: 1,
            settled: Sequence(u64::MAX / 2),
            identity: Identity { uid: 7, gid: 7, groups: Vec::new() },
            leases: Vec::new(),
            pins: Vec::new(),
            rights: Vec::new(),
            room: (0, 0),
        },
        Message::RoomBack { client, token: 1, blocks: 1 },
        Message::ClientGone { client },
    ];
    for (n, message) in (1u64..).zip(&forged) {
        let (kind, body) = message.encode(Epoch(1));
        rig.event(0, Event::Frame { from: NodeId(2), kind, body: body.into() });
        assert_eq!(rig.nodes[0].counters().foreign, n, "{message:?}");
    }
    rig.settle();
    assert!(hand.holds(lease));
    hand.append(&Op::Write { ino, offset: 0, data: b"honest", clear_setid: false });
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    let mut data = [0; 16];
    assert_eq!(rig.nodes[0].volume().read_file(ino, 0, &mut data).expect("sound"), 6);
    assert_eq!(&data[..6], b"honest");
    rig.check();
}

/// A chunk with a file of root's in it, right in every way, as the next of node `n`.
fn forged_chunk(rig: &Rig, n: usize, client: ClientId) -> Vec<u8> {
    let op = Op::SetXattr { ino: InodeId::ROOT, name: b"user.forged", value: b"x" };
    let body = op.to_entry(Sequence(900), Epoch(1), 0, 1, 77);
    let header = ChunkHeader {
        epoch: Epoch(1),
        stream_seq: StreamSeq(rig.nodes[n].position().0 + 1),
        client,
        last_seq: Sequence(900),
        incarnation: 77,
        entries: 1,
        body_bytes: body.len() as u32,
        time: 1,
        refusals: 0,
        refused: Sequence(0),
        errno: 0,
    };
    [&header.encode()[..], &body].concat()
}

/// Whoever has a link may say what goes with its part in the epoch, and nothing else: chunks come down the chain, and what is
/// in the stream goes to those who are to have it.
#[test]
fn a_linked_node_has_the_part_that_the_view_gives_it() {
    let mut rig = Rig::new(4, 3);
    // Node 4 has a link and is not in the chain.
    let chain = [1, 2, 3].map(NodeId).to_vec();
    for n in 0..4 {
        let (chain, syncing) = (chain.clone(), Vec::new());
        rig.event(n, Event::View { epoch: Epoch(2), chain, syncing, lapse: 0 });
    }
    rig.deliver_all();
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"secret", 0o100_600);
    hand.append(&Op::Write { ino, offset: 0, data: b"secret", clear_setid: false });
    hand.sync(&mut rig);
    rig.settle();
    let client = hand.client;
    // To whom, from whom.
    for (to, from) in [(0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (2, 4), (3, 1), (3, 2)] {
        let before = (rig.nodes[to].position(), rig.nodes[to].counters().not_due);
        let chunk = forged_chunk(&rig, to, client);
        let message = Message::Chunk { all_acked: StreamSeq(0), chunk };
        // In this epoch, and in one that the node has not heard of yet: nothing of it is kept.
        let (kind, body) = message.encode(Epoch(2));
        rig.event(to, Event::Frame { from: NodeId(from), kind, body: body.into() });
        let after = (rig.nodes[to].position(), rig.nodes[to].counters().not_due);
        assert_eq!(after, (before.0, before.1 + 1), "a chunk from {from} to {}", to + 1);
    }
    let said = |rig: &mut Rig, to: usize, from: u32, message: &Message| {
        let before = rig.nodes[to].counters().not_due;
        let (kind, body) = message.encode(Epoch(2));
        rig.event(to, Event::Frame { from: NodeId(from), kind, body: body.into() });
        // What a node says that joins may come before the view in which it does, and waits for that.
        let waits = from == 4
            && matches!(
                message,
                Message::SnapshotWant { .. }
                    | Message::SnapshotHad { .. }
                    | Message::SnapshotSince { .. }
                    | Message::SnapshotInPlace { .. }
                    | Message::ImageHad { .. }
                    | Message::Position { .. }
                    | Message::Kept { .. }
                    | Message::ClientGone { .. }
            );
        assert_eq!(
            rig.nodes[to].counters().not_due,
            before + u64::from(!waits),
            "{from} to {}: {message:?}",
            to + 1
        );
        let sent = rig.links.iter().map(|(_, _, frames)| frames.len()).sum::<usize>();
        assert_eq!(sent, 0, "{from} to {} is answered: {message:?}", to + 1);
    };
    let from = StreamSeq(1);
    for (to, who) in [(0, 4), (0, 3), (1, 4), (2, 4), (2, 2)] {
        said(&mut rig, to, who, &Message::StreamWant { from });
    }
    let own = ClientId::new(NodeId(4), 1);
    for message in [
        Message::SnapshotWant { incarnation: 1 },
        Message::SnapshotHad { incarnation: 1 },
        Message::ImageHad {
            incarnation: 1,
            published: StreamSeq(1),
            last: StreamSeq(1),
            epoch: Epoch(1),
        },
        Message::SnapshotInPlace {
            incarnation: 1,
            published: StreamSeq(1),
            last: StreamSeq(1),
            epoch: Epoch(1),
        },
        Message::SnapshotDiffers { seq: StreamSeq(1), piece: 0, id: 1, ranges: vec![0] },
        Message::SnapshotSince {
            incarnation: 1,
            had: true,
            published: StreamSeq(1),
            last: StreamSeq(1),
            epoch: Epoch(1),
        },
        Message::Position { seq: StreamSeq(StreamSeq::END.0 - 1) },
        Message::ChunkAck { seq: StreamSeq(1) },
        Message::ClientUp {
            client: own,
            incarnation: 1,
            settled: Sequence(0),
            identity: Identity { uid: 0, gid: 0, groups: Vec::new() },
            leases: Vec::new(),
            pins: Vec::new(),
            rights: Vec::new(),
            room: (0, 0),
        },
        Message::LeaseWant {
            client: own,
            ino,
            token: 1,
            mode: LeaseMode::Write,
            flags: 0,
            span: Span::NONE,
        },
        Message::Resume { seq: StreamSeq(0), last: StreamSeq(0) },
    ] {
        said(&mut rig, 0, 4, &message);
    }
    said(&mut rig, 1, 4, &Message::Recall { client, ino, token: 1 });
    hand.append(&Op::Write { ino, offset: 0, data: b"honest", clear_setid: false });
    hand.sync(&mut rig);
    rig.settle();
    rig.check();
    for n in 0..3 {
        let mut data = [0; 16];
        assert_eq!(rig.nodes[n].volume().read_file(ino, 0, &mut data).expect("sound"), 6);
        assert_eq!(&data[..6], b"honest");
    }
}

/// The check of who sends chunks, taken out, is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn chunks_of_anyone_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 1] =
        [(Bug::ChunkOfAnyone, a_linked_node_has_the_part_that_the_view_gives_it)];
    assert_eq!(missed(&tests), []);
}

/// A head that takes over does not wait for what somebody beside the chain says it has.
#[test]
fn a_takeover_asks_members_only() {
    let mut rig = Rig::new(3, 3);
    let view = |chain: &[u32], syncing: &[u32]| Event::View {
        epoch: Epoch(2),
        chain: chain.iter().copied().map(NodeId).collect(),
        syncing: syncing.iter().copied().map(NodeId).collect(),
        lapse: 0,
    };
    rig.event(1, view(&[2, 1], &[3]));
    let (kind, body) = Message::Position { seq: StreamSeq(u64::MAX / 2) }.encode(Epoch(2));
    rig.event(1, Event::Frame { from: NodeId(3), kind, body: body.into() });
    rig.event(0, view(&[2, 1], &[3]));
    rig.event(2, view(&[2, 1], &[3]));
    rig.settle();
    let mut hand = rig.attach(1, 0);
    hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
}

/// A return of a lease that crossed a newer grant of it changes nothing: the client goes on under the
/// grant, and nobody else gets the inode before it is recalled.
#[test]
fn a_return_that_crossed_a_grant_is_void() {
    let mut rig = Rig::new(2, 5);
    let mut hand = rig.attach(1, 0);
    let other = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    let first = hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
    let second = hand.lease(&mut rig, ino, LeaseMode::Write).expect("a lease").granted;
    assert!(!hand.holds(first) && hand.holds(second));
    rig.settle();
    for token in [0, 1, u64::MAX] {
        // As of the fresh number's grant, or of the first: not the last one.
        let stale = Message::Released { client: hand.client, ino, token };
        let (kind, body) = stale.encode(Epoch(1));
        rig.event(0, Event::Frame { from: NodeId(2), kind, body: body.into() });
    }
    hand.append(&Op::Write { ino, offset: 0, data: b"late", clear_setid: false });
    // Another's grant takes the lease back first, and with it everything that was done under it.
    other.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    assert!(!hand.holds(second));
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    let mut data = [0; 16];
    assert_eq!(rig.nodes[0].volume().read_file(ino, 0, &mut data).expect("sound"), 4);
    rig.check();
}
