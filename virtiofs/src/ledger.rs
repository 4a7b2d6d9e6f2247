//! What a device must know of its guest, in a file that outlives it: killed and started again, it knows the inodes that the guest
//! was told of, opens its files again under the same handles, and asks again for what the guest has locked.
//!
//! The file is mapped, and written by plain stores: what a killed process has stored is there. It need not outlive the machine,
//! since the guest does not either.
//!
//! A header, then slots of inodes (number, how often told), then slots of open files (handle, inode, flags), then slots of locks (inode,
//! handle, owner, first and last byte, and in one word process, kind and space); a slot whose first word is 0 is free. It is written last.
//!
//! The header says which directory it is ([`claim`](Ledger::claim)), how far slots were ever filled, and a secret, by which a file system may
//! know that this device is the heir of the one before ([`heir`](Ledger::heir)). While the locks of a guest that was here before are being
//! given back it says so: who opens the book then has another secret, or it would be heir of locks that nobody gives back.
//!
//! Room for slots is taken of the file system below as they are filled, so that what is full is an error and not the end of the process.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::InodeId;
use client::fs::{Lock, LockKind, LockSpace};
use frontend::fuse::{Guest, Ledger as ServerLedger, LockOwner, Locked, OpenFile};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{Bytes, FileOffset, MmapRegion};

const MAGIC: u64 = u64::from_le_bytes(*b"CRBLVFS3");
/// What every version begins with.
const OURS: &[u8] = b"CRBLVFS";
const HEADER: usize = 4096;
/// Offsets in the header.
const AT_NODES: usize = 8;
const AT_HANDLES: usize = 16;
const AT_READY: usize = 24;
const AT_HEIR: usize = 32;
/// Not 0: a former guest's locks are being given back.
const AT_PARTING: usize = 48;
/// Words of [`Tenant::mark`](crate::tenant::Tenant::mark).
const AT_MARK: usize = 56;
/// How many slots of each kind were ever filled: nodes, handles, locks.
const AT_FILLED: usize = 96;
const NODE: usize = 16;
const HANDLE: usize = 24;
const LOCK: usize = 48;
/// Locks: what a client of the volume may have, and as many that are asked for.
pub(crate) const LOCKS_MAX: usize = 1 << 15;
/// Room for so many slots is taken at once.
const STEP: usize = 1 << 12;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Node,
    Handle,
    Lock,
}

/// Slots of one kind: which are free, and for how many there is room in the file.
#[derive(Debug, Default)]
struct Free {
    slots: Vec<usize>,
    next: usize,
    backed: usize,
}

impl Free {
    /// So many more as are filled at once, if there is room.
    fn has(&mut self, count: usize, ledger: &Ledger, kind: Kind) -> bool {
        let next = self.next + count.saturating_sub(self.slots.len());
        if next > ledger.max(kind) {
            return false;
        }
        while self.backed < next {
            let Some(backed) = ledger.back(kind, self.backed) else { return false };
            self.backed = backed;
        }
        true
    }

    /// One of those.
    fn take(&mut self, ledger: &Ledger, kind: Kind) -> usize {
        self.slots.pop().unwrap_or_else(|| {
            self.next += 1;
            ledger.put(AT_FILLED + 8 * kind as usize, self.next as u64);
            self.next - 1
        })
    }

    /// All up to there, but for those.
    fn without<'a>(next: usize, used: impl Iterator<Item = &'a usize>) -> Self {
        let mut taken = vec![false; next];
        used.for_each(|slot| taken[*slot] = true);
        Self { slots: (0..next).filter(|slot| !taken[*slot]).collect(), next, backed: next }
    }
}

/// Slots of one kind, each with a number of its own.
#[derive(Debug, Default)]
struct Slots {
    of: HashMap<u64, usize>,
    free: Free,
}

impl Slots {
    fn take(&mut self, key: u64, ledger: &Ledger, kind: Kind) -> Option<usize> {
        if !self.free.has(1, ledger, kind) {
            return None;
        }
        let slot = self.free.take(ledger, kind);
        self.of.insert(key, slot);
        Some(slot)
    }

    fn give(&mut self, key: u64) -> Option<usize> {
        let slot = self.of.remove(&key)?;
        self.free.slots.push(slot);
        Some(slot)
    }
}

/// A lock in its slot.
pub(crate) type Row = [u64; LOCK / 8];

/// Slots of locks.
#[derive(Debug, Default)]
struct LockSlots {
    of: HashMap<LockOwner, Vec<(usize, Row)>>,
    free: Free,
}

