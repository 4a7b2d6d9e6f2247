//! Which snapshots have which blocks. Nothing of it is on media: it follows from the extents of the states.
//!
//! A block is in all snapshots that were made while it was in extents of the working state, and states follow each other: so
//! it is in those from its *birth* to its *death*. Where it was born before the oldest snapshot nothing is known of it, and
//! need not be: all that are older than its death have it. Of others the birth is noted, as the lowest number that a snapshot
//! can have which has it. (Snapshots are numbered here by the transactions that ended with them: numbers of this member,
//! which grow, and none of which is next to another.) One that is in extents no more hangs on the last snapshot
//! that has it. When that is given up it hangs on the one before, if that has it, or is free.
//!
//! What is always true:
//! - Where there is no snapshot nothing is noted.
//! - A block that hangs on a snapshot is in no extent of the working state.
//! - Notes of births do not overlap.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};

use super::Blocks;

/// See the module.
#[derive(Debug, Default)]
pub struct Ages {
    /// Births after the oldest snapshot: by arena and first block, the length and the number.
    births: BTreeMap<(u32, u64), (u64, u64)>,
    /// Snapshots by number.
    snapshots: BTreeMap<u64, Hung>,
    /// How many blocks those are in all.
    dead: u64,
    /// A number behind those of all snapshots that were, and not behind that of the next.
    next: u64,
}

/// What hangs on a snapshot.
#[derive(Debug, Default)]
struct Hung {
    blocks: Vec<Blocks>,
    /// Blocks of these that no other snapshot has.
    own: u64,
}

/// The part of blocks that was born at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    blocks: Blocks,
    birth: u64,
}

impl Ages {
    /// Blocks that hang on snapshots.
    pub const fn dead(&self) -> u64 {
        self.dead
    }

    /// How many snapshots there are.
    pub fn len(&self) -> usize {
        self.snapshots.len()
    }

    /// Whether there is a snapshot.
    pub fn any(&self) -> bool {
        !self.snapshots.is_empty()
    }

    /// A snapshot is made: it has all that is in extents now.
    pub fn snapshot(&mut self, number: u64) {
        self.snapshots.insert(number, Hung::default());
        self.next = number + 1;
    }

    /// What snapshots there are, as found at open.
    pub fn of(numbers: impl Iterator<Item = u64>) -> Self {
        let snapshots: BTreeMap<u64, Hung> =
            numbers.map(|number| (number, Hung::default())).collect();
        let next = snapshots.last_key_value().map_or(0, |(last, _)| last + 1);
        Self { snapshots, next, ..Self::default() }
    }

    /// What is born now is noted by this number.
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// The last snapshot.
    fn newest(&self) -> Option<u64> {
        self.snapshots.last_key_value().map(|(number, _)| *number)
    }

    /// Blocks come into extents of the working state.
    pub fn born(&mut self, blocks: Blocks) {
        if self.any() {
            self.note(blocks, self.next);
        }
    }

    /// Blocks were born then. None of them is noted.
    fn note(&mut self, blocks: Blocks, birth: u64) {
        let Blocks { arena, mut block, mut len } = blocks;
        if let Some((&(a, first), &(n, same))) = self.births.range(..(arena, block)).next_back()
            && (a, first + n, same) == (arena, block, birth)
        {
            self.births.remove(&(arena, first));
            (block, len) = (first, len + n);
        }
        if let Some(&(n, same)) = self.births.get(&(arena, block + len))
            && same == birth
        {
            self.births.remove(&(arena, block + len));
            len += n;
        }
        self.births.insert((arena, block), (len, birth));
    }

    /// Nothing is known any more of when these blocks were born.
    fn forget(&mut self, blocks: Blocks) {
        for part in self.parts(blocks).into_iter().filter(|part| part.birth > 0) {
            let Blocks { arena, block, len } = part.blocks;
            let Some((&(_, first), &(n, birth))) = self.births.range(..=(arena, block)).next_back()
            else {
                continue;
            };
            self.births.remove(&(arena, first));
            let (end, rest) = (block + len, first + n);
            if first < block {
                self.births.insert((arena, first), (block - first, birth));
            }
            if end < rest {
                self.births.insert((arena, end), (rest - end, birth));
            }
        }
    }

