//! What is read out of an arena, compared with the checksums of its blocks ([`storage::format::sum`]) where that is asked for. A block that
//! is not what its checksum says may be rotten, or on its way to its place; the service knows which, mends what is rotten,
//! and is asked for those bytes in any case.

use storage::format::sum::{SUM_BYTES, Sum, sum_at};
use storage::limits::BLOCK_BYTES;

use super::host::Memory;

const BLOCK: usize = BLOCK_BYTES as usize;

/// A block is looked at so often before the service is asked: who writes it writes its checksum a moment later.
const TRIES: usize = 3;

/// Of a file, a block is looked at in one of so many spans of time.
const SAMPLED: u64 = 64;
/// How long a span is: two to this many nanoseconds, about a second.
const SPAN: u32 = 30;

/// Which reads are compared with checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Verify {
    /// None: what lies on the media is read and compared by the service's scrub.
    #[default]
    Never,
    /// Of each block those of one second in 64.
    Sample,
    /// All.
    Always,
}

impl Verify {
    /// All, by their words.
    pub const ALL: [(&'static str, Self); 3] =
        [("never", Self::Never), ("sample", Self::Sample), ("always", Self::Always)];

    /// By its word.
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, verify)| *verify)
    }

    /// Whether what is read at this place of an arena is compared at this time (nanoseconds of any clock).
    #[inline]
    pub(crate) fn now(self, arena: u32, offset: u64, time: impl FnOnce() -> u64) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            // No count that readers would share.
            Self::Sample => {
                let block = (offset / BLOCK_BYTES) ^ (u64::from(arena) << 40);
                let mixed = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                mixed.wrapping_add(time() >> SPAN).is_multiple_of(SAMPLED)
            }
        }
    }
}

/// How a read of an arena went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mapped {
    /// The bytes are there.
    Read,
    /// The arena is not as long.
    Short,
    /// A block is not what its checksum says.
    Wrong,
}

/// Copies bytes out of an arena, behind whose blocks, `bytes` long, their checksums may lie.
#[inline]
pub(crate) fn read_mapped<M: Memory>(
    arena: &M,
    bytes: u64,
    offset: u64,
    to: &mut [u8],
    verified: bool,
) -> Mapped {
    if verified {
        return read_verified(arena, bytes, offset, to);
    }
    if arena.read(offset, to) { Mapped::Read } else { Mapped::Short }
}

/// The same, block by block. (Out of line: of the stacks of programs it takes more than a block.)
#[inline(never)]
fn read_verified<M: Memory>(arena: &M, base: u64, offset: u64, to: &mut [u8]) -> Mapped {
    let mut done = 0;
    while done < to.len() {
        let at = offset + done as u64;
        let (block, within) = (at / BLOCK_BYTES, (at % BLOCK_BYTES) as usize);
        let n = (BLOCK - within).min(to.len() - done);
        let part = &mut to[done..done + n];
        let read = match n {
            // What is compared is what the reader gets.
            BLOCK => read_block(arena, base, block, part),
            _ => {
                let mut whole = [0; BLOCK];
                let read = read_block(arena, base, block, &mut whole);
                part.copy_from_slice(&whole[within..within + n]);
                read
            }
        };
        if read != Mapped::Read {
            return read;
        }
        done += n;
    }
    Mapped::Read
}

fn read_block<M: Memory>(arena: &M, base: u64, block: u64, to: &mut [u8]) -> Mapped {
    for _ in 0..TRIES {
        if !arena.read(block * BLOCK_BYTES, to) {
            return Mapped::Short;
        }
        let mut entry = [0; SUM_BYTES as usize];
        if !arena.read(sum_at(base, block), &mut entry) || Sum::decode(entry).is_of(to) {
            return Mapped::Read;
        }
    }
    Mapped::Wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_known_and_nothing_else() {
        for (word, verify) in Verify::ALL {
            assert_eq!(Verify::named(word), Some(verify));
        }
        assert_eq!(Verify::named("sometimes"), None);
    }

    /// Each block has its turn once in a while, and they do not all have it at once.
    #[test]
    fn each_block_has_its_turn() {
        let span = 1 << SPAN;
        for block in 0..200 {
            let turns =
                (0..SAMPLED).filter(|n| Verify::Sample.now(3, block * BLOCK_BYTES, || n * span));
            assert_eq!(turns.count(), 1, "block {block}");
        }
        let at_once =
            (0..6400).filter(|b| Verify::Sample.now(3, b * BLOCK_BYTES, || 5 * span)).count();
        assert!((50..200).contains(&at_once), "{at_once} of 6400");
        assert!(Verify::Always.now(0, 0, || 0) && !Verify::Never.now(0, 0, || 0));
    }
}
