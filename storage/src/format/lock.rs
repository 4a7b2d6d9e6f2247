//! File locks as they travel, between client and service and between nodes.
//!
//! ```text
//! lock (30 bytes)
//!      0  1  space   0 records (fcntl: POSIX and open file descriptions), 1 whole files (flock)
//!      1  1  kind    0 none (unlock), 1 read (shared), 2 write (exclusive)
//!      2  8  owner   whose lock, in the client's own numbering: a process, or an open file
//!     10  4  pid     process, for F_GETLK; 0 when it is not of the asker's machine
//!     14  8  start   first byte
//!     22  8  end     last byte, start .. 2^63 - 1; flock locks cover everything
//! ```

use super::{Corrupt, Reader, Writer};

/// Last byte that a lock can cover ("to the end of the file", however far it grows).
pub const LOCK_END: u64 = i64::MAX as u64;
/// Bytes of a lock as it travels.
pub const LOCK_BYTES: usize = 30;

/// Locks of different spaces do not see each other, as on a local Linux file system.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum LockSpace {
    /// `fcntl`: ranges of bytes, owned by processes or by open file descriptions.
    Record = 0,
    /// `flock`: the whole file, owned by open file descriptions.
    Flock = 1,
}

/// What a lock keeps others from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum LockKind {
    /// No lock: frees the range.
    None = 0,
    /// Others may read-lock, too.
    Read = 1,
    /// Nobody else has a lock.
    Write = 2,
}

/// A lock, held or asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lock {
    /// Which of the two.
    pub space: LockSpace,
    /// How.
    pub kind: LockKind,
    /// Whose: locks of one owner never conflict. Unique within a client.
    pub owner: u64,
    /// Process, for people and `F_GETLK`.
    pub pid: u32,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
}

const NAME: &str = "file lock";

impl Lock {
    /// The request that frees everything of an owner.
    pub const fn all_of(space: LockSpace, owner: u64) -> Self {
        Self { space, kind: LockKind::None, owner, pid: 0, start: 0, end: LOCK_END }
    }

    /// Whether two ranges have a byte in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    /// Appends the fields.
    pub fn encode(&self, w: &mut Writer<'_>) {
        w.u8(self.space as u8).u8(self.kind as u8).u64(self.owner).u32(self.pid);
        w.u64(self.start).u64(self.end);
    }

    /// Reads and checks the fields.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (space, kind) = (r.u8()?, r.u8()?);
        Self::of_parts((space, kind), r.u64()?, r.u32()?, (r.u64()?, r.u64()?))
    }

    /// Of fields that came from anywhere: space and kind, owner, process, first and last byte.
    pub fn of_parts(
        (space, kind): (u8, u8),
        owner: u64,
        pid: u32,
        (start, end): (u64, u64),
    ) -> Result<Self, Corrupt> {
        let space = match space {
            0 => LockSpace::Record,
            1 => LockSpace::Flock,
            _ => return Err(Corrupt::new(NAME, "is of an unknown space")),
        };
        let kind = match kind {
            0 => LockKind::None,
            1 => LockKind::Read,
            2 => LockKind::Write,
            _ => return Err(Corrupt::new(NAME, "is of an unknown kind")),
        };
        if start > end || end > LOCK_END {
            return Err(Corrupt::new(NAME, "covers an impossible range"));
        }
        if space == LockSpace::Flock && (start, end) != (0, LOCK_END) {
            return Err(Corrupt::new(NAME, "covers part of a file, which flock cannot"));
        }
        Ok(Self { space, kind, owner, pid, start, end })
    }
}
