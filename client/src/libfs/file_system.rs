//! LibFS as a [`FileSystem`].

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{Errno, InodeId};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Account, AccountId, Amount, Request, SnapshotRecord};
use storage::format::{page::Key, rpc::Differences};

use super::LibFsOn;
use super::host::Host;
use super::permission::may;
use super::snapshot::{KNOWN_MS, is_in_one, writable};
use crate::fs::{
    Attr, Caching, Caller, CopyRange, DirEntry, FileSystem, Handle, Invalidate, Lock, NewNode,
    O_EXCL, Rename, Result, S_IFREG, SetAttr, StatFs, Waiting, Whence, Written, XattrMode,
};

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

impl<H: Host> FileSystem for LibFsOn<H> {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        if is_in_one(parent) {
            return self.snapshot_lookup(caller, parent, name);
        }
        self.do_lookup(caller, parent, name, LeaseMode::Read)
    }

    fn lookup_to_remove(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        if is_in_one(parent) {
            return self.snapshot_lookup(caller, parent, name);
        }
        self.do_lookup(caller, parent, name, LeaseMode::Write)
    }

    fn lookup_through(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        if is_in_one(parent) {
            return self.snapshot_lookup(caller, parent, name);
        }
        self.do_lookup_through(caller, parent, name)
    }

    fn lookup_to_make(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        if is_in_one(parent) {
            return self.snapshot_lookup(caller, parent, name);
        }
        self.do_lookup_to_make(caller, parent, name)
    }

    fn getattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        if is_in_one(ino) { self.snapshot_attr(ino) } else { self.attr_of(ino) }
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        writable(&[ino])?;
        self.do_setattr(caller, ino, set)
    }

    fn readlink(&self, _: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        if is_in_one(ino) { self.snapshot_readlink(ino) } else { self.do_readlink(ino) }
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        writable(&[parent])?;
        self.make(caller, parent, name, node, false).map(|(attr, _)| attr)
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        writable(&[parent])?;
        self.do_remove(caller, parent, name, false)
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        writable(&[parent])?;
        self.do_remove(caller, parent, name, true)
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        writable(&[rename.parent, rename.new_parent])?;
        self.do_rename(caller, rename)
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        writable(&[ino, parent])?;
        self.do_link(caller, ino, parent, name)
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        if is_in_one(ino) {
            return self.snapshot_open(caller, ino, flags);
        }
        self.do_open(caller, ino, flags)
    }

    fn open_dir(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<Handle> {
        if is_in_one(ino) {
            return self.snapshot_open_dir(caller, ino, what);
        }
        self.do_open_dir(caller, ino, what)
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        writable(&[parent])?;
        let node = NewNode { mode: S_IFREG | mode & 0o7777, rdev: 0, target: &[] };
        for _ in 0..self.config.limits.attempts {
            match self.make(caller, parent, name, &node, true) {
                Ok((attr, inode)) => return Ok((attr, self.open_handle(inode, flags))),
                Err(Errno::EXIST) if flags & O_EXCL == 0 => {}
                Err(e) => return Err(e),
            }
            match self.lookup(caller, parent, name) {
                Ok(attr) => match self.do_open(caller, attr.ino, flags) {
                    Ok(handle) => match self.fgetattr(handle) {
                        Ok(attr) => return Ok((attr, handle)),
                        // Gone before nicfs heard that it is open here.
                        Err(Errno::NOENT | Errno::STALE) => self.release(handle),
                        Err(e) => {
                            self.release(handle);
                            return Err(e);
                        }
                    },
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
        writable(&[parent])?;
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

    fn write_back(&self, handle: Handle, offset: u64, data: &[u8]) -> Result<Written> {
        self.do_write_back(handle, offset, data)
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
        let ino = open.inode.ino;
        if is_in_one(ino) { self.snapshot_attr(ino) } else { self.attr_of_inode(&open.inode) }
    }

    fn waiting(&self) -> Waiting {
        Waiting::Together
    }

    fn expect_fsync(&self, handle: Handle) {
        if let Ok(open) = self.handle(handle)
            && !is_in_one(open.inode.ino)
        {
            self.begin_sync(&open.inode);
        }
    }

    fn fsync(&self, handle: Handle, _data_only: bool) -> Result<()> {
        let open = self.handle(handle)?;
        if is_in_one(open.inode.ino) { Ok(()) } else { self.sync_open(&open) }
    }

    fn fsync_inode(&self, _: &Caller<'_>, ino: InodeId) -> Result<()> {
        match ino {
            InodeId::ROOT => self.sync_all(),
            _ if is_in_one(ino) => Ok(()),
            _ => self.sync_inode(&self.inode(ino), None),
        }
    }

    fn refused(&self) -> Result<(u64, u64, Errno)> {
        self.sync_all()?;
        let session = self.session()?;
        let count = session.refusals();
        let why = if count == 0 { Errno(0) } else { session.refusal() };
        Ok((session.number, count, why))
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
        if is_in_one(ino) {
            return self.snapshot_readdir(caller, ino, cookie, each);
        }
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
        if is_in_one(dir) {
            return Some(KNOWN_MS as u32);
        }
        Some(self.may_keep_name(dir, name, leads_to))
    }

    fn await_names(&self, dir: InodeId) {
        self.do_await_names(dir);
    }

    fn has_cached(&self, ino: InodeId) -> bool {
        self.is_kept(ino)
    }

    fn begun_by(&self) -> Option<u32> {
        self.current().map(|session| session.user())
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        self.do_forget(ino, told);
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

    fn inherit(&self, secret: Option<u128>) -> Result<()> {
        self.do_inherit(secret)
    }

    fn leave(&self, secret: Option<u128>) -> Result<bool> {
        self.do_leave(secret).map(|()| true)
    }

    fn keeps_acls(&self) -> bool {
        true
    }

    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        if is_in_one(ino) {
            return self.snapshot_access(caller, ino, what);
        }
        self.with_state(ino, LeaseMode::Read, |_, state| Ok(may(caller, &state.record, what)?))
    }

    fn lock(&self, ino: InodeId, lock: &Lock, wait: u64) -> Result<()> {
        if is_in_one(ino) { self.snapshot_lock(ino, lock) } else { self.do_lock(ino, *lock, wait) }
    }

    fn test_lock(&self, ino: InodeId, lock: &Lock) -> Result<Option<Lock>> {
        if is_in_one(ino) { Ok(None) } else { self.do_test_lock(ino, *lock) }
    }

    fn cancel_lock(&self, ino: InodeId, wait: u64) {
        if !is_in_one(ino) {
            self.do_cancel_lock(ino, wait);
        }
    }

    fn proof(&self, ino: InodeId) -> u64 {
        self.proofs.get(ino).0
    }

    fn before_vfork(&self) {
        self.begin_if_ended();
    }

    fn prove(&self, ino: InodeId) -> Result<u64> {
        match self.proofs.get(ino) {
            Proof::NONE if is_in_one(ino) => self.snapshot_proof(ino),
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
        if is_in_one(ino) {
            return Ok(whole);
        }
        let project = self.project(&Caller::ROOT, ino)?;
        if project == InodeId::NONE {
            return Ok(whole);
        }
        // The answer begins with the one after.
        let after = match project.0 - 1 {
            0 => AccountId::User(u32::MAX),
            before => AccountId::Directory(InodeId(before)),
        };
        let more = self.ask_now(&Request::Accounts { after: Some(after) })?;
        let mut r = rpc::reply_status(&more).map_err(|_| Errno::IO)?.1;
        let account = if r.left() > 0 { Account::decode(&mut r).ok() } else { None };
        let ours = account.filter(|account| account.id == AccountId::Directory(project));
        Ok(ours.map_or(whole, |account| within(whole, &account)))
    }

    fn accounts(&self, _: &Caller<'_>) -> Result<Vec<Account>> {
        let mut all: Vec<Account> = Vec::new();
        loop {
            let after = all.last().map(|account| account.id);
            let more = self.ask_now(&Request::Accounts { after })?;
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
        if let AccountId::Directory(ino) = account {
            writable(&[ino])?;
        }
        let (ino, user) = match account {
            AccountId::User(0) => return Err(Errno::INVAL),
            AccountId::User(uid) => (InodeId::ROOT, Some(uid)),
            AccountId::Directory(ino) => (ino, None),
        };
        let mut before = self.refusals();
        let op = Op::SetQuota { ino, user, limit };
        let own = self.change_quota(caller, ino, &op, &mut before)?;
        self.settle_but(&self.inode(ino), before, (own, own))
    }

    fn set_project(&self, caller: &Caller<'_>, ino: InodeId, project: InodeId) -> Result<()> {
        writable(&[ino, project])?;
        let op = Op::SetProject { ino, project };
        self.change_quota(caller, ino, &op, &mut self.refusals()).map(drop)
    }

    fn project(&self, _: &Caller<'_>, ino: InodeId) -> Result<InodeId> {
        if is_in_one(ino) {
            // Nothing more is counted there.
            return Ok(InodeId::NONE);
        }
        self.with_state(ino, LeaseMode::Read, |_, state| Ok(state.record.project))
    }

    fn snapshots(&self, after: u64) -> Result<Vec<SnapshotRecord>> {
        self.do_snapshots(after)
    }

    fn snapshot(&self, caller: &Caller<'_>, name: &[u8]) -> Result<InodeId> {
        self.do_snapshot(caller, name)
    }

    fn make_snapshot(&self, caller: &Caller<'_>, dir: InodeId, name: &[u8]) -> Result<()> {
        self.do_make_snapshot(caller, dir, name)
    }

    fn differences(&self, before: u64, number: u64, from: Key) -> Result<Differences> {
        self.do_differences(before, number, from)
    }

    fn drop_snapshot(&self, caller: &Caller<'_>, name: &[u8]) -> Result<()> {
        self.do_drop_snapshot(caller, name)
    }

    fn is_of_snapshot(&self, ino: InodeId) -> bool {
        is_in_one(ino)
    }

    fn statfs(&self) -> Result<StatFs> {
        let body = self.ask_now(&Request::StatFs)?;
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
        read().map_err(|_| Errno::IO)
    }

    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        if is_in_one(ino) {
            return self.snapshot_getxattr(caller, ino, name);
        }
        self.do_getxattr(caller, ino, name)
    }

    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        if is_in_one(ino) {
            return self.snapshot_listxattr(caller, ino);
        }
        self.do_listxattr(caller, ino)
    }

    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        writable(&[ino])?;
        self.do_setxattr(caller, ino, name, Some(value), mode)
    }

    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        writable(&[ino])?;
        self.do_setxattr(caller, ino, name, None, XattrMode::Set)
    }
}
