//! Takes the records of a stream in.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{
    Attr, FileSystem, Handle, NewNode, O_RDWR, O_WRONLY, Rename, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG,
    SetAttr, SetTime, Time, XattrMode, falloc,
};
use storage::format::entry::Stamp;
use storage::format::transfer::{Attributes, Position, Record};

use super::place::{Known, Place, TREE, empty, make_dir, open_home};
use super::{MIB, failed, stop};
use crate::failure::{Failure, Result};

/// Bytes of content, and records, after which it is noted how far it is.
const NOTE: (u64, u64) = (64 * MIB, 20_000);
/// The attribute that says who else may.
const LIST: &[u8] = b"system.posix_acl_access";
/// How long it may take at the end until what was received lies where it is to stay.
const PLACED: Duration = Duration::from_secs(120);
/// Bytes of a pair in the map.
const PAIR: usize = 16;

/// What takes the records in.
pub struct Receiver<'a> {
    pub place: Place<'a>,
    home: InodeId,
    new: InodeId,
    pub known: Known,
    /// The first stream: the directory is not there yet.
    pub first: bool,
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
    pub content: u64,
    pub records: u64,
    pub told: u64,
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
    pub fn note(&mut self) -> Result<()> {
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
        self.place.lock(self.lock)
    }

    pub fn take(&mut self, record: Record) -> Result<()> {
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
                let put = self.place.volume.write_all(file, offset, &bytes);
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
            Record::Attributes { ino, last, what } => {
                self.takes = None;
                self.attributes(ino, what, last)?;
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
        self.done(ino, self.place.volume.write_all(file, at, &pair(ino, here)))?;
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

    pub fn close(&mut self) {
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
            let mode = if attr.is_dir() { 0o700 } else { 0o600 };
            SetAttr { uid: Some(0), gid: Some(0), mode: Some(mode), ..SetAttr::default() }
        };
        self.done(ino, fs.setattr(&caller, here, &set))?;
        // After the mode, which is a part of it, and would be wider without.
        if has.is_some() && has != list {
            self.done(ino, fs.removexattr(&caller, here, LIST))?;
        }
        Ok(())
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
    pub fn end(&mut self, snapshot: Option<&[u8]>) -> Result<()> {
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
        for (name, ..) in self.place.said("what is gone", self.place.volume.list(self.new))? {
            self.place.remove(self.new, &name)?;
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
        let mut all = self.place.snapshots()?.into_iter();
        Ok(all.any(|one| one.name == name && one.dir == here && one.number > after))
    }
}

fn pair(ino: InodeId, here: InodeId) -> [u8; PAIR] {
    let mut bytes = [0; PAIR];
    bytes[..8].copy_from_slice(&ino.0.to_le_bytes());
    bytes[8..].copy_from_slice(&here.0.to_le_bytes());
    bytes
}

/// Takes up what was received before, or begins.
pub fn open<'a>(
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
    let put = place.volume.write_all(file, len, &unnoted);
    place.said("what is known of it", put)?;
    let journal = (file, len + unnoted.len() as u64);
    let first = known.complete.is_none();
    let newest = place.snapshots()?.last().map_or(0, |last| last.number);
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
