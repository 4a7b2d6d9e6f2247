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
//!
//! Arenas alone may have other numbers: whoever has one mapped finds in it what is for its class, before and afterwards.
//!
//! A node that has held the volume before has most of the content, and mostly where it is to lie: all members place blocks by the same
//! rule. So what its arenas hold stays as it is until something else is to lie there, and of what has the right checksums
//! ([`Volume::may_have_blocks`]) it says what it comes to ([`Keyed`]), as with files that are [kept](super::kept); what has been found to
//! be the same is not sent.

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{Epoch, InodeId, StreamSeq, crc32c};

use super::ages::Known;
use super::kept::Keyed;
use super::snapshots::Entry;
use super::{Blocks, Fault, Refusal, View, Volume, corrupt};
use crate::format::item::{ReadClass, Run, Shared, Snapshot, SnapshotRoot, kind};
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

/// The CRC32C of a block as it lies beside it.
fn sum_of(block: &[u8]) -> u32 {
    Sum::new(crc32c(0, block), StreamSeq(0)).crc
}

fn bad(what: &'static str) -> Fault {
    corrupt(InodeId::NONE)(Corrupt::new("image", what))
}

/// Blocks that lie one behind the other in an image, and where bytes are that they may have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Had {
    /// The first of them.
    pub block: u64,
    /// Of each the arena, and the block in it.
    pub from: Vec<(u32, u64)>,
    /// What the bytes come to.
    pub keyed: u64,
}

