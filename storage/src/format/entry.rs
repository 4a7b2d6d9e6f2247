//! An entry of the operation log: a header of one cache line, then the payload.
//!
//! ```text
//! offset  size  field
//!      0     4  checksum   CRC32C of bytes 4..64 and the payload, seeded with the log's incarnation
//!      4     4  length     payload bytes; the entry takes 64 + length rounded up to 64 (zero fill)
//!      8     8  sequence   order over the lanes of the client; grows strictly within a lane, so a
//!                          stale entry of an earlier lap is never taken for the next one
//!     16     4  epoch      epoch of the volume under which the client's leases were granted
//!     20     1  op         kind of operation (below)
//!     21     1  lane       lane that the entry lies in
//!     22     2  flags      by operation
//!     24     8  inode      the inode operated on (for Create: the new one)
//!     32     8  a          by operation
//!     40     8  b          by operation
//!     48     8  time       realtime nanoseconds; becomes mtime/ctime
//!     56     8  reserved   zero
//! ```
//!
//! Entries carry absolute results, so that applying one twice gives the same state (DESIGN rule 2).
//!
//! ```text
//! op                flags              a           b               payload
//!  1 Pad            0                  0           promised        zeroes: up to the ring's end, or, in a chunk, where a
//!                                                                  Write stood whose bytes its end does not show
//!  2 Create         0                  parent      mode|rdev<<32   uid u32, gid u32, name u16,
//!                                                                  target u16, name, target
//!  3 Link           0                  parent      0               name
//!  4 Unlink         1 still open here  parent      0               name
//!  5 Rmdir          1 still open here  parent      0               name
//!  6 Rename         1 NOREPLACE        old parent  new parent      replaced inode u64, name u16,
//!                   2 EXCHANGE                                     new name u16, names
//!                   4 replaced still open here
//!  7 Write          1 clear set-id     offset      promised        the bytes
//!  8 Truncate       1 clear set-id     size        0               -
//!  9 Fallocate      mode bits          offset      length          -
//! 10 SetAttr        0                  mask        0               mode, uid, gid u32, 4 zero bytes,
//!                                                                  atime, mtime (i64 s, u32 ns, u32 0)
//! 11 SetXattr       0                  0           0               name u16, name, value
//! 12 RemoveXattr    0                  0           0               name
//! 13 CloneRange     1 zeroes follow    offset      length          source inode u64, offset u64
//!                                                                  (the flag: by the service only;
//!                                                                  the source may be in a snapshot)
//! 14 Reap           0                  0           0               -   (written by the service only)
//! 15 Tmpfile        1 may get a name   parent      mode            uid u32, gid u32
//! 16 SetQuota       1 of a user        blocks      inodes          uid u32, 0 u32   (limits; 0: none;
//!                                                                  of a user the inode is the root)
//! 17 SetProject     0                  directory   0               -
//! 18 Shift          1 insert           offset      length          size afterwards u64
//! 19 Move           1 to the service   first block end block       -   (written by the service only)
//! 20 Place          1 later            0           0               reach, 12 bytes   (by the service only)
//! 21 Snapshot       0                  0           0               name
//! 22 DropSnapshot   0                  0           0               name
//! ```

use alloc::vec::Vec;

use base::planted::{Bug, planted};
use base::{Epoch, InodeId, Sequence, crc32c};

use super::item::ReadClass;
use super::rpc::Amount;
use super::{Corrupt, Reader, Writer};
use crate::limits::{
    BLOCK_BYTES, FILE_SIZE_MAX, LINE_BYTES, NAME_MAX, PAYLOAD_MAX, TARGET_MAX, XATTR_NAME_MAX,
    XATTR_VALUE_MAX,
};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;

const NAME: &str = "log entry";

/// Kinds of operation; the numbers are on media.
#[allow(missing_docs)]
pub mod op {
    pub const PAD: u8 = 1;
    pub const CREATE: u8 = 2;
    pub const LINK: u8 = 3;
    pub const UNLINK: u8 = 4;
    pub const RMDIR: u8 = 5;
    pub const RENAME: u8 = 6;
    pub const WRITE: u8 = 7;
    pub const TRUNCATE: u8 = 8;
    pub const FALLOCATE: u8 = 9;
    pub const SETATTR: u8 = 10;
    pub const SETXATTR: u8 = 11;
    pub const REMOVEXATTR: u8 = 12;
    pub const CLONE_RANGE: u8 = 13;
    pub const REAP: u8 = 14;
    pub const TMPFILE: u8 = 15;
    pub const SET_QUOTA: u8 = 16;
    pub const SET_PROJECT: u8 = 17;
    pub const SHIFT: u8 = 18;
    pub const MOVE: u8 = 19;
    pub const PLACE: u8 = 20;
    pub const SNAPSHOT: u8 = 21;
    pub const DROP_SNAPSHOT: u8 = 22;
}

