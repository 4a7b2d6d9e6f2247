//! The FUSE protocol, version 7.31 to 7.45: structures and numbers as the kernel defines them in
//! `include/uapi/linux/fuse.h`. No logic.
//!
//! The kernel speaks the byte order of the machine and virtio-fs little-endian; we run on
//! little-endian machines only, so all fields are. Every structure is unaligned on purpose: a
//! request is read where it lies.

#![allow(missing_docs)] // names and meaning are the kernel's, see above
#![allow(missing_debug_implementations)] // of the types that zerocopy's derive makes

use zerocopy::little_endian::{I32, I64, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Major version; a kernel with another one is answered with ours and asks again.
pub const MAJOR: u32 = 7;
/// Newest minor version that we know.
pub const MINOR: u32 = 45;
/// Oldest minor version that is served (Linux 5.4).
pub const MINOR_MIN: u32 = 31;

/// Operation codes. Never renumbered; gaps were never used or are not ours to serve.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    /// One past the last code that the table has room for.
    pub const END: usize = 64;
}

/// INIT flags, the upper half in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Bits of [`SetattrIn::valid`].
pub mod fattr {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
    pub const ALL: u32 = (1 << 12) - 1;
    /// What a file has, and not how to set it.
    pub const FIELDS: u32 = MODE | UID | GID | SIZE | ATIME | MTIME | ATIME_NOW | MTIME_NOW;
}

pub const FOPEN_DIRECT_IO: u32 = 1;
pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
pub const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
pub const GETATTR_FH: u32 = 1;
pub const WRITE_CACHE: u32 = 1;
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub const OPEN_KILL_SUIDGID: u32 = 1;
pub const FSYNC_FDATASYNC: u32 = 1;
pub const LK_FLOCK: u32 = 1;
/// Types of a lock, as `fcntl` has them.
pub const F_RDLCK: u32 = 0;
pub const F_WRLCK: u32 = 1;
pub const F_UNLCK: u32 = 2;

/// Codes of notifications (negative `error` is 0, `unique` is 0).
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    pub const RETRIEVE: i32 = 5;
}

/// Declares wire structures with their sizes held by the compiler.
macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident = $size:literal {
        $($(#[$field_doc:meta])* $field:ident: $type:ty,)*
    })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $size);

        impl Default for $name {
            fn default() -> Self {
                Self::new_zeroed()
            }
        }
    )*};
}

