//! Vectors of bytes that can be multiplied by a constant of GF(2^8).
//!
//! The methods are `inline(always)` and carry no target feature of their own: they become part of
//! the engine's function, which has the features. Called from anywhere else they would be slow, and
//! on a CPU without the instructions undefined; hence all are unsafe with the same contract.

use std::arch::x86_64::*;

use super::combine::{Job, pass};
use crate::coding::Product;

/// A vector and its way to multiply.
///
/// # Safety
/// Of every method: the CPU has the instructions of the type, and the caller is compiled for them.
/// `load`/`store` need `BYTES` accessible bytes at the pointer (any alignment), the `_some` forms n
/// of them, with n < `BYTES`.
pub(super) trait Lanes: Copy {
    /// Bytes in a vector.
    const BYTES: usize;
    /// Outputs that one pass computes at most, so that the sums fit in the registers.
    const ROWS_MAX: usize;
    /// Table entry of one coefficient in memory.
    type Table;
    /// The same in registers.
    type Factor: Copy;
    /// A vector made ready to be multiplied several times.
    type Split: Copy;

    unsafe fn zero() -> Self;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    unsafe fn load_some(from: *const u8, n: usize) -> Self;
    unsafe fn store_some(self, to: *mut u8, n: usize);
    unsafe fn split(self) -> Self::Split;
    fn tables(product: &Product<'_>) -> *const Self::Table;
    unsafe fn factor(table: *const Self::Table) -> Self::Factor;
    /// self + by * x.
    unsafe fn add_product(self, by: Self::Factor, x: Self::Split) -> Self;
    /// [`pass`] for a number of rows from 1 to `ROWS_MAX`, with the strip width that fits.
    unsafe fn pass(job: &mut Job<'_, '_, '_>, first: usize, rows: usize, from: usize, to: usize);
}

macro_rules! passes {
    ($rows_max:literal: $($rows:literal x $wide:literal),*) => {
        const ROWS_MAX: usize = $rows_max;

        #[inline(always)]
        unsafe fn pass(job: &mut Job<'_, '_, '_>, first: usize, rows: usize, from: usize, to: usize) {
            // SAFETY: the contract of this method is that of `pass`.
            unsafe {
                match rows {
                    $($rows => pass::<Self, $rows, $wide>(job, first, from, to),)*
                    _ => unreachable!("a group has 1 to ROWS_MAX rows"),
                }
            }
        }
    };
}

/// Whole vectors in and out of memory.
macro_rules! whole {
    ($zero:ident, $load:ident, $store:ident) => {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the trait's contract.
            unsafe { Self($zero()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Self($load(from.cast())) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: the trait's contract.
            unsafe { $store(to.cast(), self.0) }
        }
    };
}

/// Parts of vectors in and out of memory, by way of a whole one on the stack.
macro_rules! part_by_copy {
    () => {
        #[inline(always)]
        unsafe fn load_some(from: *const u8, n: usize) -> Self {
            let mut bytes = [0u8; Self::BYTES];
            // SAFETY: the trait's contract: n < BYTES bytes are readable.
            unsafe {
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n);
                Self::load(bytes.as_ptr())
            }
        }

        #[inline(always)]
        unsafe fn store_some(self, to: *mut u8, n: usize) {
            let mut bytes = [0u8; Self::BYTES];
            // SAFETY: the trait's contract: n < BYTES bytes are writable.
            unsafe {
                self.store(bytes.as_mut_ptr());
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, n);
            }
        }
    };
}

/// The same by the masks of AVX-512: bytes that are masked off are not touched.
macro_rules! part_by_mask {
    () => {
        #[inline(always)]
        unsafe fn load_some(from: *const u8, n: usize) -> Self {
            // SAFETY: the trait's contract: n < BYTES bytes are readable.
            unsafe { Self(_mm512_maskz_loadu_epi8((1 << n) - 1, from.cast())) }
        }

        #[inline(always)]
        unsafe fn store_some(self, to: *mut u8, n: usize) {
            // SAFETY: the trait's contract: n < BYTES bytes are writable.
            unsafe { _mm512_mask_storeu_epi8(to.cast(), (1 << n) - 1, self.0) }
        }
    };
}

/// Multiplies by two nibble shuffles, whose tables of 16 bytes stand in every 128 bits of a vector.
macro_rules! nibbles {
    (
        $set1:ident, $and:ident, $shift:ident, $shuffle:ident,
        |$table:ident| $spread:expr, |$sum:ident, $low:ident, $high:ident| $add:expr
    ) => {
        #[inline(always)]
        unsafe fn split(self) -> Self::Split {
            // SAFETY: the trait's contract.
            unsafe {
                let low = $set1(15);
                ($and(self.0, low), $and($shift::<4>(self.0), low))
            }
        }

        #[inline(always)]
        fn tables(product: &Product<'_>) -> *const [u8; 32] {
            product.nibbles().as_ptr()
        }

        #[inline(always)]
        unsafe fn factor(table: *const [u8; 32]) -> Self::Factor {
            // SAFETY: the trait's contract; a table is two vectors of 16 bytes.
            unsafe {
                let table: *const __m128i = table.cast();
                let (low, high) = (_mm_loadu_si128(table), _mm_loadu_si128(table.add(1)));
                let low = {
                    let $table = low;
                    $spread
                };
                let $table = high;
                (low, $spread)
            }
        }

        #[inline(always)]
        unsafe fn add_product(self, by: Self::Factor, x: Self::Split) -> Self {
            // SAFETY: the trait's contract.
            unsafe {
                let ($sum, $low, $high) = (self.0, $shuffle(by.0, x.0), $shuffle(by.1, x.1));
                Self($add)
            }
        }
    };
}

/// 128 bits, multiplied by two nibble shuffles.
#[derive(Clone, Copy)]
pub(super) struct Shuffle128(__m128i);

impl Lanes for Shuffle128 {
    const BYTES: usize = 16;
    type Table = [u8; 32];
    type Factor = (__m128i, __m128i);
    type Split = (__m128i, __m128i);
    passes!(4: 1 x 4, 2 x 2, 3 x 2, 4 x 1);
    whole!(_mm_setzero_si128, _mm_loadu_si128, _mm_storeu_si128);
    part_by_copy!();
    nibbles!(
        _mm_set1_epi8,
        _mm_and_si128,
        _mm_srli_epi64,
        _mm_shuffle_epi8,
        |table| table,
        |sum, low, high| _mm_xor_si128(sum, _mm_xor_si128(low, high))
    );
}

/// 256 bits, multiplied by two nibble shuffles.
#[derive(Clone, Copy)]
pub(super) struct Shuffle256(__m256i);

impl Lanes for Shuffle256 {
    const BYTES: usize = 32;
    type Table = [u8; 32];
    type Factor = (__m256i, __m256i);
    type Split = (__m256i, __m256i);
    passes!(4: 1 x 4, 2 x 2, 3 x 2, 4 x 1);
    whole!(_mm256_setzero_si256, _mm256_loadu_si256, _mm256_storeu_si256);
    part_by_copy!();
    nibbles!(
        _mm256_set1_epi8,
        _mm256_and_si256,
        _mm256_srli_epi64,
        _mm256_shuffle_epi8,
        |table| _mm256_broadcastsi128_si256(table),
        |sum, low, high| _mm256_xor_si256(sum, _mm256_xor_si256(low, high))
    );
}

/// 512 bits, multiplied by two nibble shuffles.
#[derive(Clone, Copy)]
pub(super) struct Shuffle512(__m512i);

impl Lanes for Shuffle512 {
    const BYTES: usize = 64;
    type Table = [u8; 32];
    type Factor = (__m512i, __m512i);
    type Split = (__m512i, __m512i);
    passes!(6: 1 x 4, 2 x 4, 3 x 4, 4 x 3, 5 x 2, 6 x 2);
    whole!(_mm512_setzero_si512, _mm512_loadu_si512, _mm512_storeu_si512);
    part_by_mask!();
    nibbles!(
        _mm512_set1_epi8,
        _mm512_and_si512,
        _mm512_srli_epi64,
        _mm512_shuffle_epi8,
        |table| _mm512_broadcast_i32x4(table),
        |sum, low, high| _mm512_ternarylogic_epi64::<0x96>(sum, low, high)
    );
}

/// 512 bits, multiplied by one bit-matrix product.
#[derive(Clone, Copy)]
pub(super) struct Affine512(__m512i);

impl Lanes for Affine512 {
    const BYTES: usize = 64;
    type Table = u64;
    type Factor = __m512i;
    type Split = __m512i;
    passes!(6: 1 x 8, 2 x 8, 3 x 6, 4 x 4, 5 x 4, 6 x 4);
    whole!(_mm512_setzero_si512, _mm512_loadu_si512, _mm512_storeu_si512);
    part_by_mask!();

    #[inline(always)]
    unsafe fn split(self) -> __m512i {
        self.0
    }

    #[inline(always)]
    fn tables(product: &Product<'_>) -> *const u64 {
        product.affine().as_ptr()
    }

    #[inline(always)]
    unsafe fn factor(table: *const u64) -> __m512i {
        // SAFETY: the trait's contract; a table is one word.
        unsafe { _mm512_set1_epi64(*table as i64) }
    }

    #[inline(always)]
    unsafe fn add_product(self, by: __m512i, x: __m512i) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_xor_si512(self.0, _mm512_gf2p8affine_epi64_epi8::<0>(x, by))) }
    }
}
