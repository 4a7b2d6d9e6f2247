//! The sole use of a file's locks, at the agent: when it is asked for, and how it comes back.
//!
//! It is asked for when a client has got a lock from the head, and given if nobody else has one or waits (`LockTable::give_sole`).
//! From then on the client grants its owners what it likes, and the agent need not know. It comes back when the head says so,
//! because somebody else asks; when the client itself asks the head about the file (an owner of its wants to wait, or its
//! table is full); when another file needs its place; and when the service was started anew. Then the client's word goes, who is in an
//! operation is waited for, the table is read, and all that is locked goes to the head with the message that gives the sole
//! use back, before anything that the client asks then.
//!
//! What an earlier run of this service had given is known from the client's memory only, which it may have spoilt. So of
//! that the head takes nothing but what it has given itself; and a head grants no lock before those of its own machine are
//! out of the operations in which they may still believe the earlier run's word.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos};
use storage::format::control::RECALL_TIMEOUT_MS;

use super::client::Client;
use super::limits::Limits;
use super::message::{Message, SoleSays};
use super::{Failure, Node, Role};

/// Between two looks at an operation under way.
const LOOK: Nanos = 50_000;
/// Files of which it is remembered how often they came back.
const KNOWN_MAX: usize = 1024;
/// Why a client is expelled.
const STOPPED: &str = "it was stopped while it locked a file";

/// Of one client and one file.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// How often it came back, since `since`.
    times: u32,
    since: Nanos,
    /// It is not asked for before.
    until: Nanos,
}

/// When sole use is asked for: not again at once where it was refused, and not for a while where it keeps coming back, since
/// whoever wants a lock waits for that.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    known: BTreeMap<(ClientId, InodeId), Asked>,
}

impl Wishes {
    /// A client has got a lock from the head: whether to ask for the sole use now.
    pub(super) fn ask(&mut self, who: (ClientId, InodeId), limits: &Limits, now: Nanos) -> bool {
        let asked = self.of(who, limits, now);
        if asked.until > now {
            return false;
        }
        asked.until = now.saturating_add(limits.sole_again);
        true
    }

    /// It came back.
    pub(super) fn came_back(&mut self, who: (ClientId, InodeId), limits: &Limits, now: Nanos) {
        let asked = self.of(who, limits, now);
        if asked.since.saturating_add(limits.sole_within) <= now {
            (asked.times, asked.since) = (0, now);
        }
        asked.times += 1;
        asked.until = if asked.times >= limits.sole_after {
            asked.times = 0;
            now.saturating_add(limits.sole_pause)
        } else {
            now
        };
    }

    fn of(&mut self, who: (ClientId, InodeId), limits: &Limits, now: Nanos) -> &mut Asked {
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&who) {
            let within = limits.sole_within;
            self.known.retain(|_, a| a.until > now || a.since.saturating_add(within) > now);
            if self.known.len() >= KNOWN_MAX {
                self.known.clear();
            }
        }
        self.known.entry(who).or_insert(Asked { since: now, ..Asked::default() })
    }
}

/// A sole use on its way back.
#[derive(Debug)]
pub(super) struct Return {
    client: ClientId,
    ino: InodeId,
    /// This run has given it; else the head is not to believe what is read, if it has not given it.
    vouched: bool,
    inside: Vec<(usize, u64)>,
    look_at: Nanos,
    give_up_at: Nanos,
}

impl Node {
    // --- how it is got ---

    /// A client has got a lock from the head.
    pub(super) fn want_sole(&mut self, id: ClientId, ino: InodeId) -> Result<(), Failure> {
        let (limits, now) = (&self.env.config.limits, self.env.now);
        let Some(client) = self.agent.clients.get(&id) else { return Ok(()) };
        if limits.soles == 0 || client.gone || client.expelled || client.has_sole(ino) {
            return Ok(());
        }
        if !self.agent.locking.wishes.ask((id, ino), limits, now) {
            return Ok(());
        }
        match client.place_for_sole(limits.soles, now.saturating_sub(limits.sole_within)) {
            Ok(()) => {
                self.to_head(Message::LockSole {
                    client: id,
                    ino,
                    token: 0,
                    says: SoleSays::Wants,
                });
            }
            // That one is for who asks next.
            Err(Some(old)) => self.return_sole(id, old)?,
            Err(None) => {}
        }
        Ok(())
    }

