//! Requests that a device had begun when it was killed: the inflight region of the vhost-user protocol (split rings,
//! version 1). The monitor keeps it, and gives it to the device that comes next.
//!
//! For each queue a header and an entry for each descriptor. An entry says that the request with this head was taken, and
//! in which order; the header which was given back last, and how many by then. The order of stores is what
//! matters: it is written in [`Tracker::begin`] and [`Tracker::end`].

use std::fs::File;
use std::sync::atomic::{Ordering, fence};

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{Bytes, FileOffset, MmapRegion};

/// What the layout is called.
const VERSION: u16 = 1;
/// Of one queue's part.
const ALIGN: usize = 64;
const HEADER: usize = 16;
const ENTRY: usize = 16;
/// Offsets in the header.
const AT_VERSION: usize = 8;
const AT_DESCRIPTORS: usize = 10;
const AT_LAST: usize = 12;
const AT_USED: usize = 14;
/// Offset in an entry.
const AT_COUNTER: usize = 8;

/// Bytes of one queue's part.
pub fn queue_bytes(queue_size: u16) -> usize {
    (HEADER + ENTRY * usize::from(queue_size)).next_multiple_of(ALIGN)
}

/// The region of all queues.
#[derive(Debug)]
pub struct Region {
    map: MmapRegion<()>,
    queue_size: u16,
    queues: u16,
}

impl Region {
    /// Maps `file` at `offset`.
    ///
    /// # Errors
    /// It is shorter than so many queues of this size need.
    pub fn map(file: File, offset: u64, queues: u16, queue_size: u16) -> Result<Self, String> {
        let len = queue_bytes(queue_size) * usize::from(queues);
        let size = rustix::fs::fstat(&file).map_err(|e| format!("inflight region: {e}"))?.st_size;
        let end =
            offset.checked_add(len as u64).filter(|end| *end <= u64::try_from(size).unwrap_or(0));
        if end.is_none() || len == 0 {
            return Err(format!(
                "inflight region of {size} bytes for {queues} queues of {queue_size}"
            ));
        }
        let map = MmapRegionBuilder::new_with_bitmap(len, ())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED)
            .with_file_offset(FileOffset::new(file, offset))
            .build()
            .map_err(|e| format!("mapping the inflight region: {e}"))?;
        Ok(Self { map, queue_size, queues })
    }

    /// Makes a new one, in memory; the file, and its length in bytes.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub fn create(queues: u16, queue_size: u16) -> std::io::Result<(File, u64)> {
        let len = (queue_bytes(queue_size) * usize::from(queues)) as u64;
        let fd = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, len)?;
        Ok((File::from(fd), len))
    }

    /// Whether it has room for a queue.
    pub fn has(&self, queue: usize, size: u16) -> bool {
        queue < usize::from(self.queues) && size <= self.queue_size
    }

    fn read<T: vm_memory::ByteValued>(&self, at: usize) -> T {
        let zero = || T::zeroed();
        self.map.as_volatile_slice().read_obj(at).unwrap_or_else(|_| zero())
    }

    fn write<T: vm_memory::ByteValued>(&self, at: usize, value: T) {
        // Offsets are those of a queue and a descriptor that were checked.
        let _ = self.map.as_volatile_slice().write_obj(value, at);
    }
}

/// The part of one queue.
#[derive(Debug)]
pub struct Tracker {
    region: std::sync::Arc<Region>,
    base: usize,
    counter: u64,
}

