//! Pages of the device in memory, and which of their sectors count. No more than so many bytes; what is not dirty and not
//! in use goes first if it was used longest ago.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::planted::{Bug, planted};

use crate::device::SECTOR;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Sectors of a page.
pub const SECTORS: u64 = PAGE / SECTOR;

/// A page.
#[derive(Debug)]
pub struct Page {
    bytes: Box<[u8]>,
    /// Sectors that hold what the device holds, or newer.
    pub valid: u8,
    /// Sectors that the device does not have yet.
    pub dirty: u8,
    /// Sectors on their way to the device, in `writes` requests.
    pub writing: u8,
    /// Requests that carry them.
    pub writes: u32,
    /// Requests in flight that made sectors of it valid.
    pub pins: u32,
    /// The flush before which its oldest dirty sector was written.
    pub epoch: u64,
    /// It was read ahead, and nobody has read it yet.
    ahead: bool,
    /// The epoch under which it is listed among those that may be written back; 0: it is not.
    listed: u64,
    stamp: u64,
}

/// The pages.
#[derive(Debug, Default)]
pub struct Cache {
    pages: HashMap<u64, Page>,
    /// Pages that may go, by when they were used.
    idle: BTreeMap<u64, u64>,
    dirty: BTreeSet<u64>,
    /// Epoch and number of those of them of which nothing is being written: what is owed longest comes first.
    ready: BTreeSet<(u64, u64)>,
    clock: u64,
    pages_max: usize,
    /// Pages that were read ahead: all, those that somebody has read since, and those that went before anybody did.
    ahead: (u64, u64, u64),
}

/// Bits of the sectors `from..to` of a page.
pub fn mask(from: u64, to: u64) -> u8 {
    (((1u16 << (to - from)) - 1) << from) as u8
}

/// Parts of a range of bytes by page: the page's number, its sectors `from..to`, and where they lie in the range. The range
/// begins and ends at sectors.
pub fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64, u64, usize)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let page = at / PAGE;
        let stop = end.min((page + 1) * PAGE);
        let part =
            (page, at % PAGE / SECTOR, (stop - page * PAGE) / SECTOR, (at - offset) as usize);
        at = stop;
        Some(part)
    })
}

/// Runs of set bits: `(from, to)` in sectors.
pub fn runs(bits: u8) -> impl Iterator<Item = (u64, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let set = |i: u64| bits & (1 << i) != 0;
        let from = (at..SECTORS).find(|i| set(*i))?;
        let to = (from..SECTORS).find(|i| !set(*i)).unwrap_or(SECTORS);
        at = to;
        Some((from, to))
    })
}

impl Cache {
    /// An empty one.
    pub fn new(bytes: u64) -> Self {
        let pages_max = usize::try_from(bytes / PAGE).unwrap_or(usize::MAX);
        Self { pages_max, ..Self::default() }
    }

    /// Most pages.
    pub fn pages_max(&self) -> usize {
        self.pages_max
    }

    /// Pages now.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// A page.
    pub fn get(&self, page: u64) -> Option<&Page> {
        self.pages.get(&page)
    }

    /// Pages with dirty sectors, in order.
    pub fn dirty(&self) -> &BTreeSet<u64> {
        &self.dirty
    }

    /// Of the pages that may be written back, the one that has waited for the most flushes, if that is no later than an epoch.
    pub fn oldest(&self, up_to: u64) -> Option<u64> {
        if planted(Bug::FlushStarves) {
            return self.dirty.iter().copied().find(|page| self.may_be_written(*page, u64::MAX));
        }
        self.ready.first().filter(|(epoch, _)| *epoch <= up_to).map(|(_, page)| *page)
    }

    /// The epoch of the oldest dirty bytes of which nothing is on its way to the device.
    pub fn oldest_epoch(&self) -> Option<u64> {
        self.ready.first().map(|(epoch, _)| *epoch)
    }

    /// Whether a page is dirty since an epoch no later than that, and nothing of it is being written.
    pub fn may_be_written(&self, page: u64, up_to: u64) -> bool {
        self.pages.get(&page).is_some_and(|page| page.listed != 0 && page.listed <= up_to)
    }

    /// Whether that many more pages can be had.
    pub fn has_room(&self, more: usize) -> bool {
        self.pages.len() + more <= self.pages_max + self.idle.len()
    }

