//! One virtqueue in guest memory (virtio 1.3, 2.7), with what vhost-user says about it.
//!
//! A guest may write anything into its rings and descriptors. [`Vring::next`] takes a chain apart completely before
//! anybody sees it; one that loops, leads out of memory, is too long, or has what we write before what we read is given
//! back empty and counted.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use frontend::fuse::{IO_BYTES_MAX, REQUEST_BYTES_MAX};
use rustix::event::{EventfdFlags, epoll};
use virtio_queue::{Queue as Rings, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::dirty::Log;
use crate::hal::{self, Chain, Piece, Queue, Woken, scatter};
use crate::inflight::{Region, Tracker};
use crate::memory::{Memory, guest_address_of, pieces};

/// Descriptors of a ring at most.
pub const SIZE_MAX: u16 = 1024;
/// Pieces of a chain at most: the pages of the longest request, and its headers.
pub const PIECES_MAX: usize = IO_BYTES_MAX / 4096 + 64;
/// Heads of which a guest is told at once, at most.
const OWED_MAX: u32 = 8;
/// A request that took longer is a sign that the next one may: then nobody waits for it to be told of another.
const PROMPT: Duration = Duration::from_micros(60);
/// For so many requests after it.
const AFTER_LONG: u32 = 32;
/// How long a monitor that stops a queue waits for the requests that are being served.
const DRAIN: Duration = Duration::from_secs(10);

/// What an event is of.
const BELL: epoll::EventData = epoll::EventData::new_u64(1);
const KICK: epoll::EventData = epoll::EventData::new_u64(2);
const NO_EVENT: epoll::EventData = epoll::EventData::new_u64(0);

/// Descriptor flags.
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

/// Offsets in the used ring: flags, index, elements of eight bytes each, and behind them the index of which the guest shall kick.
const USED_FLAGS: u64 = 0;
const USED_INDEX: u64 = 2;
const USED_RING: u64 = 4;
const USED_ELEMENT: u64 = 8;

/// Where it is marked what we write into the guest's memory.
#[derive(Clone, Debug, Default)]
pub enum Marks {
    /// Nobody wants to know.
    #[default]
    Off,
    /// The monitor wants to know, and has not said yet where.
    Awaited,
    /// Here.
    On(Arc<Log>),
}

/// A reply that came while the queue was stopped.
struct Held {
    head: u16,
    /// Bytes that are in place already.
    written: u32,
    reply: Vec<u8>,
    to: Vec<Piece>,
    /// What the pieces lie in.
    map: Arc<GuestMemoryMmap<()>>,
}

struct State {
    rings: Rings,
    memory: Arc<Memory>,
    kick: Option<OwnedFd>,
    call: Option<File>,
    /// As [`Vring::set_enabled`] says.
    enabled: bool,
    event_index: bool,
    /// Changes when the guest has given up what it had asked.
    life: u64,
    tracker: Option<Tracker>,
    /// Taken from the ring by a device that was killed.
    again: VecDeque<u16>,
    held: Vec<Held>,
    /// Those whose replies come later.
    off: Vec<u16>,
    /// Where the monitor was told that we stopped.
    stopped_at: Option<u16>,
    /// Chains that somebody is at, who may write to guest memory.
    busy: usize,
    /// A request was left where it is, since there were as many under way as the ring has descriptors.
    full: bool,
    /// The guest wrote an index that cannot be: nothing is taken until it starts anew.
    broken: bool,
    /// Somebody waits until there are none.
    draining: bool,
    /// Nothing is known to be in the ring: the guest shall kick.
    armed: bool,
    /// Heads given back of which the guest has not been told.
    owed: u32,
    /// So many more are told at once: a request took long.
    prompt: u32,
    marks: Marks,
    /// Something was written while a log was awaited: nobody knows what.
    unmarked: bool,
    /// Where the used ring begins for the log, if the monitor says so; else it is where it is.
    used_in_log: Option<u64>,
}

impl State {
    fn runs(&self) -> bool {
        self.enabled && self.kick.is_some() && self.rings.ready() && !self.broken
    }

    /// Requests in the ring. A guest that says that there are more than the ring holds gets none served.
    fn available(&mut self) -> u16 {
        let avail = self.rings.avail_idx(&**self.memory.map(), Ordering::Acquire);
        let count = avail.map_or(0, |at| at.0.wrapping_sub(self.rings.next_avail()));
        if count > self.rings.size() {
            log::warn!("a queue of {} with {count} requests: it stands still", self.rings.size());
            self.broken = true;
            return 0;
        }
        count
    }

    /// Bytes of the guest's memory have been written. Every write of this module and of those who serve its chains comes to here: after
    /// it, with the lock held under which the log is changed, so that a monitor which was told that we log misses none.
    fn mark(&mut self, address: u64, len: u64) {
        match &self.marks {
            Marks::Off => {}
            Marks::Awaited => self.unmarked = true,
            Marks::On(log) => log.mark(address, len),
        }
    }

    /// The same of the used ring.
    fn mark_used(&mut self, offset: u64, len: u64) {
        // A monitor may name any address; one at the very end is beyond its log anyway.
        let start = self.used_in_log.unwrap_or_else(|| self.rings.used_ring());
        self.mark(start.saturating_add(offset), len);
    }

    /// The same of the first bytes of a chain's pieces, which lie in `map`.
    fn mark_pieces(&mut self, map: &GuestMemoryMmap<()>, pieces: &[Piece], bytes: usize) {
        if matches!(self.marks, Marks::Off) || bytes == 0 {
            return;
        }
        let mut left = bytes;
        for piece in pieces {
            let part = piece.take(left);
            left -= part.len();
            // One that is not in its map there is not.
            if let Some(address) = guest_address_of(map, &part) {
                self.mark(address, part.len() as u64);
            }
            if left == 0 {
                break;
            }
        }
    }

    /// Writes a reply to the pieces of a chain; how much of it had room.
    fn write(&mut self, map: &GuestMemoryMmap<()>, reply: &[u8], to: &[Piece]) -> u32 {
        let written = scatter(reply, to);
        self.mark_pieces(map, to, written);
        u32::try_from(written).unwrap_or(0)
    }

    /// Whether the guest shall kick for its next request. True if one came while it was told.
    fn want_kick(&mut self, wants: bool) -> bool {
        let map = self.memory.map().clone();
        let came = if wants {
            self.rings.enable_notification(&*map).unwrap_or(false)
        } else {
            let _ = self.rings.disable_notification(&*map);
            false
        };
        if !self.rings.event_idx_enabled() {
            self.mark_used(USED_FLAGS, 2);
        } else if wants {
            self.mark_used(USED_RING + USED_ELEMENT * u64::from(self.rings.size()), 2);
        }
        came
    }

    /// Puts a head into the used ring. The guest is to be told.
    fn put(&mut self, head: u16, written: u32) {
        let map = self.memory.map().clone();
        if let Some(tracker) = &mut self.tracker {
            tracker.end(head);
        }
        let element = u64::from(self.rings.next_used() % self.rings.size());
        let added = self.rings.add_used(&*map, head, written);
        // Also where it came to the first of them only.
        self.mark_used(USED_RING + USED_ELEMENT * element, USED_ELEMENT);
        self.mark_used(USED_INDEX, 2);
        if let Err(error) = added {
            log::warn!("used ring: {error}");
            return;
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.ended(head, self.rings.next_used());
        }
        self.owed += 1;
    }

    /// Tells the guest what it was given back, if it wants to know.
    fn tell(&mut self) {
        if std::mem::take(&mut self.owed) == 0 {
            return;
        }
        let map = self.memory.map().clone();
        if self.rings.needs_notification(&*map).unwrap_or(true) {
            self.interrupt();
        }
    }

    /// The same, unless the next request comes at once, so that the guest is woken for several. `took`: what the last one did.
    fn tell_soon(&mut self, took: Duration) {
        if took > PROMPT {
            self.prompt = AFTER_LONG;
        }
        // Whoever is at the only request that is out takes the next one, or says that there is none.
        let goes_on = self.busy <= 1 && self.prompt == 0 && self.owed < OWED_MAX;
        self.prompt = self.prompt.saturating_sub(1);
        if !goes_on || !self.runs() || self.available() == 0 {
            self.tell();
        }
    }

    fn interrupt(&self) {
        if let Some(call) = &self.call {
            // Full means that the guest has been told.
            let _ = rustix::io::write(call, &1u64.to_le_bytes());
        }
    }

    fn is_waiting(&mut self) -> bool {
        self.runs() && (!self.again.is_empty() || self.available() > 0)
    }
}

/// A virtqueue.
pub struct Vring {
    index: usize,
    state: Mutex<State>,
    idle: Condvar,
    /// Readable when whoever waits shall look at the state again.
    bell: OwnedFd,
    /// Bell and kick. Of the kick only that there was one more is waited for, so that nobody needs to read it.
    events: OwnedFd,
    ended: AtomicBool,
    malformed: AtomicU64,
}

impl std::fmt::Debug for Vring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vring").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Vring {
    /// The queue of that number, stopped.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(index: usize) -> std::io::Result<Arc<Self>> {
        let rings = Rings::new(SIZE_MAX).map_err(std::io::Error::other)?;
        let state = State {
            rings,
            memory: Arc::default(),
            kick: None,
            call: None,
            enabled: false,
            event_index: false,
            life: 0,
            tracker: None,
            again: VecDeque::new(),
            held: Vec::new(),
            off: Vec::new(),
            stopped_at: None,
            busy: 0,
            full: false,
            broken: false,
            draining: false,
            armed: false,
            owed: 0,
            prompt: 0,
            marks: Marks::Off,
            unmarked: false,
            used_in_log: None,
        };
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&events, &bell, BELL, epoll::EventFlags::IN)?;
        Ok(Arc::new(Self {
            index,
            state: Mutex::new(state),
            idle: Condvar::new(),
            bell,
            events,
            ended: AtomicBool::new(false),
            malformed: AtomicU64::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The monitor has the same descriptor, so that it would stay among the events when ours is closed.
    fn drop_kick(&self, state: &mut State) {
        if let Some(kick) = state.kick.take() {
            let _ = epoll::delete(&self.events, kick);
        }
    }

    fn ring_bell(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_le_bytes());
    }

    /// Chains that were refused.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    /// The guest's memory, as it is from now on.
    pub fn set_memory(&self, memory: Arc<Memory>) {
        self.state().memory = memory;
    }

    /// Where it is marked from now on what is written. Also while the queue runs: when this returns, nothing is written any more that is
    /// marked as it was before.
    pub fn set_marks(&self, marks: Marks) {
        let mut state = self.state();
        state.marks = marks;
        match &state.marks {
            Marks::Awaited => {}
            Marks::Off => state.unmarked = false,
            Marks::On(_) if !state.unmarked => {}
            Marks::On(log) => {
                // Anything may have been written meanwhile.
                let map = state.memory.map();
                map.iter().for_each(|region| log.mark(region.start_addr().0, region.len()));
                let used = USED_RING + USED_ELEMENT * u64::from(state.rings.size()) + 2;
                state.unmarked = false;
                state.mark_used(0, used);
            }
        }
    }

    /// Whether the guest and we name the next index of interest in place of flags.
    pub fn set_event_index(&self, on: bool) {
        let mut state = self.state();
        state.event_index = on;
        state.rings.set_event_idx(on);
    }

    /// Number of descriptors.
    ///
    /// # Errors
    /// It is no power of two, or too large.
    pub fn set_size(&self, size: u32) -> Result<(), String> {
        let size = u16::try_from(size).ok().filter(|s| s.is_power_of_two() && *s <= SIZE_MAX);
        let size = size.ok_or("a queue size that is no power of two up to 1024")?;
        self.state().rings.try_set_size(size).map_err(|e| format!("queue size: {e}"))
    }

    /// Where its parts lie, in the monitor's addresses, and, if the monitor says so, where the used ring begins for the log of dirty
    /// pages: an address that need not be in the guest's memory.
    ///
    /// # Errors
    /// Not in the guest's memory, or not aligned.
    pub fn set_addresses(
        &self,
        table: u64,
        avail: u64,
        used: u64,
        used_in_log: Option<u64>,
    ) -> Result<(), String> {
        let mut state = self.state();
        let guest = |what: &str, user: u64| {
            let address = state.memory.guest_address(user).map(GuestAddress);
            address.ok_or_else(|| format!("{what} at {user:#x} is not in the guest's memory"))
        };
        let (table, avail, used) =
            (guest("descriptors", table)?, guest("avail ring", avail)?, guest("used ring", used)?);
        let rings = &mut state.rings;
        rings.try_set_desc_table_address(table).map_err(|e| format!("descriptors: {e}"))?;
        rings.try_set_avail_ring_address(avail).map_err(|e| format!("avail ring: {e}"))?;
        rings.try_set_used_ring_address(used).map_err(|e| format!("used ring: {e}"))?;
        state.used_in_log = used_in_log;
        Ok(())
    }

    /// The next entry of the avail ring.
    pub fn set_base(&self, base: u16) {
        let mut state = self.state();
        if state.stopped_at != Some(base) {
            state.life += 1;
            state.held.clear();
            state.off.clear();
        }
        state.rings.set_next_avail(base);
    }

    /// Where the guest kicks: with that the queue starts. Without a descriptor there is nothing to wait for, and it does not.
    ///
    /// # Errors
    /// Rings that are not all in the guest's memory.
    pub fn start(&self, kick: Option<File>, region: Option<Arc<Region>>) -> Result<(), String> {
        let mut state = self.state();
        self.drop_kick(&mut state);
        if let Some(kick) = kick {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&self.events, &kick, KICK, flags)
                .map_err(|e| format!("queue {}: kick: {e}", self.index))?;
            state.kick = Some(kick.into());
        }
        let map = state.memory.map().clone();
        state.rings.set_ready(true);
        state.broken = false;
        if !state.rings.is_valid(&*map) {
            state.rings.set_ready(false);
            return Err(format!("queue {}: rings outside of the guest's memory", self.index));
        }
        let size = state.rings.size();
        let used = state.rings.used_idx(&*map, Ordering::Acquire).map_err(|e| e.to_string())?.0;
        state.rings.set_next_used(used);
        state.tracker = None;
        if let Some(region) = region {
            let (tracker, begun) = Tracker::open(region, self.index, size, used)
                .ok_or("inflight region has no room for the queue")?;
            // What the last device had taken from the ring and not given back; not what this one still has.
            if state.stopped_at.is_none() && !begun.is_empty() {
                let count = u16::try_from(begun.len()).unwrap_or(0);
                state.rings.set_next_avail(used.wrapping_add(count));
                state.again = begun.into();
            }
            state.tracker = Some(tracker);
        }
        // What another device had taken it knows from its state.
        let again = state.again.clone();
        if let Some(tracker) = &mut state.tracker {
            again.into_iter().filter(|head| *head < size).for_each(|head| tracker.begin(head));
        }
        state.stopped_at = None;
        state.armed = false;
        self.flush_held(&mut state);
        drop(state);
        self.ring_bell();
        Ok(())
    }

    /// Whether it has been started and not been stopped since.
    pub fn is_started(&self) -> bool {
        self.state().rings.ready()
    }

    /// Where the guest wants to be interrupted.
    pub fn set_call(&self, call: Option<File>) {
        let mut state = self.state();
        state.call = call;
        // What was given back meanwhile was told to nobody.
        if state.runs() {
            state.interrupt();
        }
    }

    /// Whether requests are taken.
    pub fn set_enabled(&self, enabled: bool) {
        let mut state = self.state();
        state.enabled = enabled;
        self.flush_held(&mut state);
        drop(state);
        self.ring_bell();
    }

    fn flush_held(&self, state: &mut State) {
        if !state.runs() || state.held.is_empty() {
            return;
        }
        for held in std::mem::take(&mut state.held) {
            let written = state.write(&held.map, &held.reply, &held.to);
            state.put(held.head, held.written.max(written));
        }
        state.owed = 0;
        state.interrupt();
    }

    /// Stops, when nobody writes to the guest's memory any more for its sake; the next entry of the avail ring.
    pub fn stop_at(&self) -> u16 {
        let mut state = self.state();
        self.drop_kick(&mut state);
        state.rings.set_ready(false);
        self.ring_bell();
        state.draining = true;
        let end = Instant::now() + DRAIN;
        while state.busy > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                log::warn!("queue {} is stopped while {} requests wait", self.index, state.busy);
                break;
            }
            let (back, _) =
                self.idle.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state = back;
        }
        state.draining = false;
        state.tell();
        let at = state.rings.next_avail();
        state.stopped_at = Some(at);
        at
    }

    /// The first descriptors of requests that were taken and are not given back. The queue is stopped.
    ///
    /// # Errors
    /// One is being served.
    pub fn begun(&self) -> Result<Vec<u16>, String> {
        let state = self.state();
        if state.busy > 0 {
            return Err(format!("{} requests of queue {} are served", state.busy, self.index));
        }
        let (again, held) = (state.again.iter().copied(), state.held.iter().map(|held| held.head));
        Ok(again.chain(held).chain(state.off.iter().copied()).collect())
    }

    /// These were taken by the device from which the guest comes, and are done again when the queue starts.
    pub fn begin_again(&self, heads: impl IntoIterator<Item = u16>) {
        let mut state = self.state();
        // Of whom it served before nothing is left.
        state.life += 1;
        state.held.clear();
        state.off.clear();
        state.stopped_at = None;
        state.again = heads.into_iter().collect();
    }

    /// The guest has given up all that it had asked.
    pub fn reset(&self) {
        self.stop_at();
        let mut state = self.state();
        state.life += 1;
        state.owed = 0;
        state.held.clear();
        state.off.clear();
        state.again.clear();
        state.stopped_at = None;
        state.call = None;
        state.enabled = false;
        state.tracker = None;
        state.memory = Arc::default();
        (state.marks, state.unmarked, state.used_in_log) = (Marks::Off, false, None);
        state.rings.reset();
    }

    /// Takes a chain apart. None if it is not as it should be.
    fn walk(state: &State, head: u16) -> Option<(Vec<Piece>, Vec<Piece>)> {
        let map = state.memory.map();
        let mut readable = Vec::with_capacity(8);
        let mut writable = Vec::with_capacity(8);
        let (mut table, mut size) = (GuestAddress(state.rings.desc_table()), state.rings.size());
        let (mut at, mut seen, mut indirect) = (head, 0u32, false);
        let (mut to_read, mut to_write) = (0usize, 0usize);
        loop {
            seen += 1;
            if at >= size || seen > u32::from(size) {
                return None;
            }
            let address = table.0.checked_add(u64::from(at) * 16)?;
            let raw: [u8; 16] = map.read_obj(GuestAddress(address)).ok()?;
            let (address, len) = (u64::from_le_bytes(raw[..8].try_into().ok()?), &raw[8..12]);
            let len = u32::from_le_bytes(len.try_into().ok()?);
            let flags = u16::from_le_bytes([raw[12], raw[13]]);
            let next = u16::from_le_bytes([raw[14], raw[15]]);
            if flags & INDIRECT != 0 {
                // Such a table stands in place of the rest of the chain, and has none in it.
                let entries = u16::try_from(len / 16).ok().filter(|n| *n > 0 && len % 16 == 0)?;
                if indirect || flags & NEXT != 0 {
                    return None;
                }
                (table, size, at, seen, indirect) = (GuestAddress(address), entries, 0, 0, true);
                continue;
            }
            let len = len as usize;
            if flags & 2 == 0 {
                to_read = to_read.checked_add(len)?;
                let room = PIECES_MAX;
                if !writable.is_empty()
                    || to_read > REQUEST_BYTES_MAX
                    || !pieces(map, address, len, room, &mut readable)
                {
                    return None;
                }
            } else {
                to_write = to_write.checked_add(len)?;
                let room = PIECES_MAX;
                if u32::try_from(to_write).is_err()
                    || !pieces(map, address, len, room, &mut writable)
                {
                    return None;
                }
            }
            if flags & NEXT == 0 {
                return Some((readable, writable));
            }
            at = next;
        }
    }

    fn give_back(&self, chain: &RingChain, written: u32, was_busy: bool) {
        let took = chain.since.elapsed();
        let mut state = self.state();
        // Whatever becomes of the chain: the guest's memory is as it is.
        chain.mark(&mut state, written as usize);
        if state.life == chain.life {
            let head = chain.head;
            if !was_busy {
                state.off.retain(|off| *off != head);
            }
            // Who stops the queue waits for us.
            if state.runs() || was_busy && state.draining {
                state.put(head, written);
                if was_busy && !state.draining {
                    state.tell_soon(took);
                } else {
                    state.tell();
                }
            } else {
                let (reply, to, map) = (Vec::new(), Vec::new(), chain.map.clone());
                state.held.push(Held { head, written, reply, to, map });
            }
        }
        if was_busy {
            self.not_busy(&mut state);
        }
    }

    fn not_busy(&self, state: &mut State) {
        state.busy = state.busy.saturating_sub(1);
        if std::mem::take(&mut state.full) {
            self.ring_bell();
        }
        // A call into the kernel, also where nobody waits.
        if state.busy == 0 && state.draining {
            self.idle.notify_all();
        }
    }
}

