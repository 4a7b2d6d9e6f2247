//! Processes: fork, vfork, threads, exec, exit, and what belongs to a process.
//!
//! - *fork*: the child has a copy of our memory and table; it counts in the shared descriptions
//!   before it exists, forgets the parent's file system object, and opens handles again as needed.
//! - *vfork* (also as posix_spawn does it): the child shares memory but not descriptors, so it gets
//!   a copy of the table, and the parent's is put back when the parent goes on.
//! - *exec*: the table goes into a record of the session; the new image finds it by a number in its
//!   environment, which is rewritten here (also under `env -i`). A program that cannot be hooked
//!   gets kernel descriptors instead.

use core::sync::atomic::Ordering;

use base::InodeId;
use client::fs::S_IFREG;

use super::{Reply, arguments, identity, limit};
use crate::entry::{self, AFTER_VFORK, DONE, PUT_OFF, RAW, Regs, THREAD, VFORK};
use crate::format::{ENV, SLOT_FDS, SLOTS, Slot, state};
use crate::path::{self, PATH_MAX, Path, Stop};
use crate::sys::{self, Stat, at, err, nr, o};
use crate::table::{self, InUse, THREADS};
use crate::thread::{self, FRAME, VFORKS};
use crate::{demote, fsys, heap, lock, mem, mounts, ring, session, signal, strict};

const F_GETFD: usize = 1;
const CLONE_VM: u64 = 0x100;
const CLONE_FILES: u64 = 0x400;
const CLONE_FS: usize = 0x200;
const CLONE_NEWNS: usize = 0x2_0000;
const CLONE_NEWUSER: usize = 0x1000_0000;
const CLONE_NEWPID: usize = 0x2000_0000;
/// Namespaces in which names, users or the numbers of processes are others than those that the session knows.
const OTHER_WORLDS: usize = CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID;
const CLONE_VFORK: u64 = 0x4000;
const FILES_UNTIL_EXEC: u64 = CLONE_FILES | CLONE_VFORK;
/// Not looked up yet (see [`cwd`]).
const UNKNOWN: u64 = u64::MAX;

/// The calls of this module except clone.
pub fn other(r: &mut Regs) -> Reply {
    match r.rax {
        AFTER_VFORK => after_vfork(r),
        nr::EXECVE => exec(r, at::FDCWD, r.rdi, r.rdx, 0),
        nr::EXECVEAT => exec(r, r.rdi as i32, r.rsi, r.r10, r.r8 as u32),
        nr::UMASK => {
            let ret = sys::call1(nr::UMASK, r.rdi);
            table::context().umask.store(r.rdi as u32 & 0o777, Ordering::Release);
            Ok(ret)
        }
        nr::RT_SIGACTION => signal::sigaction(r).map_err(Stop::Error),
        nr::RT_SIGPROCMASK => strict::sigprocmask(r),
        nr::CHROOT => {
            // What the prefix means afterwards the kernel knows.
            let ret = sys::call1(nr::CHROOT, r.rdi);
            if ret == 0 {
                names_are_the_kernels();
            }
            Ok(ret)
        }
        nr::UNSHARE => Ok(unshare(r.rdi)),
        nr::SETNS => {
            arguments::give(r)?;
            // With no kind named it may be any.
            let other = r.rsi == 0 || r.rsi & OTHER_WORLDS != 0;
            if other {
                demote::all()?;
            }
            let ret = sys::call2(nr::SETNS, r.rdi, r.rsi);
            if ret == 0 && other {
                names_are_the_kernels();
            }
            Ok(ret)
        }
        nr::PIVOT_ROOT => {
            let ret = sys::call2(nr::PIVOT_ROOT, r.rdi, r.rsi);
            if ret == 0 {
                names_are_the_kernels();
            }
            Ok(ret)
        }
        nr::MOUNT | nr::MOVE_MOUNT | nr::UMOUNT2 => {
            arguments::give(r)?;
            // What is mounted below the prefix is not ours, and only the kernel sees it.
            let target = if r.rax == nr::MOUNT { r.rsi } else { r.r10 };
            let below = r.rax != nr::UMOUNT2
                && Path::get(target).is_ok_and(|p| path::behind_prefix(p.bytes()).is_some());
            let ret = sys::call6(r.rax, r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9);
            // By another name, or above the prefix, so that this leads elsewhere.
            if ret == 0 && (below || !demote::is_mounted() || mounts::any_below()) {
                names_are_the_kernels();
            }
            Ok(ret)
        }
        _ => {
            // set*id, setgroups and capset.
            Ok(identity::change(r))
        }
    }
}

