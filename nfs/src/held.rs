//! Which locks we have, so that they can be asked for again: a server that begins anew has forgotten them.

use std::collections::BTreeMap;

use client::fs::{Lock, LockKind, LockSpace};

use crate::proto::{Fh, Locked};

/// Ranges that are kept at most; a guest may ask for as many as it likes.
const RANGES_MAX: usize = 1 << 16;

/// Whose locks of which file.
pub type Owner = (LockSpace, u64, Fh);

/// The ranges of one owner in one file: first and last byte, and how.
#[derive(Clone, Debug)]
pub struct Ranges {
    /// The file, and who locked it first.
    pub file: Locked,
    ranges: Vec<Lock>,
}

/// All that we have.
#[derive(Debug, Default)]
pub struct Held {
    all: BTreeMap<Owner, Ranges>,
    ranges: usize,
}

/// What is left of a range when another one is taken out of it.
pub fn without(old: &Lock, new: &Lock) -> impl Iterator<Item = Lock> {
    let before = (old.start < new.start).then(|| Lock { end: old.end.min(new.start - 1), ..*old });
    let after = (old.end > new.end).then(|| Lock { start: old.start.max(new.end + 1), ..*old });
    let all = if old.overlaps(new) { [before, after] } else { [Some(*old), None] };
    all.into_iter().flatten()
}

impl Held {
    /// The server has granted it.
    pub fn note(&mut self, file: &Locked, lock: &Lock) {
        let key = (lock.space, lock.owner, file.fh.clone());
        let entry = self
            .all
            .entry(key.clone())
            .or_insert_with(|| Ranges { file: file.clone(), ranges: Vec::new() });
        let before = entry.ranges.len();
        entry.ranges = entry.ranges.iter().flat_map(|old| without(old, lock)).collect();
        if lock.kind != LockKind::None {
            entry.ranges.push(*lock);
        }
        self.ranges = self.ranges + entry.ranges.len() - before;
        if entry.ranges.is_empty() {
            self.all.remove(&key);
        }
    }

    /// Whether this owner has something of this file.
    pub fn has(&self, owner: &Owner) -> bool {
        self.all.contains_key(owner)
    }

    /// Whether anybody has something of this file.
    pub fn has_file(&self, fh: &Fh) -> bool {
        self.all.keys().any(|(_, _, of)| of == fh)
    }

    /// What of a range its owner has not.
    pub fn lacks(&self, file: &Locked, lock: &Lock) -> Vec<Lock> {
        let of = self.all.get(&(lock.space, lock.owner, file.fh.clone()));
        let kept = of.into_iter().flat_map(|all| &all.ranges);
        kept.fold(vec![*lock], |left, kept| left.iter().flat_map(|l| without(l, kept)).collect())
    }

    /// Whether this owner has exactly that.
    pub fn holds(&self, file: &Locked, lock: &Lock) -> bool {
        let of = self.all.get(&(lock.space, lock.owner, file.fh.clone()));
        of.is_some_and(|all| all.ranges.contains(lock))
    }

    /// Whether this owner has something of any file.
    pub fn owns(&self, space: LockSpace, owner: u64) -> bool {
        let from = (space, owner, Fh((*b"").into()));
        self.all.range(from..).next().is_some_and(|(key, _)| (key.0, key.1) == (space, owner))
    }

    /// Whether there is no room for more.
    pub fn is_full(&self) -> bool {
        self.ranges >= RANGES_MAX
    }

    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of it, to be asked for again.
    pub fn all(&self) -> Vec<(Locked, Lock)> {
        let files = self.all.values();
        files.flat_map(|all| all.ranges.iter().map(|lock| (all.file.clone(), *lock))).collect()
    }

    /// It is lost.
    pub fn lose(&mut self, file: &Locked, lock: &Lock) {
        self.note(file, &Lock { kind: LockKind::None, ..*lock });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Cred;

    fn lock(kind: LockKind, start: u64, end: u64) -> Lock {
        Lock { space: LockSpace::Record, kind, owner: 1, pid: 0, start, end }
    }

    #[test]
    fn ranges_are_split_as_the_server_splits_them() {
        let file = Locked { fh: Fh((*b"f").into()), named: None, cred: Cred::ROOT };
        let mut held = Held::default();
        held.note(&file, &lock(LockKind::Write, 0, 99));
        held.note(&file, &lock(LockKind::None, 10, 19));
        held.note(&file, &lock(LockKind::Read, 50, 200));
        let mut all: Vec<_> =
            held.all().into_iter().map(|(_, l)| (l.start, l.end, l.kind as u8)).collect();
        all.sort_unstable();
        assert_eq!(all, [(0, 9, 2), (20, 49, 2), (50, 200, 1)]);
        held.note(&file, &lock(LockKind::None, 0, u64::MAX >> 1));
        assert!(held.is_empty() && held.ranges == 0);
    }
}
