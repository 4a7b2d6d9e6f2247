//! nicfs: the driver around [`crate::core::Node`]. The one place that waits; turns what comes in
//! into events and what the core wants into system calls.

mod coordination;
mod effects;
mod format;
mod hostd;
mod noted;
mod start;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{ClientId, Clock, clock::SystemClock};
use cluster::coordinator::DataState;
use cluster::tls::Keys;
use cluster::transport::{NetEvent, Transport};
use storage::media::Media;

use crate::beat::Beat;
use crate::config::{Error, NicfsConfig, Pipeline};
use crate::core::{Event, Failure, Node};
use crate::host::HostLink;
use crate::packing::{self, Packing};
use crate::pool::Pool;
use crate::process::Held;
use crate::serving::{Clocks, Serving};
use crate::signal::Signals;
use crate::status;

pub use format::{FormatParams, abandon, format};
use noted::give_up;
pub use noted::{EPOCH_FILES, GIVEN_UP};

const TOKEN_SIGNAL: u64 = 1;
const TOKEN_HOST_LISTENER: u64 = 2;
const TOKEN_HOST: u64 = 3;
const TOKEN_ADMIN: u64 = 4;
const TOKEN_COORDINATOR: u64 = 5;
const TOKEN_WORK: u64 = 6;
const TOKEN_SCRUB: u64 = 7;
const TOKEN_BELLS: u64 = 1 << 32;
/// Heartbeat of the core.
const TICK: Duration = Duration::from_millis(100);
/// So much later it may come, and so much earlier if the core is awake: mostly it is woken by what the coordinator
/// says, and an idle core shall not wake up twice.
const TICK_LATE: Duration = Duration::from_millis(20);
const TICK_EARLY: Duration = Duration::from_millis(40);
/// How long an end in order may take: less than who asked for it waits (`corbel serve`: 3 s).
const CLOSING: Duration = Duration::from_millis(1500);
/// Clients without a bell are looked at this often.
const MUTE_LOOK: Duration = Duration::from_millis(2);
/// What came over links is taken for so long before the rest of the turn is done: chunks in bulk come by the dozen.
const EVENTS_TIME: Duration = Duration::from_millis(5);
/// Clients that have rung are served for so long before others than clients are heard again.
const BELLS_TIME: Duration = Duration::from_millis(5);

/// Nice value of the thread that decides.
const NICE: i32 = -10;
/// The same while nobody waits for it.
const NICE_UNHURRIED: i32 = 5;

/// What a piece of work comes to.
enum Ended {
    /// Of a message, and how long it took.
    Packing(packing::Done, Duration),
    /// Of a stage of the core: its number.
    Stage(u64, Worked),
}

/// Work of one kind that was done.
#[derive(Clone, Copy, Debug)]
struct Worked {
    stage: &'static str,
    bytes: usize,
    took: Duration,
}

/// See the module. It is generic over what brings messages to other nodes; what speaks to the coordinator is behind `Beat`, which is
/// generic over it as well.
struct Driver<N> {
    config: NicfsConfig,
    signals: Signals,
    clock: SystemClock,
    node: Node,
    net: N,
    incarnation: u64,
    keys: Option<Keys>,
    /// The coordinator, and what the core was told of its word.
    coordinator: Option<Beat>,
    serving: Option<Serving>,
    host_listener: OwnedFd,
    host: Option<Arc<HostLink>>,
    /// Time for which peers and clients were not heard, at most.
    longest_turn: Duration,
    /// Nobody waits for what this node does: it is being filled.
    unhurried: bool,
    /// It may raise its priority. (Else it could not take back what it lowers.)
    raised: bool,
    admin: UnixListener,
    /// Whoever connects wants all to be read and compared, now.
    scrubs: UnixListener,
    bells: BTreeMap<u64, (ClientId, OwnedFd)>,
    bell_of: BTreeMap<ClientId, u64>,
    /// Bells that have rung and are not looked at yet.
    rung: VecDeque<u64>,
    next_bell: u64,
    /// Clients of an earlier run whose bells hostd has not handed over (yet).
    mute: BTreeSet<ClientId>,
    look_at_mute: Instant,
    attaching: BTreeMap<u64, OwnedFd>,
    packing: Packing,
    /// The region, for work.
    media: Arc<dyn Media>,
    pool: Pool<Ended>,
    /// What it had no room for, and was done by this thread.
    ended_here: Vec<Ended>,
    /// Whether it is used: in other modes everything is done by this thread.
    pipeline: Pipeline,
    /// What was done there and here, by stage.
    worked: BTreeMap<&'static str, status::Work>,
    /// When this process began.
    began: Instant,
    state: DataState,
    /// A signal asked for the end: until when it may take, to be one in order.
    ends_by: Option<Instant>,
    ended: bool,
    trouble: Option<String>,
}

