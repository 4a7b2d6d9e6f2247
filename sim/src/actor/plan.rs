//! What a client does next, and what it needs for it.

use base::planted::{Bug, planted};

use super::*;
use crate::rights::{R, W, Who, X};
use crate::scenario::Moment;

/// The plan of who has none.
fn nothing() -> Plan {
    Plan { kind: Kind::List, dir: 1, name: Vec::new(), dir2: 1, name2: Vec::new(), tries: 0 }
}

impl World<'_> {
    pub(crate) fn choose(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].since = self.now;
        if self.actors[c].ops == 0 || self.random.chance(1, self.preset.syncs) {
            return self.sync(c);
        }
        self.actors[c].ops -= 1;
        if self.random.chance(1, 20) {
            return self.give_lease_back(c);
        }
        if self.random.chance(1, 12) {
            let inodes = self.pinned(c);
            if !inodes.is_empty() {
                return self.ask(c, nothing(), &Request::Unpin { inodes }, Ask::Unpin);
            }
        }
        let dirs = self.model.dirs();
        let dir = dirs[self.random.below(dirs.len() as u64) as usize];
        let dir2 = dirs[self.random.below(dirs.len() as u64) as usize];
        let mut name = || vec![b'a' + self.random.below(NAMES) as u8];
        let (name, name2) = (name(), name());
        let kind = self.draw_kind(c);
        let plan = Plan { kind, dir, name, dir2, name2, tries: 0 };
        let plan = if kind == Kind::CloneBack { self.about_a_file(plan) } else { plan };
        self.work(c, plan)
    }

    /// The same plan about a name that leads to a file, if there is one.
    fn about_a_file(&mut self, plan: Plan) -> Plan {
        let mut files = Vec::new();
        for dir in self.model.dirs() {
            let Some(Body::Dir(names)) = self.model.current(dir).map(|s| &s.body) else { continue };
            let all = names.iter().filter(|(_, ino)| self.is_file(**ino));
            files.extend(all.map(|(name, _)| (dir, name.clone())));
        }
        if files.is_empty() {
            return plan;
        }
        let (dir, name) = files.swap_remove(self.random.below(files.len() as u64) as usize);
        Plan { dir, name, ..plan }
    }

    /// Asks that everything so far survive.
    pub(crate) fn sync(&mut self, c: usize) -> Result<(), String> {
        let last = self.session(c).map_or(0, |s| s.log.last().0);
        self.put(c, control::SYNC_REQUEST, last)?;
        self.actors[c].phase = Phase::Sync(last);
        self.ring(c, true)?;
        self.look_for_sync(c, last)
    }

    fn draw_kind(&mut self, c: usize) -> Kind {
        if self.preset.hostile && self.actors[c].uid == GUEST && self.random.chance(1, 4) {
            return match self.random.below(13) {
                0 | 1 => Kind::Cycle,
                2 | 3 => Kind::NotEmpty,
                4 | 5 => Kind::FutureEpoch,
                6 | 7 => Kind::NoLease,
                8 | 9 => Kind::OldNumber,
                10 | 11 => Kind::Reap,
                _ => Kind::Garbage,
            };
        }
        if self.preset.has_operator() && self.random.chance(1, 3) {
            return Kind::Snapshot;
        }
        if self.preset.has_operator() && self.random.chance(1, 2) {
            return Kind::CloneBack;
        }
        let favoured = self.preset.favour.len() as u64;
        if favoured > 0 {
            return self.preset.favour[self.random.below(favoured) as usize];
        }
        match self.random.below(46) {
            0..=3 => Kind::Create,
            4 | 5 => Kind::Mkdir,
            6 => Kind::Symlink,
            7..=10 => Kind::Write,
            11 | 12 => Kind::Append,
            13 => Kind::Truncate,
            14 => Kind::Fallocate,
            15 => Kind::Punch,
            16 => Kind::Zero,
            17 | 43 | 44 => Kind::Clone,
            18 => Kind::Chmod,
            19 => Kind::Chown,
            20 => Kind::Utimes,
            21 => Kind::SetXattr,
            22 | 45 => Kind::RemoveXattr,
            23..=25 => Kind::Unlink,
            26 | 27 => Kind::Rename,
            28 => Kind::Exchange,
            29 => Kind::Link,
            30..=32 => Kind::Read,
            33 | 34 => Kind::Tmpfile,
            35 | 36 => Kind::Shift,
            37 => Kind::SetAcl,
            38 => Kind::Quota,
            39 | 40 => Kind::SetDefault,
            41 => Kind::Project,
            _ => Kind::List,
        }
    }

    /// Whether the client's user may do what it plans, by the model.
    pub(crate) fn is_permitted(&self, c: usize, plan: &Plan) -> bool {
        let uid = self.actors[c].uid;
        if uid == 0 {
            return true;
        }
        let target = self.target(plan.dir, &plan.name).unwrap_or(0);
        let other = self.target(plan.dir2, &plan.name2).unwrap_or(0);
        let who = Who::alone(uid);
        let gone = State::gone();
        let state = |ino| self.model.current(ino).unwrap_or(&gone);
        let owns = |ino| who.owns(state(ino));
        let may = |ino, what| who.may(state(ino), what) == Some(true);
        // Who owns a file could let himself first.
        // What it has made and not closed it may write to, whoever has it now.
        let made = |ino| self.own_pin(c, ino) == Some(true);
        let writes = |ino| owns(ino) || may(ino, W) || made(ino);
        // Set-id bits end with a write: the entries of this client do not say so.
        let plain = |ino| state(ino).mode & 0o4000 == 0 && state(ino).mode & 0o2010 != 0o2010;
        let takes = |dir, ino| may(dir, W | X) && who.may_take(state(dir), state(ino));
        match plan.kind {
            Kind::Create | Kind::Mkdir | Kind::Symlink | Kind::Tmpfile => may(plan.dir, W | X),
            Kind::Unlink | Kind::Reap => takes(plan.dir, target),
            Kind::Link => may(plan.dir2, W | X) && who.may_link(state(target)) == Some(true),
            Kind::Rename | Kind::Exchange => {
                let moves = |ino| plan.dir == plan.dir2 || !self.is_dir(ino) || may(ino, W);
                let lets = if other == 0 { may(plan.dir2, W | X) } else { takes(plan.dir2, other) };
                let both = plan.kind == Kind::Rename || moves(other);
                takes(plan.dir, target) && lets && moves(target) && both
            }
            Kind::SetAcl => {
                owns(target)
                    && (state(target).mode & 0o2000 == 0 || who.in_group(state(target).gid))
            }
            Kind::Chmod | Kind::SetDefault => owns(target),
            Kind::Chown | Kind::Quota | Kind::Project | Kind::Snapshot => false,
            Kind::Clone => writes(target) && may(other, R),
            Kind::Write | Kind::Append | Kind::Truncate => writes(target) && plain(target),
            // (To have made it gives no right to its times.)
            Kind::Utimes => owns(target) || may(target, W),
            _ => writes(target),
        }
    }

    pub(crate) fn give_lease_back(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = &mut self.actors[c].session else { return Ok(()) };
        let Some((_, lease)) = s.leases.pop_last() else { return self.rest(c) };
        self.ask(c, nothing(), &Request::Release { slots: vec![lease.slot] }, Ask::Release)
    }

    pub(crate) fn rest(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].phase = Phase::Idle;
        let delay = if self.random.chance(1, 3) {
            self.between(US, 40 * US)
        } else if self.healed {
            self.between(10 * US, MS)
        } else {
            self.between(10 * US, self.preset.pace)
        };
        self.step_in(c, delay);
        Ok(())
    }

    pub(crate) fn wait(&mut self, c: usize) -> Result<(), String> {
        self.put(c, control::WAITERS, 1)?;
        self.step_in(c, LOOK_AGAIN);
        Ok(())
    }

    pub(crate) fn look_for_sync(&mut self, c: usize, seq: u64) -> Result<(), String> {
        if self.word(c, control::REPLICATED) < seq {
            self.ring(c, true)?;
            return self.wait(c);
        }
        self.check_dared(c, seq)?;
        if self.session(c).and_then(|s| s.broken).is_some_and(|broken| broken <= seq) {
            return Err(format!("client {c}: synced {seq}, which lies behind a broken entry"));
        }
        if let Some(s) = self.session(c) {
            let number = s.number;
            self.model.vouched(number, seq)?;
            self.outcome.fsyncs += 1;
            self.trace(|| format!("client {c} synced {seq}"));
            self.moment(Moment::Synced(c));
        }
        if self.actors[c].ops == 0 && self.healed {
            self.actors[c].phase = Phase::Done;
            return Ok(());
        }
        if self.actors[c].ops == 0 {
            self.actors[c].phase = Phase::Idle;
            self.step_in(c, 50 * MS);
            return Ok(());
        }
        self.rest(c)
    }

    /// Whether the leases of the client's node count at this moment.
    pub(crate) fn in_time(&self, c: usize) -> bool {
        let host = &self.hosts[self.actors[c].node];
        host.clients_clock(self.now) < self.word(c, control::LEASES_UNTIL)
            || planted(Bug::LapseIgnored)
    }

    pub(crate) fn holds(&self, c: usize, ino: u64, mode: LeaseMode) -> bool {
        let Some(lease) = self.session(c).and_then(|s| s.leases.get(&ino)) else { return false };
        lease.seen
            && lease.mode >= mode
            && self.in_time(c)
            && self.word(c, control::lease_word(lease.slot)) == lease.word.0
    }

    /// What the client knows of an inode by its lease must be right, whoever else has changed it.
    pub(crate) fn look_at_kept(&mut self, c: usize, ino: u64) -> Result<bool, String> {
        if !self.holds(c, ino, LeaseMode::Read) {
            return Ok(false);
        }
        let kept = self.session(c).and_then(|s| s.leases.get(&ino)).and_then(|l| l.view.clone());
        let Some(view) = kept else { return Ok(false) };
        self.see(c, ino, &view)?;
        Ok(true)
    }

    pub(crate) fn target(&self, dir: u64, name: &[u8]) -> Option<u64> {
        match &self.model.current(dir)?.body {
            Body::Dir(names) => names.get(name).copied(),
            _ => None,
        }
    }

    fn is_dir(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFDIR)
    }

    fn is_symlink(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFLNK)
    }

    fn has_xattrs(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.xattrs.is_some()) && !self.is_symlink(ino)
    }

    pub(crate) fn is_file(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFREG)
    }

    /// Whether the client has made that and not closed it; `Some(false)`: it has closed it, and its right may linger.
    fn own_pin(&self, c: usize, ino: u64) -> Option<bool> {
        let number = self.session(c)?.number;
        self.pins.get(&ino).filter(|pin| pin.session == number).map(|pin| pin.until.is_none())
    }

    /// What the plan needs before it can be carried out.
    pub(crate) fn need(&self, c: usize, plan: &Plan) -> Need {
        let w = LeaseMode::Write;
        if matches!(plan.kind, Kind::NoLease | Kind::Garbage) {
            return Need::Nothing;
        }
        let dir_mode = if plan.kind.names() { w } else { LeaseMode::Read };
        if !self.holds(c, plan.dir, dir_mode) {
            return Need::Lease(plan.dir, dir_mode);
        }
        if !matches!(self.model.current(plan.dir).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        let target = self.target(plan.dir, &plan.name);
        match (plan.kind, target) {
            (Kind::List, _) => Need::Nothing,
            (Kind::Quota, _) if quota::of_user(plan) && plan.dir != 1 => Need::GiveUp,
            (Kind::Quota | Kind::Snapshot, _) => Need::Nothing,
            // What is made in a directory depends on its attributes.
            (Kind::Create | Kind::Mkdir | Kind::Tmpfile, _) if !self.has_xattrs(plan.dir) => {
                Need::GiveUp
            }
            (Kind::OldNumber, None) => Need::Nothing,
            (Kind::Create | Kind::Mkdir | Kind::Symlink | Kind::Tmpfile, None) => {
                let fresh = self.session(c).and_then(|s| s.fresh.last().copied());
                match fresh {
                    Some(ino) if self.holds(c, ino, w) => Need::Nothing,
                    _ => Need::Numbers,
                }
            }
            (
                Kind::Create | Kind::Mkdir | Kind::Symlink | Kind::Tmpfile | Kind::OldNumber,
                Some(_),
            )
            | (_, None) => Need::GiveUp,
            (Kind::Read, Some(t)) if self.holds(c, t, LeaseMode::Read) => {
                if plan.tries == 0 {
                    Need::Lease(t, LeaseMode::Read)
                } else {
                    Need::Nothing
                }
            }
            (Kind::Read, Some(t)) => Need::Lease(t, LeaseMode::Read),
            (_, Some(t)) if !self.holds(c, t, w) => Need::Lease(t, w),
            (kind, Some(t)) if kind.content() && !self.is_file(t) => Need::GiveUp,
            // Whether its right has gone by now is not known.
            (_, Some(t)) if self.actors[c].uid != 0 && self.own_pin(c, t) == Some(false) => {
                Need::GiveUp
            }
            (Kind::SetXattr | Kind::RemoveXattr | Kind::SetAcl, Some(t)) if !self.has_xattrs(t) => {
                Need::GiveUp
            }
            (Kind::SetDefault, Some(t)) if !self.is_dir(t) || !self.has_xattrs(t) => Need::GiveUp,
            (Kind::Chmod, Some(t)) if self.is_symlink(t) => Need::GiveUp,
            (Kind::Rename | Kind::Link | Kind::Exchange | Kind::Clone, Some(t)) => {
                self.need_second(c, plan, t)
            }
            (Kind::Cycle, Some(t)) if !self.is_dir(t) => Need::GiveUp,
            (Kind::NotEmpty, Some(t)) => match self.model.current(t).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::Nothing,
                _ => Need::GiveUp,
            },
            (Kind::Reap, Some(_)) if !self.is_permitted(c, plan) => Need::GiveUp,
            (Kind::Reap | Kind::FutureEpoch, Some(t)) => match self.model.current(t) {
                Some(State { uid: GUEST, body: Body::File(_, 1), .. }) => Need::Nothing,
                _ => Need::GiveUp,
            },
            (Kind::Unlink, Some(t)) => match self.model.current(t).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
            _ => Need::Nothing,
        }
    }

    /// Whether an inode has an access list.
    fn has_list(&self, ino: u64) -> bool {
        let lists = |name: &Vec<u8>| name.starts_with(b"system.posix_acl");
        let xattrs = self.model.current(ino).and_then(|s| s.xattrs.as_ref());
        xattrs.is_none_or(|all| all.keys().any(lists))
    }

    pub(crate) fn need_second(&self, c: usize, plan: &Plan, target: u64) -> Need {
        let w = LeaseMode::Write;
        let across = plan.dir != plan.dir2;
        // Directories move into the root only, so that no cycle arises; links have one name.
        let stays = |ino| self.is_dir(ino) && across && plan.dir2 != 1;
        if stays(target) || (plan.kind == Kind::Link && !self.is_file(target)) {
            return Need::GiveUp;
        }
        let second = if plan.kind == Kind::Clone { LeaseMode::Read } else { w };
        if !self.holds(c, plan.dir2, second) {
            return Need::Lease(plan.dir2, second);
        }
        if !matches!(self.model.current(plan.dir2).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        if !self.may_cross(plan, target) {
            return Need::GiveUp;
        }
        match self.target(plan.dir2, &plan.name2) {
            None if matches!(plan.kind, Kind::Exchange | Kind::Clone) => Need::GiveUp,
            None => Need::Nothing,
            Some(_) if plan.kind == Kind::Link => Need::GiveUp,
            Some(r) if r == target => Need::GiveUp,
            Some(r) if !self.holds(c, r, w) => Need::Lease(r, w),
            Some(r) if plan.kind == Kind::Clone && !self.is_file(r) => Need::GiveUp,
            // This guest knows no access lists.
            Some(r) if plan.kind == Kind::Clone && self.actors[c].uid != 0 && self.has_list(r) => {
                Need::GiveUp
            }
            Some(r) if plan.kind == Kind::Clone || (plan.kind == Kind::Exchange && !across) => {
                let _ = r;
                Need::Nothing
            }
            Some(r) if self.is_dir(r) != self.is_dir(target) => Need::GiveUp,
            Some(r) if plan.kind == Kind::Exchange && (self.is_dir(r) || r == plan.dir) => {
                Need::GiveUp
            }
            Some(r) => match self.model.current(r).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
        }
    }

    /// Numbers whose leases are no more cannot be used.
    fn drop_stale_numbers(&mut self, c: usize) {
        let Some(s) = self.session(c) else { return };
        let mut fresh = s.fresh.clone();
        fresh.retain(|ino| self.holds(c, *ino, LeaseMode::Write));
        if let Some(s) = &mut self.actors[c].session {
            s.fresh = fresh;
        }
    }

    pub(crate) fn work(&mut self, c: usize, mut plan: Plan) -> Result<(), String> {
        self.drop_stale_numbers(c);
        if matches!(plan.kind, Kind::Read | Kind::List)
            && plan.tries == 0
            && self.random.chance(1, 2)
        {
            let target = self.target(plan.dir, &plan.name).filter(|_| plan.kind == Kind::Read);
            if self.look_at_kept(c, target.unwrap_or(plan.dir))? {
                return self.rest(c);
            }
        }
        let need = self.need(c, &plan);
        plan.tries += 1;
        if plan.tries > 60 {
            return self.rest(c);
        }
        match need {
            Need::GiveUp => self.rest(c),
            Need::Nothing if matches!(plan.kind, Kind::Read | Kind::List) => self.rest(c),
            // What is not permitted is tried all the same, sometimes: it must be refused.
            Need::Nothing
                if !plan.kind.is_evil()
                    && !self.is_permitted(c, &plan)
                    && self.random.chance(1, 3) =>
            {
                self.rest(c)
            }
            Need::Nothing => self.enter(c, plan),
            Need::Numbers => self.ask(
                c,
                plan,
                &Request::Inodes { count: self.preset.numbers.unwrap_or(3) },
                Ask::Numbers,
            ),
            Need::Lease(ino, mode) => {
                let request = Request::Inode { ino: InodeId(ino), mode, flags: 0 };
                self.ask(c, plan, &request, Ask::Inode(ino))
            }
        }
    }
}
