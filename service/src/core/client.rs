//! A client of this node: its log segment as the service sees it. Nothing read from the segment is
//! trusted; it is copied first, then judged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, InodeId, Nanos, Sequence};
use storage::format::clients::{PIN_OPEN, PIN_WRITE};
use storage::format::control::{self, Descriptor, LeaseMode, LeaseWord};
use storage::format::entry::{
    self, HEADER_BYTES, claimed_length, claimed_sequence, entry_bytes, op,
};
use storage::format::rpc::{self, Granted};
use storage::limits::{LANES_MAX, LEASE_SLOTS, OP_SLOTS, PIN_SLOTS, RPC_SLOT_BYTES, RPC_SLOTS};
use storage::media::{Media, MediaError, Segment};

use super::message::Identity;
use super::room::ROOM_MAX;
use super::table::{Found, Row};

/// Where an entry ended, for giving log space back.
#[derive(Clone, Copy, Debug)]
struct Mark {
    seq: u64,
    lane: usize,
    start: u64,
    end: u64,
    /// Blocks that were promised to it.
    promised: u64,
}

/// Numbers of a table with few slots: the lowest ones first.
#[derive(Debug, Default)]
struct Slots {
    free: Vec<u32>,
    unused: u32,
}

impl Slots {
    fn take(&mut self, limit: usize) -> Option<u32> {
        self.free.pop().or_else(|| {
            ((self.unused as usize) < limit).then(|| {
                self.unused += 1;
                self.unused - 1
            })
        })
    }

    /// Those that are not `used` are free.
    fn without(used: &BTreeSet<u32>) -> Self {
        let unused = used.last().map_or(0, |last| last + 1);
        Self { free: (0..unused).rev().filter(|slot| !used.contains(slot)).collect(), unused }
    }

    fn is_full(&self, limit: usize) -> bool {
        self.free.is_empty() && self.unused as usize >= limit
    }
}

/// A lease that its client holds.
#[derive(Clone, Copy, Debug)]
struct Lease {
    mode: LeaseMode,
    /// When it was granted last.
    at: Nanos,
    /// Which request the head granted; 0: the head has it from here.
    token: u64,
}

/// A lease taken back.
#[derive(Clone, Copy, Debug)]
struct Returned {
    slot: u32,
    mode: LeaseMode,
    /// The last sequence that may count on it; `None`: the operation under way is waited for.
    last: Option<u64>,
}

/// A log that does not go on, although more was handed out.
#[derive(Clone, Debug)]
struct Standing {
    /// What is missing.
    next: u64,
    /// Since when; and once `inside` is known, since when that is.
    since: Nanos,
    /// Operations that were under way when this was looked at first, and still are.
    inside: Option<Vec<(usize, u64)>>,
}

/// What a client has open.
#[derive(Clone, Copy, Debug)]
struct Pin {
    /// Where it is written down; `None`: there was no room.
    slot: Option<u32>,
    /// `PIN_OPEN`, `PIN_WRITE`.
    what: u32,
}

/// See the module.
pub struct Client {
    media: Arc<dyn Media>,
    /// Its row in the client table.
    row: Row,
    /// Its id.
    pub id: ClientId,
    /// Number of its log segment.
    pub segment: u32,
    /// What it was told.
    pub descriptor: Descriptor,
    /// Who it is.
    pub identity: Identity,
    /// Process, for status and for hostd.
    pub pid: u32,
    /// Start time of the process.
    pub start_time: u64,
    /// Ended: only its log is left.
    pub gone: bool,
    /// Stopped inside an operation for too long.
    pub expelled: bool,
    /// When expelled, the last sequence that counts; the word of that name is the client's to spoil.
    sealed_at: Option<u64>,
    lanes: Vec<u64>,
    next: u64,
    marks: VecDeque<Mark>,
    slots: BTreeMap<InodeId, u32>,
    modes: BTreeMap<InodeId, Lease>,
    /// Leases taken back. Until everything that was done under one is settled, a head that does not
    /// know must hold it for taken, and so must a service that starts anew.
    returned: BTreeMap<InodeId, Returned>,
    /// Numbers that it was handed out and that nothing in the stream is made with.
    unmade: BTreeSet<InodeId>,
    /// Numbers that something is made with, which the table does not say yet.
    made: Vec<InodeId>,
    lease_slots: Slots,
    generation: u64,
    pins: BTreeMap<InodeId, Pin>,
    /// Taken out of the table of closed inodes; the head is not told yet.
    closed: BTreeSet<InodeId>,
    pin_slots: Slots,
    /// Values of the service words as last written.
    pub settled: Sequence,
    /// See `settled`.
    pub published: Sequence,
    /// See `settled`.
    pub replicated: Sequence,
    /// Entries up to here are in the state from which this node answers: not those of chunks that lie
    /// in its ring and are still to be applied.
    pub applied: Sequence,
    /// Blocks that it may promise, in all: `ROOM`.
    room: u64,
    /// Those of them that are promised to entries up to `settled`.
    room_used: u64,
    /// Names the account at the head.
    pub room_token: u64,
    /// What it had promised at the last look, and since when.
    idle: (u64, Nanos),
    /// Refusals so far.
    pub refusals: u64,
    /// The last operation that it was told is refused.
    refused: Sequence,
    /// Appended entries wait for the timer since then.
    pub dozing_since: Option<Nanos>,
    /// An fsync waits for this sequence, which is not in the log, since then.
    sync_waits: Option<(u64, Nanos)>,
    /// The lane in which something claims to be the next entry, and is not whole.
    unsound: Option<usize>,
    /// The log was read to where it does not go on.
    standing: Option<Standing>,
    /// Of a dead client: what its log ends with was told.
    end_told: bool,
}

