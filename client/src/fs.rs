//! The contract between front ends (FUSE, virtio-fs, interception, C library) and file systems
//! (Corbel itself, and the back ends null, dir, ...). Inode-based, FUSE semantics, one structure
//! per operation with more than a few arguments.
//!
//! Rules for implementers:
//! - Every method may be called from any thread at any time; nothing blocks another inode's calls.
//! - A [`Handle`] comes from `open`/`create`, is good until `release`, and keeps an unlinked inode
//!   alive. There is no handle for directories: `readdir` works on the inode.
//! - Permission is checked against the [`Caller`] given: search on directories, read/write at
//!   `open`, ownership for attribute changes. `read`/`write` on a handle check only its access mode.
//! - An error leaves the file system as it was.
//! - Time stamps, set-id clearing and sticky rules are the implementation's task, as on a local
//!   Linux file system.

#[cfg(feature = "std")]
use alloc::vec;
use alloc::vec::Vec;

use base::{Errno, InodeId};
#[cfg(feature = "std")]
use rustix::io::{IoSlice, IoSliceMut};

pub use storage::acl::is_acl;
pub use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};
pub use storage::format::page::Key;
use storage::format::rpc::InodeRecord;
use storage::format::rpc::LOCK_LEAVING;
pub use storage::format::rpc::{
    Account, AccountId, Amount, Difference, Differences, SnapshotRecord,
};
pub use storage::limits::NAME_MAX;
pub use storage::locks::FileLocks;
use storage::permission::Creds;

/// Result of every operation.
pub type Result<T> = core::result::Result<T, Errno>;

/// A name as it may be asked for; `.` and `..` are such.
///
/// # Errors
/// ENAMETOOLONG; EINVAL where it is empty, or has a slash or a zero byte in it.
pub fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// A name that something shall be made under or taken from: `.` and `..`, which are `dots`, would lead out.
///
/// # Errors
/// `dots`, and those of [`check_name`].
pub fn check_own_name(name: &[u8], dots: Errno) -> Result<()> {
    check_name(name)?;
    if matches!(name, b"." | b"..") { Err(dots) } else { Ok(()) }
}

/// On whose behalf an operation is done.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// Effective (file system) user.
    pub uid: u32,
    /// Effective (file system) group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'a [u32],
    /// Process, for logs and locks.
    pub pid: u32,
    /// Permission bits that what it makes shall not have, unless the directory has a default access
    /// list. A file system that does not [keep lists](FileSystem::keeps_acls) does not look at it:
    /// it gets modes from which these bits are gone.
    pub umask: u32,
}

impl Caller<'_> {
    /// The super-user.
    pub const ROOT: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[], pid: 0, umask: 0 };

    /// Whether the caller is in group `gid`.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// Seconds and nanoseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub sec: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nsec: u32,
}

/// Attributes of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attr {
    /// Inode number; the same through every front end.
    pub ino: InodeId,
    /// `S_IFMT` type bits and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device of a special file, in the kernel's 32-bit `new_encode_dev` form; else 0.
    pub rdev: u32,
    /// Size in bytes.
    pub size: u64,
    /// Space allocated, in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of content.
    pub mtime: Time,
    /// Last change of attributes.
    pub ctime: Time,
    /// Birth.
    pub btime: Time,
    /// Grows whenever the file system learns of the inode what others may have changed: between two answers
    /// with the same number, all changes were made through this file system. 0 for what was made here;
    /// [`LEARNT_ELSEWHERE`] if nothing is known of that.
    pub learnt: u64,
}

/// See [`Attr::learnt`].
pub const LEARNT_ELSEWHERE: u64 = u64::MAX;

/// Type bits of a mode.
pub const S_IFMT: u32 = 0o170_000;
/// Directory.
pub const S_IFDIR: u32 = 0o040_000;
/// Regular file.
pub const S_IFREG: u32 = 0o100_000;
/// Symbolic link.
pub const S_IFLNK: u32 = 0o120_000;
/// Block device.
pub const S_IFBLK: u32 = 0o060_000;
/// Character device.
pub const S_IFCHR: u32 = 0o020_000;
/// FIFO.
pub const S_IFIFO: u32 = 0o010_000;
/// Socket.
pub const S_IFSOCK: u32 = 0o140_000;

