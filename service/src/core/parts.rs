//! Operations that are too long for a turn, done in parts. What one costs depends on how many extents it meets, so the head, which
//! makes the order, puts several entries into the stream instead of one, and others are heard between any two. To every
//! member the parts are entries as any, so all come to the same; the last of them settles the client's operation.
//!
//! ```text
//! truncate, and freeing a file   from the end of the file on: each part is a shorter truncation
//! fallocate, clone               from the beginning on: each part is a range of it
//! a change of class              its blocks go to the service's arena; it is done; they go to the arena of the class
//! a shift                        not at all: where it would move too many it is refused (EOPNOTSUPP)
//! ```
//!
//! The head remembers how far it is. If it ends, the operation is not settled: its client's agent sends it to the next head, which
//! begins at the beginning. All of this is idempotent. If the client's machine is lost as well, what is done of the
//! parts stays, of an operation for which nobody has had an fsync: of a `truncate` a length between, of `fallocate` and a
//! clone the front of the range, of a change of class blocks that are read through the service. A file without a name
//! is in the tree as such, and whoever is head next goes on.

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::entry::Op;
use storage::format::item::ReadClass;
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX};

use super::{Failure, Node};

/// A shift looks at what lies behind it, and leaves no byte where it is: of so many times the pieces of a part.
const SHIFT_PIECES: u64 = 4;

/// fallocate: keep the size, and make a hole.
const KEEP_SIZE: u16 = 1;
const PUNCH: u16 = 1 | 2;

/// How far an operation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    sequence: Sequence,
    /// The next part begins at this block.
    at: u64,
    /// The class has changed.
    changed: bool,
}

