//! Calls on descriptors as such: dup, close, fcntl, ioctl, mmap, passing.

use base::{Errno, InodeId};
use client::fs::Handle;
use core::sync::atomic::Ordering;

use super::{Reply, arguments, copy, limit, process, served, to_kernel};
use crate::entry::Regs;
use crate::format::state;
use crate::fsys::{BLOCK, caller, fs};
use crate::path::{self, Path, Stop};
use crate::sys::{self, at, err, nr, o};
use crate::table::InUse;
use crate::{demote, fsys, lock, mem, objects, ring, session, table};

/// Largest private mapping that is filled by reading; larger ones are the kernel's.
const PRIVATE_MAX: usize = 64 << 20;
/// Bytes of it read at a time.
const COPY_PIECE: usize = 64 << 10;
/// Bytes behind a mapping, up to the end of its file, that are copied with it.
const BEHIND_MAX: u64 = 1 << 20;

/// See the module text.
pub fn other(r: &mut Regs) -> Reply {
    match r.rax {
        nr::CLOSE => close(r.rdi as i32),
        nr::DUP => dup(r.rdi as i32),
        nr::DUP2 | nr::DUP3 => dup3(r),
        nr::CLOSE_RANGE => close_range(r),
        nr::IOCTL => ioctl(r),
        // flock belongs to the open file description, which the kernel then shall own.
        nr::FLOCK | nr::GETDENTS => {
            served(r.rdi)?;
            to_kernel(r.rdi)?;
            Err(Stop::Kernel)
        }
        nr::CHDIR | nr::FCHDIR => chdir(r),
        nr::GETCWD => getcwd(),
        nr::MMAP => mmap(r),
        nr::SENDMSG => {
            to_kernel(r.rdi)?;
            pass(r.rsi)
        }
        nr::SENDMMSG => {
            to_kernel(r.rdi)?;
            for i in 0..(r.rdx as u32 as usize).min(1024) {
                let _ = pass(r.rsi.wrapping_add(i * 64));
            }
            Err(Stop::Kernel)
        }
        nr::IO_SUBMIT => submit(r),
        nr::IO_URING_SETUP => ring::setup(r.rdi, r.rsi),
        nr::IO_URING_ENTER | nr::IO_URING_REGISTER => ring::enter(),
        _ => Err(Stop::Kernel),
    }
}

/// A number of an open file is being closed.
fn closing(index: usize) {
    let ofd = table::ofd(index);
    lock::closing(ofd.ino.load(Ordering::Relaxed), lock::closed_of(index));
}

fn close(fd: i32) -> Reply {
    let entry = table::entry(fd);
    if entry & !table::CLOEXEC == table::INTERNAL {
        return Err(Stop::Error(err::BADF));
    }
    if let Some(index) = table::index(entry) {
        closing(index);
        table::clear(fd);
    }
    lock::closing_marked(fd);
    Err(Stop::Kernel)
}

/// `file` is in use until it is held once more: another thread may be closing its number.
fn copy_entry(file: &InUse, new: isize, cloexec: bool) {
    if !sys::failed(new) {
        table::hold(file.index);
        table::set(new as i32, file.index, cloexec);
    }
}

/// A copy wherever the kernel puts it. Numbers beyond the table are the kernel's, and so is what is copied there.
fn copy_anywhere(
    file: InUse,
    fd: usize,
    cloexec: bool,
    dup: impl Fn() -> isize,
) -> Result<isize, Stop> {
    let new = dup();
    if sys::failed(new) || (new as usize) < table::FDS {
        copy_entry(&file, new, cloexec);
        return Ok(new);
    }
    sys::call1(nr::CLOSE, new as usize);
    drop(file);
    to_kernel(fd)?;
    Ok(dup())
}

fn dup(fd: i32) -> Reply {
    let file = served(fd as usize)?;
    copy_anywhere(file, fd as u32 as usize, false, || sys::call1(nr::DUP, fd as u32 as usize))
}

