//! LibFS: the file system as one process sees it.
//!
//! Every inode that the process touches is cached under a lease ([`inode`]). An operation takes the
//! locks of its inodes and looks whether the leases and whatever else it needs are there ([`turn`]: if not, it
//! lets go of everything, gets it, and begins again), then *enters* ([`segment::Segment::enter`]), checks the lease
//! words once more, does its work without waiting for anything, and leaves. Changes go to the log ([`log`]) and to
//! the cached state; reads come from the log ([`pieces`]) and from mapped arenas ([`data`]). Nothing else is
//! kept in the process: what was appended is complete for the service, whatever happens here.
//!
//! LibFS is deterministic: all that comes from outside comes through [`host`]. `corbel run`, the mount and the C
//! library use it in a real process ([`linux`]); the simulator runs it on threads, memory and time of its own.
//!
//! Lock order: who asks about an inode, a lane, inodes by ascending number, an operation. Who has an inode locked takes a
//! lane that is free, and waits for none. Nobody waits for the service
//! (for a lease, for log space, for fsync) with an inode, a lane or an operation in his hands.

pub mod acl;
pub mod attrs;
pub mod copy;
pub mod data;
mod file_system;
pub mod host;
pub mod inode;
mod joint;
pub mod kernel;
pub mod limits;
pub mod linux;
pub mod locks;
pub mod log;
pub mod names;
pub mod over_media;
pub mod permission;
pub mod pieces;
pub mod proofs;
pub mod ranges;
pub mod requests;
pub mod segment;
pub mod session;
pub mod snapshot;
pub mod sole;
pub mod sync;
mod turn;
mod verify;
mod xattrs;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{Op, RawHeader};
use storage::format::rpc::{self, Request};

use self::host::{Host, MS, Memory};
use self::inode::{Inode, Inodes, State};
use self::linux::Linux;
use self::log::{Lack, Place, Written};
use self::proofs::Proofs;
use self::session::Session;
use self::sync::{RwLock, Word};
use self::turn::{Step, Stop, Turn, Wait};
use crate::fs::{Handle, O_DIRECTORY, Result, S_IFDIR, S_IFMT};
use crate::slots::{Slots, Used};

pub use self::limits::{Config, Limits};
pub use self::verify::Verify;
pub use storage::format::rpc::InodeRecord;

/// An open file.
#[derive(Debug)]
pub struct Open<H: Host> {
    /// The inode.
    pub inode: Arc<Inode<H>>,
    /// Access mode and O_APPEND, O_DSYNC as given at open.
    pub flags: u32,
    /// Tells it from other open files: readers count themselves by it.
    pub number: u64,
    /// The lane of the log to which it appends ([`LibFsOn::lane`]).
    lane: Word<H>,
    /// Refusals of the session ([`Session::mark`]) that were there at the last look; a later one is an error to report.
    pub refusals: AtomicU64,
    /// Own operations up to here ([`Session::mark`]) were judged, and none refused, at the last look.
    pub clean: AtomicU64,
    /// Losses of the inode ([`State::losses`]) that were there when it was opened, or told since.
    pub losses: AtomicU32,
}

/// The client, in a process.
pub type LibFs = LibFsOn<Linux>;

/// The client, on some host.
#[derive(Debug)]
pub struct LibFsOn<H: Host> {
    config: Config,
    session: AtomicPtr<Session<H>>,
    /// The number of the last session; held while another one is made.
    attaching: RwLock<u64, H>,
    inodes: RwLock<Inodes<H>, H>,
    handles: Slots<Open<H>, H>,
    unpins: RwLock<Vec<InodeId>, H>,
    opened: Word<H>,
    locks: locks::Locks<H>,
    kernel: kernel::Kernel<H>,
    proofs: Arc<Proofs<H>>,
    snapshots: snapshot::Snapshots<H>,
    /// Sessions that ended with operations that had returned and are lost.
    losses: Word<H>,
    /// Those that a sync of everything has told.
    losses_told: Word<H>,
    /// Answers about inodes taken in; never the same number twice, also of an inode that was forgotten
    /// meanwhile.
    learnt: Word<H>,
}

