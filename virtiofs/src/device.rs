//! A device: takes requests from the queues of a transport and serves them.
//!
//! Each queue has one thread that leads: it takes requests and serves them at once. Before one that may wait for a disk or
//! other nodes (`fsync`) it hands the lead to a thread that is free, if there is one, unless nothing came lately while one waited:
//! waking somebody for nothing is what an `fsync` alone need not pay. A leader that does not come back from a
//! request, since the node of the file system is away, is deposed by the watch, which gives the queue another thread: so what
//! needs no node goes on. A request that waits for a lock has no thread at all, and one that its file system begins neither
//! ([`Waiting`]): syncs of a volume while others come, reads and writes of a back end that says when they have ended.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use client::fs::{FileSystem, Waiting};
use frontend::fuse::wire::{CopyFileRangeIn, InHeader, OutHeader, ReadIn, WriteIn, op};
use frontend::fuse::{
    Guest, IO_BYTES_MAX, LaterReply, Options as ServerOptions, REQUEST_BYTES_MAX, ReplySink,
    Server, Told,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::again::{self, Instead};
use crate::hal::{Chain, Piece, Queue, Transport, Woken, gather, scatter, skip};
use crate::ledger::{Kept, Ledger};
use crate::limits::Limits;
use crate::pace::Pace;
use crate::share::{Member, Sample, Turn};
use crate::transfer::Seal;

/// Between two looks of the watch.
const LOOK: Duration = Duration::from_millis(100);
/// After so many looks at nothing the watch sleeps until a request comes.
const IDLE: u32 = 10;
/// Requests for which it is taken for granted that others come while one waits.
const CROWD: u32 = 16;
/// Threads of a queue at most, when all of them wait.
const THREADS_MAX: usize = 64;
/// Header and arguments of a WRITE: what is copied of it.
const WRITE_HEAD: usize = size_of::<InHeader>() + size_of::<WriteIn>();
/// Bytes that a copy within the file system is charged for at most.
const COPY_CHARGE_MAX: u64 = 1 << 30;
/// Requests that are begun and have not ended; more of them are waited for.
const BEGUN_MAX: usize = 4096;
/// Bytes of data that requests hold which were begun and have not ended; more of them are waited for.
const BEGUN_BYTES_MAX: usize = 64 << 20;
/// A thread keeps buffers up to this size between requests.
const KEEP_BYTES: usize = 256 << 10;

/// How a device behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of each queue: one leads, the others take what may wait.
    pub threads: usize,
    /// How long a thread looks for the next request before it sleeps, when requests come fast.
    pub poll: Duration,
    /// Nodes and open files of the guest.
    pub guest: Guest,
    /// Operations and bytes a second.
    pub limits: Arc<Limits>,
    /// The book that outlives the device.
    pub ledger: Option<Arc<Ledger>>,
    /// What it has of the processors, if others are in the process.
    pub share: Option<Member>,
    /// What seals its state on the way to another device; without one it does not travel.
    pub seal: Option<Seal>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: 2,
            poll: Duration::from_micros(20),
            guest: Guest { nodes_max: 1 << 20, handles_max: 1 << 16 },
            limits: Arc::default(),
            ledger: None,
            share: None,
            seal: None,
        }
    }
}

/// What a device serves, to one guest after the other.
pub struct Device {
    fs: Arc<dyn FileSystem>,
    options: Options,
    server: RwLock<Arc<Server<dyn FileSystem>>>,
    /// Of the servers of guests before, of which the last requests, and what is forgotten with them, may come late.
    told: Arc<Told>,
    /// Requests that came in a form that is none.
    malformed: AtomicU64,
    /// Requests that were begun and have not ended.
    begun: Arc<Begun>,
    ended: AtomicBool,
    place: Mutex<Place>,
}

