//! Syncs that wait where one thread can wait for all of them ([`Waiting::Together`](client::fs::Waiting)): each makes durable what was
//! written before it, so that those behind it have less to wait for, or nothing. One that does not come back, since it waits for
//! somebody who has what it syncs, does not keep those behind it: then another thread goes on with them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One sync, and the answer to who asked for it.
pub(super) type Sync = Box<dyn FnOnce() + Send>;

/// A sync that takes longer is not waited for by those behind it.
const PATIENCE: Duration = Duration::from_millis(20);
/// Threads at most.
const THREADS_MAX: usize = 8;

struct Waiting {
    syncs: VecDeque<Sync>,
    /// Threads, and those that sleep.
    threads: usize,
    idle: usize,
    /// Syncs that are being done, and when one began or ended last.
    running: usize,
    since: Instant,
    ended: bool,
}

struct Room {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

impl Room {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of a thread: until the end, and then what has come before that.
    fn run(&self) {
        let mut waiting = self.waiting();
        loop {
            let left = PATIENCE.saturating_sub(waiting.since.elapsed());
            if waiting.syncs.is_empty() {
                if waiting.ended {
                    waiting.threads -= 1;
                    return;
                }
                waiting.idle += 1;
                waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                waiting.idle -= 1;
            } else if waiting.running > 0 && !left.is_zero() {
                waiting.idle += 1;
                let woken = self.came.wait_timeout(waiting, left);
                waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
                waiting.idle -= 1;
            } else if let Some(sync) = waiting.syncs.pop_front() {
                waiting.running += 1;
                waiting.since = Instant::now();
                drop(waiting);
                sync();
                waiting = self.waiting();
                waiting.running -= 1;
                waiting.since = Instant::now();
            }
        }
    }
}

/// The syncs of a server. Its threads begin when they are needed, sleep where there is nothing to do, and end with the server.
pub(super) struct Syncs(Arc<Room>);

impl Default for Syncs {
    fn default() -> Self {
        let waiting = Waiting {
            syncs: VecDeque::new(),
            threads: 0,
            idle: 0,
            running: 0,
            since: Instant::now(),
            ended: false,
        };
        Self(Arc::new(Room { waiting: Mutex::new(waiting), came: Condvar::new() }))
    }
}

impl Syncs {
    /// Has one done, after those before it unless these take long. Without any thread it is done here.
    pub(super) fn push(&self, sync: Sync) {
        let mut waiting = self.0.waiting();
        // Beside whoever does one somebody looks whether that ends.
        if waiting.idle == 0 && waiting.threads < THREADS_MAX {
            let room = self.0.clone();
            let thread = std::thread::Builder::new().name("syncs".into());
            match thread.spawn(move || room.run()) {
                Ok(_) => waiting.threads += 1,
                Err(error) if waiting.threads == 0 => {
                    drop(waiting);
                    log::warn!("no thread for syncs that wait: {error}");
                    sync();
                    return;
                }
                Err(_) => {}
            }
        }
        waiting.syncs.push_back(sync);
        drop(waiting);
        self.0.came.notify_one();
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

    #[test]
    fn who_does_not_come_back_keeps_nobody() {
        let syncs = Syncs::default();
        let (done, all) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        syncs.push(Box::new(move || gone.recv_timeout(SOON).unwrap()));
        for i in 0..10 {
            let done = done.clone();
            syncs.push(Box::new(move || done.send(i).unwrap()));
        }
        let mut got: Vec<i32> = (0..10).map(|_| all.recv_timeout(SOON).unwrap()).collect();
        got.sort_unstable();
        assert_eq!(got, (0..10).collect::<Vec<_>>());
        go.send(()).unwrap();
    }

    #[test]
    fn what_has_come_is_done_at_the_end() {
        let (done, all) = mpsc::channel();
        let syncs = Syncs::default();
        for i in 0..10 {
            let done = done.clone();
            syncs.push(Box::new(move || done.send(i).unwrap()));
        }
        drop((syncs, done));
        assert_eq!(all.iter().count(), 10);
    }
}
