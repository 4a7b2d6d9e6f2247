//! Task queues before the engines. A batch of stripes or placements is a [`Work`] with its buffers: it is submitted without
//! waiting, done by whichever [`Accelerator`] should be through with it first, and given back by an event. One that fails
//! stands aside for a while, and another does its work; so it is with one that does not come back in time, whose late answer
//! nobody hears, and which has its own buffers until then. The engines of the CPU go the same way; what is small they
//! do at once, in the thread that submits, since a change of threads would take longer.
//!
//! This is the only part of the crate that has threads, and none before something is queued.

mod queue;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::engine::{self, Engine};
use queue::{Job, Queue, Task, Watch};
pub use work::{Buffers, Piece, Work};

/// Work that an engine of the CPU is through with in this time, or in what it takes to wake two threads, is done in the thread
/// that submits it: another thread would have to be woken, would find nothing in its caches, and would have to wake who waits.
const AT_ONCE: u64 = 50_000;
/// One task in so many is given to another thread although that seems to take longer than it does.
const PROBES: u64 = 64;
/// When enough were timed, those that should take so many nanoseconds are,
const LONG: u64 = 20_000;
/// and of shorter ones, which take little longer than to look at a clock twice does, one in so many.
const TIMED: u64 = 256;
const TIMED_ALL: u64 = 64;
/// Failures one after the other after which an accelerator stands aside,
const FAILURES: u64 = 3;
/// for this long at first, twice as long each time, and no longer than that.
const ASIDE: Duration = Duration::from_millis(200);
const ASIDE_MAX: Duration = Duration::from_secs(60);
/// An accelerator that has not come back after so many times of what a task should take, but no sooner than its
/// [`patience`](Accelerator::patience) and no later than this, hangs.
const LATE: u64 = 16;
const LATE_MAX: Duration = Duration::from_secs(10);
/// Tasks that wait for one accelerator.
const QUEUE_MAX: usize = 256;

/// Why work was not done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// Its buffers are not of the shape that it asks for.
    Shape(String),
    /// Every accelerator that can do it has as much to do as it takes.
    Busy,
    /// None can do it.
    Nobody,
    /// Those that can have failed: what the last one said.
    Failed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape(what) => write!(f, "buffers of the wrong shape: {what}"),
            Self::Busy => f.write_str("every accelerator has as much to do as it takes"),
            Self::Nobody => f.write_str("no accelerator can do that"),
            Self::Failed(what) => write!(f, "every accelerator has failed; the last one: {what}"),
        }
    }
}

impl std::error::Error for Failure {}

/// What does work. It should bound its own waiting: a device that has not answered in time is one that has failed. One that hangs all the
/// same keeps a thread and the buffers of one task, and another does that; while all of its threads are kept, it is given nothing.
pub trait Accelerator: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;
    /// Whether it can do such work.
    fn can(&self, work: &Work) -> bool;
    /// Does it. After an error the outputs hold anything, and the inputs what they held.
    fn run(&self, work: &mut Work) -> Result<(), String>;
    /// Whether it is the CPU itself: whoever waits for it may as well do it.
    fn is_cpu(&self) -> bool {
        false
    }
    /// How long at least it may have a task before another is given the same. What should take long may take longer.
    fn patience(&self) -> Duration {
        Duration::from_millis(250)
    }
    /// Tasks that it does at the same time.
    fn lanes(&self) -> usize {
        1
    }
    /// What it is thought to take before it has done anything: nanoseconds for a task, and for each 1024 units of work
    /// ([`Work::units`]). What is measured corrects the second.
    fn expected(&self) -> (u64, u64);
}

/// One that somebody else has as well.
impl<A: Accelerator + ?Sized> Accelerator for Arc<A> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn can(&self, work: &Work) -> bool {
        (**self).can(work)
    }

    fn run(&self, work: &mut Work) -> Result<(), String> {
        (**self).run(work)
    }

    fn is_cpu(&self) -> bool {
        (**self).is_cpu()
    }

    fn patience(&self) -> Duration {
        (**self).patience()
    }

    fn lanes(&self) -> usize {
        (**self).lanes()
    }

    fn expected(&self) -> (u64, u64) {
        (**self).expected()
    }
}

