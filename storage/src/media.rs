//! The trait through which region memory is reached: by the service over the fabric, by the
//! checker and the tests directly, by the simulator through a recording wrapper.
//!
//! A region is a set of *segments*, each a flat range of bytes with its own access rights (in a
//! file-backed region each is a file: the smallest thing that can be handed to a process).

use alloc::collections::BTreeMap;
use alloc::string::String;

/// Bytes that [`sum_copied`] reads at a time.
const SUMMED: u64 = 4096;

/// [`Media::sum`] of a range, where it cannot do without a copy.
pub fn sum_copied<M: Media + ?Sized>(
    media: &M,
    segment: Segment,
    (at, len): (u64, u64),
    seed: u32,
) -> Result<u32, MediaError> {
    let mut buffer = [0; SUMMED as usize];
    let (mut crc, mut done) = (seed, 0);
    while done < len {
        let n = (len - done).min(SUMMED);
        media.read(segment, at + done, &mut buffer[..n as usize])?;
        (crc, done) = (base::crc32c(crc, &buffer[..n as usize]), done + n);
    }
    Ok(crc)
}

/// Names a segment of the region.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Segment {
    /// Superblock, two copies, and the root records.
    Super,
    /// Tree pages.
    Tree,
    /// Ring of the replication stream (this member's copy of every log of the volume).
    Stream,
    /// Table of the clients, for a service that starts again (never mapped by clients).
    Clients,
    /// Control area and lanes of one client.
    Log(u32),
    /// Data blocks of one read class.
    Arena(u32),
}

/// Room below a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spare {
    /// Bytes that arenas have, or that are reserved for them.
    pub data: u64,
    /// Of those, bytes that are reserved, and that no arena has yet.
    pub reserved: u64,
    /// Bytes that the file system below can give beyond that, when all logs and the tree have what they may still take.
    pub free: u64,
}

/// Why region memory could not be reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MediaError {
    /// The range does not lie in the segment.
    OutOfRange {
        /// Segment asked.
        segment: Segment,
        /// First byte asked.
        offset: u64,
        /// Bytes asked.
        len: u64,
        /// Size of the segment.
        size: u64,
    },
    /// The segment does not exist.
    Missing(Segment),
    /// The operating system or the fabric refused: what, and why.
    Io(String),
}

impl core::fmt::Display for MediaError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::OutOfRange { segment, offset, len, size } => {
                write!(f, "{segment:?}: bytes {offset}+{len} lie outside its {size} bytes")
            }
            Self::Missing(segment) => write!(f, "{segment:?}: no such segment in the region"),
            Self::Io(text) => f.write_str(text),
        }
    }
}

impl core::error::Error for MediaError {}

/// One-sided access to the segments of a region.
///
/// What an implementation promises (docs/assumptions.md numbers these):
/// - an aligned 8-byte `load64`/`store64`/`cas64` is atomic, also towards other processes;
/// - after `persist(range)` and then `fence()`, what was written to the range before is durable in
///   the sense of the region's durability mode; nothing is promised about order without a fence;
/// - memory that a client can write may change between two reads of it: callers copy, then judge.
pub trait Media: Send + Sync {
    /// Size of a segment in bytes.
    fn size(&self, segment: Segment) -> Result<u64, MediaError>;
    /// Copies bytes out.
    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError>;
    /// Copies bytes out, behind what `to` holds. (Memory that is about to be filled need not be zeroed before.)
    fn append(
        &self,
        segment: Segment,
        offset: u64,
        len: usize,
        to: &mut alloc::vec::Vec<u8>,
    ) -> Result<(), MediaError> {
        let start = to.len();
        to.resize(start + len, 0);
        let done = self.read(segment, offset, &mut to[start..]);
        if done.is_err() {
            to.truncate(start);
        }
        done
    }
    /// Copies bytes in; not durable before `persist` + `fence`.
    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError>;
    /// Starts write-back of a range.
    fn persist(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError>;
    /// Waits until every write-back started before is done, and orders later stores after it.
    fn fence(&self) -> Result<(), MediaError>;
    /// Atomic load of an aligned word (acquire).
    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError>;
    /// Atomic store of an aligned word (sequentially consistent).
    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError>;
    /// Atomic compare and swap; returns the value found.
    fn cas64(
        &self,
        segment: Segment,
        offset: u64,
        expect: u64,
        value: u64,
    ) -> Result<u64, MediaError>;
    /// Copies between segments (never overlapping); not durable before `persist` + `fence`.
    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError>;
    /// The same of several ranges in order, of which each goes behind the one before it.
    fn copy_run(&self, from: &[(Segment, u64, u64)], to: (Segment, u64)) -> Result<(), MediaError> {
        let mut at = to.1;
        for &(segment, offset, len) in from {
            self.copy((segment, offset), (to.0, at), len)?;
            at += len;
        }
        Ok(())
    }
    /// The CRC32C of a range, continued from `seed`. Others may be writing to it: then it is that of no state that it ever had.
    fn sum(&self, segment: Segment, offset: u64, len: u64, seed: u32) -> Result<u32, MediaError> {
        sum_copied(self, segment, (offset, len), seed)
    }
    /// Makes sure that a segment exists with at least `size` bytes (zeroes where new).
    fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError>;
    /// Gives the memory of a range back; it reads as zeroes afterwards.
    fn discard(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError>;
    /// Takes memory for ranges that are about to be written to, so that no store fails for want of it. An
    /// error says that there is none.
    fn back(&self, _ranges: &[(Segment, u64, u64)]) -> Result<(), MediaError> {
        Ok(())
    }
    /// How much there is below, if that is known to have an end.
    fn spare(&self) -> Result<Option<Spare>, MediaError> {
        Ok(None)
    }
    /// Bytes that arenas have from that offset on, all together: 0 where there is no end to what is below. It takes the longer the more it is.
    fn taken_from(&self, _offset: u64) -> Result<u64, MediaError> {
        Ok(0)
    }
    /// Whether whoever else may write to the segment has made it longer or shorter than `size`, or taken memory beyond
    /// its end; it has that size again, and what was beyond is given back.
    fn mend(&self, _segment: Segment, _size: u64) -> Result<bool, MediaError> {
        Ok(false)
    }
    /// Removes the log of a client of `user` that its process may still have: then what it has is looked after, and the answer is
    /// `true`. `bytes`: so long it may stay, or 0 if all that it has is to be taken away, also from whoever has it mapped.
    fn leave(&self, log: Segment, _user: u32, _bytes: u64) -> Result<bool, MediaError> {
        self.remove(log).map(|()| false)
    }
    /// Looks at the logs that were left: nobody takes more by one than it had, and who tries has none. How many of each user are still
    /// open somewhere.
    fn look_at_left(&self) -> Result<BTreeMap<u32, usize>, MediaError> {
        Ok(BTreeMap::new())
    }
    /// Removes a segment and its memory.
    fn remove(&self, segment: Segment) -> Result<(), MediaError>;
    /// Segments that exist.
    fn segments(&self) -> Result<alloc::vec::Vec<Segment>, MediaError>;
    /// Wakes whoever waits on the 32-bit word at `offset` (a futex on the host).
    fn wake(&self, segment: Segment, offset: u64) -> Result<(), MediaError>;
}
