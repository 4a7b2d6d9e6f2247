//! A client that writes whatever it likes into its segment, beside one that works.

use base::random::Random;
use base::{Epoch, InodeId, Sequence};
use service::core::Event;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{Op, RawHeader, Stamp, mask, op};
use storage::format::rpc::Request;
use storage::limits::{LEASE_SLOTS, PAYLOAD_MAX, RPC_SLOT_BYTES, RPC_SLOTS};

use crate::rig::{Hand, LANE, Rig, create};

const GOOD: u32 = 1000;
const BAD: u32 = 2000;

/// A number that code may stumble over.
fn odd(random: &mut Random) -> u64 {
    match random.below(6) {
        0 => u64::MAX,
        1 => u64::MAX - random.below(70_000),
        2 => 0,
        3 => random.next_u64(),
        4 => 1 << random.below(64),
        _ => random.below(1 << 20),
    }
}

struct Bad {
    hand: Hand,
    own: Vec<InodeId>,
    good: InodeId,
}

impl Bad {
    fn new(rig: &mut Rig, good: InodeId) -> Self {
        // Whoever was expelled again and again waits.
        while !rig.try_attach(0, BAD) {
            rig.pass(20_000_000);
        }
        let hand = rig.last_attached(0, BAD);
        let own = hand.numbers(rig, 8).into_iter().map(|(ino, _)| ino).collect();
        Self { hand, own, good }
    }

    fn ino(&self, random: &mut Random) -> InodeId {
        match random.below(6) {
            0 => InodeId::ROOT,
            1 => self.good,
            2 => InodeId(odd(random)),
            3 => InodeId(self.own[0].0 + random.below(40)),
            _ => self.own[random.below(8) as usize],
        }
    }

    /// An operation of any kind; most are wrong in some way.
    fn operation(&self, random: &mut Random) -> (RawHeader, Vec<u8>) {
        let ino = self.ino(random);
        let (parent, new_parent) = (self.ino(random), self.ino(random));
        let names: [&[u8]; 6] = [b"good", b"a", b"..", b"a/b", &[b'x'; 255], &[b'y'; 256]];
        let name = names[random.below(6) as usize];
        let new_name = names[random.below(6) as usize];
        let (a, b) = (odd(random), odd(random));
        let flag = random.chance(1, 2);
        let data = vec![0xbd; random.below(9000) as usize];
        let stamp = Stamp { sec: a as i64, nsec: b as u32 };
        let uid = if random.chance(1, 3) { 0 } else { BAD };
        let dir = if flag { 0o040_755 } else { b as u32 };
        let operation = match random.below(16) {
            0 => Op::Create { ino, parent, mode: dir, rdev: 0, uid, gid: uid, name, target: b"" },
            1 => create(self.own[0], InodeId::ROOT, name, 0o040_755, BAD),
            2 => Op::Link { ino, parent, name },
            3 => Op::Unlink { ino, parent, name, open: flag },
            4 => Op::Rmdir { ino, parent, name, open: flag },
            5 => Op::Rename {
                ino,
                parent,
                name,
                new_parent,
                new_name,
                replaced: if flag { InodeId::NONE } else { self.ino(random) },
                noreplace: random.chance(1, 3),
                exchange: random.chance(1, 3),
                open: flag,
            },
            6 => Op::Write { ino, offset: a, data: &data, clear_setid: flag },
            7 => Op::Truncate { ino, size: a, clear_setid: flag },
            8 => Op::Fallocate { ino, offset: a, len: b, mode: b as u16 },
            9 => {
                let mode = a as u32;
                Op::SetAttr { ino, mask: a & 31, mode, uid, gid: uid, atime: stamp, mtime: stamp }
            }
            10 => Op::SetXattr { ino, name, value: &data[..data.len().min(300)] },
            11 => Op::RemoveXattr { ino, name },
            12 => Op::CloneRange {
                ino,
                offset: a,
                len: b,
                source: parent,
                source_offset: b,
                zeroes: flag,
            },
            14 => Op::Move { ino, from: a, to: b, out: flag },
            13 => Op::Shift { ino, offset: a, len: b, insert: flag, size: a.wrapping_add(b) },
            _ => Op::Reap { ino },
        };
        let mut payload = Vec::new();
        let mut raw = operation.encode(&mut payload);
        if let Op::Write { data, .. } = operation {
            payload.extend_from_slice(data);
            raw.length = data.len() as u32;
        }
        (raw, payload)
    }

