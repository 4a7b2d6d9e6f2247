//! Content that is told by a number: the same for all who know it, and different in every word, so
//! that bytes that turn up elsewhere are seen.

/// Bytes of a step of the generator.
const WORD: usize = 8;

fn word(pattern: u64, index: u64) -> u64 {
    let mut z =
        pattern.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    // Never zero, so that zeros are always holes.
    (z ^ (z >> 32)) | 0x0101_0101_0101_0101
}

/// Fills `bytes` with the beginning of a pattern.
pub fn fill(pattern: u64, bytes: &mut [u8]) {
    for (index, chunk) in bytes.chunks_mut(WORD).enumerate() {
        let word = word(pattern, index as u64).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// A sum of bytes that depends on their places.
#[derive(Clone, Debug)]
pub struct Sum {
    state: u64,
    length: u64,
    rest: [u8; WORD],
}

impl Sum {
    /// Of nothing.
    pub const fn new() -> Self {
        Self { state: 0xcbf2_9ce4_8422_2325, length: 0, rest: [0; WORD] }
    }

    /// Takes more bytes in.
    pub fn add(&mut self, mut bytes: &[u8]) {
        let held = (self.length % WORD as u64) as usize;
        self.length += bytes.len() as u64;
        if held != 0 {
            let take = bytes.len().min(WORD - held);
            self.rest[held..held + take].copy_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if held + take < WORD {
                return;
            }
            self.mix(u64::from_le_bytes(self.rest));
        }
        let (words, rest) = bytes.as_chunks::<WORD>();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    fn mix(&mut self, word: u64) {
        self.state = (self.state ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25).rotate_left(29);
    }

    /// The sum, and the number of bytes.
    pub fn end(mut self) -> (u64, u64) {
        let held = (self.length % WORD as u64) as usize;
        if held != 0 {
            self.rest[held..].fill(0);
            self.mix(u64::from_le_bytes(self.rest));
        }
        self.mix(self.length);
        (self.state ^ (self.state >> 31), self.length)
    }
}

/// The sum of some bytes.
pub fn sum(bytes: &[u8]) -> u64 {
    let mut sum = Sum::new();
    sum.add(bytes);
    sum.end().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_does_not_depend_on_the_pieces() {
        let mut bytes = vec![0; 1000];
        fill(7, &mut bytes);
        assert!(!bytes.contains(&0));
        for step in [1, 3, 8, 13, 64, 999] {
            let mut pieces = Sum::new();
            bytes.chunks(step).for_each(|chunk| pieces.add(chunk));
            assert_eq!(pieces.end(), (sum(&bytes), 1000), "{step}");
        }
        let mut other = bytes.clone();
        other[999] ^= 1;
        assert_ne!(sum(&other), sum(&bytes));
        assert_ne!(sum(&[0; 8]), sum(&[0; 9]));
        other.swap(0, 8);
        assert_ne!(sum(&other), sum(&bytes));
    }
}
