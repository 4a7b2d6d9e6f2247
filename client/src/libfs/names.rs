//! The name space: lookup, make, remove, rename, link, list.

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, name_is_legal};
use storage::format::proof::Proof;
use storage::format::rpc::{self, InodeRecord, Request};
use storage::limits::{LINK_MAX, NAME_MAX, TARGET_MAX};

use super::acl;
use super::inode::{Inode, Known, Names, State};
use super::permission::{R, W, X, may, may_remove};
use super::pieces::Pieces;
use super::session::Session;
use super::sync::WriteGuard;
use super::{LibFs, Outcome, parse_inode};
use crate::fs::{
    Attr, Caller, DirEntry, NewNode, Rename, Result, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG,
};

/// Fresh inode numbers asked for at once.
const FRESH: u32 = 64;

/// `append` inside an operation: hand other outcomes on.
macro_rules! logged {
    ($outcome:expr) => {
        match $outcome {
            Outcome::Done(place) => place,
            Outcome::Again => return Ok(Outcome::Again),
            Outcome::Full(lane, before) => return Ok(Outcome::Full(lane, before)),
        }
    };
}
pub(crate) use logged;

/// Locks of several inodes, taken in ascending order.
pub(crate) struct Locked<'a> {
    guards: Vec<(InodeId, WriteGuard<'a, State>)>,
}

impl<'a> Locked<'a> {
    pub(crate) fn new(inodes: &[&'a Arc<Inode>]) -> Self {
        let mut sorted: Vec<&'a Arc<Inode>> = inodes.to_vec();
        sorted.sort_by_key(|i| i.ino);
        sorted.dedup_by_key(|i| i.ino);
        Self { guards: sorted.into_iter().map(|i| (i.ino, i.state.write())).collect() }
    }

    fn position(&self, ino: InodeId) -> usize {
        // Every inode asked for was given to `new`.
        self.guards.iter().position(|(i, _)| *i == ino).unwrap_or(0)
    }

    pub(crate) fn get(&mut self, ino: InodeId) -> &mut State {
        let at = self.position(ino);
        &mut self.guards[at].1
    }

    pub(crate) fn states(&self) -> Vec<&State> {
        self.guards.iter().map(|(_, g)| &**g).collect()
    }
}

/// Whether a directory lies below another.
enum Below {
    No,
    Yes,
    /// Another thread has this one on the way locked.
    Busy(Arc<Inode>),
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    if name_is_legal(name) { Ok(()) } else { Err(Errno::INVAL) }
}

impl LibFs {
    /// What `name` leads to; `dir` is locked, its lease was made sure of.
    fn find(
        &self,
        session: &Session,
        dir: InodeId,
        state: &mut State,
        name: &[u8],
    ) -> Result<Known> {
        self.find_for(session, dir, state, name, LeaseMode::Read)
    }

    /// The same; if the service is asked, it also gives a lease of that mode on what the name leads to.
    fn find_for(
        &self,
        session: &Session,
        dir: InodeId,
        state: &mut State,
        name: &[u8],
        mode: LeaseMode,
    ) -> Result<Known> {
        if self.holds(session, state, LeaseMode::Read)
            && let Some(known) = state.names.get(name)
            && self.may_ask(known)
        {
            return Ok(known);
        }
        let before = (state.lease, self.holds(session, state, LeaseMode::Read));
        let mut body = Vec::new();
        let request = Request::Lookup { dir, name, mode, flags: 0 };
        let last = (state.session == session.number).then_some(state.last);
        let after = session.known_after(last);
        let known = match session.call(&request, after, &mut body) {
            Ok(()) => {
                let reply = parse_inode(&body)?;
                let (ino, kind) = (reply.record.ino, reply.record.mode & S_IFMT);
                session.remember_proof(ino, reply.proof);
                let inode = self.inode(ino);
                // Without its lock the answer is dropped; whoever holds it will ask again.
                if let Some(mut child) = inode.state.try_write()
                    && child.session <= session.number
                    && session.known_after((child.session == session.number).then_some(child.last))
                        <= after
                {
                    self.install(session, &mut child, reply, 0);
                }
                Known::Present(ino, kind)
            }
            Err(Errno::NOENT) => Known::Absent,
            Err(e) => return Err(e),
        };
        // The lease held from before the question until after the answer: it may be remembered.
        if before.1 && self.holds(session, state, LeaseMode::Read) && before.0 == state.lease {
            state.names.put(name, known);
        }
        Ok(known)
    }

