//! Copies: what brings data to where the extents say, in order, by whoever is asked to make them. He sees
//! the region's bytes, and neither the tree nor the stream: what he must know to keep the sums of the blocks
//! ([`sum`](crate::format::sum)) is among the copies.
//!
//! # Who sums what
//!
//! Whoever copies also sums, in the same call, so that a block and its entry are right whenever a call of [`run_copies`]
//! has ended, and reach the media by the same fence. A block that is written whole is summed by what it is written from,
//! while that is in the cache. One of which a part is written is read: before, to see whether the rest is what it should be, and
//! afterwards, for its new sum. If it was wrong before it stays so: its new entry is one that it cannot have. Nor does a
//! copy of what is wrong become right.
//!
//! Before a block is written for the first time it holds what another file left there ([`CopyItem::Fresh`]); and where the
//! same copies may have been made before, by whoever was killed in the middle of them, a block is anything between two states
//! ([`Summing::again`]). There nothing is compared.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{StreamSeq, crc32c};

use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::limits::BLOCK_BYTES;
use crate::media::{Media, MediaError, Segment};

/// One step of moving data to where it is published. The order of the steps counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyItem {
    /// Copies bytes.
    Copy {
        /// Where they lie.
        from: (Segment, u64),
        /// Where they go.
        to: (Segment, u64),
        /// How many.
        len: u64,
    },
    /// Makes zeroes.
    Zero {
        /// Where.
        to: (Segment, u64),
        /// How many.
        len: u64,
    },
    /// What these blocks hold is nobody's: steps that follow write all of it.
    Fresh {
        /// The first block.
        to: (Segment, u64),
        /// How many bytes.
        len: u64,
    },
    /// Says how the steps that follow sum what they write to. Those before the first of these do not.
    Summing(Summing),
}

/// How blocks are summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Summing {
    /// Where the entries begin in each arena.
    pub base: u64,
    /// The steps come with the publication of the stream up to here.
    pub position: StreamSeq,
    /// They, or some of them, may have been made before, in whole or in part.
    pub again: bool,
}

impl CopyItem {
    /// Bytes that it moves.
    pub const fn bytes(&self) -> u64 {
        match *self {
            Self::Copy { len, .. } | Self::Zero { len, .. } => len,
            Self::Fresh { .. } | Self::Summing(_) => 0,
        }
    }

    /// At most some `most` bytes of it from `at` on, to the end of a block if not to its own.
    #[must_use]
    pub fn part(&self, at: u64, most: u64) -> Self {
        let cut = |to: u64, len: u64| {
            let left = len.saturating_sub(at);
            if most >= left {
                return left;
            }
            let from = to + at;
            left.min((from + most).next_multiple_of(BLOCK_BYTES) - from)
        };
        match *self {
            Self::Copy { from, to, len } => {
                let len = cut(to.1, len);
                Self::Copy { from: (from.0, from.1 + at), to: (to.0, to.1 + at), len }
            }
            Self::Zero { to, len } => Self::Zero { to: (to.0, to.1 + at), len: cut(to.1, len) },
            whole => whole,
        }
    }
}

/// Bytes of zeroes written at a time.
const ZEROES: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];
/// Copies of a run: what is written one after the other, mostly the payloads of a log that goes on.
const RUN: usize = 64;
/// Bytes of a run: they are summed when they are copied, and should be in the cache still.
const RUN_BYTES: u64 = 256 * 1024;
/// Blocks written in part that wait for their sums.
const PENDING: usize = 1024;

/// Takes memory for what copies are about to write to, whoever makes them: the node does, and knows what there is.
pub fn back_copies(media: &dyn Media, copies: &[CopyItem]) -> Result<(), MediaError> {
    let (mut ranges, mut base) = (Vec::with_capacity(copies.len()), None);
    // A block of entries is there for many blocks. (Fresh ones are summed with the steps that begin to fill them, also if the rest comes
    // with others.)
    let mut last = None;
    for item in copies {
        match *item {
            CopyItem::Copy { to, len, .. }
            | CopyItem::Zero { to, len }
            | CopyItem::Fresh { to, len }
                if len > 0 =>
            {
                ranges.push((to.0, to.1, len));
                if let Some(base) = base {
                    let (first, end) = (to.1 / BLOCK_BYTES, (to.1 + len).div_ceil(BLOCK_BYTES));
                    let (at, len) = (sum_at(base, first), (end - first) * SUM_BYTES);
                    let page = (to.0, at / BLOCK_BYTES, (at + len - 1) / BLOCK_BYTES);
                    if last != Some(page) {
                        ranges.push((to.0, at, len));
                        last = Some(page);
                    }
                }
            }
            CopyItem::Summing(summing) => base = Some(summing.base),
            _ => {}
        }
    }
    media.back(&ranges)
}