pub(crate) fn row_of((ino, ..): LockOwner, fh: u64, lock: &Lock) -> Row {
    let what = u64::from(lock.pid) << 16 | (lock.kind as u64) << 8 | lock.space as u64;
    [ino.0, fh, lock.owner, lock.start, lock.end, what]
}

pub(crate) fn lock_in(row: &Row) -> Option<Locked> {
    let [ino, fh, owner, start, end, what] = *row;
    let kind = match what >> 8 & 0xff {
        1 => LockKind::Read,
        2 => LockKind::Write,
        _ => return None,
    };
    let space = if what & 0xff == 0 { LockSpace::Record } else { LockSpace::Flock };
    let pid = u32::try_from(what >> 16).ok()?;
    Some(Locked { ino: InodeId(ino), fh, lock: Lock { space, kind, owner, pid, start, end } })
}

#[derive(Debug, Default)]
struct Index {
    nodes: Slots,
    handles: Slots,
    locks: LockSlots,
    /// Servers of former guests that have not given their locks back.
    parting: usize,
}

/// The book.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    map: MmapRegion<()>,
    nodes_max: usize,
    handles_max: usize,
    index: Mutex<Index>,
}

/// What was in it.
#[derive(Debug, Default)]
pub struct Kept {
    /// Inodes, and how often the guest was told of each.
    pub told: Vec<(InodeId, u64)>,
    /// Open files.
    pub opened: Vec<OpenFile>,
    /// Locks.
    pub locked: Vec<Locked>,
    /// Requests that have no answer yet, of a guest that moves: the queue, and the first descriptor.
    pub begun: Vec<(u16, u16)>,
    /// By what the device there shows that it goes on for the guest of the one here.
    pub secret: Option<u128>,
}

