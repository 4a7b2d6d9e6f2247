//! The clients of all members, as the head knows them: they are reported, and end; what only they had open is freed.

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Sequence, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;

use super::NUMBERS_END;
use crate::core::message::Message;
use crate::core::stage::check::Known;
use crate::core::{Failure, Node};

impl Node {
    pub(in crate::core) fn client_up(
        &mut self,
        client: ClientId,
        known: Known,
        settled: Sequence,
        leases: &[(InodeId, LeaseMode)],
        pins: &[InodeId],
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.reported.entry(client.node()).or_default().insert(client);
        let unknown = !head.known.contains_key(&client);
        let slot = head.known.entry(client).or_insert(known);
        let reported: BTreeSet<InodeId> = pins.iter().copied().collect();
        if planted(Bug::UnpinLost) {
            slot.pins.extend(reported);
        } else {
            // A pin that the agent does not name was taken back in a message that was lost with its link, or belongs
            // to a grant that was: that one is asked for again.
            head.let_go.extend(slot.pins.difference(&reported));
            slot.pins = reported;
        }
        // What the agent says is what its client holds: grants, recalls and returns that were under
        // way are void, also those that wait for room: what they gave back may have been granted again since.
        if !planted(Bug::ReturnOutlives) {
            head.stalled.retain(|(_, message)| {
                !matches!(message, Message::Released { client: c, .. } | Message::Recalled { client: c, .. } if *c == client)
            });
        }
        let mut actions = Vec::new();
        head.cuts.remove(&client);
        head.recall_tokens.retain(|(c, _), _| *c != client);
        head.leases.replace(client, leases, &mut actions);
        head.held_grants.retain(|g| g.want.client != client);
        for (ino, mode) in leases {
            if ino.0 < NUMBERS_END {
                head.next_inode = head.next_inode.max(ino.0 + 1);
            }
            // A number that does not exist yet, leased for writing and pinned, is one of its fresh ones. What
            // it made and removed is pinned no more: a number is used once. A head that knew the
            // client knows better anyhow.
            if unknown
                && *mode == LeaseMode::Write
                && slot.pins.contains(ino)
                && matches!(self.volume.attr(*ino), Ok(None))
            {
                slot.fresh.insert(*ino);
            }
        }
        let seen = self.settled_of(client).max(settled);
        self.member.settled.insert(client, seen);
        if self.is_ready() {
            // During a takeover others may have had what is not here yet: it is said at the end.
            self.tell_progress(client, seen);
        }
        self.reap_let_go()?;
        self.act(actions)
    }

    /// Frees of what clients let go what nobody else has; a head that takes over looks at all there is. What does not fit into this
    /// turn, or into the ring, goes on in the next (`retry_stalled`).
    pub(in crate::core) fn reap_let_go(&mut self) -> Result<(), Failure> {
        loop {
            let over = self.turn.reaped && self.turn_is_over() && !planted(Bug::ReapsAtOnce);
            let Some(head) = self.part.head_mut() else { return Ok(()) };
            if over || head.let_go.is_empty() || !head.ready || !self.ring.has_room() {
                return Ok(());
            }
            self.turn.reaped = true;
            let most = self.env.config.limits.reaps;
            let some: Vec<InodeId> =
                std::iter::from_fn(|| head.let_go.pop_first()).take(most).collect();
            if !self.reap_some(some)? {
                return Ok(());
            }
        }
    }

    /// What members sent during a takeover says of more that all have it than was known when the clients
    /// were reported.
    pub(in crate::core) fn tell_all_progress(&mut self) {
        let Some(head) = self.part.head() else { return };
        for client in head.known.keys().copied().collect::<Vec<_>>() {
            let settled = self.settled_of(client);
            self.tell_progress(client, settled);
        }
    }

    /// Says again how far a client is: the message that said it first may be lost, also when the head
    /// that sent it was another one and the client is of this node.
    fn tell_progress(&mut self, client: ClientId, settled: Sequence) {
        let from = (self.member.all_acked.0 + 1).max(self.ring.oldest().0);
        let unacked = (from..=self.ring.last().0)
            .filter_map(|seq| self.ring.get(StreamSeq(seq)))
            .any(|kept| kept.header.client == client);
        let unacked = unacked && !planted(Bug::ProgressOverstated);
        let replicated = if unacked { Sequence(0) } else { settled };
        if client.node() == self.me() {
            let local =
                self.agent.clients.get_mut(&client).filter(|_| !planted(Bug::ProgressForgotten));
            local.into_iter().for_each(|local| local.set_replicated(replicated));
            return;
        }
        let message = Message::Progress { client, settled, replicated };
        self.to_agent(client, message);
    }

