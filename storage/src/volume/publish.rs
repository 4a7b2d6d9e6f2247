//! Two-phase publication: seal ends a transaction, publish puts it on media.

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, Sequence, StreamSeq};

use super::{Blocks, Fault, Volume};
use crate::format::item::kind;
use crate::format::page::{Key, PAGE_BYTES};
use crate::format::superblock::{ROOT_AT, RootRecord};
use crate::media::{Media, MediaError, Segment};
use crate::tree::SealedTree;

/// One step of moving data to where it is published. The order of the steps counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyItem {
    /// Copies bytes.
    Copy {
        /// Where they lie.
        from: (Segment, u64),
        /// Where they go.
        to: (Segment, u64),
        /// How many.
        len: u64,
    },
    /// Makes zeroes.
    Zero {
        /// Where.
        to: (Segment, u64),
        /// How many.
        len: u64,
    },
}

/// Bytes of zeroes written at a time.
const ZEROES: [u8; 4096] = [0; 4096];

/// Takes memory for what copies are about to write to, whoever makes them: the node does, and knows what there is.
pub fn back_copies(media: &dyn Media, copies: &[CopyItem]) -> Result<(), MediaError> {
    let ranges = copies.iter().map(|item| match *item {
        CopyItem::Copy { to, len, .. } | CopyItem::Zero { to, len } => (to.0, to.1, len),
    });
    media.back(&ranges.collect::<Vec<_>>())
}

/// Copies of a run: what is written one after the other, mostly the payloads of a log that goes on.
const RUN: usize = 64;

/// The copies that `copies` begins with and whose targets lie one behind the other: sources, and target.
#[allow(clippy::type_complexity)] // as `Media::copy_run` takes them
fn first_run(copies: &[CopyItem]) -> Option<(Vec<(Segment, u64, u64)>, (Segment, u64))> {
    let mut run: Option<(Vec<_>, (Segment, u64), u64)> = None;
    for item in copies.iter().take(RUN) {
        let CopyItem::Copy { from, to, len } = *item else { break };
        let (sources, begin, end) = run.get_or_insert_with(|| (Vec::new(), to, to.1));
        if to != (begin.0, *end) {
            break;
        }
        sources.push((from.0, from.1, len));
        *end += len;
    }
    run.map(|(sources, to, _)| (sources, to))
}

/// Runs copies in order, and starts their write-back; the caller ends with a fence before it
/// publishes. Memory for them was taken before ([`back_copies`]).
pub fn run_copies(media: &dyn Media, copies: &[CopyItem]) -> Result<(), MediaError> {
    let mut copied = 0;
    for (at, item) in copies.iter().enumerate() {
        let (to, len) = match *item {
            CopyItem::Copy { to, len, .. } => {
                if at >= copied
                    && let Some((run, to)) = first_run(&copies[at..])
                {
                    media.copy_run(&run, to)?;
                    copied = at + run.len();
                }
                (to, len)
            }
            CopyItem::Zero { to, len } => {
                let mut done = 0;
                while done < len {
                    let n = (len - done).min(ZEROES.len() as u64);
                    media.write(to.0, to.1 + done, &ZEROES[..n as usize])?;
                    done += n;
                }
                (to, len)
            }
        };
        let missed = match item {
            CopyItem::Copy { .. } => planted(Bug::CopiesNotFlushed),
            CopyItem::Zero { .. } => planted(Bug::ZeroesNotFlushed),
        };
        if !missed {
            media.persist(to.0, to.1, len)?;
        }
    }
    Ok(())
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
        };
        let copies = std::mem::take(&mut self.copies);
        // Before any is written. (What the copies need is taken with each piece of them: all at once takes long.)
        let page = PAGE_BYTES as u64;
        let pages = tree.pages.iter().map(|(number, _)| (Segment::Tree, number * page, page));
        let backed = self.media.back(&pages.collect::<Vec<_>>());
        backed.inspect_err(|_| self.condemned.set(true))?;
        Ok(Sealed { copies, root, tree, freed: self.space.seal() })
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
        let next = self.tree.published() + 1;
        assert_eq!(sealed.root.transaction, next, "seals are published in order");
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

    fn flip_root(&self, root: &RootRecord) -> Result<(), MediaError> {
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
