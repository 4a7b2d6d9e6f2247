//! The control area of the log segment: words shared with the service, in-operation marks, what a kernel keeps,
//! waiting (`storage::format::control` has the rules).

use alloc::vec::Vec;
use core::sync::atomic::{Ordering, fence};

use base::planted::{Bug, planted};
use base::{Errno, InodeId};
use storage::format::control::{self, Descriptor, LeaseWord};
use storage::limits::{LEASE_SLOTS, OP_SLOTS};

use super::host::{Door, Host, MS, Memory};
use super::limits::Config;

/// How long a thread sleeps before it looks whether the service is still there.
const LOOK: u64 = 100 * MS;
/// After so many looks at which nothing had happened it asks hostd whether the node has this log still.
const SILENT_LOOKS: u32 = 20;

/// The client's side of a log segment.
#[derive(Debug)]
pub struct Segment<H: Host> {
    /// The memory.
    pub memory: H::Memory,
    door: H::Door,
    /// What the service said about it.
    pub descriptor: Descriptor,
    /// Says whether the calling thread shall wait no longer.
    stop: Option<fn() -> bool>,
}

fn closed_words() -> impl Iterator<Item = u64> {
    (0..control::CLOSED_SLOTS as u64).map(|slot| control::CLOSED + slot * 8)
}

/// Which in-operation word a thread holds; leaving is explicit (`Segment::leave`).
#[derive(Debug)]
#[must_use]
pub struct InOp(usize);

impl<H: Host> Segment<H> {
    /// Attaches.
    pub fn attach(config: &Config) -> Result<Self, Errno> {
        let (memory, door) = H::attach(config)?;
        let mut bytes = [0u8; control::DESCRIPTOR_BYTES];
        if !memory.read(0, &mut bytes) {
            return Err(Errno::IO);
        }
        let descriptor = Descriptor::decode(&bytes).map_err(|_| Errno::IO)?;
        Ok(Self { memory, door, descriptor, stop: config.stop })
    }

    /// A word of the service.
    #[inline]
    pub fn word(&self, at: u64) -> u64 {
        self.memory.load(at, Ordering::Acquire)
    }

    /// Whether the calling thread shall wait no longer.
    pub fn stops(&self) -> bool {
        self.stop.is_some_and(|stop| stop())
    }

    /// An arena.
    pub fn arena(&self, config: &Config, arena: u32) -> Result<Option<H::Memory>, Errno> {
        self.door.arena(config, arena, self.descriptor.arena_bytes)
    }

    /// Bytes of each arena.
    #[inline]
    pub const fn arena_bytes(&self) -> u64 {
        self.descriptor.arena_bytes
    }

    /// Descriptors that it keeps open, to be kept from the program.
    pub fn descriptors(&self) -> Vec<i32> {
        self.door.descriptors()
    }

    /// The session is over: no descriptor of it is needed.
    pub fn shut(&self) {
        self.door.shut();
    }

    // --- operations and leases ---

    /// Enters an operation: from here on nothing may wait.
    #[inline]
    pub fn enter(&self) -> InOp {
        let mut slot = H::thread() % OP_SLOTS;
        let mut tries = 0;
        loop {
            let at = control::in_op(slot);
            let value = self.memory.load(at, Ordering::Relaxed);
            if value & 1 == 0 && self.memory.swap(at, value, value + 1) {
                return InOp(slot);
            }
            slot = (slot + 1) % OP_SLOTS;
            tries += 1;
            if tries % OP_SLOTS == 0 {
                H::yield_now();
            }
        }
    }

    /// Leaves it.
    #[inline]
    pub fn leave(&self, inside: InOp) {
        let at = control::in_op(inside.0);
        let value = self.memory.load(at, Ordering::Relaxed);
        self.memory.store(at, value.wrapping_add(1), Ordering::Release);
    }

    /// Whether a lease still holds. Meaningful inside an operation. (Entering it and this look must not
    /// change places, nor the service's store here and its look at who is inside: all four are in one
    /// order.)
    #[inline]
    pub fn lease_holds(&self, slot: u32, word: LeaseWord) -> bool {
        word.0 != 0
            && (slot as usize) < LEASE_SLOTS
            && self.memory.load(control::lease_word(slot), Ordering::SeqCst) == word.0
    }