fn dup3(r: &Regs) -> Reply {
    let (old, new) = (r.rdi as i32, r.rsi as i32);
    let flags = if r.rax == nr::DUP3 { r.rdx as u32 } else { 0 };
    let (from, to) = (table::entry(old), table::entry(new));
    if from & !table::CLOEXEC == table::INTERNAL || to & !table::CLOEXEC == table::INTERNAL {
        return Err(Stop::Error(err::BADF));
    }
    if from == 0 && to == 0 || old == new {
        return Err(Stop::Kernel);
    }
    // A number beyond the table is the kernel's, and so is what is copied there.
    if new as u32 as usize >= table::FDS {
        to_kernel(old as usize)?;
        return Err(Stop::Kernel);
    }
    let file = InUse::of(old);
    // What stands here is closed, if nothing goes wrong, which is not worth more.
    if sys::is_open(old) {
        lock::closing_marked(new);
    }
    // What was the kernel's is this file from the moment on in which the kernel puts what stands for it there.
    let before = file.as_ref().filter(|_| to == 0 && sys::is_open(new));
    if let Some(file) = before {
        copy_entry(file, new as isize, flags & o::CLOEXEC != 0);
    }
    let ret = if r.rax == nr::DUP2 {
        sys::call2(nr::DUP2, old as usize, new as usize)
    } else {
        sys::call3(nr::DUP3, old as usize, new as usize, flags as usize)
    };
    if sys::failed(ret) {
        if before.is_some() {
            table::clear(new);
        }
        return Ok(ret);
    }
    if let Some(index) = table::index(to) {
        closing(index);
    }
    let Some(file) = &file else {
        table::clear(new);
        return Ok(ret);
    };
    // Another thread may have closed it in between.
    if before.is_none() || table::index(table::entry(new)) != Some(file.index) {
        copy_entry(file, ret, flags & o::CLOEXEC != 0);
    }
    Ok(ret)
}

fn close_range(r: &Regs) -> Reply {
    let (first, last, flags) = (r.rdi as u32, r.rsi as u32, r.rdx as u32);
    if first > last || flags & !6 != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    if flags & 2 != 0 {
        // CLOSE_RANGE_UNSHARE, of the descriptors.
        let ret = process::unshare(0x400);
        if ret < 0 {
            return Ok(ret);
        }
    }
    let kernel = |from: u32, to: u32| {
        sys::call3(nr::CLOSE_RANGE, from as usize, to as usize, (flags & 4) as usize);
    };
    let mut from = first;
    let inside = |fd: &usize| (first as usize..=last as usize).contains(fd);
    for fd in table::used().chain(table::own()).filter(inside) {
        let fd = fd as u32;
        let entry = table::entry(fd as i32);
        if entry & !table::CLOEXEC == table::INTERNAL {
            if from < fd {
                kernel(from, fd - 1);
            }
            from = fd + 1;
        } else if let Some(index) = table::index(entry) {
            if flags & 4 != 0 {
                table::fds()[fd as usize].fetch_or(table::CLOEXEC, Ordering::AcqRel);
            } else {
                closing(index);
                table::clear(fd as i32);
            }
        } else if flags & 4 == 0 {
            lock::closing_marked(fd as i32);
        }
    }
    if from <= last {
        kernel(from, last);
    }
    Ok(0)
}

