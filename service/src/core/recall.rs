//! Leases on their way back: the agent takes the word from the client, waits for operations that may have seen it, reads what was
//! done under it, and tells the head. Whoever does not let go is expelled.

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos};
use storage::format::control::RECALL_TIMEOUT_MS;

use super::client::{Client, Unread};
use super::message::Message;
use super::requests::Pending;
use super::{Effect, Failure, Node, Role};

/// For so long a lease stays with its client while that waits for another which it needs as well.
const TOGETHER_MAX: Nanos = 50_000_000;
/// Who has used a lease and does nothing for so long has done what it asked for it for.
pub(super) const QUIET: Nanos = 20_000;
/// Between two looks at an operation under way.
pub(super) const LOOK: Nanos = 50_000;
/// Stores that their thread has done are where others see them after this time; nanoseconds in truth.
pub(super) const ARRIVAL: Nanos = 1_000_000;

/// Why a client is expelled: it is stopped...
pub(super) const STOPPED: &str = "it was stopped inside an operation";
/// ... or a mount does not let go.
const KEPT: &str = "its kernel keeps what it may keep no more";
/// A lease on its way back.
#[derive(Debug)]
pub(super) struct Recall {
    pub(super) client: ClientId,
    ino: InodeId,
    token: u64,
    pub(super) look_at: Nanos,
    /// When this began.
    since: Nanos,
    revoked: bool,
    /// The head was told that the lease is held, and is told when it is not.
    reported: bool,
    give_up_at: Nanos,
    /// The client was told that a kernel of its keeps what it may not.
    told: bool,
    inside: Vec<(usize, u64)>,
    /// What the client had done when this was looked at first.
    found: Option<u64>,
    /// What lay in the log when nobody was inside any more.
    unread: Option<Unread>,
    /// Nobody is inside, and the newest entry is not whole, since then.
    unsound_since: Option<Nanos>,
}

impl Recall {
    fn new(client: ClientId, ino: InodeId, token: u64, since: Nanos) -> Self {
        let (revoked, reported, told, inside) = (false, false, false, Vec::new());
        let (give_up_at, unsound_since) = (0, None);
        Self {
            client,
            ino,
            token,
            look_at: since,
            since,
            revoked,
            reported,
            give_up_at,
            told,
            inside,
            found: None,
            unread: None,
            unsound_since,
        }
    }
}

impl Node {
    /// The head wants a lease back.
    pub(super) fn recall_wanted(&mut self, client: ClientId, ino: InodeId, token: u64) {
        if !matches!(self.role(), Role::Head | Role::Member) {
            // Its clients are dismissed.
            return;
        }
        self.agent.recalls.push(Recall::new(client, ino, token, self.env.now));
    }

    /// A client gives a lease back. Taken from it as if recalled: another of its threads may be in
    /// the middle of an operation under it, whose entry must reach the head before the lease does.
    pub(super) fn release_wanted(&mut self, client: ClientId, ino: InodeId) {
        let recall = Recall::new(client, ino, 0, self.env.now);
        self.agent.recalls.push(Recall { reported: true, ..recall });
    }

    /// What was under way between head and agent is lost: the recalls that were asked for, and the
    /// answers. A lease that was taken back counts as held (`client_ups` says so) until everything
    /// that was done under it is with the head again.
    pub(super) fn renew_recalls(&mut self) {
        // (What the head wants read it asks for again.)
        self.agent.readings.clear();
        let before = std::mem::take(&mut self.agent.recalls);
        for client in self.agent.clients.values() {
            for (ino, _) in client.returned() {
                let same = |r: &&Recall| r.client == client.id && r.ino == ino && r.revoked;
                let under_way = before.iter().find(same);
                self.agent.recalls.push(Recall {
                    client: client.id,
                    ino,
                    token: 0,
                    look_at: self.env.now,
                    since: self.env.now,
                    revoked: true,
                    reported: true,
                    give_up_at: under_way.map_or(0, |r| r.give_up_at),
                    told: false,
                    inside: under_way.map_or_else(Vec::new, |r| r.inside.clone()),
                    found: None,
                    unread: None,
                    unsound_since: None,
                });
            }
        }
    }

    /// Advances recalls; `true` when one ended.
    pub(super) fn step_recalls(&mut self) -> Result<bool, Failure> {
        let mut ended = false;
        let mut recalls = std::mem::take(&mut self.agent.recalls);
        let (mut kept, mut waits) = (Vec::new(), Vec::new());
        for mut recall in recalls.drain(..) {
            let later = self.turn.recalled && self.turn_is_over() && !planted(Bug::RecallsAtOnce);
            if later || recall.look_at > self.env.now {
                kept.push(recall);
                continue;
            }
            self.spend_recall();
            if self.step_recall(&mut recall)? {
                ended = true;
            } else {
                waits.push(recall);
            }
        }
        // Behind those that were not looked at, which come first in the next turn.
        kept.append(&mut waits);
        // An expelled client's recalls were dropped with it.
        kept.append(&mut self.agent.recalls);
        kept.retain(|r| {
            self.agent.clients.get(&r.client).is_some_and(|c| !c.expelled) || !r.revoked
        });
        self.agent.recalls = kept;
        Ok(ended)
    }

