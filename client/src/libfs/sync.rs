//! Locks and words that threads of one process share, over the [`Host`]'s waiting: no libc, no thread-local
//! storage, nothing to initialise.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use base::Errno;
use base::planted::{Bug, planted};

use super::host::{EVERYBODY, Host, MS, NO_LIMIT};
use super::linux::Linux;

/// Spins before sleeping: critical sections here are a few hundred nanoseconds.
const SPINS: u32 = 60;
/// Between two looks at whether a thread that waits for a lock shall wait no longer.
const LOOK: u64 = 100 * MS;

/// A word that threads share; each access is a [`point`](Host::point).
pub struct Word<H: Host>(AtomicU64, PhantomData<fn() -> H>);

impl<H: Host> core::fmt::Debug for Word<H> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl<H: Host> Default for Word<H> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<H: Host> Word<H> {
    /// With a value.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value), PhantomData)
    }

    /// Its value.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        H::point();
        self.0.load(order)
    }

    /// Stores.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        H::point();
        self.0.store(value, order);
    }

    /// Stores, and gives what was there.
    #[inline]
    pub fn swap(&self, value: u64, order: Ordering) -> u64 {
        H::point();
        self.0.swap(value, order)
    }

    /// Adds, and gives what was there.
    #[inline]
    pub fn add(&self, by: u64, order: Ordering) -> u64 {
        H::point();
        self.0.fetch_add(by, order)
    }

    /// Raises.
    #[inline]
    pub fn raise(&self, value: u64, order: Ordering) {
        H::point();
        self.0.fetch_max(value, order);
    }
}

/// A value on a line of its own: what is written all the time makes nobody wait who reads what lies beside it.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Alone<T>(pub T);

impl<T> Deref for Alone<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A readers-writer lock; writers are preferred once they wait.
///
/// Readers count themselves in one word, which each of them writes. Where many read at once that line goes from core to
/// core with every read; so a lock can be [spread](WriteGuard::spread): then a reader counts himself in one of some words by
/// who he is ([`read_by`](Self::read_by)), each on a line of its own, and a writer, who is rarer and pays for it, looks at all of
/// them when he has the lock.
///
/// `state`: bit 31 a writer holds it, bit 30 somebody waits, bit 29 the writer waits for readers in those words; low bits
/// count readers.
pub struct RwLock<T, H: Host = Linux> {
    state: AtomicU32,
    /// How often it was locked by a writer.
    version: AtomicU64,
    /// Null, or a leaked box that lives as long as the lock.
    spread: AtomicPtr<Spread>,
    /// Somebody has waited for it.
    contended: AtomicBool,
    value: UnsafeCell<T>,
    host: PhantomData<fn() -> H>,
}

/// Words in which readers of a spread lock count themselves.
const SPREAD: usize = 16;

#[derive(Default)]
struct Spread([Alone<AtomicU32>; SPREAD]);

impl<T, H: Host> Drop for RwLock<T, H> {
    fn drop(&mut self) {
        let spread = *self.spread.get_mut();
        if !spread.is_null() {
            // SAFETY: it came from `Box::into_raw` in `WriteGuard::spread`, and no guard outlives the lock.
            drop(unsafe { Box::from_raw(spread) });
        }
    }
}

impl<T, H: Host> core::fmt::Debug for RwLock<T, H> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RwLock").field("state", &self.state).finish_non_exhaustive()
    }
}

impl<T: Default, H: Host> Default for RwLock<T, H> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

// SAFETY: the lock hands out `&mut T` to one thread or `&T` to several, never both.
unsafe impl<T: Send, H: Host> Send for RwLock<T, H> {}
// SAFETY: as above; `T: Sync` because readers on several threads share `&T`.
unsafe impl<T: Send + Sync, H: Host> Sync for RwLock<T, H> {}

const WRITER: u32 = 1 << 31;
const WAITING: u32 = 1 << 30;
const DRAINING: u32 = 1 << 29;
const READERS: u32 = DRAINING - 1;

/// The word when one more reader is in, if one may come in.
const fn for_reader(state: u32) -> Option<u32> {
    if state & (WRITER | WAITING) == 0 { Some(state + 1) } else { None }
}

