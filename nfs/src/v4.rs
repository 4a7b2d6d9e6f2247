//! NFSv4.0 (RFC 7530). Files are read and written without being open on the server: it judges each request by its caller, as in version 3. It is
//! asked to open where the protocol knows no other way: to make a file, and to lock one ([`crate::state4`]).

use std::collections::HashMap;
use std::time::Duration;

use base::Errno;
use client::fs::{
    Lock, NewNode, Result, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK,
    SetTime, StatFs, Time,
};

use crate::proto::{
    self, Change, Entry, Facts, Fh, IO_MAX, LIST_BYTES, Limits, Locked, Page, Protocol, TARGET_MAX,
    Wrote, check_target, good_name, kind, kind_number, split_dev,
};
use crate::rpc::{Cred, Link, Procedure};
use crate::service::NFS;
use crate::state4::States;
use crate::url::Url;
use crate::xdr::{Garbage, In, Out};

/// Bytes of a handle at most.
const FH_MAX: usize = 128;
/// Bytes of an owner's name.
const OWNER_MAX: usize = 1024;
/// Whoever has no number here.
const NOBODY: u32 = 65_534;
const PORT: u16 = 2049;

/// Operations.
pub mod op {
    #![allow(missing_docs)] // names of the protocol
    pub const ACCESS: u32 = 3;
    pub const CLOSE: u32 = 4;
    pub const COMMIT: u32 = 5;
    pub const CREATE: u32 = 6;
    pub const DELEGRETURN: u32 = 8;
    pub const GETATTR: u32 = 9;
    pub const GETFH: u32 = 10;
    pub const LINK: u32 = 11;
    pub const LOCK: u32 = 12;
    pub const LOCKT: u32 = 13;
    pub const LOCKU: u32 = 14;
    pub const LOOKUP: u32 = 15;
    pub const LOOKUPP: u32 = 16;
    pub const NVERIFY: u32 = 17;
    pub const OPEN: u32 = 18;
    pub const OPEN_CONFIRM: u32 = 20;
    pub const PUTFH: u32 = 22;
    pub const PUTROOTFH: u32 = 24;
    pub const READ: u32 = 25;
    pub const READDIR: u32 = 26;
    pub const READLINK: u32 = 27;
    pub const REMOVE: u32 = 28;
    pub const RENAME: u32 = 29;
    pub const RENEW: u32 = 30;
    pub const SAVEFH: u32 = 32;
    pub const SETATTR: u32 = 34;
    pub const SETCLIENTID: u32 = 35;
    pub const SETCLIENTID_CONFIRM: u32 = 36;
    pub const VERIFY: u32 = 37;
    pub const WRITE: u32 = 38;
    pub const RELEASE_LOCKOWNER: u32 = 39;
}

/// Attributes, by their numbers.
mod attr {
    pub const TYPE: u32 = 1;
    pub const SIZE: u32 = 4;
    pub const FSID: u32 = 8;
    pub const LEASE: u32 = 10;
    pub const ERROR: u32 = 11;
    pub const FILEID: u32 = 20;
    pub const FILES_AVAIL: u32 = 21;
    pub const FILES_TOTAL: u32 = 23;
    pub const MAXNAME: u32 = 29;
    pub const MAXREAD: u32 = 30;
    pub const MAXWRITE: u32 = 31;
    pub const MODE: u32 = 33;
    pub const NUMLINKS: u32 = 35;
    pub const OWNER: u32 = 36;
    pub const GROUP: u32 = 37;
    pub const RAWDEV: u32 = 41;
    pub const SPACE_AVAIL: u32 = 42;
    pub const SPACE_TOTAL: u32 = 44;
    pub const SPACE_USED: u32 = 45;
    pub const ATIME: u32 = 47;
    pub const ATIME_SET: u32 = 48;
    pub const BIRTH: u32 = 50;
    pub const CTIME: u32 = 52;
    pub const MTIME: u32 = 53;
    pub const MTIME_SET: u32 = 54;
    pub const MOUNTED_ON: u32 = 55;
}