    fn step_recall(&mut self, recall: &mut Recall) -> Result<bool, Failure> {
        let (id, ino, token) = (recall.client, recall.ino, recall.token);
        if self.agent.clients.get(&id).is_some_and(Client::is_being_expelled) {
            // It was told so, and waits for the seal, also if it has gone on meanwhile.
            recall.look_at = self.env.now + LOOK;
            return self.expel(id, STOPPED);
        }
        let recalled = if recall.reported {
            Message::Released { client: id, ino, token }
        } else {
            Message::Recalled { client: id, ino, token }
        };
        if recall.reported && self.agent.requests.iter().any(|r| r.wants(id, ino)) {
            // Its client asks for it again: the head grants what it holds for taken.
            return Ok(true);
        }
        // A lease that was granted and is not written down yet: its client uses it first.
        if !recall.revoked && self.agent.requests.iter().any(|r| r.is_granted(id, ino)) {
            recall.look_at = self.env.now + LOOK;
            return Ok(false);
        }
        if !recall.revoked && self.needs_together(recall) {
            recall.look_at = self.env.now + LOOK;
            return Ok(false);
        }
        let lives = self.agent.clients.get(&id).filter(|client| !client.gone);
        if !recall.revoked
            && let Some(until) = lives.and_then(|client| client.held_until(ino))
            && until > self.env.now
            && !self.is_done_with(id, ino, recall)?
        {
            let next = if recall.found.is_none() { self.env.now + QUIET } else { until };
            recall.look_at = next.min(until);
            recall.found = self.agent.clients.get(&id).map(Client::activity);
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else {
            self.to_head(recalled);
            return Ok(true);
        };
        if !recall.revoked {
            let last = client.take_back(ino);
            if recall.reported {
                // Nothing was held: whatever the head grants meanwhile stands.
                recall.token = last.unwrap_or(u64::MAX);
            }
            recall.revoked = true;
            if !planted(Bug::RecallIgnoresOperation) {
                recall.inside = client.inside();
            }
            recall.give_up_at = self.env.now + RECALL_TIMEOUT_MS * 1_000_000;
        }
        recall.inside.retain(|seen| client.still_inside(*seen));
        if !recall.inside.is_empty() {
            if self.env.now >= recall.give_up_at {
                recall.look_at = self.env.now + LOOK;
                return self.expel(id, STOPPED);
            }
            recall.look_at = self.env.now + LOOK;
            return Ok(false);
        }
        if client.keeps(ino) {
            recall.look_at = self.env.now + LOOK;
            if recall.give_up_at == 0 {
                recall.give_up_at = self.env.now + RECALL_TIMEOUT_MS * 1_000_000;
            }
            if self.env.now >= recall.give_up_at {
                return self.expel(id, KEPT);
            }
            if !recall.told {
                recall.told = true;
                client.tell_of_recalls();
            }
            return Ok(false);
        }
        if !planted(Bug::ClosedUnheard) {
            client.collect_closed()?;
        }
        let unread = recall.unread.get_or_insert(client.unread());
        let emptied = planted(Bug::RecallSkipsLog) || self.drain(id)?;
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        let all_read = client.has_read(unread) && !planted(Bug::ReadUntilEmpty);
        let gap = client.has_gap()? && !planted(Bug::GapRecalled);
        if !emptied && !all_read {
            recall.look_at = self.env.now + LOOK;
            return Ok(false);
        }
        if !all_read && gap {
            // Another thread, which came in later, has a number before those of this lease and has not written yet: they
            // cannot be taken before it.
            recall.look_at = self.env.now + LOOK;
            if recall.give_up_at == 0 {
                recall.give_up_at = self.env.now + RECALL_TIMEOUT_MS * 1_000_000;
            }
            if self.env.now >= recall.give_up_at {
                return self.expel(id, STOPPED);
            }
            return Ok(false);
        }
        if emptied && !gap || planted(Bug::ClosedUnread) {
            // Before the lease, for which somebody may wait who removes one of them. (What was closed since the log was read
            // that far may have been made by what is still to be read.)
            self.tell_closed(id, true)?;
        }
        if let Some(client) = self.agent.clients.get_mut(&id) {
            // The stores of a payload go around the cache, and may arrive a little later than the word that
            // says that its writer is out: what was done under the lease must be in the log that was read.
            let since = *recall.unsound_since.get_or_insert(self.env.now);
            let later = client.claims_later()? && !planted(Bug::GapRecalled);
            let unsound = !all_read && (client.is_unsound() || later);
            if unsound && !client.gone && self.env.now < since + ARRIVAL {
                recall.look_at = self.env.now + LOOK;
                return Ok(false);
            }
            client.has_returned(ino)?;
        }
        self.to_head(recalled);
        Ok(true)
    }

    /// Whether the client waits for another lease that it needs together with this one, or has just got it. Not for ever, however often it asks.
    fn needs_together(&self, recall: &Recall) -> bool {
        let (id, ino) = (recall.client, recall.ino);
        let waits = |r: &Pending| r.needs_together(id, ino);
        let has = |client: &Client| client.has_together(ino, self.env.now);
        recall.since + TOGETHER_MAX > self.env.now
            && (self.agent.requests.iter().any(waits)
                || self.agent.clients.get(&id).is_some_and(has))
            && !planted(Bug::TogetherApart)
    }

    /// Whether a client seems to have done all under its lease that it has asked for it for: something, and nothing else since it was
    /// looked at (which is spared where that is how it always is: [`Rests`](super::rest::Rests)). Then the lease may go at once. (Who goes on using it keeps it, or two that write all the time would do so once each time.)
    fn is_done_with(
        &mut self,
        id: ClientId,
        ino: InodeId,
        recall: &Recall,
    ) -> Result<bool, Failure> {
        if recall.found.is_none() && !self.agent.rests.knows(ino) {
            return Ok(false);
        }
        let done = self.seems_done_with(id, ino, recall.found)?;
        Ok(match recall.found {
            None => done && self.agent.rests.spares(ino, id, self.env.now),
            Some(_) => {
                self.agent.rests.found(ino, done);
                done
            }
        })
    }

    /// The same at one look. `found`: what it had done at the look before.
    fn seems_done_with(
        &mut self,
        id: ClientId,
        ino: InodeId,
        found: Option<u64>,
    ) -> Result<bool, Failure> {
        let at_rest = |client: &&Client| {
            found.is_none_or(|found| client.activity() == found) && client.inside().is_empty()
        };
        if self.agent.clients.get(&id).filter(at_rest).is_none() {
            return Ok(false);
        }
        let used = |client: &Client| client.has_used(ino);
        if !self.agent.clients.get(&id).is_some_and(used) {
            self.drain(id)?;
        }
        Ok(self.agent.clients.get(&id).is_some_and(used))
    }

    /// Tells the head what a client has closed, if its log was read as far as it was then: to its end, or by its length.
    fn tell_closed(&mut self, id: ClientId, emptied: bool) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        let inodes = if emptied { client.tell_closed()? } else { client.tell_closed_before()? };
        if !inodes.is_empty() {
            self.to_head(Message::Unpin { client: id, inodes });
        }
        Ok(())
    }

