//! Operations on the content of files: which blocks, and what is to be copied into them.

use base::InodeId;

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

fn place(run: &Run, offset: u64) -> (Segment, u64) {
    let at = run.block * BLOCK_BYTES + (offset - run.file * BLOCK_BYTES);
    (Segment::Arena(run.arena), at)
}

/// Appends a run, joined with the one before where possible.
fn push(list: &mut Vec<Run>, run: Run) {
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
    pub(super) fn runs(
        &self,
        ino: InodeId,
        from: u64,
        to: u64,
        max: usize,
    ) -> Result<Vec<Run>, Fault> {
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

    /// Stores `new` in the place of `old` (both sorted, covering the same part of the file).
    fn replace_runs(&mut self, ino: InodeId, old: &[Run], new: &[Run]) -> Result<(), Fault> {
        for run in old {
            if new.binary_search_by_key(&run.file, |r| r.file).is_err() {
                self.tree.remove(Key::new(ino.0, kind::EXTENT, run.file))?;
            }
        }
        for run in new {
            if !old.contains(run) {
                self.tree.put(Key::new(ino.0, kind::EXTENT, run.file), &run.encode())?;
            }
        }
        Ok(())
    }

    /// The file that an operation on content needs.
    fn need_file(&self, ino: InodeId) -> Result<Inode, Refusal> {
        let inode = self.need(ino)?;
        if inode.is_file() {
            Ok(inode)
        } else if inode.is_dir() {
            Err(Refusal::IsDirectory)
        } else {
            Err(Refusal::Invalid)
        }
    }

    /// Content of a clone's source must not change before the clone is published (the module
    /// text of `volume` says why).
    fn not_cloned(&self, ino: InodeId) -> Result<(), Refusal> {
        if self.cloned.iter().any(|(_, source)| *source == ino) {
            return Err(Refusal::NeedsPublish);
        }
        Ok(())
    }

    /// The arena for a class, if it exists.
    fn arena_for(&self, class: ReadClass) -> Option<u32> {
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
            addresses = true;
        }
        if !addresses {
            return Err(Refusal::NeedsPublish);
        }
        self.can_store(pieces)
    }

    /// Whether the tree has pages to change that many extents.
    fn can_store(&self, extents: u64) -> Result<(), Refusal> {
        let (free, pending) = (self.tree.free_pages(), self.pages_in_waiting());
        let need = PAGES_PER_OP + extents / 16;
        if free >= need {
            Ok(())
        } else if free + pending >= need {
            Err(Refusal::NeedsPublish)
        } else {
            Err(Refusal::NoSpace)
        }
    }

    /// Blocks of `from..to` that no run holds.
    fn missing(&self, ino: InodeId, from: u64, to: u64) -> Result<u64, Fault> {
        let held: u64 =
            self.runs(ino, from, to, usize::MAX)?.iter().map(|run| run.cut(from, to).len).sum();
        Ok(to - from - held)
    }

    /// Checks that bytes `offset..end` of a file can be given blocks.
    fn can_map(&self, ino: InodeId, inode: &Inode, offset: u64, end: u64) -> Result<(), Refusal> {
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let missing = self.missing(ino, from, to)?;
        if missing == 0 {
            return Ok(());
        }
        self.may_take(inode, missing, 0)?;
        self.can_allocate(inode.class(), missing, 0)
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
    /// them, and says where the bytes lie. The caller has checked `can_map`.
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
            self.copies.push(CopyItem::Zero { to, len: head });
        }
        let tail = last * BLOCK_BYTES - end;
        if let (true, true, Some(run)) = (fresh_last, tail > 0, within(last - 1)) {
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
            self.space.free(Blocks { arena: gone.arena, block: gone.block, len: gone.len });
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

    /// Zeroes bytes `offset..end` where written blocks hold them.
    fn zero(&mut self, ino: InodeId, offset: u64, end: u64) -> Result<(), Fault> {
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
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
        self.account_blocks(inode, held);
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
        self.not_cloned(ino)?;
        self.can_map(ino, &inode, offset, end)?;
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
        self.not_cloned(ino)?;
        inode.blocks -= self.unmap(ino, size.div_ceil(BLOCK_BYTES), u64::MAX)?;
        if size < inode.size && !size.is_multiple_of(BLOCK_BYTES) {
            self.zero(ino, size, size.next_multiple_of(BLOCK_BYTES))?;
        }
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
        self.not_cloned(ino)?;
        let (zero, punch) = (mode & ZERO_RANGE != 0, mode & PUNCH_HOLE != 0);
        match mode & !KEEP_SIZE {
            0 | ZERO_RANGE => {}
            PUNCH_HOLE if mode & KEEP_SIZE != 0 => {}
            _ => return Err(Refusal::Unsupported),
        }
        if punch {
            self.zero(ino, offset, end.min(offset.next_multiple_of(BLOCK_BYTES)))?;
            let (from, to) = (offset.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
            if from < to {
                inode.blocks -= self.unmap(ino, from, to)?;
            }
            if offset / BLOCK_BYTES <= to && end > to * BLOCK_BYTES {
                self.zero(ino, offset.max(to * BLOCK_BYTES), end)?;
            }
            return self.touch_file(ino, &mut inode, held, false, now);
        }
        self.can_map(ino, &inode, offset, end)?;
        self.reserve(ino, &mut inode, offset, end)?;
        if zero {
            self.zero(ino, offset, end)?;
        }
        if mode & KEEP_SIZE == 0 {
            inode.size = inode.size.max(end);
        }
        self.touch_file(ino, &mut inode, held, false, now)
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
        self.not_cloned(ino)?;
        let (at, by) = (offset / BLOCK_BYTES, len / BLOCK_BYTES);
        let rest = if insert { at } else { at + by };
        let moved = self.runs(ino, rest, u64::MAX, usize::MAX)?;
        // Reserved blocks may lie behind the end of the file.
        let end = moved.last().map_or(0, |run| run.end() * BLOCK_BYTES).max(inode.size);
        if insert && end.checked_add(len).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(Refusal::TooBig);
        }
        self.can_store(2 * moved.len() as u64)?;
        if !insert {
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
        let Op::CloneRange { ino, offset, len, source, source_offset } = *op else {
            return Err(Refusal::Invalid);
        };
        let mut inode = self.need_file(ino)?;
        let held = inode.blocks;
        let from = self.need_file(source)?;
        let ends = (offset.checked_add(len), source_offset.checked_add(len));
        let (Some(end), Some(source_end)) = ends else { return Err(Refusal::TooBig) };
        if end > FILE_SIZE_MAX {
            return Err(Refusal::TooBig);
        }
        let overlap = ino == source && offset < source_end && source_offset < end;
        if len == 0 || source_end > from.size || overlap {
            return Err(Refusal::Invalid);
        }
        self.not_cloned(ino)?;
        let (a, b) = (source_offset / BLOCK_BYTES, source_end.div_ceil(BLOCK_BYTES));
        let mut runs = self.runs(source, a, b, usize::MAX)?;
        runs.retain(|run| !run.unwritten);
        self.can_map(ino, &inode, offset, end)?;
        // Holes of the source become zeroes, data becomes copies.
        self.zero(ino, offset, end)?;
        for piece in pieces(&runs, source_offset, source_end) {
            let to = piece.offset - source_offset + offset;
            for target in self.map(ino, &mut inode, to, to + piece.len)? {
                let from = (piece.to.0, piece.to.1 + (target.offset - to));
                self.copies.push(CopyItem::Copy { from, to: target.to, len: target.len });
            }
        }
        inode.size = inode.size.max(end);
        self.cloned.push((self.tree.working(), source));
        self.touch_file(ino, &mut inode, held, false, now)
    }

    /// Moves the blocks of a file to the arena of another class. The caller has checked that it
    /// can be done.
    pub(super) fn move_blocks(&mut self, ino: InodeId, class: ReadClass) -> Result<(), Fault> {
        let arena = self.make_arena(class)?;
        let old = self.runs(ino, 0, u64::MAX, usize::MAX)?;
        let mut new = Vec::with_capacity(old.len());
        for run in &old {
            let mut at = run.file;
            while at < run.end() {
                let goal = new.last().map(|r: &Run| r.block + r.len);
                let got = self.space.allocate(arena, run.end() - at, goal).ok_or(Fault::Full)?;
                let part = run.cut(at, at + got.len);
                let moved = Run { arena, block: got.block, ..part };
                if !run.unwritten {
                    self.copies.push(CopyItem::Copy {
                        from: place(&part, at * BLOCK_BYTES),
                        to: place(&moved, at * BLOCK_BYTES),
                        len: got.len * BLOCK_BYTES,
                    });
                }
                push(&mut new, moved);
                at += got.len;
            }
            self.space.free(Blocks { arena: run.arena, block: run.block, len: run.len });
        }
        self.replace_runs(ino, &old, &new)
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
