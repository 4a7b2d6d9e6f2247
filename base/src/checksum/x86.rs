//! CRC32C with the `crc32` instruction on three streams, and with carry-less multiplication over
//! 512-bit vectors.

use core::arch::x86_64::*;

use super::{reflected_power, shift_power};

/// Bytes per stream in one round of three. Three times 1,360 make 4,080: a 4 KiB block is one round
/// and a 16-byte tail.
const LONG: usize = 1360;
const SHORT: usize = 168;
/// Below this the folding kernel cannot start.
const FOLD_MIN: usize = 256;

/// Bytes that [`block`] takes at once: the size of a page and of most checksummed units.
const BLOCK: usize = 4096;
/// Bytes per `crc32` stream in a block, four of them, at 32 bytes a step.
const STREAM: usize = 320;
/// Bytes folded in a block: 256 to start with and 256 a step.
const FOLDED: usize = 2816;
const _: () = assert!(FOLDED == 256 + STREAM / 32 * 256 && FOLDED + 4 * STREAM == BLOCK);
/// How far the parts of a block are from its end: the CRC before it, the folded part, three streams.
const POWERS: [u32; 5] = [
    shift_power(BLOCK as u64),
    shift_power(4 * STREAM as u64),
    shift_power(3 * STREAM as u64),
    shift_power(2 * STREAM as u64),
    shift_power(STREAM as u64),
];

/// What moves a 128-bit lane `bytes` further up: the powers of x for its first and second half. One
/// word of each is zero, since the powers are reduced to 32 bits.
const fn fold_by(bytes: usize) -> [u64; 2] {
    [reflected_power(bytes as u64 * 8 + 31) as u64, reflected_power(bytes as u64 * 8 - 33) as u64]
}

const BY_256: [u64; 2] = fold_by(256);
const BY_64: [u64; 2] = fold_by(64);
const BY_48: [u64; 2] = fold_by(48);
const BY_32: [u64; 2] = fold_by(32);
const BY_16: [u64; 2] = fold_by(16);

#[inline(always)]
fn word(bytes: &[u8; 8]) -> u64 {
    u64::from_le_bytes(*bytes)
}

#[inline(always)]
fn word_at(bytes: &[u8; 32], at: usize) -> u64 {
    let mut w = [0u8; 8];
    w.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(w)
}

/// The rest of a CRC, eight bytes and one byte at a time.
#[target_feature(enable = "sse4.2")]
fn finish(mut crc: u64, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for w in words {
        crc = _mm_crc32_u64(crc, word(w));
    }
    let mut crc = crc as u32;
    for &b in rest {
        crc = _mm_crc32_u8(crc, b);
    }
    !crc
}

/// crc times a power, not yet reduced: 64 bits in the low half.
#[inline]
#[target_feature(enable = "pclmulqdq")]
fn product(crc: u64, power: u32) -> __m128i {
    _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(crc as i64), _mm_cvtsi64_si128(power.into()))
}

/// crc times x^(8 n), where `power` is the constant for n: one multiplication, reduced by the
/// `crc32` instruction.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn shift(crc: u64, power: u32) -> u64 {
    _mm_crc32_u64(0, _mm_cvtsi128_si64(product(crc, power)) as u64)
}

/// [`shift_power`] of 2^k bytes, for each k from 3 on: below that the constant does not exist.
const MOVES: [u32; 32] = {
    let mut moves = [0; 32];
    let mut k = 3;
    while k < 32 {
        moves[k] = shift_power(1 << k);
        k += 1;
    }
    moves
};

/// A CRC as it counts `bytes` further on: some two nanoseconds for each bit that is set in their number.
///
/// # Safety
/// The CPU has SSE4.2 and PCLMULQDQ.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub fn moved(crc: u32, bytes: u32) -> u32 {
    let mut crc = u64::from(crc);
    for _ in 0..bytes & 7 {
        crc = u64::from(_mm_crc32_u8(crc as u32, 0));
    }
    let mut left = bytes & !7;
    while left != 0 {
        crc = shift(crc, MOVES[left.trailing_zeros() as usize]);
        left &= left - 1;
    }
    crc as u32
}

