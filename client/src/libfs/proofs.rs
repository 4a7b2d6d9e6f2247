//! Proofs of the inodes that this process was shown ([`storage::format::proof`]): needed to ask about one
//! by its number when no lease is held any more. The super-user gets none and needs none.

use core::sync::atomic::{AtomicBool, Ordering};

use base::InodeId;
use storage::format::proof::Proof;

use super::host::Host;
use super::inode::Map;
use super::sync::RwLock;

/// See the module.
#[derive(Debug)]
pub struct Proofs<H: Host> {
    /// Above it, some are forgotten: a name is then looked up again.
    most: usize,
    /// The service gives proofs to this process.
    given: AtomicBool,
    /// Some are known.
    some: AtomicBool,
    known: RwLock<Map<u64, u64>, H>,
}

/// A call needs several at once: with fewer it would forget one for another, and go on for ever.
const PROOFS_MIN: usize = 64;

impl<H: Host> Proofs<H> {
    /// None yet, and never more than so many.
    pub fn new(most: usize) -> Self {
        let (given, some) = Default::default();
        Self { most: most.max(PROOFS_MIN), given, some, known: RwLock::default() }
    }

    /// Remembers what the service gave, if there is something to remember.
    pub fn put(&self, ino: InodeId, proof: Proof) {
        if proof != Proof::NONE {
            self.given.store(true, Ordering::Relaxed);
            self.vouch(ino, proof);
        }
    }

    /// Remembers what another process was given. This one may be the super-user's, who gets none.
    pub fn vouch(&self, ino: InodeId, proof: Proof) {
        if proof == Proof::NONE || self.known.read().get(&ino.0) == Some(&proof.0) {
            return;
        }
        self.some.store(true, Ordering::Relaxed);
        let mut known = self.known.write();
        if known.len() >= self.most {
            // Any eighth will do: what is open or leased needs none.
            let mut left = self.most / 8;
            known.retain(|_, _| {
                left = left.saturating_sub(1);
                left == 0
            });
        }
        known.insert(ino.0, proof.0);
    }

    /// The proof of an inode.
    pub fn get(&self, ino: InodeId) -> Proof {
        if !self.some.load(Ordering::Relaxed) {
            return Proof::NONE;
        }
        self.known.read().get(&ino.0).map_or(Proof::NONE, |proof| Proof(*proof))
    }

    /// Whether the service will answer about the inode, as far as its proof goes.
    pub fn covers(&self, ino: InodeId) -> bool {
        !self.given.load(Ordering::Relaxed) || self.known.read().contains_key(&ino.0)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use crate::libfs::linux::Linux;

    #[test]
    fn one_that_is_vouched_for_does_not_mean_that_others_are_needed() {
        let proofs = Proofs::<Linux>::new(1000);
        proofs.vouch(InodeId(7), Proof(70));
        assert_eq!(proofs.get(InodeId(7)), Proof(70));
        assert!(proofs.covers(InodeId(8)), "the super-user needs none");
        proofs.put(InodeId(9), Proof(90));
        assert!(!proofs.covers(InodeId(8)) && proofs.covers(InodeId(7)));
    }

    #[test]
    fn without_proofs_everything_may_be_asked_and_with_some_only_what_they_cover() {
        let proofs = Proofs::<Linux>::new(1000);
        proofs.put(InodeId(5), Proof::NONE);
        assert!(proofs.covers(InodeId(5)) && proofs.covers(InodeId(6)));
        proofs.put(InodeId(5), Proof(9));
        assert_eq!((proofs.get(InodeId(5)), proofs.get(InodeId(6))), (Proof(9), Proof::NONE));
        assert!(proofs.covers(InodeId(5)) && !proofs.covers(InodeId(6)));
    }

    #[test]
    fn never_more_than_the_bound() {
        let proofs = Proofs::<Linux>::new(1000);
        for n in 0..1010 {
            proofs.put(InodeId(n), Proof(n + 1));
        }
        assert!(proofs.known.read().len() <= 1000);
        assert!(proofs.covers(InodeId(1009)));
    }
}
