//! Views: taking over as head, following a new one, joining.
//!
//! A new view reaches every member. Each member tells the head of it what its clients hold
//! (`ClientUp`, one each) and then how far its stream reaches (`Position`). A new head grants
//! nothing before every member has spoken. If a member holds more of the stream than the head, the
//! head fetches it; what a member lacks is sent to it. Chunks are only ever made by one head an
//! epoch and passed down the chain, so of two members one's stream is a prefix of the other's.
//!
//! A node that joins gets a snapshot (`snapshot`), then the stream from its moment on.

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, InodeId, Level, Nanos, NodeId, StreamSeq};

use super::head::{Head, NUMBERS_END};
use super::join::Join;
use super::message::Message;
use super::part::Part;
use super::past::Keeping;
use super::snapshot::Outgoing;
use super::stage::apply::Waits;
use super::{Effect, Failure, Node, Role};

/// Inode numbers skipped at a takeover: the old head may have handed out numbers unknown here.
const TAKEOVER_SKIP: u64 = 1 << 20;
/// Numbers that the head of an epoch hands out begin at so many times the epoch: what another head has handed out, and who has
/// them, may be known to nobody who is left, and a process that still has one of those open must not find another's file there.
const NUMBERS_EACH: u64 = 1 << 32;
/// Between two requests to let a follower into the chain.
const PROMOTE_PAUSE: u64 = 50_000_000;

/// The coordinator's word about the chain, as it was heard last.
#[derive(Debug)]
pub(super) struct View {
    pub epoch: Epoch,
    /// Members, head first.
    pub chain: Vec<NodeId>,
    /// Nodes that fetch the state in order to join.
    pub syncing: Vec<NodeId>,
    /// So many members must hold what is acknowledged.
    pub least: usize,
    /// What all nodes of the volume understand.
    pub level: Level,
    /// So many the chain has when it is whole.
    pub wanted: usize,
    /// Until then leases of lost nodes may stand, which only their head knew: so it is for whoever is head now.
    pub grants_from: Nanos,
    /// Nodes that were in the chain since this process began.
    pub seen: BTreeSet<NodeId>,
    /// Nodes that were lost before this process began, and for which the head waited of which it has its state, are back
    /// until then, or stay away.
    pub strangers_until: Nanos,
}

impl Default for View {
    /// Before anything was heard.
    fn default() -> Self {
        Self {
            epoch: Epoch(0),
            chain: Vec::new(),
            syncing: Vec::new(),
            least: 1,
            level: Level::NEWEST,
            wanted: 1,
            grants_from: 0,
            seen: BTreeSet::new(),
            strangers_until: 0,
        }
    }
}

impl View {
    /// The part of a node in it.
    pub(super) fn role(&self, node: NodeId) -> Role {
        if self.chain.first() == Some(&node) {
            Role::Head
        } else if self.chain.contains(&node) {
            Role::Member
        } else if self.syncing.contains(&node) {
            Role::Syncing
        } else {
            Role::Outside
        }
    }

    /// The member after a node.
    pub(super) fn successor(&self, node: NodeId) -> Option<NodeId> {
        let at = self.chain.iter().position(|n| *n == node)?;
        self.chain.get(at + 1).copied()
    }

    /// The member before a node.
    pub(super) fn predecessor(&self, node: NodeId) -> Option<NodeId> {
        let at = self.chain.iter().position(|n| *n == node)?;
        at.checked_sub(1).map(|i| self.chain[i])
    }

    /// Whether a node is in it, as a member or joining.
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.chain.contains(&node) || self.syncing.contains(&node)
    }
}

