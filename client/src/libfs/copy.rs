//! Copies that the service makes: from one file to another without the bytes passing through here.

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
use super::turn::{Step, Turn};
use crate::fs::{CopyRange, O_ACCMODE, O_APPEND, O_RDONLY, O_WRONLY, Result};

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
        self.copy(&CopyRange { len, ..*copy })?;
        Ok(len)
    }

    pub(crate) fn do_clone_range(&self, copy: &CopyRange) -> Result<()> {
        let size = self.source_size(copy)?;
        let rest = size.checked_sub(copy.from_offset).ok_or(Errno::INVAL)?;
        let len = if copy.len == 0 { rest } else { copy.len };
        let even = (copy.from_offset | copy.to_offset).is_multiple_of(BLOCK_BYTES)
            && (len.is_multiple_of(BLOCK_BYTES) || len == rest);
        if !even || len > rest {
            return Err(Errno::INVAL);
        }
        if len == 0 {
            return Ok(());
        }
        self.copy(&CopyRange { len, ..*copy })
    }

    fn source_size(&self, copy: &CopyRange) -> Result<u64> {
        let (from, to) = (self.handle(copy.from)?, self.handle(copy.to)?);
        if from.flags & O_ACCMODE == O_WRONLY
            || to.flags & O_ACCMODE == O_RDONLY
            || to.flags & O_APPEND != 0
        {
            return Err(Errno::BADF);
        }
        Ok(self.attr_of_inode(&from.inode)?.size)
    }

    fn copy(&self, copy: &CopyRange) -> Result<()> {
        let end = copy.to_offset.checked_add(copy.len).filter(|&e| e <= FILE_SIZE_MAX);
        end.ok_or(Errno::FBIG)?;
        let (from, to) = (self.handle(copy.from)?, self.handle(copy.to)?);
        let apart = copy.from_offset.abs_diff(copy.to_offset) >= copy.len;
        if from.inode.ino == to.inode.ino && !apart {
            return Err(Errno::INVAL);
        }
        self.report_refusal(&to)?;
        let (mut done, mut first, before) = (0, None, self.refusals());
        let mut last = Sequence(0);
        while done < copy.len {
            let piece = CopyRange {
                from_offset: copy.from_offset + done,
                to_offset: copy.to_offset + done,
                len: (copy.len - done).min(self.config.limits.copy_piece),
                ..*copy
            };
            last = self.run(|turn| self.try_copy(turn, &from.inode, &to.inode, &piece))?;
            first.get_or_insert(last);
            done += piece.len;
        }
        // Space is accounted by the service: learn its answer (and its refusal) now.
        self.settle_own(&to, before, (first.unwrap_or(last), last))
    }

    fn try_copy(
        &self,
        turn: &mut Turn<H>,
        from: &Arc<Inode<H>>,
        to: &Arc<Inode<H>>,
        piece: &CopyRange,
    ) -> Step<Sequence, H> {
        let mut locked = Locked::new(&[from, to]);
        self.may_change(to, locked.get(to.ino))?;
        self.hold(turn, to.ino, locked.get(to.ino), LeaseMode::Write, 0)?;
        if from.ino != to.ino {
            // The source may come to share its blocks: who knows of them has to ask anew.
            self.hold(turn, from.ino, locked.get(from.ino), LeaseMode::Write, 0)?;
        }
        let source = locked.get(from.ino);
        if !certainly_readable(source, H::euid()) || self.clears_setid(locked.get(to.ino)) {
            return Err(Errno::OPNOTSUPP.into());
        }
        if piece.from_offset + piece.len > locked.get(from.ino).record.size {
            return Err(Errno::INVAL.into());
        }
        self.end_privileges(turn, to.ino, locked.get(to.ino), false)?;
        let now = Self::now(&[&locked.get(to.ino).record]);
        let CopyRange { from_offset: source_offset, to_offset: offset, len, .. } = *piece;
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
        if !planted(Bug::SourceKept) {
            locked.get(from.ino).moved(place.sequence);
        }
        let state = locked.get(to.ino);
        state.pieces.zero(offset, offset + len);
        state.moved(place.sequence);
        state.record.size = state.record.size.max(offset + len);
        self.touched(state, place.sequence, now, false);
        Ok(place.sequence)
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
