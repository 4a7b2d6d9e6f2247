//! Handlers of open files and directories.

use std::sync::atomic::Ordering;

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, CopyRange, DirEntry, FileSystem, O_ACCMODE, O_APPEND, O_DSYNC, O_EXCL, O_RDONLY,
    O_TRUNC, Result, Waiting, Whence, Written, gather,
};
use zerocopy::{FromBytes, IntoBytes};

use super::pages::For;
use super::parse::Args;
use super::reply::{Answer, LaterReply, ReplySink, ended_with};
use super::server::{Call, IO_BYTES_MAX, Server};
use super::wire::{
    CopyFileRangeIn, CreateIn, Dirent, EntryOut, FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE,
    FOPEN_PARALLEL_DIRECT_WRITES, FSYNC_FDATASYNC, FallocateIn, FsyncIn, LseekIn, LseekOut,
    OPEN_KILL_SUIDGID, OpenIn, OpenOut, ReadIn, ReleaseIn, WRITE_CACHE, WRITE_KILL_SUIDGID,
    WriteIn, WriteOut,
};

/// `O_APPEND` is left out on purpose: whether a write appends is asked of each write, since one
/// that comes from a shared mapping never does, though it arrives on the same handle.
const OPEN_FLAGS: u32 = O_ACCMODE | O_TRUNC | O_DSYNC;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
/// Shortest directory entry in a reply; bounds how many are collected at once.
const DIRENT_ALIGN: usize = 8;

/// An offset that the file system may compute with.
fn offset(value: u64) -> Result<u64> {
    if i64::try_from(value).is_ok() { Ok(value) } else { Err(Errno::INVAL) }
}

/// R_OK.
const MAY_READ: u32 = 4;
/// X_OK.
const MAY_EXECUTE: u32 = 1;
/// The kernel opens a file to execute it (`__FMODE_EXEC`); no program can ask for that.
const FMODE_EXEC: u32 = 0x20;

/// Whether a file opened with these flags goes past the cache because it is appended to.
pub(super) fn goes_past_to_append(flags: u32) -> bool {
    flags & O_APPEND != 0 && flags & O_ACCMODE != O_RDONLY
}

fn padded(name_len: usize) -> usize {
    (size_of::<Dirent>() + name_len).next_multiple_of(DIRENT_ALIGN)
}

impl<F: FileSystem + ?Sized> Server<F> {
    /// A file opened for appending goes past the kernel's page cache. Through the cache the kernel
    /// cuts a write at the first page that it does not hold whole, and sends what follows as a
    /// request of its own, before which others may append: the line would be torn. And it puts
    /// the bytes where it thinks that the file ends.
    fn open_out(&self, fh: u64, ino: InodeId, attr: Option<&Attr>, asked: u32) -> OpenOut {
        let keep = self.may_keep_pages(ino, attr);
        let mut flags = if keep { FOPEN_KEEP_CACHE } else { 0 };
        if goes_past_to_append(asked) || self.reads_direct(asked) || !self.fs.has_pages() {
            flags |= FOPEN_DIRECT_IO;
        }
        if self.goes_direct(asked) {
            flags |= FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES;
        }
        OpenOut { fh: fh.into(), open_flags: flags.into(), backing_id: 0.into() }
    }

    pub(super) fn open(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &OpenIn = args.take()?;
        args.end()?;
        let flags = arg.flags.get() & OPEN_FLAGS;
        let cut = (flags & O_TRUNC != 0).then(|| self.known.change(call.ino, 0));
        let handle = if arg.flags.get() & FMODE_EXEC != 0 {
            // Who may execute a file need not be able to read it: the kernel can, and keeps it from them.
            self.fs.access(&call.caller, call.ino, MAY_EXECUTE)?;
            self.fs.open(&Caller::ROOT, call.ino, O_RDONLY)?
        } else {
            self.fs.open(&call.caller, call.ino, flags)?
        };
        if cut.is_some() {
            self.known.ends(call.ino, 0);
        }
        if flags & O_TRUNC != 0 && arg.open_flags.get() & OPEN_KILL_SUIDGID != 0 {
            let cleared =
                self.fs.fgetattr(handle).and_then(|attr| self.clear_set_id(call, call.ino, attr));
            if let Err(error) = cleared {
                self.fs.release(handle);
                return Err(error);
            }
        }
        // Of what is cut the kernel drops all pages itself.
        let asked = self.known.changes(call.ino);
        let mut attr = if cut.is_none() { self.fs.fgetattr(handle).ok() } else { None };
        if let Some(attr) = &mut attr {
            self.refresh(attr, For::Opening, asked, || None);
        }
        let fh = self.register(handle, call.ino, arg.flags.get());
        Ok(Answer::of(&self.open_out(fh, call.ino, attr.as_ref(), arg.flags.get())))
    }

