//! Crash states: walks along a trace, keeps the region as it surely is on the media, and at each
//! point says which parts may have reached it beside that.
//!
//! A *unit* is what caches write back as a whole: a line of 64 bytes in memory, a page of 4096
//! of a file on a disk. Units may reach the media in any order, at any moment after a store to
//! them, and not whole: an *atom* (8 bytes; 512 on a disk) is old or new, never mixed. Only what a
//! side has started to write back before its own fence is there after it.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::random::Random;
use storage::media::{MediaError, Segment};

use super::oracle::Bounds;
use super::trace::{Event, Region, Side, Trace};

/// Sizes of units and atoms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grain {
    /// Bytes written back as a whole.
    pub unit: usize,
    /// Bytes never torn.
    pub atom: usize,
}

/// Memory behind CPU caches.
pub const MEMORY: Grain = Grain { unit: 64, atom: 8 };
/// A file on a disk behind the page cache.
pub const DISK: Grain = Grain { unit: 4096, atom: 512 };

/// Subsets are enumerated up to that many parts.
const WHOLE: usize = 8;
/// Stores are taken as parts up to that many.
const STORES: usize = 6;

#[derive(Debug)]
struct Unit {
    /// What the unit held, one after the other; the last is what the CPU sees.
    versions: Vec<Box<[u8]>>,
    /// Version that each side's next fence completes.
    started: [Option<usize>; Side::COUNT],
    /// Stored to since the last fence.
    fresh: bool,
    /// Number of the store that touched it last.
    store: usize,
}

type Key = (Segment, usize);

/// A moment at which the power may fail: just before a fence, or at the end.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Fences before it.
    pub fence: usize,
    /// Operations begun, returned, covered by fsync.
    pub progress: [usize; 3],
}

impl Point {
    /// What the oracle demands and allows: `returned` says whether an operation that has returned
    /// must be there, or only what fsync covered.
    pub fn bounds(&self, returned: bool) -> Bounds {
        let [begun, back, synced] = self.progress;
        Bounds { least: if returned { back } else { synced }, most: begun }
    }
}

/// Which of the parts that may have reached the media did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pick {
    /// Nothing.
    Nothing,
    /// Everything.
    Everything,
    /// The units of the mask; the bit after the last is everything older than the last fence.
    Units(u64),
    /// The stores of the mask; the bit after the last as above.
    Stores(u64),
    /// Everything but one unit.
    But(usize),
    /// One unit alone.
    Only(usize),
    /// By a seed: units whole, missing, of an earlier moment, or torn.
    Torn(u64),
}

impl std::fmt::Display for Pick {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Everything => f.write_str("everything"),
            Self::Units(mask) => write!(f, "units:{mask}"),
            Self::Stores(mask) => write!(f, "stores:{mask}"),
            Self::But(i) => write!(f, "but:{i}"),
            Self::Only(i) => write!(f, "only:{i}"),
            Self::Torn(seed) => write!(f, "torn:{seed}"),
        }
    }
}

impl Pick {
    /// From its text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
        let n = number.parse::<u64>().map_err(|e| format!("{text}: {e}"))?;
        match kind {
            "nothing" => Ok(Self::Nothing),
            "everything" => Ok(Self::Everything),
            "units" => Ok(Self::Units(n)),
            "stores" => Ok(Self::Stores(n)),
            "but" => Ok(Self::But(n as usize)),
            "only" => Ok(Self::Only(n as usize)),
            "torn" => Ok(Self::Torn(n)),
            _ => Err(format!("no such choice: {text}")),
        }
    }
}

/// What may or may not have reached the media.
#[derive(Debug)]
pub struct Pending {
    grain: Grain,
    units: BTreeMap<Key, Unit>,
    /// Of what is surely on the media.
    hash: u64,
}

fn segment_number(segment: Segment) -> u64 {
    match segment {
        Segment::Super => 1,
        Segment::Tree => 2,
        Segment::Stream => 3,
        Segment::Clients => 4,
        Segment::Log(n) => 1 << 32 | u64::from(n),
        Segment::Arena(n) => 2 << 32 | u64::from(n),
    }
}

fn hash_of((segment, unit): Key, bytes: &[u8]) -> u64 {
    let mut h = segment_number(segment).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ unit as u64;
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        h = (h ^ u64::from_le_bytes(word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31);
    }
    (h ^ h >> 29).wrapping_mul(0xc4ce_b9fe_1a85_ec53)
}