/// Flag of Unlink and Rmdir: the client itself still has the inode open.
pub const UNLINK_OPEN: u16 = 1;
/// Flags of Rename.
pub const RENAME_NOREPLACE: u16 = 1;
/// Swap the two names.
pub const RENAME_EXCHANGE: u16 = 2;
/// The client itself still has the replaced inode open.
pub const RENAME_OPEN: u16 = 4;
/// Flag of Write and Truncate: clear set-user-ID and set-group-ID, as a write by others must.
pub const CLEAR_SETID: u16 = 1;

/// Flag of SetQuota: the limits are a user's.
pub const QUOTA_USER: u16 = 1;
/// Flag of Tmpfile: Link may give it a name.
pub const TMPFILE_LINKABLE: u16 = 1;

/// Flag of Shift: a hole is put in; without it, the range is taken out.
pub const SHIFT_INSERT: u16 = 1;
/// Flag of Move: to the service's arena, and not to that of the file's class.
pub const MOVE_OUT: u16 = 1;
/// Flag of CloneRange.
pub const CLONE_ZEROES: u16 = 1;
/// Flag of Place: there is still something to do.
pub const PLACE_LATER: u16 = 1;

/// Fields of a SetAttr mask.
#[allow(missing_docs)]
pub mod mask {
    pub const MODE: u64 = 1;
    pub const UID: u64 = 2;
    pub const GID: u64 = 4;
    pub const ATIME: u64 = 8;
    pub const MTIME: u64 = 16;
    pub const ALL: u64 = 31;
}

/// A point in time on media: seconds and nanoseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Stamp {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nsec: u32,
}

impl Stamp {
    /// From realtime nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self { sec: (nanos / 1_000_000_000) as i64, nsec: (nanos % 1_000_000_000) as u32 }
    }

    /// As realtime nanoseconds; 0 for times before 1970, the highest number for those past 2554.
    pub const fn nanos(self) -> u64 {
        if self.sec < 0 {
            return 0;
        }
        (self.sec as u64).saturating_mul(1_000_000_000).saturating_add(self.nsec as u64)
    }
}