/// How long an fsync that waits for an entry not yet written keeps the service awake. Its writer
/// is another thread, which takes this long only if it is stopped (or lies).
const SYNC_PATIENCE: Nanos = 1_000_000;

/// A log that has not gone on for so long is looked into; and after the same time again it is given
/// up. Stores need nanoseconds to arrive; this is for the service's own sake, which may have been stopped.
const STANDS: Nanos = 100_000_000;

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("id", &self.id).field("next", &self.next).finish()
    }
}

/// Entries as fetched: raw bytes, one after the other, without pads.
#[derive(Debug, Default)]
pub struct Batch {
    /// The bytes.
    pub raw: Vec<u8>,
    /// Sequence that was expected first; a dead client's entries may begin later.
    pub first: Sequence,
    /// Sequence of the last entry taken, pads included; 0 when nothing was there.
    pub last: Sequence,
    /// Bytes of the lanes that were taken.
    pub taken: u64,
}

/// Blocks that an entry was promised, as it was copied and checked: what lies in the log may have changed since. (A pad
/// is not copied, and needs none.)
fn promise_of(copy: &[u8]) -> u64 {
    copy.first_chunk().map_or(0, entry::claimed_promise)
}

impl Client {
    /// Makes the segment and its control area. `starts` counts the starts of the service.
    pub fn create(
        media: Arc<dyn Media>,
        segment: u32,
        descriptor: Descriptor,
        identity: Identity,
        process: (u32, u64),
        row: Row,
        starts: u32,
    ) -> Result<Self, MediaError> {
        let log = Segment::Log(segment);
        media.ensure(log, descriptor.segment_bytes())?;
        // A segment kept for the next client of the same user begins with a clean control area.
        media.discard(log, 0, control::LANES)?;
        media.write(log, 0, &descriptor.encode())?;
        media.store64(log, control::EPOCH, descriptor.epoch.0.into())?;
        let first = descriptor.first_sequence.0;
        for word in [control::SETTLED, control::PUBLISHED, control::REPLICATED] {
            media.store64(log, word, first - 1)?;
        }
        media.store64(log, control::DOORBELL, control::BELL_ASLEEP)?;
        Ok(Self::new(media, segment, descriptor, identity, process, row, starts))
    }

    fn new(
        media: Arc<dyn Media>,
        segment: u32,
        descriptor: Descriptor,
        identity: Identity,
        process: (u32, u64),
        row: Row,
        starts: u32,
    ) -> Self {
        let first = descriptor.first_sequence.0;
        Self {
            media,
            row,
            id: descriptor.client,
            segment,
            descriptor,
            identity,
            pid: process.0,
            start_time: process.1,
            gone: false,
            expelled: false,
            sealed_at: None,
            lanes: vec![0; descriptor.lanes as usize],
            next: first,
            marks: VecDeque::new(),
            slots: BTreeMap::new(),
            modes: BTreeMap::new(),
            returned: BTreeMap::new(),
            unmade: BTreeSet::new(),
            made: Vec::new(),
            lease_slots: Slots::default(),
            // Words of an earlier run must not come again: the client may remember them.
            generation: u64::from(starts & 0xff_ffff) << 32,
            pins: BTreeMap::new(),
            closed: BTreeSet::new(),
            pin_slots: Slots::default(),
            settled: Sequence(first - 1),
            published: Sequence(first - 1),
            replicated: Sequence(first - 1),
            applied: Sequence(first - 1),
            room: 0,
            room_used: 0,
            room_token: 0,
            idle: (0, 0),
            refusals: 0,
            refused: Sequence(0),
            dozing_since: None,
            sync_waits: None,
            unsound: None,
            standing: None,
            end_told: false,
        }
    }

