//! What the layer decides.
//!
//! The device may carry out what is in flight in any order, so the core never has two requests in flight that
//! overlap, unless its own clients did: a page is written back by one request at a time, and what goes past
//! the cache ([`Layer::direct`]) waits for write-backs of the same pages. Where a read is in flight and
//! something newer comes, that part of the read is *stale* from then on: it is not put into the cache, and no later
//! read joins it.
//!
//! A flush is owed what was completed before it came. With write-back that is every page that was dirty then
//! ([`Page::epoch`](super::cache::Page)), also one that is being written and was changed again meanwhile, and
//! everything that went past the cache and took the place of dirty bytes. It waits for nothing else: what is owed is written
//! before what became dirty later, however much of that comes and wherever it lies.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use base::planted::{Bug, planted};
use base::{Errno, Nanos};

use super::ahead::Ahead;
use super::cache::{Cache, PAGE, SECTORS, mask, parts, runs};
use super::latency::Latency;
use crate::device::{Answer, Op, Outcome, SECTOR, Zero};

/// How the layer works. Each mechanism can be switched off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Bytes of the cache; 0: none.
    pub cache_bytes: u64,
    /// Writes are completed when they are in the cache, and written when a flush asks for it, the cache fills, or after a
    /// second. Else they are completed when the device has them.
    pub write_back: bool,
    /// Neighbours are merged.
    pub coalesce: bool,
    /// Most bytes read ahead of a stream; 0: nothing.
    pub read_ahead: u64,
    /// Most bytes of a merged request.
    pub merge_max: u64,
    /// Write-backs in flight.
    pub depth: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache_bytes: 32 << 20,
            write_back: false,
            coalesce: true,
            read_ahead: 1 << 20,
            merge_max: 1 << 20,
            depth: 16,
        }
    }
}

/// Dirty bytes are written after this long, flush or none.
const AGE: Nanos = 1_000_000_000;
/// No more is dirty than the device should be through with in [`AGE`], or a flush would take longer than that; but so much for each
/// write-back that may be in flight.
const DIRTY_EACH: u64 = 16;
/// Writes that take more than one part in so many of the cache go past it.
const SHARE: u64 = 4;

/// What is to be done.
#[derive(Debug)]
pub enum Effect {
    /// Give this to the device; the answer comes to [`Layer::answered`] under that number.
    Submit(u64, Op),
    /// A request is done.
    Complete(u64, Outcome),
}

/// Counts since the beginning.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stats {
    /// Reads of clients.
    pub reads: u64,
    /// Those of them for which the cache had everything.
    pub hits: u64,
    /// Writes of clients.
    pub writes: u64,
    /// Requests of the device that were spared because neighbours went together: of clients, and of pages that were written back.
    pub merged: u64,
    /// Requests that were held back for a moment because a neighbour was under way.
    pub held: u64,
    /// Pages of 4 KiB that were read ahead,
    pub ahead: u64,
    /// those of them that somebody has read since,
    pub ahead_used: u64,
    /// and those that left the cache before anybody did.
    pub ahead_wasted: u64,
    /// Reads of the device.
    pub device_reads: u64,
    /// Writes of the device.
    pub device_writes: u64,
    /// Flushes of the device.
    pub device_flushes: u64,
}

impl Stats {
    /// Reads for which the device had to be asked.
    pub fn misses(&self) -> u64 {
        self.reads - self.hits
    }

