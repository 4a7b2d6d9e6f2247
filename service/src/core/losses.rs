//! What is lost when a node loses its place, and who of its other processes must hear of it.
//!
//! The others go on from what every member had; what clients of this node did and not all had is lost. Each client knows that of what it
//! did itself (`REPLICATED`, `SEALED_AT`). But a program may sync what another one of its machine has written, as the checkpointer of a
//! database does, and must not take for durable what went with the other's log: whoever has an inode open that something of
//! somebody else's was lost of is told once, as Linux tells everybody who has a file open that could not be written back.
//!
//! A client may also have *seen* of a file what is lost, done by a client of whatever node, since leases on files are granted before all have
//! that: of those files it is told as well.
//!
//! It is noted in the pins of the sessions that end so (`PIN_LOST`), also of those that had ended before ([`past`](super::past)), and told
//! when the process says what it still has open (`Keep`).

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{InodeId, StreamSeq};

use super::client::Client;
use super::{Failure, Node};

/// A process: its number, and its start time.
type Process = (u32, u64);

/// Inodes of which something was lost, and whose: one process's, or (`None`) several ones', or of one that is no more.
#[derive(Debug, Default)]
pub(super) struct Lost(BTreeMap<InodeId, Option<Process>>);

impl Lost {
    fn note(&mut self, process: Option<Process>, ino: InodeId) {
        if ino != InodeId::NONE {
            let by = self.0.entry(ino).or_insert(process);
            *by = by.filter(|one| Some(*one) == process);
        }
    }

    /// Whether somebody else than the process has lost something of the inode.
    pub(super) fn beside(&self, process: Process, ino: InodeId) -> bool {
        self.0.get(&ino).is_some_and(|by| *by != Some(process))
    }
}

impl Node {
    /// Notes with what processes here have open what others of them lose of it: what nobody has judged yet, and if this node has lost its
    /// `place`, what not every member is known to have. Their sessions are sealed, so nothing is added any more that would count.
    pub(super) fn note_losses(&mut self, place: bool) -> Result<(), Failure> {
        let mut lost = Lost::default();
        for client in self.agent.clients.values() {
            for ino in client.unjudged()? {
                lost.note(Some((client.pid, client.start_time)), ino);
            }
        }
        if place {
            self.note_unreplicated(&mut lost);
        }
        if lost.0.is_empty() || planted(Bug::LossBesideUntold) {
            return Ok(());
        }
        for client in self.agent.clients.values_mut() {
            let process = (client.pid, client.start_time);
            client.mark_lost(|ino| lost.beside(process, ino))?;
        }
        for past in &mut self.agent.past {
            past.mark_lost(&lost)?;
        }
        Ok(())
    }

    /// What was judged lies in the ring until all are known to have it; and what others' clients did of that, clients here may have seen.
    fn note_unreplicated(&self, lost: &mut Lost) {
        let acked = self.member.all_acked;
        let unsure = self.agent.seen_early.iter().filter(|(_, upto)| **upto > acked);
        if !planted(Bug::SeenUntold) {
            unsure.for_each(|(ino, _)| lost.note(None, *ino));
        }
        let from = (self.member.all_acked.0 + 1).max(self.ring.oldest().0);
        for seq in (from..=self.ring.last().0).map(StreamSeq) {
            let Some(kept) = self.ring.get(seq).copied() else { continue };
            let id = kept.header.client;
            let process = match self.agent.clients.get(&id) {
                Some(c) if kept.header.last_seq > c.told_replicated() => {
                    Some((c.pid, c.start_time))
                }
                None if self.agent.ended.contains_key(&id) => None,
                _ => continue,
            };
            // A damaged chunk is no reason to fail for who goes anyway.
            let Ok(chunk) = self.chunk_in_ring(seq, &kept) else { continue };
            for (.., op) in chunk.entries() {
                op.facts().touches().for_each(|ino| lost.note(process, ino));
            }
        }
    }

    /// A client is shown a file as the stream has it up to there, which not all may have.
    pub(super) fn note_seen_early(&mut self, ino: InodeId, upto: StreamSeq) {
        let acked = self.member.all_acked;
        let seen = &mut self.agent.seen_early;
        seen.retain(|_, upto| *upto > acked);
        if upto > acked {
            let known = seen.entry(ino).or_default();
            *known = upto.max(*known);
        }
    }

    /// A client is forgotten, whose log is published here, which a head does before all have it: until then what it did may be lost.
    pub(super) fn remember_unreplicated(&mut self, client: &Client) {
        let acked = self.member.all_acked;
        self.agent.ended.retain(|_, upto| *upto > acked);
        if client.told_replicated().0 < client.next().0 - 1 && !planted(Bug::LossOfGone) {
            self.agent.ended.insert(client.id, self.ring.last());
        }
    }
}