    /// The head says that a client has it, or that it shall come back.
    pub(super) fn sole_told(
        &mut self,
        id: ClientId,
        (ino, token): (InodeId, u64),
        given: bool,
    ) -> Result<(), Failure> {
        let unused = Message::LockSole { client: id, ino, token, says: SoleSays::Unused };
        if !given {
            let has = |c: &Client| c.has_sole(ino) && [0, token].contains(&c.sole_token(ino));
            if self.agent.clients.get(&id).is_some_and(has) {
                return self.return_sole(id, ino);
            }
            // It never came here, or is back already: if the head may not have heard what came back, it is told once more.
            let again = self.agent.locking.told_of(id, ino, token);
            self.to_head(again.unwrap_or(unused));
            return Ok(());
        }
        self.agent.locking.given_anew(id, ino);
        // What is asked already the head judges by what it knows.
        let asks = self.agent.requests.iter().any(|p| p.asks_for_lock(id, ino));
        let (most, now) = (self.env.config.limits.soles, self.env.now);
        let client = self.agent.clients.get_mut(&id).filter(|c| !asks && !c.gone && !c.expelled);
        if client.is_some_and(|client| client.give_sole((ino, token), most, now)) {
            self.env.counters.soles += 1;
        } else {
            self.to_head(unused);
        }
        Ok(())
    }

    /// What a head that does not know must hear of a client: this run has given these.
    /// `told`: what came back was told already.
    pub(super) fn sole_reports(&mut self, id: ClientId, told: bool) -> Vec<Message> {
        let again = match told {
            true => Vec::new(),
            false => self.agent.locking.tell_again(id, self.next_token),
        };
        let Some(client) = self.agent.clients.get(&id) else { return Vec::new() };
        let returns = &self.agent.locking.returns;
        let vouched = |ino: &InodeId| !returns.iter().any(|r| r.is(id, *ino) && !r.vouched);
        let own = client.soles().filter(vouched).filter(|_| !planted(Bug::SolesUnreported));
        let has = |ino| {
            let (token, says) = (client.sole_token(ino), SoleSays::Has);
            Message::LockSole { client: id, ino, token, says }
        };
        again.into_iter().chain(own.map(has)).collect()
    }

    // --- how it comes back ---

    /// A client of an earlier run may believe that it has some.
    pub(super) fn return_soles_of_before(&mut self, id: ClientId) {
        let Some(client) = self.agent.clients.get(&id) else { return };
        for ino in client.soles().collect::<Vec<_>>() {
            let inside = client.inside();
            let (look_at, vouched) = (self.env.now, false);
            let back = Return { client: id, ino, vouched, inside, look_at, give_up_at: 0 };
            self.agent.locking.returns.push(back);
        }
    }

    /// The sole use of a file's locks shall come back; if its client is in no operation that is done at once.
    pub(super) fn return_sole(&mut self, id: ClientId, ino: InodeId) -> Result<(), Failure> {
        if self.agent.locking.returns.iter().any(|r| r.is(id, ino)) {
            return Ok(());
        }
        let Some(client) = self.agent.clients.get(&id) else { return Ok(()) };
        client.take_sole_back(ino);
        let inside = if planted(Bug::SoleUnwaited) { Vec::new() } else { client.inside() };
        let (look_at, vouched) = (self.env.now, true);
        let mut back = Return { client: id, ino, vouched, inside, look_at, give_up_at: 0 };
        if !self.step_return(&mut back)? {
            self.agent.locking.returns.push(back);
        }
        Ok(())
    }

    /// Goes on with those under way; `true` when one ended.
    pub(super) fn step_returns(&mut self) -> Result<bool, Failure> {
        if self.agent.locking.returns.is_empty() || !self.returns_are_heard() {
            return Ok(false);
        }
        let (mut ended, mut kept) = (false, Vec::new());
        for mut back in std::mem::take(&mut self.agent.locking.returns) {
            if back.look_at > self.env.now || !self.step_return(&mut back)? {
                kept.push(back);
            } else {
                ended = true;
            }
        }
        kept.append(&mut self.agent.locking.returns);
        self.agent.locking.returns = kept;
        if ended {
            self.agent.ends += 1;
            // A head that was started anew may have waited for it.
            self.serve_early_locks()?;
        }
        Ok(ended)
    }

    /// Whether there is a head to be told.
    fn returns_are_heard(&self) -> bool {
        matches!(self.role(), Role::Head | Role::Member)
    }

