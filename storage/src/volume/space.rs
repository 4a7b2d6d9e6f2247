//! Free space of the arenas. Nothing of it is on media: it is what the extents leave over.
//!
//! What is always true: a block is in `free` of its arena, or in extents of the working state (and
//! counts once in `live`, however many share it), or was freed by a transaction that is not published yet (`pending`), or is held
//! back for what a state before this one has there (`held`, see `kept`), or is in snapshots alone (`dead`, see `ages`). Each arena has addresses
//! for the whole capacity, and `live` and `dead` blocks over all arenas never exceed the capacity; so an
//! arena runs out of addresses only because of blocks that publishing, or letting go of what is held, will give back.

use std::collections::{BTreeMap, HashMap};

use base::planted::{Bug, planted};

use super::ages::Ages;
use crate::format::item::{ReadClass, Run};

/// Runs looked at before the longest one seen is taken: bounds the cost of fragmentation.
const PROBES: usize = 64;

#[derive(Debug)]
struct Arena {
    class: ReadClass,
    free: Runs,
    /// In no extent, and not to be had.
    held: Runs,
}

/// Blocks, as first block to length; runs never touch.
type Runs = BTreeMap<u64, u64>;

/// A run of blocks of an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocks {
    /// Arena.
    pub arena: u32,
    /// First block.
    pub block: u64,
    /// Number of blocks.
    pub len: u64,
}

impl Blocks {
    /// Where a run of a file lies.
    pub const fn of(run: &Run) -> Self {
        Self { arena: run.arena, block: run.block, len: run.len }
    }
}

/// Free and used blocks.
#[derive(Debug)]
pub struct Space {
    capacity: u64,
    live: u64,
    pending: u64,
    held: u64,
    /// Blocks that are free and not to be had.
    kept: u64,
    arenas: BTreeMap<u32, Arena>,
    classes: HashMap<ReadClass, u32>,
    freed: Vec<Blocks>,
    /// Which snapshots have which blocks.
    pub(super) ages: Ages,
}

