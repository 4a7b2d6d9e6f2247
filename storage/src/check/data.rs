//! Reads the content of all files, and compares each block with its checksum.
//!
//! After a crash blocks may differ that the stream ring is about to write anew: they are excused, and no others. Which
//! they are follows from the operations behind the published state ([`Touched`]).

use std::collections::BTreeMap;

use base::InodeId;

use super::items::Items;
use super::{HEAL, Report, Severity};
use crate::format::entry::Op;
use crate::format::item::Run;
use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::format::superblock::Superblock;
use crate::limits::BLOCK_BYTES;
use crate::media::{Media, MediaError, Segment};

/// Blocks read at a time.
const READ_BLOCKS: u64 = 64;

/// Blocks of a file, as it is published, that an operation may overwrite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touched {
    /// File.
    pub ino: InodeId,
    /// First block.
    pub from: u64,
    /// The block after the last.
    pub to: u64,
}

impl Touched {
    /// Those of an operation that is not published.
    pub fn by(op: &Op<'_>) -> Vec<Self> {
        let bytes = |ino, offset: u64, len: u64| {
            let end = offset.saturating_add(len).div_ceil(BLOCK_BYTES);
            Self { ino, from: offset / BLOCK_BYTES, to: end }
        };
        let all = |ino| Self { ino, from: 0, to: u64::MAX };
        match *op {
            Op::Write { ino, offset, data, .. } => vec![bytes(ino, offset, data.len() as u64)],
            Op::Truncate { ino, size, .. } => vec![bytes(ino, size, 1)],
            Op::Fallocate { ino, offset, len, .. } => vec![bytes(ino, offset, len)],
            // Operations behind it may overwrite blocks that were its source's when it is gone.
            Op::CloneRange { ino, offset, len, source, .. } => {
                vec![bytes(ino, offset, len), all(source)]
            }
            // Operations behind it have other places for the same blocks.
            Op::Shift { ino, .. } => vec![all(ino)],
            // Writes to what ends in the same chunk are not in it, though the head has done them.
            Op::Reap { ino } => vec![all(ino)],
            _ => Vec::new(),
        }
    }
}

/// What reading all content takes.
pub struct Data<'a> {
    /// What the stream ring holds behind the published state.
    pub pending: &'a [Touched],
    /// Is told how many blocks of how many were read.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

impl std::fmt::Debug for Data<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Data").field("pending", &self.pending.len()).finish_non_exhaustive()
    }
}

/// Blocks of arenas, as runs that neither overlap nor touch.
#[derive(Debug, Default)]
struct Places(BTreeMap<(u32, u64), u64>);

impl Places {
    /// Adds a run, joined with those that it meets.
    fn add(&mut self, arena: u32, mut from: u64, mut to: u64) {
        while let Some((&(a, first), &end)) = self.0.range(..=(arena, to)).next_back()
            && a == arena
            && end >= from
        {
            self.0.remove(&(arena, first));
            (from, to) = (from.min(first), to.max(end));
        }
        self.0.insert((arena, from), to);
    }

    /// The run that a block lies in: up to where it goes.
    fn end_of(&self, arena: u32, block: u64) -> Option<u64> {
        let (&(a, _), &end) = self.0.range(..=(arena, block)).next_back()?;
        (a == arena && block < end).then_some(end)
    }

    /// Where the first run behind a block begins.
    fn next_from(&self, arena: u32, block: u64) -> Option<u64> {
        let (&(a, first), _) = self.0.range((arena, block.saturating_add(1))..).next()?;
        (a == arena).then_some(first)
    }

    fn has(&self, arena: u32, block: u64) -> bool {
        self.end_of(arena, block).is_some()
    }
}

