//! `corbel receive`: takes a stream in ([`storage::format::transfer`]).
//!
//! Beside the directory that is made, or brought from one snapshot to a later one, lies `.NAME.receive`: what is known of it (`state`), which inode was
//! made for which of the sender's (`map`), what has no name yet, or has none any more (`new`), and the directory itself as long as its first stream comes (`tree`). All of it is made by one client in one order,
//! so that after a crash there is what was done up to some moment, and every record may be taken in once more.
//!
//! A new directory gets its name when all of it is there. What changes one that is there goes through states between the two snapshots; the snapshot
//! that is made at the end is what the sender's was.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use clap::Args;
use client::fs::{
    Attr, FileSystem, Handle, Lock, LockKind, LockSpace, NAME_MAX, NewNode, O_RDWR, O_WRONLY,
    Rename, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, SetAttr, SetTime, Time, XattrMode, falloc,
};
use serde_json::{Value, json};
use storage::format::entry::Stamp;
use storage::format::transfer::{self, FRAME_BYTES, HEAD_BYTES, Position, Record};

use super::{MIB, failed, interrupted};
use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;
use crate::volume::Volume;

/// Bytes of content, and records, after which it is noted how far it is.
const NOTE: (u64, u64) = (64 * MIB, 20_000);
/// The attribute that says who else may.
const LIST: &[u8] = b"system.posix_acl_access";
/// Name of a directory whose first stream is coming.
const TREE: &[u8] = b"tree";
/// How long it may take at the end until what was received lies where it is to stay.
const PLACED: Duration = Duration::from_secs(120);
/// Bytes of a pair in the map.
const PAIR: usize = 16;
/// Content after which progress is told.
const TELL: u64 = 512 * MIB;

/// Arguments of `corbel receive`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel send monday | ssh other corbel receive /copies/home\n  corbel send tuesday --from monday | \
    ssh other corbel receive /copies/home\n  corbel receive /restored < monday.corbel\n  corbel receive --status /copies/home      \
    how far an interrupted one is, and how to go on\n\nThe first stream makes the directory; one that was sent with --from changes it from that \
    snapshot to the\nlater one. At the end a snapshot of it is made, with the name of the one that was sent: that is what is \
    consistent,\nand the directory itself is in between while it is changed. Leave it alone otherwise. What is known of it lies beside it, \
    in\n.NAME.receive; without that it is a directory as any other, and takes no more streams."
)]
pub struct ReceiveArgs {
    /// The directory, by its path in the volume
    pub target: PathBuf,
    /// Name of the snapshot that is made at the end, if it is not to be the one of the snapshot that was sent
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<OsString>,
    /// Make no snapshot at the end
    #[arg(long, conflicts_with = "snapshot")]
    pub no_snapshot: bool,
    /// Say what was received, and how to go on with what was interrupted
    #[arg(long)]
    pub status: bool,
    /// Remove what has come of a first stream that was interrupted
    #[arg(long, conflicts_with = "status")]
    pub abort: bool,
    /// Read the stream from a file instead of standard input
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Socket of the local node, if it is not the configuration's
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// A snapshot of the sender's.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Sent {
    number: u64,
    name: String,
}

/// A name as a shell takes it, on one line.
fn quoted(name: &str) -> String {
    let plain: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    format!("'{}'", plain.replace('\'', "'\\''"))
}

/// A snapshot that is coming.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Coming {
    sent: Sent,
    /// Up to where it has come.
    at: Position,
    /// Snapshots here had numbers up to this one before.
    after: u64,
}

/// What is known of a directory that is received.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Known {
    /// Uuid of the sender's volume, in base 16.
    volume: String,
    /// The directory there.
    root: InodeId,
    /// The one that it is as, if it is.
    complete: Option<Sent>,
    /// The one that is coming.
    coming: Option<Coming>,
}

impl Known {
    fn to_json(&self) -> Value {
        let sent = |one: &Sent| json!({"number": one.number, "name": one.name});
        json!({
            "volume": self.volume,
            "root": self.root.0,
            "complete": self.complete.as_ref().map(sent),
                        "coming": self.coming.as_ref().map(|Coming { sent, at, after }| json!({
                "number": sent.number,
                "name": sent.name,
                "position": at.to_string(),
                "after": after,
            })),
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let sent = |value: &Value| {
            let (number, name) = (value["number"].as_u64()?, value["name"].as_str()?.into());
            Some(Sent { number, name })
        };
        let coming = match &value["coming"] {
            Value::Null => None,
            coming => Some(Coming {
                sent: sent(coming)?,
                at: coming["position"].as_str()?.parse().ok()?,
                after: coming["after"].as_u64()?,
            }),
        };
        let complete = match &value["complete"] {
            Value::Null => None,
            complete => Some(sent(complete)?),
        };
        let (volume, root) = (value["volume"].as_str()?.into(), InodeId(value["root"].as_u64()?));
        Some(Self { volume, root, complete, coming })
    }

    /// How the sender goes on.
    fn command(&self) -> Option<String> {
        let Coming { sent: one, at, .. } = self.coming.as_ref()?;

        let from = self.complete.as_ref().map(|from| format!(" --from={}", quoted(&from.name)));
        Some(format!(
            "corbel send{} --resume {at} -- {}",
            from.unwrap_or_default(),
            quoted(&one.name)
        ))
    }
}

/// A directory that is received, and what lies beside it.
struct Place<'a> {
    volume: &'a Volume,
    path: String,
    parent: InodeId,
    name: Vec<u8>,
    /// The directory beside it, if there is one.
    home: Option<InodeId>,
}

fn home_name(name: &[u8]) -> Vec<u8> {
    [b".", name, b".receive"].concat()
}

impl<'a> Place<'a> {
    fn new(volume: &'a Volume, target: &Path) -> Result<Self> {
        let path = target.display().to_string();
        let usage = |message: &str, remedy: &str| {
            Err(Failure::new(Kind::Usage, format!("{path}: {message}"), remedy))
        };
        let (Some(name), Some(above)) = (target.file_name(), target.parent()) else {
            return usage(
                "this cannot be received into",
                "give a directory below the root, by its path in the volume: it is made",
            );
        };
        let name = name.as_bytes().to_vec();
        if home_name(&name).len() > NAME_MAX {
            return usage("the name is too long", "choose one of at most 245 bytes");
        }
        let above =
            if target.is_absolute() { above.to_owned() } else { Path::new("/").join(above) };
        let parent = volume.at(&above).map_err(|e| failed(above.display(), e))?;
        let home = match volume.fs.lookup(&volume.caller(), parent, &home_name(&name)) {
            Ok(attr) if attr.is_dir() => Some(attr.ino),
            Ok(_) => {
                return usage("what lies beside it is not of a receive", "choose another name");
            }
            Err(Errno::NOENT) => None,
            Err(e) => return Err(failed(&path, e)),
        };
        Ok(Self { volume, path, parent, name, home })
    }