    /// Puts an entry at the lane's position; the next one takes its place if it was not taken.
    fn entry(&mut self, rig: &mut Rig, random: &mut Random) {
        let (mut raw, payload) = self.operation(random);
        let next = rig.nodes[0]
            .status()
            .clients
            .iter()
            .find(|c| c.client == self.hand.client)
            .map_or(1, |c| c.settled.0 + 1);
        raw.sequence = if random.chance(1, 12) { odd(random) } else { next };
        raw.epoch = if random.chance(1, 12) { odd(random) as u32 } else { 1 };
        raw.time = odd(random);
        if random.chance(1, 20) {
            raw.lane = random.next_u64() as u8;
        }
        if random.chance(1, 20) {
            raw.length = odd(random) as u32;
        }
        if random.chance(1, 30) {
            raw.op = random.next_u64() as u8;
        }
        if random.chance(1, 30) {
            (raw.op, raw.length) = (op::PAD, odd(random) as u32);
        }
        let mut bytes = raw.seal(self.hand.descriptor.incarnation, &[&payload]).to_vec();
        bytes.extend_from_slice(&payload);
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        if self.hand.at + bytes.len() as u64 > LANE {
            return;
        }
        let at = self.hand.descriptor.lane_offset(0) + self.hand.at;
        self.hand.media.write(self.hand.log, at, &bytes).expect("space in the lane");
        self.ring(rig);
        rig.pass(3_000_000);
        let settled = rig.nodes[0].status().clients.iter().any(|c| {
            c.client == self.hand.client && c.settled.0 >= raw.sequence && raw.sequence == next
        });
        if settled {
            self.hand.at += bytes.len() as u64;
        }
    }

    fn scribble(&self, random: &mut Random) {
        let end = control::LANES + LANE;
        let from = if random.chance(2, 3) {
            random.below(control::LANES)
        } else {
            control::LANES + self.hand.at + random.below(LANE - self.hand.at)
        };
        let bits = random.below(20);
        let len = (1 + random.below(1 << bits)).min(end - from) as usize;
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        self.hand.media.write(self.hand.log, from, &bytes).expect("its own segment");
    }

    fn words(&self, random: &mut Random) {
        for _ in 0..8 {
            let at = match random.below(5) {
                0 => control::SYNC_REQUEST,
                1 => control::LAST_SEQUENCE,
                2 => control::in_op(random.below(64) as usize),
                3 => control::lease_word(random.below(LEASE_SLOTS as u64) as u32),
                _ => 0x3000 + random.below(64) * 64,
            };
            self.hand.set(at, odd(random));
        }
    }

    fn requests(&self, rig: &mut Rig, random: &mut Random) {
        for slot in 0..RPC_SLOTS {
            let (ino, mode) = (self.ino(random), LeaseMode::Write);
            let dir = self.ino(random);
            let count = odd(random) as u32;
            let list = random.below(8000);
            let request = match random.below(14) {
                13 => Request::Range { ino, flags: 7, from: odd(random), to: odd(random) },
                0 => Request::Inode { ino, mode, flags: random.next_u64() as u8 },
                1 => Request::Lookup {
                    dir,
                    name: &[b'z'; 300][..count as usize % 300],
                    mode,
                    flags: 7,
                },
                2 => Request::Names { dir, cookie: odd(random) },
                3 => Request::Extents { ino, from: odd(random) },
                4 => Request::XattrGet { ino, name: b"user.a" },
                5 => Request::XattrList { ino },
                6 => Request::Inodes { count },
                7 => Request::Unpin { inodes: (0..list).map(|_| self.ino(random)).collect() },
                8 => Request::StatFs,
                9 => Request::Release { slots: (0..list).map(|_| odd(random) as u32).collect() },
                10 => Request::Read { ino, offset: odd(random), len: count },
                11 => Request::XattrPart { ino, name: b"user.a", from: count },
                _ => {
                    let mut body = vec![0; list as usize];
                    random.fill(&mut body);
                    self.hand.post_raw(slot, &body);
                    let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
                    self.hand.set(base, 1 | odd(random) << 32);
                    continue;
                }
            };
            let after = if random.chance(1, 3) { odd(random) } else { 0 };
            self.hand.post(slot, &request, after);
        }
        self.ring(rig);
    }

