//! What a device must know of its guest, in a file that outlives it: killed and started again, it knows the inodes that the guest
//! was told of, and opens its files again under the same handles.
//!
//! The file is mapped, and written by plain stores: what a killed process has stored is there. It need not outlive the machine,
//! since the guest does not either.
//!
//! A header, then slots of inodes (number, how often told), then slots of open files (handle, inode, flags); a slot whose first
//! word is 0 is free.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::InodeId;
use frontend::fuse::{Guest, Ledger as ServerLedger, OpenFile};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{Bytes, FileOffset, MmapRegion};

const MAGIC: u64 = u64::from_le_bytes(*b"CRBLVFS1");
const HEADER: usize = 4096;
/// Offsets in the header.
const AT_NODES: usize = 8;
const AT_HANDLES: usize = 16;
const AT_READY: usize = 24;
const NODE: usize = 16;
const HANDLE: usize = 24;

/// Slots of one kind: which is whose, and which are free.
#[derive(Debug, Default)]
struct Slots {
    of: HashMap<u64, usize>,
    free: Vec<usize>,
    next: usize,
}

impl Slots {
    fn take(&mut self, key: u64, max: usize) -> Option<usize> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.next < max => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        self.of.insert(key, slot);
        Some(slot)
    }

    fn give(&mut self, key: u64) -> Option<usize> {
        let slot = self.of.remove(&key)?;
        self.free.push(slot);
        Some(slot)
    }
}

#[derive(Debug, Default)]
struct Index {
    nodes: Slots,
    handles: Slots,
}

/// The book.
#[derive(Debug)]
pub struct Ledger {
    map: MmapRegion<()>,
    nodes_max: usize,
    handles_max: usize,
    index: Mutex<Index>,
}

/// What was in it.
#[derive(Debug, Default)]
pub struct Kept {
    /// Inodes, and how often the guest was told of each.
    pub told: Vec<(InodeId, u64)>,
    /// Open files.
    pub opened: Vec<OpenFile>,
}

impl Ledger {
    /// Opens or makes the book at `path`, for a guest that may know and open so much. What is in it, if a guest was at it.
    ///
    /// # Errors
    /// The file cannot be made or mapped.
    pub fn open(path: &Path, guest: &Guest) -> std::io::Result<(Self, Option<Kept>)> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)?;
        // One device at a time.
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
        Self::of(file, guest)
    }

    fn of(file: File, guest: &Guest) -> std::io::Result<(Self, Option<Kept>)> {
        let (nodes_max, handles_max) = (guest.nodes_max, guest.handles_max);
        let len = nodes_max
            .checked_mul(NODE)
            .zip(handles_max.checked_mul(HANDLE))
            .and_then(|(nodes, handles)| nodes.checked_add(handles)?.checked_add(HEADER))
            .ok_or_else(|| std::io::Error::other("more nodes or handles than memory"))?;
        if file.metadata()?.len() != len as u64 {
            file.set_len(0)?;
            file.set_len(len as u64)?;
        }
        let map = MmapRegionBuilder::new_with_bitmap(len, ())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file, 0))
            .build()
            .map_err(std::io::Error::other)?;
        let ledger = Self { map, nodes_max, handles_max, index: Mutex::default() };
        let same = ledger.get(0) == MAGIC
            && ledger.get(AT_NODES) == nodes_max as u64
            && ledger.get(AT_HANDLES) == handles_max as u64;
        if same && ledger.get(AT_READY) != 0 {
            let kept = ledger.read();
            return Ok((ledger, Some(kept)));
        }
        ledger.clear();
        ledger.put(AT_NODES, nodes_max as u64);
        ledger.put(AT_HANDLES, handles_max as u64);
        ledger.put(0, MAGIC);
        Ok((ledger, None))
    }

    fn get(&self, at: usize) -> u64 {
        self.map.as_volatile_slice().read_obj(at).unwrap_or(0)
    }

    fn put(&self, at: usize, value: u64) {
        // Slots are below the number that the map was made for.
        let _ = self.map.as_volatile_slice().write_obj(value, at);
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const fn node(slot: usize) -> usize {
        HEADER + slot * NODE
    }

    const fn handle(&self, slot: usize) -> usize {
        HEADER + self.nodes_max * NODE + slot * HANDLE
    }

    /// Slots are filled from the first on; how far, nobody keeps book of.
    fn read(&self) -> Kept {
        let mut kept = Kept::default();
        let mut index = self.index();
        for slot in 0..self.nodes_max {
            let ino = self.get(Self::node(slot));
            if ino != 0 {
                index.nodes.of.insert(ino, slot);
                kept.told.push((InodeId(ino), self.get(Self::node(slot) + 8)));
                index.nodes.next = slot + 1;
            }
        }
        for slot in 0..self.handles_max {
            let fh = self.get(self.handle(slot));
            if fh != 0 {
                index.handles.of.insert(fh, slot);
                let ino = InodeId(self.get(self.handle(slot) + 8));
                let flags = u32::try_from(self.get(self.handle(slot) + 16)).unwrap_or(0);
                kept.opened.push(OpenFile { fh, ino, flags });
                index.handles.next = slot + 1;
            }
        }
        let holes = |slots: &Slots| {
            let mut taken = vec![false; slots.next];
            slots.of.values().for_each(|slot| taken[*slot] = true);
            (0..slots.next).filter(|slot| !taken[*slot]).collect()
        };
        index.nodes.free = holes(&index.nodes);
        index.handles.free = holes(&index.handles);
        kept
    }

    /// A guest goes on here of which this is known.
    pub fn take_over(&self, kept: &Kept) {
        self.clear();
        for (ino, lookups) in &kept.told {
            self.told(*ino);
            if let Some(slot) = self.index().nodes.of.get(&ino.0) {
                self.put(Self::node(*slot) + 8, *lookups);
            }
        }
        kept.opened.iter().for_each(|open| self.opened(open));
        self.begun();
    }

    /// Another guest begins, or the same one anew.
    pub fn clear(&self) {
        let mut index = self.index();
        self.put(AT_READY, 0);
        // What was never used costs no memory, and is not touched.
        let (nodes, handles) = if index.nodes.next == 0 && index.handles.next == 0 {
            (self.used(self.nodes_max, Self::node), self.used(self.handles_max, |s| self.handle(s)))
        } else {
            (index.nodes.next, index.handles.next)
        };
        (0..nodes).for_each(|slot| self.put(Self::node(slot), 0));
        (0..handles).for_each(|slot| self.put(self.handle(slot), 0));
        *index = Index::default();
    }

    /// One past the last slot that is in use.
    fn used(&self, max: usize, at: impl Fn(usize) -> usize) -> usize {
        (0..max).rev().find(|slot| self.get(at(*slot)) != 0).map_or(0, |slot| slot + 1)
    }
}

