//! One copy-on-write B+tree of checksummed pages (format::page), reached through [`Media`].
//!
//! What is always true:
//! - Pages of transactions up to `published` are never changed in memory or on media while the
//!   root that reaches them is the one on media. A page is changed in place only if the working
//!   transaction wrote it; else a copy with a new number takes its place.
//! - A page that the working transaction drops, and did not itself write, becomes free when that
//!   transaction's root is durable ([`Tree::publish`]), not before; nor before the last view
//!   ([`Tree::view`]) of a published state that it belongs to is gone, and the last snapshot
//!   (`snapshots`) that it belongs to.
//! - A page says which transaction wrote it. A snapshot ends one within the working transaction: numbers of transactions
//!   that are sealed one after the other differ by an odd number, so that their root records lie in different slots.
//! - Which pages are in use is not on media: opening walks the tree, which also checks all of it
//!   (4 KiB of reading a page; a gigabyte of tree takes about half a second).
//!
//! Removal merges a page that is less than a quarter full with a neighbour if both fit well in
//! one; it never moves single cells between neighbours.

mod cache;
mod changes;
mod scrub;
mod snapshots;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::wire::Corrupt;

pub use cache::{Cache, NumberMap};
pub use changes::Change;
pub use scrub::Looked;

use crate::format::page::{Key, LEVEL_MAX, PAGE_BYTES, PAGE_ROOM, Page};
use crate::media::{Media, MediaError, Segment};

/// Why the tree (or the volume in it) could not be read or changed: never the fault of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Memory could not be reached.
    Media(MediaError),
    /// A page is damaged.
    Page {
        /// Which.
        page: u64,
        /// How.
        corrupt: Corrupt,
    },
    /// An item, superblock or root record is damaged.
    Item {
        /// Inode that it belongs to, 0 for the volume's.
        ino: u64,
        /// How.
        corrupt: Corrupt,
    },
    /// No page is free. Operations leave a reserve, so that this is not met on the way.
    Full,
    /// An earlier fault left the working state incomplete; the volume must be opened anew.
    Condemned,
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Media(e) => e.fmt(f),
            Self::Page { page, corrupt } => write!(f, "page {page}: {corrupt}; run corbel fsck"),
            Self::Item { ino, corrupt } => write!(f, "inode {ino}: {corrupt}; run corbel fsck"),
            Self::Full => f.write_str("the tree has no free page"),
            Self::Condemned => f.write_str("an earlier fault condemned this state; reopen it"),
        }
    }
}

impl core::error::Error for Fault {}

impl From<MediaError> for Fault {
    fn from(e: MediaError) -> Self {
        Self::Media(e)
    }
}

/// Reads and checks one page.
pub fn read_page(media: &dyn Media, number: u64) -> Result<Page, Fault> {
    let mut bytes = [0u8; PAGE_BYTES];
    let Some(at) = number.checked_mul(PAGE_BYTES as u64) else {
        let corrupt = Corrupt::new("tree page", "has an impossible number");
        return Err(Fault::Page { page: number, corrupt });
    };
    media.read(Segment::Tree, at, &mut bytes)?;
    Page::decode(&bytes, number).map_err(|corrupt| Fault::Page { page: number, corrupt })
}

/// Sees the items of a tree in order.
pub type Visit<'a> = &'a mut dyn FnMut(Key, &[u8]) -> Result<(), Fault>;

/// Where the tree begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root {
    /// Page.
    pub page: u64,
    /// Its level.
    pub level: u8,
}

/// The tree: the working state of one transaction on top of the published one.
pub struct Tree {
    media: Arc<dyn Media>,
    cache: RefCell<Cache>,
    /// Pages looked at so far: what operations cost.
    visits: Cell<u64>,
    root: Root,
    used: Bitmap,
    working: u64,
    /// The last transaction that was sealed.
    sealed: u64,
    published: u64,
    /// States that stay, each by the transaction that ended with it.
    snapshots: BTreeMap<u64, snapshots::Kept>,
    /// Pages that these have, and the working state has not.
    kept: u64,
    /// Dropped by the working transaction, written by an earlier one.
    freed: Vec<Dropped>,
    /// Dropped by a published transaction, and part of a state that is viewed.
    held: Vec<Dropped>,
    /// Published transactions that are viewed; each view has its own, so that the count says
    /// whether it lives.
    pins: Vec<Arc<u64>>,
    /// Freed by transactions that are not published (the working one included).
    pending: u64,
    /// Written by the working transaction; may name a page twice or one that was dropped again.
    dirty: Vec<u64>,
}

