//! Keep: a chunk that comes down the chain is passed on, put into the ring of this node, and acknowledged. One that comes too
//! early waits.
//!
//! A long one is put there by a piece of work, and is sent on meanwhile. What rests on its being there waits for the end of that:
//! acknowledgements, what its client is told, the publication of what it holds, and whatever this node says of itself to others.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, NodeId, StreamSeq};
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};

use crate::core::frame::{Body, Checked, Frame, Received};
use crate::core::message::{CHUNK_PREFIX, Message};
use crate::core::{Effect, Failure, Node, Role};

impl Node {
    /// The member after this one.
    pub(in crate::core) fn successor(&self) -> Option<NodeId> {
        self.view.successor(self.me())
    }

    /// The member before this one.
    pub(in crate::core) fn predecessor(&self) -> Option<NodeId> {
        self.view.predecessor(self.me())
    }

    /// A chunk came down the chain.
    pub(in crate::core) fn chunk_arrived(
        &mut self,
        from: NodeId,
        all_acked: StreamSeq,
        frame: Received,
    ) -> Result<(), Failure> {
        let chunk = &frame.bytes()[CHUNK_PREFIX..];
        let header = match ChunkHeader::decode(chunk) {
            Ok(h) if chunk.len() == CHUNK_HEADER_BYTES + h.body_bytes as usize => h,
            _ => {
                self.env.counters.bad_messages += 1;
                log::warn!("a chunk of node {from} is damaged; asking for it again");
                self.want_stream();
                return Ok(());
            }
        };
        if self.member.incoming.is_some() {
            // The snapshot comes first; what is missing afterwards is asked for.
            return Ok(());
        }
        let expected = StreamSeq(self.ring.last().0 + 1);
        if header.stream_seq < expected {
            self.acknowledge();
            return Ok(());
        }
        if header.stream_seq > expected {
            if planted(Bug::GapAcknowledged) {
                let seq = header.stream_seq;
                self.to_head(Message::ChunkAck { seq });
            }
            if self.member.stash.len() < self.env.config.limits.stash {
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
            if !self.accept(header, frame, all_acked)? {
                self.env.counters.bad_messages += 1;
                self.want_stream();
                break;
            }
            let next = StreamSeq(self.ring.last().0 + 1);
            self.member.stash.retain(|seq, _| *seq >= next);
            if let Some(frame) = self.member.stash.remove(&next) {
                let header = ChunkHeader::decode(&frame.bytes()[CHUNK_PREFIX..]).ok();
                next_frame = header.map(|h| (h, frame));
            }
        }
        self.want_dropped();
        if self.ring.last() < all_acked {
            // It is behind what others have, and is sent that.
            self.note_joining();
        }
        self.catch_up();
        self.member.all_acked = self.member.all_acked.max(all_acked.min(self.ring.kept_to()));
        if self.is_head() && !self.is_ready() {
            self.take_over_step()?;
        }
        Ok(())
    }

    /// Passes a chunk on, keeps it, acknowledges it.
    fn accept(
        &mut self,
        header: ChunkHeader,
        frame: Received,
        all_acked: StreamSeq,
    ) -> Result<bool, Failure> {
        let Some(frame) = Frame::received(frame) else { return Ok(false) };
        let whole = frame.len();
        let (checked, wrong) = Checked::of(frame, header.incarnation);
        let right = wrong.is_none() && checked.entries().count() == header.entries as usize;
        if !(right && checked.len() == whole || planted(Bug::DamageIgnored)) {
            return Ok(false);
        }
        let reserved = checked.len();
        self.make_room(reserved)?;
        let body = checked.into_chunk(&header, self.view.epoch, all_acked);
        let Some(kept) = self.keep(&header, &body, reserved)? else { return Ok(false) };
        self.note_chunk(&header);
        self.member.recent.keep(header, &body, self.env.config.limits.recent_bytes);
        if let Some(next) = self.successor() {
            // Before the head is told: that hears of it soon enough, and those behind wait for nothing else.
            self.env.send_chunk(next, body);
        }
        if kept {
            self.note_kept(&header)?;
            self.acknowledge();
        } else if planted(Bug::KeptEarly) {
            let seq = self.ring.last();
            self.to_head(Message::ChunkAck { seq });
        }
        Ok(true)
    }

    /// Puts a chunk, whose message `body` is, into the ring: now if it is short, else it is worked upon. Says which, or that
    /// there is no room.
    pub(in crate::core) fn keep(
        &mut self,
        header: &ChunkHeader,
        body: &Body,
        reserved: usize,
    ) -> Result<Option<bool>, Failure> {
        let limits = self.env.config.limits;
        let bytes = header.body_bytes as usize;
        self.env.counters.kept_bytes += bytes as u64;
        // Who joins, or takes over, says all the time how far he is.
        let chained = matches!(self.role(), Role::Head | Role::Member) && self.is_ready();
        if !chained || self.ring.behind() + bytes > limits.behind_bytes {
            self.settle_ring()?;
        }
        let (client, now) = (header.client, self.env.now);
        let before = self.member.last_chunk.replace((client, now));
        let beside = |(other, at): (ClientId, Nanos)| {
            other != client && now.saturating_sub(at) <= limits.crowd
        };
        let inline = limits.inline(before.is_some_and(beside)).min(limits.keep_inline);
        // A short one that follows what is under way goes behind it.
        let long = bytes > inline || self.ring.is_behind();
        if !chained || !long || bytes > limits.behind_bytes {
            self.env.counters.kept_inline += 1;
            let put = self.ring.put(*header, body.chunk_entries(), reserved)?;
            return Ok(put.then_some(true));
        }
        if !self.ring.put_later(*header, body.clone(), reserved) {
            return Ok(None);
        }
        self.work_on_ring()?;
        Ok(Some(false))
    }

    /// Has more put into the ring, if not enough are at it.
    fn work_on_ring(&mut self) -> Result<(), Failure> {
        let limits = self.env.config.limits;
        while let Some(piece) =
            self.ring.work(self.env.pieces + 1, limits.keepers, limits.piece_bytes)?
        {
            self.env.pieces += 1;
            self.env.out.push(Effect::Work(piece));
        }
        Ok(())
    }

    /// A piece of work has ended.
    pub(in crate::core) fn work_ended(&mut self, id: u64) -> Result<(), Failure> {
        let from = self.ring.kept_to();
        if self.ring.work_ended(id)? {
            self.tell_kept(from)?;
            self.work_on_ring()?;
            // One that has ended before those before it has brought nothing yet.
            if self.ring.kept_to() > from { self.say_kept() } else { Ok(()) }
        } else if self.work_copied(id)? {
            Ok(())
        } else {
            self.fetch_ended(id)
        }
    }

    /// What has its place in the ring is there when this returns. (Others are told when the event is done with.)
    pub(in crate::core) fn settle_ring(&mut self) -> Result<(), Failure> {
        let from = self.ring.kept_to();
        if self.ring.settle()? {
            self.tell_kept(from)?;
            self.member.kept_untold = true;
        }
        Ok(())
    }

    /// Something is about to be said of the working state to somebody: a head has in it what is on its way to the ring, and would lose
    /// that by its end, though not what it has said.
    pub(in crate::core) fn stand_by_it(&mut self) -> Result<(), Failure> {
        if planted(Bug::AnsweredUnkept) { Ok(()) } else { self.settle_ring() }
    }

    /// The chunks behind `from` that are in the ring now came there without being noted.
    fn tell_kept(&mut self, from: StreamSeq) -> Result<(), Failure> {
        for seq in from.0 + 1..=self.ring.kept_to().0 {
            if let Some(header) = self.ring.get(StreamSeq(seq)).map(|kept| kept.header) {
                self.note_kept(&header)?;
            }
        }
        Ok(())
    }

    /// Says how far the ring is to who needs to know.
    pub(in crate::core) fn say_kept(&mut self) -> Result<(), Failure> {
        self.member.kept_untold = false;
        match self.role() {
            Role::Head if self.is_ready() => self.advance_acks(),
            Role::Member => {
                self.acknowledge();
                Ok(())
            }
            // They say so when they are asked.
            _ => Ok(()),
        }
    }

    /// Bookkeeping for a chunk that has its place in the ring.
    pub(in crate::core) fn note_chunk(&mut self, header: &ChunkHeader) {
        self.env.counters.chunks += 1;
        self.env.counters.entries += u64::from(header.entries);
        self.env.counters.entry_bytes += u64::from(header.body_bytes);
        self.member.batch_since.get_or_insert(self.env.now);
        if header.is_farewell() {
            self.member.settled.remove(&header.client);
        } else if header.client.0 != 0 {
            let settled = self.member.settled.entry(header.client).or_default();
            *settled = (*settled).max(header.last_seq);
        }
    }

    /// The chunk is in the ring: its client is told, if it is of this node.
    pub(in crate::core) fn note_kept(&mut self, header: &ChunkHeader) -> Result<(), Failure> {
        if header.is_farewell() {
            if let Some(client) = self.agent.clients.get_mut(&header.client) {
                // All of it is in the stream: it must not be taken up again.
                client.end_log()?;
            }
            return Ok(());
        }
        // (Chunks of the service's own are nobody's.)
        if let Some(client) = self.agent.clients.get_mut(&header.client) {
            if header.refusals > 0 && !planted(Bug::RefusalUntold) {
                client.refuse(header.refusals, header.refused, header.errno);
            } else if header.refused.0 > 0 && !planted(Bug::UntakenUntold) {
                client.untaken(header.refused, header.errno);
            }
            client.set_settled(header.last_seq)?;
        }
        Ok(())
    }

    /// Room in the ring for a chunk with `body` bytes, by publishing now if need be.
    pub(in crate::core) fn make_room(&mut self, body: usize) -> Result<(), Failure> {
        if self.ring.next_body(body).is_none() {
            self.publish_all()?;
            // A member keeps what others may lack; under pressure only what it has not published.
            let keep = if self.is_head() { self.member.all_acked } else { self.member.published };
            self.ring.release(self.member.published.min(keep))?;
        }
        Ok(())
    }
}