    fn fs(&self) -> &'a dyn FileSystem {
        &*self.volume.fs
    }

    fn said<T>(&self, what: &str, done: std::result::Result<T, Errno>) -> Result<T> {
        done.map_err(|e| failed(format!("{}: {what}", self.path), e))
    }

    fn target(&self) -> Result<Option<Attr>> {
        match self.fs().lookup(&self.volume.caller(), self.parent, &self.name) {
            Err(Errno::NOENT) => Ok(None),
            found => self.said("looking it up", found).map(Some),
        }
    }

    /// All of a file beside it.
    fn read(&self, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let (fs, caller) = (self.fs(), self.volume.caller());
        let Some(home) = self.home else { return Ok(None) };
        let read = || {
            let attr = fs.lookup(&caller, home, name)?;
            let file = fs.open(&caller, attr.ino, 0)?;
            let mut bytes = vec![0; usize::try_from(attr.size).map_err(|_| Errno::FBIG)?];
            let read = fs.read(file, 0, &mut bytes);
            fs.release(file);
            bytes.truncate(read?);
            Ok(bytes)
        };
        match read() {
            Err(Errno::NOENT) => Ok(None),
            read => self.said("what is known of it", read).map(Some),
        }
    }

    /// Makes a file beside it what is given, in one step.
    fn write(&self, name: &[u8], bytes: &[u8]) -> Result<()> {
        let (fs, caller) = (self.fs(), self.volume.caller());
        let Some(home) = self.home else { return Ok(()) };
        let other = [name, b".tmp"].concat();
        let written = (|| {
            let (_, file) =
                fs.create(&caller, home, &other, 0o600, O_RDWR | client::fs::O_TRUNC)?;
            let written = put_all(fs, file, 0, bytes);
            fs.release(file);
            written?;
            let (parent, new_parent) = (home, home);
            let rename = Rename { parent, name: &other, new_parent, new_name: name, flags: 0 };
            fs.rename(&caller, &rename)
        })();
        self.said("noting how far it is", written)
    }

    fn known(&self) -> Result<Option<Known>> {
        let Some(bytes) = self.read(b"state")? else { return Ok(None) };
        let known = serde_json::from_slice(&bytes).ok().and_then(|v| Known::from_json(&v));
        match known {
            Some(known) => Ok(Some(known)),
            None => Err(self.broken()),
        }
    }

    fn broken(&self) -> Failure {
        let message = format!("{}: what is known of it cannot be read", self.path);
        let remedy =
            "receive it anew into another directory, and remove this one and what lies beside it";
        Failure::new(Kind::Damaged, message, remedy)
    }

    /// Removes a directory and all below it.
    fn remove(&self, parent: InodeId, name: &[u8], dir: InodeId) -> Result<()> {
        let (fs, caller) = (self.fs(), self.volume.caller());
        // Directories to be removed once what is below them is: the last one first.
        let mut left = vec![(parent, name.to_vec(), dir)];
        while let Some((parent, name, dir)) = left.last().cloned() {
            stop()?;
            let mut below = false;
            let list = self.volume.list(dir);
            for (one, ino, kind) in self.said("removing what is gone", list)? {
                if kind & S_IFMT == S_IFDIR {
                    left.push((dir, one, ino));
                    below = true;
                } else {
                    self.said("removing what is gone", fs.unlink(&caller, dir, &one))?;
                }
            }
            if !below {
                self.said("removing what is gone", fs.rmdir(&caller, parent, &name))?;
                left.pop();
            }
        }
        Ok(())
    }
}

fn stop() -> Result<()> {
    crate::signals::check().map_err(|_| interrupted())
}

fn put_all(
    fs: &dyn FileSystem,
    file: Handle,
    mut offset: u64,
    mut bytes: &[u8],
) -> std::result::Result<(), Errno> {
    while !bytes.is_empty() {
        let n = fs.write(file, offset, bytes, false)?.len.min(bytes.len());
        if n == 0 {
            return Err(Errno::IO);
        }
        (offset, bytes) = (offset + n as u64, &bytes[n..]);
    }
    Ok(())
}

/// The records of a stream, as they come.
struct Source<R: Read> {
    from: R,
    chain: u32,
}

/// Why there is no next record.
enum NoMore {
    /// The stream ends before its end.
    Cut,
    Failed(Failure),
}

impl<R: Read> Source<R> {
    /// Fills all of it.
    fn fill(&mut self, mut buf: &mut [u8]) -> std::result::Result<(), NoMore> {
        while !buf.is_empty() {
            match self.from.read(buf) {
                Ok(0) => return Err(NoMore::Cut),
                Ok(n) => buf = &mut buf[n..],
                // (A signal, perhaps the one to stop.)
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {
                    stop().map_err(NoMore::Failed)?;
                }
                Err(e) => return Err(NoMore::Failed(Failure::io("the stream", &e))),
            }
        }
        Ok(())
    }

