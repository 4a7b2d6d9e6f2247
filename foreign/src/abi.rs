//! `corbel-fs.h` in Rust: the structures, and the library's side of a request.

use std::ffi::{CStr, c_char, c_int, c_void};

use base::{Errno, InodeId};
use client::fs::{Attr, Result, StatFs, Time, Written, check_name};

/// Entries of one call of readdir: more are asked for by another.
const ENTRIES_MAX: usize = 1024;
/// Inodes and cookies that a back end may name are below.
pub const INO_END: u64 = 1 << 63;
/// See [`INO_END`].
pub const COOKIE_END: u64 = 1 << 62;

/// A time.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct FsTime {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
    /// 0.
    pub reserved: u32,
}

/// Attributes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct FsAttr {
    /// Inode.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Blocks of 512 bytes.
    pub blocks: u64,
    /// Times: access, change of content, change of anything, birth.
    pub times: [FsTime; 4],
    /// Type and permissions.
    pub mode: u32,
    /// Names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// 0.
    pub reserved: u32,
}

/// Whose process asks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FsCaller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Process.
    pub pid: u32,
    /// What is taken off modes.
    pub umask: u32,
    /// More groups.
    pub groups: *const u32,
    /// How many.
    pub groups_count: usize,
}

/// Bits of [`FsSet::what`].
pub mod set {
    /// Permissions.
    pub const MODE: u32 = 1;
    /// Owner.
    pub const UID: u32 = 2;
    /// Group.
    pub const GID: u32 = 4;
    /// Size.
    pub const SIZE: u32 = 8;
    /// Access time.
    pub const ATIME: u32 = 16;
    /// Time of change.
    pub const MTIME: u32 = 32;
    /// Access time: now.
    pub const ATIME_NOW: u32 = 64;
    /// Time of change: now.
    pub const MTIME_NOW: u32 = 128;
}

/// What setattr shall change.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct FsSet {
    /// Which ([`set`]).
    pub what: u32,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size.
    pub size: u64,
    /// Access time.
    pub atime: FsTime,
    /// Time of change.
    pub mtime: FsTime,
}

/// Space.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct FsSpace {
    /// Unit.
    pub block_bytes: u32,
    /// Longest name.
    pub name_max: u32,
    /// Blocks, and those free.
    pub blocks: [u64; 2],
    /// Inodes, and those free.
    pub inodes: [u64; 2],
}

/// The library's functions.
#[repr(C)]
#[derive(Debug)]
pub struct FsReplies {
    size: usize,
    done: unsafe extern "C" fn(*mut Request, c_int),
    attr: unsafe extern "C" fn(*mut Request, *const FsAttr),
    open: unsafe extern "C" fn(*mut Request, *const FsAttr, u64),
    data: unsafe extern "C" fn(*mut Request, *const c_void, usize),
    written: unsafe extern "C" fn(*mut Request, usize, u64),
    space: unsafe extern "C" fn(*mut Request, *const FsSpace),
    offset: unsafe extern "C" fn(*mut Request, u64),
    entry: unsafe extern "C" fn(*mut Request, *const c_char, u64, u32, u64) -> c_int,
}

static REPLIES: FsReplies = FsReplies {
    size: size_of::<FsReplies>(),
    done: reply_done,
    attr: reply_attr,
    open: reply_open,
    data: reply_data,
    written: reply_written,
    space: reply_space,
    offset: reply_offset,
    entry: reply_entry,
};

type Fs = *mut c_void;
type Req = *mut Request;
type Call = *const FsCaller;
type Name = *const c_char;
type Op<F> = Option<F>;

