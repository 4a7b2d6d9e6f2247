//! Running rules: from an input and a rule to a list of devices, step by step as libcrush does it.
//!
//! What a bucket answers depends on nothing but bucket, input, attempt and position. So `batch` may
//! compute answers ahead and leave them in [`Ahead`]; this code takes them where they fit and draws
//! the others. Every loop pays from a budget: a map that would try for ever ends in an error.

use super::error::{Error, Result};
use super::flat::{Draw, Flat, Placer};
use super::hash::{hash2, hash3, hash4};
use super::limits::RESULT_MAX;
use super::map::{Map, Rule, Step};

/// In a result that keeps positions: no device was found for this one.
pub const ITEM_NONE: i32 = 0x7fff_ffff;
/// While choosing: not yet decided.
const ITEM_UNDEFINED: i32 = 0x7fff_fffe;

/// Answers computed ahead for one input, in the order in which they are likely to be asked for.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub answers: &'a [Answer],
    next: usize,
}

/// `item` is what bucket `bucket` answers at attempt `r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub bucket: u32,
    pub r: u32,
    pub item: i32,
}

impl<'a> Ahead<'a> {
    pub fn new(answers: &'a [Answer]) -> Self {
        Self { answers, next: 0 }
    }

    fn find(&mut self, bucket: u32, r: u32) -> Option<i32> {
        let fits = |a: &Answer| a.bucket == bucket && a.r == r;
        if let Some(answer) = self.answers.get(self.next).filter(|a| fits(a)) {
            self.next += 1;
            return Some(answer.item);
        }
        let at = self.answers.iter().position(fits)?;
        self.next = at + 1;
        Some(self.answers[at].item)
    }
}

/// A permutation of a bucket, as far as it was needed.
#[derive(Debug, Default)]
struct Permutation {
    x: u32,
    known: usize,
    order: Vec<u32>,
}

/// Memory that mappings reuse. One per thread; for any map.
#[derive(Debug, Default)]
pub struct Workspace {
    permutations: Vec<Permutation>,
    held: Vec<i32>,
    chosen: Vec<i32>,
    leaves: Vec<i32>,
    pub(super) batch: super::batch::Scratch,
}

impl Workspace {
    /// Memory for mappings; grows to what the map needs.
    pub fn new() -> Self {
        Self::default()
    }

    fn prepare(&mut self, placer: &Placer, width: usize) {
        if self.permutations.len() < placer.buckets.len() {
            self.permutations.resize_with(placer.buckets.len(), Permutation::default);
        }
        for list in [&mut self.held, &mut self.chosen, &mut self.leaves] {
            list.clear();
            list.resize(width, ITEM_UNDEFINED);
        }
    }
}

/// What a choose step is told.
#[derive(Clone, Copy)]
struct Choice {
    numrep: i32,
    kind: i32,
    tries: u32,
    leaf_tries: u32,
    local_tries: u32,
    fallback_tries: u32,
    to_leaf: bool,
    vary_r: u32,
    stable: bool,
    parent_r: i32,
}

/// Values that `set_…` steps overrule.
pub(super) struct Settings {
    pub tries: i32,
    pub leaf_tries: i32,
    pub local_tries: i32,
    pub fallback_tries: i32,
    pub vary_r: i32,
    pub stable: i32,
}

impl Settings {
    pub fn new(placer: &Placer) -> Self {
        let t = &placer.tunables;
        Self {
            // The tunable counts retries.
            tries: (t.choose_total_tries as i32).wrapping_add(1),
            leaf_tries: 0,
            local_tries: t.choose_local_tries as i32,
            fallback_tries: t.choose_local_fallback_tries as i32,
            vary_r: t.chooseleaf_vary_r.into(),
            stable: t.chooseleaf_stable.into(),
        }
    }

    /// Takes a step in if it is a setting.
    pub fn set(&mut self, step: Step) {
        let (slot, value, least) = match step {
            Step::SetChooseTries(n) => (&mut self.tries, n, 1),
            Step::SetChooseLeafTries(n) => (&mut self.leaf_tries, n, 1),
            Step::SetChooseLocalTries(n) => (&mut self.local_tries, n, 0),
            Step::SetChooseLocalFallbackTries(n) => (&mut self.fallback_tries, n, 0),
            Step::SetChooseLeafVaryR(n) => (&mut self.vary_r, n, 0),
            Step::SetChooseLeafStable(n) => (&mut self.stable, n, 0),
            _ => return,
        };
        if value >= least {
            *slot = value;
        }
    }
}