/// The word when a writer is in, if one may come in. WAITING stays: others may still sleep, and the unlock
/// must wake them.
const fn for_writer(state: u32) -> Option<u32> {
    if is_held(state) { None } else { Some(state | WRITER) }
}

const fn is_held(state: u32) -> bool {
    state & (WRITER | READERS) != 0
}

/// Whether a reader who has counted himself in a word of his own is in.
const fn is_for_counted(state: u32) -> bool {
    state & WRITER == 0
}

impl<T, H: Host> RwLock<T, H> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self {
            state: AtomicU32::new(0),
            version: AtomicU64::new(0),
            spread: AtomicPtr::new(core::ptr::null_mut()),
            contended: AtomicBool::new(false),
            value: UnsafeCell::new(value),
            host: PhantomData,
        }
    }

    /// Shared access.
    pub fn read(&self) -> ReadGuard<'_, T, H> {
        H::point();
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_reader(state) {
                Some(to) if self.swap(state, to) => return ReadGuard { lock: self, count: None },
                Some(_) => {}
                None => self.block(state, &mut spins, NO_LIMIT),
            }
        }
    }

    /// Shared access for one whose number is `by`: if the lock is spread, no line is written that readers with other
    /// numbers write.
    #[inline]
    pub fn read_by(&self, by: u64) -> ReadGuard<'_, T, H> {
        let Some(spread) = self.spread() else { return self.read() };
        let count = &spread.0[by as usize % SPREAD].0;
        H::point();
        loop {
            // Counted first, and looked then: a writer does the same the other way round.
            if planted(Bug::CountedLate) {
                let free = is_for_counted(self.state.load(Ordering::SeqCst));
                H::point();
                if free {
                    count.fetch_add(1, Ordering::SeqCst);
                    return ReadGuard { lock: self, count: Some(count) };
                }
            } else {
                count.fetch_add(1, Ordering::SeqCst);
                H::point();
                if is_for_counted(self.state.load(Ordering::SeqCst)) {
                    return ReadGuard { lock: self, count: Some(count) };
                }
                self.uncount(count);
            }
            self.await_writer();
        }
    }

    #[inline]
    fn spread(&self) -> Option<&Spread> {
        let spread = self.spread.load(Ordering::Acquire);
        // SAFETY: null, or what `WriteGuard::spread` leaked, which is freed with the lock.
        unsafe { spread.as_ref() }
    }

    /// A reader who was counted in a word of his own is out again.
    #[inline]
    fn uncount(&self, count: &AtomicU32) {
        count.fetch_sub(1, Ordering::SeqCst);
        if self.state.load(Ordering::SeqCst) & DRAINING != 0 {
            self.wake_draining();
        }
    }

    #[cold]
    fn wake_draining(&self) {
        // The word changes, so that a writer who has looked and does not sleep yet does not go to sleep.
        self.state.fetch_and(!DRAINING, Ordering::SeqCst);
        H::wake(&self.state, EVERYBODY);
    }

    /// Waits until no writer has it; may return early.
    #[cold]
    fn await_writer(&self) {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if is_for_counted(state) {
                return;
            }
            self.block(state, &mut spins, NO_LIMIT);
        }
    }

    /// The lock is ours: waits for the readers that were in before, and begins a version.
    #[inline]
    fn enter(&self) -> WriteGuard<'_, T, H> {
        if let Some(spread) = self.spread() {
            self.drain(spread);
        }
        self.version.store(self.version.load(Ordering::Relaxed) + 1, Ordering::Release);
        WriteGuard { lock: self }
    }

    fn drain(&self, spread: &Spread) {
        H::point();
        for Alone(count) in &spread.0 {
            let mut spins = 0;
            while count.load(Ordering::SeqCst) != 0 && !planted(Bug::NotDrained) {
                if spins < SPINS {
                    spins += 1;
                    H::spin();
                    continue;
                }
                let seen = self.state.fetch_or(DRAINING, Ordering::SeqCst) | DRAINING;
                H::point();
                if count.load(Ordering::SeqCst) != 0 {
                    H::wait(&self.state, seen, NO_LIMIT);
                }
            }
        }
        if self.state.load(Ordering::Relaxed) & DRAINING != 0 {
            self.state.fetch_and(!DRAINING, Ordering::Relaxed);
        }
    }

    /// How often a writer has locked it: while it stays the same, nothing behind the lock changes. For one who holds
    /// it, or has copied what it led to since he held it.
    #[inline]
    pub fn version(&self) -> u64 {
        core::sync::atomic::fence(Ordering::Acquire);
        H::point();
        self.version.load(Ordering::Acquire)
    }

    /// Exclusive access.
    pub fn write(&self) -> WriteGuard<'_, T, H> {
        H::point();
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_writer(state) {
                Some(to) if self.swap(state, to) => return self.enter(),
                Some(_) => {}
                None => self.block(state, &mut spins, NO_LIMIT),
            }
        }
    }

    /// Exclusive access, of which something that takes long is done: EINTR when `stops` says so meanwhile.
    pub fn write_unless(&self, stops: impl Fn() -> bool) -> Result<WriteGuard<'_, T, H>, Errno> {
        H::point();
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_writer(state) {
                Some(to) if self.swap(state, to) => return Ok(self.enter()),
                Some(_) => {}
                None if spins >= SPINS && stops() => return Err(Errno::INTR),
                None => self.block(state, &mut spins, LOOK),
            }
        }
    }

    /// Shared access, if it can be had now.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T, H>> {
        H::point();
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if self.swap(state, for_reader(state)?) {
                return Some(ReadGuard { lock: self, count: None });
            }
        }
    }

    /// Exclusive access, if it is free now.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T, H>> {
        H::point();
        let state = self.state.load(Ordering::Relaxed);
        let is_ours = for_writer(state).is_some_and(|to| self.swap(state, to));
        // Not `then_some`: a guard that is made and dropped gives back what somebody else holds.
        if !is_ours {
            return None;
        }
        let is_read = |Alone(count): &Alone<AtomicU32>| count.load(Ordering::SeqCst) != 0;
        if self.spread().is_some_and(|spread| spread.0.iter().any(is_read)) {
            drop(WriteGuard { lock: self });
            return None;
        }
        Some(self.enter())
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange_weak(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Whether anybody has ever waited for it.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.contended.load(Ordering::Relaxed)
    }

    #[cold]
    fn block(&self, state: u32, spins: &mut u32, limit: u64) {
        if *spins < SPINS {
            if *spins == 0 {
                self.contended.store(true, Ordering::Relaxed);
            }
            *spins += 1;
            H::spin();
            return;
        }
        // Only readers that came with nobody waiting hold it, or a writer does.
        if !is_held(state) {
            // Free but flagged: a reader arrives here; clear the flag and wake everybody.
            if self.swap(state, 0) {
                H::wake(&self.state, EVERYBODY);
            }
            return;
        }
        if state & WAITING != 0 || self.swap(state, state | WAITING) {
            H::wait(&self.state, state | WAITING, limit);
        }
    }

    #[cold]
    fn release_waiters(&self) {
        self.state.fetch_and(!WAITING, Ordering::Relaxed);
        H::wake(&self.state, EVERYBODY);
    }
}

