//! Free space of the arenas. Nothing of it is on media: it is what the extents leave over.
//!
//! What is always true: a block is in `free` of its arena, or in extents of the working state (and
//! counts once in `live`, however many share it), or was freed by a transaction that is not published yet (`pending`). Each arena has addresses
//! for the whole capacity, and `live` blocks over all arenas never exceed the capacity; so an
//! arena runs out of addresses only because of blocks that publishing will give back.

use std::collections::{BTreeMap, HashMap};

use base::planted::{Bug, planted};

use crate::format::item::ReadClass;

/// Runs looked at before the longest one seen is taken: bounds the cost of fragmentation.
const PROBES: usize = 64;

#[derive(Debug)]
struct Arena {
    class: ReadClass,
    /// First block to length; runs never touch.
    free: BTreeMap<u64, u64>,
}

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

/// Free and used blocks.
#[derive(Debug)]
pub struct Space {
    capacity: u64,
    live: u64,
    pending: u64,
    /// Blocks that are free and not to be had.
    kept: u64,
    arenas: BTreeMap<u32, Arena>,
    classes: HashMap<ReadClass, u32>,
    freed: Vec<Blocks>,
}

impl Space {
    /// Space without arenas.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            live: 0,
            pending: 0,
            kept: 0,
            arenas: BTreeMap::new(),
            classes: HashMap::new(),
            freed: Vec::new(),
        }
    }

    /// Makes an arena known; false when its number or class is known already.
    pub fn add(&mut self, number: u32, class: ReadClass) -> bool {
        let free = BTreeMap::from([(0, self.capacity)]);
        if self.classes.contains_key(&class) || self.arenas.contains_key(&number) {
            return false;
        }
        self.classes.insert(class, number);
        self.arenas.insert(number, Arena { class, free });
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
        if !arena.carve(blocks.block, blocks.len) {
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
        let sum = self.live.checked_add(want).and_then(|sum| sum.checked_add(self.kept));
        want == 0 || sum.is_some_and(|sum| sum <= self.capacity)
    }

    /// Whether an arena has addresses for `want` blocks without waiting for a publication.
    pub fn has_addresses(&self, arena: u32, want: u64) -> bool {
        // Addresses not live and not pending anywhere are free everywhere. Each arena has addresses for all of the capacity,
        // but what it gives up has memory until that is published: only a file that is larger than what is free may
        // move to another arena beside that.
        let beside = || {
            let free = |a: &Arena| a.free.values().sum::<u64>() >= want;
            self.pending == 0 && self.arenas.get(&arena).is_some_and(free)
        };
        self.live + self.pending + want <= self.capacity || beside()
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
        let carved = space.carve(block, len);
        assert!(carved, "the run was found free");
        self.live += len;
        Some(Blocks { arena, block, len })
    }

    /// Gives blocks back; they can be allocated once the transaction is published.
    pub fn free(&mut self, blocks: Blocks) {
        self.live -= blocks.len;
        if planted(Bug::BlockReused)
            && let Some(arena) = self.arenas.get_mut(&blocks.arena)
        {
            return arena.give(blocks.block, blocks.len);
        }
        self.pending += blocks.len;
        self.freed.push(blocks);
    }

    /// Blocks that the working transaction freed, for [`Space::publish`].
    pub fn seal(&mut self) -> Vec<Blocks> {
        std::mem::take(&mut self.freed)
    }

    /// The transaction that freed these is published.
    pub fn publish(&mut self, freed: &[Blocks]) {
        for b in freed {
            self.pending -= b.len;
            if let Some(arena) = self.arenas.get_mut(&b.arena) {
                arena.give(b.block, b.len);
            }
        }
    }

    /// Which of these blocks can be allocated now.
    pub fn still_free(&self, blocks: Blocks) -> Vec<Blocks> {
        let Blocks { arena, block, len } = blocks;
        let Some(space) = self.arenas.get(&arena) else { return Vec::new() };
        let end = block.saturating_add(len);
        let cut = |(&start, &run): (&u64, &u64)| {
            let (from, to) = (start.max(block), (start + run).min(end));
            (from < to).then(|| Blocks { arena, block: from, len: to - from })
        };
        space.free.range(..end).rev().map_while(cut).collect()
    }

    /// Blocks that publishing gives back.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// What the module says is always true; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        let mut used = 0;
        for (number, arena) in &self.arenas {
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
        let (live, pending) = (self.live, self.pending);
        base::always!(live <= self.capacity, "{live} blocks are used of {}", self.capacity);
        base::always!(
            used == live + pending,
            "{used} blocks are not free in the arenas: {live} are used and {pending} given up"
        );
        let freed: u64 = self.freed.iter().map(|b| b.len).sum();
        base::always!(freed <= pending, "{freed} blocks were given up of {pending}");
        Ok(())
    }
}

impl Arena {
    /// Takes a range out of the free runs; false when it is not wholly free.
    fn carve(&mut self, block: u64, len: u64) -> bool {
        let Some((&start, &run)) = self.free.range(..=block).next_back() else { return false };
        let (end, run_end) = (block + len, start + run);
        if end > run_end {
            return false;
        }
        if start < block {
            self.free.insert(start, block - start);
        } else {
            self.free.remove(&start);
        }
        if end < run_end {
            self.free.insert(end, run_end - end);
        }
        true
    }

    fn give(&mut self, block: u64, len: u64) {
        let (mut block, mut len) = (block, len);
        if let Some((&start, &run)) = self.free.range(..block).next_back()
            && start + run == block
        {
            self.free.remove(&start);
            (block, len) = (start, run + len);
        }
        if let Some(run) = self.free.remove(&(block + len)) {
            len += run;
        }
        self.free.insert(block, len);
    }
}
