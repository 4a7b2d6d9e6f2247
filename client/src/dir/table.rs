//! What the `dir` back end knows about inodes and open files.
//!
//! Invariants:
//! - A slot's node, if present, is an `O_PATH` descriptor of the inode with the slot's number.
//!   Holding it keeps the kernel from reusing the number, so a present node is never stale.
//! - A slot with open handles keeps its node: an unlinked file stays reachable while it is open.
//! - A slot without a node has the last parent and name seen; they are a hint that is verified
//!   by number when used.

use crate::kept::Kept;
use crate::mutex::Mutex;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::hash::{BuildHasherDefault, Hasher};

/// Slots kept at most; past it the hint goes with the descriptor. About 100 bytes each.
const SLOTS_MAX: usize = 1 << 20;
/// Unlinked inodes remembered, so that a late question about one does not search the tree.
const DEAD_MAX: usize = 4096;

/// Numbers are hashed by a fixed mixer: they come from the backing file system, which nobody
/// needs to be protected from, and std's random state is not there.
#[derive(Debug, Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let mut z = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.0 = z ^ (z >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type HashMap<V> = hashbrown::HashMap<u64, V, BuildHasherDefault<NumberHasher>>;

/// An inode of the backing file system, held by an `O_PATH` descriptor.
#[derive(Debug)]
pub(super) struct Node {
    /// Backing inode number.
    pub number: u64,
    /// Type bits of its mode.
    pub kind: u32,
    /// The descriptor.
    pub fd: Kept,
}

/// An open file.
#[derive(Debug)]
pub(super) struct Open {
    /// Backing inode number.
    pub number: u64,
    /// Backing descriptor, in the access mode asked.
    pub fd: Kept,
    /// Writes go to the end.
    pub append: bool,
    /// Serialises uses of the descriptor's own offset (appending, seeking for data).
    pub position: Mutex<()>,
}

#[derive(Debug)]
struct Slot {
    node: Option<Arc<Node>>,
    parent: u64,
    name: Box<[u8]>,
    opens: u32,
    /// Used since the clock hand last passed.
    used: bool,
    /// Its last name is gone: forget it when the last handle is.
    dead: bool,
}

/// Inodes and handles.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: HashMap<Slot>,
    /// Slots with a node, in the order in which the clock hand visits them. A number whose slot
    /// has lost its node or is gone is skipped when met.
    clock: VecDeque<u64>,
    nodes: usize,
    /// The last inodes whose last name went while nothing had them open, and when (a count).
    dead: HashMap<u64>,
    deaths: u64,
    handles: HashMap<Arc<Open>>,
    last_handle: u64,
}

impl Table {
    /// The node of `number` if its descriptor is held.
    pub fn node(&mut self, number: u64) -> Option<Arc<Node>> {
        let slot = self.slots.get_mut(&number)?;
        slot.used = true;
        slot.node.clone()
    }

    /// Whether there is a slot for `number`.
    pub fn knows(&self, number: u64) -> bool {
        self.slots.contains_key(&number)
    }

    /// Whether `number` was unlinked a while ago and has not been seen since.
    pub fn is_dead(&self, number: u64) -> bool {
        self.dead.contains_key(&number)
    }

    /// The last known parent and name of `number`.
    pub fn hint(&self, number: u64) -> Option<(u64, Box<[u8]>)> {
        self.slots.get(&number).map(|slot| (slot.parent, slot.name.clone()))
    }

    /// Notes where `number` was seen; returns its node if it is held.
    pub fn seen(&mut self, number: u64, parent: u64, name: &[u8]) -> Option<Arc<Node>> {
        let slot = self.slots.get_mut(&number)?;
        if slot.parent != parent || *slot.name != *name {
            slot.parent = parent;
            slot.name = name.into();
        }
        slot.used = true;
        slot.node.clone()
    }

    /// Adds a node that [`seen`](Self::seen) did not have, keeping at most `nodes_max`.
    pub fn insert(&mut self, node: &Arc<Node>, parent: u64, name: &[u8], nodes_max: usize) {
        self.dead.remove(&node.number);
        let slot = self.slots.entry(node.number).or_insert_with(|| Slot {
            node: None,
            parent,
            name: name.into(),
            opens: 0,
            used: true,
            dead: false,
        });
        if slot.node.is_none() {
            slot.node = Some(node.clone());
            self.clock.push_back(node.number);
            self.nodes += 1;
        }
        self.evict(nodes_max, node.number);
    }

    /// Second-chance eviction, at most one round and a half: nodes that are open stay, and the one that is new.
    fn evict(&mut self, nodes_max: usize, new: u64) {
        let mut steps = self.clock.len().saturating_mul(2);
        while self.nodes > nodes_max && steps > 0 {
            steps -= 1;
            let Some(number) = self.clock.pop_front() else { return };
            let many = self.slots.len() > SLOTS_MAX;
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            if slot.node.is_none() {
                continue;
            }
            if slot.used || slot.opens > 0 || number == new {
                slot.used = false;
                self.clock.push_back(number);
                continue;
            }
            slot.node = None;
            self.nodes -= 1;
            if many {
                self.slots.remove(&number);
            }
        }
    }

    /// Forgets `number` unless a handle is open on it. `dead` says that its last name is gone.
    pub fn forget(&mut self, number: u64, dead: bool) {
        let Some(slot) = self.slots.get_mut(&number) else { return };
        slot.dead |= dead;
        if slot.opens > 0 {
            return;
        }
        if slot.dead {
            self.bury(number);
        }
        if let Some(slot) = self.slots.remove(&number)
            && slot.node.is_some()
        {
            self.nodes -= 1;
            // Stale numbers in the clock would pile up under create/unlink churn.
            if self.clock.len() > 2 * self.nodes + 64 {
                let slots = &self.slots;
                self.clock.retain(|n| slots.get(n).is_some_and(|s| s.node.is_some()));
            }
        }
    }

    fn bury(&mut self, number: u64) {
        self.deaths += 1;
        self.dead.insert(number, self.deaths);
        if self.dead.len() > 2 * DEAD_MAX {
            let oldest = self.deaths - DEAD_MAX as u64;
            self.dead.retain(|_, death| *death > oldest);
        }
    }

    /// Registers an open file and pins its node.
    pub fn open(&mut self, open: Open, node: &Arc<Node>) -> u64 {
        // Parent 0 names nothing; the pinned node makes the hint needless while it is open.
        self.insert(node, 0, b"", usize::MAX);
        if let Some(slot) = self.slots.get_mut(&open.number) {
            slot.opens += 1;
        }
        self.last_handle += 1;
        self.handles.insert(self.last_handle, Arc::new(open));
        self.last_handle
    }

    /// An open file.
    pub fn handle(&self, handle: u64) -> Option<Arc<Open>> {
        self.handles.get(&handle).cloned()
    }

    /// Gives an open file back.
    pub fn release(&mut self, handle: u64) {
        let Some(open) = self.handles.remove(&handle) else { return };
        let Some(slot) = self.slots.get_mut(&open.number) else { return };
        slot.opens = slot.opens.saturating_sub(1);
        if slot.dead && slot.opens == 0 {
            self.forget(open.number, true);
        }
    }
}
