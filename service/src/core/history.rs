//! When what is published here was: of some publications of this process, which position of the stream they came up to, and which
//! transaction they were. By that the head tells what has changed since the state of a node that comes back
//! (`storage::volume::since`).
//!
//! It is thinned out as it grows: the further back, the fewer are left, and what lies between two of them counts as changed.

use std::collections::VecDeque;

use base::planted::{Bug, planted};
use base::{Epoch, StreamSeq};
use storage::volume::since::{FAR, Since};

use super::Node;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct History {
    /// In order, of both.
    published: VecDeque<(StreamSeq, u64)>,
}

impl History {
    /// A transaction was published with the state of that position; no more than `most` are kept.
    pub(super) fn note(&mut self, seq: StreamSeq, transaction: u64, most: usize) {
        // What came up to the same position before had no more.
        while self.published.pop_back_if(|last| last.0 >= seq).is_some() {}
        self.published.push_back((seq, transaction));
        if self.published.len() > most {
            // Of the older half every other one goes.
            let half = self.published.len() / 2;
            let mut at = 0;
            self.published.retain(|_| {
                at += 1;
                at > half || at % 2 == 1
            });
            while self.published.len() > most {
                self.published.pop_front();
            }
        }
    }

    /// The last transaction that was published with the state of a position before that one.
    pub(super) fn before(&self, seq: StreamSeq) -> Option<u64> {
        let end = self.published.partition_point(|(at, _)| *at < seq);
        Some(self.published.get(end.checked_sub(1)?)?.1)
    }

    /// A transaction that was published with all up to that position.
    pub(super) fn with(&self, seq: StreamSeq) -> Option<u64> {
        let at = self.published.partition_point(|(at, _)| *at < seq);
        Some(self.published.get(at)?.1)
    }

    /// The volume is another one.
    pub(super) fn clear(&mut self) {
        self.published.clear();
    }
}

/// What a node that needs a snapshot says of what it has: what the stream says up to `published`, and maybe some of what follows, up to
/// `last`, which is of the stream as the head of that epoch had it. All 0: that is not known.
#[derive(Default, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Claim {
    pub published: StreamSeq,
    pub last: StreamSeq,
    pub epoch: Epoch,
}

impl Node {
    /// What is published is known to be so later.
    pub(super) fn note_published(&mut self) {
        let (seq, transaction) = (self.member.published, self.volume.root().transaction);
        self.member.history.note(seq, transaction, self.env.config.limits.history);
    }

    /// What the state of a node that comes back has, if that is all of this stream, and it is known here when that was.
    pub(super) fn since(&self, claim: Claim) -> Option<Since> {
        let Claim { published, last, epoch } = claim;
        // Only the head of an epoch makes chunks in it, and those after it go on from a part of its stream: a chunk here that was made in that
        // epoch or before is one of that stream as well, and so are all before it.
        let made = self.ring.epoch_of(last);
        let own = epoch == self.view.epoch || made.is_some_and(|made| made <= epoch);
        let own = own || planted(Bug::SinceOfOthers);
        let far = self.ring.last().0.checked_sub(published.0)? >= FAR;
        if !own || far || published.0 == 0 || published > last || last > self.ring.last() {
            return None;
        }
        Some(Since { position: published, transaction: self.member.history.before(published)? })
    }

    /// What is to be said of the volume here before a snapshot comes. None: nothing will be that is of use.
    pub(super) fn claim(&self) -> Option<Claim> {
        let incoming = self.member.incoming.as_ref()?;
        if self.env.config.limits.history == 0 || self.volume.sums_base().is_none() {
            return None;
        }
        let epoch = incoming.whole.max(self.ring.last_epoch());
        let known = !incoming.emptied && self.member.published.0 > 0 && epoch.0 > 0;
        let (published, last) = (self.member.published, self.ring.last());
        Some(if known { Claim { published, last, epoch } } else { Claim::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_before_a_position_is_found_however_many_there_were() {
        let mut history = History::default();
        assert_eq!(history.before(StreamSeq(9)), None);
        for n in 1..=5000 {
            history.note(StreamSeq(10 * n), n, 64);
        }
        assert!(history.published.len() <= 64);
        let all: Vec<_> = history.published.iter().copied().collect();
        assert!(all.is_sorted());
        for seq in 1..=50_010 {
            let found = history.before(StreamSeq(seq));
            let last = all.iter().rev().find(|(at, _)| at.0 < seq).map(|(_, n)| *n);
            assert_eq!(found, last, "before {seq}");
        }
        for seq in 1..=50_000 {
            let found = history.with(StreamSeq(seq));
            assert_eq!(found, all.iter().find(|(at, _)| at.0 >= seq).map(|(_, n)| *n), "{seq}");
        }
        assert_eq!(history.with(StreamSeq(50_001)), None);
        // What is published now is there, and something from long ago.
        assert_eq!(history.before(StreamSeq(50_001)), Some(5000));
        assert!(history.before(StreamSeq(25_000)).is_some());
        // The same position again: what came later has no less.
        history.note(StreamSeq(50_000), 5001, 64);
        assert_eq!(history.before(StreamSeq(50_001)), Some(5001));
        history.note(StreamSeq(50_010), 5002, 0);
        assert_eq!(history.before(StreamSeq(60_000)), None);
    }
}
