//! What an entry of a log brings about, by the judge's own account: code that shares nothing with the volume.

use std::collections::BTreeMap;

use base::InodeId;
use storage::format::entry::{Op, mask};

use crate::acl;
use crate::actor::quota;
use crate::model::{Body, Model, State, Xattrs};

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFLNK: u32 = 0o120_000;
const KEEP_SIZE: u16 = 1;
const PUNCH_HOLE: u16 = 2;
const ZERO_RANGE: u16 = 16;
/// The attributes that are access control lists.
pub const ACL: &[u8] = b"system.posix_acl_access";
/// What new inodes in a directory inherit.
pub const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// The inodes that an operation reads or changes.
pub fn touched(op: &Op<'_>) -> Vec<u64> {
    let all: &[InodeId] = match *op {
        Op::Create { ino, parent, .. }
        | Op::Tmpfile { ino, parent, .. }
        | Op::Unlink { ino, parent, .. }
        | Op::Rmdir { ino, parent, .. }
        | Op::Link { ino, parent, .. } => &[parent, ino],
        Op::Rename { ino, parent, new_parent, replaced, .. } => {
            &[parent, new_parent, ino, replaced]
        }
        Op::CloneRange { ino, source, .. } => &[ino, source],
        Op::Write { ino, .. }
        | Op::Truncate { ino, .. }
        | Op::Fallocate { ino, .. }
        | Op::Shift { ino, .. }
        | Op::Move { ino, .. }
        | Op::SetAttr { ino, .. }
        | Op::SetXattr { ino, .. }
        | Op::RemoveXattr { ino, .. }
        | Op::SetProject { ino, .. }
        | Op::SetQuota { ino, .. }
        | Op::Place { ino, .. }
        | Op::Reap { ino } => &[ino],
        Op::Pad | Op::Snapshot { .. } | Op::DropSnapshot { .. } => &[],
    };
    all.iter().filter(|ino| **ino != InodeId::NONE).map(|ino| ino.0).collect()
}

struct Work {
    states: BTreeMap<u64, State>,
    changed: Vec<u64>,
    time: u64,
}

impl Work {
    fn get(&mut self, ino: InodeId) -> Result<&mut State, String> {
        self.states.get_mut(&ino.0).ok_or_else(|| format!("there is no inode {ino}"))
    }

    /// The bytes of a file that changes.
    fn bytes(&mut self, ino: InodeId, clear_setid: bool) -> Result<&mut Vec<u8>, String> {
        self.changed.push(ino.0);
        let time = self.time;
        let state = self.get(ino)?;
        state.mtime = time;
        if clear_setid {
            state.clear_setid();
        }
        match &mut state.body {
            Body::File(bytes, _) => Ok(bytes),
            other => Err(format!("inode {ino} is no file but {other:?}")),
        }
    }

    fn put_name(&mut self, dir: InodeId, name: &[u8], ino: Option<InodeId>) -> Result<(), String> {
        self.changed.push(dir.0);
        let time = self.time;
        let state = self.get(dir)?;
        state.mtime = time;
        let Body::Dir(names) = &mut state.body else {
            return Err(format!("inode {dir} is no directory"));
        };
        match ino {
            Some(ino) => names.insert(name.to_vec(), ino.0),
            None => names.remove(name),
        };
        Ok(())
    }

    fn leads(&self, dir: InodeId, name: &[u8]) -> Option<u64> {
        match &self.states.get(&dir.0)?.body {
            Body::Dir(names) => names.get(name).copied(),
            _ => None,
        }
    }

    fn expect(&self, dir: InodeId, name: &[u8], ino: Option<InodeId>) -> Result<(), String> {
        let leads = self.leads(dir, name);
        if leads == ino.map(|ino| ino.0) {
            return Ok(());
        }
        let name = String::from_utf8_lossy(name);
        Err(format!("name {name} of inode {dir} leads to {leads:?}, and not to {ino:?}"))
    }

    fn drop_name(&mut self, ino: InodeId) -> Result<(), String> {
        self.changed.push(ino.0);
        let state = self.get(ino)?;
        match &mut state.body {
            Body::File(_, links) => *links = links.saturating_sub(1),
            Body::Symlink(_, links) if *links > 1 => *links -= 1,
            Body::Dir(names) if !names.is_empty() => {
                return Err(format!("directory {ino} is not empty"));
            }
            _ => *state = State::gone(),
        }
        Ok(())
    }
}