impl Queue for Arc<Vring> {
    fn next(&self) -> Option<Box<dyn Chain>> {
        let mut state = self.state();
        loop {
            if !state.runs() || self.ended.load(Ordering::Acquire) {
                return None;
            }
            // A guest has no descriptors for more; one that gives the same ones again and again is served as those come back.
            if state.busy + state.off.len() + state.held.len() >= usize::from(state.rings.size()) {
                state.full = true;
                state.tell();
                return None;
            }
            let map = state.memory.map().clone();
            let at = state.rings.next_avail();
            let (head, is_again) = match state.again.pop_front() {
                Some(head) => (head, true),
                None if state.available() == 0 => {
                    state.tell();
                    return None;
                }
                None => match state.rings.pop_descriptor_chain(&*map) {
                    Some(chain) => (chain.head_index(), false),
                    None => {
                        state.tell();
                        return None;
                    }
                },
            };
            if head >= state.rings.size() {
                // It has no descriptor that could be given back.
                self.malformed.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if !is_again && let Some(tracker) = &mut state.tracker {
                tracker.begin(head);
            }
            let Some((readable, writable)) = Vring::walk(&state, head) else {
                self.malformed.fetch_add(1, Ordering::Relaxed);
                state.put(head, 0);
                state.tell();
                continue;
            };
            state.busy += 1;
            let (ring, life) = (self.clone(), state.life);
            return Some(Box::new(RingChain {
                ring,
                head,
                at,
                life,
                readable,
                writable,
                map,
                is_again,
                touched: 0,
                stage: Stage::Busy,
                since: Instant::now(),
            }));
        }
    }

    fn wait(&self, spin: Duration) -> Woken {
        if self.ended.load(Ordering::Acquire) {
            return Woken::Stop;
        }
        if !spin.is_zero() {
            let end = Instant::now() + spin;
            loop {
                if self.state().is_waiting() {
                    return Woken::Look;
                }
                if Instant::now() >= end {
                    break;
                }
                (0..32).for_each(|_| std::hint::spin_loop());
            }
        }
        {
            let mut state = self.state();
            state.tell();
            if state.runs() {
                state.armed = true;
                let came = state.want_kick(true);
                if (came && state.available() > 0) || state.is_waiting() {
                    state.want_kick(false);
                    return Woken::Look;
                }
            }
        }
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: NO_EVENT }; 2];
        // A wait that is cut short is a look too many.
        let count = epoll::wait(&self.events, &mut events[..], None).unwrap_or(0);
        if events[..count].iter().any(|event| { event.data } == BELL) {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
        if self.ended.load(Ordering::Acquire) {
            return Woken::Stop;
        }
        let mut state = self.state();
        if state.runs() && state.armed {
            state.armed = false;
            state.want_kick(false);
        }
        Woken::Look
    }

