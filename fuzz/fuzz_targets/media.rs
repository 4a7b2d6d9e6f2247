//! Hostile bytes where media formats are read: superblock, root record, tree page, items, log
//! entry, chunk header. Each is tried as it is and with its checksum made right, since an attacker
//! can compute one. What is accepted must encode to the same bytes again.
#![no_main]

use base::crc32c;
use libfuzzer_sys::fuzz_target;
use storage::format::chunk::ChunkHeader;
use storage::format::entry::{self, HEADER_BYTES};
use storage::format::item::{Inode, ReadClass, Run, decode_name};
use storage::format::page::{PAGE_BYTES, Page};
use storage::format::superblock::{ROOT_BYTES, RootRecord, SUPERBLOCK_BYTES, Superblock};

/// The bytes, cut or filled to `len`, with a checksum over `from..` put at `at`.
fn sealed(data: &[u8], len: usize, at: usize, from: usize) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.resize(len, 0);
    let crc = crc32c(0, &bytes[from..]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn page(data: &[u8]) {
    let _ = Page::decode(data, 1);
    let mut bytes = sealed(data, PAGE_BYTES, 4, 8);
    bytes[..4].copy_from_slice(b"CBTP");
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[16..24]);
    let number = u64::from_le_bytes(number);
    let Ok(mut page) = Page::decode(&bytes, number) else { return };
    assert!(Page::decode(&page.encode(), number).is_ok());
    for i in 0..page.count() {
        assert_eq!(page.search(page.key(i)), Ok(i));
        let (key, value) = (page.key(i), page.value(i));
        let _ = (Inode::decode(value), Run::decode(key.item, value));
        let _ = (ReadClass::decode(value), decode_name(value));
    }
    while page.count() > 0 {
        page.remove_at(page.count() / 2);
    }
    assert_eq!(page.used(), 0);
}

fn log_entry(data: &[u8]) {
    let _ = entry::decode(data, 1);
    let mut bytes = data.to_vec();
    bytes.resize(data.len().max(HEADER_BYTES), 0);
    let length = (bytes.len() - HEADER_BYTES) as u32;
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    let crc = crc32c(1, &bytes[4..]);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    let Ok((h, op)) = entry::decode(&bytes, 1) else { return };
    if op != entry::Op::Pad {
        let again = op.to_entry(h.sequence, h.epoch, h.lane, h.time, 1);
        assert_eq!(entry::decode(&again, 1), Ok((h, op)));
    }
}

fuzz_target!(|data: &[u8]| {
    page(data);
    log_entry(data);
    if let Ok(s) = Superblock::decode(&sealed(data, SUPERBLOCK_BYTES, 12, 16)) {
        assert_eq!(Superblock::decode(&s.encode()), Ok(s));
    }
    if let Ok(r) = RootRecord::decode(&sealed(data, ROOT_BYTES, 4, 8)) {
        assert_eq!(RootRecord::decode(&r.encode()), Ok(r));
    }
    if let Ok(c) = ChunkHeader::decode(&sealed(data, 80, 8, 12)) {
        assert_eq!(ChunkHeader::decode(&c.encode()), Ok(c));
    }
});
