//! Attributes: stat and its family, modes, owners, times, extended attributes, space.

use alloc::vec::Vec;

use base::InodeId;
use client::fs::{Attr, Caller, S_IFLNK, SetAttr, SetTime, StatFs, Time, XattrMode};
use core::sync::atomic::Ordering;

use super::{Reply, served};
use crate::entry::Regs;
use crate::format::state;
use crate::fsys::{self, BLOCK, caller, device, fs};
use crate::mem;
use crate::path::{self, Last, Path, Stop};
use crate::sys::{self, at, err, nr};

const CWD: i32 = at::FDCWD;
/// XATTR_NAME_MAX, XATTR_SIZE_MAX, XATTR_LIST_MAX.
const XATTR_NAME_MAX: usize = 255;
const XATTR_SIZE_MAX: usize = 65_536;
const XATTR_LIST_MAX: usize = 65_536;
/// What a file's capabilities are called.
const CAPABILITY: &[u8] = b"security.capability";

/// Flags that calls of the stat family know: AT_NO_AUTOMOUNT and AT_STATX_SYNC_TYPE besides.
const STAT_FLAGS: u32 = SET_FLAGS | 0x6800;
/// Flags that calls which change something know.
const SET_FLAGS: u32 = at::SYMLINK_NOFOLLOW | at::EMPTY_PATH;

/// See the module text.
pub fn attrs(r: &mut Regs) -> Reply {
    let (a, b, c, d) = (r.rdi, r.rsi, r.rdx, r.r10);
    match r.rax {
        nr::STAT => stat(&named(CWD, a, true)?, b),
        nr::LSTAT => stat(&named(CWD, a, false)?, b),
        nr::FSTAT => stat(&descriptor(a)?, b),
        nr::NEWFSTATAT => stat(&at_flags(a, b, d as u32, STAT_FLAGS)?, c),
        nr::STATX => statx(r),
        nr::ACCESS => access(CWD, a, b as u32, 0),
        nr::FACCESSAT => access(a as i32, b, c as u32, 0),
        nr::FACCESSAT2 => access(a as i32, b, c as u32, d as u32),
        nr::CHMOD => chmod(&named(CWD, a, true)?, b as u32),
        nr::FCHMOD => chmod(&descriptor(a)?, b as u32),
        nr::FCHMODAT => chmod(&named(a as i32, b, true)?, c as u32),
        nr::FCHMODAT2 => chmod(&at_flags(a, b, d as u32, SET_FLAGS)?, c as u32),
        nr::CHOWN => chown(&named(CWD, a, true)?, b as u32, c as u32),
        nr::LCHOWN => chown(&named(CWD, a, false)?, b as u32, c as u32),
        nr::FCHOWN => chown(&descriptor(a)?, b as u32, c as u32),
        nr::FCHOWNAT => chown(&at_flags(a, b, r.r8 as u32, SET_FLAGS)?, c as u32, d as u32),
        nr::UTIME | nr::UTIMES | nr::FUTIMESAT | nr::UTIMENSAT => times(r),
        nr::STATFS => statfs(named(CWD, a, true)?.ino, b),
        nr::FSTATFS => {
            let file = served(a)?;
            statfs(InodeId(file.ofd().ino.load(Ordering::Relaxed)), b)
        }
        nr::GETXATTR | nr::SETXATTR | nr::LISTXATTR | nr::REMOVEXATTR => {
            xattr(r, || named(CWD, a, true))
        }
        nr::LGETXATTR | nr::LSETXATTR | nr::LLISTXATTR | nr::LREMOVEXATTR => {
            xattr(r, || named(CWD, a, false))
        }
        nr::FGETXATTR | nr::FSETXATTR | nr::FLISTXATTR | nr::FREMOVEXATTR => {
            xattr(r, || descriptor(a))
        }
        _ => Err(Stop::Kernel),
    }
}

fn named(dirfd: i32, at: usize, follow: bool) -> Result<Attr, Stop> {
    path::resolve(dirfd, &Path::get(at)?, follow)?.exists()
}

/// What is open under a number.
pub fn descriptor(fd: usize) -> Result<Attr, Stop> {
    let file = served(fd)?;
    if file.ofd().state.load(Ordering::Acquire) == state::DIR {
        let ino = crate::fsys::shown(file.ofd())?;
        return Ok(fs()?.getattr(&caller(), ino)?);
    }
    Ok(fs()?.fgetattr(file.handle()?)?)
}