const FACTS: [u32; 14] = [
    attr::TYPE,
    attr::SIZE,
    attr::FSID,
    attr::FILEID,
    attr::MODE,
    attr::NUMLINKS,
    attr::OWNER,
    attr::GROUP,
    attr::RAWDEV,
    attr::SPACE_USED,
    attr::ATIME,
    attr::BIRTH,
    attr::CTIME,
    attr::MTIME,
];
const LISTED: [u32; 4] = [attr::TYPE, attr::ERROR, attr::FILEID, attr::MOUNTED_ON];
const SIZES: [u32; 4] = [attr::LEASE, attr::MAXNAME, attr::MAXREAD, attr::MAXWRITE];
const SPACE: [u32; 4] =
    [attr::FILES_AVAIL, attr::FILES_TOTAL, attr::SPACE_AVAIL, attr::SPACE_TOTAL];

/// Which state an operation is done under. Nobody's: the caller's permission counts.
pub type StateId = [u8; 16];
/// Nobody's.
pub const ANONYMOUS: StateId = [0; 16];

/// Operations that are done one after the other, until one fails.
#[derive(Default)]
pub struct Compound {
    ops: Out,
    count: u32,
}

impl Compound {
    /// One more; its arguments are to be written.
    pub fn op(&mut self, op: u32) -> &mut Out {
        self.count += 1;
        self.ops.u32(op)
    }

    /// Turns to a file.
    pub fn at(fh: &Fh) -> Self {
        let mut all = Self::default();
        all.turn(fh);
        all
    }

    /// Turns to another file.
    pub fn turn(&mut self, fh: &Fh) {
        self.op(op::PUTFH).bytes(&fh.0);
    }

    /// Asks for attributes.
    pub fn ask(&mut self, attrs: &[u32]) {
        let out = self.op(op::GETATTR);
        put_bitmap(out, attrs);
    }

    fn take(&mut self) -> Vec<u8> {
        let (ops, mut out) = (self.ops.take(), Out::default());
        out.bytes(b"").u32(0).u32(std::mem::take(&mut self.count)).fixed(&ops).take()
    }
}

/// An answer: one operation after the other.
pub struct Results<'a> {
    read: In<'a>,
    left: u32,
}

impl<'a> Results<'a> {
    /// The results of the next operation, which is this one. It was done.
    pub fn op(&mut self, op: u32) -> std::result::Result<&mut In<'a>, Garbage> {
        let (status, read) = self.any(op)?;
        if status == 0 { Ok(read) } else { Err(Garbage) }
    }

    /// The same, whether it was done or not.
    pub fn any(&mut self, op: u32) -> std::result::Result<(u32, &mut In<'a>), Garbage> {
        self.left = self.left.checked_sub(1).ok_or(Garbage)?;
        if self.read.u32()? != op {
            return Err(Garbage);
        }
        let status = self.read.u32()?;
        Ok((status, &mut self.read))
    }
}

fn put_bitmap(out: &mut Out, attrs: &[u32]) {
    let mut words = [0u32; 2];
    for attr in attrs {
        words[(attr / 32) as usize] |= 1 << (attr % 32);
    }
    out.u32(2).u32(words[0]).u32(words[1]);
}

/// A bitmap of attributes, as their numbers.
fn bitmap(read: &mut In<'_>) -> std::result::Result<Vec<u32>, Garbage> {
    let count = read.u32()?;
    if count > 8 {
        return Err(Garbage);
    }
    let mut all = Vec::new();
    for word in 0..count {
        let bits = read.u32()?;
        all.extend((0..32).filter(|bit| bits & (1 << bit) != 0).map(|bit| word * 32 + bit));
    }
    Ok(all)
}

/// Of an operation on a directory, of which nothing is used.
fn skip_change(read: &mut In<'_>) -> std::result::Result<(), Garbage> {
    read.fixed(20).map(drop)
}

