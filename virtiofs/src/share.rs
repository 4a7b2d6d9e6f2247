//! Devices of one process share its processors by weight. `fair.rs` says who is next; here are the threads, and what they use is measured.
//!
//! So many threads serve at once as there are places. A thread keeps its place from one request to the next until it is a
//! quantum ahead of somebody who waits. A tenant that has asked for little lately does not wait at all: so many more
//! threads may serve as there are places, for those.
//!
//! A tenant is charged for each request what one of its kind costs as a rule (`price.rs`). That is measured: the processor that a thread
//! used (`usage.rs`), and what it waited in a request with its place, not what it was kept from the processor by others. Who uses far more than the price is
//! charged for that. As long as nobody waits for a place nothing is measured; reading these clocks are system calls. What is used between two turns
//! nobody is charged for: who has the smallest share changes most often.
//!
//! Who has the places is known behind one lock, and a thread that the kernel takes from the processor while it has that keeps all others from asking, for
//! milliseconds on a busy machine. A tenant that asks for little (*light*, in `fair.rs`) does not wait for that either: it was left a *pass* for one turn, and what
//! that cost is charged at its end, or, if somebody has the lock then too, later.
//!
//! The kernel is told as well who asks for little (`slice.rs`): where threads of tenants want more processors than there are, it is the kernel that decides.
//!
//! One of those that wait looks after those that have the places, each [`WATCH`]: one that waits in a request, for a disk or for
//! other nodes, loses its place, and one that works on is charged for what it has used so far.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::fair::{Account, Fair};
use crate::price::{self, Kind, Prices};
use crate::slice::Slice;
use crate::usage::{Reading, Thread};

/// Who waits for a place looks so often after those that have one.
const WATCH: Duration = Duration::from_millis(4);
/// A thread asks so often whether it may keep its place. Whoever is taken from the processor while it asks keeps all others from asking: so it
/// is done seldom, and no clock is read meanwhile.
const CHECK: u64 = 50_000;
/// Charged for waiting between two looks at most, in nanoseconds; and where it is not known who kept the thread.
const WAIT_MAX: u64 = 4_000_000;
const DOUBT_MAX: u64 = 100_000;
/// One of which the kernel does not say what it does, and that has used nothing for so long, in nanoseconds, is taken to wait.
const STILL: u64 = 100_000_000;
/// What is between the two clocks, in nanoseconds, without anybody's having waited.
const NOISE: u64 = 50_000;
/// Requests after which one that nobody wants to have its place looks at the clock, and how long it has it before the kernel is told that it is
/// busy.
const BUSY: (u32, Duration) = (32, Duration::from_millis(1));
/// What a tenant may use by passes, in nanoseconds, before it is charged.
const OWED_MAX: u64 = 200_000;
/// Weights.
pub const WEIGHT_MAX: u32 = 1000;

thread_local! {
    /// How many requests the calling thread has served, of those that might have been measured.
    static SERVED: Cell<u32> = const { Cell::new(0) };
}

/// What a thread used from one reading to the other, `passed` nanoseconds later: of a processor, and asleep as far as that `keeps` others from a place.
fn cost(before: Reading, after: Reading, passed: u64, keeps: bool) -> u64 {
    let used = after.processor.saturating_sub(before.processor);
    let waited = passed.saturating_sub(used);
    if waited <= NOISE || !keeps {
        return used;
    }
    let (kept_off, Some((before, after))) = (
        before.kept_off.zip(after.kept_off).map(|(before, after)| after.saturating_sub(before)),
        before.switches.zip(after.switches),
    ) else {
        return used;
    };
    // Who did not go to sleep was kept from the processor by others. Of who did, the kernel knows for how long it was, after that.
    let most = match (after.slept > before.slept, kept_off, after.pushed > before.pushed) {
        (false, ..) => 0,
        (true, Some(kept_off), _) => waited.saturating_sub(kept_off).min(WAIT_MAX),
        (true, None, true) => DOUBT_MAX,
        (true, None, false) => WAIT_MAX,
    };
    used + waited.min(most)
}

/// A place that somebody has.
#[derive(Debug)]
struct Place {
    tenant: usize,
    account: Account,
    thread: Thread,
    /// When it was charged last, in nanoseconds since the start.
    at: u64,
    /// The prices of all requests that were begun in it, in nanoseconds, and what of that was charged.
    asked: Arc<AtomicU64>,
    charged: u64,
    /// What its thread had used then. None while nobody waits for the place.
    measured: Option<Reading>,
    /// Somebody came for it since it was charged last. What was before that was charged by the clock.
    settled: bool,
    /// It waits in a request, and others have its place.
    lost: bool,
}

