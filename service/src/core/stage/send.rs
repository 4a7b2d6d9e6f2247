//! Send: chunks go down the chain, acknowledgements come back, and what all members hold is told to those who wait for it. What is
//! under way is bounded by the head's watermarks.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, NodeId, Sequence, StreamSeq};

use crate::core::frame::Frame;
use crate::core::head::Head;
use crate::core::message::Message;
use crate::core::{Effect, Failure, Node, NodeConfig, Role};

/// A member that has neither acknowledged for this long, although it should have, nor said that it is at work, is reported.
const SUSPECT_AFTER: Nanos = 600_000_000;
/// So is one that has said so and not acknowledged for this long: its medium hangs, or one of its threads.
const STUCK_AFTER: Nanos = 6_000_000_000;
/// A member that has chunks and cannot acknowledge them yet says so this often.
const AT_WORK: Nanos = 150_000_000;
/// A look at that counts for no more: a head that gets too little of the processor has not waited, it has slept, and the
/// acknowledgements may lie before its door.
const WATCH_STEP: Nanos = 150_000_000;

impl Node {
    pub(in crate::core) fn acked(&mut self, from: NodeId, seq: StreamSeq) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if seq > self.ring.last() {
            self.env.counters.bad_messages += 1;
            return Ok(());
        }
        let acked = head.acked.entry(from).or_default();
        *acked = (*acked).max(seq);
        head.heard.insert(from, head.watched);
        self.caught_up_to(from, seq)?;
        self.advance_acks()
    }

    /// Works out what every member holds, and tells those who wait for it.
    pub(in crate::core) fn advance_acks(&mut self) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let me = self.env.config.node;
        let mut all = match planted(Bug::KeptEarly) {
            true => self.ring.last(),
            false => self.ring.kept_to(),
        };
        let chain = self.view.chain.len() + head.followers.len();
        if chain < self.view.least && !planted(Bug::MinReplicasIgnored) {
            // However many of them have it: it is not what the volume promises.
            all = self.member.all_acked;
        }
        for node in self.view.chain.iter().chain(&head.followers) {
            if *node != me && !planted(Bug::EarlyAck) {
                all = all.min(head.acked_by(*node));
            }
        }
        if all > self.member.all_acked {
            let from = self.member.all_acked;
            self.member.all_acked = all;
            head.acks_missing = 0;
            // (A head that was started anew knows of none that is on all; the ring has what need be looked at.)
            for seq in (from.0 + 1).max(self.ring.oldest().0)..=all.0 {
                let Some(header) = self.ring.get(StreamSeq(seq)).map(|k| k.header) else {
                    continue;
                };
                if let Some(head) = self.part.head_mut() {
                    let bytes = u64::from(header.body_bytes);
                    head.unacked_bytes = head.unacked_bytes.saturating_sub(bytes);
                }
                self.replicated(header.client, header.last_seq);
            }
            self.give_up()?;
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if self.member.all_acked == self.ring.last() {
            head.unacked_bytes = 0;
        }
        head.flow(&self.env.config);
        self.promote_followers();
        self.release_grants();
        Ok(())
    }

    /// The coordinator says how many members must hold what is acknowledged.
    pub(in crate::core) fn needs(&mut self, members: usize) -> Result<(), Failure> {
        let members = members.max(1);
        if members == self.view.least {
            return Ok(());
        }
        self.view.least = members;
        if self.is_head() && self.is_ready() { self.advance_acks() } else { Ok(()) }
    }

    /// The chain, and those who have everything and are about to enter it, are fewer than must hold what is acknowledged.
    pub(in crate::core) fn too_few(&self) -> bool {
        let followers = self.part.head().map_or(0, |head| head.followers.len());
        self.view.chain.len() + followers < self.view.least
    }

    fn replicated(&mut self, client: ClientId, seq: Sequence) {
        let Some(head) = self.part.head_mut() else { return };
        if seq.0 == 0 || client.0 == 0 {
            return;
        }
        if let Some(local) = self.agent.clients.get_mut(&client) {
            local.set_replicated(seq);
        } else if head.known.contains_key(&client) {
            let message = Message::Progress { client, settled: seq, replicated: seq };
            self.to_agent(client, message);
        }
    }

    pub(in crate::core) fn acknowledge(&mut self) {
        let seq = self.ring.kept_to();
        self.member.acknowledged_at = self.env.now;
        let message = Message::ChunkAck { seq };
        if let Some(&head) = self.view.chain.first()
            && head != self.me()
        {
            self.send(head, message);
        }
    }

    /// Asks the predecessor for what is missing.
    pub(in crate::core) fn want_stream(&mut self) {
        let source = match self.role() {
            Role::Syncing => self.view.chain.first().copied(),
            _ => self.predecessor(),
        };
        if let Some(source) = source {
            let from = StreamSeq(self.ring.last().0 + 1);
            self.send(source, Message::StreamWant { from });
        }
    }

    /// What came too early and found no room in the stash is asked for when it is next: who has been away is sent much at
    /// once, in two classes.
    pub(super) fn want_dropped(&mut self) {
        let next = StreamSeq(self.ring.last().0 + 1);
        let Some((first, last)) = self.member.dropped.filter(|(first, _)| next >= *first) else {
            return;
        };
        // So much is sent.
        let rest = StreamSeq(next.0 + self.env.config.limits.resend);
        self.member.dropped = (last >= rest).then_some((rest, last));
        if next <= last {
            self.want_stream();
        }
        debug_assert!(first <= last, "they were put in order");
    }

    /// Sends what the ring holds from `from` on. Says whether it could.
    pub(in crate::core) fn send_stream(
        &mut self,
        to: NodeId,
        from: StreamSeq,
    ) -> Result<bool, Failure> {
        let mut seq = from;
        while seq <= self.ring.last() && seq.0 - from.0 < self.env.config.limits.resend {
            if !self.send_kept(to, seq)? {
                return Ok(false);
            }
            seq.0 += 1;
        }
        Ok(true)
    }

    /// Sends a chunk that the ring holds. Says whether it does.
    pub(in crate::core) fn send_kept(
        &mut self,
        to: NodeId,
        seq: StreamSeq,
    ) -> Result<bool, Failure> {
        let Some(kept) = self.ring.get(seq).copied() else {
            log::warn!("node {to} wants chunk {seq}, which is no longer kept");
            return Ok(false);
        };
        // Whoever gets it checks it.
        let frame =
            Frame::filled(kept.header.body_bytes as usize, |to| self.ring.append_body(&kept, to))?;
        let body = frame.into_chunk(&kept.header, self.view.epoch, self.member.all_acked);
        self.env.send_chunk(to, body);
        Ok(true)
    }

    /// A member that has what it cannot acknowledge yet says so, by saying again how far it is: one that is given little of the
    /// processor is slow, not gone.
    pub(in crate::core) fn say_at_work(&mut self) {
        let unkept = self.ring.kept_to() < self.ring.last()
            || !self.member.stash.is_empty()
            || self.member.hearing;
        let due = self.env.now >= self.member.acknowledged_at + AT_WORK;
        // One that has everything and is about to enter the chain is waited for, too.
        let whole = self.member.whole_in == Some(self.view.epoch) && self.member.incoming.is_none();
        let awaited = self.role() == Role::Member || self.role() == Role::Syncing && whole;
        if awaited && unkept && due && !planted(Bug::NeverAtWork) {
            self.acknowledge();
        }
    }

    /// A member that does not acknowledge although it should is reported to the coordinator.
    pub(in crate::core) fn watch_acks(&mut self) {
        let me = self.me();
        let Some(head) = self.part.head_mut() else { return };
        let waited = self.env.now.saturating_sub(head.watched_at).min(WATCH_STEP);
        head.watched_at = self.env.now;
        head.watched += waited;
        let last = self.ring.last();
        // (Who is waited for as it is may lack what was acknowledged before that.)
        let lacks = |node: &NodeId| head.catching_up.contains_key(node);
        if self.member.all_acked >= last && !head.followers.iter().any(lacks) {
            head.acks_missing = 0;
            return;
        }
        head.acks_missing += waited;
        if head.acks_missing > SUSPECT_AFTER {
            let stuck = head.acks_missing > STUCK_AFTER && !planted(Bug::AtWorkForEver);
            let silent = |node: &NodeId| {
                let heard = head.heard.get(node).copied().unwrap_or(0);
                head.watched.saturating_sub(heard) > SUSPECT_AFTER
            };
            let behind = |n: &&NodeId| {
                let acked = head.acked_by(**n);
                **n != me && acked <= self.member.all_acked && acked < last
            };
            let mut late = self.view.chain.iter().chain(&head.followers).filter(behind).peekable();
            // Nobody of them is behind who waits for more members, or for its own ring.
            let nobody = late.peek().is_none();
            let suspect = late.find(|node| stuck || silent(node)).copied();
            if nobody || suspect.is_some() {
                head.acks_missing = 0;
            }
            self.env.out.extend(suspect.map(Effect::Suspect));
        }
    }
}

impl Head {
    /// Whether nothing is to be taken from clients now.
    pub(in crate::core) fn is_blocked(&self) -> bool {
        !self.ready || self.paused || !self.stalled.is_empty()
    }

    /// Flow control (LineFS section 4): above the high watermark of what members have not
    /// acknowledged nothing more is taken from clients, until it is below the low one.
    fn flow(&mut self, config: &NodeConfig) {
        let memory = config.memory.max(1);
        if self.unacked_bytes * 100 > memory * u64::from(config.high) {
            self.paused = true;
        } else if self.unacked_bytes * 100 <= memory * u64::from(config.low) {
            self.paused = false;
        }
    }

    /// How far a node has acknowledged.
    pub(in crate::core) fn acked_by(&self, node: NodeId) -> StreamSeq {
        self.acked.get(&node).copied().unwrap_or(StreamSeq(0))
    }
}
