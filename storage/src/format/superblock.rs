//! Superblock and root records: the first thing read of a region, and the last thing written.
//!
//! `Segment::Super` is 16 KiB: superblock copies at 0 and 4096, root records at 8192 and 12288 (and `publications` behind each),
//! each alone in its 4 KiB, so that no fault of one can reach another. What follows the fields is
//! zero up to the length checked.
//!
//! ```text
//! superblock, 256 bytes                          root record, 128 bytes
//!      0   8  magic "CORBELSB"                        0   4  magic "CBRR"
//!      8   4  version 5 (4: without sums)             4   4  CRC32C of bytes 8..128
//!     12   4  CRC32C of bytes 16..256                 8   4  version 1
//!     16  16  uuid of the volume                     12   4  level of the root page
//!     32   8  created, realtime nanoseconds          16   8  transaction, grows by 1
//!     40   8  capacity in data blocks                24   8  root page
//!     48   4  node                                   32   8  tree pages in use
//!     52   1  durability: 1 pmem, 2 replicated,      40   8  stream position published
//!             3 disk                                 48   4  epoch
//!     53   1  bytes of the name                      52   4  reserved, zero
//!     54   2  reserved, zero                         56   8  data blocks in use
//!     56  64  name, UTF-8, zero fill                 64   8  inodes
//!    120   8  capacity in tree pages                 72   8  published, realtime nanoseconds
//!    128   8  bytes of the stream ring               80  16  uuid of the volume
//!    136   1  1: data blocks have checksums           96   8  highest inode number ever used
//!                                                   104  24  reserved, zero
//!    137 119  reserved, zero
//! ```
//!
//! # How the root flips
//!
//! The design speaks of one 8-byte root pointer. Here the pointer is the choice between two
//! records: transaction `t` is written to slot `t % 2`, over the record of `t - 2`, after
//! everything that it refers to has been persisted, and is persisted itself. A reader takes the
//! valid record with the higher transaction. A flip that is torn anywhere fails its checksum and
//! leaves the other slot, which is the state before; so no store needs to be atomic, and the
//! counts flip together with the pointer.

use alloc::string::String;
use alloc::vec::Vec;

use base::planted::{Bug, planted};
use base::{Epoch, NodeId, StreamSeq, crc32c};

use super::{Corrupt, Reader, Writer, sum};
use crate::limits::BLOCK_BYTES;

/// Bytes of `Segment::Super`.
pub const SUPER_BYTES: u64 = 16384;
/// Where the two copies of the superblock lie.
pub const SUPERBLOCK_AT: [u64; 2] = [0, 4096];
/// Where the two root records lie; transaction `t` goes to `ROOT_AT[t % 2]`.
pub const ROOT_AT: [u64; 2] = [8192, 12288];
/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 256;
/// Bytes of a root record.
pub const ROOT_BYTES: usize = 128;
/// Longest name of a volume.
pub const VOLUME_NAME_MAX: usize = 64;

const SUPER: &str = "superblock";
const ROOT: &str = "root record";

/// Of the region as a whole. 2: files may share blocks. 3: blocks lie in arenas of those whom all directories above let come.
/// 4: inodes count the pieces of their attributes, accounts those and names. 5: data blocks have checksums.
const VERSION: u32 = 5;
/// The version without checksums: it goes on as it is.
const UNSUMMED: u32 = 4;
/// What is said of a region of a newer version.
const NEWER: &str = "is of a newer version than this program, and not damaged: use the corbel that made it, or a newer one";
/// What is said of a region of an older version.
const OLDER: &str = "is of an older version, which let users map or take what was not theirs: copy its \
                     files with the corbel that made it, or let this node join anew after mkfs";

/// What a region promises about persisted bytes (DESIGN section 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Durability {
    /// They survive a power cut of this node.
    Pmem = 1,
    /// They survive the death of processes here, and of this node as long as a replica lives.
    Replicated = 2,
    /// They survive a power cut, at the price of a write-back per fence.
    Disk = 3,
}

impl Durability {
    /// From its number on media.
    pub const fn from_u8(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Pmem),
            2 => Some(Self::Replicated),
            3 => Some(Self::Disk),
            _ => None,
        }
    }

    /// The name that configuration uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pmem => "pmem",
            Self::Replicated => "replicated",
            Self::Disk => "disk",
        }
    }

    /// From the name that configuration uses.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Pmem, Self::Replicated, Self::Disk].into_iter().find(|d| d.name() == name)
    }
}

impl core::fmt::Display for Durability {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// What never changes about a volume on a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// The same on every member of the chain.
    pub uuid: [u8; 16],
    /// Realtime nanoseconds of mkfs.
    pub created: u64,
    /// Data blocks that may be allocated, over all arenas; also the length of each arena.
    pub capacity_blocks: u64,
    /// Node that the region belongs to.
    pub node: NodeId,
    /// Durability mode.
    pub durability: Durability,
    /// Name of the volume, 1 to 64 bytes.
    pub name: String,
    /// Pages of the tree segment.
    pub tree_pages: u64,
    /// Bytes of the stream ring.
    pub stream_bytes: u64,
    /// Whether data blocks have checksums (`sum`). Regions of the version before have none.
    pub sums: bool,
}

