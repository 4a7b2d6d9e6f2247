//! The replication stream as every member sees it: accept, pass on, acknowledge, apply.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, NodeId, Sequence, StreamSeq};
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};
use storage::volume::{Refusal, Volume};

use super::frame::{Body, Checked, Frame};
use super::message::{CHUNK, CHUNK_PREFIX, Message};
use super::{Effect, Failure, Node};

/// A member that has not acknowledged for this long although it should have is reported.
const SUSPECT_AFTER: Nanos = 600_000_000;
/// A look at that counts for no more: a head that gets too little of the processor has not waited, it has slept, and the
/// acknowledgements may lie before its door.
const WATCH_STEP: Nanos = 150_000_000;

/// Whether a chunk may wait for its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    /// It is applied before anything else is done.
    Never,
    /// What has to be published before it is published first, in as many turns as that takes.
    ForPublication,
}

/// How far a chunk was applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Applied {
    Whole,
    /// The entry at that place has to wait for a publication.
    UpTo(usize),
}

/// What is done where an entry of a chunk may have to wait for a publication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Care {
    /// It is found out before the first is applied, as far as that can be said.
    Beforehand,
    /// Those before it stay applied.
    Whole,
    /// What was applied of the chunk is published with what came before it.
    Partly,
}

/// Sends a Chunk message.
pub(super) fn send_chunk(to: NodeId, body: Body, out: &mut Vec<Effect>) {
    let class = super::class_of(body.len());
    out.push(Effect::Send { to, class, kind: CHUNK, body });
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
        if self.join.incoming.is_some() {
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
            if self.member.stash.len() < self.config.limits.stash {
                self.member.stash.insert(header.stream_seq, frame);
            } else {
                let seq = header.stream_seq;
                let (first, last) = self.member.dropped.unwrap_or((seq, seq));
                self.member.dropped = Some((first.min(seq), last.max(seq)));
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
            self.member.stash.retain(|seq, _| *seq >= next);
            if let Some(frame) = self.member.stash.remove(&next) {
                let header = ChunkHeader::decode(&frame[CHUNK_PREFIX..]).ok();
                next_frame = header.map(|h| (h, frame));
            }
        }
        self.want_dropped(out);
        self.catch_up(out);
        self.member.all_acked = self.member.all_acked.max(all_acked.min(self.ring.last()));
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
        let Some(frame) = Frame::received(frame) else { return Ok(false) };
        let whole = frame.len();
        let (checked, wrong) = Checked::of(frame, header.incarnation);
        let right = wrong.is_none() && checked.entries().count() == header.entries as usize;
        if !(right && checked.len() == whole || planted(Bug::DamageIgnored)) {
            return Ok(false);
        }
        self.make_room(checked.len())?;
        if !self.ring.put(header, checked.body(), checked.len())? {
            return Ok(false);
        }
        self.note_chunk(&header)?;
        self.acknowledge(out);
        let body = checked.into_chunk(&header, self.epoch, all_acked);
        self.member.recent.keep(header, &body, self.config.limits.recent_bytes);
        if let Some(next) = self.successor() {
            send_chunk(next, body, out);
        }
        Ok(true)
    }

    /// Bookkeeping for a chunk that is in the ring.
    pub(super) fn note_chunk(&mut self, header: &ChunkHeader) -> Result<(), Failure> {
        self.counters.chunks += 1;
        self.counters.entries += u64::from(header.entries);
        self.counters.entry_bytes += u64::from(header.body_bytes);
        self.member.batch_since.get_or_insert(self.now);
        if header.is_farewell() {
            self.member.settled.remove(&header.client);
            if let Some(client) = self.agent.clients.get_mut(&header.client) {
                // All of it is in the stream: it must not be taken up again.
                client.end_log()?;
            }
            return Ok(());
        }
        if header.client.0 != 0 {
            let settled = self.member.settled.entry(header.client).or_default();
            *settled = (*settled).max(header.last_seq);
            if let Some(client) = self.agent.clients.get_mut(&header.client) {
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
            let keep = if self.is_head() { self.member.all_acked } else { self.member.published };
            self.ring.release(self.member.published.min(keep))?;
        }
        Ok(())
    }

    pub(super) fn acknowledge(&mut self, out: &mut Vec<Effect>) {
        let seq = self.ring.last();
        let message = Message::ChunkAck { seq };
        if let Some(&head) = self.chain.first()
            && head != self.me()
        {
            self.send(head, message, out);
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
            self.send(source, Message::StreamWant { from }, out);
        }
    }

    /// What came too early and found no room in the stash is asked for when it is next: who has been away is sent much at
    /// once, in two classes.
    fn want_dropped(&mut self, out: &mut Vec<Effect>) {
        let next = StreamSeq(self.ring.last().0 + 1);
        let Some((first, last)) = self.member.dropped.filter(|(first, _)| next >= *first) else {
            return;
        };
        // So much is sent.
        let rest = StreamSeq(next.0 + self.config.limits.resend);
        self.member.dropped = (last >= rest).then_some((rest, last));
        if next <= last {
            self.want_stream(out);
        }
        debug_assert!(first <= last, "they were put in order");
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
            // Whoever gets it checks it.
            let frame = Frame::filled(kept.header.body_bytes as usize, |to| {
                self.ring.append_body(&kept, to)
            })?;
            let body = frame.into_chunk(&kept.header, self.epoch, self.member.all_acked);
            send_chunk(to, body, out);
            seq.0 += 1;
        }
        Ok(true)
    }

    /// A member that does not acknowledge although it should is reported to the coordinator.
    pub(super) fn watch_acks(&mut self, out: &mut Vec<Effect>) {
        let waited = self.now.saturating_sub(self.head.watched_at).min(WATCH_STEP);
        self.head.watched_at = self.now;
        if !self.is_head() || self.member.all_acked >= self.ring.last() {
            self.head.acks_missing = 0;
            return;
        }
        self.head.acks_missing += waited;
        if self.head.acks_missing > SUSPECT_AFTER {
            let behind =
                |n: &&NodeId| **n != self.me() && self.acked_by(**n) <= self.member.all_acked;
            if let Some(node) = self.chain.iter().chain(&self.head.followers).find(behind) {
                out.push(Effect::Suspect(*node));
            }
            self.head.acks_missing = 0;
        }
    }

    pub(super) fn acked_by(&self, node: NodeId) -> StreamSeq {
        self.head.acked.get(&node).copied().unwrap_or(StreamSeq(0))
    }

    /// Applies the next chunk of the ring to the working state (not at the head, which applies
    /// while it validates).
    /// `false`: it waits for a publication.
    pub(super) fn apply_next(&mut self, waits: Waits) -> Result<bool, Failure> {
        let seq = StreamSeq(self.member.applied.0 + 1);
        let read = self.volume.has_read() && !planted(Bug::ChunkPartlyPublished);
        let unpublished = self.member.published < self.member.applied;
        let wary = unpublished && waits == Waits::ForPublication;
        if wary && self.member.waits_beyond == Some(self.member.published) {
            // Nothing has been published since it was found that this has to wait.
            self.member.publish_now = true;
            return Ok(false);
        }
        if read && unpublished {
            // Whatever overwrites the blocks has to wait for the publication of what reads them.
            if waits == Waits::ForPublication {
                self.member.publish_now = true;
                return Ok(false);
            }
            self.publish_all()?;
        }
        match self.apply_chunk(seq, if wary { Care::Beforehand } else { Care::Whole })? {
            Applied::Whole => return Ok(true),
            Applied::UpTo(0) if wary => {
                self.member.waits_beyond = Some(self.member.published);
                self.member.publish_now = true;
                return Ok(false);
            }
            Applied::UpTo(_) => {}
        }
        // Not in the middle of the chunk: it is applied again after a crash, and would meet what
        // it did itself (a name that has moved on since). What came before it is published.
        self.take_back()?;
        self.publish_all()?;
        if self.apply_chunk(seq, Care::Whole)? == Applied::Whole {
            return Ok(true);
        }
        // The head had room for this chunk when everything before it was published. If here is
        // less, a crash in the next moment may cost a rejoin; not going on costs one now.
        self.take_back()?;
        self.apply_chunk(seq, Care::Partly).map(|_| true)
    }

    /// Applies a chunk, or some of it, where the rest waits for a publication.
    fn apply_chunk(&mut self, seq: StreamSeq, care: Care) -> Result<Applied, Failure> {
        let Some(kept) = self.ring.get(seq).copied() else {
            return Err(Failure::Diverged(seq, "it is not in the ring".into()));
        };
        let (segment, base) = self.ring.body_at(&kept);
        let chunk = match self.member.recent.take(&kept.header) {
            Some(chunk) => chunk,
            None => {
                let frame = Frame::filled(kept.header.body_bytes as usize, |to| {
                    self.ring.append_body(&kept, to)
                })?;
                let (checked, wrong) = Checked::of(frame, kept.header.incarnation);
                if let Some(e) = wrong {
                    return Err(Failure::Diverged(seq, e.to_string()));
                }
                checked.into()
            }
        };
        let all: Vec<_> = chunk.entries().collect();
        if care == Care::Beforehand && self.volume.may_have_to_wait(all.iter().map(|e| &e.2))? {
            return Ok(Applied::UpTo(0));
        }
        for (at, (offset, header, op)) in all.into_iter().enumerate() {
            if planted(Bug::EntrySkipped) && at > 0 && at as u32 + 1 == kept.header.entries {
                continue;
            }
            let source = (segment, base + offset as u64 + 64);
            let mut applied = self.volume.apply(&header, &op, source);
            if matches!(applied, Err(Refusal::NeedsPublish)) {
                if care != Care::Partly && !planted(Bug::ChunkPartlyPublished) {
                    return Ok(Applied::UpTo(at));
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
        self.spend_entry(kept.header.body_bytes as usize);
        self.member.recent.done(seq);
        self.applied_chunk(&kept.header);
        Ok(Applied::Whole)
    }

    /// Takes the working state back to the end of the last chunk that is applied whole.
    fn take_back(&mut self) -> Result<(), Failure> {
        self.take_back_to(self.member.applied)
    }

    /// Takes it back to the end of that chunk, which is in the ring, or published.
    pub(super) fn take_back_to(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        self.settle_job()?;
        self.member.applied = self.member.published;
        // Their views are of a volume that nobody asks any more for their pages.
        self.head.snapshots.clear();
        self.volume = Volume::open(Arc::clone(&self.media))?;
        while self.member.applied < upto {
            self.apply_chunk(StreamSeq(self.member.applied.0 + 1), Care::Partly)?;
        }
        Ok(())
    }

    /// A chunk's operations are in the working state.
    pub(super) fn applied_chunk(&mut self, header: &ChunkHeader) {
        self.member.applied = header.stream_seq;
        if header.client.0 != 0 {
            self.member.batch.insert(header.client, header.last_seq);
            if let Some(client) = self.agent.clients.get_mut(&header.client) {
                client.applied = client.applied.max(header.last_seq);
            }
        }
        self.member.batch_bytes += u64::from(header.body_bytes);
        self.member.batch_since.get_or_insert(self.now);
    }

    /// Settled sequences of the clients whose operations are in the stream.
    pub(super) fn settled_of(&mut self, client: ClientId) -> Sequence {
        let volume = &self.volume;
        let known: &mut BTreeMap<ClientId, Sequence> = &mut self.member.settled;
        *known.entry(client).or_insert_with(|| volume.published(client).unwrap_or_default())
    }
}