/// An engine of the CPU.
#[derive(Clone, Copy, Debug)]
pub struct Cpu(pub &'static dyn Engine);

impl Accelerator for Cpu {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn can(&self, _: &Work) -> bool {
        true
    }

    fn run(&self, work: &mut Work) -> Result<(), String> {
        work.carry_out(self.0)
    }

    fn is_cpu(&self) -> bool {
        true
    }

    fn lanes(&self) -> usize {
        std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2))
    }

    fn expected(&self) -> (u64, u64) {
        // A byte of an output from one input, at some 40 GB/s.
        (100, 24)
    }
}

/// What is told when work has ended: the work with its buffers, and how it ended; with success, by whom: the place of its
/// [`Account`].
pub type Done = Box<dyn FnOnce(Work, Result<usize, Failure>) + Send>;

/// An accelerator, and what is known of it.
struct Member {
    accelerator: Box<dyn Accelerator>,
    name: Arc<str>,
    is_cpu: bool,
    /// Nanoseconds for a task, whatever it is.
    for_any: u64,
    queue: Queue,
    /// Picoseconds for a unit, by kind of work.
    per_unit: [AtomicU64; Work::KINDS],
    failures: AtomicU64,
    /// Nanoseconds since the beginning until which it stands aside.
    aside_until: AtomicU64,
    done: AtomicU64,
    /// Tasks that others have done for it, and that it has come back with since.
    late: AtomicU64,
}

/// What one accelerator has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Account {
    /// Its name.
    pub name: Arc<str>,
    /// Tasks done.
    pub done: u64,
    /// Tasks that it came back with when another had them already.
    pub late: u64,
    /// Tasks that it has not come back with, and that others have.
    pub stuck: usize,
    /// Whether it stands aside now, because it failed.
    pub aside: bool,
    /// Tasks that wait for it.
    pub waiting: usize,
}

struct Inner {
    /// From the first on, as many as were added: who submits looks at them without a lock.
    members: [OnceLock<Member>; MEMBERS_MAX],
    begun: Instant,
    /// Who looks after those that may hang.
    watch: Watch,
}

/// Accelerators with their queues.
pub struct Dispatcher {
    inner: Arc<Inner>,
}

impl fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.accounts()).finish()
    }
}

impl Default for Dispatcher {
    /// The best engine of this CPU, and the portable one.
    fn default() -> Self {
        let dispatcher = Self::new();
        dispatcher.add(Cpu(engine::best()));
        if let Ok(portable) = engine::select(engine::Choice::Portable)
            && portable.name() != engine::best().name()
        {
            dispatcher.add(Cpu(portable));
        }
        dispatcher
    }
}

impl Member {
    fn new(accelerator: Box<dyn Accelerator>) -> Self {
        let (for_any, per_units) = accelerator.expected();
        let per_unit = per_units.saturating_mul(1000) / 1024;
        Self {
            name: accelerator.name().into(),
            is_cpu: accelerator.is_cpu(),
            for_any,
            queue: Queue::default(),
            per_unit: std::array::from_fn(|_| AtomicU64::new(per_unit.max(1))),
            failures: AtomicU64::new(0),
            aside_until: AtomicU64::new(0),
            done: AtomicU64::new(0),
            late: AtomicU64::new(0),
            accelerator,
        }
    }

    /// Nanoseconds that it should take for so much work of a kind, once begun.
    fn takes(&self, kind: usize, units: u64) -> u64 {
        let per_unit = self.per_unit[kind].load(Ordering::Relaxed);
        self.for_any.saturating_add(units.saturating_mul(per_unit) / 1000)
    }

    /// How long it may have a task that should take so many nanoseconds.
    fn patience(&self, takes: u64) -> Duration {
        let long = Duration::from_nanos(takes.saturating_mul(LATE)).min(LATE_MAX);
        long.max(self.accelerator.patience())
    }

