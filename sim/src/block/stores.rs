//! Stores, time and chance of one history.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::random::Random;
use base::{Errno, Nanos};
use block::pool::ground::{Access, Ground, Hold, Lock, LockAnswer, Removals, made};
use block::pool::store::Store;
use block::pool::turns::{self, Turns};
use block::pool::worker::{Answer, Ask, SUSPECT};
use placement::dispatch::{Dispatcher, Work};

/// How long a store is said to take.
const USUAL: Nanos = 200_000;

/// How a store behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Well,
    /// Everything ends with an error, and nothing is done.
    Fails,
    /// Nothing is answered until it is well again.
    Hangs,
    /// Some of what it gives is other than what it has.
    Lies,
    /// It says that it has kept what it has not.
    Forgets,
    /// It keeps and removes, and says that it has not.
    Denies,
}

impl Mode {
    pub const BAD: [Self; 5] = [Self::Fails, Self::Hangs, Self::Lies, Self::Forgets, Self::Denies];

    pub fn name(self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::Fails => "stores that fail",
            Self::Hangs => "stores that hang",
            Self::Lies => "stores that lie",
            Self::Forgets => "stores that forget",
            Self::Denies => "stores that deny",
        }
    }
}

/// What a store holds.
struct Shelf(Mutex<(BTreeMap<String, Vec<u8>>, Mode, Random)>);

impl Shelf {
    fn inner(&self) -> MutexGuard<'_, (BTreeMap<String, Vec<u8>>, Mode, Random)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Shelf {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        let (names, mode, _) = &mut *self.inner();
        if *mode != Mode::Forgets {
            names.insert(name.to_owned(), parts.concat());
        }
        if *mode == Mode::Denies { Err(Errno::IO) } else { Ok(()) }
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let (names, mode, random) = &mut *self.inner();
        let bytes = names.get(name).ok_or(Errno::NOENT)?;
        let from = (offset as usize).min(bytes.len());
        let mut bytes = bytes[from..bytes.len().min(from.saturating_add(len))].to_vec();
        // What an image says of itself has no checksum: most of the stores say the same.
        if *mode == Mode::Lies
            && !bytes.is_empty()
            && !name.ends_with("info")
            && random.chance(1, 2)
        {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        Ok(bytes)
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let of = |name: &String| Some(name.strip_prefix(image)?.strip_prefix('/')?.to_owned());
        Ok(self.inner().0.keys().filter_map(of).collect())
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        let (names, mode, _) = &mut *self.inner();
        names.remove(name);
        if *mode == Mode::Denies { Err(Errno::IO) } else { Ok(()) }
    }

