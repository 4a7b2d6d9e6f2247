//! Attributes: of files, extended, and of the process that asks.

use super::args::{Args, Bits, Stop, c_string};
use super::calls::{Place, number};
use super::{Worker, done, sys};
use crate::{pattern, text};

const AT: Bits = &[
    ("nofollow", libc::AT_SYMLINK_NOFOLLOW as i64),
    ("empty", libc::AT_EMPTY_PATH as i64),
    ("eaccess", libc::AT_EACCESS as i64),
    ("dontsync", libc::AT_STATX_DONT_SYNC as i64),
    ("forcesync", libc::AT_STATX_FORCE_SYNC as i64),
];

const ACCESS: Bits =
    &[("f", 0), ("r", libc::R_OK as i64), ("w", libc::W_OK as i64), ("x", libc::X_OK as i64)];

const XATTR: Bits =
    &[("create", libc::XATTR_CREATE as i64), ("replace", libc::XATTR_REPLACE as i64)];

/// After that time everybody knows what groups a process is in.
const GROUPS_KEPT: std::time::Duration = std::time::Duration::from_millis(650);

/// The largest value of an attribute anywhere.
const VALUE_MAX: usize = 65536;

/// `NAME=VALUE` of what stat says. Times are `SECONDS.NANOSECONDS`.
pub fn show_stat(about: &libc::stat) -> String {
    format!(
        "size={} mode={:o} nlink={} uid={} gid={} rdev={:x} blocks={} atime={} mtime={} ctime={} ino={}",
        about.st_size,
        about.st_mode,
        about.st_nlink,
        about.st_uid,
        about.st_gid,
        about.st_rdev,
        about.st_blocks,
        show_time(about.st_atime, about.st_atime_nsec),
        show_time(about.st_mtime, about.st_mtime_nsec),
        show_time(about.st_ctime, about.st_ctime_nsec),
        about.st_ino,
    )
}

fn show_time(seconds: i64, nanoseconds: i64) -> String {
    format!("{seconds}.{nanoseconds:09}")
}

/// A structure that calls fill.
pub fn empty_stat() -> libc::stat {
    // SAFETY: the structure is plain numbers, for which zeros are values.
    #[allow(unsafe_code)]
    unsafe {
        std::mem::zeroed()
    }
}

fn time(token: &str) -> Option<libc::timespec> {
    let (tv_sec, tv_nsec) = match token {
        "now" => (0, libc::UTIME_NOW),
        "omit" => (0, libc::UTIME_OMIT),
        _ => {
            let (seconds, nanoseconds) = token.split_once('.')?;
            (seconds.parse().ok()?, nanoseconds.parse().ok()?)
        }
    };
    Some(libc::timespec { tv_sec, tv_nsec })
}

impl Worker {
    fn status(&self, name: &str, args: &Args<'_>, index: usize) -> Result<libc::stat, Stop> {
        let mut about = empty_stat();
        let into = &raw mut about;
        if name == "fstat" {
            done(sys!(fstat(self.fd(args, index)?, into)))?;
            return Ok(about);
        }
        let place = self.place(args, index)?;
        let flags = if name == "lstat" { libc::AT_SYMLINK_NOFOLLOW } else { 0 };
        let result = match (place.is_at(), flags) {
            (true, _) => sys!(fstatat(place.dir, place.path.as_ptr(), into, flags)),
            (false, 0) => sys!(stat(place.path.as_ptr(), into)),
            (false, _) => sys!(lstat(place.path.as_ptr(), into)),
        };
        done(result)?;
        Ok(about)
    }

    /// `stat PLACE`, `lstat PLACE`, `fstat SLOT`, `statx PLACE FLAGS`.
    pub fn stat(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        if name == "statx" {
            return self.statx(args);
        }
        let about = self.status(name, args, 0)?;
        Ok(format!("0 0 {}", show_stat(&about)))
    }

    fn statx(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let flags = args.bits(1, AT)?;
        // SAFETY: the structure is plain numbers, for which zeros are values.
        #[allow(unsafe_code)]
        let mut x: libc::statx = unsafe { std::mem::zeroed() };
        let mask = libc::STATX_BASIC_STATS;
        done(sys!(statx(place.dir, place.path.as_ptr(), flags, mask, &raw mut x)))?;
        let time = |t: libc::statx_timestamp| show_time(t.tv_sec, i64::from(t.tv_nsec));
        Ok(format!(
            "0 0 mask={:x} size={} mode={:o} nlink={} uid={} gid={} blocks={} atime={} mtime={} ctime={} ino={}",
            x.stx_mask & libc::STATX_BASIC_STATS,
            x.stx_size,
            x.stx_mode,
            x.stx_nlink,
            x.stx_uid,
            x.stx_gid,
            x.stx_blocks,
            time(x.stx_atime),
            time(x.stx_mtime),
            time(x.stx_ctime),
            x.stx_ino,
        ))
    }

