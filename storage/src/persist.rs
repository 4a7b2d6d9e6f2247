//! Persist primitives. Measured: 4 KiB and a 64-byte header take 0.8 us by non-temporal stores
//! and one fence, 2.9 us with a `clwb` per line; up to a few lines `clwb` wins because the line
//! is in the cache anyway.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::{
    _mm_clflush, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm512_loadu_si512,
    _mm512_stream_si512,
};

/// Below this many bytes a copy goes through the cache and is written back by line.
const NON_TEMPORAL_MIN: usize = 512;

/// Copies `data` to `to` so that a following [`fence`] makes it persistent.
///
/// # Safety
/// `to .. to + data.len()` must be mapped writable memory that no Rust reference covers; other
/// processes may read it at the same time and must validate what they read.
#[inline]
pub unsafe fn copy_persistent(to: *mut u8, data: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= NON_TEMPORAL_MIN && (to as usize).is_multiple_of(16) {
        let whole = if base::cpu::wide() && (to as usize).is_multiple_of(64) {
            // SAFETY: the CPU has AVX-512, `to` is aligned, the ranges are those of the caller.
            unsafe { stream_lines(to, data) }
        } else {
            // SAFETY: `to` is aligned, the ranges are those of the caller.
            unsafe { stream(to, data) }
        };
        // SAFETY: the rest of the same ranges.
        unsafe { copy_cached(to.add(whole), &data[whole..]) };
        return;
    }
    // SAFETY: the caller's promise is the same.
    unsafe { copy_cached(to, data) };
}

/// Copies as much of `data` as it can in one pass that also sums it: as [`copy_persistent`] and
/// [`crc32c`](base::checksum::crc32c) of what was stored. How many bytes that was, and the sum. Others may write to `data` meanwhile.
///
/// # Safety
/// As [`copy_persistent`].
#[inline]
pub unsafe fn copy_summed(to: *mut u8, data: &[u8], crc: u32) -> (usize, u32) {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= NON_TEMPORAL_MIN && (to as usize).is_multiple_of(64) && base::cpu::wide_clmul()
    {
        // SAFETY: the CPU has what it takes, `to` is aligned, the ranges are those of the caller.
        return unsafe { base::checksum::x86::stream_folds(crc, data.as_ptr(), to, data.len()) };
    }
    let _ = (to, data);
    (0, crc)
}

/// Whole lines by one store each: a write-combining buffer is full at once, and 64 stores fit into
/// the store queue, so that what follows (the checksum) runs while they drain. Returns the bytes
/// done.
///
/// # Safety
/// As [`copy_persistent`]; `to` is a multiple of 64, and the CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_lines(to: *mut u8, data: &[u8]) -> usize {
    let (lines, _) = data.as_chunks::<64>();
    for (i, line) in lines.iter().enumerate() {
        // SAFETY: line i lies inside the caller's range, and is aligned as the range is.
        unsafe {
            _mm512_stream_si512(to.add(64 * i).cast(), _mm512_loadu_si512(line.as_ptr().cast()));
        }
    }
    64 * lines.len()
}

/// The same by 16 bytes, on any x86-64.
///
/// # Safety
/// As [`copy_persistent`]; `to` is a multiple of 16.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(to: *mut u8, data: &[u8]) -> usize {
    let (parts, _) = data.as_chunks::<16>();
    for (i, part) in parts.iter().enumerate() {
        // SAFETY: part i lies inside the caller's range, and is aligned as the range is.
        unsafe { _mm_stream_si128(to.add(16 * i).cast(), _mm_loadu_si128(part.as_ptr().cast())) };
    }
    16 * parts.len()
}

/// # Safety
/// As [`copy_persistent`].
unsafe fn copy_cached(to: *mut u8, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    // SAFETY: the caller vouches for the destination; `data` is a slice elsewhere.
    unsafe {
        core::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        write_back(to, data.len());
    }
}

/// Starts write-back of the lines of a range.
///
/// # Safety
/// The range must be mapped memory.
#[inline]
pub unsafe fn write_back(at: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        let clwb = base::cpu::clwb();
        let mut line = at as usize & !63;
        let end = at as usize + len;
        while line < end {
            // SAFETY: the line overlaps the mapped range; write-back has no effect on content.
            unsafe {
                if clwb {
                    core::arch::asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
                } else {
                    _mm_clflush(line as *const u8);
                }
            }
            line += 64;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, len);
}

/// Orders and completes the write-backs before it.
#[inline]
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the x86-64 baseline.
    unsafe {
        _mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}
