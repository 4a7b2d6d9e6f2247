//! Mapping many inputs: the straw2 draws that nearly every mapping needs, for all inputs and replicas
//! at once, one a vector lane; then each mapping on its own with those answers at hand.
//!
//! Which draws those are follows from the rule: replica i begins at the item taken and descends with
//! attempt number i until it meets the type wanted, then on to a device. Only what collides or is
//! out asks for more. A bucket of another kind, or with weights by position, ends the run ahead
//! there, and the mapping draws the rest itself: the results are the same for every map.

use super::choose::{Ahead, Answer, Settings, Workspace, is_out, leaf_attempt};
use super::engine::{Lanes, UNDECIDED, pick_exactly};
use super::error::{Error, Result};
use super::flat::{Draw, LANES_MAX, Placer};
use super::map::{Map, Rule, Step};

/// Inputs that go through the vectors together: enough that each bucket has whole
/// vectors of them, few enough that what they leave stays in the second-level cache.
const CHUNK: usize = 1024;
/// Replicas that are computed ahead; more are rare, and drawn one by one.
const REPLICAS_AHEAD: usize = 16;
/// Levels likewise.
const LEVELS_AHEAD: usize = 8;

const NO_ANSWER: Answer = Answer { bucket: u32::MAX, r: 0, item: 0 };

/// Results of many mappings: `width` places an input, the first `lens[i]` of which are valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Replicas wanted an input.
    pub width: usize,
    /// Devices, `width` an input.
    pub items: Vec<i32>,
    /// Number of results an input.
    pub lens: Vec<u32>,
}

impl Batch {
    /// Results of the `i`-th input.
    pub fn get(&self, i: usize) -> &[i32] {
        &self.items[i * self.width..][..self.lens[i] as usize]
    }
}

/// Memory of the run ahead.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    lanes: Lanes,
    /// What each lane works for: its slot among the answers, and where it goes on.
    owners: Vec<Owner>,
    chosen: Vec<i32>,
    answers: Vec<Answer>,
    /// Where each replica of each input ends if its first attempt is good.
    ends: Vec<End>,
    going: Vec<(Owner, u32, u32, u32)>,
    next: Places,
}

#[derive(Debug, Default, Clone, Copy)]
struct Owner {
    /// Replica, counted over all inputs.
    end: u32,
    slot: u32,
    level: u32,
    below: bool,
}

/// Item of the type wanted, and what is reached below it.
#[derive(Debug, Clone, Copy)]
struct End {
    domain: i32,
    leaf: i32,
}

const NO_END: End = End { domain: UNDECIDED, leaf: UNDECIDED };

/// The first choice of a rule.
struct Plan {
    start: u32,
    kind: i32,
    firstn: bool,
    to_leaf: bool,
    vary_r: u32,
    stable: bool,
    replicas: usize,
    levels: usize,
    /// The rule is this one choice, and all of it is computed ahead.
    whole: bool,
}

impl Plan {
    fn new(placer: &Placer, rule: &Rule, width: usize) -> Option<Self> {
        let mut settings = Settings::new(placer);
        let mut start = None;
        for (at, step) in rule.steps.iter().enumerate() {
            let (count, kind, firstn, to_leaf) = match *step {
                Step::Take(item) => {
                    start = Map::bucket_index(item);
                    continue;
                }
                Step::ChooseFirstn(n, kind) => (n, kind, true, false),
                Step::ChooseLeafFirstn(n, kind) => (n, kind, true, true),
                Step::ChooseIndep(n, kind) => (n, kind, false, false),
                Step::ChooseLeafIndep(n, kind) => (n, kind, false, true),
                Step::Emit => return None,
                other => {
                    settings.set(other);
                    continue;
                }
            };
            let numrep = if count > 0 { count } else { count.saturating_add(width as i32) };
            let replicas = usize::try_from(numrep).ok()?.min(width).min(REPLICAS_AHEAD);
            let start = start? as u32;
            let drawable = placer.table.size.get(start as usize).is_some_and(|n| *n > 0);
            return (drawable && replicas > 0).then_some(Self {
                start,
                kind,
                firstn,
                to_leaf,
                vary_r: settings.vary_r as u32,
                stable: settings.stable != 0,
                replicas,
                levels: placer.depth.min(LEVELS_AHEAD),
                whole: replicas == width && rule.steps[at + 1..] == [Step::Emit],
            });
        }
        None
    }

