//! Bytes: open, read, write, truncate, allocate, fsync.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use base::{Errno, InodeId, Sequence};
use rustix::process::{getegid, geteuid, getgroups};
use storage::format::control::{self, LeaseMode};
use storage::format::entry::{self, Op, RawHeader, Stamp, mask, op};
use storage::format::rpc::{self, Request};
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX};

use super::inode::{Inode, State};
use super::names::logged;
use super::permission::{R, W, may};
use super::pieces::Source;
use super::session::Session;
use super::{LibFs, Open, Outcome};
use crate::fs::{
    Caller, Handle, O_ACCMODE, O_APPEND, O_DSYNC, O_RDONLY, O_TRUNC, O_WRONLY, Result, S_IFDIR,
    S_IFREG, Whence, Written, falloc,
};

/// Bytes of one log entry of a long write: small enough that an operation is short.
const WRITE_PIECE: usize = 256 * 1024;
/// Bytes copied between two looks at the lease.
const READ_PIECE: usize = 256 * 1024;
/// Pieces of log remembered per file before the extents are asked for again.
const LOG_PIECES_MAX: usize = 8192;
/// Bytes asked for at once where the arena may not be mapped.
const REMOTE_READ: usize = 56 * 1024;

/// What hinders a copy.
enum Need {
    Extents(u64),
    Arena(u32),
    Remote { offset: u64, len: usize },
}

