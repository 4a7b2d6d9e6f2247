//! Every message packs and unpacks; whatever else arrives is refused without a panic.

use base::random::Random;
use base::{Epoch, Level, NodeId, StreamSeq};
use cluster::coordinator::message::{Choice, Copies, Copy, Message, PROTOCOL};
use cluster::coordinator::store::{Chain, Image, Seat};
use cluster::coordinator::{DataState, Member, Registration, View};
use cluster::decode::{Decoder, LinkError, Pool, Source};
use cluster::limits::BODY_MAX;
use cluster::wire::{FRAME_HEAD, FrameHead, Hello, Refusal};
use cluster::{Class, PeerAddress};

fn text(random: &mut Random, max: u64) -> String {
    let len = random.below(max);
    (0..len).map(|_| char::from(b' ' + random.below(94) as u8)).collect()
}

fn nodes(random: &mut Random, from: u32) -> Vec<NodeId> {
    (0..random.below(6) as u32).map(|n| NodeId(from + n * 3)).collect()
}

fn member(random: &mut Random, node: u32) -> Member {
    let addresses = ["127.0.0.1:1", "[::1]:65535"];
    let pick = random.below(3) as usize;
    Member {
        node: NodeId(node),
        incarnation: random.next_u64(),
        reachable: random.chance(1, 2),
        position: StreamSeq(random.next_u64()),
        tcp: addresses.get(pick).map(|a| a.parse().unwrap()),
        run_dir: text(random, 200),
        info: text(random, 900),
    }
}

fn view(random: &mut Random) -> View {
    let chain = nodes(random, 1);
    View {
        volume: "v-1_x.y".to_owned(),
        epoch: Epoch(random.next_u64() as u32),
        replicas: random.below(9) as u16,
        min_replicas: random.below(9) as u16,
        level: Level(1 + random.below(9) as u16),
        incarnations: chain.iter().map(|_| random.next_u64()).collect(),
        chain,
        syncing: nodes(random, 100),
        members: (1..random.below(9) as u32).map(|n| member(random, n)).collect(),
        lapse_ms: random.below(1000) as u32,
    }
}

fn message(random: &mut Random) -> Message {
    let node = NodeId(1 + random.below(99) as u32);
    let epoch = Epoch(random.next_u64() as u32);
    match random.below(16) {
        0 => {
            let m = member(random, node.0);
            let state = [DataState::Fresh, DataState::Intact { epoch }];
            let registration = Registration {
                volume: "data".to_owned(),
                node,
                incarnation: m.incarnation,
                position: m.position,
                state: state[random.below(2) as usize],
                tcp: m.tcp,
                run_dir: m.run_dir,
                info: m.info,
                level: Level(1 + random.below(9) as u16),
                ..Registration::default()
            };
            Message::Register {
                protocol: PROTOCOL,
                cluster: u128::from(random.next_u64()) << 64,
                registration,
            }
        }
        1 => Message::Welcome { heartbeat_ms: epoch.0, failure_timeout_ms: node.0 },
        2 => Message::Refused(text(random, 1000)),
        3 => Message::Heartbeat { number: random.next_u64(), position: StreamSeq(3) },
        4 => Message::Confirm { number: random.next_u64() },
        5 => Message::View(view(random)),
        6 => Message::CaughtUp { node, epoch, incarnation: random.next_u64() },
        7 => Message::Suspect { node, epoch },
        8 => Message::Leave,
        9 => Message::Denied(text(random, 1000)),
        10 => Message::Ask { cluster: 7, protocol: 1 + random.below(2) as u16 },
        11 => Message::Force { cluster: 8, volume: "x".to_owned() },
        12 => Message::Survey { cluster: 8, volume: "x".to_owned() },
        13 => {
            let copy = Copy {
                node,
                incarnation: random.next_u64(),
                reachable: random.chance(1, 2),
                seated: random.chance(1, 2),
                may_be_chosen: random.chance(1, 2),
                state: if random.chance(1, 2) {
                    DataState::Fresh
                } else {
                    DataState::Intact { epoch }
                },
                position: StreamSeq(3),
                info: text(random, 1000),
            };
            Message::Copies(Copies { epoch, lives: random.chance(1, 2), copies: vec![copy] })
        }
        14 => {
            let (incarnation, position) = (random.next_u64(), StreamSeq(random.next_u64()));
            let choice = Choice { node, incarnation, epoch, position };
            Message::Choose { cluster: 8, volume: "x".to_owned(), choice }
        }
        _ => Message::Done,
    }
}

/// One version back: who introduces itself in the older words is understood, and answered in them.
#[test]
fn the_protocol_before_this_one_is_spoken() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let view = View { level: Level::FIRST, ..view(&mut random) };
        let (kind, body) = Message::View(view.clone()).encode_for(2);
        assert_eq!((kind, Message::decode(kind, &body)), (17, Ok(Message::View(view.clone()))));
        let view = View { min_replicas: 0, ..view };
        let (kind, body) = Message::View(view.clone()).encode_for(1);
        assert_eq!((kind, Message::decode(kind, &body)), (6, Ok(Message::View(view))));
    }
    let registration = Registration {
        volume: "data".to_owned(),
        node: NodeId(1),
        incarnation: 3,
        before: vec![1, 2],
        region: 7,
        level: Level(5),
        ..Registration::default()
    };
    let register = |protocol| {
        let registration = registration.clone();
        let (kind, body) = Message::Register { protocol, cluster: 7, registration }.encode();
        Message::decode(kind, &body)
    };
    let Ok(Message::Register { protocol: 1, registration: old, .. }) = register(1) else {
        panic!("{:?}", register(1));
    };
    assert_eq!(
        old,
        Registration { before: Vec::new(), region: 0, level: Level::FIRST, ..registration.clone() }
    );
    let Ok(Message::Register { protocol: 2, registration: old, .. }) = register(2) else {
        panic!("{:?}", register(2));
    };
    assert_eq!(old, Registration { level: Level::FIRST, ..registration.clone() });
    let Ok(Message::Register { protocol: 3, registration: same, .. }) = register(3) else {
        panic!("{:?}", register(3));
    };
    assert_eq!(same, registration);
    let newer = register(PROTOCOL + 1).unwrap_err().to_string();
    assert!(newer.contains("update the coordinator first"), "{newer}");
}

