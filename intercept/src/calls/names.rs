//! Making, removing and renaming names; reading links.

use base::InodeId;
use client::fs::{NewNode, Rename, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use core::sync::atomic::Ordering;

use super::{Reply, regular};
use crate::entry::Regs;
use crate::fsys::{caller, fs, maker};
use crate::path::{self, Found, Path, Stop};
use crate::sys::{self, Stat, at, err, nr};
use crate::{demote, mem, mounts, protect, table};

const CWD: i32 = at::FDCWD;
/// Kinds of devices.
const CHARACTERS: u32 = 0o020_000;
const BLOCKS: u32 = 0o060_000;
const RENAME_EXCHANGE: u32 = 2;

/// See the module text.
pub fn names(r: &mut Regs) -> Reply {
    match r.rax {
        nr::MKDIR => make(CWD, r.rdi, S_IFDIR | (r.rsi as u32 & 0o1777), 0),
        nr::MKDIRAT => make(r.rdi as i32, r.rsi, S_IFDIR | (r.rdx as u32 & 0o1777), 0),
        nr::MKNOD => mknod(CWD, r.rdi, r.rsi as u32, r.rdx as u32),
        nr::MKNODAT => mknod(r.rdi as i32, r.rsi, r.rdx as u32, r.r10 as u32),
        nr::RMDIR => remove(CWD, r.rdi, true),
        nr::UNLINK => remove(CWD, r.rdi, false),
        nr::UNLINKAT => match r.rdx as u32 {
            0 => remove(r.rdi as i32, r.rsi, false),
            at::REMOVEDIR => remove(r.rdi as i32, r.rsi, true),
            _ => Err(Stop::Error(err::INVAL)),
        },
        nr::RENAME => rename(CWD, r.rdi, CWD, r.rsi, 0),
        nr::RENAMEAT => rename(r.rdi as i32, r.rsi, r.rdx as i32, r.r10, 0),
        nr::RENAMEAT2 => rename(r.rdi as i32, r.rsi, r.rdx as i32, r.r10, r.r8 as u32),
        nr::LINK => link(CWD, r.rdi, CWD, r.rsi, 0),
        nr::LINKAT => link(r.rdi as i32, r.rsi, r.rdx as i32, r.r10, r.r8 as u32),
        nr::SYMLINK => symlink(r.rdi, CWD, r.rsi),
        nr::SYMLINKAT => symlink(r.rdi, r.rsi as i32, r.rdx),
        nr::READLINK => readlink(CWD, r.rdi, r.rsi, r.rdx),
        nr::READLINKAT => readlink(r.rdi as i32, r.rsi, r.rdx, r.r10),
        _ => Err(Stop::Kernel),
    }
}

fn find(dirfd: i32, at: usize, follow: bool) -> Result<Found, Stop> {
    path::resolve(dirfd, &Path::get(at)?, follow)
}

fn mknod(dirfd: i32, at: usize, mode: u32, rdev: u32) -> Reply {
    match mode & S_IFMT {
        S_IFDIR => Err(Stop::Error(err::PERM)),
        // Links have a call of their own; and there are kinds that nobody knows.
        0 | S_IFREG | 0o010_000 | CHARACTERS | BLOCKS | 0o140_000 => make(dirfd, at, mode, rdev),
        _ => Err(Stop::Error(err::INVAL)),
    }
}

fn make(dirfd: i32, at: usize, mode: u32, rdev: u32) -> Reply {
    let found = find(dirfd, at, false)?;
    if found.attr.is_some() {
        return Err(Stop::Error(err::EXIST));
    }
    let kind = match mode & S_IFMT {
        CHARACTERS | BLOCKS if caller().uid != 0 => return Err(Stop::Error(err::PERM)),
        S_IFDIR => S_IFDIR,
        _ if found.slash => return Err(Stop::Error(err::NOENT)),
        0 => S_IFREG,
        kind => kind,
    };
    let (who, mode) = maker(mode)?;
    let node = NewNode { mode: kind | mode, rdev, target: &[] };
    fs()?.mknod(&who, found.parent, found.name(), &node)?;
    Ok(0)
}

fn symlink(target: usize, dirfd: i32, at: usize) -> Reply {
    let found = find(dirfd, at, false)?;
    let target = Path::get(target)?;
    if target.bytes().is_empty() {
        return Err(Stop::Error(err::NOENT));
    }
    if found.attr.is_some() {
        return Err(Stop::Error(err::EXIST));
    }
    if found.slash {
        return Err(Stop::Error(err::NOENT));
    }
    let node = NewNode { mode: S_IFLNK | 0o777, rdev: 0, target: target.bytes() };
    fs()?.mknod(&caller(), found.parent, found.name(), &node)?;
    Ok(0)
}

fn remove(dirfd: i32, at: usize, dir: bool) -> Reply {
    let found = path::resolve_to_remove(dirfd, &Path::get(at)?)?;
    let attr = found.exists()?;
    if found.name().is_empty() {
        return Err(Stop::Error(err::BUSY));
    }
    if dir {
        if attr.is_dir() && mounts::any_below() {
            return Err(Stop::Kernel);
        }
        match found.name() {
            b"." => return Err(Stop::Error(err::INVAL)),
            b".." => return Err(Stop::Error(-39)),
            name => fs()?.rmdir(&caller(), found.parent, name)?,
        }
        if attr.ino.0 == super::process::cwd() {
            tell_kernel_of_cwd();
        }
        return Ok(0);
    }
    if attr.is_dir() || found.dot {
        return Err(Stop::Error(err::ISDIR));
    }
    if attr.nlink <= 1 {
        demote::before_unlink(attr.ino.0);
    }
    fs()?.unlink(&caller(), found.parent, found.name())?;
    Ok(0)
}

fn rename(from_dir: i32, from: usize, to_dir: i32, to: usize, flags: u32) -> Reply {
    if flags & !3 != 0 || flags == 3 {
        return Err(Stop::Error(err::INVAL));
    }
    let (old_at, new_at) = (from, to);
    let (from, to) = (find(from_dir, from, false)?, find(to_dir, to, false)?);
    let attr = from.exists()?;
    if from.name().is_empty() || to.name().is_empty() || from.dot || to.dot {
        return Err(Stop::Error(err::BUSY));
    }
    if to.slash && !attr.is_dir() {
        return Err(Stop::Error(err::NOTDIR));
    }
    if let Some(old) = to.attr
        && flags == 0
        && !old.is_dir()
        && old.nlink <= 1
        && old.ino != attr.ino
    {
        demote::before_unlink(old.ino.0);
    }
    let dirs = attr.is_dir() || to.attr.is_some_and(|old| old.is_dir());
    if dirs && mounts::any_below() {
        return Err(Stop::Kernel);
    }
    let rename = Rename {
        parent: from.parent,
        name: from.name(),
        new_parent: to.parent,
        new_name: to.name(),
        flags,
    };
    fs()?.rename(&caller(), &rename)?;
    if dirs {
        tell_kernel(to_dir, new_at);
        if flags & RENAME_EXCHANGE != 0 {
            tell_kernel(from_dir, old_at);
        }
    }
    Ok(0)
}

/// The same of the working directory, by its whole path: from one that is gone the kernel goes nowhere.
#[cold]
#[inline(never)]
fn tell_kernel_of_cwd() {
    let mut path = [0u8; path::PATH_MAX];
    let room = path.as_mut_ptr() as usize;
    if !sys::failed(sys::call2(nr::GETCWD, room, path.len())) {
        tell_kernel(CWD, room);
    }
}

/// Lets the kernel look a directory's name up: `getcwd` says what it last knew.
fn tell_kernel(dirfd: i32, at: usize) {
    let mut stat = Stat::default();
    let to = (&raw mut stat) as usize;
    sys::call4(nr::NEWFSTATAT, dirfd as usize, at, to, at::SYMLINK_NOFOLLOW as usize);
}

fn link(from_dir: i32, from: usize, to_dir: i32, to: usize, flags: u32) -> Reply {
    if flags & !(at::SYMLINK_FOLLOW | at::EMPTY_PATH) != 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let path = Path::get(from)?;
    let (mut is_dir, mut found) = (false, None);
    let ino = if flags & at::EMPTY_PATH != 0 && path.bytes().is_empty() {
        // The open file itself. One that the kernel has (all without a name) it also links.
        match regular(from_dir as usize) {
            Ok(file) => InodeId(file.ofd().ino.load(Ordering::Acquire)),
            Err(Stop::Error(err::ISDIR)) => return Err(Stop::Error(err::PERM)),
            Err(stop) => return Err(stop),
        }
    } else {
        let attr = path::resolve(from_dir, &path, flags & at::SYMLINK_FOLLOW != 0)?.exists()?;
        (is_dir, found) = (attr.is_dir(), Some(attr));
        attr.ino
    };
    let to = find(to_dir, to, false)?;
    if to.attr.is_some() {
        return Err(Stop::Error(err::EXIST));
    }
    if to.slash {
        return Err(Stop::Error(err::NOENT));
    }
    if let Some(attr) = found {
        protect::link(&attr)?;
    }
    if is_dir {
        return Err(Stop::Error(err::PERM));
    }
    fs()?.link(&caller(), ino, to.parent, to.name())?;
    Ok(0)
}

fn readlink(dirfd: i32, at: usize, buf: usize, len: usize) -> Reply {
    let len = len as i32;
    if len <= 0 {
        return Err(Stop::Error(err::INVAL));
    }
    let path = Path::get(at)?;
    if path.bytes().is_empty() {
        // The descriptor itself (of a link opened with O_PATH): never ours.
        return if table::index(table::entry(dirfd)).is_some() {
            Err(Stop::Error(err::NOENT))
        } else {
            Err(Stop::Kernel)
        };
    }
    let found = match path::proc_descriptor(path.bytes()) {
        true => return Err(Stop::Kernel),
        false => path::resolve(dirfd, &path, false)?,
    };
    let attr = found.exists()?;
    if attr.kind() != S_IFLNK {
        return Err(Stop::Error(err::INVAL));
    }
    let target = fs()?.readlink(&caller(), attr.ino)?;
    let shown = &target[..target.len().min(len as usize)];
    mem::put_slice(buf, shown)?;
    Ok(shown.len() as isize)
}