impl ServerLedger for Ledger {
    fn begun(&self) {
        self.put(AT_READY, 1);
    }

    fn told(&self, ino: InodeId) {
        let mut index = self.index();
        if let Some(slot) = index.nodes.of.get(&ino.0) {
            let at = Self::node(*slot) + 8;
            self.put(at, self.get(at).saturating_add(1));
        } else if let Some(slot) = index.nodes.take(ino.0, self.nodes_max) {
            self.put(Self::node(slot) + 8, 1);
            self.put(Self::node(slot), ino.0);
        }
    }

    fn forgot(&self, ino: InodeId, count: u64) {
        let mut index = self.index();
        let Some(slot) = index.nodes.of.get(&ino.0).copied() else { return };
        let left = self.get(Self::node(slot) + 8).saturating_sub(count);
        self.put(Self::node(slot) + 8, left);
        if left == 0 {
            self.put(Self::node(slot), 0);
            index.nodes.give(ino.0);
        }
    }

    fn opened(&self, open: &OpenFile) {
        if let Some(slot) = self.index().handles.take(open.fh, self.handles_max) {
            let at = self.handle(slot);
            self.put(at + 8, open.ino.0);
            self.put(at + 16, open.flags.into());
            self.put(at, open.fh);
        }
    }

    fn closed(&self, fh: u64) {
        if let Some(slot) = self.index().handles.give(fh) {
            self.put(self.handle(slot), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Guest = Guest { nodes_max: 4, handles_max: 2 };

    fn file() -> File {
        File::from(rustix::fs::memfd_create("ledger", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }

    #[test]
    fn what_was_told_and_opened_is_found_again() {
        let file = file();
        let again = || Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        let (ledger, kept) = again();
        assert!(kept.is_none());
        ledger.begun();
        for ino in [7, 8, 7, 9] {
            ledger.told(InodeId(ino));
        }
        ledger.forgot(InodeId(8), 1);
        ledger.told(InodeId(10));
        ledger.told(InodeId(11));
        ledger.told(InodeId(12)); // one too many
        let open = |fh| OpenFile { fh, ino: InodeId(fh + 100), flags: 2 };
        (1..4).for_each(|fh| ledger.opened(&open(fh)));
        ledger.closed(1);
        drop(ledger);
        let (ledger, kept) = again();
        let mut kept = kept.unwrap();
        kept.told.sort_unstable();
        assert_eq!(kept.told, [(7, 2), (9, 1), (10, 1), (11, 1)].map(|(i, n)| (InodeId(i), n)));
        assert_eq!(kept.opened, [open(2)]);
        // The slots are where they were.
        ledger.forgot(InodeId(7), 2);
        ledger.opened(&open(5));
        let (ledger, kept) = again();
        assert_eq!((kept.as_ref().unwrap().told.len(), kept.unwrap().opened.len()), (3, 2));
        ledger.clear();
        assert!(again().1.is_none());
    }

    #[test]
    fn the_book_of_another_device_is_not_read() {
        let file = file();
        let (ledger, _) = Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        ledger.begun();
        ledger.told(InodeId(7));
        drop(ledger);
        let other = Guest { nodes_max: 5, ..GUEST };
        assert!(Ledger::of(file.try_clone().unwrap(), &other).unwrap().1.is_none());
        assert!(Ledger::of(file, &GUEST).unwrap().1.is_none());
    }
}
