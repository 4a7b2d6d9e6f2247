//! LZ4 block format (the one that DPUs decompress in hardware) and a quick test for data that is
//! not worth compressing.
//!
//! A block carries neither its own length nor a checksum: whoever stores it keeps both. Output
//! always goes into a buffer of the caller, so nothing is allocated on the word of the input.

use std::fmt;

/// The largest input, the limit of the LZ4 format's reference implementation.
pub const INPUT_BYTES_MAX: usize = 0x7e00_0000;

/// Inputs up to this length are compressed rather than probed: the probe would cost as much.
const PROBE_MIN_BYTES: usize = 4096;
/// The probe reads this many spans spread over the input ...
const SPANS: usize = 8;
/// ... each of this many bytes.
const SPAN_BYTES: usize = 512;
/// Entries of the table of four-byte words seen; a power of two.
const SEEN: usize = 4096;
/// Worth it when at least one in so many probed positions repeats a word seen before.
const REPEAT_SHARE: usize = 16;

/// What is wrong with a block or a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressError {
    /// The input is longer than [`INPUT_BYTES_MAX`].
    InputTooLong {
        /// Its length.
        bytes: usize,
    },
    /// The output buffer is too small: below [`bound`] when compressing, below what the block
    /// expands to when decompressing.
    OutputTooSmall {
        /// Length of the buffer.
        bytes: usize,
    },
    /// The input is not an LZ4 block: it ends early, or copies from before its beginning.
    Corrupt,
}

impl fmt::Display for CompressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InputTooLong { bytes } => {
                write!(f, "{bytes} bytes are above LZ4's {INPUT_BYTES_MAX}: split them")
            }
            Self::OutputTooSmall { bytes } => {
                write!(f, "the block does not fit the output buffer of {bytes} bytes")
            }
            Self::Corrupt => f.write_str("not an LZ4 block: read another replica"),
        }
    }
}

impl std::error::Error for CompressError {}

/// Bytes that [`compress`] may need for an input of `len`.
pub const fn bound(len: usize) -> usize {
    lz4_flex::block::get_maximum_output_size(len)
}

/// Compresses `input` into `output`, which has at least [`bound`] bytes; the number written.
pub fn compress(input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
    if input.len() > INPUT_BYTES_MAX {
        return Err(CompressError::InputTooLong { bytes: input.len() });
    }
    let bytes = output.len();
    lz4_flex::block::compress_into(input, output)
        .map_err(|_| CompressError::OutputTooSmall { bytes })
}

/// Compresses when that saves at least an eighth; none means "store it as it is". Data that looks
/// incompressible is not tried.
pub fn compress_if_worth(input: &[u8], output: &mut [u8]) -> Result<Option<usize>, CompressError> {
    if !looks_compressible(input) {
        return Ok(None);
    }
    let written = compress(input, output)?;
    Ok((written <= input.len() - input.len() / 8 && written < input.len()).then_some(written))
}

/// Decompresses the block `input` into `output`; the number of bytes written. Whoever knows the
/// length compares it.
pub fn decompress(input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
    let bytes = output.len();
    lz4_flex::block::decompress_into(input, output).map_err(|e| match e {
        lz4_flex::block::DecompressError::OutputTooSmall { .. } => {
            CompressError::OutputTooSmall { bytes }
        }
        _ => CompressError::Corrupt,
    })
}

