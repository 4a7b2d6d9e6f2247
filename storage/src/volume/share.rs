//! Blocks that several places in files map, since a clone copies no bytes where it need not.
//!
//! A run of blocks with more than one owner has an item in the tree that counts them; blocks
//! without an item have one. Owners are places in files: a file that was cloned into itself has
//! two. The items change in the transaction that changes the extents, so no crash parts them.
//!
//! What is always true:
//! - Shared runs are never unwritten and never overlap; neighbours have different counts.
//! - A block with more than one owner is not changed: whoever changes bytes of it gets a block of
//!   their own first ([`Volume::unshare`]).
//! - A block that an unpublished operation has read is not changed either, even if it has one owner
//!   by then ([`Shares::is_read`]): after a crash the operation reads it again.
//! - Nor is one that a snapshot has (`ages`): it counts here as shared.

use std::collections::BTreeMap;

use base::InodeId;
use base::planted::{Bug, planted};
use base::wire::Corrupt;

use super::data::{place, push};
use super::space::Space;
use super::{Blocks, CopyItem, Fault, Refusal, Volume, corrupt};
use crate::format::item::{Inode, ReadClass, Run, Shared, kind};
use crate::format::page::Key;
use crate::limits::BLOCK_BYTES;
use crate::tree::Tree;

/// Ranges read by unpublished operations from which on publishing is advisable: each change of
/// content looks through them.
const READ_SOFT_MAX: usize = 512;
/// Items of shared runs that a tree page holds at least: a quarter of what fits.
const PER_PAGE: u64 = 27;

/// Bytes of items and leaves that are compared at a time.
const COMPARED: (usize, usize) = (1 << 20, 1 << 12);

/// What is known of shared blocks besides the items.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Shared runs in the tree. Where there are none nobody looks for them.
    count: u64,
    /// Blocks that unpublished operations read, with the transaction of each.
    read: Vec<(u64, Blocks)>,
    /// The same of blocks that snapshots have: they do not change as long as these are there.
    frozen: Vec<(u64, Blocks)>,
}

impl Shares {
    /// Whether an unpublished operation reads one of these blocks.
    fn is_read(&self, blocks: Blocks) -> bool {
        let end = blocks.block + blocks.len;
        self.read.iter().any(|(_, r)| {
            r.arena == blocks.arena && r.block < end && blocks.block < r.block + r.len
        })
    }

    /// Transactions up to this one are published.
    pub fn published(&mut self, transaction: u64) {
        self.read.retain(|(t, _)| *t > transaction);
        self.frozen.retain(|(t, _)| *t > transaction);
    }

    /// A snapshot is given up: what is read of its blocks may be nobody's but a file's from now on.
    pub fn thaw(&mut self) {
        if planted(Bug::SnapshotReadDropped) {
            self.frozen.clear();
        }
        self.read.append(&mut self.frozen);
    }

    pub fn any_read(&self) -> bool {
        !self.read.is_empty()
    }

    pub fn many_read(&self) -> bool {
        self.read.len() > READ_SOFT_MAX
    }
}

/// Shared runs found at open, and how many blocks of extents were found in each.
#[derive(Debug, Default)]
pub(super) struct Found {
    runs: Vec<(Shared, u64)>,
}

impl Found {
    /// The next item of a shared run, in order.
    pub fn shared(&mut self, shared: Shared, space: &mut Space) -> Result<(), &'static str> {
        let Shared { arena, block, len, .. } = shared;
        self.runs.push((shared, 0));
        space.take(Blocks { arena, block, len })
    }

    /// The next extent: takes of its blocks what is not shared.
    pub fn run(&mut self, run: &Run, space: &mut Space) -> Result<(), &'static str> {
        let (arena, end) = (run.arena, run.block + run.len);
        let mut at = run.block;
        let first = self.runs.partition_point(|(s, _)| (s.arena, s.end()) <= (arena, at));
        let over = |s: &Shared| s.arena == arena && s.block < end;
        for (shared, seen) in self.runs[first..].iter_mut().take_while(|(s, _)| over(s)) {
            if run.unwritten {
                return Err("is unwritten and shared");
            }
            if at < shared.block {
                space.take(Blocks { arena, block: at, len: shared.block - at })?;
                at = shared.block;
            }
            let to = end.min(shared.end());
            *seen += to - at;
            at = to;
        }
        if at < end { space.take(Blocks { arena, block: at, len: end - at }) } else { Ok(()) }
    }

    /// Every extent was seen. (That each block has its count, and not only all of a run together,
    /// is the checker's to say.)
    pub fn end(self) -> Result<Shares, Corrupt> {
        let right = |(s, seen): &(Shared, u64)| s.len.checked_mul(s.owners) == Some(*seen);
        if !self.runs.iter().all(right) {
            return Err(Corrupt::new("shared blocks", "count owners that there are not"));
        }
        Ok(Shares { count: self.runs.len() as u64, ..Shares::default() })
    }
}