impl Ledger {
    /// Opens or makes the book at `path`, for a guest that may know and open so much. What is in it, if a guest was at it.
    ///
    /// # Errors
    /// The file cannot be made or mapped.
    pub fn open(path: &Path, guest: &Guest) -> std::io::Result<(Self, Option<Kept>)> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?;
        check(&file)?;
        // One device at a time.
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
        Self::of(file, guest)
    }

    /// A book that nobody opens again: it knows what a device hands on whose guest moves.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub fn anonymous(guest: &Guest) -> std::io::Result<Self> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("virtiofs-state", flags)?;
        Ok(Self::of(file.into(), guest)?.0)
    }

    fn of(file: File, guest: &Guest) -> std::io::Result<(Self, Option<Kept>)> {
        let (nodes_max, handles_max) = (guest.nodes_max, guest.handles_max);
        let len = nodes_max
            .checked_mul(NODE)
            .zip(handles_max.checked_mul(HANDLE))
            .and_then(|(nodes, handles)| {
                nodes.checked_add(handles)?.checked_add(HEADER + LOCKS_MAX * LOCK)
            })
            .ok_or_else(|| std::io::Error::other("more nodes or handles than memory"))?;
        let was = file.metadata()?.len();
        if was != 0 {
            let mut magic = [0; OURS.len()];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut magic, 0)
                .ok()
                .filter(|()| magic == OURS)
                .ok_or_else(|| refused("is no state of a device"))?;
        }
        if was != len as u64 {
            file.set_len(0)?;
            file.set_len(len as u64)?;
        }
        reserve(&file, 0, HEADER)?;
        let map = MmapRegionBuilder::new_with_bitmap(len, ())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file.try_clone()?, 0))
            .build()
            .map_err(std::io::Error::other)?;
        let ledger = Self { file, map, nodes_max, handles_max, index: Mutex::default() };
        let same = ledger.get(0) == MAGIC
            && ledger.get(AT_NODES) == nodes_max as u64
            && ledger.get(AT_HANDLES) == handles_max as u64;
        let parting = ledger.get(AT_PARTING) != 0;
        if !same || parting || ledger.heir() == 0 {
            let mut secret = [0; 16];
            rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
            for (at, half) in [AT_HEIR, AT_HEIR + 8].into_iter().zip(secret.as_chunks().0) {
                ledger.put(at, u64::from_le_bytes(*half));
            }
            ledger.put(AT_PARTING, 0);
        }
        if same && ledger.get(AT_READY) != 0 {
            let kept = ledger.read();
            return Ok((ledger, Some(kept)));
        }
        if was == len as u64 && !same {
            // Of another version: how far it was filled is not known.
            [Kind::Node, Kind::Handle, Kind::Lock].into_iter().for_each(|kind| {
                ledger.put(AT_FILLED + 8 * kind as usize, 0);
            });
            rustix::fs::ftruncate(&ledger.file, HEADER as u64)?;
            rustix::fs::ftruncate(&ledger.file, len as u64)?;
        }
        ledger.clear();
        ledger.put(AT_NODES, nodes_max as u64);
        ledger.put(AT_HANDLES, handles_max as u64);
        ledger.put(0, MAGIC);
        Ok((ledger, None))
    }

    /// The book is of the directory with this mark from now on. `false`: it was another one's, and what was in it is of no use.
    pub fn claim(&self, mark: [u64; 5]) -> bool {
        let at = |word: usize| AT_MARK + word * 8;
        let same = (0..mark.len()).all(|word| self.get(at(word)) == mark[word]);
        if !same {
            self.clear();
            (0..mark.len()).for_each(|word| self.put(at(word), mark[word]));
        }
        same
    }

    /// A guest is no more, whose locks are still to be given back.
    pub fn part(&self) {
        let mut index = self.index();
        index.parting += 1;
        self.put(AT_PARTING, index.parting as u64);
    }

    /// A secret that the next device on this book has as well, and nobody else.
    pub fn heir(&self) -> u128 {
        u128::from(self.get(AT_HEIR)) | u128::from(self.get(AT_HEIR + 8)) << 64
    }

    /// Makes it another one.
    pub fn set_heir(&self, heir: u128) {
        self.put(AT_HEIR, heir as u64);
        self.put(AT_HEIR + 8, (heir >> 64) as u64);
    }

    fn get(&self, at: usize) -> u64 {
        self.map.as_volatile_slice().read_obj(at).unwrap_or(0)
    }

    fn put(&self, at: usize, value: u64) {
        // Slots are below the number that the map was made for.
        let _ = self.map.as_volatile_slice().write_obj(value, at);
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const fn node(slot: usize) -> usize {
        HEADER + slot * NODE
    }

    const fn handle(&self, slot: usize) -> usize {
        HEADER + self.nodes_max * NODE + slot * HANDLE
    }

    const fn lock(&self, slot: usize) -> usize {
        self.handle(self.handles_max) + slot * LOCK
    }

    fn row(&self, slot: usize) -> Row {
        std::array::from_fn(|word| self.get(self.lock(slot) + word * 8))
    }

    const fn max(&self, kind: Kind) -> usize {
        match kind {
            Kind::Node => self.nodes_max,
            Kind::Handle => self.handles_max,
            Kind::Lock => LOCKS_MAX,
        }
    }

    const fn place(&self, kind: Kind, slot: usize) -> usize {
        match kind {
            Kind::Node => Self::node(slot),
            Kind::Handle => self.handle(slot),
            Kind::Lock => self.lock(slot),
        }
    }

    /// Takes room for more slots than there is room for; for how many there is then.
    fn back(&self, kind: Kind, backed: usize) -> Option<usize> {
        let more = backed.saturating_add(STEP).min(self.max(kind));
        let (from, to) = (self.place(kind, backed), self.place(kind, more));
        match reserve(&self.file, from, to - from) {
            Ok(()) => Some(more),
            Err(error) => {
                log::warn!(
                    "what a guest has is not written down, and is lost with the device: {error}"
                );
                None
            }
        }
    }

    /// How many slots of a kind were ever filled.
    fn filled(&self, kind: Kind) -> usize {
        let filled = self.get(AT_FILLED + 8 * kind as usize);
        usize::try_from(filled).map_or(self.max(kind), |filled| filled.min(self.max(kind)))
    }

    fn read(&self) -> Kept {
        let mut kept = Kept::default();
        let mut index = self.index();
        for slot in 0..self.filled(Kind::Node) {
            let ino = self.get(Self::node(slot));
            if ino != 0 {
                index.nodes.of.insert(ino, slot);
                kept.told.push((InodeId(ino), self.get(Self::node(slot) + 8)));
            }
        }
        for slot in 0..self.filled(Kind::Handle) {
            let fh = self.get(self.handle(slot));
            if fh != 0 {
                index.handles.of.insert(fh, slot);
                let ino = InodeId(self.get(self.handle(slot) + 8));
                let flags = u32::try_from(self.get(self.handle(slot) + 16)).unwrap_or(0);
                kept.opened.push(OpenFile { fh, ino, flags });
            }
        }
        for slot in 0..self.filled(Kind::Lock) {
            let row = self.row(slot);
            if row[0] != 0
                && let Some(locked) = lock_in(&row)
            {
                let owner = (locked.ino, locked.lock.space, locked.lock.owner);
                index.locks.of.entry(owner).or_default().push((slot, row));
                kept.locked.push(locked);
            }
        }
        index.nodes.free = Free::without(self.filled(Kind::Node), index.nodes.of.values());
        index.handles.free = Free::without(self.filled(Kind::Handle), index.handles.of.values());
        let locks = index.locks.of.values().flatten().map(|(slot, _)| slot);
        index.locks.free = Free::without(self.filled(Kind::Lock), locks);
        kept
    }

    /// A guest goes on here of which this is known.
    pub fn take_over(&self, kept: &Kept) {
        self.clear();
        for (ino, lookups) in &kept.told {
            self.told(*ino);
            if let Some(slot) = self.index().nodes.of.get(&ino.0) {
                self.put(Self::node(*slot) + 8, *lookups);
            }
        }
        kept.opened.iter().for_each(|open| self.opened(open));
        self.begun();
    }

    /// Another guest begins, or the same one anew.
    pub fn clear(&self) {
        let mut index = self.index();
        self.put(AT_READY, 0);
        // What was never filled is not touched.
        for kind in [Kind::Node, Kind::Handle, Kind::Lock] {
            (0..self.filled(kind)).for_each(|slot| self.put(self.place(kind, slot), 0));
            self.put(AT_FILLED + 8 * kind as usize, 0);
        }
        *index = Index { parting: index.parting, ..Index::default() };
    }
}

