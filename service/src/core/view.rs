//! Views: taking over as head, following a new one, joining.
//!
//! A new view reaches every member. Each member tells the head of it what its clients hold
//! (`ClientUp`, one each) and then how far its stream reaches (`Position`). A new head grants
//! nothing before every member has spoken. If a member holds more of the stream than the head, the
//! head fetches it; what a member lacks is sent to it. Chunks are only ever made by one head an
//! epoch and passed down the chain, so of two members one's stream is a prefix of the other's.
//!
//! A node that joins gets a snapshot (`snapshot`), then the stream from its moment on.

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, Nanos, NodeId, StreamSeq};

use super::head::{Head, NUMBERS_END};
use super::message::Message;
use super::stream::Waits;
use super::{Effect, Failure, Node, Role};

/// Inode numbers skipped at a takeover: the old head may have handed out numbers unknown here.
const TAKEOVER_SKIP: u64 = 1 << 20;
/// Numbers that the head of an epoch hands out begin at so many times the epoch: what another head has handed out, and who has
/// them, may be known to nobody who is left, and a process that still has one of those open must not find another's file there.
const NUMBERS_EACH: u64 = 1 << 32;
/// Between two requests to let a follower into the chain.
const PROMOTE_PAUSE: u64 = 50_000_000;

impl Node {
    pub(super) fn on_view(
        &mut self,
        epoch: Epoch,
        chain: Vec<NodeId>,
        syncing: Vec<NodeId>,
        lapse: Nanos,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if epoch < self.epoch
            || (epoch == self.epoch && chain == self.chain && syncing == self.syncing)
        {
            return Ok(());
        }
        let (was, new_epoch) = (self.role(), epoch != self.epoch);
        let skipped = epoch.0 > self.epoch.0.saturating_add(1);
        (self.epoch, self.chain, self.syncing) = (epoch, chain, syncing);
        log::info!("epoch {epoch}: chain {:?}, joining {:?}", self.chain, self.syncing);
        let members = self.chain.clone();
        self.head.acked.retain(|n, _| members.contains(n));
        let joining = self.syncing.clone();
        self.head.snapshots.retain(|n, _| joining.contains(n));
        self.review_kept(skipped);
        self.head.followers.retain(|n| joining.contains(n));
        if new_epoch {
            // Pieces under way are refused as of an old epoch: who joins asks anew.
            self.head.snapshots.clear();
            self.head.followers.clear();
            self.head.joining.clear();
            self.head.promised.clear();
            if !planted(Bug::NamedBefore) {
                // Whoever has reported does so anew, and what has ended since may be unheard: it was said in an epoch that
                // is over.
                self.head.reported.clear();
            }
        }
        if self.role() != Role::Head {
            // (Until when leases of lost nodes may stand is so for whoever is head then.)
            let grants_from = self.head.grants_from;
            self.head = Head { grants_from, ..Head::new(self.first_number()) };
            if !planted(Bug::LocksOfPastHead) {
                self.locking.drop_table();
            }
        }
        if matches!(self.role(), Role::Head | Role::Member) {
            self.end_join()?;
        }
        match self.role() {
            Role::Head if was == Role::Head && self.ready => {
                self.forget_lost_nodes(lapse, out)?;
                self.advance_acks(out)?;
            }
            // Who joins has changed; what members have said stands.
            Role::Head if was == Role::Head && !new_epoch => self.take_over_step(out)?,
            Role::Head => self.begin_take_over(lapse, out)?,
            Role::Member => {
                self.become_follower(out);
            }
            Role::Syncing | Role::Outside => {
                // Whoever is to join had lost its place: others have served since, and may have
                // granted anew what the clients of an earlier run held.
                let lost = self.role() == Role::Syncing
                    && self.agent.taken_up
                    && !planted(Bug::JoinKeepsLogs);
                if lost || matches!(was, Role::Head | Role::Member) {
                    self.leave_chain(out)?;
                }
                if self.role() == Role::Syncing && (new_epoch || was != Role::Syncing) {
                    self.join_where_it_was(out);
                }
            }
        }
        for client in self.agent.clients.values() {
            client.set_epoch(epoch);
        }
        out.push(Effect::Position(self.ring.last()));
        let early = std::mem::take(&mut self.early);
        for (from, its_epoch, message) in early {
            if its_epoch == self.epoch {
                self.message(from, message, out)?;
            } else if its_epoch > self.epoch {
                self.early.push_back((from, its_epoch, message));
            }
        }
        Ok(())
    }