/// What changing a range of a file takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Need {
    /// Blocks that have no place yet.
    pub missing: u64,
    /// Blocks that others share.
    pub shared: u64,
}

impl core::ops::AddAssign for Need {
    fn add_assign(&mut self, other: Self) {
        self.missing += other.missing;
        self.shared += other.shared;
    }
}

/// Appends a shared run, joined with the one before where possible.
pub(crate) fn append(list: &mut Vec<Shared>, next: Shared) {
    match list.last_mut() {
        Some(last)
            if last.arena == next.arena
                && last.end() == next.block
                && last.owners == next.owners =>
        {
            last.len += next.len;
        }
        _ => list.push(next),
    }
}

/// Shared runs of a state that overlap or touch blocks `from..to` of an arena, whole.
pub(super) fn shared_in(tree: &Tree, arena: u32, from: u64, to: u64) -> Result<Vec<Shared>, Fault> {
    let (mut found, mut failed) = (Vec::new(), None);
    let mut take = |item, value: &[u8]| match Shared::decode(item, value) {
        Ok(shared) => found.push(shared),
        Err(e) => failed = Some(e),
    };
    let key = |block| Shared::key(arena, block);
    if let Some(before) = from.checked_sub(1) {
        tree.last(key(0), key(before), |k, v| take(k.item, v))?;
    }
    tree.scan(key(from), key(to), &mut |k, v| {
        take(k.item, v);
        true
    })?;
    if let Some(e) = failed {
        return Err(corrupt(InodeId::NONE)(e));
    }
    found.retain(|s| s.arena == arena && s.end() >= from);
    Ok(found)
}

/// Blocks that are in extents of a state and in none of the one behind it, and those that are in extents of that one alone.
/// What they share is not read: how often a block is mapped says its count in one of them, and what differs.
pub(super) fn moved(before: &Tree, after: &Tree) -> Result<(Vec<Blocks>, Vec<Blocks>), Fault> {
    // At blocks, by how many more extents map those from there on.
    let mut steps: BTreeMap<(u32, u64), i64> = BTreeMap::new();
    let mut step = |ino: u64, item, value: &[u8], by: i64| {
        let run = Run::decode(item, value).map_err(corrupt(InodeId(ino)))?;
        *steps.entry((run.arena, run.block)).or_default() += by;
        *steps.entry((run.arena, run.block + run.len)).or_default() -= by;
        Ok::<(), Fault>(())
    };
    let mut at = Some(Key::MIN);
    while let Some(from) = at {
        let (changes, next) = after.changes(Some(before), from, COMPARED)?;
        at = next;
        for (key, value) in changes.iter().filter(|(key, _)| key.kind == kind::EXTENT) {
            if let Some(value) = value {
                step(key.ino, key.item, value, 1)?;
            }
            before.get_with(*key, |old| step(key.ino, key.item, old, -1))?.transpose()?;
        }
    }
    let (mut gone, mut come) = (Vec::new(), Vec::new());
    let (mut more, mut since) = (0i64, (0, 0));
    for ((arena, block), by) in steps {
        if more != 0 && since.0 == arena {
            // Those that are mapped more often than that are in both.
            let (state, list) = if more < 0 { (before, &mut gone) } else { (after, &mut come) };
            let mut at = since.1;
            let mut alone = |from: u64, to: u64| {
                if from < to {
                    list.push(Blocks { arena, block: from, len: to - from });
                }
            };
            for run in shared_in(state, arena, at, block)? {
                let (first, end) = (run.block.clamp(at, block), run.end().clamp(at, block));
                if more.abs() == 1 {
                    // (What is not counted is mapped once.)
                    alone(at, first);
                    at = end;
                } else if run.owners == more.unsigned_abs() {
                    alone(first, end);
                }
            }
            if more.abs() == 1 {
                alone(at, block);
            }
        }
        (more, since) = (more + by, (arena, block));
    }
    Ok((gone, come))
}

