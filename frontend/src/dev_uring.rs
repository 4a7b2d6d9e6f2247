//! FUSE over io_uring (Linux 6.14 and later, where `/sys/module/fuse/parameters/enable_uring` is Y): a reply
//! and the next request in one system call, on the CPU of whoever asked.
//!
//! - The kernel has a queue for each possible CPU. A request goes to the queue of the CPU that its caller runs
//!   on, and there to an entry that waits for one, or into the line. Every queue needs an entry before the
//!   kernel uses any.
//! - Each thread here has a ring with room for one command and one entry ([`Ring`], [`Area`]), and is bound to
//!   the CPU of its queue. An entry is taken up until its request is answered: by the very thread, since the
//!   reply is also the wish for the next request.
//! - So a lock that is waited for takes a thread for that time, and more are started before they run out.
//!   A new entry is not given what stands in line already; [`Rings::kick`] sees to that.
//! - Who answers for a thread that is held up (`patience`) takes its entry over, with other memory at the same
//!   address; the thread ends when it is done.
//! - FORGET, INTERRUPT and notifications still go through `/dev/fuse`.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use base::InodeId;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zerocopy::{FromBytes, IntoBytes};

use crate::dev_fuse::Crew;
use crate::fuse::wire::{InHeader, NotifyRetrieve, OutHeader, RingEntry, notify, op};
use crate::fuse::{LaterReply, ReplySink};
use crate::mount_point::MountError;
use crate::patience::{Flight, Group, Way};
use crate::ring::{Area, Command, PAYLOAD, Parts, Ring, Window};

/// Where the kernel puts the first argument of a request, and how long that may be.
const ARGUMENT: usize = 128;
const ARGUMENT_MAX: usize = 128;
/// Where [`RingEntry`] is.
const ENTRY: usize = 256;
/// Longest reply to a request that has a payload itself: an extended attribute.
const SIDE_BYTES: usize = 128 << 10;
/// Longest fixed part of a reply, with its header.
const HEAD_BYTES: usize = 512;
/// Threads of all queues together at the start, on machines with many CPUs; each queue gets two at least.
const THREADS_TOGETHER: usize = 64;
/// Threads that a queue has left when one waits for a lock, or another is started.
const IDLE_MIN: usize = 2;
/// Inodes that are tried to find a file that the kernel knows.
const KICK_TRIES: usize = 64;
/// Between two looks whether all is over, for a thread that waits for a lock.
const LOOK: Duration = Duration::from_millis(200);
/// Our numbers for requests that a [`kick`](Rings::kick) makes: the kernel's own do not come up here, and it
/// uses the lowest bit otherwise.
const KICKS: u64 = 1 << 62;

/// How many queues the kernel will have, if this process can serve them all.
pub fn queues() -> Option<u16> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/devices/system/cpu/{name}")).ok();
    let enabled = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring").ok()?;
    let possible = cpus(read("possible")?.trim())?;
    // Somebody who confines us to some CPUs will have reasons, and the others have queues as well.
    let may = sched_getaffinity(None).ok()?;
    let all = cpus(read("online")?.trim())?.into_iter().all(|cpu| may.is_set(cpu));
    let contiguous = possible.iter().copied().eq(0..possible.len());
    let count = u16::try_from(possible.len()).ok()?;
    (enabled.trim() == "Y"
        && all
        && contiguous
        && count > 0
        && usize::from(count) <= CpuSet::MAX_CPU
        && Ring::new().is_ok())
    .then_some(count)
}

