//! Finds what is missing, misplaced or damaged, and makes it good, while images are in use.
//!
//! Where another process has an image open to write, versions that are not whole are left alone: they may be on their
//! way.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use base::planted::{Bug, planted};
use base::{Errno, Nanos};

use super::flight::{AT_A_TIME, Flight, Leg, Line, TASKS};
use super::gather::{Gather, Part, Source};
use super::ground::Removals;
use super::image::Image;
use super::opened::PATIENCE;
use super::patch;
use super::shard;
use super::survey::{Held, Lay, State};
use super::worker::{Answer, Ask, Piece};
use super::write::{Forgotten, Owned};

/// Between two looks how far stores are with what they are to remove.
const LOOK: Nanos = 20_000_000;
/// Who keeps to a rate says how far it is at least so often.
const PAUSE: Nanos = 100_000_000;
/// Numbers of what is put, after those of what is asked for.
const PUTS: usize = 1 << 20;

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
    /// Patches: small writes that lie on objects.
    pub patches: u64,
    /// Shards, and copies of patches, that are missing.
    pub missing: u64,
    /// Shards that lie elsewhere than they belong.
    pub misplaced: u64,
    /// Shards that are not what they should be.
    pub damaged: u64,
    /// Shards that were made anew.
    pub rebuilt: u64,
    /// Shards of versions that do not count, or of places where they do not belong, that were removed.
    pub removed: u64,
    /// Those of them that could not be, or not in time, and are there still.
    pub left: u64,
    /// Stores that do not answer.
    pub silent: u64,
    /// Bytes that were read and written for all of that.
    pub bytes: u64,
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

/// Goes through an image; `progress` is told how many of how many objects are done, which never becomes fewer, and all at the end; it ends
/// it with false. Clients of the image are served first, by each store.
pub fn run(
    image: &Image,
    orders: Orders,
    mut progress: impl FnMut(u64, u64, &Report) -> bool,
) -> Result<Report, Errno> {
    if orders.repair {
        image.pool.spread(&image.name, &image.info);
    }
    let before: Vec<Removals> = image.pool.stores.iter().map(|store| store.removals()).collect();
    let survey = image.pool.survey(&image.name);
    let silent = survey.silent.len();
    let mut report = Report { silent: silent as u64, ..Report::default() };
    let (coding, total) = (image.info.coding, survey.objects.len() as u64);
    let ground = &*image.pool.ground;
    let begun = ground.now();
    let mut flight = Flight::new(image, true);
    let mut done = 0;
    for (object, lay) in &survey.objects {
        let state = State::of(coding, lay, silent);
        if state.is_empty() && state.version.is_none() {
            // Nothing of it counted when it was looked up.
            if orders.repair && image.is_writer() {
                begin(image, *object, lay, silent, &mut flight, &mut report);
            }
            done += 1;
            continue;
        }
        report.objects += 1;
        let mut found = lay.clone();
        if orders.verify {
            // Nobody waits for objects under way while others are read, which takes long.
            land_all(&mut flight, &mut report);
            let (damaged, read) = image.scrub(*object, &state, &mut found);
            report.damaged += damaged;
            report.bytes += read;
        }
        let state = State::of(coding, &found, silent);
        let wanted = image.pool.places.of(image.info.id, *object);
        let held = state.version.and_then(|version| found.versions.get(&version));
        let (mut missing, mut misplaced) = (0, 0);
        if let Some(held) = held {
            missing += (0..coding.width()).filter(|s| state.at[*s].is_none()).count() as u64;
            let away = |(s, at): &(&usize, &Vec<usize>)| !at.contains(&wanted[**s]);
            misplaced += held.at.iter().filter(away).count() as u64;
        }
        for held in &state.patches {
            missing += coding.copies_wanted().saturating_sub(held.at.len()) as u64;
            misplaced += held.at.iter().filter(|store| !wanted.contains(store)).count() as u64;
        }
        report.patches += state.patches.len() as u64;
        report.missing += missing;
        report.misplaced += misplaced;
        match (state.unknown, missing + misplaced) {
            (true, _) => report.lost += 1,
            (false, 0) => report.whole += 1,
            (false, _) => report.degraded += 1,
        }
        done += 1;
        if orders.repair {
            begin(image, *object, &found, silent, &mut flight, &mut report);
        }
        loop {
            if !progress(done - flight.len() as u64, total, &report) {
                // What lies where is written down.
                land_all(&mut flight, &mut report);
                return Err(Errno::INTR);
            }
            let now = ground.now();
            if orders.rate == 0 || planted(Bug::RepairUnpaced) {
                break;
            }
            let due = u128::from(report.bytes) * 1_000_000_000 / u128::from(orders.rate);
            let due = begun.saturating_add(Nanos::try_from(due).unwrap_or(Nanos::MAX));
            if now >= due {
                break;
            }
            // Of what is under way the rest is done meanwhile.
            land(&mut flight, due.min(now + PAUSE), &mut report);
        }
    }
    land_all(&mut flight, &mut report);
    if !progress(total, total, &report) {
        return Err(Errno::INTR);
    }
    if orders.repair {
        let goes_on = || progress(total, total, &report);
        report.left = await_removals(image, &before, goes_on)?;
        report.removed = report.removed.saturating_sub(report.left);
    }
    Ok(report)
}

