//! From a path as the application gave it to an inode of ours, or the verdict that the kernel
//! shall look at it.
//!
//! Recognised are absolute paths that begin with the prefix (after squeezing `//` and `/./`), and
//! relative ones when the working directory or the directory descriptor is ours. Everything else
//! that leads into the prefix (links outside, bind mounts, `/proc/N/...`) the kernel resolves into
//! the mount: right, and slow.

use alloc::vec::Vec;

use base::InodeId;
use client::fs::{Attr, Caller, FileSystem, S_IFDIR, S_IFLNK};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::format::state;
use crate::fsys::{caller, code, fs};
use crate::sys::{self, at, err, nr};
use crate::{mem, session, table};

/// Longest path with NUL.
pub const PATH_MAX: usize = 4096;
/// Longest name.
const NAME_MAX: usize = 255;
/// Symbolic links followed before ELOOP.
const LINKS_MAX: u32 = 40;

/// After chroot, when paths mean something else, and for a super-user without all powers.
static DISABLED: AtomicBool = AtomicBool::new(false);

/// From now on every path is the kernel's. (A child of vfork's are, and its parent's stay what they are.)
pub fn disable() {
    if !table::in_vfork() {
        DISABLED.store(true, Ordering::Relaxed);
    }
}

/// Paths mean something else from now on, or may not be opened, and in all programs that this process will start too.
static LEFT: AtomicBool = AtomicBool::new(false);

/// The same, for good.
pub fn leave() {
    if table::in_vfork() {
        table::context().left.store(true, Ordering::Relaxed);
        return;
    }
    LEFT.store(true, Ordering::Relaxed);
    disable();
}

/// Whether the programs that this process starts are the kernel's.
pub fn has_left() -> bool {
    LEFT.load(Ordering::Relaxed) || table::context().left.load(Ordering::Relaxed)
}

/// Why a path is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The kernel shall do the call.
    Kernel,
    /// The call fails.
    Error(isize),
    /// The description left for the kernel while the call waited for its offset: it is looked at once more.
    Again,
    /// A signal was put off: its handler runs first, and then the call begins once more.
    Flush,
}

impl From<mem::Fault> for Stop {
    fn from(_: mem::Fault) -> Self {
        Stop::Error(err::FAULT)
    }
}

impl From<isize> for Stop {
    fn from(e: isize) -> Self {
        Stop::Error(e)
    }
}

impl From<base::Errno> for Stop {
    fn from(e: base::Errno) -> Self {
        Stop::Error(code(e))
    }
}

/// A path copied from the application.
#[derive(Debug)]
pub struct Path {
    bytes: [u8; PATH_MAX],
    len: usize,
}

impl Path {
    /// Copies the string at an application address.
    pub fn get(at: usize) -> Result<Self, Stop> {
        let mut path = Path { bytes: [0; PATH_MAX], len: 0 };
        path.len = mem::get_string(at, &mut path.bytes)?.ok_or(err::NAMETOOLONG)?;
        Ok(path)
    }

    /// The bytes without NUL.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Whether the last name is longer than names are.
    pub fn ends_too_long(&self) -> bool {
        let end = self.bytes().iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
        let names = &self.bytes()[..end];
        let begin = names.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
        end - begin > NAME_MAX
    }
}

/// What is left of an absolute path behind the prefix, when it begins with it.
pub fn behind_prefix(path: &[u8]) -> Option<&[u8]> {
    if DISABLED.load(Ordering::Relaxed) {
        return None;
    }
    let mut rest = path.strip_prefix(b"/")?;
    for want in session::mount()[1..].split(|b| *b == b'/') {
        while let Some(r) = rest.strip_prefix(b"/").or_else(|| rest.strip_prefix(b"./")) {
            rest = r;
        }
        rest = rest.strip_prefix(want)?;
        if !rest.is_empty() && rest[0] != b'/' {
            return None;
        }
    }
    Some(rest)
}

/// Number named by `/proc/self/fd/N` or `/dev/fd/N` and the like.
fn descriptor_path(path: &[u8]) -> Option<i32> {
    match path {
        b"/dev/stdin" => return Some(0),
        b"/dev/stdout" => return Some(1),
        b"/dev/stderr" => return Some(2),
        _ => {}
    }
    let digits = match path.strip_prefix(b"/proc/") {
        Some(rest) => own_process(rest)?.strip_prefix(b"/fd/")?,
        None => path.strip_prefix(b"/dev/fd/")?,
    };
    let end = digits.iter().position(|b| *b == b'/').unwrap_or(digits.len());
    core::str::from_utf8(&digits[..end]).ok()?.parse().ok()
}

/// The descriptor of this process that a path of `/proc` or `/dev` names and nothing behind it.
pub fn own_descriptor(path: &[u8]) -> Option<i32> {
    let fd = descriptor_path(path)?;
    let behind = path.iter().rposition(|b| *b == b'/')?;
    path[behind + 1..]
        .iter()
        .all(u8::is_ascii_digit)
        .then_some(fd)
        .filter(|_| !path.ends_with(b"/"))
}

