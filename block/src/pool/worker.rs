//! Asks a store without waiting for it. A store that hangs fills its short queue, and is refused from then on until it
//! answers again; how long it takes is known to who chooses among stores.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;

use super::store::Store;
use crate::layer::latency::Latency;

/// Threads of a store.
const THREADS: usize = 4;
/// Asked for and not begun.
const QUEUE_MAX: usize = 64;
/// A store is suspected when it has not answered for this long.
pub const SUSPECT: Duration = Duration::from_millis(50);

/// What is asked.
#[derive(Clone, Debug)]
pub enum Ask {
    /// [`Store::put`]; the parts one after the other.
    Put(String, Arc<Vec<u8>>, Arc<Vec<u8>>),
    /// [`Store::get`].
    Get(String, u64, usize),
    /// A part of a shard.
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
    /// [`Store::remove`].
    Remove(String),
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
}

/// An answer, under the number that the asker gave it.
pub type Answer = (usize, Result<Told, Errno>);

struct Job {
    ask: Ask,
    number: usize,
    to: Sender<Answer>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// When what is being carried out was begun.
    begun: Vec<(u64, Instant)>,
    next: u64,
    latency: Latency,
    over: bool,
}

struct Inner {
    store: Arc<dyn Store>,
    state: Mutex<State>,
    filled: Condvar,
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

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if state.over {
                    return;
                }
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.next += 1;
            let number = state.next;
            let begun = Instant::now();
            state.begun.push((number, begun));
            drop(state);
            let store = &*self.store;
            let told = match &job.ask {
                Ask::Put(name, head, body) => store.put(name, &[head, body]).map(|()| Told::Done),
                Ask::Get(name, offset, len) => store.get(name, *offset, *len).map(Told::Bytes),
                Ask::Shard { name, head, known, from, len } => {
                    part(store, name, (*head, *known), *from, *len)
                }
                Ask::List(image) => store.list(image).map(Told::Names),
                Ask::Remove(name) => store.remove(name).map(|()| Told::Done),
            };
            // Whoever asked may have had enough.
            let _ = job.to.send((job.number, told));
            state = self.lock();
            state.begun.retain(|(of, _)| *of != number);
            state.latency.add(begun.elapsed().as_nanos() as u64);
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
    /// Starts the threads of a store.
    pub fn start(store: Arc<dyn Store>) -> std::io::Result<Self> {
        let inner = Arc::new(Inner { store, state: Mutex::default(), filled: Condvar::new() });
        let worker = Self { inner };
        for _ in 0..THREADS {
            let inner = Arc::clone(&worker.inner);
            // Not joined: a store that hangs would hold up who ends.
            std::thread::Builder::new().name("block-store".into()).spawn(move || inner.work())?;
        }
        Ok(worker)
    }

    /// The store itself, for who may wait.
    pub fn store(&self) -> &dyn Store {
        &*self.inner.store
    }

    /// Asks; the answer comes under `number`. `EAGAIN` comes at once where too much is waiting already.
    pub fn ask(&self, ask: Ask, number: usize, to: &Sender<Answer>) {
        let mut state = self.inner.lock();
        if state.queue.len() >= QUEUE_MAX {
            drop(state);
            let _ = to.send((number, Err(Errno::AGAIN)));
            return;
        }
        state.queue.push_back(Job { ask, number, to: to.clone() });
        drop(state);
        self.inner.filled.notify_one();
    }

    /// Whether something asked of it has had no answer for too long.
    pub fn is_suspect(&self) -> bool {
        self.inner.lock().begun.iter().any(|(_, begun)| begun.elapsed() > SUSPECT)
    }

    /// How long it takes, in nanoseconds, with what it has to do now.
    pub fn load(&self) -> u64 {
        let state = self.inner.lock();
        state.latency.mean() * (1 + state.queue.len() as u64 + state.begun.len() as u64)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inner.lock().over = true;
        self.inner.filled.notify_all();
    }
}
