//! Locks and words that threads of one process share, over the [`Host`]'s waiting: no libc, no thread-local
//! storage, nothing to initialise.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base::Errno;

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

/// A readers-writer lock; writers are preferred once they wait.
///
/// `state`: bit 31 a writer holds it, bit 30 somebody waits, low bits count readers.
pub struct RwLock<T, H: Host = Linux> {
    state: AtomicU32,
    value: UnsafeCell<T>,
    host: PhantomData<fn() -> H>,
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
const READERS: u32 = WAITING - 1;

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

impl<T, H: Host> RwLock<T, H> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self { state: AtomicU32::new(0), value: UnsafeCell::new(value), host: PhantomData }
    }

    /// Shared access.
    pub fn read(&self) -> ReadGuard<'_, T, H> {
        H::point();
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_reader(state) {
                Some(to) if self.swap(state, to) => return ReadGuard { lock: self },
                Some(_) => {}
                None => self.block(state, &mut spins, NO_LIMIT),
            }
        }
    }

    /// Exclusive access.
    pub fn write(&self) -> WriteGuard<'_, T, H> {
        H::point();
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_writer(state) {
                Some(to) if self.swap(state, to) => return WriteGuard { lock: self },
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
                Some(to) if self.swap(state, to) => return Ok(WriteGuard { lock: self }),
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
                return Some(ReadGuard { lock: self });
            }
        }
    }

    /// Exclusive access, if it is free now.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T, H>> {
        H::point();
        let state = self.state.load(Ordering::Relaxed);
        let is_ours = for_writer(state).is_some_and(|to| self.swap(state, to));
        // Not `then_some`: a guard that is made and dropped gives back what somebody else holds.
        is_ours.then(|| WriteGuard { lock: self })
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange_weak(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn block(&self, state: u32, spins: &mut u32, limit: u64) {
        if *spins < SPINS {
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
}

/// Exclusive access to a [`RwLock`].
#[derive(Debug)]
pub struct WriteGuard<'a, T, H: Host = Linux> {
    lock: &'a RwLock<T, H>,
}

impl<T, H: Host> Drop for ReadGuard<'_, T, H> {
    fn drop(&mut self) {
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
        let lock: Arc<RwLock<(u64, u64)>> = Arc::default();
        let threads: Vec<_> = (0..4)
            .map(|n| {
                let lock = Arc::clone(&lock);
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
