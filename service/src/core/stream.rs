//! The replication stream as every member sees it: accept, pass on, acknowledge, apply, publish.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, NodeId, Sequence, StreamSeq};
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};
use storage::media::Segment;
use storage::volume::{CopyItem, Refusal, Sealed, Volume, run_copies};

use super::client::Client;
use super::message::{CHUNK, CHUNK_PREFIX, Message, chunk_frame, set_chunk_prefix};
use super::{Effect, Failure, Node, entries};

/// A batch of applied chunks is published after this time at the latest.
const PUBLISH_AFTER: Nanos = 5_000_000;
/// hostd, which needs milliseconds, is helped to the processor when it has not answered for so long.
const HELP_AFTER: Nanos = 30_000_000;
/// hostd must answer within this time, or the node copies for itself.
const HOST_TIMEOUT: Nanos = 500_000_000;
/// A member that has not acknowledged for this long although it should have is reported.
const SUSPECT_AFTER: Nanos = 600_000_000;
/// A look at that counts for no more: a head that gets too little of the processor has not waited, it has slept, and the
/// acknowledgements may lie before its door.
const WATCH_STEP: Nanos = 150_000_000;

/// A sealed transaction on its way to the media.
#[derive(Debug)]
pub(super) struct Job {
    sealed: Sealed,
    upto: StreamSeq,
    clients: Vec<(ClientId, Sequence)>,
    next_copy: usize,
    /// hostd runs the copies: job number and when it was asked.
    host: Option<(u64, Nanos)>,
    /// It was helped.
    helped: bool,
}

fn copy_len(item: &CopyItem) -> u64 {
    match *item {
        CopyItem::Copy { len, .. } | CopyItem::Zero { len, .. } => len,
    }
}

impl Node {
    /// The member after this one.
    pub(super) fn successor(&self) -> Option<NodeId> {
        let at = self.chain.iter().position(|n| *n == self.me())?;
        self.chain.get(at + 1).copied()
    }

    /// The member before this one.
    pub(super) fn predecessor(&self) -> Option<NodeId> {
        let at = self.chain.iter().position(|n| *n == self.me())?;
        at.checked_sub(1).map(|i| self.chain[i])
    }

    /// A chunk came down the chain.
    pub(super) fn chunk_arrived(
        &mut self,
        from: NodeId,
        all_acked: StreamSeq,
        frame: Vec<u8>,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let chunk = &frame[CHUNK_PREFIX..];
        let header = match ChunkHeader::decode(chunk) {
            Ok(h) if chunk.len() == CHUNK_HEADER_BYTES + h.body_bytes as usize => h,
            _ => {
                self.counters.bad_messages += 1;
                log::warn!("a chunk of node {from} is damaged; asking for it again");
                self.want_stream(out);
                return Ok(());
            }
        };
        if self.incoming.is_some() {
            // The snapshot comes first; what is missing afterwards is asked for.
            return Ok(());
        }
        let expected = StreamSeq(self.ring.last().0 + 1);
        if header.stream_seq < expected {
            self.acknowledge(out);
            return Ok(());
        }
        if header.stream_seq > expected {
            if planted(Bug::GapAcknowledged) {
                let seq = header.stream_seq;
                self.to_head(Message::ChunkAck { seq }, out);
            }
            if self.stash.len() < self.config.limits.stash {
                self.stash.insert(header.stream_seq, frame);
            }
            return Ok(());
        }
        let mut next_frame = Some((header, frame));
        while let Some((header, frame)) = next_frame.take() {
            if !self.accept(header, frame, all_acked, out)? {
                self.counters.bad_messages += 1;
                self.want_stream(out);
                break;
            }
            let next = StreamSeq(self.ring.last().0 + 1);
            self.stash.retain(|seq, _| *seq >= next);
            if let Some(frame) = self.stash.remove(&next) {
                let header = ChunkHeader::decode(&frame[CHUNK_PREFIX..]).ok();
                next_frame = header.map(|h| (h, frame));
            }
        }
        self.all_acked = self.all_acked.max(all_acked.min(self.ring.last()));
        if self.is_head() && !self.ready {
            self.take_over_step(out)?;
        }
        Ok(())
    }

