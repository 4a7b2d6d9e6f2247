//! Who changes which bytes of a file at this moment, as far as that takes more than one step: an interval structure of
//! what is in flight.
//!
//! A change that is one entry of the log needs no place here. It is committed in one go, with the file's state locked
//! ([`data`](super::data)), and the order of commits is the order of the entries and of what readers see. But a
//! write of several entries is to be one write for other writers: between two of its entries nobody else may change a
//! byte of its range. So it takes a [`Ticket`] for the range, and so does everybody who finds that he has to wait.
//!
//! Tickets are numbered, and the rule is one: a ticket's turn is when no earlier one overlaps it. So exactly those wait for each
//! other whose ranges have a byte in common; the order among them is that of their coming; and nobody waits for ever, since
//! whoever comes later with an overlapping range waits for him. What concerns the whole file (appends of several entries,
//! truncation, holes, clones) has the range of all of it.
//!
//! Never more tickets than threads: a short list, looked through in order.

use alloc::vec::Vec;
use core::ops::Range;

use base::planted::{Bug, planted};

/// All bytes of a file, and its size.
pub const WHOLE: Range<u64> = 0..u64::MAX;

/// A place in the queue for a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// The tickets of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranges {
    /// In the order of their numbers.
    held: Vec<(Ticket, Range<u64>)>,
    last: u64,
}

/// Whether two ranges have a byte in common.
fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    if planted(Bug::RangesByStart) {
        return b.contains(&a.start);
    }
    a.start.max(b.start) < a.end.min(b.end)
}

impl Ranges {
    /// Queues up for a range.
    pub fn enter(&mut self, range: Range<u64>) -> Ticket {
        self.last += 1;
        let ticket = Ticket(self.last);
        self.held.push((ticket, range));
        ticket
    }

    /// Gives the ticket back. Whether others have one, who may have waited for that.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        self.held.retain(|(held, _)| *held != ticket);
        !self.held.is_empty()
    }

    /// Whether it is the ticket's turn.
    pub fn is_due(&self, ticket: Ticket) -> bool {
        let range = self.held.iter().find(|(held, _)| *held == ticket).map(|(_, range)| range);
        range.is_none_or(|range| !self.bars(range, Some(ticket)))
    }

    /// Whether somebody who came earlier (than the ticket; without one than now) has something to do with these bytes.
    #[inline]
    pub fn bars(&self, range: &Range<u64>, own: Option<Ticket>) -> bool {
        let earlier = |held: &Ticket| own.is_none_or(|own| *held < own);
        self.held.iter().any(|(held, theirs)| earlier(held) && overlap(theirs, range))
    }
}

#[cfg(all(test, feature = "std"))]
mod model;

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use base::random::Random;

    /// Against a byte model: whoever is due shares no byte with another who is due or came before him.
    #[test]
    fn whoever_is_due_is_alone_with_his_bytes() {
        const SIZE: u64 = 24;
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut ranges = Ranges::default();
            let mut known: Vec<(Ticket, Range<u64>)> = Vec::new();
            for _ in 0..80 {
                if random.chance(1, 2) {
                    let from = random.below(SIZE);
                    let to = from + 1 + random.below(SIZE - from);
                    let range = if random.chance(1, 8) { WHOLE } else { from..to };
                    known.push((ranges.enter(range.clone()), range));
                } else if !known.is_empty() {
                    let (ticket, _) = known.remove(random.below(known.len() as u64) as usize);
                    assert_eq!(ranges.leave(ticket), !known.is_empty());
                }
                let bytes = |range: &Range<u64>| range.start..range.end.min(SIZE + 1);
                for (i, (ticket, range)) in known.iter().enumerate() {
                    let met = known[..i].iter().any(|(_, r)| bytes(r).any(|b| range.contains(&b)));
                    assert_eq!(ranges.is_due(*ticket), !met, "seed {seed}: {range:?} of {known:?}");
                }
                let from = random.below(SIZE);
                let one = from..from + 1;
                let met = known.iter().any(|(_, r)| r.contains(&from));
                assert_eq!(ranges.bars(&one, None), met, "seed {seed}: {from} of {known:?}");
            }
        }
    }

    #[test]
    fn an_empty_range_meets_nobody() {
        let mut ranges = Ranges::default();
        let ticket = ranges.enter(4..8);
        assert!(!ranges.bars(&(6..6), None) && !ranges.bars(&(8..9), None));
        assert!(
            ranges.bars(&(0..5), None) && ranges.bars(&(7..9), None) && ranges.bars(&WHOLE, None)
        );
        assert!(!ranges.leave(ticket) && !ranges.bars(&WHOLE, None));
    }
}