/// Serves until a signal ends it.
pub fn run(config: NicfsConfig) -> Result<(), Error> {
    let signals = Signals::catch().map_err(|e| Error::new("nicfs: signals", e))?;
    crate::process::raise_descriptors();
    let raised = crate::process::raise_priority(NICE);
    crate::process::keep_memory();
    let mut driver = Driver::start(config, signals)?;
    driver.raised = raised;
    let ended = driver.serve();
    let _ = std::fs::remove_file(&driver.config.admin);
    let _ = std::fs::remove_file(scrub_socket(&driver.config.admin));
    ended
}

/// The clock by which clients judge their leases.
fn clients_clock() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Confirmations are counted from the start of this process.
struct Began(Instant);

impl Clocks for Began {
    fn clients(&mut self) -> u64 {
        clients_clock()
    }

    fn left(&mut self, until: u64) -> u64 {
        until.saturating_sub(nanos(self.0.elapsed()))
    }
}

impl<N: Transport> Driver<N> {
    fn now(&self) -> u64 {
        self.clock.monotonic()
    }

    /// Gives the core an event and does what it wants.
    fn deliver(&mut self, event: Event) {
        let mut effects = Vec::new();
        self.node.apply(self.now(), event, &mut effects);
        self.carry_out(effects);
    }

    fn serve(&mut self) -> Result<(), Error> {
        let (mut events, mut heard) = (Vec::new(), VecDeque::new());
        let mut next_tick = Instant::now();
        let mut busy = true;
        let mut held = Held::new();
        while !self.ended {
            self.choose_priority();
            let slept = !busy && self.node.prepare_to_sleep();
            let wait = if slept { self.wait(next_tick) } else { Duration::ZERO };
            if heard.is_empty() {
                self.net.poll(Some(wait), &mut events);
                heard.extend(events.drain(..));
            }
            let begin = Instant::now();
            if let Some(coordinator) = &self.coordinator {
                coordinator.turned();
            }
            while begin.elapsed() < EVENTS_TIME
                && let Some(event) = heard.pop_front()
            {
                match event {
                    NetEvent::Ready { token, .. } if token >= TOKEN_BELLS => {
                        if !self.rung.contains(&token) {
                            self.rung.push_back(token);
                        }
                    }
                    event => self.net_event(event)?,
                }
            }
            if self.pool.has_ended() || !self.ended_here.is_empty() {
                self.work_ended();
            }
            self.answer_bells()?;
            if !slept {
                let mut effects = Vec::new();
                self.node.look_around(self.now(), &mut effects);
                self.carry_out(effects);
            }
            self.check_fence();
            self.look_at_mute();
            let due = self.node.deadline().is_some_and(|d| d <= self.now());
            let ticks = Instant::now() + TICK_EARLY >= next_tick;
            if due || ticks {
                if ticks {
                    held.look(!slept);
                    next_tick = Instant::now() + TICK;
                    // The machine's clock may be set while this runs.
                    let offset = self.clock.realtime().wrapping_sub(self.clock.monotonic());
                    self.node.set_realtime_offset(offset);
                }
                self.node.set_hearing(self.packing.is_hearing());
                self.deliver(Event::Tick);
            }
            // What others have said already comes before background work.
            busy = !heard.is_empty() || self.background() || !self.rung.is_empty();
            busy |= !self.ended_here.is_empty();
            while self.host.as_ref().is_some_and(|host| host.has_heard()) {
                self.host_speaks();
            }
            if let Some(failure) = self.node.failure() {
                if let Failure::Medium(why) = failure {
                    give_up(&self.config.region, why);
                }
                return Err(Error(format!("nicfs: {failure}")));
            }
            if let Some(trouble) = self.trouble.take() {
                return Err(Error(trouble));
            }
            self.longest_turn = self.longest_turn.max(held.turn(begin.elapsed()));
            let late = self.ends_by.is_some_and(|by| Instant::now() >= by);
            self.ended |= late || self.node.is_closed();
        }
        self.deliver(Event::Shutdown);
        if let Some(coordinator) = self.coordinator.take().filter(|_| self.node.may_leave()) {
            coordinator.leave();
        }
        Ok(())
    }

