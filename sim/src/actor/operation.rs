//! Operations: the entry, what it brings about, the append.

use storage::limits::FILE_SIZE_MAX;

use super::*;
use crate::acl;
use base::random::Random;

/// fallocate: do not change the size; make a hole; make zeroes.
const KEEP_SIZE: u16 = 1;
const PUNCH_HOLE: u16 = 2;
const ZERO_RANGE: u16 = 16;
const BLOCK: u64 = 4096;
/// The attributes that are access control lists.
const ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// One in so many entries is changed under its checksum.
const BROKEN: u64 = 80;
/// Realtime of the simulated clients.
const REALTIME: Nanos = 1_700_000_000_000_000_000;

/// An operation that a plan came to: what it touches, and how that looks afterwards.
pub(super) struct Work {
    pub(super) states: BTreeMap<u64, State>,
    pub(super) changed: Vec<u64>,
    time: u64,
}

impl Work {
    fn file(&mut self, ino: u64) -> Option<&mut Vec<u8>> {
        let state = self.states.get_mut(&ino)?;
        state.mtime = self.time;
        match &mut state.body {
            Body::File(bytes, _) => Some(bytes),
            _ => None,
        }
    }

    fn put_name(&mut self, dir: u64, name: &[u8], ino: Option<u64>) {
        let Some(state) = self.states.get_mut(&dir) else { return };
        state.mtime = self.time;
        if let Body::Dir(names) = &mut state.body {
            match ino {
                Some(ino) => names.insert(name.to_vec(), ino),
                None => names.remove(name),
            };
        }
        self.changed.push(dir);
    }

    fn drop_link(&mut self, ino: u64) {
        let Some(state) = self.states.get_mut(&ino) else { return };
        match &mut state.body {
            // What is open somewhere lives on without a name.
            Body::File(_, links) => *links = links.saturating_sub(1),
            Body::Symlink(_, links) if *links > 1 => *links -= 1,
            _ => *state = State::gone(),
        }
        self.changed.push(ino);
    }

    /// Something new in a directory, which gets what it inherits.
    fn make(&mut self, dir: u64, name: &[u8], (ino, mut state): (u64, State)) {
        if let Some(parent) = self.states.get(&dir) {
            state.project = parent.project;
            if !matches!(state.body, Body::Symlink(..)) {
                let list = parent.xattrs.as_ref().and_then(|all| all.get(DEFAULT_ACL));
                list.into_iter().for_each(|list| inherit(&mut state, list));
            }
        }
        self.states.insert(ino, state);
        self.put_name(dir, name, Some(ino));
        self.changed.push(ino);
    }

    /// All that changed did so at that time.
    fn stamp(&mut self) {
        for ino in &self.changed {
            if let Some(state) =
                self.states.get_mut(ino).filter(|s| s.body != Body::Gone && s.mode != 0)
            {
                state.ctime = self.time;
            }
        }
    }

    fn is_dir(&self, ino: u64) -> bool {
        matches!(self.states.get(&ino).map(|s| &s.body), Some(Body::Dir(_)))
    }
}

/// What is made gets of a directory's default list.
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

