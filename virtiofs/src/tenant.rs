//! What one tenant gets of a file system: a directory of it and nothing beside it, as users of its own.
//!
//! The directory is the tenant's inode 1. Below it inodes have the numbers that they have for all; that a guest cannot name one
//! of which it was not told is the server's doing ([`frontend::fuse::Guest`]).

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caching, Caller, CopyRange, DirEntry, Ended, FileSystem, Handle, Lock, NewNode,
    O_ACCMODE, O_RDONLY, O_TRUNC, Rename, Result, SetAttr, StatFs, Waiting, Whence, Written,
    XattrMode,
};

use crate::ids::IdMap;

/// How a tenant sees its directory.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Users.
    pub users: IdMap,
    /// Groups.
    pub groups: IdMap,
    /// Nothing may be changed.
    pub readonly: bool,
    /// There are extended attributes.
    pub xattr: bool,
    /// And access lists, if the file system keeps them.
    pub acl: bool,
    /// What the guest's kernel may keep without asking.
    pub keeps: Keeps,
}

/// What a guest's kernel keeps. Nobody can take it away from there: all but nothing is for a directory that nobody else changes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Keeps {
    /// It asks each time, also for data: it has no pages of a file.
    NoPages,
    /// It asks each time; pages of a file that is open go when it is seen to have changed.
    #[default]
    Nothing,
    /// Names and attributes.
    Metadata,
    /// And data, from one open to the next.
    All,
}

/// A directory as a file system.
pub struct Tenant {
    fs: Arc<dyn FileSystem>,
    root: InodeId,
    /// Keeps the directory, where that is needed.
    kept: Option<Handle>,
    options: Options,
}

