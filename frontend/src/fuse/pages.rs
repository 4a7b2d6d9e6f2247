//! What the kernel holds of files' data, as far as the server can know, and when it must let go of it.
//!
//! The rule: a `read` that begins after a change by another node has returned sees it. A kernel with
//! AUTO_INVAL_DATA asks for the attributes of an open file before it reads from its pages (unless it may keep
//! them), and drops the pages when it takes in a size or a time of modification that it did not have. That is
//! not enough:
//!
//! - Programs set the time of modification back (`rsync -t`, `cp -a`, `tar`). Bytes changed, size and time did not.
//! - The kernel throws an answer away if anything has moved its version of the attributes since it asked: a write
//!   of its own that ended meanwhile, for one. The `read` that had asked goes on with the pages that are there,
//!   and the size that it knew.
//! - The answer to SETATTR is taken in without a look at the pages, and so the next one brings no news.
//!
//! So the server keeps book of what the pages are worth ([`Pages::at`]), and drops them itself
//! (NOTIFY_INVAL_INODE), *before* it answers. What makes that right:
//!
//! 1. *Versions.* Each change of an inode gives it a later time of change, which nobody can set; and as long as
//!    [`Attr::learnt`] stays what it is, all changes are this mount's own.
//! 2. *Order.* The attributes are asked for first (version v), then the pages are dropped, then the answer goes
//!    out. A page that the kernel has after the drop was read in after v: every page is locked from before its
//!    READ is sent until the reply is in it, and the drop waits for locked pages. Nothing that is read after v
//!    is older. So from then on all pages are at least as new as v, whatever becomes of the answer.
//! 3. *Own writes* are in the pages when they return, if nobody drops pages meanwhile: then what is read in
//!    again may be from before the write, and nothing tells. So the pages are worth nothing after a write,
//!    until they were dropped since it was served ([`Pages::dirty`]). (The kernel would drop them by the time.)
//! 4. *The answer is thrown away*, since the drop itself moves the version. A GETATTR with a handle is what
//!    the kernel asks before `read` and `lseek`, and of its answer only the size is used; permissions are
//!    judged by GETATTR without one, and `stat` shows the answer as it came. So the size must be right in the
//!    kernel already. It cannot be smaller than the smallest that it was told ([`Pages::least`]), or made itself. If the
//!    file is longer than that, its last byte is put into the kernel's cache first (NOTIFY_STORE), which makes the
//!    file that long; the drop takes it away again. If the kernel may think that the file is longer than it is
//!    ([`Pages::most`]), a `read` finds the end by a short READ, but `lseek` does not. So then nothing is dropped,
//!    but the answer has a time of modification that the kernel never saw ([`unseen`]): it takes it in, with the
//!    size, and drops all pages. (Nobody is shown that time, as it is not kept. Where a write of its own is under
//!    way, which ends in that very moment perhaps, or has ended since the attributes were asked for, which then do
//!    not say how long the file is, pages are dropped all the same.)
//! 5. *Nobody waits in a circle.* The drop waits for pages that are locked by a READ or a WRITE, and for mapped
//!    pages to be written back. Those are requests that other threads serve (more are started when all are held
//!    up), and that wait for leases perhaps; never for this one. Whoever sends GETATTR or OPEN has no page
//!    locked. Leases of others are given back by a thread that drops attributes and no pages. Nothing is
//!    dropped while READ, WRITE or SETATTR are served: there the caller has pages locked, or keeps them from being
//!    written back. (But after a write with `O_DIRECT`, which has none: the pages that it made old.)
//! 6. *One at a time.* Who finds a drop of the same inode under way waits for its end, so nobody is answered
//!    between the kernel's moving of its version and its dropping of pages. (It also keeps the byte
//!    of number 4 from everybody who has not been answered yet: who has, may see it, which is newer than its answer.)
//!
//! Attributes may be kept, and pages over an open, only while the pages are worth the version told. OPEN
//! drops pages as GETATTR does, so what is mapped after it is right, too. GETATTR without a handle drops them
//! only when nothing but bytes and times has changed, as far as the kernel can know, since its answer is
//! thrown away, too. LOOKUP and READDIRPLUS drop nothing: whoever reads asks again. Where the kernel has read nothing in
//! ([`Pages::filled`]) there is nothing to drop. O_DIRECT goes past the pages.
//!
//! What is not covered: pages that are used without a request. What is mapped already shows changes of other
//! nodes at the next open, read or (mostly) `stat` of the file; `splice` and `sendfile` from a file that is open
//! ask for nothing either. And what moves the kernel's size in the very moment between an answer and its being
//! taken in: a short READ or a write while others cut the file; an answer to SETATTR or LINK that comes late, when they
//! have made it longer.
//!
//! `tests` has a kernel as it is described here, and goes through interleavings.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::InodeId;
use client::fs::{Attr, LEARNT_ELSEWHERE, S_IFREG, Time};