/// A path with AT_EMPTY_PATH and AT_SYMLINK_NOFOLLOW; others than `known` are refused.
fn at_flags(dirfd: usize, at: usize, flags: u32, known: u32) -> Result<Attr, Stop> {
    at_flags_as(&caller(), dirfd, at, flags, known)
}

fn at_flags_as(
    who: &Caller<'_>,
    dirfd: usize,
    at: usize,
    flags: u32,
    known: u32,
) -> Result<Attr, Stop> {
    if flags & !known != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    if at == 0 && flags & at::EMPTY_PATH != 0 && known == STAT_FLAGS {
        return descriptor(dirfd);
    }
    let path = Path::get(at)?;
    if path.bytes().is_empty() && flags & at::EMPTY_PATH != 0 {
        if dirfd as i32 == CWD {
            return Err(Stop::Kernel);
        }
        return descriptor(dirfd);
    }
    let last = if flags & at::SYMLINK_NOFOLLOW == 0 { Last::Follow } else { Last::Keep };
    path::resolve_as(who, dirfd as i32, &path, last)?.exists()
}

fn stat(attr: &Attr, to: usize) -> Reply {
    mem::put(to, &fsys::stat_of(attr))?;
    Ok(0)
}

/// The kernel's `struct statx`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Statx {
    mask: u32,
    blksize: u32,
    attributes: u64,
    nlink: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    pad: u16,
    ino: u64,
    size: u64,
    blocks: u64,
    attributes_mask: u64,
    times: [[u64; 2]; 4],
    rdev: [u32; 2],
    dev: [u32; 2],
    more: [u64; 14],
}
const _: () = assert!(size_of::<Statx>() == 256);

fn split_dev(dev: u64) -> [u32; 2] {
    let major = (dev >> 8) & 0xfff | (dev >> 32) & !0xfff;
    let minor = dev & 0xff | (dev >> 12) & !0xff;
    [major as u32, minor as u32]
}

/// STATX_ATTR_MOUNT_ROOT.
const MOUNT_ROOT: u64 = 0x2000;
/// STATX_ATTR_AUTOMOUNT and STATX_ATTR_DAX, which the kernel knows of for every file system.
const ALL_KNOW: u64 = 0x20_1000;
/// STATX_MNT_ID and STATX_MNT_ID_UNIQUE.
const MOUNT_IDS: u32 = 0x5000;

/// The number of the mount that is asked for, and what kind of number it is; none without a mount.
fn mount_of(asked: u32) -> (u32, u64) {
    let mut x = Statx::default();
    if asked == 0 {
        return (0, 0);
    }
    let Ok(root) = fsys::template() else { return (0, 0) };
    let (empty, to) = (c"".as_ptr() as usize, (&raw mut x) as usize);
    let flags = at::EMPTY_PATH as usize;
    let ret = sys::call6(nr::STATX, root as usize, empty, flags, asked as usize, to, 0);
    if ret == 0 { (x.mask & MOUNT_IDS, x.more[0]) } else { (0, 0) }
}

fn statx(r: &Regs) -> Reply {
    let (flags, mask) = (r.rdx as u32, r.r10 as u32);
    // STATX__RESERVED; AT_STATX_FORCE_SYNC and AT_STATX_DONT_SYNC at once.
    if mask & 1 << 31 != 0 || flags & 0x6000 == 0x6000 {
        return Err(Stop::Error(err::INVAL));
    }
    let attr = at_flags(r.rdi, r.rsi, flags, STAT_FLAGS)?;
    let s = fsys::stat_of(&attr);
    let time = |t: Time| [t.sec as u64, u64::from(t.nsec)];
    let mut more = [0; 14];
    let (mount, id) = mount_of(mask & MOUNT_IDS);
    more[0] = id;
    let root = attr.ino == InodeId::ROOT;
    let x = Statx {
        // STATX_BASIC_STATS | STATX_BTIME
        mask: 0xfff | mount,
        attributes: if root { MOUNT_ROOT } else { 0 },
        attributes_mask: MOUNT_ROOT | ALL_KNOW,
        more,
        blksize: BLOCK as u32,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        mode: attr.mode as u16,
        ino: attr.ino.0,
        size: s.size as u64,
        blocks: attr.blocks,
        times: [time(attr.atime), time(attr.btime), time(attr.ctime), time(attr.mtime)],
        rdev: split_dev(u64::from(attr.rdev)),
        dev: split_dev(device()),
        ..Statx::default()
    };
    mem::put(r.r8, &x)?;
    Ok(0)
}

