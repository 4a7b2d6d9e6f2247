//! How an operation goes on: it is *attempted* with its inodes locked, and what it lacks (a lease, a name, log
//! space) it does not wait for but says ([`Wait`]); then everything is unlocked, that is waited for here, and the
//! operation is attempted again. So nobody waits for a thread that waits for the service, and whoever looks at an
//! inode finds it between two operations.
//!
//! What the service answers goes into the inodes' states, where the next attempt finds it; what cannot be kept
//! there (an attribute's value, the page of a listing) goes into the [`Turn`], with the question. An error that
//! the service gives is found by the next attempt at the place where it asked.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::Ordering;

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::proof::Proof;
use storage::format::rpc::{self, Granted, InodeRecord, InodeReply, Request, Span};

use super::LibFsOn;
use super::host::{Arena, Host};
use super::inode::{Inode, Known, Own, Queued, State};
use super::joint::Joint;
use super::log::{Full, Lent};
use super::ranges::Ticket;
use super::session::Session;
use super::sync::WriteGuard;
use crate::fs::{Result, S_IFMT, S_IFREG};

/// Why an attempt of an operation ended without its result.
#[derive(Debug)]
pub(crate) enum Stop<H: Host> {
    /// It failed, and nothing was done.
    Failed(Errno),
    /// To be attempted again once this is there.
    Wait(Wait<H>),
}

/// What an attempt came to.
pub(crate) type Step<T, H> = core::result::Result<T, Stop<H>>;

impl<H: Host> From<Errno> for Stop<H> {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

/// What an attempt lacks.
#[derive(Debug)]
pub(crate) enum Wait<H: Host> {
    /// Nothing, but a lease was lost, or the time of all of them is over.
    Again,
    /// A lease on an inode, and with the flags of `rpc` a pin or a right, and what the service knows of it.
    Lease { ino: InodeId, mode: LeaseMode, flags: u8 },
    /// A lease to write all of a file, or these bytes beside others who use others.
    Bytes { ino: InodeId, from: u64, to: u64 },
    /// What the service knows of an inode after all that was done to it here, though a lease is held.
    Renewal { ino: InodeId },
    /// What a name leads to, and a lease of that mode on it.
    Name { dir: InodeId, name: Vec<u8>, mode: LeaseMode },
    /// The extents of a file from an offset on.
    Extents { ino: InodeId, from: u64 },
    /// Fresh inode numbers.
    Numbers,
    /// An arena.
    Arena(u32),
    /// Log space.
    Space(Full),
    /// What another thread has locked, and may not be waited for with anything locked.
    Locked(Arc<Inode<H>>),
    /// That no other thread does what counts only if it is taken.
    Alone,
    /// A lane in which nobody appends, for what appends with inodes locked.
    Lane(u8),
    /// The turn at a range of a file.
    Range(Arc<Inode<H>>, Range<u64>),
    /// Another answer of the service.
    Answer(Question),
}

/// What else is asked of the service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Question {
    pub(crate) what: Ask,
    /// The answer reflects own operations up to here.
    pub(crate) after: Sequence,
    /// The lease under which it is asked.
    pub(crate) lease: Granted,
    /// The answer is of no use if the lease is another by then, or something more was done here; else what was so
    /// at a moment in the call will do.
    pub(crate) exact: bool,
}

/// See [`Question`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    Xattr {
        ino: InodeId,
        name: Vec<u8>,
    },
    Xattrs {
        ino: InodeId,
    },
    Names {
        dir: InodeId,
        cookie: u64,
    },
    Bytes {
        ino: InodeId,
        offset: u64,
        len: u32,
    },
    /// Nothing, but that every member has what others have done to it.
    Reach {
        ino: InodeId,
    },
}

impl Ask {
    pub(crate) fn request(&self) -> Request<'_> {
        match self {
            Self::Xattr { ino, name } => Request::XattrGet { ino: *ino, name },
            Self::Xattrs { ino } => Request::XattrList { ino: *ino },
            Self::Names { dir, cookie } => Request::Names { dir: *dir, cookie: *cookie },
            Self::Bytes { ino, offset, len } => {
                Request::Read { ino: *ino, offset: *offset, len: *len }
            }
            Self::Reach { ino } => {
                Request::Inode { ino: *ino, mode: LeaseMode::None, flags: rpc::WANT_REACH }
            }
        }
    }
}