/// An operation, decoded. Names and payloads are borrowed from the bytes it was decoded from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Op<'a> {
    Pad,
    Create {
        ino: InodeId,
        parent: InodeId,
        mode: u32,
        rdev: u32,
        uid: u32,
        gid: u32,
        name: &'a [u8],
        target: &'a [u8],
    },
    Link {
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
    },
    Unlink {
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
        open: bool,
    },
    Rmdir {
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
        open: bool,
    },
    Rename {
        ino: InodeId,
        parent: InodeId,
        name: &'a [u8],
        new_parent: InodeId,
        new_name: &'a [u8],
        replaced: InodeId,
        noreplace: bool,
        exchange: bool,
        open: bool,
    },
    Write {
        ino: InodeId,
        offset: u64,
        data: &'a [u8],
        clear_setid: bool,
    },
    Truncate {
        ino: InodeId,
        size: u64,
        clear_setid: bool,
    },
    Fallocate {
        ino: InodeId,
        offset: u64,
        len: u64,
        mode: u16,
    },
    SetAttr {
        ino: InodeId,
        mask: u64,
        mode: u32,
        uid: u32,
        gid: u32,
        atime: Stamp,
        mtime: Stamp,
    },
    SetXattr {
        ino: InodeId,
        name: &'a [u8],
        value: &'a [u8],
    },
    RemoveXattr {
        ino: InodeId,
        name: &'a [u8],
    },
    CloneRange {
        ino: InodeId,
        offset: u64,
        len: u64,
        source: InodeId,
        source_offset: u64,
        /// In the last block of the source zeroes follow, also if the file goes on: the service says
        /// so where it knows it, and the block can be shared.
        zeroes: bool,
    },
    Reap {
        ino: InodeId,
    },
    /// Makes a regular file without a name (O_TMPFILE); the client has it open.
    Tmpfile {
        ino: InodeId,
        parent: InodeId,
        mode: u32,
        uid: u32,
        gid: u32,
        linkable: bool,
    },
    /// Limits of a user, or of the directory `ino`.
    SetQuota {
        ino: InodeId,
        user: Option<u32>,
        limit: Amount,
    },
    /// From now on the quota of the directory `project` counts the inode; 0: none does.
    SetProject {
        ino: InodeId,
        project: InodeId,
    },
    /// Takes whole blocks out of a file, or puts a hole in: what follows moves. A file that has
    /// the size afterwards already is left alone.
    Shift {
        ino: InodeId,
        offset: u64,
        len: u64,
        insert: bool,
        size: u64,
    },
    /// What the directories on the way let come to an inode (`volume/reach.rs`). Of a directory it is so at once, and
    /// `later` says that what is in it is still to be looked at; of others it is so, with their blocks, or is to be `later`.
    Place {
        ino: InodeId,
        reach: ReadClass,
        later: bool,
    },
    /// Moves blocks `from..to` of a file to the service's arena (`out`), or to that of the file's class. Nothing
    /// that a program sees changes: the service does so before and after a file changes its class, where that
    /// takes long.
    Move {
        ino: InodeId,
        from: u64,
        to: u64,
        out: bool,
    },
    /// The volume as it is before this operation stays under a name, and shows what is in the directory `ino`.
    Snapshot {
        ino: InodeId,
        name: &'a [u8],
    },
    /// The snapshot with that name is given up. (`ino`: the directory that it shows.)
    DropSnapshot {
        ino: InodeId,
        name: &'a [u8],
    },
}

/// Header fields that are not part of the operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Payload bytes.
    pub length: u32,
    /// Order over the client's lanes.
    pub sequence: Sequence,
    /// Epoch of the leases.
    pub epoch: Epoch,
    /// Lane.
    pub lane: u8,
    /// Realtime nanoseconds.
    pub time: u64,
    /// The blocks that its space was promised by.
    pub promised: u64,
}

/// Bytes that an entry with `payload` bytes takes in the ring.
pub const fn entry_bytes(payload: usize) -> usize {
    (HEADER_BYTES + payload).next_multiple_of(LINE_BYTES as usize)
}

/// The raw fields of a header, before the checksum is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawHeader {
    /// Payload bytes.
    pub length: u32,
    /// Sequence.
    pub sequence: u64,
    /// Epoch.
    pub epoch: u32,
    /// Kind.
    pub op: u8,
    /// Lane.
    pub lane: u8,
    /// Flags.
    pub flags: u16,
    /// Inode.
    pub inode: u64,
    /// By operation.
    pub a: u64,
    /// By operation.
    pub b: u64,
    /// Realtime nanoseconds.
    pub time: u64,
}

impl RawHeader {
    /// The 64 bytes, with the checksum over them and over `payload` (in order, possibly in pieces).
    pub fn seal(&self, incarnation: u32, payload: &[&[u8]]) -> [u8; HEADER_BYTES] {
        let mut seal = self.begin(incarnation);
        payload.iter().for_each(|piece| seal.add(piece));
        seal.end()
    }

    /// The same in steps, for whoever sums what it stores while it stores it.
    pub fn begin(&self, incarnation: u32) -> Seal {
        let mut h = [0u8; HEADER_BYTES];
        h[4..8].copy_from_slice(&self.length.to_le_bytes());
        h[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        h[16..20].copy_from_slice(&self.epoch.to_le_bytes());
        h[20] = self.op;
        h[21] = self.lane;
        h[22..24].copy_from_slice(&self.flags.to_le_bytes());
        h[24..32].copy_from_slice(&self.inode.to_le_bytes());
        h[32..40].copy_from_slice(&self.a.to_le_bytes());
        h[40..48].copy_from_slice(&self.b.to_le_bytes());
        h[48..56].copy_from_slice(&self.time.to_le_bytes());
        Seal { crc: crc32c(incarnation, &h[4..]), header: h }
    }
}

/// A header whose payload is being summed.
#[derive(Debug)]
pub struct Seal {
    header: [u8; HEADER_BYTES],
    crc: u32,
}

impl Seal {
    /// The next piece of the payload.
    #[inline]
    pub fn add(&mut self, piece: &[u8]) {
        self.crc = crc32c(self.crc, piece);
    }

