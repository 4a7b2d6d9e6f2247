//! The x86-64 engines: one kernel ([`combine`]) over vectors of three widths and two ways to
//! multiply ([`lanes`]), and two CRC32C kernels ([`crc`]).
//!
//! # Safety
//! Everything unsafe here needs CPU features. An engine value can be had only through [`engine`],
//! which asks the CPU first; nothing else constructs one.
#![allow(unsafe_code)]

mod combine;
pub(crate) mod lanes;

use super::{Choice, Engine, Mode};
use crate::coding::Product;
use base::checksum::x86 as crc;
use combine::Job;

macro_rules! engine {
    ($type:ident, $name:literal, $lanes:ty, $features:literal, $crc:path) => {
        #[derive(Debug)]
        struct $type(());

        impl Engine for $type {
            fn name(&self) -> &'static str {
                $name
            }

            fn combine(
                &self,
                product: Product<'_>,
                inputs: &[&[u8]],
                outputs: &mut [&mut [u8]],
                mode: Mode,
            ) {
                #[target_feature(enable = $features)]
                fn run(job: &mut Job<'_, '_, '_>) {
                    // SAFETY: this function has the features that the lanes need.
                    unsafe { combine::run::<$lanes>(job) }
                }
                let mut job = Job::new(product, inputs, outputs, mode);
                // SAFETY: the engine exists, so `engine` found the features on this CPU.
                unsafe { run(&mut job) }
            }

            fn crc32c(&self, seed: u32, bytes: &[u8]) -> u32 {
                // SAFETY: the engine exists, so `engine` found the features on this CPU.
                unsafe { $crc(seed, bytes) }
            }
        }
    };
}

engine!(Ssse3, "ssse3", lanes::Shuffle128, "ssse3", crc::streams);
engine!(Avx2, "avx2", lanes::Shuffle256, "avx2", crc::streams);
engine!(Avx512, "avx512", lanes::Shuffle512, "avx512f,avx512bw,avx512vl", crc::folds);
engine!(Gfni, "gfni", lanes::Affine512, "avx512f,avx512bw,avx512vl,gfni", crc::folds);

/// The engine for a choice, when this CPU can run it. (`std` asks the CPU once and remembers.)
pub(super) fn engine(choice: Choice) -> Option<&'static dyn Engine> {
    let sse = is_x86_feature_detected!("ssse3")
        && is_x86_feature_detected!("sse4.2")
        && is_x86_feature_detected!("pclmulqdq");
    let avx2 = sse && is_x86_feature_detected!("avx2");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("vpclmulqdq");
    match choice {
        Choice::Ssse3 if sse => Some(&Ssse3(())),
        Choice::Avx2 if avx2 => Some(&Avx2(())),
        Choice::Avx512 if avx512 => Some(&Avx512(())),
        Choice::Gfni if avx512 && is_x86_feature_detected!("gfni") => Some(&Gfni(())),
        _ => None,
    }
}