    /// Who was not heard asks again.
    pub(super) fn tell_missed(&mut self, out: &mut Vec<Effect>) {
        for node in std::mem::take(&mut self.head.missed) {
            if node == self.me() {
                self.ask_again();
            } else {
                self.send(node, Message::AskAgain, out);
            }
        }
    }

    /// Clients of nodes that left the chain are gone: as soon as their leases have lapsed, for the node
    /// may not know that it is out, and its processes may be dead or stopped while its clients go on.
    fn forget_lost_nodes(&mut self, lapse: Nanos, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if planted(Bug::LostNodeKept) {
            return Ok(());
        }
        let lost: Vec<_> =
            self.head.known.keys().copied().filter(|c| !self.chain.contains(&c.node())).collect();
        for client in lost {
            if self.head.lingering.contains_key(&client) {
                continue;
            }
            if lapse > 0 && !planted(Bug::SuspectedAtOnce) {
                self.head.lingering.insert(client, self.now + lapse);
            } else {
                self.head_message(client.node(), Message::ClientGone { client }, out)?;
            }
        }
        Ok(())
    }

    /// Clients of suspected nodes whose time is over.
    pub(super) fn forget_lingering(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if !self.is_head() || !self.ready {
            return Ok(());
        }
        let over: Vec<ClientId> = self
            .head
            .lingering
            .iter()
            .filter(|(_, at)| **at <= self.now)
            .map(|(c, _)| *c)
            .collect();
        for client in over {
            self.head.lingering.remove(&client);
            self.head_message(client.node(), Message::ClientGone { client }, out)?;
        }
        Ok(())
    }

    /// A member has told of all its clients: those that it did not name have ended, and the word of
    /// it was lost.
    fn report_ends(&mut self, from: NodeId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let named = self.head.reported.remove(&from).unwrap_or_default();
        let ended =
            |c: &&ClientId| c.node() == from && !named.contains(*c) && !planted(Bug::EndUnheard);
        let ended: Vec<ClientId> = self.head.known.keys().filter(ended).copied().collect();
        for client in ended {
            self.head_message(from, Message::ClientGone { client }, out)?;
        }
        self.end_unnamed(from, &named);
        Ok(())
    }

    fn begin_take_over(&mut self, lapse: Nanos, out: &mut Vec<Effect>) -> Result<(), Failure> {
        self.ready = false;
        let mut head = Head::new(self.first_number());
        if !planted(Bug::SuspectedAtOnce) {
            // What the lost nodes' clients hold is not known here.
            head.grants_from = self.head.grants_from.max(self.now + lapse);
        }
        head.positions.insert(self.me(), self.ring.last());
        self.head = head;
        self.await_lost();
        self.locking.drop_table();
        self.member.stash.clear();
        self.rewind_clients();
        self.renew_recalls();
        // What the old head granted and is not written down is in no report: it is no more.
        self.ask_again();
        for message in self.client_ups() {
            self.local.push_back(message);
        }
        self.take_over_step(out)
    }

