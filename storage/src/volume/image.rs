//! A volume with its snapshots as it is sent to a node that joins: state after state, from the oldest snapshot on, each as the items that it
//! has otherwise than the one before, and the content of blocks by the place where they lie.
//!
//! Other than where a volume without snapshots is described by operations, both ends have the same blocks in the same places
//! afterwards: what snapshots share is shared there as well, to the block, so that there is room for the same things on both.
//! All states that are sent are snapshots, the last one as well (the service makes one for it): they do not change while
//! they are read.
//!
//! On the other end nothing of it is on media as a state before all of it is there: pages are written and not led
//! to, and a crash leaves the empty volume that it began with.

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{Epoch, InodeId, StreamSeq, crc32c};

use super::ages::Known;
use super::snapshots::Entry;
use super::{Blocks, Fault, Refusal, View, Volume, corrupt};
use crate::format::item::{ReadClass, Run, Snapshot, SnapshotRoot, kind};
use crate::format::page::{Key, PAGE_BYTES, VALUE_MAX};
use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::format::superblock::RootRecord;
use crate::limits::BLOCK_BYTES;
use crate::media::Segment;
use crate::tree::{Change, SealedTree};

/// Tree pages that are written before more come in.
const DIRTY_MAX: usize = 2048;

/// What was sent of the content.
#[derive(Debug, Default)]
pub struct SentBlocks(Known);

impl SentBlocks {
    /// Those blocks of a run of a file with content that were not sent before.
    pub fn new_of(&mut self, run: &Run) -> Vec<Blocks> {
        if run.unwritten {
            return Vec::new();
        }
        self.0.add(Blocks { arena: run.arena, block: run.block, len: run.len })
    }
}

/// Items, and where to go on.
pub type Changes = (Vec<Change>, Option<Key>);

/// What a root record says of a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ImageEnd {
    /// Inodes in use.
    pub inodes: u64,
    /// Data blocks in use.
    pub blocks: u64,
    /// Realtime nanoseconds of the last operation.
    pub time: u64,
}

fn bad(what: &'static str) -> Fault {
    corrupt(InodeId::NONE)(Corrupt::new("image", what))
}

/// Whether an item is one of a state: not what snapshots there are, nor how far clients are.
const fn is_of_state(key: &Key) -> bool {
    !matches!(key.kind, kind::SNAPSHOT | kind::SNAPSHOT_ROOT | kind::CLIENT if key.ino == 0)
}

impl Volume {
    /// Items from `from` on that a snapshot has otherwise than the one before it (`None`: than an empty volume has them),
    /// and where to go on. None: one of them is not there any more, or not on media yet.
    pub fn snapshot_changes(
        &mut self,
        before: Option<u16>,
        slot: u16,
        from: Key,
        bounds: (usize, usize),
    ) -> Result<Option<Changes>, Fault> {
        for slot in before.into_iter().chain([slot]) {
            if self.read_snapshot(slot).is_none() {
                return Ok(None);
            }
        }
        let Some(state) = self.opened(slot) else { return Ok(None) };
        let earlier = before.and_then(|before| self.opened(before)).map(|state| &state.tree);
        let (mut changes, next) = state.tree.changes(earlier, from, bounds)?;
        changes.retain(|(key, _)| is_of_state(key));
        Ok(Some((changes, next)))
    }

    /// What the end of an image says whose last state is the one published now.
    pub const fn image_end(&self) -> ImageEnd {
        let RootRecord { inodes, blocks, time, .. } = self.root;
        ImageEnd { inodes, blocks, time }
    }

