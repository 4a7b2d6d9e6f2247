//! Copies that the service makes: from one file to another without the bytes passing through here.
//!
//! The source may be a file of a snapshot. No lease is had of it, since it does not change; everybody knows that its blocks
//! are shared.

use alloc::sync::Arc;

use base::planted::{Bug, planted};
use base::{Errno, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX};

use super::LibFsOn;
use super::host::Host;
use super::inode::{Inode, State};
use super::names::Locked;
use super::ranges::WHOLE;
use super::snapshot::is_in_one;
use super::turn::{Step, Turn};
use crate::fs::{CopyRange, O_ACCMODE, O_APPEND, O_RDONLY, O_WRONLY, Result};

/// How far a copy goes. What another thread or client makes of the source meanwhile counts: its length is looked at
/// when nobody else can change it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Upto {
    /// All of the length that was asked for, which must be there.
    Length,
    /// To the end of the source, if that is nearer.
    End,
    /// To the end of the source, which must not lie before the beginning.
    Whole,
}

/// A piece that was copied.
struct Copied {
    sequence: Sequence,
    len: u64,
    /// What was to be copied, this piece included.
    rest: u64,
}

impl<H: Host> LibFsOn<H> {
    pub(crate) fn do_copy_range(&self, copy: &CopyRange) -> Result<u64> {
        let limits = &self.config.limits;
        if copy.len < limits.copy_min {
            return Err(Errno::OPNOTSUPP);
        }
        let size = self.source_size(copy)?;
        let len = copy.len.min(size.saturating_sub(copy.from_offset)).min(limits.copy_call);
        if len < limits.copy_min {
            // Also at the end of the source.
            return Err(Errno::OPNOTSUPP);
        }
        match self.copy(&CopyRange { len, ..*copy }, Upto::End)? {
            0 => Err(Errno::OPNOTSUPP),
            done => Ok(done),
        }
    }

    pub(crate) fn do_clone_range(&self, copy: &CopyRange) -> Result<()> {
        let size = self.source_size(copy)?;
        let rest = size.checked_sub(copy.from_offset).ok_or(Errno::INVAL)?;
        if copy.len == 0 {
            // How long that is says the file when nobody else can change it.
            let copy = CopyRange { len: FILE_SIZE_MAX, ..*copy };
            return self.copy(&copy, Upto::Whole).map(drop);
        }
        let len = copy.len;
        let even = (copy.from_offset | copy.to_offset).is_multiple_of(BLOCK_BYTES)
            && (len.is_multiple_of(BLOCK_BYTES) || len == rest);
        if !even || len > rest {
            return Err(Errno::INVAL);
        }
        self.copy(copy, Upto::Length).map(drop)
    }

    fn source_size(&self, copy: &CopyRange) -> Result<u64> {
        let (from, to) = (self.handle(copy.from)?, self.handle(copy.to)?);
        if from.flags & O_ACCMODE == O_WRONLY
            || to.flags & O_ACCMODE == O_RDONLY
            || to.flags & O_APPEND != 0
        {
            return Err(Errno::BADF);
        }
        if is_in_one(from.inode.ino) {
            return Ok(self.snapshot_attr(from.inode.ino)?.size);
        }
        Ok(self.attr_of_inode(&from.inode)?.size)
    }