    fn next(&mut self) -> std::result::Result<Record, NoMore> {
        let damaged = |e| {
            let remedy =
                "nothing of the record that is wrong was taken in: send it again from where it is";
            NoMore::Failed(Failure::new(Kind::Damaged, format!("{e}"), remedy))
        };
        stop().map_err(NoMore::Failed)?;
        let mut frame = [0; FRAME_BYTES];
        self.fill(&mut frame)?;
        let (len, crc) = Record::frame(&frame).map_err(damaged)?;
        let mut body = vec![0; len];
        self.fill(&mut body)?;
        Record::decode(&body, crc, &mut self.chain).map_err(damaged)
    }
}

/// What an inode is to have.
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    atime: Stamp,
    mtime: Stamp,
    /// Names of the extended ones.
    xattrs: Vec<Vec<u8>>,
}

/// What takes the records in.
struct Receiver<'a> {
    place: Place<'a>,
    home: InodeId,
    new: InodeId,
    known: Known,
    /// The first stream: the directory is not there yet.
    first: bool,
    /// Inodes here for those of the sender.
    map: HashMap<InodeId, InodeId>,
    /// The file of the map, and its length.
    journal: (Handle, u64),
    /// Those that lie in `new`, by their numbers there.
    staged: HashSet<InodeId>,
    open: Option<(InodeId, Handle)>,
    /// Whose extended attributes are taken in, and whether all of them.
    takes: Option<(InodeId, bool)>,
    /// What is to let in fewer, by what is to come, and by the list that is.
    bars: Option<(InodeId, Attributes, Option<Vec<u8>>)>,
    /// The directory has not its name yet.
    builds: bool,
    lock: InodeId,
    /// The session, and what was refused in it before.
    refused: (u64, u64),
    position: Position,
    /// Bytes of content and records since that was noted, and in all.
    unnoted: (u64, u64),
    content: u64,
    records: u64,
    told: u64,
}

fn staged_name(ino: InodeId) -> Vec<u8> {
    format!("{:x}", ino.0).into_bytes()
}

