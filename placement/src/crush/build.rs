//! Building buckets: what follows from a list of items and weights, per algorithm; and the shadow
//! trees of device classes.

use super::error::{Error, Result};
use super::limits::{BUCKETS_MAX, DEPTH_MAX, TREE_ITEMS_MAX};
use super::map::{Algorithm, Bucket, Map, Weights};
use std::collections::{BTreeMap, BTreeSet};

/// Node of a tree bucket that stands for the item at `position`.
pub(super) const fn tree_node(position: usize) -> usize {
    ((position + 1) << 1) - 1
}

/// Number of nodes of a tree bucket with `size` items.
pub(super) const fn tree_nodes(size: usize) -> usize {
    if size == 0 {
        return 0;
    }
    let depth = 1 + (usize::BITS - (size - 1).leading_zeros());
    1 << depth
}

/// Makes a bucket; its weight is the sum of the weights.
pub fn make_bucket(
    algorithm: Algorithm,
    kind: u16,
    items: Vec<i32>,
    weights: Vec<u32>,
    straw_calc_version: u8,
) -> Result<Bucket> {
    if items.len() != weights.len() {
        return Err(Error::Map("a bucket needs one weight for each item".into()));
    }
    if algorithm == Algorithm::Tree && items.len() > TREE_ITEMS_MAX {
        let n = items.len();
        return Err(Error::Map(format!(
            "{n} items in a tree bucket, which holds {TREE_ITEMS_MAX}"
        )));
    }
    let too_heavy = || Error::Map("weights of a bucket exceed 65,536; lower them".into());
    let mut sums = Vec::with_capacity(weights.len());
    let mut weight = 0u32;
    for w in &weights {
        weight = weight.checked_add(*w).ok_or_else(too_heavy)?;
        sums.push(weight);
    }
    let weights = match algorithm {
        Algorithm::Uniform => {
            let one = weights.first().copied().unwrap_or(0);
            if weights.iter().any(|w| *w != one) {
                return Err(Error::Map("items of a uniform bucket must weigh the same".into()));
            }
            Weights::Uniform(one)
        }
        Algorithm::List => Weights::List { items: weights, sums },
        Algorithm::Tree => Weights::Tree(tree_weights(&weights)),
        Algorithm::Straw => {
            let straws = straw_lengths(&weights, straw_calc_version);
            Weights::Straw { items: weights, straws }
        }
        Algorithm::Straw2 => Weights::Straw2(weights),
    };
    Ok(Bucket { id: 0, kind, hash: 0, weight, items, weights })
}

/// Node weights of a tree bucket: each inner node weighs what is below it.
fn tree_weights(weights: &[u32]) -> Vec<u32> {
    let mut nodes = vec![0u32; tree_nodes(weights.len())];
    for (position, weight) in weights.iter().enumerate() {
        let mut node = tree_node(position);
        nodes[node] = *weight;
        while node != nodes.len() / 2 {
            let height = node.trailing_zeros();
            let on_right = node & (1 << (height + 1)) != 0;
            node = if on_right { node - (1 << height) } else { node + (1 << height) };
            // The sum over all items fits, so every partial sum does.
            nodes[node] = nodes[node].wrapping_add(*weight);
        }
    }
    nodes
}

/// A double to 32 bits the way x86-64 code does it: through 64 bits, the low half kept.
fn to_u32(value: f64) -> u32 {
    if value.is_finite() && value.abs() < 9.2e18 { value as i64 as u32 } else { 0 }
}

/// Straw lengths (16.16). Version 0 counts equal weights as one step, which Ceph keeps for old maps.
fn straw_lengths(weights: &[u32], version: u8) -> Vec<u32> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|i| weights[*i]);
    let mut straws = vec![0; weights.len()];
    let mut left = weights.len() as u32;
    let (mut straw, mut below, mut last) = (1.0f64, 0.0f64, 0.0f64);
    for (rank, i) in order.iter().enumerate() {
        let weight = weights[*i];
        if weight == 0 {
            if version != 0 {
                left -= 1;
            }
            continue;
        }
        straws[*i] = to_u32(straw * 65_536.0);
        let Some(next) = order.get(rank + 1).map(|n| weights[*n]) else { break };
        if version == 0 && next == weight {
            continue;
        }
        below += (f64::from(weight) - last) * f64::from(left);
        if version == 0 {
            let equal = order[rank + 1..].iter().take_while(|n| weights[**n] == next).count();
            left = left.wrapping_sub(equal as u32);
        } else {
            left -= 1;
        }
        // libcrush multiplies in 32 bits, so this may wrap there as well.
        let step = f64::from(left.wrapping_mul(next - weight));
        let share = below / (below + step);
        straw *= (1.0 / share).powf(1.0 / f64::from(left as i32));
        last = f64::from(weight);
    }
    straws
}

