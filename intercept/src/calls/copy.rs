//! Copies inside the kernel: between two files of ours the service copies if they are long, else it
//! is done by reading and writing when both ends are files and one is ours; otherwise our end becomes
//! the kernel's. And FICLONE.

use alloc::vec;
use alloc::vec::Vec;
use client::fs::{CopyRange, S_IFDIR, S_IFMT, S_IFREG};
use core::sync::atomic::Ordering;

use super::both::File;
use super::data::still;
use super::{Reply, limit, regular, served, to_kernel};
use crate::entry::Regs;
use crate::format::state;
use crate::fsys::fs;
use crate::mem;
use crate::path::Stop;
use crate::session;
use crate::sys::{self, err, nr, o};
use crate::table::{self, InUse};

const F_GETFL: usize = 3;
const SEEK_CUR: usize = 1;
/// EXDEV
const XDEV: isize = -18;
/// Copied at a time.
const STEP: usize = 128 << 10;
/// Copied by one call at most; the application asks again.
const ONCE: usize = 64 << 20;

fn ours(fd: usize) -> bool {
    table::index(table::entry(fd as i32)).is_some()
}

fn plain_file(fd: usize) -> bool {
    match table::index(table::entry(fd as i32)) {
        Some(index) => table::ofd(index).state.load(Ordering::Acquire) != state::DIR,
        None => sys::fstat(fd as i32).is_some_and(|s| s.mode & S_IFMT == S_IFREG),
    }
}

/// What F_GETFL shows; EBADF where nothing can be read or written at all.
fn flags_of(fd: usize) -> Result<u32, Stop> {
    if ours(fd) {
        match served(fd) {
            Ok(file) => return Ok(file.ofd().flags.load(Ordering::Acquire)),
            Err(Stop::Kernel) => {}
            Err(stop) => return Err(stop),
        }
    }
    let flags = sys::call3(nr::FCNTL, fd, F_GETFL, 0);
    if sys::failed(flags) || flags as u32 & o::PATH != 0 {
        return Err(Stop::Error(err::BADF));
    }
    Ok(flags as u32)
}

/// By flags; open for neither (3), as for ioctl only, is possible too.
fn readable(flags: u32) -> bool {
    matches!(flags & o::ACCMODE, 0 | o::RDWR)
}

fn writable(flags: u32) -> bool {
    matches!(flags & o::ACCMODE, o::WRONLY | o::RDWR)
}

/// The offset at an address, if one was given.
fn offset(at: usize) -> Result<Option<i64>, Stop> {
    if at == 0 { Ok(None) } else { Ok(Some(mem::get(at)?)) }
}

/// What the kernel looks at before it copies a range, in its order; how much may be copied.
fn may_copy(r: &Regs) -> Result<usize, Stop> {
    let (from, to) = (flags_of(r.rdi)?, flags_of(r.rdx)?);
    let (in_at, out_at) = (offset(r.rsi)?, offset(r.r10)?);
    if r.r9 as u32 != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    for fd in [r.rdi, r.rdx] {
        let kind = match table::index(table::entry(fd as i32)) {
            Some(index) if table::ofd(index).state.load(Ordering::Acquire) == state::DIR => S_IFDIR,
            Some(_) => S_IFREG,
            None => sys::fstat(fd as i32).map_or(0, |s| s.mode & S_IFMT),
        };
        match kind {
            S_IFREG => {}
            S_IFDIR => return Err(Stop::Error(err::ISDIR)),
            _ => return Err(Stop::Error(err::INVAL)),
        }
    }
    if !readable(from) || !writable(to) || to & o::APPEND != 0 {
        return Err(Stop::Error(err::BADF));
    }
    for at in [in_at, out_at].into_iter().flatten() {
        if (at as u64).checked_add(r.r8 as u64).is_none() {
            return Err(Stop::Error(err::OVERFLOW));
        }
        if at < 0 {
            return Err(Stop::Error(err::INVAL));
        }
    }
    overlap(r, in_at, out_at)
}

/// A regular file at one end of a copy, whoever has it.
struct End {
    file: Option<InUse>,
    ino: u64,
    offset: u64,
    size: u64,
}

impl End {
    /// `None` for a file that is none of the volume's.
    fn of(fd: usize, at: Option<i64>) -> Result<Option<Self>, Stop> {
        if ours(fd) {
            let file = regular(fd)?;
            let ino = file.ofd().ino.load(Ordering::Acquire);
            let own = || file.ofd().offset.load(Ordering::Relaxed);
            let offset = at.map_or_else(own, |at| at as u64);
            return Ok(Some(Self { ino, offset, size: 0, file: Some(file) }));
        }
        let Some(stat) = sys::fstat(fd as i32).filter(session::is_the_mounts) else {
            return Ok(None);
        };
        let own = || sys::call3(nr::LSEEK, fd, 0, SEEK_CUR).max(0) as u64;
        let offset = at.map_or_else(own, |at| at as u64);
        Ok(Some(Self { ino: stat.ino, offset, size: stat.size.max(0) as u64, file: None }))
    }

