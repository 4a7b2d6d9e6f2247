//! The log of dirty pages: whatever a device writes into its guest's memory is in it, a guest moves with what was copied by it, and no
//! monitor's log is too wrong. Seeds are printed; `SEED=N` runs one.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use base::random::Random;
use client::dir::{self, DirFs};
use client::fs::{FileSystem, Handle, Result};
use common::process::{self, Process};
use common::{Host, create, read_in, scratch, write_in};
use frontend::fuse::wire::*;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use virtiofs::device::{Device, Options, Scratch};
use virtiofs::driver::{BASE, Config, DirtyLog, Driver, DriverQueue, PAGE, flag};
use virtiofs::hal::{Chain, Queue, scatter};
use virtiofs::tenant::{self, Tenant};
use virtiofs::transfer::{Key, Seal};
use virtiofs::vring::Vrings;
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;
const PAGE_BYTES: u64 = PAGE as u64;

/// Not a test: the device, as a process.
#[test]
fn device_process() {
    process::body();
}

fn seed() -> Option<u64> {
    std::env::var("SEED").ok().and_then(|seed| seed.parse().ok())
}

fn dir_of(root: &std::path::Path) -> DirFs {
    let path = root.join("shared");
    DirFs::open(path.to_str().unwrap().as_bytes(), dir::Options::default()).unwrap()
}

fn seal(root: &std::path::Path) -> Seal {
    let tenant = Tenant::new(Arc::new(dir_of(root)), b"/", tenant::Options::default()).unwrap();
    Key::new(&[7; 32], "one").unwrap().seal(&tenant).unwrap()
}

/// A device that may be moved.
fn keyed() -> Host {
    let root = scratch();
    let seal = Some(seal(&root));
    Host::of(Arc::new(dir_of(&root)), Options { seal, ..Options::default() }, root)
}

/// Reads in place fail when they are done, where they begin at an odd offset: what they left in memory is no reply.
struct Torn {
    inner: DirFs,
}

impl FileSystem for Torn {
    fn read_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        let len = self.inner.read_pieces(handle, offset, pieces)?;
        if offset.is_multiple_of(2) { Ok(len) } else { Err(base::Errno::IO) }
    }

    client::pass_on! { inner:
        lookup getattr setattr readlink mknod unlink rmdir rename link open create read write
        fallocate lseek fgetattr fsync fsync_inode forget release readdir statfs getxattr listxattr
        setxattr removexattr keeps
    }
}

/// Pages from an address on.
fn pages(at: u64, len: usize) -> std::ops::RangeInclusive<u64> {
    at / PAGE_BYTES..=(at + len as u64 - 1) / PAGE_BYTES
}

/// A device without threads: what it does, it does when it is told to.
struct Hand {
    rings: Arc<Vrings>,
    device: Arc<Device>,
    scratch: Scratch,
    guest: Driver,
    log: DirtyLog,
    config: Config,
    /// Memory as it was at the last look.
    seen: Vec<u8>,
    /// Pages that were found changed.
    changed: BTreeSet<u64>,
    /// Chains whose replies come later.
    later: Vec<Box<dyn Chain>>,
    enabled: bool,
}

impl Hand {
    fn new(config: Config) -> Self {
        let root = scratch();
        let options = Options { seal: Some(seal(&root)), ..Options::default() };
        let device = Device::new(Arc::new(Torn { inner: dir_of(&root) }), options);
        let rings = virtiofs::vhost::rings("test", config.queues).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (served, behind) = (rings.clone(), device.clone());
        std::thread::spawn(move || virtiofs::vhost::serve(&served, Some(&behind), None, theirs));
        let guest = Driver::over(ours, config).unwrap();
        let log = DirtyLog::new(guest.log_bytes()).unwrap();
        let (scratch, seen) = (Scratch::default(), Vec::new());
        let (changed, later) = (BTreeSet::new(), Vec::new());
        let mut hand = Self {
            rings,
            device,
            scratch,
            guest,
            log,
            config,
            seen,
            changed,
            later,
            enabled: true,
        };
        let arg = InitIn {
            major: 7.into(),
            minor: 41.into(),
            flags: u32::MAX.into(),
            ..InitIn::default()
        };
        hand.call(op::INIT, 0, &[arg.as_bytes(), InitInExt::default().as_bytes()], &[]);
        let whole = hand.log.region(0, hand.guest.log_bytes() as u64);
        hand.guest.set_log(whole).unwrap();
        hand.guest.log(true).unwrap();
        hand
    }

