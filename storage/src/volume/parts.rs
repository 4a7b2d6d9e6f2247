//! Operations in parts: how far one may go in a turn of the service, and moving a file's blocks from one arena to another
//! in several entries.
//!
//! A file that changes its class has its blocks in another arena afterwards. Where they are many, the service first moves
//! them to its own arena, part by part, which says nothing about who may read them and is nobody's to map; then the class
//! changes, and touches no block; then they are moved to where they belong. A crash between two parts leaves a file some
//! blocks of which are read through the service, and nothing else.

use std::collections::BTreeMap;

use base::InodeId;

use super::data::push;
use super::{Applied, Done, Fault, Refusal, Volume};
use crate::acl::{self, Acl};
use crate::format::entry::{Op, mask};
use crate::format::item::{Inode, ReadClass, Run, S_IFMT, kind};
use crate::format::page::Key;

/// Files that are on their way: blocks before this one lie in the service's arena. Known since they were moved there; who
/// does not know looks at all of them.
#[derive(Debug, Default)]
pub(super) struct Moved(BTreeMap<InodeId, u64>);

impl Moved {
    /// Blocks before this one need not move.
    pub fn upto(&self, ino: InodeId) -> u64 {
        self.0.get(&ino).copied().unwrap_or(0)
    }

    /// Its content has changed, or it is gone.
    pub fn forget(&mut self, ino: InodeId) {
        self.0.remove(&ino);
    }

    fn note(&mut self, ino: InodeId, (from, to): (u64, u64), out: bool) {
        if !out {
            self.forget(ino);
        } else if from <= self.upto(ino) {
            self.0.insert(ino, to);
        }
    }
}

impl Volume {
    /// Blocks that one part of an operation may cover: each may be an extent of its own, or an item that counts owners.
    fn part_blocks(&self, class: Option<ReadClass>, pieces: u64) -> u64 {
        let fragments = class.and_then(|class| self.space.arena_of(class));
        let fragments = fragments.map_or(0, |arena| self.space.fragments(arena));
        if self.share_items().max(fragments) > pieces { pieces } else { u64::MAX }
    }

    /// How far from block `from` on an operation on blocks `from..to` of a file goes that meets no more than so many
    /// pieces; blocks that it takes are of `class`.
    pub fn part_end(
        &self,
        ino: InodeId,
        (from, to): (u64, u64),
        class: Option<ReadClass>,
        pieces: u64,
    ) -> Result<u64, Fault> {
        let to = to.min(from.saturating_add(self.part_blocks(class, pieces)));
        let most = usize::try_from(pieces).unwrap_or(usize::MAX).max(1);
        let runs = self.runs(ino, from, to, most.saturating_add(1))?;
        Ok(if runs.len() > most { runs[most - 1].end().min(to) } else { to })
    }

    /// The same of an operation to which only the blocks matter that the file has there.
    pub fn moved_end(
        &self,
        ino: InodeId,
        (from, to): (u64, u64),
        class: Option<ReadClass>,
        pieces: u64,
    ) -> Result<u64, Fault> {
        let end = self.part_end(ino, (from, to), class, pieces)?;
        let more = end < to && !self.runs(ino, end, to, 1)?.is_empty();
        Ok(if more { end } else { to })
    }

    /// Whether a file has more pieces than that from block `from` on.
    pub fn has_more(&self, ino: InodeId, from: u64, pieces: u64) -> Result<bool, Fault> {
        let most = usize::try_from(pieces).unwrap_or(usize::MAX);
        Ok(self.runs(ino, from, u64::MAX, most.saturating_add(1))?.len() > most)
    }

    /// From where on blocks of a file are no more pieces than that, if it has more from `from` on.
    pub fn part_start(&self, ino: InodeId, from: u64, pieces: u64) -> Result<Option<u64>, Fault> {
        let most = usize::try_from(pieces).unwrap_or(usize::MAX).max(1);
        let blocks = self.part_blocks(None, pieces);
        let runs = self.runs(ino, from, u64::MAX, most.saturating_add(1))?;
        if runs.len() <= most && blocks == u64::MAX {
            return Ok(None);
        }
        let key = |block| Key::new(ino.0, kind::EXTENT, block);
        let last = |before: u64| -> Result<Option<Run>, Fault> {
            let Some(upto) = before.checked_sub(1) else { return Ok(None) };
            let found = self.tree.last(key(0), key(upto), |k, v| Run::decode(k.item, v))?;
            found.transpose().map_err(super::corrupt(ino))
        };
        let Some(end) = last(u64::MAX)?.map(|run| run.end()) else { return Ok(None) };
        let lowest = from.max(end.saturating_sub(blocks));
        let mut at = end;
        for _ in 0..most {
            match last(at)?.filter(|run| run.end() > lowest) {
                Some(run) if run.file > lowest => at = run.file,
                _ => {
                    at = lowest;
                    break;
                }
            }
        }
        Ok((at > from).then_some(at))
    }

