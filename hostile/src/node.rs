//! A whole node (of a chain of one or two) with a client that does with its segment what the input
//! says, beside one that keeps the rules and must not notice.

use base::{ClientId, Epoch, InodeId};
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{self, Op, RawHeader};
use storage::format::page::Key;
use storage::format::proof::Proof;
use storage::format::rpc::Request;
use storage::limits::{LEASE_SLOTS, RPC_SLOT_BYTES, RPC_SLOTS};
use storage::volume::Volume;

use crate::forge;
use crate::input::Input;
use crate::rig::{Hand, LANE, Rig, SECRET};
use crate::whole::differences_are_complete;

const GOOD: u32 = 1000;
const BAD: u32 = 2000;
/// Snapshots at a time.
const SNAPSHOTS: usize = 3;
/// Steps of one script: bounds the time that an input takes.
const STEPS: usize = 120;

struct Bad {
    hand: Hand,
    own: Vec<InodeId>,
}

impl Bad {
    fn new(rig: &mut Rig, n: usize) -> Self {
        // (Logs of those before it are still drained.)
        let there = (0..100).any(|_| {
            let there = rig.try_attach(n, BAD);
            rig.pass(if there { 0 } else { 50_000_000 });
            there
        });
        assert!(there, "the node takes clients");
        let hand = rig.last_attached(n, BAD);
        let own = hand.numbers(rig, 6).into_iter().map(|(ino, _)| ino).collect();
        Self { hand, own }
    }

    fn is_gone(&self, rig: &Rig) -> bool {
        rig.detached.contains(&self.hand.client)
    }

    fn settled(&self, rig: &Rig) -> u64 {
        let status = rig.nodes[self.hand.n].status();
        status.clients.iter().find(|c| c.client == self.hand.client).map_or(0, |c| c.settled.0)
    }

    fn ring(&self, rig: &mut Rig) {
        rig.event(self.hand.n, Event::Doorbell(self.hand.client));
        rig.deliver_all();
    }

    /// Writes at the lane's position; the position moves on if the node took what lies there.
    fn put(&mut self, rig: &mut Rig, bytes: &[u8]) {
        let room = (LANE - self.hand.at) as usize;
        let bytes = &bytes[..bytes.len().min(room)];
        let at = self.hand.descriptor.lane_offset(0) + self.hand.at;
        let before = self.settled(rig);
        let _ = self.hand.media.write(self.hand.log, at, bytes);
        self.ring(rig);
        rig.pass(3_000_000);
        rig.deliver_all();
        if self.settled(rig) > before {
            self.hand.at += bytes.len() as u64;
        }
    }

    fn entry(&mut self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        let (mut raw, payload) = forge::operation(input, known, BAD);
        raw.sequence = self.settled(rig) + 1;
        (raw.epoch, raw.time) = (1, 1);
        match input.u8() {
            b'l' => raw.length = input.odd() as u32,
            b's' => raw.sequence = input.odd(),
            b'e' => raw.epoch = input.odd() as u32,
            b'n' => raw.lane = input.u8(),
            b'o' => raw.op = input.u8(),
            b'f' => raw.flags = input.u16(),
            b'a' => raw.a = input.odd(),
            b'b' => raw.b = input.odd(),
            _ => {}
        }
        let bytes = forge::seal(&raw, &payload, self.hand.descriptor.incarnation);
        self.put(rig, &bytes);
    }

    /// Several entries at once, so that one chunk holds them.
    fn burst(&mut self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        let mut bytes = Vec::new();
        let first = self.settled(rig) + 1;
        for sequence in first..first + 1 + input.below(6) as u64 {
            let (mut raw, payload) = forge::operation(input, known, BAD);
            (raw.sequence, raw.epoch, raw.time) = (sequence, 1, sequence);
            bytes.extend(forge::seal(&raw, &payload, self.hand.descriptor.incarnation));
        }
        self.put(rig, &bytes);
    }