/// `fattr4` to set.
fn put_change(out: &mut Out, change: &Change) {
    let (mut attrs, mut values) = (Vec::new(), Out::default());
    if let Some(size) = change.size {
        attrs.push(attr::SIZE);
        values.u64(size);
    }
    if let Some(mode) = change.mode {
        attrs.push(attr::MODE);
        values.u32(mode & 0o7777);
    }
    for (attr, owner) in [(attr::OWNER, change.uid), (attr::GROUP, change.gid)] {
        if let Some(owner) = owner {
            attrs.push(attr);
            values.bytes(owner.to_string().as_bytes());
        }
    }
    for (attr, time) in [(attr::ATIME_SET, change.atime), (attr::MTIME_SET, change.mtime)] {
        match time {
            None => continue,
            Some(SetTime::Now) => values.u32(0),
            Some(SetTime::At(Time { sec, nsec })) => {
                values.u32(1).u64(sec.cast_unsigned()).u32(nsec)
            }
        };
        attrs.push(attr);
    }
    put_bitmap(out, &attrs);
    out.bytes(&values.take());
}

/// `fattr4` as it is compared: a type.
fn put_type(out: &mut Out, kind: u32) {
    put_bitmap(out, &[attr::TYPE]);
    out.bytes(&Out::default().u32(kind).take());
}

/// Numbers of users and groups whose names a server may say.
#[derive(Default)]
struct Names {
    users: HashMap<Vec<u8>, u32>,
    groups: HashMap<Vec<u8>, u32>,
}

impl Names {
    fn load() -> Self {
        let read = |file: &str| {
            let text = std::fs::read(file).unwrap_or_default();
            let lines = text.split(|b| *b == b'\n').map(|line| line.split(|b| *b == b':'));
            let known = lines.filter_map(|mut fields| {
                let (name, id) = (fields.next()?, fields.nth(1)?);
                Some((name.to_vec(), std::str::from_utf8(id).ok()?.parse().ok()?))
            });
            known.collect()
        };
        Self { users: read("/etc/passwd"), groups: read("/etc/group") }
    }

    /// A number as text, or `NAME@DOMAIN`.
    fn number(of: &HashMap<Vec<u8>, u32>, owner: &[u8]) -> u32 {
        let number = std::str::from_utf8(owner).ok().and_then(|text| text.parse().ok());
        let name = owner.split(|b| *b == b'@').next().unwrap_or(owner);
        number.or_else(|| of.get(name).copied()).unwrap_or(NOBODY)
    }
}

/// All attributes that are ever asked for.
#[derive(Default)]
struct Attrs {
    facts: Facts,
    kind: u32,
    error: u32,
    mounted_on: Option<u64>,
    fileid: Option<u64>,
    lease: u32,
    name: u32,
    read: u64,
    write: u64,
    space: [u64; 4],
}

fn time(read: &mut In<'_>) -> std::result::Result<Time, Garbage> {
    Ok(Time { sec: read.u64()?.cast_signed(), nsec: read.u32()?.min(999_999_999) })
}

