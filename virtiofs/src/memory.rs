//! A guest's memory: the regions that its monitor shares with us.
#![allow(unsafe_code)] // addresses of mapped regions become pieces

use std::fs::File;
use std::sync::Arc;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use crate::hal::Piece;

/// Regions at most: what a monitor sends at once, and what slots it may have.
pub const REGIONS_MAX: usize = 32;

/// Where a region lies in the guest, in its monitor, and in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Guest physical address.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// Address in the monitor's process.
    pub user: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// A guest's memory, mapped.
#[derive(Debug)]
pub struct Memory {
    map: Arc<GuestMemoryMmap<()>>,
    regions: Vec<Region>,
}

impl Default for Memory {
    fn default() -> Self {
        Self { map: Arc::new(GuestMemoryMmap::new()), regions: Vec::new() }
    }
}

impl Memory {
    /// Maps one region. The file must be as long as is said, or the first touch would kill us (SIGBUS).
    fn map_region(region: &Region, file: File) -> Result<GuestRegionMmap<()>, String> {
        let end = region.offset.checked_add(region.len);
        let len = usize::try_from(region.len).ok().filter(|len| *len > 0);
        let (Some(end), Some(len)) = (end, len) else {
            return Err(format!("a memory region of {} bytes", region.len));
        };
        if region.guest.checked_add(region.len).is_none()
            || region.user.checked_add(region.len).is_none()
        {
            return Err(format!("memory region at {:#x} goes past the end", region.guest));
        }
        let size =
            rustix::fs::fstat(&file).map_err(|e| format!("memory of the guest: {e}"))?.st_size;
        if u64::try_from(size).unwrap_or(0) < end {
            return Err(format!("memory region of {end} bytes in a file of {size}"));
        }
        let mapping = MmapRegionBuilder::new_with_bitmap(len, ())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file, region.offset))
            .build()
            .map_err(|e| format!("mapping the guest's memory: {e}"))?;
        GuestRegionMmap::new(mapping, GuestAddress(region.guest))
            .ok_or_else(|| format!("memory region at {:#x} goes past the end", region.guest))
    }

    /// Maps these regions.
    ///
    /// # Errors
    /// A region that is not there, is empty, or overlaps another one.
    pub fn new(regions: Vec<(Region, File)>) -> Result<Self, String> {
        if regions.len() > REGIONS_MAX {
            return Err(format!("{} memory regions, of {REGIONS_MAX} at most", regions.len()));
        }
        let (known, mapped): (Vec<Region>, Vec<_>) = regions
            .into_iter()
            .map(|(region, file)| Ok((region, Self::map_region(&region, file)?)))
            .collect::<Result<Vec<_>, String>>()?
            .into_iter()
            .unzip();
        let mut mapped = mapped;
        mapped.sort_by_key(|region| region.start_addr().0);
        let map = GuestMemoryMmap::from_regions(mapped).map_err(|e| format!("memory: {e}"))?;
        Ok(Self { map: Arc::new(map), regions: known })
    }

    /// With one region more.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(&self, region: Region, file: File) -> Result<Self, String> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(format!("more than {REGIONS_MAX} memory regions"));
        }
        let mapped = Arc::new(Self::map_region(&region, file)?);
        let map = self.map.insert_region(mapped).map_err(|e| format!("memory: {e}"))?;
        let regions = self.regions.iter().copied().chain([region]).collect();
        Ok(Self { map: Arc::new(map), regions })
    }

    /// Without a region.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, guest: u64, len: u64) -> Result<Self, String> {
        let (map, _) = self
            .map
            .remove_region(GuestAddress(guest), len)
            .map_err(|e| format!("memory region at {guest:#x}: {e}"))?;
        let regions = self.regions.iter().copied().filter(|r| r.guest != guest).collect();
        Ok(Self { map: Arc::new(map), regions })
    }

    /// The guest address of an address in its monitor.
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions
            .iter()
            .find(|r| user.checked_sub(r.user).is_some_and(|at| at < r.len))
            .and_then(|r| r.guest.checked_add(user - r.user))
    }

    /// The map, for the rings.
    pub fn map(&self) -> &Arc<GuestMemoryMmap<()>> {
        &self.map
    }
}

/// The guest address of a piece that [`pieces`] found in the same map.
pub fn guest_address_of(map: &GuestMemoryMmap<()>, piece: &Piece) -> Option<u64> {
    map.iter().find_map(|region| {
        let start = region.get_host_address(vm_memory::MemoryRegionAddress(0)).ok()?.addr();
        let offset = u64::try_from(piece.address().checked_sub(start)?).ok()?;
        (offset < region.len()).then(|| region.start_addr().0.checked_add(offset))?
    })
}

/// Adds the pieces of `len` bytes at a guest address, in which regions may meet; false if they are not all mapped, or make
/// the list longer than `max`.
pub fn pieces(
    map: &GuestMemoryMmap<()>,
    address: u64,
    len: usize,
    max: usize,
    to: &mut Vec<Piece>,
) -> bool {
    let mut at = address;
    let mut left = len;
    while left > 0 {
        let Some(region) = map.find_region(GuestAddress(at)) else { return false };
        let offset = at - region.start_addr().0;
        let part = left.min(usize::try_from(region.len() - offset).unwrap_or(usize::MAX));
        let Ok(slice) = region.get_host_address(vm_memory::MemoryRegionAddress(offset)) else {
            return false;
        };
        if to.len() >= max {
            return false;
        }
        // SAFETY: `part` bytes from here on are in the region, which stays mapped as long as the map, which the
        // chain holds. Nobody makes references to it but `Piece`.
        to.push(unsafe { Piece::new(slice, part) });
        left -= part;
        let Some(next) = at.checked_add(part as u64) else { return left == 0 };
        at = next;
    }
    true
}
