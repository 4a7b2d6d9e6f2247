//! The head's table of file locks: who holds what, who waits, and who would wait for ever.
//!
//! A waiter is a note, not a queue: whoever is told that a lock may be free asks again, and may find
//! that somebody was faster (as on a local Linux file system). Those told are the first that would
//! all get what they want. A waiter that is not heard of again is forgotten: its client tells every
//! `LOCK_POLL_MS` that it still waits.
//!
//! Always true: no two locks of different owners bar each other; a client holds at most
//! `LOCKS_MAX` ranges and waits for at most `LOCK_WAITS_MAX`.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Nanos};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::LOCK_POLL_MS;
use storage::limits::{LOCK_WAITS_MAX, LOCKS_MAX};
use storage::locks::{FileLocks, Full, Held};

/// A waiter not heard of for so long does not wait any more.
const WAITER_LIFE: Nanos = 4 * LOCK_POLL_MS * 1_000_000;

/// Who wants a lock, and which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The client.
    pub client: ClientId,
    /// The file.
    pub ino: InodeId,
    /// The lock, or the unlock.
    pub lock: Lock,
    /// Not 0: the client waits under this number if it cannot have it.
    pub wait: u64,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    wish: Wish,
    /// When it was heard of last.
    seen: Nanos,
}

/// What a client has.
#[derive(Debug, Default)]
struct Account {
    files: BTreeSet<InodeId>,
    ranges: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub struct LockTable {
    files: BTreeMap<InodeId, FileLocks>,
    accounts: BTreeMap<ClientId, Account>,
    /// In the order of their first wish.
    waiters: Vec<Waiter>,
}

impl LockTable {
    /// Locks or unlocks. `told` gets the clients of waiters that this makes hopeful.
    pub fn set(
        &mut self,
        now: Nanos,
        wish: Wish,
        told: &mut BTreeSet<ClientId>,
    ) -> Result<(), Errno> {
        let Wish { client, ino, lock, wait } = wish;
        if self.is_barred(&wish) {
            if lock.space == LockSpace::Flock {
                // flock changes its mode by giving the old one up first, so that two who both want
                // more do not block each other.
                let old = Lock { kind: LockKind::None, ..lock };
                let _ = self.put(client, ino, old);
                self.tell(now, ino, told);
            }
            if wait == 0 {
                return Err(Errno::AGAIN);
            }
            return Err(self.wait(now, wish));
        }
        if planted(Bug::DowngradeIgnored) && lock.kind == LockKind::Read && self.has_written(&wish)
        {
            return Ok(());
        }
        self.put(client, ino, lock).map_err(|Full| Errno::NOLCK)?;
        self.waiters.retain(|w| !(wait != 0 && w.is(client, wait)));
        // Also what was granted may free something: a write lock that became a read lock.
        self.tell(now, ino, told);
        Ok(())
    }

    /// A lock that bars this one.
    pub fn test(&self, client: ClientId, ino: InodeId, lock: Lock) -> Option<Held> {
        self.files.get(&ino)?.barring(client, lock).next().copied()
    }

    /// A client no longer waits.
    pub fn cancel(
        &mut self,
        now: Nanos,
        client: ClientId,
        wait: u64,
        told: &mut BTreeSet<ClientId>,
    ) {
        let Some(at) = self.waiters.iter().position(|w| w.is(client, wait)) else { return };
        let ino = self.waiters.remove(at).wish.ino;
        // It may have been told of a lock that it now leaves to others.
        self.tell(now, ino, told);
    }

    /// A client ended, or says anew what it holds: all that is known of it is void.
    pub fn gone(&mut self, now: Nanos, client: ClientId, told: &mut BTreeSet<ClientId>) {
        self.waiters.retain(|w| w.wish.client != client);
        for ino in self.accounts.remove(&client).unwrap_or_default().files {
            if let Some(file) = self.files.get_mut(&ino) {
                file.drop_client(client);
                if file.is_empty() {
                    self.files.remove(&ino);
                }
            }
            self.tell(now, ino, told);
        }
        told.remove(&client);
    }

    /// A lock that an agent says its client holds. `false` when that cannot be: somebody else has
    /// it, or there are too many.
    pub fn adopt(&mut self, client: ClientId, ino: InodeId, lock: Lock) -> bool {
        let wish = Wish { client, ino, lock, wait: 0 };
        !self.is_barred(&wish) && self.put(client, ino, lock).is_ok()
    }

    /// Ranges held, for status.
    pub fn len(&self) -> usize {
        self.accounts.values().map(|a| a.ranges).sum()
    }