    pub(crate) fn do_lookup(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: LeaseMode,
    ) -> Result<Attr> {
        if name == b"." || name == b".." {
            return self.lookup_dot(caller, parent, name);
        }
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        if !name_is_legal(name) {
            return Err(Errno::NOENT);
        }
        let dir = self.inode(parent);
        for _ in 0..super::ATTEMPTS {
            let known = match self.known_quickly(caller, &dir, name)? {
                Some(known) => known,
                None => self.repeat(|session| {
                    let mut state = dir.state.write();
                    self.ensure(session, parent, &mut state, LeaseMode::Read, 0)?;
                    search(caller, &state.record)?;
                    self.find_for(session, parent, &mut state, name, mode).map(Outcome::Done)
                })?,
            };
            match known {
                Known::Absent => return Err(Errno::NOENT),
                Known::Present(ino, _) => match self.attr_under(ino, mode) {
                    // Removed between the two steps: look the name up again.
                    Err(Errno::NOENT | Errno::STALE) => {}
                    other => return other,
                },
            }
        }
        Err(Errno::IO)
    }

    /// The answer if it is cached; takes no exclusive lock.
    fn known_quickly(
        &self,
        caller: &Caller<'_>,
        dir: &Arc<Inode>,
        name: &[u8],
    ) -> Result<Option<Known>> {
        let session = self.session()?;
        let state = dir.state.read();
        if !self.held(session, &state, LeaseMode::Read) {
            return Ok(None);
        }
        let (allowed, known) = (search(caller, &state.record), state.names.get(name));
        if !self.holds(session, &state, LeaseMode::Read) {
            return Ok(None);
        }
        allowed?;
        Ok(known.filter(|known| self.may_ask(*known)))
    }

    /// Whether the service will answer about what a name leads to; else the name is looked up again,
    /// which shows it.
    fn may_ask(&self, known: Known) -> bool {
        match known {
            Known::Absent => true,
            Known::Present(ino, _) => self.proofs.covers(ino),
        }
    }

    fn lookup_dot(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        let dir = self.inode(parent);
        let up = self.repeat(|session| {
            let mut state = dir.state.write();
            self.ensure(session, parent, &mut state, LeaseMode::Read, 0)?;
            search(caller, &state.record)?;
            Ok(Outcome::Done(state.record.parent))
        })?;
        let ino = if name == b"." || up == InodeId::NONE { parent } else { up };
        self.attr_of(ino)
    }

