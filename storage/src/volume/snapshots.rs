//! Snapshots: states of the volume that stay under a name.
//!
//! A snapshot is an operation in the stream, so it is the same state on every member, to the byte. It is a root of the tree that
//! is kept (`tree/snapshots.rs`), and blocks that are not written to as long as it is there (`ages`). Making one takes as
//! long in a volume of terabytes as in an empty one, and nothing is waited for: what was done before it and is not
//! published is published with it, in the same transaction, and what is done later writes elsewhere.
//!
//! Two items say what there is: what is the same everywhere, and where the tree begins here. Which pages and blocks it
//! holds back is found out at open, by a walk over what is not shared.
//!
//! A snapshot of a directory shows that directory. What it holds back is what of the whole volume has changed since.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{InodeId, StreamSeq};

use super::ages::Known;
use super::space::Space;
use super::{
    Applied, Blocks, Done, Fault, Refusal, VIEW_CACHE_PAGES, View, Volume, corrupt, share,
};
use crate::format::item::{Run, Snapshot, SnapshotRoot, kind};
use crate::format::page::Key;
use crate::format::superblock::RootRecord;
use crate::limits::SNAPSHOTS_MAX;
use crate::tree::{Root, Tree};

/// Views of snapshots that are held open.
const OPENED_MAX: usize = 16;
/// Nanoseconds for each of which there is a number: one millisecond.
const NUMBERED: u64 = 1_000_000;
/// Slots that there are: a number of 15 bits that is not 0.
const SLOTS: u64 = 0x7fff;
/// So many of those that were given up last are remembered.
const GIVEN_UP_MAX: usize = 4096;

/// A snapshot, and what it takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotStat {
    /// Numbers grow in the order of the states, and are not given again.
    pub number: u64,
    /// What every member says of it.
    pub snapshot: Snapshot,
    /// Blocks that are free once it alone is given up.
    pub own_blocks: u64,
}

/// Names of snapshots that are made for nodes which join, and that nobody else may use.
pub mod joins {
    use base::{NodeId, StreamSeq};

    const PREFIX: &[u8] = b".join-";
    /// Bytes of such a name at most.
    pub const NAME_MAX: usize = 64;

    /// One for a node, at a position.
    pub fn name(node: NodeId, seq: StreamSeq) -> Vec<u8> {
        [PREFIX, format!("{node}-{seq}").as_bytes()].concat()
    }

    /// Whether a name is such a one.
    pub fn is_one(name: &[u8]) -> bool {
        name.starts_with(PREFIX)
    }
}

#[derive(Debug)]
pub(super) struct Entry {
    pub snapshot: Snapshot,
    pub root: SnapshotRoot,
}

/// The snapshots of a volume.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    pub all: BTreeMap<u64, Entry>,
    /// Their numbers by slot.
    slots: BTreeMap<u16, u64>,
    /// Slots of those that were given up, as far as it is known here, the last at the end: clients have inodes in them.
    given_up: VecDeque<u16>,
    /// Names of those that are made for nodes which join.
    joining: BTreeSet<Vec<u8>>,
    /// Those of an image that is coming ([`image`](super::image)).
    pub coming: BTreeMap<u64, Entry>,
    /// Which arena here is the one that it calls so, and blocks here that have got content of it.
    pub arenas: BTreeMap<u32, u32>,
    pub written: Known,
    /// Those that are read, the one that was read last at the end.
    opened: Vec<(u64, Box<View>)>,
}

impl Snapshots {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    fn named(&self, name: &[u8]) -> Option<(u64, &Entry)> {
        let mut all = self.all.iter();
        all.find(|(_, entry)| entry.snapshot.name == name).map(|(number, entry)| (*number, entry))
    }

    /// A slot that no other has.
    fn free_slot(&self, number: u64) -> u16 {
        let first = (number - 1) % SLOTS;
        let mut slots = (first..first + SLOTS).map(|slot| (slot % SLOTS + 1) as u16);
        // (There are far fewer snapshots.)
        slots.find(|slot| !self.slots.contains_key(slot)).unwrap_or(1)
    }

    fn note_given_up(&mut self, slot: u16) {
        self.given_up.retain(|other| *other != slot);
        if self.given_up.len() >= GIVEN_UP_MAX {
            self.given_up.pop_front();
        }
        self.given_up.push_back(slot);
    }

    /// The one in a slot, and its number.
    fn in_slot(&self, slot: u16) -> Option<(u64, &Entry)> {
        let number = *self.slots.get(&slot)?;
        Some((number, self.all.get(&number)?))
    }
}

