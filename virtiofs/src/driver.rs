//! The other side of a device, without a virtual machine: what a monitor and a guest's driver do, in memory of our own. For tests
//! and benches; it can also do what no decent driver does.
#![allow(unsafe_code)] // a descriptor that is only known by its number

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::time::{Duration, Instant};

use frontend::fuse::wire::{InHeader, InitIn, InitInExt, OutHeader, op};
use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::mmap::MmapRegion;
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

/// Where the guest's memory begins. Not at 0, so that a device which does not add it is found.
pub const BASE: u64 = 0x4000_0000;
/// Bytes of a page, of which long data are made.
pub const PAGE: usize = 4096;
/// Whoever waits longer for a reply has found a fault.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long KVM looks for something to do for a virtual processor that has halted (`halt_poll_ns` of its module, as it is on x86).
pub const HALT_POLL: Duration = Duration::from_micros(200);

/// Flags of a descriptor.
pub mod flag {
    /// Another one follows.
    pub const NEXT: u16 = 1;
    /// The device writes to it.
    pub const WRITE: u16 = 2;
    /// It is a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
const LOG_ALL: u64 = 1 << 26;
/// A ring's flag: what the device writes to its used ring is logged as well.
const VRING_LOG: u32 = 1;

/// What the driver uses of the device.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Request queues, beside the first one.
    pub queues: usize,
    /// Descriptors of each.
    pub size: u16,
    /// Requests at once in a queue; each has memory of its own.
    pub slots: usize,
    /// Bytes of data of a request at most.
    pub data: usize,
    /// Tables of descriptors in place of chains.
    pub indirect: bool,
    /// Indices of interest in place of flags.
    pub event_index: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { queues: 1, size: 256, slots: 8, data: 16 * PAGE, indirect: true, event_index: true }
    }
}

/// A failure in words.
pub type Result<T> = std::result::Result<T, String>;

fn text(what: &str) -> impl Fn(vhost::Error) -> String + '_ {
    move |error| format!("{what}: {error}")
}

fn io_text(what: &str) -> impl Fn(std::io::Error) -> String + '_ {
    move |error| format!("{what}: {error}")
}

/// One queue of the driver.
pub struct DriverQueue {
    map: Arc<GuestMemoryMmap<()>>,
    /// Descriptors.
    pub size: u16,
    /// Address of the table.
    pub table: u64,
    /// Address of the avail ring.
    pub avail: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Of the slots' memory: request, reply, data, table.
    slots: u64,
    config: Config,
    /// How long whoever waits for a reply looks for it before it sleeps. Zero, as it is at first: it sleeps at once. KVM looks on
    /// behalf of a virtual processor that has halted, for [`HALT_POLL`] at most, unless somebody else could run there.
    pub halt_poll: Duration,
    next_avail: u16,
    kicked_at: u16,
    next_used: u16,
    kick: EventFd,
    call: EventFd,
    /// Of the request that is put together.
    chain: Vec<u8>,
}

/// A descriptor, as it lies in a table.
fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

impl std::fmt::Debug for DriverQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DriverQueue").field("size", &self.size).finish_non_exhaustive()
    }
}

/// Bytes for the request without its data, and for the reply without its.
const HEAD: usize = PAGE;

impl DriverQueue {
    fn slot_bytes(config: &Config) -> usize {
        2 * HEAD
            + config.data.next_multiple_of(PAGE)
            + 16 * Self::chain_max(config).next_multiple_of(PAGE)
    }

    /// Descriptors of the longest chain.
    fn chain_max(config: &Config) -> usize {
        2 + config.data.div_ceil(PAGE)
    }

    /// Bytes of the rings and all slots.
    fn bytes(config: &Config) -> usize {
        let size = usize::from(config.size);
        let rings = 16 * size + (6 + 2 * size).next_multiple_of(PAGE) + (6 + 8 * size);
        rings.next_multiple_of(PAGE) + config.slots * Self::slot_bytes(config)
    }

