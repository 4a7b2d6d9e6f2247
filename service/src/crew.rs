//! The threads of a pool, as they are seen by the thread that lends them priority when they get too little of the processor
//! (`beat`). What they do is what others wait for: a chunk is acknowledged when it is in the ring, and a piece of work puts it there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::process::Thread;

/// See the module.
#[derive(Debug)]
pub struct Crew {
    start: Instant,
    threads: Mutex<Vec<Thread>>,
    /// Microseconds from `start` to when a piece ended last, or the first came; 0: nothing is to be done.
    waits: AtomicU64,
}

impl Default for Crew {
    fn default() -> Self {
        Self { start: Instant::now(), threads: Mutex::default(), waits: AtomicU64::new(0) }
    }
}

impl Crew {
    fn threads(&self) -> MutexGuard<'_, Vec<Thread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread that calls is one of them from here on.
    pub fn join(&self) {
        self.threads().push(Thread::current());
    }

    /// And is none any more.
    pub fn leave(&self) {
        let own = Thread::current();
        self.threads().retain(|thread| *thread != own);
    }

    /// Something has ended, or come: so many pieces are to be done now.
    pub fn moved(&self, pieces: usize) {
        let now = self.start.elapsed().as_micros() as u64;
        let waits = if pieces == 0 { 0 } else { now.max(1) };
        self.waits.store(waits, Ordering::Relaxed);
    }

    /// For how long nothing has ended although there is something to be done.
    pub fn waits(&self) -> Option<Duration> {
        let since = Some(self.waits.load(Ordering::Relaxed)).filter(|since| *since > 0)?;
        Some(self.start.elapsed().saturating_sub(Duration::from_micros(since)))
    }

    /// The same, unless one of them is at it, who may get too little of the processor for that as well.
    fn now(&self) -> Option<MutexGuard<'_, Vec<Thread>>> {
        match self.threads.try_lock() {
            Ok(threads) => Some(threads),
            Err(TryLockError::Poisoned(threads)) => Some(threads.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Gives them a realtime priority; says whether that is allowed. `None`: none of them is there, or one comes or goes just now.
    pub fn lend(&self, priority: i32) -> Option<bool> {
        let threads = self.now().filter(|threads| !threads.is_empty())?;
        // Each of them, also when one has ended.
        Some(threads.iter().filter(|thread| thread.realtime(priority)).count() > 0)
    }

    /// Takes it back; `false`: one comes or goes just now.
    pub fn take_back(&self) -> bool {
        let threads = self.now();
        threads.iter().flat_map(|threads| threads.iter()).for_each(|thread| thread.ordinary());
        threads.is_some()
    }

    /// The same for good.
    pub fn end(&self) {
        self.threads().iter().for_each(|thread| thread.ordinary());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_for_as_long_as_nothing_ends() {
        let crew = Crew::default();
        assert_eq!(crew.waits(), None);
        crew.moved(2);
        std::thread::sleep(Duration::from_millis(5));
        assert!(crew.waits() >= Some(Duration::from_millis(5)));
        crew.moved(0);
        assert_eq!(crew.waits(), None);
    }

    #[test]
    fn who_has_left_is_lent_nothing() {
        let crew = Crew::default();
        assert_eq!(crew.lend(1), None, "nobody is there");
        crew.join();
        crew.leave();
        assert_eq!(crew.lend(1), None);
    }
}
