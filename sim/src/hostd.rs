//! hostd of a simulated node, as far as it copies: a few copies at a time, in order, until the node
//! ends them. One that hangs copies on later, as a process does that was stopped.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::random::Random;
use service::core::Copier;
use storage::memory::MemoryRegion;
use storage::volume::{CopyItem, run_copies, summing_at};

/// A life of hostd.
#[derive(Debug)]
pub struct Hostd {
    region: Arc<MemoryRegion>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: Random,
    jobs: VecDeque<Job>,
    /// No job up to this one is taken any more.
    void: u64,
    killed: bool,
}

#[derive(Debug)]
struct Job {
    id: u64,
    items: Vec<CopyItem>,
    done: usize,
    /// It cannot do this one and those after it.
    bad: Option<u32>,
    /// It does not answer in time.
    hangs: bool,
}

/// What is next after a step.
#[derive(Debug)]
pub enum Step {
    /// Another one of the same job.
    More,
    /// The answer: the bad ones.
    Done(Vec<u32>),
    /// Nothing: there is no such job any more.
    Void,
}

impl Job {
    fn end(&self) -> usize {
        self.bad.map_or(self.items.len(), |b| b as usize)
    }

    /// Runs up to `n` copies.
    fn run(&mut self, region: &MemoryRegion, n: usize) -> Result<(), String> {
        let to = (self.done + n).min(self.end());
        let items: Vec<_> = summing_at(&self.items, self.done)
            .into_iter()
            .chain(self.items[self.done..to].iter().copied())
            .collect();
        run_copies(region, &items).map_err(|e| format!("hostd cannot copy: {e}"))?;
        self.done = to;
        Ok(())
    }
}

impl Hostd {
    /// One that copies in that region.
    pub fn new(region: Arc<MemoryRegion>, random: Random) -> Self {
        let state = State { random, jobs: VecDeque::new(), void: 0, killed: false };
        Self { region, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a job, unless it is void.
    pub fn ask(&self, id: u64, items: Vec<CopyItem>, bad: Option<u32>, hangs: bool) -> bool {
        let mut state = self.state();
        let takes = !state.killed && id > state.void;
        if takes {
            state.jobs.push_back(Job { id, items, done: 0, bad, hangs });
        }
        takes
    }

    /// Runs some copies of the job.
    pub fn step(&self, id: u64) -> Result<Step, String> {
        let state = &mut *self.state();
        let Some(at) = state.jobs.iter().position(|j| j.id == id) else { return Ok(Step::Void) };
        let some = 1 + state.random.below(1 + state.jobs[at].items.len() as u64) as usize;
        state.jobs[at].run(&self.region, some)?;
        if state.jobs[at].done < state.jobs[at].end() {
            return Ok(Step::More);
        }
        let job = state.jobs.remove(at);
        Ok(Step::Done(job.and_then(|j| j.bad).into_iter().collect()))
    }

    /// It dies, with a part of its copies done.
    pub fn die(&self) -> Result<(), String> {
        let state = &mut *self.state();
        state.killed = true;
        for mut job in std::mem::take(&mut state.jobs) {
            let some = state.random.below(1 + job.items.len() as u64) as usize;
            job.run(&self.region, some)?;
        }
        Ok(())
    }

    /// Whether the node had to kill it.
    pub fn killed(&self) -> bool {
        self.state().killed
    }
}

impl Copier for Hostd {
    fn settle(&self, id: u64) -> Result<bool, String> {
        let state = &mut *self.state();
        state.void = state.void.max(id);
        let Some(at) = state.jobs.iter().position(|j| j.id == id) else { return Ok(false) };
        if state.jobs[at].hangs || state.random.chance(1, 4) {
            let some = state.random.below(1 + state.jobs[at].items.len() as u64) as usize;
            state.jobs[at].run(&self.region, some)?;
            state.jobs.clear();
            state.killed = true;
            return Ok(false);
        }
        let Some(mut job) = state.jobs.remove(at) else { return Ok(false) };
        job.run(&self.region, usize::MAX - job.done)?;
        Ok(job.bad.is_none())
    }
}