/// The CPUs of a list such as `0-3,8`.
fn cpus(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= CpuSet::MAX_CPU || first > last {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// The threads on rings of a mount.
#[derive(Debug)]
pub struct Rings {
    crew: Arc<Crew>,
    device: Arc<OwnedFd>,
    queues: u16,
    kicks: AtomicU64,
}

/// How a thread comes by its entry.
enum Start {
    /// By registering one. Told whether that worked, before any request.
    First(SyncSender<(u16, bool)>),
    /// By registering one more, since others wait. The kernel knows this inode.
    More(Option<InodeId>),
    /// From a thread that is held up by this request, which is to be answered with this error.
    Instead(Arc<Flight>, u64, i32, Window),
}

impl Rings {
    /// Of the mount behind `device`.
    pub fn new(crew: Arc<Crew>, device: Arc<OwnedFd>, queues: u16) -> Arc<Self> {
        Arc::new(Self { crew, device, queues, kicks: AtomicU64::new(0) })
    }

    /// Starts about so many threads for each queue. False when that did not work; then the kernel goes on
    /// with `/dev/fuse`.
    ///
    /// # Errors
    /// When it did not, and the kernel could not be told.
    pub fn start(self: &Arc<Self>, threads: usize) -> Result<bool, MountError> {
        let queues = usize::from(self.queues);
        let each = threads.clamp(1, (THREADS_TOGETHER / queues).max(2));
        let no_entry = NoEntry::new()
            .map_err(|e| MountError::new(format!("cannot serve requests over io_uring: {e}")))?;
        let (told, answers) = sync_channel(each * queues);
        for qid in 0..self.queues {
            for _ in 0..each {
                if let Err(error) = self.add(qid, Start::First(told.clone())) {
                    log::warn!("fewer threads for requests over io_uring than wanted: {error}");
                }
            }
        }
        drop(told);
        let mut served = vec![false; queues];
        for (qid, works) in answers {
            served[usize::from(qid)] |= works;
        }
        let all = served.into_iter().all(|served| served);
        if !all {
            log::warn!("requests go through /dev/fuse: not every CPU has a thread");
            no_entry.tell(&self.device);
        }
        Ok(all)
    }

    /// One more thread for a queue. The kernel knows a regular file, `file`, for certain.
    ///
    /// # Errors
    /// When the system is out of threads.
    pub fn more(self: &Arc<Self>, qid: Group, file: Option<InodeId>) -> Result<(), MountError> {
        self.add(qid, Start::More(file)).map(drop)
    }

    fn add(self: &Arc<Self>, qid: u16, start: Start) -> Result<JoinHandle<()>, MountError> {
        let rings = self.clone();
        self.crew.spawn("fuse-ring", move || {
            bind_to(qid);
            // The file system that lends its hand may need nothing of what comes after.
            match Worker::new(&rings, qid) {
                Ok(mut worker) => worker.run(start),
                Err(error) => {
                    log::warn!("cannot serve requests over io_uring: {error}");
                    if let Start::First(told) = start {
                        let _ = told.send((qid, false));
                    }
                }
            }
        })
    }

    /// Makes the kernel look into the line of the queue of the CPU that the calling thread is bound to: it
    /// is asked for nothing of what it caches of a file, which is a request to that queue without anybody who
    /// waits for it. When it is answered, the entry is given what is first in line. If the kernel knows no
    /// file, the line moves on when somebody asks for anything on that CPU.
    fn kick(&self, file: Option<InodeId>) {
        let others = || self.crew.server.some_told(KICK_TRIES);
        let works = file.is_some_and(|file| self.kick_by(file))
            || others().into_iter().any(|ino| self.kick_by(ino));
        if !works {
            log::debug!("requests in line may wait for the next one on their CPU");
        }
    }

    /// Whether the kernel knows the inode, as a regular file.
    fn kick_by(&self, ino: InodeId) -> bool {
        let number = self.kicks.fetch_add(1, Ordering::Relaxed);
        let body = NotifyRetrieve {
            notify_unique: (KICKS + 2 * number).into(),
            nodeid: ino.0.into(),
            ..NotifyRetrieve::default()
        };
        let len = size_of::<OutHeader>() + size_of::<NotifyRetrieve>();
        let len = u32::try_from(len).unwrap_or(0);
        let head = OutHeader { len: len.into(), error: notify::RETRIEVE.into(), unique: 0.into() };
        let slices = [head.as_bytes(), body.as_bytes()].map(std::io::IoSlice::new);
        rustix::io::writev(&*self.device, &slices).is_ok()
    }
}

/// What is needed to tell the kernel, which waits until all queues have an entry, that they will not.
struct NoEntry {
    ring: Ring,
    window: Window,
}

impl NoEntry {
    fn new() -> Result<Self, Errno> {
        Ok(Self { ring: Ring::new()?, window: Area::new()?.window()? })
    }

    /// Registers an entry of a queue that there is not.
    fn tell(mut self, device: &OwnedFd) {
        let parts = Parts::new(self.window);
        self.ring.queue(Command::register(device, u16::MAX, &parts));
        if self.ring.submit().is_ok() {
            log::error!("the kernel takes an entry of queue {}", u16::MAX);
        }
    }
}

impl Drop for NoEntry {
    fn drop(&mut self) {
        self.window.unmap();
    }
}

/// Whether that means that the mount is gone, or we are.
fn is_the_end(error: Errno) -> bool {
    matches!(error, Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV | Errno::CANCELED)
}

/// Binds the calling thread to a CPU, if that is there.
fn bind_to(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    let _ = sched_setaffinity(None, &set);
}

/// The way of a ring's thread: another one takes its entry over.
#[derive(Debug)]
struct TakeOver {
    rings: Weak<Rings>,
    qid: u16,
    window: Window,
    /// Number of the last request for which that was begun.
    begun: AtomicU64,
}

impl Way for TakeOver {
    fn answer(&self, flight: &Arc<Flight>, unique: u64, error: i32) {
        let Some(rings) = self.rings.upgrade() else { return };
        if self.begun.swap(unique, Ordering::AcqRel) == unique {
            return;
        }
        let start = Start::Instead(flight.clone(), unique, error, self.window);
        if let Err(error) = rings.add(self.qid, start) {
            log::warn!("a request waits on, and its process cannot be let go: {error}");
            self.begun.store(0, Ordering::Release);
        }
    }
}

/// Where a reply that comes later is put for the thread that waits for it.
#[derive(Debug, Default)]
struct Slot {
    state: Mutex<SlotState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum SlotState {
    #[default]
    Open,
    Reply(Vec<u8>),
    /// There will be none.
    Dropped,
}

impl Slot {
    fn put(&self, with: SlotState) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, SlotState::Open) {
            *state = with;
        }
        self.changed.notify_one();
    }

    /// The reply; none if there will be none, or all is over.
    fn wait(&self, is_over: impl Fn() -> bool) -> Option<Vec<u8>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match std::mem::take(&mut *state) {
                SlotState::Reply(reply) => return Some(reply),
                SlotState::Dropped => return None,
                SlotState::Open if is_over() => return None,
                SlotState::Open => {}
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct LaterOnRing(Arc<Slot>);

impl LaterReply for LaterOnRing {
    fn send(self: Box<Self>, reply: &[u8]) {
        self.0.put(SlotState::Reply(reply.to_vec()));
    }
}

impl Drop for LaterOnRing {
    fn drop(&mut self) {
        self.0.put(SlotState::Dropped);
    }
}

/// Keeps the reply to one request until its handler has returned.
struct RingSink<'a> {
    flight: &'a Flight,
    /// Room for data: where the kernel takes it from, or beside it if the request is there.
    room: &'a mut [u8],
    head: &'a mut [u8; HEAD_BYTES],
    /// Lengths of head and data.
    reply: Option<(usize, usize)>,
    /// Somebody else has answered.
    lost: bool,
    later: Option<Arc<Slot>>,
}

impl ReplySink for RingSink<'_> {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.room.len());
        &mut self.room[..len]
    }

    fn later(&mut self) -> Option<Box<dyn LaterReply>> {
        let slot = Arc::new(Slot::default());
        self.later = Some(slot.clone());
        Some(Box::new(LaterOnRing(slot)))
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        let unique = head.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        if head.len() > self.head.len() || !self.flight.take(unique) {
            self.lost = true;
            return false;
        }
        self.head[..head.len()].copy_from_slice(head);
        self.reply = Some((head.len(), payload_len.min(self.room.len())));
        true
    }
}

