//! Apply: what the ring holds is brought into the working state of the volume, in its order. (The head has done so when it made
//! the order.)

use std::collections::BTreeMap;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Sequence, StreamSeq};
use storage::format::chunk::ChunkHeader;
use storage::volume::{Fault, Refusal, Volume};

use crate::core::frame::{Checked, Chunk, Frame};
use crate::core::ring::Kept;
use crate::core::{Failure, Node};

/// Whether a chunk may wait for its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::core) enum Waits {
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

impl Node {
    /// Applies the next chunk of the ring to the working state (not at the head, which applies
    /// while it validates).
    /// `false`: it waits for a publication.
    pub(in crate::core) fn apply_next(&mut self, waits: Waits) -> Result<bool, Failure> {
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

    /// Reads a chunk back.
    pub(in crate::core) fn chunk_in_ring(
        &self,
        seq: StreamSeq,
        kept: &Kept,
    ) -> Result<Chunk, Failure> {
        let frame =
            Frame::filled(kept.header.body_bytes as usize, |to| self.ring.append_body(kept, to))?;
        let (checked, wrong) = Checked::of(frame, kept.header.incarnation);
        match wrong {
            Some(e) => Err(Failure::Diverged(seq, e.to_string())),
            None => Ok(checked.into()),
        }
    }

    /// Applies a chunk, or some of it, where the rest waits for a publication.
    fn apply_chunk(&mut self, seq: StreamSeq, care: Care) -> Result<Applied, Failure> {
        let Some(kept) = self.ring.get(seq).copied() else {
            return Err(Failure::Diverged(seq, "it is not in the ring".into()));
        };
        let (segment, base) = self.ring.body_at(&kept);
        let chunk = match self.member.recent.take(&kept.header) {
            Some(chunk) => chunk,
            None => self.chunk_in_ring(seq, &kept)?,
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
                    self.note_done(kept.header.client, &op, seq)?;
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
    pub(in crate::core) fn take_back_to(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        self.settle_job()?;
        self.member.applied = self.member.published;
        // What the chunks that stay say of their clients is noted anew; what those say that go counts for nobody.
        if !planted(Bug::CutCounts) {
            self.member.batch.clear();
            (self.member.batch_bytes, self.member.batch_since) = (0, None);
        }
        // Their views are of a volume that nobody asks any more for their pages.
        if let Some(head) = self.part.head_mut() {
            head.snapshots.clear();
        }
        self.open_volume_anew()?;
        // What lay in the ring when this process began, the one before it may have copied, in part or in whole.
        let begun = self.member.replayed;
        let mut replays = self.member.applied < begun && !planted(Bug::TakenBackCompared);
        if replays {
            self.volume.begin_replay();
        }
        while self.member.applied < upto {
            self.apply_chunk(StreamSeq(self.member.applied.0 + 1), Care::Partly)?;
            if replays && self.member.applied >= begun {
                replays = false;
                self.volume.end_replay();
            }
        }
        Ok(())
    }

    /// Takes the volume as it is on media.
    pub(in crate::core) fn open_volume_anew(&mut self) -> Result<(), Fault> {
        let slots = self.volume.slots_given_up();
        self.volume = Volume::open(Arc::clone(&self.env.media))?;
        self.volume.note_slots_given_up(&slots);
        Ok(())
    }

    /// A chunk's operations are in the working state.
    pub(in crate::core) fn applied_chunk(&mut self, header: &ChunkHeader) {
        self.member.applied = header.stream_seq;
        if header.client.0 != 0 {
            self.member.batch.insert(header.client, header.last_seq);
            if let Some(client) = self.agent.clients.get_mut(&header.client) {
                client.applied = client.applied.max(header.last_seq);
            }
        }
        self.member.batch_bytes += u64::from(header.body_bytes);
        self.member.batch_since.get_or_insert(self.env.now);
    }

    /// Settled sequences of the clients whose operations are in the stream.
    pub(in crate::core) fn settled_of(&mut self, client: ClientId) -> Sequence {
        let volume = &self.volume;
        let known: &mut BTreeMap<ClientId, Sequence> = &mut self.member.settled;
        *known.entry(client).or_insert_with(|| volume.published(client).unwrap_or_default())
    }
}