/// What a name led to at a moment since the call began.
#[derive(Debug)]
struct Found {
    dir: InodeId,
    name: Vec<u8>,
    known: Known,
    /// The directory's lease when it was asked, if it held, and the last own operation on it then.
    lease: Option<Granted>,
    last: Sequence,
}

/// What the service answered.
#[derive(Debug)]
struct Answer {
    body: Result<Vec<u8>>,
    /// In parts, which belong together only if nothing has changed meanwhile.
    in_parts: bool,
}

/// One call, from attempt to attempt.
#[derive(Debug)]
pub(crate) struct Turn<H: Host> {
    pub(crate) session: &'static Session<H>,
    /// What the service said of an inode at a moment since the call began, with all own operations of before.
    shown: Option<(InodeRecord, Proof)>,
    found: Vec<Found>,
    answer: Option<(Question, Answer)>,
    /// It refused to answer about this inode.
    failed: Option<(InodeId, Errno)>,
    /// The index of log pieces was to be made smaller.
    pub(crate) trimmed: bool,
    /// Entries of this attempt of which it is not known whether they count.
    doubts: Vec<Doubt>,
    /// Leases that this attempt was judged by, beside those of what it changes.
    grounds: Vec<rpc::Granted>,
    /// A lane that was waited for. Taken before anything else is locked.
    pub(crate) lane: Option<Lent<'static, H>>,
    /// A range that was waited for, until the call's end.
    queued: Option<Queued<H>>,
    /// Bytes are to be copied into the log with the file locked: what else there is to do may append as well.
    pub(crate) together: bool,
    /// How often what was copied with nothing locked had changed meanwhile.
    pub(crate) disturbed: u8,
    /// What it asked a lease for stays remembered until it is done: with few inodes remembered, two that it needs would
    /// make room for each other for ever.
    needed: Vec<Arc<Inode<H>>>,
    /// Nobody else does what counts only if it is taken, until this ends.
    pub(crate) alone: Option<WriteGuard<'static, (), H>>,
    /// What this attempt appended counts only if it is taken.
    pub(crate) joint: Option<Joint>,
    /// Leases that it has asked for, by the number of the inode, each with the flags of `rpc`.
    asked: Vec<(InodeId, LeaseMode, u8)>,
    /// How often for one that it had, and in how many rounds for all of them.
    lost: u32,
    rounds: u32,
    /// It is about to fail for what names lead to: nobody else may change them while that is looked at.
    pub(crate) strict: bool,
    /// It is an fsync: nothing is read or written next.
    pub(crate) syncs: bool,
}

/// An entry that was appended while the session was ended.
#[derive(Debug)]
struct Doubt {
    sequence: Sequence,
    /// The inodes it is about, and the last own operation on each before it.
    before: Vec<(InodeId, Sequence)>,
}

/// Rounds in which a call asks for all leases together, before it looks anew what it needs.
const ROUNDS: u32 = 4;
/// Names of one call, at most: a rename has two.
const FOUND_MAX: usize = 4;