/// The back end's functions, in the header's order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // the header says what they are
pub struct FsOperations {
    pub size: usize,
    pub lookup: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name)>,
    pub getattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64)>,
    pub setattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64, *const FsSet)>,
    pub readlink: Op<unsafe extern "C" fn(Fs, Req, Call, u64)>,
    pub mknod: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name, u32, u32, Name)>,
    pub unlink: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name)>,
    pub rmdir: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name)>,
    pub rename: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name, u64, Name, u32)>,
    pub link: Op<unsafe extern "C" fn(Fs, Req, Call, u64, u64, Name)>,
    pub open: Op<unsafe extern "C" fn(Fs, Req, Call, u64, u32)>,
    pub create: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name, u32, u32)>,
    pub read: Op<unsafe extern "C" fn(Fs, Req, u64, u64, usize)>,
    pub write: Op<unsafe extern "C" fn(Fs, Req, u64, u64, *const c_void, usize, c_int)>,
    pub fsync: Op<unsafe extern "C" fn(Fs, Req, u64, c_int)>,
    pub fsync_inode: Op<unsafe extern "C" fn(Fs, Req, u64)>,
    pub fallocate: Op<unsafe extern "C" fn(Fs, Req, u64, u32, u64, u64)>,
    pub lseek: Op<unsafe extern "C" fn(Fs, Req, u64, u64, c_int)>,
    pub fgetattr: Op<unsafe extern "C" fn(Fs, Req, u64)>,
    pub release: Op<unsafe extern "C" fn(Fs, u64)>,
    pub readdir: Op<unsafe extern "C" fn(Fs, Req, Call, u64, u64)>,
    pub statfs: Op<unsafe extern "C" fn(Fs, Req, u64)>,
    pub getxattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name)>,
    pub listxattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64)>,
    pub setxattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name, *const c_void, usize, c_int)>,
    pub removexattr: Op<unsafe extern "C" fn(Fs, Req, Call, u64, Name)>,
    pub close: Op<unsafe extern "C" fn(Fs)>,
}

/// What a back end exports.
pub type Open = unsafe extern "C" fn(Name, *mut *const FsOperations, *mut *mut c_void) -> c_int;

/// A name that readdir reported.
#[derive(Debug)]
pub struct Entry {
    /// The name.
    pub name: Vec<u8>,
    /// Its inode.
    pub ino: InodeId,
    /// Type bits.
    pub kind: u32,
    /// Where to go on.
    pub next: u64,
}

/// An answer.
#[derive(Debug)]
pub enum Reply {
    /// It is done; with the names of a directory, where these were asked for.
    Done(Vec<Entry>),
    /// Attributes.
    Attr(Attr),
    /// A handle.
    Open(Option<Attr>, u64),
    /// Bytes.
    Data(Vec<u8>),
    /// So many were written.
    Written(Written),
    /// Space.
    Space(StatFs),
    /// A place.
    Offset(u64),
}

/// Told the answer.
pub type End = Box<dyn FnOnce(Result<Reply>) + Send>;

/// A request on its way through a back end.
#[repr(C)]
pub struct Request {
    replies: *const FsReplies,
    entries: Vec<Entry>,
    end: End,
    /// The data of a write, as long as it is not answered.
    data: Vec<u8>,
}

impl Request {
    /// For the back end to be given away, which is to answer it once; and the data that it keeps until then.
    pub fn give(end: End, data: Vec<u8>) -> (*mut Self, *const c_void, usize) {
        let given = Box::new(Self { replies: &raw const REPLIES, entries: Vec::new(), end, data });
        let (data, len) = (given.data.as_ptr(), given.data.len());
        (Box::into_raw(given), data.cast(), len)
    }

    /// # Safety
    /// Somebody has given it away, and it was not answered.
    unsafe fn answer(request: *mut Self, reply: impl FnOnce(Vec<Entry>) -> Result<Reply>) {
        // SAFETY: the caller's promise.
        let Self { entries, end, .. } = *unsafe { Box::from_raw(request) };
        end(reply(entries));
    }
}

/// An error of a back end's.
pub fn errno(error: c_int) -> Errno {
    u16::try_from(error).ok().filter(|e| (1..4096).contains(e)).map_or(Errno::IO, Errno)
}

fn time(time: FsTime) -> Time {
    Time { sec: time.sec, nsec: time.nsec.min(999_999_999) }
}