    pub(super) fn create(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &CreateIn = args.take()?;
        let name = args.name()?;
        args.end()?;
        if self.is_virtual_name(call.ino, name) {
            return Err(Errno::EXIST);
        }
        let flags = arg.flags.get() & (OPEN_FLAGS | O_EXCL);
        let mode = arg.mode.get() & 0o7777;
        let caller = Caller { umask: arg.umask.get() & 0o777, ..call.caller };
        let (attr, handle) = self.fs.create(&caller, call.ino, name, mode, flags)?;
        let fh = self.register(handle, attr.ino, arg.flags.get());
        let entry = self.new_entry(call.ino, name, &attr);
        if flags & O_TRUNC != 0 {
            self.known.ends(attr.ino, 0);
        }
        let out = self.open_out(fh, attr.ino, Some(&attr), arg.flags.get());
        Ok(Answer::pair(&entry, &out))
    }

    /// The name that comes along has no meaning (Linux sends `/`).
    pub(super) fn tmpfile(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &CreateIn = args.take()?;
        args.no_name()?;
        args.end()?;
        let flags = arg.flags.get() & (OPEN_FLAGS | O_EXCL) & !O_TRUNC;
        let mode = arg.mode.get() & 0o7777;
        let caller = Caller { umask: arg.umask.get() & 0o777, ..call.caller };
        let (attr, handle) = self.fs.tmpfile(&caller, call.ino, mode, flags)?;
        let fh = self.register(handle, attr.ino, arg.flags.get());
        let entry = self.new_entry(call.ino, b"", &attr);
        let out = self.open_out(fh, attr.ino, Some(&attr), arg.flags.get());
        Ok(Answer::pair(&entry, &out))
    }

    pub(super) fn release(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ReleaseIn = args.take()?;
        args.end()?;
        let entry = self.unregister(arg.fh.get(), call.ino).ok_or(Errno::BADF)?;
        self.unlock_handle(call.ino, arg.fh.get());
        self.give_back(entry);
        Ok(Answer::Empty)
    }

