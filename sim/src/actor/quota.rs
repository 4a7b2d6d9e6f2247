//! Quotas: limits of users and directories, as the model keeps them.
//!
//! The model keeps limits as if each account were an inode, under numbers that no inode has. Who may be barred by them
//! is judged by the stream (`process/ledger.rs`).

use storage::format::rpc::{AccountId, Amount};
use storage::volume::Volume;

use super::operation::Work;
use super::*;

const USER: u64 = 1 << 60;
const DIRECTORY: u64 = 1 << 61;
/// Who has closed a file, or ended, keeps it alive no longer than this.
const PIN_LINGERS: Nanos = 500 * MS;

/// Stands for the limits of a user.
pub(crate) const fn of_user_number(uid: u32) -> u64 {
    USER | uid as u64
}

/// Stands for the limits of a directory.
pub(crate) const fn of_directory(ino: u64) -> u64 {
    DIRECTORY | ino
}

/// Whose limits that number stands for, if it does.
pub(crate) const fn account_of(number: u64) -> Option<AccountId> {
    if number & USER != 0 {
        Some(AccountId::User(number as u32))
    } else if number & DIRECTORY != 0 {
        Some(AccountId::Directory(InodeId(number & !DIRECTORY)))
    } else {
        None
    }
}

/// Whether the plan is about a user's limits, or else its directory's.
pub(crate) fn of_user(plan: &Plan) -> bool {
    plan.name[0].is_multiple_of(2)
}

fn counts(number: u64, state: &State) -> bool {
    let is_inode = !state.is_gone() && state.mode != 0;
    match account_of(number) {
        Some(AccountId::User(uid)) => is_inode && state.uid == uid,
        Some(AccountId::Directory(ino)) => is_inode && state.project == ino.0,
        None => false,
    }
}

/// Limits as the model keeps them. (Mode 0: no inode.)
pub(crate) fn state(limit: Amount) -> State {
    if limit == Amount::default() {
        return State::gone();
    }
    State::new(0, 0, 0, Body::Symlink(format!("{} {}", limit.blocks, limit.inodes).into_bytes(), 1))
}

/// A file that its maker has open.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(super) session: usize,
    /// It was closed, and is kept alive no longer than until then.
    pub(super) until: Option<Nanos>,
    /// How it was counted when somebody else removed its last name.
    was: Option<State>,
}

impl World<'_> {
    /// The entry that sets limits, which no guest may.
    pub(super) fn set_quota<'a>(&mut self, plan: &Plan) -> Op<'a> {
        let user = of_user(plan).then(|| [5, GUEST, GUEST][self.random.below(3) as usize]);
        let limit = self.random.below(2) << 40;
        let limit = Amount { blocks: limit, inodes: limit };
        Op::SetQuota { ino: InodeId(plan.dir), user, limit }
    }

    /// The entry that puts an inode under another quota.
    pub(super) fn set_project<'a>(
        &mut self,
        plan: &Plan,
        work: &mut Work,
        target: u64,
    ) -> Option<Op<'a>> {
        let choice = [target, plan.dir, 0][self.random.below(3) as usize];
        let is_dir = |ino| self.model.current(ino).is_some_and(|s| matches!(s.body, Body::Dir(_)));
        let project = if is_dir(choice) { choice } else { 0 };
        let state = work.states.get_mut(&target)?;
        if state.project != project {
            state.project = project;
            work.changed.push(target);
        }
        Some(Op::SetProject { ino: InodeId(target), project: InodeId(project) })
    }

    /// Whether what is linked or moved stays under its quota; only a directory that has one takes it along.
    pub(super) fn may_cross(&self, plan: &Plan, target: u64) -> bool {
        let project = |ino| self.model.current(ino).map(|s| s.project);
        let own = |ino| project(ino) == Some(ino);
        let other = self.target(plan.dir2, &plan.name2);
        match plan.kind {
            Kind::Clone => true,
            Kind::Link => project(target) == project(plan.dir2),
            _ if plan.dir == plan.dir2 || project(plan.dir) == project(plan.dir2) => true,
            Kind::Exchange => own(target) && other.is_some_and(own),
            _ => own(target),
        }
    }

    /// How many inodes an account counts, at least and at most, one operation left out.
    pub(crate) fn count(&self, number: u64, without: Option<(usize, u64)>) -> (u64, u64) {
        let (least, most) = self.model.count(without, |s| counts(number, s));
        let lingers = self.pins.values().filter(|pin| {
            self.holds_open(pin) && pin.was.as_ref().is_some_and(|was| counts(number, was))
        });
        (least, most + lingers.count() as u64)
    }

    /// What a session has made it has open.
    pub(super) fn pin(&mut self, session: usize, ino: u64) {
        self.pins.insert(ino, Pin { session, until: None, was: None });
    }

    /// Inodes that the client has open, because it made them.
    pub(super) fn pinned(&self, c: usize) -> Vec<InodeId> {
        let Some(number) = self.session(c).map(|s| s.number) else { return Vec::new() };
        let own = self.pins.iter().filter(|(_, p)| p.session == number && p.until.is_none());
        own.map(|(ino, _)| InodeId(*ino)).collect()
    }

    /// The session has closed what it had open, or ended: soon nothing keeps that alive.
    pub(super) fn unpin(&mut self, session: usize) {
        let until = Some(self.now + PIN_LINGERS);
        for pin in self.pins.values_mut().filter(|p| p.session == session) {
            pin.until = pin.until.or(until);
        }
    }

    /// An inode changes: what has lost its last name may be kept by who has it open.
    pub(super) fn note_gone(&mut self, session: usize, ino: u64, state: &State) {
        if !state.is_gone() {
            return;
        }
        if self.pins.get(&ino).is_some_and(|p| p.session == session) {
            // Who removes a file says whether it has it open: these do not.
            self.pins.remove(&ino);
        } else if let Some(pin) = self.pins.get_mut(&ino) {
            pin.was = self.model.current(ino).cloned();
        }
    }

    /// In the end: the limits of an account.
    pub(crate) fn judge_limit(
        &mut self,
        volume: &Volume,
        number: u64,
        account: AccountId,
    ) -> Result<(), String> {
        let shown = state(volume.account(account).limit);
        if let AccountId::Directory(dir) = account
            && self.model.current(dir.0).is_none_or(State::is_gone)
        {
            let open = self.pins.get(&dir.0).is_some_and(|pin| self.holds_open(pin));
            // (Or a process may have it open that is still waited for.)
            let open = open || self.hosts.iter().any(crate::host::Host::is_patient);
            let left = shown.body != Body::Gone && !open;
            return if left { Err(format!("{account:?}: has limits and is gone")) } else { Ok(()) };
        }
        self.model.observe(None, number, &shown)
    }

    fn holds_open(&self, pin: &Pin) -> bool {
        pin.until.is_none_or(|until| self.now < until)
    }

    /// In the end: what accounts use is what the model counts.
    pub(crate) fn judge_use(&self, volume: &Volume) -> Result<(), String> {
        if !self.preset.quota {
            return Ok(());
        }
        self.verdicts.ledger.judge(volume)
    }
}