impl Node {
    pub(super) fn on_view(
        &mut self,
        epoch: Epoch,
        chain: Vec<NodeId>,
        syncing: Vec<NodeId>,
        lapse: Nanos,
    ) -> Result<(), Failure> {
        if epoch < self.view.epoch
            || (epoch == self.view.epoch
                && chain == self.view.chain
                && syncing == self.view.syncing)
        {
            return Ok(());
        }
        // What is said from here on of how far this node is shall be so.
        self.settle_ring()?;
        self.member.kept_untold = false;
        let (was, new_epoch) = (self.role(), epoch != self.view.epoch);
        let skipped = epoch.0 > self.view.epoch.0.saturating_add(1);
        (self.view.epoch, self.view.chain, self.view.syncing) = (epoch, chain, syncing);
        log::info!("epoch {epoch}: chain {:?}, joining {:?}", self.view.chain, self.view.syncing);
        self.note_absent(skipped);
        let goes_on = self.part.head().is_some_and(|head| head.ready || !new_epoch);
        self.change_part(new_epoch)?;
        self.heal_in_new_view();
        match self.role() {
            Role::Head if goes_on && self.is_ready() => {
                self.forget_lost_nodes(lapse)?;
                self.advance_acks()?;
            }
            // Who joins has changed; what members have said stands.
            Role::Head if goes_on => self.take_over_step()?,
            Role::Head => self.begin_take_over(lapse)?,
            Role::Member => self.become_follower()?,
            Role::Syncing | Role::Outside => {
                // Whoever is to join had lost its place: others have served since, and may have
                // granted anew what the clients of an earlier run held.
                let lost = self.role() == Role::Syncing
                    && self.agent.taken_up
                    && !planted(Bug::JoinKeepsLogs);
                if lost || matches!(was, Role::Head | Role::Member) {
                    self.leave_chain()?;
                }
                if self.role() == Role::Syncing && (new_epoch || was != Role::Syncing) {
                    self.join_where_it_was();
                }
            }
        }
        for client in self.agent.clients.values() {
            client.set_epoch(epoch);
        }
        self.env.out.push(Effect::Position(self.position()));
        let early = std::mem::take(&mut self.early);
        for (from, its_epoch, message) in early {
            if its_epoch == self.view.epoch {
                self.message(from, message)?;
            } else if its_epoch > self.view.epoch {
                self.early.push_back((from, its_epoch, message));
            }
        }
        // What was said of it and is lost is said anew on a new link; not before, or it would be lost again.
        let known = self.unheard.iter().filter(|(_, its_epoch)| **its_epoch <= self.view.epoch);
        self.env.out.extend(known.map(|(node, _)| Effect::Renew(*node)));
        Ok(())
    }

    /// The view has changed: what goes with the part that the node had goes, unless it has that part still. (What a head has it
    /// has for the views in which it stays one, and a node that joins for an epoch. Who becomes head takes over.)
    fn change_part(&mut self, new_epoch: bool) -> Result<(), Failure> {
        let role = self.role();
        if matches!(role, Role::Head | Role::Member) {
            self.end_join()?;
        }
        match (role, &mut self.part) {
            (Role::Head, Part::Head(head)) => {
                head.review(&self.view, new_epoch, self.env.now + self.env.config.grace);
            }
            (_, Part::Head(_)) if planted(Bug::LocksOfPastHead) => {}
            // It is built when what it begins with is known.
            (Role::Head, _) => {}
            (Role::Syncing, Part::Syncing(_)) if !new_epoch => {}
            (Role::Syncing, part) => *part = Part::Syncing(Join::default()),
            (Role::Member, part) => *part = Part::Member,
            (Role::Outside, part) => *part = Part::Outside,
        }
        Ok(())
    }

    /// Who was not heard asks again.
    pub(super) fn tell_missed(&mut self) {
        let Some(head) = self.part.head_mut() else { return };
        let missed = std::mem::take(&mut head.missed);
        for node in missed {
            if node == self.me() {
                self.ask_again();
            } else {
                self.send(node, Message::AskAgain);
            }
        }
    }

    /// Clients of nodes that left the chain are gone: as soon as their leases have lapsed, for the node
    /// may not know that it is out, and its processes may be dead or stopped while its clients go on.
    fn forget_lost_nodes(&mut self, lapse: Nanos) -> Result<(), Failure> {
        let Some(head) = self.part.head() else { return Ok(()) };
        if planted(Bug::LostNodeKept) {
            return Ok(());
        }
        let lost = |c: &ClientId| !self.view.chain.contains(&c.node());
        for client in head.known.keys().copied().filter(lost).collect::<Vec<_>>() {
            let Some(head) = self.part.head_mut() else { return Ok(()) };
            if head.lingering.contains_key(&client) {
                continue;
            }
            if lapse > 0 && !planted(Bug::SuspectedAtOnce) {
                head.lingering.insert(client, self.env.now + lapse);
            } else {
                self.head_message(client.node(), Message::ClientGone { client })?;
            }
        }
        Ok(())
    }

