//! How far a log has been read, apart from all else that is known of its client: so that reading on can be work for another thread.
//! What is read is a copy, and only the copy is judged.

use base::planted::{Bug, planted};
use base::{InodeId, Sequence};
use storage::format::control::Descriptor;
use storage::format::entry::{
    self, HEADER_BYTES, claimed_length, claimed_sequence, entry_bytes, op,
};
use storage::media::{Media, MediaError, Segment};

use super::{Batch, Mark};
use crate::core::frame::Checked;

/// See the module.
#[derive(Clone, Debug)]
pub(in crate::core) struct Reader {
    pub(super) log: Segment,
    pub(super) descriptor: Descriptor,
    /// How far each lane was read.
    pub(super) lanes: Vec<u64>,
    /// The sequence expected next.
    pub(super) next: u64,
    /// When the client is expelled, the last sequence that counts; the word of that name is the client's to spoil.
    pub(super) sealed_at: Option<u64>,
    /// The lane in which something claims to be the next entry, and is not whole.
    pub(super) unsound: Option<usize>,
    /// Bytes that were found last.
    fetched: usize,
}

/// What became of the next entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// It was taken.
    Taken,
    /// It does not count, or there is no room for it.
    Left,
    /// There is none, or it is not whole.
    Missing,
}

/// Where an entry lies, and what it says, as it was copied and checked: what lies in the log may have changed since. (A pad is not
/// copied, is promised nothing, and is of no inode.)
pub(super) fn mark_of(seq: u64, lane: usize, start: u64, end: u64, copy: &[u8]) -> Mark {
    let head = copy.first_chunk();
    let promised = head.map_or(0, entry::claimed_promise);
    let of = head.map_or((InodeId::NONE, InodeId::NONE), entry::claimed_inodes);
    Mark { seq, lane, start, end, promised, of }
}

impl Reader {
    /// At the beginning of a log.
    pub(super) fn new(log: Segment, descriptor: Descriptor) -> Self {
        let lanes = vec![0; descriptor.lanes as usize];
        let next = descriptor.first_sequence.0;
        Self { log, descriptor, lanes, next, sealed_at: None, unsound: None, fetched: 0 }
    }

    /// Bytes that the log can hold at one time.
    pub(super) const fn capacity(&self) -> u64 {
        self.descriptor.lanes as u64 * self.descriptor.lane_bytes
    }

    /// Header at the lane's position if there is one.
    pub(super) fn peek(
        &self,
        media: &dyn Media,
        lane: usize,
    ) -> Result<Option<[u8; HEADER_BYTES]>, MediaError> {
        self.peek_at(media, lane, self.lanes[lane])
    }

    pub(super) fn peek_at(
        &self,
        media: &dyn Media,
        lane: usize,
        position: u64,
    ) -> Result<Option<[u8; HEADER_BYTES]>, MediaError> {
        let in_lane = position % self.descriptor.lane_bytes;
        let mut head = [0u8; HEADER_BYTES];
        media.read(self.log, self.descriptor.lane_offset(lane) + in_lane, &mut head)?;
        Ok((head[20] != 0).then_some(head))
    }

    /// A lane from `from` on whose next entry claims the next sequence.
    pub(super) fn claims_next(
        &self,
        media: &dyn Media,
        from: usize,
    ) -> Result<Option<(usize, [u8; HEADER_BYTES])>, MediaError> {
        for lane in from..self.lanes.len() {
            if let Some(head) = self.peek(media, lane)?
                && claimed_sequence(&head) == self.next
            {
                return Ok(Some((lane, head)));
            }
        }
        Ok(None)
    }

    /// Whether entries that claim to come next, `most` of them at most, claim to be longer than `bytes` together. (Nobody has looked
    /// whether they are whole.)
    pub(super) fn holds_more_than(
        &self,
        media: &dyn Media,
        bytes: usize,
        most: u64,
    ) -> Result<bool, MediaError> {
        let (mut ahead, mut found) = (self.clone(), 0);
        for _ in 0..most {
            let Some((lane, head)) = ahead.claims_next(media, 0)? else { return Ok(false) };
            let Some(payload) = claimed_length(&head) else { return Ok(false) };
            let total = entry_bytes(payload);
            if ahead.lanes[lane] % self.descriptor.lane_bytes + total as u64
                > self.descriptor.lane_bytes
            {
                return Ok(false);
            }
            if head[20] != op::PAD {
                found += total;
            }
            if found > bytes {
                return Ok(true);
            }
            ahead.lanes[lane] += total as u64;
            ahead.next += 1;
        }
        Ok(false)
    }

