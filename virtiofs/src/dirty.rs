//! The log of dirty pages: a bitmap that a monitor shares with us while it moves its guest to another machine. It copies the guest's memory
//! while the guest runs, and again those pages that were written meanwhile; what a device writes it only sees if that says so here.
//!
//! One bit for each page of 4096 bytes, by guest physical address: bit `page % 8` of byte `page / 8`. The monitor takes bits out at any
//! time and then copies the pages, so the order is: first what is written, then its bit. The other way round a page may be copied as it
//! was, and its bit be gone.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{FileOffset, MmapRegion};

/// Bytes of a page of the log, whatever those of the machine are.
pub const PAGE: u64 = 4096;

/// A monitor's log, mapped.
#[derive(Debug)]
pub struct Log {
    map: MmapRegion<()>,
    /// Something was written for which the log has no bit, and that was said.
    too_short: AtomicBool,
}

impl Log {
    /// Maps `len` bytes of `file` at `offset`. The file must be as long as is said, or the first mark would kill us (SIGBUS).
    ///
    /// # Errors
    /// It is shorter than that, or empty, or cannot be mapped.
    pub fn map(file: File, offset: u64, len: u64) -> Result<Self, String> {
        let size = rustix::fs::fstat(&file).map_err(|e| format!("log of dirty pages: {e}"))?;
        let size = u64::try_from(size.st_size).unwrap_or(0);
        let end = offset.checked_add(len).filter(|end| *end <= size);
        let (Some(_), Some(len)) = (end, usize::try_from(len).ok().filter(|len| *len > 0)) else {
            return Err(format!(
                "log of dirty pages: {len} bytes at {offset} in a file of {size}: the monitor must make it longer first"
            ));
        };
        let map = MmapRegionBuilder::new_with_bitmap(len, ())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file, offset))
            .build()
            .map_err(|e| format!("mapping the log of dirty pages: {e}"))?;
        Ok(Self { map, too_short: AtomicBool::new(false) })
    }

    /// The `len` bytes at a guest address have been written. What lies beyond the log is said once, and is the monitor's loss.
    pub fn mark(&self, address: u64, len: u64) {
        let Some(more) = len.checked_sub(1) else { return };
        let (first, last) = (address / PAGE, address.saturating_add(more) / PAGE);
        let pages = (self.map.size() as u64).saturating_mul(8);
        if last >= pages && !self.too_short.swap(true, Ordering::Relaxed) {
            log::warn!(
                "the monitor's log of dirty pages has room for {pages}, and page {last} was written: what its guest is moved with is wrong"
            );
        }
        let bytes = self.map.as_volatile_slice();
        let end = (last + 1).min(pages);
        let mut page = first;
        while page < end {
            let byte = page / 8;
            let next = end.min(8 * (byte + 1));
            let bits = (page..next).fold(0, |bits, page| bits | 1u8 << (page % 8));
            let at = usize::try_from(byte).unwrap_or(usize::MAX);
            if let Ok(cell) = bytes.get_atomic_ref::<AtomicU8>(at) {
                // Always: a bit that is there may be about to be taken out, for a copy of the page as it was.
                cell.fetch_or(bits, Ordering::Release);
            }
            page = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    fn file(len: u64) -> File {
        let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(len).unwrap();
        file
    }

    fn pages(file: &File, len: usize) -> Vec<u64> {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0).unwrap();
        (0..8 * len as u64)
            .filter(|page| bytes[*page as usize / 8] >> (page % 8) & 1 == 1)
            .collect()
    }

    #[test]
    fn a_log_that_is_not_there_is_refused() {
        for (offset, len) in [
            (0, 0),
            (0, 8193),
            (0, u64::MAX),
            (4096, 4097),
            (u64::MAX, 2),
            (u64::MAX - 4095, 4096),
            (12288, 1),
            // Not where a page begins.
            (8, 8),
        ] {
            assert!(Log::map(file(8192), offset, len).is_err(), "{len} at {offset}");
        }
        assert!(Log::map(file(0), 0, 1).is_err());
        let (_, pipe) = std::io::pipe().unwrap();
        assert!(Log::map(File::from(std::os::fd::OwnedFd::from(pipe)), 0, 1).is_err());
        let there = file(8192);
        let log = Log::map(there.try_clone().unwrap(), 4096, 1).unwrap();
        log.mark(0, 1 << 20);
        assert_eq!(pages(&there, 8192), (8 * 4096..8 * 4096 + 8).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn the_pages_of_what_was_written_are_marked_and_no_others(
            ranges in proptest::collection::vec((0u64..70 * PAGE, 0u64..20 * PAGE), 0..8),
        ) {
            let there = file(8);
            let log = Log::map(there.try_clone().unwrap(), 0, 8).unwrap();
            let mut marked = std::collections::BTreeSet::new();
            for (address, len) in ranges {
                log.mark(address, len);
                marked.extend((address..address + len).map(|at| at / PAGE).filter(|page| *page < 64));
            }
            prop_assert_eq!(pages(&there, 8), marked.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn no_address_is_too_much(address in any::<u64>(), len in any::<u64>()) {
            let there = file(4096);
            let log = Log::map(there.try_clone().unwrap(), 0, 8).unwrap();
            log.mark(address, len);
            log.mark(u64::MAX, len);
            log.mark(address, u64::MAX);
            prop_assert!(pages(&there, 4096).into_iter().all(|page| page < 64));
        }
    }
}
