//! What comes over sockets, and what the coordinator keeps of it.

use base::wire::Reader;
use base::{ClientId, Epoch, Errno, InodeId, Level, NodeId, Sequence, StreamSeq};
use cluster::Class;
use cluster::coordinator::message::{Choice, Copies, Copy};
use cluster::coordinator::store::{Chain, Image, Seat};
use cluster::coordinator::{DataState, Member, Registration, View, message};
use cluster::limits::BODY_MAX;
use cluster::wire::{FrameHead, Hello, Refusal};
use service::core::heal::Answer;
use service::core::image::{Has, Part};
use service::core::message::{Identity, LockAsk, Message, SoleSays};
use service::core::offer::{self, Doubt, Offered};
use service::core::reconcile;
use service::link::Packet;
use storage::format::control::LeaseMode;
use storage::format::item::{ReadClass, Snapshot};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::page::Key;
use storage::format::rpc::Span;
use storage::media::Segment;
use storage::volume::image::ImageEnd;
use storage::volume::{CopyItem, Summing};

use super::{Format, Sum, words};

/// Every structure that travels. A message is its kind (two bytes) and its body.
pub const WIRE: &[Format] = &[
    Format {
        sum: Some(Sum { at: 20, from: 0, to: Some(20) }),
        ..Format::new("frame head", heads, |b| {
            FrameHead::decode(b, BODY_MAX).map(|h| h.encode().to_vec()).map_err(words)
        })
    }
    .version(4, 1)
    .prefix(),
    Format::new("hello", hellos, |b| Hello::decode(b).map(|h| h.encode()).map_err(words))
        .version(0, 2),
    Format {
        lossy: true,
        ..Format::new("refusal", refusals, |b| {
            Refusal::decode(b).map(|(code, text)| code.encode(&text)).map_err(words)
        })
    },
    Format::new("part of an image", image_parts, |b| {
        let mut r = Reader::new("image", b);
        let part = Part::decode(&mut r).map_err(words)?;
        r.end().map_err(words)?;
        let mut bytes = Vec::new();
        part.encode(&mut bytes);
        Ok(bytes)
    }),
    Format::new("message between nodes", node_messages, |b| {
        let (kind, body) = split(b)?;
        let (epoch, message) = Message::decode(kind, body).map_err(words)?;
        Ok(joined(message.encode(epoch)))
    }),
    Format {
        // Names and texts may hold characters that are replaced.
        lossy: true,
        ..Format::new("message of the coordinator", coordinator_messages, |b| {
            let (kind, body) = split(b)?;
            message::Message::decode(kind, body).map(|m| joined(m.encode())).map_err(words)
        })
    },
    Format::new("coordinator state", images, |b| {
        Image::decode(b).map(|i| i.encode()).map_err(words)
    })
    .sum(8, 12)
    .version(4, 4),
    Format {
        lossy: true,
        ..Format::new("packet between nicfs and hostd", packets, |b| {
            Packet::decode(b).map(|p| p.encode()).map_err(words)
        })
    },
];

fn split(bytes: &[u8]) -> Result<(u16, &[u8]), String> {
    let (kind, body) = bytes.split_first_chunk::<2>().ok_or("message: is cut short")?;
    Ok((u16::from_le_bytes(*kind), body))
}

fn joined((kind, body): (u16, Vec<u8>)) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &body].concat()
}

fn heads() -> Vec<Vec<u8>> {
    let small = FrameHead::new(9, &[b"some", b"body"]).expect("a short body");
    let large = FrameHead { kind: 1, len: BODY_MAX as u32, body_crc: None };
    vec![small.encode().to_vec(), large.encode().to_vec()]
}

fn hellos() -> Vec<Vec<u8>> {
    let sample = Hello {
        class: Class::Bulk,
        from: NodeId(1),
        to: NodeId(2),
        cluster: 3,
        incarnation: 4,
        session: 5,
        ring_bytes: Some(4096),
    };
    vec![sample.encode(), Hello { ring_bytes: None, ..sample }.encode()]
}

