//! A volume: the schema on the tree, and the one [`Volume::apply`] that changes it.
//!
//! `apply` checks an operation against the working state and then does it: namespace and
//! attributes in the tree's pages in DRAM, data as a list of copies. [`Volume::seal`] ends a
//! transaction: what it did is immutable from then on, and later operations go on top.
//! [`Volume::publish`] puts a sealed transaction on media, after the caller has run its copies
//! and made them persistent. A crash at any point leaves the state of the last root flipped.
//!
//! What is always true:
//! - A refusal changes nothing. A [`Fault`] on the way condemns the working state (only): every
//!   later call reports it, and the volume must be opened anew.
//! - Bytes of a file's blocks beyond its size are zeroes, so that growing it needs no writing.
//! - Data is overwritten in place, unless others share the block (`share`): then the writer gets
//!   one of its own. Overwriting is safe under replay because entries carry the bytes themselves;
//!   blocks that an unpublished operation reads (for a clone that cannot share, or for the rest of
//!   a block that is shared no more) are not overwritten before it is published
//!   (`Refusal::NeedsPublish`).
//! - Blocks and pages given up by a transaction are reused only after it is published, and when no snapshot has them
//!   (`snapshots`).
//!
//! Reads show the working state. File *contents* ([`Volume::read_file`]) lag: they are what the
//! copies run so far have made of them.

mod ages;
mod attrs;
mod copies;
mod data;
pub mod difference;
mod digest;
pub mod image;
mod invariants;
mod kept;
mod names;
mod parts;
mod publish;
mod quota;
pub mod reach;
pub mod reconcile;
mod share;
pub mod since;
mod snapshots;
mod space;
mod upgrade;
mod verify;

use std::cell::Cell;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{ClientId, Epoch, Errno, InodeId, NodeId, Sequence, StreamSeq};

use crate::acl;
use crate::format::entry::{Header, Op, Stamp};
use crate::format::item::{self, AccountItem, Inode, ReadClass, Run, Shared, attr_key, kind};
use crate::format::page::Key;
use crate::format::proof::Proof;
use crate::format::rpc::{Extent, InodeRecord, Name};
use crate::format::sum::SUMS_A_BLOCK;
use crate::format::superblock::{
    Durability, ROOT_AT, ROOT_BYTES, RootRecord, SUPER_BYTES, SUPERBLOCK_AT, SUPERBLOCK_BYTES,
    Superblock, newest_root,
};
use crate::limits::BLOCK_BYTES;
use crate::media::{Media, MediaError, Segment};
pub use crate::tree::Fault;
use crate::tree::{Pin, Root, Tree};
pub use copies::{CopyItem, Summing, back_copies, read_block, read_sum, run_copies, summing_at};
pub use digest::DIFFERENCES_MAX;
pub use kept::Keyed;
pub use publish::Sealed;
pub use quota::{AccountId, Amount};
pub(crate) use share::append as append_shared;
pub use snapshots::{SnapshotStat, joins};
pub use space::Blocks;
use space::Space;
pub use upgrade::{add_sums, end_upgrade, is_half_upgraded};
pub use verify::{Content, Place};

/// Number of the arena that everybody may read.
pub const ARENA_WORLD: u32 = 0;
/// Number of the arena that no client may map.
pub const ARENA_SERVICE: u32 = 1;
/// Arenas of a volume; files of further classes go to the service's.
pub const ARENAS_MAX: u32 = 4096;

/// Tree pages that any one operation may need at most, splits and merges included.
const PAGES_PER_OP: u64 = 96;
/// Share of the tree kept for operations that give space back.
const PAGES_RESERVE_SHARE: u64 = 32;
/// Copies of one transaction from which on it should be published.
const COPIES_SOFT_MAX: usize = 65536;
/// Pages of the tree kept in DRAM: 64 MiB.
pub const CACHE_PAGES: usize = 16384;
/// The same for a view: 4 MiB.
const VIEW_CACHE_PAGES: usize = 1024;

/// Why an operation was refused. It changed nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The inode or the name does not exist.
    NoEntry,
    /// The name or the inode number is in use.
    Exists,
    /// Not a directory.
    NotDirectory,
    /// A directory.
    IsDirectory,
    /// The directory is not empty.
    NotEmpty,
    /// A directory would come to lie in itself.
    Cycle,
    /// Too many hard links.
    TooManyLinks,
    /// Beyond the largest file size.
    TooBig,
    /// No space, also not after publishing.
    NoSpace,
    /// Not now: seal and publish, then apply again.
    NeedsPublish,
    /// The name belongs to another inode than the operation says.
    Mismatch,
    /// The name is illegal.
    BadName,
    /// The operation makes no sense on this kind of inode, or its arguments do not.
    Invalid,
    /// Not permitted, whoever asks (hard links of directories).
    NotPermitted,
    /// A mode of fallocate that is not provided.
    Unsupported,
    /// The extended attribute does not exist.
    NoAttribute,
    /// A user's or a directory's quota is used up.
    Quota,
    /// From the tree of one quota to another: to be copied.
    CrossQuota,
    /// Not the operation's fault.
    Fault(Fault),
}

