//! Appending to the log: the one writer of it, for LibFS and for whoever else speaks the protocol of the
//! control area (tests, crash states, hostile clients).
//!
//! A lane is a ring: `head` is the position after the last entry; the position that may not be passed is a lap
//! behind what the service has reclaimed.
//!
//! An entry is written in one go ([`Room::append`]), or in two steps. [`Room::put`] stores the payload behind the place of the
//! header, where the service does not look yet: its author has the lane then, and nothing else that anybody could wait for.
//! [`Filled::commit`] takes the next sequence and stores the header. So who is stopped while he copies, or dies, has no
//! number that the service would wait for, and the entries of others go on in their lanes.
//!
//! A lane is locked from the one step to the end of the other. Whoever has it may wait for an inode, so nobody who has an
//! inode locked waits for a lane: he takes one that is free ([`Log::try_room`]), or lets go of what he has.
//!
//! Invariants: positions only grow; `head <= frontier + lane_bytes`; an entry never wraps (a Pad
//! fills the end of a lap); bytes at positions below `frontier` may have been overwritten.

use alloc::vec::Vec;
use core::hint::black_box;
use core::sync::atomic::Ordering;

use base::planted::{Bug, planted};
use base::{Epoch, Sequence, crc32c};
use storage::format::control::{self, Descriptor};
use storage::format::entry::{HEADER_BYTES, Op, RawHeader, entry_bytes, op};

use super::host::{Host, Memory};
use super::sync::{Alone, RwLock, Word, WriteGuard};

/// Bytes that pass from a payload into the log at once, by way of the stage: what stays in the first cache.
const STAGE: usize = 4096;

/// The log of one attachment.
#[derive(Debug)]
pub struct Log<H: Host> {
    descriptor: Descriptor,
    lanes: Vec<Lane<H>>,
    /// The next sequence.
    next: Alone<Word<H>>,
}

/// One lane as its client sees it.
#[derive(Debug)]
struct Lane<H: Host> {
    head: RwLock<Head, H>,
    /// Everything below may be overwritten; readers of log bytes check against it afterwards.
    frontier: Alone<Word<H>>,
    /// Descriptors that append to it.
    users: Word<H>,
}

/// A lane in the hands of one who will append to it.
pub type Lent<'a, H> = (u8, WriteGuard<'a, Head, H>);

/// Where a lane goes on; for who has it.
#[derive(Debug)]
pub struct Head {
    /// Position after the last entry.
    at: u64,
    stage: Stage,
}

/// What is summed and stored is this copy, piece by piece: the caller's memory may be changed by another thread
/// or process meanwhile, and an entry that does not fit its checksum ends the log.
#[derive(Debug)]
#[repr(align(64))]
struct Stage([u8; STAGE]);

/// Where an appended payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Lane.
    pub lane: u8,
    /// Position of the first payload byte.
    pub position: u64,
    /// Sequence of the entry.
    pub sequence: Sequence,
}

/// A lane has no room: which, and how far it was reclaimed. Wait for the service to reclaim more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Lane.
    pub lane: u8,
    /// Position.
    pub reclaimed: u64,
}

/// No lane could be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// It has no room.
    Full(Full),
    /// Others are appending to each of them; this is the one that was asked for.
    Busy(u8),
}

/// An entry that is written but not yet persistent: the streaming stores drain while its author
/// does what is left to do, without waiting for anything; then it calls [`Written::persist`].
/// The lane is locked until then.
#[derive(Debug)]
#[must_use = "the entry is not persistent before `persist`"]
pub struct Written<'a, H: Host> {
    _lane: WriteGuard<'a, Head, H>,
    memory: &'a H::Memory,
    /// Where it lies.
    pub place: Place,
}

impl<H: Host> Written<'_, H> {
    /// Makes the entry persistent (in the sense of the region): one fence.
    #[inline]
    pub fn persist(self) -> Place {
        if !planted(Bug::AppendNotFenced) {
            self.memory.fence();
        }
        self.place
    }
}

/// A lane with room for one entry.
#[derive(Debug)]
pub struct Room<'a, H: Host> {
    head: WriteGuard<'a, Head, H>,
    memory: &'a H::Memory,
    log: &'a Log<H>,
    index: u8,
}

/// A lane in which the payload of the next entry lies, which is none without its header. Dropped, nothing was done.
#[derive(Debug)]
#[must_use = "there is no entry before `commit`"]
pub struct Filled<'a, H: Host> {
    room: Room<'a, H>,
    length: usize,
    /// Of the payload alone.
    crc: u32,
}