/// Begins to repair an object, which looked like that.
fn begin<'a>(
    image: &'a Image,
    object: u64,
    lay: &Lay,
    silent: usize,
    flight: &mut Flight<'a, Repair<'a>>,
    report: &mut Report,
) {
    let (owned, line) = (claim(image, object, flight, report), flight.line());
    match image.begin_repair(owned, Some(lay), silent, image.is_writer(), line) {
        Ok(Begun::Repairing(repair)) => {
            report.bytes += repair.bytes;
            flight.add(*repair);
        }
        Ok(Begun::Done(removed)) => report.removed += removed,
        Err(errno) => log::warn!("pool: object {object}: {errno}"),
    }
    while flight.len() >= AT_A_TIME {
        land(flight, Nanos::MAX, report);
    }
}

/// Owns an object, however long others have it: what they may wait for is done meanwhile.
fn claim<'a>(
    image: &'a Image,
    object: u64,
    flight: &mut Flight<'a, Repair<'a>>,
    report: &mut Report,
) -> Owned<'a> {
    loop {
        match image.try_own(object) {
            Some(owned) => return owned,
            None if flight.len() == 0 => return image.own(object),
            None => land(flight, Nanos::MAX, report),
        }
    }
}

fn land_all(flight: &mut Flight<'_, Repair<'_>>, report: &mut Report) {
    while flight.len() > 0 {
        land(flight, Nanos::MAX, report);
    }
}

/// Waits until one more thing has happened, but no longer than until then; what is over is counted.
fn land(flight: &mut Flight<'_, Repair<'_>>, until: Nanos, report: &mut Report) {
    for repair in flight.step(until) {
        let (object, before) = (repair.object, repair.bytes);
        match repair.conclude() {
            Ok(Repaired { rebuilt, removed, bytes }) => {
                report.rebuilt += rebuilt;
                report.removed += removed;
                report.bytes += bytes - before;
            }
            Err(errno) => log::warn!("pool: object {object}: {errno}"),
        }
    }
}

/// What was done to an object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repaired {
    /// Shards, and copies of patches, that were made.
    pub rebuilt: u64,
    /// Those that were removed.
    pub removed: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

/// A repair of one object that has begun.
pub(super) enum Begun<'a> {
    Repairing(Box<Repair<'a>>),
    /// There is nothing to repair; so much was removed.
    Done(u64),
}