/// Where the guest is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Here,
    /// What another device must know was told: that goes on, which shows this secret, made of these numbers, or this one does, which is an heir
    /// by another one of its own.
    Leaving {
        secret: u128,
        drawn: [u64; 2],
        own: u128,
    },
    /// This device goes on for a guest from elsewhere, whose queues have not started.
    Arriving {
        own: u128,
    },
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Device {
    /// A device in front of `fs`.
    pub fn new(fs: Arc<dyn FileSystem>, options: Options) -> Arc<Self> {
        let told = Arc::default();
        let server = RwLock::new(Self::server_of(&fs, &options, &told));
        let (malformed, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        let (place, begun) = (Mutex::new(Place::Here), Arc::default());
        Arc::new(Self { fs, options, server, told, malformed, begun, ended, place })
    }

    fn server_of(
        fs: &Arc<dyn FileSystem>,
        options: &Options,
        told: &Arc<Told>,
    ) -> Arc<Server<dyn FileSystem>> {
        let server = Arc::new(Server::new(
            fs.clone(),
            ServerOptions {
                groups_from_proc: false,
                ledger: options.ledger.clone().map(|ledger| ledger as Arc<_>),
                shared_locks: true,
                guest: Some(options.guest),
                told: Some(told.clone()),
                ..ServerOptions::default()
            },
        ));
        if server.shares_locks() {
            let locks = server.clone();
            let spawned = std::thread::Builder::new()
                .name("virtiofs-locks".into())
                .spawn(move || locks.run_locks());
            if let Err(error) = spawned {
                log::error!("nobody serves those who wait for locks: {error}");
            }
        }
        server
    }

    /// The server of the guest that is there.
    pub fn server(&self) -> Arc<Server<dyn FileSystem>> {
        self.server.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes on for the guest of a device that was killed, or from which it moves; how many of its open files are lost, and of its locks.
    pub fn resume(&self, kept: Kept) -> (usize, usize) {
        self.server().resume(kept.told, kept.opened, &kept.locked, kept.secret)
    }

    /// What another device must know to go on for the guest, which shows that secret, made of those numbers. Its queues must be stopped, and
    /// when they start again this device [goes on](Self::go_on).
    pub fn leave(&self, secret: u128, drawn: [u64; 2]) -> Kept {
        let mut place = self.place();
        let server = self.server();
        let (told, opened) = server.state();
        let locked = server.leave_locks(secret);
        let own = self.lend_heir(*place, secret);
        *place = Place::Leaving { secret, drawn, own };
        Kept { told, opened, locked, begun: Vec::new(), secret: Some(secret) }
    }

    /// The guest's queues start: it is here, and goes nowhere.
    pub fn go_on(&self) {
        let mut place = self.place();
        match std::mem::replace(&mut *place, Place::Here) {
            Place::Here => {}
            Place::Leaving { secret, own, .. } => {
                let lost = self.server().retake_locks(secret);
                self.take_heir_back(own);
                log::warn!("the guest has not moved, and goes on here; {lost} locks are lost");
            }
            Place::Arriving { own } => {
                self.server().arrive();
                self.take_heir_back(own);
            }
        }
    }

    /// Of what the secret was made by which another device goes on for the guest.
    pub fn drawn(&self) -> Option<[u64; 2]> {
        match *self.place() {
            Place::Leaving { drawn, .. } => Some(drawn),
            Place::Here | Place::Arriving { .. } => None,
        }
    }

    /// Killed and started again meanwhile, this device is the heir of the one that knows that secret. What it was by before.
    fn lend_heir(&self, place: Place, secret: u128) -> u128 {
        let Some(ledger) = &self.options.ledger else { return 0 };
        let own = match place {
            Place::Here => ledger.heir(),
            Place::Leaving { own, .. } | Place::Arriving { own } => own,
        };
        ledger.set_heir(secret);
        own
    }

    fn take_heir_back(&self, own: u128) {
        self.options.ledger.iter().for_each(|ledger| ledger.set_heir(own));
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on for the guest of a device on another machine, in place of the one that was here; how many of its open files are lost, and of its
    /// locks.
    ///
    /// # Errors
    /// It knows more than a guest here may, or has more open.
    pub fn take_over(&self, kept: Kept) -> Result<(usize, usize), String> {
        let Guest { nodes_max, handles_max } = self.options.guest;
        if kept.told.len() > nodes_max || kept.opened.len() > handles_max {
            return Err(format!(
                "a guest that knows {} inodes and has {} files open, where it may know {nodes_max} and open {handles_max}",
                kept.told.len(),
                kept.opened.len()
            ));
        }
        self.reset();
        if let Some(ledger) = &self.options.ledger {
            ledger.take_over(&kept);
        }
        if let Some(secret) = kept.secret {
            // Should it be the other one that goes on in the end, that gets them back.
            let own = self.lend_heir(Place::Here, secret);
            *self.place() = Place::Arriving { own };
            if let Err(error) = self.fs.leave(Some(secret)) {
                log::warn!("locks of a guest that comes: {error}");
            }
        }
        Ok(self.resume(kept))
    }

    /// The guest is gone, or begins anew: what it had open and locked is given back.
    pub fn reset(&self) {
        let was = std::mem::replace(&mut *self.place(), Place::Here);
        if was != Place::Here {
            // Now, and not when the last request has ended: by then the guest may have come back, and have locked the same again.
            let server = self.server();
            server.give_locks_back();
            server.arrive();
            if let Place::Leaving { own, .. } | Place::Arriving { own } = was {
                self.take_heir_back(own);
            }
        }
        if let Some(ledger) = &self.options.ledger {
            // Its locks go when the last request of it has ended.
            ledger.part();
            ledger.clear();
        }
        let fresh = Self::server_of(&self.fs, &self.options, &self.told);
        let old = {
            let mut server = self.server.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *server, fresh)
        };
        old.close_locks();
    }

    /// The guest is gone. Where there is none that is nothing.
    pub fn forget_guest(&self) {
        if self.server().is_ready() {
            self.reset();
        }
    }

    /// What seals its state on the way to another device, if it may travel.
    pub fn seal(&self) -> Option<&Seal> {
        self.options.seal.as_ref()
    }

    /// What a guest may know and have open here.
    pub fn guest(&self) -> Guest {
        self.options.guest
    }

    /// Requests that could not be read.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    /// Counters as text: `name value` lines.
    pub fn stats_text(&self) -> String {
        self.server().stats_text()
    }

    /// Starts the threads of all queues.
    ///
    /// # Errors
    /// Out of threads.
    pub fn start(self: &Arc<Self>, transport: &dyn Transport) -> std::io::Result<Crew> {
        let queues = transport.queues();
        let mut crew = Crew { device: self.clone(), seats: Vec::new(), watch: None };
        let watcher = Arc::new(Watcher::default());
        for (index, queue) in queues.into_iter().enumerate() {
            let name = thread_name(index, transport.tenant());
            let seat = Arc::new(Seat::new(index, name, queue, watcher.clone()));
            crew.seats.push(seat.clone());
            for _ in 0..self.options.threads.max(1) {
                seat.add(self)?;
            }
        }
        let (device, seats) = (self.clone(), crew.seats.clone());
        let watch = std::thread::Builder::new()
            .name("virtiofs-watch".into())
            .spawn(move || watch(&device, &seats, &watcher))?;
        crew.watch = Some(watch);
        Ok(crew)
    }

    /// Serves one request.
    pub fn serve(&self, chain: Box<dyn Chain>, scratch: &mut Scratch) {
        self.serve_among(chain, scratch, false);
    }

    /// The same; whether others come while one waits.
    fn serve_among(&self, chain: Box<dyn Chain>, scratch: &mut Scratch, others: bool) {
        let len: usize = chain.readable().iter().map(Piece::len).sum();
        let mut head = [0u8; WRITE_HEAD];
        let had = gather(chain.readable(), &mut head);
        let Ok((header, _)) = InHeader::ref_from_prefix(&head[..had]) else {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            chain.complete(0);
            return;
        };
        if len > REQUEST_BYTES_MAX {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            let mut sink = Sink::new(chain, &mut scratch.payload);
            sink.refuse(header.unique.get());
            return;
        }
        let opcode = header.opcode.get();
        if opcode == op::INIT && self.server().is_ready() {
            self.reset();
        }
        let server = self.server();
        if opcode == op::WRITE && had == WRITE_HEAD {
            // The data stay where they are.
            let data: Vec<Piece> = skip(chain.readable(), WRITE_HEAD).collect();
            let slices: Vec<IoSlice<'_>> = data.iter().map(Piece::as_slice).collect();
            let mut sink = Sink::new(chain, &mut scratch.payload).of(self, others);
            server.handle_pieces(&head, &slices, &mut sink);
        } else if len <= WRITE_HEAD && !(chain.is_again() && again::concerns(opcode)) {
            let mut sink = Sink::new(chain, &mut scratch.payload).of(self, others);
            server.handle(&head[..had], &mut sink);
        } else {
            let request = &mut scratch.request;
            request.resize(len, 0);
            request[..had].copy_from_slice(&head[..had]);
            // From behind what was looked at: it is not read twice.
            let mut done = had;
            for piece in skip(chain.readable(), had) {
                done += piece.read(&mut request[done..]);
            }
            if chain.is_again() && again::concerns(opcode) {
                Self::serve_again(&server, &request[..done], chain, &mut scratch.payload);
            } else {
                let mut sink = Sink::new(chain, &mut scratch.payload).of(self, others);
                server.handle(&request[..done], &mut sink);
            }
        }
        scratch.shrink();
    }

    /// Serves a request that may have been done already.
    fn serve_again(
        server: &Server<dyn FileSystem>,
        request: &[u8],
        chain: Box<dyn Chain>,
        payload: &mut Vec<u8>,
    ) {
        let mut sink = Sink::new(chain, payload);
        sink.holds_errors = true;
        server.handle(request, &mut sink);
        let Some((unique, error)) = sink.held.take() else { return };
        sink.holds_errors = false;
        match again::instead(request, error) {
            Instead::Fail => sink.send(OutHeader::alone(unique, error).as_bytes(), 0),
            Instead::Done => sink.send(again::done(unique).as_bytes(), 0),
            Instead::Ask(request) => {
                server.handle(&request, &mut sink);
                true
            }
        };
    }
}

/// A thread's buffers.
#[derive(Debug, Default)]
pub struct Scratch {
    request: Vec<u8>,
    payload: Vec<u8>,
}

impl Scratch {
    fn shrink(&mut self) {
        for buffer in [&mut self.request, &mut self.payload] {
            if buffer.capacity() > KEEP_BYTES {
                *buffer = Vec::new();
            }
        }
    }
}

/// Whoever comes first answers.
type Shared = Arc<Mutex<Option<Box<dyn Chain>>>>;

fn take(shared: &Shared) -> Option<Box<dyn Chain>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The way back of one request.
struct Sink<'a> {
    chain: Option<Box<dyn Chain>>,
    /// Where the chain is once a later reply was asked for.
    shared: Option<Shared>,
    payload: &'a mut Vec<u8>,
    /// Bytes of payload that the guest has room for.
    room: usize,
    /// Where the payload is read to directly, if it was.
    places: Option<Vec<Piece>>,
    /// An error is not sent, but kept in `held`: number and error.
    holds_errors: bool,
    held: Option<(u64, i32)>,
    /// Where requests that are begun are counted, if any may be; and whether others come meanwhile.
    begun: Option<&'a Arc<Begun>>,
    others: bool,
}

impl<'a> Sink<'a> {
    fn new(chain: Box<dyn Chain>, payload: &'a mut Vec<u8>) -> Self {
        let room = chain.writable().iter().map(Piece::len).sum::<usize>();
        let room = room.saturating_sub(size_of::<OutHeader>());
        let (shared, places, held, begun) = (None, None, None, None);
        let (chain, holds_errors, others) = (Some(chain), false, false);
        Self { chain, shared, payload, room, places, holds_errors, held, begun, others }
    }

    fn of(mut self, device: &'a Device, others: bool) -> Self {
        (self.begun, self.others) = (Some(&device.begun), others);
        self
    }

    fn take(&mut self) -> Option<Box<dyn Chain>> {
        self.chain.take().or_else(|| self.shared.as_ref().and_then(take))
    }

    /// EIO, without a look at the request.
    fn refuse(&mut self, unique: u64) {
        let error = -i32::from(base::Errno::IO.0);
        self.send(OutHeader::alone(unique, error).as_bytes(), 0);
    }
}

impl ReplySink for Sink<'_> {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.room).min(IO_BYTES_MAX);
        if self.payload.len() < len {
            self.payload.resize(len, 0);
        }
        &mut self.payload[..len]
    }

    fn pieces(&mut self, len: usize) -> Option<Vec<IoSliceMut<'_>>> {
        let chain = self.chain.as_mut()?;
        chain.touches(size_of::<OutHeader>().saturating_add(len));
        let mut left = len;
        let places = skip(chain.writable(), size_of::<OutHeader>())
            .map(|piece| {
                let piece = piece.take(left);
                left -= piece.len();
                piece
            })
            .filter(|piece| !piece.is_empty())
            .collect();
        Some(self.places.insert(places).iter_mut().map(Piece::as_slice_mut).collect())
    }

    fn later(&mut self) -> Option<Box<dyn LaterReply>> {
        if let Some(chain) = self.chain.take() {
            self.shared = Some(Arc::new(Mutex::new(Some(chain))));
        }
        Some(Box::new(Later(self.shared.clone()?)))
    }

    fn hold(&mut self, bytes: usize, for_others: bool) -> Option<Box<dyn LaterReply>> {
        let begun = self.begun.filter(|_| self.others || !for_others)?;
        let hold = Hold::new(begun, bytes)?;
        Some(Box::new(Held { chain: self.chain.take()?, _hold: hold }))
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        if self.holds_errors
            && let Ok((out, _)) = OutHeader::ref_from_prefix(head)
            && out.error.get() != 0
        {
            self.held = Some((out.unique.get(), out.error.get()));
            return true;
        }
        let Some(chain) = self.take() else { return false };
        let room: usize = chain.writable().iter().map(Piece::len).sum();
        if head.len() + payload_len > room {
            let fits = room >= size_of::<OutHeader>();
            let error = no_room(head);
            let written = if fits { scatter(error.as_bytes(), chain.writable()) } else { 0 };
            chain.complete(u32::try_from(written).unwrap_or(0));
            return false;
        }
        let mut written = scatter(head, chain.writable());
        if self.places.is_some() {
            written += payload_len;
        } else if payload_len > 0 {
            let to: Vec<Piece> = skip(chain.writable(), head.len()).collect();
            written += scatter(&self.payload[..payload_len.min(self.payload.len())], &to);
        }
        chain.complete(u32::try_from(written).unwrap_or(0));
        true
    }
}