    fn new(map: Arc<GuestMemoryMmap<()>>, at: u64, config: Config) -> Result<Self> {
        let size = u64::from(config.size);
        let avail = at + 16 * size;
        let used = avail + (6 + 2 * size).next_multiple_of(PAGE as u64);
        let slots = (used + 6 + 8 * size).next_multiple_of(PAGE as u64);
        let event =
            || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(io_text("eventfd"));
        if !config.indirect && Self::chain_max(&config) * config.slots > usize::from(config.size) {
            return Err("more slots than descriptors".into());
        }
        Ok(Self {
            map,
            size: config.size,
            table: at,
            avail,
            used,
            slots,
            config,
            halt_poll: Duration::ZERO,
            next_avail: 0,
            kicked_at: 0,
            next_used: 0,
            kick: event()?,
            call: event()?,
            chain: Vec::new(),
        })
    }

    /// Writes into the guest's memory.
    pub fn put<T: vm_memory::ByteValued>(&self, value: T, at: u64) {
        let _ = self.map.write_obj(value, GuestAddress(at));
    }

    /// Writes bytes into the guest's memory.
    pub fn put_bytes(&self, bytes: &[u8], at: u64) {
        let _ = self.map.write_slice(bytes, GuestAddress(at));
    }

    /// Reads a value from the guest's memory; zeroes where there is none.
    pub fn get<T: vm_memory::ByteValued + Default>(&self, at: u64) -> T {
        self.map.read_obj(GuestAddress(at)).unwrap_or_default()
    }