impl Place {
    /// The prices that were not charged yet.
    fn due(&self) -> u64 {
        self.asked.load(Ordering::Relaxed).saturating_sub(self.charged)
    }

    /// What is due from the last time until now, if it is known of what.
    fn cost(&self, now: u64, reading: Option<Reading>) -> Option<f64> {
        let due = self.due() as f64;
        let Some((before, after)) = self.measured.zip(reading) else {
            return self.settled.then_some(due);
        };
        // One that has no place keeps nobody from it.
        let passed = now.saturating_sub(self.at);
        Some(price::bill(due, cost(before, after, passed, !self.lost) as f64))
    }
}

#[derive(Debug)]
struct Guests {
    /// Given a place that no thread has taken yet.
    given: Vec<Account>,
    wake: Arc<Condvar>,
    /// For how long its threads have waited for places, in nanoseconds.
    waited: u64,
    ease: Arc<Ease>,
}

/// What a tenant's threads may know without the lock.
#[derive(Debug, Default)]
struct Ease {
    /// It may take one turn without asking, whoever has the lock.
    pass: AtomicBool,
    /// What such turns took and it was not charged yet, in nanoseconds.
    owed: AtomicU64,
    /// It is not light.
    floods: AtomicBool,
    /// Others ask as well.
    rivals: AtomicBool,
}

impl Ease {
    /// What the kernel shall know of its threads.
    fn slice(&self) -> Slice {
        match (self.floods.load(Ordering::Relaxed), self.rivals.load(Ordering::Relaxed)) {
            (false, _) => Slice::Short,
            (true, false) => Slice::Usual,
            (true, true) => Slice::Last,
        }
    }
}

#[derive(Debug)]
struct State {
    fair: Fair,
    tenants: Vec<Guests>,
    /// By number; numbers are used again.
    places: Vec<Option<Place>>,
    /// When somebody looked after those last.
    looked: u64,
    /// One of those that wait does so.
    watched: bool,
}

impl State {
    /// Gives free places away; those that are to be woken. Not here: they would meet the lock.
    fn give(&mut self, now: u64) -> Vec<Arc<Condvar>> {
        let mut wakes = Vec::new();
        while let Some((tenant, account)) = self.fair.next(now) {
            let guests = &mut self.tenants[tenant];
            guests.given.push(account);
            wakes.push(guests.wake.clone());
        }
        wakes
    }

    fn take(&mut self, place: Place) -> usize {
        if let Some(free) = self.places.iter().position(Option::is_none) {
            self.places[free] = Some(place);
            return free;
        }
        self.places.push(Some(place));
        self.places.len() - 1
    }

    /// Charges for what was used since the last time, as far as `reading` says, from which it is measured on.
    fn charge(&mut self, number: usize, now: u64, reading: Option<Reading>) {
        self.fair.at(now);
        let Some(place) = self.places.get_mut(number).and_then(Option::as_mut) else { return };
        let passed = now.saturating_sub(place.at);
        let cost = place.cost(now, reading);
        let due = place.due() as f64;
        place.charged += due as u64;
        place.settled = false;
        match cost {
            Some(cost) if !self.fair.is_sought() => {
                self.fair.charge_alone(place.tenant, &mut place.account, cost);
            }
            Some(cost) => self.fair.charge(place.tenant, &mut place.account, cost),
            None if place.lost => {}
            None => {
                let cost = price::bill(due, passed as f64);
                self.fair.charge_alone(place.tenant, &mut place.account, cost);
            }
        }
        let old = place.measured;
        place.at = now;
        place.measured = reading.map(|new| Reading {
            kept_off: new.kept_off.or(old.and_then(|old| old.kept_off)),
            switches: new.switches.or(old.and_then(|old| old.switches)),
            ..new
        });
    }

    /// Somebody comes: what was used so far by those that are not measured, by the clock. Where nobody has waited until now, all are
    /// measured anew, from their next look at the clock on: what they had been measured since is of a time in which they took
    /// nothing from anybody.
    fn settle(&mut self, now: u64) {
        let sought = self.fair.is_sought();
        for number in 0..self.places.len() {
            let Some(place) = &mut self.places[number] else { continue };
            if !sought {
                place.measured = None;
            }
            if place.measured.is_none() {
                self.charge(number, now, None);
            }
            if let Some(place) = &mut self.places[number] {
                place.settled = true;
            }
        }
    }