    /// The page, made if it is not there; `None`: there is no room.
    fn make(&mut self, number: u64) -> Option<&mut Page> {
        if !self.pages.contains_key(&number) {
            if self.pages.len() >= self.pages_max {
                let (_, oldest) = self.idle.pop_first()?;
                self.remove(oldest);
            }
            let bytes = vec![0; PAGE as usize].into_boxed_slice();
            let page = Page {
                bytes,
                valid: 0,
                dirty: 0,
                writing: 0,
                writes: 0,
                pins: 0,
                epoch: 0,
                ahead: false,
                listed: 0,
                stamp: 0,
            };
            self.pages.insert(number, page);
        }
        self.pages.get_mut(&number)
    }

    fn remove(&mut self, number: u64) {
        if self.pages.remove(&number).is_some_and(|page| page.ahead) {
            self.ahead.2 += 1;
        }
    }

    /// A page was read ahead; somebody has asked for it meanwhile, or nobody has.
    pub fn came_ahead(&mut self, number: u64, asked_for: bool) {
        let Some(page) = self.pages.get_mut(&number) else { return };
        self.ahead.0 += 1;
        self.ahead.1 += u64::from(asked_for);
        page.ahead = !asked_for;
    }

    /// Pages that were read ahead, those of them that somebody has read since, and those that went before anybody did.
    pub fn ahead(&self) -> (u64, u64, u64) {
        self.ahead
    }

    /// Keeps the lists in step with a page that was changed or used.
    fn settle(&mut self, number: u64) {
        self.clock += 1;
        let Some(page) = self.pages.get_mut(&number) else { return };
        self.idle.remove(&page.stamp);
        if page.dirty != 0 {
            self.dirty.insert(number);
        } else {
            self.dirty.remove(&number);
        }
        let idle = page.writes == 0 || planted(Bug::PageWrittenTwice);
        let listed = if page.dirty != 0 && idle { page.epoch } else { 0 };
        if listed != page.listed {
            self.ready.remove(&(page.listed, number));
            if listed != 0 {
                self.ready.insert((listed, number));
            }
            page.listed = listed;
        }
        if page.dirty | page.writing == 0 && page.pins == 0 && page.writes == 0 {
            if page.valid == 0 {
                self.remove(number);
                return;
            }
            page.stamp = self.clock;
            self.idle.insert(self.clock, number);
        } else {
            page.stamp = 0;
        }
    }

    /// Changes a page that is there.
    pub fn change<T>(&mut self, number: u64, how: impl FnOnce(&mut Page) -> T) -> Option<T> {
        let result = self.pages.get_mut(&number).map(how);
        if result.is_some() {
            self.settle(number);
        }
        result
    }

    /// Copies valid sectors out and says which of the wanted ones are missing.
    pub fn read(&mut self, number: u64, from: u64, to: u64, target: &mut [u8]) -> u8 {
        let wanted = mask(from, to);
        let Some(page) = self.pages.get_mut(&number) else { return wanted };
        if page.valid & wanted != 0 && std::mem::take(&mut page.ahead) {
            self.ahead.1 += 1;
        }
        for (a, b) in runs(page.valid & wanted) {
            let source = &page.bytes[(a * SECTOR) as usize..(b * SECTOR) as usize];
            let at = ((a - from) * SECTOR) as usize;
            target[at..at + source.len()].copy_from_slice(source);
        }
        let missing = wanted & !page.valid;
        if page.stamp != 0 {
            self.settle(number);
        }
        missing
    }

    /// Puts sectors in, from `from` on. False: there is no room.
    pub fn put(
        &mut self,
        number: u64,
        from: u64,
        data: &[u8],
        how: impl FnOnce(&mut Page),
    ) -> bool {
        let bits = mask(from, from + data.len() as u64 / SECTOR);
        let Some(page) = self.make(number) else { return false };
        let at = (from * SECTOR) as usize;
        page.bytes[at..at + data.len()].copy_from_slice(data);
        page.valid |= bits;
        how(page);
        self.settle(number);
        true
    }

    /// Puts what the device holds into sectors that hold nothing yet.
    pub fn fill(&mut self, number: u64, from: u64, data: &[u8]) {
        let bits = mask(from, from + data.len() as u64 / SECTOR);
        let Some(page) = self.make(number) else { return };
        let missing = bits & !page.valid;
        for (a, b) in runs(missing) {
            let at = ((a - from) * SECTOR) as usize;
            let target = &mut page.bytes[(a * SECTOR) as usize..(b * SECTOR) as usize];
            target.copy_from_slice(&data[at..at + target.len()]);
        }
        page.valid |= missing;
        self.settle(number);
    }

    /// The bytes of sectors.
    pub fn bytes(&self, number: u64, from: u64, to: u64) -> &[u8] {
        let range = (from * SECTOR) as usize..(to * SECTOR) as usize;
        self.pages.get(&number).map_or(&[], |page| &page.bytes[range])
    }
}