impl<H: Host> Log<H> {
    /// The empty log that the descriptor tells of.
    pub fn new(descriptor: Descriptor) -> Self {
        let lane = |_| Lane {
            head: RwLock::new(Head { at: 0, stage: Stage([0; STAGE]) }),
            frontier: Alone(Word::new(0)),
            users: Word::new(0),
        };
        Self {
            lanes: (0..descriptor.lanes).map(lane).collect(),
            next: Alone(Word::new(descriptor.first_sequence.0)),
            descriptor,
        }
    }

    /// One whose first lane has so many bytes already, and `last` in it: of a client that writes some of its entries elsewhere.
    pub fn resume(descriptor: Descriptor, at: u64, last: Sequence) -> Self {
        let log = Self::new(descriptor);
        if let Some(lane) = log.lanes.first() {
            lane.head.write().at = at;
        }
        log.next.store(last.0 + 1, Ordering::Relaxed);
        log
    }

    /// What the service said about it.
    pub const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// The highest sequence handed out.
    pub fn last(&self) -> Sequence {
        Sequence(self.next.load(Ordering::Acquire) - 1)
    }

    /// Where in the segment the next entry of a lane begins, unless it does not fit before the lane's end.
    pub fn next_at(&self, lane: u8) -> u64 {
        let head = self.lanes[usize::from(lane)].head.read();
        self.descriptor.lane_offset(lane.into()) + head.at % self.descriptor.lane_bytes
    }

    /// The lane for what is done through no descriptor, by some number (an inode's), or that lane itself.
    pub fn lane_of(&self, hint: u64) -> u8 {
        (hint % self.lanes.len() as u64) as u8
    }

    /// A lane for a descriptor that begins to write: of those that fewest use, the first, so that no more of them are
    /// used than there are such descriptors, and many share them evenly. To be given back.
    pub fn enlist(&self) -> u8 {
        let users = |i: &usize| self.lanes[*i].users.load(Ordering::Relaxed);
        let index = (0..self.lanes.len()).min_by_key(users).unwrap_or(0);
        self.lanes[index].users.add(1, Ordering::Relaxed);
        index as u8
    }

    /// The descriptor writes no more.
    pub fn discharge(&self, lane: u8) {
        if let Some(lane) = self.lanes.get(usize::from(lane)) {
            lane.users.add(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Waits until nobody else appends to a lane. With no inode locked.
    pub fn lend(&self, index: u8) -> Lent<'_, H> {
        (index, self.lanes[usize::from(index)].head.write())
    }

    /// Makes sure that an entry with `payload` bytes fits a lane, which is waited for: with no inode locked.
    ///
    /// # Errors
    /// [`Full`] when the ring is.
    #[inline]
    pub fn room<'a>(
        &'a self,
        memory: &'a H::Memory,
        index: u8,
        payload: usize,
    ) -> core::result::Result<Room<'a, H>, Full> {
        self.room_in(memory, self.lend(index), payload)
    }