/// Bytes that go one behind the other.
#[derive(Debug)]
struct Run {
    from: Vec<(Segment, u64, u64)>,
    to: (Segment, u64),
    len: u64,
}

/// A place in a list of copies.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    item: usize,
    bytes: u64,
}

impl Cursor {
    /// The copies from here on whose targets lie one behind the other, as far as they are copied in one go. What is copied from an arena
    /// goes alone: it may have been written by the copy before.
    fn run(&mut self, copies: &[CopyItem]) -> Option<Run> {
        let mut run: Option<Run> = None;
        while let Some(item @ CopyItem::Copy { from: source, len: whole, .. }) =
            copies.get(self.item)
        {
            let is_arena = matches!(source.0, Segment::Arena(_));
            let most = RUN_BYTES - run.as_ref().map_or(0, |run| run.len).min(RUN_BYTES);
            let full = most == 0 || run.as_ref().is_some_and(|run| run.from.len() == RUN);
            let CopyItem::Copy { from, to, len } = item.part(self.bytes, most) else { break };
            match &mut run {
                Some(run) if full || is_arena || to != (run.to.0, run.to.1 + run.len) => break,
                Some(run) => {
                    run.from.push((from.0, from.1, len));
                    run.len += len;
                }
                None => run = Some(Run { from: vec![(from.0, from.1, len)], to, len }),
            }
            self.bytes += len;
            if self.bytes >= *whole {
                *self = Self { item: self.item + 1, bytes: 0 };
            }
            if is_arena {
                break;
            }
        }
        run
    }
}

/// How those of the copies are summed that lie from `at` on, if they are made without the others.
pub fn summing_at(copies: &[CopyItem], at: usize) -> Option<CopyItem> {
    copies.iter().take(at).rev().find(|item| matches!(item, CopyItem::Summing(_))).copied()
}

/// Runs copies in order, and starts their write-back; the caller ends with a fence before it
/// publishes. Memory for them was taken before ([`back_copies`]).
pub fn run_copies(media: &dyn Media, copies: &[CopyItem]) -> Result<(), MediaError> {
    let mut sums: Option<Sums<'_>> = None;
    let mut at = Cursor::default();
    while let Some(item) = copies.get(at.item) {
        match *item {
            CopyItem::Copy { .. } => {
                let Some(run) = at.run(copies) else { break };
                if let Some(sums) = &mut sums {
                    sums.before(&run)?;
                }
                media.copy_run(&run.from, run.to)?;
                if !planted(Bug::CopiesNotFlushed) {
                    media.persist(run.to.0, run.to.1, run.len)?;
                }
                if let Some(sums) = &mut sums {
                    sums.copied(&run)?;
                }
                continue;
            }
            CopyItem::Zero { to, len } => {
                if let Some(sums) = &mut sums {
                    sums.touch_edges(to, len)?;
                }
                let mut done = 0;
                while done < len {
                    let n = (len - done).min(ZEROES.len() as u64);
                    media.write(to.0, to.1 + done, &ZEROES[..n as usize])?;
                    done += n;
                }
                if !planted(Bug::ZeroesNotFlushed) {
                    media.persist(to.0, to.1, len)?;
                }
                if let Some(sums) = &mut sums {
                    sums.zeroed(to, len)?;
                }
            }
            CopyItem::Fresh { to, len } => {
                if let Some(sums) = &mut sums {
                    sums.fresh(to, len);
                }
            }
            CopyItem::Summing(summing) => {
                if let Some(mut before) = sums.take() {
                    before.finish()?;
                }
                sums = Some(Sums::new(media, summing));
            }
        }
        at = Cursor { item: at.item + 1, bytes: 0 };
    }
    sums.map_or(Ok(()), |mut sums| sums.finish())
}