fn refusals() -> Vec<Vec<u8>> {
    vec![Refusal::WrongNode.encode("this is node 2")]
}

fn image_parts() -> Vec<Vec<u8>> {
    let (slot, dir, name) = (3, InodeId::ROOT, b"daily".to_vec());
    let snapshot = Snapshot { slot, dir, time: 4, inodes: 5, name };
    let all = [
        Part::Item(Key::new(7, 4, 0), Some(&[1; 24])),
        Part::Item(Key::new(7, 4, 9), None),
        Part::Blocks { arena: 1, block: 6, bytes: &[5; 8192] },
        Part::State(17, snapshot),
        Part::End(ImageEnd { inodes: 1, blocks: 2, time: 3 }),
        Part::Key(5),
        Part::Offered {
            known: Has::Last,
            number: 17,
            ino: InodeId(7),
            file: 1,
            arena: 2,
            block: 3,
            crcs: vec![4, 5],
        },
        Part::Same { arena: 2, block: 3, count: 2 },
    ];
    let encode = |part: &Part<'_>| {
        let mut bytes = Vec::new();
        part.encode(&mut bytes);
        bytes
    };
    all.iter().map(encode).collect()
}

fn node_messages() -> Vec<Vec<u8>> {
    let (client, ino, token, seq) = (ClientId(9), InodeId(7), 5, StreamSeq(4));
    let (mode, inodes) = (LeaseMode::Write, vec![ino, InodeId(8)]);
    let lock =
        Lock { space: LockSpace::Record, kind: LockKind::Read, owner: 1, pid: 2, start: 3, end: 4 };
    let identity = Identity { uid: 1, gid: 2, groups: vec![3, 4] };
    let leases = inodes.iter().map(|i| (*i, mode)).collect();
    let part = offer::Part { ino, first: 1, count: 2 };
    let offered = Offered { ino, first: 2, crcs: vec![1, 2, 3] };
    let want = |ask| Message::LockWant { client, ino, token, ask };
    let sole = |says| Message::LockSole { client, ino, token, says };
    let all = [
        Message::Chunk { all_acked: seq, chunk: b"chunk".to_vec() },
        Message::ChunkAck { seq },
        Message::ClientUp {
            client,
            incarnation: 1,
            settled: Sequence(2),
            identity,
            leases,
            pins: inodes.clone(),
            rights: inodes.clone(),
            room: (1, 2),
        },
        Message::Room { client, token, blocks: 3 },
        Message::RoomBack { client, token, blocks: 3 },
        Message::RoomSought,
        Message::Image {
            seq,
            piece: 2,
            last_inode: InodeId(9),
            end: true,
            waits: false,
            raw: b"part".to_vec(),
        },
        Message::AskAgain,
        Message::BlockWant { ino: InodeId(5), block: 6 },
        Message::Block { ino: InodeId(5), block: 6, seq, answer: Answer::None, bytes: Vec::new() },
        Message::Block {
            ino: InodeId(5),
            block: 6,
            seq,
            answer: Answer::Right,
            bytes: vec![7; 4096],
        },
        Message::Return { incarnation: 1, last: seq, epoch: base::Epoch(2), published: seq },
        Message::ClientGone { client },
        Message::Entries { client, first: Sequence(1), last: Sequence(2), raw: vec![7; 64].into() },
        Message::LeaseWant {
            client,
            ino,
            token,
            mode,
            flags: 1,
            span: Span { from: 4096, to: 9000 },
        },
        Message::Granted {
            client,
            ino,
            token,
            mode,
            errno: 0,
            stream: seq,
            span: Span { from: 4096, to: 12288 },
        },
        Message::NumbersWant { client, token, count: 3 },
        Message::Numbers { client, token, first: ino, count: 3 },
        Message::Recall { client, ino, token },
        Message::Recalled { client, ino, token },
        Message::Unpin { client, inodes: inodes.clone() },
        Message::Kept { client, inodes: inodes.clone() },
        Message::Pinned { client, rights: inodes.clone(), inodes },
        Message::Released { client, ino, token },
        Message::Progress { client, settled: Sequence(1), replicated: Sequence(2) },
        Message::Position { seq },
        Message::StreamWant { from: seq },
        Message::Resume { seq, last: seq },
        Message::SnapshotWant { incarnation: 7 },
        Message::SnapshotHad { incarnation: 7 },
        Message::ImageHad { incarnation: 7, published: seq, last: seq, epoch: Epoch(2) },
        Message::SnapshotSince {
            incarnation: 7,
            had: true,
            published: seq,
            last: seq,
            epoch: Epoch(2),
        },
        Message::SnapshotSame { seq, piece: 1, id: 3, parts: vec![part] },
        Message::SnapshotInPlace { incarnation: 7, published: seq, last: seq, epoch: Epoch(2) },
        Message::SnapshotDiffers { seq, piece: 1, id: 3, ranges: vec![0, 7] },
        Message::SnapshotItems { seq, piece: 1, id: 3, last_inode: ino, raw: told_items(ino) },
        Message::Snapshot {
            seq,
            piece: 1,
            last_inode: ino,
            end: true,
            waits: false,
            raw: vec![7; 64],
        },
        Message::Image {
            seq,
            piece: 1,
            last_inode: ino,
            end: true,
            waits: false,
            raw: vec![7; 64],
        },
        Message::SnapshotAck { seq, piece: 1 },
        Message::SnapshotOffer { seq, piece: 1, id: 3, offers: vec![offered], sure: vec![part] },
        Message::SnapshotLack {
            seq,
            piece: 1,
            id: 3,
            lacks: vec![part],
            doubts: vec![Doubt { part, keyed: 4 }],
        },
        want(LockAsk::Set { lock, wait: 1 }),
        want(LockAsk::Test { lock }),
        want(LockAsk::Cancel { wait: 1 }),
        Message::LockDone { client, token, errno: 0, found: Some(lock) },
        Message::LockDone { client, token, errno: 11, found: None },
        Message::LockHeld { client, first: true, locks: vec![(ino, lock)] },
        Message::LockFree { client },
        Message::LockHeir { client, heir: ClientId(9) },
        Message::HeirSeek { client, token, secret: 2 << 64 | 1 },
        Message::HeirSought { heir: client, token, user: 7, secret: 2 << 64 | 1 },
        Message::HeirAnswer { heir: client, token },
        Message::HeirFound { client, token, given: true },
        sole(SoleSays::Wants),
        sole(SoleSays::Has),
        sole(SoleSays::Unused),
        sole(SoleSays::Returns { locks: vec![lock], vouched: true }),
        sole(SoleSays::Returns { locks: Vec::new(), vouched: false }),
        Message::LockSoleTold { client, ino, token, given: true },
    ];
    all.iter().map(|m| joined(m.encode(Epoch(3)))).collect()
}