impl std::fmt::Debug for Tenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenant").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Tenant {
    /// The directory `path` of `fs`, which begins at its root. Symbolic links on the way are not followed.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn new(fs: Arc<dyn FileSystem>, path: &[u8], options: Options) -> Result<Self> {
        let mut root = InodeId::ROOT;
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".") {
            if name == b".." {
                return Err(Errno::INVAL);
            }
            root = fs.lookup(&Caller::ROOT, root, name)?.ino;
        }
        if !fs.getattr(&Caller::ROOT, root)?.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let kept =
            if root == InodeId::ROOT { None } else { fs.open_dir(&Caller::ROOT, root, 0).ok() };
        Ok(Self { fs, root, kept, options })
    }

    /// What tells the directory from every other, whichever device serves it: its inode, when it was made, and when the root above it
    /// was, in seconds and nanoseconds. Zero where the file system does not say that.
    ///
    /// # Errors
    /// Of the file system.
    pub fn mark(&self) -> Result<[u64; 5]> {
        let made = |ino| self.fs.getattr(&Caller::ROOT, ino).map(|attr| attr.btime);
        let (own, above) = (made(self.root)?, made(InodeId::ROOT)?);
        let second = |sec: i64| sec.cast_unsigned();
        let (own, above) = ((second(own.sec), own.nsec), (second(above.sec), above.nsec));
        Ok([self.root.0, own.0, own.1.into(), above.0, above.1.into()])
    }

    /// The tenant's number of an inode, and back.
    fn swap(&self, ino: InodeId) -> InodeId {
        if ino == InodeId::ROOT {
            self.root
        } else if ino == self.root {
            InodeId::ROOT
        } else {
            ino
        }
    }

    fn out(&self, mut attr: Attr) -> Attr {
        attr.ino = self.swap(attr.ino);
        attr.uid = self.options.users.guest(attr.uid);
        attr.gid = self.options.groups.guest(attr.gid);
        attr
    }

    /// Does something as the host's user for one of the guest's.
    fn as_caller<T>(
        &self,
        caller: &Caller<'_>,
        run: impl FnOnce(&Caller<'_>) -> Result<T>,
    ) -> Result<T> {
        if self.options.users.is_empty() && self.options.groups.is_empty() {
            return run(caller);
        }
        let groups = caller.groups.iter().map(|g| self.options.groups.host(*g));
        let groups: Vec<u32> = groups.collect::<Result<_>>()?;
        let uid = self.options.users.host(caller.uid)?;
        let gid = self.options.groups.host(caller.gid)?;
        run(&Caller { uid, gid, groups: &groups, ..*caller })
    }

    /// The same, where something is changed.
    fn change<T>(
        &self,
        caller: &Caller<'_>,
        run: impl FnOnce(&Caller<'_>) -> Result<T>,
    ) -> Result<T> {
        self.may_change()?;
        self.as_caller(caller, run)
    }

    fn may_change(&self) -> Result<()> {
        if self.options.readonly { Err(Errno::ROFS) } else { Ok(()) }
    }

    fn keeps_something(&self) -> bool {
        matches!(self.options.keeps, Keeps::Metadata | Keeps::All)
    }

    fn has_xattr(&self) -> Result<()> {
        if self.options.xattr { Ok(()) } else { Err(Errno::NOSYS) }
    }

    fn check_open(&self, flags: u32) -> Result<()> {
        if flags & O_ACCMODE != O_RDONLY || flags & O_TRUNC != 0 {
            self.may_change()
        } else {
            Ok(())
        }
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        if let Some(handle) = self.kept {
            self.fs.release(handle);
        }
    }
}

impl FileSystem for Tenant {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        // There is nothing above.
        let name = if name == b".." && parent == InodeId::ROOT { b"." } else { name };
        let parent = self.swap(parent);
        self.as_caller(caller, |c| self.fs.lookup(c, parent, name)).map(|attr| self.out(attr))
    }

    fn getattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        let ino = self.swap(ino);
        self.as_caller(caller, |c| self.fs.getattr(c, ino)).map(|attr| self.out(attr))
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        let ino = self.swap(ino);
        let uid = set.uid.map(|uid| self.options.users.host(uid)).transpose()?;
        let gid = set.gid.map(|gid| self.options.groups.host(gid)).transpose()?;
        let set = SetAttr { uid, gid, ..*set };
        self.change(caller, |c| self.fs.setattr(c, ino, &set)).map(|attr| self.out(attr))
    }

    fn readlink(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        self.as_caller(caller, |c| self.fs.readlink(c, self.swap(ino)))
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        let parent = self.swap(parent);
        self.change(caller, |c| self.fs.mknod(c, parent, name, node)).map(|attr| self.out(attr))
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        self.change(caller, |c| self.fs.unlink(c, self.swap(parent), name))
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        self.change(caller, |c| self.fs.rmdir(c, self.swap(parent), name))
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        let (parent, new_parent) = (self.swap(rename.parent), self.swap(rename.new_parent));
        let rename = Rename { parent, new_parent, ..*rename };
        self.change(caller, |c| self.fs.rename(c, &rename))
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        let (ino, parent) = (self.swap(ino), self.swap(parent));
        self.change(caller, |c| self.fs.link(c, ino, parent, name)).map(|attr| self.out(attr))
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        self.check_open(flags)?;
        self.as_caller(caller, |c| self.fs.open(c, self.swap(ino), flags))
    }

    fn open_dir(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<Handle> {
        self.as_caller(caller, |c| self.fs.open_dir(c, self.swap(ino), what))
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let parent = self.swap(parent);
        let made = self.change(caller, |c| self.fs.create(c, parent, name, mode, flags));
        made.map(|(attr, handle)| (self.out(attr), handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let parent = self.swap(parent);
        let made = self.change(caller, |c| self.fs.tmpfile(c, parent, mode, flags));
        made.map(|(attr, handle)| (self.out(attr), handle))
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.fs.read(handle, offset, buf)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        self.fs.write(handle, offset, data, append)
    }

    fn read_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        self.fs.read_pieces(handle, offset, pieces)
    }

    fn write_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &[IoSlice<'_>],
        append: bool,
    ) -> Result<Written> {
        self.fs.write_pieces(handle, offset, pieces, append)
    }

    fn write_back(&self, handle: Handle, offset: u64, data: &[u8]) -> Result<Written> {
        self.fs.write_back(handle, offset, data)
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.fs.fallocate(handle, mode, offset, len)
    }

    fn copy_range(&self, copy: &CopyRange) -> Result<u64> {
        self.fs.copy_range(copy)
    }

    fn clone_range(&self, copy: &CopyRange) -> Result<()> {
        self.fs.clone_range(copy)
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        self.fs.lseek(handle, offset, whence)
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        self.fs.fgetattr(handle).map(|attr| self.out(attr))
    }

    fn waiting(&self) -> Waiting {
        self.fs.waiting()
    }

    fn expect_fsync(&self, handle: Handle) {
        self.fs.expect_fsync(handle);
    }

    fn begin_read(&self, handle: Handle, offset: u64, len: usize, ended: Ended<Vec<u8>>) {
        self.fs.begin_read(handle, offset, len, ended);
    }

    fn begin_write(
        &self,
        handle: Handle,
        offset: u64,
        data: Vec<u8>,
        append: bool,
        ended: Ended<Written>,
    ) {
        self.fs.begin_write(handle, offset, data, append, ended);
    }

    fn begin_fsync(&self, handle: Handle, data_only: bool, ended: Ended<()>) {
        self.fs.begin_fsync(handle, data_only, ended);
    }

    fn begin_fsync_inode(&self, caller: &Caller<'_>, ino: InodeId, ended: Ended<()>) {
        let mut ended = Some(ended);
        let asked = self.as_caller(caller, |c| {
            if let Some(ended) = ended.take() {
                self.fs.begin_fsync_inode(c, ino, ended);
            }
            Ok(())
        });
        // Who called is nobody here.
        if let (Err(error), Some(ended)) = (asked, ended) {
            ended(Err(error));
        }
    }

    fn fsync(&self, handle: Handle, data_only: bool) -> Result<()> {
        self.fs.fsync(handle, data_only)
    }

    /// Of the root it is everything, and so is that of the tenant's.
    fn fsync_inode(&self, caller: &Caller<'_>, ino: InodeId) -> Result<()> {
        self.as_caller(caller, |c| self.fs.fsync_inode(c, ino))
    }

    fn flush(&self, handle: Handle) -> Result<()> {
        self.fs.flush(handle)
    }

    fn release(&self, handle: Handle) {
        self.fs.release(handle);
    }

    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let is_root = ino == InodeId::ROOT;
        let dir = self.swap(ino);
        self.as_caller(caller, |c| {
            self.fs.readdir(c, dir, cookie, &mut |entry| {
                let above = is_root && entry.name == b"..";
                let ino = if above { InodeId::ROOT } else { self.swap(entry.ino) };
                each(&DirEntry { ino, ..*entry })
            })
        })
    }

    fn statfs(&self) -> Result<StatFs> {
        self.fs.statfs_of(self.root)
    }

    fn statfs_of(&self, ino: InodeId) -> Result<StatFs> {
        self.fs.statfs_of(self.swap(ino))
    }

    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.has_xattr()?;
        self.as_caller(caller, |c| self.fs.getxattr(c, self.swap(ino), name))
    }

    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        self.has_xattr()?;
        self.as_caller(caller, |c| self.fs.listxattr(c, self.swap(ino)))
    }

    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        self.has_xattr()?;
        self.change(caller, |c| self.fs.setxattr(c, self.swap(ino), name, value, mode))
    }

    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        self.has_xattr()?;
        self.change(caller, |c| self.fs.removexattr(c, self.swap(ino), name))
    }

    fn keeps_acls(&self) -> bool {
        self.options.xattr && self.options.acl && self.fs.keeps_acls()
    }

    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        self.as_caller(caller, |c| self.fs.access(c, self.swap(ino), what))
    }

    fn keeps_locks(&self) -> bool {
        self.fs.keeps_locks()
    }

    fn lock(&self, ino: InodeId, lock: &Lock, wait: u64) -> Result<()> {
        self.fs.lock(self.swap(ino), lock, wait)
    }

    fn test_lock(&self, ino: InodeId, lock: &Lock) -> Result<Option<Lock>> {
        // Processes of the host, or of another guest, are none of its business.
        Ok(self.fs.test_lock(self.swap(ino), lock)?.map(|held| Lock { pid: 0, ..held }))
    }

    fn cancel_lock(&self, ino: InodeId, wait: u64) {
        self.fs.cancel_lock(self.swap(ino), wait);
    }

    fn lock_event(&self) -> Result<u64> {
        self.fs.lock_event()
    }

    fn await_lock_event(&self, seen: u64, limit_ms: u64) {
        self.fs.await_lock_event(seen, limit_ms);
    }

    fn inherit(&self, secret: Option<u128>) -> Result<()> {
        self.fs.inherit(secret)
    }

    fn leave(&self, secret: Option<u128>) -> Result<bool> {
        self.fs.leave(secret)
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        if ino != InodeId::ROOT {
            self.fs.forget(self.swap(ino), told);
        }
    }

    fn keeps(&self, ino: InodeId) -> bool {
        ino == InodeId::ROOT || self.fs.keeps(self.swap(ino))
    }

    /// No guest's kernel can be told that something has changed: it asks each time, unless it is said that nothing will.
    fn caching(&self) -> Caching {
        if self.keeps_something() { Caching::All } else { Caching::Nothing }
    }

    fn may_cache(&self, _: InodeId) -> bool {
        self.keeps_something()
    }

    fn has_pages(&self) -> bool {
        self.options.keeps != Keeps::NoPages
    }

    fn has_cached(&self, _: InodeId) -> bool {
        self.options.keeps == Keeps::All
    }
}
