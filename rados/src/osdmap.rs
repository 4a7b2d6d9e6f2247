//! The map of a cluster's OSDs, as the monitors keep it and give it to whoever may read it (`osd getmap`): which pools there are, how many
//! placement groups each has, which OSDs are up and in, what was moved by hand, and the CRUSH map.
//!
//! [`OsdMap::decode`] reads Ceph's binary form; nothing in it is trusted. [`Mapper`] says where placement groups lie, many at a time, by
//! the kernels of the crate `placement`, and as Ceph's clients and OSDs do it, bit for bit. [`Pool::pg_of`] says in which placement group (PG) an object is.
//!
//! The map is one moment's: where a group lies a moment later only the cluster knows.

mod hash;
mod mapping;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::BTreeMap;
use std::fmt;

use placement::crush::Map;

pub use self::hash::{stable_mod, str_hash};
pub use self::mapping::{Lists, Mapped, Mapper, Share, Spread};

/// Placement groups of a pool at most: Ceph's monitors allow 65,536 unless they are told otherwise. What maps a pool takes twice
/// as many numbers of OSDs for each as it has copies, of those that are asked for.
pub const PGS_MAX: u32 = 1 << 22;
/// In the place of an OSD: none. Only in lists of erasure-coded pools, where each place has its own shard.
pub const NONE: i32 = placement::crush::ITEM_NONE;
/// A weight, or a primary affinity, of one.
pub const ONE: u32 = 0x1_0000;
/// The release from which on replicas may be read from: Octopus.
pub const OCTOPUS: u8 = 15;
/// The release from which on rules are found by their number alone: Quincy.
const QUINCY: u8 = 17;
/// The release from which on a `primary_temp` must be one of those that serve the PG.
const REEF: u8 = 18;

/// A placement group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Pg {
    /// The pool's number.
    pub pool: i64,
    /// Which one of the pool's.
    pub seed: u32,
}

impl fmt::Display for Pg {
    /// As Ceph writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}", self.pool, self.seed)
    }
}

/// How a pool keeps what is written to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Copies, of which any serves as well.
    Replicated,
    /// Shards, each with its own place.
    Erasure,
}

/// A pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// Its name; empty, if the map has none.
    pub name: String,
    /// Copies or shards.
    pub kind: Kind,
    /// How many of them.
    pub size: u8,
    /// So many have to be there for anything to be served.
    pub min_size: u8,
    /// Its rule in the CRUSH map.
    pub crush_rule: u8,
    /// How names of objects are hashed: 2 is rjenkins.
    pub object_hash: u8,
    /// Placement groups.
    pub pg_num: u32,
    /// Placement groups that lie in different places: the others lie where one of these does.
    pub pgp_num: u32,
    /// What else is said of it, bit by bit.
    pub flags: u64,
}

impl Pool {
    /// PGs of different pools lie in different places.
    const HASHES_POOL: u64 = 1 << 0;
    /// Of erasure-coded pools since Ceph 20: not every shard may be the first, and lists have another order.
    const EC_OPTIMIZATIONS: u64 = 1 << 19;

    /// The PG, of a pool of this number, in which an object is.
    ///
    /// # Errors
    /// Names are hashed in another way than by rjenkins, which no pool has unless somebody wants it so.
    pub fn pg_of(&self, pool: i64, namespace: &[u8], object: &[u8]) -> Result<Pg, String> {
        if self.object_hash != hash::RJENKINS {
            return Err(format!(
                "pool {pool} hashes names of objects by method {}, and only {} (rjenkins) is known here",
                self.object_hash,
                hash::RJENKINS
            ));
        }
        let hash = if namespace.is_empty() {
            str_hash(object)
        } else {
            str_hash(&[namespace, &[hash::BETWEEN], object].concat())
        };
        Ok(Pg { pool, seed: stable_mod(hash, self.pg_num) })
    }

    /// What CRUSH maps, for a PG of a pool of this number.
    fn input(&self, pg: Pg) -> u32 {
        let seed = stable_mod(pg.seed, self.pgp_num);
        // Of the number of a pool the lower half is taken, as Ceph does.
        #[allow(clippy::cast_possible_truncation)]
        let pool = pg.pool as u32;
        if self.flags & Self::HASHES_POOL != 0 {
            placement::crush::hash::hash2(seed, pool)
        } else {
            seed.wrapping_add(pool)
        }
    }
}

/// An OSD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Osd {
    /// Whether it is there, and up, bit by bit.
    pub state: u32,
    /// How much of what the CRUSH map gives it it takes: 0 (out) to [`ONE`].
    pub weight: u32,
    /// How willingly it is the primary of a PG: 0 to [`ONE`].
    pub primary_affinity: u32,
}

impl Osd {
    /// Bit of the state: it is there.
    pub const EXISTS: u32 = 1 << 0;
    /// Bit of the state: it is up.
    pub const UP: u32 = 1 << 1;

    /// Whether there is one of this number.
    pub const fn exists(&self) -> bool {
        self.state & Self::EXISTS != 0
    }

    /// Whether it serves.
    pub const fn is_up(&self) -> bool {
        self.state & (Self::EXISTS | Self::UP) == Self::EXISTS | Self::UP
    }
}

/// The map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OsdMap {
    /// The cluster's identity.
    pub fsid: [u8; 16],
    /// Its number: each change makes a new map.
    pub epoch: u32,
    /// Pools by their numbers.
    pub pools: BTreeMap<i64, Pool>,
    /// OSDs by their numbers.
    pub osds: Vec<Osd>,
    /// PGs that are served by others for now, mostly while data goes to where it belongs.
    pub pg_temp: BTreeMap<Pg, Vec<i32>>,
    /// PGs whose primary is another OSD for now.
    pub primary_temp: BTreeMap<Pg, i32>,
    /// PGs that were put where they are.
    pub pg_upmap: BTreeMap<Pg, Vec<i32>>,
    /// PGs of which an OSD was exchanged for another.
    pub pg_upmap_items: BTreeMap<Pg, Vec<(i32, i32)>>,
    /// PGs whose primary was chosen (since Reef).
    pub pg_upmap_primaries: BTreeMap<Pg, i32>,
    /// What the cluster's OSDs are all at least: 16 is Pacific; 0: nobody has said so.
    pub release: u8,
    /// The CRUSH map.
    pub crush: Map,
}

impl OsdMap {
    /// The pool of a name, with its number.
    pub fn pool(&self, name: &str) -> Option<(i64, &Pool)> {
        self.pools.iter().find(|(_, pool)| pool.name == name).map(|(id, pool)| (*id, pool))
    }

    fn osd(&self, number: i32) -> Option<&Osd> {
        self.osds.get(usize::try_from(number).ok()?)
    }

    fn exists(&self, number: i32) -> bool {
        self.osd(number).is_some_and(Osd::exists)
    }

    fn is_up(&self, number: i32) -> bool {
        self.osd(number).is_some_and(Osd::is_up)
    }

    /// Whether that is an OSD, and one that is out.
    fn is_out(&self, number: i32) -> bool {
        self.osd(number).is_some_and(|osd| osd.weight == 0)
    }
}