/// What became of a request.
enum Outcome {
    /// Its reply is in the area.
    Answered { commit_id: u64 },
    /// Its reply comes to the slot.
    Later { commit_id: u64, unique: u64, file: InodeId, slot: Arc<Slot> },
    /// Somebody else has answered, and the entry is theirs.
    Lost,
    /// It is not one.
    Odd,
}

/// A thread's entry and ring.
struct Worker<'a> {
    rings: &'a Arc<Rings>,
    qid: u16,
    ring: Ring,
    area: Area,
    side: Vec<u8>,
    head: [u8; HEAD_BYTES],
}

impl<'a> Worker<'a> {
    fn new(rings: &'a Arc<Rings>, qid: u16) -> Result<Self, Errno> {
        let (ring, area) = (Ring::new()?, Area::new()?);
        Ok(Self { rings, qid, ring, area, side: vec![0; SIDE_BYTES], head: [0; HEAD_BYTES] })
    }

    /// Gets an entry and serves it until the mount ends, or somebody takes it over.
    fn run(&mut self, start: Start) {
        let window = match &start {
            Start::Instead(_, _, _, window) => Ok(*window),
            Start::First(_) | Start::More(_) => self.area.window(),
        };
        let window = match window {
            Ok(window) => window,
            Err(error) => {
                log::warn!("cannot map memory for requests over io_uring: {error}");
                if let Start::First(told) = start {
                    let _ = told.send((self.qid, false));
                }
                return;
            }
        };
        let way = TakeOver {
            rings: Arc::downgrade(self.rings),
            qid: self.qid,
            window,
            begun: AtomicU64::new(0),
        };
        let flight = Flight::new(Box::new(way), self.qid);
        flight.board();
        let serves = match start {
            Start::First(told) => {
                let works = self.register(window, &flight);
                let _ = told.send((self.qid, works));
                works
            }
            Start::More(file) => {
                let works = self.register(window, &flight);
                if works {
                    self.rings.kick(file);
                }
                works
            }
            Start::Instead(held_up, unique, error, _) => {
                if !self.replace(&held_up, unique, error, window) {
                    return; // it is another's still
                }
                self.rings.crew.flights.add(flight.clone());
                true
            }
        };
        let ours = !serves || self.serve(&flight);
        self.rings.crew.flights.remove(&flight);
        if ours {
            window.unmap();
        }
    }

