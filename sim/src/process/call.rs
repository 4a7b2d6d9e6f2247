//! What a thread of a process does: calls of the `FileSystem` trait, and what they give.

use super::host::from_shared_memory;
use crate::rights::Who;
use base::{Errno, InodeId};
use client::fs::{
    AccountId, Amount, Attr, Caller, CopyRange, FileSystem, Handle, Lock, NewNode, Rename, SetAttr,
    Whence, Written, XattrMode,
};

/// What a thread is to do: a call, for whom, and how it comes to what it names.
#[derive(Clone, Debug)]
pub struct Task {
    /// The call.
    pub call: Call,
    /// On whose behalf.
    pub who: Who,
    /// What new files shall not be allowed.
    pub umask: u32,
    /// Names to look up before, from the root: who is bound may ask only about what it was shown.
    pub paths: Vec<Vec<Step>>,
}

/// A directory, a name in it, and the inode to which it should lead.
pub type Step = (u64, Vec<u8>, u64);

/// A name that was looked up on the way.
pub type Walked = (u64, Vec<u8>, Result<u64, Errno>);

impl Task {
    /// Looks up the names, and then makes the call. What a process was shown may be forgotten by then: it is looked up
    /// again, as programs do.
    pub fn perform<F: FileSystem + ?Sized>(&self, fs: &F) -> (Reply, Vec<Walked>) {
        let Who { uid, gid, groups } = self.who;
        let caller = Caller { uid, gid, groups, pid: 1, umask: self.umask };
        let mut walked = Vec::new();
        'walk: for walk in 1..=WALKS {
            for (dir, name, ino) in self.paths.iter().flatten() {
                let found = fs.lookup_through(&caller, InodeId(*dir), name).map(|attr| attr.ino.0);
                if found == Err(Errno::STALE) && walk < WALKS {
                    continue 'walk;
                }
                walked.push((*dir, name.clone(), found));
                if found != Ok(*ino) {
                    return (Ok(Value::Astray), walked);
                }
            }
            let reply = perform(fs, &caller, &self.call);
            let names = self.paths.iter().any(|path| !path.is_empty());
            if !names || walk == WALKS || !matches!(reply, Err(Errno::STALE)) {
                return (reply, walked);
            }
        }
        (Ok(Value::Astray), walked)
    }
}

/// So often it asks for a lock for which it waits ...
const LOCK_TURNS: u32 = 4;
/// ... and so long it waits to be told, each time.
const LOCK_WAIT_MS: u64 = 20;

/// So often it walks: threads make each other forget.
const WALKS: usize = 20;

