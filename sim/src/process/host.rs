//! The host that LibFS has in a history: its threads are coroutines, and the world decides at every
//! [`point`](Host::point) which of them goes on; its memory is that of the node's region; its clocks are the world's.
//!
//! A thread runs until it *pauses* ([`Pause`]): the world does what is to be done, and sooner or later goes on with
//! it, with an [`Answer`].
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use base::random::Random;
use base::{Errno, Nanos};
use client::libfs::host::{Door, Host, Memory, NO_LIMIT};
use client::libfs::limits::Config;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use storage::format::control;
use storage::limits::OP_SLOTS;
use storage::media::{Media, Segment};
use storage::memory::{Mapped, MemoryRegion};

use super::call::{Reply, Task, Walked};

/// Bytes of a thread's stack.
const STACK: usize = 512 << 10;

/// Why a thread does not go on by itself.
#[derive(Debug)]
pub enum Pause {
    /// Others may go on here; for long, or for a moment.
    Point(bool),
    /// Nothing for so long.
    Sleep(Nanos),
    /// Waits while a word of shared memory is what it was.
    Shared(Shared, u64, u32, Nanos),
    /// Waits while a word of its process is what it was.
    Private(usize, Nanos),
    /// Wakes so many who wait for such a word.
    Woke(usize, u32),
    /// Rings the service's bell.
    Ring,
    /// An entry is in that log, from there on.
    Wrote(Shared, u64),
    /// Wants to attach.
    Attach,
    /// Wants an arena.
    Arena(u32),
    /// What shall it do?
    Next,
    /// That is done, and this was looked up before.
    Done(Reply, Vec<Walked>),
}

/// What the world answers.
#[derive(Debug)]
pub enum Answer {
    /// Go on.
    Go,
    /// A log segment, or none.
    Attached(Result<Shared, Errno>),
    /// An arena: `None` if it may not be mapped.
    Arena(Result<Option<Shared>, Errno>),
    /// Do this.
    Call(Box<Task>),
    /// There is nothing more to do.
    End,
}

/// What a thread knows of where it runs, without asking.
#[derive(Debug, Default)]
pub struct Facts {
    /// Realtime nanoseconds.
    pub realtime: Cell<Nanos>,
    /// The clock by which leases are judged, of the last tick.
    pub tick: Cell<Nanos>,
    /// The same clock, now.
    pub now: Cell<Nanos>,
    /// Its user.
    pub uid: Cell<u32>,
    /// Its number.
    pub thread: Cell<usize>,
    /// One in so many points is a pause; 0: none.
    pub chance: Cell<u64>,
    /// Which places of the code are narrow ([`Facts::is_narrow`]).
    pub narrow: Cell<Narrow>,
    /// It is inside an operation.
    pub inside: Cell<bool>,
    /// It writes from memory that others change meanwhile.
    pub shares: Cell<bool>,
    /// Points passed.
    pub points: Cell<u64>,
    /// How often it stood at a narrow place.
    stood: Cell<u64>,
    random: RefCell<Option<Random>>,
    yielder: Cell<Option<*const Yielder<Answer, Pause>>>,
}

/// One in so many places of the code is narrow...
const NARROW: u64 = 16;
/// ... and one in so many threads that come by stands there.
const NARROW_CHANCE: u64 = 3;
/// ... until each has stood so often: two that take leases from each other, and stand for longer than a lease is theirs for
/// certain, would go on for ever.
const NARROW_MOST: u64 = 500;

