//! The client table: which logs there are, whose they are, and what their owners hold. A node that
//! starts again takes the logs up by it. It lies in a segment that only the service reaches, so
//! that a hostile client, which can write anything into its own log, can claim nothing here.
//!
//! ```text
//! Segment::Clients
//!       0  header, two slots of 64 bytes; number n goes to slot n % 2
//!   65536 + 2621440 i  row i:
//!            0  record, 8192 bytes: written when the client attaches, zero when the row is free
//!         8192  progress, two slots of 128 bytes; number n goes to slot n % 2
//!        16384  leases, 131072 x 16 bytes; entry j is slot j of the client's lease table
//!      2113536  pins, 16384 x 16 bytes
//!
//! header                                           record
//!      0   4  magic "CBCT"                              0   4  magic "CBCR"
//!      4   4  CRC32C of bytes 8..64                     4   4  CRC32C of bytes 8..96+4n
//!      8   4  version 1                                 8   4  version 3
//!     12   4  starts of the service                    12   4  number of the log segment
//!     16   8  number, grows with each update           16   8  client
//!     24  16  boot of the machine                      24   4  incarnation
//!     40  16  secret of the proofs (`format::proof`)   28   4  lanes
//!     56   8  zero
//!                                                      32   8  bytes of a lane
//! progress                                             40   8  start time of the process
//!      0   4  magic "CBCP"                             48   4  process
//!      4   4  CRC32C of bytes 8..128                   52   4  user
//!      8   4  incarnation of the record                56   4  group
//!     12   4  1: sealed, 0: not                        60   4  epoch in which it attached
//!     16   8  number, grows with each update           64   4  n, supplementary groups
//!     24   8  published sequence                       68  28  zero
//!     32   8  sealed: the last sequence that counts    96  4n  groups
//!     40  64  logical position of each lane: what
//!             lies before it is published          held (lease, pin)
//!    104  24  zero                                      0   8  inode, 0 of a free entry
//!                                                       8   4  lease: 1 to read, 2 to write, 3 to
//!                                                              write what is not made yet, 4 joint;
//!                                                              pin: bits 1 open, 2 opened for
//!                                                              writing, 4 closed, which the head
//!                                                              may not know, 8 opened for reading,
//!                                                              16 others have lost something of
//!                                                              it; 0 of a free entry
//!                                                      12   4  CRC32C (see `Held::encode`)
//! ```
//!
//! A torn slot of header or progress fails its checksum and leaves the other one, which is the state
//! before. A torn entry of leases or pins counts as free: it is durable before its client learns of
//! it. Entries of an earlier owner of the row fail their checksum, which covers the incarnation.
//! Version 1 of the record had shorter rows, version 2 no leases on what is not made yet.
//! Entries are used from the first on, so behind 64 of them that all fail there are none.

use alloc::vec::Vec;

use base::{ClientId, Epoch, InodeId, Sequence, crc32c};

use super::control::LeaseMode;
use super::{Corrupt, Reader, Writer};
use crate::limits::{LANE_BYTES_MAX, LANE_BYTES_MIN, LANES_MAX, LEASE_SLOTS, PIN_SLOTS};

/// Bytes of a slot of the header.
pub const HEADER_BYTES: usize = 64;
/// First row.
pub const ROWS: u64 = 65_536;
/// Bytes of a row.
pub const ROW_BYTES: u64 = 2_621_440;
/// Rows at most: more are no table.
pub const ROWS_MAX: u64 = 4096;
/// Bytes of the record at the front of a row.
pub const RECORD_BYTES: usize = 8192;
/// Where the progress lies in a row.
pub const PROGRESS: u64 = 8192;
/// Bytes of a slot of it.
pub const PROGRESS_BYTES: usize = 128;
/// Where the leases lie in a row.
pub const LEASES: u64 = 16_384;
/// Where the pins lie in a row.
pub const PINS: u64 = LEASES + (LEASE_SLOTS * HELD_BYTES) as u64;
/// Bytes of a lease or pin.
pub const HELD_BYTES: usize = 16;
/// Supplementary groups that count; the kernel allows more, which then give no access.
pub const GROUPS_MAX: usize = (RECORD_BYTES - GROUPS) / 4;

const GROUPS: usize = 96;
const HEADER: &str = "header of the client table";
const RECORD: &str = "record of the client table";
const PROGRESS_NAME: &str = "progress in the client table";
const HELD: &str = "lease or pin in the client table";

const _: () = {
    assert!(PINS == 2_113_536);
    assert!(PINS + (PIN_SLOTS * HELD_BYTES) as u64 <= ROW_BYTES);
    assert!(40 + LANES_MAX * 8 <= PROGRESS_BYTES);
};

/// Offset of row `row` in the segment.
pub const fn row_at(row: u32) -> u64 {
    ROWS + row as u64 * ROW_BYTES
}

