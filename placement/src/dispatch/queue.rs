//! What waits for one accelerator, and the threads that carry it there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::work::Work;
use super::{Done, Inner, Member, Tried};

/// What it takes to wake another thread before that was seen, in nanoseconds,
const WAKING: u64 = 10_000;
/// and at most, whatever was seen: a machine may be busy for a while.
const WAKING_MAX: u64 = 200_000;

/// Between two looks whether an accelerator has come back in time.
const LOOK: Duration = Duration::from_millis(10);

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

    /// The same for who stands in for the member with that number.
    fn spare(&self, number: usize) -> Self {
        let tried = self.tried | 1 << number;
        Self { work: self.work.spare(), tried, last: None, ..*self }
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

/// A task that an accelerator has which may hang.
struct UnderWay {
    number: u64,
    /// When another does it.
    until: Instant,
    /// The same work with other buffers, and who is told; none: another does it.
    spare: Option<Job>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Waiting>,
    /// No more than there are threads.
    under_way: Vec<UnderWay>,
    next: u64,
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
    /// Threads whose accelerator has not come back in time, and that wait for it still.
    stuck: AtomicUsize,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            filled: Condvar::new(),
            waking: AtomicU64::new(WAKING),
            stuck: AtomicUsize::new(0),
        }
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

    /// Threads that wait for an accelerator which has not come back in time.
    pub fn stuck(&self) -> usize {
        self.stuck.load(Ordering::Relaxed)
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
        if !member.is_cpu {
            inner.watch.see_to_it(inner);
        }
    }

    fn serve(&self, inner: &Arc<Inner>, member: &Member, number: usize) {
        let mut state = self.lock();
        loop {
            let Some(Waiting { job, takes, woken }) = state.jobs.pop_front() else {
                if state.over {
                    state.threads -= 1;
                    return;
                }
                state.idle += 1;
                state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            let Job { mut task, done } = job;
            // The CPU does not hang.
            let mut done = Some(done);
            let registered = (!member.is_cpu).then(|| {
                state.next += 1;
                let until = Instant::now() + member.patience(takes);
                let spare = done.take().map(|done| Job { task: task.spare(number), done });
                let number = state.next;
                state.under_way.push(UnderWay { number, until, spare });
                number
            });
            drop(state);
            if let Some(since) = woken {
                self.was_woken(since);
            }
            let (begun, result) = member.carry_out(&mut task);
            if let Some(number) = registered {
                let mut state = self.lock();
                let at = state.under_way.iter().position(|other| other.number == number);
                let spare = at.and_then(|at| state.under_way.swap_remove(at).spare);
                drop(state);
                done = spare.map(|spare| spare.done);
            }
            match done {
                // Another has done it, or does. What this one has written is in buffers that nobody else knows.
                None => {
                    self.stuck.fetch_sub(1, Ordering::Relaxed);
                    member.late.fetch_add(1, Ordering::Relaxed);
                }
                Some(done) => {
                    if inner.judge(member, &mut task, begun, result) {
                        done(task.work, Ok(number));
                    } else {
                        inner.give(task, done);
                    }
                }
            }
            state = self.lock();
            state.backlog -= takes;
        }
    }

    /// Takes from an accelerator what it has not done in time, and, if no thread is left that would come to it, what waits for it.
    /// Whether there is anything left to look after.
    pub fn rescue(&self, inner: &Arc<Inner>, member: &Member, number: usize) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let overdue = |under_way: &mut UnderWay| match under_way.until <= now {
            true => under_way.spare.take(),
            false => None,
        };
        let mut left: Vec<Job> = state.under_way.iter_mut().filter_map(overdue).collect();
        let late = left.len();
        let stuck = self.stuck.fetch_add(late, Ordering::Relaxed) + late;
        for spare in &mut left {
            spare.task.work.renew();
        }
        if stuck >= state.threads.clamp(1, member.accelerator.lanes().max(1)) {
            let waiting = std::mem::take(&mut state.jobs);
            for Waiting { mut job, takes, .. } in waiting {
                state.backlog -= takes;
                job.task.tried |= 1 << number;
                left.push(job);
            }
        }
        let goes_on = !state.jobs.is_empty()
            || state.under_way.iter().any(|under_way| under_way.spare.is_some());
        drop(state);
        if late > 0 {
            inner.hangs(member);
        }
        for mut job in left {
            job.task.last = Some(format!("{}: it has not come back in time", member.name));
            inner.give(job.task, job.done);
        }
        goes_on
    }
}

/// Looks after what accelerators have that may hang: a thread of its own, from the first such task on.
#[derive(Default)]
pub(super) struct Watch {
    awake: AtomicBool,
    state: Mutex<WatchState>,
    woken: Condvar,
}

#[derive(Default)]
struct WatchState {
    started: bool,
    over: bool,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was queued that is to be looked after.
    fn see_to_it(&self, inner: &Arc<Inner>) {
        if self.awake.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut state = self.lock();
        if !state.started {
            let inner = Arc::clone(inner);
            let started = std::thread::Builder::new()
                .name("lane-watch".into())
                .spawn(move || inner.watch.run(&inner));
            // The next task tries again.
            state.started = started.is_ok();
            self.awake.store(started.is_ok(), Ordering::SeqCst);
        }
        drop(state);
        self.woken.notify_one();
    }

    /// Nothing more comes.
    pub fn end(&self) {
        self.lock().over = true;
        self.woken.notify_one();
    }

    fn run(&self, inner: &Arc<Inner>) {
        loop {
            while self.look(inner) {
                std::thread::sleep(LOOK);
            }
            self.awake.store(false, Ordering::SeqCst);
            // What was queued since the last look, by somebody who saw this awake.
            if self.look(inner) {
                self.awake.store(true, Ordering::SeqCst);
                continue;
            }
            let mut state = self.lock();
            while !self.awake.load(Ordering::SeqCst) {
                if state.over {
                    state.started = false;
                    return;
                }
                state = self.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn look(&self, inner: &Arc<Inner>) -> bool {
        let members = inner.members().enumerate().filter(|(_, member)| !member.is_cpu);
        members.fold(false, |any, (i, member)| member.queue.rescue(inner, member, i) || any)
    }
}
