//! Proofs of the inodes that this process was shown ([`storage::format::proof`]): needed to ask about one
//! by its number when no lease is held any more. The super-user gets none and needs none.

use core::sync::atomic::{AtomicBool, Ordering};

use base::InodeId;
use storage::format::proof::Proof;

use super::inode::Map;
use super::sync::RwLock;

/// Proofs remembered (16 bytes each, and a little); above it, some are forgotten: a name is then looked up again.
const PROOFS_MAX: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub struct Proofs {
    /// The service gives proofs to this process.
    given: AtomicBool,
    /// Some are known.
    some: AtomicBool,
    known: RwLock<Map<u64, u64>>,
}

impl Proofs {
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
        if known.len() >= PROOFS_MAX {
            // Any eighth will do: what is open or leased needs none.
            let mut left = PROOFS_MAX / 8;
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

    #[test]
    fn one_that_is_vouched_for_does_not_mean_that_others_are_needed() {
        let proofs = Proofs::default();
        proofs.vouch(InodeId(7), Proof(70));
        assert_eq!(proofs.get(InodeId(7)), Proof(70));
        assert!(proofs.covers(InodeId(8)), "the super-user needs none");
        proofs.put(InodeId(9), Proof(90));
        assert!(!proofs.covers(InodeId(8)) && proofs.covers(InodeId(7)));
    }

    #[test]
    fn without_proofs_everything_may_be_asked_and_with_some_only_what_they_cover() {
        let proofs = Proofs::default();
        proofs.put(InodeId(5), Proof::NONE);
        assert!(proofs.covers(InodeId(5)) && proofs.covers(InodeId(6)));
        proofs.put(InodeId(5), Proof(9));
        assert_eq!((proofs.get(InodeId(5)), proofs.get(InodeId(6))), (Proof(9), Proof::NONE));
        assert!(proofs.covers(InodeId(5)) && !proofs.covers(InodeId(6)));
    }

    #[test]
    fn never_more_than_the_bound() {
        let proofs = Proofs::default();
        for n in 0..PROOFS_MAX as u64 + 10 {
            proofs.put(InodeId(n), Proof(n + 1));
        }
        assert!(proofs.known.read().len() <= PROOFS_MAX);
        assert!(proofs.covers(InodeId(PROOFS_MAX as u64 + 9)));
    }
}