impl Space {
    /// Space without arenas.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            live: 0,
            pending: 0,
            held: 0,
            kept: 0,
            arenas: BTreeMap::new(),
            classes: HashMap::new(),
            freed: Vec::new(),
            ages: Ages::default(),
        }
    }

    /// Makes an arena known; false when its number or class is known already.
    pub fn add(&mut self, number: u32, class: ReadClass) -> bool {
        let free = BTreeMap::from([(0, self.capacity)]);
        if self.classes.contains_key(&class) || self.arenas.contains_key(&number) {
            return false;
        }
        self.classes.insert(class, number);
        self.arenas.insert(number, Arena { class, free, held: Runs::new() });
        true
    }

    /// Takes blocks found in use at open; says what is wrong if they are not free.
    pub fn take(&mut self, blocks: Blocks) -> Result<(), &'static str> {
        let Some(arena) = self.arenas.get_mut(&blocks.arena) else {
            return Err("lies in an arena that does not exist");
        };
        if blocks.block + blocks.len > self.capacity {
            return Err("reaches beyond its arena");
        }
        if !carve(&mut arena.free, blocks.block, blocks.len) {
            return Err("shares blocks with another extent");
        }
        self.live += blocks.len;
        if self.live > self.capacity { Err("exceeds the capacity") } else { Ok(()) }
    }

    /// The arena of a class.
    pub fn arena_of(&self, class: ReadClass) -> Option<u32> {
        self.classes.get(&class).copied()
    }

    /// The class of an arena.
    pub fn class(&self, arena: u32) -> Option<ReadClass> {
        self.arenas.get(&arena).map(|a| a.class)
    }

    /// Arenas, by number.
    pub fn arenas(&self) -> impl Iterator<Item = (u32, ReadClass)> + '_ {
        self.arenas.iter().map(|(n, a)| (*n, a.class))
    }

    /// Blocks in the working state's extents.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Blocks in snapshots alone.
    pub fn dead(&self) -> u64 {
        self.ages.dead()
    }

    /// Blocks that may be allocated in all.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// From now on so many of the free blocks are not to be had.
    pub fn keep(&mut self, blocks: u64) {
        self.kept = blocks;
    }

    /// Whether `want` blocks more fit the capacity.
    pub fn fits(&self, want: u64) -> bool {
        let taken = self.live + self.dead();
        let sum = taken.checked_add(want).and_then(|sum| sum.checked_add(self.kept));
        want == 0 || sum.is_some_and(|sum| sum <= self.capacity)
    }

    /// Whether an arena has addresses for `want` blocks without waiting for a publication.
    pub fn has_addresses(&self, arena: u32, want: u64) -> bool {
        // Addresses not live and not pending anywhere are free everywhere. Each arena has addresses for all of the capacity,
        // but what it gives up has memory until that is published: only a file that is larger than what is free may
        // move to another arena beside that.
        let beside = || {
            let free = |a: &Arena| a.free.values().sum::<u64>() >= want;
            self.pending + self.held == 0 && self.arenas.get(&arena).is_some_and(free)
        };
        self.taken() + want <= self.capacity || beside()
    }

    /// Blocks that are not free.
    fn taken(&self) -> u64 {
        self.live + self.pending + self.held + self.dead()
    }

    /// Whether what is held back leaves memory for `want` blocks more.
    pub fn holds_back_nothing_for(&self, want: u64) -> bool {
        self.held == 0 || self.taken() + want <= self.capacity
    }

    /// Free runs of an arena.
    pub fn fragments(&self, arena: u32) -> u64 {
        self.arenas.get(&arena).map_or(1, |a| a.free.len() as u64)
    }

    /// Takes up to `want` blocks: at `goal` if that is free, else the lowest run that is long
    /// enough, else the longest of the first few.
    pub fn allocate(&mut self, arena: u32, want: u64, goal: Option<u64>) -> Option<Blocks> {
        let space = self.arenas.get_mut(&arena)?;
        let at_goal = goal.and_then(|goal| {
            let (start, len) = space.free.range(..=goal).next_back()?;
            (start + len > goal).then(|| (goal, start + len - goal))
        });
        let found = at_goal.or_else(|| {
            let mut best: Option<(u64, u64)> = None;
            for (&start, &len) in space.free.iter().take(PROBES) {
                if len >= want {
                    return Some((start, len));
                }
                if best.is_none_or(|(_, longest)| len > longest) {
                    best = Some((start, len));
                }
            }
            best
        });
        let (block, len) = found?;
        let len = len.min(want);
        let carved = carve(&mut space.free, block, len);
        assert!(carved, "the run was found free");
        self.live += len;
        let blocks = Blocks { arena, block, len };
        self.ages.born(blocks);
        Some(blocks)
    }

    /// Gives blocks back; they can be allocated once the transaction is published, but for those that snapshots have.
    pub fn free(&mut self, blocks: Blocks) {
        self.live -= blocks.len;
        for part in self.ages.die(blocks) {
            self.give_up(part);
        }
    }

    /// A snapshot is given up, and with it what no other has.
    pub fn drop_snapshot(&mut self, transaction: u64) {
        for part in self.ages.drop_snapshot(transaction) {
            self.give_up(part);
        }
    }

    /// Looks whether a run of a snapshot, found at open, lies where it may.
    pub fn can_be_dead(&self, blocks: Blocks) -> Result<(), &'static str> {
        if !self.arenas.contains_key(&blocks.arena) {
            return Err("of a snapshot lies in an arena that does not exist");
        }
        match blocks.block.checked_add(blocks.len) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => Err("of a snapshot reaches beyond its arena"),
        }
    }

    /// Which snapshots have which blocks was found at open: takes those that hang on them.
    pub fn found_dead(&mut self) -> Result<(), &'static str> {
        for blocks in self.ages.all_dead() {
            let arena = self.arenas.get_mut(&blocks.arena);
            if !arena.is_some_and(|arena| carve(&mut arena.free, blocks.block, blocks.len)) {
                return Err("of a snapshot is in use, and counts as given up");
            }
        }
        Ok(())
    }

    /// Blocks of a snapshot come into an extent again: those of them that are in none.
    pub fn revive(&mut self, blocks: Blocks) -> Vec<Blocks> {
        let revived = self.ages.revive(blocks);
        self.live += revived.iter().map(|blocks| blocks.len).sum::<u64>();
        revived
    }

    fn give_up(&mut self, blocks: Blocks) {
        if planted(Bug::BlockReused)
            && let Some(arena) = self.arenas.get_mut(&blocks.arena)
        {
            return give(&mut arena.free, blocks.block, blocks.len);
        }
        self.pending += blocks.len;
        self.freed.push(blocks);
    }

    /// Blocks that the working transaction freed, for [`Space::publish`].
    pub fn seal(&mut self) -> Vec<Blocks> {
        std::mem::take(&mut self.freed)
    }

    /// The same; they stay.
    pub fn freed(&self) -> &[Blocks] {
        &self.freed
    }

    /// Those of these blocks that are free are held back from now on.
    pub fn hold(&mut self, blocks: Blocks) {
        for free in self.still_free(blocks) {
            let Some(arena) = self.arenas.get_mut(&free.arena) else { continue };
            if carve(&mut arena.free, free.block, free.len) {
                give(&mut arena.held, free.block, free.len);
                self.held += free.len;
            }
        }
    }

    /// The transaction that freed these is published.
    pub fn publish(&mut self, freed: &[Blocks]) {
        for b in freed {
            self.pending -= b.len;
            if let Some(arena) = self.arenas.get_mut(&b.arena) {
                give(&mut arena.free, b.block, b.len);
            }
        }
    }

    /// Which of these blocks can be allocated now.
    pub fn still_free(&self, blocks: Blocks) -> Vec<Blocks> {
        self.arenas.get(&blocks.arena).map_or(Vec::new(), |a| within(&a.free, blocks))
    }

    /// All blocks in use are held back from now on, and in nobody's extents. The caller has published all that was given up.
    pub fn hold_all(&mut self) {
        assert!(self.pending == 0, "what is given up is published first");
        let capacity = self.capacity;
        for arena in self.arenas.values_mut() {
            let (mut held, mut at) = (Runs::new(), 0);
            for (&start, &len) in &arena.free {
                if at < start {
                    held.insert(at, start - at);
                }
                at = start + len;
            }
            if at < capacity {
                held.insert(at, capacity - at);
            }
            arena.held = held;
        }
        self.held += std::mem::take(&mut self.live) + self.dead();
        self.ages = Ages::default();
    }

    /// Blocks that are held back.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Which of these blocks are held back.
    pub fn held_of(&self, blocks: Blocks) -> Vec<Blocks> {
        let mut held =
            self.arenas.get(&blocks.arena).map_or(Vec::new(), |a| within(&a.held, blocks));
        held.reverse();
        held
    }

    /// Takes blocks that are held back, all of them, for an extent.
    pub fn claim(&mut self, blocks: Blocks) -> bool {
        let Some(arena) = self.arenas.get_mut(&blocks.arena) else { return false };
        let had = carve(&mut arena.held, blocks.block, blocks.len);
        if had {
            self.held -= blocks.len;
            self.live += blocks.len;
        }
        had
    }

    /// Those of these blocks that are held back are given up with the working transaction.
    pub fn let_go(&mut self, blocks: Blocks) {
        for held in self.held_of(blocks) {
            if self.claim(held) {
                self.free(held);
            }
        }
    }

    /// All that is held back is given up with the working transaction.
    pub fn let_all_go(&mut self) {
        let numbers: Vec<u32> = self.arenas.keys().copied().collect();
        for arena in numbers {
            self.let_go(Blocks { arena, block: 0, len: self.capacity });
        }
    }

    /// Blocks that publishing gives back.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// What the module says is always true; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        let (mut used, mut held) = (0, 0);
        for (number, arena) in &self.arenas {
            held += arena.held.values().sum::<u64>();
            let (mut end, mut free) = (None, 0);
            for (&start, &len) in &arena.free {
                let apart = end.is_none_or(|end| start > end);
                base::always!(
                    len > 0 && apart,
                    "arena {number}: free run at {start} meets another"
                );
                end = Some(start + len);
                free += len;
            }
            let inside = end.is_none_or(|end| end <= self.capacity);
            base::always!(inside, "arena {number}: a free run reaches beyond it");
            used += self.capacity - free;
        }
        let (live, pending, dead) = (self.live, self.pending, self.dead());
        let sum = live + dead;
        base::always!(sum <= self.capacity, "{sum} blocks are used of {}", self.capacity);
        self.ages.invariants()?;
        base::always!(held == self.held, "{held} blocks are held back of {}", self.held);
        base::always!(
            used == live + pending + held + dead,
            "{used} blocks are not free in the arenas: {live} are used, {pending} given up, {held} held back, {dead} in snapshots"
        );
        let freed: u64 = self.freed.iter().map(|b| b.len).sum();
        base::always!(freed <= pending, "{freed} blocks were given up of {pending}");
        Ok(())
    }
}

