//! What a kernel in front of this client may cache: attributes, as long as the lease under which they were
//! learnt is not given back. The rule of the lease's slot (`format::control`, "What a kernel keeps") makes
//! the service wait until the kernel's cache is empty.
//!
//! An answer that is still on its way when its lease is recalled does no harm by itself: the kernel throws
//! attributes away that were asked for before an invalidation. Only an inode that it does not know yet has
//! nothing to compare with; the front end's `Invalidate` waits until it does. But a call that asked, and
//! whose answer is thrown away, goes on with what the kernel has, which may be older than the
//! answer: a size, or a mode. So an answer that is *news* may not be kept: it is followed by no invalidation, so the
//! kernel takes it in. Attributes may be kept that were told first [`NEWS_MS`] ago, which is long
//! after the answer was taken in; and what is being changed is not kept, which saves its recalls. An inode
//! that the kernel does not know has nothing there: its attributes may be kept at once. Pages are the front
//! end's to look after: [`Attr::learnt`] tells it whether others may have changed the inode.
//!
//! Names are told for [`NAMES_MS`] only. To take one away before, the kernel locks the directory, and whoever
//! waits for the lease of a directory holds that lock. So names are not taken away: when the
//! lease is recalled, the directory's attributes go, as always, and who asks for them is kept waiting until
//! names told before have ended ([`Shown`]). A kernel that checks permissions itself needs the attributes
//! of a directory, its own copy or ours, each time *before* it uses a name in it. So names may be used
//! exactly as long as the lease is held, nobody who takes the lease waits, and who uses names
//! waits a moment, once: directories that changed a short while ago ([`QUIET_MS`]) get no names kept.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use base::InodeId;
use storage::format::control::LeaseMode;

use super::host::{Host, MS};
use super::inode::{Known, State};
use super::session::Session;
use super::sync::{RwLock, Word};
use super::{LibFsOn, Open};
use crate::fs::{Attr, Invalidate};

/// Between two looks at whether the session still is the one whose leases a kernel keeps.
const LOOK_MS: u64 = 100;
/// How long it is not looked whether leases still count, however long they do: who ends a mount waits for that.
const SLEEP_MS: u64 = 1000;

/// Inodes dropped in one go when the leases' time is over: about a millisecond.
const LAPSED: usize = 512;

/// From telling attributes to their being no news, in milliseconds.
const NEWS_MS: u64 = 100;

/// Which version of an inode's attributes a kernel was told, and when first: a hash of the time of the last
/// change (each change has another) in the upper bits, milliseconds in the lower ones.
#[derive(Debug)]
pub struct Told<H: Host>(Word<H>);

impl<H: Host> Default for Told<H> {
    fn default() -> Self {
        Self(Word::new(0))
    }
}

/// Bits for the time: it comes round after 17 minutes, and then is news for a moment.
const TIME_BITS: u32 = 20;

/// How long a kernel may use a name of a directory under a lease, in milliseconds. Enough for the program that
/// lists a directory and then looks at each of its files, and for the directories on everybody's way.
const NAMES_MS: u64 = 250;

/// From giving an answer to the kernel's having taken it in (it counts [`NAMES_MS`] from there), with
/// the lag of the coarse clocks.
const TAKEN_IN_MS: u64 = 120;

/// Names of a directory are told for a while if it has not changed for so long.
const QUIET_MS: u64 = 2000;

/// Until when a kernel may use names of a directory.
#[derive(Debug)]
pub struct Shown<H: Host> {
    /// Those that it was told under whatever lease.
    until: Word<H>,
    /// Those that it was told under a lease that is gone.
    stale_until: Word<H>,
}

impl<H: Host> Default for Shown<H> {
    fn default() -> Self {
        Self { until: Word::new(0), stale_until: Word::new(0) }
    }
}

impl<H: Host> Shown<H> {
    /// Whether it may use some.
    pub fn counts(&self, now: u64) -> bool {
        self.until.load(Ordering::SeqCst) > now
    }

    /// How long it may still use names that may be wrong.
    fn stale_for(&self, now: u64) -> u64 {
        self.stale_until.load(Ordering::SeqCst).saturating_sub(now)
    }
}