/// `fattr4`.
fn attrs(names: &Names, read: &mut In<'_>) -> std::result::Result<Attrs, Garbage> {
    let told = bitmap(read)?;
    let left = read.left();
    let mut read = In::new(read.bytes(left)?);
    let read = &mut read;
    let mut all = Attrs::default();
    for number in told {
        match number {
            attr::TYPE => {
                all.kind = kind(read.u32()?);
                if all.kind == 0 {
                    return Err(Garbage);
                }
            }
            attr::SIZE => all.facts.size = read.u64()?,
            attr::FSID => all.facts.fsid = (read.u64()?, read.u64()?),
            attr::LEASE => all.lease = read.u32()?,
            attr::ERROR => all.error = read.u32()?,
            attr::FILEID => all.fileid = Some(read.u64()?),
            attr::FILES_AVAIL => all.space[0] = read.u64()?,
            attr::FILES_TOTAL => all.space[1] = read.u64()?,
            attr::MAXNAME => all.name = read.u32()?,
            attr::MAXREAD => all.read = read.u64()?,
            attr::MAXWRITE => all.write = read.u64()?,
            attr::MODE => all.facts.mode = read.u32()? & 0o7777,
            attr::NUMLINKS => all.facts.nlink = read.u32()?,
            attr::OWNER => all.facts.uid = Names::number(&names.users, read.bytes(OWNER_MAX)?),
            attr::GROUP => all.facts.gid = Names::number(&names.groups, read.bytes(OWNER_MAX)?),
            attr::RAWDEV => all.facts.rdev = (read.u32()?, read.u32()?),
            attr::SPACE_AVAIL => all.space[2] = read.u64()?,
            attr::SPACE_TOTAL => all.space[3] = read.u64()?,
            attr::SPACE_USED => all.facts.used = read.u64()?,
            attr::ATIME => all.facts.atime = time(read)?,
            attr::BIRTH => all.facts.btime = time(read)?,
            attr::CTIME => all.facts.ctime = time(read)?,
            attr::MTIME => all.facts.mtime = time(read)?,
            attr::MOUNTED_ON => all.mounted_on = Some(read.u64()?),
            // What was not asked for.
            _ => return Err(Garbage),
        }
    }
    all.facts.mode |= all.kind;
    Ok(all)
}

/// What a compound ended with.
pub struct Ended<T> {
    /// Of the last operation; 0: all were done.
    pub status: u32,
    /// What was read, if all were done.
    pub result: Option<T>,
    /// It may have been done twice.
    pub again: bool,
}

/// The connection, and how compounds are asked for over it.
pub struct Wire {
    /// The connection.
    pub link: Link,
    /// A request that has no answer for so long fails.
    pub patience: Duration,
    names: Names,
}

