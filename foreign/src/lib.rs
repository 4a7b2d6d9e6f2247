//! File systems in C (or whatever else makes a shared library) behind the front ends: `foreign/include/corbel-fs.h`.
//!
//! Reads, writes and syncs are begun and complete later ([`Waiting::Nobody`]); of other operations a thread waits.
#![allow(unsafe_code)] // functions of a library that somebody else wrote

mod abi;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::mpsc;

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, DirEntry, Ended, FileSystem, Handle, NewNode, Rename, Result, S_IFDIR, SetAttr,
    SetTime, StatFs, Time, Waiting, Whence, Written, XattrMode,
};

use abi::{FsCaller, FsOperations, FsSet, FsTime, Open, Reply, Request, set};

/// What a back end exports.
const SYMBOL: &CStr = c"corbel_fs_open";
/// Cookies of `.` and `..`; the back end's follow.
const DOTS: u64 = 2;
const SEEK_DATA: c_int = 3;
const SEEK_HOLE: c_int = 4;
const XATTR_CREATE: c_int = 1;
const XATTR_REPLACE: c_int = 2;

/// A back end of a shared library.
pub struct ForeignFs {
    operations: FsOperations,
    fs: *mut c_void,
}

// SAFETY: the header asks of a back end that its operations come from many threads at once.
unsafe impl Send for ForeignFs {}
// SAFETY: as above.
unsafe impl Sync for ForeignFs {}

impl std::fmt::Debug for ForeignFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForeignFs").finish_non_exhaustive()
    }
}

/// What the loader says.
fn loader_error() -> String {
    // SAFETY: a string of the loader's, or null, good until this thread calls it again.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
}

impl ForeignFs {
    /// Loads a library, which stays loaded, and opens the file system that `argument` names.
    ///
    /// # Errors
    /// In words: there is no such library, it is none, or it does not open that.
    pub fn open(library: &Path, argument: &str) -> std::result::Result<Self, String> {
        let wrong = |what: String| format!("{}: {what}", library.display());
        // Else the loader would look for a name elsewhere.
        let path = std::path::absolute(library).map_err(|e| wrong(e.to_string()))?;
        let path = CString::new(path.into_os_string().into_encoded_bytes());
        let path = path.map_err(|_| wrong("a path has no NUL".into()))?;
        let argument =
            CString::new(argument).map_err(|_| wrong("an argument has no NUL".into()))?;
        // SAFETY: loading runs what the library does when it is loaded, which is what was asked for.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(wrong(loader_error()));
        }
        // SAFETY: a handle of the loader's, and a string.
        let open = unsafe { libc::dlsym(handle, SYMBOL.as_ptr()) };
        if open.is_null() {
            return Err(wrong(format!(
                "it exports no {} (see corbel-fs.h), so it is no back end",
                SYMBOL.to_string_lossy()
            )));
        }
        // SAFETY: a function of that name is what the header says.
        let open: Open = unsafe { std::mem::transmute(open) };
        let (mut operations, mut fs) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: a string, and two places to be written.
        let error = unsafe { open(argument.as_ptr(), &raw mut operations, &raw mut fs) };
        if error != 0 {
            let said = std::io::Error::from_raw_os_error(error);
            return Err(wrong(format!("it does not open {argument:?}: {said}")));
        }
        // SAFETY: null or good; its first word says how long it is.
        let size = unsafe { operations.cast::<usize>().as_ref() }.copied().unwrap_or(0);
        if size < size_of::<usize>() {
            return Err(wrong("it gives no operations".into()));
        }
        let mut known = FsOperations::default();
        // SAFETY: so many bytes are there, and have room; what an older one does not have is none. A table of another time may be longer.
        unsafe {
            std::ptr::copy_nonoverlapping(
                operations.cast::<u8>(),
                (&raw mut known).cast(),
                size.min(size_of::<FsOperations>()),
            );
        }
        let fs = Self { operations: known, fs };
        let missing = [
            ("lookup", known.lookup.is_none()),
            ("getattr", known.getattr.is_none()),
            ("open", known.open.is_none()),
            ("read", known.read.is_none()),
            ("readdir", known.readdir.is_none()),
        ];
        if let Some((name, _)) = missing.iter().find(|(_, missing)| *missing) {
            return Err(wrong(format!("a file system without {name} is none")));
        }
        Ok(fs)
    }

    /// Has `call` begin something with a request, which `end` is told the answer of.
    fn begin(&self, end: abi::End, data: Vec<u8>, call: impl FnOnce(&Asked)) {
        let (request, data, len) = Request::give(end, data);
        call(&Asked { fs: self.fs, request, data, len });
    }

    /// The same, waiting for the answer.
    fn ask(&self, call: impl FnOnce(&Asked)) -> Result<Reply> {
        let (end, ended) = mpsc::sync_channel(1);
        let end = Box::new(move |reply| {
            // Whoever asked waits.
            let _ = end.send(reply);
        });
        self.begin(end, Vec::new(), call);
        ended.recv().unwrap_or(Err(Errno::IO))
    }

    fn ask_attr(&self, call: impl FnOnce(&Asked)) -> Result<Attr> {
        match self.ask(call)? {
            Reply::Attr(attr) => Ok(attr),
            _ => Err(Errno::IO),
        }
    }

    fn ask_done(&self, call: impl FnOnce(&Asked)) -> Result<()> {
        match self.ask(call)? {
            Reply::Done(_) => Ok(()),
            _ => Err(Errno::IO),
        }
    }

    fn ask_data(&self, call: impl FnOnce(&Asked)) -> Result<Vec<u8>> {
        match self.ask(call)? {
            Reply::Data(data) => Ok(data),
            _ => Err(Errno::IO),
        }
    }
}

