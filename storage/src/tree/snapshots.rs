//! States of the tree that stay.
//!
//! A snapshot is a root, and the number of the transaction that ended with it: what was written later is no part of it,
//! and what was written until then and dropped later is. So no page knows which snapshots it belongs to, and making one
//! costs nothing: it ends a transaction in the middle of the working one, which goes on under another number and so copies
//! what it changes from then on.
//!
//! A page that a snapshot has and the working state has not hangs on the last snapshot that has it. States follow each
//! other, so the snapshots that have a page are neighbours: when the one on which it hangs is given up, it hangs on the one
//! before if that has it, or is free.

use base::planted::{Bug, planted};
use base::wire::Corrupt;

use super::{Dropped, Fault, Pin, Root, Tree, Visit, read_page};
use crate::format::page::{LEVEL_MAX, Page};

/// A state that stays.
#[derive(Debug)]
pub(super) struct Kept {
    pub root: Root,
    /// Pages that it has, and no later state.
    pages: Vec<Dropped>,
}

impl Tree {
    /// The working state stays: its root, and what it is named by. All that is changed from now on is copied.
    pub fn keep_working(&mut self) -> (Root, u64) {
        let transaction = self.working;
        // Two further, so that the root record of what is sealed next does not lie over the last one.
        self.working += 2;
        if !planted(Bug::SnapshotPagesReused) {
            self.snapshots.insert(transaction, Kept { root: self.root, pages: Vec::new() });
        }
        (self.root, transaction)
    }

    /// The last snapshot that has a page which was dropped.
    pub(super) fn last_with(&mut self, page: Dropped) -> Option<&mut Vec<Dropped>> {
        if page.written >= page.dropped {
            return None;
        }
        let found = self.snapshots.range_mut(page.written..page.dropped).next_back();
        found.map(|(_, kept)| &mut kept.pages)
    }

    /// Whether a transaction is sealed and not published: what it dropped hangs on no snapshot yet.
    pub const fn has_sealed(&self) -> bool {
        self.sealed != self.published
    }

    /// A snapshot is given up: what no other has is free with the working transaction. Nothing is sealed that is not published.
    pub fn give_up(&mut self, transaction: u64) {
        let Some(kept) = self.snapshots.remove(&transaction) else { return };
        self.kept -= kept.pages.len() as u64;
        for page in kept.pages {
            match self.last_with(page) {
                Some(before) => {
                    before.push(page);
                    self.kept += 1;
                }
                None => {
                    self.freed.push(page);
                    self.pending += 1;
                }
            }
        }
    }

    /// A snapshot, to be read from while this tree goes on. None: not all of it is on media yet, or it is none.
    pub fn view_snapshot(
        &mut self,
        root: Root,
        transaction: u64,
        cache_pages: usize,
    ) -> Option<(Self, Pin)> {
        let there = self.snapshots.contains_key(&transaction) && transaction <= self.published;
        there.then(|| self.view_of(root, transaction, cache_pages))
    }

    /// Of pages that only snapshots have, and that are on media, the one at that place among those that hang on a snapshot, or else the next: which snapshot,
    /// the place, the page. (What hangs where changes: some may be passed over, or come twice.)
    pub fn kept_page(&self, (transaction, at): (u64, usize)) -> Option<(u64, usize, u64)> {
        let published = self.snapshots.range(transaction..=self.published.max(transaction));
        published.filter(|(of, _)| **of <= self.published).find_map(|(of, kept)| {
            let at = if *of == transaction { at } else { 0 };
            Some((*of, at, kept.pages.get(at)?.page))
        })
    }

    /// A page that a snapshot has.
    pub fn read_kept(&self, number: u64) -> Result<Page, Fault> {
        read_page(&*self.media, number)
    }

    /// Pages that snapshots have, and the working state has not.
    pub fn kept_pages(&self) -> u64 {
        self.kept
    }

    /// A snapshot found at open, after all that are newer: takes the pages that none of these and the working state have. Shows
    /// the items of such pages.
    pub fn found_snapshot(
        &mut self,
        root: Root,
        transaction: u64,
        visit: Visit<'_>,
    ) -> Result<(), Fault> {
        let mut pages = Vec::new();
        self.take_older((root, transaction), &mut pages, visit)?;
        self.kept += pages.len() as u64;
        self.snapshots.insert(transaction, Kept { root, pages });
        Ok(())
    }

    fn take_older(
        &mut self,
        (at, transaction): (Root, u64),
        kept: &mut Vec<Dropped>,
        visit: Visit<'_>,
    ) -> Result<(), Fault> {
        let number = at.page;
        if number >= self.used.len || at.level > LEVEL_MAX {
            let corrupt = Corrupt::new("tree page", "of a snapshot lies outside the tree segment");
            return Err(Fault::Page { page: number, corrupt });
        }
        if self.used.get(number) {
            return Ok(());
        }
        let page = self.get(number, at.level)?;
        if page.transaction() > transaction {
            let corrupt = Corrupt::new("tree page", "is newer than the snapshot that has it");
            return Err(Fault::Page { page: number, corrupt });
        }
        self.used.set(number);
        kept.push(Dropped { page: number, written: page.transaction(), dropped: transaction + 1 });
        for i in 0..page.count() {
            if at.level == 0 {
                visit(page.key(i), page.value(i))?;
            } else {
                let child = Root { page: page.child(i), level: at.level - 1 };
                self.take_older((child, transaction), kept, visit)?;
            }
        }
        Ok(())
    }

    /// A state that stays as it is meanwhile, to be read.
    pub fn state(&self, root: Root, transaction: u64, cache_pages: usize) -> Self {
        Self::with(self.media.clone(), 0, cache_pages, root, transaction)
    }

    /// The root of the working state.
    pub const fn root(&self) -> Root {
        self.root
    }
}
