//! Raw system calls: the numbers, constants and kernel structures that the engine uses.
//!
//! Calls made here do not pass the patched sites, so they are never caught.
#![allow(unsafe_code)]

use core::arch::asm;

/// Makes a system call; the result is the kernel's: -4095 to -1 is an error.
///
/// Safe to name but not to misuse: callers pass addresses of their own live objects, or the
/// application's own arguments.
#[inline(always)]
pub fn call6(nr: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let ret: isize;
    // SAFETY: the kernel validates its arguments; the engine passes only addresses that it owns
    // or that the application asked the kernel to use.
    unsafe {
        asm!("syscall", inlateout("rax") nr as isize => ret, in("rdi") a, in("rsi") b,
            in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    ret
}

macro_rules! arity {
    ($($name:ident($($a:ident),*) $($zero:literal)*;)*) => { $(
        /// [`call6`] with fewer arguments.
        #[inline(always)]
        pub fn $name(nr: usize, $($a: usize),*) -> isize { call6(nr, $($a,)* $($zero),*) }
    )* };
}
arity! {
    call0() 0 0 0 0 0 0;
    call1(a) 0 0 0 0 0;
    call2(a, b) 0 0 0 0;
    call3(a, b, c) 0 0 0;
    call4(a, b, c, d) 0 0;
}

/// System call numbers of x86-64.
#[allow(missing_docs)]
pub mod nr {
    macro_rules! numbers { ($($name:ident = $n:literal),* $(,)?) => { $(pub const $name: usize = $n;)* } }
    numbers! {
        READ = 0, WRITE = 1, OPEN = 2, CLOSE = 3, STAT = 4, FSTAT = 5, LSTAT = 6, POLL = 7,
        LSEEK = 8, MMAP = 9, MPROTECT = 10, MUNMAP = 11, RT_SIGACTION = 13, RT_SIGPROCMASK = 14,
        IOCTL = 16, PREAD64 = 17, PWRITE64 = 18, READV = 19, WRITEV = 20, ACCESS = 21,
        SELECT = 23, DUP = 32, DUP2 = 33, NANOSLEEP = 35, GETPID = 39, SENDFILE = 40, SENDMSG = 46, CLONE = 56,
        FORK = 57, VFORK = 58, EXECVE = 59, KILL = 62, FCNTL = 72, FLOCK = 73,
        FSYNC = 74, FDATASYNC = 75, TRUNCATE = 76, FTRUNCATE = 77, GETDENTS = 78, GETCWD = 79,
        CHDIR = 80, FCHDIR = 81, RENAME = 82, MKDIR = 83, RMDIR = 84, CREAT = 85, LINK = 86,
        UNLINK = 87, SYMLINK = 88, READLINK = 89, CHMOD = 90, FCHMOD = 91, CHOWN = 92,
        FCHOWN = 93, LCHOWN = 94, UMASK = 95, GETUID = 102, GETGID = 104, SETUID = 105, SETGID = 106,
        GETEUID = 107, GETEGID = 108,
        SETREUID = 113, SETREGID = 114, GETGROUPS = 115, SETGROUPS = 116,
        SETRESUID = 117, SETRESGID = 119, SETFSUID = 122, SETFSGID = 123, CAPGET = 125, CAPSET = 126, UTIME = 132,
        MKNOD = 133, STATFS = 137, FSTATFS = 138, ARCH_PRCTL = 158, SETRLIMIT = 160, CHROOT = 161, SYNC = 162, MOUNT = 165,
        GETTID = 186, READAHEAD = 187, SETXATTR = 188, LSETXATTR = 189, FSETXATTR = 190,
        GETXATTR = 191, LGETXATTR = 192, FGETXATTR = 193, LISTXATTR = 194, LLISTXATTR = 195,
        FLISTXATTR = 196, REMOVEXATTR = 197, LREMOVEXATTR = 198, FREMOVEXATTR = 199,
        FUTEX = 202, IO_SUBMIT = 209, GETDENTS64 = 217, FADVISE64 = 221, EXIT_GROUP = 231,
        EPOLL_CTL = 233, TGKILL = 234, UTIMES = 235, OPENAT = 257, MKDIRAT = 258,
        MKNODAT = 259, FCHOWNAT = 260, FUTIMESAT = 261, NEWFSTATAT = 262, UNLINKAT = 263,
        RENAMEAT = 264, LINKAT = 265, SYMLINKAT = 266, READLINKAT = 267, FCHMODAT = 268,
        FACCESSAT = 269, PSELECT6 = 270, PPOLL = 271, UNSHARE = 272, SPLICE = 275, TEE = 276,
        SYNC_FILE_RANGE = 277, VMSPLICE = 278, UTIMENSAT = 280, FALLOCATE = 285, DUP3 = 292,
        PREADV = 295, PWRITEV = 296, RT_TGSIGQUEUEINFO = 297, PRLIMIT64 = 302,
        NAME_TO_HANDLE_AT = 303, OPEN_BY_HANDLE_AT = 304,
        SYNCFS = 306, SENDMMSG = 307, SETNS = 308, RENAMEAT2 = 316, EXECVEAT = 322, COPY_FILE_RANGE = 326,
        PREADV2 = 327, PWRITEV2 = 328, STATX = 332, IO_URING_SETUP = 425, IO_URING_ENTER = 426, IO_URING_REGISTER = 427, PIDFD_GETFD = 438, LANDLOCK_RESTRICT_SELF = 446, PRCTL = 157, MOVE_MOUNT = 429, CLONE3 = 435,
        CLOSE_RANGE = 436, OPENAT2 = 437, FACCESSAT2 = 439, FCHMODAT2 = 452,
        SOCKET = 41, CONNECT = 42, RECVMSG = 47, GETSOCKOPT = 55, GETRESUID = 118, GETRANDOM = 318, MEMFD_CREATE = 319,
        MEMBARRIER = 324, PIVOT_ROOT = 155, UMOUNT2 = 166, SECCOMP = 317,
    }
}

/// `errno` values as the kernel returns them.
#[allow(missing_docs)]
pub mod err {
    macro_rules! errors { ($($name:ident = $n:literal),* $(,)?) => { $(pub const $name: isize = -$n;)* } }
    errors! {
        PERM = 1, NOENT = 2, TOOBIG = 7, BADF = 9, NOMEM = 12, ACCES = 13, FAULT = 14,
        BUSY = 16, EXIST = 17, NOTDIR = 20, ISDIR = 21, INVAL = 22, NFILE = 23, MFILE = 24, NOTTY = 25,
        FBIG = 27, RANGE = 34, NAMETOOLONG = 36, NOSYS = 38, NOTEMPTY = 39, LOOP = 40,
        OVERFLOW = 75, OPNOTSUPP = 95, NOTCONN = 107, TIMEDOUT = 110, STALE = 116,
    }
}

/// `open` flags.
#[allow(missing_docs)]
pub mod o {
    pub const ACCMODE: u32 = 3;
    pub const WRONLY: u32 = 1;
    pub const RDWR: u32 = 2;
    pub const CREAT: u32 = 0o100;
    pub const EXCL: u32 = 0o200;
    pub const TRUNC: u32 = 0o1000;
    pub const APPEND: u32 = 0o2000;
    pub const NONBLOCK: u32 = 0o4000;
    pub const DSYNC: u32 = 0o10000;
    pub const DIRECT: u32 = 0o40000;
    pub const LARGEFILE: u32 = 0o100_000;
    pub const DIRECTORY: u32 = 0o200_000;
    pub const NOFOLLOW: u32 = 0o400_000;
    pub const NOATIME: u32 = 0o1_000_000;
    pub const CLOEXEC: u32 = 0o2_000_000;
    pub const SYNC: u32 = 0o4_010_000;
    pub const PATH: u32 = 0o10_000_000;
    pub const TMPFILE: u32 = 0o20_000_000;
    /// All that there are.
    pub const KNOWN: u32 = 0o37_777_703;
}

/// `*at` flags and other constants.
#[allow(missing_docs)]
pub mod at {
    pub const FDCWD: i32 = -100;
    pub const SYMLINK_NOFOLLOW: u32 = 0x100;
    pub const REMOVEDIR: u32 = 0x200;
    pub const EACCESS: u32 = 0x200;
    pub const SYMLINK_FOLLOW: u32 = 0x400;
    pub const EMPTY_PATH: u32 = 0x1000;
}

/// `F_DUPFD_CLOEXEC`.
pub const F_DUPFD_CLOEXEC: usize = 1030;
/// `PROT_READ`.
pub const PROT_READ: usize = 1;
/// `PROT_READ | PROT_WRITE`.
pub const PROT_RW: usize = 3;
/// `MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE`.
pub const MAP_ANON: usize = 0x4022;

/// Whether a raw result is an error.
#[inline(always)]
pub fn failed(ret: isize) -> bool {
    (-4095..0).contains(&ret)
}

/// Fresh zeroed memory, or `None`.
pub fn map_anon(len: usize) -> Option<usize> {
    let at = call6(nr::MMAP, 0, len, PROT_RW, MAP_ANON, usize::MAX, 0);
    if failed(at) { None } else { Some(at as usize) }
}

/// Writes a line to standard error: only for what the user must know.
pub fn say(parts: &[&str]) {
    for part in parts {
        call3(nr::WRITE, 2, part.as_ptr() as usize, part.len());
    }
    call3(nr::WRITE, 2, b"\n".as_ptr() as usize, 1);
}

/// Ends the process by SIGABRT.
pub fn abort() -> ! {
    call3(nr::TGKILL, call0(nr::GETPID) as usize, call0(nr::GETTID) as usize, 6);
    loop {
        call1(nr::EXIT_GROUP, 134);
    }
}

/// The kernel's `struct stat` of x86-64.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
#[allow(missing_docs)]
pub struct Stat {
    pub dev: u64,
    pub ino: u64,
    pub nlink: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub pad: u32,
    pub rdev: u64,
    pub size: i64,
    pub blksize: i64,
    pub blocks: i64,
    pub atime: [i64; 2],
    pub mtime: [i64; 2],
    pub ctime: [i64; 2],
    pub unused: [i64; 3],
}
const _: () = assert!(size_of::<Stat>() == 144);

/// `fstat` of a kernel descriptor; `None` for whatever reason.
pub fn fstat(fd: i32) -> Option<Stat> {
    stat_of(fd).ok()
}

/// The same; why not. (Of a file of the mount that is what whoever serves it says.)
pub fn stat_of(fd: i32) -> Result<Stat, isize> {
    let mut stat = Stat::default();
    let ret = call2(nr::FSTAT, fd as usize, (&raw mut stat) as usize);
    if ret == 0 { Ok(stat) } else { Err(ret) }
}

/// Whether a number is one of this process's, which asks nobody who serves a file.
pub fn is_open(fd: i32) -> bool {
    const F_GETFD: usize = 1;
    !failed(call3(nr::FCNTL, fd as usize, F_GETFD, 0))
}