    /// Somebody who waits is to look after the places, if nobody does.
    fn call_watcher(&self) {
        if self.watched {
            return;
        }
        let mut all = self.tenants.iter().enumerate();
        if let Some((_, guests)) = all.find(|(tenant, _)| self.fair.waits(*tenant)) {
            guests.wake.notify_one();
        }
    }

    /// A turn of a tenant has ended: whether it may take the next one without asking.
    fn leave_pass(&self, tenant: usize) {
        self.note(tenant);
        self.tenants[tenant].ease.pass.store(self.fair.is_light(tenant), Ordering::Relaxed);
    }

    /// What its threads shall know.
    fn note(&self, tenant: usize) {
        let ease = &self.tenants[tenant].ease;
        let floods = !self.fair.is_light(tenant);
        ease.floods.store(floods, Ordering::Relaxed);
        ease.rivals.store(floods && self.fair.has_rivals(tenant), Ordering::Relaxed);
    }

    /// Charges a tenant for what its passes took.
    fn collect(&mut self, tenant: usize, now: u64) {
        let owed = self.tenants[tenant].ease.owed.swap(0, Ordering::Relaxed);
        if owed > 0 {
            self.fair.at(now);
            self.fair.pass(tenant, owed as f64);
        }
    }

    /// Whether a place may be kept, after what was used that was not charged yet: in so much time, of which nobody knows whether it was used.
    fn goes_on(&self, number: usize, passed: u64, now: u64) -> bool {
        let place = self.places.get(number).and_then(Option::as_ref);
        place.is_some_and(|place| {
            let more = price::bill(place.due() as f64, passed as f64);
            !place.lost && self.fair.goes_on(place.tenant, &place.account, more, now)
        })
    }

    /// Whether others have that place, though its thread is still in a request.
    fn has_lost(&self, number: usize) -> bool {
        self.places.get(number).and_then(Option::as_ref).is_some_and(|place| place.lost)
    }

    /// Those of which nothing was heard for a while.
    fn silent(&mut self, now: u64) -> Vec<(usize, Thread, u64)> {
        let watch = nanos(WATCH);
        if now.saturating_sub(self.looked) < watch {
            return Vec::new();
        }
        self.looked = now;
        let places = self.places.iter().enumerate();
        let taken = places.filter_map(|(number, place)| Some((number, place.as_ref()?)));
        let silent =
            taken.filter(|(_, place)| !place.lost && now.saturating_sub(place.at) >= watch);
        silent.map(|(number, place)| (number, place.thread, place.at)).collect()
    }