impl Receiver<'_> {
    fn fs(&self) -> &dyn FileSystem {
        self.place.fs()
    }

    /// The inode here.
    fn here(&self, ino: InodeId) -> Result<InodeId> {
        self.map.get(&ino).copied().ok_or_else(|| self.changed(ino))
    }

    fn changed(&self, ino: InodeId) -> Failure {
        let message = format!(
            "{}: it is not as it was received (inode {} of the stream)",
            self.place.path, ino.0
        );
        let remedy = "it was changed here: receive it anew into another directory, from a snapshot without --from";
        Failure::failed(message, remedy)
    }

    /// What has become of something that is done to an inode of the stream.
    fn done<T>(&self, ino: InodeId, done: std::result::Result<T, Errno>) -> Result<T> {
        done.map_err(|e| match e {
            Errno::NOENT | Errno::STALE | Errno::EXIST | Errno::ISDIR | Errno::NOTDIR => {
                self.changed(ino)
            }
            e => failed(format!("{}: inode {} of the stream", self.place.path, ino.0), e),
        })
    }

    /// Notes how far it is, once all of that is durable and nothing was refused of it.
    fn note(&mut self) -> Result<()> {
        self.close();
        self.judged()?;
        if let Some(coming) = &mut self.known.coming {
            coming.at = self.position;
        }
        self.unnoted = (0, 0);
        self.place.write(b"state", self.known.to_json().to_string().as_bytes())
    }

    /// Fails if anything that was done was refused later, or is lost, or another is at work.
    fn judged(&mut self) -> Result<()> {
        let (session, refused, why) = self.place.said("making it durable", self.fs().refused())?;
        if (session, refused) != self.refused {
            let what = format!("{}: the volume did not take part of it", self.place.path);
            let why = if refused == 0 { Errno::IO } else { why };
            return Err(failed(what, why));
        }
        // A lock ends with a session.
        let own = Lock { kind: LockKind::Write, ..Lock::all_of(LockSpace::Flock, 1) };
        self.place.said("another receive is at work", self.fs().lock(self.lock, &own, 0))
    }

    fn take(&mut self, record: Record) -> Result<()> {
        self.records += 1;
        self.unnoted.1 += 1;
        let position = record.position();
        if !matches!(record, Record::Xattr { .. }) {
            self.restrict()?;
        }
        match record {
            Record::Inode { ino, mode, rdev, target } => self.inode(ino, mode, rdev, &target)?,
            Record::File { ino, size } => self.file(ino, size)?,
            Record::Data { ino, offset, bytes } => {
                let file = self.opened(ino)?;
                let put = put_all(self.fs(), file, offset, &bytes);
                self.done(ino, put)?;
                self.content += bytes.len() as u64;
                self.unnoted.0 += bytes.len() as u64;
            }
            Record::Zero { ino, offset, len } => {
                let file = self.opened(ino)?;
                let mode = falloc::PUNCH_HOLE | falloc::KEEP_SIZE;
                self.done(ino, self.fs().fallocate(file, mode, offset, len))?;
            }
            Record::Unnamed { dir, ino, last, name } => self.unnamed(dir, ino, last, &name)?,
            Record::Named { dir, ino, name } => self.named(dir, ino, &name)?,
            Record::Attributes { ino, last, mode, uid, gid, atime, mtime, xattrs } => {
                let wanted = Attributes { mode, uid, gid, atime, mtime, xattrs };
                self.takes = None;
                self.attributes(ino, wanted, last)?;
            }
            Record::Xattr { ino, name, value } => self.xattr(ino, &name, &value)?,
            Record::Gone { ino } => drop(self.map.remove(&ino)),
            Record::Begin { .. } | Record::End { .. } => {}
        }
        self.position = position.unwrap_or(self.position);
        if self.unnoted.0 >= NOTE.0 || self.unnoted.1 >= NOTE.1 { self.note() } else { Ok(()) }
    }

    fn inode(&mut self, ino: InodeId, mode: u32, rdev: u32, target: &[u8]) -> Result<()> {
        self.close();
        let (kind, caller) = (mode & S_IFMT, self.place.volume.caller());
        if let Some(here) = self.map.get(&ino) {
            match self.fs().getattr(&caller, *here) {
                // It was here before, and went: all of it comes anew.
                Err(Errno::NOENT | Errno::STALE) => {}
                Ok(attr) if attr.nlink == 0 => {}
                Ok(attr) if attr.kind() == kind => return Ok(()),
                Ok(_) => return Err(self.changed(ino)),
                Err(e) => return self.done(ino, Err(e)),
            }
        }
        // The directory itself is built where those come to it who may: see the stages of a stream.
        let root = ino == self.known.root;
        let (dir, name) =
            if root { (self.home, TREE.to_vec()) } else { (self.new, staged_name(ino)) };
        let mode = kind | if kind == S_IFDIR { 0o700 } else { 0o600 };
        let node = NewNode { mode, rdev, target };
        let here = self.done(ino, self.fs().mknod(&caller, dir, &name, &node))?.ino;
        if !root {
            self.staged.insert(ino);
        }
        self.map.insert(ino, here);
        let (file, at) = self.journal;
        self.done(ino, put_all(self.fs(), file, at, &pair(ino, here)))?;
        self.journal.1 += PAIR as u64;
        Ok(())
    }

    fn file(&mut self, ino: InodeId, size: u64) -> Result<()> {
        self.close();
        let (here, caller) = (self.here(ino)?, self.place.volume.caller());
        let attr = self.done(ino, self.fs().getattr(&caller, here))?;
        if attr.kind() != S_IFREG || attr.nlink == 0 {
            return Err(self.changed(ino));
        }
        if attr.size != size {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            self.done(ino, self.fs().setattr(&caller, here, &set))?;
        }
        Ok(())
    }

    fn opened(&mut self, ino: InodeId) -> Result<Handle> {
        match self.open {
            Some((open, file)) if open == ino => return Ok(file),
            _ => self.close(),
        }
        let here = self.here(ino)?;
        let file = self.fs().open(&self.place.volume.caller(), here, O_WRONLY);
        let file = self.done(ino, file)?;
        self.open = Some((ino, file));
        Ok(file)
    }

    fn close(&mut self) {
        if let Some((_, file)) = self.open.take() {
            self.fs().release(file);
        }
    }

    /// The inode of a name here, if there is one.
    fn lookup(&self, of: InodeId, dir: InodeId, name: &[u8]) -> Result<Option<Attr>> {
        match self.fs().lookup(&self.place.volume.caller(), dir, name) {
            Err(Errno::NOENT) => Ok(None),
            found => self.done(of, found).map(Some),
        }
    }

    /// A name goes; what it led to stays until the end, since it may get another.
    fn unnamed(&mut self, dir: InodeId, ino: InodeId, last: bool, name: &[u8]) -> Result<()> {
        self.close();
        let caller = self.place.volume.caller();
        let (at, here) = (self.here(dir)?, self.here(ino)?);
        let Some(found) = self.lookup(dir, at, name)?.filter(|found| found.ino == here) else {
            // It was taken away before, and another may have come.
            return Ok(());
        };
        if (last || self.staged.contains(&ino)) && !found.is_dir() {
            return self.done(ino, self.fs().unlink(&caller, at, name));
        }
        let new_name = staged_name(ino);
        let (parent, new_parent) = (at, self.new);
        let rename = Rename { parent, name, new_parent, new_name: &new_name, flags: 0 };
        self.done(ino, self.fs().rename(&caller, &rename))?;
        self.staged.insert(ino);
        Ok(())
    }

    fn named(&mut self, dir: InodeId, ino: InodeId, name: &[u8]) -> Result<()> {
        self.close();
        let caller = self.place.volume.caller();
        let (at, here) = (self.here(dir)?, self.here(ino)?);
        if let Some(found) = self.lookup(dir, at, name)? {
            return if found.ino == here { Ok(()) } else { Err(self.changed(dir)) };
        }
        if self.staged.contains(&ino) {
            let old = staged_name(ino);
            let (parent, new_parent) = (self.new, at);
            let rename = Rename { parent, name: &old, new_parent, new_name: name, flags: 0 };
            self.done(ino, self.fs().rename(&caller, &rename))?;
            self.staged.remove(&ino);
        } else {
            self.done(ino, self.fs().link(&caller, here, at, name))?;
        }
        Ok(())
    }

    fn attributes(&mut self, ino: InodeId, wanted: Attributes, last: bool) -> Result<()> {
        self.close();
        let (here, caller) = (self.here(ino)?, self.place.volume.caller());
        let fs = self.fs();
        let attr = self.done(ino, fs.getattr(&caller, here))?;
        let mode = wanted.mode & 0o7777;
        if attr.kind() != wanted.mode & S_IFMT || attr.nlink == 0 {
            return Err(self.changed(ino));
        }
        let is_new = self.staged.contains(&ino) || (ino == self.known.root && self.builds);
        if !last && !is_new {
            if attr.kind() != S_IFLNK {
                self.bars = Some((ino, wanted, None));
            }
            return Ok(());
        }
        let names = self.done(ino, fs.listxattr(&caller, here))?;
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            if !wanted.xattrs.iter().any(|wanted| wanted == name) {
                match fs.removexattr(&caller, here, name) {
                    Err(Errno::NODATA) => {}
                    removed => self.done(ino, removed)?,
                }
            }
        }
        // Owner and mode in one operation: what is refused of one is refused of the other. A file without its content runs as nobody else.
        let whole = last || attr.kind() != S_IFREG;
        let mode = if whole { mode } else { mode & 0o1777 };
        let links = attr.kind() == S_IFLNK;
        let time = |at: Stamp| Some(SetTime::At(Time { sec: at.sec, nsec: at.nsec }));
        let set = SetAttr {
            uid: Some(wanted.uid),
            gid: Some(wanted.gid),
            mode: (!links).then_some(mode),
            atime: time(wanted.atime),
            mtime: time(wanted.mtime),
            ..SetAttr::default()
        };
        self.done(ino, fs.setattr(&caller, here, &set))?;
        self.takes = Some((ino, whole));
        Ok(())
    }

    /// What is there lets in nobody from now on whom not both states let in.
    fn restrict(&mut self) -> Result<()> {
        let Some((ino, wanted, list)) = self.bars.take() else { return Ok(()) };
        let (here, caller) = (self.here(ino)?, self.place.volume.caller());
        let fs = self.fs();
        let attr = self.done(ino, fs.getattr(&caller, here))?;
        let has = match fs.getxattr(&caller, here, LIST) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => None,
            has => Some(self.done(ino, has)?),
        };
        let set = if (attr.uid, attr.gid) == (wanted.uid, wanted.gid) && has == list {
            let mode = attr.mode & wanted.mode & 0o7777;
            if mode == attr.mode & 0o7777 {
                return Ok(());
            }
            SetAttr { mode: Some(mode), ..SetAttr::default() }
        } else {
            // (Whom lists let in is not reckoned out.)
            if has.is_some() {
                self.done(ino, fs.removexattr(&caller, here, LIST))?;
            }
            let mode = if attr.is_dir() { 0o700 } else { 0o600 };
            SetAttr { uid: Some(0), gid: Some(0), mode: Some(mode), ..SetAttr::default() }
        };
        self.done(ino, fs.setattr(&caller, here, &set)).map(drop)
    }

    /// An extended attribute of what was named last.
    fn xattr(&mut self, ino: InodeId, name: &[u8], value: &[u8]) -> Result<()> {
        if let Some((_, _, list)) = self.bars.as_mut().filter(|(of, ..)| *of == ino) {
            if name == LIST {
                *list = Some(value.to_vec());
            }
            return Ok(());
        }
        let Some((_, whole)) = self.takes.filter(|(of, _)| *of == ino) else { return Ok(()) };
        if !whole && name == b"security.capability" {
            return Ok(());
        }
        let (here, caller) = (self.here(ino)?, self.place.volume.caller());
        let fs = self.fs();
        if fs.getxattr(&caller, here, name).is_ok_and(|now| now == *value) {
            return Ok(());
        }
        self.done(ino, fs.setxattr(&caller, here, name, value, XattrMode::Set))
    }

    /// All has come.
    fn end(&mut self, snapshot: Option<&[u8]>) -> Result<()> {
        self.close();
        self.restrict()?;
        let (caller, root) = (self.place.volume.caller(), self.known.root);
        let here = self.here(root)?;

        if self.lookup(root, self.home, TREE)?.is_some() {
            let (parent, new_parent) = (self.home, self.place.parent);
            let new_name = &self.place.name;
            let rename = Rename { parent, name: TREE, new_parent, new_name, flags: 1 };
            self.place.said("giving it its name", self.fs().rename(&caller, &rename))?;
            self.builds = false;
        }
        // What has no name any more.
        for (name, ino, kind) in
            self.place.said("what is gone", self.place.volume.list(self.new))?
        {
            if kind & S_IFMT == S_IFDIR {
                self.place.remove(self.new, &name, ino)?;
            } else {
                let gone = self.fs().unlink(&caller, self.new, &name);
                self.place.said("removing what is gone", gone)?;
            }
        }
        self.staged.clear();
        self.judged()?;
        if let Some(name) = snapshot {
            let end = Instant::now() + PLACED;
            let made = loop {
                match self.fs().make_snapshot(&caller, here, name) {
                    Err(Errno::EXIST) if self.made_before(name, here)? => break Ok(()),
                    // Who may come to what lies below is being noted, of what has moved.
                    Err(Errno::BUSY) if Instant::now() < end => {
                        stop()?;
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    made => break made,
                }
            };
            let what = format!("making the snapshot {}", String::from_utf8_lossy(name));
            self.place.said(&what, made)?;
        }
        // (A snapshot that was refused at first counts as well.)
        let (session, refused, _) = self.place.said("making it durable", self.fs().refused())?;
        self.refused = (session, refused);
        let complete = self.known.coming.as_ref().map(|coming| coming.sent.clone());
        let known = Known { complete, coming: None, ..self.known.clone() };
        self.place.write(b"state", known.to_json().to_string().as_bytes())?;
        self.known = known;
        // Not before: as long as the stream may come once more, what is gone is named in it.
        let mut pairs: Vec<_> = self.map.iter().collect();
        pairs.sort_unstable();
        let pairs: Vec<u8> = pairs.into_iter().flat_map(|(ino, here)| pair(*ino, *here)).collect();
        self.place.write(b"map", &pairs)?;
        self.judged()
    }

    /// Whether a snapshot of that name was made by this stream, when it came before.
    fn made_before(&self, name: &[u8], here: InodeId) -> Result<bool> {
        let after = self.known.coming.as_ref().map_or(0, |coming| coming.after);
        let found = has_snapshot(self.fs(), name)?;
        Ok(found.is_some_and(|(dir, number)| dir == here && number > after))
    }
}