/// What a guest is told that has left no room for the reply that begins with `head`.
fn no_room(head: &[u8]) -> OutHeader {
    let unique = head.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    OutHeader::alone(unique, -i32::from(base::Errno::IO.0))
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            chain.complete(0); // FORGET and the like
        } else if let Some(shared) = &self.shared
            && let Some(chain) = shared.lock().unwrap_or_else(PoisonError::into_inner).as_mut()
        {
            chain.put_off();
        }
    }
}

/// Requests of a device that were begun and have not ended, and the bytes that they hold.
#[derive(Default)]
struct Begun {
    requests: AtomicUsize,
    bytes: AtomicUsize,
}

/// One of them.
struct Hold {
    of: Arc<Begun>,
    bytes: usize,
}

impl Hold {
    /// None if it would be too many, or too many bytes.
    fn new(of: &Arc<Begun>, bytes: usize) -> Option<Self> {
        let others = of.requests.fetch_add(1, Ordering::Relaxed);
        let before = of.bytes.fetch_add(bytes, Ordering::Relaxed);
        let hold = Self { of: of.clone(), bytes };
        let fits = bytes == 0 || before.saturating_add(bytes) <= BEGUN_BYTES_MAX;
        (fits && others < BEGUN_MAX).then_some(hold)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.of.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.of.requests.fetch_sub(1, Ordering::Release);
    }
}