    /// What a silent one has used, and whether it sleeps, as was seen meanwhile.
    ///
    /// Whether it has lost its place.
    fn judge(
        &mut self,
        number: usize,
        at: u64,
        now: u64,
        reading: Reading,
        sleeps: Option<bool>,
    ) -> bool {
        // It may be another's by now, or charged.
        let Some(place) = self.places[number].as_ref().filter(|place| place.at == at) else {
            return false;
        };
        let passed = now.saturating_sub(at);
        // One of which it is not known yet is looked at again.
        let used = place.measured.map(|before| reading.processor.saturating_sub(before.processor));
        let idle = used.is_some_and(|used| used < passed / 8);
        self.charge(number, now, Some(reading));
        let Some(place) = self.places[number].as_mut().filter(|place| !place.lost) else {
            return false;
        };
        let lost = idle && sleeps.unwrap_or(passed >= STILL);
        if lost {
            place.lost = true;
            self.fair.leave(place.tenant, std::mem::take(&mut place.account));
        }
        lost
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The places.
#[derive(Debug)]
pub struct Share {
    state: Mutex<State>,
    /// Threads that wait, of all.
    waiting: AtomicUsize,
    /// More have places than there are.
    crowded: AtomicBool,
    /// Threads that have lost their place in a request, and may not begin another in it.
    lost: AtomicUsize,
    prices: Prices,
    start: Instant,
}

impl Share {
    /// So many threads at once.
    pub fn new(places: usize) -> Arc<Self> {
        let (tenants, places_now) = (Vec::new(), Vec::new());
        let fair = Fair::new(places);
        let state = State { fair, tenants, places: places_now, looked: 0, watched: false };
        Arc::new(Self {
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            crowded: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            prices: Prices::new(),
            start: Instant::now(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        nanos(self.start.elapsed())
    }

    /// One more device.
    pub fn join(self: &Arc<Self>, weight: u32) -> Member {
        let mut state = self.state();
        let index = state.fair.join(weight.clamp(1, WEIGHT_MAX).into());
        let (given, wake, ease) = (Vec::new(), Arc::new(Condvar::new()), Arc::default());
        state.tenants.push(Guests { given, wake, waited: 0, ease: Arc::clone(&ease) });
        Member { share: self.clone(), index, ease }
    }
}

/// A device among those that share.
#[derive(Clone, Debug)]
pub struct Member {
    share: Arc<Share>,
    index: usize,
    ease: Arc<Ease>,
}

impl Member {
    /// Waits for a place.
    pub fn turn(&self) -> Turn {
        let share = &self.share;
        let pass = || self.ease.pass.swap(false, Ordering::Relaxed);
        let by_pass = || {
            let held = Held::Pass(Thread::own().processor());
            self.begun(held, Arc::default(), Slice::Short)
        };
        // Where somebody waits, somebody has the lock, or will have when this thread is in the middle of what it does with it.
        if self.is_sought() && pass() {
            return by_pass();
        }
        // Before anything is locked: to read these clocks takes system calls.
        let reading = if self.is_sought() { Reading::own() } else { None };
        let mut state = match share.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) if pass() => return by_pass(),
            Err(TryLockError::WouldBlock) => share.state(),
        };
        self.ease.pass.store(false, Ordering::Relaxed);
        let now = share.now();
        state.settle(now);
        state.collect(self.index, now);
        let asked = state.fair.ask(self.index, now);
        state.note(self.index);
        let Some(account) = asked else {
            return self.wait(state, now);
        };
        share.crowded.store(state.fair.is_crowded(), Ordering::Relaxed);
        let sought = self.is_sought();
        let place = self.place(account, reading.filter(|_| sought));
        let (asked, number) = (Arc::clone(&place.asked), state.take(place));
        drop(state);
        self.begun(Held::Place(number), asked, self.ease.slice())
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>, since: u64) -> Turn {
        let share = &self.share;
        share.waiting.fetch_add(1, Ordering::Relaxed);
        let wake = state.tenants[self.index].wake.clone();
        let account = loop {
            if let Some(account) = state.tenants[self.index].given.pop() {
                break account;
            }
            if state.watched {
                state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.watched = true;
            let (mut back, timeout) =
                wake.wait_timeout(state, WATCH).unwrap_or_else(PoisonError::into_inner);
            back.watched = false;
            state = if timeout.timed_out() { share.look(back) } else { back };
        };
        share.waiting.fetch_sub(1, Ordering::Relaxed);
        state.call_watcher();
        state.tenants[self.index].waited += share.now().saturating_sub(since);
        share.crowded.store(state.fair.is_crowded(), Ordering::Relaxed);
        drop(state);
        let measured = if self.is_sought() { Reading::own() } else { None };
        let place = self.place(account, measured);
        let (asked, number) = (Arc::clone(&place.asked), share.state().take(place));
        self.begun(Held::Place(number), asked, self.ease.slice())
    }

    fn place(&self, account: Account, measured: Option<Reading>) -> Place {
        let (tenant, thread, at) = (self.index, Thread::own(), self.share.now());
        let (asked, charged, settled, lost) = (Arc::default(), 0, false, false);
        Place { tenant, account, thread, at, asked, charged, measured, settled, lost }
    }

    fn begun(&self, held: Held, asked: Arc<AtomicU64>, slice: Slice) -> Turn {
        let check = self.share.now() + CHECK;
        let (member, since) = (self.clone(), Instant::now());
        Turn { member, held, asked, since, requests: 0, slice, check }
    }

    /// Whether anybody waits for a place: then nobody should look for requests in it.
    pub fn is_sought(&self) -> bool {
        self.share.waiting.load(Ordering::Relaxed) > 0
    }

    /// The time that it was charged for: for tests and figures.
    pub fn used(&self) -> Duration {
        let charged = self.share.state().fair.charged(self.index) as u64;
        Duration::from_nanos(charged + self.ease.owed.load(Ordering::Relaxed))
    }

    /// For how long its threads have waited for a place, all of them together.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.share.state().tenants[self.index].waited)
    }
}

impl Share {
    /// Looks after those that have places.
    fn look<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let silent = state.silent(self.now());
        if silent.is_empty() {
            return state;
        }
        drop(state);
        let seen: Vec<_> = silent
            .into_iter()
            .filter_map(|(number, thread, at)| {
                Some((number, at, Reading::of(thread)?, thread.sleeps()))
            })
            .collect();
        let mut state = self.state();
        let now = self.now();
        let judged =
            seen.into_iter().map(|(number, at, r, sleeps)| state.judge(number, at, now, r, sleeps));
        let lost = judged.filter(|lost| *lost).count();
        self.lost.fetch_add(lost, Ordering::Relaxed);
        state.give(now).iter().for_each(|wake| wake.notify_one());
        self.crowded.store(state.fair.is_crowded(), Ordering::Relaxed);
        state
    }
}

/// By what somebody serves requests.
#[derive(Debug)]
enum Held {
    /// The place of that number.
    Place(usize),
    /// A pass, and what its thread had used when it took it, in nanoseconds.
    Pass(Option<u64>),
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    member: Member,
    held: Held,
    /// The prices of its requests so far, in nanoseconds.
    asked: Arc<AtomicU64>,
    since: Instant,
    /// Served since then.
    requests: u32,
    slice: Slice,
    /// When it asks again whether it may go on.
    check: u64,
}

impl Turn {
    /// What the kernel should be told of the thread that has it: whether it is one that is waited for, or one that is busy.
    pub fn slice(&self) -> Slice {
        self.slice
    }

    /// Ends it. What the kernel should be told of the thread, which goes to sleep.
    pub fn end(self) -> Slice {
        let ease = Arc::clone(&self.member.ease);
        drop(self);
        ease.slice()
    }

    /// A request is served in it now: it is charged what that costs as a rule. Something to be [ended](Sample::end) when it is done, if it is measured.
    pub fn begins(&self, opcode: u32, bytes: u64) -> Option<Sample> {
        let (share, kind) = (&self.member.share, Kind::new(opcode, bytes));
        self.asked.fetch_add(share.prices.of(kind) as u64, Ordering::Relaxed);
        if !self.member.is_sought() {
            return None;
        }
        let number = SERVED.get();
        SERVED.set(number.wrapping_add(1));
        let before = if share.prices.wants(kind, number) { Reading::own() } else { None };
        before.map(|before| Sample { share: Arc::clone(share), kind, at: share.now(), before })
    }

    /// Whether it may be kept for one more request.
    pub fn goes_on(&mut self) -> bool {
        let share = &self.member.share;
        // A pass is for one request.
        let Held::Place(number) = self.held else { return false };
        let quiet = !self.member.is_sought() && !share.crowded.load(Ordering::Relaxed);
        if quiet && share.lost.load(Ordering::Relaxed) > 0 && share.state().has_lost(number) {
            return false;
        }
        if quiet {
            self.requests += 1;
            if self.requests.is_multiple_of(BUSY.0)
                && self.slice == Slice::Short
                && self.since.elapsed() >= BUSY.1
            {
                self.slice = Slice::Usual;
            }
            return true;
        }
        let now = share.now();
        if now < self.check {
            return true;
        }
        let state = share.state();
        let place = state.places.get(number).and_then(Option::as_ref);
        let at = place.filter(|place| place.measured.is_some()).map(|place| place.at);
        // By the clock on the wall, which costs nothing. What it really was is asked for when that would end the turn.
        let mut goes_on = at.is_some_and(|at| state.goes_on(number, now.saturating_sub(at), now));
        drop(state);
        if !goes_on {
            let reading = Reading::own();
            let mut state = share.state();
            let now = share.now();
            state.charge(number, now, reading);
            goes_on = state.goes_on(number, 0, now);
        }
        self.check = share.now() + CHECK;
        goes_on
    }
}

/// A request that is measured.
#[derive(Debug)]
pub struct Sample {
    share: Arc<Share>,
    kind: Kind,
    at: u64,
    before: Reading,
}

impl Sample {
    /// The calling thread, which has begun it, has served it.
    pub fn end(self) {
        let passed = self.share.now().saturating_sub(self.at);
        if let Some(after) = Reading::own() {
            self.share.prices.learn(self.kind, cost(self.before, after, passed, true) as f64);
        }
    }
}

impl Turn {
    /// The end of a turn by a pass, which kept nobody from a place.
    fn end_pass(&self, before: Option<u64>) {
        let used = Thread::own().processor().zip(before).map(|(now, before)| now - before);
        let used = used.unwrap_or_else(|| nanos(self.since.elapsed()));
        let used = price::bill(self.asked.load(Ordering::Relaxed) as f64, used as f64) as u64;
        let Member { share, index, ease } = &self.member;
        let owed = ease.owed.fetch_add(used, Ordering::Relaxed) + used;
        let mut state = match share.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) if owed < OWED_MAX => {
                ease.pass.store(true, Ordering::Relaxed);
                return;
            }
            Err(TryLockError::WouldBlock) => share.state(),
        };
        state.collect(*index, share.now());
        state.leave_pass(*index);
    }