impl<H: Host> Drop for LibFsOn<H> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let mut at = *self.session.get_mut();
        while !at.is_null() {
            // SAFETY: it came from `Box::leak`, each session names another one before it, and nobody is in a call.
            let session = unsafe { Box::from_raw(at) };
            at = session
                .previous
                .map_or(core::ptr::null_mut(), |s| core::ptr::from_ref(s).cast_mut());
        }
    }
}

/// Bits of a lane's number, and one, in an open file's mark.
const LANE_BITS: u32 = 8;

/// The lane that an open file's mark names, if it is one of that session.
#[inline]
fn lane_in<H: Host>(session: &Session<H>, mark: u64) -> Option<u8> {
    let lane = (mark & ((1 << LANE_BITS) - 1)) as u8;
    if mark >> LANE_BITS == session.number { lane.checked_sub(1) } else { None }
}

/// Attempts to attach, 20 ms apart: the first time, when a node may just be starting...
const ATTACH_TRIES: u32 = 100;
/// ... and for a client that had been attached: a restart, or joining the chain anew.
const REATTACH_TRIES: u32 = 1500;
/// Between two of them.
const ATTACH_PAUSE: u64 = 20 * MS;

impl<H: Host> LibFsOn<H> {
    /// Attaches to the node whose hostd listens on `config.socket`.
    pub fn attach(config: Config) -> Result<Self> {
        let this = Self {
            session: AtomicPtr::new(core::ptr::null_mut()),
            attaching: RwLock::new(0),
            inodes: RwLock::new(Inodes::default()),
            handles: Slots::new(),
            unpins: RwLock::new(Vec::new()),
            opened: Word::new(0),
            locks: locks::Locks::default(),
            kernel: kernel::Kernel::default(),
            proofs: Arc::new(Proofs::new(config.limits.proofs)),
            snapshots: snapshot::Snapshots::default(),
            losses: Word::new(0),
            losses_told: Word::new(0),
            learnt: Word::new(0),
            config,
        };
        this.session()?;
        Ok(this)
    }

