//! File locks of processes, by the judge's own account: bytes, who has them for certain, and who may have them.
//!
//! The head judges somewhere between the beginning of a call and its end. So an owner has a lock for certain from the end
//! of the call that got it until the beginning of the next one that changes it, and perhaps from the beginning of the one
//! until the end of the other. Then
//!
//! - who gets a lock, or is told that nothing bars it, is barred by nobody who had his for certain all the while;
//! - who is barred is so by somebody who may have had his lock meanwhile;
//! - a circle of those who wait is there, where one is told of it;
//! - in the end nothing is locked.
//!
//! A process whose node is out of the chain, or was started anew, or whose session has ended, has nothing for certain any
//! more: its client asks again, and somebody else may have been first. What it had there may stay locked until its session
//! is known to be over.
//!
//! A process that is killed, and has an heir, has what it had as long as its node goes on, until its next life has shown the secret, and has
//! asked for each of its locks.

use std::collections::{BTreeMap, BTreeSet};

use base::{Errno, Nanos};
use client::fs::{LOCK_END, Lock, LockKind, LockSpace};

use super::call::{Call, Reply, Value};
use super::{MS, UnderWay, World};

/// Bytes of a file that are told apart; the last one stands for all from there on.
pub(super) const BYTES: u64 = 6;
/// A waiter that is not heard of is forgotten after four seconds; clocks run at rates of their own.
const WAITER_LIFE: Nanos = 4500 * MS;
/// What has not ended.
const NOW: u64 = u64::MAX;

/// Whose locks, and of which file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Owner {
    actor: usize,
    life: u64,
    space: LockSpace,
    number: u64,
    ino: u64,
    /// What it had in a session that may not be over yet.
    past: bool,
}

/// What an owner has of a byte. Times are counted in calls.
#[derive(Clone, Copy, Default, Debug)]
struct Byte {
    /// For certain since then: some lock, a lock to write.
    any_since: Option<u64>,
    write_since: Option<u64>,
    /// Perhaps until then.
    any_until: u64,
    write_until: u64,
}

impl Byte {
    /// It is given up, if it was there.
    fn end(&mut self, now: u64) {
        self.any_until = self.any_until.min(now);
        self.write_until = self.write_until.min(now);
        (self.any_since, self.write_since) = (None, None);
    }
}

/// A call that is under way.
#[derive(Clone, Copy, Debug)]
struct Asking {
    owner: Owner,
    lock: Lock,
    since: u64,
    waits: bool,
    /// What the owner had when it began.
    before: [Byte; BYTES as usize],
}

/// See the module.
#[derive(Debug, Default)]
pub struct Locks {
    now: u64,
    owners: BTreeMap<Owner, [Byte; BYTES as usize]>,
    /// By actor and thread.
    asking: BTreeMap<(usize, usize), Asking>,
    /// Those that have waited, and until when.
    waited: Vec<(Asking, Nanos)>,
    /// When it was doubted last what an actor has.
    doubted: BTreeMap<usize, u64>,
    /// Processes that were killed, and until when their locks are kept for their heirs for certain.
    left: BTreeMap<usize, Nanos>,
}

/// The bytes of a range.
fn bytes(lock: &Lock) -> std::ops::Range<usize> {
    let end = lock.end.min(BYTES - 1) + 1;
    lock.start.min(end) as usize..end as usize
}

impl Locks {
    fn begin(&mut self, (c, t): (usize, usize), life: u64, asked: (u64, Lock, bool)) {
        let (ino, lock, waits) = asked;
        self.now += 1;
        let since = self.now;
        let (space, number) = (lock.space, lock.owner);
        let owner = Owner { actor: c, life, space, number, ino, past: false };
        let has = self.owners.entry(owner).or_default();
        let asking = Asking { owner, lock, since, waits, before: *has };
        self.asking.insert((c, t), asking);
    }

    /// The owner may have it from now on, and what it had perhaps no more.
    fn change(&mut self, who: (usize, usize)) {
        let Some(Asking { owner, lock, .. }) = self.asking.get(&who) else { return };
        let Some(has) = self.owners.get_mut(owner) else { return };
        for byte in &mut has[bytes(lock)] {
            match lock.kind {
                LockKind::None => (byte.any_since, byte.write_since) = (None, None),
                LockKind::Read => (byte.write_since, byte.any_until) = (None, NOW),
                LockKind::Write => (byte.any_until, byte.write_until) = (NOW, NOW),
            }
            // What is barred gives up first what it had.
            if lock.space == LockSpace::Flock && byte.write_since.is_none() {
                byte.any_since = None;
            }
        }
    }

