//! Gives a region of the version before the checksums that it lacks, in place.

use std::sync::Arc;

use base::InodeId;

use super::{Volume, read_superblocks};
use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::format::superblock::{SUPERBLOCK_AT, Superblock};
use crate::limits::BLOCK_BYTES;
use crate::media::{Media, MediaError, Segment};
use crate::tree::Fault;

/// Blocks summed at a time.
const READ: u64 = 256;
/// Items of the tree passed over at a time.
const ITEMS: usize = 10_000;

/// What is there is taken for right: nothing says otherwise. The region is of the new version when all of it is summed, and of the old one
/// after a crash before. Tells `progress` how many blocks of how many are done; returns how many there were, `None` if the region
/// has checksums already. Of an upgrade that ended between the two copies of the superblock, the rest is done. Nobody else may use the region.
pub fn add_sums(
    media: &Arc<dyn Media>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Option<u64>, Fault> {
    let volume = Volume::open(Arc::clone(media))?;
    let mut superblock = volume.superblock().clone();
    if superblock.sums {
        return Ok(end_upgrade(&**media)?.then_some(0));
    }
    superblock.sums = true;
    for (arena, _) in volume.arenas() {
        media.ensure(Segment::Arena(arena), superblock.arena_bytes())?;
    }
    let base = superblock.capacity_blocks * BLOCK_BYTES;
    let (position, all) = (volume.root().stream_seq, volume.root().blocks);
    let (mut at, mut done) = ((InodeId::NONE, 0), 0);
    let mut bytes = Vec::new();
    loop {
        let (found, next) = volume.content_after(at.0, at.1, ITEMS)?;
        let Some((ino, run)) = found else {
            let Some(next) = next else { break };
            at = next;
            continue;
        };
        let part = run.cut(run.file, run.file.saturating_add(READ));
        let segment = Segment::Arena(part.arena);
        bytes.clear();
        let len = (part.len * BLOCK_BYTES) as usize;
        media.append(segment, part.block * BLOCK_BYTES, len, &mut bytes)?;
        let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
        let entries: Vec<u8> =
            blocks.flat_map(|block| Sum::new(base::crc32c(0, block), position).encode()).collect();
        let place = (segment, sum_at(base, part.block), part.len * SUM_BYTES);
        media.back(&[place])?;
        media.write(place.0, place.1, &entries)?;
        media.persist(place.0, place.1, place.2)?;
        done += part.len;
        progress(done, all);
        at = (ino, part.end());
    }
    media.fence()?;
    write_both(&**media, &superblock)?;
    debug_assert!(read_superblocks(&**media).is_ok_and(|s| s.iter().all(Result::is_ok)));
    Ok(Some(done))
}

fn write_both(media: &dyn Media, superblock: &Superblock) -> Result<(), MediaError> {
    let bytes = superblock.encode();
    for at in SUPERBLOCK_AT {
        // One after the other: one of them serves at any time.
        media.write(Segment::Super, at, &bytes)?;
        media.persist(Segment::Super, at, bytes.len() as u64)?;
        media.fence()?;
    }
    Ok(())
}

/// Whether two copies of a superblock are of before and after an upgrade: one of them has checksums, and that is all.
pub fn is_half_upgraded(a: &Superblock, b: &Superblock) -> bool {
    a.sums != b.sums && Superblock { sums: b.sums, ..a.clone() } == *b
}

/// Ends an upgrade that ended between the two copies of the superblock: all blocks had their checksums then. Before anything is
/// written without them, for if the new copy were damaged later, the old one would serve. Whether there was something to end.
pub fn end_upgrade(media: &dyn Media) -> Result<bool, MediaError> {
    let [Ok(a), Ok(b)] = read_superblocks(media)? else { return Ok(false) };
    if !is_half_upgraded(&a, &b) {
        return Ok(false);
    }
    write_both(media, if a.sums { &a } else { &b })?;
    Ok(true)
}