    /// The blocks by when they were born; 0: before the oldest snapshot.
    fn parts(&self, blocks: Blocks) -> Vec<Part> {
        let Blocks { arena, block, len } = blocks;
        let (end, mut at, mut parts) = (block + len, block, Vec::new());
        let mut add = |from: u64, to: u64, birth| {
            if from < to {
                parts.push(Part { blocks: Blocks { arena, block: from, len: to - from }, birth });
            }
        };
        let before = self.births.range(..(arena, block)).next_back();
        let before = before.filter(|((a, first), (n, _))| *a == arena && first + n > block);
        for (&(_, first), &(n, birth)) in
            before.into_iter().chain(self.births.range((arena, block)..(arena, end)))
        {
            let (from, to) = (first.max(block), (first + n).min(end));
            add(at, from, 0);
            add(from, to, birth);
            at = to;
        }
        add(at, end, 0);
        parts
    }

    /// The blocks, in order, and of each whether a snapshot has it: whoever writes there writes to another block.
    pub fn frozen(&self, blocks: Blocks) -> Vec<(Blocks, bool)> {
        let Some(newest) = self.newest() else { return vec![(blocks, false)] };
        let mut found: Vec<(Blocks, bool)> = Vec::new();
        for part in self.parts(blocks) {
            let frozen = part.birth <= newest && !planted(Bug::SnapshotInPlace);
            match found.last_mut() {
                Some((before, same)) if *same == frozen => before.len += part.blocks.len,
                _ => found.push((part.blocks, frozen)),
            }
        }
        found
    }

    /// Blocks leave the extents of the working state: those of them that no snapshot has.
    pub fn die(&mut self, blocks: Blocks) -> Vec<Blocks> {
        let Some(newest) = self.newest() else { return vec![blocks] };
        let mut free = Vec::new();
        for (part, frozen) in self.frozen(blocks) {
            if frozen && !planted(Bug::SnapshotBlocksFreed) {
                self.hang(newest, part);
            } else {
                self.forget(part);
                free.push(part);
            }
        }
        free
    }

    /// Blocks hang on a snapshot, which and of which none was born later than it.
    fn hang(&mut self, number: u64, blocks: Blocks) {
        self.dead += blocks.len;
        let own = self.own_of(number, &[blocks]);
        let hung = self.snapshots.entry(number).or_default();
        hung.own += own;
        match hung.blocks.last_mut() {
            Some(last) if last.arena == blocks.arena && last.block + last.len == blocks.block => {
                last.len += blocks.len;
            }
            _ => hung.blocks.push(blocks),
        }
    }

    /// A snapshot is given up: the blocks that no other has.
    pub fn drop_snapshot(&mut self, number: u64) -> Vec<Blocks> {
        let Some(hung) = self.snapshots.remove(&number) else { return Vec::new() };
        let before = self.snapshots.range(..number).next_back().map(|(before, _)| *before);
        let mut free = Vec::new();
        for blocks in hung.blocks {
            self.dead -= blocks.len;
            for part in self.parts(blocks) {
                let had = before.filter(|before| part.birth <= *before);
                match had.filter(|_| !planted(Bug::SnapshotBeforeForgotten)) {
                    Some(before) => self.hang(before, part.blocks),
                    None => {
                        self.forget(part.blocks);
                        free.push(part.blocks);
                    }
                }
            }
        }
        if self.snapshots.is_empty() {
            self.births.clear();
        }
        // What it shared with the one given up is its own now.
        if let Some(after) = self.snapshots.range(number..).next().map(|(after, _)| *after) {
            self.count_own(after);
        }
        free
    }

