//! The client's log: which entries are whole, in which order they count, and whether it goes on.

use std::ops::Range;

use base::planted::{Bug, planted};
use base::{Nanos, Sequence};
use storage::format::entry::{
    self, HEADER_BYTES, claimed_length, claimed_sequence, entry_bytes, op,
};
use storage::limits::{LANES_MAX, OP_SLOTS};
use storage::media::MediaError;

use super::{Batch, Client, Mark, Standing};
use crate::core::frame::Checked;

/// A log that has not gone on for so long is looked into; and after the same time again it is given
/// up. Stores need nanoseconds to arrive; this is for the service's own sake, which may have been stopped.
const STANDS: Nanos = 100_000_000;

/// Blocks that an entry was promised, as it was copied and checked: what lies in the log may have changed since. (A pad
/// is not copied, and needs none.)
fn promise_of(copy: &[u8]) -> u64 {
    copy.first_chunk().map_or(0, entry::claimed_promise)
}

impl Client {
    /// Finds the ends of the entries that are settled and were not published when the positions
    /// were written down. Entries of an earlier lap, which lie where nothing was appended since,
    /// have lower sequences.
    pub(super) fn find_settled(&mut self, lanes: &[u64; LANES_MAX]) -> Result<(), MediaError> {
        let mut marks = Vec::new();
        let mut scratch = Vec::new();
        for (lane, begin) in lanes.iter().copied().enumerate().take(self.lanes.len()) {
            self.lanes[lane] = begin;
            let mut before = self.published.0;
            while self.lanes[lane] - begin < self.descriptor.lane_bytes
                && let Some(head) = self.peek(lane)?
            {
                let seq = claimed_sequence(&head);
                if seq <= before || seq > self.settled.0 {
                    break;
                }
                scratch.clear();
                let Some(total) = self.copy_entry(lane, &head, &mut scratch)? else { break };
                let start = self.lanes[lane];
                let promised = promise_of(&scratch);
                marks.push(Mark { seq, lane, start, end: start + total, promised });
                self.lanes[lane] += total;
                before = seq;
            }
        }
        marks.sort_by_key(|m| m.seq);
        self.marks = marks.into();
        self.next = self.settled.0 + 1;
        Ok(())
    }

    /// Next sequence expected.
    pub const fn next(&self) -> Sequence {
        Sequence(self.next)
    }

    /// Header at the lane's position if it may be the entry with sequence `seq`.
    fn peek(&self, lane: usize) -> Result<Option<[u8; HEADER_BYTES]>, MediaError> {
        self.peek_at(lane, self.lanes[lane])
    }

    fn peek_at(
        &self,
        lane: usize,
        position: u64,
    ) -> Result<Option<[u8; HEADER_BYTES]>, MediaError> {
        let in_lane = position % self.descriptor.lane_bytes;
        let mut head = [0u8; HEADER_BYTES];
        self.media.read(self.log(), self.descriptor.lane_offset(lane) + in_lane, &mut head)?;
        Ok((head[20] != 0).then_some(head))
    }

    /// A lane from `from` on whose next entry claims the next sequence.
    pub(super) fn claims_next(
        &self,
        from: usize,
    ) -> Result<Option<(usize, [u8; HEADER_BYTES])>, MediaError> {
        for lane in from..self.lanes.len() {
            if let Some(head) = self.peek(lane)?
                && claimed_sequence(&head) == self.next
                && self.next != u64::MAX
            {
                return Ok(Some((lane, head)));
            }
        }
        Ok(None)
    }

    /// Of a dead client's whole entries the one with the smallest sequence beyond the next: what is
    /// missing was never completed.
    fn smallest_later(&self) -> Result<Option<(usize, [u8; HEADER_BYTES])>, MediaError> {
        let mut best: Option<(u64, usize, [u8; HEADER_BYTES])> = None;
        for lane in 0..self.lanes.len() {
            let Some(head) = self.peek(lane)? else { continue };
            let seq = claimed_sequence(&head);
            // Nothing could come after the largest.
            let later = seq > self.next && seq != u64::MAX;
            if later
                && best.is_none_or(|(s, _, _)| seq < s)
                && self.is_whole(lane, self.lanes[lane], &head)?
            {
                best = Some((seq, lane, head));
            }
        }
        Ok(best.map(|(_, lane, head)| (lane, head)))
    }

    fn is_whole(
        &self,
        lane: usize,
        position: u64,
        head: &[u8; HEADER_BYTES],
    ) -> Result<bool, MediaError> {
        Ok(self.copy_entry_at(lane, position, head, &mut Vec::new())?.is_some())
    }

    fn copy_entry(
        &self,
        lane: usize,
        head: &[u8; HEADER_BYTES],
        out: &mut Vec<u8>,
    ) -> Result<Option<u64>, MediaError> {
        self.copy_entry_at(lane, self.lanes[lane], head, out)
    }

