//! Images of a pool: what is known of their objects, and how they are read. How they are written: [`write`](super::write).
//!
//! Who opens an image to write has its lock, knows the version of every object, its patches, and where they are, and
//! keeps that in step with what it writes. A read goes to the shards that hold the bytes; where one is lost, wrong, or
//! late, to one more of the others than it takes, and the first that answer decide.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use base::planted::{Bug, planted};
use base::{Errno, Nanos};

use super::flight::{AT_A_TIME, Flight, Leg, Line};
use super::gather::{Gather, PARTS, Part, Source};
use super::ground::Lock;
use super::opened::{Info, Pool};
use super::patch;
use super::shard::{self, BLOCK, Head, Version};
use super::survey::{Held, State};
use super::worker::Answer;

/// Between two times that stores are asked of what was not known when an image was opened.
const ASK_AGAIN: Nanos = 1_000_000_000;
/// Heads of shards that are remembered.
const HEADS_MAX: usize = 8192;

/// Checksums of blocks, by object, version and shard; where all are copies of the same bytes, under [`COPY`].
type Heads = HashMap<(u64, Version, usize), Arc<Vec<u32>>>;
const COPY: usize = usize::MAX;

/// An image of a pool.
pub struct Image {
    pub(super) pool: Arc<Pool>,
    pub(super) name: String,
    pub(super) info: Info,
    objects: Mutex<HashMap<u64, State>>,
    /// So many stores were silent that of no object anything is known.
    blind: AtomicBool,
    /// When stores are asked again of what is not known.
    ask_at: Mutex<Nanos>,
    /// Some were: what a writer left there that died is not known.
    partial: bool,
    /// The number of this writer among all that the image had; 0: it is none.
    pub(super) epoch: u64,
    /// Objects that are being written.
    pub(super) busy: Mutex<HashSet<u64>>,
    pub(super) idle: Condvar,
    heads: Mutex<Heads>,
    /// Held as long as this is open to write.
    pub(super) locks: Option<Vec<Lock>>,
    /// In which terms they count.
    terms: Mutex<Vec<u64>>,
    /// There are too few that count, and the log says so.
    lapsed: AtomicBool,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Image {
    /// Opens an image; to write, unless `read_only`. Fails where another process has it open to write, and where so many
    /// stores are silent that what was written last may be in those only.
    pub fn open(pool: Arc<Pool>, name: &str, read_only: bool) -> Result<Self, String> {
        let info = pool.info(name)?;
        let told = |errno| match errno {
            Errno::BUSY => format!("image {name} is open elsewhere"),
            _ => format!("image {name}: fewer than half of the stores can be locked"),
        };
        let locks = if read_only { None } else { Some(pool.lock(name).map_err(told)?) };
        // What ended already does not count.
        let held = locks.iter().flatten().map(|lock| lock.term().unwrap_or(u64::MAX)).collect();
        let survey = pool.survey(name);
        let silent = survey.silent.len();
        let coding = pool.spec.coding;
        // A small write is answered for by fewer stores than a large one.
        let most = if read_only { coding.quorum() } else { coding.copies() };
        if silent >= most {
            return Err(format!(
                "image {name}: {silent} stores are silent, and may know what the others do not"
            ));
        }
        let epoch = if read_only { 0 } else { pool.begin_epoch(name, &survey)? };
        let image = Self {
            pool,
            name: name.to_owned(),
            info,
            objects: Mutex::default(),
            blind: AtomicBool::new(silent >= coding.copies()),
            ask_at: Mutex::default(),
            partial: silent > 0,
            epoch,
            busy: Mutex::default(),
            idle: Condvar::new(),
            heads: Mutex::default(),
            locks,
            terms: Mutex::new(held),
            lapsed: AtomicBool::new(false),
        };
        for (object, lay) in &survey.objects {
            // Nor is something laid over what may not be the newest: it would lie on the wrong version when the others are back.
            let failed = image.partial && !planted(Bug::LaidOverUnseen);
            image.set_state(*object, State { failed, ..State::of(coding, lay, silent) });
        }
        if image.locks.is_some() {
            // What was being written when somebody crashed: made whole, or away.
            for (object, lay) in &survey.objects {
                let settled = if *object >= info.objects() {
                    Ok(())
                } else if lay.versions.len() > 1
                    || lay.patches.len() > image.state(*object).patches.len()
                {
                    image.repair_object(*object, Some(lay), silent, true)
                } else {
                    image.complete_last(*object)
                };
                if let Err(errno) = settled {
                    log::warn!("pool: image {name}, object {object}: {errno}");
                }
            }
        }
        Ok(image)
    }

    /// What it says of itself.
    pub fn info(&self) -> Info {
        self.info
    }

    fn objects(&self) -> MutexGuard<'_, HashMap<u64, State>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody else can have it open to write: locks that end by themselves may have ended.
    pub(super) fn is_alone(&self) -> bool {
        let Some(locks) = &self.locks else { return true };
        let now: Vec<Option<u64>> = locks.iter().map(|lock| lock.term()).collect();
        let mut terms = self.terms.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = now.iter().zip(&*terms).filter(|(now, term)| **now == Some(**term)).count();
        let alone = 2 * kept > self.pool.stores.len();
        if alone {
            // Those that ended meanwhile and are held again count again: as long as the others were kept, nobody else had enough.
            for (term, now) in terms.iter_mut().zip(now) {
                *term = now.unwrap_or(*term);
            }
        }
        if self.lapsed.swap(!alone, Ordering::Relaxed) == alone {
            let now = if alone { "are enough again" } else { "are too few: nothing is written" };
            log::error!("pool: image {}: the locks that never ended {now}", self.name);
        }
        alone
    }

    pub(super) fn state(&self, object: u64) -> State {
        self.objects().get(&object).cloned().unwrap_or_else(|| State {
            unknown: self.blind.load(Ordering::SeqCst),
            failed: self.partial && !planted(Bug::LaidOverUnseen),
            ..State::none(self.info.coding)
        })
    }

    pub(super) fn set_state(&self, object: u64, state: State) {
        self.objects().insert(object, state);
    }

    /// Where the parts of an object are, asked anew: somebody repairs while this is open. Who writes knows better what there
    /// is, and asks only where.
    fn look_again(&self, object: u64) {
        let mut survey = self.pool.survey(&self.name);
        let lay = survey.objects.remove(&object).unwrap_or_default();
        let found = State::of(self.info.coding, &lay, survey.silent.len());
        if self.locks.is_none() {
            return self.set_state(object, found);
        }
        if let Some(state) = self.objects().get_mut(&object) {
            if state.version == found.version {
                for (at, found) in state.at.iter_mut().zip(found.at) {
                    *at = found.or(*at);
                }
            }
            for held in &mut state.patches {
                if let Some(found) = lay.patches.get(&held.patch.version)
                    && found.patch == held.patch
                {
                    *held = Arc::new(found.clone());
                }
            }
        }
    }

    /// What an object holds was not known, for stores were silent that may have newer parts of it: asks them again, if all seem to be
    /// back, about all such objects. Nothing is written to these, so what is found is all there is. Whether it is known now.
    pub(super) fn is_known_by_now(&self, object: u64) -> bool {
        let (stores, ground) = (&self.pool.stores, &self.pool.ground);
        let away = || stores.iter().any(|store| store.is_suspect() || store.is_late());
        let mut ask_at = self.ask_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = || !self.state(object).unknown;
        if is_known() {
            return true;
        }
        if ground.now() < *ask_at || away() || planted(Bug::UnknownForGood) {
            return false;
        }
        let mut survey = self.pool.survey(&self.name);
        *ask_at = ground.now() + ASK_AGAIN;
        let silent = survey.silent.len();
        if silent >= self.info.coding.copies() {
            return false;
        }
        let blind = self.blind.swap(false, Ordering::SeqCst);
        let mut objects = self.objects();
        // Of those that are not found any more there is nothing.
        for (object, _) in objects.iter().filter(|(_, before)| before.unknown) {
            survey.objects.entry(*object).or_default();
        }
        for (object, lay) in &survey.objects {
            let newest = match objects.get(object) {
                Some(before) if before.unknown => before.newest,
                None if blind => 0,
                _ => continue,
            };
            let found = State::of(self.info.coding, lay, silent);
            let newest = found.newest.max(newest);
            // What fails to be removed is not built upon.
            let failed = !planted(Bug::LaidOverUnseen);
            objects.insert(*object, State { failed, newest, ..found });
        }
        drop(objects);
        is_known()
    }

    /// The name of a shard of a source, or of a patch.
    pub(super) fn source_name(&self, object: u64, source: &Source, shard: usize) -> String {
        match &source.patch {
            Some(patch) => format!("{}/{}", self.name, patch::name(object, patch)),
            None => self.shard_name(object, source.version, shard, false),
        }
    }

    /// Bytes of each shard of a source, or of a patch.
    pub(super) fn source_bytes(&self, source: &Source) -> usize {
        source.patch.map_or(self.info.shard_bytes(), |patch| patch.bytes())
    }

    /// Bytes before them.
    pub(super) fn head_bytes(&self, source: &Source) -> usize {
        match &source.patch {
            Some(patch) => patch.head_bytes(),
            None => shard::head_bytes(self.info.shard_bytes()),
        }
    }

    pub(super) fn shard_name(
        &self,
        object: u64,
        version: Version,
        number: usize,
        hole: bool,
    ) -> String {
        format!("{}/{}", self.name, shard::name(object, version, number, hole))
    }

    pub(super) fn make_head(
        &self,
        object: u64,
        version: Version,
        number: usize,
        hole: bool,
    ) -> Head {
        let coding = self.info.coding;
        Head {
            pool: self.info.pool,
            image: self.info.id,
            object,
            version,
            shard: number as u16,
            data: coding.data() as u16,
            width: coding.width() as u16,
            bytes: if hole { 0 } else { self.info.shard_bytes() as u32 },
            object_bytes: if hole { 0 } else { self.info.object_bytes },
        }
    }

    fn key(&self, object: u64, source: &Source, shard: usize) -> (u64, Version, usize) {
        let copies = source.patch.is_some() || self.pool.code.is_none();
        (object, source.version, if copies { COPY } else { shard })
    }

    /// Checksums of the blocks of a shard, or a patch, if they are remembered.
    pub(super) fn sums(&self, object: u64, source: &Source, shard: usize) -> Option<Arc<Vec<u32>>> {
        let heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        heads.get(&self.key(object, source, shard)).cloned()
    }

    /// Whether bytes of a shard, or a patch, are what they should be.
    pub(super) fn verify(
        &self,
        object: u64,
        source: &Source,
        part: Part,
        head: &[u8],
        bytes: &[u8],
    ) -> bool {
        let sums = match self.sums(object, source, part.shard) {
            Some(sums) => sums,
            None => {
                let decoded = match &source.patch {
                    Some(patch) => patch::decode(head, self.of(object), patch),
                    None => {
                        shard::decode(head, self.info.shard_bytes()).and_then(|(head, sums)| {
                            let other =
                                head != self.make_head(object, source.version, part.shard, false);
                            let wrong = base::wire::Corrupt::new("shard", "is of something else");
                            if other { Err(wrong) } else { Ok(sums) }
                        })
                    }
                };
                let Ok(sums) = decoded.map(Arc::new) else { return false };
                let mut heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
                if heads.len() >= HEADS_MAX {
                    heads.clear();
                }
                heads.insert(self.key(object, source, part.shard), Arc::clone(&sums));
                sums
            }
        };
        let whole = bytes.len() == part.to - part.from;
        whole && (planted(Bug::ShardUnverified) || shard::agrees(&sums, part.from / BLOCK, bytes))
    }

    /// What patches and shards of an object are of.
    pub(super) fn of(&self, object: u64) -> patch::Of {
        (self.info.pool, self.info.id, object)
    }

    /// What could be done to make an object whole was done.
    fn settle(&self, object: u64) {
        if let Some(state) = self.objects().get_mut(&object) {
            state.uncertain = false;
        }
    }

    /// Reads from one object. `owned`: the caller is about to write it anew.
    pub(super) fn read_object(
        &self,
        object: u64,
        offset: usize,
        buf: &mut [u8],
        owned: bool,
    ) -> Result<(), Errno> {
        for _ in 0..4 {
            let state = self.state(object);
            if state.unknown {
                if self.is_known_by_now(object) {
                    continue;
                }
                return Err(Errno::IO);
            }
            if state.uncertain && self.locks.is_some() && !owned {
                let repaired = self.repair_object(object, None, 0, true);
                self.settle(object);
                repaired?;
                continue;
            }
            let mut sources = Vec::new();
            let parts = self.parts(&state, offset, buf.len(), &mut sources);
            let (line, from) = Line::new(false);
            let mut gather = Gather::new(self, object, sources, line);
            let asked: Vec<Part> = parts.iter().map(|(part, _)| *part).collect();
            match gather.run(&from, &asked) {
                Ok(pieces) => {
                    lay_out(buf, parts.iter().map(|(_, at)| *at).zip(pieces));
                    return Ok(());
                }
                // It was replaced or moved meanwhile.
                Err(_) if self.state(object).is_newer_than(&state) => {}
                Err(_) if gather.moved => self.look_again(object),
                Err(errno) => {
                    let why = if gather.damaged { "damaged" } else { "missing or late" };
                    log::error!("pool: image {}, object {object}: shards {why}", self.name);
                    return Err(errno);
                }
            }
        }
        Err(Errno::IO)
    }

    /// Reads ranges of objects, each with its place in `buf`, several at a time.
    pub(super) fn read_objects(
        &self,
        ranges: Vec<(u64, Range<usize>, usize)>,
        buf: &mut [u8],
    ) -> Result<(), Errno> {
        let mut flight = Flight::new(self, false);
        let several = ranges.len() > 1;
        // Those that it takes more than one look for.
        let mut again = Vec::new();
        let mut ranges = ranges.into_iter();
        loop {
            if flight.len() < AT_A_TIME
                && let Some((object, range, at)) = ranges.next()
            {
                let line = several.then(|| flight.line());
                match line.and_then(|line| self.begin_read(object, range.clone(), at, line)) {
                    Some(reading) => flight.add(reading),
                    None => again.push((object, range, at)),
                }
                continue;
            }
            if flight.len() == 0 {
                break;
            }
            for mut reading in flight.step(Nanos::MAX) {
                let (range, at) = (reading.range.clone(), reading.at);
                match reading.gather.finish() {
                    Ok(pieces) => {
                        lay_out(
                            &mut buf[at..at + range.len()],
                            reading.places.into_iter().zip(pieces),
                        );
                    }
                    Err(_) => again.push((reading.object, range, at)),
                }
            }
        }
        again.into_iter().try_for_each(|(object, range, at)| {
            self.read_object(object, range.start, &mut buf[at..at + range.len()], false)
        })
    }

    /// Asks for a range of an object, if that can be had at one go.
    fn begin_read(
        &self,
        object: u64,
        range: Range<usize>,
        at: usize,
        line: Line,
    ) -> Option<Reading<'_>> {
        let state = self.state(object);
        if state.unknown || state.uncertain && self.locks.is_some() {
            return None;
        }
        let mut sources = Vec::new();
        let parts = self.parts(&state, range.start, range.len(), &mut sources);
        if parts.len() > PARTS {
            return None;
        }
        let (parts, places): (Vec<Part>, Vec<usize>) = parts.into_iter().unzip();
        let mut gather = Gather::new(self, object, sources, line);
        gather.start(&parts);
        Some(Reading { gather, object, range, at, places })
    }

