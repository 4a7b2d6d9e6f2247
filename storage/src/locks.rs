//! The locks of one file: ranges that split and merge. Used by the head to judge, by each agent and
//! each client to remember what it holds.
//!
//! Always true of each (client, owner) in each space: ranges are sorted, do not overlap, and two of
//! one kind never touch (they would be one).

use alloc::string::String;
use alloc::vec::Vec;

use base::ClientId;

use crate::format::lock::{Lock, LockKind, LockSpace};

/// A lock and the client through which it is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// The client.
    pub client: ClientId,
    /// What it holds.
    pub lock: Lock,
}

impl Held {
    fn is_of(&self, client: ClientId, lock: &Lock) -> bool {
        self.client == client && self.lock.owner == lock.owner && self.lock.space == lock.space
    }

    /// Whether `lock`, asked for by `client`, cannot be while this one is.
    pub fn bars(&self, client: ClientId, lock: &Lock) -> bool {
        lock.kind != LockKind::None
            && self.lock.space == lock.space
            && (self.client, self.lock.owner) != (client, lock.owner)
            && (lock.kind == LockKind::Write || self.lock.kind == LockKind::Write)
            && self.lock.overlaps(lock)
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FileLocks {
    /// By (space, client, owner, start).
    held: Vec<Held>,
}

/// More ranges than there is room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

fn key(h: &Held) -> (LockSpace, ClientId, u64, u64) {
    (h.lock.space, h.client, h.lock.owner, h.lock.start)
}

impl FileLocks {
    /// Every lock.
    pub fn iter(&self) -> impl Iterator<Item = &Held> {
        self.held.iter()
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The locks that keep `client` from having `lock`.
    pub fn barring(&self, client: ClientId, lock: Lock) -> impl Iterator<Item = &Held> {
        self.held.iter().filter(move |h| h.bars(client, &lock))
    }

    /// Makes `lock.kind` true of its range for its owner, whoever else holds what. Returns by how
    /// much the number of ranges changed; if it would grow by more than `room`, nothing changes.
    pub fn put(&mut self, client: ClientId, lock: Lock, room: usize) -> Result<isize, Full> {
        // The owner's ranges that overlap this one, or touch it and may become one with it.
        let owner = (lock.space, client, lock.owner);
        let of = |h: &Held| (h.lock.space, h.client, h.lock.owner);
        let before = |h: &Held| of(h) < owner || of(h) == owner && h.lock.end + 1 < lock.start;
        let from = self.held.partition_point(before);
        let near = |h: &&Held| h.is_of(client, &lock) && h.lock.start <= lock.end + 1;
        let count = self.held[from..].iter().take_while(near).count();
        let old = &self.held[from..from + count];
        let mut new = cut(old, &lock);
        if lock.kind != LockKind::None {
            new.push(Held { client, lock });
            new.sort_unstable_by_key(key);
            join(&mut new);
        }
        let change = new.len() as isize - count as isize;
        if change > 0 && change as usize > room {
            return Err(Full);
        }
        self.held.splice(from..from + count, new);
        Ok(change)
    }

    /// Drops everything of a client; the number of ranges that went.
    pub fn drop_client(&mut self, client: ClientId) -> usize {
        let before = self.held.len();
        self.held.retain(|h| h.client != client);
        before - self.held.len()
    }

    /// What a client has is another one's from now on. Returns by how much the number of ranges changed: what touches, or was read
    /// by both, is one. In one step, however many there are.
    pub fn rename(&mut self, client: ClientId, heir: ClientId) -> isize {
        if client == heir {
            return 0;
        }
        self.held.iter_mut().filter(|h| h.client == client).for_each(|h| h.client = heir);
        self.settle()
    }

    /// Takes in the locks of another book of the same file. Returns by how much their number is less than both had.
    pub fn join(&mut self, other: Self) -> isize {
        self.held.extend(other.held);
        self.settle()
    }

    /// Makes true again what is always true. Of ranges of one owner that overlap and differ, which no two books of one judge have,
    /// the one that begins first counts.
    fn settle(&mut self) -> isize {
        let before = self.held.len();
        // Runs that are sorted, which is what it takes least time for.
        self.held.sort_by_key(key);
        self.held.dedup_by(|next, last| {
            if !last.is_of(next.client, &next.lock) || last.lock.end < next.lock.start {
                return merge(last, next);
            }
            if last.lock.kind == next.lock.kind {
                last.lock.end = last.lock.end.max(next.lock.end);
                return true;
            }
            next.lock.start = last.lock.end.saturating_add(1);
            next.lock.start > next.lock.end
        });
        self.held.len() as isize - before as isize
    }

    /// What is always true of the locks of a file; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        for pair in self.held.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            base::always!(key(a) < key(b), "{a:?} before {b:?}");
            if a.is_of(b.client, &b.lock) {
                base::always!(a.lock.end < b.lock.start, "{a:?} overlaps {b:?}");
                let touch = a.lock.end + 1 == b.lock.start;
                let same = touch && a.lock.kind == b.lock.kind;
                base::always!(!same, "{a:?} and {b:?} are one");
            }
        }
        for h in &self.held {
            let some = h.lock.kind != LockKind::None && h.lock.start <= h.lock.end;
            base::always!(some, "{h:?} is no lock");
        }
        Ok(())
    }
}

/// What is left of `old` outside the range of `lock`.
fn cut(old: &[Held], lock: &Lock) -> Vec<Held> {
    let mut left = Vec::with_capacity(old.len() + 2);
    for held in old {
        if !held.lock.overlaps(lock) {
            left.push(*held);
            continue;
        }
        if held.lock.start < lock.start {
            left.push(Held { lock: Lock { end: lock.start - 1, ..held.lock }, ..*held });
        }
        if held.lock.end > lock.end {
            left.push(Held { lock: Lock { start: lock.end + 1, ..held.lock }, ..*held });
        }
    }
    left
}

/// Makes one of neighbours of the same kind and owner; whether they are.
fn merge(before: &mut Held, next: &Held) -> bool {
    let one = before.is_of(next.client, &next.lock)
        && before.lock.kind == next.lock.kind
        && before.lock.end.wrapping_add(1) == next.lock.start;
    if one {
        before.lock.end = next.lock.end;
        before.lock.pid = next.lock.pid;
    }
    one
}

/// Makes one of neighbours of the same kind. The ranges are sorted and apart.
fn join(held: &mut Vec<Held>) {
    held.dedup_by(|next, before| merge(before, next));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::lock::LOCK_END;
    use alloc::collections::BTreeMap;
    use base::random::Random;

    const BYTES: u64 = 24;

    /// What each owner holds on each byte. The last byte stands for all that follow.
    type Model = BTreeMap<(u64, u64), [LockKind; BYTES as usize]>;

    fn random_lock(random: &mut Random) -> (ClientId, Lock) {
        let (a, b) = (random.below(BYTES), random.below(BYTES));
        let end = if a.max(b) == BYTES - 1 { LOCK_END } else { a.max(b) };
        let kind = [LockKind::None, LockKind::Read, LockKind::Write][random.below(3) as usize];
        let space = LockSpace::Record;
        let owner = 1 + random.below(2);
        let lock = Lock { space, kind, owner, pid: 9, start: a.min(b), end };
        (ClientId(1 + random.below(2)), lock)
    }

    fn bytes(lock: &Lock) -> impl Iterator<Item = usize> {
        (lock.start..=lock.end.min(BYTES - 1)).map(|b| b as usize)
    }

    #[test]
    fn ranges_say_what_a_map_of_bytes_says() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let (mut locks, mut model) = (FileLocks::default(), Model::new());
            let mut count = 0isize;
            for _ in 0..60 {
                let (client, lock) = random_lock(&mut random);
                let barred = model.iter().any(|(who, held)| {
                    *who != (client.0, lock.owner)
                        && lock.kind != LockKind::None
                        && bytes(&lock).any(|b| {
                            held[b] == LockKind::Write
                                || held[b] == LockKind::Read && lock.kind == LockKind::Write
                        })
                });
                assert_eq!(locks.barring(client, lock).next().is_some(), barred, "seed {seed}");
                if barred {
                    continue;
                }
                count += locks.put(client, lock, usize::MAX).unwrap();
                let held =
                    model.entry((client.0, lock.owner)).or_insert([LockKind::None; BYTES as usize]);
                bytes(&lock).for_each(|b| held[b] = lock.kind);
                assert_eq!(locks.invariants(), Ok(()));
                assert_eq!(locks.iter().count() as isize, count, "seed {seed}");
                let mut shown = Model::new();
                for h in locks.iter() {
                    let of = shown
                        .entry((h.client.0, h.lock.owner))
                        .or_insert([LockKind::None; BYTES as usize]);
                    bytes(&h.lock).for_each(|b| of[b] = h.lock.kind);
                }
                model.retain(|_, held| held.iter().any(|k| *k != LockKind::None));
                assert_eq!(shown, model, "seed {seed}");
            }
        }
    }

    /// What two clients had, one of them has: whatever was locked by either is, and by nobody else.
    #[test]
    fn what_is_renamed_says_what_a_map_of_bytes_says() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let (mut locks, mut kept) = (FileLocks::default(), FileLocks::default());
            for _ in 0..20 {
                let (client, lock) = random_lock(&mut random);
                if locks.barring(client, lock).next().is_none() {
                    locks.put(client, lock, usize::MAX).unwrap();
                }
            }
            for held in locks.iter().filter(|held| held.client == ClientId(2)) {
                kept.put(held.client, held.lock, usize::MAX).unwrap();
            }
            let (before, count) = (locks.clone(), locks.iter().count() as isize);
            let change = locks.rename(ClientId(1), ClientId(2));
            assert_eq!(locks.iter().count() as isize, count + change, "seed {seed}");
            let has = |locks: &FileLocks, client, owner, b: u64| {
                let mut all = locks.iter().filter(|h| (h.client, h.lock.owner) == (client, owner));
                all.find(|h| h.lock.start <= b && b <= h.lock.end).map(|h| h.lock.kind)
            };
            for (owner, b) in (1..3).flat_map(|owner| (0..BYTES).map(move |b| (owner, b))) {
                let was = has(&before, ClientId(1), owner, b);
                let was = was.or(has(&before, ClientId(2), owner, b));
                assert_eq!(has(&locks, ClientId(2), owner, b), was, "seed {seed}");
                assert_eq!(has(&locks, ClientId(1), owner, b), None);
            }
            assert_eq!(locks.invariants(), Ok(()), "seed {seed}");
            // Two books of it come to the same.
            let mut other = before;
            other.drop_client(ClientId(2));
            other.rename(ClientId(1), ClientId(2));
            kept.join(other);
            assert_eq!(kept, locks, "seed {seed}");
        }
    }

    #[test]
    fn books_that_cannot_be_of_one_judge_come_to_something() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut books = [FileLocks::default(), FileLocks::default()];
            for n in 0..20 {
                let (_, lock) = random_lock(&mut random);
                books[n % 2].put(ClientId(1), lock, usize::MAX).unwrap();
            }
            let [mut one, other] = books;
            one.join(other);
            assert_eq!(one.invariants(), Ok(()), "seed {seed}");
        }
    }

    #[test]
    fn a_bound_on_ranges_leaves_everything_as_it_was() {
        let mut locks = FileLocks::default();
        let lock = |kind, start, end| Lock {
            space: LockSpace::Record,
            kind,
            owner: 1,
            pid: 1,
            start,
            end,
        };
        let c = ClientId(1);
        assert_eq!(locks.put(c, lock(LockKind::Write, 0, 100), 1), Ok(1));
        let before = locks.clone();
        assert_eq!(locks.put(c, lock(LockKind::None, 50, 50), 0), Err(Full), "it would split");
        assert_eq!(locks, before);
        assert_eq!(locks.put(c, lock(LockKind::None, 50, 50), 1), Ok(1));
        assert_eq!(locks.put(c, lock(LockKind::Write, 50, 50), 0), Ok(-1), "they are one again");
        assert_eq!(locks, before);
        assert_eq!(locks.drop_client(c), 1);
        assert!(locks.is_empty());
    }

    #[test]
    fn flock_and_records_do_not_see_each_other() {
        let mut locks = FileLocks::default();
        let all = |space, owner| Lock { kind: LockKind::Write, ..Lock::all_of(space, owner) };
        locks.put(ClientId(1), all(LockSpace::Flock, 1), 9).unwrap();
        let other = ClientId(2);
        assert!(locks.barring(other, all(LockSpace::Record, 1)).next().is_none());
        assert!(locks.barring(other, all(LockSpace::Flock, 1)).next().is_some());
        assert!(locks.barring(ClientId(1), all(LockSpace::Flock, 2)).next().is_some());
        assert!(locks.barring(ClientId(1), all(LockSpace::Flock, 1)).next().is_none());
    }
}