    /// The same without waiting: if others are appending to it, in another lane in which nobody is, and which has room.
    ///
    /// # Errors
    /// See [`Lack`].
    #[inline]
    pub fn try_room<'a>(
        &'a self,
        memory: &'a H::Memory,
        index: u8,
        payload: usize,
    ) -> core::result::Result<Room<'a, H>, Lack> {
        let count = self.lanes.len() as u8;
        for lane in (index..count).chain(0..index) {
            let Some(head) = self.lanes[usize::from(lane)].head.try_write() else { continue };
            match self.room_in(memory, (lane, head), payload) {
                Ok(room) => return Ok(room),
                // Who has filled his lane does not fill those of others.
                Err(full) if lane == index => return Err(Lack::Full(full)),
                Err(_) => {}
            }
        }
        Err(Lack::Busy(index))
    }

    /// The same with a lane that one has.
    ///
    /// # Errors
    /// [`Full`] when the ring is.
    #[inline]
    pub fn room_in<'a>(
        &'a self,
        memory: &'a H::Memory,
        (index, head): Lent<'a, H>,
        payload: usize,
    ) -> core::result::Result<Room<'a, H>, Full> {
        let lane = &self.lanes[usize::from(index)];
        let lane_bytes = self.descriptor.lane_bytes;
        let need = entry_bytes(payload) as u64;
        let left = lane_bytes - head.at % lane_bytes;
        let need = if left < need { left + need } else { need };
        let end = head.at + need;
        let frontier = end.saturating_sub(lane_bytes);
        if frontier > lane.frontier.load(Ordering::Relaxed) {
            let reclaimed = memory.load(control::reclaim(index.into()), Ordering::Acquire);
            if frontier > reclaimed && !planted(Bug::LaneOverrun) {
                return Err(Full { lane: index, reclaimed });
            }
            // Readers check the frontier after copying: it must move before bytes are overwritten.
            if !planted(Bug::FrontierLate) {
                lane.frontier.store(frontier, Ordering::SeqCst);
            }
            core::sync::atomic::fence(Ordering::Release);
        }
        Ok(Room { head, memory, log: self, index })
    }

    /// Whether the payload at `place` certainly lies there still.
    #[inline]
    pub fn is_intact(&self, place: &Place) -> bool {
        core::sync::atomic::fence(Ordering::Acquire);
        let lane = self.lanes.get(usize::from(place.lane));
        lane.is_some_and(|lane| place.position >= lane.frontier.load(Ordering::Acquire))
    }

    /// Nothing of it is [intact](Self::is_intact) from now on, so that its memory may become other memory; false: somebody
    /// is still in a lane. Nobody is waited for: who has a lane may wait for the one who asks.
    #[must_use]
    pub fn part(&self) -> bool {
        let parted = self.lanes.iter().all(|lane| {
            let head = lane.head.try_write();
            if head.is_some() {
                lane.frontier.store(u64::MAX, Ordering::SeqCst);
            }
            head.is_some()
        });
        core::sync::atomic::fence(Ordering::SeqCst);
        parted
    }

    /// Copies a payload out; whoever does asks [afterwards](Self::is_intact) whether it was all there.
    #[must_use]
    pub fn read(&self, memory: &H::Memory, place: &Place, buf: &mut [u8]) -> bool {
        let in_lane = place.position % self.descriptor.lane_bytes;
        in_lane + buf.len() as u64 <= self.descriptor.lane_bytes
            && memory.read(self.descriptor.lane_offset(place.lane.into()) + in_lane, buf)
    }

    /// Appends an operation, with nobody to look at leases: for clients made by hand.
    ///
    /// # Errors
    /// [`Full`] when the lane is.
    pub fn append(
        &self,
        memory: &H::Memory,
        lane: u8,
        op: &Op<'_>,
        time: u64,
    ) -> core::result::Result<Place, Full> {
        let mut payload = Vec::new();
        let raw = RawHeader { time, ..op.encode(&mut payload) };
        let payload = if let Op::Write { data, .. } = *op { data } else { &payload };
        Ok(self.room(memory, lane, payload.len())?.append(raw, payload).persist())
    }
}