impl<H: Host> Turn<H> {
    fn new(session: &'static Session<H>) -> Self {
        let (shown, answer, failed) = (None, None, None);
        let (found, doubts, grounds, needed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (trimmed, together, disturbed, lane, queued) = (false, false, 0, None, None);
        Self {
            session,
            shown,
            found,
            answer,
            failed,
            trimmed,
            doubts,
            grounds,
            lane,
            queued,
            together,
            disturbed,
            needed,
            alone: None,
            joint: None,
            asked: Vec::new(),
            lost: 0,
            rounds: 0,
            strict: false,
            syncs: false,
        }
    }

    /// The call's place in the queue for a range of that inode.
    #[inline]
    pub(crate) fn ticket(&self, ino: InodeId) -> Option<Ticket> {
        self.queued.as_ref().filter(|queued| queued.is_of(ino)).map(|queued| queued.ticket)
    }

    /// What this attempt appends counts on what `state`, of which it holds a lease, says; which it does not change.
    pub(crate) fn counts_on(&mut self, state: &State) {
        self.grounds.push(state.lease);
    }

    /// Whether that is still so. To be asked inside the operation: a lease taken back before may have let others
    /// change what was looked at.
    #[inline]
    pub(crate) fn has_grounds(&self) -> bool {
        let held = |lease: &rpc::Granted| self.session.segment.lease_holds(lease.slot, lease.word);
        self.grounds.iter().all(held) || planted(Bug::GroundsUnchecked)
    }

    /// What the service said of the inode in this call: the truth of a moment, whether the lease still holds or
    /// not.
    pub(crate) fn shown(&self, ino: InodeId) -> Option<&InodeRecord> {
        self.shown.as_ref().map(|(record, _)| record).filter(|record| record.ino == ino)
    }

    /// The proof that came with it.
    pub(crate) fn proof(&self, ino: InodeId) -> Option<Proof> {
        self.shown.as_ref().filter(|(record, _)| record.ino == ino).map(|(_, proof)| *proof)
    }

    /// Notes an entry that counts only if the session's end has sealed it in.
    pub(crate) fn doubt(&mut self, sequence: Sequence, leases: &[&State]) {
        let before = leases.iter().map(|state| (state.record.ino, state.last)).collect();
        self.doubts.push(Doubt { sequence, before });
    }

    /// The service's error about an inode, once.
    pub(crate) fn refused(&mut self, ino: InodeId) -> Step<(), H> {
        match self.failed.take() {
            Some((of, errno)) if of == ino => {
                self.gone(ino);
                Err(Stop::Failed(errno))
            }
            other => {
                self.failed = other;
                Ok(())
            }
        }
    }

    /// The inode is not there any more. A name that led there, where others change names as well, leads elsewhere by now: it is
    /// asked for again.
    pub(crate) fn gone(&mut self, ino: InodeId) {
        if !planted(Bug::FoundGoneKept) {
            self.found.retain(|f| !matches!(f.known, Known::Present(to, _) if to == ino));
        }
    }

    /// What a name leads to, if that was asked in this call.
    pub(crate) fn found(&self, dir: InodeId, name: &[u8]) -> Option<Known> {
        self.found.iter().find(|f| f.dir == dir && f.name == name).map(|found| found.known)
    }

    /// The same, for who has the directory locked and holds its lease: nobody has changed it since.
    pub(crate) fn found_under(&self, dir: InodeId, name: &[u8], state: &State) -> Option<Known> {
        let found = self.found.iter().find(|f| f.dir == dir && f.name == name)?;
        let same = found.lease == Some(state.lease) && found.last == state.last;
        (same || planted(Bug::NameOfBefore)).then_some(found.known)
    }

    /// Notes a lease that the attempt lacks.
    fn note_asked(&mut self, ino: InodeId, mode: LeaseMode, flags: u8) {
        match self.asked.binary_search_by_key(&ino, |(known, ..)| *known) {
            Ok(at) => {
                let (_, known, all) = &mut self.asked[at];
                self.lost += u32::from(*known >= mode && flags & !*all == 0);
                // Joint use will do only if it always will.
                let joint = *all & flags & rpc::WANT_JOINT;
                (*known, *all) = ((*known).max(mode), (*all | flags) & !rpc::WANT_JOINT | joint);
            }
            Err(at) => self.asked.insert(at, (ino, mode, flags)),
        }
    }

    /// Whether more leases than so many that it had were taken back while it waited for others.
    fn loses_more_than(&self, most: u32) -> bool {
        self.lost > most && self.asked.len() > 1
    }

    fn need(&mut self, inode: &Arc<Inode<H>>) {
        if !self.needed.iter().any(|known| Arc::ptr_eq(known, inode))
            && !planted(Bug::NeededForgotten)
        {
            self.needed.push(Arc::clone(inode));
        }
    }

    /// The service's answer to a question, and whether nothing has changed here since it was asked.
    pub(crate) fn ask(&mut self, question: Question) -> Step<(Vec<u8>, bool), H> {
        if let Some((asked, answer)) = self.answer.take()
            && asked.what == question.what
        {
            let same = asked == question || planted(Bug::AnswerOfBefore);
            if same || !question.exact && !answer.in_parts {
                return Ok((answer.body?, same));
            }
        }
        Err(Stop::Wait(Wait::Answer(question)))
    }
}

impl<H: Host> LibFsOn<H> {
    /// Attempts an operation until it is done, and waits for what it lacks in between, with nothing locked.
    pub(crate) fn run<T>(&self, attempt: impl FnMut(&mut Turn<H>) -> Step<T, H>) -> Result<T> {
        self.run_on(&mut Turn::new(self.session()?), attempt)
    }

