//! The engine's own heap: size classes of powers of two over mapped chunks; large blocks are
//! mapped one by one. Never returns chunks: LibFS's need is bounded by its own limits.
//!
//! Callable in signal handlers (signals are put off while the engine runs) and usable in a fork's
//! child: [`locked`] keeps the lock over the fork.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};

use client::mutex::{Guard, Mutex};

use crate::sys::{self, nr};

/// Smallest class, 16 bytes.
const SHIFT_MIN: u32 = 4;
/// Largest class, 64 KiB; above, a block has a mapping of its own.
const SHIFT_MAX: u32 = 16;
const CLASSES: usize = (SHIFT_MAX - SHIFT_MIN + 1) as usize;
/// Mapped at once for the classes.
const CHUNK: usize = 1 << 20;

/// Free lists: the first word of a free block is the next one's address.
#[derive(Debug)]
pub struct Heap {
    free: [usize; CLASSES],
    at: usize,
    left: usize,
}

static HEAP: Mutex<Heap> = Mutex::new(Heap { free: [0; CLASSES], at: 0, left: 0 });

struct Engine;

#[global_allocator]
static ENGINE: Engine = Engine;

/// Holds the heap still, over a fork.
pub fn locked() -> Guard<'static, Heap> {
    HEAP.lock()
}

fn class(layout: &Layout) -> Option<usize> {
    let size = layout.size().max(layout.align()).max(1 << SHIFT_MIN);
    let shift = size.next_power_of_two().trailing_zeros();
    (shift <= SHIFT_MAX).then(|| (shift - SHIFT_MIN) as usize)
}

fn pages(size: usize) -> usize {
    size.saturating_add(4095) & !4095
}

impl Heap {
    fn take(&mut self, class: usize) -> usize {
        let head = self.free[class];
        if head != 0 {
            // SAFETY: a free block is ours and at least 16 bytes.
            self.free[class] = unsafe { *(head as *const usize) };
            return head;
        }
        let size = 1usize << (class as u32 + SHIFT_MIN);
        // Blocks are aligned to their size; the rest of a chunk in the way is left alone.
        let start = (self.at + size - 1) & !(size - 1);
        let skip = start - self.at;
        if self.left < skip + size {
            let Some(chunk) = sys::map_anon(CHUNK + size) else { return 0 };
            self.at = (chunk + size - 1) & !(size - 1);
            self.left = CHUNK;
            return self.take(class);
        }
        self.at = start + size;
        self.left -= skip + size;
        start
    }
}

// SAFETY: blocks are disjoint, live until dealloc, aligned to their class (a power of two that is
// at least the alignment) or to a page.
unsafe impl GlobalAlloc for Engine {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class(&layout) {
            Some(class) => HEAP.lock().take(class) as *mut u8,
            None if layout.align() > 4096 => core::ptr::null_mut(),
            None => sys::map_anon(pages(layout.size())).unwrap_or(0) as *mut u8,
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        match class(&layout) {
            Some(class) => {
                let mut heap = HEAP.lock();
                // SAFETY: the block came from `alloc` with this layout and is given back.
                unsafe { *at.cast::<usize>() = heap.free[class] };
                heap.free[class] = at as usize;
            }
            None => {
                sys::call2(nr::MUNMAP, at as usize, pages(layout.size()));
            }
        }
    }
}