/// What is to be done of an operation now.
pub(super) enum Step<'a> {
    /// All of it.
    Whole,
    /// A part, after which it is so far.
    Part(Op<'a>, Cut),
    /// The last part.
    Last(Op<'a>),
    /// It is more than what can be done.
    Refuse(Errno),
}

impl Node {
    /// What can be done of a client's operation in one entry.
    pub(super) fn part_of<'a>(
        &self,
        client: ClientId,
        sequence: Sequence,
        op: &Op<'a>,
    ) -> Result<Step<'a>, Failure> {
        if planted(Bug::EntriesUncut) {
            return Ok(Step::Whole);
        }
        let none = Cut { sequence, at: 0, changed: false };
        let cut = self.part.head().and_then(|head| head.cuts.get(&client));
        let cut = cut.filter(|cut| cut.sequence == sequence).copied().unwrap_or(none);
        match *op {
            Op::Truncate { ino, size, clear_setid } => {
                let part = self.shorter(ino, size, clear_setid)?;
                Ok(part.map_or(Step::Whole, |part| Step::Part(part, none)))
            }
            Op::SetAttr { ino, .. } | Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. } => {
                self.changed_in_parts(ino, op, cut)
            }
            Op::Fallocate { ino, offset, len, mode } => {
                self.range_in_parts(ino, (offset, len), None, cut, |offset, len, _| Op::Fallocate {
                    ino,
                    offset,
                    len,
                    mode,
                })
            }
            Op::CloneRange { ino, offset, len, source, source_offset, .. } => {
                let from = Some((source, source_offset));
                self.range_in_parts(ino, (offset, len), from, cut, |offset, len, source_offset| {
                    Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false }
                })
            }
            Op::Shift { ino, offset, .. } => {
                let (most, from) =
                    (self.env.config.limits.pieces * SHIFT_PIECES, offset / BLOCK_BYTES);
                let refused = self.volume.has_more(ino, from, most)?;
                Ok(if refused { Step::Refuse(Errno::OPNOTSUPP) } else { Step::Whole })
            }
            _ => Ok(Step::Whole),
        }
    }

    /// The next part of freeing a file that takes several.
    pub(super) fn part_to_free(&self, ino: InodeId) -> Result<Option<Op<'static>>, Failure> {
        if planted(Bug::EntriesUncut) {
            return Ok(None);
        }
        self.shorter(ino, 0, false)
    }

    /// A file is made as much shorter, on its way to `size`, as can be done in one entry; None: all the way.
    fn shorter(
        &self,
        ino: InodeId,
        size: u64,
        clear_setid: bool,
    ) -> Result<Option<Op<'static>>, Failure> {
        let Some((_, now)) = self.volume.file(ino)? else { return Ok(None) };
        let pieces = self.env.config.limits.pieces;
        let Some(at) = self.volume.part_start(ino, size.div_ceil(BLOCK_BYTES), pieces)? else {
            return Ok(None);
        };
        let at = at * BLOCK_BYTES;
        // Blocks may be reserved behind the end.
        Ok(Some(match at < now {
            true => Op::Truncate { ino, size: at, clear_setid },
            false => {
                Op::Fallocate { ino, offset: at, len: FILE_SIZE_MAX - at, mode: PUNCH | KEEP_SIZE }
            }
        }))
    }

    /// An operation that may give a file another class.
    fn changed_in_parts<'a>(
        &self,
        ino: InodeId,
        op: &Op<'a>,
        cut: Cut,
    ) -> Result<Step<'a>, Failure> {
        let changes = !cut.changed && self.volume.changes_class(op)?;
        if !changes && !cut.changed {
            return Ok(Step::Whole);
        }
        let class = match cut.changed {
            // The class that it has now is the one that it was to get.
            true => self.volume.file(ino)?.map(|(class, _)| class),
            false => Some(ReadClass::Service),
        };
        let (end, pieces) = (u64::MAX, self.env.config.limits.pieces);
        let to = self.volume.moved_end(ino, (cut.at, end), class, pieces)?;
        let out = !cut.changed;
        let part = Op::Move { ino, from: cut.at, to, out };
        Ok(match (cut.changed, cut.at, to) {
            // All of it in one entry.
            (false, 0, u64::MAX) => Step::Whole,
            // All blocks are out of the way.
            (false, u64::MAX, _) => Step::Part(*op, Cut { at: 0, changed: true, ..cut }),
            (true, _, u64::MAX) => Step::Last(part),
            (_, _, to) => Step::Part(part, Cut { at: to, ..cut }),
        })
    }

    /// An operation on a range of a file, which may read from another. `with` makes the part from offset and length,
    /// and where it reads.
    fn range_in_parts<'a>(
        &self,
        ino: InodeId,
        (offset, len): (u64, u64),
        source: Option<(InodeId, u64)>,
        cut: Cut,
        with: impl Fn(u64, u64, u64) -> Op<'a>,
    ) -> Result<Step<'a>, Failure> {
        let Some((class, _)) = self.volume.file(ino)? else { return Ok(Step::Whole) };
        let Some(end) = offset.checked_add(len).filter(|end| *end <= FILE_SIZE_MAX && len > 0)
        else {
            return Ok(Step::Whole);
        };
        let pieces = self.env.config.limits.pieces;
        let from = offset.max(cut.at * BLOCK_BYTES);
        let blocks = (from / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let mut to = self.volume.part_end(ino, blocks, Some(class), pieces)?;
        let mut reads = 0;
        if let Some((other, at)) = source {
            // What is refused as a whole changes nothing.
            let Some((state, there)) = self.volume.source(other) else { return Ok(Step::Whole) };
            let Some((_, size)) = state.file(there)? else { return Ok(Step::Whole) };
            let overlaps = ino == other && offset < at.saturating_add(len) && at < end;
            if overlaps || at.checked_add(len).is_none_or(|end| end > size) {
                return Ok(Step::Whole);
            }
            reads = at + (from - offset);
            let read = (reads / BLOCK_BYTES, (at + len).div_ceil(BLOCK_BYTES));
            let read_to = state.moved_end(there, read, None, pieces)?;
            if read_to < read.1 {
                to = to.min(blocks.0 + (read_to - read.0));
            }
        } else if cut.at == 0 && to < blocks.1 {
            // What cannot be had at all is not begun: nothing but what is there already need not be taken.
            let held = self.volume.attr(ino)?.map_or(0, |r| r.blocks / (BLOCK_BYTES / 512));
            let missing = (blocks.1 - blocks.0).saturating_sub(held);
            let takes =
                !matches!(with(offset, len, 0), Op::Fallocate { mode, .. } if mode & 2 != 0);
            if takes && !self.volume.has_blocks(missing) {
                return Ok(Step::Refuse(Errno::NOSPC));
            }
        }
        let to = to.max(blocks.0 + 1);
        if to >= blocks.1 {
            let last = with(from, end - from, reads);
            return Ok(if from == offset { Step::Whole } else { Step::Last(last) });
        }
        let part = with(from, to * BLOCK_BYTES - from, reads);
        Ok(Step::Part(part, Cut { at: to, ..cut }))
    }
}