    /// Takes up the log of a client of an earlier run. `settled`: what is in the stream, and
    /// `published` in this node's public state, of it.
    pub fn take_up(
        media: Arc<dyn Media>,
        found: Found,
        arena_bytes: u64,
        (settled, published): (Sequence, Sequence),
        starts: u32,
        now: Nanos,
    ) -> Result<Self, MediaError> {
        let Found { row, record, leases, unmade, pins } = found;
        let descriptor = Descriptor {
            client: record.client,
            incarnation: record.incarnation,
            lanes: record.lanes,
            lane_bytes: record.lane_bytes,
            first_sequence: Sequence(1),
            node: record.client.node(),
            epoch: record.epoch,
            arena_bytes,
        };
        let identity = Identity { uid: record.uid, gid: record.gid, groups: record.groups.clone() };
        let process = (record.pid, record.start_time);
        let mut this = Self::new(media, record.segment, descriptor, identity, process, row, starts);
        this.adopt_holdings(&leases, &pins, now);
        this.unmade = unmade;
        let progress = *this.row.progress();
        this.published = progress.published;
        this.settled = settled.max(published).max(progress.published);
        // The ring was replayed to its end.
        this.applied = this.settled;
        this.sealed_at = progress.sealed.map(|s| s.0);
        this.expelled = this.sealed_at.is_some();
        this.find_settled(&progress.lanes)?;
        this.take_up_room();
        this.set_published(published)?;
        this.set_word(control::SETTLED, this.settled.0);
        this.set_word(control::ROOM_USED, this.room_used);
        this.set_word(control::DOORBELL, control::BELL_AWAKE);
        // The client's to spoil, and nobody else's harm.
        this.refusals = this.word(control::REFUSALS).min(1 << 32);
        this.refused = Sequence(this.word(control::REFUSED_SEQ));
        this.reopen_requests()?;
        let state = this.word(control::STATE);
        if state != control::STATE_ATTACHED && this.sealed_at.is_none() {
            // Ended in the middle of expelling it: that is brought to its end.
            this.gone = true;
        }
        Ok(this)
    }

    fn adopt_holdings(
        &mut self,
        leases: &[(u32, InodeId, LeaseMode)],
        pins: &[(u32, InodeId, u32)],
        now: Nanos,
    ) {
        let forgotten = planted(Bug::HeldForgotten);
        for (slot, ino, mode) in leases.iter().filter(|_| !forgotten) {
            if self.slots.insert(*ino, *slot).is_none() {
                self.modes.insert(*ino, Lease { mode: *mode, at: now, token: 0 });
            }
        }
        self.lease_slots = Slots::without(&leases.iter().map(|l| l.0).collect());
        for (slot, ino, what) in pins {
            self.pins.insert(*ino, Pin { slot: Some(*slot), what: *what });
        }
        self.pin_slots = Slots::without(&pins.iter().map(|p| p.0).collect());
    }