impl LibFs {
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
            && let Err(e) = self.truncate(&inode, 0)
        {
            self.close_inode(&inode);
            return Err(e);
        }
        Ok(self.open_handle(inode, flags))
    }

    /// Checks permission, pins, and counts the inode as open: in one go, or another thread's close or
    /// unlink in between would take the pin away.
    fn open_inode(&self, caller: &Caller<'_>, inode: &Arc<Inode>, want: u32) -> Result<()> {
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Read, 0)?;
            match state.record.mode & crate::fs::S_IFMT {
                S_IFREG => {}
                S_IFDIR => return Err(Errno::ISDIR),
                _ => return Err(Errno::NXIO),
            }
            may(caller, &state.record, want)?;
            let mut flags = if state.pinned { 0 } else { rpc::WANT_PIN };
            if want & W != 0 && !state.may_write && !self.trusted(&state) {
                flags |= rpc::WANT_WRITE;
            }
            // A nameless inode is there for as long as somebody has it open, and its descriptor may
            // have come to us by fork, exec or a message. Once the service has noted our pin it
            // stays; if it has gone before, the service says so.
            self.ensure(session, inode.ino, &mut state, LeaseMode::Read, flags)?;
            state.open += 1;
            Ok(Outcome::Done(()))
        })
    }

    /// Whether the service lets this process write the inode without a recorded right.
    fn trusted(&self, state: &State) -> bool {
        let euid = rustix::process::geteuid().as_raw();
        euid == 0 || euid == state.record.uid
    }

    pub(crate) fn do_release(&self, handle: Handle) {
        if let Some(open) = self.close_handle(handle) {
            self.close_inode(&open.inode);
        }
    }

    /// One less has it open.
    pub(crate) fn close_inode(&self, inode: &Inode) {
        let mut state = inode.state.write();
        state.open = state.open.saturating_sub(1);
        if state.open == 0 && state.pinned {
            state.pinned = false;
            // Without a lease others may have removed it, and it stays until we say that we are done.
            let known = self.current().is_some_and(|s| self.holds(s, &state, LeaseMode::Read));
            let now = state.record.nlink == 0 || !known;
            // Under the lock: who opens it again pins it again, after this.
            self.unpin(inode.ino, now);
        }
    }

    pub(crate) fn do_read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let open = self.handle(handle)?;
        if open.flags & O_ACCMODE == O_WRONLY {
            return Err(Errno::BADF);
        }
        let mut done = 0;
        while done < buf.len() {
            let end = buf.len().min(done + READ_PIECE);
            let n = self.read_piece(&open.inode, offset + done as u64, &mut buf[done..end])?;
            done += n;
            if n == 0 {
                break;
            }
        }
        Ok(done)
    }

    fn read_piece(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut need = None;
        self.repeat(|session| {
            if need.is_none() {
                let state = inode.state.read();
                if self.held(session, &state, LeaseMode::Read) {
                    let copied = self.copy_out(session, &state, offset, buf);
                    // The copy counts only if the lease still holds after it.
                    core::sync::atomic::fence(Ordering::Acquire);
                    if !self.holds(session, &state, LeaseMode::Read) {
                        return Ok(Outcome::Again);
                    }
                    match copied {
                        Ok(n) => return Ok(Outcome::Done(n)),
                        Err(n) => need = Some(n),
                    }
                }
            }
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Read, 0)?;
            match need.take() {
                Some(Need::Extents(from)) => {
                    self.fetch_extents(session, inode.ino, &mut state, from)?;
                }
                Some(Need::Arena(arena)) => {
                    session.arena(&self.config, arena)?;
                }
                Some(Need::Remote { offset, len }) => {
                    let n =
                        self.read_remote(session, inode.ino, &state, offset, &mut buf[..len])?;
                    return Ok(Outcome::Done(n));
                }
                None => {}
            }
            Ok(Outcome::Again)
        })
    }

    fn read_remote(
        &self,
        session: &Session,
        ino: InodeId,
        state: &State,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize> {
        let len = buf.len().min(REMOTE_READ);
        let mut body = Vec::new();
        let request = Request::Read { ino, offset, len: len as u32 };
        session.call(&request, state.last, &mut body)?;
        let bytes = body.get(8..).unwrap_or(&[]);
        let n = bytes.len().min(len);
        buf[..n].copy_from_slice(&bytes[..n]);
        Ok(n)
    }

    /// Copies bytes of a file whose state is locked and leased.
    fn copy_out(
        &self,
        session: &Session,
        state: &State,
        offset: u64,
        buf: &mut [u8],
    ) -> core::result::Result<usize, Need> {
        let size = state.record.size;
        let len = (buf.len() as u64).min(size.saturating_sub(offset)) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let intact = |place: &super::lane::Place| {
                session.lane_at(place.lane).is_some_and(|l| l.intact(place.position))
            };
            match state.pieces.find(at, (len - done) as u64, intact) {
                Source::Hole(n) => {
                    let n = n as usize;
                    buf[done..done + n].fill(0);
                    done += n;
                }
                Source::Log(piece) => {
                    let n = piece.len as usize;
                    let (place, to) = (piece.place, &mut buf[done..done + n]);
                    let copied = session.segment.lane_read(place.lane.into(), place.position, to);
                    if !copied || !intact(&place) {
                        return Err(Need::Extents(at));
                    }
                    done += n;
                }
                Source::Arena { arena, offset, len: n } => {
                    let n = n as usize;
                    match session.arena_known(arena) {
                        Some(Some(map)) => {
                            if !map.read(offset, &mut buf[done..done + n]) {
                                return Err(Need::Extents(at));
                            }
                        }
                        Some(None) if done == 0 => {
                            return Err(Need::Remote { offset: at, len: n });
                        }
                        Some(None) => return Ok(done),
                        None => return Err(Need::Arena(arena)),
                    }
                    done += n;
                }
                Source::Unknown => return Err(Need::Extents(at)),
            }
        }
        Ok(done)
    }

    /// Asks for the extents from `from` on, new enough for what the log no longer holds.
    fn fetch_extents(
        &self,
        session: &Session,
        ino: InodeId,
        state: &mut State,
        from: u64,
    ) -> Result<()> {
        let published = session.segment.word(control::PUBLISHED).load(Ordering::Acquire);
        let mut after = state.extents_after.max(state.last.min(Sequence(published)));
        // Once more if something written will give the file other blocks.
        for _ in 0..2 {
            let mut body = Vec::new();
            session.call(&Request::Extents { ino, from }, after, &mut body)?;
            let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
            let (reflected, complete, extents) =
                rpc::take_extents(&mut r).map_err(|_| Errno::IO)?;
            if reflected < state.extents_after {
                return Err(Errno::IO);
            }
            state.pieces.install(from, &extents, complete, reflected);
            if !state.pieces.will_move() {
                break;
            }
            state.moved(state.last);
            after = state.last;
        }
        Ok(())
    }

    pub(crate) fn do_write(
        &self,
        handle: Handle,
        offset: u64,
        data: &[u8],
        append: bool,
    ) -> Result<Written> {
        let open = self.handle(handle)?;
        if open.flags & O_ACCMODE == O_RDONLY {
            return Err(Errno::BADF);
        }
        self.report_refusal(&open)?;
        let append = append || open.flags & O_APPEND != 0;
        let written = self.write_inode(&open, offset, data, append)?;
        if open.flags & O_DSYNC != 0 {
            self.sync_open(&open)?;
        }
        Ok(written)
    }

    /// fsync: everything done to the file is on every member, or an error says what was refused.
    pub(crate) fn sync_open(&self, open: &Open) -> Result<()> {
        let last = open.inode.state.read().last.0;
        self.sync_inode(&open.inode)?;
        self.report_refusal(open)?;
        open.clean.store(last, Ordering::Relaxed);
        Ok(())
    }

    /// An operation counts once the service has judged it, which may be after the call that made
    /// it: a volume that runs full refuses it then. The next write or fsync through each handle of
    /// a file that has operations since its last fsync says so, once, as the kernel reports errors
    /// of write-back. (Which file was meant is not known: none that may have lost something is
    /// left out.)
    #[inline]
    fn report_refusal(&self, open: &Open) -> Result<()> {
        match self.current() {
            Some(session) if session.refusals() != open.refusals.load(Ordering::Relaxed) => {
                self.refused(session, open)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn refused(&self, session: &Session, open: &Open) -> Result<()> {
        let Some((last, errno)) = Self::news(session, open) else { return Ok(()) };
        self.unkeep(open);
        // What is cached here may show what never was.
        self.settle(&open.inode)?;
        open.clean.store(last, Ordering::Relaxed);
        Err(errno)
    }

    /// A refusal that this handle has not reported: the last own operation, and the error.
    fn news(session: &Session, open: &Open) -> Option<(u64, Errno)> {
        let count = session.refusals();
        let before = open.refusals.swap(count, Ordering::Relaxed);
        let (last, number) = {
            let state = open.inode.state.read();
            (state.last.0, state.session)
        };
        // A new session begins to count anew; what the old one lost is reported otherwise.
        let new = count < before || number != session.number;
        (!new && last > open.clean.load(Ordering::Relaxed)).then(|| (last, session.refusal()))
    }

    /// As [`report_refusal`](Self::report_refusal), at a close: asks the service for nothing.
    pub(crate) fn report_refusal_now(&self, open: &Open) -> Result<()> {
        let Some(session) = self.current() else { return Ok(()) };
        if session.refusals() == open.refusals.load(Ordering::Relaxed)
            || open.flags & O_ACCMODE == O_RDONLY
        {
            return Ok(());
        }
        let Some((last, errno)) = Self::news(session, open) else { return Ok(()) };
        self.unkeep(open);
        // What is cached here may show what never was: whoever looks next asks anew.
        open.inode.state.write().lease = rpc::Granted::default();
        open.clean.store(last, Ordering::Relaxed);
        Err(errno)
    }

    fn write_inode(&self, open: &Open, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        let mut done = 0;
        let mut first = None;
        // One lock over all pieces: an append of several entries stays in one piece.
        let mut state = open.inode.state.write();
        loop {
            let piece = &data[done..data.len().min(done + WRITE_PIECE)];
            let mut fits = 0;
            let at = self.repeat(|session| {
                self.ensure(session, open.inode.ino, &mut state, LeaseMode::Write, 0)?;
                let at = match first {
                    Some(first) => first + done as u64,
                    None if append => state.record.size,
                    None => offset,
                };
                // At the largest file's end, what fits is written.
                let room = FILE_SIZE_MAX.saturating_sub(at);
                if at > FILE_SIZE_MAX || room == 0 && !piece.is_empty() {
                    return Err(Errno::FBIG);
                }
                fits = piece.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                if piece.is_empty() {
                    return Ok(Outcome::Done(at));
                }
                self.write_piece(session, open, &mut state, at, &piece[..fits])
            });
            let at = match at {
                Ok(at) => at,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            };
            first.get_or_insert(at);
            done += fits;
            if done >= data.len() || fits < piece.len() {
                break;
            }
        }
        Ok(Written { len: done, offset: first.unwrap_or(offset) })
    }

    fn write_piece(
        &self,
        session: &'static Session,
        open: &Open,
        state: &mut State,
        at: u64,
        piece: &[u8],
    ) -> Result<Outcome<u64>> {
        if state.pieces.log_pieces() > LOG_PIECES_MAX {
            self.fetch_extents(session, open.inode.ino, state, 0)?;
        }
        logged!(self.end_privileges(session, open.inode.ino, state, true)?);
        let clear = self.clears_setid(state);
        let now = Self::now(&[&state.record]);
        let raw = RawHeader {
            op: op::WRITE,
            inode: open.inode.ino.0,
            a: at,
            flags: if clear { entry::CLEAR_SETID } else { 0 },
            time: now,
            ..RawHeader::default()
        };
        let written = match self.write_entry(session, open.hint, &[state], raw, piece) {
            Outcome::Done(written) => written,
            Outcome::Again => return Ok(Outcome::Again),
            Outcome::Full(lane, before) => return Ok(Outcome::Full(lane, before)),
        };
        let len = piece.len() as u64;
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
        written.persist();
        session.segment.ring(false);
        Ok(Outcome::Done(at))
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
        session: &Session,
        ino: InodeId,
        state: &mut State,
        clears: bool,
    ) -> Result<Outcome<()>> {
        if state.record.mode & 0o6000 == 0 && (!state.record.xattrs || state.no_capability) {
            return Ok(Outcome::Done(()));
        }
        self.end_some_privileges(session, ino, state, clears)
    }

    #[cold]
    fn end_some_privileges(
        &self,
        session: &Session,
        ino: InodeId,
        state: &mut State,
        clears: bool,
    ) -> Result<Outcome<()>> {
        logged!(self.end_capability(session, ino, state)?);
        let mode = state.record.mode & 0o7777;
        let mut ends = 0;
        if !geteuid().is_root() {
            // Set-group-ID without execution for the group stays with its members.
            let group = mode & 0o2000 != 0 && (mode & 0o10 != 0 || !is_member(state.record.gid));
            ends = mode & 0o4000 | if group { 0o2000 } else { 0 };
        }
        if clears && self.clears_setid(state) {
            ends &= !(0o4000 | if mode & 0o10 != 0 { 0o2000 } else { 0 });
        }
        if ends == 0 {
            return Ok(Outcome::Done(()));
        }
        let now = Self::now(&[&state.record]);
        let (mask, mode, none) = (mask::MODE, mode & !ends, Stamp::default());
        let op = Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: none, mtime: none };
        state.last = logged!(self.log(session, ino.0, &[state], &op, now)).sequence;
        state.record.mode &= !ends;
        Ok(Outcome::Done(()))
    }

    /// The file's capabilities end, whoever changes it.
    pub(crate) fn end_capability(
        &self,
        session: &Session,
        ino: InodeId,
        state: &mut State,
    ) -> Result<Outcome<()>> {
        if !state.record.xattrs || state.no_capability {
            return Ok(Outcome::Done(()));
        }
        let name = storage::limits::CAPABILITY;
        match self.xattr_value(session, ino, state.last, name) {
            Ok(_) => {
                let now = Self::now(&[&state.record]);
                let op = Op::RemoveXattr { ino, name };
                state.last = logged!(self.log(session, ino.0, &[state], &op, now)).sequence;
            }
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
        state.no_capability = true;
        Ok(Outcome::Done(()))
    }

    pub(crate) fn clears_setid(&self, state: &State) -> bool {
        let mode = state.record.mode;
        let setid = mode & 0o4000 != 0 || mode & 0o2010 == 0o2010;
        setid && !geteuid().is_root()
    }

    /// Content changed by an own operation.
    pub(crate) fn touched(&self, state: &mut State, sequence: Sequence, now: u64, clear: bool) {
        state.last = sequence;
        state.record.mtime = Stamp::from_nanos(now);
        state.record.ctime = Stamp::from_nanos(now);
        if clear {
            let group = if state.record.mode & 0o10 != 0 { 0o2000 } else { 0 };
            state.record.mode &= !(0o4000 | group);
        }
    }

    /// Sets the size; the times change also when it was that before.
    pub(crate) fn truncate(&self, inode: &Arc<Inode>, size: u64) -> Result<()> {
        if size > FILE_SIZE_MAX {
            return Err(Errno::FBIG);
        }
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Write, 0)?;
            logged!(self.end_privileges(session, inode.ino, &mut state, true)?);
            let clear = self.clears_setid(&state);
            let now = Self::now(&[&state.record]);
            let op = Op::Truncate { ino: inode.ino, size, clear_setid: clear };
            let place = match self.log(session, inode.ino.0, &[&state], &op, now) {
                Outcome::Done(place) => place,
                Outcome::Again => return Ok(Outcome::Again),
                Outcome::Full(lane, before) => return Ok(Outcome::Full(lane, before)),
            };
            // Exact where every block was there; and what was reserved behind the end is gone.
            let most = |size: u64| size.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
            state.blocks_guessed |= state.record.blocks != most(state.record.size)
                && (size < state.record.size || !Self::is_within(&state));
            if size < state.record.size {
                let moves = state.pieces.moves(size, size.next_multiple_of(BLOCK_BYTES));
                state.pieces.zero(size, u64::MAX);
                state.extents_after = place.sequence;
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
            Ok(Outcome::Done(()))
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
        let (inode, before) = (&open.inode, self.refusals());
        let last = self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Write, 0)?;
            logged!(self.end_privileges(session, inode.ino, &mut state, false)?);
            let now = Self::now(&[&state.record]);
            let op = Op::Fallocate { ino: inode.ino, offset, len, mode: mode as u16 };
            let place = match self.log(session, open.hint, &[&state], &op, now) {
                Outcome::Done(place) => place,
                Outcome::Again => return Ok(Outcome::Again),
                Outcome::Full(lane, before) => return Ok(Outcome::Full(lane, before)),
            };
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
            Ok(Outcome::Done(place.sequence))
        })?;
        // Space is accounted by the service: learn its answer (and its refusal) now.
        self.settle_since(inode, before)?;
        if before.is_some_and(|(_, count)| count == open.refusals.load(Ordering::Relaxed)) {
            // All that was done to the file is judged: what is refused from here on is not that.
            open.clean.store(last.0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// COLLAPSE_RANGE and INSERT_RANGE: the bytes behind move within the file.
    fn shift(&self, open: &Open, insert: bool, offset: u64, len: u64) -> Result<()> {
        if !(offset | len).is_multiple_of(BLOCK_BYTES) {
            return Err(Errno::INVAL);
        }
        let (inode, before) = (&open.inode, self.refusals());
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Write, 0)?;
            let now = state.record.size;
            if (if insert { offset } else { offset + len }) >= now {
                return Err(Errno::INVAL);
            }
            let size = if insert { now + len } else { now - len };
            if size > FILE_SIZE_MAX {
                return Err(Errno::FBIG);
            }
            logged!(self.end_privileges(session, inode.ino, &mut state, false)?);
            let now = Self::now(&[&state.record]);
            let op = Op::Shift { ino: inode.ino, offset, len, insert, size };
            let place = match self.log(session, open.hint, &[&state], &op, now) {
                Outcome::Done(place) => place,
                Outcome::Again => return Ok(Outcome::Again),
                Outcome::Full(lane, before) => return Ok(Outcome::Full(lane, before)),
            };
            state.pieces.forget();
            state.extents_after = place.sequence;
            state.record.size = size;
            self.touched(&mut state, place.sequence, now, false);
            Ok(Outcome::Done(()))
        })?;
        self.settle_since(inode, before)
    }

    /// The service's proof of an inode.
    pub(crate) fn ask_proof(&self, ino: InodeId) -> Result<u64> {
        let inode = self.inode(ino);
        self.repeat(|session| {
            let mut state = inode.state.write();
            let mut body = Vec::new();
            let mode = state.mode().max(LeaseMode::Read);
            let last = (state.session == session.number).then_some(state.last);
            let after = session.known_after(last);
            session.call(&Request::Inode { ino, mode, flags: 0 }, after, &mut body)?;
            let reply = super::parse_inode(&body)?;
            let proof = reply.proof.0;
            self.install(session, &mut state, reply, 0);
            Ok(Outcome::Done(proof))
        })
    }

    /// Waits until the service has judged what was done to the inode, and takes its numbers.
    pub(crate) fn settle(&self, inode: &Arc<Inode>) -> Result<()> {
        self.settle_since(inode, self.refusals())
    }

    /// Session and number of refusals so far.
    pub(crate) fn refusals(&self) -> Option<(u64, u64)> {
        self.current().map(|session| (session.number, session.refusals()))
    }

    /// Takes the service's numbers, of after all that was done here.
    pub(crate) fn renew(&self, session: &Session, ino: InodeId, state: &mut State) -> Result<()> {
        let mut body = Vec::new();
        let mode = state.mode().max(LeaseMode::Read);
        let last = (state.session == session.number).then_some(state.last);
        let after = session.known_after(last);
        session.call(&Request::Inode { ino, mode, flags: 0 }, after, &mut body)?;
        self.install(session, state, super::parse_inode(&body)?, 0);
        Ok(())
    }

    /// The same, where what counts are refusals since an earlier look at their number: the service
    /// may have been quick.
    pub(crate) fn settle_since(
        &self,
        inode: &Arc<Inode>,
        before: Option<(u64, u64)>,
    ) -> Result<()> {
        self.repeat(|session| {
            let mut state = inode.state.write();
            let before = before.filter(|(number, _)| *number == session.number);
            let refusals = before.map_or_else(|| session.refusals(), |(_, count)| count);
            self.renew(session, inode.ino, &mut state)?;
            if session.refusals() != refusals {
                return Err(session.refusal());
            }
            Ok(Outcome::Done(()))
        })
    }

    pub(crate) fn do_lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.handle(handle)?;
        let inode = &open.inode;
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Read, 0)?;
            let size = state.record.size;
            if offset >= size {
                return Err(Errno::NXIO);
            }
            let mut at = offset;
            while at < size {
                let intact = |place: &super::lane::Place| {
                    session.lane_at(place.lane).is_some_and(|l| l.intact(place.position))
                };
                let (is_data, len) = match state.pieces.find(at, size - at, intact) {
                    Source::Hole(n) => (false, n),
                    Source::Log(p) => (true, p.len),
                    Source::Arena { len, .. } => (true, len),
                    Source::Unknown => {
                        self.fetch_extents(session, inode.ino, &mut state, at)?;
                        continue;
                    }
                };
                if is_data == (whence == Whence::Data) {
                    return Ok(Outcome::Done(at));
                }
                at += len;
            }
            match whence {
                Whence::Hole => Ok(Outcome::Done(size)),
                Whence::Data => Err(Errno::NXIO),
            }
        })
    }

    /// Waits until the inode's own operations are persistent everywhere.
    pub(crate) fn sync_inode(&self, inode: &Inode) -> Result<()> {
        let (session, (last, number, lost)) = loop {
            let session = self.session()?;
            let state = inode.state.read();
            // Else another thread has attached anew between the two looks.
            if state.session <= session.number {
                break (session, (state.last, state.session, state.lost));
            }
        };
        let ended = number != session.number && last.0 > 0;
        if ended && !lost && !session.lost_with(number, last) {
            // All of it was on every member when the old session ended.
            return Ok(());
        }
        if lost || ended {
            let mut state = inode.state.write();
            state.lost = false;
            if state.session != session.number {
                state.last = Sequence(0);
            }
            return Err(Errno::IO);
        }
        self.sync_to(session, last)
    }

    pub(crate) fn sync_to(&self, session: &Session, last: Sequence) -> Result<()> {
        match session.sync(last) {
            Err(Errno::STALE) => Err(Errno::IO),
            other => other,
        }
    }
}

/// Whether this process is in the group.
fn is_member(gid: u32) -> bool {
    getegid().as_raw() == gid
        || getgroups().is_ok_and(|all| all.iter().any(|group| group.as_raw() == gid))
}