/// The way back of a request that was begun.
struct Held {
    chain: Box<dyn Chain>,
    _hold: Hold,
}

impl LaterReply for Held {
    fn send(self: Box<Self>, reply: &[u8]) {
        self.send_with(reply, &[]);
    }

    fn send_with(self: Box<Self>, head: &[u8], payload: &[u8]) {
        let Self { chain, _hold } = *self;
        let room: usize = chain.writable().iter().map(Piece::len).sum();
        if head.len() + payload.len() <= room {
            chain.answer(head, payload);
        } else if room >= size_of::<OutHeader>() {
            chain.answer(no_room(head).as_bytes(), &[]);
        } else {
            chain.complete(0);
        }
    }
}

struct Later(Shared);

impl LaterReply for Later {
    fn send(self: Box<Self>, reply: &[u8]) {
        if let Some(chain) = take(&self.0) {
            chain.reply(reply);
        }
    }
}

/// Of the threads of a queue: of many devices in a process it is to be seen whose they are. The kernel keeps the first 15 bytes.
fn thread_name(index: usize, tenant: &str) -> String {
    match tenant {
        "" => format!("virtiofs-{index}"),
        tenant => format!("vfs-{index}-{}", tenant.replace('\0', "")),
    }
}

/// Whether a request is likely to wait for a disk or for other nodes.
fn may_wait(opcode: u32) -> bool {
    matches!(
        opcode,
        op::FSYNC | op::FSYNCDIR | op::SYNCFS | op::FALLOCATE | op::COPY_FILE_RANGE | op::DESTROY
    )
}

