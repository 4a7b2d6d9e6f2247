//! Items of the tree: what the values mean, by the kind in the key.
//!
//! ```text
//! inode  kind          item                         value
//! i      1 attributes  0                            below
//! i      2 target      piece                        up to 960 bytes of a symbolic link's target
//! d      3 name        hash << 8 | n                inode u64, type u8 (mode >> 12), name
//! f      4 extent      file block                   arena u32, flags u32 (1: unwritten),
//!                                                   arena block u64, blocks u64
//! i      5 xattr       hash << 16 | n << 8 | piece  piece 0: name length u8, value length u32,
//!                                                   name, then bytes; others: bytes; 960 at most
//! 0     16 orphan      inode                        empty, or u8 1: made without a name (O_TMPFILE), and
//!                                                   Link may give it one
//! 0     17 client      client id                    last sequence published u64
//! 0     18 arena       arena                        class u8 (1 everybody, 2 owner and group,
//!                                                   3 owner, 4 service only), 3 zero, uid, gid u32
//! 0     19 user        uid                          limit in blocks, in inodes, blocks used, inodes
//! 0     20 directory   inode                        used: u64 each; only where there is a limit
//! 0     21 shared      arena << 40 | block          blocks u64, owners u64: so many places in files
//!                                                   (at least 2) map each of these blocks
//! 0     22 unplaced    inode                        of a directory: empty, what it holds is still to be
//!                                                   looked at; of others: the class that it shall have
//!                                                   as its reach, 12 bytes as for an arena
//! 0     23 snapshot    number                       slot u16, 6 zero, directory u64, time u64, inodes u64,
//!                                                   name
//! 0     24 root        number of a snapshot         page u64, level u32, 4 zero, transaction u64: where its
//!                                                   tree begins, on this member
//! ```
//!
//! The hash of a name is SipHash-1-3 keyed with the volume's uuid, cut to 55 bits (names) or 47
//! bits (attributes), never 0; `n` tells names of the same hash apart. A name's item is its
//! readdir cookie: stable, below 2^63, above the cookies 1 and 2 of `.` and `..`.
//!
//! ```text
//! attributes, 104 bytes, 112 with the quota's directory, 124 with the reach as well
//!   0 4 mode    4 4 nlink    8 4 uid   12 4 gid   16 4 rdev
//!  20 4 number of xattrs; bit 31: one is an access list, bit 30: one is a default list (acl)
//!  24 8 size   32 8 blocks allocated (4 KiB)
//!  40 12 atime 52 12 mtime  64 12 ctime 76 12 btime     each seconds i64, nanoseconds u32
//!  88 8 of a directory: parent inode    96 8 of a directory: entries
//! 104 8 directory whose quota counts the inode; 0 only if there is a reach
//! 112 12 reach: whom the directories on the way let come so far, a class as of an arena; absent: everybody
//! ```

use alloc::vec::Vec;

use base::InodeId;

use super::entry::Stamp;
use super::page::{Key, VALUE_MAX};
use super::rpc::{Amount, InodeRecord};
use super::{Corrupt, Reader};

/// Kinds of items; the numbers are on media.
#[allow(missing_docs)]
pub mod kind {
    pub const ATTR: u8 = 1;
    pub const TARGET: u8 = 2;
    pub const NAME: u8 = 3;
    pub const EXTENT: u8 = 4;
    pub const XATTR: u8 = 5;
    pub const ORPHAN: u8 = 16;
    pub const CLIENT: u8 = 17;
    pub const ARENA: u8 = 18;
    pub const USER_ACCOUNT: u8 = 19;
    pub const DIRECTORY_ACCOUNT: u8 = 20;
    pub const SHARED: u8 = 21;
    pub const UNPLACED: u8 = 22;
    pub const SNAPSHOT: u8 = 23;
    pub const SNAPSHOT_ROOT: u8 = 24;
}

/// Bytes of a value piece of targets and xattrs.
pub const PIECE_BYTES: usize = VALUE_MAX;
/// So many pieces of attributes count as a block where there are limits: what is less is free.
pub const PIECES_A_BLOCK: u64 = (super::page::PAGE_BYTES / PIECE_BYTES) as u64;
/// Names of one directory that may share a hash.
pub const COLLISIONS_MAX: u64 = 256;
/// Bytes of the attributes.
pub const INODE_BYTES: usize = 104;
/// Bytes of the attributes of an inode that a directory's quota counts.
const INODE_BYTES_COUNTED: usize = 112;
/// Bytes of the attributes of an inode that not everybody can reach.
pub const INODE_BYTES_MAX: usize = 124;