impl Volume {
    /// Shared runs that overlap or touch blocks `from..to` of an arena, whole.
    fn shared_runs(&self, arena: u32, from: u64, to: u64) -> Result<Vec<Shared>, Fault> {
        if self.shares.count == 0 {
            return Ok(Vec::new());
        }
        shared_in(&self.tree, arena, from, to)
    }

    /// The parts of `from..to` of a file that `run` holds, and of each whether others share it, or a snapshot has it.
    pub(super) fn parts(&self, run: &Run, from: u64, to: u64) -> Result<Vec<(Run, bool)>, Fault> {
        let parts = self.parts_by_owners(run, from, to)?;
        if !self.space.ages.any() {
            return Ok(parts);
        }
        let mut all: Vec<(Run, bool)> = Vec::with_capacity(parts.len());
        for (part, shared) in parts {
            let blocks = Blocks { arena: part.arena, block: part.block, len: part.len };
            for (blocks, frozen) in self.space.ages.frozen(blocks) {
                let at = part.file + (blocks.block - part.block);
                let piece = part.cut(at, at + blocks.len);
                match all.last_mut() {
                    Some((last, same)) if *same == (shared || frozen) && last.joins(&piece) => {
                        last.len += piece.len;
                    }
                    _ => all.push((piece, shared || frozen)),
                }
            }
        }
        Ok(all)
    }

    fn parts_by_owners(&self, run: &Run, from: u64, to: u64) -> Result<Vec<(Run, bool)>, Fault> {
        let run = run.cut(from, to);
        let mut parts = Vec::new();
        // A block of the arena as one of the file.
        let file = |block: u64| run.file + (block - run.block);
        let mut at = run.file;
        let end = run.block + run.len;
        for shared in self.shared_runs(run.arena, run.block, end)? {
            if shared.end() <= run.block || shared.block >= end {
                continue;
            }
            let (first, last) = (shared.block.max(run.block), shared.end().min(end));
            if at < file(first) {
                parts.push((run.cut(at, file(first)), false));
            }
            at = file(last);
            match parts.last_mut() {
                // Counts may differ from one block to the next.
                Some((before, true)) if before.end() == file(first) => {
                    before.len += last - first;
                }
                _ => parts.push((run.cut(file(first), at), true)),
            }
        }
        if at < run.end() {
            parts.push((run.cut(at, run.end()), false));
        }
        Ok(parts)
    }

    /// Gives each block one owner more or less; returns those that have none now.
    fn change_owners(&mut self, blocks: Blocks, more: bool) -> Result<Vec<Blocks>, Fault> {
        let Blocks { arena, block, len } = blocks;
        let end = block + len;
        let old = self.shared_runs(arena, block, end)?;
        let (mut new, mut free, mut at) = (Vec::with_capacity(old.len() + 2), Vec::new(), block);
        let mut alone = |new: &mut Vec<Shared>, from: u64, to: u64| {
            if from < to && more {
                append(new, Shared { arena, block: from, len: to - from, owners: 2 });
            } else if from < to {
                free.push(Blocks { arena, block: from, len: to - from });
            }
        };
        for run in &old {
            alone(&mut new, at, run.block.min(end));
            let (from, to) = (run.block.clamp(block, end), run.end().clamp(block, end));
            if run.block < from {
                append(&mut new, Shared { len: from - run.block, ..*run });
            }
            let owners = if more { run.owners.saturating_add(1) } else { run.owners - 1 };
            if from < to && owners > 1 {
                append(&mut new, Shared { block: from, len: to - from, owners, ..*run });
            }
            if run.end() > to {
                append(&mut new, Shared { block: to, len: run.end() - to, ..*run });
            }
            at = at.max(to);
        }
        alone(&mut new, at, end);
        for run in &old {
            if new.binary_search_by_key(&run.block, |s| s.block).is_err() {
                self.tree.remove(Shared::key(arena, run.block))?;
            }
        }
        for run in &new {
            let at = old.binary_search_by_key(&run.block, |s| s.block);
            if at.is_err() || at.is_ok_and(|i| old[i] != *run) {
                self.tree.put(Shared::key(arena, run.block), &run.encode())?;
            }
        }
        self.shares.count = self.shares.count + new.len() as u64 - old.len() as u64;
        Ok(free)
    }