    /// The same, with what was learnt on the way.
    pub(crate) fn run_to_end<T>(
        &self,
        attempt: impl FnMut(&mut Turn<H>) -> Step<T, H>,
    ) -> Result<(T, Turn<H>)> {
        let mut turn = Turn::new(self.session()?);
        Ok((self.run_on(&mut turn, attempt)?, turn))
    }

    #[inline]
    fn run_on<T>(
        &self,
        turn: &mut Turn<H>,
        mut attempt: impl FnMut(&mut Turn<H>) -> Step<T, H>,
    ) -> Result<T> {
        for _ in 0..self.config.limits.attempts {
            turn.grounds.clear();
            turn.joint = None;
            let attempted = attempt(turn);
            let counts = self.is_counted(turn);
            let wait = match attempted {
                Ok(value) if counts => return Ok(value),
                Ok(_) => Wait::Again,
                Err(Stop::Wait(wait)) => wait,
                // The session ended in the middle.
                Err(Stop::Failed(Errno::STALE)) if !turn.session.segment.attached() => Wait::Again,
                Err(Stop::Failed(errno)) => return Err(errno),
            };
            if self.config.stops() {
                return Err(Errno::INTR);
            }
            match self.wait_for(turn, wait) {
                Ok(()) => {}
                Err(Errno::STALE) if !turn.session.segment.attached() => {}
                Err(e) => return Err(e),
            }
            if !turn.session.segment.attached() {
                // Who attaches anew takes the lanes of sessions that are over.
                turn.lane = None;
            }
            let session = self.session()?;
            if session.number != turn.session.number {
                *turn = Turn::new(session);
            }
        }
        Err(Errno::IO)
    }

    /// Asks what concerns no single inode; the reply, with all own operations.
    pub(crate) fn ask_now(&self, request: &Request<'_>) -> Result<Vec<u8>> {
        self.run(|turn| {
            let mut body = Vec::new();
            turn.session.call(request, turn.session.last(), &mut body)?;
            Ok(body)
        })
    }

    /// Whether all that was appended in an attempt counts. What does not is as if it had never been.
    fn is_counted(&self, turn: &mut Turn<H>) -> bool {
        if turn.doubts.is_empty() {
            return true;
        }
        let sealed = turn.session.segment.sealed_at();
        let mut all = true;
        for Doubt { sequence, before } in turn.doubts.drain(..).rev() {
            if sequence.0 <= sealed {
                continue;
            }
            all = false;
            for (ino, last) in before {
                let inode = self.inode(ino);
                let mut state = inode.state.write();
                if state.session == turn.session.number && state.last == sequence {
                    state.last = last;
                }
            }
        }
        all
    }