/// Attributes of an inode as they lie in the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Inode {
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// Pieces of its extended attributes, [`PIECE_BYTES`] or less each, at most [`XATTRS_MAX`].
    pub xattrs: u32,
    /// One of them is an access list: the mode alone does not say who may read.
    pub acl: bool,
    /// One of them is a default list.
    pub default_acl: bool,
    pub size: u64,
    /// Blocks of 4 KiB allocated.
    pub blocks: u64,
    pub atime: Stamp,
    pub mtime: Stamp,
    pub ctime: Stamp,
    pub btime: Stamp,
    /// Of a directory: its parent.
    pub parent: InodeId,
    /// Of a directory: number of names in it.
    pub entries: u64,
    /// The directory whose quota counts it, or 0.
    pub project: InodeId,
    /// Whom the directories on the way let come so far, or fewer.
    pub reach: ReadClass,
}

/// The bytes of an inode's attributes.
#[derive(Clone, Copy, Debug)]
pub struct InodeItem {
    bytes: [u8; INODE_BYTES_MAX],
    len: usize,
}

impl core::ops::Deref for InodeItem {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// An account that has a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccountItem {
    /// Limits; 0 is none.
    pub limit: Amount,
    /// What it uses.
    pub used: Amount,
}

impl AccountItem {
    /// The bytes of the item.
    pub fn encode(&self) -> [u8; 32] {
        let mut b = [0; 32];
        let words = [self.limit.blocks, self.limit.inodes, self.used.blocks, self.used.inodes];
        for (at, word) in b.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        b
    }

    /// Reads and checks the item.
    pub fn decode(value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("account", value);
        let limit = Amount { blocks: r.u64()?, inodes: r.u64()? };
        let used = Amount { blocks: r.u64()?, inodes: r.u64()? };
        r.end()?;
        if limit == Amount::default() {
            return Err(r.corrupt("has no limit"));
        }
        Ok(Self { limit, used })
    }
}

/// Extended attributes of an inode.
pub const XATTRS_MAX: u32 = (1 << 30) - 1;
const HAS_ACL: u32 = 1 << 31;
const HAS_DEFAULT_ACL: u32 = 1 << 30;

/// Type bits of a mode.
pub const S_IFMT: u32 = 0o170_000;
/// Directory.
pub const S_IFDIR: u32 = 0o040_000;
/// Regular file.
pub const S_IFREG: u32 = 0o100_000;
/// Symbolic link.
pub const S_IFLNK: u32 = 0o120_000;

impl Inode {
    /// Whether it is a directory.
    pub const fn is_dir(&self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }

    /// Whether it is a regular file.
    pub const fn is_file(&self) -> bool {
        self.mode & S_IFMT == S_IFREG
    }

    /// Whether it is a symbolic link.
    pub const fn is_link(&self) -> bool {
        self.mode & S_IFMT == S_IFLNK
    }

    /// What accounts count of it: its blocks of data, and one for each [`PIECES_A_BLOCK`] full pieces of attributes; itself
    /// under each of its names.
    pub fn weight(&self) -> Amount {
        let names = if self.is_dir() { 1 } else { self.nlink.max(1) };
        Amount { blocks: self.blocks.saturating_add(self.attribute_blocks()), inodes: names.into() }
    }

    /// What its attributes count as.
    pub fn attribute_blocks(&self) -> u64 {
        u64::from(self.xattrs) / PIECES_A_BLOCK
    }