    /// Clones from snapshots that are there or not, of files that it may read or not, to files of its own or others'.
    fn clones(&mut self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        let (ino, source) = (forge::inode(input, &self.own), forge::inode(input, known));
        let op = forge::clone_range(input, ino, source);
        let sequence = self.settled(rig) + 1;
        let incarnation = self.hand.descriptor.incarnation;
        let bytes = op.to_entry(base::Sequence(sequence), Epoch(1), 0, 1, incarnation);
        self.put(rig, &bytes);
    }

    /// A header straight from the input, with a right checksum.
    fn raw(&mut self, rig: &mut Rig, input: &mut Input<'_>) {
        let raw = RawHeader {
            length: input.odd() as u32,
            sequence: self.settled(rig) + 1 + u64::from(input.u8() >> 6),
            epoch: 1,
            op: input.u8(),
            lane: 0,
            flags: input.u16(),
            inode: input.odd(),
            a: input.odd(),
            b: input.odd(),
            time: input.odd(),
        };
        let payload = input.piece();
        let bytes = forge::seal(&raw, payload, self.hand.descriptor.incarnation);
        self.put(rig, &bytes);
    }

    fn scribble(&self, input: &mut Input<'_>) {
        let end = control::LANES + LANE;
        let from = match input.below(3) {
            0 => u64::from(input.u16()) * 8,
            1 => control::RPC + u64::from(input.u16()),
            _ => control::LANES + self.hand.at + u64::from(input.u16()),
        };
        let piece = input.piece();
        let repeat = 1 << input.below(12);
        let bytes: Vec<u8> = piece.iter().copied().cycle().take(piece.len() * repeat).collect();
        let len = bytes.len().min(end.saturating_sub(from) as usize);
        let _ = self.hand.media.write(self.hand.log, from, &bytes[..len]);
    }

    /// Words of the control area; its segment may be gone.
    fn set(&self, at: u64, value: u64) {
        let _ = self.hand.media.store64(self.hand.log, at, value);
    }

    fn words(&self, input: &mut Input<'_>) {
        let at = match input.below(8) {
            0 => control::SYNC_REQUEST,
            1 => control::LAST_SEQUENCE,
            2 => control::DOORBELL,
            3 => control::in_op(input.below(64)),
            4 => control::lease_word(u32::from(input.u16()) % LEASE_SLOTS as u32),
            5 => control::reclaim(input.below(8)),
            6 => control::RPC + (input.below(RPC_SLOTS) * RPC_SLOT_BYTES) as u64,
            _ => u64::from(input.u16()) % (control::LANES / 8) * 8,
        };
        self.set(at, input.odd());
    }

    fn request(&self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        let slot = input.below(RPC_SLOTS);
        let ino = forge::inode(input, known);
        let mode = [LeaseMode::None, LeaseMode::Read, LeaseMode::Write][input.below(3)];
        let list = input.u16() % 4000;
        let request = match input.below(21) {
            20 => Request::Range { ino, flags: input.u8(), from: input.odd(), to: input.odd() },
            19 => Request::Differences {
                before: input.odd(),
                number: input.odd(),
                from: Key::new(input.odd(), input.u8(), input.odd()),
            },
            18 => Request::Snapshots { after: input.odd() },
            17 => Request::Inherit { heir: u128::from(input.odd()) },
            0 => Request::Inode { ino, mode, flags: input.u8() },
            1 => Request::XattrPart { ino, name: input.piece(), from: input.odd() as u32 },
            2 => Request::Lookup { dir: ino, name: input.piece(), mode, flags: input.u8() },
            3 => Request::Names { dir: ino, cookie: input.odd() },
            4 => Request::Extents { ino, from: input.odd() },
            5 => Request::XattrGet { ino, name: input.piece() },
            6 => Request::XattrList { ino },
            7 => Request::Inodes { count: input.odd() as u32 },
            8 => Request::Unpin {
                inodes: (0..list).map(|n| InodeId(ino.0 ^ u64::from(n))).collect(),
            },
            9 => Request::StatFs,
            10 => Request::Release {
                slots: (0..list).map(|n| u32::from(n).wrapping_add(ino.0 as u32)).collect(),
            },
            11 => Request::Read { ino, offset: input.odd(), len: input.odd() as u32 },
            12 => Request::Lock { ino, wait: input.odd(), lock: forge::lock(input) },
            13 => Request::LockTest { ino, lock: forge::lock(input) },
            14 => Request::LockCancel { ino, wait: input.odd() },
            15 => Request::Keep {
                before: (0..list % 5).map(|n| ClientId(input.odd() ^ u64::from(n))).collect(),
                inodes: (0..list).map(|n| InodeId(ino.0 ^ u64::from(n))).collect(),
                last: input.flag(),
            },
            _ => return self.raw_request(rig, slot, input),
        };
        let mut body = Vec::new();
        let after = if input.flag() { input.odd() } else { 0 };
        // As if it had been shown everything: else most requests would end there.
        let proof = request.names().map_or(Proof::NONE, |ino| Proof::new(SECRET, ino));
        request.encode_shown(base::Sequence(after), proof, &mut body);
        self.post(rig, slot, &body, body.len() as u64);
    }

