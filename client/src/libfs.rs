//! LibFS: the file system as one process sees it.
//!
//! Every inode that the process touches is cached under a lease ([`inode`]). An operation takes the
//! locks of its inodes, makes sure that the leases it needs are there (asking the service if not),
//! then *enters* ([`segment::Segment::enter`]), checks the lease words once more, does its work
//! without waiting for anything, and leaves. Changes go to the log ([`lane`]) and to the cached
//! state; reads come from the log ([`pieces`]) and from mapped arenas ([`data`]). Nothing else is
//! kept in the process: what was appended is complete for the service, whatever happens here.
//!
//! Lock order: inodes by ascending number, then a lane, then an operation. Waiting (for a lease, for
//! log space, for fsync) happens with inode locks held but never with a lane or inside an operation.
#![allow(unsafe_code)]

pub mod acl;
pub mod attrs;
pub mod copy;
pub mod data;
pub mod inode;
pub mod kernel;
pub mod lane;
pub mod locks;
pub mod names;
pub mod permission;
pub mod pieces;
pub mod proofs;
pub mod segment;
pub mod session;
pub mod sync;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use base::{Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, RawHeader};
use storage::format::rpc::{self, InodeReply, Request};

use self::inode::{Inode, Map, Names, State};
use self::lane::{Place, Written};
use self::proofs::Proofs;
use self::session::Session;
use self::sync::RwLock;
use crate::fs::{Handle, Result};
use crate::slots::{Slots, Used};

pub use self::session::Config;
pub use storage::format::rpc::InodeRecord;

/// An open file.
#[derive(Debug)]
pub struct Open {
    /// The inode.
    pub inode: Arc<Inode>,
    /// Access mode and O_APPEND, O_DSYNC as given at open.
    pub flags: u32,
    /// Own lane hint: descriptors append to lanes of their own.
    pub hint: u64,
    /// Refusals of the session that were there at the last look; a later one is an error to report.
    pub refusals: AtomicU64,
    /// Own operations up to here were judged, and none refused, at the last look.
    pub clean: AtomicU64,
}

/// The client.
#[derive(Debug)]
pub struct LibFs {
    config: Config,
    session: AtomicPtr<Session>,
    attaching: RwLock<u64>,
    inodes: RwLock<Map<u64, Arc<Inode>>>,
    handles: Slots<Open>,
    unpins: RwLock<Vec<InodeId>>,
    opened: AtomicU64,
    locks: locks::Locks,
    kernel: kernel::Kernel,
    proofs: Arc<Proofs>,
    /// Answers about inodes taken in; never the same number twice, also of an inode that was forgotten
    /// meanwhile.
    learnt: AtomicU64,
}

/// Inodes forgotten at a time, when there are too many of them.
const EVICT_MAX: usize = 3000;
/// Unpins are collected up to this number, then sent without waiting for an answer.
const UNPINS_MAX: usize = 32;
/// Unpins, and leases given back, in one request: what fits a slot, twice.
pub(crate) const POSTED_MAX: usize = 4000;
/// Attempts of an operation that keeps losing its leases to others before it gives up with EIO;
/// each attempt waits for a grant, so this is minutes.
const ATTEMPTS: u32 = 10_000;

/// Attempts to attach, 20 ms apart: the first time, when a node may just be starting...
const ATTACH_TRIES: u32 = 100;
/// ... and for a client that had been attached: a restart, or joining the chain anew.
const REATTACH_TRIES: u32 = 1500;

/// What an attempt of an operation may say.
pub(crate) enum Outcome<T> {
    /// Done.
    Done(T),
    /// A lease was lost or the session ended: make sure again and repeat.
    Again,
    /// The log is full: wait for this lane (whose reclaim position was the number), repeat.
    Full(u8, u64),
}

impl LibFs {
    /// Attaches to the node whose hostd listens on `config.socket`.
    pub fn attach(config: Config) -> Result<Self> {
        let this = Self {
            config,
            session: AtomicPtr::new(core::ptr::null_mut()),
            attaching: RwLock::new(0),
            inodes: RwLock::new(Map::default()),
            handles: Slots::new(),
            unpins: RwLock::new(Vec::new()),
            opened: AtomicU64::new(0),
            locks: locks::Locks::default(),
            kernel: kernel::Kernel::default(),
            proofs: Arc::default(),
            learnt: AtomicU64::new(0),
        };
        this.session()?;
        Ok(this)
    }

