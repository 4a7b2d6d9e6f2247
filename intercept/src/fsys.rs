//! The file system object of this process: made at the first touch of the prefix, forgotten (not
//! closed: it is the parent's) in a fork's child.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use base::{Errno, InodeId};
use client::dir::DirFs;
use client::fs::{Attr, Caller, FileSystem, Handle, S_IFDIR};
use client::libfs::{Config, LibFs};
use client::mutex::Mutex;

use crate::calls::limit;
use crate::format::Ofd;
use crate::sys::{self, Stat, nr, o};
use crate::{session, table};

type Object = Box<dyn FileSystem>;

static OBJECT: AtomicPtr<Object> = AtomicPtr::new(core::ptr::null_mut());
static CONNECTING: Mutex<()> = Mutex::new(());
/// O_PATH descriptor of the mount's root, from which placeholders are dup'ed.
static TEMPLATE: AtomicI32 = AtomicI32::new(-1);
/// The session was begun by somebody who is not the super-user.
static BOUND: AtomicBool = AtomicBool::new(false);
/// Who began it, for a file system that does not say.
static BEGUN_BY: AtomicU32 = AtomicU32::new(0);
static DEVICE: AtomicU64 = AtomicU64::new(0);

/// Nobody answered when the session was to begin.
static AWAY: AtomicBool = AtomicBool::new(false);

/// Whether there is no session, since nobody answers.
pub fn is_away() -> bool {
    !connected() && AWAY.load(Ordering::Relaxed)
}

/// Kernel form of an error.
pub fn code(e: Errno) -> isize {
    -(e.0 as isize)
}

/// The file system; connected on first use.
#[inline(always)]
pub fn fs() -> Result<&'static dyn FileSystem, isize> {
    let object = OBJECT.load(Ordering::Acquire);
    if object.is_null() {
        return connect_once();
    }
    // SAFETY: stored by `connect_once` from a leaked box, which only `part` frees, when no other thread is inside.
    Ok(unsafe { &**object })
}

/// Whether the session's rights are an ordinary user's: what this process may do when it is somebody else the service
/// would refuse to it, after the call has succeeded.
pub fn is_bound() -> bool {
    // The services may have been restarted since, and have begun another session with somebody else.
    connected() && (BOUND.load(Ordering::Relaxed) || begun_by().is_some_and(|user| user != 0))
}

/// Whether the prefix was touched yet.
pub fn connected() -> bool {
    !OBJECT.load(Ordering::Acquire).is_null()
}

#[cold]
fn connect_once() -> Result<&'static dyn FileSystem, isize> {
    if table::in_vfork() {
        // What it opened would be missing in its parent.
        return Err(code(Errno::IO));
    }
    let lock = CONNECTING.lock();
    let first = OBJECT.load(Ordering::Acquire).is_null();
    if first {
        let user = session::user();
        free_kept();
        let object = connect(session::header()).map_err(|error| {
            let away = matches!(
                error,
                Errno::AGAIN | Errno::NOTCONN | Errno::NOENT | Errno(111 | 104 | 32)
            );
            AWAY.store(away, Ordering::Relaxed);
            // What nobody answered is no answer about a file.
            code(if away { Errno::IO } else { error })
        })?;
        AWAY.store(false, Ordering::Relaxed);
        BOUND.store(sys::call1(nr::SETFSUID, usize::MAX) != 0, Ordering::Relaxed);
        BEGUN_BY.store(user, Ordering::Relaxed);
        object.vouch(InodeId(CWD[0].load(Ordering::Relaxed)), CWD[1].load(Ordering::Relaxed));
        OBJECT.store(Box::into_raw(Box::new(object)), Ordering::Release);
        if is_bound() {
            // Threads that have called before may be others than who has begun the session (`ask_identity`).
            forget_identity();
        }
    }
    drop(lock);
    if first {
        // Of a child of fork.
        stand(table::context().cwd.load(Ordering::Acquire));
    }
    // SAFETY: just stored, or stored by the thread that had the lock before.
    Ok(unsafe { &**OBJECT.load(Ordering::Acquire) })
}

