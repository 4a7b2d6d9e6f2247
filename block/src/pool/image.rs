//! An open pool, and its images as disks.
//!
//! Who opens an image to write has its lock, knows the version of every object and where its shards are, and
//! keeps that in step with what it writes. A read goes to the shards that hold the bytes; where one is lost, wrong, or
//! late, to one more of the others than it takes, and the first that answer decide.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use base::planted::{Bug, planted};
use placement::coding::Code;
use serde::{Deserialize, Serialize};

use super::dir::Dir;
use super::shard::{self, BLOCK, Head, SHARD_MAX, Version};
use super::spec::{Coding, Places, Spec};
use super::store::{Store, is_name};
use super::worker::{Answer, Ask, Told, Worker};
use crate::device::{Disk, Extent, Prompt, Traits, push_extent};

/// After this nobody waits for a store any more.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Stores that have not taken a shard this long after enough others have are left behind.
const GRACE: Duration = Duration::from_millis(200);
/// Heads of shards that are remembered.
const HEADS_MAX: usize = 8192;
/// Name of what an image says of itself.
const INFO: &str = "info";
const INFO_MAX: usize = 4096;

/// An open pool.
#[derive(Debug)]
pub struct Pool {
    pub(super) spec: Spec,
    pub(super) places: Places,
    pub(super) code: Option<Code>,
    pub(super) workers: Vec<Worker>,
}

/// What an image says of itself, in each store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Info {
    /// The pool.
    pub pool: u64,
    /// The image, among all.
    pub id: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// How objects are coded.
    pub coding: Coding,
}

impl Info {
    fn check(&self) -> Result<(), String> {
        let (object, block) = (self.object_bytes as usize, BLOCK);
        if object < block || object > SHARD_MAX || !object.is_multiple_of(block) {
            return Err(format!("objects of {object} bytes: from 4 KiB to 64 MiB, whole blocks"));
        }
        if self.size == 0 || self.size > 1 << 60 || !self.size.is_multiple_of(block as u64) {
            return Err(format!("{} bytes: an image is of whole blocks of 4 KiB", self.size));
        }
        Ok(())
    }

    /// Bytes of each shard.
    pub fn shard_bytes(&self) -> usize {
        (self.object_bytes as usize).div_ceil(self.coding.data()).next_multiple_of(BLOCK)
    }

    /// Objects.
    pub fn objects(&self) -> u64 {
        self.size.div_ceil(self.object_bytes.into())
    }
}

impl Pool {
    /// Opens the stores of a pool. One that cannot be opened now is one that fails.
    pub fn open(spec: Spec) -> Result<Self, String> {
        let mut stores: Vec<Arc<dyn Store>> = Vec::new();
        for store in &spec.stores {
            let path = store.at.strip_prefix("dir:").ok_or_else(|| {
                format!("store {:?} is of no known kind: write dir:PATH", store.at)
            })?;
            match Dir::open(path.as_ref()) {
                Ok(dir) => stores.push(Arc::new(dir)),
                Err(error) => {
                    log::warn!("pool: store {path}: {error}");
                    stores.push(Arc::new(Gone));
                }
            }
        }
        Self::over(spec, stores)
    }

    /// The same over stores that are open.
    pub fn over(spec: Spec, stores: Vec<Arc<dyn Store>>) -> Result<Self, String> {
        spec.check()?;
        let started: std::io::Result<Vec<Worker>> = stores.into_iter().map(Worker::start).collect();
        let workers = started.map_err(|error| error.to_string())?;
        let (places, code) = (Places::new(&spec)?, spec.code()?);
        Ok(Self { spec, places, code, workers })
    }

    /// Its description.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Asks every store the same thing: the answers by store, and who gave none.
    pub(super) fn ask_all(&self, ask: &Ask) -> Vec<Result<Told, Errno>> {
        let (to, from) = channel();
        for (number, worker) in self.workers.iter().enumerate() {
            worker.ask(ask.clone(), number, &to);
        }
        let mut told = vec![Err(Errno::TIMEDOUT); self.workers.len()];
        let mut left = told.len();
        let end = Instant::now() + PATIENCE;
        while left > 0 {
            let wait = end.saturating_duration_since(Instant::now());
            let Ok((number, answer)) = from.recv_timeout(wait) else { break };
            told[number] = answer;
            left -= 1;
        }
        told
    }