    fn wait_for(&self, turn: &mut Turn<H>, wait: Wait<H>) -> Result<()> {
        let session = turn.session;
        turn.lane = None;
        match wait {
            // Either a lease was lost, or the time of all of them is over: the service is being
            // restarted, or hangs. If it ends altogether the next round attaches anew.
            Wait::Again if session.segment.in_time() => Ok(()),
            Wait::Again => session.segment.wait_in_time(),
            Wait::Lease { ino, mode, flags } => {
                turn.note_asked(ino, mode, flags);
                if turn.loses_more_than(self.config.limits.lost) && !planted(Bug::TogetherApart) {
                    self.fetch_together(turn)
                } else {
                    self.fetch_inode(turn, ino, (mode, Span::NONE), flags, false)
                }
            }
            Wait::Bytes { ino, from, to } => {
                let span = Span { from, to };
                self.fetch_inode(turn, ino, (LeaseMode::Write, span), 0, false)
            }
            Wait::Renewal { ino } => {
                self.fetch_inode(turn, ino, (LeaseMode::Read, Span::NONE), 0, true)
            }
            Wait::Name { dir, name, mode } => self.fetch_name(turn, dir, name, mode),
            Wait::Extents { ino, from } => self.fetch_extents(session, ino, from),
            Wait::Numbers => self.fetch_numbers(session),
            Wait::Arena(arena) => session.arena(&self.config, arena).map(|_: Arena<H>| ()),
            Wait::Space(Full { lane, reclaimed }) => session.wait_for_space(lane, reclaimed),
            Wait::Alone => {
                turn.alone = Some(session.joint.write_unless(|| self.config.stops())?);
                Ok(())
            }
            Wait::Locked(inode) => inode.state.write_unless(|| self.config.stops()).map(drop),
            Wait::Lane(lane) => {
                turn.lane = Some(session.log.lend(lane));
                Ok(())
            }
            Wait::Range(inode, range) => {
                if turn.ticket(inode.ino).is_none() {
                    // One place at a time, or two who have one each and want the other's would wait for ever.
                    turn.queued = None;
                    turn.queued = Some(Queued::new(&inode, range));
                }
                turn.queued.as_ref().map_or(Ok(()), |queued| queued.wait(|| self.config.stops()))
            }
            Wait::Answer(question) => {
                let mut body = Vec::new();
                let called = session.call(&question.what.request(), question.after, &mut body);
                let in_parts = called == Err(Errno::TOOBIG);
                let body = if in_parts {
                    Self::in_parts(session, &question.what, question.after)
                } else {
                    called.map(|()| body.split_off(8))
                };
                if let Err(e @ (Errno::INTR | Errno::STALE)) = body {
                    return Err(e);
                }
                turn.answer = Some((question, Answer { body, in_parts }));
                Ok(())
            }
        }
    }

    /// An attribute's value, or the names of all, where no reply can hold them. The parts are of one moment if the
    /// lease holds all the time, and nothing is done here.
    pub(crate) fn in_parts(session: &Session<H>, what: &Ask, after: Sequence) -> Result<Vec<u8>> {
        let (ino, name): (InodeId, &[u8]) = match what {
            Ask::Xattr { ino, name } => (*ino, name),
            Ask::Xattrs { ino } => (*ino, b""),
            Ask::Names { .. } | Ask::Bytes { .. } | Ask::Reach { .. } => return Err(Errno::IO),
        };
        let mut whole = Vec::new();
        loop {
            let from = u32::try_from(whole.len()).map_err(|_| Errno::TOOBIG)?;
            let mut body = Vec::new();
            let part = Request::XattrPart { ino, name, from };
            session.call(&part, after, &mut body)?;
            match body.get(8..) {
                Some(bytes) if !bytes.is_empty() => whole.extend_from_slice(bytes),
                _ => return Ok(whole),
            }
        }
    }