/// Which places of the code are narrow for a process.
#[derive(Clone, Copy, Default, Debug)]
pub enum Narrow {
    #[default]
    None,
    /// Some, by this key.
    Some(u64),
    /// All of a file.
    Of(&'static str),
}

impl Facts {
    /// Whether threads stand for long at this place of the code. What goes wrong only if one is held up between two
    /// certain accesses, and others do a lot meanwhile, is seldom met where all places are alike: a history has a few
    /// at which it happens time and again.
    fn is_narrow(&self, place: &Location<'_>) -> bool {
        if self.stood.get() >= NARROW_MOST {
            return false;
        }
        let key = match self.narrow.get() {
            Narrow::None => return false,
            Narrow::Some(key) => key,
            Narrow::Of(file) => return place.file().ends_with(file),
        };
        let at = u64::from(place.line()) << 32 | u64::from(place.column());
        let mixed = (at ^ key).wrapping_add(place.file().len() as u64).wrapping_mul(MIX);
        (mixed ^ mixed >> 29).wrapping_mul(MIX) >> 32 & (NARROW - 1) == 0
    }
}

/// An odd number with bits all over.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

thread_local! {
    /// The facts of the coroutine that runs now.
    static HERE: Cell<Option<*const Facts>> = const { Cell::new(None) };
}

/// A thread of a process.
pub struct Fiber {
    coroutine: Option<Coroutine<Answer, Pause, (), DefaultStack>>,
    /// See [`Facts`].
    pub facts: Box<Facts>,
}

impl std::fmt::Debug for Fiber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fiber").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Fiber {
    /// Of a thread that does not run.
    pub fn none() -> Self {
        Self { coroutine: None, facts: Box::default() }
    }

    /// Whether it does not run.
    pub fn is_none(&self) -> bool {
        self.coroutine.is_none()
    }

    /// A thread that has not begun to do this.
    pub fn new(random: Random, program: impl FnOnce() + 'static) -> Result<Self, String> {
        let stack = DefaultStack::new(STACK).map_err(|e| format!("no stack: {e}"))?;
        let facts = Box::<Facts>::default();
        *facts.random.borrow_mut() = Some(random);
        let coroutine = Coroutine::with_stack(stack, move |yielder, _: Answer| {
            here(|facts| facts.yielder.set(Some(std::ptr::from_ref(yielder))));
            program();
        });
        Ok(Self { coroutine: Some(coroutine), facts })
    }

    /// Goes on until the next pause; `None`: it has ended.
    pub fn resume(&mut self, answer: Answer) -> Option<Pause> {
        let coroutine = self.coroutine.as_mut()?;
        let before = HERE.replace(Some(std::ptr::from_ref(&*self.facts)));
        let result = coroutine.resume(answer);
        HERE.set(before);
        match result {
            CoroutineResult::Yield(pause) => Some(pause),
            CoroutineResult::Return(()) => {
                self.coroutine = None;
                None
            }
        }
    }

    /// Ends it where it is: nothing more of it runs, not even what it would do to clean up.
    pub fn kill(&mut self) {
        if let Some(mut coroutine) = self.coroutine.take() {
            // SAFETY: what lies on the stack is leaked, as by a process that is killed; nothing outside refers to
            // it (LibFS hands out no references to a caller's stack).
            unsafe { coroutine.force_reset() };
        }
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        self.kill();
    }
}

fn here<T>(then: impl FnOnce(&Facts) -> T) -> Option<T> {
    // SAFETY: set by `resume` for as long as the coroutine runs, whose `Fiber` owns the facts.
    HERE.get().map(|facts| then(unsafe { &*facts }))
}

/// How a byte of memory changes that others write to.
pub const CHANGED: u8 = 0x80;

/// Does this with memory that others change meanwhile, if it shall.
pub fn from_shared_memory<T>(shares: bool, then: impl FnOnce() -> T) -> T {
    here(|facts| facts.shares.set(shares));
    let done = then();
    here(|facts| facts.shares.set(false));
    done
}

/// Pauses the thread that runs, and gives the world's answer. Outside of any thread it goes on.
pub fn pause(pause: Pause) -> Answer {
    let yielder = here(|facts| facts.yielder.get()).flatten();
    let Some(yielder) = yielder else { return Answer::Go };
    // SAFETY: the yielder lives as long as its coroutine, which is the one that runs: `HERE` is of it.
    unsafe { (*yielder).suspend(pause) }
}

/// Shared memory: a segment of the node's region, as it is mapped. It stays what it was when the segment is removed.
#[derive(Clone)]
pub struct Shared {
    /// What a process leaks does not keep the region.
    region: Weak<MemoryRegion>,
    mapped: Mapped,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("mapped", &self.mapped).finish_non_exhaustive()
    }
}

