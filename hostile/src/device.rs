//! A guest's rings and memory, as it likes them, in front of a virtio-fs device. Input: a script that writes into the guest's memory,
//! describes pieces, puts requests down and makes heads available; its monitor stops the queue, and has logged what is written, in a log of
//! any size. Whatever they do, the device comes to an end and goes on, and nothing is written behind the log.

use std::fs::File;
use std::sync::Arc;

use client::null::NullFs;
use frontend::fuse::wire::{InitIn, WriteIn, op};
use frontend::fuse::{ReplySink, wire::InHeader};
use virtiofs::device::{Device, Options, Scratch};
use virtiofs::dirty::Log;
use virtiofs::hal::Queue;
use virtiofs::memory::{Memory, Region};
use virtiofs::vring::{Marks, Vring};
use zerocopy::IntoBytes;

use crate::input::Input;

/// Guest addresses, and those that the monitor knows the same memory by.
const BASE: u64 = 0x1000_0000;
const USER: u64 = 0x7000_0000_0000;
const BYTES: u64 = 64 << 10;
/// Descriptors, and where the rings lie.
const SIZE: u16 = 16;
const AVAIL: u64 = 0x200;
const USED: u64 = 0x300;
/// A log of dirty pages that has room for the guest's, and the file that it lies in.
const LOG_BYTES: u64 = (BASE + BYTES).div_ceil(8 * 4096);
const LOG_FILE_BYTES: u64 = LOG_BYTES + 4096;
/// A guest that makes heads available without end has all of them taken, and this is a target.
const CHAINS_MAX: usize = 4096;

struct Nowhere;

impl ReplySink for Nowhere {
    fn payload(&mut self, _: usize) -> &mut [u8] {
        &mut []
    }

    fn send(&mut self, _: &[u8], _: usize) -> bool {
        true
    }
}

struct Guest {
    file: File,
    log: File,
    ring: Arc<Vring>,
    device: Arc<Device>,
    scratch: Scratch,
    next: u16,
    taken: usize,
}

fn header(opcode: u32, node: u64, len: usize) -> InHeader {
    InHeader {
        len: (len as u32).into(),
        opcode: opcode.into(),
        unique: 2.into(),
        nodeid: node.into(),
        ..InHeader::default()
    }
}

impl Guest {
    fn new(input: &mut Input<'_>) -> Self {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(fd.expect("memory"));
        file.set_len(BYTES).expect("memory");
        let region = |from: u64, len: u64| {
            let part = Region { guest: BASE + from, len, user: USER + from, offset: from };
            (part, file.try_clone().expect("a descriptor"))
        };
        let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC);
        let log = File::from(fd.expect("memory"));
        log.set_len(LOG_FILE_BYTES).expect("memory");
        // In one piece, or in two that meet where the pages do.
        let regions = if input.flag() {
            vec![region(0, BYTES / 2), region(BYTES / 2, BYTES / 2)]
        } else {
            vec![region(0, BYTES)]
        };
        let memory = Arc::new(Memory::new(regions).expect("good regions"));
        let ring = Vring::new(1).expect("a queue");
        ring.set_memory(memory);
        ring.set_event_index(input.flag());
        ring.set_size(SIZE.into()).expect("a good size");
        ring.set_addresses(USER, USER + AVAIL, USER + USED, None).expect("good addresses");
        let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
        ring.start(Some(File::from(kick.expect("a descriptor"))), None).expect("a queue");
        ring.set_enabled(true);
        let mut options = Options::default();
        (options.guest.nodes_max, options.guest.handles_max) = (64, 16);
        let device = Device::new(Arc::new(NullFs::default()), options);
        let arg = InitIn { major: 7.into(), minor: 41.into(), ..InitIn::default() };
        let len = size_of::<InHeader>() + arg.as_bytes().len();
        let init = [header(op::INIT, 0, len).as_bytes(), arg.as_bytes()].concat();
        device.server().handle(&init, &mut Nowhere);
        assert!(device.server().is_ready());
        Self { file, log, ring, device, scratch: Scratch::default(), next: 0, taken: 0 }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let end = BYTES.saturating_sub(at).min(bytes.len() as u64) as usize;
        std::os::unix::fs::FileExt::write_all_at(&self.file, &bytes[..end], at).expect("memory");
    }

    fn offer(&mut self, head: u16) {
        self.put(AVAIL + 4 + 2 * u64::from(self.next % SIZE), &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        self.put(AVAIL + 2, &self.next.to_le_bytes());
    }

    /// The monitor changes its mind about the log: not at all, none, one that comes later, one that is too short, or the whole.
    fn set_marks(&self, turn: u8, used_in_log: u64) {
        let marks = match turn {
            0 => return,
            1 => Marks::Off,
            2 => Marks::Awaited,
            _ => {
                let len = if turn == 3 { LOG_BYTES - 1 } else { LOG_BYTES };
                let log = self.log.try_clone().expect("a descriptor");
                Marks::On(Arc::new(Log::map(log, 0, len).expect("a log that is there")))
            }
        };
        let used_in_log = (used_in_log != 0).then_some(used_in_log);
        let set = self.ring.set_addresses(USER, USER + AVAIL, USER + USED, used_in_log);
        set.expect("good addresses");
        self.ring.set_marks(marks);
    }

    /// Nothing is marked behind the log.
    fn check_log(&self) {
        let mut behind = vec![0; (LOG_FILE_BYTES - LOG_BYTES) as usize];
        std::os::unix::fs::FileExt::read_exact_at(&self.log, &mut behind, LOG_BYTES).expect("log");
        assert!(behind.iter().all(|byte| *byte == 0));
    }

    fn pump(&mut self) {
        while self.taken < CHAINS_MAX {
            let Some(chain) = self.ring.next() else { return };
            self.taken += 1;
            self.device.serve(chain, &mut self.scratch);
        }
    }
}