    fn call(&mut self, opcode: u32, node: u64, parts: &[&[u8]], data: &[u8]) -> Vec<u8> {
        let request = self.guest.request(opcode, node, parts, data.len());
        let q = &mut self.guest.queues[1];
        let head = q.prepare(0, &request, data, PAGE, 0);
        q.offer(head);
        let chain = self.rings.all[1].next().unwrap();
        self.device.serve(chain, &mut self.scratch);
        let (_, written) = self.guest.queues[1].pop().unwrap();
        let reply = self.guest.reply(1, 0, written, PAGE).unwrap();
        assert_eq!(reply.error, 0);
        reply.body
    }

    /// Everything that has changed since the last look was in the log, and what was in it may have changed.
    fn look(&mut self, what: &str) {
        let now = self.guest.copy();
        let q = &self.guest.queues[1];
        let mut may: BTreeSet<u64> = pages(q.used, 6 + 8 * usize::from(q.size)).collect();
        for slot in 0..self.config.slots {
            let (_, reply, data, _) = q.slot(slot);
            may.extend(pages(reply, PAGE).chain(pages(data, self.config.data)));
        }
        let marked: BTreeSet<u64> = self.log.take().into_iter().collect();
        let beside: Vec<_> = marked.difference(&may).collect();
        assert!(beside.is_empty(), "{what}: pages {beside:?} were not written");
        let both = self.seen.chunks_exact(PAGE).zip(now.chunks_exact(PAGE));
        for (page, _) in (BASE / PAGE_BYTES..).zip(both).filter(|(_, (then, now))| then != now) {
            assert!(marked.contains(&page), "{what}: page {page:#x} has changed and is not marked");
            self.changed.insert(page);
        }
        self.seen = now;
    }

    /// The guest has written; the device has not.
    fn begin(&mut self) {
        self.seen = self.guest.copy();
        let marked = self.log.take();
        assert!(marked.is_empty(), "pages {marked:?} were not written");
    }

    /// A request of some kind in each slot.
    fn offer(&mut self, random: &mut Random, node: u64, fh: u64) {
        for slot in 0..self.config.slots {
            let (_, reply_at, data_at, _) = self.guest.queues[1].slot(slot);
            let junk = vec![random.next_u64() as u8; self.config.data];
            self.guest.queues[1].put_bytes(&junk[..PAGE], reply_at);
            self.guest.queues[1].put_bytes(&junk, data_at);
            let room = 1 + random.below(self.config.data as u64) as usize;
            let at = random.below(100_000) as usize;
            let name = format!("n{}\0", random.below(200));
            let list = read_in(0, 0, room);
            let (opcode, node, body, data, room): (_, _, Vec<u8>, &[u8], _) = match random.below(8)
            {
                0 | 1 => (op::READ, node, read_in(fh, at, room), &[], room),
                2 => (op::WRITE, node, write_in(fh, at, room), &junk[..room], 0),
                3 => (op::GETATTR, ROOT, GetattrIn::default().as_bytes().to_vec(), &[], 0),
                4 => (op::LOOKUP, ROOT, name.into_bytes(), &[], 0),
                5 => {
                    let make = MkdirIn { mode: 0o755.into(), ..MkdirIn::default() };
                    (op::MKDIR, ROOT, [make.as_bytes(), name.as_bytes()].concat(), &[], 0)
                }
                // Of a directory that was not opened: an error, where there was room for much.
                6 => (op::READDIR, ROOT, list, &[], room),
                _ => (op::FORGET, 77, vec![0; 8], &[], 0),
            };
            let mut request = self.guest.request(opcode, node, &[&body], data.len());
            request.truncate(if random.below(16) == 0 { 12 } else { usize::MAX });
            let reply = [PAGE, 16, 20, 0][random.below(4) as usize];
            let q = &mut self.guest.queues[1];
            let head = q.prepare(slot, &request, data, reply, room);
            if random.below(4) == 0 {
                // Where nothing is aligned: the reply begins at the end of one page, and ends on another.
                let second = if self.config.indirect { 512 + slot as u16 } else { head + 1 };
                let from = data_at + random.below(3 * PAGE_BYTES);
                let len = 1 + random.below(2 * PAGE_BYTES) as u32;
                q.describe(q.table, head, q.slot(slot).0, 40, flag::NEXT, second);
                q.describe(q.table, second, from, len, flag::WRITE, 0);
            }
            if random.below(30) == 0 {
                // A chain that is none comes back at once.
                q.describe(q.table, head, 5, 40, 0, 0);
            }
            q.offer(head);
        }
        let q = &self.guest.queues[1];
        // What the device writes here is seen, whatever it was.
        q.put(0u16, q.used);
        q.put(random.next_u64() as u16, q.used + 4 + 8 * u64::from(q.size));
    }