    fn size(&self) -> Result<u64, Stop> {
        match &self.file {
            Some(file) => Ok(fs()?.fgetattr(file.handle()?)?.size),
            None => Ok(self.size),
        }
    }
}

/// Within one file the ranges may not overlap, and what is copied ends where the file did.
fn overlap(r: &Regs, in_at: Option<i64>, out_at: Option<i64>) -> Result<usize, Stop> {
    let ends = (End::of(r.rdi, in_at)?, End::of(r.rdx, out_at)?);
    let (Some(from), Some(to)) = ends else { return Ok(r.r8) };
    if from.ino != to.ino {
        return Ok(r.r8);
    }
    let (source, target) = (from.offset, to.offset);
    let len = (r.r8 as u64).min(from.size()?.saturating_sub(source));
    if target < source.saturating_add(len) && source < target.saturating_add(len) {
        return Err(Stop::Error(err::INVAL));
    }
    Ok(len as usize)
}

/// See the module text.
pub fn copy(r: &mut Regs) -> Reply {
    let other = if r.rax == nr::COPY_FILE_RANGE { r.rdx } else { r.rsi };
    loop {
        match once(r) {
            // One end has become the kernel's meanwhile: no number does so twice.
            Err(Stop::Kernel)
                if matches!(r.rax, nr::COPY_FILE_RANGE | nr::SENDFILE)
                    && (ours(r.rdi) || ours(other)) => {}
            done => return done,
        }
    }
}

fn once(r: &mut Regs) -> Reply {
    match r.rax {
        nr::COPY_FILE_RANGE if ours(r.rdi) || ours(r.rdx) => {
            let len = may_copy(r)?;
            if !ours(r.rdi) && !ours(r.rdx) {
                return Err(Stop::Kernel);
            }
            match copied(r.rdi, r.rsi, r.rdx, r.r10, len)? {
                Some(done) => Ok(done),
                None => run(r.rdi, r.rsi, r.rdx, r.r10, len),
            }
        }
        nr::SENDFILE if ours(r.rdi) || ours(r.rsi) => {
            if plain_file(r.rdi) && plain_file(r.rsi) {
                let at = offset(r.rdx)?;
                let (from, to) = (flags_of(r.rsi)?, flags_of(r.rdi)?);
                if !ours(r.rdi) && !ours(r.rsi) {
                    // Both have just become the kernel's.
                    return Err(Stop::Kernel);
                }
                if !readable(from) {
                    return Err(Stop::Error(err::BADF));
                }
                let len = r.r10.min(ONCE) as i64;
                if at.is_some_and(|at| at < 0 || at > i64::MAX - len) {
                    return Err(Stop::Error(err::INVAL));
                }
                if !writable(to) {
                    return Err(Stop::Error(err::BADF));
                }
                if to & o::APPEND != 0 {
                    return Err(Stop::Error(err::INVAL));
                }
                return run(r.rsi, r.rdx, r.rdi, 0, r.r10);
            }
            to_kernel(r.rdi)?;
            to_kernel(r.rsi)?;
            Err(Stop::Kernel)
        }
        nr::SPLICE => {
            to_kernel(r.rdi)?;
            to_kernel(r.rdx)?;
            Err(Stop::Kernel)
        }
        nr::TEE => {
            to_kernel(r.rdi)?;
            to_kernel(r.rsi)?;
            Err(Stop::Kernel)
        }
        nr::VMSPLICE => {
            to_kernel(r.rdi)?;
            Err(Stop::Kernel)
        }
        _ => Err(Stop::Kernel),
    }
}

