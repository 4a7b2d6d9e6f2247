//! The stream ring: this node's copy of the volume's replication stream, and the source of every
//! copy into the arenas. Chunks lie one after the other, none wraps.
//!
//! ```text
//! segment Stream
//!      0   two slots of 64 bytes: magic "CBSR" u32, checksum u32 (bytes 8..40), number u64 (grows
//!          with each update, even numbers in slot 0), position u64 and stream seq u64 of the oldest
//!          chunk kept, its epoch u32 (without one: of the chunk before, or one after that whose head has it as well),
//!          zero u32
//!   4096   the ring
//! ```
//!
//! A chunk has its place when its number is settled, and is put there at once, or by pieces of work ([`Ring::put_later`]). One
//! piece puts one chunk after the other, each with a fence. Where several may be under way, and end in any order, they lay down
//! what chunks hold, and fence that; the header, without which nothing is there, is put by the thread that decides, when all
//! before it are there, each with a fence. So after a power cut there are no holes, whoever did it. Until then the bytes of a
//! chunk are those of its frame.
//!
//! Always true: chunks `oldest..=kept_to` are intact; `head - tail <= size`; positions only grow; the
//! slots are durable before the space that they give up is written again.

use std::collections::VecDeque;
use std::sync::Arc;

use base::always;
use base::planted::{Bug, planted};
use base::wire::{Reader, Writer};
use base::{Epoch, StreamSeq, crc32c};
use storage::check::Touched;
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};
use storage::limits::CHUNK_BYTES_MAX;
use storage::media::{Media, MediaError, Segment};

use super::frame::Body;
use super::work::{End, Job, Kind, Piece};

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

/// A chunk on its way to its place.
#[derive(Clone, Debug)]
pub(super) struct Put {
    header: ChunkHeader,
    /// The message that it came in or goes out in.
    body: Body,
    /// Offset in the segment.
    at: u64,
    /// What says that it is the oldest, if it is, and where that goes.
    record: Option<(u64, [u8; SLOT])>,
}

impl Put {
    /// Where the next one may lie.
    fn end(&self) -> u64 {
        self.at + chunk_bytes(&self.header)
    }

    /// Puts it there, whole.
    fn run(&self, media: &dyn Media) -> Result<(), MediaError> {
        write_chunk(media, self.at, &self.header, self.body.chunk_entries())?;
        self.record(media)
    }

    /// Lays down what it holds, and starts the write-back of that: it is not there yet.
    fn lay(&self, media: &dyn Media, bytes: usize) -> Result<(), MediaError> {
        let (at, body) = (self.at + CHUNK_HEADER_BYTES as u64, self.body.chunk_entries());
        media.write(Segment::Stream, at, &body[..bytes])?;
        let sure = if planted(Bug::ChunkNotFlushed) { 0 } else { bytes };
        media.persist(Segment::Stream, at, sure as u64)
    }

    /// Puts it there, when what it holds is.
    fn seal(&self, media: &dyn Media) -> Result<(), MediaError> {
        media.write(Segment::Stream, self.at, &self.header.encode())?;
        media.persist(Segment::Stream, self.at, CHUNK_HEADER_BYTES as u64)?;
        self.record(media)
    }

    fn record(&self, media: &dyn Media) -> Result<(), MediaError> {
        match &self.record {
            Some((at, bytes)) => write_record(media, *at, bytes),
            None => Ok(()),
        }
    }
}

/// What a piece of work does with its chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// It puts them to their places, one after the other; those before one are durable before it is there.
    Whole,
    /// It lays down what they hold.
    Laid,
}

/// Does it; durable when it returns.
pub(super) fn keep_all(media: &dyn Media, puts: &[Put], how: How) -> Result<(), MediaError> {
    match how {
        How::Whole => puts.iter().try_for_each(|put| {
            put.run(media)?;
            if planted(Bug::KeptUnfenced) { Ok(()) } else { media.fence() }
        }),
        How::Laid => lay_all(media, puts),
    }
}

/// Lays down what chunks hold, durable when it returns.
fn lay_all(media: &dyn Media, puts: &[Put]) -> Result<(), MediaError> {
    puts.iter().try_for_each(|put| put.lay(media, put.body.chunk_entries().len()))?;
    if planted(Bug::KeptUnfenced) { Ok(()) } else { media.fence() }
}

/// The same by somebody who dies: of 256 parts of the chunks he has done `share`, and of the one after them a part of its bytes.
pub(super) fn keep_some(media: &dyn Media, puts: &[Put], how: How, share: u8) {
    let share = usize::from(share);
    let whole = puts.len() * share / 256;
    if keep_all(media, &puts[..whole], how).is_ok()
        && let Some(put) = puts.get(whole)
    {
        if how == How::Whole {
            let _ = media.write(Segment::Stream, put.end(), &[0; END_BYTES as usize]);
        }
        let _ = put.lay(media, put.header.body_bytes as usize * share / 256);
    }
}