    /// The bytes of the item.
    pub fn encode(&self) -> InodeItem {
        let mut b = [0u8; INODE_BYTES_MAX];
        let xattrs = self.xattrs & XATTRS_MAX
            | if self.acl { HAS_ACL } else { 0 }
            | if self.default_acl { HAS_DEFAULT_ACL } else { 0 };
        let words = [self.mode, self.nlink, self.uid, self.gid, self.rdev, xattrs];
        for (i, word) in words.iter().enumerate() {
            b[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
        b[24..32].copy_from_slice(&self.size.to_le_bytes());
        b[32..40].copy_from_slice(&self.blocks.to_le_bytes());
        for (i, t) in [self.atime, self.mtime, self.ctime, self.btime].iter().enumerate() {
            let at = 40 + 12 * i;
            b[at..at + 8].copy_from_slice(&t.sec.to_le_bytes());
            b[at + 8..at + 12].copy_from_slice(&t.nsec.to_le_bytes());
        }
        b[88..96].copy_from_slice(&self.parent.0.to_le_bytes());
        b[96..104].copy_from_slice(&self.entries.to_le_bytes());
        b[104..112].copy_from_slice(&self.project.0.to_le_bytes());
        b[112..124].copy_from_slice(&self.reach.encode());
        let len = match (self.reach, self.project) {
            (ReadClass::World, InodeId::NONE) => INODE_BYTES,
            (ReadClass::World, _) => INODE_BYTES_COUNTED,
            _ => INODE_BYTES_MAX,
        };
        InodeItem { bytes: b, len }
    }

    /// Reads and checks the item.
    pub fn decode(value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("attributes", value);
        let stamp = |r: &mut Reader<'_>| -> Result<Stamp, Corrupt> {
            let (sec, nsec) = (r.i64()?, r.u32()?);
            if nsec >= 1_000_000_000 {
                return Err(r.corrupt("have a time with too many nanoseconds"));
            }
            Ok(Stamp { sec, nsec })
        };
        let mut inode = Self {
            mode: r.u32()?,
            nlink: r.u32()?,
            uid: r.u32()?,
            gid: r.u32()?,
            rdev: r.u32()?,
            xattrs: r.u32()?,
            size: r.u64()?,
            blocks: r.u64()?,
            atime: stamp(&mut r)?,
            mtime: stamp(&mut r)?,
            ctime: stamp(&mut r)?,
            btime: stamp(&mut r)?,
            parent: InodeId(r.u64()?),
            entries: r.u64()?,
            ..Self::default()
        };
        if r.left() > 0 {
            inode.project = InodeId(r.u64()?);
            if r.left() > 0 {
                inode.reach = ReadClass::decode(r.bytes(12)?)?;
                if inode.reach == ReadClass::World {
                    return Err(r.corrupt("spell out a reach that goes without saying"));
                }
            } else if inode.project == InodeId::NONE {
                return Err(r.corrupt("name no directory for their quota"));
            }
        }
        r.end()?;
        inode.acl = inode.xattrs & HAS_ACL != 0;
        inode.default_acl = inode.xattrs & HAS_DEFAULT_ACL != 0;
        inode.xattrs &= XATTRS_MAX;
        Ok(inode)
    }

    /// Class of its blocks: who may read it, of those who come so far. Whom an access list lets read cannot be
    /// expressed by mappings: the service reads for all but the owner.
    pub fn class(&self) -> ReadClass {
        self.whom(self.mode).meet(self.reach)
    }

    /// Of a directory: whom it lets come to what is in it, or fewer.
    pub fn lets_in(&self) -> ReadClass {
        self.whom(self.mode << 2).meet(self.reach)
    }

    /// To whom these read bits of a mode give something.
    fn whom(&self, mode: u32) -> ReadClass {
        match (self.acl, mode & 0o400) {
            (false, _) => ReadClass::of(mode, self.uid, self.gid),
            (true, 0) => ReadClass::Service,
            (true, _) => ReadClass::Owner { uid: self.uid },
        }
    }

    /// The attributes as they travel, without the lists.
    pub fn record(&self, ino: InodeId) -> InodeRecord {
        InodeRecord {
            ino,
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            size: self.size,
            blocks: self.blocks.saturating_mul(8),
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            parent: self.parent,
            entries: self.entries,
            xattrs: self.xattrs > 0,
            linkable: false,
            acl: None,
            default_acl: None,
            project: self.project,
            limited: false,
        }
    }
}

/// A run of blocks of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// First block in the file.
    pub file: u64,
    /// Arena.
    pub arena: u32,
    /// First block in the arena.
    pub block: u64,
    /// Number of blocks.
    pub len: u64,
    /// Allocated, never written.
    pub unwritten: bool,
}