/// What may be had, and the other blocks: first and number.
pub type MayHave = (Vec<Had>, Vec<(u64, u64)>);

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

    /// An image is about to come into this volume, which is empty: what is on media of it stays until the end.
    pub fn begin_image(&mut self) -> View {
        let same = [super::ARENA_WORLD, super::ARENA_SERVICE];
        self.snapshots.arenas = same.into_iter().map(|arena| (arena, arena)).collect();
        self.snapshots.written = Known::default();
        self.view()
    }

    /// The arena here that an image calls so. Arenas here stay what they were to whoever has mapped them, each for its class.
    fn image_arena(&self, arena: u32) -> Result<u32, Fault> {
        let found = self.snapshots.arenas.get(&arena);
        found.copied().ok_or_else(|| bad("has blocks that lie in no arena"))
    }

    /// An arena of an image.
    fn image_class(&mut self, item: u64, value: &[u8]) -> Result<(), Fault> {
        let class = ReadClass::decode(value).map_err(corrupt(InodeId::NONE))?;
        let number = u32::try_from(item).ok().filter(|number| *number < super::ARENAS_MAX);
        let number = number.ok_or_else(|| bad("has an arena with an impossible number"))?;
        let here = match self.space.arena_of(class) {
            _ if planted(Bug::ImageArenasRenumbered) => {
                self.ensure_arena(number)?;
                self.tree.put(Key::new(0, kind::ARENA, item), value)?;
                number
            }
            Some(here) => here,
            None => {
                let last = self.space.arenas().map(|(arena, _)| arena).max();
                let next = last.map_or(0, |last| last + 1);
                if next >= super::ARENAS_MAX {
                    return Err(bad("has more arenas than there can be"));
                }
                self.add_arena(next, class)?;
                next
            }
        };
        self.snapshots.arenas.insert(number, here);
        Ok(())
    }

    /// An item as it is here: its blocks lie in other arenas.
    fn image_item_here(
        &self,
        key: Key,
        value: Option<&[u8]>,
    ) -> Result<(Key, Option<[u8; 24]>), Fault> {
        match (key.ino, key.kind) {
            (0, kind::SHARED) => {
                let (arena, block) = Shared::place(key.item);
                let arena = u32::try_from(arena).ok().map(|arena| self.image_arena(arena));
                let none = || bad("has blocks that lie in no arena");
                Ok((Shared::key(arena.ok_or_else(none)??, block), None))
            }
            (_, kind::EXTENT) => {
                let run = |value| Run::decode(key.item, value).map_err(corrupt(InodeId(key.ino)));
                let Some(run) = value.map(run).transpose()? else { return Ok((key, None)) };
                let arena = self.image_arena(run.arena)?;
                Ok((key, Some(Run { arena, ..run }.encode())))
            }
            _ => Ok((key, None)),
        }
    }

    /// The snapshots, the newest first and at most so many, to be read when the volume is begun anew.
    pub fn snapshot_views(&mut self, most: usize) -> Vec<(u64, View)> {
        let all = self.snapshots.all.iter().rev().take(most);
        let all: Vec<_> = all.map(|(n, e)| (*n, e.root, e.snapshot.inodes)).collect();
        let view = |(number, root, inodes)| Some((number, self.view_snapshot(&root, inodes)?));
        all.into_iter().filter_map(view).collect()
    }

    /// Whether blocks lie in an arena that there is.
    fn in_arena(&self, blocks: Blocks) -> Result<bool, Fault> {
        let end = blocks.block.checked_add(blocks.len);
        let inside = end.is_some_and(|end| end <= self.superblock.capacity_blocks);
        let size = self.media.size(Segment::Arena(blocks.arena));
        Ok(inside && size.is_ok_and(|size| size >= self.superblock.arena_bytes()))
    }

    /// Of some blocks of an image, which should have these CRC32C, those of which the bytes may be here: where they are to lie, or in the
    /// runs that their file had in a state before, from block `file` on. So many are told of together, with what they come to under a key.
    pub fn may_have_blocks(
        &self,
        at: Blocks,
        crcs: &[u32],
        (runs, file): (&[Run], u64),
        (most, key): (usize, u64),
    ) -> Result<MayHave, Fault> {
        let at = Blocks { arena: self.image_arena(at.arena)?, ..at };
        let Some(base) = self.sums_base().filter(|_| crcs.len() as u64 == at.len) else {
            return Err(bad("has blocks without checksums"));
        };
        if !self.in_arena(at)? {
            return Err(bad("has blocks that lie in no arena"));
        }
        // By what lies beside the blocks: only what may be right is read.
        let mut from = vec![None; crcs.len()];
        for run in runs.iter().filter(|run| !run.unwritten) {
            let run = run.cut(file, file.saturating_add(at.len));
            self.have_sums(base, &run, (run.file - file) as usize, crcs, &mut from)?;
        }
        let there =
            Run { file: 0, arena: at.arena, block: at.block, len: at.len, unwritten: false };
        self.have_sums(base, &there, 0, crcs, &mut from)?;
        let (mut had, mut lacks): (Vec<Had>, Vec<(u64, u64)>) = (Vec::new(), Vec::new());
        let (mut keyed, mut bytes) = (Keyed::new(key), Vec::new());
        for (n, (from, crc)) in from.into_iter().zip(crcs).enumerate() {
            let block = at.block + n as u64;
            bytes.clear();
            let whole = match from {
                Some((arena, block)) => {
                    let (segment, at) = (Segment::Arena(arena), block * BLOCK_BYTES);
                    self.media.append(segment, at, BLOCK_BYTES as usize, &mut bytes)?;
                    sum_of(&bytes) == *crc || planted(Bug::ImageUnread)
                }
                None => false,
            };
            let Some(from) = from.filter(|_| whole) else {
                super::kept::add(&mut lacks, block);
                continue;
            };
            match had.last_mut() {
                Some(last)
                    if last.block + last.from.len() as u64 == block && last.from.len() < most =>
                {
                    last.from.push(from);
                }
                _ => {
                    keyed = Keyed::new(key);
                    had.push(Had { block, from: vec![from], keyed: 0 });
                }
            }
            keyed.add(&bytes);
            if let Some(last) = had.last_mut() {
                last.keyed = keyed.end();
            }
        }
        Ok((had, lacks))
    }

    /// Notes of the blocks of a run, the first of which stands for the one at `first`, those that should have the right checksums.
    fn have_sums(
        &self,
        base: u64,
        run: &Run,
        first: usize,
        crcs: &[u32],
        from: &mut [Option<(u32, u64)>],
    ) -> Result<(), Fault> {
        if !self.in_arena(Blocks::of(run))? {
            return Ok(());
        }
        let sums = self.entries(base, run.arena, run.block, run.len)?;
        for (n, sum) in sums.iter().enumerate() {
            if sum.is_known() && crcs.get(first + n) == Some(&sum.crc) {
                from[first + n] = Some((run.arena, run.block + n as u64));
            }
        }
        Ok(())
    }

    /// Has blocks of an image the content that was found to be theirs. `false`: it is not there any more, since something else has come to lie there.
    pub fn take_blocks(&mut self, arena: u32, had: &Had, key: u64) -> Result<bool, Fault> {
        // (`from` has them as they are called here.)
        let (mut keyed, mut bytes) = (Keyed::new(key), Vec::new());
        for (arena, block) in &had.from {
            let (segment, at) = (Segment::Arena(*arena), block * BLOCK_BYTES);
            self.media.append(segment, at, BLOCK_BYTES as usize, &mut bytes)?;
        }
        keyed.add(&bytes);
        if keyed.end() != had.keyed && !planted(Bug::ImageMovedOn) {
            return Ok(false);
        }
        self.image_blocks(arena, had.block, &bytes)?;
        Ok(true)
    }

    /// The same of blocks that are known not to have changed, and that lie in these runs, which a file had from block `file` on: nothing is read
    /// of what lies where it is to lie. `false`: they do not lie there, or not any more.
    pub fn keep_blocks(
        &mut self,
        at: Blocks,
        crcs: &[u32],
        (runs, file): (&[Run], u64),
    ) -> Result<bool, Fault> {
        let place = Blocks { arena: self.image_arena(at.arena)?, ..at };
        let end = file.saturating_add(at.len);
        if !self.in_arena(place)? || crcs.len() as u64 != at.len {
            return Err(bad("has blocks that lie in no arena"));
        }
        let Some(base) = self.sums_base() else { return Ok(false) };
        let (mut next, mut parts, mut from) = (file, Vec::new(), vec![None; crcs.len()]);
        for run in runs {
            let run = run.cut(file, end);
            let moved = self.snapshots.written.has_any(Blocks::of(&run));
            if run.file != next || run.unwritten || moved && !planted(Bug::ImageMovedOn) {
                return Ok(false);
            }
            self.have_sums(base, &run, (run.file - file) as usize, crcs, &mut from)?;
            next = run.end();
            parts.push((
                run,
                Blocks { block: place.block + (run.file - file), len: run.len, ..place },
            ));
        }
        if next != end || from.contains(&None) {
            return Ok(false);
        }
        // (Read before anything is moved, which may lie where the next is to be read.)
        let mut moves = Vec::new();
        for (run, to) in parts {
            let (from, len) = (Blocks::of(&run), (to.len * BLOCK_BYTES) as usize);
            let (segment, offset) = (Segment::Arena(from.arena), from.block * BLOCK_BYTES);
            if from != to {
                let mut bytes = Vec::with_capacity(len);
                self.media.append(segment, offset, len, &mut bytes)?;
                // (It gets a new checksum where it comes to lie: rot would have a right one.)
                let crcs = &crcs[(to.block - place.block) as usize..][..to.len as usize];
                let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
                let whole = blocks.zip(crcs).all(|(block, crc)| sum_of(block) == *crc);
                if !whole && !planted(Bug::ImageUnread) {
                    return Ok(false);
                }
                moves.push((to, bytes));
                continue;
            }
            // Whoever wrote it last may have been killed before he had written it back.
            self.media.persist(segment, offset, to.len * BLOCK_BYTES)?;
            self.media.persist(segment, sum_at(base, to.block), to.len * SUM_BYTES)?;
        }
        for (to, bytes) in moves {
            self.place_blocks(to, &bytes)?;
        }
        Ok(true)
    }

    /// The arena segments that are none of the volume's: half an image may have left content there.
    pub fn strange_arenas(&self) -> Result<Vec<u32>, Fault> {
        let segments = self.media.segments()?.into_iter();
        let numbers = segments.filter_map(|segment| match segment {
            Segment::Arena(number) => Some(number),
            _ => None,
        });
        Ok(numbers.filter(|number| self.space.class(*number).is_none()).collect())
    }

    /// Blocks that nobody has.
    pub fn free_blocks(&self) -> Vec<Blocks> {
        let all = |(arena, _)| Blocks { arena, block: 0, len: self.superblock.capacity_blocks };
        self.arenas().into_iter().map(all).flat_map(|blocks| self.still_free(blocks)).collect()
    }

    /// An item of the next state, or that it has none.
    pub fn image_item(&mut self, key: Key, value: Option<&[u8]>) -> Result<(), Refusal> {
        self.room_in_tree(false)?;
        if !is_of_state(&key) || value.is_some_and(|value| value.len() > VALUE_MAX) {
            return Err(bad("has an item that no state can have").into());
        }
        if (key.ino, key.kind) == (0, kind::ARENA) {
            let Some(value) = value else { return Err(bad("has an arena no more").into()) };
            let done = self.image_class(key.item, value);
            return Ok(done.inspect_err(|_| self.condemned.set(true))?);
        }
        let (key, here) = self.image_item_here(key, value)?;
        let value = here.as_ref().map(|here| &here[..]).or(value);
        let done = match value {
            Some(value) => self.tree.put(key, value),
            None => self.tree.remove(key).map(drop),
        };
        done.inspect_err(|_| self.condemned.set(true))?;
        Ok(())
    }

    /// The content of blocks.
    pub fn image_blocks(&mut self, arena: u32, block: u64, bytes: &[u8]) -> Result<(), Fault> {
        let len = bytes.len() as u64 / BLOCK_BYTES;
        self.place_blocks(Blocks { arena: self.image_arena(arena)?, block, len }, bytes)
    }

    fn place_blocks(&mut self, place: Blocks, bytes: &[u8]) -> Result<(), Fault> {
        let (segment, block) = (Segment::Arena(place.arena), place.block);
        let (blocks, rest) = bytes.as_chunks::<{ BLOCK_BYTES as usize }>();
        if !rest.is_empty() || place.len == 0 || !self.in_arena(place)? {
            return Err(bad("has blocks that lie in no arena"));
        }
        self.snapshots.written.add(place);
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