/// Three streams hide the latency of the instruction.
///
/// # Safety
/// The CPU has SSE4.2 and PCLMULQDQ.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub fn streams(seed: u32, mut bytes: &[u8]) -> u32 {
    const ROUNDS: [(usize, u32, u32); 2] = [
        (LONG, shift_power(2 * LONG as u64), shift_power(LONG as u64)),
        (SHORT, shift_power(2 * SHORT as u64), shift_power(SHORT as u64)),
    ];
    let mut crc = u64::from(!seed);
    for (stream, by_two, by_one) in ROUNDS {
        while let Some((round, rest)) = bytes.split_at_checked(3 * stream) {
            let (a, bc) = round.split_at(stream);
            let (b, c) = bc.split_at(stream);
            let (mut y, mut z) = (0u64, 0u64);
            let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
            for ((a, b), c) in words.zip(c.as_chunks::<8>().0) {
                crc = _mm_crc32_u64(crc, word(a));
                y = _mm_crc32_u64(y, word(b));
                z = _mm_crc32_u64(z, word(c));
            }
            crc = shift(crc, by_two) ^ shift(y, by_one) ^ z;
            bytes = rest;
        }
    }
    finish(crc, bytes)
}

/// x moved up by what `by` stands for, plus `next`.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(x: __m512i, by: __m512i, next: __m512i) -> __m512i {
    let first = _mm512_clmulepi64_epi128::<0x00>(x, by);
    let second = _mm512_clmulepi64_epi128::<0x11>(x, by);
    _mm512_ternarylogic_epi64::<0x96>(first, second, next)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes are there.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn everywhere(by: [u64; 2]) -> __m512i {
    _mm512_broadcast_i32x4(_mm_set_epi64x(by[1] as i64, by[0] as i64))
}

/// A block of [`BLOCK`] bytes keeps two units of the CPU busy at once: four vectors fold the first
/// part, 256 bytes a step, while four streams of the `crc32` instruction take the second, 128 bytes
/// a step. (Alone the first does 16 bytes a cycle on Zen 5, the second 8.) Not inverted.
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
fn block(crc: u32, bytes: &[u8; BLOCK]) -> u32 {
    let (folded, streamed) = bytes.split_at(FOLDED);
    let (start, quads) = folded.as_chunks::<64>().0.split_at(4);
    let mut x = [load(&start[0]), load(&start[1]), load(&start[2]), load(&start[3])];
    let by = everywhere(BY_256);
    let (ab, cd) = streamed.split_at(2 * STREAM);
    let ((a, b), (c, d)) = (ab.split_at(STREAM), cd.split_at(STREAM));
    let mut y = [0u64; 4];
    // Iterators over parts of known size, since a check per word would cost a third of the speed.
    let ab = a.as_chunks::<32>().0.iter().zip(b.as_chunks::<32>().0);
    let cd = c.as_chunks::<32>().0.iter().zip(d.as_chunks::<32>().0);
    for (quad, ((a, b), (c, d))) in quads.as_chunks::<4>().0.iter().zip(ab.zip(cd)) {
        for (x, next) in x.iter_mut().zip(quad) {
            *x = fold(*x, by, load(next));
        }
        for at in [0, 8, 16, 24] {
            for (y, part) in y.iter_mut().zip([a, b, c, d]) {
                *y = _mm_crc32_u64(*y, word_at(part, at));
            }
        }
    }
    let x = u64::from(reduce(merge(x)));
    // All parts move to the end of the block; one reduction serves their sum.
    let mut sum = _mm_setzero_si128();
    for (part, power) in [u64::from(crc), x, y[0], y[1], y[2]].into_iter().zip(POWERS) {
        sum = _mm_xor_si128(sum, product(part, power));
    }
    (_mm_crc32_u64(0, _mm_cvtsi128_si64(sum) as u64) ^ y[3]) as u32
}

/// Four vectors fold 256 bytes a step; what is left of them goes through the `crc32` instruction.
/// Blocks of [`BLOCK`] bytes first.
///
/// # Safety
/// The CPU has AVX-512 F and VL, VPCLMULQDQ, PCLMULQDQ and SSE4.2.
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
pub fn folds(seed: u32, bytes: &[u8]) -> u32 {
    if bytes.len() < FOLD_MIN {
        return streams(seed, bytes);
    }
    let (blocks, bytes) = bytes.as_chunks::<BLOCK>();
    let mut crc = !seed;
    for bytes in blocks {
        crc = block(crc, bytes);
    }
    if bytes.is_empty() {
        return !crc;
    }
    if bytes.len() < FOLD_MIN {
        return streams(!crc, bytes);
    }
    let (vectors, tail) = bytes.as_chunks::<64>();
    let (quads, singles) = vectors.as_chunks::<4>();
    let (start, quads) = quads.split_first().expect("at least FOLD_MIN bytes");
    let mut x = [load(&start[0]), load(&start[1]), load(&start[2]), load(&start[3])];
    // The running remainder is added to the first four bytes.
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc as i32)));
    let by = everywhere(BY_256);
    for quad in quads {
        for (x, next) in x.iter_mut().zip(quad) {
            *x = fold(*x, by, load(next));
        }
    }
    let mut one = merge(x);
    let by = everywhere(BY_64);
    for next in singles {
        one = fold(one, by, load(next));
    }
    finish(reduce(one).into(), tail)
}