impl Run {
    /// The block of the file after the run.
    pub const fn end(&self) -> u64 {
        self.file + self.len
    }

    /// The part of the run in `from..to` of the file; the caller knows that there is one.
    pub fn cut(&self, from: u64, to: u64) -> Run {
        let (from, to) = (from.max(self.file), to.min(self.end()));
        Run { file: from, block: self.block + (from - self.file), len: to - from, ..*self }
    }

    /// Whether `next` continues this run in the file and in the arena.
    pub fn joins(&self, next: &Run) -> bool {
        self.end() == next.file
            && self.arena == next.arena
            && self.block + self.len == next.block
            && self.unwritten == next.unwritten
    }

    /// The bytes of the item.
    pub fn encode(&self) -> [u8; 24] {
        let mut b = [0u8; 24];
        b[0..4].copy_from_slice(&self.arena.to_le_bytes());
        b[4] = u8::from(self.unwritten);
        b[8..16].copy_from_slice(&self.block.to_le_bytes());
        b[16..24].copy_from_slice(&self.len.to_le_bytes());
        b
    }

    /// Reads and checks the item.
    pub fn decode(file: u64, value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("extent", value);
        let (arena, flags, block, len) = (r.u32()?, r.u32()?, r.u64()?, r.u64()?);
        r.end()?;
        if flags > 1 {
            return Err(r.corrupt("has unknown flags"));
        }
        let limit = 1 << 50;
        if len == 0 || len > limit || block > limit || file > limit {
            return Err(r.corrupt("is empty or lies outside every arena"));
        }
        Ok(Self { file, arena, block, len, unwritten: flags == 1 })
    }
}

/// A user that nobody is.
pub const NOBODY: u32 = u32::MAX;

/// Who may read the blocks of an arena.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum ReadClass {
    /// Everybody.
    #[default]
    World,
    /// A user and the members of a group.
    Group {
        /// Owner, or [`NOBODY`].
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// One user.
    Owner {
        /// Owner.
        uid: u32,
    },
    /// No client; they read through the service.
    Service,
}

impl ReadClass {
    /// Class of a file's blocks. Modes that give a wider class of people what they deny a
    /// narrower one (0604, 0040) cannot be expressed by mappings: the service reads for those.
    pub const fn of(mode: u32, uid: u32, gid: u32) -> Self {
        match mode & 0o444 {
            0o444 => Self::World,
            0o440 => Self::Group { uid, gid },
            0o400 => Self::Owner { uid },
            _ => Self::Service,
        }
    }

    /// Those who are in both, or fewer: who is in which group is not known here.
    pub fn meet(self, other: Self) -> Self {
        match (self, other) {
            _ if self == other => self,
            (Self::World, class) | (class, Self::World) => class,
            (Self::Owner { uid }, Self::Group { uid: of, .. })
            | (Self::Group { uid: of, .. }, Self::Owner { uid })
                if uid == of =>
            {
                Self::Owner { uid }
            }
            (Self::Group { gid, .. }, Self::Group { gid: other, .. }) if gid == other => {
                Self::Group { uid: NOBODY, gid }
            }
            (Self::Group { uid, .. }, Self::Group { uid: other, .. })
                if uid == other && uid != NOBODY =>
            {
                Self::Owner { uid }
            }
            _ => Self::Service,
        }
    }

    /// Whether all who are in it are in the other, too.
    pub fn is_within(self, other: Self) -> bool {
        self.meet(other) == self
    }

    /// Whether a process with these credentials may map the arena (the super-user any).
    pub fn readable_by(&self, uid: u32, gid: u32, groups: &[u32]) -> bool {
        match *self {
            _ if uid == 0 => true,
            Self::World => true,
            Self::Group { uid: u, gid: g } => uid == u || gid == g || groups.contains(&g),
            Self::Owner { uid: u } => uid == u,
            Self::Service => false,
        }
    }

    /// The bytes of the item.
    pub fn encode(&self) -> [u8; 12] {
        let (tag, uid, gid) = match *self {
            Self::World => (1, 0, 0),
            Self::Group { uid, gid } => (2, uid, gid),
            Self::Owner { uid } => (3, uid, 0),
            Self::Service => (4, 0, 0u32),
        };
        let mut b = [0u8; 12];
        b[0] = tag;
        b[4..8].copy_from_slice(&u32::to_le_bytes(uid));
        b[8..12].copy_from_slice(&gid.to_le_bytes());
        b
    }

