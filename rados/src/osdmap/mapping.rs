//! Where placement groups lie: what CRUSH says, many groups at a time, and then what of that is so now: OSDs that are gone or down, what was moved by
//! hand, which OSD would rather not be first, what is served by others for a while.

use std::collections::BTreeMap;
use std::sync::Arc;

use placement::crush::hash::hash2;
use placement::crush::{Batch, CHOOSE_ARGS_DEFAULT, Map, Options, Placer};
use placement::dispatch::{Dispatcher, Work};

use super::{Kind, NONE, ONE, OsdMap, Pg, Pool, QUINCY, REEF};

/// Groups that are one task of the dispatcher: enough that handing it over is nothing, few enough that several accelerators get some.
const CHUNK: usize = 1 << 14;
/// OSDs in what is mapped at once.
const PARTS_MAX: usize = 1 << 26;
/// Steps of a rule, and draws of one mapping: a hundred times what maps need whose OSDs are nearly all out.
const STEPS_MAX: usize = 256;
const DRAWS_MAX: u64 = 1 << 20;
/// The type of a rule, as Ceph numbers that of pools.
const fn number(kind: Kind) -> u8 {
    match kind {
        Kind::Replicated => 1,
        Kind::Erasure => 3,
    }
}

/// Many lists of OSDs.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Lists {
    osds: Vec<i32>,
    ends: Vec<usize>,
}

impl Lists {
    fn push(&mut self, list: &[i32]) {
        self.osds.extend_from_slice(list);
        self.ends.push(self.osds.len());
    }

    /// One of them.
    pub fn get(&self, i: usize) -> &[i32] {
        let from = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.osds[from..self.ends[i]]
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// Where groups lie, in the order in which they were asked for.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// The OSDs on which each belongs and that are up; of erasure-coded pools [`NONE`] where there is none.
    pub up: Lists,
    /// Which of them is the first.
    pub up_primary: Vec<Option<i32>>,
    /// The OSDs that serve each.
    pub acting: Lists,
    /// Whom clients ask.
    pub acting_primary: Vec<Option<i32>>,
}

impl Mapped {
    /// How many groups there are.
    pub fn len(&self) -> usize {
        self.up.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.up.is_empty()
    }
}

/// What an OSD has of what was counted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Share {
    /// Copies or shards.
    pub copies: u64,
    /// Those that are asked first.
    pub first: u64,
}

/// How evenly something lies.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Spread {
    /// Of each OSD that may have something.
    pub osds: BTreeMap<i32, Share>,
}

impl Spread {
    /// How much more the OSD with the most has than one has on the average: of copies, or of those that are asked first. Of nothing it is none.
    pub fn max_over_mean(&self, what: impl Fn(&Share) -> u64) -> Option<f64> {
        let most = self.osds.values().map(&what).max()?;
        let sum: u64 = self.osds.values().map(&what).sum();
        (sum > 0).then(|| most as f64 * self.osds.len() as f64 / sum as f64)
    }
}

/// What maps groups of one map.
#[derive(Debug)]
pub struct Mapper<'a> {
    map: &'a OsdMap,
    weights: Arc<Vec<u32>>,
    /// By whose stand-in weights they place: a pool's number, or that of the default ones.
    placers: BTreeMap<i64, Arc<Placer>>,
    dispatcher: Dispatcher,
}

/// What is to be looked up for groups of a pool, which mostly is nothing.
struct Special {
    pg_temp: bool,
    moved: bool,
    affinity: bool,
}

impl<'a> Mapper<'a> {
    /// One for a map, of which the CRUSH map is checked now.
    ///
    /// # Errors
    /// The CRUSH map makes no sense.
    pub fn new(map: &'a OsdMap) -> Result<Self, String> {
        Self::with(map, Dispatcher::default())
    }

    /// The same, with accelerators of one's own.
    ///
    /// # Errors
    /// As above.
    pub fn with(map: &'a OsdMap, dispatcher: Dispatcher) -> Result<Self, String> {
        let weights = Arc::new(map.osds.iter().map(|osd| osd.weight).collect());
        let mut mapper = Self { map, weights, placers: BTreeMap::new(), dispatcher };
        mapper.placer(CHOOSE_ARGS_DEFAULT)?;
        Ok(mapper)
    }

    fn placer(&mut self, pool: i64) -> Result<Arc<Placer>, String> {
        let key =
            if self.map.crush.choose_args.contains_key(&pool) { pool } else { CHOOSE_ARGS_DEFAULT };
        if let Some(placer) = self.placers.get(&key) {
            return Ok(Arc::clone(placer));
        }
        let options =
            Options { choose_args: Some(key), draws_max: Some(DRAWS_MAX), ..Options::default() };
        let placer = Placer::new(&self.map.crush, &options);
        let placer = Arc::new(placer.map_err(|error| format!("the map of OSDs: {error}"))?);
        self.placers.insert(key, Arc::clone(&placer));
        Ok(placer)
    }

