//! Copies of trees that snapshots show, in the volume itself: their content is shared.
//!
//! A file comes to share blocks with one of a snapshot where the same people may read both. So what is made has its owner, mode
//! and access list before its content, also the directories above it; what would stop the work (a directory that nobody may
//! write to, times, what files would inherit) comes at the end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{
    Attr, CopyRange, NewNode, O_EXCL, O_RDONLY, O_RDWR, Rename, S_IFDIR, S_IFLNK, S_IFREG, SetAttr,
    SetTime, XattrMode,
};
use storage::acl;

use crate::output::Output;
use crate::volume::Volume;

/// Bytes that are read at a time where nothing can be shared.
const PIECE: usize = 1 << 20;
/// How often progress is told.
const TOLD: Duration = Duration::from_secs(2);
/// rename: fail if the new name is there.
const NOREPLACE: u32 = 1;
/// rename: both keep a name.
const EXCHANGE: u32 = 2;

/// What went wrong, and where.
#[derive(Debug)]
pub struct Wrong {
    /// Path, from the top of what was copied.
    pub path: String,
    /// What.
    pub error: Errno,
}

/// Something with the path of where it happened.
type Done<T> = std::result::Result<T, Wrong>;

/// What was made.
#[derive(Clone, Copy, Default, Debug)]
pub struct Made {
    /// Directories.
    pub directories: u64,
    /// What is no directory, each once.
    pub files: u64,
    /// Bytes of files whose content was cloned.
    pub shared: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// A directory that is to be filled, or is filled.
struct Open {
    from: Attr,
    to: InodeId,
    path: String,
}

/// See the module.
pub struct Copier<'a> {
    volume: &'a Volume,
    out: &'a Output,
    made: Made,
    /// Of files with several names, where the first came to.
    linked: HashMap<InodeId, InodeId>,
    told: Instant,
}

fn at<T>(path: &str, done: std::result::Result<T, Errno>) -> Done<T> {
    done.map_err(|error| Wrong { path: path.to_string(), error })
}

fn below(path: &str, name: &[u8]) -> String {
    format!("{path}/{}", String::from_utf8_lossy(name))
}

impl<'a> Copier<'a> {
    /// For the user of this command.
    pub fn new(volume: &'a Volume, out: &'a Output) -> Self {
        let (made, linked, told) = (Made::default(), HashMap::new(), Instant::now());
        Self { volume, out, made, linked, told }
    }

    /// Copies what `from` is to a new name, with all below it.
    ///
    /// # Errors
    /// Something cannot be read or made. What was made until then is there.
    pub fn copy(mut self, from: &Attr, parent: InodeId, name: &[u8]) -> Done<Made> {
        let (mut open, mut filled) = (Vec::new(), Vec::new());
        self.node(from, (parent, name), "", &mut open)?;
        while let Some(dir) = open.pop() {
            let names = at(&dir.path, self.volume.list(dir.from.ino))?;
            for (name, _, _) in names {
                let path = below(&dir.path, &name);
                let caller = self.volume.caller();
                let child = at(&path, self.volume.fs.lookup(&caller, dir.from.ino, &name))?;
                self.node(&child, (dir.to, &name), &path, &mut open)?;
            }
            filled.push(dir);
        }
        // From below: nothing is made in it any more.
        for dir in filled.iter().rev() {
            at(&dir.path, self.finish(&dir.from, dir.to))?;
        }
        Ok(self.made)
    }

    /// One inode; a directory is put among those that are to be filled.
    fn node(
        &mut self,
        from: &Attr,
        (parent, name): (InodeId, &[u8]),
        path: &str,
        open: &mut Vec<Open>,
    ) -> Done<()> {
        let (fs, caller) = (&self.volume.fs, self.volume.caller());
        if self.told.elapsed() >= TOLD {
            self.told = Instant::now();
            let Made { directories, files, .. } = self.made;
            self.out.step(format!("  {directories} directories, {files} files"));
        }
        if let Some(first) = self.linked.get(&from.ino) {
            return at(path, fs.link(&caller, *first, parent, name)).map(drop);
        }
        let kind = from.kind();
        let made = if kind == S_IFREG {
            at(path, self.file(from, parent, name))?
        } else {
            let target = match kind {
                S_IFLNK => at(path, fs.readlink(&caller, from.ino))?,
                _ => Vec::new(),
            };
            // Who makes a directory has to come into it.
            let mode = if kind == S_IFDIR { from.mode & !0o7000 | 0o700 } else { from.mode };
            let node = NewNode { mode, rdev: from.rdev, target: &target };
            let made = at(path, fs.mknod(&caller, parent, name, &node))?;
            at(path, self.owned(from, made.ino, mode))?;
            made.ino
        };
        if kind == S_IFDIR {
            self.made.directories += 1;
            open.push(Open { from: *from, to: made, path: path.to_string() });
            return Ok(());
        }
        self.made.files += 1;
        if from.nlink > 1 {
            self.linked.insert(from.ino, made);
        }
        at(path, self.finish(from, made))
    }