    /// Whether leases count at this moment, as far as time goes.
    #[inline]
    pub fn in_time(&self) -> bool {
        H::tick() < self.word(control::LEASES_UNTIL) || planted(Bug::LapseIgnored)
    }

    /// Milliseconds until leases count no more if nothing is heard; when they do not, a while.
    pub fn time_left_ms(&self) -> u64 {
        let left = self.word(control::LEASES_UNTIL).saturating_sub(H::tick());
        if left == 0 { u64::MAX } else { left / MS + 1 }
    }

    /// Whether the service still counts what is appended.
    #[inline]
    pub fn attached(&self) -> bool {
        self.memory.load(control::STATE, Ordering::SeqCst) == control::STATE_ATTACHED
    }

    /// The last sequence that counts of a client that was expelled or dismissed; waits until the service has
    /// read the log for the last time.
    pub fn sealed_at(&self) -> u64 {
        // A service that dies in between seals at its restart; a second is longer than it reads.
        for _ in 0..1000 {
            let sealed = self.word(control::SEALED_AT);
            if sealed != control::SEAL_PENDING {
                return sealed;
            }
            H::sleep(MS);
        }
        0
    }

    // --- closed inodes ---

    /// Says that an inode is open no more, in one of the first so many words; `false`: none is free.
    pub fn put_closed(&self, ino: InodeId, most: usize) -> bool {
        closed_words().take(most).any(|at| {
            self.memory.load(at, Ordering::Relaxed) == 0 && self.memory.swap(at, 0, ino.0)
        })
    }

    /// It is open again, or that is said otherwise. `false`: the service was there first, or it was never said.
    pub fn take_closed(&self, ino: InodeId) -> bool {
        closed_words().any(|at| {
            self.memory.load(at, Ordering::Relaxed) == ino.0 && self.memory.swap(at, ino.0, 0)
        })
    }

    /// Takes out all that the service has not.
    pub fn take_all_closed(&self, out: &mut Vec<InodeId>) {
        for at in closed_words() {
            let ino = self.memory.load(at, Ordering::Relaxed);
            if ino != 0 && self.memory.swap(at, ino, 0) {
                out.push(InodeId(ino));
            }
        }
    }

    // --- what a kernel keeps ---

    /// Notes that a kernel may cache what is learnt under the lease in `slot`. It counts only if the
    /// lease word is looked at again afterwards. Returns whether that was noted before.
    pub fn keep(&self, slot: u32) -> bool {
        let (word, bit) = control::kept(slot % LEASE_SLOTS as u32);
        let before = self.memory.set(word, bit);
        fence(Ordering::SeqCst);
        before & bit != 0
    }

    /// Takes the note back.
    pub fn keep_no_more(&self, slot: u32) {
        let (word, bit) = control::kept(slot % LEASE_SLOTS as u32);
        self.memory.clear(word, bit);
    }

    /// Whether that is noted.
    pub fn keeps(&self, slot: u32) -> bool {
        let (word, bit) = control::kept(slot);
        (slot as usize) < LEASE_SLOTS && self.memory.load(word, Ordering::SeqCst) & bit != 0
    }