/// Lets the service copy; none if it is to be done by hand.
fn copied(
    from: usize,
    in_at: usize,
    to: usize,
    out_at: usize,
    len: usize,
) -> Result<Option<isize>, Stop> {
    if !ours(from) || !ours(to) || limit::is_set() {
        return Ok(None);
    }
    let (source, target) = (regular(from)?, regular(to)?);
    if target.ofd().flags.load(Ordering::Relaxed) & o::APPEND != 0 {
        return Err(Stop::Error(err::BADF));
    }
    // Like the kernel, without a lock on the files' own offsets.
    let offset = |file: &InUse, at: usize| -> Result<u64, Stop> {
        if at == 0 { Ok(file.ofd().offset.load(Ordering::Relaxed)) } else { Ok(mem::get(at)?) }
    };
    let (from_offset, to_offset) = (offset(&source, in_at)?, offset(&target, out_at)?);
    let (from, to) = (source.handle()?, target.handle()?);
    let copy = CopyRange { from, from_offset, to, to_offset, len: len as u64 };
    let done = match fs()?.copy_range(&copy) {
        Ok(done) => done,
        Err(base::Errno::OPNOTSUPP) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    for (file, at, offset) in [(&source, in_at, from_offset), (&target, out_at, to_offset)] {
        if at == 0 {
            file.ofd().offset.store(offset + done, Ordering::Relaxed);
        } else {
            mem::put(at, &(offset + done))?;
        }
    }
    Ok(Some(done as isize))
}

/// FICLONE and FICLONERANGE, if one of the two is a file of the volume.
pub fn clone(to: usize, argument: usize, range: bool) -> Reply {
    // Source, its offset, length, offset in the target.
    let [from, from_offset, len, to_offset]: [u64; 4] =
        if range { mem::get(argument)? } else { [argument as u64, 0, 0, 0] };
    let from = from as u32 as usize;
    let Some(source) = File::of(from)? else {
        return if ours(to) { Err(Stop::Error(XDEV)) } else { Err(Stop::Kernel) };
    };
    let Some(target) = File::of(to)? else {
        drop(source);
        to_kernel(from)?;
        return Err(Stop::Kernel);
    };
    if target.flags & o::APPEND != 0 {
        return Err(Stop::Error(err::BADF));
    }
    let (from, to) = (source.handle, target.handle);
    fs()?.clone_range(&CopyRange { from, from_offset, to, to_offset, len })?;
    Ok(0)
}

/// Reads from `fd` at `at`, or at its offset.
fn take(fd: usize, at: Option<u64>, buf: &mut [u8]) -> Reply {
    if !ours(fd) {
        let (p, len) = (buf.as_mut_ptr() as usize, buf.len());
        let ret = match at {
            Some(at) => sys::call4(nr::PREAD64, fd, p, len, at as usize),
            None => sys::call3(nr::READ, fd, p, len),
        };
        return if sys::failed(ret) { Err(Stop::Error(ret)) } else { Ok(ret) };
    }
    let file = regular(fd)?;
    if file.ofd().flags.load(Ordering::Relaxed) & o::ACCMODE == o::WRONLY {
        return Err(Stop::Error(err::BADF));
    }
    if let Some(at) = at {
        return Ok(fs()?.read(file.handle()?, at, buf)? as isize);
    }
    let _lock = file.lock();
    let offset = &still(&file)?.offset;
    let from = offset.load(Ordering::Relaxed);
    let got = fs()?.read(file.handle()?, from, buf)?;
    offset.store(from + got as u64, Ordering::Relaxed);
    Ok(got as isize)
}

fn give(fd: usize, at: Option<u64>, data: &[u8]) -> Reply {
    if !ours(fd) {
        let (p, len) = (data.as_ptr() as usize, data.len());
        let ret = match at {
            Some(at) => sys::call4(nr::PWRITE64, fd, p, len, at as usize),
            None => sys::call3(nr::WRITE, fd, p, len),
        };
        return if sys::failed(ret) { Err(Stop::Error(ret)) } else { Ok(ret) };
    }
    let file = regular(fd)?;
    let flags = file.ofd().flags.load(Ordering::Relaxed);
    if flags & o::ACCMODE == 0 {
        return Err(Stop::Error(err::BADF));
    }
    if let Some(at) = at {
        let data = limit::cut(&file, at, false, data)?;
        return Ok(fs()?.write(file.handle()?, at, data, false)?.len as isize);
    }
    let _lock = file.lock();
    let offset = &still(&file)?.offset;
    let to = offset.load(Ordering::Relaxed);
    let data = limit::cut(&file, to, flags & o::APPEND != 0, data)?;
    let done = fs()?.write(file.handle()?, to, data, flags & o::APPEND != 0)?;
    offset.store(done.offset + done.len as u64, Ordering::Relaxed);
    Ok(done.len as isize)
}

fn rewind(fd: usize, by: usize) {
    if ours(fd) {
        if let Ok(file) = regular(fd) {
            let _lock = file.lock();
            file.ofd().offset.fetch_sub(by as u64, Ordering::Relaxed);
        }
    } else {
        sys::call3(nr::LSEEK, fd, (by as isize).wrapping_neg() as usize, 1);
    }
}

/// Copies up to `len`; `in_at` and `out_at` are addresses of offsets, or 0 for the files' own.
fn run(from: usize, in_at: usize, to: usize, out_at: usize, len: usize) -> Reply {
    let read_at = |at: usize| -> Result<Option<u64>, Stop> {
        if at == 0 { Ok(None) } else { Ok(Some(mem::get::<u64>(at)?)) }
    };
    let (mut src, mut dst) = (read_at(in_at)?, read_at(out_at)?);
    let len = len.min(ONCE);
    let mut buf: Vec<u8> = vec![0; STEP.min(len)];
    let mut done = 0;
    while done < len {
        let want = buf.len().min(len - done);
        let got = match take(from, src, &mut buf[..want]) {
            Ok(0) => break,
            Ok(n) => n as usize,
            Err(_) if done > 0 => break,
            Err(e) => return Err(e),
        };
        let put = match give(to, dst, &buf[..got]) {
            Ok(n) => n as usize,
            Err(e) => {
                if src.is_none() {
                    rewind(from, got);
                }
                if done > 0 {
                    break;
                }
                return Err(e);
            }
        };
        if put < got && src.is_none() {
            rewind(from, got - put);
        }
        src = src.map(|s| s + put as u64);
        dst = dst.map(|d| d + put as u64);
        done += put;
        if put < got {
            break;
        }
    }
    if let Some(src) = src {
        mem::put(in_at, &src)?;
    }
    if let Some(dst) = dst {
        mem::put(out_at, &dst)?;
    }
    Ok(done as isize)
}
