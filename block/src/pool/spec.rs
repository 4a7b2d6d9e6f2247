//! What a pool is made of, as it stands in its file, and where shards go.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;

use placement::coding::{CHUNKS_MAX, Code, Kind};
use placement::crush::{
    Algorithm, ITEM_NONE, Map, Options, Placer, RULE_ERASURE, Rule, Step, Tunables, Workspace,
    hash, make_bucket,
};
use serde::{Deserialize, Serialize};

/// Form of the file.
const VERSION: u32 = 1;
/// Stores of a pool.
pub const STORES_MAX: usize = 1000;
/// Weight of a store in the map.
const WEIGHT: u32 = 0x10000;

/// How objects are coded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Coding {
    /// So many copies.
    Replicated {
        /// Copies.
        copies: usize,
    },
    /// Reed-Solomon.
    Rs {
        /// Shards of data, k.
        data: usize,
        /// Shards of parity, m.
        parity: usize,
    },
}

impl Coding {
    /// Shards of data.
    pub fn data(self) -> usize {
        match self {
            Self::Replicated { .. } => 1,
            Self::Rs { data, .. } => data,
        }
    }

    /// Shards in all: stores that one object takes.
    pub fn width(self) -> usize {
        match self {
            Self::Replicated { copies } => copies,
            Self::Rs { data, parity } => data + parity,
        }
    }

    /// Shards that must be durable before a write is answered: one more than it takes to read it, where there are more.
    pub fn quorum(self) -> usize {
        (self.data() + 1).min(self.width())
    }

    /// Copies of a patch that must be durable before a small write is answered: one more than the stores that may be lost, as long as
    /// a whole object asks for no fewer.
    pub fn copies(self) -> usize {
        let (data, width) = (self.data(), self.width());
        (width - data).min(data) + 1
    }

    /// Copies of a patch that there should be: where whole objects are copied, as many as of those.
    pub fn copies_wanted(self) -> usize {
        if self.data() == 1 { self.width() } else { self.copies() }
    }

    fn check(self) -> Result<(), String> {
        let (data, width) = (self.data(), self.width());
        if data == 0 || width == 0 || width > CHUNKS_MAX.min(64) {
            return Err(format!("{self}: there must be 1 to 64 shards, one of data at least"));
        }
        Ok(())
    }
}

impl std::fmt::Display for Coding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Replicated { copies } => write!(f, "replicated:{copies}"),
            Self::Rs { data, parity } => write!(f, "rs:{data},{parity}"),
        }
    }
}

impl std::str::FromStr for Coding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no coding: write replicated:N or rs:K,M");
        let coding = match text.split_once(':').ok_or_else(wrong)? {
            ("replicated", copies) => {
                Self::Replicated { copies: copies.parse().map_err(|_| wrong())? }
            }
            ("rs", shape) => {
                let (data, parity) = shape.split_once(',').ok_or_else(wrong)?;
                let number = |text: &str| text.parse().map_err(|_| wrong());
                Self::Rs { data: number(data)?, parity: number(parity)? }
            }
            _ => return Err(wrong()),
        };
        coding.check()?;
        Ok(coding)
    }
}

/// A store of a pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSpec {
    /// What fails together: a machine, a rack.
    pub domain: String,
    /// Where it is: `dir:PATH`, `s3:URL`, `rados:POOL/NAMESPACE`.
    pub at: String,
    /// Nothing new goes there, and a repair moves away what is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub out: bool,
}

/// A pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Form of this file.
    pub version: u32,
    /// Name of the pool among all pools.
    pub id: u64,
    /// How objects are coded.
    pub coding: Coding,
    /// Its stores. Their places in this list are their numbers: a store that is gone is marked out, never taken away.
    pub stores: Vec<StoreSpec>,
}

impl Spec {
    /// A new pool; an error says what is wrong with it.
    pub fn new(coding: Coding, stores: Vec<StoreSpec>) -> Result<Self, String> {
        let id = super::shard::draw();
        let spec = Self { version: VERSION, id, coding, stores };
        spec.check()?;
        Ok(spec)
    }