fn sealed(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    let crc = crc32c(0, &bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// A reader behind magic and checksum of a structure of `len` bytes.
fn opened<'a>(
    name: &'static str,
    magic: &[u8; 4],
    bytes: &'a [u8],
    len: usize,
) -> Result<Reader<'a>, Corrupt> {
    let whole = Reader::new(name, bytes).bytes(len)?;
    let mut r = Reader::new(name, whole);
    if r.bytes(4)? != magic {
        return Err(r.corrupt("does not begin with its magic"));
    }
    if r.u32()? != crc32c(0, &whole[8..]) {
        return Err(r.corrupt("fails its checksum"));
    }
    Ok(r)
}

fn zeroes(r: &mut Reader<'_>) -> Result<(), Corrupt> {
    if r.rest().iter().any(|b| *b != 0) {
        return Err(r.corrupt("has reserved bytes that are not zero"));
    }
    Ok(())
}

/// The header: when the table was in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// How often the service has started on this table.
    pub starts: u32,
    /// Grows with each update.
    pub number: u64,
    /// Tells boots of the machine apart: a process of another boot is gone.
    pub boot: u128,
    /// Key of the proofs that clients of this node are given.
    pub secret: u128,
}

impl Header {
    /// The 64 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        let mut w = Writer(&mut bytes);
        w.bytes(b"CBCT").u32(0).u32(1).u32(self.starts).u64(self.number).u128(self.boot);
        w.u128(self.secret);
        sealed(bytes, HEADER_BYTES)
    }

    /// Reads and checks a slot.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = opened(HEADER, b"CBCT", bytes, HEADER_BYTES)?;
        if r.u32()? != 1 {
            return Err(r.corrupt("has an unknown version"));
        }
        let this = Self { starts: r.u32()?, number: r.u64()?, boot: r.u128()?, secret: r.u128()? };
        zeroes(&mut r)?;
        Ok(this)
    }
}

/// Who has a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The client.
    pub client: ClientId,
    /// Number of its log segment.
    pub segment: u32,
    /// Seed of the checksums of its entries.
    pub incarnation: u32,
    /// Lanes.
    pub lanes: u32,
    /// Bytes of each.
    pub lane_bytes: u64,
    /// Process.
    pub pid: u32,
    /// Its start time, to tell it from a later process of the same number.
    pub start_time: u64,
    /// Epoch in which it attached.
    pub epoch: Epoch,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups, [`GROUPS_MAX`] at most.
    pub groups: Vec<u32>,
}

impl Record {
    /// The bytes, [`RECORD_BYTES`] at most.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(GROUPS);
        let groups = &self.groups[..self.groups.len().min(GROUPS_MAX)];
        let mut w = Writer(&mut bytes);
        w.bytes(b"CBCR").u32(0).u32(3).u32(self.segment).u64(self.client.0);
        w.u32(self.incarnation).u32(self.lanes).u64(self.lane_bytes).u64(self.start_time);
        w.u32(self.pid).u32(self.uid).u32(self.gid).u32(self.epoch.0);
        w.u32(groups.len() as u32).bytes(&[0; GROUPS - 68]);
        groups.iter().for_each(|g| {
            w.u32(*g);
        });
        let len = bytes.len();
        sealed(bytes, len)
    }

    /// Reads and checks a record; `None`: the row is free.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, Corrupt> {
        if bytes.len() >= 8 && bytes[..8] == [0; 8] {
            return Ok(None);
        }
        let mut r = Reader::new(RECORD, bytes);
        let head = r.bytes(GROUPS)?;
        let count = u32::from_le_bytes([head[64], head[65], head[66], head[67]]) as usize;
        if count > GROUPS_MAX {
            return Err(r.corrupt("claims more groups than it holds"));
        }
        let mut r = opened(RECORD, b"CBCR", bytes, GROUPS + 4 * count)?;
        if r.u32()? != 3 {
            return Err(r.corrupt("has an unknown version"));
        }
        let (segment, client, incarnation) = (r.u32()?, ClientId(r.u64()?), r.u32()?);
        let (lanes, lane_bytes, start_time) = (r.u32()?, r.u64()?, r.u64()?);
        let (pid, uid, gid, epoch) = (r.u32()?, r.u32()?, r.u32()?, Epoch(r.u32()?));
        r.u32()?;
        if r.bytes(GROUPS - 68)?.iter().any(|b| *b != 0) {
            return Err(r.corrupt("has reserved bytes that are not zero"));
        }
        let groups = (0..count).map(|_| r.u32()).collect::<Result<_, _>>()?;
        if lanes == 0 || lanes as usize > LANES_MAX {
            return Err(r.corrupt("has no lanes or too many"));
        }
        if !(LANE_BYTES_MIN..=LANE_BYTES_MAX).contains(&lane_bytes)
            || !lane_bytes.is_multiple_of(4096)
        {
            return Err(r.corrupt("has lanes of an impossible size"));
        }
        Ok(Some(Self {
            client,
            segment,
            incarnation,
            lanes,
            lane_bytes,
            pid,
            start_time,
            epoch,
            uid,
            gid,
            groups,
        }))
    }
}