    /// The parts of shards and patches that hold a range of an object, each with its place in that range; what is in none is
    /// zero. `sources` is what the parts are of.
    fn parts(
        &self,
        state: &State,
        offset: usize,
        len: usize,
        sources: &mut Vec<Source>,
    ) -> Vec<(Part, usize)> {
        let mut parts = Vec::new();
        let mut whole = None;
        let mut of_patch = HashMap::new();
        for (range, patch) in state.pieces(offset..offset + len) {
            let at = range.start - offset;
            if let Some(i) = patch {
                let held = &state.patches[i];
                if held.patch.zero {
                    continue;
                }
                let source = *of_patch.entry(i).or_insert_with(|| {
                    sources.push(Source::patch(held));
                    sources.len() - 1
                });
                let from = range.start - held.patch.range().start;
                let shard = self.best(&sources[source].at);
                parts.push((Part { source, shard, from, to: from + range.len() }, at));
                continue;
            }
            let Some(version) = state.version.filter(|_| !state.hole) else { continue };
            let source = *whole.get_or_insert_with(|| {
                sources.push(Source::whole(version, &state.at));
                sources.len() - 1
            });
            if self.pool.code.is_none() {
                let shard = self.best(&state.at);
                parts.push((Part { source, shard, from: range.start, to: range.end }, at));
                continue;
            }
            let chunk = self.info.shard_bytes();
            let mut from = range.start;
            while from < range.end {
                let shard = from / chunk;
                let to = range.end.min((shard + 1) * chunk);
                let part = Part { source, shard, from: from % chunk, to: to - shard * chunk };
                parts.push((part, from - offset));
                from = to;
            }
        }
        parts
    }

