//! The head's table of file locks: who holds what, who waits, and who would wait for ever.
//!
//! A waiter is a note, not a queue: whoever is told that a lock may be free asks again, and may find
//! that somebody was faster (as on a local Linux file system). Those told are the first that would
//! all get what they want. A waiter that is not heard of again is forgotten: its client tells every
//! `LOCK_POLL_MS` that it still waits.
//!
//! A lock whose owner may just be gone ([`LockTable::leaving`]) bars others for a moment as if it were not decided yet: who
//! will not wait is answered when it is free, or when that moment is over.
//!
//! Of a file that one client alone uses it may be left to that client who of its owners has which lock: its *sole use*
//! (`storage::format::sole`). While that is so, what the table says of the client's locks on the file is what it had before.
//!
//! Always true: no two locks of different owners bar each other; a client holds at most
//! `LOCKS_MAX` ranges and waits for at most `LOCK_WAITS_MAX`; nobody else has a lock where a client has the sole use, and there
//! is room for all that it may have locked there.

use std::collections::{BTreeMap, BTreeSet};

use base::always;
use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Nanos};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::LOCK_POLL_MS;
use storage::format::sole::SOLE_LOCKS;
use storage::limits::{LOCK_WAITS_MAX, LOCKS_MAX};
use storage::locks::{FileLocks, Full, Held};

/// A waiter not heard of for so long does not wait any more.
const WAITER_LIFE: Nanos = 4 * LOCK_POLL_MS * 1_000_000;
/// Who has closed a file for the last time gives its locks up within that time, however busy the machine.
const LEAVING: Nanos = 250_000_000;

/// Locks that are looked at for one question: of all that wait for each other there may be millions. Who is in a larger deadlock
/// waits (Linux looks at ten owners), and who is not told that a lock is free asks again by himself.
const LOOKS: usize = 1 << 15;

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
    /// Files of whose locks it has the sole use: each may come back with as many as it can keep.
    soles: usize,
}

/// Who has the sole use of a file's locks.
#[derive(Clone, Copy, Debug)]
struct Sole {
    client: ClientId,
    /// Tells this grant from others.
    token: u64,
}

impl Account {
    fn is_empty(&self) -> bool {
        self.files.is_empty() && self.soles == 0
    }

