//! Asks a store without waiting for it. A store that hangs fills its short queue, and is refused from then on until it
//! answers again; how long it takes is known to who chooses among stores.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Errno, Nanos};
pub use placement::dispatch::Piece;

use super::gather::{HEDGE_MAX, HEDGE_MIN};
use super::ground::{Access, LockAnswer, Removals};
use super::store::Store;
use super::turns::{self, Turns};
use crate::layer::latency::Latency;

/// Threads of a store.
const THREADS: usize = turns::AT_A_TIME;
/// Names to be removed that are remembered; what is beyond is left for a repair to find.
const REMOVALS_MAX: usize = 16_384;
/// With more of them than this they go before what is asked, by half of the threads, or puts would leave dead names behind for ever;
const REMOVALS_BEHIND: usize = 256;
/// with more than this by all but one.
const REMOVALS_FAR_BEHIND: usize = 4096;
/// A store is suspected when it has not answered for this long.
pub const SUSPECT: Duration = Duration::from_millis(50);

/// What is asked.
#[derive(Clone, Debug)]
pub enum Ask {
    /// [`Store::put`]; the parts one after the other.
    Put(String, Piece, Piece),
    /// [`Store::get`].
    Get(String, u64, usize),
    /// A part of a shard or a patch.
    Shard {
        /// Its name.
        name: String,
        /// Length of its head.
        head: usize,
        /// Whether the head is known already.
        known: bool,
        /// Where in its bytes to begin.
        from: usize,
        /// How many.
        len: usize,
    },
    /// [`Store::list`].
    List(String),
    /// [`Store::remove`], of each, when the store has nothing else to do, or much of this; the answer says that it is remembered.
    Remove(Vec<String>),
    /// Something that nobody waits for: clients come first.
    Behind(Box<Ask>),
}

/// What a store says.
#[derive(Clone, Debug)]
pub enum Told {
    /// Done.
    Done,
    /// Bytes.
    Bytes(Vec<u8>),
    /// The head of a shard (empty if it was known), and bytes of it.
    Shard(Vec<u8>, Vec<u8>),
    /// Names.
    Names(Vec<String>),
    /// No store's answer: chunks that a task has made.
    Chunks(Vec<Vec<u8>>),
}

/// An answer, under the number that the asker gave it.
pub type Answer = (usize, Result<Told, Errno>);

enum Job {
    Ask(Ask, usize, Sender<Answer>),
    Lock(String, usize, Sender<LockAnswer>),
    /// One of those that are to be removed.
    Remove(String),
}

#[derive(Default)]
struct State {
    queue: Turns<Job>,
    /// Names to be removed: nobody waits for that.
    removals: VecDeque<String>,
    /// How many there were.
    counts: Removals,
    /// Threads that are at these.
    removers: usize,
    /// Some were left alone since there are too many, and the log says so.
    drops: bool,
    /// When what is being carried out was begun.
    begun: Vec<(u64, Instant)>,
    /// When it last answered something.
    answered: Option<Instant>,
    next: u64,
    latency: Latency,
    over: bool,
}

struct Inner {
    store: Arc<dyn Store>,
    /// What it is called in logs.
    name: String,
    state: Mutex<State>,
    filled: Condvar,
    since: Instant,
}

/// A store with the threads that wait for it.
pub struct Worker {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl State {
    /// What is to be done next, and whether nobody waits for it. Removals by one thread while nothing is asked, unless there are too many
    /// of them.
    fn take(&mut self, now: Nanos) -> Option<(Job, bool)> {
        let count = self.removals.len();
        let first = count > REMOVALS_BEHIND;
        let most = if count > REMOVALS_FAR_BEHIND {
            THREADS - 1
        } else if first {
            THREADS / 2
        } else {
            1
        };
        if self.removers < most
            && (first || self.queue.clients() == 0)
            && let Some(name) = self.removals.pop_front()
        {
            self.removers += 1;
            return Some((Job::Remove(name), false));
        }
        self.queue.take(now)
    }

    /// Names to be removed; whether there was room for all of them.
    fn remember(&mut self, names: Vec<String>) -> bool {
        let room = REMOVALS_MAX - self.removals.len();
        // Not said again for each name that finds room.
        self.drops &= room < REMOVALS_MAX / 2;
        let (count, taken) = (names.len(), names.len().min(room));
        self.counts.asked += count as u64;
        self.counts.failed += (count - taken) as u64;
        self.removals.extend(names.into_iter().take(taken));
        taken == count
    }