/// What follows the name of this process in `/proc`.
fn own_process(path: &[u8]) -> Option<&[u8]> {
    if let Some(rest) = path.strip_prefix(b"self").or_else(|| path.strip_prefix(b"thread-self")) {
        return Some(rest);
    }
    let mut digits = [0; 20];
    path.strip_prefix(crate::demote::decimal(sys::call0(nr::GETPID) as u64, &mut digits))
}

/// Whether the path is a link of `/proc` to a descriptor: to be read, not followed.
pub fn proc_descriptor(path: &[u8]) -> bool {
    descriptor_path(path).is_some()
}

/// Directory and rest of the path from which the walk begins.
fn start(dirfd: i32, path: &[u8]) -> Result<(InodeId, &[u8]), Stop> {
    // A vfork child shares our memory but not our descriptors: what the file system object opened
    // there would be missing here. Exec is near; until then the mount serves its paths.
    let ours = !table::in_vfork() && !DISABLED.load(Ordering::Relaxed);
    if path.first() == Some(&b'/') {
        if ours && let Some(rest) = behind_prefix(path) {
            return Ok((InodeId::ROOT, rest));
        }
        if let Some(fd) = descriptor_path(path)
            && table::index(table::entry(fd)).is_some()
        {
            crate::demote::descriptor(fd)?;
        }
        return Err(Stop::Kernel);
    }
    if !ours && (dirfd == at::FDCWD || table::in_vfork()) {
        return Err(Stop::Kernel);
    }
    if dirfd == at::FDCWD {
        return match crate::calls::process::cwd() {
            0 => Err(Stop::Kernel),
            ino => Ok((InodeId(ino), path)),
        };
    }
    let Some(index) = table::index(table::entry(dirfd)) else {
        let own = table::entry(dirfd) & !table::CLOEXEC == table::INTERNAL;
        return Err(if own { Stop::Error(err::BADF) } else { Stop::Kernel });
    };
    let ofd = table::ofd(index);
    match ofd.state.load(Ordering::Acquire) {
        state::DIR if ours => {
            if let Some(file) = table::InUse::of(dirfd) {
                file.keep();
            }
            Ok((crate::fsys::shown(ofd)?, path))
        }
        state::FILE => Err(Stop::Error(err::NOTDIR)),
        _ => {
            to_kernel(dirfd)?;
            Err(Stop::Kernel)
        }
    }
}

/// Before the kernel resolves a path: what stands for a file of ours in it is a directory, and must
/// not be taken for one.
pub fn to_kernel(dirfd: i32) -> Result<(), Stop> {
    if let Some(index) = table::index(table::entry(dirfd))
        && table::ofd(index).state.load(Ordering::Acquire) != state::DIR
    {
        crate::demote::descriptor(dirfd)?;
    }
    Ok(())
}

/// A resolved path.
#[derive(Debug)]
pub struct Found {
    /// Directory of the last component.
    pub parent: InodeId,
    /// The last component; empty when the path names the directory `parent` itself (`/prefix`,
    /// `.`, `..`).
    name: [u8; NAME_MAX + 1],
    name_len: usize,
    /// What the path leads to, if it exists.
    pub attr: Option<Attr>,
    /// The path ended in `/`.
    pub slash: bool,
    /// Last component was `.` or `..`.
    pub dot: bool,
}

impl Found {
    /// The last component.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.name_len]
    }

    /// The attributes, or ENOENT.
    pub fn exists(&self) -> Result<Attr, Stop> {
        self.attr.ok_or(Stop::Error(err::NOENT))
    }
}

fn is_dir(attr: &Attr) -> bool {
    attr.kind() == S_IFDIR
}

/// What the walk does with the last component. A slash behind it makes the first two follow it,
/// and ask for a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Last {
    /// A symbolic link is followed.
    Follow,
    /// It is not.
    Keep,
    /// The name itself is meant, to be made: never followed, and the caller judges the slash.
    Name,
    /// The same, and it is an error, of who makes it, if it is there.
    New,
    /// The same, to be removed or replaced.
    Remove,
    /// Followed, or made if it is not there (O_CREAT): EISDIR if a slash stands behind it.
    Create,
    /// The same, and never followed (O_CREAT with O_EXCL or O_NOFOLLOW).
    CreateHere,
}

/// Resolves `path`; the last component is followed when `follow`.
pub fn resolve(dirfd: i32, path: &Path, follow: bool) -> Result<Found, Stop> {
    let last = if follow { Last::Follow } else { Last::Keep };
    resolve_as(&caller(), dirfd, path, last)
}

/// The same with all that may be chosen.
pub fn resolve_as(who: &Caller<'_>, dirfd: i32, path: &Path, last: Last) -> Result<Found, Stop> {
    if path.bytes().is_empty() {
        return Err(Stop::Error(err::NOENT));
    }
    let (dir, rest) = start(dirfd, path.bytes())?;
    walk(who, dir, rest, last)
}