impl Refusal {
    /// What a caller of the file system sees.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NoEntry => Errno::NOENT,
            Self::Exists => Errno::EXIST,
            Self::NotDirectory => Errno::NOTDIR,
            Self::IsDirectory => Errno::ISDIR,
            Self::NotEmpty => Errno::NOTEMPTY,
            Self::Cycle | Self::Invalid | Self::BadName => Errno::INVAL,
            Self::TooManyLinks => Errno::MLINK,
            Self::TooBig => Errno::FBIG,
            Self::NoSpace => Errno::NOSPC,
            Self::NeedsPublish => Errno::AGAIN,
            Self::Mismatch => Errno::STALE,
            Self::NotPermitted => Errno::PERM,
            Self::Unsupported => Errno::OPNOTSUPP,
            Self::NoAttribute => Errno::NODATA,
            Self::Quota => Errno::DQUOT,
            Self::CrossQuota => Errno::XDEV,
            Self::Fault(_) => Errno::IO,
        }
    }
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::Cycle => f.write_str("a directory would come to lie in itself"),
            Self::NeedsPublish => f.write_str("waits for what was done before to be published"),
            Self::Mismatch => f.write_str("the name belongs to another inode"),
            Self::BadName => f.write_str("the name is illegal"),
            other => other.errno().fmt(f),
        }
    }
}

impl core::error::Error for Refusal {}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<MediaError> for Refusal {
    fn from(e: MediaError) -> Self {
        Self::Fault(Fault::Media(e))
    }
}

/// What an operation brought about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// This inode has no name any more; `Reap` frees it once nobody has it open.
    pub orphaned: Option<InodeId>,
    /// The result was there already: the operation had been applied before.
    pub already: bool,
}

/// Result of the parts of `apply`.
type Done = Result<Applied, Refusal>;

/// What `mkfs` chooses.
#[derive(Clone, Debug)]
pub struct Params {
    /// The same on every member of the chain.
    pub uuid: [u8; 16],
    /// Name, 1 to 64 bytes.
    pub name: String,
    /// Node that the region belongs to.
    pub node: NodeId,
    /// Durability mode of the region.
    pub durability: Durability,
    /// Bytes of file data, rounded down to blocks.
    pub capacity_bytes: u64,
    /// Bytes of the stream ring (recorded for the service, which makes the segment).
    pub stream_bytes: u64,
    /// Realtime nanoseconds; time stamps of the root directory.
    pub time: u64,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
}

/// Space and inode counts of the working state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VolumeStat {
    /// Data blocks in all.
    pub blocks: u64,
    /// Data blocks free.
    pub blocks_free: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Inodes that the tree still has room for, roughly.
    pub inodes_free: u64,
}

/// The published state of one moment, for reading while the volume goes on. The contents of files
/// and free space are none of it.
#[derive(Debug)]
pub struct View {
    volume: Volume,
    _pin: Pin,
}

impl core::ops::Deref for View {
    type Target = Volume;
    fn deref(&self) -> &Volume {
        &self.volume
    }
}

/// An open volume: owned by one thread at a time.
pub struct Volume {
    media: Arc<dyn Media>,
    tree: Tree,
    superblock: Superblock,
    /// The last root flipped.
    root: RootRecord,
    space: Space,
    copies: Vec<CopyItem>,
    copied_before: publish::CopiedBefore,
    inodes: u64,
    last_inode: u64,
    time: u64,
    shares: share::Shares,
    condemned: Cell<bool>,
    accounts: quota::Accounts,
    /// Items of the kind UNPLACED.
    unplaced: u64,
    moved: parts::Moved,
    rearranged: since::Rearranged,
    snapshots: snapshots::Snapshots,
}

impl core::fmt::Debug for Volume {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Volume {{ name: {:?}, root: {:?} }}", self.superblock.name, self.root)
    }
}

fn corrupt(ino: InodeId) -> impl Fn(Corrupt) -> Fault {
    move |corrupt| Fault::Item { ino: ino.0, corrupt }
}

/// Both copies of the superblock.
pub fn read_superblocks(media: &dyn Media) -> Result<[Result<Superblock, Corrupt>; 2], MediaError> {
    let read = |at| -> Result<_, MediaError> {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        media.read(Segment::Super, at, &mut bytes)?;
        Ok(Superblock::decode(&bytes))
    };
    Ok([read(SUPERBLOCK_AT[0])?, read(SUPERBLOCK_AT[1])?])
}