/// `exit_group`. By itself, since every process comes here and the frame of the others takes two pages.
pub fn exit() -> Reply {
    // A vfork child's references are its parent's to give back.
    if !table::in_vfork() {
        table::drop_all_shared();
    }
    Err(Stop::Kernel)
}

/// In this process, and in the programs that it starts. What is open becomes the kernel's while this process still has a
/// session: its children may find no way to the service.
fn names_are_the_kernels() {
    // What cannot, stays.
    let _ = demote::all();
    table::context().cwd.store(0, Ordering::Release);
    path::leave();
}

/// A thread that takes descriptors, or a working directory, for itself: what is kept here is the whole process's. And in
/// namespaces of its own a process is not the one that the session knows: what it has open goes along, the rest is
/// between it and the kernel.
pub fn unshare(flags: usize) -> isize {
    let threads = THREADS.load(Ordering::SeqCst);
    if threads && flags & CLONE_FILES as usize != 0 {
        ring::foresee();
    }
    let other = flags & OTHER_WORLDS != 0;
    if other && let Err(e) = demote::all() {
        return e;
    }
    let ret = sys::call1(nr::UNSHARE, flags);
    if ret == 0 && (other || threads && flags & CLONE_FS != 0) {
        names_are_the_kernels();
    }
    ret
}

/// The mask for new files.
pub fn umask() -> u32 {
    let umask = &table::context().umask;
    let known = umask.load(Ordering::Acquire);
    if known != u32::MAX {
        return known;
    }
    let mask = sys::call1(nr::UMASK, 0o77) as u32;
    sys::call1(nr::UMASK, mask as usize);
    umask.store(mask, Ordering::Release);
    mask
}

/// Inode of the working directory when it is ours, else 0.
pub fn cwd() -> u64 {
    let cwd = &table::context().cwd;
    let ino = cwd.load(Ordering::Acquire);
    if ino != UNKNOWN {
        return ino;
    }
    let ino = find_cwd().unwrap_or(0);
    cwd.store(ino, Ordering::Release);
    fsys::stand(ino);
    ino
}

/// Has the kernel look up where it believes that this process stands, if that is in the mount: another process of the
/// session may have removed it, and the kernel has not heard of that.
pub fn look_at_cwd() {
    let mut buf = [0u8; PATH_MAX];
    let len = sys::call2(nr::GETCWD, buf.as_mut_ptr() as usize, buf.len());
    let Some(len) = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)) else { return };
    if buf.get(..len).is_some_and(|path| path::behind_prefix(path).is_some()) {
        let mut stat = sys::Stat::default();
        let to = (&raw mut stat) as usize;
        // The kernel ended it with a NUL.
        let at = buf.as_ptr() as usize;
        let flags = at::SYMLINK_NOFOLLOW as usize;
        sys::call4(nr::NEWFSTATAT, at::FDCWD as usize, at, to, flags);
    }
}

