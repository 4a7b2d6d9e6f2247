//! NFSv3 (RFC 1813): every operation is one request on a handle. Locks are another protocol's ([`crate::nlm`]).

use std::time::Duration;

use base::Errno;
use client::fs::{
    Lock, NewNode, Result, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFREG, S_IFSOCK, SetTime,
    StatFs, Time,
};

use crate::nlm::Nlm;
use crate::proto::{
    self, Change, Entry, Facts, Fh, IO_MAX, LIST_BYTES, Limits, Locked, Page, Protocol, TARGET_MAX,
    Wrote, check_target, good_name, kind, kind_number, split_dev,
};
use crate::rpc::{Cred, Link, Procedure};
use crate::service::{self, NFS};
use crate::url::Url;
use crate::xdr::{Garbage, In, Out};

/// Bytes of a handle at most.
const FH_MAX: usize = 64;

/// The procedures.
mod procedure {
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
}

/// An export over NFSv3.
pub struct V3 {
    link: Link,
    root: Fh,
    limits: Limits,
    patience: Duration,
    locks: Nlm,
}

fn time(read: &mut In<'_>) -> std::result::Result<Time, Garbage> {
    Ok(Time { sec: read.u32()?.into(), nsec: read.u32()?.min(999_999_999) })
}

/// `fattr3`.
fn facts(read: &mut In<'_>) -> std::result::Result<Facts, Garbage> {
    let kind = kind(read.u32()?);
    if kind == 0 {
        return Err(Garbage);
    }
    Ok(Facts {
        mode: kind | (read.u32()? & 0o7777),
        nlink: read.u32()?,
        uid: read.u32()?,
        gid: read.u32()?,
        size: read.u64()?,
        used: read.u64()?,
        rdev: (read.u32()?, read.u32()?),
        fsid: (read.u64()?, 0),
        fileid: read.u64()?,
        atime: time(read)?,
        mtime: time(read)?,
        ctime: time(read)?,
        btime: Time::default(),
    })
}

/// `post_op_attr`.
fn maybe_facts(read: &mut In<'_>) -> std::result::Result<Option<Facts>, Garbage> {
    if read.flag()? { facts(read).map(Some) } else { Ok(None) }
}

/// `post_op_fh3`.
fn maybe_fh(read: &mut In<'_>) -> std::result::Result<Option<Fh>, Garbage> {
    if read.flag()? { Fh::read(read, FH_MAX).map(Some) } else { Ok(None) }
}

/// `wcc_data`, of which nothing is used.
fn skip_wcc(read: &mut In<'_>) -> std::result::Result<(), Garbage> {
    if read.flag()? {
        read.fixed(24)?;
    }
    maybe_facts(read).map(drop)
}

fn put_time(out: &mut Out, time: Option<SetTime>) {
    match time {
        None => out.u32(0),
        Some(SetTime::Now) => out.u32(1),
        Some(SetTime::At(Time { sec, nsec })) => {
            // The protocol's seconds have no sign and 32 bits.
            let sec = u32::try_from(sec.max(0)).unwrap_or(u32::MAX);
            out.u32(2).u32(sec).u32(nsec)
        }
    };
}

/// `sattr3`.
fn put_change(out: &mut Out, change: &Change) {
    for field in [change.mode, change.uid, change.gid] {
        out.flag(field.is_some());
        field.map(|n| out.u32(n));
    }
    out.flag(change.size.is_some());
    change.size.map(|n| out.u64(n));
    put_time(out, change.atime);
    put_time(out, change.mtime);
}

/// What making something answers.
fn made(read: &mut In<'_>) -> std::result::Result<(Option<Fh>, Option<Facts>), Garbage> {
    Ok((maybe_fh(read)?, maybe_facts(read)?))
}

fn put_dir(out: &mut Out, (dir, name): (&Fh, &[u8])) {
    out.bytes(&dir.0).bytes(name);
}

impl V3 {
    /// Finds the server and the root of the export.
    ///
    /// # Errors
    /// In words.
    pub fn open(url: &Url) -> std::result::Result<Self, String> {
        let root = service::mount(url)?;
        let port = url.nfs_port.map_or_else(|| service::port(url, NFS, 3), Ok)?;
        let link = Link::new(&url.host, port, url.patience)?;
        let limits = Limits { read: 8192, write: 8192, name: 255 };
        let locks = Nlm::new(url);
        let mut fs = Self { link, root, limits, patience: url.patience, locks };
        fs.limits = fs.ask_limits().map_err(|error| {
            let why = fs.link.trouble().unwrap_or_else(|| format!("{error:?}"));
            format!("{url}: NFS on port {port}: {why}")
        })?;
        Ok(fs)
    }