    fn end_place(&self, number: usize) {
        let share = &self.member.share;
        let place = |state: &State| {
            let place = state.places.get(number).and_then(Option::as_ref);
            place.map(|place| (place.thread, place.measured.is_some()))
        };
        // The watch may end the turn of another thread.
        let seen = place(&share.state());
        let reading = match seen {
            Some((thread, true)) => Reading::of(thread),
            _ => None,
        };
        let mut state = share.state();
        let now = share.now();
        state.charge(number, now, reading);
        match state.places.get_mut(number).and_then(Option::take) {
            Some(place) if place.lost => {
                share.lost.fetch_sub(1, Ordering::Relaxed);
            }
            Some(place) => state.fair.leave(place.tenant, place.account),
            None => {}
        }
        let wakes = state.give(now);
        state.leave_pass(self.member.index);
        share.crowded.store(state.fair.is_crowded(), Ordering::Relaxed);
        drop(state);
        wakes.iter().for_each(|wake| wake.notify_one());
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        match self.held {
            Held::Place(number) => self.end_place(number),
            Held::Pass(before) => self.end_pass(before),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::Switches;

    #[test]
    fn threads_take_turns() {
        let share = Share::new(2);
        let at_once = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        std::thread::scope(|scope| {
            for weight in 1..=3 {
                let member = share.join(weight);
                for _ in 0..3 {
                    let (member, at_once) = (member.clone(), at_once.clone());
                    scope.spawn(move || {
                        for _ in 0..50 {
                            let mut turn = member.turn();
                            for _ in 0..20 {
                                let now = at_once.0.fetch_add(1, Ordering::SeqCst) + 1;
                                at_once.1.fetch_max(now, Ordering::SeqCst);
                                std::hint::spin_loop();
                                at_once.0.fetch_sub(1, Ordering::SeqCst);
                                if now % 2 == 0 || !turn.goes_on() {
                                    break;
                                }
                            }
                        }
                    });
                }
            }
        });
        assert_eq!(share.waiting.load(Ordering::Relaxed), 0);
        let state = share.state();
        assert!(state.fair.is_idle());
        assert!(state.places.iter().all(Option::is_none));
        assert!(state.tenants.iter().all(|tenant| tenant.given.is_empty()));
    }

    /// Until it is seen that its thread waits, and no longer; what it does then nobody is charged twice for.
    #[test]
    fn who_waits_in_a_request_loses_its_place() {
        let share = Share::new(1);
        let (stuck, other) = (share.join(1000), share.join(1));
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut turn = stuck.turn();
            tell.send(()).unwrap();
            let _ = ended.recv();
            assert!(!turn.goes_on(), "others have its place, though nobody waits now");
            drop(turn);
            stuck.used()
        });
        told.recv().unwrap();
        // One that asks for little would not wait.
        share.state().fair.pass(other.index, 1e15);
        for _ in 0..3 {
            // As long as it takes: the other one does not come back before it is told to.
            let mut turn = other.turn();
            turn.goes_on();
        }
        assert!(other.waited() > Duration::ZERO, "it had to wait for that");
        drop(end);
        let used = thread.join().unwrap();
        assert!(used < Duration::from_secs(10), "{used:?}");
        assert!(share.state().fair.is_idle());
    }