impl Shared {
    /// The segment of that region.
    pub fn new(region: &Arc<MemoryRegion>, segment: Segment) -> Self {
        Self { region: Arc::downgrade(region), mapped: region.map(segment) }
    }

    /// Whether it is that one.
    pub fn is(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.region, &other.region) && self.mapped == other.mapped
    }

    /// Bytes, without a pause; fewer where there are no more.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let region = self.region.upgrade();
        let read = region.is_some_and(|region| region.mapped_read(self.mapped, at, &mut bytes));
        if read { bytes } else { Vec::new() }
    }

    /// Looks at all of it as it is, without a pause; None where it is no more.
    pub fn view<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        self.region.upgrade()?.mapped_view(self.mapped, look)
    }

    /// A word, without a pause.
    pub fn peek(&self, at: u64) -> u64 {
        self.region.upgrade().map_or(0, |region| region.mapped_load(self.mapped, at))
    }

    /// A word of 32 bits, without a pause.
    pub fn peek32(&self, at: u64) -> u32 {
        (self.peek(at & !7) >> ((at & 4) * 8)) as u32
    }

    /// Changes a word: nothing else happens in between.
    #[track_caller]
    fn change(&self, at: u64, to: impl FnOnce(u64) -> u64) -> u64 {
        SimHost::point();
        let Some(region) = self.region.upgrade() else { return 0 };
        let before = region.mapped_load(self.mapped, at);
        region.mapped_store(self.mapped, at, &to(before).to_le_bytes());
        if (control::IN_OP..control::in_op(OP_SLOTS)).contains(&at) {
            here(|facts| facts.inside.set(to_is_odd(region.mapped_load(self.mapped, at))));
        }
        before
    }
}

const fn to_is_odd(word: u64) -> bool {
    word & 1 == 1
}

impl Memory for Shared {
    #[track_caller]
    fn load(&self, at: u64, _: Ordering) -> u64 {
        SimHost::point();
        self.peek(at)
    }

    #[track_caller]
    fn store(&self, at: u64, value: u64, _: Ordering) {
        self.change(at, |_| value);
    }

    #[track_caller]
    fn swap(&self, at: u64, from: u64, to: u64) -> bool {
        self.change(at, |word| if word == from { to } else { word }) == from
    }

    #[track_caller]
    fn add(&self, at: u64, by: u64) -> u64 {
        self.change(at, |word| word.wrapping_add(by))
    }

    #[track_caller]
    fn raise(&self, at: u64, value: u64) {
        self.change(at, |word| word.max(value));
    }

    #[track_caller]
    fn set(&self, at: u64, bits: u64) -> u64 {
        self.change(at, |word| word | bits)
    }

    #[track_caller]
    fn clear(&self, at: u64, bits: u64) {
        self.change(at, |word| word & !bits);
    }

    #[track_caller]
    fn load32(&self, at: u64, _: Ordering) -> u32 {
        SimHost::point();
        self.peek32(at)
    }

    #[track_caller]
    fn store32(&self, at: u64, value: u32, _: Ordering) {
        let up = (at & 4) * 8;
        self.change(at & !7, |word| word & !(0xffff_ffff << up) | u64::from(value) << up);
    }

    #[track_caller]
    fn read(&self, at: u64, buf: &mut [u8]) -> bool {
        SimHost::point();
        // Half of it before others go on, so that what is copied may be torn.
        let (first, second) = buf.split_at_mut(buf.len() / 128 * 64);
        let copy = |at, buf: &mut [u8]| {
            let region = self.region.upgrade();
            region.is_some_and(|region| region.mapped_read(self.mapped, at, buf))
        };
        if first.is_empty() {
            return copy(at, second);
        }
        copy(at, first) && {
            SimHost::point();
            copy(at + first.len() as u64, second)
        }
    }

    #[track_caller]
    fn write(&self, at: u64, data: &[u8]) {
        SimHost::point();
        if let Some(region) = self.region.upgrade() {
            region.mapped_store(self.mapped, at, data);
        }
    }