/// Shared access to a [`RwLock`].
#[derive(Debug)]
pub struct ReadGuard<'a, T, H: Host = Linux> {
    lock: &'a RwLock<T, H>,
    /// Where he has counted himself, if the lock is spread.
    count: Option<&'a AtomicU32>,
}

/// Exclusive access to a [`RwLock`].
#[derive(Debug)]
pub struct WriteGuard<'a, T, H: Host = Linux> {
    lock: &'a RwLock<T, H>,
}

impl<T, H: Host> WriteGuard<'_, T, H> {
    /// From now on readers count themselves in words of their own: for a value that many read at once. A KiB of memory.
    pub fn spread(&mut self) {
        if self.lock.spread.load(Ordering::Relaxed).is_null() {
            // Who has seen none has counted himself in the lock's word, for which a writer waits in any case; and who sees
            // this one finds a writer in the lock until we leave.
            let spread = Box::into_raw(Box::<Spread>::default());
            self.lock.spread.store(spread, Ordering::Release);
        }
    }
}

impl<T, H: Host> Drop for ReadGuard<'_, T, H> {
    #[inline]
    fn drop(&mut self) {
        if let Some(count) = self.count {
            self.lock.uncount(count);
            H::point();
            return;
        }
        let before = self.lock.state.fetch_sub(1, Ordering::Release);
        if before & READERS == 1 && before & WAITING != 0 {
            self.lock.release_waiters();
        }
        H::point();
    }
}