/// Snapshots found at open.
#[derive(Debug, Default)]
pub(super) struct Found {
    snapshots: BTreeMap<u64, Snapshot>,
    roots: BTreeMap<u64, SnapshotRoot>,
}

fn bad(what: &'static str) -> Fault {
    corrupt(InodeId::NONE)(Corrupt::new("snapshot", what))
}

impl Found {
    /// One of their items.
    pub fn item(&mut self, key: Key, value: &[u8]) -> Result<(), Corrupt> {
        if key.kind == kind::SNAPSHOT_ROOT {
            self.roots.insert(key.item, SnapshotRoot::decode(value)?);
        } else {
            self.snapshots.insert(key.item, Snapshot::decode(value)?);
        }
        Ok(())
    }

    /// All were seen: takes what they hold back.
    pub fn end(
        self,
        root: &RootRecord,
        tree: &mut Tree,
        space: &mut Space,
    ) -> Result<Snapshots, Fault> {
        if !self.snapshots.keys().eq(self.roots.keys()) {
            return Err(bad("has no root, or a root no snapshot"));
        }
        if root.snapshots != self.snapshots.len() as u64 {
            return Err(bad("is not counted by the root record, or is counted and not there"));
        }
        let transactions: Vec<u64> = self.roots.values().map(|root| root.transaction).collect();
        let in_order = transactions.is_sorted_by(|a, b| a < b);
        let published = transactions.last().is_none_or(|last| *last < root.transaction);
        if !in_order || !published {
            return Err(bad("is not in the order of the others"));
        }
        if !self.roots.is_empty() {
            Self::walk(&self.roots, tree, space)?;
        }
        let names = self.snapshots.values().map(|snapshot| &snapshot.name);
        let joining = names.filter(|name| joins::is_one(name)).cloned().collect();
        let slots = self.snapshots.iter().map(|(number, s)| (s.slot, *number)).collect();
        let all = self.snapshots.into_iter().zip(self.roots.into_values());
        let all = all.map(|((number, snapshot), root)| (number, Entry { snapshot, root }));
        Ok(Snapshots { all: all.collect(), slots, joining, ..Snapshots::default() })
    }

    fn walk(
        roots: &BTreeMap<u64, SnapshotRoot>,
        tree: &mut Tree,
        space: &mut Space,
    ) -> Result<(), Fault> {
        // From the newest on: pages that no newer state has.
        for at in roots.values().rev() {
            let root = Root { page: at.page, level: at.level };
            tree.found_snapshot(root, at.transaction, &mut |key, value| {
                if key.kind != kind::EXTENT {
                    return Ok(());
                }
                let ino = InodeId(key.ino);
                let run = Run::decode(key.item, value).map_err(corrupt(ino))?;
                let bad = |what| corrupt(ino)(Corrupt::new("extent", what));
                space.can_be_dead(Blocks::of(&run)).map_err(bad)
            })?;
        }
        // From the oldest on, and with the working state at the end: what becomes of blocks from one to the next.
        let of = |at: &SnapshotRoot| {
            let root = Root { page: at.page, level: at.level };
            (Some(at.transaction), tree.state(root, at.transaction, VIEW_CACHE_PAGES))
        };
        let working = (None, tree.state(tree.root(), tree.published(), VIEW_CACHE_PAGES));
        let mut before: Option<Tree> = None;
        for (transaction, state) in roots.values().map(of).chain([working]) {
            if let Some(before) = &before {
                let (gone, come) = share::moved(before, &state)?;
                if !space.ages.found(&gone, &come) {
                    return Err(bad("has blocks that are counted otherwise than they are mapped"));
                }
            }
            if let Some(transaction) = transaction {
                space.ages.snapshot(transaction);
            }
            before = Some(state);
        }
        let bad = |what| corrupt(InodeId::NONE)(Corrupt::new("extent", what));
        space.found_dead().map_err(bad)
    }
}