    /// Asks; what is behind the status is read by `read` if it is success. Also whether the request may have been done twice.
    fn ask<T>(
        &self,
        number: u32,
        cred: &Cred,
        out: &mut Out,
        read: impl Fn(&mut In<'_>) -> std::result::Result<T, Garbage>,
    ) -> (Result<T>, bool) {
        let args = out.take();
        let what = Procedure { program: NFS, version: 3, number };
        let mut again = false;
        let answer = proto::patiently(self.patience, || {
            let said = self.link.call(what, cred, args.clone())?;
            again |= said.again;
            let mut rest = In::new(&said.results);
            let done = rest.u32().and_then(|status| {
                Ok((status, if status == 0 { Some(read(&mut rest)?) } else { None }))
            });
            done.map_err(|Garbage| {
                log::warn!("{:?}: what it answers to procedure {number} is no answer", self.link);
                Errno::IO
            })
        });
        let answer = answer.and_then(|(status, result)| match result {
            Some(result) => Ok(result),
            None => Err(proto::errno(status)),
        });
        (answer, again)
    }

    fn ask_limits(&self) -> Result<Limits> {
        let mut out = Out::default();
        out.bytes(&self.root.0);
        let (sizes, _) = self.ask(procedure::FSINFO, &Cred::ROOT, &mut out, |read| {
            maybe_facts(read)?;
            let (rtmax, _, _) = (read.u32()?, read.u32()?, read.u32()?);
            Ok((rtmax, read.u32()?))
        });
        let (read, write) = sizes?;
        // Most say what is sensible here; none is asked for less than a page, or more than a record takes.
        let sane = |n: u32| usize::try_from(n).unwrap_or(IO_MAX).clamp(4096, IO_MAX);
        out.bytes(&self.root.0);
        let (name, _) = self.ask(procedure::PATHCONF, &Cred::ROOT, &mut out, |read| {
            maybe_facts(read)?;
            read.u32()?;
            read.u32()
        });
        Ok(Limits {
            read: sane(read),
            write: sane(write),
            name: name.map_or(255, |n| n.clamp(1, 255)),
        })
    }

    /// What was made, asked for where the server did not say it.
    fn told(
        &self,
        cred: &Cred,
        dir: &Fh,
        name: &[u8],
        made: (Option<Fh>, Option<Facts>),
    ) -> Result<(Fh, Facts)> {
        match made {
            (Some(fh), Some(facts)) => Ok((fh, facts)),
            (Some(fh), None) => {
                let facts = self.getattr(cred, &fh)?;
                Ok((fh, facts))
            }
            (None, _) => self.lookup(cred, dir, name),
        }
    }

    /// Names with what they lead to, or (`plus` off) without.
    fn page(
        &self,
        cred: &Cred,
        dir: &Fh,
        cookie: u64,
        verifier: [u8; 8],
        plus: bool,
    ) -> Result<Page> {
        let mut out = Out::default();
        out.bytes(&dir.0).u64(cookie).fixed(&verifier).u32(LIST_BYTES);
        if plus {
            out.u32(LIST_BYTES);
        }
        let number = if plus { procedure::READDIRPLUS } else { procedure::READDIR };
        let (page, _) = self.ask(number, cred, &mut out, |read| {
            maybe_facts(read)?;
            let mut page = Page { verifier: read.eight()?, ..Page::default() };
            while read.flag()? {
                let fileid = read.u64()?;
                let name = read.bytes(4096)?.to_vec();
                let cookie = read.u64()?;
                let facts = if plus { maybe_facts(read)? } else { None };
                if plus {
                    maybe_fh(read)?;
                }
                let kind = facts.map_or(0, |facts| facts.mode & client::fs::S_IFMT);
                page.entries.push(Entry { fileid, kind, cookie, name });
            }
            page.end = read.flag()?;
            Ok(page)
        });
        let mut page = page?;
        page.entries.retain(|entry| good_name(&entry.name));
        Ok(page)
    }
}

impl Protocol for V3 {
    fn root(&self) -> Fh {
        self.root.clone()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn getattr(&self, cred: &Cred, fh: &Fh) -> Result<Facts> {
        self.ask(procedure::GETATTR, cred, Out::default().bytes(&fh.0), facts).0
    }

    fn lookup(&self, cred: &Cred, dir: &Fh, name: &[u8]) -> Result<(Fh, Facts)> {
        let mut out = Out::default();
        put_dir(&mut out, (dir, name));
        let (found, _) = self.ask(procedure::LOOKUP, cred, &mut out, |read| {
            Ok((Fh::read(read, FH_MAX)?, maybe_facts(read)?))
        });
        match found? {
            (fh, Some(facts)) => Ok((fh, facts)),
            (fh, None) => {
                let facts = self.getattr(cred, &fh)?;
                Ok((fh, facts))
            }
        }
    }

    fn setattr(&self, cred: &Cred, fh: &Fh, change: &Change) -> Result<()> {
        let mut out = Out::default();
        put_change(out.bytes(&fh.0), change);
        self.ask(procedure::SETATTR, cred, out.flag(false), |_| Ok(())).0
    }

    fn access(&self, cred: &Cred, fh: &Fh, what: u32) -> Result<u32> {
        let mut out = Out::default();
        let (may, _) = self.ask(procedure::ACCESS, cred, out.bytes(&fh.0).u32(what), |read| {
            maybe_facts(read)?;
            read.u32()
        });
        may
    }

    fn readlink(&self, cred: &Cred, fh: &Fh) -> Result<Vec<u8>> {
        let (target, _) =
            self.ask(procedure::READLINK, cred, Out::default().bytes(&fh.0), |read| {
                maybe_facts(read)?;
                read.bytes(TARGET_MAX).map(<[u8]>::to_vec)
            });
        check_target(&target?)
    }

    fn read(&self, cred: &Cred, fh: &Fh, offset: u64, len: usize) -> Result<(Vec<u8>, bool)> {
        let asked = u32::try_from(len).map_err(|_| Errno::INVAL)?;
        let mut out = Out::default();
        let (got, _) =
            self.ask(procedure::READ, cred, out.bytes(&fh.0).u64(offset).u32(asked), |read| {
                maybe_facts(read)?;
                let (count, end) = (read.u32()?, read.flag()?);
                let data = read.bytes(len)?;
                // More than was asked for, or another number of bytes than it says.
                if usize::try_from(count) != Ok(data.len()) {
                    return Err(Garbage);
                }
                Ok((data.to_vec(), end))
            });
        got
    }

    fn write(&self, cred: &Cred, fh: &Fh, offset: u64, data: &[u8], stable: bool) -> Result<Wrote> {
        let len = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        let mut out = Out::default();
        // FILE_SYNC, or UNSTABLE.
        out.bytes(&fh.0).u64(offset).u32(len).u32(if stable { 2 } else { 0 }).bytes(data);
        let (wrote, _) = self.ask(procedure::WRITE, cred, &mut out, |read| {
            skip_wcc(read)?;
            let (count, how) = (read.u32()?, read.u32()?);
            let verifier = read.eight()?;
            if count == 0 && len > 0 || count > len || how > 2 || stable && how == 0 {
                return Err(Garbage);
            }
            let len = usize::try_from(count).map_err(|_| Garbage)?;
            Ok(Wrote { len, stable: how == 2, verifier })
        });
        wrote
    }

    fn commit(&self, cred: &Cred, fh: &Fh) -> Result<[u8; 8]> {
        let mut out = Out::default();
        let (verifier, _) =
            self.ask(procedure::COMMIT, cred, out.bytes(&fh.0).u64(0).u32(0), |read| {
                skip_wcc(read)?;
                read.eight()
            });
        verifier
    }

    fn create(
        &self,
        cred: &Cred,
        dir: &Fh,
        name: &[u8],
        mode: u32,
        sure: bool,
    ) -> Result<(Fh, Facts)> {
        let change = Change { mode: Some(mode & 0o7777), ..Change::default() };
        let mut out = Out::default();
        put_dir(&mut out, (dir, name));
        if sure {
            // By the verifier the server knows the file that this very request has made.
            let mark = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), name);
            let (done, _) = self.ask(procedure::CREATE, cred, out.u32(2).u64(mark), made);
            match done {
                Ok(made) => {
                    let (fh, _) = self.told(cred, dir, name, made)?;
                    // The verifier was kept in the times, and the mode is the server's own.
                    let now = Some(SetTime::Now);
                    self.setattr(cred, &fh, &Change { atime: now, mtime: now, ..change })?;
                    let facts = self.getattr(cred, &fh)?;
                    return Ok((fh, facts));
                }
                Err(Errno::OPNOTSUPP) => put_dir(&mut out, (dir, name)),
                Err(error) => return Err(error),
            }
        }
        put_change(out.u32(1), &change);
        let (done, _) = self.ask(procedure::CREATE, cred, &mut out, made);
        self.told(cred, dir, name, done?)
    }