/// `None`: the kernel shall do it with the replacements in `r`.
pub fn fcntl(r: &mut Regs) -> Result<Option<isize>, Stop> {
    let (fd, command, arg) = (r.rdi as i32, r.rsi as u32, r.rdx);
    if matches!(command, 6 | 7) && table::index(table::entry(fd)).is_none() {
        lock::beside(fd);
    }
    let file = served(r.rdi)?;
    let ofd = file.ofd();
    let done = |ret: isize| Ok(Some(ret));
    match command {
        0 | 1030 => {
            let dup = || sys::call3(nr::FCNTL, fd as u32 as usize, command as usize, arg);
            copy_anywhere(file, r.rdi, command == 1030, dup).map(Some)
        }
        1 => done(isize::from(table::entry(fd) & table::CLOEXEC != 0)),
        2 => {
            let slot = &table::fds()[fd as usize];
            if arg & 1 != 0 {
                slot.fetch_or(table::CLOEXEC, Ordering::AcqRel);
            } else {
                slot.fetch_and(!table::CLOEXEC, Ordering::AcqRel);
            }
            Err(Stop::Kernel)
        }
        3 => done(super::open::visible(ofd.flags.load(Ordering::Acquire)) as isize),
        4 => {
            let may = o::APPEND | o::NONBLOCK | o::DIRECT | o::NOATIME;
            let flags = ofd.flags.load(Ordering::Acquire);
            if arg as u32 & !flags & o::NOATIME != 0 {
                super::open::may_hide(o::NOATIME, &super::attrs::descriptor(r.rdi)?)?;
            }
            let dir = ofd.state.load(Ordering::Acquire) == state::DIR;
            if dir && arg as u32 & o::DIRECT != 0 {
                return Err(Stop::Error(err::INVAL));
            }
            ofd.flags.store(flags & !may | arg as u32 & may, Ordering::Release);
            done(0)
        }
        5..=7 if ofd.state.load(Ordering::Acquire) == state::FILE => match lock::fcntl(r, &file) {
            // More files are locked than one process has places for.
            Err(Stop::Again) => {
                drop(file);
                to_kernel(fd as usize)?;
                Err(Stop::Kernel)
            }
            done => done,
        },
        // Open-file-description locks, leases, locks and watches on a directory, owners of signals,
        // questions about the description: the kernel owns it from here on.
        5..=11 | 15..=17 | 36..=38 | 1024..=1027 | 1035 => {
            if command == 1024 && arg != 2 {
                // A lease is against all who have the file open.
                demote::before_exec(ofd.ino.load(Ordering::Acquire));
            }
            drop(file);
            to_kernel(fd as usize)?;
            Err(Stop::Kernel)
        }
        // F_CREATED_QUERY: whether this open made the file.
        1028 => done(isize::from(ofd.flags.load(Ordering::Acquire) & o::CREAT != 0)),
        // A hint how long what is written will live.
        1036 => match mem::get::<u64>(arg)? {
            0..=5 => done(0),
            _ => Err(Stop::Error(err::INVAL)),
        },
        // The size of a pipe.
        1031 | 1032 => Err(Stop::Error(err::BADF)),
        // Seals: of who may write, that there are none.
        1033 if ofd.flags.load(Ordering::Acquire) & o::ACCMODE == 0 => Err(Stop::Error(err::PERM)),
        _ => Err(Stop::Error(err::INVAL)),
    }
}

const FICLONE: u32 = 0x4004_9409;
const FICLONERANGE: u32 = 0x4020_940d;

fn ioctl(r: &Regs) -> Reply {
    // Whoever has the two: what becomes the kernel's here may leave the other one with us, of which the kernel has only
    // what stands for it.
    if matches!(r.rsi as u32, FICLONE | FICLONERANGE) {
        return copy::clone(r.rdi, r.rdx, r.rsi as u32 == FICLONERANGE);
    }
    let file = match served(r.rdi) {
        Err(Stop::Kernel) => {
            arguments::give_command(r)?;
            return Err(Stop::Kernel);
        }
        served => served?,
    };
    let slot = &table::fds()[r.rdi as u32 as usize];
    match r.rsi as u32 {
        // FIOCLEX, FIONCLEX
        0x5451 => {
            slot.fetch_or(table::CLOEXEC, Ordering::AcqRel);
            Ok(sys::call3(nr::FCNTL, r.rdi as u32 as usize, 2, 1))
        }
        0x5450 => {
            slot.fetch_and(!table::CLOEXEC, Ordering::AcqRel);
            Ok(sys::call3(nr::FCNTL, r.rdi as u32 as usize, 2, 0))
        }
        // FIONBIO
        0x5421 => {
            let on = mem::get::<i32>(r.rdx)? != 0;
            let flags = &file.ofd().flags;
            if on {
                flags.fetch_or(o::NONBLOCK, Ordering::AcqRel);
            } else {
                flags.fetch_and(!o::NONBLOCK, Ordering::AcqRel);
            }
            Ok(0)
        }
        // FIOASYNC: there is no such thing for a file, so it can only be off.
        0x5452 if mem::get::<i32>(r.rdx)? == 0 => Ok(0),
        // FIOQSIZE; FIBMAP, FIEMAP; FIDEDUPERANGE; FS_IOC_RESVSP and its family; FIFREEZE, FITHAW: what the
        // kernel answers for every file system, some of it by other calls.
        0x5460
        | 1
        | 0xc020_660b
        | 0xc018_9436
        | 0x4030_5828..=0x4030_582b
        | 0x4030_5839
        | 0xc004_5877
        | 0xc004_5878 => {
            drop(file);
            to_kernel(r.rdi)?;
            arguments::give_command(r)?;
            Err(Stop::Kernel)
        }
        // FIONREAD
        0x541b if file.ofd().state.load(Ordering::Relaxed) == state::FILE => {
            let size = fs()?.fgetattr(file.handle()?)?.size;
            let left = size.saturating_sub(file.ofd().offset.load(Ordering::Relaxed));
            mem::put(r.rdx, &(left.min(i32::MAX as u64) as i32))?;
            Ok(0)
        }
        // FIGETBSZ
        2 => {
            mem::put(r.rdx, &(BLOCK as i32))?;
            Ok(0)
        }
        _ => Err(Stop::Error(err::NOTTY)),
    }
}

