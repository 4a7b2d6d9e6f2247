//! Descriptors that a call hands to the kernel: in the first argument of a call that no file of ours serves, in other
//! arguments, in memory. What stands there for a file of ours is another file, so each becomes the kernel's before
//! the call. These tables and the handlers of dup, mmap, poll and select, epoll_ctl, sendfile and its family,
//! SCM_RIGHTS, io_submit, execveat and `*at` are all that Linux 6.18 has; rings of io_uring are in ring.rs.
//!
//! Not here are calls that refuse everything that is not of their own kind as they refuse what stands for a file (EBADF):
//! those for pidfds, message queues, groups of perf events, and BPF.

use super::{Reply, to_kernel};
use crate::entry::Regs;
use crate::path::{self, Stop};
use crate::sys::{self, Stat, err, nr, o};
use crate::{demote, fsys, mem, table};

const FANOTIFY_MARK: usize = 301;
const KCMP: usize = 312;
const KEXEC_FILE_LOAD: usize = 320;
const FSCONFIG: usize = 431;
const MOUNT_SETATTR: usize = 442;
const LANDLOCK_ADD_RULE: usize = 445;

/// Calls with one in the first argument that are rare, and to which the kernel has the right answer once it has
/// the file. Sockets, timers, signals, epoll, inotify, namespaces, mounts; handles of files, and the newest
/// calls that take a directory or, with an empty path, a file.
pub const FIRST: [usize; 45] = [
    nr::CONNECT,
    43, // accept
    44, // sendto
    45, // recvfrom
    nr::RECVMSG,
    48,  // shutdown
    49,  // bind
    50,  // listen
    51,  // getsockname
    52,  // getpeername
    54,  // setsockopt
    55,  // getsockopt
    232, // epoll_wait
    245, // mq_getsetattr
    254, // inotify_add_watch
    255, // inotify_rm_watch
    281, // epoll_pwait
    282, // signalfd
    286, // timerfd_settime
    287, // timerfd_gettime
    288, // accept4
    289, // signalfd4
    299, // recvmmsg
    FANOTIFY_MARK,
    nr::NAME_TO_HANDLE_AT,
    nr::OPEN_BY_HANDLE_AT,
    nr::SETNS,
    313, // finit_module
    KEXEC_FILE_LOAD,
    428, // open_tree
    nr::MOVE_MOUNT,
    FSCONFIG,
    432, // fsmount
    433, // fspick
    441, // epoll_pwait2
    MOUNT_SETATTR,
    443, // quotactl_fd
    LANDLOCK_ADD_RULE,
    451, // cachestat
    463, // setxattrat
    464, // getxattrat
    465, // listxattrat
    466, // removexattrat
    467, // open_tree_attr
    468, // file_getattr
];

/// A descriptor elsewhere.
#[derive(Clone, Copy)]
pub struct Other {
    /// In which call.
    pub call: usize,
    place: Place,
    /// Whether it means one this time.
    when: fn(&Regs) -> bool,
}

#[derive(Clone, Copy)]
enum Place {
    /// In an argument, counted from 0.
    Argument(usize),
    /// In memory: 32 bits at an offset from the address in an argument.
    Memory(usize, usize),
}
use Place::{Argument, Memory};

const fn other(call: usize, place: Place, when: fn(&Regs) -> bool) -> Other {
    Other { call, place, when }
}

/// All of them.
pub const OTHERS: [Other; 12] = [
    other(469, Argument(0), always), // file_setattr
    other(FANOTIFY_MARK, Argument(3), always),
    other(KCMP, Argument(3), |r| compares(r, r.rdi)),
    other(KCMP, Argument(4), |r| compares(r, r.rsi)),
    other(KEXEC_FILE_LOAD, Argument(1), always),
    other(nr::MOVE_MOUNT, Argument(2), always),
    // FSCONFIG_SET_PATH, FSCONFIG_SET_PATH_EMPTY, FSCONFIG_SET_FD
    other(FSCONFIG, Argument(4), |r| (3..=5).contains(&(r.rsi as u32))),
    // One of this process, if the pidfd is.
    other(nr::PIDFD_GETFD, Argument(1), always),
    // MOUNT_ATTR_IDMAP: a user namespace.
    other(MOUNT_SETATTR, Memory(3, 24), |r| {
        r.r8 >= 32 && mem::get::<u64>(r.r10).is_ok_and(|set| set & 0x10_0000 != 0)
    }),
    // LANDLOCK_RULE_PATH_BENEATH
    other(LANDLOCK_ADD_RULE, Memory(2, 8), |r| r.rsi as u32 == 1),
    // See `restrict`.
    other(nr::LANDLOCK_RESTRICT_SELF, Argument(0), always),
    // PR_SET_MM with PR_SET_MM_EXE_FILE
    other(nr::PRCTL, Argument(2), |r| r.rdi as u32 == 35 && r.rsi == 13),
];

