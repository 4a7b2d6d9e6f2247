//! A chain of three nodes one of which has gone mad: messages that make no sense, those under way
//! changed, repeated and held back, chunks and snapshots forged. Nodes may stop, and say why; none
//! panics, none takes what its checksum does not cover, and every region stays sound.

use std::sync::Arc;

use base::{ClientId, Epoch, InodeId, NodeId, Sequence, StreamSeq};
use service::core::image::Has;
use service::core::message::{Identity, LockAsk, Message, SoleSays};
use service::core::offer::{Doubt, Offered, Part};
use service::core::{Event, image, reconcile};
use storage::format::chunk::ChunkHeader;
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::item::Snapshot;
use storage::format::page::Key;
use storage::format::rpc::Span;
use storage::volume::image::ImageEnd;

use crate::forge;
use crate::input::Input;
use crate::rig::{Hand, LANE, Rig, create};

const STEPS: usize = 160;

struct World {
    rig: Rig,
    hands: Vec<Hand>,
    known: Vec<InodeId>,
    epoch: u32,
}

impl World {
    fn new(seed: u8) -> Self {
        let mut rig = Rig::new(3, u64::from(seed));
        let hands: Vec<Hand> = (0..3).map(|n| rig.attach(n, 0)).collect();
        let mut known: Vec<_> =
            hands[0].numbers(&mut rig, 4).into_iter().map(|(ino, _)| ino).collect();
        if seed & 0x80 != 0 {
            // Inodes of snapshots, of which there are none.
            known.extend(forge::then(&known, &[1, 0x7fff]));
        }
        Self { rig, hands, known, epoch: 1 }
    }

    fn client(&self, input: &mut Input<'_>) -> ClientId {
        match self.hands.get(input.below(4)) {
            Some(hand) => hand.client,
            None => ClientId(input.odd()),
        }
    }

    /// The position after the last of node `n`, or another number.
    fn position(&self, n: usize, input: &mut Input<'_>) -> StreamSeq {
        match input.below(4) {
            0 => StreamSeq(input.odd()),
            d => StreamSeq(self.rig.nodes[n].position().0 + d as u64 - 1),
        }
    }

    /// An entry or several, as they travel.
    fn entries(&self, from: u64, incarnation: u32, input: &mut Input<'_>) -> (Vec<u8>, u32) {
        let count = input.below(5) as u32;
        let mut bytes = Vec::new();
        for n in 0..u64::from(count) {
            let (mut raw, payload) = forge::operation(input, &self.known, 0);
            (raw.sequence, raw.epoch, raw.time) = (from + n, self.epoch, from);
            bytes.extend(forge::seal(&raw, &payload, incarnation));
        }
        (bytes, count)
    }

    /// A chunk whose checksums are all right.
    fn chunk(&self, n: usize, input: &mut Input<'_>) -> Vec<u8> {
        let (incarnation, first) = (input.odd() as u32, 1 + u64::from(input.u8()));
        let (body, entries) = self.entries(first, incarnation, input);
        let header = ChunkHeader {
            epoch: Epoch(self.epoch),
            stream_seq: self.position(n, input),
            client: self.client(input),
            last_seq: Sequence(first + u64::from(entries)),
            incarnation,
            entries: if input.u8() == b'n' { input.odd() as u32 } else { entries },
            body_bytes: if input.u8() == b'b' { input.odd() as u32 } else { body.len() as u32 },
            time: input.odd(),
            refusals: u32::from(input.u8() == b'r'),
            refused: Sequence(first),
            errno: incarnation as u16,
        };
        [&header.encode()[..], &body].concat()
    }

