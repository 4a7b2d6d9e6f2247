//! What waits for one accelerator, and the threads that carry it there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::work::Work;
use super::{Done, Inner, Member, Tried};

/// What it takes to wake another thread before that was seen, in nanoseconds,
const WAKING: u64 = 10_000;
/// and at most, whatever was seen: a machine may be busy for a while.
const WAKING_MAX: u64 = 200_000;

/// Work, and what has become of it so far.
pub(super) struct Task {
    pub work: Work,
    /// What kind of work, and how much of it.
    pub kind: usize,
    pub units: u64,
    pub tried: Tried,
    /// What the last one that failed said.
    pub last: Option<String>,
}

impl Task {
    /// One that nobody has tried.
    pub fn new(work: Work) -> Self {
        Self { kind: work.kind(), units: work.units(), work, tried: 0, last: None }
    }
}

/// Work on its way to another thread, and who is told.
pub(super) struct Job {
    pub task: Task,
    pub done: Done,
}

/// A job in the queue.
struct Waiting {
    job: Job,
    /// Nanoseconds that it should take.
    takes: u64,
    /// When a thread was woken for it.
    woken: Option<Instant>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Waiting>,
    /// Nanoseconds that what waits and what is under way should take.
    backlog: u64,
    threads: usize,
    idle: usize,
    over: bool,
}

/// The queue.
pub(super) struct Queue {
    state: Mutex<State>,
    filled: Condvar,
    /// Nanoseconds from waking a thread until it has a job: the mean of the last ones.
    waking: AtomicU64,
}

impl Default for Queue {
    fn default() -> Self {
        Self { state: Mutex::default(), filled: Condvar::new(), waking: AtomicU64::new(WAKING) }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn waiting(&self) -> usize {
        self.lock().jobs.len()
    }

    pub fn backlog(&self) -> u64 {
        self.lock().backlog
    }

    /// What it takes to wake a thread here, in nanoseconds.
    pub fn waking(&self) -> u64 {
        self.waking.load(Ordering::Relaxed)
    }

    fn was_woken(&self, since: Instant) {
        let took = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX).min(WAKING_MAX);
        let old = self.waking.load(Ordering::Relaxed);
        self.waking.store((old * 7 + took) / 8, Ordering::Relaxed);
    }

    /// No more comes: threads end when nothing is left.
    pub fn end(&self) {
        self.lock().over = true;
        self.filled.notify_all();
    }

    /// Queues a job; a thread more is started where all have something to do and there may be one more.
    /// It is the queue of the member with that number.
    pub fn push(&self, job: Job, inner: &Arc<Inner>, number: usize) {
        let Some(member) = inner.members[number].get() else { return };
        let takes = member.takes(job.task.kind, job.task.units);
        let mut state = self.lock();
        let woken = (state.idle > state.jobs.len()).then(Instant::now);
        state.jobs.push_back(Waiting { job, takes, woken });
        state.backlog += takes;
        let more =
            state.idle < state.jobs.len() && state.threads < member.accelerator.lanes().max(1);
        if more {
            state.threads += 1;
            let (name, inner) = (format!("lane-{}", member.name), Arc::clone(inner));
            let started = std::thread::Builder::new().name(name).spawn(move || {
                if let Some(member) = inner.members[number].get() {
                    member.queue.serve(&inner, member, number);
                }
            });
            if started.is_err() {
                state.threads -= 1;
                if state.threads == 0
                    && let Some(Waiting { job, takes, .. }) = state.jobs.pop_back()
                {
                    // Nobody would ever come to it.
                    state.backlog -= takes;
                    drop(state);
                    return (job.done)(job.task.work, Err(super::Failure::Busy));
                }
            }
        }
        let wake = state.idle > 0;
        drop(state);
        if wake {
            self.filled.notify_one();
        }
    }

    fn serve(&self, inner: &Arc<Inner>, member: &Member, number: usize) {
        let mut state = self.lock();
        loop {
            let Some(Waiting { mut job, takes, woken }) = state.jobs.pop_front() else {
                if state.over {
                    state.threads -= 1;
                    return;
                }
                state.idle += 1;
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            if let Some(since) = woken {
                self.was_woken(since);
            }
            if inner.attempt(member, &mut job.task) {
                (job.done)(job.task.work, Ok(number));
            } else {
                let Job { task, done } = job;
                inner.give(task, done);
            }
            state = self.lock();
            state.backlog -= takes;
        }
    }
}