    /// Reads and checks the item.
    pub fn decode(value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("arena", value);
        let (tag, zero) = (r.u8()?, r.bytes(3)?);
        let (uid, gid) = (r.u32()?, r.u32()?);
        r.end()?;
        if zero != [0; 3] {
            return Err(r.corrupt("has bytes set that must be zero"));
        }
        match (tag, uid, gid) {
            (1, 0, 0) => Ok(Self::World),
            (2, uid, gid) => Ok(Self::Group { uid, gid }),
            (3, uid, 0) => Ok(Self::Owner { uid }),
            (4, 0, 0) => Ok(Self::Service),
            _ => Err(r.corrupt("has an unknown class")),
        }
    }
}

/// A run of blocks that several places in files map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Shared {
    /// Arena.
    pub arena: u32,
    /// First block in the arena.
    pub block: u64,
    /// Number of blocks.
    pub len: u64,
    /// Places that map each of them: at least 2.
    pub owners: u64,
}

/// Bits of a block's number in the key of a shared run.
const BLOCK_BITS: u32 = 40;

impl Shared {
    /// The key under which a run that begins at `block` lies.
    pub const fn key(arena: u32, block: u64) -> Key {
        Key::new(0, kind::SHARED, ((arena as u64) << BLOCK_BITS) | block)
    }

    /// Arena and block that a key's item names.
    pub const fn place(item: u64) -> (u64, u64) {
        (item >> BLOCK_BITS, item & ((1 << BLOCK_BITS) - 1))
    }

    /// The block after the run.
    pub const fn end(&self) -> u64 {
        self.block + self.len
    }

    /// The bytes of the item.
    pub fn encode(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b[..8].copy_from_slice(&self.len.to_le_bytes());
        b[8..].copy_from_slice(&self.owners.to_le_bytes());
        b
    }

    /// Reads and checks the item.
    pub fn decode(item: u64, value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("shared blocks", value);
        let (len, owners) = (r.u64()?, r.u64()?);
        r.end()?;
        let (arena, block) = Self::place(item);
        let Ok(arena) = u32::try_from(arena) else {
            return Err(r.corrupt("have an impossible arena number"));
        };
        if len == 0 || len > (1 << BLOCK_BITS) - block || owners < 2 {
            return Err(r.corrupt("are none, reach beyond every arena, or have one owner"));
        }
        Ok(Self { arena, block, len, owners })
    }
}

/// A state of the volume that stays under a name: the same on every member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The first 15 bits of its inodes (`InodeId::in_snapshot`): no other has the same one at a time.
    pub slot: u16,
    /// The directory that it shows.
    pub dir: InodeId,
    /// When it was made, in realtime nanoseconds.
    pub time: u64,
    /// Inodes of the volume then.
    pub inodes: u64,
    /// Its name.
    pub name: Vec<u8>,
}

impl Snapshot {
    /// The bytes of the item.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32 + self.name.len());
        let mut w = super::Writer(&mut bytes);
        w.u16(self.slot).bytes(&[0; 6]).u64(self.dir.0).u64(self.time).u64(self.inodes);
        w.bytes(&self.name);
        bytes
    }

    /// Reads the item.
    pub fn decode(value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("snapshot", value);
        let slot = r.u16()?;
        r.zeroes(6)?;
        let (dir, time, inodes) = (InodeId(r.u64()?), r.u64()?, r.u64()?);
        let name = r.rest().to_vec();
        let slots = 1..0x8000;
        if !slots.contains(&slot) || dir == InodeId::NONE || !super::entry::name_is_legal(&name) {
            return Err(Corrupt::new("snapshot", "has an impossible slot, directory or name"));
        }
        Ok(Self { slot, dir, time, inodes, name })
    }
}

/// Where the tree of a snapshot begins, on one member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotRoot {
    /// Page.
    pub page: u64,
    /// Its level.
    pub level: u8,
    /// No page of it was written by a later transaction.
    pub transaction: u64,
}

