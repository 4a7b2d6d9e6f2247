//! What of a file is as it was in a state before, told without anything of that state, and without reading content: its node has it
//! then, if it had that state.
//!
//! A page of the tree says which transaction wrote it, and is not changed after that; the checksum of a block says up to which position of
//! the stream the publication came that wrote to it last. So an extent whose leaf no transaction after some published one has written lies where it lay
//! then, and a block of it that no publication after that wrote to has the bytes that it had.
//!
//! A leaf has the extents and the attributes of many small files, and is written when one of them changes. But content gets from one
//! place of a file to another, or into another file, without being written only by two operations, so it is enough to know which files
//! those were done to ([`Rearranged`]): in all others a block that was not written to is what it was, whatever became of its leaf.
//!
//! A publication that came up to a position has what the stream says up to there, and may have a part of the chunk behind it. So
//! of what came up to some position all is in a state that came further, and of that no other part.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{InodeId, StreamSeq};

use super::{Fault, View, Volume};
use crate::format::item::{Run, attr_key, kind};

/// Blocks looked at in one go.
const LOOKED: u64 = 1024;
/// A position that is half of this or more before another is not told from one behind it: of what lies at rest there is the lower half.
pub const FAR: u64 = 1 << 31;

/// So many files are remembered that were rearranged.
pub(super) const REARRANGED_MAX: usize = 1 << 16;

/// Files in which content lies elsewhere than where it was written to (`CloneRange`, `Shift`), by the last transaction that brought that
/// about. It is known of some transactions of this process.
#[derive(Debug)]
pub(super) struct Rearranged {
    files: BTreeMap<InodeId, u64>,
    /// Of all up to this one it is not known.
    after: u64,
}

impl Rearranged {
    /// Nothing was done yet after that transaction.
    pub const fn after(transaction: u64) -> Self {
        Self { files: BTreeMap::new(), after: transaction }
    }

    /// A transaction, the newest of all, does it to a file. If there are more than `most`, all are forgotten.
    pub fn note(&mut self, ino: InodeId, transaction: u64, most: usize) {
        self.files.insert(ino, transaction);
        if self.files.len() > most {
            *self = Self::after(transaction);
        }
    }

    /// Whether it may have been done to a file after that transaction.
    fn may_be(&self, ino: InodeId, transaction: u64) -> bool {
        transaction < self.after || self.files.get(&ino).is_some_and(|at| *at > transaction)
    }
}

/// A state of the volume somewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Since {
    /// It has all that the stream says up to there. (Which is less than [`FAR`] behind what is read.)
    pub position: StreamSeq,
    /// A transaction that was published here with the state of a position before that.
    pub transaction: u64,
}

impl Since {
    /// Whether a publication that came up to a position of which this is the lower half had nothing that the state has not.
    const fn has(&self, position: u32) -> bool {
        let behind = (self.position.0 as u32).wrapping_sub(position);
        0 < behind && (behind as u64) < FAR
    }
}

impl View {
    /// Where blocks of a file lie. None: not all of them lie anywhere, with content.
    pub fn runs_with(&self, ino: InodeId, first: u64, end: u64) -> Result<Option<Vec<Run>>, Fault> {
        let (mut at, mut runs) = (first, Vec::new());
        for run in self.runs(ino, first, end, usize::MAX)? {
            let run = run.cut(first, end);
            if run.file != at || run.unwritten {
                return Ok(None);
            }
            at = run.end();
            runs.push(run);
        }
        Ok((at == end).then_some(runs))
    }