/// A call.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Call {
    Lookup { dir: u64, name: Vec<u8> },
    Getattr { ino: u64 },
    Fgetattr { handle: Handle, ino: u64 },
    Readlink { ino: u64 },
    Readdir { dir: u64 },
    Make { dir: u64, name: Vec<u8>, mode: u32, target: Vec<u8> },
    Create { dir: u64, name: Vec<u8>, mode: u32, flags: u32 },
    Tmpfile { dir: u64 },
    Open { ino: u64, flags: u32 },
    OpenDir { ino: u64, what: u32 },
    Release { handle: Handle, ino: u64 },
    Lock { ino: u64, lock: Lock, wait: bool },
    TestLock { ino: u64, lock: Lock },
    Inherit,
    Read { handle: Handle, ino: u64, offset: u64, len: usize },
    Write { handle: Handle, ino: u64, offset: u64, data: Vec<u8>, append: bool, shared: bool },
    Truncate { ino: u64, size: u64 },
    Allocate { handle: Handle, ino: u64, mode: u32, offset: u64, len: u64 },
    Clone { from: (Handle, u64, u64), to: (Handle, u64, u64), len: u64 },
    SetAttr { ino: u64, set: SetAttr },
    SetXattr { ino: u64, name: &'static [u8], value: Option<Vec<u8>>, how: XattrMode },
    GetXattr { ino: u64, name: &'static [u8] },
    ListXattr { ino: u64 },
    Remove { dir: u64, name: Vec<u8>, is_dir: bool },
    Rename { dir: u64, name: Vec<u8>, dir2: u64, name2: Vec<u8>, flags: u32 },
    Link { ino: u64, dir: u64, name: Vec<u8> },
    Seek { handle: Handle, ino: u64, offset: u64, data: bool },
    SetProject { ino: u64, project: u64 },
    SetQuota { ino: u64, user: Option<u32>, limit: Amount },
    Project { ino: u64 },
    Statfs,
    Fsync { handle: Handle, ino: u64 },
    FsyncInode { ino: u64 },
    SyncAll,
}

impl Call {
    /// In few words.
    pub fn brief(&self) -> String {
        match self {
            Self::Write { ino, offset, data, append, .. } => {
                let how = if *append { "append" } else { "write" };
                format!("{how} {ino} {offset}+{}", data.len())
            }
            Self::SetXattr { ino, name, value, how } => {
                let name = String::from_utf8_lossy(name);
                format!("setxattr {ino} {name} {:?} {how:?}", value.as_ref().map(Vec::len))
            }
            Self::Release { ino, .. } => format!("close {ino}"),
            other => format!("{other:?}"),
        }
    }
}

impl Call {
    /// The inodes that it names by number, and not by what is open.
    pub fn named(&self) -> Vec<u64> {
        match self {
            Self::Fgetattr { .. }
            | Self::Release { .. }
            | Self::Lock { .. }
            | Self::TestLock { .. }
            | Self::Read { .. }
            | Self::Write { .. }
            | Self::Allocate { .. }
            | Self::Clone { .. }
            | Self::Seek { .. }
            | Self::Fsync { .. } => Vec::new(),
            _ => self.inodes(),
        }
    }

    /// The inodes that it names.
    pub fn inodes(&self) -> Vec<u64> {
        match self {
            Self::Lookup { dir, .. }
            | Self::Readdir { dir }
            | Self::Make { dir, .. }
            | Self::Create { dir, .. }
            | Self::Tmpfile { dir }
            | Self::Remove { dir, .. } => vec![*dir],
            Self::Rename { dir, dir2, .. } => vec![*dir, *dir2],
            Self::Link { ino, dir, .. } => vec![*ino, *dir],
            Self::Clone { from, to, .. } => vec![from.1, to.1],
            Self::Getattr { ino }
            | Self::Fgetattr { ino, .. }
            | Self::Readlink { ino }
            | Self::Open { ino, .. }
            | Self::OpenDir { ino, .. }
            | Self::Lock { ino, .. }
            | Self::TestLock { ino, .. }
            | Self::Release { ino, .. }
            | Self::Read { ino, .. }
            | Self::Write { ino, .. }
            | Self::Truncate { ino, .. }
            | Self::Allocate { ino, .. }
            | Self::SetAttr { ino, .. }
            | Self::SetXattr { ino, .. }
            | Self::GetXattr { ino, .. }
            | Self::ListXattr { ino }
            | Self::Seek { ino, .. }
            | Self::SetProject { ino, .. }
            | Self::SetQuota { ino, .. }
            | Self::Project { ino }
            | Self::Fsync { ino, .. }
            | Self::FsyncInode { ino } => vec![*ino],
            Self::Statfs | Self::SyncAll | Self::Inherit => Vec::new(),
        }
    }
}

/// What it gives.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Value {
    Nothing,
    /// What the call is about was not where it was: it was not made.
    Astray,
    Attr(Attr),
    Opened(Handle),
    Made(Attr, Handle),
    Bytes(Vec<u8>),
    Written(Written),
    Number(u64),
    /// Names and what they lead to.
    Names(Vec<(Vec<u8>, u64)>),
    /// A lock that bars one, if there is one.
    Barring(Option<Lock>),
}

/// What became of a call.
pub type Reply = Result<Value, Errno>;

