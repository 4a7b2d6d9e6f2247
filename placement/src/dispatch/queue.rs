//! What waits for one accelerator, and the threads that carry it there.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::work::Work;
use super::{Done, Inner, Member, Tried};

/// Work on its way.
pub(super) struct Job {
    pub work: Work,
    pub done: Done,
    pub tried: Tried,
    /// What the last one that failed said.
    pub last: Option<String>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(Job, u64)>,
    /// Nanoseconds that what waits and what is under way should take.
    backlog: u64,
    threads: usize,
    idle: usize,
    over: bool,
}

/// The queue.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    filled: Condvar,
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

    /// No more comes: threads end when nothing is left.
    pub fn end(&self) {
        self.lock().over = true;
        self.filled.notify_all();
    }

    /// Queues a job; a thread more is started where all have something to do and there may be one more.
    pub fn push(self: &Arc<Self>, job: Job, inner: &Arc<Inner>, member: &Arc<Member>) {
        let takes = member.takes(job.work.kind(), job.work.units());
        let mut state = self.lock();
        state.jobs.push_back((job, takes));
        state.backlog += takes;
        let more =
            state.idle < state.jobs.len() && state.threads < member.accelerator.lanes().max(1);
        if more {
            state.threads += 1;
            let (queue, inner, member) = (Arc::clone(self), Arc::clone(inner), Arc::clone(member));
            let name = format!("lane-{}", member.name);
            let started =
                std::thread::Builder::new().name(name).spawn(move || queue.serve(&inner, &member));
            if started.is_err() {
                state.threads -= 1;
                if state.threads == 0
                    && let Some((job, takes)) = state.jobs.pop_back()
                {
                    // Nobody would ever come to it.
                    state.backlog -= takes;
                    drop(state);
                    return (job.done)(job.work, Err(super::Failure::Busy));
                }
            }
        }
        let wake = state.idle > 0;
        drop(state);
        if wake {
            self.filled.notify_one();
        }
    }

    fn serve(&self, inner: &Arc<Inner>, member: &Arc<Member>) {
        let mut state = self.lock();
        loop {
            let Some((job, takes)) = state.jobs.pop_front() else {
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
            if let Some(failed) = inner.attempt(member, job) {
                inner.give(failed, false);
            }
            state = self.lock();
            state.backlog -= takes;
        }
    }
}
