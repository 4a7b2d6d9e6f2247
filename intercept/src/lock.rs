//! fcntl record locks: the kernel arbitrates, on hidden descriptors of the mount's inodes.
//!
//! A POSIX lock belongs to (process, inode), so one hidden descriptor an inode serves all numbers;
//! it is closed, and the locks with it, when the process closes any number of the inode.

use base::InodeId;
use client::mutex::Mutex;
use core::sync::atomic::Ordering;

use crate::entry::Regs;
use crate::path::Stop;
use crate::sys::{self, err, nr, o};
use crate::table::{self, InUse};
use crate::{demote, mem, thread};

/// Inodes locked at one time by one process; beyond, the description goes to the kernel.
const HIDDEN: usize = 64;

static LIST: Mutex<[(u64, i32); HIDDEN]> = Mutex::new([(0, -1); HIDDEN]);

/// The kernel's `struct flock`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Flock {
    kind: i16,
    whence: i16,
    pad: i32,
    start: i64,
    len: i64,
    pid: i32,
    pad2: i32,
}

fn hidden(ino: u64) -> Result<i32, Stop> {
    if table::in_vfork() {
        return Err(Stop::Error(-37)); // ENOLCK: a vfork child may do no such thing
    }
    let mut list = LIST.lock();
    if let Some((_, fd)) = list.iter().find(|(i, _)| *i == ino) {
        return Ok(*fd);
    }
    let fd = demote::open_inode(ino, o::RDWR).or_else(|_| demote::open_inode(ino, 0))?;
    match list.iter_mut().find(|(i, _)| *i == 0) {
        Some(slot) => *slot = (ino, fd),
        None => {
            table::close_internal(fd);
            return Err(Stop::Error(-37)); // ENOLCK
        }
    }
    Ok(fd)
}

/// A number of the inode is being closed: the process's locks on it go.
pub fn closing(ino: u64) {
    // A vfork child has no locks, and its parent's list.
    if table::in_vfork() {
        return;
    }
    let mut list = LIST.lock();
    if let Some(slot) = list.iter_mut().find(|(i, _)| *i == ino) {
        table::close_internal(slot.1);
        *slot = (0, -1);
    }
}

/// F_GETLK (5), F_SETLK (6) and F_SETLKW (7). The last may sleep, so the kernel is asked on the way
/// out, where signals are delivered: the reply is then [`crate::entry::RAW_REPLACED`].
pub fn fcntl(r: &mut Regs, file: &InUse) -> Result<Option<isize>, Stop> {
    let command = r.rsi as u32;
    let mut lock: Flock = mem::get(r.rdx)?;
    let ofd = file.ofd();
    let mode = ofd.flags.load(Ordering::Acquire) & o::ACCMODE;
    let (wants_read, wants_write) = (lock.kind == 0, lock.kind == 1);
    if command != 5 && ((wants_read && mode == o::WRONLY) || (wants_write && mode == 0)) {
        return Err(Stop::Error(err::BADF));
    }
    let base = match lock.whence {
        0 => 0,
        1 => ofd.offset.load(Ordering::Acquire) as i64,
        2 => crate::fsys::fs()?.fgetattr(file.handle()?)?.size as i64,
        _ => return Err(Stop::Error(err::INVAL)),
    };
    lock.start = base.checked_add(lock.start).ok_or(err::OVERFLOW)?;
    lock.whence = 0;
    let ino = InodeId(ofd.ino.load(Ordering::Acquire)).0;
    let fd = hidden(ino)?;
    if command == 5 {
        let at = (&raw mut lock) as usize;
        let ret = sys::call3(nr::FCNTL, fd as usize, 5, at);
        if ret == 0 {
            mem::put(r.rdx, &lock)?;
        }
        return Ok(Some(ret));
    }
    let copy = (&raw mut thread::area().flock).cast::<Flock>();
    // SAFETY: the area's field is 32 aligned bytes of this thread.
    #[allow(unsafe_code)]
    unsafe {
        copy.write(lock);
    }
    r.new_rdi = fd as usize;
    r.new_rdx = copy as usize;
    r.new_rax = nr::FCNTL;
    Ok(None)
}
const _: () = assert!(size_of::<Flock>() == 32);