    /// Where groups of a pool lie.
    ///
    /// # Errors
    /// There is no such pool or PG, something of the pool is not known here, or the CRUSH map does not come to an end.
    pub fn map(&mut self, number: i64, seeds: &[u32]) -> Result<Mapped, String> {
        let map = self.map;
        let pool = map.pools.get(&number).ok_or_else(|| format!("there is no pool {number}"))?;
        if let Some(seed) = seeds.iter().find(|seed| **seed >= pool.pg_num) {
            let pg = Pg { pool: number, seed: *seed };
            return Err(format!("there is no placement group {pg}: the pool has {}", pool.pg_num));
        }
        if pool.flags & Pool::EC_OPTIMIZATIONS != 0 {
            return Err(format!(
                "pool {number} ({}) has allow_ec_optimizations, by which lists of its OSDs have an order that is not known here",
                pool.name
            ));
        }
        if seeds.len().saturating_mul(pool.size.into()) > PARTS_MAX {
            let (many, size) = (seeds.len(), pool.size);
            return Err(format!("{many} placement groups of {size} OSDs: too many at once"));
        }
        let steps = map.crush.rule(pool.crush_rule.into()).map_or(0, |rule| rule.steps.len());
        if steps > STEPS_MAX {
            return Err(format!("rule {} has {steps} steps, of {STEPS_MAX}", pool.crush_rule));
        }
        let placer = self.placer(number)?;
        let rule = rule(&map.crush, pool, map.release);
        let special = map.special(number);
        let mut mapped = Mapped::default();
        let (mut up, mut acting) = (Vec::new(), Vec::new());
        for seeds in seeds.chunks(CHUNK) {
            let pgs = || seeds.iter().map(|seed| Pg { pool: number, seed: *seed });
            let inputs: Vec<u32> = pgs().map(|pg| pool.input(pg)).collect();
            let (inputs, batch) = match rule {
                Some(rule) => self.place(&placer, rule, inputs, pool.size)?,
                // As Ceph does it: they lie nowhere.
                None => {
                    let lens = vec![0; inputs.len()];
                    (inputs, Box::new(Batch { width: 0, items: Vec::new(), lens }))
                }
            };
            for (i, (pg, input)) in pgs().zip(inputs).enumerate() {
                up.clear();
                up.extend_from_slice(batch.get(i));
                let up_primary = map.settle(pool, pg, input, &special, &mut up);
                let acting_primary = if special.pg_temp {
                    map.stand_in(pool, pg, &up, up_primary, &mut acting)
                } else {
                    acting.clone_from(&up);
                    up_primary
                };
                mapped.up.push(&up);
                mapped.up_primary.push(up_primary);
                mapped.acting.push(&acting);
                mapped.acting_primary.push(acting_primary);
            }
        }
        Ok(mapped)
    }

    /// Lets whoever is through with it first run a rule.
    fn place(
        &self,
        placer: &Arc<Placer>,
        rule: u32,
        inputs: Vec<u32>,
        size: u8,
    ) -> Result<(Vec<u32>, Box<Batch>), String> {
        let work = Work::Place {
            placer: Arc::clone(placer),
            rule,
            inputs,
            width: size.into(),
            reweights: Arc::clone(&self.weights),
            batch: None,
        };
        match self.dispatcher.run(work) {
            (Work::Place { inputs, batch: Some(batch), .. }, Ok(_)) => Ok((inputs, batch)),
            (_, Err(failure)) => Err(format!("the CRUSH map: {failure}")),
            _ => Err("the CRUSH map: an accelerator gave back nothing".into()),
        }
    }

    /// How something lies that has so many parts in each PG: over the OSDs that have any PG of the pool.
    ///
    /// # Errors
    /// As of [`Mapper::map`].
    pub fn spread(&mut self, number: i64, parts: impl Fn(u32) -> u64) -> Result<Spread, String> {
        let pg_num = self.map.pools.get(&number).map_or(0, |pool| pool.pg_num);
        let mut spread = Spread::default();
        let mut mapped = Mapped::default();
        for seed in 0..pg_num {
            let (i, parts) = (seed as usize % CHUNK, parts(seed));
            if i == 0 {
                // Nothing of what came before is needed any more.
                let seeds: Vec<u32> = (seed..pg_num).take(CHUNK).collect();
                mapped = self.map(number, &seeds)?;
            }
            for osd in mapped.acting.get(i).iter().filter(|osd| **osd != NONE) {
                let share = spread.osds.entry(*osd).or_default();
                share.copies += parts;
            }
            // It may have several shards, and is the primary once.
            let primary = mapped.acting_primary[i];
            if let Some(share) = primary.and_then(|osd| spread.osds.get_mut(&osd)) {
                share.first += parts;
            }
        }
        Ok(spread)
    }
}

