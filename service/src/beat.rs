//! The coordinator's client on a thread of its own, so that a node is not taken for dead because its core gets
//! little of the processor.
//!
//! The thread sends heartbeats, hears the answers, and hands what it hears to the core, in order. It has
//! realtime priority where that is allowed: then neither busy programs nor the shares of their sessions
//! (autogroup) delay it. It does next to nothing, so it takes nothing from anybody.
//!
//! A core that hangs must be noticed all the same. So the core says when it has turned ([`Beat::turned`]):
//! heartbeats stop when it has not for the failure timeout. And a core that does not turn although it was
//! rung for is lent realtime priority, at most [`LENT`] at a time: on a machine that is overloaded it is slow, but it
//! turns with every heartbeat, fetches, acknowledges, and prolongs its clients' leases. So are the threads of its pool, when
//! nothing ends of what they are to do. Without overload it never comes to that.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::{Epoch, NodeId, StreamSeq};
use cluster::coordinator::{CoordEvent, Coordinator, DataState};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::crew::Crew;
use crate::process::Thread;

/// A core that has not turned for so long after it was rung for gets too little of the processor.
const STARVED: Duration = Duration::from_millis(20);
/// How long it is helped at most, until it is rung for again.
const LENT: Duration = Duration::from_millis(40);
/// Waits end after this time at the latest.
const WAIT: Duration = Duration::from_millis(200);
/// Realtime priorities, the lowest there are: of this thread, of a core that is helped.
const PRIORITY: i32 = 2;
const CORE_PRIORITY: i32 = 1;

/// What the core wants told to the coordinator.
enum Order {
    Opened(StreamSeq, String),
    Leave(Sender<()>),
    CaughtUp(NodeId, u64, Epoch),
    Suspect(NodeId, Epoch),
}

/// What the thread heard, in order.
enum Heard {
    Event(CoordEvent),
    /// Until when the node serves, if it does.
    Until(Option<Instant>),
}

/// Of both threads.
struct Shared {
    start: Instant,
    /// Microseconds from `start` to the last turn of the core.
    turned: AtomicU64,
    /// The same of the ring that it has not answered; 0: none.
    rung: AtomicU64,
    /// Microseconds that it took to answer the last one.
    answered: AtomicU64,
    position: AtomicU64,
    /// Epoch of the data plus one; 0: fresh.
    state: AtomicU64,
    ended: AtomicBool,
    /// Of the core: something was heard.
    bell: OwnedFd,
    /// Of the thread: orders, or the end.
    wake: OwnedFd,
}

impl Shared {
    fn since_turn(&self) -> Duration {
        let turned = Duration::from_micros(self.turned.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(turned)
    }
}

fn ring(bell: &OwnedFd) {
    // Full is rung.
    let _ = rustix::io::write(bell, &1u64.to_le_bytes());
}

fn unring(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0u8; 8]);
}

