//! Names: making, removing, moving, listing.

use super::args::{Args, Bits, Stop, c_string};
use super::calls::number;
use super::{Worker, done, sys};
use crate::text;

const RENAME: Bits =
    &[("noreplace", libc::RENAME_NOREPLACE as i64), ("exchange", libc::RENAME_EXCHANGE as i64)];

/// Kinds of special files.
const KIND: Bits = &[
    ("reg", libc::S_IFREG as i64),
    ("fifo", libc::S_IFIFO as i64),
    ("sock", libc::S_IFSOCK as i64),
    ("chr", libc::S_IFCHR as i64),
    ("blk", libc::S_IFBLK as i64),
];

/// Where a name begins in what getdents64 fills in.
const NAME_AT: usize = 19;

/// A name in a directory: position after it, type, name.
pub type Entry = (i64, u8, Vec<u8>);

/// Names in what getdents64 has filled in; none if that is malformed.
fn entries(bytes: &[u8]) -> Option<Vec<Entry>> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let offset = i64::from_le_bytes(rest.get(8..16)?.try_into().ok()?);
        let length = usize::from(u16::from_le_bytes(rest.get(16..18)?.try_into().ok()?));
        let name = rest.get(NAME_AT..length)?;
        let end = name.iter().position(|b| *b == 0)?;
        all.push((offset, rest[18], name[..end].to_vec()));
        rest = &rest[length..];
    }
    Some(all)
}

/// Names from where a descriptor stands, as many as fit into `space` bytes.
pub fn read_entries(fd: i32, space: usize) -> Result<Vec<Entry>, Stop> {
    let mut bytes = vec![0_u8; space];
    // libc has no function of that name in all versions; its `syscall` is a call site like others.
    let got = sys!(syscall(libc::SYS_getdents64, fd, bytes.as_mut_ptr(), bytes.len()));
    let got = done(got)? as usize;
    entries(&bytes[..got]).ok_or(Stop::Errno(libc::EBADMSG))
}

/// `NAME/TYPE`.
fn show(entry: &Entry) -> String {
    format!("{}/{}", text::escape(&entry.2), entry.1)
}

impl Worker {
    /// `mkdir PLACE MODE`.
    pub fn mkdir(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (place, mode) = (self.place(args, 0)?, args.u32(1)?);
        let path = place.path.as_ptr();
        let result = if place.is_at() {
            sys!(mkdirat(place.dir, path, mode))
        } else {
            sys!(mkdir(path, mode))
        };
        number(done(result))
    }

    /// `unlink PLACE`, `rmdir PLACE`.
    pub fn unlink(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let path = place.path.as_ptr();
        let result = match (name, place.is_at()) {
            ("unlink", false) => sys!(unlink(path)),
            ("unlink", true) => sys!(unlinkat(place.dir, path, 0)),
            (_, false) => sys!(rmdir(path)),
            (_, true) => sys!(unlinkat(place.dir, path, libc::AT_REMOVEDIR)),
        };
        number(done(result))
    }

    /// `rename FROM TO FLAGS`.
    pub fn rename(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (from, to) = (self.place(args, 0)?, self.place(args, 1)?);
        let flags = args.bits(2, RENAME)?.cast_unsigned();
        let (a, b) = (from.path.as_ptr(), to.path.as_ptr());
        let result = if flags != 0 {
            sys!(renameat2(from.dir, a, to.dir, b, flags))
        } else if from.is_at() || to.is_at() {
            sys!(renameat(from.dir, a, to.dir, b))
        } else {
            sys!(rename(a, b))
        };
        number(done(result))
    }