    /// Current attributes, under a lease of that mode.
    fn attr_under(&self, ino: InodeId, mode: LeaseMode) -> Result<Attr> {
        if mode == LeaseMode::Read {
            return self.attr_of(ino);
        }
        let inode = self.inode(ino);
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, ino, &mut state, mode, 0)?;
            Ok(Outcome::Done(state.attr()))
        })
    }

    /// Current attributes.
    pub(crate) fn attr_of(&self, ino: InodeId) -> Result<Attr> {
        let inode = self.inode(ino);
        self.attr_of_inode(&inode)
    }

    pub(crate) fn attr_of_inode(&self, inode: &Arc<Inode>) -> Result<Attr> {
        self.repeat(|session| {
            {
                let state = inode.state.read();
                if self.held(session, &state, LeaseMode::Read) && !state.blocks_guessed {
                    let attr = state.attr();
                    core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire);
                    if self.holds(session, &state, LeaseMode::Read) {
                        return Ok(Outcome::Done(attr));
                    }
                }
            }
            let mut state = inode.state.write();
            if state.blocks_guessed && self.holds(session, &state, LeaseMode::Read) {
                self.renew(session, inode.ino, &mut state)?;
            }
            self.ensure(session, inode.ino, &mut state, LeaseMode::Read, 0)?;
            // The answer itself is the truth of this moment, even if the lease is gone again.
            Ok(Outcome::Done(state.attr()))
        })
    }

    fn take_fresh(&self, session: &Session) -> Result<(InodeId, rpc::Granted)> {
        let mut fresh = session.fresh.write();
        loop {
            if let Some((ino, granted)) = fresh.pop() {
                if session.segment.lease_holds(granted.slot, granted.word) {
                    return Ok((ino, granted));
                }
                continue;
            }
            let mut body = Vec::new();
            session.call(&Request::Inodes { count: FRESH }, Sequence(0), &mut body)?;
            let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
            let mut take = || -> core::result::Result<(), storage::format::Corrupt> {
                for _ in 0..r.u32()?.min(FRESH) {
                    let ino = InodeId(r.u64()?);
                    let granted = rpc::Granted {
                        slot: r.u32()?,
                        word: storage::format::control::LeaseWord(r.u64()?),
                    };
                    self.proofs.put(ino, Proof(r.u64()?));
                    fresh.push((ino, granted));
                }
                Ok(())
            };
            take().map_err(|_| Errno::IO)?;
            fresh.reverse();
            if fresh.is_empty() {
                return Err(Errno::NOSPC);
            }
        }
    }

    /// Makes an inode and a name; the result is locked by nobody and cached.
    pub(crate) fn make(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
        open: bool,
    ) -> Result<(Attr, Arc<Inode>)> {
        check_name(name)?;
        if node.target.len() > TARGET_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let dir = self.inode(parent);
        let (mut limited, before) = (false, self.refusals());
        let made = self.repeat(|session| {
            let mut state = dir.state.write();
            self.ensure(session, parent, &mut state, LeaseMode::Write, 0)?;
            limited = state.record.limited;
            search(caller, &state.record)?;
            if self.find(session, parent, &mut state, name)? != Known::Absent {
                return Err(Errno::EXIST);
            }
            may(caller, &state.record, W | X)?;
            if state.record.nlink == 0 {
                return Err(Errno::NOENT);
            }
            let is_dir = node.mode & S_IFMT == S_IFDIR;
            if is_dir && state.record.nlink >= LINK_MAX {
                return Err(Errno::MLINK);
            }
            let now = Self::now(&[&state.record]);
            let (ino, granted) = self.take_fresh(session)?;
            let record = new_record(caller, &state.record, node, ino, parent, now);
            let InodeRecord { mode, uid, gid, rdev, .. } = record;
            let mut child = new_state(session, granted, record, node.target);
            let op = Op::Create { ino, parent, mode, rdev, uid, gid, name, target: node.target };
            let place = logged!(self.log(session, parent.0, &[&state, &child], &op, now));
            child.last = place.sequence;
            child.open = u32::from(open);
            let attr = child.attr();
            let inode = Arc::new(Inode::with(ino, child));
            self.remember_inode(Arc::clone(&inode));
            state.names.put(name, Known::Present(ino, mode & S_IFMT));
            dir_changed(&mut state, place.sequence, now, 1, i32::from(is_dir));
            Ok(Outcome::Done((attr, inode)))
        })?;
        if limited {
            // Where a quota may bar it, the service's word is waited for.
            let settled = self.settle_since(&dir, before);
            settled.inspect_err(|_| made.1.state.write().open -= u32::from(open))?;
        }
        Ok(made)
    }

    /// Makes a regular file without a name, open. It goes when nobody has it open any more, unless
    /// it was `linkable` and a link gave it a name.
    pub(crate) fn make_nameless(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        linkable: bool,
    ) -> Result<(Attr, Arc<Inode>)> {
        let dir = self.inode(parent);
        self.repeat(|session| {
            let mut state = dir.state.write();
            self.ensure(session, parent, &mut state, LeaseMode::Read, 0)?;
            search(caller, &state.record)?;
            may(caller, &state.record, W | X)?;
            if state.record.nlink == 0 {
                return Err(Errno::NOENT);
            }
            let now = Self::now(&[]);
            let (ino, granted) = self.take_fresh(session)?;
            let node = NewNode { mode: S_IFREG | mode & 0o7777, rdev: 0, target: &[] };
            let mut record = new_record(caller, &state.record, &node, ino, parent, now);
            (record.nlink, record.linkable) = (0, linkable);
            let InodeRecord { mode, uid, gid, .. } = record;
            let mut child = new_state(session, granted, record, &[]);
            let op = Op::Tmpfile { ino, parent, mode, uid, gid, linkable };
            let place = logged!(self.log(session, ino.0, &[&child], &op, now));
            child.last = place.sequence;
            child.open = 1;
            let attr = child.attr();
            let inode = Arc::new(Inode::with(ino, child));
            self.remember_inode(Arc::clone(&inode));
            Ok(Outcome::Done((attr, inode)))
        })
    }

    pub(crate) fn do_remove(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        is_rmdir: bool,
    ) -> Result<()> {
        match name {
            b"." if is_rmdir => return Err(Errno::INVAL),
            b".." if is_rmdir => return Err(Errno::NOTEMPTY),
            _ => check_name(name).map_err(|e| if e == Errno::INVAL { Errno::NOENT } else { e })?,
        }
        let dir = self.inode(parent);
        self.repeat(|session| {
            let (ino, kind) = self.resolve(session, caller, &dir, name)?;
            let victim = self.inode(ino);
            let mut locked = Locked::new(&[&dir, &victim]);
            self.ensure(session, parent, locked.get(parent), LeaseMode::Write, 0)?;
            let ensured = self.ensure(session, ino, locked.get(ino), LeaseMode::Write, 0);
            if let Some(again) = looked_up_again(ensured)? {
                return Ok(again);
            }
            if self.find(session, parent, locked.get(parent), name)? != Known::Present(ino, kind) {
                return Ok(Outcome::Again);
            }
            let record = locked.get(ino).record.clone();
            may_remove(caller, &locked.get(parent).record, &record)?;
            match (is_rmdir, kind == S_IFDIR) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                _ => {}
            }
            if is_rmdir && record.entries > 0 {
                return Err(Errno::NOTEMPTY);
            }
            let now = Self::now(&[&locked.get(parent).record, &record]);
            let open = locked.get(ino).open > 0;
            let op = if is_rmdir {
                Op::Rmdir { ino, parent, name }
            } else {
                Op::Unlink { ino, parent, name, open }
            };
            let place = logged!(self.log(session, parent.0, &locked.states(), &op, now));
            let dir_state = locked.get(parent);
            dir_state.names.put(name, Known::Absent);
            dir_changed(dir_state, place.sequence, now, -1, -i32::from(is_rmdir));
            let links = if is_rmdir { record.nlink } else { 1 };
            unlinked(locked.get(ino), place.sequence, now, links);
            Ok(Outcome::Done(()))
        })
    }

    /// Inode and type of a name that must exist; nothing stays locked.
    fn resolve(
        &self,
        session: &Session,
        caller: &Caller<'_>,
        dir: &Arc<Inode>,
        name: &[u8],
    ) -> Result<(InodeId, u32)> {
        let mut state = dir.state.write();
        self.ensure(session, dir.ino, &mut state, LeaseMode::Read, 0)?;
        search(caller, &state.record)?;
        match self.find(session, dir.ino, &mut state, name)? {
            Known::Present(ino, kind) => Ok((ino, kind)),
            Known::Absent => Err(Errno::NOENT),
        }
    }

    pub(crate) fn do_link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        check_name(name)?;
        let (dir, inode) = (self.inode(parent), self.inode(ino));
        if ino == parent {
            return Err(Errno::PERM);
        }
        self.repeat(|session| {
            let mut locked = Locked::new(&[&dir, &inode]);
            self.ensure(session, parent, locked.get(parent), LeaseMode::Write, 0)?;
            self.ensure(session, ino, locked.get(ino), LeaseMode::Write, 0)?;
            search(caller, &locked.get(parent).record)?;
            if self.find(session, parent, locked.get(parent), name)? != Known::Absent {
                return Err(Errno::EXIST);
            }
            may(caller, &locked.get(parent).record, W | X)?;
            if locked.get(parent).record.nlink == 0 {
                return Err(Errno::NOENT);
            }
            let record = locked.get(ino).record.clone();
            if record.mode & S_IFMT == S_IFDIR {
                return Err(Errno::PERM);
            }
            if record.nlink == 0 && !record.linkable {
                return Err(Errno::NOENT);
            }
            if record.nlink >= LINK_MAX {
                return Err(Errno::MLINK);
            }
            if record.project != locked.get(parent).record.project {
                return Err(Errno::XDEV);
            }
            let now = Self::now(&[&locked.get(parent).record, &record]);
            let op = Op::Link { ino, parent, name };
            let place = logged!(self.log(session, parent.0, &locked.states(), &op, now));
            let state = locked.get(parent);
            state.names.put(name, Known::Present(ino, record.mode & S_IFMT));
            dir_changed(state, place.sequence, now, 1, 0);
            let state = locked.get(ino);
            state.record.nlink += 1;
            state.record.linkable = false;
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            Ok(Outcome::Done(state.attr()))
        })
    }

    pub(crate) fn do_rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        let (noreplace, exchange) = match rename.flags {
            0 => (false, false),
            1 => (true, false),
            2 => (false, true),
            _ => return Err(Errno::INVAL),
        };
        for name in [rename.name, rename.new_name] {
            if name == b"." || name == b".." {
                return Err(Errno::BUSY);
            }
        }
        check_name(rename.name).map_err(|e| if e == Errno::INVAL { Errno::NOENT } else { e })?;
        check_name(rename.new_name)?;
        let (old, new) = (self.inode(rename.parent), self.inode(rename.new_parent));
        self.repeat(|session| {
            self.try_rename(session, caller, rename, &old, &new, noreplace, exchange)
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn try_rename(
        &self,
        session: &'static Session,
        caller: &Caller<'_>,
        rename: &Rename<'_>,
        old: &Arc<Inode>,
        new: &Arc<Inode>,
        noreplace: bool,
        exchange: bool,
    ) -> Result<Outcome<()>> {
        let (ino, kind) = self.resolve(session, caller, old, rename.name)?;
        let replaced = match self.resolve(session, caller, new, rename.new_name) {
            Ok(found) => Some(found),
            Err(Errno::NOENT) => None,
            Err(e) => return Err(e),
        };
        match replaced {
            Some(_) if noreplace => return Err(Errno::EXIST),
            None if exchange => return Err(Errno::NOENT),
            Some((same, _)) if same == ino => return Ok(Outcome::Done(())),
            _ => {}
        }
        let across = old.ino != new.ino;
        let other_dir = exchange && replaced.is_some_and(|(_, k)| k == S_IFDIR);
        let root = self.inode(InodeId::ROOT);
        let moved = self.inode(ino);
        let victim = replaced.map(|(i, _)| self.inode(i));
        let mut all = alloc::vec![old, new, &moved];
        all.extend(victim.as_ref());
        let moves_dir = across && (kind == S_IFDIR || other_dir);
        if moves_dir {
            // Directories change parents only under a write lease on the root: two such renames at
            // once could otherwise close a cycle that neither of them sees.
            all.push(&root);
        }
        let mut locked = Locked::new(&all);
        for dir in [old, new] {
            self.ensure(session, dir.ino, locked.get(dir.ino), LeaseMode::Write, 0)?;
        }
        for inode in &all {
            let ensured =
                self.ensure(session, inode.ino, locked.get(inode.ino), LeaseMode::Write, 0);
            if let Some(again) = looked_up_again(ensured)? {
                return Ok(again);
            }
        }
        let there = self.find(session, old.ino, locked.get(old.ino), rename.name)?;
        let target = self.find(session, new.ino, locked.get(new.ino), rename.new_name)?;
        let expected = replaced.map_or(Known::Absent, |(i, k)| Known::Present(i, k));
        if there != Known::Present(ino, kind) || target != expected {
            return Ok(Outcome::Again);
        }
        let record = locked.get(ino).record.clone();
        may_remove(caller, &locked.get(old.ino).record, &record)?;
        may(caller, &locked.get(new.ino).record, W | X)?;
        if locked.get(new.ino).record.nlink == 0 {
            // The directory is gone itself.
            return Err(Errno::NOENT);
        }
        if let Some((other, other_kind)) = replaced {
            let victim = locked.get(other).record.clone();
            may_remove(caller, &locked.get(new.ino).record, &victim)?;
            if !exchange {
                match (kind == S_IFDIR, other_kind == S_IFDIR) {
                    (true, false) => return Err(Errno::NOTDIR),
                    (false, true) => return Err(Errno::ISDIR),
                    _ => {}
                }
            }
        }
        if moves_dir && kind == S_IFDIR {
            // Its `..` changes.
            may(caller, &record, W)?;
        }
        if moves_dir {
            let skip: Vec<InodeId> = all.iter().map(|i| i.ino).collect();
            let mut below = match kind {
                // Also when the target is not empty.
                S_IFDIR => self.is_below(session, &locked, &skip, new.ino, ino)?,
                _ => Below::No,
            };
            if let (Below::No, true, Some((other, S_IFDIR))) = (&below, exchange, replaced) {
                below = self.is_below(session, &locked, &skip, old.ino, other)?;
            }
            match below {
                Below::No => {}
                Below::Yes => return Err(Errno::INVAL),
                Below::Busy(inode) => {
                    // Its holder may wait for what is locked here.
                    drop(locked);
                    drop(inode.state.write());
                    return Ok(Outcome::Again);
                }
            }
        }
        let own = |r: &InodeRecord| r.project == r.ino;
        let moved_own = own(&record)
            && replaced.is_none_or(|(other, _)| !exchange || own(&locked.get(other).record));
        let from = locked.get(old.ino).record.project;
        if from != locked.get(new.ino).record.project && !moved_own {
            // From one quota's tree to another: programs copy.
            return Err(Errno::XDEV);
        }
        if let Some((other, S_IFDIR)) = replaced
            && !exchange
            && locked.get(other).record.entries > 0
        {
            return Err(Errno::NOTEMPTY);
        }
        let records: Vec<InodeRecord> =
            all.iter().map(|i| locked.get(i.ino).record.clone()).collect();
        let now = Self::now(&records.iter().collect::<Vec<_>>());
        let open = victim.as_ref().is_some_and(|v| locked.get(v.ino).open > 0);
        let op = Op::Rename {
            ino,
            parent: old.ino,
            name: rename.name,
            new_parent: new.ino,
            new_name: rename.new_name,
            replaced: replaced.map_or(InodeId::NONE, |(i, _)| i),
            noreplace,
            exchange,
            open: open && !exchange,
        };
        let place = logged!(self.log(session, old.ino.0, &locked.states(), &op, now));
        let is_dir = i32::from(kind == S_IFDIR);
        let there = Known::Present(ino, kind);
        let changed = |state: &mut State| {
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
        };
        locked.get(new.ino).names.put(rename.new_name, there);
        match replaced {
            Some((other, other_kind)) if exchange => {
                let other_is_dir = i32::from(other_kind == S_IFDIR);
                locked.get(old.ino).names.put(rename.name, Known::Present(other, other_kind));
                let links = if across { other_is_dir - is_dir } else { 0 };
                dir_changed(locked.get(old.ino), place.sequence, now, 0, links);
                dir_changed(locked.get(new.ino), place.sequence, now, 0, -links);
                if other_kind == S_IFDIR {
                    locked.get(other).record.parent = old.ino;
                }
                changed(locked.get(other));
            }
            _ => {
                locked.get(old.ino).names.put(rename.name, Known::Absent);
                dir_changed(locked.get(old.ino), place.sequence, now, -1, -is_dir);
                let gained = i64::from(replaced.is_none());
                let replaced_dir = replaced.is_some_and(|(_, k)| k == S_IFDIR);
                let links = is_dir - i32::from(replaced_dir);
                dir_changed(locked.get(new.ino), place.sequence, now, gained, links);
                if let Some((other, other_kind)) = replaced {
                    let state = locked.get(other);
                    let links = if other_kind == S_IFDIR { state.record.nlink } else { 1 };
                    unlinked(state, place.sequence, now, links);
                }
            }
        }
        if kind == S_IFDIR {
            locked.get(ino).record.parent = new.ino;
        }
        changed(locked.get(ino));
        Ok(Outcome::Done(()))
    }

    /// Whether `dir` is `top` or lies below it. Holding the root's write lease keeps every parent
    /// pointer still.
    fn is_below(
        &self,
        session: &Session,
        locked: &Locked<'_>,
        held: &[InodeId],
        dir: InodeId,
        top: InodeId,
    ) -> Result<Below> {
        let mut at = dir;
        // Deeper than any path that a program can name.
        for _ in 0..65_536 {
            if at == top {
                return Ok(Below::Yes);
            }
            if at == InodeId::ROOT || at == InodeId::NONE {
                return Ok(Below::No);
            }
            at = if held.contains(&at) {
                locked.guards[locked.position(at)].1.record.parent
            } else {
                let inode = self.inode(at);
                // Upwards is against the order of locks: there is no waiting.
                let Some(mut state) = inode.state.try_write() else {
                    return Ok(Below::Busy(inode));
                };
                self.ensure(session, at, &mut state, LeaseMode::Read, 0)?;
                state.record.parent
            };
        }
        Err(Errno::LOOP)
    }

    pub(crate) fn do_readlink(&self, ino: InodeId) -> Result<Vec<u8>> {
        let inode = self.inode(ino);
        self.repeat(|session| {
            let mut state = inode.state.write();
            self.ensure(session, ino, &mut state, LeaseMode::Read, 0)?;
            if state.record.mode & S_IFMT != S_IFLNK {
                return Err(Errno::INVAL);
            }
            Ok(Outcome::Done(state.target.clone()))
        })
    }

    pub(crate) fn do_readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dir = self.inode(ino);
        let mut cookie = cookie;
        // Names may be remembered as the whole list if one lease spans the listing.
        let mut whole: Option<rpc::Granted> = None;
        loop {
            let start = cookie;
            let body = self.repeat(|session| {
                let mut state = dir.state.write();
                self.ensure(session, ino, &mut state, LeaseMode::Read, 0)?;
                if state.record.mode & S_IFMT != S_IFDIR {
                    return Err(Errno::NOTDIR);
                }
                may(caller, &state.record, R)?;
                if start == 0 {
                    whole = Some(state.lease);
                }
                let mut body = Vec::new();
                session.call(&Request::Names { dir: ino, cookie: start }, state.last, &mut body)?;
                let end = self.remember(session, &mut state, &body, whole)?;
                Ok(Outcome::Done((body, end)))
            })?;
            let (body, end) = body;
            let mut r = rpc::reply_status(&body).map_err(|_| Errno::IO)?.1;
            r.u8().map_err(|_| Errno::IO)?;
            while r.left() > 0 {
                let name = rpc::take_name(&mut r).map_err(|_| Errno::IO)?;
                cookie = name.next;
                let entry =
                    DirEntry { ino: name.ino, kind: name.kind, next: name.next, name: name.name };
                if !each(&entry) {
                    return Ok(());
                }
            }
            if end || cookie == start {
                return Ok(());
            }
        }
    }

    /// Puts listed names into the cache; says whether the list ended.
    fn remember(
        &self,
        session: &Session,
        state: &mut State,
        body: &[u8],
        whole: Option<rpc::Granted>,
    ) -> Result<bool> {
        let mut r = rpc::reply_status(body).map_err(|_| Errno::IO)?.1;
        let end = r.u8().map_err(|_| Errno::IO)? != 0;
        let same = whole == Some(state.lease) && self.holds(session, state, LeaseMode::Read);
        if !same || state.names.complete {
            return Ok(end);
        }
        while r.left() > 0 {
            let name = rpc::take_name(&mut r).map_err(|_| Errno::IO)?;
            self.proofs.put(name.ino, name.proof);
            if name.name != b"." && name.name != b".." && state.names.get(name.name).is_none() {
                state.names.put(name.name, Known::Present(name.ino, name.kind));
            }
        }
        if end {
            let present = state.names.known.values().filter(|k| **k != Known::Absent).count();
            // Names made or removed while the list was read are in the cache already.
            state.names.complete = present as u64 == state.record.entries;
            if state.names.complete {
                state.names.known.retain(|_, k| *k != Known::Absent);
            }
        }
        Ok(end)
    }
}