fn access(dirfd: i32, path: usize, mask: u32, flags: u32) -> Reply {
    if mask & !7 != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let mut who = caller();
    if flags & at::EACCESS == 0 {
        // access asks for the real identity: getuid, getgid.
        who.uid = sys::call0(102) as u32;
        who.gid = sys::call0(104) as u32;
    }
    let attr = at_flags_as(&who, dirfd as usize, path, flags & !at::EACCESS, SET_FLAGS)?;
    fs()?.access(&who, attr.ino, mask)?;
    Ok(0)
}

fn chmod(attr: &Attr, mode: u32) -> Reply {
    if attr.kind() == S_IFLNK {
        return Err(Stop::Error(err::OPNOTSUPP));
    }
    let set = SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() };
    fs()?.setattr(&caller(), attr.ino, &set)?;
    Ok(0)
}

fn chown(attr: &Attr, uid: u32, gid: u32) -> Reply {
    let known = |id: u32| (id != u32::MAX).then_some(id);
    // To the same owner is a change too: it ends set-id bits, and has its time.
    let same = uid == u32::MAX && gid == u32::MAX;
    let bits = !attr.is_dir() && attr.mode & 0o6000 != 0;
    let owns = [0, attr.uid].contains(&caller().uid);
    if same && bits && !owns && (attr.mode & 0o4000 != 0 || attr.mode & 0o2010 == 0o2010) {
        return Err(Stop::Error(err::PERM));
    }
    let uid = if same && owns { attr.uid } else { uid };
    let set = SetAttr { uid: known(uid), gid: known(gid), ..SetAttr::default() };
    fs()?.setattr(&caller(), attr.ino, &set)?;
    Ok(0)
}

const UTIME_NOW: i64 = 0x3fff_ffff;
const UTIME_OMIT: i64 = 0x3fff_fffe;

fn set_time(sec: i64, nsec: i64) -> Result<Option<SetTime>, Stop> {
    match nsec {
        UTIME_NOW => Ok(Some(SetTime::Now)),
        UTIME_OMIT => Ok(None),
        0..1_000_000_000 => Ok(Some(SetTime::At(Time { sec, nsec: nsec as u32 }))),
        _ => Err(Stop::Error(err::INVAL)),
    }
}

/// utime (seconds), utimes and futimesat (microseconds), utimensat (nanoseconds).
fn times(r: &Regs) -> Reply {
    let at = if matches!(r.rax, nr::UTIME | nr::UTIMES) { r.rsi } else { r.rdx };
    let micro = |u: i64| if (0..1_000_000).contains(&u) { u * 1000 } else { -1 };
    let wanted: [i64; 4] = match r.rax {
        _ if at == 0 => [0, UTIME_NOW, 0, UTIME_NOW],
        nr::UTIME => {
            let [a, m]: [i64; 2] = mem::get(at)?;
            [a, 0, m, 0]
        }
        nr::UTIMENSAT => mem::get(at)?,
        _ => {
            let [a, an, m, mn]: [i64; 4] = mem::get(at)?;
            [a, micro(an), m, micro(mn)]
        }
    };
    if r.rax != nr::UTIMENSAT && (wanted[1] < 0 || wanted[3] < 0) {
        return Err(Stop::Error(err::INVAL));
    }
    if wanted[1] == UTIME_OMIT && wanted[3] == UTIME_OMIT {
        // As in the kernel, the file is not even looked for.
        return Ok(0);
    }
    let attr = match r.rax {
        nr::UTIME | nr::UTIMES => named(CWD, r.rdi, true)?,
        nr::UTIMENSAT if r.rsi == 0 && r.r10 as u32 != 0 => return Err(Stop::Error(err::INVAL)),
        nr::UTIMENSAT if r.rsi == 0 => descriptor(r.rdi)?,
        nr::UTIMENSAT => at_flags(r.rdi, r.rsi, r.r10 as u32, SET_FLAGS)?,
        _ if r.rsi == 0 => descriptor(r.rdi)?,
        _ => named(r.rdi as i32, r.rsi, true)?,
    };
    let (atime, mtime) = (set_time(wanted[0], wanted[1])?, set_time(wanted[2], wanted[3])?);
    let who = caller();
    if atime.is_none() != mtime.is_none() && who.uid != 0 && who.uid != attr.uid {
        // Who may write may set both to now, and nothing else.
        return Err(Stop::Error(err::PERM));
    }
    fs()?.setattr(&caller(), attr.ino, &SetAttr { atime, mtime, ..SetAttr::default() })?;
    Ok(0)
}

