//! A shard: what it is of, a checksum for each block of it, and its bytes. Its name says the same in short.
//!
//! | bytes | what |
//! | --- | --- |
//! | 8 | magic |
//! | 8, 8, 8 | pool, image, object |
//! | 8, 4 | version: number, and what was drawn for it |
//! | 2, 2, 2, 2 | shard, shards of data, shards in all, zero |
//! | 4, 4 | bytes of this shard, bytes of the object (0: nothing but zeroes) |
//! | 4 × blocks | CRC32C of each 4 KiB of the bytes |
//! | 4 | CRC32C of all that stands above |
//!
//! Integers are little-endian. Then the bytes.

use base::wire::{Corrupt, Reader, Writer};
use placement::checksum::crc32c;

const MAGIC: u64 = u64::from_le_bytes(*b"CORBSHD1");
/// Bytes that have a checksum of their own.
pub const BLOCK: usize = 4096;
const FIXED: usize = 60;
/// Most bytes of a shard.
pub const SHARD_MAX: usize = 64 << 20;

/// Numbers of versions are below this,
pub const VERSIONS: u64 = 1 << 63;
/// and from this bit on they say which writer wrote them: each that opens an image has a number above all before it,
pub const EPOCH_SHIFT: u32 = 40;
/// which is below this.
pub const EPOCHS: u64 = 1 << 22;
const EPOCH: &str = "epoch-";

/// The name by which a store says that a writer has begun, without its image.
pub fn epoch_name(epoch: u64) -> String {
    format!("{EPOCH}{epoch:06x}")
}

/// The writer that such a name speaks of.
pub fn parse_epoch(name: &str) -> Option<u64> {
    let epoch = u64::from_str_radix(name.strip_prefix(EPOCH)?, 16).ok()?;
    (epoch < EPOCHS && epoch_name(epoch) == name).then_some(epoch)
}

/// Which write of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Counts up.
    pub number: u64,
    /// Drawn anew for each write: two writers that know nothing of each other never make shards of one version.
    pub drawn: u32,
}

impl Version {
    /// Of what was never written: before every other.
    pub const NONE: Self = Self { number: 0, drawn: 0 };
}

/// What a shard says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The pool.
    pub pool: u64,
    /// The image.
    pub image: u64,
    /// Number of the object in it.
    pub object: u64,
    /// Which write of it.
    pub version: Version,
    /// Which of its shards.
    pub shard: u16,
    /// Shards of data.
    pub data: u16,
    /// Shards in all.
    pub width: u16,
    /// Bytes of the shard.
    pub bytes: u32,
    /// Bytes of the object; 0: it reads as zeroes, and the shard has no bytes.
    pub object_bytes: u32,
}

/// Bytes before the bytes of a shard.
pub fn head_bytes(bytes: usize) -> usize {
    FIXED + 4 * bytes.div_ceil(BLOCK) + 4
}

/// The head of a shard with these bytes.
pub fn encode(head: &Head, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(head_bytes(bytes.len()));
    Writer(&mut out)
        .u64(MAGIC)
        .u64(head.pool)
        .u64(head.image)
        .u64(head.object)
        .u64(head.version.number)
        .u32(head.version.drawn)
        .u16(head.shard)
        .u16(head.data)
        .u16(head.width)
        .u16(0)
        .u32(head.bytes)
        .u32(head.object_bytes);
    debug_assert_eq!(out.len(), FIXED);
    for block in bytes.chunks(BLOCK) {
        Writer(&mut out).u32(crc32c(0, block));
    }
    let sum = crc32c(0, &out);
    Writer(&mut out).u32(sum);
    out
}

/// Reads a head, of a shard that should have so many bytes: it, and the checksums of the blocks.
pub fn decode(bytes: &[u8], len: usize) -> Result<(Head, Vec<u32>), Corrupt> {
    let mut reader = Reader::new("shard", bytes);
    let total = head_bytes(len);
    let body = reader.bytes(total - 4)?;
    if reader.u32()? != crc32c(0, body) {
        return Err(reader.corrupt("does not agree with its checksum"));
    }
    let mut reader = Reader::new("shard", body);
    if reader.u64()? != MAGIC {
        return Err(reader.corrupt("has no magic number"));
    }
    let (pool, image, object) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let version = Version { number: reader.u64()?, drawn: reader.u32()? };
    let (shard, data, width) = (reader.u16()?, reader.u16()?, reader.u16()?);
    reader.zeroes(2)?;
    let (bytes, object_bytes) = (reader.u32()?, reader.u32()?);
    if bytes as usize != len {
        return Err(reader.corrupt("has another length than shards of its image"));
    }
    let head = Head { pool, image, object, version, shard, data, width, bytes, object_bytes };
    let sums = (0..len.div_ceil(BLOCK)).map(|_| reader.u32()).collect::<Result<_, _>>()?;
    Ok((head, sums))
}

/// Whether whole blocks, from block `first` on, agree with their checksums.
pub fn agrees(sums: &[u32], first: usize, bytes: &[u8]) -> bool {
    bytes
        .chunks(BLOCK)
        .enumerate()
        .all(|(i, block)| sums.get(first + i).is_some_and(|sum| *sum == crc32c(0, block)))
}

/// The name of a shard, without its image.
pub fn name(object: u64, version: Version, shard: usize, hole: bool) -> String {
    let mark = if hole { "z" } else { "" };
    format!("{object:012x}.{:012x}-{:08x}.{shard:02x}{mark}", version.number, version.drawn)
}

/// What a name says: object, version, shard, and whether the object is nothing but zeroes.
pub fn parse(name: &str) -> Option<(u64, Version, usize, bool)> {
    let hole = name.ends_with('z');
    let mut parts = name.strip_suffix('z').unwrap_or(name).split('.');
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let object = hex(parts.next()?)?;
    let (number, drawn) = parts.next()?.split_once('-')?;
    let version = Version { number: hex(number)?, drawn: u32::try_from(hex(drawn)?).ok()? };
    let shard = usize::try_from(hex(parts.next()?)?).ok()?;
    let parsed = (object, version, shard, hole);
    // One way to write each.
    let good = version.number < VERSIONS;
    (good && self::name(object, version, shard, hole) == name).then_some(parsed)
}

/// A number that nobody else draws.
pub fn draw() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's keys are drawn from the kernel's randomness, anew for each.
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}