    fn message(&self, n: usize, input: &mut Input<'_>) -> Message {
        let client = self.client(input);
        let (ino, token) = (forge::inode(input, &self.known), input.odd());
        let seq = self.position(n, input);
        let mode = [LeaseMode::None, LeaseMode::Read, LeaseMode::Write][input.below(3)];
        let some = |input: &mut Input<'_>| -> Vec<InodeId> {
            (0..input.below(20)).map(|_| forge::inode(input, &self.known)).collect()
        };
        match input.below(39) {
            0 => Message::Chunk { all_acked: seq, chunk: self.chunk(n, input) },
            1 => Message::ChunkAck { seq },
            2 => Message::ClientUp {
                client,
                incarnation: token as u32,
                settled: Sequence(input.odd() >> 1),
                identity: Identity { uid: 1, gid: 2, groups: vec![3; input.piece().len()] },
                leases: some(input).into_iter().map(|i| (i, mode)).collect(),
                pins: some(input),
                rights: some(input),
                room: (token, input.odd()),
            },
            3 => Message::ClientGone { client },
            4 | 5 => {
                let (first, incarnation) = (input.odd(), token as u32);
                let (raw, count) = self.entries(first.min(1 << 60), incarnation, input);
                let last = Sequence(first.saturating_add(u64::from(count)));
                Message::Entries { client, first: Sequence(first), last, raw: raw.into() }
            }
            6 => {
                let (flags, span) = (input.u8(), Span { from: input.odd(), to: input.odd() });
                Message::LeaseWant { client, ino, token, mode, flags, span }
            }
            7 => Message::Granted {
                client,
                ino,
                token,
                mode,
                errno: input.odd() as u16,
                stream: seq,
                span: Span { from: input.odd(), to: input.odd() },
            },
            8 => Message::NumbersWant { client, token, count: input.odd() as u32 },
            9 => Message::Numbers { client, token, first: ino, count: input.odd() as u32 },
            10 => Message::Recall { client, ino, token },
            11 => Message::Recalled { client, ino, token },
            12 => Message::Unpin { client, inodes: some(input) },
            13 => Message::Released { client, ino, token },
            14 => Message::Progress {
                client,
                settled: Sequence(token >> 1),
                replicated: Sequence(input.odd() >> 1),
            },
            15 => Message::Position { seq },
            16 => Message::StreamWant { from: seq },
            17 => Message::Resume { seq, last: seq },
            18 if input.flag() => Message::SnapshotWant { incarnation: input.odd() },
            18 if input.flag() => Message::SnapshotHad { incarnation: input.odd() },
            18 if input.flag() => Message::ImageHad {
                incarnation: input.odd(),
                published: seq,
                last: StreamSeq(input.odd() >> 1),
                epoch: Epoch(input.below(4) as u32),
            },
            18 if input.flag() => Message::SnapshotInPlace {
                incarnation: input.odd(),
                published: seq,
                last: StreamSeq(input.odd() >> 1),
                epoch: Epoch(input.below(4) as u32),
            },
            18 => Message::SnapshotSince {
                incarnation: input.odd(),
                had: input.flag(),
                published: seq,
                last: StreamSeq(input.odd() >> 1),
                epoch: Epoch(input.below(4) as u32),
            },
            19 => {
                let ask = match input.below(3) {
                    0 => LockAsk::Set { lock: forge::lock(input), wait: input.odd() },
                    1 => LockAsk::Test { lock: forge::lock(input) },
                    _ => LockAsk::Cancel { wait: token },
                };
                Message::LockWant { client, ino, token, ask }
            }
            20 => {
                let found = input.flag().then(|| forge::lock(input));
                Message::LockDone { client, token, errno: input.odd() as u16, found }
            }
            21 => {
                let locks = some(input).into_iter().map(|i| (i, forge::lock(input))).collect();
                Message::LockHeld { client, first: input.flag(), locks }
            }
            22 => Message::LockFree { client },
            26 => Message::Room { client, token, blocks: input.odd() },
            27 => Message::RoomBack { client, token, blocks: input.odd() },
            28 => Message::RoomSought,
            31 => Message::AskAgain,
            32 => {
                let locks = some(input).iter().map(|_| forge::lock(input)).collect();
                let says = match input.below(4) {
                    0 => SoleSays::Wants,
                    1 => SoleSays::Has,
                    2 => SoleSays::Unused,
                    _ => SoleSays::Returns { locks, vouched: input.flag() },
                };
                Message::LockSole { client, ino, token, says }
            }
            33 => Message::LockSoleTold { client, ino, token, given: input.flag() },
            35 => {
                let crcs = (0..=input.below(9)).map(|_| input.odd() as u32).collect();
                let sure = vec![Part { ino, first: input.below(20) as u64, count: 3 }];
                let first = input.below(20) as u64;
                let (piece, id) = (input.below(3) as u32, input.below(3) as u64);
                let offers = vec![Offered { ino, first, crcs }];
                Message::SnapshotOffer { seq, piece, id, offers, sure }
            }
            36 if input.flag() => {
                let (first, count) = (input.below(20) as u64, input.below(20) as u32);
                let parts =
                    vec![Part { ino, first, count }, Part { ino, first: first + 20, count }];
                let (piece, id) = (input.below(3) as u32, input.below(3) as u64);
                Message::SnapshotSame { seq, piece, id, parts }
            }
            36 if input.flag() => {
                let (piece, id) = (input.below(3) as u32, input.below(3) as u64);
                if input.flag() {
                    let ranges = (0..input.below(4)).map(|_| input.below(50) as u32).collect();
                    return Message::SnapshotDiffers { seq, piece, id, ranges };
                }
                let raw = told_items(input, ino);
                Message::SnapshotItems { seq, piece, id, last_inode: ino, raw }
            }
            36 => {
                let (first, count) = (input.below(20) as u64, 1 + input.below(20) as u32);
                let lacks = vec![Part { ino, first, count }];
                let (piece, id) = (input.below(3) as u32, input.below(3) as u64);
                let doubts = vec![Doubt { part: lacks[0], keyed: input.odd() }];
                Message::SnapshotLack { seq, piece, id, lacks, doubts }
            }
            34 => {
                let (heir, secret) = (ClientId(input.odd()), u128::from(token % 3));
                match token % 6 {
                    0 => Message::HeirSeek { client, token, secret },
                    1 => Message::HeirSought { heir, token, user: 0, secret },
                    2 => Message::HeirAnswer { heir: client, token },
                    3 => Message::HeirFound { client, token, given: input.flag() },
                    4 => Message::LockHeir { client, heir: client },
                    _ => Message::LockHeir { client, heir },
                }
            }
            29 => Message::Kept { client, inodes: some(input) },
            30 => Message::Pinned { client, inodes: some(input), rights: some(input) },
            37 | 38 => {
                // Parts of an image, mostly well formed, of what no volume has.
                let mut raw = Vec::new();
                for _ in 0..input.below(5) {
                    let bytes = vec![input.u8(); 4096 * (1 + input.below(2))];
                    let key = Key::new(
                        [0, 1, 2, input.odd()][input.below(4)],
                        [1, 3, 4, 18, 21, 23, 24][input.below(7)],
                        [0, 1, input.odd()][input.below(3)],
                    );
                    let value = input.piece().to_vec();
                    let name = b"s".to_vec();
                    let (slot, dir) = (1 + input.below(3) as u16, InodeId::ROOT);
                    let snapshot = Snapshot { slot, dir, time: 1, inodes: 1, name };
                    match input.below(10) {
                        0 => image::Part::Item(key, None),
                        1 => {
                            let (arena, block) = (input.below(3) as u32, input.odd());
                            image::Part::Blocks { arena, block, bytes: &bytes }
                        }
                        2 => image::Part::State(input.odd(), snapshot),
                        3 => image::Part::End(ImageEnd { inodes: input.odd(), blocks: 2, time: 3 }),
                        4 => image::Part::Key(input.odd()),
                        5 => image::Part::Offered {
                            known: [Has::Maybe, Has::Last, Has::Then][input.below(3)],
                            number: input.odd(),
                            ino,
                            file: [0, 1, input.odd()][input.below(3)],
                            arena: input.below(3) as u32,
                            block: [0, 1, input.odd()][input.below(3)],
                            crcs: vec![token as u32; 1 + input.below(4)],
                        },
                        6 => {
                            let (arena, block) = (input.below(3) as u32, input.below(2) as u64);
                            image::Part::Same { arena, block, count: 1 + input.below(4) as u32 }
                        }
                        _ => image::Part::Item(key, Some(&value)),
                    }
                    .encode(&mut raw);
                }
                let (piece, end) = (input.below(3) as u32, input.flag());
                let waits = input.flag();
                Message::Image { seq, piece, last_inode: ino, end, waits, raw }
            }
            _ => {
                let raw = self.entries(1, 0, input).0;
                let piece = u32::from(input.flag());
                Message::Snapshot {
                    seq,
                    piece,
                    last_inode: ino,
                    end: input.flag(),
                    waits: input.flag(),
                    raw,
                }
            }
        }
    }

    fn frame(&mut self, n: usize, from: u32, kind: u16, body: Vec<u8>) {
        self.rig.event(n, Event::Frame { from: NodeId(from), kind, body: body.into() });
    }

    /// The first message of a link is changed, repeated or lost.
    fn tamper(&mut self, input: &mut Input<'_>) {
        let link = input.below(self.rig.links.len());
        let Some((kind, body)) = self.rig.links[link].2.front_mut() else { return };
        let at = usize::from(input.u16()) % body.len().max(1);
        match input.below(6) {
            0 => body.truncate(at),
            1 => body.extend_from_slice(input.piece()),
            2 => *kind = u16::from(input.u8() % 26),
            3 => {
                if let Some(byte) = body.get_mut(at) {
                    *byte ^= input.u8();
                }
            }
            4 => {
                let again = (*kind, body.clone());
                self.rig.links[link].2.push_back(again);
            }
            _ => {
                self.rig.links[link].2.pop_front();
            }
        }
    }

    /// An honest client does something and asks for its durability; nobody waits.
    fn work(&mut self, input: &mut Input<'_>) {
        let hand = &mut self.hands[input.below(3)];
        // Its client may have been ended by what a peer said.
        if hand.at > LANE / 2 || hand.media.size(hand.log).is_err() {
            return;
        }
        let (ino, bits) = (self.known[input.below(self.known.len())], input.u8());
        let data = vec![bits; usize::from(input.u16())];
        let op = match bits % 3 {
            0 => create(ino, InodeId::ROOT, b"file", 0o100_644, 0),
            1 => Op::Write { ino, offset: u64::from(bits), data: &data, clear_setid: false },
            _ => Op::Unlink { ino, parent: InodeId::ROOT, name: b"file", open: false },
        };
        hand.append(&op);
        hand.set(storage::format::control::SYNC_REQUEST, hand.seq);
        let event = Event::Doorbell(hand.client);
        let n = hand.n;
        let mut body = Vec::new();
        let mode = LeaseMode::Write;
        storage::format::rpc::Request::Inode { ino, mode, flags: 6 }.encode(Sequence(0), &mut body);
        hand.post_raw(usize::from(bits) % 8, &body);
        self.rig.event(n, event);
    }

    fn view(&mut self, input: &mut Input<'_>) {
        self.epoch += u32::from(input.u8() % 2);
        let orders: [(&[u32], &[u32]); 6] = [
            (&[1, 2, 3], &[]),
            (&[2, 1, 3], &[]),
            (&[1, 2], &[3]),
            (&[2, 3], &[1]),
            (&[3], &[2]),
            (&[2], &[]),
        ];
        let (chain, syncing) = orders[input.below(orders.len())];
        let nodes = |list: &[u32]| list.iter().map(|n| NodeId(*n)).collect::<Vec<_>>();
        let who = input.u8();
        for n in (0..3).filter(|n| who & 1 << n == 0) {
            let (chain, syncing) = (nodes(chain), nodes(syncing));
            let lapse = u64::from(who) << 20;
            self.rig.event(n, Event::View { epoch: Epoch(self.epoch), chain, syncing, lapse });
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let (choice, n) = (input.below(12), input.below(3));
        match choice {
            0..=2 => {
                let from = 1 + input.below(4) as u32;
                let epoch = if input.u8() == b'e' { input.odd() as u32 } else { self.epoch };
                let (kind, body) = self.message(n, input).encode(Epoch(epoch));
                self.frame(n, from, kind, body);
            }
            3 => {
                let (from, kind) = (1 + input.below(4) as u32, u16::from(input.u8() % 26));
                let body = [&self.epoch.to_le_bytes()[..], input.piece()].concat();
                self.frame(n, from, kind, body);
            }
            4 => self.tamper(input),
            5 | 6 => self.work(input),
            7 => self.view(input),
            8 => {
                let node = NodeId(1 + input.below(4) as u32);
                let up = input.flag();
                self.rig.event(n, if up { Event::PeerUp(node) } else { Event::PeerDown(node) });
            }
            9 => self.rig.pass(1 + u64::from(input.u8()) * 4_000_000),
            10 => self.rig.deliver_all(),
            _ => {
                let link = input.below(self.rig.links.len());
                self.rig.deliver(link);
            }
        }
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World::new(input.u8());
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    for _ in 0..4 {
        world.rig.pass(200_000_000);
        world.rig.deliver_all();
    }
    for node in &world.rig.nodes {
        if let Some(failure) = node.failure() {
            assert!(!failure.to_string().is_empty());
        }
    }
    world.rig.check();
    // Each region can be taken up again by a node that starts on it, or it says why not.
    for (n, region) in (1..).zip(&world.rig.regions) {
        let media = Arc::clone(region) as Arc<dyn storage::media::Media>;
        let random = base::random::Random::new(1);
        let _ = service::core::Node::new(crate::rig::config(n), media, random);
    }
}

/// Parts of what a node is brought to in place: ranges, items that may be none, files.
fn told_items(input: &mut Input<'_>, ino: InodeId) -> Vec<u8> {
    let mut raw = Vec::new();
    for _ in 0..1 + input.below(3) {
        let from = Key::new(input.below(6) as u64, input.below(6) as u8, input.odd());
        let end = input.flag().then(|| Key::new(from.ino + 1, input.below(6) as u8, input.odd()));
        let part = match input.below(3) {
            0 => reconcile::Part::Range(from, end, input.odd()),
            1 => {
                let value = input.piece();

                let items = (0..input.below(3))
                    .map(|n| (Key { item: from.item.wrapping_add(n as u64), ..from }, value))
                    .collect();
                reconcile::Part::Items(from, end, items).encode(&mut raw);
                continue;
            }
            _ => reconcile::Part::Anew(ino),
        };
        part.encode(&mut raw);
    }
    raw
}
