//! CRC32C (Castagnoli; RFC 3720, appendix B.4) for the service side: incremental, and combined from
//! parts computed elsewhere. The kernels are in [`crate::engine`].

use crate::engine::{self, Engine};

/// Reflected polynomial.
const POLY: u32 = 0x82f6_3b78;

use base::checksum::{multiply, reflected_power};

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 != 0 { POLY } else { 0 };
            bit += 1;
        }
        t[0][i] = crc;
        i += 1;
    }
    let mut slice = 1;
    while slice < 8 {
        let mut i = 0;
        while i < 256 {
            let before = t[slice - 1][i];
            t[slice][i] = t[0][(before & 0xff) as usize] ^ (before >> 8);
            i += 1;
        }
        slice += 1;
    }
    t
}

/// Eight bytes a step through eight tables.
pub(crate) fn portable(seed: u32, bytes: &[u8]) -> u32 {
    let mut crc = !seed;
    let (words, rest) = bytes.as_chunks::<8>();
    for w in words {
        let w = (u64::from_le_bytes(*w) ^ u64::from(crc)).to_le_bytes();
        crc = 0;
        for (i, byte) in w.into_iter().enumerate() {
            crc ^= TABLES[7 - i][usize::from(byte)];
        }
    }
    for &b in rest {
        crc = TABLES[0][((crc ^ u32::from(b)) & 0xff) as usize] ^ (crc >> 8);
    }
    !crc
}

/// CRC32C of `bytes`, continuing from `seed` (0 to begin), on the fastest engine of this CPU.
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    engine::best().crc32c(seed, bytes)
}

/// CRC32C of `a` followed by `b`, from the CRCs of both and the length of `b`.
pub fn combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    // x^(8 len) as (x^8)^len: 8 len may not fit 64 bits.
    let mut power = 1u32 << 31;
    let mut square = reflected_power(8);
    let mut n = len_b;
    while n != 0 {
        if n & 1 != 0 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    multiply(crc_a, power) ^ crc_b
}

/// A CRC32C in the making, for data that arrives in pieces.
#[derive(Clone, Copy, Debug)]
pub struct Crc32c {
    crc: u32,
    bytes: u64,
    engine: &'static dyn Engine,
}

impl Crc32c {
    /// Of nothing yet.
    pub fn new(engine: &'static dyn Engine) -> Self {
        Self { crc: 0, bytes: 0, engine }
    }

    /// Adds `bytes` at the end.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc = self.engine.crc32c(self.crc, bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Adds, at the end, data known only by its CRC and length.
    pub fn append(&mut self, crc: u32, bytes: u64) {
        self.crc = combine(self.crc, crc, bytes);
        self.bytes += bytes;
    }

    /// The CRC of everything so far.
    pub fn value(&self) -> u32 {
        self.crc
    }

    /// How many bytes that is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    fn slow(seed: u32, bytes: &[u8]) -> u32 {
        let mut crc = !seed;
        for &b in bytes {
            crc ^= u32::from(b);
            for _ in 0..8 {
                crc = (crc >> 1) ^ if crc & 1 != 0 { POLY } else { 0 };
            }
        }
        !crc
    }

    #[test]
    fn known_vectors_on_every_engine() {
        for e in engine::available() {
            // RFC 3720, appendix B.4.
            assert_eq!(e.crc32c(0, b"123456789"), 0xe306_9283, "{}", e.name());
            assert_eq!(e.crc32c(0, &[0; 32]), 0x8a91_36aa, "{}", e.name());
            assert_eq!(e.crc32c(0, &[0xff; 32]), 0x62a8_ab43, "{}", e.name());
        }
    }

    #[test]
    fn engines_agree_at_every_length_and_alignment() {
        let mut random = Random::new(5);
        let mut bytes = vec![0u8; 20_000];
        random.fill(&mut bytes);
        for round in 0..2_200usize {
            let len = if round < 1_400 { round } else { random.below(19_900) as usize };
            let from = random.below(100) as usize;
            let slice = &bytes[from..from + len];
            let seed = random.next_u64() as u32;
            let want = slow(seed, slice);
            assert_eq!(base::crc32c(seed, slice), want, "base, length {len}");
            for e in engine::available() {
                assert_eq!(e.crc32c(seed, slice), want, "{} length {len}", e.name());
            }
        }
    }

    #[test]
    fn parts_combine() {
        let mut random = Random::new(6);
        let mut bytes = vec![0u8; 9_000];
        random.fill(&mut bytes);
        for _ in 0..200 {
            let cut = random.below(9_001) as usize;
            let (a, b) = bytes.split_at(cut);
            let whole = crc32c(0, &bytes);
            assert_eq!(combine(crc32c(0, a), crc32c(0, b), b.len() as u64), whole);
            let mut crc = Crc32c::new(engine::best());
            crc.update(a);
            crc.append(crc32c(0, b), b.len() as u64);
            assert_eq!((crc.value(), crc.bytes()), (whole, 9_000));
        }
        assert_eq!(combine(17, 0, 0), 17);
        // A length that no buffer has: 2^40 zero bytes, by doubling.
        let (mut crc, mut len) = (crc32c(0, &[0]), 1u64);
        while len < 1 << 40 {
            crc = combine(crc, crc, len);
            len *= 2;
        }
        assert_eq!(
            crc,
            combine(crc32c(0, &[0; 4096]), combine_zeros((1 << 40) - 4096), (1 << 40) - 4096)
        );
    }

    /// CRC of n zero bytes, by the definition of the register: all ones, moved n bytes.
    fn combine_zeros(n: u64) -> u32 {
        !(combine(!0, 0, n))
    }

    #[test]
    fn many_is_one_by_one() {
        let blocks: [&[u8]; 3] = [b"a", b"", b"123456789"];
        for e in engine::available() {
            let mut sums = [1u32; 3];
            e.crc32c_many(&blocks, &mut sums);
            assert_eq!(sums, [e.crc32c(0, b"a"), 0, 0xe306_9283]);
        }
    }
}