/// Inode of an absolute path of the kernel's making, when it is ours.
pub fn inode_of(path: &[u8]) -> Option<u64> {
    let found = walk(&caller(), InodeId::ROOT, behind_prefix(path)?, Last::Follow).ok()?;
    Some(found.attr?.ino.0)
}

/// Whether an inode is a directory without a name, which is there as long as somebody has it open.
pub fn is_removed(ino: u64) -> bool {
    let attr = fs().ok().and_then(|fs| fs.getattr(&Caller::ROOT, InodeId(ino)).ok());
    attr.is_some_and(|attr| is_dir(&attr) && attr.nlink == 0)
}

fn root_of(fs: &dyn FileSystem, who: &Caller<'_>, dir: InodeId) -> Result<Attr, Stop> {
    Ok(fs.getattr(who, dir)?)
}

fn walk(who: &Caller<'_>, dir: InodeId, rest: &[u8], mode: Last) -> Result<Found, Stop> {
    // Where nobody answers the mount waits, as mounts do, and signals reach the program meanwhile.
    let fs = fs().map_err(|e| if crate::fsys::is_away() { Stop::Kernel } else { e.into() })?;
    let literal = matches!(mode, Last::Name | Last::New | Last::Remove | Last::CreateHere);
    let mut dir = dir;
    let mut links = 0;
    // The path that a symbolic link was replaced in; from there on `from` counts in it.
    let mut spliced: Option<Vec<u8>> = None;
    let mut from = 0;
    let mut found = Found {
        parent: dir,
        name: [0; NAME_MAX + 1],
        name_len: 0,
        attr: None,
        slash: false,
        dot: false,
    };
    loop {
        let all = spliced.as_deref().unwrap_or(rest);
        let skip = all[from..].iter().position(|b| *b != b'/').unwrap_or(all.len() - from);
        from += skip;
        let rest = &all[from..];
        if rest.is_empty() {
            // Nothing but the directory itself.
            found.parent = dir;
            found.attr = Some(root_of(fs, who, dir)?);
            found.dot = true;
            found.slash = true;
            return Ok(found);
        }
        let end = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
        let (name, tail) = rest.split_at(end);
        let last = tail.iter().all(|b| *b == b'/');
        let dot = name == b"." || name == b"..";
        let creates = matches!(mode, Last::Create | Last::CreateHere);
        let to_make = last && creates && !tail.is_empty() && !dot;
        if to_make || name.len() > NAME_MAX {
            // Who may not search the directory is not told what is wrong with a name in it.
            fs.access(who, dir, 1)?;
            return Err(Stop::Error(match to_make {
                true => err::ISDIR,
                // And in one that is gone nothing is looked for.
                false if fs.getattr(who, dir)?.nlink == 0 => err::NOENT,
                false => err::NAMETOOLONG,
            }));
        }
        if name == b".." && dir == InodeId::ROOT {
            return Err(Stop::Kernel);
        }
        if name == b".corbel" && dir == InodeId::ROOT {
            // The mount's own directory: statistics, files by number.
            return Err(Stop::Kernel);
        }
        let looked_up = match mode {
            _ if !last => fs.lookup_through(who, dir, name),
            Last::Remove => fs.lookup_to_remove(who, dir, name),
            Last::New if tail.is_empty() => fs.lookup_to_make(who, dir, name),
            _ => fs.lookup(who, dir, name),
        };
        let attr = match looked_up {
            Ok(attr) => Some(attr),
            Err(base::Errno::NOENT) if last => None,
            Err(e) => return Err(e.into()),
        };
        if let Some(link) = attr
            && link.kind() == S_IFLNK
            && !(last && (literal || mode == Last::Keep && tail.is_empty()))
        {
            links += 1;
            if links > LINKS_MAX {
                return Err(Stop::Error(err::LOOP));
            }
            if last {
                crate::protect::follow(dir, &link)?;
            }
            let mut target = fs.readlink(who, link.ino)?;
            if target.is_empty() {
                return Err(Stop::Error(err::NOENT));
            }
            if target[0] == b'/' {
                let Some(inside) = behind_prefix(&target) else { return Err(Stop::Kernel) };
                target = inside.to_vec();
                dir = InodeId::ROOT;
            }
            // As long as they are together: Linux knows no limit for that, but of the links followed.
            target.extend_from_slice(tail);
            spliced = Some(target);
            from = 0;
            continue;
        }
        if last {
            found.parent = dir;
            found.name[..name.len()].copy_from_slice(name);
            found.name_len = name.len();
            found.attr = attr;
            found.slash = !tail.is_empty();
            found.dot = dot;
            if found.slash && !literal && attr.is_some_and(|a| !is_dir(&a)) {
                return Err(Stop::Error(err::NOTDIR));
            }
            return Ok(found);
        }
        let attr = attr.ok_or(err::NOENT)?;
        if !is_dir(&attr) {
            return Err(Stop::Error(err::NOTDIR));
        }
        dir = attr.ino;
        from += end;
    }
}
