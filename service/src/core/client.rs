//! A client of this node: its log segment as the service sees it. Nothing read from the segment is
//! trusted; it is copied first, then judged.
//!
//! Here are its beginning and end, the words of its control area, and its requests; `lanes` is what it has
//! appended (`reader` how far that was read), `holdings` what it holds, `room` what it may promise.

mod holdings;
mod invariants;
mod lanes;
pub(super) mod reader;
mod room;
mod sole;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, InodeId, Nanos, Sequence, StreamSeq};
use storage::format::clients::Record;
use storage::format::control::{self, Descriptor, LeaseMode};
use storage::format::rpc;
use storage::limits::{OP_SLOTS, RPC_SLOT_BYTES, RPC_SLOTS};
use storage::media::{Media, MediaError, Segment};

use super::cause;
use super::frame::Checked;
use super::message::Identity;
use super::table::{Found, Row};
use super::work::Piece;
use reader::Reader;

/// Where an entry ended, for giving log space back.
#[derive(Clone, Copy, Debug)]
struct Mark {
    seq: u64,
    lane: usize,
    start: u64,
    end: u64,
    /// Blocks that were promised to it.
    promised: u64,
    /// What it was done to, and the directory whose names it changed.
    of: (InodeId, InodeId),
}

impl Mark {
    fn is_of(&self, ino: InodeId) -> bool {
        self.of.0 == ino || self.of.1 == ino
    }
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
    /// What was done under that grant comes after this sequence.
    after: u64,
    /// Which request the head granted; 0: the head has it from here.
    token: u64,
    /// It has been a joint one all the time since the grant with the word of this generation; 0: it is none, or one of an earlier run.
    since: u64,
}

/// Which leases a client needs together: those on inodes below a number, until then, if it does nothing before. (What its [`Client::activity`]
/// was.)
#[derive(Clone, Copy, Default, Debug)]
struct Together {
    below: InodeId,
    until: Nanos,
    activity: u64,
}

/// A lease taken back.
#[derive(Clone, Copy, Debug)]
struct Returned {
    slot: u32,
    mode: LeaseMode,
    /// The last sequence that may count on it; `None`: the operation under way is waited for.
    last: Option<u64>,
}

/// What is still to be read of a log, so that all has been read that lay in it at some moment: as much as it can hold at one time.
/// (A program that appends as fast as it is read never lets anybody find its log empty.)
#[derive(Clone, Copy, Debug)]
pub struct Unread {
    rewinds: u64,
    until: u64,
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
    /// `PIN_OPEN`, `PIN_WRITE`, `PIN_READ`, `PIN_CLOSED`, `PIN_LOST`.
    what: u32,
    /// The head was told that it is closed; once everything up to here is settled, that need not be said again.
    told: Option<u64>,
}

/// The file of a log that counts no more.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogFile {
    pub segment: Segment,
    /// Whose it is.
    pub user: u32,
    /// So long it may stay as long as somebody has it; 0 if he did with it what he may not.
    pub bytes: u64,
}

impl LogFile {
    /// Of a row whose log counts no more.
    pub(super) fn of_record(record: &Record) -> Self {
        let bytes = control::LANES + u64::from(record.lanes) * record.lane_bytes;
        Self { segment: Segment::Log(record.segment), user: record.uid, bytes }
    }