    /// Appends the entry (header and payload, whole lines) to `out` and checks it; `Some(total)`
    /// with the bytes it takes in the lane when it is whole.
    pub(super) fn copy_entry_at(
        &self,
        media: &dyn Media,
        (lane, position): (usize, u64),
        head: &[u8; HEADER_BYTES],
        out: &mut Vec<u8>,
    ) -> Result<Option<u64>, MediaError> {
        let lane_bytes = self.descriptor.lane_bytes;
        let in_lane = position % lane_bytes;
        let Some(payload) = claimed_length(head) else { return Ok(None) };
        let total = entry_bytes(payload) as u64;
        if in_lane + total > lane_bytes {
            return Ok(None);
        }
        let start = out.len();
        if head[20] == op::PAD {
            out.extend_from_slice(head);
            let good = entry::decode(&out[start..], self.descriptor.incarnation).is_ok()
                && in_lane + total == lane_bytes;
            out.truncate(start);
            return Ok(good.then_some(total));
        }
        let at = self.descriptor.lane_offset(lane) + in_lane;
        media.append(self.log, at, total as usize, out)?;
        match entry::decode(&out[start..], self.descriptor.incarnation) {
            // The copy is what counts: a program may have changed the header since it was looked at.
            Ok((header, _))
                if usize::from(header.lane) == lane
                    && header.sequence.0 == claimed_sequence(head)
                    && entry_bytes(header.length as usize) as u64 == total =>
            {
                Ok(Some(total))
            }
            _ => {
                out.truncate(start);
                Ok(None)
            }
        }
    }

    /// An empty batch that begins with the next entry.
    pub(super) fn begin(&self, max: usize) -> Batch {
        let raw = Checked::none(self.descriptor.incarnation, self.fetched.min(max));
        let (first, last) = (Sequence(self.next), Sequence(0));
        Batch { raw, first, last, taken: 0, marks: Vec::new() }
    }

    /// The batch is full, or the log at its end: what comes next is mostly as long.
    pub(super) fn end(&mut self, batch: &Batch) {
        self.fetched = batch.raw.len();
    }

    /// Copies complete entries in sequence, up to `max` bytes but one at least.
    pub(in crate::core) fn read(
        &mut self,
        media: &dyn Media,
        max: usize,
    ) -> Result<Batch, MediaError> {
        let mut batch = self.begin(max);
        while batch.taken < self.capacity()
            && self.read_next(media, &mut batch, max)? == Next::Taken
        {}
        self.end(&batch);
        Ok(batch)
    }

    pub(super) fn read_next(
        &mut self,
        media: &dyn Media,
        batch: &mut Batch,
        max: usize,
    ) -> Result<Next, MediaError> {
        self.unsound = None;
        let mut claim = self.claims_next(media, 0)?;
        while let Some((lane, head)) = claim {
            let next = self.read_one(media, batch, max, (lane, &head))?;
            if next != Next::Missing {
                self.unsound = None;
                return Ok(next);
            }
            // Where nothing was appended since the last lap lie bytes of programs, which may look like
            // this; the entry may be in a lane behind.
            self.unsound = self.unsound.or(Some(lane));
            claim = self.claims_next(media, lane + 1)?;
        }
        Ok(Next::Missing)
    }

    /// Takes the entry whose header that is, if it is whole.
    pub(super) fn read_one(
        &mut self,
        media: &dyn Media,
        batch: &mut Batch,
        max: usize,
        (lane, head): (usize, &[u8; HEADER_BYTES]),
    ) -> Result<Next, MediaError> {
        let seq = claimed_sequence(head);
        if self.sealed_at.is_some_and(|s| seq > s) {
            return Ok(Next::Left);
        }
        let len = claimed_length(head).unwrap_or(0);
        // One entry always fits: it may be longer than `max`, and would never be fetched.
        let some = !batch.raw.is_empty() || planted(Bug::BatchLimit);
        let full = some && batch.raw.len() + entry_bytes(len) > max;
        if head[20] != op::PAD && full {
            return Ok(Next::Left);
        }
        let (copied, start) = (batch.raw.len(), self.lanes[lane]);
        let Some(total) = self.copy_entry_at(media, (lane, start), head, batch.raw.end())? else {
            return Ok(Next::Missing);
        };
        self.lanes[lane] += total;
        self.next = seq + 1;
        let copy = &batch.raw.body()[copied..];
        batch.marks.push(mark_of(seq, lane, start, start + total, copy));
        batch.last = Sequence(seq);
        batch.taken += total;
        Ok(Next::Taken)
    }
}