/// What is copied past the cache and summed in one pass: steps of [`STEP`] bytes, as many as there are; how many bytes, and
/// the CRC of them. Each byte is read once, so the sum is that of what was stored, whoever else writes to `from` meanwhile.
///
/// # Safety
/// The CPU has AVX-512 F and VL, VPCLMULQDQ, PCLMULQDQ and SSE4.2. `from .. from + len` may be read, and
/// `to .. to + len`, elsewhere, is memory that may be written, with `to` a multiple of 64.
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
pub unsafe fn stream_folds(seed: u32, from: *const u8, to: *mut u8, len: usize) -> (usize, u32) {
    // SAFETY: `at` is a multiple of STEP below `len`, so the four lines are inside both ranges.
    unsafe { steps(seed, len, |at| pass_on(from.add(at), to.add(at))) }
}

/// The same of what is only summed.
///
/// # Safety
/// The CPU has AVX-512 F and VL, VPCLMULQDQ, PCLMULQDQ and SSE4.2. `from .. from + len` may be read.
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
pub unsafe fn shared_folds(seed: u32, from: *const u8, len: usize) -> (usize, u32) {
    // SAFETY: as above.
    unsafe { steps(seed, len, |at| four_lines(from.add(at))) }
}

/// The CRC of what `pass` gives for each step.
///
/// # Safety
/// The CPU has what it takes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn steps(seed: u32, len: usize, pass: impl Fn(usize) -> [__m512i; 4]) -> (usize, u32) {
    let end = len - len % STEP;
    if end == 0 {
        return (0, seed);
    }
    let mut x = pass(0);
    // The running remainder is added to the first four bytes, in the register.
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(!seed as i32)));
    let by = everywhere(BY_256);
    for at in (STEP..end).step_by(STEP) {
        for (x, next) in x.iter_mut().zip(pass(at)) {
            *x = fold(*x, by, next);
        }
    }
    (end, !reduce(merge(x)))
}

/// Bytes that [`stream_folds`] takes at once.
pub const STEP: usize = 256;

/// Four lines from there to here past the cache, and their bytes as they were stored.
///
/// # Safety
/// As [`stream_folds`], for [`STEP`] bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pass_on(from: *const u8, to: *mut u8) -> [__m512i; 4] {
    // SAFETY: the caller vouches for them.
    let lines = unsafe { four_lines(from) };
    for (line, bytes) in lines.iter().enumerate() {
        // SAFETY: inside what the caller vouches for, and aligned as that is.
        unsafe { _mm512_stream_si512(to.add(64 * line).cast(), *bytes) };
    }
    lines
}

/// Four lines, read once.
///
/// # Safety
/// [`STEP`] bytes may be read there; others may be writing to them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn four_lines(from: *const u8) -> [__m512i; 4] {
    let (a, b, c, d): (__m512i, __m512i, __m512i, __m512i);
    // SAFETY: reads the four lines that the caller vouches for. Not by intrinsics: those may be read again where the
    // value is wanted again, and another thread may have changed the bytes.
    unsafe {
        core::arch::asm!(
            "vmovdqu64 {a}, [{from}]",
            "vmovdqu64 {b}, [{from} + 64]",
            "vmovdqu64 {c}, [{from} + 128]",
            "vmovdqu64 {d}, [{from} + 192]",
            from = in(reg) from, a = out(zmm_reg) a, b = out(zmm_reg) b, c = out(zmm_reg) c,
            d = out(zmm_reg) d, options(nostack, readonly, preserves_flags)
        );
    }
    [a, b, c, d]
}

/// Four consecutive vectors into one.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn merge(x: [__m512i; 4]) -> __m512i {
    let by = everywhere(BY_64);
    fold(fold(fold(x[0], by, x[1]), by, x[2]), by, x[3])
}

/// One vector into a CRC.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
fn reduce(one: __m512i) -> u32 {
    // The first three lanes move up to the fourth; its own bytes stay as they are.
    let by = _mm512_set_epi64(
        0,
        0,
        BY_16[1] as i64,
        BY_16[0] as i64,
        BY_32[1] as i64,
        BY_32[0] as i64,
        BY_48[1] as i64,
        BY_48[0] as i64,
    );
    let fourth = _mm512_maskz_mov_epi64(0xc0, one);
    let lanes = fold(one, by, fourth);
    let half =
        _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    let last = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    let crc = _mm_crc32_u64(0, _mm_cvtsi128_si64(last) as u64);
    _mm_crc32_u64(crc, _mm_extract_epi64::<1>(last) as u64) as u32
}