    fn raw_request(&self, rig: &mut Rig, slot: usize, input: &mut Input<'_>) {
        let body = input.piece().to_vec();
        let claimed = if input.flag() { input.odd() } else { body.len() as u64 };
        self.post(rig, slot, &body, claimed);
    }

    fn post(&self, rig: &mut Rig, slot: usize, body: &[u8], claimed: u64) {
        let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let len = body.len().min(RPC_SLOT_BYTES - storage::format::rpc::SLOT_BODY as usize);
        let to = base + storage::format::rpc::SLOT_BODY;
        let _ = self.hand.media.write(self.hand.log, to, &body[..len]);
        self.set(base, u64::from(storage::format::rpc::SLOT_REQUEST) | claimed << 32);
        self.ring(rig);
    }

    fn die(&self, rig: &mut Rig) {
        rig.event(self.hand.n, Event::ClientGone(self.hand.client));
        rig.pass(1_000_000);
        rig.deliver_all();
    }
}

/// The client that keeps the rules, and what it has written.
struct Good {
    hand: Hand,
    ino: InodeId,
    want: Vec<u8>,
    names: Vec<String>,
}

impl Good {
    fn new(rig: &mut Rig) -> Self {
        let mut hand = rig.attach(0, GOOD);
        let ino = hand.create(rig, b"good", 0o100_600);
        Self { hand, ino, want: Vec::new(), names: Vec::new() }
    }

    fn work(&mut self, rig: &mut Rig, input: &mut Input<'_>) {
        let len = 1 + usize::from(input.u16()) % 6000;
        let data = vec![input.u8(); len];
        self.want.resize(self.want.len().max(len), 0);
        self.want[..len].copy_from_slice(&data);
        let ino = self.ino;
        let write = Op::Write { ino, offset: 0, data: &data, clear_setid: true };
        self.hand.append_in(rig, ino, &write);
        if input.u8() % 4 == 1 && self.names.len() < 8 {
            let name = format!("good {}", self.names.len());
            self.hand.create(rig, name.as_bytes(), 0o100_644);
            self.names.push(name);
        }
        self.hand.sync(rig);
    }

    /// What it wrote is there, on every node.
    fn judge(&self, rig: &Rig) {
        assert_eq!(self.hand.refusals(), 0, "the good client's operations all count");
        for node in &rig.nodes {
            let volume = node.volume();
            let find = |name: &[u8]| {
                let found = volume.lookup(InodeId::ROOT, name).expect("a sound volume");
                let (ino, _) = found.unwrap_or_else(|| panic!("{name:?} is lost"));
                (ino, volume.attr(ino).expect("a sound volume").expect("attributes"))
            };
            let (ino, record) = find(b"good");
            assert_eq!((record.mode, record.uid), (0o100_600, GOOD));
            let mut data = vec![0; record.size as usize];
            assert_eq!(volume.read_file(ino, 0, &mut data).expect("a sound volume"), data.len());
            assert_eq!(data, self.want);
            self.names.iter().for_each(|name| {
                find(name.as_bytes());
            });
        }
    }
}

