//! Which call goes where.
//!
//! [`CLASS`] decides in the entry code: 0 goes to the kernel at once; 1 comes here when the
//! descriptor in the first argument has a table entry; 2 always comes here.

mod arguments;
mod attrs;
mod both;
mod copy;
mod data;
mod fds;
mod identity;
pub mod limit;
mod names;
mod open;
mod poll;
pub mod process;

use core::sync::atomic::{AtomicU8, Ordering};

use crate::entry::{AFTER_VFORK, CALLS, DONE, FLUSH, RAW, RAW_REPLACED, Regs};
use crate::format::state;
use crate::path::Stop;
use crate::sys::{err, nr};
use crate::table::{self, InUse};

/// What a handler answers: the call's result, or that the kernel shall do it.
pub type Reply = Result<isize, Stop>;

/// See the module text. Changes when the strict mode begins, and when there is a ring ([`overlook`]).
pub static CLASS: [AtomicU8; CALLS] = classes();

const BY_DESCRIPTOR: [usize; 27] = [
    nr::READ,
    nr::WRITE,
    nr::CLOSE,
    nr::FSTAT,
    nr::LSEEK,
    nr::PREAD64,
    nr::PWRITE64,
    nr::READV,
    nr::WRITEV,
    nr::DUP,
    nr::FLOCK,
    nr::FTRUNCATE,
    nr::GETDENTS,
    nr::GETDENTS64,
    nr::FCHMOD,
    nr::FCHOWN,
    nr::FSTATFS,
    nr::FSETXATTR,
    nr::FGETXATTR,
    nr::FLISTXATTR,
    nr::FREMOVEXATTR,
    nr::FADVISE64,
    nr::READAHEAD,
    nr::SYNC_FILE_RANGE,
    nr::PREADV,
    nr::PWRITEV,
    nr::PREADV2,
];

const ALWAYS: [usize; 108] = [
    nr::OPEN,
    nr::OPENAT,
    nr::OPENAT2,
    nr::CREAT,
    nr::STAT,
    nr::LSTAT,
    nr::NEWFSTATAT,
    nr::STATX,
    nr::ACCESS,
    nr::FACCESSAT,
    nr::FACCESSAT2,
    nr::READLINK,
    nr::READLINKAT,
    nr::MKDIR,
    nr::MKDIRAT,
    nr::RMDIR,
    nr::UNLINK,
    nr::UNLINKAT,
    nr::RENAME,
    nr::RENAMEAT,
    nr::RENAMEAT2,
    nr::LINK,
    nr::LINKAT,
    nr::SYMLINK,
    nr::SYMLINKAT,
    nr::MKNOD,
    nr::MKNODAT,
    nr::CHMOD,
    nr::FCHMODAT,
    nr::FCHMODAT2,
    nr::CHOWN,
    nr::LCHOWN,
    nr::FCHOWNAT,
    nr::UTIME,
    nr::UTIMES,
    nr::FUTIMESAT,
    nr::UTIMENSAT,
    nr::TRUNCATE,
    nr::STATFS,
    nr::CHDIR,
    nr::FCHDIR,
    nr::GETCWD,
    nr::SETXATTR,
    nr::LSETXATTR,
    nr::GETXATTR,
    nr::LGETXATTR,
    nr::LISTXATTR,
    nr::LLISTXATTR,
    nr::REMOVEXATTR,
    nr::LREMOVEXATTR,
    nr::DUP2,
    nr::DUP3,
    nr::CLOSE_RANGE,
    nr::SENDFILE,
    nr::SPLICE,
    nr::TEE,
    nr::VMSPLICE,
    nr::COPY_FILE_RANGE,
    nr::SENDMSG,
    nr::SENDMMSG,
    nr::POLL,
    nr::PPOLL,
    nr::SELECT,
    nr::PSELECT6,
    nr::EPOLL_CTL,
    nr::IO_SUBMIT,
    nr::MMAP,
    nr::IOCTL,
    nr::FALLOCATE,
    nr::PWRITEV2,
    nr::CLONE,
    nr::CLONE3,
    nr::FORK,
    nr::VFORK,
    nr::EXECVE,
    nr::EXECVEAT,
    nr::EXIT_GROUP,
    nr::UMASK,
    nr::RT_SIGACTION,
    nr::CHROOT,
    nr::UNSHARE,
    nr::SETNS,
    nr::MOUNT,
    nr::MOVE_MOUNT,
    nr::PIVOT_ROOT,
    nr::UMOUNT2,
    nr::SECCOMP,
    nr::IO_URING_SETUP,
    nr::IO_URING_ENTER,
    nr::IO_URING_REGISTER,
    nr::SETUID,
    nr::SETGID,
    nr::SETREUID,
    nr::SETREGID,
    nr::SETRESUID,
    nr::SETRESGID,
    nr::SETGROUPS,
    nr::SETFSUID,
    nr::SETFSGID,
    nr::CAPSET,
    // Of the kernel's descriptors, too: see `data::sync_beside`.
    nr::FSYNC,
    nr::FDATASYNC,
    nr::SYNCFS,
    nr::SYNC,
    // See `lock::beside`.
    nr::FCNTL,
    nr::SETRLIMIT,
    nr::PRLIMIT64,
    AFTER_VFORK,
];