    fn count_own(&mut self, number: u64) {
        let Some(hung) = self.snapshots.get(&number) else { return };
        let own = self.own_of(number, &hung.blocks);
        if let Some(hung) = self.snapshots.get_mut(&number) {
            hung.own = own;
        }
    }

    /// All was found at open.
    pub fn found_all(&mut self) {
        let numbers: Vec<u64> = self.snapshots.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.count_own(number));
    }

    /// Blocks of these, which hang on a snapshot, that no other has.
    fn own_of(&self, number: u64, blocks: &[Blocks]) -> u64 {
        let before = self.snapshots.range(..number).next_back().map(|(before, _)| *before);
        let Some(before) = before else { return blocks.iter().map(|b| b.len).sum() };
        let of = |part: &Part| if part.birth > before { part.blocks.len } else { 0 };
        blocks.iter().flat_map(|blocks| self.parts(*blocks)).map(|part| of(&part)).sum()
    }

    /// Blocks that are free once this snapshot alone is given up.
    pub fn own(&self, number: u64) -> u64 {
        self.snapshots.get(&number).map_or(0, |hung| hung.own)
    }

    /// Found at open: the last snapshot that has these blocks.
    pub fn found_dead(&mut self, number: u64, blocks: Blocks) {
        self.hang(number, blocks);
    }

    /// Found at open: the first snapshot that has these blocks, or that can have them. Those of them are passed over of which
    /// it was found before, as `known` says.
    pub fn found_born(&mut self, number: u64, blocks: Blocks, known: &mut Known) {
        let oldest = self.snapshots.first_key_value().is_some_and(|(first, _)| *first == number);
        for part in known.add(blocks) {
            if !oldest {
                self.note(part, number);
            }
        }
    }

    /// See the module.
    pub fn invariants(&self) -> Result<(), String> {
        let all = self.snapshots.values().flat_map(|hung| &hung.blocks);
        let hung: u64 = all.map(|blocks| blocks.len).sum();
        base::always!(
            hung == self.dead,
            "{hung} blocks hang on snapshots, and {} should",
            self.dead
        );
        let any = self.any();
        base::always!(any || self.births.is_empty(), "births are noted, and there is no snapshot");
        let mut end = (0, 0);
        for (&(arena, block), &(len, birth)) in &self.births {
            let apart = (arena, block) >= end && len > 0 && birth > 0;
            base::always!(apart, "notes of births meet at block {block} of arena {arena}");
            end = (arena, block + len);
        }
        Ok(())
    }
}

/// Blocks that a walk has come by.
#[derive(Debug, Default)]
pub struct Known(BTreeMap<(u32, u64), u64>);

