//! What both versions of the protocol give: files by their handles, on somebody's behalf.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::Errno;
use client::fs::{
    Lock, NewNode, Result, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFREG, S_IFSOCK, SetTime,
    StatFs, Time,
};

use crate::rpc::Cred;
use crate::xdr::{Garbage, In};

/// Bytes of one read or write at most: what a record holds.
pub const IO_MAX: usize = 1 << 20;
/// Bytes of a symbolic link's target at most.
pub const TARGET_MAX: usize = 4095;
/// Bytes of a list of names that are asked for at once.
pub const LIST_BYTES: u32 = 64 << 10;
/// Between two tries, where a server says "later".
const LATER: Duration = Duration::from_millis(100);

/// What names a file on its server: bytes that mean nothing to us.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fh(pub Arc<[u8]>);

impl std::fmt::Debug for Fh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Fh {
    /// A handle in an answer.
    pub fn read(from: &mut In<'_>, max: usize) -> std::result::Result<Self, Garbage> {
        let bytes = from.bytes(max)?;
        if bytes.is_empty() { Err(Garbage) } else { Ok(Self(bytes.into())) }
    }
}

/// What a server says of a file.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Facts {
    /// Type and permission bits.
    pub mode: u32,
    /// Names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Bytes that it takes.
    pub used: u64,
    /// Device: major, minor.
    pub rdev: (u32, u32),
    /// The file system that it is of.
    pub fsid: (u64, u64),
    /// Its number there.
    pub fileid: u64,
    /// Times.
    pub atime: Time,
    /// Last change of content.
    pub mtime: Time,
    /// Last change of attributes.
    pub ctime: Time,
    /// Birth; zero where the server does not know.
    pub btime: Time,
}

/// What is to be changed.
#[derive(Clone, Copy, Default, Debug)]
pub struct Change {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Bytes.
    pub size: Option<u64>,
    /// Times.
    pub atime: Option<SetTime>,
    /// Last change of content.
    pub mtime: Option<SetTime>,
}

/// How a write went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wrote {
    /// Bytes.
    pub len: usize,
    /// They outlive the server.
    pub stable: bool,
    /// Of this life of the server.
    pub verifier: [u8; 8],
}

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The file's number, if the server says it.
    pub fileid: u64,
    /// Type bits; 0: not known.
    pub kind: u32,
    /// Goes on after it.
    pub cookie: u64,
    /// The name.
    pub name: Vec<u8>,
}

/// Some names of a directory.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Page {
    /// In the server's order.
    pub entries: Vec<Entry>,
    /// There are no more.
    pub end: bool,
    /// With which the next ones are asked for.
    pub verifier: [u8; 8],
}

/// A file that somebody locks.
#[derive(Clone, Debug)]
pub struct Locked {
    /// The file.
    pub fh: Fh,
    /// A directory and its name there: version 4 opens files by name only.
    pub named: Option<(Fh, Vec<u8>)>,
    /// Whose permission counts.
    pub cred: Cred,
}

/// What a server lets us do at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of a read.
    pub read: usize,
    /// Bytes of a write.
    pub write: usize,
    /// Bytes of a name.
    pub name: u32,
}

/// Bits of what is asked of `access`; the same in both versions.
pub mod access {
    /// Read, or list.
    pub const READ: u32 = 1;
    /// Look up.
    pub const LOOKUP: u32 = 2;
    /// Change what is there.
    pub const MODIFY: u32 = 4;
    /// Execute.
    pub const EXECUTE: u32 = 32;
}

