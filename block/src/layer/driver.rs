//! The core over a device, with a clock and a thread that wakes it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::Clock;
use base::clock::SystemClock;

use super::core::{Config, Effect, Layer, Stats};
use crate::device::{Device, Done, Op, Outcome, Request, SECTOR, Traits};

struct State {
    core: Layer,
    clients: HashMap<u64, Done>,
    next: u64,
    /// What is to be done, in order. One thread at a time does it.
    effects: VecDeque<Effect>,
    busy: bool,
    over: bool,
}

struct Inner {
    device: Arc<dyn Device>,
    clock: SystemClock,
    state: Mutex<State>,
    wake: Condvar,
}

/// What the core is told.
enum Event {
    Request(u64, Op),
    Answered(u64, Outcome),
    Tick,
}

/// A device behind the layer.
pub struct Layered {
    inner: Arc<Inner>,
    timer: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Layered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layered").field("device", &self.inner.device).finish_non_exhaustive()
    }
}

impl Layered {
    /// Puts the layer over a device, of which `submit` must not wait (see
    /// [`Threads`](crate::device::Threads)), and which nobody else uses meanwhile.
    pub fn new(device: Arc<dyn Device>, config: Config) -> std::io::Result<Self> {
        let core = Layer::new(config, device.size());
        let state = State {
            core,
            clients: HashMap::new(),
            next: 0,
            effects: VecDeque::new(),
            busy: false,
            over: false,
        };
        let clock = SystemClock::default();
        let inner =
            Arc::new(Inner { device, clock, state: Mutex::new(state), wake: Condvar::new() });
        let timed = Arc::clone(&inner);
        let timer =
            std::thread::Builder::new().name("block-timer".into()).spawn(move || timed.time())?;
        Ok(Self { inner, timer: Some(timer) })
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        self.inner.lock().core.stats()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the core something, and does what it says.
    fn tell(self: &Arc<Self>, event: Event) {
        let mut state = self.lock();
        let before = state.core.wake_at();
        let mut out = Vec::new();
        let now = self.clock.monotonic();
        match event {
            Event::Request(client, op) => state.core.request(now, client, op, &mut out),
            Event::Answered(number, outcome) => {
                state.core.answered(now, number, outcome, &mut out);
            }
            Event::Tick => state.core.tick(now, &mut out),
        }
        state.effects.extend(out);
        let after = state.core.wake_at();
        if after.is_some() && after != before {
            self.wake.notify_one();
        }
        if state.busy {
            return;
        }
        state.busy = true;
        while let Some(effect) = state.effects.pop_front() {
            match effect {
                Effect::Complete(client, outcome) => {
                    let done = state.clients.remove(&client);
                    drop(state);
                    if let Some(done) = done {
                        done(outcome);
                    }
                }
                Effect::Submit(number, op) => {
                    drop(state);
                    let inner = Arc::clone(self);
                    let done: Done =
                        Box::new(move |outcome| inner.tell(Event::Answered(number, outcome)));
                    self.device.submit(Request { op, done });
                }
            }
            state = self.lock();
        }
        state.busy = false;
    }

    fn time(self: Arc<Self>) {
        let mut state = self.lock();
        while !state.over {
            let now = self.clock.monotonic();
            match state.core.wake_at() {
                Some(at) if at <= now => {
                    drop(state);
                    self.tell(Event::Tick);
                    state = self.lock();
                }
                at => {
                    let wait = at.map_or(Duration::from_secs(3600), |at| {
                        Duration::from_nanos(at.saturating_sub(now))
                    });
                    let (next, _) =
                        self.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner);
                    state = next;
                }
            }
        }
    }
}

impl Device for Layered {
    fn traits(&self) -> Traits {
        let below = self.inner.device.traits();
        let block_min = below.block_min.max(SECTOR as u32);
        Traits { block_min, block_preferred: below.block_preferred.max(4096), ..below }
    }

    fn size(&self) -> u64 {
        self.inner.device.size() / SECTOR * SECTOR
    }

    fn is_prompt(&self, _: &Op) -> bool {
        true
    }

    fn submit(&self, request: Request) {
        let size = self.size();
        let client = {
            let mut state = self.inner.lock();
            state.next += 1;
            let client = state.next;
            state.clients.insert(client, request.done);
            state.core.grown(size);
            client
        };
        self.inner.tell(Event::Request(client, request.op));
    }
}

impl Drop for Layered {
    /// What is dirty is written and flushed: a server that ends leaves nothing behind.
    fn drop(&mut self) {
        if let Err(errno) = crate::device::wait_for(self, Op::Flush) {
            log::error!("block: the last flush: {errno}");
        }
        self.inner.lock().over = true;
        self.inner.wake.notify_one();
        if let Some(timer) = self.timer.take() {
            let _ = timer.join();
        }
    }
}