    /// Lets it do a task: since when, if that was timed, and what it says.
    fn carry_out(&self, task: &mut Task) -> (Option<Instant>, Result<(), String>) {
        let done = self.done.load(Ordering::Relaxed);
        let timed = done < TIMED_ALL
            || done.is_multiple_of(TIMED)
            || self.takes(task.kind, task.units) >= LONG;
        let begun = timed.then(Instant::now);
        (begun, self.accelerator.run(&mut task.work))
    }

    fn learn(&self, kind: usize, units: u64, took: u64) {
        let took = took.saturating_sub(self.for_any);
        let seen = (took.saturating_mul(1000) / units.max(1)).max(1);
        let old = self.per_unit[kind].load(Ordering::Relaxed);
        // One that was held up once is not slow.
        let seen = seen.min(old.saturating_mul(8));
        self.per_unit[kind].store((old * 7 + seen).div_ceil(8), Ordering::Relaxed);
    }
}

/// An accelerator's number, what is known of it, and whether the task is done at once.
type Chosen<'a> = (usize, &'a Member, bool);
/// Which accelerators have tried, by number.
type Tried = u64;
/// Accelerators at most.
const MEMBERS_MAX: usize = Tried::BITS as usize;

impl Dispatcher {
    /// One without accelerators.
    pub fn new() -> Self {
        let members = [const { OnceLock::new() }; MEMBERS_MAX];
        Self { inner: Arc::new(Inner { members, begun: Instant::now(), watch: Watch::default() }) }
    }

    /// One more, at most 64.
    pub fn add(&self, accelerator: impl Accelerator + 'static) {
        let mut member = Member::new(Box::new(accelerator));
        for place in &self.inner.members {
            match place.set(member) {
                Ok(()) => return,
                Err(back) => member = back,
            }
        }
    }

    /// What each has done.
    pub fn accounts(&self) -> Vec<Account> {
        let now = self.inner.now();
        let account = |member: &Member| Account {
            name: Arc::clone(&member.name),
            done: member.done.load(Ordering::Relaxed),
            late: member.late.load(Ordering::Relaxed),
            stuck: member.queue.stuck(),
            aside: member.aside_until.load(Ordering::Relaxed) > now,
            waiting: member.queue.waiting(),
        };
        self.inner.members().map(account).collect()
    }

    /// Takes work; `done` is called once, here or in another thread, and must not wait.
    pub fn submit(
        &self,
        work: Work,
        done: impl FnOnce(Work, Result<usize, Failure>) + Send + 'static,
    ) {
        match work.check() {
            Ok(()) => self.inner.give(Task::new(work), done),
            Err(what) => done(work, Err(Failure::Shape(what))),
        }
    }

    /// Does work, and waits for it. What the CPU is chosen for is done in this thread.
    pub fn run(&self, work: Work) -> (Work, Result<usize, Failure>) {
        if let Err(what) = work.check() {
            return (work, Err(Failure::Shape(what)));
        }
        let mut task = Task::new(work);
        loop {
            let Some((i, member, at_once)) = self.inner.choose(&mut task, true) else {
                let failure = self.inner.failure(&mut task);
                return (task.work, Err(failure));
            };
            if at_once {
                if self.inner.attempt(member, &mut task) {
                    return (task.work, Ok(i));
                }
                continue;
            }
            let (to, from) = sync_channel(1);
            let done: Done = Box::new(move |work, result| drop(to.send((work, result))));
            member.queue.push(Job { task, done }, &self.inner, i);
            // Who takes a job ends it.
            return from.recv().expect("a job is always ended");
        }
    }
}

impl Inner {
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Gives a job to whoever should be through with it first, of those that have not tried; and ends it if there is nobody.
    /// Memory for who is told is taken only where the job is queued.
    fn give(
        self: &Arc<Self>,
        mut task: Task,
        done: impl FnOnce(Work, Result<usize, Failure>) + Send + 'static,
    ) {
        loop {
            let Some((i, member, at_once)) = self.choose(&mut task, false) else {
                let failure = self.failure(&mut task);
                return done(task.work, Err(failure));
            };
            if !at_once {
                return member.queue.push(Job { task, done: Box::new(done) }, self, i);
            }
            if self.attempt(member, &mut task) {
                return done(task.work, Ok(i));
            }
        }
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().map_while(OnceLock::get)
    }

