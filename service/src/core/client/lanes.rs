//! The client's log: which entries are whole, in which order they count, and whether it goes on.

use std::ops::Range;

use base::planted::{Bug, planted};
use base::{InodeId, Nanos, Sequence};
use storage::format::entry::{self, HEADER_BYTES, claimed_length, claimed_sequence, entry_bytes};
use storage::limits::{LANES_MAX, OP_SLOTS};
use storage::media::MediaError;

use super::reader::{Next, mark_of};
use super::{Batch, Client, Standing, Unread};
use crate::core::work::{End, Job, Kind, Piece};

/// Headers that are looked at to find out how much there is in a log.
const LOOKED_AT: u64 = 4096;
/// A log that has not gone on for so long is looked into; and after the same time again it is given
/// up. Stores need nanoseconds to arrive; this is for the service's own sake, which may have been stopped.
const STANDS: Nanos = 100_000_000;

impl Client {
    /// Finds the ends of the entries that are settled and were not published when the positions
    /// were written down. Entries of an earlier lap, which lie where nothing was appended since,
    /// have lower sequences.
    pub(super) fn find_settled(&mut self, lanes: &[u64; LANES_MAX]) -> Result<(), MediaError> {
        let mut marks = Vec::new();
        let mut scratch = Vec::new();
        for (lane, begin) in lanes.iter().copied().enumerate().take(self.reader.lanes.len()) {
            self.reader.lanes[lane] = begin;
            let mut before = self.published.0;
            while self.reader.lanes[lane] - begin < self.descriptor.lane_bytes
                && let Some(head) = self.peek(lane)?
            {
                let seq = claimed_sequence(&head);
                if seq <= before || seq > self.settled.0 {
                    break;
                }
                scratch.clear();
                let start = self.reader.lanes[lane];
                let copied =
                    self.reader.copy_entry_at(&*self.media, (lane, start), &head, &mut scratch)?;
                let Some(total) = copied else { break };
                marks.push(mark_of(seq, lane, start, start + total, &scratch));
                self.reader.lanes[lane] += total;
                before = seq;
            }
        }
        marks.sort_by_key(|m| m.seq);
        self.marks = marks.into();
        self.reader.next = self.settled.0 + 1;
        Ok(())
    }

    /// Next sequence expected.
    pub const fn next(&self) -> Sequence {
        Sequence(self.reader.next)
    }

    /// Header at the lane's position if there is one.
    fn peek(&self, lane: usize) -> Result<Option<[u8; HEADER_BYTES]>, MediaError> {
        self.reader.peek(&*self.media, lane)
    }

    /// Whether an entry claims to be the next.
    pub(super) fn claims_next(&self) -> bool {
        matches!(self.reader.claims_next(&*self.media, 0), Ok(Some(_)))
    }