    /// `link FROM TO FLAGS`; `linkfd SLOT TO empty|proc`.
    pub fn link(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let to = self.place(args, 1)?;
        let result = if name == "linkfd" {
            let fd = self.fd(args, 0)?;
            if args.token(2)? == "empty" {
                sys!(linkat(fd, c"".as_ptr(), to.dir, to.path.as_ptr(), libc::AT_EMPTY_PATH))
            } else {
                let path = c_string(format!("/proc/self/fd/{fd}").into_bytes());
                let flag = libc::AT_SYMLINK_FOLLOW;
                sys!(linkat(libc::AT_FDCWD, path.as_ptr(), to.dir, to.path.as_ptr(), flag))
            }
        } else {
            let from = self.place(args, 0)?;
            let flags = args.bits(2, &[("follow", libc::AT_SYMLINK_FOLLOW as i64)])?;
            let (a, b) = (from.path.as_ptr(), to.path.as_ptr());
            if flags != 0 || from.is_at() || to.is_at() {
                sys!(linkat(from.dir, a, to.dir, b, flags))
            } else {
                sys!(link(a, b))
            }
        };
        number(done(result))
    }

    /// `symlink TARGET PLACE`.
    pub fn symlink(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (target, place) = (c_string(args.bytes(0)?), self.place(args, 1)?);
        let (target, path) = (target.as_ptr(), place.path.as_ptr());
        let result = if place.is_at() {
            sys!(symlinkat(target, place.dir, path))
        } else {
            sys!(symlink(target, path))
        };
        number(done(result))
    }

    /// `readlink PLACE`.
    pub fn readlink(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let mut target = vec![0_u8; 4096];
        let into = target.as_mut_ptr().cast();
        let got = if place.is_at() {
            sys!(readlinkat(place.dir, place.path.as_ptr(), into, target.len()))
        } else {
            sys!(readlink(place.path.as_ptr(), into, target.len()))
        };
        let got = done(got as i64)? as usize;
        Ok(format!("{got} 0 target={}", text::escape(&target[..got])))
    }

    /// `mknod PLACE KIND MODE`.
    pub fn mknod(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let kind = args.bits(1, KIND)?.cast_unsigned();
        let device =
            if kind == libc::S_IFCHR || kind == libc::S_IFBLK { libc::makedev(1, 3) } else { 0 };
        let mode = kind | args.u32(2)?;
        let path = place.path.as_ptr();
        let result = if place.is_at() {
            sys!(mknodat(place.dir, path, mode, device))
        } else {
            sys!(mknod(path, mode, device))
        };
        number(done(result))
    }

    /// `list PLACE`: all names of a directory, in order.
    pub fn list(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = done(sys!(openat(place.dir, place.path.as_ptr(), flags)))? as i32;
        let names = list(fd);
        sys!(close(fd));
        let mut names: Vec<String> = names?.iter().map(show).collect();
        names.sort_unstable();
        Ok(format!("{} 0 names={}", names.len(), names.join(",")))
    }

    /// `getdents SLOT SPACE`: some names, in the order in which they come.
    pub fn getdents(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let slot = args.named(0, 's', super::SLOTS)?;
        let fd = self.fd(args, 0)?;
        let names = read_entries(fd, args.length(1)?)?;
        if let Some(slot) = self.slots[slot].as_mut() {
            slot.positions.extend(names.iter().map(|n| n.0));
        }
        let names: Vec<String> = names.iter().map(show).collect();
        Ok(format!("{} 0 names={}", names.len(), names.join(",")))
    }

    /// `seekdir SLOT N`: behind the Nth name that this descriptor has told since it was rewound; 0 rewinds.
    pub fn seekdir(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let slot = args.named(0, 's', super::SLOTS)?;
        let wanted = args.length(1)?;
        let fd = self.fd(args, 0)?;
        let slot = self.slots[slot].as_mut().ok_or(Stop::NoSlot)?;
        let wanted = wanted.min(slot.positions.len());
        let position = wanted.checked_sub(1).map_or(0, |n| slot.positions[n]);
        slot.positions.truncate(wanted);
        done(sys!(lseek(fd, position, libc::SEEK_SET)))?;
        Ok(format!("0 0 to={wanted}"))
    }
}

/// Every name from where a descriptor stands.
pub fn list(fd: i32) -> Result<Vec<Entry>, Stop> {
    let mut all = Vec::new();
    loop {
        let some = read_entries(fd, 32768)?;
        if some.is_empty() {
            return Ok(all);
        }
        all.extend(some);
    }
}