fn find_cwd() -> Option<u64> {
    let mut buf = [0u8; PATH_MAX];
    let len = sys::call2(nr::GETCWD, buf.as_mut_ptr() as usize, buf.len());
    if len == err::NOENT {
        // What was removed has no path any more, but that of before.
        let (link, to) = (c"/proc/self/cwd".as_ptr() as usize, buf.as_mut_ptr() as usize);
        let len = usize::try_from(sys::call3(nr::READLINK, link, to, buf.len())).ok()?;
        path::behind_prefix(buf.get(..len)?.strip_suffix(b" (deleted)")?)?;
        return removed_cwd(&stat_cwd()?);
    }
    let path = buf.get(..usize::try_from(len).ok()?.checked_sub(1)?)?;
    path::behind_prefix(path)?;
    let stat = stat_cwd()?;
    match path::inode_of(path) {
        Some(ino) if ino == stat.ino => Some(ino),
        // The kernel says where it was when it looked last: it may have been moved since, or removed, and something else be there.
        _ => removed_cwd(&stat),
    }
}

fn stat_cwd() -> Option<Stat> {
    let mut stat = Stat::default();
    let (to, here) = ((&raw mut stat) as usize, c"".as_ptr() as usize);
    let (fd, flags) = (at::FDCWD as usize, at::EMPTY_PATH as usize);
    (sys::call4(nr::NEWFSTATAT, fd, here, to, flags) == 0).then_some(stat)
}

/// A directory without a name, which is there as long as somebody has it open.
fn removed_cwd(stat: &Stat) -> Option<u64> {
    (session::is_the_mounts(stat) && path::is_removed(stat.ino)).then_some(stat.ino)
}

/// fork, vfork, clone, clone3.
pub fn clone(r: &mut Regs) -> usize {
    let mut args = [0u64; 11];
    let flags = match r.rax {
        nr::FORK => 17,
        nr::VFORK => CLONE_VM | CLONE_VFORK | 17,
        nr::CLONE => r.rdi as u64,
        _ => {
            let words = (r.rsi / 8).min(args.len());
            for (i, word) in args.iter_mut().enumerate().take(words) {
                let Ok(value) = mem::get(r.rdi.wrapping_add(i * 8)) else { return RAW };
                *word = value;
            }
            args[0]
        }
    };
    if matches!(
        flags & (CLONE_VM | CLONE_FILES | CLONE_VFORK),
        CLONE_FILES | FILES_UNTIL_EXEC | CLONE_VM
    ) {
        // Descriptors in common but not memory, or memory but not descriptors: no table of ours says what they have.
        ring::foresee();
    }
    let other = flags as usize & OTHER_WORLDS != 0;
    if other && let Err(e) = demote::all() {
        r.rax = e as usize;
        return DONE;
    }
    if flags & CLONE_VM == 0 {
        return fork(r, args, other);
    }
    if fsys::is_confined() {
        // Nothing is served here any more that the two could disagree about, and no call may be made for them.
        return RAW;
    }
    if flags & (CLONE_FILES | CLONE_VFORK) != CLONE_VFORK {
        // A thread, or something so like one that it shares our tables.
        THREADS.store(true, Ordering::SeqCst);
        let stack = if r.rax == nr::CLONE { r.rsi } else { (args[5] + args[6]) as usize };
        if strict::on() && stack != 0 && mem::put(stack - 8, &r.rcx).is_ok() {
            return THREAD;
        }
        return RAW;
    }
    fsys::before_vfork();
    fsys::before_child();
    let area = thread::area();
    let depth = area.vforks as usize;
    if depth >= VFORKS || table::push_context().is_none() {
        r.rax = err::NOMEM as usize;
        return DONE;
    }
    area.vfork_return[depth] = r.rcx;
    area.vfork_cur[depth] = area.cur + FRAME;
    area.vfork_raw[depth] = area.raw;
    area.vforks += 1;
    // The child has another thread id and runs on this area.
    area.tid = 0;
    if other {
        path::leave();
    }
    // From here on a handler would take the child's table for its own. The child puts the mask back, and so does the parent.
    area.vfork_mask[depth] = signal::block();
    VFORK
}