    /// Ranges that it may have beside those that it has.
    const fn room(&self) -> usize {
        LOCKS_MAX.saturating_sub(self.ranges + self.soles * SOLE_LOCKS)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct LockTable {
    files: BTreeMap<InodeId, FileLocks>,
    accounts: BTreeMap<ClientId, Account>,
    /// Files whose locks are one client's alone.
    soles: BTreeMap<InodeId, Sole>,
    /// In the order of their first wish.
    waiters: Vec<Waiter>,
    /// Clients that have closed a file on which they have locks, perhaps for the last time: until when they may say so.
    leaving: BTreeMap<(InodeId, ClientId), Nanos>,
}

impl LockTable {
    /// A client has closed a descriptor of a file through which somebody has locked it. If it was the last one of its open
    /// file, that one's locks are about to be given up, as FUSE tells of that after `close` has returned.
    pub fn leaving(&mut self, now: Nanos, client: ClientId, ino: InodeId) {
        self.leaving.retain(|_, until| *until > now);
        let has_locks = self.accounts.get(&client).is_some_and(|a| a.files.contains(&ino));
        // What it has granted itself is not known here.
        if has_locks || self.sole(ino) == Some(client) {
            self.leaving.insert((ino, client), now + LEAVING);
        }
    }

    /// Whether a wish that is barred may be granted in a moment, as all that bar it are locks of others who may be gone;
    /// and until when that is not known.
    pub fn in_doubt(
        &self,
        now: Nanos,
        client: ClientId,
        ino: InodeId,
        lock: Lock,
    ) -> Option<Nanos> {
        if self.leaving.is_empty() {
            return None;
        }
        let mut latest = None;
        for held in self.files.get(&ino)?.barring(client, lock) {
            // Of its own locks a client knows better itself.
            let other = (held.client != client).then_some((ino, held.client))?;
            let until = self.leaving.get(&other).copied().filter(|until| *until > now)?;
            latest = latest.max(Some(until));
        }
        latest
    }

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

    /// A client ended, or says anew what it holds: all that is known of it is void. (But not of what it has the sole use:
    /// that comes back, or is given up.)
    pub fn gone(&mut self, now: Nanos, client: ClientId, told: &mut BTreeSet<ClientId>) {
        self.waiters.retain(|w| w.wish.client != client);
        let Account { files, soles, .. } = self.accounts.remove(&client).unwrap_or_default();
        if soles > 0 {
            self.accounts.insert(client, Account { soles, ..Account::default() });
        }
        let awaited: BTreeSet<InodeId> = self.waiters.iter().map(|w| w.wish.ino).collect();
        for ino in files {
            if let Some(file) = self.files.get_mut(&ino) {
                file.drop_client(client);
                if file.is_empty() {
                    self.files.remove(&ino);
                }
            }
            if awaited.contains(&ino) {
                self.tell(now, ino, told);
            }
        }
        told.remove(&client);
    }

    // --- sole use ---

    /// Who has the sole use of a file's locks.
    pub fn sole(&self, ino: InodeId) -> Option<ClientId> {
        self.soles.get(&ino).map(|sole| sole.client)
    }

    /// Leaves the locks of a file to a client, if it may be: nobody else has one, and nobody waits.
    pub fn give_sole(
        &mut self,
        now: Nanos,
        client: ClientId,
        (ino, token): (InodeId, u64),
    ) -> bool {
        let waits = |w: &Waiter| w.wish.ino == ino && w.lives(now);
        let free = self.sole(ino).is_none() && !self.waiters.iter().any(waits);
        free && self.adopt_sole(client, ino, token)
    }

    /// An agent says that its client has the sole use. `false` when that cannot be: somebody else has a lock.
    pub fn adopt_sole(&mut self, client: ClientId, ino: InodeId, token: u64) -> bool {
        let others = |h: &Held| h.client != client && !planted(Bug::SoleBesideOthers);
        let used = self.files.get(&ino).is_some_and(|file| file.iter().any(others));
        let room = self.accounts.get(&client).map_or(LOCKS_MAX, Account::room) >= SOLE_LOCKS;
        if let Some(sole) = self.soles.get_mut(&ino).filter(|sole| sole.client == client) {
            sole.token = token;
            return true;
        }
        if used || !room || self.soles.contains_key(&ino) {
            return false;
        }
        self.soles.insert(ino, Sole { client, token });
        self.accounts.entry(client).or_default().soles += 1;
        true
    }

    /// The sole use of a file's locks is no more; whether the client had it, by that token. (0: of an agent that does not know
    /// it, and has not asked for another one.)
    pub fn end_sole(&mut self, client: ClientId, ino: InodeId, token: u64) -> bool {
        let had = |sole: &&Sole| sole.client == client && (token == 0 || sole.token == token);
        if self.soles.get(&ino).filter(had).is_none() {
            return false;
        }
        self.soles.remove(&ino);
        if let Some(account) = self.accounts.get_mut(&client) {
            account.soles = account.soles.saturating_sub(1);
            if account.is_empty() {
                self.accounts.remove(&client);
            }
        }
        true
    }

    /// What a client has locked of a file is this, and nothing else: as many of them as nobody bars. `told` as in
    /// [`set`](Self::set).
    pub fn replace(
        &mut self,
        now: Nanos,
        client: ClientId,
        (ino, locks): (InodeId, &[Lock]),
        told: &mut BTreeSet<ClientId>,
    ) {
        let known = self.files.get(&ino).into_iter().flat_map(FileLocks::iter);
        let own = known.filter(|h| h.client == client).map(|h| h.lock);
        for lock in own.collect::<Vec<_>>() {
            let _ = self.put(client, ino, Lock { kind: LockKind::None, ..lock });
        }
        for lock in locks.iter().filter(|lock| lock.kind != LockKind::None) {
            if !self.adopt(client, ino, *lock) {
                log::debug!("client {:#x}: what it granted itself on {ino} cannot be", client.0);
            }
        }
        self.tell(now, ino, told);
    }

    /// A client ended: of which files it had the sole use.
    pub fn end_soles(&mut self, client: ClientId) -> Vec<InodeId> {
        if self.accounts.get(&client).is_none_or(|account| account.soles == 0) {
            return Vec::new();
        }
        let own: Vec<InodeId> = self.soles_of(client).collect();
        own.iter().for_each(|ino| {
            self.end_sole(client, *ino, 0);
        });
        own
    }

    /// Those of which it has it.
    pub fn soles_of(&self, client: ClientId) -> impl Iterator<Item = InodeId> {
        self.soles.iter().filter(move |(_, sole)| sole.client == client).map(|(ino, _)| *ino)
    }

    /// By which token somebody has it.
    pub fn sole_token(&self, ino: InodeId) -> u64 {
        self.soles.get(&ino).map_or(0, |sole| sole.token)
    }

    /// A lock that an agent says its client holds. `false` when that cannot be: somebody else has
    /// it, or there are too many.
    pub fn adopt(&mut self, client: ClientId, ino: InodeId, lock: Lock) -> bool {
        let wish = Wish { client, ino, lock, wait: 0 };
        !self.is_barred(&wish) && self.put(client, ino, lock).is_ok()
    }

    /// What a client has locked is another one's from now on: nobody gets it in between. (What the other has no room for goes with
    /// the client. Who has just begun has room for all that one may have.) One look at each file, however many ranges there are.
    /// Returns of which files the client had the sole use; `told` as in [`set`](Self::set).
    pub fn inherit(
        &mut self,
        now: Nanos,
        client: ClientId,
        heir: ClientId,
        told: &mut BTreeSet<ClientId>,
    ) -> Vec<InodeId> {
        // Of what was left to it alone the table has what was said last.
        let soles = self.end_soles(client);
        if client == heir {
            return soles;
        }
        let Some(mut from) = self.accounts.remove(&client) else { return soles };
        let awaited: BTreeSet<InodeId> = self.waiters.iter().map(|w| w.wish.ino).collect();
        let mut hopeful = Vec::new();
        let mut to = self.accounts.remove(&heir).unwrap_or_default();
        from.files.retain(|ino| {
            let Some(file) = self.files.get_mut(ino) else { return false };
            let count = file.iter().filter(|held| held.client == client).count();
            let other = self.soles.get(ino).is_some_and(|sole| sole.client != heir);
            if count > to.room() || other {
                log::debug!("client {:#x}: locks on {ino} that it cannot have", heir.0);
                return true;
            }
            from.ranges = from.ranges.saturating_sub(count);
            let change = file.rename(client, heir);
            to.ranges = (to.ranges + count).saturating_add_signed(change);
            to.files.insert(*ino);
            // The heir itself may wait for what this owner had.
            hopeful.extend(awaited.contains(ino).then_some(*ino));
            false
        });
        for (client, account) in [(client, from), (heir, to)] {
            if !account.is_empty() {
                self.accounts.insert(client, account);
            }
        }
        hopeful.into_iter().for_each(|ino| self.tell(now, ino, told));
        // Somebody may wait for the heir by now for whom it waits: asked again, it is told so.
        if self.waiters.iter().any(|waiter| waiter.wish.client == heir) {
            told.insert(heir);
        }
        soles
    }

    /// Ranges held, for status; without those of files that are left to their client, which may have given them up since.
    pub fn len(&self) -> usize {
        let all: usize = self.accounts.values().map(|a| a.ranges).sum();
        let left = self.soles.keys().filter_map(|ino| self.files.get(ino));
        all - left.map(|file| file.iter().count()).sum::<usize>()
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
        let other = self.sole(wish.ino).is_some_and(|client| client != wish.client);
        other && wish.lock.kind != LockKind::None
            || file.is_some_and(|f| f.barring(wish.client, wish.lock).next().is_some())
    }

    fn put(&mut self, client: ClientId, ino: InodeId, lock: Lock) -> Result<(), Full> {
        if lock.kind == LockKind::None && !self.files.contains_key(&ino) {
            return Ok(());
        }
        let account = self.accounts.entry(client).or_default();
        let file = self.files.entry(ino).or_default();
        let room = account.room();
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
        if account.is_empty() {
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
        let mut waits: BTreeMap<(ClientId, u64), Vec<Wish>> = BTreeMap::new();
        for w in self.waiters.iter().map(|w| w.wish).filter(|w| w.lock.space == LockSpace::Record) {
            waits.entry((w.client, w.lock.owner)).or_default().push(w);
        }
        let (mut left, mut seen, mut next) = (LOOKS, BTreeSet::new(), vec![*wish]);
        while let Some(w) = next.pop() {
            for held in self.files.get(&w.ino).into_iter().flat_map(FileLocks::iter) {
                if left == 0 {
                    return false;
                }
                left -= 1;
                let owner = (held.client, held.lock.owner);
                if !held.bars(w.client, &w.lock) {
                    continue;
                }
                if owner == me {
                    return true;
                }
                if seen.insert(owner) {
                    next.extend(waits.get(&owner).into_iter().flatten());
                }
            }
        }
        false
    }

    /// Finds the first waiters of a file that could all have what they want now.
    fn tell(&mut self, now: Nanos, ino: InodeId, told: &mut BTreeSet<ClientId>) {
        if self.waiters.is_empty() {
            return;
        }
        self.waiters.retain(|w| w.lives(now));
        let held = self.files.get(&ino).map_or(0, |file| file.iter().count());
        let (mut ahead, mut left): (Vec<Held>, _) = (Vec::new(), LOOKS);
        for waiter in self.waiters.iter().filter(|w| w.wish.ino == ino) {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(1 + held + ahead.len());
            let Wish { client, lock, .. } = waiter.wish;
            if self.is_barred(&waiter.wish) || ahead.iter().any(|h| h.bars(client, &lock)) {
                continue;
            }
            ahead.push(Held { client, lock });
            told.insert(client);
        }
    }

    /// What the module says is always true; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        for (ino, file) in &self.files {
            always!(!file.is_empty(), "{ino}: locks are kept for nothing");
            file.invariants().map_err(|e| format!("{ino}: {e}"))?;
            for held in file.iter() {
                let barred = file.barring(held.client, held.lock).next().is_some();
                always!(!barred, "{ino}: {held:?} is barred by another");
                let account = self.accounts.get(&held.client);
                let known = account.is_some_and(|account| account.files.contains(ino));
                always!(known, "{ino}: a lock that its client's end would not find");
            }
        }
        for (client, account) in &self.accounts {
            let files = account.files.iter().filter_map(|ino| self.files.get(ino));
            let ranges = files.flat_map(FileLocks::iter).filter(|h| h.client == *client).count();
            always!(ranges == account.ranges, "{client:?} has {ranges} of {}", account.ranges);
            let all = ranges + account.soles * SOLE_LOCKS;
            always!(all <= LOCKS_MAX, "{client:?} has {ranges} locks, and room for others");
            let soles = self.soles_of(*client).count();
            always!(soles == account.soles, "{client:?} has {soles} files of {}", account.soles);
        }
        for (ino, Sole { client, .. }) in &self.soles {
            let known = self.accounts.get(client).is_some_and(|account| account.soles > 0);
            always!(known, "{ino}: a sole use that its client's end would not find");
            let mut held = self.files.get(ino).into_iter().flat_map(FileLocks::iter);
            let other = held.find(|h| h.client != *client);
            always!(other.is_none(), "{ino}: {other:?} where {client:?} has the sole use");
        }
        Ok(())
    }

    /// Whose locks there are, and who waits.
    pub fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.accounts.keys().copied().chain(self.waiters.iter().map(|w| w.wish.client))
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
            assert_eq!(self.table.invariants(), Ok(()));
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

    /// The thread that judges does nothing else meanwhile.
    #[test]
    fn as_much_as_one_may_have_is_inherited_in_one_step() {
        let mut table = LockTable::default();
        for n in 0..LOCKS_MAX as u64 {
            table.set(0, record(1, Write, 2 * n, 2 * n, 0), &mut BTreeSet::new()).unwrap();
        }
        let begun = std::time::Instant::now();
        table.inherit(0, ClientId(1), ClientId(2), &mut BTreeSet::new());
        let took = begun.elapsed();
        assert!(took < std::time::Duration::from_millis(500), "it took {took:?}");
        assert_eq!(
            (table.len(), table.clients().collect::<Vec<_>>()),
            (LOCKS_MAX, vec![ClientId(2)])
        );
        assert_eq!(table.invariants(), Ok(()));
    }

    #[test]
    fn who_has_no_room_inherits_no_more_than_that() {
        let mut table = LockTable::default();
        let mut set = |wish| table.set(0, wish, &mut BTreeSet::new());
        for n in 0..LOCKS_MAX as u64 - 1 {
            set(record(2, Write, 2 * n, 2 * n, 0)).unwrap();
        }
        let other = |ino, start| Wish { ino: InodeId(ino), ..record(1, Write, start, start, 0) };
        [other(8, 0), other(9, 0), other(9, 2)].into_iter().for_each(|wish| set(wish).unwrap());
        table.inherit(0, ClientId(1), ClientId(2), &mut BTreeSet::new());
        assert_eq!(table.invariants(), Ok(()));
        let owner = |ino| {
            let file = table.files.get(&InodeId(ino)).expect("it is locked");
            file.iter().map(|held| held.client.0).collect::<Vec<_>>()
        };
        assert_eq!((owner(8), owner(9)), (vec![2], vec![1, 1]));
        table.gone(0, ClientId(1), &mut BTreeSet::new());
        assert_eq!((table.len(), table.invariants()), (LOCKS_MAX, Ok(())));
    }

    /// A grant of which the table does not know yet that it is over is no more than what was said last.
    #[test]
    fn what_a_dead_one_had_alone_is_its_heirs() {
        let mut w = World::default();
        w.set(record(1, Write, 0, 9, 0)).unwrap();
        assert!(w.table.give_sole(0, ClientId(1), (FILE, 5)));
        let soles = w.table.inherit(0, ClientId(1), ClientId(2), &mut w.told);
        assert_eq!(soles, [FILE]);
        assert_eq!((w.table.invariants(), w.table.sole(FILE)), (Ok(()), None));
        assert_eq!(w.set(record(3, Write, 5, 5, 0)), Err(Errno::AGAIN));
        let held = w.table.test(ClientId(3), FILE, record(3, Read, 0, 0, 0).lock).unwrap();
        assert_eq!(held.client, ClientId(2));
    }

    /// Clients that lock, wait, give up and end at random: nobody is left waiting for what is free.
    #[test]
    fn random_histories_keep_the_invariants_and_tell_everybody() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut w = World::default();
            let mut waiting: BTreeMap<u64, Wish> = BTreeMap::new();
            let heirs = seed % 2 == 1;
            for _ in 0..150 {
                let client = 1 + random.below(4);
                let (a, b) = (random.below(12), random.below(12));
                let kind = [Un, Read, Write][random.below(3) as usize];
                w.told.clear();
                if random.chance(1, 20) {
                    if random.chance(1, 2) && heirs {
                        let heir = ClientId(1 + random.below(4));
                        w.table.inherit(0, ClientId(client), heir, &mut w.told);
                    }
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
                assert_eq!(w.table.invariants(), Ok(()));
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
            // (What was inherited belongs to owners who do nothing here: all may wait for them.)
            assert!(waiting.len() < 4 || heirs, "seed {seed}: everybody waits");
        }
    }
}