    /// `same A B`: whether two places, or a slot and a place, are one inode.
    pub fn same(&self, args: &Args<'_>) -> Result<String, Stop> {
        let kind = |index: usize| {
            let slot = super::args::named(args.token(index).unwrap_or(""), 's', super::SLOTS);
            if slot.is_some() { "fstat" } else { "lstat" }
        };
        let one = self.status(kind(0), args, 0)?;
        let two = self.status(kind(1), args, 1)?;
        let same = (one.st_ino, one.st_dev) == (two.st_ino, two.st_dev);
        Ok(format!("0 0 same={same}"))
    }

    /// `access PLACE MODE FLAGS`.
    pub fn access(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        let (mode, flags) = (args.bits(1, ACCESS)?, args.bits(2, AT)?);
        let result = if flags == 0 && !place.is_at() {
            sys!(access(place.path.as_ptr(), mode))
        } else {
            sys!(faccessat(place.dir, place.path.as_ptr(), mode, flags))
        };
        number(done(result))
    }

    /// `chmod PLACE MODE`, `fchmod SLOT MODE`.
    pub fn chmod(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let mode = args.u32(1)?;
        if name == "fchmod" {
            return number(done(sys!(fchmod(self.fd(args, 0)?, mode))));
        }
        let place = self.place(args, 0)?;
        let result = if place.is_at() {
            sys!(fchmodat(place.dir, place.path.as_ptr(), mode, 0))
        } else {
            sys!(chmod(place.path.as_ptr(), mode))
        };
        number(done(result))
    }

    /// `chown PLACE UID GID`, `lchown …`, `fchown SLOT UID GID`.
    pub fn chown(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let (uid, gid) = (args.u32(1)?, args.u32(2)?);
        if name == "fchown" {
            return number(done(sys!(fchown(self.fd(args, 0)?, uid, gid))));
        }
        let place = self.place(args, 0)?;
        let flags = if name == "lchown" { libc::AT_SYMLINK_NOFOLLOW } else { 0 };
        let path = place.path.as_ptr();
        let result = match (place.is_at(), flags) {
            (true, _) => sys!(fchownat(place.dir, path, uid, gid, flags)),
            (false, 0) => sys!(chown(path, uid, gid)),
            (false, _) => sys!(lchown(path, uid, gid)),
        };
        number(done(result))
    }

    /// `utimens PLACE ATIME MTIME FLAGS`, `futimens SLOT ATIME MTIME`.
    pub fn utimens(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let parse = |index: usize| {
            time(args.token(index)?).ok_or_else(|| Stop::Bad(format!("argument {index}")))
        };
        let times = [parse(1)?, parse(2)?];
        if name == "futimens" {
            return number(done(sys!(futimens(self.fd(args, 0)?, times.as_ptr()))));
        }
        let place = self.place(args, 0)?;
        let flags = args.bits(3, AT)?;
        number(done(sys!(utimensat(place.dir, place.path.as_ptr(), times.as_ptr(), flags))))
    }

    fn plain(&self, args: &Args<'_>) -> Result<Place, Stop> {
        self.place(args, 0)
            .and_then(|p| if p.is_at() { Err(Stop::Bad("no …at form".into())) } else { Ok(p) })
    }

    fn set_value(
        &self,
        name: &str,
        args: &Args<'_>,
        key: &[u8],
        value: &[u8],
        flags: i32,
    ) -> Result<String, Stop> {
        let key = c_string(key.to_vec());
        let (key, at, length) = (key.as_ptr(), value.as_ptr().cast(), value.len());
        let result = match name {
            "fsetxattr" => sys!(fsetxattr(self.fd(args, 0)?, key, at, length, flags)),
            "lsetxattr" => sys!(lsetxattr(self.plain(args)?.path.as_ptr(), key, at, length, flags)),
            _ => sys!(setxattr(self.plain(args)?.path.as_ptr(), key, at, length, flags)),
        };
        number(done(result))
    }