fn after_vfork(r: &Regs) -> Reply {
    let area = thread::area();
    if area.vforks == 0 {
        return Ok(err::NOSYS);
    }
    table::pop_context();
    area.vforks -= 1;
    area.tid = 0;
    // What the child left behind on this area is not ours: its frame, a signal put off.
    area.cur = area.vfork_cur[area.vforks as usize] - FRAME;
    area.raw = area.vfork_raw[area.vforks as usize];
    area.pending = 0;
    // Nor what it knew of itself.
    fsys::forget_identity();
    signal::set_mask(area.vfork_mask[area.vforks as usize]);
    Ok(r.rdi as isize)
}

/// Files and directories without a name live by their handles, which neither fork nor exec keeps: the kernel keeps
/// them instead. The others can be opened again. `exec`: what it closes needs nobody to keep it.
fn save_files(exec: bool) {
    if fsys::is_confined() {
        // Each call that is not the program's own would be its last.
        return;
    }
    // A session that began as the super-user's has no proofs, and the next one is somebody else's.
    let proofless = fsys::caller().uid != 0;
    for fd in table::used() {
        let fd = fd as i32;
        if exec && table::entry(fd) & table::CLOEXEC != 0 {
            continue;
        }
        if proofless && let Some(file) = InUse::of(fd) {
            fsys::show(file.ofd());
        }
        match is_nameless(fd) {
            Ok(true) => demote::at_best(fd),
            Ok(false) => {}
            // Nobody answers: the next question would take as long.
            Err(_) if fsys::is_away() => return,
            Err(_) => {}
        }
    }
}

fn is_nameless(fd: i32) -> Result<bool, isize> {
    let Some(file) = InUse::of(fd) else { return Ok(false) };
    let attr = match file.ofd().state.load(Ordering::Acquire) {
        state::FILE => fsys::fs()?.fgetattr(file.handle()?),
        state::DIR => fsys::fs()?.getattr(&fsys::caller(), fsys::shown(file.ofd())?),
        _ => return Ok(false),
    };
    Ok(attr.map_err(fsys::code)?.nlink == 0)
}

fn fork(r: &mut Regs, mut args: [u64; 11], other: bool) -> usize {
    save_files(false);
    let held = table::hold_all();
    let mut stack = 0;
    let ret = {
        fsys::before_child();
        let _locks = (lock::locked(), limit::locked(), fsys::locked(), heap::locked());
        match r.rax {
            nr::CLONE3 => {
                // stack and stack_size
                if args[5] != 0 {
                    stack = (args[5] + args[6]) as usize;
                }
                (args[5], args[6]) = (0, 0);
                let at = args.as_ptr() as usize;
                sys::call2(nr::CLONE3, at, r.rsi.min(size_of_val(&args)))
            }
            nr::CLONE => {
                stack = r.rsi;
                sys::call6(nr::CLONE, r.rdi, 0, r.rdx, r.r10, r.r8, 0)
            }
            _ => sys::call0(nr::FORK),
        }
    };
    if ret == 0 {
        thread::area().tid = 0;
        signal::forked();
        if !fsys::is_confined() {
            session::note_thread(thread::tid());
            strict::arm();
        }
        table::after_fork();
        lock::forked();
        limit::forked();
        fsys::after_fork();
        if other {
            names_are_the_kernels();
        }
        if stack != 0 {
            r.rsp = stack;
        }
    } else if sys::failed(ret) {
        table::drop_held();
    }
    drop(held);
    r.rax = ret as usize;
    DONE
}

/// Whether the kernel takes every program for one with rights of its own (AT_SECURE), which loads no library that
/// it is told of: the effective user or group is not the real one.
fn is_secure() -> bool {
    let who = [nr::GETUID, nr::GETEUID, nr::GETGID, nr::GETEGID].map(sys::call0);
    who[0] != who[1] || who[2] != who[3]
}

