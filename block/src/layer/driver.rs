//! The core over a device, with a clock and a thread that wakes it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
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

/// How much is under way below.
#[derive(Default)]
struct Count {
    requests: Mutex<usize>,
    none: Condvar,
}

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_none(&self) {
        let held = self.none.wait_while(self.lock(), |requests| *requests > 0);
        drop(held.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A request that is under way below.
struct UnderWay(Arc<Count>);

impl UnderWay {
    fn new(count: &Arc<Count>) -> Self {
        *count.lock() += 1;
        Self(Arc::clone(count))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.none.notify_all();
    }
}

struct Inner {
    device: Arc<dyn Device>,
    clock: SystemClock,
    state: Mutex<State>,
    wake: Condvar,
    below: Arc<Count>,
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
    ended: Arc<OnceLock<Stats>>,
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
        let (state, wake, below) = (Mutex::new(state), Condvar::new(), Arc::default());
        let inner = Arc::new(Inner { device, clock, state, wake, below });
        let timed = Arc::clone(&inner);
        let timer =
            std::thread::Builder::new().name("block-timer".into()).spawn(move || timed.time())?;
        Ok(Self { inner, timer: Some(timer), ended: Arc::default() })
    }

    /// Where its counts will be when it has ended, and all is written.
    pub fn ended(&self) -> Arc<OnceLock<Stats>> {
        Arc::clone(&self.ended)
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
                    let under_way = UnderWay::new(&self.below);
                    drop(state);
                    let inner = Arc::clone(self);
                    let done: Done = Box::new(move |outcome| {
                        inner.tell(Event::Answered(number, outcome));
                        drop(inner);
                        drop(under_way);
                    });
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
        // What was read ahead: who answers it last must not be who ends the device, for which that may wait.
        self.inner.below.wait_for_none();
        let _ = self.ended.set(self.stats());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    use super::*;
    use crate::device::{Answer, wait_for};

    /// A device that reads slowly what nobody asked for.
    struct Late {
        tell: Mutex<Sender<(Request, bool)>>,
        /// What was asked for ends there.
        asked: Arc<AtomicU64>,
        ahead: Arc<AtomicBool>,
        dropped: Arc<Mutex<Option<ThreadId>>>,
    }

    impl std::fmt::Debug for Late {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Late")
        }
    }

    impl Device for Late {
        fn traits(&self) -> Traits {
            Traits::BYTES
        }

        fn size(&self) -> u64 {
            64 << 20
        }

        fn is_prompt(&self, _: &Op) -> bool {
            true
        }

        fn submit(&self, request: Request) {
            let asked = self.asked.load(Ordering::SeqCst);
            let ahead = matches!(request.op, Op::Read { offset, .. } if offset >= asked);
            self.ahead.fetch_or(ahead, Ordering::SeqCst);
            self.tell.lock().unwrap().send((request, ahead)).unwrap();
        }
    }

    impl Drop for Late {
        fn drop(&mut self) {
            *self.dropped.lock().unwrap() = Some(std::thread::current().id());
        }
    }

    /// What is read ahead is waited for, so that the device is not ended by one of its own threads.
    #[test]
    fn a_device_is_ended_by_who_ends_the_layer() {
        let (tell, told) = channel::<(Request, bool)>();
        let answers = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for (request, ahead) in told {
                threads.push(std::thread::spawn(move || {
                    if ahead {
                        std::thread::sleep(Duration::from_millis(300));
                    }
                    let answer = match request.op {
                        Op::Read { len, .. } => Answer::Data(vec![0; len as usize]),
                        _ => Answer::Done,
                    };
                    (request.done)(Ok(answer));
                }));
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let (asked, ahead, dropped) = (Arc::default(), Arc::default(), Arc::default());
        let late = Late {
            tell: Mutex::new(tell),
            asked: Arc::clone(&asked),
            ahead: Arc::clone(&ahead),
            dropped: Arc::clone(&dropped),
        };
        let layer = Layered::new(Arc::new(late), Config::default()).unwrap();
        // One after the other, until there is a read ahead.
        for at in 0..64 {
            asked.store((at + 1) * 65536, Ordering::SeqCst);
            let read = Op::Read { offset: at * 65536, len: 65536 };
            assert!(wait_for(&layer, read).is_ok());
            if ahead.load(Ordering::SeqCst) {
                break;
            }
        }
        assert!(ahead.load(Ordering::SeqCst), "nothing is read ahead");
        drop(layer);
        assert_eq!(*dropped.lock().unwrap(), Some(std::thread::current().id()));
        answers.join().unwrap();
    }
}