    fn lock(&self, _: &str) -> Result<Lock, Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

struct Pending {
    id: u64,
    store: usize,
    ask: Ask,
    number: usize,
    to: Sender<Answer>,
    /// It has one of those that ask the store, as one that nobody waits for.
    behind: bool,
}

/// What comes to its end at some time.
enum Due {
    Asked(Pending),
    /// A task has ended.
    Made(Sender<Answer>, Answer),
}

#[derive(Default)]
struct Hall {
    now: Nanos,
    next: u64,
    /// By when it is carried out.
    pending: BTreeMap<(Nanos, u64), Due>,
    /// What each store has not come to.
    turns: Vec<Turns<Pending>>,
    /// Of stores that hang.
    held: Vec<VecDeque<Pending>>,
    /// When what each store is at was begun.
    begun: Vec<BTreeMap<u64, Nanos>>,
    /// When each answered last.
    answered: Vec<Nanos>,
    locked: Vec<bool>,
    removals: Vec<Removals>,
    /// Answers until the process is killed.
    kill_after: Option<u64>,
    dead: bool,
    hash: u64,
}

/// The stores and what they stand on.
pub struct Stage {
    shelves: Vec<Shelf>,
    hall: Mutex<Hall>,
    random: Mutex<Random>,
}

fn fold(hash: u64, value: u64) -> u64 {
    (hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
}

impl Stage {
    pub fn new(count: usize, seed: u64) -> Arc<Self> {
        let shelf = |i| Shelf(Mutex::new((BTreeMap::new(), Mode::Well, Random::new(seed ^ i))));
        let hall = Hall {
            held: (0..count).map(|_| VecDeque::new()).collect(),
            turns: (0..count).map(|_| Turns::default()).collect(),
            begun: vec![BTreeMap::new(); count],
            answered: vec![0; count],
            locked: vec![false; count],
            removals: vec![Removals::default(); count],
            ..Hall::default()
        };
        Arc::new(Self {
            shelves: (0..count as u64).map(shelf).collect(),
            hall: Mutex::new(hall),
            random: Mutex::new(Random::new(seed)),
        })
    }

    fn hall(&self) -> MutexGuard<'_, Hall> {
        self.hall.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn chance(&self) -> MutexGuard<'_, Random> {
        self.random.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self) -> usize {
        self.shelves.len()
    }

    pub fn now(&self) -> Nanos {
        self.hall().now
    }

    pub fn hash(&self) -> u64 {
        self.hall().hash
    }

    pub fn ground(self: &Arc<Self>) -> Box<dyn Ground> {
        Box::new(Floor(Arc::clone(self)))
    }

    pub fn accesses(self: &Arc<Self>) -> Vec<Box<dyn Access>> {
        let access = |store| Box::new(Door { stage: Arc::clone(self), store }) as Box<dyn Access>;
        (0..self.count()).map(access).collect()
    }

    pub fn mode(&self, store: usize) -> Mode {
        self.shelves[store].inner().1
    }

    pub fn are_well(&self) -> bool {
        (0..self.count()).all(|store| self.mode(store) == Mode::Well)
    }

    /// A store behaves otherwise from now on; what it held back goes on.
    pub fn be(&self, store: usize, mode: Mode) {
        self.shelves[store].inner().1 = mode;
        if mode != Mode::Hangs {
            let held = std::mem::take(&mut self.hall().held[store]);
            held.into_iter().for_each(|pending| self.schedule(pending));
        }
    }

    pub fn lose(&self, store: usize) {
        self.shelves[store].inner().0.clear();
    }

    /// The process is killed after so many answers.
    pub fn kill_after(&self, answers: u64) {
        self.hall().kill_after = Some(answers);
    }

    /// It is not killed. Whether it was to be.
    pub fn spare(&self) -> bool {
        self.hall().kill_after.take().is_some()
    }

    pub fn is_dead(&self) -> bool {
        self.hall().dead
    }

    /// What the process had asked for and nobody had begun is carried out or not; then another may come.
    pub fn bury(&self) {
        let asked = |due| match due {
            Due::Asked(pending) => Some(pending),
            Due::Made(..) => None,
        };
        let mut left: Vec<Pending> =
            std::mem::take(&mut self.hall().pending).into_values().filter_map(asked).collect();
        for turns in std::mem::take(&mut self.hall().turns).iter_mut() {
            left.extend(turns.drain());
        }
        let held: Vec<VecDeque<Pending>> =
            self.hall().held.iter_mut().map(std::mem::take).collect();
        left.extend(held.into_iter().flatten());
        while !left.is_empty() {
            let which = self.chance().below(left.len() as u64) as usize;
            let pending = left.swap_remove(which);
            let mode = self.mode(pending.store);
            if self.chance().chance(1, 2) && !matches!(mode, Mode::Fails | Mode::Hangs) {
                let _ = pending.ask.carry_out(&self.shelves[pending.store]);
            }
        }
        let mut hall = self.hall();
        hall.turns = self.shelves.iter().map(|_| Turns::default()).collect();
        hall.begun.iter_mut().for_each(BTreeMap::clear);
        hall.locked.fill(false);
        hall.removals.fill(Removals::default());
        (hall.dead, hall.kill_after) = (false, None);
    }

    fn schedule(&self, pending: Pending) {
        let takes = self.takes();
        let mut hall = self.hall();
        let at = hall.now + takes;
        hall.pending.insert((at, pending.id), Due::Asked(pending));
    }

    /// How long something takes: within the time that who is well has to answer in, 20 ms at most, mostly far less.
    fn takes(&self) -> Nanos {
        let takes = 20_000 << self.chance().below(11);
        takes / 2 + self.chance().below(takes)
    }

    /// A store goes on with what is its turn.
    fn serve(&self, store: usize) {
        loop {
            let mut hall = self.hall();
            let now = hall.now;
            if hall.begun[store].len() >= turns::AT_A_TIME {
                return;
            }
            let Some((mut pending, behind)) = hall.turns[store].take(now) else { return };
            hall.begun[store].insert(pending.id, now);
            drop(hall);
            pending.behind = behind;
            self.schedule(pending);
        }
    }

    /// Carries out what comes next, until a moment; false: nothing does.
    fn advance(&self, until: Nanos) -> bool {
        let pending = {
            let mut hall = self.hall();
            let Some(((at, _), _)) = hall.pending.first_key_value() else {
                hall.now = hall.now.max(until);
                return false;
            };
            if *at > until {
                hall.now = hall.now.max(until);
                return false;
            }
            let Some(((at, _), due)) = hall.pending.pop_first() else { return false };
            hall.now = hall.now.max(at);
            match due {
                Due::Asked(pending) => pending,
                Due::Made(to, answer) => {
                    hall.hash = fold(fold(hall.hash, answer.0 as u64), hall.now);
                    drop(hall);
                    let _ = to.send(answer);
                    return true;
                }
            }
        };
        let store = pending.store;
        let mode = self.mode(store);
        if mode == Mode::Hangs {
            self.hall().held[store].push_back(pending);
            return true;
        }
        let told = match mode {
            Mode::Fails => Err(Errno::IO),
            _ => pending.ask.carry_out(&self.shelves[store]),
        };
        let mut hall = self.hall();
        hall.begun[store].remove(&pending.id);
        hall.answered[store] = hall.now;
        if pending.behind {
            hall.turns[store].ended();
        }
        if let Ask::Remove(names) = &pending.ask {
            let (count, removals) = (names.len() as u64, &mut hall.removals[store]);
            *(if told.is_ok() { &mut removals.done } else { &mut removals.failed }) += count;
        }
        let value = fold(pending.id, u64::from(told.is_ok()) + store as u64 * 2);
        hall.hash = fold(fold(hall.hash, value), hall.now);
        let left = hall.kill_after;
        match left {
            // It never hears of it.
            Some(0) => {
                hall.dead = true;
                hall.kill_after = None;
            }
            left => {
                hall.kill_after = left.map(|left| left - 1);
                drop(hall);
                let _ = pending.to.send((pending.number, told));
                self.serve(store);
            }
        }
        true
    }

    /// Time passes.
    pub fn pass(&self, nanos: Nanos) {
        let until = self.now() + nanos;
        while !self.is_dead() && self.advance(until) {}
    }

    /// All that is under way comes to its end.
    pub fn drain(&self) {
        while !self.is_dead() {
            let Some((at, _)) = self.hall().pending.keys().next().copied() else { return };
            self.advance(at);
        }
    }
}

/// Time and chance.
struct Floor(Arc<Stage>);

impl Ground for Floor {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn wait(&self, answers: &Receiver<Answer>, until: Nanos) -> Option<Answer> {
        loop {
            if let Ok(answer) = answers.try_recv() {
                return Some(answer);
            }
            if self.0.is_dead() {
                // Nobody is there any more to hear anything.
                let mut hall = self.0.hall();
                hall.now = hall.now.max(until);
                return None;
            }
            if !self.0.advance(until) {
                return answers.try_recv().ok();
            }
        }
    }