/// Whether what an exec names leads to a program that will load us ([`hookable`]): `execveat` names one by a descriptor alone, too.
fn leads_to_hookable(dirfd: i32, name: usize, flags: u32) -> bool {
    let itself = flags & at::EMPTY_PATH != 0 && mem::get::<u8>(name).is_ok_and(|first| first == 0);
    let Some(fd) = u64::try_from(dirfd).ok().filter(|_| itself) else {
        return hookable(dirfd, name, flags, 0);
    };
    let (mut path, mut digits) = ([0u8; 40], [0; 20]);
    let mut len = 0;
    for part in [b"/proc/self/fd/".as_slice(), demote::decimal(fd, &mut digits)] {
        path[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    hookable(at::FDCWD, path.as_ptr() as usize, 0, 0)
}

/// Whether a program will load us: a dynamic x86-64 program of glibc, not set-id, or a script whose
/// interpreter is. On the way, a file of ours that is to be executed becomes the kernel's.
fn hookable(dirfd: i32, name: usize, flags: u32, depth: u32) -> bool {
    // Without waiting: it may be a pipe that nobody writes to.
    let follow = if flags & at::SYMLINK_NOFOLLOW != 0 { o::NOFOLLOW } else { 0 };
    let flags = (o::CLOEXEC | o::NONBLOCK | follow) as usize;
    let open = || sys::call4(nr::OPENAT, dirfd as usize, name, flags, 0);
    let fd = limit::with_room(open);
    if is_nowhere(fd) {
        return true;
    }
    if sys::failed(fd) {
        return is_missing(dirfd, name, follow);
    }
    let mut head = [0u8; 2048];
    let stat = sys::fstat(fd as i32).unwrap_or_default();
    let at = head.as_mut_ptr() as usize;
    let got = sys::call4(nr::PREAD64, fd as usize, at, head.len() - 1, 0);
    let Stat { mode, .. } = stat;
    let privileged = mode & 0o4000 != 0 || mode & 0o2010 == 0o2010 || has_capabilities(fd as usize);
    if session::is_the_mounts(&stat) {
        demote::before_exec(stat.ino);
    }
    let head = &mut head[..got.max(0) as usize];
    let verdict = mode & 0o170_000 == S_IFREG
        && !privileged
        && (script(head, depth) || dynamic(head, fd as usize));
    if session::is_the_mounts(&stat) && !table::in_vfork() {
        // Who has locked the very file keeps that over exec.
        lock::keep(stat.ino, lock::raise(stat.ino, fd as i32));
    } else {
        sys::call1(nr::CLOSE, fd as usize);
    }
    verdict
}

/// Whether an error says that a name leads to nothing.
fn is_nowhere(error: isize) -> bool {
    matches!(error, err::NOENT | err::NOTDIR)
}

/// Of a program that cannot be opened for reading: whether exec will fail. What may only be executed may have rights of
/// its own, or be one that the library is not loaded into.
fn is_missing(dirfd: i32, name: usize, follow: u32) -> bool {
    let mut stat = Stat::default();
    let flags = if follow != 0 { at::SYMLINK_NOFOLLOW } else { 0 };
    let to = (&raw mut stat) as usize;
    if sys::call4(nr::NEWFSTATAT, dirfd as usize, name, to, flags as usize) != 0 {
        return true;
    }
    if stat.mode & 0o170_000 == S_IFREG && session::is_the_mounts(&stat) {
        demote::before_exec(stat.ino);
    }
    false
}

/// Whether a program has rights of its own by its file's capabilities.
fn has_capabilities(fd: usize) -> bool {
    let name = c"security.capability".as_ptr() as usize;
    sys::call4(nr::FGETXATTR, fd, name, 0, 0) > 0
}

fn script(head: &mut [u8], depth: u32) -> bool {
    if !head.starts_with(b"#!") || depth >= 4 {
        return false;
    }
    let from = head[2..].iter().position(|b| *b != b' ' && *b != b'\t').map_or(2, |p| p + 2);
    let end = head[from..].iter().position(|b| b" \t\n\0".contains(b));
    let Some(end) = end.map(|e| e + from) else { return false };
    head[end] = 0;
    hookable(at::FDCWD, head[from..].as_ptr() as usize, 0, depth + 1)
}

fn dynamic(head: &[u8], fd: usize) -> bool {
    let word = |at: usize| -> u64 {
        head.get(at..at + 8).map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap_or_default()))
    };
    if head.len() < 64 || !head.starts_with(b"\x7fELF\x02\x01") || word(16) >> 16 & 0xffff != 62 {
        return false;
    }
    let (phoff, count) = (word(32) as usize, (word(56) & 0xffff) as usize);
    for header in (0..count.min(32)).map(|i| phoff.saturating_add(i * 56)) {
        if header + 56 > head.len() || word(header) as u32 != 3 {
            continue;
        }
        let mut name = [0u8; 64];
        let at = name.as_mut_ptr() as usize;
        sys::call4(nr::PREAD64, fd, at, name.len() - 1, word(header + 8) as usize);
        let end = name.iter().position(|b| *b == 0).unwrap_or(0);
        return name[..end].ends_with(b"/ld-linux-x86-64.so.2");
    }
    false
}