/// Attempt number for the search below a chosen bucket, replicas from the front.
pub(super) const fn leaf_attempt(r: i32, vary_r: u32) -> i32 {
    // x86 shifts by the count modulo 32, and so do Ceph's clusters.
    if vary_r == 0 { 0 } else { r.wrapping_shr(vary_r - 1) }
}

impl Placer {
    /// The rule with this number, if it can be run.
    pub fn rule(&self, number: u32) -> Result<&Rule> {
        let rule = self.rules.get(number as usize).and_then(Option::as_ref);
        let rule = rule.ok_or_else(|| Error::Request(format!("rule {number} does not exist")))?;
        match rule.steps.iter().find(|s| matches!(s, Step::Unknown(..))) {
            Some(step) => Err(Error::Request(format!(
                "rule {number} has step {}, which is not known here; use choose or chooseleaf",
                step.to_words().0
            ))),
            None => Ok(rule),
        }
    }

    /// Maps input `x` by a rule into `out`, whose length is the number of replicas wanted; returns
    /// how many were found. `reweights` has an entry per device, 0 to 0x10000 (out to fully in);
    /// devices past its end are out.
    pub fn place(
        &self,
        rule: u32,
        x: u32,
        reweights: &[u32],
        out: &mut [i32],
        workspace: &mut Workspace,
    ) -> Result<usize> {
        let rule = self.rule(rule)?;
        self.place_by(rule, x, reweights, out, workspace, Ahead::default())
    }

    pub(super) fn place_by(
        &self,
        rule: &Rule,
        x: u32,
        reweights: &[u32],
        out: &mut [i32],
        workspace: &mut Workspace,
        ahead: Ahead<'_>,
    ) -> Result<usize> {
        if out.len() > RESULT_MAX {
            return Err(Error::Request(format!("more than {RESULT_MAX} replicas wanted")));
        }
        workspace.prepare(self, out.len());
        let Workspace { permutations, held, chosen, leaves, .. } = workspace;
        let mut run =
            Run { placer: self, x, reweights, permutations, ahead, budget: self.draws_max };
        let mut settings = Settings::new(self);
        let (mut held_len, mut found) = (0, 0);
        for step in &rule.steps {
            match *step {
                Step::Take(item) if self.takes(item) => {
                    if let Some(first) = held.first_mut() {
                        *first = item;
                        held_len = 1;
                    }
                }
                Step::Emit => {
                    let n = held_len.min(out.len() - found);
                    out[found..found + n].copy_from_slice(&held[..n]);
                    found += n;
                    held_len = 0;
                }
                Step::ChooseFirstn(..)
                | Step::ChooseIndep(..)
                | Step::ChooseLeafFirstn(..)
                | Step::ChooseLeafIndep(..)
                    if held_len > 0 =>
                {
                    let held_now = &held[..held_len];
                    held_len = run.step(*step, &settings, held_now, chosen, leaves)?;
                    std::mem::swap(held, chosen);
                }
                other => settings.set(other),
            }
        }
        Ok(found)
    }

    fn takes(&self, item: i32) -> bool {
        match Map::bucket_index(item) {
            Some(index) => self.bucket(index).is_some(),
            None => item < self.devices,
        }
    }
}

/// One mapping under way.
struct Run<'a> {
    placer: &'a Placer,
    x: u32,
    reweights: &'a [u32],
    permutations: &'a mut [Permutation],
    ahead: Ahead<'a>,
    budget: u64,
}

