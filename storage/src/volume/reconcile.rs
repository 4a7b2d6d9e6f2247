//! A volume is brought to the state that another one has, in place: of names, attributes and where in files there is content only what
//! differs is told, and the rest is neither sent nor made anew.
//!
//! Both sides say what ranges of their items come to under a key ([`Volume::items_come_to`]). Of a range that comes to something else the
//! items are sent, and put in the place of those that were there ([`Volume::replace_items`]). What of a state is different on every member
//! is no part of it: where blocks lie, which arenas there are, who shares what. So an extent counts by the blocks of the file, and none is
//! sent: the files of a range that is replaced are empty afterwards, and their content comes by operations. The blocks that they
//! had are held back meanwhile, as those of a volume that is begun anew ([`kept`](super::kept)), and are taken over where they are the same.
//!
//! Accounts are counted here, from the inodes that come and go: of what is told of an account only the limits are taken.

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{Epoch, InodeId, StreamSeq};

use super::kept::Keyed;
use super::quota::{AccountId, Amount};
use super::{Blocks, Fault, Refusal, View, Volume, corrupt, reach};
use crate::format::item::{AccountItem, Inode, Run, attr_key, kind};
use crate::format::page::{Key, VALUE_MAX};
use crate::limits::LINK_MAX;

/// Bytes of an item beside its value, about.
const ITEM: usize = 32;
/// So many times as long a range may become where it has nothing but the extents of one file.
const EXTENTS: usize = 32;
/// Items that a range may have where it is compared, or what it has is replaced, and extents that a file may have that is emptied: it is done in
/// one go. Where somebody has more in a range in which another has few, most of what he has is gone, and he had better begin anew.
const ITEMS_MAX: usize = 16 * 1024;

/// Where a range of items ends.
#[derive(Clone, Copy, Debug)]
pub enum RangeEnd {
    /// Before this one; none: with the last of all.
    Before(Option<Key>),
    /// After so many bytes, about.
    After(usize),
}

/// Items by their keys.
pub type Items = Vec<(Key, Vec<u8>)>;

fn bad(what: &'static str) -> Fault {
    corrupt(InodeId::NONE)(Corrupt::new("snapshot", what))
}

/// Whether an item is sent as it is.
const fn travels(key: &Key) -> bool {
    let of_volume = matches!(
        key.kind,
        kind::ORPHAN | kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT | kind::UNPLACED
    );
    let of_inode = matches!(key.kind, kind::ATTR | kind::TARGET | kind::NAME | kind::XATTR);
    if key.ino == 0 { of_volume } else { of_inode }
}

/// What of the value of an item is the same on all members.
fn common<'a>(key: &Key, value: &'a [u8]) -> &'a [u8] {
    match key.kind {
        // The limits; the rest is counted.
        kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT if key.ino == 0 => {
            &value[..value.len().min(16)]
        }
        _ => value,
    }
}

/// What items come to, one after the other.
struct Sum {
    keyed: Keyed,
    bytes: Vec<u8>,
    /// Blocks of a file that lie one behind the other in it, as far as they have come.
    run: Option<(u64, Run)>,
}

impl Sum {
    fn record(&mut self, key: &Key, word: u64, value: &[u8]) {
        self.bytes.extend(key.ino.to_le_bytes());
        self.bytes.extend(key.item.to_le_bytes());
        self.bytes.extend(u32::from(key.kind).to_le_bytes());
        self.bytes.extend((value.len() as u32).to_le_bytes());
        self.bytes.extend(word.to_le_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        if self.bytes.len() >= 64 * 1024 {
            self.keyed.add(&self.bytes);
            self.bytes.clear();
        }
    }

    fn end_run(&mut self) {
        if let Some((ino, run)) = self.run.take().filter(|_| !planted(Bug::ReconcileHoles)) {
            let kind = if run.unwritten { kind::SHARED } else { kind::EXTENT };
            self.record(&Key::new(ino, kind, run.file), run.len, &[]);
        }
    }

    fn extent(&mut self, ino: u64, next: Run) {
        match &mut self.run {
            Some((of, run))
                if *of == ino && run.end() == next.file && run.unwritten == next.unwritten =>
            {
                run.len += next.len;
            }
            _ => {
                self.end_run();
                self.run = Some((ino, next));
            }
        }
    }

    fn end(mut self) -> u64 {
        self.end_run();
        self.keyed.add(&self.bytes);
        self.keyed.end()
    }
}

impl Volume {
    /// What the items from `from` on come to under a key, and where the next range begins, unless that were all. [`Refusal::TooBig`]: the range
    /// has far more than one that is told of.
    pub fn items_come_to(
        &self,
        from: Key,
        end: RangeEnd,
        key: u64,
    ) -> Result<(u64, Option<Key>), Refusal> {
        let mut count = 0;
        let mut sum = Sum { keyed: Keyed::new(key), bytes: Vec::new(), run: None };
        let (mut size, mut last, mut next, mut failed) = (0, from, None, None);
        self.tree().scan(from, Key::MAX, &mut |key, value| {
            let over = match end {
                RangeEnd::Before(end) => end.is_some_and(|end| key >= end),
                RangeEnd::After(most) if key.ino != last.ino || key.ino == 0 => size >= most,
                RangeEnd::After(most) if key.kind == kind::NAME => size >= most,
                RangeEnd::After(most) => size >= EXTENTS * most,
            };
            if over {
                next = Some(key);
                return false;
            }
            last = key;
            count += 1;
            if count > ITEMS_MAX && matches!(end, RangeEnd::Before(_)) {
                return false;
            }
            if key.kind == kind::EXTENT && key.ino != 0 {
                match Run::decode(key.item, value) {
                    Ok(run) => sum.extent(key.ino, run),
                    Err(e) => failed = Some(corrupt(InodeId(key.ino))(e)),
                }
                size += ITEM;
            } else if travels(&key) {
                let value = common(&key, value);
                sum.end_run();
                sum.record(&key, 0, value);
                size += ITEM + value.len();
            } else {
                size += ITEM;
            }
            failed.is_none()
        })?;
        if count > ITEMS_MAX && matches!(end, RangeEnd::Before(_)) {
            return Err(Refusal::TooBig);
        }
        let next = match end {
            RangeEnd::Before(end) => end,
            RangeEnd::After(_) => next,
        };
        failed.map_or_else(|| Ok((sum.end(), next)), |fault| Err(fault.into()))
    }

