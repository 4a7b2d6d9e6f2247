//! What a guest has locked, as a [`Ledger`] must know it so that another server can go on with it.
//!
//! It is written down before the file system is asked, and crossed out after that: nothing is locked that is not in the ledger, whenever
//! the server is killed. What is there and is not locked does no harm: the request was not answered, and comes again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::{ClientId, Errno, InodeId};
use client::fs::{FileLocks, Lock, LockKind, LockSpace, Result};

use super::locks::Owner;
use super::server::{Ledger, Locked};

/// Requests of one owner are asked one after the other, so that what is written down is what was done last.
const ORDERS: usize = 16;
/// There is only this guest.
const OWN: ClientId = ClientId(0);

/// What an owner has locked of a file.
#[derive(Default)]
struct Owned {
    ranges: FileLocks,
    /// The open file through which it has locked last.
    fh: u64,
}

impl Owned {
    fn put(&mut self, fh: u64, lock: Lock) {
        // The file system has counted it.
        let _ = self.ranges.put(OWN, lock, usize::MAX);
        self.fh = fh;
    }

    fn all(&self) -> Vec<Lock> {
        self.ranges.iter().map(|held| held.lock).collect()
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct LockBook {
    owners: Mutex<BTreeMap<Owner, Owned>>,
    orders: [Mutex<()>; ORDERS],
}

impl LockBook {
    fn owners(&self) -> MutexGuard<'_, BTreeMap<Owner, Owned>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, (ino, _, owner): Owner) -> MutexGuard<'_, ()> {
        let order = &self.orders[(ino.0 ^ owner) as usize % ORDERS];
        order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a lock, or gives one back, by `ask`.
    pub(super) fn lock(
        &self,
        ledger: &dyn Ledger,
        (owner, fh): (Owner, u64),
        lock: Lock,
        ask: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _order = self.order(owner);
        let mut owned = self.owners().remove(&owner).unwrap_or_default();
        if lock.kind != LockKind::None {
            let wanted = [owned.all(), vec![lock]].concat();
            if !ledger.locked(owner, fh, &wanted) {
                self.keep(owner, owned);
                return Err(Errno::NOLCK);
            }
        }
        let done = ask();
        match done {
            Ok(()) => owned.put(fh, lock),
            // A change of mode gives the old one up first, and who is interrupted has nothing.
            Err(Errno::INTR) => owned.put(fh, Lock { kind: LockKind::None, ..lock }),
            Err(Errno::AGAIN) if lock.space == LockSpace::Flock => {
                owned.put(fh, Lock { kind: LockKind::None, ..lock });
            }
            Err(_) => {}
        }
        // Of less there is always room.
        ledger.locked(owner, if owned.fh == 0 { fh } else { owned.fh }, &owned.all());
        self.keep(owner, owned);
        done
    }

    /// What another server had written down is asked for again; how many of it are lost.
    pub(super) fn resume(
        &self,
        ledger: &dyn Ledger,
        (owner, fh): (Owner, u64),
        locks: &[Lock],
        ask: impl Fn(&Lock) -> Result<()>,
    ) -> usize {
        let _order = self.order(owner);
        let mut owned = Owned::default();
        let lost = locks.iter().filter(|lock| match ask(lock) {
            Ok(()) => {
                owned.put(fh, **lock);
                false
            }
            Err(error) => {
                log::warn!("a lock on inode {}: {error}", owner.0);
                true
            }
        });
        let lost = lost.count();
        ledger.locked(owner, fh, &owned.all());
        self.keep(owner, owned);
        lost
    }

    /// All that is locked.
    pub(super) fn all(&self) -> Vec<Locked> {
        let owners = self.owners();
        let of = |(owner, owned): (&Owner, &Owned)| {
            let (ino, fh) = (owner.0, owned.fh);
            owned.all().into_iter().map(move |lock| Locked { ino, fh, lock })
        };
        owners.iter().flat_map(of).collect()
    }

    /// Asks once more for all of it, by `ask`; how many locks are lost.
    pub(super) fn retake(
        &self,
        ledger: &dyn Ledger,
        ask: impl Fn(InodeId, &Lock) -> Result<()>,
    ) -> usize {
        let owners: Vec<Owner> = self.owners().keys().copied().collect();
        let retake = |owner: Owner| {
            let Some(owned) = self.owners().remove(&owner) else { return 0 };
            self.resume(ledger, (owner, owned.fh), &owned.all(), |lock| ask(owner.0, lock))
        };
        owners.into_iter().map(retake).sum()
    }

    fn keep(&self, owner: Owner, owned: Owned) {
        if !owned.ranges.is_empty() {
            self.owners().insert(owner, owned);
        }
    }

    /// All of it is over, and the ledger knows that.
    pub(super) fn clear(&self) {
        self.owners().clear();
    }
}
