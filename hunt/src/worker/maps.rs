//! Mappings. A mapping is looked at through the descriptor that it was made by: a kernel shows
//! what other nodes have written once it has asked for the file (docs/mount.md), so each access asks first.

use super::args::{Args, Bits, Stop};
use super::calls::number;
use super::{MAPS, SLOTS, Worker, done, sys};
use crate::pattern;

const PROTECTION: Bits = &[("r", libc::PROT_READ as i64), ("w", libc::PROT_WRITE as i64)];
const KIND: Bits = &[("shared", libc::MAP_SHARED as i64), ("private", libc::MAP_PRIVATE as i64)];

/// A mapping of a part of a file.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    address: usize,
    length: usize,
    /// The descriptor that it was made by, while that is open.
    slot: usize,
    generation: u64,
}

impl Worker {
    fn map(&self, args: &Args<'_>) -> Result<Map, Stop> {
        self.maps[args.named(0, 'm', MAPS)?].ok_or(Stop::NoSlot)
    }

    /// A part of a mapping, `MAP OFFSET LENGTH`, the file having been asked for.
    fn part(&self, args: &Args<'_>) -> Result<(Map, *mut u8, usize), Stop> {
        let map = self.map(args)?;
        let slot = self.slots[map.slot].as_ref().filter(|slot| slot.generation == map.generation);
        let fd = slot.ok_or(Stop::NoSlot)?.fd;
        let mut about = super::meta::empty_stat();
        done(sys!(fstat(fd, &raw mut about)))?;
        // Where the mode has changed, too, a mount's kernel hears of the bytes only when it reads.
        sys!(pread(fd, std::ptr::null_mut(), 0, 0));
        let offset = args.length(1)?.min(map.length);
        let length = args.length(2)?.min(map.length - offset);
        Ok((map, (map.address + offset) as *mut u8, length))
    }

    /// `mmap MAP SLOT OFFSET LENGTH PROTECTION KIND`.
    pub fn mmap(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let name = args.named(0, 'm', MAPS)?;
        if self.maps[name].is_some() {
            return Err(Stop::NoSlot);
        }
        let slot = args.named(1, 's', SLOTS)?;
        let (fd, generation) =
            self.slots[slot].as_ref().map(|s| (s.fd, s.generation)).ok_or(Stop::NoSlot)?;
        let length = args.length(3)?;
        let (protection, kind) = (args.bits(4, PROTECTION)?, args.bits(5, KIND)?);
        let at = sys!(mmap(std::ptr::null_mut(), length, protection, kind, fd, args.number(2)?));
        if at == libc::MAP_FAILED {
            return Err(Stop::Errno(super::errno()));
        }
        self.maps[name] = Some(Map { address: at as usize, length, slot, generation });
        Ok("0 0".into())
    }

    pub fn munmap(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let map = self.map(args)?;
        self.maps[args.named(0, 'm', MAPS)?] = None;
        number(done(sys!(munmap(map.address as *mut _, map.length))))
    }

    /// `peek MAP OFFSET LENGTH`: what is there, up to the first page that is not.
    pub fn peek(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (_, address, length) = self.part(args)?;
        let mut bytes = vec![0; length];
        let got = self.through_pipe(address, &mut bytes, false)?;
        bytes.truncate(got);
        Ok(self.seen(bytes))
    }

    /// `poke MAP OFFSET LENGTH PATTERN`: stores, and writes back: also what was stored before the first page that is not
    /// there, since other nodes need not see it before (docs/mount.md).
    pub fn poke(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (map, address, length) = self.part(args)?;
        let mut bytes = vec![0; length];
        pattern::fill(args.number(3)?.cast_unsigned(), &mut bytes);
        let put = self.through_pipe(address, &mut bytes, true);
        sys!(msync(map.address as *mut _, map.length, libc::MS_SYNC));
        Ok(format!("{} 0", put?))
    }

    /// `mapcopy SLOT OFFSET LENGTH PATTERN`: a private mapping: what is there, and that changes stay there. All in
    /// one, since what such a mapping shows of later changes to the file is nowhere told.
    pub fn map_copy(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (fd, length) = (self.fd(args, 0)?, args.length(2)?);
        let mut about = super::meta::empty_stat();
        done(sys!(fstat(fd, &raw mut about)))?;
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let at = sys!(mmap(std::ptr::null_mut(), length, protection, kind, fd, args.number(1)?));
        if at == libc::MAP_FAILED {
            return Err(Stop::Errno(super::errno()));
        }
        let mut bytes = vec![0; length];
        let got = self.through_pipe(at.cast(), &mut bytes, false);
        let mut other = vec![0; length.min(5000)];
        pattern::fill(args.number(3)?.cast_unsigned(), &mut other);
        let _ = self.through_pipe(at.cast(), &mut other, true);
        done(sys!(munmap(at, length)))?;
        bytes.truncate(got?);
        Ok(self.seen(bytes))
    }

    pub fn msync(&self, args: &Args<'_>) -> Result<String, Stop> {
        let map = self.map(args)?;
        number(done(sys!(msync(map.address as *mut _, map.length, libc::MS_SYNC))))
    }
}