/// The target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut guest = Guest::new(&mut input);
    while !input.is_empty() {
        match input.below(5) {
            0 => {
                let at = u64::from(input.u16());
                guest.put(at, input.piece());
            }
            1 => {
                // A descriptor: of the ring's table, or of one somewhere.
                let table = if input.flag() { u64::from(input.u16()) } else { 0 };
                let index = u64::from(input.u8() % 32);
                let address = match input.u8() {
                    255 => input.odd(),
                    high => BASE + u64::from(high) * 256,
                };
                let len = if input.flag() { input.odd() as u32 } else { input.u16().into() };
                let (flags, next) = (u16::from(input.u8() & 7), u16::from(input.u8() % 20));
                let mut raw = address.to_le_bytes().to_vec();
                raw.extend(len.to_le_bytes());
                raw.extend(flags.to_le_bytes());
                raw.extend(next.to_le_bytes());
                guest.put(table + 16 * index, &raw);
            }
            2 => {
                let at = u64::from(input.u8()) * 256;
                let (opcode, node) = (u32::from(input.u8() % 54), u64::from(input.u8() % 8));
                let body = input.piece();
                let header = header(opcode, node, size_of::<InHeader>() + body.len());
                guest.put(at, &[header.as_bytes(), body].concat());
            }
            3 => {
                let count = 1 + input.below(4);
                (0..count).for_each(|_| guest.offer(u16::from(input.u8() % 18)));
                guest.pump();
            }
            _ => {
                // The monitor stops the queue, and starts it where it was, or where the script says. The log changes first, for
                // what comes back while it stops.
                let turn = input.u8();
                let used_in_log = if turn & 0x10 == 0 { 0 } else { input.odd() };
                guest.set_marks(turn >> 1 & 7, used_in_log);
                let at = guest.ring.stop_at();
                guest.ring.set_base(if turn & 1 == 1 { at } else { input.u16() });
                let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
                let _ = guest.ring.start(kick.ok().map(File::from), None);
            }
        }
    }
    // It is still there (unless the guest said DESTROY, which is its right).
    guest.ring.reset();
    guest.check_log();
    assert!(guest.taken <= CHAINS_MAX);
}

/// Scripts of what a guest does.
pub fn seeds() -> Vec<Vec<u8>> {
    let describe = |index: u8, page: u8, len: u16, flags: u8, next: u8| {
        let len = len.to_le_bytes();
        vec![1, 0, index, page, 0, len[0], len[1], flags, next]
    };
    let request = |page: u8, opcode: u32, node: u8, body: &[u8]| {
        let mut script = vec![2, page, opcode as u8, node, body.len() as u8];
        script.extend_from_slice(body);
        script
    };
    let ask = |opcode: u32, node: u8, body: &[u8]| {
        let len = (size_of::<InHeader>() + body.len()) as u16;
        [
            request(16, opcode, node, body),
            describe(0, 16, len, 1, 1),
            describe(1, 32, 4096, 2, 0),
            vec![3, 0, 0],
        ]
        .concat()
    };
    let create: Vec<u8> = [&[2, 0, 0, 0, 0xa4, 1, 0, 0][..], &[0; 8], b"file\0"].concat();
    let write = WriteIn { fh: 1.into(), size: 64.into(), ..WriteIn::default() };
    let write = [write.as_bytes(), &[7; 64]].concat();
    let mut all: Vec<Vec<u8>> = vec![
        ask(op::LOOKUP, 1, b"x\0"),
        ask(op::GETATTR, 1, &[0; 16]),
        [ask(op::CREATE, 1, &create), ask(op::WRITE, 3, &write)].concat(),
        [ask(op::CREATE, 1, &create), ask(op::READ, 3, &[0; 40])].concat(),
        ask(op::MKDIR, 1, &[&[0xed, 1, 0, 0, 0, 0, 0, 0][..], b"d\0"].concat()),
        ask(op::FORGET, 1, &[1, 0, 0, 0, 0, 0, 0, 0]),
        [ask(op::STATFS, 1, &[]), vec![4, 1], ask(op::STATFS, 1, &[])].concat(),
        // With a log that comes late, one that is too short, and a ring that is marked elsewhere.
        [vec![4, 5], ask(op::GETATTR, 1, &[0; 16]), vec![4, 7], ask(op::STATFS, 1, &[])].concat(),
        [vec![4, 9], ask(op::CREATE, 1, &create), ask(op::READ, 3, &[0; 40])].concat(),
        [vec![4, 0x19, 0x1a], ask(op::STATFS, 1, &[]), vec![4, 3]].concat(),
    ];
    // In a table of its own, and in a ring.
    let mut indirect = request(16, op::GETATTR, 1, &[0; 16]);
    indirect.extend([1, 1, 0, 0x40, 0, 16, 0, 56, 0, 1, 1]);
    indirect.extend([1, 1, 0, 0x40, 1, 32, 0, 0, 16, 2, 0]);
    indirect.extend(describe(0, 64, 32, 4, 0));
    indirect.extend([3, 0, 0]);
    all.push(indirect);
    all.push([describe(0, 16, 64, 1, 1), describe(1, 16, 64, 1, 0), vec![3, 1, 0, 1]].concat());
    // The first two bytes: regions, event index.
    all.iter_mut().zip(0u8..).for_each(|(script, n)| {
        let mut whole = vec![n & 1, n >> 1 & 1];
        whole.append(script);
        *script = whole;
    });
    all
}
