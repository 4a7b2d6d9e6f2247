//! Paths, descriptors and offsets over a [`FileSystem`]: what POSIX adds to inodes and handles.

use std::sync::{Mutex, PoisonError};

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, FileSystem, Handle, NewNode, O_ACCMODE, O_APPEND, O_DSYNC, O_EXCL, O_RDONLY,
    O_TRUNC, Rename, Result, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, SetAttr, Whence,
};
use client::libfs::{Config, LibFs};
use client::path::{Found, Walked, walk};
use client::slots::{Slots, Used};

/// An open file description of the library.
#[derive(Debug)]
struct Description {
    handle: Handle,
    flags: i32,
    /// Guards the shared offset, as the kernel's f_pos lock does.
    offset: Mutex<u64>,
}

/// A connection to a volume.
pub struct Volume {
    fs: Box<dyn FileSystem>,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    descriptors: Slots<Description>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("uid", &self.uid).finish_non_exhaustive()
    }
}

/// Open descriptors of one connection.
const DESCRIPTORS_MAX: usize = 1 << 20;

impl Volume {
    /// Attaches to the node behind `socket`.
    pub fn connect(socket: &[u8]) -> Result<Self> {
        let config = Config::new(socket);
        Ok(Self::over(Box::new(LibFs::attach(config)?)))
    }

    /// The same over any file system.
    pub fn over(fs: Box<dyn FileSystem>) -> Self {
        let groups = rustix::process::getgroups().unwrap_or_default();
        Self {
            fs,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.into_iter().map(|g| g.as_raw()).collect(),
            descriptors: Slots::new(),
        }
    }

    /// The file system below.
    pub fn fs(&self) -> &dyn FileSystem {
        &*self.fs
    }