    /// Some part of a chain is written, as by a device that then says, or does not say, how much.
    fn by_hand(&mut self, random: &mut Random, mut chain: Box<dyn Chain>) {
        let room: usize = chain.writable().iter().map(|piece| piece.len()).sum();
        let len = random.below(room as u64 + 1) as usize;
        let bytes = vec![random.next_u64() as u8; len];
        match random.below(4) {
            0 => {
                scatter(&bytes, chain.writable());
                chain.complete(len as u32);
            }
            1 => {
                chain.touches(len);
                scatter(&bytes, chain.writable());
                chain.complete(0);
            }
            2 => {
                chain.touches(len);
                scatter(&bytes, chain.writable());
                drop(chain);
            }
            _ => {
                chain.touches(len);
                scatter(&bytes, chain.writable());
                chain.put_off();
                self.later.push(chain);
            }
        }
    }

    /// The device does one thing; what.
    fn step(&mut self, random: &mut Random) -> Option<&'static str> {
        let ring = self.rings.all[1].clone();
        Some(match random.below(8) {
            0 if self.enabled => {
                self.guest.queues[1].kick_anyway();
                ring.wait(Duration::ZERO);
                "a wait"
            }
            1 if !self.later.is_empty() => {
                let at = random.below(self.later.len() as u64) as usize;
                let len = random.below(2 * PAGE_BYTES) as usize;
                self.later.swap_remove(at).reply(&vec![random.next_u64() as u8; len]);
                "a late reply"
            }
            2 => {
                self.enabled = !self.enabled;
                ring.set_enabled(self.enabled);
                "a pause"
            }
            turn => {
                let Some(chain) = ring.next() else {
                    let idle = self.enabled && self.later.is_empty();
                    return if idle { None } else { Some("nothing") };
                };
                if turn < 5 {
                    self.by_hand(random, chain);
                    "a chain"
                } else {
                    self.device.serve(chain, &mut self.scratch);
                    "a request"
                }
            }
        })
    }
}

fn history(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    // The used ring has three pages: the index is on the first, where it is to kick on the last.
    let (indirect, event_index) = (random.below(2) == 0, seed.is_multiple_of(2));
    let config = Config { size: 1024, indirect, event_index, ..Config::default() };
    let mut hand = Hand::new(config);
    let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
    let made = hand.call(op::CREATE, ROOT, &[arg.as_bytes(), b"file\0"], &[]);
    let (entry, rest) = EntryOut::read_from_prefix(&made).unwrap();
    let (node, fh) = (entry.nodeid.get(), OpenOut::read_from_prefix(rest).unwrap().0.fh.get());
    let bytes: Vec<u8> = (0..64 << 10).map(|_| random.next_u64() as u8).collect();
    hand.call(op::WRITE, node, &[&write_in(fh, 0, bytes.len())], &bytes);
    hand.log.take();
    for _ in 0..140 {
        hand.offer(&mut random, node, fh);
        hand.begin();
        while let Some(what) = hand.step(&mut random) {
            hand.look(what);
        }
        hand.look("the end");
        for _ in 0..config.slots {
            hand.guest.queues[1].pop().expect("a head that did not come back");
        }
        assert!(hand.guest.queues[1].pop().is_none());
    }
    let q = &hand.guest.queues[1];
    let used = pages(q.used, 6 + 8 * 1024);
    let last = if event_index { 3 } else { 2 };
    assert!(used.take(last).all(|page| hand.changed.contains(&page)), "not all was tried");
}

#[test]
fn all_that_is_written_is_marked() {
    if let Some(seed) = seed() {
        return history(seed);
    }
    let first = u64::from(std::process::id());
    (first..first + 4).for_each(history);
}