/// The super-user, who makes snapshots and gives them up, clones what they have, and asks for what they have otherwise in ways that
/// make no sense.
struct Root {
    hand: Hand,
    /// A file of its own, to clone to.
    ino: InodeId,
    made: u32,
    /// Those that are there, with what they showed at first.
    alive: Vec<(String, u16, u64)>,
    /// All slots that were in use, and two that were not.
    slots: Vec<u16>,
}

impl Root {
    fn new(rig: &mut Rig) -> Self {
        let mut hand = rig.attach(0, 0);
        let ino = hand.create(rig, b"of root", 0o100_644);
        Self { hand, ino, made: 0, alive: Vec::new(), slots: vec![1, 0x7fff] }
    }

    fn work(&mut self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        match input.below(6) {
            0 | 1 if self.alive.len() < SNAPSHOTS => self.make(rig),
            2 if !self.alive.is_empty() => {
                let at = input.below(self.alive.len());
                let (name, ..) = self.alive.remove(at);
                let op = Op::DropSnapshot { ino: InodeId::ROOT, name: name.as_bytes() };
                self.hand.append_in(rig, InodeId::ROOT, &op);
                self.hand.sync(rig);
            }
            3 => self.ask(rig, known, input),
            _ => {
                let source = forge::inode(input, known);
                let op = forge::clone_range(input, self.ino, source);
                // (Who writes what is no entry is expelled.)
                let bytes = op.to_entry(base::Sequence(1), Epoch(1), 0, 1, 1);
                if entry::decode(&bytes, 1).is_ok() {
                    self.hand.append_in(rig, self.ino, &op);
                    self.hand.sync(rig);
                }
            }
        }
    }

    fn make(&mut self, rig: &mut Rig) {
        self.made += 1;
        let name = format!("s{}", self.made);
        let op = Op::Snapshot { ino: InodeId::ROOT, name: name.as_bytes() };
        self.hand.append_in(rig, InodeId::ROOT, &op);
        self.hand.sync(rig);
        rig.settle();
        let mut volume = opened(rig, 0);
        let slot = volume.snapshot_named(name.as_bytes()).expect("it was made").slot;
        let shown = shown(&mut volume, slot);
        self.alive.push((name, slot, shown));
        self.slots.push(slot);
    }

    /// Numbers of snapshots that are there, or not, and keys that nobody was told.
    fn ask(&self, rig: &mut Rig, known: &[InodeId], input: &mut Input<'_>) {
        let all = rig.nodes[0].volume().snapshots(0, usize::MAX);
        let number = |input: &mut Input<'_>| match all.get(input.below(all.len() + 2)) {
            Some(stat) => stat.number,
            None => input.odd(),
        };
        let (before, number) = (number(input), number(input));
        let ino = if input.flag() { forge::inode(input, known).0 } else { input.odd() };
        let from = Key::new(ino, input.u8(), input.odd());
        let request = Request::Differences { before, number, from };
        // (It need not be answered with anything but an error.)
        let _ = self.hand.call(rig, &request);
    }

    /// Each snapshot shows what it showed, and what it has otherwise than others is told in full.
    fn judge(&self, rig: &Rig) {
        for n in 0..rig.nodes.len() {
            let (mut volume, mut before) = (opened(rig, n), None);
            for (name, slot, was) in &self.alive {
                assert_eq!(shown(&mut volume, *slot), *was, "{name} on node {n}");
                let told = differences_are_complete(&mut volume, before, *slot, || (700, 9));
                assert_eq!(told, Ok(()), "{name} on node {n}");
                before = Some(*slot);
            }
        }
    }
}