/// # Safety
/// Null or good.
unsafe fn attr(attr: *const FsAttr) -> Result<Attr> {
    // SAFETY: the caller's promise.
    let given = unsafe { attr.as_ref() }.ok_or(Errno::IO)?;
    let [atime, mtime, ctime, btime] = given.times.map(time);
    let attr = Attr {
        ino: InodeId(given.ino),
        mode: given.mode,
        nlink: given.nlink,
        uid: given.uid,
        gid: given.gid,
        rdev: given.rdev,
        size: given.size,
        blocks: given.blocks,
        atime,
        mtime,
        ctime,
        btime,
        learnt: 0,
    };
    let good = (1..INO_END).contains(&given.ino) && attr.kind() != 0 && attr.size < INO_END;
    if good { Ok(attr) } else { Err(Errno::IO) }
}

unsafe extern "C" fn reply_done(request: *mut Request, error: c_int) {
    let reply = |entries| if error == 0 { Ok(Reply::Done(entries)) } else { Err(errno(error)) };
    // SAFETY: the header's rule.
    unsafe { Request::answer(request, reply) };
}

unsafe extern "C" fn reply_attr(request: *mut Request, given: *const FsAttr) {
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, |_| attr(given).map(Reply::Attr)) };
}

unsafe extern "C" fn reply_open(request: *mut Request, given: *const FsAttr, handle: u64) {
    // SAFETY: the header's rules. Attributes that are none are none here either: whoever needs some gives the handle back.
    let attr = (!given.is_null()).then(|| unsafe { attr(given) }).and_then(Result::ok);
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, |_| Ok(Reply::Open(attr, handle))) };
}

unsafe extern "C" fn reply_data(request: *mut Request, data: *const c_void, len: usize) {
    let copy = |_| {
        if data.is_null() && len > 0 {
            return Err(Errno::IO);
        }
        if len == 0 {
            return Ok(Reply::Data(Vec::new()));
        }
        // SAFETY: so many bytes are there, says whoever calls.
        let bytes: &[u8] = unsafe { std::slice::from_raw_parts(data.cast(), len) };
        Ok(Reply::Data(bytes.to_vec()))
    };
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, copy) };
}

unsafe extern "C" fn reply_written(request: *mut Request, len: usize, offset: u64) {
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, |_| Ok(Reply::Written(Written { len, offset }))) };
}

unsafe extern "C" fn reply_space(request: *mut Request, space: *const FsSpace) {
    // SAFETY: null or good.
    let space = unsafe { space.as_ref() }.copied();
    let reply = |_| {
        let FsSpace { block_bytes, name_max, blocks, inodes } = space.ok_or(Errno::IO)?;
        Ok(Reply::Space(StatFs {
            block_bytes: block_bytes.max(512),
            blocks: blocks[0],
            blocks_free: blocks[1].min(blocks[0]),
            inodes: inodes[0],
            inodes_free: inodes[1].min(inodes[0]),
            name_max: if name_max == 0 { 255 } else { name_max },
        }))
    };
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, reply) };
}

unsafe extern "C" fn reply_offset(request: *mut Request, offset: u64) {
    // SAFETY: the header's rules.
    unsafe { Request::answer(request, |_| Ok(Reply::Offset(offset))) };
}

unsafe extern "C" fn reply_entry(
    request: *mut Request,
    name: *const c_char,
    ino: u64,
    mode: u32,
    next: u64,
) -> c_int {
    // SAFETY: not answered yet, so it is there, and only who has it touches it.
    let (Some(request), false) = (unsafe { request.as_mut() }, name.is_null()) else { return 0 };
    // SAFETY: it ends in NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let named = check_name(name).is_ok() && !matches!(name, b"." | b"..");
    // What no kernel would take is left out.
    if named && (1..INO_END).contains(&ino) && (1..COOKIE_END).contains(&next) {
        let (name, ino, kind) = (name.to_vec(), InodeId(ino), mode & client::fs::S_IFMT);
        request.entries.push(Entry { name, ino, kind, next });
    }
    c_int::from(request.entries.len() < ENTRIES_MAX)
}