    /// The next pieces were summed elsewhere: from what it was to what `add` gives.
    #[inline]
    pub fn add_summed(&mut self, add: impl FnOnce(u32) -> u32) {
        self.crc = add(self.crc);
    }

    /// The whole payload, `bytes` long, was summed alone (from 0 on) before the header was known.
    #[inline]
    pub fn add_joined(&mut self, crc: u32, bytes: u32) {
        self.crc = base::checksum::joined(self.crc, crc, bytes);
    }

    /// The 64 bytes.
    #[inline]
    pub fn end(mut self) -> [u8; HEADER_BYTES] {
        self.header[0..4].copy_from_slice(&self.crc.to_le_bytes());
        self.header
    }
}

impl Op<'_> {
    /// Splits the operation into header fields and a payload, which is appended to `payload`
    /// (except the bytes of a Write, which the caller has: `payload` stays empty for it).
    pub fn encode(&self, payload: &mut Vec<u8>) -> RawHeader {
        let mut raw = RawHeader::default();
        let mut w = Writer(payload);
        match *self {
            Op::Pad => raw.op = op::PAD,
            Op::Create { ino, parent, mode, rdev, uid, gid, name, target } => {
                (raw.op, raw.inode, raw.a) = (op::CREATE, ino.0, parent.0);
                raw.b = u64::from(mode) | u64::from(rdev) << 32;
                w.u32(uid).u32(gid).u16(name.len() as u16).u16(target.len() as u16);
                w.bytes(name).bytes(target);
            }
            Op::Link { ino, parent, name } => {
                (raw.op, raw.inode, raw.a) = (op::LINK, ino.0, parent.0);
                w.bytes(name);
            }
            Op::Unlink { ino, parent, name, open } => {
                (raw.op, raw.inode, raw.a) = (op::UNLINK, ino.0, parent.0);
                raw.flags = if open { UNLINK_OPEN } else { 0 };
                w.bytes(name);
            }
            Op::Rmdir { ino, parent, name, open } => {
                (raw.op, raw.inode, raw.a) = (op::RMDIR, ino.0, parent.0);
                raw.flags = if open { UNLINK_OPEN } else { 0 };
                w.bytes(name);
            }
            Op::Rename {
                ino,
                parent,
                name,
                new_parent,
                new_name,
                replaced,
                noreplace,
                exchange,
                open,
            } => {
                (raw.op, raw.inode, raw.a, raw.b) = (op::RENAME, ino.0, parent.0, new_parent.0);
                raw.flags = (u16::from(noreplace) * RENAME_NOREPLACE)
                    | (u16::from(exchange) * RENAME_EXCHANGE)
                    | (u16::from(open) * RENAME_OPEN);
                w.u64(replaced.0).u16(name.len() as u16).u16(new_name.len() as u16);
                w.bytes(name).bytes(new_name);
            }
            Op::Write { ino, offset, clear_setid, .. } => {
                (raw.op, raw.inode, raw.a) = (op::WRITE, ino.0, offset);
                raw.flags = if clear_setid { CLEAR_SETID } else { 0 };
            }
            Op::Truncate { ino, size, clear_setid } => {
                (raw.op, raw.inode, raw.a) = (op::TRUNCATE, ino.0, size);
                raw.flags = if clear_setid { CLEAR_SETID } else { 0 };
            }
            Op::Fallocate { ino, offset, len, mode } => {
                (raw.op, raw.inode, raw.a, raw.b) = (op::FALLOCATE, ino.0, offset, len);
                raw.flags = mode;
            }
            Op::SetAttr { ino, mask, mode, uid, gid, atime, mtime } => {
                (raw.op, raw.inode, raw.a) = (op::SETATTR, ino.0, mask);
                w.u32(mode).u32(uid).u32(gid).u32(0);
                w.i64(atime.sec).u32(atime.nsec).u32(0).i64(mtime.sec).u32(mtime.nsec).u32(0);
            }
            Op::SetXattr { ino, name, value } => {
                (raw.op, raw.inode) = (op::SETXATTR, ino.0);
                w.u16(name.len() as u16).bytes(name).bytes(value);
            }
            Op::RemoveXattr { ino, name } => {
                (raw.op, raw.inode) = (op::REMOVEXATTR, ino.0);
                w.bytes(name);
            }
            Op::CloneRange { ino, offset, len, source, source_offset, zeroes } => {
                (raw.op, raw.inode, raw.a, raw.b) = (op::CLONE_RANGE, ino.0, offset, len);
                raw.flags = if zeroes { CLONE_ZEROES } else { 0 };
                w.u64(source.0).u64(source_offset);
            }
            Op::Reap { ino } => (raw.op, raw.inode) = (op::REAP, ino.0),
            Op::Place { ino, reach, later } => {
                (raw.op, raw.inode) = (op::PLACE, ino.0);
                raw.flags = if later { PLACE_LATER } else { 0 };
                w.bytes(&reach.encode());
            }
            Op::SetQuota { ino, user, limit } => {
                (raw.op, raw.inode) = (op::SET_QUOTA, ino.0);
                (raw.a, raw.b) = (limit.blocks, limit.inodes);
                raw.flags = if user.is_some() { QUOTA_USER } else { 0 };
                w.u32(user.unwrap_or(0)).u32(0);
            }
            Op::SetProject { ino, project } => {
                (raw.op, raw.inode, raw.a) = (op::SET_PROJECT, ino.0, project.0);
            }
            Op::Shift { ino, offset, len, insert, size } => {
                (raw.op, raw.inode, raw.a, raw.b) = (op::SHIFT, ino.0, offset, len);
                raw.flags = if insert { SHIFT_INSERT } else { 0 };
                w.u64(size);
            }
            Op::Move { ino, from, to, out } => {
                (raw.op, raw.inode, raw.a, raw.b) = (op::MOVE, ino.0, from, to);
                raw.flags = if out { MOVE_OUT } else { 0 };
            }
            Op::Snapshot { ino, name } => {
                (raw.op, raw.inode) = (op::SNAPSHOT, ino.0);
                w.bytes(name);
            }
            Op::DropSnapshot { ino, name } => {
                (raw.op, raw.inode) = (op::DROP_SNAPSHOT, ino.0);
                w.bytes(name);
            }
            Op::Tmpfile { ino, parent, mode, uid, gid, linkable } => {
                (raw.op, raw.inode, raw.a) = (op::TMPFILE, ino.0, parent.0);
                raw.b = u64::from(mode);
                raw.flags = if linkable { TMPFILE_LINKABLE } else { 0 };
                w.u32(uid).u32(gid);
            }
        }
        raw.length = w.0.len() as u32;
        raw
    }