    /// The current session; attaches anew when the old one ended.
    pub(crate) fn session(&self) -> Result<&'static Session> {
        if let Some(session) = self.current()
            && session.segment.attached()
        {
            return Ok(session);
        }
        let mut number = self.attaching.write();
        if let Some(session) = self.current()
            && session.segment.attached()
        {
            return Ok(session);
        }
        let mut session = self.attach_patiently(*number + 1)?;
        session.previous = self.current();
        *number += 1;
        // Sessions are few (one, unless the service restarts) and other threads may be inside the
        // old one at any moment: they are never freed.
        let session: &'static Session = Box::leak(Box::new(session));
        self.session.store(core::ptr::from_ref(session).cast_mut(), Ordering::Release);
        Ok(session)
    }

    /// Attaches; while the service restarts or the chain is being repaired that takes a moment.
    fn attach_patiently(&self, number: u64) -> Result<Session> {
        let tries = match number {
            1 => ATTACH_TRIES,
            _ if self.config.patient => u32::MAX,
            _ => REATTACH_TRIES,
        };
        for _ in 0..tries {
            match Session::attach(&self.config, number, Arc::clone(&self.proofs)) {
                Err(Errno::AGAIN | Errno::NOTCONN | Errno::NOENT | Errno(111 | 104 | 32)) => {}
                other => return other,
            }
            if self.config.stops() {
                return Err(Errno::INTR);
            }
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
        }
        Session::attach(&self.config, number, Arc::clone(&self.proofs))
    }

    pub(crate) fn current(&self) -> Option<&'static Session> {
        // SAFETY: the pointer is null or came from `Box::leak` and is never freed.
        unsafe { self.session.load(Ordering::Acquire).as_ref() }
    }

    /// Descriptors that must be kept from the program's close and dup2.
    pub fn descriptors(&self) -> Vec<i32> {
        self.current().map(Session::descriptors).unwrap_or_default()
    }

    /// The cached inode of that number.
    pub(crate) fn inode(&self, ino: InodeId) -> Arc<Inode> {
        if let Some(found) = self.inodes.read().get(&ino.0) {
            if !found.used.load(Ordering::Relaxed) {
                found.used.store(true, Ordering::Relaxed);
            }
            return Arc::clone(found);
        }
        let mut inodes = self.inodes.write();
        if inodes.len() >= self.inodes_max() {
            self.evict(&mut inodes);
        }
        Arc::clone(inodes.entry(ino.0).or_insert_with(|| Arc::new(Inode::new(ino))))
    }

    /// Puts a made inode into the cache, which makes room like any other: a program that makes
    /// many files must not run out of lease slots.
    pub(crate) fn remember_inode(&self, inode: Arc<Inode>) {
        let mut inodes = self.inodes.write();
        if inodes.len() >= self.inodes_max() {
            self.evict(&mut inodes);
        }
        inodes.insert(inode.ino.0, inode);
    }

    /// Inodes remembered; above it, those that nobody uses are dropped.
    fn inodes_max(&self) -> usize {
        self.config.inodes.min(session::INODES_MAX)
    }

    /// Forgets inodes that nobody uses, and gives their leases back.
    fn evict(&self, inodes: &mut Map<u64, Arc<Inode>>) {
        let Some(session) = self.current() else { return };
        let mut slots = Vec::new();
        let mut left = EVICT_MAX.min(inodes.len() / 2);
        let now = kernel::now_ms();
        let mut forget = |_: &u64, inode: &mut Arc<Inode>| {
            // The count cannot grow while we hold the table exclusively.
            if left == 0
                || Arc::strong_count(inode) > 1
                || inode.used.swap(false, Ordering::Relaxed)
            {
                return true;
            }
            let Some(state) = inode.state.try_write() else { return true };
            if state.open > 0 || state.lost || inode.shown.counts(now) {
                return true;
            }
            if state.session == session.number && state.lease.word.0 != 0 {
                slots.push(state.lease.slot);
            }
            if state.session == session.number {
                session.evicted.fetch_max(state.last.0, Ordering::AcqRel);
            }
            if state.pinned {
                self.unpins.write().push(inode.ino);
            }
            left -= 1;
            false
        };
        inodes.retain(&mut forget);
        // All that was looked at was in use: now it is not.
        inodes.retain(&mut forget);
        // The service settles our operations first, so dirty state is not lost with the cache.
        session.release(slots);
        self.send_unpins(&mut self.unpins.write(), UNPINS_MAX);
    }

    /// Whether the cached state counts, with at least `mode`.
    #[inline]
    pub(crate) fn holds(&self, session: &Session, state: &State, mode: LeaseMode) -> bool {
        self.held(session, state, mode) && session.segment.in_time()
    }

    /// The same, time aside: where another look follows.
    #[inline]
    pub(crate) fn held(&self, session: &Session, state: &State, mode: LeaseMode) -> bool {
        state.session == session.number
            && state.mode() >= mode
            && session.segment.lease_holds(state.lease.slot, state.lease.word)
    }

    /// Makes sure that `state` is valid with `mode`, and that the service knows what `flags` says.
    pub(crate) fn ensure(
        &self,
        session: &Session,
        ino: InodeId,
        state: &mut State,
        mode: LeaseMode,
        flags: u8,
    ) -> Result<()> {
        let known = (flags & rpc::WANT_PIN == 0 || state.pinned)
            && (flags & rpc::WANT_WRITE == 0 || state.may_write)
            && flags & rpc::WANT_READ == 0;
        if known && self.holds(session, state, mode) {
            return Ok(());
        }
        if self.config.stops() {
            return Err(Errno::INTR);
        }
        let mode = mode.max(if self.holds(session, state, mode) { state.mode() } else { mode });
        let last = (state.session == session.number).then_some(state.last);
        let after = session.known_after(last);
        if state.session > session.number {
            // Another thread has attached anew.
            return Err(Errno::STALE);
        }
        if flags & rpc::WANT_PIN != 0 {
            // An earlier close that the service was not told of yet must not take this pin away.
            self.unpins.write().retain(|i| *i != ino);
        }
        let mut body = Vec::new();
        session.call(&Request::Inode { ino, mode, flags }, after, &mut body)?;
        let reply = parse_inode(&body)?;
        self.install(session, state, reply, flags);
        Ok(())
    }

    /// Takes a fresh answer about an inode into its state.
    pub(crate) fn install(
        &self,
        session: &Session,
        state: &mut State,
        reply: InodeReply,
        flags: u8,
    ) {
        if state.session != session.number {
            state.lost |= state.session != 0
                && state.last.0 > 0
                && session.lost_with(state.session, state.last);
            state.session = session.number;
            state.last = Sequence(0);
            state.extents_after = Sequence(0);
            state.pieces = pieces::Pieces::default();
            state.pinned = false;
            state.may_write = false;
        }
        session.remember_proof(reply.record.ino, reply.proof);
        self.proofs.put(reply.record.parent, reply.parent_proof);
        state.lease = reply.granted;
        state.record = reply.record;
        state.learnt = self.learnt.fetch_add(1, Ordering::Relaxed) + 1;
        state.blocks_guessed = false;
        state.no_capability = false;
        state.names = Names::default();
        state.target = reply.target;
        // The answer reflects all that this client did to the inode, published: nothing of the own
        // log is needed any more, and what others wrote since may not be hidden by it.
        if state.last <= reply.reflected {
            state.pieces = pieces::Pieces::default();
        }
        state.pieces.install(0, &reply.extents, reply.complete, reply.reflected);
        if state.extents_after > reply.reflected {
            state.pieces.forget_extents();
        }
        if state.pieces.will_move() {
            state.moved(state.last);
        }
        state.pinned |= flags & rpc::WANT_PIN != 0;
        state.may_write |= flags & rpc::WANT_WRITE != 0;
    }

    /// Repeats `attempt` until it is done: it makes sure of its leases, then tries.
    pub(crate) fn repeat<T>(
        &self,
        mut attempt: impl FnMut(&'static Session) -> Result<Outcome<T>>,
    ) -> Result<T> {
        for attempts in 0..ATTEMPTS {
            if attempts > 0 && self.config.stops() {
                return Err(Errno::INTR);
            }
            let session = self.session()?;
            match attempt(session) {
                Ok(Outcome::Done(value)) => return Ok(value),
                // Either a lease was lost, or the time of all of them is over: the service is being
                // restarted, or hangs. If it ends altogether the next round attaches anew.
                Ok(Outcome::Again) if session.segment.in_time() => {}
                Ok(Outcome::Again) => match session.segment.wait_in_time() {
                    Ok(()) | Err(Errno::STALE) => {}
                    Err(e) => return Err(e),
                },
                Ok(Outcome::Full(lane, before)) => match session.wait_for_space(lane, before) {
                    Ok(()) | Err(Errno::STALE) => {}
                    Err(e) => return Err(e),
                },
                // The session ended in the middle: the next round attaches anew.
                Err(Errno::STALE) if !session.segment.attached() => {}
                Err(e) => return Err(e),
            }
        }
        Err(Errno::IO)
    }

    /// Appends one operation if every lease still holds, and makes it persistent. `leases` are the
    /// states it relies on.
    pub(crate) fn append(
        &self,
        session: &Session,
        hint: u64,
        leases: &[&State],
        raw: RawHeader,
        payload: &[u8],
    ) -> Outcome<Place> {
        match self.write_entry(session, hint, leases, raw, payload) {
            Outcome::Done(written) => {
                let place = written.persist();
                session.segment.ring(false);
                Outcome::Done(place)
            }
            Outcome::Again => Outcome::Again,
            Outcome::Full(lane, reclaimed) => Outcome::Full(lane, reclaimed),
        }
    }

    /// As [`LibFs::append`], but the caller persists the entry and rings.
    pub(crate) fn write_entry<'a>(
        &self,
        session: &'a Session,
        hint: u64,
        leases: &[&State],
        raw: RawHeader,
        payload: &[u8],
    ) -> Outcome<Written<'a>> {
        let (index, lane) = session.lane(hint);
        let room = match lane.room(&session.segment, index, payload.len()) {
            Ok(room) => room,
            Err(reclaimed) => return Outcome::Full(index, reclaimed),
        };
        let inside = session.segment.enter();
        let good = session.segment.attached()
            && leases.iter().all(|s| self.held(session, s, LeaseMode::Write))
            && session.segment.in_time();
        if !good {
            session.segment.leave(inside);
            return Outcome::Again;
        }
        let written = room.append(&session.segment, session.next(), raw, payload);
        session.segment.leave(inside);
        if !session.segment.attached() {
            // Expelled between: the entry counts only if it was sealed in.
            if written.place.sequence.0 > session.segment.sealed_at() {
                return Outcome::Again;
            }
        }
        Outcome::Done(written)
    }

    /// Encodes and appends an operation (other than Write).
    pub(crate) fn log(
        &self,
        session: &Session,
        hint: u64,
        leases: &[&State],
        op: &Op<'_>,
        time: u64,
    ) -> Outcome<Place> {
        let mut payload = Vec::new();
        let mut raw = op.encode(&mut payload);
        raw.time = time;
        self.append(session, hint, leases, raw, &payload)
    }

    pub(crate) fn open_handle(&self, inode: Arc<Inode>, flags: u32) -> Handle {
        let hint = self.opened.fetch_add(1, Ordering::Relaxed);
        let refusals = AtomicU64::new(self.current().map_or(0, Session::refusals));
        let clean = AtomicU64::new(0);
        let index = self.handles.insert(Open { inode, flags, hint, refusals, clean }, usize::MAX);
        // Millions of open files are refused far from here; a number that is not there is EBADF.
        Handle(index.map_or(u64::MAX >> 1, |index| index as u64))
    }

    #[inline]
    pub(crate) fn handle(&self, handle: Handle) -> Result<Used<'_, Open>> {
        self.handles.get(handle.0 as usize).ok_or(Errno::BADF)
    }

    pub(crate) fn close_handle(&self, handle: Handle) -> Option<Used<'_, Open>> {
        self.handles.remove(handle.0 as usize)
    }

    /// Notes that an inode is no longer open here; told to the service in batches.
    pub(crate) fn unpin(&self, ino: InodeId, now: bool) {
        let mut unpins = self.unpins.write();
        unpins.push(ino);
        self.send_unpins(&mut unpins, if now { 1 } else { UNPINS_MAX });
    }

    /// Tells the service, if there are `least`. Posted under the lock of the list: whoever opens one of
    /// them again asks after this.
    fn send_unpins(&self, unpins: &mut Vec<InodeId>, least: usize) {
        let Some(session) = self.current() else { return };
        while unpins.len() >= least.max(1) {
            let inodes = unpins.split_off(unpins.len().saturating_sub(POSTED_MAX));
            let request = Request::Unpin { inodes };
            if !session.post(&request, session.last())
                && let Request::Unpin { inodes } = request
            {
                // Every slot is taken: with the next one. What nobody unpins stays for as long as
                // this process.
                unpins.extend(inodes);
                return;
            }
        }
    }

    /// Realtime nanoseconds, for time stamps: of the last tick, as the kernel stamps its own files,
    /// but later than the last change of each of the inodes that get the stamp. Caches tell by
    /// the time that a file has changed (the kernel's behind a mount, make, rsync), so no two
    /// changes may have the same.
    pub(crate) fn now(changed: &[&InodeRecord]) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let tick = (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64);
        let after = |r: &&InodeRecord| r.ctime.nanos().saturating_add(1);
        changed.iter().map(after).fold(tick, u64::max)
    }
}

/// Reads the answer to `Inode` and `Lookup`.
pub(crate) fn parse_inode(body: &[u8]) -> Result<InodeReply> {
    let (status, mut r) = rpc::reply_status(body).map_err(|_| Errno::IO)?;
    status?;
    InodeReply::decode(&mut r).map_err(|_| Errno::IO)
}