/// A free exec record, claimed for this process.
fn claim() -> Option<usize> {
    let pid = sys::call0(nr::GETPID) as u32;
    for (i, slot) in session::slots().iter().enumerate() {
        let owner = slot.pid.load(Ordering::Acquire);
        let stale = owner != 0 && sys::call2(nr::KILL, owner as usize, 0) == -3;
        if (owner == 0 || stale)
            && slot.pid.compare_exchange(owner, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            slot.count.store(0, Ordering::Release);
            return Some(i);
        }
    }
    None
}

/// Writes the table into the record; what does not fit goes to the kernel.
fn publish(slot: &Slot) {
    let mut count = 0;
    for fd in table::used() {
        let entry = table::entry(fd as i32);
        if entry & !table::CLOEXEC == table::LOCKED
            && sys::call3(nr::FCNTL, fd, F_GETFD, 0) == 0
            && count < SLOT_FDS
        {
            slot.fds[count][0].store(fd as u32, Ordering::Relaxed);
            slot.fds[count][1].store(table::LOCKED, Ordering::Relaxed);
            count += 1;
        }
        if table::index(entry).is_none() {
            continue;
        }
        if count + lock::kept_open() >= SLOT_FDS {
            demote::at_best(fd as i32);
            continue;
        }
        slot.fds[count][0].store(fd as u32, Ordering::Relaxed);
        slot.fds[count][1].store(entry, Ordering::Relaxed);
        count += 1;
    }
    lock::through_exec(|fd, given| {
        if count < SLOT_FDS {
            let given = if given { table::CLOEXEC } else { 0 };
            slot.fds[count][0].store(fd as u32, Ordering::Relaxed);
            slot.fds[count][1].store(table::INTERNAL | given, Ordering::Relaxed);
            count += 1;
        }
    });
    let [cwd, proof] = fsys::shown_cwd().unwrap_or_default();
    slot.cwd[0].store(cwd, Ordering::Relaxed);
    slot.cwd[1].store(proof, Ordering::Relaxed);
    slot.threads.store(u32::from(THREADS.load(Ordering::SeqCst)), Ordering::Relaxed);
    slot.count.store(count as u32, Ordering::Release);
}

/// Text written into memory that outlives the frame.
struct Text {
    at: usize,
    end: usize,
}

impl Text {
    fn put(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(self.end - self.at);
        mem::fresh(self.at, len).copy_from_slice(&bytes[..len]);
        self.at += len;
    }

    fn number(&mut self, n: i32) {
        if n < 0 {
            self.put(b"-");
        }
        let mut digits = [0; 20];
        self.put(demote::decimal(u64::from(n.unsigned_abs()), &mut digits));
    }
}