/// Makes the file system object that the session names.
fn connect(header: &crate::format::Header) -> Result<Object, Errno> {
    let backend = &header.backend[..header.backend_len as usize];
    // The object keeps descriptors of its own, from `min` on: they are closed to the program.
    let min = table::internal_min();
    let watch = Some(table::watch as fn(i32, bool));
    if let Some(path) = backend.strip_prefix(b"dir:") {
        let options =
            client::dir::Options { fd_min: min, nodes_max: 256, watch, impersonate: false };
        return Ok(Box::new(DirFs::open(path, options)?));
    }
    if let Some(socket) = backend.strip_prefix(b"corbel:") {
        return Ok(Box::new(LibFs::attach(Config {
            fd_min: min,
            watch: Some(self::watch),
            room: Some(limit::room),
            barred: Some(table::in_vfork),
            mount: header.mount[..header.mount_len as usize].to_vec(),
            ..Config::new(socket)
        })?));
    }
    Err(Errno::NODEV)
}

/// Holds this module's locks, over a fork.
pub fn locked() -> impl Drop {
    CONNECTING.lock()
}

/// The working directory of the parent, and its proof.
static CWD: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// What shows the inode to another process of the session (see [`FileSystem::proof`]).
pub fn proof(ino: u64) -> u64 {
    fs().map_or(0, |fs| fs.proof(InodeId(ino)))
}

/// The inode of a description, which another process of the session may have opened.
pub fn shown(ofd: &Ofd) -> Result<InodeId, isize> {
    let ino = InodeId(ofd.ino.load(Ordering::Acquire));
    let proof = ofd.proof.load(Ordering::Relaxed);
    if proof != 0 {
        fs()?.vouch(ino, proof);
    }
    Ok(ino)
}

/// Makes sure that another process of the session can be shown the inode of a description.
pub fn show(ofd: &Ofd) {
    let ino = ofd.ino.load(Ordering::Acquire);
    if ino == 0 || ofd.proof.load(Ordering::Relaxed) != 0 || !connected() {
        return;
    }
    if let Some(proof) = fs().ok().and_then(|fs| fs.prove(InodeId(ino)).ok()) {
        ofd.proof.store(proof, Ordering::Relaxed);
    }
}

/// Before a vfork, in the parent: its child can begin no session.
pub fn before_vfork() {
    if connected()
        && let Ok(fs) = fs()
    {
        fs.before_vfork();
    }
}

/// Before a fork or vfork, in the parent: what the child, which cannot look into its parent's object, will
/// want to know, or the program that it executes.
pub fn before_child() {
    let cwd = table::context().cwd.load(Ordering::Acquire);
    let known = cwd == 0 || cwd == u64::MAX || cwd == CWD[0].load(Ordering::Relaxed);
    if !connected() || known {
        return;
    }
    // The super-user, who needs no proof, asks for one: the child may be somebody else.
    let shown = fs().ok().and_then(|fs| fs.prove(InodeId(cwd)).ok());
    CWD[1].store(shown.unwrap_or(0), Ordering::Relaxed);
    CWD[0].store(cwd, Ordering::Relaxed);
}

/// The working directory, if it is one of the mount's, and what shows it, for a program that is about to be executed by whoever
/// this process is now; nothing if that is not known without asking.
pub fn shown_cwd() -> Option<[u64; 2]> {
    let cwd = table::context().cwd.load(Ordering::Acquire);
    let [shown, proof] = [0, 1].map(|i| CWD[i].load(Ordering::Relaxed));
    (!matches!(cwd, 0 | u64::MAX) && cwd == shown && proof != 0).then_some([cwd, proof])
}

/// The working directory, and what shows it, for the next session.
pub fn show_cwd(ino: InodeId, proof: u64) {
    CWD[1].store(proof, Ordering::Relaxed);
    CWD[0].store(ino.0, Ordering::Relaxed);
}

/// A filter of the program's judges this process's calls (`arguments::confine`).
static CONFINED: AtomicBool = AtomicBool::new(false);

/// Before that is so: what was done is handed to the service, which nobody will ask for it any more.
pub fn confine() {
    if connected()
        && let Ok(fs) = fs()
    {
        // What was lost is told to who asks.
        let _ = fs.fsync_inode(&caller(), InodeId::ROOT);
    }
    CONFINED.store(true, Ordering::Relaxed);
}

/// Whether that is so.
pub fn is_confined() -> bool {
    CONFINED.load(Ordering::Relaxed)
}

/// In a fork's child. The parent's memory did not come along; its descriptors go, with the rights that they give, and
/// their numbers are kept for the child's own.
pub fn after_fork() {
    STOOD.store(0, Ordering::Release);
    OBJECT.store(core::ptr::null_mut(), Ordering::Release);
    forget_identity();
    if is_confined() {
        return;
    }
    let nothing = session::CONFIG_FD.load(Ordering::Relaxed) as usize;
    for own in &OWN_FDS {
        if let Some(fd) = own.load(Ordering::Acquire).checked_sub(1) {
            sys::call3(nr::DUP3, nothing, fd as usize, o::CLOEXEC as usize);
        }
    }
}