fn statfs(ino: InodeId, to: usize) -> Reply {
    let StatFs { block_bytes, blocks, blocks_free, inodes, inodes_free, name_max } =
        fs()?.statfs_of(ino)?;
    let dev = device();
    let block = u64::from(block_bytes);
    // struct statfs: type (FUSE_SUPER_MAGIC), bsize, blocks, bfree, bavail, files, ffree, fsid,
    // namelen, frsize, flags, spare.
    let words: [u64; 15] = [
        0x6573_5546,
        block,
        blocks,
        blocks_free,
        blocks_free,
        inodes,
        inodes_free,
        dev,
        u64::from(name_max),
        block,
        0x20,
        0,
        0,
        0,
        0,
    ];
    mem::put(to, &words)?;
    Ok(0)
}

fn xattr(r: &Regs, file: impl Fn() -> Result<Attr, Stop>) -> Reply {
    let list = matches!(r.rax, nr::LISTXATTR | nr::LLISTXATTR | nr::FLISTXATTR);
    if list {
        let names = fs()?.listxattr(&caller(), file()?.ino)?;
        // What the kernel makes of a list that is longer than any may be.
        return match r.rdx {
            0 => Ok(names.len().min(XATTR_LIST_MAX) as isize),
            room if names.len() > XATTR_LIST_MAX && room >= XATTR_LIST_MAX => {
                Err(Stop::Error(err::TOOBIG))
            }
            room => give(&names, r.rsi, room),
        };
    }
    let set = matches!(r.rax, nr::SETXATTR | nr::LSETXATTR | nr::FSETXATTR);
    let flags = r.r8 as u32;
    if set && flags & !3 != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let mut room = [0u8; XATTR_NAME_MAX + 1];
    let len = mem::get_string(r.rsi, &mut room)?.ok_or(err::RANGE)?;
    let name = &room[..len];
    if name.is_empty() {
        return Err(Stop::Error(err::RANGE));
    }
    if set && name == CAPABILITY {
        // The kernel knows what such a value may be.
        if r.rax == nr::FSETXATTR {
            super::to_kernel(r.rdi)?;
        }
        return Err(Stop::Kernel);
    }
    if set && r.r10 > XATTR_SIZE_MAX {
        return Err(Stop::Error(err::TOOBIG));
    }
    if set {
        let value: Vec<u8> = mem::source(r.rdx, r.r10)?.to_vec();
        let ino = file()?.ino;
        let mode = match flags {
            0 => XattrMode::Set,
            1 => XattrMode::Create,
            2 => XattrMode::Replace,
            _ => {
                // Both: it cannot be.
                fs()?.getxattr(&caller(), ino, name)?;
                XattrMode::Create
            }
        };
        fs()?.setxattr(&caller(), ino, name, &value, mode)?;
        return Ok(0);
    }
    let ino = file()?.ino;
    if matches!(r.rax, nr::GETXATTR | nr::LGETXATTR | nr::FGETXATTR) {
        let value = fs()?.getxattr(&caller(), ino, name)?;
        if name == CAPABILITY && value.is_empty() {
            // Which the kernel takes, and shows to nobody.
            return Err(Stop::Error(err::INVAL));
        }
        return give(&value, r.rdx, r.r10);
    }
    fs()?.removexattr(&caller(), ino, name)?;
    Ok(0)
}

/// A value into a buffer; with size 0 only its length is asked.
fn give(value: &[u8], to: usize, room: usize) -> Reply {
    if room == 0 {
        return Ok(value.len() as isize);
    }
    if value.len() > room {
        return Err(Stop::Error(err::RANGE));
    }
    mem::put_slice(to, value)?;
    Ok(value.len() as isize)
}
