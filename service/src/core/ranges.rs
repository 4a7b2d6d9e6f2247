//! Which regular files several clients write other bytes of at once. A write lease on all of a file goes to and fro between them, and
//! each time what was done under it is read, put in order and published before the next one writes, though no two ever mean
//! the same byte. So a file whose lease is fought for by clients that ask for other bytes is given to all of them *jointly*, each
//! with bytes of its own (`storage::format::control`, "Ranges"; the extent locks of cluster file systems), for as long as several have
//! some of it.
//!
//! Who asks gets as much around what he asks for as nobody else has, up to the file's *granule*: who reads and writes all over a region asks
//! once for it. Where others ask for bytes that somebody has got in this way the granule was too large, and becomes half as large: so clients that
//! write in turns (a checkpoint in strides) come to the width of a stride within a few recalls, and take nothing from each other from then on.

use std::collections::{BTreeMap, VecDeque};

use base::{ClientId, InodeId, Nanos};
use storage::format::rpc::Span;
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX};

use super::limits::Limits;

/// Files of which this is remembered.
const KNOWN_MAX: usize = 1024;
/// So many of those who have asked last are remembered of each.
const ASKED_MAX: usize = 8;
/// A granule, to begin with.
const GRANULE: u64 = 1 << 20;

#[derive(Debug)]
struct Fight {
    /// How often somebody had to wait for somebody else who had asked for other bytes, since `since`.
    times: u32,
    since: Nanos,
    granule: u64,
    /// It is used jointly until then, also where nobody has some of it at the moment (somebody has looked at all of it) ...
    until: Nanos,
    /// ... or longer, if somebody else than this one gets some before.
    last: ClientId,
    /// What clients have asked for last.
    asked: VecDeque<(ClientId, Span)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fights {
    known: BTreeMap<InodeId, Fight>,
}

/// What stands in the way of a client that asks for some bytes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Nothing.
    Free,
    /// A lease of somebody else's on all of it.
    Whole,
    /// Others have other bytes of it ...
    Beside,
    /// ... or these.
    Taken,
}

/// As whole blocks.
pub(super) fn whole_blocks(span: Span) -> Span {
    let to = span.to.min(FILE_SIZE_MAX).next_multiple_of(BLOCK_BYTES);
    Span { from: span.from / BLOCK_BYTES * BLOCK_BYTES, to }
}

