//! How a map uses its devices, and what moves when it changes.

use super::choose::{ITEM_NONE, Workspace};
use super::error::{Error, Result};
use super::flat::Placer;
use super::hash::hash2;
use super::limits::RESULT_MAX;

/// Which mappings to look at.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Rule.
    pub rule: u32,
    /// Replicas.
    pub replicas: usize,
    /// First input.
    pub first: u32,
    /// Last input.
    pub last: u32,
    /// If given, inputs are hashed with this pool first, as Ceph does for placement groups.
    pub pool: Option<u32>,
    /// Reweight of each device, 0 to 0x10000.
    pub reweights: &'a [u32],
}

/// Inputs that are mapped at a time.
const STRIDE: u64 = 4096;

impl Inputs<'_> {
    /// How many inputs there are.
    pub fn count(&self) -> u64 {
        u64::from(self.last) + 1 - u64::from(self.first.min(self.last))
    }

    fn check(&self) -> Result<()> {
        if self.first > self.last {
            return Err(Error::Request(format!("no input is in {}..={}", self.first, self.last)));
        }
        if !(1..=RESULT_MAX).contains(&self.replicas) {
            return Err(Error::Request(format!("replicas must be 1 to {RESULT_MAX}")));
        }
        Ok(())
    }

    /// Maps all inputs by each placer in turn and hands every input's results to `each`.
    fn run<const N: usize>(
        &self,
        placers: [(&Placer, &[u32]); N],
        mut each: impl FnMut(u32, [&[i32]; N]),
    ) -> Result<()> {
        self.check()?;
        let mut workspace = Workspace::new();
        let mut from = u64::from(self.first);
        while from <= u64::from(self.last) {
            let to = (from + STRIDE - 1).min(u64::from(self.last));
            let inputs: Vec<u32> = (from..=to).map(|x| x as u32).collect();
            let xs: Vec<u32> = match self.pool {
                Some(pool) => inputs.iter().map(|x| hash2(*x, pool)).collect(),
                None => inputs.clone(),
            };
            let mut batches = Vec::with_capacity(N);
            for (placer, reweights) in placers {
                batches.push(placer.place_many(
                    self.rule,
                    &xs,
                    self.replicas,
                    reweights,
                    &mut workspace,
                )?);
            }
            for (i, x) in inputs.iter().enumerate() {
                each(*x, std::array::from_fn(|n| batches[n].get(i)));
            }
            from = to + 1;
        }
        Ok(())
    }
}

/// One device's part.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceUse {
    /// Device.
    pub device: i32,
    /// Mappings that include it.
    pub placements: u64,
    /// Mappings that its weight entitles it to.
    pub expected: f64,
}

/// What [`usage`] finds.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// Inputs mapped.
    pub inputs: u64,
    /// Devices placed on, over all inputs.
    pub placements: u64,
    /// How many inputs got how many replicas: the index is the number.
    pub sizes: Vec<u64>,
    /// Devices that were placed on or have weight.
    pub devices: Vec<DeviceUse>,
    /// Inputs that got fewer replicas than wanted, the first few with what they got.
    pub bad: Vec<(u32, Vec<i32>)>,
    /// Number of those inputs.
    pub bad_count: u64,
    /// Standard deviation of placements / expected over devices with weight.
    pub deviation: f64,
}

/// Bad mappings that are kept to be shown.
const BAD_SHOWN: usize = 1000;