    /// The first inode after that one to which something may have been done after a transaction. (Whatever changes what an inode is, or
    /// what a file has, puts down its attributes.)
    pub fn next_changed(&self, after: InodeId, transaction: u64) -> Result<Option<InodeId>, Fault> {
        let mut next = after.0.checked_add(1).map(InodeId);
        while let Some(ino) = next {
            let Some(key) = self.tree().next_written(attr_key(ino), transaction)? else {
                return Ok(None);
            };
            if key.kind == kind::ATTR {
                return Ok(Some(InodeId(key.ino)));
            }
            // The page begins within an inode: the next one is in it, or elsewhere.
            next = self.inodes_after(InodeId(key.ino), 1)?.first().copied();
        }
        Ok(None)
    }

    /// Of the blocks of a file from `block` on, up to `end`, how many are as they were in a state before (`true`), or how many may not
    /// be; at least one. `now` is the volume of which this is a view: they lie there where they lie here.
    pub fn same_since(
        &self,
        now: &Volume,
        ino: InodeId,
        (block, end): (u64, u64),
        since: &Since,
    ) -> Result<(bool, u64), Fault> {
        let left = end.saturating_sub(block).max(1);
        let other = |blocks: u64| Ok((false, blocks.clamp(1, left)));
        let Some(base) = now.sums_base() else { return other(left) };
        let Some((run, written)) = self.run_written(ino, block)? else { return other(left) };
        let run = run.cut(block, end);
        let lies_there = written <= since.transaction
            || !now.rearranged.may_be(ino, since.transaction)
            || planted(Bug::SinceMoved);
        if run.unwritten || !lies_there {
            return other(run.len);
        }
        let there = now.runs(ino, block, block + 1, 1)?;
        let Some(there) = there.first().map(|there| there.cut(block, end)) else { return other(1) };
        if there.unwritten || (there.arena, there.block) != (run.arena, run.block) {
            return other(there.len.min(run.len));
        }
        let run = Run { len: run.len.min(there.len), ..run };
        now.written_since(base, &run, since)
    }
}

impl Volume {
    /// Of the first blocks of a run how many no publication has written to since (`true`), or how many may have been written to; at least one.
    fn written_since(&self, base: u64, run: &Run, since: &Since) -> Result<(bool, u64), Fault> {
        let sums = self.entries(base, run.arena, run.block, run.len.min(LOOKED))?;
        let same = |at: usize| {
            sums[at].is_known() && since.has(sums[at].position) || planted(Bug::SinceWritten)
        };
        let first = same(0);
        let blocks = (0..sums.len()).take_while(|at| same(*at) == first).count();
        Ok((first, (blocks as u64).clamp(1, run.len.max(1))))
    }

    /// The same as [`View::same_since`], of a run of a file of a snapshot; this is what the snapshot shows. (Nobody writes to its blocks.)
    pub fn kept_since(&self, ino: InodeId, run: &Run, since: &Since) -> Result<(bool, u64), Fault> {
        let found = self.run_written(ino, run.file)?;
        let old = found.is_some_and(|(there, written)| {
            there.cut(run.file, run.end()) == *run && written <= since.transaction
        });
        match self.sums_base().filter(|_| old || planted(Bug::SinceMoved)) {
            Some(base) => self.written_since(base, run, since),
            None => Ok((false, run.len.max(1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_may_be_rearranged() {
        let mut files = Rearranged::after(10);
        let [a, b, c] = [1, 2, 3].map(InodeId);
        assert!(files.may_be(a, 9) && !files.may_be(a, 10));
        files.note(a, 12, 2);
        files.note(b, 14, 2);
        let may_be = |files: &Rearranged, at| [a, b, c].map(|ino| files.may_be(ino, at));
        assert_eq!(may_be(&files, 11), [true, true, false]);
        assert_eq!(may_be(&files, 12), [false, true, false]);
        files.note(a, 15, 2);
        assert_eq!(may_be(&files, 14), [true, false, false]);
        assert_eq!(may_be(&files, 15), [false; 3]);
        // One more than are remembered.
        files.note(c, 20, 2);
        assert_eq!(may_be(&files, 19), [true; 3]);
        assert_eq!(may_be(&files, 20), [false; 3]);
    }
}
