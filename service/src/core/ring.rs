//! The stream ring: this node's copy of the volume's replication stream, and the source of every
//! copy into the arenas. Chunks lie one after the other, none wraps.
//!
//! ```text
//! segment Stream
//!      0   two slots of 64 bytes: magic "CBSR" u32, checksum u32 (bytes 8..40), number u64 (grows
//!          with each update, even numbers in slot 0), position u64 and stream seq u64 of the oldest
//!          chunk kept, epoch u32, zero u32
//!   4096   the ring
//! ```
//!
//! Always true: chunks `oldest..=last` are intact; `head - tail <= size`; positions only grow; the
//! slots are durable before the space that they give up is written again.

use std::collections::VecDeque;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::wire::{Reader, Writer};
use base::{Epoch, StreamSeq, crc32c};
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};
use storage::limits::CHUNK_BYTES_MAX;
use storage::media::{Media, MediaError, Segment};

const DATA: u64 = 4096;
const SLOT: usize = 40;
/// Zeroes behind the newest chunk: where a scan would look for the next one, bytes of an earlier
/// lap, which a client once wrote, must not pass for it.
const END_BYTES: u64 = 128;
const MAGIC: u32 = u32::from_le_bytes(*b"CBSR");
/// Smallest ring: four full chunks.
pub const RING_BYTES_MIN: u64 = 4 * (CHUNK_BYTES_MAX + CHUNK_HEADER_BYTES) as u64;

/// A chunk in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its header.
    pub header: ChunkHeader,
    /// Logical position of its first byte.
    pub position: u64,
}

/// See the module.
pub struct Ring {
    media: Arc<dyn Media>,
    size: u64,
    head: u64,
    kept: VecDeque<Kept>,
    slot: u64,
    /// Sequence before the first chunk when nothing is kept.
    base: StreamSeq,
    /// Epoch of that chunk; 0: not known.
    base_epoch: Epoch,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("head", &self.head).field("kept", &self.kept.len()).finish()
    }
}

const fn chunk_bytes(header: &ChunkHeader) -> u64 {
    ((CHUNK_HEADER_BYTES + header.body_bytes as usize) as u64).next_multiple_of(64)
}

/// Bytes of a segment for a ring of that size.
pub fn bytes(size: u64) -> u64 {
    DATA + size.max(RING_BYTES_MIN).next_multiple_of(4096)
}

impl Ring {
    /// Opens the ring: finds the chunks that lie in it from the recorded oldest one on.
    pub fn open(
        media: Arc<dyn Media>,
        size: u64,
        published: StreamSeq,
    ) -> Result<Self, MediaError> {
        let size = bytes(size) - DATA;
        media.ensure(Segment::Stream, DATA + size)?;
        let mut ring = Self {
            media,
            size,
            head: 0,
            kept: VecDeque::new(),
            slot: 0,
            base: published,
            base_epoch: Epoch(0),
        };
        if let Some((number, position, seq, epoch)) = ring.newest_slot()? {
            ring.slot = number;
            ring.head = position;
            ring.scan(seq)?;
            // Of the oldest chunk, if there is one.
            ring.base_epoch = if ring.kept.is_empty() { epoch } else { Epoch(0) };
        }
        if ring.last() < published {
            // Everything that lies here is published already.
            ring.kept.clear();
            (ring.base, ring.base_epoch) = (published, Epoch(0));
        }
        Ok(ring)
    }

    fn newest_slot(&self) -> Result<Option<(u64, u64, StreamSeq, Epoch)>, MediaError> {
        let mut best: Option<(u64, u64, StreamSeq, Epoch)> = None;
        for at in [0, 64] {
            let mut bytes = [0u8; SLOT];
            self.media.read(Segment::Stream, at, &mut bytes)?;
            let mut r = Reader::new("stream ring slot", &bytes);
            let mut parse = || -> Result<_, base::wire::Corrupt> {
                let (magic, crc) = (r.u32()?, r.u32()?);
                let (number, position, seq) = (r.u64()?, r.u64()?, r.u64()?);
                let epoch = Epoch(r.u32()?);
                if magic != MAGIC || crc != crc32c(0, &bytes[8..]) {
                    return Err(r.corrupt("fails its checksum"));
                }
                // Far from overflow, whatever is added to them.
                let counts = 0..1 << 62;
                if seq == 0 || ![number, position, seq].iter().all(|n| counts.contains(n)) {
                    return Err(r.corrupt("has a position that the ring cannot reach"));
                }
                Ok((number, position, StreamSeq(seq), epoch))
            };
            if let Ok(slot) = parse()
                && best.is_none_or(|(n, ..)| slot.0 > n)
            {
                best = Some(slot);
            }
        }
        Ok(best)
    }

