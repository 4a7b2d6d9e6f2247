//! Requests and replies: leases, names, numbers; what the client sees is compared with the model.

use client::libfs::requests::{self as slots, Seen};
use storage::format::proof::Proof;

use super::*;
use crate::host::SECRET;
use crate::rights::{R, Who};

impl World<'_> {
    pub(crate) fn ask(
        &mut self,
        c: usize,
        plan: Plan,
        request: &Request<'_>,
        ask: Ask,
    ) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        let (memory, after) = (&s.memory, s.log.last());
        let mut body = Vec::new();
        // What a plan is about the client has been shown; that a stranger is refused is not tested here.
        let proof = request.names().map_or(Proof::NONE, |ino| Proof::new(SECRET, ino));
        request.encode_shown(after, proof, &mut body);
        let slot = c % storage::limits::RPC_SLOTS;
        slots::put(memory, slot, &body);
        self.trace(|| format!("client {c} asks {ask:?} after {after}"));
        self.actors[c].phase = Phase::Asked(plan, slot, ask, body);
        self.ring(c, true)?;
        self.wait(c)
    }

    pub(crate) fn look_for_reply(
        &mut self,
        c: usize,
        plan: Plan,
        slot: usize,
        ask: Ask,
        mut body: Vec<u8>,
    ) -> Result<(), String> {
        let Some(memory) = self.session(c).map(|s| &s.memory) else { return Ok(()) };
        let seen = slots::look(memory, slot);
        if seen == Seen::Again {
            // nicfs was started anew.
            slots::put(memory, slot, &body);
        }
        if seen != Seen::Reply {
            self.ring(c, true)?;
            return self.wait(c);
        }
        slots::take(memory, slot, &mut body);
        let (status, mut r) = rpc::reply_status(&body).map_err(|e| e.to_string())?;
        self.trace(|| format!("client {c} hears {ask:?} {status:?}"));
        let next = match (ask, status) {
            (Ask::Inode(ino), Ok(())) => {
                let reply = InodeReply::decode(&mut r).map_err(|e| e.to_string())?;
                self.inode_reply(c, ino, &reply)?
            }
            (Ask::Inode(ino), Err(base::Errno::NOENT)) => {
                // No lease protects this view: it may be out of date by the time it is read.
                if ino == 1 {
                    return Err(format!("client {c}: there is no root directory"));
                }
                return self.rest(c);
            }
            (Ask::Names(ino), Ok(())) => {
                let names = take_names(&mut r).map_err(|e| format!("client {c}: {e}"))?;
                self.names_reply(c, ino, names)?;
                None
            }
            (Ask::OwnNames(ino), Ok(())) => {
                let names = take_names(&mut r).map_err(|e| format!("client {c}: {e}"))?;
                self.own_names_reply(c, ino, names)?;
                return self.rest(c);
            }
            (Ask::OwnXattr(ino, name), Ok(())) => {
                self.own_xattr_reply(c, ino, name, Some(r.rest()))?;
                return self.rest(c);
            }
            (Ask::OwnXattr(ino, name), Err(base::Errno::NODATA)) => {
                self.own_xattr_reply(c, ino, name, None)?;
                return self.rest(c);
            }
            // Somebody else has removed it since.
            (Ask::OwnXattr(ino, _) | Ask::OwnNames(ino), Err(base::Errno::NOENT))
                if !self.holds(c, ino, LeaseMode::Read) =>
            {
                return self.rest(c);
            }
            (Ask::Numbers, Ok(())) => {
                self.numbers_reply(c, &mut r).map_err(|e| e.to_string())?;
                None
            }
            (Ask::Release, Ok(())) => return self.rest(c),
            (Ask::Unpin, Ok(())) => {
                let number = self.session(c).map(|s| s.number);
                number.into_iter().for_each(|number| self.unpin(number));
                return self.rest(c);
            }
            (Ask::Names(_), Err(base::Errno::NOTDIR | base::Errno::NOENT)) => None,
            (Ask::Names(ino), Err(base::Errno::ACCES)) if self.is_barred_perhaps(c, ino) => {
                return self.rest(c);
            }
            (_, Err(e)) => return Err(format!("client {c}: {ask:?} refused with {e:?}")),
        };
        match next {
            Some((request_ino, ask)) => {
                let request = Request::Names { dir: InodeId(request_ino), cookie: 0 };
                self.ask(c, plan, &request, ask)
            }
            None => {
                self.actors[c].phase = Phase::Working(plan);
                let delay = self.between(100, 3 * US);
                self.step_in(c, delay);
                Ok(())
            }
        }
    }

    pub(crate) fn inode_reply(
        &mut self,
        c: usize,
        ino: u64,
        reply: &InodeReply,
    ) -> Result<Option<(u64, Ask)>, String> {
        let granted = reply.granted;
        if granted.word.0 == 0 || self.word(c, control::lease_word(granted.slot)) != granted.word.0
        {
            return Ok(None);
        }
        let mode = granted.word.mode();
        let record = &reply.record;
        let times = (record.mtime.nanos(), record.ctime.nanos());
        let seen = (record.mode, record.uid, record.gid, record.project.0, times);
        let mut lease = Lease {
            slot: granted.slot,
            word: granted.word,
            mode,
            seen: false,
            record: seen,
            view: None,
        };
        self.check_leases(c, ino, mode)?;
        let state = |body| {
            let (mode, uid, gid, project, (mtime, ctime)) = seen;
            State { mode, uid, gid, project, mtime, ctime, xattrs: None, body }
        };
        if record.mode & S_IFMT == S_IFREG && record.nlink > 0 {
            let bytes = self.file_content(c, reply)?;
            lease.view = Some(state(Body::File(bytes, record.nlink)));
        } else if record.mode & S_IFMT == S_IFLNK && record.nlink > 0 {
            lease.view = Some(state(Body::Symlink(reply.target.to_vec(), record.nlink)));
        } else if record.nlink == 0 {
            self.see(c, ino, &State::gone())?;
        }
        if let Some(view) = &lease.view {
            self.see(c, ino, view)?;
            lease.seen = true;
        }
        if let Some(s) = &mut self.actors[c].session {
            s.leases.insert(ino, lease);
            s.ever.insert(ino);
        }
        let is_dir = record.mode & S_IFMT == S_IFDIR && record.nlink > 0;
        Ok(is_dir.then_some((ino, Ask::Names(ino))))
    }

    /// Whether the client's user may not read that, perhaps.
    fn is_barred_perhaps(&self, c: usize, ino: u64) -> bool {
        let who = Who::alone(self.actors[c].uid);
        self.model.candidates(ino).iter().any(|s| who.may(s, R) != Some(true))
    }

    pub(crate) fn file_content(&self, c: usize, reply: &InodeReply) -> Result<Vec<u8>, String> {
        let size = reply.record.size;
        let mut bytes = vec![0; size as usize];
        for e in &reply.extents {
            if e.unwritten || e.offset >= size {
                continue;
            }
            let end = (e.offset + e.len).min(size);
            let target = &mut bytes[e.offset as usize..end as usize];
            self.media(c)
                .read(Segment::Arena(e.arena), e.arena_offset, target)
                .map_err(|x| format!("client {c}: extent {e:?}: {x}"))?;
        }
        Ok(bytes)
    }

    pub(crate) fn names_reply(
        &mut self,
        c: usize,
        ino: u64,
        names: BTreeMap<Vec<u8>, u64>,
    ) -> Result<(), String> {
        let Some(lease) = self.session(c).and_then(|s| s.leases.get(&ino)).cloned() else {
            return Ok(());
        };
        if self.word(c, control::lease_word(lease.slot)) != lease.word.0 {
            return Ok(());
        }
        let (mode, uid, gid, project, (mtime, ctime)) = lease.record;
        let body = Body::Dir(names);
        let view = State { mode, uid, gid, project, mtime, ctime, xattrs: None, body };
        self.see(c, ino, &view)?;
        if let Some(lease) = self.actors[c].session.as_mut().and_then(|s| s.leases.get_mut(&ino)) {
            (lease.seen, lease.view) = (true, Some(view));
        }
        Ok(())
    }

    /// Asks for what the client has just changed, under the leases that it did it with: it may ask no
    /// more for them than LibFS does.
    pub(crate) fn look_at_own(&mut self, c: usize, plan: &Plan) -> Result<(), String> {
        let targets = [self.target(plan.dir, &plan.name), self.target(plan.dir2, &plan.name2)];
        let all: Vec<u64> = [plan.dir, plan.dir2]
            .into_iter()
            .chain(targets.into_iter().flatten())
            .filter(|ino| self.holds(c, *ino, LeaseMode::Read))
            .filter(|ino| self.model.current(*ino).is_some_and(|s| s.body != Body::Gone))
            .collect();
        // A guest may not read all that it may change.
        if all.is_empty() || self.actors[c].uid != 0 {
            return self.rest(c);
        }
        let at = all[self.random.below(all.len() as u64) as usize];
        let is_dir = matches!(self.model.current(at), Some(State { body: Body::Dir(_), .. }));
        let (ino, half) = (InodeId(at), self.random.chance(1, 2));
        if is_dir && half {
            return self.ask(
                c,
                plan.clone(),
                &Request::Names { dir: ino, cookie: 0 },
                Ask::OwnNames(at),
            );
        }
        let name = if half { b"user.a" } else { b"user.b" };
        self.ask(c, plan.clone(), &Request::XattrGet { ino, name }, Ask::OwnXattr(at, name))
    }

    fn own_names_reply(
        &mut self,
        c: usize,
        ino: u64,
        names: BTreeMap<Vec<u8>, u64>,
    ) -> Result<(), String> {
        if !self.holds(c, ino, LeaseMode::Read) {
            return Ok(());
        }
        let lease = self.session(c).and_then(|s| s.leases.get(&ino));
        let Some(kept) = lease.and_then(|lease| lease.view.clone()) else { return Ok(()) };
        self.see(c, ino, &State { body: Body::Dir(names), ..kept })
    }

    fn own_xattr_reply(
        &mut self,
        c: usize,
        ino: u64,
        name: &[u8],
        value: Option<&[u8]>,
    ) -> Result<(), String> {
        if !self.holds(c, ino, LeaseMode::Read) {
            return Ok(());
        }
        self.outcome.observations += 1;
        self.model.may_have_xattr(ino, name, value).map_err(|e| format!("client {c}: {e}"))
    }

    pub(crate) fn numbers_reply(
        &mut self,
        c: usize,
        r: &mut base::wire::Reader<'_>,
    ) -> Result<(), base::wire::Corrupt> {
        let count = r.u32()?;
        for _ in 0..count {
            let (ino, slot, word) = (r.u64()?, r.u32()?, LeaseWord(r.u64()?));
            let _proof = r.u64()?;
            if let Some(s) = &mut self.actors[c].session {
                let (mode, record) = (LeaseMode::Write, (0, 0, 0, 0, (0, 0)));
                s.leases.insert(ino, Lease { slot, word, mode, seen: true, record, view: None });
                s.ever.insert(ino);
                // Those that it wastes it never uses.
                if s.fresh.len() < 300 {
                    s.fresh.insert(0, ino);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn see(&mut self, c: usize, ino: u64, state: &State) -> Result<(), String> {
        self.outcome.observations += 1;
        let by = self.session(c).map(|s| s.number);
        self.trace(|| format!("client {c} sees {ino}: {}", state.summary()));
        self.model.observe(by, ino, state).map_err(|e| format!("client {c}: {e}"))
    }

    /// Nobody else may hold what excludes this.
    pub(crate) fn check_leases(&self, c: usize, ino: u64, mode: LeaseMode) -> Result<(), String> {
        for other in 0..self.actors.len() {
            let Some(s) = self.session(other) else { continue };
            let Some(lease) = s.leases.get(&ino) else { continue };
            let valid = self.word(other, control::lease_word(lease.slot)) == lease.word.0
                && self.word(other, control::STATE) == control::STATE_ATTACHED
                && self.in_time(other);
            let excludes = lease.mode == LeaseMode::Write || mode == LeaseMode::Write;
            if other != c && valid && excludes {
                return Err(format!(
                    "leases conflict: inode {ino} {mode:?} at client {c}, {:?} at client {other}",
                    lease.mode
                ));
            }
        }
        Ok(())
    }
}

/// Names and where they lead, of a list that must be whole.
fn take_names(r: &mut base::wire::Reader<'_>) -> Result<BTreeMap<Vec<u8>, u64>, String> {
    let mut names = BTreeMap::new();
    let end = r.u8().map_err(|e| e.to_string())?;
    while r.left() > 0 {
        let name = rpc::take_name(r).map_err(|e| e.to_string())?;
        if name.name != b"." && name.name != b".." {
            names.insert(name.name.to_vec(), name.ino.0);
        }
    }
    if end == 1 { Ok(names) } else { Err("a short list of names has no end".into()) }
}
