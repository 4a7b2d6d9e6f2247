//! Reading, writing and what goes with it.

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use base::InodeId;
use client::fs::{S_IFDIR, S_IFREG, SetAttr, Whence};

use super::both::File;
use super::{Reply, limit, regular, served};
use crate::entry::Regs;
use crate::format::{Ofd, state};
use crate::fsys::{caller, fs};
use crate::mem;
use crate::path::{self, Path, Stop};
use crate::session;
use crate::sys::{self, at, err, nr, o};
use crate::table::{self, InUse};

/// The kernel's MAX_RW_COUNT.
const COUNT_MAX: usize = 0x7fff_f000;
/// Vectors are gathered up to this; larger ones are written one by one.
const GATHER_MAX: usize = 1 << 20;
/// IOV_MAX.
const IOV_MAX: usize = 1024;
const OFFSET_MAX: u64 = i64::MAX as u64;

#[inline(always)]
fn may_read(ofd: &Ofd) -> Result<u32, Stop> {
    let flags = ofd.flags.load(Ordering::Relaxed);
    if flags & o::ACCMODE == o::WRONLY { Err(Stop::Error(err::BADF)) } else { Ok(flags) }
}

#[inline(always)]
fn may_write(ofd: &Ofd) -> Result<u32, Stop> {
    let flags = ofd.flags.load(Ordering::Relaxed);
    if flags & o::ACCMODE == 0 { Err(Stop::Error(err::BADF)) } else { Ok(flags) }
}

/// A file offset from the application, from where `len` bytes do not reach beyond all offsets.
#[inline(always)]
fn offset(at: usize, len: usize) -> Result<u64, Stop> {
    let at = at as u64;
    if at > OFFSET_MAX || len as u64 > OFFSET_MAX - at {
        Err(Stop::Error(err::INVAL))
    } else {
        Ok(at)
    }
}

/// How much to read or write: the whole of what was asked must be the application's own.
#[inline(always)]
fn count(r: &Regs) -> Result<usize, Stop> {
    mem::in_range(r.rsi, r.rdx)?;
    Ok(r.rdx.min(COUNT_MAX))
}

/// A regular file to be written.
#[inline(always)]
fn writable(fd: usize) -> Result<(InUse, u32), Stop> {
    // A directory can only be open for reading.
    let file = regular(fd).map_err(not_writable)?;
    let flags = may_write(file.ofd())?;
    Ok((file, flags))
}

fn not_writable(stop: Stop) -> Stop {
    if stop == Stop::Error(err::ISDIR) { Stop::Error(err::BADF) } else { stop }
}

/// Of a directory, after what is wrong with the call itself.
#[cold]
fn not_readable(stop: Stop, r: &Regs, at: usize) -> Stop {
    if stop != Stop::Error(err::ISDIR) {
        return stop;
    }
    count(r).and_then(|len| offset(at, len)).err().unwrap_or(stop)
}

/// For a buffer that cannot be filled: that does not matter at the end of the file.
#[cold]
fn at_end<'a>(file: &InUse, at: u64, buf: usize, len: usize) -> Result<&'a mut [u8], Stop> {
    mem::in_range(buf, len)?;
    match fs()?.read(file.handle()?, at, &mut [0])? {
        0 => Ok(&mut []),
        _ => Err(Stop::Error(err::FAULT)),
    }
}

/// Buffers up to this are looked at as a whole before they are filled.
const PROBED: usize = 1 << 20;

/// How much of a larger one a read at `at` may fill as the file is now: to look at more of it would take memory for it.
fn reach(file: &InUse, at: u64, len: usize) -> Result<usize, Stop> {
    if len <= PROBED {
        return Ok(len);
    }
    let left = fs()?.fgetattr(file.handle()?)?.size.saturating_sub(at);
    Ok(len.min(usize::try_from(left.max(1)).unwrap_or(usize::MAX)))
}

