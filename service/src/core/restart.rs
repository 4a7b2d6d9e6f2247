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
//! # Inode numbers
//!
//! A number is used once. One that is leased for writing and leads to nothing may be one that its client has
//! not used yet, or one that it made something with and removed again. The client table tells: a lease
//! is marked when its number is handed out, and the mark goes after the chunk that makes something with it
//! is durable in the ring and before this chunk is published. So a number that is marked was used only if a
//! chunk that is replayed used it.
//!
//! # When nothing is taken up
//!
//! A node keeps its logs as long as it keeps its place in the chain. Whoever is told to join anew
//! had lost it: others went on without it, from what every member had, and may have granted its
//! clients' leases to others. Then the logs are dropped; what every member had is what is kept. A
//! place is given back without joining only when no other process of the chain lived on either, so
//! nobody can have served in between. After a reboot, logs count in `pmem` mode only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{ClientId, InodeId, Sequence};
use storage::format::control;
use storage::media::Segment;

use super::client::{Client, LogFile};
use super::table::Found;
use super::{Failure, Node, entries};

/// What the chunks say that were replayed.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// Clients that need nothing more.
    ended: BTreeSet<ClientId>,
    /// Numbers that something was made with.
    made: BTreeSet<InodeId>,
    /// Of each client how many operations were refused, the last of them, and why.
    refused: BTreeMap<ClientId, (u32, Sequence, u16)>,
    /// Of each client the last operation under a joint lease that was not taken, and why.
    untaken: BTreeMap<ClientId, (Sequence, u16)>,
}

impl Node {
    /// Takes note of the chunk replayed last: how far its client is, or that it ended; and what it made.
    pub(super) fn note_replayed(&mut self, replayed: &mut Replayed) -> Result<(), Failure> {
        let Some(kept) = self.ring.get(self.member.applied).copied() else { return Ok(()) };
        let header = kept.header;
        for (_, _, op) in entries(&self.ring.body(&kept)?, header.incarnation).flatten() {
            replayed.made.extend(op.facts().makes);
        }
        if header.is_farewell() {
            self.member.settled.remove(&header.client);
            replayed.ended.insert(header.client);
        } else if header.client.0 != 0 {
            let settled = self.member.settled.entry(header.client).or_default();
            *settled = (*settled).max(header.last_seq);
        }
        if header.refusals > 0 {
            let (count, last, errno) = replayed.refused.entry(header.client).or_default();
            *count = count.saturating_add(header.refusals);
            (*last, *errno) = (header.refused, super::cause(*errno, header.errno));
        } else if header.refused.0 > 0 {
            replayed.untaken.insert(header.client, (header.refused, header.errno));
        }
        Ok(())
    }

    /// Makes clients of the rows of an earlier run.
    pub(super) fn take_up(
        &mut self,
        found: Vec<Found>,
        replayed: &Replayed,
    ) -> Result<(), Failure> {
        let mut dropped = Vec::new();
        for row in found {
            let id = row.client();
            let log = Segment::Log(row.record.segment);
            let size = control::LANES + u64::from(row.record.lanes) * row.record.lane_bytes;
            let whole = self.env.media.size(log).is_ok_and(|s| s >= size);
            let over = row.row.progress().over || replayed.ended.contains(&id);
            if over || id.node() != self.me() || !whole {
                let sealed = row.row.progress().sealed.is_some();
                if sealed && id.node() == self.me() && !self.agent.table.rebooted {
                    // Its log was done with; its process may live.
                    self.take_past(row);
                } else {
                    dropped.push(row);
                }
                continue;
            }
            let published = self.volume.published(id)?;
            let settled = self.member.settled.get(&id).copied().unwrap_or(published);
            let media = Arc::clone(&self.env.media);
            let (arena, starts) = (self.arena_bytes(), self.agent.table.starts());
            let upto = (settled, published);
            let mut client = match Client::take_up(media, row, arena, upto, starts, self.env.now) {
                Ok(client) => client,
                Err(e) => {
                    // A client that made its log shorter harms itself alone.
                    log::warn!("the log of client {:#x} cannot be taken up: {e}", id.0);
                    continue;
                }
            };
            if self.agent.table.rebooted {
                client.gone = true;
                client.disinherit();
            }
            self.sort_numbers(&mut client, &replayed.made)?;
            if let Some((count, last, errno)) = replayed.refused.get(&id) {
                client.refuse(*count, *last, *errno);
            }
            if let Some((last, errno)) = replayed.untaken.get(&id) {
                client.untaken(*last, *errno);
            }
            log::info!(
                "took up the log of client {:#x} (pid {}{}), settled {}",
                id.0,
                client.pid,
                if client.gone { ", ended" } else { "" },
                client.settled
            );
            self.agent.active.insert(id);
            self.agent.clients.insert(id, client);
            self.agent.locking.take_up(id);
            self.return_soles_of_before(id);
        }
        self.agent.taken_up = !self.agent.clients.is_empty();
        self.drop_logs(dropped)
    }

    /// Tells numbers that the client may still use from those that it has used. The head takes for fresh what
    /// is pinned, leased for writing, and leads to nothing.
    fn sort_numbers(&self, client: &mut Client, made: &BTreeSet<InodeId>) -> Result<(), Failure> {
        for ino in client.unmade().clone() {
            if made.contains(&ino) || self.volume.attr(ino)?.is_some() {
                client.note_made(ino, self.ring.last());
            } else if !client.has_pin(ino) {
                // Its Create may lie in the log beside an Unlink that had taken the pin away already.
                client.pin(ino, 0)?;
            }
        }
        for ino in client.pins() {
            // The Unlink is in a chunk that was replayed before there was a client.
            if !client.unmade().contains(&ino) && self.volume.attr(ino)?.is_none() {
                client.unpin(ino)?;
            }
        }
        Ok(())
    }

    /// Removes rows, and the logs that no client has.
    pub(super) fn drop_logs(&mut self, rows: Vec<Found>) -> Result<(), Failure> {
        let mut logs = BTreeMap::new();
        for found in rows {
            let log = LogFile::of_record(&found.record);
            logs.insert(log.segment, log);
            self.agent.table.remove(found.row)?;
        }
        let kept: BTreeSet<u32> = self.agent.clients.values().map(|c| c.segment).collect();
        for segment in self.env.media.segments()? {
            let Segment::Log(number) = segment else { continue };
            self.agent.next_segment = self.agent.next_segment.max(number.saturating_add(1));
            if !kept.contains(&number) {
                self.drop_log(segment);
                let log = match logs.get(&segment) {
                    Some(log) => *log,
                    None => LogFile::of_nobody(segment, self.env.media.size(segment)?),
                };
                self.leave_log(log)?;
            }
        }
        Ok(())
    }

    /// Whoever still has the log mapped learns that it counts no more.
    fn drop_log(&self, segment: Segment) {
        // A client can make its log shorter than its control area; then it learns nothing.
        let _ = self.env.media.store64(segment, control::SEALED_AT, 0);
        let _ = self.env.media.store64(segment, control::STATE, control::STATE_GONE);
        let _ = self.env.media.wake(segment, control::EVENT);
    }
}
