//! Bytes: open, read, write, truncate, allocate, fsync.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::hint::black_box;
use core::sync::atomic::Ordering;

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{self, Op, RawHeader, Stamp, mask, op};
use storage::format::rpc::{self, InodeRecord, Request};
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX, LANE_BYTES_MIN, PAYLOAD_MAX};

use super::host::Host;
use super::inode::{Inode, Queued, State};
use super::log::{Filled, Lack, Place};
use super::permission::{R, W, may};
use super::pieces::{Piece, Seek, Source};
use super::ranges::WHOLE;
use super::session::Session;
use super::snapshot::is_in_one;
use super::turn::{Ask, Question, Step, Stop, Turn, Wait, then_look};
use super::verify::{Mapped, read_mapped};
use super::{LibFsOn, Open};
use crate::fs::{
    Caller, Handle, O_ACCMODE, O_APPEND, O_DIRECTORY, O_DSYNC, O_RDONLY, O_TRUNC, O_WRONLY, Result,
    S_IFDIR, S_IFMT, S_IFREG, Whence, Written, falloc,
};

/// How bytes are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// At an offset.
    Call,
    /// At the end.
    Appends,
    /// From a shared mapping: no privileges end.
    Mapping,
}

/// Bytes of an entry that is copied with nothing locked whoever else has the file open.
const ASIDE_MIN: usize = 16 << 10;

/// So often a read is begun anew because of what others write before it keeps them out.
const DISTURBED_MAX: u8 = 3;

/// Pieces of a read that are copied with nothing locked.
const PLAN: usize = 8;

/// Where the bytes of a read lie.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    sources: [Source; PLAN],
    count: usize,
    /// Bytes of all of them.
    len: u64,
    /// Some of them lie in an arena.
    public: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self { sources: [Source::Unknown; PLAN], count: 0, len: 0, public: false }
    }
}

/// What a plan was made of, beside what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    version: u64,
    lease: rpc::Granted,
    learnt: u64,
    turned: u64,
}

impl Known {
    fn of(state: &State, version: u64) -> Self {
        let (lease, learnt, turned) = (state.lease, state.learnt, state.pieces.turned);
        Self { version, lease, learnt, turned }
    }
}