impl Attr {
    /// `mode` cut to its type bits.
    pub fn kind(&self) -> u32 {
        self.mode & S_IFMT
    }

    /// Whether this is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == S_IFDIR
    }
}

/// A time in a [`SetAttr`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// The time of the operation.
    Now,
    /// A given time (needs ownership).
    At(Time),
}

/// What `setattr` shall change; `None` leaves a field alone.
#[derive(Clone, Copy, Default, Debug)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Truncate or extend to this size.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// The handle through which the size is set: then its access mode decides, not the mode bits.
    pub handle: Option<Handle>,
}

/// What `mknod` shall make.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// Type and permission bits; [`Caller::umask`] says whether the umask is applied.
    pub mode: u32,
    /// Device number of a special file, else 0.
    pub rdev: u32,
    /// Target of a symbolic link, else empty.
    pub target: &'a [u8],
}

/// Arguments of `rename`.
#[derive(Clone, Copy, Debug)]
pub struct Rename<'a> {
    /// Directory that has the old name.
    pub parent: InodeId,
    /// The old name.
    pub name: &'a [u8],
    /// Directory of the new name.
    pub new_parent: InodeId,
    /// The new name.
    pub new_name: &'a [u8],
    /// `RENAME_NOREPLACE` (1) or `RENAME_EXCHANGE` (2) or 0.
    pub flags: u32,
}

/// An open file of an implementation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(pub u64);

/// Open for reading (access mode, `O_ACCMODE`).
pub const O_RDONLY: u32 = 0;
/// Open for writing.
pub const O_WRONLY: u32 = 1;
/// Open for both.
pub const O_RDWR: u32 = 2;
/// Mask of the access mode.
pub const O_ACCMODE: u32 = 3;
/// Fail if `create` finds the name.
pub const O_EXCL: u32 = 0o200;
/// Cut to length 0 at open.
pub const O_TRUNC: u32 = 0o1000;
/// Of a directory.
pub const O_DIRECTORY: u32 = 0o200_000;
/// Every write goes to the end, atomically.
pub const O_APPEND: u32 = 0o2000;
/// A write returns when it is as durable as after `fdatasync`.
pub const O_DSYNC: u32 = 0o10000;

/// Where a write landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// Bytes written.
    pub len: usize,
    /// Offset of the first one (differs from the one asked when appending).
    pub offset: u64,
}

/// What `copy_range` and `clone_range` shall do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyRange {
    /// Open for reading.
    pub from: Handle,
    /// Where to read.
    pub from_offset: u64,
    /// Open for writing; it may be the same file.
    pub to: Handle,
    /// Where to write.
    pub to_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One name of a directory.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// Inode number.
    pub ino: InodeId,
    /// Type bits of the mode (`S_IFMT`).
    pub kind: u32,
    /// Cookie that continues *after* this entry; stable under change, valid on every node and in
    /// every process, never 0, below 2^63.
    pub next: u64,
    /// The name, 1 to 255 bytes, no `/`, no NUL. `.` and `..` are reported first, by cookie.
    pub name: &'a [u8],
}

/// Space and inode counts.
#[derive(Clone, Copy, Default, Debug)]
pub struct StatFs {
    /// Block size in bytes, unit of the counts.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks free.
    pub blocks_free: u64,
    /// Inodes in use plus free.
    pub inodes: u64,
    /// Inodes free.
    pub inodes_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
}

/// `lseek` forms that need the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whence {
    /// Next data at or after the offset.
    Data,
    /// Next hole at or after the offset (end of file counts).
    Hole,
}

/// Flags of `setxattr`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XattrMode {
    /// Create or replace.
    Set,
    /// Fail with EEXIST when it exists.
    Create,
    /// Fail with ENODATA when it does not.
    Replace,
}

/// `fallocate` mode bits as Linux defines them.
pub mod falloc {
    /// Do not change the size.
    pub const KEEP_SIZE: u32 = 1;
    /// Make a hole (with KEEP_SIZE).
    pub const PUNCH_HOLE: u32 = 2;
    /// Take whole blocks out: what follows moves down.
    pub const COLLAPSE_RANGE: u32 = 8;
    /// Make zeroes, allocated.
    pub const ZERO_RANGE: u32 = 16;
    /// Put a hole of whole blocks in: what follows moves up.
    pub const INSERT_RANGE: u32 = 32;
    /// Give blocks of its own to what shares them: as allocating, where nothing is shared.
    pub const UNSHARE_RANGE: u32 = 64;
}

