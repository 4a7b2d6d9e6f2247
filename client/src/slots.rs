//! A table of open things by small numbers, made for its readers: looking one up and letting go of it is one
//! atomic addition each, on a cache line of its own, with no lock and no counted pointer. A value is dropped by
//! the last who uses it once it was taken out.
//!
//! State of a slot: bit 63 [`LIVE`] a value is there for all; bit 62 [`LEAVING`] it was taken out, somebody may
//! still use it; the bits below count users (also those who came to an empty slot and go at once).
//!
//! ```text
//! empty --insert--> LIVE --remove--> LEAVING --last user--> empty (the number is free again)
//! ```
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::libfs::host::Host;
use crate::libfs::linux::Linux;
use crate::libfs::sync::RwLock;

const LIVE: u64 = 1 << 63;
const LEAVING: u64 = 1 << 62;
/// Slots of the first chunk; each further chunk has twice as many as the one before.
const FIRST: usize = 64;
/// Chunks: four million slots.
const CHUNKS: usize = 16;

#[repr(align(64))]
struct Slot<T> {
    state: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// The table.
pub struct Slots<T, H: Host = Linux> {
    /// Chunk k points to `FIRST << k` slots, or to nothing yet; it never moves.
    chunks: [AtomicPtr<Slot<T>>; CHUNKS],
    free: RwLock<Free, H>,
}

#[derive(Default)]
struct Free {
    /// Numbers handed back, the one last handed back first.
    back: Vec<usize>,
    /// Numbers below were handed out at least once.
    fresh: usize,
}

// SAFETY: a value is moved in by one thread, shared (`T: Sync`) while it is LIVE, and dropped by whichever thread
// used it last (`T: Send`).
unsafe impl<T: Send + Sync, H: Host> Send for Slots<T, H> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync, H: Host> Sync for Slots<T, H> {}

/// A value in use: it stays until this is dropped, even if it was taken out meanwhile.
pub struct Used<'a, T, H: Host = Linux> {
    slots: &'a Slots<T, H>,
    slot: &'a Slot<T>,
    index: usize,
}

impl<T: core::fmt::Debug, H: Host> core::fmt::Debug for Used<'_, T, H> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (**self).fmt(f)
    }
}

impl<T, H: Host> Default for Slots<T, H> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, H: Host> core::fmt::Debug for Slots<T, H> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slots").finish_non_exhaustive()
    }
}

/// Chunk of a number, and its place there.
const fn place(index: usize) -> (usize, usize) {
    let from = index + FIRST;
    let chunk = (from.ilog2() - FIRST.ilog2()) as usize;
    (chunk, from - (FIRST << chunk))
}

impl<T, H: Host> Slots<T, H> {
    /// An empty table; it grows as needed.
    pub const fn new() -> Self {
        Self {
            chunks: [const { AtomicPtr::new(core::ptr::null_mut()) }; CHUNKS],
            free: RwLock::new(Free { back: Vec::new(), fresh: 0 }),
        }
    }

    fn slot(&self, index: usize) -> Option<&Slot<T>> {
        // Numbers come from outside.
        let (chunk, at) = place(index.min(usize::MAX / 2));
        let base = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: a chunk that is there has `FIRST << chunk` slots, `at` is below that, and it is freed only
        // with the table.
        (!base.is_null()).then(|| unsafe { &*base.add(at) })
    }

    /// Puts a value in; its number, the one that was handed back last if there is one. `None` (and the value is
    /// dropped) when `most` numbers are in use.
    pub fn insert(&self, value: T, most: usize) -> Option<usize> {
        let mut free = self.free.write();
        let index = match free.back.pop() {
            Some(index) => index,
            None if free.fresh >= most || place(free.fresh).0 >= CHUNKS => return None,
            None => {
                let index = free.fresh;
                self.grow(place(index).0);
                free.fresh += 1;
                index
            }
        };
        drop(free);
        let slot = self.slot(index)?;
        // SAFETY: the number came from the free list, so the slot is neither LIVE nor LEAVING: whoever counts
        // itself as a user now goes without looking at the value, and nobody else inserts here.
        unsafe { (*slot.value.get()).write(value) };
        slot.state.fetch_or(LIVE, Ordering::Release);
        Some(index)
    }

    /// Makes a chunk; called with the free list locked.
    fn grow(&self, chunk: usize) {
        if !self.chunks[chunk].load(Ordering::Relaxed).is_null() {
            return;
        }
        let slots: Box<[Slot<T>]> = (0..FIRST << chunk)
            .map(|_| Slot {
                state: AtomicU64::new(0),
                value: UnsafeCell::new(MaybeUninit::uninit()),
            })
            .collect();
        self.chunks[chunk].store(Box::into_raw(slots).cast(), Ordering::Release);
    }

