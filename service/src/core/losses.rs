//! What is lost when a node loses its place, and who of its other processes must hear of it.
//!
//! The others go on from what every member had; what clients of this node did and not all had is lost. Each client knows that of what it
//! did itself (`REPLICATED`, `SEALED_AT`). But a program may sync what another one of its machine has written, as the checkpointer of a
//! database does, and must not take for durable what went with the other's log: whoever has an inode open that something of
//! somebody else's was lost of is told once, as Linux tells everybody who has a file open that could not be written back.
//!
//! It is noted in the pins of the sessions that end so (`PIN_LOST`), also of those that had ended before ([`past`](super::past)), and told
//! when the process says what it still has open (`Keep`).

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, StreamSeq};

use super::{Failure, Node};

/// Inodes of which something was lost, and whose: one client's, or (`None`) several ones'.
#[derive(Debug, Default)]
pub(super) struct Lost(BTreeMap<InodeId, Option<ClientId>>);

impl Lost {
    fn note(&mut self, client: ClientId, ino: InodeId) {
        if ino != InodeId::NONE {
            let by = self.0.entry(ino).or_insert(Some(client));
            *by = by.filter(|one| *one == client);
        }
    }

    /// Whether somebody else than the client has lost something of the inode.
    pub(super) fn beside(&self, client: ClientId, ino: InodeId) -> bool {
        self.0.get(&ino).is_some_and(|by| *by != Some(client))
    }
}

impl Node {
    /// This node has lost its place: notes with what its processes have open what others of them have lost of it. Before their
    /// sessions end.
    pub(super) fn note_losses(&mut self) -> Result<(), Failure> {
        let lost = self.lost_here()?;
        if lost.0.is_empty() || planted(Bug::LossBesideUntold) {
            return Ok(());
        }
        for client in self.agent.clients.values_mut() {
            let id = client.id;
            client.mark_lost(|ino| lost.beside(id, ino))?;
        }
        for past in &mut self.agent.past {
            past.mark_lost(&lost)?;
        }
        Ok(())
    }

    /// What clients of this node did that not every member is known to have: in its ring, or still in their logs.
    fn lost_here(&self) -> Result<Lost, Failure> {
        let mut lost = Lost::default();
        for client in self.agent.clients.values() {
            for ino in client.unreplicated()? {
                lost.note(client.id, ino);
            }
        }
        // What a head publishes early is no longer in the logs.
        let from = (self.member.all_acked.0 + 1).max(self.ring.oldest().0);
        for seq in (from..=self.ring.last().0).map(StreamSeq) {
            let Some(kept) = self.ring.get(seq).copied() else { continue };
            let id = kept.header.client;
            let whose = self.agent.clients.get(&id);
            if whose.is_none_or(|client| kept.header.last_seq <= client.told_replicated()) {
                continue;
            }
            for (.., op) in self.chunk_in_ring(seq, &kept)?.entries() {
                op.facts().touches().for_each(|ino| lost.note(id, ino));
            }
        }
        Ok(lost)
    }
}