/// Whether it is one that a file system may be able to begin ([`Waiting`]).
fn is_sync(opcode: u32) -> bool {
    matches!(opcode, op::FSYNC | op::FSYNCDIR | op::SYNCFS)
}

/// Whether a request only gives something back, or up: it is not held back, and not counted.
fn is_free(opcode: u32) -> bool {
    matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT)
}

/// Operation and size of a request, as far as its first bytes say.
fn peek(chain: &dyn Chain) -> (u32, u64) {
    let mut head = [0u8; size_of::<InHeader>() + size_of::<CopyFileRangeIn>()];
    let had = gather(chain.readable(), &mut head);
    let Ok((header, rest)) = InHeader::ref_from_prefix(&head[..had]) else { return (0, 0) };
    let opcode = header.opcode.get();
    let (bytes, most) = match opcode {
        // All have it at the same place.
        op::READ | op::WRITE | op::READDIR | op::READDIRPLUS => {
            let size = ReadIn::ref_from_prefix(rest).map_or(0, |(arg, _)| arg.size.get());
            (size.into(), IO_BYTES_MAX as u64)
        }
        op::COPY_FILE_RANGE => {
            let len = CopyFileRangeIn::ref_from_prefix(rest).map_or(0, |(arg, _)| arg.len.get());
            (len, COPY_CHARGE_MAX)
        }
        _ => (0, 0),
    };
    (opcode, bytes.min(most))
}