/// What a directory's default list makes of something new.
fn inherit(state: &mut State, list: &[u8]) {
    let mut own = list.to_vec();
    let mode = acl::narrow(&mut own, state.mode);
    state.mode = state.mode & !0o777 | mode;
    let Some(all) = &mut state.xattrs else { return };
    all.insert(ACL.to_vec(), own);
    if matches!(state.body, Body::Dir(_)) {
        all.insert(DEFAULT_ACL.to_vec(), list.to_vec());
    }
}

/// Changes the attributes, if they are known.
fn xattrs(state: &mut State, change: impl FnOnce(&mut Xattrs)) {
    if let Some(all) = &mut state.xattrs {
        change(all);
    }
}

/// The states of the inodes that an operation changes, after it. An error says why it cannot be: then no client that
/// holds its leases would have made it.
pub fn effects(model: &Model, op: &Op<'_>, time: u64) -> Result<Vec<(u64, State)>, String> {
    let states = touched(op).into_iter().filter_map(|i| Some((i, model.current(i)?.clone())));
    let mut w = Work { states: states.collect(), changed: Vec::new(), time };
    match *op {
        Op::Pad | Op::Reap { .. } | Op::Place { .. } => {}
        // What they show is judged at the end: no file changes.
        Op::Snapshot { .. } | Op::DropSnapshot { .. } => {}
        Op::Create { ino, parent, mode, uid, gid, name, target, .. } => {
            w.expect(parent, name, None)?;
            if w.states.get(&ino.0).is_some_and(|s| s.mode != 0) {
                return Err(format!("inode {ino} is there already"));
            }
            let body = match mode & S_IFMT {
                S_IFDIR => Body::Dir(BTreeMap::new()),
                S_IFLNK => Body::Symlink(target.to_vec(), 1),
                _ => Body::File(Vec::new(), 1),
            };
            let mut state = State { gid, ..State::new(mode, uid, time, body) };
            let dir = w.get(parent)?;
            state.project = dir.project;
            if mode & S_IFMT != S_IFLNK {
                let list = dir.xattrs.as_ref().and_then(|all| all.get(DEFAULT_ACL)).cloned();
                list.into_iter().for_each(|list| inherit(&mut state, &list));
            }
            w.states.insert(ino.0, state);
            w.changed.push(ino.0);
            w.put_name(parent, name, Some(ino))?;
        }
        Op::Tmpfile { ino, parent, mode, uid, gid, .. } => {
            let body = Body::File(Vec::new(), 0);
            let mut state = State { gid, ..State::new(mode, uid, time, body) };
            let dir = w.get(parent)?;
            state.project = dir.project;
            let list = dir.xattrs.as_ref().and_then(|all| all.get(DEFAULT_ACL)).cloned();
            list.into_iter().for_each(|list| inherit(&mut state, &list));
            w.states.insert(ino.0, state);
            w.changed.push(ino.0);
        }
        Op::Link { ino, parent, name } => {
            w.expect(parent, name, None)?;
            w.put_name(parent, name, Some(ino))?;
            w.changed.push(ino.0);
            if let Body::File(_, links) | Body::Symlink(_, links) = &mut w.get(ino)?.body {
                *links += 1;
            }
        }
        Op::Unlink { ino, parent, name, .. } | Op::Rmdir { ino, parent, name, .. } => {
            w.expect(parent, name, Some(ino))?;
            w.put_name(parent, name, None)?;
            w.drop_name(ino)?;
        }
        Op::Rename { ino, parent, name, new_parent, new_name, replaced, exchange, .. } => {
            let there = (replaced != InodeId::NONE).then_some(replaced);
            w.expect(parent, name, Some(ino))?;
            w.expect(new_parent, new_name, there)?;
            w.changed.push(ino.0);
            match there {
                Some(other) if exchange => {
                    w.changed.push(other.0);
                    w.put_name(parent, name, there)?;
                }
                _ => {
                    w.put_name(parent, name, None)?;
                    there.map_or(Ok(()), |other| w.drop_name(other))?;
                }
            }
            w.put_name(new_parent, new_name, Some(ino))?;
        }
        Op::Write { ino, offset, data, clear_setid } => {
            let end = offset as usize + data.len();
            w.get(ino)?.written(time, clear_setid);
            w.time = w.get(ino)?.ctime;
            let bytes = w.bytes(ino, false)?;
            bytes.resize(bytes.len().max(end), 0);
            bytes[offset as usize..end].copy_from_slice(data);
        }
        Op::Truncate { ino, size, clear_setid } => {
            w.bytes(ino, clear_setid)?.resize(size as usize, 0);
        }
        Op::Fallocate { ino, offset, len, mode } => {
            let (offset, end) = (offset as usize, (offset + len) as usize);
            let bytes = w.bytes(ino, false)?;
            if mode & KEEP_SIZE == 0 {
                bytes.resize(bytes.len().max(end), 0);
            }
            let end = end.min(bytes.len());
            if mode & (PUNCH_HOLE | ZERO_RANGE) != 0 && offset < end {
                bytes[offset..end].fill(0);
            }
        }
        // Where blocks lie is nothing that anybody sees.
        Op::Move { .. } => {}
        Op::Shift { ino, offset, len, insert, size } => {
            let (offset, len) = (offset as usize, len as usize);
            let bytes = w.bytes(ino, false)?;
            if bytes.len() < offset + if insert { 0 } else { len } {
                return Err(format!("inode {ino} has only {} bytes", bytes.len()));
            }
            if insert {
                bytes.splice(offset..offset, std::iter::repeat_n(0, len));
            } else {
                bytes.drain(offset..offset + len);
            }
            if bytes.len() as u64 != size {
                return Err(format!("inode {ino} has {} bytes then, not {size}", bytes.len()));
            }
        }
        Op::CloneRange { ino, offset, len, source, source_offset, .. } => {
            let from = source_offset as usize;
            let piece = match &w.get(source)?.body {
                Body::File(bytes, _) => bytes.get(from..from + len as usize).map(<[u8]>::to_vec),
                _ => None,
            };
            let piece = piece.ok_or_else(|| format!("inode {source} has no such bytes"))?;
            let end = (offset + len) as usize;
            let bytes = w.bytes(ino, false)?;
            bytes.resize(bytes.len().max(end), 0);
            bytes[offset as usize..end].copy_from_slice(&piece);
        }
        Op::SetAttr { ino, mask, mode, uid, gid, mtime, .. } => {
            w.changed.push(ino.0);
            let state = w.get(ino)?;
            if mask & mask::MODE != 0 {
                state.mode = state.mode & S_IFMT | mode & 0o7777;
                if let Some(list) = state.xattrs.as_mut().and_then(|all| all.get_mut(ACL)) {
                    acl::chmod(list, mode);
                }
            }
            if mask & mask::UID != 0 {
                state.uid = uid;
            }
            if mask & mask::GID != 0 {
                state.gid = gid;
            }
            if mask & mask::MTIME != 0 {
                state.mtime = mtime.nanos();
            }
        }
        Op::SetXattr { ino, name, value } => {
            w.changed.push(ino.0);
            let state = w.get(ino)?;
            if name == ACL {
                state.mode = state.mode & !0o777 | acl::mode_of(value);
            }
            xattrs(state, |all| drop(all.insert(name.to_vec(), value.to_vec())));
        }
        Op::RemoveXattr { ino, name } => {
            w.changed.push(ino.0);
            xattrs(w.get(ino)?, |all| drop(all.remove(name)));
        }
        Op::SetProject { ino, project } => {
            let state = w.get(ino)?;
            if state.project != project.0 {
                state.project = project.0;
                w.changed.push(ino.0);
            }
        }
        Op::SetQuota { ino, user, limit } => {
            let number = user.map_or(quota::of_directory(ino.0), quota::of_user_number);
            w.states.insert(number, quota::state(limit));
            w.changed.push(number);
        }
    }
    w.changed.sort_unstable();
    w.changed.dedup();
    let Work { mut states, changed, time } = w;
    let stamped = changed.into_iter().filter_map(|ino| {
        let mut state = states.remove(&ino)?;
        if state.mode != 0 {
            state.ctime = time;
        }
        Some((ino, state))
    });
    Ok(stamped.collect())
}
