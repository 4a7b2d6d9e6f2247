//! What a kernel in front of this client may cache: attributes, as long as the lease under which they were
//! learnt is not given back. The rule of the lease's slot (`format::control`, "What a kernel keeps") makes
//! the service wait until the kernel's cache is empty.
//!
//! An answer that is still on its way when its lease is recalled does no harm by itself: the kernel throws
//! attributes away that were asked for before an invalidation. Only an inode that it does not know yet has
//! nothing to compare with; the front end's `Invalidate` waits until it does. But a `read` that asked, and
//! whose answer is thrown away, goes on with the pages that the kernel has, which may be older than the
//! answer. So an answer that is *news* may not be kept: it is followed by no invalidation, so the kernel takes
//! it in and drops older pages. Attributes may be kept that were told first [`NEWS_MS`] ago, which is long
//! after the answer was taken in; and what is being changed is not kept, which saves its recalls.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base::InodeId;
use storage::format::control::LeaseMode;

use super::session::Session;
use super::sync::RwLock;
use super::{LibFs, Open};
use crate::fs::{Attr, Invalidate};

/// Between two looks at whether the session still is the one whose leases a kernel keeps.
const LOOK_MS: u64 = 100;

/// From telling attributes to their being no news, in milliseconds.
const NEWS_MS: u64 = 100;

/// Which version of an inode's attributes a kernel was told, and when first: a hash of the time of the last
/// change (each change has another) in the upper bits, milliseconds in the lower ones.
#[derive(Debug, Default)]
pub struct Told(AtomicU64);

/// Bits for the time: it comes round after 17 minutes, and then is news for a moment.
const TIME_BITS: u32 = 20;

impl Told {
    /// Notes it; whether it is no news.
    fn again(&self, attr: &Attr) -> bool {
        let changed = (attr.ctime.sec as u64).wrapping_mul(1_000_000_000);
        let version =
            changed.wrapping_add(attr.ctime.nsec.into()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let t = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        let now = (t.tv_sec as u64).wrapping_mul(1000).wrapping_add(t.tv_nsec as u64 / 1_000_000);
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
#[derive(Default)]
pub struct Kernel {
    cache: RwLock<Option<Arc<dyn Invalidate>>>,
    is_there: AtomicBool,
    /// Notes are made and cleared one at a time, so that one under a lease that is gone already can be
    /// taken back at once: the slot may belong to another lease a moment later.
    notes: RwLock<()>,
    /// Number of the session whose recalls are looked after.
    session: AtomicU64,
}

impl core::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Kernel").field("is_there", &self.is_there).finish_non_exhaustive()
    }
}

impl LibFs {
    pub(crate) fn do_attach_kernel(&self, cache: Arc<dyn Invalidate>) {
        *self.kernel.cache.write() = Some(cache);
        self.kernel.is_there.store(true, Ordering::Release);
    }

    /// Whether the kernel may keep these attributes until it is told. True only if they are what they
    /// are *after* the service was made to wait for the kernel.
    pub(crate) fn may_keep(&self, attr: &Attr) -> bool {
        if !self.kernel.is_there.load(Ordering::Acquire) {
            return false;
        }
        let Some(session) = self.current() else { return false };
        let Some(inode) = self.inodes.read().get(&attr.ino.0).cloned() else { return false };
        if !inode.told.again(attr) {
            return false;
        }
        // Somebody changes it, or waits for its lease: not worth waiting for.
        let Some(state) = inode.state.try_read() else { return false };
        if !self.holds(session, &state, LeaseMode::Read) || state.attr() != *attr {
            return false;
        }
        let Some(_notes) = self.kernel.notes.try_write() else { return false };
        let slot = state.lease.slot;
        let kept = session.segment.keep(slot);
        let counts = session.segment.attached() && self.holds(session, &state, LeaseMode::Read);
        if !counts && !kept {
            session.segment.keep_no_more(slot);
        }
        counts
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
    pub(crate) fn unkeep(&self, open: &Open) {
        if let Some(cache) = self.kernel.cache.read().as_ref() {
            cache.inode(open.inode.ino, -1, 0);
        }
    }

    /// Empties the kernel's cache of what was recalled, when it is; returns after a while.
    pub(crate) fn do_await_recalls(&self) {
        let cache = self.kernel.cache.read().clone();
        let (Some(cache), Some(session)) = (cache, self.current()) else {
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
            return;
        };
        let empty = |ino: InodeId| cache.inode(ino, -1, 0);
        let mut ended = if session.segment.attached() { session.previous } else { Some(session) };
        // Sessions are told apart by their numbers; of those before the last one seen nothing is left.
        let seen = self.kernel.session.load(Ordering::Relaxed);
        while let Some(session) = ended.filter(|s: &&Session| s.number >= seen) {
            let _notes = self.kernel.notes.write();
            session.segment.release_kept(|_| true, empty);
            ended = session.previous;
        }
        self.kernel.session.store(session.number, Ordering::Relaxed);
        let recalls = session.segment.recalls();
        {
            let _notes = self.kernel.notes.write();
            // When the leases' time is over nobody is waited for any more: others may go on at once.
            let lapsed = !session.segment.in_time();
            session.segment.release_kept(|lease| lease == 0 || lapsed, empty);
        }
        session.segment.await_recall(recalls, session.segment.time_left_ms().clamp(1, LOOK_MS));
    }
}