    /// Reads a pool's file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let told = |error: String| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| told(error.to_string()))?;
        let spec: Self = serde_json::from_str(&text).map_err(|error| told(error.to_string()))?;
        spec.check().map_err(told)?;
        Ok(spec)
    }

    /// Its text.
    pub fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Checks what a file may have wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!(
                "a pool of form {}, and this program knows {VERSION}",
                self.version
            ));
        }
        self.coding.check()?;
        let there = self.stores.iter().filter(|store| !store.out).count();
        if there < self.coding.width() {
            let needed = self.coding.width();
            return Err(format!("{} takes {needed} stores, and there are {there}", self.coding));
        }
        if self.stores.len() > STORES_MAX {
            return Err(format!("more than {STORES_MAX} stores"));
        }
        let places: BTreeSet<&str> = self.stores.iter().map(|store| store.at.as_str()).collect();
        if places.len() < self.stores.len() {
            return Err("a store is named twice".into());
        }
        Ok(())
    }

    /// The code, if it is one.
    pub(super) fn code(&self) -> Result<Option<Code>, String> {
        match self.coding {
            Coding::Replicated { .. } => Ok(None),
            Coding::Rs { data, parity } => {
                Code::new(Kind::Cauchy, data, parity).map(Some).map_err(|e| e.to_string())
            }
        }
    }
}

/// Where shards go.
pub struct Places {
    placer: Placer,
    workspace: Mutex<Workspace>,
    reweights: Vec<u32>,
    width: usize,
}

impl std::fmt::Debug for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Places").field("width", &self.width).finish_non_exhaustive()
    }
}

impl Places {
    /// The map of a pool: a root, the domains, the stores. With fewer domains than shards, stores are chosen without
    /// regard to domains.
    pub fn new(spec: &Spec) -> Result<Self, String> {
        let told = |error: placement::crush::Error| error.to_string();
        let mut map = Map::new(Tunables::DEFAULT);
        let domains: BTreeSet<&str> =
            spec.stores.iter().filter(|s| !s.out).map(|s| s.domain.as_str()).collect();
        let (mut buckets, mut weights) = (Vec::new(), Vec::new());
        for domain in &domains {
            let of = |(i, store): (usize, &StoreSpec)| {
                (store.domain == *domain && !store.out).then_some(i as i32)
            };
            let items: Vec<i32> = spec.stores.iter().enumerate().filter_map(of).collect();
            let each = vec![WEIGHT; items.len()];
            weights.push(WEIGHT * items.len() as u32);
            let bucket = make_bucket(Algorithm::Straw2, 1, items, each, 1).map_err(told)?;
            buckets.push(map.add_bucket(bucket).map_err(told)?);
        }
        let root = make_bucket(Algorithm::Straw2, 2, buckets, weights, 1).map_err(told)?;
        let root = map.add_bucket(root).map_err(told)?;
        let width = spec.coding.width();
        let choose = if domains.len() >= width {
            Step::ChooseLeafIndep(0, 1)
        } else {
            Step::ChooseIndep(0, 0)
        };
        map.rules.push(Some(Rule {
            ruleset: 0,
            kind: RULE_ERASURE,
            min_size: 1,
            max_size: 64,
            steps: vec![
                Step::SetChooseTries(200),
                Step::SetChooseLeafTries(5),
                Step::Take(root),
                choose,
                Step::Emit,
            ],
        }));
        let placer = Placer::new(&map, &Options::default()).map_err(told)?;
        let reweights = spec.stores.iter().map(|s| if s.out { 0 } else { WEIGHT }).collect();
        Ok(Self { placer, workspace: Mutex::default(), reweights, width })
    }

    /// The stores of an object's shards, by shard; all different.
    pub fn of(&self, image: u64, object: u64) -> Vec<usize> {
        let mixed = image ^ object.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = hash::hash2((mixed >> 32) as u32, mixed as u32);
        let mut out = vec![ITEM_NONE; self.width];
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.placer.place(0, x, &self.reweights, &mut out, &mut workspace);
        if found.is_err() {
            out.fill(ITEM_NONE);
        }
        let mut taken: BTreeSet<i32> = out.iter().copied().filter(|i| *i >= 0).collect();
        let mut spare =
            (0..self.reweights.len() as i32).filter(|i| self.reweights[*i as usize] > 0);
        // A hole that the rule leaves, when nearly all stores are wanted, gets the first store that is free.
        let fill = |item: i32| {
            let free = |i: &i32| taken.insert(*i);
            let item = if item >= 0 && item != ITEM_NONE { Some(item) } else { spare.find(free) };
            item.map_or(0, |i| i as usize)
        };
        out.into_iter().map(fill).collect()
    }
}