/// Units and what they shall hold.
pub type State<'a> = Vec<(Key, std::borrow::Cow<'a, [u8]>)>;

impl Pending {
    fn stale(&self) -> bool {
        self.units.values().any(|u| !u.fresh)
    }

    fn fresh(&self) -> usize {
        self.units.values().filter(|u| u.fresh).count()
    }

    fn stores(&self) -> Vec<usize> {
        let mut all: Vec<_> = self.units.values().filter(|u| u.fresh).map(|u| u.store).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The choices to be tried: all subsets where that is few, else the extremes, and `random`
    /// states by seeds from `seed` on.
    pub fn picks(&self, random: usize, seed: u64) -> Vec<Pick> {
        let (fresh, stores) = (self.fresh(), self.stores().len());
        let extra = usize::from(self.stale());
        let mut picks = vec![Pick::Nothing];
        if fresh + extra == 0 {
            return picks;
        }
        picks.push(Pick::Everything);
        if fresh + extra <= WHOLE {
            picks.extend((1..(1u64 << (fresh + extra)) - 1).map(Pick::Units));
        } else {
            if stores + extra <= STORES {
                picks.extend((1..(1u64 << (stores + extra)) - 1).map(Pick::Stores));
            }
            let step = (fresh / 12).max(1);
            let first = seed as usize % step;
            for i in (first..fresh).step_by(step) {
                picks.extend([Pick::But(i), Pick::Only(i)]);
            }
        }
        picks.extend((0..random as u64).map(|i| Pick::Torn(seed.wrapping_add(i))));
        picks
    }

    /// The units that a choice changes.
    pub fn state<'a>(&'a self, region: &Region, pick: Pick) -> State<'a> {
        let stores = self.stores();
        let (mut state, mut number) = (Vec::new(), 0);
        let fresh = self.fresh();
        let mut random = Random::new(if let Pick::Torn(seed) = pick { seed } else { 0 });
        for (key, unit) in &self.units {
            let i = number;
            number += usize::from(unit.fresh);
            let store = stores.binary_search(&unit.store).unwrap_or(0);
            let taken = match pick {
                Pick::Nothing => false,
                Pick::Everything => true,
                Pick::Units(mask) if unit.fresh => mask >> i & 1 == 1,
                Pick::Units(mask) => mask >> fresh & 1 == 1,
                Pick::Stores(mask) if unit.fresh => mask >> store & 1 == 1,
                Pick::Stores(mask) => mask >> stores.len() & 1 == 1,
                Pick::But(n) => !unit.fresh || i != n,
                Pick::Only(n) => unit.fresh && i == n,
                Pick::Torn(_) => {
                    if let Some(bytes) = self.torn(region, *key, unit, &mut random) {
                        state.push((*key, bytes.into()));
                    }
                    false
                }
            };
            if taken && let Some(last) = unit.versions.last() {
                state.push((*key, std::borrow::Cow::Borrowed(&last[..])));
            }
        }
        state
    }

    fn torn(&self, region: &Region, key: Key, unit: &Unit, random: &mut Random) -> Option<Vec<u8>> {
        let draw = random.below(8);
        let version = if random.chance(1, 4) {
            random.below(unit.versions.len() as u64) as usize
        } else {
            unit.versions.len() - 1
        };
        if draw < 2 {
            return None;
        }
        let whole = &unit.versions[version];
        if draw < 5 {
            return Some(whole.to_vec());
        }
        let mut bytes = vec![0; whole.len()];
        region.get(key.0, key.1 * self.grain.unit, &mut bytes);
        for at in (0..bytes.len()).step_by(self.grain.atom) {
            if random.chance(1, 2) {
                let end = (at + self.grain.atom).min(bytes.len());
                bytes[at..end].copy_from_slice(&whole[at..end]);
            }
        }
        Some(bytes)
    }

    /// Stands for the whole region in that state.
    pub fn hash(&self, region: &Region, state: &State<'_>) -> u64 {
        let mut hash = self.hash;
        let mut old = vec![0; self.grain.unit];
        for (key, bytes) in state {
            let old = &mut old[..bytes.len()];
            region.get(key.0, key.1 * self.grain.unit, old);
            hash ^= hash_of(*key, old) ^ hash_of(*key, bytes);
        }
        hash
    }

    /// Puts the region into that state.
    pub fn make(&self, region: &Region, state: &State<'_>) -> Result<(), MediaError> {
        state.iter().try_for_each(|(key, bytes)| region.put(key.0, key.1 * self.grain.unit, bytes))
    }

    /// Says what a choice means.
    pub fn describe(&self, region: &Region, pick: Pick) -> String {
        let state = self.state(region, pick);
        let mut text = format!(
            "{} of {} units that may have reached the media did:",
            state.len(),
            self.units.len()
        );
        for ((segment, unit), _) in state.iter().take(40) {
            text += &format!(" {segment:?}+{}", unit * self.grain.unit);
        }
        text
    }

    fn store(
        &mut self,
        region: &Region,
        segment: Segment,
        offset: usize,
        data: &[u8],
        number: usize,
    ) {
        let (size, mut done) = (self.grain.unit, 0);
        while done < data.len() {
            let at = offset + done;
            let (unit, within) = (at / size, at % size);
            let n = (size - within).min(data.len() - done);
            let part = &data[done..done + n];
            done += n;
            let key = (segment, unit);
            let entry = self.units.get_mut(&key);
            let mut now = match &entry {
                Some(Unit { versions, .. }) => versions[versions.len() - 1].clone(),
                None => {
                    let mut bytes = vec![0; size];
                    let len = region.get(segment, unit * size, &mut bytes);
                    bytes.truncate(len);
                    bytes.into_boxed_slice()
                }
            };
            if now[within..within + n] == *part {
                continue;
            }
            now[within..within + n].copy_from_slice(part);
            match entry {
                Some(unit) => {
                    unit.versions.push(now);
                    (unit.fresh, unit.store) = (true, number);
                }
                None => {
                    let started = [None; Side::COUNT];
                    let unit = Unit { versions: vec![now], started, fresh: true, store: number };
                    self.units.insert(key, unit);
                }
            }
        }
    }

    fn persist(&mut self, side: Side, segment: Segment, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let size = self.grain.unit;
        let range = (segment, offset / size)..=(segment, (offset + len - 1) / size);
        for (_, unit) in self.units.range_mut(range) {
            unit.started[side as usize] = Some(unit.versions.len() - 1);
        }
    }

    fn fence(&mut self, region: &Region, side: Side) -> Result<(), MediaError> {
        let mut done = Vec::new();
        for (key, unit) in &mut self.units {
            unit.fresh = false;
            let Some(version) = unit.started[side as usize].take() else { continue };
            let bytes = &unit.versions[version];
            let mut old = vec![0; bytes.len()];
            region.get(key.0, key.1 * self.grain.unit, &mut old);
            self.hash ^= hash_of(*key, &old) ^ hash_of(*key, bytes);
            region.put(key.0, key.1 * self.grain.unit, bytes)?;
            unit.versions.drain(..=version);
            for other in &mut unit.started {
                *other = other.and_then(|v| v.checked_sub(version + 1));
            }
            if unit.versions.is_empty() {
                done.push(*key);
            }
        }
        done.iter().for_each(|key| drop(self.units.remove(key)));
        Ok(())
    }

    fn clear(&mut self, region: &Region, segment: Segment, offset: usize, len: usize, n: usize) {
        let size = self.grain.unit;
        let mut parts = region.touched(segment, offset, len);
        let range = (segment, offset / size)..(segment, (offset + len).div_ceil(size));
        parts.extend(self.units.range(range).map(|(key, _)| {
            let (from, to) = (key.1 * size, (key.1 + 1) * size);
            (from.max(offset), to.min(offset + len) - from.max(offset))
        }));
        for (at, len) in parts {
            self.store(region, segment, at, &vec![0; len], n);
        }
    }
}