impl core::fmt::Debug for Tree {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Tree {{ root: {:?}, working: {} }}", self.root, self.working)
    }
}

/// A page that is no part of the working state any more.
#[derive(Clone, Copy, Debug)]
struct Dropped {
    page: u64,
    /// The transaction that wrote it.
    written: u64,
    /// The transaction that dropped it.
    dropped: u64,
}

/// Keeps the pages of a view.
#[derive(Debug)]
pub struct Pin {
    _transaction: Arc<u64>,
}

/// What one transaction did to the tree.
#[derive(Debug)]
pub struct SealedTree {
    /// Its root.
    pub root: Root,
    /// Pages to write.
    pub pages: Vec<(u64, Arc<Page>)>,
    freed: Vec<Dropped>,
    transaction: u64,
}

impl SealedTree {
    /// The number of the transaction.
    pub const fn transaction(&self) -> u64 {
        self.transaction
    }

    /// Writes and persists the pages, without a fence.
    pub fn write(&self, media: &dyn Media) -> Result<(), MediaError> {
        for (i, (number, page)) in self.pages.iter().enumerate() {
            let at = number * PAGE_BYTES as u64;
            media.write(Segment::Tree, at, &page.encode())?;
            if !planted(Bug::PageNotFlushed) || i + 1 < self.pages.len() {
                media.persist(Segment::Tree, at, PAGE_BYTES as u64)?;
            }
        }
        Ok(())
    }
}

/// What insertion into a subtree came to.
struct Grown {
    page: u64,
    split: Option<(Key, u64)>,
}

impl Tree {
    /// An empty tree, not yet on media; its first transaction is 1.
    pub fn new(media: Arc<dyn Media>, pages: u64, cache_pages: usize) -> Result<Self, Fault> {
        let root = Root { page: 0, level: 0 };
        let mut tree = Self::with(media, pages, cache_pages, root, 0);
        tree.root.page = tree.allocate(0)?;
        Ok(tree)
    }

    /// Drops all that is in it. The caller has published what was changed before.
    pub fn clear(&mut self) -> Result<(), Fault> {
        assert!(
            self.working == self.published + 1 && self.freed.is_empty() && self.dirty.is_empty()
        );
        let viewed: BTreeSet<u64> = self.held.iter().map(|dropped| dropped.page).collect();
        let pages = (0..self.used.len).filter(|n| self.used.get(*n) && !viewed.contains(n));
        // When each was written does not matter: who views any of them views a state that is published.
        let (written, dropped) = (0, self.working);
        self.freed = pages.map(|page| Dropped { page, written, dropped }).collect();
        (self.snapshots, self.kept) = (BTreeMap::new(), 0);
        self.pending += self.freed.len() as u64;
        self.root = Root { page: self.allocate(0)?, level: 0 };
        Ok(())
    }

    fn with(media: Arc<dyn Media>, pages: u64, cache: usize, root: Root, published: u64) -> Self {
        Self {
            media,
            cache: RefCell::new(Cache::new(cache)),
            visits: Cell::new(0),
            root,
            used: Bitmap::new(pages),
            working: published + 1,
            sealed: published,
            published,
            snapshots: BTreeMap::new(),
            kept: 0,
            freed: Vec::new(),
            held: Vec::new(),
            pins: Vec::new(),
            pending: 0,
            dirty: Vec::new(),
        }
    }

    /// The state of the published `root`, to be read from while this tree goes on: its pages stay
    /// as long as the pin lives.
    pub fn view(&mut self, root: Root, cache_pages: usize) -> (Self, Pin) {
        self.view_of(root, self.published, cache_pages)
    }

    /// The same of a state that ended with a transaction, and that is there.
    fn view_of(&mut self, root: Root, transaction: u64, cache_pages: usize) -> (Self, Pin) {
        self.end_views();
        let pin = Arc::new(transaction);
        self.pins.push(Arc::clone(&pin));
        let view = Self::with(self.media.clone(), 0, cache_pages, root, transaction);
        (view, Pin { _transaction: pin })
    }

    /// Whether a page belongs to a state that is viewed.
    fn is_viewed(&self, page: Dropped) -> bool {
        let holds = |pin: &Arc<u64>| (page.written..page.dropped).contains(pin.as_ref());
        self.pins.iter().any(holds) && !planted(Bug::ViewReused)
    }