    /// Of copies, the one in the store that has least to do.
    fn best(&self, at: &[Option<usize>]) -> usize {
        let store = |copy: &usize| at[*copy].map(|store| &self.pool.stores[store]);
        (0..at.len())
            .filter(|copy| store(copy).is_some_and(|store| !store.is_suspect()))
            .min_by_key(|copy| {
                store(copy).map_or((true, Nanos::MAX), |store| (store.is_late(), store.load()))
            })
            .unwrap_or(0)
    }

    /// The bytes of a patch.
    pub(super) fn read_patch(
        &self,
        object: u64,
        held: &Held,
        behind: bool,
    ) -> Result<Vec<u8>, Errno> {
        if held.patch.zero {
            return Ok(Vec::new());
        }
        let source = Source::patch(held);
        let part =
            Part { source: 0, shard: self.best(&source.at), from: 0, to: held.patch.bytes() };
        let (line, from) = Line::new(behind);
        let mut read = Gather::new(self, object, vec![source], line).run(&from, &[part])?;
        read.pop().ok_or(Errno::IO)
    }

    /// The bytes of one shard, or of one copy of a patch, as its store has them, verified.
    pub(super) fn read_one(
        &self,
        object: u64,
        source: Source,
        shard: usize,
    ) -> Result<Vec<u8>, Errno> {
        // What is in the store now, not what was remembered of it.
        let key = self.key(object, &source, shard);
        self.heads.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        let to = self.source_bytes(&source);
        // Nobody waits for it: it is done for a scrub.
        let (line, from) = Line::new(true);
        let part = Part { source: 0, shard, from: 0, to };
        Gather::new(self, object, vec![source], line).one(&from, part)
    }
}

/// Pieces with their places; what is in none is zero.
fn lay_out(buf: &mut [u8], pieces: impl Iterator<Item = (usize, Vec<u8>)>) {
    buf.fill(0);
    for (at, piece) in pieces {
        buf[at..at + piece.len()].copy_from_slice(&piece);
    }
}

/// A range of an object on its way.
struct Reading<'a> {
    gather: Gather<'a>,
    object: u64,
    range: Range<usize>,
    /// Where it lies in what is read.
    at: usize,
    /// Where the parts lie in it.
    places: Vec<usize>,
}

impl Leg for Reading<'_> {
    fn take(&mut self, answer: Answer) {
        self.gather.take(answer);
    }

    fn advance(&mut self) -> bool {
        self.gather.advance()
    }

    fn until(&self) -> Nanos {
        self.gather.until()
    }
}