impl<H: Host> LibFsOn<H> {
    pub(crate) fn do_open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        let inode = self.inode(ino);
        let mut want = 0;
        let access = flags & O_ACCMODE;
        if access != O_WRONLY {
            want |= R;
        }
        if access != O_RDONLY || flags & O_TRUNC != 0 {
            want |= W;
        }
        self.open_inode(caller, &inode, want)?;
        if flags & O_TRUNC != 0
            && let Err(e) = self.truncate(&inode, 0, None)
        {
            self.close_inode(&inode);
            return Err(e);
        }
        Ok(self.open_handle(inode, flags))
    }

    /// Checks permission, and counts the inode as open; then pins it. In this order: another thread's close or
    /// unlink in between finds it open, and leaves the pin.
    fn open_inode(&self, caller: &Caller<'_>, inode: &Arc<Inode<H>>, want: u32) -> Result<()> {
        let mut counted = false;
        let opened = self.run(|turn| {
            let mut state = inode.state.write();
            self.hold(turn, inode.ino, &mut state, LeaseMode::Read, 0)?;
            match state.record.mode & crate::fs::S_IFMT {
                S_IFREG => {}
                S_IFDIR => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::NXIO.into()),
            }
            let asked = if planted(Bug::OpenUnchecked) { want & R } else { want };
            may(caller, &state.record, asked)?;
            if !counted && !planted(Bug::PinBeforeCount) {
                state.open += 1;
                counted = true;
            }
            let mut flags = if state.pinned { 0 } else { rpc::WANT_PIN };
            // What is allowed now outlives any change of the mode, and of the owner: the service notes it. The
            // super-user needs no right as long as the session is his; the next one may be somebody else's.
            let noted = |state: &State| state.record.uid == H::euid() && planted(Bug::OwnerTrusted);
            let asks = !(H::euid() == 0 && turn.session.is_super_user()) || flags != 0;
            if want & R != 0 && !state.may_read && asks {
                flags |= rpc::WANT_READ;
            }
            if want & W != 0 && !state.may_write && asks && !noted(&state) {
                flags |= rpc::WANT_WRITE;
            }
            // A nameless inode is there for as long as somebody has it open, and its descriptor may
            // have come to us by fork, exec or a message. Once the service has noted our pin it
            // stays; if it has gone before, the service says so.
            self.hold(turn, inode.ino, &mut state, LeaseMode::Read, flags)?;
            if !counted {
                state.open += 1;
            }
            if state.open > 1 && self.config.limits.aside {
                state.spread();
                inode.opened_twice.store(true, Ordering::Relaxed);
            }
            Ok(())
        });
        if opened.is_err() && counted {
            self.close_inode(inode);
        }
        opened
    }

    /// Counts a directory as open, and pins it, in this order as above. What was closed a moment ago, of which the
    /// service has not heard yet, is pinned still: then nothing is asked of it.
    pub(crate) fn do_open_dir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        want: u32,
    ) -> Result<Handle> {
        let inode = self.inode(ino);
        let mut counted = false;
        let opened = self.run(|turn| {
            let mut state = inode.state.write();
            if !counted {
                state.open += 1;
                counted = true;
            }
            let held = self.held(turn.session, &state, LeaseMode::Read);
            if !state.pinned && held && turn.session.segment.take_closed(ino) {
                state.pinned = true;
            }
            let pinned = state.pinned || planted(Bug::DirectoryUnpinned);
            let flags = if pinned { 0 } else { rpc::WANT_PIN };
            self.hold(turn, ino, &mut state, LeaseMode::Read, flags)?;
            if state.record.mode & S_IFMT != S_IFDIR {
                return Err(Errno::NOTDIR.into());
            }
            Ok(may(caller, &state.record, want)?)
        });
        match opened {
            Ok(()) => Ok(self.open_handle(inode, O_DIRECTORY)),
            Err(e) => {
                if counted {
                    self.close_inode(&inode);
                }
                Err(e)
            }
        }
    }

    pub(crate) fn do_release(&self, handle: Handle) {
        if let Some(open) = self.close_handle(handle) {
            self.discharge(&open);
            self.close_inode(&open.inode);
        }
    }

    /// One less has it open.
    pub(crate) fn close_inode(&self, inode: &Inode<H>) {
        let mut state = inode.state.write();
        state.open = state.open.saturating_sub(1);
        if state.open == 1 {
            inode.opened_twice.store(false, Ordering::Relaxed);
        }
        if state.open == 0 && state.pinned {
            state.pinned = false;
            // With the pin go the rights.
            (state.may_read, state.may_write) = (false, false);
            // Under the lock: who opens it again pins it again, after this.
            let Some(session) = self.current() else { return };
            // Without a lease others may have removed it, and it stays until we say that we are done.
            let held = || self.held(session, &state, LeaseMode::Read);
            let said = state.record.nlink > 0
                && held()
                && session.segment.put_closed(inode.ino, self.config.limits.closed)
                // The service may have looked before.
                && (held() || !session.segment.take_closed(inode.ino));
            if !said {
                self.unpin(session, inode.ino);
            }
        }
    }

    pub(crate) fn do_read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let open = self.handle(handle)?;
        if open.flags & O_ACCMODE == O_WRONLY {
            return Err(Errno::BADF);
        }
        if is_in_one(open.inode.ino) {
            return self.snapshot_read(&open, offset, buf);
        }
        let mut done = 0;
        while done < buf.len() {
            let end = buf.len().min(done + self.config.limits.read_piece);
            let n = self.read_piece(&open, offset + done as u64, &mut buf[done..end])?;
            done += n;
            if n == 0 {
                break;
            }
        }
        Ok(done)
    }

    fn read_piece(&self, open: &Open<H>, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let inode = &open.inode;
        self.run(|turn| {
            let session = turn.session;
            let shared = self.config.limits.aside && inode.is_shared();
            let state = inode.state.read_by(Self::reader(open));
            let end = offset.saturating_add(buf.len() as u64).min(state.record.size);
            let bytes = offset.min(end)..end;
            let own = || self.has_bytes(session, &state, &bytes);
            if !self.held(session, &state, LeaseMode::Read) && !own() {
                turn.refused(inode.ino)?;
                let ino = inode.ino;
                if state.shared && self.config.limits.ranges && !bytes.is_empty() && state.pinned {
                    // Beside others who have others.
                    return Err(Stop::Wait(Wait::Bytes { ino, from: bytes.start, to: bytes.end }));
                }
                let mode = LeaseMode::Read;
                return Err(Stop::Wait(Wait::Lease { ino, mode, flags: 0 }));
            }
            if shared
                && !turn.together
                && let Some(plan) = self.plan(session, open, &state, offset, buf.len())?
            {
                let known = Known::of(&state, inode.state.version());
                drop(state);
                return self.copy_aside(turn, open, &plan, known, offset, buf);
            }
            let copied = self.copy_out(turn, open, &state, offset, buf);
            // The copy counts only if the lease still holds after it.
            then_look();
            let held = self.held(session, &state, LeaseMode::Read) || own();
            if held && session.segment.in_time() || planted(Bug::ReadUnchecked) {
                return copied;
            }
            Err(Stop::Wait(Wait::Again))
        })
    }

    /// By what a reader counts itself: its open file, or, where threads share one, also its thread.
    #[inline]
    fn reader(open: &Open<H>) -> u64 {
        let alone = open.inode.opened_twice.load(Ordering::Relaxed);
        open.number.wrapping_add(if alone { 0 } else { H::thread() as u64 })
    }

    /// Where `len` bytes lie, in a file whose state is locked and leased. None: in more pieces than a plan has.
    #[inline(never)]
    fn plan(
        &self,
        session: &Session<H>,
        open: &Open<H>,
        state: &State,
        offset: u64,
        len: usize,
    ) -> Step<Option<Plan>, H> {
        let mut plan = Plan::default();
        let len = (len as u64).min(state.record.size.saturating_sub(offset));
        while plan.len < len {
            let at = offset + plan.len;
            let Some(next) = plan.sources.get_mut(plan.count) else { return Ok(None) };
            let intact = |place: &Place| session.is_intact(place) || planted(Bug::FrontierIgnored);
            let source = state.pieces.find(at, len - plan.len, intact);
            plan.len += match source {
                Source::Hole(n) => n,
                Source::Log(piece) => piece.len,
                Source::Arena { len, .. } => {
                    plan.public = true;
                    len
                }
                Source::Unknown => {
                    let (ino, from) = (open.inode.ino, state.pieces.asks_from(offset, at));
                    return Err(Stop::Wait(Wait::Extents { ino, from }));
                }
            };
            *next = source;
            plan.count += 1;
        }
        Ok(Some(plan))
    }

    /// Copies bytes with nothing locked. What lies in the log stays as it is, and what lies in an arena as long as this
    /// process writes nothing there (nor others, under a lease of their own): so the bytes are those of the moment at which
    /// they were found, or it is begun anew.
    #[inline(never)]
    fn copy_aside(
        &self,
        turn: &mut Turn<H>,
        open: &Open<H>,
        plan: &Plan,
        known: Known,
        offset: u64,
        buf: &mut [u8],
    ) -> Step<usize, H> {
        let session = turn.session;
        let again = || Err(Stop::Wait(Wait::Again));
        let mut done = 0;
        for source in &plan.sources[..plan.count] {
            let to = &mut buf[done..];
            done += match *source {
                Source::Hole(n) => {
                    to[..n as usize].fill(0);
                    n as usize
                }
                Source::Log(Piece { len, place }) => {
                    let to = &mut to[..len as usize];
                    let copied = session.log.read(&session.segment.memory, &place, to);
                    if !copied || !session.is_intact(&place) && !planted(Bug::FrontierIgnored) {
                        return again();
                    }
                    len as usize
                }
                Source::Arena { arena, offset, len } => {
                    let to = &mut to[..len as usize];
                    match self.read_arena(session, open, (arena, offset), to) {
                        Some(Some(Mapped::Read)) => {}
                        // This process may not map it, it is not as long, or not as it should be.
                        Some(_) => {
                            turn.together = true;
                            return again();
                        }
                        None => return Err(Stop::Wait(Wait::Arena(arena))),
                    }
                    len as usize
                }
                Source::Unknown => return again(),
            };
        }
        then_look();
        let inode = &open.inode;
        if plan.public && inode.state.version() != known.version && !planted(Bug::CopyUnchecked) {
            let state = inode.state.read_by(Self::reader(open));
            let same = Known::of(&state, known.version);
            let same = same == known || planted(Bug::CopyComesBack);
            let len = buf.len();
            if !same || self.plan(session, open, &state, offset, len)?.as_ref() != Some(plan) {
                // Beside somebody who changes it all the time it is read with the state locked.
                turn.disturbed += 1;
                turn.together |= turn.disturbed >= DISTURBED_MAX && !planted(Bug::ReadDisturbed);
                return again();
            }
        }
        let holds = session.segment.lease_holds(known.lease.slot, known.lease.word)
            && session.segment.in_time();
        if !holds && !planted(Bug::ReadUnchecked) {
            return again();
        }
        Ok(done)
    }

    /// Copies bytes out of an arena, if it is known (None: it is to be asked for), and this process may map it.
    #[inline]
    fn read_arena(
        &self,
        session: &Session<H>,
        open: &Open<H>,
        (arena, offset): (u32, u64),
        to: &mut [u8],
    ) -> Option<Option<Mapped>> {
        session.with_arena(Self::reader(open), arena, |known| {
            let verified = self.config.verify.now(arena, offset, H::monotonic);
            let bytes = session.segment.arena_bytes();
            known
                .map(|map| map.as_ref().map(|map| read_mapped(&**map, bytes, offset, to, verified)))
        })
    }

    /// Copies bytes of a file whose state is locked and leased.
    fn copy_out(
        &self,
        turn: &mut Turn<H>,
        open: &Open<H>,
        state: &State,
        offset: u64,
        buf: &mut [u8],
    ) -> Step<usize, H> {
        let (session, ino) = (turn.session, open.inode.ino);
        let extents =
            |at| Err(Stop::Wait(Wait::Extents { ino, from: state.pieces.asks_from(offset, at) }));
        let size = state.record.size;
        let len = (buf.len() as u64).min(size.saturating_sub(offset)) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let intact = |place: &Place| session.is_intact(place) || planted(Bug::FrontierIgnored);
            match state.pieces.find(at, (len - done) as u64, intact) {
                Source::Hole(n) => {
                    let n = n as usize;
                    buf[done..done + n].fill(0);
                    done += n;
                }
                Source::Log(piece) => {
                    let n = piece.len as usize;
                    let (place, to) = (piece.place, &mut buf[done..done + n]);
                    let copied = session.log.read(&session.segment.memory, &place, to);
                    if !copied || !intact(&place) {
                        return extents(at);
                    }
                    done += n;
                }
                Source::Arena { arena, offset, len: n } => {
                    let n = n as usize;
                    let to = &mut buf[done..done + n];
                    match self.read_arena(session, open, (arena, offset), to) {
                        Some(Some(Mapped::Read)) => {}
                        Some(Some(Mapped::Short)) => return extents(at),
                        Some(None | Some(Mapped::Wrong)) if done == 0 => {
                            let len = n.min(self.config.limits.remote_read) as u32;
                            let what = Ask::Bytes { ino, offset: at, len };
                            let (after, lease, exact) = (state.last, state.lease, false);
                            let (bytes, _) = turn.ask(Question { what, after, lease, exact })?;
                            let n = bytes.len().min(n);
                            buf[..n].copy_from_slice(&bytes[..n]);
                            return Ok(n);
                        }
                        Some(_) => return Ok(done),
                        None => return Err(Stop::Wait(Wait::Arena(arena))),
                    }
                    done += n;
                }
                Source::Unknown => return extents(at),
            }
        }
        Ok(done)
    }

    pub(crate) fn do_write(
        &self,
        handle: Handle,
        offset: u64,
        data: &[u8],
        append: bool,
    ) -> Result<Written> {
        let open = self.handle(handle)?;
        let how = if append || open.flags & O_APPEND != 0 { How::Appends } else { How::Call };
        self.write_open(&open, offset, data, how)
    }

    pub(crate) fn do_write_back(
        &self,
        handle: Handle,
        offset: u64,
        data: &[u8],
    ) -> Result<Written> {
        self.write_open(&*self.handle(handle)?, offset, data, How::Mapping)
    }

    fn write_open(&self, open: &Open<H>, offset: u64, data: &[u8], how: How) -> Result<Written> {
        if open.flags & O_ACCMODE == O_RDONLY {
            return Err(Errno::BADF);
        }
        self.report_refusal(open)?;
        let (written, promised) = self.write_inode(open, offset, data, how)?;
        if !promised && !planted(Bug::JudgementUnawaited) {
            self.await_judgement(open)?;
        }
        if open.flags & O_DSYNC != 0 {
            self.sync_open(open)?;
        }
        Ok(written)
    }

    /// Waits until the service has judged what was done to the file: a write for which no space was set aside.
    #[cold]
    fn await_judgement(&self, open: &Open<H>) -> Result<()> {
        let Some(session) = self.current() else { return Ok(()) };
        let (last, number) = {
            let state = open.inode.state.read();
            (state.last, state.session)
        };
        let judged = || session.segment.word(control::SETTLED) >= last.0;
        if number != session.number || judged() {
            return self.report_refusal(open);
        }
        match session.call(&Request::StatFs, last, &mut Vec::new()) {
            Ok(()) => self.report_refusal(open),
            // Told while the session ended.
            Err(_) if session.segment.word(control::REFUSED_SEQ) == last.0 => {
                Err(session.refusal())
            }
            // The session has ended, or the caller shall wait no longer: the write is done, and fsync says what
            // became of it.
            Err(_) => Ok(()),
        }
    }

    /// fsync: everything done to the file is on every member, or an error says what was refused.
    pub(crate) fn sync_open(&self, open: &Open<H>) -> Result<()> {
        let (last, number) = {
            let state = open.inode.state.read();
            (state.last.0, state.session)
        };
        self.sync_inode(&open.inode, Some(open))?;
        self.report_refusal(open)?;
        if let Some(session) = self.current().filter(|session| session.number == number) {
            open.clean.store(session.mark(last), Ordering::Relaxed);
        }
        Ok(())
    }

    /// An operation counts once the service has judged it, which may be after the call that made
    /// it: a volume that runs full refuses it then. The next write or fsync through each handle of
    /// a file that has operations since its last fsync says so, once, as the kernel reports errors
    /// of write-back. (Which file was meant is not known: none that may have lost something is
    /// left out, but those of which all was judged before, or done afterwards.)
    #[inline]
    pub(crate) fn report_refusal(&self, open: &Open<H>) -> Result<()> {
        match self.current() {
            Some(session) if Self::has_news(session, open) => self.refused(session, open),
            _ => Ok(()),
        }
    }

    #[inline]
    fn has_news(session: &Session<H>, open: &Open<H>) -> bool {
        session.mark(session.refusals()) != open.refusals.load(Ordering::Relaxed)
    }

    #[cold]
    fn refused(&self, session: &Session<H>, open: &Open<H>) -> Result<()> {
        let Some((last, errno)) = Self::news(session, open) else { return Ok(()) };
        self.unkeep(open);
        // This error is for all up to there, also for what is judged only now.
        open.clean.store(session.mark(last), Ordering::Relaxed);
        // What is cached here may show what never was. The answer is not taken if another thread has done something to the inode
        // meanwhile (replaced its name): whoever looks next asks anew.
        let settled = self.settle(&open.inode).is_ok();
        let mut state = open.inode.state.write();
        if !settled || state.last.0 > last {
            state.lease = rpc::Granted::default();
        }
        Err(errno)
    }

    /// A refusal that this handle has not reported: the last own operation, and the error.
    fn news(session: &Session<H>, open: &Open<H>) -> Option<(u64, Errno)> {
        let count = session.refusals();
        // What was there in an earlier session does not count in this one; what that lost is reported otherwise.
        let before = session.marked(open.refusals.swap(session.mark(count), Ordering::Relaxed));
        let (last, number, (suspect, until)) = {
            let state = open.inode.state.read();
            (state.last, state.session, state.suspects.as_of(session, state.last, count))
        };
        let clean = session.marked(open.clean.load(Ordering::Relaxed));
        let clean = clean.max(session.judged_after(before));
        let new = number == session.number && until > before && suspect > clean;
        new.then(|| (last.0, session.refusal()))
    }

    /// As [`report_refusal`](Self::report_refusal), at a close: asks the service for nothing.
    pub(crate) fn report_refusal_now(&self, open: &Open<H>) -> Result<()> {
        let Some(session) = self.current() else { return Ok(()) };
        if !Self::has_news(session, open) || open.flags & O_ACCMODE == O_RDONLY {
            return Ok(());
        }
        let Some((last, errno)) = Self::news(session, open) else { return Ok(()) };
        self.unkeep(open);
        // What is cached here may show what never was: whoever looks next asks anew.
        open.inode.state.write().lease = rpc::Granted::default();
        open.clean.store(session.mark(last), Ordering::Relaxed);
        Err(errno)
    }

    fn write_inode(
        &self,
        open: &Open<H>,
        offset: u64,
        data: &[u8],
        how: How,
    ) -> Result<(Written, bool)> {
        let limits = &self.config.limits;
        let append = how == How::Appends;
        let piece = if append { limits.append_piece } else { limits.write_piece };
        let piece = piece.min(PAYLOAD_MAX);
        // Nobody of this process changes these bytes between the entries of one call.
        let range = if append { WHOLE } else { offset..offset.saturating_add(data.len() as u64) };
        let mut long = match data.len() > piece {
            true => Some(Queued::new(&open.inode, range)),
            false => None,
        };
        if let Some(long) = &long {
            long.wait(|| self.config.stops())?;
        }
        let (mut done, mut first, mut next) = (0, None, offset);
        let mut promised = true;
        loop {
            let part = &data[done..data.len().min(done + piece)];
            let mut fits = 0;
            let wrote = self.run(|turn| {
                let before = (append && planted(Bug::SizeOfBefore))
                    .then(|| open.inode.state.read().record.size);
                // Copied before anything is locked that others wait for.
                let filled = if !turn.together && self.goes_aside(open, part) {
                    Some(self.fill(turn, open, part)?)
                } else {
                    None
                };
                let mut state = open.inode.state.write();
                if self.config.limits.aside && open.inode.state.is_contended() {
                    state.spread();
                }
                let bytes = next..next.saturating_add(part.len() as u64);
                let may_share = how == How::Call
                    && open.flags & O_DSYNC == 0
                    && !Self::has_privileges(&state)
                    && !self.clears_setid(&state);
                self.hold_bytes(turn, open.inode.ino, &mut state, &bytes, may_share)?;
                // Others may have appended since the last entry, where a lease was lost in between.
                let goes_on = first.is_some() && planted(Bug::AppendGoesOn);
                let size = before.unwrap_or(state.record.size);
                let at = if append && !goes_on { size } else { next };
                if long.is_none() {
                    self.may_write(turn, open, &state, at, part.len(), append)?;
                }
                // At the largest file's end, what fits is written.
                let room = FILE_SIZE_MAX.saturating_sub(at);
                if at > FILE_SIZE_MAX || room == 0 && !part.is_empty() {
                    return Err(Errno::FBIG.into());
                }
                fits = part.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                let filled = filled.filter(|_| fits == part.len());
                if fits > 0 {
                    let part = &part[..fits];
                    promised &=
                        self.write_piece(turn, open, &mut state, (at, part), how, filled)?;
                }
                Ok(at)
            });
            let at = match wrote {
                Ok(at) => at,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            };
            if planted(Bug::TicketLeftEarly) {
                long = None;
            }
            first.get_or_insert(at);
            next = at + fits as u64;
            done += fits;
            if done >= data.len() || fits < part.len() {
                break;
            }
        }
        Ok((Written { len: done, offset: first.unwrap_or(offset) }, promised))
    }

    /// Nobody is in the middle of a change of these bytes.
    #[inline]
    fn may_write(
        &self,
        turn: &Turn<H>,
        open: &Open<H>,
        state: &State,
        at: u64,
        len: usize,
        append: bool,
    ) -> Step<(), H> {
        let range = at..at.saturating_add(len as u64);
        match self.may_change(turn, &open.inode, state, &range) {
            // Where the end will be when it is its turn is not known yet.
            Err(Stop::Wait(Wait::Range(inode, _))) if append => {
                Err(Stop::Wait(Wait::Range(inode, WHOLE)))
            }
            other => other,
        }
    }

    /// Whether the bytes of an entry are copied with nothing locked. Of a file that nobody else here has open nobody
    /// waits for the lock, and to take it first is cheaper: what is locked after the copy waits for its stores. Of a long
    /// entry that is little.
    #[inline]
    fn goes_aside(&self, open: &Open<H>, part: &[u8]) -> bool {
        let shared = open.inode.is_shared() || part.len() >= ASIDE_MIN;
        if !shared {
            // Memory of the caller's that is not there yet is fetched now, before anybody waits.
            let pages = part.iter().step_by(BLOCK_BYTES as usize).chain(part.last());
            pages.for_each(|byte| {
                black_box(*byte);
            });
        }
        shared && self.config.limits.aside && !part.is_empty()
    }

    /// Puts the bytes of an entry into the lane of an open file, or another one that is free, with nothing else locked.
    #[inline(never)]
    fn fill(
        &self,
        turn: &mut Turn<H>,
        open: &Open<H>,
        piece: &[u8],
    ) -> Step<Filled<'static, H>, H> {
        let session = turn.session;
        let (log, memory) = (&session.log, &session.segment.memory);
        let lane = self.lane(open, session);
        let own = if planted(Bug::OwnLaneAwaited) { None } else { turn.lane.take() };
        let room = match own {
            // Waited for by an earlier attempt: to wait for it, or for another one, beside it would be for ever.
            Some(lent) => log.room_in(memory, lent, piece.len()),
            None => match log.try_room(memory, lane, piece.len()) {
                Err(Lack::Busy(lane)) => log.room(memory, lane, piece.len()),
                Err(Lack::Full(full)) => Err(full),
                Ok(room) => Ok(room),
            },
        };
        Ok(room.map_err(|full| Stop::Wait(Wait::Space(full)))?.put(piece))
    }

    /// Appends one entry, whose bytes are in a lane or still to be put there; says whether there is space for it in any
    /// case.
    fn write_piece(
        &self,
        turn: &mut Turn<H>,
        open: &Open<H>,
        state: &mut State,
        (at, piece): (u64, &[u8]),
        how: How,
        filled: Option<Filled<'static, H>>,
    ) -> Step<bool, H> {
        let session = turn.session;
        let ino = open.inode.ino;
        if state.pieces.log_pieces() > self.config.limits.log_pieces && !turn.trimmed {
            turn.trimmed = true;
            let published = Sequence(session.segment.word(control::PUBLISHED));
            if let Some(from) = state.pieces.first_until(published) {
                // What is public by now needs no log.
                return Err(Stop::Wait(Wait::Extents { ino, from }));
            }
        }
        if how != How::Mapping && Self::has_privileges(state) {
            if filled.is_some() {
                // What ends them is entries of their own, before this one.
                turn.together = true;
                return Err(Stop::Wait(Wait::Again));
            }
            self.end_some_privileges(turn, ino, state, true)?;
        }
        let clear = self.clears_setid(state);
        let now = Self::now(&[&state.record]);
        let len = piece.len() as u64;
        let (room, blocks) = (state.has_room(), state.lacks_room(at, len));
        let promised = session.promise(blocks);
        let raw = RawHeader {
            op: op::WRITE,
            inode: ino.0,
            a: at,
            b: if promised { blocks } else { 0 },
            flags: if clear { entry::CLEAR_SETID } else { 0 },
            time: now,
            ..RawHeader::default()
        };
        let written = match filled {
            Some(filled) => self.commit_entry(turn, &[state], || filled.commit(raw)),
            None => {
                let lane = self.lane(open, session);
                self.write_entry(turn, lane.into(), &[state], raw, piece)
            }
        };
        let written = match written {
            Ok(written) => written,
            Err(stop) => {
                if promised {
                    session.promise_less(blocks);
                }
                return Err(stop);
            }
        };
        let place = written.place;
        if !state.pieces.wrote(at, len, place) || at + len > state.record.size {
            let first = at / BLOCK_BYTES;
            let begin = state.record.size.div_ceil(BLOCK_BYTES).max(first);
            let blocks = (at + len).div_ceil(BLOCK_BYTES).saturating_sub(begin);
            // What goes on in the last block adds none, if that block is there.
            let goes_on = || at > 0 && at == state.record.size && state.pieces.has(at - 1);
            let guessed = first < begin && !goes_on() || !Self::is_within(state);
            state.blocks_guessed |= guessed;
            state.record.blocks += blocks * (BLOCK_BYTES / 512);
        }
        state.record.size = state.record.size.max(at + len);
        if state.pieces.moves(at, at + len) {
            state.moved(place.sequence);
        }
        self.touched(state, place.sequence, now, clear);
        if promised {
            state.promised(at, len, room);
        }
        written.persist();
        session.segment.ring(false);
        Ok(promised)
    }

    /// Whether the file can have no blocks behind its end, by their number.
    fn is_within(state: &State) -> bool {
        let most = state.record.size.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
        state.record.blocks <= most
    }

    /// Before content changes: set-id bits and capabilities end, as far as the writer may not keep them.
    /// `clears`: the operation itself clears what [`clears_setid`](Self::clears_setid) says.
    #[inline]
    pub(crate) fn end_privileges(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &mut State,
        clears: bool,
    ) -> Step<(), H> {
        if Self::has_privileges(state) {
            self.end_some_privileges(turn, ino, state, clears)?;
        }
        Ok(())
    }

    /// Whether it may have some.
    #[inline]
    fn has_privileges(state: &State) -> bool {
        state.record.mode & 0o6000 != 0 || state.record.xattrs && !state.no_capability
    }

    #[cold]
    fn end_some_privileges(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &mut State,
        clears: bool,
    ) -> Step<(), H> {
        self.end_capability(turn, ino, state)?;
        let mode = state.record.mode & 0o7777;
        let mut ends = 0;
        if H::euid() != 0 {
            // Set-group-ID without execution for the group stays with its members.
            let group = mode & 0o2000 != 0 && (mode & 0o10 != 0 || !H::is_member(state.record.gid));
            ends = mode & 0o4000 | if group { 0o2000 } else { 0 };
        }
        if clears && self.clears_setid(state) {
            ends &= !(0o4000 | if mode & 0o10 != 0 { 0o2000 } else { 0 });
        }
        if ends == 0 {
            return Ok(());
        }
        let now = Self::now(&[&state.record]);
        let (mask, mode, none) = (mask::MODE, mode & !ends, Stamp::default());
        let op = Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: none, mtime: none };
        state.last = self.log(turn, ino.0, &[state], &op, now)?.sequence;
        state.record.mode &= !ends;
        state.ended_setid = true;
        Ok(())
    }

    /// The file's capabilities end, whoever changes it. A directory keeps what it may have of them.
    pub(crate) fn end_capability(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &mut State,
    ) -> Step<(), H> {
        let is_dir = state.record.mode & S_IFMT == S_IFDIR;
        if is_dir || !state.record.xattrs || state.no_capability {
            return Ok(());
        }
        let name = storage::limits::CAPABILITY;
        // An empty value, which anybody may set, gives none, and stays: Linux asks for the length.
        if self.xattr_of(turn, ino, state, name)?.is_some_and(|value| !value.is_empty()) {
            let now = Self::now(&[&state.record]);
            let op = Op::RemoveXattr { ino, name };
            state.last = self.log(turn, ino.0, &[state], &op, now)?.sequence;
        }
        state.no_capability = true;
        Ok(())
    }

    /// Whether the file has set-id bits that a write ends.
    pub(crate) fn has_setid(&self, state: &State) -> bool {
        let mode = state.record.mode;
        (mode & 0o4000 != 0 || mode & 0o2010 == 0o2010) && H::euid() != 0
    }

    /// Whether a write says that it ends them.
    fn clears_setid(&self, state: &State) -> bool {
        let ended = state.ended_setid && !planted(Bug::EndedSetidTrusted);
        self.has_setid(state) || ended && H::euid() != 0
    }

    /// Content changed by an own operation.
    pub(crate) fn touched(&self, state: &mut State, sequence: Sequence, now: u64, clear: bool) {
        state.last = sequence;
        state.record.mtime = Stamp::from_nanos(now);
        state.record.ctime = Stamp::from_nanos(now);
        if clear {
            let group = if state.record.mode & 0o10 != 0 { 0o2000 } else { 0 };
            state.record.mode &= !(0o4000 | group);
            state.ended_setid = true;
        }
    }

    /// Sets the size; the times change also when it was that before.
    /// `who` must be allowed to write at that moment; `None`: a handle allows it.
    pub(crate) fn truncate(
        &self,
        inode: &Arc<Inode<H>>,
        size: u64,
        who: Option<&Caller<'_>>,
    ) -> Result<()> {
        if size > FILE_SIZE_MAX {
            return Err(Errno::FBIG);
        }
        self.run(|turn| {
            let mut state = inode.state.write();
            self.may_change(turn, inode, &state, &WHOLE)?;
            self.hold(turn, inode.ino, &mut state, LeaseMode::Write, 0)?;
            if let Some(who) = who.filter(|_| !planted(Bug::TruncatedUnasked)) {
                // The mode may have changed since it was looked at.
                may(who, &state.record, W)?;
            }
            self.end_privileges(turn, inode.ino, &mut state, true)?;
            let clear = self.clears_setid(&state);
            let now = Self::now(&[&state.record]);
            let op = Op::Truncate { ino: inode.ino, size, clear_setid: clear };
            let place = self.log(turn, inode.ino.0, &[&state], &op, now)?;
            // Exact where every block was there; and what was reserved behind the end is gone.
            let most = |size: u64| size.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
            state.blocks_guessed |= state.record.blocks != most(state.record.size)
                && (size < state.record.size || !Self::is_within(&state));
            if size < state.record.size {
                let moves = state.pieces.moves(size, size.next_multiple_of(BLOCK_BYTES));
                state.pieces.zero(size, u64::MAX);
                if !planted(Bug::CutExtentsKept) {
                    state.extents_after = place.sequence;
                }
                if moves {
                    state.moved(place.sequence);
                }
                state.record.blocks = state.record.blocks.min(most(size));
            }
            if size == 0 {
                (state.record.blocks, state.blocks_guessed) = (0, false);
            }
            state.record.size = size;
            self.touched(&mut state, place.sequence, now, clear);
            Ok(())
        })
    }

    pub(crate) fn do_fallocate(
        &self,
        handle: Handle,
        mode: u32,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let open = self.handle(handle)?;
        if open.flags & O_ACCMODE == O_RDONLY {
            return Err(Errno::BADF);
        }
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let end = offset.checked_add(len).filter(|&e| e <= FILE_SIZE_MAX).ok_or(Errno::FBIG)?;
        let keep = mode & falloc::KEEP_SIZE != 0;
        let unshare = mode & falloc::UNSHARE_RANGE != 0;
        let zeroes = match mode & !falloc::KEEP_SIZE {
            0 | falloc::UNSHARE_RANGE => false,
            falloc::PUNCH_HOLE if keep => true,
            falloc::ZERO_RANGE => true,
            falloc::COLLAPSE_RANGE if !keep => return self.shift(&open, false, offset, len),
            falloc::INSERT_RANGE if !keep => return self.shift(&open, true, offset, len),
            _ => return Err(Errno::OPNOTSUPP),
        };
        self.report_refusal(&open)?;
        let (inode, mut before) = (&open.inode, self.refusals());
        let last = self.run(|turn| {
            let mut state = inode.state.write();
            self.may_change(turn, inode, &state, &WHOLE)?;
            self.hold(turn, inode.ino, &mut state, LeaseMode::Write, 0)?;
            self.end_privileges(turn, inode.ino, &mut state, false)?;
            let now = Self::now(&[&state.record]);
            let op = Op::Fallocate { ino: inode.ino, offset, len, mode: mode as u16 };
            Self::count_in(&mut before, turn.session);
            let lane = self.lane(&open, turn.session).into();
            let place = self.log(turn, lane, &[&state], &op, now)?;
            let moves = unshare || zeroes && state.pieces.moves(offset, end);
            if zeroes {
                state.pieces.zero(offset, end);
                state.extents_after = place.sequence;
            }
            if moves {
                state.moved(place.sequence);
            }
            if !keep {
                state.record.size = state.record.size.max(end);
            }
            self.touched(&mut state, place.sequence, now, false);
            Ok(place.sequence)
        })?;
        // Space is accounted by the service: learn its answer (and its refusal) now.
        self.settle_own(&open, before, (last, last))?;
        if let (Some(session), Some((number, count))) = (self.current(), before)
            && session.number == number
            && session.mark(count) == open.refusals.load(Ordering::Relaxed)
            // (Nor was anything refused of before, of which this call does not speak.)
            && (session.refusals() == count || planted(Bug::RefusedBetween))
        {
            // All that was done to the file is judged: what is refused from here on is not that.
            open.clean.store(session.mark(last.0), Ordering::Relaxed);
        }
        Ok(())
    }

    /// COLLAPSE_RANGE and INSERT_RANGE: the bytes behind move within the file.
    fn shift(&self, open: &Open<H>, insert: bool, offset: u64, len: u64) -> Result<()> {
        if !(offset | len).is_multiple_of(BLOCK_BYTES) {
            return Err(Errno::INVAL);
        }
        self.report_refusal(open)?;
        let (inode, mut before) = (&open.inode, self.refusals());
        let last = self.run(|turn| {
            let mut state = inode.state.write();
            self.may_change(turn, inode, &state, &WHOLE)?;
            self.hold(turn, inode.ino, &mut state, LeaseMode::Write, 0)?;
            let now = state.record.size;
            if (if insert { offset } else { offset + len }) >= now {
                return Err(Errno::INVAL.into());
            }
            let size = if insert { now + len } else { now - len };
            if size > FILE_SIZE_MAX {
                return Err(Errno::FBIG.into());
            }
            self.end_privileges(turn, inode.ino, &mut state, false)?;
            let now = Self::now(&[&state.record]);
            let op = Op::Shift { ino: inode.ino, offset, len, insert, size };
            Self::count_in(&mut before, turn.session);
            let lane = self.lane(open, turn.session).into();
            let place = self.log(turn, lane, &[&state], &op, now)?;
            state.pieces.forget();
            state.extents_after = place.sequence;
            state.record.size = size;
            self.touched(&mut state, place.sequence, now, false);
            Ok(place.sequence)
        })?;
        self.settle_own(open, before, (last, last))
    }

    /// Waits for the service's word on operations `own`, from one to another, of a call through a handle. That one of
    /// them was refused is said by the call; what else may have been, the next write or fsync says.
    pub(crate) fn settle_own(
        &self,
        open: &Open<H>,
        before: Option<(u64, u64)>,
        (first, last): (Sequence, Sequence),
    ) -> Result<()> {
        let settled = self.settle_but(&open.inode, before, (first, last));
        if settled.is_err()
            && let (Some(session), Some((number, count))) = (self.current(), before)
            && session.number == number
            && session.refusals() == count + 1
            // (Of the last refused; if it is not the only one any more, it is not one of these.)
            && (first.0..=last.0).contains(&session.segment.word(control::REFUSED_SEQ))
        {
            let told = (Ordering::Relaxed, Ordering::Relaxed);
            // Unless there was something before, which is still to be said. (Nothing was in this session, if this
            // handle was last told of something in an earlier one.)
            let (from, to) = (open.refusals.load(Ordering::Relaxed), session.mark(count + 1));
            if session.marked(from) == count {
                let _ = open.refusals.compare_exchange(from, to, told.0, told.1);
            }
        }
        settled
    }

    /// A call that may be refused does something now, in this session: what was refused before is counted there, if it was
    /// begun in an earlier one. Says whether it was.
    pub(crate) fn count_in(before: &mut Option<(u64, u64)>, session: &Session<H>) -> bool {
        let other = before.is_none_or(|(number, _)| number != session.number);
        if other {
            *before = Some((session.number, session.note_refusals()));
        }
        other
    }

    /// The service's proof of an inode.
    pub(crate) fn ask_proof(&self, ino: InodeId) -> Result<u64> {
        self.run(|turn| {
            turn.refused(ino)?;
            match turn.proof(ino) {
                Some(proof) => Ok(proof.0),
                None => Err(Stop::Wait(Wait::Renewal { ino })),
            }
        })
    }

    /// Waits until the service has judged what was done to the inode, and takes its numbers.
    pub(crate) fn settle(&self, inode: &Arc<Inode<H>>) -> Result<()> {
        self.settle_since(inode, self.refusals())
    }

    /// Session and number of refusals so far.
    pub(crate) fn refusals(&self) -> Option<(u64, u64)> {
        self.current().map(|session| (session.number, session.note_refusals()))
    }

    /// The same, where what counts are refusals since an earlier look at their number: the service
    /// may have been quick.
    pub(crate) fn settle_since(
        &self,
        inode: &Arc<Inode<H>>,
        before: Option<(u64, u64)>,
    ) -> Result<()> {
        self.settle_but(inode, before, (Sequence(0), Sequence(u64::MAX)))
    }

    /// The same, where only refusals of the operations `own` count: other threads are told of theirs.
    pub(crate) fn settle_but(
        &self,
        inode: &Arc<Inode<H>>,
        before: Option<(u64, u64)>,
        own: (Sequence, Sequence),
    ) -> Result<()> {
        let mut seen = before;
        self.run(|turn| {
            let session = turn.session;
            let before = seen.filter(|(number, _)| *number == session.number);
            let refusals = before.map_or_else(|| session.refusals(), |(_, count)| count);
            seen = Some((session.number, refusals));
            turn.refused(inode.ino)?;
            if turn.shown(inode.ino).is_none() {
                return Err(Stop::Wait(Wait::Renewal { ino: inode.ino }));
            }
            if session.refusals() == refusals || before.is_some() && session.others(refusals, own) {
                return Ok(());
            }
            // If another thread has done something to it since it was asked for, the answer was not taken.
            self.forget_done(&[inode.ino]);
            Err(session.refusal().into())
        })
    }

    pub(crate) fn do_lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.handle(handle)?;
        if is_in_one(open.inode.ino) {
            return self.snapshot_seek(&open, offset, whence);
        }
        let inode = &open.inode;
        self.run(|turn| {
            let session = turn.session;
            let mut state = inode.state.write();
            self.hold(turn, inode.ino, &mut state, LeaseMode::Read, 0)?;
            let size = state.record.size;
            if offset >= size {
                return Err(Errno::NXIO.into());
            }
            let intact = |place: &Place| session.is_intact(place);
            match state.pieces.seek(offset, size, whence, intact) {
                Seek::At(at) => Ok(at),
                Seek::None => Err(Errno::NXIO.into()),
                Seek::Unknown(from) => Err(Stop::Wait(Wait::Extents { ino: inode.ino, from })),
            }
        })
    }

    /// Lets the service begin what [`sync_own`](Self::sync_own) will wait for, if it is known without asking.
    pub(crate) fn begin_sync(&self, inode: &Inode<H>) {
        let Some(session) = self.current() else { return };
        let last = {
            let state = inode.state.read();
            (state.session == session.number).then_some(state.last)
        };
        if let Some(last) = last {
            session.begin_sync(last);
        }
    }

    /// Waits until all that was done to the inode is persistent everywhere. What this process did, and was lost with a session, is
    /// an error, once for each who has it open, and for each who waited for it.
    pub(crate) fn sync_inode(&self, inode: &Inode<H>, open: Option<&Open<H>>) -> Result<()> {
        // Whatever becomes of that: what was done here is waited for, and its loss told.
        let others = self.sync_others(inode);
        self.sync_own(inode, open).and(others)
    }

    /// The same for what this process has done to it.
    fn sync_own(&self, inode: &Inode<H>, open: Option<&Open<H>>) -> Result<()> {
        let mut waited = None;
        loop {
            let (session, last, losses) = self.to_sync(inode)?;
            let told = match open {
                Some(open) => open.losses.swap(losses, Ordering::Relaxed),
                None => core::mem::replace(&mut inode.state.write().told, losses),
            };
            let lost = told != losses || Self::lost_meanwhile(session, waited);
            if lost && !planted(Bug::LossUntold) {
                return Err(Errno::IO);
            }
            match session.sync(last) {
                // The session ended meanwhile: what that means is known in the next.
                Err(Errno::STALE) => waited = Some((session.number, last)),
                other => return other,
            }
        }
    }

    /// Sees to it that every member has what others had done to the inode when this began: a program may sync what another one has
    /// written (the checkpointer of a database does). Whoever has a lease knows that they have, if it was granted for that
    /// ([`State::vouches`]).
    fn sync_others(&self, inode: &Inode<H>) -> Result<()> {
        let known = |session| {
            let state = inode.state.read();
            state.vouches() && self.holds(session, &state, LeaseMode::Read)
        };
        if self.current().is_some_and(known) || planted(Bug::SyncOwnOnly) {
            return Ok(());
        }
        let synced = self.run(|turn| {
            turn.syncs = true;
            let mut state = inode.state.write();
            let is_file = |record: &InodeRecord| record.mode & S_IFMT == S_IFREG;
            match turn.shown(inode.ino).map(is_file) {
                // A lease was granted since this began, whether it still holds or not: what others had done is in the stream.
                Some(true) => {}
                // And on every member.
                Some(false) => return Ok(()),
                // Nobody gives its bytes back for that: what is in others' logs is read.
                None if state.shares() && self.held(turn.session, &state, LeaseMode::Joint) => {}
                None => {
                    self.hold(turn, inode.ino, &mut state, LeaseMode::Read, 0)?;
                    if state.vouches() || state.is_joint() && planted(Bug::SyncJointAlone) {
                        return Ok(());
                    }
                }
            }
            let (what, after, lease) = (Ask::Reach { ino: inode.ino }, Sequence(0), state.lease);
            let (_, same) = turn.ask(Question { what, after, lease, exact: false })?;
            if same && self.holds(turn.session, &state, LeaseMode::Read) {
                state.early = None;
            }
            Ok(())
        });
        match synced {
            // There is no such inode any more, or this process cannot show that a name has led it there.
            Err(Errno::NOENT | Errno::STALE | Errno::ACCES) => Ok(()),
            other => other,
        }
    }

    /// What there is to sync, and how much of the inode was lost so far.
    fn to_sync(&self, inode: &Inode<H>) -> Result<(&'static Session<H>, Sequence, u32)> {
        loop {
            let session = self.session()?;
            if session.unheard.load(Ordering::Relaxed) {
                self.hear_losses(session)?;
            }
            {
                let state = inode.state.read();
                if state.session == session.number || state.session == 0 {
                    return Ok((session, state.last, state.losses));
                }
            }
            // Or else another thread has attached anew between the two looks.
            self.adopt(session, &mut inode.state.write());
        }
    }

    /// Whether something of what was waited for in an earlier session is lost.
    fn lost_meanwhile(session: &Session<H>, waited: Option<(u64, Sequence)>) -> bool {
        waited.is_some_and(|(number, last)| session.lost_with(number, last))
    }

    /// The same for everything that this process did.
    pub(crate) fn sync_all(&self) -> Result<()> {
        let mut waited = None;
        loop {
            let session = self.session()?;
            let losses = self.losses.load(Ordering::Acquire);
            let told = self.losses_told.swap(losses, Ordering::Relaxed);
            if told != losses || Self::lost_meanwhile(session, waited) {
                return Err(Errno::IO);
            }
            let last = session.last();
            match session.sync(last) {
                Err(Errno::STALE) => waited = Some((session.number, last)),
                other => return other,
            }
        }
    }
}

/// The longest entry fits every lane, or a full one would never have room for it.
const _: () = assert!(LANE_BYTES_MIN >= 4 * PAYLOAD_MAX as u64);