    /// Passes a chunk on, keeps it, acknowledges it.
    fn accept(
        &mut self,
        header: ChunkHeader,
        frame: Vec<u8>,
        all_acked: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<bool, Failure> {
        let body = &frame[CHUNK_PREFIX + CHUNK_HEADER_BYTES..];
        let mut count = 0;
        for entry in entries(body, header.incarnation) {
            if entry.is_err() && !planted(Bug::DamageIgnored) {
                return Ok(false);
            }
            count += 1;
        }
        if count != header.entries && !planted(Bug::DamageIgnored) {
            return Ok(false);
        }
        self.make_room(body.len())?;
        if !self.ring.put(header, body, body.len())? {
            return Ok(false);
        }
        self.note_chunk(&header)?;
        self.acknowledge(out);
        if let Some(next) = self.successor() {
            self.send_frame(next, frame, all_acked, out);
        }
        Ok(true)
    }

    /// Sends a Chunk message that lies in `frame` from its chunk on.
    pub(super) fn send_frame(
        &self,
        to: NodeId,
        mut frame: Vec<u8>,
        all_acked: StreamSeq,
        out: &mut Vec<Effect>,
    ) {
        set_chunk_prefix(&mut frame, self.epoch, all_acked);
        let class = super::class_of(frame.len());
        out.push(Effect::Send { to, class, kind: CHUNK, body: frame });
    }

    /// Bookkeeping for a chunk that is in the ring.
    pub(super) fn note_chunk(&mut self, header: &ChunkHeader) -> Result<(), Failure> {
        self.counters.chunks += 1;
        self.counters.entries += u64::from(header.entries);
        self.counters.entry_bytes += u64::from(header.body_bytes);
        self.batch_since.get_or_insert(self.now);
        if header.is_farewell() {
            self.settled.remove(&header.client);
            if let Some(client) = self.clients.get_mut(&header.client) {
                // All of it is in the stream: it must not be taken up again.
                client.end_log()?;
            }
            return Ok(());
        }
        if header.client.0 != 0 {
            let settled = self.settled.entry(header.client).or_default();
            *settled = (*settled).max(header.last_seq);
            if let Some(client) = self.clients.get_mut(&header.client) {
                if header.refusals > 0 && !planted(Bug::RefusalUntold) {
                    client.refuse(header.refusals, header.refused, header.errno);
                }
                client.set_settled(header.last_seq)?;
            }
        }
        Ok(())
    }

    /// Room in the ring for a chunk with `body` bytes, by publishing now if need be.
    pub(super) fn make_room(&mut self, body: usize) -> Result<(), Failure> {
        if self.ring.next_body(body).is_none() {
            self.publish_all()?;
            // A member keeps what others may lack; under pressure only what it has not published.
            let keep = if self.is_head() { self.all_acked } else { self.published };
            self.ring.release(self.published.min(keep))?;
        }
        Ok(())
    }

    pub(super) fn acknowledge(&mut self, out: &mut Vec<Effect>) {
        let seq = self.ring.last();
        let message = Message::ChunkAck { seq };
        if let Some(&head) = self.chain.first()
            && head != self.me()
        {
            self.send(head, &message, out);
        }
    }

    /// Asks the predecessor for what is missing.
    pub(super) fn want_stream(&mut self, out: &mut Vec<Effect>) {
        let source = match self.role() {
            super::Role::Syncing => self.chain.first().copied(),
            _ => self.predecessor(),
        };
        if let Some(source) = source {
            let from = StreamSeq(self.ring.last().0 + 1);
            self.send(source, &Message::StreamWant { from }, out);
        }
    }

    /// Sends what the ring holds from `from` on. Says whether it could.
    pub(super) fn send_stream(
        &mut self,
        to: NodeId,
        from: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<bool, Failure> {
        let mut seq = from;
        while seq <= self.ring.last() && seq.0 - from.0 < self.config.limits.resend {
            let Some(kept) = self.ring.get(seq).copied() else {
                log::warn!("node {to} wants chunk {seq}, which is no longer kept");
                return Ok(false);
            };
            let body = self.ring.body(&kept)?;
            let mut frame = chunk_frame(CHUNK_HEADER_BYTES + body.len());
            frame.extend_from_slice(&kept.header.encode());
            frame.extend_from_slice(&body);
            self.send_frame(to, frame, self.all_acked, out);
            seq.0 += 1;
        }
        Ok(true)
    }

    /// A member that does not acknowledge although it should is reported to the coordinator.
    pub(super) fn watch_acks(&mut self, out: &mut Vec<Effect>) {
        let waited = self.now.saturating_sub(self.watched_at).min(WATCH_STEP);
        self.watched_at = self.now;
        if !self.is_head() || self.all_acked >= self.ring.last() {
            self.acks_missing = 0;
            return;
        }
        self.acks_missing += waited;
        if self.acks_missing > SUSPECT_AFTER {
            let behind = |n: &&NodeId| **n != self.me() && self.acked_by(**n) <= self.all_acked;
            if let Some(node) = self.chain.iter().chain(&self.followers).find(behind) {
                out.push(Effect::Suspect(*node));
            }
            self.acks_missing = 0;
        }
    }

    pub(super) fn acked_by(&self, node: NodeId) -> StreamSeq {
        self.acked.get(&node).copied().unwrap_or(StreamSeq(0))
    }

    /// Applies the next chunk of the ring to the working state (not at the head, which applies
    /// while it validates).
    pub(super) fn apply_next(&mut self) -> Result<(), Failure> {
        let seq = StreamSeq(self.applied.0 + 1);
        let read = self.volume.has_read() && !planted(Bug::ChunkPartlyPublished);
        if read && self.published < self.applied {
            // Whatever overwrites the blocks has to wait for the publication of what reads them.
            self.publish_all()?;
        }
        if self.apply_chunk(seq, false)? {
            return Ok(());
        }
        // Not in the middle of the chunk: it is applied again after a crash, and would meet what
        // it did itself (a name that has moved on since). What came before it is published.
        self.take_back()?;
        self.publish_all()?;
        if self.apply_chunk(seq, false)? {
            return Ok(());
        }
        // The head had room for this chunk when everything before it was published. If here is
        // less, a crash in the next moment may cost a rejoin; not going on costs one now.
        self.take_back()?;
        self.apply_chunk(seq, true).map(drop)
    }

    /// Applies a chunk. `false`: some of it is applied, and the rest waits for a publication
    /// (which is done at once when `partly`).
    fn apply_chunk(&mut self, seq: StreamSeq, partly: bool) -> Result<bool, Failure> {
        let Some(kept) = self.ring.get(seq).copied() else {
            return Err(Failure::Diverged(seq, "it is not in the ring".into()));
        };
        let body = self.ring.body(&kept)?;
        let (segment, base) = self.ring.body_at(&kept);
        for (at, entry) in entries(&body, kept.header.incarnation).enumerate() {
            let (offset, header, op) = entry.map_err(|e| Failure::Diverged(seq, e.to_string()))?;
            if planted(Bug::EntrySkipped) && at > 0 && at as u32 + 1 == kept.header.entries {
                continue;
            }
            let source = (segment, base + offset as u64 + 64);
            let mut applied = self.volume.apply(&header, &op, source);
            if matches!(applied, Err(Refusal::NeedsPublish)) {
                if !partly && !planted(Bug::ChunkPartlyPublished) {
                    return Ok(false);
                }
                // Everything before this chunk; its own copies lie in the ring already.
                self.publish_working(StreamSeq(seq.0 - 1))?;
                applied = self.volume.apply(&header, &op, source);
            }
            match applied {
                Ok(_) => {
                    self.mark_dirty(&op, seq, kept.header.client);
                    self.note_done(kept.header.client, &op)?;
                }
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(refusal) => return Err(Failure::Diverged(seq, refusal.to_string())),
            }
        }
        self.applied_chunk(&kept.header);
        Ok(true)
    }

    /// Takes the working state back to the end of the last chunk that is applied whole.
    fn take_back(&mut self) -> Result<(), Failure> {
        self.settle_job()?;
        let upto = std::mem::replace(&mut self.applied, self.published);
        // Their views are of a volume that nobody asks any more for their pages.
        self.snapshots.clear();
        self.volume = Volume::open(Arc::clone(&self.media))?;
        while self.applied < upto {
            self.apply_chunk(StreamSeq(self.applied.0 + 1), true)?;
        }
        Ok(())
    }

    /// A chunk's operations are in the working state.
    pub(super) fn applied_chunk(&mut self, header: &ChunkHeader) {
        self.applied = header.stream_seq;
        if header.client.0 != 0 {
            self.batch.insert(header.client, header.last_seq);
            if let Some(client) = self.clients.get_mut(&header.client) {
                client.applied = client.applied.max(header.last_seq);
            }
        }
        self.batch_bytes += u64::from(header.body_bytes);
        self.batch_since.get_or_insert(self.now);
    }

    /// Whether the applied chunks should be published now.
    fn publish_due(&self) -> bool {
        if self.applied == self.published {
            return false;
        }
        let waited = self.batch_since.is_some_and(|t| self.now >= t + PUBLISH_AFTER);
        self.publish_now
            || waited
            || self.batch_bytes >= self.config.limits.publish_bytes
            || self.volume.wants_publish()
            || !self.ring.has_room()
    }

    /// Whether the next slice begins to publish.
    pub(super) fn publishes_at_once(&self) -> bool {
        self.job.is_none() && self.publish_due()
    }

    /// When there is something to publish, if nothing comes before.
    pub(super) fn publish_deadline(&self) -> Option<Nanos> {
        match &self.job {
            // Looking earlier would find the same: hostd copies.
            Some(job) => job
                .host
                .map(|(_, asked)| asked + if job.helped { HOST_TIMEOUT } else { HELP_AFTER }),
            None => self.batch_since.map(|t| t + PUBLISH_AFTER),
        }
    }

    fn seal(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        let clients: Vec<(ClientId, Sequence)> =
            std::mem::take(&mut self.batch).into_iter().collect();
        let sealed = self.volume.seal(upto, self.epoch, &clients)?;
        (self.batch_bytes, self.batch_since, self.publish_now) = (0, None, false);
        self.job = Some(Job { sealed, upto, clients, next_copy: 0, host: None, helped: false });
        Ok(())
    }

    /// One step of publishing; `true` when there is more to do at once.
    pub(super) fn publish_step(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        if self.job.is_none() {
            if !self.publish_due() {
                return Ok(false);
            }
            self.seal(self.applied)?;
            self.ask_host(out);
        }
        let Some(job) = &mut self.job else { return Ok(false) };
        if let Some((id, asked)) = job.host {
            if self.now >= asked + HELP_AFTER && !job.helped {
                job.helped = true;
                self.host.iter().for_each(|host| host.help(id));
            }
            if self.now < asked + HOST_TIMEOUT {
                return Ok(false);
            }
            // Isolated mode: hostd does not answer.
            self.settle_job()?;
            return Ok(self.publish_due());
        }
        let mut bytes = 0;
        let first = job.next_copy;
        while job.next_copy < job.sealed.copies.len() && bytes < self.config.limits.slice_bytes {
            bytes += copy_len(&job.sealed.copies[job.next_copy]);
            job.next_copy += 1;
        }
        run_copies(&*self.media, &job.sealed.copies[first..job.next_copy])?;
        self.counters.copied_bytes += bytes;
        if job.next_copy < job.sealed.copies.len() {
            return Ok(true);
        }
        self.finish_job()?;
        Ok(self.publish_due())
    }

    fn ask_host(&mut self, out: &mut Vec<Effect>) {
        let Some(job) = &mut self.job else { return };
        let total: u64 = job.sealed.copies.iter().map(copy_len).sum();
        if self.host.is_none() || total < self.config.limits.host_min {
            self.counters.isolated_copies += 1;
            return;
        }
        self.counters.host_copies += 1;
        self.next_job += 1;
        job.host = Some((self.next_job, self.now));
        out.push(Effect::Copies { id: self.next_job, items: job.sealed.copies.clone() });
    }

    /// hostd ran the copies.
    pub(super) fn copies_done(&mut self, id: u64, bad: &[u32]) -> Result<(), Failure> {
        let Some(job) = &mut self.job else { return Ok(()) };
        if job.host.is_none_or(|(asked, _)| asked != id) {
            return Ok(());
        }
        job.host = None;
        job.next_copy = job.sealed.copies.len();
        self.counters.copied_bytes += job.sealed.copies.iter().map(copy_len).sum::<u64>();
        if let Some(&first) = bad.iter().min()
            && !planted(Bug::BadCopiesIgnored)
        {
            // The order of copies counts: everything from the first bad one on is done again.
            let from = (first as usize).min(job.sealed.copies.len());
            run_copies(&*self.media, &job.sealed.copies[from..])?;
        }
        self.finish_job()
    }

    pub(super) fn host_down(&mut self) {
        self.host = None;
        if let Some(job) = &mut self.job {
            job.host = None;
        }
    }

    /// Ends hostd's part of the job under way, now: it must not copy beside this node, nor after
    /// it, when what it reads and writes is something else. Says whether all its copies are done.
    fn end_host_copies(&mut self) -> Result<bool, Failure> {
        let Some((id, _)) = self.job.as_mut().and_then(|job| job.host.take()) else {
            return Ok(false);
        };
        let Some(host) = self.host.clone().filter(|_| !planted(Bug::LateCopies)) else {
            return Ok(false);
        };
        self.counters.settled_copies += 1;
        host.settle(id).map_err(Failure::Host)
    }

    /// Publishes the job under way, if there is one, at once.
    fn settle_job(&mut self) -> Result<(), Failure> {
        let done = self.end_host_copies()?;
        let Some(job) = &self.job else { return Ok(()) };
        if !done {
            run_copies(&*self.media, &job.sealed.copies)?;
        }
        self.finish_job()
    }

    /// Forgets the job under way: the volume it belongs to goes.
    pub(super) fn drop_job(&mut self) -> Result<(), Failure> {
        self.end_host_copies()?;
        self.job = None;
        Ok(())
    }

    fn finish_job(&mut self) -> Result<(), Failure> {
        let Some(job) = self.job.take() else { return Ok(()) };
        if !planted(Bug::NumberAgain) {
            self.clients.values_mut().try_for_each(Client::write_made)?;
        }
        let freed = self.volume.publish(job.sealed)?;
        self.counters.publishes += 1;
        self.published = job.upto;
        for (id, seq) in job.clients {
            if let Some(client) = self.clients.get_mut(&id) {
                // The chunk that makes everybody forget a client (sequence 0) comes after all that
                // it wrote, which may be in the same batch.
                client.set_published(if seq.0 == 0 { client.settled } else { seq })?;
            }
        }
        for blocks in freed {
            let bytes = blocks.len * storage::limits::BLOCK_BYTES;
            if bytes >= self.config.limits.discard_min {
                let at = blocks.block * storage::limits::BLOCK_BYTES;
                self.media.discard(Segment::Arena(blocks.arena), at, bytes)?;
            }
        }
        self.give_up()?;
        self.remove_finished_clients()
    }

    /// Chunks that nobody needs any more leave the ring; their inodes are clean.
    pub(super) fn give_up(&mut self) -> Result<(), Failure> {
        let hold = self.snapshots.values().map(|s| StreamSeq(s.seq.0)).min();
        let mut done = self.published.min(self.all_acked);
        let mut step = self.config.limits.release_step;
        if planted(Bug::PublishedTooFar) {
            (done, step) = (self.all_acked, 1);
        }
        self.dirty.retain(|_, at| at.0 > done);
        let keep = hold.map_or(done, |h| h.min(done));
        // In larger steps: each costs a persisted record.
        if keep.0 >= self.ring.oldest().0 + step || !self.ring.has_room() {
            self.ring.release(keep)?;
        }
        Ok(())
    }

    /// Publishes everything that is applied, at once.
    pub(super) fn publish_all(&mut self) -> Result<(), Failure> {
        self.publish_through(self.applied)
    }

    fn publish_through(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        loop {
            self.settle_job()?;
            if self.published >= upto {
                return Ok(());
            }
            self.seal(upto)?;
        }
    }

    /// Publishes the working state as that of `upto`, also if it holds a part of the next chunk.
    pub(super) fn publish_working(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        self.publish_through(upto)?;
        self.seal(upto)?;
        self.settle_job()
    }

    /// Settled sequences of the clients whose operations are in the stream.
    pub(super) fn settled_of(&mut self, client: ClientId) -> Sequence {
        let volume = &self.volume;
        let known: &mut BTreeMap<ClientId, Sequence> = &mut self.settled;
        *known.entry(client).or_insert_with(|| volume.published(client).unwrap_or_default())
    }
}