/// An object of which shards are being made anew.
pub(super) struct Repair<'a> {
    image: &'a Image,
    line: Line,
    _owned: Owned<'a>,
    object: u64,
    lay: Lay,
    state: State,
    /// What was known of it before.
    known: State,
    silent: usize,
    may_clean: bool,
    wanted: Vec<usize>,
    /// Shards that are not where they belong.
    away: Vec<usize>,
    /// What they are made from, until it is there.
    gather: Option<Gather<'a>>,
    /// Puts without an answer.
    left: usize,
    end: Nanos,
    failed: Option<Errno>,
    rebuilt: u64,
    /// What was taken back, and is removed.
    removed: u64,
    /// Bytes read and written, as far as that is known.
    bytes: u64,
}

impl Repair<'_> {
    fn put(&mut self, shards: Vec<Piece>) {
        let (image, object) = (self.image, self.object);
        let Some(version) = self.state.version else { return };
        let hole = self.lay.versions.get(&version).is_some_and(|found| found.hole);
        for (number, bytes) in self.away.iter().zip(shards) {
            let head = image.make_head(object, version, *number, hole);
            let head = shard::encode(&head, &bytes).into();
            let name = image.shard_name(object, version, *number, hole);
            self.line.ask(image, self.wanted[*number], Ask::Put(name, head, bytes), PUTS + number);
            self.left += 1;
        }
        self.end = image.pool.ground.now() + PATIENCE;
    }
}

impl Repair<'_> {
    /// When its shards are where they should be, or not: the rest.
    fn conclude(self) -> Result<Repaired, Errno> {
        let Self { image, object, lay, mut state, known, silent, may_clean, wanted, .. } = self;
        if let Some(errno) = self.failed {
            return Err(errno);
        }
        let coding = image.info.coding;
        let (mut rebuilt, mut removed, mut bytes) = (self.rebuilt, self.removed, self.bytes);
        let mut safe = true;
        if let Some(version) = state.version
            && let Some(found) = lay.versions.get(&version)
        {
            let mut gone = Forgotten::default();
            for (number, stores) in &found.at {
                if stores.contains(&wanted[*number]) {
                    state.at[*number] = Some(wanted[*number]);
                }
                for store in stores.iter().filter(|s| state.at[*number] != Some(**s)) {
                    gone.add(Some(*store), || {
                        image.shard_name(object, version, *number, found.hole)
                    });
                }
            }
            // What lies elsewhere, or is older, goes only when this version is safe without it.
            let whole = state.at.iter().flatten().count();
            safe = whole >= coding.quorum() || planted(Bug::CleanedTooEarly);
            if safe {
                removed += gone.count();
                image.forget(gone);
            }
        }
        // The last may be on its way, where another writes.
        let count = state.patches.len();
        for (i, held) in state.patches.iter_mut().enumerate() {
            if may_clean || i + 1 < count {
                let (made, gone) = image.repair_patch(object, held, &wanted)?;
                rebuilt += made;
                removed += gone;
                // Read once, and put.
                bytes += (made + u64::from(made > 0)) * held.patch.bytes() as u64;
            }
        }
        if safe {
            let base = state.base();
            let counts = |version| {
                version == base || state.patches.iter().any(|held| held.patch.version == version)
            };
            // Of another's writes, the newest may have failed, however much there is of it, and is taken back yet: what was before counts then.
            // He has laid patches upon it only if it counts.
            let superseded = !state.patches.is_empty() || planted(Bug::SweptBeside);
            removed += image.sweep(object, &lay, |version| {
                !counts(version) && (may_clean || superseded && version < base)
            });
        }
        let few = |held: &Arc<Held>| held.at.len() < coding.copies();
        state.uncertain = silent == 0 && (!safe || state.patches.iter().any(few));
        state.newest = state.newest.max(known.newest);
        // What was not known may be laid upon something that comes to light.
        (state.failed, state.undone) = (known.failed || known.unknown, known.undone);
        image.set_state(object, state);
        Ok(Repaired { rebuilt, removed, bytes })
    }
}

