//! A volume is begun anew, and what it held before is kept: for as long as its new state, which comes from elsewhere, may
//! have the same content in the same place of the same file.
//!
//! What is always true:
//! - The blocks of the state before are held back (`space`): they are nobody's, and are not written to.
//! - A block is taken over as it is, with its checksum: no byte of it is written. That it has the checksum that it should have
//!   says that it may be right ([`Volume::may_have`]), and no more: other bytes may have the same one, and whoever writes
//!   to the file can see to that. Who has the content compares what the bytes come to under a key that nobody knew when
//!   they were written ([`Keyed`]); what he has found to be the same is taken over ([`Volume::take_over`]).

use base::planted::{Bug, planted};
use base::{Epoch, InodeId, StreamSeq};

use super::data::push;
use super::{Blocks, Fault, Params, Refusal, View, Volume, quota, share};
use crate::format::item::{Inode, Run, kind};
use crate::format::page::Key;
use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::limits::BLOCK_BYTES;
use crate::media::Segment;

/// Blocks compared at a time.
const COMPARED: u64 = 64;

/// What the bytes of blocks come to under a key: a polynomial in it, whose coefficients they are, modulo 2^61 - 1. Of two
/// different sequences of 2^20 words the result is the same under one key in 2^41, and which these are depends on both; it is
/// no secret once it is known what it is of, so a key serves for one snapshot.
#[derive(Debug)]
pub struct Keyed {
    key: u64,
    lanes: [u64; LANES],
}

/// Polynomials side by side, each of every fourth word, so that none waits for the one before.
const LANES: usize = 4;
const PRIME: u64 = (1 << 61) - 1;

/// A product modulo 2^61 - 1, plus a word.
fn step(sum: u64, key: u64, word: u32) -> u64 {
    let product = u128::from(sum) * u128::from(key) + u128::from(word);
    let folded = (product as u64 & PRIME) + (product >> 61) as u64;
    if folded >= PRIME { folded - PRIME } else { folded }
}

impl Keyed {
    /// Of nothing.
    pub fn new(key: u64) -> Self {
        // (0 and 1 would tell little.)
        Self { key: key % (PRIME - 2) + 2, lanes: [1; LANES] }
    }

    /// Of what it was of, and these bytes; a multiple of 16.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks::<4>();
        let key = self.key;
        let [mut a, mut b, mut c, mut d] = self.lanes;
        for four in words.chunks_exact(LANES) {
            a = step(a, key, u32::from_le_bytes(four[0]));
            b = step(b, key, u32::from_le_bytes(four[1]));
            c = step(c, key, u32::from_le_bytes(four[2]));
            d = step(d, key, u32::from_le_bytes(four[3]));
        }
        self.lanes = [a, b, c, d];
    }

    /// What they come to.
    pub fn end(&self) -> u64 {
        let words = self.lanes.iter().flat_map(|lane| [*lane as u32, (*lane >> 32) as u32]);
        words.fold(1, |sum, word| step(sum, self.key, word))
    }
}

/// Runs that a file may have, and the other blocks: first and number.
pub type Found = (Vec<Run>, Vec<(u64, u64)>);

/// Adds a block to ranges in order.
pub(super) fn add(ranges: &mut Vec<(u64, u64)>, block: u64) {
    match ranges.last_mut() {
        Some((first, count)) if *first + *count == block => *count += 1,
        _ => ranges.push((block, 1)),
    }
}