    /// The whole entry as bytes, zero-filled to whole lines.
    pub fn to_entry(
        &self,
        sequence: Sequence,
        epoch: Epoch,
        lane: u8,
        time: u64,
        incarnation: u32,
    ) -> Vec<u8> {
        self.to_promised_entry(0, sequence, epoch, lane, time, incarnation)
    }

    /// The same of a write to which so many blocks are promised, or of what stands in its place.
    pub fn to_promised_entry(
        &self,
        promised: u64,
        sequence: Sequence,
        epoch: Epoch,
        lane: u8,
        time: u64,
        incarnation: u32,
    ) -> Vec<u8> {
        let mut payload = Vec::new();
        let mut raw = self.encode(&mut payload);
        if let Op::Write { data, .. } = *self {
            payload.extend_from_slice(data);
            raw.length = data.len() as u32;
        }
        if matches!(raw.op, op::WRITE | op::PAD) {
            raw.b = promised;
        }
        (raw.sequence, raw.epoch, raw.lane, raw.time) = (sequence.0, epoch.0, lane, time);
        let mut bytes = Vec::with_capacity(entry_bytes(payload.len()));
        bytes.extend_from_slice(&raw.seal(incarnation, &[&payload]));
        bytes.extend_from_slice(&payload);
        bytes.resize(entry_bytes(payload.len()), 0);
        bytes
    }
}

/// Payload length that a header claims, if it can be one (to know how much to read before the
/// checksum can be judged).
pub fn claimed_length(header: &[u8; HEADER_BYTES]) -> Option<usize> {
    let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    let pad = header[20] == op::PAD;
    (length <= PAYLOAD_MAX || (pad && length as u64 <= crate::limits::LANE_BYTES_MAX))
        .then_some(length)
}

