//! Finds what is missing, misplaced or damaged, and makes it good, while images are in use.
//!
//! Where another process has an image open to write, versions that are not whole are left alone: they may be on their
//! way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use base::Errno;
use base::planted::{Bug, planted};

use super::image::{Current, Found, Image, PATIENCE, State, judge};
use super::shard::{self, Version};
use super::worker::Ask;

/// What was found, and done.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Objects that were ever written.
    pub objects: u64,
    /// Objects of which every shard is where it belongs.
    pub whole: u64,
    /// Objects that lack shards, and can be read.
    pub degraded: u64,
    /// Objects that cannot be read.
    pub lost: u64,
    /// Shards that are missing.
    pub missing: u64,
    /// Shards that lie elsewhere than they belong.
    pub misplaced: u64,
    /// Shards that are not what they should be.
    pub damaged: u64,
    /// Shards that were made anew.
    pub rebuilt: u64,
    /// Shards of versions that do not count, or of places where they do not belong, that were removed.
    pub removed: u64,
    /// Stores that do not answer.
    pub silent: u64,
}

/// What to do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Orders {
    /// Read every byte and compare it with its checksum.
    pub verify: bool,
    /// Make good what is found.
    pub repair: bool,
    /// Bytes a second, at most; 0: as fast as it goes.
    pub rate: u64,
}

