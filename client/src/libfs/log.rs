//! Appending to the log: the one writer of it, for LibFS and for whoever else speaks the protocol of the
//! control area (tests, crash states, hostile clients).
//!
//! A lane is a ring: `head` is the position after the last entry; the position that may not be passed is a lap
//! behind what the service has reclaimed.
//!
//! Invariants: positions only grow; `head <= frontier + lane_bytes`; an entry never wraps (a Pad
//! fills the end of a lap); bytes at positions below `frontier` may have been overwritten.

use alloc::vec::Vec;
use core::hint::black_box;
use core::sync::atomic::Ordering;

use base::planted::{Bug, planted};
use base::{Epoch, Sequence};
use storage::format::control::{self, Descriptor};
use storage::format::entry::{HEADER_BYTES, Op, RawHeader, entry_bytes, op};

use super::host::{Host, Memory};
use super::sync::{RwLock, Word, WriteGuard};

/// Bytes that pass from a payload into the log at once, by way of the stage: what stays in the first cache.
const STAGE: usize = 4096;

/// The log of one attachment.
#[derive(Debug)]
pub struct Log<H: Host> {
    descriptor: Descriptor,
    lanes: Vec<Lane<H>>,
    /// The next sequence.
    next: Word<H>,
}

/// One lane as its client sees it.
#[derive(Debug)]
struct Lane<H: Host> {
    head: RwLock<Head, H>,
    /// Everything below may be overwritten; readers of log bytes check against it afterwards.
    frontier: Word<H>,
}

#[derive(Debug)]
struct Head {
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

/// The lock of a lane with room for one entry.
#[derive(Debug)]
pub struct Room<'a, H: Host> {
    head: WriteGuard<'a, Head, H>,
    memory: &'a H::Memory,
    log: &'a Log<H>,
    index: u8,
}

impl<H: Host> Log<H> {
    /// The empty log that the descriptor tells of.
    pub fn new(descriptor: Descriptor) -> Self {
        let lane = |_| Lane {
            head: RwLock::new(Head { at: 0, stage: Stage([0; STAGE]) }),
            frontier: Word::new(0),
        };
        Self {
            lanes: (0..descriptor.lanes).map(lane).collect(),
            next: Word::new(descriptor.first_sequence.0),
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

    /// The lane for a thread or handle with hint `hint`.
    pub fn lane_of(&self, hint: u64) -> u8 {
        (hint % self.lanes.len() as u64) as u8
    }

    /// Takes a lane and makes sure that an entry with `payload` bytes fits.
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
        let lane = &self.lanes[usize::from(index)];
        let head = lane.head.write();
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

    /// Nothing of it is [intact](Self::is_intact) from now on, so that its memory may become other memory.
    pub fn part(&self) {
        for lane in &self.lanes {
            let _head = lane.head.write();
            lane.frontier.store(u64::MAX, Ordering::SeqCst);
        }
        core::sync::atomic::fence(Ordering::SeqCst);
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
    /// Appends an entry; `raw` lacks sequence, lane and length, and the epoch unless it is to be another than
    /// the current one. The service may read it from now on; it is persistent after [`Written::persist`].
    #[inline]
    pub fn append(mut self, mut raw: RawHeader, payload: &[u8]) -> Written<'a, H> {
        let Descriptor { lane_bytes, incarnation, epoch, .. } = self.log.descriptor;
        raw.lane = self.index;
        if raw.epoch == 0 {
            raw.epoch = self.memory.load(control::EPOCH, Ordering::Relaxed) as u32;
            debug_assert!(Epoch(raw.epoch) >= epoch);
        }
        let base = self.log.descriptor.lane_offset(self.index.into());
        let left = lane_bytes - self.head.at % lane_bytes;
        if left < entry_bytes(payload.len()) as u64 {
            let pad = RawHeader {
                op: op::PAD,
                length: (left - HEADER_BYTES as u64) as u32,
                sequence: self.log.next.add(1, Ordering::Relaxed),
                lane: raw.lane,
                epoch: raw.epoch,
                ..RawHeader::default()
            };
            let at = base + self.head.at % lane_bytes;
            self.memory.write_persistent(at, &pad.seal(incarnation, &[]));
            self.head.at += left;
        }
        raw.length = payload.len() as u32;
        raw.sequence = self.log.next.add(1, Ordering::Relaxed);
        let position = self.head.at + HEADER_BYTES as u64;
        let at = base + self.head.at % lane_bytes;
        // Payload first: its streaming stores drain while the checksum is computed.
        let mut seal = raw.begin(incarnation);
        let mut to = at + HEADER_BYTES as u64;
        let done = seal.add_summed(|crc| self.memory.write_summed(to, payload, crc));
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
            seal.add(if planted(Bug::SummedElsewhere) { piece } else { &stage[..piece.len()] });
            to += lines as u64;
        }
        self.memory.write_persistent(at, &seal.end());
        self.memory.wrote_entry(at);
        self.head.at += entry_bytes(payload.len()) as u64;
        let sequence = Sequence(raw.sequence);
        let place = Place { lane: self.index, position, sequence };
        Written { _lane: self.head, memory: self.memory, place }
    }
}
