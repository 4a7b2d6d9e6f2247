//! What lies where, and which of it counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::planted::{Bug, planted};

use super::patch::{self, Patch};
use super::shard::{self, Version};
use super::spec::Coding;

/// What was found of a version of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// The object is nothing but zeroes.
    pub hole: bool,
    /// Stores of each shard.
    pub at: BTreeMap<usize, Vec<usize>>,
}

/// What was found of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct Lay {
    /// Whole versions.
    pub versions: BTreeMap<Version, Found>,
    /// Patches, and the stores that have them.
    pub patches: BTreeMap<Version, Held>,
}

/// A patch, and the stores that have it, or were given it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Held {
    pub patch: Patch,
    pub at: Vec<usize>,
    /// Stores that have something else under its name.
    pub wrong: Vec<usize>,
}

impl Held {
    pub fn new(patch: Patch, at: Vec<usize>) -> Self {
        Self { patch, at, wrong: Vec::new() }
    }
}

/// What lies where, of one image.
#[derive(Clone, Debug, Default)]
pub(super) struct Survey {
    pub objects: BTreeMap<u64, Lay>,
    /// Stores that have heard of a writer, and of which.
    pub epochs: Vec<(usize, u64)>,
    /// Stores that did not answer.
    pub silent: Vec<usize>,
}

impl Survey {
    /// A store has this name.
    pub fn add(&mut self, coding: Coding, store: usize, name: &str) {
        if let Some((object, version, number, hole)) = shard::parse(name) {
            if number < coding.width() {
                let lay = self.objects.entry(object).or_default();
                let found = lay.versions.entry(version);
                let found = found.or_insert_with(|| Found { hole, at: BTreeMap::new() });
                let at = found.at.entry(number).or_default();
                // A store that says a name twice has it once.
                if !at.contains(&store) {
                    at.push(store);
                }
            }
        } else if let Some((object, patch)) = patch::parse(name) {
            let lay = self.objects.entry(object).or_default();
            let held = lay.patches.entry(patch.version);
            let held = held.or_insert_with(|| Held::new(patch, Vec::new()));
            // A version is drawn for one write: another patch under it is nobody's.
            if held.patch == patch && !held.at.contains(&store) {
                held.at.push(store);
            }
        } else if let Some(epoch) = shard::parse_epoch(name) {
            self.epochs.push((store, epoch));
        }
    }
}

/// Which version of an object counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Current {
    /// None was ever written whole.
    Never,
    /// This one.
    Is(Version),
    /// A newer one may be whole, in stores that do not answer.
    Unknown,
}

/// Judges the versions of an object. The newest of which enough shards are there counts. One of which they are not was
/// never answered for, unless those that are missing may lie where nobody answers.
pub(super) fn judge(coding: Coding, versions: &BTreeMap<Version, Found>, silent: usize) -> Current {
    for (version, found) in versions.iter().rev() {
        let seen = found.at.len();
        if seen >= if found.hole { 1 } else { coding.data() } {
            return Current::Is(*version);
        }
        if seen + silent >= coding.quorum() && !planted(Bug::OldVersionBelieved) {
            return Current::Unknown;
        }
    }
    Current::Never
}

/// The patches that lie on a version, in order; `None`: one is missing, or lies on a version that is not seen, so that
/// what the object holds is not known.
fn chain(base: Version, patches: &BTreeMap<Version, Held>) -> Option<Vec<&Held>> {
    let live = || patches.values().filter(|held| held.patch.version > base);
    if live().any(|held| held.patch.base != base) && !planted(Bug::PatchOfAnother) {
        return None;
    }
    // In one place the last counts: what was under way when a writer died may come to light when another has written there.
    let mut places: BTreeMap<u16, &Held> = BTreeMap::new();
    for held in live() {
        places.insert(held.patch.place, held);
    }
    let mut chain: Vec<&Held> = Vec::new();
    let mut last = base;
    for (place, held) in places {
        if held.patch.version < last {
            // Likewise: it was never answered for, or its successor would stand before it.
            continue;
        }
        if usize::from(place) != chain.len() && !planted(Bug::PatchNotMissed) {
            return None;
        }
        last = held.patch.version;
        chain.push(held);
    }
    Some(chain)
}