    /// Why nobody does a task.
    fn failure(&self, task: &mut Task) -> Failure {
        if let Some(what) = task.last.take() {
            return Failure::Failed(what);
        }
        let can_any = self.members().any(|member| member.accelerator.can(&task.work));
        if can_any { Failure::Busy } else { Failure::Nobody }
    }

    /// Who should be through with it first, of those that have not tried, and whether it is done at once. One that stands aside
    /// is taken where there is no other. Whoever is chosen has tried from then on. `waits`: the caller does nothing else
    /// meanwhile.
    fn choose(&self, task: &mut Task, waits: bool) -> Option<Chosen<'_>> {
        let (kind, units) = (task.kind, task.units);
        let mut best: Option<((bool, u64), Chosen<'_>)> = None;
        for (i, member) in self.members().enumerate() {
            if task.tried & (1 << i) != 0 || !member.accelerator.can(&task.work) {
                continue;
            }
            let takes = member.takes(kind, units);
            let waking = member.queue.waking();
            // What a wake-up takes is seen where somebody is woken: now and then, also where that took long the last time.
            let probes = member.done.load(Ordering::Relaxed).is_multiple_of(PROBES);
            let short = takes <= AT_ONCE || takes <= 2 * waking && !probes;
            let at_once = member.is_cpu && (waits || short);
            let is_stuck = || member.queue.stuck() >= member.accelerator.lanes().max(1);
            if !at_once && (member.queue.waiting() >= QUEUE_MAX || !member.is_cpu && is_stuck()) {
                continue;
            }
            let end = if at_once {
                takes
            } else {
                let backlog = member.queue.backlog() / member.accelerator.lanes().max(1) as u64;
                takes.saturating_add(backlog).saturating_add(waking)
            };
            let until = member.aside_until.load(Ordering::Relaxed);
            let aside = until != 0 && until > self.now();
            if best.is_none_or(|(key, _)| (aside, end) < key) {
                best = Some(((aside, end), (i, member, at_once)));
            }
        }
        let (_, chosen) = best?;
        task.tried |= 1 << chosen.0;
        Some(chosen)
    }

    /// Lets one do a task; whether it did.
    fn attempt(&self, member: &Member, task: &mut Task) -> bool {
        let (begun, result) = member.carry_out(task);
        self.judge(member, task, begun, result)
    }

    /// Remembers how a task went with one; whether it did it.
    fn judge(
        &self,
        member: &Member,
        task: &mut Task,
        begun: Option<Instant>,
        result: Result<(), String>,
    ) -> bool {
        match result {
            Ok(()) => {
                if let Some(begun) = begun {
                    member.learn(task.kind, task.units, begun.elapsed().as_nanos() as u64);
                }
                // Written only where there is something to write: others read them.
                if member.failures.load(Ordering::Relaxed) != 0 {
                    member.failures.store(0, Ordering::Relaxed);
                    member.aside_until.store(0, Ordering::Relaxed);
                }
                member.done.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(what) => {
                self.put_aside(member, 1);
                task.last = Some(format!("{}: {what}", member.name));
                false
            }
        }
    }

    /// One hangs, which is as bad as three failures; but from then on as one.
    fn hangs(&self, member: &Member) {
        let failures = member.failures.load(Ordering::Relaxed);
        self.put_aside(member, FAILURES.saturating_sub(failures).max(1));
    }

    /// One has failed so many times more.
    fn put_aside(&self, member: &Member, times: u64) {
        let failures = member.failures.fetch_add(times, Ordering::Relaxed) + times;
        if failures >= FAILURES {
            let times = 1 << (failures - FAILURES).min(16);
            let aside = ASIDE.saturating_mul(times).min(ASIDE_MAX).as_nanos() as u64;
            member.aside_until.store(self.now() + aside, Ordering::Relaxed);
        }
    }
}

impl Drop for Dispatcher {
    /// What was submitted is done first.
    fn drop(&mut self) {
        self.inner.members().for_each(|member| member.queue.end());
        self.inner.watch.end();
    }
}