    fn make(&self, cred: &Cred, dir: &Fh, name: &[u8], node: &NewNode<'_>) -> Result<(Fh, Facts)> {
        let change = Change { mode: Some(node.mode & 0o7777), ..Change::default() };
        let kind = node.mode & client::fs::S_IFMT;
        let mut out = Out::default();
        put_dir(&mut out, (dir, name));
        let number = match kind {
            S_IFREG => return self.create(cred, dir, name, node.mode, true),
            S_IFDIR => {
                put_change(&mut out, &change);
                procedure::MKDIR
            }
            S_IFLNK => {
                // Some servers keep the mode of a link, which on Linux is always this.
                put_change(&mut out, &Change { mode: Some(0o777), ..change });
                out.bytes(node.target);
                procedure::SYMLINK
            }
            S_IFCHR | S_IFBLK => {
                put_change(out.u32(kind_number(kind)?), &change);
                let (major, minor) = split_dev(node.rdev);
                out.u32(major).u32(minor);
                procedure::MKNOD
            }
            S_IFIFO | S_IFSOCK => {
                put_change(out.u32(kind_number(kind)?), &change);
                procedure::MKNOD
            }
            _ => return Err(Errno::INVAL),
        };
        match self.ask(number, cred, &mut out, made) {
            (Ok(made), _) => self.told(cred, dir, name, made),
            // It was done the first time, if what is there is what was to be made.
            (Err(Errno::EXIST), true) => {
                let (fh, facts) = self.lookup(cred, dir, name).map_err(|_| Errno::EXIST)?;
                let same = facts.mode & client::fs::S_IFMT == kind
                    && (kind != S_IFLNK
                        || self.readlink(cred, &fh).is_ok_and(|target| target == node.target));
                if same { Ok((fh, facts)) } else { Err(Errno::EXIST) }
            }
            (Err(error), _) => Err(error),
        }
    }