    /// Who bars a lock: for certain since before then, or perhaps at some moment since then.
    fn barring(&self, asking: &Asking, certain: bool) -> impl Iterator<Item = &Owner> {
        let Asking { owner: asker, lock, since, .. } = *asking;
        self.owners.iter().filter_map(move |(owner, has)| {
            let other = (owner.ino, owner.space) == (asker.ino, asker.space) && *owner != asker;
            let bars = has[bytes(&lock)].iter().any(|byte| match (lock.kind, certain) {
                (LockKind::None, _) => false,
                (LockKind::Read, true) => byte.write_since.is_some_and(|at| at < since),
                (LockKind::Write, true) => byte.any_since.is_some_and(|at| at < since),
                (LockKind::Read, false) => byte.write_until >= since,
                (LockKind::Write, false) => byte.any_until >= since,
            });
            (other && bars).then_some(owner)
        })
    }

    /// Whether those who wait, or waited a moment ago, may close a circle with that one.
    fn may_be_circle(&self, asking: &Asking, at: Nanos) -> bool {
        let lately = self.waited.iter().filter(|(_, until)| until + WAITER_LIFE > at);
        let waiting: Vec<Asking> = lately
            .map(|(asking, _)| *asking)
            .chain(self.asking.values().filter(|a| a.waits).copied())
            .collect();
        let same = |a: &Owner, b: &Owner| (a.actor, a.number) == (b.actor, b.number);
        let mut seen = BTreeSet::new();
        let mut next: Vec<Owner> = self.barring(asking, false).copied().collect();
        while let Some(owner) = next.pop() {
            if same(&owner, &asking.owner) {
                return true;
            }
            if seen.insert((owner.actor, owner.number)) {
                let waits = waiting.iter().filter(|a| same(&a.owner, &owner));
                next.extend(waits.flat_map(|a| self.barring(a, false).copied()));
            }
        }
        false
    }

    /// A call to lock or unlock has come back. `sure`: what it got is held by now.
    fn done(&mut self, who: (usize, usize), at: Nanos, result: Result<(), Errno>, sure: bool) {
        let Some(asking) = self.asking.remove(&who) else { return };
        let Asking { owner, lock, since, before, .. } = asking;
        self.now += 1;
        let now = self.now;
        let sure = sure && self.doubted.get(&owner.actor).is_none_or(|at| *at < since);
        if asking.waits {
            self.waited.retain(|(_, until)| until + WAITER_LIFE > at);
            self.waited.push((asking, at));
        }
        let Some(has) = self.owners.get_mut(&owner) else { return };
        for (byte, before) in
            has.iter_mut().zip(before).take(bytes(&lock).end).skip(bytes(&lock).start)
        {
            match (result, lock.kind) {
                (Ok(()), LockKind::None) => byte.end(now),
                (Ok(()), kind) => {
                    let mut got = Byte { any_until: NOW, ..Byte::default() };
                    got.any_since = sure.then(|| byte.any_since.unwrap_or(now));
                    if kind == LockKind::Write {
                        got.write_until = NOW;
                        got.write_since = sure.then(|| byte.write_since.unwrap_or(now));
                    } else {
                        got.write_until = byte.write_until.min(now);
                    }
                    *byte = got;
                }
                (Err(Errno::AGAIN), _) if lock.space == LockSpace::Flock => byte.end(now),
                (Err(Errno::AGAIN | Errno::DEADLK), _) => {
                    // (A service that was started anew may have granted it for a moment.)
                    byte.any_until = if before.any_until == NOW { NOW } else { now };
                    byte.write_until =
                        if before.write_until == NOW { NOW } else { byte.write_until.min(now) };
                }
                (Err(_), _) => (byte.any_since, byte.write_since) = (None, None),
            }
        }
        let all = |byte: &Byte| byte.any_until != 0;
        if !has.iter().any(all) {
            self.owners.remove(&owner);
        }
    }

    /// Whether an actor has its locks is not known any more. Those that it has where it was may stay for a while.
    pub(crate) fn doubt(&mut self, c: usize) {
        self.now += 1;
        self.doubted.insert(c, self.now);
        let mut past = Vec::new();
        for (owner, has) in self.owners.iter_mut().filter(|(o, _)| o.actor == c && !o.past) {
            for byte in has.iter_mut() {
                (byte.any_since, byte.write_since) = (None, None);
            }
            if has.iter().any(|byte| byte.any_until == NOW) {
                past.push((Owner { past: true, ..*owner }, *has));
            }
        }
        for (owner, has) in past {
            let all = self.owners.entry(owner).or_default();
            for (byte, more) in all.iter_mut().zip(has) {
                byte.any_until = byte.any_until.max(more.any_until);
                byte.write_until = byte.write_until.max(more.write_until);
            }
        }
    }