    /// All of them, with their names.
    pub fn named(&self) -> [(&'static str, u64); 12] {
        [
            ("reads", self.reads),
            ("hits", self.hits),
            ("misses", self.misses()),
            ("writes", self.writes),
            ("merged", self.merged),
            ("held_back", self.held),
            ("read_ahead", self.ahead),
            ("read_ahead_used", self.ahead_used),
            ("read_ahead_wasted", self.ahead_wasted),
            ("device_reads", self.device_reads),
            ("device_writes", self.device_writes),
            ("device_flushes", self.device_flushes),
        ]
    }
}

/// A part of a client's read that a read of the device brings.
#[derive(Clone, Debug)]
struct Owner {
    request: u64,
    range: Range<u64>,
}

/// A client's read that is not complete.
#[derive(Debug)]
struct Reading {
    offset: u64,
    buf: Vec<u8>,
    parts: usize,
    failed: Option<Errno>,
}

/// Something for the device: on its way, or waiting for neighbours.
#[derive(Debug)]
enum Lower {
    Read {
        range: Range<u64>,
        owners: Vec<Owner>,
        stale: Vec<Range<u64>>,
        /// Nobody had asked for it.
        ahead: bool,
    },
    /// Writes of clients, merged: number and range of each. `kept`: the cache holds the bytes, pinned.
    Write {
        range: Range<u64>,
        of: Vec<(u64, Range<u64>, bool)>,
        data: Vec<u8>,
        fua: bool,
        epoch: u64,
    },
    /// Dirty sectors: page and bits, and the oldest epoch among them.
    Back {
        pages: Vec<(u64, u8)>,
        epoch: u64,
    },
    Flush {
        request: u64,
    },
    /// Trim and zero.
    Other {
        request: u64,
        range: Range<u64>,
        epoch: u64,
    },
    Status {
        request: u64,
    },
}

#[derive(Debug)]
struct Held {
    lower: Lower,
    until: Nanos,
}

/// What waits until nothing stands in its way.
#[derive(Debug)]
enum Blocked {
    /// A write that goes past the cache.
    Write {
        request: u64,
        offset: u64,
        data: Vec<u8>,
        fua: bool,
    },
    Other {
        request: u64,
        range: Range<u64>,
        op: Op,
    },
    Status {
        request: u64,
        range: Range<u64>,
        op: Op,
    },
    /// A write for which the cache has no room.
    Room {
        request: u64,
        offset: u64,
        data: Vec<u8>,
    },
}

#[derive(Debug)]
struct Flushing {
    request: u64,
    epoch: u64,
    failed: Option<Errno>,
}

/// The layer.
#[derive(Debug)]
pub struct Layer {
    config: Config,
    size: u64,
    cache: Cache,
    ahead: Ahead,
    reads: Latency,
    writes: Latency,
    /// How long write-backs take, and how many pages they have.
    backs_took: Latency,
    backs_pages: Latency,
    next: u64,
    lower: BTreeMap<u64, (Lower, Nanos)>,
    held: Vec<Held>,
    blocked: VecDeque<Blocked>,
    reading: HashMap<u64, Reading>,
    flushing: Vec<Flushing>,
    epoch: u64,
    backs: usize,
    /// When the oldest dirty bytes are due.
    due: Option<Nanos>,
    /// What was dirty in this epoch and before was due, and is written as if a flush had come.
    aged: u64,
    /// A write-back failed: none is tried before.
    pause: Nanos,
    /// Bytes that clients were told are written are lost: the next flush says so.
    lost: Option<Errno>,
    stats: Stats,
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE..range.end.div_ceil(PAGE)
}

impl Layer {
    /// An empty layer over a device of `size` bytes.
    pub fn new(config: Config, size: u64) -> Self {
        Self {
            config,
            size: size / SECTOR * SECTOR,
            cache: Cache::new(config.cache_bytes),
            ahead: Ahead::default(),
            reads: Latency::default(),
            writes: Latency::default(),
            backs_took: Latency::default(),
            backs_pages: Latency::default(),
            next: 0,
            lower: BTreeMap::new(),
            held: Vec::new(),
            blocked: VecDeque::new(),
            reading: HashMap::new(),
            flushing: Vec::new(),
            epoch: 1,
            backs: 0,
            due: None,
            aged: 0,
            pause: 0,
            lost: None,
            stats: Stats::default(),
        }
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        let (ahead, ahead_used, ahead_wasted) = self.cache.ahead();
        Stats { ahead, ahead_used, ahead_wasted, ..self.stats }
    }

    /// The device has grown.
    pub fn grown(&mut self, size: u64) {
        self.size = self.size.max(size / SECTOR * SECTOR);
    }

    /// When [`tick`](Self::tick) should be called next.
    pub fn wake_at(&self) -> Option<Nanos> {
        self.held.iter().map(|held| held.until).chain(self.due).min()
    }

    fn caches(&self) -> bool {
        self.cache.pages_max() > 0
    }

    /// A client's request, under a number of its own. Offsets and lengths are multiples of a sector, within the size.
    pub fn request(&mut self, now: Nanos, request: u64, op: Op, out: &mut Vec<Effect>) {
        match op {
            Op::Read { offset, len } => self.read(now, request, offset, u64::from(len), out),
            Op::Write { offset, data, fua } => self.write(now, request, offset, data, fua, out),
            Op::Flush => {
                self.flushing.push(Flushing { request, epoch: self.epoch, failed: None });
                self.epoch += 1;
                self.progress(now, out);
            }
            Op::Trim { offset, len, .. } | Op::Zero { offset, len, how: Zero { .. } } => {
                let range = offset..offset + len;
                self.blocked.push_back(Blocked::Other { request, range, op });
                self.progress(now, out);
            }
            Op::Status { offset, len } => {
                let range = offset..offset + len;
                self.blocked.push_back(Blocked::Status { request, range, op });
                self.progress(now, out);
            }
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        self.release(now, |held| held.until <= now, out);
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            self.aged = self.epoch;
            self.epoch += 1;
            // None is tried before.
            if now < self.pause && !self.cache.dirty().is_empty() {
                self.due = Some(self.pause);
            }
        }
        self.progress(now, out);
    }