/// The core's end.
pub struct Beat {
    shared: Arc<Shared>,
    orders: Sender<Order>,
    heard: Receiver<Heard>,
    until: Option<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl Beat {
    /// Starts the thread, which has the client from here on; the core is the thread that calls. `position` and `state`
    /// are what the client has registered with.
    ///
    /// `patience` comes on top of the failure timeout: so long the core may wait for a disk. `crew` works for the core.
    pub fn start<C: Coordinator + Send + 'static>(
        client: C,
        (position, state): (StreamSeq, DataState),
        patience: Duration,
        crew: Arc<Crew>,
    ) -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Shared {
            start: Instant::now(),
            turned: AtomicU64::new(0),
            rung: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            position: AtomicU64::new(position.0),
            state: AtomicU64::new(coded(state)),
            ended: AtomicBool::new(false),
            bell: eventfd(0, flags)?,
            wake: eventfd(0, flags)?,
        });
        let (orders, ordered) = channel();
        let (tells, heard) = channel();
        let thread = Beater {
            client,
            shared: Arc::clone(&shared),
            orders: ordered,
            tells,
            until: None,
            core: Thread::current(),
            patience,
            rung: None,
            lent: None,
            watchful: true,
            crew,
            crew_lent: None,
            crew_hangs: None,
        };
        let thread = std::thread::Builder::new().name("beat".into()).spawn(|| thread.run())?;
        Ok(Self { shared, orders, heard, until: None, thread: Some(thread) })
    }

    /// Readable when something was heard.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    /// The core is awake and at work.
    pub fn turned(&self) {
        let now = self.shared.start.elapsed().as_micros() as u64;
        self.shared.turned.store(now, Ordering::Relaxed);
        let rung = self.shared.rung.load(Ordering::Relaxed);
        if rung != 0 {
            self.shared.answered.store(now.saturating_sub(rung), Ordering::Relaxed);
            self.shared.rung.store(0, Ordering::Relaxed);
        }
    }

    /// What was heard since the last call. It is to be handled before [`Beat::serves_until`] is asked: a view
    /// without this node comes before confirmations that do not mean its clients.
    pub fn hear(&mut self) -> Vec<CoordEvent> {
        unring(&self.shared.bell);
        let mut events = Vec::new();
        for heard in self.heard.try_iter() {
            match heard {
                Heard::Event(event) => events.push(event),
                Heard::Until(until) => self.until = until,
            }
        }
        events
    }

    /// See [`Coordinator::serves_until`].
    pub fn serves_until(&self) -> Option<Instant> {
        self.until.filter(|until| Instant::now() < *until)
    }

    /// See [`Coordinator::set_progress`].
    pub fn set_progress(&self, position: StreamSeq, state: DataState) {
        self.shared.state.store(coded(state), Ordering::Release);
        self.shared.position.store(position.0, Ordering::Release);
    }

    /// See [`Coordinator::opened`].
    pub fn opened(&self, position: StreamSeq, info: String) {
        self.shared.position.store(position.0, Ordering::Release);
        self.order(Order::Opened(position, info));
    }

    /// See [`Coordinator::caught_up`].
    pub fn caught_up(&self, node: NodeId, incarnation: u64, epoch: Epoch) {
        self.order(Order::CaughtUp(node, incarnation, epoch));
    }

    /// See [`Coordinator::suspect`].
    pub fn suspect(&self, node: NodeId, epoch: Epoch) {
        self.order(Order::Suspect(node, epoch));
    }

    /// See [`Coordinator::leave`]: it has been said when this returns, if it can be.
    pub fn leave(self) {
        let (done, heard) = channel();
        self.order(Order::Leave(done));
        let _ = heard.recv_timeout(WAIT);
    }

    fn order(&self, order: Order) {
        let _ = self.orders.send(order);
        ring(&self.shared.wake);
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        ring(&self.shared.wake);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn coded(state: DataState) -> u64 {
    match state {
        DataState::Fresh => 0,
        DataState::Intact { epoch } => u64::from(epoch.0) + 1,
    }
}

fn decoded(state: u64) -> DataState {
    match state.checked_sub(1) {
        None => DataState::Fresh,
        Some(epoch) => DataState::Intact { epoch: Epoch(epoch as u32) },
    }
}

/// The thread.
struct Beater<C> {
    client: C,
    shared: Arc<Shared>,
    orders: Receiver<Order>,
    tells: Sender<Heard>,
    until: Option<Instant>,
    core: Thread,
    patience: Duration,
    /// When the core was rung for and had not turned since.
    rung: Option<Instant>,
    /// Since when the core is helped.
    lent: Option<Instant>,
    /// The core was slow when it was rung for last: it is looked after at once.
    watchful: bool,
    /// Who works for the core; since when they are helped; and since when that has been of no use.
    crew: Arc<Crew>,
    crew_lent: Option<Instant>,
    crew_hangs: Option<Instant>,
}

impl<C: Coordinator> Beater<C> {
    fn run(mut self) {
        if !Thread::current().realtime(PRIORITY) {
            Thread::current().nice(-20);
        }
        while !self.shared.ended.load(Ordering::Acquire) {
            if self.wait() {
                unring(&self.shared.wake);
            }
            self.turn();
            self.help();
            self.help_crew();
        }
        self.core.ordinary();
        self.crew.end();
    }

    /// Says whether there are orders.
    fn wait(&self) -> bool {
        // Else the next heartbeat is soon enough to see: an idle machine sleeps.
        let looks = self.lent.is_some() || self.rung.is_some() && self.watchful;
        let wait = match self.crew.waits() {
            _ if looks || self.crew_lent.is_some() => STARVED / 4,
            Some(_) => STARVED,
            None => WAIT,
        };
        let timeout = Timespec::try_from(wait).ok();
        let mut fds = [
            PollFd::from_borrowed_fd(self.client.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN),
        ];
        // Interrupted is as good as woken.
        poll(&mut fds, timeout.as_ref()).is_err() || !fds[1].revents().is_empty()
    }

    /// Serves the client, and passes on what it heard.
    fn turn(&mut self) {
        let state = decoded(self.shared.state.load(Ordering::Acquire));
        let position = StreamSeq(self.shared.position.load(Ordering::Acquire));
        self.client.set_progress(position, state);
        for order in self.orders.try_iter() {
            match order {
                Order::CaughtUp(node, process, epoch) => {
                    self.client.caught_up(node, process, epoch);
                }
                Order::Suspect(node, epoch) => self.client.suspect(node, epoch),
                Order::Opened(position, info) => self.client.opened(position, info),
                Order::Leave(done) => {
                    self.client.leave();
                    // Whoever waited no longer is no trouble.
                    let _ = done.send(());
                }
            }
        }
        let hangs = self
            .client
            .failure_timeout()
            .is_some_and(|t| self.shared.since_turn() > t + self.patience);
        self.client.hold(hangs);
        let mut events = Vec::new();
        self.client.poll(&mut events);
        let mut news = !events.is_empty();
        for event in events {
            let _ = self.tells.send(Heard::Event(event));
        }
        let until = self.client.serves_until();
        if until != self.until {
            self.until = until;
            news = true;
            let _ = self.tells.send(Heard::Until(until));
        }
        if news {
            let now = self.shared.start.elapsed().as_micros() as u64;
            let _ = self.shared.rung.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            ring(&self.shared.bell);
            self.rung.get_or_insert_with(Instant::now);
        }
    }

    /// Lends the core priority if it does not come to its turn, and takes it back.
    fn help(&mut self) {
        let Some(rung) = self.rung else { return };
        if self.shared.since_turn() < rung.elapsed() {
            let took = Duration::from_micros(self.shared.answered.load(Ordering::Relaxed));
            self.watchful = took >= STARVED / 4;
            (self.rung, self.lent) = (None, self.end_help());
            return;
        }
        match self.lent {
            None if rung.elapsed() >= STARVED => {
                self.watchful = true;
                if self.core.realtime(CORE_PRIORITY) {
                    self.lent = Some(Instant::now());
                } else {
                    self.rung = None;
                }
            }
            Some(since) if since.elapsed() >= LENT => {
                // It does not want for time.
                (self.rung, self.lent) = (None, self.end_help());
            }
            _ => {}
        }
    }

    /// The same for who works for it.
    fn help_crew(&mut self) {
        let waits = self.crew.waits();
        let starved = waits.is_some_and(|waits| waits >= STARVED);
        match self.crew_lent {
            None if starved && self.crew_hangs.is_none_or(|since| since.elapsed() >= WAIT) => {
                match self.crew.lend(CORE_PRIORITY) {
                    Some(true) => (self.crew_lent, self.crew_hangs) = (Some(Instant::now()), None),
                    Some(false) => self.crew_hangs = Some(Instant::now()),
                    // Soon.
                    None => {}
                }
            }
            None if !starved => self.crew_hangs = None,
            Some(since)
                if (waits.is_none() || since.elapsed() >= LENT) && self.crew.take_back() =>
            {
                self.crew_lent = None;
                // What did not come to its end with help waits for something else than the processor, mostly.
                let hangs = waits >= Some(LENT);
                self.crew_hangs = hangs.then(Instant::now);
            }
            _ => {}
        }
    }

    fn end_help(&self) -> Option<Instant> {
        if self.lent.is_some() {
            self.core.ordinary();
        }
        None
    }
}

impl std::fmt::Debug for Beat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Beat").field("until", &self.until).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use base::NodeId;
    use cluster::coordinator::Registration;
    use cluster::coordinator::embedded::{Server, ServerConfig};
    use cluster::coordinator::machine::{Patience, VolumeSpec};

    use super::*;
    use cluster::coordinator::client::{Client, ClientConfig};

    const CLUSTER: u128 = 5;

    /// Waits until `ready`; the core turns meanwhile if it `turns`. Says how long it took.
    fn wait(beat: &mut Beat, turns: bool, ready: impl Fn(&mut Beat) -> bool) -> Duration {
        let begin = Instant::now();
        while !ready(beat) {
            assert!(begin.elapsed() < Duration::from_secs(10), "it does not come about");
            if turns {
                beat.turned();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        begin.elapsed()
    }

    /// As long as the core turns it serves, and when it hangs it does not: heartbeats go on for the
    /// failure timeout, so that a slow core is no dead one, and no longer.
    #[test]
    fn a_core_that_does_not_turn_is_out() {
        let folder = std::env::temp_dir().join(format!("corbel-beat-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let patience =
            Patience { heartbeat_ms: 20, failure_timeout_ms: 400, ..Patience::default() };
        let mut server = Server::open(&ServerConfig {
            listen: "127.0.0.1:0".parse().expect("an address"),
            folder: folder.clone(),
            cluster: CLUSTER,
            volumes: vec![VolumeSpec {
                name: "v".into(),
                replicas: 1,
                nodes: vec![NodeId(1)],
                ..VolumeSpec::default()
            }],
            patience,
            keys: None,
        })
        .expect("a coordinator");
        let coordinator = server.address();
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let thread = std::thread::spawn(move || server.run(&stops, &mut |_| ()));
        let registration = Registration {
            volume: "v".into(),
            node: NodeId(1),
            incarnation: 1,
            position: StreamSeq(0),
            state: DataState::Fresh,
            tcp: None,
            run_dir: String::new(),
            info: String::new(),
            ..Registration::default()
        };
        let config = ClientConfig { coordinator, cluster: CLUSTER, registration, keys: None };
        let mut beat = {
            let at = (config.registration.position, config.registration.state);
            let client = Client::new(config).expect("a client");
            Beat::start(client, at, Duration::ZERO, Arc::default()).expect("a thread")
        };
        let serves = |beat: &mut Beat| {
            beat.hear();
            beat.serves_until().is_some()
        };
        wait(&mut beat, true, serves);
        // Slow is not hung: it turns once in half the time.
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(200));
            assert!(serves(&mut beat), "a core that is slow");
            beat.turned();
        }
        let took = wait(&mut beat, false, |beat| !serves(beat));
        assert!(took >= Duration::from_millis(300), "after {took:?}");
        wait(&mut beat, true, serves);
        drop(beat);
        stop.store(true, Ordering::Relaxed);
        thread.join().expect("no panic").expect("it served");
        let _ = std::fs::remove_dir_all(&folder);
    }
}
