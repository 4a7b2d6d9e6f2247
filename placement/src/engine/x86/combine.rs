//! The matrix product over byte vectors.
//!
//! A *strip* is W vectors wide and R outputs tall: R x W sums stay in registers while the inputs
//! stream past once, so that each input byte is loaded once per R outputs and each coefficient once
//! per W vectors.

// Indices say which register is meant; iterators over rows and columns at once would hide it.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::lanes::Lanes;
use crate::coding::Product;
use crate::engine::Mode;

/// Where more than one group of outputs is needed, the inputs are walked in blocks of this many
/// bytes per chunk, so that the next group finds them in the cache.
const BLOCK_BYTES: usize = 2048;

/// How far ahead of the loads the inputs are prefetched. The hardware's own prefetchers stop at
/// each 4 KiB page and lose count of k streams: measured on Zen 5, 64 KiB to 1 MiB chunks gain 15 to
/// 35 %, chunks in memory 50 %, and 256 to 2,048 bytes do equally well. (Non-temporal stores lost
/// everywhere: the parity is about to be sent or written, from the cache.)
const AHEAD_BYTES: usize = 1024;
/// Chunks up to this size are not prefetched; small stripes sit in the near caches.
const PREFETCH_ABOVE_BYTES: usize = 4096;

/// One product to compute. `new` has checked that every chunk has `len` bytes and that there is one
/// input per column and one output per row, on which the kernels rely.
pub(super) struct Job<'a, 'i, 'o> {
    pub product: Product<'a>,
    pub inputs: &'a [&'i [u8]],
    pub outputs: &'a mut [&'o mut [u8]],
    pub add: bool,
    len: usize,
}

impl<'a, 'i, 'o> Job<'a, 'i, 'o> {
    pub fn new(
        product: Product<'a>,
        inputs: &'a [&'i [u8]],
        outputs: &'a mut [&'o mut [u8]],
        mode: Mode,
    ) -> Self {
        let len = product.check(inputs, outputs);
        Self { product, inputs, outputs, add: mode == Mode::Add, len }
    }
}

/// Computes the whole job.
///
/// # Safety
/// The CPU has the features of `L`, and the caller is compiled for them.
#[inline(always)]
pub(super) unsafe fn run<L: Lanes>(job: &mut Job<'_, '_, '_>) {
    let rows = job.outputs.len();
    let groups = rows.div_ceil(L::ROWS_MAX);
    let block = if groups <= 1 { job.len } else { BLOCK_BYTES };
    let mut from = 0;
    while from < job.len {
        let to = job.len.min(from + block);
        // Groups of nearly equal size: 7 rows are 4 + 3, not 6 + 1.
        let mut first = 0;
        for group in 0..groups {
            let next = (group + 1) * rows / groups;
            // SAFETY: first < next <= rows, next - first <= ROWS_MAX, to <= len.
            unsafe { L::pass(job, first, next - first, from, to) };
            first = next;
        }
        from = to;
    }
}

/// Outputs `first .. first + R`, bytes `from .. to`.
///
/// # Safety
/// As [`run`]; `first + R` is at most the number of outputs and `to` at most the length.
#[inline(always)]
pub(super) unsafe fn pass<L: Lanes, const R: usize, const W: usize>(
    job: &mut Job<'_, '_, '_>,
    first: usize,
    from: usize,
    to: usize,
) {
    debug_assert!(first + R <= job.outputs.len());
    debug_assert!(to <= job.len);
    let mut at = from;
    while job.len > PREFETCH_ABOVE_BYTES && at + W * L::BYTES <= to {
        // SAFETY: the strip lies below `to`.
        unsafe { strip::<L, R, W, true>(job, first, at) };
        at += W * L::BYTES;
    }
    while at + W * L::BYTES <= to {
        // SAFETY: as above.
        unsafe { strip::<L, R, W, false>(job, first, at) };
        at += W * L::BYTES;
    }
    while at + L::BYTES <= to {
        // SAFETY: as above.
        unsafe { strip::<L, R, 1, false>(job, first, at) };
        at += L::BYTES;
    }
    if at < to {
        // SAFETY: fewer than BYTES bytes are left, and at least one.
        unsafe { tail::<L, R>(job, first, at, to - at) };
    }
}

/// # Safety
/// As [`pass`]; bytes `at .. at + W * BYTES` are inside the chunks.
#[inline(always)]
unsafe fn strip<L: Lanes, const R: usize, const W: usize, const PREFETCH: bool>(
    job: &mut Job<'_, '_, '_>,
    first: usize,
    at: usize,
) {
    // SAFETY: inputs and outputs are `len` long and the strip ends at or below it; the tables have
    // an entry for every row and column (`Product::check`). Nothing here checks bounds again.
    unsafe {
        let outputs = job.outputs.as_mut_ptr().add(first);
        let mut sums = [[L::zero(); W]; R];
        if job.add {
            for r in 0..R {
                for w in 0..W {
                    sums[r][w] = L::load((*outputs.add(r)).as_ptr().add(at + w * L::BYTES));
                }
            }
        }
        let stride = job.product.stride();
        let mut table = L::tables(&job.product).wrapping_add(first);
        for input in job.inputs {
            let input = input.as_ptr().add(at);
            if PREFETCH && (W * L::BYTES >= 64 || at.is_multiple_of(64)) {
                // One for each cache line of the strip; past the end of a chunk it does no harm.
                for line in (0..W * L::BYTES).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(input.wrapping_add(AHEAD_BYTES + line).cast());
                }
            }
            let mut x = [L::zero().split(); W];
            for w in 0..W {
                x[w] = L::load(input.add(w * L::BYTES)).split();
            }
            for r in 0..R {
                let by = L::factor(table.add(r));
                for w in 0..W {
                    sums[r][w] = sums[r][w].add_product(by, x[w]);
                }
            }
            table = table.wrapping_add(stride);
        }
        for r in 0..R {
            for w in 0..W {
                sums[r][w].store((*outputs.add(r)).as_mut_ptr().add(at + w * L::BYTES));
            }
        }
    }
}

/// The last bytes, fewer than a vector.
///
/// # Safety
/// As [`pass`]; 0 < n < BYTES, and bytes `at .. at + n` are inside the chunks.
#[inline(always)]
unsafe fn tail<L: Lanes, const R: usize>(
    job: &mut Job<'_, '_, '_>,
    first: usize,
    at: usize,
    n: usize,
) {
    // SAFETY: as in `strip`, and partial loads and stores touch n bytes only.
    unsafe {
        let outputs = job.outputs.as_mut_ptr().add(first);
        let mut sums = [L::zero(); R];
        if job.add {
            for r in 0..R {
                sums[r] = L::load_some((*outputs.add(r)).as_ptr().add(at), n);
            }
        }
        let stride = job.product.stride();
        let mut table = L::tables(&job.product).wrapping_add(first);
        for input in job.inputs {
            let x = L::load_some(input.as_ptr().add(at), n).split();
            for r in 0..R {
                sums[r] = sums[r].add_product(L::factor(table.add(r)), x);
            }
            table = table.wrapping_add(stride);
        }
        for r in 0..R {
            sums[r].store_some((*outputs.add(r)).as_mut_ptr().add(at), n);
        }
    }
}