impl Fights {
    /// `client` asks for these bytes, whole blocks. Of which bytes at most it gets a joint lease, if the file is to be used so.
    pub(super) fn ask(
        &mut self,
        ino: InodeId,
        (client, span): (ClientId, Span),
        way: Way,
        limits: &Limits,
        now: Nanos,
    ) -> Option<Span> {
        if limits.ranges == 0 || way == Way::Free && !self.known.contains_key(&ino) {
            return None;
        }
        let within = limits.joint_within;
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&ino) {
            self.known.retain(|_, f| f.since + within > now || f.until > now);
            if self.known.len() >= KNOWN_MAX {
                // Of so many none is fought for in particular.
                self.known.clear();
            }
        }
        let fight = self.known.entry(ino).or_insert_with(|| Fight {
            times: 0,
            since: now,
            granule: GRANULE,
            until: 0,
            last: client,
            asked: VecDeque::new(),
        });
        let meets = |(by, other): &(ClientId, Span)| {
            *by != client && span.from < other.to && other.from < span.to
        };
        let disputed = fight.asked.iter().any(meets);
        fight.asked.retain(|(by, _)| *by != client);
        fight.asked.push_front((client, span));
        fight.asked.truncate(ASKED_MAX);
        if disputed {
            // They mean the same bytes: these go to and fro in any case, and with all of the file at once it is less to ask for.
            (fight.times, fight.since, fight.until) = (0, now, 0);
            return None;
        }
        if fight.since + within <= now {
            (fight.times, fight.since) = (0, now);
        }
        match way {
            Way::Beside => {}
            Way::Whole | Way::Free if fight.until > now => {}
            Way::Taken => fight.granule = (fight.granule / 2).max(BLOCK_BYTES),
            Way::Free => return None,
            Way::Whole => {
                fight.times += 1;
                if fight.times < limits.joint_after {
                    return None;
                }
            }
        }
        if fight.last != client || fight.until == 0 {
            (fight.last, fight.until) = (client, now.saturating_add(limits.joint_for));
        }
        let granule = fight.granule;
        let to =
            (span.to.div_ceil(granule) * granule).min(FILE_SIZE_MAX.next_multiple_of(BLOCK_BYTES));
        Some(Span { from: span.from / granule * granule, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(7);
    const BLOCK: u64 = BLOCK_BYTES;

    fn limits() -> Limits {
        Limits { joint_after: 3, joint_within: 100, joint_for: 1000, ..Limits::default() }
    }

    fn block(n: u64) -> Span {
        Span { from: n * BLOCK, to: (n + 1) * BLOCK }
    }

    #[test]
    fn who_fights_for_other_bytes_shares_and_who_fights_for_the_same_does_not() {
        let (limits, mut fights) = (limits(), Fights::default());
        for round in 0..20 {
            let asks = (ClientId(round % 2), block(3));
            assert_eq!(fights.ask(FILE, asks, Way::Whole, &limits, round), None, "the same block");
        }
        let mut fights = Fights::default();
        let mut ask =
            |client, n, way, now| fights.ask(FILE, (ClientId(client), block(n)), way, &limits, now);
        assert_eq!(ask(1, 0, Way::Free, 0), None, "nobody is in the way");
        assert_eq!((ask(1, 0, Way::Whole, 1), ask(2, 1, Way::Whole, 2)), (None, None));
        let first = ask(1, 2, Way::Whole, 3).expect("the third time");
        assert_eq!((first.from, first.to), (0, GRANULE));
        assert_eq!(ask(2, 3, Way::Beside, 5000), Some(first), "as long as others have some of it");
        assert_eq!(ask(1, 9, Way::Free, 5001), Some(first), "the other has been there");
        assert_eq!(ask(1, 10, Way::Whole, 9000), None, "and was not since");
        assert_eq!(ask(1, 3, Way::Taken, 9001), None, "which the other has just asked for");
    }

    /// Clients that write in strides come to the width of a stride.
    #[test]
    fn a_granule_that_is_too_large_becomes_smaller() {
        let (limits, mut fights) = (limits(), Fights::default());
        let mut ask =
            |client, n, way| fights.ask(FILE, (ClientId(client), block(n)), way, &limits, 0);
        let (_, _) = (ask(1, 0, Way::Whole), ask(2, 1, Way::Whole));
        let mut width = ask(1, 2, Way::Whole).map(|most| most.to - most.from);
        for n in 3.. {
            let next = ask(n % 2, n, Way::Taken).map(|most| most.to - most.from);
            assert_eq!(next, width.map(|width| (width / 2).max(BLOCK)), "block {n}");
            if next == width {
                assert_eq!(width, Some(BLOCK));
                break;
            }
            width = next;
        }
    }

    #[test]
    fn what_is_remembered_is_bounded_and_no_number_is_too_large() {
        let (limits, mut fights) = (limits(), Fights::default());
        for ino in 0..10_000 {
            fights.ask(InodeId(ino), (ClientId(ino), block(1)), Way::Whole, &limits, 1);
            assert!(fights.known.len() <= KNOWN_MAX);
        }
        for client in 0..100 {
            let from = FILE_SIZE_MAX - BLOCK * (client + 1);
            let span = whole_blocks(Span { from, to: u64::MAX });
            fights.ask(FILE, (ClientId(client), span), Way::Beside, &limits, 1);
            assert!(fights.known[&FILE].asked.len() <= ASKED_MAX);
        }
    }
}