    /// A process was killed, and its next life will be its heir: what that is to ask for. What it had just asked for it may have or not.
    pub(super) fn leave(&mut self, c: usize, life: u64, until: Nanos) -> Vec<Call> {
        self.now += 1;
        let asking = self.asking.extract_if(.., |(of, _), _| *of == c).map(|(_, asking)| asking);
        for Asking { owner, .. } in asking.collect::<Vec<_>>() {
            for byte in self.owners.get_mut(&owner).into_iter().flatten() {
                (byte.any_since, byte.write_since) = (None, None);
            }
        }
        let own: Vec<(Owner, [Byte; BYTES as usize])> =
            self.owners.extract_if(.., |owner, _| owner.actor == c && !owner.past).collect();
        let mut calls = Vec::new();
        for (owner, has) in own {
            let perhaps =
                |(at, byte): (usize, &Byte)| (byte.any_until == NOW).then_some((at, *byte));
            for (at, byte) in has.iter().enumerate().filter_map(perhaps) {
                let writes = byte.write_until == NOW;
                let kind = if writes { LockKind::Write } else { LockKind::Read };
                let all =
                    Lock { kind, pid: 100 + c as u32, ..Lock::all_of(owner.space, owner.number) };
                let end = if at as u64 == BYTES - 1 { LOCK_END } else { at as u64 };
                let lock = match owner.space {
                    LockSpace::Record => Lock { start: at as u64, end, ..all },
                    LockSpace::Flock if at > 0 => continue,
                    LockSpace::Flock => all,
                };
                calls.push(Call::Lock { ino: owner.ino, lock, wait: false });
            }
            self.owners.insert(Owner { life, ..owner }, has);
        }
        self.left.insert(c, until);
        calls
    }

    /// Its heir has them, as far as they were there.
    fn inherited(&mut self, c: usize, now: Nanos) {
        if self.left.remove(&c).is_none_or(|until| now >= until) {
            self.doubt(c);
        }
    }

    /// A process is no more.
    pub(super) fn end_of(&mut self, c: usize) {
        self.doubt(c);
        self.left.remove(&c);
        self.owners.retain(|owner, _| owner.actor != c || owner.past);
        self.asking.retain(|(of, _), _| *of != c);
    }

    /// A lock that an owner may have, by its space and file.
    pub(super) fn may_have(
        &self,
        c: usize,
        number: u64,
        ino: Option<u64>,
    ) -> Option<(LockSpace, u64)> {
        let fits = |owner: &Owner| {
            (owner.actor, owner.number, owner.past) == (c, number, false)
                && ino.is_none_or(|ino| owner.ino == ino)
        };
        let mut own = self.owners.iter().filter(|(owner, _)| fits(owner));
        let (owner, _) = own.find(|(_, has)| has.iter().any(|byte| byte.any_until == NOW))?;
        Some((owner.space, owner.ino))
    }
}

