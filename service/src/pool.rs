//! Threads that work for one that decides. What touches bytes in bulk is a *piece of work*: a closure that owns its
//! buffers, decides nothing, and ends in a value, which the deciding thread takes up like any other event.
//!
//! - *Elastic*: the first piece starts a thread; a queue of more than [`Limits::queue`] pieces gets another one, up to
//!   [`Limits::threads`]; one that has had nothing to do for [`Limits::idle`] is given back. The last one stays and sleeps until it
//!   is wanted: an idle pool wakes nobody.
//! - *Bounded*: pieces say how many bytes they hold, and they count until their end is taken up. Beyond [`Limits::bytes`] a piece
//!   comes back to who gave it, who does it himself or has it wait.
//! - Ends come in the order in which they come about. Whoever needs another order keeps it himself.
//! - A piece that cannot be had done by a thread (the system gives none) is done by who gives it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::net::Waker;

use crate::crew::Crew;
use crate::process::Thread;

/// How far a pool goes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Threads at most; at least one.
    pub threads: usize,
    /// Pieces that may wait before another thread is started.
    pub queue: usize,
    /// Bytes of all pieces whose end is not taken up. One that is longer is taken when there is no other.
    pub bytes: usize,
    /// For how long a thread waits for work before it is given back.
    pub idle: Duration,
    /// Nice value of the threads, where it may be set.
    pub nice: Option<i32>,
}

impl Limits {
    /// What a service uses: as many threads as it has cores, behind its deciding thread.
    pub fn of_service(bytes: usize) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads, queue: 5, bytes, idle: Duration::from_secs(2), nice: Some(-5) }
    }
}

type Work<T> = Box<dyn FnOnce() -> T + Send>;

struct State<T> {
    queue: VecDeque<(usize, Work<T>)>,
    ended: Vec<(usize, T)>,
    /// Of what is queued, under way, or ended.
    bytes: usize,
    /// Queued, or under way.
    pieces: usize,
    threads: usize,
    idle: usize,
    closed: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// There is work, or an end of it.
    wanted: Condvar,
    /// A piece has ended, or a thread.
    news: Condvar,
    /// Something has ended; read without the lock.
    ready: AtomicBool,
    bell: Waker,
    limits: Limits,
    crew: Arc<Crew>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing is left half done under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, mut state: MutexGuard<'_, State<T>>, bytes: usize, end: T) {
        let first = state.ended.is_empty();
        state.ended.push((bytes, end));
        state.pieces -= 1;
        self.crew.moved(state.pieces);
        self.ready.store(true, Ordering::Release);
        drop(state);
        self.news.notify_all();
        if first {
            self.bell.wake();
        }
    }

    /// A thread's life.
    fn work(&self) {
        if let Some(nice) = self.limits.nice {
            Thread::current().nice(nice);
        }
        self.crew.join();
        let mut state = self.lock();
        loop {
            if let Some((bytes, work)) = state.queue.pop_front() {
                drop(state);
                let end = work();
                self.put(self.lock(), bytes, end);
                state = self.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let late;
            (state, late) = if state.threads == 1 {
                (self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner), false)
            } else {
                let waited = self.wanted.wait_timeout(state, self.limits.idle);
                let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                (state, timeout.timed_out())
            };
            state.idle -= 1;
            if late && state.queue.is_empty() && state.threads > 1 {
                break;
            }
        }
        state.threads -= 1;
        drop(state);
        self.crew.leave();
        self.news.notify_all();
    }
}

/// See the module. `T` is what a piece ends in.
pub struct Pool<T> {
    shared: Arc<Shared<T>>,
}

impl<T> std::fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Pool<T> {
    /// A pool without threads; an error if the system gives no descriptor for its bell.
    pub fn new(limits: Limits) -> std::io::Result<Self> {
        Self::watched(limits, Arc::default())
    }