    /// Whether nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether the owner has a lock to write there.
    fn has_written(&self, wish: &Wish) -> bool {
        let Wish { client, ino, lock, .. } = wish;
        let own = |held: &Held| {
            (held.client, held.lock.owner, held.lock.space) == (*client, lock.owner, lock.space)
                && held.lock.kind == LockKind::Write
                && held.lock.overlaps(lock)
        };
        self.files.get(ino).is_some_and(|file| file.iter().any(own))
    }

    fn is_barred(&self, wish: &Wish) -> bool {
        let file = self.files.get(&wish.ino);
        file.is_some_and(|f| f.barring(wish.client, wish.lock).next().is_some())
    }

    fn put(&mut self, client: ClientId, ino: InodeId, lock: Lock) -> Result<(), Full> {
        if lock.kind == LockKind::None && !self.files.contains_key(&ino) {
            return Ok(());
        }
        let account = self.accounts.entry(client).or_default();
        let file = self.files.entry(ino).or_default();
        let room = LOCKS_MAX.saturating_sub(account.ranges);
        let put = file.put(client, lock, room);
        if let Ok(change) = put {
            account.ranges = account.ranges.saturating_add_signed(change);
        }
        if file.iter().any(|h| h.client == client) {
            account.files.insert(ino);
        } else {
            account.files.remove(&ino);
        }
        if file.is_empty() {
            self.files.remove(&ino);
        }
        if account.files.is_empty() {
            self.accounts.remove(&client);
        }
        put.map(|_| ())
    }

    /// Notes a waiter down; says what to answer.
    fn wait(&mut self, now: Nanos, wish: Wish) -> Errno {
        self.waiters.retain(|w| w.lives(now));
        if wish.lock.space == LockSpace::Record && self.is_deadlock(&wish) {
            self.waiters.retain(|w| !w.is(wish.client, wish.wait));
            return Errno::DEADLK;
        }
        if let Some(known) = self.waiters.iter_mut().find(|w| w.is(wish.client, wish.wait)) {
            *known = Waiter { wish, seen: now };
            return Errno::AGAIN;
        }
        let waits = self.waiters.iter().filter(|w| w.wish.client == wish.client).count();
        if waits >= LOCK_WAITS_MAX {
            return Errno::NOLCK;
        }
        self.waiters.push(Waiter { wish, seen: now });
        Errno::AGAIN
    }

    /// Whether somebody for whom this owner would wait waits for this owner.
    fn is_deadlock(&self, wish: &Wish) -> bool {
        let me = (wish.client, wish.lock.owner);
        let mut seen = BTreeSet::new();
        let mut next = self.barring_owners(wish);
        while let Some(owner) = next.pop() {
            if owner == me {
                return true;
            }
            if !seen.insert(owner) {
                continue;
            }
            for waiter in &self.waiters {
                let w = &waiter.wish;
                if (w.client, w.lock.owner) == owner && w.lock.space == LockSpace::Record {
                    next.extend(self.barring_owners(w));
                }
            }
        }
        false
    }

    fn barring_owners(&self, wish: &Wish) -> Vec<(ClientId, u64)> {
        let Some(file) = self.files.get(&wish.ino) else { return Vec::new() };
        let mut owners: Vec<_> =
            file.barring(wish.client, wish.lock).map(|h| (h.client, h.lock.owner)).collect();
        owners.dedup();
        owners
    }

    /// Finds the first waiters of a file that could all have what they want now.
    fn tell(&mut self, now: Nanos, ino: InodeId, told: &mut BTreeSet<ClientId>) {
        if self.waiters.is_empty() {
            return;
        }
        self.waiters.retain(|w| w.lives(now));
        let mut ahead: Vec<Held> = Vec::new();
        for waiter in self.waiters.iter().filter(|w| w.wish.ino == ino) {
            let Wish { client, lock, .. } = waiter.wish;
            if self.is_barred(&waiter.wish) || ahead.iter().any(|h| h.bars(client, &lock)) {
                continue;
            }
            ahead.push(Held { client, lock });
            told.insert(client);
        }
    }

    /// Panics when an invariant of the module does not hold.
    pub fn assert_invariants(&self) {
        for (ino, file) in &self.files {
            assert!(!file.is_empty(), "{ino} is kept for nothing");
            file.assert_invariants();
            for held in file.iter() {
                assert!(
                    file.barring(held.client, held.lock).next().is_none(),
                    "{ino}: {held:?} is barred by another"
                );
                assert!(self.accounts[&held.client].files.contains(ino), "{ino} is unindexed");
            }
        }
        for (client, account) in &self.accounts {
            let held = account.files.iter().flat_map(|ino| self.files[ino].iter());
            let ranges = held.filter(|h| h.client == *client).count();
            assert_eq!(ranges, account.ranges, "{client:?} is miscounted");
            assert!(ranges <= LOCKS_MAX);
        }
    }
}

impl Waiter {
    fn is(&self, client: ClientId, wait: u64) -> bool {
        self.wish.client == client && self.wish.wait == wait
    }