/// `pread64`.
pub fn pread(r: &mut Regs) -> Reply {
    if (r.r10 as isize) < 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let file = regular(r.rdi).map_err(|stop| not_readable(stop, r, r.r10))?;
    may_read(file.ofd())?;
    let len = count(r)?;
    let at = offset(r.r10, len)?;
    let len = reach(&file, at, len)?;
    let buf = mem::sink(r.rsi, len).or_else(|_| at_end(&file, at, r.rsi, len))?;
    Ok(fs()?.read(file.handle()?, at, buf)? as isize)
}

/// `pwrite64`. On an O_APPEND file Linux appends.
pub fn pwrite(r: &mut Regs) -> Reply {
    if (r.r10 as isize) < 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let (file, flags) = writable(r.rdi)?;
    let len = count(r)?;
    let at = offset(r.r10, len)?;
    let data = mem::source_some(r.rsi, len)?;
    if data.is_empty() {
        return Ok(0);
    }
    let data = limit::cut(&file, at, flags & o::APPEND != 0, data)?;
    Ok(fs()?.write(file.handle()?, at, data, flags & o::APPEND != 0)?.len as isize)
}

/// `read`.
pub fn read(r: &mut Regs) -> Reply {
    let file = regular(r.rdi).map_err(|stop| not_readable(stop, r, 0))?;
    may_read(file.ofd())?;
    let len = count(r)?;
    let buf = (len <= PROBED).then(|| mem::sink(r.rsi, len));
    let handle = file.handle()?;
    let lock = file.lock();
    let ofd = still(&file)?;
    let at = offset(ofd.offset.load(Ordering::Relaxed) as usize, len)?;
    let buf = match buf {
        Some(buf) => buf,
        None => mem::sink(r.rsi, reach(&file, at, len)?),
    };
    let buf = buf.or_else(|_| at_end(&file, at, r.rsi, len))?;
    let got = fs()?.read(handle, at, buf)?;
    ofd.offset.store(at + got as u64, Ordering::Relaxed);
    drop(lock);
    Ok(got as isize)
}

/// `write`.
pub fn write(r: &mut Regs) -> Reply {
    let (file, flags) = writable(r.rdi)?;
    let len = count(r)?;
    let data = mem::source_some(r.rsi, len)?;
    if data.is_empty() {
        return Ok(0);
    }
    let handle = file.handle()?;
    let lock = file.lock();
    let ofd = still(&file)?;
    let at = offset(ofd.offset.load(Ordering::Relaxed) as usize, len)?;
    let data = limit::cut(&file, at, flags & o::APPEND != 0, data)?;
    let done = fs()?.write(handle, at, data, flags & o::APPEND != 0)?;
    ofd.offset.store(done.offset + done.len as u64, Ordering::Relaxed);
    drop(lock);
    Ok(done.len as isize)
}

/// Under the offset's lock: the description may have left for the kernel while we waited.
#[inline(always)]
pub(super) fn still(file: &InUse) -> Result<&'static Ofd, Stop> {
    let ofd = file.ofd();
    match ofd.state.load(Ordering::Acquire) {
        state::FILE | state::DIR => Ok(ofd),
        // The next look at the number takes it over.
        _ => Err(Stop::Again),
    }
}

/// The calls of this module that are not in a hurry.
pub fn other(r: &mut Regs) -> Reply {
    match r.rax {
        nr::LSEEK => lseek(r),
        nr::READV => vector(r, false, None),
        nr::WRITEV => vector(r, true, None),
        nr::PREADV => vector(r, false, Some(r.r10)),
        nr::PWRITEV => vector(r, true, Some(r.r10)),
        nr::PREADV2 | nr::PWRITEV2 => vector2(r),
        nr::FSYNC | nr::FDATASYNC | nr::SYNC_FILE_RANGE => sync(r),
        nr::SYNCFS | nr::SYNC => sync_all(r),
        nr::FTRUNCATE => ftruncate(r),
        nr::TRUNCATE => truncate(r),
        nr::FALLOCATE => fallocate(r),
        nr::GETDENTS64 => getdents(r),
        nr::FADVISE64 | nr::READAHEAD => advise(r),
        _ => Err(Stop::Kernel),
    }
}