impl Map {
    /// Puts a bucket in its place, or with number 0 in the first free one; the table doubles as
    /// libcrush's does. Returns the number.
    pub fn add_bucket(&mut self, mut bucket: Bucket) -> Result<i32> {
        if bucket.id == 0 {
            let free = self.buckets.iter().position(Option::is_none).unwrap_or(self.buckets.len());
            bucket.id = -1 - free as i32;
        }
        let id = bucket.id;
        let index = Self::bucket_index(id).filter(|i| *i < BUCKETS_MAX).ok_or_else(|| {
            Error::Map(format!("bucket number {id} is not in -1..=-{BUCKETS_MAX}"))
        })?;
        while index >= self.buckets.len() {
            let len = if self.buckets.is_empty() { 8 } else { self.buckets.len() * 2 };
            self.buckets.resize(len, None);
        }
        if self.buckets[index].is_some() {
            return Err(Error::Map(format!("bucket number {id} is taken")));
        }
        self.buckets[index] = Some(bucket);
        Ok(id)
    }

    /// The number of the class called `name`, given one if it has none.
    pub fn class_or_new(&mut self, name: &str) -> i32 {
        if let Some((id, _)) = self.class_names.iter().find(|(_, n)| n.as_str() == name) {
            return *id;
        }
        let id = self.class_names.last_key_value().map_or(0, |(id, _)| id.saturating_add(1));
        self.class_names.insert(id, name.to_owned());
        id
    }

    /// Builds the shadow tree of every root and class. `wanted` names the numbers that shadow
    /// buckets had before, which they keep.
    pub fn build_shadow_trees(&mut self, wanted: &BTreeMap<i32, BTreeMap<i32, i32>>) -> Result<()> {
        let used: BTreeSet<i32> = wanted.values().flat_map(|m| m.values().copied()).collect();
        let names: BTreeMap<String, i32> =
            self.item_names.iter().map(|(id, name)| (name.clone(), *id)).collect();
        let roots: Vec<i32> = self.roots().into_iter().filter(|r| !self.is_shadow(*r)).collect();
        let classes: Vec<i32> = self.class_names.keys().copied().collect();
        let mut shadows = Shadows { wanted, used, names, free: -1 };
        for root in roots {
            for class in &classes {
                shadows.copy(self, root, *class, 0)?;
            }
        }
        Ok(())
    }
}

/// State of building shadow trees.
struct Shadows<'a> {
    wanted: &'a BTreeMap<i32, BTreeMap<i32, i32>>,
    used: BTreeSet<i32>,
    names: BTreeMap<String, i32>,
    /// No number above this one is free.
    free: i32,
}

impl Shadows<'_> {
    /// Copies a bucket and what is below it, devices of `class` only. Depth-first, so that inner
    /// weights are known.
    fn copy(&mut self, map: &mut Map, id: i32, class: i32, depth: usize) -> Result<i32> {
        let bucket = map.bucket(id).cloned();
        let bucket = bucket.ok_or_else(|| Error::Map(format!("bucket {id} does not exist")))?;
        let (Some(name), Some(class_name)) = (map.item_names.get(&id), map.class_names.get(&class))
        else {
            return Err(Error::Map(format!("bucket {id} has no name; classes need one")));
        };
        let name = format!("{name}~{class_name}");
        if let Some(known) = self.names.get(&name) {
            return Ok(*known);
        }
        if depth >= DEPTH_MAX {
            return Err(Error::Map(format!("deeper than {DEPTH_MAX} levels at bucket {id}")));
        }
        let (mut items, mut weights) = (Vec::new(), Vec::new());
        for (position, item) in bucket.items.iter().enumerate() {
            if *item >= 0 {
                if map.item_classes.get(item) == Some(&class) {
                    items.push(*item);
                    weights.push(bucket.item_weight(position));
                }
            } else {
                let child = self.copy(map, *item, class, depth + 1)?;
                items.push(child);
                weights.push(map.bucket(child).map_or(0, |b| b.weight));
            }
        }
        let version = map.tunables.straw_calc_version;
        let mut copy = shadow_bucket(&bucket, items, weights, version)?;
        copy.id = self.number(map, id, class)?;
        let number = map.add_bucket(copy)?;
        map.item_classes.insert(number, class);
        map.item_names.insert(number, name.clone());
        self.names.insert(name, number);
        map.class_buckets.entry(id).or_default().insert(class, number);
        Ok(number)
    }

    /// The number that the shadow of `id` had, or the first that nobody has or had.
    fn number(&mut self, map: &Map, id: i32, class: i32) -> Result<i32> {
        if let Some(number) = self.wanted.get(&id).and_then(|m| m.get(&class)) {
            return Ok(*number);
        }
        while map.bucket(self.free).is_some() || self.used.contains(&self.free) {
            self.free -= 1;
            if self.free < -(BUCKETS_MAX as i32) {
                return Err(Error::Map(format!("more than {BUCKETS_MAX} buckets")));
            }
        }
        Ok(self.free)
    }
}

/// The copy of a bucket with fewer items. A uniform one keeps weight 0 for its items, as in Ceph,
/// which only ever sums what it adds.
fn shadow_bucket(of: &Bucket, items: Vec<i32>, weights: Vec<u32>, version: u8) -> Result<Bucket> {
    let mut copy = make_bucket(of.algorithm(), of.kind, items, weights, version)?;
    copy.hash = of.hash;
    Ok(copy)
}