    /// Empties the kernel's cache of what is noted and `gone`, by `empty`, and clears the notes. `gone` is
    /// asked about a slot whose lease word is the number. Ends after `most`; says whether it did.
    pub fn release_kept(
        &self,
        most: usize,
        gone: impl Fn(u64) -> bool,
        mut empty: impl FnMut(InodeId),
    ) -> bool {
        let mut left = most;
        for first in (0..LEASE_SLOTS as u32).step_by(64) {
            let word = control::kept(first).0;
            let mut bits = self.memory.load(word, Ordering::SeqCst);
            while bits != 0 {
                let slot = first + bits.trailing_zeros();
                bits &= bits - 1;
                let lease = control::lease_word(slot);
                if gone(self.memory.load(lease, Ordering::SeqCst)) {
                    empty(InodeId(self.word(lease - 8)));
                    self.memory.clear(word, 1 << (slot % 64));
                    left -= 1;
                    if left == 0 {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// How often kept leases have been taken back.
    pub fn recalls(&self) -> u32 {
        self.memory.load32(control::RECALLS, Ordering::SeqCst)
    }

    /// Waits until `recalls` is no longer what was seen, but not for long.
    pub fn await_recall(&self, seen: u32, limit_ms: u64) {
        self.memory.wait(control::RECALLS, seen, limit_ms.saturating_mul(MS));
    }

    // --- waiting and waking ---

    /// Rings the doorbell if the service sleeps; one that only dozes (a timer will collect appended entries) if
    /// it is urgent.
    #[inline]
    pub fn ring(&self, urgent: bool) {
        let order = if urgent { Ordering::SeqCst } else { Ordering::Relaxed };
        if urgent {
            fence(Ordering::SeqCst);
        }
        let state = self.memory.load(control::DOORBELL, order);
        let wanted = state == control::BELL_ASLEEP || (urgent && state == control::BELL_DOZING);
        if wanted && self.memory.swap(control::DOORBELL, state, control::BELL_AWAKE) {
            self.door.ring();
        }
    }

    /// Waits until leases count again. STALE when the service is gone, INTR when the caller shall stop.
    #[cold]
    pub fn wait_in_time(&self) -> Result<(), Errno> {
        self.wait_until(|| self.in_time())
    }

    /// Waits until `done` holds; the service's changes wake it.
    ///
    /// # Errors
    /// STALE when the session has ended, INTR when the caller was told to wait no longer.
    pub fn wait_until(&self, mut done: impl FnMut() -> bool) -> Result<(), Errno> {
        // A short spin first: an answer from another core arrives in a few microseconds, a sleep
        // and its wake cost more than that.
        for _ in 0..H::SPINS {
            if done() {
                return Ok(());
            }
            H::spin();
        }
        self.memory.add(control::WAITERS, 1);
        let mut silent = 0;
        let satisfied = loop {
            let seen = self.memory.load32(control::EVENT, Ordering::SeqCst);
            if done() {
                break Ok(());
            }
            if !self.attached() {
                break if done() { Ok(()) } else { Err(Errno::STALE) };
            }
            if self.stops() {
                break Err(Errno::INTR);
            }
            // The time limit bounds the harm of a service that died before waking us, and how long
            // a caller that shall stop goes on.
            self.memory.wait(control::EVENT, seen, LOOK);
            if !done() {
                // After a silence, ring again: a restarted service knows nothing of the old ring.
                self.ring(true);
                let heard = self.memory.load32(control::EVENT, Ordering::SeqCst) != seen;
                silent = if heard { 0 } else { silent + 1 };
                if silent % SILENT_LOOKS == SILENT_LOOKS - 1 {
                    self.end_if_unknown();
                }
            }
        };
        self.memory.add(control::WAITERS, u64::MAX);
        satisfied
    }

    /// Ends the session if the node does not have this log any more: somebody began its region anew, and nobody reads or writes
    /// here. What had reached every member before counts.
    #[cold]
    fn end_if_unknown(&self) {
        if self.door.knows(self.descriptor.client) != Some(false) {
            return;
        }
        // In this order: who sees that it ended looks where.
        let replicated = self.word(control::REPLICATED);
        self.memory.store(control::SEALED_AT, replicated, Ordering::SeqCst);
        self.memory.store(control::STATE, control::STATE_GONE, Ordering::SeqCst);
    }

    /// Waits until `done` holds, or the service ends, or the time is over.
    pub fn wait_at_most(&self, limit_ms: u64, mut done: impl FnMut() -> bool) {
        let end = H::monotonic().saturating_add(limit_ms.saturating_mul(MS));
        self.memory.add(control::WAITERS, 1);
        loop {
            let seen = self.memory.load32(control::EVENT, Ordering::SeqCst);
            if done() || !self.attached() {
                break;
            }
            let left = end.saturating_sub(H::monotonic());
            if left == 0 {
                break;
            }
            self.memory.wait(control::EVENT, seen, left);
        }
        self.memory.add(control::WAITERS, u64::MAX);
    }
}
