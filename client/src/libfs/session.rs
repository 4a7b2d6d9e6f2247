//! An attachment to the local node: the mapped log segment, the lanes, the request slots, and the
//! arenas mapped so far. When the service ends or expels the client, a new session replaces it.
#![allow(unsafe_code)]

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base::{Errno, Sequence};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use storage::format::control;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Request};
use storage::limits::{LEASE_SLOTS, RPC_SLOTS};

use super::lane::Lane;
use super::proofs::Proofs;
use super::segment::{Mapping, Segment};
use super::sync::{self, RwLock};
use crate::fs::Result;

/// How the client shall attach.
#[derive(Clone, Debug)]
pub struct Config {
    /// hostd's socket.
    pub socket: Vec<u8>,
    /// Lanes to ask for; 0 is the service's default.
    pub lanes: u32,
    /// Descriptors that the client keeps get this number or a higher one, so that they stay out
    /// of the way of the program's own.
    pub fd_min: i32,
    /// Mount point of the same volume, for people; not used by the client.
    pub mount: Vec<u8>,
    /// Asked by a thread that waits for the service, several times a second: whether it shall stop
    /// and fail with EINTR. What it was about to do is then not done.
    pub stop: Option<fn() -> bool>,
    /// Wait without end for a service that is away, instead of half a minute.
    pub patient: bool,
    /// Inodes to remember, about; each takes some 700 bytes here, and as much of the service's memory.
    pub inodes: usize,
}

impl Config {
    /// A client of the node whose hostd listens on `socket`.
    pub fn new(socket: &[u8]) -> Self {
        let (socket, mount) = (socket.to_vec(), Vec::new());
        let inodes = INODES;
        Self { socket, lanes: 0, fd_min: 3, mount, stop: None, patient: false, inodes }
    }

    /// Whether the calling thread shall wait no longer.
    pub(crate) fn stops(&self) -> bool {
        self.stop.is_some_and(|stop| stop())
    }
}

/// Inodes that a program remembers...
pub const INODES: usize = 24_000;
/// ... and the most that a client can: there must be lease slots for more, since those of evicted inodes
/// are free a little later.
pub const INODES_MAX: usize = LEASE_SLOTS / 8 * 7;

/// A live attachment.
#[derive(Debug)]
pub struct Session {
    /// Tells sessions of one process apart.
    pub number: u64,
    /// The log segment.
    pub segment: Segment,
    lanes: Vec<Lane>,
    next: AtomicU64,
    socket: RwLock<OwnedFd>,
    /// Bit i: request slot i is free.
    free_slots: AtomicU32,
    config_stop: Option<fn() -> bool>,
    /// Slots whose reply nobody waits for.
    forgotten: AtomicU32,
    arenas: RwLock<BTreeMap<u32, Option<Arc<Mapping>>>>,
    /// The session that this one replaces.
    pub previous: Option<&'static Session>,
    /// Inode numbers at hand, each pre-leased.
    pub fresh: RwLock<Vec<(base::InodeId, rpc::Granted)>>,
    /// The last own operation on an inode that the cache has forgotten since. What the service says
    /// of an inode that is not in the cache counts only if it reflects this.
    pub evicted: AtomicU64,
    /// Slots of leases that are to be given back.
    released: RwLock<Vec<u32>>,
    /// What the service showed; they outlive the session.
    proofs: Arc<Proofs>,
    /// The service knows us as the super-user, whatever the process has become since.
    super_user: bool,
}

fn errno(e: rustix::io::Errno) -> Errno {
    Errno(e.raw_os_error() as u16)
}

/// Moves a descriptor up, out of the program's way.
fn raise(fd: OwnedFd, min: i32) -> OwnedFd {
    match rustix::io::fcntl_dupfd_cloexec(&fd, min) {
        Ok(high) => high,
        Err(_) => fd,
    }
}

/// Attempts to get an arena, 20 ms apart, while the services restart.
const ARENA_TRIES: u32 = 1500;
/// Looks at slots whose answers nobody waits for before sleeping.
const SLOT_YIELDS: u32 = 100;
/// Descriptors received with a message, at most.
const FDS_MAX: usize = 2;