/// What a name led to a moment ago may be gone: others may have given the name to something else. The name
/// says what is so now.
fn looked_up_again<T>(ensured: Result<()>) -> Result<Option<Outcome<T>>> {
    match ensured {
        Ok(()) => Ok(None),
        Err(Errno::NOENT | Errno::STALE) => Ok(Some(Outcome::Again)),
        Err(e) => Err(e),
    }
}

fn search(caller: &Caller<'_>, record: &InodeRecord) -> Result<()> {
    if record.mode & S_IFMT != S_IFDIR {
        return Err(Errno::NOTDIR);
    }
    may(caller, record, X)
}

fn new_record(
    caller: &Caller<'_>,
    dir: &InodeRecord,
    node: &NewNode<'_>,
    ino: InodeId,
    parent: InodeId,
    now: u64,
) -> InodeRecord {
    let is_dir = node.mode & S_IFMT == S_IFDIR;
    let mut mode = node.mode;
    let mut gid = caller.gid;
    if dir.mode & 0o2000 != 0 {
        gid = dir.gid;
        if is_dir {
            mode |= 0o2000;
        } else if mode & 0o2010 == 0o2010 && caller.uid != 0 && !caller.in_group(gid) {
            mode &= !0o2000;
        }
    }
    if node.mode & S_IFMT == S_IFLNK {
        mode = S_IFLNK | 0o777;
    }
    let stamp = Stamp::from_nanos(now);
    let mut record = InodeRecord {
        ino,
        mode,
        nlink: if is_dir { 2 } else { 1 },
        uid: caller.uid,
        gid,
        // Devices alone have a number.
        rdev: if matches!(node.mode & S_IFMT, 0o020_000 | 0o060_000) { node.rdev } else { 0 },
        size: node.target.len() as u64,
        blocks: 0,
        atime: stamp,
        mtime: stamp,
        ctime: stamp,
        btime: stamp,
        parent: if is_dir { parent } else { InodeId::NONE },
        entries: 0,
        xattrs: false,
        linkable: false,
        acl: None,
        default_acl: None,
        project: dir.project,
        limited: is_dir && dir.limited,
    };
    acl::inherit(&mut record, dir, caller.umask);
    record
}

fn new_state(session: &Session, lease: rpc::Granted, record: InodeRecord, target: &[u8]) -> State {
    State {
        lease,
        session: session.number,
        record,
        pieces: Pieces::empty(),
        target: target.to_vec(),
        names: Names { complete: true, ..Names::default() },
        pinned: true,
        may_write: true,
        ..State::default()
    }
}

/// A directory's own fields after one of its names changed.
fn dir_changed(state: &mut State, sequence: Sequence, now: u64, entries: i64, links: i32) {
    state.record.mtime = Stamp::from_nanos(now);
    state.record.ctime = Stamp::from_nanos(now);
    state.record.entries = state.record.entries.saturating_add_signed(entries);
    state.record.nlink = state.record.nlink.saturating_add_signed(links);
    state.last = sequence;
}

/// An inode's own fields after a name of it went away.
fn unlinked(state: &mut State, sequence: Sequence, now: u64, links: u32) {
    state.record.nlink = state.record.nlink.saturating_sub(links);
    state.record.ctime = Stamp::from_nanos(now);
    state.last = sequence;
    if state.record.nlink == 0 && state.open == 0 {
        // The entry told the service that nobody here has it open.
        state.pinned = false;
    }
}