/// Sequence that a header claims (unchecked).
pub fn claimed_sequence(header: &[u8; HEADER_BYTES]) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&header[8..16]);
    u64::from_le_bytes(w)
}

/// Blocks that a write of so many bytes may need.
#[inline]
pub const fn blocks_of(offset: u64, len: u64) -> u64 {
    offset.saturating_add(len).div_ceil(BLOCK_BYTES) - offset / BLOCK_BYTES
}

/// Blocks that a header claims were promised to it (unchecked).
pub fn claimed_promise(header: &[u8; HEADER_BYTES]) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&header[40..48]);
    if matches!(header[20], op::WRITE | op::PAD) { u64::from_le_bytes(w) } else { 0 }
}

/// Inode that a header claims to operate on, and the directory in which it claims to change a name (unchecked; `NONE`: none).
pub fn claimed_inodes(header: &[u8; HEADER_BYTES]) -> (InodeId, InodeId) {
    let word = |at: usize| {
        let mut w = [0; 8];
        w.copy_from_slice(&header[at..at + 8]);
        InodeId(u64::from_le_bytes(w))
    };
    let named = matches!(
        header[20],
        op::CREATE | op::LINK | op::UNLINK | op::RMDIR | op::RENAME | op::TMPFILE
    );
    (word(24), if named { word(32) } else { InodeId::NONE })
}

/// Makes a pad of the entry, a Write, with which `bytes` begin: it has the same length, sequence, time and promise, and its payload is
/// zeroes. How many bytes those are; 0 if that is not what it begins with.
pub fn pad_over(bytes: &mut [u8], incarnation: u32) -> usize {
    let Some((head, after)) = bytes.split_first_chunk_mut::<HEADER_BYTES>() else { return 0 };
    let Some(length) = claimed_length(head).filter(|_| head[20] == op::WRITE) else { return 0 };
    let Some(payload) = after.get_mut(..length) else { return 0 };
    payload.fill(0);
    head[20] = op::PAD;
    // Flags, inode, offset.
    head[22..40].fill(0);
    let crc = crc32c(incarnation, &head[4..]);
    head[..4].copy_from_slice(&crc.to_le_bytes());
    length
}

/// Whether a component is a legal file name: 1 to 255 bytes, no `/`, no NUL, not `.` or `..`.
pub fn name_is_legal(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_MAX
        && name != b"."
        && name != b".."
        && !name.iter().any(|&b| b == 0 || b == b'/')
}

/// Decodes one entry from bytes that the reader owns. `bytes` begins at the header and holds at
/// least the payload; a Pad's payload may be absent (its checksum covers the header only).
pub fn decode(bytes: &[u8], incarnation: u32) -> Result<(Header, Op<'_>), Corrupt> {
    read(bytes, Some(incarnation))
}

/// The same of bytes whose checksum the reader has compared before, and that have not left its memory since.
pub fn decode_checked(bytes: &[u8]) -> Result<(Header, Op<'_>), Corrupt> {
    read(bytes, None)
}

fn read(bytes: &[u8], incarnation: Option<u32>) -> Result<(Header, Op<'_>), Corrupt> {
    let bad = |what| Err(Corrupt::new(NAME, what));
    let Some((head, after)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return bad("is shorter than its header");
    };
    let mut r = Reader::new(NAME, head);
    let (checksum, length) = (r.u32()?, r.u32()?);
    let (sequence, epoch) = (r.u64()?, r.u32()?);
    let (kind, lane, flags) = (r.u8()?, r.u8()?, r.u16()?);
    let (inode, a, b, time, reserved) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?);
    let Some(claimed) = claimed_length(head) else { return bad("claims a payload over the limit") };
    let payload = if kind == op::PAD {
        &[][..]
    } else {
        match after.get(..claimed) {
            Some(payload) => payload,
            None => return bad("is cut short"),
        }
    };
    let differs = |seed| crc32c(crc32c(seed, &head[4..]), payload) != checksum;
    if incarnation.is_some_and(differs) && !planted(Bug::EntryUnverified) {
        return bad("fails its checksum");
    }
    if reserved != 0 {
        return bad("has bytes set that must be zero");
    }
    if sequence == 0 || sequence >= Sequence::END.0 {
        return bad("has a sequence that nothing can have");
    }
    let promised = claimed_promise(head);
    let (sequence, epoch) = (Sequence(sequence), Epoch(epoch));
    let header = Header { length, sequence, epoch, lane, time, promised };
    let op = decode_op(kind, flags, inode, a, b, payload)?;
    // Wherever the write was in whose place it stands.
    if op == Op::Pad && promised > blocks_of(BLOCK_BYTES - 1, length.into()) {
        return bad("was promised more blocks than it can need");
    }
    Ok((header, op))
}