/// A piece of work under way.
struct Laying {
    piece: Piece,
    /// How many of the chunks, in their order.
    count: usize,
    how: How,
    /// It has ended.
    ended: bool,
}

/// Stores a chunk and starts its write-back.
fn write_chunk(
    media: &dyn Media,
    at: u64,
    header: &ChunkHeader,
    body: &[u8],
) -> Result<(), MediaError> {
    write_end(media, at + chunk_bytes(header))?;
    media.write(Segment::Stream, at + CHUNK_HEADER_BYTES as u64, body)?;
    media.write(Segment::Stream, at, &header.encode())?;
    let sure = if planted(Bug::ChunkNotFlushed) { 0 } else { body.len() };
    media.persist(Segment::Stream, at, (CHUNK_HEADER_BYTES + sure) as u64)
}

/// Nothing follows, as far as a scan can tell.
fn write_end(media: &dyn Media, at: u64) -> Result<(), MediaError> {
    media.write(Segment::Stream, at, &[0; END_BYTES as usize])?;
    media.persist(Segment::Stream, at, END_BYTES)
}

fn write_record(media: &dyn Media, at: u64, bytes: &[u8; SLOT]) -> Result<(), MediaError> {
    media.write(Segment::Stream, at, bytes)?;
    media.persist(Segment::Stream, at, SLOT as u64)
}

/// See the module.
pub struct Ring {
    media: Arc<dyn Media>,
    size: u64,
    head: u64,
    kept: VecDeque<Kept>,
    /// The last of those, which are not there yet.
    puts: VecDeque<Put>,
    puts_bytes: usize,
    /// Who is at them, in their order.
    under_way: VecDeque<Laying>,
    slot: u64,
    /// Sequence before the first chunk when nothing is kept.
    base: StreamSeq,
    /// Epoch of that chunk, or one after it whose head has it as well; 0: not known.
    base_epoch: Epoch,
    /// Of chunks that are kept no more: first, last, and in which epoch they were made. They follow each other.
    released: VecDeque<(StreamSeq, StreamSeq, Epoch)>,
}