    /// The current session; attaches anew when the old one ended.
    pub(crate) fn session(&self) -> Result<&'static Session<H>> {
        let live = || self.current().filter(|session| session.segment.attached());
        if let Some(session) = live() {
            return Ok(session);
        }
        self.begin(None)
    }

    /// Begins a session if there is none that lives, and somebody answers at once: for who is about to start a child that may not.
    pub(crate) fn begin_if_ended(&self) {
        if self.current().is_some_and(|session| !session.segment.attached()) {
            // The child does without.
            let _ = self.begin(Some(0));
        }
    }

    /// Attaches anew; `tries`: no more often than that and once, and not at all while another thread is at it.
    #[cold]
    fn begin(&self, tries: Option<u32>) -> Result<&'static Session<H>> {
        if self.config.bars() {
            return Err(Errno::IO);
        }
        let mut number = self.attaching.write_unless(|| tries.is_some() || self.config.stops())?;
        let before = self.current();
        if let Some(session) = before.filter(|session| session.segment.attached()) {
            return Ok(session);
        }
        // Other threads may be inside the old one at any moment: sessions are freed with the client. What they hold of the
        // service is given back, of all but the last, of which the service may have something to say yet. (Before there are other
        // descriptors.)
        let earlier = before.and_then(|before| before.previous);
        core::iter::successors(earlier, |session| session.previous).for_each(Session::part);
        let mut session = self.attach_patiently(*number + 1, tries)?;
        session.previous = before;
        *number += 1;
        let session: &'static Session<H> = Box::leak(Box::new(session));
        self.take_stock(session);
        let kept = self.keep_open(session);
        self.session.store(core::ptr::from_ref(session).cast_mut(), Ordering::Release);
        self.unpin_closed(session, kept);
        Ok(session)
    }

    /// A session was begun by who was then told to stop, before the service had answered what others have lost of what is open: it is asked
    /// again. An fsync must know.
    #[cold]
    fn hear_losses(&self, session: &'static Session<H>) -> Result<()> {
        let _attaching = self.attaching.write_unless(|| self.config.stops())?;
        if session.unheard.load(Ordering::Acquire) {
            let kept = self.keep_open(session);
            self.unpin_closed(session, kept);
            if session.unheard.load(Ordering::Acquire) {
                return Err(Errno::INTR);
            }
        }
        Ok(())
    }

    /// Closed before: that was said in the session of before, which nobody hears.
    fn unpin_closed(&self, session: &Session<H>, kept: Vec<Arc<Inode<H>>>) {
        for inode in kept {
            let state = inode.state.write();
            if state.open == 0 {
                self.unpin(session, inode.ino);
            }
        }
    }

    /// Notes what was lost with the session before.
    fn take_stock(&self, session: &'static Session<H>) {
        let Some(before) = session.previous else { return };
        let evicted = Sequence(before.evicted.load(Ordering::Acquire));
        let mut lost = session.lost_with(before.number, evicted);
        let known: Vec<_> = self.inodes.read().values().cloned().collect();
        for inode in known {
            let mut state = inode.state.write();
            let losses = state.losses;
            self.adopt(session, &mut state);
            lost |= state.losses != losses;
        }
        self.losses.add(lost.into(), Ordering::AcqRel);
    }

    /// Tells the service what is still open of what was opened in earlier sessions: until then it stays there for this
    /// process, whatever became of the node meanwhile, and the rest of it is let go. The
    /// files that stay.
    fn keep_open(&self, session: &'static Session<H>) -> Vec<Arc<Inode<H>>> {
        let mut all = Vec::new();
        let earlier = core::iter::successors(session.previous, |session| session.previous);
        let before: Vec<ClientId> =
            earlier.take(limits::EARLIER_MAX).map(|s| s.segment.descriptor.client).collect();
        if before.is_empty() {
            return all;
        }
        let mut open: Vec<_> = self.inodes.read().values().cloned().collect();
        open.retain(|inode| inode.state.read().open > 0 && !planted(Bug::PinForgotten));
        let mut pieces = open.chunks(self.config.limits.posted.max(1)).peekable();
        loop {
            let piece = pieces.next().unwrap_or(&[]);
            let last = pieces.peek().is_none();
            let inodes = piece.iter().map(|inode| inode.ino).collect();
            let request = Request::Keep { before: before.clone(), inodes, last };
            let mut body = Vec::new();
            let called = session.call(&request, Sequence(0), &mut body);
            session.unheard.store(called == Err(Errno::INTR), Ordering::Release);
            // A service that ends again is told in the next session.
            if called.is_err() {
                return all;
            }
            let answer = rpc::reply_status(&body).and_then(|(_, rest)| rpc::take_kept(rest));
            let Ok((kept, lost)) = answer else { return all };
            for inode in piece.iter().filter(|inode| kept.contains(&inode.ino)) {
                let mut state = inode.state.write();
                state.pinned = state.open > 0;
                // What others had done to it: each file that is open here says so once, like what was done here.
                state.losses += u32::from(lost.contains(&inode.ino));
                all.push(Arc::clone(inode));
            }
            if last && lost.is_empty() {
                return all;
            }
            // Once more without any, where losses were told: that they have arrived is known by this.
        }
    }

    /// Attaches; while the service restarts or the chain is being repaired that takes a moment.
    fn attach_patiently(&self, number: u64, tries: Option<u32>) -> Result<Session<H>> {
        // What nobody answers is no answer about a file.
        let no_answer =
            |e| matches!(e, Errno::AGAIN | Errno::NOTCONN | Errno::NOENT | Errno(111 | 104 | 32));
        let tries = match (tries, number) {
            (Some(tries), _) => tries,
            (None, 1) => ATTACH_TRIES,
            (None, _) if self.config.patient => u32::MAX,
            (None, _) => REATTACH_TRIES,
        };
        for _ in 0..tries {
            match Session::attach(&self.config, number, Arc::clone(&self.proofs)) {
                Err(e) if no_answer(e) => {}
                other => return other.inspect(|session| self.name_heir_in(session)),
            }
            if self.config.stops() {
                return Err(Errno::INTR);
            }
            H::sleep(ATTACH_PAUSE);
        }
        let last = Session::attach(&self.config, number, Arc::clone(&self.proofs));
        let last = last.inspect(|session| self.name_heir_in(session));
        // Of the first one the caller wants to know why.
        last.map_err(|e| if number > 1 && no_answer(e) { Errno::IO } else { e })
    }

    #[allow(unsafe_code)]
    pub(crate) fn current(&self) -> Option<&'static Session<H>> {
        // SAFETY: the pointer is null or came from `Box::leak`, and is freed with `self` only. (The reference is used
        // within calls on `self`.)
        unsafe { self.session.load(Ordering::Acquire).as_ref() }
    }

    /// Descriptors that must be kept from the program's close and dup2.
    pub fn descriptors(&self) -> Vec<i32> {
        self.current().map(|session| session.segment.descriptors()).unwrap_or_default()
    }

    /// In a child after fork: nothing of the parent's session may be used, nor undone.
    pub fn abandon(self) {
        core::mem::forget(self);
    }

    /// The cached inode of that number.
    pub(crate) fn inode(&self, ino: InodeId) -> Arc<Inode<H>> {
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
    pub(crate) fn remember_inode(&self, inode: Arc<Inode<H>>) {
        let mut inodes = self.inodes.write();
        if inodes.len() >= self.inodes_max() {
            self.evict(&mut inodes);
        }
        inodes.insert(inode.ino.0, inode);
    }

    /// Inodes remembered; above it, those that nobody uses are dropped.
    fn inodes_max(&self) -> usize {
        self.config.limits.inodes.min(limits::INODES_MAX)
    }

    /// Forgets inodes that nobody uses, and gives their leases back.
    fn evict(&self, inodes: &mut Inodes<H>) {
        let Some(session) = self.current() else { return };
        let mut slots = Vec::new();
        let mut left = self.config.limits.evict.min(inodes.len() / 2);
        let now = kernel::now_ms::<H>();
        let mut forget = |_: &u64, inode: &mut Arc<Inode<H>>| {
            // The count cannot grow while we hold the table exclusively.
            if left == 0
                || Arc::strong_count(inode) > 1
                || inode.used.swap(false, Ordering::Relaxed)
            {
                return true;
            }
            let Some(state) = inode.state.try_write() else { return true };
            // What was done here, and not all have, an fsync that may follow waits for, although nobody has it open now. Of a directory
            // nobody has it open here at all: what of it is lost is known by its state alone.
            let own = state.session == session.number && state.last > session.replicated();
            let is_dir = state.record.mode & S_IFMT == S_IFDIR;
            let untold = own || state.losses != state.told && is_dir;
            if state.open > 0 || untold || inode.shown.counts(now) {
                return true;
            }
            if state.session == session.number && state.lease.word.0 != 0 {
                slots.push(state.lease.slot);
            }
            if state.session == session.number {
                session.evicted.raise(state.last.0, Ordering::AcqRel);
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
        self.send_unpins(session, &mut self.unpins.write());
    }

    /// Whether the cached state counts, with at least `mode`.
    #[inline]
    pub(crate) fn holds(&self, session: &Session<H>, state: &State, mode: LeaseMode) -> bool {
        self.held(session, state, mode) && session.segment.in_time()
    }

    /// The same, time aside: where another look follows.
    #[inline]
    pub(crate) fn held(&self, session: &Session<H>, state: &State, mode: LeaseMode) -> bool {
        state.session == session.number
            && state.mode() >= mode
            && session.segment.lease_holds(state.lease.slot, state.lease.word)
    }

    /// Whether what is known of an inode is enough.
    pub(crate) fn knows(
        &self,
        session: &Session<H>,
        state: &State,
        mode: LeaseMode,
        flags: u8,
    ) -> bool {
        (flags & rpc::WANT_PIN == 0 || state.pinned)
            && (flags & rpc::WANT_WRITE == 0 || state.may_write)
            && (self.holds(session, state, mode)
                || flags & rpc::WANT_JOINT != 0
                    && state.is_joint()
                    && self.holds(session, state, LeaseMode::Joint))
    }

    /// Makes sure of a lease of that mode on an inode that is locked, and that the service knows what `flags`
    /// says.
    pub(crate) fn hold(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &mut State,
        mode: LeaseMode,
        flags: u8,
    ) -> Step<(), H> {
        if !self.adopt(turn.session, state) {
            return Err(Stop::Wait(Wait::Again));
        }
        let mut flags = flags;
        if mode == LeaseMode::Read {
            // What is asked of a directory under it is so, or is asked for, also where others use its names.
            flags |= rpc::WANT_JOINT;
        }
        if self.knows(turn.session, state, mode, flags) {
            // Without a name, and open nowhere here, it ends at any moment: what is done to it would be refused.
            let ends = mode == LeaseMode::Write && state.record.nlink == 0 && !state.pinned;
            match (ends, state.open) {
                (false, _) => return Ok(()),
                (true, 0) => {
                    turn.gone(ino);
                    return Err(Errno::NOENT.into());
                }
                (true, _) if planted(Bug::OpeningCounts) => return Ok(()),
                // Another thread is opening it, and may be too late.
                (true, _) => flags |= rpc::WANT_PIN,
            }
        }
        turn.refused(ino)?;
        Err(Stop::Wait(Wait::Lease { ino, mode, flags }))
    }

    /// The same for bytes of a file that are to be written: if others use other bytes of it, these alone will do. `may_share`: nothing but
    /// bytes and times is changed.
    pub(crate) fn hold_bytes(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &mut State,
        bytes: &Range<u64>,
        may_share: bool,
    ) -> Step<(), H> {
        let share = self.config.limits.ranges && may_share && !bytes.is_empty();
        match self.hold(turn, ino, state, LeaseMode::Write, 0) {
            // (If it is another file by now, or shorter, what is known of it is no more than a guess: then the answer says so.)
            Err(Stop::Wait(Wait::Lease { flags: 0, .. }))
                if share && state.pinned && bytes.end <= state.record.size =>
            {
                if self.has_bytes(turn.session, state, bytes) {
                    return Ok(());
                }
                Err(Stop::Wait(Wait::Bytes { ino, from: bytes.start, to: bytes.end }))
            }
            other => other,
        }
    }

    /// Whether this client may read and change these bytes beside others who use others, time aside.
    #[inline]
    pub(crate) fn has_bytes(
        &self,
        session: &Session<H>,
        state: &State,
        bytes: &Range<u64>,
    ) -> bool {
        self.held(session, state, LeaseMode::Joint) && state.has_bytes(bytes)
    }

    /// Nobody came before this call who changes bytes of that range.
    #[inline]
    pub(crate) fn may_change(
        &self,
        turn: &Turn<H>,
        inode: &Arc<Inode<H>>,
        state: &State,
        range: &Range<u64>,
    ) -> Step<(), H> {
        let barred = state.ranges.bars(range, turn.ticket(inode.ino));
        if barred && !planted(Bug::LongWriteIgnored) {
            return Err(Stop::Wait(Wait::Range(Arc::clone(inode), range.clone())));
        }
        Ok(())
    }

    /// Appends one operation if every lease still holds, and makes it persistent. `leases` are the
    /// states it relies on.
    pub(crate) fn append(
        &self,
        turn: &mut Turn<H>,
        hint: u64,
        leases: &[&State],
        raw: RawHeader,
        payload: &[u8],
    ) -> Step<Place, H> {
        let written = self.write_entry(turn, hint, leases, raw, payload)?;
        let place = written.persist();
        turn.session.segment.ring(false);
        Ok(place)
    }

    /// As [`LibFs::append`], but the caller persists the entry and rings.
    #[inline]
    pub(crate) fn write_entry(
        &self,
        turn: &mut Turn<H>,
        hint: u64,
        leases: &[&State],
        raw: RawHeader,
        payload: &[u8],
    ) -> Step<Written<'static, H>, H> {
        let session = turn.session;
        let memory = &session.segment.memory;
        // Inodes are locked, so no lane is waited for.
        let lane = session.log.lane_of(hint);
        let room = match turn.lane.take() {
            Some(lent) => session.log.room_in(memory, lent, payload.len()).map_err(Lack::Full),
            None if planted(Bug::LaneAwaited) => {
                session.log.room(memory, lane, payload.len()).map_err(Lack::Full)
            }
            None => session.log.try_room(memory, lane, payload.len()),
        };
        match room {
            Ok(room) => self.commit_entry(turn, leases, || room.append(raw, payload)),
            Err(Lack::Full(full)) => Err(Stop::Wait(Wait::Space(full))),
            Err(Lack::Busy(lane)) => Err(Stop::Wait(Wait::Lane(lane))),
        }
    }

    /// Makes an entry if every lease still holds.
    #[inline]
    pub(crate) fn commit_entry(
        &self,
        turn: &mut Turn<H>,
        leases: &[&State],
        make: impl FnOnce() -> Written<'static, H>,
    ) -> Step<Written<'static, H>, H> {
        let session = turn.session;
        let segment = &session.segment;
        let inside = (!planted(Bug::NotInside)).then(|| segment.enter());
        // (Of a directory that others use as well only names are changed.)
        // (And of a file of which others have other bytes, only this client's: whoever appends has looked, and has it locked.)
        let jointly =
            |s: &State| (s.is_joint() || s.shares()) && self.held(session, s, LeaseMode::Joint);
        let good = segment.attached()
            && leases.iter().all(|s| self.held(session, s, LeaseMode::Write) || jointly(s))
            && turn.has_grounds()
            && segment.in_time();
        if !good && !planted(Bug::LeaseNotLookedAt) {
            inside.into_iter().for_each(|inside| segment.leave(inside));
            return Err(Stop::Wait(Wait::Again));
        }
        leases.iter().for_each(|state| state.suspects.look(session, state.last));
        let written = make();
        inside.into_iter().for_each(|inside| segment.leave(inside));
        if !segment.attached() && !planted(Bug::SealIgnored) {
            // Expelled between: the entry counts only if it was sealed in, which takes a moment to be known.
            turn.doubt(written.place.sequence, leases);
        }
        Ok(written)
    }

    /// The lane of an open file: it has one from its first write in a session until it is closed.
    #[inline]
    pub(crate) fn lane(&self, open: &Open<H>, session: &Session<H>) -> u8 {
        match lane_in(session, open.lane.load(Ordering::Relaxed)) {
            Some(lane) => lane,
            None => self.enlist(open, session),
        }
    }

    #[cold]
    fn enlist(&self, open: &Open<H>, session: &Session<H>) -> u8 {
        let lane = session.log.enlist();
        let mark = (session.number << LANE_BITS) | (u64::from(lane) + 1);
        // Another thread may have been quicker.
        if let Some(other) = lane_in(session, open.lane.swap(mark, Ordering::Relaxed)) {
            session.log.discharge(other);
        }
        lane
    }

    /// It writes no more.
    pub(crate) fn discharge(&self, open: &Open<H>) {
        let Some(session) = self.current() else { return };
        if let Some(lane) = lane_in(session, open.lane.swap(0, Ordering::Relaxed)) {
            session.log.discharge(lane);
        }
    }

    /// Encodes and appends an operation (other than Write).
    pub(crate) fn log(
        &self,
        turn: &mut Turn<H>,
        hint: u64,
        leases: &[&State],
        op: &Op<'_>,
        time: u64,
    ) -> Step<Place, H> {
        let mut payload = Vec::new();
        let mut raw = op.encode(&mut payload);
        raw.time = time;
        self.append(turn, hint, leases, raw, &payload)
    }

    pub(crate) fn open_handle(&self, inode: Arc<Inode<H>>, flags: u32) -> Handle {
        let number = self.opened.add(1, Ordering::Relaxed);
        let lane = Word::new(0);
        let refusals = AtomicU64::new(self.current().map_or(0, |s| s.mark(s.refusals())));
        let clean = AtomicU64::new(0);
        let losses = AtomicU32::new(inode.state.read().losses);
        let open = Open { inode, flags, number, lane, refusals, clean, losses };
        let index = self.handles.insert(open, usize::MAX);
        // Millions of open files are refused far from here; a number that is not there is EBADF.
        Handle(index.map_or(u64::MAX >> 1, |index| index as u64))
    }

    /// An open file. The handle of a directory keeps it, and is good for nothing else.
    #[inline]
    pub(crate) fn handle(&self, handle: Handle) -> Result<Used<'_, Open<H>, H>> {
        let open = self.handles.get(handle.0 as usize).ok_or(Errno::BADF)?;
        if open.flags & O_DIRECTORY != 0 { Err(Errno::BADF) } else { Ok(open) }
    }

    pub(crate) fn close_handle(&self, handle: Handle) -> Option<Used<'_, Open<H>, H>> {
        self.handles.remove(handle.0 as usize)
    }

    /// Tells the service that an inode is no longer open here, and what else it has not been told.
    pub(crate) fn unpin(&self, session: &Session<H>, ino: InodeId) {
        let mut unpins = self.unpins.write();
        unpins.push(ino);
        session.segment.take_all_closed(&mut unpins);
        self.send_unpins(session, &mut unpins);
    }

    /// Takes back that it is open no more, if the service was not told yet.
    pub(crate) fn untell_closed(&self, session: &Session<H>, ino: InodeId) -> bool {
        let mut unpins = self.unpins.write();
        let before = unpins.len();
        unpins.retain(|i| *i != ino);
        let listed = unpins.len() < before;
        if planted(Bug::UntoldUnlocked) {
            drop(unpins);
            return session.segment.take_closed(ino) || listed;
        }
        // Under the lock: else another thread, which is about to tell all that is closed, may have it in its hands, and tells it
        // when the inode is open again.
        session.segment.take_closed(ino) || listed
    }

    /// Posted under the lock of the list: whoever opens one of them again asks after this.
    fn send_unpins(&self, session: &Session<H>, unpins: &mut Vec<InodeId>) {
        while !unpins.is_empty() {
            let inodes = unpins.split_off(unpins.len().saturating_sub(self.config.limits.posted));
            let request = Request::Unpin { inodes };
            if !session.post(&request, session.last())
                && let Request::Unpin { inodes } = request
            {
                // Every slot is taken. What does not fit the table goes with the next one.
                unpins.extend(inodes);
                unpins.retain(|ino| !session.segment.put_closed(*ino, control::CLOSED_SLOTS));
                session.segment.memory.store(control::CLOSED_NOW, 1, Ordering::Release);
                return;
            }
        }
    }

    /// Realtime nanoseconds, for time stamps: of the last tick, as the kernel stamps its own files,
    /// but later than the last change of each of the inodes that get the stamp. Caches tell by
    /// the time that a file has changed (the kernel's behind a mount, make, rsync), so no two
    /// changes may have the same.
    pub(crate) fn now(changed: &[&InodeRecord]) -> u64 {
        let after = |r: &&InodeRecord| r.ctime.nanos().saturating_add(1);
        changed.iter().map(after).fold(H::realtime(), u64::max)
    }
}
