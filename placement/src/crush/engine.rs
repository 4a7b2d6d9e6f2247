//! Drawing straw2: the one that costs, and the one that vectors help with.
//!
//! An item's distance is (2^48 − crush_ln(u)) / weight, u its hash; the nearest wins, the first of
//! equals. The vector engines do not divide 64-bit numbers. They compute log2 in single precision,
//! give every distance an error bound that also covers the defects of Ceph's tables and the cut-off
//! of the division, and take the nearest if its upper bound lies below everybody else's lower
//! bound. Else (some tenths of a percent) the exact loop decides. So all engines agree bit for bit,
//! whatever the rounding of the approximation.

use super::error::{Error, Result};
use super::flat::{Straw2, Table};
use super::hash::hash3;
use super::ln;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

/// Which code draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Plain integer code.
    Portable,
    /// Eight lanes.
    Avx2,
    /// Sixteen lanes.
    Avx512,
}

/// Error bound of the approximate log2 against `crush_ln` · 2^-44. `approximation_holds` tries all
/// 65,536 draws: the polynomial's, the tables' and the rounding errors make 5.5e-5 together.
pub(super) const APPROXIMATION: f32 = 1.2e-4;

/// Less than any exact distance for weight 1, and more than 0, whose product with ∞ is no number.
const LEAST: f32 = 1e-9;

/// log2(1 + t) for t in 0..1, lowest power first: the minimax polynomial, off by 1.57e-5.
#[allow(clippy::excessive_precision)]
const LOG2: [f32; 6] = [
    1.651_467_088_33e-5,
    1.441_492_411_76,
    -0.706_486_449_134,
    0.409_470_298_698,
    -0.187_488_604_59,
    0.043_004_957_791_9,
];

/// What a vector engine answers where only the exact loop can tell.
pub(super) const UNDECIDED: i32 = i32::MIN;

impl Engine {
    /// All of them, the fastest last.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Its name, as options have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// By its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.name() == name)
    }

    /// Whether this processor has what it needs.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|e| e.is_available()).unwrap_or(Self::Portable)
    }

    /// The engine asked for, if the processor has it; else the best.
    pub(super) fn resolve(wanted: Option<Self>) -> Result<Self> {
        match wanted {
            Some(engine) if !engine.is_available() => Err(Error::Request(format!(
                "this processor lacks what engine {} needs; leave the choice to Corbel",
                engine.name()
            ))),
            Some(engine) => Ok(engine),
            None => Ok(Self::best()),
        }
    }

    /// Position of the item that wins; the bucket is not empty.
    pub(super) fn pick(self, set: &Straw2, x: u32, r: u32) -> usize {
        let found = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::pick(set, x, r),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::pick(set, x, r),
            _ => None,
        };
        found.unwrap_or_else(|| pick_exactly(&set.ids, &set.weights, x, r))
    }

    /// For each lane, the item that wins in its bucket, or [`UNDECIDED`]. Every lane's bucket must be
    /// in the table with at least one item. False: this engine works one by one.
    pub(super) fn pick_many(self, table: &Table, lanes: &Lanes, chosen: &mut [i32]) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::pick_many(table, lanes, chosen),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::pick_many(table, lanes, chosen),
            _ => return false,
        }
        true
    }
}

/// One draw a lane, best sorted by bucket. The three lists are equally long; past the `live` lanes
/// come as many as the widest vector has, with buckets that are valid too.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// Number of lanes that count.
    pub live: usize,
    /// Index of the bucket.
    pub bucket: Vec<u32>,
    /// Input.
    pub x: Vec<u32>,
    /// Attempt.
    pub r: Vec<u32>,
}

impl Lanes {
    /// Makes room for `live` lanes and the padding.
    pub fn resize(&mut self, live: usize) {
        self.live = live;
        for list in [&mut self.bucket, &mut self.x, &mut self.r] {
            list.resize(live + super::flat::LANES_MAX, 0);
        }
    }
}

/// The exact loop: the definition.
pub(super) fn pick_exactly(ids: &[i32], weights: &[u32], x: u32, r: u32) -> usize {
    let table = ln::distance_table();
    let (mut nearest, mut winner) = (u64::MAX, 0);
    for (position, (id, weight)) in ids.iter().zip(weights).enumerate() {
        if *weight == 0 {
            continue;
        }
        let u = hash3(x, *id as u32, r) & 0xffff;
        let distance = table[u as usize] / u64::from(*weight);
        if distance < nearest {
            (nearest, winner) = (distance, position);
        }
    }
    winner
}

/// The approximate distance for weight 1: what the vector engines compute, in plain code.
#[cfg(test)]
fn approximate(u: u16) -> f32 {
    let v = f32::from(u) + 1.0;
    let exponent = ((v.to_bits() >> 23) as i32 - 127) as f32;
    let t = f32::from_bits(v.to_bits() & 0x7f_ffff | 0x3f80_0000) - 1.0;
    let log = LOG2[..5].iter().rev().fold(LOG2[5], |sum, c| sum.mul_add(t, *c));
    16.0 - (exponent + log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approximation_holds() {
        let mut worst = 0.0f64;
        for u in 0..=u16::MAX {
            let exact = ln::distance(u) as f64 / (1u64 << 44) as f64;
            worst = worst.max((f64::from(approximate(u)) - exact).abs());
        }
        let least = (0..=u16::MAX).map(ln::distance).min().unwrap_or(0);
        assert!(least as f64 / (1u64 << 44) as f64 > f64::from(LEAST));
        // Half of the bound is left for the multiplications that follow.
        assert!(worst < f64::from(APPROXIMATION) / 2.0, "{worst}");
    }

    #[test]
    fn some_engine_is_there_and_names_resolve() {
        assert!(Engine::best().is_available());
        for engine in Engine::ALL {
            assert_eq!(Engine::from_name(engine.name()), Some(engine));
            assert_eq!(Engine::resolve(Some(engine)).is_ok(), engine.is_available());
        }
    }
}