/// Called at a crash point, with the region as it surely is.
pub type Visit<'a> = dyn FnMut(Point, &Pending) -> Result<(), String> + 'a;

/// Walks along a trace that began at the region's present state, and leaves the region as it
/// surely is in the end: the caller undoes that.
pub fn walk(
    region: &Arc<Region>,
    trace: &Trace,
    grain: Grain,
    visit: &mut Visit<'_>,
) -> Result<(), String> {
    let mut pending = Pending { grain, units: BTreeMap::new(), hash: 0 };
    let mut point = Point { fence: 0, progress: [0; 3] };
    let fault = |e: MediaError| format!("replay of the trace: {e}");
    for (number, event) in trace.events.iter().enumerate() {
        match *event {
            Event::Store { segment, offset, at, len } => {
                let bytes = &trace.pool[at..at + len];
                pending.store(region, segment, offset, bytes, number);
                if let Some(covered) = covered(trace, segment, offset, bytes) {
                    point.progress[2] = covered;
                }
            }
            Event::Clear { segment, offset, len } => {
                pending.clear(region, segment, offset, len, number);
            }
            Event::Persist { side, segment, offset, len } => {
                pending.persist(side, segment, offset, len);
            }
            Event::Fence(side) => {
                visit(point, &pending)?;
                pending.fence(region, side).map_err(fault)?;
                point.fence += 1;
            }
            Event::Ensure(segment, size) => {
                region.ensure(segment, size).map_err(fault)?;
                pending.hash ^= hash_of((segment, usize::MAX), &size.to_le_bytes());
            }
            Event::Remove(segment) => {
                pending.units.retain(|key, _| key.0 != segment);
                region.remove(segment).map_err(fault)?;
                pending.hash ^= hash_of((segment, usize::MAX - 1), &(number as u64).to_le_bytes());
            }
            Event::Begun(n) => point.progress[0] = n,
            Event::Returned(n) => point.progress[1] = n,
            Event::Synced(n) => point.progress[2] = point.progress[2].max(n),
        }
    }
    visit(point, &pending)
}