    /// A file with its content.
    fn file(
        &mut self,
        from: &Attr,
        parent: InodeId,
        name: &[u8],
    ) -> std::result::Result<InodeId, Errno> {
        let (fs, caller) = (&self.volume.fs, self.volume.caller());
        let source = fs.open(&caller, from.ino, O_RDONLY)?;
        let mode = from.mode & 0o777;
        let made = fs.create(&caller, parent, name, mode, O_RDWR | O_EXCL);
        let done = made.and_then(|(made, to)| {
            let done = self.owned(from, made.ino, mode).and_then(|()| {
                if from.size == 0 {
                    return Ok(());
                }
                let copy = CopyRange { from: source, from_offset: 0, to, to_offset: 0, len: 0 };
                match fs.clone_range(&copy) {
                    Ok(()) => self.made.shared += from.size,
                    Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::ACCES) => {
                        self.bytes(source, to, from.size, made.ino)?;
                        self.made.copied += from.size;
                    }
                    Err(e) => return Err(e),
                }
                Ok(())
            });
            fs.release(to);
            done.map(|()| made.ino)
        });
        fs.release(source);
        done
    }

    /// Copies bytes: where there are zeroes alone there is a hole.
    fn bytes(
        &self,
        from: client::fs::Handle,
        to: client::fs::Handle,
        size: u64,
        ino: InodeId,
    ) -> std::result::Result<(), Errno> {
        let fs = &self.volume.fs;
        let mut piece = vec![0; PIECE];
        let mut offset = 0;
        while offset < size {
            let n = fs.read(from, offset, &mut piece)?;
            if n == 0 {
                break;
            }
            for (i, block) in piece[..n].chunks(storage::limits::BLOCK_BYTES as usize).enumerate() {
                let begin = offset + i as u64 * storage::limits::BLOCK_BYTES;
                if block.iter().any(|byte| *byte != 0) {
                    self.volume.write_all(to, begin, block)?;
                }
            }
            offset += n as u64;
        }
        let set = SetAttr { size: Some(size), handle: Some(to), ..SetAttr::default() };
        fs.setattr(&self.volume.caller(), ino, &set).map(drop)
    }

    /// Gives what is new its owner and access list, so that the same people may read it. Nobody but the super-user gives it
    /// another owner: it then belongs to who copies.
    fn owned(&self, from: &Attr, to: InodeId, mode: u32) -> std::result::Result<(), Errno> {
        let (fs, caller) = (&self.volume.fs, self.volume.caller());
        let now = fs.getattr(&caller, to)?;
        if caller.uid == 0 && (now.uid, now.gid) != (from.uid, from.gid) {
            let (uid, gid) = (Some(from.uid), Some(from.gid));
            fs.setattr(&caller, to, &SetAttr { uid, gid, ..SetAttr::default() })?;
        } else if now.gid != from.gid && now.uid == caller.uid {
            // A group that he is in.
            let set = SetAttr { gid: Some(from.gid), ..SetAttr::default() };
            match fs.setattr(&caller, to, &set) {
                Ok(_) | Err(Errno::PERM) => {}
                Err(e) => return Err(e),
            }
        }
        if from.kind() == S_IFLNK {
            return Ok(());
        }
        if fs.keeps_acls() {
            if from.is_dir() {
                // What is made in it inherits nothing now.
                self.list(None, to, acl::DEFAULT)?;
            }
            self.list(self.value(from.ino, acl::ACCESS)?, to, acl::ACCESS)?;
        }
        if fs.getattr(&caller, to)?.mode & 0o7777 != mode & 0o7777 {
            let set = SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() };
            fs.setattr(&caller, to, &set)?;
        }
        Ok(())
    }

    fn value(&self, ino: InodeId, name: &[u8]) -> std::result::Result<Option<Vec<u8>>, Errno> {
        match self.volume.fs.getxattr(&self.volume.caller(), ino, name) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sets an access list, or takes it away.
    fn list(
        &self,
        value: Option<Vec<u8>>,
        to: InodeId,
        name: &[u8],
    ) -> std::result::Result<(), Errno> {
        let (fs, caller) = (&self.volume.fs, self.volume.caller());
        match value {
            Some(value) => fs.setxattr(&caller, to, name, &value, XattrMode::Set),
            None => match fs.removexattr(&caller, to, name) {
                Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
                done => done,
            },
        }
    }

    /// What comes last: attributes, what is inherited, the mode as it was, and the times.
    fn finish(&self, from: &Attr, to: InodeId) -> std::result::Result<(), Errno> {
        let (fs, caller) = (&self.volume.fs, self.volume.caller());
        for name in fs.listxattr(&caller, from.ino)?.split(|byte| *byte == 0) {
            if name.is_empty() || acl::is_acl(name) {
                continue;
            }
            let Some(value) = self.value(from.ino, name)? else { continue };
            match fs.setxattr(&caller, to, name, &value, XattrMode::Set) {
                // Those that only the super-user gives.
                Err(Errno::PERM) if caller.uid != 0 => {}
                done => done?,
            }
        }
        if from.is_dir() && fs.keeps_acls() {
            let default = self.value(from.ino, acl::DEFAULT)?;
            self.list(default, to, acl::DEFAULT)?;
        }
        let now = fs.getattr(&caller, to)?;
        let mut set = SetAttr {
            atime: Some(SetTime::At(from.atime)),
            mtime: Some(SetTime::At(from.mtime)),
            ..SetAttr::default()
        };
        // Nobody gets the rights of another owner by a copy.
        let same = (now.uid, now.gid) == (from.uid, from.gid);
        let mode = from.mode & if same { 0o7777 } else { 0o1777 };
        if from.kind() != S_IFLNK && now.mode & 0o7777 != mode {
            fs.setattr(&caller, to, &SetAttr { mode: Some(mode), ..SetAttr::default() })?;
        }
        set.mode = None;
        fs.setattr(&caller, to, &set).map(drop)
    }
}