    /// The items of a range that are sent.
    pub fn items_in(&self, from: Key, end: Option<Key>) -> Result<Items, Fault> {
        let mut found = Vec::new();
        self.tree().scan(from, Key::MAX, &mut |key, value| {
            if end.is_some_and(|end| key >= end) {
                return false;
            }
            if travels(&key) {
                found.push((key, value.to_vec()));
            }
            true
        })?;
        Ok(found)
    }

    /// From now on this is no state of the stream, until all that it shall have is here: it is published so, and nobody's clients are
    /// known any more. The view shows what was published before. The caller has published all that was done.
    pub fn begin_reconciling(&mut self) -> Result<View, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        assert!(self.copies.is_empty(), "what was done is published");
        let view = self.view();
        let (mut clients, of) = (Vec::new(), |client| Key::new(0, kind::CLIENT, client));
        self.tree.scan(of(0), of(u64::MAX), &mut |key, _| {
            clients.push(key);
            true
        })?;
        for key in clients {
            self.tree.remove(key)?;
        }
        self.moved = super::parts::Moved::default();
        let sealed = self.seal(StreamSeq(0), Epoch(0), &[])?;
        self.publish(sealed)?;
        Ok(view)
    }

    /// Puts items in the place of those that a range has. The files in it are empty then; what nobody has any more of their blocks is to
    /// be held back ([`Volume::hold_back`]) when that is published.
    pub fn replace_items(
        &mut self,
        from: Key,
        end: Option<Key>,
        items: &[(Key, &[u8])],
    ) -> Result<Vec<Blocks>, Refusal> {
        if self.condemned.get() {
            return Err(Fault::Condemned.into());
        }
        let within = |key: &Key| *key >= from && end.is_none_or(|end| *key < end);
        if !items.iter().all(|(key, value)| within(key) && travels(key) && value.len() <= VALUE_MAX)
            || !items.is_sorted_by(|a, b| a.0 < b.0)
        {
            return Err(bad("has items that it cannot have").into());
        }
        for (key, value) in items {
            check(key, value)?;
        }
        // (It has no more than that.)
        self.items_come_to(from, RangeEnd::Before(end), 0)?;
        let old = self.items_in(from, end)?;
        let files = self.files_within(from, end)?;
        self.can_empty(&files, old.len() + items.len())?;
        let freed = self.space.freed().len();
        let done = self.replace(&files, &old, items);
        done.inspect_err(|_| self.condemned.set(true))?;
        Ok(self.space.freed()[freed..].to_vec())
    }

    fn replace(
        &mut self,
        files: &[InodeId],
        old: &Items,
        items: &[(Key, &[u8])],
    ) -> Result<(), Fault> {
        for ino in files {
            self.empty_of_content(*ino)?;
        }
        let mut new = items.iter().peekable();
        for (key, _) in old {
            while let Some((key, value)) = new.next_if(|(next, _)| next < key) {
                self.put_told(*key, Some(value))?;
            }
            let same = new.next_if(|(next, _)| next == key);
            if same.is_some() || !planted(Bug::ReconcileKeeps) {
                self.put_told(*key, same.map(|(_, value)| *value))?;
            }
        }
        new.try_for_each(|(key, value)| self.put_told(*key, Some(value)))
    }

    /// A file is empty afterwards, whatever its size; what nobody has any more as with [`Volume::replace_items`], and what is too much at once.
    pub fn empty_file(&mut self, ino: InodeId) -> Result<Vec<Blocks>, Refusal> {
        self.need_file(ino)?;
        self.can_empty(&[ino], 0)?;
        let freed = self.space.freed().len();
        let done = self.empty_of_content(ino);
        done.inspect_err(|_| self.condemned.set(true))?;
        Ok(self.space.freed()[freed..].to_vec())
    }