    fn ring(&self, rig: &mut Rig) {
        rig.event(0, Event::Doorbell(self.hand.client));
        rig.deliver_all();
    }

    fn step(&mut self, rig: &mut Rig, random: &mut Random) {
        match random.below(12) {
            0 => self.scribble(random),
            1 => self.words(random),
            2 | 3 => self.requests(rig, random),
            4 => {
                let ino = self.ino(random);
                let request = Request::Inode { ino, mode: LeaseMode::Write, flags: 0 };
                self.hand.post(0, &request, 0);
                self.ring(rig);
            }
            _ => self.entry(rig, random),
        }
    }

    /// The process ends; its last words are entries with the largest numbers there are.
    fn die(mut self, rig: &mut Rig) {
        for seq in [Sequence::END.0 - 1, Sequence::END.0, u64::MAX - 1, u64::MAX] {
            let op = Op::Truncate { ino: self.own[0], size: 0, clear_setid: true };
            let bytes =
                op.to_entry(Sequence(seq), Epoch(1), 0, 1, self.hand.descriptor.incarnation);
            if self.hand.at + 64 <= LANE {
                let at = self.hand.descriptor.lane_offset(0) + self.hand.at;
                // The segment of a client that was expelled may be gone already.
                let _ = self.hand.media.write(self.hand.log, at, &bytes);
                self.hand.at += bytes.len() as u64;
            }
        }
        rig.event(0, Event::ClientGone(self.hand.client));
        rig.pass(1_000_000);
    }
}

fn read(rig: &Rig, name: &[u8]) -> Option<(u32, Vec<u8>)> {
    let volume = rig.nodes[0].volume();
    let (ino, _) = volume.lookup(InodeId::ROOT, name).expect("a sound volume")?;
    let record = volume.attr(ino).expect("a sound volume")?;
    let mut data = vec![0; record.size as usize];
    let n = volume.read_file(ino, 0, &mut data).expect("a sound volume");
    assert_eq!(n, data.len());
    Some((record.mode, data))
}

#[test]
fn a_hostile_client_harms_nobody_but_itself() {
    let (mut refused, mut bad_requests, mut expelled) = (0, 0, 0);
    for seed in 0..12 {
        eprintln!("seed {seed}");
        let mut random = Random::new(seed);
        let mut rig = Rig::new(1 + (seed % 2) as u32, seed);
        let mut good = rig.attach(0, GOOD);
        let ino = good.create(&mut rig, b"good", 0o100_600);
        let mut bad = Bad::new(&mut rig, ino);
        let mut want = Vec::new();
        for round in 0..60 {
            for _ in 0..random.below(6) {
                if !rig.detached.contains(&bad.hand.client) {
                    bad.step(&mut rig, &mut random);
                }
            }
            let data = vec![round as u8; 1 + random.below(6000) as usize];
            want.resize(want.len().max(data.len()), 0);
            want[..data.len()].copy_from_slice(&data);
            good.append_in(
                &mut rig,
                ino,
                &Op::Write { ino, offset: 0, data: &data, clear_setid: true },
            );
            if round % 8 == 0 {
                good.create(&mut rig, format!("good{round}").as_bytes(), 0o100_644);
            }
            good.sync(&mut rig);
            assert_eq!(rig.nodes[0].failure(), None);
            if rig.detached.contains(&bad.hand.client) || random.chance(1, 30) {
                bad.die(&mut rig);
                bad = Bad::new(&mut rig, ino);
            }
        }
        bad.die(&mut rig);
        rig.settle();
        assert_eq!(good.refusals(), 0, "the good client's operations all count");
        assert_eq!(read(&rig, b"good"), Some((0o100_600, want)));
        for round in (0..60).step_by(8) {
            let name = format!("good{round}");
            assert_eq!(read(&rig, name.as_bytes()), Some((0o100_644, Vec::new())));
        }
        let status = rig.nodes[0].status();
        assert_eq!(status.clients.len(), 1, "nothing is left of the hostile ones");
        (refused, bad_requests) =
            (refused + status.counters.refused, bad_requests + status.counters.bad_requests);
        expelled += status.counters.expelled;
        rig.check();
    }
    assert!(
        refused > 100 && bad_requests > 100 && expelled > 0,
        "{refused} {bad_requests} {expelled}"
    );
}

