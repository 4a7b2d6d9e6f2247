//! The `null` back end: names and attributes are real and live in memory; data is counted and
//! forgotten, and reads give zeroes. It shows what a front end costs, and serves as its partner
//! in tests.
//!
//! One lock guards everything. Invariants: the root exists; every entry names an inode; an inode
//! lives while it has a name or a handle.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use base::{Errno, InodeId};
#[cfg(feature = "std")]
use rustix::io::{IoSlice, IoSliceMut};

use crate::fs::{
    Attr, Caller, DirEntry, FileSystem, Handle, NAME_MAX, NewNode, O_APPEND, O_EXCL, O_TRUNC,
    Rename, Result, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, SetAttr, SetTime, StatFs, Time, Whence,
    Written, XattrMode, falloc,
};
use crate::mutex::Mutex;

/// Inodes at most; a few hundred bytes each.
const INODES_MAX: usize = 1 << 20;
const BLOCK_BYTES: u32 = 4096;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
/// Cookies of the dots; names have larger ones.
const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;

type Name = Box<[u8]>;

#[derive(Debug)]
struct Inode {
    attr: Attr,
    target: Name,
    xattrs: BTreeMap<Name, Vec<u8>>,
    /// Of a directory: its parent, its names and, by cookie, their order.
    parent: u64,
    names: BTreeMap<Name, (u64, u64)>,
    order: BTreeMap<u64, Name>,
    opens: u32,
    /// It has no name yet, and may be given one.
    linkable: bool,
}

#[derive(Debug)]
struct State {
    inodes: BTreeMap<u64, Inode>,
    handles: BTreeMap<u64, (u64, bool)>,
    last: u64,
    changes: u64,
}

/// The `null` file system.
#[derive(Debug)]
pub struct NullFs {
    state: Mutex<State>,
}

impl Default for NullFs {
    fn default() -> Self {
        let mut state =
            State { inodes: BTreeMap::new(), handles: BTreeMap::new(), last: 2, changes: 0 };
        state.inodes.insert(1, Inode::new(1, S_IFDIR | 0o777, &Caller::ROOT, 1));
        Self { state: Mutex::new(state) }
    }
}

impl Inode {
    fn new(ino: u64, mode: u32, caller: &Caller<'_>, parent: u64) -> Self {
        let now = now();
        let attr = Attr {
            ino: InodeId(ino),
            mode,
            nlink: if mode & S_IFMT == S_IFDIR { 2 } else { 1 },
            uid: caller.uid,
            gid: caller.gid,
            rdev: 0,
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            learnt: 0,
        };
        Self {
            attr,
            target: Box::default(),
            xattrs: BTreeMap::new(),
            parent,
            names: BTreeMap::new(),
            order: BTreeMap::new(),
            opens: 0,
            linkable: false,
        }
    }

    fn resize(&mut self, size: u64) {
        self.attr.size = size;
        self.attr.mtime = now();
    }
}

fn now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    Time { sec: now.tv_sec, nsec: u32::try_from(now.tv_nsec).unwrap_or(0) }
}