/// Goes through an image; `progress` is told how many of how many objects are done, and ends it with false.
pub fn run(
    image: &Image,
    orders: Orders,
    mut progress: impl FnMut(u64, u64, &Report) -> bool,
) -> Result<Report, Errno> {
    if orders.repair {
        image.pool.spread(&image.name, &image.info);
    }
    let survey = image.pool.survey(&image.name);
    let silent = survey.silent.len();
    let mut report = Report { silent: silent as u64, ..Report::default() };
    let (coding, total) = (image.info.coding, survey.objects.len() as u64);
    let begun = Instant::now();
    let mut bytes = 0u64;
    for (done, (object, versions)) in survey.objects.iter().enumerate() {
        let state = State::of(coding, versions, silent);
        if state.version.is_none() && !state.unknown {
            // Nothing of it ever counted.
            if orders.repair && image.is_writer() {
                report.removed += image.sweep(*object, versions, None);
            }
            continue;
        }
        report.objects += 1;
        let mut found = versions.clone();
        if orders.verify {
            report.damaged += image.scrub(*object, &state, &mut found);
            bytes += (coding.width() * image.info.shard_bytes()) as u64;
        }
        let state = State::of(coding, &found, silent);
        let wanted = image.pool.places.of(image.info.id, *object);
        let held = state.version.and_then(|version| found.get(&version));
        let missing = (0..coding.width()).filter(|s| state.at[*s].is_none()).count() as u64;
        let misplaced = held.map_or(0, |held| {
            let away = |(s, at): &(&usize, &Vec<usize>)| !at.contains(&wanted[**s]);
            held.at.iter().filter(away).count() as u64
        });
        report.missing += missing;
        report.misplaced += misplaced;
        match (state.version, missing + misplaced) {
            (None, _) => report.lost += 1,
            (Some(_), 0) => report.whole += 1,
            (Some(_), _) => report.degraded += 1,
        }
        if orders.repair {
            match image.repair_object(*object, Some(&found), silent, image.is_writer()) {
                Ok((rebuilt, removed)) => {
                    report.rebuilt += rebuilt;
                    report.removed += removed;
                    bytes += rebuilt * image.info.shard_bytes() as u64;
                }
                Err(errno) => log::warn!("pool: object {object}: {errno}"),
            }
        }
        if orders.rate > 0 {
            let due = Duration::from_secs_f64(bytes as f64 / orders.rate as f64);
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        if !progress(done as u64 + 1, total, &report) {
            return Err(Errno::INTR);
        }
    }
    Ok(report)
}

impl Image {
    fn is_writer(&self) -> bool {
        use crate::device::Disk;
        !self.traits().read_only
    }

    /// Reads every shard of an object; what is not what it should be is taken out of `found`, and removed where this is
    /// open to write. How many there were.
    fn scrub(&self, object: u64, state: &State, found: &mut BTreeMap<Version, Found>) -> u64 {
        let Some(version) = state.version.filter(|_| !state.hole) else { return 0 };
        let Some(held) = found.get_mut(&version) else { return 0 };
        let mut damaged = 0;
        for (number, stores) in &mut held.at {
            stores.retain(|store| {
                let wrong = self.read_one(object, version, *number, *store) == Err(Errno::IO);
                damaged += u64::from(wrong);
                !wrong
            });
        }
        held.at.retain(|_, stores| !stores.is_empty());
        damaged
    }

    /// Removes every shard of versions that do not count. How many there were.
    fn sweep(
        &self,
        object: u64,
        versions: &BTreeMap<Version, Found>,
        keep: Option<Version>,
    ) -> u64 {
        let mut removed = 0;
        for (version, found) in versions.iter().filter(|(version, _)| Some(**version) != keep) {
            for (number, stores) in &found.at {
                for store in stores {
                    self.forget(*store, object, *version, *number, found.hole);
                    removed += 1;
                }
            }
        }
        removed
    }

    /// Makes one object whole: shards that are missing are made anew, those elsewhere moved, and what does not count is
    /// removed. How many were made, and removed. With `may_clean` versions that are not whole go as well.
    pub(super) fn repair_object(
        &self,
        object: u64,
        versions: Option<&BTreeMap<Version, Found>>,
        silent: usize,
        may_clean: bool,
    ) -> Result<(u64, u64), Errno> {
        let _owned = self.own(object);
        let fresh;
        // Where this process writes, it knows better than what was looked up before the object was its own.
        let known = self.state(object).version;
        let stale = |versions: &BTreeMap<Version, Found>| {
            known.is_some_and(|version| !versions.contains_key(&version))
        };
        let versions = match versions.filter(|versions| !stale(versions)) {
            Some(versions) => versions,
            None => {
                fresh = self.pool.survey(&self.name).objects.remove(&object).unwrap_or_default();
                &fresh
            }
        };
        let coding = self.info.coding;
        let version = match judge(coding, versions, silent) {
            Current::Is(version) => version,
            Current::Never => {
                return Ok((0, if may_clean { self.sweep(object, versions, None) } else { 0 }));
            }
            Current::Unknown => return Err(Errno::IO),
        };
        let Some(found) = versions.get(&version) else { return Err(Errno::IO) };
        let mut state = State::of(coding, versions, silent);
        let wanted = self.pool.places.of(self.info.id, object);
        let away: Vec<usize> = (0..coding.width())
            .filter(|s| !found.at.get(s).is_some_and(|at| at.contains(&wanted[*s])))
            .collect();
        let bytes: Vec<Arc<Vec<u8>>> = if found.hole || away.is_empty() {
            vec![Arc::default(); away.len()]
        } else {
            self.read_shards(object, &state, &away)?.into_iter().map(Arc::new).collect()
        };
        let (to, from) = channel();
        for (number, bytes) in away.iter().zip(&bytes) {
            let head = self.make_head(object, version, *number, found.hole);
            let head = Arc::new(shard::encode(&head, bytes));
            let name = self.shard_name(object, version, *number, found.hole);
            let ask = Ask::Put(name, head, Arc::clone(bytes));
            self.pool.workers[wanted[*number]].ask(ask, *number, &to);
        }
        let mut rebuilt = 0;
        let end = Instant::now() + PATIENCE;
        for _ in &away {
            let wait = end.saturating_duration_since(Instant::now());
            let Ok((number, told)) = from.recv_timeout(wait) else { break };
            if told.is_ok() {
                state.at[number] = Some(wanted[number]);
                rebuilt += 1;
            }
        }
        for (number, stores) in &found.at {
            if stores.contains(&wanted[*number]) {
                state.at[*number] = Some(wanted[*number]);
            }
        }
        let whole = state.at.iter().flatten().count();
        let mut removed = 0;
        // What lies elsewhere, or is older, goes only when this version is safe without it.
        if whole >= coding.quorum() || planted(Bug::CleanedTooEarly) {
            for (number, stores) in &found.at {
                for store in stores.iter().filter(|s| state.at[*number] != Some(**s)) {
                    self.forget(*store, object, version, *number, found.hole);
                    removed += 1;
                }
            }
            let goes = |(other, _): &(&Version, &Found)| **other < version || may_clean;
            let others: BTreeMap<Version, Found> =
                versions.iter().filter(goes).map(|(v, f)| (*v, f.clone())).collect();
            removed += self.sweep(object, &others, Some(version));
        }
        self.set_state(object, state);
        Ok((rebuilt, removed))
    }
}
