//! Operations on the content of files: which blocks, and what is to be copied into them.

use base::InodeId;
use base::planted::{Bug, planted};

use super::share::Need;
use super::{ARENA_SERVICE, ARENAS_MAX, Applied, Blocks, CopyItem, Done, Fault, Refusal, Volume};
use super::{PAGES_PER_OP, corrupt};
use crate::format::entry::{Op, Stamp};
use crate::format::item::{Inode, ReadClass, Run, kind};
use crate::format::page::Key;
use crate::limits::{BLOCK_BYTES, FILE_SIZE_MAX};
use crate::media::Segment;

/// fallocate: do not change the size.
const KEEP_SIZE: u16 = 1;
/// fallocate: make a hole.
const PUNCH_HOLE: u16 = 2;
/// fallocate: make zeroes.
const ZERO_RANGE: u16 = 16;

/// fallocate: blocks that nobody shares.
const UNSHARE_RANGE: u16 = 64;

const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;
const S_IXGRP: u32 = 0o0010;

/// Bytes of a file and where they lie.
#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: u64,
    len: u64,
    to: (Segment, u64),
}

pub(super) fn place(run: &Run, offset: u64) -> (Segment, u64) {
    let at = run.block * BLOCK_BYTES + (offset - run.file * BLOCK_BYTES);
    (Segment::Arena(run.arena), at)
}

/// Bytes of one file that go to another.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Source.
    ino: InodeId,
    /// Where they lie in it.
    at: u64,
    /// Where they go to.
    to: u64,
    len: u64,
}

impl Part {
    /// What of it goes to bytes `from..end` of the target.
    fn cut(&self, from: u64, end: u64) -> Option<Part> {
        let (from, end) = (from.max(self.to), end.min(self.to + self.len));
        let at = || self.at + (from - self.to);
        (from < end).then(|| Part { at: at(), to: from, len: end - from, ..*self })
    }
}

/// Appends a run, joined with the one before where possible.
pub(super) fn push(list: &mut Vec<Run>, run: Run) {
    match list.last_mut() {
        Some(last) if last.joins(&run) => last.len += run.len,
        _ => list.push(run),
    }
}

/// The bytes `offset..end` of a file as far as `runs` (sorted) hold them.
fn pieces(runs: &[Run], offset: u64, end: u64) -> Vec<Piece> {
    let of = |run: &Run| {
        let from = offset.max(run.file * BLOCK_BYTES);
        let to = end.min(run.end() * BLOCK_BYTES);
        (from < to).then(|| Piece { offset: from, len: to - from, to: place(run, from) })
    };
    runs.iter().filter_map(of).collect()
}