const fn classes() -> [AtomicU8; CALLS] {
    let mut class = [const { AtomicU8::new(0) }; CALLS];
    let mut i = 0;
    while i < BY_DESCRIPTOR.len() {
        class[BY_DESCRIPTOR[i]] = AtomicU8::new(1);
        i += 1;
    }
    i = 0;
    while i < arguments::FIRST.len() {
        class[arguments::FIRST[i]] = AtomicU8::new(1);
        i += 1;
    }
    i = 0;
    while i < arguments::OTHERS.len() {
        class[arguments::OTHERS[i].call] = AtomicU8::new(2);
        i += 1;
    }
    i = 0;
    while i < ALWAYS.len() {
        class[ALWAYS[i]] = AtomicU8::new(2);
        i += 1;
    }
    class
}

/// Whether calls of this number come here at all.
pub fn is_looked_at(call: usize) -> bool {
    CLASS.get(call).is_some_and(|class| class.load(Ordering::Relaxed) != 0)
}

/// From now on calls of this number are the kernel's.
pub fn overlook(call: usize) {
    CLASS[call].store(0, Ordering::Relaxed);
}

/// The same for all but those that make processes and programs.
pub fn overlook_all() {
    let kept = [nr::CLONE, nr::CLONE3, nr::FORK, nr::VFORK, nr::EXECVE, nr::EXECVEAT, AFTER_VFORK];
    (0..CALLS).filter(|call| !kept.contains(call)).for_each(overlook);
}

/// Called by the entry code with the application's registers; says how to leave.
pub extern "C" fn dispatch(r: &mut Regs) -> usize {
    if identity::PARTING.load(Ordering::Relaxed) {
        identity::stand_aside();
    }
    loop {
        let reply = match r.rax {
            // The four that matter most, first.
            nr::READ => data::read(r),
            nr::WRITE => data::write(r),
            nr::PREAD64 => data::pread(r),
            nr::PWRITE64 => data::pwrite(r),
            nr::CLONE | nr::CLONE3 | nr::FORK | nr::VFORK => return process::clone(r),
            nr::EXIT_GROUP => process::exit(),
            nr::FCNTL => match fds::fcntl(r) {
                Ok(Some(ret)) => Ok(ret),
                Ok(None) => return RAW_REPLACED,
                Err(stop) => Err(stop),
            },
            _ => other(r),
        };
        match reply {
            Ok(ret) | Err(Stop::Error(ret)) => {
                r.rax = ret as usize;
                return DONE;
            }
            Err(Stop::Kernel) => return RAW,
            // Once, since the kernel has it then.
            Err(Stop::Again) => {}
            Err(Stop::Flush) => return FLUSH,
        }
    }
}