/// Both root records; one of another volume counts as corrupt.
pub fn read_roots(
    media: &dyn Media,
    uuid: &[u8; 16],
) -> Result<[Result<RootRecord, Corrupt>; 2], MediaError> {
    let read = |slot: usize| -> Result<_, MediaError> {
        let mut bytes = [0; ROOT_BYTES];
        media.read(Segment::Super, ROOT_AT[slot], &mut bytes)?;
        let bad = |what| Err(Corrupt::new("root record", what));
        Ok(match RootRecord::decode(&bytes) {
            Ok(r) if r.uuid != *uuid => bad("belongs to another volume"),
            Ok(r) if r.transaction % 2 != slot as u64 => bad("lies in the other's slot"),
            judged => judged,
        })
    };
    Ok([read(0)?, read(1)?])
}

/// Empties a slot that holds half a root record, before anything else is written. Its transaction never was;
/// the next one has the same slot, and often parts of the same bytes: torn by a second crash, a write of it
/// could complete the record that never was, whose pages are in use for something else by then.
pub fn drop_half_roots(media: &dyn Media, uuid: &[u8; 16]) -> Result<(), MediaError> {
    for (slot, root) in read_roots(media, uuid)?.into_iter().enumerate() {
        let mut bytes = [0; ROOT_BYTES];
        media.read(Segment::Super, ROOT_AT[slot], &mut bytes)?;
        if root.is_err() && bytes != [0; ROOT_BYTES] && !planted(Bug::HalfRootKept) {
            media.write(Segment::Super, ROOT_AT[slot], &[0; ROOT_BYTES])?;
            media.persist(Segment::Super, ROOT_AT[slot], ROOT_BYTES as u64)?;
            media.fence()?;
        }
    }
    Ok(())
}

/// Pages that the tree of a volume of that capacity may have.
const fn tree_pages(capacity_blocks: u64) -> u64 {
    capacity_blocks / 4 + 4096
}

/// Bytes that the tree and the data of a volume of that capacity take when it is full.
pub const fn bytes_when_full(capacity_bytes: u64) -> u64 {
    let blocks = capacity_bytes / BLOCK_BYTES;
    // Checksums take a block for 512, and one more where an arena begins or ends in the middle of those.
    let sums = (blocks / SUMS_A_BLOCK).saturating_mul(2).saturating_add(64);
    blocks.saturating_add(tree_pages(blocks)).saturating_add(sums).saturating_mul(BLOCK_BYTES)
}

impl Volume {
    /// Makes an empty volume: superblock, root directory, the first two arenas, root record.
    pub fn format(media: Arc<dyn Media>, params: &Params) -> Result<Self, Fault> {
        Self::format_with(media, params, &[])
    }

    /// The same; these arenas are there. (Whoever has one mapped finds in it what is for its class, and nothing else.)
    pub fn format_with(
        media: Arc<dyn Media>,
        params: &Params,
        arenas: &[(u32, ReadClass)],
    ) -> Result<Self, Fault> {
        let bad = |what| {
            let corrupt = Corrupt::new("volume parameters", what);
            Fault::Item { ino: 0, corrupt }
        };
        if params.name.is_empty() || params.name.len() > 64 {
            return Err(bad("have a name that is empty or longer than 64 bytes"));
        }
        let capacity_blocks = params.capacity_bytes / BLOCK_BYTES;
        if !(16..=1 << 40).contains(&capacity_blocks) {
            return Err(bad("have a capacity under 64 KiB or beyond the limit"));
        }
        let superblock = Superblock {
            uuid: params.uuid,
            created: params.time,
            capacity_blocks,
            node: params.node,
            durability: params.durability,
            name: params.name.clone(),
            tree_pages: tree_pages(capacity_blocks),
            stream_bytes: params.stream_bytes,
            sums: true,
        };
        media.ensure(Segment::Super, SUPER_BYTES)?;
        media.ensure(Segment::Tree, superblock.tree_pages * BLOCK_BYTES)?;
        let bytes = superblock.encode();
        for at in SUPERBLOCK_AT {
            media.write(Segment::Super, at, &bytes)?;
            media.persist(Segment::Super, at, bytes.len() as u64)?;
        }
        for at in ROOT_AT {
            media.write(Segment::Super, at, &[0; ROOT_BYTES])?;
            media.persist(Segment::Super, at, ROOT_BYTES as u64)?;
        }
        media.fence()?;
        let tree = Tree::new(media.clone(), superblock.tree_pages, CACHE_PAGES)?;
        let root = RootRecord { uuid: params.uuid, ..Default::default() };
        let mut volume = Self::with(media, tree, superblock, root);
        for (number, class) in arenas {
            volume.add_arena(*number, *class)?;
        }
        volume.make_root(params)?;
        let sealed = volume.seal(StreamSeq(0), Epoch(0), &[])?;
        volume.publish(sealed)?;
        Ok(volume)
    }