    /// Whether blocks of a file can move to the arena of a class.
    pub(super) fn can_move(
        &self,
        ino: InodeId,
        class: ReadClass,
        (from, to): (u64, u64),
    ) -> Result<(), Refusal> {
        let runs = self.runs_elsewhere(ino, class, (from, to))?;
        let want = runs.iter().map(|run| run.cut(from, to).len).sum::<u64>();
        if want > 0 {
            // What others share stays where it is.
            let shared = self.shared_blocks(&runs, from, to)?;
            self.can_allocate(class, want, want - shared)?;
            self.can_store(2 * runs.len() as u64, self.counts(&runs, from, to)?)?;
        }
        Ok(())
    }

    /// Runs of `from..to` of a file that lie in another arena than that of a class.
    fn runs_elsewhere(
        &self,
        ino: InodeId,
        class: ReadClass,
        (from, to): (u64, u64),
    ) -> Result<Vec<Run>, Fault> {
        let arena = self.arena_for(class);
        let mut runs = self.runs(ino, from, to, usize::MAX)?;
        runs.retain(|run| Some(run.arena) != arena);
        Ok(runs)
    }

    /// Moves blocks of a file to the arena of a class. The caller has checked that it can be done.
    pub(super) fn move_blocks(
        &mut self,
        ino: InodeId,
        class: ReadClass,
        (from, to): (u64, u64),
    ) -> Result<(), Fault> {
        let old = self.runs_elsewhere(ino, class, (from, to))?;
        let mut new = Vec::with_capacity(old.len());
        for run in &old {
            if run.file < from {
                push(&mut new, run.cut(run.file, from));
            }
            for (part, shared) in self.parts(run, from.max(run.file), to.min(run.end()))? {
                self.move_run(&part, shared, class, &mut new, (u64::MAX, u64::MAX))?;
                self.release(&part)?;
            }
            if run.end() > to {
                push(&mut new, run.cut(to, run.end()));
            }
        }
        self.moved.forget(ino);
        self.replace_runs(ino, &old, &new)
    }

    /// One part of a file that is on its way to another class.
    pub(super) fn move_part(&mut self, ino: InodeId, (from, to): (u64, u64), out: bool) -> Done {
        let Some(inode) = self.inode(ino)?.filter(Inode::is_file) else {
            return Ok(Applied { already: true, ..Applied::default() });
        };
        let class = if out { ReadClass::Service } else { inode.class() };
        self.can_move(ino, class, (from, to))?;
        let upto = self.moved.upto(ino);
        self.move_blocks(ino, class, (from, to))?;
        if out && upto > 0 {
            self.moved.note(ino, (0, upto), true);
        }
        self.moved.note(ino, (from, to), out);
        Ok(Applied::default())
    }

    /// Whether an operation gives a file another class, and so other blocks.
    pub fn changes_class(&self, op: &Op<'_>) -> Result<bool, Fault> {
        let (Op::SetAttr { ino, .. } | Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. }) =
            *op
        else {
            return Ok(false);
        };
        let Some(inode) = self.inode(ino)?.filter(|i| i.is_file() && i.blocks > 0) else {
            return Ok(false);
        };
        let mut then = inode;
        match *op {
            Op::SetAttr { mask, mode, uid, gid, .. } => {
                if mask & mask::MODE != 0 {
                    then.mode = (then.mode & S_IFMT) | mode;
                }
                if mask & mask::UID != 0 {
                    then.uid = uid;
                }
                if mask & mask::GID != 0 {
                    then.gid = gid;
                }
            }
            Op::SetXattr { name, value, .. } if name == acl::ACCESS => {
                let Ok(list) = Acl::decode(value) else { return Ok(false) };
                then.acl = list.as_ref().is_some_and(|list| !list.is_minimal());
                if let Some(list) = &list {
                    then.mode = then.mode & !0o777 | list.mode();
                }
            }
            Op::RemoveXattr { name, .. } if name == acl::ACCESS => then.acl = false,
            _ => {}
        }
        Ok(then.class() != inode.class())
    }

    /// The class of a file's blocks, and its size; of what is no file, none.
    pub fn file(&self, ino: InodeId) -> Result<Option<(ReadClass, u64)>, Fault> {
        Ok(self.inode(ino)?.filter(Inode::is_file).map(|inode| (inode.class(), inode.size)))
    }

    /// Whether so many blocks more are to be had.
    pub fn has_blocks(&self, blocks: u64) -> bool {
        self.space.fits(blocks)
    }
}