    /// The identity with which calls are made.
    pub fn caller(&self) -> Caller<'_> {
        let pid = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        Caller { uid: self.uid, gid: self.gid, groups: &self.groups, pid, umask: 0 }
    }

    fn find(&self, path: &[u8], follow: bool) -> Result<Found> {
        let mut path = path.to_vec();
        // Absolute links lead to the volume's own root: it is the only root that this library has.
        for _ in 0..40 {
            match walk(&*self.fs, &self.caller(), InodeId::ROOT, &path, follow)? {
                Walked::At(found) => return Ok(found),
                Walked::Outside(next) if next.starts_with(b"..") => {
                    path = [b"/", &next[2..]].concat();
                }
                Walked::Outside(next) => path = next,
            }
        }
        Err(Errno::LOOP)
    }

    /// Where a new name shall be made.
    fn vacant(&self, path: &[u8]) -> Result<Found> {
        let found = self.find(path, false)?;
        if found.attr.is_some() { Err(Errno::EXIST) } else { Ok(found) }
    }

    fn describe(&self, handle: Handle, flags: i32) -> Result<i32> {
        let description = Description { handle, flags, offset: Mutex::new(0) };
        if let Some(number) = self.descriptors.insert(description, DESCRIPTORS_MAX) {
            return Ok(number as i32);
        }
        self.fs.release(handle);
        Err(Errno::MFILE)
    }

    #[inline]
    fn description(&self, fd: i32) -> Result<Used<'_, Description>> {
        let number = usize::try_from(fd).map_err(|_| Errno::BADF)?;
        self.descriptors.get(number).ok_or(Errno::BADF)
    }

    /// Who makes something, and with which mode: whether the umask counts is the file system's to
    /// say if it has access lists.
    fn maker(&self, mode: u32, umask: u32) -> (Caller<'_>, u32) {
        let caller = self.caller();
        if self.fs.keeps_acls() {
            (Caller { umask, ..caller }, mode)
        } else {
            (caller, mode & !umask)
        }
    }

    /// open(2).
    pub fn open(&self, path: &[u8], flags: i32, mode: u32, umask: u32) -> Result<i32> {
        let (caller, mode) = self.maker(mode, umask & 0o777);
        let access = (flags & libc::O_ACCMODE) as u32;
        let mut wanted = access;
        for (theirs, ours) in
            [(libc::O_APPEND, O_APPEND), (libc::O_TRUNC, O_TRUNC), (libc::O_DSYNC, O_DSYNC)]
        {
            if flags & theirs != 0 {
                wanted |= ours;
            }
        }
        let follow = flags & libc::O_NOFOLLOW == 0
            && flags & (libc::O_CREAT | libc::O_EXCL) != libc::O_CREAT | libc::O_EXCL;
        let found = self.find(path, follow)?;
        let handle = match found.attr {
            None if flags & libc::O_CREAT == 0 => return Err(Errno::NOENT),
            None if found.must_be_dir => return Err(Errno::ISDIR),
            None => {
                let exclusive = if flags & libc::O_EXCL != 0 { O_EXCL } else { 0 };
                self.fs
                    .create(&caller, found.parent, &found.name, mode & 0o7777, wanted | exclusive)?
                    .1
            }
            Some(_) if flags & libc::O_CREAT != 0 && flags & libc::O_EXCL != 0 => {
                return Err(Errno::EXIST);
            }
            Some(attr) => match attr.kind() {
                S_IFLNK => return Err(Errno::LOOP),
                S_IFDIR => return Err(Errno::ISDIR),
                _ if flags & libc::O_DIRECTORY != 0 || found.must_be_dir => {
                    return Err(Errno::NOTDIR);
                }
                _ => self.fs.open(&caller, attr.ino, wanted)?,
            },
        };
        self.describe(handle, flags)
    }

    /// close(2).
    pub fn close(&self, fd: i32) -> Result<()> {
        let number = usize::try_from(fd).map_err(|_| Errno::BADF)?;
        let description = self.descriptors.remove(number).ok_or(Errno::BADF)?;
        self.fs.release(description.handle);
        Ok(())
    }

    /// pread(2).
    pub fn pread(&self, fd: i32, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.fs.read(self.description(fd)?.handle, offset, buf)
    }

    /// pwrite(2).
    pub fn pwrite(&self, fd: i32, data: &[u8], offset: u64) -> Result<usize> {
        Ok(self.fs.write(self.description(fd)?.handle, offset, data, false)?.len)
    }

    /// read(2).
    pub fn read(&self, fd: i32, buf: &mut [u8]) -> Result<usize> {
        let description = self.description(fd)?;
        let mut offset = description.offset.lock().unwrap_or_else(PoisonError::into_inner);
        let n = self.fs.read(description.handle, *offset, buf)?;
        *offset += n as u64;
        Ok(n)
    }

    /// write(2).
    pub fn write(&self, fd: i32, data: &[u8]) -> Result<usize> {
        let description = self.description(fd)?;
        let mut offset = description.offset.lock().unwrap_or_else(PoisonError::into_inner);
        let written = self.fs.write(description.handle, *offset, data, false)?;
        *offset = written.offset + written.len as u64;
        Ok(written.len)
    }

    /// lseek(2).
    pub fn lseek(&self, fd: i32, offset: i64, whence: i32) -> Result<u64> {
        let description = self.description(fd)?;
        let mut at = description.offset.lock().unwrap_or_else(PoisonError::into_inner);
        let from = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => *at,
            libc::SEEK_END => self.fs.fgetattr(description.handle)?.size,
            libc::SEEK_DATA | libc::SEEK_HOLE => {
                let start = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
                let what = if whence == libc::SEEK_DATA { Whence::Data } else { Whence::Hole };
                *at = self.fs.lseek(description.handle, start, what)?;
                return Ok(*at);
            }
            _ => return Err(Errno::INVAL),
        };
        *at = from
            .checked_add_signed(offset)
            .filter(|&o| o <= i64::MAX as u64)
            .ok_or(Errno::INVAL)?;
        Ok(*at)
    }

    /// fsync(2), fdatasync(2).
    pub fn fsync(&self, fd: i32, data_only: bool) -> Result<()> {
        self.fs.fsync(self.description(fd)?.handle, data_only)
    }

    /// syncfs(2).
    pub fn sync(&self) -> Result<()> {
        self.fs.fsync_inode(&self.caller(), InodeId::ROOT)
    }

    /// ftruncate(2).
    pub fn ftruncate(&self, fd: i32, size: u64) -> Result<()> {
        let description = self.description(fd)?;
        if description.flags as u32 & O_ACCMODE == O_RDONLY {
            return Err(Errno::INVAL);
        }
        let ino = self.fs.fgetattr(description.handle)?.ino;
        let set =
            SetAttr { size: Some(size), handle: Some(description.handle), ..SetAttr::default() };
        self.fs.setattr(&self.caller(), ino, &set).map(|_| ())
    }

    /// fallocate(2).
    pub fn fallocate(&self, fd: i32, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.fs.fallocate(self.description(fd)?.handle, mode, offset, len)
    }

    /// fstat(2).
    pub fn fstat(&self, fd: i32) -> Result<Attr> {
        self.fs.fgetattr(self.description(fd)?.handle)
    }

    /// stat(2), lstat(2).
    pub fn stat(&self, path: &[u8], follow: bool) -> Result<Attr> {
        self.find(path, follow)?.existing()
    }

    /// access(2), by the effective identity.
    pub fn access(&self, path: &[u8], mode: u32) -> Result<()> {
        let attr = self.stat(path, true)?;
        self.fs.access(&self.caller(), attr.ino, mode & 7)
    }

    /// Everything that changes attributes by path.
    pub fn setattr(&self, path: &[u8], follow: bool, set: &SetAttr) -> Result<()> {
        let ino = self.find(path, follow)?.existing()?.ino;
        self.fs.setattr(&self.caller(), ino, set).map(|_| ())
    }

    /// mkdir(2), mknod(2), symlink(2). `mode` has type bits.
    pub fn make(&self, path: &[u8], mode: u32, umask: u32, rdev: u32, target: &[u8]) -> Result<()> {
        let found = self.vacant(path)?;
        let kind = mode & S_IFMT;
        if found.must_be_dir && kind != S_IFDIR {
            return Err(Errno::NOENT);
        }
        let (caller, mode) = self.maker(mode, umask & 0o777);
        if !matches!(kind, S_IFREG | S_IFDIR | S_IFLNK | S_IFIFO | S_IFSOCK) && caller.uid != 0 {
            return Err(Errno::PERM);
        }
        let node = NewNode { mode, rdev, target };
        self.fs.mknod(&caller, found.parent, &found.name, &node).map(|_| ())
    }

    /// unlink(2), rmdir(2).
    pub fn remove(&self, path: &[u8], directory: bool) -> Result<()> {
        let found = self.find(path, false)?;
        found.existing()?;
        if found.name.is_empty() {
            return Err(if directory { Errno::BUSY } else { Errno::ISDIR });
        }
        if directory {
            self.fs.rmdir(&self.caller(), found.parent, &found.name)
        } else {
            self.fs.unlink(&self.caller(), found.parent, &found.name)
        }
    }

    /// renameat2(2).
    pub fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Result<()> {
        let (old, new) = (self.find(from, false)?, self.find(to, false)?);
        let attr = old.existing()?;
        if old.name.is_empty() || new.name.is_empty() {
            return Err(Errno::BUSY);
        }
        if new.must_be_dir && !attr.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let rename = Rename {
            parent: old.parent,
            name: &old.name,
            new_parent: new.parent,
            new_name: &new.name,
            flags,
        };
        self.fs.rename(&self.caller(), &rename)
    }

    /// link(2).
    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<()> {
        let ino = self.find(from, false)?.existing()?.ino;
        let found = self.vacant(to)?;
        if found.must_be_dir {
            return Err(Errno::NOENT);
        }
        self.fs.link(&self.caller(), ino, found.parent, &found.name).map(|_| ())
    }

    /// readlink(2).
    pub fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        let attr = self.find(path, false)?.existing()?;
        if attr.kind() != S_IFLNK {
            return Err(Errno::INVAL);
        }
        self.fs.readlink(&self.caller(), attr.ino)
    }

    /// Lists a directory.
    pub fn readdir(
        &self,
        path: &[u8],
        each: &mut dyn FnMut(&client::fs::DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let attr = self.find(path, true)?.existing()?;
        self.fs.readdir(&self.caller(), attr.ino, 0, each)
    }

    /// Inode of a path, for the xattr calls.
    pub fn ino(&self, path: &[u8]) -> Result<InodeId> {
        Ok(self.find(path, true)?.existing()?.ino)
    }
}
