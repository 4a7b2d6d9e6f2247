//! A mutual exclusion lock without std: spin briefly, then sleep on a futex. For short critical
//! sections over process-private memory; it is not robust against the death of its holder and is
//! no lock for shared memory.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may be asleep: the holder must wake one when it leaves.
const CONTENDED: u32 = 2;
/// Tries before sleeping; about a microsecond, the length of the sections that this lock guards.
const SPINS: u32 = 64;

/// Data behind a lock.
pub struct Mutex<T> {
    state: AtomicU32,
    data: UnsafeCell<T>,
}

// SAFETY: the lock hands the data to one thread at a time, which is what Sync asks of a T: Send.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: the lock owns its data; moving the one moves the other.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T> Mutex<T> {
    /// A free lock around `data`.
    pub const fn new(data: T) -> Self {
        Self { state: AtomicU32::new(FREE), data: UnsafeCell::new(data) }
    }

    /// Waits for the lock; it is given back when the guard is dropped.
    pub fn lock(&self) -> Guard<'_, T> {
        let quick =
            self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if !quick {
            self.lock_slow();
        }
        Guard { lock: self }
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            core::hint::spin_loop();
            if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
        // From here on the state is left CONTENDED even when nobody else waits: one needless wake
        // is cheaper than counting sleepers.
        while self.state.swap(CONTENDED, Ordering::Acquire) != FREE {
            // Any return (woken, interrupted, value changed) means: try again.
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, CONTENDED, None);
        }
    }
}

impl<T> core::fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

/// Access to the data of a [`Mutex`] while it is held.
pub struct Guard<'a, T> {
    lock: &'a Mutex<T>,
}

// SAFETY: sharing a guard shares &T only.
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

impl<T> core::fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so this thread holds the lock; &mut self makes it unique.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.lock.state.swap(FREE, Ordering::Release) == CONTENDED {
            let _ = futex::wake(&self.lock.state, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn excludes() {
        let counter = Mutex::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut held = counter.lock();
                        let seen = *held;
                        *held = core::hint::black_box(seen) + 1;
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 80_000);
    }
}