/// Whether the kernel has something of the mount by that number.
fn is_the_mounts(fd: i32) -> bool {
    let stat = || sys::fstat(fd);
    !table::in_vfork() && !path::has_left() && stat().as_ref().is_some_and(session::is_the_mounts)
}

fn chdir(r: &Regs) -> Reply {
    // The kernel's working directory moves too: what the kernel resolves must agree.
    let to = if r.rax == nr::FCHDIR {
        match table::index(table::entry(r.rdi as i32)) {
            // What stands for a file in the kernel is a directory.
            Some(index) if table::ofd(index).state.load(Ordering::Acquire) != state::DIR => {
                path::to_kernel(r.rdi as i32)?;
                0
            }
            Some(index) => table::ofd(index).ino.load(Ordering::Relaxed),
            None => u64::MAX,
        }
    } else {
        match path::resolve(at::FDCWD, &Path::get(r.rdi)?, true) {
            Ok(found) => found.exists()?.ino.0,
            // Looked up when it is needed: the kernel may find a way back into the mount.
            Err(Stop::Kernel) => u64::MAX,
            Err(stop) => return Err(stop),
        }
    };
    let ret = sys::call1(r.rax, r.rdi);
    if ret == 0 {
        table::context().cwd.store(to, Ordering::Release);
        fsys::stand(to);
        // Nobody else may have it open for long, and one that was removed is there only while somebody does.
        if to == u64::MAX && r.rax == nr::FCHDIR && is_the_mounts(r.rdi as i32) {
            process::cwd();
        }
    }
    Ok(ret)
}

/// The kernel says where the working directory is; of one that was removed here it has not heard.
fn getcwd() -> Reply {
    let ino = if table::in_vfork() { 0 } else { process::cwd() };
    if ino == 0 {
        process::look_at_cwd();
    } else {
        match fs()?.getattr(&caller(), InodeId(ino)) {
            Ok(attr) if attr.nlink == 0 => return Err(Stop::Error(err::NOENT)),
            Err(Errno::NOENT) => return Err(Stop::Error(err::NOENT)),
            _ => {}
        }
    }
    Err(Stop::Kernel)
}

fn mmap(r: &Regs) -> Reply {
    const PROT_EXEC: usize = 4;
    let (address, len, prot, flags) = (r.rdi, r.rsi, r.rdx, r.r10);
    let map = || Ok(objects::map(address, len, prot, flags, r.r8, r.r9));
    if flags & 0x20 != 0 || table::entry(r.r8 as i32) == 0 {
        return if flags & 0x20 == 0 && prot & PROT_EXEC != 0 { map() } else { Err(Stop::Kernel) };
    }
    let file = served(r.r8)?;
    let ofd = file.ofd();
    // MAP_GROWSDOWN, and all that is wrong in another way: the kernel says what.
    let wrong = ofd.state.load(Ordering::Acquire) != state::FILE
        || ofd.flags.load(Ordering::Acquire) & o::ACCMODE == o::WRONLY
        || len == 0
        || r.r9 & 4095 != 0
        || r.r9.checked_add(len).is_none_or(|end| end > isize::MAX as usize)
        || flags & 0x100 != 0;
    if wrong {
        drop(file);
        to_kernel(r.r8)?;
        return Err(Stop::Kernel);
    }
    let private = flags & 0xf == 2;
    if !private || len > PRIVATE_MAX || prot & PROT_EXEC != 0 {
        let ino = ofd.ino.load(Ordering::Acquire);
        drop(file);
        // First: what this process could not open now stays here, for everybody.
        to_kernel(r.r8)?;
        if !private {
            session::give_to_kernel(ino);
        }
        return if prot & PROT_EXEC != 0 { map() } else { Err(Stop::Kernel) };
    }
    // POSIX leaves open whether a private mapping sees later writes: this one is of a copy.
    let handle = file.handle()?;
    let size = fs()?.fgetattr(handle)?.size;
    let end = (r.r9 + len) as u64;
    // Pages beyond the end of the file are a SIGBUS, now and when it grows no more. What is mapped but in part may be
    // asked to grow (mremap), and a copy knows of no more than itself: it has the file up to its end, if that is near.
    if end > size.next_multiple_of(4096) || size.saturating_sub(end) > BEHIND_MAX {
        drop(file);
        to_kernel(r.r8)?;
        return Err(Stop::Kernel);
    }
    let Some(copy) = private_copy(handle, r.r9 as u64, (size - r.r9 as u64) as usize)? else {
        drop(file);
        to_kernel(r.r8)?;
        return Err(Stop::Kernel);
    };
    let at = sys::call6(nr::MMAP, address, len, prot, flags, copy, 0);
    sys::call1(nr::CLOSE, copy);
    Ok(at)
}