    /// Frees the pages of views that are gone.
    fn end_views(&mut self) {
        let before = self.pins.len();
        self.pins.retain(|pin| Arc::strong_count(pin) > 1);
        if self.pins.len() == before {
            return;
        }
        for page in std::mem::take(&mut self.held) {
            self.release(page);
        }
    }

    /// A page that the published root does not lead to is free, unless a snapshot has it, or it is viewed.
    fn release(&mut self, page: Dropped) {
        if let Some(kept) = self.last_with(page) {
            kept.push(page);
            self.kept += 1;
        } else if self.is_viewed(page) {
            self.held.push(page);
        } else {
            self.used.clear(page.page);
        }
    }

    /// Opens the tree of a published root: checks every page, finds out which are in use, and
    /// shows every item to `visit`.
    pub fn open(
        media: Arc<dyn Media>,
        pages: u64,
        cache_pages: usize,
        root: Root,
        published: u64,
        visit: Visit<'_>,
    ) -> Result<Self, Fault> {
        let mut tree = Self::with(media, pages, cache_pages, root, published);
        tree.walk(root.page, root.level, (Key::MIN, None), visit)?;
        Ok(tree)
    }

    fn walk(
        &mut self,
        number: u64,
        level: u8,
        (low, high): (Key, Option<Key>),
        visit: Visit<'_>,
    ) -> Result<(), Fault> {
        let bad = |what| {
            let corrupt = Corrupt::new("tree page", what);
            Err(Fault::Page { page: number, corrupt })
        };
        if number >= self.used.len || level > LEVEL_MAX {
            return bad("lies outside the tree segment");
        }
        if self.used.get(number) {
            return bad("is referred to twice");
        }
        let page = self.get(number, level)?;
        if page.transaction() > self.published {
            return bad("was written by a transaction after the root");
        }
        self.used.set(number);
        let count = page.count();
        if count > 0 && (page.key(0) < low || high.is_some_and(|h| page.key(count - 1) >= h)) {
            return bad("has keys outside its parent's bounds");
        }
        for i in 0..count {
            if level == 0 {
                visit(page.key(i), page.value(i))?;
            } else {
                let next = if i + 1 < count { Some(page.key(i + 1)) } else { high };
                self.walk(page.child(i), level - 1, (page.key(i), next), visit)?;
            }
        }
        Ok(())
    }

    fn get(&self, number: u64, level: u8) -> Result<Arc<Page>, Fault> {
        self.visits.set(self.visits.get().wrapping_add(1));
        let mut cache = self.cache.borrow_mut();
        let page = match cache.get(number) {
            Some(page) => page,
            None => {
                let page = Arc::new(read_page(&*self.media, number)?);
                cache.insert(number, page.clone(), self.published);
                page
            }
        };
        if page.level() == level {
            return Ok(page);
        }
        let corrupt = Corrupt::new("tree page", "is not of the level that its parent says");
        Err(Fault::Page { page: number, corrupt })
    }

    /// Runs `change` on a page that the working transaction has written.
    fn edit<T>(&mut self, number: u64, change: impl FnOnce(&mut Page) -> T) -> Result<T, Fault> {
        match self.cache.get_mut().edit(number) {
            Some(page) => Ok(change(page)),
            None => Err(Fault::Condemned),
        }
    }

    fn allocate_number(&mut self) -> Result<u64, Fault> {
        let number = self.used.take().ok_or(Fault::Full)?;
        self.dirty.push(number);
        Ok(number)
    }

    fn allocate(&mut self, level: u8) -> Result<u64, Fault> {
        let number = self.allocate_number()?;
        let page = Arc::new(Page::new(number, self.working, level));
        self.cache.get_mut().insert(number, page, self.published);
        Ok(number)
    }

    fn free(&mut self, number: u64, transaction: u64) {
        if transaction == self.working || planted(Bug::PageReused) {
            self.cache.get_mut().remove(number);
            self.used.clear(number);
        } else {
            let dropped = self.working;
            self.freed.push(Dropped { page: number, written: transaction, dropped });
            self.pending += 1;
        }
    }

    /// A page that may be changed in place: this one, or a copy of it.
    fn writable(&mut self, number: u64, level: u8) -> Result<u64, Fault> {
        let page = self.get(number, level)?;
        if page.transaction() == self.working {
            return Ok(number);
        }
        let copy = self.allocate_number()?;
        let mut fresh = page.clone();
        Arc::make_mut(&mut fresh).stamp(copy, self.working);
        self.cache.get_mut().insert(copy, fresh, self.published);
        self.free(number, page.transaction());
        Ok(copy)
    }