    // Reading.

    fn read(&mut self, now: Nanos, request: u64, offset: u64, len: u64, out: &mut Vec<Effect>) {
        self.stats.reads += 1;
        let mut buf = vec![0; len as usize];
        let mut missing: Vec<Range<u64>> = Vec::new();
        for (page, from, to, at) in parts(offset, len) {
            let target = &mut buf[at..at + ((to - from) * SECTOR) as usize];
            for (a, b) in runs(self.cache.read(page, from, to, target)) {
                let range = page * PAGE + a * SECTOR..page * PAGE + b * SECTOR;
                match missing.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => missing.push(range),
                }
            }
        }
        if missing.is_empty() {
            self.stats.hits += 1;
            out.push(Effect::Complete(request, Ok(Answer::Data(buf))));
        } else {
            self.reading.insert(request, Reading { offset, buf, parts: 0, failed: None });
            for range in missing {
                self.fetch(now, request, range, out);
            }
        }
        if self.caches() && self.config.read_ahead > 0 {
            let max = self.config.read_ahead.min(self.config.cache_bytes / SHARE);
            if let Some((from, to)) = self.ahead.read(offset, len, max, self.size) {
                self.fetch_ahead(now, from..to, out);
            }
        }
    }

    /// Brings a range for a client: by reads that are under way, and one more for what they do not bring.
    fn fetch(&mut self, now: Nanos, request: u64, range: Range<u64>, out: &mut Vec<Effect>) {
        let mut at = range.start;
        let mut owned = 0;
        while at < range.end {
            let joins = |lower: &Lower| match lower {
                Lower::Read { range: of, stale, .. } => {
                    let end = of.end.min(range.end);
                    let part = at..end;
                    let fresh = planted(Bug::StaleReadJoined)
                        || !stale.iter().any(|stale| overlaps(stale, &part));
                    (of.contains(&at) && fresh).then_some(end)
                }
                _ => None,
            };
            let lowers = self.lower.iter_mut().map(|(_, (lower, _))| lower);
            let held = self.held.iter_mut().map(|held| &mut held.lower);
            let mut found = None;
            for lower in lowers.chain(held) {
                if let Some(end) = joins(lower) {
                    found = Some((end, lower));
                    break;
                }
            }
            let Some((end, Lower::Read { owners, .. })) = found else { break };
            owners.push(Owner { request, range: at..end });
            owned += 1;
            at = end;
        }
        if at < range.end {
            owned += 1;
            let owner = Owner { request, range: at..range.end };
            // Whole pages, where there is a cache to keep them.
            let fetched = if self.caches() {
                at / PAGE * PAGE..(range.end.div_ceil(PAGE) * PAGE).min(self.size)
            } else {
                at..range.end
            };
            self.enqueue_read(now, fetched, vec![owner], out);
        }
        if let Some(reading) = self.reading.get_mut(&request) {
            reading.parts += owned;
        }
    }

    fn fetch_ahead(&mut self, now: Nanos, range: Range<u64>, out: &mut Vec<Effect>) {
        // What is there, or coming, is not asked for again.
        let mut from = None;
        // In pieces that the device is asked for anyway.
        let most = (self.config.merge_max / PAGE * PAGE).max(PAGE);
        let coming = |(lower, _): &(Lower, Nanos)| match lower {
            Lower::Read { range: of, .. } if overlaps(of, &range) => Some(of.clone()),
            _ => None,
        };
        let coming: Vec<Range<u64>> = self.lower.values().filter_map(coming).collect();
        for page in pages(&range) {
            let bytes = page * PAGE..(page * PAGE + PAGE).min(self.size);
            let coming = coming.iter().any(|of| overlaps(of, &bytes));
            let there = self.cache.get(page).is_some();
            match (coming || there || bytes.is_empty(), from) {
                (false, None) => from = Some(bytes.start),
                (true, Some(start)) => {
                    self.submit_read(now, start..bytes.start, Vec::new(), out);
                    from = None;
                }
                (false, Some(start)) if bytes.start - start >= most => {
                    self.submit_read(now, start..bytes.start, Vec::new(), out);
                    from = Some(bytes.start);
                }
                _ => {}
            }
        }
        if let Some(start) = from {
            let end = (range.end.div_ceil(PAGE) * PAGE).min(self.size);
            self.submit_read(now, start..end, Vec::new(), out);
        }
    }

