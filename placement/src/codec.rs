//! Codecs by number: what is packed with one is unpacked by its number, wherever it lies or travels.
//!
//! Neither codec here says how long its output is, or whether it is right: whoever keeps packed bytes keeps length
//! and checksum beside them. Output is as long as the caller allows, and no longer.

use crate::compress::{self, CompressError};

/// How bytes are packed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Codec {
    /// An LZ4 block: fast in both directions; gains by repeated words only.
    Lz4 = 1,
    /// A Zstandard frame (RFC 8878) of the fastest level: packs a third as fast, and gains more.
    Zstd = 2,
}

/// The level of Zstandard: what travels is waited for.
const LEVEL: i32 = 1;

impl Codec {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// That of a number.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| *codec as u8 == number)
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Appends `input`, packed, to `output`; how many bytes that are. None, and nothing is appended, if they would be more
    /// than `most`.
    pub fn pack(self, input: &[u8], most: usize, output: &mut Vec<u8>) -> Option<usize> {
        let begin = output.len();
        let room = match self {
            Self::Lz4 => compress::bound(input.len()),
            // It ends where its output does not fit.
            Self::Zstd => most,
        };
        output.resize(begin + room, 0);
        let packed = match self {
            Self::Lz4 => compress::compress(input, &mut output[begin..]).ok(),
            Self::Zstd => zstd_safe::compress(&mut output[begin..], input, LEVEL).ok(),
        };
        let packed = packed.filter(|bytes| *bytes <= most);
        output.truncate(begin + packed.unwrap_or(0));
        packed
    }

    /// Unpacks `input` into `output`, which it has to fill.
    pub fn unpack(self, input: &[u8], output: &mut [u8]) -> Result<(), CompressError> {
        let bytes = match self {
            Self::Lz4 => compress::decompress(input, output)?,
            Self::Zstd => {
                zstd_safe::decompress(output, input).map_err(|_| CompressError::Corrupt)?
            }
        };
        if bytes == output.len() { Ok(()) } else { Err(CompressError::Corrupt) }
    }
}

#[cfg(test)]
mod tests {
    use base::random::Random;

    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_to_the_same_by_its_number() {
        let mut random = Random::new(6);
        for round in 0..300u64 {
            let mut raw = vec![0; random.below(1 << (round % 18)) as usize];
            random.fill(&mut raw);
            // The more bits are taken away, the better it packs.
            let keep = (0xff00_u64 >> random.below(9)) as u8;
            raw.iter_mut().for_each(|b| *b &= keep);
            for codec in Codec::ALL {
                assert_eq!(Codec::of(codec as u8), Some(codec));
                let mut packed = b"before".to_vec();
                let most = raw.len() + raw.len() / 100 + 200;
                let bytes = codec.pack(&raw, most, &mut packed).expect("it is hardly longer");
                assert_eq!(packed.len(), 6 + bytes);
                let mut again = vec![0xa5; raw.len()];
                assert_eq!(codec.unpack(&packed[6..], &mut again), Ok(()), "{codec:?}");
                assert_eq!(again, raw);
                if !raw.is_empty() {
                    let mut short = vec![0; raw.len() - 1];
                    assert!(codec.unpack(&packed[6..], &mut short).is_err(), "{codec:?}");
                }
                let mut long = vec![0; raw.len() + 1];
                assert!(codec.unpack(&packed[6..], &mut long).is_err(), "{codec:?}");
                assert_eq!(codec.pack(&raw, bytes - 1, &mut packed), None);
                assert_eq!(packed.len(), 6 + bytes, "what does not fit leaves nothing");
            }
        }
        assert_eq!((Codec::of(0), Codec::of(3)), (None, None));
    }

    #[test]
    fn broken_input_is_an_error_or_other_bytes() {
        let mut random = Random::new(7);
        let mut raw = b"a few words, a few words, and a few more words".repeat(60);
        raw[100] = 7;
        for codec in Codec::ALL {
            let mut packed = Vec::new();
            codec.pack(&raw, raw.len(), &mut packed).expect("words shrink");
            for _ in 0..3000 {
                let mut bad = packed.clone();
                for _ in 0..=random.below(3) {
                    bad[random.below(packed.len() as u64) as usize] ^= 1 << random.below(8);
                }
                bad.truncate(bad.len() - random.below(3) as usize);
                let mut out = vec![0; raw.len()];
                let _ = codec.unpack(&bad, &mut out);
                assert_eq!(out.len(), raw.len());
            }
            assert!(codec.unpack(b"", &mut [0; 9]).is_err());
            assert!(codec.unpack(&[0xff; 40], &mut [0; 9]).is_err());
        }
    }
}