    /// The bytes of blocks by their place, compared with their checksums. None: one of them is not what it should be.
    pub fn blocks_at(&self, blocks: Blocks) -> Result<Option<Vec<u8>>, Fault> {
        let run = Run {
            file: 0,
            arena: blocks.arena,
            block: blocks.block,
            len: blocks.len,
            unwritten: false,
        };
        let mut wrong = Vec::new();
        self.compare(InodeId::NONE, &run, &mut wrong)?;
        if !wrong.is_empty() {
            return Ok(None);
        }
        let (at, len) = (blocks.block * BLOCK_BYTES, (blocks.len * BLOCK_BYTES) as usize);
        let mut bytes = Vec::with_capacity(len);
        self.media.append(Segment::Arena(blocks.arena), at, len, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// An image is about to come into this volume, which is new and empty: what is on media of it stays until the end.
    pub fn begin_image(&mut self) -> View {
        self.view()
    }

    /// An item of the next state, or that it has none.
    pub fn image_item(&mut self, key: Key, value: Option<&[u8]>) -> Result<(), Refusal> {
        self.room_in_tree(false)?;
        if !is_of_state(&key) || value.is_some_and(|value| value.len() > VALUE_MAX) {
            return Err(bad("has an item that no state can have").into());
        }
        if let Some(value) = value.filter(|_| key.ino == 0 && key.kind == kind::ARENA) {
            ReadClass::decode(value).map_err(corrupt(InodeId::NONE))?;
            match u32::try_from(key.item) {
                Ok(arena) if arena < super::ARENAS_MAX => self.ensure_arena(arena)?,
                _ => return Err(bad("has an arena with an impossible number").into()),
            }
        }
        let done = match value {
            Some(value) => self.tree.put(key, value),
            None => self.tree.remove(key).map(drop),
        };
        done.inspect_err(|_| self.condemned.set(true))?;
        Ok(())
    }

    /// The content of blocks.
    pub fn image_blocks(&mut self, arena: u32, block: u64, bytes: &[u8]) -> Result<(), Fault> {
        let segment = Segment::Arena(arena);
        let (blocks, rest) = bytes.as_chunks::<{ BLOCK_BYTES as usize }>();
        let end = block.checked_add(blocks.len() as u64);
        let inside = end.is_some_and(|end| end <= self.superblock.capacity_blocks);
        let known = self.media.size(segment)? >= self.superblock.arena_bytes();
        if !rest.is_empty() || !inside || !known {
            return Err(bad("has blocks that lie in no arena"));
        }
        let (at, len) = (block * BLOCK_BYTES, bytes.len() as u64);
        let Some(base) = self.sums_base() else {
            return Err(bad("cannot come into a volume without checksums"));
        };
        let sums: Vec<u8> = blocks
            .iter()
            .flat_map(|block| Sum::new(crc32c(0, block), StreamSeq(0)).encode())
            .collect();
        let (entry, entries) = (sum_at(base, block), blocks.len() as u64 * SUM_BYTES);
        self.media.back(&[(segment, at, len), (segment, entry, entries)])?;
        self.media.write(segment, at, bytes)?;
        self.media.persist(segment, at, len)?;
        self.media.write(segment, entry, &sums)?;
        Ok(self.media.persist(segment, entry, entries)?)
    }

    /// What has come is a snapshot, with that number.
    pub fn image_state(&mut self, number: u64, snapshot: Snapshot) -> Result<(), Refusal> {
        self.room_in_tree(false)?;
        let taken = |entry: &Entry| {
            entry.snapshot.name == snapshot.name || entry.snapshot.slot == snapshot.slot
        };
        let last = self.snapshots.coming.last_key_value().map_or(0, |(number, _)| *number);
        if number <= last || self.snapshots.coming.values().any(taken) {
            return Err(bad("has its snapshots in no order, or two of the same name").into());
        }
        let (root, transaction) = self.tree.keep_working();
        let root = SnapshotRoot { page: root.page, level: root.level, transaction };
        self.snapshots.coming.insert(number, Entry { snapshot, root });
        Ok(())
    }

    fn back_pages(&self, sealed: &SealedTree) -> Result<(), Fault> {
        let page = PAGE_BYTES as u64;
        let pages = sealed.pages.iter().map(|(number, _)| (Segment::Tree, number * page, page));
        Ok(self.media.back(&pages.collect::<Vec<_>>())?)
    }

    /// Writes pages that have come, and does not lead to them.
    pub fn image_pages(&mut self, all: bool) -> Result<(), Fault> {
        if !all && self.tree.dirty_pages() < DIRTY_MAX {
            return Ok(());
        }
        let sealed = self.tree.seal();
        self.back_pages(&sealed)?;
        sealed.write(&*self.media)?;
        self.media.fence()?;
        self.tree.publish(sealed);
        Ok(())
    }

    /// All has come: it is the state of the stream up to `seq`, on media. The volume is to be opened anew, which judges it.
    pub fn end_image(&mut self, end: &ImageEnd, seq: StreamSeq, epoch: Epoch) -> Result<(), Fault> {
        let coming = std::mem::take(&mut self.snapshots.coming);
        let entries = coming.iter();
        let entries: Vec<_> =
            entries.map(|(n, entry)| (*n, entry.snapshot.encode(), entry.root.encode())).collect();
        for (number, snapshot, root) in entries {
            self.tree.put(Key::new(0, kind::SNAPSHOT, number), &snapshot)?;
            self.tree.put(Key::new(0, kind::SNAPSHOT_ROOT, number), &root)?;
        }
        // What is on media leads to the empty volume, whose root record lies in one of the two slots.
        let odd = |transaction: u64| transaction % 2;
        if odd(self.tree.working()) == odd(self.root.transaction) && !planted(Bug::ImageOverRoot) {
            self.image_pages(true)?;
        }
        let sealed = self.tree.seal();
        self.back_pages(&sealed)?;
        sealed.write(&*self.media)?;
        let root = RootRecord {
            transaction: sealed.transaction(),
            page: sealed.root.page,
            level: u32::from(sealed.root.level),
            pages: self.tree.pages(),
            stream_seq: seq,
            epoch,
            blocks: end.blocks,
            inodes: end.inodes,
            time: end.time,
            uuid: self.superblock.uuid,
            last_inode: self.last_inode,
            snapshots: coming.len() as u64,
        };
        self.flip_root(&root)?;
        // Nothing is done with it any more.
        self.condemned.set(true);
        Ok(())
    }
}