fn ask(socket: BorrowedFd<'_>, kind: u32, argument: u64, min: i32) -> Result<(u64, Vec<OwnedFd>)> {
    let request = rpc::host_request(kind, argument);
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&request)],
            &mut SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        )
    })
    .map_err(errno)?;
    let mut reply = [0u8; rpc::HOST_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut reply)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    // After a time-out the answer may still come: this connection is of no use any more.
    .map_err(|e| if e == rustix::io::Errno::AGAIN { Errno::NOTCONN } else { errno(e) })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(|fd| raise(fd, min)));
        }
    }
    if received.bytes == 0 {
        return Err(Errno::NOTCONN);
    }
    let value = rpc::host_reply_decode(&reply).map_err(|_| Errno::IO)??;
    Ok((value, fds))
}

impl Session {
    /// Connects to hostd and maps what it hands out.
    pub fn attach(config: &Config, number: u64, proofs: Arc<Proofs>) -> Result<Self> {
        let super_user = rustix::process::geteuid().is_root();
        let socket = connect(config)?;
        let (_, fds) = ask(socket.as_fd(), rpc::HOST_ATTACH, config.lanes.into(), config.fd_min)?;
        let [log, bell] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| Errno::IO)?;
        let segment = Segment::map(log.as_fd(), bell, config.stop)?;
        drop(log);
        let lanes = (0..segment.descriptor.lanes).map(|_| Lane::default()).collect();
        let first = segment.descriptor.first_sequence.0;
        Ok(Self {
            number,
            segment,
            lanes,
            next: AtomicU64::new(first),
            socket: RwLock::new(socket),
            free_slots: AtomicU32::new((1 << RPC_SLOTS) - 1),
            config_stop: config.stop,
            forgotten: AtomicU32::new(0),
            arenas: RwLock::new(BTreeMap::new()),
            previous: None,
            fresh: RwLock::new(Vec::new()),
            evicted: AtomicU64::new(0),
            released: RwLock::new(Vec::new()),
            proofs,
            super_user,
        })
    }

    /// Remembers what came with an inode's attributes; the super-user needs none.
    pub fn remember_proof(&self, ino: base::InodeId, proof: Proof) {
        if !self.super_user {
            self.proofs.put(ino, proof);
        }
    }

    /// How many of this client's entries the service has refused.
    #[inline]
    pub fn refusals(&self) -> u64 {
        self.segment.word(control::REFUSALS).load(Ordering::Acquire)
    }

    /// Why it refused the last one.
    pub fn refusal(&self) -> Errno {
        match self.segment.word(control::REFUSED_ERRNO).load(Ordering::Acquire) as u16 {
            // The head that knew is gone.
            0 => Errno::IO,
            errno => Errno(errno),
        }
    }

    /// The lane for a thread or handle with hint `hint`.
    pub fn lane(&self, hint: u64) -> (u8, &Lane) {
        let index = (hint % self.lanes.len() as u64) as usize;
        (index as u8, &self.lanes[index])
    }

    /// A lane by number, if there is one.
    pub fn lane_at(&self, index: u8) -> Option<&Lane> {
        self.lanes.get(usize::from(index))
    }

    /// Whether operations of session `number` up to `last`, which had returned, may be lost with
    /// it: not all of them had reached every member when it ended. A session is never unmapped, so
    /// its words can still be read.
    pub fn lost_with(&self, number: u64, last: Sequence) -> bool {
        let mut at = Some(self);
        while let Some(session) = at {
            if session.number == number {
                return last.0 > session.segment.word(control::REPLICATED).load(Ordering::Acquire);
            }
            at = session.previous;
        }
        true
    }

    /// Counter of sequences.
    pub const fn next(&self) -> &AtomicU64 {
        &self.next
    }

    /// The highest sequence handed out.
    pub fn last(&self) -> Sequence {
        Sequence(self.next.load(Ordering::Acquire) - 1)
    }

    /// What an answer about an inode must reflect: `last` is the last own operation on it in this
    /// session, as far as the cache knows.
    pub fn known_after(&self, last: Option<Sequence>) -> Sequence {
        let evicted = Sequence(self.evicted.load(Ordering::Acquire));
        last.unwrap_or(Sequence(0)).max(evicted)
    }

    /// Waits until the service reclaims some log space.
    pub fn wait_for_space(&self, lane: u8, before: u64) -> Result<()> {
        let word = self.segment.word(control::reclaim(lane.into()));
        self.segment.ring(true);
        self.segment.wait_until(|| word.load(Ordering::Acquire) != before)
    }

    /// Waits until everything up to `sequence` is persistent on every member of the chain.
    pub fn sync(&self, sequence: Sequence) -> Result<()> {
        let replicated = self.segment.word(control::REPLICATED);
        if replicated.load(Ordering::Acquire) >= sequence.0 {
            return Ok(());
        }
        self.segment.word(control::LAST_SEQUENCE).fetch_max(self.last().0, Ordering::SeqCst);
        self.segment.word(control::SYNC_REQUEST).fetch_max(sequence.0, Ordering::SeqCst);
        self.segment.ring(true);
        self.segment.wait_until(|| replicated.load(Ordering::Acquire) >= sequence.0)
    }

    /// Asks the service; the reply's body (after its status) lies in `out`, from byte 8 on.
    /// `Err(STALE)` means that the session ended.
    pub fn call(&self, request: &Request<'_>, after: Sequence, out: &mut Vec<u8>) -> Result<()> {
        let slot = self.take_slot()?;
        out.clear();
        let proof = request.names().map_or(Proof::NONE, |ino| self.proofs.get(ino));
        request.encode_shown(after, proof, out);
        self.segment.slot_write(slot, out);
        self.announce(after);
        let state = self.segment.slot_state(slot);
        state.store(rpc::SLOT_REQUEST, Ordering::SeqCst);
        self.segment.ring(true);
        loop {
            let mut seen = rpc::SLOT_REQUEST;
            let answered = self.segment.wait_until(|| {
                seen = state.load(Ordering::Acquire);
                seen == rpc::SLOT_REPLY || seen == rpc::SLOT_AGAIN
            });
            if let Err(error) = answered {
                if error == Errno::INTR {
                    // The answer is taken when it comes, and means nothing then.
                    self.forgotten.fetch_or(1 << slot, Ordering::SeqCst);
                }
                return Err(error);
            }
            if seen == rpc::SLOT_REPLY {
                break;
            }
            // The service was started anew while it worked on this one.
            self.segment.slot_write(slot, out);
            state.store(rpc::SLOT_REQUEST, Ordering::SeqCst);
            self.segment.ring(true);
        }
        self.segment.slot_read(slot, out);
        state.store(rpc::SLOT_FREE, Ordering::Release);
        self.give_slot(slot);
        let (status, _) = rpc::reply_status(out).map_err(|_| Errno::IO)?;
        status
    }

    /// Before a request that must see operations up to `after`: other threads may have sequences
    /// below it and still be writing, for which the service shall wait.
    fn announce(&self, after: Sequence) {
        if after.0 > 0 {
            self.segment.word(control::LAST_SEQUENCE).fetch_max(self.last().0, Ordering::SeqCst);
        }
    }

    /// Posts a request whose answer does not matter; says whether there was a free slot for it.
    pub fn post(&self, request: &Request<'_>, after: Sequence) -> bool {
        let Some(slot) = self.try_take_slot() else { return false };
        let mut body = Vec::new();
        request.encode(after, &mut body);
        self.segment.slot_write(slot, &body);
        self.announce(after);
        self.segment.slot_state(slot).store(rpc::SLOT_REQUEST, Ordering::SeqCst);
        self.forgotten.fetch_or(1 << slot, Ordering::SeqCst);
        self.segment.ring(true);
        true
    }

    /// Gives leases back; those that find no free slot with the next ones.
    pub fn release(&self, slots: Vec<u32>) {
        let mut all = self.released.write();
        all.extend(slots);
        while !all.is_empty() {
            let from = all.len().saturating_sub(super::POSTED_MAX);
            let slots = all.split_off(from);
            let request = Request::Release { slots };
            if !self.post(&request, self.last())
                && let Request::Release { slots } = request
            {
                all.extend(slots);
                return;
            }
        }
    }

    fn take_slot(&self) -> Result<usize> {
        let mut yields = 0;
        loop {
            if let Some(slot) = self.try_take_slot() {
                return Ok(slot);
            }
            if !self.segment.attached() {
                return Err(Errno::STALE);
            }
            if self.forgotten.load(Ordering::SeqCst) != 0 && yields < SLOT_YIELDS {
                yields += 1;
                rustix::thread::sched_yield();
                continue;
            }
            if self.config_stop.is_some_and(|stop| stop()) {
                return Err(Errno::INTR);
            }
            // Nobody wakes us for an answer that nobody waits for, hence the limit.
            let limit = if self.forgotten.load(Ordering::SeqCst) == 0 { 100 } else { 1 };
            sync::wait_at_most(&self.free_slots, 0, limit);
        }
    }

    fn try_take_slot(&self) -> Option<usize> {
        self.collect_forgotten();
        loop {
            let free = self.free_slots.load(Ordering::SeqCst);
            if free == 0 {
                return None;
            }
            let slot = free.trailing_zeros();
            let taken = free & !(1 << slot);
            if self
                .free_slots
                .compare_exchange(free, taken, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                return Some(slot as usize);
            }
        }
    }

    fn collect_forgotten(&self) {
        let mut pending = self.forgotten.load(Ordering::SeqCst);
        while pending != 0 {
            let slot = pending.trailing_zeros();
            pending &= !(1 << slot);
            let state = self.segment.slot_state(slot as usize);
            // One that a restarted service did not get to is dropped, as its answer would have been.
            let done =
                || matches!(state.load(Ordering::Acquire), rpc::SLOT_REPLY | rpc::SLOT_AGAIN);
            if !done() || self.forgotten.fetch_and(!(1 << slot), Ordering::SeqCst) & 1 << slot == 0
            {
                continue;
            }
            // Ours now; but what was done was perhaps the request before, which others collected.
            if done() {
                state.store(rpc::SLOT_FREE, Ordering::Release);
                self.give_slot(slot as usize);
            } else {
                self.forgotten.fetch_or(1 << slot, Ordering::SeqCst);
            }
        }
    }

    fn give_slot(&self, slot: usize) {
        if self.free_slots.fetch_or(1 << slot, Ordering::SeqCst) == 0 {
            // All: the next ones given back wake nobody.
            sync::wake(&self.free_slots, sync::EVERYBODY);
        }
    }

    /// The mapping of an arena; `None` when this process may not map it.
    pub fn arena(&self, config: &Config, arena: u32) -> Result<Option<Arc<Mapping>>> {
        if let Some(known) = self.arenas.read().get(&arena) {
            return Ok(known.clone());
        }
        let mapping = match self.ask_arena(config, arena) {
            Ok((_, fds)) => {
                let fd = fds.first().ok_or(Errno::IO)?;
                let len = self.segment.descriptor.arena_bytes as usize;
                Some(Arc::new(Mapping::new(fd.as_fd(), len, false)?))
            }
            Err(Errno::ACCES) => None,
            Err(e) => return Err(e),
        };
        self.arenas.write().insert(arena, mapping.clone());
        Ok(mapping)
    }

    /// What is known of an arena: not asked for yet, not for this process, or its mapping.
    pub fn arena_known(&self, arena: u32) -> Option<Option<Arc<Mapping>>> {
        self.arenas.read().get(&arena).cloned()
    }

    fn ask_arena(&self, config: &Config, arena: u32) -> Result<(u64, Vec<OwnedFd>)> {
        let mut socket = self.socket.write();
        for _ in 0..ARENA_TRIES {
            match ask(socket.as_fd(), rpc::HOST_ARENA, arena.into(), config.fd_min) {
                // hostd was restarted: it keeps nothing that the service has not told it again.
                Err(Errno::NOTCONN | Errno(104) | Errno(32)) => {
                    if let Ok(fresh) = connect(config) {
                        *socket = fresh;
                        continue;
                    }
                }
                // The node service is being restarted.
                Err(Errno::AGAIN) => {}
                other => return other,
            }
            if config.stops() {
                return Err(Errno::INTR);
            }
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
        }
        Err(Errno::IO)
    }

    /// In a child after fork: nothing of the parent's session may be used, nor undone.
    pub fn abandon(self) {
        core::mem::forget(self);
    }

    /// Descriptors that the session keeps open.
    pub fn descriptors(&self) -> Vec<i32> {
        use rustix::fd::AsRawFd;
        alloc::vec![self.socket.read().as_raw_fd(), self.segment.bell_fd()]
    }
}

fn connect(config: &Config) -> Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(errno)?;
    if config.stop.is_some() {
        // A hostd that is stopped must not hold a thread for longer than it may wait.
        let limit = Some(core::time::Duration::from_millis(1000));
        for direction in [Timeout::Recv, Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(&socket, direction, limit).map_err(errno)?;
        }
    }
    let address = SocketAddrUnix::new(&config.socket[..]).map_err(errno)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(errno)?;
    Ok(raise(socket, config.fd_min))
}