/// What a block was before a part of it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    /// As it should be, or nobody's, or nothing is known.
    Right,
    Wrong,
}

/// The sums of what is being copied.
struct Sums<'a> {
    media: &'a dyn Media,
    summing: Summing,
    /// Blocks of which a part was written, by arena and number: their entries are not right yet.
    pending: BTreeMap<(u32, u64), Before>,
    /// Bytes of arenas that were copied from blocks that are wrong, in the run under way.
    wrong: Vec<(u64, u64)>,
    buffer: Vec<u8>,
}

/// The number of an arena; nothing else has sums.
const fn arena(segment: Segment) -> Option<u32> {
    match segment {
        Segment::Arena(arena) => Some(arena),
        _ => None,
    }
}

/// The blocks that lie in a range as a whole.
const fn whole_blocks(at: u64, len: u64) -> (u64, u64) {
    (at.div_ceil(BLOCK_BYTES), (at + len) / BLOCK_BYTES)
}

impl<'a> Sums<'a> {
    fn new(media: &'a dyn Media, summing: Summing) -> Self {
        let (pending, wrong, buffer) = (BTreeMap::new(), Vec::new(), vec![0; BLOCK_BYTES as usize]);
        Self { media, summing, pending, wrong, buffer }
    }

    /// Whether a block is not what its entry says.
    fn is_wrong(&mut self, arena: u32, block: u64) -> Result<bool, MediaError> {
        let (segment, base) = (Segment::Arena(arena), self.summing.base);
        Ok(read_block(self.media, base, segment, block, &mut self.buffer)?.is_some())
    }

    /// A part of a block is about to be written.
    fn touch(&mut self, arena: u32, block: u64) -> Result<(), MediaError> {
        if self.pending.contains_key(&(arena, block)) {
            return Ok(());
        }
        let compares = !self.summing.again || planted(Bug::ReplayCompared);
        let wrong = compares && self.is_wrong(arena, block)? && !planted(Bug::RotBlessed);
        let before = if wrong { Before::Wrong } else { Before::Right };
        if self.pending.len() >= PENDING {
            self.finish()?;
        }
        self.pending.insert((arena, block), before);
        Ok(())
    }

    /// The blocks at both ends of a range, where they are written in part.
    fn touch_edges(&mut self, to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        let Some(arena) = arena(to.0).filter(|_| len > 0) else { return Ok(()) };
        let (begin, end) = (to.1, to.1 + len);
        let (first, last) = (begin / BLOCK_BYTES, (end - 1) / BLOCK_BYTES);
        let in_part = |block: u64| block * BLOCK_BYTES < begin || (block + 1) * BLOCK_BYTES > end;
        if in_part(first) {
            self.touch(arena, first)?;
        }
        if last > first && in_part(last) {
            self.touch(arena, last)?;
        }
        Ok(())
    }

    fn fresh(&mut self, to: (Segment, u64), len: u64) {
        let Some(arena) = arena(to.0).filter(|_| !planted(Bug::FreshCompared)) else { return };
        for block in to.1 / BLOCK_BYTES..(to.1 + len).div_ceil(BLOCK_BYTES) {
            self.pending.insert((arena, block), Before::Right);
        }
    }

    /// A run is about to be copied.
    fn before(&mut self, run: &Run) -> Result<(), MediaError> {
        self.wrong.clear();
        if let &[(segment, at, len)] = &run.from[..]
            && let Some(source) = arena(segment)
        {
            // It may have been written just now.
            self.finish()?;
            for block in at / BLOCK_BYTES..(at + len).div_ceil(BLOCK_BYTES) {
                if self.is_wrong(source, block)? && !planted(Bug::CopiedRotBlessed) {
                    let from = (block * BLOCK_BYTES).max(at) - at;
                    let to = ((block + 1) * BLOCK_BYTES).min(at + len) - at;
                    self.wrong.push((run.to.1 + from, run.to.1 + to));
                }
            }
        }
        self.touch_edges(run.to, run.len)
    }