    /// The value with that number, if it is there.
    #[inline]
    pub fn get(&self, index: usize) -> Option<Used<'_, T, H>> {
        let slot = self.slot(index)?;
        let used = Used { slots: self, slot, index };
        // Not LIVE: dropping `used` takes the count back.
        (slot.state.fetch_add(1, Ordering::Acquire) & LIVE != 0).then_some(used)
    }

    /// Takes a value out: nobody finds it any more. Gives it to the caller to look at; it is dropped, and its
    /// number free again, when the last user lets go.
    pub fn remove(&self, index: usize) -> Option<Used<'_, T, H>> {
        let used = self.get(index)?;
        let state = &used.slot.state;
        let mut seen = state.load(Ordering::Relaxed);
        // Of two who remove at the same time one finds it LIVE.
        while seen & LIVE != 0 {
            let leaving = seen & !LIVE | LEAVING;
            match state.compare_exchange_weak(seen, leaving, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(used),
                Err(now) => seen = now,
            }
        }
        None
    }

    #[cold]
    fn retire(&self, slot: &Slot<T>, index: usize) {
        // Somebody may have come (and will go through here), or have been quicker: one swap succeeds.
        let last = slot.state.compare_exchange(LEAVING, 0, Ordering::AcqRel, Ordering::Relaxed);
        if last.is_ok() {
            // SAFETY: the slot was LEAVING without users and is now empty; the number is not in the free list
            // yet, so nobody else reaches the value, which `insert` had written.
            unsafe { (*slot.value.get()).assume_init_drop() };
            self.free.write().back.push(index);
        }
    }
}

impl<T, H: Host> Deref for Used<'_, T, H> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was LIVE when this user was counted, so the value was written, and it is not dropped
        // while the count is above zero.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T, H: Host> Drop for Used<'_, T, H> {
    #[inline]
    fn drop(&mut self) {
        if self.slot.state.fetch_sub(1, Ordering::AcqRel) == LEAVING | 1 {
            self.slots.retire(self.slot, self.index);
        }
    }
}

impl<T, H: Host> Drop for Slots<T, H> {
    fn drop(&mut self) {
        for (k, chunk) in self.chunks.iter_mut().enumerate() {
            let base = *chunk.get_mut();
            if base.is_null() {
                continue;
            }
            let slots = core::ptr::slice_from_raw_parts_mut(base, FIRST << k);
            // SAFETY: `grow` made this box, of this length; no `Used` can outlive the table.
            let mut slots = unsafe { Box::from_raw(slots) };
            for slot in &mut slots {
                if *slot.state.get_mut() & (LIVE | LEAVING) != 0 {
                    // SAFETY: LIVE or LEAVING: written and not yet dropped.
                    unsafe { slot.value.get_mut().assume_init_drop() };
                }
            }
        }
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn numbers_are_reused_and_bounded() {
        let slots: Slots<_> = Slots::new();
        let numbers: Vec<_> = (0..200).map(|i| slots.insert(i, 200).expect("room")).collect();
        assert_eq!(numbers, (0..200).collect::<Vec<_>>());
        assert_eq!(slots.insert(0, 200), None);
        assert_eq!(slots.get(150).map(|v| *v), Some(150));
        assert_eq!(slots.remove(150).map(|v| *v), Some(150));
        assert!(slots.get(150).is_none() && slots.remove(150).is_none());
        assert!(slots.get(200).is_none() && slots.get(usize::MAX).is_none());
        assert_eq!(slots.insert(7, 200), Some(150));
    }

    #[test]
    fn a_value_in_use_outlives_its_removal() {
        let slots: Slots<_> = Slots::new();
        let value = Arc::new(());
        let number = slots.insert(Arc::clone(&value), 8).expect("room");
        let used = slots.get(number).expect("there");
        drop(slots.remove(number));
        assert_eq!(Arc::strong_count(&value), 2, "still used");
        assert_eq!(slots.insert(Arc::clone(&value), 8), Some(1), "its number is not free yet");
        drop(used);
        assert_eq!(Arc::strong_count(&value), 2);
        drop(slots);
        assert_eq!(Arc::strong_count(&value), 1, "the table drops what is left");
    }

    /// Each value knows how often it was dropped: once, and never while somebody looks at it.
    #[test]
    fn threads_never_see_a_dropped_value() {
        struct Value(Arc<AtomicUsize>, u64);
        impl Drop for Value {
            fn drop(&mut self) {
                self.1 = 0;
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let slots = Arc::new(Slots::<Value>::new());
        let (dropped, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..4u64)
            .map(|n| {
                let (slots, dropped, made) = (slots.clone(), dropped.clone(), made.clone());
                std::thread::spawn(move || {
                    let mut random = base::random::Random::new(n);
                    for _ in 0..20_000 {
                        match random.below(4) {
                            0 => {
                                let value = Value(Arc::clone(&dropped), 42);
                                made.fetch_add(1, Ordering::SeqCst);
                                slots.insert(value, 8);
                            }
                            1 => drop(slots.remove(random.below(8) as usize)),
                            _ => {
                                if let Some(value) = slots.get(random.below(8) as usize) {
                                    assert_eq!(value.1, 42);
                                }
                            }
                        }
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().expect("no assertion failed");
        }
        drop(slots);
        assert_eq!(dropped.load(Ordering::SeqCst), made.load(Ordering::SeqCst));
    }
}