impl Superblock {
    /// Bytes of an arena.
    pub fn arena_bytes(&self) -> u64 {
        match self.sums {
            false => self.capacity_blocks * BLOCK_BYTES,
            true => sum::arena_bytes(self.capacity_blocks),
        }
    }

    /// Where checksums begin in each arena.
    pub fn sums_base(&self) -> Option<u64> {
        self.sums.then_some(self.capacity_blocks * BLOCK_BYTES)
    }

    /// The 256 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SUPERBLOCK_BYTES);
        let name = &self.name.as_bytes()[..self.name.len().min(VOLUME_NAME_MAX)];
        let mut w = Writer(&mut bytes);
        let version = if self.sums { VERSION } else { UNSUMMED };
        w.bytes(b"CORBELSB").u32(version).u32(0).bytes(&self.uuid).u64(self.created);
        w.u64(self.capacity_blocks).u32(self.node.0).u8(self.durability as u8);
        w.u8(name.len() as u8).u16(0).bytes(name).bytes(&[0; VOLUME_NAME_MAX][name.len()..]);
        w.u64(self.tree_pages).u64(self.stream_bytes).u8(u8::from(self.sums));
        bytes.resize(SUPERBLOCK_BYTES, 0);
        let crc = crc32c(0, &bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks one copy.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let whole = Reader::new(SUPER, bytes).bytes(SUPERBLOCK_BYTES)?;
        let mut r = Reader::new(SUPER, whole);
        if r.bytes(8)? != b"CORBELSB" {
            return Err(r.corrupt("does not begin with its magic"));
        }
        let version = r.u32()?;
        match version {
            UNSUMMED | VERSION => {}
            1..UNSUMMED => return Err(r.corrupt(OLDER)),
            // Whole all the same: it is not damaged.
            _ if r.u32()? == crc32c(0, &whole[16..]) => return Err(r.corrupt(NEWER)),
            _ => return Err(r.corrupt("has an unknown version")),
        }
        if r.u32()? != crc32c(0, &whole[16..]) {
            return Err(r.corrupt("fails its checksum"));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(r.bytes(16)?);
        let (created, capacity_blocks, node) = (r.u64()?, r.u64()?, NodeId(r.u32()?));
        let Some(durability) = Durability::from_u8(r.u8()?) else {
            return Err(r.corrupt("has an unknown durability"));
        };
        let (len, zero, name) = (usize::from(r.u8()?), r.u16()?, r.bytes(VOLUME_NAME_MAX)?);
        let filled = name.iter().skip(len).all(|&b| b == 0);
        let name = match name.get(..len).map(core::str::from_utf8) {
            Some(Ok(name)) if !name.is_empty() => String::from(name),
            _ => return Err(r.corrupt("has an illegal volume name")),
        };
        let (tree_pages, stream_bytes) = (r.u64()?, r.u64()?);
        let sums = match (r.u8()?, version) {
            (0, UNSUMMED) => false,
            (1, VERSION) => true,
            _ => return Err(r.corrupt("says of checksums what its version has not")),
        };
        if zero != 0 || !filled || r.rest().iter().any(|&b| b != 0) {
            return Err(r.corrupt("has bytes set that must be zero"));
        }
        if capacity_blocks == 0 || capacity_blocks > 1 << 40 || tree_pages > 1 << 40 {
            return Err(r.corrupt("has an impossible capacity"));
        }
        let this = Self {
            uuid,
            created,
            capacity_blocks,
            node,
            durability,
            name,
            tree_pages,
            stream_bytes,
            sums,
        };
        Ok(this)
    }
}

/// A published state of the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RootRecord {
    /// Number of the publication; the valid record with the highest wins.
    pub transaction: u64,
    /// Root of the tree.
    pub page: u64,
    /// Its level; 0 is a leaf.
    pub level: u32,
    /// Pages that the tree has.
    pub pages: u64,
    /// The stream is applied up to here.
    pub stream_seq: StreamSeq,
    /// Epoch of the last chunk applied.
    pub epoch: Epoch,
    /// Data blocks in use.
    pub blocks: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Realtime nanoseconds of the last operation in it.
    pub time: u64,
    /// Volume that the record belongs to.
    pub uuid: [u8; 16],
    /// Highest inode number that was ever used: numbers are not reused.
    pub last_inode: u64,
    /// Snapshots. A record of a volume with any is of version 2, which builds that would give their blocks to others refuse.
    pub snapshots: u64,
}