impl<'a, H: Host> Room<'a, H> {
    /// Appends an entry in one go; `raw` lacks sequence, lane and length, and the epoch unless it is to be another than
    /// the current one. The service may read it from now on; it is persistent after [`Written::persist`].
    ///
    /// The sequence comes first here: a locked instruction behind the payload would wait for its streaming stores, which
    /// drain while the header is made and the author does what is left to do.
    #[inline]
    pub fn append(mut self, mut raw: RawHeader, payload: &[u8]) -> Written<'a, H> {
        let at = self.number(&mut raw, payload.len());
        let mut seal = raw.begin(self.log.descriptor.incarnation);
        seal.add_summed(|crc| self.store(at + HEADER_BYTES as u64, payload, crc));
        self.end(at, &seal.end(), &raw)
    }

    /// Stores the payload of the entry to come, which has no number yet.
    #[inline]
    pub fn put(mut self, payload: &[u8]) -> Filled<'a, H> {
        let pad = if planted(Bug::PadForgotten) { 0 } else { self.pad(payload.len()) };
        let at = self.place(self.head.at + pad);
        let crc = self.store(at + HEADER_BYTES as u64, payload, 0);
        Filled { room: self, length: payload.len(), crc }
    }

    /// Where in the segment a position of the lane is.
    fn place(&self, position: u64) -> u64 {
        let Descriptor { lane_bytes, .. } = self.log.descriptor;
        self.log.descriptor.lane_offset(self.index.into()) + position % lane_bytes
    }

    /// Bytes up to the lane's end, if an entry does not fit before it.
    fn pad(&self, length: usize) -> u64 {
        let Descriptor { lane_bytes, .. } = self.log.descriptor;
        let left = lane_bytes - self.head.at % lane_bytes;
        if left < entry_bytes(length) as u64 { left } else { 0 }
    }

    /// Gives the next entry its number, behind a pad if it needs one; where it lies in the segment.
    #[inline]
    fn number(&mut self, raw: &mut RawHeader, length: usize) -> u64 {
        let Descriptor { incarnation, epoch, .. } = self.log.descriptor;
        raw.lane = self.index;
        if raw.epoch == 0 {
            raw.epoch = self.memory.load(control::EPOCH, Ordering::Relaxed) as u32;
            debug_assert!(Epoch(raw.epoch) >= epoch);
        }
        let left = self.pad(length);
        if left > 0 {
            let pad = RawHeader {
                op: op::PAD,
                length: (left - HEADER_BYTES as u64) as u32,
                sequence: self.log.next.add(1, Ordering::Relaxed),
                lane: raw.lane,
                epoch: raw.epoch,
                ..RawHeader::default()
            };
            let at = self.place(self.head.at);
            self.memory.write_persistent(at, &pad.seal(incarnation, &[]));
            self.head.at += left;
        }
        raw.length = length as u32;
        raw.sequence = self.log.next.add(1, Ordering::Relaxed);
        self.place(self.head.at)
    }

    /// Stores a payload, and continues a sum over it.
    #[inline]
    fn store(&mut self, mut to: u64, payload: &[u8], crc: u32) -> u32 {
        let (done, mut crc) = self.memory.write_summed(to, payload, crc);
        to += done as u64;
        for piece in payload[done..].chunks(STAGE) {
            let lines = piece.len().next_multiple_of(64);
            let stage = &mut self.head.stage.0;
            stage[..piece.len()].copy_from_slice(piece);
            stage[piece.len()..lines].fill(0);
            H::copied(&mut stage[..piece.len()]);
            // Nobody may take the caller's memory for this copy of it.
            let stage = black_box(&*stage);
            self.memory.write_persistent(to, &stage[..lines]);
            let summed = if planted(Bug::SummedElsewhere) { piece } else { &stage[..piece.len()] };
            crc = crc32c(crc, summed);
            to += lines as u64;
        }
        crc
    }

    /// Stores the header, last.
    #[inline]
    fn end(mut self, at: u64, header: &[u8; HEADER_BYTES], raw: &RawHeader) -> Written<'a, H> {
        let position = self.head.at + HEADER_BYTES as u64;
        self.memory.write_persistent(at, header);
        self.memory.wrote_entry(at);
        self.head.at += entry_bytes(raw.length as usize) as u64;
        let sequence = Sequence(raw.sequence);
        let place = Place { lane: self.index, position, sequence };
        Written { _lane: self.head, memory: self.memory, place }
    }
}

impl<'a, H: Host> Filled<'a, H> {
    /// Makes it an entry: as [`Room::append`].
    #[inline]
    pub fn commit(self, mut raw: RawHeader) -> Written<'a, H> {
        let Self { mut room, length, crc } = self;
        let at = room.number(&mut raw, length);
        let mut seal = raw.begin(room.log.descriptor.incarnation);
        seal.add_joined(crc, raw.length);
        room.end(at, &seal.end(), &raw)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use base::{ClientId, NodeId};

    use super::super::over_media::ByHand;
    use super::*;

    fn log(lanes: u32) -> Log<ByHand> {
        Log::new(Descriptor {
            client: ClientId(1),
            incarnation: 7,
            lanes,
            lane_bytes: 8 << 20,
            first_sequence: Sequence(1),
            node: NodeId(1),
            epoch: Epoch(1),
            arena_bytes: 1 << 20,
            keeps: false,
        })
    }

    #[test]
    fn many_descriptors_share_the_lanes_evenly_and_few_use_few() {
        let log = log(8);
        assert_eq!([log.enlist(), log.enlist(), log.enlist()], [0, 1, 2]);
        log.discharge(1);
        assert_eq!(log.enlist(), 1, "what was given back is used before what never was");
        let mut users = [1, 1, 1, 0, 0, 0, 0, 0];
        for _ in 0..3997 {
            users[usize::from(log.enlist())] += 1;
        }
        assert_eq!(users, [500; 8]);
        let mut random = base::random::Random::new(1);
        for _ in 0..3000 {
            let lane = random.below(8) as u8;
            if users[usize::from(lane)] > 0 {
                users[usize::from(lane)] -= 1;
                log.discharge(lane);
            }
        }
        for _ in 0..3000 {
            users[usize::from(log.enlist())] += 1;
        }
        let (least, most) = (users.iter().min(), users.iter().max());
        assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "{users:?}");
    }
}
