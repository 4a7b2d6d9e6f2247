//! CRC32C (Castagnoli, RFC 3720 appendix B.4): the checksum of every structure on media and wire.
//!
//! With SSE4.2 three interleaved streams hide the latency of the `crc32` instruction; their
//! remainders are joined by a carry-less shift through two small tables. Elsewhere a table is used.
#![allow(unsafe_code)]

/// Reflected polynomial.
const POLY: u32 = 0x82f6_3b78;

/// Bytes per stream in one interleaved round. Three streams of 1,360 make 4,080: a 4 KiB payload
/// is one round and a 16-byte tail.
const STREAM: usize = 1360;
const SHORT: usize = 168;

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut t = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        let mut c = i as u32;
        let mut k = 0;
        while k < 8 {
            c = if c & 1 != 0 { (c >> 1) ^ POLY } else { c >> 1 };
            k += 1;
        }
        t[i] = c;
        i += 1;
    }
    t
}

/// Advances a raw CRC by `len` zero bytes; linear, so it can be tabulated per byte of the CRC.
const fn shift_zeros(mut crc: u32, len: usize) -> u32 {
    let mut i = 0;
    while i < len {
        crc = TABLE[(crc & 0xff) as usize] ^ (crc >> 8);
        i += 1;
    }
    crc
}

type ShiftTable = [[u32; 256]; 4];

const fn shift_table(len: usize) -> ShiftTable {
    // The shift is linear over GF(2): tabulate the 32 basis vectors, then combine.
    let mut basis = [0u32; 32];
    let mut b = 0;
    while b < 32 {
        basis[b] = shift_zeros(1 << b, len);
        b += 1;
    }
    let mut t = [[0u32; 256]; 4];
    let mut byte = 0;
    while byte < 4 {
        let mut v = 0;
        while v < 256 {
            let mut acc = 0;
            let mut bit = 0;
            while bit < 8 {
                if v & (1 << bit) != 0 {
                    acc ^= basis[byte * 8 + bit];
                }
                bit += 1;
            }
            t[byte][v] = acc;
            v += 1;
        }
        byte += 1;
    }
    t
}

static SHIFT_LONG: ShiftTable = shift_table(STREAM);
static SHIFT_SHORT: ShiftTable = shift_table(SHORT);

fn shift(table: &ShiftTable, crc: u32) -> u32 {
    let b = crc.to_le_bytes();
    table[0][b[0] as usize]
        ^ table[1][b[1] as usize]
        ^ table[2][b[2] as usize]
        ^ table[3][b[3] as usize]
}

/// CRC32C of `bytes`, continuing from `seed` (0 to begin): `crc32c(crc32c(0, a), b)` is the CRC of
/// `a` followed by `b`.
#[inline]
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if has_sse42() {
        // SAFETY: the CPU has SSE4.2, checked on the line above.
        return unsafe { hardware(seed, bytes) };
    }
    portable(seed, bytes)
}

/// The table version, for CPUs without the instruction and as the oracle of the tests.
pub fn portable(seed: u32, bytes: &[u8]) -> u32 {
    let mut crc = !seed;
    for &b in bytes {
        crc = TABLE[((crc ^ u32::from(b)) & 0xff) as usize] ^ (crc >> 8);
    }
    !crc
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_sse42() -> bool {
    use core::sync::atomic::{AtomicU8, Ordering};
    // 0 unknown, 1 no, 2 yes. A race only computes it twice.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let yes = core::arch::x86_64::__cpuid(1).ecx & (1 << 20) != 0;
            KNOWN.store(1 + u8::from(yes), Ordering::Relaxed);
            yes
        }
        known => known == 2,
    }
}

#[cfg(target_arch = "x86_64")]
fn word(bytes: &[u8], at: usize) -> u64 {
    let mut w = [0u8; 8];
    w.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(w)
}

/// # Safety
/// The CPU must have SSE4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn hardware(seed: u32, mut bytes: &[u8]) -> u32 {
    use core::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    let mut crc = u64::from(!seed);
    for (stream, table) in [(STREAM, &SHIFT_LONG), (SHORT, &SHIFT_SHORT)] {
        while bytes.len() >= 3 * stream {
            let (a, rest) = bytes.split_at(stream);
            let (b, rest) = rest.split_at(stream);
            let (c, rest) = rest.split_at(stream);
            let (mut x, mut y, mut z) = (crc, 0u64, 0u64);
            let mut at = 0;
            while at < stream {
                x = _mm_crc32_u64(x, word(a, at));
                y = _mm_crc32_u64(y, word(b, at));
                z = _mm_crc32_u64(z, word(c, at));
                at += 8;
            }
            let joined = shift(table, x as u32) ^ y as u32;
            crc = u64::from(shift(table, joined) ^ z as u32);
            bytes = rest;
        }
    }
    while bytes.len() >= 8 {
        crc = _mm_crc32_u64(crc, word(bytes, 0));
        bytes = &bytes[8..];
    }
    let mut crc = crc as u32;
    for &b in bytes {
        crc = _mm_crc32_u8(crc, b);
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn known_vectors() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(0, &[0u8; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(0, &[0xffu8; 32]), 0x62a8_ab43);
    }

    #[test]
    fn engines_agree_and_chain() {
        let mut random = Random::new(7);
        let mut bytes = vec![0u8; 20_000];
        random.fill(&mut bytes);
        for _ in 0..300 {
            let from = random.below(200) as usize;
            let len = random.below(bytes.len() as u64 - 200) as usize;
            let slice = &bytes[from..from + len];
            let seed = random.next_u64() as u32;
            assert_eq!(crc32c(seed, slice), portable(seed, slice), "from {from} len {len}");
            let cut = random.below(len as u64 + 1) as usize;
            assert_eq!(crc32c(crc32c(seed, &slice[..cut]), &slice[cut..]), crc32c(seed, slice));
        }
    }
}