    /// Makes an image of zeroes.
    pub fn create(&self, name: &str, size: u64, object_bytes: u32) -> Result<Info, String> {
        if !is_name(name) {
            return Err(format!("image {name:?}: a name has letters, digits, dots and dashes"));
        }
        let (pool, coding) = (self.spec.id, self.spec.coding);
        let info = Info { pool, id: shard::draw(), size, object_bytes, coding };
        info.check()?;
        if self.info(name).is_ok() {
            return Err(format!("image {name} is there already"));
        }
        let text = serde_json::to_vec(&info).map_err(|error| error.to_string())?;
        let put = Ask::Put(format!("{name}/{INFO}"), Arc::default(), Arc::new(text));
        let done = self.ask_all(&put).iter().filter(|told| told.is_ok()).count();
        if done < self.spec.coding.quorum() {
            return Err(format!("image {name}: only {done} stores took it"));
        }
        Ok(info)
    }

    /// Tells stores that do not know an image of it. How many there were.
    pub(super) fn spread(&self, name: &str, info: &Info) -> u64 {
        let text = serde_json::to_vec(info).unwrap_or_default();
        let (key, text) = (format!("{name}/{INFO}"), Arc::new(text));
        let (to, from) = channel();
        let mut told = 0;
        let get = Ask::Get(key.clone(), 0, INFO_MAX);
        for (store, has) in self.ask_all(&get).into_iter().enumerate() {
            let same = matches!(&has, Ok(Told::Bytes(bytes)) if *bytes == *text);
            if !same && !matches!(has, Err(Errno::TIMEDOUT | Errno::NODEV)) {
                let put = Ask::Put(key.clone(), Arc::default(), Arc::clone(&text));
                self.workers[store].ask(put, store, &to);
                told += 1;
            }
        }
        for _ in 0..told {
            let _ = from.recv_timeout(PATIENCE);
        }
        told
    }

    /// What an image says of itself.
    pub fn info(&self, name: &str) -> Result<Info, String> {
        if !is_name(name) {
            return Err(format!("image {name:?}: a name has letters, digits, dots and dashes"));
        }
        let told = self.ask_all(&Ask::Get(format!("{name}/{INFO}"), 0, INFO_MAX));
        let mut votes: Vec<(Info, usize)> = Vec::new();
        for told in told.into_iter().flatten() {
            let Told::Bytes(bytes) = told else { continue };
            let Ok(info) = serde_json::from_slice::<Info>(&bytes) else { continue };
            if info.pool != self.spec.id || info.coding != self.spec.coding || info.check().is_err()
            {
                continue;
            }
            match votes.iter_mut().find(|(other, _)| *other == info) {
                Some((_, count)) => *count += 1,
                None => votes.push((info, 1)),
            }
        }
        let best = votes.into_iter().max_by_key(|(_, count)| *count);
        best.map(|(info, _)| info).ok_or_else(|| format!("image {name}: no store knows it"))
    }

    /// Takes the lock of an image in more stores than another could.
    pub(super) fn lock(&self, name: &str) -> Result<Vec<Box<dyn Send + Sync>>, Errno> {
        let mut locks = Vec::new();
        for worker in &self.workers {
            match worker.store().lock(name) {
                Ok(lock) => locks.push(lock),
                Err(Errno::BUSY) => return Err(Errno::BUSY),
                Err(_) => {}
            }
        }
        if 2 * locks.len() > self.workers.len() { Ok(locks) } else { Err(Errno::IO) }
    }