fn pair(ino: InodeId, here: InodeId) -> [u8; PAIR] {
    let mut bytes = [0; PAIR];
    bytes[..8].copy_from_slice(&ino.0.to_le_bytes());
    bytes[8..].copy_from_slice(&here.0.to_le_bytes());
    bytes
}

/// The directory of the snapshot of that name, if there is one, and its number.
fn has_snapshot(fs: &dyn FileSystem, name: &[u8]) -> Result<Option<(InodeId, u64)>> {
    let mut after = 0;
    loop {
        let some = fs.snapshots(after).map_err(|e| failed("listing snapshots", e))?;
        let Some(last) = some.last() else { return Ok(None) };
        after = last.number;
        if let Some(found) = some.iter().find(|one| one.name == name) {
            return Ok(Some((found.dir, found.number)));
        }
    }
}

/// What the first record says.
struct Begin {
    volume: String,
    root: InodeId,
    sent: Sent,
    before: u64,
    from: Position,
    name: Vec<u8>,
}

/// What it would take for a stream that begins so.
fn fits(place: &Place<'_>, begin: &Begin, known: Option<Known>) -> Result<Known> {
    let refuse = |message: String, remedy: String| {
        Err(Failure::failed(format!("{}: {message}", place.path), remedy))
    };
    let name = &begin.sent.name;
    let Some(known) = known else {
        if place.target()?.is_some() {
            return refuse(
                "it is there, and was not made by a receive".into(),
                "give a name that is not taken: the directory is made".into(),
            );
        }
        if begin.before != 0 {
            return refuse(
                format!("{name} was sent with --from, and nothing was received here before"),
                format!("send a snapshot without --from first: corbel send -- {}", quoted(name)),
            );
        }
        if begin.from != Position::default() {
            return refuse(
                "the stream goes on from somewhere, and nothing was received here before".into(),
                "send it without --resume".into(),
            );
        }
        let (volume, root) = (begin.volume.clone(), begin.root);
        let coming = Some(Coming { sent: begin.sent.clone(), at: begin.from, after: 0 });
        return Ok(Known { volume, root, complete: None, coming });
    };
    if (&known.volume, known.root) != (&begin.volume, begin.root) {
        return refuse(
            "the stream is of another volume, or of another directory of it".into(),
            "receive each into a directory of its own".into(),
        );
    }
    if let (Some(Coming { sent: coming, at, .. }), Some(command)) = (&known.coming, known.command())
    {
        if coming.number != begin.sent.number {
            let rest = if known.complete.is_none() {
                format!(", or corbel receive --abort {}", place.path)
            } else {
                String::new()
            };
            return refuse(
                format!("it is between two snapshots: {} has come up to {at}", coming.name),
                format!("go on with that first: {command}{rest}"),
            );
        }
        if begin.from > *at {
            return refuse(
                format!("the stream begins at {}, and it has come up to {at} only", begin.from),
                format!("go on with: {command}"),
            );
        }
    } else if begin.from != Position::default() {
        return refuse(
            "the stream goes on from somewhere, and none of it has come here".into(),
            "send it without --resume".into(),
        );
    }
    let has = known.complete.as_ref().map_or(0, |one| one.number);
    if has == begin.sent.number && known.coming.is_none() {
        return refuse(format!("it is as {name} already"), "there is nothing to receive".into());
    }
    if has != begin.before {
        let complete = known.complete.as_ref().map_or("", |one| one.name.as_str());
        return refuse(
            match has {
                0 => format!("{name} was sent with --from, and nothing was received here before"),
                _ => format!(
                    "it is as {complete}, and the stream changes another snapshot to {name}"
                ),
            },
            match has {
                0 => format!("send it without --from: corbel send -- {}", quoted(name)),
                _ => format!(
                    "send what changed since: corbel send --from={} -- {}",
                    quoted(complete),
                    quoted(name)
                ),
            },
        );
    }
    let known_before = known.coming.clone();
    let coming = known_before.unwrap_or(Coming {
        sent: begin.sent.clone(),
        at: Position::default(),
        after: 0,
    });
    Ok(Known { coming: Some(coming), ..known })
}

