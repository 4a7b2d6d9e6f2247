//! A checked map, laid out for choosing.
//!
//! Always true of a [`Placer`]: every item of a bucket is a device below `devices` or a bucket that
//! exists; no bucket contains itself, however indirectly; every per-item list has as many entries as
//! the bucket has items; no bucket has type 0. Choosing relies on it and checks none of it again.

use super::engine::Engine;
use super::error::{Error, Result};
use super::limits::{DEPTH_MAX, DEVICES_MAX, DRAWS_MAX, ITEMS_MAX};
use super::map::{Bucket, CHOOSE_ARGS_DEFAULT, ChooseArg, Map, Rule, Tunables, Weights};

/// How to place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Which code draws straw2; none: the fastest that this processor has.
    pub engine: Option<Engine>,
    /// Whose stand-in weights apply (a pool's number); the default set where that pool has none.
    pub choose_args: Option<i64>,
    /// Work that one mapping may take, in items drawn; none: [`super::limits::DRAWS_MAX`].
    pub draws_max: Option<u64>,
}

/// A checked map with the engine that draws for it.
#[derive(Debug)]
pub struct Placer {
    pub(super) buckets: Vec<Option<Flat>>,
    pub(super) devices: i32,
    pub(super) tunables: Tunables,
    pub(super) rules: Vec<Option<Rule>>,
    pub(super) engine: Engine,
    pub(super) table: Table,
    pub(super) draws_max: u64,
    /// Levels below the highest root.
    pub(super) depth: usize,
}

/// A bucket for choosing.
#[derive(Debug)]
pub(super) struct Flat {
    pub id: i32,
    pub items: Vec<i32>,
    pub draw: Draw,
}

/// What a bucket draws from.
#[derive(Debug)]
pub(super) enum Draw {
    Uniform,
    List {
        weights: Vec<u32>,
        sums: Vec<u32>,
    },
    Tree(Vec<u32>),
    Straw(Vec<u32>),
    /// One set, or one per replica position.
    Straw2 {
        ids: Vec<i32>,
        sets: Vec<Straw2>,
    },
}

/// Weights of a straw2 bucket, also in the form of the vector engines.
#[derive(Debug)]
pub(super) struct Straw2 {
    pub weights: Vec<u32>,
    /// 1 / weight, [`HEAVY`] for weight 0; padded with that to whole vectors.
    pub inverse: Vec<f32>,
    /// Numbers to hash, padded likewise.
    pub ids: Vec<i32>,
    /// What a distance in single precision may be wrong by; see `engine`.
    pub slack: f32,
}

/// Stands for the inverse of weight 0: such an item never wins by the approximate comparison.
pub(super) const HEAVY: f32 = 1e30;
/// Lanes of the widest engine.
pub(super) const LANES_MAX: usize = 16;

/// Straw2 buckets of the whole map in three flat lists, for drawing many inputs at once.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Type of each bucket, whatever draws it.
    pub kind: Vec<i32>,
    /// Per bucket index: where its items begin.
    pub start: Vec<u32>,
    /// Per bucket index: how many there are; 0 where it cannot be drawn here.
    pub size: Vec<u32>,
    /// Per bucket index.
    pub slack: Vec<f32>,
    /// Per item: number to hash, and bits of the inverse weight.
    pub cells: Vec<[u32; 2]>,
    /// Per item: what is chosen.
    pub items: Vec<i32>,
}

impl Straw2 {
    fn new(ids: &[i32], weights: &[u32]) -> Self {
        let padded = weights.len().next_multiple_of(LANES_MAX);
        let mut inverse: Vec<f32> =
            weights.iter().map(|w| if *w == 0 { HEAVY } else { 1.0 / *w as f32 }).collect();
        inverse.resize(padded, HEAVY);
        let mut ids = ids.to_vec();
        ids.resize(padded, 0);
        let heaviest = weights.iter().copied().max().unwrap_or(0) as f32;
        // A draw is a whole number after division; cutting it off moves the distance by up to
        // weight / 2^44.
        let slack = super::engine::APPROXIMATION + heaviest / (1u64 << 44) as f32;
        Self { weights: weights.to_vec(), inverse, ids, slack }
    }
}

