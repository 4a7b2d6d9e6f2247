//! What a client does next, and what it needs for it.

use super::*;

impl World<'_> {
    pub(crate) fn choose(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].since = self.now;
        if self.actors[c].ops == 0 || self.random.chance(1, 8) {
            let last = self.session(c).map_or(0, |s| s.next - 1);
            self.put(c, control::SYNC_REQUEST, last)?;
            self.actors[c].phase = Phase::Sync(last);
            self.ring(c, true)?;
            return self.look_for_sync(c, last);
        }
        self.actors[c].ops -= 1;
        if self.random.chance(1, 20) {
            return self.give_lease_back(c);
        }
        let dirs = self.model.dirs();
        let dir = dirs[self.random.below(dirs.len() as u64) as usize];
        let dir2 = dirs[self.random.below(dirs.len() as u64) as usize];
        let mut name = || vec![b'a' + self.random.below(NAMES) as u8];
        let (name, name2) = (name(), name());
        let kind = match self.random.below(20) {
            0..=2 => Kind::Create,
            3 => Kind::Mkdir,
            4..=6 => Kind::Write,
            7 | 8 => Kind::Append,
            9 => Kind::Truncate,
            10 => Kind::Chmod,
            11 | 12 => Kind::Unlink,
            13 | 14 => Kind::Rename,
            15 => Kind::Link,
            16..=18 => Kind::Read,
            _ => Kind::List,
        };
        self.work(c, Plan { kind, dir, name, dir2, name2, tries: 0 })
    }

    pub(crate) fn give_lease_back(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = &mut self.actors[c].session else { return Ok(()) };
        let Some((_, lease)) = s.leases.pop_last() else { return self.rest(c) };
        let plan = Plan {
            kind: Kind::List,
            dir: 1,
            name: Vec::new(),
            dir2: 1,
            name2: Vec::new(),
            tries: 0,
        };
        self.ask(c, plan, &Request::Release { slots: vec![lease.slot] }, Ask::Release)
    }

    pub(crate) fn rest(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].phase = Phase::Idle;
        let delay = if self.random.chance(1, 3) {
            self.between(US, 40 * US)
        } else if self.healed {
            self.between(10 * US, MS)
        } else {
            self.between(10 * US, 60 * MS)
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
        if let Some(s) = self.session(c) {
            let number = s.number;
            self.model.vouched(number, seq);
            self.outcome.fsyncs += 1;
            self.trace(|| format!("client {c} synced {seq}"));
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

    pub(crate) fn holds(&self, c: usize, ino: u64, mode: LeaseMode) -> bool {
        let Some(lease) = self.session(c).and_then(|s| s.leases.get(&ino)) else { return false };
        lease.seen
            && lease.mode >= mode
            && self.word(c, control::lease_word(lease.slot)) == lease.word.0
    }

    pub(crate) fn target(&self, dir: u64, name: &[u8]) -> Option<u64> {
        match &self.model.current(dir)?.body {
            Body::Dir(names) => names.get(name).copied(),
            _ => None,
        }
    }

    pub(crate) fn is_file(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFREG)
    }

    /// What the plan needs before it can be carried out.
    pub(crate) fn need(&self, c: usize, plan: &Plan) -> Need {
        let w = LeaseMode::Write;
        let dir_mode = match plan.kind {
            Kind::Read | Kind::Write | Kind::Append | Kind::Truncate | Kind::Chmod | Kind::List => {
                LeaseMode::Read
            }
            _ => w,
        };
        if !self.holds(c, plan.dir, dir_mode) {
            return Need::Lease(plan.dir, dir_mode);
        }
        if !matches!(self.model.current(plan.dir).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        let target = self.target(plan.dir, &plan.name);
        match (plan.kind, target) {
            (Kind::List, _) => Need::Nothing,
            (Kind::Create | Kind::Mkdir, None) => {
                let fresh = self.session(c).and_then(|s| s.fresh.last().copied());
                match fresh {
                    Some(ino) if self.holds(c, ino, w) => Need::Nothing,
                    _ => Need::Numbers,
                }
            }
            (Kind::Create | Kind::Mkdir, Some(_)) | (_, None) => Need::GiveUp,
            (Kind::Read, Some(t)) if self.holds(c, t, LeaseMode::Read) => {
                if plan.tries == 0 {
                    Need::Lease(t, LeaseMode::Read)
                } else {
                    Need::Nothing
                }
            }
            (Kind::Read, Some(t)) => Need::Lease(t, LeaseMode::Read),
            (_, Some(t)) if !self.holds(c, t, w) => Need::Lease(t, w),
            (Kind::Write | Kind::Append | Kind::Truncate, Some(t)) if !self.is_file(t) => {
                Need::GiveUp
            }
            (Kind::Rename | Kind::Link, Some(t)) => self.need_second(c, plan, t),
            (Kind::Unlink, Some(t)) => match self.model.current(t).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
            _ => Need::Nothing,
        }
    }

    pub(crate) fn need_second(&self, c: usize, plan: &Plan, target: u64) -> Need {
        let w = LeaseMode::Write;
        // Directories stay where they are, so that no cycle arises.
        if !self.is_file(target) && (plan.kind == Kind::Link || plan.dir != plan.dir2) {
            return Need::GiveUp;
        }
        if !self.holds(c, plan.dir2, w) {
            return Need::Lease(plan.dir2, w);
        }
        if !matches!(self.model.current(plan.dir2).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        match self.target(plan.dir2, &plan.name2) {
            None => Need::Nothing,
            Some(_) if plan.kind == Kind::Link => Need::GiveUp,
            Some(r) if r == target => Need::GiveUp,
            Some(r) if !self.holds(c, r, w) => Need::Lease(r, w),
            Some(r) if self.is_file(r) != self.is_file(target) => Need::GiveUp,
            Some(r) => match self.model.current(r).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
        }
    }

    pub(crate) fn work(&mut self, c: usize, mut plan: Plan) -> Result<(), String> {
        let need = self.need(c, &plan);
        plan.tries += 1;
        if plan.tries > 60 {
            return self.rest(c);
        }
        match need {
            Need::GiveUp => self.rest(c),
            Need::Nothing if matches!(plan.kind, Kind::Read | Kind::List) => self.rest(c),
            Need::Nothing => self.enter(c, plan),
            Need::Numbers => self.ask(c, plan, &Request::Inodes { count: 3 }, Ask::Numbers),
            Need::Lease(ino, mode) => {
                let request = Request::Inode { ino: InodeId(ino), mode, flags: 0 };
                self.ask(c, plan, &request, Ask::Inode(ino))
            }
        }
    }
}