    /// Finds the ends of the entries that are settled and were not published when the positions
    /// were written down. Entries of an earlier lap, which lie where nothing was appended since,
    /// have lower sequences.
    fn find_settled(&mut self, lanes: &[u64; LANES_MAX]) -> Result<(), MediaError> {
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

    /// Requests that the earlier run had taken and not answered: their slots may hold half an
    /// answer, so the client posts them again.
    fn reopen_requests(&self) -> Result<(), MediaError> {
        for slot in 0..RPC_SLOTS {
            let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
            let word = self.word(base);
            if word as u32 == rpc::SLOT_TAKEN {
                let again = u64::from(rpc::SLOT_AGAIN) | (word & !0xffff_ffff);
                self.media.cas64(self.log(), base, word, again)?;
            }
        }
        self.notify();
        Ok(())
    }

    fn log(&self) -> Segment {
        Segment::Log(self.segment)
    }

    /// A word of the control area; a fault of the media reads as 0.
    pub fn word(&self, offset: u64) -> u64 {
        self.media.load64(self.log(), offset).unwrap_or(0)
    }

    /// Stores a word.
    pub fn set_word(&self, offset: u64, value: u64) {
        // A segment that cannot be written belongs to a region that is gone; fetching says so.
        let _ = self.media.store64(self.log(), offset, value);
    }

    /// Tells waiting threads that something changed.
    pub fn notify(&self) {
        let log = self.log();
        let event = self.word(control::EVENT) as u32;
        self.set_word(control::EVENT, u64::from(event.wrapping_add(1)));
        if self.word(control::WAITERS) != 0 {
            let _ = self.media.wake(log, control::EVENT);
        }
    }

    /// Whether a kernel may still cache what the client learnt under its lease on `ino`, which may
    /// be one that was taken back.
    pub fn keeps(&self, ino: InodeId) -> bool {
        let slot = self.slots.get(&ino).or_else(|| self.returned.get(&ino).map(|r| &r.slot));
        let Some(&slot) = slot else { return false };
        let (word, bit) = control::kept(slot);
        !self.gone && !self.expelled && self.word(word) & bit != 0
    }

    /// Tells it to empty the kernel's cache of what it may keep no more.
    pub fn tell_of_recalls(&self) {
        let recalls = self.word(control::RECALLS) as u32;
        self.set_word(control::RECALLS, u64::from(recalls.wrapping_add(1)));
        let _ = self.media.wake(self.log(), control::RECALLS);
    }

    /// Tells it which run of the service knows its file locks.
    pub fn set_lock_run(&self, run: u64) {
        if self.word(control::LOCK_RUN) != run {
            self.set_word(control::LOCK_RUN, run);
            self.tell_of_locks();
        }
    }

    /// Tells it that a file lock which it waits for may be free.
    pub fn tell_of_locks(&self) {
        self.set_word(control::LOCK_EVENT, self.word(control::LOCK_EVENT).wrapping_add(1));
        self.notify();
    }

    /// Until when its leases count. Whoever found them lapsed waits for this.
    pub fn set_leases_until(&self, until: Nanos) {
        self.set_word(control::LEASES_UNTIL, until);
        if self.word(control::WAITERS) != 0 {
            self.notify();
        }
    }

    /// The last sequence that the client says it has handed out to its threads.
    pub fn last_sequence(&self) -> Sequence {
        Sequence(self.word(control::LAST_SEQUENCE))
    }

    /// The sequence that durability is asked for.
    pub fn sync_request(&self) -> Sequence {
        // What was never handed out cannot be waited for.
        Sequence(self.word(control::SYNC_REQUEST)).min(self.last_sequence())
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
    fn claims_next(&self, from: usize) -> Result<Option<(usize, [u8; HEADER_BYTES])>, MediaError> {
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
        out.resize(start + total as usize, 0);
        let at = self.descriptor.lane_offset(lane) + in_lane;
        self.media.read(self.log(), at, &mut out[start..])?;
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
        let mut batch = Batch { first: Sequence(self.next), ..Batch::default() };
        while batch.taken < self.capacity() && self.fetch_next(&mut batch, max)? {}
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
        let Some(total) = self.copy_entry(lane, head, &mut batch.raw)? else { return Ok(None) };
        // The copy is what counts: its sequence must be the one expected, too.
        let start = self.lanes[lane];
        self.lanes[lane] += total;
        self.next = seq + 1;
        let promised = promise_of(&batch.raw[copied..]);
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

    /// The head judged everything up to `seq`.
    pub fn set_settled(&mut self, seq: Sequence) -> Result<(), MediaError> {
        if seq > self.settled {
            let from = self.marks.partition_point(|mark| mark.seq <= self.settled.0);
            let new = self.marks.range(from..).take_while(|mark| mark.seq <= seq.0);
            let promised = new.map(|mark| mark.promised).sum();
            self.settled = seq;
            self.set_word(control::SETTLED, seq.0);
            self.use_room(promised);
            self.forget_returned()?;
        }
        Ok(())
    }

    /// Everything up to `seq` is on every member.
    pub fn set_replicated(&mut self, seq: Sequence) {
        if seq > self.replicated {
            self.replicated = seq;
            self.set_word(control::REPLICATED, seq.0);
            self.notify();
        }
    }

    /// Everything up to `seq` is in this node's public state: its log space is free again.
    pub fn set_published(&mut self, seq: Sequence) -> Result<(), MediaError> {
        if seq <= self.published {
            return Ok(());
        }
        self.published = seq;
        let mut ends = self.row.progress().lanes;
        let before = ends;
        while let Some(mark) = self.marks.front()
            && mark.seq <= seq.0
        {
            ends[mark.lane] = mark.end;
            self.marks.pop_front();
        }
        // The client may write over the space as soon as it is told.
        self.row.note(seq, ends)?;
        self.row.fence()?;
        self.set_word(control::PUBLISHED, seq.0);
        for lane in 0..self.lanes.len() {
            if ends[lane] != before[lane] {
                self.set_word(control::reclaim(lane), ends[lane]);
            }
        }
        self.notify();
        Ok(())
    }

    /// Entries were refused, `seq` the last of them: say so where the client looks. What it was told
    /// before, by another head or before a restart, is not told again.
    pub fn refuse(&mut self, count: u32, seq: Sequence, errno: u16) {
        if seq > self.refused {
            self.refused = seq;
            self.refusals += u64::from(count);
            self.set_word(control::REFUSED_SEQ, seq.0);
            self.set_word(control::REFUSED_ERRNO, errno.into());
            self.set_word(control::REFUSALS, self.refusals);
        }
    }

    /// Writes the lease word for a grant. `None` when the table is full of leases in use.
    pub fn grant(
        &mut self,
        ino: InodeId,
        mode: LeaseMode,
        token: u64,
        now: Nanos,
    ) -> Result<Option<Granted>, MediaError> {
        let known = self.slots.get(&ino).copied();
        let returned = self.returned.get(&ino).map(|r| r.slot);
        let Some(slot) = known.or(returned).or_else(|| self.lease_slots.take(LEASE_SLOTS)) else {
            return Ok(None);
        };
        self.row.put_lease(slot, ino, mode, self.unmade.contains(&ino))?;
        self.returned.remove(&ino);
        self.slots.insert(ino, slot);
        self.generation += 1;
        let word = LeaseWord::new(self.generation, mode);
        self.set_word(control::lease_word(slot) - 8, ino.0);
        self.set_word(control::lease_word(slot), word.0);
        self.modes.insert(ino, Lease { mode, at: now, token });
        Ok(Some(Granted { slot, word }))
    }

    /// The number is the client's to make something with, once.
    pub fn hand_out(&mut self, ino: InodeId) {
        self.unmade.insert(ino);
    }

    /// Numbers handed out that nothing in the stream is made with.
    pub const fn unmade(&self) -> &BTreeSet<InodeId> {
        &self.unmade
    }

    /// Something in the stream is made with the number.
    pub fn note_made(&mut self, ino: InodeId) {
        if self.unmade.remove(&ino) {
            self.made.push(ino);
        }
    }

    /// Writes down which numbers are made use of. To be called when their chunks are durable in the
    /// ring (or recovery would refuse what made them), and before any of these is published (or
    /// nothing would tell a number that is used and removed from one that was never used).
    pub fn write_made(&mut self) -> Result<(), MediaError> {
        if self.made.is_empty() {
            return Ok(());
        }
        for ino in self.made.drain(..) {
            let held = self.slots.get(&ino).zip(self.modes.get(&ino)).map(|(s, l)| (*s, l.mode));
            let returned = self.returned.get(&ino).map(|r| (r.slot, r.mode));
            if let Some((slot, mode)) = held.or(returned) {
                self.row.note_made(slot, ino, mode)?;
            }
        }
        self.row.fence()
    }

    /// Takes the word away; operations that entered before are in `busy`.
    fn revoke(&mut self, ino: InodeId) -> Option<(u32, Lease)> {
        let slot = self.slots.remove(&ino)?;
        self.set_word(control::lease_word(slot), 0);
        Some((slot, self.modes.remove(&ino)?))
    }

    /// Ends a lease under which nothing waits to be settled; the token of its last grant.
    pub fn give_up(&mut self, ino: InodeId) -> Result<Option<u64>, MediaError> {
        let Some((slot, lease)) = self.revoke(ino) else { return Ok(None) };
        self.row.drop_lease(slot)?;
        self.lease_slots.free.push(slot);
        Ok(Some(lease.token))
    }

    /// Takes a lease back for the head; it counts as held until [`Client::has_returned`]. The token of
    /// its last grant, if it was held.
    pub fn take_back(&mut self, ino: InodeId) -> Option<u64> {
        let (slot, lease) = self.revoke(ino)?;
        self.returned.insert(ino, Returned { slot, mode: lease.mode, last: None });
        Some(lease.token)
    }

    /// The head is told what is held here, and has it from that: tokens of before mean nothing.
    pub fn forget_tokens(&mut self) {
        self.modes.values_mut().for_each(|lease| lease.token = 0);
    }

    /// Everything that was done under a lease taken back has been fetched.
    pub fn has_returned(&mut self, ino: InodeId) -> Result<(), MediaError> {
        let last = self.next - 1;
        if let Some(returned) = self.returned.get_mut(&ino) {
            returned.last = Some(last);
        }
        self.forget_returned()
    }

    /// Leases are free of which everything is settled.
    fn forget_returned(&mut self) -> Result<(), MediaError> {
        let settled = self.settled.0;
        let done = |r: &Returned| r.last.is_some_and(|last| last <= settled);
        for (_, returned) in self.returned.extract_if(.., |_, r| done(r)) {
            self.row.drop_lease(returned.slot)?;
            self.lease_slots.free.push(returned.slot);
        }
        Ok(())
    }

    /// Leases taken back of which the head may not know all that was done under them.
    pub fn returned(&self) -> Vec<(InodeId, LeaseMode)> {
        let kept = |_: &_| !planted(Bug::ReportedTooFew);
        self.returned.iter().filter(kept).map(|(i, r)| (*i, r.mode)).collect()
    }

    /// The client has the inode open; with `write`, it was allowed to write then.
    pub fn pin(&mut self, ino: InodeId, write: bool) -> Result<(), MediaError> {
        let what = PIN_OPEN | if write { PIN_WRITE } else { 0 };
        let old = self.pins.get(&ino).copied();
        if old.is_some_and(|p| p.what | what == p.what) {
            return Ok(());
        }
        let slot = match old {
            Some(pin) => pin.slot,
            None => self.pin_slots.take(PIN_SLOTS),
        };
        let what = what | old.map_or(0, |p| p.what);
        if let Some(slot) = slot {
            self.row.put_pin(slot, ino, what)?;
        }
        self.pins.insert(ino, Pin { slot, what });
        Ok(())
    }

    /// The client has it open no more.
    pub fn unpin(&mut self, ino: InodeId) -> Result<(), MediaError> {
        if let Some(Pin { slot: Some(slot), .. }) = self.pins.remove(&ino) {
            self.row.put_pin(slot, ino, 0)?;
            self.pin_slots.free.push(slot);
        }
        Ok(())
    }

    /// Takes out what the client says that it has closed. What it did to it before is in its log.
    pub fn collect_closed(&mut self) -> Result<(), MediaError> {
        let mut words = [0; control::CLOSED_SLOTS * 8];
        self.media.read(self.log(), control::CLOSED, &mut words)?;
        for (slot, word) in (0..).zip(words.as_chunks().0) {
            let (at, ino) = (control::CLOSED + slot * 8, u64::from_le_bytes(*word));
            let taken = ino != 0 && self.media.cas64(self.log(), at, ino, 0)? == ino;
            // Numbers that mean nothing would pile up for as long as its log cannot be read.
            if taken && self.has_pin(InodeId(ino)) {
                self.closed.insert(InodeId(ino));
            }
        }
        Ok(())
    }

    /// Whether it has no other way to say that it has closed something.
    pub fn closes_now(&self) -> bool {
        let now = self.word(control::CLOSED_NOW) != 0;
        if now {
            self.set_word(control::CLOSED_NOW, 0);
        }
        now || !self.closed.is_empty()
    }

    /// It asks to open the inode (again).
    pub fn reopens(&mut self, ino: InodeId) {
        self.closed.remove(&ino);
    }

    /// What was collected, to be told to the head.
    pub fn unpin_closed(&mut self) -> Result<Vec<InodeId>, MediaError> {
        let mut closed: Vec<InodeId> = std::mem::take(&mut self.closed).into_iter().collect();
        closed.retain(|ino| self.has_pin(*ino));
        closed.iter().try_for_each(|ino| self.unpin(*ino))?;
        Ok(closed)
    }

    /// Whether the client has the inode open.
    pub fn has_pin(&self, ino: InodeId) -> bool {
        self.pins.contains_key(&ino)
    }

    /// Whether it holds a lease on the inode, or has it open.
    pub fn has(&self, ino: InodeId) -> bool {
        self.slots.contains_key(&ino) || self.pins.contains_key(&ino)
    }

    /// Inodes that the client has open.
    pub fn pins(&self) -> Vec<InodeId> {
        self.pins.keys().copied().collect()
    }

    /// Those of them that it may write, whatever their mode says now.
    pub fn rights(&self) -> Vec<InodeId> {
        self.pins.iter().filter(|(_, p)| p.what & PIN_WRITE != 0).map(|(i, _)| *i).collect()
    }

    /// Makes the client ask anew before it uses the lease again; the head still counts it as held.
    pub fn suspend(&mut self, ino: InodeId) {
        if let Some(&slot) = self.slots.get(&ino) {
            self.set_word(control::lease_word(slot), 0);
        }
    }

    /// Makes it ask anew for everything.
    pub fn suspend_all(&mut self) {
        let held: Vec<InodeId> = self.modes.keys().copied().collect();
        held.into_iter().for_each(|ino| self.suspend(ino));
        self.tell_of_recalls();
    }

    /// When the lease was last granted.
    pub fn granted_at(&self, ino: InodeId) -> Option<Nanos> {
        self.modes.get(&ino).map(|lease| lease.at)
    }

    /// Notes whether an fsync waits for what is not in the log; `true` when it does.
    pub fn note_sync(&mut self, now: Nanos) -> bool {
        let waits = self.sync_request().0 >= self.next;
        let seen = self.sync_waits.filter(|(next, _)| *next == self.next);
        self.sync_waits = waits.then(|| seen.unwrap_or((self.next, now)));
        waits
    }

    /// An fsync that has waited for so long is served when the entry comes, with a ring.
    fn sync_is_stale(&self, now: Nanos) -> bool {
        self.sync_waits.is_some_and(|(next, at)| next == self.next && now >= at + SYNC_PATIENCE)
    }

    /// Whether a request, an fsync, or (if `appends` counts) an appended entry waits.
    pub fn wants_service(&self, appends: bool, now: Nanos) -> bool {
        let request = |slot: usize| {
            let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
            self.word(base) as u32 == rpc::SLOT_REQUEST
        };
        (0..storage::limits::RPC_SLOTS).any(request)
            || (self.sync_request().0 >= self.next && !self.sync_is_stale(now))
            || (appends && matches!(self.claims_next(0), Ok(Some(_))))
    }

    /// The inodes behind slots.
    pub fn inodes_of(&self, slots: &BTreeSet<u32>) -> Vec<InodeId> {
        self.slots.iter().filter(|(_, s)| slots.contains(s)).map(|(i, _)| *i).collect()
    }

    /// Leases held here.
    pub fn leases(&self) -> Vec<(InodeId, LeaseMode)> {
        self.modes.iter().map(|(ino, lease)| (*ino, lease.mode)).collect()
    }

    /// Some read lease whose slot can be taken when the table is full.
    pub fn spare(&self) -> Option<InodeId> {
        let full = self.lease_slots.is_full(LEASE_SLOTS);
        let read =
            |(ino, lease): &(&InodeId, &Lease)| lease.mode == LeaseMode::Read && !self.keeps(**ino);
        full.then(|| self.modes.iter().find(read).map(|(i, _)| *i)).flatten()
    }

    /// In-operation words that are odd now, with their values; of a dead client none.
    pub fn inside(&self) -> Vec<(usize, u64)> {
        if self.gone || self.expelled { Vec::new() } else { self.odd_words() }
    }

    fn odd_words(&self) -> Vec<(usize, u64)> {
        (0..OP_SLOTS)
            .map(|slot| (slot, self.word(control::in_op(slot))))
            .filter(|(_, value)| value & 1 == 1)
            .collect()
    }

    /// Whether an operation seen before is still the same one.
    pub fn still_inside(&self, seen: (usize, u64)) -> bool {
        !self.gone && self.word(control::in_op(seen.0)) == seen.1
    }

    /// Begins to expel: whoever appends from here on learns it, and waits for the seal.
    pub fn begin_expel(&mut self) {
        self.set_word(control::SEALED_AT, control::SEAL_PENDING);
        if !planted(Bug::ExpelledNotTold) {
            self.set_word(control::STATE, control::STATE_EXPELLED);
        }
        self.tell_of_recalls();
    }

    /// Whether it is to be sealed as soon as its log is read: an expulsion is under way.
    pub fn wants_seal(&self) -> bool {
        self.sealed_at.is_none() && self.word(control::STATE) == control::STATE_EXPELLED
    }

    /// Everything complete has been fetched: what comes after it does not count.
    pub fn seal(&mut self) -> Result<(), MediaError> {
        self.seal_at(Sequence(self.next - 1))?;
        self.expelled = true;
        self.notify();
        Ok(())
    }

    /// Durable before the client learns of it, or entries that it appends again elsewhere could
    /// count twice.
    fn seal_at(&mut self, last: Sequence) -> Result<(), MediaError> {
        self.row.seal(last)?;
        self.set_word(control::SEALED_AT, last.0);
        self.sealed_at = Some(last.0);
        Ok(())
    }

    /// The client must attach anew: the service ends, or the node left the chain. What it appended
    /// after `last` does not count.
    pub fn dismiss(&mut self, last: Sequence) {
        if !self.expelled {
            // Where the table cannot be written the region is gone, and the log with it.
            let _ = self.seal_at(last);
            self.set_word(control::STATE, control::STATE_GONE);
        }
        self.tell_of_recalls();
        self.notify();
    }

    /// Its log goes. Nobody should be there any more; if somebody is, it must attach anew.
    pub fn close(&self) {
        if !self.expelled && self.sealed_at.is_none() {
            self.set_word(control::SEALED_AT, self.next - 1);
            self.set_word(control::STATE, control::STATE_GONE);
            self.tell_of_recalls();
            self.notify();
        }
    }

    /// Its log is taken up no more.
    pub fn forget_row(&mut self) -> Result<(), MediaError> {
        self.row.forget()
    }

    /// Its row, to be freed.
    pub fn into_row(self) -> Row {
        self.row
    }

    /// Takes a waiting request out of slot `slot`.
    pub fn take_request(&self, slot: usize) -> Option<Vec<u8>> {
        let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let word = self.word(base);
        if word as u32 != rpc::SLOT_REQUEST {
            return None;
        }
        let len = ((word >> 32) as usize).min(RPC_SLOT_BYTES - 64);
        let taken = u64::from(rpc::SLOT_TAKEN) | (word & !0xffff_ffff);
        let found = self.media.cas64(self.log(), base, word, taken).ok()?;
        if found != word {
            return None;
        }
        let mut body = vec![0u8; len];
        self.media.read(self.log(), base + rpc::SLOT_BODY, &mut body).ok()?;
        Some(body)
    }

    /// Puts the answer into the slot.
    pub fn answer(&self, slot: usize, body: &[u8]) {
        let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let body = &body[..body.len().min(RPC_SLOT_BYTES - 64)];
        let _ = self.media.write(self.log(), base + rpc::SLOT_BODY, body);
        self.set_word(base, u64::from(rpc::SLOT_REPLY) | (body.len() as u64) << 32);
        self.notify();
    }

    /// Tells the client which epoch new entries carry.
    pub fn set_epoch(&self, epoch: Epoch) {
        self.set_word(control::EPOCH, epoch.0.into());
    }

    /// Blocks were promised to entries that are settled.
    fn use_room(&mut self, promised: u64) {
        if promised > 0 {
            self.room_used += promised;
            self.set_word(control::ROOM_USED, self.room_used);
        }
    }

    /// It may promise so many blocks more.
    pub fn add_room(&mut self, blocks: u64, now: Nanos) {
        self.room = self.room.saturating_add(blocks.min(ROOM_MAX));
        self.idle.1 = now;
        self.set_word(control::ROOM, self.room);
    }

    /// Takes back what it has not promised.
    fn take_room(&mut self) -> u64 {
        let before = self.room;
        let promised = || self.word(control::PROMISED).min(before);
        let first = promised();
        self.set_word(control::ROOM, first);
        // Who has added to it since and looked before has what he asked for.
        let now = promised().max(first);
        if now > first {
            self.set_word(control::ROOM, now);
        }
        self.room = now;
        before - now
    }

    /// The same, if it has promised nothing for so long.
    pub fn idle_room(&mut self, now: Nanos, after: Nanos) -> u64 {
        let (before, since) = self.idle;
        if self.room == before {
            return 0;
        }
        let promised = self.word(control::PROMISED).min(self.room);
        if promised != before {
            self.idle = (promised, now);
            return 0;
        }
        if now < since + after { 0 } else { self.take_room() }
    }

    /// Takes back what it has not promised, for a new account at the head: its token, and the blocks that are
    /// promised beyond what is settled.
    pub fn count_room(&mut self) -> (u64, u64) {
        self.take_room();
        self.room_token += 1;
        (self.room_token, self.room.saturating_sub(self.room_used))
    }

    /// What an earlier run had given it. The words are the client's to spoil: within bounds.
    fn take_up_room(&mut self) {
        let settled = self.word(control::SETTLED);
        let since = self.marks.iter().filter(|mark| mark.seq > settled);
        let since: u64 = since.map(|mark| mark.promised).sum();
        self.room_used = self.word(control::ROOM_USED).min(u64::MAX / 4) + since;
        let room = self.word(control::ROOM).max(self.word(control::PROMISED));
        self.room = room.clamp(self.room_used, self.room_used + 2 * ROOM_MAX);
    }

    /// Bytes fetched and not yet published.
    pub fn pending_bytes(&self) -> u64 {
        self.marks.iter().map(|m| m.end - m.start).sum()
    }
}

#[cfg(test)]
mod tests;
