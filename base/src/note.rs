//! What a library says of its sources: an ELF note (`readelf -n` shows it), so that who loads the library can see whether it is of
//! the same sources as itself. The number is `base/build_id.rs`'s.

/// Digits of the number.
const DIGITS: usize = 16;
/// Sizes of owner and number, and the only type of note that this owner has.
const HEAD: [u32; 3] = [7, DIGITS as u32, 1];
const OWNER: [u8; 8] = *b"Corbel\0\0";

/// The note, for a section whose name begins with `.note`: linkers keep those.
#[derive(Debug)]
#[repr(C, align(4))]
pub struct Note {
    head: [u32; 3],
    owner: [u8; 8],
    built_of: [u8; DIGITS],
}

impl Note {
    /// Of that number, which has 16 digits.
    #[must_use]
    pub const fn of(built_of: &str) -> Self {
        match built_of.as_bytes().first_chunk() {
            Some(digits) if built_of.len() == DIGITS => {
                Self { head: HEAD, owner: OWNER, built_of: *digits }
            }
            _ => panic!("a number of another length"),
        }
    }

    /// The number in a library, if it says one.
    #[must_use]
    pub fn find(library: &[u8]) -> Option<&str> {
        let is_elf = library.starts_with(b"\x7fELF\x02\x01");
        let (table, size, count) =
            (word(library, 32, 8)?, word(library, 54, 2)?, word(library, 56, 2)?);
        let segments = (0..count).map(|n| table.checked_add(n.checked_mul(size)?));
        is_elf.then_some(())?;
        segments.flatten().find_map(|at| {
            (word(library, at, 4)? == PT_NOTE).then_some(())?;
            let (from, len) =
                (word(library, at.checked_add(8)?, 8)?, word(library, at.checked_add(32)?, 8)?);
            let align = word(library, at.checked_add(48)?, 8)?.clamp(4, 8);
            in_segment(library.get(from..from.checked_add(len)?)?, align)
        })
    }
}

/// A segment of notes, among those of a program.
const PT_NOTE: usize = 4;

/// A number of so many bytes, where the library is long enough.
fn word(library: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let mut word = [0; 8];
    word.get_mut(..bytes)?.copy_from_slice(library.get(at..at.checked_add(bytes)?)?);
    usize::try_from(u64::from_le_bytes(word)).ok()
}

/// The number in one segment: notes lie there one behind the other.
fn in_segment(mut notes: &[u8], align: usize) -> Option<&str> {
    loop {
        let [name, desc, kind] = [0, 4, 8].map(|at| word(notes, at, 4));
        let (name, desc) = (name?, desc?);
        let begin = 12usize.checked_add(name)?.checked_next_multiple_of(align)?;
        let end = begin.checked_add(desc)?;
        let head = [name, desc, kind?];
        if head == HEAD.map(|word| word as usize) && notes.get(12..12 + OWNER.len())? == OWNER {
            return core::str::from_utf8(notes.get(begin..end)?).ok();
        }
        notes = notes.get(end.checked_next_multiple_of(align)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// A library with one segment of notes: somebody else's, and ours.
    fn library() -> Vec<u8> {
        let note = Note::of("0123456789abcdef");
        let mut notes = Vec::new();
        for word in [4u32, 5, 3] {
            notes.extend(word.to_le_bytes());
        }
        notes.extend(b"GNU\0short\0\0\0");
        for word in note.head {
            notes.extend(word.to_le_bytes());
        }
        notes.extend(note.owner);
        notes.extend(note.built_of);
        let mut library = alloc::vec![0u8; 64 + 56];
        library[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, word: u64, bytes: usize| {
            library[at..at + bytes].copy_from_slice(&word.to_le_bytes()[..bytes]);
        };
        put(32, 64, 8);
        put(54, 56, 2);
        put(56, 1, 2);
        put(64, PT_NOTE as u64, 4);
        put(64 + 8, 64 + 56, 8);
        put(64 + 32, notes.len() as u64, 8);
        put(64 + 48, 4, 8);
        library.extend(notes);
        library
    }

    #[test]
    fn what_is_said_is_found() {
        let library = library();
        assert_eq!(Note::find(&library), Some("0123456789abcdef"));
        assert_eq!(Note::find(b"#!/bin/sh"), None);
        assert_eq!(core::mem::size_of::<Note>(), 36, "as it lies in the library");
    }

    /// Whatever file it is, and wherever it ends.
    #[test]
    fn a_file_that_is_no_library_says_nothing() {
        let library = library();
        for len in 0..library.len() {
            assert_eq!(Note::find(&library[..len]), None, "{len} bytes");
        }
        let mut random = crate::random::Random::new(1);
        for _ in 0..20_000 {
            let mut bad = library.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(bad.len() as u64) as usize;
                bad[at] = [0, 0xff, random.below(256) as u8][random.below(3) as usize];
            }
            let _ = Note::find(&bad);
        }
    }
}
