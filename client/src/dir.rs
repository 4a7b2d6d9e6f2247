//! The `dir` back end: a backing directory of the local machine served as a [`FileSystem`].
//!
//! Every operation is the same operation on the backing file system, by inode: nothing is cached
//! but descriptors, so changes made beside it are seen at once.
//!
//! - *Inode numbers* are the backing file system's, except that its root directory is 1 and, to
//!   keep the mapping one to one, a backing inode 1 that is not the root has the root's number.
//! - *One file system*: a name that leads to another one (a mount point inside) is EXDEV.
//! - *Finding an inode by number*: its `O_PATH` descriptor if it is held (up to
//!   [`Options::nodes_max`], at numbers from [`Options::fd_min`] on), else its last known parent
//!   and name, verified by number, else a walk of the tree (slow, bounded); then ESTALE.
//! - *Identity*: with [`Options::impersonate`] (a root server for many users) each operation runs
//!   as its caller, so that the backing file system checks permission and owns new files; without
//!   it (inside the application's own process) the process is the caller.
//! - `/proc` must be mounted: descriptors are reopened through `/proc/self/fd`.

mod identity;
mod table;

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::mem::MaybeUninit;

use base::{Errno, InodeId};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{
    self as sys, AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags,
    SeekFrom, Statx, StatxFlags, Timespec, Timestamps, Uid, XattrFlags,
};
#[cfg(feature = "std")]
use rustix::io::IoSliceMut;
use rustix::io::{self, IoSlice, ReadWriteFlags};

#[cfg(feature = "std")]
use crate::fs::gather;
use crate::fs::{
    Attr, Caller, DirEntry, FileSystem, Handle, NAME_MAX, NewNode, O_ACCMODE, O_APPEND, O_DSYNC,
    O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY, Rename, Result, S_IFBLK, S_IFCHR, S_IFDIR,
    S_IFLNK, S_IFMT, S_IFREG, SetAttr, SetTime, StatFs, Time, Whence, Written, XattrMode,
    check_name, check_own_name,
};
use crate::kept::{Kept, Watch};
use crate::mutex::Mutex;
use identity::Identity;
use table::{Node, Open, Table};

/// Longest extended attribute value and name list (XATTR_SIZE_MAX, XATTR_LIST_MAX).
const XATTR_MAX: usize = 65_536;
/// Bytes asked of getdents64 at once: a few hundred entries.
const DENTS_BYTES: usize = 16 * 1024;
/// Parents reopened from hints on the way to one inode before the tree is searched instead.
const REOPEN_DEPTH_MAX: u32 = 64;
/// Directory entries looked at when an inode is searched by number; a second or two.
const SEARCH_ENTRIES_MAX: u32 = 1 << 20;
/// Pieces of memory that one system call takes.
#[cfg(feature = "std")]
const IOV_MAX: usize = 1024;
/// Times that open-or-create follows a name that appears and vanishes under it.
const CREATE_TRIES: u32 = 16;

/// How a [`DirFs`] is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Lowest number for descriptors that stay open, out of the way of a host process.
    pub fd_min: RawFd,
    /// Inode descriptors kept open at most (files that are open come on top).
    pub nodes_max: usize,
    /// Told of descriptors that stay open.
    pub watch: Option<Watch>,
    /// Run each operation as its caller. Needs root; the process's umask must be 0.
    pub impersonate: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { fd_min: 3, nodes_max: 4096, watch: None, impersonate: false }
    }
}

/// Called with number, type, next cookie and name of a backing entry; false stops.
type EachRaw<'a> = dyn FnMut(u64, FileType, u64, &[u8]) -> bool + 'a;

/// A backing directory as a file system. The module text has the rules.
#[derive(Debug)]
pub struct DirFs {
    root: Arc<Node>,
    device: (u32, u32),
    options: Options,
    table: Mutex<Table>,
}

fn errno(error: io::Errno) -> Errno {
    Errno(u16::try_from(error.raw_os_error()).unwrap_or(Errno::IO.0))
}