    #[track_caller]
    fn write_persistent(&self, at: u64, data: &[u8]) {
        self.write(at, data);
        if let Some(region) = self.region.upgrade() {
            region.mapped_persist(self.mapped, at, data.len() as u64);
        }
    }

    fn fence(&self) {
        if let Some(region) = self.region.upgrade() {
            let _ = region.fence();
        }
    }

    fn wait(&self, at: u64, seen: u32, limit: u64) {
        if self.peek32(at) == seen {
            pause(Pause::Shared(self.clone(), at, seen, limit));
        }
    }

    fn wrote_entry(&self, at: u64) {
        pause(Pause::Wrote(self.clone(), at));
    }
}

/// hostd, as the world plays it.
#[derive(Clone, Copy, Debug)]
pub struct SimDoor;

impl Door for SimDoor {
    type Memory = Shared;

    fn arena(&self, _: &Config, arena: u32, _: u64) -> Result<Option<Shared>, Errno> {
        // As the real one does while the services restart.
        for _ in 0..1500 {
            match pause(Pause::Arena(arena)) {
                Answer::Arena(Err(Errno::AGAIN)) => {}
                Answer::Arena(answer) => return answer,
                _ => break,
            }
        }
        Err(Errno::IO)
    }

    fn ring(&self) {
        pause(Pause::Ring);
    }
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct SimHost;

impl Host for SimHost {
    type Memory = Shared;
    type Door = SimDoor;

    const SPINS: u32 = 1;

    fn realtime() -> u64 {
        here(|facts| facts.realtime.get()).unwrap_or(0)
    }

    fn tick() -> u64 {
        here(|facts| facts.tick.get()).unwrap_or(0)
    }

    fn monotonic() -> u64 {
        here(|facts| facts.now.get()).unwrap_or(0)
    }

    fn euid() -> u32 {
        here(|facts| facts.uid.get()).unwrap_or(0)
    }

    fn is_member(gid: u32) -> bool {
        here(|facts| crate::rights::Who::of(facts.uid.get()).in_group(gid)).unwrap_or(false)
    }

    fn thread() -> usize {
        here(|facts| facts.thread.get()).unwrap_or(0)
    }

    fn yield_now() {
        pause(Pause::Sleep(1000));
    }

    fn spin() {
        Self::point();
    }

    fn sleep(nanos: u64) {
        pause(Pause::Sleep(nanos));
    }

    fn wait(word: &AtomicU32, seen: u32, limit: u64) {
        if word.load(Ordering::SeqCst) == seen {
            let limit = if limit == NO_LIMIT { Nanos::MAX } else { limit };
            pause(Pause::Private(std::ptr::from_ref(word) as usize, limit));
        }
    }

    fn wake(word: &AtomicU32, count: u32) {
        pause(Pause::Woke(std::ptr::from_ref(word) as usize, count));
    }

    #[track_caller]
    fn point() {
        let place = Location::caller();
        let stops = here(|facts| {
            facts.points.set(facts.points.get() + 1);
            let narrow = facts.is_narrow(place);
            let chance = if narrow { NARROW_CHANCE } else { facts.chance.get() };
            let mut random = facts.random.borrow_mut();
            let stops = chance != 0 && random.as_mut().is_some_and(|r| r.chance(1, chance));
            facts.stood.set(facts.stood.get() + u64::from(stops && narrow));
            stops.then_some(narrow)
        });
        if let Some(long) = stops.flatten() {
            pause(Pause::Point(long));
        }
    }

    fn copied(bytes: &mut [u8]) {
        let at = here(|facts| {
            let mut random = facts.random.borrow_mut();
            let random = random.as_mut().filter(|_| facts.shares.get())?;
            random.chance(1, 2).then(|| random.below(bytes.len().max(1) as u64) as usize)
        });
        if let Some(byte) = at.flatten().and_then(|at| bytes.get_mut(at)) {
            *byte ^= CHANGED;
        }
    }

    fn attach(_: &Config) -> Result<(Shared, SimDoor), Errno> {
        match pause(Pause::Attach) {
            Answer::Attached(answer) => answer.map(|memory| (memory, SimDoor)),
            _ => Err(Errno::IO),
        }
    }
}