/// Takes a range out of runs; false when it is not wholly in one of them.
fn carve(runs: &mut Runs, block: u64, len: u64) -> bool {
    let Some((&start, &run)) = runs.range(..=block).next_back() else { return false };
    let (end, run_end) = (block + len, start + run);
    if end > run_end {
        return false;
    }
    if start < block {
        runs.insert(start, block - start);
    } else {
        runs.remove(&start);
    }
    if end < run_end {
        runs.insert(end, run_end - end);
    }
    true
}

/// Puts a range, of which nothing is there, among runs.
fn give(runs: &mut Runs, block: u64, len: u64) {
    let (mut block, mut len) = (block, len);
    if let Some((&start, &run)) = runs.range(..block).next_back()
        && start + run == block
    {
        runs.remove(&start);
        (block, len) = (start, run + len);
    }
    if let Some(run) = runs.remove(&(block + len)) {
        len += run;
    }
    runs.insert(block, len);
}

/// What of these blocks is in runs, from the last to the first.
fn within(runs: &Runs, blocks: Blocks) -> Vec<Blocks> {
    let Blocks { arena, block, len } = blocks;
    let end = block.saturating_add(len);
    let cut = |(&start, &run): (&u64, &u64)| {
        let (from, to) = (start.max(block), (start + run).min(end));
        (from < to).then(|| Blocks { arena, block: from, len: to - from })
    };
    runs.range(..end).rev().map_while(cut).collect()
}