impl Wire {
    /// One compound, once. `read` reads the results if all was done, and is given those of a failure if it `peeks`.
    pub fn once<T>(
        &self,
        cred: &Cred,
        ops: &mut Compound,
        peeks: bool,
        read: &dyn Fn(u32, &mut Results<'_>) -> std::result::Result<T, Garbage>,
    ) -> Result<Ended<T>> {
        self.send(cred, ops.take(), peeks, read)
    }

    fn send<T>(
        &self,
        cred: &Cred,
        args: Vec<u8>,
        peeks: bool,
        read: &dyn Fn(u32, &mut Results<'_>) -> std::result::Result<T, Garbage>,
    ) -> Result<Ended<T>> {
        let what = Procedure { program: NFS, version: 4, number: 1 };
        let said = self.link.call(what, cred, args)?;
        let mut rest = In::new(&said.results);
        let done = rest.u32().and_then(|status| {
            rest.bytes(1024)?;
            let left = rest.u32()?;
            let mut results = Results { read: rest, left };
            let result =
                if status == 0 || peeks { Some(read(status, &mut results)?) } else { None };
            Ok(Ended { status, result, again: said.again })
        });
        done.map_err(|Garbage| {
            log::warn!("{:?}: what it answers is no answer", self.link);
            Errno::IO
        })
    }

    /// A compound without state, as often as the server says "later".
    fn ask<T>(
        &self,
        cred: &Cred,
        ops: &mut Compound,
        read: impl Fn(&mut Results<'_>) -> std::result::Result<T, Garbage>,
    ) -> (Result<T>, bool) {
        let args = ops.take();
        let mut again = false;
        let done = proto::patiently(self.patience, || {
            let ended = self.send(cred, args.clone(), false, &|_, results| read(results))?;
            again |= ended.again;
            Ok((ended.status, ended.result))
        });
        let done = done.and_then(|(status, result)| match result {
            Some(result) => Ok(result),
            None => Err(proto::errno(status)),
        });
        (done, again)
    }

    /// The facts that were asked for with [`FACTS`].
    fn facts(&self, read: &mut In<'_>) -> std::result::Result<Facts, Garbage> {
        let all = attrs(&self.names, read)?;
        if all.kind == 0 {
            return Err(Garbage);
        }
        Ok(Facts { fileid: all.fileid.ok_or(Garbage)?, ..all.facts })
    }

    /// Handle and facts of what the server has turned to.
    pub fn found(&self, results: &mut Results<'_>) -> std::result::Result<(Fh, Facts), Garbage> {
        let fh = Fh::read(results.op(op::GETFH)?, FH_MAX)?;
        Ok((fh, self.facts(results.op(op::GETATTR)?)?))
    }
}

/// Asks for what [`Wire::found`] reads.
pub fn find(ops: &mut Compound) {
    ops.op(op::GETFH);
    ops.ask(&FACTS);
}

/// Attributes of a new file.
pub fn put_mode(out: &mut Out, mode: u32) {
    put_change(out, &Change { mode: Some(mode & 0o7777), ..Change::default() });
}

/// Reads a bitmap and forgets it.
pub fn skip_bitmap(read: &mut In<'_>) -> std::result::Result<(), Garbage> {
    bitmap(read).map(drop)
}

/// An export over NFSv4.
pub struct V4 {
    wire: Wire,
    root: Fh,
    limits: Limits,
    states: States,
}

impl V4 {
    /// Finds the server and the root of the export.
    ///
    /// # Errors
    /// In words.
    pub fn open(url: &Url) -> std::result::Result<Self, String> {
        let port = url.nfs_port.unwrap_or(PORT);
        let link = Link::new(&url.host, port, url.patience)?;
        let wire = Wire { link, patience: url.patience, names: Names::load() };
        let mut ops = Compound::default();
        ops.op(op::PUTROOTFH);
        let names = url.export.split('/').filter(|name| !name.is_empty());
        let names: Vec<&str> = names.collect();
        for name in &names {
            ops.op(op::LOOKUP).bytes(name.as_bytes());
        }
        ops.op(op::GETFH);
        ops.ask(&SIZES);
        let (found, _) = wire.ask(&Cred::ROOT, &mut ops, |results| {
            results.op(op::PUTROOTFH)?;
            for _ in &names {
                results.op(op::LOOKUP)?;
            }
            let fh = Fh::read(results.op(op::GETFH)?, FH_MAX)?;
            Ok((fh, attrs(&wire.names, results.op(op::GETATTR)?)?))
        });
        let (root, sizes) = found.map_err(|error| match error {
            Errno::NOENT => format!("{url}: there is no such export"),
            Errno::ACCES | Errno::PERM => format!(
                "{url}: the export is not for this machine (or only for those who come from a port below 1024: run as root)"
            ),
            error => {
                let why = wire.link.trouble().unwrap_or_else(|| format!("{error:?}"));
                format!("{url}: NFS on port {port}: {why}")
            }
        })?;
        let sane = |n: u64| usize::try_from(n).unwrap_or(IO_MAX).clamp(4096, IO_MAX);
        let limits = Limits {
            read: sane(sizes.read),
            write: sane(sizes.write),
            name: if sizes.name == 0 { 255 } else { sizes.name.min(255) },
        };
        let lease = Duration::from_secs(sizes.lease.clamp(3, 3600).into());
        Ok(Self { wire, root, limits, states: States::new(lease) })
    }
}

impl Protocol for V4 {
    fn root(&self) -> Fh {
        self.root.clone()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn getattr(&self, cred: &Cred, fh: &Fh) -> Result<Facts> {
        let mut ops = Compound::at(fh);
        ops.ask(&FACTS);
        let (facts, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            self.wire.facts(results.op(op::GETATTR)?)
        });
        facts
    }

    fn lookup(&self, cred: &Cred, dir: &Fh, name: &[u8]) -> Result<(Fh, Facts)> {
        let mut ops = Compound::at(dir);
        let up = name == b"..";
        let which = if up { op::LOOKUPP } else { op::LOOKUP };
        let out = ops.op(which);
        if !up {
            out.bytes(name);
        }
        find(&mut ops);
        let (found, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            results.op(which)?;
            self.wire.found(results)
        });
        // It says so of a link to a directory as well.
        found.map_err(|error| if error == Errno::LOOP { Errno::NOTDIR } else { error })
    }

    fn setattr(&self, cred: &Cred, fh: &Fh, change: &Change) -> Result<()> {
        let mut ops = Compound::at(fh);
        put_change(ops.op(op::SETATTR).fixed(&ANONYMOUS), change);
        let (done, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            skip_bitmap(results.op(op::SETATTR)?)
        });
        done
    }

    fn access(&self, cred: &Cred, fh: &Fh, what: u32) -> Result<u32> {
        let mut ops = Compound::at(fh);
        ops.op(op::ACCESS).u32(what);
        let (may, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            let read = results.op(op::ACCESS)?;
            let _judged = read.u32()?;
            read.u32()
        });
        may
    }

