//! Engines: who does the arithmetic. One trait, so that a GPU, a DPU or a register-transfer-level
//! model can stand in; the ones here are software, chosen by what the CPU has.
//!
//! | name       | needs                                     | coding multiplies with        | CRC32C |
//! |------------|-------------------------------------------|-------------------------------|--------|
//! | `portable` | nothing                                   | shift and add on wide words   | tables |
//! | `ssse3`    | SSSE3, SSE4.2, PCLMULQDQ                  | `pshufb`, 16 bytes            | `crc32`, three streams |
//! | `avx2`     | AVX2 and the above                        | `vpshufb`, 32 bytes           | same   |
//! | `avx512`   | AVX-512 F/BW/VL, VPCLMULQDQ and the above | `vpshufb`, 64 bytes           | `vpclmulqdq` and `crc32` at once |
//! | `gfni`     | GFNI and the above                        | `vgf2p8affineqb`, 64 bytes    | same   |
//!
//! All agree bit for bit. LZ4 is one implementation for all of them ([`crate::compress`]).

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;
use std::str::FromStr;

use crate::coding::{Product, Stripe};
use crate::compress::{self, CompressError};

/// What happens to the bytes that the outputs hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They are replaced.
    Set,
    /// The result is added (xor) to them.
    Add,
}

/// An engine for the data-path kernels. Methods are pure; an engine has no state that calls share.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Short name, as `--engine` takes it.
    fn name(&self) -> &'static str;

    /// outputs = product x inputs over GF(2^8), byte by byte. Panics when the buffers do not fit the
    /// product (see [`Product::check`]); [`crate::coding::Code`] checks before it calls.
    fn combine(
        &self,
        product: Product<'_>,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    );

    /// The same for many stripes; an accelerator takes them in one submission.
    fn combine_many(&self, product: Product<'_>, stripes: &mut [Stripe<'_, '_, '_>], mode: Mode) {
        for stripe in stripes {
            self.combine(product, stripe.inputs, stripe.outputs, mode);
        }
    }

    /// CRC32C of `bytes`, continuing from `seed` (0 to begin).
    fn crc32c(&self, seed: u32, bytes: &[u8]) -> u32;

    /// CRC32C of many blocks, each from 0. Panics when the lists differ in length.
    fn crc32c_many(&self, blocks: &[&[u8]], sums: &mut [u32]) {
        assert_eq!(blocks.len(), sums.len(), "one sum per block");
        for (sum, block) in sums.iter_mut().zip(blocks) {
            *sum = self.crc32c(0, block);
        }
    }

    /// Compresses into LZ4 block format; the number of bytes written.
    fn compress(&self, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        compress::compress(input, output)
    }

    /// Decompresses an LZ4 block into `output`, which bounds the result; the number of bytes written.
    fn decompress(&self, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        compress::decompress(input, output)
    }
}

/// A choice of engine, from an option.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The fastest that this CPU has.
    #[default]
    Auto,
    /// No vector instructions by hand.
    Portable,
    /// SSSE3 and SSE4.2.
    Ssse3,
    /// AVX2.
    Avx2,
    /// AVX-512 without GFNI.
    Avx512,
    /// AVX-512 with GFNI.
    Gfni,
}

impl Choice {
    /// Every engine, slowest first; `Auto` is none.
    pub const ENGINES: [Choice; 5] =
        [Choice::Portable, Choice::Ssse3, Choice::Avx2, Choice::Avx512, Choice::Gfni];

    /// The name that [`Choice::from_str`] takes.
    pub fn name(self) -> &'static str {
        match self {
            Choice::Auto => "auto",
            Choice::Portable => "portable",
            Choice::Ssse3 => "ssse3",
            Choice::Avx2 => "avx2",
            Choice::Avx512 => "avx512",
            Choice::Gfni => "gfni",
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why an engine cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineError {
    /// There is no engine of that name.
    Unknown(String),
    /// This CPU lacks what the engine needs.
    Unavailable(Choice),
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => write!(
                f,
                "no engine is called {name:?}: use auto, portable, ssse3, avx2, avx512 or gfni"
            ),
            Self::Unavailable(choice) => {
                write!(f, "this CPU lacks the instructions of engine {choice}; it has")?;
                for engine in available() {
                    write!(f, " {}", engine.name())?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for EngineError {}

impl FromStr for Choice {
    type Err = EngineError;

    fn from_str(name: &str) -> Result<Self, EngineError> {
        std::iter::once(Choice::Auto)
            .chain(Choice::ENGINES)
            .find(|c| c.name() == name)
            .ok_or_else(|| EngineError::Unknown(name.to_owned()))
    }
}

/// The engine for a choice.
pub fn select(choice: Choice) -> Result<&'static dyn Engine, EngineError> {
    let found: Option<&'static dyn Engine> = match choice {
        Choice::Auto => Some(best()),
        Choice::Portable => Some(&portable::Portable),
        #[cfg(target_arch = "x86_64")]
        simd => x86::engine(simd),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    };
    found.ok_or(EngineError::Unavailable(choice))
}

/// Every engine that this CPU can run, slowest first.
pub fn available() -> impl Iterator<Item = &'static dyn Engine> {
    Choice::ENGINES.into_iter().filter_map(|c| select(c).ok())
}

/// The fastest engine of this CPU.
pub fn best() -> &'static dyn Engine {
    #[cfg(target_arch = "x86_64")]
    if let Some(engine) = Choice::ENGINES.iter().rev().find_map(|&c| x86::engine(c)) {
        return engine;
    }
    &portable::Portable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_unknown_is_refused() {
        for choice in Choice::ENGINES {
            assert_eq!(choice.name().parse(), Ok(choice));
            match select(choice) {
                Ok(engine) => assert_eq!(engine.name(), choice.name()),
                Err(e) => assert_eq!(e, EngineError::Unavailable(choice)),
            }
        }
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("cuda".parse::<Choice>(), Err(EngineError::Unknown("cuda".into())));
        assert!(available().any(|e| e.name() == best().name()));
    }
}