/// What a front end with a cache of its own (a kernel's) offers to the file system, so that a
/// recalled lease empties that cache too. Calls return when the cache is empty, unless the front
/// end says otherwise; a file system must not make them while a request on that inode waits for
/// it.
pub trait Invalidate: Send + Sync {
    /// Drops attributes, and data from `offset` on (`len` 0: to the end; a negative offset: none).
    fn inode(&self, ino: InodeId, offset: i64, len: i64);
    /// Drops a name, or the knowledge that it does not exist.
    fn entry(&self, parent: InodeId, name: &[u8]);
    /// Puts data into the cache.
    fn store(&self, ino: InodeId, offset: u64, data: &[u8]);
}

/// What a kernel in front of a file system may cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caching {
    /// Nothing without asking: data goes when it is seen to have changed.
    Nothing,
    /// Attributes, until told; names for as long as [`FileSystem::name_cache_ms`] says. Data goes when the
    /// attributes are told to go and have changed then.
    Attributes,
    /// Attributes, names and data, until told.
    All,
}

/// Who waits for what takes long: reads, writes and syncs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiting {
    /// A thread for each.
    Each,
    /// One thread for all syncs: each makes durable what was written before it, by whomever, so that those behind it have
    /// little to wait for.
    Together,
    /// Nobody. They are begun ([`FileSystem::begin_read`], [`begin_write`](FileSystem::begin_write),
    /// [`begin_fsync`](FileSystem::begin_fsync)), and say when they have ended.
    Nobody,
}

/// Told how something ended that was begun: once, by any thread, perhaps before the call that began it returns. It does not wait.
pub type Ended<T> = alloc::boxed::Box<dyn FnOnce(Result<T>) + Send>;