    fn make_root(&mut self, params: &Params) -> Result<(), Fault> {
        if self.space.arenas().next().is_none() {
            self.add_arena(ARENA_WORLD, ReadClass::World)?;
            self.add_arena(ARENA_SERVICE, ReadClass::Service)?;
        }
        let now = Stamp::from_nanos(params.time);
        let inode = Inode {
            mode: item::S_IFDIR | (params.mode & 0o7777),
            nlink: 2,
            uid: params.uid,
            gid: params.gid,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            parent: InodeId::ROOT,
            ..Default::default()
        };
        self.put_inode(InodeId::ROOT, &inode)?;
        self.account_inode(&inode, true);
        (self.inodes, self.last_inode, self.time) = (1, 1, params.time);
        Ok(())
    }

    fn with(media: Arc<dyn Media>, tree: Tree, superblock: Superblock, root: RootRecord) -> Self {
        Self {
            media,
            tree,
            space: Space::new(superblock.capacity_blocks),
            superblock,
            root,
            copies: Vec::new(),
            copied_before: publish::CopiedBefore::First(0),
            inodes: 0,
            last_inode: root.last_inode,
            time: root.time,
            shares: share::Shares::default(),
            condemned: Cell::new(false),
            accounts: quota::Accounts::default(),
            unplaced: 0,
            moved: parts::Moved::default(),
            rearranged: since::Rearranged::after(root.transaction),
            snapshots: snapshots::Snapshots::default(),
        }
    }

    /// Opens the newest published state. Walks the whole tree: checks every page, and rebuilds
    /// which pages and blocks are free.
    pub fn open(media: Arc<dyn Media>) -> Result<Self, Fault> {
        let [a, b] = read_superblocks(&*media)?;
        let superblock = match (a, b) {
            // Of an upgrade that was interrupted: all blocks have their checksums.
            (Ok(a), Ok(b)) if is_half_upgraded(&a, &b) => {
                if a.sums {
                    a
                } else {
                    b
                }
            }
            (Ok(a), Ok(b)) if a != b => {
                let what = Corrupt::new("superblock", "has two copies that differ");
                return Err(corrupt(InodeId::NONE)(what));
            }
            (a, b) => a.or(b).map_err(corrupt(InodeId::NONE))?,
        };
        if superblock.tree_pages > media.size(Segment::Tree)? / BLOCK_BYTES {
            let what = Corrupt::new("superblock", "gives more tree pages than the region has");
            return Err(corrupt(InodeId::NONE)(what));
        }
        let slots = read_roots(&*media, &superblock.uuid)?;
        let Some(root) = newest_root(&slots) else {
            let [first, _] = slots;
            let none = Corrupt::new("root record", "is missing");
            return Err(corrupt(InodeId::NONE)(first.err().unwrap_or(none)));
        };
        let mut space = Space::new(superblock.capacity_blocks);
        let (mut found, mut bad) = (share::Found::default(), None);
        let (mut inodes, mut accounts) = (0, quota::Accounts::default());
        let (mut unplaced, mut snapshots) = (0, snapshots::Found::default());
        let level = u8::try_from(root.level).unwrap_or(u8::MAX);
        let mut tree = Tree::open(
            media.clone(),
            superblock.tree_pages,
            CACHE_PAGES,
            Root { page: root.page, level },
            root.transaction,
            &mut |key, value| {
                let ino = InodeId(key.ino);
                match key.kind {
                    kind::ATTR => {
                        inodes += 1;
                        accounts.found_inode(&Inode::decode(value).map_err(corrupt(ino))?);
                    }
                    kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT if key.ino == 0 => {
                        let kind = key.kind - kind::USER_ACCOUNT + 1;
                        let bad = Corrupt::new("account", "is of nobody");
                        let id = AccountId::from_parts(kind, key.item).ok_or(bad);
                        let item = AccountItem::decode(value).map_err(corrupt(ino))?;
                        accounts.found_account(id.map_err(corrupt(ino))?, &item);
                    }
                    kind::ARENA if key.ino == 0 => {
                        let class = ReadClass::decode(value).map_err(corrupt(ino))?;
                        space.add(u32::try_from(key.item).unwrap_or(u32::MAX), class);
                    }
                    kind::UNPLACED if key.ino == 0 => {
                        reach::decode(value).map_err(corrupt(InodeId(key.item)))?;
                        unplaced += 1;
                    }
                    kind::SNAPSHOT | kind::SNAPSHOT_ROOT if key.ino == 0 => {
                        snapshots.item(key, value).map_err(corrupt(ino))?;
                    }
                    kind::EXTENT => {
                        let run = Run::decode(key.item, value).map_err(corrupt(ino))?;
                        // Arenas and what is shared come first: their keys have inode 0.
                        if let Err(what) = found.run(&run, &mut space) {
                            bad.get_or_insert((ino, what));
                        }
                    }
                    kind::SHARED if key.ino == 0 => {
                        let shared = Shared::decode(key.item, value).map_err(corrupt(ino))?;
                        if let Err(what) = found.shared(shared, &mut space) {
                            bad.get_or_insert((ino, what));
                        }
                    }
                    _ => {}
                }
                Ok(())
            },
        )?;
        if let Some((ino, what)) = bad {
            return Err(corrupt(ino)(Corrupt::new("extent", what)));
        }
        let shares = found.end().map_err(corrupt(InodeId::NONE))?;
        let snapshots = snapshots.end(&root, &mut tree, &mut space)?;
        let mut volume = Self::with(media, tree, superblock, root);
        (volume.space, volume.inodes, volume.accounts) = (space, inodes, accounts);
        (volume.shares, volume.unplaced) = (shares, unplaced);
        volume.snapshots = snapshots;
        let arenas: Vec<u32> = volume.space.arenas().map(|(n, _)| n).collect();
        for arena in arenas {
            volume.ensure_arena(arena)?;
        }
        Ok(volume)
    }

