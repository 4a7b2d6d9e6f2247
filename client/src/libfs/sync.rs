//! Locks over futexes: no libc, no thread-local storage, nothing to initialise.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

/// Spins before sleeping: critical sections here are a few hundred nanoseconds.
const SPINS: u32 = 60;

/// Sleepers to wake; the kernel takes the count as signed, and a negative one as 1.
pub(crate) const EVERYBODY: u32 = i32::MAX as u32;

pub(crate) fn wait(word: &AtomicU32, seen: u32) {
    // Any outcome (woken, value changed, signal) means: look again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, None);
}

pub(crate) fn wait_at_most(word: &AtomicU32, seen: u32, limit_ms: u32) {
    let tv_nsec = i64::from(limit_ms % 1000) * 1_000_000;
    let limit = rustix::time::Timespec { tv_sec: i64::from(limit_ms / 1000), tv_nsec };
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, Some(&limit));
}

pub(crate) fn wake(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, count);
}

/// A readers-writer lock; writers are preferred once they wait.
///
/// `state`: bit 31 a writer holds it, bit 30 somebody waits, low bits count readers.
#[derive(Debug, Default)]
pub struct RwLock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands out `&mut T` to one thread or `&T` to several, never both.
unsafe impl<T: Send> Send for RwLock<T> {}
// SAFETY: as above; `T: Sync` because readers on several threads share `&T`.
unsafe impl<T: Send + Sync> Sync for RwLock<T> {}

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

impl<T> RwLock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self { state: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Shared access.
    pub fn read(&self) -> ReadGuard<'_, T> {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_reader(state) {
                Some(to) if self.swap(state, to) => return ReadGuard { lock: self },
                Some(_) => {}
                None => self.block(state, &mut spins),
            }
        }
    }

    /// Exclusive access.
    pub fn write(&self) -> WriteGuard<'_, T> {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            match for_writer(state) {
                Some(to) if self.swap(state, to) => return WriteGuard { lock: self },
                Some(_) => {}
                None => self.block(state, &mut spins),
            }
        }
    }

    /// Shared access, if it can be had now.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if self.swap(state, for_reader(state)?) {
                return Some(ReadGuard { lock: self });
            }
        }
    }

    /// Exclusive access, if it is free now.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        let state = self.state.load(Ordering::Relaxed);
        let is_ours = for_writer(state).is_some_and(|to| self.swap(state, to));
        // Not `then_some`: a guard that is made and dropped gives back what somebody else holds.
        is_ours.then(|| WriteGuard { lock: self })
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange_weak(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn block(&self, state: u32, spins: &mut u32) {
        if *spins < SPINS {
            *spins += 1;
            core::hint::spin_loop();
            return;
        }
        // Only readers that came with nobody waiting hold it, or a writer does.
        if !is_held(state) {
            // Free but flagged: a reader arrives here; clear the flag and wake everybody.
            if self.swap(state, 0) {
                wake(&self.state, EVERYBODY);
            }
            return;
        }
        if state & WAITING != 0 || self.swap(state, state | WAITING) {
            wait(&self.state, state | WAITING);
        }
    }

    #[cold]
    fn release_waiters(&self) {
        self.state.fetch_and(!WAITING, Ordering::Relaxed);
        wake(&self.state, EVERYBODY);
    }
}

/// Shared access to a [`RwLock`].
#[derive(Debug)]
pub struct ReadGuard<'a, T> {
    lock: &'a RwLock<T>,
}

/// Exclusive access to a [`RwLock`].
#[derive(Debug)]
pub struct WriteGuard<'a, T> {
    lock: &'a RwLock<T>,
}

impl<T> Drop for ReadGuard<'_, T> {
    fn drop(&mut self) {
        let before = self.lock.state.fetch_sub(1, Ordering::Release);
        if before & READERS == 1 && before & WAITING != 0 {
            self.lock.release_waiters();
        }
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        if self.lock.state.fetch_and(!WRITER, Ordering::Release) & WAITING != 0 {
            self.lock.release_waiters();
        }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while this guard lives the reader count is above zero, so no writer exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while this guard lives WRITER is set, so it is the only access.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
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
        let lock = RwLock::new(0);
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
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
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