    /// Collects the chunks from `self.head` on, whose first has sequence `first`.
    fn scan(&mut self, first: StreamSeq) -> Result<(), MediaError> {
        let mut expected = first;
        let begin = self.head;
        loop {
            let mut found = None;
            let next_lap = self.head.next_multiple_of(self.size);
            let next_lap = if planted(Bug::RingWrap) { self.head } else { next_lap };
            for position in [self.head, next_lap] {
                if position - begin < self.size
                    && let Some(kept) = self.chunk_at(position, expected)?
                {
                    found = Some(kept);
                    break;
                }
            }
            let Some(kept) = found else { break };
            if self.kept.back().is_some_and(|last| last.header.epoch > kept.header.epoch) {
                // Of a stream that was cut: epochs only grow.
                break;
            }
            self.head = kept.position + chunk_bytes(&kept.header);
            self.kept.push_back(kept);
            expected = StreamSeq(expected.0 + 1);
        }
        self.base = StreamSeq(expected.0 - 1).min(StreamSeq(first.0.saturating_sub(1)));
        Ok(())
    }

    /// The chunk at a position, if it is whole and has the sequence expected.
    fn chunk_at(&self, position: u64, seq: StreamSeq) -> Result<Option<Kept>, MediaError> {
        let in_ring = position % self.size;
        if self.size - in_ring < CHUNK_HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut head = [0u8; CHUNK_HEADER_BYTES];
        self.media.read(Segment::Stream, DATA + in_ring, &mut head)?;
        let Ok(header) = ChunkHeader::decode(&head) else { return Ok(None) };
        if header.stream_seq != seq || in_ring + chunk_bytes(&header) > self.size {
            return Ok(None);
        }
        let kept = Kept { header, position };
        let body = self.body(&kept)?;
        let whole = super::entries(&body, header.incarnation).all(|e| e.is_ok())
            || planted(Bug::ChunkUnverified);
        Ok(whole.then_some(kept))
    }

    /// Sequence of the newest chunk.
    pub fn last(&self) -> StreamSeq {
        self.kept.back().map_or(self.base, |k| k.header.stream_seq)
    }

    /// Epoch in which the newest chunk was made; 0: not known.
    pub fn last_epoch(&self) -> Epoch {
        self.kept.back().map_or(self.base_epoch, |k| k.header.epoch)
    }

    /// Epoch in which the chunk before the oldest was made, if it is known.
    pub fn epoch_before(&self) -> Option<Epoch> {
        Some(self.base_epoch).filter(|epoch| epoch.0 > 0)
    }

    /// Whether more is free than what a few chunks take: what nobody here needs can stay.
    pub fn is_roomy(&self) -> bool {
        let tail = self.kept.front().map_or(self.head, |k| k.position);
        self.head - tail < self.size / 4
    }

    /// Sequence of the oldest chunk kept (of the next one, if none is).
    pub fn oldest(&self) -> StreamSeq {
        self.kept.front().map_or(StreamSeq(self.base.0 + 1), |k| k.header.stream_seq)
    }

    /// The chunk of that sequence, if it is kept.
    pub fn get(&self, seq: StreamSeq) -> Option<&Kept> {
        let first = self.kept.front()?.header.stream_seq.0;
        self.kept.get(usize::try_from(seq.0.checked_sub(first)?).ok()?)
    }

    /// Where the next chunk with `body` bytes would lie, if there is room.
    fn place(&self, body: usize) -> Option<u64> {
        let need = ((CHUNK_HEADER_BYTES + body) as u64).next_multiple_of(64) + END_BYTES;
        let left = self.size - self.head % self.size;
        let left = if planted(Bug::RingPastEnd) { left + (1 << 16) } else { left };
        let position = if left < need { self.head + left } else { self.head };
        let tail = self.kept.front().map_or(self.head, |k| k.position);
        let size = if planted(Bug::RingOverrun) { 2 * self.size } else { self.size };
        (position + need - tail <= size).then_some(position)
    }

    /// Whether a chunk of the largest size has room.
    pub fn has_room(&self) -> bool {
        self.place(CHUNK_BYTES_MAX).is_some()
    }

    /// Offset in the segment at which the body of the next chunk will lie.
    pub fn next_body(&self, body_max: usize) -> Option<(Segment, u64)> {
        let position = self.place(body_max)?;
        Some((Segment::Stream, DATA + position % self.size + CHUNK_HEADER_BYTES as u64))
    }