    /// The published state as it is now; costs the same whatever it holds. Tree pages that the volume
    /// drops from now on are not reused while it lives, nor before something is published
    /// afterwards. With something unpublished, limits may be newer than the rest.
    pub fn view(&mut self) -> View {
        let level = u8::try_from(self.root.level).unwrap_or(u8::MAX);
        let root = Root { page: self.root.page, level };
        let (tree, pin) = self.tree.view(root, VIEW_CACHE_PAGES);
        let mut volume = Self::with(self.media.clone(), tree, self.superblock.clone(), self.root);
        volume.inodes = self.root.inodes;
        volume.accounts = self.accounts.limits_alone();
        volume.unplaced = volume.any_unplaced();
        View { volume, _pin: pin }
    }

    fn ensure_arena(&self, arena: u32) -> Result<(), Fault> {
        Ok(self.media.ensure(Segment::Arena(arena), self.superblock.arena_bytes())?)
    }

    /// Where the checksums of blocks begin in each arena; `None`: the volume has none.
    pub fn sums_base(&self) -> Option<u64> {
        self.superblock.sums_base()
    }

    fn add_arena(&mut self, number: u32, class: ReadClass) -> Result<(), Fault> {
        self.ensure_arena(number)?;
        self.tree.put(Key::new(0, kind::ARENA, u64::from(number)), &class.encode())?;
        self.space.add(number, class);
        Ok(())
    }

    /// Does one operation on the working state. `source` is where the entry's payload lies in
    /// the region: the data of a Write is copied from there when the copies are run.
    pub fn apply(&mut self, header: &Header, op: &Op<'_>, source: (Segment, u64)) -> Done {
        if self.condemned.get() {
            return Err(Fault::Condemned.into());
        }
        let done = self.dispatch(header, op, source);
        match &done {
            Ok(_) => self.time = self.time.max(header.time),
            Err(Refusal::Fault(_)) => self.condemned.set(true),
            Err(_) => {}
        }
        done
    }

    fn dispatch(&mut self, header: &Header, op: &Op<'_>, source: (Segment, u64)) -> Done {
        let now = Stamp::from_nanos(header.time);
        match op {
            // The only way to give pages back where snapshots have them all: it finds some.
            Op::DropSnapshot { .. } => {}
            _ => self.room_in_tree(op.facts().frees_space)?,
        }
        match *op {
            Op::Pad => Ok(Applied::default()),
            Op::Create { .. } => self.create(op, now),
            Op::Link { ino, parent, name } => self.link(ino, parent, name, now),
            Op::Unlink { ino, parent, name, .. } => self.unlink(ino, parent, name, now),
            Op::Rmdir { ino, parent, name, .. } => self.rmdir(ino, parent, name, now),
            Op::Rename { .. } => self.rename(op, now),
            Op::Write { ino, offset, data, clear_setid } => {
                self.write(ino, offset, data.len() as u64, clear_setid, now, source)
            }
            Op::Truncate { ino, size, clear_setid } => self.truncate(ino, size, clear_setid, now),
            Op::Fallocate { ino, offset, len, mode } => self.fallocate(ino, offset, len, mode, now),
            Op::SetAttr { .. } => self.set_attr(op, now),
            Op::SetXattr { ino, name, value } if acl::is_acl(name) => {
                self.set_acl(ino, name, value, now)
            }
            Op::RemoveXattr { ino, name } if acl::is_acl(name) => self.set_acl(ino, name, &[], now),
            Op::SetXattr { ino, name, value } => self.set_xattr(ino, name, value, now),
            Op::RemoveXattr { ino, name } => self.remove_xattr(ino, name, now),
            Op::CloneRange { ino, .. } => {
                self.rearranged.note(ino, self.tree.working(), since::REARRANGED_MAX);
                self.clone_range(op, now)
            }
            Op::Reap { ino } => self.reap(ino),
            Op::Tmpfile { .. } => self.tmpfile(op, now),
            Op::SetQuota { user: Some(uid), limit, .. } => {
                self.set_quota(AccountId::User(uid), limit)
            }
            Op::SetQuota { ino, limit, .. } => self.set_quota(AccountId::Directory(ino), limit),
            Op::Shift { ino, .. } => {
                self.rearranged.note(ino, self.tree.working(), since::REARRANGED_MAX);
                self.shift(op, now)
            }
            Op::Move { ino, from, to, out } => self.move_part(ino, (from, to), out),
            Op::SetProject { ino, project } => self.set_project(ino, project, now),
            Op::Place { ino, reach, later } => self.place(ino, reach, later),
            Op::Snapshot { ino, name } => self.make_snapshot(ino, name, header.time),
            Op::DropSnapshot { name, .. } => self.drop_snapshot(name),
        }
    }

