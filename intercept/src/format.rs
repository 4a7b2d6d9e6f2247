//! The session memory: what `corbel run` and the processes under it share.
//!
//! Two memfds. The *configuration* is written by `corbel run` only, and goes along into every program, opened for
//! reading; nobody but its user may open it otherwise. The *state* belongs to the processes of one user: it is his who made it, goes along only to
//! programs that run as the same user, and a process that becomes somebody else begins another one (identity.rs).
//!
//! Both sides compile this file (`corbel` includes it by path), so it depends on nothing. All of
//! it lives in one boot of one machine; a version other than [`VERSION`] is refused.
//!
//! | offset in the configuration | what |
//! | --- | --- |
//! | 0 | [`Header`]: written once, checksummed |
//! | [`TABLES_AT`] | [`TABLES`] site tables of [`TABLE_BYTES`], each a [`Table`] |
//! | [`OBJECTS_AT`] | [`OBJECTS`] files with code that somebody has mapped ([`Object`]), a hash table |
//! | [`CALLS_AT`] | [`CALLS`] system calls that such files make by themselves ([`Call`]) |
//!
//! | offset in the state | what |
//! | --- | --- |
//! | 0 | [`Counters`] |
//! | [`INODES_AT`] | [`INODES`] inode numbers that the kernel owns (shared mappings, programs), 0 = free |
//! | [`OFDS_AT`] | [`OFDS`] open file descriptions ([`Ofd`]) |
//! | [`SLOTS_AT`] | [`SLOTS`] records that carry a descriptor table over exec ([`Slot`]) |
//! | [`THREADS_AT`] | ring of the last [`THREADS`] thread ids that the library served (u32), for `--audit` |

use core::sync::atomic::{AtomicU32, AtomicU64};

/// First bytes of a session.
pub const MAGIC: [u8; 8] = *b"CORBLRUN";
/// Version of everything in this file.
pub const VERSION: u32 = 8;
/// Longest path in the header.
pub const PATH_MAX: usize = 1024;
/// Longest socket address (`sun_path`), without NUL.
pub const SOCKET_MAX: usize = 107;

/// The lowest number for descriptors of the engine, of `corbel run` and of LibFS in a process that may have so many: what lies from
/// there on is an eighth of them, and of the first 1024 where it may have more. Each fork copies the table of descriptors
/// up to the highest number in use, which would be 256 KiB at 20,000.
pub const fn engine_numbers(limit: usize) -> usize {
    let most = if limit < 1024 { limit } else { 1024 };
    most - most / 8
}

/// Configuration. Integers are native: the session never leaves the machine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// CRC32C of the header with this field zero.
    pub checksum: u32,
    /// [`CONFIG_BYTES`].
    pub bytes: u64,
    /// Site tables in use.
    pub tables: u32,
    /// Bytes of `mount`.
    pub mount_len: u32,
    /// Bytes of `backend`.
    pub backend_len: u32,
    /// Bytes of `library`.
    pub library_len: u32,
    /// Bytes of `holder`.
    pub holder_len: u32,
    /// `st_dev` of the mount (anonymous devices fit), 0 when it does not.
    pub device: u32,
    /// 1: system calls made outside the patched libraries are caught too (strict.rs).
    pub strict: u32,
    /// 1: `io_uring_setup` answers ENOSYS; 0: whoever calls it is served by the mount from then on (demote.rs).
    pub no_ring: u32,
    /// Descriptor of the patched text ([`Table::text_at`]), a sealed memfd that goes along as this one does.
    pub overlay: i32,
    /// Known to the processes of the session only; shown to the holder with a question about files.
    pub secret: u32,
    /// What the processor can do (`base::cpu`): each process would have to ask it, which a virtual machine answers in tens of
    /// microseconds.
    pub processor: u32,
    /// Zero.
    pub reserved: u32,
    /// Inode number and device of that memfd: the number may mean another file by now.
    pub overlay_id: [u64; 2],
    /// The user namespace in which `corbel run` is (its inode number), 0 when that is not known: in another one users have
    /// other numbers than the service knows them by.
    pub users: u64,
    /// The prefix: absolute, no `.`, `..` or double `/`, no `/` at the end.
    pub mount: [u8; PATH_MAX],
    /// `dir:/path` or `corbel:/socket/of/the/node`.
    pub backend: [u8; PATH_MAX],
    /// The interception library, for LD_PRELOAD of children.
    pub library: [u8; PATH_MAX],
    /// Abstract socket name (without the leading NUL) of the descriptor holder in `corbel run`.
    pub holder: [u8; 112],
}