    fn remove(&self, cred: &Cred, dir: &Fh, name: &[u8], is_dir: bool) -> Result<()> {
        let mut out = Out::default();
        put_dir(&mut out, (dir, name));
        let number = if is_dir { procedure::RMDIR } else { procedure::REMOVE };
        match self.ask(number, cred, &mut out, |_| Ok(())) {
            (Err(Errno::NOENT), true) => Ok(()),
            (done, _) => done,
        }
    }

    fn rename(&self, cred: &Cred, from: (&Fh, &[u8]), to: (&Fh, &[u8])) -> Result<()> {
        let mut out = Out::default();
        put_dir(&mut out, from);
        put_dir(&mut out, to);
        match self.ask(procedure::RENAME, cred, &mut out, |_| Ok(())) {
            (Err(Errno::NOENT), true) if self.lookup(cred, to.0, to.1).is_ok() => Ok(()),
            (done, _) => done,
        }
    }

    fn link(&self, cred: &Cred, fh: &Fh, dir: &Fh, name: &[u8]) -> Result<()> {
        let mut out = Out::default();
        put_dir(out.bytes(&fh.0), (dir, name));
        match self.ask(procedure::LINK, cred, &mut out, |_| Ok(())) {
            (Err(Errno::EXIST), true)
                if self.lookup(cred, dir, name).is_ok_and(|(there, _)| there == *fh) =>
            {
                Ok(())
            }
            (done, _) => done,
        }
    }

    fn list(&self, cred: &Cred, dir: &Fh, cookie: u64, verifier: [u8; 8]) -> Result<Page> {
        match self.page(cred, dir, cookie, verifier, true) {
            Err(Errno::OPNOTSUPP) => self.page(cred, dir, cookie, verifier, false),
            page => page,
        }
    }

    fn space(&self) -> Result<StatFs> {
        let mut out = Out::default();
        let (space, _) =
            self.ask(procedure::FSSTAT, &Cred::ROOT, out.bytes(&self.root.0), |read| {
                maybe_facts(read)?;
                let (bytes, _free, left) = (read.u64()?, read.u64()?, read.u64()?);
                let (files, _free, files_left) = (read.u64()?, read.u64()?, read.u64()?);
                Ok(StatFs {
                    block_bytes: 4096,
                    blocks: bytes / 4096,
                    blocks_free: left / 4096,
                    inodes: files,
                    inodes_free: files_left,
                    name_max: 255,
                })
            });
        Ok(StatFs { name_max: self.limits.name, ..space? })
    }

    fn lock(&self, file: &Locked, lock: &Lock) -> Result<()> {
        self.locks.lock(file, lock)
    }

    fn test_lock(&self, file: &Locked, lock: &Lock) -> Result<Option<Lock>> {
        self.locks.test(file, lock)
    }

    fn tend_locks(&self) {
        self.locks.tend();
    }

    fn end(&self) {
        self.locks.end();
        self.link.end();
    }
}