    fn step_return(&mut self, back: &mut Return) -> Result<bool, Failure> {
        let (id, ino, now) = (back.client, back.ino, self.env.now);
        // The end of a client ends all that it has, if nobody has it after it.
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
        if client.gone && client.heir_until.is_none() || client.expelled {
            return Ok(true);
        }
        if back.give_up_at == 0 {
            back.give_up_at = now + RECALL_TIMEOUT_MS * 1_000_000;
        }
        back.inside.retain(|seen| client.still_inside(*seen));
        if !back.inside.is_empty() {
            back.look_at = now + LOOK;
            if now >= back.give_up_at {
                return self.expel(id, STOPPED);
            }
            return Ok(false);
        }
        let locks = client.read_sole(ino)?.filter(|_| !planted(Bug::SoleTableUnread));
        let token = client.sole_token(ino);
        client.end_sole(ino);
        let says = match &locks {
            None => SoleSays::Unused,
            Some(locks) => {
                let locks = locks.iter().map(|held| held.lock).collect();
                SoleSays::Returns { locks, vouched: back.vouched }
            }
        };
        if back.vouched {
            self.agent.locking.wishes.came_back((id, ino), &self.env.config.limits, now);
            if let Some(locks) = locks {
                self.agent.locking.replace(id, ino, locks);
            }
        }
        self.env.counters.soles_back += 1;
        if matches!(says, SoleSays::Returns { .. }) && !planted(Bug::ReturnToldOnce) {
            self.agent.locking.told((id, ino), token, says.clone(), self.next_token);
        }
        self.to_head(Message::LockSole { client: id, ino, token, says });
        Ok(true)
    }

    /// Locks of clients here on files that are left to them.
    pub(super) fn own_locks(&self) -> usize {
        let clients = self.agent.clients.values().filter(|c| !c.gone && !c.expelled);
        let count = |client: &Client, ino| match client.read_sole(ino) {
            Ok(Some(own)) => own.iter().count(),
            _ => self.agent.locking.count(client.id, ino),
        };
        clients.map(|c| c.soles().map(|ino| count(c, ino)).sum::<usize>()).sum()
    }

    /// When one of them is to be looked at.
    pub(super) fn returns_deadline(&self) -> Option<Nanos> {
        let returns = self.agent.locking.returns.iter().map(|back| back.look_at);
        returns.min().filter(|_| self.returns_are_heard())
    }
}

impl Return {
    /// Whether it is of that client and file.
    pub(super) fn is(&self, client: ClientId, ino: InodeId) -> bool {
        (self.client, self.ino) == (client, ino)
    }

    /// Whose it is.
    pub(super) const fn client(&self) -> ClientId {
        self.client
    }

    /// Whether an earlier run had given it.
    pub(super) const fn is_of_before(&self) -> bool {
        !self.vouched
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    const A: (ClientId, InodeId) = (ClientId(1), InodeId(7));

    fn limits() -> Limits {
        let (sole_after, sole_within, sole_pause, sole_again) = (2, 100, 1000, 10);
        Limits { sole_after, sole_within, sole_pause, sole_again, ..Limits::default() }
    }

    #[test]
    fn what_is_refused_is_not_asked_for_at_once_and_what_comes_back_often_not_for_a_while() {
        let (limits, mut wishes) = (limits(), Wishes::default());
        assert!(wishes.ask(A, &limits, 0));
        assert!(!wishes.ask(A, &limits, 9) && wishes.ask(A, &limits, 10), "it was refused");
        wishes.came_back(A, &limits, 20);
        assert!(wishes.ask(A, &limits, 20), "once is nothing");
        wishes.came_back(A, &limits, 30);
        assert!(!wishes.ask(A, &limits, 1029) && wishes.ask(A, &limits, 1030));
        assert!(wishes.ask((ClientId(1), InodeId(8)), &limits, 31), "another file");
        for round in 0..20 {
            let now = 2000 + round * 101;
            wishes.came_back(A, &limits, now);
            assert!(wishes.ask(A, &limits, now), "now and then, round {round}");
        }
    }

    /// Whatever happens: never two questions within `sole_again`, none within the pause after so many returns.
    #[test]
    fn random_histories_ask_no_sooner_than_they_may() {
        for seed in 0..100 {
            let (limits, mut wishes, mut random) = (limits(), Wishes::default(), Random::new(seed));
            let (mut now, mut asked, mut backs) = (0, None, Vec::new());
            for _ in 0..400 {
                now += random.below(60);
                // What was not asked for does not come back.
                if asked.is_some() && random.chance(1, 3) {
                    wishes.came_back(A, &limits, now);
                    backs.push(now);
                    asked = None;
                } else if wishes.ask(A, &limits, now) {
                    assert!(asked.is_none_or(|at| at + limits.sole_again <= now), "seed {seed}");
                    asked = Some(now);
                    // In any stretch of time there are at most twice as many returns without a pause.
                    let late = backs.iter().filter(|at| **at + limits.sole_within > now).count();
                    assert!(late < 2 * limits.sole_after as usize, "seed {seed}: {late}");
                }
            }
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (limits, mut wishes) = (limits(), Wishes::default());
        for ino in 0..10_000 {
            wishes.ask((ClientId(1), InodeId(ino)), &limits, 1);
            assert!(wishes.known.len() <= KNOWN_MAX);
        }
    }
}