    /// Reads from the guest's memory.
    pub fn get_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let _ = self.map.read_slice(&mut bytes, GuestAddress(at));
        bytes
    }

    /// Writes a descriptor into a table.
    pub fn describe(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.put_bytes(&descriptor(address, len, flags, next), table + 16 * u64::from(index));
    }

    /// Where a slot's memory lies: request, reply, data, table.
    pub fn slot(&self, slot: usize) -> (u64, u64, u64, u64) {
        let at = self.slots + (slot * Self::slot_bytes(&self.config)) as u64;
        let data = at + 2 * HEAD as u64;
        (at, at + HEAD as u64, data, data + self.config.data.next_multiple_of(PAGE) as u64)
    }

    /// Makes a head available, without a kick.
    pub fn offer(&mut self, head: u16) {
        self.put(head, self.avail + 4 + 2 * u64::from(self.next_avail % self.size));
        self.next_avail = self.next_avail.wrapping_add(1);
        let _ = self.map.store(self.next_avail, GuestAddress(self.avail + 2), Ordering::Release);
    }

    /// Tells the device, if it wants to know.
    pub fn notify(&mut self) {
        fence(Ordering::SeqCst);
        let load = |at: u64| self.map.load::<u16>(GuestAddress(at), Ordering::Acquire).unwrap_or(0);
        let wants = if self.config.event_index {
            let event = load(self.used + 4 + 8 * u64::from(self.size));
            let (new, old) = (self.next_avail, self.kicked_at);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            load(self.used) & 1 == 0
        };
        self.kicked_at = self.next_avail;
        if wants {
            self.kick_anyway();
        }
    }

    /// Tells the device.
    pub fn kick_anyway(&self) {
        let _ = self.kick.write(1);
    }

    /// Puts a request into a slot: its head and, page by page, `data` that follow it; and where `reply` bytes, and `room` bytes
    /// of data, may go. The head of the chain.
    pub fn prepare(
        &mut self,
        slot: usize,
        head: &[u8],
        data: &[u8],
        reply: usize,
        room: usize,
    ) -> u16 {
        let (request_at, reply_at, data_at, own_table) = self.slot(slot);
        self.put_bytes(head, request_at);
        self.put_bytes(data, data_at);
        self.chain(
            slot,
            own_table,
            request_at,
            head.len(),
            data_at,
            data.len(),
            reply_at,
            reply,
            room,
        )
    }

    /// As [`prepare`](Self::prepare), of data that are in place.
    pub fn prepare_head(
        &mut self,
        slot: usize,
        head: &[u8],
        data: usize,
        reply: usize,
        room: usize,
    ) -> u16 {
        let (request_at, reply_at, data_at, own_table) = self.slot(slot);
        self.put_bytes(head, request_at);
        self.chain(slot, own_table, request_at, head.len(), data_at, data, reply_at, reply, room)
    }

    #[allow(clippy::too_many_arguments)] // the parts of a chain, by name
    fn chain(
        &mut self,
        slot: usize,
        own_table: u64,
        request_at: u64,
        request: usize,
        data_at: u64,
        data: usize,
        reply_at: u64,
        reply: usize,
        room: usize,
    ) -> u16 {
        let first = if self.config.indirect {
            0
        } else {
            u16::try_from(slot * Self::chain_max(&self.config)).unwrap_or(0)
        };
        let table = if self.config.indirect { own_table } else { self.table };
        let pages = |len: usize, flags: u16| {
            (0..len.div_ceil(PAGE)).map(move |page| {
                let at = data_at + (page * PAGE) as u64;
                (at, (len - page * PAGE).min(PAGE), flags)
            })
        };
        let parts = [(request_at, request, 0)]
            .into_iter()
            .chain(pages(data, 0))
            .chain((reply > 0).then_some((reply_at, reply, flag::WRITE)))
            .chain(pages(room, flag::WRITE));
        // Put together here and written at once, as a guest does: looking up where a guest's address lies, for each word of each
        // descriptor, took as long as a device needs for a request.
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        let (mut count, mut parts) = (0u16, parts.peekable());
        while let Some((at, len, flags)) = parts.next() {
            count += 1;
            let more = if parts.peek().is_some() { (flag::NEXT, first + count) } else { (0, 0) };
            let len = u32::try_from(len).unwrap_or(0);
            chain.extend(descriptor(at, len, flags | more.0, more.1));
        }
        self.put_bytes(&chain, table + 16 * u64::from(first));
        self.chain = chain;
        if !self.config.indirect {
            return first;
        }
        let head = u16::try_from(slot).unwrap_or(0);
        self.describe(self.table, head, own_table, u32::from(count) * 16, flag::INDIRECT, 0);
        head
    }

    /// The slot of a head.
    pub fn slot_of(&self, head: u16) -> usize {
        let per = if self.config.indirect { 1 } else { Self::chain_max(&self.config) };
        usize::from(head) / per
    }

    /// What was given back: head and bytes written. Without waiting.
    pub fn pop(&mut self) -> Option<(u16, u32)> {
        let at = self.map.load::<u16>(GuestAddress(self.used + 2), Ordering::Acquire).unwrap_or(0);
        if at == self.next_used {
            return None;
        }
        let element = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let head: u32 = self.map.read_obj(GuestAddress(element)).unwrap_or(0);
        let written: u32 = self.map.read_obj(GuestAddress(element + 4)).unwrap_or(0);
        self.next_used = self.next_used.wrapping_add(1);
        Some((u16::try_from(head).unwrap_or(u16::MAX), written))
    }

    /// Waits for the next one that is given back.
    ///
    /// # Errors
    /// Nothing came for a minute.
    pub fn wait(&mut self) -> Result<(u16, u32)> {
        self.wait_for(PATIENCE)?.ok_or_else(|| "the device has not answered for a minute".into())
    }

    /// What comes while it is looked for, as KVM does: whoever else could run on this processor does.
    fn look(&mut self) -> Option<(u16, u32)> {
        let found = self.pop();
        if found.is_some() || self.halt_poll.is_zero() {
            return found;
        }
        let begun = Instant::now();
        while begun.elapsed() < self.halt_poll {
            std::thread::yield_now();
            let found = self.pop();
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The same for so long; None if nothing came.
    ///
    /// # Errors
    /// The wait failed.
    pub fn wait_for(&mut self, limit: Duration) -> Result<Option<(u16, u32)>> {
        loop {
            if let Some(found) = self.look() {
                return Ok(Some(found));
            }
            if self.config.event_index {
                self.put(self.next_used, self.avail + 4 + 2 * u64::from(self.size));
                fence(Ordering::SeqCst);
                if let Some(found) = self.pop() {
                    return Ok(Some(found));
                }
            }
            let timeout = rustix::time::Timespec::try_from(limit).map_err(|e| e.to_string())?;
            // SAFETY: the descriptor is the queue's own, and open as long as the queue.
            let call = unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
            let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
            if poll(&mut fds, Some(&timeout)).map_err(|e| e.to_string())? == 0 {
                return Ok(self.pop());
            }
            let _ = self.call.read();
        }
    }
}

/// A reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// Negative error number, or 0.
    pub error: i32,
    /// What follows the header.
    pub body: Vec<u8>,
}

/// A log of dirty pages, as a monitor keeps it.
#[derive(Debug)]
pub struct DirtyLog {
    file: File,
    map: MmapRegion<()>,
}