/// What the session counts, for `--audit` and for checking that the library took hold.
#[repr(C)]
#[derive(Debug)]
pub struct Counters {
    /// Process images that were patched.
    pub attached: AtomicU32,
    /// Process images whose libraries had no site table.
    pub unpatched: AtomicU32,
    /// Open file descriptions given to the kernel.
    pub demoted: AtomicU32,
    /// Programs started that cannot be hooked (static, set-id, foreign).
    pub unhooked: AtomicU32,
    /// Opens of the prefix handed to the mount.
    pub kernel_opens: AtomicU32,
    /// Times no open file description was free, or no room to note an inode of the kernel's.
    pub exhausted: AtomicU32,
    /// One more than the highest open file description ever used.
    pub ofds_high: AtomicU32,
    /// System calls caught by the net of the strict mode.
    pub trapped: AtomicU32,
    /// Threads noted so far.
    pub threads: AtomicU32,
    /// Tells the states of one user apart, for the holder.
    pub number: AtomicU32,
    /// Open file descriptions that the kernel should have got before a fork or an exec, or a change of user, and did not.
    pub undemoted: AtomicU32,
}

/// One system call site. `at` counts from the library's load address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// First byte of the window.
    pub at: u32,
    /// Bytes of whole instructions in the window: [`WINDOW_MIN`] to [`WINDOW_MAX`].
    pub len: u8,
    /// Where in the window the two-byte `syscall` is.
    pub syscall: u8,
    /// Zero.
    pub reserved: u16,
}

/// Bytes of the jump that is written over a window.
pub const WINDOW_MIN: u8 = 5;
/// Longest window.
pub const WINDOW_MAX: u8 = 24;
/// Longest build-id kept.
pub const BUILD_ID_MAX: usize = 32;
/// Sites in a table at most (glibc 2.36 has 526).
pub const SITES: usize = 2000;

/// Sites of one library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Bytes of `build_id`.
    pub build_id_len: u32,
    /// Entries of `sites`.
    pub count: u32,
    /// The library's NT_GNU_BUILD_ID.
    pub build_id: [u8; BUILD_ID_MAX],
    /// Where in the overlay the stubs are that lie [`STUBS_BELOW`] below the library, behind a page for
    /// their pointer; 0 bytes: there is no overlay, and each process writes jumps and stubs itself.
    pub stubs_at: u32,
    /// Bytes of them, in whole pages.
    pub stubs_bytes: u32,
    /// Where in the overlay the library's text is, with the jumps in it.
    pub text_at: u32,
    /// Bytes of it, in whole pages.
    pub text_bytes: u32,
    /// By address.
    pub sites: [Site; SITES],
}

/// Room of one stub.
pub const STUB: usize = 64;
/// How far below a library the overlay's stubs lie.
pub const STUBS_BELOW: usize = 16 << 20;
/// Page.
pub const PAGE: usize = 4096;

/// Pages that hold all windows of a library, counted from its load address.
pub fn text_range(sites: &[Site]) -> Option<(usize, usize)> {
    let (first, last) = (sites.first()?, sites.last()?);
    let end = last.at as usize + last.len as usize;
    Some((first.at as usize & !(PAGE - 1), end.next_multiple_of(PAGE)))
}

/// `jmp` from an address to another.
pub fn jump(from: i64, to: i64) -> [u8; 5] {
    let [a, b, c, d] = ((to - (from + 5)) as i32).to_le_bytes();
    [0xe9, a, b, c, d]
}

