//! fcntl record locks: the kernel arbitrates, on hidden descriptors of the mount's inodes.
//!
//! A POSIX lock belongs to (process, inode), so one hidden descriptor an inode serves all numbers;
//! it is closed, and the locks with it, when the process closes any number of the inode.
//!
//! The kernel drops the locks at *any* close of a descriptor of the inode in this process. So where
//! an open file description becomes the kernel's while its inode is locked, nothing is closed: it
//! takes over the hidden descriptor's own description if that is of the same kind
//! ([`give`]), else what is in the way stays open ([`keep`]); its numbers are marked
//! ([`table::LOCKED`]), so that closing one of them closes these too. All this goes along through
//! exec, unless that closes a number of the inode; a forked child, which has no locks, drops it.

use alloc::vec::Vec;

use base::InodeId;
use client::fs::{S_IFDIR, S_IFMT};
use client::mutex::Mutex;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::calls::limit;
use crate::entry::Regs;
use crate::format::state;
use crate::path::{self, Stop};
use crate::sys::{self, err, nr, o};
use crate::table::{self, InUse};
use crate::{demote, mem, ring, session, thread};

/// Inodes locked at one time by one process, and no more than there are numbers for the engine; beyond, the description goes
/// to the kernel.
const HIDDEN: usize = 512;
/// Numbers that are looked at where there is no `/proc`.
const NUMBERS: i32 = 1024;
const F_UNLCK: i16 = 2;
const F_SETFD: usize = 2;
const F_OFD_GETLK: usize = 36;
const F_GETFL: usize = 3;
const F_SETFL: usize = 4;

/// An inode that may be locked.
#[derive(Debug)]
struct Held {
    ino: u64,
    /// The hidden descriptor; none yet if what is locked was locked through one that is the kernel's.
    fd: i32,
    /// Its description is the application's now.
    given: bool,
    /// What is kept open besides: as many as descriptions have become the kernel's. (One that were not noted down would keep the locks
    /// of its open file beyond the last close of that.)
    kept: Vec<i32>,
}

impl Held {
    fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        self.kept.iter().copied().chain([self.fd]).filter(|fd| *fd >= 0)
    }

    fn keep(&mut self, fd: i32) {
        // Without memory it stays open until the process ends.
        if self.kept.try_reserve(1).is_ok() {
            self.kept.push(fd);
        }
    }
}

const NONE: Held = Held { ino: 0, fd: -1, given: false, kept: Vec::new() };

/// Inodes of which this process has, or had, descriptors that are the kernel's, a bit for some of them: by those it may have
/// locked what is not known here.
static HANDED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn handed(ino: u64) -> (&'static AtomicU64, u64) {
    let bit = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52;
    (&HANDED[bit as usize / 64], 1 << (bit % 64))
}

