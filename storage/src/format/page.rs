//! A page of the tree: 4 KiB of sorted cells.
//!
//! ```text
//! offset  size  field
//!      0     4  magic        "CBTP"
//!      4     4  checksum     CRC32C of bytes 8..4096
//!      8     2  version      1
//!     10     1  level        0: leaf; its children are exactly one level below
//!     11     1  reserved     zero
//!     12     2  count        cells
//!     14     2  heap         offset of the lowest cell; the cells fill heap..4096 without gaps
//!     16     8  number       of this page: defends against misdirected writes
//!     24     8  transaction  that wrote the page: tells pages that may still change
//!     32  2 * count  slots   offset of each cell, in the order of the keys
//!
//! cell: inode u64, kind u8, item u64 (the key), length u16, value
//! ```
//!
//! In a leaf the value is the item's (format::item). In a branch it is a page number (u64): that
//! child holds the keys from this cell's key up to the next cell's; the first cell of a branch has
//! the key of the parent's cell (the lowest key of all in the leftmost pages).

use alloc::vec::Vec;

use base::crc32c;

use super::{Corrupt, Reader};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Longest value: four cells always fit a page, so that a split always makes room.
pub const VALUE_MAX: usize = 960;
/// Highest level of a page: with two children a page it would already hold 2^16 leaves.
pub const LEVEL_MAX: u8 = 16;

const HEAD: usize = 32;
const CELL_HEAD: usize = 19;
const NAME: &str = "tree page";

/// Bytes for slots and cells.
pub const PAGE_ROOM: usize = PAGE_BYTES - HEAD;

/// Key of an item: inode, kind, item, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Key {
    /// Inode number; 0 for what belongs to the volume.
    pub ino: u64,
    /// Kind of item.
    pub kind: u8,
    /// Which one.
    pub item: u64,
}

impl Key {
    /// The lowest key.
    pub const MIN: Key = Key { ino: 0, kind: 0, item: 0 };
    /// The highest key.
    pub const MAX: Key = Key { ino: u64::MAX, kind: u8::MAX, item: u64::MAX };

    /// Composes a key.
    pub const fn new(ino: u64, kind: u8, item: u64) -> Self {
        Self { ino, kind, item }
    }

    /// The key after this one; None after the highest.
    pub fn next(self) -> Option<Key> {
        if let Some(item) = self.item.checked_add(1) {
            return Some(Key { item, ..self });
        }
        if let Some(kind) = self.kind.checked_add(1) {
            return Some(Key { kind, item: 0, ..self });
        }
        Some(Key { ino: self.ino.checked_add(1)?, kind: 0, item: 0 })
    }
}

/// A page whose structure has been checked: every slot and cell lies inside.
#[derive(Clone)]
pub struct Page {
    bytes: [u8; PAGE_BYTES],
}

impl core::fmt::Debug for Page {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (number, level, count) = (self.number(), self.level(), self.count());
        write!(f, "Page {{ number: {number}, level: {level}, count: {count} }}")
    }
}

impl Page {
    /// An empty page.
    pub fn new(number: u64, transaction: u64, level: u8) -> Self {
        let mut page = Self { bytes: [0; PAGE_BYTES] };
        page.bytes[0..4].copy_from_slice(b"CBTP");
        page.bytes[8] = 1;
        page.bytes[10] = level;
        page.put16(14, PAGE_BYTES);
        page.stamp(number, transaction);
        page
    }

    /// Gives the page another number and transaction (a copy on write).
    pub fn stamp(&mut self, number: u64, transaction: u64) {
        self.bytes[16..24].copy_from_slice(&number.to_le_bytes());
        self.bytes[24..32].copy_from_slice(&transaction.to_le_bytes());
    }