    /// Of a dead client's whole entries the one with the smallest sequence beyond the next: what is
    /// missing was never completed.
    fn smallest_later(&self) -> Result<Option<(usize, [u8; HEADER_BYTES])>, MediaError> {
        let mut best: Option<(u64, usize, [u8; HEADER_BYTES])> = None;
        for lane in 0..self.reader.lanes.len() {
            let Some(head) = self.peek(lane)? else { continue };
            let seq = claimed_sequence(&head);
            if seq > self.reader.next
                && best.is_none_or(|(s, _, _)| seq < s)
                && self.is_whole(lane, self.reader.lanes[lane], &head)?
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
        Ok(self
            .reader
            .copy_entry_at(&*self.media, (lane, position), head, &mut Vec::new())?
            .is_some())
    }

    /// Bytes that the log can hold at one time.
    pub const fn capacity(&self) -> u64 {
        self.reader.capacity()
    }

    /// Copies complete entries in sequence, up to `max` bytes but one at least.
    pub fn fetch(&mut self, max: usize) -> Result<Batch, MediaError> {
        let mut batch = self.reader.begin(max);
        while batch.taken < self.capacity() && self.fetch_next(&mut batch, max)? {}
        self.reader.end(&batch);
        self.note_marks(&mut batch);
        Ok(batch)
    }

    fn fetch_next(&mut self, batch: &mut Batch, max: usize) -> Result<bool, MediaError> {
        match self.reader.read_next(&*self.media, batch, max)? {
            Next::Taken => return Ok(true),
            Next::Left => return Ok(false),
            Next::Missing => {}
        }
        let unsound = self.reader.unsound.is_some();
        if !(self.gone || self.expelled) || unsound && !self.died_in_it()? {
            return Ok(false);
        }
        match self.smallest_later()? {
            Some((lane, head)) => {
                let next = self.reader.read_one(&*self.media, batch, max, (lane, &head))?;
                Ok(next == Next::Taken)
            }
            None => Ok(false),
        }
    }

    /// What lies in the log now, to be asked of [`Client::has_read`].
    pub const fn unread(&self) -> Unread {
        Unread { rewinds: self.rewinds, until: self.read + self.capacity() }
    }

    /// Whether all of that has been read. Whoever had a number then had its place in the log, too: what was appended later and counts
    /// before it is among what the log could hold.
    pub const fn has_read(&self, unread: &mut Unread) -> bool {
        if unread.rewinds != self.rewinds {
            *unread = self.unread();
        }
        self.read >= unread.until
    }

    /// Takes note of what was read.
    fn note_marks(&mut self, batch: &mut Batch) {
        self.read += batch.taken;
        for mark in batch.marks.drain(..) {
            if mark.seq <= self.settled.0 {
                self.use_room(mark.promised);
            }
            self.marks.push_back(mark);
        }
    }

    /// Whether so much is in the log that reading it is work for somebody else.
    pub fn holds_more_than(&self, bytes: usize) -> Result<bool, MediaError> {
        if self.gone || self.expelled || self.reader.sealed_at.is_some() || self.wants_seal() {
            // What counts of it is not only a matter of reading.
            return Ok(false);
        }
        // It may have handed out what it has not written; what it does not say is not looked for.
        let told = self.last_sequence().0.saturating_add(1);
        let most = told.saturating_sub(self.reader.next).min(LOOKED_AT);
        self.reader.holds_more_than(&*self.media, bytes, most)
    }

    /// Work that reads on, up to `max` bytes: until its end nothing else is read ([`Client::take_read`]).
    pub(in crate::core) fn read_apart(&mut self, number: u64, max: usize) -> Piece {
        let job = Job::Fetch(self.reader.clone(), max);
        let piece = Piece::new(number, Kind::Fetch, max, job);
        self.reading = Some(piece.clone());
        piece
    }

    /// The work that reads on, if it is under way.
    pub(in crate::core) const fn reading(&self) -> Option<&Piece> {
        self.reading.as_ref()
    }

    /// Takes up what was read, if that has ended.
    pub(in crate::core) fn take_read(&mut self) -> Result<Option<Batch>, MediaError> {
        let Some(end) = self.reading.as_ref().and_then(Piece::take) else { return Ok(None) };
        self.reading = None;
        let End::Fetched(read) = end else { return Ok(None) };
        let (reader, mut batch) = *read?;
        if self.reader.sealed_at.is_some() {
            // What counts was settled meanwhile: all is still where it was.
            return Ok(None);
        }
        self.reader = reader;
        self.note_marks(&mut batch);
        Ok(Some(batch))
    }

    /// Whether something claims to be the next entry and is not whole.
    pub const fn is_unsound(&self) -> bool {
        self.reader.unsound.is_some()
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
        // Numbers that other threads can have at one time: one each, and one more for what fills the end of a lane.
        let later = self.reader.next + 1..=self.reader.next.saturating_add(2 * OP_SLOTS as u64);
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
        let Some(lane) = self.reader.unsound else { return Ok(false) };
        Ok(!self.odd_words().is_empty() && self.entries_behind(lane..lane + 1, 1)? == 0)
    }

    /// Whole entries behind the place where the log does not go on, up to `most`.
    fn entries_behind(&self, lanes: Range<usize>, most: u64) -> Result<u64, MediaError> {
        let mut found = 0;
        for lane in lanes {
            let begin = self.reader.lanes[lane];
            let (mut at, mut before) = (begin, self.reader.next);
            while found < most
                && at - begin < self.descriptor.lane_bytes
                && let Some(head) = self.reader.peek_at(&*self.media, lane, at)?
            {
                let seq = claimed_sequence(&head);
                let missing = at == begin && seq == self.reader.next;
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

    /// Inodes to which something was done, by whole entries, that nobody has judged yet. (Whoever appended them needed not have a lease:
    /// those count that it has something to do with.)
    pub(in crate::core) fn unjudged(&self) -> Result<Vec<InodeId>, MediaError> {
        let (mut found, mut scratch) = (Vec::new(), Vec::new());
        let mut note = |(lane, at): (usize, u64), head: &[u8; HEADER_BYTES]| {
            scratch.clear();
            let copied = self.reader.copy_entry_at(&*self.media, (lane, at), head, &mut scratch)?;
            if let Ok((_, op)) = entry::decode(&scratch, self.descriptor.incarnation) {
                found.extend(op.facts().touches().filter(|ino| self.has_had(*ino)));
            }
            Ok::<_, MediaError>(copied)
        };
        for mark in self.marks.iter().filter(|mark| mark.seq > self.settled.0) {
            // What lies there is the client's to change: only as much is read as was there.
            if let Some(head) = self.reader.peek_at(&*self.media, mark.lane, mark.start)?
                && claimed_sequence(&head) == mark.seq
                && claimed_length(&head).map(entry_bytes) == Some((mark.end - mark.start) as usize)
            {
                note((mark.lane, mark.start), &head)?;
            }
        }
        // What was not read yet counts although something may be missing before it: that was another thread's. (All that counts of who was
        // expelled was read.)
        let unread = !self.expelled && !planted(Bug::LossUnread);
        for lane in self.all_lanes().filter(|_| unread) {
            let begin = self.reader.lanes[lane];
            let (mut at, mut before) = (begin, self.reader.next - 1);
            while at - begin < self.descriptor.lane_bytes
                && let Some(head) = self.reader.peek_at(&*self.media, lane, at)?
            {
                let seq = claimed_sequence(&head);
                if seq <= before {
                    break;
                }
                let Some(total) = note((lane, at), &head)? else { break };
                at += total;
                before = seq;
            }
        }
        Ok(found)
    }

    const fn all_lanes(&self) -> Range<usize> {
        0..self.reader.lanes.len()
    }

    /// The log was read to its end, as far as it can be: notes whether it should go on.
    pub fn note_standing(&mut self, now: Nanos) {
        let handed_out =
            self.reader.unsound.is_some() || self.last_sequence().0 >= self.reader.next;
        if self.gone || self.expelled || !handed_out {
            self.standing = None;
        } else if self.standing.as_ref().is_none_or(|s| s.next != self.reader.next) {
            self.standing = Some(Standing { next: self.reader.next, since: now, inside: None });
        }
    }

    /// Whether the log will never go on: more was handed out than it holds, and since that was seen every
    /// operation that was under way has ended. (One whose thread is stopped ends when it goes on.)
    /// To be asked now and then; the log is to be read once more before the answer is believed.
    pub fn stands_for_ever(&mut self, now: Nanos) -> Result<bool, MediaError> {
        let Some(mut seen) = self.standing.take() else { return Ok(false) };
        if self.gone || self.expelled || seen.next != self.reader.next {
            return Ok(false);
        }
        let waited = now >= seen.since + STANDS;
        match &mut seen.inside {
            None if waited => {
                // What looks like an entry may be bytes of an earlier lap: others must lie behind it, or
                // the client must say that there are.
                if self.last_sequence().0 < self.reader.next
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
        Ok(match self.reader.unsound {
            Some(lane) => format!(
                "operation {} in lane {lane} of its log fails its checksum, and nobody is about to complete it; \
                 {many}{behind} operations lie behind it",
                self.reader.next
            ),
            None => format!(
                "operation {} is missing in its log, and nobody is about to write it; {many}{behind} operations \
                 lie behind it",
                self.reader.next
            ),
        })
    }

    /// Of a dead client whose log was read as far as it goes: what it ends with if that is no end. Once.
    pub fn broken_end(&mut self) -> Result<Option<String>, MediaError> {
        let broken = self.gone && !self.expelled && self.reader.unsound.is_some();
        if self.end_told || !broken || self.died_in_it()? {
            return Ok(None);
        }
        self.end_told = true;
        self.standing_words().map(Some)
    }

    /// After a change of the head: entries that were fetched but are not settled are fetched again.
    pub fn rewind(&mut self) {
        if !planted(Bug::ReadOutlives) {
            // What is being read is read again.
            self.reading = None;
        }
        self.rewinds += 1;
        while let Some(mark) = self.marks.back()
            && mark.seq > self.settled.0
        {
            self.reader.lanes[mark.lane] = self.reader.lanes[mark.lane].min(mark.start);
            self.marks.pop_back();
        }
        // Settled may be ahead of what was fetched again: the lanes stand where `next` says.
        let settled = self.settled.0 + 1;
        self.reader.next =
            if planted(Bug::RewindAhead) { settled } else { self.reader.next.min(settled) };
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
