//! From a path to an inode: the walk that a kernel does, over any [`FileSystem`]. Shared by the C
//! library and the interception library.

use alloc::vec::Vec;

use base::{Errno, InodeId};

use crate::fs::{Attr, Caller, FileSystem, Result, S_IFLNK};

/// Symbolic links followed in one walk, as in Linux.
const LINKS_MAX: u32 = 40;
/// Longest path, with room for its NUL.
const PATH_MAX: usize = 4096;

/// Where a walk ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Walked {
    /// At a name of a directory.
    At(Found),
    /// At an absolute symbolic link (or `..` of the root): the walk goes on outside, at this path.
    /// The part behind the link is appended already.
    Outside(Vec<u8>),
}

/// A name and what it leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The directory of the last component (the inode itself for `/`, `.` and `..`).
    pub parent: InodeId,
    /// The last component; empty when the path ends in `/`, `.` or `..` only.
    pub name: Vec<u8>,
    /// What is there; `None` when the last component does not exist.
    pub attr: Option<Attr>,
    /// The path ended in a slash: only a directory will do.
    pub must_be_dir: bool,
}

impl Found {
    /// Attributes, or ENOENT.
    pub fn existing(&self) -> Result<Attr> {
        let attr = self.attr.ok_or(Errno::NOENT)?;
        if self.must_be_dir && !attr.is_dir() {
            return Err(Errno::NOTDIR);
        }
        Ok(attr)
    }
}

/// Walks `path` from `start` (used for relative paths; an absolute one starts at the root of the
/// volume: callers strip their mount prefix). `follow` says whether a link at the end is followed.
pub fn walk(
    fs: &dyn FileSystem,
    caller: &Caller<'_>,
    start: InodeId,
    path: &[u8],
    follow: bool,
) -> Result<Walked> {
    if path.is_empty() {
        return Err(Errno::NOENT);
    }
    if path.len() >= PATH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let mut at = if path[0] == b'/' { InodeId::ROOT } else { start };
    let mut todo: Vec<u8> = path.to_vec();
    let mut links = 0;
    // Each round takes the first component off `todo`.
    loop {
        let begin = todo.iter().position(|&b| b != b'/').unwrap_or(todo.len());
        let end = todo[begin..].iter().position(|&b| b == b'/').map_or(todo.len(), |n| begin + n);
        let name = todo[begin..end].to_vec();
        let rest = todo.split_off(end);
        let last = rest.iter().all(|&b| b == b'/');
        let must_be_dir = !rest.is_empty();
        if name.is_empty() || name == b"." || name == b".." {
            if name == b".." {
                if at == InodeId::ROOT {
                    return Ok(Walked::Outside(outside(b"..", &rest)));
                }
                at = fs.lookup(caller, at, b"..")?.ino;
            } else if name == b"." {
                fs.lookup(caller, at, b".")?;
            }
            if last {
                let attr = Some(fs.getattr(caller, at)?);
                let found = Found { parent: at, name: Vec::new(), attr, must_be_dir: true };
                return Ok(Walked::At(found));
            }
            todo = rest;
            continue;
        }
        let looked_up = match last {
            true => fs.lookup(caller, at, &name),
            false => fs.lookup_through(caller, at, &name),
        };
        let attr = match looked_up {
            Ok(attr) => attr,
            Err(Errno::NOENT) if last => {
                return Ok(Walked::At(Found { parent: at, name, attr: None, must_be_dir }));
            }
            Err(e) => return Err(e),
        };
        let is_link = attr.kind() == S_IFLNK;
        if is_link && (!last || follow || must_be_dir) {
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP);
            }
            let target = fs.readlink(caller, attr.ino)?;
            if target.is_empty() {
                return Err(Errno::NOENT);
            }
            if target[0] == b'/' {
                return Ok(Walked::Outside(outside(&target, &rest)));
            }
            todo = target;
            todo.extend_from_slice(&rest);
            continue;
        }
        if last {
            return Ok(Walked::At(Found { parent: at, name, attr: Some(attr), must_be_dir }));
        }
        if !attr.is_dir() {
            return Err(Errno::NOTDIR);
        }
        at = attr.ino;
        todo = rest;
    }
}

fn outside(target: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut path = target.to_vec();
    path.extend_from_slice(rest);
    path
}