impl Volume {
    /// Empties the volume, in one transaction that is published here: a state of before the stream. The view shows what was
    /// published before, whose blocks are held back until they are taken over or let go ([`Volume::let_all_go`]). The
    /// caller has published all that was done.
    pub fn begin_anew(&mut self, params: &Params) -> Result<View, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        assert!(self.copies.is_empty(), "what was done is published");
        let view = self.view();
        let done = self.empty(params);
        done.inspect_err(|_| self.condemned.set(true))?;
        let sealed = self.seal(StreamSeq(0), Epoch(0), &[])?;
        self.publish(sealed)?;
        Ok(view)
    }

    fn empty(&mut self, params: &Params) -> Result<(), Fault> {
        self.tree.clear()?;
        self.space.hold_all();
        self.shares = share::Shares::default();
        self.accounts = quota::Accounts::default();
        (self.unplaced, self.moved) = (0, super::parts::Moved::default());
        self.snapshots = super::snapshots::Snapshots::default();
        for (arena, class) in self.arenas() {
            self.tree.put(Key::new(0, kind::ARENA, u64::from(arena)), &class.encode())?;
        }
        self.make_root(params)
    }

    /// Blocks that are held back.
    pub fn held(&self) -> u64 {
        self.space.held()
    }

    /// What a file had in a state before is held back no more, as far as it is still.
    pub fn let_go(&mut self, before: &View, ino: InodeId) -> Result<(), Fault> {
        for run in before.runs(ino, 0, u64::MAX, usize::MAX)? {
            self.space.let_go(Blocks { arena: run.arena, block: run.block, len: run.len });
        }
        Ok(())
    }

    /// Nothing is held back any more. The blocks are free with the working transaction.
    pub fn let_all_go(&mut self) {
        self.space.let_all_go();
    }

    /// The CRC32C of some blocks of an arena. None: of one of them that is not known.
    pub fn crcs(&self, arena: u32, block: u64, count: u64) -> Result<Option<Vec<u32>>, Fault> {
        let Some(base) = self.sums_base() else { return Ok(None) };
        let sums = self.entries(base, arena, block, count)?;
        let known = sums.iter().all(Sum::is_known);
        Ok(known.then(|| sums.iter().map(|sum| sum.crc).collect()))
    }

    pub(super) fn entries(
        &self,
        base: u64,
        arena: u32,
        block: u64,
        count: u64,
    ) -> Result<Vec<Sum>, Fault> {
        let mut entries = Vec::new();
        let len = (count * SUM_BYTES) as usize;
        self.media.append(Segment::Arena(arena), sum_at(base, block), len, &mut entries)?;
        let (entries, _) = entries.as_chunks::<{ SUM_BYTES as usize }>();
        Ok(entries.iter().map(|entry| Sum::decode(*entry)).collect())
    }

    /// What blocks `first..end` of a file come to under a key. None: one of them has no content.
    pub fn keyed(
        &self,
        ino: InodeId,
        first: u64,
        end: u64,
        key: u64,
    ) -> Result<Option<u64>, Fault> {
        let runs = self.runs(ino, first, end, usize::MAX)?;
        let (mut at, mut cut) = (first, Vec::with_capacity(runs.len()));
        for run in runs.iter().filter(|run| !run.unwritten) {
            let run = run.cut(first, end);
            if run.file == at {
                at = run.end();
                cut.push(run);
            }
        }
        if at == end { self.keyed_of(&cut, key).map(Some) } else { Ok(None) }
    }

    /// What the blocks of runs come to under a key.
    pub fn keyed_of(&self, runs: &[Run], key: u64) -> Result<u64, Fault> {
        let (mut keyed, mut bytes) = (Keyed::new(key), Vec::new());
        for run in runs {
            for at in (0..run.len).step_by(COMPARED as usize) {
                let count = (run.len - at).min(COMPARED);
                bytes.clear();
                let (from, len) = ((run.block + at) * BLOCK_BYTES, (count * BLOCK_BYTES) as usize);
                self.media.append(Segment::Arena(run.arena), from, len, &mut bytes)?;
                keyed.add(&bytes);
            }
        }
        Ok(keyed.end())
    }

    /// Of some blocks of a file, from `first` on, which should have these CRC32C, the runs that it had in a state before, that are still
    /// held back, and that have them: in order, and of no block twice. And the other blocks, as first and number.
    pub fn may_have(
        &self,
        before: &View,
        ino: InodeId,
        first: u64,
        crcs: &[u32],
    ) -> Result<Found, Refusal> {
        let end = first + crcs.len() as u64;
        let (inode, mut found) = (self.need_file(ino)?, Vec::new());
        let arena = self.arena_for(inode.class());
        // What it has by now it keeps.
        let there = self.runs(ino, first, end, 1)?;
        if let Some(base) = self.sums_base().filter(|_| there.is_empty()) {
            for run in before.runs(ino, first, end, usize::MAX)? {
                if run.unwritten || Some(run.arena) != arena {
                    continue;
                }
                let run = run.cut(first, end);
                let blocks = Blocks { arena: run.arena, block: run.block, len: run.len };
                for blocks in self.space.held_of(blocks) {
                    let file = run.file + (blocks.block - run.block);
                    let held = run.cut(file, file + blocks.len);
                    let crcs = &crcs[(file - first) as usize..][..held.len as usize];
                    self.equal(base, &held, crcs, &mut found)?;
                }
            }
        }
        // A file that was cloned into itself has blocks in two places.
        let mut by_place: Vec<usize> = (0..found.len()).collect();
        by_place.sort_unstable_by_key(|i| found[*i].block);
        let (mut last, mut twice) = (0, Vec::new());
        for run in by_place.iter().map(|i| &found[*i]) {
            if run.block < last {
                twice.push(run.file);
            }
            last = last.max(run.block + run.len);
        }
        found.retain(|run| !twice.contains(&run.file));
        let (mut lacks, mut runs) = (Vec::new(), found.iter().peekable());
        for block in first..end {
            while runs.next_if(|run| run.end() <= block).is_some() {}
            if runs.peek().is_none_or(|run| block < run.file) {
                add(&mut lacks, block);
            }
        }
        Ok((found, lacks))
    }

    /// Adds the blocks of a run that have the checksums that they should have.
    fn equal(&self, base: u64, run: &Run, crcs: &[u32], found: &mut Vec<Run>) -> Result<(), Fault> {
        let mut bytes = Vec::new();
        for (n, crcs) in crcs.chunks(COMPARED as usize).enumerate() {
            let at = n as u64 * COMPARED;
            let (first, count) = (run.block + at, crcs.len());
            bytes.clear();
            let len = count * BLOCK_BYTES as usize;
            self.media.append(Segment::Arena(run.arena), first * BLOCK_BYTES, len, &mut bytes)?;
            let sums = self.entries(base, run.arena, first, count as u64)?;
            let blocks = bytes.chunks_exact(BLOCK_BYTES as usize).zip(sums).zip(crcs);
            for (file, ((bytes, sum), crc)) in (run.file + at..).zip(blocks) {
                let whole = sum.is_of(bytes) || planted(Bug::TakenOverRotten);
                let same = sum.is_known() && sum.crc == *crc && whole;
                if same || planted(Bug::TakenOverUnseen) {
                    push(found, run.cut(file, file + 1));
                }
            }
        }
        Ok(())
    }

    /// Gives a file blocks of a state before, which hold what they should, and lie one behind the other in the file. `false`: they are
    /// not all held back any more, or the file has something there.
    pub fn take_over(&mut self, ino: InodeId, runs: &[Run]) -> Result<bool, Refusal> {
        if self.condemned.get() {
            return Err(Fault::Condemned.into());
        }
        let mut inode = self.need_file(ino)?;
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Ok(true) };
        let range = (first.file, last.end());
        let held = |run: &Run| {
            let blocks = Blocks { arena: run.arena, block: run.block, len: run.len };
            self.space.held_of(blocks) == [blocks]
        };
        let there = self.runs(ino, range.0, range.1, 1)?;
        let arena = self.arena_for(inode.class());
        if !there.is_empty() || !runs.iter().all(|run| held(run) && Some(run.arena) == arena) {
            return Ok(false);
        }
        self.can_store(2 * runs.len() as u64, 0)?;
        let taken = self.take_runs(ino, &mut inode, range, runs);
        taken.inspect_err(|_| self.condemned.set(true))?;
        Ok(true)
    }

    /// Gives a file blocks that are held back, in a part of it that has none.
    fn take_runs(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        (first, end): (u64, u64),
        found: &[Run],
    ) -> Result<(), Fault> {
        if found.is_empty() {
            return Ok(());
        }
        let (held, base) = (inode.weight(), self.sums_base().unwrap_or(0));
        let old = self.runs(ino, first.saturating_sub(1), end + 1, usize::MAX)?;
        let (before, behind): (Vec<Run>, Vec<Run>) = old.iter().partition(|run| run.file < first);
        let mut new = Vec::with_capacity(old.len() + found.len());
        for run in before.iter().chain(found).chain(&behind) {
            push(&mut new, *run);
        }
        for run in found {
            let had = self.space.claim(Blocks { arena: run.arena, block: run.block, len: run.len });
            assert!(had, "the run was found held back");
            inode.blocks += run.len;
            // Whoever wrote it last may have been killed before he had written it back.
            let segment = Segment::Arena(run.arena);
            self.media.persist(segment, run.block * BLOCK_BYTES, run.len * BLOCK_BYTES)?;
            self.media.persist(segment, sum_at(base, run.block), run.len * SUM_BYTES)?;
        }
        self.moved.forget(ino);
        self.account_change(inode, held);
        self.put_inode(ino, inode)?;
        self.replace_runs(ino, &old, &new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_bytes_come_to_something_else_under_a_key() {
        let block: Vec<u8> = (0..4096).map(|i| (i * 7 / 3) as u8).collect();
        let of = |key, parts: &[&[u8]]| {
            let mut keyed = Keyed::new(key);
            parts.iter().for_each(|part| keyed.add(part));
            keyed.end()
        };
        // However it is cut.
        assert_eq!(of(9, &[&block]), of(9, &[&block[..1024], &block[1024..]]));
        assert_ne!(of(9, &[&block]), of(10, &[&block]));
        for bit in (0..8 * block.len()).step_by(61) {
            let mut flipped = block.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(9, &[&flipped]), of(9, &[&block]), "bit {bit}");
        }
        // Words that change places, lanes too, and zeroes at the end.
        for by in [4, 8, 16, 20] {
            let mut moved = block.clone();
            moved.rotate_left(by);
            assert_ne!(of(9, &[&moved]), of(9, &[&block]));
        }
        assert_ne!(of(9, &[&block, &[0; 16]]), of(9, &[&block]));
        assert_ne!(of(9, &[&[0; 16]]), of(9, &[&[0; 32]]));
        // The largest of everything.
        assert_ne!(of(u64::MAX, &[&[255; 4096]]), of(u64::MAX, &[&[255; 4080]]));
    }
}