fn legal(name: &[u8]) -> Result<&[u8], Corrupt> {
    if name_is_legal(name) { Ok(name) } else { Err(Corrupt::new(NAME, "has an illegal file name")) }
}

fn stamp(r: &mut Reader<'_>) -> Result<Stamp, Corrupt> {
    let (sec, nsec, zero) = (r.i64()?, r.u32()?, r.u32()?);
    if nsec >= 1_000_000_000 || zero != 0 {
        return Err(Corrupt::new(NAME, "has a time with too many nanoseconds"));
    }
    Ok(Stamp { sec, nsec })
}

fn range(offset: u64, len: u64) -> Result<(), Corrupt> {
    match offset.checked_add(len) {
        Some(end) if end <= FILE_SIZE_MAX => Ok(()),
        _ => Err(Corrupt::new(NAME, "reaches beyond the largest file size")),
    }
}

fn flags_within(flags: u16, known: u16) -> Result<(), Corrupt> {
    if flags & !known == 0 { Ok(()) } else { Err(Corrupt::new(NAME, "has unknown flags")) }
}

fn decode_op(
    kind: u8,
    flags: u16,
    inode: u64,
    a: u64,
    b: u64,
    payload: &[u8],
) -> Result<Op<'_>, Corrupt> {
    let mut r = Reader::new(NAME, payload);
    let ino = InodeId(inode);
    if kind != op::PAD && inode == 0 {
        return Err(r.corrupt("names inode 0"));
    }
    let known = match kind {
        op::UNLINK | op::RMDIR | op::WRITE | op::TRUNCATE | op::TMPFILE | op::SET_QUOTA => 1,
        op::CLONE_RANGE | op::SHIFT | op::PLACE | op::MOVE => 1,
        op::RENAME => 7,
        op::FALLOCATE => u16::MAX,
        _ => 0,
    };
    flags_within(flags, known)?;
    // Fields that the operation does not use.
    let unused = match kind {
        // (What it was promised is held against its length by who reads the header.)
        op::PAD => inode | a,
        op::LINK | op::UNLINK | op::RMDIR | op::TRUNCATE | op::SETATTR | op::SET_PROJECT => b,
        op::SETXATTR | op::REMOVEXATTR | op::REAP | op::PLACE => a | b,
        op::SNAPSHOT | op::DROP_SNAPSHOT => a | b,
        _ => 0,
    };
    if unused != 0 {
        return Err(r.corrupt("has bytes set that must be zero"));
    }
    let op = match kind {
        op::PAD => Op::Pad,
        op::CREATE => {
            let (uid, gid) = (r.u32()?, r.u32()?);
            let (name_len, target_len) = (r.u16()?, r.u16()?);
            if usize::from(target_len) > TARGET_MAX {
                return Err(r.corrupt("has a symbolic link target over the limit"));
            }
            let name = legal(r.bytes(name_len.into())?)?;
            let target = r.bytes(target_len.into())?;
            let (mode, rdev) = (b as u32, (b >> 32) as u32);
            Op::Create { ino, parent: InodeId(a), mode, rdev, uid, gid, name, target }
        }
        op::LINK => Op::Link { ino, parent: InodeId(a), name: legal(r.rest())? },
        op::UNLINK => {
            let open = flags & UNLINK_OPEN != 0;
            Op::Unlink { ino, parent: InodeId(a), name: legal(r.rest())?, open }
        }
        op::RMDIR => {
            let open = flags & UNLINK_OPEN != 0;
            Op::Rmdir { ino, parent: InodeId(a), name: legal(r.rest())?, open }
        }
        op::RENAME => {
            let (replaced, name, new_name) = (r.u64()?, r.u16()?, r.u16()?);
            let (name, new_name) =
                (legal(r.bytes(name.into())?)?, legal(r.bytes(new_name.into())?)?);
            Op::Rename {
                ino,
                parent: InodeId(a),
                name,
                new_parent: InodeId(b),
                new_name,
                replaced: InodeId(replaced),
                noreplace: flags & RENAME_NOREPLACE != 0,
                exchange: flags & RENAME_EXCHANGE != 0,
                open: flags & RENAME_OPEN != 0,
            }
        }
        op::WRITE => {
            let data = r.rest();
            range(a, data.len() as u64)?;
            if b > blocks_of(a, data.len() as u64) {
                return Err(Corrupt::new(NAME, "was promised more blocks than it can need"));
            }
            Op::Write { ino, offset: a, data, clear_setid: flags & CLEAR_SETID != 0 }
        }
        op::TRUNCATE => {
            range(a, 0)?;
            Op::Truncate { ino, size: a, clear_setid: flags & CLEAR_SETID != 0 }
        }
        op::FALLOCATE => {
            range(a, b)?;
            Op::Fallocate { ino, offset: a, len: b, mode: flags }
        }
        op::SETATTR => {
            let (mode, uid, gid, zero) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
            if a & !mask::ALL != 0 || zero != 0 || mode & !0o7777 != 0 {
                return Err(r.corrupt("sets attributes that do not exist"));
            }
            let (atime, mtime) = (stamp(&mut r)?, stamp(&mut r)?);
            Op::SetAttr { ino, mask: a, mode, uid, gid, atime, mtime }
        }
        op::SETXATTR => {
            let len = usize::from(r.u16()?);
            let (name, value) = (r.bytes(len)?, r.rest());
            xattr_name(name)?;
            if value.len() > XATTR_VALUE_MAX {
                return Err(Corrupt::new(NAME, "has an attribute value over the limit"));
            }
            Op::SetXattr { ino, name, value }
        }
        op::REMOVEXATTR => {
            let name = r.rest();
            xattr_name(name)?;
            Op::RemoveXattr { ino, name }
        }
        op::CLONE_RANGE => {
            let (source, source_offset) = (InodeId(r.u64()?), r.u64()?);
            range(a, b)?;
            range(source_offset, b)?;
            let zeroes = flags & CLONE_ZEROES != 0;
            Op::CloneRange { ino, offset: a, len: b, source, source_offset, zeroes }
        }
        op::REAP => Op::Reap { ino },
        op::PLACE => {
            let reach = ReadClass::decode(r.bytes(12)?)?;
            Op::Place { ino, reach, later: flags & PLACE_LATER != 0 }
        }
        op::SET_QUOTA => {
            let (uid, zero) = (r.u32()?, r.u32()?);
            let user = (flags & QUOTA_USER != 0).then_some(uid);
            if zero != 0 || (user.is_none() && uid != 0) {
                return Err(r.corrupt("has bytes set that must be zero"));
            }
            Op::SetQuota { ino, user, limit: Amount { blocks: a, inodes: b } }
        }
        op::SET_PROJECT => Op::SetProject { ino, project: InodeId(a) },
        op::SHIFT => {
            let size = r.u64()?;
            range(a, b)?;
            range(size, 0)?;
            Op::Shift { ino, offset: a, len: b, insert: flags & SHIFT_INSERT != 0, size }
        }
        op::MOVE => {
            if a >= b {
                return Err(r.corrupt("moves no blocks"));
            }
            Op::Move { ino, from: a, to: b, out: flags & MOVE_OUT != 0 }
        }
        op::TMPFILE => {
            let (uid, gid) = (r.u32()?, r.u32()?);
            let Ok(mode) = u32::try_from(b) else {
                return Err(r.corrupt("has an impossible mode"));
            };
            let linkable = flags & TMPFILE_LINKABLE != 0;
            Op::Tmpfile { ino, parent: InodeId(a), mode, uid, gid, linkable }
        }
        op::SNAPSHOT => Op::Snapshot { ino, name: legal(r.rest())? },
        op::DROP_SNAPSHOT => Op::DropSnapshot { ino, name: legal(r.rest())? },
        _ => return Err(r.corrupt("has an unknown operation")),
    };
    r.end()?;
    Ok(op)
}

fn xattr_name(name: &[u8]) -> Result<(), Corrupt> {
    if name.is_empty() || name.len() > XATTR_NAME_MAX || name.contains(&0) {
        return Err(Corrupt::new(NAME, "has an illegal attribute name"));
    }
    Ok(())
}