    fn is_wrong_now(&self, block: u64) -> bool {
        let (from, to) = (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
        self.wrong.iter().any(|&(a, b)| a < to && from < b)
    }

    /// A run was copied.
    fn copied(&mut self, run: &Run) -> Result<(), MediaError> {
        let Some(arena) = arena(run.to.0) else { return Ok(()) };
        if !self.wrong.is_empty() {
            let (from, to) = (run.to.1 / BLOCK_BYTES, (run.to.1 + run.len).div_ceil(BLOCK_BYTES));
            for block in from..to {
                if self.is_wrong_now(block)
                    && let Some(before) = self.pending.get_mut(&(arena, block))
                {
                    *before = Before::Wrong;
                }
            }
        }
        let (first, last) = whole_blocks(run.to.1, run.len);
        if first >= last {
            return Ok(());
        }
        let mut skip = first * BLOCK_BYTES - run.to.1;
        let mut left = (last - first) * BLOCK_BYTES;
        let mut entries = Vec::with_capacity(((last - first) * SUM_BYTES) as usize);
        let (mut crc, mut filled, mut block) = (0, 0, first);
        for &(segment, at, len) in &run.from {
            let gone = skip.min(len);
            skip -= gone;
            let (mut at, end) = (at + gone, at + gone + (len - gone).min(left));
            left -= end - at;
            while at < end {
                let n = (end - at).min(BLOCK_BYTES - filled);
                crc = self.media.sum(segment, at, n, crc)?;
                (at, filled) = (at + n, filled + n);
                if filled == BLOCK_BYTES {
                    let wrong = self.is_wrong_now(block);
                    let sum = if wrong { Sum::wrong } else { Sum::new };
                    entries.extend(sum(crc, self.summing.position).encode());
                    (crc, filled, block) = (0, 0, block + 1);
                }
            }
        }
        self.store(arena, first, &entries)
    }

    /// A range was filled with zeroes.
    fn zeroed(&mut self, to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        let Some(arena) = arena(to.0) else { return Ok(()) };
        let (first, last) = whole_blocks(to.1, len);
        if first >= last {
            return Ok(());
        }
        let sum = Sum::new(crc32c(0, &ZEROES), self.summing.position).encode();
        self.store(arena, first, &sum.repeat((last - first) as usize))
    }

    /// Stores entries of blocks that were written as a whole.
    fn store(&mut self, arena: u32, first: u64, entries: &[u8]) -> Result<(), MediaError> {
        let blocks = first..first + entries.len() as u64 / SUM_BYTES;
        if !self.pending.is_empty() {
            self.pending.retain(|(a, block), _| *a != arena || !blocks.contains(block));
        }
        let (segment, at) = (Segment::Arena(arena), sum_at(self.summing.base, first));
        self.media.write(segment, at, entries)?;
        if planted(Bug::SumNotFlushed) {
            return Ok(());
        }
        self.media.persist(segment, at, entries.len() as u64)
    }

    /// Sums the blocks of which a part was written.
    fn finish(&mut self) -> Result<(), MediaError> {
        for ((arena, block), before) in std::mem::take(&mut self.pending) {
            if planted(Bug::PartlyWrittenUnsummed) {
                continue;
            }
            let segment = Segment::Arena(arena);
            let crc = self.media.sum(segment, block * BLOCK_BYTES, BLOCK_BYTES, 0)?;
            let sum = if before == Before::Wrong { Sum::wrong } else { Sum::new };
            self.store(arena, block, &sum(crc, self.summing.position).encode())?;
        }
        Ok(())
    }
}

/// Reads a block into the front of `buffer`. What its entry says, if the block is another one or nothing is known of it: every
/// block with content has an entry, so that one is rotten.
pub fn read_block(
    media: &dyn Media,
    base: u64,
    arena: Segment,
    block: u64,
    buffer: &mut [u8],
) -> Result<Option<Sum>, MediaError> {
    let buffer = &mut buffer[..BLOCK_BYTES as usize];
    media.read(arena, block * BLOCK_BYTES, buffer)?;
    let sum = read_sum(media, base, arena, block)?;
    Ok(Some(sum).filter(|sum| !sum.is_known() || !sum.is_of(buffer)))
}

/// The entry of a block.
pub fn read_sum(
    media: &dyn Media,
    base: u64,
    arena: Segment,
    block: u64,
) -> Result<Sum, MediaError> {
    let mut entry = [0; SUM_BYTES as usize];
    media.read(arena, sum_at(base, block), &mut entry)?;
    Ok(Sum::decode(entry))
}