    pub(super) fn read(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ReadIn = args.take()?;
        args.end()?;
        let opened = self.opened(arg.fh.get(), call.ino)?;
        let from = offset(arg.offset.get())?;
        let asked = (arg.size.get() as usize).min(IO_BYTES_MAX);
        self.known.fill(call.ino);
        if self.waiting == Waiting::Nobody
            && self.sees_no_cache()
            && let Some(later) = sink.hold(asked, false)
        {
            let (unique, used) = (call.unique, opened.used.clone());
            let counters = self.counters.clone();
            let end = move |read: Result<Vec<u8>>| {
                match read {
                    Ok(data) => {
                        let data = &data[..data.len().min(asked)];
                        counters.bytes_read.fetch_add(data.len() as u64, Ordering::Relaxed);
                        ended_with(later, unique, data);
                    }
                    Err(error) => counters.ended(later, unique, Err(error)),
                }
                drop(used);
            };
            self.fs.begin_read(opened.handle, from, asked, Box::new(end));
            return Ok(Answer::Silent);
        }
        let (len, room) = if let Some(mut pieces) = sink.pieces(asked) {
            let room = pieces.iter().map(|piece| piece.len()).sum();
            (self.fs.read_pieces(opened.handle, from, &mut pieces)?.min(room), room)
        } else {
            let room = sink.payload(asked);
            (self.fs.read(opened.handle, from, room)?.min(room.len()), room.len())
        };
        if len < room {
            self.known.ends(call.ino, from + len as u64);
        }
        self.counters.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Answer::Payload(len))
    }

    pub(super) fn write(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &WriteIn = args.take()?;
        let len = arg.size.get() as usize;
        let inline = if call.data.is_empty() { args.bytes(len)? } else { &[] };
        args.end()?;
        if !call.data.is_empty() && call.data.iter().map(|piece| piece.len()).sum::<usize>() != len
        {
            return Err(Errno::INVAL);
        }
        let opened = self.opened(arg.fh.get(), call.ino)?.writes()?;
        let at = offset(arg.offset.get())?;
        let flags = arg.write_flags.get();
        // Pages of a shared mapping: without a write-back cache the kernel keeps no others.
        let mapped = flags & WRITE_CACHE != 0;
        let append = arg.flags.get() & O_APPEND != 0 && !mapped;
        if self.waiting == Waiting::Nobody
            && self.sees_no_cache()
            && !mapped
            && flags & WRITE_KILL_SUIDGID == 0
            && let Some(later) = sink.hold(len, false)
        {
            let (unique, used) = (call.unique, opened.used.clone());
            let counters = self.counters.clone();
            let data = if call.data.is_empty() { inline.to_vec() } else { gather(call.data) };
            let end = move |written: Result<Written>| {
                let size = written.and_then(|w| u32::try_from(w.len.min(len)).or(Err(Errno::IO)));
                match size {
                    Ok(size) => {
                        counters.bytes_written.fetch_add(size.into(), Ordering::Relaxed);
                        let out = WriteOut { size: size.into(), ..WriteOut::default() };
                        ended_with(later, unique, out.as_bytes());
                    }
                    Err(error) => counters.ended(later, unique, Err(error)),
                }
                drop(used);
            };
            self.fs.begin_write(opened.handle, at, data, append, Box::new(end));
            return Ok(Answer::Silent);
        }
        let _change = self.known.change(call.ino, at.saturating_add(len as u64));
        let written = if mapped {
            let gathered = gather(call.data);
            let data = if call.data.is_empty() { inline } else { &gathered };
            self.fs.write_back(opened.handle, at, data)?
        } else if call.data.is_empty() {
            self.fs.write(opened.handle, at, inline, append)?
        } else {
            self.fs.write_pieces(opened.handle, at, call.data, append)?
        };
        self.counters.bytes_written.fetch_add(written.len as u64, Ordering::Relaxed);
        self.note_rhythm(arg.fh.get(), false);
        let misplaced = append && written.offset != at;
        if (opened.direct || opened.appends && misplaced)
            && !mapped
            && written.len > 0
            && let Some(kernel) = self.kernel.get()
        {
            // Which is right here: a direct write holds no pages, and who holds some (whoever reads them in, or
            // writes them back) does not wait for direct writes.
            let part = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            kernel.inode(call.ino, part(written.offset), part(written.len as u64));
        }
        if misplaced {
            // Somebody else has made the file longer than the kernel knew, or shorter: its cached pages hold our data
            // in the wrong place. The file is right; what it caches must go.
            self.forget_size(call.ino);
        }
        if flags & WRITE_KILL_SUIDGID != 0 {
            let attr = self.fs.fgetattr(opened.handle)?;
            if self.clear_set_id(call, call.ino, attr)?.mode != attr.mode {
                self.forget_mode(call.ino);
            }
        }
        let size = u32::try_from(written.len).map_err(|_| Errno::IO)?;
        Ok(Answer::of(&WriteOut { size: size.into(), ..WriteOut::default() }))
    }

    pub(super) fn fsync(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &FsyncIn = args.take()?;
        args.end()?;
        let handle = self.opened(arg.fh.get(), call.ino)?.handle;
        self.note_rhythm(arg.fh.get(), true);
        let data_only = arg.fsync_flags.get() & FSYNC_FDATASYNC != 0;
        let Some(later) = self.hold_sync(sink) else {
            self.fs.fsync(handle, data_only)?;
            return Ok(Answer::Empty);
        };
        let (unique, used) = (call.unique, self.used(arg.fh.get())?);
        let counters = self.counters.clone();
        let end = move |done| {
            counters.ended(later, unique, done);
            drop(used);
        };
        if self.waiting == Waiting::Nobody {
            self.fs.begin_fsync(handle, data_only, Box::new(end));
        } else {
            let fs = self.fs.clone();
            self.syncs.push(Box::new(move || end(fs.fsync(handle, data_only))));
        }
        Ok(Answer::Silent)
    }

    /// The way back of a sync for which this thread need not wait.
    fn hold_sync(&self, sink: &mut dyn ReplySink) -> Option<Box<dyn LaterReply>> {
        match self.waiting {
            Waiting::Each => None,
            // Who is alone does better without another thread.
            Waiting::Together => sink.hold(0, true),
            Waiting::Nobody => sink.hold(0, false),
        }
    }

    /// Whether no kernel keeps anything that a read or write would have to be compared with.
    fn sees_no_cache(&self) -> bool {
        !self.tends_pages && self.kernel.get().is_none()
    }

    fn sync_inode(
        &self,
        call: &Call<'_>,
        ino: InodeId,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let Some(later) = self.hold_sync(sink) else {
            self.fs.fsync_inode(&call.caller, ino)?;
            return Ok(Answer::Empty);
        };
        let (unique, counters) = (call.unique, self.counters.clone());
        if self.waiting == Waiting::Nobody {
            let fs = self.fs.clone();
            let used = self.syncs.at_last(Box::new(move || drop(fs)));
            let end = move |done| {
                counters.ended(later, unique, done);
                drop(used);
            };
            self.fs.begin_fsync_inode(&call.caller, ino, Box::new(end));
        } else {
            let (fs, uid, gid, pid) =
                (self.fs.clone(), call.caller.uid, call.caller.gid, call.caller.pid);
            self.syncs.push(Box::new(move || {
                let caller = Caller { uid, gid, groups: &[], pid, umask: 0 };
                counters.ended(later, unique, fs.fsync_inode(&caller, ino));
            }));
        }
        Ok(Answer::Silent)
    }

    pub(super) fn fsyncdir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let _: &FsyncIn = args.take()?;
        args.end()?;
        self.sync_inode(call, call.ino, sink)
    }

    pub(super) fn syncfs(
        &self,
        call: &Call<'_>,
        _: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        self.sync_inode(call, InodeId::ROOT, sink)
    }

    /// Set-id bits end when content changes; for these calls the kernel does not say that we shall see to it.
    fn end_set_id(&self, call: &Call<'_>, ino: InodeId, handle: client::fs::Handle) -> Result<()> {
        if call.caller.uid == 0 {
            return Ok(());
        }
        let attr = self.fs.fgetattr(handle)?;
        if attr.mode & 0o6000 != 0 && self.clear_set_id(call, ino, attr)?.mode != attr.mode {
            self.forget_mode(ino);
        }
        Ok(())
    }

    pub(super) fn fallocate(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &FallocateIn = args.take()?;
        args.end()?;
        let opened = self.opened(arg.fh.get(), call.ino)?.writes()?;
        let (at, len) = (offset(arg.offset.get())?, arg.length.get());
        let end = at.checked_add(len).ok_or(Errno::FBIG)?;
        if len == 0 {
            return Err(Errno::INVAL);
        }
        offset(end).map_err(|_| Errno::FBIG)?;
        let _change = self.known.change(call.ino, end);
        self.end_set_id(call, call.ino, opened.handle)?;
        self.fs.fallocate(opened.handle, arg.mode.get(), at, len)?;
        Ok(Answer::Empty)
    }

    /// What the file system does not copy itself is copied here. Told EOPNOTSUPP the kernel would do it, from
    /// the pages that it has of the source, which it does not ask about.
    pub(super) fn copy_file_range(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &CopyFileRangeIn = args.take()?;
        args.end()?;
        let from = self.opened(arg.fh_in.get(), call.ino)?;
        let to = self.opened(arg.fh_out.get(), InodeId(arg.nodeid_out.get()))?.writes()?;
        let (from_offset, to_offset) = (offset(arg.off_in.get())?, offset(arg.off_out.get())?);
        if arg.flags.get() != 0 {
            return Err(Errno::INVAL);
        }
        // What is done must fit the answer.
        let len = arg.len.get().min(u64::from(u32::MAX) & !0xfff);
        for at in [from_offset, to_offset] {
            at.checked_add(len).filter(|end| offset(*end).is_ok()).ok_or(Errno::FBIG)?;
        }
        let _change = self.known.change(to.ino, 0);
        self.end_set_id(call, InodeId(arg.nodeid_out.get()), to.handle)?;
        let copy = CopyRange { from: from.handle, from_offset, to: to.handle, to_offset, len };
        let copied = match self.fs.copy_range(&copy) {
            Err(Errno::OPNOTSUPP) => self.copy_here(&copy),
            copied => copied,
        };
        let size = u32::try_from(copied?).map_err(|_| Errno::IO)?;
        drop(self.known.change(to.ino, to_offset + u64::from(size)));
        self.counters.bytes_copied.fetch_add(u64::from(size), Ordering::Relaxed);
        Ok(Answer::of(&WriteOut { size: size.into(), ..WriteOut::default() }))
    }

    /// Copies some of it.
    fn copy_here(&self, copy: &CopyRange) -> Result<u64> {
        let len = usize::try_from(copy.len).map_or(IO_BYTES_MAX, |len| len.min(IO_BYTES_MAX));
        let mut bytes = vec![0; len];
        let read = self.fs.read(copy.from, copy.from_offset, &mut bytes)?.min(len);
        if read == 0 {
            return Ok(0);
        }
        let written = self.fs.write(copy.to, copy.to_offset, &bytes[..read], false)?;
        Ok(written.len as u64)
    }

    pub(super) fn lseek(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &LseekIn = args.take()?;
        args.end()?;
        let opened = self.opened(arg.fh.get(), call.ino)?;
        let whence = match arg.whence.get() {
            SEEK_DATA => Whence::Data,
            SEEK_HOLE => Whence::Hole,
            _ => return Err(Errno::INVAL),
        };
        let from = offset(arg.offset.get()).map_err(|_| Errno::NXIO)?;
        let found = self.fs.lseek(opened.handle, from, whence)?;
        Ok(Answer::of(&LseekOut { offset: found.into() }))
    }

    /// The handle of a directory keeps it when it is removed, and is asked for nothing. Not answered with ENOSYS: the
    /// kernel would then cache listings by modification time, whose clock may be too coarse to tell.
    /// Who has opened one may read it, also after giving up rights.
    pub(super) fn opendir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let _: &OpenIn = args.take()?;
        args.end()?;
        let fh = match self.fs.open_dir(&call.caller, call.ino, MAY_READ) {
            Ok(handle) => self.register(handle, call.ino, O_RDONLY),
            Err(Errno::NOSYS) => {
                self.fs.access(&call.caller, call.ino, MAY_READ)?;
                0
            }
            Err(error) => return Err(error),
        };
        Ok(Answer::of(&OpenOut { fh: fh.into(), ..OpenOut::default() }))
    }

    pub(super) fn releasedir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ReleaseIn = args.take()?;
        args.end()?;
        if let Some(entry) = self.unregister(arg.fh.get(), call.ino) {
            self.give_back(entry);
        }
        Ok(Answer::Empty)
    }

    pub(super) fn readdir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ReadIn = args.take()?;
        args.end()?;
        let room = sink.payload((arg.size.get() as usize).min(IO_BYTES_MAX));
        let mut listing = Listing { room, used: 0 };
        self.fs.readdir(&Caller::ROOT, call.ino, arg.offset.get(), &mut |entry| {
            self.is_virtual_name(call.ino, entry.name) || listing.push(None, entry)
        })?;
        Ok(Answer::Payload(listing.used))
    }

    pub(super) fn readdirplus(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ReadIn = args.take()?;
        args.end()?;
        let size = (arg.size.get() as usize).min(IO_BYTES_MAX);
        // Two steps, since the file system may not be called back from within its own callback.
        let mut found: Vec<Listed> = Vec::new();
        let mut left = size;
        self.fs.readdir(&Caller::ROOT, call.ino, arg.offset.get(), &mut |entry| {
            if self.is_virtual_name(call.ino, entry.name) {
                return true;
            }
            let Some(rest) = left.checked_sub(size_of::<EntryOut>() + padded(entry.name.len()))
            else {
                return false;
            };
            left = rest;
            let DirEntry { ino, kind, next, name } = *entry;
            found.push(Listed { ino, kind, next, name: name.into(), attr: None });
            true
        })?;
        for listed in &mut found {
            listed.attr = self.attr_of_listed(&call.caller, call.ino, &listed.name);
        }
        // From here on the kernel is about to know them, and nothing may wait.
        let mut listing = Listing { room: sink.payload(size), used: 0 };
        for Listed { ino, kind, next, name, attr } in &found {
            let plus = attr.as_ref().and_then(|attr| self.entry(call.ino, name, attr));
            let plus = plus.unwrap_or_default();
            let entry = DirEntry { ino: *ino, kind: *kind, next: *next, name };
            let told = InodeId(plus.nodeid.get());
            if !listing.push(Some(&plus), &entry) {
                self.uncount_lookup(told, 1);
                break;
            }
        }
        Ok(Answer::Payload(listing.used))
    }

    /// Attributes of a listed name. None for the dots and for a name that vanished: the
    /// kernel then takes the name and looks it up if it is asked.
    fn attr_of_listed(&self, caller: &Caller<'_>, dir: InodeId, name: &[u8]) -> Option<Attr> {
        if name == b"." || name == b".." {
            return None;
        }
        self.fs.lookup(caller, dir, name).ok()
    }
}