/// Pieces in one.
#[cfg(feature = "std")]
pub fn gather(pieces: &[IoSlice<'_>]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(pieces.iter().map(|piece| piece.len()).sum());
    pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

/// A file system, as the front ends see it. The module text has the rules.
pub trait FileSystem: Send + Sync + 'static {
    /// Attributes of `name` in directory `parent` (search permission needed). `.` and `..` work.
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr>;
    /// The same for who is about to remove or replace what the name leads to: what that takes can be asked
    /// for at the same time.
    fn lookup_to_remove(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.lookup(caller, parent, name)
    }
    /// The same for a name on the way to another: what does not change what a path leads to (size, times, number of links)
    /// may be of a moment ago.
    fn lookup_through(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.lookup(caller, parent, name)
    }
    /// The same for who is about to make the name, and will be told if it is there: ENOENT may be a guess.
    fn lookup_to_make(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.lookup(caller, parent, name)
    }
    /// Attributes of an inode.
    fn getattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Attr>;
    /// Changes attributes; returns the new ones.
    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr>;
    /// Target of a symbolic link.
    fn readlink(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>>;
    /// Makes a file, directory, symbolic link or special file; EEXIST when the name is there.
    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr>;
    /// Removes a name that is not a directory.
    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()>;
    /// Removes an empty directory.
    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()>;
    /// Renames, atomically; over an existing name as POSIX says.
    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()>;
    /// Makes another name of `ino`; returns its attributes.
    fn link(&self, caller: &Caller<'_>, ino: InodeId, parent: InodeId, name: &[u8])
    -> Result<Attr>;
    /// Opens a regular file: access mode, `O_TRUNC`, `O_APPEND`, `O_DSYNC` of `flags` count.
    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle>;
    /// Keeps a directory, if the caller may do `what` with it ([`access`](Self::access); 0: whoever it is): somebody
    /// has it open or stands in it, so that it lives until the handle is released even if it is removed. The handle
    /// is good for nothing else. ENOSYS where nothing is done for that.
    fn open_dir(&self, _caller: &Caller<'_>, _ino: InodeId, _what: u32) -> Result<Handle> {
        Err(Errno::NOSYS)
    }
    /// Opens or makes and opens a regular file in one step (`O_EXCL` makes existence an error;
    /// a made file may be opened in any mode whatever its permission bits).
    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)>;
    /// Makes and opens a regular file without a name (`O_TMPFILE`) that belongs to a directory as
    /// one made in it would. `link` may give it its first name, unless `O_EXCL` is given; else it is
    /// gone once it is closed. EOPNOTSUPP where there is no such thing: programs then make a named
    /// one.
    fn tmpfile(
        &self,
        _caller: &Caller<'_>,
        _parent: InodeId,
        _mode: u32,
        _flags: u32,
    ) -> Result<(Attr, Handle)> {
        Err(Errno::OPNOTSUPP)
    }
    /// Reads at `offset`; less than asked only at the end of the file.
    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// Writes at `offset`, or at the end for an `O_APPEND` handle (or when `append` is given).
    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written>;
    /// [`read`](Self::read) into one piece after the other. The pieces may be memory that somebody else changes
    /// meanwhile (a guest's): nothing may be concluded from what is found in them. By default what is read goes
    /// through a buffer if there are several.
    #[cfg(feature = "std")]
    fn read_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        if let [piece] = pieces {
            return self.read(handle, offset, piece);
        }
        let mut buf = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
        let len = self.read(handle, offset, &mut buf)?.min(buf.len());
        let mut rest = &buf[..len];
        for piece in pieces {
            let (part, more) = rest.split_at(piece.len().min(rest.len()));
            piece[..part.len()].copy_from_slice(part);
            rest = more;
        }
        Ok(len)
    }
    /// [`write`](Self::write) of one piece after the other, at one place. The pieces may be memory that somebody
    /// else changes meanwhile: by default they are copied before anything is made of them.
    #[cfg(feature = "std")]
    fn write_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &[IoSlice<'_>],
        append: bool,
    ) -> Result<Written> {
        self.write(handle, offset, &gather(pieces), append)
    }
    /// Writes back what was stored in a shared mapping. As with Linux's own file systems, which do not see the
    /// store, no privileges of the file end by that.
    fn write_back(&self, handle: Handle, offset: u64, data: &[u8]) -> Result<Written> {
        self.write(handle, offset, data, false)
    }
    /// Allocates, punches or zeroes; mode bits in [`falloc`].
    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()>;
    /// Copies bytes between two open files of this file system without carrying them through the
    /// caller, and says how many; less than asked at the end of the source, or when it was much.
    /// EOPNOTSUPP: the caller does better to read and write.
    fn copy_range(&self, _copy: &CopyRange) -> Result<u64> {
        Err(Errno::OPNOTSUPP)
    }
    /// FICLONERANGE: makes a range of a file what that range of the other is, all of it or (with an
    /// error) some of it. Offsets are multiples of a block, and the length (0: to the end) too unless
    /// it reaches the end of the source.
    fn clone_range(&self, _copy: &CopyRange) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
    /// Finds data or holes.
    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64>;
    /// Attributes through a handle.
    fn fgetattr(&self, handle: Handle) -> Result<Attr>;
    /// How front ends that serve many requests at once best wait for this file system.
    fn waiting(&self) -> Waiting {
        Waiting::Each
    }
    /// Begins a [`read`](Self::read) of `len` bytes at most. Of a file system that is not [`Waiting::Nobody`] it has ended
    /// when the call returns; so of the next ones.
    fn begin_read(&self, handle: Handle, offset: u64, len: usize, ended: Ended<Vec<u8>>) {
        let mut bytes = alloc::vec![0; len];
        let read = self.read(handle, offset, &mut bytes);
        ended(read.map(|len| {
            bytes.truncate(len);
            bytes
        }));
    }
    /// Begins a [`write`](Self::write).
    fn begin_write(
        &self,
        handle: Handle,
        offset: u64,
        data: Vec<u8>,
        append: bool,
        ended: Ended<Written>,
    ) {
        ended(self.write(handle, offset, &data, append));
    }
    /// Begins an [`fsync`](Self::fsync).
    fn begin_fsync(&self, handle: Handle, data_only: bool, ended: Ended<()>) {
        ended(self.fsync(handle, data_only));
    }
    /// The file is likely to be synced next: what that takes may be begun. Never waits, and promises nothing.
    fn expect_fsync(&self, _handle: Handle) {}
    /// Begins an [`fsync_inode`](Self::fsync_inode).
    fn begin_fsync_inode(&self, caller: &Caller<'_>, ino: InodeId, ended: Ended<()>) {
        ended(self.fsync_inode(caller, ino));
    }
    /// Returns when what was written to the inode before (and the names it needs) is durable.
    fn fsync(&self, handle: Handle, data_only: bool) -> Result<()>;
    /// The same for a directory, or, with the root, for everything that the caller did.
    fn fsync_inode(&self, caller: &Caller<'_>, ino: InodeId) -> Result<()>;
    /// Makes everything that the caller did durable, and says what of all that was done through this file system was refused since a session began:
    /// the session's number, how many operations, and why the last one was. Whoever does many operations and looks once finds out so that one
    /// had no space; in another session the count begins anew.
    ///
    /// # Errors
    /// EIO: something was lost with a session.
    fn refused(&self) -> Result<(u64, u64, Errno)> {
        self.fsync_inode(&Caller::ROOT, InodeId::ROOT).map(|()| (0, 0, Errno(0)))
    }
    /// A descriptor of the open file is being closed: reports what is known by now to have gone wrong
    /// with what was written through it. Never waits.
    fn flush(&self, _handle: Handle) -> Result<()> {
        Ok(())
    }
    /// Gives a handle back.
    fn release(&self, handle: Handle);
    /// Reports the entries after `cookie` (0 begins) until `each` returns false or the end.
    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()>;
    /// Space.
    fn statfs(&self) -> Result<StatFs>;
    /// Space for what lies at an inode: where a directory's quota counts it, no more than that leaves.
    fn statfs_of(&self, _ino: InodeId) -> Result<StatFs> {
        self.statfs()
    }
    /// What users and directories take and may take: of users those that the caller may see.
    fn accounts(&self, _caller: &Caller<'_>) -> Result<Vec<Account>> {
        Err(Errno::OPNOTSUPP)
    }
    /// Sets the limits of an account (for the super-user). Of a directory they bound the inodes whose
    /// [project](Self::project) it is.
    fn set_quota(&self, _caller: &Caller<'_>, _account: AccountId, _limit: Amount) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
    /// Lets the quota of a directory count an inode, and what is made in it from now on; 0: none.
    fn set_project(&self, _caller: &Caller<'_>, _ino: InodeId, _project: InodeId) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
    /// The directory whose quota counts an inode, or 0.
    fn project(&self, _caller: &Caller<'_>, _ino: InodeId) -> Result<InodeId> {
        Err(Errno::OPNOTSUPP)
    }
    /// Snapshots of the volume with a higher number than that, from the oldest on: some of them, or none if there are no more.
    /// What is in one is asked for as of any other directory, from
    /// [`snapshot`](Self::snapshot) on; whatever would change it is EROFS.
    fn snapshots(&self, _after: u64) -> Result<Vec<SnapshotRecord>> {
        Err(Errno::OPNOTSUPP)
    }
    /// The directory that a snapshot shows, as it is there: an inode with a number of its own. EACCES if the directories above it
    /// did not let the caller come so far then.
    fn snapshot(&self, _caller: &Caller<'_>, name: &[u8]) -> Result<InodeId> {
        let mut after = 0;
        loop {
            let some = self.snapshots(after)?;
            after = some.last().ok_or(Errno::NOENT)?.number;
            if let Some(found) = some.iter().find(|one| one.name == name) {
                return Ok(found.dir.in_snapshot(found.slot));
            }
        }
    }
    /// Keeps all that is below a directory as it is now under a name (for the super-user). EEXIST if the name is taken.
    fn make_snapshot(&self, _caller: &Caller<'_>, _dir: InodeId, _name: &[u8]) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
    /// What the snapshot with a number has otherwise than the earlier one `before` (0: than an empty volume), from a key on (at first
    /// [`Key::MIN`]), in the order of inodes, and where to go on, if that was not all; for the super-user. ENOENT: one of them is
    /// not there.
    fn differences(&self, _before: u64, _number: u64, _from: Key) -> Result<Differences> {
        Err(Errno::OPNOTSUPP)
    }
    /// Gives a snapshot up (for the super-user).
    fn drop_snapshot(&self, _caller: &Caller<'_>, _name: &[u8]) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
    /// Whether an inode is one of a snapshot: it never changes, and is gone when that is.
    fn is_of_snapshot(&self, _ino: InodeId) -> bool {
        false
    }
    /// Value of an extended attribute; ENODATA when there is none.
    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>>;
    /// Names of the extended attributes, each ended by NUL.
    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>>;
    /// Sets an extended attribute.
    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()>;
    /// Removes an extended attribute.
    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()>;
    /// Whether extended attributes of the names `system.posix_acl_*` are access control lists that
    /// the file system goes by, inherits, and keeps in step with the mode.
    fn keeps_acls(&self) -> bool {
        false
    }
    /// Whether the caller may read (4), write (2), execute or search (1).
    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        let Attr { mode, uid, gid, .. } = self.getattr(caller, ino)?;
        let record = InodeRecord { mode, uid, gid, ..InodeRecord::default() };
        let Caller { uid, gid, groups, .. } = *caller;
        Creds { uid, gid, groups }.may(&record, what)
    }
    /// Whether the file system keeps locks itself, so that they hold for everybody who uses it. If
    /// not, a kernel in front of it keeps those of its own processes, and the calls below fail.
    fn keeps_locks(&self) -> bool {
        false
    }
    /// Locks or unlocks (kind `None`) a range of an open file, without waiting: EAGAIN when another
    /// owner's lock bars it. With `wait` not 0 the caller then waits, under that number of its own:
    /// it asks again when [`await_lock_event`](Self::await_lock_event) returns, or calls
    /// [`cancel_lock`](Self::cancel_lock). EDEADLK when that would be for ever.
    fn lock(&self, _ino: InodeId, _lock: &Lock, _wait: u64) -> Result<()> {
        Err(Errno::NOSYS)
    }
    /// A lock that bars this one; its `pid` is 0 when its holder is on another machine.
    fn test_lock(&self, _ino: InodeId, _lock: &Lock) -> Result<Option<Lock>> {
        Err(Errno::NOSYS)
    }
    /// No longer waits.
    fn cancel_lock(&self, _ino: InodeId, _wait: u64) {}
    /// A descriptor through which somebody may have a lock on the file is being closed, perhaps the last one of its open
    /// file, whose locks are then given up in a moment: no other client is told meanwhile that they bar it.
    fn leaves_locks(&self, ino: InodeId) {
        self.cancel_lock(ino, LOCK_LEAVING);
    }
    /// Changes when a lock that somebody waits for may have become free. To be called at least
    /// every second while locks are held: a file system that lost its connection gets them back.
    fn lock_event(&self) -> Result<u64> {
        Err(Errno::NOSYS)
    }
    /// Returns when `lock_event` is no longer what was seen, or after the time limit.
    fn await_lock_event(&self, _seen: u64, _limit_ms: u64) {}
    /// Takes over what was locked through this file system by a process that has ended, of which this one can show that it is the heir:
    /// nobody else gets it in between. Which locks these are the caller knows, and asks for each of them, and then says so by
    /// [`leave`](Self::leave). Nothing where there is no such thing. `secret`: what shows it, if that is not what this process was started with.
    fn inherit(&self, _secret: Option<u128>) -> Result<()> {
        Ok(())
    }
    /// Who shows that secret ([`inherit`](Self::inherit)), on any machine, gets from now on what was locked through this file system, although this
    /// process goes on: its guest moves. What was locked is not remembered here any more, and nothing may be locked until it is `None` again,
    /// and what is locked still has been asked for anew. `false`: there is no such thing, and who moves has to give its locks up before.
    fn leave(&self, _secret: Option<u128>) -> Result<bool> {
        Ok(false)
    }
    /// What shows that this process came to the inode by a name: to be handed to another process of the
    /// same machine together with the number, and given to [`vouch`](Self::vouch) there. 0: nothing
    /// is needed.
    fn proof(&self, _ino: InodeId) -> u64 {
        0
    }
    /// The proof of an inode in any case, also where nothing is needed: what a process shows to a
    /// mount, and what the mount compares it with.
    fn prove(&self, _ino: InodeId) -> Result<u64> {
        Err(Errno::NOSYS)
    }
    /// The process is about to have a child that shares its memory and not its descriptors, and can therefore begin no session.
    fn before_vfork(&self) {}
    /// See [`proof`](Self::proof).
    fn vouch(&self, _ino: InodeId, _proof: u64) {}
    /// The user who began the session that there is now, if a service judges by that, whoever the process is by now: a
    /// session may end, and another begin.
    fn begun_by(&self) -> Option<u32> {
        None
    }
    /// Hint: the front end dropped its last reference to an inode, so what is cached to find it
    /// may go. Unless it is `told` of again: that may have happened before this is called. To be asked with what goes
    /// locked: whoever tells notes that first, and asks [`keeps`](Self::keeps) then, so either it is heard here, or what has
    /// gone is missed there. `told` takes a lock of the front end's, under which it calls nothing of the file system.
    fn forget(&self, _ino: InodeId, _told: &dyn Fn() -> bool) {}
    /// Whether an inode that the front end is about to tell of, and has noted as told, is found by its number, until it is
    /// forgotten. If not, that has happened since it was looked up, which must be done again. Waits for nobody.
    fn keeps(&self, _ino: InodeId) -> bool {
        true
    }
    /// Whether a kernel may cache attributes and names of an inode until it is told otherwise
    /// through the front end's notifier. Without that promise it asks each time.
    fn may_cache(&self, _ino: InodeId) -> bool {
        false
    }
    /// Whether a kernel may have pages of files that are open. If not, they are opened past them: each read and write is asked for.
    fn has_pages(&self) -> bool {
        true
    }
    /// What it promises to invalidate. Asked once.
    fn caching(&self) -> Caching {
        if self.may_cache(InodeId::ROOT) { Caching::All } else { Caching::Nothing }
    }
    /// Whether a kernel may cache just these attributes until it is told otherwise.
    fn may_cache_attr(&self, attr: &Attr) -> bool {
        self.may_cache(attr.ino)
    }
    /// The same for an inode that the kernel does not know yet.
    fn may_cache_new_attr(&self, attr: &Attr) -> bool {
        self.may_cache_attr(attr)
    }
    /// For how many milliseconds a kernel may use a name, or the knowledge that there is none, without asking;
    /// `None`: until it is told otherwise. A kernel that looks at the attributes of a directory whenever it
    /// uses a name in it must be made to wait by [`await_names`](Self::await_names).
    fn name_cache_ms(&self, dir: InodeId, _name: &[u8], _leads_to: Option<InodeId>) -> Option<u32> {
        if self.may_cache(dir) { None } else { Some(0) }
    }
    /// Returns when no name in the directory counts any more that was told before something there changed.
    fn await_names(&self, _dir: InodeId) {}
    /// Whether `may_cache_attr` said so of the inode, and a kernel was not told otherwise since.
    fn has_cached(&self, ino: InodeId) -> bool {
        self.may_cache(ino)
    }
    /// Tells the front end's cache what it may keep no more, as soon as it is so, and returns after a
    /// while: to be called again and again by a thread of the front end, until it goes down.
    fn await_recalls(&self) {}
    /// A front end with a cache has come up. Calls after it has gone down do nothing.
    fn attach(&self, _cache: alloc::sync::Arc<dyn Invalidate>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_judged() {
        let long = [b'x'; NAME_MAX + 1];
        for good in [&b"a"[..], b"..a", b"\xff\n", &long[1..]] {
            assert_eq!((check_name(good), check_own_name(good, Errno::BUSY)), (Ok(()), Ok(())));
        }
        for dots in [&b"."[..], b".."] {
            let own = check_own_name(dots, Errno::BUSY);
            assert_eq!((check_name(dots), own), (Ok(()), Err(Errno::BUSY)));
        }
        for (bad, error) in [
            (&b""[..], Errno::INVAL),
            (b"a/b", Errno::INVAL),
            (b"a\0", Errno::INVAL),
            (&long, Errno::NAMETOOLONG),
        ] {
            let own = check_own_name(bad, Errno::BUSY);
            assert_eq!((check_name(bad), own), (Err(error), Err(error)));
        }
    }
}