fn lseek(r: &Regs) -> Reply {
    let file = served(r.rdi)?;
    let (by, whence) = (r.rsi as i64, r.rdx as u32);
    let _lock = file.lock();
    let ofd = still(&file)?;
    let dir = ofd.state.load(Ordering::Relaxed) == state::DIR;
    let base = match whence {
        0 => 0,
        1 => ofd.offset.load(Ordering::Relaxed) as i64,
        2 if dir => return Err(Stop::Error(err::INVAL)),
        2 => fs()?.fgetattr(file.handle()?)?.size as i64,
        3 | 4 if !dir => {
            let from = u64::try_from(by).map_err(|_| Stop::Error(-6))?;
            let whence = if whence == 3 { Whence::Data } else { Whence::Hole };
            fs()?.lseek(file.handle()?, from, whence)? as i64
        }
        _ => return Err(Stop::Error(err::INVAL)),
    };
    let to = if whence >= 3 { Some(base) } else { base.checked_add(by) };
    let to = to.filter(|t| *t >= 0).ok_or(err::INVAL)?;
    ofd.offset.store(to as u64, Ordering::Relaxed);
    Ok(to as isize)
}

fn vectors(at: usize, count: usize) -> Result<(Vec<[usize; 2]>, usize), Stop> {
    if count > IOV_MAX {
        return Err(Stop::Error(err::INVAL));
    }
    let mut list = Vec::with_capacity(count);
    let mut total = 0usize;
    for i in 0..count {
        let mut iov: [usize; 2] = mem::get(at.wrapping_add(i * 16))?;
        if iov[1] > isize::MAX as usize {
            return Err(Stop::Error(err::INVAL));
        }
        mem::in_range(iov[0], iov[1])?;
        iov[1] = iov[1].min(COUNT_MAX - total);
        total += iov[1];
        list.push(iov);
    }
    Ok((list, total))
}

/// Where a transfer of a list begins, and who appends.
#[derive(Clone, Copy)]
struct Place {
    /// None: the file's own offset.
    at: Option<usize>,
    /// RWF_APPEND, RWF_NOAPPEND.
    append: Option<bool>,
}

fn vector(r: &Regs, write: bool, at: Option<usize>) -> Reply {
    vector_at(r, write, Place { at, append: None })
}

fn vector_at(r: &Regs, write: bool, place: Place) -> Reply {
    if place.at.is_some_and(|at| (at as isize) < 0) {
        return Err(Stop::Error(err::INVAL));
    }
    let file = served(r.rdi)?;
    let flags = if write { may_write(file.ofd())? } else { may_read(file.ofd())? };
    let (list, total) = vectors(r.rsi, r.rdx as u32 as usize)?;
    if total == 0 {
        return Ok(0);
    }
    if file.ofd().state.load(Ordering::Acquire) == state::DIR {
        return Err(Stop::Error(err::ISDIR));
    }
    let append = write && place.append.unwrap_or(flags & o::APPEND != 0);
    if let Some(at) = place.at {
        return Ok(transfer(&file, &list, write, offset(at, total)?, append)?.0);
    }
    let _lock = file.lock();
    let ofd = still(&file)?;
    let at = offset(ofd.offset.load(Ordering::Relaxed) as usize, total)?;
    let (done, end) = transfer(&file, &list, write, at, append)?;
    ofd.offset.store(end, Ordering::Relaxed);
    Ok(done)
}