impl Known {
    /// Those of these that it has not come by before.
    pub fn add(&mut self, blocks: Blocks) -> Vec<Blocks> {
        let Blocks { arena, block, len } = blocks;
        let (end, mut at, mut new) = (block + len, block, Vec::new());
        let (mut first, mut last) = (block, end);
        let before = self.0.range(..(arena, block)).next_back().map(|(at, end)| (*at, *end));
        let met = before.filter(|((a, _), until)| *a == arena && *until >= block).into_iter();
        let met: Vec<_> = met
            .chain(self.0.range((arena, block)..=(arena, end)).map(|(at, end)| (*at, *end)))
            .collect();
        for ((_, from), until) in met {
            self.0.remove(&(arena, from));
            (first, last) = (first.min(from), last.max(until));
            if at < from.min(end) {
                new.push(Blocks { arena, block: at, len: from.min(end) - at });
            }
            at = at.max(until);
        }
        if at < end {
            new.push(Blocks { arena, block: at, len: end - at });
        }
        self.0.insert((arena, first), last);
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn blocks(block: u64, len: u64) -> Blocks {
        Blocks { arena: 0, block, len }
    }

    /// The states themselves, block by block.
    #[derive(Default)]
    struct Model {
        live: std::collections::BTreeSet<u64>,
        snapshots: BTreeMap<u64, std::collections::BTreeSet<u64>>,
    }

    impl Model {
        fn has(&self, block: u64) -> bool {
            self.snapshots.values().any(|s| s.contains(&block))
        }
    }

    #[test]
    fn a_block_is_free_when_no_state_has_it() {
        for seed in 0..300u64 {
            let mut random = base::random::Random::new(seed);
            let (mut ages, mut model, mut number) = (Ages::default(), Model::default(), 0);
            for _ in 0..200 {
                let (at, len) = (random.below(40), 1 + random.below(6));
                match random.below(8) {
                    0 => {
                        number += 2;
                        ages.snapshot(number);
                        model.snapshots.insert(number, model.live.clone());
                    }
                    1 if number > 0 => {
                        let which = 2 * (1 + random.below(number / 2));
                        let before: Vec<u64> = (0..64).filter(|b| model.has(*b)).collect();
                        if model.snapshots.remove(&which).is_some() {
                            let own = before.iter().filter(|b| !model.has(**b));
                            let own: Vec<u64> =
                                own.filter(|b| !model.live.contains(b)).copied().collect();
                            assert_eq!(ages.own(which), own.len() as u64, "seed {seed}");
                            let mut free: Vec<u64> = ages
                                .drop_snapshot(which)
                                .iter()
                                .flat_map(|b| b.block..b.block + b.len)
                                .collect();
                            free.sort_unstable();
                            assert_eq!(free, own, "seed {seed}");
                        }
                    }
                    2..=4 => {
                        // What nobody has may be allocated.
                        let free = |b: &u64| !model.live.contains(b) && !model.has(*b);
                        let run: Vec<u64> = (at..at + len).take_while(free).collect();
                        if !run.is_empty() {
                            ages.born(blocks(at, run.len() as u64));
                            model.live.extend(run);
                        }
                    }
                    _ => {
                        let run: Vec<u64> =
                            (at..at + len).take_while(|b| model.live.contains(b)).collect();
                        if run.is_empty() {
                            continue;
                        }
                        let range = blocks(at, run.len() as u64);
                        for (part, frozen) in ages.frozen(range) {
                            for block in part.block..part.block + part.len {
                                assert_eq!(frozen, model.has(block), "seed {seed}, block {block}");
                            }
                        }
                        model.live.retain(|b| !run.contains(b));
                        let free: Vec<u64> =
                            ages.die(range).iter().flat_map(|b| b.block..b.block + b.len).collect();
                        let none: Vec<u64> =
                            run.iter().filter(|b| !model.has(**b)).copied().collect();
                        assert_eq!(free, none, "seed {seed}");
                    }
                }
                ages.invariants().unwrap();
                let dead = (0..64).filter(|b| model.has(*b) && !model.live.contains(b)).count();
                assert_eq!(ages.dead(), dead as u64, "seed {seed}");
            }
            // As after a crash: from the states alone.
            let mut known = Known::default();
            let mut found = Ages::of(model.snapshots.keys().copied());
            let mut seen = model.live.clone();
            for (n, state) in model.snapshots.iter().rev() {
                for block in state.iter().filter(|b| !seen.contains(b)) {
                    found.found_dead(*n, blocks(*block, 1));
                }
                seen.extend(state);
            }
            for (n, state) in &model.snapshots {
                state.iter().for_each(|b| found.found_born(*n, blocks(*b, 1), &mut known));
            }
            if found.any() {
                let next = found.next();
                model.live.iter().for_each(|b| found.found_born(next, blocks(*b, 1), &mut known));
            }
            found.found_all();
            found.invariants().unwrap();
            for n in model.snapshots.keys() {
                assert_eq!(found.own(*n), ages.own(*n), "seed {seed}");
            }
            for block in &model.live {
                let one = blocks(*block, 1);
                assert_eq!(found.frozen(one), ages.frozen(one), "seed {seed}");
            }
        }
    }
}