impl DirtyLog {
    /// An empty one of so many bytes, each for eight pages.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub fn new(bytes: usize) -> Result<Self> {
        let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|e| e.to_string())?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| e.to_string())?;
        let file = File::from(fd);
        let mapped = file.try_clone().map_err(io_text("log"))?;
        let map = MmapRegion::from_file(FileOffset::new(mapped, 0), bytes);
        Ok(Self { file, map: map.map_err(|e| e.to_string())? })
    }

    /// What a device is given: the file, and that it has so many bytes at `offset`.
    pub fn region(&self, offset: u64, bytes: u64) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion {
            mmap_size: bytes,
            mmap_offset: offset,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Takes out which pages were written, by number.
    pub fn take(&self) -> Vec<u64> {
        let bytes = self.map.as_volatile_slice();
        let mut pages = Vec::new();
        for at in 0..self.map.size() {
            let cell = bytes.get_atomic_ref::<AtomicU8>(at);
            let bits = cell.map_or(0, |cell| cell.swap(0, Ordering::SeqCst));
            pages.extend((0..8).filter(|bit| bits >> bit & 1 == 1).map(|bit| 8 * at as u64 + bit));
        }
        pages
    }
}

/// A guest, as a device sees it.
pub struct Driver {
    /// The monitor's side of the socket.
    pub frontend: Frontend,
    /// The queues; the first is for FORGET.
    pub queues: Vec<DriverQueue>,
    /// What a device that is killed leaves behind.
    pub inflight: Option<(VhostUserInflight, File)>,
    /// The device logs what it writes.
    logs: bool,
    /// Where the queues were stopped.
    bases: Option<Vec<u16>>,
    memory: Arc<GuestMemoryMmap<()>>,
    config: Config,
    unique: u64,
    /// User of the requests.
    pub uid: u32,
    /// And group.
    pub gid: u32,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Driver {
    /// Connects to a device and starts its queues. INIT is not sent.
    ///
    /// # Errors
    /// What the device refused.
    pub fn connect(path: &Path, config: Config) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(io_text("connecting"))?;
        Self::over(stream, config)
    }

    /// The same over a socket that is connected.
    ///
    /// # Errors
    /// What the device refused.
    pub fn over(stream: UnixStream, config: Config) -> Result<Self> {
        let (memory, queues) = Self::machine(config)?;
        let frontend = Frontend::from_stream(stream, config.queues as u64 + 1);
        let (inflight, logs, unique) = (None, false, 0);
        let mut driver = Self {
            frontend,
            queues,
            inflight,
            logs,
            bases: None,
            memory,
            config,
            unique,
            uid: 0,
            gid: 0,
        };
        driver.start()?;
        Ok(driver)
    }