    /// The blocks have one owner more: the first one, where only a snapshot has them.
    pub(super) fn share(&mut self, blocks: Blocks) -> Result<(), Fault> {
        let Blocks { arena, block, len } = blocks;
        let (mut at, end) = (block, block + len);
        for first in self.space.revive(blocks) {
            if at < first.block {
                self.change_owners(Blocks { arena, block: at, len: first.block - at }, true)?;
            }
            at = first.block + first.len;
        }
        if at < end {
            self.change_owners(Blocks { arena, block: at, len: end - at }, true)?;
        }
        Ok(())
    }

    /// The blocks have one owner less; those that have none are free.
    pub(super) fn release(&mut self, run: &Run) -> Result<(), Fault> {
        let blocks = Blocks { arena: run.arena, block: run.block, len: run.len };
        if self.shares.count == 0 || planted(Bug::SharedFreed) {
            self.space.free(blocks);
            return Ok(());
        }
        for free in self.change_owners(blocks, false)? {
            self.space.free(free);
        }
        Ok(())
    }

    /// An operation of the working transaction reads the blocks.
    pub(super) fn note_read(&mut self, run: &Run) {
        let blocks = Blocks { arena: run.arena, block: run.block, len: run.len };
        if self.space.ages.frozen(blocks).iter().all(|(_, frozen)| *frozen) {
            self.shares.frozen.push((self.tree.working(), blocks));
        } else {
            self.shares.read.push((self.tree.working(), blocks));
        }
    }

    /// Whether blocks may have to stay as they are though this state alone has them, or others have them too.
    fn any_shared(&self) -> bool {
        self.shares.count > 0 || self.space.ages.any()
    }

    /// Tree pages that changing so many counts may take beyond those of any operation.
    pub(super) fn share_pages(&self, counts: u64) -> u64 {
        let there = self.shares.count.div_ceil(PER_PAGE);
        2 * counts.min(there) + (2 * counts).div_ceil(PER_PAGE)
    }

    /// Counts that change with the owners of `from..to` of a file in these runs: none if nothing is
    /// shared.
    pub(super) fn counts(&self, runs: &[Run], from: u64, to: u64) -> Result<u64, Fault> {
        let mut counts = 0;
        if self.shares.count > 0 {
            for run in runs.iter().map(|run| run.cut(from, to)) {
                let found = self.shared_runs(run.arena, run.block, run.block + run.len)?;
                counts += 1 + found.len() as u64;
            }
        }
        Ok(counts)
    }

    /// What it takes to change bytes `offset..end` of a file, or that it has to wait.
    pub(super) fn need_for(&self, ino: InodeId, offset: u64, end: u64) -> Result<Need, Refusal> {
        if offset >= end {
            return Ok(Need::default());
        }
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let mut need = Need { missing: to - from, shared: 0 };
        let quiet = !self.any_shared() && !self.shares.any_read();
        for run in self.runs(ino, from, to, usize::MAX)? {
            need.missing -= run.cut(from, to).len;
            // (Blocks that are unwritten are shared with snapshots alone.)
            if quiet || run.unwritten && !self.space.ages.any() {
                continue;
            }
            for (part, shared) in self.parts(&run, from, to)? {
                let blocks = Blocks { arena: part.arena, block: part.block, len: part.len };
                if shared {
                    need.shared += part.len;
                } else if self.shares.is_read(blocks) && !planted(Bug::ReadOverwritten) {
                    return Err(Refusal::NeedsPublish);
                }
            }
        }
        Ok(need)
    }