impl Placer {
    /// Checks `map` and lays it out.
    pub fn new(map: &Map, options: &Options) -> Result<Self> {
        check_size(map)?;
        for bucket in map.buckets.iter().flatten() {
            check_bucket(map, bucket)?;
        }
        let depth = check_acyclic(map)?;
        let engine = Engine::resolve(options.engine)?;
        let args = options.choose_args.and_then(|pool| {
            map.choose_args.get(&pool).or_else(|| map.choose_args.get(&CHOOSE_ARGS_DEFAULT))
        });
        let mut buckets = Vec::with_capacity(map.buckets.len());
        for (index, bucket) in map.buckets.iter().enumerate() {
            let arg = args.and_then(|args| args.get(&(index as u32)));
            buckets.push(bucket.as_ref().map(|b| flatten(b, arg)).transpose()?);
        }
        let kinds = map.buckets.iter().map(|b| b.as_ref().map_or(0, |b| b.kind.into()));
        let table = Table::new(&buckets, kinds.collect());
        let devices = map.device_count() as i32;
        let (tunables, rules) = (map.tunables, map.rules.clone());
        let draws_max = options.draws_max.unwrap_or(DRAWS_MAX);
        Ok(Self { buckets, devices, tunables, rules, engine, table, draws_max, depth })
    }

    /// Highest device number plus one: the useful length of a reweight list.
    pub const fn device_count(&self) -> usize {
        self.devices as usize
    }

    /// The engine in use.
    pub const fn engine(&self) -> Engine {
        self.engine
    }

    pub(super) fn bucket(&self, index: usize) -> Option<&Flat> {
        self.buckets.get(index)?.as_ref()
    }

    /// Type of an item: 0 for devices.
    pub(super) fn kind(&self, item: i32) -> i32 {
        Map::bucket_index(item).and_then(|i| self.table.kind.get(i)).map_or(0, |kind| *kind)
    }
}

impl Table {
    fn new(buckets: &[Option<Flat>], kind: Vec<i32>) -> Self {
        let mut table = Self { kind, ..Self::default() };
        for bucket in buckets {
            table.start.push(table.cells.len() as u32);
            let drawn = match bucket {
                Some(Flat { items, draw: Draw::Straw2 { sets, .. }, .. }) => {
                    match sets.as_slice() {
                        [set] => Some((items, set)),
                        _ => None,
                    }
                }
                _ => None,
            };
            let Some((items, set)) = drawn else {
                table.size.push(0);
                table.slack.push(0.0);
                continue;
            };
            table.size.push(items.len() as u32);
            table.slack.push(set.slack);
            table.items.extend_from_slice(items);
            let cells = set.ids.iter().zip(&set.inverse).take(items.len());
            table.cells.extend(cells.map(|(id, inverse)| [*id as u32, inverse.to_bits()]));
        }
        // Gathers of lanes that are past their bucket's end read the cell after it.
        table.cells.push([0, HEAVY.to_bits()]);
        table
    }
}

fn refuse<T>(what: String) -> Result<T> {
    Err(Error::Map(what))
}

fn check_size(map: &Map) -> Result<()> {
    let items: usize = map.buckets.iter().flatten().map(|b| b.items.len()).sum();
    if items > ITEMS_MAX {
        return refuse(format!("{items} items, more than {ITEMS_MAX}"));
    }
    if map.device_count() > DEVICES_MAX {
        let last = map.device_count() - 1;
        return refuse(format!("device {last} is not below {DEVICES_MAX}; renumber it"));
    }
    Ok(())
}