/// The bytes of a file from an offset on, in a file of memory: mapped privately that is to the kernel what a file is, also for
/// madvise (MADV_DONTNEED brings the bytes back), mremap and faults behind the end. `None`: there is none to be had.
fn private_copy(handle: Handle, from: u64, len: usize) -> Result<Option<usize>, Stop> {
    // One of file sizes counts for memory too.
    if limit::is_set() {
        return Ok(None);
    }
    let Some(copy) = session::memory(c"corbel-copy") else { return Ok(None) };
    let copied = fill(copy, handle, from, len);
    if !matches!(copied, Ok(true)) {
        sys::call1(nr::CLOSE, copy);
    }
    copied.map(|whole| whole.then_some(copy))
}

/// Whether there was memory for all.
fn fill(copy: usize, handle: Handle, from: u64, len: usize) -> Result<bool, Stop> {
    if sys::call2(nr::FTRUNCATE, copy, len) != 0 {
        return Ok(false);
    }
    let mut piece = alloc::vec![0u8; len.min(COPY_PIECE)];
    let mut done = 0;
    while done < len {
        let want = piece.len().min(len - done);
        let got = fs()?.read(handle, from + done as u64, &mut piece[..want])?;
        if got == 0 {
            break;
        }
        let at = piece.as_ptr() as usize;
        if sys::call4(nr::PWRITE64, copy, at, got, done) != got as isize {
            return Ok(false);
        }
        done += got;
    }
    Ok(true)
}

/// Descriptors that go to another process by SCM_RIGHTS become the kernel's first.
fn pass(message: usize) -> Reply {
    // What is wrong with the message the kernel says, after having looked at the socket.
    let Ok([control, len]) = mem::get::<[usize; 2]>(message.wrapping_add(32)) else {
        return Err(Stop::Kernel);
    };
    let (mut at, end) = (control, control.saturating_add(len.min(64 << 10)));
    while control != 0 && at + 16 <= end {
        let (Ok(length), Ok([level, kind])) =
            (mem::get::<usize>(at), mem::get::<[i32; 2]>(at.wrapping_add(8)))
        else {
            break;
        };
        if length < 16 || length > end - at {
            break;
        }
        if level == 1 && kind == 1 {
            for i in 0..(length - 16) / 4 {
                let Ok(fd) = mem::get::<u32>(at + 16 + i * 4) else { break };
                to_kernel(fd as usize)?;
            }
        }
        at += (length + 7) & !7;
    }
    Err(Stop::Kernel)
}

/// libaio: the files become the kernel's.
fn submit(r: &Regs) -> Reply {
    for i in 0..r.rsi.min(4096) {
        // Blocks before a bad one are done.
        let Ok(block) = mem::get::<usize>(r.rdx.wrapping_add(i * 8)) else { break };
        let Ok(fd) = mem::get::<u32>(block.wrapping_add(20)) else { break };
        to_kernel(fd as usize)?;
        // IOCB_FLAG_RESFD, and the descriptor to be told.
        if let Ok([flags, fd]) = mem::get::<[u32; 2]>(block.wrapping_add(56))
            && flags & 1 != 0
        {
            to_kernel(fd as usize)?;
        }
    }
    Err(Stop::Kernel)
}