use crate::planted::{Bug, planted};

/// For how long after its end a change is taken for one that the kernel may still be at.
const SETTLE_MS: u64 = 100;
/// Parts of the table, each with its lock.
const SHARDS: usize = 16;

/// What a state of an inode is told by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Version {
    ctime: (i64, u32),
    learnt: u64,
}

impl Version {
    fn of(attr: &Attr) -> Self {
        let Time { sec, nsec } = if planted(Bug::PagesByTime) { attr.mtime } else { attr.ctime };
        Self { ctime: (sec, nsec), learnt: attr.learnt }
    }

    /// This one, which is told after that.
    fn after(self, other: Self) -> Self {
        let learnt = if self.learnt == LEARNT_ELSEWHERE { other.learnt } else { self.learnt };
        Self { learnt, ..self }
    }
}

/// What the kernel's pages of a file are worth.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    /// All of them are at least as new as this.
    at: Version,
    /// The kernel's size was not below the file's then.
    sized: bool,
    /// The kernel may have pages: something was read or written since it knows the file, or they were dropped.
    filled: bool,
    /// It has changed the file since pages were dropped. If they were dropped, or the kernel dropped some, just
    /// when it wrote, what it wrote may be missing in what it read in again then. And what the file system
    /// loses is in the pages still.
    dirty: bool,
    /// Smallest size that the kernel may believe.
    least: u64,
    /// Largest.
    most: u64,
    /// What it was told last, or has made it itself, and since when nothing else.
    last: u64,
    since: u64,
    /// Mode and owners that it was told, and whether there were others before.
    rights: (u32, u32, u32),
    mixed: bool,
    /// Requests under way that move the kernel's version, how many have ended, and when the last one did.
    changing: u32,
    changes: u64,
    changed: u64,
    /// Pages are being dropped.
    dropping: bool,
}

/// What is to be done before an answer goes out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// Nothing.
    Tell,
    /// All pages must go; then [`Pages::dropped`].
    Drop {
        /// The kernel must be made to think that the file is at least as long as it is, first.
        extend: bool,
    },
    /// A time of modification must be told that the kernel never saw, so that it drops all pages when it takes
    /// the answer in: [`unseen`].
    Renew,
    /// Somebody else is at that: ask again when it is done.
    Wait,
}

/// What an answer is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum For {
    /// Reading through an open file, now.
    Reading,
    /// A `stat`, or a look at permissions.
    Looking,
    /// OPEN: attributes are not in the answer.
    Opening,
}

/// A time of modification that no version of an inode but this one is told with, and none has.
pub(super) fn unseen(attr: &Attr) -> Time {
    Time { sec: -1 - attr.ctime.sec, nsec: attr.ctime.nsec }
}

impl Pages {
    /// Of a file that the kernel does not know yet.
    fn new(attr: &Attr, now: u64) -> Self {
        let none = Version { learnt: 0, ..Version::of(attr) };
        Self {
            at: Version::of(attr).after(none),
            sized: true,
            filled: false,
            dirty: false,
            least: attr.size,
            most: attr.size,
            last: attr.size,
            since: now,
            rights: (attr.mode, attr.uid, attr.gid),
            mixed: false,
            changing: 0,
            changes: 0,
            changed: 0,
            dropping: false,
        }
    }

