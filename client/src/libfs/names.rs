//! The name space: lookup, make, remove, rename, link, list.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, name_is_legal};
use storage::format::rpc::{self, InodeRecord};
use storage::limits::{LINK_MAX, NAME_MAX, TARGET_MAX};

use super::host::Host;
use super::inode::{Inode, Known, Names, State, attr};
use super::joint::By;
use super::permission::{R, W, X, may, may_link, may_remove};
use super::pieces::Pieces;
use super::session::Session;
use super::sync::WriteGuard;
use super::turn::{Ask, Question, Step, Stop, Turn, Wait, then_look};
use super::{LibFsOn, acl};
use crate::fs::{
    Attr, Caller, DirEntry, NewNode, Rename, Result, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG,
};

/// Locks of several inodes, taken in ascending order.
pub(crate) struct Locked<'a, H: Host> {
    guards: Vec<(InodeId, WriteGuard<'a, State, H>)>,
}

impl<'a, H: Host> Locked<'a, H> {
    pub(crate) fn new(inodes: &[&'a Arc<Inode<H>>]) -> Self {
        let mut sorted: Vec<&'a Arc<Inode<H>>> = inodes.to_vec();
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

/// What a rename has done.
#[derive(Clone, Copy, Debug)]
struct Renamed {
    moved: InodeId,
    /// Its type.
    kind: u32,
    /// What had the new name before.
    replaced: Option<InodeId>,
}

/// Whether a directory lies below another.
enum Below<H: Host> {
    No,
    Yes,
    /// Another thread has this one on the way locked.
    Busy(Arc<Inode<H>>),
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    if name_is_legal(name) { Ok(()) } else { Err(Errno::INVAL) }
}

/// Nothing is made in a directory that was removed, and nobody is asked for a right to it there.
fn there_still(dir: &InodeRecord) -> Result<()> {
    if dir.nlink == 0 { Err(Errno::NOENT) } else { Ok(()) }
}

impl<H: Host> LibFsOn<H> {
    /// What `name` leads to; `dir` is locked, and its lease held.
    pub(super) fn find(
        &self,
        turn: &mut Turn<H>,
        dir: InodeId,
        state: &State,
        name: &[u8],
    ) -> Step<Known, H> {
        let joint = state.is_joint() && !planted(Bug::JointNamesKept);
        if let Some(known) = state.names.get(name)
            && self.may_ask(known)
            && !joint
        {
            return Ok(known);
        }
        let found = match joint {
            // Others change it all the time: what was so at a moment in this call is what can be known.
            true => self.given(turn.session, state, name).or_else(|| turn.found(dir, name)),
            false => turn.found_under(dir, name, state),
        };
        if let Some(known) = found {
            return Ok(known);
        }
        turn.refused(dir)?;
        Err(Stop::Wait(Wait::Name { dir, name: name.to_vec(), mode: LeaseMode::Read }))
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
        for _ in 0..self.config.limits.attempts {
            let (known, shown) = match self.known_quickly(caller, &dir, name)? {
                Some(known) => (known, None),
                None => self.look_up(caller, &dir, name, mode)?,
            };
            let Known::Present(ino, _) = known else { return Err(Errno::NOENT) };
            if let Some(attr) = shown {
                return Ok(attr);
            }
            match self.attr_under(ino, mode) {
                // Removed between the two steps: look the name up again. Or it never was there: its making was refused,
                // and only the names that are kept here show it.
                Err(Errno::NOENT | Errno::STALE) => {
                    dir.state.write().lease = rpc::Granted::default()
                }
                other => return other,
            }
        }
        Err(Errno::IO)
    }

    /// What a name on the way to another leads to.
    pub(crate) fn do_lookup_through(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        let dir = self.inode(parent);
        let quickly = |known| match known {
            Some(Known::Present(ino, S_IFDIR)) => self.inodes.read().get(&ino.0).cloned(),
            _ => None,
        };
        if name_is_legal(name)
            && name.len() <= NAME_MAX
            && let Some(inode) = quickly(self.known_quickly(caller, &dir, name)?)
        {
            let (session, state) = (self.session()?, inode.state.read());
            let joint = state.is_joint() && self.holds(session, &state, LeaseMode::Joint);
            if joint {
                return Ok(state.attr());
            }
        }
        self.do_lookup(caller, parent, name, LeaseMode::Read)
    }

    /// What a name leads to that is about to be made.
    pub(crate) fn do_lookup_to_make(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        let dir = self.inode(parent);
        if name_is_legal(name) && name.len() <= NAME_MAX {
            let (session, state) = (self.session()?, dir.state.read());
            let joint = state.is_joint() && self.holds(session, &state, LeaseMode::Joint);
            if joint && self.given(session, &state, name).is_none() {
                search(caller, &state.record)?;
                return Err(Errno::NOENT);
            }
        }
        self.do_lookup(caller, parent, name, LeaseMode::Read)
    }

    /// What a name leads to, and its attributes if the service was asked for that.
    fn look_up(
        &self,
        caller: &Caller<'_>,
        dir: &Arc<Inode<H>>,
        name: &[u8],
        mode: LeaseMode,
    ) -> Result<(Known, Option<Attr>)> {
        self.run(|turn| {
            let mut state = dir.state.write();
            self.hold(turn, dir.ino, &mut state, LeaseMode::Read, 0)?;
            search(caller, &state.record)?;
            // What the service has said is what was so at a moment in this call, whoever has changed it since.
            if let Some(known) = turn.found(dir.ino, name) {
                let Known::Present(ino, _) = known else { return Ok((known, None)) };
                return Ok((known, turn.shown(ino).map(attr)));
            }
            let known = match state.is_joint() && !planted(Bug::JointNamesKept) {
                true => self.given(turn.session, &state, name),
                false => state.names.get(name),
            };
            if let Some(known) = known.filter(|known| self.may_ask(*known)) {
                return Ok((known, None));
            }
            turn.refused(dir.ino)?;
            Err(Stop::Wait(Wait::Name { dir: dir.ino, name: name.to_vec(), mode }))
        })
    }

    /// The answer if it is cached; takes no exclusive lock.
    fn known_quickly(
        &self,
        caller: &Caller<'_>,
        dir: &Arc<Inode<H>>,
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
        let up = self.with_state(parent, LeaseMode::Read, |_, state| {
            search(caller, &state.record)?;
            Ok(state.record.parent)
        })?;
        let ino = if name == b"." || up == InodeId::NONE { parent } else { up };
        self.attr_of(ino)
    }

    /// Current attributes, under a lease of that mode.
    fn attr_under(&self, ino: InodeId, mode: LeaseMode) -> Result<Attr> {
        if mode == LeaseMode::Read {
            return self.attr_of(ino);
        }
        self.with_state(ino, mode, |_, state| Ok(state.attr()))
    }

    /// Current attributes.
    pub(crate) fn attr_of(&self, ino: InodeId) -> Result<Attr> {
        let inode = self.inode(ino);
        self.attr_of_inode(&inode)
    }

    pub(crate) fn attr_of_inode(&self, inode: &Arc<Inode<H>>) -> Result<Attr> {
        let ino = inode.ino;
        self.run(|turn| {
            let session = turn.session;
            // The answer itself is the truth of a moment, even if the lease is gone again.
            if let Some(record) = turn.shown(ino) {
                return Ok(attr(record));
            }
            let state = inode.state.read();
            let (held, guessed) =
                (self.held(session, &state, LeaseMode::Read), state.blocks_guessed);
            // (Others may change it while it is held.)
            let joint = state.is_joint() && self.held(session, &state, LeaseMode::Joint);
            if held && !guessed {
                let attr = state.attr();
                then_look();
                if self.holds(session, &state, LeaseMode::Read) {
                    return Ok(attr);
                }
            }
            turn.refused(ino)?;
            Err(Stop::Wait(match held && guessed || joint {
                true => Wait::Renewal { ino },
                false => Wait::Lease { ino, mode: LeaseMode::Read, flags: rpc::WANT_JOINT },
            }))
        })
    }

    /// A fresh inode number with a lease that holds; to be [given back](Self::put_back) if nothing is made with it.
    fn take_fresh(&self, session: &Session<H>) -> Step<(InodeId, rpc::Granted), H> {
        let mut fresh = session.fresh.write();
        while let Some((ino, granted)) = fresh.pop() {
            if session.segment.lease_holds(granted.slot, granted.word) {
                return Ok((ino, granted));
            }
        }
        Err(Stop::Wait(Wait::Numbers))
    }

    /// Nothing was made with the number: the next thing is, or whoever makes what is there already, again and again, would use
    /// up all that he may have. False: it is of another session.
    fn number_unused(&self, inode: &Inode<H>, number: Option<(u64, rpc::Granted)>) -> bool {
        let Some((by, granted)) = number else { return false };
        let Some(session) = self.current().filter(|session| session.number == by) else {
            return false;
        };
        {
            let mut state = inode.state.write();
            // What is remembered of it is nothing, and gives nothing back.
            (state.open, state.pinned, state.lease) = (0, false, rpc::Granted::default());
        }
        self.inodes.write().remove(&inode.ino.0);
        session.fresh.write().push((inode.ino, granted));
        true
    }

    /// Makes an inode and a name; the result is locked by nobody and cached.
    pub(crate) fn make(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
        open: bool,
    ) -> Result<(Attr, Arc<Inode<H>>)> {
        check_name(name)?;
        if node.target.len() > TARGET_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        for _ in 0..self.config.limits.attempts {
            if let Some(made) = self.try_make(caller, parent, name, node)? {
                if !open && !planted(Bug::MadeStaysPinned) {
                    self.close_inode(&made.1);
                }
                return Ok(made);
            }
        }
        Err(Errno::IO)
    }

    /// `None` as in [`Self::judged`].
    fn try_make(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Option<(Attr, Arc<Inode<H>>)>> {
        let dir = self.inode(parent);
        let mut before = self.current().map(|session| (session.number, session.refusals()));
        let (mut limited, mut own, mut by) = (false, Sequence(0), 0);
        let number = Cell::new(None);
        let attempt = |turn: &mut Turn<H>, how: By| {
            let session = turn.session;
            let mut state = dir.state.write();
            self.hold(turn, parent, &mut state, LeaseMode::Write, how.flags())?;
            let joint = state.is_joint();
            // (Where others make names as well the limit's word comes with that on the name.)
            limited = state.record.limited && !joint;
            search(caller, &state.record)?;
            let free = joint
                && how == By::Guess
                && self.given(session, &state, name).is_none()
                && may(caller, &state.record, W | X).is_ok();
            if !free && self.find(turn, parent, &state, name)? != Known::Absent {
                return Err(Errno::EXIST.into());
            }
            there_still(&state.record)?;
            may(caller, &state.record, W | X)?;
            let is_dir = node.mode & S_IFMT == S_IFDIR;
            if is_dir && state.record.nlink >= LINK_MAX {
                return Err(Errno::MLINK.into());
            }
            let now = Self::now(&[&state.record]);
            let refusals = if joint { self.begin_joint(turn)? } else { 0 };
            let (ino, granted) = self.take_fresh(session)?;
            let record = new_record(caller, &state.record, node, ino, parent, now);
            let InodeRecord { mode, uid, gid, rdev, .. } = record;
            let mut child = new_state(session, granted, record, node.target);
            let op = Op::Create { ino, parent, mode, rdev, uid, gid, name, target: node.target };
            Self::count_in(&mut before, session);
            let logged = self.log(turn, parent.0, &[&state, &child], &op, now);
            let place = logged.inspect_err(|_| session.fresh.write().push((ino, granted)))?;
            (child.last, own, by) = (place.sequence, place.sequence, session.number);
            number.set(Some((session.number, granted)));
            // What is made is pinned.
            child.open = 1;
            let attr = child.attr();
            let inode = Arc::new(Inode::with(ino, child));
            self.remember_inode(Arc::clone(&inode));
            let most = self.config.limits.names;
            if joint {
                state.last = place.sequence;
                Self::joint(turn, refusals, place.sequence, (ino, granted));
            } else {
                state.names.put(name, Known::Present(ino, mode & S_IFMT), most);
                dir_changed(&mut state, place.sequence, now, 1, i32::from(is_dir));
            }
            Ok((attr, inode))
        };
        let undo = |(_, inode): (Attr, Arc<Inode<H>>), certain: bool| {
            let again = certain && !planted(Bug::NumberWasted);
            if !again || !self.number_unused(&inode, number.get()) {
                self.close_inode(&inode);
            }
        };
        let shows = |made: &(Attr, Arc<Inode<H>>)| {
            // What is kept here is what it was to be.
            made.1.state.write().lease = rpc::Granted::default();
            match self.attr_of_inode(&made.1) {
                Ok(_) => Ok(true),
                Err(Errno::NOENT | Errno::STALE) => Ok(false),
                Err(e) => Err(e),
            }
        };
        let (made, taken) = self.change_names(attempt, undo, shows)?;
        if let Some(taken) = taken {
            let (ino, kind) = (made.0.ino, made.0.kind());
            self.give_name(parent, name, (ino, kind), taken);
        }
        if limited {
            // (By the directory, which shows what is refused until it is asked for anew.)
            let settled = self.settle_but(&dir, before, (own, own));
            settled.inspect_err(|_| self.close_inode(&made.1))?;
            let same = self.current().is_some_and(|session| session.number == by);
            if !same && !self.judged(&made.1, before, own, by)? {
                return Ok(None);
            }
        }
        Ok(Some(made))
    }

    /// Where a quota may bar what was made, the service's word is waited for. False: it went with its session `by`
    /// before the service had judged it. Nobody knows of it, so it is made again.
    fn judged(
        &self,
        made: &Arc<Inode<H>>,
        before: Option<(u64, u64)>,
        own: Sequence,
        by: u64,
    ) -> Result<bool> {
        let Err(e) = self.settle_but(made, before, (own, own)) else { return Ok(true) };
        self.close_inode(made);
        match self.current() {
            Some(session) if matches!(e, Errno::NOENT | Errno::STALE) => {
                if session.number != by && !planted(Bug::NamelessOfPast) {
                    Ok(false)
                } else if before != Some((session.number, session.refusals())) {
                    // It is not there: that was refused.
                    Err(session.refusal())
                } else {
                    Err(e)
                }
            }
            _ => Err(e),
        }
    }

    /// Makes a regular file without a name, open. It goes when nobody has it open any more, unless
    /// it was `linkable` and a link gave it a name.
    pub(crate) fn make_nameless(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        linkable: bool,
    ) -> Result<(Attr, Arc<Inode<H>>)> {
        for _ in 0..self.config.limits.attempts {
            if let Some(made) = self.try_nameless(caller, parent, mode, linkable)? {
                return Ok(made);
            }
        }
        Err(Errno::IO)
    }

    /// `None` as in [`Self::judged`].
    fn try_nameless(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        linkable: bool,
    ) -> Result<Option<(Attr, Arc<Inode<H>>)>> {
        let dir = self.inode(parent);
        let mut before = self.current().map(|session| (session.number, session.refusals()));
        let (mut limited, mut own, mut by) = (false, Sequence(0), 0);
        let made = self.run(|turn| {
            let session = turn.session;
            let mut state = dir.state.write();
            self.hold(turn, parent, &mut state, LeaseMode::Read, 0)?;
            limited = state.record.limited;
            search(caller, &state.record)?;
            may(caller, &state.record, W | X)?;
            if state.record.nlink == 0 {
                return Err(Errno::NOENT.into());
            }
            // It inherits from the directory, and belongs to its project.
            turn.counts_on(&state);
            let now = Self::now(&[]);
            let (ino, granted) = self.take_fresh(session)?;
            let node = NewNode { mode: S_IFREG | mode & 0o7777, rdev: 0, target: &[] };
            let mut record = new_record(caller, &state.record, &node, ino, parent, now);
            (record.nlink, record.linkable) = (0, linkable);
            let InodeRecord { mode, uid, gid, .. } = record;
            let mut child = new_state(session, granted, record, &[]);
            let op = Op::Tmpfile { ino, parent, mode, uid, gid, linkable };
            Self::count_in(&mut before, session);
            let logged = self.log(turn, ino.0, &[&child], &op, now);
            let place = logged.inspect_err(|_| session.fresh.write().push((ino, granted)))?;
            (child.last, own, by) = (place.sequence, place.sequence, session.number);
            child.open = 1;
            let attr = child.attr();
            let inode = Arc::new(Inode::with(ino, child));
            self.remember_inode(Arc::clone(&inode));
            Ok((attr, inode))
        })?;
        let waits = limited && !planted(Bug::NamelessUnawaited);
        if waits && !self.judged(&made.1, before, own, by)? {
            return Ok(None);
        }
        Ok(Some(made))
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
        let mut kept = Vec::new();
        let attempt = |turn: &mut Turn<H>, by: By| {
            let (ino, kind) = self.resolve(turn, caller, &dir, name)?.ok_or(Errno::NOENT)?;
            let victim = self.inode(ino);
            let mut locked = Locked::new(&[&dir, &victim]);
            self.hold(turn, parent, locked.get(parent), LeaseMode::Write, by.flags())?;
            let joint = locked.get(parent).is_joint();
            let held = self.hold(turn, ino, locked.get(ino), LeaseMode::Write, 0);
            forget_names(&held, locked.get(parent));
            looked_up_again(held)?;
            if !joint
                && self.find(turn, parent, locked.get(parent), name)? != Known::Present(ino, kind)
            {
                return Err(Stop::Wait(Wait::Again));
            }
            let record = locked.get(ino).record.clone();
            may_remove(caller, &locked.get(parent).record, &record)?;
            match (is_rmdir, kind == S_IFDIR) {
                (true, false) => return Err(Errno::NOTDIR.into()),
                (false, true) => return Err(Errno::ISDIR.into()),
                _ => {}
            }
            if is_rmdir {
                self.is_empty(turn, &record)?;
            }
            self.keep_for_kernel(turn, &victim, locked.get(ino), &mut kept)?;
            let now = Self::now(&[&locked.get(parent).record, &record]);
            let open = locked.get(ino).open > 0 && !planted(Bug::UnlinkedClosed);
            let op = if is_rmdir {
                Op::Rmdir { ino, parent, name, open }
            } else {
                Op::Unlink { ino, parent, name, open }
            };
            let refusals = if joint { self.begin_joint(turn)? } else { 0 };
            let place = self.log(turn, parent.0, &locked.states(), &op, now)?;
            let (dir_state, most) = (locked.get(parent), self.config.limits.names);
            if joint {
                dir_state.take_name(name);
                dir_state.last = place.sequence;
                let lease = locked.get(ino).lease;
                Self::joint(turn, refusals, place.sequence, (ino, lease));
            } else {
                dir_state.names.put(name, Known::Absent, most);
                dir_changed(dir_state, place.sequence, now, -1, -i32::from(is_rmdir));
            }
            let links = if is_rmdir { record.nlink } else { 1 };
            unlinked(locked.get(ino), place.sequence, now, links);
            if joint {
                Self::hide(locked.get(ino));
            }
            Ok(ino)
        };
        let undo = |ino: InodeId, _| self.forget_done(&[ino]);
        let shows = |ino: &InodeId| Ok(!self.leads_to(parent, name, *ino)?);
        let removed = self.change_names(attempt, undo, shows);
        self.keep_only(kept, removed.ok().map(|(ino, _)| ino));
        removed.map(|_| ())
    }

    /// What was done to these inodes was not taken: what is known of them is asked for again.
    pub(crate) fn forget_done(&self, inodes: &[InodeId]) {
        for ino in inodes {
            self.inode(*ino).state.write().lease = rpc::Granted::default();
        }
    }

    /// Before a directory goes: nothing is in it. Where a limit may bar what this process has put there, the service's word is
    /// waited for: what it refuses was never there.
    fn is_empty(&self, turn: &Turn<H>, dir: &InodeRecord) -> Step<(), H> {
        if dir.entries == 0 {
            return Ok(());
        }
        let unsure = dir.limited && turn.shown(dir.ino).is_none_or(|shown| shown.entries == 0);
        if unsure && !planted(Bug::RefusedIsThere) {
            return Err(Stop::Wait(Wait::Renewal { ino: dir.ino }));
        }
        Err(Errno::NOTEMPTY.into())
    }

    /// Before a directory goes: somebody may stand in it, of whom a kernel in front of this says nothing. It counts as
    /// open until the kernel has forgotten it.
    fn keep_for_kernel(
        &self,
        turn: &mut Turn<H>,
        victim: &Arc<Inode<H>>,
        state: &mut State,
        kept: &mut Vec<Arc<Inode<H>>>,
    ) -> Step<(), H> {
        if state.record.mode & S_IFMT != S_IFDIR || !self.kernel.is_there() {
            return Ok(());
        }
        if !kept.iter().any(|inode| inode.ino == victim.ino) {
            state.open += 1;
            kept.push(Arc::clone(victim));
        }
        let flags = if state.pinned { 0 } else { rpc::WANT_PIN };
        looked_up_again(self.hold(turn, victim.ino, state, LeaseMode::Write, flags))
    }

    /// Of what was kept for the kernel only `gone` has gone.
    fn keep_only(&self, kept: Vec<Arc<Inode<H>>>, gone: Option<InodeId>) {
        for inode in kept {
            if Some(inode.ino) == gone {
                inode.state.write().for_kernel = true;
            } else {
                self.close_inode(&inode);
            }
        }
    }

    /// The kernel in front of this knows the inode no more, unless it is `told` of it again: then it may have removed it since,
    /// and somebody stands in it. (If it is told later than that is asked, what is kept here was removed before: no name leads
    /// to it.)
    pub(crate) fn do_forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        let Some(inode) = self.inodes.read().get(&ino.0).cloned() else { return };
        let was_kept = {
            let mut state = inode.state.write();
            !told() && core::mem::take(&mut state.for_kernel)
        };
        if was_kept {
            self.close_inode(&inode);
        }
    }

    /// Inode and type that a name leads to, if it does; nothing stays locked.
    fn resolve(
        &self,
        turn: &mut Turn<H>,
        caller: &Caller<'_>,
        dir: &Arc<Inode<H>>,
        name: &[u8],
    ) -> Step<Option<(InodeId, u32)>, H> {
        let mut state = dir.state.write();
        self.hold(turn, dir.ino, &mut state, LeaseMode::Read, 0)?;
        search(caller, &state.record)?;
        match self.find(turn, dir.ino, &state, name)? {
            Known::Present(ino, kind) => Ok(Some((ino, kind))),
            Known::Absent => Ok(None),
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
        let mut before = self.current().map(|session| (session.number, session.refusals()));
        let (mut limited, mut own) = (false, Sequence(0));
        let attempt = |turn: &mut Turn<H>, by: By| {
            let session = turn.session;
            let mut locked = Locked::new(&[&dir, &inode]);
            self.hold(turn, parent, locked.get(parent), LeaseMode::Write, by.flags())?;
            let joint = locked.get(parent).is_joint();
            self.hold(turn, ino, locked.get(ino), LeaseMode::Write, 0)?;
            // (Its only name is counted with the inode.)
            limited =
                locked.get(parent).record.limited && locked.get(ino).record.nlink > 0 && !joint;
            search(caller, &locked.get(parent).record)?;
            if self.find(turn, parent, locked.get(parent), name)? != Known::Absent {
                return Err(Errno::EXIST.into());
            }
            there_still(&locked.get(parent).record)?;
            let record = locked.get(ino).record.clone();
            may_link(caller, &record)?;
            may(caller, &locked.get(parent).record, W | X)?;
            if record.mode & S_IFMT == S_IFDIR {
                return Err(Errno::PERM.into());
            }
            if record.nlink == 0 && !record.linkable {
                return Err(Errno::NOENT.into());
            }
            if record.nlink >= LINK_MAX {
                return Err(Errno::MLINK.into());
            }
            if record.project != locked.get(parent).record.project {
                return Err(Errno::XDEV.into());
            }
            let now = Self::now(&[&locked.get(parent).record, &record]);
            let op = Op::Link { ino, parent, name };
            Self::count_in(&mut before, session);
            let refusals = if joint { self.begin_joint(turn)? } else { 0 };
            let place = self.log(turn, parent.0, &locked.states(), &op, now)?;
            own = place.sequence;
            let (state, most) = (locked.get(parent), self.config.limits.names);
            let known = Known::Present(ino, record.mode & S_IFMT);
            if joint {
                state.last = place.sequence;
                let lease = locked.get(ino).lease;
                Self::joint(turn, refusals, place.sequence, (ino, lease));
            } else {
                state.names.put(name, known, most);
                dir_changed(state, place.sequence, now, 1, 0);
            }
            let state = locked.get(ino);
            state.record.nlink += 1;
            state.record.linkable = false;
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            let attr = state.attr();
            if joint {
                Self::hide(state);
            }
            Ok(attr)
        };
        let undo = |_: Attr, _| self.forget_done(&[ino, parent]);
        let shows = |_: &Attr| self.leads_to(parent, name, ino);
        let (attr, taken) = self.change_names(attempt, undo, shows)?;
        if let Some(taken) = taken {
            self.give_name(parent, name, (ino, attr.kind()), taken);
        }
        if limited {
            // (By the directory's word. What was not named has as many names as before.)
            let settled = self.settle_but(&dir, before, (own, own));
            settled.inspect_err(|_| self.forget_done(&[ino]))?;
        }
        Ok(attr)
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
        let mut kept = Vec::new();
        let mut doubted = false;
        let attempt = |turn: &mut Turn<H>, by: By| {
            let by = if doubted && by == By::Guess { By::Asking } else { by };
            let mut with = |by| {
                let dirs = (&old, &new);
                self.try_rename(turn, caller, rename, dirs, (noreplace, exchange, by), &mut kept)
            };
            match with(by) {
                // What the new name leads to may be another reason, or none: of two names of one file Linux asks nobody.
                Err(Stop::Failed(_)) if by == By::Guess && !planted(Bug::GuessBelieved) => {
                    doubted = true;
                    with(By::Asking)
                }
                tried => tried,
            }
        };
        let undo = |Renamed { moved, replaced, .. }: Renamed, _| {
            self.forget_done(&[moved, rename.parent, rename.new_parent]);
            replaced.iter().for_each(|ino| self.forget_done(&[*ino]));
        };
        let shows = |done: &Renamed| self.leads_to(rename.new_parent, rename.new_name, done.moved);
        let renamed = self.change_names(attempt, undo, shows);
        if let Ok((Renamed { moved, kind, .. }, Some(taken))) = renamed
            && !exchange
        {
            self.give_name(rename.new_parent, rename.new_name, (moved, kind), taken);
        }
        let gone = renamed.as_ref().ok().and_then(|(done, _)| done.replaced);
        self.keep_only(kept, gone.filter(|_| !exchange));
        renamed.map(|_| ())
    }

    /// What the new name leads to before a rename.
    fn resolve_target(
        &self,
        turn: &mut Turn<H>,
        caller: &Caller<'_>,
        dir: &Arc<Inode<H>>,
        name: &[u8],
        by: By,
    ) -> Step<Option<(InodeId, u32)>, H> {
        if by == By::Guess {
            let mut state = dir.state.write();
            self.hold(turn, dir.ino, &mut state, LeaseMode::Read, 0)?;
            search(caller, &state.record)?;
            let unknown = state.is_joint()
                && turn.found(dir.ino, name).is_none()
                && self.given(turn.session, &state, name).is_none();
            if unknown {
                // Nothing, mostly.
                return Ok(None);
            }
        }
        self.resolve(turn, caller, dir, name)
    }

    fn try_rename(
        &self,
        turn: &mut Turn<H>,
        caller: &Caller<'_>,
        rename: &Rename<'_>,
        (old, new): (&Arc<Inode<H>>, &Arc<Inode<H>>),
        (noreplace, exchange, by): (bool, bool, By),
        kept: &mut Vec<Arc<Inode<H>>>,
    ) -> Step<Renamed, H> {
        let (ino, kind) = self.resolve(turn, caller, old, rename.name)?.ok_or(Errno::NOENT)?;
        // Only of a file it may be guessed that its new name is free.
        let guess = if kind == S_IFDIR || exchange { By::Asking } else { by };
        let replaced = self.resolve_target(turn, caller, new, rename.new_name, guess)?;
        match replaced {
            Some(_) if noreplace => return Err(Errno::EXIST.into()),
            None if exchange => return Err(Errno::NOENT.into()),
            Some((same, _)) if same == ino => {
                return Ok(Renamed { moved: ino, kind, replaced: None });
            }
            _ => {}
        }
        let across = old.ino != new.ino;
        let other_dir = replaced.is_some_and(|(_, k)| k == S_IFDIR);
        let moved = self.inode(ino);
        let victim = replaced.map(|(i, _)| self.inode(i));
        let mut all = alloc::vec![old, new, &moved];
        all.extend(victim.as_ref());
        let moves_dir = across && (kind == S_IFDIR || other_dir);
        let mut locked = Locked::new(&all);
        for dir in [old, new] {
            let flags = if turn.strict { 0 } else { by.flags() };
            self.hold(turn, dir.ino, locked.get(dir.ino), LeaseMode::Write, flags)?;
        }
        let joint = [old, new].map(|dir| locked.get(dir.ino).is_joint());
        for inode in all.iter().filter(|i| ![old.ino, new.ino].contains(&i.ino)) {
            let held = self.hold(turn, inode.ino, locked.get(inode.ino), LeaseMode::Write, 0);
            for dir in [old, new] {
                forget_names(&held, locked.get(dir.ino));
            }
            looked_up_again(held)?;
        }
        // (Where others change names as well, the head looks whether they are still so.)
        let expected = replaced.map_or(Known::Absent, |(i, k)| Known::Present(i, k));
        if !joint[0]
            && self.find(turn, old.ino, locked.get(old.ino), rename.name)?
                != Known::Present(ino, kind)
            || !joint[1]
                && self.find(turn, new.ino, locked.get(new.ino), rename.new_name)? != expected
        {
            return Err(Stop::Wait(Wait::Again));
        }
        there_still(&locked.get(new.ino).record)?;
        if moves_dir {
            // Before anything is asked of who may do it: Linux knows from the names alone.
            let skip: Vec<InodeId> = all.iter().map(|i| i.ino).collect();
            let mut refusal = Errno::INVAL;
            let mut below = match kind {
                // Also when the target is not empty.
                S_IFDIR => self.is_below(turn, &locked, &skip, new.ino, ino)?,
                _ => Below::No,
            };
            if let (Below::No, Some((other, S_IFDIR))) = (&below, replaced) {
                below = self.is_below(turn, &locked, &skip, old.ino, other)?;
                if !exchange {
                    // What is moved lies in it, so that it is not empty.
                    refusal = Errno::NOTEMPTY;
                }
            }
            match below {
                Below::No => {}
                Below::Yes if joint.contains(&true) => {
                    // If the names lead there still.
                    turn.strict = true;
                    return Err(Stop::Wait(Wait::Again));
                }
                Below::Yes => {
                    // At one moment: all of them are held.
                    let held = |s: &&State| self.held(turn.session, s, LeaseMode::Write);
                    let all = locked.states().iter().all(held) && turn.has_grounds();
                    let now = all && turn.session.segment.in_time();
                    return Err(if now { refusal.into() } else { Stop::Wait(Wait::Again) });
                }
                // Its holder may wait for what is locked here.
                Below::Busy(inode) => return Err(Stop::Wait(Wait::Locked(inode))),
            }
        }
        let record = locked.get(ino).record.clone();
        may_remove(caller, &locked.get(old.ino).record, &record)?;
        may(caller, &locked.get(new.ino).record, W | X)?;
        if let Some((other, other_kind)) = replaced {
            let victim = locked.get(other).record.clone();
            may_remove(caller, &locked.get(new.ino).record, &victim)?;
            if !exchange {
                match (kind == S_IFDIR, other_kind == S_IFDIR) {
                    (true, false) => return Err(Errno::NOTDIR.into()),
                    (false, true) => return Err(Errno::ISDIR.into()),
                    _ => {}
                }
            }
        }
        if moves_dir && kind == S_IFDIR {
            // Its `..` changes.
            may(caller, &record, W)?;
        }
        if let Some((other, S_IFDIR)) = replaced
            && moves_dir
            && exchange
            && !planted(Bug::ExchangedUnasked)
        {
            may(caller, &locked.get(other).record, W)?;
        }
        let own = |r: &InodeRecord| r.project == r.ino;
        let moved_own = own(&record)
            && replaced.is_none_or(|(other, _)| !exchange || own(&locked.get(other).record));
        let from = locked.get(old.ino).record.project;
        if from != locked.get(new.ino).record.project && !moved_own {
            // From one quota's tree to another: programs copy.
            return Err(Errno::XDEV.into());
        }
        if let Some((other, S_IFDIR)) = replaced
            && !exchange
        {
            self.is_empty(turn, &locked.get(other).record)?;
        }
        if let Some(victim) = victim.as_ref().filter(|_| !exchange) {
            self.keep_for_kernel(turn, victim, locked.get(victim.ino), kept)?;
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
        let counts_if_taken = joint.contains(&true);
        let refusals = if counts_if_taken { self.begin_joint(turn)? } else { 0 };
        let place = self.log(turn, old.ino.0, &locked.states(), &op, now)?;
        if counts_if_taken {
            let lease = locked.get(ino).lease;
            Self::joint(turn, refusals, place.sequence, (ino, lease));
        }
        let most = self.config.limits.names;
        let is_dir = i32::from(kind == S_IFDIR);
        let there = Known::Present(ino, kind);
        let changed = |state: &mut State| {
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
        };
        locked.get(new.ino).names.put(rename.new_name, there, most);
        match replaced {
            Some((other, other_kind)) if exchange => {
                let other_is_dir = i32::from(other_kind == S_IFDIR);
                let back = Known::Present(other, other_kind);
                locked.get(old.ino).names.put(rename.name, back, most);
                let links = if across { other_is_dir - is_dir } else { 0 };
                dir_changed(locked.get(old.ino), place.sequence, now, 0, links);
                dir_changed(locked.get(new.ino), place.sequence, now, 0, -links);
                if other_kind == S_IFDIR {
                    locked.get(other).record.parent = old.ino;
                }
                changed(locked.get(other));
            }
            _ => {
                locked.get(old.ino).names.put(rename.name, Known::Absent, most);
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
        if counts_if_taken {
            locked.get(old.ino).take_name(rename.name);
            locked.get(new.ino).take_name(rename.new_name);
            for inode in &all {
                let state = locked.get(inode.ino);
                if state.is_joint() {
                    // Others may have changed it by now.
                    state.names = Names::default();
                } else {
                    Self::hide(state);
                }
            }
        }
        Ok(Renamed { moved: ino, kind, replaced: replaced.map(|(other, _)| other) })
    }

    /// Whether `dir` is `top` or lies below it: of all on the way up there is a lease, and what is found counts for as long as they
    /// hold ([`Turn::has_grounds`]). A directory changes its parent under its own write lease. So of two renames that together would close
    /// a cycle, and neither of them alone, one takes from the other what that goes by.
    fn is_below(
        &self,
        turn: &mut Turn<H>,
        locked: &Locked<'_, H>,
        held: &[InodeId],
        dir: InodeId,
        top: InodeId,
    ) -> Step<Below<H>, H> {
        let mut at = dir;
        // Deeper than any path that a program can name.
        for _ in 0..65_536 {
            if at == top {
                return Ok(Below::Yes);
            }
            if at == InodeId::NONE {
                return Ok(Below::No);
            }
            let parent = if held.contains(&at) {
                // (It is changed, and so its lease is looked at with the others.)
                locked.guards[locked.position(at)].1.record.parent
            } else {
                let inode = self.inode(at);
                // Upwards is against the order of locks: there is no waiting.
                let Some(mut state) = inode.state.try_write() else {
                    return Ok(Below::Busy(inode));
                };
                self.hold(turn, at, &mut state, LeaseMode::Read, 0)?;
                turn.counts_on(&state);
                state.record.parent
            };
            // (Of the root as well: earlier versions do this under its write lease.)
            if at == InodeId::ROOT {
                return Ok(Below::No);
            }
            at = parent;
        }
        Err(Errno::LOOP.into())
    }

    pub(crate) fn do_readlink(&self, ino: InodeId) -> Result<Vec<u8>> {
        self.with_state(ino, LeaseMode::Read, |_, state| {
            if state.record.mode & S_IFMT != S_IFLNK {
                return Err(Errno::INVAL.into());
            }
            Ok(state.target.clone())
        })
    }

    pub(crate) fn do_readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let mut cookie = cookie;
        // Names may be remembered as the whole list if one lease spans the listing.
        let mut whole: Option<rpc::Granted> = None;
        loop {
            let start = cookie;
            let body = self.with_state(ino, LeaseMode::Read, |turn, state| {
                if state.record.mode & S_IFMT != S_IFDIR {
                    return Err(Errno::NOTDIR.into());
                }
                may(caller, &state.record, R)?;
                if state.record.nlink == 0 {
                    return Err(Errno::NOENT.into());
                }
                let (after, lease, exact) = (state.last, state.lease, false);
                let what = Ask::Names { dir: ino, cookie: start };
                let (body, same) = turn.ask(Question { what, after, lease, exact })?;
                if start == 0 {
                    whole = same.then_some(lease);
                }
                let same = same && whole == Some(lease) || planted(Bug::ListOfBefore);
                let end = self.remember(turn.session, state, &body, same)?;
                Ok((body, end))
            })?;
            let (body, end) = body;
            let mut r = storage::format::Reader::new("reply to Names", &body);
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

    /// Puts listed names into the cache, if the lease that spans the listing still holds; says whether the list
    /// ended.
    fn remember(
        &self,
        session: &Session<H>,
        state: &mut State,
        body: &[u8],
        same: bool,
    ) -> Result<bool> {
        let mut r = storage::format::Reader::new("reply to Names", body);
        let end = r.u8().map_err(|_| Errno::IO)? != 0;
        if !same || !self.holds(session, state, LeaseMode::Read) || state.names.complete {
            return Ok(end);
        }
        while r.left() > 0 {
            let name = rpc::take_name(&mut r).map_err(|_| Errno::IO)?;
            self.proofs.put(name.ino, name.proof);
            if name.name != b"." && name.name != b".." && state.names.get(name.name).is_none() {
                let known = Known::Present(name.ino, name.kind);
                state.names.put(name.name, known, self.config.limits.names);
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

/// What a name leads to is not there. Perhaps it never was: its making was refused, and only the names that are kept of
/// the directory show it. They are asked for again.
fn forget_names<H: Host>(held: &Step<(), H>, dir: &mut State) {
    if matches!(held, Err(Stop::Failed(Errno::NOENT | Errno::STALE))) {
        dir.lease = rpc::Granted::default();
    }
}

/// What a name led to a moment ago may be gone: others may have given the name to something else. The name
/// says what is so now.
fn looked_up_again<H: Host>(held: Step<(), H>) -> Step<(), H> {
    match held {
        Err(Stop::Failed(Errno::NOENT | Errno::STALE)) => Err(Stop::Wait(Wait::Again)),
        other => other,
    }
}

pub(super) fn search(caller: &Caller<'_>, record: &InodeRecord) -> Result<()> {
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
    if dir.mode & 0o2000 != 0 && !planted(Bug::GroupOfMaker) {
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

fn new_state<H: Host>(
    session: &Session<H>,
    lease: rpc::Granted,
    record: InodeRecord,
    target: &[u8],
) -> State {
    State {
        lease,
        session: session.number,
        record,
        pieces: Pieces::empty(),
        target: target.to_vec(),
        names: Names { complete: true, ..Names::default() },
        pinned: true,
        may_read: true,
        may_write: true,
        ..State::default()
    }
}

/// A directory's own fields after one of its names changed.
fn dir_changed(state: &mut State, sequence: Sequence, now: u64, entries: i64, links: i32) {
    state.last = sequence;
    if state.is_joint() {
        // What the others do is not counted here either.
        return;
    }
    state.record.mtime = Stamp::from_nanos(now);
    state.record.ctime = Stamp::from_nanos(now);
    state.record.entries = state.record.entries.saturating_add_signed(entries);
    state.record.nlink = state.record.nlink.saturating_add_signed(links);
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