    pub(super) fn position_arrived(
        &mut self,
        from: NodeId,
        seq: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.is_head() {
            return Ok(());
        }
        self.head.positions.insert(from, seq);
        if self.chain.contains(&from) {
            self.report_ends(from, out)?;
        }
        if self.ready {
            // A member that was out of reach, or a node that has the snapshot.
            if seq > self.ring.last() {
                self.counters.bad_messages += 1;
                return Ok(());
            }
            let acked = self.head.acked.entry(from).or_default();
            *acked = (*acked).max(seq);
            let complete = self.send_all(from, StreamSeq(seq.0 + 1), out)?;
            if complete && self.syncing.contains(&from) {
                // From here on it is sent every chunk and nothing is acknowledged without it, so
                // that whatever is acknowledged when it enters the chain is there.
                self.head.followers.insert(from);
                self.head.snapshots.remove(&from);
            }
            return self.advance_acks(out);
        }
        self.take_over_step(out)
    }

    /// The first inode number that a new head hands out: above all that were used and all that heads before it may have handed out.
    fn first_number(&self) -> u64 {
        let used = self.volume.last_inode().0.saturating_add(TAKEOVER_SKIP);
        match u64::from(self.epoch.0).saturating_mul(NUMBERS_EACH) {
            own if own < NUMBERS_END && !planted(Bug::NumbersOfAnother) => used.max(own),
            _ => used,
        }
    }

    /// Goes on with a takeover as far as what the members said allows.
    pub(super) fn take_over_step(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.ready || !self.chain.iter().all(|n| self.head.positions.contains_key(n)) {
            return Ok(());
        }
        // What somebody beside the chain has beyond it was never acknowledged.
        let members = self.head.positions.iter().filter(|(node, _)| self.chain.contains(node));
        let best = members.max_by_key(|(_, seq)| **seq).map(|(n, s)| (*n, *s));
        let Some((holder, most)) = best else { return Ok(()) };
        if most > self.ring.last() && !planted(Bug::TakeOverShort) {
            let from = StreamSeq(self.ring.last().0 + 1);
            self.send(holder, Message::StreamWant { from }, out);
            return Ok(());
        }
        while self.member.applied < self.ring.last() {
            if self.turn_is_over() {
                // The rest in slices of work, the last of which comes back here.
                return Ok(());
            }
            self.apply_next(Waits::Never)?;
        }
        for (node, seq) in self.head.positions.clone() {
            if node == self.me() || !self.chain.contains(&node) {
                continue;
            }
            self.head.acked.insert(node, seq);
            self.send_all(node, StreamSeq(seq.0 + 1), out)?;
        }
        // Handle what this node's own clients reported before anything is granted.
        while let Some(message) = self.local.pop_front() {
            let me = self.me();
            self.message(me, message, out)?;
        }
        self.ready = true;
        for client in self.head.known.keys().copied().collect::<Vec<_>>() {
            self.redeem_judged(client)?;
        }
        self.head.next_inode = self.head.next_inode.max(self.first_number());
        self.note_first_number();
        log::info!("head of epoch {} from stream position {}", self.epoch, self.ring.last());
        self.advance_acks(out)?;
        self.tell_all_progress(out);
        // Those known here that are not in the chain left during the takeover: all grants wait.
        self.forget_lost_nodes(0, out)?;
        let orphans = self.volume.orphans()?;
        self.reap_unpinned(orphans, out)?;
        self.ask_again();
        self.retry_stalled(out)?;
        for (from, message) in std::mem::take(&mut self.head.unready) {
            self.head_message(from, message, out)?;
        }
        self.serve_early_locks(out)?;
        self.tell_missed(out);
        self.wake_lock_waiters();
        let all: Vec<_> = self.agent.clients.keys().copied().collect();
        self.agent.active.extend(all);
        Ok(())
    }

    /// A head that takes over has done what it was behind.
    pub(super) fn take_over_caught_up(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.is_head() && self.member.applied == self.ring.last() {
            self.take_over_step(out)?;
        }
        Ok(())
    }

