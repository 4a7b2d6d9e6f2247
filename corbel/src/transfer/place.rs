//! A directory that is received, and what lies beside it.
//!
//! In `.NAME.receive` lies what is known of it (`state`), which inode was made for which of the sender's (`map`), what has no name yet,
//! or has none any more (`new`), and the directory itself as long as its first stream comes (`tree`). All of it is made by one client in one
//! order, so that after a crash there is what was done up to some moment. Whoever could write there could name any inode of the volume: it is
//! root's alone, or refused.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use base::{Errno, InodeId};
use client::fs::{
    Attr, FileSystem, Lock, LockKind, LockSpace, NAME_MAX, NewNode, O_RDONLY, O_RDWR, O_TRUNC,
    Rename, S_IFDIR, S_IFREG, SetAttr, SnapshotRecord,
};
use serde_json::{Value, json};
use storage::format::transfer::Position;

use super::{failed, interrupted};
use crate::copy;
use crate::failure::{Failure, Kind, Result};
use crate::volume::Volume;

/// Name of a directory whose first stream is coming.
pub const TREE: &[u8] = b"tree";

/// A snapshot of the sender's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sent {
    pub number: u64,
    pub name: String,
}

/// A name as a shell takes it, on one line.
pub fn quoted(name: &str) -> String {
    let plain: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    format!("'{}'", plain.replace('\'', "'\\''"))
}

/// A snapshot that is coming.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Coming {
    pub sent: Sent,
    /// Up to where it has come.
    pub at: Position,
    /// Snapshots here had numbers up to this one before.
    pub after: u64,
}

/// What is known of a directory that is received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Known {
    /// Uuid of the sender's volume, in base 16.
    pub volume: String,
    /// The directory there.
    pub root: InodeId,
    /// The one that it is as, if it is.
    pub complete: Option<Sent>,
    /// The one that is coming.
    pub coming: Option<Coming>,
}

impl Known {
    pub fn to_json(&self) -> Value {
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

    pub fn from_json(value: &Value) -> Option<Self> {
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
    pub fn command(&self) -> Option<String> {
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
pub struct Place<'a> {
    pub volume: &'a Volume,
    pub path: String,
    pub parent: InodeId,
    pub name: Vec<u8>,
    /// The directory beside it, if there is one.
    pub home: Option<InodeId>,
}

pub fn home_name(name: &[u8]) -> Vec<u8> {
    [b".", name, b".receive"].concat()
}

impl<'a> Place<'a> {
    pub fn new(volume: &'a Volume, target: &Path) -> Result<Self> {
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

    pub fn fs(&self) -> &'a dyn FileSystem {
        &*self.volume.fs
    }

    pub fn said<T>(&self, what: &str, done: std::result::Result<T, Errno>) -> Result<T> {
        done.map_err(|e| failed(format!("{}: {what}", self.path), e))
    }

    pub fn target(&self) -> Result<Option<Attr>> {
        match self.fs().lookup(&self.volume.caller(), self.parent, &self.name) {
            Err(Errno::NOENT) => Ok(None),
            found => self.said("looking it up", found).map(Some),
        }
    }

    /// All of a file beside it.
    pub fn read(&self, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let (fs, caller) = (self.fs(), self.volume.caller());
        let Some(home) = self.home else { return Ok(None) };
        let read = || {
            let attr = fs.lookup(&caller, home, name)?;
            let file = fs.open(&caller, attr.ino, O_RDONLY)?;
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
    pub fn write(&self, name: &[u8], bytes: &[u8]) -> Result<()> {
        let (fs, caller) = (self.fs(), self.volume.caller());
        let Some(home) = self.home else { return Ok(()) };
        let other = [name, b".tmp"].concat();
        let written = (|| {
            let (_, file) = fs.create(&caller, home, &other, 0o600, O_RDWR | O_TRUNC)?;
            let written = self.volume.write_all(file, 0, bytes);
            fs.release(file);
            written?;
            let (parent, new_parent) = (home, home);
            let rename = Rename { parent, name: &other, new_parent, new_name: name, flags: 0 };
            fs.rename(&caller, &rename)
        })();
        self.said("noting how far it is", written)
    }

    pub fn known(&self) -> Result<Option<Known>> {
        let Some(bytes) = self.read(b"state")? else { return Ok(None) };
        let known = serde_json::from_slice(&bytes).ok().and_then(|v| Known::from_json(&v));
        match known {
            Some(known) => Ok(Some(known)),
            None => Err(self.broken()),
        }
    }

    pub fn snapshots(&self) -> Result<Vec<SnapshotRecord>> {
        self.said("listing snapshots", self.volume.snapshots())
    }

    /// Removes what has a name, with all below it.
    pub fn remove(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        copy::remove(self.volume, parent, name).map_err(|wrong| match wrong.error {
            Errno::INTR => interrupted(),
            e => failed(format!("{}: removing what is gone{}", self.path, wrong.path), e),
        })
    }

    /// Keeps others from it. (A lock ends with a session: it is asked for again and again.)
    pub fn lock(&self, lock: InodeId) -> Result<()> {
        let own = Lock { kind: LockKind::Write, ..Lock::all_of(LockSpace::Flock, 1) };
        match self.fs().lock(lock, &own, 0) {
            Err(Errno::AGAIN) => {
                let message = format!("{}: another receive is at work on it", self.path);
                Err(Failure::failed(message, "wait until it has ended"))
            }
            locked => self.said("locking it", locked),
        }
    }

    pub fn broken(&self) -> Failure {
        let message = format!("{}: what is known of it cannot be read", self.path);
        let remedy =
            "receive it anew into another directory, and remove this one and what lies beside it";
        Failure::new(Kind::Damaged, message, remedy)
    }
}

/// Makes what lies beside it, or opens it, and keeps others from it. What is there is somebody's who can name any inode in it: so it is
/// root's alone, or refused.
pub fn open_home(place: &mut Place<'_>) -> Result<(InodeId, InodeId)> {
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
    place.lock(lock.ino)?;
    Ok((home, lock.ino))
}

pub fn make_dir(
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
pub fn empty(place: &Place<'_>, home: InodeId) -> Result<()> {
    let all = place.said("emptying what lies beside it", place.volume.list(home))?;
    let mut all = all.iter().filter(|(name, ..)| name != b"lock");
    all.try_for_each(|(name, ..)| place.remove(home, name))
}
