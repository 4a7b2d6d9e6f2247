//! What a request of a kind costs, on the average of all tenants of the process: so much whoever asks for it is charged.
//!
//! Not what this very request took. That is as well how others have used the caches meanwhile, whether a turn has just begun, and who
//! took the processor in between, of all of which a tenant with a small share, whose turns are short, has the most: it would pay a third more for the
//! same. So tenants that ask for the same share by the number of their requests, and others by what these cost as a rule.
//!
//! A kind is an operation and how many bytes it moves. Requests of a kind may still differ, by what they find: what somebody uses beyond
//! [`BEYOND`] times the price is its own, and is not in the average.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// So many operations are told apart; those that have greater numbers are one kind with the last.
const OPERATIONS: usize = 64;
/// By bytes: none, up to 4 KiB, 8 KiB, … and more than all of those.
const SIZES: usize = 12;
/// What was used counts as usual up to so many times the price.
const BEYOND: f64 = 4.0;
/// The average is over about so many of those that were measured; of fewer, as long as there are fewer.
const MEMORY: u32 = 64;
/// One in so many is measured, when the kind is known: to read the clocks takes system calls.
const SELDOM: u32 = 8;
/// What a request of which nothing is known is taken to cost, in nanoseconds, and each of its bytes.
const GUESS: (f64, f64) = (5e3, 0.1);

/// An operation and a class of sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Kind(usize);

impl Kind {
    pub(crate) fn new(opcode: u32, bytes: u64) -> Self {
        let operation = (opcode as usize).min(OPERATIONS - 1);
        let size = match bytes.div_ceil(4096) {
            0 => 0,
            pages => 1 + pages.next_power_of_two().trailing_zeros() as usize,
        };
        Self(operation * SIZES + size.min(SIZES - 1))
    }

    fn guess(self) -> f64 {
        let bytes = match self.0 % SIZES {
            0 => 0,
            size => 4096u64 << (size - 1),
        };
        GUESS.0 + GUESS.1 * bytes as f64
    }
}

#[derive(Debug, Default)]
struct Price {
    /// An `f64`, in nanoseconds.
    mean: AtomicU64,
    /// How many were measured.
    measured: AtomicU32,
}

/// Of all kinds. Two that learn at once may forget what one of them has seen, which is no harm.
#[derive(Debug)]
pub(crate) struct Prices(Vec<Price>);

impl Prices {
    pub(crate) fn new() -> Self {
        Self((0..OPERATIONS * SIZES).map(|_| Price::default()).collect())
    }

    /// Nanoseconds.
    pub(crate) fn of(&self, kind: Kind) -> f64 {
        let Price { mean, measured } = &self.0[kind.0];
        if measured.load(Ordering::Relaxed) == 0 {
            return kind.guess();
        }
        f64::from_bits(mean.load(Ordering::Relaxed))
    }

    /// Whether the caller, who serves its request of that number, should measure it.
    pub(crate) fn wants(&self, kind: Kind, number: u32) -> bool {
        number.is_multiple_of(SELDOM) || self.0[kind.0].measured.load(Ordering::Relaxed) < MEMORY
    }

    /// One of that kind has cost so much.
    pub(crate) fn learn(&self, kind: Kind, cost: f64) {
        let Price { mean, measured } = &self.0[kind.0];
        let before = measured.load(Ordering::Relaxed);
        let old = self.of(kind);
        let new = if before == 0 {
            cost
        } else {
            // A price that began too low would never be found again if it could not grow by this.
            old + (cost.min(BEYOND * old) - old) / f64::from((before + 1).min(MEMORY))
        };
        // Nothing costs nothing.
        mean.store(new.max(1.0).to_bits(), Ordering::Relaxed);
        measured.store((before + 1).min(MEMORY), Ordering::Relaxed);
    }
}

/// What somebody is charged whose requests have the price, and who has used so much for them.
pub(crate) fn bill(price: f64, used: f64) -> f64 {
    price.max(used - (BEYOND - 1.0) * price)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart() {
        let kinds = [(1, 0), (2, 0), (15, 1), (15, 4097), (15, 1 << 20), (63, 0)];
        for (n, (opcode, bytes)) in kinds.iter().enumerate() {
            for (opcode_2, bytes_2) in &kinds[n + 1..] {
                assert_ne!(Kind::new(*opcode, *bytes), Kind::new(*opcode_2, *bytes_2));
            }
        }
        assert_eq!(Kind::new(15, 1), Kind::new(15, 4096));
        assert_eq!(Kind::new(15, 4097), Kind::new(15, 8192));
        // Whatever a guest asks for.
        let prices = Prices::new();
        assert!(prices.of(Kind::new(u32::MAX, u64::MAX)) > 0.0);
        assert_eq!(Kind::new(u32::MAX, u64::MAX), Kind::new(1000, u64::MAX / 2));
    }

    #[test]
    fn a_price_is_the_average_and_what_is_far_beyond_it_is_ones_own() {
        let (prices, kind) = (Prices::new(), Kind::new(15, 4096));
        assert!(prices.wants(kind, 1) && prices.of(kind) > 0.0);
        for turn in 0..1000 {
            prices.learn(kind, if turn % 2 == 0 { 8e3 } else { 12e3 });
        }
        let price = prices.of(kind);
        assert!((price - 10e3).abs() < 200.0, "{price}");
        assert!(prices.wants(kind, 8) && !prices.wants(kind, 9));
        prices.learn(kind, 20e6);
        assert!(prices.of(kind) < 1.06 * price, "{}", prices.of(kind));
        for (used, due) in [(0.0, 10e3), (10e3, 10e3), (39e3, 10e3), (50e3, 20e3), (20e6, 19.97e6)]
        {
            assert!((bill(10e3, used) - due).abs() < 1.0, "{used}");
        }
        assert!((bill(0.0, 5e3) - 5e3).abs() < 1.0, "of a request that goes on");
        // They have become dearer for everybody, and it began at nothing.
        prices.learn(kind, 0.0);
        (0..2000).for_each(|_| prices.learn(kind, 500e3));
        assert!((prices.of(kind) - 500e3).abs() < 1e3, "{}", prices.of(kind));
    }
}