    /// Clients of suspected nodes whose time is over.
    pub(super) fn forget_lingering(&mut self) -> Result<(), Failure> {
        let now = self.env.now;
        let Some(head) = self.part.head_mut().filter(|head| head.ready) else { return Ok(()) };
        let over: Vec<_> = head.lingering.extract_if(.., |_, at| *at <= now).collect();
        for (client, _) in over {
            self.head_message(client.node(), Message::ClientGone { client })?;
        }
        Ok(())
    }

    /// A member has told of all its clients: those that it did not name have ended, and the word of
    /// it was lost.
    fn report_ends(&mut self, from: NodeId) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let named = head.reported.remove(&from).unwrap_or_default();
        let ended =
            |c: &&ClientId| c.node() == from && !named.contains(*c) && !planted(Bug::EndUnheard);
        let ended: Vec<ClientId> = head.known.keys().filter(ended).copied().collect();
        for client in ended {
            self.head_message(from, Message::ClientGone { client })?;
        }
        if let Some(head) = self.part.head_mut() {
            let over = head.keeping.end_unnamed(from, &named);
            head.let_go.extend(over);
        }
        Ok(())
    }

    fn begin_take_over(&mut self, lapse: Nanos) -> Result<(), Failure> {
        // What the lost nodes' clients hold is not known here.
        self.view.grants_from = match planted(Bug::SuspectedAtOnce) {
            true => 0,
            false => self.view.grants_from.max(self.env.now + lapse),
        };
        let keeping = Keeping::of_new_head(&self.view, self.env.now + self.env.config.grace);
        let mut head = Head::new(self.first_number(), keeping);
        head.positions.insert(self.me(), self.ring.last());
        if let Part::Head(before) = &mut self.part {
            head.keeping.inherit(&mut before.keeping);
        }
        self.part = Part::Head(Box::new(head));
        self.agent.locking.sought.clear();
        self.member.stash.clear();
        self.rewind_clients();
        self.renew_recalls();
        // What the old head granted and is not written down is in no report: it is no more.
        self.ask_again();
        for message in self.client_ups() {
            self.local.push_back(message);
        }
        self.take_over_step()
    }

    pub(super) fn position_arrived(&mut self, from: NodeId, seq: StreamSeq) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.positions.insert(from, seq);
        if self.view.chain.contains(&from) {
            self.report_ends(from)?;
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if head.ready {
            // A member that was out of reach, or a node that has the snapshot.
            if seq > self.ring.last() {
                self.env.counters.bad_messages += 1;
                return Ok(());
            }
            head.heard.insert(from, head.watched);
            let acked = head.acked.entry(from).or_default();
            *acked = (*acked).max(seq);
            let next = StreamSeq(seq.0 + 1);
            if !self.view.syncing.contains(&from) {
                self.send_all(from, next)?;
            } else if seq == self.ring.last() || self.ring.get(next).is_some() {
                self.catches_up(from, seq)?;
            } else {
                // It has a snapshot, and the stream has left it behind.
                let Some(head) = self.part.head_mut() else { return Ok(()) };
                let done = |going: &Outgoing| going.start.behind && going.start.seq == seq;
                if head.snapshots.get(&from).is_some_and(done) {
                    head.snapshots.remove(&from);
                }
                let last = self.ring.last();
                self.send(from, Message::Resume { seq: StreamSeq(0), last });
            }
            return self.advance_acks();
        }
        self.take_over_step()
    }

    /// The first inode number that a new head hands out: above all that were used and all that heads before it may have handed out.
    fn first_number(&self) -> u64 {
        let used = self.volume.last_inode().0.saturating_add(TAKEOVER_SKIP);
        match u64::from(self.view.epoch.0).saturating_mul(NUMBERS_EACH) {
            own if own < NUMBERS_END && !planted(Bug::NumbersOfAnother) => used.max(own),
            _ => used,
        }
    }

    /// Goes on with a takeover as far as what the members said allows.
    pub(super) fn take_over_step(&mut self) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };

        if head.ready || !self.view.chain.iter().all(|n| head.positions.contains_key(n)) {
            return Ok(());
        }
        // What somebody beside the chain has beyond it was never acknowledged.
        let members = head.positions.iter().filter(|(node, _)| self.view.chain.contains(node));
        let best = members.max_by_key(|(_, seq)| **seq).map(|(n, s)| (*n, *s));
        let Some((holder, most)) = best else { return Ok(()) };
        if most > self.ring.last() && !planted(Bug::TakeOverShort) {
            let from = StreamSeq(self.ring.last().0 + 1);
            self.send(holder, Message::StreamWant { from });
            return Ok(());
        }
        while self.member.applied < self.ring.last() {
            if self.turn_is_over() {
                // The rest in slices of work, the last of which comes back here.
                return Ok(());
            }
            self.apply_next(Waits::Never)?;
        }
        let Some(head) = self.part.head() else { return Ok(()) };
        for (node, seq) in head.positions.clone() {
            if node == self.me() || !self.view.chain.contains(&node) {
                continue;
            }
            let Some(head) = self.part.head_mut() else { return Ok(()) };
            head.acked.insert(node, seq);
            head.heard.insert(node, head.watched);
            self.send_all(node, StreamSeq(seq.0 + 1))?;
        }
        // Handle what this node's own clients reported before anything is granted.
        while let Some(message) = self.local.pop_front() {
            let me = self.me();
            self.message(me, message)?;
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.ready = true;
        // What came early, and from nobody who has what is between, is of a stream that this one does not go on with.
        self.member.stash.clear();
        for client in head.known.keys().copied().collect::<Vec<_>>() {
            self.redeem_judged(client)?;
        }
        let first = self.first_number();
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.next_inode = head.next_inode.max(first);
        head.keeping.note_first_number(head.next_inode);
        log::info!("head of epoch {} from stream position {}", self.view.epoch, self.ring.last());
        self.advance_acks()?;
        self.mark_unacked()?;
        self.tell_all_progress();
        // Those known here that are not in the chain left during the takeover: all grants wait.
        self.forget_lost_nodes(0)?;
        let orphans = self.volume.orphans()?;
        self.reap_unpinned(orphans)?;
        self.ask_again();
        self.retry_stalled()?;
        let unready = self.part.head_mut().map(|head| std::mem::take(&mut head.unready));
        for (from, message) in unready.into_iter().flatten() {
            self.head_message(from, message)?;
        }
        self.serve_early_locks()?;
        self.tell_missed();
        self.wake_lock_waiters();
        let all: Vec<_> = self.agent.clients.keys().copied().collect();
        self.agent.active.extend(all);
        Ok(())
    }

    /// What is published here and not on every member counts as changed still: who gets a lease on it is promised that all have it. (A
    /// node that was started anew has replayed what lies behind that only.)
    fn mark_unacked(&mut self) -> Result<(), Failure> {
        if planted(Bug::UnackedForgotten) {
            return Ok(());
        }
        // What not all have is in the ring. (Where too few are in the chain nothing is known to be on all.)
        let from = (self.member.all_acked.0 + 1).max(self.ring.oldest().0);
        let unacked = from..=self.member.published.0;
        for seq in unacked.map(StreamSeq) {
            let Some(kept) = self.ring.get(seq).copied() else { continue };
            let client = kept.header.client;
            let chunk = self.chunk_in_ring(seq, &kept)?;
            for (.., op) in chunk.entries() {
                for ino in op.facts().touches().filter(|ino| *ino != InodeId::NONE) {
                    self.member.mark_before(ino, seq, client);
                }
            }
        }
        Ok(())
    }

    /// A head that takes over has done what it was behind.
    pub(super) fn take_over_caught_up(&mut self) -> Result<(), Failure> {
        if self.is_head() && self.member.applied == self.ring.last() {
            self.take_over_step()?;
        }
        Ok(())
    }

    /// Sends everything from `from` on; `false` when that is no longer kept.
    fn send_all(&mut self, node: NodeId, mut from: StreamSeq) -> Result<bool, Failure> {
        while from <= self.ring.last() {
            if !self.send_stream(node, from)? {
                return Ok(false);
            }
            from.0 += self.env.config.limits.resend;
        }
        Ok(true)
    }

    /// Nodes that hold everything enter the chain.
    pub(super) fn promote_followers(&mut self) {
        let Some(head) = self.part.head_mut() else { return };
        if self.env.now < head.promoted_at + PROMOTE_PAUSE {
            return;
        }
        for node in &head.followers {
            let process = head.joining.get(node).copied();
            if let Some(process) = process
                && head.acked.get(node).is_some_and(|seq| *seq >= self.member.all_acked)
            {
                head.promoted_at = self.env.now;
                head.promised.insert(*node, self.env.now);
                self.env.out.push(Effect::CaughtUp(*node, process, self.view.epoch));
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
        // What a client has left came back to the head before, and is not its own after that.
        let mut leavers = self.agent.locking.leavers();
        leavers.retain(|_| !planted(Bug::LeftComesBack));
        for client in &leavers {
            ups.extend(self.agent.locking.tell_again(*client, self.next_token));
        }
        ups.extend(self.agent.locking.heirs_again(self.next_token));
        let all: Vec<_> = self.agent.clients.keys().copied().collect();
        for client in all {
            ups.extend(self.agent.locking.report(client, self.env.config.limits.report));
            ups.extend(self.sole_reports(client, leavers.contains(&client)));
        }
        ups.extend(self.past_reports());
        ups
    }

    /// Tells the head everything it must know of this node.
    fn become_follower(&mut self) -> Result<(), Failure> {
        self.settle_ring()?;
        self.agent.locking.sought.clear();
        // Whatever was under way between head and agent may be lost: it begins anew.
        self.rewind_clients();
        self.renew_recalls();
        for message in self.client_ups() {
            self.to_head(message);
        }
        let seq = self.ring.last();
        self.to_head(Message::Position { seq });
        self.ask_again();
        self.wake_lock_waiters();
        let all: Vec<_> = self.agent.clients.keys().copied().collect();
        self.agent.active.extend(all);
        self.want_stream();
        Ok(())
    }

    /// What the clients wrote and not every member has does not count: a chain without this node
    /// goes on without it.
    fn leave_chain(&mut self) -> Result<(), Failure> {
        log::warn!("this node is no longer in the chain; its clients must attach anew");
        for client in self.agent.clients.values_mut() {
            let kept = client.settled.min(client.replicated);
            client.dismiss(kept);
            self.env.out.push(Effect::Detached(client.id));
        }
        self.note_losses(true)?;
        for id in self.agent.clients.keys().copied().collect::<Vec<_>>() {
            self.retire(id)?;
        }
        self.agent.requests.clear();
        self.agent.recalls.clear();
        self.agent.readings.clear();
        self.agent.locking.drop_all();
        self.agent.taken_up = false;
        Ok(())
    }

    pub(super) fn peer_up(&mut self, node: NodeId) -> Result<(), Failure> {
        self.unheard.remove(&node);
        self.heal_with_peer();
        match self.role() {
            Role::Head => {
                // What was in flight to the agent may be lost: recalls are asked again when the
                // agent's clients ask; grants are void until then.
                Ok(())
            }
            Role::Member => {
                if self.view.chain.first() == Some(&node) {
                    self.become_follower()?;
                } else if self.predecessor() == Some(node) {
                    self.want_stream();
                }
                Ok(())
            }
            Role::Syncing => {
                if self.view.chain.first() == Some(&node) {
                    match self.member.incoming {
                        Some(_) => self.begin_join(),
                        None if self.is_behind() => self.want_stream(),
                        None => {
                            self.report_past();
                            self.to_head(Message::Position { seq: self.ring.last() });
                        }
                    }
                }
                Ok(())
            }
            Role::Outside => Ok(()),
        }
    }

    pub(super) fn peer_down(&mut self, node: NodeId) {
        self.unheard.remove(&node);
        if let Some(head) = self.part.head_mut() {
            head.snapshots.remove(&node);
            head.images_wanted.remove(&node);
            head.reported.remove(&node);
        }
    }
}