/// Operations that an fsync may say are durable, if that store says so.
fn covered(trace: &Trace, segment: Segment, offset: usize, bytes: &[u8]) -> Option<usize> {
    let acks = trace.acks.as_ref().filter(|a| a.segment == segment && a.offset == offset)?;
    let sequence = u64::from_le_bytes(bytes.try_into().ok()?);
    Some(acks.sequences.iter().filter(|s| **s <= sequence).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All values of two words in different lines over all states at all points.
    fn states(grain: Grain, act: impl Fn(&Arc<Region>)) -> Vec<Vec<(u64, u64)>> {
        let region = Region::new();
        region.ensure(Segment::Tree, 16384).unwrap();
        let mark = region.mark();
        region.record();
        act(&region);
        let trace = region.recorded();
        region.undo_to(mark);
        let mut found = Vec::new();
        walk(&region, &trace, grain, &mut |_, pending| {
            let mut here = std::collections::BTreeSet::new();
            for pick in pending.picks(50, 7) {
                let mark = region.mark();
                pending.make(&region, &pending.state(&region, pick)).unwrap();
                let media = region.by(Side::Node);
                let word = |at| media.load64(Segment::Tree, at).unwrap();
                here.insert((word(0), word(8192)));
                region.undo_to(mark);
            }
            found.push(here.into_iter().collect());
            Ok(())
        })
        .unwrap();
        region.undo_to(mark);
        found
    }

    #[test]
    fn only_what_was_fenced_is_sure() {
        for grain in [MEMORY, DISK] {
            let found = states(grain, |region| {
                let media = region.by(Side::Node);
                media.store64(Segment::Tree, 0, 1).unwrap();
                media.store64(Segment::Tree, 8192, 1).unwrap();
                media.persist(Segment::Tree, 0, 8).unwrap();
                media.fence().unwrap();
            });
            assert_eq!(found[0], [(0, 0), (0, 1), (1, 0), (1, 1)]);
            assert_eq!(found[1], [(1, 0), (1, 1)]);
        }
    }

    #[test]
    fn a_store_after_the_write_back_is_not_covered_by_the_fence() {
        let found = states(MEMORY, |region| {
            let media = region.by(Side::Node);
            media.store64(Segment::Tree, 0, 1).unwrap();
            media.persist(Segment::Tree, 0, 8).unwrap();
            media.store64(Segment::Tree, 0, 2).unwrap();
            media.fence().unwrap();
        });
        // Also the value in between may be what the caches wrote.
        assert_eq!(found, [vec![(0, 0), (1, 0), (2, 0)], vec![(1, 0), (2, 0)]]);
    }

    #[test]
    fn a_fence_is_its_own_side_s() {
        let found = states(MEMORY, |region| {
            region.by(Side::Client).store64(Segment::Tree, 0, 1).unwrap();
            region.by(Side::Client).persist(Segment::Tree, 0, 8).unwrap();
            region.by(Side::Node).fence().unwrap();
            region.by(Side::Client).fence().unwrap();
        });
        assert_eq!(found[1], [(0, 0), (1, 0)]);
        assert_eq!(found[2], [(1, 0)]);
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        for pick in [
            Pick::Nothing,
            Pick::Everything,
            Pick::Units(5),
            Pick::Stores(3),
            Pick::But(9),
            Pick::Only(1),
            Pick::Torn(77),
        ] {
            assert_eq!(Pick::parse(&pick.to_string()), Ok(pick));
        }
        assert!(Pick::parse("some").is_err());
    }
}