    /// Whether every replica's first attempt is good: then `out` has them, and nothing is retried.
    fn first_attempts_hold(
        &self,
        ends: &[End],
        x: u32,
        reweights: &[u32],
        out: &mut [i32],
    ) -> bool {
        for (i, end) in ends.iter().enumerate() {
            // A device was wanted, below the domain or as the domain itself.
            let device = self.to_leaf || self.kind == 0;
            let reached = end.domain != UNDECIDED && (end.leaf >= 0 || !device);
            if !reached || ends[..i].iter().any(|e| e.domain == end.domain) {
                return false;
            }
            // Replicas from the front also keep devices apart that lie in several domains.
            if self.firstn && out[..i].contains(&end.leaf) {
                return false;
            }
            if device && is_out(reweights, end.leaf, x) {
                return false;
            }
            out[i] = end.leaf;
        }
        true
    }

    /// Attempt number below the bucket that replica `rep` chose at attempt `r`.
    fn leaf_r(&self, rep: u32) -> u32 {
        let r = rep as i32;
        (match (self.firstn, self.stable) {
            (true, true) => leaf_attempt(r, self.vary_r),
            (true, false) => r.wrapping_add(leaf_attempt(r, self.vary_r)),
            (false, _) => r.wrapping_add(r),
        }) as u32
    }
}

impl Placer {
    /// Maps every input by a rule, `width` replicas each, as [`Placer::place`] would one by one.
    pub fn place_many(
        &self,
        rule: u32,
        xs: &[u32],
        width: usize,
        reweights: &[u32],
        workspace: &mut Workspace,
    ) -> Result<Batch> {
        let rule = self.rule(rule)?;
        let total = xs.len().checked_mul(width);
        let total = total.ok_or_else(|| Error::Request("too many inputs at once".into()))?;
        let mut batch = Batch { width, items: vec![0; total], lens: Vec::with_capacity(xs.len()) };
        let plan = Plan::new(self, rule, width);
        for (chunk, inputs) in xs.chunks(CHUNK).enumerate() {
            // The answers are lent to the mappings while these use the rest of the workspace.
            let mut scratch = std::mem::take(&mut workspace.batch);
            let stride = match &plan {
                Some(plan) => self.run_ahead(plan, inputs, &mut scratch),
                None => 0,
            };
            for (i, x) in inputs.iter().enumerate() {
                let at = (chunk * CHUNK + i) * width;
                let out = &mut batch.items[at..at + width];
                if let Some(plan) = plan.as_ref().filter(|plan| plan.whole) {
                    let ends = &scratch.ends[i * width..(i + 1) * width];
                    if plan.first_attempts_hold(ends, *x, reweights, out) {
                        batch.lens.push(width as u32);
                        continue;
                    }
                }
                let ahead = Ahead::new(&scratch.answers[i * stride..(i + 1) * stride]);
                let found = self.place_by(rule, *x, reweights, out, workspace, ahead)?;
                batch.lens.push(found as u32);
            }
            workspace.batch = scratch;
        }
        Ok(batch)
    }

    /// Fills the answers of a chunk; returns how many places each input has among them.
    fn run_ahead(&self, plan: &Plan, xs: &[u32], scratch: &mut Scratch) -> usize {
        let stride = plan.replicas * plan.levels;
        scratch.answers.clear();
        scratch.answers.resize(xs.len() * stride, NO_ANSWER);
        scratch.ends.clear();
        scratch.ends.resize(xs.len() * plan.replicas, NO_END);
        scratch.owners.clear();
        scratch.lanes.resize(xs.len() * plan.replicas);
        for rep in 0..plan.replicas {
            for (i, x) in xs.iter().enumerate() {
                let slot = (i * stride + rep * plan.levels) as u32;
                let (lane, lanes) = (scratch.owners.len(), &mut scratch.lanes);
                let end = (i * plan.replicas + rep) as u32;
                scratch.owners.push(Owner { end, slot, level: 0, below: false });
                lanes.bucket[lane] = plan.start;
                (lanes.x[lane], lanes.r[lane]) = (*x, rep as u32);
            }
        }
        for _ in 0..plan.levels {
            let live = scratch.owners.len();
            if live == 0 || !self.draw_lanes(&mut scratch.lanes, live, &mut scratch.chosen) {
                break;
            }
            self.advance(plan, scratch);
        }
        stride
    }

