//! Reads pages from the media although they are in DRAM, and mends there what is rotten from what is here.

use std::collections::BTreeSet;

use base::wire::Corrupt;

use super::{Fault, Root, Tree, read_page};
use crate::format::page::PAGE_BYTES;
use crate::media::Segment;

/// What became of a page that was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Looked {
    /// It is in no published state, or on its way there.
    Unused,
    /// As it should be.
    Right,
    /// It was not, and is again: written from DRAM, and read back.
    Mended,
    /// It was not, and what was written did not stay.
    Failed,
    /// It is rotten, and not in DRAM: what it held is known to nobody here, if it is in use at all ([`Tree::judge`]).
    Doubtful,
}

impl Tree {
    /// Numbers of pages that there may be.
    pub fn numbers(&self) -> u64 {
        self.used.len
    }

    /// Whether a page is in use: right after the tree was opened, in the published state.
    pub fn is_used(&self, number: u64) -> bool {
        number < self.used.len && self.used.get(number)
    }

    /// Looks at a page on the media.
    pub fn look_at(&self, number: u64) -> Result<Looked, Fault> {
        if number >= self.used.len || !self.used.get(number) {
            return Ok(Looked::Unused);
        }
        let here = self.cache.borrow_mut().get(number);
        if here.as_ref().is_some_and(|page| page.transaction() > self.published) {
            return Ok(Looked::Unused);
        }
        match (read_page(&*self.media, number), &here) {
            (Ok(found), None) => return Ok(self.is_plausible(found.transaction())),
            (Ok(found), Some(here)) if found.encode() == here.encode() => return Ok(Looked::Right),
            // Older than it should be, or no page.
            (Ok(_) | Err(Fault::Page { .. }), _) => {}
            (Err(other), _) => return Err(other),
        }
        let Some(here) = here else { return Ok(Looked::Doubtful) };
        let (at, bytes) = (number * PAGE_BYTES as u64, here.encode());
        self.media.write(Segment::Tree, at, &bytes)?;
        self.media.persist(Segment::Tree, at, PAGE_BYTES as u64)?;
        self.media.fence()?;
        let mended = read_page(&*self.media, number).is_ok_and(|page| page.encode() == bytes);
        Ok(if mended { Looked::Mended } else { Looked::Failed })
    }

    const fn is_plausible(&self, transaction: u64) -> Looked {
        if transaction > self.published { Looked::Unused } else { Looked::Right }
    }

    /// Judges pages that were [`Looked::Doubtful`], by one walk of the inner pages for all of them. One that is in use, and rotten still, is a fault:
    /// what it held is known to nobody here. Others were dropped lately: they count as used for a while, and nobody reads them.
    pub fn judge(&self, doubtful: &BTreeSet<u64>) -> Result<(), Fault> {
        let mut rotten = BTreeSet::new();
        for &number in doubtful {
            if self.look_at(number)? == Looked::Doubtful {
                rotten.insert(number);
            }
        }
        let mut found = None;
        for root in self.snapshots.values().map(|kept| kept.root).chain([self.root]) {
            if found.is_none() && !rotten.is_empty() {
                found = self.leads_to(root, &rotten)?;
            }
        }
        let Some(page) = found else { return Ok(()) };
        let corrupt = match read_page(&*self.media, page) {
            Err(Fault::Page { corrupt, .. }) => corrupt,
            Err(other) => return Err(other),
            Ok(_) => Corrupt::new("tree page", "is now this, now that"),
        };
        Err(Fault::Page { page, corrupt })
    }

    /// One of these pages that belongs to the state with that root.
    fn leads_to(&self, from: Root, numbers: &BTreeSet<u64>) -> Result<Option<u64>, Fault> {
        if numbers.contains(&from.page) {
            return Ok(Some(from.page));
        }
        if from.level == 0 {
            return Ok(None);
        }
        let page = self.get(from.page, from.level)?;
        for i in 0..page.count() {
            let child = Root { page: page.child(i), level: from.level - 1 };
            if numbers.contains(&child.page) {
                return Ok(Some(child.page));
            }
            // Leaves need not be read for that.
            if child.level > 0
                && let Some(found) = self.leads_to(child, numbers)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}