/// A guess in a microsecond or two: false when LZ4 would very likely gain nothing.
///
/// LZ4 gains only by repeated words, so it is those that are counted, over a few spans of the input;
/// the distribution of byte values (entropy) says nothing here. Repeats that lie further apart than
/// a span are missed: two copies of one random page look incompressible.
pub fn looks_compressible(input: &[u8]) -> bool {
    if input.len() <= PROBE_MIN_BYTES {
        return true;
    }
    // The table holds words, and a word is a repeat only if it is equal: hashes that meet do not
    // count. Zero stands for "none", so that a first run of zeros is counted one position late.
    let mut seen = [0u32; SEEN];
    let mut repeats = 0;
    let step = (input.len() - SPAN_BYTES) / (SPANS - 1);
    for span in 0..SPANS {
        let span = &input[span * step..][..SPAN_BYTES];
        for window in span.windows(4) {
            let word = u32::from_le_bytes([window[0], window[1], window[2], window[3]]);
            let slot = &mut seen[(word.wrapping_mul(0x9e37_79b1) >> 20) as usize % SEEN];
            repeats += usize::from(*slot == word);
            *slot = word;
        }
    }
    repeats * REPEAT_SHARE >= SPANS * (SPAN_BYTES - 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; len];
        Random::new(seed).fill(&mut bytes);
        bytes
    }

    /// Random data over a small alphabet with runs and copies: compressible to a varying degree.
    fn texture(random: &mut Random, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = Vec::with_capacity(len + 300);
        while bytes.len() < len {
            match random.below(3) {
                0 => (0..random.below(40)).for_each(|_| bytes.push(random.next_u64() as u8)),
                1 => bytes.extend(std::iter::repeat_n(7, random.below(300) as usize)),
                _ => {
                    let from = random.below(bytes.len() as u64) as usize;
                    let n = (random.below(200) as usize).min(bytes.len() - from);
                    bytes.extend_from_within(from..from + n);
                }
            }
        }
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn round_trip() {
        let mut random = Random::new(1);
        for i in 0..400 {
            let len = if i < 100 { i } else { random.below(200_000) as usize };
            let plain = texture(&mut random, len);
            let mut packed = vec![0u8; bound(len)];
            let n = compress(&plain, &mut packed).unwrap();
            let mut back = vec![0u8; len];
            assert_eq!(decompress(&packed[..n], &mut back), Ok(len));
            assert_eq!(back, plain);
        }
    }

    #[test]
    fn a_block_written_by_hand() {
        // Token 0x44: four literals, then a match of 4 + 4 at offset 4; last token: five literals.
        let block = b"\x44abcd\x04\x00\x50vwxyz";
        let mut out = [0u8; 17];
        assert_eq!(decompress(block, &mut out), Ok(17));
        assert_eq!(&out, b"abcdabcdabcdvwxyz");
    }

    #[test]
    fn hostile_blocks_are_errors() {
        let mut out = [0u8; 64];
        // Empty, literals missing, offset 0, offset before the beginning, a length run off the end.
        let bad: [&[u8]; 5] =
            [b"", b"\x40ab", b"\x44abcd\x00\x00\x00", b"\x14a\x02\x00\x00", b"\xf0\xff\xff\xff"];
        for block in bad {
            assert_eq!(decompress(block, &mut out), Err(CompressError::Corrupt), "{block:?}");
        }
        // A length of gigabytes is refused by the buffer, not allocated.
        let mut long = b"\x1fa\x01\x00".to_vec();
        long.extend([0xff; 100_000]);
        long.extend(b"\x00\x50vwxyz");
        let bytes = out.len();
        assert_eq!(decompress(&long, &mut out), Err(CompressError::OutputTooSmall { bytes }));
        assert_eq!(compress(&[0; 100], &mut out), Err(CompressError::OutputTooSmall { bytes }));
    }

    #[test]
    fn truncated_and_flipped_blocks_never_panic() {
        let mut random = Random::new(2);
        let mut refused = 0;
        for _ in 0..60 {
            let len = 1 + random.below(3_000) as usize;
            let plain = texture(&mut random, len);
            let mut packed = vec![0u8; bound(len)];
            let n = compress(&plain, &mut packed).unwrap();
            let packed = &packed[..n];
            let mut out = vec![0u8; len];
            for cut in 0..n.min(200) {
                let shorter = decompress(&packed[..cut], &mut out);
                assert!(shorter.map_or(true, |n| n < len), "cut at {cut} of {n}");
            }
            for _ in 0..200 {
                let mut bad = packed.to_vec();
                bad[random.below(n as u64) as usize] ^= 1 << random.below(8);
                match decompress(&bad, &mut out) {
                    Ok(n) => assert!(n <= out.len()),
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > 100, "only {refused} of 12000 flips were noticed");
    }

    #[test]
    fn probe_tells_text_from_noise() {
        let noise = random_bytes(3, 1 << 20);
        assert!(!looks_compressible(&noise));
        // Letters only, but random: low entropy, no repeats, and LZ4 gains nothing from it.
        let letters: Vec<u8> =
            noise.iter().map(|b| b"0123456789abcdef"[usize::from(b & 15)]).collect();
        let mut out = vec![0u8; bound(letters.len())];
        assert_eq!(compress_if_worth(&noise, &mut out), Ok(None));
        assert_eq!(compress_if_worth(&letters, &mut out), Ok(None));
        assert!(looks_compressible(&vec![0; 1 << 16]));
        let text = "the quick brown fox jumps over the lazy dog ".repeat(2_000);
        assert!(looks_compressible(text.as_bytes()));
        let n = compress_if_worth(text.as_bytes(), &mut out).unwrap().expect("text shrinks");
        assert!(n < text.len() / 20);
        assert_eq!(compress_if_worth(&noise[..100], &mut out), Ok(None));
        assert_eq!(compress_if_worth(b"", &mut out), Ok(None));
    }
}