    /// Whether the kernel has a new entry.
    fn register(&mut self, window: Window, flight: &Arc<Flight>) -> bool {
        let parts = Parts::new(window);
        self.rings.crew.flights.add(flight.clone());
        self.ring.queue(Command::register(&self.rings.device, self.qid, &parts));
        let result = self.ring.submit();
        if let Err(error) = &result
            && !is_the_end(*error)
        {
            log::warn!("the kernel refuses an entry of queue {}: {error}", self.qid);
        }
        result.is_ok()
    }

    /// Takes an entry over from a thread that does not answer, and answers.
    fn replace(&mut self, held_up: &Arc<Flight>, unique: u64, error: i32, window: Window) -> bool {
        if !held_up.give_up(unique, error) {
            return false;
        }
        if let Err(error) = self.area.replace(window) {
            log::error!("a request is never answered: no memory for it ({error})");
            return false;
        }
        self.write_reply(OutHeader::alone(unique, error).as_bytes(), Room::Payload, 0);
        self.ring.queue(Command::commit(&self.rings.device, self.qid, unique));
        true
    }

    /// Serves until there is no more; whether the entry is ours at the end.
    fn serve(&mut self, flight: &Arc<Flight>) -> bool {
        loop {
            if let Err(error) = self.ring.wait() {
                if !is_the_end(error) {
                    log::error!("queue {}: no more requests over io_uring: {error}", self.qid);
                }
                return true;
            }
            let commit_id = match self.serve_one(flight) {
                Outcome::Answered { commit_id } => commit_id,
                Outcome::Later { commit_id, unique, file, slot } => {
                    self.await_reply(flight, unique, file, &slot);
                    commit_id
                }
                Outcome::Lost => return false,
                Outcome::Odd => {
                    log::error!("queue {}: the kernel gives requests that are none", self.qid);
                    return true;
                }
            };
            self.ring.queue(Command::commit(&self.rings.device, self.qid, commit_id));
        }
    }