impl<'a> Run<'a> {
    /// A choose step: from the items in `held` to those in `chosen`; returns their number.
    fn step(
        &mut self,
        step: Step,
        settings: &Settings,
        held: &[i32],
        chosen: &mut [i32],
        leaves: &mut [i32],
    ) -> Result<usize> {
        let (count, kind, firstn, to_leaf) = match step {
            Step::ChooseFirstn(n, kind) => (n, kind, true, false),
            Step::ChooseLeafFirstn(n, kind) => (n, kind, true, true),
            Step::ChooseIndep(n, kind) => (n, kind, false, false),
            Step::ChooseLeafIndep(n, kind) => (n, kind, false, true),
            _ => return Ok(0),
        };
        let width = chosen.len();
        let numrep = if count > 0 { count } else { count.saturating_add(width as i32) };
        if numrep <= 0 {
            return Ok(0);
        }
        let leaf_tries = match (settings.leaf_tries, firstn) {
            (0, true) if self.placer.tunables.chooseleaf_descend_once == 0 => settings.tries,
            (0, _) => 1,
            (set, _) => set,
        };
        let choice = Choice {
            numrep,
            kind,
            tries: settings.tries as u32,
            leaf_tries: leaf_tries as u32,
            local_tries: settings.local_tries as u32,
            fallback_tries: settings.fallback_tries as u32,
            to_leaf,
            vary_r: settings.vary_r as u32,
            stable: settings.stable != 0,
            parent_r: 0,
        };
        let mut len = 0;
        for item in held {
            let Some(bucket) =
                Map::bucket_index(*item).filter(|i| self.placer.bucket(*i).is_some())
            else {
                continue;
            };
            let (out, out2) = (&mut chosen[len..], &mut leaves[len..]);
            if firstn {
                let room = out.len();
                len += self.firstn(bucket, &choice, out, 0, room, Some(out2))?;
            } else {
                let size = out.len().min(numrep as usize);
                self.indep(bucket, &choice, &mut out[..size], 0, size, Some(&mut out2[..size]))?;
                len += size;
            }
        }
        if to_leaf {
            chosen[..len].copy_from_slice(&leaves[..len]);
        }
        Ok(len)
    }

