//! Attributes: chmod, chown, utimes, size; quotas.

use alloc::sync::Arc;

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::item::ReadClass;
use storage::format::rpc;

use super::host::Host;
use super::inode::{Inode, State};
use super::permission::{W, may, owns};
use super::{LibFsOn, acl};
use crate::fs::{
    Attr, Caller, Handle, O_ACCMODE, O_RDONLY, Result, S_IFDIR, S_IFMT, S_IFREG, SetAttr, SetTime,
    Time,
};

fn stamp(time: Time) -> Result<Stamp> {
    if time.nsec >= 1_000_000_000 {
        return Err(Errno::INVAL);
    }
    Ok(Stamp { sec: time.sec, nsec: time.nsec })
}

impl<H: Host> LibFsOn<H> {
    pub(super) fn do_setattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        set: &SetAttr,
    ) -> Result<Attr> {
        let inode = self.inode(ino);
        if let Some(size) = set.size {
            self.set_size(caller, &inode, size, set.handle)?;
        }
        if set.mode.is_some()
            || set.uid.is_some()
            || set.gid.is_some()
            || set.atime.is_some()
            || set.mtime.is_some()
        {
            self.set_fields(caller, &inode, set)?;
        }
        self.attr_of_inode(&inode)
    }

    fn set_size(
        &self,
        caller: &Caller<'_>,
        inode: &Arc<Inode<H>>,
        size: u64,
        handle: Option<Handle>,
    ) -> Result<()> {
        if let Some(handle) = handle {
            if self.handle(handle)?.flags & O_ACCMODE == O_RDONLY {
                return Err(Errno::INVAL);
            }
        } else {
            self.with_state(inode.ino, LeaseMode::Read, |_, state| {
                match state.record.mode & S_IFMT {
                    S_IFREG => {}
                    S_IFDIR => return Err(Errno::ISDIR.into()),
                    _ => return Err(Errno::INVAL.into()),
                }
                Ok(may(caller, &state.record, W)?)
            })?;
        }
        self.truncate(inode, size, handle.is_none().then_some(caller))
    }

    fn set_fields(&self, caller: &Caller<'_>, inode: &Arc<Inode<H>>, set: &SetAttr) -> Result<()> {
        let (ino, mut before) = (inode.ino, None);
        let waits = self.with_state(ino, LeaseMode::Write, |turn, state| {
            let now = Self::now(&[&state.record]);
            let change = self.judge(caller, state, set, now)?;
            if change.mask & mask::UID != 0 {
                self.end_capability(turn, ino, state)?;
            }
            Self::count_in(&mut before, turn.session);
            let place = self.log(turn, ino.0, &[state], &change.op(ino), now)?;
            let class = |r: &rpc::InodeRecord| ReadClass::of(r.mode, r.uid, r.gid);
            let (owner, read_by) = (state.record.uid, class(&state.record));
            change.apply(&mut state.record);
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            if change.mask & (mask::MODE | mask::UID | mask::GID) != 0 && !planted(Bug::MovedKept) {
                // Who may read decides in which arena the blocks lie: they may move.
                state.moved(place.sequence);
            }
            // The new owner's quota may bar it, or a full volume that others may read: whoever is told that it is done goes on to give
            // it rights, or secrets.
            let r = &state.record;
            let moves = r.mode & S_IFMT == S_IFREG && r.size > 0 && class(r) != read_by;
            Ok((r.uid != owner || moves).then_some(place.sequence))
        })?;
        match waits.filter(|_| !planted(Bug::OwnerUnsettled)) {
            Some(own) => self.settle_but(inode, before, (own, own)),
            None => Ok(()),
        }
    }

    /// Appends an operation that only the super-user may, and says which it is.
    pub(super) fn change_quota(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        op: &Op<'_>,
        before: &mut Option<(u64, u64)>,
    ) -> Result<Sequence> {
        if caller.uid != 0 {
            return Err(Errno::PERM);
        }
        self.with_state(ino, LeaseMode::Write, |turn, state| {
            let now = Self::now(&[&state.record]);
            Self::count_in(before, turn.session);
            let place = self.log(turn, ino.0, &[state], op, now)?;
            state.last = place.sequence;
            if let Op::SetProject { project, .. } = *op
                && project != state.record.project
            {
                state.record.project = project;
                state.record.ctime = Stamp::from_nanos(now);
            }
            Ok(place.sequence)
        })
    }

    /// Checks the rules of chmod, chown and utimes, and works out absolute results.
    fn judge(&self, caller: &Caller<'_>, state: &State, set: &SetAttr, now: u64) -> Result<Change> {
        let r = &state.record;
        let mut change = Change { mode: r.mode & 0o7777, ..Change::default() };
        if let Some(mode) = set.mode {
            if !owns(caller, r) {
                return Err(Errno::PERM);
            }
            change.mask |= mask::MODE;
            change.mode = mode & 0o7777;
            if caller.uid != 0 && !caller.in_group(r.gid) {
                change.mode &= !0o2000;
            }
        }
        if set.uid.is_some() || set.gid.is_some() {
            let (uid, gid) = (set.uid.unwrap_or(r.uid), set.gid.unwrap_or(r.gid));
            if caller.uid != 0 {
                let keeps_owner = uid == r.uid && caller.uid == r.uid;
                let to_own_group = gid == r.gid || caller.in_group(gid);
                if !keeps_owner || !to_own_group {
                    return Err(Errno::PERM);
                }
            }
            change.mask |= mask::UID | mask::GID;
            (change.uid, change.gid) = (uid, gid);
            let is_dir = r.mode & S_IFMT == S_IFDIR;
            if !is_dir && set.mode.is_none() {
                // As Linux has it: the super-user's too.
                let member = caller.uid == 0 || caller.in_group(r.gid);
                let group = if change.mode & 0o10 != 0 || !member { 0o2000 } else { 0 };
                let cleared = change.mode & !(0o4000 | group);
                if cleared != change.mode {
                    change.mask |= mask::MODE;
                    change.mode = cleared;
                }
            }
        }
        match (set.atime, set.mtime) {
            (None, None) => {}
            _ if owns(caller, r) => {}
            // Who may write sets both to now; one alone only as a change of the size does it.
            (Some(SetTime::Now), Some(SetTime::Now)) => may(caller, r, W)?,
            (None, Some(SetTime::Now)) if set.size.is_some() => may(caller, r, W)?,
            _ => return Err(Errno::PERM),
        }
        for (time, bit) in [(set.atime, mask::ATIME), (set.mtime, mask::MTIME)] {
            let Some(time) = time else { continue };
            let value = match time {
                SetTime::Now => Stamp::from_nanos(now),
                SetTime::At(time) => stamp(time)?,
            };
            change.mask |= bit;
            if bit == mask::ATIME {
                change.atime = value;
            } else {
                change.mtime = value;
            }
        }
        Ok(change)
    }
}

/// Absolute results of a `setattr`.
#[derive(Clone, Copy, Default)]
struct Change {
    mask: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    atime: Stamp,
    mtime: Stamp,
}

impl Change {
    fn op(&self, ino: InodeId) -> Op<'static> {
        let Change { mask, mode, uid, gid, atime, mtime } = *self;
        Op::SetAttr { ino, mask, mode, uid, gid, atime, mtime }
    }

    fn apply(&self, r: &mut rpc::InodeRecord) {
        if self.mask & mask::MODE != 0 {
            r.mode = r.mode & !0o7777 | self.mode;
            acl::chmod(r);
        }
        if self.mask & mask::UID != 0 {
            (r.uid, r.gid) = (self.uid, self.gid);
        }
        if self.mask & mask::ATIME != 0 {
            r.atime = self.atime;
        }
        if self.mask & mask::MTIME != 0 {
            r.mtime = self.mtime;
        }
    }
}