    /// Whether all that happened between `at` and these attributes was the kernel's own doing, or happened
    /// before.
    fn is_own(&self, attr: &Attr) -> bool {
        attr.learnt <= self.at.learnt && attr.learnt != LEARNT_ELSEWHERE
    }

    /// Whether they are not of before `at`.
    fn is_newer(&self, attr: &Attr) -> bool {
        let version = Version::of(attr);
        !self.is_own(attr) || version.learnt == self.at.learnt && version.ctime > self.at.ctime
    }

    /// Whether the pages show what the file is, or what is newer.
    fn is_same(&self, attr: &Attr) -> bool {
        !self.dirty && (self.is_own(attr) || Version::of(attr).ctime == self.at.ctime)
    }

    /// Whether the kernel knows the size, if it is told.
    fn is_sized(&self, attr: &Attr) -> bool {
        self.sized && (self.is_own(attr) || self.is_same(attr))
    }

    /// Whether the kernel may use its pages with these attributes.
    fn is_fresh(&self, attr: &Attr) -> bool {
        !self.dropping && (!self.filled || self.is_same(attr))
    }

    /// These attributes are about to be told.
    fn tell(&mut self, attr: &Attr, now: u64) {
        self.settle(now);
        if attr.size != self.last {
            (self.last, self.since) = (attr.size, now);
        }
        self.least = self.least.min(attr.size);
        self.most = self.most.max(attr.size);
        let rights = (attr.mode, attr.uid, attr.gid);
        self.mixed |= rights != self.rights;
        self.rights = rights;
        if self.is_newer(attr) && !self.dropping && (!self.filled || self.is_same(attr)) {
            self.sized = self.is_sized(attr) || self.least >= attr.size;
            (self.at, self.dirty) = (Version::of(attr).after(self.at), false);
        }
    }

    /// What is to be done before these attributes are told, which were asked for after so many changes.
    fn judge(&mut self, attr: &Attr, what: For, asked: u64, now: u64) -> Verdict {
        if self.dropping {
            let waits = what != For::Looking && !planted(Bug::DropUnawaited);
            return if waits { Verdict::Wait } else { Verdict::Tell };
        }
        self.settle(now);
        let stale = self.filled && !self.is_same(attr);
        let asked = if planted(Bug::CutAsked) { self.changes } else { asked };
        let short = !self.is_sized(attr) && self.least < attr.size;
        let is_cut = !self.is_sized(attr) && self.most > attr.size;
        let drops = match what {
            For::Opening => stale && !is_cut,
            For::Looking => {
                let rights = (attr.mode, attr.uid, attr.gid);
                let only_bytes = !self.mixed && rights == self.rights;
                stale && only_bytes && self.least == attr.size && !is_cut
            }
            For::Reading if is_cut && self.changing == 0 && self.changes == asked => {
                let renews = (stale || short) && !planted(Bug::CutTold);
                return if renews { Verdict::Renew } else { Verdict::Tell };
            }
            For::Reading => stale || short,
        };
        if !drops {
            return Verdict::Tell;
        }
        // In this order: what is read in, or written, from here on counts.
        (self.dropping, self.filled, self.dirty) = (true, false, false);
        let extend = short && what == For::Reading;
        if extend {
            self.least = attr.size;
            self.most = self.most.max(attr.size);
        }
        Verdict::Drop { extend }
    }

    /// After a while it has taken in what it was told.
    fn settle(&mut self, now: u64) {
        if self.changing == 0 && now.saturating_sub(self.changed.max(self.since)) >= SETTLE_MS {
            self.most = self.last;
        }
    }

    /// A change by the kernel, which may make the file that long, is being served.
    fn change(&mut self, end: u64, now: u64) {
        if !planted(Bug::MostUnsettled) {
            self.settle(now);
        }
        self.changing += 1;
        self.filled = true;
        self.most = self.most.max(end);
        if end > self.last {
            (self.last, self.since) = (end, now);
        }
    }

    /// It was.
    fn changed(&mut self, now: u64) {
        self.changing = self.changing.saturating_sub(1);
        self.changes += 1;
        (self.changed, self.dirty) = (now, self.dirty || !planted(Bug::OwnWriteTrusted));
    }