    /// What lies where.
    pub(super) fn survey(&self, name: &str) -> Survey {
        let mut survey = Survey::default();
        for (store, told) in self.ask_all(&Ask::List(name.to_owned())).into_iter().enumerate() {
            let Ok(Told::Names(names)) = told else {
                survey.silent.push(store);
                continue;
            };
            for name in names {
                let Some((object, version, number, hole)) = shard::parse(&name) else { continue };
                if number >= self.spec.coding.width() {
                    continue;
                }
                let found = survey.objects.entry(object).or_default().entry(version);
                let found = found.or_insert_with(|| Found { hole, at: BTreeMap::new() });
                found.at.entry(number).or_default().push(store);
            }
        }
        survey
    }
}

/// A store that is not there.
struct Gone;

impl Store for Gone {
    fn put(&self, _: &str, _: &[&[u8]]) -> Result<(), Errno> {
        Err(Errno::NODEV)
    }

    fn get(&self, _: &str, _: u64, _: usize) -> Result<Vec<u8>, Errno> {
        Err(Errno::NODEV)
    }

    fn list(&self, _: &str) -> Result<Vec<String>, Errno> {
        Err(Errno::NODEV)
    }

    fn remove(&self, _: &str) -> Result<(), Errno> {
        Err(Errno::NODEV)
    }

    fn lock(&self, _: &str) -> Result<Box<dyn Send + Sync>, Errno> {
        Err(Errno::NODEV)
    }
}

/// What was found of a version of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// The object is nothing but zeroes.
    pub hole: bool,
    /// Stores of each shard.
    pub at: BTreeMap<usize, Vec<usize>>,
}

/// What lies where, of one image.
#[derive(Clone, Debug, Default)]
pub(super) struct Survey {
    pub objects: BTreeMap<u64, BTreeMap<Version, Found>>,
    /// Stores that did not answer.
    pub silent: Vec<usize>,
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

/// What is known of an object.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// `None`: never written.
    pub version: Option<Version>,
    pub hole: bool,
    pub unknown: bool,
    /// Fewer shards are there than a write is answered for: it is made whole before it is shown, or another look might not
    /// find it.
    pub uncertain: bool,
    /// Store of each shard, where one has it.
    pub at: Vec<Option<usize>>,
    /// Number of the newest version that anybody began.
    pub newest: u64,
}

impl State {
    pub fn of(coding: Coding, versions: &BTreeMap<Version, Found>, silent: usize) -> Self {
        let newest = versions.last_key_value().map_or(0, |(version, _)| version.number);
        let mut state = Self { newest, at: vec![None; coding.width()], ..Self::default() };
        match judge(coding, versions, silent) {
            Current::Never => {}
            Current::Unknown => state.unknown = true,
            Current::Is(version) => {
                state.version = Some(version);
                if let Some(found) = versions.get(&version) {
                    state.hole = found.hole;
                    state.uncertain = silent == 0 && found.at.len() < coding.quorum();
                    for (shard, stores) in &found.at {
                        state.at[*shard] = stores.first().copied();
                    }
                }
            }
        }
        state
    }
}

/// Checksums of blocks, by object, version and shard.
type Heads = HashMap<(u64, Version, usize), Arc<Vec<u32>>>;

/// An image of a pool.
pub struct Image {
    pub(super) pool: Arc<Pool>,
    pub(super) name: String,
    pub(super) info: Info,
    objects: Mutex<HashMap<u64, State>>,
    /// Objects that are being written.
    busy: Mutex<HashSet<u64>>,
    idle: Condvar,
    heads: Mutex<Heads>,
    /// Held as long as this is open to write.
    locks: Option<Vec<Box<dyn Send + Sync>>>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A part of one shard's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    shard: usize,
    from: usize,
    to: usize,
}

/// Parts of shards on their way, and those that have come.
struct Gather<'a> {
    image: &'a Image,
    object: u64,
    version: Version,
    at: &'a [Option<usize>],
    to: Sender<Answer>,
    from: Receiver<Answer>,
    asked: Vec<Option<Part>>,
    have: Vec<(Part, Vec<u8>)>,
    lost: HashSet<usize>,
    /// Some store said that there is no such shard: it may have been moved, or replaced.
    moved: bool,
    /// Some shard was not what it should be.
    damaged: bool,
}