impl Leg for Repair<'_> {
    fn take(&mut self, (number, told): Answer) {
        match &mut self.gather {
            Some(gather) => gather.take((number, told)),
            None if !(PUTS..TASKS).contains(&number) => {}
            None => {
                self.left -= 1;
                if told.is_ok() {
                    let number = number - PUTS;
                    self.state.at[number] = Some(self.wanted[number]);
                    self.rebuilt += 1;
                }
            }
        }
    }

    fn advance(&mut self) -> bool {
        if let Some(gather) = &mut self.gather {
            if !gather.advance() {
                return false;
            }
            match gather.finish() {
                Ok(shards) => {
                    self.gather = None;
                    self.put(shards.into_iter().map(Piece::from).collect());
                }
                Err(errno) => self.failed = Some(errno),
            }
        }
        self.failed.is_some() || self.left == 0 || self.image.pool.ground.now() >= self.end
    }

    fn until(&self) -> Nanos {
        self.gather.as_ref().map_or(self.end, Gather::until)
    }
}

/// Waits for what stores are to remove, as long as they get on with it: who asked for a repair may end the process now, and then nobody
/// does it. How many names are there still.
fn await_removals(
    image: &Image,
    before: &[Removals],
    mut goes_on: impl FnMut() -> bool,
) -> Result<u64, Errno> {
    let (ground, stores) = (&*image.pool.ground, &image.pool.stores);
    let now = || stores.iter().map(|store| store.removals());
    // What others, who write meanwhile, ask for after this is theirs.
    let asked: Vec<u64> = now().map(|removals| removals.asked).collect();
    let (_to, from) = channel();
    let (mut least, mut end) = (u64::MAX, 0);
    loop {
        let waiting = now().zip(&asked).map(|(now, asked)| Removals { asked: *asked, ..now });
        let waiting = waiting.map(|removals| removals.waiting()).sum();
        let moment = ground.now();
        if waiting < least {
            (least, end) = (waiting, moment + PATIENCE);
        }
        if waiting == 0 || moment >= end {
            break;
        }
        if !goes_on() {
            return Err(Errno::INTR);
        }
        ground.wait(&from, moment + LOOK);
    }
    let left = now().zip(&asked).zip(before);
    Ok(left.map(|((now, asked), before)| asked.saturating_sub(now.done + before.failed)).sum())
}

impl Image {
    fn is_writer(&self) -> bool {
        use crate::device::Disk;
        !self.traits().read_only
    }

    /// Reads every shard and patch of an object; what is not what it should be is taken out of `found`. How many there were,
    /// and how many bytes were read.
    fn scrub(&self, object: u64, state: &State, found: &mut Lay) -> (u64, u64) {
        let (mut damaged, mut read) = (0, 0);
        let mut is_right = |source: Source, shard: usize| {
            read += self.source_bytes(&source) as u64;
            let right = self.read_one(object, source, shard) != Err(Errno::IO);
            damaged += u64::from(!right);
            right
        };
        if let Some(version) = state.version.filter(|_| !state.hole)
            && let Some(held) = found.versions.get_mut(&version)
        {
            for (number, stores) in &mut held.at {
                stores.retain(|store| {
                    let mut at = vec![None; self.info.coding.width()];
                    at[*number] = Some(*store);
                    is_right(Source::whole(version, &at), *number)
                });
            }
            held.at.retain(|_, stores| !stores.is_empty());
        }
        for patch in state.patches.iter().map(|held| held.patch).filter(|patch| !patch.zero) {
            let Some(held) = found.patches.get_mut(&patch.version) else { continue };
            let one = |store: &usize| Source::patch(&Held::new(patch, vec![*store]));
            let (right, wrong) = held.at.iter().partition(|store| is_right(one(store), 0));
            (held.at, held.wrong) = (right, wrong);
        }
        // One of which no copy is right is lost, and missed.
        found.patches.retain(|_, held| !held.at.is_empty());
        (damaged, read)
    }