/// Maps all inputs and counts. `weights` is the weight of each device in the tree that the rule
/// takes, for what is expected; `show` sees every mapping.
pub fn usage(
    placer: &Placer,
    inputs: &Inputs<'_>,
    weights: &[u64],
    mut show: impl FnMut(u32, &[i32]),
) -> Result<Usage> {
    let mut counts = vec![0u64; placer.device_count()];
    let mut found = Usage {
        inputs: inputs.count(),
        placements: 0,
        sizes: vec![0; inputs.replicas + 1],
        devices: Vec::new(),
        bad: Vec::new(),
        bad_count: 0,
        deviation: 0.0,
    };
    inputs.run([(placer, inputs.reweights)], |x, [items]| {
        show(x, items);
        let mut placed = 0;
        for device in items.iter().filter(|item| **item != ITEM_NONE) {
            placed += 1;
            if let Some(count) = usize::try_from(*device).ok().and_then(|d| counts.get_mut(d)) {
                *count += 1;
            }
        }
        found.placements += placed as u64;
        found.sizes[placed] += 1;
        if placed < inputs.replicas {
            found.bad_count += 1;
            if found.bad.len() < BAD_SHOWN {
                found.bad.push((x, items.to_vec()));
            }
        }
    })?;
    let part = |device: usize| {
        let reweight = inputs.reweights.get(device).copied().unwrap_or(0).min(0x1_0000);
        weights.get(device).copied().unwrap_or(0) as f64 * f64::from(reweight)
    };
    let whole: f64 = (0..counts.len()).map(part).sum();
    for (device, placements) in counts.iter().enumerate() {
        let expected =
            if whole > 0.0 { found.placements as f64 * part(device) / whole } else { 0.0 };
        if *placements > 0 || expected > 0.0 {
            let (device, placements) = (device as i32, *placements);
            found.devices.push(DeviceUse { device, placements, expected });
        }
    }
    let ratios = found.devices.iter().filter(|d| d.expected > 0.0);
    let ratios: Vec<f64> = ratios.map(|d| d.placements as f64 / d.expected).collect();
    if !ratios.is_empty() {
        let n = ratios.len() as f64;
        let mean = ratios.iter().sum::<f64>() / n;
        found.deviation = (ratios.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n).sqrt();
    }
    Ok(found)
}

/// What [`movement`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movement {
    /// Inputs compared.
    pub inputs: u64,
    /// Inputs whose replicas are not the same devices in the same places.
    pub changed_inputs: u64,
    /// Replicas after the change.
    pub placements: u64,
    /// Replicas on a device that did not hold the input before: data that moves.
    pub moved: u64,
    /// Replicas on a device that held the input, at another place in the list.
    pub reordered: u64,
    /// Replicas that moved away from each device, then those that moved to it.
    pub by_device: Vec<(i32, u64, u64)>,
}

/// Maps all inputs by both maps, with reweights of their own, and counts what moves.
pub fn movement(
    before: (&Placer, &[u32]),
    after: (&Placer, &[u32]),
    inputs: &Inputs<'_>,
) -> Result<Movement> {
    let devices = before.0.device_count().max(after.0.device_count());
    let mut flows = vec![(0u64, 0u64); devices];
    let mut found = Movement {
        inputs: inputs.count(),
        changed_inputs: 0,
        placements: 0,
        moved: 0,
        reordered: 0,
        by_device: Vec::new(),
    };
    let index = |item: i32| usize::try_from(item).ok().filter(|d| *d < devices);
    inputs.run([before, after], |_, [old, new]| {
        found.changed_inputs += u64::from(old != new);
        for (place, item) in new.iter().enumerate().filter(|(_, item)| **item != ITEM_NONE) {
            found.placements += 1;
            if !old.contains(item) {
                found.moved += 1;
                index(*item).into_iter().for_each(|d| flows[d].1 += 1);
            } else if old.get(place) != Some(item) {
                found.reordered += 1;
            }
        }
        for item in old.iter().filter(|item| **item != ITEM_NONE && !new.contains(item)) {
            index(*item).into_iter().for_each(|d| flows[d].0 += 1);
        }
    })?;
    let moved = flows.iter().enumerate().filter(|(_, (from, to))| from + to > 0);
    found.by_device = moved.map(|(d, (from, to))| (d as i32, *from, *to)).collect();
    Ok(found)
}