impl Tracker {
    /// That of `queue`, and the heads of the requests that somebody had begun and not given back, in their order. `used` is
    /// how many the ring says were given back. None if the region has no room for the queue.
    pub fn open(
        region: std::sync::Arc<Region>,
        queue: usize,
        size: u16,
        used: u16,
    ) -> Option<(Self, Vec<u16>)> {
        if !region.has(queue, size) {
            return None;
        }
        let mut tracker = Self { base: queue * queue_bytes(region.queue_size), region, counter: 0 };
        let (region, base) = (&tracker.region, tracker.base);
        let mut begun: Vec<(u64, u16)> = Vec::new();
        if region.read::<u16>(base + AT_VERSION) == VERSION {
            let last = region.read::<u16>(base + AT_LAST);
            if region.read::<u16>(base + AT_USED) != used && last < size {
                // It was given back, and then there was no time to write that down.
                region.write(tracker.entry(last), 0u8);
            }
            for head in 0..size {
                let at = tracker.entry(head);
                if region.read::<u8>(at) != 0 {
                    begun.push((region.read::<u64>(at + AT_COUNTER), head));
                }
            }
            begun.sort_unstable();
        } else {
            region.write(base + AT_DESCRIPTORS, size);
            region.write(base + AT_VERSION, VERSION);
        }
        region.write(base + AT_USED, used);
        tracker.counter = begun.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Some((tracker, begun.into_iter().map(|(_, head)| head).collect()))
    }

    fn entry(&self, head: u16) -> usize {
        self.base + HEADER + ENTRY * usize::from(head)
    }

    /// The request with this head was taken from the ring.
    pub fn begin(&mut self, head: u16) {
        let at = self.entry(head);
        self.region.write(at + AT_COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.region.write(at, 1u8);
    }

    /// It was not begun after all, and is in the ring as before.
    pub fn unbegin(&mut self, head: u16) {
        self.region.write(self.entry(head), 0u8);
    }

    /// It is about to be given back, as one more in the used ring.
    pub fn end(&mut self, head: u16) {
        self.region.write(self.base + AT_LAST, head);
        fence(Ordering::SeqCst);
    }

    /// It was: the ring now says that so many were.
    pub fn ended(&mut self, head: u16, used: u16) {
        fence(Ordering::SeqCst);
        self.region.write(self.entry(head), 0u8);
        fence(Ordering::SeqCst);
        self.region.write(self.base + AT_USED, used);
    }

    /// Nothing is begun: the guest starts anew.
    pub fn clear(&mut self, size: u16) {
        (0..size).for_each(|head| self.region.write(self.entry(head), 0u8));
        self.region.write(self.base + AT_USED, 0u16);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn reopened(file: &File, used: u16) -> (Tracker, Vec<u16>) {
        let region = Region::map(file.try_clone().unwrap(), 0, 2, 8).unwrap();
        Tracker::open(Arc::new(region), 1, 8, used).unwrap()
    }

    #[test]
    fn what_was_begun_is_found_in_its_order() {
        let (file, len) = Region::create(2, 8).unwrap();
        assert_eq!(len, 2 * 192);
        let (mut tracker, begun) = reopened(&file, 0);
        assert!(begun.is_empty());
        for head in [5, 2, 7] {
            tracker.begin(head);
        }
        tracker.end(2);
        tracker.ended(2, 1);
        assert_eq!(reopened(&file, 1).1, [5, 7]);
        // Killed between the used ring and the book: the ring counts.
        let (mut tracker, _) = reopened(&file, 1);
        tracker.begin(3);
        tracker.end(5);
        assert_eq!(reopened(&file, 2).1, [7, 3]);
        // And before the ring.
        let (mut tracker, _) = reopened(&file, 2);
        tracker.end(7);
        assert_eq!(reopened(&file, 2).1, [7, 3]);
    }

    #[test]
    fn a_short_region_is_refused() {
        let (file, _) = Region::create(1, 8).unwrap();
        assert!(Region::map(file.try_clone().unwrap(), 0, 2, 8).is_err());
        assert!(Region::map(file.try_clone().unwrap(), u64::MAX, 1, 8).is_err());
        assert!(Region::map(file.try_clone().unwrap(), 64, 1, 8).is_err());
        let region = Arc::new(Region::map(file, 0, 1, 8).unwrap());
        assert!(Tracker::open(region.clone(), 1, 8, 0).is_none());
        assert!(Tracker::open(region, 0, 9, 0).is_none());
    }
}