fn statx(fd: BorrowedFd<'_>) -> Result<Statx> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    sys::statx(fd, c"", AtFlags::EMPTY_PATH, mask).map_err(errno)
}

/// The kernel's `new_encode_dev`.
fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12)
}

/// And its inverse, as the `dev_t` that mknod takes.
fn decode_dev(dev: u32) -> sys::Dev {
    sys::makedev((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xf_ff00))
}

/// Path by which a descriptor's inode is opened again.
fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn kind_of(file_type: FileType) -> u32 {
    file_type.as_raw_mode() & S_IFMT
}

fn timespec(set: Option<SetTime>) -> Timespec {
    let (tv_sec, tv_nsec) = match set {
        None => (0, sys::UTIME_OMIT as _),
        Some(SetTime::Now) => (0, sys::UTIME_NOW as _),
        Some(SetTime::At(time)) => (time.sec, i64::from(time.nsec)),
    };
    Timespec { tv_sec, tv_nsec }
}

impl DirFs {
    /// Serves the directory `path`.
    pub fn open(path: &[u8], options: Options) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = sys::open(path, flags, Mode::empty()).map_err(errno)?;
        let fd = Kept::new(fd, options.fd_min, options.watch);
        let stat = statx(fd.as_fd())?;
        Ok(Self {
            root: Arc::new(Node { number: stat.stx_ino, kind: S_IFDIR, fd }),
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            options,
            table: Mutex::new(Table::default()),
        })
    }

    /// Backing number to inode number and back: the same swap both ways.
    fn swap_root(&self, number: u64) -> u64 {
        match number {
            1 => self.root.number,
            n if n == self.root.number => 1,
            n => n,
        }
    }

    fn attr(&self, stat: &Statx) -> Attr {
        let time = |t: &sys::StatxTimestamp| Time { sec: t.tv_sec, nsec: t.tv_nsec };
        Attr {
            ino: InodeId(self.swap_root(stat.stx_ino)),
            mode: u32::from(stat.stx_mode),
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: encode_dev(stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: time(&stat.stx_atime),
            mtime: time(&stat.stx_mtime),
            ctime: time(&stat.stx_ctime),
            btime: time(&stat.stx_btime),
            learnt: 0,
        }
    }

    fn attr_of(&self, fd: BorrowedFd<'_>) -> Result<Attr> {
        Ok(self.attr(&statx(fd)?))
    }

    /// Acts as `caller` until the result is dropped.
    fn become_caller(&self, caller: &Caller<'_>) -> Result<Option<Identity>> {
        if !self.options.impersonate || (caller.uid == 0 && caller.gid == 0) {
            return Ok(None);
        }
        Identity::take(caller).map(Some)
    }

    /// The node of an inode number. Runs as the server itself.
    fn node(&self, ino: InodeId) -> Result<Arc<Node>> {
        self.node_by_number(self.swap_root(ino.0), 0)
    }

    fn dir(&self, ino: InodeId) -> Result<Arc<Node>> {
        let node = self.node(ino)?;
        if node.kind == S_IFDIR { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    fn node_by_number(&self, number: u64, depth: u32) -> Result<Arc<Node>> {
        if number == self.root.number {
            return Ok(self.root.clone());
        }
        let hint = {
            let mut table = self.table.lock();
            if let Some(node) = table.node(number) {
                return Ok(node);
            }
            if table.is_dead(number) {
                return Err(Errno::STALE);
            }
            table.hint(number)
        };
        if let Some((parent, name)) = hint
            && parent != 0
            && depth < REOPEN_DEPTH_MAX
            && let Ok(parent) = self.node_by_number(parent, depth + 1)
            && let Ok((node, _)) = self.adopt(&parent, &name)
            && node.number == number
        {
            return Ok(node);
        }
        self.search(number)
    }

    /// Opens `name` in `parent` as whoever the thread is now, and keeps the node.
    fn adopt(&self, parent: &Node, name: &[u8]) -> Result<(Arc<Node>, Statx)> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = sys::openat(&parent.fd, name, flags, Mode::empty()).map_err(errno)?;
        self.keep(fd, parent.number, name)
    }

    fn keep(&self, fd: OwnedFd, parent: u64, name: &[u8]) -> Result<(Arc<Node>, Statx)> {
        let stat = statx(fd.as_fd())?;
        if (stat.stx_dev_major, stat.stx_dev_minor) != self.device {
            return Err(Errno::XDEV);
        }
        if stat.stx_ino == self.root.number {
            return Ok((self.root.clone(), stat));
        }
        if let Some(node) = self.table.lock().seen(stat.stx_ino, parent, name) {
            return Ok((node, stat));
        }
        let fd = Kept::new(fd, self.options.fd_min, self.options.watch);
        let kind = u32::from(stat.stx_mode) & S_IFMT;
        let node = Arc::new(Node { number: stat.stx_ino, kind, fd });
        self.table.lock().insert(&node, parent, name, self.options.nodes_max);
        Ok((node, stat))
    }

    /// Last resort for a number of which nothing is known: walks the tree.
    fn search(&self, number: u64) -> Result<Arc<Node>> {
        let mut left = SEARCH_ENTRIES_MAX;
        let mut todo = VecDeque::from([self.root.clone()]);
        while let Some(dir) = todo.pop_front() {
            let mut found = None;
            let mut below: Vec<Vec<u8>> = Vec::new();
            let scanned = self.scan(&dir, 0, &mut |ino, file_type, _, name| {
                left = left.saturating_sub(1);
                if name == b"." || name == b".." {
                    return left > 0;
                }
                if ino == number {
                    found = Some(name.to_vec());
                } else if file_type == FileType::Directory {
                    below.push(name.to_vec());
                }
                found.is_none() && left > 0
            });
            // A directory that vanished meanwhile has nothing to find.
            let _ = scanned;
            if let Some(name) = found
                && let Ok((node, _)) = self.adopt(&dir, &name)
                && node.number == number
            {
                return Ok(node);
            }
            if left == 0 {
                break;
            }
            todo.extend(below.iter().filter_map(|n| self.adopt(&dir, n).ok()).map(|(n, _)| n));
        }
        Err(Errno::STALE)
    }

    /// Reports backing number, type, next cookie and name of the entries after `cookie`.
    fn scan(&self, dir: &Node, cookie: u64, each: &mut EachRaw<'_>) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = sys::openat(&dir.fd, c".", flags, Mode::empty()).map_err(errno)?;
        if cookie != 0 {
            sys::seek(&fd, SeekFrom::Start(cookie)).map_err(errno)?;
        }
        let mut buf = vec![MaybeUninit::<u8>::uninit(); DENTS_BYTES];
        let mut entries = RawDir::new(&fd, &mut buf);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(io::Errno::NOENT) => return Ok(()), // the directory was removed: empty
                Err(error) => return Err(errno(error)),
            };
            let name = entry.file_name().to_bytes();
            if !each(entry.ino(), entry.file_type(), entry.next_entry_cookie(), name) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn handle(&self, handle: Handle) -> Result<Arc<Open>> {
        self.table.lock().handle(handle.0).ok_or(Errno::BADF)
    }

    /// Opens the inode behind a node's descriptor.
    fn reopen(&self, node: &Node, flags: OFlags) -> Result<OwnedFd> {
        match node.kind {
            S_IFREG => {}
            S_IFDIR => return Err(Errno::ISDIR),
            S_IFLNK => return Err(Errno::LOOP),
            _ => return Err(Errno::INVAL), // special files are the front end's kernel's business
        }
        sys::open(proc_path(node.fd.as_fd()).as_str(), flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(errno)
    }

    fn open_node(&self, caller: &Caller<'_>, node: &Arc<Node>, flags: u32) -> Result<Handle> {
        let backing = Self::open_flags(flags)?;
        let fd = {
            let _identity = self.become_caller(caller)?;
            self.reopen(node, backing)?
        };
        Ok(self.register(fd, node, flags))
    }

    fn open_flags(flags: u32) -> Result<OFlags> {
        let mut backing = match flags & O_ACCMODE {
            O_RDONLY => OFlags::RDONLY,
            O_WRONLY => OFlags::WRONLY,
            O_RDWR => OFlags::RDWR,
            _ => return Err(Errno::INVAL),
        };
        if flags & O_TRUNC != 0 {
            backing |= OFlags::TRUNC;
        }
        if flags & O_DSYNC != 0 {
            backing |= OFlags::DSYNC;
        }
        Ok(backing)
    }

    fn register(&self, fd: OwnedFd, node: &Arc<Node>, flags: u32) -> Handle {
        let open = Open {
            number: node.number,
            fd: Kept::new(fd, self.options.fd_min, self.options.watch),
            append: flags & O_APPEND != 0,
            position: Mutex::new(()),
        };
        Handle(self.table.lock().open(open, node))
    }

    /// Makes and opens `name`; None when it exists already.
    fn create_new(
        &self,
        caller: &Caller<'_>,
        parent: &Node,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<Option<(Attr, Handle)>> {
        let backing = Self::open_flags(flags)? | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = {
            let _identity = self.become_caller(caller)?;
            sys::openat(&parent.fd, name, backing, Mode::from_raw_mode(mode & 0o7777))
        };
        let fd = match made {
            Ok(fd) => fd,
            Err(io::Errno::EXIST) => return Ok(None),
            Err(error) => return Err(errno(error)),
        };
        // By descriptor, not by name: the name may already be another file's.
        let path_fd = sys::open(
            proc_path(fd.as_fd()).as_str(),
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(errno)?;
        let (node, stat) = self.keep(path_fd, parent.number, name)?;
        Ok(Some((self.attr(&stat), self.register(fd, &node, flags))))
    }

    /// Removes a name and forgets the inode when that was its last.
    fn remove(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        flags: AtFlags,
    ) -> Result<()> {
        let parent = self.dir(parent)?;
        let _identity = self.become_caller(caller)?;
        // The victim is looked up before: after, nothing says which inode it was.
        let victim = sys::openat(
            &parent.fd,
            name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        );
        sys::unlinkat(&parent.fd, name, flags).map_err(errno)?;
        if let Ok(victim) = victim {
            self.forget_if_gone(victim.as_fd());
        }
        Ok(())
    }

    /// An `O_PATH` descriptor of an unlinked file would keep its blocks allocated.
    fn forget_if_gone(&self, fd: BorrowedFd<'_>) {
        if let Ok(stat) = statx(fd)
            && stat.stx_nlink == 0
            && u32::from(stat.stx_mode) & S_IFMT != S_IFDIR
        {
            self.table.lock().forget(stat.stx_ino, true);
        }
    }

    fn set_size(&self, node: &Node, set: &SetAttr, size: u64) -> Result<()> {
        if let Some(handle) = set.handle {
            let open = self.handle(handle)?;
            if open.number != node.number {
                return Err(Errno::BADF);
            }
            return sys::ftruncate(&open.fd, size).map_err(errno);
        }
        let fd = self.reopen(node, OFlags::WRONLY)?;
        sys::ftruncate(&fd, size).map_err(errno)
    }

    fn set_owner(node: &Node, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let minus_one = |id: Option<u32>| id == Some(u32::MAX);
        if minus_one(uid) || minus_one(gid) {
            return Err(Errno::INVAL);
        }
        sys::chownat(
            &node.fd,
            c"",
            uid.map(Uid::from_raw),
            gid.map(Gid::from_raw),
            AtFlags::EMPTY_PATH,
        )
        .map_err(errno)
    }

    /// Writes at the end and says where that was: the backing kernel moves the descriptor's
    /// own offset along, under the lock.
    fn append(open: &Open, data: &[u8]) -> Result<Written> {
        let _position = open.position.lock();
        let at_own_offset = u64::MAX;
        let slices = [IoSlice::new(data)];
        let len = io::pwritev2(&open.fd, &slices, at_own_offset, ReadWriteFlags::APPEND)
            .map_err(errno)?;
        let end = sys::tell(&open.fd).map_err(errno)?;
        Ok(Written { len, offset: end.saturating_sub(len as u64) })
    }
}

impl FileSystem for DirFs {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        let parent = self.dir(parent)?;
        if name == b".." && parent.number == self.root.number {
            return self.attr_of(parent.fd.as_fd());
        }
        let _identity = self.become_caller(caller)?;
        if name == b"." || name == b".." {
            // Not adopted: the dots are no name to find the inode by again.
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let fd = sys::openat(&parent.fd, name, flags, Mode::empty()).map_err(errno)?;
            return self.attr_of(fd.as_fd());
        }
        let (_, stat) = self.adopt(&parent, name)?;
        Ok(self.attr(&stat))
    }

    fn getattr(&self, _caller: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        self.attr_of(self.node(ino)?.fd.as_fd())
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        let node = self.node(ino)?;
        {
            let _identity = self.become_caller(caller)?;
            if let Some(size) = set.size {
                self.set_size(&node, set, size)?;
            }
            if set.uid.is_some() || set.gid.is_some() {
                Self::set_owner(&node, set.uid, set.gid)?;
            }
            // After the owner, whose change clears set-id bits.
            if let Some(mode) = set.mode {
                if node.kind == S_IFLNK {
                    return Err(Errno::OPNOTSUPP);
                }
                let mode = Mode::from_raw_mode(mode & 0o7777);
                sys::chmod(proc_path(node.fd.as_fd()).as_str(), mode).map_err(errno)?;
            }
            if set.atime.is_some() || set.mtime.is_some() {
                let times = Timestamps {
                    last_access: timespec(set.atime),
                    last_modification: timespec(set.mtime),
                };
                sys::utimensat(&node.fd, c"", &times, AtFlags::EMPTY_PATH).map_err(errno)?;
            }
        }
        self.attr_of(node.fd.as_fd())
    }

    fn readlink(&self, _caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let node = self.node(ino)?;
        if node.kind != S_IFLNK {
            return Err(Errno::INVAL);
        }
        let target = sys::readlinkat(&node.fd, c"", Vec::new()).map_err(errno)?;
        Ok(target.into_bytes())
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        let parent = self.dir(parent)?;
        let _identity = self.become_caller(caller)?;
        let mode = Mode::from_raw_mode(node.mode & 0o7777);
        match node.mode & S_IFMT {
            S_IFDIR => sys::mkdirat(&parent.fd, name, mode),
            S_IFLNK => sys::symlinkat(node.target, &parent.fd, name),
            kind => {
                let special = kind == S_IFCHR || kind == S_IFBLK;
                let dev = if special { decode_dev(node.rdev) } else { 0 };
                let kind = if kind == 0 { S_IFREG } else { kind };
                sys::mknodat(&parent.fd, name, FileType::from_raw_mode(kind), mode, dev)
            }
        }
        .map_err(errno)?;
        let (_, stat) = self.adopt(&parent, name)?;
        Ok(self.attr(&stat))
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, Errno::ISDIR)?;
        self.remove(caller, parent, name, AtFlags::empty())
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, if name == b"." { Errno::INVAL } else { Errno::NOTEMPTY })?;
        self.remove(caller, parent, name, AtFlags::REMOVEDIR)
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        check_own_name(rename.name, Errno::BUSY)?;
        check_own_name(rename.new_name, Errno::BUSY)?;
        let flags = RenameFlags::from_bits(rename.flags).ok_or(Errno::INVAL)?;
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(Errno::INVAL);
        }
        let from = self.dir(rename.parent)?;
        let to = self.dir(rename.new_parent)?;
        let _identity = self.become_caller(caller)?;
        let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let replaced = sys::openat(&to.fd, rename.new_name, path, Mode::empty());
        sys::renameat_with(&from.fd, rename.name, &to.fd, rename.new_name, flags).map_err(errno)?;
        // Best effort from here on: it is done; these only keep the hints fresh.
        let _ = self.adopt(&to, rename.new_name);
        if flags.contains(RenameFlags::EXCHANGE) {
            let _ = self.adopt(&from, rename.name);
        } else if let Ok(replaced) = replaced {
            self.forget_if_gone(replaced.as_fd());
        }
        Ok(())
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        let node = self.node(ino)?;
        let parent = self.dir(parent)?;
        let _identity = self.become_caller(caller)?;
        let path = proc_path(node.fd.as_fd());
        sys::linkat(sys::CWD, path.as_str(), &parent.fd, name, AtFlags::SYMLINK_FOLLOW)
            .map_err(errno)?;
        self.attr_of(node.fd.as_fd())
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        self.open_node(caller, &self.node(ino)?, flags)
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        check_own_name(name, Errno::ISDIR)?;
        let dir = self.dir(parent)?;
        for _ in 0..CREATE_TRIES {
            if let Some(made) = self.create_new(caller, &dir, name, mode, flags)? {
                return Ok(made);
            }
            if flags & O_EXCL != 0 {
                return Err(Errno::EXIST);
            }
            let found = {
                let _identity = self.become_caller(caller)?;
                self.adopt(&dir, name)
            };
            match found {
                // Not by its number: it may be forgotten by now.
                Ok((node, _)) => {
                    let handle = self.open_node(caller, &node, flags)?;
                    return Ok((self.fgetattr(handle)?, handle));
                }
                Err(Errno::NOENT) => {} // removed meanwhile: make it after all
                Err(error) => return Err(error),
            }
        }
        Err(Errno::BUSY)
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let open = self.handle(handle)?;
        let mut done = 0;
        while done < buf.len() {
            let at = offset.checked_add(done as u64).ok_or(Errno::INVAL)?;
            match io::pread(&open.fd, &mut buf[done..], at) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(io::Errno::INTR) => {}
                Err(error) if done == 0 => return Err(errno(error)),
                Err(_) => break, // the next read meets the error again
            }
        }
        Ok(done)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        let open = self.handle(handle)?;
        if append || open.append {
            return Self::append(&open, data);
        }
        let mut done = 0;
        while done < data.len() {
            let at = offset.checked_add(done as u64).ok_or(Errno::FBIG)?;
            match io::pwrite(&open.fd, &data[done..], at) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(io::Errno::INTR) => {}
                Err(error) if done == 0 => return Err(errno(error)),
                Err(_) => break,
            }
        }
        Ok(Written { len: done, offset })
    }

    #[cfg(feature = "std")]
    fn read_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        let open = self.handle(handle)?;
        let mut done = 0;
        for some in pieces.chunks_mut(IOV_MAX) {
            let asked: usize = some.iter().map(|piece| piece.len()).sum();
            let at = offset.checked_add(done as u64).ok_or(Errno::INVAL)?;
            match io::retry_on_intr(|| io::preadv(&open.fd, some, at)) {
                Ok(n) => done += n,
                Err(error) if done == 0 => return Err(errno(error)),
                Err(_) => break, // the next read meets the error again
            }
            if done < asked {
                break;
            }
        }
        Ok(done)
    }

    #[cfg(feature = "std")]
    fn write_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &[IoSlice<'_>],
        append: bool,
    ) -> Result<Written> {
        let open = self.handle(handle)?;
        if append || open.append || pieces.len() > IOV_MAX {
            return self.write(handle, offset, &gather(pieces), append);
        }
        let len = io::retry_on_intr(|| io::pwritev(&open.fd, pieces, offset)).map_err(errno)?;
        Ok(Written { len, offset })
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        let open = self.handle(handle)?;
        let flags = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        sys::fallocate(&open.fd, flags, offset, len).map_err(errno)
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.handle(handle)?;
        let _position = open.position.lock();
        let target = match whence {
            Whence::Data => SeekFrom::Data(offset),
            Whence::Hole => SeekFrom::Hole(offset),
        };
        sys::seek(&open.fd, target).map_err(errno)
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        self.attr_of(self.handle(handle)?.fd.as_fd())
    }

    fn fsync(&self, handle: Handle, data_only: bool) -> Result<()> {
        let open = self.handle(handle)?;
        let synced = if data_only { sys::fdatasync(&open.fd) } else { sys::fsync(&open.fd) };
        synced.map_err(errno)
    }

    fn fsync_inode(&self, _caller: &Caller<'_>, ino: InodeId) -> Result<()> {
        let node = self.node(ino)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        if node.kind != S_IFDIR {
            let fd = self.reopen(&node, flags)?;
            return sys::fsync(&fd).map_err(errno);
        }
        let fd = sys::openat(&node.fd, c".", flags, Mode::empty()).map_err(errno)?;
        let synced =
            if node.number == self.root.number { sys::syncfs(&fd) } else { sys::fsync(&fd) };
        synced.map_err(errno)
    }

    fn release(&self, handle: Handle) {
        self.table.lock().release(handle.0);
    }

    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dir = self.dir(ino)?;
        let _identity = self.become_caller(caller)?;
        self.scan(&dir, cookie, &mut |number, file_type, next, name| {
            // Above the root there is nothing.
            let above = dir.number == self.root.number && name == b"..";
            let ino = if above { InodeId::ROOT } else { InodeId(self.swap_root(number)) };
            each(&DirEntry { ino, kind: kind_of(file_type), next, name })
        })
    }

    fn statfs(&self) -> Result<StatFs> {
        let stat = sys::fstatvfs(&self.root.fd).map_err(errno)?;
        Ok(StatFs {
            block_bytes: u32::try_from(stat.f_frsize).map_err(|_| Errno::OVERFLOW)?,
            // What is kept back for root is not part of it, or `df` would show it as used.
            blocks: stat.f_blocks.saturating_sub(stat.f_bfree.saturating_sub(stat.f_bavail)),
            blocks_free: stat.f_bavail,
            inodes: stat.f_files,
            inodes_free: stat.f_ffree,
            name_max: NAME_MAX as u32,
        })
    }

    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        let node = self.node(ino)?;
        let _identity = self.become_caller(caller)?;
        let mut value = vec![0u8; XATTR_MAX];
        let path = proc_path(node.fd.as_fd());
        let len = sys::getxattr(path.as_str(), name, &mut value[..]).map_err(errno)?;
        value.truncate(len);
        Ok(value)
    }

    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let node = self.node(ino)?;
        let _identity = self.become_caller(caller)?;
        let mut names = vec![0u8; XATTR_MAX];
        let path = proc_path(node.fd.as_fd());
        let len = sys::listxattr(path.as_str(), &mut names[..]).map_err(errno)?;
        names.truncate(len);
        Ok(names)
    }

    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        let node = self.node(ino)?;
        let _identity = self.become_caller(caller)?;
        let flags = match mode {
            XattrMode::Set => XattrFlags::empty(),
            XattrMode::Create => XattrFlags::CREATE,
            XattrMode::Replace => XattrFlags::REPLACE,
        };
        sys::setxattr(proc_path(node.fd.as_fd()).as_str(), name, value, flags).map_err(errno)
    }

    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        let node = self.node(ino)?;
        let _identity = self.become_caller(caller)?;
        sys::removexattr(proc_path(node.fd.as_fd()).as_str(), name).map_err(errno)
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        let mut table = self.table.lock();
        if !told() {
            table.forget(self.swap_root(ino.0), false);
        }
    }

    fn keeps(&self, ino: InodeId) -> bool {
        let number = self.swap_root(ino.0);
        number == self.root.number || self.table.lock().knows(number)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests;