/// A stub: `BEFORE; lea rcx, [1f]; jmp *entry; 1: syscall; AFTER; jmp back`, where BEFORE and AFTER are the
/// window's other instructions. `at`: the addresses of stub, pointer to the engine, and window.
pub fn stub(window: &[u8], split: usize, at: [i64; 3]) -> ([u8; STUB], usize) {
    let (mut code, mut len) = ([0xcc; STUB], 0);
    let mut put = |bytes: &[u8]| {
        code[len..len + bytes.len()].copy_from_slice(bytes);
        len += bytes.len();
        at[0] + len as i64
    };
    put(&window[..split]);
    put(&[0x48, 0x8d, 0x0d, 6, 0, 0, 0]);
    let here = put(&[0xff, 0x25]);
    put(&((at[1] - (here + 4)) as i32).to_le_bytes());
    put(&[0x0f, 0x05]);
    let here = put(&window[split + 2..]);
    put(&jump(here, at[2] + window.len() as i64));
    (code, len)
}

/// A system call of a file's own (corbel/src/run/objects.rs).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// First byte of the window, counted in the file.
    pub at: u32,
    /// Bytes of whole instructions in the window: [`WINDOW_MIN`] to [`WINDOW_MAX`].
    pub len: u8,
    /// Where in the window the two-byte `syscall` is.
    pub syscall: u8,
    /// Number of the call; [`ANY_NUMBER`] where the code does not say.
    pub number: u16,
    /// CRC32C of the window: nothing else is written over.
    pub check: u32,
    /// Zero.
    pub reserved: u32,
}

/// See [`Call::number`].
pub const ANY_NUMBER: u16 = u16::MAX;

/// A program or library that is neither libc nor the loader. Filled in by `corbel run`, once for all processes,
/// when one of them asks (demote.rs has the request); the state is written last.
#[repr(C)]
#[derive(Debug)]
pub struct Object {
    /// 0: none, and nothing behind it; 1: known.
    pub state: AtomicU32,
    /// Calls that it has.
    pub count: AtomicU32,
    /// The first of them.
    pub first: AtomicU32,
    /// 1: it may make a ring of io_uring in a way that cannot be caught.
    pub unseen: AtomicU32,
    /// Device, inode number, size, and change time in nanoseconds of the file.
    pub key: [AtomicU64; 4],
    /// Zero.
    pub reserved: [u64; 2],
}

/// Where in the table the search for a file begins.
pub fn object_place(key: &[u64; 4]) -> usize {
    let mixed = (key[0] ^ key[1] ^ key[3]).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize % OBJECTS
}

/// An open file description: what POSIX shares between dup'ed and inherited descriptors.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Ofd {
    /// [`state`].
    pub state: AtomicU32,
    /// Descriptors that refer to it, in all processes of the session.
    pub refs: AtomicU32,
    /// Inode number.
    pub ino: AtomicU64,
    /// The one offset (of a directory: the cookie).
    pub offset: AtomicU64,
    /// `open` flags: access mode and status flags.
    pub flags: AtomicU32,
    /// Thread that holds the offset, or 0. A dead owner's lock is taken over.
    pub lock: AtomicU32,
    /// Grows at each use of the slot, so that the holder's descriptor of an earlier use is not taken.
    pub generation: AtomicU32,
    /// Zero.
    pub zero: u32,
    /// What shows the service that the inode was found by a name (`FileSystem::proof`), or 0.
    pub proof: AtomicU64,
    /// Zero.
    pub reserved: [u32; 2],
}

/// Values of [`Ofd::state`].
pub mod state {
    /// Not in use.
    pub const FREE: u32 = 0;
    /// A regular file served in user space.
    pub const FILE: u32 = 1;
    /// A directory served in user space.
    pub const DIR: u32 = 2;
    /// Shall become the kernel's: whoever touches it next opens it there, at `offset`.
    pub const LEAVING: u32 = 3;
    /// The kernel's; the holder has a descriptor of it.
    pub const KERNEL: u32 = 4;
    /// Being filled in by who will have the first reference.
    pub const TAKEN: u32 = 5;
}

/// Descriptors that one slot carries.
pub const SLOT_FDS: usize = 1000;