    fn enqueue_read(
        &mut self,
        now: Nanos,
        range: Range<u64>,
        owners: Vec<Owner>,
        out: &mut Vec<Effect>,
    ) {
        let max = self.config.merge_max;
        if self.config.coalesce {
            for held in &mut self.held {
                if let Lower::Read { range: of, owners: theirs, .. } = &mut held.lower
                    && of.end == range.start
                    && range.end - of.start <= max
                {
                    of.end = range.end;
                    theirs.extend(owners);
                    self.stats.merged += 1;
                    return;
                }
            }
            let neighbour = |lower: &Lower| {
                matches!(lower, Lower::Read { range: of, owners, .. }
                    if of.end == range.start && !owners.is_empty())
            };
            if self.lower.values().any(|(lower, _)| neighbour(lower)) {
                let lower = Lower::Read { range, owners, stale: Vec::new(), ahead: false };
                self.stats.held += 1;
                self.held.push(Held { lower, until: now + self.reads.mean() / 2 });
                return;
            }
        }
        self.submit_read(now, range, owners, out);
    }

    fn submit_read(
        &mut self,
        now: Nanos,
        range: Range<u64>,
        owners: Vec<Owner>,
        out: &mut Vec<Effect>,
    ) {
        let ahead = owners.is_empty();
        self.submit(now, Lower::Read { range, owners, stale: Vec::new(), ahead }, out);
    }

    /// What reads under way bring of this range is not to be kept.
    fn make_stale(&mut self, range: &Range<u64>) {
        let lowers = self.lower.values_mut().map(|(lower, _)| lower);
        for lower in lowers.chain(self.held.iter_mut().map(|held| &mut held.lower)) {
            if let Lower::Read { range: of, stale, .. } = lower
                && overlaps(of, range)
            {
                stale.push(range.clone());
            }
        }
    }

    // Writing.

    fn write(
        &mut self,
        now: Nanos,
        request: u64,
        offset: u64,
        data: Vec<u8>,
        fua: bool,
        out: &mut Vec<Effect>,
    ) {
        self.stats.writes += 1;
        let large = !self.is_small(&(offset..offset + data.len() as u64));
        if self.config.write_back && !fua && !large {
            self.blocked.push_back(Blocked::Room { request, offset, data });
        } else {
            self.blocked.push_back(Blocked::Write { request, offset, data, fua });
        }
        self.progress(now, out);
    }

    /// Whether a write goes into the cache. One page is the least that it takes, however short it is.
    fn is_small(&self, range: &Range<u64>) -> bool {
        pages(range).count() as u64 * SHARE <= self.cache.pages_max() as u64
    }

    /// Pages that may be dirty: as many as the device is seen to take in a second, of which a flush has to wait for all; and with how many it
    /// begins to be given them. As long as nothing was written back, nobody knows, so that begins early.
    fn dirty_max(&self) -> (usize, usize) {
        let (max, depth) = (self.cache.pages_max(), self.config.depth as u64);
        let least = (DIRTY_EACH * depth) as usize;
        let took = self.backs_took.mean();
        if took == 0 || planted(Bug::DirtyUnbounded) {
            return (max, if took == 0 { least.min(max / 2) } else { max / 2 });
        }
        let pages = depth * self.backs_pages.mean().max(1);
        let due = u128::from(pages) * u128::from(AGE) / u128::from(took);
        let most = usize::try_from(due).unwrap_or(max).max(least).min(max);
        (most, most / 2)
    }

    /// Takes a write into the cache, dirty. False: there is no room.
    fn absorb(&mut self, now: Nanos, offset: u64, data: &[u8]) -> bool {
        let range = offset..offset + data.len() as u64;
        let dirty = self.cache.dirty().len();
        if dirty > 0 && dirty + pages(&range).count() > self.dirty_max().0 {
            return false;
        }
        let new = pages(&range).filter(|page| self.cache.get(*page).is_none()).count();
        // Pages of the range that may go would be counted as room.
        let mine = pages(&range).count() - new;
        if !self.cache.has_room(new + mine) {
            return false;
        }
        self.make_stale(&range);
        let epoch = self.epoch;
        for (page, from, to, at) in parts(range.start, range.end - range.start) {
            let bytes = &data[at..at + ((to - from) * SECTOR) as usize];
            self.cache.put(page, from, bytes, |page| {
                if page.dirty == 0 {
                    page.epoch = epoch;
                }
                page.dirty |= mask(from, to);
            });
        }
        self.due.get_or_insert(now + AGE);
        true
    }

    /// Whether a write-back of a page in the range is under way.
    fn is_writing(&self, range: &Range<u64>) -> bool {
        pages(range).any(|page| self.cache.get(page).is_some_and(|page| page.writes > 0))
    }