    /// The leaf under which `key` lies, and where the next leaf begins.
    fn leaf(&self, key: Key) -> Result<(Arc<Page>, Option<Key>), Fault> {
        let mut bound = None;
        let mut page = self.get(self.root.page, self.root.level)?;
        for level in (0..self.root.level).rev() {
            let i = page.child_of(key);
            if i + 1 < page.count() {
                bound = Some(page.key(i + 1));
            }
            page = self.get(page.child(i), level)?;
        }
        Ok((page, bound))
    }

    /// Pages that were looked at so far, from the cache or from the medium: a measure of what operations have cost that is
    /// the same in every run.
    pub fn visits(&self) -> u64 {
        self.visits.get()
    }

    /// Shows the value of a key.
    pub fn get_with<T>(&self, key: Key, show: impl FnOnce(&[u8]) -> T) -> Result<Option<T>, Fault> {
        let (page, _) = self.leaf(key)?;
        Ok(page.search(key).ok().map(|i| show(page.value(i))))
    }

    /// Whether a key is there.
    pub fn contains(&self, key: Key) -> Result<bool, Fault> {
        Ok(self.get_with(key, |_| ())?.is_some())
    }

    /// Shows the items from `from` to `to` (inclusive) in order, until `show` returns false.
    pub fn scan(
        &self,
        from: Key,
        to: Key,
        show: &mut dyn FnMut(Key, &[u8]) -> bool,
    ) -> Result<(), Fault> {
        let mut from = from;
        loop {
            let (page, bound) = self.leaf(from)?;
            let start = page.search(from).unwrap_or_else(|i| i);
            for i in start..page.count() {
                let key = page.key(i);
                if key > to || !show(key, page.value(i)) {
                    return Ok(());
                }
            }
            match bound {
                Some(next) if next <= to => from = next,
                _ => return Ok(()),
            }
        }
    }

    /// Shows the last item in `from..=to`.
    pub fn last<T>(
        &self,
        from: Key,
        to: Key,
        show: impl FnOnce(Key, &[u8]) -> T,
    ) -> Result<Option<T>, Fault> {
        Ok(self.last_written(from, to, show)?.map(|(shown, _)| shown))
    }

    /// The same, and which transaction wrote the page that has it.
    pub fn last_written<T>(
        &self,
        from: Key,
        to: Key,
        show: impl FnOnce(Key, &[u8]) -> T,
    ) -> Result<Option<(T, u64)>, Fault> {
        let found = self.last_below(self.root, to)?;
        Ok(found.and_then(|(page, i)| {
            let key = page.key(i);
            (key >= from).then(|| (show(key, page.value(i)), page.transaction()))
        }))
    }

    /// The first key from `from` on in a page that a transaction after that one wrote. Of what none has written only the top is read: a
    /// page is written with each that is below it.
    pub fn next_written(&self, from: Key, transaction: u64) -> Result<Option<Key>, Fault> {
        self.next_written_below(self.root, from, transaction)
    }