    /// Whether a thread that ends leaves nothing undone: what is to be removed, who is at it removes.
    fn is_done(&self) -> bool {
        self.over && (self.removals.is_empty() || self.removers > 0)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Nanos {
        self.since.elapsed().as_nanos() as Nanos
    }

    /// Queues something; it is given back where too much is waiting already.
    fn push(&self, job: Job, behind: bool) -> Result<(), Job> {
        self.lock().queue.push(self.now(), job, behind)?;
        self.filled.notify_one();
        Ok(())
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some((job, behind)) = state.take(self.now()) else {
                if state.is_done() {
                    return;
                }
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.next += 1;
            let number = state.next;
            let begun = Instant::now();
            // That what nobody waits for takes long says nothing of the rest.
            if !matches!(job, Job::Remove(_)) {
                state.begun.push((number, begun));
            }
            drop(state);
            let store = &*self.store;
            // Whoever asked may have had enough.
            let removed = match job {
                Job::Ask(ask, number, to) => {
                    let _ = to.send((number, ask.carry_out(store)));
                    None
                }
                Job::Lock(image, number, to) => {
                    let _ = to.send((number, store.lock(&image)));
                    None
                }
                Job::Remove(name) => {
                    let removed = store.remove(&name);
                    if let Err(errno) = removed {
                        log::debug!("pool: store {}: removing {name}: {errno}", self.name);
                    }
                    Some(removed.is_ok())
                }
            };
            state = self.lock();
            state.begun.retain(|(of, _)| *of != number);
            state.answered = Some(Instant::now());
            if behind {
                state.queue.ended();
            }
            if let Some(removed) = removed {
                state.removers -= 1;
                state.counts.done += u64::from(removed);
                state.counts.failed += u64::from(!removed);
            } else {
                state.latency.add(begun.elapsed().as_nanos() as u64);
            }
        }
    }
}

impl Ask {
    /// Asks a store, and waits for it.
    pub fn carry_out(&self, store: &dyn Store) -> Result<Told, Errno> {
        match self {
            Self::Put(name, head, body) => store.put(name, &[head, body]).map(|()| Told::Done),
            Self::Get(name, offset, len) => store.get(name, *offset, *len).map(Told::Bytes),
            Self::Shard { name, head, known, from, len } => {
                part(store, name, (*head, *known), *from, *len)
            }
            Self::List(image) => store.list(image).map(Told::Names),
            Self::Remove(names) => {
                // All of them, whatever becomes of one.
                let results: Vec<_> = names.iter().map(|name| store.remove(name)).collect();
                results.into_iter().collect::<Result<(), Errno>>().map(|()| Told::Done)
            }
            Self::Behind(ask) => ask.carry_out(store),
        }
    }
}

fn part(
    store: &dyn Store,
    name: &str,
    (head, known): (usize, bool),
    from: usize,
    len: usize,
) -> Result<Told, Errno> {
    if known {
        let bytes = store.get(name, (head + from) as u64, len)?;
        return Ok(Told::Shard(Vec::new(), bytes));
    }
    if from == 0 {
        let mut bytes = store.get(name, 0, head + len)?;
        let rest = bytes.split_off(head.min(bytes.len()));
        return Ok(Told::Shard(bytes, rest));
    }
    let first = store.get(name, 0, head)?;
    Ok(Told::Shard(first, store.get(name, (head + from) as u64, len)?))
}

impl Worker {
    /// Starts the threads of a store, which is called `name` in logs.
    ///
    /// # Errors
    /// Out of threads.
    pub fn start(name: &str, store: Arc<dyn Store>) -> std::io::Result<Self> {
        let (name, state, filled) = (name.to_owned(), Mutex::default(), Condvar::new());
        let inner = Arc::new(Inner { store, name, state, filled, since: Instant::now() });
        let worker = Self { inner };
        for _ in 0..THREADS {
            let inner = Arc::clone(&worker.inner);
            // Not joined: a store that hangs would hold up who ends.
            std::thread::Builder::new().name("block-store".into()).spawn(move || inner.work())?;
        }
        Ok(worker)
    }
}

impl Access for Worker {
    fn ask(&self, ask: Ask, number: usize, to: &Sender<Answer>) {
        if let Ask::Remove(names) = ask {
            let mut state = self.inner.lock();
            let all = state.remember(names);
            let begins = !all && !std::mem::replace(&mut state.drops, true);
            drop(state);
            if begins {
                log::warn!(
                    "pool: store {} is asked to remove more than it does: what is beyond {REMOVALS_MAX} names is left there, until the image is opened again or repaired",
                    self.inner.name
                );
            }
            self.inner.filled.notify_one();
            let _ = to.send((number, if all { Ok(Told::Done) } else { Err(Errno::AGAIN) }));
            return;
        }
        let (ask, behind) = match ask {
            Ask::Behind(ask) => (*ask, true),
            ask => (ask, false),
        };
        if self.inner.push(Job::Ask(ask, number, to.clone()), behind).is_err() {
            let _ = to.send((number, Err(Errno::AGAIN)));
        }
    }

    fn is_suspect(&self) -> bool {
        self.inner.lock().begun.iter().any(|(_, begun)| begun.elapsed() > SUSPECT)
    }

    fn is_late(&self) -> bool {
        let state = self.inner.lock();
        let Some(since) = state.begun.iter().map(|(_, begun)| *begun).min() else { return false };
        let usual = (4 * state.latency.mean()).clamp(HEDGE_MIN, HEDGE_MAX);
        state.answered.map_or(since, |answered| answered.max(since)).elapsed().as_nanos() as Nanos
            > usual
    }

    fn load(&self) -> u64 {
        let state = self.inner.lock();
        let clients = state.queue.clients() as u64;
        state.latency.mean() * (1 + clients + state.begun.len() as u64)
    }

    fn lock(&self, image: &str, number: usize, to: &Sender<LockAnswer>) {
        if self.inner.push(Job::Lock(image.to_owned(), number, to.clone()), false).is_err() {
            let _ = to.send((number, Err(Errno::AGAIN)));
        }
    }

    fn removals(&self) -> Removals {
        self.inner.lock().counts
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inner.lock().over = true;
        self.inner.filled.notify_all();
    }
}