    /// Something goes past the cache: what the cache holds there counts no more. The epoch of the oldest dirty bytes whose
    /// place it takes: who owes those owes it. None: nobody owes it, since it is not completed before the device has it.
    fn supersede(&mut self, range: &Range<u64>) -> u64 {
        self.make_stale(range);
        let mut epoch = u64::MAX;
        for (page, from, to, _) in parts(range.start, range.end - range.start) {
            let bits = mask(from, to);
            self.cache.change(page, |page| {
                if planted(Bug::TrimLeavesDirty) {
                    return;
                }
                if page.dirty & bits != 0 && !planted(Bug::SupersededForgotten) {
                    epoch = epoch.min(page.epoch);
                }
                page.dirty &= !bits;
                page.valid &= !bits;
            });
        }
        epoch
    }

    /// A write that goes to the device now, perhaps together with its neighbours.
    fn direct(
        &mut self,
        now: Nanos,
        (request, fua): (u64, bool),
        offset: u64,
        data: Vec<u8>,
        out: &mut Vec<Effect>,
    ) {
        let range = offset..offset + data.len() as u64;
        let epoch = self.supersede(&range);
        let room = self.cache.has_room(2 * pages(&range).count());
        let kept = room && self.is_small(&range);
        if kept {
            for (page, from, to, at) in parts(offset, data.len() as u64) {
                let bytes = &data[at..at + ((to - from) * SECTOR) as usize];
                self.cache.put(page, from, bytes, |page| page.pins += 1);
            }
        }
        let mine = (request, range.clone(), kept);
        let max = self.config.merge_max;
        if self.config.coalesce && !fua {
            for held in &mut self.held {
                if let Lower::Write { range: of, of: all, data: bytes, epoch: oldest, .. } =
                    &mut held.lower
                    && of.end == offset
                    && range.end - of.start <= max
                {
                    of.end = range.end;
                    all.push(mine);
                    *oldest = epoch.min(*oldest);
                    bytes.extend_from_slice(&data);
                    self.stats.merged += 1;
                    return;
                }
            }
            let neighbour = |lower: &Lower| match lower {
                Lower::Write { range: of, .. } => of.end == offset,
                _ => false,
            };
            if self.lower.values().any(|(lower, _)| neighbour(lower)) {
                let lower = Lower::Write { range, of: vec![mine], data, fua, epoch };
                self.stats.held += 1;
                self.held.push(Held { lower, until: now + self.writes.mean() / 2 });
                return;
            }
        }
        self.submit(now, Lower::Write { range, of: vec![mine], data, fua, epoch }, out);
    }

    /// Starts to write back what became dirty in an epoch and before, as much as may be in flight: the oldest first.
    fn write_back(&mut self, now: Nanos, up_to: u64, out: &mut Vec<Effect>) {
        while self.may_write_back(now)
            && let Some(first) = self.cache.oldest(up_to)
        {
            let pages = self.neighbours(first, up_to);
            self.write_pages(now, pages, out);
        }
    }

    /// The same of a range, whatever its age.
    fn write_range_back(&mut self, now: Nanos, range: &Range<u64>, out: &mut Vec<Effect>) {
        let last = range.end.div_ceil(PAGE);
        let mut from = range.start / PAGE;
        while self.may_write_back(now) {
            let mut dirty = self.cache.dirty().range(from..last).copied();
            let Some(first) = dirty.find(|page| self.cache.may_be_written(*page, u64::MAX)) else {
                return;
            };
            let pages = first..self.neighbours(first, u64::MAX).end.min(last);
            from = pages.end;
            self.write_pages(now, pages, out);
        }
    }

    fn may_write_back(&self, now: Nanos) -> bool {
        now >= self.pause && self.backs < self.config.depth
    }

    /// The pages that go together with one that is written back: those around it that may be written as well, and join it.
    fn neighbours(&self, page: u64, up_to: u64) -> Range<u64> {
        let (first, last) = (1, 1 << (SECTORS - 1));
        let has = |page: u64, bit: u8| {
            self.cache.may_be_written(page, up_to)
                && self.cache.get(page).is_some_and(|page| page.dirty & bit != 0)
        };
        let most = if self.config.coalesce { self.config.merge_max / PAGE } else { 1 };
        let (mut from, mut to) = (page, page + 1);
        while to - from < most && has(to - 1, last) && has(to, first) {
            to += 1;
        }
        while to - from < most && from > 0 && has(from, first) && has(from - 1, last) {
            from -= 1;
        }
        from..to
    }

