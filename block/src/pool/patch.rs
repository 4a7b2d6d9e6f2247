//! A patch: bytes that a small write put over a range of an object, under a version of their own, as the same copy in
//! several stores. Its name says which version of the object it lies on and which in the order of that version's patches it is, so that one
//! that is lost is missed.
//!
//! | bytes | what |
//! | --- | --- |
//! | 8 | magic |
//! | 8, 8, 8 | pool, image, object |
//! | 8, 4 | version: number, and what was drawn for it |
//! | 8, 4 | version of the object that it lies on; zeroes: it was never written |
//! | 2, 2 | place in the order of the patches of that version; 1: zeroes, and no bytes |
//! | 4, 4 | first byte, and how many |
//! | 4 × blocks | CRC32C of each 4 KiB of the bytes |
//! | 4 | CRC32C of all that stands above |
//!
//! Integers are little-endian. Then the bytes.

use std::ops::Range;

use base::wire::{Corrupt, Reader, Writer};
use placement::checksum::crc32c;

use super::shard::{BLOCK, SHARD_MAX, VERSIONS, Version};

const MAGIC: u64 = u64::from_le_bytes(*b"CORBPAT1");
const FIXED: usize = 68;
/// Patches that lie on one version.
pub const PATCHES_MAX: usize = 256;

/// What a patch says in its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patch {
    /// Which write of the object.
    pub version: Version,
    /// What it lies on; [`Version::NONE`]: an object that was never written.
    pub base: Version,
    /// Which of the patches of that version, from 0.
    pub place: u16,
    /// First byte in the object.
    pub offset: u32,
    /// How many.
    pub len: u32,
    /// All of them are zero, and the patch has no bytes.
    pub zero: bool,
}

impl Patch {
    /// Where it lies in the object.
    pub fn range(&self) -> Range<usize> {
        self.offset as usize..self.offset as usize + self.len as usize
    }

    /// Bytes that it keeps.
    pub fn bytes(&self) -> usize {
        if self.zero { 0 } else { self.len as usize }
    }

    /// Bytes before its bytes.
    pub fn head_bytes(&self) -> usize {
        FIXED + 4 * self.bytes().div_ceil(BLOCK) + 4
    }
}

/// Pool, image and object.
pub type Of = (u64, u64, u64);

/// The head of a patch with these bytes.
pub fn encode((pool, image, object): Of, patch: &Patch, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(patch.head_bytes());
    Writer(&mut out)
        .u64(MAGIC)
        .u64(pool)
        .u64(image)
        .u64(object)
        .u64(patch.version.number)
        .u32(patch.version.drawn)
        .u64(patch.base.number)
        .u32(patch.base.drawn)
        .u16(patch.place)
        .u16(patch.zero.into())
        .u32(patch.offset)
        .u32(patch.len);
    debug_assert_eq!((out.len(), bytes.len()), (FIXED, patch.bytes()));
    for block in bytes.chunks(BLOCK) {
        Writer(&mut out).u32(crc32c(0, block));
    }
    let sum = crc32c(0, &out);
    Writer(&mut out).u32(sum);
    out
}

/// The checksums of the blocks of a patch, if its head says what its name does.
pub fn decode(head: &[u8], of: Of, patch: &Patch) -> Result<Vec<u32>, Corrupt> {
    let mut reader = Reader::new("patch", head);
    let body = reader.bytes(patch.head_bytes() - 4)?;
    if reader.u32()? != crc32c(0, body) {
        return Err(reader.corrupt("does not agree with its checksum"));
    }
    let mut reader = Reader::new("patch", body);
    if reader.u64()? != MAGIC {
        return Err(reader.corrupt("has no magic number"));
    }
    let is_of = (reader.u64()?, reader.u64()?, reader.u64()?);
    let version = Version { number: reader.u64()?, drawn: reader.u32()? };
    let base = Version { number: reader.u64()?, drawn: reader.u32()? };
    let place = reader.u16()?;
    let zero = match reader.u16()? {
        0 => false,
        1 => true,
        _ => return Err(reader.corrupt("has a flag that is neither 0 nor 1")),
    };
    let (offset, len) = (reader.u32()?, reader.u32()?);
    if is_of != of || *patch != (Patch { version, base, place, offset, len, zero }) {
        return Err(reader.corrupt("is of something else than its name says"));
    }
    (0..patch.bytes().div_ceil(BLOCK)).map(|_| reader.u32()).collect()
}