    /// Appends the entry (header and payload, whole lines) to `out` and checks it; `Some(total)`
    /// with the bytes it takes in the lane when it is whole.
    fn copy_entry_at(
        &self,
        lane: usize,
        position: u64,
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
        self.media.append(self.log(), at, total as usize, out)?;
        match entry::decode(&out[start..], self.descriptor.incarnation) {
            Ok((header, _)) if usize::from(header.lane) == lane => Ok(Some(total)),
            _ => {
                out.truncate(start);
                Ok(None)
            }
        }
    }

    /// Bytes that the log can hold at one time.
    pub const fn capacity(&self) -> u64 {
        self.descriptor.lanes as u64 * self.descriptor.lane_bytes
    }

    /// Copies complete entries in sequence, up to `max` bytes but one at least.
    pub fn fetch(&mut self, max: usize) -> Result<Batch, MediaError> {
        let raw = Checked::none(self.descriptor.incarnation, self.fetched.min(max));
        let mut batch = Batch { raw, first: Sequence(self.next), last: Sequence(0), taken: 0 };
        while batch.taken < self.capacity() && self.fetch_next(&mut batch, max)? {}
        // What comes next is mostly as long.
        self.fetched = batch.raw.len();
        Ok(batch)
    }

    fn fetch_next(&mut self, batch: &mut Batch, max: usize) -> Result<bool, MediaError> {
        self.unsound = None;
        let mut claim = self.claims_next(0)?;
        while let Some((lane, head)) = claim {
            if let Some(taken) = self.fetch_one(batch, max, lane, &head)? {
                self.unsound = None;
                return Ok(taken);
            }
            // Where nothing was appended since the last lap lie bytes of programs, which may look like
            // this; the entry may be in a lane behind.
            self.unsound = self.unsound.or(Some(lane));
            claim = self.claims_next(lane + 1)?;
        }
        if !(self.gone || self.expelled) || self.unsound.is_some() && !self.died_in_it()? {
            return Ok(false);
        }
        match self.smallest_later()? {
            Some((lane, head)) => Ok(self.fetch_one(batch, max, lane, &head)?.unwrap_or(false)),
            None => Ok(false),
        }
    }

    /// Takes the entry; `Some(false)`: not now. `None`: it is not whole.
    fn fetch_one(
        &mut self,
        batch: &mut Batch,
        max: usize,
        lane: usize,
        head: &[u8; HEADER_BYTES],
    ) -> Result<Option<bool>, MediaError> {
        let seq = claimed_sequence(head);
        if self.sealed_at.is_some_and(|s| seq > s) {
            return Ok(Some(false));
        }
        let len = claimed_length(head).unwrap_or(0);
        // One entry always fits: it may be longer than `max`, and would never be fetched.
        let some = !batch.raw.is_empty() || planted(Bug::BatchLimit);
        let full = some && batch.raw.len() + entry_bytes(len) > max;
        if head[20] != op::PAD && full {
            return Ok(Some(false));
        }
        let copied = batch.raw.len();
        let Some(total) = self.copy_entry(lane, head, batch.raw.end())? else { return Ok(None) };
        // The copy is what counts: its sequence must be the one expected, too.
        let start = self.lanes[lane];
        self.lanes[lane] += total;
        self.next = seq + 1;
        let promised = promise_of(&batch.raw.body()[copied..]);
        self.marks.push_back(Mark { seq, lane, start, end: start + total, promised });
        if seq <= self.settled.0 {
            self.use_room(promised);
        }
        batch.last = Sequence(seq);
        batch.taken += total;
        Ok(Some(true))
    }

    /// Whether something claims to be the next entry and is not whole.
    pub const fn is_unsound(&self) -> bool {
        self.unsound.is_some()
    }

    /// Whether whole entries, of operations that have ended, lie behind one that is still to be written. (Not of a client
    /// that has ended: nobody will.)
    pub fn has_gap(&self) -> Result<bool, MediaError> {
        let ended = self.gone || self.expelled;
        Ok(!ended && self.entries_behind(self.all_lanes(), 1)? > 0)
    }