    fn next_written_below(
        &self,
        root: Root,
        from: Key,
        transaction: u64,
    ) -> Result<Option<Key>, Fault> {
        let page = self.get(root.page, root.level)?;
        if page.transaction() <= transaction {
            return Ok(None);
        }
        if root.level == 0 {
            let at = page.search(from).unwrap_or_else(|at| at);
            return Ok((at < page.count()).then(|| page.key(at)));
        }
        for i in page.child_of(from)..page.count() {
            let child = Root { page: page.child(i), level: root.level - 1 };
            if let Some(found) = self.next_written_below(child, from, transaction)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The last item up to `to` in a subtree. Goes left where a leaf has nothing low enough,
    /// which happens only after removals at a leaf's front.
    fn last_below(&self, root: Root, to: Key) -> Result<Option<(Arc<Page>, usize)>, Fault> {
        let page = self.get(root.page, root.level)?;
        let end = match page.search(to) {
            Ok(i) => i + 1,
            Err(i) => i,
        };
        if root.level == 0 {
            return Ok(end.checked_sub(1).map(|i| (page, i)));
        }
        for i in (0..end).rev() {
            let child = Root { page: page.child(i), level: root.level - 1 };
            if let Some(found) = self.last_below(child, to)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Sets the value of a key.
    pub fn put(&mut self, key: Key, value: &[u8]) -> Result<(), Fault> {
        let grown = self.insert(self.root.page, self.root.level, key, value)?;
        self.root.page = grown.page;
        if let Some((key, right)) = grown.split {
            if self.root.level == LEVEL_MAX {
                return Err(Fault::Full);
            }
            let level = self.root.level + 1;
            let top = self.allocate(level)?;
            self.edit(top, |page| {
                page.insert_at(0, Key::MIN, &grown.page.to_le_bytes());
                page.insert_at(1, key, &right.to_le_bytes());
            })?;
            self.root = Root { page: top, level };
        }
        Ok(())
    }

    fn insert(&mut self, number: u64, level: u8, key: Key, value: &[u8]) -> Result<Grown, Fault> {
        let me = self.writable(number, level)?;
        if level == 0 {
            let at = self.edit(me, |page| match page.search(key) {
                Ok(i) if page.overwrite(i, value) => None,
                Ok(i) => {
                    page.remove_at(i);
                    (!page.insert_at(i, key, value)).then_some(i)
                }
                Err(i) => (!page.insert_at(i, key, value)).then_some(i),
            })?;
            let split = at.map(|at| self.split(me, level, at, key, value)).transpose()?;
            return Ok(Grown { page: me, split });
        }
        let (i, child) = self.edit(me, |page| {
            let i = page.child_of(key);
            (i, page.child(i))
        })?;
        let grown = self.insert(child, level - 1, key, value)?;
        let full = self.edit(me, |page| {
            page.overwrite(i, &grown.page.to_le_bytes());
            let (key, right) = grown.split?;
            (!page.insert_at(i + 1, key, &right.to_le_bytes())).then_some((key, right))
        })?;
        let split = match full {
            Some((key, right)) => Some(self.split(me, level, i + 1, key, &right.to_le_bytes())?),
            None => None,
        };
        Ok(Grown { page: me, split })
    }

    /// Splits a full page while a cell is inserted at `at`; returns the right page and its first
    /// key. At the end of a page only the new cell moves: ascending inserts fill pages whole.
    fn split(
        &mut self,
        me: u64,
        level: u8,
        at: usize,
        key: Key,
        value: &[u8],
    ) -> Result<(Key, u64), Fault> {
        let number = self.allocate(level)?;
        let old = self.get(me, level)?;
        let mut left = Page::new(me, self.working, level);
        let mut right = Page::new(number, self.working, level);
        let half = (old.used() + Page::cell_bytes(value.len())) / 2;
        let mut to_left = true;
        for i in 0..=old.count() {
            for (key, value) in [
                (i == at).then_some((key, value)),
                (i < old.count()).then(|| (old.key(i), old.value(i))),
            ]
            .into_iter()
            .flatten()
            {
                let last = at == old.count() && i == at;
                let fits = if at == old.count() { !last } else { left.used() < half };
                to_left = to_left && fits && left.insert_at(left.count(), key, value);
                if !to_left {
                    let done = right.insert_at(right.count(), key, value);
                    assert!(done, "two pages hold a page and a cell");
                }
            }
        }
        drop(old);
        let first = right.key(0);
        self.edit(me, |page| *page = left)?;
        self.edit(number, |page| *page = right)?;
        Ok((first, number))
    }

    /// Removes a key; false when it was not there.
    pub fn remove(&mut self, key: Key) -> Result<bool, Fault> {
        if !self.contains(key)? {
            return Ok(false);
        }
        self.root.page = self.delete(self.root.page, self.root.level, key)?;
        while self.root.level > 0 {
            let page = self.get(self.root.page, self.root.level)?;
            if page.count() > 1 {
                break;
            }
            let child = Root { page: page.child(0), level: self.root.level - 1 };
            self.free(self.root.page, page.transaction());
            self.root = child;
        }
        Ok(true)
    }

    fn delete(&mut self, number: u64, level: u8, key: Key) -> Result<u64, Fault> {
        let me = self.writable(number, level)?;
        if level == 0 {
            self.edit(me, |page| {
                if let Ok(i) = page.search(key) {
                    page.remove_at(i);
                }
            })?;
            return Ok(me);
        }
        let (i, child) = self.edit(me, |page| {
            let i = page.child_of(key);
            (i, page.child(i))
        })?;
        let child = self.delete(child, level - 1, key)?;
        self.edit(me, |page| page.overwrite(i, &child.to_le_bytes()))?;
        if self.get(child, level - 1)?.used() < PAGE_ROOM / 4 {
            self.merge(me, level, i)?;
        }
        Ok(me)
    }

    /// Merges child `i` of a branch with a neighbour if they fit well in one page.
    fn merge(&mut self, me: u64, level: u8, i: usize) -> Result<(), Fault> {
        let page = self.get(me, level)?;
        if page.count() < 2 {
            return Ok(());
        }
        let l = i.saturating_sub(1);
        let (left, right) = (page.child(l), page.child(l + 1));
        drop(page);
        let (a, b) = (self.get(left, level - 1)?, self.get(right, level - 1)?);
        let both = a.used() + b.used();
        if both > PAGE_ROOM * 3 / 4 && a.count() > 0 && b.count() > 0 {
            return Ok(());
        }
        drop(a);
        let left = self.writable(left, level - 1)?;
        self.edit(left, |page| page.append(&b, 0, b.count()))?;
        self.free(right, b.transaction());
        self.edit(me, |page| {
            page.overwrite(l, &left.to_le_bytes());
            page.remove_at(l + 1);
        })
    }

    /// Ends the working transaction and begins the next.
    pub fn seal(&mut self) -> SealedTree {
        let transaction = self.working;
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.sort_unstable();
        dirty.dedup();
        let cache = self.cache.get_mut();
        let pages = dirty
            .into_iter()
            .filter_map(|n| cache.get(n).map(|page| (n, page)))
            .filter(|(_, page)| page.transaction() > self.sealed)
            .collect();
        self.sealed = transaction;
        self.working += 1;
        SealedTree { root: self.root, pages, freed: std::mem::take(&mut self.freed), transaction }
    }

    /// Tells that a sealed transaction's root is durable: what it dropped is free.
    pub fn publish(&mut self, sealed: SealedTree) {
        assert!(self.is_next(sealed.transaction), "seals are published in order");
        self.published = sealed.transaction;
        self.pending -= sealed.freed.len() as u64;
        self.end_views();
        for page in sealed.freed {
            self.cache.get_mut().remove(page.page);
            self.release(page);
        }
    }

    /// Whether a sealed transaction is one to be published now. (Snapshots pass over pairs of numbers.)
    pub fn is_next(&self, transaction: u64) -> bool {
        transaction > self.published && (transaction - self.published) % 2 == 1
    }

    /// Transaction that the changes belong to.
    pub fn working(&self) -> u64 {
        self.working
    }

    /// Transaction whose root is on media.
    pub fn published(&self) -> u64 {
        self.published
    }

    /// Pages that can be allocated now.
    pub fn free_pages(&self) -> u64 {
        self.used.len - self.used.count
    }

    /// Pages that become free when what is sealed and worked on is published.
    pub fn pending_pages(&self) -> u64 {
        self.pending
    }

    /// Pages that become free when the views of earlier states are gone and something is published.
    pub fn viewed_pages(&self) -> u64 {
        self.held.len() as u64
    }

    /// Pages that the working state consists of.
    pub fn pages(&self) -> u64 {
        self.used.count - self.pending - self.viewed_pages() - self.kept
    }

    /// Pages written by the working transaction (those written and dropped again included).
    pub fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Pages held in DRAM.
    pub fn cached_pages(&self) -> usize {
        self.cache.borrow().held()
    }
}

/// Which pages are in use: a bit each.
#[derive(Debug)]
struct Bitmap {
    words: Vec<u64>,
    len: u64,
    count: u64,
    /// No word before this one has a clear bit.
    hand: usize,
}

impl Bitmap {
    fn new(len: u64) -> Self {
        let words = vec![0; len.div_ceil(64) as usize];
        Self { words, len, count: 0, hand: 0 }
    }

    fn get(&self, n: u64) -> bool {
        self.words[(n / 64) as usize] & (1 << (n % 64)) != 0
    }

    fn set(&mut self, n: u64) {
        self.words[(n / 64) as usize] |= 1 << (n % 64);
        self.count += 1;
    }

    fn clear(&mut self, n: u64) {
        let word = (n / 64) as usize;
        assert!(self.get(n), "a page is freed once");
        self.words[word] &= !(1 << (n % 64));
        self.count -= 1;
        self.hand = self.hand.min(word);
    }

    /// Takes the lowest clear bit.
    fn take(&mut self) -> Option<u64> {
        while let Some(&word) = self.words.get(self.hand) {
            let bit = u64::from((!word).trailing_zeros());
            let n = self.hand as u64 * 64 + bit;
            if bit < 64 && n < self.len {
                self.set(n);
                return Some(n);
            }
            self.hand += 1;
        }
        None
    }
}