    /// Without a row: whose it was is not known.
    pub(super) fn of_nobody(segment: Segment, bytes: u64) -> Self {
        Self { segment, user: u32::MAX, bytes }
    }
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
    /// Ended, and an heir may come for so long ([`heir`](super::heir)).
    pub heir_until: Option<Nanos>,
    /// What it had locked, an heir had of it that showed this secret, while it lives.
    pub left: Option<(ClientId, u128)>,
    /// Stopped inside an operation for too long.
    pub expelled: bool,
    /// Its log was made longer or shorter.
    pub resized: bool,
    reader: Reader,
    /// The work that reads on, while it is under way.
    reading: Option<Piece>,
    /// Bytes that were read, and how often reading began again further back.
    read: u64,
    rewinds: u64,
    /// What is still to be read before it is expelled.
    expulsion: Option<Unread>,
    marks: VecDeque<Mark>,
    /// The last one whose space was given back.
    given_back: Option<Mark>,
    slots: BTreeMap<InodeId, u32>,
    modes: BTreeMap<InodeId, Lease>,
    /// Leases taken back. Until everything that was done under one is settled, a head that does not
    /// know must hold it for taken, and so must a service that starts anew.
    returned: BTreeMap<InodeId, Returned>,
    /// Those of which all has been read, by `Returned::last`.
    returned_by: BTreeSet<(u64, InodeId)>,
    /// It needs its leases together.
    together: Together,
    /// Numbers that it was handed out and that nothing in the stream is made with.
    unmade: BTreeSet<InodeId>,
    /// Of them: something is made with it in what the head has judged, and it is closed. Its chunk is not applied here yet.
    unmade_closed: BTreeSet<InodeId>,
    /// Numbers that something is made with, which the table does not say yet, and in which chunk.
    made: Vec<(StreamSeq, InodeId)>,
    lease_slots: Slots,
    generation: u64,
    pins: BTreeMap<InodeId, Pin>,
    /// Closed, and the head is not told yet.
    closed: BTreeSet<InodeId>,
    /// Of them: those that were closed when its log was as long as that.
    closing: Option<(Unread, BTreeSet<InodeId>)>,
    /// Closed, and the head is told: by `Pin::told`.
    told_closed: BTreeSet<(u64, InodeId)>,
    pin_slots: Slots,
    /// The lease that was taken back last because its user had too many.
    gone_last: InodeId,
    /// Files of whose locks it has the sole use.
    soles: BTreeMap<InodeId, sole::Sole>,
    /// Its requests were too many, and are looked at again then.
    pub waits_until: Option<Nanos>,
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
    /// It was served last as this one, of all times that anybody was.
    pub served: u64,
    /// An fsync waits for this sequence, which is not in the log, since then.
    sync_waits: Option<(u64, Nanos)>,
    /// The log was read to where it does not go on.
    standing: Option<Standing>,
    /// Of a dead client: what its log ends with was told.
    end_told: bool,
}

/// How long an fsync that waits for an entry not yet written keeps the service awake. Its writer
/// is another thread, which takes this long only if it is stopped (or lies).
const SYNC_PATIENCE: Nanos = 1_000_000;

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("id", &self.id).field("next", &self.reader.next).finish()
    }
}