    fn write_pages(&mut self, now: Nanos, pages: Range<u64>, out: &mut Vec<Effect>) {
        let mut run: Vec<(u64, u8)> = Vec::new();
        let mut span = 0..0u64;
        for number in pages {
            let bits = self.cache.get(number).map_or(0, |page| page.dirty);
            for (a, b) in runs(bits) {
                let range = number * PAGE + a * SECTOR..number * PAGE + b * SECTOR;
                let joins = span.end == range.start
                    && !run.is_empty()
                    && self.config.coalesce
                    && range.end - span.start <= self.config.merge_max;
                if !joins {
                    self.submit_back(now, &mut run, out);
                    // What is not joined is a request of its own: what is left is dirty still, and its turn comes.
                    if self.backs >= self.config.depth {
                        return;
                    }
                    span.start = range.start;
                }
                self.stats.merged += u64::from(joins);
                span.end = range.end;
                run.push((number, mask(a, b)));
            }
        }
        self.submit_back(now, &mut run, out);
    }

    fn submit_back(&mut self, now: Nanos, run: &mut Vec<(u64, u8)>, out: &mut Vec<Effect>) {
        if run.is_empty() {
            return;
        }
        let pages = std::mem::take(run);
        let mut epoch = u64::MAX;
        for (number, bits) in &pages {
            self.cache.change(*number, |page| {
                epoch = epoch.min(page.epoch);
                page.dirty &= !bits;
                page.writing |= bits;
                page.writes += 1;
            });
        }
        self.backs += 1;
        self.submit(now, Lower::Back { pages, epoch }, out);
    }

    // Going on.

    /// Does what nothing stands in the way of any more.
    fn progress(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        // Who waits for room waits in line: one that takes much would never find it where those behind it take what comes.
        let mut full = false;
        for _ in 0..self.blocked.len() {
            let Some(blocked) = self.blocked.pop_front() else { break };
            if full && matches!(blocked, Blocked::Room { .. }) {
                self.blocked.push_back(blocked);
            } else if let Some(blocked) = self.attempt(now, blocked, out) {
                full |= matches!(blocked, Blocked::Room { .. });
                self.blocked.push_back(blocked);
            }
        }
        if self.config.write_back {
            // What is owed before what is not.
            let owed = self.flushing.last().map_or(0, |flush| flush.epoch).max(self.aged);
            if !planted(Bug::FlushForgetsDirty) {
                self.write_back(now, owed, out);
            }
            // With half of what may be dirty it is written before somebody has to wait for room.
            if full || self.cache.dirty().len() > self.dirty_max().1 {
                self.write_back(now, u64::MAX, out);
            }
        }
        self.progress_flushes(now, out);
    }

    /// Tries something that was blocked; gives it back if it still is.
    fn attempt(&mut self, now: Nanos, blocked: Blocked, out: &mut Vec<Effect>) -> Option<Blocked> {
        match blocked {
            Blocked::Room { request, offset, data } => {
                if self.absorb(now, offset, &data) {
                    out.push(Effect::Complete(request, Ok(Answer::Done)));
                    return None;
                }
                if let Some(errno) = self.lost.filter(|_| self.backs == 0) {
                    out.push(Effect::Complete(request, Err(errno)));
                    return None;
                }
                Some(Blocked::Room { request, offset, data })
            }
            Blocked::Write { request, offset, data, fua } => {
                let range = offset..offset + data.len() as u64;
                if self.is_writing(&range) {
                    return Some(Blocked::Write { request, offset, data, fua });
                }
                self.direct(now, (request, fua), offset, data, out);
                None
            }
            Blocked::Other { request, range, op } => {
                if self.is_writing(&range) {
                    return Some(Blocked::Other { request, range, op });
                }
                let epoch = self.supersede(&range);
                self.next += 1;
                self.lower.insert(self.next, (Lower::Other { request, range, epoch }, now));
                out.push(Effect::Submit(self.next, op));
                None
            }
            Blocked::Status { request, range, op } => {
                let first = range.start / PAGE;
                let dirty = self.cache.dirty().range(first..range.end.div_ceil(PAGE)).next();
                if dirty.is_some() || self.is_writing(&range) {
                    self.write_range_back(now, &range, out);
                    return Some(Blocked::Status { request, range, op });
                }
                self.next += 1;
                self.lower.insert(self.next, (Lower::Status { request }, now));
                out.push(Effect::Submit(self.next, op));
                None
            }
        }
    }

