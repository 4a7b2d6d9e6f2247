//! Checksums of data blocks. Behind the blocks of each arena, in the same segment, lies an entry for each block, so
//! that who may read a block may read what it should be.
//!
//! ```text
//! 0 4 CRC32C of the block's 4096 bytes, 1 where that is 0; 0: none is known
//! 4 4 lower half of the position in the stream up to which the publication came that wrote to the block last
//! ```
//!
//! Entry `n` of an arena lies at `base + 8 n`, the base being the bytes of the volume's whole capacity. An entry is written
//! with its block, before the root that both belong to: after a crash, blocks that the stream ring is about to
//! write anew may differ from their entries, and no others. What entries of blocks say that are in no extent,
//! or in an unwritten one, means nothing.

use base::{StreamSeq, crc32c};

use crate::limits::BLOCK_BYTES;

/// Bytes of an entry.
pub const SUM_BYTES: u64 = 8;
/// Blocks whose entries lie in one block.
pub const SUMS_A_BLOCK: u64 = BLOCK_BYTES / SUM_BYTES;

/// An entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sum {
    /// See the module; 0 is none.
    pub crc: u32,
    /// Lower half of a position.
    pub position: u32,
}

impl Sum {
    /// The entry of a block of that CRC32C.
    pub const fn new(crc: u32, position: StreamSeq) -> Self {
        Self { crc: if crc == 0 { 1 } else { crc }, position: position.0 as u32 }
    }

    /// An entry that no block of that CRC32C has: of a block that was wrong before a part of it was written.
    pub const fn wrong(crc: u32, position: StreamSeq) -> Self {
        let crc = !Self::new(crc, position).crc;
        Self::new(crc, position)
    }

    /// Whether it is known what the block should be.
    pub const fn is_known(&self) -> bool {
        self.crc != 0
    }

    /// Whether a block is as it should be, as far as that is known.
    pub fn is_of(&self, block: &[u8]) -> bool {
        !self.is_known() || self.crc == Self::new(crc32c(0, block), StreamSeq(0)).crc
    }

    /// The bytes.
    pub const fn encode(&self) -> [u8; SUM_BYTES as usize] {
        (self.crc as u64 | (self.position as u64) << 32).to_le_bytes()
    }

    /// From the bytes: all of them mean something.
    pub const fn decode(bytes: [u8; SUM_BYTES as usize]) -> Self {
        let word = u64::from_le_bytes(bytes);
        Self { crc: word as u32, position: (word >> 32) as u32 }
    }
}

/// Where the entry of a block lies in its arena.
pub const fn sum_at(base: u64, block: u64) -> u64 {
    base + block * SUM_BYTES
}

/// Bytes of an arena of that many blocks, its entries included.
pub const fn arena_bytes(blocks: u64) -> u64 {
    (blocks * (BLOCK_BYTES + SUM_BYTES)).next_multiple_of(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_of_its_block_and_of_no_other() {
        let at = StreamSeq(7 << 32 | 9);
        let block = [3u8; BLOCK_BYTES as usize];
        let crc = crc32c(0, &block);
        let sum = Sum::new(crc, at);
        assert_eq!(Sum::decode(sum.encode()), sum);
        assert_eq!(sum.position, 9);
        assert!(sum.is_of(&block) && sum.is_known());
        assert!(!Sum::wrong(crc, at).is_of(&block));
        for bit in (0..block.len() * 8).step_by(97) {
            let mut flipped = block;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!sum.is_of(&flipped), "bit {bit}");
        }
        // None is known of zeroes that nobody wrote.
        assert!(Sum::default().is_of(&block) && !Sum::default().is_known());
        assert!(Sum::new(0, at).is_known() && Sum::wrong(u32::MAX, at).is_known());
    }
}