    /// Asks for all leases that the call has asked for before, in the order of their numbers: others who need some of them as well take
    /// none of them back meanwhile. (One after the other as they are missed each would be taken back while the next is waited for.)
    fn fetch_together(&self, turn: &mut Turn<H>) -> Result<()> {
        let asked = turn.asked.clone();
        turn.rounds += 1;
        if turn.rounds >= ROUNDS {
            // Names lead elsewhere by now, perhaps.
            turn.asked.clear();
            (turn.lost, turn.rounds) = (0, 0);
        }
        for (ino, mode, flags) in asked {
            let what = (mode, Span::NONE);
            self.fetch_inode(turn, ino, what, flags | rpc::WANT_TOGETHER, false)?;
            if turn.failed.is_some_and(|(failed, _)| failed == ino) {
                // If the next attempt needs it still it asks again.
                turn.asked.retain(|(known, ..)| *known != ino);
                turn.failed = None;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Asks about an inode. One thread at a time: the others find what it has got.
    fn fetch_inode(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        (mode, span): (LeaseMode, Span),
        flags: u8,
        renew: bool,
    ) -> Result<()> {
        let session = turn.session;
        let inode = self.inode(ino);
        turn.need(&inode);
        let _asking = inode.asking.write_unless(|| self.config.stops())?;
        let (mode, flags, after) = {
            let mut state = inode.state.write();
            if state.session > session.number {
                // Another thread has attached anew.
                return Ok(());
            }
            let ours = state.session == session.number;
            if ours && !renew && self.knows(session, &state, mode, flags) {
                return Ok(());
            }
            if ours && !span.is_empty() && self.has_bytes(session, &state, &span.range()) {
                return Ok(());
            }
            // It goes on with what it knows, and gets more bytes.
            let more = !span.is_empty()
                && ours
                && state.shares()
                && self.held(session, &state, LeaseMode::Joint);
            let held = ours && self.held(session, &state, LeaseMode::Read);
            let last = if ours { state.last } else { Sequence(0) };
            let is_file = state.record.mode & S_IFMT == S_IFREG;
            let mode = match is_file && !renew && !turn.syncs {
                true => state.turns.asks(mode, held, last),
                false => mode,
            };
            let mode = if held { mode.max(state.mode()) } else { mode };
            // What is open was perhaps opened in an earlier session, of which this service knows nothing.
            let pinned = ours && state.pinned || state.open == 0 || planted(Bug::PinForgotten);
            let flags = flags | if pinned { 0 } else { rpc::WANT_PIN };
            let flags = flags | if renew && state.is_joint() { rpc::WANT_JOINT } else { 0 };
            let after = if more { Sequence(0) } else { session.known_after(last) };
            (mode, flags, after)
        };
        // An earlier close that the service was not told of yet must not take this pin away.
        let closed = flags & rpc::WANT_PIN != 0 && self.untell_closed(session, ino);
        let mut body = Vec::new();
        let flags = flags | rpc::WANT_EARLY;
        let request = match span.is_empty() {
            true => Request::Inode { ino, mode, flags },
            false => Request::Range { ino, flags, from: span.from, to: span.to },
        };
        let asked = session.call(&request, after, &mut body);
        match asked {
            Ok(()) => {}
            Err(Errno::INTR) => {
                // It may be pinned yet, for nobody: that is said after the request, which the service has by then.
                if flags & rpc::WANT_PIN != 0 {
                    self.unpins.write().push(ino);
                }
                return Err(Errno::INTR);
            }
            Err(Errno::STALE) if !session.segment.attached() => return Err(Errno::STALE),
            Err(errno) => {
                if closed {
                    // It is as closed as before.
                    self.unpin(session, ino);
                }
                turn.failed = Some((ino, errno));
                return Ok(());
            }
        }
        let reply = parse_inode(&body)?;
        turn.shown = Some((reply.record.clone(), reply.proof));
        self.install(session, &mut inode.state.write(), reply, flags, after);
        Ok(())
    }

    /// Takes an answer about an inode into its state, if it says what is so now. `after`: what was asked
    /// for after this own operation.
    pub(crate) fn install(
        &self,
        session: &'static Session<H>,
        state: &mut State,
        reply: InodeReply,
        flags: u8,
        after: Sequence,
    ) {
        session.remember_proof(reply.record.ino, reply.proof);
        self.proofs.put(reply.record.parent, reply.parent_proof);
        if !self.adopt(session, state) {
            return;
        }
        state.pinned |= flags & rpc::WANT_PIN != 0;
        state.may_read |= flags & rpc::WANT_READ != 0;
        state.may_write |= flags & rpc::WANT_WRITE != 0;
        // It was asked with nothing locked. Another thread may have done something since, or the lease may be
        // gone already, or be another one: then this answer is not what is so now.
        let granted = reply.granted;
        let current = session.segment.lease_holds(granted.slot, granted.word);
        if state.open > 0 && !state.pinned && !planted(Bug::PinForgotten) {
            return;
        }
        let shares = granted.word.mode() == LeaseMode::Joint && !reply.span.is_empty();
        if shares && reply.since == state.own.since && current {
            // It has had the lease all the time: what it knows of its bytes is so, and these are its own as well.
            state.lease = granted;
            state.own.bytes.insert(reply.span.range());
            // Others may have given these other blocks, before.
            state.pieces.forget_extents();
            return;
        }
        if (state.last > after || !current) && !planted(Bug::OldAnswerInstalled) {
            return;
        }
        let early = flags & rpc::WANT_EARLY != 0 && reply.record.mode & S_IFMT == S_IFREG;
        if granted != state.lease {
            // (Under the same lease it was perhaps found meanwhile that every member has all.)
            state.early = early.then_some(state.last);
        }
        state.lease = granted;
        if !planted(Bug::RangeKeptOnRecall) {
            state.own = Own::default();
        }
        match granted.word.mode() {
            LeaseMode::Joint => state.shared = shares,
            LeaseMode::Write => state.shared = false,
            LeaseMode::Read | LeaseMode::None => {}
        }
        if shares {
            state.own.since = reply.since;
            state.own.bytes.insert(reply.span.range());
        }
        state.record = reply.record;
        state.learnt = self.learnt.add(1, Ordering::Relaxed) + 1;
        state.blocks_guessed = false;
        (state.no_capability, state.ended_setid) = (false, false);
        // Also under the same lease: what is known of names may come from an operation that was refused.
        state.names = Default::default();
        if !state.is_joint() && !planted(Bug::GivenForGood) {
            state.given = Default::default();
        }
        state.target = reply.target;
        // The answer reflects all that this client did to the inode, published (that was asked for, and the service
        // waits for it): nothing of the own log is needed any more, and what others wrote since may not be hidden
        // by it.
        if state.last <= reply.reflected {
            state.pieces = Default::default();
        }
        state.pieces.install(0, &reply.extents, reply.complete, reply.reflected);
        if state.extents_after > reply.reflected {
            state.pieces.forget_extents();
        }
        if state.pieces.will_move() {
            state.moved(state.last);
        }
    }

    /// Makes a state one of this session, if it is not of a later one. What was known under an earlier one is
    /// not known any more.
    pub(crate) fn adopt(&self, session: &Session<H>, state: &mut State) -> bool {
        if state.session == session.number {
            return true;
        }
        if state.session > session.number {
            // Another thread has attached anew.
            return false;
        }
        let ended = state.session != 0 && state.last.0 > 0;
        if ended && session.lost_with(state.session, state.last) {
            state.losses += 1;
        }
        state.session = session.number;
        state.lease = Granted::default();
        state.own = Own::default();
        state.last = Sequence(0);
        state.suspects = Default::default();
        state.extents_after = Sequence(0);
        state.pieces = Default::default();
        state.given = Default::default();
        state.room = Default::default();
        state.pinned = false;
        (state.may_read, state.may_write) = (false, false);
        true
    }

    /// Asks what a name leads to.
    fn fetch_name(
        &self,
        turn: &mut Turn<H>,
        dir: InodeId,
        name: Vec<u8>,
        mode: LeaseMode,
    ) -> Result<()> {
        let session = turn.session;
        let parent = self.inode(dir);
        let (lease, last) = {
            let state = parent.state.read();
            let ours = state.session == session.number;
            let held = ours && self.holds(session, &state, LeaseMode::Read);
            (held.then_some(state.lease), if ours { state.last } else { Sequence(0) })
        };
        let after = session.known_after(last);
        let mut body = Vec::new();
        // A directory that others use, too, stays theirs for somebody who only comes by.
        let flags = if mode == LeaseMode::Read { rpc::WANT_JOINT } else { 0 } | rpc::WANT_EARLY;
        let request = Request::Lookup { dir, name: &name, mode, flags };
        let known = match session.call(&request, after, &mut body) {
            Ok(()) => {
                let reply = parse_inode(&body)?;
                let (ino, kind) = (reply.record.ino, reply.record.mode & S_IFMT);
                let shown = (reply.record.clone(), reply.proof);
                if self.learn(session, reply, after) || planted(Bug::LookedUpOld) {
                    turn.shown = Some(shown);
                }
                Known::Present(ino, kind)
            }
            Err(Errno::NOENT) => Known::Absent,
            Err(e @ (Errno::INTR | Errno::STALE))
                if e == Errno::INTR || !session.segment.attached() =>
            {
                return Err(e);
            }
            Err(errno) => {
                turn.failed = Some((dir, errno));
                return Ok(());
            }
        };
        let mut state = parent.state.write();
        // The lease held from before the question until after the answer, and nobody here did anything: it may
        // be remembered.
        let same = lease == Some(state.lease) && state.last == last;
        if (same || planted(Bug::NameOfBefore)) && self.holds(session, &state, LeaseMode::Read) {
            state.names.put(&name, known, self.config.limits.names);
        }
        turn.found.retain(|f| f.dir != dir || f.name != name);
        turn.found.truncate(FOUND_MAX - 1);
        turn.found.insert(0, Found { dir, name, known, lease, last });
        Ok(())
    }

    /// Takes an answer about an inode that a name led to. `false`: it was asked for after the last own operation on
    /// the directory, and something was done to the inode since.
    fn learn(&self, session: &'static Session<H>, reply: InodeReply, after: Sequence) -> bool {
        session.remember_proof(reply.record.ino, reply.proof);
        let inode = self.inode(reply.record.ino);
        // Without its lock the answer is dropped; whoever holds it will ask again.
        let Some(mut state) = inode.state.try_write() else { return false };
        let ours = state.session == session.number;
        let last = if ours { state.last } else { Sequence(0) };
        let fresh = state.session <= session.number && session.known_after(last) <= after;
        if fresh {
            self.install(session, &mut state, reply, rpc::WANT_EARLY, after);
        }
        fresh
    }

    /// Asks for extents from `from` on, new enough for what the log no longer holds.
    fn fetch_extents(&self, session: &'static Session<H>, ino: InodeId, from: u64) -> Result<()> {
        let inode = self.inode(ino);
        let known = inode.state.read().pieces.turned;
        let _asking = inode.asking.write_unless(|| self.config.stops())?;
        let (lease, after) = {
            let state = inode.state.read();
            if state.pieces.turned != known {
                // Another thread has got a list meanwhile, which may be all that this one lacks.
                return Ok(());
            }
            if !self.reads(session, &state) {
                return Ok(());
            }
            let published = Sequence(session.segment.word(control::PUBLISHED));
            (state.lease, state.extents_after.max(state.last.min(published)))
        };
        let mut body = Vec::new();
        session.call(&Request::Extents { ino, from }, after, &mut body)?;
        let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
        let (reflected, complete, extents) = rpc::take_extents(&mut r).map_err(|_| Errno::IO)?;
        if reflected < after {
            return Err(Errno::IO);
        }
        let mut state = inode.state.write();
        // Another thread may have moved blocks since, or the lease is gone.
        let counts = self.reads(session, &state)
            && (state.lease == lease || planted(Bug::OldAnswerInstalled))
            && (state.extents_after <= reflected || planted(Bug::OldExtents));
        if counts {
            state.pieces.install(from, &extents, complete, reflected);
            if state.pieces.will_move() {
                // Something written since will give the file other blocks.
                let last = state.last;
                state.moved(last);
            }
        }
        Ok(())
    }

    /// Whether extents of a file that are asked for now are of use: all of them, or those of the bytes that it has.
    fn reads(&self, session: &Session<H>, state: &State) -> bool {
        self.held(session, state, LeaseMode::Read)
            || state.shares() && self.held(session, state, LeaseMode::Joint)
    }

    /// Asks for inode numbers.
    fn fetch_numbers(&self, session: &'static Session<H>) -> Result<()> {
        let _fetching = session.fetching.write_unless(|| self.config.stops())?;
        if !session.fresh.read().is_empty() {
            return Ok(());
        }
        let count = self.config.limits.numbers;
        let mut body = Vec::new();
        session.call(&Request::Inodes { count }, Sequence(0), &mut body)?;
        let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
        let mut fresh = Vec::new();
        let mut take = || -> core::result::Result<(), storage::format::Corrupt> {
            for _ in 0..r.u32()?.min(count) {
                let ino = InodeId(r.u64()?);
                let (slot, word) = (r.u32()?, control::LeaseWord(r.u64()?));
                self.proofs.put(ino, Proof(r.u64()?));
                fresh.push((ino, Granted { slot, word }));
            }
            Ok(())
        };
        take().map_err(|_| Errno::IO)?;
        if fresh.is_empty() {
            return Err(Errno::NOSPC);
        }
        fresh.reverse();
        *session.fresh.write() = fresh;
        Ok(())
    }
}

/// Reads the answer to `Inode` and `Lookup`.
pub(crate) fn parse_inode(body: &[u8]) -> Result<InodeReply> {
    let (status, mut r) = rpc::reply_status(body).map_err(|_| Errno::IO)?;
    status?;
    InodeReply::decode(&mut r).map_err(|_| Errno::IO)
}

/// The order in which inodes' words and states are looked at again is the compiler's to keep.
#[inline]
pub(crate) fn then_look() {
    core::sync::atomic::fence(Ordering::Acquire);
}
