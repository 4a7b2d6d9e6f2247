//! After a restart: the logs of the clients of an earlier run.
//!
//! What a client appended is durable when its entry is (DESIGN, rule 1), so a node that starts again
//! takes up every log by the client table, with the leases that its owner held, and then judges what
//! lies behind the stream exactly as it would have done without the restart.
//!
//! # In which order
//!
//! The stream ring is replayed first: what is in it was ordered before anything that still waits in
//! a log. The logs follow in any order. A lease is passed on only after everything appended under it
//! is in the stream, and the table crosses it out only then; so of the entries that wait, no two of
//! different clients touch the same inode, and entries about different inodes commute. (An operation
//! that made use of another client's result needed a lease on an inode of that result, which put the
//! other operation into the stream first.) Within a log the sequence orders.
//!
//! # When nothing is taken up
//!
//! A node keeps its logs as long as it keeps its place in the chain. Whoever is told to join anew
//! had lost it: others went on without it, from what every member had, and may have granted its
//! clients' leases to others. Then the logs are dropped; what every member had is what is kept. A
//! place is given back without joining only when no other process of the chain lived on either, so
//! nobody can have served in between. After a reboot, logs count in `pmem` mode only.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::ClientId;
use storage::format::control::{self, LeaseMode};
use storage::media::Segment;

use super::client::Client;
use super::table::Found;
use super::{Failure, Node};

impl Node {
    /// Takes note of the chunk replayed last: how far its client is, or that it ended.
    pub(super) fn note_replayed(&mut self, ended: &mut BTreeSet<ClientId>) {
        let Some(header) = self.ring.get(self.applied).map(|k| k.header) else { return };
        if header.is_farewell() {
            self.settled.remove(&header.client);
            ended.insert(header.client);
        } else if header.client.0 != 0 {
            let settled = self.settled.entry(header.client).or_default();
            *settled = (*settled).max(header.last_seq);
        }
    }

    /// Makes clients of the rows of an earlier run. `ended` are known to need nothing more.
    pub(super) fn take_up(
        &mut self,
        found: Vec<Found>,
        ended: &BTreeSet<ClientId>,
    ) -> Result<(), Failure> {
        let mut dropped = Vec::new();
        for row in found {
            let id = row.client();
            let log = Segment::Log(row.record.segment);
            let size = control::LANES + u64::from(row.record.lanes) * row.record.lane_bytes;
            let whole = self.media.size(log).is_ok_and(|s| s >= size);
            if ended.contains(&id) || id.node() != self.me() || !whole {
                dropped.push(row);
                continue;
            }
            let published = self.volume.published(id)?;
            let settled = self.settled.get(&id).copied().unwrap_or(published);
            let media = Arc::clone(&self.media);
            let (arena, starts) = (self.arena_bytes(), self.table.starts());
            let upto = (settled, published);
            let mut client = match Client::take_up(media, row, arena, upto, starts, self.now) {
                Ok(client) => client,
                Err(e) => {
                    // A client that made its log shorter harms itself alone.
                    log::warn!("the log of client {:#x} cannot be taken up: {e}", id.0);
                    continue;
                }
            };
            client.gone |= self.table.rebooted;
            self.pin_unmade(&mut client)?;
            log::info!(
                "took up the log of client {:#x} (pid {}{}), settled {}",
                id.0,
                client.pid,
                if client.gone { ", ended" } else { "" },
                client.settled
            );
            self.active.insert(id);
            self.clients.insert(id, client);
        }
        self.taken_up = !self.clients.is_empty();
        self.drop_logs(dropped)
    }

    /// A number that is leased for writing and leads to nothing is unused, as far as this node can know: its
    /// Create may lie in the log beside an Unlink that had taken the pin away already. The head takes
    /// pinned ones for fresh.
    fn pin_unmade(&self, client: &mut Client) -> Result<(), Failure> {
        for (ino, mode) in client.leases() {
            if mode == LeaseMode::Write && self.volume.attr(ino)?.is_none() {
                client.pin(ino, false)?;
            }
        }
        Ok(())
    }

    /// Removes rows, and the logs that no client has.
    pub(super) fn drop_logs(&mut self, rows: Vec<Found>) -> Result<(), Failure> {
        for found in rows {
            self.table.remove(found.row)?;
        }
        let kept: BTreeSet<u32> = self.clients.values().map(|c| c.segment).collect();
        for segment in self.media.segments()? {
            let Segment::Log(number) = segment else { continue };
            self.next_segment = self.next_segment.max(number.saturating_add(1));
            if !kept.contains(&number) {
                self.drop_log(segment);
                self.media.remove(segment)?;
            }
        }
        Ok(())
    }

    /// Whoever still has the log mapped learns that it counts no more.
    fn drop_log(&self, segment: Segment) {
        // A client can make its log shorter than its control area; then it learns nothing.
        let _ = self.media.store64(segment, control::SEALED_AT, 0);
        let _ = self.media.store64(segment, control::STATE, control::STATE_GONE);
        let _ = self.media.wake(segment, control::EVENT);
    }
}