impl Drop for ForeignFs {
    fn drop(&mut self) {
        if let Some(close) = self.operations.close {
            // SAFETY: nobody has it any more.
            unsafe { close(self.fs) };
        }
    }
}

/// What an operation is given first.
struct Asked {
    fs: *mut c_void,
    request: *mut Request,
    data: *const c_void,
    len: usize,
}

fn caller(caller: &Caller<'_>) -> FsCaller {
    let Caller { uid, gid, groups, pid, umask } = *caller;
    FsCaller { uid, gid, pid, umask, groups: groups.as_ptr(), groups_count: groups.len() }
}

/// A name, or another string, as C has them.
fn string(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Errno::INVAL)
}

fn name(bytes: &[u8]) -> Result<CString> {
    if bytes.len() > client::fs::NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    string(bytes)
}

fn fs_time(time: Option<SetTime>) -> FsTime {
    match time {
        Some(SetTime::At(Time { sec, nsec })) => FsTime { sec, nsec, reserved: 0 },
        Some(SetTime::Now) | None => FsTime::default(),
    }
}

fn fs_set(given: &SetAttr) -> FsSet {
    let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let of_time = |time: Option<SetTime>, at: u32, now: u32| match time {
        None => 0,
        Some(SetTime::Now) => now,
        Some(SetTime::At(_)) => at,
    };
    FsSet {
        what: bit(given.mode.is_some(), set::MODE)
            | bit(given.uid.is_some(), set::UID)
            | bit(given.gid.is_some(), set::GID)
            | bit(given.size.is_some(), set::SIZE)
            | of_time(given.atime, set::ATIME, set::ATIME_NOW)
            | of_time(given.mtime, set::MTIME, set::MTIME_NOW),
        mode: given.mode.unwrap_or(0),
        uid: given.uid.unwrap_or(0),
        gid: given.gid.unwrap_or(0),
        size: given.size.unwrap_or(0),
        atime: fs_time(given.atime),
        mtime: fs_time(given.mtime),
    }
}

/// Calls an operation of the table: what it is given first, and the rest. Of who has no such operation it is `$missing`.
macro_rules! operation {
    ($self:ident . $name:ident ? $missing:ident, $ask:ident ($($argument:expr),*)) => {{
        let operation = $self.operations.$name.ok_or(Errno::$missing)?;
        // SAFETY: a function of the back end with what the header says it gets; what is pointed to is there until it returns.
        $self.$ask(|asked| unsafe { operation(asked.fs, asked.request, $($argument),*) })
    }};
}