impl Data<'_> {
    pub(super) fn check(
        &mut self,
        media: &dyn Media,
        items: &Items,
        superblock: &Superblock,
        report: &mut Report,
    ) -> Result<(), MediaError> {
        let Some(base) = superblock.sums_base() else { return Ok(()) };
        let excused = self.excused(items);
        // Only what lies where it may; the rest is damage that was found.
        let readable = |run: &Run| {
            !run.unwritten
                && items.arenas.contains_key(&run.arena)
                && run.block + run.len <= superblock.capacity_blocks
        };
        let runs = items.runs.iter().chain(&items.dead);
        let runs: Vec<_> = runs.filter(|(_, run)| readable(run)).collect();
        let (all, mut done) = (runs.iter().map(|(_, run)| run.len).sum(), 0);
        let mut seen = Places::default();
        for (ino, run) in runs {
            let end = run.block + run.len;
            let mut at = run.block;
            while at < end {
                // What is shared is read once: up to the next block that was seen, or that was not.
                let known = seen.end_of(run.arena, at);
                let most = known.or_else(|| seen.next_from(run.arena, at)).unwrap_or(end);
                let to = end.min(most);
                let blocks = if known.is_some() { to - at } else { (to - at).min(READ_BLOCKS) };
                let file = run.file + (at - run.block);
                if known.is_none() {
                    let part = Run { file, block: at, len: blocks, ..*run };
                    read(media, (*ino, &part), base, &excused, report)?;
                }
                at += blocks;
                done += blocks;
                (self.progress)(done, all);
            }
            if !items.shared.is_empty() || !items.dead.is_empty() {
                seen.add(run.arena, run.block, end);
            }
        }
        Ok(())
    }

    fn excused(&self, items: &Items) -> Places {
        let mut of: BTreeMap<u64, Vec<&Touched>> = BTreeMap::new();
        // What was cloned from a snapshot may be overwritten when that is gone, which is not published either. (Items that no
        // newer state has changed are those of the file as well.)
        let mut then: BTreeMap<u64, Vec<&Touched>> = BTreeMap::new();
        for touched in self.pending {
            let snapshot = touched.ino.of_snapshot();
            let ino = snapshot.map_or(touched.ino, |(_, ino)| ino);
            of.entry(ino.0).or_default().push(touched);
            if snapshot.is_some() {
                then.entry(ino.0).or_default().push(touched);
            }
        }
        let mut places = Places::default();
        let dead = items.dead.iter().map(|run| (run, &then));
        for ((ino, run), of) in items.runs.iter().map(|run| (run, &of)).chain(dead) {
            for touched in of.get(ino).into_iter().flatten() {
                let (from, to) = (touched.from.max(run.file), touched.to.min(run.end()));
                if from < to {
                    let block = |at: u64| run.block + (at - run.file);
                    places.add(run.arena, block(from), block(to));
                }
            }
        }
        places
    }
}

fn read(
    media: &dyn Media,
    (ino, run): (u64, &Run),
    base: u64,
    excused: &Places,
    report: &mut Report,
) -> Result<(), MediaError> {
    let segment = Segment::Arena(run.arena);
    let mut bytes = vec![0; (run.len * BLOCK_BYTES) as usize];
    let mut entries = vec![0; (run.len * SUM_BYTES) as usize];
    media.read(segment, run.block * BLOCK_BYTES, &mut bytes)?;
    media.read(segment, sum_at(base, run.block), &mut entries)?;
    let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
    let (entries, _) = entries.as_chunks::<{ SUM_BYTES as usize }>();
    for (n, (bytes, entry)) in (0..).zip(blocks.zip(entries)) {
        let sum = Sum::decode(*entry);
        report.counts.compared += 1;
        report.counts.unsummed += u64::from(!sum.is_known());
        if sum.is_known() && sum.is_of(bytes) {
            continue;
        }
        if excused.has(run.arena, run.block + n) {
            report.counts.excused += 1;
            continue;
        }
        report.counts.rotten += 1;
        let place = format!("inode {ino}, block {}", run.file + n);
        let what =
            if sum.is_known() { "is not what its checksum says" } else { "has lost its checksum" };
        let problem = format!("{what} (arena {}, block {})", run.arena, run.block + n);
        report.add(Severity::Damage, place, problem, HEAL);
    }
    Ok(())
}