impl World<'_> {
    pub(crate) fn enter(&mut self, c: usize, plan: Plan) -> Result<(), String> {
        let slot = c % 8;
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word | 1)?;
        let delay = match self.actors[c].stop_for.take() {
            Some(lasts) => lasts,
            None => self.between(100, 20 * US),
        };
        self.actors[c].phase = Phase::Inside(plan, slot);
        self.step_in(c, delay);
        Ok(())
    }

    pub(crate) fn leave(&mut self, c: usize, slot: usize) -> Result<(), String> {
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word + 1)
    }

    /// Appends, and leaves the operation.
    pub(crate) fn finish(&mut self, c: usize, plan: &Plan, slot: usize) -> Result<(), String> {
        if !self.in_time(c) {
            // What is appended now cannot count if others have gone on without this node.
            self.leave(c, slot)?;
            return self.rest(c);
        }
        if self.random.chance(1, 4) {
            let target = self.target(plan.dir, &plan.name);
            for ino in [Some(plan.dir), target].into_iter().flatten() {
                self.look_at_kept(c, ino)?;
            }
        }
        let appended = self.perform(c, plan)?;
        self.leave(c, slot)?;
        if appended {
            self.ring(c, false)?;
            if self.random.chance(1, 6) {
                return self.look_at_own(c, plan);
            }
            return self.rest(c);
        }
        self.actors[c].phase = Phase::Space(plan.clone(), self.word(c, control::reclaim(0)));
        self.ring(c, true)?;
        self.wait(c)
    }

    /// What the plan's inodes are like before it.
    fn work_of(&self, c: usize, plan: &Plan) -> (Work, u64, u64) {
        let target = self.target(plan.dir, &plan.name).unwrap_or(0);
        let fresh = self.session(c).and_then(|s| s.fresh.last().copied()).unwrap_or(0);
        let other = self.target(plan.dir2, &plan.name2).unwrap_or(0);
        let mut states = BTreeMap::new();
        for ino in [plan.dir, plan.dir2, target, other] {
            if let Some(state) = self.model.current(ino) {
                states.insert(ino, state.clone());
            }
        }
        let work = Work { states, changed: Vec::new(), time: self.now + REALTIME };
        (work, target, fresh)
    }

    /// Works out the entry and what it brings about. `false`: the log is full.
    pub(crate) fn perform(&mut self, c: usize, plan: &Plan) -> Result<bool, String> {
        if matches!(plan.kind, Kind::Read | Kind::List) {
            return Ok(true);
        }
        if plan.kind.is_evil() {
            return self.perform_evil(c, plan);
        }
        let lawful = self.is_permitted(c, plan);
        if plan.kind == Kind::Tmpfile {
            return self.tmpfile(c, plan, lawful);
        }
        let (mut work, target, fresh) = self.work_of(c, plan);
        let mut data = Vec::new();
        let op = match plan.kind {
            Kind::Chown if !lawful => Some(chown(target)),
            Kind::Create | Kind::Mkdir | Kind::Symlink => self.create(c, plan, &mut work, fresh),
            Kind::Unlink | Kind::Link | Kind::Rename | Kind::Exchange => {
                self.rename_or_link(plan, &mut work, target)
            }
            Kind::Quota => Some(self.set_quota(plan)),
            Kind::Snapshot => self.snapshot(c, &mut data),
            Kind::Project => self.set_project(plan, &mut work, target),
            Kind::SetXattr
            | Kind::RemoveXattr
            | Kind::SetAcl
            | Kind::SetDefault
            | Kind::Chmod
            | Kind::Chown
            | Kind::Utimes => self.change_attributes(plan, &mut work, target, &mut data),
            _ => {
                let source = match plan.kind {
                    Kind::CloneBack => self.source_then(c, target)?,
                    _ => self.source_now(plan, &work),
                };
                self.change_content(plan, &mut work, target, source, &mut data)
            }
        };
        let Some(op) = op else { return Ok(true) };
        let lawful = lawful && !self.history.is_over(&op);
        let Some(seq) = self.append(c, &op, 0)? else { return Ok(false) };
        if lawful && self.random.chance(1, BROKEN) {
            self.break_newest(c, seq)?;
            return Ok(true);
        }
        let what = if lawful { "does" } else { "dares" };
        self.trace(|| format!("client {c} {what} {seq} {:?} {}", plan.kind, brief(&op)));
        if !lawful {
            self.dared(c, seq);
            return Ok(true);
        }
        let Some(s) = &mut self.actors[c].session else { return Ok(true) };
        if matches!(op, Op::Create { .. })
            && let Some(ino) = s.fresh.pop()
        {
            s.created.push(ino);
            let number = s.number;
            self.pin(number, ino);
        }
        let Some(number) = self.session(c).map(|s| s.number) else { return Ok(true) };
        *self.outcome.kinds.entry(plan.kind.name()).or_default() += 1;
        self.account(c, number, seq, work);
        Ok(true)
    }

    /// Tells the model of an operation that was appended.
    fn account(&mut self, c: usize, session: usize, seq: u64, mut work: Work) {
        work.changed.sort_unstable();
        work.changed.dedup();
        work.stamp();
        let Work { states, changed, .. } = work;
        for ino in &changed {
            let lease = self.actors[c].session.as_mut().and_then(|s| s.leases.get_mut(ino));
            let Some(state) = states.get(ino) else { continue };
            if let Some(lease) = lease {
                lease.view = Some(State { xattrs: None, ..state.clone() });
            }
            self.note_gone(session, *ino, state);
        }
        let changes = changed.iter().filter_map(|i| Some((*i, states.get(i)?.clone()))).collect();
        self.outcome.operations += 1;
        self.model.appended(session, seq, changes);
    }

    fn create<'a>(
        &mut self,
        c: usize,
        plan: &'a Plan,
        work: &mut Work,
        fresh: u64,
    ) -> Option<Op<'a>> {
        let uid = self.actors[c].uid;
        let is_dir = plan.kind == Kind::Mkdir && self.model.dirs().len() < DIRS;
        let mut target = &b""[..];
        let (mode, body) = if is_dir {
            (S_IFDIR | 0o755, Body::Dir(BTreeMap::new()))
        } else if plan.kind == Kind::Symlink {
            target = &plan.name2;
            (S_IFLNK | 0o777, Body::Symlink(target.to_vec(), 1))
        } else {
            // The group may what others may: who is in which group is not followed here.
            let bits = [0o644, 0o644, 0o666, 0o600][self.random.below(4) as usize];
            (S_IFREG | bits, Body::File(Vec::new(), 1))
        };
        work.make(plan.dir, &plan.name, (fresh, State::new(mode, uid, work.time, body)));
        let (ino, parent, name) = (InodeId(fresh), InodeId(plan.dir), &plan.name[..]);
        Some(Op::Create { ino, parent, mode, rdev: 0, uid, gid: uid, name, target })
    }

    fn rename_or_link<'a>(
        &mut self,
        plan: &'a Plan,
        work: &mut Work,
        target: u64,
    ) -> Option<Op<'a>> {
        let (ino, parent, name) = (InodeId(target), InodeId(plan.dir), &plan.name[..]);
        let (new_parent, new_name) = (InodeId(plan.dir2), &plan.name2[..]);
        let other = self.target(plan.dir2, &plan.name2).unwrap_or(0);
        work.changed.push(target);
        let rename = |noreplace, exchange| Op::Rename {
            ino,
            parent,
            name,
            new_parent,
            new_name,
            replaced: InodeId(other),
            noreplace,
            exchange,
            open: false,
        };
        Some(match plan.kind {
            Kind::Unlink => {
                let is_dir = work.is_dir(target);
                work.put_name(plan.dir, name, None);
                work.drop_link(target);
                if is_dir {
                    Op::Rmdir { ino, parent, name, open: false }
                } else {
                    Op::Unlink { ino, parent, name, open: false }
                }
            }
            Kind::Link => {
                work.put_name(plan.dir2, new_name, Some(target));
                if let Some(State { body: Body::File(_, links), .. }) = work.states.get_mut(&target)
                {
                    *links += 1;
                }
                Op::Link { ino, parent: new_parent, name: new_name }
            }
            Kind::Exchange => {
                work.changed.push(other);
                work.put_name(plan.dir, name, Some(other));
                work.put_name(plan.dir2, new_name, Some(target));
                rename(false, true)
            }
            _ => {
                if other != 0 {
                    work.drop_link(other);
                }
                work.put_name(plan.dir, name, None);
                work.put_name(plan.dir2, new_name, Some(target));
                rename(other == 0, false)
            }
        })
    }

    fn change_attributes<'a>(
        &mut self,
        plan: &'a Plan,
        work: &mut Work,
        target: u64,
        data: &'a mut Vec<u8>,
    ) -> Option<Op<'a>> {
        let ino = InodeId(target);
        let (now, uid) = (work.time, if self.random.chance(1, 2) { GUEST } else { 0 });
        let bits = [0o644, 0o600, 0o640, 0o755][self.random.below(4) as usize];
        data.resize(1 + self.random.below(600) as usize, 0);
        self.random.fill(data);
        let later = now + self.random.below(1 << 40);
        let state = work.states.get_mut(&target)?;
        work.changed.push(target);
        let is_file = state.mode & S_IFMT == S_IFREG;
        let stamp = Stamp::from_nanos(later);
        let set = |mask, mode| {
            let (atime, mtime) = (stamp, stamp);
            Some(Op::SetAttr { ino, mask, mode, uid, gid: 0, atime, mtime })
        };
        let name = if plan.name2[0].is_multiple_of(2) { &b"user.a"[..] } else { b"user.b" };
        match plan.kind {
            Kind::Chmod => {
                let mode = if is_file { bits } else { 0o755 };
                state.mode = state.mode & S_IFMT | mode;
                if let Some(list) = state.xattrs.as_mut().and_then(|all| all.get_mut(ACL)) {
                    acl::chmod(list, mode);
                }
                set(mask::MODE, mode)
            }
            Kind::Chown => {
                state.uid = uid;
                set(mask::UID, 0)
            }
            Kind::Utimes => {
                state.mtime = later;
                set(mask::MTIME | mask::ATIME, 0)
            }
            Kind::SetAcl => {
                let rights = |r: &mut Random| r.below(8) as u16;
                let (user, others) = (rights(&mut self.random), rights(&mut self.random));
                // Who passes by searches directories.
                let others = if is_file { others } else { 5 };
                *data = acl::list(7, user, others);
                state.mode = state.mode & !0o777 | acl::mode(7, others);
                state.xattrs.as_mut()?.insert(ACL.to_vec(), data.clone());
                Some(Op::SetXattr { ino, name: ACL, value: data })
            }
            Kind::SetDefault => {
                let others = [5, 7][self.random.below(2) as usize];
                let all = state.xattrs.as_mut()?;
                if all.remove(DEFAULT_ACL).is_some() && data[0].is_multiple_of(4) {
                    return Some(Op::RemoveXattr { ino, name: DEFAULT_ACL });
                }
                *data = acl::list(7, u16::from(data[0] & 7), others);
                all.insert(DEFAULT_ACL.to_vec(), data.clone());
                Some(Op::SetXattr { ino, name: DEFAULT_ACL, value: data })
            }
            Kind::SetXattr => {
                let all = state.xattrs.as_mut()?;
                all.insert(name.to_vec(), data.clone());
                Some(Op::SetXattr { ino, name, value: data })
            }
            _ => {
                let all = state.xattrs.as_mut()?;
                let name =
                    [name, b"user.a", b"user.b"].into_iter().find(|n| all.contains_key(*n))?;
                all.remove(name);
                Some(Op::RemoveXattr { ino, name })
            }
        }
    }

    /// What a clone takes its bytes of.
    fn source_now(&self, plan: &Plan, work: &Work) -> (InodeId, Vec<u8>) {
        let other = self.target(plan.dir2, &plan.name2).unwrap_or(0);
        match work.states.get(&other).map(|s| &s.body) {
            Some(Body::File(bytes, _)) => (InodeId(other), bytes.clone()),
            _ => (InodeId(other), Vec::new()),
        }
    }

    fn change_content<'a>(
        &mut self,
        plan: &'a Plan,
        work: &mut Work,
        target: u64,
        (source, there): (InodeId, Vec<u8>),
        data: &'a mut Vec<u8>,
    ) -> Option<Op<'a>> {
        let ino = InodeId(target);
        let limit = self.preset.file_max;
        let (least, most) = (self.preset.write_min, self.preset.write_max.min(limit));
        let len = least + self.random.below(most - least + 1);
        let mut offset = self.random.below(limit - len + 1);
        let (end, truncated) = (offset + len, self.random.below(limit));
        let keep = self.random.chance(1, 2);
        work.changed.push(target);
        let bytes = work.file(target)?;
        let grow = |bytes: &mut Vec<u8>, end: u64| {
            bytes.resize(bytes.len().max(end as usize), 0);
        };
        match plan.kind {
            Kind::Truncate => {
                bytes.resize(truncated as usize, 0);
                Some(Op::Truncate { ino, size: truncated, clear_setid: false })
            }
            Kind::Fallocate => {
                if !keep {
                    grow(bytes, end);
                }
                let mode = if keep { KEEP_SIZE } else { 0 };
                Some(Op::Fallocate { ino, offset, len, mode })
            }
            Kind::Punch | Kind::Zero => {
                let punch = plan.kind == Kind::Punch;
                if !punch && !keep {
                    grow(bytes, end);
                }
                let upto = (end as usize).min(bytes.len());
                if (offset as usize) < upto {
                    bytes[offset as usize..upto].fill(0);
                }
                let kind = if punch { PUNCH_HOLE } else { ZERO_RANGE };
                let mode = kind | if punch || keep { KEEP_SIZE } else { 0 };
                Some(Op::Fallocate { ino, offset, len, mode })
            }
            Kind::Shift => {
                let size = bytes.len() as u64;
                let (at, by) = (offset % size.max(1) / BLOCK * BLOCK, BLOCK * (1 + truncated % 2));
                let (grows, shrinks) = (at < size && size + by <= limit, at + by < size);
                let (keep, from) = (if keep { grows } else { grows && !shrinks }, at as usize);
                if !grows && !shrinks {
                    return None;
                }
                if keep {
                    bytes.splice(from..from, std::iter::repeat_n(0, by as usize));
                } else {
                    bytes.drain(from..from + by as usize);
                }
                let size = bytes.len() as u64;
                Some(Op::Shift { ino, offset: at, len: by, insert: keep, size })
            }
            Kind::Clone | Kind::CloneBack => {
                if there.is_empty() {
                    return None;
                }
                let mut from = truncated % there.len() as u64;
                let mut len = len;
                if plan.kind == Kind::CloneBack && truncated % 2 == 0 {
                    // All of it.
                    (from, offset, len) = (0, 0, limit);
                } else if keep {
                    // Whole blocks, which can be shared, up to the end.
                    (from, offset, len) = (from / BLOCK * BLOCK, offset / BLOCK * BLOCK, limit);
                }
                let len = len.min(there.len() as u64 - from).min(limit - offset);
                grow(bytes, offset + len);
                let piece = &there[from as usize..(from + len) as usize];
                bytes[offset as usize..(offset + len) as usize].copy_from_slice(piece);
                Some(Op::CloneRange {
                    ino,
                    offset,
                    len,
                    source,
                    source_offset: from,
                    zeroes: false,
                })
            }
            _ => {
                if plan.kind == Kind::Append && bytes.len() as u64 + len <= limit {
                    offset = bytes.len() as u64;
                }
                data.resize(len as usize, 0);
                self.random.fill(data);
                grow(bytes, offset + len);
                bytes[offset as usize..(offset + len) as usize].copy_from_slice(data);
                Some(Op::Write { ino, offset, data, clear_setid: false })
            }
        }
    }

    /// A file that has no name at first, as O_TMPFILE and linkat make it.
    fn tmpfile(&mut self, c: usize, plan: &Plan, lawful: bool) -> Result<bool, String> {
        let (mut work, _, fresh) = self.work_of(c, plan);
        let (ino, parent, uid) = (InodeId(fresh), InodeId(plan.dir), self.actors[c].uid);
        let mode = S_IFREG | 0o644;
        let op = Op::Tmpfile { ino, parent, mode, uid, gid: uid, linkable: true };
        let Some(seq) = self.append(c, &op, 0)? else { return Ok(false) };
        if !lawful {
            self.trace(|| format!("client {c} dares {seq} {}", brief(&op)));
            self.dared(c, seq);
            return Ok(true);
        }
        self.trace(|| format!("client {c} does {seq} {}", brief(&op)));
        let Some(s) = &mut self.actors[c].session else { return Ok(true) };
        s.fresh.pop();
        s.created.push(fresh);
        let number = s.number;
        self.pin(number, fresh);
        let mut data = vec![0; 1 + self.random.below(9000) as usize];
        self.random.fill(&mut data);
        let write = Op::Write { ino, offset: 0, data: &data, clear_setid: false };
        *self.outcome.kinds.entry(plan.kind.name()).or_default() += 1;
        // What the log has no room for is not done: the file stays without a name, and is seen by nobody.
        let Some(seq) = self.append(c, &write, 0)? else { return Ok(true) };
        self.trace(|| format!("client {c} does {seq} {}", brief(&write)));
        let link = Op::Link { ino, parent, name: &plan.name };
        let Some(seq) = self.append(c, &link, 0)? else { return Ok(true) };
        self.trace(|| format!("client {c} does {seq} {}", brief(&link)));
        let state = State::new(mode, uid, work.time, Body::File(data, 1));
        work.make(plan.dir, &plan.name, (fresh, state));
        self.account(c, number, seq, work);
        Ok(true)
    }

    // --- what must be refused ---

    /// Notes an entry that must be refused.
    fn dared(&mut self, c: usize, seq: u64) {
        self.outcome.dared += 1;
        if let Some(s) = &mut self.actors[c].session {
            s.dared.insert(seq);
        }
    }

    /// An entry that breaks a rule other than those of permission.
    fn perform_evil(&mut self, c: usize, plan: &Plan) -> Result<bool, String> {
        let target = self.target(plan.dir, &plan.name).unwrap_or(0);
        let (ino, parent) = (InodeId(target), InodeId(plan.dir));
        let zero = Stamp::default();
        let chmod = |ino| Op::SetAttr {
            ino,
            mask: mask::MODE,
            mode: 0o711,
            uid: 0,
            gid: 0,
            atime: zero,
            mtime: zero,
        };
        let mut epoch = 0;
        let op = match plan.kind {
            Kind::Cycle => Op::Rename {
                ino,
                parent,
                name: &plan.name,
                new_parent: ino,
                new_name: b"x",
                replaced: InodeId::NONE,
                noreplace: true,
                exchange: false,
                open: false,
            },
            Kind::NotEmpty => Op::Rmdir { ino, parent, name: &plan.name, open: false },
            Kind::FutureEpoch => {
                epoch = 1000;
                chmod(ino)
            }
            Kind::NoLease => match self.stranger(c) {
                Some(ino) => chmod(InodeId(ino)),
                None => return Ok(true),
            },
            Kind::OldNumber => match self.old_number(c) {
                Some(old) => Op::Create {
                    ino: InodeId(old),
                    parent,
                    mode: S_IFREG | 0o644,
                    rdev: 0,
                    uid: GUEST,
                    gid: GUEST,
                    name: &plan.name,
                    target: b"",
                },
                None => return Ok(true),
            },
            Kind::Reap => return self.unlink_and_reap(c, plan, target),
            _ => return self.garbage(c),
        };
        let Some(seq) = self.append(c, &op, epoch)? else { return Ok(false) };
        self.trace(|| format!("client {c} dares {seq} {:?} {}", plan.kind, brief(&op)));
        self.dared(c, seq);
        Ok(true)
    }

    /// A file that the guest owns and never had a lease on.
    fn stranger(&self, c: usize) -> Option<u64> {
        let s = self.session(c)?;
        let fits = |ino: &u64| {
            !s.ever.contains(ino)
                && self.model.current(*ino).is_some_and(|x| x.uid == GUEST && !x.is_gone())
        };
        self.model.inodes().into_iter().find(fits)
    }

    /// The number of an inode that was, under a lease that still is.
    fn old_number(&self, c: usize) -> Option<u64> {
        let gone = |i: &u64| self.model.current(*i).is_some_and(State::is_gone);
        let s = self.session(c)?;
        s.created.iter().copied().find(|i| gone(i) && self.holds(c, *i, LeaseMode::Write))
    }

    /// Removes a file that stays open, which is lawful, and frees it, which is not.
    fn unlink_and_reap(&mut self, c: usize, plan: &Plan, target: u64) -> Result<bool, String> {
        let (ino, parent) = (InodeId(target), InodeId(plan.dir));
        let (mut work, ..) = self.work_of(c, plan);
        work.put_name(plan.dir, &plan.name, None);
        work.drop_link(target);
        let op = Op::Unlink { ino, parent, name: &plan.name, open: true };
        let Some(seq) = self.append(c, &op, 0)? else { return Ok(false) };
        self.trace(|| format!("client {c} does {seq} {}", brief(&op)));
        if let Some(number) = self.session(c).map(|s| s.number) {
            self.account(c, number, seq, work);
        }
        if let Some(seq) = self.append(c, &Op::Reap { ino }, 0)? {
            self.trace(|| format!("client {c} dares {seq} Reap {ino}"));
            self.dared(c, seq);
        }
        Ok(true)
    }

    /// Bytes that claim to be the next entry. Nothing comes after them: the client ends.
    fn garbage(&mut self, c: usize) -> Result<bool, String> {
        let lengths = [u32::MAX, 1 << 31, 1 << 20, 4096, 0];
        let length = lengths[self.random.below(5) as usize];
        let kind = self.random.below(20) as u8;
        let (a, b) = (self.random.next_u64(), FILE_SIZE_MAX + self.random.below(3));
        let honest = self.random.chance(1, 2);
        let Some(s) = self.session(c) else { return Ok(true) };
        let raw = RawHeader {
            op: kind,
            length,
            sequence: s.next(),
            lane: 0,
            epoch: s.log.descriptor().epoch.0,
            inode: 1,
            a,
            b,
            ..RawHeader::default()
        };
        let seed = s.log.descriptor().incarnation ^ u32::from(!honest);
        let (segment, bytes) = (s.segment, raw.seal(seed, &[]));
        let (at, seq) = (s.log.next_at(0), s.next());
        self.media(c).write(segment, at, &bytes).map_err(|e| format!("client {c}: {e}"))?;
        self.trace(|| format!("client {c} dares {seq} garbage op {kind} length {length}"));
        self.outcome.dared += 1;
        self.put(c, control::LAST_SEQUENCE, u64::MAX)?;
        self.put(c, control::SYNC_REQUEST, u64::MAX)?;
        self.ring(c, true)?;
        let lasts = self.between(US, 5 * MS);
        self.at(self.now + lasts, Item::Fault(crate::faults::Fault::Kill(c)));
        if let Some(s) = &mut self.actors[c].session {
            // It may decode, and is refused then.
            s.dared.insert(seq);
            s.spoilt = true;
        }
        Ok(true)
    }

    /// The client's newest entry was changed under its checksum, which it does not know: it goes on, as if it
    /// had been done. Its service must notice, and nothing that it does from here on counts.
    fn break_newest(&mut self, c: usize, seq: u64) -> Result<(), String> {
        let Some(s) = &mut self.actors[c].session else { return Ok(()) };
        let (segment, at, number) = (s.segment, s.newest_at, s.number);
        s.broken.get_or_insert(seq);
        let mut byte = [0];
        let media = self.media(c);
        let changed = media.read(segment, at, &mut byte).and_then(|()| {
            byte[0] ^= 1;
            // A power cut does not bring back what it was.
            media.write(segment, at, &byte)?;
            media.persist(segment, at, 1)?;
            media.fence()
        });
        changed.map_err(|e| format!("client {c}: {e}"))?;
        self.trace(|| format!("client {c} breaks {seq}"));
        *self.outcome.kinds.entry("broken").or_default() += 1;
        // What it did before may be cut as well, as for any that is expelled; what it does from now on is.
        self.model.headless(number);
        Ok(())
    }

    // --- the log ---

    /// Into the log: `None` when there is no room. `ahead`: how far the entry's epoch is ahead.
    pub(crate) fn append(
        &mut self,
        c: usize,
        op: &Op<'_>,
        ahead: u32,
    ) -> Result<Option<u64>, String> {
        let lane = match self.session(c) {
            Some(s) if self.preset.write_max < 100_000 => {
                self.random.below(s.log.descriptor().lanes.into()) as u8
            }
            _ => 0,
        };
        let epoch = base::Epoch(self.word(c, control::EPOCH) as u32 + ahead);
        let time = self.now + REALTIME;
        let mut payload = Vec::new();
        let raw = RawHeader { time, epoch: epoch.0, ..op.encode(&mut payload) };
        let payload = if let Op::Write { data, .. } = *op { data } else { &payload };
        let Some(s) = &mut self.actors[c].session else { return Ok(None) };
        let Ok(room) = s.log.room(&s.memory, lane, payload.len()) else { return Ok(None) };
        let place = room.append(raw, payload).persist();
        let seq = place.sequence.0;
        let descriptor = s.log.descriptor();
        s.newest_at = descriptor.lane_offset(lane.into())
            + (place.position - HEADER_BYTES as u64) % descriptor.lane_bytes;
        self.put(c, control::LAST_SEQUENCE, seq)?;
        Ok(Some(seq))
    }
}

/// A guest gives a file to the super-user, or takes one of his.
fn chown(ino: u64) -> Op<'static> {
    let (ino, zero) = (InodeId(ino), Stamp::default());
    let mode = 0o644;
    Op::SetAttr {
        ino,
        mask: mask::UID | mask::MODE,
        mode,
        uid: 0,
        gid: 0,
        atime: zero,
        mtime: zero,
    }
}

fn brief(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {offset}+{}", data.len()),
        Op::SetXattr { ino, value, .. } => format!("setxattr {ino} {}", value.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(160);
            text
        }
    }
}
