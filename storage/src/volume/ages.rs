//! Which snapshots have which blocks. Nothing of it is on media: it follows from the extents of the states.
//!
//! A block is in all snapshots that were made while it was in extents of the working state, and states follow each other: so
//! it is in those from its *birth* to its *death*. Where it was born before the oldest snapshot nothing is known of it, and
//! need not be: all that are older than its death have it. Of others the birth is noted, as the lowest number that a snapshot
//! can have which has it. (Snapshots are numbered here by the transactions that ended with them: numbers of this member,
//! which grow, and none of which is next to another.) One that is in extents no more hangs on the last snapshot
//! that has it. When that is given up it hangs on the one before, if that has it, or is free.
//!
//! A file that is cloned from a snapshot brings such a block back: it lives again. What is noted of it is then about its last
//! life, and those before it are kept beside, each by its birth and the last snapshot that has it. When the last life leaves no
//! snapshot behind, the one before it is the last again.
//!
//! What is always true:
//! - Where there is no snapshot nothing is noted.
//! - A block that hangs on a snapshot is in no extent of the working state.
//! - Notes of births do not overlap.
//! - Each life that is over has a snapshot, and lives of a block follow each other.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};

use super::Blocks;

/// Blocks with something that is said of them, as runs that do not overlap.
#[derive(Debug)]
struct Runs<V>(BTreeMap<(u32, u64), (u64, V)>);

impl<V> Default for Runs<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: Clone + PartialEq> Runs<V> {
    /// Says it of blocks of which nothing is said.
    fn put(&mut self, blocks: Blocks, value: V) {
        let Blocks { arena, mut block, mut len } = blocks;
        if let Some((&(a, first), (n, same))) = self.0.range(..(arena, block)).next_back()
            && (a, first + n) == (arena, block)
            && *same == value
        {
            (block, len) = (first, len + n);
            self.0.remove(&(arena, first));
        }
        if let Some((n, same)) = self.0.get(&(arena, block + len))
            && *same == value
        {
            let n = *n;
            self.0.remove(&(arena, block + len));
            len += n;
        }
        self.0.insert((arena, block), (len, value));
    }

    /// Nothing is said of these blocks any more: what was.
    fn take(&mut self, blocks: Blocks) -> Vec<(Blocks, V)> {
        let Blocks { arena, block, len } = blocks;
        let end = block + len;
        let before = self.0.range(..(arena, block)).next_back().map(|(at, (n, _))| (*at, *n));
        let before = before.filter(|((a, first), n)| *a == arena && first + n > block);
        let within = self.0.range((arena, block)..(arena, end)).map(|(at, _)| *at);
        let met: Vec<_> = before.map(|(at, _)| at).into_iter().chain(within).collect();
        let mut taken = Vec::with_capacity(met.len());
        for (_, first) in met {
            let Some((n, value)) = self.0.remove(&(arena, first)) else { continue };
            let (from, to) = (first.max(block), (first + n).min(end));
            if first < from {
                self.0.insert((arena, first), (from - first, value.clone()));
            }
            if to < first + n {
                self.0.insert((arena, to), (first + n - to, value.clone()));
            }
            taken.push((Blocks { arena, block: from, len: to - from }, value));
        }
        taken
    }

    /// All of these blocks, in order, and what is said of them.
    fn over(&self, blocks: Blocks) -> Vec<(Blocks, Option<&V>)> {
        let Blocks { arena, block, len } = blocks;
        let (end, mut at, mut parts) = (block + len, block, Vec::new());
        let mut add = |from: u64, to: u64, value| {
            if from < to {
                parts.push((Blocks { arena, block: from, len: to - from }, value));
            }
        };
        let before = self.0.range(..(arena, block)).next_back();
        let before = before.filter(|((a, first), (n, _))| *a == arena && first + n > block);
        for ((_, first), (n, value)) in
            before.into_iter().chain(self.0.range((arena, block)..(arena, end)))
        {
            let (from, to) = ((*first).max(block), (first + n).min(end));
            add(at, from, None);
            add(from, to, Some(value));
            at = to;
        }
        add(at, end, None);
        parts
    }

    fn all(&self) -> impl Iterator<Item = (Blocks, &V)> {
        let at = |&(arena, block): &(u32, u64), len| Blocks { arena, block, len };
        self.0.iter().map(move |(key, (len, value))| (at(key, *len), value))
    }
}