    /// All pages have gone since these attributes were asked for.
    fn dropped(&mut self, attr: &Attr) {
        self.dropping = false;
        self.sized = self.sized && self.is_own(attr) || self.least >= attr.size;
        if self.is_newer(attr) {
            self.at = Version::of(attr).after(self.at);
        }
    }

    /// The drop came to nothing.
    fn not_dropped(&mut self) {
        (self.dropping, self.filled, self.dirty, self.least) = (false, true, true, 0);
    }
}

/// An inode that the kernel knows.
#[derive(Clone, Debug)]
struct Known {
    /// How often it was told of it, and has not forgotten.
    lookups: u64,
    /// Of a regular file.
    pages: Option<Pages>,
}

/// All inodes that the kernel knows.
#[derive(Debug)]
pub(super) struct Table {
    begun: Instant,
    shards: [Mutex<HashMap<u64, Known>>; SHARDS],
    /// What is in them.
    len: AtomicUsize,
    dropped: [Condvar; SHARDS],
    #[cfg(any(test, feature = "planted"))]
    clock: std::sync::OnceLock<std::sync::Arc<super::kernel::Shared>>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            shards: Default::default(),
            len: AtomicUsize::new(0),
            dropped: Default::default(),
            #[cfg(any(test, feature = "planted"))]
            clock: std::sync::OnceLock::new(),
        }
    }
}

#[cfg(any(test, feature = "planted"))]
impl Table {
    /// It belongs to a history, which has a clock of its own.
    pub fn use_clock_of(&self, history: std::sync::Arc<super::kernel::Shared>) {
        let _ = self.clock.set(history);
    }
}

impl Table {
    fn index(ino: InodeId) -> usize {
        (ino.0 % SHARDS as u64) as usize
    }

    fn shard(&self, ino: InodeId) -> MutexGuard<'_, HashMap<u64, Known>> {
        self.shards[Self::index(ino)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        #[cfg(any(test, feature = "planted"))]
        if let Some(clock) = self.clock.get() {
            return clock.now();
        }
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn with<T>(&self, ino: InodeId, then: impl FnOnce(&mut Pages, u64) -> T) -> Option<T> {
        let now = self.now();
        let mut shard = self.shard(ino);
        shard.get_mut(&ino.0).and_then(|known| known.pages.as_mut()).map(|pages| then(pages, now))
    }

    /// The kernel is told of an inode with these attributes; whether it did not know it.
    pub fn count(&self, attr: &Attr) -> bool {
        let now = self.now();
        let mut shard = self.shard(attr.ino);
        let known = shard.entry(attr.ino.0).or_insert_with(|| Known {
            lookups: 0,
            pages: (attr.kind() == S_IFREG).then(|| Pages::new(attr, now)),
        });
        known.lookups += 1;
        if let Some(pages) = &mut known.pages {
            pages.tell(attr, now);
        }
        let is_new = known.lookups == 1;
        if is_new {
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        is_new
    }

    /// It was told of an inode so many times, by a server before this one.
    pub fn restore(&self, ino: InodeId, lookups: u64) {
        if lookups > 0 {
            let known = Known { lookups, pages: None };
            if self.shard(ino).insert(ino.0, known).is_none() {
                self.len.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The kernel has forgotten `count` of the times it was told; whether those were all.
    pub fn uncount(&self, ino: InodeId, count: u64) -> bool {
        let mut shard = self.shard(ino);
        let Some(known) = shard.get_mut(&ino.0) else { return false };
        known.lookups = known.lookups.saturating_sub(count);
        let gone = known.lookups == 0;
        if gone {
            shard.remove(&ino.0);
            self.len.fetch_sub(1, Ordering::Relaxed);
            self.dropped[Self::index(ino)].notify_all();
        }
        gone
    }

    /// How many inodes the kernel may know.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether the kernel was told of it and may know it.
    pub fn is_told(&self, ino: InodeId) -> bool {
        self.shard(ino).contains_key(&ino.0)
    }

    /// Some that it may know.
    pub fn some(&self, count: usize) -> Vec<InodeId> {
        let mut some = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            some.extend(shard.keys().take(count - some.len()).map(|ino| InodeId(*ino)));
        }
        some
    }

    /// All of them, and how often it was told of each.
    pub fn all(&self) -> Vec<(InodeId, u64)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(shard.iter().map(|(ino, known)| (InodeId(*ino), known.lookups)));
        }
        all
    }

    /// All of them; from then on it knows none.
    pub fn take_all(&self) -> Vec<InodeId> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let taken = std::mem::take(&mut *shard.lock().unwrap_or_else(PoisonError::into_inner));
            self.len.fetch_sub(taken.len(), Ordering::Relaxed);
            all.extend(taken.into_keys().map(InodeId));
        }
        self.dropped.iter().for_each(Condvar::notify_all);
        all
    }