    fn readlink(&self, cred: &Cred, fh: &Fh) -> Result<Vec<u8>> {
        let mut ops = Compound::at(fh);
        ops.op(op::READLINK);
        let (target, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            results.op(op::READLINK)?.bytes(TARGET_MAX).map(<[u8]>::to_vec)
        });
        check_target(&target?)
    }

    fn read(&self, cred: &Cred, fh: &Fh, offset: u64, len: usize) -> Result<(Vec<u8>, bool)> {
        let asked = u32::try_from(len).map_err(|_| Errno::INVAL)?;
        let mut ops = Compound::at(fh);
        ops.op(op::READ).fixed(&ANONYMOUS).u64(offset).u32(asked);
        let (got, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            let read = results.op(op::READ)?;
            let end = read.flag()?;
            Ok((read.bytes(len)?.to_vec(), end))
        });
        got
    }

    fn write(&self, cred: &Cred, fh: &Fh, offset: u64, data: &[u8], stable: bool) -> Result<Wrote> {
        let len = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        let mut ops = Compound::at(fh);
        let how = if stable { 2 } else { 0 };
        ops.op(op::WRITE).fixed(&ANONYMOUS).u64(offset).u32(how).bytes(data);
        let (wrote, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            let read = results.op(op::WRITE)?;
            let (count, how, verifier) = (read.u32()?, read.u32()?, read.eight()?);
            if count == 0 && len > 0 || count > len || how > 2 || stable && how == 0 {
                return Err(Garbage);
            }
            let len = usize::try_from(count).map_err(|_| Garbage)?;
            Ok(Wrote { len, stable: how == 2, verifier })
        });
        wrote
    }

    fn commit(&self, cred: &Cred, fh: &Fh) -> Result<[u8; 8]> {
        let mut ops = Compound::at(fh);
        ops.op(op::COMMIT).u64(0).u32(0);
        let (verifier, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            results.op(op::COMMIT)?.eight()
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
        let made = self.states.create(&self.wire, cred, dir, name, mode, sure)?;
        if !sure {
            return Ok(made);
        }
        // The verifier by which the server knows the request was kept in the times, and the mode is the server's own.
        let now = Some(SetTime::Now);
        let change =
            Change { mode: Some(mode & 0o7777), atime: now, mtime: now, ..Change::default() };
        self.setattr(cred, &made.0, &change)?;
        let facts = self.getattr(cred, &made.0)?;
        Ok((made.0, facts))
    }

    fn make(&self, cred: &Cred, dir: &Fh, name: &[u8], node: &NewNode<'_>) -> Result<(Fh, Facts)> {
        let kind = node.mode & S_IFMT;
        let mut ops = Compound::at(dir);
        let mut mode = node.mode;
        match kind {
            S_IFREG => return self.create(cred, dir, name, node.mode, true),
            S_IFDIR | S_IFIFO | S_IFSOCK => {
                ops.op(op::CREATE).u32(kind_number(kind)?);
            }
            S_IFLNK => {
                mode = 0o777;
                ops.op(op::CREATE).u32(kind_number(kind)?).bytes(node.target);
            }
            S_IFCHR | S_IFBLK => {
                let (major, minor) = split_dev(node.rdev);
                ops.op(op::CREATE).u32(kind_number(kind)?).u32(major).u32(minor);
            }
            _ => return Err(Errno::INVAL),
        }
        put_mode(ops.ops.bytes(name), mode);
        find(&mut ops);
        let done = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            let read = results.op(op::CREATE)?;
            skip_change(read)?;
            skip_bitmap(read)?;
            self.wire.found(results)
        });
        match done {
            // It was done the first time, if what is there is what was to be made.
            (Err(Errno::EXIST), true) => {
                let (fh, facts) = self.lookup(cred, dir, name).map_err(|_| Errno::EXIST)?;
                let same = facts.mode & S_IFMT == kind
                    && (kind != S_IFLNK
                        || self.readlink(cred, &fh).is_ok_and(|target| target == node.target));
                if same { Ok((fh, facts)) } else { Err(Errno::EXIST) }
            }
            (done, _) => done,
        }
    }

    fn remove(&self, cred: &Cred, dir: &Fh, name: &[u8], is_dir: bool) -> Result<()> {
        // The operation takes either; what it is is looked at on the way.
        let mut ops = Compound::at(dir);
        ops.op(op::LOOKUP).bytes(name);
        let check = if is_dir { op::VERIFY } else { op::NVERIFY };
        put_type(ops.op(check), 2);
        ops.turn(dir);
        ops.op(op::REMOVE).bytes(name);
        let args = ops.take();
        let mut again = false;
        let (status, _) = proto::patiently(self.wire.patience, || {
            let ended = self.wire.send(cred, args.clone(), false, &|_, _| Ok(()))?;
            again |= ended.again;
            Ok((ended.status, ()))
        })?;
        match status {
            0 => Ok(()),
            // NOT_SAME; SAME.
            10_027 => Err(Errno::NOTDIR),
            10_009 => Err(Errno::ISDIR),
            2 if again => Ok(()),
            status => Err(proto::errno(status)),
        }
    }

    fn rename(&self, cred: &Cred, from: (&Fh, &[u8]), to: (&Fh, &[u8])) -> Result<()> {
        let mut ops = Compound::at(from.0);
        ops.op(op::SAVEFH);
        ops.turn(to.0);
        ops.op(op::RENAME).bytes(from.1).bytes(to.1);
        match self.wire.ask(cred, &mut ops, |_| Ok(())) {
            (Err(Errno::NOENT), true) if self.lookup(cred, to.0, to.1).is_ok() => Ok(()),
            (done, _) => done,
        }
    }

    fn link(&self, cred: &Cred, fh: &Fh, dir: &Fh, name: &[u8]) -> Result<()> {
        let mut ops = Compound::at(fh);
        ops.op(op::SAVEFH);
        ops.turn(dir);
        ops.op(op::LINK).bytes(name);
        match self.wire.ask(cred, &mut ops, |_| Ok(())) {
            (Err(Errno::EXIST), true)
                if self.lookup(cred, dir, name).is_ok_and(|(there, _)| there == *fh) =>
            {
                Ok(())
            }
            (done, _) => done,
        }
    }

    fn list(&self, cred: &Cred, dir: &Fh, cookie: u64, verifier: [u8; 8]) -> Result<Page> {
        let mut ops = Compound::at(dir);
        let out = ops.op(op::READDIR).u64(cookie).fixed(&verifier).u32(LIST_BYTES).u32(LIST_BYTES);
        put_bitmap(out, &LISTED);
        let (page, _) = self.wire.ask(cred, &mut ops, |results| {
            results.op(op::PUTFH)?;
            let read = results.op(op::READDIR)?;
            let mut page = Page { verifier: read.eight()?, ..Page::default() };
            while read.flag()? {
                let cookie = read.u64()?;
                let name = read.bytes(4096)?.to_vec();
                let all = attrs(&self.wire.names, read)?;
                let fileid = all.mounted_on.or(all.fileid).unwrap_or(0);
                page.entries.push(Entry { fileid, kind: all.kind, cookie, name });
            }
            page.end = read.flag()?;
            Ok(page)
        });
        let mut page = page?;
        page.entries.retain(|entry| good_name(&entry.name));
        Ok(page)
    }

    fn space(&self) -> Result<StatFs> {
        let mut ops = Compound::at(&self.root);
        ops.ask(&SPACE);
        let (space, _) = self.wire.ask(&Cred::ROOT, &mut ops, |results| {
            results.op(op::PUTFH)?;
            Ok(attrs(&self.wire.names, results.op(op::GETATTR)?)?.space)
        });
        let [inodes_free, inodes, left, bytes] = space?;
        Ok(StatFs {
            block_bytes: 4096,
            blocks: bytes / 4096,
            blocks_free: left / 4096,
            inodes,
            inodes_free,
            name_max: self.limits.name,
        })
    }

    fn lock(&self, file: &Locked, lock: &Lock) -> Result<()> {
        self.states.lock(&self.wire, file, lock)
    }

    fn test_lock(&self, file: &Locked, lock: &Lock) -> Result<Option<Lock>> {
        self.states.test(&self.wire, file, lock)
    }

    fn tend_locks(&self) {
        self.states.tend(&self.wire);
    }

    fn end(&self) {
        self.wire.link.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_in_their_order() {
        let names = Names { users: HashMap::from([(b"root".to_vec(), 0)]), groups: HashMap::new() };
        let mut out = Out::default();
        put_bitmap(
            &mut out,
            &[
                attr::TYPE,
                attr::SIZE,
                attr::FILEID,
                attr::MODE,
                attr::OWNER,
                attr::GROUP,
                attr::MTIME,
            ],
        );
        let mut values = Out::default();
        values
            .u32(1)
            .u64(5)
            .u64(77)
            .u32(0o644)
            .bytes(b"root@example.org")
            .bytes(b"1234")
            .u64(9)
            .u32(8);
        let values = values.take();
        let bytes = out.clone().bytes(&values).take();
        let all = attrs(&names, &mut In::new(&bytes)).unwrap();
        assert_eq!((all.kind, all.facts.mode, all.facts.size), (S_IFREG, S_IFREG | 0o644, 5));
        assert_eq!((all.fileid, all.facts.uid, all.facts.gid), (Some(77), 0, 1234));
        assert_eq!(all.facts.mtime, Time { sec: 9, nsec: 8 });
        // Less than the bitmap says; a type that is none; what was not asked for; a bitmap that is too long.
        let bytes = out.clone().bytes(&values[..values.len() - 4]).take();
        assert!(attrs(&names, &mut In::new(&bytes)).is_err());
        for bad in [&[1, 2, 4, 9][..], &[1, 1, 4, 0], &[9, 2], &[0xffff_ffff]] {
            let mut out = Out::default();
            bad.iter().for_each(|n| {
                out.u32(*n);
            });
            assert!(attrs(&names, &mut In::new(&out.take())).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn owners_without_a_number_are_nobody() {
        let known = HashMap::from([(b"ann".to_vec(), 7)]);
        for (owner, number) in [
            (&b"0"[..], 0),
            (b"12@x", NOBODY),
            (b"ann@x", 7),
            (b"ann", 7),
            (b"bob@x", NOBODY),
            (b"", NOBODY),
            (b"4294967296", NOBODY),
        ] {
            assert_eq!(Names::number(&known, owner), number, "{owner:?}");
        }
    }
}
