//! The mapped log segment: words shared with the service, in-operation marks, request slots.
//!
//! Everything here is reached through raw pointers: the service writes part of it at any time.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base::Errno;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use storage::format::control::{self, Descriptor, LeaseWord};
use storage::limits::{LEASE_SLOTS, OP_SLOTS, RPC_SLOT_BYTES, RPC_SLOTS};
use storage::persist;

/// A shared mapping that lives as long as the value.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory, reached only through atomics and raw copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd`.
    pub fn new(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Result<Self, Errno> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let at =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }
                .map_err(|e| Errno(e.raw_os_error() as u16))?;
        NonNull::new(at.cast()).map(|base| Self { base, len }).ok_or(Errno::NOMEM)
    }

    /// Bytes mapped.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out; `false` when the range is not inside.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> bool {
        let Some(at) = self.at(offset, buf.len()) else { return false };
        // SAFETY: `at` checked the range; `buf` is memory of our own. The service may be writing
        // the same bytes: callers check lease and position afterwards and then discard the copy.
        unsafe { core::ptr::copy_nonoverlapping(at, buf.as_mut_ptr(), buf.len()) };
        true
    }

    fn at(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = usize::try_from(offset).ok()?.checked_add(len)?;
        // SAFETY: offset + len <= self.len, so the pointer stays inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset as usize) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping made in `new`; nobody borrows from it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The client's side of a log segment.
#[derive(Debug)]
pub struct Segment {
    map: Mapping,
    /// What the service said about it.
    pub descriptor: Descriptor,
    bell: OwnedFd,
    /// Says whether the calling thread shall wait no longer.
    stop: Option<fn() -> bool>,
}

/// Which in-operation word a thread holds; leaving is explicit (`Segment::leave`).
#[derive(Debug)]
#[must_use]
pub struct InOp(usize);

impl Segment {
    /// Maps the segment behind `log`, which `bell` belongs to.
    pub fn map(
        log: BorrowedFd<'_>,
        bell: OwnedFd,
        stop: Option<fn() -> bool>,
    ) -> Result<Self, Errno> {
        let head = Mapping::new(log, 4096, false)?;
        let mut bytes = [0u8; control::DESCRIPTOR_BYTES];
        head.read(0, &mut bytes);
        let descriptor = Descriptor::decode(&bytes).map_err(|_| Errno::IO)?;
        let size = rustix::fs::fstat(log).map_err(|_| Errno::IO)?.st_size as u64;
        if size < descriptor.segment_bytes() {
            return Err(Errno::IO);
        }
        let map = Mapping::new(log, descriptor.segment_bytes() as usize, true)?;
        Ok(Self { map, descriptor, bell, stop })
    }

    /// A 64-bit word of the control area.
    #[inline]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= control::LANES);
        // SAFETY: the control area is mapped (its size is part of every segment), the offset is
        // aligned, and shared words are only ever accessed atomically.
        unsafe { &*self.map.base.as_ptr().add(offset as usize).cast::<AtomicU64>() }
    }

    /// A 32-bit word of the control area.
    #[inline]
    fn word32(&self, offset: u64) -> &AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 <= control::LANES);
        // SAFETY: as in `word`.
        unsafe { &*self.map.base.as_ptr().add(offset as usize).cast::<AtomicU32>() }
    }

    /// Enters an operation: from here on nothing may wait.
    #[inline]
    pub fn enter(&self) -> InOp {
        let probe = 0u8;
        // The stack's address tells threads apart, without thread-local storage.
        let mut slot = (core::ptr::from_ref(&probe) as usize >> 16) % OP_SLOTS;
        let mut tries = 0;
        loop {
            let word = self.word(control::in_op(slot));
            let value = word.load(Ordering::Relaxed);
            if value & 1 == 0
                && word
                    .compare_exchange(value, value + 1, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            {
                return InOp(slot);
            }
            slot = (slot + 1) % OP_SLOTS;
            tries += 1;
            if tries % OP_SLOTS == 0 {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Leaves it.
    #[inline]
    pub fn leave(&self, inside: InOp) {
        let word = self.word(control::in_op(inside.0));
        word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Whether a lease still holds. Meaningful inside an operation. (Entering it and this look must not
    /// change places, nor the service's store here and its look at who is inside: all four are in one
    /// order.)
    #[inline]
    pub fn lease_holds(&self, slot: u32, word: LeaseWord) -> bool {
        word.0 != 0
            && (slot as usize) < LEASE_SLOTS
            && self.word(control::lease_word(slot)).load(Ordering::SeqCst) == word.0
    }

    /// Notes that a kernel may cache what is learnt under the lease in `slot`. It counts only if the
    /// lease word is looked at again afterwards. Returns whether that was noted before.
    pub fn keep(&self, slot: u32) -> bool {
        let (word, bit) = control::kept(slot % LEASE_SLOTS as u32);
        let before = self.word(word).fetch_or(bit, Ordering::SeqCst);
        core::sync::atomic::fence(Ordering::SeqCst);
        before & bit != 0
    }

    /// Takes the note back.
    pub fn keep_no_more(&self, slot: u32) {
        let (word, bit) = control::kept(slot % LEASE_SLOTS as u32);
        self.word(word).fetch_and(!bit, Ordering::SeqCst);
    }

    /// Whether that is noted.
    pub fn keeps(&self, slot: u32) -> bool {
        let (word, bit) = control::kept(slot);
        (slot as usize) < LEASE_SLOTS && self.word(word).load(Ordering::SeqCst) & bit != 0
    }

    /// Empties the kernel's cache of what is noted and `gone`, by `empty`, and clears the notes. `gone` is
    /// asked about a slot whose lease word is the number. Ends after `most`; says whether it did.
    pub fn release_kept(
        &self,
        most: usize,
        gone: impl Fn(u64) -> bool,
        mut empty: impl FnMut(base::InodeId),
    ) -> bool {
        let mut left = most;
        for first in (0..LEASE_SLOTS as u32).step_by(64) {
            let word = self.word(control::kept(first).0);
            let mut bits = word.load(Ordering::SeqCst);
            while bits != 0 {
                let slot = first + bits.trailing_zeros();
                bits &= bits - 1;
                let lease = control::lease_word(slot);
                if gone(self.word(lease).load(Ordering::SeqCst)) {
                    empty(base::InodeId(self.word(lease - 8).load(Ordering::Acquire)));
                    word.fetch_and(!(1 << (slot % 64)), Ordering::SeqCst);
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
        self.word32(control::RECALLS).load(Ordering::SeqCst)
    }

    /// Waits until `recalls` is no longer what was seen, but not for long.
    pub fn await_recall(&self, seen: u32, limit_ms: u64) {
        let limit = rustix::time::Timespec {
            tv_sec: (limit_ms / 1000) as i64,
            tv_nsec: (limit_ms % 1000 * 1_000_000) as i64,
        };
        let word = self.word32(control::RECALLS);
        let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
    }

    /// Whether leases count at this moment, as far as time goes.
    #[inline]
    pub fn in_time(&self) -> bool {
        coarse_monotonic() < self.word(control::LEASES_UNTIL).load(Ordering::Acquire)
    }

    /// Milliseconds until leases count no more if nothing is heard; when they do not, a while.
    pub fn time_left_ms(&self) -> u64 {
        let until = self.word(control::LEASES_UNTIL).load(Ordering::Acquire);
        let left = until.saturating_sub(coarse_monotonic());
        if left == 0 { u64::MAX } else { left / 1_000_000 + 1 }
    }

    /// Waits until leases count again. STALE when the service is gone, INTR when the caller shall stop.
    #[cold]
    pub fn wait_in_time(&self) -> Result<(), Errno> {
        self.wait_until(|| self.in_time())
    }

    /// Whether the service still counts what is appended.
    #[inline]
    pub fn attached(&self) -> bool {
        self.word(control::STATE).load(Ordering::SeqCst) == control::STATE_ATTACHED
    }

    /// The last sequence that counts of an expelled client; waits until the service has read the
    /// log for the last time.
    pub fn sealed_at(&self) -> u64 {
        let word = self.word(control::SEALED_AT);
        // A service that dies in between seals at its restart; a second is longer than it reads.
        for _ in 0..1000 {
            let sealed = word.load(Ordering::Acquire);
            if sealed != control::SEAL_PENDING {
                return sealed;
            }
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
        }
        0
    }

    /// Rings the doorbell if the service sleeps more deeply than `awake_enough` allows.
    #[inline]
    pub fn ring(&self, urgent: bool) {
        let bell = self.word(control::DOORBELL);
        let order = if urgent { Ordering::SeqCst } else { Ordering::Relaxed };
        if urgent {
            core::sync::atomic::fence(Ordering::SeqCst);
        }
        let state = bell.load(order);
        let wanted = state == control::BELL_ASLEEP || (urgent && state == control::BELL_DOZING);
        if wanted
            && bell
                .compare_exchange(state, control::BELL_AWAKE, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
        {
            // An eventfd write fails only when its counter is full: then the bell rings already.
            let _ = rustix::io::write(self.bell.as_fd(), &1u64.to_le_bytes());
        }
    }

    /// Number of the doorbell's descriptor, to be kept from the program.
    pub fn bell_fd(&self) -> i32 {
        use rustix::fd::AsRawFd;
        self.bell.as_raw_fd()
    }

    /// Waits until `done` holds; the service's changes wake it.
    ///
    /// # Errors
    /// STALE when the session has ended, INTR when the caller was told to wait no longer.
    pub fn wait_until(&self, mut done: impl FnMut() -> bool) -> Result<(), Errno> {
        // A short spin first: an answer from another core arrives in a few microseconds, a sleep
        // and its wake cost more than that.
        for _ in 0..SPIN_ROUNDS {
            if done() {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        let event = self.word32(control::EVENT);
        let waiters = self.word(control::WAITERS);
        waiters.fetch_add(1, Ordering::SeqCst);
        let satisfied = loop {
            let seen = event.load(Ordering::SeqCst);
            if done() {
                break Ok(());
            }
            if !self.attached() {
                break if done() { Ok(()) } else { Err(Errno::STALE) };
            }
            if self.stop.is_some_and(|stop| stop()) {
                break Err(Errno::INTR);
            }
            // The time limit bounds the harm of a service that died before waking us, and how long
            // a caller that shall stop goes on.
            let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let _ = futex::wait(event, futex::Flags::empty(), seen, Some(&limit));
            if !done() {
                // After a silence, ring again: a restarted service knows nothing of the old ring.
                self.ring(true);
            }
        };
        waiters.fetch_sub(1, Ordering::SeqCst);
        satisfied
    }

    /// Waits until `done` holds, or the service ends, or the time is over.
    pub fn wait_at_most(&self, limit_ms: u64, mut done: impl FnMut() -> bool) {
        let event = self.word32(control::EVENT);
        let waiters = self.word(control::WAITERS);
        let clock = || {
            let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
        };
        let end = clock().saturating_add(limit_ms.saturating_mul(1_000_000));
        waiters.fetch_add(1, Ordering::SeqCst);
        loop {
            let seen = event.load(Ordering::SeqCst);
            if done() || !self.attached() {
                break;
            }
            let left = end.saturating_sub(clock());
            if left == 0 {
                break;
            }
            let limit = rustix::time::Timespec {
                tv_sec: (left / 1_000_000_000) as i64,
                tv_nsec: (left % 1_000_000_000) as i64,
            };
            let _ = futex::wait(event, futex::Flags::empty(), seen, Some(&limit));
        }
        waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// State word of request slot `slot`.
    pub fn slot_state(&self, slot: usize) -> &AtomicU32 {
        self.word32(slot_offset(slot))
    }

    /// Writes a request into a slot that the caller owns.
    pub fn slot_write(&self, slot: usize, body: &[u8]) {
        let base = slot_offset(slot);
        let body = &body[..body.len().min(RPC_SLOT_BYTES - 64)];
        self.word32(base + 4).store(body.len() as u32, Ordering::Relaxed);
        if let Some(at) = self.map.at(base + 64, body.len()) {
            // SAFETY: the range was checked; the slot is ours until its state says request.
            unsafe { core::ptr::copy_nonoverlapping(body.as_ptr(), at, body.len()) };
        }
    }

    /// Copies a reply out of a slot that the caller owns.
    pub fn slot_read(&self, slot: usize, out: &mut alloc::vec::Vec<u8>) {
        let base = slot_offset(slot);
        let len = self.word32(base + 4).load(Ordering::Relaxed) as usize;
        out.clear();
        out.resize(len.min(RPC_SLOT_BYTES - 64), 0);
        self.map.read(base + 64, out);
    }

    /// Writes into a lane so that the next fence makes it persistent. Ranges never wrap.
    pub fn lane_write(&self, lane: usize, position: u64, data: &[u8]) {
        let in_lane = position % self.descriptor.lane_bytes;
        debug_assert!(in_lane + data.len() as u64 <= self.descriptor.lane_bytes);
        if let Some(at) = self.map.at(self.descriptor.lane_offset(lane) + in_lane, data.len()) {
            // SAFETY: the range was checked, lies in the lane, and the lane's lock is held, so no
            // other thread of ours writes it; the service only reads it and validates its copy.
            unsafe { persist::copy_persistent(at, data) };
        }
    }

    /// Copies out of a lane; the caller checks afterwards that it was not overwritten meanwhile.
    pub fn lane_read(&self, lane: usize, position: u64, buf: &mut [u8]) -> bool {
        let in_lane = position % self.descriptor.lane_bytes;
        in_lane + buf.len() as u64 <= self.descriptor.lane_bytes
            && self.map.read(self.descriptor.lane_offset(lane) + in_lane, buf)
    }
}

/// CLOCK_MONOTONIC of the last tick, in nanoseconds.
#[inline]
fn coarse_monotonic() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

/// Rounds of the spin before a wait; about 10 microseconds.
const SPIN_ROUNDS: u32 = 250;

const fn slot_offset(slot: usize) -> u64 {
    assert!(slot < RPC_SLOTS);
    control::RPC + (slot * RPC_SLOT_BYTES) as u64
}