/// So many epochs of chunks that are kept no more are known.
const EPOCHS: usize = 1024;

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
            puts: VecDeque::new(),
            puts_bytes: 0,
            under_way: VecDeque::new(),
            slot: 0,
            base: published,
            base_epoch: Epoch(0),
            released: VecDeque::new(),
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

    /// Epoch in which the newest chunk was made, or one after it whose head has it as well; 0: not known.
    pub fn last_epoch(&self) -> Epoch {
        self.kept.back().map_or(self.base_epoch, |k| k.header.epoch)
    }

    /// The same of the chunk before the oldest, if it is known.
    pub fn epoch_before(&self) -> Option<Epoch> {
        Some(self.base_epoch).filter(|epoch| epoch.0 > 0)
    }

    /// The same of a chunk that is kept, or was in the time of this process, if it is known.
    pub fn epoch_of(&self, seq: StreamSeq) -> Option<Epoch> {
        if let Some(kept) = self.get(seq) {
            return Some(kept.header.epoch);
        }
        if seq == self.base && self.oldest().0 == seq.0 + 1 {
            return self.epoch_before();
        }
        let found = self.released.partition_point(|(_, last, _)| *last < seq);
        self.released.get(found).filter(|(first, ..)| *first <= seq).map(|(.., epoch)| *epoch)
    }

    fn note_released(&mut self, seq: StreamSeq, epoch: Epoch) {
        match self.released.back_mut() {
            Some((_, last, of)) if *of == epoch && last.0 + 1 == seq.0 => *last = seq,
            Some((_, last, _)) if last.0 + 1 != seq.0 => {
                self.released.clear();
                self.released.push_back((seq, seq, epoch));
            }
            _ => self.released.push_back((seq, seq, epoch)),
        }
        if self.released.len() > EPOCHS {
            self.released.pop_front();
        }
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
        self.settle()?;
        let Some(position) = self.place(reserved) else { return Ok(false) };
        write_chunk(&*self.media, DATA + position % self.size, &header, body)?;
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

    /// Gives a chunk its place in the ring; it is put there by [`Ring::work`], or by [`Ring::settle`]. `body` is its message.
    pub fn put_later(&mut self, header: ChunkHeader, body: Body, reserved: usize) -> bool {
        let Some(position) = self.place(reserved) else { return false };
        let at = DATA + position % self.size;
        let first = self.kept.is_empty();
        let record = first.then(|| self.next_record(position, header.stream_seq, header.epoch));
        self.puts_bytes += header.body_bytes as usize;
        self.puts.push_back(Put { header, body, at, record });
        self.head = position + chunk_bytes(&header);
        self.kept.push_back(Kept { header, position });
        true
    }

    /// The next piece of work, if there is something to do and fewer than `pieces` are under way: of chunks of so many bytes, or
    /// one.
    pub(super) fn work(
        &mut self,
        id: u64,
        pieces: usize,
        most: usize,
    ) -> Result<Option<Piece>, MediaError> {
        let given = self.under_way.iter().map(|laying| laying.count).sum();
        if self.under_way.len() >= pieces || self.puts.len() == given {
            return Ok(None);
        }
        let how = if pieces == 1 { How::Whole } else { How::Laid };
        let (mut puts, mut bytes) = (Vec::new(), 0);
        for put in self.puts.iter().skip(given) {
            let more = put.header.body_bytes as usize;
            if bytes > 0 && bytes + more > most {
                break;
            }
            if how == How::Laid {
                // By this thread, which puts what comes there, and fences it before the header.
                write_end(&*self.media, put.end())?;
            }
            bytes += more;
            puts.push(put.clone());
        }
        let count = puts.len();
        let piece = Piece::new(id, Kind::Keep, bytes, Job::Keep(puts, how));
        self.under_way.push_back(Laying { piece: piece.clone(), count, how, ended: false });
        Ok(Some(piece))
    }

    /// Takes up the end of the work of that number; `false`: it is not under way (any more).
    pub fn work_ended(&mut self, id: u64) -> Result<bool, MediaError> {
        let Some(at) = self.under_way.iter().position(|laying| laying.piece.id() == id) else {
            return Ok(false);
        };
        match self.under_way[at].piece.take() {
            Some(End::Kept(done)) => done?,
            // Somebody spoke too early.
            Some(End::Fetched(_) | End::Copied(_)) | None => return Ok(false),
        }
        let at = if planted(Bug::KeptOutOfOrder) { 0 } else { at };
        self.under_way[at].ended = true;
        if at == 0 && self.under_way[0].how == How::Laid {
            // That nothing follows is durable before what it would follow.
            self.media.fence()?;
        }
        while let Some(laying) = self.under_way.pop_front_if(|laying| laying.ended) {
            for put in self.puts.drain(..laying.count) {
                if laying.how == How::Laid {
                    put.seal(&*self.media)?;
                    if !planted(Bug::NoFenceAfterChunk) {
                        self.media.fence()?;
                    }
                }
                self.puts_bytes -= put.header.body_bytes as usize;
            }
        }
        Ok(true)
    }

    /// What has its place is there when this returns; `true` if something was not.
    pub fn settle(&mut self) -> Result<bool, MediaError> {
        if self.puts.is_empty() {
            return Ok(false);
        }
        while let Some(laying) = self.under_way.front() {
            let piece = laying.piece.clone();
            piece.settle(&*self.media);
            if !self.work_ended(piece.id())? {
                // It died (in the simulator), and this node is about to.
                break;
            }
        }
        // One that fails is not there, nor is what comes after it.
        while let Some(put) = self.puts.front() {
            put.run(&*self.media)?;
            if !planted(Bug::NoFenceAfterChunk) {
                self.media.fence()?;
            }
            self.puts_bytes -= put.header.body_bytes as usize;
            self.puts.pop_front();
        }
        Ok(true)
    }

    /// Sequence of the newest chunk that is there, as all before it are.
    pub fn kept_to(&self) -> StreamSeq {
        self.puts.front().map_or(self.last(), |put| StreamSeq(put.header.stream_seq.0 - 1))
    }

    /// Bytes of chunks that have their place and are not there.
    pub const fn behind(&self) -> usize {
        self.puts_bytes
    }

    /// Whether there are such.
    pub fn is_behind(&self) -> bool {
        !self.puts.is_empty()
    }

    /// The bytes of a chunk that is not there yet.
    fn on_its_way(&self, seq: StreamSeq) -> Option<&Put> {
        let first = self.puts.front()?.header.stream_seq.0;
        self.puts.get(usize::try_from(seq.0.checked_sub(first)?).ok()?)
    }

    /// Where the body of a kept chunk lies.
    pub fn body_at(&self, kept: &Kept) -> (Segment, u64) {
        (Segment::Stream, DATA + kept.position % self.size + CHUNK_HEADER_BYTES as u64)
    }

    /// Body of a kept chunk.
    pub fn body(&self, kept: &Kept) -> Result<Vec<u8>, MediaError> {
        let mut body = Vec::new();
        self.append_body(kept, &mut body)?;
        Ok(body)
    }

    /// The same behind what `to` holds.
    pub fn append_body(&self, kept: &Kept, to: &mut Vec<u8>) -> Result<(), MediaError> {
        if let Some(put) =
            self.on_its_way(kept.header.stream_seq).filter(|_| !planted(Bug::KeptReadEarly))
        {
            to.extend_from_slice(put.body.chunk_entries());
            return Ok(());
        }
        let (segment, at) = self.body_at(kept);
        self.media.append(segment, at, kept.header.body_bytes as usize, to)
    }

    /// Blocks of files that the chunks behind `published` may overwrite: they may be half written.
    pub fn touched(&self, published: StreamSeq) -> Result<Vec<Touched>, MediaError> {
        let mut touched = Vec::new();
        for kept in self.kept.iter().filter(|kept| kept.header.stream_seq > published) {
            let body = self.body(kept)?;
            let entries = super::entries(&body, kept.header.incarnation).flatten();
            touched.extend(entries.flat_map(|(_, _, op)| Touched::by(&op)));
        }
        Ok(touched)
    }

    /// Gives up chunks up to `seq`. The slot is written lazily: when the space is needed soon.
    pub fn release(&mut self, seq: StreamSeq) -> Result<(), MediaError> {
        let before = self.kept.len();
        while let Some(front) = self.kept.front()
            && front.header.stream_seq <= seq
        {
            let ChunkHeader { stream_seq: seq, epoch, .. } = front.header;
            (self.base, self.base_epoch) = (seq, epoch);
            self.note_released(seq, epoch);
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
        self.settle()?;
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

    /// Begins anew after `seq`: a snapshot replaced everything before. `epoch`: by whose head the stream up to there is known; 0: it is not.
    pub fn restart(&mut self, seq: StreamSeq, epoch: Epoch) -> Result<(), MediaError> {
        self.settle()?;
        self.kept.clear();
        self.released.clear();
        (self.base, self.base_epoch) = (seq, epoch);
        self.record(self.head, StreamSeq(seq.0 + 1), epoch)?;
        self.media.fence()
    }

    /// What the module says is always true; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        let (mut end, mut seq, mut epoch) = (None, self.base, Epoch(0));
        for kept in &self.kept {
            let Kept { header, position } = kept;
            let next = if end.is_none() { header.stream_seq } else { StreamSeq(seq.0 + 1) };
            always!(header.stream_seq == next, "chunk {} lies behind {seq}", header.stream_seq);
            always!(header.epoch >= epoch, "chunk {next} is of epoch {}", header.epoch);
            let bytes = chunk_bytes(header);
            always!(end.is_none_or(|end| *position >= end), "chunk {next} lies over another");
            always!(position % self.size + bytes <= self.size, "chunk {next} wraps");
            (end, seq, epoch) = (Some(position + bytes), header.stream_seq, header.epoch);
        }
        let tail = self.kept.front().map_or(self.head, |k| k.position);
        always!(end.is_none_or(|end| end == self.head), "the ring ends at {}", self.head);
        always!(self.head - tail <= self.size, "the ring holds more than it can");
        let last = self.kept.iter().rev().map(|kept| kept.header);
        let same = self.puts.iter().rev().zip(last).all(|(put, last)| put.header == last);
        always!(
            same && self.puts.len() <= self.kept.len(),
            "others are on their way than have a place"
        );
        let (bytes, counted) = (
            self.puts.iter().map(|p| p.header.body_bytes as usize).sum::<usize>(),
            self.puts_bytes,
        );
        always!(bytes == counted, "{bytes} bytes on their way count for {counted}");
        let most: usize = self.under_way.iter().map(|laying| laying.count).sum();
        always!(most <= self.puts.len(), "{most} chunks are being put, of {}", self.puts.len());
        always!(
            self.under_way.front().is_none_or(|laying| !laying.ended),
            "what is laid down is not there"
        );
        Ok(())
    }

    fn record(&mut self, position: u64, seq: StreamSeq, epoch: Epoch) -> Result<(), MediaError> {
        let (at, bytes) = self.next_record(position, seq, epoch);
        write_record(&*self.media, at, &bytes)
    }

    /// What says which chunk is the oldest, and where it goes.
    fn next_record(&mut self, position: u64, seq: StreamSeq, epoch: Epoch) -> (u64, [u8; SLOT]) {
        self.slot += 1;
        let mut text = Vec::with_capacity(SLOT);
        let mut w = Writer(&mut text);
        w.u32(MAGIC).u32(0).u64(self.slot).u64(position).u64(seq.0).u32(epoch.0).u32(0);
        let crc = crc32c(0, &text[8..]);
        text[4..8].copy_from_slice(&crc.to_le_bytes());
        let mut bytes = [0; SLOT];
        bytes.copy_from_slice(&text);
        let at = if planted(Bug::RingRecordInPlace) { 0 } else { (self.slot % 2) * 64 };
        (at, bytes)
    }
}