    fn pay(&mut self, cost: usize) -> Result<()> {
        match self.budget.checked_sub(cost as u64 + 1) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => Err(Error::Budget { x: self.x }),
        }
    }

    /// Chooses distinct items, filling `out` from `len` on without holes; a retry changes only the
    /// replica it is for. Returns the new length.
    fn firstn(
        &mut self,
        start: usize,
        choice: &Choice,
        out: &mut [i32],
        mut len: usize,
        mut room: usize,
        mut leaves: Option<&mut [i32]>,
    ) -> Result<usize> {
        let placer = self.placer;
        let mut rep = if choice.stable { 0 } else { len as i32 };
        while rep < choice.numrep && room > 0 {
            let mut failures = 0u32;
            let mut accepted = None;
            'descent: loop {
                let mut at = start;
                let mut failures_here = 0u32;
                loop {
                    let Some(bucket) = placer.bucket(at) else { break 'descent };
                    let r = rep.wrapping_add(choice.parent_r).wrapping_add(failures as i32);
                    let size = bucket.items.len();
                    let (mut collides, mut rejected) = (false, true);
                    if size > 0 {
                        let exhausted = choice.fallback_tries > 0
                            && failures_here >= (size as u32) >> 1
                            && failures_here > choice.fallback_tries;
                        let item = match exhausted {
                            true => self.permuted(at, bucket, r)?,
                            false => self.draw(at, bucket, r, len)?,
                        };
                        if item >= placer.devices {
                            break 'descent;
                        }
                        let kind = placer.kind(item);
                        if kind != choice.kind {
                            let Some(below) = Map::bucket_index(item) else { break 'descent };
                            at = below;
                            continue;
                        }
                        collides = out[..len].contains(&item);
                        rejected = !collides
                            && (!self.leaf_firstn(
                                item,
                                choice,
                                r,
                                len,
                                room,
                                leaves.as_deref_mut(),
                            )? || kind == 0 && self.is_out(item));
                        if !collides && !rejected {
                            accepted = Some(item);
                            break 'descent;
                        }
                    } else {
                        self.pay(0)?;
                    }
                    debug_assert!(collides || rejected);
                    failures = failures.wrapping_add(1);
                    failures_here = failures_here.wrapping_add(1);
                    let again_here = collides && failures_here <= choice.local_tries
                        || choice.fallback_tries > 0
                            && failures_here <= (size as u32).wrapping_add(choice.fallback_tries);
                    if again_here {
                        continue;
                    }
                    if failures < choice.tries {
                        continue 'descent;
                    }
                    break 'descent;
                }
            }
            rep += 1;
            if let Some(item) = accepted {
                out[len] = item;
                len += 1;
                room -= 1;
            }
        }
        Ok(len)
    }

    /// Finds a device below `item` for position `len` if the step wants one. False: there is none.
    fn leaf_firstn(
        &mut self,
        item: i32,
        choice: &Choice,
        r: i32,
        len: usize,
        room: usize,
        leaves: Option<&mut [i32]>,
    ) -> Result<bool> {
        let (true, Some(leaves)) = (choice.to_leaf, leaves) else { return Ok(true) };
        let Some(bucket) = Map::bucket_index(item) else {
            leaves[len] = item;
            return Ok(true);
        };
        let below = Choice {
            numrep: if choice.stable { 1 } else { len as i32 + 1 },
            kind: 0,
            tries: choice.leaf_tries,
            leaf_tries: 0,
            to_leaf: false,
            parent_r: leaf_attempt(r, choice.vary_r),
            ..*choice
        };
        Ok(self.firstn(bucket, &below, leaves, len, room, None)? > len)
    }

    /// Chooses an item for each of the `left` positions from `from` on, independently: a retry for
    /// one position leaves the others as they are.
    fn indep(
        &mut self,
        start: usize,
        choice: &Choice,
        out: &mut [i32],
        from: usize,
        mut left: usize,
        mut leaves: Option<&mut [i32]>,
    ) -> Result<()> {
        let positions = from..from + left;
        out[positions.clone()].fill(ITEM_UNDEFINED);
        if let Some(leaves) = leaves.as_deref_mut() {
            leaves[positions.clone()].fill(ITEM_UNDEFINED);
        }
        let mut failures = 0u32;
        while left > 0 && failures < choice.tries {
            for rep in positions.clone() {
                if out[rep] != ITEM_UNDEFINED {
                    continue;
                }
                let leaves = leaves.as_deref_mut();
                if let Some(item) =
                    self.indep_one(start, choice, out, &positions, rep, failures, leaves)?
                {
                    out[rep] = item;
                    left -= 1;
                }
            }
            failures += 1;
        }
        let undecided = |item: &&mut i32| **item == ITEM_UNDEFINED;
        out[positions.clone()].iter_mut().filter(undecided).for_each(|i| *i = ITEM_NONE);
        if let Some(leaves) = leaves {
            leaves[positions].iter_mut().filter(undecided).for_each(|i| *i = ITEM_NONE);
        }
        Ok(())
    }

    /// One attempt for one position: an item, [`ITEM_NONE`] if there can be none, or nothing yet.
    #[allow(clippy::too_many_arguments)]
    fn indep_one(
        &mut self,
        start: usize,
        choice: &Choice,
        out: &[i32],
        positions: &std::ops::Range<usize>,
        rep: usize,
        failures: u32,
        mut leaves: Option<&mut [i32]>,
    ) -> Result<Option<i32>> {
        let placer = self.placer;
        let mut at = start;
        loop {
            self.pay(0)?;
            let Some(bucket) = placer.bucket(at) else { return Ok(None) };
            let size = bucket.items.len();
            if size == 0 {
                return Ok(None);
            }
            let uniform = matches!(bucket.draw, Draw::Uniform);
            let even = uniform && (size as u32).is_multiple_of(choice.numrep as u32);
            let stride = if even { choice.numrep.wrapping_add(1) } else { choice.numrep };
            let retry = stride.wrapping_mul(failures as i32);
            let r = (rep as i32).wrapping_add(choice.parent_r).wrapping_add(retry);
            let item = self.draw(at, bucket, r, positions.start)?;
            let kind = placer.kind(item);
            let below = Map::bucket_index(item);
            if item >= placer.devices || kind != choice.kind && below.is_none() {
                if let Some(leaves) = leaves {
                    leaves[rep] = ITEM_NONE;
                }
                return Ok(Some(ITEM_NONE));
            }
            if let (true, Some(below)) = (kind != choice.kind, below) {
                at = below;
                continue;
            }
            if out[positions.clone()].contains(&item) {
                return Ok(None);
            }
            if let (true, Some(leaves)) = (choice.to_leaf, leaves.as_deref_mut()) {
                let Some(below) = below else {
                    leaves[rep] = item;
                    return Ok((!self.is_out(item)).then_some(item));
                };
                let inner = Choice {
                    kind: 0,
                    tries: choice.leaf_tries,
                    leaf_tries: 0,
                    to_leaf: false,
                    parent_r: r,
                    ..*choice
                };
                self.indep(below, &inner, leaves, rep, 1, None)?;
                if leaves[rep] == ITEM_NONE {
                    return Ok(None);
                }
            }
            return Ok((kind != 0 || !self.is_out(item)).then_some(item));
        }
    }

    fn is_out(&self, device: i32) -> bool {
        is_out(self.reweights, device, self.x)
    }

    /// What a bucket with items answers at attempt `r`.
    fn draw(&mut self, at: usize, bucket: &'a Flat, r: i32, position: usize) -> Result<i32> {
        if let Some(item) = self.ahead.find(at as u32, r as u32) {
            self.pay(0)?;
            return Ok(item);
        }
        self.pay(bucket.items.len())?;
        let (x, items) = (self.x, &bucket.items);
        Ok(match &bucket.draw {
            Draw::Uniform => return self.permuted(at, bucket, r),
            Draw::List { weights, sums } => draw_list(bucket, weights, sums, x, r),
            Draw::Tree(nodes) => draw_tree(bucket, nodes, x, r),
            Draw::Straw(straws) => draw_straw(bucket, straws, x, r),
            Draw::Straw2 { sets, .. } => {
                let set = &sets[position.min(sets.len() - 1)];
                items[self.placer.engine.pick(set, x, r as u32)]
            }
        })
    }

    /// The item at place `r` of a pseudo-random permutation.
    fn permuted(&mut self, at: usize, bucket: &Flat, r: i32) -> Result<i32> {
        let size = bucket.items.len();
        let place = r as u32 as usize % size;
        let (x, id) = (self.x, bucket.id as u32);
        let state = &mut self.permutations[at];
        if state.x != x || state.known == 0 || state.order.len() != size {
            if place == 0 {
                // The first place needs no permutation, and is nearly always the one asked for.
                return Ok(bucket.items[hash3(x, id, 0) as usize % size]);
            }
            state.order.clear();
            state.order.extend(0..size as u32);
            (state.x, state.known) = (x, 0);
            self.pay(size)?;
        }
        let state = &mut self.permutations[at];
        while state.known <= place {
            let p = state.known;
            if p + 1 < size {
                let other = hash3(x, id, p as u32) as usize % (size - p);
                state.order.swap(p, p + other);
            }
            state.known += 1;
        }
        Ok(bucket.items[state.order[place] as usize])
    }
}