impl RootRecord {
    /// The 128 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ROOT_BYTES);
        let mut w = Writer(&mut bytes);
        let version = if self.snapshots > 0 { 2 } else { 1 };
        w.bytes(b"CBRR").u32(0).u32(version).u32(self.level).u64(self.transaction).u64(self.page);
        w.u64(self.pages).u64(self.stream_seq.0).u32(self.epoch.0).u32(0).u64(self.blocks);
        w.u64(self.inodes).u64(self.time).bytes(&self.uuid).u64(self.last_inode);
        w.u64(self.snapshots);
        bytes.resize(ROOT_BYTES, 0);
        let crc = crc32c(0, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks one slot.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let whole = Reader::new(ROOT, bytes).bytes(ROOT_BYTES)?;
        let mut r = Reader::new(ROOT, whole);
        if r.bytes(4)? != b"CBRR" {
            return Err(r.corrupt("does not begin with its magic"));
        }
        let crc = r.u32()?;
        let version = r.u32()?;
        if !matches!(version, 1 | 2) {
            return Err(r.corrupt("has an unknown version"));
        }
        if crc != crc32c(0, &whole[8..]) && !planted(Bug::RootUnverified) {
            return Err(r.corrupt("fails its checksum"));
        }
        let (level, transaction, page, pages) = (r.u32()?, r.u64()?, r.u64()?, r.u64()?);
        let (stream_seq, epoch, zero) = (StreamSeq(r.u64()?), Epoch(r.u32()?), r.u32()?);
        let (blocks, inodes, time) = (r.u64()?, r.u64()?, r.u64()?);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(r.bytes(16)?);
        let (last_inode, snapshots) = (r.u64()?, r.u64()?);
        if (snapshots > 0) != (version == 2) {
            return Err(r.corrupt("counts snapshots that its version has not"));
        }
        if zero != 0 || r.rest().iter().any(|&b| b != 0) {
            return Err(r.corrupt("has bytes set that must be zero"));
        }
        if transaction == 0 {
            return Err(r.corrupt("has transaction 0"));
        }
        if stream_seq >= StreamSeq::END {
            return Err(r.corrupt("has a position that nothing can have"));
        }
        Ok(Self {
            transaction,
            page,
            level,
            pages,
            stream_seq,
            epoch,
            blocks,
            inodes,
            time,
            uuid,
            last_inode,
            snapshots,
        })
    }
}

/// Judges both slots, and says which of the valid ones wins.
pub fn newest_root(slots: &[Result<RootRecord, Corrupt>; 2]) -> Option<RootRecord> {
    let valid = slots.iter().filter_map(|s| s.as_ref().ok());
    if planted(Bug::OldRootWins) {
        return valid.min_by_key(|r| r.transaction).copied();
    }
    valid.max_by_key(|r| r.transaction).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            uuid: *b"0123456789abcdef",
            created: 7,
            capacity_blocks: 1 << 20,
            node: NodeId(3),
            durability: Durability::Disk,
            name: "vol".into(),
            tree_pages: 1 << 16,
            stream_bytes: 64 << 20,
            sums: true,
        }
    }

    #[test]
    fn what_has_no_checksums_is_of_the_version_before() {
        let old = Superblock { sums: false, ..superblock() };
        let mut bytes = old.encode();
        assert_eq!((bytes[8], Superblock::decode(&bytes)), (UNSUMMED as u8, Ok(old)));
        bytes[8] = VERSION as u8;
        let crc = crc32c(0, &bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        assert!(Superblock::decode(&bytes).is_err());
    }

    #[test]
    fn what_is_newer_is_not_called_damaged() {
        let mut bytes = superblock().encode();
        bytes[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
        let newer = Superblock::decode(&bytes).unwrap_err().to_string();
        assert!(newer.contains("newer version") && newer.contains("not damaged"), "{newer}");
        bytes[100] ^= 1;
        let broken = Superblock::decode(&bytes).unwrap_err().to_string();
        assert!(!broken.contains("newer"), "{broken}");
    }

    #[test]
    fn round_trip_and_every_bit_flip() {
        let s = superblock();
        let bytes = s.encode();
        assert_eq!(Superblock::decode(&bytes), Ok(s));
        let r = RootRecord { transaction: 9, page: 4, blocks: 17, ..Default::default() };
        let root = r.encode();
        assert_eq!(RootRecord::decode(&root), Ok(r));
        for (bytes, is_super) in [(bytes, true), (root, false)] {
            for bit in 0..bytes.len() * 8 {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                let refused = if is_super {
                    Superblock::decode(&flipped).is_err()
                } else {
                    RootRecord::decode(&flipped).is_err()
                };
                assert!(refused, "bit {bit} is not covered");
            }
            for cut in 0..bytes.len() {
                assert!(Superblock::decode(&bytes[..cut]).is_err());
                assert!(RootRecord::decode(&bytes[..cut]).is_err());
            }
        }
    }

    #[test]
    fn the_newer_valid_root_wins() {
        let a = RootRecord { transaction: 8, ..Default::default() };
        let b = RootRecord { transaction: 9, ..Default::default() };
        let bad = Err(Corrupt::new("x", "y"));
        assert_eq!(newest_root(&[Ok(a), Ok(b)]), Some(b));
        assert_eq!(newest_root(&[Ok(a), bad]), Some(a));
        assert_eq!(newest_root(&[bad, bad]), None);
    }
}