/// What the next device has to begin again is what was taken and has no answer: not what somebody has dropped, however often a guest asks.
#[test]
fn only_what_has_no_answer_is_begun_again() {
    let mut hand = Hand::new(Config { slots: 4, ..Config::default() });
    for _ in 0..3 {
        let mut heads = Vec::new();
        let mut taken: Vec<Box<dyn Chain>> = Vec::new();
        for slot in 0..4 {
            let request = hand.guest.request(op::STATFS, ROOT, &[], 0);
            let q = &mut hand.guest.queues[1];
            let head = q.prepare(slot, &request, &[], PAGE, 0);
            q.offer(head);
            heads.push(head);
            taken.push(hand.rings.all[1].next().unwrap());
        }
        assert!(hand.rings.begun().is_err(), "they are served");
        taken.iter_mut().for_each(|chain| chain.put_off());
        let all: Vec<(u16, u16)> = heads.iter().map(|head| (1, *head)).collect();
        assert_eq!(hand.rings.begun().unwrap(), all);
        let [dropped, completed, replied, left] = <[_; 4]>::try_from(taken).ok().unwrap();
        drop(dropped);
        completed.complete(0);
        replied.reply(&[0; 16]);
        assert_eq!(hand.rings.begun().unwrap(), [(1, heads[3])]);
        drop(left);
        assert_eq!(hand.rings.begun().unwrap(), []);
        while hand.guest.queues[1].pop().is_some() {}
    }
}

/// The pages that the guest writes itself, which its own machine knows: rings, requests, tables, and what is written to files.
fn own_pages(q: &DriverQueue, config: &Config) -> Vec<u64> {
    let size = usize::from(q.size);
    let mut own: Vec<u64> = pages(q.table, 16 * size).chain(pages(q.avail, 6 + 2 * size)).collect();
    for slot in 0..config.slots {
        let (request, _, data, table) = q.slot(slot);
        own.extend(pages(request, PAGE).chain(pages(table, PAGE)));
        if slot % 2 == 1 {
            own.extend(pages(data, config.data));
        }
    }
    own
}

fn put_pages(guest: &Driver, copy: &mut [u8], pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        let at = page * PAGE_BYTES;
        let to = (at - BASE) as usize;
        copy[to..to + PAGE].copy_from_slice(&guest.queues[0].get_bytes(at, PAGE));
    }
}