    /// Removes every shard and patch of versions that are chosen. How many there were.
    fn sweep(&self, object: u64, lay: &Lay, goes: impl Fn(shard::Version) -> bool) -> u64 {
        let mut gone = Forgotten::default();
        for (version, found) in lay.versions.iter().filter(|(version, _)| goes(**version)) {
            for (number, stores) in &found.at {
                for store in stores {
                    gone.add(Some(*store), || {
                        self.shard_name(object, *version, *number, found.hole)
                    });
                }
            }
        }
        for (_, held) in lay.patches.iter().filter(|(version, _)| goes(**version)) {
            for store in &held.at {
                gone.add(Some(*store), || self.patch_name(object, &held.patch));
            }
        }
        let count = gone.count();
        self.forget(gone);
        count
    }

    /// Answers to so many questions, by their numbers.
    fn answers(&self, from: &Receiver<Answer>, count: usize) -> Vec<usize> {
        let end = self.pool.ground.now() + PATIENCE;
        let mut done = Vec::new();
        for _ in 0..count {
            let Some((number, told)) = self.pool.ground.wait(from, end) else { break };
            if told.is_ok() {
                done.push(number);
            }
        }
        done
    }

    /// Makes one object whole, as [`begin_repair`](Self::begin_repair), and waits for it.
    pub(super) fn repair_object(
        &self,
        object: u64,
        lay: Option<&Lay>,
        silent: usize,
        may_clean: bool,
    ) -> Result<(), Errno> {
        let mut flight = Flight::new(self, false);
        let line = flight.line();
        match self.begin_repair(self.own(object), lay, silent, may_clean, line)? {
            Begun::Repairing(repair) => flight.add(*repair),
            Begun::Done(_) => {}
        }
        while flight.len() > 0 {
            for repair in flight.step(Nanos::MAX) {
                repair.conclude()?;
            }
        }
        Ok(())
    }