fn other(r: &mut Regs) -> Reply {
    match r.rax {
        nr::LSEEK
        | nr::READV
        | nr::WRITEV
        | nr::PREADV
        | nr::PWRITEV
        | nr::PREADV2
        | nr::PWRITEV2
        | nr::FSYNC
        | nr::FDATASYNC
        | nr::FTRUNCATE
        | nr::FALLOCATE
        | nr::SYNC_FILE_RANGE
        | nr::SYNCFS
        | nr::SYNC
        | nr::FADVISE64
        | nr::READAHEAD
        | nr::GETDENTS64
        | nr::TRUNCATE => data::other(r),
        nr::OPEN | nr::OPENAT | nr::OPENAT2 | nr::CREAT => open::open(r),
        nr::CLOSE
        | nr::DUP
        | nr::DUP2
        | nr::DUP3
        | nr::CLOSE_RANGE
        | nr::IOCTL
        | nr::FLOCK
        | nr::FCHDIR
        | nr::CHDIR
        | nr::GETCWD
        | nr::GETDENTS
        | nr::SENDMSG
        | nr::SENDMMSG
        | nr::IO_SUBMIT
        | nr::IO_URING_SETUP
        | nr::IO_URING_ENTER
        | nr::IO_URING_REGISTER
        | nr::MMAP => fds::other(r),
        nr::SENDFILE | nr::COPY_FILE_RANGE | nr::SPLICE | nr::TEE | nr::VMSPLICE => copy::copy(r),
        nr::SETRLIMIT | nr::PRLIMIT64 => limit::set(r),
        nr::POLL | nr::PPOLL | nr::SELECT | nr::PSELECT6 | nr::EPOLL_CTL => poll::poll(r),
        nr::MKDIR
        | nr::MKDIRAT
        | nr::RMDIR
        | nr::UNLINK
        | nr::UNLINKAT
        | nr::RENAME
        | nr::RENAMEAT
        | nr::RENAMEAT2
        | nr::LINK
        | nr::LINKAT
        | nr::SYMLINK
        | nr::SYMLINKAT
        | nr::MKNOD
        | nr::MKNODAT
        | nr::READLINK
        | nr::READLINKAT => names::names(r),
        nr::EXECVE
        | nr::EXECVEAT
        | nr::UMASK
        | nr::RT_SIGACTION
        | nr::RT_SIGPROCMASK
        | nr::CHROOT
        | nr::UNSHARE
        | nr::SETNS
        | nr::MOUNT
        | nr::MOVE_MOUNT
        | nr::PIVOT_ROOT
        | nr::UMOUNT2
        | nr::SETUID
        | nr::SETGID
        | nr::SETREUID
        | nr::SETREGID
        | nr::SETRESUID
        | nr::SETRESGID
        | nr::SETGROUPS
        | nr::SETFSUID
        | nr::SETFSGID
        | nr::CAPSET
        | AFTER_VFORK => process::other(r),
        call if arguments::has(call) => arguments::call(r),
        _ => attrs::attrs(r),
    }
}

/// The open file behind a number, still served here; EBADF for the engine's own numbers, and the
/// kernel when it has taken the description over.
#[inline(always)]
pub fn served(fd: usize) -> Result<InUse, Stop> {
    let fd = fd as i32;
    let Some(file) = InUse::of(fd) else { return Err(not_ours(fd)) };
    match file.ofd().state.load(Ordering::Acquire) {
        state::FILE => Ok(file),
        state::DIR => {
            file.keep();
            Ok(file)
        }
        _ => gone(fd, file),
    }
}

/// The same, and a regular file; EISDIR for a directory.
#[inline(always)]
pub fn regular(fd: usize) -> Result<InUse, Stop> {
    let fd = fd as i32;
    let Some(file) = InUse::of(fd) else { return Err(not_ours(fd)) };
    match file.ofd().state.load(Ordering::Acquire) {
        state::FILE => Ok(file),
        state::DIR => Err(Stop::Error(err::ISDIR)),
        _ => gone(fd, file),
    }
}

#[cold]
fn not_ours(fd: i32) -> Stop {
    if table::entry(fd) & !table::CLOEXEC == table::INTERNAL {
        table::park_at_exit();
        Stop::Error(err::BADF)
    } else {
        Stop::Kernel
    }
}

#[cold]
fn gone(fd: i32, file: InUse) -> Result<InUse, Stop> {
    let index = file.index;
    drop(file);
    match crate::demote::descriptor(fd) {
        Ok(()) => Err(Stop::Kernel),
        // Somebody else wants the inode to be the kernel's, and this process could not open it now: it stays here.
        Err(err::ACCES) if table::stays(index) => {
            InUse::of(fd).filter(|file| file.index == index).ok_or(Stop::Error(err::BADF))
        }
        Err(e) => Err(Stop::Error(e)),
    }
}

/// Gives `fd` to the kernel if it is ours; whether it was. EBADF for the engine's own.
pub fn to_kernel(fd: usize) -> Result<bool, Stop> {
    let entry = table::entry(fd as i32);
    if table::index(entry).is_none() {
        let own = entry & !table::CLOEXEC == table::INTERNAL;
        return if own { Err(Stop::Error(err::BADF)) } else { Ok(false) };
    }
    crate::demote::descriptor(fd as i32)?;
    Ok(true)
}