/// The numbers that [`after_fork`] has kept are free for the session that begins; where the program has all others,
/// they stay ours.
fn free_kept() {
    let (null, min) = (session::CONFIG_FD.load(Ordering::Relaxed), table::internal_min());
    let probe = sys::call3(nr::FCNTL, null as usize, sys::F_DUPFD_CLOEXEC, min as usize);
    if sys::failed(probe) {
        return;
    }
    sys::call1(nr::CLOSE, probe as usize);
    for own in &OWN_FDS {
        if let Some(fd) = own.swap(0, Ordering::AcqRel).checked_sub(1) {
            table::close_internal(fd as i32);
        }
    }
}

/// Ends this process's part in the session: nothing of it stays mapped or open. No other thread is at it.
pub fn part() {
    stand(0);
    let object = OBJECT.swap(core::ptr::null_mut(), Ordering::AcqRel);
    if !object.is_null() {
        // SAFETY: stored by `connect_once` from a leaked box; nobody else is inside, and nobody finds it any more.
        drop(unsafe { Box::from_raw(object) });
    }
    forget_identity();
}

/// Descriptors that LibFS keeps, plus one.
static OWN_FDS: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];

/// LibFS keeps a descriptor, or is about to close it.
fn watch(fd: i32, kept: bool) {
    let (from, to) = if kept { (0, fd as u32 + 1) } else { (fd as u32 + 1, 0) };
    let mut places = OWN_FDS.iter();
    places.any(|own| own.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    table::watch(fd, kept);
}

/// Who began the session that there is now, if there is one: another one may have begun since the services were
/// restarted.
pub fn begun_by() -> Option<u32> {
    let fs = if connected() { fs().ok()? } else { return None };
    fs.begun_by().or_else(|| Some(BEGUN_BY.load(Ordering::Relaxed)))
}

/// Opens an inode again in this process, for a description that came by fork or exec.
pub fn reopen(ino: InodeId, flags: u32) -> Result<Handle, isize> {
    let fs = fs()?;
    let keep = flags & (o::ACCMODE | o::DSYNC);
    fs.open(&caller(), ino, keep).or_else(|_| fs.open(&Caller::ROOT, ino, keep)).map_err(code)
}

/// Keeps a directory that is open here; nothing if it cannot be kept.
pub fn keep(ino: InodeId) -> Option<Handle> {
    fs().ok()?.open_dir(&Caller::ROOT, ino, 0).ok()
}

/// The handle that keeps the working directory, and 1.
static STOOD: AtomicU64 = AtomicU64::new(0);

/// The working directory is `ino` now (0: none of ours): removed, it lives as long as this process stands in it.
pub fn stand(ino: u64) {
    // Who has no session yet keeps it when it begins one (`connect_once`), which only to go somewhere does not.
    if table::in_vfork() || !connected() {
        return;
    }
    let kept = if matches!(ino, 0 | u64::MAX) { None } else { keep(InodeId(ino)) };
    let before = STOOD.swap(kept.map_or(0, |handle| handle.0 + 1), Ordering::AcqRel);
    if let Some(handle) = before.checked_sub(1) {
        release(Handle(handle));
    }
}

/// Gives a handle back.
pub fn release(handle: Handle) {
    if let Ok(fs) = fs() {
        fs.release(handle);
    }
}

/// Supplementary groups kept.
const GROUPS: usize = 256;

/// As whom a thread calls. The kernel keeps that for each thread, and so does this: functions of libc make all threads
/// somebody else, one after the other, but setfsuid(2) and calls made without libc the one that makes them.
#[derive(Debug)]
pub struct Identity {
    /// [`GENERATION`] when it was asked for; 0: never.
    generation: u32,
    uid: u32,
    gid: u32,
    pid: u32,
    count: usize,
    groups: [u32; GROUPS],
}

impl Identity {
    /// Of a thread that has not called yet.
    pub const UNKNOWN: Self =
        Self { generation: 0, uid: 0, gid: 0, pid: 0, count: 0, groups: [0; GROUPS] };
}

/// Of what is known of all threads.
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// Credentials of this thread, or of others, have changed.
pub fn forget_identity() {
    if GENERATION.fetch_add(1, Ordering::AcqRel) == u32::MAX {
        GENERATION.fetch_add(1, Ordering::AcqRel);
    }
}

/// Who calls. Groups beyond the first 256 are not seen.
pub fn caller() -> Caller<'static> {
    let id = &mut crate::thread::area().identity;
    let generation = GENERATION.load(Ordering::Acquire);
    if id.generation != generation {
        ask_identity(id);
        id.generation = generation;
    }
    Caller { uid: id.uid, gid: id.gid, groups: &id.groups[..id.count], pid: id.pid, umask: 0 }
}

