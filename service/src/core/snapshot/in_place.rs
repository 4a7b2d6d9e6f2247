//! How the cursor of a snapshot goes on for a node that is brought to the head's state in place (`core::reconcile`): its items are the same by then,
//! and of files it comes only to those whose content the node may not have.

use base::InodeId;
use base::planted::{Bug, planted};
use storage::limits::BLOCK_BYTES;
use storage::volume::{View, Volume};

use super::super::Failure;
use super::super::offer::{OFFER_BLOCKS, Offers};
use super::super::reconcile::{Part, Reconciling};
use super::{Dump, Next, S_IFMT, S_IFREG, Stage, Synthetic, vanished};

/// Extents of a file looked at in a step.
const EXTENTS: usize = 64;

impl Dump {
    /// For a node that is brought to this state in place.
    pub(super) fn in_place(view: View) -> Self {
        let reconciling = Some(Box::new(Reconciling::new()));
        Self { stage: Stage::Items, reconciling, ..Self::new(view) }
    }

    /// The next inode whose content the node may not have: something of it was sent, or was changed since the state that the node has.
    pub(super) fn next_in_place(
        &self,
        after: InodeId,
        now: &Volume,
        offers: &Offers,
    ) -> Result<Option<InodeId>, Failure> {
        let (Some(reconciling), Some(since)) = (&self.reconciling, &offers.since) else {
            return Ok(self.view.inodes_after(after, 1)?.first().copied());
        };
        let changed = if now.shares_blocks() {
            self.view.inodes_after(after, 1)?.first().copied()
        } else {
            self.view.next_changed(after, since.transaction)?
        };
        let sent = reconciling.next_sent(&self.view, after)?;
        Ok(changed.into_iter().chain(sent).min())
    }

    /// The next inode, the attributes of which the node has.
    pub(super) fn begin_in_place(&mut self, ino: InodeId) -> Result<(), Failure> {
        self.stage = Stage::Inodes(ino);
        self.passed += 1;
        let Some(record) = self.view.attr(ino)? else { return Ok(()) };
        if record.mode & S_IFMT == S_IFREG && record.blocks > 0 {
            let was_sent = self.reconciling.as_ref().is_none_or(|r| r.was_sent(ino));
            let next = if was_sent { Stage::Content } else { Stage::Unchanged };
            self.stage = next(ino, 0);
        }
        Ok(())
    }

    /// Some of the extents of a file; or the next one. One that shares any of its blocks comes anew: all that share them are to share them there.
    pub(super) fn sharing(
        &mut self,
        (ino, at): (InodeId, u64),
        now: &Volume,
        out: &mut Synthetic,
    ) -> Result<(), Failure> {
        let extents =
            if ino == InodeId::NONE { Vec::new() } else { now.extents(ino, at, EXTENTS)? };
        let shares = extents.iter().any(|extent| extent.shared);
        out.looked += EXTENTS as u64;
        if let (true, Some(reconciling)) = (shares, &mut self.reconciling)
            && !reconciling.was_sent(ino)
        {
            Part::Anew(ino).encode(&mut out.items);
            reconciling.note_sent(ino);
        }
        self.stage = match extents.last() {
            Some(last) if !shares && extents.len() == EXTENTS => {
                Stage::Sharing(ino, last.offset + last.len)
            }
            _ => match self.view.inodes_after(ino, 1)?[..] {
                [next] => Stage::Sharing(next, 0),
                _ => Stage::Inodes(InodeId::NONE),
            },
        };
        Ok(())
    }

    /// Goes on in a file, as long as its content has not changed since the state that the node has.
    pub(super) fn unchanged(
        &mut self,
        (ino, at): (InodeId, u64),
        now: &Volume,
        offers: &Offers,
        out: &mut Synthetic,
    ) -> Result<(), Failure> {
        let Some(record) = self.view.attr(ino)? else { return Err(vanished(ino)) };
        let to = match self.next_content(now, ino, at, record.size)? {
            None => {
                self.stage = Stage::Inodes(ino);
                return Ok(());
            }
            Some(Next::Skip(to) | Next::Reserved { end: to, .. }) => Some(to),
            // (It was told of before all that shares something: that has come to be since.)
            Some(Next::Bytes { extent, .. }) if extent.shared => None,
            Some(Next::Bytes { from, to, .. }) => match &offers.since {
                Some(since) => {
                    let first = from / BLOCK_BYTES;
                    let end = to.div_ceil(BLOCK_BYTES).min(first + OFFER_BLOCKS);
                    let (same, blocks) = self.view.same_since(now, ino, (first, end), since)?;
                    out.looked += blocks;
                    (same || planted(Bug::ReconcileStale)).then_some((first + blocks) * BLOCK_BYTES)
                }
                None => None,
            },
        };
        self.stage = match to {
            Some(to) => Stage::Unchanged(ino, to),
            None => {
                Part::Anew(ino).encode(&mut out.items);
                Stage::Content(ino, 0)
            }
        };
        Ok(())
    }
}