/// A descriptor table on its way through exec; the index is in the environment.
#[repr(C)]
#[derive(Debug)]
pub struct Slot {
    /// Process that owns it, or 0.
    pub pid: AtomicU32,
    /// Entries of `fds`.
    pub count: AtomicU32,
    /// Descriptor number and table entry (see table.rs).
    pub fds: [[AtomicU32; 2]; SLOT_FDS],
    /// Not 0: the process had threads, which may have been at an operation when it executed something.
    pub threads: AtomicU32,
    /// Zero.
    pub zero: u32,
    /// The inode of the working directory, if that is known to be one of the mount's, and what shows it
    /// (`FileSystem::prove`): nobody has to look for it again. Else 0.
    pub cwd: [AtomicU64; 2],
    /// Fills up to 8 KiB.
    pub reserved: [u32; 40],
}

/// Bytes of the region of one table.
pub const TABLE_BYTES: usize = 16 * 1024;
/// Tables.
pub const TABLES: usize = 4;
/// Entries in the set of kernel-owned inodes.
pub const INODES: usize = 1024;
/// Open file descriptions.
pub const OFDS: usize = 65_536;
/// Exec records: execs under way at one time.
pub const SLOTS: usize = 128;
/// Threads noted.
pub const THREADS: usize = 4096;
/// Files with code.
pub const OBJECTS: usize = 4096;
/// Places in the table looked at for one of them.
pub const OBJECT_PLACES: usize = 64;
/// Calls of all of them.
pub const CALLS: usize = 65_536;
/// See the tables above.
pub const TABLES_AT: usize = 4096;
/// See the tables above.
pub const OBJECTS_AT: usize = TABLES_AT + TABLES * TABLE_BYTES;
/// See the tables above.
pub const CALLS_AT: usize = OBJECTS_AT + OBJECTS * size_of::<Object>();
/// Size of the configuration (sparse).
pub const CONFIG_BYTES: usize = CALLS_AT + CALLS * size_of::<Call>();
/// See the tables above.
pub const INODES_AT: usize = 4096;
/// See the tables above.
pub const OFDS_AT: usize = INODES_AT + INODES * 8;
/// See the tables above.
pub const SLOTS_AT: usize = OFDS_AT + OFDS * 64;
/// See the tables above.
pub const THREADS_AT: usize = SLOTS_AT + SLOTS * size_of::<Slot>();
/// Size of a state (sparse).
pub const STATE_BYTES: usize = THREADS_AT + THREADS * 4;
/// Seals of both: F_SEAL_SEAL, _SHRINK, _GROW.
pub const SEALS: u32 = 1 | 2 | 4;
/// Permission bits of both.
pub const MODE: u32 = 0o600;
/// Files that one request to the holder may ask about.
pub const ASKED_MAX: usize = 32;

/// Environment variable: `CONFIG,STATE,SLOT`, decimal: the descriptors of configuration and state (-1: none that this
/// program may have), and the exec record (-1: none).
pub const ENV: &str = "CORBEL_RUN";

/// Descriptors and exec record in the value of [`ENV`].
pub fn parse_env(value: &[u8]) -> Option<(i32, i32, i32)> {
    let number = |text: &[u8]| core::str::from_utf8(text).ok()?.parse::<i32>().ok();
    let mut parts = value.split(|b| *b == b',');
    let found = (number(parts.next()?)?, number(parts.next()?)?, number(parts.next()?)?);
    let good = parts.next().is_none() && found.0 >= 0 && found.1 >= -1 && found.2 >= -1;
    good.then_some(found)
}

const _: () = {
    assert!(size_of::<Header>() <= TABLES_AT && size_of::<Counters>() <= INODES_AT);
    assert!(size_of::<Table>() <= TABLE_BYTES);
    assert!(size_of::<Ofd>() == 64);
    assert!(size_of::<Slot>() == 8192);
    assert!(
        size_of::<Object>() == 64 && OBJECTS_AT.is_multiple_of(64) && OFDS_AT.is_multiple_of(64)
    );
    assert!(size_of::<Call>() == 16);
};