fn check_bucket(map: &Map, bucket: &Bucket) -> Result<()> {
    let (id, size) = (bucket.id, bucket.items.len());
    if bucket.kind == 0 {
        return refuse(format!("bucket {id} has type 0, which is for devices"));
    }
    if bucket.hash != 0 {
        return refuse(format!("bucket {id} has hash {}; only 0 (rjenkins1) exists", bucket.hash));
    }
    let fits = match &bucket.weights {
        Weights::Uniform(_) => true,
        Weights::List { items, sums } => items.len() == size && sums.len() == size,
        Weights::Tree(nodes) => nodes.len() == super::build::tree_nodes(size),
        Weights::Straw { items, straws } => items.len() == size && straws.len() == size,
        Weights::Straw2(items) => items.len() == size,
    };
    if !fits {
        return refuse(format!("bucket {id} has {size} items and another number of weights"));
    }
    match bucket.items.iter().find(|item| **item < 0 && map.bucket(**item).is_none()) {
        Some(item) => refuse(format!("bucket {id} contains bucket {item}, which does not exist")),
        None => Ok(()),
    }
}

/// Number of levels, found by taking away, again and again, the buckets that nothing contains.
fn check_acyclic(map: &Map) -> Result<usize> {
    let inner = |b: &Bucket| -> Vec<usize> {
        b.items.iter().filter_map(|item| Map::bucket_index(*item)).collect()
    };
    let mut containers = vec![0u32; map.buckets.len()];
    for bucket in map.buckets.iter().flatten() {
        inner(bucket).into_iter().for_each(|i| containers[i] += 1);
    }
    let mut left = map.buckets.iter().flatten().count();
    let exists = |i: &usize| map.buckets[*i].is_some();
    let mut level: Vec<usize> =
        (0..containers.len()).filter(|i| containers[*i] == 0).filter(exists).collect();
    let mut depth = 0;
    while !level.is_empty() {
        depth += 1;
        if depth > DEPTH_MAX {
            return refuse(format!("deeper than {DEPTH_MAX} levels"));
        }
        left -= level.len();
        let mut next = Vec::new();
        for bucket in level.iter().filter_map(|i| map.buckets[*i].as_ref()) {
            for i in inner(bucket) {
                containers[i] -= 1;
                if containers[i] == 0 {
                    next.push(i);
                }
            }
        }
        level = next;
    }
    if left > 0 {
        return refuse(format!("{left} buckets contain themselves, directly or through others"));
    }
    Ok(depth)
}

fn flatten(bucket: &Bucket, arg: Option<&ChooseArg>) -> Result<Flat> {
    let draw = match &bucket.weights {
        Weights::Uniform(_) => Draw::Uniform,
        Weights::List { items, sums } => Draw::List { weights: items.clone(), sums: sums.clone() },
        Weights::Tree(nodes) => Draw::Tree(nodes.clone()),
        Weights::Straw { straws, .. } => Draw::Straw(straws.clone()),
        Weights::Straw2(weights) => straw2(bucket, weights, arg)?,
    };
    Ok(Flat { id: bucket.id, items: bucket.items.clone(), draw })
}

fn straw2(bucket: &Bucket, weights: &[u32], arg: Option<&ChooseArg>) -> Result<Draw> {
    let size = bucket.items.len();
    let mut ids = bucket.items.clone();
    let mut sets = Vec::new();
    if let Some(arg) = arg {
        let sized = |len: usize| len == size;
        if !arg.weight_sets.iter().all(|w| sized(w.len()))
            || !(arg.ids.is_empty() || sized(arg.ids.len()))
        {
            let id = bucket.id;
            return refuse(format!("choose_args of bucket {id} are not for its {size} items"));
        }
        if !arg.ids.is_empty() {
            ids.clone_from(&arg.ids);
        }
        sets.extend(arg.weight_sets.iter().map(|w| Straw2::new(&ids, w)));
    }
    if sets.is_empty() {
        sets.push(Straw2::new(&ids, weights));
    }
    Ok(Draw::Straw2 { ids, sets })
}