    /// Comes before the programs of the machine, since others wait for what it does; but not while all that it does is to fill itself.
    fn choose_priority(&mut self) {
        let unhurried = self.node.is_being_filled();
        if unhurried != self.unhurried && self.raised {
            let nice = if unhurried { NICE_UNHURRIED } else { NICE };
            crate::process::Thread::current().nice(nice);
            self.unhurried = unhurried;
        }
    }

    fn wait(&self, next_tick: Instant) -> Duration {
        let mut tick = (next_tick + TICK_LATE).saturating_duration_since(Instant::now());
        if !self.mute.is_empty() {
            tick = tick.min(MUTE_LOOK);
        }
        let now = self.now();
        match self.node.deadline() {
            Some(at) => tick.min(Duration::from_nanos(at.saturating_sub(now))),
            None => tick,
        }
    }

    /// A slice of it, so that an fsync waits for no more than one.
    fn background(&mut self) -> bool {
        let mut effects = Vec::new();
        let more = self.node.work(self.now(), &mut effects);
        self.carry_out(effects);
        more
    }

    fn net_event(&mut self, event: NetEvent) -> Result<(), Error> {
        match event {
            NetEvent::Up { node, .. } => self.deliver(Event::PeerUp(node)),
            NetEvent::Down { node, reason } => {
                log::info!("link to node {node} ended: {reason}");
                self.packing.down(node);
                self.deliver(Event::PeerDown(node));
            }
            NetEvent::Frame { from, class, kind, body } => self.hear(from, class, kind, body),
            NetEvent::Drained { node, class } => {
                self.packing.drained(node, class);
                self.transmit(node, class);
            }
            NetEvent::Rejected { what, .. } => log::warn!("{what}"),
            NetEvent::Ready { token, .. } => return self.ready(token),
        }
        Ok(())
    }

    fn ready(&mut self, token: u64) -> Result<(), Error> {
        match token {
            TOKEN_SIGNAL => self.asked_to_end(),
            TOKEN_HOST_LISTENER => self.host_arrived(),
            TOKEN_HOST => self.host_speaks(),
            TOKEN_ADMIN => self.answer_status(),
            TOKEN_SCRUB => self.scrub_asked(),
            TOKEN_COORDINATOR => self.coordinator_speaks()?,
            TOKEN_WORK => self.work_ended(),
            bell => {
                if let Some((client, fd)) = self.bells.get(&bell) {
                    let _ = rustix::io::read(fd, &mut [0u8; 8]);
                    let client = *client;
                    self.deliver(Event::Doorbell(client));
                }
            }
        }
        Ok(())
    }

    /// More than one may ask: a terminal, and the supervisor that it asked as well.
    fn asked_to_end(&mut self) {
        let asked = self.signals.take();
        if let Some(keys) = self.keys.as_ref().filter(|_| asked.again) {
            keys.read_again();
        }
        if asked.end && self.ends_by.is_none() {
            self.ends_by = Some(Instant::now() + CLOSING);
            self.deliver(Event::Closing);
        }
    }

    fn answer_status(&mut self) {
        while let Ok((stream, _)) = self.admin.accept() {
            self.tell_status(stream);
        }
    }

    /// Root, or who runs the service, wants a scrub; what is said is as of before.
    fn scrub_asked(&mut self) {
        while let Ok((stream, _)) = self.scrubs.accept() {
            let peer = rustix::net::sockopt::socket_peercred(&stream);
            if !peer.is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid())
            {
                continue;
            }
            self.tell_status(stream);
            self.deliver(Event::Scrub);
        }
    }

    fn tell_status(&mut self, mut stream: UnixStream) {
        let own = status::Own {
            incarnation: self.incarnation,
            hostd: self.host.is_some(),
            longest_turn: self.longest_turn,
            warnings: self.keys.as_ref().map(Keys::warnings).unwrap_or_default(),
            compression: self.packing.compression(),
            packing: self.packing.counters(),
            pipeline: self.pipeline,
            work: self.worked.clone(),
            threads: self.pool.threads(),
            cpu: crate::process::cpu_time(),
        };
        let text = status::json(&self.node.status(), &self.net.counters(), own);
        // The socket's buffer holds the answer; a reader that does not read loses it.
        let _ = stream.set_nonblocking(true);
        let _ = std::io::Write::write_all(&mut stream, text.as_bytes());
    }
}

/// Where a scrub is asked for, beside the socket that answers for the status.
pub fn scrub_socket(admin: &Path) -> PathBuf {
    admin.with_extension("scrub")
}

fn epoll_error(e: std::io::Error) -> Error {
    Error::new("nicfs: epoll", e)
}