    /// Draws for the first `live` lanes. False: the engine has no vectors.
    fn draw_lanes(&self, lanes: &mut Lanes, live: usize, chosen: &mut Vec<i32>) -> bool {
        // The last vector may begin at the last lane.
        lanes.resize(live);
        let valid = lanes.bucket[0];
        lanes.bucket[live..].fill(valid);
        chosen.clear();
        chosen.resize(live + LANES_MAX, UNDECIDED);
        if !self.engine.pick_many(&self.table, lanes, chosen) {
            return false;
        }
        for (lane, item) in chosen[..live].iter_mut().enumerate() {
            if *item != UNDECIDED {
                continue;
            }
            let Some(bucket) = self.bucket(lanes.bucket[lane] as usize) else { continue };
            if let Draw::Straw2 { ids, sets } = &bucket.draw {
                let winner = pick_exactly(ids, &sets[0].weights, lanes.x[lane], lanes.r[lane]);
                *item = bucket.items[winner];
            }
        }
        true
    }

    /// Records what was chosen and keeps the lanes that go on to another bucket, sorted by bucket.
    fn advance(&self, plan: &Plan, scratch: &mut Scratch) {
        let Scratch { lanes, owners, chosen, answers, ends, going, next } = scratch;
        going.clear();
        next.begin(self.table.size.len());
        for (lane, owner) in owners.iter().enumerate() {
            let (mut owner, item) = (*owner, chosen[lane]);
            let (bucket, x, mut r) = (lanes.bucket[lane], lanes.x[lane], lanes.r[lane]);
            answers[(owner.slot + owner.level) as usize] = Answer { bucket, r, item };
            let end = &mut ends[owner.end as usize];
            if !owner.below && self.kind(item) == plan.kind {
                *end = End { domain: item, leaf: item };
                if !plan.to_leaf {
                    continue;
                }
                owner.below = true;
                r = plan.leaf_r(r);
            }
            let Some(below) = Map::bucket_index(item) else {
                end.leaf = item;
                continue;
            };
            owner.level += 1;
            if self.table.size[below] == 0 || owner.level as usize >= plan.levels {
                continue;
            }
            next.count(below);
            going.push((owner, below as u32, x, r));
        }
        next.sum();
        lanes.resize(going.len());
        owners.resize(going.len(), Owner::default());
        for (owner, bucket, x, r) in going.iter() {
            let lane = next.place(*bucket as usize);
            owners[lane] = *owner;
            (lanes.bucket[lane], lanes.x[lane], lanes.r[lane]) = (*bucket, *x, *r);
        }
    }
}

/// Sorting by bucket: counts, then places. Only the buckets that occur are touched.
#[derive(Debug, Default)]
struct Places {
    counts: Vec<u32>,
    seen: Vec<usize>,
}

impl Places {
    fn begin(&mut self, buckets: usize) {
        for bucket in self.seen.drain(..) {
            self.counts[bucket] = 0;
        }
        if self.counts.len() < buckets {
            self.counts.resize(buckets, 0);
        }
    }

    fn count(&mut self, bucket: usize) {
        if self.counts[bucket] == 0 {
            self.seen.push(bucket);
        }
        self.counts[bucket] += 1;
    }

    fn sum(&mut self) {
        let mut from = 0;
        for bucket in &self.seen {
            let count = std::mem::replace(&mut self.counts[*bucket], from);
            from += count;
        }
    }

    fn place(&mut self, bucket: usize) -> usize {
        let place = self.counts[bucket];
        self.counts[bucket] += 1;
        place as usize
    }
}