/// Makes what lies beside it, or opens it, and keeps others from it. What is there is somebody's who can name any inode in it: so it is
/// root's alone, or refused.
fn open_home(place: &mut Place<'_>) -> Result<(InodeId, InodeId)> {
    let (fs, caller) = (place.fs(), place.volume.caller());
    let making = "making what lies beside it";
    // It lets in whom the directory above lets in, as what is built there will be.
    let home = place.said(making, make_dir(place, place.parent, &home_name(&place.name), 0o755))?;
    place.home = Some(home);
    let attr = place.said(making, fs.getattr(&caller, home))?;
    let lists = place.said(making, fs.listxattr(&caller, home))?;
    let listed = lists.split(|byte| *byte == 0).any(|name| name.starts_with(b"system.posix_acl"));
    let mut roots = attr.uid == 0 && attr.mode & 0o022 == 0 && !listed;
    for (name, ino, _) in place.said(making, place.volume.list(home))? {
        let attr = place.said(making, fs.getattr(&caller, ino))?;
        let file = attr.kind() == S_IFREG && attr.uid == 0 && attr.mode & 0o077 == 0;
        roots &= match &name[..] {
            // What is built may be anybody's.
            b"tree" => attr.is_dir(),
            b"new" => attr.is_dir() && attr.uid == 0 && attr.mode & 0o077 == 0,
            _ => file && attr.nlink == 1,
        };
    }
    if !roots {
        let beside = String::from_utf8_lossy(&home_name(&place.name)).into_owned();
        let message =
            format!("{}: {beside}, which lies beside it, is not root's alone", place.path);
        return Err(Failure::failed(message, "see who put it there, and remove it"));
    }
    // (Open until the process ends.)
    let (lock, _) = place.said("locking it", fs.create(&caller, home, b"lock", 0o600, O_RDWR))?;
    let own = Lock { kind: LockKind::Write, ..Lock::all_of(LockSpace::Flock, 1) };
    match fs.lock(lock.ino, &own, 0) {
        Ok(()) => Ok((home, lock.ino)),
        Err(Errno::AGAIN) => {
            let message = format!("{}: another receive is at work on it", place.path);
            Err(Failure::failed(message, "wait until it has ended"))
        }
        Err(e) => place.said("locking it", Err(e)),
    }
}

fn make_dir(
    place: &Place<'_>,
    parent: InodeId,
    name: &[u8],
    mode: u32,
) -> std::result::Result<InodeId, Errno> {
    let (fs, caller) = (place.fs(), place.volume.caller());
    let node = NewNode { mode: S_IFDIR | mode, rdev: 0, target: b"" };
    match fs.mknod(&caller, parent, name, &node) {
        Err(Errno::EXIST) => fs.lookup(&caller, parent, name).map(|attr| attr.ino),
        Ok(attr) => {
            // Of the directory above: what is made here gets the lists of the stream, and no others.
            for list in [&b"system.posix_acl_default"[..], b"system.posix_acl_access"] {
                match fs.removexattr(&caller, attr.ino, list) {
                    Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                    Err(e) => return Err(e),
                }
            }
            let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
            fs.setattr(&caller, attr.ino, &set)?;
            Ok(attr.ino)
        }
        Err(e) => Err(e),
    }
}