    /// Whether the tree has pages to take all content from files, and to change so many items beside that.
    fn can_empty(&self, files: &[InodeId], items: usize) -> Result<(), Refusal> {
        let (mut changes, mut shared) = (items + files.len(), 0);
        for ino in files {
            let runs = self.runs(*ino, 0, u64::MAX, ITEMS_MAX + 1)?;
            if runs.len() > ITEMS_MAX {
                return Err(Refusal::TooBig);
            }
            changes += runs.len();
            shared += self.counts(&runs, 0, u64::MAX)?;
        }
        self.can_store(changes as u64, shared)
    }

    fn empty_of_content(&mut self, ino: InodeId) -> Result<(), Fault> {
        let Some(mut inode) = self.inode(ino)? else { return Ok(()) };
        let held = inode.weight();
        inode.blocks -= self.unmap(ino, 0, u64::MAX)?;
        self.moved.forget(ino);
        self.account_change(&inode, held);
        self.put_inode(ino, &inode)
    }

    /// The files that have an item in a range.
    fn files_within(&self, from: Key, end: Option<Key>) -> Result<Vec<InodeId>, Fault> {
        let (mut files, mut failed) = (Vec::new(), None);
        let first = InodeId(from.ino);
        if from > attr_key(first)
            && from.ino != 0
            && self.inode(first)?.is_some_and(|inode| inode.is_file())
        {
            files.push(first);
        }
        self.tree.scan(from, Key::MAX, &mut |key, value| {
            if end.is_some_and(|end| key >= end) {
                return false;
            }
            if key.ino != 0 && key.kind == kind::ATTR {
                match Inode::decode(value) {
                    Ok(inode) if inode.is_file() => files.push(InodeId(key.ino)),
                    Ok(_) => {}
                    Err(e) => failed = Some(corrupt(InodeId(key.ino))(e)),
                }
            }
            failed.is_none()
        })?;
        failed.map_or(Ok(files), Err)
    }

    /// An item is this now, or is gone.
    fn put_told(&mut self, key: Key, value: Option<&[u8]>) -> Result<(), Fault> {
        let ino = InodeId(key.ino);
        match (key.ino, key.kind) {
            (0, kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT) => {
                let limit = value.map(AccountItem::decode).transpose().map_err(corrupt(ino))?;
                let id = AccountId::from_parts(key.kind - kind::USER_ACCOUNT + 1, key.item);
                let id = id.ok_or_else(|| bad("has an account of nobody"))?;
                self.limit_account(id, limit.map_or(Amount::default(), |item| item.limit))
            }
            (0, kind::UNPLACED) => {
                let before = self.tree.contains(key)?;
                self.unplaced = self.unplaced + u64::from(value.is_some()) - u64::from(before);
                self.put_or_remove(key, value)
            }
            (_, kind::ATTR) => {
                let before = self.inode(ino)?;
                if let Some(before) = &before {
                    self.account_inode(before, false);
                }
                self.inodes -= u64::from(before.is_some());
                let Some(value) = value else { return self.put_or_remove(key, None) };
                let told = Inode::decode(value).map_err(corrupt(ino))?;
                // Its content is still to come.
                let blocks = before.map_or(0, |before| before.blocks);
                let inode = Inode { blocks, ..told };
                self.account_inode(&inode, true);
                self.inodes += 1;
                self.put_inode(ino, &inode)
            }
            _ => self.put_or_remove(key, value),
        }
    }

    fn put_or_remove(&mut self, key: Key, value: Option<&[u8]>) -> Result<(), Fault> {
        match value {
            Some(value) => self.tree.put(key, value),
            None => self.tree.remove(key).map(drop),
        }
    }

    /// Blocks that were given up, and that nobody has by now, are held back.
    pub fn hold_back(&mut self, given_up: &[Blocks]) {
        for blocks in given_up {
            self.space.hold(*blocks);
        }
    }
}

/// What can be said of an item by itself.
fn check(key: &Key, value: &[u8]) -> Result<(), Fault> {
    let ino = InodeId(key.ino);
    match key.kind {
        kind::ATTR => {
            let inode = Inode::decode(value).map_err(corrupt(ino))?;
            let counts = inode.nlink <= 2 * LINK_MAX && inode.entries <= u64::MAX / 2;
            if counts && key.item == 0 {
                Ok(())
            } else {
                Err(bad("has attributes that nothing can have"))
            }
        }
        kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT => {
            AccountItem::decode(value).map(drop).map_err(corrupt(ino))
        }
        kind::UNPLACED => reach::decode(value).map(drop).map_err(corrupt(InodeId(key.item))),
        kind::NAME => crate::format::item::decode_name(value).map(drop).map_err(corrupt(ino)),
        _ => Ok(()),
    }
}
