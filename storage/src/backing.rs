//! Memory below a region's files, taken before anybody touches it.
//!
//! Segments are sparse files. A store into a hole asks the file system for a block, and if it has none, ends the process with
//! SIGBUS. So blocks are taken with `fallocate` first, where an error is an error:
//! - the superblock, the stream and the table of clients when they are made;
//! - pages of the tree and blocks of the arenas before the transaction that writes to them is sealed (`Media::back`).
//!
//! Each arena has addresses for the whole capacity, and how much lies in which is known only then. So what a volume promises is kept in a
//! file of its own, the *ballast*: as large as tree and arenas may still grow. What they take it gives up, and what
//! they give back it takes. A volume without one (`mkfs --sparse`) has what the file system has left.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno as OsError;

use crate::media::Segment;

const BLOCK: u64 = 4096;
/// Each try gives up more of the ballast: others may take what it gave up.
const TRIES: u32 = 8;

/// What is known to be there.
#[derive(Debug, Default)]
pub(crate) struct Backing {
    known: BTreeMap<Segment, Vec<u64>>,
    pub(crate) ballast: Option<Ballast>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ballast {
    pub(crate) file: OwnedFd,
    /// As large as it is.
    pub(crate) bytes: u64,
    /// As large as it should be.
    pub(crate) wanted: u64,
}

/// Whether the segment's growth was promised: the ballast is for it.
pub(crate) fn is_promised(segment: Segment) -> bool {
    matches!(segment, Segment::Tree | Segment::Arena(_))
}

/// Whether the segment has all of its blocks from the beginning.
pub(crate) fn is_whole(segment: Segment) -> bool {
    matches!(segment, Segment::Super | Segment::Stream | Segment::Clients)
}

/// Bytes that a file has taken.
pub(crate) fn taken(file: &OwnedFd) -> Result<u64, OsError> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_blocks).unwrap_or(0).saturating_mul(512))
}

/// Bytes that a file has taken from an offset on. (What is taken and was never written to does not count, where the file system
/// tells one from the other.)
pub(crate) fn taken_from(file: &OwnedFd, offset: u64) -> Result<u64, OsError> {
    let (mut at, mut bytes) = (offset, 0);
    loop {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(at) => at,
            // None behind it.
            Err(OsError::NXIO) => return Ok(bytes),
            Err(e) => return Err(e),
        };
        // There is a hole at the end at the latest.
        let hole = rustix::fs::seek(file, SeekFrom::Hole(at))?;
        if hole <= at {
            return Ok(bytes);
        }
        (at, bytes) = (hole, bytes + (hole - at));
    }
}

/// Takes blocks for a range; what is there stays as it is.
pub(crate) fn take(file: &OwnedFd, offset: u64, len: u64) -> Result<(), OsError> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset, len) {
            Err(OsError::INTR) => {}
            // Nothing can be taken here before it is touched.
            Err(OsError::OPNOTSUPP | OsError::NOSYS) => return Ok(()),
            done => return done,
        }
    }
}

impl Ballast {
    /// Brings it to its size as far as there is room.
    pub(crate) fn settle(&mut self) -> Result<(), OsError> {
        if self.bytes > self.wanted {
            rustix::fs::ftruncate(&self.file, self.wanted)?;
        } else if self.bytes < self.wanted {
            take(&self.file, self.bytes, self.wanted - self.bytes)?;
            rustix::fs::ftruncate(&self.file, self.wanted)?;
        }
        self.bytes = self.wanted;
        Ok(())
    }

    fn give_up(&mut self, bytes: u64) -> Result<(), OsError> {
        let left = self.bytes.saturating_sub(bytes);
        rustix::fs::ftruncate(&self.file, left)?;
        self.bytes = left;
        Ok(())
    }
}

impl Backing {
    /// Runs of blocks of a range that are not known to be there.
    pub(crate) fn missing(&self, segment: Segment, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let known = self.known.get(&segment).map_or(&[][..], Vec::as_slice);
        let has = |block: u64| {
            known.get((block / 64) as usize).is_some_and(|word| word >> (block % 64) & 1 == 1)
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for block in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            match runs.last_mut() {
                _ if has(block) => {}
                Some((first, count)) if *first + *count == block => *count += 1,
                _ => runs.push((block, 1)),
            }
        }
        runs
    }

    fn mark(&mut self, segment: Segment, first: u64, count: u64) {
        let known = self.known.entry(segment).or_default();
        let words = (first + count).div_ceil(64) as usize;
        known.resize(known.len().max(words), 0);
        for block in first..first + count {
            known[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    /// Blocks of the range are not there any more.
    pub(crate) fn forget(&mut self, segment: Segment, offset: u64, len: u64) {
        let Some(known) = self.known.get_mut(&segment) else { return };
        let end = (offset.saturating_add(len).div_ceil(BLOCK)).min(known.len() as u64 * 64);
        for block in offset / BLOCK..end {
            known[(block / 64) as usize] &= !(1 << (block % 64));
        }
    }

    /// The segment is not there any more.
    pub(crate) fn forget_all(&mut self, segment: Segment) {
        self.known.remove(&segment);
    }

    /// Takes a run of blocks, in exchange for ballast if it was promised.
    pub(crate) fn take(
        &mut self,
        segment: Segment,
        file: &OwnedFd,
        (first, count): (u64, u64),
    ) -> Result<(), OsError> {
        let (offset, len) = (first * BLOCK, count * BLOCK);
        let Some(ballast) = self.ballast.as_mut().filter(|_| is_promised(segment)) else {
            take(file, offset, len)?;
            self.mark(segment, first, count);
            return Ok(());
        };
        let before = taken(file)?;
        let mut tries = 0;
        loop {
            match take(file, offset, len) {
                Err(OsError::NOSPC) if ballast.bytes > 0 && tries < TRIES => {
                    ballast.give_up(len.saturating_mul(1 << tries))?;
                    tries += 1;
                }
                done => break done?,
            }
        }
        ballast.wanted = ballast.wanted.saturating_sub(taken(file)?.saturating_sub(before));
        // What is missing of it is taken when there is room again.
        if ballast.bytes > ballast.wanted || tries > 0 {
            let _ = ballast.settle();
        }
        self.mark(segment, first, count);
        Ok(())
    }

    /// So many bytes of a promised segment were given back.
    pub(crate) fn gave_back(&mut self, bytes: u64) {
        if let Some(ballast) = &mut self.ballast {
            ballast.wanted += bytes;
            let _ = ballast.settle();
        }
    }
}