/// Removes all beside it but the lock.
fn empty(place: &Place<'_>, home: InodeId) -> Result<()> {
    let (fs, caller) = (place.fs(), place.volume.caller());
    for (name, ino, kind) in place.said("emptying what lies beside it", place.volume.list(home))? {
        if kind & S_IFMT == S_IFDIR {
            place.remove(home, &name, ino)?;
        } else if name != b"lock" {
            place.said("emptying what lies beside it", fs.unlink(&caller, home, &name))?;
        }
    }
    Ok(())
}

/// Takes up what was received before, or begins.
fn open<'a>(
    mut place: Place<'a>,
    before: &Option<Known>,
    mut known: Known,
) -> Result<Receiver<'a>> {
    let (fs, caller) = (place.fs(), place.volume.caller());
    let (home, lock) = open_home(&mut place)?;
    // Under the lock, since another may have gone on meanwhile.
    if place.known()? != *before {
        let message = format!("{}: another receive has just changed it", place.path);
        return Err(Failure::failed(message, "corbel receive --status says how it is now"));
    }
    if before.is_none() {
        // What is left of one that was given up.
        empty(&place, home)?;
    }
    let new = place.said("making what lies beside it", make_dir(&place, home, b"new", 0o700))?;
    let file = |name: &[u8]| fs.create(&caller, home, name, 0o600, O_RDWR);
    let pairs = place.read(b"map")?.unwrap_or_default();
    let (pairs, _) = pairs.as_chunks::<PAIR>();
    let word =
        |bytes: &[u8]| bytes.try_into().map_or(InodeId::NONE, |b| InodeId(u64::from_le_bytes(b)));
    let mut map: HashMap<_, _> = pairs.iter().map(|p| (word(&p[..8]), word(&p[8..]))).collect();
    // What was made and not noted before a kill.
    let mut unnoted = Vec::new();
    let mut staged = HashSet::new();
    for (name, here, _) in place.said("what has come", place.volume.list(new))? {
        let ino = std::str::from_utf8(&name).ok().and_then(|n| u64::from_str_radix(n, 16).ok());
        let Some(ino) = ino.map(InodeId) else { return Err(place.broken()) };
        if map.insert(ino, here) != Some(here) {
            unnoted.extend_from_slice(&pair(ino, here));
        }
        staged.insert(ino);
    }
    let builds = match fs.lookup(&caller, home, TREE) {
        Ok(attr) => {
            if map.insert(known.root, attr.ino) != Some(attr.ino) {
                unnoted.extend_from_slice(&pair(known.root, attr.ino));
            }
            true
        }
        Err(Errno::NOENT) => before.is_none() || !map.contains_key(&known.root),
        Err(e) => return place.said("what has come", Err(e)),
    };
    // What the path leads to is what was received.
    let target = place.target()?.map(|attr| attr.ino);
    let root = map.get(&known.root).copied();
    if (builds && target.is_some()) || (!builds && target != root) {
        let message = format!("{}: it is not the directory that was received", place.path);
        let remedy = "it was moved, or another took its place: put it back, or receive anew under another name";
        return Err(Failure::failed(message, remedy));
    }
    // Names come into it from beside it, where the same quota counts.
    if let Some(root) = root.filter(|_| !builds) {
        let project = fs.project(&caller, root).unwrap_or(InodeId::NONE);
        if fs.project(&caller, new).unwrap_or(InodeId::NONE) != project {
            place.said("its quota", fs.set_project(&caller, new, project))?;
        }
    }
    let (_, file) = place.said("what is known of it", file(b"map"))?;
    let len = pairs.len() as u64 * PAIR as u64;
    let put = put_all(fs, file, len, &unnoted);
    place.said("what is known of it", put)?;
    let journal = (file, len + unnoted.len() as u64);
    let first = known.complete.is_none();
    let newest = last_snapshot(fs)?;
    if let Some(coming) = known.coming.as_mut().filter(|coming| coming.after == 0) {
        coming.after = newest;
    }
    let position = known.coming.as_ref().map_or(Position::default(), |coming| coming.at);
    let (session, refused, _) = place.said("making it durable", fs.refused())?;
    let mut receiver = Receiver {
        place,
        home,
        new,
        known,
        first,
        map,
        journal,
        staged,
        open: None,
        takes: None,
        bars: None,
        builds,
        lock,
        refused: (session, refused),
        position,
        unnoted: (0, 0),
        content: 0,
        records: 0,
        told: 0,
    };
    receiver.note()?;
    Ok(receiver)
}

/// The highest number of a snapshot here.
fn last_snapshot(fs: &dyn FileSystem) -> Result<u64> {
    let mut after = 0;
    loop {
        let some = fs.snapshots(after).map_err(|e| failed("listing snapshots", e))?;
        let Some(last) = some.last() else { return Ok(after) };
        after = last.number;
    }
}