    /// Sends everything from `from` on; `false` when that is no longer kept.
    fn send_all(
        &mut self,
        node: NodeId,
        mut from: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<bool, Failure> {
        while from <= self.ring.last() {
            if !self.send_stream(node, from, out)? {
                return Ok(false);
            }
            from.0 += self.config.limits.resend;
        }
        Ok(true)
    }

    /// Nodes that hold everything enter the chain.
    pub(super) fn promote_followers(&mut self, out: &mut Vec<Effect>) {
        if self.now < self.head.promoted_at + PROMOTE_PAUSE {
            return;
        }
        for node in &self.head.followers {
            let process = self.head.joining.get(node).copied();
            if let Some(process) = process
                && self.acked_by(*node) >= self.member.all_acked
            {
                self.head.promoted_at = self.now;
                self.head.promised.insert(*node, self.now);
                out.push(Effect::CaughtUp(*node, process, self.epoch));
            }
        }
    }

    fn rewind_clients(&mut self) {
        for client in self.agent.clients.values_mut() {
            client.rewind();
        }
    }

    /// What the clients of this node hold, for a head that does not know. Also those that ended:
    /// what they wrote may not be settled yet, and the head takes entries only of clients it knows.
    fn client_ups(&mut self) -> Vec<Message> {
        self.agent.clients.values_mut().for_each(super::client::Client::forget_tokens);
        let mut ups: Vec<_> = self
            .agent
            .clients
            .values_mut()
            .map(|c| Message::ClientUp {
                client: c.id,
                incarnation: c.descriptor.incarnation,
                settled: c.settled,
                identity: c.identity.clone(),
                leases: c.leases().into_iter().chain(c.returned()).collect(),
                pins: c.reported_pins(),
                rights: c.rights(),
                room: c.count_room(),
            })
            .collect();
        let all = self.agent.clients.keys();
        ups.extend(all.flat_map(|c| self.locking.report(*c, self.config.limits.report)));
        ups.extend(self.past_reports());
        ups
    }

    /// Tells the head everything it must know of this node.
    fn become_follower(&mut self, out: &mut Vec<Effect>) {
        self.ready = true;
        // Whatever was under way between head and agent may be lost: it begins anew.
        self.rewind_clients();
        self.renew_recalls();
        for message in self.client_ups() {
            self.to_head(message, out);
        }
        let seq = self.ring.last();
        self.to_head(Message::Position { seq }, out);
        self.ask_again();
        self.wake_lock_waiters();
        let all: Vec<_> = self.agent.clients.keys().copied().collect();
        self.agent.active.extend(all);
        self.want_stream(out);
    }

    /// What the clients wrote and not every member has does not count: a chain without this node
    /// goes on without it.
    fn leave_chain(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        log::warn!("this node is no longer in the chain; its clients must attach anew");
        for client in self.agent.clients.values_mut() {
            let kept = client.settled.min(client.replicated);
            client.dismiss(kept);
            out.push(Effect::Detached(client.id));
        }
        for id in self.agent.clients.keys().copied().collect::<Vec<_>>() {
            self.retire(id, out)?;
        }
        self.agent.requests.clear();
        self.agent.recalls.clear();
        self.locking.drop_all();
        self.ready = false;
        self.agent.taken_up = false;
        Ok(())
    }

    pub(super) fn peer_up(&mut self, node: NodeId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        match self.role() {
            Role::Head => {
                // What was in flight to the agent may be lost: recalls are asked again when the
                // agent's clients ask; grants are void until then.
                Ok(())
            }
            Role::Member => {
                if self.chain.first() == Some(&node) {
                    self.become_follower(out);
                } else if self.predecessor() == Some(node) {
                    self.want_stream(out);
                }
                Ok(())
            }
            Role::Syncing => {
                if self.chain.first() == Some(&node) {
                    match self.join.incoming {
                        Some(_) => self.begin_join(out),
                        None if self.join.behind.is_some() => self.want_stream(out),
                        None => {
                            self.report_past(out);
                            self.to_head(Message::Position { seq: self.ring.last() }, out);
                        }
                    }
                }
                Ok(())
            }
            Role::Outside => Ok(()),
        }
    }

    pub(super) fn peer_down(&mut self, node: NodeId) {
        self.head.snapshots.remove(&node);
        self.head.reported.remove(&node);
    }
}
