//! An open pool: its stores, its map, and what it knows of images.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::channel;

use base::{Errno, Nanos};
use placement::coding::Code;
use placement::dispatch::Dispatcher;
use serde::{Deserialize, Serialize};

use super::ground::{Access, Ground, Lock, System};
use super::shard::{BLOCK, EPOCHS, SHARD_MAX, epoch_name};
use super::spec::{Coding, Places, Spec};
use super::store::{self, Store, is_name};
use super::survey::Survey;
use super::worker::{Ask, Piece, Told, Worker};

/// After this nobody waits for a store any more.
pub(super) const PATIENCE: Nanos = 10_000_000_000;
/// When enough stores have given what was asked for, the others have this long.
pub(super) const GRACE: Nanos = 200_000_000;
/// Name of what an image says of itself.
const INFO: &str = "info";
const INFO_MAX: usize = 4096;

/// An open pool.
pub struct Pool {
    pub(super) spec: Spec,
    pub(super) places: Places,
    pub(super) code: Option<Arc<Code>>,
    /// Who computes.
    pub(super) dispatcher: Dispatcher,
    pub(super) stores: Vec<Box<dyn Access>>,
    pub(super) ground: Box<dyn Ground>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("spec", &self.spec).finish_non_exhaustive()
    }
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
            match store::open(&store.at)? {
                Ok(store) => stores.push(store),
                Err(error) => {
                    log::warn!("pool: store {}: {error}", store.at);
                    stores.push(Arc::new(Gone));
                }
            }
        }
        Self::over(spec, stores)
    }

    /// The same over stores that are open.
    pub fn over(spec: Spec, stores: Vec<Arc<dyn Store>>) -> Result<Self, String> {
        let names = spec.stores.iter().map(|store| store.at.as_str());
        let start = |(store, name)| {
            Worker::start(name, store).map(|worker| Box::new(worker) as Box<dyn Access>)
        };
        // One that the pool's description has no place for is refused below.
        let named = stores.into_iter().zip(names.chain(std::iter::repeat("?")));
        let started: std::io::Result<Vec<_>> = named.map(start).collect();
        let workers = started.map_err(|error| error.to_string())?;
        Self::on(Box::new(System::default()), spec, workers)
    }

    /// The same on other ground.
    pub fn on(
        ground: Box<dyn Ground>,
        spec: Spec,
        stores: Vec<Box<dyn Access>>,
    ) -> Result<Self, String> {
        spec.check()?;
        if stores.len() != spec.stores.len() {
            return Err(format!("{} stores for {}", stores.len(), spec.stores.len()));
        }
        let (places, code) = (Places::new(&spec)?, spec.code()?.map(Arc::new));
        let dispatcher = Dispatcher::default();
        Ok(Self { spec, places, code, dispatcher, stores, ground })
    }

    /// Who computes for it: accelerators may be added.
    pub fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Its description.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Asks every store the same thing: the answers by store, and who gave none.
    pub(super) fn ask_all(&self, ask: &Ask) -> Vec<Result<Told, Errno>> {
        let (to, from) = channel();
        for (number, worker) in self.stores.iter().enumerate() {
            worker.ask(ask.clone(), number, &to);
        }
        let mut told: Vec<_> = self.stores.iter().map(|_| Err(Errno::TIMEDOUT)).collect();
        let mut left = told.len();
        let end = self.ground.now() + PATIENCE;
        while left > 0 {
            let Some((number, answer)) = self.ground.wait(&from, end) else { break };
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
        let info = Info { pool, id: self.ground.draw(), size, object_bytes, coding };
        info.check()?;
        if self.info(name).is_ok() {
            return Err(format!("image {name} is there already"));
        }
        let text = serde_json::to_vec(&info).map_err(|error| error.to_string())?;
        let put = Ask::Put(format!("{name}/{INFO}"), Piece::default(), text.into());
        let done = self.ask_all(&put).iter().filter(|told| told.is_ok()).count();
        if done < self.spec.coding.quorum() {
            return Err(format!("image {name}: only {done} stores took it"));
        }
        Ok(info)
    }

    /// Tells stores that do not know an image of it. How many there were.
    pub(super) fn spread(&self, name: &str, info: &Info) -> u64 {
        let text = serde_json::to_vec(info).unwrap_or_default();
        let (key, text) = (format!("{name}/{INFO}"), Piece::from(text));
        let (to, from) = channel();
        let mut told = 0;
        let get = Ask::Get(key.clone(), 0, INFO_MAX);
        for (store, has) in self.ask_all(&get).into_iter().enumerate() {
            let same = matches!(&has, Ok(Told::Bytes(bytes)) if **bytes == *text);
            if !same && !matches!(has, Err(Errno::TIMEDOUT | Errno::NODEV)) {
                let put = Ask::Put(key.clone(), Piece::default(), text.clone());
                self.stores[store].ask(put, store, &to);
                told += 1;
            }
        }
        let end = self.ground.now() + PATIENCE;
        for _ in 0..told {
            self.ground.wait(&from, end);
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

    /// Takes the lock of an image in more stores than another could. One that hangs is not waited for when enough others have given
    /// theirs.
    pub(super) fn lock(&self, name: &str) -> Result<Vec<Lock>, Errno> {
        let (to, from) = channel();
        for (number, store) in self.stores.iter().enumerate() {
            store.lock(name, number, &to);
        }
        drop(to);
        let mut locks = Vec::new();
        let mut end = self.ground.now() + PATIENCE;
        let is_enough = |locks: &Vec<Lock>| 2 * locks.len() > self.stores.len();
        while let Some((_, answer)) = self.ground.wait_for_lock(&from, end) {
            match answer {
                Ok(lock) => locks.push(lock),
                Err(Errno::BUSY) => return Err(Errno::BUSY),
                Err(_) => {}
            }
            if is_enough(&locks) {
                end = end.min(self.ground.now() + GRACE);
            }
        }
        if is_enough(&locks) { Ok(locks) } else { Err(Errno::IO) }
    }

    /// The number of the next writer of an image.
    ///
    /// There are so many numbers that nobody uses up half of them. One of the other half that fewer stores name than must have taken it is
    /// no writer's: it is passed over, or one store could bar everybody.
    ///
    /// # Errors
    /// Stores that are silent may name it as well, or there is no number left.
    fn next_epoch(&self, name: &str, survey: &Survey) -> Result<u64, String> {
        let mut stores: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
        for (store, epoch) in &survey.epochs {
            stores.entry(*epoch).or_default().insert(*store);
        }
        let needed = self.spec.coding.copies();
        let mut last = 0;
        for (epoch, stores) in stores.iter().rev() {
            let there = || {
                let at: Vec<&str> =
                    stores.iter().map(|store| self.spec.stores[*store].at.as_str()).collect();
                format!("{name}/{}, which is in {},", epoch_name(*epoch), at.join(", "))
            };
            if *epoch < EPOCHS / 2 || stores.len() >= needed {
                if epoch + 1 >= EPOCHS {
                    return Err(format!(
                        "image {name}: {} is the last number that a writer can have: copy what the image holds (open it to read) to a new one",
                        there()
                    ));
                }
                last = *epoch;
                break;
            }
            if stores.len() + survey.silent.len() >= needed {
                return Err(format!(
                    "image {name}: {} is of no writer, unless stores that are silent have it too: bring those back, or remove it",
                    there()
                ));
            }
            log::warn!("pool: image {name}: {} is of no writer, and passed over", there());
        }
        Ok(last + 1)
    }

    /// Says in enough stores that a writer of an image has begun, so that the next one hears of it whoever is silent then: its number,
    /// which is greater than those of all before it.
    ///
    /// # Errors
    /// Too few stores have taken it.
    pub(super) fn begin_epoch(&self, name: &str, survey: &Survey) -> Result<u64, String> {
        let epoch = self.next_epoch(name, survey)?;
        let (to, from) = channel();
        let mut left = 0;
        for (store, _) in self.spec.stores.iter().enumerate().filter(|(_, spec)| !spec.out) {
            let put = Ask::Put(
                format!("{name}/{}", epoch_name(epoch)),
                Piece::default(),
                Piece::default(),
            );
            self.stores[store].ask(put, store, &to);
            left += 1;
        }
        let (mut done, needed) = (0, self.spec.coding.copies());
        let end = self.ground.now() + PATIENCE;
        while done < needed && left > 0 {
            let Some((_, told)) = self.ground.wait(&from, end) else { break };
            left -= 1;
            done += usize::from(told.is_ok());
        }
        if done < needed {
            return Err(format!("image {name}: only {done} stores can be written"));
        }
        for (store, old) in survey.epochs.iter().filter(|(_, old)| *old != epoch) {
            let gone = Ask::Remove(vec![format!("{name}/{}", epoch_name(*old))]);
            self.stores[*store].ask(gone, *store, &to);
        }
        Ok(epoch)
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
                survey.add(self.spec.coding, store, &name);
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

    fn lock(&self, _: &str) -> Result<Lock, Errno> {
        Err(Errno::NODEV)
    }
}