    /// Pages that publishing gives back, once views are gone.
    fn pages_in_waiting(&self) -> u64 {
        self.tree.pending_pages() + self.tree.viewed_pages()
    }

    /// Whether pages wait for the end of a view: who has published, and is told again to do so, ends
    /// the views first.
    pub fn views_hold_pages(&self) -> bool {
        self.tree.viewed_pages() > 0
    }

    /// Whether the tree has pages for an operation; those that give space back may use the last.
    fn room_in_tree(&self, gives_back: bool) -> Result<(), Refusal> {
        let reserve = if gives_back { 0 } else { self.superblock.tree_pages / PAGES_RESERVE_SHARE };
        // What is removed gives no page back as long as a snapshot has it.
        let reserve = reserve + if self.has_snapshots() { 2 * PAGES_PER_OP } else { 0 };
        let (free, pending) = (self.tree.free_pages(), self.pages_in_waiting());
        if free >= PAGES_PER_OP + reserve {
            Ok(())
        } else if free + pending >= PAGES_PER_OP + reserve {
            Err(Refusal::NeedsPublish)
        } else {
            Err(Refusal::NoSpace)
        }
    }

    fn inode(&self, ino: InodeId) -> Result<Option<Inode>, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        let found = self.tree.get_with(attr_key(ino), Inode::decode)?;
        found.transpose().map_err(corrupt(ino))
    }

    /// The attributes of an inode that must exist.
    fn need(&self, ino: InodeId) -> Result<Inode, Refusal> {
        self.inode(ino)?.ok_or(Refusal::NoEntry)
    }

    /// The attributes of a directory in which names can be made.
    fn need_dir(&self, ino: InodeId) -> Result<Inode, Refusal> {
        let inode = self.need(ino)?;
        if !inode.is_dir() {
            return Err(Refusal::NotDirectory);
        }
        if inode.nlink == 0 { Err(Refusal::NoEntry) } else { Ok(inode) }
    }

    fn put_inode(&mut self, ino: InodeId, inode: &Inode) -> Result<(), Fault> {
        self.tree.put(attr_key(ino), &inode.encode())
    }

    /// Attributes.
    pub fn attr(&self, ino: InodeId) -> Result<Option<InodeRecord>, Fault> {
        let Some(inode) = self.inode(ino)? else { return Ok(None) };
        let linkable = inode.nlink == 0 && self.is_linkable(ino)?;
        let acl = if inode.acl { self.acl(ino, acl::ACCESS)? } else { None };
        let default_acl = if inode.default_acl { self.acl(ino, acl::DEFAULT)? } else { None };
        let limited = inode.is_dir() && self.is_limited(&inode);
        Ok(Some(InodeRecord { linkable, acl, default_acl, limited, ..inode.record(ino) }))
    }

    /// Whether an inode without a name may be given one.
    fn is_linkable(&self, ino: InodeId) -> Result<bool, Fault> {
        let key = Key::new(0, kind::ORPHAN, ino.0);
        let found = self.tree.get_with(key, |value| value == item::orphan_value(true))?;
        Ok(found.unwrap_or(false))
    }

    /// Parent of a directory (the root's is itself); None for what is no directory.
    pub fn parent(&self, dir: InodeId) -> Result<Option<InodeId>, Fault> {
        Ok(self.inode(dir)?.filter(Inode::is_dir).map(|inode| inode.parent))
    }

    /// The inode of a name and the type bits of its mode. `.` and `..` are not names.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Option<(InodeId, u32)>, Fault> {
        Ok(self.find_name(dir, name)?.map(|found| (found.ino, found.kind)))
    }

    /// Shows up to `limit` names after `cookie` (0 begins, with `.` and `..`), until `each`
    /// returns false. Returns whether the end was reached. None: no directory.
    pub fn readdir(
        &self,
        dir: InodeId,
        cookie: u64,
        limit: usize,
        each: &mut dyn FnMut(&Name<'_>) -> bool,
    ) -> Result<Option<bool>, Fault> {
        let Some(inode) = self.inode(dir)?.filter(Inode::is_dir) else { return Ok(None) };
        let (mut left, kind_dir) = (limit, item::S_IFDIR);
        for (at, ino, name) in [(0, dir, &b"."[..]), (1, inode.parent, b"..")] {
            if cookie <= at {
                if left == 0
                    || !each(&Name { ino, kind: kind_dir, next: at + 1, proof: Proof::NONE, name })
                {
                    return Ok(Some(false));
                }
                left -= 1;
            }
        }
        let (mut end, mut failed) = (true, None);
        let from = Key::new(dir.0, kind::NAME, cookie.saturating_add(1));
        let to = Key::new(dir.0, kind::NAME, u64::MAX);
        self.tree.scan(from, to, &mut |key, value| {
            if left == 0 {
                end = false;
                return false;
            }
            left -= 1;
            match item::decode_name(value) {
                Ok((ino, kind, name)) => {
                    end = each(&Name { ino, kind, next: key.item, proof: Proof::NONE, name });
                    end
                }
                Err(e) => {
                    failed = Some(e);
                    false
                }
            }
        })?;
        failed.map_or(Ok(Some(end)), |e| Err(corrupt(dir)(e)))
    }

    /// Up to `max` extents of a file that end after `from_offset`, in order. One of which a part
    /// is shared counts as several.
    pub fn extents(
        &self,
        ino: InodeId,
        from_offset: u64,
        max: usize,
    ) -> Result<Vec<Extent>, Fault> {
        let from = from_offset / BLOCK_BYTES;
        let mut extents = Vec::new();
        for run in self.runs(ino, from, u64::MAX, max)? {
            for (part, shared) in self.parts(&run, from.max(run.file), run.end())? {
                if extents.len() == max {
                    return Ok(extents);
                }
                extents.push(Extent {
                    offset: part.file * BLOCK_BYTES,
                    len: part.len * BLOCK_BYTES,
                    arena: part.arena,
                    unwritten: part.unwritten,
                    shared,
                    arena_offset: part.block * BLOCK_BYTES,
                });
            }
        }
        Ok(extents)
    }

    /// Target of a symbolic link; empty for anything else.
    pub fn symlink(&self, ino: InodeId) -> Result<Vec<u8>, Fault> {
        let mut target = Vec::new();
        let (from, to) = (Key::new(ino.0, kind::TARGET, 0), Key::new(ino.0, kind::TARGET, 64));
        self.tree.scan(from, to, &mut |_, piece| {
            target.extend_from_slice(piece);
            true
        })?;
        Ok(target)
    }

    /// Class of an arena.
    pub fn arena_class(&self, arena: u32) -> Option<ReadClass> {
        self.space.class(arena)
    }

    /// Arenas with their classes.
    pub fn arenas(&self) -> Vec<(u32, ReadClass)> {
        self.space.arenas().collect()
    }

    /// Space and inode counts.
    pub fn statfs(&self) -> VolumeStat {
        let room = self.tree.free_pages() + self.pages_in_waiting();
        let reserve = self.superblock.tree_pages / PAGES_RESERVE_SHARE + PAGES_PER_OP;
        VolumeStat {
            blocks: self.space.capacity(),
            blocks_free: self.blocks_free(),
            inodes: self.inodes,
            inodes_free: room.saturating_sub(reserve) * 8,
        }
    }

    /// Blocks that are free in the working state.
    pub fn blocks_free(&self) -> u64 {
        self.space.capacity() - self.space.live() - self.space.dead()
    }

    /// Whether the tree has pages for many operations more.
    pub fn has_pages(&self) -> bool {
        let reserve = self.superblock.tree_pages / PAGES_RESERVE_SHARE;
        self.tree.free_pages() + self.pages_in_waiting() >= 2 * reserve + 8 * PAGES_PER_OP
    }

    /// So many of the free blocks are promised to others than whose operations are applied from now on. Only where
    /// the order is made: what is in the stream holds everywhere.
    pub fn keep_free(&mut self, blocks: u64) {
        self.space.keep(blocks);
    }

    /// Inodes without a name that `Reap` has not freed yet.
    pub fn orphans(&self) -> Result<Vec<InodeId>, Fault> {
        let mut found = Vec::new();
        let (from, to) = (Key::new(0, kind::ORPHAN, 0), Key::new(0, kind::ORPHAN, u64::MAX));
        self.tree.scan(from, to, &mut |key, _| {
            found.push(InodeId(key.item));
            true
        })?;
        Ok(found)
    }

    /// The first of them after `after`.
    pub fn orphan_after(&self, after: InodeId) -> Result<Option<InodeId>, Fault> {
        let mut found = None;
        let from = Key::new(0, kind::ORPHAN, after.0.saturating_add(1));
        self.tree.scan(from, Key::new(0, kind::ORPHAN, u64::MAX), &mut |key, _| {
            found = Some(InodeId(key.item));
            false
        })?;
        Ok(found)
    }

    /// Last sequence of a client that is sealed (0: none).
    pub fn published(&self, client: ClientId) -> Result<Sequence, Fault> {
        let key = Key::new(0, kind::CLIENT, client.0);
        let bad = Corrupt::new("client", "has a sequence that nothing can have");
        let found = self.tree.get_with(key, |v| <[u8; 8]>::try_from(v).map(u64::from_le_bytes))?;
        match found {
            None => Ok(Sequence(0)),
            Some(Ok(seq)) if seq < Sequence::END.0 => Ok(Sequence(seq)),
            Some(_) => Err(corrupt(InodeId::NONE)(bad)),
        }
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The last root flipped: stream position, epoch, counts.
    pub fn root(&self) -> &RootRecord {
        &self.root
    }

    /// The region's memory.
    pub fn media(&self) -> &Arc<dyn Media> {
        &self.media
    }

    /// Highest inode number that was ever used.
    pub fn last_inode(&self) -> InodeId {
        InodeId(self.last_inode)
    }

    /// Numbers up to there were used elsewhere: what is copied from another node does not show those of what is gone.
    pub fn note_used(&mut self, last: InodeId) {
        self.last_inode = self.last_inode.max(last.0);
    }

    /// Whether publishing soon is advisable: free pages run low, much waits to be freed, or much
    /// is held in DRAM that only publishing lets go.
    pub fn wants_publish(&self) -> bool {
        let low = self.superblock.tree_pages / PAGES_RESERVE_SHARE + 8 * PAGES_PER_OP;
        self.tree.free_pages() < low
            || self.space.pending() * 8 > self.space.capacity()
            || self.tree.dirty_pages() > CACHE_PAGES / 2
            || self.copies.len() > COPIES_SOFT_MAX
            || self.shares.many_read()
    }

    /// Whether these operations, one after the other, may meet [`Refusal::NeedsPublish`]: asked by who does not want to be
    /// in the middle of them then. Says so too often rather than too seldom.
    pub fn may_have_to_wait<'a>(
        &self,
        ops: impl Iterator<Item = &'a Op<'a>>,
    ) -> Result<bool, Fault> {
        let (mut fresh, mut moved, mut count) = (0u64, 0u64, 0u64);
        let (mut gives_up, mut made) = (self.space.pending() > 0, false);
        let touched = |len: u64| len / BLOCK_BYTES + 2;
        for op in ops {
            count += 1;
            match *op {
                Op::Write { data, .. } => fresh = fresh.saturating_add(touched(data.len() as u64)),
                // What a file gives up here is to be had when that is published, also by those behind it.
                Op::Truncate { .. } => (fresh, gives_up) = (fresh.saturating_add(1), true),
                Op::Reap { .. } => gives_up = true,
                // It is read from the medium.
                Op::CloneRange { source, .. }
                    if source.of_snapshot().is_some() && made
                        || self.is_unpublished_snapshot(source) =>
                {
                    return Ok(true);
                }
                Op::Snapshot { .. } => made = true,
                Op::Fallocate { len, .. } | Op::CloneRange { len, .. } => {
                    (fresh, gives_up) = (fresh.saturating_add(touched(len)), true);
                }
                // All of it, if it changes its class; of a file that comes into being here that is what is written to it.
                Op::SetAttr { ino, .. }
                | Op::SetXattr { ino, .. }
                | Op::RemoveXattr { ino, .. }
                | Op::Place { ino, .. }
                | Op::Shift { ino, .. } => {
                    let there = self.inode(ino)?.map_or(0, |inode| inode.blocks);
                    moved = moved.saturating_add(there.saturating_add(fresh));
                }
                Op::Move { from, to, .. } => moved = moved.saturating_add(to.saturating_sub(from)),
                Op::DropSnapshot { .. } if self.tree.has_sealed() => return Ok(true),
                // What it alone had is free with the publication.
                Op::DropSnapshot { .. } => gives_up = true,
                _ => {}
            }
        }
        let blocks = fresh.saturating_add(moved);
        let taken = self.space.live() + self.space.pending() + self.space.dead();
        let addresses =
            (gives_up || moved > 0) && taken.saturating_add(blocks) > self.space.capacity();
        let reserve = self.superblock.tree_pages / PAGES_RESERVE_SHARE + PAGES_PER_OP;
        let pages = (4 * count).saturating_add(blocks / 16).min(self.superblock.tree_pages / 4);
        Ok(addresses || self.pages_in_waiting() > 0 && self.tree.free_pages() < reserve + pages)
    }

    /// Whether unpublished operations read blocks: overwriting these has to wait.
    pub fn has_read(&self) -> bool {
        self.shares.any_read()
    }

    /// The tree, for the checker and for measurements.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }
}