    /// Checks that there is room for a change of a file.
    pub(super) fn can_take(&self, inode: &Inode, need: Need) -> Result<(), Refusal> {
        if need == Need::default() {
            return Ok(());
        }
        self.may_take(inode, need.missing, 0)?;
        self.can_allocate(inode.class(), need.missing + need.shared, 0)?;
        self.can_store(need.shared, need.shared)
    }

    /// Blocks of a file's runs, within `from..to`, that others share.
    pub(super) fn shared_blocks(&self, runs: &[Run], from: u64, to: u64) -> Result<u64, Fault> {
        let mut sum = 0;
        if self.any_shared() {
            for run in runs {
                let parts = self.parts(run, from.max(run.file), to.min(run.end()))?;
                sum += parts.iter().filter(|(_, shared)| *shared).map(|(p, _)| p.len).sum::<u64>();
            }
        }
        Ok(sum)
    }

    /// Whether files share any blocks.
    pub const fn shares_blocks(&self) -> bool {
        self.shares.count > 0
    }

    /// Items that count owners of shared blocks.
    pub(super) const fn share_items(&self) -> u64 {
        self.shares.count
    }

    /// Gives a file blocks of its own for those of `from..to` that others share, with what they
    /// hold but for bytes `offset..end`, which are about to be overwritten. The caller has checked
    /// `need_for` and `can_take`.
    pub(super) fn unshare(
        &mut self,
        ino: InodeId,
        inode: &Inode,
        (from, to): (u64, u64),
        (offset, end): (u64, u64),
    ) -> Result<(), Fault> {
        if !self.any_shared() || from >= to || planted(Bug::SharedInPlace) {
            return Ok(());
        }
        let old = self.runs(ino, from, to, usize::MAX)?;
        let (mut new, mut given_up) = (Vec::with_capacity(old.len() + 2), Vec::new());
        for run in &old {
            if run.file < from {
                push(&mut new, run.cut(run.file, from));
            }
            for (part, shared) in self.parts(run, from, to)? {
                if !shared {
                    push(&mut new, part);
                    continue;
                }
                self.move_run(&part, true, inode.class(), &mut new, (offset, end))?;
                given_up.push(part);
            }
            if run.end() > to {
                push(&mut new, run.cut(to, run.end()));
            }
        }
        for part in &given_up {
            self.release(part)?;
        }
        self.replace_runs(ino, &old, &new)
    }

    /// Allocates blocks of a class for a run, appends them to `list`, and has the bytes
    /// copied but for `offset..end`.
    pub(super) fn move_run(
        &mut self,
        run: &Run,
        shared: bool,
        class: ReadClass,
        list: &mut Vec<Run>,
        (offset, end): (u64, u64),
    ) -> Result<(), Fault> {
        let arena = self.make_arena(class)?;
        let mut at = run.file;
        while at < run.end() {
            let goal = list.last().filter(|r| r.arena == arena).map(|r| r.block + r.len);
            let got = self.space.allocate(arena, run.end() - at, goal).ok_or(Fault::Full)?;
            let part = run.cut(at, at + got.len);
            let moved = Run { arena, block: got.block, ..part };
            let (low, high) = (part.file * BLOCK_BYTES, part.end() * BLOCK_BYTES);
            let around = [(low, offset.min(high)), (end.max(low), high)];
            for at in [offset, end].into_iter().filter(|at| !at.is_multiple_of(BLOCK_BYTES)) {
                if (low..high).contains(&at) && !run.unwritten {
                    let to = place(&moved, at / BLOCK_BYTES * BLOCK_BYTES);
                    self.copies.push(CopyItem::Fresh { to, len: BLOCK_BYTES });
                }
            }
            for (from, to) in around.into_iter().filter(|(from, to)| from < to && !run.unwritten) {
                self.copies.push(CopyItem::Copy {
                    from: place(&part, from),
                    to: place(&moved, from),
                    len: to - from,
                });
                if shared {
                    self.note_read(&part.cut(from / BLOCK_BYTES, to.div_ceil(BLOCK_BYTES)));
                }
            }
            push(list, moved);
            at += got.len;
        }
        Ok(())
    }
}