fn check_name(name: &[u8]) -> Result<()> {
    match name {
        b"" | b"." | b".." => Err(Errno::INVAL),
        name if name.len() > NAME_MAX => Err(Errno::NAMETOOLONG),
        name if name.contains(&b'/') || name.contains(&0) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

fn check_size(size: u64) -> Result<u64> {
    if i64::try_from(size).is_ok() { Ok(size) } else { Err(Errno::FBIG) }
}

impl State {
    fn get(&self, ino: InodeId) -> Result<&Inode> {
        self.inodes.get(&ino.0).ok_or(Errno::STALE)
    }

    fn get_mut(&mut self, ino: InodeId) -> Result<&mut Inode> {
        self.inodes.get_mut(&ino.0).ok_or(Errno::STALE)
    }

    fn dir(&self, ino: InodeId) -> Result<&Inode> {
        let inode = self.get(ino)?;
        if inode.attr.is_dir() { Ok(inode) } else { Err(Errno::NOTDIR) }
    }

    fn child(&self, parent: InodeId, name: &[u8]) -> Result<u64> {
        self.dir(parent)?.names.get(name).map(|(ino, _)| *ino).ok_or(Errno::NOENT)
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Adds a name to a directory that exists.
    fn insert_name(&mut self, parent: InodeId, name: &[u8], ino: u64) -> Result<()> {
        let cookie = self.number();
        let is_dir = self.get(InodeId(ino))?.attr.is_dir();
        let dir = self.get_mut(parent)?;
        dir.names.insert(name.into(), (ino, cookie));
        dir.order.insert(cookie, name.into());
        dir.attr.nlink += u32::from(is_dir);
        dir.attr.mtime = now();
        if is_dir {
            self.get_mut(InodeId(ino))?.parent = parent.0;
        }
        Ok(())
    }

    fn remove_name(&mut self, parent: InodeId, name: &[u8]) -> Result<u64> {
        let dir = self.get_mut(parent)?;
        let (ino, cookie) = dir.names.remove(name).ok_or(Errno::NOENT)?;
        dir.order.remove(&cookie);
        dir.attr.mtime = now();
        if self.get(InodeId(ino))?.attr.is_dir() {
            self.get_mut(parent)?.attr.nlink -= 1;
        }
        Ok(ino)
    }

    /// An inode lost a name.
    fn drop_link(&mut self, ino: u64) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.attr.nlink = if inode.attr.is_dir() { 0 } else { inode.attr.nlink.saturating_sub(1) };
        inode.attr.ctime = now();
        self.reap(ino);
    }

    fn reap(&mut self, ino: u64) {
        if self.inodes.get(&ino).is_some_and(|i| i.attr.nlink == 0 && i.opens == 0) {
            self.inodes.remove(&ino);
        }
    }

    fn make(
        &mut self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        check_name(name)?;
        match self.child(parent, name) {
            Ok(_) => return Err(Errno::EXIST),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        if self.dir(parent)?.attr.nlink == 0 {
            return Err(Errno::NOENT);
        }
        if self.inodes.len() >= INODES_MAX {
            return Err(Errno::NOSPC);
        }
        let ino = self.number();
        let mut inode = Inode::new(ino, node.mode, caller, parent.0);
        inode.attr.rdev = node.rdev;
        if node.mode & S_IFMT == S_IFLNK {
            inode.target = node.target.into();
            inode.attr.size = node.target.len() as u64;
        }
        self.inodes.insert(ino, inode);
        self.insert_name(parent, name, ino)?;
        self.changes += 1;
        Ok(self.get(InodeId(ino))?.attr)
    }

    fn open(&mut self, ino: InodeId, flags: u32) -> Result<Handle> {
        let inode = self.get_mut(ino)?;
        match inode.attr.kind() {
            S_IFREG => {}
            S_IFDIR => return Err(Errno::ISDIR),
            S_IFLNK => return Err(Errno::LOOP),
            _ => return Err(Errno::INVAL),
        }
        if flags & O_TRUNC != 0 {
            inode.resize(0);
        }
        inode.opens += 1;
        let handle = self.number();
        self.handles.insert(handle, (ino.0, flags & O_APPEND != 0));
        Ok(Handle(handle))
    }

    fn handle(&self, handle: Handle) -> Result<(InodeId, bool)> {
        self.handles.get(&handle.0).map(|(ino, append)| (InodeId(*ino), *append)).ok_or(Errno::BADF)
    }

    /// Whether directory `ino` is `below` or contains it.
    fn contains(&self, ino: u64, mut below: u64) -> bool {
        for _ in 0..=self.inodes.len() {
            if below == ino {
                return true;
            }
            match self.inodes.get(&below) {
                Some(inode) if inode.parent != below => below = inode.parent,
                _ => return false,
            }
        }
        false
    }

    /// Whether `moved` may replace `replaced`.
    fn check_replace(&self, moved: u64, replaced: u64) -> Result<()> {
        let (from, to) = (self.get(InodeId(moved))?, self.get(InodeId(replaced))?);
        match (from.attr.is_dir(), to.attr.is_dir()) {
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !to.names.is_empty() => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    fn rename(&mut self, rename: &Rename<'_>) -> Result<()> {
        let Rename { parent, name, new_parent, new_name, flags } = *rename;
        check_name(name)?;
        check_name(new_name)?;
        if !matches!(flags, 0 | RENAME_NOREPLACE | RENAME_EXCHANGE) {
            return Err(Errno::INVAL);
        }
        let moved = self.child(parent, name)?;
        let replaced = match self.child(new_parent, new_name) {
            Ok(ino) => Some(ino),
            Err(Errno::NOENT) if flags != RENAME_EXCHANGE => None,
            Err(error) => return Err(error),
        };
        if self.contains(moved, new_parent.0)
            || (flags == RENAME_EXCHANGE && replaced.is_some_and(|r| self.contains(r, parent.0)))
        {
            return Err(Errno::INVAL);
        }
        if replaced == Some(moved) {
            return if flags == RENAME_NOREPLACE { Err(Errno::EXIST) } else { Ok(()) };
        }
        match replaced {
            Some(_) if flags == RENAME_NOREPLACE => return Err(Errno::EXIST),
            Some(other) if flags == 0 => self.check_replace(moved, other)?,
            _ => {}
        }
        self.remove_name(parent, name)?;
        if let Some(other) = replaced {
            self.remove_name(new_parent, new_name)?;
            if flags == RENAME_EXCHANGE {
                self.insert_name(parent, name, other)?;
            } else {
                self.drop_link(other);
            }
        }
        self.changes += 1;
        self.insert_name(new_parent, new_name, moved)
    }
}

impl NullFs {
    /// How many operations have changed anything: for tests that nothing was.
    pub fn changes(&self) -> u64 {
        self.state.lock().changes
    }
}

impl NullFs {
    /// A write of so many bytes.
    fn put(&self, handle: Handle, offset: u64, len: usize, append: bool) -> Result<Written> {
        let mut state = self.state.lock();
        let (ino, always) = state.handle(handle)?;
        let inode = state.get_mut(ino)?;
        let offset = if append || always { inode.attr.size } else { offset };
        let end = check_size(offset.checked_add(len as u64).ok_or(Errno::FBIG)?)?;
        inode.resize(end.max(inode.attr.size));
        state.changes += 1;
        Ok(Written { len, offset })
    }
}

impl FileSystem for NullFs {
    fn lookup(&self, _: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        let state = self.state.lock();
        let ino = match name {
            b"." => state.dir(parent)?.attr.ino.0,
            b".." => state.dir(parent)?.parent,
            name if name.len() > NAME_MAX => return Err(Errno::NAMETOOLONG),
            name => state.child(parent, name)?,
        };
        Ok(state.get(InodeId(ino))?.attr)
    }

    fn getattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        Ok(self.state.lock().get(ino)?.attr)
    }

    fn setattr(&self, _: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        let mut state = self.state.lock();
        let inode = state.get_mut(ino)?;
        if let Some(size) = set.size {
            if inode.attr.kind() != S_IFREG {
                return Err(Errno::INVAL);
            }
            inode.resize(check_size(size)?);
        }
        if let Some(mode) = set.mode {
            inode.attr.mode = inode.attr.kind() | (mode & 0o7777);
        }
        inode.attr.uid = set.uid.unwrap_or(inode.attr.uid);
        inode.attr.gid = set.gid.unwrap_or(inode.attr.gid);
        let time = |set: Option<SetTime>, old| match set {
            None => old,
            Some(SetTime::Now) => now(),
            Some(SetTime::At(time)) => time,
        };
        inode.attr.atime = time(set.atime, inode.attr.atime);
        inode.attr.mtime = time(set.mtime, inode.attr.mtime);
        inode.attr.ctime = now();
        let attr = inode.attr;
        state.changes += 1;
        Ok(attr)
    }

    fn readlink(&self, _: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let state = self.state.lock();
        let inode = state.get(ino)?;
        if inode.attr.kind() == S_IFLNK { Ok(inode.target.to_vec()) } else { Err(Errno::INVAL) }
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        self.state.lock().make(caller, parent, name, node)
    }

    fn unlink(&self, _: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let ino = state.child(parent, name)?;
        if state.get(InodeId(ino))?.attr.is_dir() {
            return Err(Errno::ISDIR);
        }
        state.remove_name(parent, name)?;
        state.drop_link(ino);
        state.changes += 1;
        Ok(())
    }

    fn rmdir(&self, _: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let ino = state.child(parent, name)?;
        if !state.dir(InodeId(ino))?.names.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        state.remove_name(parent, name)?;
        state.drop_link(ino);
        state.changes += 1;
        Ok(())
    }

    fn rename(&self, _: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        self.state.lock().rename(rename)
    }

    fn link(&self, _: &Caller<'_>, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        let mut state = self.state.lock();
        let attr = state.get(ino)?.attr;
        if attr.is_dir() {
            return Err(Errno::PERM);
        }
        if attr.nlink == 0 && !state.get(ino)?.linkable {
            return Err(Errno::NOENT);
        }
        match state.child(parent, name) {
            Ok(_) => return Err(Errno::EXIST),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        state.insert_name(parent, name, ino.0)?;
        state.changes += 1;
        let inode = state.get_mut(ino)?;
        inode.attr.nlink += 1;
        inode.linkable = false;
        inode.attr.ctime = now();
        Ok(inode.attr)
    }

    fn open(&self, _: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        let mut state = self.state.lock();
        let handle = state.open(ino, flags)?;
        state.changes += 1;
        Ok(handle)
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let mut state = self.state.lock();
        let ino = match state.child(parent, name) {
            Ok(_) if flags & O_EXCL != 0 => return Err(Errno::EXIST),
            Ok(ino) => InodeId(ino),
            Err(Errno::NOENT) => {
                let node = NewNode { mode: S_IFREG | (mode & 0o7777), rdev: 0, target: b"" };
                state.make(caller, parent, name, &node)?.ino
            }
            Err(error) => return Err(error),
        };
        let handle = state.open(ino, flags)?;
        Ok((state.get(ino)?.attr, handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let mut state = self.state.lock();
        if state.dir(parent)?.attr.nlink == 0 {
            return Err(Errno::NOENT);
        }
        if state.inodes.len() >= INODES_MAX {
            return Err(Errno::NOSPC);
        }
        let ino = state.number();
        let mut inode = Inode::new(ino, S_IFREG | (mode & 0o7777), caller, parent.0);
        inode.attr.nlink = 0;
        inode.linkable = flags & O_EXCL == 0;
        state.inodes.insert(ino, inode);
        let handle = state.open(InodeId(ino), flags)?;
        state.changes += 1;
        Ok((state.get(InodeId(ino))?.attr, handle))
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let state = self.state.lock();
        let (ino, _) = state.handle(handle)?;
        let left = state.get(ino)?.attr.size.saturating_sub(offset);
        let len = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        buf[..len].fill(0);
        Ok(len)
    }

    #[cfg(feature = "std")]
    fn read_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        let state = self.state.lock();
        let (ino, _) = state.handle(handle)?;
        let size = state.get(ino)?.attr.size;
        drop(state);
        let mut left = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut done = 0;
        for piece in pieces {
            let len = piece.len().min(left);
            piece[..len].fill(0);
            (left, done) = (left - len, done + len);
        }
        Ok(done)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        self.put(handle, offset, data.len(), append)
    }

    #[cfg(feature = "std")]
    fn write_pieces(
        &self,
        handle: Handle,
        offset: u64,
        pieces: &[IoSlice<'_>],
        append: bool,
    ) -> Result<Written> {
        let len = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        self.put(handle, offset, len, append)
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        // Taking out and putting in is for file systems with blocks.
        let known = falloc::KEEP_SIZE | falloc::PUNCH_HOLE | falloc::ZERO_RANGE;
        if mode & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let mut state = self.state.lock();
        let (ino, _) = state.handle(handle)?;
        let end = check_size(offset.checked_add(len).ok_or(Errno::FBIG)?)?;
        let inode = state.get_mut(ino)?;
        if mode & falloc::KEEP_SIZE == 0 && end > inode.attr.size {
            inode.resize(end);
        }
        state.changes += 1;
        Ok(())
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let state = self.state.lock();
        let (ino, _) = state.handle(handle)?;
        let size = state.get(ino)?.attr.size;
        match whence {
            _ if offset >= size => Err(Errno::NXIO),
            Whence::Data => Ok(offset),
            Whence::Hole => Ok(size),
        }
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        let state = self.state.lock();
        let (ino, _) = state.handle(handle)?;
        Ok(state.get(ino)?.attr)
    }

    fn fsync(&self, handle: Handle, _: bool) -> Result<()> {
        self.state.lock().handle(handle).map(|_| ())
    }

    fn fsync_inode(&self, _: &Caller<'_>, ino: InodeId) -> Result<()> {
        self.state.lock().get(ino).map(|_| ())
    }

    fn release(&self, handle: Handle) {
        let mut state = self.state.lock();
        let Some((ino, _)) = state.handles.remove(&handle.0) else { return };
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.opens = inode.opens.saturating_sub(1);
        }
        state.reap(ino);
    }

    fn readdir(
        &self,
        _: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let state = self.state.lock();
        let dir = state.dir(ino)?;
        let dots: [(u64, u64, &[u8]); 2] =
            [(COOKIE_DOT, ino.0, b"."), (COOKIE_DOT_DOT, dir.parent, b"..")];
        let names = dir
            .order
            .range(cookie.saturating_add(1)..)
            .filter_map(|(next, name)| dir.names.get(name).map(|(ino, _)| (*next, *ino, &**name)));
        for (next, ino, name) in dots.into_iter().filter(|d| d.0 > cookie).chain(names) {
            let kind = state.get(InodeId(ino)).map_or(S_IFDIR, |i| i.attr.kind());
            if !each(&DirEntry { ino: InodeId(ino), kind, next, name }) {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self) -> Result<StatFs> {
        let used = self.state.lock().inodes.len();
        Ok(StatFs {
            block_bytes: BLOCK_BYTES,
            blocks: 1 << 40,
            blocks_free: 1 << 40,
            inodes: INODES_MAX as u64,
            inodes_free: (INODES_MAX - used.min(INODES_MAX)) as u64,
            name_max: NAME_MAX as u32,
        })
    }

    fn getxattr(&self, _: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.state.lock().get(ino)?.xattrs.get(name).cloned().ok_or(Errno::NODATA)
    }

    fn listxattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let state = self.state.lock();
        let names = state.get(ino)?.xattrs.keys();
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    fn setxattr(
        &self,
        _: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let xattrs = &mut state.get_mut(ino)?.xattrs;
        match (mode, xattrs.contains_key(name)) {
            (XattrMode::Create, true) => return Err(Errno::EXIST),
            (XattrMode::Replace, false) => return Err(Errno::NODATA),
            _ => xattrs.insert(name.into(), value.into()),
        };
        state.changes += 1;
        Ok(())
    }

    fn removexattr(&self, _: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        state.get_mut(ino)?.xattrs.remove(name).ok_or(Errno::NODATA)?;
        state.changes += 1;
        Ok(())
    }
}
