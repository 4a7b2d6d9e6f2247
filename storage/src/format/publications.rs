//! Which transactions were published with which position of the stream: some of them, for who asks later what has changed since.
//!
//! Two slots in `Segment::Super`, behind the root records (at 8320 and 12416), that are written in turn; of those that are whole the one with the newest
//! publication counts. One that knows of a publication which is newer than the root is of a volume that is no more, and goes; so is one that was not put
//! down by the start of the service before this one: who was there in between may have made the volume anew.
//!
//! ```text
//! offset  size  field
//!      0     4  magic    "CBPH"
//!      4     4  checksum CRC32C of bytes 8..40 + 16 n
//!      8     4  version  1
//!     12     4  number n of publications, at most 240
//!     16    16  uuid     of the volume
//!     32     4  start of the service (`clients`) that has put them down
//!     36     4  zero
//!     40  16 n  of each: position in the stream u64, transaction u64; both rise
//! ```

use alloc::vec::Vec;

use base::{StreamSeq, crc32c};

use super::superblock::{ROOT_AT, ROOT_BYTES};
use super::{Corrupt, Reader, Writer};

/// Publications in one record, at most.
pub const PUBLICATIONS_MAX: usize = 240;
/// Bytes of a slot.
pub const PUBLICATIONS_BYTES: usize = HEAD + 16 * PUBLICATIONS_MAX;
/// Where the slots lie.
pub const PUBLICATIONS_AT: [u64; 2] =
    [ROOT_AT[0] + ROOT_BYTES as u64, ROOT_AT[1] + ROOT_BYTES as u64];

const HEAD: usize = 40;
const NAME: &str = "publications";
const _: () = assert!(PUBLICATIONS_AT[0] + PUBLICATIONS_BYTES as u64 <= ROOT_AT[1]);
const _: () =
    assert!(PUBLICATIONS_AT[1] + PUBLICATIONS_BYTES as u64 <= super::superblock::SUPER_BYTES);

/// What one slot says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Publications {
    /// Volume that they are of.
    pub uuid: [u8; 16],
    /// The start of the service by which they were put down.
    pub start: u32,
    /// Positions of the stream, and the transactions that were published with their state.
    pub all: Vec<(StreamSeq, u64)>,
}

impl Publications {
    /// The bytes; there are at most [`PUBLICATIONS_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + 16 * self.all.len());
        let mut w = Writer(&mut bytes);
        w.bytes(b"CBPH").u32(0).u32(1).u32(self.all.len() as u32).bytes(&self.uuid);
        w.u32(self.start).u32(0);
        for (seq, transaction) in &self.all {
            w.u64(seq.0).u64(*transaction);
        }
        let crc = crc32c(0, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks one slot.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, bytes);
        if r.bytes(4)? != b"CBPH" {
            return Err(r.corrupt("do not begin with their magic"));
        }
        let (crc, version, count) = (r.u32()?, r.u32()?, r.u32()? as usize);
        if version != 1 {
            return Err(r.corrupt("have an unknown version"));
        }
        let whole = bytes.get(8..HEAD + 16 * count).filter(|_| count <= PUBLICATIONS_MAX);
        if whole.is_none_or(|whole| crc != crc32c(0, whole)) {
            return Err(r.corrupt("fail their checksum"));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(r.bytes(16)?);
        let (start, zero) = (r.u32()?, r.u32()?);
        if zero != 0 {
            return Err(r.corrupt("have bytes set that must be zero"));
        }
        let mut all: Vec<(StreamSeq, u64)> = Vec::with_capacity(count);
        for _ in 0..count {
            let (seq, transaction) = (StreamSeq(r.u64()?), r.u64()?);
            let rise = all.last().is_none_or(|last| last.0 < seq && last.1 < transaction);
            if !rise || seq >= StreamSeq::END {
                return Err(r.corrupt("are in no order"));
            }
            all.push((seq, transaction));
        }
        Ok(Self { uuid, start, all })
    }
}
