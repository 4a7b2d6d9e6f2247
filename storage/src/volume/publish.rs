//! Two-phase publication: seal ends a transaction, publish puts it on media.

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, Sequence, StreamSeq};

use super::copies::{CopyItem, Summing};
use super::{Blocks, Fault, Volume};
use crate::format::item::kind;
use crate::format::page::{Key, PAGE_BYTES};
use crate::format::superblock::{ROOT_AT, RootRecord};
use crate::media::{Media, MediaError, Segment};
use crate::tree::SealedTree;

/// Which of the working transaction's copies may have been made before.
#[derive(Clone, Copy, Debug)]
pub(super) enum CopiedBefore {
    /// So many of them.
    First(usize),
    /// All, and those of the transactions to come.
    All,
}

impl CopiedBefore {
    /// How many it is of so many, which are sealed now.
    fn take_upto(&mut self, copies: usize) -> usize {
        match self {
            Self::All => copies,
            Self::First(count) => std::mem::take(count).min(copies),
        }
    }
}

/// A transaction that nothing changes any more.
#[must_use = "a sealed transaction must be published, or the volume be opened anew"]
#[derive(Debug)]
pub struct Sealed {
    /// To be run, in order, and made persistent before [`Volume::publish`].
    pub copies: Vec<CopyItem>,
    /// The record that publishing writes.
    pub root: RootRecord,
    tree: SealedTree,
    freed: Vec<Blocks>,
}

impl Sealed {
    /// Writes the tree pages and starts their write-back. `publish` does it too; whoever calls it
    /// before, on another thread, calls [`Volume::flip`] afterwards.
    pub fn write_pages(&self, media: &dyn Media) -> Result<(), MediaError> {
        self.tree.write(media)
    }

    /// Number of tree pages in it.
    pub fn page_count(&self) -> usize {
        self.tree.pages.len()
    }
}

impl Volume {
    /// Ends the working transaction. It holds the stream up to `stream_seq`, and of each client
    /// given the operations up to the sequence given (sequence 0 forgets the client).
    pub fn seal(
        &mut self,
        stream_seq: StreamSeq,
        epoch: Epoch,
        clients: &[(ClientId, Sequence)],
    ) -> Result<Sealed, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        for (client, seq) in clients {
            let key = Key::new(0, kind::CLIENT, client.0);
            let done = match seq.0 {
                0 => self.tree.remove(key).map(|_| ()),
                seq => self.tree.put(key, &seq.to_le_bytes()),
            };
            done.inspect_err(|_| self.condemned.set(true))?;
        }
        self.store_accounts().inspect_err(|_| self.condemned.set(true))?;
        let transaction = self.tree.working();
        let tree = self.tree.seal();
        let ahead = u64::from(planted(Bug::RootAhead));
        let root = RootRecord {
            transaction,
            page: tree.root.page,
            level: u32::from(tree.root.level),
            pages: self.tree.pages(),
            stream_seq: StreamSeq(stream_seq.0 + ahead),
            epoch,
            blocks: self.space.live(),
            inodes: self.inodes,
            time: self.time,
            uuid: self.superblock.uuid,
            last_inode: self.last_inode,
            snapshots: self.snapshots.len() as u64,
        };
        let copies = self.take_copies(root.stream_seq);
        // Before any is written. (What the copies need is taken with each piece of them: all at once takes long.)
        let page = PAGE_BYTES as u64;
        let pages = tree.pages.iter().map(|(number, _)| (Segment::Tree, number * page, page));
        let backed = self.media.back(&pages.collect::<Vec<_>>());
        backed.inspect_err(|_| self.condemned.set(true))?;
        Ok(Sealed { copies, root, tree, freed: self.space.seal() })
    }

    /// The copies of the working transaction, with how they are summed.
    fn take_copies(&mut self, position: StreamSeq) -> Vec<CopyItem> {
        let again = self.copied_before.take_upto(self.copies.len());
        let mut copies = std::mem::take(&mut self.copies);
        let Some(base) = self.sums_base().filter(|_| !copies.is_empty()) else { return copies };
        let summing = |again| CopyItem::Summing(Summing { base, position, again });
        if again < copies.len() {
            copies.insert(again, summing(false));
        }
        if again > 0 {
            copies.insert(0, summing(true));
        }
        copies
    }

    /// What is applied from now on may have been applied before a crash, and some of its copies been made
    /// ([`Summing::again`]).
    pub fn begin_replay(&mut self) {
        self.copied_before = CopiedBefore::All;
    }

    /// What is applied from now on is new.
    pub fn end_replay(&mut self) {
        self.copied_before = CopiedBefore::First(self.copies.len());
    }

    /// Puts the oldest sealed transaction on media: pages, fence, root, fence. The caller has run
    /// its copies and started their write-back. Copies are run in the order of the seals; those of
    /// a later seal may run before an earlier one is published. After a crash, the stream from
    /// `RootRecord::stream_seq` on must be applied again before contents are read.
    ///
    /// Returns the blocks that are free now: the caller may discard long runs of them, as far as they
    /// are free when it does ([`Volume::still_free`]).
    pub fn publish(&mut self, sealed: Sealed) -> Result<Vec<Blocks>, Fault> {
        if planted(Bug::RootBeforePages) {
            self.flip_root(&sealed.root).inspect_err(|_| self.condemned.set(true))?;
        }
        sealed.write_pages(&*self.media).inspect_err(|_| self.condemned.set(true))?;
        self.flip(sealed)
    }

    /// The second half of [`Volume::publish`]: fence, root, fence. A failure condemns the volume:
    /// whether the root is on media is then known only by opening it.
    pub fn flip(&mut self, sealed: Sealed) -> Result<Vec<Blocks>, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        let next = sealed.root.transaction;
        assert!(self.tree.is_next(next), "seals are published in order");
        self.flip_root(&sealed.root).inspect_err(|_| self.condemned.set(true))?;
        self.root = sealed.root;
        self.tree.publish(sealed.tree);
        self.space.publish(&sealed.freed);
        self.shares.published(next);
        Ok(sealed.freed)
    }

    /// Which of these blocks are in nobody's use, neither in the published nor in the working state.
    pub fn still_free(&self, blocks: Blocks) -> Vec<Blocks> {
        self.space.still_free(blocks)
    }

    pub(super) fn flip_root(&self, root: &RootRecord) -> Result<(), MediaError> {
        if !planted(Bug::NoFenceBeforeRoot) {
            self.media.fence()?;
        }
        let slot = if planted(Bug::RootInPlace) { 0 } else { root.transaction % 2 };
        let at = ROOT_AT[slot as usize];
        let bytes = root.encode();
        self.media.write(Segment::Super, at, &bytes)?;
        if !planted(Bug::RootNotFlushed) {
            self.media.persist(Segment::Super, at, bytes.len() as u64)?;
        }
        self.media.fence()
    }
}