/// Milliseconds of a clock that only goes forward.
pub fn now_ms<H: Host>() -> u64 {
    H::tick() / MS
}

impl<H: Host> Told<H> {
    /// Notes it; whether it is no news.
    fn again(&self, attr: &Attr) -> bool {
        let changed = (attr.ctime.sec as u64).wrapping_mul(1_000_000_000);
        let version =
            changed.wrapping_add(attr.ctime.nsec.into()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let now = now_ms::<H>();
        let mask = (1 << TIME_BITS) - 1;
        let seen = self.0.load(Ordering::Acquire);
        if (seen ^ version) & !mask != 0 {
            self.0.store(version & !mask | now & mask, Ordering::Release);
            return false;
        }
        now.wrapping_sub(seen) & mask >= NEWS_MS
    }
}

/// The kernel's cache, if there is one.
pub struct Kernel<H: Host> {
    cache: RwLock<Option<Arc<dyn Invalidate>>, H>,
    is_there: AtomicBool,
    /// Notes are made and cleared one at a time, so that one under a lease that is gone already can be
    /// taken back at once: the slot may belong to another lease a moment later.
    notes: RwLock<(), H>,
    /// Number of the session whose recalls are looked after.
    session: Word<H>,
}

impl<H: Host> Default for Kernel<H> {
    fn default() -> Self {
        let (cache, is_there, notes) = Default::default();
        Self { cache, is_there, notes, session: Word::new(0) }
    }
}

impl<H: Host> core::fmt::Debug for Kernel<H> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Kernel").field("is_there", &self.is_there).finish_non_exhaustive()
    }
}

impl<H: Host> Kernel<H> {
    /// Whether one is in front of this client.
    pub(crate) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }
}

impl<H: Host> LibFsOn<H> {
    pub(crate) fn do_attach_kernel(&self, cache: Arc<dyn Invalidate>) {
        *self.kernel.cache.write() = Some(cache);
        self.kernel.is_there.store(true, Ordering::Release);
    }

    /// Whether the kernel may keep these attributes until it is told. True only if they are what they
    /// are *after* the service was made to wait for the kernel. `is_new`: it does not know the inode.
    pub(crate) fn may_keep(&self, attr: &Attr, is_new: bool) -> bool {
        if !self.kernel.is_there() {
            return false;
        }
        // Where nobody would wait for the kernel it asks each time.
        let waited_for = |session: &&Session<H>| session.segment.descriptor.keeps;
        let Some(session) = self.current().filter(waited_for) else { return false };
        let Some(inode) = self.inodes.read().get(&attr.ino.0).cloned() else { return false };
        let is_news = !inode.told.again(attr);
        // While names that may be wrong count, the kernel shall ask whenever it uses one.
        if is_news && !is_new || inode.shown.stale_for(now_ms::<H>()) > 0 {
            return false;
        }
        // Somebody changes it, or waits for its lease: not worth waiting for.
        let Some(state) = inode.state.try_read() else { return false };
        let same = Attr { learnt: attr.learnt, ..state.attr() } == *attr;
        if !self.holds(session, &state, LeaseMode::Read) || !same {
            return false;
        }
        self.keep(session, &state)
    }

    /// Makes the service wait for the kernel before it gives the lease of `state` to somebody else. False
    /// if the lease is gone already.
    fn keep(&self, session: &Session<H>, state: &State) -> bool {
        let Some(_notes) = self.kernel.notes.try_write() else { return false };
        let slot = state.lease.slot;
        let kept = session.segment.keep(slot);
        let counts = session.segment.attached() && self.holds(session, state, LeaseMode::Read);
        if !counts && !kept {
            session.segment.keep_no_more(slot);
        }
        counts
    }