/// `preadv2`, `pwritev2`: offset -1 is the file's; RWF_APPEND appends, RWF_DSYNC and RWF_SYNC sync.
fn vector2(r: &Regs) -> Reply {
    const HIPRI: u32 = 1;
    const DSYNC: u32 = 2;
    const SYNC: u32 = 4;
    const NOWAIT: u32 = 8;
    const APPEND: u32 = 16;
    const NOAPPEND: u32 = 32;
    let write = r.rax == nr::PWRITEV2;
    let flags = r.r9 as u32;
    if (r.r10 as isize) < -1 {
        return Err(Stop::Error(err::INVAL));
    }
    let file = match served(r.rdi) {
        Err(Stop::Kernel) if write && flags & !(HIPRI | DSYNC | SYNC) == APPEND => {
            return append_beside(r, flags & (DSYNC | SYNC) != 0);
        }
        file => file?,
    };
    if write {
        may_write(file.ofd())?
    } else {
        may_read(file.ofd())?
    };
    drop(file);
    if flags & !(HIPRI | DSYNC | SYNC | NOWAIT | APPEND | NOAPPEND) != 0 {
        return Err(Stop::Error(err::OPNOTSUPP));
    }
    let append = match flags & (APPEND | NOAPPEND) {
        0 => None,
        APPEND => Some(true),
        NOAPPEND => Some(false),
        _ => return Err(Stop::Error(err::INVAL)),
    };
    let at = if r.r10 == usize::MAX { None } else { Some(r.r10) };
    let ret = vector_at(r, write, Place { at, append })?;
    if write && flags & (DSYNC | SYNC) != 0 {
        fs()?.fsync(regular(r.rdi)?.handle()?, flags & SYNC == 0)?;
    }
    Ok(ret)
}

/// RWF_APPEND on a file of the volume that the kernel has: it tells no mount of the flag, and would write where it
/// believes that the file ends.
fn append_beside(r: &Regs, sync: bool) -> Reply {
    let file = if limit::is_set() { None } else { File::of(r.rdi)? };
    let file = file.filter(|file| matches!(file.flags & o::ACCMODE, o::WRONLY | o::RDWR));
    let Some(file) = file else { return Err(Stop::Kernel) };
    let (list, total) = vectors(r.rsi, r.rdx as u32 as usize)?;
    if total == 0 || total > GATHER_MAX {
        return Err(Stop::Kernel);
    }
    let all = gather(&list, total)?;
    let done = fs()?.write(file.handle, 0, &all, true)?;
    if r.r10 == usize::MAX {
        sys::call3(nr::LSEEK, r.rdi, done.offset as usize + done.len, 0);
    }
    if sync {
        fs()?.fsync(file.handle, false)?;
    }
    Ok(done.len as isize)
}

/// What a list says, up to what cannot be read.
fn gather(list: &[[usize; 2]], total: usize) -> Result<Vec<u8>, Stop> {
    let mut all = Vec::with_capacity(total);
    for [base, len] in list {
        let before = all.len();
        match mem::source_some(*base, *len) {
            Ok(part) => all.extend_from_slice(part),
            Err(_) if !all.is_empty() => break,
            Err(fault) => return Err(fault.into()),
        }
        if all.len() < before + len {
            break;
        }
    }
    Ok(all)
}

/// Bytes done and the offset behind them.
fn transfer(
    file: &InUse,
    list: &[[usize; 2]],
    write: bool,
    at: u64,
    append: bool,
) -> Result<(isize, u64), Stop> {
    let total: usize = list.iter().map(|v| v[1]).sum();
    let (fs, handle) = (fs()?, file.handle()?);
    if write && total <= GATHER_MAX && (list.len() > 1 || append) {
        // One write, so that no other writer comes between the parts.
        let all = gather(list, total)?;
        if all.is_empty() {
            return Ok((0, at));
        }
        let all = limit::cut(file, at, append, &all)?;
        let done = fs.write(handle, at, all, append)?;
        return Ok((done.len as isize, done.offset + done.len as u64));
    }
    let (mut at, mut sum) = (at, 0);
    for [base, len] in list.iter().filter(|v| v[1] > 0) {
        let step = if write {
            mem::source_some(*base, *len).map_err(Stop::from).and_then(|data| {
                let data = limit::cut(file, at, append, data)?;
                // Each at the end of the file as it is then: others append in between.
                let done = fs.write(handle, at, data, append)?;
                at = done.offset;
                Ok(done.len)
            })
        } else {
            reach(file, at, *len)
                .and_then(|len| mem::sink(*base, len).or_else(|_| at_end(file, at, *base, len)))
                .and_then(|buf| Ok(fs.read(handle, at, buf)?))
        };
        match step {
            Ok(n) => {
                at += n as u64;
                sum += n as isize;
                if n < *len {
                    break;
                }
            }
            // What was done before the failure counts.
            Err(_) if sum > 0 => break,
            Err(stop) => return Err(stop),
        }
    }
    Ok((sum, at))
}

