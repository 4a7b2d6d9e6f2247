//! Attributes, extended attributes, and the `FileSystem` trait itself.

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{Errno, InodeId, Sequence};
use storage::acl::is_acl;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::proof::Proof;
use storage::format::rpc::{self, Account, AccountId, Amount, Request};
use storage::limits::{XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::acl;
use super::inode::{Inode, State};
use super::names::logged;
use super::permission::{R, W, may, owns};
use super::{LibFs, Outcome};
use crate::fs::{
    Attr, Caching, Caller, CopyRange, DirEntry, FileSystem, Handle, Invalidate, Lock, NewNode,
    O_ACCMODE, O_EXCL, O_RDONLY, Rename, Result, S_IFDIR, S_IFREG, SetAttr, SetTime, StatFs, Time,
    Whence, Written, XattrMode,
};

fn stamp(time: Time) -> Result<Stamp> {
    if time.nsec >= 1_000_000_000 {
        return Err(Errno::INVAL);
    }
    Ok(Stamp { sec: time.sec, nsec: time.nsec })
}

impl LibFs {
    fn do_setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
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
        inode: &Arc<Inode>,
        size: u64,
        handle: Option<Handle>,
    ) -> Result<()> {
        if let Some(handle) = handle {
            if self.handle(handle)?.flags & O_ACCMODE == O_RDONLY {
                return Err(Errno::INVAL);
            }
        } else {
            self.repeat(|session| {
                let mut state = inode.state.write();
                self.ensure(session, inode.ino, &mut state, LeaseMode::Read, 0)?;
                match state.record.mode & crate::fs::S_IFMT {
                    S_IFREG => {}
                    S_IFDIR => return Err(Errno::ISDIR),
                    _ => return Err(Errno::INVAL),
                }
                may(caller, &state.record, W)?;
                Ok(Outcome::Done(()))
            })?;
        }
        self.truncate(inode, size)
    }

    fn set_fields(&self, caller: &Caller<'_>, inode: &Arc<Inode>, set: &SetAttr) -> Result<()> {
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, inode.ino, &mut state, LeaseMode::Write, 0)?;
            let now = Self::now(&[&state.record]);
            let change = self.judge(caller, &state, set, now)?;
            if change.mask & mask::UID != 0 {
                logged!(self.end_capability(session, inode.ino, &mut state)?);
            }
            let place =
                logged!(self.log(session, inode.ino.0, &[&state], &change.op(inode.ino), now));
            change.apply(&mut state.record);
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            if change.mask & (mask::MODE | mask::UID | mask::GID) != 0 {
                // Who may read decides in which arena the blocks lie: they may move.
                state.moved(place.sequence);
            }
            Ok(Outcome::Done(()))
        })
    }

    /// Appends an operation that only the super-user may.
    fn change_quota(&self, caller: &Caller<'_>, ino: InodeId, op: &Op<'_>) -> Result<()> {
        if caller.uid != 0 {
            return Err(Errno::PERM);
        }
        self.xattr_state(ino, LeaseMode::Write, |session, state| {
            let now = Self::now(&[&state.record]);
            let place = logged!(self.log(session, ino.0, &[state], op, now));
            state.last = place.sequence;
            if let Op::SetProject { project, .. } = *op {
                state.record.project = project;
                state.record.ctime = Stamp::from_nanos(now);
            }
            Ok(Outcome::Done(()))
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
            let is_file = r.mode & crate::fs::S_IFMT == S_IFREG;
            if is_file && set.mode.is_none() {
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
        for (time, bit) in [(set.atime, mask::ATIME), (set.mtime, mask::MTIME)] {
            let Some(time) = time else { continue };
            let value = match time {
                SetTime::Now => Stamp::from_nanos(now),
                SetTime::At(time) => stamp(time)?,
            };
            if !owns(caller, r) {
                match time {
                    SetTime::Now => may(caller, r, W)?,
                    SetTime::At(_) => return Err(Errno::PERM),
                }
            }
            change.mask |= bit;
            if bit == mask::ATIME {
                change.atime = value;
            } else {
                change.mtime = value;
            }
        }
        Ok(change)
    }

    pub(super) fn xattr_state<T>(
        &self,
        ino: InodeId,
        mode: LeaseMode,
        mut then: impl FnMut(&'static super::Session, &mut State) -> Result<Outcome<T>>,
    ) -> Result<T> {
        let inode = self.inode(ino);
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, ino, &mut state, mode, 0)?;
            then(session, &mut state)
        })
    }

    pub(super) fn xattr_value(
        &self,
        session: &super::Session,
        ino: InodeId,
        after: Sequence,
        name: &[u8],
    ) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        session.call(&Request::XattrGet { ino, name }, after, &mut body)?;
        Ok(body.split_off(8))
    }

    fn do_setxattr(
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
            return Err(Errno::NOSPC);
        }
        if is_acl(name) {
            return self.set_acl(caller, ino, name, value, how);
        }
        self.xattr_state(ino, LeaseMode::Write, |session, state| {
            xattr_rules(caller, state, name, W)?;
            let exists = match self.xattr_value(session, ino, state.last, name) {
                Ok(_) => true,
                Err(Errno::NODATA) => false,
                Err(e) => return Err(e),
            };
            match (how, exists) {
                (XattrMode::Create, true) => return Err(Errno::EXIST),
                (XattrMode::Replace, false) => return Err(Errno::NODATA),
                _ => {}
            }
            let op = match value {
                Some(value) => Op::SetXattr { ino, name, value },
                None if !exists => return Err(Errno::NODATA),
                None => Op::RemoveXattr { ino, name },
            };
            let now = Self::now(&[&state.record]);
            let place = logged!(self.log(session, ino.0, &[state], &op, now));
            state.record.xattrs |= value.is_some();
            state.no_capability = false;
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            Ok(Outcome::Done(()))
        })
    }
}