    /// What clients have closed and could not ask for.
    pub(super) fn collect_closed(&mut self) -> Result<(), Failure> {
        let some = |client: &&Client| !client.gone && !client.expelled && client.closes_now();
        for id in self.agent.clients.values().filter(some).map(|c| c.id).collect::<Vec<_>>() {
            self.agent.clients.get_mut(&id).map_or(Ok(()), Client::collect_closed)?;
            let gap = |client: &mut Client| client.has_gap();
            let emptied =
                self.drain(id)? && !self.agent.clients.get_mut(&id).map_or(Ok(false), gap)?;
            self.tell_closed(id, emptied)?;
        }
        Ok(())
    }

    /// Logs that do not go on, and never will: their clients are expelled, so that they learn it.
    pub(super) fn expel_broken(&mut self) -> Result<(), Failure> {
        let mut broken = Vec::new();
        if planted(Bug::BrokenLogKept) {
            return Ok(());
        }
        for client in self.agent.clients.values_mut() {
            if client.stands_for_ever(self.env.now)? {
                broken.push(client.id);
            }
        }
        for id in broken {
            // The last look comes after it was seen that nobody is inside.
            if !self.drain(id)? {
                continue;
            }
            let Some(client) = self.agent.clients.get_mut(&id) else { continue };
            if client.stands_for_ever(self.env.now)? {
                let why = client.standing_words()?;
                if self.expel(id, &why)? {
                    self.env.counters.broken_logs += 1;
                }
            }
        }
        Ok(())
    }

    /// `false` when the log is not read yet as far as it was when this began.
    pub(super) fn expel(&mut self, id: ClientId, why: &str) -> Result<bool, Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
        client.begin_expel();
        let emptied = self.drain(id)?;
        let all_read = |client: &mut Client| client.is_read_to_expulsion();
        if !emptied && !self.agent.clients.get_mut(&id).is_none_or(all_read) {
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
        let pid = client.pid;
        log::warn!("client {:#x} (pid {pid}) is expelled: {why}", id.0);
        client.seal()?;
        self.env.counters.expelled += 1;
        self.price_expulsion(id);
        self.env.out.push(Effect::Detached(id));
        self.agent.requests.retain(|r| r.client != id);
        self.drain_gone(id)?;
        Ok(true)
    }
}