/// A life of a block that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Life {
    birth: u64,
    /// The last snapshot that has it.
    last: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ages {
    /// Births after the oldest snapshot.
    births: Runs<u64>,
    /// Lives before the last one, in order.
    earlier: Runs<Vec<Life>>,
    /// Blocks that hang on snapshots, and on which.
    hanging: Runs<u64>,
    /// Snapshots by number.
    snapshots: BTreeMap<u64, Hung>,
    /// How many blocks hang on them in all.
    dead: u64,
    /// A number behind those of all snapshots that were, and not behind that of the next.
    next: u64,
}

/// What hangs on a snapshot.
#[derive(Debug, Default)]
struct Hung {
    blocks: Runs<()>,
    /// Blocks of these that no other snapshot has.
    own: u64,
}

/// The part of blocks that was born at a time; 0: before the oldest snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    blocks: Blocks,
    birth: u64,
    /// It has lived before.
    earlier: bool,
}

/// Appends blocks, joined with those before where possible.
fn push(list: &mut Vec<Blocks>, blocks: Blocks) {
    match list.last_mut() {
        Some(last) if last.arena == blocks.arena && last.block + last.len == blocks.block => {
            last.len += blocks.len;
        }
        _ => list.push(blocks),
    }
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

    /// The last snapshot.
    fn newest(&self) -> Option<u64> {
        self.snapshots.last_key_value().map(|(number, _)| *number)
    }

    /// Blocks that were free come into extents of the working state.
    pub fn born(&mut self, blocks: Blocks) {
        if self.any() {
            self.births.put(blocks, self.next);
        }
    }

    /// Blocks come into extents of the working state: those of them that hung on a snapshot.
    pub fn revive(&mut self, blocks: Blocks) -> Vec<Blocks> {
        let mut revived = Vec::new();
        if self.dead == 0 {
            return revived;
        }
        let newest = self.newest();
        for (part, last) in self.hanging.take(blocks) {
            let own = self.own_of(last, part);
            if let Some(hung) = self.snapshots.get_mut(&last) {
                hung.blocks.take(part);
                hung.own -= own;
            }
            self.dead -= part.len;
            push(&mut revived, part);
            if newest == Some(last) || planted(Bug::SnapshotLivesJoined) {
                // As if it had never been gone.
                continue;
            }
            for piece in self.parts(part) {
                let life = Life { birth: piece.birth, last };
                let before = self.earlier.over(piece.blocks).into_iter();
                let before: Vec<_> = before.map(|(at, lives)| (at, lives.cloned())).collect();
                self.earlier.take(piece.blocks);
                for (at, lives) in before {
                    let mut lives = lives.unwrap_or_default();
                    lives.push(life);
                    self.earlier.put(at, lives);
                }
            }
            self.births.take(part);
            self.births.put(part, self.next);
        }
        revived
    }

    /// The blocks by when they were born.
    fn parts(&self, blocks: Blocks) -> Vec<Part> {
        let mut parts = Vec::new();
        for (blocks, birth) in self.births.over(blocks) {
            let birth = birth.copied().unwrap_or(0);
            if self.earlier.0.is_empty() {
                parts.push(Part { blocks, birth, earlier: false });
                continue;
            }
            for (blocks, lives) in self.earlier.over(blocks) {
                parts.push(Part { blocks, birth, earlier: lives.is_some() });
            }
        }
        parts
    }

    /// The blocks, in order, and of each whether a snapshot has it: whoever writes there writes to another block.
    pub fn frozen(&self, blocks: Blocks) -> Vec<(Blocks, bool)> {
        let Some(newest) = self.newest() else { return vec![(blocks, false)] };
        let mut found: Vec<(Blocks, bool)> = Vec::new();
        for part in self.parts(blocks) {
            let had = part.birth <= newest || part.earlier && !planted(Bug::SnapshotLifeForgotten);
            let frozen = had && !planted(Bug::SnapshotInPlace);
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
        let freed = planted(Bug::SnapshotBlocksFreed) || planted(Bug::SnapshotInPlace);
        let mut free = Vec::new();
        for part in self.parts(blocks) {
            if part.birth <= newest && !freed {
                self.hang(newest, part.blocks);
            } else if part.earlier {
                self.end_life(part.blocks);
            } else {
                self.births.take(part.blocks);
                push(&mut free, part.blocks);
            }
        }
        free
    }

    /// Blocks hang on a snapshot, which and of which none was born later than it.
    fn hang(&mut self, number: u64, blocks: Blocks) {
        self.dead += blocks.len;
        self.hanging.put(blocks, number);
        let own = self.own_of(number, blocks);
        let hung = self.snapshots.entry(number).or_default();
        hung.own += own;
        hung.blocks.put(blocks, ());
    }

    /// No snapshot has the last life of these blocks, and nobody lives it: the one before it is the last.
    fn end_life(&mut self, blocks: Blocks) {
        for (part, mut lives) in self.earlier.take(blocks) {
            let Some(life) = lives.pop() else { continue };
            if !lives.is_empty() {
                self.earlier.put(part, lives);
            }
            self.births.take(part);
            if life.birth > 0 {
                self.births.put(part, life.birth);
            }
            self.hang(life.last, part);
        }
    }

    /// A snapshot is given up: the blocks that no other has.
    pub fn drop_snapshot(&mut self, number: u64) -> Vec<Blocks> {
        let Some(hung) = self.snapshots.remove(&number) else { return Vec::new() };
        let before = self.snapshots.range(..number).next_back().map(|(before, _)| *before);
        let mut free = Vec::new();
        if planted(Bug::CloneGivenAway) {
            let ended = self.earlier.all().filter(|(_, lives)| lives[0].last == number);
            free.extend(ended.map(|(blocks, _)| blocks));
        }
        let changed = self.drop_from_lives(number, before);
        for (blocks, ()) in hung.blocks.all() {
            self.dead -= blocks.len;
            self.hanging.take(blocks);
            for part in self.parts(blocks) {
                let had = before.filter(|before| part.birth <= *before);
                match had.filter(|_| !planted(Bug::SnapshotBeforeForgotten)) {
                    Some(before) => self.hang(before, part.blocks),
                    None if part.earlier => self.end_life(part.blocks),
                    None => {
                        self.births.take(part.blocks);
                        push(&mut free, part.blocks);
                    }
                }
            }
        }
        if self.snapshots.is_empty() {
            (self.births, self.earlier) = (Runs::default(), Runs::default());
        }
        // What others shared with the one given up is their own now.
        if changed {
            let numbers: Vec<u64> = self.snapshots.keys().copied().collect();
            numbers.into_iter().for_each(|number| self.count_own(number));
        } else if let Some(after) = self.snapshots.range(number..).next().map(|(after, _)| *after) {
            self.count_own(after);
        }
        free
    }

    /// The same of lives before the last: they end with the snapshot before it, or were none. Whether it was the last of any.
    fn drop_from_lives(&mut self, number: u64, before: Option<u64>) -> bool {
        let mut changed = false;
        for (blocks, mut lives) in std::mem::take(&mut self.earlier.0)
            .into_iter()
            .map(|((arena, block), (len, lives))| (Blocks { arena, block, len }, lives))
        {
            lives.retain_mut(|life| {
                if life.last != number {
                    return true;
                }
                changed = true;
                let had = before.filter(|before| life.birth <= *before);
                had.inspect(|before| life.last = *before).is_some()
            });
            if !lives.is_empty() {
                self.earlier.put(blocks, lives);
            }
        }
        changed
    }

    fn count_own(&mut self, number: u64) {
        let Some(hung) = self.snapshots.get(&number) else { return };
        let own = hung.blocks.all().map(|(blocks, ())| self.own_of(number, blocks)).sum();
        if let Some(hung) = self.snapshots.get_mut(&number) {
            hung.own = own;
        }
    }

    /// Blocks of these, which hang on a snapshot, that no other has.
    fn own_of(&self, number: u64, blocks: Blocks) -> u64 {
        let before = self.snapshots.range(..number).next_back().map(|(before, _)| *before);
        let Some(before) = before else { return blocks.len };
        let own = |part: &Part| part.birth > before && !part.earlier;
        self.parts(blocks).iter().filter(|part| own(part)).map(|part| part.blocks.len).sum()
    }

    /// Blocks that are free once this snapshot alone is given up.
    pub fn own(&self, number: u64) -> u64 {
        self.snapshots.get(&number).map_or(0, |hung| hung.own)
    }

    /// Blocks that hang on snapshots.
    pub fn all_dead(&self) -> Vec<Blocks> {
        self.hanging.all().map(|(blocks, _)| blocks).collect()
    }

    /// Found at open: in the state after the last snapshot so far (the next one, or the working one) these blocks are in extents
    /// no more, and these have come. False: that cannot be.
    pub fn found(&mut self, gone: &[Blocks], come: &[Blocks]) -> bool {
        let mut right = true;
        for blocks in gone {
            right &= self.hanging.over(*blocks).iter().all(|(_, hangs)| hangs.is_none());
            right = right && self.die(*blocks).is_empty();
        }
        for blocks in come {
            let revived = self.revive(*blocks);
            let mut at = blocks.block;
            for part in
                revived.iter().chain([&Blocks { block: blocks.block + blocks.len, ..*blocks }])
            {
                if at < part.block {
                    self.born(Blocks { block: at, len: part.block - at, ..*blocks });
                }
                at = part.block + part.len;
            }
        }
        right
    }

    /// See the module.
    pub fn invariants(&self) -> Result<(), String> {
        let hung: u64 = self.hanging.all().map(|(blocks, _)| blocks.len).sum();
        base::always!(
            hung == self.dead,
            "{hung} blocks hang on snapshots, and {} should",
            self.dead
        );
        let all = self.snapshots.values().flat_map(|hung| hung.blocks.all());
        let listed: u64 = all.map(|(blocks, ())| blocks.len).sum();
        base::always!(
            listed == hung,
            "snapshots list {listed} blocks that hang on them, not {hung}"
        );
        let none = self.births.0.is_empty() && self.earlier.0.is_empty();
        base::always!(self.any() || none, "births are noted, and there is no snapshot");
        let mut end = (0, 0);
        for (blocks, birth) in self.births.all() {
            let Blocks { arena, block, len } = blocks;
            let apart = (arena, block) >= end && len > 0 && *birth > 0;
            base::always!(apart, "notes of births meet at block {block} of arena {arena}");
            end = (arena, block + len);
        }
        for (blocks, lives) in self.earlier.all() {
            for part in self.parts(blocks) {
                let births = lives.iter().skip(1).map(|life| life.birth).chain([part.birth]);
                let mut both = lives.iter().zip(births);
                let right = both.all(|(life, next)| {
                    life.birth <= life.last
                        && life.last < next
                        && self.snapshots.contains_key(&life.last)
                });
                let Blocks { arena, block, .. } = part.blocks;
                base::always!(
                    right && !lives.is_empty(),
                    "lives of block {block} of arena {arena} do not follow each other"
                );
            }
        }
        Ok(())
    }
}

/// Blocks that a walk has come by.
#[derive(Debug, Default)]
pub struct Known(BTreeMap<(u32, u64), u64>);

impl Known {
    /// Whether it has come by any of these.
    pub fn has_any(&self, blocks: Blocks) -> bool {
        let Blocks { arena, block, len } = blocks;
        let before = self.0.range(..(arena, block + len)).next_back();
        before.is_some_and(|((other, _), end)| *other == arena && *end > block)
    }

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
                    1 => {}
                    2 if number > 0 => {
                        // What a snapshot has comes into a file again.
                        let which = 2 * (1 + random.below(number / 2));
                        let Some(state) = model.snapshots.get(&which) else { continue };
                        let run: Vec<u64> =
                            (at..at + len).take_while(|b| state.contains(b)).collect();
                        if !run.is_empty() {
                            let revived = ages.revive(blocks(at, run.len() as u64));
                            let revived: Vec<u64> =
                                revived.iter().flat_map(|b| b.block..b.block + b.len).collect();
                            let dead = run.iter().filter(|b| !model.live.contains(b));
                            assert_eq!(revived, dead.copied().collect::<Vec<_>>(), "seed {seed}");
                            model.live.extend(run);
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
            let mut found = Ages::default();
            let mut before: Option<&std::collections::BTreeSet<u64>> = None;
            let states = model.snapshots.iter().map(|(n, state)| (Some(*n), state));
            for (number, state) in states.chain([(None, &model.live)]) {
                if let Some(before) = before {
                    let gone: Vec<Blocks> =
                        before.difference(state).map(|b| blocks(*b, 1)).collect();
                    let come: Vec<Blocks> =
                        state.difference(before).map(|b| blocks(*b, 1)).collect();
                    assert!(found.found(&gone, &come), "seed {seed}");
                }
                if let Some(number) = number {
                    found.snapshot(number);
                    before = Some(state);
                }
            }
            found.invariants().unwrap();
            assert_eq!(found.dead(), ages.dead(), "seed {seed}");
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
