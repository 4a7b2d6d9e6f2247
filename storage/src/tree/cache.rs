//! Pages in DRAM: clean ones up to a limit (second chance), unpublished ones as long as they are.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::format::page::Page;

/// Hashes page and inode numbers, which no attacker chooses freely, by one multiplication.
#[derive(Clone, Copy, Default, Debug)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }
    fn write_u64(&mut self, n: u64) {
        let x = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ (x >> 32);
    }
}

/// A map keyed by numbers.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

#[derive(Debug)]
struct Slot {
    page: Arc<Page>,
    used: bool,
}

/// The cache.
#[derive(Debug)]
pub struct Cache {
    slots: NumberMap<u64, Slot>,
    /// Order of arrival; a number may occur twice or belong to a page that is gone.
    ring: VecDeque<u64>,
    limit: usize,
}

/// Steps of the eviction hand per page that comes in: bounded work, yet faster than arrival.
const HAND_STEPS: usize = 4;

impl Cache {
    /// A cache of up to `limit` clean pages.
    pub fn new(limit: usize) -> Self {
        Self { slots: NumberMap::default(), ring: VecDeque::new(), limit: limit.max(64) }
    }

    /// The page, if it is here.
    pub fn get(&mut self, number: u64) -> Option<Arc<Page>> {
        let slot = self.slots.get_mut(&number)?;
        slot.used = true;
        Some(slot.page.clone())
    }

    /// The page for changing in place (it must be here: only unpublished pages are changed).
    pub fn edit(&mut self, number: u64) -> Option<&mut Page> {
        self.slots.get_mut(&number).map(|slot| Arc::make_mut(&mut slot.page))
    }

    /// Puts a page in. Pages of transactions after `published` are not on media: they stay.
    pub fn insert(&mut self, number: u64, page: Arc<Page>, published: u64) {
        self.slots.insert(number, Slot { page, used: false });
        self.ring.push_back(number);
        for _ in 0..HAND_STEPS {
            if self.slots.len() <= self.limit && self.ring.len() <= 2 * self.limit {
                return;
            }
            let Some(oldest) = self.ring.pop_front() else { return };
            let Some(slot) = self.slots.get_mut(&oldest) else { continue };
            if slot.used || slot.page.transaction() > published {
                slot.used = false;
                self.ring.push_back(oldest);
            } else {
                self.slots.remove(&oldest);
            }
        }
    }

    /// Forgets a page that was freed.
    pub fn remove(&mut self, number: u64) {
        self.slots.remove(&number);
    }

    /// Number of pages held.
    pub fn held(&self) -> usize {
        self.slots.len()
    }
}
