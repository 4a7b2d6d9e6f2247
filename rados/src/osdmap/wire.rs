//! Ceph's binary form of the map, as monitors since Luminous (12) write it: little-endian, in sections that have a version, the oldest version of a
//! reader that may read them, and a length. What a later release appends to one is passed over.
//!
//! ```text
//! section 8 (the map):
//!   section 6 to 10 (for clients):
//!     16 bytes fsid   u32 epoch   8 bytes made   8 bytes changed
//!     pools: u32 n, n × (i64 number, section 21 and later:
//!              u8 type (1: replicated, 3: erasure)   u8 size   u8 crush_rule   u8 object_hash   u32 pg_num   u32 pgp_num   u32, u32 (0)
//!              u32 changed in   u64 newest snapshot   u32 of epoch   snapshots: u32 n, n × (u64, section)
//!              removed snapshots: u32 n, n × (u64, u64)   u64 (old user)   u64 flags   u32 (0)   u8 min_size …)
//!     names: u32 n, n × (i64 pool, text)   i32 highest number of a pool   u32 flags   i32 m: OSDs
//!     states: u32 m, m × u32   weights: u32 m, m × u32   addresses: u32 m, m × addresses
//!     pg_temp: u32 n, n × (pg, u32 k, k × i32)   primary_temp: u32 n, n × (pg, i32)   primary affinities: u32 m or 0, m × u32
//!     u32 length, the CRUSH map   profiles: u32 n, n × (text, u32 k, k × (text, text))
//!     pg_upmap: u32 n, n × (pg, u32 k, k × i32)   pg_upmap_items: u32 n, n × (pg, u32 k, k × (i32, i32))
//!     i32 version of the CRUSH map   7: removed and purged snapshots: twice u32 n, n × (i64 pool, u32 k, k × (u64, u64))
//!     9: 8 bytes last up, 8 bytes last in   10: pg_upmap_primaries: u32 n, n × (pg, i32)
//!   section (for OSDs):
//!     addresses   u32 m, m × 25 bytes   shut out: u32 n, n × (address, 8 bytes)   addresses   u32   text   u32 m, m × 16 bytes
//!     u32 m, m × section   addresses   12 bytes   5: u8 release of clients   u8 release of OSDs …
//!   u32 CRC32C of all that is before, and of all that is behind it in the section
//! text: u32 length, bytes     pg: u8 1, u64 pool, u32 seed, i32
//! addresses: u8 2, u32 n, n × address, or one address     address: u8 1, section, or 136 bytes of which the first is 0
//! ```

use std::collections::BTreeMap;

use placement::checksum::crc32c;
use placement::crush::{Map, limits};

use super::{Kind, ONE, Osd, OsdMap, PGS_MAX, Pg, Pool};

type Result<T> = std::result::Result<T, String>;

/// The versions of the sections that are known.
const MAP: u8 = 8;
/// OSDs of one PG in a list: as many as a pool's size may say.
const LIST_MAX: usize = 255;
const FOR_CLIENTS: std::ops::RangeInclusive<u8> = 6..=10;
const FOR_OSDS: u8 = 12;
const POOL: u8 = 32;
/// The first version of a pool that Jewel and later write.
const POOL_FIRST: u8 = 21;

/// Reads from the front; every count is held against what is left before anything is allocated.
struct Reader<'a> {
    /// What is left.
    bytes: &'a [u8],
    /// Where that begins, in the whole map.
    at: usize,
}