    /// These attributes are about to be told.
    pub fn tell(&self, attr: &Attr) {
        self.with(attr.ino, |pages, now| pages.tell(attr, now));
    }

    /// How many changes by the kernel have ended: to be known before attributes are asked for.
    pub fn changes(&self, ino: InodeId) -> u64 {
        self.with(ino, |pages, _| pages.changes).unwrap_or(0)
    }

    /// What is to be done before these attributes are told, which comes next if that is nothing. Waits while
    /// somebody else does it. `asked`: see [`changes`](Self::changes).
    pub fn judge(&self, attr: &Attr, what: For, asked: u64) -> Verdict {
        let mut shard = self.shard(attr.ino);
        loop {
            let known = shard.get_mut(&attr.ino.0);
            let Some(pages) = known.and_then(|known| known.pages.as_mut()) else {
                return Verdict::Tell;
            };
            match pages.judge(attr, what, asked, self.now()) {
                Verdict::Wait => {}
                verdict => return verdict,
            }
            shard = self.await_drop(attr.ino, shard);
        }
    }

    /// Waits until something was dropped.
    fn await_drop<'a>(
        &'a self,
        ino: InodeId,
        shard: MutexGuard<'a, HashMap<u64, Known>>,
    ) -> MutexGuard<'a, HashMap<u64, Known>> {
        #[cfg(any(test, feature = "planted"))]
        if self.clock.get().is_some() {
            drop(shard);
            super::kernel::wait_here();
            return self.shard(ino);
        }
        let waited = self.dropped[Self::index(ino)].wait(shard);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// What [`Verdict::Drop`] asks for was done, or came to nothing.
    pub fn dropped(&self, attr: &Attr, done: bool) {
        self.with(
            attr.ino,
            |pages, _| {
                if done { pages.dropped(attr) } else { pages.not_dropped() }
            },
        );
        self.dropped[Self::index(attr.ino)].notify_all();
    }

    /// Whether the kernel may use what pages it has with these attributes.
    pub fn is_fresh(&self, attr: &Attr) -> bool {
        self.with(attr.ino, |pages, _| pages.is_fresh(attr)).unwrap_or(true)
    }

    /// The kernel is about to read in what will be in its pages.
    pub fn fill(&self, ino: InodeId) {
        if !planted(Bug::ReadUnnoted) {
            self.with(ino, |pages, _| pages.filled = true);
        }
    }

    /// It is about to be told that the file ends there.
    pub fn ends(&self, ino: InodeId, end: u64) {
        self.with(ino, |pages, _| pages.least = pages.least.min(end));
    }

    /// What the kernel is writing goes elsewhere than it believes: it does not know where the file ends.
    pub fn misplaced(&self, ino: InodeId) {
        self.with(ino, |pages, _| pages.sized = false);
    }

    /// A request of the kernel that changes the inode is served, until the result is dropped. It may make
    /// the file that long, and the kernel's version moves when it has the answer.
    pub fn change(&self, ino: InodeId, end: u64) -> Change<'_> {
        self.with(ino, |pages, now| pages.change(end, now));
        Change { table: self, ino }
    }
}

/// See [`Table::change`].
#[derive(Debug)]
pub(super) struct Change<'a> {
    table: &'a Table,
    ino: InodeId,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.table.with(self.ino, Pages::changed);
    }
}

#[cfg(test)]
mod tests;