    fn lives(&self, now: Nanos) -> bool {
        now < self.seen.saturating_add(WAITER_LIFE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;
    use storage::format::lock::LOCK_END;

    const FILE: InodeId = InodeId(7);

    fn record(client: u64, kind: LockKind, start: u64, end: u64, wait: u64) -> Wish {
        let space = LockSpace::Record;
        let lock = Lock { space, kind, owner: client * 10, pid: 1, start, end };
        Wish { client: ClientId(client), ino: FILE, lock, wait }
    }

    fn flock(client: u64, kind: LockKind, wait: u64) -> Wish {
        let lock = Lock { kind, ..Lock::all_of(LockSpace::Flock, client * 10) };
        Wish { client: ClientId(client), ino: FILE, lock, wait }
    }

    #[derive(Default)]
    struct World {
        table: LockTable,
        told: BTreeSet<ClientId>,
        now: Nanos,
    }

    impl World {
        fn set(&mut self, wish: Wish) -> Result<(), Errno> {
            self.told.clear();
            let done = self.table.set(self.now, wish, &mut self.told);
            self.table.assert_invariants();
            done
        }

        fn told(&self) -> Vec<u64> {
            self.told.iter().map(|c| c.0).collect()
        }
    }

    use LockKind::{None as Un, Read, Write};

    #[test]
    fn waiters_are_told_when_they_can_all_have_it() {
        let mut w = World::default();
        w.set(record(1, Write, 0, 9, 0)).unwrap();
        assert_eq!(w.set(record(2, Read, 0, 4, 1)), Err(Errno::AGAIN));
        assert_eq!(w.set(record(3, Read, 3, 9, 1)), Err(Errno::AGAIN));
        assert_eq!(w.set(record(4, Write, 4, 4, 1)), Err(Errno::AGAIN));
        assert_eq!(w.set(record(5, Write, 20, 29, 0)), Ok(()), "elsewhere");
        assert!(w.told().is_empty());
        w.set(record(1, Un, 0, 9, 0)).unwrap();
        assert_eq!(w.told(), [2, 3], "the writer comes after the readers that were first");
        w.set(record(3, Read, 3, 9, 1)).unwrap();
        w.set(record(2, Read, 0, 4, 1)).unwrap();
        w.set(record(2, Un, 0, LOCK_END, 0)).unwrap();
        assert!(w.told().is_empty(), "3 still reads");
        w.set(record(3, Un, 0, LOCK_END, 0)).unwrap();
        assert_eq!(w.told(), [4]);
        w.set(record(4, Write, 4, 4, 1)).unwrap();
        let held = w.table.test(ClientId(2), FILE, record(2, Read, 0, 9, 0).lock).unwrap();
        assert_eq!((held.client, held.lock.start, held.lock.end), (ClientId(4), 4, 4));
    }

    #[test]
    fn a_downgrade_and_an_end_free_waiters() {
        let mut w = World::default();
        w.set(record(1, Write, 0, LOCK_END, 0)).unwrap();
        assert_eq!(w.set(record(2, Read, 5, 5, 1)), Err(Errno::AGAIN));
        w.set(record(1, Read, 0, LOCK_END, 0)).unwrap();
        assert_eq!(w.told(), [2]);
        w.set(record(2, Read, 5, 5, 1)).unwrap();
        assert_eq!(w.set(record(3, Write, 5, 5, 1)), Err(Errno::AGAIN));
        let mut told = BTreeSet::new();
        w.table.gone(0, ClientId(1), &mut told);
        assert!(told.is_empty(), "2 still reads");
        w.table.gone(0, ClientId(2), &mut told);
        assert_eq!(told, BTreeSet::from([ClientId(3)]));
        w.set(record(3, Write, 5, 5, 1)).unwrap();
        w.table.gone(0, ClientId(3), &mut told);
        assert!(w.table.is_empty() && w.table.waiters.is_empty());
    }

    #[test]
    fn deadlocks_of_any_length_are_refused() {
        for length in 2..6 {
            let mut w = World::default();
            for n in 1..=length {
                w.set(record(n, Write, n, n, 0)).unwrap();
            }
            for n in 1..length {
                assert_eq!(w.set(record(n, Write, n + 1, n + 1, 1)), Err(Errno::AGAIN));
            }
            assert_eq!(w.set(record(length, Write, 1, 1, 0)), Err(Errno::AGAIN), "not waiting");
            assert_eq!(w.set(record(length, Write, 1, 1, 1)), Err(Errno::DEADLK));
            // The one refused gives up what it has: the others get on.
            w.set(record(length, Un, 0, LOCK_END, 0)).unwrap();
            assert_eq!(w.told(), [length - 1]);
        }
    }

    #[test]
    fn a_waiter_that_is_not_heard_of_is_no_part_of_a_deadlock() {
        let mut w = World::default();
        w.set(record(1, Write, 1, 1, 0)).unwrap();
        w.set(record(2, Write, 2, 2, 0)).unwrap();
        assert_eq!(w.set(record(1, Write, 2, 2, 1)), Err(Errno::AGAIN));
        w.now = WAITER_LIFE;
        assert_eq!(w.set(record(2, Write, 1, 1, 1)), Err(Errno::AGAIN));
        let mut told = BTreeSet::new();
        w.table.cancel(w.now, ClientId(2), 1, &mut told);
        assert!(w.table.waiters.is_empty());
    }

    #[test]
    fn flock_gives_its_old_mode_up_before_it_waits() {
        let mut w = World::default();
        w.set(flock(1, Read, 0)).unwrap();
        w.set(flock(2, Read, 0)).unwrap();
        assert_eq!(w.set(flock(1, Write, 1)), Err(Errno::AGAIN));
        assert_eq!(w.set(flock(2, Write, 0)), Ok(()), "1 has given its read lock up");
        assert_eq!(w.set(flock(1, Write, 1)), Err(Errno::AGAIN), "and waits");
        w.set(flock(2, Un, 0)).unwrap();
        assert_eq!(w.told(), [1]);
        assert_eq!(w.set(flock(1, Write, 1)), Ok(()));
    }

    #[test]
    fn bounds_hold() {
        // Without the invariants: to check them takes quadratic time.
        let mut table = LockTable::default();
        let mut set = |wish| table.set(0, wish, &mut BTreeSet::new());
        for n in 0..LOCKS_MAX as u64 {
            let wish = record(1, Write, 2 * n, 2 * n, 0);
            set(wish).unwrap();
        }
        let more = record(1, Write, 1 << 40, 1 << 40, 0);
        assert_eq!(set(more), Err(Errno::NOLCK));
        assert_eq!(set(record(2, Write, 1 << 40, 1 << 40, 0)), Ok(()), "others may");
        let other = |client, wait| Wish { ino: InodeId(8), ..record(client, Write, 0, 0, wait) };
        set(other(3, 0)).unwrap();
        for n in 0..LOCK_WAITS_MAX as u64 {
            assert_eq!(set(other(2, n + 1)), Err(Errno::AGAIN));
        }
        assert_eq!(set(other(2, u64::MAX)), Err(Errno::NOLCK));
        assert_eq!(set(other(2, 1)), Err(Errno::AGAIN), "known already");
    }

    /// Clients that lock, wait, give up and end at random: nobody is left waiting for what is free.
    #[test]
    fn random_histories_keep_the_invariants_and_tell_everybody() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut w = World::default();
            let mut waiting: BTreeMap<u64, Wish> = BTreeMap::new();
            for _ in 0..150 {
                let client = 1 + random.below(4);
                let (a, b) = (random.below(12), random.below(12));
                let kind = [Un, Read, Write][random.below(3) as usize];
                w.told.clear();
                if random.chance(1, 20) {
                    w.table.gone(0, ClientId(client), &mut w.told);
                    waiting.remove(&client);
                } else if let Some(wish) = waiting.get(&client) {
                    if random.chance(1, 4) {
                        w.table.cancel(0, wish.client, wish.wait, &mut w.told);
                        waiting.remove(&client);
                    }
                } else if random.chance(1, 5) {
                    let _ = w.table.set(0, flock(client, kind, 0), &mut w.told);
                } else {
                    let wish = record(client, kind, a.min(b), a.max(b), 1);
                    let done = w.table.set(0, wish, &mut w.told);
                    if done == Err(Errno::AGAIN) {
                        waiting.insert(client, wish);
                    }
                }
                w.table.assert_invariants();
                // Those told ask again until nobody is told any more.
                while let Some(client) = w.told.pop_first() {
                    let Some(wish) = waiting.get(&client.0) else { continue };
                    if w.table.set(0, *wish, &mut w.told) != Err(Errno::AGAIN) {
                        waiting.remove(&client.0);
                    }
                }
                for wish in waiting.values() {
                    assert!(w.table.is_barred(wish), "seed {seed}: {wish:?} waits for nothing");
                }
            }
            assert!(waiting.len() < 4, "seed {seed}: everybody waits");
        }
    }
}