/// A descriptor of the inode has become the kernel's.
pub fn hand_over(ino: u64) {
    let (word, bit) = handed(ino);
    if word.load(Ordering::Relaxed) & bit == 0 {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// A record lock is asked for by a number that is not ours: what it stands for may be the mount's (opened below a directory that
/// is the kernel's, or sent by another process).
pub fn beside(fd: i32) {
    if let Some(stat) = sys::fstat(fd).filter(session::is_the_mounts) {
        hand_over(stat.ino);
    }
}

fn is_handed(ino: u64) -> bool {
    // What is opened while the kernel has the inode, all names, or what there was no room for here, is not noted down.
    was_handed(ino)
        || session::kernel_owned(ino)
        || path::has_left()
        // Who shares this process's descriptors and not its memory may have locked by one.
        || ring::has()
        || session::counters().exhausted.load(Ordering::Relaxed) != 0
}

/// Whether one is noted down.
fn was_handed(ino: u64) -> bool {
    look();
    let (word, bit) = handed(ino);
    word.load(Ordering::Relaxed) & bit != 0
}

/// Looks at the descriptors that came with the program, before there are others: what is opened for this process's own use is
/// not the application's.
pub fn look() {
    // (A child of vfork has other descriptors than the process whose memory this is.)
    if !table::in_vfork() && !LOOKED.load(Ordering::Relaxed) {
        look_at_inherited();
        LOOKED.store(true, Ordering::Relaxed);
    }
}

/// They were looked at.
static LOOKED: AtomicBool = AtomicBool::new(false);

/// Notes down of which inodes there are descriptors that are the kernel's: the program before this one may have had them, or who
/// began the session.
#[cold]
fn look_at_inherited() {
    let look = |fd: i32| {
        let entry = table::entry(fd);
        let ours = table::index(entry).is_some() || entry & !table::CLOEXEC == table::INTERNAL;
        if !ours && let Some(stat) = sys::fstat(fd).filter(session::is_the_mounts) {
            hand_over(stat.ino);
        }
    };
    let path = c"/proc/self/fd".as_ptr() as usize;
    let flags = (o::DIRECTORY | o::CLOEXEC) as usize;
    let dir = limit::with_room(|| sys::call3(nr::OPEN, path, flags, 0));
    if sys::failed(dir) {
        (0..NUMBERS).for_each(look);
        return;
    }
    let mut room = [0u8; 1024];
    loop {
        let at = room.as_mut_ptr() as usize;
        let got = sys::call3(nr::GETDENTS64, dir as usize, at, room.len());
        let mut left = room.get(..got.max(0) as usize).unwrap_or_default();
        if left.is_empty() {
            break;
        }
        // Inode and position (16 bytes), length of the record, kind, name.
        while let Some([a, b]) = left.get(16..18) {
            let len = usize::from(u16::from_le_bytes([*a, *b]));
            let Some((record, rest)) = left.split_at_checked(len).filter(|_| len > 19) else {
                break;
            };
            let digits = record[19..].iter().map_while(|b| b.checked_sub(b'0').filter(|n| *n < 10));
            let number =
                digits.clone().fold(0i32, |n, d| n.wrapping_mul(10).wrapping_add(i32::from(d)));
            if digits.count() > 0 {
                look(number);
            }
            left = rest;
        }
    }
    sys::call1(nr::CLOSE, dir as usize);
}

/// All of them.
#[derive(Debug)]
struct List {
    all: [Held; HIDDEN],
    /// Places up to the last one in use.
    high: usize,
}

impl List {
    fn iter(&self) -> impl Iterator<Item = &Held> {
        self.all[..self.high].iter().filter(|h| h.ino != 0)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Held> {
        self.all[..self.high].iter_mut().filter(|h| h.ino != 0)
    }

    fn of(&mut self, ino: u64) -> Option<&mut Held> {
        self.iter_mut().find(|h| h.ino == ino)
    }

    /// The locks of an inode end, with all that is kept for them; whether there was anything.
    fn end(&mut self, ino: u64) -> bool {
        let Some(held) = self.of(ino) else { return false };
        close(held);
        while self.high > 0 && self.all[self.high - 1].ino == 0 {
            self.high -= 1;
        }
        true
    }

    fn free(&self) -> Option<usize> {
        self.all.iter().position(|h| h.ino == 0)
    }

    /// The place of an inode, or a free one; none if all are taken.
    fn place(&mut self, ino: u64) -> Option<&mut Held> {
        let at = match self.all[..self.high].iter().position(|h| h.ino == ino) {
            Some(at) => at,
            None => self.free()?,
        };
        self.high = self.high.max(at + 1);
        Some(&mut self.all[at])
    }
}

static LIST: Mutex<List> = Mutex::new(List { all: [const { NONE }; HIDDEN], high: 0 });

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

/// Whether the kernel lets a lock be set through a descriptor: one to read with takes none to write.
fn serves(fd: i32, access: Option<u32>) -> bool {
    let has = sys::call3(nr::FCNTL, fd as usize, F_GETFL, 0) as u32 & o::ACCMODE;
    access.is_none_or(|access| has == o::RDWR || has == access)
}

/// A descriptor of the inode that locks of this process go through. `access`: what it must be open for; anything that the
/// process may open it for, if nothing is said. [`Stop::Again`]: there is no place for one more, and the description is to be
/// given to the kernel.
fn hidden(ino: u64, access: Option<u32>) -> Result<i32, Stop> {
    if table::in_vfork() {
        return Err(Stop::Error(-37)); // ENOLCK: a vfork child may do no such thing
    }
    let known = || {
        let list = LIST.lock();
        list.iter().find(|h| h.ino == ino && h.fd >= 0 && serves(h.fd, access)).map(|h| h.fd)
    };
    if let Some(fd) = known() {
        return Ok(fd);
    }
    if !holds(ino) && LIST.lock().iter().count() >= HIDDEN.min(table::internal_share()) {
        return Err(Stop::Again);
    }
    // The mode may let this process do one thing only.
    let fd = demote::open_inode(ino, o::RDWR).or_else(|refused| {
        match access {
            Some(access) => demote::open_inode(ino, access),
            None => demote::open_inode(ino, 0).or_else(|_| demote::open_inode(ino, o::WRONLY)),
        }
        .map_err(|_| refused)
    })?;
    let mut list = LIST.lock();
    if list.iter().any(|h| h.ino == ino && h.fd >= 0 && serves(h.fd, access)) {
        // Another thread was quicker, and may have locked.
        drop(list);
        keep(ino, fd);
        return known().ok_or(Stop::Error(-37));
    }
    match list.place(ino) {
        Some(held) => {
            let before = replace(held, ino, fd);
            drop(list);
            if before >= 0 {
                // Were it closed, the locks that were set through it would go.
                keep(ino, before);
            }
        }
        None => {
            drop(list);
            keep(ino, fd);
            return Err(Stop::Again);
        }
    }
    Ok(fd)
}

/// Another descriptor of the inode is the hidden one from now on; the one of before, if it has no place yet, or -1.
fn replace(held: &mut Held, ino: u64, fd: i32) -> i32 {
    held.ino = ino;
    held.given = false;
    let before = core::mem::replace(&mut held.fd, fd);
    // What was opened while the inode was known is kept already.
    match held.kept.iter().position(|kept| *kept == fd) {
        Some(at) if before >= 0 => {
            held.kept[at] = before;
            -1
        }
        Some(at) => {
            held.kept.swap_remove(at);
            -1
        }
        None => before,
    }
}

/// Keeps the list as it is, for a fork.
pub fn locked() -> impl Drop {
    LIST.lock()
}

/// What the number that is being closed stands for.
#[derive(Clone, Copy, Debug)]
pub enum Closed {
    /// A file.
    File,
    /// A directory of ours, by its description.
    Directory(usize),
    /// A directory that the kernel has by that number: it knows what to do.
    Kernels,
}

/// A number of the inode is being closed: the process's locks on it go.
pub fn closing(ino: u64, what: Closed) {
    // A vfork child has no locks, and its parent's list.
    if table::in_vfork() {
        return;
    }
    if LIST.lock().end(ino) {
        return;
    }
    // The kernel does not know the number that is being closed, so another one is, by which it drops what it keeps.
    if let Some(fd) = another(ino, what) {
        // Where somebody has a lock it was noted down, lest the lock went.
        if !LIST.lock().end(ino) {
            table::close_internal(fd);
        }
    }
}

/// Another descriptor of the inode, to be closed, if its locks may have been asked for by one that is the kernel's. (Many
/// directories are closed, and few were ever locked: by a descriptor that became the kernel's for that.)
fn another(ino: u64, what: Closed) -> Option<i32> {
    match what {
        Closed::File if is_handed(ino) => {
            demote::open_inode(ino, 0).or_else(|_| demote::open_inode(ino, o::WRONLY)).ok()
        }
        Closed::Directory(index) if was_handed(ino) => demote::directory_again(index),
        _ => None,
    }
}

/// The same by its description, of one of ours.
pub fn closed_of(index: usize) -> Closed {
    match table::ofd(index).state.load(Ordering::Acquire) {
        state::DIR => Closed::Directory(index),
        _ => Closed::File,
    }
}

fn close(held: &mut Held) {
    held.descriptors().for_each(table::close_internal);
    *held = NONE;
}

/// The same for a number that the kernel has, if it is marked.
pub fn closing_marked(fd: i32) {
    if table::entry(fd) & !table::CLOEXEC == table::LOCKED {
        if let Some(stat) = sys::fstat(fd) {
            let is_dir = stat.mode & S_IFMT == S_IFDIR;
            closing(stat.ino, if is_dir { Closed::Kernels } else { Closed::File });
        }
        table::clear(fd);
    }
}

/// Whether the process may have locks on an inode.
pub fn holds(ino: u64) -> bool {
    !table::in_vfork() && LIST.lock().iter().any(|h| h.ino == ino)
}

/// The hidden descriptor of a locked inode, for a description with these flags to become; none if
/// it is of another kind or has been given before.
pub fn give(ino: u64, flags: u32) -> Option<i32> {
    if table::in_vfork() {
        return None;
    }
    let mut list = LIST.lock();
    let held = list.of(ino).filter(|h| !h.given)?;
    let has = sys::call3(nr::FCNTL, held.fd as usize, F_GETFL, 0) as u32;
    if (has ^ flags) & (o::ACCMODE | o::SYNC) != 0 {
        return None;
    }
    let may = o::APPEND | o::NONBLOCK | o::DIRECT | o::NOATIME;
    let ret = sys::call3(nr::FCNTL, held.fd as usize, F_SETFL, (flags & may) as usize);
    // The kernel learns of the size as it is now, as an open would have told it: pages beyond an
    // older one are a SIGBUS.
    held.given = ret == 0 && sys::fstat(held.fd).is_some();
    held.given.then_some(held.fd)
}

/// A descriptor of the inode is needed no more: it is closed, unless locks would go with it.
pub fn keep(ino: u64, fd: i32) {
    if !table::in_vfork() {
        let mut list = LIST.lock();
        if let Some(held) = list.of(ino) {
            if held.fd != fd && !held.kept.contains(&fd) {
                held.keep(fd);
            }
            return;
        }
        let full = list.free().is_none();
        drop(list);
        if full && is_locked(ino, fd) {
            // It may be this process's lock: the descriptor stays open until the process ends.
            return;
        }
    }
    table::close_internal(fd);
}

/// [`table::raise`] for a descriptor of an inode; the one in its old place stays open where
/// locks would go with it.
pub fn raise(ino: u64, fd: i32) -> i32 {
    if !holds(ino) {
        if !is_locked(ino, fd) {
            return table::raise(fd, true);
        }
        if let Some(held) = LIST.lock().place(ino).filter(|h| h.ino == 0) {
            *held = Held { ino, given: true, ..NONE };
        }
    }
    table::protect(fd);
    keep(ino, fd);
    fd
}

/// Whether somebody has a record lock on the file of a descriptor, and it may be this process, which has asked for it by a
/// descriptor that is the kernel's already. (Who keeps a descriptor for nothing keeps the locks of an open file of others, too.)
fn is_locked(ino: u64, fd: i32) -> bool {
    if table::in_vfork() || !is_handed(ino) {
        return false;
    }
    let mut lock = Flock { kind: 1, whence: 0, pad: 0, start: 0, len: 0, pid: 0, pad2: 0 };
    let at = (&raw mut lock) as usize;
    sys::call3(nr::FCNTL, fd as usize, F_OFD_GETLK, at) == 0 && lock.kind != F_UNLCK
}

/// Before an exec: shows the descriptors that locks depend on, and whether they are given; they go through it. But those of an
/// inode of which it closes a number end with that, and so do the locks.
pub fn through_exec(mut show: impl FnMut(i32, bool)) {
    if table::in_vfork() {
        return;
    }
    for number in table::used() {
        // The kernel does not know that number: another one is closed in its place.
        if let Some((index, ino)) = closed_by_exec(number as i32)
            && !holds(ino)
            && let Some(fd) = another(ino, closed_of(index))
            && let Some(held) = LIST.lock().place(ino)
        {
            replace(held, ino, fd);
        }
    }
    let closed = |number: usize| closed_by_exec(number as i32).map(|(_, ino)| ino);
    let ends = |ino| table::used().any(|number| closed(number) == Some(ino));
    for held in LIST.lock().iter().filter(|h| !ends(h.ino)) {
        for fd in held.descriptors() {
            sys::call3(nr::FCNTL, fd as usize, F_SETFD, 0);
            show(fd, held.given || fd != held.fd);
        }
    }
}

/// The description and the inode of a number of ours that is closed by an exec.
fn closed_by_exec(number: i32) -> Option<(usize, u64)> {
    let entry = table::entry(number);
    let index = table::index(entry).filter(|_| entry & table::CLOEXEC != 0)?;
    let ino = table::ofd(index).ino.load(Ordering::Acquire);
    (ino != 0).then_some((index, ino))
}

/// How many descriptors [`through_exec`] may show.
pub fn kept_open() -> usize {
    if table::in_vfork() {
        return 0;
    }
    LIST.lock().iter().map(|held| held.descriptors().count()).sum()
}

/// Exec has failed: as before.
pub fn exec_failed() {
    if table::in_vfork() {
        return;
    }
    for fd in LIST.lock().iter().flat_map(Held::descriptors) {
        sys::call3(nr::FCNTL, fd as usize, F_SETFD, 1);
    }
}

/// One of them arrives in a new image.
pub fn inherit(fd: i32, given: bool) {
    let Some(stat) = sys::fstat(fd) else { return };
    sys::call3(nr::FCNTL, fd as usize, F_SETFD, 1);
    table::protect(fd);
    match LIST.lock().place(stat.ino) {
        Some(held) if held.ino == 0 => *held = Held { ino: stat.ino, fd, given, ..NONE },
        Some(held) => {
            held.given |= given;
            held.keep(fd);
        }
        None => {}
    }
}

/// In a forked child, which has no locks.
pub fn forked() {
    let mut list = LIST.lock();
    list.iter_mut().for_each(close);
    list.high = 0;
}

/// What a lock must be in itself, before it is asked who may have it.
fn check(lock: &Flock) -> Result<(), Stop> {
    let too_long = lock.len > 0 && lock.start.checked_add(lock.len - 1).is_none();
    if lock.start >= 0 && too_long {
        return Err(Stop::Error(err::OVERFLOW));
    }
    let before_all = lock.start < 0 || lock.len < 0 && lock.start + lock.len < 0;
    if before_all || !(0..=2).contains(&lock.kind) {
        return Err(Stop::Error(err::INVAL));
    }
    Ok(())
}

/// F_GETLK (5), F_SETLK (6) and F_SETLKW (7). The last may sleep, so the kernel is asked on the way
/// out, where signals are delivered: the reply is then [`crate::entry::RAW_REPLACED`].
pub fn fcntl(r: &mut Regs, file: &InUse) -> Result<Option<isize>, Stop> {
    let command = r.rsi as u32;
    let mut lock: Flock = mem::get(r.rdx)?;
    let ofd = file.ofd();
    let mode = ofd.flags.load(Ordering::Acquire) & o::ACCMODE;
    let base = match lock.whence {
        0 => 0,
        1 => ofd.offset.load(Ordering::Acquire) as i64,
        2 => crate::fsys::fs()?.fgetattr(file.handle()?)?.size as i64,
        _ => return Err(Stop::Error(err::INVAL)),
    };
    lock.start = base.checked_add(lock.start).ok_or(err::OVERFLOW)?;
    lock.whence = 0;
    check(&lock)?;
    let (wants_read, wants_write) = (lock.kind == 0, lock.kind == 1);
    if command != 5 && ((wants_read && mode == o::WRONLY) || (wants_write && mode == 0)) {
        return Err(Stop::Error(err::BADF));
    }
    let ino = InodeId(ofd.ino.load(Ordering::Acquire)).0;
    let access = match lock.kind {
        _ if command == 5 => None,
        0 => Some(0),
        1 => Some(o::WRONLY),
        _ => None,
    };
    let fd = match hidden(ino, access) {
        // It may not be opened now, and no lock of this process can be on it: there is nothing to give back.
        Err(Stop::Error(err::ACCES)) if command != 5 && lock.kind == F_UNLCK && !is_handed(ino) => {
            return Ok(Some(0));
        }
        other => other?,
    };
    if command == 5 {
        let at = (&raw mut lock) as usize;
        let ret = sys::call3(nr::FCNTL, fd as usize, 5, at);
        if ret == 0 && lock.kind == F_UNLCK {
            // Nobody is in the way: nothing else of the question changes.
            mem::put(r.rdx, &F_UNLCK)?;
        } else if ret == 0 {
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