fn entry_is(at: usize, name: &[u8]) -> Result<bool, mem::Fault> {
    for (i, b) in name.iter().chain(b"=").enumerate() {
        if mem::get::<u8>(at + i)? != *b {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Room for the two strings that are replaced.
const TEXT: usize = 16 << 10;
/// Environment strings at most; more is E2BIG for the kernel as well.
const STRINGS: usize = 1 << 18;

/// The application's environment with our two variables in it, or without them; the mapping and its length. `ours`: the
/// descriptor of the state, or -1, and the exec record.
fn environment(envp: usize, ours: Option<(i32, i32)>) -> Result<(usize, usize), Stop> {
    let mut count = 0;
    while envp != 0 && mem::get::<usize>(envp + count * 8)? != 0 {
        count += 1;
        if count > STRINGS {
            return Err(Stop::Error(-7));
        }
    }
    let len = ((count + 3) * 8 + TEXT + 4095) & !4095;
    let base = sys::map_anon(len).ok_or(err::NOMEM)?;
    let list = mem::fresh(base, (count + 3) * 8);
    let mut text = Text { at: base + (count + 3) * 8, end: base + len - 1 };
    let mut used = 0;
    let mut push = |at: usize| {
        list[used * 8..used * 8 + 8].copy_from_slice(&at.to_le_bytes());
        used += 1;
    };
    let mut preload = None;
    for i in 0..count {
        let at: usize = mem::get(envp + i * 8)?;
        if entry_is(at, b"LD_PRELOAD")? {
            preload = Some(at);
        } else if !entry_is(at, ENV.as_bytes())? {
            push(at);
        }
    }
    let header = session::header();
    let library = &header.library[..header.library_len as usize];
    let mut between: &[u8] = b"";
    if let Some((state, slot)) = ours {
        push(text.at);
        text.put(ENV.as_bytes());
        for (before, number) in
            [("=", session::CONFIG_FD.load(Ordering::Relaxed)), (",", state), (",", slot)]
        {
            text.put(before.as_bytes());
            text.number(number);
        }
        text.put(b"\0");
    }
    push(text.at);
    text.put(b"LD_PRELOAD=");
    if ours.is_some() {
        text.put(library);
        between = b":";
    }
    if let Some(at) = preload {
        let mut value = [0u8; 4096];
        if let Some(len) = mem::get_string(at + b"LD_PRELOAD=".len(), &mut value)? {
            // What the user asked for stays, without us in it twice.
            for part in value[..len].split(|b| *b == b':' || *b == b' ') {
                if !part.is_empty() && part != library {
                    text.put(between);
                    text.put(part);
                    between = b":";
                }
            }
        }
    }
    text.put(b"\0");
    push(0);
    Ok((base, len))
}

/// As it was asked for, with another environment; returns if it failed.
fn execute(r: &Regs, (env, len): (usize, usize)) -> isize {
    // The parent of a vfork gives the memory back.
    let context = table::context();
    context.scratch_len.store(len as u64, Ordering::Release);
    context.scratch.store(env as *mut u8, Ordering::Release);
    // A signal that was put off, in a process that is no more, would leave all blocked in the program that follows.
    let ret = entry::unless_put_off(&match r.rax {
        nr::EXECVE => [nr::EXECVE, r.rdi, r.rsi, env, 0, 0, 0],
        _ => [nr::EXECVEAT, r.rdi, r.rsi, r.rdx, env, r.r8, 0],
    });
    context.scratch.store(core::ptr::null_mut(), Ordering::Release);
    sys::call2(nr::MUNMAP, env, len);
    ret
}

fn exec(r: &Regs, dirfd: i32, name: usize, envp: usize, flags: u32) -> Reply {
    if r.rax == nr::EXECVEAT && table::index(table::entry(dirfd)).is_some() {
        demote::descriptor(dirfd)?;
    }
    let stays = !path::has_left();
    if stays && r.rax == nr::EXECVE {
        // As execvp asks for a name in each directory of PATH: what exec would be told, without getting ready for it.
        let mut stat = Stat::default();
        let found = sys::call2(nr::STAT, name, (&raw mut stat) as usize);
        if is_nowhere(found) {
            return Ok(found);
        }
    }
    save_files(true);
    let hooked = stays && leads_to_hookable(dirfd, name, flags) && !is_secure();
    // What runs as somebody else begins a session of its own, and what cannot be hooked has none.
    let state = if fsys::is_confined() { -1 } else { session::hand_over(hooked) };
    let slot = if state >= 0 { claim() } else { None };
    let Some(slot) = slot else {
        if !hooked {
            session::counters().unhooked.fetch_add(1, Ordering::Relaxed);
        }
        for fd in table::used() {
            let entry = table::entry(fd as i32);
            if table::index(entry).is_some() && entry & table::CLOEXEC == 0 {
                demote::before_another(fd as i32)?;
            }
        }
        if fsys::is_confined() {
            return failed_to(execute(r, environment(envp, None)?));
        }
        // They stay open in the program that does not know of them.
        lock::through_exec(|_, _| {});
        if stays && !hooked {
            // What it starts may be hooked, and begins a session of its own.
            return Err(Stop::Kernel);
        }
        let ret = execute(r, environment(envp, hooked.then_some((state, -1)))?);
        session::hand_over(false);
        lock::exec_failed();
        return failed_to(ret);
    };
    let record = &session::slots()[slot];
    publish(record);
    let failed = || {
        session::hand_over(false);
        lock::exec_failed();
        record.pid.store(0, Ordering::Release);
    };
    let env = match environment(envp, Some((state, slot as i32))) {
        Ok(env) => env,
        Err(stop) => {
            failed();
            return Err(stop);
        }
    };
    let context = table::context();
    context.executed.store(true, Ordering::Release);
    let ret = execute(r, env);
    // Still here: it failed.
    context.executed.store(false, Ordering::Release);
    failed();
    failed_to(ret)
}

/// An exec that was not, because a signal came, begins again behind its handler.
fn failed_to(ret: isize) -> Reply {
    if ret == PUT_OFF { Err(Stop::Flush) } else { Ok(ret) }
}

/// In a new image: takes the table out of the record.
pub fn inherit(slot: i32) {
    let context = table::context();
    context.cwd.store(UNKNOWN, Ordering::Release);
    context.umask.store(u32::MAX, Ordering::Release);
    let Some(record) = usize::try_from(slot).ok().filter(|s| *s < SLOTS) else { return };
    let record = &session::slots()[record];
    if record.pid.load(Ordering::Acquire) != sys::call0(nr::GETPID) as u32 {
        return;
    }
    let count = (record.count.load(Ordering::Acquire) as usize).min(SLOT_FDS);
    let [cwd, proof] = [0, 1].map(|i| record.cwd[i].load(Ordering::Relaxed));
    if cwd != 0 {
        context.cwd.store(cwd, Ordering::Release);
        fsys::show_cwd(InodeId(cwd), proof);
    }
    if record.threads.load(Ordering::Relaxed) != 0 {
        table::free_own_locks();
    }
    for pair in &record.fds[..count] {
        let fd = pair[0].load(Ordering::Relaxed) as usize;
        let entry = pair[1].load(Ordering::Relaxed);
        match entry & !table::CLOEXEC {
            table::INTERNAL => lock::inherit(fd as i32, entry & table::CLOEXEC != 0),
            table::LOCKED => table::mark_locked(fd as i32),
            _ => {}
        }
        let Some(index) = table::index(entry) else { continue };
        if fd >= table::FDS || entry & table::CLOEXEC != 0 {
            table::drop_shared(index);
        } else {
            table::inherit(fd, entry);
        }
    }
    record.pid.store(0, Ordering::Release);
}