/// What is known of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// `None`: never written as a whole.
    pub version: Option<Version>,
    pub hole: bool,
    pub unknown: bool,
    /// Fewer stores have it than a write is answered for: it is made whole before it is shown, or another look might not
    /// find it.
    pub uncertain: bool,
    /// Store of each shard, where one has it.
    pub at: Vec<Option<usize>>,
    /// What lies on it, in order.
    pub patches: Vec<Arc<Held>>,
    /// A write of the whole object failed, or one over nothing, and it may be there all the same: the next write makes the object anew, since a
    /// patch might lie on something else than it seems.
    pub failed: bool,
    /// Number of the newest write of this process that failed: what there is of it, newer than what counts, is on its way out.
    pub undone: u64,
    /// Number of the newest version that anybody began.
    pub newest: u64,
}

impl State {
    /// Of an object of which nothing was found.
    pub fn none(coding: Coding) -> Self {
        Self { at: vec![None; coding.width()], ..Self::default() }
    }

    pub fn of(coding: Coding, lay: &Lay, silent: usize) -> Self {
        let newest = |version: Option<&Version>| version.map_or(0, |version| version.number);
        let newest =
            newest(lay.versions.keys().next_back()).max(newest(lay.patches.keys().next_back()));
        // One more may be under way, in a store that will be heard of later.
        let mut state = Self { newest: newest + 1, ..Self::none(coding) };
        match judge(coding, &lay.versions, silent) {
            Current::Never => {}
            Current::Unknown => state.unknown = true,
            Current::Is(version) => {
                state.version = Some(version);
                if let Some(found) = lay.versions.get(&version) {
                    state.hole = found.hole;
                    state.uncertain = silent == 0 && found.at.len() < coding.quorum();
                    for (shard, stores) in &found.at {
                        state.at[*shard] = stores.first().copied();
                    }
                }
            }
        }
        // So many stores may have had all copies of a patch that was answered for.
        state.unknown |= silent >= coding.copies();
        match chain(state.base(), &lay.patches) {
            None => state.unknown = true,
            Some(chain) => {
                let few = |held: &&Held| held.at.len() < coding.copies();
                state.uncertain |= silent == 0 && chain.iter().any(few);
                state.patches = chain.into_iter().cloned().map(Arc::new).collect();
            }
        }
        state
    }

    /// Takes out of what was found what this, which a writer knows of the object, says is on its way out: nobody makes it whole again. What
    /// that was.
    pub fn strike_undone(&self, lay: &mut Lay) -> Lay {
        let last = self.patches.last().map_or(self.base(), |held| held.patch.version);
        let goes = |version: &Version| *version > last && version.number <= self.undone;
        Lay {
            versions: lay.versions.extract_if(.., |version, _| goes(version)).collect(),
            patches: lay.patches.extract_if(.., |version, _| goes(version)).collect(),
        }
    }

    /// What patches lie on.
    pub fn base(&self) -> Version {
        self.version.unwrap_or(Version::NONE)
    }

    /// Whether nothing was ever written, or everything made zero, as a whole.
    pub fn is_empty(&self) -> bool {
        (self.hole || self.version.is_none()) && self.patches.is_empty() && !self.unknown
    }

    /// Whether more was written than `other` knows of.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        let last = |state: &Self| state.patches.last().map(|held| held.patch.version);
        last(self).max(self.version) > last(other).max(other.version)
    }

    /// Which patch each part of a range reads from; `None`: what they lie on.
    pub fn pieces(
        &self,
        range: std::ops::Range<usize>,
    ) -> Vec<(std::ops::Range<usize>, Option<usize>)> {
        let (mut open, mut out) = (vec![range], Vec::new());
        let newest_first = |i: usize| {
            if planted(Bug::PatchOrder) { i } else { self.patches.len() - 1 - i }
        };
        for i in (0..self.patches.len()).map(newest_first) {
            let over = self.patches[i].patch.range();
            let mut rest = Vec::with_capacity(open.len() + 1);
            for part in open {
                let (from, to) = (part.start.max(over.start), part.end.min(over.end));
                if from >= to {
                    rest.push(part);
                    continue;
                }
                out.push((from..to, Some(i)));
                let sides = [part.start..from, to..part.end];
                rest.extend(sides.into_iter().filter(|side| !side.is_empty()));
            }
            open = rest;
            if open.is_empty() {
                break;
            }
        }
        out.extend(open.into_iter().map(|part| (part, None)));
        out
    }
}