/// Carries it out, as somebody.
pub fn perform<F: FileSystem + ?Sized>(fs: &F, caller: &Caller<'_>, call: &Call) -> Reply {
    let ino = InodeId;
    Ok(match call {
        Call::Lookup { dir, name } => Value::Attr(fs.lookup(caller, ino(*dir), name)?),
        Call::Getattr { ino: at } => Value::Attr(fs.getattr(caller, ino(*at))?),
        Call::Fgetattr { handle, .. } => Value::Attr(fs.fgetattr(*handle)?),
        Call::Readlink { ino: at } => Value::Bytes(fs.readlink(caller, ino(*at))?),
        Call::Readdir { dir } => {
            let mut names = Vec::new();
            fs.readdir(caller, ino(*dir), 0, &mut |entry| {
                if entry.name != b"." && entry.name != b".." {
                    names.push((entry.name.to_vec(), entry.ino.0));
                }
                true
            })?;
            Value::Names(names)
        }
        Call::Make { dir, name, mode, target } => {
            let node = NewNode { mode: *mode, rdev: 0, target };
            Value::Attr(fs.mknod(caller, ino(*dir), name, &node)?)
        }
        Call::Create { dir, name, mode, flags } => {
            let (attr, handle) = fs.create(caller, ino(*dir), name, *mode, *flags)?;
            Value::Made(attr, handle)
        }
        Call::Tmpfile { dir } => {
            let (attr, handle) = fs.tmpfile(caller, ino(*dir), 0o644, client::fs::O_RDWR)?;
            Value::Made(attr, handle)
        }
        Call::Open { ino: at, flags } => Value::Opened(fs.open(caller, ino(*at), *flags)?),
        Call::OpenDir { ino: at, what } => Value::Opened(fs.open_dir(caller, ino(*at), *what)?),
        Call::Lock { ino: at, lock, wait } => {
            let number = if *wait { lock.owner } else { 0 };
            let mut turns = if *wait { LOCK_TURNS } else { 1 };
            loop {
                let seen = if *wait { fs.lock_event()? } else { 0 };
                turns -= 1;
                match fs.lock(ino(*at), lock, number) {
                    Err(Errno::AGAIN) if turns > 0 => fs.await_lock_event(seen, LOCK_WAIT_MS),
                    Err(Errno::AGAIN) if *wait => {
                        fs.cancel_lock(ino(*at), number);
                        return Err(Errno::AGAIN);
                    }
                    done => break done?,
                }
            }
            Value::Nothing
        }
        Call::TestLock { ino: at, lock } => Value::Barring(fs.test_lock(ino(*at), lock)?),
        Call::Inherit => {
            fs.inherit(None)?;
            Value::Nothing
        }
        Call::Release { handle, .. } => {
            fs.release(*handle);
            Value::Nothing
        }
        Call::Read { handle, offset, len, .. } => {
            let mut bytes = vec![0xee; *len];
            let read = fs.read(*handle, *offset, &mut bytes)?;
            bytes.truncate(read);
            Value::Bytes(bytes)
        }
        Call::Write { handle, offset, data, append, shared, .. } => {
            let write = || fs.write(*handle, *offset, data, *append);
            Value::Written(from_shared_memory(*shared, write)?)
        }
        Call::Truncate { ino: at, size } => {
            let set = SetAttr { size: Some(*size), ..SetAttr::default() };
            Value::Attr(fs.setattr(caller, ino(*at), &set)?)
        }
        Call::Allocate { handle, mode, offset, len, .. } => {
            fs.fallocate(*handle, *mode, *offset, *len)?;
            Value::Nothing
        }
        Call::Clone { from, to, len } => {
            let (from_offset, to_offset) = (from.2, to.2);
            let copy = CopyRange { from: from.0, from_offset, to: to.0, to_offset, len: *len };
            fs.clone_range(&copy)?;
            Value::Nothing
        }
        Call::SetAttr { ino: at, set } => Value::Attr(fs.setattr(caller, ino(*at), set)?),
        Call::SetXattr { ino: at, name, value: Some(value), how } => {
            fs.setxattr(caller, ino(*at), name, value, *how)?;
            Value::Nothing
        }
        Call::SetXattr { ino: at, name, value: None, .. } => {
            fs.removexattr(caller, ino(*at), name)?;
            Value::Nothing
        }
        Call::GetXattr { ino: at, name } => Value::Bytes(fs.getxattr(caller, ino(*at), name)?),
        Call::ListXattr { ino: at } => Value::Bytes(fs.listxattr(caller, ino(*at))?),
        Call::Remove { dir, name, is_dir } => {
            if *is_dir {
                fs.rmdir(caller, ino(*dir), name)?;
            } else {
                fs.unlink(caller, ino(*dir), name)?;
            }
            Value::Nothing
        }
        Call::Rename { dir, name, dir2, name2, flags } => {
            let (parent, new_parent) = (ino(*dir), ino(*dir2));
            let rename = Rename { parent, name, new_parent, new_name: name2, flags: *flags };
            fs.rename(caller, &rename)?;
            Value::Nothing
        }
        Call::Link { ino: at, dir, name } => {
            Value::Attr(fs.link(caller, ino(*at), ino(*dir), name)?)
        }
        Call::Seek { handle, offset, data, .. } => {
            let whence = if *data { Whence::Data } else { Whence::Hole };
            Value::Number(fs.lseek(*handle, *offset, whence)?)
        }
        Call::SetProject { ino: at, project } => {
            fs.set_project(caller, ino(*at), ino(*project))?;
            Value::Nothing
        }
        Call::SetQuota { ino: at, user, limit } => {
            let account = user.map_or(AccountId::Directory(ino(*at)), AccountId::User);
            fs.set_quota(caller, account, *limit)?;
            Value::Nothing
        }
        Call::Project { ino: at } => Value::Number(fs.project(caller, ino(*at))?.0),
        Call::Statfs => {
            fs.statfs()?;
            Value::Nothing
        }
        Call::Fsync { handle, .. } => {
            fs.fsync(*handle, false)?;
            Value::Nothing
        }
        Call::FsyncInode { ino: at } => {
            fs.fsync_inode(caller, ino(*at))?;
            Value::Nothing
        }
        Call::SyncAll => {
            fs.fsync_inode(caller, InodeId::ROOT)?;
            Value::Nothing
        }
    })
}