    /// Begins to make one object whole: shards and copies of patches that are missing are made anew, those elsewhere moved, and what does
    /// not count is removed. With `may_clean` versions that are not whole go as well.
    fn begin_repair<'a>(
        &'a self,
        owned: Owned<'a>,
        lay: Option<&Lay>,
        silent: usize,
        may_clean: bool,
        line: Line,
    ) -> Result<Begun<'a>, Errno> {
        let object = owned.object();
        let coding = self.info.coding;
        // Where this process writes, it knows better than what was looked up before the object was its own.
        let known = self.state(object);
        let stale = |lay: &Lay| known.is_newer_than(&State::of(coding, lay, 0));
        let (mut lay, silent) = match lay.filter(|lay| !stale(lay)) {
            Some(lay) => (lay.clone(), silent),
            None => {
                let mut survey = self.pool.survey(&self.name);
                let lay = survey.objects.remove(&object).unwrap_or_default();
                (lay, survey.silent.len())
            }
        };
        let mut undone = Lay::default();
        if !planted(Bug::UndoneRepaired) {
            undone = known.strike_undone(&mut lay);
        }
        let state = State::of(coding, &lay, silent);
        // What this process has written is not taken for what was there before because it is not found now.
        if state.unknown || known.is_newer_than(&state) {
            return Err(Errno::IO);
        }
        let mut removed = if may_clean { self.sweep(object, &undone, |_| true) } else { 0 };
        if state.is_empty() && state.version.is_none() {
            removed += if may_clean { self.sweep(object, &lay, |_| true) } else { 0 };
            return Ok(Begun::Done(removed));
        }
        let wanted = self.pool.places.of(self.info.id, object);
        let found = state.version.and_then(|version| lay.versions.get(&version));
        let hole = found.is_some_and(|found| found.hole);
        let is_away = |s: &usize| {
            found.is_some_and(|found| !found.at.get(s).is_some_and(|at| at.contains(&wanted[*s])))
        };
        let away: Vec<usize> = (0..coding.width()).filter(is_away).collect();
        let mut repair = Repair {
            image: self,
            line,
            _owned: owned,
            object,
            lay,
            state,
            known,
            silent,
            may_clean,
            wanted,
            away,
            gather: None,
            left: 0,
            end: 0,
            failed: None,
            rebuilt: 0,
            removed,
            bytes: 0,
        };
        if repair.away.is_empty() || hole {
            repair.put(vec![Piece::default(); repair.away.len()]);
        } else if let Some(version) = repair.state.version {
            let to = self.info.shard_bytes();
            let part = |shard: &usize| Part { source: 0, shard: *shard, from: 0, to };
            let parts: Vec<Part> = repair.away.iter().map(part).collect();
            let source = Source::whole(version, &repair.state.at);
            let mut gather = Gather::new(self, object, vec![source], repair.line.clone());
            gather.start(&parts);
            // Others may be asked at once, so that what it costs is known.
            gather.advance();
            repair.bytes = gather.bytes + (to * repair.away.len()) as u64;
            repair.gather = Some(gather);
        }
        Ok(Begun::Repairing(Box::new(repair)))
    }

    /// Puts the last patch of an object in as many stores as it takes, if it may have been under way when its writer died.
    pub(super) fn complete_last(&self, object: u64) -> Result<(), Errno> {
        let _owned = self.own(object);
        let mut state = self.state(object);
        let few = |held: &&mut Arc<Held>| held.at.len() < self.info.coding.copies();
        if let Some(held) = state.patches.last_mut().filter(|held| few(held)) {
            self.repair_patch(object, held, &self.pool.places.of(self.info.id, object))?;
            self.set_state(object, state);
        }
        Ok(())
    }

    /// Puts copies of a patch where too few are where they belong, and removes those elsewhere. How many of each.
    fn repair_patch(
        &self,
        object: u64,
        held: &mut Arc<Held>,
        wanted: &[usize],
    ) -> Result<(u64, u64), Errno> {
        let is_there = |store: &&usize| wanted.contains(store);
        let copies = self.info.coding.copies_wanted();
        let mut at: Vec<usize> = held.at.iter().filter(is_there).copied().collect();
        let mut made = 0;
        if at.len() < copies || !held.wrong.is_empty() {
            let body = Piece::from(self.read_patch(object, held, true)?);
            let head = Piece::from(patch::encode(self.of(object), &held.patch, &body));
            let mut rest: Vec<usize> =
                wanted.iter().filter(|store| !at.contains(store)).copied().collect();
            // What is wrong is made right where it lies.
            let key = |store: &usize| {
                (!held.wrong.contains(store), self.pool.stores[*store].is_suspect())
            };
            rest.sort_by_cached_key(key);
            let mut first = rest.iter().filter(|store| held.wrong.contains(store)).count();
            let mut rest = rest.into_iter();
            // Each that fails, another stands in for.
            while (at.len() < copies || first > 0) && rest.len() > 0 {
                let (line, from) = Line::new(true);
                let count = copies.saturating_sub(at.len()).max(first);
                let some: Vec<usize> = rest.by_ref().take(count).collect();
                first = 0;
                for store in &some {
                    let name = self.patch_name(object, &held.patch);
                    let ask = Ask::Put(name, head.clone(), body.clone());
                    line.ask(self, *store, ask, *store);
                }
                let done = self.answers(&from, some.len());
                made += done.len() as u64;
                at.extend(done);
            }
        }
        let mut gone = Forgotten::default();
        if at.len() >= self.info.coding.copies() {
            for store in held.at.iter().chain(&held.wrong).filter(|store| !at.contains(store)) {
                gone.add(Some(*store), || self.patch_name(object, &held.patch));
            }
        } else {
            at.extend(held.at.iter().filter(|store| !wanted.contains(store)));
        }
        let removed = gone.count();
        self.forget(gone);
        *held = Arc::new(Held::new(held.patch, at));
        Ok((made, removed))
    }
}