    /// The same, whose threads are looked after through `crew`.
    pub(crate) fn watched(limits: Limits, crew: Arc<Crew>) -> std::io::Result<Self> {
        let state = State {
            queue: VecDeque::new(),
            ended: Vec::new(),
            bytes: 0,
            pieces: 0,
            threads: 0,
            idle: 0,
            closed: false,
        };
        let shared = Shared {
            state: Mutex::new(state),
            wanted: Condvar::new(),
            news: Condvar::new(),
            ready: AtomicBool::new(false),
            bell: Waker::new()?,
            limits,
            crew,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Readable when something has ended: for the loop of the thread that decides.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    /// Gives a piece of work that holds that many bytes; it comes back if the pool has no room for it.
    pub fn give<F: FnOnce() -> T + Send + 'static>(&self, bytes: usize, work: F) -> Result<(), F> {
        let limits = &self.shared.limits;
        let mut state = self.shared.lock();
        if state.bytes > 0 && state.bytes.saturating_add(bytes) > limits.bytes {
            return Err(work);
        }
        state.bytes += bytes;
        state.queue.push_back((bytes, Box::new(work)));
        state.pieces += 1;
        if state.pieces == 1 {
            self.shared.crew.moved(1);
        }
        let grows = state.threads == 0 || state.queue.len() > limits.queue;
        if state.idle == 0 && state.threads < limits.threads.max(1) && grows {
            state.threads += 1;
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("work".into());
            if thread.spawn(move || shared.work()).is_err() {
                state.threads -= 1;
                if state.threads == 0
                    && let Some((bytes, work)) = state.queue.pop_back()
                {
                    drop(state);
                    let end = work();
                    self.shared.put(self.shared.lock(), bytes, end);
                }
                return Ok(());
            }
        }
        drop(state);
        self.shared.wanted.notify_one();
        Ok(())
    }

    /// Whether something has ended that was not taken up; costs next to nothing.
    pub fn has_ended(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire)
    }

    /// What has ended since it was asked last.
    pub fn take(&self) -> Vec<T> {
        self.shared.bell.clear();
        let mut state = self.shared.lock();
        self.shared.ready.store(false, Ordering::Release);
        let ended = std::mem::take(&mut state.ended);
        state.bytes -= ended.iter().map(|(bytes, _)| bytes).sum::<usize>();
        ended.into_iter().map(|(_, end)| end).collect()
    }

