//! Making, removing and renaming names; reading links.

use client::fs::{NewNode, Rename, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use core::sync::atomic::Ordering;

use super::{Reply, process, regular};
use crate::entry::Regs;
use crate::fsys::{self, caller, fs, maker};
use crate::path::{self, Found, Last, Path, Stop};
use crate::sys::{self, Stat, at, err, nr};
use crate::{demote, mem, mounts, table};

const CWD: i32 = at::FDCWD;
/// Kinds of devices.
const CHARACTERS: u32 = 0o020_000;
const BLOCKS: u32 = 0o060_000;

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

/// A name to be made, removed or replaced.
fn find(dirfd: i32, at: usize, last: Last) -> Result<Found, Stop> {
    path::resolve_as(&caller(), dirfd, &Path::get(at)?, last)
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
    // (Who may not make it is told first that it is there.)
    let device = matches!(mode & S_IFMT, CHARACTERS | BLOCKS);
    let found = find(dirfd, at, if device { Last::Name } else { Last::New })?;
    if found.attr.is_some() {
        return Err(Stop::Error(err::EXIST));
    }
    let kind = match mode & S_IFMT {
        S_IFDIR => S_IFDIR,
        _ if found.slash => return Err(Stop::Error(err::NOENT)),
        CHARACTERS | BLOCKS if caller().uid != 0 => {
            fs()?.access(&caller(), found.parent, 3)?;
            return Err(Stop::Error(err::PERM));
        }
        0 => S_IFREG,
        kind => kind,
    };
    let (who, mode) = maker(mode)?;
    let node = NewNode { mode: kind | mode, rdev, target: &[] };
    fs()?.mknod(&who, found.parent, found.name(), &node)?;
    Ok(0)
}

fn symlink(target: usize, dirfd: i32, at: usize) -> Reply {
    let target = Path::get(target)?;
    if target.bytes().is_empty() {
        return Err(Stop::Error(err::NOENT));
    }
    let found = find(dirfd, at, Last::Name)?;
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
    let found = find(dirfd, at, Last::Remove)?;
    let attr = found.exists()?;
    if found.name().is_empty() {
        return Err(Stop::Error(if dir { err::BUSY } else { err::ISDIR }));
    }
    if dir {
        if attr.is_dir() && mounts::any_below() {
            return Err(Stop::Kernel);
        }
        if !found.dot && attr.ino.0 == process::cwd() {
            // Whoever is in a directory that is gone can still leave it, which only the kernel
            // knows how: the rest of the way is its own.
            table::context().cwd.store(0, Ordering::Release);
            return Err(Stop::Kernel);
        }
        match found.name() {
            b"." => return Err(Stop::Error(err::INVAL)),
            b".." => return Err(Stop::Error(err::NOTEMPTY)),
            name => fs()?.rmdir(&caller(), found.parent, name)?,
        }
        if demote::gave_directories() {
            // Who stands in it by the kernel's word is to be told that it is gone.
            tell_kernel(dirfd, at);
        }
        return Ok(0);
    }
    if found.dot || found.slash {
        return Err(Stop::Error(if attr.is_dir() { err::ISDIR } else { err::NOTDIR }));
    }
    if attr.nlink <= 1 && !attr.is_dir() {
        demote::before_unlink(attr.ino.0);
    }
    fs()?.unlink(&caller(), found.parent, found.name())?;
    Ok(0)
}

/// The kernel finds both directories first, then looks at the last names.
fn rename(from_dir: i32, from: usize, to_dir: i32, to: usize, flags: u32) -> Reply {
    const EXCHANGE: u32 = 2;
    if flags & !3 != 0 || flags == 3 {
        return Err(Stop::Error(err::INVAL));
    }
    let (old_at, new_at) = (from, to);
    // What is wrong with the way to the old one is told first.
    let (from, to) = (Path::get(from)?, Path::get(to));
    // A last name that is too long is looked for after what is wrong elsewhere.
    let long_from = from.ends_too_long();
    let long_to = to.as_ref().is_ok_and(Path::ends_too_long);
    let from = path::resolve_as(&caller(), from_dir, &from, Last::Remove);
    let to = to.and_then(|to| path::resolve_as(&caller(), to_dir, &to, Last::Remove));
    let (from, to) = match (from, to) {
        (Err(Stop::Error(err::NAMETOOLONG)), Err(to)) if long_from => return Err(to),
        (from, to) => (from?, to),
    };
    if let Err(Stop::Error(err::NAMETOOLONG)) = to
        && long_to
    {
        from.exists()?;
    }
    let to = to?;
    if from.name().is_empty() || from.dot {
        return Err(Stop::Error(err::BUSY));
    }
    if to.name().is_empty() || to.dot {
        return Err(Stop::Error(if flags == 1 { err::EXIST } else { err::BUSY }));
    }
    let attr = from.exists()?;
    match to.attr {
        Some(_) if flags == 1 => return Err(Stop::Error(err::EXIST)),
        None if flags == EXCHANGE => return Err(Stop::Error(err::NOENT)),
        _ => {}
    }
    if flags == EXCHANGE && to.slash && to.attr.is_some_and(|a| !a.is_dir())
        || !attr.is_dir() && (from.slash || to.slash && flags != EXCHANGE)
    {
        return Err(Stop::Error(err::NOTDIR));
    }
    if attr.ino == to.parent {
        return Err(Stop::Error(err::INVAL));
    }
    if to.attr.is_some_and(|old| old.ino == from.parent) {
        let refusal = if flags == EXCHANGE { err::INVAL } else { err::NOTEMPTY };
        return Err(Stop::Error(refusal));
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
        if flags & EXCHANGE != 0 {
            tell_kernel(from_dir, old_at);
        }
    }
    Ok(0)
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
    let who = caller();
    let ino = if flags & at::EMPTY_PATH != 0 && path.bytes().is_empty() {
        // The open file itself. One that the kernel has (all without a name) it also links.
        match regular(from_dir as usize) {
            Ok(file) => fsys::shown(file.ofd())?,
            Err(Stop::Error(err::ISDIR)) if who.uid == 0 => {
                super::attrs::descriptor(from_dir as usize)?.ino
            }
            Err(Stop::Error(err::ISDIR)) => return Err(Stop::Kernel),
            Err(stop) => return Err(stop),
        }
    } else if flags & at::SYMLINK_FOLLOW != 0
        && let Some(file) =
            path::own_descriptor(path.bytes()).and_then(|fd| regular(fd as usize).ok())
    {
        // The same, by its link in /proc: the kernel, to which it would have to be given, might not be allowed to open it now.
        fsys::shown(file.ofd())?
    } else {
        if flags & at::EMPTY_PATH != 0 && from_dir != CWD && who.uid != 0 {
            // Whether this user has opened the descriptor only the kernel knows.
            return Err(Stop::Kernel);
        }
        path::resolve(from_dir, &path, flags & at::SYMLINK_FOLLOW != 0)?.exists()?.ino
    };
    let to = find(to_dir, to, Last::Name)?;
    if to.attr.is_some() {
        return Err(Stop::Error(err::EXIST));
    }
    if to.slash {
        return Err(Stop::Error(err::NOENT));
    }
    fs()?.link(&who, ino, to.parent, to.name())?;
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