fn coordinator_messages() -> Vec<Vec<u8>> {
    use message::Message;
    let (node, epoch, position) = (NodeId(2), Epoch(3), StreamSeq(4));
    let registration = Registration {
        volume: "data".into(),
        node,
        incarnation: 5,
        position,
        state: DataState::Intact { epoch },
        tcp: "127.0.0.1:7".parse().ok(),
        run_dir: "/run".into(),
        info: "{}".into(),
        ..Registration::default()
    };
    let fresh = Registration { state: DataState::Fresh, tcp: None, ..registration.clone() };
    let member = Member {
        node,
        incarnation: 5,
        reachable: true,
        position,
        tcp: "[::1]:7".parse().ok(),
        run_dir: "/run".into(),
        info: "{}".into(),
    };
    let view = View {
        volume: "data".into(),
        epoch,
        replicas: 2,
        min_replicas: 2,
        level: Level::SNAPSHOTS,
        incarnations: vec![5],
        chain: vec![node],
        syncing: vec![NodeId(4)],
        members: vec![member],
        lapse_ms: 9,
    };
    let copy = Copy {
        node,
        incarnation: 5,
        reachable: true,
        seated: false,
        may_be_chosen: true,
        state: DataState::Intact { epoch },
        position,
        info: "7".into(),
    };
    let none = Copy { state: DataState::Fresh, seated: true, ..copy.clone() };
    let copies = Copies { epoch, lives: false, copies: vec![copy, none] };
    let all = [
        Message::Register { protocol: 2, cluster: 7, registration: fresh.clone() },
        Message::Register { protocol: 3, cluster: 7, registration: fresh },
        Message::Register { protocol: 2, cluster: 7, registration },
        Message::Welcome { heartbeat_ms: 100, failure_timeout_ms: 500 },
        Message::Refused("no".into()),
        Message::Heartbeat { number: 1, position },
        Message::Confirm { number: 1 },
        Message::View(view.clone()),
        Message::CaughtUp { node, epoch, incarnation: 5 },
        Message::Suspect { node, epoch },
        Message::Leave,
        Message::Denied("no".into()),
        Message::Ask { cluster: 7, protocol: 1 },
        Message::Ask { cluster: 7, protocol: 2 },
        Message::Opened { position, info: "{}".into() },
        Message::Force { cluster: 8, volume: "x".into() },
        Message::Done,
        Message::Survey { cluster: 8, volume: "x".into() },
        Message::Copies(copies),
        Message::Choose {
            cluster: 8,
            volume: "x".into(),
            choice: Choice { node, incarnation: 5, epoch, position },
        },
    ];
    // The versions before have views of their own.
    let old = [1, 2].map(|protocol| Message::View(view.clone()).encode_for(protocol));
    old.into_iter().chain(all.iter().map(Message::encode)).map(joined).collect()
}