/// What a client asks for must not grow the service without bound.
#[test]
fn inode_numbers_are_not_handed_out_for_ever() {
    let mut rig = Rig::new(1, 1);
    let hand = rig.attach(0, BAD);
    for _ in 0..200 {
        hand.call(&mut rig, &Request::Inodes { count: u32::MAX }).ok();
    }
    assert!(rig.nodes[0].status().leases <= LEASE_SLOTS + 256);
}

/// A client that asks for the durability of what it never wrote does not keep the service awake.
#[test]
fn an_fsync_of_nothing_lets_the_service_sleep() {
    let mut rig = Rig::new(1, 1);
    let hand = rig.attach(0, BAD);
    hand.set(control::LAST_SEQUENCE, u64::MAX);
    hand.set(control::SYNC_REQUEST, u64::MAX);
    rig.event(0, Event::Doorbell(hand.client));
    for _ in 0..20 {
        rig.pass(1_000_000);
    }
    let mut slept = 0;
    for _ in 0..20 {
        rig.now += 100_000;
        rig.event(0, Event::Tick);
        if rig.nodes[0].prepare_to_sleep() {
            slept += 1;
        } else {
            rig.nodes[0].look_around(rig.now, &mut Vec::new());
        }
    }
    assert!(slept >= 10, "slept {slept} times of 20");
}

/// The largest entry there can be is taken like any other, also by way of another node's head.
#[test]
fn the_largest_entry_passes() {
    for n in 0..2 {
        let mut rig = Rig::new(2, 1);
        let mut hand = rig.attach(n, 0);
        let ino = hand.create(&mut rig, b"large", 0o100_644);
        let data = vec![7; PAYLOAD_MAX];
        hand.append(&Op::Write { ino, offset: 0, data: &data, clear_setid: false });
        hand.sync(&mut rig);
        rig.settle();
        assert_eq!(hand.refusals(), 0);
        assert_eq!(read(&rig, b"large").map(|(_, d)| d == data), Some(true));
        rig.check();
    }
}

/// Extended attributes are read by those who may read the file.
#[test]
fn attributes_of_others_are_not_read() {
    let mut rig = Rig::new(1, 1);
    let mut good = rig.attach(0, GOOD);
    let ino = good.create(&mut rig, b"good", 0o100_600);
    good.append(&Op::SetXattr { ino, name: b"user.secret", value: b"1234" });
    good.sync(&mut rig);
    let get = Request::XattrGet { ino, name: b"user.secret" };
    assert_eq!(good.call(&mut rig, &get), Ok(b"1234".to_vec()));
    let part = |name: &'static [u8], from| Request::XattrPart { ino, name, from };
    assert_eq!(good.call(&mut rig, &part(b"user.secret", 1)), Ok(b"234".to_vec()));
    let bad = rig.attach(0, BAD);
    for request in [get, part(b"user.secret", 0)] {
        assert_eq!(bad.call(&mut rig, &request), Err(base::Errno::ACCES));
    }
}