/// How far a log is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Of the record that it belongs to.
    pub incarnation: u32,
    /// Grows with each update.
    pub number: u64,
    /// Entries up to here were in the public state when this was written.
    pub published: Sequence,
    /// Where the entries after `published` begin, by lane.
    pub lanes: [u64; LANES_MAX],
    /// The last sequence that counts, of a client that was expelled or dismissed.
    pub sealed: Option<Sequence>,
    /// All that counts of the log is in the stream: it is taken up no more. The row says what its process has open.
    pub over: bool,
}

impl Progress {
    /// The 128 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PROGRESS_BYTES);
        let mut w = Writer(&mut bytes);
        let flag = if self.over { 2 } else { u32::from(self.sealed.is_some()) };
        w.bytes(b"CBCP").u32(0).u32(self.incarnation).u32(flag);
        w.u64(self.number).u64(self.published.0).u64(self.sealed.unwrap_or_default().0);
        self.lanes.iter().for_each(|at| {
            w.u64(*at);
        });
        sealed(bytes, PROGRESS_BYTES)
    }

    /// Reads and checks a slot.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = opened(PROGRESS_NAME, b"CBCP", bytes, PROGRESS_BYTES)?;
        let (incarnation, flag) = (r.u32()?, r.u32()?);
        let (number, published, last) = (r.u64()?, Sequence(r.u64()?), Sequence(r.u64()?));
        let mut lanes = [0; LANES_MAX];
        for at in &mut lanes {
            *at = r.u64()?;
            if !at.is_multiple_of(crate::limits::LINE_BYTES) || *at > 1 << 62 {
                return Err(r.corrupt("has a position that no entry can have"));
            }
        }
        zeroes(&mut r)?;
        if published.max(last) >= Sequence::END {
            return Err(r.corrupt("has a sequence that nothing can have"));
        }
        let sealed = match flag {
            0 if last.0 == 0 => None,
            1 | 2 => Some(last),
            _ => return Err(r.corrupt("is neither sealed nor not")),
        };
        Ok(Self { incarnation, number, published, lanes, sealed, over: flag == 2 })
    }
}

/// Pin: the client has the inode open.
pub const PIN_OPEN: u32 = 1;
/// Pin: it was allowed to write when it opened it.
pub const PIN_WRITE: u32 = 2;
/// Pin: it was allowed to read when it opened it.
pub const PIN_READ: u32 = 8;
/// Pin: it has closed it since, which the head may not know.
pub const PIN_CLOSED: u32 = 4;
/// Pin: its node lost its place, and with it what others had done to the inode; its process is to be told.
pub const PIN_LOST: u32 = 16;

/// Lease: to write, on an inode number that was handed out and that nothing has been made with. A
/// number is used once, so what was made with it and removed again must be told from this.
pub const LEASE_UNMADE: u32 = 3;

/// A lease or a pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// On what.
    pub ino: InodeId,
    /// Mode of the lease, or bits of the pin; 0 of an entry that is free again.
    pub what: u32,
}

impl Held {
    /// An entry that is free again.
    pub const FREE: Self = Self { ino: InodeId::NONE, what: 0 };

    /// The mode, of a lease.
    pub const fn mode(self) -> Option<LeaseMode> {
        match self.what {
            1 => Some(LeaseMode::Read),
            2 | LEASE_UNMADE => Some(LeaseMode::Write),
            4 => Some(LeaseMode::Joint),
            _ => None,
        }
    }

    /// The 16 bytes, for the offset in the row at which they lie: the checksum covers it, so that
    /// no entry counts elsewhere.
    pub fn encode(self, incarnation: u32, at: u64) -> [u8; HELD_BYTES] {
        let mut bytes = [0; HELD_BYTES];
        bytes[..8].copy_from_slice(&self.ino.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.what.to_le_bytes());
        let crc = Self::checksum(&bytes, incarnation, at);
        bytes[12..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn checksum(bytes: &[u8; HELD_BYTES], incarnation: u32, at: u64) -> u32 {
        crc32c(crc32c(incarnation, &at.to_le_bytes()), &bytes[..12])
    }

    /// Reads and checks an entry; `None`: it was never used.
    pub fn decode(bytes: &[u8], incarnation: u32, at: u64) -> Result<Option<Self>, Corrupt> {
        let mut whole = [0; HELD_BYTES];
        whole.copy_from_slice(Reader::new(HELD, bytes).bytes(HELD_BYTES)?);
        if whole == [0; HELD_BYTES] {
            return Ok(None);
        }
        let mut r = Reader::new(HELD, &whole);
        let (ino, what, crc) = (InodeId(r.u64()?), r.u32()?, r.u32()?);
        if crc != Self::checksum(&whole, incarnation, at) {
            return Err(r.corrupt("fails its checksum"));
        }
        let free = Self { ino, what } == Self::FREE;
        // A mode of a lease, or bits of a pin.
        let known = matches!(what, 1..=4) || what & PIN_OPEN != 0 && what <= PIN_LOST | 0xf;
        if !free && (ino == InodeId::NONE || !known) {
            return Err(r.corrupt("says what the service never writes"));
        }
        Ok(Some(Self { ino, what }))
    }
}
