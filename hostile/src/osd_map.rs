//! Maps of a Ceph cluster's OSDs, as a monitor may send them: as they come, and with a checksum that somebody has made right. Whatever is read,
//! mapping by it ends.

use placement::checksum::crc32c;
use rados::osdmap::{Mapper, OsdMap};

/// The same with a checksum that is right, wherever the lengths of the two parts before it say that it is.
fn resealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    let mut at = 6usize;
    for _part in ["for clients", "for OSDs"] {
        let len = bytes.get(at + 2..at + 6)?.try_into().ok()?;
        at = at.checked_add(6)?.checked_add(u32::from_le_bytes(len) as usize)?;
    }
    let crc = !crc32c(crc32c(0, bytes.get(..at)?), bytes.get(at + 4..)?);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    Some(bytes)
}

/// The target.
pub fn run(bytes: &[u8]) {
    for bytes in [Some(bytes.to_vec()), resealed(bytes)].into_iter().flatten() {
        let Ok(map) = OsdMap::decode(&bytes) else { continue };
        let Ok(mut mapper) = Mapper::new(&map) else { continue };
        for (number, pool) in map.pools.iter().take(4) {
            let seeds: Vec<u32> = (0..pool.pg_num.min(4)).collect();
            if let Ok(mapped) = mapper.map(*number, &seeds) {
                assert_eq!((mapped.up.len(), mapped.acting.len()), (seeds.len(), seeds.len()));
            }
            if let Ok(group) = pool.pg_of(*number, b"", &bytes) {
                assert!(group.seed < pool.pg_num);
            }
        }
    }
}
