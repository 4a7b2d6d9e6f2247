//! A set of bytes of a file: spans that neither overlap nor touch, in their order.

use alloc::vec::Vec;
use core::ops::Range;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    all: Vec<(u64, u64)>,
}

impl Spans {
    /// No bytes.
    pub const fn new() -> Self {
        Self { all: Vec::new() }
    }

    /// Of how many spans it consists.
    pub const fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there are no bytes in it.
    pub const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The first span that ends behind a byte.
    fn behind(&self, at: u64) -> usize {
        self.all.partition_point(|(_, to)| *to <= at)
    }

    /// Adds bytes.
    pub fn insert(&mut self, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        // Those that it touches become one with it.
        let first = self.all.partition_point(|(_, to)| *to < bytes.start);
        let last = self.all.partition_point(|(from, _)| *from <= bytes.end);
        let touched = &self.all[first..last];
        let from = touched.first().map_or(bytes.start, |(from, _)| bytes.start.min(*from));
        let to = touched.last().map_or(bytes.end, |(_, to)| bytes.end.max(*to));
        self.all.splice(first..last, [(from, to)]);
    }

    /// Whether all of these are in it.
    #[inline]
    pub fn has_all(&self, bytes: &Range<u64>) -> bool {
        let at = self.all.get(self.behind(bytes.start));
        bytes.is_empty() || at.is_some_and(|(from, to)| *from <= bytes.start && bytes.end <= *to)
    }

    /// Whether some of these are.
    pub fn has_some(&self, bytes: &Range<u64>) -> bool {
        let at = self.all.get(self.behind(bytes.start));
        !bytes.is_empty() && at.is_some_and(|(from, _)| *from < bytes.end)
    }

    /// As much of `most` around `bytes`, which are in both, and of which none is in this set, as is not in this set.
    pub fn gap(&self, bytes: &Range<u64>, most: Range<u64>) -> Range<u64> {
        let next = self.behind(bytes.start);
        let before = next.checked_sub(1).map_or(0, |at| self.all[at].1);
        let after = self.all.get(next).map_or(u64::MAX, |(from, _)| *from);
        most.start.max(before)..most.end.min(after)
    }

    /// The spans.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.all.iter().map(|(from, to)| *from..*to)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn a_set_of_spans_is_a_set_of_bytes() {
        const SIZE: u64 = 40;
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let (mut spans, mut bytes) = (Spans::new(), [false; SIZE as usize]);
            for _ in 0..12 {
                let from = random.below(SIZE);
                let range = from..from + random.below(SIZE + 1 - from);
                let within =
                    |bytes: &[bool]| bytes[range.start as usize..range.end as usize].to_vec();
                let has = within(&bytes);
                assert_eq!(
                    spans.has_all(&range),
                    has.iter().all(|b| *b),
                    "seed {seed}: {range:?} of {spans:?}"
                );
                assert_eq!(
                    spans.has_some(&range),
                    has.iter().any(|b| *b),
                    "seed {seed}: {range:?} of {spans:?}"
                );
                if !range.is_empty() && !spans.has_some(&range) {
                    let most = range.start / 8 * 8..range.end.next_multiple_of(8);
                    let gap = spans.gap(&range, most.clone());
                    let free = |at: u64| bytes.get(at as usize).is_none_or(|taken| !taken);
                    let from = (most.start..=range.start).rev().take_while(|at| free(*at)).last();
                    let to = (range.end..most.end)
                        .take_while(|at| free(*at))
                        .last()
                        .map_or(range.end, |at| at + 1);
                    assert_eq!(
                        (Some(gap.start), gap.end),
                        (from, to),
                        "seed {seed}: {range:?} of {spans:?}"
                    );
                }
                spans.insert(range.clone());
                range.for_each(|at| bytes[at as usize] = true);
                let all: Vec<_> = spans.iter().collect();
                assert!(
                    all.windows(2).all(|two| two[0].end < two[1].start),
                    "seed {seed}: {spans:?}"
                );
                let count: u64 = all.iter().map(|span| span.end - span.start).sum();
                assert_eq!(
                    count,
                    bytes.iter().filter(|b| **b).count() as u64,
                    "seed {seed}: {spans:?}"
                );
            }
        }
    }
}