    /// Waits until something has ended, if anything is under way, and takes it.
    pub fn wait(&self) -> Vec<T> {
        let mut state = self.shared.lock();
        while state.ended.is_empty() && state.bytes > 0 {
            state = self.shared.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.take()
    }

    /// Bytes of pieces whose end is not taken up.
    pub fn bytes(&self) -> usize {
        self.shared.lock().bytes
    }

    /// Threads that there are now.
    pub fn threads(&self) -> usize {
        self.shared.lock().threads
    }
}

impl<T> Drop for Pool<T> {
    /// What is under way comes to its end; what has not begun never does.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        let never = std::mem::take(&mut state.queue);
        self.shared.wanted.notify_all();
        while state.threads > 0 {
            state = self.shared.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop((state, never));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use base::random::Random;

    use super::*;

    const LIMITS: Limits =
        Limits { threads: 3, queue: 5, bytes: 1000, idle: Duration::from_millis(20), nice: None };

    /// A piece that says when it begins and ends when it is let.
    fn gated(number: u32, begun: &Sender<u32>) -> (Sender<()>, impl FnOnce() -> u32 + use<>) {
        let (opens, gate) = channel::<()>();
        let begun = begun.clone();
        (opens, move || {
            let _ = begun.send(number);
            let _ = gate.recv();
            number
        })
    }

    fn drain(pool: &Pool<u32>, count: usize) -> Vec<u32> {
        let mut ended = Vec::new();
        while ended.len() < count {
            ended.extend(pool.wait());
        }
        ended
    }

    #[test]
    fn each_piece_ends_once_whoever_is_faster() {
        let mut random = Random::new(15);
        let pool = Pool::new(Limits { bytes: 4000, ..LIMITS }).unwrap();
        let (mut given, mut inline, mut ended) = (0, Vec::new(), Vec::new());
        for number in 0..3000u32 {
            let turns = random.below(200);
            let work = move || (0..turns).fold(number, |n, _| std::hint::black_box(n));
            match pool.give(random.below(900) as usize, work) {
                Ok(()) => given += 1,
                Err(work) => inline.push(work()),
            }
            assert!(pool.bytes() <= 4000, "more than it may hold");
            if random.chance(1, 7) {
                ended.extend(pool.take());
            }
        }
        while ended.len() < given {
            ended.extend(pool.wait());
        }
        assert_eq!(pool.bytes(), 0);
        assert!(pool.wait().is_empty(), "nothing is under way");
        ended.extend(inline);
        ended.sort_unstable();
        assert!(ended.into_iter().eq(0..3000));
    }

    #[test]
    fn a_long_queue_gets_another_thread_and_gives_it_back() {
        let (begun, begins): (_, Receiver<u32>) = channel();
        let pool = Pool::new(LIMITS).unwrap();
        assert_eq!(pool.threads(), 0, "what is not used has no thread");
        let mut gates = Vec::new();
        let mut give = |number, begun: &Sender<u32>| {
            let (opens, work) = gated(number, begun);
            gates.push(opens);
            assert!(pool.give(10, work).is_ok());
        };
        give(0, &begun);
        assert_eq!(begins.recv(), Ok(0));
        (1..=5).for_each(|number| give(number, &begun));
        assert_eq!(pool.threads(), 1, "five may wait");
        give(6, &begun);
        assert_eq!(pool.threads(), 2);
        assert_eq!(begins.recv(), Ok(1));
        give(7, &begun);
        assert_eq!(pool.threads(), 3);
        assert_eq!(begins.recv(), Ok(2));
        (8..20).for_each(|number| give(number, &begun));
        assert_eq!(pool.threads(), 3, "there are no more");
        assert_eq!(pool.bytes(), 200);
        drop(gates);
        let mut ended = drain(&pool, 20);
        ended.sort_unstable();
        assert!(ended.into_iter().eq(0..20));
        // However long that takes.
        while pool.threads() > 1 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(pool.give(1, || 7).is_ok());
        assert_eq!(drain(&pool, 1), [7], "the last one stays");
    }

    #[test]
    fn what_it_has_no_room_for_comes_back() {
        let (begun, begins) = channel();
        let pool = Pool::new(LIMITS).unwrap();
        let (opens, work) = gated(1, &begun);
        assert!(pool.give(5000, work).is_ok(), "alone it may be longer");
        assert_eq!(begins.recv(), Ok(1));
        let refused = pool.give(1, || 2).map_or_else(|work| Some(work()), |()| None);
        assert_eq!(refused, Some(2));
        assert!(!pool.has_ended());
        drop(opens);
        assert_eq!(drain(&pool, 1), [1]);
        assert!(pool.give(600, || 3).is_ok() && pool.give(400, || 4).is_ok());
        let mut ended = drain(&pool, 2);
        ended.sort_unstable();
        assert_eq!(ended, [3, 4]);
    }

    #[test]
    fn its_bell_rings_until_the_end_is_taken_up() {
        let pool = Pool::new(LIMITS).unwrap();
        let rings = |wait: i64| {
            let flags = rustix::event::PollFlags::IN;
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(pool.bell(), flags)];
            let wait = rustix::event::Timespec { tv_sec: wait, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&wait)).unwrap() == 1
        };
        assert!(!rings(0));
        assert!(pool.give(1, || 1).is_ok());
        assert!(rings(60) && pool.has_ended());
        assert_eq!(pool.take(), [1]);
        assert!(!rings(0) && !pool.has_ended());
    }

    #[test]
    fn its_end_waits_for_what_is_under_way_and_drops_the_rest() {
        let (begun, begins) = channel();
        let pool = Pool::new(LIMITS).unwrap();
        let (opens, work) = gated(1, &begun);
        assert!(pool.give(1, work).is_ok());
        assert_eq!(begins.recv(), Ok(1));
        let (kept, dropped) = channel::<()>();
        let work = move || {
            let _ = kept.send(());
            2
        };
        assert!(pool.give(1, work).is_ok());
        drop(opens);
        drop(pool);
        // Either it was done, or its closure is gone: nobody is left who could send.
        while dropped.recv().is_ok() {}
    }
}