    /// The bytes for media: checksum filled in, unused room zero.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut bytes = self.bytes;
        bytes[HEAD + 2 * self.count()..self.heap()].fill(0);
        let crc = crc32c(0, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks a page that shall have this number.
    pub fn decode(bytes: &[u8], number: u64) -> Result<Self, Corrupt> {
        let bad = |what| Err(Corrupt::new(NAME, what));
        let mut page = Self { bytes: [0; PAGE_BYTES] };
        page.bytes.copy_from_slice(Reader::new(NAME, bytes).bytes(PAGE_BYTES)?);
        if &page.bytes[0..4] != b"CBTP" {
            return bad("does not begin with its magic");
        }
        if page.get16(8) != 1 {
            return bad("has an unknown version");
        }
        if page.get32(4) != crc32c(0, &page.bytes[8..]) {
            return bad("fails its checksum");
        }
        if page.number() != number {
            return bad("is a page of another number");
        }
        if page.bytes[11] != 0 || page.level() > LEVEL_MAX {
            return bad("has a level over the limit");
        }
        page.check_cells()?;
        Ok(page)
    }

    /// Cells inside the page, without gap or overlap, keys ascending, values of legal length.
    fn check_cells(&self) -> Result<(), Corrupt> {
        let bad = |what| Err(Corrupt::new(NAME, what));
        let (count, heap) = (self.count(), self.heap());
        if heap > PAGE_BYTES || HEAD + 2 * count > heap {
            return bad("has more cells than room");
        }
        let mut spans = Vec::with_capacity(count);
        for i in 0..count {
            let at = self.slot(i);
            if at < heap || at + CELL_HEAD > PAGE_BYTES {
                return bad("has a cell outside");
            }
            let len = self.get16(at + 17);
            if len > VALUE_MAX || (self.level() > 0 && len != 8) {
                return bad("has a value of impossible length");
            }
            spans.push((at, CELL_HEAD + len));
            if i > 0 && self.key(i - 1) >= self.key(i) {
                return bad("has keys out of order");
            }
        }
        spans.sort_unstable();
        let mut end = heap;
        for (at, len) in spans {
            if at != end {
                return bad("has cells that overlap or leave gaps");
            }
            end += len;
        }
        if end != PAGE_BYTES {
            return bad("has cells that do not fill its heap");
        }
        if self.level() > 0 && count == 0 {
            return bad("is a branch without children");
        }
        Ok(())
    }

    fn get16(&self, at: usize) -> usize {
        usize::from(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
    }

    fn put16(&mut self, at: usize, value: usize) {
        self.bytes[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
    }

    fn get32(&self, at: usize) -> u32 {
        let mut w = [0; 4];
        w.copy_from_slice(&self.bytes[at..at + 4]);
        u32::from_le_bytes(w)
    }

    fn get64(&self, at: usize) -> u64 {
        let mut w = [0; 8];
        w.copy_from_slice(&self.bytes[at..at + 8]);
        u64::from_le_bytes(w)
    }

    /// Level; 0 is a leaf.
    pub fn level(&self) -> u8 {
        self.bytes[10]
    }

    /// Number of cells.
    pub fn count(&self) -> usize {
        self.get16(12)
    }

    fn heap(&self) -> usize {
        self.get16(14)
    }

    /// Page number.
    pub fn number(&self) -> u64 {
        self.get64(16)
    }

    /// Transaction that wrote it.
    pub fn transaction(&self) -> u64 {
        self.get64(24)
    }

    fn slot(&self, i: usize) -> usize {
        self.get16(HEAD + 2 * i)
    }

    /// Key of cell `i`.
    pub fn key(&self, i: usize) -> Key {
        let at = self.slot(i);
        Key { ino: self.get64(at), kind: self.bytes[at + 8], item: self.get64(at + 9) }
    }

    /// Value of cell `i`.
    pub fn value(&self, i: usize) -> &[u8] {
        let at = self.slot(i);
        let len = self.get16(at + 17);
        &self.bytes[at + CELL_HEAD..at + CELL_HEAD + len]
    }

    /// Child of cell `i` of a branch.
    pub fn child(&self, i: usize) -> u64 {
        self.get64(self.slot(i) + CELL_HEAD)
    }

    /// Cell of a branch under which a key lies.
    pub fn child_of(&self, key: Key) -> usize {
        match self.search(key) {
            Ok(i) => i,
            Err(i) => i.saturating_sub(1),
        }
    }

    /// Where a key is, or where it would be.
    pub fn search(&self, key: Key) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let mid = (low + high) / 2;
            match self.key(mid).cmp(&key) {
                core::cmp::Ordering::Less => low = mid + 1,
                core::cmp::Ordering::Greater => high = mid,
                core::cmp::Ordering::Equal => return Ok(mid),
            }
        }
        Err(low)
    }

    /// Bytes that a cell takes with its slot.
    pub const fn cell_bytes(value: usize) -> usize {
        2 + CELL_HEAD + value
    }

    /// Bytes in use for slots and cells.
    pub fn used(&self) -> usize {
        PAGE_BYTES - self.heap() + 2 * self.count()
    }

    /// Makes a cell at position `i`; false when there is no room.
    pub fn insert_at(&mut self, i: usize, key: Key, value: &[u8]) -> bool {
        assert!(value.len() <= VALUE_MAX);
        let (count, heap) = (self.count(), self.heap());
        assert!(i <= count);
        if self.used() + Self::cell_bytes(value.len()) > PAGE_ROOM {
            return false;
        }
        let at = heap - CELL_HEAD - value.len();
        self.bytes[at..at + 8].copy_from_slice(&key.ino.to_le_bytes());
        self.bytes[at + 8] = key.kind;
        self.bytes[at + 9..at + 17].copy_from_slice(&key.item.to_le_bytes());
        self.put16(at + 17, value.len());
        self.bytes[at + CELL_HEAD..heap].copy_from_slice(value);
        self.bytes.copy_within(HEAD + 2 * i..HEAD + 2 * count, HEAD + 2 * i + 2);
        self.put16(HEAD + 2 * i, at);
        self.put16(12, count + 1);
        self.put16(14, at);
        true
    }

    /// Removes cell `i` and closes the gap.
    pub fn remove_at(&mut self, i: usize) {
        let (count, heap) = (self.count(), self.heap());
        assert!(i < count);
        let at = self.slot(i);
        let len = CELL_HEAD + self.get16(at + 17);
        self.bytes.copy_within(heap..at, heap + len);
        self.bytes.copy_within(HEAD + 2 * i + 2..HEAD + 2 * count, HEAD + 2 * i);
        for j in 0..count - 1 {
            let slot = self.slot(j);
            if slot < at {
                self.put16(HEAD + 2 * j, slot + len);
            }
        }
        self.put16(12, count - 1);
        self.put16(14, heap + len);
    }

    /// Overwrites the value of cell `i`, if the new one has the same length.
    pub fn overwrite(&mut self, i: usize, value: &[u8]) -> bool {
        let at = self.slot(i);
        let same = self.get16(at + 17) == value.len();
        if same {
            self.bytes[at + CELL_HEAD..at + CELL_HEAD + value.len()].copy_from_slice(value);
        }
        same
    }

    /// Appends cells `from..to` of another page; the caller knows that they fit.
    pub fn append(&mut self, other: &Page, from: usize, to: usize) {
        for i in from..to {
            let fits = self.insert_at(self.count(), other.key(i), other.value(i));
            assert!(fits, "the caller has counted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    #[test]
    fn cells_come_and_go() {
        let mut random = Random::new(3);
        let mut page = Page::new(5, 1, 0);
        let mut model = alloc::collections::BTreeMap::new();
        for _ in 0..5000 {
            let key = Key::new(random.below(4), 1, random.below(30));
            let found = page.search(key);
            if random.chance(1, 2) {
                let mut value = alloc::vec![0; random.below(200) as usize];
                random.fill(&mut value);
                match found {
                    Ok(i) => page.remove_at(i),
                    Err(_) => assert!(!model.contains_key(&key)),
                }
                model.remove(&key);
                let i = page.search(key).unwrap_err();
                if page.insert_at(i, key, &value) {
                    model.insert(key, value);
                }
            } else if let Ok(i) = found {
                page.remove_at(i);
                model.remove(&key);
            }
            let back = Page::decode(&page.encode(), 5).unwrap();
            let cells: Vec<_> = (0..back.count()).map(|i| (back.key(i), back.value(i))).collect();
            let want: Vec<_> = model.iter().map(|(k, v)| (*k, &v[..])).collect();
            assert_eq!(cells, want);
        }
    }

    #[test]
    fn every_bit_flip_is_found() {
        let mut page = Page::new(5, 1, 0);
        for i in 0..20 {
            assert!(page.insert_at(i, Key::new(1, 1, i as u64), &[i as u8; 40]));
        }
        let bytes = page.encode();
        assert!(Page::decode(&bytes, 6).is_err(), "a misdirected page");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Page::decode(&flipped, 5).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_forged_page_with_a_right_checksum_is_refused_not_survived() {
        let mut random = Random::new(9);
        let mut page = Page::new(5, 1, 0);
        for i in 0..20 {
            assert!(page.insert_at(i, Key::new(1, 1, i as u64), &[i as u8; 40]));
        }
        let good = page.encode();
        for _ in 0..20_000 {
            let mut bytes = good;
            let at = 10 + random.below(70) as usize;
            bytes[at] = random.next_u64() as u8;
            let crc = crc32c(0, &bytes[8..]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            if let Ok(mut page) = Page::decode(&bytes, 5) {
                // Whatever is accepted can be worked with.
                while page.count() > 0 && page.level() == 0 {
                    page.remove_at(random.below(page.count() as u64) as usize);
                }
            }
        }
    }
}