impl Volume {
    /// Up to `max` runs that overlap blocks `from..to`, whole.
    pub fn runs(&self, ino: InodeId, from: u64, to: u64, max: usize) -> Result<Vec<Run>, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        let mut found = Vec::new();
        if from >= to || max == 0 {
            return Ok(found);
        }
        let key = |item| Key::new(ino.0, kind::EXTENT, item);
        let before = self.tree.last(key(0), key(from), |k, v| Run::decode(k.item, v))?;
        let before = before.transpose().map_err(corrupt(ino))?;
        if let Some(run) = before.filter(|run| run.end() > from) {
            found.push(run);
            if run.end() >= to || max == 1 {
                return Ok(found);
            }
        }
        let mut failed = None;
        self.tree.scan(key(from.saturating_add(1)), key(to - 1), &mut |k, v| {
            match Run::decode(k.item, v) {
                Ok(run) => found.push(run),
                Err(e) => failed = Some(e),
            }
            failed.is_none() && found.len() < max
        })?;
        failed.map_or(Ok(found), |e| Err(corrupt(ino)(e)))
    }

    /// The run that has a block of a file, and which transaction wrote the page that says so.
    pub(super) fn run_written(
        &self,
        ino: InodeId,
        block: u64,
    ) -> Result<Option<(Run, u64)>, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        let key = |item| Key::new(ino.0, kind::EXTENT, item);
        let found = self.tree.last_written(key(0), key(block), |k, v| Run::decode(k.item, v))?;
        let Some((run, written)) = found else { return Ok(None) };
        let run = run.map_err(corrupt(ino))?;
        Ok((run.end() > block).then_some((run, written)))
    }

    /// Stores `new` in the place of `old` (both sorted, covering the same part of the file).
    pub(super) fn replace_runs(
        &mut self,
        ino: InodeId,
        old: &[Run],
        new: &[Run],
    ) -> Result<(), Fault> {
        for run in old {
            if new.binary_search_by_key(&run.file, |r| r.file).is_err() {
                self.tree.remove(Key::new(ino.0, kind::EXTENT, run.file))?;
            }
        }
        for run in new {
            // (Both are in order: a file may have very many.)
            let at = old.binary_search_by_key(&run.file, |r| r.file);
            if at.is_err() || at.is_ok_and(|i| old[i] != *run) {
                self.tree.put(Key::new(ino.0, kind::EXTENT, run.file), &run.encode())?;
            }
        }
        Ok(())
    }

    /// The file that an operation on content needs.
    pub(super) fn need_file(&self, ino: InodeId) -> Result<Inode, Refusal> {
        let inode = self.need(ino)?;
        if inode.is_file() {
            Ok(inode)
        } else if inode.is_dir() {
            Err(Refusal::IsDirectory)
        } else {
            Err(Refusal::Invalid)
        }
    }

    /// The arena for a class, if it exists.
    pub(super) fn arena_for(&self, class: ReadClass) -> Option<u32> {
        let full = self.space.arenas().count() >= ARENAS_MAX as usize;
        self.space.arena_of(class).or(full.then_some(ARENA_SERVICE))
    }

    /// The arena for a class, made when needed.
    pub(super) fn make_arena(&mut self, class: ReadClass) -> Result<u32, Fault> {
        if let Some(arena) = self.space.arena_of(class) {
            return Ok(arena);
        }
        match self.arena_for(class) {
            Some(arena) => Ok(arena),
            None => {
                let next = self.space.arenas().map(|(n, _)| n).max().map_or(0, |n| n + 1);
                self.add_arena(next, class)?;
                Ok(next)
            }
        }
    }

    /// Whether `want` more blocks of a class can be had, and the tree holds their extents.
    pub(super) fn can_allocate(
        &self,
        class: ReadClass,
        want: u64,
        in_use: u64,
    ) -> Result<(), Refusal> {
        if !self.space.fits(want.saturating_sub(in_use)) {
            return Err(Refusal::NoSpace);
        }
        let (mut pieces, mut addresses) = (1, self.space.pending() == 0);
        if let Some(arena) = self.arena_for(class) {
            pieces = self.space.fragments(arena).min(want);
            addresses = self.space.has_addresses(arena, want);
        } else if want <= self.space.capacity() {
            addresses = self.space.holds_back_nothing_for(want);
        }
        if !addresses {
            return Err(Refusal::NeedsPublish);
        }
        self.can_store(pieces, 0)
    }

    /// Whether the tree has pages to change that many extents, and counts of so many shared runs.
    pub(super) fn can_store(&self, extents: u64, shared: u64) -> Result<(), Refusal> {
        let (free, pending) = (self.tree.free_pages(), self.pages_in_waiting());
        let need = PAGES_PER_OP + extents / 16 + self.share_pages(shared);
        if free >= need {
            Ok(())
        } else if free + pending >= need {
            Err(Refusal::NeedsPublish)
        } else {
            Err(Refusal::NoSpace)
        }
    }

    /// Whether the tree has pages to give up blocks `from..to` of a file.
    pub(super) fn can_release(&self, ino: InodeId, from: u64, to: u64) -> Result<(), Refusal> {
        let counts = self.counts(&self.runs(ino, from, to, usize::MAX)?, from, to)?;
        if counts == 0 { Ok(()) } else { self.can_store(0, counts) }
    }

    /// Allocates blocks `from..to` of a file and appends them to `list`.
    fn fill(
        &mut self,
        inode: &mut Inode,
        list: &mut Vec<Run>,
        (from, to): (u64, u64),
        unwritten: bool,
    ) -> Result<(), Fault> {
        if from >= to {
            return Ok(());
        }
        let arena = self.make_arena(inode.class())?;
        let mut at = from;
        while at < to {
            let goal = list.last().filter(|r| r.arena == arena).map(|r| r.block + r.len);
            let got = self.space.allocate(arena, to - at, goal).ok_or(Fault::Full)?;
            push(list, Run { file: at, arena, block: got.block, len: got.len, unwritten });
            inode.blocks += got.len;
            at += got.len;
        }
        Ok(())
    }

    /// Gives bytes `offset..end` of a file written blocks, zeroing what new blocks hold around
    /// them, and says where the bytes lie. The caller has checked `need_for` and `can_take`, and
    /// nobody shares blocks there (any more).
    fn map(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        offset: u64,
        end: u64,
    ) -> Result<Vec<Piece>, Fault> {
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        // With the neighbours on both sides, to continue or join them.
        let old = self.runs(ino, first.saturating_sub(1), last + 1, usize::MAX)?;
        let covers = |r: &&Run| r.file <= first && r.end() >= last && !r.unwritten;
        if let Some(run) = old.iter().find(covers) {
            return Ok(pieces(std::slice::from_ref(run), offset, end));
        }
        let (mut new, mut at) = (Vec::with_capacity(old.len() + 2), first);
        let (mut fresh_first, mut fresh_last) = (false, false);
        let mut fresh = |from: u64, to: u64| {
            fresh_first |= from <= first && to > first;
            fresh_last |= from < last && to >= last;
        };
        for run in &old {
            let gap = run.file.min(last);
            if at < gap {
                self.fill(inode, &mut new, (at, gap), false)?;
                fresh(at, gap);
                at = gap;
            }
            if run.file < first {
                push(&mut new, run.cut(run.file, first));
            }
            if run.end() > first && run.file < last {
                let mid = run.cut(first, last);
                if mid.unwritten {
                    fresh(mid.file, mid.end());
                }
                push(&mut new, Run { unwritten: false, ..mid });
                at = mid.end();
            }
            if run.end() > last {
                push(&mut new, run.cut(last, run.end()));
            }
        }
        if at < last {
            self.fill(inode, &mut new, (at, last), false)?;
            fresh(at, last);
        }
        self.replace_runs(ino, &old, &new)?;
        let within = |at: u64| new.iter().find(|r| r.file <= at && at < r.end()).copied();
        let head = offset % BLOCK_BYTES;
        if let (true, true, Some(run)) = (fresh_first, head > 0, within(first)) {
            let to = place(&run, first * BLOCK_BYTES);
            self.copies.push(CopyItem::Fresh { to, len: BLOCK_BYTES });
            self.copies.push(CopyItem::Zero { to, len: head });
        }
        let tail = last * BLOCK_BYTES - end;
        if let (true, true, Some(run)) = (fresh_last, tail > 0, within(last - 1)) {
            let block = place(&run, (last - 1) * BLOCK_BYTES);
            self.copies.push(CopyItem::Fresh { to: block, len: BLOCK_BYTES });
            self.copies.push(CopyItem::Zero { to: place(&run, end), len: tail });
        }
        Ok(pieces(&new, offset, end))
    }

    /// Takes blocks `from..to` from a file; returns how many there were.
    pub(super) fn unmap(&mut self, ino: InodeId, from: u64, to: u64) -> Result<u64, Fault> {
        let old = self.runs(ino, from, to, usize::MAX)?;
        let mut freed = 0;
        for run in &old {
            let gone = run.cut(from, to);
            self.release(&gone)?;
            freed += gone.len;
            let key = Key::new(ino.0, kind::EXTENT, run.file);
            if run.file < from {
                self.tree.put(key, &run.cut(run.file, from).encode())?;
            } else {
                self.tree.remove(key)?;
            }
            if run.end() > to {
                let rest = run.cut(to, run.end());
                self.tree.put(Key::new(ino.0, kind::EXTENT, rest.file), &rest.encode())?;
            }
        }
        Ok(freed)
    }

    /// Zeroes bytes `offset..end` where written blocks hold them. The caller has checked `need_for`
    /// and `can_take`.
    fn zero(&mut self, ino: InodeId, inode: &Inode, offset: u64, end: u64) -> Result<(), Fault> {
        if offset >= end {
            return Ok(());
        }
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        self.unshare(ino, inode, (from, to), (offset, end))?;
        let mut runs = self.runs(ino, from, to, usize::MAX)?;
        runs.retain(|run| !run.unwritten);
        for piece in pieces(&runs, offset, end) {
            self.copies.push(CopyItem::Zero { to: piece.to, len: piece.len });
        }
        Ok(())
    }

    /// Stores a file whose content changed, and that had `held` blocks before.
    fn touch_file(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        held: u64,
        setid: bool,
        now: Stamp,
    ) -> Done {
        self.moved.forget(ino);
        self.account_change(inode, Inode { blocks: held, ..*inode }.weight());
        (inode.mtime, inode.ctime) = (now, now);
        if setid {
            inode.mode &= !S_ISUID;
            if inode.mode & S_IXGRP != 0 {
                inode.mode &= !S_ISGID;
            }
        }
        self.put_inode(ino, inode)?;
        Ok(Applied::default())
    }

    pub(super) fn write(
        &mut self,
        ino: InodeId,
        offset: u64,
        len: u64,
        setid: bool,
        now: Stamp,
        source: (Segment, u64),
    ) -> Done {
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        let end = offset.checked_add(len).filter(|end| *end <= FILE_SIZE_MAX);
        let Some(end) = end else { return Err(Refusal::TooBig) };
        if len == 0 {
            return Ok(Applied::default());
        }
        let need = self.need_for(ino, offset, end)?;
        self.can_take(&inode, need)?;
        if need.shared > 0 {
            let blocks = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            self.unshare(ino, &inode, blocks, (offset, end))?;
        }
        for piece in self.map(ino, &mut inode, offset, end)? {
            let from = (source.0, source.1 + (piece.offset - offset));
            self.copies.push(CopyItem::Copy { from, to: piece.to, len: piece.len });
        }
        inode.size = inode.size.max(end);
        self.touch_file(ino, &mut inode, held, setid, now)
    }

    pub(super) fn truncate(&mut self, ino: InodeId, size: u64, setid: bool, now: Stamp) -> Done {
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        if size > FILE_SIZE_MAX {
            return Err(Refusal::TooBig);
        }
        let first = size.div_ceil(BLOCK_BYTES);
        // What was behind the end of the last block's bytes becomes zeroes.
        let tail = if size < inode.size { first * BLOCK_BYTES } else { size };
        let need = Need { missing: 0, ..self.need_for(ino, size, tail)? };
        self.can_take(&inode, need)?;
        self.can_release(ino, first, u64::MAX)?;
        inode.blocks -= self.unmap(ino, first, u64::MAX)?;
        self.zero(ino, &inode, size, tail)?;
        inode.size = size;
        self.touch_file(ino, &mut inode, held, setid, now)
    }

    pub(super) fn fallocate(
        &mut self,
        ino: InodeId,
        offset: u64,
        len: u64,
        mode: u16,
        now: Stamp,
    ) -> Done {
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        let end = offset.checked_add(len).filter(|end| *end <= FILE_SIZE_MAX);
        let Some(end) = end else { return Err(Refusal::TooBig) };
        if len == 0 {
            return Err(Refusal::Invalid);
        }
        let (zero, unshare) = (mode & ZERO_RANGE != 0, mode & UNSHARE_RANGE != 0);
        match mode & !KEEP_SIZE {
            0 | ZERO_RANGE | UNSHARE_RANGE => {}
            PUNCH_HOLE if mode & KEEP_SIZE != 0 => {
                self.punch(ino, &mut inode, offset, end)?;
                return self.touch_file(ino, &mut inode, held, false, now);
            }
            _ => return Err(Refusal::Unsupported),
        }
        let mut need = self.need_for(ino, offset, end)?;
        if !zero && !unshare {
            need.shared = 0;
        }
        self.can_take(&inode, need)?;
        self.reserve(ino, &mut inode, offset, end)?;
        if zero {
            self.zero(ino, &inode, offset, end)?;
        } else if unshare {
            let blocks = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            self.unshare(ino, &inode, blocks, (u64::MAX, u64::MAX))?;
        }
        if mode & KEEP_SIZE == 0 {
            inode.size = inode.size.max(end);
        }
        self.touch_file(ino, &mut inode, held, false, now)
    }

    /// Makes a hole of bytes `offset..end`: of whole blocks by giving them up.
    fn punch(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        offset: u64,
        end: u64,
    ) -> Result<(), Refusal> {
        let (from, to) = (offset.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
        let head = (offset, end.min(from * BLOCK_BYTES));
        let tail = (head.1.max(to * BLOCK_BYTES), end);
        let mut need = self.need_for(ino, head.0, head.1)?;
        need += self.need_for(ino, tail.0, tail.1)?;
        self.can_take(inode, Need { missing: 0, ..need })?;
        self.can_release(ino, from, to)?;
        if from < to {
            inode.blocks -= self.unmap(ino, from, to)?;
        }
        self.zero(ino, inode, head.0, head.1)?;
        Ok(self.zero(ino, inode, tail.0, tail.1)?)
    }

    /// Takes the blocks at `offset` out of a file, or puts a hole in front of them: no byte is
    /// copied, the extents behind get other keys.
    pub(super) fn shift(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::Shift { ino, offset, len, insert, size } = *op else {
            return Err(Refusal::Invalid);
        };
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        let before = if insert { size.checked_sub(len) } else { size.checked_add(len) };
        let whole = (offset | len).is_multiple_of(BLOCK_BYTES) && len > 0;
        let behind = offset.checked_add(if insert { 0 } else { len });
        let Some((before, _)) = before.zip(behind).filter(|(b, at)| whole && at < b) else {
            return Err(Refusal::Invalid);
        };
        if inode.size == size {
            return Ok(Applied { already: true, ..Applied::default() });
        }
        if inode.size != before {
            return Err(Refusal::Invalid);
        }
        let (at, by) = (offset / BLOCK_BYTES, len / BLOCK_BYTES);
        let rest = if insert { at } else { at + by };
        let moved = self.runs(ino, rest, u64::MAX, usize::MAX)?;
        // Reserved blocks may lie behind the end of the file.
        let end = moved.last().map_or(0, |run| run.end() * BLOCK_BYTES).max(inode.size);
        if insert && end.checked_add(len).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(Refusal::TooBig);
        }
        self.can_store(2 * moved.len() as u64, 0)?;
        if !insert {
            self.can_release(ino, at, rest)?;
            inode.blocks -= self.unmap(ino, at, rest)?;
        }
        let key = |file| Key::new(ino.0, kind::EXTENT, file);
        for run in &moved {
            if insert && run.file < rest {
                self.tree.put(key(run.file), &run.cut(run.file, rest).encode())?;
            } else {
                // `unmap` has cut off what lay before.
                self.tree.remove(key(run.file.max(rest)))?;
            }
        }
        for run in &moved {
            let part = run.cut(rest, run.end());
            let file = if insert { part.file + by } else { part.file - by };
            self.tree.put(key(file), &Run { file, ..part }.encode())?;
        }
        inode.size = size;
        self.touch_file(ino, &mut inode, held, false, now)
    }

    /// Gives bytes `offset..end` blocks, unwritten where there are none yet.
    fn reserve(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        offset: u64,
        end: u64,
    ) -> Result<(), Fault> {
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let old = self.runs(ino, first.saturating_sub(1), last + 1, usize::MAX)?;
        let (mut new, mut at) = (Vec::with_capacity(old.len() + 2), first);
        for run in &old {
            let gap = run.file.min(last);
            if at < gap {
                self.fill(inode, &mut new, (at, gap), true)?;
            }
            at = at.max(run.end());
            push(&mut new, *run);
        }
        self.fill(inode, &mut new, (at, last), true)?;
        self.replace_runs(ino, &old, &new)
    }

    pub(super) fn clone_range(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::CloneRange { ino, offset, len, source, source_offset, zeroes } = *op else {
            return Err(Refusal::Invalid);
        };
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        let from = match source.of_snapshot() {
            None => self.need_file(source)?,
            Some((slot, _)) if self.snapshot_in(slot).is_none() => return Err(Refusal::NoEntry),
            Some((slot, source)) => match self.read_snapshot(slot) {
                Some(state) => state.need_file(source)?,
                None => return Err(Refusal::NeedsPublish),
            },
        };
        let ends = (offset.checked_add(len), source_offset.checked_add(len));
        let (Some(end), Some(source_end)) = ends else { return Err(Refusal::TooBig) };
        if end > FILE_SIZE_MAX {
            return Err(Refusal::TooBig);
        }
        let overlap = ino == source && offset < source_end && source_offset < end;
        if len == 0 || source_end > from.size || overlap {
            return Err(Refusal::Invalid);
        }
        // Blocks that hold only bytes of the range, or at the end of it zeroes besides, where the target
        // has nothing else. (Or that block by now: part of a chunk may be done twice, and takes no more for it.)
        let beyond = self.runs(ino, end / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES), 1)?;
        let (block, source_block) = (end / BLOCK_BYTES, source_end / BLOCK_BYTES);
        let there = self.source_runs(source, source_block, source_block + 1)?;
        let at = |run: &Run, block| {
            (!run.unwritten).then(|| (run.arena, run.cut(block, block + 1).block))
        };
        let same = |run: &Run| there.iter().any(|s| at(s, source_block) == at(run, block));
        let empty = end >= inode.size || beyond.iter().all(|run| run.unwritten || same(run));
        let tail = (source_end == from.size || zeroes) && empty;
        let last = if tail { end.div_ceil(BLOCK_BYTES) } else { end / BLOCK_BYTES };
        let blocks = (offset.div_ceil(BLOCK_BYTES), last);
        let whole = Part { ino: source, at: source_offset, to: offset, len };
        match self.sharing(&inode, &whole, blocks)? {
            Some(runs) => self.clone_sharing(ino, &mut inode, &whole, blocks, &runs)?,
            None => {
                self.can_take(&inode, self.need_for(ino, offset, end)?)?;
                self.copy_part(ino, &mut inode, &whole)?;
            }
        }
        inode.size = inode.size.max(end);
        self.touch_file(ino, &mut inode, held, false, now)
    }

    /// Runs of a file that is read: one of the working state, or of a snapshot that is opened.
    fn source_runs(&self, ino: InodeId, from: u64, to: u64) -> Result<Vec<Run>, Fault> {
        match self.source(ino) {
            Some((_, ino)) if planted(Bug::CloneOfNow) => self.runs(ino, from, to, usize::MAX),
            Some((state, ino)) => state.runs(ino, from, to, usize::MAX),
            None => Ok(Vec::new()),
        }
    }

    /// The runs that blocks `first..last` of the target of a clone can share, as runs of the target.
    /// None: they cannot. They begin elsewhere in a block, or those who may read the files differ.
    fn sharing(
        &self,
        inode: &Inode,
        part: &Part,
        (first, last): (u64, u64),
    ) -> Result<Option<Vec<Run>>, Fault> {
        if first >= last || !(part.at ^ part.to).is_multiple_of(BLOCK_BYTES) {
            return Ok(None);
        }
        // The same distance in bytes and in blocks.
        let from = |block: u64| (block * BLOCK_BYTES + part.at - part.to) / BLOCK_BYTES;
        let (a, b) = (from(first), from(last));
        let mut runs = self.source_runs(part.ino, a, b)?;
        runs.retain(|run| !run.unwritten);
        let arena = self.arena_for(inode.class());
        if runs.iter().any(|run| Some(run.arena) != arena) {
            return Ok(None);
        }
        for run in &mut runs {
            *run = run.cut(a, b);
            run.file = run.file - a + first;
        }
        Ok(Some(runs))
    }

    /// Clones by sharing blocks `first..last` of the target, which become `runs`, and copies the
    /// bytes around them.
    fn clone_sharing(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        part: &Part,
        (first, last): (u64, u64),
        runs: &[Run],
    ) -> Result<(), Refusal> {
        let around = [part.cut(0, first * BLOCK_BYTES), part.cut(last * BLOCK_BYTES, u64::MAX)];
        let mut need = Need::default();
        for edge in around.iter().flatten() {
            need += self.need_for(ino, edge.to, edge.to + edge.len)?;
        }
        let old = self.runs(ino, first, last, usize::MAX)?;
        let held: u64 = old.iter().map(|run| run.cut(first, last).len).sum();
        let more = runs.iter().map(|run| run.len).sum::<u64>().saturating_sub(held);
        self.may_take(inode, need.missing + more, 0)?;
        self.can_take(inode, need)?;
        let extents = (runs.len() + old.len()) as u64;
        let counts = self.counts(runs, first, last)? + self.counts(&old, first, last)?;
        self.can_store(extents, runs.len() as u64 + counts)?;
        inode.blocks -= self.unmap(ino, first, last)?;
        for run in runs {
            self.share(Blocks { arena: run.arena, block: run.block, len: run.len })?;
            self.tree.put(Key::new(ino.0, kind::EXTENT, run.file), &run.encode())?;
            inode.blocks += run.len;
        }
        for edge in around.iter().flatten() {
            self.copy_part(ino, inode, edge)?;
        }
        Ok(())
    }

    /// Copies bytes from one file to another: holes of the source become zeroes. The caller has
    /// checked `need_for` and `can_take`.
    fn copy_part(&mut self, ino: InodeId, inode: &mut Inode, part: &Part) -> Result<(), Fault> {
        let source_end = part.at + part.len;
        let (a, b) = (part.at / BLOCK_BYTES, source_end.div_ceil(BLOCK_BYTES));
        let mut runs = self.source_runs(part.ino, a, b)?;
        runs.retain(|run| !run.unwritten);
        for run in &runs {
            self.note_read(&run.cut(a, b));
        }
        self.zero(ino, inode, part.to, part.to + part.len)?;
        for piece in pieces(&runs, part.at, source_end) {
            let to = piece.offset - part.at + part.to;
            for target in self.map(ino, inode, to, to + piece.len)? {
                let from = (piece.to.0, piece.to.1 + (target.offset - to));
                self.copies.push(CopyItem::Copy { from, to: target.to, len: target.len });
            }
        }
        Ok(())
    }

    /// Reads from a file as far as its copies have been run; returns the bytes read (less than
    /// asked only at the end of the file).
    pub fn read_file(&self, ino: InodeId, offset: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        let Some(inode) = self.inode(ino)?.filter(Inode::is_file) else { return Ok(0) };
        let len = inode.size.saturating_sub(offset).min(buf.len() as u64);
        let Some(buf) = buf.get_mut(..len as usize) else { return Ok(0) };
        if len == 0 {
            return Ok(0);
        }
        buf.fill(0);
        let end = offset + len;
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let mut runs = self.runs(ino, from, to, usize::MAX)?;
        runs.retain(|run| !run.unwritten);
        for piece in pieces(&runs, offset, end) {
            let at = (piece.offset - offset) as usize;
            let part = &mut buf[at..at + piece.len as usize];
            self.media.read(piece.to.0, piece.to.1, part)?;
        }
        Ok(len as usize)
    }
}
