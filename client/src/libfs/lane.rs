//! Appending to the log. A lane is a ring: `head` is the position after the last entry, `limit`
//! the position that may not be passed because what lies a lap behind it is not reclaimed.
//!
//! Invariants: positions only grow; `head <= frontier + lane_bytes`; an entry never wraps (a Pad
//! fills the end of a lap); bytes at positions below `frontier` may have been overwritten.

use core::sync::atomic::{AtomicU64, Ordering};

use base::{Epoch, Sequence};
use storage::format::control;
use storage::format::entry::{HEADER_BYTES, RawHeader, entry_bytes, op};
use storage::persist;

use super::segment::Segment;
use super::sync::{RwLock, WriteGuard};

/// One lane as its client sees it.
#[derive(Debug, Default)]
pub struct Lane {
    head: RwLock<u64>,
    /// Everything below may be overwritten; readers of log bytes check against it afterwards.
    frontier: AtomicU64,
}

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

/// An entry that is written but not yet persistent: the streaming stores drain while its author
/// does what is left to do, without waiting for anything; then it calls [`Written::persist`].
/// The lane is locked until then.
#[derive(Debug)]
#[must_use = "the entry is not persistent before `persist`"]
pub struct Written<'a> {
    _lane: WriteGuard<'a, u64>,
    /// Where it lies.
    pub place: Place,
}

impl Written<'_> {
    /// Makes the entry persistent (in the sense of the region): one fence.
    #[inline]
    pub fn persist(self) -> Place {
        persist::fence();
        self.place
    }
}

/// The lock of a lane with room for one entry.
#[derive(Debug)]
pub struct Room<'a> {
    head: WriteGuard<'a, u64>,
    lane: &'a Lane,
    index: u8,
}

impl Lane {
    /// Takes the lane and makes sure that an entry with `payload` bytes fits; when the ring is full,
    /// how far it was reclaimed (wait for the service to reclaim more, then try again).
    pub fn room(
        &self,
        segment: &Segment,
        index: u8,
        payload: usize,
    ) -> core::result::Result<Room<'_>, u64> {
        let head = self.head.write();
        let lane_bytes = segment.descriptor.lane_bytes;
        let need = entry_bytes(payload) as u64;
        let left = lane_bytes - *head % lane_bytes;
        let need = if left < need { left + need } else { need };
        let end = *head + need;
        let frontier = end.saturating_sub(lane_bytes);
        if frontier > self.frontier.load(Ordering::Relaxed) {
            let reclaimed = segment.word(control::reclaim(index.into())).load(Ordering::Acquire);
            if frontier > reclaimed {
                return Err(reclaimed);
            }
            // Readers check the frontier after copying: it must move before bytes are overwritten.
            self.frontier.store(frontier, Ordering::SeqCst);
            core::sync::atomic::fence(Ordering::Release);
        }
        Ok(Room { head, lane: self, index })
    }

    /// Whether bytes at `position` are certainly still the entry's.
    #[inline]
    pub fn intact(&self, position: u64) -> bool {
        core::sync::atomic::fence(Ordering::Acquire);
        position >= self.frontier.load(Ordering::Acquire)
    }
}

impl<'a> Room<'a> {
    /// Appends an entry; `raw` lacks sequence, epoch, lane and length. The service may read it from
    /// now on; it is persistent after [`Written::persist`].
    pub fn append(
        mut self,
        segment: &Segment,
        next: &AtomicU64,
        mut raw: RawHeader,
        payload: &[u8],
    ) -> Written<'a> {
        let lane_bytes = segment.descriptor.lane_bytes;
        let incarnation = segment.descriptor.incarnation;
        raw.lane = self.index;
        raw.epoch = segment.word(control::EPOCH).load(Ordering::Relaxed) as u32;
        debug_assert!(Epoch(raw.epoch) >= segment.descriptor.epoch);
        let lane = usize::from(self.index);
        let left = lane_bytes - *self.head % lane_bytes;
        if left < entry_bytes(payload.len()) as u64 {
            let pad = RawHeader {
                op: op::PAD,
                length: (left - HEADER_BYTES as u64) as u32,
                sequence: next.fetch_add(1, Ordering::Relaxed),
                lane: raw.lane,
                epoch: raw.epoch,
                ..RawHeader::default()
            };
            segment.lane_write(lane, *self.head, &pad.seal(incarnation, &[]));
            *self.head += left;
        }
        raw.length = payload.len() as u32;
        raw.sequence = next.fetch_add(1, Ordering::Relaxed);
        let position = *self.head + HEADER_BYTES as u64;
        // Payload first: its streaming stores drain while the checksum is computed.
        let whole = payload.len() & !63;
        segment.lane_write(lane, position, &payload[..whole]);
        if whole < payload.len() {
            let mut tail = [0u8; 64];
            tail[..payload.len() - whole].copy_from_slice(&payload[whole..]);
            segment.lane_write(lane, position + whole as u64, &tail);
        }
        segment.lane_write(lane, *self.head, &raw.seal(incarnation, &[payload]));
        *self.head += entry_bytes(payload.len()) as u64;
        debug_assert!(self.lane.frontier.load(Ordering::Relaxed) + lane_bytes >= *self.head);
        let sequence = Sequence(raw.sequence);
        let place = Place { lane: self.index, position, sequence };
        Written { _lane: self.head, place }
    }
}