    fn serve_one(&mut self, flight: &Arc<Flight>) -> Outcome {
        let Some((header, entry)) = put_together(self.area.bytes()) else { return Outcome::Odd };
        let (unique, commit_id) = (header.unique.get(), entry.commit_id.get());
        let payload_size = entry.payload_size.get() as usize;
        if header.opcode.get() == op::NOTIFY_REPLY {
            self.write_reply(OutHeader::alone(unique, 0).as_bytes(), Room::Payload, 0);
            return Outcome::Answered { commit_id };
        }
        flight.begin(&header);
        let from = PAYLOAD - (header.len.get() as usize - payload_size);
        let bytes = self.area.bytes();
        // The reply's data goes where it is taken from, unless some of the request is there.
        let (request, room, which) = if payload_size == 0 {
            let (front, payload) = bytes.split_at_mut(PAYLOAD);
            (&front[from..], payload, Room::Payload)
        } else {
            (&bytes[from..PAYLOAD + payload_size], &mut self.side[..], Room::Side)
        };
        let head = &mut self.head;
        let mut sink = RingSink { flight, room, head, reply: None, lost: false, later: None };
        self.rings.crew.server.handle(request, &mut sink);
        let (reply, lost, later) = (sink.reply, sink.lost, sink.later);
        // Without a reply it is still open, unless somebody has answered.
        let lost = lost || reply.is_none() && !flight.take(unique);
        flight.end();
        match (reply, later) {
            _ if lost => Outcome::Lost,
            (Some((head_len, payload_len)), _) => {
                let head = self.head;
                self.write_reply(&head[..head_len], which, payload_len);
                Outcome::Answered { commit_id }
            }
            (None, Some(slot)) => {
                Outcome::Later { commit_id, unique, file: InodeId(header.nodeid.get()), slot }
            }
            // There is no such request; the kernel wants something.
            (None, None) => {
                let error = -Errno::IO.raw_os_error();
                self.write_reply(OutHeader::alone(unique, error).as_bytes(), Room::Payload, 0);
                Outcome::Answered { commit_id }
            }
        }
    }

    /// The request waits for a lock. Meanwhile its thread counts neither as one that serves nor as one that
    /// keeps the mount up.
    fn await_reply(&mut self, flight: &Arc<Flight>, unique: u64, file: InodeId, slot: &Slot) {
        let crew = &self.rings.crew;
        flight.park(true);
        if crew.flights.idle(self.qid) < IDLE_MIN
            && crew.flights.has_room()
            && let Err(error) = self.rings.more(self.qid, Some(file))
        {
            log::warn!("a lock is waited for, and {error}");
        }
        crew.leave();
        let reply = slot.wait(|| crew.flights.is_closed());
        crew.enter();
        flight.park(false);
        let none = OutHeader::alone(unique, -Errno::INTR.raw_os_error());
        let reply = reply.as_deref().unwrap_or(none.as_bytes());
        self.write_reply(reply, Room::Payload, 0);
    }