/// Commands of ioctl, on any file, with a descriptor in the third argument ([`VALUE`]) or behind it. (FICLONE: copy.rs.)
const COMMANDS: [(u32, usize); 12] = [
    (0x4c00, VALUE),      // LOOP_SET_FD
    (0x4c06, VALUE),      // LOOP_CHANGE_FD
    (0x4c0a, 0),          // LOOP_CONFIGURE
    (0x5000_9401, 0),     // BTRFS_IOC_SNAP_CREATE
    (0x5000_9417, 0),     // BTRFS_IOC_SNAP_CREATE_V2
    (0x4048_9426, 0),     // BTRFS_IOC_SEND
    (0xc028_660f, 4),     // EXT4_IOC_MOVE_EXT
    (0xc020_f509, 0),     // F2FS_IOC_MOVE_RANGE
    (0x4028_5881, 0),     // XFS_IOC_EXCHANGE_RANGE
    (0x4004_cf03, VALUE), // CIFS_IOC_COPYCHUNK_FILE
    (0x4010_e501, 0),     // FUSE_DEV_IOC_BACKING_OPEN
    (0x4018_2103, 12),    // SECCOMP_IOCTL_NOTIF_ADDFD
];
const VALUE: usize = usize::MAX;
/// FIDEDUPERANGE: its targets stand in a list.
const DEDUPE: u32 = 0xc018_9436;
/// Targets looked at; the kernel takes a page of them.
const TARGETS: usize = 128;

const fn always(_: &Regs) -> bool {
    true
}

/// KCMP_FILE with a process that is this one. (What stands for files of ours is one and the same.)
fn compares(r: &Regs, pid: usize) -> bool {
    r.rdx as u32 == 0 && pid as i32 as isize == sys::call0(nr::GETPID)
}

/// Whether a call is in these tables.
pub fn has(call: usize) -> bool {
    call == nr::SECCOMP || FIRST.contains(&call) || OTHERS.iter().any(|other| other.call == call)
}

/// Gives the descriptors of a call to the kernel. What cannot be read the kernel finds bad, too.
pub fn give(r: &Regs) -> Result<(), Stop> {
    if FIRST.contains(&r.rax) {
        to_kernel(r.rdi)?;
    }
    let arguments = [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9];
    for other in OTHERS.iter().filter(|other| other.call == r.rax && (other.when)(r)) {
        match other.place {
            Argument(i) => {
                to_kernel(arguments[i])?;
            }
            Memory(i, offset) => behind(arguments[i].wrapping_add(offset))?,
        }
    }
    Ok(())
}

fn behind(at: usize) -> Result<(), Stop> {
    if let Ok(fd) = mem::get::<u32>(at) {
        to_kernel(fd as usize)?;
    }
    Ok(())
}

/// The same for an ioctl.
pub fn give_command(r: &Regs) -> Result<(), Stop> {
    let command = r.rsi as u32;
    if command == DEDUPE {
        let count = mem::get::<u16>(r.rdx.wrapping_add(16)).unwrap_or(0);
        for i in 0..usize::from(count).min(TARGETS) {
            behind(r.rdx.wrapping_add(24 + i * 32))?;
        }
    }
    match COMMANDS.iter().find(|(known, _)| *known == command) {
        Some((_, VALUE)) => to_kernel(r.rdx).map(drop),
        Some((_, offset)) => behind(r.rdx.wrapping_add(*offset)),
        None => Ok(()),
    }
}

/// All calls of the tables.
pub fn call(r: &Regs) -> Reply {
    give(r)?;
    match r.rax {
        nr::PIDFD_GETFD => from_other(r),
        nr::LANDLOCK_RESTRICT_SELF => restrict(r),
        nr::SECCOMP => confine(r.rdi, r.rdx),
        // PR_SET_SECCOMP; its modes count from 1.
        nr::PRCTL if r.rdi as u32 == 22 => confine(r.rsi.wrapping_sub(1), r.rdx),
        _ => Err(Stop::Kernel),
    }
}

/// `pidfd_getfd`: what stands for a file of ours in another process says nothing of the file.
fn from_other(r: &Regs) -> Reply {
    const F_GETFL: usize = 3;
    let fd = sys::call3(nr::PIDFD_GETFD, r.rdi, r.rsi, r.rdx);
    if sys::failed(fd) {
        return Ok(fd);
    }
    let flags = sys::call3(nr::FCNTL, fd as usize, F_GETFL, 0);
    let root = |stat: Stat| stat.dev == fsys::device() && stat.ino == base::InodeId::ROOT.0;
    if flags as u32 & o::PATH != 0 && sys::fstat(fd as i32).is_some_and(root) {
        sys::call1(nr::CLOSE, fd as usize);
        return Ok(err::PERM);
    }
    Ok(fd)
}

/// From here on the kernel says who may open what, and it can say so only of what it opens.
fn restrict(r: &Regs) -> Reply {
    demote::all()?;
    let ret = sys::call2(nr::LANDLOCK_RESTRICT_SELF, r.rdi, r.rsi);
    if ret == 0 {
        table::context().cwd.store(0, core::sync::atomic::Ordering::Release);
        path::leave();
    }
    Ok(ret)
}

/// `seccomp`, strict or with a filter: from here on a call may only be the very call that the program makes. So nothing
/// is served any more; only what makes processes and programs still comes here.
fn confine(mode: usize, filter: usize) -> Reply {
    let strict = mode as u32 == 0;
    // Other operations, and what only asks which flags there are (with no filter).
    if !strict && (mode as u32 != 1 || mem::get::<[usize; 2]>(filter).is_err()) {
        return Err(Stop::Kernel);
    }
    // First: what other threads are just opening they find out about.
    table::context().cwd.store(0, core::sync::atomic::Ordering::Release);
    path::leave();
    fsys::stand(0);
    demote::all()?;
    if !table::in_vfork() {
        fsys::confine();
        super::overlook_all();
    }
    Err(Stop::Kernel)
}