/// A version of the protocol.
pub trait Protocol: Send + Sync {
    /// The root of the export.
    fn root(&self) -> Fh;
    /// What the server lets us do at once.
    fn limits(&self) -> Limits;
    /// Attributes.
    fn getattr(&self, cred: &Cred, fh: &Fh) -> Result<Facts>;
    /// A name's file. `..` leads up.
    fn lookup(&self, cred: &Cred, dir: &Fh, name: &[u8]) -> Result<(Fh, Facts)>;
    /// Changes attributes.
    fn setattr(&self, cred: &Cred, fh: &Fh, change: &Change) -> Result<()>;
    /// Which of the bits of [`access`] the caller has.
    fn access(&self, cred: &Cred, fh: &Fh, what: u32) -> Result<u32>;
    /// A symbolic link's target.
    fn readlink(&self, cred: &Cred, fh: &Fh) -> Result<Vec<u8>>;
    /// Reads; whether the end was reached.
    fn read(&self, cred: &Cred, fh: &Fh, offset: u64, len: usize) -> Result<(Vec<u8>, bool)>;
    /// Writes, so that it outlives the server if `stable`.
    fn write(&self, cred: &Cred, fh: &Fh, offset: u64, data: &[u8], stable: bool) -> Result<Wrote>;
    /// Lets all that was written outlive the server.
    fn commit(&self, cred: &Cred, fh: &Fh) -> Result<[u8; 8]>;
    /// Makes a file. EEXIST if the name is there; with `sure` never because this very request was done twice.
    fn create(
        &self,
        cred: &Cred,
        dir: &Fh,
        name: &[u8],
        mode: u32,
        sure: bool,
    ) -> Result<(Fh, Facts)>;
    /// Makes anything else.
    fn make(&self, cred: &Cred, dir: &Fh, name: &[u8], node: &NewNode<'_>) -> Result<(Fh, Facts)>;
    /// Takes a name away, of a directory or of something else.
    fn remove(&self, cred: &Cred, dir: &Fh, name: &[u8], is_dir: bool) -> Result<()>;
    /// Renames, over what is there.
    fn rename(&self, cred: &Cred, from: (&Fh, &[u8]), to: (&Fh, &[u8])) -> Result<()>;
    /// Makes another name.
    fn link(&self, cred: &Cred, fh: &Fh, dir: &Fh, name: &[u8]) -> Result<()>;
    /// Names after a cookie (0: all).
    fn list(&self, cred: &Cred, dir: &Fh, cookie: u64, verifier: [u8; 8]) -> Result<Page>;
    /// Space.
    fn space(&self) -> Result<StatFs>;
    /// Locks or unlocks, without waiting.
    fn lock(&self, file: &Locked, lock: &Lock) -> Result<()>;
    /// A lock that bars this one.
    fn test_lock(&self, file: &Locked, lock: &Lock) -> Result<Option<Lock>>;
    /// Keeps locks alive, and gets them back from a server that has begun anew.
    fn tend_locks(&self);
    /// Nothing more is asked.
    fn end(&self);
}

/// Type bits by the numbers that both versions give to types; 0: none.
pub fn kind(number: u32) -> u32 {
    match number {
        1 => S_IFREG,
        2 => S_IFDIR,
        3 => S_IFBLK,
        4 => S_IFCHR,
        5 => S_IFLNK,
        6 => S_IFSOCK,
        7 => S_IFIFO,
        _ => 0,
    }
}

/// And back.
pub fn kind_number(kind: u32) -> Result<u32> {
    (1..=7).find(|number| self::kind(*number) == kind).ok_or(Errno::INVAL)
}

/// Splits the kernel's `new_encode_dev`.
pub fn split_dev(dev: u32) -> (u32, u32) {
    ((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xf_ff00))
}

/// And makes it.
pub fn join_dev((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12)
}

/// What a server means by "later".
pub fn is_later(status: u32) -> bool {
    // JUKEBOX or DELAY; GRACE.
    matches!(status, 10_008 | 10_013)
}

/// The number of an error, by the server's. Below 10,000 they are mostly Unix's of old.
pub fn errno(status: u32) -> Errno {
    match status {
        1 => Errno::PERM,
        2 => Errno::NOENT,
        6 => Errno::NXIO,
        13 => Errno::ACCES,
        17 => Errno::EXIST,
        18 => Errno::XDEV,
        19 => Errno::NODEV,
        20 => Errno::NOTDIR,
        21 => Errno::ISDIR,
        // BADTYPE, BADCHAR, BADNAME, INVAL.
        22 | 10_007 | 10_040 | 10_041 => Errno::INVAL,
        27 => Errno::FBIG,
        28 => Errno::NOSPC,
        30 => Errno::ROFS,
        31 => Errno::MLINK,
        63 => Errno::NAMETOOLONG,
        66 => Errno::NOTEMPTY,
        69 => Errno::DQUOT,
        // STALE, BADHANDLE, FHEXPIRED.
        70 | 10_001 | 10_014 => Errno::STALE,
        // NOTSUPP, ATTRNOTSUPP.
        10_004 | 10_032 => Errno::OPNOTSUPP,
        // DENIED, LOCKED.
        10_010 | 10_012 => Errno::AGAIN,
        // SHARE_DENIED, FILE_OPEN.
        10_015 | 10_046 => Errno::BUSY,
        10_016 => Errno::PERM,
        10_018 => Errno::NOLCK,
        10_029 => Errno::LOOP,
        10_045 => Errno::DEADLK,
        _ => Errno::IO,
    }
}

/// Does something as long as the server says "later": the status, and what was read behind it.
pub fn patiently<T>(
    patience: Duration,
    mut run: impl FnMut() -> Result<(u32, T)>,
) -> Result<(u32, T)> {
    let begun = Instant::now();
    let mut pause = LATER;
    loop {
        let (status, rest) = run()?;
        if !is_later(status) {
            return Ok((status, rest));
        }
        if begun.elapsed() + pause > patience {
            return Err(Errno::IO);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// A name that a server lists, if it may be one.
pub fn good_name(name: &[u8]) -> bool {
    client::fs::check_name(name).is_ok()
}

/// A target as it may be told.
pub fn check_target(target: &[u8]) -> Result<Vec<u8>> {
    if target.is_empty() || target.contains(&0) { Err(Errno::IO) } else { Ok(target.to_vec()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_split_and_joined() {
        for (major, minor) in [(0, 0), (8, 1), (0xfff, 0xf_ffff), (1, 300)] {
            assert_eq!(split_dev(join_dev((major, minor))), (major, minor));
        }
        assert_eq!(split_dev(0x801), (8, 1));
    }

    #[test]
    fn types_are_the_protocols() {
        for number in 1..=7 {
            assert_eq!(kind_number(kind(number)), Ok(number));
        }
        assert_eq!((kind(0), kind(8), kind_number(0)), (0, 0, Err(Errno::INVAL)));
    }

    #[test]
    fn no_status_is_taken_for_success() {
        for status in (0..100).chain(10_000..10_100).chain([u32::MAX]) {
            assert_ne!(errno(status), Errno(0));
        }
        assert_eq!(
            (errno(63), errno(66), errno(70)),
            (Errno::NAMETOOLONG, Errno::NOTEMPTY, Errno::STALE)
        );
    }
}