/// The number of the rule by which groups of a pool are placed; none: by none, so that they lie nowhere.
fn rule(crush: &Map, pool: &Pool, release: u8) -> Option<u32> {
    if release >= QUINCY {
        return crush.rule(pool.crush_rule.into()).map(|_| pool.crush_rule.into());
    }
    // Before, one was looked for that is for such a pool.
    let fits = |rule: &placement::crush::Rule| {
        rule.ruleset == pool.crush_rule
            && rule.kind == number(pool.kind)
            && (rule.min_size..=rule.max_size).contains(&pool.size)
    };
    let place = crush.rules.iter().position(|rule| rule.as_ref().is_some_and(fits))?;
    u32::try_from(place).ok()
}

fn first(list: &[i32]) -> Option<i32> {
    list.iter().copied().find(|osd| *osd != NONE)
}

impl OsdMap {
    fn special(&self, pool: i64) -> Special {
        let all = Pg { pool, seed: 0 }..=Pg { pool, seed: u32::MAX };
        Special {
            pg_temp: self.pg_temp.range(all.clone()).next().is_some()
                || self.primary_temp.range(all.clone()).next().is_some(),
            moved: self.pg_upmap.range(all.clone()).next().is_some()
                || self.pg_upmap_items.range(all.clone()).next().is_some()
                || self.pg_upmap_primaries.range(all).next().is_some(),
            affinity: self.osds.iter().any(|osd| osd.primary_affinity != ONE),
        }
    }

    /// Takes out of a list whom `keep` does not want: copies move up, the places of shards stay.
    fn keep(pool: &Pool, list: &mut Vec<i32>, keep: impl Fn(i32) -> bool) {
        match pool.kind {
            Kind::Replicated => list.retain(|osd| keep(*osd)),
            Kind::Erasure => {
                list.iter_mut().filter(|osd| !keep(**osd)).for_each(|osd| *osd = NONE);
            }
        }
    }

    /// From what CRUSH says to the OSDs that are up, and which of them is the first.
    fn settle(
        &self,
        pool: &Pool,
        pg: Pg,
        input: u32,
        special: &Special,
        list: &mut Vec<i32>,
    ) -> Option<i32> {
        if special.moved {
            Self::keep(pool, list, |osd| self.exists(osd));
            self.exchange(pg, list);
        }
        Self::keep(pool, list, |osd| self.is_up(osd));
        let mut chosen = first(list);
        if special.affinity
            && let Some(place) = self.willing(input, list)
        {
            chosen = Some(list[place]);
            if pool.kind == Kind::Replicated {
                list[..=place].rotate_right(1);
            }
        }
        chosen
    }

    /// What was moved by hand.
    fn exchange(&self, pg: Pg, list: &mut Vec<i32>) {
        if let Some(placed) = self.pg_upmap.get(&pg) {
            if placed.iter().any(|osd| self.is_out(*osd)) {
                return;
            }
            list.clone_from(placed);
        }
        for (from, to) in self.pg_upmap_items.get(&pg).into_iter().flatten() {
            if list.contains(to) || self.is_out(*to) {
                continue;
            }
            if let Some(place) = list.iter_mut().find(|osd| *osd == from) {
                *place = *to;
            }
        }
        if let Some(chosen) = self.pg_upmap_primaries.get(&pg)
            && self.osd(*chosen).is_some_and(|osd| osd.weight != 0)
            && let Some(place) = list.iter().position(|osd| osd == chosen)
        {
            list.swap(0, place);
        }
    }

    /// The place of the first OSD that is willing to be the first, or of the first one, if none is; nothing, if that is as it is anyhow.
    fn willing(&self, input: u32, list: &[i32]) -> Option<usize> {
        let affinity = |osd: i32| self.osd(osd).map_or(ONE, |osd| osd.primary_affinity);
        let there = || list.iter().enumerate().filter(|(_, osd)| **osd != NONE);
        if there().all(|(_, osd)| affinity(*osd) == ONE) {
            return None;
        }
        let is_willing = |osd: i32| {
            let affinity = affinity(osd);
            affinity >= ONE || hash2(input, osd.cast_unsigned()) >> 16 < affinity
        };
        let willing = there().find(|(_, osd)| is_willing(**osd));
        willing.or_else(|| there().next()).map(|(place, _)| place)
    }

    /// Who serves a PG, and who of them is the primary: who stands in for a while, or those on whom it belongs.
    fn stand_in(
        &self,
        pool: &Pool,
        pg: Pg,
        up: &[i32],
        up_primary: Option<i32>,
        acting: &mut Vec<i32>,
    ) -> Option<i32> {
        acting.clear();
        if let Some(list) = self.pg_temp.get(&pg) {
            acting.extend_from_slice(list);
            Self::keep(pool, acting, |osd| self.is_up(osd));
        }
        let chosen = match self.primary_temp.get(&pg) {
            Some(osd) => (*osd >= 0).then_some(*osd),
            None => first(acting),
        };
        let chosen = if acting.is_empty() {
            acting.extend_from_slice(up);
            chosen.or(up_primary)
        } else {
            chosen
        };
        // Before Reef whoever is chosen is the first, whether it serves the group or not.
        let serves = chosen.is_some_and(|osd| acting.contains(&osd));
        if serves || self.release < REEF { chosen } else { first(acting) }
    }
}