    /// Flushes whose bytes are all with the device go down.
    fn progress_flushes(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        if self.flushing.is_empty() {
            return;
        }
        let mut oldest = u64::MAX;
        if self.config.write_back && !planted(Bug::FlushForgetsDirty) {
            // Of what was changed while it is being written, what is on its way is the older one.
            oldest = oldest.min(self.cache.oldest_epoch().unwrap_or(u64::MAX));
            for (lower, _) in self.lower.values() {
                match lower {
                    Lower::Back { epoch, .. } if !planted(Bug::FlushOvertakes) => {
                        oldest = oldest.min(*epoch);
                    }
                    // It may stand for dirty bytes that it took the place of.
                    Lower::Write { epoch, .. } | Lower::Other { epoch, .. } => {
                        oldest = oldest.min(*epoch);
                    }
                    _ => {}
                }
            }
            for held in &self.held {
                if let Lower::Write { epoch, .. } = held.lower {
                    oldest = oldest.min(epoch);
                }
            }
        }
        let mut ready = Vec::new();
        let lost = self.lost;
        self.flushing.retain_mut(|flush| {
            flush.failed = flush.failed.or(lost);
            let done = flush.failed.is_some() || flush.epoch < oldest;
            if done {
                ready.push((flush.request, flush.failed));
            }
            !done
        });
        for (request, failed) in ready {
            match failed {
                Some(errno) => {
                    // It was told.
                    self.lost = None;
                    out.push(Effect::Complete(request, Err(errno)));
                }
                None => self.submit(now, Lower::Flush { request }, out),
            }
        }
    }

    fn release(&mut self, now: Nanos, which: impl Fn(&Held) -> bool, out: &mut Vec<Effect>) {
        let (go, stay) = std::mem::take(&mut self.held).into_iter().partition(|held| which(held));
        self.held = stay;
        for held in go {
            self.submit(now, held.lower, out);
        }
    }

    fn submit(&mut self, now: Nanos, mut lower: Lower, out: &mut Vec<Effect>) {
        let op = match &mut lower {
            Lower::Read { range, .. } => {
                self.stats.device_reads += 1;
                Op::Read { offset: range.start, len: (range.end - range.start) as u32 }
            }
            Lower::Write { range, data, fua, .. } => {
                self.stats.device_writes += 1;
                Op::Write { offset: range.start, data: std::mem::take(data), fua: *fua }
            }
            Lower::Back { pages, .. } => {
                self.stats.device_writes += 1;
                let mut data = Vec::new();
                let mut offset = None;
                for (page, bits) in pages.iter() {
                    for (a, b) in runs(*bits) {
                        offset.get_or_insert(page * PAGE + a * SECTOR);
                        data.extend_from_slice(self.cache.bytes(*page, a, b));
                    }
                }
                Op::Write { offset: offset.unwrap_or(0), data, fua: false }
            }
            Lower::Flush { .. } => {
                self.stats.device_flushes += 1;
                Op::Flush
            }
            // Submitted where they are made.
            Lower::Other { .. } | Lower::Status { .. } => return,
        };
        self.next += 1;
        self.lower.insert(self.next, (lower, now));
        out.push(Effect::Submit(self.next, op));
    }

    /// The device has answered.
    pub fn answered(&mut self, now: Nanos, number: u64, outcome: Outcome, out: &mut Vec<Effect>) {
        let Some((lower, begun)) = self.lower.remove(&number) else { return };
        let took = now.saturating_sub(begun);
        match lower {
            Lower::Read { range, owners, stale, ahead } => {
                self.reads.add(took);
                let came = outcome.is_ok();
                self.have_read(&range, &owners, &stale, outcome, out);
                for page in pages(&range).filter(|_| ahead && came) {
                    let bytes = page * PAGE..(page + 1) * PAGE;
                    let asked_for = owners.iter().any(|owner| overlaps(&owner.range, &bytes));
                    self.cache.came_ahead(page, asked_for);
                }
                self.release(
                    now,
                    |held| matches!(&held.lower, Lower::Read { range: of, .. } if of.start == range.end),
                    out,
                );
            }
            Lower::Write { range, of, .. } => {
                self.writes.add(took);
                let failed = outcome.err();
                for (request, range, kept) in of {
                    self.have_written(&range, kept, failed);
                    let result = failed.map_or(Ok(Answer::Done), Err);
                    out.push(Effect::Complete(request, result));
                }
                self.release(
                    now,
                    |held| matches!(&held.lower, Lower::Write { range: of, .. } if of.start == range.end),
                    out,
                );
            }
            Lower::Back { pages, epoch } => {
                self.writes.add(took);
                self.backs_took.add(took);
                self.backs_pages.add(pages.len() as u64);
                self.backs -= 1;
                self.have_written_back(now, &pages, epoch, outcome.err());
            }
            Lower::Flush { request } => out.push(Effect::Complete(request, outcome)),
            Lower::Other { request, range, .. } => {
                // Whoever read meanwhile may have brought what was there before.
                self.make_stale(&range);
                for (page, from, to, _) in parts(range.start, range.end - range.start) {
                    self.cache.change(page, |page| {
                        page.valid &= !mask(from, to) | page.dirty | page.writing;
                    });
                }
                if let Err(errno) = outcome
                    && self.config.write_back
                {
                    self.lost = Some(errno);
                }
                out.push(Effect::Complete(request, outcome));
            }
            Lower::Status { request } => out.push(Effect::Complete(request, outcome)),
        }
        self.progress(now, out);
    }