#[test]
fn messages_round_trip_and_broken_ones_are_refused() {
    for seed in 0..3000 {
        let mut random = Random::new(seed);
        let message = message(&mut random);
        let (kind, body) = message.encode();
        assert_eq!(Message::decode(kind, &body).as_ref(), Ok(&message), "seed {seed}");
        for _ in 0..20 {
            let mut bad = body.clone();
            let change = random.below(3);
            if change == 0 || bad.is_empty() {
                bad.push(0);
                assert!(Message::decode(kind, &bad).is_err(), "seed {seed}: longer");
            } else if change == 1 {
                bad.truncate(random.below(bad.len() as u64) as usize);
                assert!(Message::decode(kind, &bad).is_err(), "seed {seed}: shorter");
            } else {
                let at = random.below(bad.len() as u64 * 8) as usize;
                bad[at / 8] ^= 1 << (at % 8);
                // The frame's checksum finds this first; a liar's body is read in one way only.
                if let Ok(other) = Message::decode(kind, &bad) {
                    let again = other.encode();
                    assert_eq!(Message::decode(again.0, &again.1), Ok(other), "seed {seed}");
                }
            }
        }
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Random::new(77);
    for _ in 0..50_000 {
        let mut bytes = vec![0u8; random.below(120) as usize];
        random.fill(&mut bytes);
        let _ = Message::decode(random.below(16) as u16, &bytes);
        let _ = Hello::decode(&bytes);
        let _ = Refusal::decode(&bytes);
        let _ = FrameHead::decode(&bytes, BODY_MAX);
        let _ = Image::decode(&bytes);
    }
}

#[test]
fn heads_and_hellos_with_any_bit_flipped_are_refused_or_mean_the_same() {
    let head = FrameHead::new(9, &[b"some", b"body"]).unwrap();
    let bytes = head.encode();
    assert_eq!(FrameHead::decode(&bytes, 8), Ok(head));
    assert!(FrameHead::decode(&bytes, 7).is_err());
    for bit in 0..FRAME_HEAD * 8 {
        let mut bad = bytes;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(FrameHead::decode(&bad, 8).is_err(), "bit {bit}");
    }
    assert!(head.check(b"somebody").is_ok());
    assert!(head.check(b"somebodx").is_err());
    let hello = Hello {
        class: Class::Bulk,
        from: NodeId(1),
        to: NodeId(2),
        cluster: 3,
        incarnation: 4,
        session: 5,
        ring_bytes: Some(4096),
    };
    let bytes = hello.encode();
    assert_eq!(Hello::decode(&bytes), Ok(hello));
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        if let Ok(other) = Hello::decode(&bad) {
            assert_eq!(other.encode(), bad, "bit {bit}");
        }
    }
    assert!(Hello::decode(&bytes[..55]).is_err());
    assert_eq!(PeerAddress::Local("/x".into()).to_string(), "/x");
}

/// Hands out its bytes in pieces of random length, and says now and then that there are none.
struct Pieces<'a> {
    random: Random,
    bytes: &'a [u8],
}

impl Source for Pieces<'_> {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        assert!(dst.capacity() - dst.len() >= max && max > 0);
        let n = (self.random.below(90) as usize).min(max).min(self.bytes.len());
        dst.extend_from_slice(&self.bytes[..n]);
        self.bytes = &self.bytes[n..];
        Ok(n)
    }
}

#[test]
fn frames_come_out_of_any_cutting_of_the_stream() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut stream = Vec::new();
        let mut sent = Vec::new();
        for kind in 0..20u16 {
            let mut body = vec![0u8; random.below(300) as usize];
            random.fill(&mut body);
            stream.extend_from_slice(&FrameHead::new(kind, &[&body]).unwrap().encode());
            stream.extend_from_slice(&body);
            sent.push((kind, body));
        }
        for mut decoder in [Decoder::for_ring(), Decoder::for_socket(BODY_MAX)] {
            let mut source = Pieces { random: Random::new(!seed), bytes: &stream };
            let mut pool = Pool::default();
            let mut got = Vec::new();
            for _ in 0..10_000 {
                got.extend(decoder.next(&mut source, &mut pool).unwrap());
            }
            assert_eq!(got, sent, "seed {seed}");
        }
    }
}

#[test]
fn images_round_trip() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut image = Image { cluster: 5, generation: random.next_u64(), ..Image::default() };
        for volume in 0..random.below(5) {
            let count = random.below(4) as u32;
            let seats = (1..=count).map(|n| Seat { node: NodeId(n), incarnation: seed }).collect();
            let level = Level(1 + random.below(2) as u16);
            let epoch = Epoch(if count == 0 { 0 } else { 1 + random.below(99) as u32 });
            image.volumes.insert(format!("v{volume}"), Chain { epoch, level, seats });
        }
        assert_eq!(Image::decode(&image.encode()), Ok(image), "seed {seed}");
    }
}