#[derive(Debug, Default)]
struct Lead {
    /// Who leads: a number, or 0.
    leader: u64,
    last: u64,
    /// Threads that wait for the lead, and all.
    waiting: usize,
    threads: usize,
    ended: bool,
}

/// The lead of a queue.
struct Seat {
    index: usize,
    /// Of its threads.
    name: String,
    queue: Arc<dyn Queue>,
    lead: Mutex<Lead>,
    free: Condvar,
    /// Looks of the watch so far, beginning with 1: a clock that costs nothing.
    looks: AtomicU64,
    /// What they were when the leader took the request that it is at; 0: it is at none.
    since: AtomicU64,
    /// The leader's number, as in `lead`.
    leader: AtomicU64,
    /// Who looks.
    watcher: Arc<Watcher>,
    /// The leader's place among the devices of the process.
    place: Mutex<Option<Turn>>,
    /// What one leader tells the next.
    habits: Mutex<Option<Habits>>,
}

/// What was learnt of a queue's guest.
struct Habits {
    pace: Pace,
    /// For so many requests that may wait the lead is given away before: others came while one did.
    crowd: u32,
}

impl Seat {
    fn new(index: usize, name: String, queue: Arc<dyn Queue>, watcher: Arc<Watcher>) -> Self {
        let (lead, free) = (Mutex::default(), Condvar::new());
        let (looks, since, leader) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0));
        let (place, habits) = (Mutex::default(), Mutex::default());
        Self { index, name, queue, lead, free, looks, since, leader, watcher, place, habits }
    }

    /// Leaves the place to others.
    fn leave(&self) {
        drop(self.place.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The same, by the thread that has it and goes to sleep.
    fn rest(&self) {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(turn) = place {
            crate::slice::set(turn.end());
        }
    }

    /// Returns with a place, which may be the one of the last request. What is to be ended when this one is served, if it is measured.
    fn enter(&self, share: &Member, opcode: u32, bytes: u64) -> Option<Sample> {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        if !place.as_mut().is_some_and(Turn::goes_on) {
            drop(place.take());
            drop(place);
            self.queue.flush();
            let turn = share.turn();
            place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
            *place = Some(turn);
        }
        let turn = place.as_ref()?;
        crate::slice::set(turn.slice());
        turn.begins(opcode, bytes)
    }

    fn lead(&self) -> MutexGuard<'_, Lead> {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lead; the leader's number, or None at the end.
    fn take(&self) -> Option<u64> {
        let mut lead = self.lead();
        lead.waiting += 1;
        while lead.leader != 0 && !lead.ended {
            lead = self.free.wait(lead).unwrap_or_else(PoisonError::into_inner);
        }
        lead.waiting -= 1;
        if lead.ended {
            return None;
        }
        lead.last += 1;
        lead.leader = lead.last;
        self.leader.store(lead.leader, Ordering::Release);
        self.since.store(0, Ordering::Release);
        Some(lead.leader)
    }

    /// Gives it away, if it is still that leader's.
    fn give(&self, leader: u64) {
        let mut lead = self.lead();
        if lead.leader == leader {
            lead.leader = 0;
            self.leader.store(0, Ordering::Release);
            self.free.notify_one();
        }
    }

    fn is_led_by(&self, leader: u64) -> bool {
        self.leader.load(Ordering::Acquire) == leader
    }

    fn has_others(&self) -> bool {
        self.lead().waiting > 0
    }

    fn end(&self) {
        self.lead().ended = true;
        self.free.notify_all();
        self.queue.stop();
    }

    fn add(self: &Arc<Self>, device: &Arc<Device>) -> std::io::Result<()> {
        self.lead().threads += 1;
        let (seat, device) = (self.clone(), device.clone());
        let spawned = std::thread::Builder::new().name(self.name.clone()).spawn(move || {
            seat.run(&device);
            seat.lead().threads -= 1;
        });
        if let Err(error) = spawned {
            self.lead().threads -= 1;
            return Err(error);
        }
        Ok(())
    }

    /// The body of a thread.
    fn run(&self, device: &Device) {
        crate::slice::short();
        let mut scratch = Scratch::default();
        while let Some(leader) = self.take() {
            if !self.led(device, leader, &mut scratch) {
                self.give(leader);
                return;
            }
        }
    }

    /// Waits until one more request may be served; false if the queue was stopped before that.
    fn hold_back(&self, device: &Device) -> bool {
        while !device.ended.load(Ordering::Acquire)
            && let Some(delay) = device.options.limits.delay()
        {
            if self.queue.is_stopped() {
                return false;
            }
            self.queue.flush();
            self.leave();
            std::thread::sleep(delay.min(LOOK));
        }
        true
    }

    /// Leads until the lead is gone; false when the queue has ended.
    fn led(&self, device: &Device, leader: u64, scratch: &mut Scratch) -> bool {
        let habits = self.habits.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut habits =
            habits.unwrap_or_else(|| Habits { pace: Pace::new(device.options.poll), crowd: CROWD });
        let bounded = device.options.limits.is_bounded();
        let share = device.options.share.as_ref();
        let waiting = device.fs.waiting();
        let mut waited = false;
        loop {
            // What comes through the first queue is seldom to be held back: it is looked at before.
            if bounded
                && self.index > 0
                && let Some(delay) = device.options.limits.delay()
            {
                self.queue.flush();
                self.leave();
                std::thread::sleep(delay.min(LOOK));
                if device.ended.load(Ordering::Acquire) {
                    return false;
                }
                continue;
            }
            let next = self.queue.next();
            if std::mem::take(&mut waited) {
                habits.crowd = if next.is_some() { CROWD } else { 0 };
            }
            let Some(chain) = next else {
                self.rest();
                let since = Instant::now();
                let sought = share.is_some_and(Member::is_sought);
                let look = if sought { Duration::ZERO } else { habits.pace.look() };
                if self.queue.wait(look) == Woken::Stop {
                    return false;
                }
                habits.pace.waited(since, Instant::now());
                continue;
            };
            let (opcode, bytes) = peek(&*chain);
            if bounded && !is_free(opcode) {
                // A guest may put any request there.
                if self.index == 0 && !self.hold_back(device) {
                    // It is for whoever has the guest when the queue goes on: perhaps another device.
                    chain.put_back();
                    continue;
                }
                device.options.limits.charge(bytes);
            }
            let mut sample = None;
            let (mut waits, mut others) = (may_wait(opcode), false);
            if waits {
                // It would keep the place from those who have something to do, and the guest from what it was given back.
                self.queue.flush();
                self.leave();
                habits.crowd = habits.crowd.saturating_sub(1);
                others = habits.crowd > 0 || device.begun.requests.load(Ordering::Relaxed) > 0;
                if is_sync(opcode)
                    && (waiting == Waiting::Nobody || waiting != Waiting::Each && others)
                {
                    // It is begun, and no thread waits for it.
                    waits = false;
                } else if others && self.has_others() {
                    *self.habits.lock().unwrap_or_else(PoisonError::into_inner) = Some(habits);
                    self.give(leader);
                    device.serve(chain, scratch);
                    return true;
                }
            } else if let Some(share) = share {
                sample = self.enter(share, opcode, bytes);
            }
            // Before it is asked whether anybody looks.
            self.since.store(self.looks.load(Ordering::Relaxed), Ordering::SeqCst);
            self.watcher.wake();
            device.serve_among(chain, scratch, others);
            if let Some(sample) = sample {
                sample.end();
            }
            if !self.is_led_by(leader) {
                return true; // deposed meanwhile
            }
            self.since.store(0, Ordering::Release);
            waited = waits;
            habits.pace.served(Instant::now);
        }
    }

    /// Takes the lead from who does not come back; true if nobody is there to have it.
    fn depose(&self) -> bool {
        let now = self.looks.fetch_add(1, Ordering::Relaxed);
        let since = self.since.load(Ordering::Acquire);
        if since == 0 || now <= since {
            return false; // it is at none, or has just taken it
        }
        let mut lead = self.lead();
        // It may have come back since.
        if self.since.load(Ordering::Acquire) != since || lead.leader == 0 {
            return false;
        }
        self.since.store(0, Ordering::Release);
        lead.leader = 0;
        self.leader.store(0, Ordering::Release);
        self.free.notify_one();
        self.leave();
        lead.waiting == 0 && lead.threads < THREADS_MAX
    }
}

/// The watch of a device, which sleeps where there is nothing to look at.
#[derive(Default)]
struct Watcher {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Watcher {
    fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

fn watch(device: &Arc<Device>, seats: &[Arc<Seat>], watcher: &Watcher) {
    let _ = watcher.thread.set(std::thread::current());
    let mut idle = 0;
    while !device.ended.load(Ordering::Acquire) {
        if idle < IDLE {
            std::thread::park_timeout(LOOK);
        } else {
            watcher.asleep.store(true, Ordering::SeqCst);
            let busy = |seat: &Arc<Seat>| seat.since.load(Ordering::SeqCst) != 0;
            if !seats.iter().any(busy) && !device.ended.load(Ordering::SeqCst) {
                std::thread::park();
            }
            watcher.asleep.store(false, Ordering::SeqCst);
            idle = 0;
        }
        let busy = seats.iter().any(|seat| seat.since.load(Ordering::Acquire) != 0);
        idle = if busy { 0 } else { idle + 1 };
        for seat in seats {
            if seat.depose()
                && let Err(error) = seat.add(device)
            {
                log::warn!("all threads of queue {} wait, and {error}", seat.index);
            }
        }
    }
}

/// The threads of a device.
pub struct Crew {
    device: Arc<Device>,
    seats: Vec<Arc<Seat>>,
    watch: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("queues", &self.seats.len()).finish_non_exhaustive()
    }
}

impl Crew {
    /// Ends them, and returns when nothing is served any more, and nothing that was begun is under way; or after so long. Whether it is so.
    pub fn end(self, patience: Duration) -> bool {
        let (device, seats) = (self.device.clone(), self.seats.clone());
        drop(self);
        let until = Instant::now() + patience;
        loop {
            let threads: usize = seats.iter().map(|seat| seat.lead().threads).sum();
            if threads == 0 && device.begun.requests.load(Ordering::Acquire) == 0 {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Threads of all queues.
    pub fn threads(&self) -> usize {
        self.seats.iter().map(|seat| seat.lead().threads).sum()
    }
}

impl Drop for Crew {
    /// Ends them, but for those that a request holds up.
    fn drop(&mut self) {
        self.device.ended.store(true, Ordering::SeqCst);
        for seat in &self.seats {
            seat.end();
        }
        if let Some(watch) = self.watch.take() {
            watch.thread().unpark();
            let _ = watch.join();
        }
        self.device.server().close_locks();
    }
}