impl Volume {
    /// The state as it is before this stays under a name, and shows what is in `dir`.
    pub(super) fn make_snapshot(&mut self, dir: InodeId, name: &[u8], time: u64) -> Done {
        if let Some((_, there)) = self.snapshots.named(name) {
            // (Part of a chunk may be done twice after a crash.)
            let same = (there.snapshot.time, there.snapshot.dir) == (time, dir);
            let already = Applied { already: true, ..Applied::default() };
            return if same { Ok(already) } else { Err(Refusal::Exists) };
        }
        self.need_dir(dir)?;
        if self.sums_base().is_none() {
            // (Of a volume that is not upgraded yet: what is sent to a node that joins is compared with them.)
            return Err(Refusal::Unsupported);
        }
        if self.snapshot_count() >= SNAPSHOTS_MAX && !joins::is_one(name) {
            return Err(Refusal::TooManyLinks);
        }
        // By its time, so that a number comes once also where those of the past are not known; and in any case behind the others.
        let last = self.snapshots.all.last_key_value().map_or(0, |(number, _)| *number);
        let number = (time / NUMBERED).max(last + 1);
        if !planted(Bug::SnapshotAccountsOld) {
            // (Else they come with the end of the transaction, behind it.)
            self.store_accounts()?;
        }
        let slot = self.snapshots.free_slot(number);
        let snapshot = Snapshot { slot, dir, time, inodes: self.inodes, name: name.to_vec() };
        let (root, transaction) = self.tree.keep_working();
        let root = SnapshotRoot { page: root.page, level: root.level, transaction };
        self.space.ages.snapshot(transaction);
        self.tree.put(Key::new(0, kind::SNAPSHOT, number), &snapshot.encode())?;
        self.tree.put(Key::new(0, kind::SNAPSHOT_ROOT, number), &root.encode())?;
        if joins::is_one(name) {
            self.snapshots.joining.insert(name.to_vec());
        }
        self.snapshots.slots.insert(slot, number);
        self.snapshots.all.insert(number, Entry { snapshot, root });
        Ok(Applied::default())
    }

    /// The time that whoever orders a snapshot gives it, at `time` or as soon behind that as may be. Its number follows from that, and its
    /// slot from its number: none before it had the number, not even one that is gone, and as far as is known here no client has inodes
    /// in the slot. (All that was done is of the times before, also what is gone, whoever did it: the root record has the last.)
    pub fn snapshot_time(&self, time: u64) -> u64 {
        let last = self.snapshots.all.last_key_value().map_or(0, |(number, _)| *number);
        let first = (time / NUMBERED).max((self.time / NUMBERED).max(last).saturating_add(1));
        let snapshots = &self.snapshots;
        let given_up: BTreeSet<u16> = snapshots.given_up.iter().copied().collect();
        let mut numbers = first..first.saturating_add(SLOTS);
        let unused = numbers.find(|number| !given_up.contains(&snapshots.free_slot(*number)));
        time.max(unused.unwrap_or(first).saturating_mul(NUMBERED))
    }

    /// The slots of snapshots that were given up, as far as it is known here: for who opens the volume anew, which does not know it.
    pub fn slots_given_up(&self) -> Vec<u16> {
        self.snapshots.given_up.iter().copied().collect()
    }

    /// These were.
    pub fn note_slots_given_up(&mut self, slots: &[u16]) {
        slots.iter().for_each(|slot| self.snapshots.note_given_up(*slot));
    }

    /// Gives up the snapshot with that name, and what no other has.
    pub(super) fn drop_snapshot(&mut self, name: &[u8]) -> Done {
        let Some((number, entry)) = self.snapshots.named(name) else {
            return Ok(Applied { already: true, ..Applied::default() });
        };
        if self.tree.has_sealed() && !planted(Bug::SnapshotSealedDropped) {
            // A page that it has, dropped by what is sealed, would be free with that, whose root has the snapshot.
            return Err(Refusal::NeedsPublish);
        }
        let (transaction, slot) = (entry.root.transaction, entry.snapshot.slot);
        self.tree.remove(Key::new(0, kind::SNAPSHOT, number))?;
        self.tree.remove(Key::new(0, kind::SNAPSHOT_ROOT, number))?;
        self.snapshots.all.remove(&number);
        self.snapshots.slots.remove(&slot);
        self.snapshots.note_given_up(slot);
        self.snapshots.joining.remove(name);
        self.snapshots.opened.retain(|(n, _)| *n != number);
        self.tree.give_up(transaction);
        self.space.drop_snapshot(transaction);
        self.shares.thaw();
        Ok(Applied::default())
    }

    /// How many snapshots there are, without those that were made for nodes which join.
    pub fn snapshot_count(&self) -> usize {
        self.snapshots.len() - self.snapshots.joining.len()
    }