fn refused(what: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidInput, what)
}

/// Whoever else can write there could name any inode of the directory's volume to us.
fn check(file: &File) -> std::io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let found = file.metadata()?;
    let own = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
    let what = match () {
        () if !found.is_file() => "is no regular file",
        () if !own => "is another user's",
        () if found.mode() & 0o077 != 0 => "others may read or write it (chmod 600)",
        () if found.nlink() != 1 => "has more than one name",
        () => return Ok(()),
    };
    Err(refused(what))
}

/// Takes room in the file: a store into a page for which there is none would end the process.
fn reserve(file: &File, at: usize, len: usize) -> std::io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    match fallocate(file, FallocateFlags::empty(), at as u64, len as u64) {
        // That does not say that there is none.
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl ServerLedger for Ledger {
    fn begun(&self) {
        self.put(AT_READY, 1);
    }

    fn told(&self, ino: InodeId) {
        let mut index = self.index();
        if let Some(slot) = index.nodes.of.get(&ino.0) {
            let at = Self::node(*slot) + 8;
            self.put(at, self.get(at).saturating_add(1));
        } else if let Some(slot) = index.nodes.take(ino.0, self, Kind::Node) {
            self.put(Self::node(slot) + 8, 1);
            self.put(Self::node(slot), ino.0);
        }
    }

    fn forgot(&self, ino: InodeId, count: u64) {
        let mut index = self.index();
        let Some(slot) = index.nodes.of.get(&ino.0).copied() else { return };
        let left = self.get(Self::node(slot) + 8).saturating_sub(count);
        self.put(Self::node(slot) + 8, left);
        if left == 0 {
            self.put(Self::node(slot), 0);
            index.nodes.give(ino.0);
        }
    }

    fn opened(&self, open: &OpenFile) {
        if let Some(slot) = self.index().handles.take(open.fh, self, Kind::Handle) {
            let at = self.handle(slot);
            self.put(at + 8, open.ino.0);
            self.put(at + 16, open.flags.into());
            self.put(at, open.fh);
        }
    }

    fn closed(&self, fh: u64) {
        if let Some(slot) = self.index().handles.give(fh) {
            self.put(self.handle(slot), 0);
        }
    }

    fn locked(&self, owner: LockOwner, fh: u64, all: &[Lock]) -> bool {
        let mut index = self.index();
        let slots = &mut index.locks;
        let mut old = slots.of.remove(&owner).unwrap_or_default();
        let rows = all.iter().map(|lock| row_of(owner, fh, lock));
        let new: Vec<Row> = rows.filter(|row| !old.iter().any(|(_, known)| known == row)).collect();
        if !slots.free.has(new.len(), self, Kind::Lock) {
            slots.of.insert(owner, old);
            return false;
        }
        // What is new is there before what is old goes.
        let gone = old
            .extract_if(.., |(_, known)| !all.iter().any(|lock| row_of(owner, fh, lock) == *known));
        let gone: Vec<usize> = gone.map(|(slot, _)| slot).collect();
        for row in new {
            let slot = slots.free.take(self, Kind::Lock);
            let at = self.lock(slot);
            (1..row.len()).for_each(|word| self.put(at + word * 8, row[word]));
            self.put(at, row[0]);
            old.push((slot, row));
        }
        gone.iter().for_each(|slot| self.put(self.lock(*slot), 0));
        slots.free.slots.extend(gone);
        if !old.is_empty() {
            slots.of.insert(owner, old);
        }
        true
    }

    fn ended(&self) {
        self.clear();
    }

    fn given_back(&self) {
        let mut index = self.index();
        index.parting = index.parting.saturating_sub(1);
        self.put(AT_PARTING, index.parting as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Guest = Guest { nodes_max: 4, handles_max: 2 };

    fn file() -> File {
        File::from(rustix::fs::memfd_create("ledger", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }

    #[test]
    fn what_was_told_and_opened_is_found_again() {
        let file = file();
        let again = || Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        let (ledger, kept) = again();
        assert!(kept.is_none());
        ledger.begun();
        for ino in [7, 8, 7, 9] {
            ledger.told(InodeId(ino));
        }
        ledger.forgot(InodeId(8), 1);
        ledger.told(InodeId(10));
        ledger.told(InodeId(11));
        ledger.told(InodeId(12)); // one too many
        let open = |fh| OpenFile { fh, ino: InodeId(fh + 100), flags: 2 };
        (1..4).for_each(|fh| ledger.opened(&open(fh)));
        ledger.closed(1);
        drop(ledger);
        let (ledger, kept) = again();
        let mut kept = kept.unwrap();
        kept.told.sort_unstable();
        assert_eq!(kept.told, [(7, 2), (9, 1), (10, 1), (11, 1)].map(|(i, n)| (InodeId(i), n)));
        assert_eq!(kept.opened, [open(2)]);
        // The slots are where they were.
        ledger.forgot(InodeId(7), 2);
        ledger.opened(&open(5));
        let (ledger, kept) = again();
        assert_eq!((kept.as_ref().unwrap().told.len(), kept.unwrap().opened.len()), (3, 2));
        ledger.clear();
        assert!(again().1.is_none());
    }

    #[test]
    fn what_is_locked_is_found_again() {
        let file = file();
        let again = || Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        let (ledger, _) = again();
        ledger.begun();
        let heir = ledger.heir();
        assert_ne!(heir, 0);
        let lock = |owner, start, end, kind| {
            let (space, pid) = (LockSpace::Record, 77);
            Lock { space, kind, owner, pid, start, end }
        };
        let of = |owner| (InodeId(5), LockSpace::Record, owner);
        let (a, b, c) = (
            lock(1, 0, 9, LockKind::Read),
            lock(1, 20, u64::MAX >> 1, LockKind::Write),
            lock(u64::MAX, 3, 3, LockKind::Write),
        );
        assert!(ledger.locked(of(1), 8, &[a]) && ledger.locked(of(u64::MAX), 9, &[c]));
        assert!(ledger.locked(of(1), 8, &[a, b]) && ledger.locked(of(1), 8, &[b]));
        let flock = Lock { kind: LockKind::Read, ..Lock::all_of(LockSpace::Flock, 1) };
        assert!(ledger.locked((InodeId(5), LockSpace::Flock, 1), 4, &[flock]));
        drop(ledger);
        let (ledger, kept) = again();
        assert_eq!(ledger.heir(), heir);
        let sorted = |kept: Option<Kept>| {
            let mut locked = kept.unwrap().locked;
            locked.sort_unstable_by_key(|l| (l.lock.space, l.lock.owner, l.lock.start));
            locked.into_iter().map(|l| (l.ino.0, l.fh, l.lock)).collect::<Vec<_>>()
        };
        assert_eq!(sorted(kept), [(5, 8, b), (5, 9, c), (5, 4, flock)]);
        // The slots are where they were.
        let d = lock(u64::MAX, 7, 7, LockKind::Write);
        assert!(ledger.locked(of(1), 8, &[]) && ledger.locked(of(u64::MAX), 9, &[c, d]));
        drop(ledger);
        let (ledger, kept) = again();
        assert_eq!(sorted(kept), [(5, 9, c), (5, 9, d), (5, 4, flock)]);
        ledger.ended();
        assert!(again().1.is_none());
        assert_eq!(again().0.heir(), heir);
    }

    #[test]
    fn more_locks_than_there_is_room_for_are_refused_and_take_nothing() {
        let (ledger, _) = Ledger::of(file(), &GUEST).unwrap();
        let of = |owner| (InodeId(5), LockSpace::Record, owner);
        let lock = |n: u64| Lock {
            kind: LockKind::Write,
            start: n,
            end: n,
            ..Lock::all_of(LockSpace::Record, 1)
        };
        let all: Vec<Lock> = (0..LOCKS_MAX as u64).map(|n| lock(2 * n)).collect();
        assert!(ledger.locked(of(1), 1, &all[1..]) && ledger.locked(of(2), 1, &all[..1]));
        assert!(!ledger.locked(of(3), 1, &all[..1]));
        assert!(ledger.locked(of(2), 1, &[]) && ledger.locked(of(3), 1, &all[..1]));
    }

    #[test]
    fn what_is_not_used_takes_no_memory() {
        use std::os::unix::fs::MetadataExt;
        let file = file();
        let guest = Guest { nodes_max: 1 << 20, handles_max: 1 << 16 };
        let again = || Ledger::of(file.try_clone().unwrap(), &guest).unwrap();
        let used = || file.metadata().unwrap().blocks() * 512;
        let (ledger, _) = again();
        ledger.begun();
        ledger.told(InodeId(7));
        ledger.clear();
        assert!(used() < 200_000, "{} bytes", used());
        ledger.begun();
        ledger.told(InodeId(8));
        drop(ledger);
        assert_eq!(again().1.unwrap().told, [(InodeId(8), 1)]);
        assert!(used() < 200_000, "{} bytes", used());
        let (ledger, _) = again();
        (1..100_000).for_each(|ino| ledger.told(InodeId(ino)));
        drop(ledger);
        assert_eq!(again().1.unwrap().told.len(), 99_999);
    }

    #[test]
    fn a_file_that_is_not_ours_is_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("corbel-ledger-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("state");
        let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let refused = |what: &str| {
            let error = Ledger::open(&path, &GUEST).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        for text in ["root:x:0:0:root:/root:/bin/sh\n", "abc"] {
            std::fs::write(&path, text).unwrap();
            mode(0o600);
            refused("no state");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::remove_file(&path).unwrap();
        drop(Ledger::open(&path, &GUEST).unwrap());
        mode(0o640);
        refused("chmod 600");
        mode(0o600);
        std::fs::hard_link(&path, dir.join("other")).unwrap();
        refused("more than one name");
        std::fs::remove_file(dir.join("other")).unwrap();
        assert!(Ledger::open(&path, &GUEST).is_ok());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(Ledger::open(&path, &GUEST).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_is_of_another_directory_is_not_taken() {
        let file = file();
        let again = || Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        let (ledger, _) = again();
        assert!(!ledger.claim([7, 1, 2, 3, 4]));
        ledger.begun();
        ledger.told(InodeId(7));
        drop(ledger);
        let (ledger, kept) = again();
        assert!(ledger.claim([7, 1, 2, 3, 4]) && kept.is_some());
        assert!(!ledger.claim([7, 1, 2, 3, 5]));
        drop(ledger);
        assert!(again().1.is_none());
    }

    /// Whose locks are still to be given back, of that one nobody is the heir.
    #[test]
    fn who_comes_while_locks_are_given_back_has_another_secret() {
        let file = file();
        let again = || Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap().0;
        let first = again().heir();
        let ledger = again();
        ledger.part();
        ledger.part();
        ledger.clear();
        ledger.given_back();
        assert_eq!(ledger.heir(), first);
        let other = again();
        assert_ne!(other.heir(), first);
        let second = other.heir();
        other.part();
        other.given_back();
        assert_eq!(again().heir(), second);
    }

    #[test]
    fn the_book_of_another_device_is_not_read() {
        let file = file();
        let (ledger, _) = Ledger::of(file.try_clone().unwrap(), &GUEST).unwrap();
        ledger.begun();
        ledger.told(InodeId(7));
        drop(ledger);
        let other = Guest { nodes_max: 5, ..GUEST };
        assert!(Ledger::of(file.try_clone().unwrap(), &other).unwrap().1.is_none());
        assert!(Ledger::of(file, &GUEST).unwrap().1.is_none());
    }
}