impl FileSystem for ForeignFs {
    fn lookup(&self, c: &Caller<'_>, parent: InodeId, bytes: &[u8]) -> Result<Attr> {
        if bytes == b"." {
            return self.getattr(c, parent);
        }
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.lookup ? NOSYS, ask_attr(&raw const c, parent.0, name.as_ptr()))
    }

    fn getattr(&self, c: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        let c = caller(c);
        operation!(self.getattr ? NOSYS, ask_attr(&raw const c, ino.0))
    }

    fn setattr(&self, c: &Caller<'_>, ino: InodeId, given: &SetAttr) -> Result<Attr> {
        let (c, given) = (caller(c), fs_set(given));
        operation!(self.setattr ? NOSYS, ask_attr(&raw const c, ino.0, &raw const given))
    }

    fn readlink(&self, c: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let c = caller(c);
        operation!(self.readlink ? NOSYS, ask_data(&raw const c, ino.0))
    }

    fn mknod(
        &self,
        c: &Caller<'_>,
        parent: InodeId,
        bytes: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        let (c, name, target) = (caller(c), name(bytes)?, string(node.target)?);
        let target: *const c_char =
            if node.target.is_empty() { std::ptr::null() } else { target.as_ptr() };
        operation!(self.mknod ? NOSYS, ask_attr(
            &raw const c, parent.0, name.as_ptr(), node.mode, node.rdev, target
        ))
    }

    fn unlink(&self, c: &Caller<'_>, parent: InodeId, bytes: &[u8]) -> Result<()> {
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.unlink ? NOSYS, ask_done(&raw const c, parent.0, name.as_ptr()))
    }

    fn rmdir(&self, c: &Caller<'_>, parent: InodeId, bytes: &[u8]) -> Result<()> {
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.rmdir ? NOSYS, ask_done(&raw const c, parent.0, name.as_ptr()))
    }

    fn rename(&self, c: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        let (c, from, to) = (caller(c), name(rename.name)?, name(rename.new_name)?);
        operation!(self.rename ? NOSYS, ask_done(
            &raw const c, rename.parent.0, from.as_ptr(), rename.new_parent.0, to.as_ptr(), rename.flags
        ))
    }

    fn link(&self, c: &Caller<'_>, ino: InodeId, parent: InodeId, bytes: &[u8]) -> Result<Attr> {
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.link ? NOSYS, ask_attr(&raw const c, ino.0, parent.0, name.as_ptr()))
    }

    fn open(&self, c: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        let c = caller(c);
        match operation!(self.open ? NOSYS, ask(&raw const c, ino.0, flags))? {
            Reply::Open(_, handle) => Ok(Handle(handle)),
            _ => Err(Errno::IO),
        }
    }

    fn create(
        &self,
        c: &Caller<'_>,
        parent: InodeId,
        bytes: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let (c, name) = (caller(c), name(bytes)?);
        let made = operation!(self.create ? NOSYS, ask(&raw const c, parent.0, name.as_ptr(), mode, flags))?;
        match made {
            Reply::Open(Some(attr), handle) => Ok((attr, Handle(handle))),
            Reply::Open(None, handle) => {
                self.release(Handle(handle));
                Err(Errno::IO)
            }
            _ => Err(Errno::IO),
        }
    }

    fn waiting(&self) -> Waiting {
        Waiting::Nobody
    }

    fn begin_read(&self, handle: Handle, offset: u64, len: usize, ended: Ended<Vec<u8>>) {
        let Some(read) = self.operations.read else { return ended(Err(Errno::NOSYS)) };
        let end = move |reply: Result<Reply>| {
            ended(reply.and_then(|reply| match reply {
                Reply::Data(mut data) => {
                    data.truncate(len);
                    Ok(data)
                }
                _ => Err(Errno::IO),
            }));
        };
        self.begin(Box::new(end), Vec::new(), |asked| {
            // SAFETY: as the header says.
            unsafe { read(asked.fs, asked.request, handle.0, offset, len) };
        });
    }

    fn begin_write(
        &self,
        handle: Handle,
        offset: u64,
        data: Vec<u8>,
        append: bool,
        ended: Ended<Written>,
    ) {
        let Some(write) = self.operations.write else { return ended(Err(Errno::NOSYS)) };
        let most = data.len();
        let end = move |reply: Result<Reply>| {
            ended(reply.and_then(|reply| match reply {
                Reply::Written(written) if written.len <= most => Ok(written),
                _ => Err(Errno::IO),
            }));
        };
        self.begin(Box::new(end), data, |asked| {
            let (request, data, len) = (asked.request, asked.data, asked.len);
            // SAFETY: as the header says; the data stay with the request.
            unsafe { write(asked.fs, request, handle.0, offset, data, len, append.into()) };
        });
    }

    fn begin_fsync(&self, handle: Handle, data_only: bool, ended: Ended<()>) {
        let Some(fsync) = self.operations.fsync else { return ended(Err(Errno::NOSYS)) };
        self.begin(done(ended), Vec::new(), |asked| {
            // SAFETY: as the header says.
            unsafe { fsync(asked.fs, asked.request, handle.0, data_only.into()) };
        });
    }

    fn begin_fsync_inode(&self, _: &Caller<'_>, ino: InodeId, ended: Ended<()>) {
        let Some(fsync) = self.operations.fsync_inode else { return ended(Err(Errno::NOSYS)) };
        self.begin(done(ended), Vec::new(), |asked| {
            // SAFETY: as the header says.
            unsafe { fsync(asked.fs, asked.request, ino.0) };
        });
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let data = wait(|ended| self.begin_read(handle, offset, buf.len(), ended))?;
        buf[..data.len()].copy_from_slice(&data);
        Ok(data.len())
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        wait(|ended| self.begin_write(handle, offset, data.to_vec(), append, ended))
    }

    fn fsync(&self, handle: Handle, data_only: bool) -> Result<()> {
        wait(|ended| self.begin_fsync(handle, data_only, ended))
    }

    fn fsync_inode(&self, caller: &Caller<'_>, ino: InodeId) -> Result<()> {
        wait(|ended| self.begin_fsync_inode(caller, ino, ended))
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        operation!(self.fallocate ? OPNOTSUPP, ask_done(handle.0, mode, offset, len))
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let whence = if whence == Whence::Data { SEEK_DATA } else { SEEK_HOLE };
        match operation!(self.lseek ? NOSYS, ask(handle.0, offset, whence))? {
            Reply::Offset(offset) => Ok(offset),
            _ => Err(Errno::IO),
        }
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        operation!(self.fgetattr ? NOSYS, ask_attr(handle.0))
    }

    fn release(&self, handle: Handle) {
        if let Some(release) = self.operations.release {
            // SAFETY: as the header says.
            unsafe { release(self.fs, handle.0) };
        }
    }

    fn readdir(
        &self,
        c: &Caller<'_>,
        ino: InodeId,
        mut cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dots: [(&[u8], u64); 2] = [(b".", 1), (b"..", DOTS)];
        for (name, next) in dots.into_iter().filter(|(_, next)| *next > cookie) {
            // What is above a kernel knows itself.
            if !each(&DirEntry { ino, kind: S_IFDIR, next, name }) {
                return Ok(());
            }
        }
        cookie = cookie.max(DOTS) - DOTS;
        let c = caller(c);
        loop {
            let listed = operation!(self.readdir ? NOSYS, ask(&raw const c, ino.0, cookie))?;
            let Reply::Done(entries) = listed else { return Err(Errno::IO) };
            let Some(last) = entries.last() else { return Ok(()) };
            if last.next == cookie {
                return Err(Errno::IO); // it would never end
            }
            cookie = last.next;
            for entry in &entries {
                let (ino, kind, next) = (entry.ino, entry.kind, entry.next + DOTS);
                if !each(&DirEntry { ino, kind, next, name: &entry.name }) {
                    return Ok(());
                }
            }
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        self.statfs_of(InodeId::ROOT)
    }

    fn statfs_of(&self, ino: InodeId) -> Result<StatFs> {
        match operation!(self.statfs ? NOSYS, ask(ino.0))? {
            Reply::Space(space) => Ok(space),
            _ => Err(Errno::IO),
        }
    }

    fn getxattr(&self, c: &Caller<'_>, ino: InodeId, bytes: &[u8]) -> Result<Vec<u8>> {
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.getxattr ? OPNOTSUPP, ask_data(&raw const c, ino.0, name.as_ptr()))
    }

    fn listxattr(&self, c: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let c = caller(c);
        operation!(self.listxattr ? OPNOTSUPP, ask_data(&raw const c, ino.0))
    }

    fn setxattr(
        &self,
        c: &Caller<'_>,
        ino: InodeId,
        bytes: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        let (c, name) = (caller(c), name(bytes)?);
        let flags = match mode {
            XattrMode::Set => 0,
            XattrMode::Create => XATTR_CREATE,
            XattrMode::Replace => XATTR_REPLACE,
        };
        let (value, len) = (value.as_ptr().cast(), value.len());
        operation!(self.setxattr ? OPNOTSUPP, ask_done(
            &raw const c, ino.0, name.as_ptr(), value, len, flags
        ))
    }

    fn removexattr(&self, c: &Caller<'_>, ino: InodeId, bytes: &[u8]) -> Result<()> {
        let (c, name) = (caller(c), name(bytes)?);
        operation!(self.removexattr ? OPNOTSUPP, ask_done(&raw const c, ino.0, name.as_ptr()))
    }
}

fn done(ended: Ended<()>) -> abi::End {
    Box::new(move |reply| {
        ended(reply.and_then(|reply| match reply {
            Reply::Done(_) => Ok(()),
            _ => Err(Errno::IO),
        }));
    })
}

/// Waits for the end of what `begin` begins.
fn wait<T: Send + 'static>(begin: impl FnOnce(Ended<T>)) -> Result<T> {
    let (end, ended) = mpsc::sync_channel(1);
    begin(Box::new(move |result| {
        // Whoever began waits.
        let _ = end.send(result);
    }));
    ended.recv().unwrap_or(Err(Errno::IO))
}