/// What of a descriptor of the kernel's is ours: names in a directory that it has open, and whatever else this
/// process did to the volume itself, of which the mount knows nothing.
fn sync_beside(fd: usize) -> Result<(), Stop> {
    let inside = || sys::fstat(fd as i32).as_ref().is_some_and(session::is_the_mounts);
    if crate::fsys::connected() && !table::in_vfork() && inside() {
        fs()?.fsync_inode(&caller(), InodeId::ROOT)?;
    }
    Ok(())
}

fn sync(r: &Regs) -> Reply {
    let file = match served(r.rdi) {
        Err(Stop::Kernel) if r.rax != nr::SYNC_FILE_RANGE => {
            sync_beside(r.rdi)?;
            return Err(Stop::Kernel);
        }
        file => file?,
    };
    let fs = fs()?;
    if r.rax == nr::SYNC_FILE_RANGE {
        let (at, len) = (r.rsi as i64, r.rdx as i64);
        let wrong = at < 0 || len < 0 || at.checked_add(len).is_none();
        if wrong || r.r10 & !7 != 0 {
            return Err(Stop::Error(err::INVAL));
        }
    }
    if file.ofd().state.load(Ordering::Acquire) == state::DIR {
        let ino = crate::fsys::shown(file.ofd())?;
        fs.fsync_inode(&caller(), ino)?;
    } else {
        fs.fsync(file.handle()?, r.rax != nr::FSYNC)?;
    }
    Ok(0)
}

/// `syncfs` on ours is ours; `sync` also goes on to the kernel.
fn sync_all(r: &Regs) -> Reply {
    if r.rax == nr::SYNCFS
        && let Err(stop) = served(r.rdi)
    {
        if let Stop::Kernel = stop {
            sync_beside(r.rdi)?;
        }
        return Err(stop);
    }
    if crate::fsys::connected() {
        fs()?.fsync_inode(&caller(), InodeId::ROOT)?;
    }
    if r.rax == nr::SYNC { Err(Stop::Kernel) } else { Ok(0) }
}

fn ftruncate(r: &Regs) -> Reply {
    let size = offset(r.rsi, 0)?;
    let file = regular(r.rdi).map_err(|s| match s {
        Stop::Error(err::ISDIR) => Stop::Error(err::INVAL),
        s => s,
    })?;
    if file.ofd().flags.load(Ordering::Relaxed) & o::ACCMODE == 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let handle = file.handle()?;
    limit::may_become(size, || Ok(fs()?.fgetattr(handle)?.size))?;
    let set = SetAttr { size: Some(size), handle: Some(handle), ..SetAttr::default() };
    fs()?.setattr(&caller(), crate::fsys::shown(file.ofd())?, &set)?;
    Ok(0)
}

fn truncate(r: &Regs) -> Reply {
    let size = offset(r.rsi, 0)?;
    let path = Path::get(r.rdi)?;
    let attr = path::resolve(at::FDCWD, &path, true)?.exists()?;
    match attr.kind() {
        S_IFREG => {}
        S_IFDIR => return Err(Stop::Error(err::ISDIR)),
        _ => return Err(Stop::Error(err::INVAL)),
    }
    if crate::session::kernel_owned(attr.ino.0) {
        // Mapped or being executed: the kernel must cut its pages off, or refuse.
        return Err(Stop::Kernel);
    }
    if limit::is_set() {
        fs()?.access(&caller(), attr.ino, 2)?;
        limit::may_become(size, || Ok(attr.size))?;
    }
    fs()?.setattr(&caller(), attr.ino, &SetAttr { size: Some(size), ..SetAttr::default() })?;
    Ok(0)
}

/// What the kernel passes on to no mount: COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE.
const KEPT_BACK: u32 = 8 | 0x20 | 0x40;