/// What byte of a file has that number.
fn byte_at(at: usize) -> u8 {
    ((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

/// A guest is moved while its requests are under way: its memory is copied while it runs, and again where it is dirty, until it
/// stands still; then nothing is other than it is. On the other side it goes on.
fn moves(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    let mut from = Process::keyed();
    let to = from.beside();
    let (indirect, event_index) = (random.below(2) == 0, random.below(2) == 0);
    let size = [256, 1024][random.below(2) as usize];
    let config = Config { queues: 2, size, indirect, event_index, ..Config::default() };
    let mut guest = Driver::over(from.connect(), config).unwrap();
    guest.init().unwrap();
    let (node, fh) = create(&mut guest, 1, ROOT, b"read");
    let (out, out_fh) = create(&mut guest, 1, ROOT, b"written");
    let len = 1 << 20;
    let bytes: Vec<u8> = (0..len).map(byte_at).collect();
    for (at, part) in (0..).step_by(config.data).zip(bytes.chunks(config.data)) {
        let head = write_in(fh, at, part.len());
        assert_eq!(guest.call_on(1, op::WRITE, node, &[&head], part, 0).unwrap().error, 0);
    }
    // What was asked, by queue and slot: where in the file, and how much. Slots with odd numbers write, the others read.
    let mut under_way: BTreeMap<(usize, usize), (usize, usize)> = BTreeMap::new();
    let mut ask = |guest: &mut Driver, queue: usize, slot: usize| {
        let size = 1 + random.below(config.data as u64) as usize;
        let at = random.below((len - size) as u64) as usize;
        let (request, data, reply, room) = if slot % 2 == 1 {
            let data: Vec<u8> = (at..at + size).map(byte_at).collect();
            (guest.request(op::WRITE, out, &[&write_in(out_fh, at, size)], size), data, PAGE, 0)
        } else {
            let data = Vec::new();
            (guest.request(op::READ, node, &[&read_in(fh, at, size)], 0), data, 16, size)
        };
        let q = &mut guest.queues[queue];
        let head = q.prepare(slot, &request, &data, reply, room);
        q.offer(head);
        q.notify();
        (at, size)
    };
    let check = |guest: &Driver, queue: usize, head: u16, written: u32, asked: (usize, usize)| {
        let slot = guest.queues[queue].slot_of(head);
        let reply = if slot % 2 == 1 { PAGE } else { 16 };
        let reply = guest.reply(queue, slot, written, reply).unwrap();
        assert_eq!(reply.error, 0);
        if slot.is_multiple_of(2) {
            let (at, size) = asked;
            assert!(reply.body == bytes[at..at + size], "{size} bytes at {at}");
        }
    };
    let log = DirtyLog::new(guest.log_bytes()).unwrap();
    let mut copy = Vec::new();
    for round in 0..40 {
        for queue in 1..=2 {
            while let Some((head, written)) = guest.queues[queue].pop() {
                let slot = guest.queues[queue].slot_of(head);
                let asked = under_way.remove(&(queue, slot)).expect("an answer to no request");
                check(&guest, queue, head, written, asked);
            }
            for slot in 0..config.slots {
                under_way.entry((queue, slot)).or_insert_with(|| ask(&mut guest, queue, slot));
            }
        }
        match round {
            0..5 => {}
            5 => {
                // While they are under way.
                guest.set_log(log.region(0, guest.log_bytes() as u64)).unwrap();
                guest.log(true).unwrap();
                copy = guest.copy();
            }
            _ => put_pages(&guest, &mut copy, log.take()),
        }
    }
    // Some are under way now; what was begun ends before the answer.
    guest.stop().unwrap();
    put_pages(&guest, &mut copy, log.take());
    for queue in 0..=2 {
        put_pages(&guest, &mut copy, own_pages(&guest.queues[queue], &config));
    }
    let now = guest.copy();
    let other: Vec<u64> = (BASE / PAGE_BYTES..)
        .zip(copy.chunks_exact(PAGE).zip(now.chunks_exact(PAGE)))
        .filter_map(|(page, (copied, now))| (copied != now).then_some(page))
        .collect();
    assert!(other.is_empty(), "pages {other:x?} were written and not marked");
    let state = guest.save().unwrap();
    assert!(log.take().is_empty(), "written when all stood still");
    let mut guest = guest.moved(&copy, to.connect()).unwrap();
    guest.load(&state).unwrap();
    guest.start().unwrap();
    from.kill();
    while let Some((queue, _)) = under_way.keys().next().copied() {
        let (head, written) = guest.queues[queue].wait().unwrap();
        let slot = guest.queues[queue].slot_of(head);
        let asked = under_way.remove(&(queue, slot)).expect("an answer to no request");
        check(&guest, queue, head, written, asked);
    }
    let read = guest.call_on(1, op::READ, node, &[&read_in(fh, 9, 99)], &[], 99).unwrap();
    assert_eq!((read.error, &*read.body), (0, &bytes[9..108]));
    // What was written is there, or is a hole.
    let written = std::fs::read(to.root.join("shared/written")).unwrap();
    assert!(written.iter().zip(&bytes).all(|(is, was)| is == was || *is == 0));
    assert!(written.iter().any(|byte| *byte != 0));
}

#[test]
fn a_guest_moves_with_its_memory() {
    if let Some(seed) = seed() {
        return moves(seed);
    }
    let first = u64::from(std::process::id());
    (first..first + 4).for_each(moves);
}

fn getattr(guest: &mut Driver) {
    let asked =
        guest.call_on(1, op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], &[], 0).unwrap();
    assert_eq!(asked.error, 0);
}

/// Pages of the reply of a request in the first slot, and of the used ring.
fn is_logged(guest: &Driver, log: &DirtyLog) -> bool {
    let q = &guest.queues[1];
    let marked = log.take();
    let both = [q.used, q.slot(0).1].map(|at| marked.contains(&(at / PAGE_BYTES)));
    assert_eq!(both[0], both[1]);
    both[0]
}

#[test]
fn a_log_that_is_not_there_is_refused() {
    let host = keyed();
    let mut guest = host.guest(Config::default());
    let log = DirtyLog::new(3 * PAGE).unwrap();
    for (offset, bytes) in [
        (0, 3 * PAGE_BYTES + 1),
        (0, 1 << 40),
        (PAGE_BYTES, 3 * PAGE_BYTES),
        (u64::MAX - PAGE_BYTES + 1, PAGE_BYTES - 1),
        (u64::MAX - 7, 8),
        (1 << 63, 1 << 62),
        (1, 8),
        (0, 0),
    ] {
        assert!(guest.set_log(log.region(offset, bytes)).is_err(), "{bytes} at {offset}");
        // It was hung up on, since what it asked has no answer that says no.
        guest.reconnect(host.connect()).unwrap();
        getattr(&mut guest);
    }
    assert!(log.take().is_empty());
}

#[test]
fn what_the_log_has_no_room_for_is_written_all_the_same() {
    let host = keyed();
    for event_index in [false, true] {
        let mut guest = host.guest(Config { event_index, ..Config::default() });
        let file = DirtyLog::new(guest.log_bytes() + 2 * PAGE).unwrap();
        // Eight bytes, and all behind them is the monitor's own.
        guest.set_log(file.region(PAGE_BYTES, 8)).unwrap();
        guest.log(true).unwrap();
        getattr(&mut guest);
        let (node, fh) = create(&mut guest, 1, ROOT, b"file");
        guest.call_on(1, op::READ, node, &[&read_in(fh, 0, PAGE)], &[], PAGE).unwrap();
        assert!(file.take().is_empty());
        // A ring that is marked nowhere.
        for address in [u64::MAX, u64::MAX - 3, 1 << 63, u64::MAX - 2050] {
            guest.set_addresses(1, Some(address)).unwrap();
            getattr(&mut guest);
        }
        // And one that is marked where no memory is.
        guest.set_addresses(1, Some(3 * PAGE_BYTES)).unwrap();
        getattr(&mut guest);
        assert_eq!(file.take(), [8 * PAGE_BYTES + 3]);
        guest.hang_up();
    }
}

#[test]
fn logging_is_switched_while_queues_run() {
    let host = keyed();
    let mut guest = host.guest(Config::default());
    let bytes = guest.log_bytes();
    let (first, second) = (DirtyLog::new(bytes).unwrap(), DirtyLog::new(bytes).unwrap());
    guest.set_log(first.region(0, bytes as u64)).unwrap();
    getattr(&mut guest);
    assert!(!is_logged(&guest, &first));
    for _ in 0..3 {
        guest.log(true).unwrap();
        getattr(&mut guest);
        assert!(is_logged(&guest, &first));
        // Another one: nothing comes to the one before.
        guest.set_log(second.region(0, bytes as u64)).unwrap();
        first.take();
        getattr(&mut guest);
        assert!(is_logged(&guest, &second) && first.take().is_empty());
        guest.log(false).unwrap();
        second.take();
        getattr(&mut guest);
        assert!(!is_logged(&guest, &second) && first.take().is_empty());
        guest.set_log(first.region(0, bytes as u64)).unwrap();
    }
    // Whoever comes next wants nothing logged until it says so.
    guest.log(true).unwrap();
    guest.hang_up();
    let mut guest = host.guest(Config::default());
    first.take();
    getattr(&mut guest);
    assert!(first.take().is_empty());
}

/// QEMU begins so when a device is started among a migration: nobody knows any more what was written until the log came.
#[test]
fn all_is_dirty_when_the_log_comes_late() {
    let host = keyed();
    let mut guest = host.guest(Config::default());
    let bytes = guest.log_bytes();
    let log = DirtyLog::new(bytes).unwrap();
    guest.log(true).unwrap();
    getattr(&mut guest);
    guest.set_log(log.region(0, bytes as u64)).unwrap();
    let all = guest.copy().len() as u64 / PAGE_BYTES;
    let marked: BTreeSet<u64> = log.take().into_iter().collect();
    assert!((BASE / PAGE_BYTES..BASE / PAGE_BYTES + all).all(|page| marked.contains(&page)));
    // Only then.
    getattr(&mut guest);
    assert!(log.take().len() < 10);
    guest.set_log(log.region(0, bytes as u64)).unwrap();
    assert!(log.take().len() < 10);
}

#[test]
fn a_device_without_a_key_logs_nothing() {
    let host = Host::dir();
    let mut guest = host.guest(Config::default());
    let log = DirtyLog::new(guest.log_bytes()).unwrap();
    assert!(guest.frontend.get_features().unwrap() & (1 << 26) == 0);
    assert!(guest.log(true).is_err(), "a feature that was not offered");
    let mut guest = host.guest(Config::default());
    let protocol = guest.frontend.get_protocol_features().unwrap();
    assert!(!protocol.intersects(Protocol::LOG_SHMFD | Protocol::DEVICE_STATE));
    // Nor does saying that it is agreed make it so.
    guest.frontend.set_protocol_features(Protocol::LOG_SHMFD | Protocol::REPLY_ACK).unwrap();
    assert!(guest.set_log(log.region(0, 8)).is_err());
    guest.reconnect(host.connect()).unwrap();
    getattr(&mut guest);
}