impl<'a> Reader<'a> {
    fn refuse<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(format!("not a readable map of OSDs, byte {}: {what}", self.at))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.bytes.split_at_checked(len) else {
            return self
                .refuse(format_args!("{len} bytes expected, {} are left", self.bytes.len()));
        };
        self.bytes = rest;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32> {
        self.array().map(i32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn i64(&mut self) -> Result<i64> {
        self.array().map(i64::from_le_bytes)
    }

    /// A count of things that have `size` bytes each at least.
    fn count(&mut self, size: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        if count > self.bytes.len() / size {
            return self.refuse(format_args!("a count of {count} is more than the rest can hold"));
        }
        Ok(count)
    }

    fn list<T>(&mut self, size: usize, one: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        (0..self.count(size)?).map(|_| one(self)).collect()
    }

    /// The same of what is not needed.
    fn pass(&mut self, size: usize, one: impl Fn(&mut Self) -> Result<()>) -> Result<()> {
        (0..self.count(size)?).try_for_each(|_| one(self))
    }

    fn text(&mut self) -> Result<&'a [u8]> {
        let len = self.count(1)?;
        self.take(len)
    }

    /// A section whose version is given, the rest of it.
    fn body(&mut self, what: &str, known: u8) -> Result<Self> {
        let oldest = self.u8()?;
        if oldest > known {
            return self.refuse(format_args!(
                "{what} is for readers of version {oldest}, and this one knows {known}: it is of a Ceph that is later than this program"
            ));
        }
        let len = self.count(1)?;
        let at = self.at;
        Ok(Self { bytes: self.take(len)?, at })
    }

    /// A section, and its version.
    fn section(&mut self, what: &str, known: u8) -> Result<(u8, Self)> {
        let version = self.u8()?;
        Ok((version, self.body(what, known)?))
    }

    /// A section of which nothing is needed.
    fn pass_section(&mut self) -> Result<()> {
        self.section("a section", u8::MAX).map(drop)
    }

    fn pg(&mut self) -> Result<Pg> {
        let version = self.u8()?;
        if version != 1 {
            return self.refuse(format_args!(
                "a placement group of version {version}, and only 1 is known"
            ));
        }
        let pg = Pg { pool: self.i64()?, seed: self.u32()? };
        self.i32()?; // which OSD it would be best to have it on, once
        Ok(pg)
    }

    fn by_pg<T>(
        &mut self,
        size: usize,
        one: impl Fn(&mut Self) -> Result<T>,
    ) -> Result<BTreeMap<Pg, T>> {
        const PG: usize = 17;
        Ok(self.list(PG + size, |r| Ok((r.pg()?, one(r)?)))?.into_iter().collect())
    }

    /// The OSDs of a PG, or exchanges of some: no more than a pool may have copies.
    fn few<T>(&mut self, size: usize, one: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let few = self.list(size, one)?;
        match few.len() {
            0..=LIST_MAX => Ok(few),
            many => self.refuse(format_args!("{many} OSDs of one placement group")),
        }
    }

    fn pass_intervals(&mut self) -> Result<()> {
        self.pass(16, |r| r.take(16).map(drop))
    }

    /// One address after its first byte.
    fn pass_address(&mut self, first: u8) -> Result<()> {
        match first {
            0 => self.take(135).map(drop),
            1 => self.pass_section(),
            _ => self.refuse(format_args!("an address of kind {first}")),
        }
    }

    /// The addresses of all OSDs.
    fn pass_addresses(&mut self) -> Result<()> {
        self.pass(1, |r| match r.u8()? {
            2 => r.pass(1, |r| {
                let first = r.u8()?;
                r.pass_address(first)
            }),
            first => r.pass_address(first),
        })
    }
}

impl OsdMap {
    /// Reads the binary form.
    ///
    /// # Errors
    /// What is wrong with it, and where; it is of a release that is not known; or its checksum is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader { bytes, at: 0 };
        let version = r.u8()?;
        if version < MAP {
            return r.refuse(format_args!(
                "version {version} of the map, which is older than Ceph 12, or no map"
            ));
        }
        let mut map = r.body("the map", MAP)?;
        if !r.bytes.is_empty() {
            return r.refuse("bytes behind the map");
        }
        let (version, for_clients) = map.section("the part for clients", *FOR_CLIENTS.end())?;
        if !FOR_CLIENTS.contains(&version) {
            // What a later one appends may say where groups lie.
            return map.refuse(format_args!(
                "version {version} of the part for clients, and {FOR_CLIENTS:?} are known"
            ));
        }
        let (osds_version, for_osds) = map.section("the part for OSDs", FOR_OSDS)?;
        let (front, crc) = (map.at, map.u32()?);
        let found = !crc32c(crc32c(0, &bytes[..front]), map.bytes);
        if found != crc {
            return map
                .refuse(format_args!("the checksum is {found:08x}, and should be {crc:08x}"));
        }
        let mut osd_map = read_for_clients(for_clients, version)?;
        osd_map.release = read_release(for_osds, osds_version)?;
        Ok(osd_map)
    }
}