    /// Whether there are snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.snapshots.len() > 0
    }

    /// Names of snapshots that were made for nodes which join.
    pub fn join_snapshots(&self) -> impl Iterator<Item = &[u8]> {
        self.snapshots.joining.iter().map(Vec::as_slice)
    }

    /// Blocks that snapshots have, and no file.
    pub fn snapshot_blocks(&self) -> u64 {
        self.space.dead()
    }

    /// Up to `max` snapshots with numbers after `after`, from the oldest on.
    pub fn snapshots(&self, after: u64, max: usize) -> Vec<SnapshotStat> {
        let later = self.snapshots.all.range(after.saturating_add(1)..).take(max);
        let stat = |(number, entry): (&u64, &Entry)| SnapshotStat {
            number: *number,
            snapshot: entry.snapshot.clone(),
            own_blocks: self.space.ages.own(entry.root.transaction),
        };
        later.map(stat).collect()
    }

    /// The snapshot with that name.
    pub fn snapshot_named(&self, name: &[u8]) -> Option<&Snapshot> {
        self.snapshots.named(name).map(|(_, entry)| &entry.snapshot)
    }

    /// The snapshot with that number.
    pub fn snapshot_numbered(&self, number: u64) -> Option<&Snapshot> {
        self.snapshots.all.get(&number).map(|entry| &entry.snapshot)
    }

    /// The snapshot in a slot.
    pub fn snapshot_in(&self, slot: u16) -> Option<&Snapshot> {
        self.snapshots.in_slot(slot).map(|(_, entry)| &entry.snapshot)
    }

    /// The transaction that ended with a snapshot.
    pub fn snapshot_transaction(&self, number: u64) -> Option<u64> {
        self.snapshots.all.get(&number).map(|entry| entry.root.transaction)
    }

    /// The slot of the snapshot that ended with a transaction.
    pub(super) fn slot_of(&self, transaction: u64) -> Option<u16> {
        let mut all = self.snapshots.all.values();
        let found = all.find(|entry| entry.root.transaction == transaction);
        found.map(|entry| entry.snapshot.slot)
    }

    /// Whether the inode is one of a snapshot that is not on media yet.
    pub fn is_unpublished_snapshot(&self, ino: InodeId) -> bool {
        let Some((slot, _)) = ino.of_snapshot() else { return false };
        let found = self.snapshots.in_slot(slot);
        found.is_some_and(|(_, entry)| entry.root.transaction > self.tree.published())
    }

    /// The state that the snapshot in a slot is, to be read. None: there is none, or not all of it is on media yet
    /// ([`Volume::snapshot_in`] tells).
    pub fn read_snapshot(&mut self, slot: u16) -> Option<&Volume> {
        let (number, entry) = self.snapshots.in_slot(slot)?;
        let (at, inodes) = (entry.root, entry.snapshot.inodes);
        let found = self.snapshots.opened.iter().position(|(n, _)| *n == number);
        let view = match found {
            Some(at) => self.snapshots.opened.remove(at).1,
            None => Box::new(self.view_snapshot(&at, inodes)?),
        };
        if self.snapshots.opened.len() >= OPENED_MAX {
            self.snapshots.opened.remove(0);
        }
        self.snapshots.opened.push((number, view));
        self.snapshots.opened.last().map(|(_, view)| &***view)
    }

    /// One that was read lately.
    pub fn opened(&self, slot: u16) -> Option<&Volume> {
        let (number, _) = self.snapshots.in_slot(slot)?;
        let found = self.snapshots.opened.iter().find(|(n, _)| *n == number)?;
        Some(&found.1)
    }

    /// The state in which an inode is looked for that may be one of a snapshot, and its number in it. None: the snapshot is not
    /// there, or was not read lately ([`Volume::read_snapshot`]).
    pub fn source(&self, ino: InodeId) -> Option<(&Volume, InodeId)> {
        match ino.of_snapshot() {
            None => Some((self, ino)),
            Some((slot, ino)) => Some((self.opened(slot)?, ino)),
        }
    }

    pub(super) fn view_snapshot(&mut self, at: &SnapshotRoot, inodes: u64) -> Option<View> {
        let root = Root { page: at.page, level: at.level };
        let (tree, pin) = self.tree.view_snapshot(root, at.transaction, VIEW_CACHE_PAGES)?;
        let (page, level, transaction) = (at.page, at.level.into(), at.transaction);
        let stream_seq = StreamSeq(0);
        let root = RootRecord { transaction, page, level, inodes, stream_seq, ..self.root };
        let mut volume = Self::with(self.media.clone(), tree, self.superblock.clone(), root);
        volume.inodes = inodes;
        volume.unplaced = volume.any_unplaced();
        Some(View { volume, _pin: pin })
    }
}