/// What a quota leaves of a volume.
fn within(whole: StatFs, account: &Account) -> StatFs {
    let part = |limit: u64, used: u64, all: u64, free: u64| {
        if limit == 0 {
            return (all, free);
        }
        let free = free.min(limit.saturating_sub(used));
        (used.saturating_add(free), free)
    };
    let Account { limit, used, .. } = *account;
    let (blocks, blocks_free) = part(limit.blocks, used.blocks, whole.blocks, whole.blocks_free);
    let (inodes, inodes_free) = part(limit.inodes, used.inodes, whole.inodes, whole.inodes_free);
    StatFs { blocks, blocks_free, inodes, inodes_free, ..whole }
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

/// Which names of extended attributes exist, and who may touch them (xattr(7)).
fn xattr_rules(caller: &Caller<'_>, state: &State, name: &[u8], what: u32) -> Result<()> {
    let r = &state.record;
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

impl FileSystem for LibFs {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.do_lookup(caller, parent, name, LeaseMode::Read)
    }

    fn lookup_to_remove(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.do_lookup(caller, parent, name, LeaseMode::Write)
    }

    fn getattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        self.attr_of(ino)
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        self.do_setattr(caller, ino, set)
    }

    fn readlink(&self, _: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        self.do_readlink(ino)
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        self.make(caller, parent, name, node, false).map(|(attr, _)| attr)
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        self.do_remove(caller, parent, name, false)
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        self.do_remove(caller, parent, name, true)
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        self.do_rename(caller, rename)
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        self.do_link(caller, ino, parent, name)
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        self.do_open(caller, ino, flags)
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let node = NewNode { mode: S_IFREG | mode & 0o7777, rdev: 0, target: &[] };
        for _ in 0..super::ATTEMPTS {
            match self.make(caller, parent, name, &node, true) {
                Ok((attr, inode)) => return Ok((attr, self.open_handle(inode, flags))),
                Err(Errno::EXIST) if flags & O_EXCL == 0 => {}
                Err(e) => return Err(e),
            }
            match self.lookup(caller, parent, name) {
                Ok(attr) => match self.do_open(caller, attr.ino, flags) {
                    Ok(handle) => {
                        let attr = self.fgetattr(handle).inspect_err(|_| self.release(handle))?;
                        return Ok((attr, handle));
                    }
                    // Replaced meanwhile.
                    Err(Errno::NOENT | Errno::STALE) => {}
                    Err(e) => return Err(e),
                },
                // Removed meanwhile: make it after all.
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
        }
        Err(Errno::IO)
    }

    fn tmpfile(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let linkable = flags & O_EXCL == 0;
        let (attr, inode) = self.make_nameless(caller, parent, mode, linkable)?;
        Ok((attr, self.open_handle(inode, flags)))
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.do_read(handle, offset, buf)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        self.do_write(handle, offset, data, append)
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.do_fallocate(handle, mode, offset, len)
    }

    fn copy_range(&self, copy: &CopyRange) -> Result<u64> {
        self.do_copy_range(copy)
    }

    fn clone_range(&self, copy: &CopyRange) -> Result<()> {
        self.do_clone_range(copy)
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        self.do_lseek(handle, offset, whence)
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        let open = self.handle(handle)?;
        self.attr_of_inode(&open.inode)
    }

    fn fsync(&self, handle: Handle, _data_only: bool) -> Result<()> {
        let open = self.handle(handle)?;
        self.sync_open(&open)
    }

    fn fsync_inode(&self, _: &Caller<'_>, ino: InodeId) -> Result<()> {
        if ino == InodeId::ROOT {
            let session = self.session()?;
            return self.sync_to(session, session.last());
        }
        let inode = self.inode(ino);
        self.sync_inode(&inode)
    }

    fn flush(&self, handle: Handle) -> Result<()> {
        let open = self.handle(handle)?;
        self.report_refusal_now(&open)
    }

    fn release(&self, handle: Handle) {
        self.do_release(handle);
    }

    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.do_readdir(caller, ino, cookie, each)
    }

    fn caching(&self) -> Caching {
        Caching::Attributes
    }

    fn may_cache_attr(&self, attr: &Attr) -> bool {
        self.may_keep(attr, false)
    }

    fn may_cache_new_attr(&self, attr: &Attr) -> bool {
        self.may_keep(attr, true)
    }

    fn name_cache_ms(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> Option<u32> {
        Some(self.may_keep_name(dir, name, leads_to))
    }

    fn await_names(&self, dir: InodeId) {
        self.do_await_names(dir);
    }

    fn has_cached(&self, ino: InodeId) -> bool {
        self.is_kept(ino)
    }

    fn attach(&self, cache: Arc<dyn Invalidate>) {
        self.do_attach_kernel(cache);
    }

    fn await_recalls(&self) {
        self.do_await_recalls();
    }

    fn keeps_locks(&self) -> bool {
        true
    }

    fn keeps_acls(&self) -> bool {
        true
    }

    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        let inode = self.inode(ino);
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, ino, &mut state, LeaseMode::Read, 0)?;
            may(caller, &state.record, what).map(Outcome::Done)
        })
    }

    fn lock(&self, ino: InodeId, lock: &Lock, wait: u64) -> Result<()> {
        self.do_lock(ino, *lock, wait)
    }

    fn test_lock(&self, ino: InodeId, lock: &Lock) -> Result<Option<Lock>> {
        self.do_test_lock(ino, *lock)
    }

    fn cancel_lock(&self, ino: InodeId, wait: u64) {
        self.do_cancel_lock(ino, wait);
    }

    fn proof(&self, ino: InodeId) -> u64 {
        self.proofs.get(ino).0
    }

    fn prove(&self, ino: InodeId) -> Result<u64> {
        match self.proofs.get(ino) {
            Proof::NONE => self.ask_proof(ino),
            known => Ok(known.0),
        }
    }

    fn vouch(&self, ino: InodeId, proof: u64) {
        self.proofs.vouch(ino, Proof(proof));
    }

    fn lock_event(&self) -> Result<u64> {
        self.do_lock_event()
    }

    fn await_lock_event(&self, seen: u64, limit_ms: u64) {
        self.do_await_lock_event(seen, limit_ms);
    }

    fn statfs_of(&self, ino: InodeId) -> Result<StatFs> {
        let whole = self.statfs()?;
        let project = self.project(&Caller::ROOT, ino)?;
        if project == InodeId::NONE {
            return Ok(whole);
        }
        // The answer begins with the one after.
        let after = match project.0 - 1 {
            0 => AccountId::User(u32::MAX),
            before => AccountId::Directory(InodeId(before)),
        };
        let more = self.repeat(|session| {
            let mut body = Vec::new();
            session.call(&Request::Accounts { after: Some(after) }, session.last(), &mut body)?;
            Ok(Outcome::Done(body))
        })?;
        let mut r = rpc::reply_status(&more).map_err(|_| Errno::IO)?.1;
        let account = if r.left() > 0 { Account::decode(&mut r).ok() } else { None };
        let ours = account.filter(|account| account.id == AccountId::Directory(project));
        Ok(ours.map_or(whole, |account| within(whole, &account)))
    }

    fn accounts(&self, _: &Caller<'_>) -> Result<Vec<Account>> {
        let mut all: Vec<Account> = Vec::new();
        loop {
            let after = all.last().map(|account| account.id);
            let more = self.repeat(|session| {
                let mut body = Vec::new();
                session.call(&Request::Accounts { after }, session.last(), &mut body)?;
                Ok(Outcome::Done(body))
            })?;
            let mut r = rpc::reply_status(&more).map_err(|_| Errno::IO)?.1;
            let before = all.len();
            while r.left() > 0 {
                all.push(Account::decode(&mut r).map_err(|_| Errno::IO)?);
            }
            if all.len() == before {
                return Ok(all);
            }
        }
    }

    fn set_quota(&self, caller: &Caller<'_>, account: AccountId, limit: Amount) -> Result<()> {
        let (ino, user) = match account {
            AccountId::User(0) => return Err(Errno::INVAL),
            AccountId::User(uid) => (InodeId::ROOT, Some(uid)),
            AccountId::Directory(ino) => (ino, None),
        };
        let before = self.refusals();
        self.change_quota(caller, ino, &Op::SetQuota { ino, user, limit })?;
        self.settle_since(&self.inode(ino), before)
    }

    fn set_project(&self, caller: &Caller<'_>, ino: InodeId, project: InodeId) -> Result<()> {
        self.change_quota(caller, ino, &Op::SetProject { ino, project })
    }

    fn project(&self, _: &Caller<'_>, ino: InodeId) -> Result<InodeId> {
        self.xattr_state(ino, LeaseMode::Read, |_, state| Ok(Outcome::Done(state.record.project)))
    }

    fn statfs(&self) -> Result<StatFs> {
        self.repeat(|session| {
            let mut body = Vec::new();
            session.call(&Request::StatFs, session.last(), &mut body)?;
            let mut r = rpc::reply_status(&body).map_err(|_| Errno::IO)?.1;
            let mut read = || -> core::result::Result<StatFs, storage::format::Corrupt> {
                Ok(StatFs {
                    block_bytes: r.u32()?,
                    blocks: r.u64()?,
                    blocks_free: r.u64()?,
                    inodes: r.u64()?,
                    inodes_free: r.u64()?,
                    name_max: storage::limits::NAME_MAX as u32,
                })
            };
            read().map(Outcome::Done).map_err(|_| Errno::IO)
        })
    }

    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.xattr_state(ino, LeaseMode::Read, |session, state| {
            if is_acl(name) {
                return acl::value(&state.record, name).map(Outcome::Done);
            }
            xattr_rules(caller, state, name, R)?;
            if !state.record.xattrs {
                return Err(Errno::NODATA);
            }
            self.xattr_value(session, ino, state.last, name).map(Outcome::Done)
        })
    }

    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let names = self.xattr_state(ino, LeaseMode::Read, |session, state| {
            if !state.record.xattrs {
                return Ok(Outcome::Done(Vec::new()));
            }
            let mut body = Vec::new();
            session.call(&Request::XattrList { ino }, state.last, &mut body)?;
            Ok(Outcome::Done(body.split_off(8)))
        })?;
        if caller.uid == 0 {
            return Ok(names);
        }
        let visible = names.split_inclusive(|&b| b == 0).filter(|n| !n.starts_with(b"trusted."));
        Ok(visible.flatten().copied().collect())
    }

    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        self.do_setxattr(caller, ino, name, Some(value), mode)
    }

    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        self.do_setxattr(caller, ino, name, None, XattrMode::Set)
    }
}