wire! {
    /// Begins every request.
    InHeader = 40 {
        len: U32,
        opcode: U32,
        unique: U64,
        nodeid: U64,
        uid: U32,
        gid: U32,
        pid: U32,
        /// Extensions at the end of the request, in units of 8 bytes.
        total_extlen: U16,
        padding: U16,
    }
    /// Begins every reply and notification.
    OutHeader = 16 { len: U32, error: I32, unique: U64, }
    InitIn = 16 { major: U32, minor: U32, max_readahead: U32, flags: U32, }
    /// Follows [`InitIn`] when it has `INIT_EXT` (7.36).
    InitInExt = 48 { flags2: U32, unused: [U32; 11], }
    InitOut = 64 {
        major: U32,
        minor: U32,
        max_readahead: U32,
        flags: U32,
        max_background: U16,
        congestion_threshold: U16,
        max_write: U32,
        time_gran: U32,
        max_pages: U16,
        map_alignment: U16,
        flags2: U32,
        max_stack_depth: U32,
        request_timeout: U16,
        unused: [U16; 11],
    }
    FuseAttr = 88 {
        ino: U64,
        size: U64,
        blocks: U64,
        atime: I64,
        mtime: I64,
        ctime: I64,
        atimensec: U32,
        mtimensec: U32,
        ctimensec: U32,
        mode: U32,
        nlink: U32,
        uid: U32,
        gid: U32,
        rdev: U32,
        blksize: U32,
        flags: U32,
    }
    EntryOut = 128 {
        nodeid: U64,
        generation: U64,
        entry_valid: U64,
        attr_valid: U64,
        entry_valid_nsec: U32,
        attr_valid_nsec: U32,
        attr: FuseAttr,
    }
    AttrOut = 104 { attr_valid: U64, attr_valid_nsec: U32, dummy: U32, attr: FuseAttr, }
    ForgetIn = 8 { nlookup: U64, }
    ForgetOne = 16 { nodeid: U64, nlookup: U64, }
    BatchForgetIn = 8 { count: U32, dummy: U32, }
    GetattrIn = 16 { getattr_flags: U32, dummy: U32, fh: U64, }
    SetattrIn = 88 {
        valid: U32,
        padding: U32,
        fh: U64,
        size: U64,
        lock_owner: U64,
        atime: I64,
        mtime: I64,
        ctime: I64,
        atimensec: U32,
        mtimensec: U32,
        ctimensec: U32,
        mode: U32,
        unused4: U32,
        uid: U32,
        gid: U32,
        unused5: U32,
    }
    MknodIn = 16 { mode: U32, rdev: U32, umask: U32, padding: U32, }
    MkdirIn = 8 { mode: U32, umask: U32, }
    RenameIn = 8 { newdir: U64, }
    Rename2In = 16 { newdir: U64, flags: U32, padding: U32, }
    LinkIn = 8 { oldnodeid: U64, }
    OpenIn = 8 { flags: U32, open_flags: U32, }
    CreateIn = 16 { flags: U32, mode: U32, umask: U32, open_flags: U32, }
    OpenOut = 16 { fh: U64, open_flags: U32, backing_id: I32, }
    ReleaseIn = 24 { fh: U64, flags: U32, release_flags: U32, lock_owner: U64, }
    ReadIn = 40 {
        fh: U64,
        offset: U64,
        size: U32,
        read_flags: U32,
        lock_owner: U64,
        flags: U32,
        padding: U32,
    }
    WriteIn = 40 {
        fh: U64,
        offset: U64,
        size: U32,
        write_flags: U32,
        lock_owner: U64,
        flags: U32,
        padding: U32,
    }
    WriteOut = 8 { size: U32, padding: U32, }
    StatfsOut = 80 {
        blocks: U64,
        bfree: U64,
        bavail: U64,
        files: U64,
        ffree: U64,
        bsize: U32,
        namelen: U32,
        frsize: U32,
        padding: U32,
        spare: [U32; 6],
    }
    FlushIn = 24 { fh: U64, unused: U32, padding: U32, lock_owner: U64, }
    FileLock = 24 { start: U64, end: U64, kind: U32, pid: U32, }
    LkIn = 48 { fh: U64, owner: U64, lk: FileLock, lk_flags: U32, padding: U32, }
    LkOut = 24 { lk: FileLock, }
    FsyncIn = 16 { fh: U64, fsync_flags: U32, padding: U32, }
    SetxattrIn = 8 { size: U32, flags: U32, }
    GetxattrIn = 8 { size: U32, padding: U32, }
    GetxattrOut = 8 { size: U32, padding: U32, }
    FallocateIn = 32 { fh: U64, offset: U64, length: U64, mode: U32, padding: U32, }
    CopyFileRangeIn = 56 {
        fh_in: U64,
        off_in: U64,
        nodeid_out: U64,
        fh_out: U64,
        off_out: U64,
        len: U64,
        flags: U64,
    }
    LseekIn = 24 { fh: U64, offset: U64, whence: U32, padding: U32, }
    LseekOut = 8 { offset: U64, }
    InterruptIn = 8 { unique: U64, }
    /// Head of a directory entry; the name follows, padded to 8 bytes.
    Dirent = 24 { ino: U64, off: U64, namelen: U32, kind: U32, }
    StatxIn = 24 { getattr_flags: U32, reserved: U32, fh: U64, sx_flags: U32, sx_mask: U32, }
    SxTime = 16 { sec: I64, nsec: U32, reserved: I32, }
    StatxOut = 288 {
        attr_valid: U64,
        attr_valid_nsec: U32,
        flags: U32,
        spare: [U64; 2],
        mask: U32,
        blksize: U32,
        attributes: U64,
        nlink: U32,
        uid: U32,
        gid: U32,
        mode: U16,
        spare0: U16,
        ino: U64,
        size: U64,
        blocks: U64,
        attributes_mask: U64,
        atime: SxTime,
        btime: SxTime,
        ctime: SxTime,
        mtime: SxTime,
        rdev_major: U32,
        rdev_minor: U32,
        dev_major: U32,
        dev_minor: U32,
        spare2: [U64; 14],
    }
    NotifyInvalInode = 24 { ino: U64, off: I64, len: I64, }
    NotifyInvalEntry = 16 { parent: U64, namelen: U32, flags: U32, }
    NotifyStore = 24 { nodeid: U64, offset: U64, size: U32, padding: U32, }
    NotifyRetrieve = 32 { notify_unique: U64, nodeid: U64, offset: U64, size: U32, padding: U32, }
    /// What the kernel says of a request on a ring, beside its header and its first argument.
    RingEntry = 32 { flags: U64, commit_id: U64, payload_size: U32, padding: U32, reserved: U64, }
}

impl OutHeader {
    /// A whole reply without data.
    pub fn alone(unique: u64, error: i32) -> Self {
        let len = u32::try_from(size_of::<Self>()).unwrap_or(0);
        Self { len: len.into(), error: error.into(), unique: unique.into() }
    }
}

/// Statx mask of everything in [`StatxOut`]: basic fields and birth time.
pub const STATX_MASK: u32 = 0x0fff;