#[cold]
fn ask_identity(id: &mut Identity) {
    // No such identity: what is asked for by changing nothing.
    id.uid = sys::call1(nr::SETFSUID, usize::MAX) as u32;
    id.gid = sys::call1(nr::SETFSGID, usize::MAX) as u32;
    if id.uid == 0 && !has_powers() {
        // A super-user who is none: only the kernel judges by single powers.
        crate::path::disable();
    }
    if is_bound() && begun_by().is_some_and(|user| user != id.uid) {
        // Threads of several users in a session of one: the service judges by that one what has been told done.
        crate::path::disable();
    }
    id.pid = sys::call0(nr::GETPID) as u32;
    let at = (&raw mut id.groups) as usize;
    id.count = sys::call2(nr::GETGROUPS, GROUPS, at).max(0) as usize;
}

/// Whether this thread has all the capabilities that a super-user is taken to have here: chown,
/// dac_override, fowner, fsetid, mknod.
fn has_powers() -> bool {
    const POWERS: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 27;
    // Version 3 of the interface; the calling thread.
    let header = [0x2008_0522u32, 0];
    // Effective, permitted, inheritable: their lower halves, then the upper ones.
    let mut sets = [0u32; 6];
    let (at, to) = ((&raw const header) as usize, (&raw mut sets) as usize);
    sys::call2(nr::CAPGET, at, to) == 0 && sets[0] & POWERS == POWERS
}

/// Who makes something, and the permission bits to ask for; whether the umask counts is the file
/// system's to say if it has access lists.
pub fn maker(mode: u32) -> Result<(Caller<'static>, u32), isize> {
    let umask = crate::calls::process::umask();
    let mut who = caller();
    if fs()?.keeps_acls() {
        who.umask = umask;
        return Ok((who, mode & 0o7777));
    }
    Ok((who, mode & 0o7777 & !umask))
}

/// Descriptor of the mount's root (O_PATH), made on first use.
pub fn template() -> Result<i32, isize> {
    let fd = TEMPLATE.load(Ordering::Acquire);
    if fd >= 0 {
        return Ok(fd);
    }
    let _lock = CONNECTING.lock();
    if TEMPLATE.load(Ordering::Acquire) < 0 {
        // The header keeps a NUL behind the path: its length is below PATH_MAX.
        let at = session::mount().as_ptr() as usize;
        let flags = (o::PATH | o::DIRECTORY | o::CLOEXEC) as usize;
        let fd = limit::with_room(|| sys::call3(nr::OPEN, at, flags, 0));
        if sys::failed(fd) {
            return Err(fd);
        }
        let fd = table::raise(fd as i32, true);
        if let Some(stat) = sys::fstat(fd) {
            DEVICE.store(stat.dev, Ordering::Release);
        }
        if table::in_vfork() {
            return Ok(fd);
        }
        TEMPLATE.store(fd, Ordering::Release);
    }
    Ok(TEMPLATE.load(Ordering::Acquire))
}

/// The same if it was made.
pub fn known_template() -> Option<i32> {
    Some(TEMPLATE.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
}

/// `st_dev` of the mount.
pub fn device() -> u64 {
    if template().is_ok() { DEVICE.load(Ordering::Acquire) } else { 0 }
}

/// Block size reported.
pub const BLOCK: i64 = 4096;

/// Attributes as `stat` gives them.
pub fn stat_of(attr: &Attr) -> Stat {
    let rdev = u64::from(attr.rdev);
    Stat {
        dev: device(),
        ino: attr.ino.0,
        nlink: u64::from(attr.nlink),
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        rdev,
        size: if attr.kind() == S_IFDIR && attr.size == 0 && attr.nlink > 0 {
            BLOCK
        } else {
            attr.size as i64
        },
        blksize: BLOCK,
        blocks: attr.blocks as i64,
        atime: [attr.atime.sec, i64::from(attr.atime.nsec)],
        mtime: [attr.mtime.sec, i64::from(attr.mtime.nsec)],
        ctime: [attr.ctime.sec, i64::from(attr.ctime.nsec)],
        ..Stat::default()
    }
}