    /// Memory, with queues of which nothing was used.
    fn machine(config: Config) -> Result<(Arc<GuestMemoryMmap<()>>, Vec<DriverQueue>)> {
        let each = DriverQueue::bytes(&config);
        let total = each * (config.queues + 1);
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|e| e.to_string())?;
        rustix::fs::ftruncate(&fd, total as u64).map_err(|e| e.to_string())?;
        // Two regions that meet, so that something lies across.
        let half = (total / 2).next_multiple_of(PAGE);
        let file = File::from(fd);
        let second = file.try_clone().map_err(io_text("memory"))?;
        let ranges = [
            (GuestAddress(BASE), half, Some(FileOffset::new(file, 0))),
            (
                GuestAddress(BASE + half as u64),
                total - half,
                Some(FileOffset::new(second, half as u64)),
            ),
        ];
        let map = GuestMemoryMmap::from_ranges_with_files(ranges).map_err(|e| e.to_string())?;
        let map = Arc::new(map);
        let queues = (0..=config.queues)
            .map(|i| DriverQueue::new(map.clone(), BASE + (i * each) as u64, config))
            .collect::<Result<Vec<_>>>()?;
        Ok((map, queues))
    }

    /// All of the guest's memory, from [`BASE`] on.
    pub fn copy(&self) -> Vec<u8> {
        let each = DriverQueue::bytes(&self.config);
        let mut bytes = vec![0; each * self.queues.len()];
        let _ = self.memory.read_slice(&mut bytes, GuestAddress(BASE));
        bytes
    }

    /// Bytes of a log that has room for all of the guest's memory.
    pub fn log_bytes(&self) -> usize {
        let end = BASE + (DriverQueue::bytes(&self.config) * self.queues.len()) as u64;
        usize::try_from(end.div_ceil(8 * PAGE as u64)).unwrap_or(usize::MAX)
    }

    /// Says where the device shall log what it writes.
    ///
    /// # Errors
    /// What the device refused.
    pub fn set_log(&mut self, region: VhostUserDirtyLogRegion) -> Result<()> {
        self.frontend.set_log_base(0, Some(region)).map_err(text("SET_LOG_BASE"))
    }

    /// Has the device log, or not, while its queues run: as QEMU switches it.
    ///
    /// # Errors
    /// What the device refused.
    pub fn log(&mut self, on: bool) -> Result<()> {
        self.logs = on;
        self.frontend.set_features(self.wanted()).map_err(text("SET_FEATURES"))?;
        (0..self.queues.len()).try_for_each(|index| self.set_addresses(index, None))
    }

    /// The same guest on another machine, with this memory, and a device there whose queues are not started yet.
    ///
    /// # Errors
    /// What the device refused, or no memory.
    pub fn moved(self, memory: &[u8], stream: UnixStream) -> Result<Self> {
        let (there, mut queues) = Self::machine(self.config)?;
        there.write_slice(memory, GuestAddress(BASE)).map_err(|e| e.to_string())?;
        for (new, old) in queues.iter_mut().zip(&self.queues) {
            (new.next_avail, new.kicked_at) = (old.next_avail, old.kicked_at);
            new.next_used = old.next_used;
        }
        let mut moved = Self { memory: there, queues, logs: false, ..self };
        moved.connect_stopped(stream)?;
        Ok(moved)
    }

    /// The same guest, with another device, or the same one over another connection: it goes on with its queues as they are.
    ///
    /// # Errors
    /// What the device refused.
    pub fn reconnect(&mut self, stream: UnixStream) -> Result<()> {
        self.frontend = Frontend::from_stream(stream, self.config.queues as u64 + 1);
        self.start()
    }

    /// Stops all queues, where they are.
    ///
    /// # Errors
    /// What the device refused.
    pub fn stop(&mut self) -> Result<()> {
        let base = |index| self.frontend.get_vring_base(index).map_err(text("GET_VRING_BASE"));
        let bases: Vec<u32> = (0..self.queues.len()).map(base).collect::<Result<_>>()?;
        self.bases = Some(bases.into_iter().map(|base| (base & 0xffff) as u16).collect());
        Ok(())
    }

    /// What the device, whose queues are stopped, hands on of its guest.
    ///
    /// # Errors
    /// What it refused.
    pub fn save(&self) -> Result<Vec<u8>> {
        let (mut read, write) = std::io::pipe().map_err(io_text("a pipe"))?;
        let (way, phase) = (VhostTransferStateDirection::SAVE, VhostTransferStatePhase::STOPPED);
        self.frontend
            .set_device_state_fd(way, phase, write.into())
            .map_err(text("SET_DEVICE_STATE_FD"))?;
        let mut state = Vec::new();
        std::io::Read::read_to_end(&mut read, &mut state).map_err(io_text("the state"))?;
        self.frontend.check_device_state().map_err(text("CHECK_DEVICE_STATE"))?;
        Ok(state)
    }

    /// Has a device, whose queues are not started yet, go on with that.
    ///
    /// # Errors
    /// What it refused.
    pub fn load(&self, state: &[u8]) -> Result<()> {
        let (read, mut write) = std::io::pipe().map_err(io_text("a pipe"))?;
        let (way, phase) = (VhostTransferStateDirection::LOAD, VhostTransferStatePhase::STOPPED);
        self.frontend
            .set_device_state_fd(way, phase, read.into())
            .map_err(text("SET_DEVICE_STATE_FD"))?;
        std::io::Write::write_all(&mut write, state).map_err(io_text("the state"))?;
        drop(write);
        self.frontend.check_device_state().map_err(text("CHECK_DEVICE_STATE"))
    }

    /// Connects to another device, whose queues are not started yet: [`start`](Self::start) does that.
    ///
    /// # Errors
    /// What the device refused.
    pub fn connect_stopped(&mut self, stream: UnixStream) -> Result<()> {
        self.frontend = Frontend::from_stream(stream, self.config.queues as u64 + 1);
        self.inflight = None;
        self.agree().map(drop)
    }

    fn wanted(&self) -> u64 {
        let mut wanted = VERSION_1 | PROTOCOL_FEATURES;
        for (bit, is_wanted) in [
            (INDIRECT_DESC, self.config.indirect),
            (EVENT_IDX, self.config.event_index),
            (LOG_ALL, self.logs),
        ] {
            if is_wanted {
                wanted |= bit;
            }
        }
        wanted
    }

    /// Says where a queue lies, and for a device that logs where its used ring is marked, if not where it is.
    ///
    /// # Errors
    /// What the device refused.
    pub fn set_addresses(&self, index: usize, used_in_log: Option<u64>) -> Result<()> {
        let queue = &self.queues[index];
        let user = |guest: u64| {
            let address = self.memory.get_host_address(GuestAddress(guest));
            address.map(|at| at as u64).map_err(|e| e.to_string())
        };
        let data = VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: if self.logs { VRING_LOG } else { 0 },
            desc_table_addr: user(queue.table)?,
            used_ring_addr: user(queue.used)?,
            avail_ring_addr: user(queue.avail)?,
            log_addr: self.logs.then(|| used_in_log.unwrap_or(queue.used)),
        };
        self.frontend.set_vring_addr(index, &data).map_err(text("SET_VRING_ADDR"))
    }

    /// Agrees with the device about the protocol.
    fn agree(&mut self) -> Result<(u64, VhostUserProtocolFeatures)> {
        let wanted = self.wanted();
        let f = &mut self.frontend;
        f.set_owner().map_err(text("SET_OWNER"))?;
        let offered = f.get_features().map_err(text("GET_FEATURES"))?;
        if offered & wanted != wanted {
            return Err(format!("the device offers {offered:#x}, and {wanted:#x} is wanted"));
        }
        let protocol = f.get_protocol_features().map_err(text("GET_PROTOCOL_FEATURES"))?;
        let mut used = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
        used |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        used |= VhostUserProtocolFeatures::DEVICE_STATE;
        used |= VhostUserProtocolFeatures::LOG_SHMFD;
        used |= VhostUserProtocolFeatures::RESET_DEVICE;
        let used = used & protocol;
        f.set_protocol_features(used).map_err(text("SET_PROTOCOL_FEATURES"))?;
        f.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Ok((wanted, used))
    }

    /// Starts all queues.
    ///
    /// # Errors
    /// What the device refused.
    pub fn start(&mut self) -> Result<()> {
        let (wanted, used) = self.agree()?;
        let f = &mut self.frontend;
        if used.contains(VhostUserProtocolFeatures::MQ) {
            let there = f.get_queue_num().map_err(text("GET_QUEUE_NUM"))?;
            if there < self.queues.len() as u64 {
                return Err(format!("the device has {there} queues of {}", self.queues.len()));
            }
        }
        if used.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let queues = u16::try_from(self.queues.len()).unwrap_or(1);
                let asked = VhostUserInflight::new(0, 0, queues, self.config.size);
                self.inflight = Some(f.get_inflight_fd(&asked).map_err(text("GET_INFLIGHT_FD"))?);
            }
            if let Some((inflight, file)) = &self.inflight {
                f.set_inflight_fd(inflight, file.as_raw_fd()).map_err(text("SET_INFLIGHT_FD"))?;
            }
        }
        f.set_features(wanted).map_err(text("SET_FEATURES"))?;
        let regions: Vec<_> = self
            .memory
            .iter()
            .map(VhostUserMemoryRegionInfo::from_guest_region)
            .collect::<std::result::Result<_, _>>()
            .map_err(text("memory"))?;
        f.set_mem_table(&regions).map_err(text("SET_MEM_TABLE"))?;
        for index in 0..self.queues.len() {
            let (f, queue) = (&self.frontend, &self.queues[index]);
            f.set_vring_num(index, queue.size).map_err(text("SET_VRING_NUM"))?;
            // What was not given back was not taken, where nobody keeps book of it; a device that was stopped has said where it was.
            let used = self.memory.load::<u16>(GuestAddress(queue.used + 2), Ordering::Acquire);
            let base = self.bases.as_ref().and_then(|bases| bases.get(index).copied());
            let base = base.unwrap_or(used.unwrap_or(0));
            f.set_vring_base(index, base).map_err(text("SET_VRING_BASE"))?;
            self.set_addresses(index, None)?;
            f.set_vring_call(index, &queue.call).map_err(text("SET_VRING_CALL"))?;
            f.set_vring_kick(index, &queue.kick).map_err(text("SET_VRING_KICK"))?;
            let enabled = self.frontend.set_vring_enable(index, true);
            enabled.map_err(text("SET_VRING_ENABLE"))?;
        }
        self.bases = None;
        Ok(())
    }

    /// A request: its header and `parts`, and the length of `data` that follow in pages.
    pub fn request(&mut self, opcode: u32, node: u64, parts: &[&[u8]], data: usize) -> Vec<u8> {
        self.unique += 2;
        let len = size_of::<InHeader>() + parts.iter().map(|part| part.len()).sum::<usize>() + data;
        let header = InHeader {
            len: u32::try_from(len).unwrap_or(0).into(),
            opcode: opcode.into(),
            unique: self.unique.into(),
            nodeid: node.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            pid: 1.into(),
            ..InHeader::default()
        };
        let mut request = header.as_bytes().to_vec();
        parts.iter().for_each(|part| request.extend_from_slice(part));
        request
    }

    /// The reply in a slot, `reply` bytes of which lie in the first piece.
    ///
    /// # Errors
    /// It is none.
    pub fn reply(&self, queue: usize, slot: usize, written: u32, reply: usize) -> Result<Reply> {
        let queue = &self.queues[queue];
        let (_, reply_at, data_at, _) = queue.slot(slot);
        let written = written as usize;
        let mut bytes = queue.get_bytes(reply_at, written.min(reply));
        bytes.extend(queue.get_bytes(data_at, written.saturating_sub(reply)));
        let (header, body) = OutHeader::read_from_prefix(&bytes)
            .map_err(|_| format!("a reply of {written} bytes"))?;
        if header.len.get() as usize != written {
            return Err(format!("a reply of {written} bytes says {}", header.len.get()));
        }
        Ok(Reply { error: header.error.get(), body: body.to_vec() })
    }

    /// Sends a request with `data`, and waits for its reply, which has room for `room` bytes of data. Nothing else may be
    /// under way in the queue.
    ///
    /// # Errors
    /// No reply, or one that is none.
    pub fn call_on(
        &mut self,
        queue: usize,
        opcode: u32,
        node: u64,
        parts: &[&[u8]],
        data: &[u8],
        room: usize,
    ) -> Result<Reply> {
        let head = self.request(opcode, node, parts, data.len());
        // Data follow the header of a reply in pages of their own.
        let reply = if room > 0 { size_of::<OutHeader>() } else { HEAD };
        let q = &mut self.queues[queue];
        let offered = q.prepare(0, &head, data, reply, room);
        q.offer(offered);
        q.notify();
        let (back, written) = q.wait()?;
        if back != offered {
            return Err(format!("head {back} came back, of {offered}"));
        }
        self.reply(queue, 0, written, reply)
    }

    /// The same on the first request queue.
    ///
    /// # Errors
    /// As [`call_on`](Self::call_on).
    pub fn call(&mut self, opcode: u32, node: u64, parts: &[&[u8]]) -> Result<Reply> {
        self.call_on(1, opcode, node, parts, &[], 0)
    }

    /// Sends what has no reply (FORGET) on the first queue.
    ///
    /// # Errors
    /// It is not given back.
    pub fn tell(&mut self, opcode: u32, node: u64, parts: &[&[u8]]) -> Result<()> {
        let head = self.request(opcode, node, parts, 0);
        let q = &mut self.queues[0];
        let offered = q.prepare(0, &head, &[], 0, 0);
        q.offer(offered);
        q.notify();
        q.wait().map(drop)
    }

    /// INIT, as Linux 6.12 sends it.
    ///
    /// # Errors
    /// The device refused.
    pub fn init(&mut self) -> Result<Reply> {
        let arg = InitIn {
            major: 7.into(),
            minor: 41.into(),
            max_readahead: 131_072.into(),
            flags: u32::MAX.into(),
        };
        let reply = self.call(op::INIT, 0, &[arg.as_bytes(), InitInExt::default().as_bytes()])?;
        if reply.error == 0 { Ok(reply) } else { Err(format!("INIT: error {}", reply.error)) }
    }

    /// Stops the queues and hangs up.
    pub fn hang_up(self) {
        for index in 0..self.queues.len() {
            let _ = self.frontend.get_vring_base(index);
        }
    }
}