    /// Copies at most `copy.len` bytes; returns how many.
    fn copy(&self, copy: &CopyRange, upto: Upto) -> Result<u64> {
        let (from, to) = (self.handle(copy.from)?, self.handle(copy.to)?);
        let past = is_in_one(from.inode.ino).then(|| self.source_size(copy)).transpose()?;
        self.report_refusal(&to)?;
        let (mut done, mut whole, mut before) = (0, copy.len, self.refusals());
        let mut sequences: Option<(Sequence, Sequence)> = None;
        while done < whole {
            let piece = CopyRange {
                from_offset: copy.from_offset + done,
                to_offset: copy.to_offset + done,
                len: whole - done,
                ..*copy
            };
            let upto = if done > 0 && upto == Upto::Whole { Upto::End } else { upto };
            let copied = self.run(|turn| {
                if Self::count_in(&mut before, turn.session) {
                    sequences = None;
                }
                self.try_copy(turn, (&from.inode, past), &to.inode, &piece, upto)
            });
            let Some(copied) = copied? else { break };
            let first = sequences.map_or(copied.sequence, |(first, _)| first);
            sequences = Some((first, copied.sequence));
            whole = done + copied.rest;
            done += copied.len;
        }
        // Space is accounted by the service: learn its answer (and its refusal) now.
        match sequences.map_or(Ok(()), |sequences| self.settle_own(&to, before, sequences)) {
            // The service does not know for sure that it might be read then; who has it open may.
            Err(Errno::ACCES) if past.is_some() => Err(Errno::OPNOTSUPP),
            settled => settled.map(|()| done),
        }
    }

    /// Copies a piece. None: the source ends before it. `past`: the length of a source that is one of a snapshot.
    fn try_copy(
        &self,
        turn: &mut Turn<H>,
        (from, past): (&Arc<Inode<H>>, Option<u64>),
        to: &Arc<Inode<H>>,
        piece: &CopyRange,
        upto: Upto,
    ) -> Step<Option<Copied>, H> {
        let both = [to, from];
        let mut locked = Locked::new(if past.is_some() { &both[..1] } else { &both });
        self.may_change(turn, to, locked.get(to.ino), &WHOLE)?;
        self.hold(turn, to.ino, locked.get(to.ino), LeaseMode::Write, 0)?;
        if past.is_none() && from.ino != to.ino {
            // The source may come to share its blocks: who knows of them has to ask anew.
            self.hold(turn, from.ino, locked.get(from.ino), LeaseMode::Write, 0)?;
        }
        let size = past.unwrap_or_else(|| locked.get(from.ino).record.size);
        let left = size.checked_sub(piece.from_offset);
        let rest = match upto {
            Upto::Length if left < Some(piece.len) => return Err(Errno::INVAL.into()),
            Upto::Whole if left.is_none() => return Err(Errno::INVAL.into()),
            _ => left.unwrap_or(0).min(piece.len),
        };
        if rest == 0 {
            return Ok(None);
        }
        let end = piece.to_offset.checked_add(rest).filter(|&end| end <= FILE_SIZE_MAX);
        end.ok_or(Errno::FBIG)?;
        if from.ino == to.ino && piece.from_offset.abs_diff(piece.to_offset) < rest {
            return Err(Errno::INVAL.into());
        }
        let readable = past.is_some() || certainly_readable(locked.get(from.ino), H::euid());
        if !readable || self.has_setid(locked.get(to.ino)) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.end_privileges(turn, to.ino, locked.get(to.ino), false)?;
        let now = Self::now(&[&locked.get(to.ino).record]);
        let CopyRange { from_offset: source_offset, to_offset: offset, .. } = *piece;
        let len = rest.min(self.config.limits.copy_piece);
        let op = Op::CloneRange {
            ino: to.ino,
            offset,
            len,
            source: from.ino,
            source_offset,
            zeroes: false,
        };
        // Of both: whoever had the source's meanwhile would not know that its blocks are shared.
        let place = self.log(turn, to.ino.0, &locked.states(), &op, now)?;
        if past.is_none() && !planted(Bug::SourceKept) {
            locked.get(from.ino).moved(place.sequence);
        }
        let state = locked.get(to.ino);
        state.pieces.zero(offset, offset + len);
        state.moved(place.sequence);
        state.record.size = state.record.size.max(offset + len);
        self.touched(state, place.sequence, now, false);
        Ok(Some(Copied { sequence: place.sequence, len, rest }))
    }
}

/// The service asks again whether we may read the source, as its mode is now; where that is in
/// doubt (a file opened before its mode changed) the bytes are better read through the handle.
fn certainly_readable(source: &State, uid: u32) -> bool {
    let r = &source.record;
    uid == 0
        || (r.mode & 0o444 == 0o444 && r.acl.is_none())
        || (uid == r.uid && r.mode & 0o400 != 0)
}
