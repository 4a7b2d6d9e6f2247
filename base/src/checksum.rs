//! CRC32C (Castagnoli, RFC 3720 appendix B.4): the checksum of every structure on media and wire.
//!
//! [`x86`] has the fast engines: carry-less multiplication over 512-bit vectors where the CPU has
//! it (4 KiB in 47 ns on Zen 5), three interleaved streams of the `crc32` instruction otherwise.
//! Elsewhere a table is used.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
pub mod x86;

/// Reflected polynomial.
const POLY: u32 = 0x82f6_3b78;

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

/// x^n modulo the polynomial, reflected: bit 31 is x^0.
pub const fn reflected_power(n: u64) -> u32 {
    let mut power = 1u32 << 31;
    let mut square = 1u32 << 30;
    let mut n = n;
    while n != 0 {
        if n & 1 != 0 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    power
}

/// The constant by which a carry-less multiplication followed by a `crc32` instruction on the low
/// 64 bits moves a CRC over `bytes` bytes: those two steps multiply by x^33 on their own.
pub const fn shift_power(bytes: u64) -> u32 {
    reflected_power(bytes * 8 - 33)
}

/// Product of two reflected polynomials, reduced.
pub const fn multiply(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut a_times = a;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        if b & (1 << bit) != 0 {
            product ^= a_times;
        }
        a_times = (a_times >> 1) ^ if a_times & 1 != 0 { POLY } else { 0 };
    }
    product
}

/// CRC32C of `bytes`, continuing from `seed` (0 to begin): `crc32c(crc32c(0, a), b)` is the CRC of
/// `a` followed by `b`.
#[inline]
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        if crate::cpu::wide_clmul() {
            // SAFETY: the CPU has what the engine needs.
            return unsafe { x86::folds(seed, bytes) };
        }
        if crate::cpu::crc() {
            // SAFETY: as above.
            return unsafe { x86::streams(seed, bytes) };
        }
    }
    portable(seed, bytes)
}

/// As much of the CRC32C of memory that others may be writing to as can be had without copying it first: of how many bytes, and the
/// CRC, continued from `seed`. Each byte is read once.
///
/// # Safety
/// `from .. from + len` may be read.
#[inline]
pub unsafe fn crc32c_shared(seed: u32, from: *const u8, len: usize) -> (usize, u32) {
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::wide_clmul() {
        // SAFETY: the CPU has what the engine needs; the range is the caller's.
        return unsafe { x86::shared_folds(seed, from, len) };
    }
    let _ = (from, len);
    (0, seed)
}

/// What moves a CRC over 2^k bytes, for each k.
const MOVES: [u32; 32] = {
    let mut moves = [0; 32];
    let mut k = 0;
    while k < 32 {
        moves[k] = reflected_power(8 << k);
        k += 1;
    }
    moves
};

/// The CRC of two pieces, of which the first has CRC `first` and the second, `bytes` long, has `second` when summed
/// alone (from 0 on): `joined(crc32c(s, a), crc32c(0, b), b.len())` is `crc32c(crc32c(s, a), b)`.
#[inline]
pub fn joined(first: u32, second: u32, bytes: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::crc() {
        // SAFETY: the CPU has what the engine needs.
        return unsafe { x86::moved(first, bytes) } ^ second;
    }
    moved(first, bytes) ^ second
}

fn moved(crc: u32, bytes: u32) -> u32 {
    let set = |(k, _): &(usize, &u32)| bytes & 1 << k != 0;
    MOVES.iter().enumerate().filter(set).fold(crc, |crc, (_, power)| multiply(crc, *power))
}

/// The table version, for CPUs without the instruction and as the oracle of the tests.
pub fn portable(seed: u32, bytes: &[u8]) -> u32 {
    let mut crc = !seed;
    for &b in bytes {
        crc = TABLE[((crc ^ u32::from(b)) & 0xff) as usize] ^ (crc >> 8);
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
            #[cfg(target_arch = "x86_64")]
            if crate::cpu::crc() {
                // SAFETY: the CPU has SSE4.2 and PCLMULQDQ, as was asked.
                let streams = unsafe { x86::streams(seed, slice) };
                assert_eq!(streams, portable(seed, slice), "from {from} len {len}");
            }
            #[cfg(target_arch = "x86_64")]
            if crate::cpu::wide_clmul() {
                let mut to = vec![0u8; len + 64];
                let shift = to.as_ptr().align_offset(64);
                // SAFETY: the CPU has what it takes; the ranges are of that length, and the second is aligned.
                let (done, sum) = unsafe {
                    let to = to.as_mut_ptr().add(shift);
                    x86::stream_folds(seed, slice.as_ptr(), to, len)
                };
                assert_eq!(done, len - len % x86::STEP);
                assert_eq!(sum, portable(seed, &slice[..done]), "from {from} len {len}");
                assert_eq!(to[shift..shift + done], slice[..done]);
                assert!(to[shift + done..].iter().all(|b| *b == 0));
            }
            // SAFETY: a slice of that length.
            let (done, sum) = unsafe { crc32c_shared(seed, slice.as_ptr(), len) };
            assert_eq!(crc32c(sum, &slice[done..]), crc32c(seed, slice), "from {from} len {len}");
            let cut = random.below(len as u64 + 1) as usize;
            assert_eq!(crc32c(crc32c(seed, &slice[..cut]), &slice[cut..]), crc32c(seed, slice));
            let (first, second) = (crc32c(seed, &slice[..cut]), crc32c(0, &slice[cut..]));
            let bytes = (len - cut) as u32;
            assert_eq!(joined(first, second, bytes), crc32c(seed, slice), "{cut} of {len}");
            assert_eq!(moved(first, bytes) ^ second, crc32c(seed, slice), "{cut} of {len}");
        }
    }
}