fn receive(volume: &Volume, args: &ReceiveArgs, from: impl Read, out: &Output) -> Result<()> {
    let place = Place::new(volume, &args.target)?;
    let mut source = Source { from, chain: 0 };
    let cut = |no_more: NoMore, what: &str| match no_more {
        NoMore::Failed(failure) => failure,
        NoMore::Cut => Failure::failed(
            format!("{}: {what}", args.target.display()),
            "see why the sender ended, and send it again",
        ),
    };
    let mut head = [0; HEAD_BYTES];
    source.fill(&mut head).map_err(|e| cut(e, "the stream ends before it begins"))?;
    transfer::check_head(&head).map_err(|e| {
        Failure::new(Kind::Damaged, format!("{e}"), "give what corbel send has written")
    })?;
    let record = source.next().map_err(|e| cut(e, "the stream ends before it begins"))?;
    let Record::Begin { volume: uuid, number, before, root, from, name, .. } = record else {
        let message = "the stream does not begin with what it is of";
        return Err(Failure::new(Kind::Damaged, message, "give what corbel send has written"));
    };
    let text = String::from_utf8_lossy(&name).into_owned();
    let begin = Begin {
        volume: crate::mkfs::show_uuid(&uuid),
        root,
        sent: Sent { number, name: text },
        before,
        from,
        name,
    };
    let before = place.known()?;
    let known = fits(&place, &begin, before.clone())?;
    let going_on = before.as_ref().is_some_and(|known| known.coming.is_some());
    let snapshot = match (&args.snapshot, args.no_snapshot) {
        (_, true) => None,
        (Some(name), _) => Some(name.as_bytes()),
        (None, _) => Some(&begin.name[..]),
    };
    if let Some(name) = snapshot
        && !going_on
        && has_snapshot(place.fs(), name)?.is_some()
    {
        let message = format!("there is a snapshot {} already", String::from_utf8_lossy(name));
        let remedy = "give another name with --snapshot, or --no-snapshot";
        return Err(Failure::failed(message, remedy));
    }
    let mut receiver = open(place, &before, known)?;
    let taken = take_all(&mut receiver, &mut source, out);
    receiver.close();
    let ended = taken.and_then(|()| receiver.end(snapshot));
    if let Err(mut failure) = ended {
        // What has come stays; the caller is told how to go on. (From where all was taken, if something was not.)
        let _ = receiver.known.coming.is_some() && receiver.note().is_ok();
        if let Some(command) = receiver.known.command() {
            failure.remedy = format!("{}; to go on: {command}", failure.remedy);
        }
        return Err(failure);
    }
    let (path, name) = (&receiver.place.path, &begin.sent.name);
    let said = json!({
        "received": name,
        "target": path,
        "records": receiver.records,
        "content_bytes": receiver.content,
        "snapshot": snapshot.map(|name| String::from_utf8_lossy(name)),
        "first": receiver.first,
    });
    out.result(&said, || {
        println!("{path}: as {name} ({} bytes of content received)", receiver.content);
    });
    Ok(())
}

fn take_all<R: Read>(
    receiver: &mut Receiver<'_>,
    source: &mut Source<R>,
    out: &Output,
) -> Result<()> {
    loop {
        match source.next() {
            Ok(Record::End { records }) if records == receiver.records + 1 => return Ok(()),
            Ok(Record::Begin { .. } | Record::End { .. }) => {
                let message =
                    format!("{}: the stream is put together wrongly", receiver.place.path);
                return Err(Failure::new(Kind::Damaged, message, "send it again"));
            }
            Ok(record) => receiver.take(record)?,
            Err(NoMore::Failed(failure)) => return Err(failure),
            Err(NoMore::Cut) => {
                let message = format!("{}: the stream ends in the middle", receiver.place.path);
                return Err(Failure::failed(message, "see why the sender ended"));
            }
        }
        if receiver.content - receiver.told >= TELL {
            receiver.told = receiver.content;
            out.step(format!("{} MiB of content received", receiver.content / MIB));
        }
    }
}

fn status(place: &Place<'_>, out: &Output) -> Result<()> {
    let Some(known) = place.known()? else {
        let message = format!("{}: nothing was received there", place.path);
        return Err(Failure::failed(message, "give the directory that corbel receive was given"));
    };
    let mut said = known.to_json();
    said["target"] = json!(place.path);
    said["resume"] = json!(known.command());
    out.result(&said, || {
        match &known.complete {
            Some(one) if known.coming.is_none() => println!("{}: as {}", place.path, one.name),
            Some(one) => println!("{}: between {} and a later one", place.path, one.name),
            None => println!("{}: not there yet", place.path),
        }
        if let (Some(Coming { sent: one, at, .. }), Some(command)) =
            (&known.coming, known.command())
        {
            println!("{} has come up to {at}; to go on: {command}", one.name);
        }
    });
    Ok(())
}

fn abort(mut place: Place<'_>, out: &Output) -> Result<()> {
    if place.home.is_none() {
        let message = format!("{}: nothing is being received there", place.path);
        return Err(Failure::failed(message, "give the directory that corbel receive was given"));
    }
    let (home, _) = open_home(&mut place)?;
    let known = place.known()?;
    if known.as_ref().is_some_and(|known| known.complete.is_some()) {
        let message = format!("{}: its first stream has come", place.path);
        let remedy = "only a first stream can be given up: go on with the one that was interrupted (corbel receive --status)";
        return Err(Failure::failed(message, remedy));
    }
    let built = place.fs().lookup(&place.volume.caller(), home, TREE).is_ok();
    if known.is_some() && !built && place.target()?.is_some() {
        let message = format!("{}: all of it has come but the end", place.path);
        return Err(Failure::failed(message, "go on with it: corbel receive --status"));
    }
    // First what is known of it: a kill in between leaves what the next one removes.
    let caller = place.volume.caller();
    match place.fs().unlink(&caller, home, b"state") {
        Err(Errno::NOENT) => {}
        gone => place.said("removing it", gone)?,
    }
    empty(&place, home)?;
    place.said("removing it", place.fs().unlink(&caller, home, b"lock"))?;
    let name = home_name(&place.name);
    place.said("removing it", place.fs().rmdir(&caller, place.parent, &name))?;
    place.said("removing it", place.fs().refused())?;
    out.result(&json!({"aborted": place.path}), || {
        println!("{}: what had come of it is removed", place.path);
    });
    Ok(())
}

/// Runs `corbel receive`.
pub fn run(global: &Global, args: &ReceiveArgs, out: &Output) -> Result<()> {
    crate::signals::catch();
    let volume = Volume::open(global, args.socket.as_deref())?;
    if volume.caller().uid != 0 {
        return Err(failed("receiving", Errno::PERM));
    }
    if args.status || args.abort {
        let place = Place::new(&volume, &args.target)?;
        return if args.status { status(&place, out) } else { abort(place, out) };
    }
    match &args.input {
        Some(path) => {
            let file = std::fs::File::open(path).map_err(|e| Failure::io(path.display(), &e))?;
            receive(&volume, args, std::io::BufReader::with_capacity(1 << 20, file), out)
        }
        None => {
            let input = std::io::stdin().lock();
            receive(&volume, args, std::io::BufReader::with_capacity(1 << 20, input), out)
        }
    }
}