/// The name of a patch, without its image.
pub fn name(object: u64, patch: &Patch) -> String {
    let Patch { version, base, place, offset, len, zero } = patch;
    let mark = if *zero { "z" } else { "" };
    format!(
        "{object:012x}.{:012x}-{:08x}.p{:012x}-{:08x}-{place:04x}-{offset:08x}-{len:08x}{mark}",
        version.number, version.drawn, base.number, base.drawn
    )
}

/// What a name says: the object and the patch.
pub fn parse(name: &str) -> Option<(u64, Patch)> {
    let zero = name.ends_with('z');
    let mut parts = name.strip_suffix('z').unwrap_or(name).split('.');
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let short = |text: &str| u32::from_str_radix(text, 16).ok();
    let object = hex(parts.next()?)?;
    let (number, drawn) = parts.next()?.split_once('-')?;
    let version = Version { number: hex(number)?, drawn: short(drawn)? };
    let mut fields = parts.next()?.strip_prefix('p')?.split('-');
    let base = Version { number: hex(fields.next()?)?, drawn: short(fields.next()?)? };
    let place = u16::from_str_radix(fields.next()?, 16).ok()?;
    let (offset, len) = (short(fields.next()?)?, short(fields.next()?)?);
    let patch = Patch { version, base, place, offset, len, zero };
    // One way to write each, and nothing that no writer makes.
    let end = u64::from(offset) + u64::from(len);
    let good = len > 0 && end <= SHARD_MAX as u64 && usize::from(place) < PATCHES_MAX;
    let good = good && version.number < VERSIONS;
    (good && base < version && self::name(object, &patch) == name).then_some((object, patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch() -> Patch {
        let version = Version { number: 0x77, drawn: 0xdead_beef };
        let base = Version { number: 0x70, drawn: 3 };
        Patch { version, base, place: 6, offset: 512, len: 9216, zero: false }
    }

    #[test]
    fn names_say_what_they_are_of() {
        for zero in [false, true] {
            for base in [patch().base, Version::NONE] {
                let patch = Patch { zero, base, ..patch() };
                assert_eq!(parse(&name(0xabc, &patch)), Some((0xabc, patch)));
                assert_eq!(super::super::shard::parse(&name(0xabc, &patch)), None);
            }
        }
        let good = name(1, &patch());
        for bad in [
            good.replace(".p", ".q"),
            good.to_uppercase(),
            format!("{good}z.1"),
            good.replace("-00002400", "-00000000"),
            good.replace("-00000200", "-ffffffff"),
            good.replace("-0006-", "-0100-"),
            good.replace("p000000000070", "p000000000078"),
            super::super::shard::name(1, patch().version, 2, false),
        ] {
            assert_eq!(parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn every_bit_of_a_head_counts() {
        let bytes: Vec<u8> = (0..9216u32).map(|i| i as u8).collect();
        let head = encode((1, 2, 3), &patch(), &bytes);
        assert_eq!(head.len(), patch().head_bytes());
        assert_eq!(decode(&head, (1, 2, 3), &patch()).unwrap().len(), 3);
        for at in 0..8 * head.len() {
            let mut bad = head.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(decode(&bad, (1, 2, 3), &patch()).is_err(), "bit {at}");
        }
        for len in 0..head.len() {
            assert!(decode(&head[..len], (1, 2, 3), &patch()).is_err());
        }
        assert!(decode(&head, (1, 2, 4), &patch()).is_err());
        let other = Patch { offset: 1024, ..patch() };
        assert!(decode(&head, (1, 2, 3), &other).is_err());
    }
}