/// Who made a directory and owns it no more may not set its mode, not even to what it is. Seed 930818.
#[test]
fn a_mode_is_the_owners_to_set_also_to_what_it_is() {
    let mut rig = Rig::new(1, 1);
    let mut root = rig.attach(0, 0);
    let mut bad = rig.attach(0, BAD);
    let set = |ino, fields, mode, uid| {
        let (atime, mtime) = (Stamp::default(), Stamp::default());
        Op::SetAttr { ino, mask: fields, mode, uid, gid: 0, atime, mtime }
    };
    root.lease(&mut rig, InodeId::ROOT, LeaseMode::Write).expect("a lease");
    root.append_in(&mut rig, InodeId::ROOT, &set(InodeId::ROOT, mask::MODE, 0o777, 0));
    root.sync(&mut rig);
    for (name, kind) in [(&b"dir"[..], 0o040_777), (b"file", 0o100_777)] {
        let ino = bad.create(&mut rig, name, kind);
        bad.sync(&mut rig);
        root.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
        root.append_in(&mut rig, ino, &set(ino, mask::UID, 0, 0));
        root.sync(&mut rig);
        let before = bad.refusals();
        bad.append_in(&mut rig, ino, &set(ino, mask::MODE, 0o777, 0));
        bad.sync(&mut rig);
        assert_eq!(bad.refusals(), before + 1, "{}", String::from_utf8_lossy(name));
    }
}

/// `trusted.*` is the super-user's, also for those who ask the service by themselves.
#[test]
fn trusted_attributes_are_the_super_users() {
    let mut rig = Rig::new(1, 1);
    let mut root = rig.attach(0, 0);
    let ino = root.create(&mut rig, b"file", 0o100_644);
    for name in [&b"trusted.secret"[..], b"user.open"] {
        root.append(&Op::SetXattr { ino, name, value: b"1234" });
    }
    root.sync(&mut rig);
    let requests = [
        Request::XattrGet { ino, name: b"trusted.secret" },
        Request::XattrPart { ino, name: b"trusted.secret", from: 0 },
        Request::XattrList { ino },
        Request::XattrPart { ino, name: b"", from: 0 },
    ];
    let bad = rig.attach(0, BAD);
    let [all, open] = [&b"user.open\0trusted.secret\0"[..], b"user.open\0"];
    let sees = [Ok(&b"1234"[..]), Ok(b"1234"), Ok(all), Ok(all)];
    let may_see = [Err(base::Errno::NODATA), Err(base::Errno::NODATA), Ok(open), Ok(open)];
    for (request, (root_sees, bad_sees)) in requests.iter().zip(sees.into_iter().zip(may_see)) {
        assert_eq!(root.call(&mut rig, request).as_deref(), root_sees.as_ref().copied());
        assert_eq!(bad.call(&mut rig, request).as_deref(), bad_sees.as_ref().copied());
    }
}

/// What is longer than a reply is asked for in parts.
#[test]
fn long_attributes_come_in_parts() {
    let mut rig = Rig::new(1, 1);
    let mut good = rig.attach(0, GOOD);
    let ino = good.create(&mut rig, b"good", 0o100_600);
    let long: Vec<u8> =
        (0..storage::limits::XATTR_VALUE_MAX).map(|i| (i * 7 + i / 256) as u8).collect();
    good.append(&Op::SetXattr { ino, name: b"user.long", value: &long });
    let names: Vec<Vec<u8>> = (0..300).map(|n| format!("user.{n:0250}").into_bytes()).collect();
    for name in &names {
        good.append(&Op::SetXattr { ino, name, value: b"x" });
    }
    good.sync(&mut rig);
    let get = Request::XattrGet { ino, name: b"user.long" };
    assert_eq!(good.call(&mut rig, &get), Err(base::Errno::TOOBIG));
    assert_eq!(good.call(&mut rig, &Request::XattrList { ino }), Err(base::Errno::TOOBIG));
    let mut whole = |name: &'static [u8]| {
        let mut whole: Vec<u8> = Vec::new();
        loop {
            let from = u32::try_from(whole.len()).unwrap();
            let part = good.call(&mut rig, &Request::XattrPart { ino, name, from }).unwrap();
            if part.is_empty() {
                return whole;
            }
            whole.extend_from_slice(&part);
        }
    };
    assert!(whole(b"user.long") == long);
    let listed = whole(b"");
    let mut listed: Vec<&[u8]> = listed.strip_suffix(b"\0").unwrap().split(|b| *b == 0).collect();
    listed.sort_unstable();
    let mut wanted: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    wanted.push(b"user.long");
    wanted.sort_unstable();
    assert!(listed == wanted);
}
