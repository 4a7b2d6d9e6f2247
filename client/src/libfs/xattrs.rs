//! Extended attributes: kept by the service, asked for each time.

use alloc::vec::Vec;

use base::planted::{Bug, planted};
use base::{Errno, InodeId};
use storage::acl::is_acl;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp};
use storage::format::rpc::InodeRecord;
use storage::limits::{XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::host::Host;
use super::inode::State;
use super::permission::{R, W, may, owns};
use super::turn::{Ask, Question, Step, Turn};
use super::{LibFsOn, acl};
use crate::fs::{Caller, Result, S_IFDIR, S_IFREG, XattrMode};

impl<H: Host> LibFsOn<H> {
    /// Does something with an inode that is locked, under a lease.
    pub(super) fn with_state<T>(
        &self,
        ino: InodeId,
        mode: LeaseMode,
        mut then: impl FnMut(&mut Turn<H>, &mut State) -> Step<T, H>,
    ) -> Result<T> {
        let inode = self.inode(ino);
        self.run(|turn| {
            let mut state = inode.state.write();
            self.hold(turn, ino, &mut state, mode, 0)?;
            then(turn, &mut state)
        })
    }

    /// The value of an attribute of an inode that is locked and leased: what it is as long as that lease is held
    /// and nothing else done.
    pub(super) fn xattr_of(
        &self,
        turn: &mut Turn<H>,
        ino: InodeId,
        state: &State,
        name: &[u8],
    ) -> Step<Option<Vec<u8>>, H> {
        let what = Ask::Xattr { ino, name: name.to_vec() };
        match turn.ask(Question { what, after: state.last, lease: state.lease, exact: true }) {
            Ok((value, _)) => Ok(Some(value)),
            Err(super::Stop::Failed(Errno::NODATA)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Whether an inode that is locked and leased has an attribute. Who may not read it may know that.
    fn has_xattr(
        &self,
        turn: &mut Turn<H>,
        caller: &Caller<'_>,
        ino: InodeId,
        state: &State,
        name: &[u8],
    ) -> Step<bool, H> {
        if may(caller, &state.record, R).is_ok() || planted(Bug::ExistenceByValue) {
            return Ok(self.xattr_of(turn, ino, state, name)?.is_some());
        }
        let (what, after, lease) = (Ask::Xattrs { ino }, state.last, state.lease);
        let (names, _) = turn.ask(Question { what, after, lease, exact: true })?;
        Ok(names.split(|b| *b == 0).any(|known| known == name))
    }

    pub(super) fn do_getxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
    ) -> Result<Vec<u8>> {
        self.with_state(ino, LeaseMode::Read, |turn, state| {
            if is_acl(name) {
                return Ok(acl::value(&state.record, name)?);
            }
            xattr_rules(caller, &state.record, name, R)?;
            if !state.record.xattrs {
                return Err(Errno::NODATA.into());
            }
            let what = Ask::Xattr { ino, name: name.to_vec() };
            let (after, lease, exact) = (state.last, state.lease, false);
            turn.ask(Question { what, after, lease, exact }).map(|(value, _)| value)
        })
    }

    pub(super) fn do_listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let names = self.with_state(ino, LeaseMode::Read, |turn, state| {
            if !state.record.xattrs {
                return Ok(Vec::new());
            }
            let (what, after, lease) = (Ask::Xattrs { ino }, state.last, state.lease);
            turn.ask(Question { what, after, lease, exact: false }).map(|(names, _)| names)
        })?;
        Ok(visible_to(caller, names))
    }

    pub(super) fn do_setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: Option<&[u8]>,
        how: XattrMode,
    ) -> Result<()> {
        if name.len() > XATTR_NAME_MAX || name.is_empty() {
            return Err(Errno::RANGE);
        }
        if value.is_some_and(|v| v.len() > XATTR_VALUE_MAX) {
            return Err(Errno::TOOBIG);
        }
        if is_acl(name) {
            return self.set_acl(caller, ino, name, value, how);
        }
        self.with_state(ino, LeaseMode::Write, |turn, state| {
            xattr_rules(caller, &state.record, name, W)?;
            // Plain setting need not know.
            let asks = value.is_none() || how != XattrMode::Set;
            let exists =
                asks && state.record.xattrs && self.has_xattr(turn, caller, ino, state, name)?;
            match how {
                XattrMode::Create if exists => return Err(Errno::EXIST.into()),
                XattrMode::Replace if !exists => return Err(Errno::NODATA.into()),
                _ => {}
            }
            let op = match value {
                Some(value) => Op::SetXattr { ino, name, value },
                None if !exists => return Err(Errno::NODATA.into()),
                None => Op::RemoveXattr { ino, name },
            };
            let now = Self::now(&[&state.record]);
            let place = self.log(turn, ino.0, &[state], &op, now)?;
            state.record.xattrs |= value.is_some();
            state.no_capability = false;
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            Ok(())
        })
    }
}

/// What of a list of names the caller is told.
pub(super) fn visible_to(caller: &Caller<'_>, names: Vec<u8>) -> Vec<u8> {
    if caller.uid == 0 {
        return names;
    }
    let visible = names.split_inclusive(|&b| b == 0).filter(|n| !n.starts_with(b"trusted."));
    visible.flatten().copied().collect()
}

/// Which names of extended attributes exist, and who may touch them (xattr(7)).
pub(super) fn xattr_rules(
    caller: &Caller<'_>,
    r: &InodeRecord,
    name: &[u8],
    what: u32,
) -> Result<()> {
    let named = |may: Result<()>| match name {
        b"user." | b"trusted." | b"security." => may.and(Err(Errno::INVAL)),
        _ => may,
    };
    if name.starts_with(b"user.") {
        let kind = r.mode & crate::fs::S_IFMT;
        if kind != S_IFREG && kind != S_IFDIR {
            return Err(if what == W { Errno::PERM } else { Errno::NODATA });
        }
        if what == W && kind == S_IFDIR && r.mode & 0o1000 != 0 && !owns(caller, r) {
            return Err(Errno::PERM);
        }
        return named(may(caller, r, what));
    }
    if name.starts_with(b"trusted.") {
        return named(match (caller.uid, what) {
            (0, _) => Ok(()),
            (_, W) => Err(Errno::PERM),
            _ => Err(Errno::NODATA),
        });
    }
    if name.starts_with(b"security.") {
        let granted = what != W || caller.uid == 0;
        return named(if granted { Ok(()) } else { Err(Errno::PERM) });
    }
    may(caller, r, what).and(Err(Errno::OPNOTSUPP))
}