fn images() -> Vec<Vec<u8>> {
    let mut image = Image { cluster: 5, generation: 6, ..Image::default() };
    let seat = |node| Seat { node: NodeId(node), incarnation: 8 };
    let chain = Chain { epoch: Epoch(2), level: Level::FIRST, seats: vec![seat(1), seat(2)] };
    let empty = image.encode();
    image.volumes.insert("data".into(), chain);
    image.volumes.insert("fresh".into(), Chain::default());
    let first = image.encode();
    if let Some(chain) = image.volumes.get_mut("data") {
        chain.level = Level::SNAPSHOTS;
    }
    vec![empty, first, image.encode()]
}

fn packets() -> Vec<Vec<u8>> {
    let (client, token) = (ClientId(9), 1);
    let items = vec![
        CopyItem::Copy { from: (Segment::Stream, 4), to: (Segment::Arena(5), 6), len: 7 },
        CopyItem::Zero { to: (Segment::Arena(1), 2), len: 3 },
        CopyItem::Fresh { to: (Segment::Arena(1), 4096), len: 4096 },
        CopyItem::Summing(Summing { base: 1 << 20, position: StreamSeq(4), again: true }),
    ];
    let all = [
        Packet::Attach { token, pid: 2, start: 3, uid: 4, gid: 5, lanes: 6, groups: vec![7, 8] },
        Packet::Gone { client },
        Packet::ArenaQuery { token, arena: 2 },
        Packet::CopiesDone { id: 1, bad: vec![3] },
        Packet::Bell { client },
        Packet::Attached { token, client, segment: 2 },
        Packet::Refused { token, errno: Errno::AGAIN, text: "no".into() },
        Packet::Arena { token, class: Some(ReadClass::Group { uid: 1, gid: 2 }), bytes: 3 },
        Packet::Copies { id: 3, items },
        Packet::Detached { client },
        Packet::Adopt { client, pid: 2, start: 3 },
    ];
    all.iter().map(Packet::encode).collect()
}

/// Parts of what a node is brought to in place.
fn told_items(ino: InodeId) -> Vec<u8> {
    let (from, end) = (Key::new(ino.0, 1, 0), Key::new(ino.0, 3, 77));
    let mut raw = Vec::new();
    reconcile::Part::Range(Key::MIN, Some(from), 9).encode(&mut raw);
    reconcile::Part::Items(from, Some(end), vec![(from, &[7; 104]), (end, b"x")]).encode(&mut raw);
    reconcile::Part::Range(end, None, 9).encode(&mut raw);
    reconcile::Part::Anew(ino).encode(&mut raw);
    raw
}