    /// One that asks for little is not kept by whoever has the lock; one that asks for much is, and a pass is for one turn.
    #[test]
    fn who_need_not_wait_waits_for_no_lock() {
        let share = Share::new(1);
        let (flood, polite) = (share.join(1), share.join(1));
        let taken = |member: &Member| member.ease.pass.load(Ordering::Relaxed);
        {
            // The one has used its share many times over, beside somebody who waits; the other one nothing.
            let mut state = share.state();
            let mut account = state.fair.ask(flood.index, 0).expect("a free place");
            state.fair.charge(flood.index, &mut account, 1e9);
            state.fair.leave(flood.index, account);
            let account = state.fair.ask(flood.index, 0).expect("a free place");
            state.fair.leave(flood.index, account);
            state.leave_pass(flood.index);
            state.leave_pass(polite.index);
        }
        assert!(taken(&polite) && !taken(&flood));
        let (tell, told) = std::sync::mpsc::channel();
        let locked = share.state();
        let thread = std::thread::spawn(move || {
            let mut turn = polite.turn();
            assert!(!turn.goes_on() && !taken(&polite));
            tell.send(()).unwrap();
            drop(turn);
            (polite.used(), taken(&polite))
        });
        told.recv_timeout(Duration::from_secs(120)).expect("it has a turn all the same");
        drop(locked);
        let (used, again) = thread.join().unwrap();
        assert!(used > Duration::ZERO && again, "{used:?}");
        assert!(share.state().fair.is_idle());
    }