    /// For how many milliseconds the kernel may use this name of a directory. What it leads to must be so
    /// *after* the service was made to wait for the kernel.
    pub(crate) fn may_keep_name(
        &self,
        dir: InodeId,
        name: &[u8],
        leads_to: Option<InodeId>,
    ) -> u32 {
        if !self.kernel.is_there() {
            return 0;
        }
        let waited_for = |session: &&Session<H>| session.segment.descriptor.keeps;
        let Some(session) = self.current().filter(waited_for) else { return 0 };
        let Some(dir) = self.inodes.read().get(&dir.0).cloned() else { return 0 };
        let Some(state) = dir.state.try_read() else { return 0 };
        let as_said = match state.names.get(name) {
            Some(Known::Present(ino, _)) => leads_to == Some(ino),
            Some(Known::Absent) => leads_to.is_none(),
            None => false,
        };
        let quiet = Self::now(&[]).saturating_sub(state.record.ctime.nanos()) / 1_000_000;
        if !as_said || quiet < QUIET_MS || !self.holds(session, &state, LeaseMode::Read) {
            return 0;
        }
        // Before the look at the lease: who takes it back looks here afterwards.
        dir.shown.until.raise(now_ms::<H>() + NAMES_MS + TAKEN_IN_MS, Ordering::SeqCst);
        if self.keep(session, &state) { NAMES_MS as u32 } else { 0 }
    }

    /// The kernel's attributes of a directory are about to go, since the lease under which it was
    /// told names is gone: whoever asks for them waits until the names have ended.
    fn end_names(&self, ino: InodeId) {
        if let Some(inode) = self.inodes.read().get(&ino.0) {
            let until = inode.shown.until.load(Ordering::SeqCst);
            inode.shown.stale_until.raise(until, Ordering::SeqCst);
        }
    }

    /// Waits until no name of a directory counts that may be wrong.
    pub(crate) fn do_await_names(&self, dir: InodeId) {
        let Some(inode) = self.inodes.read().get(&dir.0).cloned() else { return };
        loop {
            let left = inode.shown.stale_for(now_ms::<H>());
            if left == 0 || self.config.stops() {
                return;
            }
            H::sleep(left.min(20) * MS);
        }
    }

    /// Whether the kernel was told attributes that it may still keep.
    pub(crate) fn is_kept(&self, ino: InodeId) -> bool {
        let (Some(session), Some(inode)) =
            (self.current(), self.inodes.read().get(&ino.0).cloned())
        else {
            return false;
        };
        let Some(state) = inode.state.try_read() else { return false };
        self.holds(session, &state, LeaseMode::Read) && session.segment.keeps(state.lease.slot)
    }

    /// What was told of an open file may not be so: an operation was refused.
    pub(crate) fn unkeep(&self, open: &Open<H>) {
        if let Some(cache) = self.kernel.cache.read().as_ref() {
            cache.inode(open.inode.ino, -1, 0);
        }
    }

    /// Empties the kernel's cache of what was recalled, when it is; returns after a while.
    pub(crate) fn do_await_recalls(&self) {
        let cache = self.kernel.cache.read().clone();
        let (Some(cache), Some(session)) = (cache, self.current()) else {
            H::sleep(LOOK_MS * MS);
            return;
        };
        let empty = |ino: InodeId| {
            self.end_names(ino);
            cache.inode(ino, -1, 0);
        };
        let mut ended = if session.segment.attached() { session.previous } else { Some(session) };
        // Sessions are told apart by their numbers; of those before the last one seen nothing is left.
        let seen = self.kernel.session.load(Ordering::Relaxed);
        while let Some(session) = ended.filter(|s: &&Session<H>| s.number >= seen) {
            let _notes = self.kernel.notes.write();
            session.segment.release_kept(usize::MAX, |_| true, empty);
            ended = session.previous;
        }
        self.kernel.session.store(session.number, Ordering::Relaxed);
        let recalls = session.segment.recalls();
        let notes = self.kernel.notes.write();
        // Who was recalled is waited for.
        session.segment.release_kept(usize::MAX, |lease| lease == 0, empty);
        // When the leases' time is over nobody is waited for any more: others may go on at once. With
        // very many it takes long, so it is done in parts, between which recalls are heard. If
        // the time goes on meanwhile, nobody can have had the leases: the rest may stay.
        if session.segment.release_kept(LAPSED, |_| !session.segment.in_time(), empty) {
            return;
        }
        drop(notes);
        // A recall wakes; and when the time is over it is over, unless it goes on. (An idle machine sleeps.)
        let wait = match session.segment.time_left_ms() {
            u64::MAX => LOOK_MS,
            left => left.clamp(1, SLEEP_MS),
        };
        session.segment.await_recall(recalls, wait);
    }
}