    /// Locks are answered at once.
    fn wait_for_lock(&self, answers: &Receiver<LockAnswer>, _: Nanos) -> Option<LockAnswer> {
        answers.try_recv().ok()
    }

    /// At once, or some time later, beside what stores do meanwhile.
    fn compute(
        &self,
        dispatcher: &Dispatcher,
        work: Work,
        number: usize,
        to: &Sender<Answer>,
        _: bool,
    ) {
        let (work, result) = dispatcher.run(work);
        let answer = (number, made(work, result));
        if self.0.chance().chance(1, 2) {
            let _ = to.send(answer);
            return;
        }
        let takes = self.0.takes();
        let mut hall = self.0.hall();
        hall.next += 1;
        let key = (hall.now + takes, hall.next);
        hall.pending.insert(key, Due::Made(to.clone(), answer));
    }

    fn draw(&self) -> u64 {
        self.0.chance().next_u64()
    }
}

/// A store.
struct Door {
    stage: Arc<Stage>,
    store: usize,
}

impl Access for Door {
    fn ask(&self, ask: Ask, number: usize, to: &Sender<Answer>) {
        let stage = &self.stage;
        let (id, now) = {
            let mut hall = stage.hall();
            if hall.dead {
                return;
            }
            hall.next += 1;
            (hall.next, hall.now)
        };
        let (ask, behind) = match ask {
            Ask::Behind(ask) => (*ask, true),
            ask => (ask, false),
        };
        let pending = Pending { id, store: self.store, ask, number, to: to.clone(), behind: false };
        if let Ask::Remove(names) = &pending.ask {
            stage.hall().removals[self.store].asked += names.len() as u64;
            return stage.schedule(pending);
        }
        let pushed = stage.hall().turns[self.store].push(now, pending, behind);
        if pushed.is_err() {
            let _ = to.send((number, Err(Errno::AGAIN)));
        }
        stage.serve(self.store);
    }

    fn is_late(&self) -> bool {
        let hall = self.stage.hall();
        let since = hall.begun[self.store].values().min();
        since.is_some_and(|since| hall.now - *since.max(&hall.answered[self.store]) > 4 * USUAL)
    }

    fn is_suspect(&self) -> bool {
        let hall = self.stage.hall();
        let suspect = SUSPECT.as_nanos() as Nanos;
        hall.begun[self.store].values().any(|begun| hall.now - begun > suspect)
    }

    fn load(&self) -> Nanos {
        let hall = self.stage.hall();
        let waiting = hall.turns[self.store].clients() + hall.begun[self.store].len();
        USUAL * (1 + waiting as Nanos)
    }

    fn lock(&self, _: &str, number: usize, to: &Sender<LockAnswer>) {
        let answer = if matches!(self.stage.mode(self.store), Mode::Fails | Mode::Hangs) {
            Err(Errno::IO)
        } else if std::mem::replace(&mut self.stage.hall().locked[self.store], true) {
            Err(Errno::BUSY)
        } else {
            Ok(Box::new(Held { stage: Arc::clone(&self.stage), store: self.store }) as Lock)
        };
        let _ = to.send((number, answer));
    }

    fn removals(&self) -> Removals {
        self.stage.hall().removals[self.store]
    }
}

struct Held {
    stage: Arc<Stage>,
    store: usize,
}

impl Hold for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        self.stage.hall().locked[self.store] = false;
    }
}