    /// Whether a lane goes on with something that claims to come later: an entry behind one that is missing, whose bytes have
    /// not all arrived, or bytes of an earlier lap.
    pub fn claims_later(&self) -> Result<bool, MediaError> {
        // Numbers that other threads can have at one time.
        let later = self.next + 1..=self.next.saturating_add(OP_SLOTS as u64);
        for lane in self.all_lanes() {
            if self.peek(lane)?.is_some_and(|head| later.contains(&claimed_sequence(&head))) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an entry of a dead client that is not whole was being written when it died: then the entries
    /// of its other threads count all the same. Else it had returned, and what came after it may
    /// build on it.
    fn died_in_it(&self) -> Result<bool, MediaError> {
        let Some(lane) = self.unsound else { return Ok(false) };
        Ok(!self.odd_words().is_empty() && self.entries_behind(lane..lane + 1, 1)? == 0)
    }

    /// Whole entries behind the place where the log does not go on, up to `most`.
    fn entries_behind(&self, lanes: Range<usize>, most: u64) -> Result<u64, MediaError> {
        let mut found = 0;
        for lane in lanes {
            let begin = self.lanes[lane];
            let (mut at, mut before) = (begin, self.next);
            while found < most
                && at - begin < self.descriptor.lane_bytes
                && let Some(head) = self.peek_at(lane, at)?
            {
                let seq = claimed_sequence(&head);
                let missing = at == begin && seq == self.next;
                if !missing && (seq <= before || !self.is_whole(lane, at, &head)?) {
                    break;
                }
                found += u64::from(!missing);
                at += entry_bytes(claimed_length(&head).unwrap_or(0)) as u64;
                before = seq;
            }
        }
        Ok(found)
    }

    const fn all_lanes(&self) -> Range<usize> {
        0..self.lanes.len()
    }

    /// The log was read to its end, as far as it can be: notes whether it should go on.
    pub fn note_standing(&mut self, now: Nanos) {
        let handed_out = self.unsound.is_some() || self.last_sequence().0 >= self.next;
        if self.gone || self.expelled || !handed_out {
            self.standing = None;
        } else if self.standing.as_ref().is_none_or(|s| s.next != self.next) {
            self.standing = Some(Standing { next: self.next, since: now, inside: None });
        }
    }

    /// Whether the log will never go on: more was handed out than it holds, and since that was seen every
    /// operation that was under way has ended. (One whose thread is stopped ends when it goes on.)
    /// To be asked now and then; the log is to be read once more before the answer is believed.
    pub fn stands_for_ever(&mut self, now: Nanos) -> Result<bool, MediaError> {
        let Some(mut seen) = self.standing.take() else { return Ok(false) };
        if self.gone || self.expelled || seen.next != self.next {
            return Ok(false);
        }
        let waited = now >= seen.since + STANDS;
        match &mut seen.inside {
            None if waited => {
                // What looks like an entry may be bytes of an earlier lap: others must lie behind it, or
                // the client must say that there are.
                if self.last_sequence().0 < self.next
                    && self.entries_behind(self.all_lanes(), 1)? == 0
                {
                    seen.since = now;
                } else {
                    seen = Standing { since: now, inside: Some(self.inside()), ..seen };
                }
            }
            None => {}
            Some(inside) => inside.retain(|operation| self.still_inside(*operation)),
        }
        let over = waited && seen.inside.as_ref().is_some_and(Vec::is_empty) && now > seen.since;
        self.standing = Some(seen);
        Ok(over)
    }

    /// Why the log does not go on, in words.
    pub fn standing_words(&self) -> Result<String, MediaError> {
        let behind = self.entries_behind(self.all_lanes(), 1000)?;
        let many = if behind < 1000 { "" } else { "more than " };
        Ok(match self.unsound {
            Some(lane) => format!(
                "operation {} in lane {lane} of its log fails its checksum, and nobody is about to complete it; \
                 {many}{behind} operations lie behind it",
                self.next
            ),
            None => format!(
                "operation {} is missing in its log, and nobody is about to write it; {many}{behind} operations \
                 lie behind it",
                self.next
            ),
        })
    }

    /// Of a dead client whose log was read as far as it goes: what it ends with if that is no end. Once.
    pub fn broken_end(&mut self) -> Result<Option<String>, MediaError> {
        let broken = self.gone && !self.expelled && self.unsound.is_some();
        if self.end_told || !broken || self.died_in_it()? {
            return Ok(None);
        }
        self.end_told = true;
        self.standing_words().map(Some)
    }

    /// After a change of the head: entries that were fetched but are not settled are fetched again.
    pub fn rewind(&mut self) {
        while let Some(mark) = self.marks.back()
            && mark.seq > self.settled.0
        {
            self.lanes[mark.lane] = self.lanes[mark.lane].min(mark.start);
            self.marks.pop_back();
        }
        // Settled may be ahead of what was fetched again: the lanes stand where `next` says.
        let settled = self.settled.0 + 1;
        self.next = if planted(Bug::RewindAhead) { settled } else { self.next.min(settled) };
        self.tell_closed_again();
    }

    /// Starts write-back of what was fetched and is not published (disk regions, chain of one).
    pub fn persist(&self) -> Result<(), MediaError> {
        for mark in &self.marks {
            let at =
                self.descriptor.lane_offset(mark.lane) + mark.start % self.descriptor.lane_bytes;
            self.media.persist(self.log(), at, mark.end - mark.start)?;
        }
        Ok(())
    }

    /// Bytes fetched that are not on every member yet.
    pub fn unreplicated_bytes(&self) -> u64 {
        let newest = self.marks.iter().rev().take_while(|m| m.seq > self.replicated.0);
        newest.map(|m| m.end - m.start).sum()
    }

    /// Bytes fetched and not yet published.
    pub fn pending_bytes(&self) -> u64 {
        self.marks.iter().map(|m| m.end - m.start).sum()
    }
}