impl World<'_> {
    /// A call begins.
    pub(super) fn begin_lock(&mut self, c: usize, t: usize, call: &Call) {
        let life = self.actors[c].process.as_ref().map_or(0, |p| p.life);
        match call {
            Call::Lock { ino, lock, wait } => {
                self.locks.begin((c, t), life, (*ino, *lock, *wait));
                self.locks.change((c, t));
            }
            Call::TestLock { ino, lock } => {
                self.locks.begin((c, t), life, (*ino, *lock, false));
            }
            _ => {}
        }
    }

    /// It has come back.
    pub(super) fn judge_lock(
        &mut self,
        (c, t): (usize, usize),
        u: &UnderWay,
        reply: &Reply,
    ) -> Result<(), String> {
        self.heir_goes_on(c, u, reply);
        let Some(asking) = self.locks.asking.get(&(c, t)).copied() else { return Ok(()) };
        let judged = self.judge_answer(&asking, reply);
        if matches!(u.call, Call::Lock { .. }) {
            let result = reply.as_ref().map(|_| ()).map_err(|errno| *errno);
            let sure = self.keeps_locks(c);
            self.locks.done((c, t), self.now, result, sure);
        } else {
            self.locks.asking.remove(&(c, t));
        }
        judged.map_err(|e| format!("client {c}.{t}, {}: {e}", u.call.brief()))
    }

    /// What a life that is an heir does first: it shows the secret, until it is believed, and asks for what the one before had. What it does not
    /// get it gives up, if some of it is there.
    fn heir_goes_on(&mut self, c: usize, u: &UnderWay, reply: &Reply) {
        let now = self.now;
        let Some(process) = self.process(c).filter(|p| !p.inherits.is_empty()) else { return };
        match (&u.call, reply) {
            (Call::Open { .. }, Ok(_)) => {
                process.inherits.pop_front();
            }
            (Call::Open { ino: gone, .. }, Err(_)) => {
                process.inherits.pop_front();
                // What was locked of it is given up: to lock it would open it, for nobody who closes it.
                for call in &mut process.inherits {
                    if let Call::Lock { ino, lock, .. } = call
                        && ino == gone
                    {
                        lock.kind = LockKind::None;
                    }
                }
            }
            (Call::Inherit, Err(_)) => {}
            (Call::Inherit, Ok(_)) => {
                process.inherits.pop_front();
                self.outcome.heirs += 1;
                self.locks.inherited(c, now);
            }
            (Call::Lock { ino, lock, .. }, reply) => {
                process.inherits.pop_front();
                if reply.is_err() && lock.kind != LockKind::None {
                    let lock = Lock { kind: LockKind::None, ..*lock };
                    process.inherits.push_front(Call::Lock { ino: *ino, lock, wait: false });
                }
            }
            _ => {}
        }
    }

    /// Whether what a process has of locks is known to the head.
    fn keeps_locks(&self, c: usize) -> bool {
        let n = self.actors[c].node;
        let process = self.actors[c].process.as_ref();
        let kept = self.locks.left.get(&c).map(|until| self.now < *until);
        let attached = process.is_some_and(super::Process::is_attached);
        kept.unwrap_or(attached) && self.is_seated(n) && self.hosts[n].node.is_some()
    }

    fn judge_answer(&self, asking: &Asking, reply: &Reply) -> Result<(), String> {
        let Asking { owner, lock, .. } = asking;
        let certain = || {
            let mut all = self.locks.barring(asking, true);
            all.find(|other| self.keeps_locks(other.actor)).copied()
        };
        let perhaps = || self.locks.barring(asking, false).next().is_some();
        match reply {
            Ok(Value::Nothing | Value::Barring(None)) => match certain() {
                Some(other) => {
                    Err(format!("a lock is had although {other:?} has one that bars it"))
                }
                None => Ok(()),
            },
            Ok(Value::Barring(Some(found))) => {
                let here =
                    |other: &Owner| self.actors[other.actor].node == self.actors[owner.actor].node;
                let is = |other: &&Owner| {
                    let pid = if here(other) { 100 + other.actor as u32 } else { 0 };
                    (other.number, pid) == (found.owner, found.pid)
                };
                let bars = found.space == lock.space
                    && found.overlaps(lock)
                    && (found.kind == LockKind::Write || lock.kind == LockKind::Write);
                match bars && self.locks.barring(asking, false).any(|other| is(&other)) {
                    true => Ok(()),
                    false => Err(format!("{found:?} does not bar it")),
                }
            }
            Err(Errno::AGAIN) if !perhaps() => Err("a lock is barred by nobody".into()),
            Err(Errno::DEADLK) if !self.locks.may_be_circle(asking, self.now) => {
                Err("a deadlock is told, and nobody waits in a circle".into())
            }
            _ => Ok(()),
        }
    }

    /// Everybody has given up what he had: nothing is locked.
    pub(crate) fn judge_locks(&self) -> Result<(), String> {
        let locks = self.hosts.iter().filter_map(|host| host.node.as_ref());
        let locks = locks.map(|node| node.status());
        let locks: usize = locks.map(|status| status.locks + status.own_locks).sum();
        if locks == 0 {
            Ok(())
        } else {
            Err(format!("{locks} locks are held in the end, by nobody"))
        }
    }

    /// A lock to ask for.
    pub(super) fn draw_lock(&mut self, c: usize, t: usize) -> Lock {
        let space =
            [LockSpace::Record, LockSpace::Record, LockSpace::Flock][self.random.below(3) as usize];
        let kinds =
            [LockKind::None, LockKind::Read, LockKind::Read, LockKind::Write, LockKind::Write];
        let kind = kinds[self.random.below(5) as usize];
        let (a, b) = (self.random.below(BYTES), self.random.below(BYTES));
        let end = if a.max(b) == BYTES - 1 { LOCK_END } else { a.max(b) };
        let (start, end) = match space {
            LockSpace::Record => (a.min(b), end),
            LockSpace::Flock => (0, LOCK_END),
        };
        Lock { space, kind, owner: owner_of(t), pid: 100 + c as u32, start, end }
    }

    /// What gives up a lock that a thread may have: of that file, or of any.
    pub(super) fn draw_unlock(&mut self, c: usize, t: usize, ino: Option<u64>) -> Option<Call> {
        let (space, ino) = self.locks.may_have(c, owner_of(t), ino)?;
        let lock = Lock { pid: 100 + c as u32, ..Lock::all_of(space, owner_of(t)) };
        Some(Call::Lock { ino, lock, wait: false })
    }
}

/// Each thread stands for a process of its own: what one owner does is done one after the other.
const fn owner_of(t: usize) -> u64 {
    t as u64 + 1
}