impl SnapshotRoot {
    /// The bytes of the item.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24);
        let mut w = super::Writer(&mut bytes);
        w.u64(self.page).u32(self.level.into()).u32(0).u64(self.transaction);
        bytes
    }

    /// Reads the item.
    pub fn decode(value: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new("snapshot's root", value);
        let (page, level, zero, transaction) = (r.u64()?, r.u32()?, r.u32()?, r.u64()?);
        r.end()?;
        match u8::try_from(level) {
            Ok(level) if zero == 0 && transaction > 0 => Ok(Self { page, level, transaction }),
            _ => Err(r.corrupt("is none")),
        }
    }
}

/// A name of a directory: inode, type bits of its mode, name.
pub fn decode_name(value: &[u8]) -> Result<(InodeId, u32, &[u8]), Corrupt> {
    let mut r = Reader::new("directory entry", value);
    let (ino, kind, name) = (InodeId(r.u64()?), u32::from(r.u8()?) << 12, r.rest());
    if ino.0 == 0 || kind > S_IFMT || !super::entry::name_is_legal(name) {
        return Err(r.corrupt("has an illegal name, type or inode"));
    }
    Ok((ino, kind, name))
}

/// Value of an orphan's item: whether Link may give it a name.
pub const fn orphan_value(linkable: bool) -> &'static [u8] {
    if linkable { &[1] } else { &[] }
}

/// Key of the attributes of an inode.
pub const fn attr_key(ino: InodeId) -> Key {
    Key::new(ino.0, kind::ATTR, 0)
}

/// SipHash-1-3 of a name, keyed with the volume's uuid so that collisions cannot be prepared.
pub fn name_hash(uuid: &[u8; 16], name: &[u8]) -> u64 {
    let half = |at: usize| {
        let mut w = [0; 8];
        w.copy_from_slice(&uuid[at..at + 8]);
        u64::from_le_bytes(w)
    };
    let (k0, k1) = (half(0), half(8));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut chunks = name.chunks_exact(8);
    for chunk in &mut chunks {
        let mut w = [0; 8];
        w.copy_from_slice(chunk);
        let m = u64::from_le_bytes(w);
        v[3] ^= m;
        sip_round(&mut v);
        v[0] ^= m;
    }
    let mut last = [0u8; 8];
    let rest = chunks.remainder();
    last[..rest.len()].copy_from_slice(rest);
    last[7] = name.len() as u8;
    let m = u64::from_le_bytes(last);
    v[3] ^= m;
    sip_round(&mut v);
    v[0] ^= m;
    v[2] ^= 0xff;
    for _ in 0..3 {
        sip_round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn sip_round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes() {
        assert_eq!(ReadClass::of(0o100644, 1, 2), ReadClass::World);
        assert_eq!(ReadClass::of(0o100640, 1, 2), ReadClass::Group { uid: 1, gid: 2 });
        assert_eq!(ReadClass::of(0o100600, 1, 2), ReadClass::Owner { uid: 1 });
        for odd in [0o604, 0o044, 0o040, 0o004, 0o200, 0] {
            assert_eq!(ReadClass::of(odd, 1, 2), ReadClass::Service, "{odd:o}");
        }
        for c in [0o644, 0o640, 0o600, 0].map(|m| ReadClass::of(m, 5, 6)) {
            assert_eq!(ReadClass::decode(&c.encode()), Ok(c));
        }
        assert!(ReadClass::Group { uid: 1, gid: 2 }.readable_by(9, 8, &[2]));
        assert!(!ReadClass::Group { uid: 1, gid: 2 }.readable_by(9, 8, &[3]));
        assert!(!ReadClass::Owner { uid: 1 }.readable_by(2, 0, &[]));
        assert!(ReadClass::Service.readable_by(0, 0, &[]));
    }

    #[test]
    fn items_round_trip() {
        let inode = Inode {
            mode: 0o100644,
            nlink: 1,
            size: 77,
            mtime: Stamp { sec: -5, nsec: 9 },
            parent: InodeId(3),
            ..Default::default()
        };
        assert_eq!(Inode::decode(&inode.encode()), Ok(inode));
        let run = Run { file: 4, arena: 2, block: 9, len: 3, unwritten: true };
        assert_eq!(Run::decode(4, &run.encode()), Ok(run));
        assert_eq!(run.cut(5, 100), Run { file: 5, block: 10, len: 2, ..run });
        assert!(Run::decode(4, &[0; 24]).is_err());
    }
}