/// Of a file that the kernel has.
fn fallocate_there(r: &Regs) -> Reply {
    let (mode, at, len) = (r.rsi as u32, r.rdx as u64, r.r10 as u64);
    let ret = sys::call4(nr::FALLOCATE, r.rdi, r.rsi, r.rdx, r.r10);
    if ret != err::OPNOTSUPP {
        return Ok(ret);
    }
    let Some(file) = File::of(r.rdi)? else { return Ok(ret) };
    if file.flags & o::ACCMODE == 0 {
        return Err(Stop::Error(err::BADF));
    }
    if mode & 0x20 != 0 {
        let now = fs()?.fgetattr(file.handle)?.size;
        limit::may_become(now.saturating_add(len), || Ok(now))?;
    }
    fs()?.fallocate(file.handle, mode, at, len)?;
    // The kernel asks for the size again.
    sys::fstat(r.rdi as i32);
    Ok(0)
}

fn fallocate(r: &Regs) -> Reply {
    const KEEP_SIZE: u32 = 1;
    let mode = r.rsi as u32;
    let file = match served(r.rdi) {
        Err(Stop::Kernel) if mode & KEPT_BACK != 0 => return fallocate_there(r),
        file => file?,
    };
    let (mode, at, len) = (r.rsi as u32, r.rdx as i64, r.r10 as i64);
    if at < 0 || len <= 0 {
        return Err(Stop::Error(err::INVAL));
    }
    // One of: allocate, punch (keeps the size), collapse and insert (change it), zero, unshare.
    let known = match (mode & !KEEP_SIZE, mode & KEEP_SIZE != 0) {
        (0 | 0x10 | 0x40, _) => true,
        (2, keeps) => keeps,
        (8 | 0x20, keeps) => !keeps,
        _ => false,
    };
    if !known {
        return Err(Stop::Error(err::OPNOTSUPP));
    }
    may_write(file.ofd())?;
    if at.checked_add(len).is_none() {
        return Err(Stop::Error(err::FBIG));
    }
    if mode & KEEP_SIZE == 0 {
        limit::may_become((at + len) as u64, || Ok(fs()?.fgetattr(file.handle()?)?.size))?;
    }
    fs()?.fallocate(file.handle()?, mode, at as u64, len as u64)?;
    Ok(0)
}

/// Advice is taken, and ignored.
fn advise(r: &Regs) -> Reply {
    const ADVICE_MAX: u32 = 5;
    let file = served(r.rdi)?;
    if r.rax == nr::READAHEAD {
        may_read(file.ofd())?;
        let dir = file.ofd().state.load(Ordering::Acquire) == state::DIR;
        return if dir { Err(Stop::Error(err::INVAL)) } else { Ok(0) };
    }
    let wrong = (r.rdx as isize) < 0 || r.r10 as u32 > ADVICE_MAX;
    if wrong { Err(Stop::Error(err::INVAL)) } else { Ok(0) }
}

fn getdents(r: &Regs) -> Reply {
    let file = served(r.rdi)?;
    let ofd = file.ofd();
    if ofd.state.load(Ordering::Relaxed) != state::DIR {
        return Err(Stop::Error(err::NOTDIR));
    }
    let out = mem::sink(r.rsi, (r.rdx as i32).clamp(0, 1 << 20) as usize)?;
    let _lock = file.lock();
    let ofd = still(&file)?;
    let (mut used, mut full, mut next) = (0, false, ofd.offset.load(Ordering::Relaxed));
    let ino = crate::fsys::shown(ofd)?;
    fs()?.readdir(&caller(), ino, next, &mut |entry| {
        // linux_dirent64: inode, cookie, record length, type, name with NUL.
        let len = (19 + entry.name.len() + 1 + 7) & !7;
        if len > out.len() - used {
            full = true;
            return false;
        }
        let record = &mut out[used..used + len];
        record.fill(0);
        record[..8].copy_from_slice(&entry.ino.0.to_le_bytes());
        record[8..16].copy_from_slice(&entry.next.to_le_bytes());
        record[16..18].copy_from_slice(&(len as u16).to_le_bytes());
        record[18] = (entry.kind >> 12) as u8;
        record[19..19 + entry.name.len()].copy_from_slice(entry.name);
        used += len;
        next = entry.next;
        true
    })?;
    if used == 0 && full {
        return Err(Stop::Error(err::INVAL));
    }
    ofd.offset.store(next, Ordering::Relaxed);
    Ok(used as isize)
}