impl<'a> Gather<'a> {
    fn new(image: &'a Image, object: u64, version: Version, at: &'a [Option<usize>]) -> Self {
        let (to, from) = channel();
        Self {
            image,
            object,
            version,
            at,
            to,
            from,
            asked: Vec::new(),
            have: Vec::new(),
            lost: HashSet::new(),
            moved: false,
            damaged: false,
        }
    }

    fn worker(&self, shard: usize) -> Option<&'a Worker> {
        self.at[shard].map(|store| &self.image.pool.workers[store])
    }

    /// Asks for whole blocks around a part.
    fn ask(&mut self, part: Part) {
        let Some(worker) = self.worker(part.shard) else { return };
        let info = &self.image.info;
        let from = part.from / BLOCK * BLOCK;
        let to = part.to.next_multiple_of(BLOCK).min(info.shard_bytes());
        let part = Part { from, to, ..part };
        let known = self.image.head(self.object, self.version, part.shard).is_some();
        let name = self.image.shard_name(self.object, self.version, part.shard, false);
        let head = shard::head_bytes(info.shard_bytes());
        let ask = Ask::Shard { name, head, known, from, len: to - from };
        worker.ask(ask, self.asked.len(), &self.to);
        self.asked.push(Some(part));
    }

    fn is_asked(&self, part: Part) -> bool {
        let covers = |asked: &Part| {
            asked.shard == part.shard && asked.from <= part.from && part.to <= asked.to
        };
        self.asked.iter().flatten().any(covers)
    }

    fn has(&self, part: Part) -> Option<&[u8]> {
        let covers = |(have, _): &&(Part, Vec<u8>)| {
            have.shard == part.shard && have.from <= part.from && part.to <= have.to
        };
        let (have, bytes) = self.have.iter().find(covers)?;
        Some(&bytes[part.from - have.from..part.to - have.from])
    }

    /// Takes an answer in.
    fn take(&mut self, (number, told): Answer) {
        let Some(part) = self.asked.get_mut(number).and_then(Option::take) else { return };
        match told {
            Ok(Told::Shard(head, bytes)) => {
                match self.image.verify(self.object, self.version, part, &head, &bytes) {
                    true => self.have.push((part, bytes)),
                    false => {
                        self.damaged = true;
                        self.lost.insert(part.shard);
                    }
                }
            }
            Err(Errno::NOENT) => {
                self.moved = true;
                self.lost.insert(part.shard);
            }
            _ => {
                self.lost.insert(part.shard);
            }
        }
    }

    fn outstanding(&self) -> usize {
        self.asked.iter().flatten().count()
    }

    /// Asks for more, so that `part` can be had from others: from one more of them than it takes, those first that answer
    /// fast. Whether anything was asked for.
    #[allow(clippy::explicit_counter_loop)] // it counts what is asked for, not turns
    fn ask_others(&mut self, part: Part) -> bool {
        let coding = self.image.info.coding;
        let same = |shard| Part { shard, ..part };
        let others = || (0..coding.width()).filter(|shard| *shard != part.shard);
        let mut count =
            others().filter(|s| self.has(same(*s)).is_some() || self.is_asked(same(*s))).count();
        let mut rest: Vec<(bool, u64, usize)> = others()
            .filter(|s| !self.lost.contains(s))
            .filter(|s| self.has(same(*s)).is_none() && !self.is_asked(same(*s)))
            .filter_map(|s| self.worker(s).map(|w| (w.is_suspect(), w.load(), s)))
            .collect();
        rest.sort_unstable();
        let wanted = coding.data() + 1;
        let mut any = false;
        for (suspect, _, shard) in rest {
            // A suspect is asked only if it takes one.
            let enough = if suspect { coding.data() } else { wanted };
            if count >= enough {
                break;
            }
            self.ask(same(shard));
            any = true;
            count += 1;
        }
        any
    }

    /// The bytes of a part, if what has come suffices.
    fn solve(&self, part: Part) -> Option<Vec<u8>> {
        if let Some(bytes) = self.has(part) {
            return Some(bytes.to_vec());
        }
        let same = |shard| Part { shard, ..part };
        let coding = self.image.info.coding;
        let Some(code) = &self.image.pool.code else {
            return (0..coding.width()).find_map(|s| self.has(same(s)).map(<[u8]>::to_vec));
        };
        let there: Vec<usize> =
            (0..coding.width()).filter(|s| self.has(same(*s)).is_some()).collect();
        if there.len() < coding.data() {
            return None;
        }
        let lost: Vec<usize> = (0..coding.width()).filter(|s| !there.contains(s)).collect();
        let plan = code.plan_for(&lost, &[part.shard]).ok()?;
        let sources: Option<Vec<&[u8]>> =
            plan.sources().iter().map(|shard| self.has(same(*shard))).collect();
        let mut bytes = vec![0; part.to - part.from];
        plan.rebuild(&sources?, &mut [&mut bytes]).ok()?;
        Some(bytes)
    }

    /// Gets all parts.
    fn run(&mut self, parts: &[Part]) -> Result<Vec<Vec<u8>>, Errno> {
        let end = Instant::now() + PATIENCE;
        let mut hedge = Duration::from_millis(1);
        let mut asked_others = vec![false; parts.len()];
        for part in parts {
            match self.worker(part.shard) {
                Some(worker) if !worker.is_suspect() => {
                    let usual = Duration::from_nanos(4 * worker.load());
                    hedge = hedge.max(usual.min(Duration::from_millis(50)));
                    self.ask(*part);
                }
                _ => {}
            }
        }
        let mut late = Instant::now() + hedge;
        let mut done: Vec<Option<Vec<u8>>> = vec![None; parts.len()];
        loop {
            for (i, part) in parts.iter().enumerate() {
                if done[i].is_none() {
                    done[i] = self.solve(*part);
                }
                if done[i].is_some() {
                    continue;
                }
                // Not to be had directly, or not in time: from others. And again when some of those are lost.
                let direct = self.is_asked(*part);
                let overdue = Instant::now() >= late;
                if !direct || overdue || asked_others[i] {
                    self.ask_others(*part);
                    asked_others[i] = true;
                }
            }
            if done.iter().all(Option::is_some) {
                return Ok(done.into_iter().flatten().collect());
            }
            let now = Instant::now();
            if now >= late {
                // Whom nobody heard in time, others stand in for; then for those again.
                late = now + hedge;
            }
            if self.outstanding() == 0 || now >= end {
                return Err(if now >= end { Errno::TIMEDOUT } else { Errno::IO });
            }
            match self.from.recv_timeout(late.min(end).saturating_duration_since(now)) {
                Ok(answer) => self.take(answer),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
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
        let survey = pool.survey(name);
        let silent = survey.silent.len();
        if silent >= pool.spec.coding.quorum() {
            return Err(format!(
                "image {name}: {silent} stores are silent, and may know what the others do not"
            ));
        }
        let image = Self {
            pool,
            name: name.to_owned(),
            info,
            objects: Mutex::default(),
            busy: Mutex::default(),
            idle: Condvar::new(),
            heads: Mutex::default(),
            locks,
        };
        for (object, versions) in &survey.objects {
            image.learn(*object, versions, silent);
        }
        if image.locks.is_some() {
            // What was being written when somebody crashed: made whole, or away.
            for (object, versions) in &survey.objects {
                if versions.len() > 1 && *object < info.objects() {
                    let repaired = image.repair_object(*object, Some(versions), silent, true);
                    if let Err(errno) = repaired {
                        log::warn!("pool: image {name}, object {object}: {errno}");
                    }
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

    pub(super) fn state(&self, object: u64) -> State {
        self.objects().get(&object).cloned().unwrap_or_else(|| State {
            at: vec![None; self.info.coding.width()],
            ..State::default()
        })
    }

    pub(super) fn set_state(&self, object: u64, state: State) {
        self.objects().insert(object, state);
    }

    fn learn(&self, object: u64, versions: &BTreeMap<Version, Found>, silent: usize) {
        let state = State::of(self.info.coding, versions, silent);
        self.set_state(object, state);
    }

    /// Where the shards of an object are, asked anew: somebody repairs while this is open.
    fn look_again(&self, object: u64) {
        let mut survey = self.pool.survey(&self.name);
        let versions = survey.objects.remove(&object).unwrap_or_default();
        self.learn(object, &versions, survey.silent.len());
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

    fn head(&self, object: u64, version: Version, number: usize) -> Option<Arc<Vec<u32>>> {
        let heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        heads.get(&(object, version, number)).cloned()
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

    /// Whether bytes of a shard are what they should be.
    fn verify(&self, object: u64, version: Version, part: Part, head: &[u8], bytes: &[u8]) -> bool {
        let key = (object, version, part.shard);
        let sums = match self.head(object, version, part.shard) {
            Some(sums) => sums,
            None => {
                let Ok((head, sums)) = shard::decode(head, self.info.shard_bytes()) else {
                    return false;
                };
                if head != self.make_head(object, version, part.shard, false) {
                    return false;
                }
                let sums = Arc::new(sums);
                let mut heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
                if heads.len() >= HEADS_MAX {
                    heads.clear();
                }
                heads.insert(key, Arc::clone(&sums));
                sums
            }
        };
        let whole = bytes.len() == part.to - part.from;
        whole && (planted(Bug::ShardUnverified) || shard::agrees(&sums, part.from / BLOCK, bytes))
    }

    /// What could be done to make an object whole was done.
    fn settle(&self, object: u64) {
        if let Some(state) = self.objects().get_mut(&object) {
            state.uncertain = false;
        }
    }

    /// Reads from one object. `owned`: the caller is about to write it anew.
    fn read_object(
        &self,
        object: u64,
        offset: usize,
        buf: &mut [u8],
        owned: bool,
    ) -> Result<(), Errno> {
        for _ in 0..4 {
            let state = self.state(object);
            if state.unknown {
                return Err(Errno::IO);
            }
            if state.uncertain && self.locks.is_some() && !owned {
                let repaired = self.repair_object(object, None, 0, true);
                self.settle(object);
                repaired?;
                continue;
            }
            let Some(version) = state.version.filter(|_| !state.hole) else {
                buf.fill(0);
                return Ok(());
            };
            let parts = self.parts(&state, offset, buf.len());
            let mut gather = Gather::new(self, object, version, &state.at);
            match gather.run(&parts) {
                Ok(pieces) => {
                    let mut at = 0;
                    for piece in pieces {
                        buf[at..at + piece.len()].copy_from_slice(&piece);
                        at += piece.len();
                    }
                    return Ok(());
                }
                // It was replaced or moved meanwhile.
                Err(_) if self.state(object).version != Some(version) => {}
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

    /// The parts of shards that hold a range of an object.
    fn parts(&self, state: &State, offset: usize, len: usize) -> Vec<Part> {
        let chunk = self.info.shard_bytes();
        if self.pool.code.is_none() {
            // Any copy: from the store that has least to do.
            let worker = |shard: &usize| state.at[*shard].map(|s| &self.pool.workers[s]);
            let load = |shard: &usize| worker(shard).map_or(u64::MAX, Worker::load);
            let shard = (0..state.at.len())
                .filter(|shard| worker(shard).is_some_and(|w| !w.is_suspect()))
                .min_by_key(load)
                .unwrap_or(0);
            return vec![Part { shard, from: offset, to: offset + len }];
        }
        let (mut at, end) = (offset, offset + len);
        let mut parts = Vec::new();
        while at < end {
            let shard = at / chunk;
            let to = end.min((shard + 1) * chunk);
            parts.push(Part { shard, from: at % chunk, to: to - shard * chunk });
            at = to;
        }
        parts
    }

    /// The whole bytes of shards, those that are lost from others; for repairs.
    pub(super) fn read_shards(
        &self,
        object: u64,
        state: &State,
        shards: &[usize],
    ) -> Result<Vec<Vec<u8>>, Errno> {
        let Some(version) = state.version else { return Err(Errno::NOENT) };
        let to = self.info.shard_bytes();
        let parts: Vec<Part> =
            shards.iter().map(|shard| Part { shard: *shard, from: 0, to }).collect();
        Gather::new(self, object, version, &state.at).run(&parts)
    }

    /// The bytes of one shard as its store has them, verified.
    pub(super) fn read_one(
        &self,
        object: u64,
        version: Version,
        number: usize,
        store: usize,
    ) -> Result<Vec<u8>, Errno> {
        let mut at = vec![None; self.info.coding.width()];
        at[number] = Some(store);
        // What is in the store now, not what was remembered of it.
        self.heads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&(object, version, number));
        let mut gather = Gather::new(self, object, version, &at);
        let part = Part { shard: number, from: 0, to: self.info.shard_bytes() };
        gather.ask(part);
        match gather.from.recv_timeout(PATIENCE) {
            Ok(answer) => gather.take(answer),
            Err(_) => return Err(Errno::TIMEDOUT),
        }
        match gather.has(part) {
            Some(bytes) => Ok(bytes.to_vec()),
            None if gather.damaged => Err(Errno::IO),
            None => Err(Errno::NOENT),
        }
    }

    /// Nobody else writes the object until the result is dropped.
    pub(super) fn own(&self, object: u64) -> Owned<'_> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while !busy.insert(object) {
            busy = self.idle.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        Owned { image: self, object }
    }

    /// Shards of an object, in order.
    fn encode(&self, mut bytes: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>, Errno> {
        let (coding, chunk) = (self.info.coding, self.info.shard_bytes());
        let Some(code) = &self.pool.code else {
            bytes.resize(chunk, 0);
            // One buffer for all of them.
            let bytes = Arc::new(bytes);
            return Ok((0..coding.width()).map(|_| Arc::clone(&bytes)).collect());
        };
        bytes.resize(chunk * coding.data(), 0);
        let mut parity = vec![vec![0; chunk]; coding.width() - coding.data()];
        {
            let data: Vec<&[u8]> = bytes.chunks(chunk).collect();
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            code.encode(&data, &mut outputs).map_err(|_| Errno::IO)?;
        }
        Ok(bytes.chunks(chunk).map(<[u8]>::to_vec).chain(parity).map(Arc::new).collect())
    }

    /// Writes an object as a new version; `None`: zeroes. The caller owns it.
    fn write_object(&self, object: u64, bytes: Option<Vec<u8>>) -> Result<(), Errno> {
        let coding = self.info.coding;
        let before = self.state(object);
        let hole = bytes.is_none();
        let version = Version { number: before.newest + 1, drawn: shard::draw() as u32 };
        let shards = match bytes {
            Some(bytes) => self.encode(bytes)?,
            None => vec![Arc::default(); coding.width()],
        };
        let stores = self.pool.places.of(self.info.id, object);
        let (to, from) = channel();
        for (number, bytes) in shards.iter().enumerate() {
            let head = self.make_head(object, version, number, hole);
            let head = Arc::new(shard::encode(&head, bytes));
            let name = self.shard_name(object, version, number, hole);
            let ask = Ask::Put(name, head, Arc::clone(bytes));
            self.pool.workers[stores[number]].ask(ask, number, &to);
        }
        let mut at = vec![None; coding.width()];
        let (mut done, mut left) = (0, coding.width());
        let mut end = Instant::now() + PATIENCE;
        let quorum = if planted(Bug::WriteWithoutQuorum) { 1 } else { coding.quorum() };
        while left > 0 {
            let wait = end.saturating_duration_since(Instant::now());
            let Ok((number, told)) = from.recv_timeout(wait) else { break };
            left -= 1;
            if told.is_ok() {
                at[number] = Some(stores[number]);
                done += 1;
                if done == quorum {
                    end = end.min(Instant::now() + GRACE);
                }
            }
        }
        if done < quorum {
            // It was never there.
            for (number, store) in at.iter().enumerate() {
                if let Some(store) = store {
                    self.forget(*store, object, version, number, hole);
                }
            }
            self.set_state(object, State { newest: version.number, ..before });
            return Err(Errno::IO);
        }
        let state =
            State { version: Some(version), hole, at, newest: version.number, ..State::default() };
        self.set_state(object, state);
        if let Some(old) = before.version {
            for (number, store) in before.at.iter().enumerate() {
                if let Some(store) = store {
                    self.forget(*store, object, old, number, before.hole);
                }
            }
        }
        Ok(())
    }

    /// Removes a shard, whenever the store comes to it.
    pub(super) fn forget(
        &self,
        store: usize,
        object: u64,
        version: Version,
        number: usize,
        hole: bool,
    ) {
        let (to, _) = channel();
        let ask = Ask::Remove(self.shard_name(object, version, number, hole));
        self.pool.workers[store].ask(ask, 0, &to);
    }

    /// Calls `each` with an object, the range within it, and where that lies in the whole.
    fn each(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, std::ops::Range<usize>, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let size = u64::from(self.info.object_bytes);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let object = at / size;
            let from = at % size;
            let n = (size - from).min(end - at);
            each(object, from as usize..(from + n) as usize, (at - offset) as usize)?;
            at += n;
        }
        Ok(())
    }

    /// Changes a range of an object: reads it, unless all of it is replaced, and writes it anew.
    fn change(
        &self,
        object: u64,
        range: std::ops::Range<usize>,
        data: Option<&[u8]>,
    ) -> Result<(), Errno> {
        let owned = self.own(object);
        let state = self.state(object);
        let whole = range.len() == self.info.object_bytes as usize;
        if data.is_none() && (whole || state.hole || state.version.is_none()) && !state.unknown {
            let empty = state.hole || state.version.is_none();
            return if empty { Ok(()) } else { self.write_object(object, None) };
        }
        let mut bytes = vec![0; self.info.object_bytes as usize];
        if !whole {
            self.read_object(object, 0, &mut bytes, true)?;
        }
        match data {
            Some(data) => bytes[range].copy_from_slice(data),
            None => bytes[range].fill(0),
        }
        let written = self.write_object(object, Some(bytes));
        drop(owned);
        written
    }
}

/// See [`Image::own`].
pub(super) struct Owned<'a> {
    image: &'a Image,
    object: u64,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        self.image.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.object);
        self.image.idle.notify_all();
    }
}

impl Disk for Image {
    fn traits(&self) -> Traits {
        Traits {
            block_min: 512,
            block_preferred: 64 << 10,
            read_only: self.locks.is_none(),
            fast_zero: false,
        }
    }

    fn size(&self) -> u64 {
        self.info.size
    }

    fn prompt(&self) -> Prompt {
        Prompt::Never
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let len = buf.len() as u64;
        self.each(offset, len, |object, range, at| {
            self.read_object(object, range.start, &mut buf[at..at + range.len()], false)
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, data.len() as u64, |object, range, at| {
            let len = range.len();
            self.change(object, range, Some(&data[at..at + len]))
        })
    }

    /// A write is answered when its version is durable.
    fn flush(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, len, |object, range, _| {
            // To write a part of an object anew would cost space rather than give it back.
            if range.len() < self.info.object_bytes as usize {
                return Ok(());
            }
            self.change(object, range, None)
        })
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        if no_hole {
            return Err(Errno::OPNOTSUPP);
        }
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, len, |object, range, _| self.change(object, range, None))
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        let mut extents = Vec::new();
        let mut room = true;
        self.each(offset, len, |object, range, _| {
            if room {
                let state = self.state(object);
                let hole = (state.hole || state.version.is_none()) && !state.unknown;
                let len = range.len() as u64;
                room = push_extent(&mut extents, Extent { len, hole, zero: hole });
            }
            Ok(())
        })?;
        Ok(extents)
    }
}