/// Whether a device is out, wholly or for this input.
pub(super) fn is_out(reweights: &[u32], device: i32, x: u32) -> bool {
    let weight = usize::try_from(device).ok().and_then(|d| reweights.get(d));
    match weight.copied().unwrap_or(0) {
        0 => true,
        0x1_0000.. => false,
        weight => hash2(x, device as u32) & 0xffff >= weight,
    }
}

fn draw_list(bucket: &Flat, weights: &[u32], sums: &[u32], x: u32, r: i32) -> i32 {
    for (i, item) in bucket.items.iter().enumerate().rev() {
        let h = hash4(x, *item as u32, r as u32, bucket.id as u32) & 0xffff;
        if (u64::from(h) * u64::from(sums[i])) >> 16 < u64::from(weights[i]) {
            return *item;
        }
    }
    bucket.items[0]
}

fn draw_tree(bucket: &Flat, nodes: &[u32], x: u32, r: i32) -> i32 {
    let mut node = nodes.len() >> 1;
    while node & 1 == 0 {
        let h = hash4(x, node as u32, r as u32, bucket.id as u32);
        let point = (u64::from(h) * u64::from(nodes[node])) >> 32;
        let half = 1 << (node.trailing_zeros() - 1);
        let left = node - half;
        node = if point < u64::from(nodes[left]) { left } else { node + half };
    }
    // Without weight the way leads right, past the last item: no item, and no replica.
    bucket.items.get(node >> 1).copied().unwrap_or(ITEM_NONE)
}

fn draw_straw(bucket: &Flat, straws: &[u32], x: u32, r: i32) -> i32 {
    let (mut longest, mut winner) = (0, bucket.items[0]);
    for (item, straw) in bucket.items.iter().zip(straws) {
        let h = hash3(x, *item as u32, r as u32) & 0xffff;
        let length = u64::from(h) * u64::from(*straw);
        if length > longest {
            (longest, winner) = (length, *item);
        }
    }
    winner
}