/// The inodes that a reply to READDIRPLUS tells the kernel of.
pub(super) fn told_by(reply: &[u8]) -> impl Iterator<Item = InodeId> {
    let mut rest = reply;
    std::iter::from_fn(move || {
        let (entry, after) = EntryOut::read_from_prefix(rest).ok()?;
        let (dirent, _) = Dirent::read_from_prefix(after).ok()?;
        rest = after.get(padded(dirent.namelen.get() as usize)..)?;
        Some(InodeId(entry.nodeid.get()))
    })
    .filter(|ino| *ino != InodeId::NONE)
}

/// A listed name, with the attributes of what it leads to.
struct Listed {
    ino: InodeId,
    kind: u32,
    next: u64,
    name: Box<[u8]>,
    attr: Option<Attr>,
}

/// Directory entries packed into a reply.
pub(super) struct Listing<'a> {
    /// Where they go.
    pub room: &'a mut [u8],
    /// Bytes used.
    pub used: usize,
}

impl Listing<'_> {
    /// Adds an entry, with its attributes for READDIRPLUS; false when it does not fit.
    pub fn push(&mut self, plus: Option<&EntryOut>, entry: &DirEntry<'_>) -> bool {
        let plus_len = plus.map_or(0, |_| size_of::<EntryOut>());
        let len = plus_len + padded(entry.name.len());
        let Some(to) = self.room.get_mut(self.used..).and_then(|rest| rest.get_mut(..len)) else {
            return false;
        };
        let Ok(namelen) = u32::try_from(entry.name.len()) else { return false };
        let dirent = Dirent {
            ino: entry.ino.0.into(),
            off: entry.next.into(),
            namelen: namelen.into(),
            kind: (entry.kind >> 12).into(),
        };
        to.fill(0);
        if let Some(plus) = plus {
            to[..plus_len].copy_from_slice(plus.as_bytes());
        }
        let name_at = plus_len + size_of::<Dirent>();
        to[plus_len..name_at].copy_from_slice(dirent.as_bytes());
        to[name_at..name_at + entry.name.len()].copy_from_slice(entry.name);
        self.used += len;
        true
    }
}