    fn have_read(
        &mut self,
        range: &Range<u64>,
        owners: &[Owner],
        stale: &[Range<u64>],
        outcome: Outcome,
        out: &mut Vec<Effect>,
    ) {
        let len = range.end - range.start;
        let data = match outcome {
            Ok(Answer::Data(data)) if data.len() as u64 == len => Ok(data),
            Ok(_) => Err(Errno::IO),
            Err(errno) => Err(errno),
        };
        if let Ok(data) = &data
            && self.caches()
        {
            for (page, from, to, at) in parts(range.start, len) {
                let mut keep = mask(from, to);
                let begin = page * PAGE;
                for old in stale.iter().filter(|_| !planted(Bug::StaleReadKept)) {
                    let a = old.start.clamp(begin, begin + PAGE) - begin;
                    let b = old.end.clamp(begin, begin + PAGE) - begin;
                    keep &= !mask(a / SECTOR, b / SECTOR);
                }
                for (a, b) in runs(keep) {
                    let first = at + ((a - from) * SECTOR) as usize;
                    let bytes = &data[first..first + ((b - a) * SECTOR) as usize];
                    self.cache.fill(page, a, bytes);
                }
            }
        }
        for owner in owners {
            let Some(reading) = self.reading.get_mut(&owner.request) else { continue };
            match &data {
                Ok(data) => {
                    let from = (owner.range.start - range.start) as usize;
                    let bytes = &data[from..from + (owner.range.end - owner.range.start) as usize];
                    let at = (owner.range.start - reading.offset) as usize;
                    reading.buf[at..at + bytes.len()].copy_from_slice(bytes);
                }
                Err(errno) => reading.failed = Some(*errno),
            }
            reading.parts -= 1;
            if reading.parts == 0
                && let Some(reading) = self.reading.remove(&owner.request)
            {
                let outcome = reading.failed.map_or(Ok(Answer::Data(reading.buf)), Err);
                out.push(Effect::Complete(owner.request, outcome));
            }
        }
    }

    /// A write past the cache has ended.
    fn have_written(&mut self, range: &Range<u64>, kept: bool, failed: Option<Errno>) {
        // Whoever read meanwhile may have brought what was there before.
        self.make_stale(range);
        for (page, from, to, _) in parts(range.start, range.end - range.start) {
            self.cache.change(page, |page| {
                if kept {
                    page.pins -= 1;
                }
                if !kept || failed.is_some() {
                    page.valid &= !mask(from, to) | page.dirty | page.writing;
                }
            });
        }
        if self.config.write_back && failed.is_some() {
            // It took the place of bytes that a flush may be owed.
            self.lost = failed;
        }
    }

    fn have_written_back(
        &mut self,
        now: Nanos,
        pages: &[(u64, u8)],
        epoch: u64,
        failed: Option<Errno>,
    ) {
        for (number, bits) in pages {
            // Reads that began before this was written may have seen what was there before, and the page may be gone when
            // they come.
            for (a, b) in runs(*bits).filter(|_| !planted(Bug::WrittenBackUnnoticed)) {
                let begin = number * PAGE;
                self.make_stale(&(begin + a * SECTOR..begin + b * SECTOR));
            }
            self.cache.change(*number, |page| {
                page.writes -= 1;
                page.writing &= !bits;
                if failed.is_some() {
                    page.dirty |= bits & page.valid;
                    page.epoch = page.epoch.min(epoch);
                }
            });
        }
        if let Some(errno) = failed {
            self.lost = Some(errno);
            self.pause = now + AGE;
            self.due = Some(self.pause);
        }
    }

    /// Whether nothing is under way and nothing dirty.
    pub fn is_settled(&self) -> bool {
        self.lower.is_empty()
            && self.held.is_empty()
            && self.blocked.is_empty()
            && self.flushing.is_empty()
            && self.cache.dirty().is_empty()
    }

    /// Pages with bytes that the device does not have, and that are not on their way there.
    pub fn dirty_pages(&self) -> usize {
        self.cache.dirty().len()
    }

    /// Pages in the cache, for tests of its bound.
    pub fn cached_pages(&self) -> usize {
        self.cache.len()
    }
}