    /// A client ended: what it held is free, what only it had open is freed.
    pub(in crate::core) fn forget_client(&mut self, client: ClientId) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let Some(known) = head.known.remove(&client) else { return Ok(()) };
        head.cuts.remove(&client);
        if !planted(Bug::RoomUnsummed) {
            head.reserved -= known.room;
        }
        let mut actions = Vec::new();
        head.recall_tokens.retain(|(c, _), _| *c != client);
        head.leases.gone(client, &mut actions);
        head.held_grants.retain(|g| g.want.client != client);
        head.seeking.retain(|seeking| !seeking.is_for(client));
        head.awaited.retain(|awaited| !awaited.is_for(client));
        self.keep_lost(client, &known.pins);
        self.forget_locks(client)?;
        self.reap_unpinned(known.pins.iter().copied().collect())?;
        if self.settled_of(client).0 == 0 {
            // Nothing of it is in the stream, so no member has noted anything. (Most programs only read.)
            self.member.settled.remove(&client);
        } else {
            // An empty chunk with sequence 0: every member forgets how far it was.
            self.emit(ClientId(client.0), Sequence(0), 0, &[])?;
        }
        self.act(actions)
    }

    pub(super) fn unpinned(&mut self, client: ClientId, inodes: &[InodeId]) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let Some(known) = head.known.get_mut(&client) else { return Ok(()) };
        let dropped: Vec<InodeId> =
            inodes.iter().copied().filter(|i| known.pins.remove(i)).collect();
        // With what is open go the rights that it gave.
        known.rights.retain(|ino| !dropped.contains(ino));
        self.reap_unpinned(dropped)
    }

    pub(in crate::core) fn is_pinned(&self, ino: InodeId) -> bool {
        let Some(head) = self.part.head() else { return false };
        head.known.values().any(|k| k.pins.contains(&ino))
            || head.keeping.has(ino, &self.view, self.env.now)
    }

    /// Frees those of the inodes that have neither a name nor anybody who has them open.
    pub(in crate::core) fn reap_unpinned(&mut self, inodes: Vec<InodeId>) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.let_go.extend(inodes);
        self.reap_let_go()
    }

    /// The same of as many as one chunk takes. `false`: some are freed in parts, one a turn, and are not done with.
    fn reap_some(&mut self, inodes: Vec<InodeId>) -> Result<bool, Failure> {
        let (mut raw, mut whole, mut parts) = (Vec::new(), Vec::new(), 0);
        let time = self.env.realtime();
        for ino in inodes {
            if !raw.is_empty() && self.turn_is_over() && !planted(Bug::ReapsAtOnce) {
                // The rest in the next.
                self.part.head_mut().map(|head| head.let_go.insert(ino));
                continue;
            }
            let Some(record) = self.volume.attr(ino)?.filter(|record| record.nlink == 0) else {
                continue;
            };
            if self.is_pinned(ino) {
                continue;
            }
            let Some(part) = self.part_to_free(ino)? else {
                let reap = Op::Reap { ino };
                let entry = reap.to_entry(Sequence(1), self.view.epoch, 0, time, 0);
                self.spend_entry(entry.len());
                // It has no more extents than that, or it would be freed in parts.
                self.spend_extents((record.blocks / 8).min(self.env.config.limits.pieces));
                raw.extend(entry);
                whole.push(ino);
                continue;
            };
            // What is left is looked at again, and whether nobody has it open by then.
            if parts == 0 {
                self.env.counters.parts += 1;
                let part = part.to_entry(Sequence(1), self.view.epoch, 0, time, 0);
                let before = self.ring.last();
                self.emit(ClientId(0), Sequence(1), 0, &part)?;
                if self.ring.last() == before {
                    // None of those that follow would fit, either.
                    parts += usize::from(self.reap_once_published(ino));
                    continue;
                }
            }
            parts += 1;
            if let Some(head) = self.part.head_mut() {
                head.let_go.insert(ino);
            }
        }
        let fits = raw.is_empty() || self.emit(ClientId(0), Sequence(1), 0, &raw)?;
        if !fits && !planted(Bug::ReapRefused) {
            for ino in whole {
                if self.volume.attr(ino)?.is_some() {
                    self.reap_once_published(ino);
                }
            }
        }
        Ok(parts == 0 && fits)
    }

    /// It could not be freed now: what is published gives room. `false`: nothing is to be, and it stays as it is, until somebody looks
    /// at all that has no name.
    pub(in crate::core) fn reap_once_published(&mut self, ino: InodeId) -> bool {
        if self.member.applied == self.member.published && self.member.job.is_none() {
            return false;
        }
        self.member.publish_now = true;
        if let Some(head) = self.part.head_mut() {
            head.let_go.insert(ino);
        }
        true
    }
}
