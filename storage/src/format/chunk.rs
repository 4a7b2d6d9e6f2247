//! A chunk of the replication stream: what one client's log yielded in one go, after validation
//! and coalescing. It is what travels down the chain and what lies in every member's stream ring.
//!
//! ```text
//! offset  size  field
//!      0     4  magic        "CBCK"
//!      4     2  version      2 (1 said nothing of refusals)
//!      6     2  flags        zero
//!      8     4  checksum     CRC32C of bytes 12..80 (the entries carry their own)
//!     12     4  epoch        epoch of the chain that accepted the chunk
//!     16     8  stream seq   position in the stream; the first chunk of a volume is 1
//!     24     8  client       whose log; 0 for the service's own operations
//!     32     8  last seq     the client's operations up to here are settled by this chunk
//!     40     4  incarnation  of the client's log: seed of the entries' checksums
//!     44     4  entries      how many follow
//!     48     4  body bytes   all entries, each rounded up to whole lines
//!     52     4  refusals     operations of the client that were refused, of those that this chunk settles
//!     56     8  time         realtime nanoseconds at the head
//!     64     8  refused      sequence of the last of these; 0: none
//!     72     2  errno        why it was refused
//!     74     6  reserved     zero
//!     80        entries (format::entry)
//! ```

use alloc::vec::Vec;

use base::{ClientId, Epoch, Sequence, StreamSeq, crc32c};

use super::{Corrupt, Reader, Writer};
use crate::limits::CHUNK_BYTES_MAX;

/// Bytes of the header.
pub const CHUNK_HEADER_BYTES: usize = 80;
const MAGIC: u32 = u32::from_le_bytes(*b"CBCK");
const VERSION: u16 = 2;
const NAME: &str = "stream chunk";

/// Header of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ChunkHeader {
    /// Epoch of the chain.
    pub epoch: Epoch,
    /// Position in the stream.
    pub stream_seq: StreamSeq,
    /// Whose log.
    pub client: ClientId,
    /// The client's operations up to here are settled.
    pub last_seq: Sequence,
    /// Seed of the entries' checksums.
    pub incarnation: u32,
    /// Entries that follow.
    pub entries: u32,
    /// Bytes that follow.
    pub body_bytes: u32,
    /// Realtime nanoseconds at the head.
    pub time: u64,
    /// Operations that were refused, of those settled by this chunk: whoever has the chunk knows, also
    /// if the head that refused them is gone.
    pub refusals: u32,
    /// The last of them; 0: none.
    pub refused: Sequence,
    /// Why it was refused.
    pub errno: u16,
}

impl ChunkHeader {
    /// Whether it says that a client is no more: an empty chunk with sequence 0.
    pub const fn is_farewell(&self) -> bool {
        self.last_seq.0 == 0 && self.entries == 0
    }

    /// The 80 bytes.
    pub fn encode(&self) -> [u8; CHUNK_HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(CHUNK_HEADER_BYTES);
        let mut w = Writer(&mut bytes);
        w.u32(MAGIC).u16(VERSION).u16(0).u32(0).u32(self.epoch.0).u64(self.stream_seq.0);
        w.u64(self.client.0).u64(self.last_seq.0).u32(self.incarnation).u32(self.entries);
        w.u32(self.body_bytes).u32(self.refusals).u64(self.time).u64(self.refused.0);
        w.u16(self.errno).u16(0).u32(0);
        let mut fixed = [0u8; CHUNK_HEADER_BYTES];
        fixed.copy_from_slice(&bytes);
        let crc = crc32c(0, &fixed[12..]);
        fixed[8..12].copy_from_slice(&crc.to_le_bytes());
        fixed
    }

    /// Reads and checks a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, bytes);
        let head = Reader::new(NAME, bytes).bytes(CHUNK_HEADER_BYTES)?;
        if r.u32()? != MAGIC {
            return Err(r.corrupt("does not begin with its magic"));
        }
        if r.u16()? != VERSION {
            return Err(r.corrupt("has an unknown version"));
        }
        let flags = r.u16()?;
        if r.u32()? != crc32c(0, &head[12..]) {
            return Err(r.corrupt("fails its checksum"));
        }
        let header = Self {
            epoch: Epoch(r.u32()?),
            stream_seq: StreamSeq(r.u64()?),
            client: ClientId(r.u64()?),
            last_seq: Sequence(r.u64()?),
            incarnation: r.u32()?,
            entries: r.u32()?,
            body_bytes: r.u32()?,
            refusals: r.u32()?,
            time: r.u64()?,
            refused: Sequence(r.u64()?),
            errno: r.u16()?,
        };
        if flags != 0 || r.u16()? != 0 || r.u32()? != 0 {
            return Err(r.corrupt("has bytes set that must be zero"));
        }
        if header.stream_seq >= StreamSeq::END
            || header.last_seq.max(header.refused) >= Sequence::END
        {
            return Err(r.corrupt("names a position that nothing can have"));
        }
        if header.body_bytes as usize > CHUNK_BYTES_MAX
            || u64::from(header.entries) * 64 > u64::from(header.body_bytes)
        {
            return Err(r.corrupt("claims more than a chunk holds"));
        }
        Ok(header)
    }
}