    /// Puts a chunk into the ring, persistent when it returns. `reserved` is the body size for
    /// which `next_body` was asked (the place depends on it).
    pub fn put(
        &mut self,
        header: ChunkHeader,
        body: &[u8],
        reserved: usize,
    ) -> Result<bool, MediaError> {
        let Some(position) = self.place(reserved) else { return Ok(false) };
        let at = DATA + position % self.size;
        let end = at + chunk_bytes(&header);
        self.media.write(Segment::Stream, end, &[0; END_BYTES as usize])?;
        self.media.persist(Segment::Stream, end, END_BYTES)?;
        self.media.write(Segment::Stream, at + CHUNK_HEADER_BYTES as u64, body)?;
        self.media.write(Segment::Stream, at, &header.encode())?;
        let sure = if planted(Bug::ChunkNotFlushed) { 0 } else { body.len() };
        self.media.persist(Segment::Stream, at, (CHUNK_HEADER_BYTES + sure) as u64)?;
        if self.kept.is_empty() {
            self.record(position, header.stream_seq, header.epoch)?;
        }
        if !planted(Bug::NoFenceAfterChunk) {
            self.media.fence()?;
        }
        self.head = position + chunk_bytes(&header);
        self.kept.push_back(Kept { header, position });
        Ok(true)
    }

    /// Where the body of a kept chunk lies.
    pub fn body_at(&self, kept: &Kept) -> (Segment, u64) {
        (Segment::Stream, DATA + kept.position % self.size + CHUNK_HEADER_BYTES as u64)
    }

    /// Body of a kept chunk.
    pub fn body(&self, kept: &Kept) -> Result<Vec<u8>, MediaError> {
        let (segment, at) = self.body_at(kept);
        let mut body = vec![0u8; kept.header.body_bytes as usize];
        self.media.read(segment, at, &mut body)?;
        Ok(body)
    }

    /// Gives up chunks up to `seq`. The slot is written lazily: when the space is needed soon.
    pub fn release(&mut self, seq: StreamSeq) -> Result<(), MediaError> {
        let before = self.kept.len();
        while let Some(front) = self.kept.front()
            && front.header.stream_seq <= seq
        {
            (self.base, self.base_epoch) = (front.header.stream_seq, front.header.epoch);
            self.kept.pop_front();
        }
        if self.kept.len() == before {
            return Ok(());
        }
        match self.kept.front().copied() {
            Some(k) => self.record(k.position, k.header.stream_seq, k.header.epoch)?,
            None => self.record(self.head, StreamSeq(self.base.0 + 1), self.base_epoch)?,
        }
        self.media.fence()
    }

    /// Drops chunks after `seq` (a chain that went on without them); durable when it returns.
    pub fn cut(&mut self, seq: StreamSeq) -> Result<(), MediaError> {
        let before = self.head;
        while let Some(back) = self.kept.back()
            && back.header.stream_seq > seq
        {
            self.head = back.position;
            self.kept.pop_back();
        }
        if self.head == before {
            return Ok(());
        }
        // Where a scan would find the first of them.
        let at = DATA + self.head % self.size;
        self.media.write(Segment::Stream, at, &[0; CHUNK_HEADER_BYTES])?;
        self.media.persist(Segment::Stream, at, CHUNK_HEADER_BYTES as u64)?;
        self.media.fence()
    }

    /// Begins anew after `seq`: a snapshot replaced everything before.
    pub fn restart(&mut self, seq: StreamSeq) -> Result<(), MediaError> {
        self.kept.clear();
        (self.base, self.base_epoch) = (seq, Epoch(0));
        self.record(self.head, StreamSeq(seq.0 + 1), Epoch(0))?;
        self.media.fence()
    }

    fn record(&mut self, position: u64, seq: StreamSeq, epoch: Epoch) -> Result<(), MediaError> {
        self.slot += 1;
        let mut bytes = Vec::with_capacity(SLOT);
        let mut w = Writer(&mut bytes);
        w.u32(MAGIC).u32(0).u64(self.slot).u64(position).u64(seq.0).u32(epoch.0).u32(0);
        let crc = crc32c(0, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        let at = if planted(Bug::RingRecordInPlace) { 0 } else { (self.slot % 2) * 64 };
        self.media.write(Segment::Stream, at, &bytes)?;
        self.media.persist(Segment::Stream, at, SLOT as u64)
    }
}