    /// Not even at the end of its turn: what that cost is charged when the lock is free, and no more than so much is left until then.
    #[test]
    fn who_need_not_wait_pays_later_where_others_have_the_lock() {
        let share = Share::new(1);
        let polite = share.join(1);
        drop(polite.turn());
        assert!(polite.ease.pass.load(Ordering::Relaxed));
        let locked = share.state();
        let before = locked.fair.charged(polite.index);
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                drop(polite.turn());
                drop(polite.turn());
            });
            ended.join().unwrap();
        });
        assert!(polite.ease.owed.load(Ordering::Relaxed) > 0);
        assert!(locked.fair.charged(polite.index) <= before, "nobody could charge it");
        drop(locked);
        drop(polite.turn());
        assert_eq!(polite.ease.owed.load(Ordering::Relaxed), 0);
        assert!(share.state().fair.charged(polite.index) > before);
        assert!(share.state().fair.is_idle());
    }

    /// Whatever a thread used meanwhile, as long as it is no multiple of that.
    #[test]
    fn a_request_is_charged_at_its_price() {
        let reading = |processor| Some(Reading { processor, kept_off: None, switches: None });
        let share = Share::new(1);
        let (member, other) = (share.join(1), share.join(1));
        let kind = Kind::new(15, 4096);
        (0..100).for_each(|_| share.prices.learn(kind, 20e3));
        let turn = member.turn();
        let Held::Place(number) = turn.held else { panic!("{turn:?}") };
        assert!(turn.begins(15, 4096).is_none(), "nobody waits, and nothing is measured");
        let mut state = share.state();
        // Somebody comes. What was until then is charged by the clock.
        let now = share.now();
        state.settle(now);
        assert!(state.fair.ask(other.index, now).is_some(), "one that has used nothing");
        assert!(state.fair.ask(other.index, now).is_none(), "and another thread of it waits");
        let before = state.fair.charged(member.index);
        drop(state);
        let serve = |measured: u64, due: f64| {
            turn.begins(15, 4096);
            turn.begins(15, 4096);
            let mut state = share.state();
            let before = state.fair.charged(member.index);
            state.charge(number, now, reading(measured));
            let charged = state.fair.charged(member.index) - before;
            assert!((charged - due).abs() < 2.0, "{charged} at {measured}");
        };
        assert!((share.state().fair.charged(member.index) - before).abs() < 1.0);
        serve(5_000_000, 40e3);
        serve(5_010_000, 40e3);
        serve(5_070_000, 40e3);
        serve(5_170_000, 40e3);
        // Five milliseconds, of which three times the price are let pass.
        serve(10_170_000, 4.88e6);
        // Nothing more was asked for: a request that goes on.
        let mut state = share.state();
        let before = state.fair.charged(member.index);
        state.charge(number, now, reading(11_170_000));
        assert!((state.fair.charged(member.index) - before - 1e6).abs() < 1.0);
    }

    /// One thread waits for the only place, and the other one's requests are measured.
    #[test]
    fn what_is_served_while_somebody_waits_is_learnt() {
        let share = Share::new(1);
        let member = share.join(1);
        let turn = member.turn();
        share.waiting.fetch_add(1, Ordering::Relaxed);
        let kind = Kind::new(3, 0);
        let guess = share.prices.of(kind);
        let (thread, work) = (Thread::own(), 3_000_000);
        for _ in 0..3 {
            let sample = turn.begins(3, 0).expect("nothing is known of it");
            let begun = thread.processor().unwrap();
            while thread.processor().unwrap() - begun < work {}
            sample.end();
        }
        let price = share.prices.of(kind);
        assert!(price >= work as f64 && price > guess, "{price}");
        share.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// One of them looks after the others at a time, and when it has its place the next one does: each of these gets it only when
    /// somebody has seen that the one before waits.
    #[test]
    fn whoever_looked_has_a_place_and_another_looks() {
        let share = Share::new(1);
        let all = Arc::new(std::sync::Barrier::new(8));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (member, all) = (share.join(1), all.clone());
                std::thread::spawn(move || {
                    let _turn = member.turn();
                    all.wait();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let state = share.state();
        assert!(state.fair.is_idle() && !state.watched);
        assert_eq!(share.lost.load(Ordering::Relaxed), 0);
    }

    /// It slept for a moment, on a lock say, and then others had the processor: that moment is what it kept its place from others.
    #[test]
    fn what_others_took_of_the_processor_is_not_charged() {
        let ms = 1_000_000;
        let reading = |used, kept_off, slept| Reading {
            processor: used,
            kept_off,
            switches: Some(Switches { slept, pushed: 0 }),
        };
        let cost = |kept_off, slept| {
            let (before, after) = (reading(0, Some(5 * ms), 0), reading(ms, kept_off, slept));
            cost(before, after, 10 * ms, true)
        };
        assert_eq!(cost(Some(13_900_000), 1), 1_100_000);
        assert_eq!(cost(Some(13_900_000), 0), ms, "it did not sleep at all");
        assert_eq!(cost(Some(5 * ms), 1), 5 * ms, "for so much at most, of what it slept");
        assert_eq!(cost(None, 1), 5 * ms, "the kernel does not say");
    }

    /// Who had to share once, and was alone for long after that, owes nothing for it.
    #[test]
    fn what_was_used_alone_after_others_went_is_not_owed() {
        let second = 1_000_000_000;
        let share = Share::new(1);
        let (long, other) = (share.join(1), share.join(1));
        let mut state = share.state();
        let reading = |processor| {
            Some(Reading { processor, kept_off: None, switches: Some(Default::default()) })
        };
        let place = |tenant: usize, account, at, measured| Place {
            tenant,
            account,
            thread: Thread::own(),
            at,
            asked: Arc::default(),
            charged: 0,
            measured,
            settled: false,
            lost: false,
        };
        let account = state.fair.ask(long.index, 0).expect("a free place");
        let number = state.take(place(long.index, account, 0, reading(0)));
        // It is alone for ten seconds; then the other one comes, and gets the place when this one has seen that.
        state.settle(10 * second);
        let at_once = state.fair.ask(other.index, 10 * second);
        state.charge(number, 10 * second, reading(10 * second));
        let place_of_long = state.places[number].take().expect("it has it");
        state.fair.leave(long.index, place_of_long.account);
        let account = at_once.or_else(|| state.fair.next(10 * second).map(|(_, account)| account));
        let number =
            state.take(place(other.index, account.expect("its turn"), 10 * second, reading(0)));
        assert!(state.fair.ask(long.index, 10 * second).is_none(), "it waits now");
        assert!(state.goes_on(number, 1000, 10 * second), "the other one has just begun");
        let credit = 50_000_000;
        assert!(!state.goes_on(number, credit, 10 * second + credit), "for what it may be ahead");
    }

    /// A request that works for long is charged for while it works.
    #[test]
    fn what_works_on_is_charged_for_what_it_has_used() {
        let share = Share::new(1);
        let long = share.join(1);
        let done = Arc::new(AtomicUsize::new(0));
        let (tell, told) = std::sync::mpsc::channel();
        let (worker, over) = (long.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            let turn = worker.turn();
            tell.send(()).unwrap();
            while over.load(Ordering::Relaxed) == 0 {
                std::hint::spin_loop();
            }
            drop(turn);
        });
        told.recv().unwrap();
        // Two may be let in beside it. Three are not.
        let others: Vec<_> = (0..3)
            .map(|_| {
                let (other, over) = (share.join(1), done.clone());
                std::thread::spawn(move || {
                    let _turn = other.turn();
                    while over.load(Ordering::Relaxed) == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
            })
            .collect();
        let since = Instant::now();
        while long.used() < Duration::from_millis(20) {
            assert!(since.elapsed() < Duration::from_secs(120), "{:?}", long.used());
            std::thread::sleep(Duration::from_millis(1));
        }
        done.store(1, Ordering::Relaxed);
        thread.join().unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(share.state().fair.is_idle());
    }
}
