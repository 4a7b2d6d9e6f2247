//! Copies inside the kernel: between two files of ours the service copies if they are long, else it
//! is done by reading and writing when both ends are files and one is ours; otherwise our end becomes
//! the kernel's. And FICLONE.

use alloc::vec;
use alloc::vec::Vec;
use client::fs::{CopyRange, S_IFREG};
use core::sync::atomic::Ordering;

use super::data::still;
use super::{Reply, limit, regular, to_kernel};
use crate::entry::Regs;
use crate::format::state;
use crate::fsys::fs;
use crate::mem;
use crate::path::Stop;
use crate::sys::{self, err, nr, o};
use crate::table::{self, InUse};

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
    ours(fd) || sys::fstat(fd as i32).is_some_and(|s| s.mode & 0o170_000 == S_IFREG)
}

/// See the module text.
pub fn copy(r: &mut Regs) -> Reply {
    match r.rax {
        nr::COPY_FILE_RANGE if ours(r.rdi) || ours(r.rdx) => {
            if [r.rdi, r.rdx].iter().any(|fd| !ours(*fd) && sys::fstat(*fd as i32).is_none()) {
                return Err(Stop::Error(err::BADF));
            }
            if r.r9 as u32 != 0 {
                return Err(Stop::Error(err::INVAL));
            }
            if !plain_file(r.rdi) || !plain_file(r.rdx) {
                return Err(Stop::Error(err::INVAL));
            }
            let len = may_copy(r)?;
            match copied(r.rdi, r.rsi, r.rdx, r.r10, len)? {
                Some(done) => Ok(done),
                None => run(r.rdi, r.rsi, r.rdx, r.r10, len),
            }
        }
        nr::SENDFILE if ours(r.rdi) || ours(r.rsi) => {
            if plain_file(r.rdi) && plain_file(r.rsi) {
                if appends(r.rdi) {
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
        _ => Err(Stop::Kernel),
    }
}

fn appends(fd: usize) -> bool {
    InUse::of(fd as i32)
        .is_some_and(|file| file.ofd().flags.load(Ordering::Relaxed) & o::APPEND != 0)
}

/// The rules of `copy_file_range` that hold however it is done: no offset too large, and no range of
/// a file to another that it overlaps. How much may be copied.
fn may_copy(r: &Regs) -> Result<usize, Stop> {
    // A directory has an error of its own.
    let mode = |fd: usize| match InUse::of(fd as i32) {
        Some(file) if file.ofd().state.load(Ordering::Acquire) != state::DIR => {
            file.ofd().flags.load(Ordering::Relaxed)
        }
        _ => o::RDWR,
    };
    if mode(r.rdi) & o::ACCMODE == o::WRONLY || mode(r.rdx) & o::ACCMODE == 0 || appends(r.rdx) {
        return Err(Stop::Error(err::BADF));
    }
    let mut ends = [(0, 0); 2];
    for (end, (fd, at)) in ends.iter_mut().zip([(r.rdi, r.rsi), (r.rdx, r.r10)]) {
        let Some(file) = InUse::of(fd as i32) else { return Ok(r.r8) };
        let ofd = file.ofd();
        let own = ofd.offset.load(Ordering::Relaxed);
        let at = if at == 0 { own } else { mem::get::<u64>(at)? };
        // Past the largest offset, or around it.
        if i64::try_from(at).is_err() || at.checked_add(r.r8 as u64).is_none() {
            return Err(Stop::Error(err::OVERFLOW));
        }
        *end = (ofd.ino.load(Ordering::Acquire), at);
    }
    let [(from, from_at), (to, to_at)] = ends;
    if from != to {
        return Ok(r.r8);
    }
    let file = regular(r.rdi)?;
    let left = fs()?.fgetattr(file.handle()?)?.size.saturating_sub(from_at);
    let len = r.r8.min(usize::try_from(left).unwrap_or(usize::MAX));
    if from_at.abs_diff(to_at) < len as u64 {
        return Err(Stop::Error(err::INVAL));
    }
    Ok(len)
}

/// Lets the service copy; none if it is to be done by hand.
fn copied(
    from: usize,
    in_at: usize,
    to: usize,
    out_at: usize,
    len: usize,
) -> Result<Option<isize>, Stop> {
    if !ours(from) || !ours(to) {
        return Ok(None);
    }
    let (source, target) = (regular(from)?, regular(to)?);
    // Like the kernel, without a lock on the files' own offsets.
    let offset = |file: &InUse, at: usize| -> Result<u64, Stop> {
        if at == 0 { Ok(file.ofd().offset.load(Ordering::Relaxed)) } else { Ok(mem::get(at)?) }
    };
    let (from_offset, to_offset) = (offset(&source, in_at)?, offset(&target, out_at)?);
    if limit::is_set() {
        // What may not be copied whole is cut piece by piece.
        return Ok(None);
    }
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

/// FICLONE and FICLONERANGE on a file of ours.
pub fn clone(to: usize, argument: usize, range: bool) -> Reply {
    // Source, its offset, length, offset in the target.
    let [from, from_offset, len, to_offset]: [u64; 4] =
        if range { mem::get(argument)? } else { [argument as u64, 0, 0, 0] };
    let from = from as u32 as usize;
    let target = regular(to)?;
    if !ours(from) {
        return Err(Stop::Error(if sys::fstat(from as i32).is_some() { XDEV } else { err::BADF }));
    }
    let source = regular(from)?;
    if target.ofd().flags.load(Ordering::Relaxed) & o::APPEND != 0 {
        return Err(Stop::Error(err::BADF));
    }
    let (from, to) = (source.handle()?, target.handle()?);
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