    /// `setxattr PLACE NAME LENGTH PATTERN FLAGS`, and its kin.
    pub fn setxattr(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let key = args.bytes(1)?;
        let mut value = vec![0; args.length(2)?.min(VALUE_MAX + 1)];
        pattern::fill(args.number(3)?.cast_unsigned(), &mut value);
        if key == b"security.capability" && value.len() == 20 {
            // Only what is a set of capabilities is one: version 2, whatever bits.
            value[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
        }
        self.set_value(name, args, &key, &value, args.bits(4, XATTR)?)
    }

    /// `getxattr PLACE NAME SPACE`, and its kin.
    pub fn getxattr(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let key = c_string(args.bytes(1)?);
        let mut value = vec![0_u8; args.length(2)?.min(VALUE_MAX)];
        let (at, length, key) = (value.as_mut_ptr().cast(), value.len(), key.as_ptr());
        let got = match name {
            "fgetxattr" => sys!(fgetxattr(self.fd(args, 0)?, key, at, length)),
            "lgetxattr" => sys!(lgetxattr(self.plain(args)?.path.as_ptr(), key, at, length)),
            _ => sys!(getxattr(self.plain(args)?.path.as_ptr(), key, at, length)),
        };
        let got = done(got as i64)?;
        if length == 0 {
            return Ok(format!("{got} 0"));
        }
        value.truncate(got as usize);
        Ok(self.seen(value))
    }

    /// `listxattr PLACE SPACE`, and its kin.
    pub fn listxattr(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let mut names = vec![0_u8; args.length(1)?.min(VALUE_MAX)];
        let (at, length) = (names.as_mut_ptr().cast(), names.len());
        let got = match name {
            "flistxattr" => sys!(flistxattr(self.fd(args, 0)?, at, length)),
            "llistxattr" => sys!(llistxattr(self.plain(args)?.path.as_ptr(), at, length)),
            _ => sys!(listxattr(self.plain(args)?.path.as_ptr(), at, length)),
        };
        let got = done(got as i64)?;
        if length == 0 {
            return Ok(format!("{got} 0"));
        }
        names.truncate(got as usize);
        Ok(format!("{got} 0 names={}", show_names(&names)))
    }

    /// `removexattr PLACE NAME`, and its kin.
    pub fn removexattr(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let key = c_string(args.bytes(1)?);
        let result = match name {
            "fremovexattr" => sys!(fremovexattr(self.fd(args, 0)?, key.as_ptr())),
            "lremovexattr" => sys!(lremovexattr(self.plain(args)?.path.as_ptr(), key.as_ptr())),
            _ => sys!(removexattr(self.plain(args)?.path.as_ptr(), key.as_ptr())),
        };
        number(done(result))
    }

    /// `setacl PLACE access|default ENTRIES`: entries as `u:6,u1000:4,g:5,g100:7,m:7,o:0`.
    pub fn setacl(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let key = format!("system.posix_acl_{}", args.token(1)?);
        let entries: Option<Vec<_>> = args.token(2)?.split(',').map(acl_entry).collect();
        let mut entries = entries.ok_or_else(|| Stop::Bad("argument 2".into()))?;
        entries.sort_unstable();
        let mut value = 2_u32.to_le_bytes().to_vec();
        for (tag, id, rights) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(rights.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        self.set_value("setxattr", args, key.as_bytes(), &value, 0)
    }

    /// `cred UID GID GROUPS`: the effective ones, groups between commas; `-` leaves those.
    pub fn cred(&self, args: &Args<'_>) -> Result<String, Stop> {
        let keep = libc::uid_t::MAX;
        self.keep_root();
        if sys!(geteuid()) != 0 {
            done(sys!(setresuid(keep, 0, keep)))?;
        }
        if args.token(2)? != "-" {
            let groups: Vec<libc::gid_t> =
                args.token(2)?.split(',').filter_map(|g| g.parse().ok()).collect();
            done(sys!(setgroups(groups.len(), groups.as_ptr())))?;
            // A mount keeps what it knows of them for half a second (docs/mount.md).
            if !self.start.plain {
                std::thread::sleep(GROUPS_KEPT);
            }
        }
        done(sys!(setresgid(keep, args.u32(1)?, keep)))?;
        number(done(sys!(setresuid(keep, args.u32(0)?, keep))))
    }
}

/// Takes all extended attributes from a directory.
///
/// # Errors
/// What the kernel said.
pub fn without_attributes(dir: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let dir = c_string(dir.as_os_str().as_bytes().to_vec());
    let mut names = vec![0_u8; 65536];
    let got = sys!(listxattr(dir.as_ptr(), names.as_mut_ptr().cast(), names.len()));
    let Ok(got) = usize::try_from(got) else { return Err(std::io::Error::last_os_error()) };
    for name in names[..got].split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let name = c_string(name.to_vec());
        if sys!(removexattr(dir.as_ptr(), name.as_ptr())) == -1 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Names of attributes, in order: lists have none.
pub fn show_names(names: &[u8]) -> String {
    let mut names: Vec<&[u8]> = names.split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    names.sort_unstable();
    let names: Vec<String> = names.into_iter().map(text::escape).collect();
    names.join(",")
}

/// Tag, id, rights.
fn acl_entry(token: &str) -> Option<(u16, u32, u16)> {
    let (who, rights) = token.split_once(':')?;
    let (letter, id) = who.split_at_checked(1)?;
    let tag = match (letter, id) {
        ("u", "") => 0x01,
        ("u", _) => 0x02,
        ("g", "") => 0x04,
        ("g", _) => 0x08,
        ("m", "") => 0x10,
        ("o", "") => 0x20,
        _ => return None,
    };
    let id = if id.is_empty() { u32::MAX } else { id.parse().ok()? };
    Some((tag, id, rights.parse().ok()?))
}