/// Removes what has a name, with all below it, until a signal says otherwise.
///
/// # Errors
/// Something cannot be removed.
pub fn remove(volume: &Volume, parent: InodeId, name: &[u8]) -> Done<()> {
    let caller = volume.caller();
    let found = at("", volume.fs.lookup(&caller, parent, name))?;
    if !found.is_dir() {
        return at("", volume.fs.unlink(&caller, parent, name));
    }
    // Directories, each before those in it.
    let mut dirs = vec![(parent, name.to_vec(), found.ino, String::new())];
    let mut next = 0;
    while let Some((_, _, dir, path)) = dirs.get(next).cloned() {
        next += 1;
        if crate::signals::pending().is_some() {
            return Err(Wrong { path, error: Errno::INTR });
        }
        // Who owns it may, whatever its mode says. (Nothing is changed in vain: whom it lets in is noted in all that is below.)
        let mode = at(&path, volume.fs.getattr(&caller, dir))?.mode;
        if caller.uid != 0 && mode & 0o700 != 0o700 {
            let set = SetAttr { mode: Some(mode & 0o7777 | 0o700), ..SetAttr::default() };
            at(&path, volume.fs.setattr(&caller, dir, &set))?;
        }
        for (name, ino, kind) in at(&path, volume.list(dir))? {
            let path = below(&path, &name);
            if kind == S_IFDIR {
                dirs.push((dir, name, ino, path));
            } else {
                at(&path, volume.fs.unlink(&caller, dir, &name))?;
            }
        }
    }
    for (parent, name, _, path) in dirs.iter().rev() {
        at(path, volume.fs.rmdir(&caller, *parent, name))?;
    }
    Ok(())
}

/// Gives what is complete its name; what had it gets the other one, if it is to be replaced.
///
/// # Errors
/// EEXIST: the name is there.
pub fn put(
    volume: &Volume,
    parent: InodeId,
    (name, new_name): (&[u8], &[u8]),
    replace: bool,
) -> std::result::Result<(), Errno> {
    let flags = if replace { EXCHANGE } else { NOREPLACE };
    let rename = Rename { parent, name, new_parent: parent, new_name, flags };
    volume.fs.rename(&volume.caller(), &rename)
}
