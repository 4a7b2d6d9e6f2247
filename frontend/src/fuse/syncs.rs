//! Work that nobody waits for with a thread of his own: above all syncs where one thread can wait for all of them
//! ([`Waiting::Together`](client::fs::Waiting)): each makes durable what was written before it, so that those behind it have less to
//! wait for, or nothing. One that does not come back, since it waits for somebody who has what it syncs, does not keep those
//! behind it: another thread goes on with them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One sync, and the answer to who asked for it; or whatever else is to be done in its own time.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A job that takes longer is not waited for by those behind it.
const PATIENCE: Duration = Duration::from_millis(20);
/// Threads at most: as of a queue whose requests all wait.
const THREADS_MAX: usize = 64;

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// Threads, and those that sleep or watch.
    threads: usize,
    idle: usize,
    /// When those began that are being done.
    running: Vec<(u64, Instant)>,
    begun: u64,
    ended: bool,
}

impl Waiting {
    /// For how long a job that is being done is still waited for.
    fn patience(&self) -> Option<Duration> {
        let youngest = self.running.iter().map(|(_, since)| since.elapsed()).min()?;
        PATIENCE.checked_sub(youngest).filter(|left| !left.is_zero())
    }
}

#[derive(Default)]
struct Room {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

impl Room {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody is there for the jobs that wait, beside those who are at one. False if there is no thread at all.
    fn watch(self: &Arc<Self>, waiting: &mut Waiting) -> bool {
        if waiting.idle > 0 || waiting.threads >= THREADS_MAX {
            return true;
        }
        let room = self.clone();
        match std::thread::Builder::new().name("syncs".into()).spawn(move || room.run()) {
            Ok(_) => waiting.threads += 1,
            Err(error) if waiting.threads == 0 => {
                log::warn!("no thread for syncs that wait: {error}");
                return false;
            }
            Err(_) => {}
        }
        true
    }

    /// The body of a thread: until the end, and then what has come before that.
    fn run(self: &Arc<Self>) {
        let mut waiting = self.waiting();
        loop {
            if waiting.jobs.is_empty() {
                if waiting.ended {
                    waiting.threads -= 1;
                    return;
                }
                waiting.idle += 1;
                waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                waiting.idle -= 1;
            } else if let Some(left) = waiting.patience() {
                waiting.idle += 1;
                let woken = self.came.wait_timeout(waiting, left);
                waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
                waiting.idle -= 1;
            } else if let Some(job) = waiting.jobs.pop_front() {
                waiting.begun += 1;
                let number = waiting.begun;
                waiting.running.push((number, Instant::now()));
                if !waiting.jobs.is_empty() {
                    self.watch(&mut waiting);
                }
                drop(waiting);
                job();
                waiting = self.waiting();
                waiting.running.retain(|(running, _)| *running != number);
            }
        }
    }

    fn push(self: &Arc<Self>, job: Job) {
        let mut waiting = self.waiting();
        // Beside whoever is at one somebody looks whether that ends.
        if !self.watch(&mut waiting) {
            drop(waiting);
            job();
            return;
        }
        waiting.jobs.push_back(job);
        drop(waiting);
        self.came.notify_one();
    }
}

/// The jobs of a server. Its threads begin when they are needed, sleep where there is nothing to do, and end with the server.
#[derive(Default)]
pub(super) struct Syncs(Arc<Room>);

impl Syncs {
    /// Has one done, after those before it unless these take long. Without any thread it is done here.
    pub(super) fn push(&self, job: Job) {
        self.0.push(job);
    }

    /// Has a job done when the last one has given this up that it was given to: from there, and not by who gives it up, which may
    /// be somebody who holds what the job needs.
    pub(super) fn at_last(&self, job: Job) -> Arc<AtLast> {
        Arc::new(AtLast { job: Mutex::new(Some(job)), room: self.0.clone() })
    }

    #[cfg(test)]
    fn threads(&self) -> usize {
        self.0.waiting().threads
    }
}

impl Drop for Syncs {
    fn drop(&mut self) {
        self.0.waiting().ended = true;
        self.0.came.notify_all();
    }
}

/// See [`Syncs::at_last`].
pub(super) struct AtLast {
    /// Locked so that who has it may be anywhere; only the last takes it.
    job: Mutex<Option<Job>>,
    room: Arc<Room>,
}

impl AtLast {
    /// Here and now, by the last who has it.
    pub(super) fn now(mut self) {
        if let Some(job) = self.take() {
            job();
        }
    }

    fn take(&mut self) -> Option<Job> {
        self.job.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for AtLast {
    fn drop(&mut self) {
        if let Some(job) = self.take() {
            self.room.push(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn each_is_done_once_by_few_threads() {
        let syncs = Syncs::default();
        let (done, all) = mpsc::channel();
        for i in 0..1000 {
            let done = done.clone();
            syncs.push(Box::new(move || done.send(i).unwrap()));
        }
        let mut got: Vec<i32> = (0..1000).map(|_| all.recv_timeout(SOON).unwrap()).collect();
        assert!(syncs.threads() <= THREADS_MAX);
        got.sort_unstable();
        assert_eq!(got, (0..1000).collect::<Vec<_>>());
    }

    /// Several at once, each with others behind it, in whatever order threads come to them.
    #[test]
    fn who_does_not_come_back_keeps_nobody() {
        let syncs = Syncs::default();
        let (done, all) = mpsc::channel();
        let gates: Vec<_> = (0..10)
            .map(|round| {
                let (go, gone) = mpsc::channel::<()>();
                syncs.push(Box::new(move || gone.recv_timeout(SOON).unwrap()));
                for i in 0..10 {
                    let done = done.clone();
                    syncs.push(Box::new(move || done.send(10 * round + i).unwrap()));
                }
                go
            })
            .collect();
        let begun = Instant::now();
        let mut got: Vec<i32> = (0..100).map(|_| all.recv_timeout(SOON).unwrap()).collect();
        got.sort_unstable();
        assert_eq!(got, (0..100).collect::<Vec<_>>());
        // Each that hangs is waited for once, not once more by each behind it.
        assert!(begun.elapsed() < PATIENCE * 10 * 10, "{:?}", begun.elapsed());
        gates.iter().for_each(|go| go.send(()).unwrap());
    }

    #[test]
    fn what_has_come_is_done_at_the_end() {
        let (done, all) = mpsc::channel();
        let syncs = Syncs::default();
        for i in 0..10 {
            let done = done.clone();
            syncs.push(Box::new(move || done.send(i).unwrap()));
        }
        let (held, last) = (done.clone(), done.clone());
        let at_last = syncs.at_last(Box::new(move || last.send(99).unwrap()));
        let again = at_last.clone();
        drop(at_last);
        drop((syncs, done));
        assert_eq!(all.iter().take(10).count(), 10);
        // Also behind the end.
        held.send(98).unwrap();
        assert_eq!(all.recv_timeout(SOON), Ok(98));
        drop((again, held));
        assert_eq!(all.iter().collect::<Vec<_>>(), [99]);
    }
}