/// Entries as fetched: raw bytes, one after the other, without pads.
#[derive(Debug)]
pub struct Batch {
    /// The entries.
    pub raw: Checked,
    /// Sequence that was expected first; a dead client's entries may begin later.
    pub first: Sequence,
    /// Sequence of the last entry taken, pads included; 0 when nothing was there.
    pub last: Sequence,
    /// Bytes of the lanes that were taken.
    pub taken: u64,
    /// Where they were, until that is noted.
    marks: Vec<Mark>,
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
            heir_until: None,
            left: None,
            expelled: false,
            resized: false,
            reader: Reader::new(Segment::Log(segment), descriptor),
            reading: None,
            read: 0,
            rewinds: 0,
            expulsion: None,
            marks: VecDeque::new(),
            given_back: None,
            slots: BTreeMap::new(),
            modes: BTreeMap::new(),
            returned: BTreeMap::new(),
            returned_by: BTreeSet::new(),
            together: Together::default(),
            unmade: BTreeSet::new(),
            unmade_closed: BTreeSet::new(),
            made: Vec::new(),
            lease_slots: Slots::default(),
            // Words of an earlier run must not come again: the client may remember them.
            generation: u64::from(starts & 0xff_ffff) << 32,
            pins: BTreeMap::new(),
            closed: BTreeSet::new(),
            closing: None,
            told_closed: BTreeSet::new(),
            pin_slots: Slots::default(),
            gone_last: InodeId::NONE,
            soles: BTreeMap::new(),
            waits_until: None,
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
            served: 0,
            sync_waits: None,
            standing: None,
            end_told: false,
        }
    }

    /// Its row in the client table.
    pub(super) const fn row(&self) -> &Row {
        &self.row
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
            keeps: record.uid == 0,
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
        this.reader.sealed_at = progress.sealed.map(|s| s.0);
        this.expelled = this.reader.sealed_at.is_some();
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
        this.take_up_soles();
        let state = this.word(control::STATE);
        if state != control::STATE_ATTACHED && this.reader.sealed_at.is_none() {
            // Ended in the middle of expelling it: that is brought to its end.
            this.gone = true;
        }
        Ok(this)
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

    /// By what an heir is known; 0: it has none.
    pub fn heir(&self) -> u128 {
        u128::from(self.word(control::HEIR)) | u128::from(self.word(control::HEIR + 8)) << 64
    }

    /// Whether an heir may have what it has locked although it lives.
    pub fn leaves(&self) -> bool {
        self.word(control::LEAVES) == 1
    }

    /// Nobody is its heir.
    pub fn disinherit(&self) {
        self.set_word(control::HEIR, 0);
        self.set_word(control::HEIR + 8, 0);
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
            self.forget_closed()?;
        }
        Ok(())
    }

    /// Up to there the client was told that everything is on every member, perhaps by an earlier run. (Who spoils that word hides
    /// nothing but what is lost of its own.)
    pub(super) fn told_replicated(&self) -> Sequence {
        let told = Sequence(self.word(control::REPLICATED)).min(Sequence(self.reader.next - 1));
        self.replicated.max(told)
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
            self.given_back = self.marks.pop_front();
        }
        // The client may write over the space as soon as it is told.
        self.row.note(seq, ends)?;
        self.row.fence()?;
        self.set_word(control::PUBLISHED, seq.0);
        for lane in 0..self.reader.lanes.len() {
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
            let errno = cause(self.word(control::REFUSED_ERRNO) as u16, errno);
            self.set_word(control::REFUSED_SEQ, seq.0);
            self.set_word(control::REFUSED_ERRNO, errno.into());
            self.set_word(control::REFUSALS, self.refusals);
        }
    }

    /// An operation under a joint lease was not taken.
    pub fn untaken(&mut self, seq: Sequence, errno: u16) {
        if seq.0 > self.word(control::UNTAKEN_SEQ) {
            self.set_word(control::UNTAKEN_ERRNO, errno.into());
            self.set_word(control::UNTAKEN_SEQ, seq.0);
        }
    }

    /// Notes whether an fsync waits for what is not in the log; `true` when it does.
    pub fn note_sync(&mut self, now: Nanos) -> bool {
        // (What is being read is not missing.)
        let waits = self.sync_request().0 >= self.reader.next && self.reading.is_none();
        let seen = self.sync_waits.filter(|(next, _)| *next == self.reader.next);
        self.sync_waits = waits.then(|| seen.unwrap_or((self.reader.next, now)));
        waits
    }

    /// An fsync that has waited for so long is served when the entry comes, with a ring.
    fn sync_is_stale(&self, now: Nanos) -> bool {
        self.sync_waits
            .is_some_and(|(next, at)| next == self.reader.next && now >= at + SYNC_PATIENCE)
    }

    /// Whether somebody waits for an answer, or for an fsync.
    pub fn is_waited_for(&self, now: Nanos) -> bool {
        self.wants_service(false, now)
    }

    /// Whether a request, an fsync, or (if `appends` counts) an appended entry waits.
    pub fn wants_service(&self, appends: bool, now: Nanos) -> bool {
        let request = |slot: usize| {
            let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
            self.word(base) as u32 == rpc::SLOT_REQUEST
        };
        let asks = self.waits_until.is_none_or(|at| now >= at);
        asks && (0..storage::limits::RPC_SLOTS).any(request)
            || self.reading.is_none()
                && (self.sync_request().0 >= self.reader.next && !self.sync_is_stale(now)
                    || appends && self.claims_next())
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

    /// A number that is another one once it has begun or ended an operation.
    pub fn activity(&self) -> u64 {
        let words = (0..OP_SLOTS).map(|slot| self.word(control::in_op(slot)));
        words.fold(0, u64::wrapping_add)
    }

    /// Whether an operation seen before is still the same one.
    pub fn still_inside(&self, seen: (usize, u64)) -> bool {
        !self.gone && self.word(control::in_op(seen.0)) == seen.1
    }

    /// Begins to expel: whoever appends from here on learns it, and waits for the seal.
    pub fn begin_expel(&mut self) {
        if self.expulsion.is_none() {
            self.expulsion = Some(self.unread());
        }
        self.set_word(control::SEALED_AT, control::SEAL_PENDING);
        if !planted(Bug::ExpelledNotTold) {
            self.set_word(control::STATE, control::STATE_EXPELLED);
        }
        self.tell_of_recalls();
    }

    /// Whether an expulsion has begun, and not ended.
    pub const fn is_being_expelled(&self) -> bool {
        self.expulsion.is_some() && !self.gone && !self.expelled
    }

    /// Whether all has been read that lay in its log when it was begun to be expelled: what came later need not count.
    pub fn is_read_to_expulsion(&mut self) -> bool {
        let Some(mut unread) = self.expulsion else { return false };
        let all = self.has_read(&mut unread);
        self.expulsion = Some(unread);
        all
    }

    /// Whether it is to be sealed as soon as its log is read: an expulsion is under way.
    pub fn wants_seal(&self) -> bool {
        self.reader.sealed_at.is_none() && self.word(control::STATE) == control::STATE_EXPELLED
    }

    /// Everything complete has been fetched: what comes after it does not count.
    pub fn seal(&mut self) -> Result<(), MediaError> {
        self.seal_at(Sequence(self.reader.next - 1))?;
        self.expelled = true;
        self.notify();
        Ok(())
    }

    /// Durable before the client learns of it, or entries that it appends again elsewhere could
    /// count twice.
    fn seal_at(&mut self, last: Sequence) -> Result<(), MediaError> {
        self.row.seal(last)?;
        self.set_word(control::SEALED_AT, last.0);
        self.reader.sealed_at = Some(last.0);
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

    /// Its log, when that counts no more.
    pub(super) fn log_file(&self) -> LogFile {
        let bytes = if self.resized { 0 } else { self.descriptor.segment_bytes() };
        LogFile { segment: Segment::Log(self.segment), user: self.identity.uid, bytes }
    }

    /// Its log goes. Nobody should be there any more; if somebody is, it must attach anew.
    pub fn close(&self) {
        if !self.expelled && self.reader.sealed_at.is_none() {
            self.set_word(control::SEALED_AT, self.reader.next - 1);
            self.set_word(control::STATE, control::STATE_GONE);
            self.tell_of_recalls();
            self.notify();
        }
    }

    /// Its log is taken up no more; what its process has open stays, if that lives.
    pub fn end_log(&mut self) -> Result<(), MediaError> {
        if self.expelled && !self.gone && !planted(Bug::PastOfExpelledForgotten) {
            return self.row.end_log();
        }
        self.row.forget()
    }

    /// Its row, to be freed.
    pub fn into_row(self) -> Row {
        self.row
    }

    /// A request that waits in slot `slot`: the slot's word, and what it says.
    pub fn request(&self, slot: usize) -> Option<(u64, Vec<u8>)> {
        let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let word = self.word(base);
        if word as u32 != rpc::SLOT_REQUEST {
            return None;
        }
        let mut body = vec![0u8; ((word >> 32) as usize).min(RPC_SLOT_BYTES - 64)];
        self.media.read(self.log(), base + rpc::SLOT_BODY, &mut body).ok()?;
        Some((word, body))
    }

    /// Takes a waiting request out of its slot, if that still has this word.
    pub fn take_request(&self, slot: usize, word: u64) -> bool {
        let base = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let taken = u64::from(rpc::SLOT_TAKEN) | (word & !0xffff_ffff);
        self.media.cas64(self.log(), base, word, taken) == Ok(word)
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
}

#[cfg(test)]
mod tests;