fn read_for_clients(mut r: Reader<'_>, version: u8) -> Result<OsdMap> {
    let (fsid, epoch) = (r.array()?, r.u32()?);
    r.take(16)?; // when it was made and changed
    let pools = r.list(14, |r| Ok((r.i64()?, read_pool(r)?)))?;
    let mut pools: BTreeMap<i64, Pool> = pools.into_iter().collect();
    for _ in 0..r.count(12)? {
        let (number, name) = (r.i64()?, r.text()?);
        // Of one that is gone the name may be left.
        if let Some(pool) = pools.get_mut(&number) {
            pool.name = String::from_utf8_lossy(name).into_owned();
        }
    }
    r.take(8)?; // the highest number of a pool, flags
    let most = r.i32()?;
    let states = r.list(4, Reader::u32)?;
    let weights = r.list(4, Reader::u32)?;
    let count = usize::try_from(most).ok();
    if count != Some(states.len()) || count != Some(weights.len()) {
        let (states, weights) = (states.len(), weights.len());
        return r.refuse(format_args!(
            "{most} OSDs, states of {states} and weights of {weights} of them"
        ));
    }
    if states.len() > limits::DEVICES_MAX {
        return r.refuse(format_args!("more than {} OSDs", limits::DEVICES_MAX));
    }
    r.pass_addresses()?;
    let pg_temp = r.by_pg(4, |r| r.few(4, Reader::i32))?;
    let primary_temp = r.by_pg(4, Reader::i32)?;
    let affinities = r.list(4, Reader::u32)?;
    if !affinities.is_empty() && affinities.len() != states.len() {
        let affinities = affinities.len();
        return r.refuse(format_args!("{most} OSDs, primary affinities of {affinities} of them"));
    }
    let crush = Map::decode(r.text()?).map_err(|error| format!("the map of OSDs: {error}"))?;
    r.pass(8, |r| {
        r.text()?;
        r.pass(8, |r| {
            r.text()?;
            r.text().map(drop)
        })
    })?;
    let pg_upmap = r.by_pg(4, |r| r.few(4, Reader::i32))?;
    let pg_upmap_items = r.by_pg(4, |r| r.few(8, |r| Ok((r.i32()?, r.i32()?))))?;
    r.i32()?; // how often the CRUSH map was changed
    if version >= 7 {
        for _ in ["removed", "purged"] {
            r.pass(12, |r| {
                r.i64()?;
                r.pass_intervals()
            })?;
        }
    }
    if version >= 9 {
        r.take(16)?; // when an OSD came up, and in, last
    }
    let pg_upmap_primaries = if version >= 10 { r.by_pg(4, Reader::i32)? } else { BTreeMap::new() };
    let affinities = affinities.into_iter().chain(std::iter::repeat(ONE));
    let osds = states.into_iter().zip(weights).zip(affinities);
    let osds = osds
        .map(|((state, weight), primary_affinity)| Osd { state, weight, primary_affinity })
        .collect();
    Ok(OsdMap {
        fsid,
        epoch,
        pools,
        osds,
        pg_temp,
        primary_temp,
        pg_upmap,
        pg_upmap_items,
        pg_upmap_primaries,
        release: 0,
        crush,
    })
}

fn read_pool(r: &mut Reader<'_>) -> Result<Pool> {
    let (version, mut r) = r.section("a pool", POOL)?;
    if version < POOL_FIRST {
        return r.refuse(format_args!(
            "version {version} of a pool, and none before {POOL_FIRST} is known"
        ));
    }
    let kind = match r.u8()? {
        1 => Kind::Replicated,
        3 => Kind::Erasure,
        kind => return r.refuse(format_args!("a pool of type {kind}: 1 and 3 are known")),
    };
    let [size, crush_rule, object_hash] = r.array()?;
    let (pg_num, pgp_num) = (r.u32()?, r.u32()?);
    if !(1..=PGS_MAX).contains(&pg_num) || !(1..=pg_num).contains(&pgp_num) {
        return r.refuse(format_args!(
            "a pool of {pg_num} placement groups, {pgp_num} for placement: from 1 to {PGS_MAX} are known, and no more for placement than there are"
        ));
    }
    r.take(24)?; // PGs of local pools, the last change, snapshots' newest number and epoch
    r.pass(14, |r| {
        r.u64()?;
        r.pass_section()
    })?;
    r.pass_intervals()?;
    r.take(8)?; // an owner, once
    let flags = r.u64()?;
    r.take(4)?; // how long OSDs wait after a crash, once
    let min_size = r.u8()?;
    let name = String::new();
    Ok(Pool { name, kind, size, min_size, crush_rule, object_hash, pg_num, pgp_num, flags })
}

/// What the cluster's OSDs are at least.
fn read_release(mut r: Reader<'_>, version: u8) -> Result<u8> {
    if version < 5 {
        return Ok(0);
    }
    r.pass_addresses()?;
    r.pass(25, |r| r.take(25).map(drop))?;
    r.pass(9, |r| {
        let first = r.u8()?;
        r.pass_address(first)?;
        r.take(8).map(drop)
    })?;
    r.pass_addresses()?;
    r.u32()?;
    r.text()?;
    r.pass(16, |r| r.take(16).map(drop))?;
    r.pass(6, Reader::pass_section)?;
    r.pass_addresses()?;
    r.take(13)?; // when OSDs are full, in thirds; what clients are at least
    r.u8()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_a_group_are_no_longer_than_a_pool_is_wide() {
        for (len, fits) in [(0, true), (255, true), (256, false), (100_000, false)] {
            let mut bytes = u32::to_le_bytes(len).to_vec();
            bytes.resize(4 + 4 * len as usize, 0);
            let few = Reader { bytes: &bytes, at: 0 }.few(4, Reader::i32);
            assert_eq!(few.is_ok(), fits, "{len}");
        }
    }
}