impl<T, H: Host> Drop for WriteGuard<'_, T, H> {
    fn drop(&mut self) {
        if self.lock.state.fetch_and(!WRITER, Ordering::Release) & WAITING != 0 {
            self.lock.release_waiters();
        }
        H::point();
    }
}

impl<T, H: Host> Deref for ReadGuard<'_, T, H> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while this guard lives the reader count is above zero, so no writer exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, H: Host> Deref for WriteGuard<'_, T, H> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while this guard lives WRITER is set, so it is the only access.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, H: Host> DerefMut for WriteGuard<'_, T, H> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(all(test, feature = "std"))]
mod model;

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_try_that_fails_leaves_the_lock_to_its_holder() {
        let lock: RwLock<i32> = RwLock::new(0);
        let held = lock.write();
        assert!(lock.try_write().is_none() && lock.try_read().is_none());
        assert!(lock.try_write().is_none() && lock.try_read().is_none(), "the first let go of it");
        drop(held);
        let shared = lock.read();
        assert!(lock.try_write().is_none());
        assert!(lock.try_read().is_some());
        drop(shared);
        assert!(lock.try_write().is_some());
        assert_eq!(lock.state.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn writers_exclude_each_other_and_readers_see_whole_values() {
        all_see_whole_values(&Arc::default());
        let spread: Arc<RwLock<(u64, u64)>> = Arc::default();
        spread.write().spread();
        all_see_whole_values(&spread);
        assert_eq!(spread.state.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn readers_of_a_spread_lock_write_no_line_of_each_other() {
        let lock: RwLock<i32> = RwLock::new(0);
        lock.write().spread();
        let (version, word) = (lock.version(), lock.state.load(Ordering::Relaxed));
        let guards: Vec<_> = (0..SPREAD as u64).map(|by| lock.read_by(by)).collect();
        assert_eq!((lock.version(), lock.state.load(Ordering::Relaxed)), (version, word));
        let mut lines: Vec<_> =
            guards.iter().map(|g| core::ptr::from_ref(g.count.unwrap())).collect();
        lines.iter_mut().for_each(|line| *line = ((*line as usize) & !63) as *const _);
        lines.dedup();
        assert_eq!(lines.len(), SPREAD);
        assert!(lock.try_write().is_none());
        drop(guards);
        assert!(lock.try_write().is_some());
        assert_eq!(lock.version(), version + 1);
    }

    fn all_see_whole_values(lock: &Arc<RwLock<(u64, u64)>>) {
        let threads: Vec<_> = (0..4)
            .map(|n| {
                let lock = Arc::clone(lock);
                std::thread::spawn(move || {
                    for i in 0..20_000u64 {
                        let write = |mut pair: WriteGuard<'_, (u64, u64)>| {
                            pair.0 += 1;
                            core::hint::spin_loop();
                            pair.1 += 1;
                        };
                        match (i + n) % 5 {
                            0 => write(lock.write()),
                            1 => lock.try_write().into_iter().for_each(write),
                            2 => {
                                if let Some(pair) = lock.try_read() {
                                    assert_eq!(pair.0, pair.1);
                                }
                            }
                            3 => {
                                let pair = lock.read_by(n);
                                assert_eq!(pair.0, pair.1);
                            }
                            _ => {
                                let pair = lock.read();
                                assert_eq!(pair.0, pair.1);
                            }
                        }
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().expect("no assertion failed");
        }
        let pair = lock.read();
        assert_eq!(pair.0, pair.1);
        assert!(pair.0 >= 16_000);
    }
}
