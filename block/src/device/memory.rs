//! A disk in memory, sparse: what was never written takes no room. For tests, baselines and scratch.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use base::Errno;

use super::{Disk, Extent, Prompt, Traits, push_extent};

const PAGE: u64 = 64 << 10;
/// Locks, each for every 64th page: neighbours never share one.
const SHARDS: u64 = 64;

type Shard = RwLock<HashMap<u64, Box<[u8]>>>;

/// The disk.
pub struct Memory {
    size: u64,
    shards: Vec<Shard>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Memory {
    /// An empty disk of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self { size, shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    fn shard(&self, page: u64) -> &Shard {
        &self.shards[(page % SHARDS) as usize]
    }

    /// Calls `each` with a page's number, the range within it, and where that lies in the whole.
    fn pages(offset: u64, len: u64, mut each: impl FnMut(u64, std::ops::Range<usize>, usize)) {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let from = at % PAGE;
            let n = (PAGE - from).min(end - at);
            each(at / PAGE, from as usize..(from + n) as usize, (at - offset) as usize);
            at += n;
        }
    }
}

impl Disk for Memory {
    fn traits(&self) -> Traits {
        Traits::BYTES
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn prompt(&self) -> Prompt {
        Prompt::Always
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        Self::pages(offset, buf.len() as u64, |page, within, at| {
            let shard = self.shard(page).read().unwrap_or_else(PoisonError::into_inner);
            let target = &mut buf[at..at + within.len()];
            match shard.get(&page) {
                Some(bytes) => target.copy_from_slice(&bytes[within]),
                None => target.fill(0),
            }
        });
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        Self::pages(offset, data.len() as u64, |page, within, at| {
            let mut shard = self.shard(page).write().unwrap_or_else(PoisonError::into_inner);
            let bytes =
                shard.entry(page).or_insert_with(|| vec![0; PAGE as usize].into_boxed_slice());
            let source = &data[at..at + within.len()];
            bytes[within].copy_from_slice(source);
        });
        Ok(())
    }

    fn flush(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.zero(offset, len, false)
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        if no_hole {
            return Err(Errno::OPNOTSUPP);
        }
        Self::pages(offset, len, |page, within, _| {
            let mut shard = self.shard(page).write().unwrap_or_else(PoisonError::into_inner);
            if within.len() == PAGE as usize {
                shard.remove(&page);
            } else if let Some(bytes) = shard.get_mut(&page) {
                bytes[within].fill(0);
            }
        });
        Ok(())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        let mut extents = Vec::new();
        let mut room = true;
        Self::pages(offset, len, |page, within, _| {
            if room {
                let shard = self.shard(page).read().unwrap_or_else(PoisonError::into_inner);
                let hole = !shard.contains_key(&page);
                let len = within.len() as u64;
                room = push_extent(&mut extents, Extent { len, hole, zero: hole });
            }
        });
        Ok(extents)
    }
}