    /// Puts a reply to where the kernel takes it from: `head`, which begins with its header, and so many bytes
    /// of data in the payload already, or beside it.
    fn write_reply(&mut self, head: &[u8], room: Room, payload_len: usize) {
        let (header, fixed) = head.split_at(size_of::<OutHeader>().min(head.len()));
        let (front, payload) = self.area.bytes().split_at_mut(PAYLOAD);
        front[..header.len()].copy_from_slice(header);
        let end = fixed.len() + payload_len;
        match room {
            Room::Payload if !fixed.is_empty() => payload.copy_within(..payload_len, fixed.len()),
            Room::Payload => {}
            Room::Side => payload[fixed.len()..end].copy_from_slice(&self.side[..payload_len]),
        }
        payload[..fixed.len()].copy_from_slice(fixed);
        let size = u32::try_from(end).unwrap_or(0);
        let entry = RingEntry { payload_size: size.into(), ..RingEntry::default() };
        front[ENTRY..ENTRY + size_of::<RingEntry>()].copy_from_slice(entry.as_bytes());
    }
}

/// Where the data of a reply lies.
#[derive(Clone, Copy)]
enum Room {
    Payload,
    Side,
}

/// Puts header and first argument of a request before its payload, as they would come from `/dev/fuse`; none
/// if the lengths do not fit.
fn put_together(bytes: &mut [u8]) -> Option<(InHeader, RingEntry)> {
    let (header, _) = InHeader::read_from_prefix(bytes).ok()?;
    let (entry, _) = RingEntry::read_from_prefix(bytes.get(ENTRY..)?).ok()?;
    let payload_size = usize::try_from(entry.payload_size.get()).ok()?;
    let before = usize::try_from(header.len.get()).ok()?.checked_sub(payload_size)?;
    let argument = before.checked_sub(size_of::<InHeader>())?;
    if argument > ARGUMENT_MAX || payload_size > bytes.len().checked_sub(PAYLOAD)? {
        return None;
    }
    bytes.copy_within(..size_of::<InHeader>(), PAYLOAD - before);
    bytes.copy_within(ARGUMENT..ARGUMENT + argument, PAYLOAD - argument);
    Some((header, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_understood_or_refused() {
        assert_eq!(cpus("0"), Some(vec![0]));
        assert_eq!(cpus("0-2,5"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "a", "2-1", "0-", "0,", "0-99999999999", "0-70000"] {
            assert_eq!(cpus(bad), None, "{bad}");
        }
    }

    #[test]
    fn requests_whose_lengths_do_not_fit_are_none() {
        let request = |len: u32, payload_size: u32| {
            let mut bytes = vec![0; PAYLOAD + 100];
            let header = InHeader { len: len.into(), opcode: 7.into(), ..InHeader::default() };
            let entry = RingEntry { payload_size: payload_size.into(), ..RingEntry::default() };
            bytes[..40].copy_from_slice(header.as_bytes());
            bytes[ARGUMENT..ARGUMENT + 4].copy_from_slice(b"argu");
            bytes[ENTRY..ENTRY + 32].copy_from_slice(entry.as_bytes());
            put_together(&mut bytes)
                .map(|_| bytes[PAYLOAD - (len - payload_size) as usize..].to_vec())
        };
        let whole = request(40 + 4 + 3, 3).unwrap();
        assert_eq!(&whole[..4], &47u32.to_le_bytes());
        assert_eq!(&whole[40..44], b"argu");
        assert_eq!(request(40, 0).map(|r| r.len()), Some(140));
        assert_eq!(request(40 + 128 + 100, 100).map(|r| r.len()), Some(40 + 128 + 100));
        for (len, payload_size) in
            [(39, 0), (0, 0), (42, 3), (40 + 129, 0), (141, 101), (3, u32::MAX)]
        {
            assert!(request(len, payload_size).is_none(), "{len} {payload_size}");
        }
    }
}
