//! Who is done with a lease when it has used it once: whoever takes turns with others in a file writes, and then waits for
//! them. A lease that is wanted back is looked at twice, a little apart, before that is believed ([`recall`](super::recall)); where it was so
//! time after time the second look is spared, which is most of what a turn takes. Now and then it is taken all the same, and who asks
//! anew for what has just been taken from it was not done.

use std::collections::BTreeMap;

use base::{ClientId, InodeId, Nanos};

/// Inodes of which this is known, at most.
const KNOWN_MAX: usize = 256;
/// After so many looks that found it at rest the next is spared.
const SURE: u8 = 3;
/// So many are spared before one is taken again.
const SPARED_MAX: u8 = 15;

/// What is known of an inode.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    /// Looks one after the other that found its holder at rest.
    found: u8,
    /// Looks that were spared since.
    spared: u8,
    /// From whom it was taken last without one, and when.
    taken: Option<(ClientId, Nanos)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Rests {
    known: BTreeMap<InodeId, Rest>,
}

impl Rests {
    /// Whether the holder of a lease on the inode, which has used it and is inside no operation, is taken for done.
    pub fn spares(&mut self, ino: InodeId, holder: ClientId, now: Nanos) -> bool {
        let Some(rest) = self.known.get_mut(&ino).filter(|rest| rest.found >= SURE) else {
            return false;
        };
        if rest.spared >= SPARED_MAX {
            rest.spared = 0;
            return false;
        }
        rest.spared += 1;
        rest.taken = Some((holder, now));
        true
    }

    /// Whether a look may be spared there.
    pub fn knows(&self, ino: InodeId) -> bool {
        self.known.get(&ino).is_some_and(|rest| rest.found >= SURE)
    }

    /// What a second look has found.
    pub fn found(&mut self, ino: InodeId, at_rest: bool) {
        if !at_rest {
            self.known.remove(&ino);
            return;
        }
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&ino) {
            self.known.clear();
        }
        let rest = self.known.entry(ino).or_default();
        rest.found = rest.found.saturating_add(1);
    }

    /// A client asks for a lease. If it was taken from it so short a time ago, it was not done.
    pub fn asks(&mut self, ino: InodeId, client: ClientId, now: Nanos, short: Nanos) {
        let taken = self.known.get(&ino).and_then(|rest| rest.taken);
        if taken.is_some_and(|(from, at)| from == client && now < at + short) {
            self.known.remove(&ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: InodeId = InodeId(7);
    const A: ClientId = ClientId(1);

    #[test]
    fn looks_are_spared_where_they_found_the_same_time_after_time() {
        let mut rests = Rests::default();
        for _ in 0..SURE {
            assert!(!rests.spares(INO, A, 0), "nothing is believed too early");
            rests.found(INO, true);
        }
        for _ in 0..3 {
            let spared = (0..SPARED_MAX).filter(|_| rests.spares(INO, A, 0)).count();
            assert_eq!(spared, usize::from(SPARED_MAX));
            assert!(!rests.spares(INO, A, 0), "it is looked at again now and then");
        }
        rests.found(INO, false);
        assert!(!rests.spares(INO, A, 0), "its holder was busy");
    }

    #[test]
    fn who_asks_at_once_for_what_was_taken_from_it_was_not_done() {
        let known = || {
            let mut rests = Rests::default();
            (0..SURE).for_each(|_| rests.found(INO, true));
            assert!(rests.spares(INO, A, 100));
            rests
        };
        for (client, at, still) in [(A, 119, false), (A, 120, true), (ClientId(2), 101, true)] {
            let mut rests = known();
            rests.asks(INO, client, at, 20);
            assert_eq!(rests.spares(INO, A, 200), still, "{client:?} at {at}");
        }
    }

    #[test]
    fn it_has_an_end_how_much_is_known() {
        let mut rests = Rests::default();
        for ino in 0..3 * KNOWN_MAX as u64 {
            rests.found(InodeId(ino), true);
            assert!(rests.known.len() <= KNOWN_MAX);
        }
    }
}
