//! Giving an open file description to the kernel: where a descriptor is used in a way that the
//! engine does not serve, the same file is opened through the mount, at the same offset, and takes
//! the placeholder's number. From then on the kernel owns the description, for all who share it.
//!
//! Whoever shares it finds the mark at its next call, and gets the same kernel description from the holder
//! (holder.rs).
#![allow(unsafe_code)]

use base::InodeId;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::calls::limit::{room, with_room};
use crate::format::{Ofd, state};
use crate::sys::{self, err, nr, o};
use crate::table::{self, OffsetLock};
use crate::{holder, lock, session};

/// Looks, a millisecond apart, for a file that the service has yet to publish.
const PUBLISH_TRIES: u32 = 200;
const NANOSLEEP: usize = 35;

const KEPT: u32 = o::ACCMODE | o::APPEND | o::NONBLOCK | o::SYNC | o::DIRECT | o::NOATIME;

/// `n` in digits.
pub fn decimal(mut n: u64, room: &mut [u8; 20]) -> &[u8] {
    let mut at = room.len();
    loop {
        at -= 1;
        room[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            return &room[at..];
        }
    }
}

/// Opens an inode through the mount, by its number; a protected, close-on-exec descriptor.
pub fn open_inode(ino: u64, flags: u32) -> Result<i32, isize> {
    lock::look();
    let mut path = [0u8; crate::format::PATH_MAX + 64];
    let (mut digits, mut more, mut len) = ([0; 20], [0; 20], 0);
    let fs = crate::fsys::fs()?;
    // Who is neither root nor the owner must show that the inode was found by a name.
    let proof = if crate::fsys::caller().uid == 0 { None } else { fs.prove(InodeId(ino)).ok() };
    let proof = proof.map(|proof| decimal(proof, &mut more)).unwrap_or_default();
    let parts: [&[u8]; 5] = [
        session::mount(),
        b"/.corbel/inode/",
        decimal(ino, &mut digits),
        if proof.is_empty() { b"" } else { b"." },
        proof,
    ];
    for part in parts {
        path[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    let flags = (flags & KEPT) | o::CLOEXEC | o::LARGEFILE;
    let mut fd = 0;
    for attempt in 0..PUBLISH_TRIES {
        // By the root that this process has, if it does: by its name something else may be found by now.
        fd = match crate::fsys::known_template() {
            Some(root) => {
                let below = path.as_ptr() as usize + session::mount().len() + 1;
                with_room(|| sys::call4(nr::OPENAT, root as usize, below, flags as usize, 0))
            }
            None => err::NOTCONN,
        };
        if fd == err::NOTCONN {
            // Or it is of a mount that has ended.
            fd = with_room(|| sys::call3(nr::OPEN, path.as_ptr() as usize, flags as usize, 0));
        }
        if fd != err::NOENT && fd != err::STALE {
            break;
        }
        // A file made a moment ago is in our log only: make the service publish it.
        if attempt == 0 {
            let _ = fs.fsync_inode(&crate::fsys::caller(), InodeId(ino));
        }
        let pause = [0i64, 1_000_000];
        sys::call2(NANOSLEEP, (&raw const pause) as usize, 0);
    }
    if sys::failed(fd) {
        return Err(fd);
    }
    let fd = lock::raise(ino, fd as i32);
    match sys::fstat(fd) {
        Some(stat) if stat.ino == ino => Ok(fd),
        _ => {
            lock::keep(ino, fd);
            Err(err::STALE)
        }
    }
}

/// A number of this process that a description has.
fn number_of(index: usize) -> Option<usize> {
    table::used().find(|n| table::index(table::entry(*n as i32)) == Some(index))
}

/// Whether a description is a directory's, also when it says that it has become the kernel's.
fn leaves_as_directory(index: usize, ofd: &Ofd) -> bool {
    let ino = ofd.ino.load(Ordering::Acquire);
    let there = || number_of(index).and_then(|number| sys::fstat(number as i32));
    match ofd.state.load(Ordering::Acquire) {
        state::DIR => true,
        // The placeholder of a file is the root of the mount.
        state::KERNEL => there().is_some_and(|stat| stat.ino == ino),
        _ => false,
    }
}

/// Directories were given to the kernel by this process, or by whose fork it is: it may stand in one by the kernel's word.
static DIRECTORIES: AtomicBool = AtomicBool::new(false);

/// Whether the kernel has directories of this process.
pub fn gave_directories() -> bool {
    DIRECTORIES.load(Ordering::Relaxed)
}

/// The placeholder of a directory is the directory itself.
fn reopen_directory(index: usize) -> Result<i32, isize> {
    let number = number_of(index).ok_or(err::BADF)?;
    let (mut path, mut digits) = ([0u8; 40], [0; 20]);
    let mut len = 0;
    for part in [b"/proc/self/fd/".as_slice(), decimal(number as u64, &mut digits)] {
        path[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    // What F_GETFL shows of it.
    let kept = (KEPT & !o::DIRECT) | o::DIRECTORY;
    let shown = table::ofd(index).flags.load(Ordering::Acquire) & kept;
    let open =
        |shown| sys::call3(nr::OPEN, path.as_ptr() as usize, (shown | o::CLOEXEC) as usize, 0);
    let mut fd = with_room(|| open(shown));
    if fd == err::PERM {
        // Its owner has become another.
        fd = with_room(|| open(shown & !o::NOATIME));
    }
    let ino = table::ofd(index).ino.load(Ordering::Acquire);
    if sys::failed(fd) { Err(fd) } else { Ok(lock::raise(ino, fd as i32)) }
}

/// Another descriptor of a directory that is open here, to be closed.
pub fn directory_again(index: usize) -> Option<i32> {
    reopen_directory(index).ok()
}

/// Opens through the mount at the description's offset; `keep`: the holder gets a copy.
fn leave(index: usize, ofd: &Ofd, keep: bool) -> Result<i32, isize> {
    let flags = ofd.flags.load(Ordering::Acquire);
    let fd = if leaves_as_directory(index, ofd) {
        DIRECTORIES.store(true, Ordering::Relaxed);
        reopen_directory(index)?
    } else {
        // It may have been opened by another process of the session.
        let ino = crate::fsys::shown(ofd)?.0;
        match lock::give(ino, flags & KEPT) {
            Some(fd) => {
                // It was opened some time ago, and a mapping ends where the kernel believes that the
                // file does.
                let _ = sys::fstat(fd);
                fd
            }
            None => open_inode(ino, flags)?,
        }
    };
    let offset = ofd.offset.load(Ordering::Acquire) as usize;
    sys::call3(nr::LSEEK, fd as usize, offset, 0);
    if keep && !holder::put(index, fd) {
        // Those who share it would each get one of their own, with an offset of its own: it stays here.
        lock::keep(ofd.ino.load(Ordering::Acquire), fd);
        return Err(err::NFILE);
    }
    Ok(fd)
}

/// Makes a description the kernel's (or finds that it is); a protected descriptor of it.
fn kernel_descriptor(index: usize, keep: bool) -> Result<i32, isize> {
    let ofd = table::ofd(index);
    let _lock = OffsetLock::take(ofd);
    if ofd.state.load(Ordering::Acquire) == state::KERNEL {
        if let Some(fd) = holder::get(index) {
            return Ok(fd);
        }
        // The holder is gone (the session's first program has ended): the offset is as of then.
        return leave(index, ofd, true);
    }
    let fd = leave(index, ofd, keep)?;
    ofd.state.store(state::KERNEL, Ordering::Release);
    session::counters().demoted.fetch_add(1, Ordering::Relaxed);
    Ok(fd)
}

/// Whether the volume is mounted where the session has it.
pub fn is_mounted() -> bool {
    let mut path = [0u8; crate::format::PATH_MAX + 16];
    let (mount, rest) = (session::mount(), b"/.corbel/inode");
    path[..mount.len()].copy_from_slice(mount);
    path[mount.len()..mount.len() + rest.len()].copy_from_slice(rest);
    let flags = (o::PATH | o::CLOEXEC) as usize;
    let fd = with_room(|| sys::call3(nr::OPEN, path.as_ptr() as usize, flags, 0));
    if !sys::failed(fd) {
        sys::call1(nr::CLOSE, fd as usize);
    }
    !sys::failed(fd)
}

/// Makes every descriptor of this process the kernel's.
pub fn all() -> Result<(), isize> {
    for number in table::used() {
        if table::index(table::entry(number as i32)).is_some() {
            in_passing(number as i32)?;
        }
    }
    Ok(())
}

/// Gives a description to the kernel with others, where nobody has asked for this one: a directory that was removed
/// while it was open cannot be, since the mount does not know it any more, and stays as it is.
pub fn in_passing(fd: i32) -> Result<(), isize> {
    match descriptor(fd) {
        Err(err::STALE) if is_open_directory(fd) => Ok(()),
        done => done,
    }
}

/// The same before another program is executed, which may not use it at all: what could not be opened now by this process
/// answers there as its placeholder does.
pub fn before_another(fd: i32) -> Result<(), isize> {
    match in_passing(fd) {
        Err(err::ACCES) => Ok(()),
        done => done,
    }
}

/// Gives a description to the kernel where nobody can be told that it could not be: `--audit` says so.
pub fn at_best(fd: i32) {
    if descriptor(fd).is_err() {
        session::counters().undemoted.fetch_add(1, Ordering::Relaxed);
    }
}

fn is_open_directory(fd: i32) -> bool {
    let index = table::index(table::entry(fd));
    index.is_some_and(|at| table::ofd(at).state.load(Ordering::Acquire) == state::DIR)
}

/// Gives the description behind `fd` to the kernel: every number of this table that refers to it
/// becomes a kernel descriptor.
pub fn descriptor(fd: i32) -> Result<(), isize> {
    let index = table::require(fd)?;
    // Also who stands still for a child of vfork: what the child counts is counted here.
    let keep = table::shared(index) || table::in_vfork();
    table::ofd(index).refs.fetch_add(1, Ordering::AcqRel);
    let result = adopt(index, keep);
    table::drop_shared(index);
    result
}

fn adopt(index: usize, keep: bool) -> Result<(), isize> {
    let kernel = kernel_descriptor(index, keep)?;
    let ino = table::ofd(index).ino.load(Ordering::Acquire);
    lock::hand_over(ino);
    let locked = lock::holds(ino);
    for number in table::used() {
        let entry = table::entry(number as i32);
        if table::index(entry) != Some(index) {
            continue;
        }
        let flags = if entry & table::CLOEXEC != 0 { o::CLOEXEC } else { 0 };
        let place = || sys::call3(nr::DUP3, kernel as usize, number, flags as usize);
        let mut placed = place();
        if placed == err::BADF {
            // The number lies above the limit, which has been lowered since.
            room(true);
            placed = place();
            room(false);
        }
        if sys::failed(placed) {
            lock::keep(ino, kernel);
            return Err(placed);
        }
        table::clear(number as i32);
        if locked {
            table::mark_locked(number as i32);
        }
    }
    lock::keep(ino, kernel);
    Ok(())
}

/// Before a file is executed: only the kernel knows who writes what is being executed, and the
/// other way round (ETXTBSY), so both go there. Before a lease is asked for likewise.
pub fn before_exec(ino: u64) {
    before_unlink(ino);
    session::give_to_kernel(ino);
}

/// Before the last name of an inode goes: its open descriptions become the kernel's, whose
/// descriptors keep a nameless file over fork, exec and the end of this process; the mount could
/// not open it by number afterwards.
pub fn before_unlink(ino: u64) {
    let high = session::counters().ofds_high.load(Ordering::Acquire) as usize;
    for (index, ofd) in session::ofds()[..high.min(crate::format::OFDS)].iter().enumerate() {
        // With a reference, so that meanwhile it does not become another file's.
        if ofd.ino.load(Ordering::Acquire) != ino || !table::hold_shared(index) {
            continue;
        }
        let served = matches!(ofd.state.load(Ordering::Acquire), state::FILE | state::LEAVING);
        if ofd.ino.load(Ordering::Acquire) == ino
            && served
            && let Ok(fd) = kernel_descriptor(index, true)
        {
            lock::keep(ino, fd);
        }
        table::drop_shared(index);
    }
}