/// The volume as it is published on a node.
fn opened(rig: &Rig, n: usize) -> Volume {
    Volume::open(std::sync::Arc::clone(&rig.regions[n]) as _).expect("a sound region")
}

fn shown(volume: &mut Volume, slot: u16) -> u64 {
    let state = volume.read_snapshot(slot).expect("it is published");
    state.digest().expect("a sound state")
}

/// What the host's side says of processes: attaching with odd figures, arenas, copies never asked for.
fn host(rig: &mut Rig, n: usize, ours: [ClientId; 3], input: &mut Input<'_>) {
    let token = 1 << 40 | u64::from(input.u8());
    let event = match input.below(5) {
        0 => Event::Attach {
            token,
            pid: input.odd() as u32,
            start_time: input.odd(),
            uid: input.odd() as u32,
            gid: BAD,
            groups: vec![7; usize::from(input.u16())],
            lanes: input.odd() as u32,
        },
        1 => Event::ArenaQuery { token, arena: input.odd() as u32 },
        2 => Event::CopiesDone { id: input.odd(), bad: vec![input.odd() as u32; input.below(9)] },
        3 => Event::Doorbell(ClientId(input.odd())),
        _ => Event::ClientGone(ClientId(token | 1 << 60)),
    };
    rig.event(n, event);
    rig.deliver_all();
    // Whoever it was leaves at once: there is room for few clients.
    let strangers = rig.nodes[n].status().clients.into_iter().map(|c| c.client);
    for client in strangers.filter(|c| !ours.contains(c)) {
        rig.event(n, Event::ClientGone(client));
        rig.deliver_all();
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let first = input.u8();
    let mut rig = Rig::new(1 + u32::from(first & 1), u64::from(first));
    let home = usize::from(first & 1 & (first >> 1));
    let mut good = Good::new(&mut rig);
    let mut root = Root::new(&mut rig);
    let mut bad = Bad::new(&mut rig, home);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        if bad.is_gone(&rig) {
            bad = Bad::new(&mut rig, home);
        }
        let mut known = bad.own.clone();
        known.extend([good.ino, root.ino]);
        // As many as before: scripts that are kept name the same.
        let then = forge::then(&known, &root.slots);
        let known = &known[..];
        let all = &[known, &then].concat()[..];
        match input.below(16) {
            0 => bad.scribble(&mut input),
            1 => bad.words(&mut input),
            2 | 3 => bad.request(&mut rig, known, &mut input),
            4 => bad.raw(&mut rig, &mut input),
            5 | 6 => bad.burst(&mut rig, known, &mut input),
            7 => good.work(&mut rig, &mut input),
            8 => bad.ring(&mut rig),
            9 => {
                rig.pass(u64::from(input.u8()) * 10_000_000);
                rig.deliver_all();
            }
            10 => {
                bad.die(&mut rig);
                bad = Bad::new(&mut rig, home);
            }
            11 => {
                let ours = [good.hand.client, bad.hand.client, root.hand.client];
                host(&mut rig, home, ours, &mut input);
            }
            12 => {
                let bytes = input.piece().to_vec();
                bad.put(&mut rig, &bytes);
            }
            13 => root.work(&mut rig, all, &mut input),
            14 => match input.below(3) {
                0 => bad.request(&mut rig, all, &mut input),
                1 => bad.clones(&mut rig, all, &mut input),
                _ => bad.burst(&mut rig, all, &mut input),
            },
            _ => bad.entry(&mut rig, known, &mut input),
        }
        for node in &rig.nodes {
            assert_eq!(node.failure(), None);
        }
    }
    if !bad.is_gone(&rig) {
        bad.die(&mut rig);
    }
    good.work(&mut rig, &mut input);
    rig.settle();
    good.judge(&rig);
    root.judge(&rig);
    assert_eq!(good.hand.descriptor.epoch, Epoch(1));
    rig.check();
}