    fn is_stopped(&self) -> bool {
        !self.state().runs()
    }

    fn flush(&self) {
        self.state().tell();
    }

    fn stop(&self) {
        self.ended.store(true, Ordering::Release);
        // One look for each thread that may wait: the bell is level, and is not read any more after the first.
        for _ in 0..2 {
            self.ring_bell();
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Somebody is at it.
    Busy,
    /// It waits for something, and its reply comes later.
    Off,
    /// It was given back.
    Done,
}

struct RingChain {
    ring: Arc<Vring>,
    head: u16,
    /// Where in the ring it was taken.
    at: u16,
    life: u64,
    readable: Vec<Piece>,
    writable: Vec<Piece>,
    map: Arc<GuestMemoryMmap<()>>,
    is_again: bool,
    /// Bytes of the writable pieces that may have been written, beside the reply.
    touched: usize,
    stage: Stage,
    /// When it was taken.
    since: Instant,
}

impl RingChain {
    /// Marks what was written of the pieces.
    fn mark(&self, state: &mut State, written: usize) {
        state.mark_pieces(&self.map, &self.writable, written.max(self.touched));
    }
}

impl Chain for RingChain {
    fn readable(&self) -> &[Piece] {
        &self.readable
    }

    fn writable(&self) -> &[Piece] {
        &self.writable
    }

    fn is_again(&self) -> bool {
        self.is_again
    }

    fn put_back(mut self: Box<Self>) {
        let busy = self.stage == Stage::Busy;
        self.stage = Stage::Done;
        let mut state = self.ring.state();
        if state.life == self.life {
            if self.is_again || state.rings.next_avail() != self.at.wrapping_add(1) {
                state.again.push_front(self.head);
            } else {
                // Whoever is told where the queue stands, or looks into the book of what was begun, finds it there.
                state.rings.set_next_avail(self.at);
                if let Some(tracker) = &mut state.tracker {
                    tracker.unbegin(self.head);
                }
            }
        }
        if busy {
            self.ring.not_busy(&mut state);
        }
    }

    fn touches(&mut self, bytes: usize) {
        self.touched = self.touched.max(bytes);
    }

    fn complete(mut self: Box<Self>, written: u32) {
        let busy = self.stage == Stage::Busy;
        self.stage = Stage::Done;
        self.ring.give_back(&self, written, busy);
    }

    fn answer(mut self: Box<Self>, head: &[u8], payload: &[u8]) {
        let busy = self.stage == Stage::Busy;
        self.stage = Stage::Done;
        let mut state = self.ring.state();
        if state.life == self.life {
            let whole = [head, payload].concat();
            // Who stops the queue waits for us.
            if state.runs() || busy && state.draining {
                let written = state.write(&self.map, &whole, &self.writable);
                state.put(self.head, written);
                if state.draining {
                    state.tell();
                } else {
                    state.tell_soon(self.since.elapsed());
                }
            } else {
                let (head, to) = (self.head, std::mem::take(&mut self.writable));
                let map = self.map.clone();
                state.held.push(Held { head, written: 0, reply: whole, to, map });
            }
        }
        if busy {
            self.ring.not_busy(&mut state);
        }
    }

    fn put_off(&mut self) {
        if self.stage == Stage::Busy {
            self.stage = Stage::Off;
            let mut state = self.ring.state();
            if state.life == self.life {
                state.off.push(self.head);
            }
            // Nobody looks at the pieces until the reply comes, so this is all so far; and it may come too late for the log.
            self.mark(&mut state, 0);
            self.ring.not_busy(&mut state);
        }
    }

    fn reply(mut self: Box<Self>, reply: &[u8]) {
        let busy = self.stage == Stage::Busy;
        self.stage = Stage::Done;
        let mut state = self.ring.state();
        if state.life == self.life {
            state.off.retain(|head| *head != self.head);
            if state.runs() {
                let written = state.write(&self.map, reply, &self.writable);
                state.put(self.head, written);
                state.tell();
            } else {
                let to = std::mem::take(&mut self.writable);
                let (head, reply) = (self.head, reply.to_vec());
                state.held.push(Held { head, written: 0, reply, to, map: self.map.clone() });
            }
        }
        if busy {
            self.ring.not_busy(&mut state);
        }
    }
}

impl Drop for RingChain {
    fn drop(&mut self) {
        match self.stage {
            Stage::Busy => self.ring.give_back(self, 0, true),
            // Whoever waited for it is gone.
            Stage::Off => {
                let mut state = self.ring.state();
                if state.life == self.life
                    && let Some(at) = state.off.iter().position(|head| *head == self.head)
                {
                    state.off.swap_remove(at);
                }
            }
            Stage::Done => {}
        }
    }
}

/// The queues of a device, as a transport.
#[derive(Debug)]
pub struct Vrings {
    /// The first is for what must not wait behind others.
    pub all: Vec<Arc<Vring>>,
    /// Whose they are.
    pub tenant: String,
}

impl Vrings {
    /// Requests that have no answer yet: queue and first descriptor. All queues are stopped.
    ///
    /// # Errors
    /// One is being served.
    pub fn begun(&self) -> Result<Vec<(u16, u16)>, String> {
        let mut all = Vec::new();
        for (queue, ring) in (0u16..).zip(&self.all) {
            all.extend(ring.begun()?.into_iter().map(|head| (queue, head)));
        }
        Ok(all)
    }

    /// Those of a device from which the guest comes.
    ///
    /// # Errors
    /// That has more queues.
    pub fn has_queues(&self, begun: &[(u16, u16)]) -> Result<(), String> {
        match begun.iter().find(|(q, _)| usize::from(*q) >= self.all.len()) {
            Some((queue, _)) => Err(format!("requests of queue {queue}, which is not here")),
            None => Ok(()),
        }
    }

    /// They are done again when the queues start.
    pub fn begin_again(&self, begun: &[(u16, u16)]) {
        for (queue, ring) in (0u16..).zip(&self.all) {
            ring.begin_again(begun.iter().filter(|(q, _)| *q == queue).map(|(_, head)| *head));
        }
    }
}

impl hal::Transport for Vrings {
    fn queues(&self) -> Vec<Arc<dyn Queue>> {
        self.all.iter().map(|ring| Arc::new(ring.clone()) as Arc<dyn Queue>).collect()
    }

    fn tenant(&self) -> &str {
        &self.tenant
    }
}
