//! nicfs: the driver around [`crate::core::Node`]. The one place that waits; turns what comes in
//! into events and what the core wants into system calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::random::Random;
use base::{ClientId, Clock, Epoch, NodeId, StreamSeq, clock::SystemClock};
use cluster::coordinator::client::ClientConfig;
use cluster::coordinator::message::BEFORE_MAX;
use cluster::coordinator::{CoordEvent, DataState, Registration, View};
use cluster::net::{Net, NetConfig};
use cluster::tls::Keys;
use cluster::transport::{
    Class, Interest, NetEvent, Peer, PeerAddress, SendError, Transport, socket_path,
};
use rustix::net::SocketFlags;
use storage::format::control;
use storage::format::superblock::Durability;
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{Params, Volume, bytes_when_full};

use crate::beat::Beat;
use crate::config::{Error, Membership, NicfsConfig, PeerTransport, private_socket};
use crate::core::frame::Body;
use crate::core::{Effect, Event, GRACE, JOIN_STEP, Node, NodeConfig};
use crate::host::{HostLink, end_copies};
use crate::hostd::listen;
use crate::link::{self, Packet};
use crate::packing::{self, Compression, Line, Moved, Packing};
use crate::pool::{self, Pool};
use crate::process::Held;
use crate::serving::{Clocks, Serving};
use crate::signal::Signals;
use crate::status;

const TOKEN_SIGNAL: u64 = 1;
const TOKEN_HOST_LISTENER: u64 = 2;
const TOKEN_HOST: u64 = 3;
const TOKEN_ADMIN: u64 = 4;
const TOKEN_COORDINATOR: u64 = 5;
const TOKEN_WORK: u64 = 6;
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
/// Slices of background work between two looks at the events...
const SLICES: u32 = 4;
/// ... unless they take that long.
const SLICES_TIME: Duration = Duration::from_millis(5);
/// What came over links is taken for so long before the rest of the turn is done: chunks in bulk come by the dozen.
const EVENTS_TIME: Duration = Duration::from_millis(5);
/// Clients that have rung are served for so long before others than clients are heard again.
const BELLS_TIME: Duration = Duration::from_millis(5);

/// What `mkfs` chooses for the region of a node.
#[derive(Clone, Debug)]
pub struct FormatParams {
    /// The same on every member of the chain.
    pub uuid: [u8; 16],
    /// Realtime nanoseconds of the volume's birth, the same on every member of the chain too: it is
    /// what the root directory shows.
    pub time: u64,
    /// Name of the volume.
    pub name: String,
    /// Bytes for the data of files.
    pub capacity: u64,
    /// Bytes of the stream ring.
    pub stream: u64,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
    /// Whether nothing is reserved: the volume has what the file system below has left then.
    pub sparse: bool,
}

/// What a region needs beside data and tree: the ring, a client's log, and a little.
fn beside(config: &NicfsConfig, stream: u64) -> u64 {
    let log = u64::from(config.lanes).saturating_mul(config.lane_bytes);
    stream.saturating_add(log).saturating_add(4 << 20)
}

fn in_mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Whether there is room for what the volume promises.
fn has_room(region: &FileRegion, config: &NicfsConfig, params: &FormatParams) -> Result<(), Error> {
    let at = config.region.display();
    let beside = beside(config, params.stream);
    let (what, needed) = if params.sparse {
        ("its ring and a log alone", beside)
    } else {
        let full = bytes_when_full(params.capacity);
        ("a full one with its tree, ring and a log", full.saturating_add(beside))
    };
    match region.free_bytes().map_err(|e| Error::new(&format!("region {at}"), e))? {
        Some(free) if free < needed => Err(Error(format!(
            "no room for a volume of {}: {what} takes {}, and the file system of {at} has {} free; choose a smaller \
            node.capacity or another file system{}",
            in_mib(params.capacity),
            in_mib(needed),
            in_mib(free),
            if params.sparse { "" } else { ", or give --sparse to have nothing reserved" },
        ))),
        _ => Ok(()),
    }
}

/// Makes the region of a node: directory, volume, stream ring.
pub fn format(config: &NicfsConfig, params: &FormatParams) -> Result<(), Error> {
    let at = |what: &str| format!("{what} {}", config.region.display());
    let region = FileRegion::create(&config.region, config.durability)
        .map_err(|e| Error::new(&at("region"), e))?;
    region.keeps_its_promise().map_err(|e| Error::new(&at("region"), e))?;
    region.lock().map_err(|e| Error::new(&at("region"), e))?;
    end_copies(&region).map_err(|e| Error(format!("{}: hostd: {e}", at("region"))))?;
    has_room(&region, config, params)?;
    if !params.sparse {
        let full = bytes_when_full(params.capacity);
        region.reserve(full).map_err(|e| Error::new(&at("region"), e))?;
    }
    let params = Params {
        uuid: params.uuid,
        name: params.name.clone(),
        node: config.node,
        durability: config.durability,
        capacity_bytes: params.capacity,
        stream_bytes: params.stream,
        time: params.time,
        uid: params.uid,
        gid: params.gid,
        mode: params.mode,
    };
    let region: Arc<dyn Media> = Arc::new(region);
    Volume::format(Arc::clone(&region), &params).map_err(|e| Error::new(&at("volume in"), e))?;
    // All that the service would make at its start, so that it has room there.
    let ring = crate::core::ring::bytes(params.stream_bytes);
    region.ensure(Segment::Stream, ring).map_err(|e| Error::new(&at("ring in"), e))?;
    // A region that was in use before starts afresh for the coordinator, too.
    forget_epoch(&config.region)
}

/// Takes a region that is about to be removed, which fails while its service runs, and tells programs that
/// still have their logs in it that nothing of them counts any more: they look for the service anew. The
/// region is this caller's as long as the value lives.
pub fn abandon(config: &NicfsConfig) -> Result<FileRegion, Error> {
    let error = |e| Error::new(&format!("region {}", config.region.display()), e);
    let region = FileRegion::open(&config.region, config.durability).map_err(error)?;
    region.lock().map_err(error)?;
    for segment in region.segments().map_err(error)? {
        if matches!(segment, Segment::Log(_)) {
            // Half of a log has no client.
            let _ = region.store64(segment, control::SEALED_AT, 0);
            let _ = region.store64(segment, control::STATE, control::STATE_EXPELLED);
        }
    }
    Ok(region)
}

/// What nicfs keeps in a region's directory beside the region: the last epoch that it served in, the processes that had the region
/// since, and what becomes each.
pub const EPOCH_FILES: [&str; 4] = ["epoch", "epoch.new", "processes", "processes.new"];

fn forget_epoch(region: &Path) -> Result<(), Error> {
    for name in [EPOCH_FILES[0], EPOCH_FILES[2]] {
        match std::fs::remove_file(region.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::new(&format!("{}", region.join(name).display()), e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The last epoch that this node was a member of, noted before it served anything in it.
fn note_epoch(region: &Path, epoch: Epoch) -> Result<(), Error> {
    note(region, [EPOCH_FILES[0], EPOCH_FILES[1]], &format!("{:020}\n", epoch.0))
}

/// The processes that had the region since one was a member in the epoch that is noted, that one first. Who takes the
/// region over names them to the coordinator, and may go on in their place: the region belongs to one process at a time.
fn note_processes(region: &Path, processes: &[u64]) -> Result<(), Error> {
    let all = processes.iter().copied().chain(std::iter::repeat(0)).take(BEFORE_MAX);
    let text: String = all.map(|process| format!("{process:020}\n")).collect();
    note(region, [EPOCH_FILES[2], EPOCH_FILES[3]], &text)
}

fn noted_processes(region: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(region.join(EPOCH_FILES[2])).unwrap_or_default();
    let all = text.lines().map_while(|line| line.parse().ok());
    all.filter(|process| *process != 0).take(BEFORE_MAX).collect()
}

/// Adds a process; of too many those in the middle go.
fn with_process(mut before: Vec<u64>, process: u64) -> Vec<u64> {
    before.push(process);
    if before.len() > BEFORE_MAX {
        before.remove(1);
    }
    before
}

/// Writes a file. Where the file system is full, too: there are two of one length, that are written in turn and change names.
fn note(region: &Path, [name, fresh]: [&str; 2], text: &str) -> Result<(), Error> {
    let path = region.join(name);
    let fresh = region.join(fresh);
    let fill = || -> std::io::Result<()> {
        let file =
            std::fs::File::options().write(true).create(true).truncate(false).open(&fresh)?;
        std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0)?;
        file.set_len(text.len() as u64)?;
        file.sync_all()
    };
    let write = || -> std::io::Result<()> {
        fill()?;
        let (cwd, swap) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
        if rustix::fs::renameat_with(cwd, &fresh, cwd, &path, swap).is_err() {
            std::fs::rename(&fresh, &path)?;
            // For the next time.
            let _ = fill();
        }
        std::fs::File::open(region)?.sync_all()
    };
    write().map_err(|e| Error::new(&format!("file {}", path.display()), e))
}

fn noted_epoch(region: &Path) -> Option<Epoch> {
    std::fs::read_to_string(region.join(EPOCH_FILES[0])).ok()?.trim().parse().ok().map(Epoch)
}

/// What a piece of work comes to.
enum Ended {
    Packing(packing::Done),
}

struct Driver {
    config: NicfsConfig,
    signals: Signals,
    clock: SystemClock,
    node: Node,
    net: Net,
    incarnation: u64,
    keys: Option<Keys>,
    /// The coordinator, and what the core was told of its word.
    coordinator: Option<Beat>,
    serving: Option<Serving>,
    host_listener: OwnedFd,
    host: Option<Arc<HostLink>>,
    /// Time for which peers and clients were not heard, at most.
    longest_turn: Duration,
    admin: UnixListener,
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
    pool: Pool<Ended>,
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
    crate::process::raise_priority(-10);
    crate::process::keep_memory();
    let mut driver = Driver::new(config, signals)?;
    let ended = driver.serve();
    let _ = std::fs::remove_file(&driver.config.admin);
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

/// A new number at each start: nanoseconds since 1970.
fn incarnation() -> u64 {
    SystemClock::default().realtime()
}

impl Driver {
    fn new(config: NicfsConfig, signals: Signals) -> Result<Self, Error> {
        let region_at = format!("nicfs: region {}", config.region.display());
        let region = FileRegion::open(&config.region, config.durability)
            .map_err(|e| Error::new(&region_at, e))?;
        region.lock().map_err(|e| Error::new(&region_at, e))?;
        region.keeps_its_promise().map_err(|e| Error::new(&region_at, e))?;
        let incarnation = incarnation();
        let keys = config.keys.clone().map(Keys::open).transpose();
        let keys = keys.map_err(|e| Error(format!("nicfs: keys: {e}")))?;
        let mut net = Self::net(&config, keys.clone(), incarnation)?;
        let state = noted_epoch(&config.region)
            .map_or(DataState::Fresh, |epoch| DataState::Intact { epoch });
        // Before anything that takes long: the others wait for who is about to be back.
        let beat = Self::register(&config, &region, (&net, &keys), incarnation, state)?;
        // What the service before this one asked for must not come over what this one publishes.
        end_copies(&region).map_err(|e| Error(format!("{region_at}: hostd: {e}")))?;
        take_up_reserve(&region).map_err(|e| Error::new(&region_at, e))?;
        let media: Arc<dyn Media> = if config.fabric_delay > 0 {
            Arc::new(crate::delayed::Delayed::new(region, config.fabric_delay))
        } else {
            Arc::new(region)
        };
        let ring_bytes = ring_bytes(&*media)?;
        let node_config = NodeConfig {
            limits: crate::core::limits::Limits {
                hold: config.hold,
                ..crate::core::limits::Limits::SHIPPED
            },
            node: config.node,
            lanes: config.lanes,
            lane_bytes: config.lane_bytes,
            clients_max: config.clients_max,
            clients_per_user: config.clients_per_user,
            per_user: config.per_user,
            ring_bytes,
            memory: config.memory,
            high: config.high,
            low: config.low,
            join_step: JOIN_STEP,
            room: crate::core::Shares::SHIPPED,
            // Nobody else can be lost, and this node's table says what is open.
            grace: if config.membership == Membership::Standalone { 0 } else { GRACE },
            secret: crate::process::secret().map_err(|e| Error::new("nicfs: random", e))?,
            incarnation,
            boot: crate::process::boot().map_err(|e| Error::new("nicfs: boot id", e))?,
        };
        let mut node = Node::new(node_config, media, Random::new(incarnation))
            .map_err(|e| Error::new(&region_at, e))?;
        let clock = SystemClock::default();
        node.set_realtime_offset(clock.realtime().wrapping_sub(clock.monotonic()));
        let private = private_socket(&config.socket);
        let host_listener = listen(&private, 0o600)
            .map_err(|e| Error::new(&format!("nicfs: socket {}", private.display()), e))?;
        let _ = std::fs::remove_file(&config.admin);
        let admin = UnixListener::bind(&config.admin)
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(|e| Error::new(&format!("nicfs: socket {}", config.admin.display()), e))?;
        if let Some(beat) = &beat {
            net.register(beat.as_fd(), TOKEN_COORDINATOR, Interest::READ).map_err(epoll_error)?;
        }
        let mute = node.status().clients.iter().map(|c| c.client).collect();
        let work = usize::try_from(config.memory / 4).unwrap_or(usize::MAX);
        let limits = pool::Limits::of_service(work);
        // Memory is no slow link: a peer that takes little there gets too little of the processor, and compressing takes more of it.
        let compression = match (config.compression, &config.transport) {
            (Compression::Auto, PeerTransport::Shm(_)) => Compression::None,
            (asked, _) => asked,
        };
        let mut driver = Self {
            signals,
            clock,
            node,
            net,
            incarnation,
            coordinator: beat,
            keys,
            serving: None,
            host_listener,
            host: None,
            longest_turn: Duration::ZERO,
            admin,
            bells: BTreeMap::new(),
            bell_of: BTreeMap::new(),
            rung: VecDeque::new(),
            next_bell: TOKEN_BELLS,
            mute,
            look_at_mute: Instant::now(),
            attaching: BTreeMap::new(),
            packing: Packing::new(compression, limits.threads, packing::Limits::SHIPPED),
            pool: Pool::new(limits).map_err(|e| Error::new("nicfs: pool", e))?,
            began: Instant::now(),
            state,
            ends_by: None,
            ended: false,
            trouble: None,
            config,
        };
        let fd = driver.signals.as_fd();
        driver.net.register(fd, TOKEN_SIGNAL, Interest::READ).map_err(epoll_error)?;
        let fd = driver.host_listener.as_fd();
        driver.net.register(fd, TOKEN_HOST_LISTENER, Interest::READ).map_err(epoll_error)?;
        let fd = driver.admin.as_fd();
        driver.net.register(fd, TOKEN_ADMIN, Interest::READ).map_err(epoll_error)?;
        driver.net.register(driver.pool.bell(), TOKEN_WORK, Interest::READ).map_err(epoll_error)?;
        driver.join();
        Ok(driver)
    }

    fn net(config: &NicfsConfig, keys: Option<Keys>, incarnation: u64) -> Result<Net, Error> {
        let cluster = cluster::coordinator::identity(&config.cluster);
        let mut net = NetConfig::new(config.node, incarnation, cluster);
        match &config.transport {
            PeerTransport::Tcp => net.tcp = Some(config.listen),
            PeerTransport::Shm(dir) => net.run_dir = Some(dir.clone()),
        }
        net.keys = keys;
        let half = usize::try_from(config.memory / 2).unwrap_or(usize::MAX).max(1 << 20);
        net.queue_high = [4 << 20, half.min(64 << 20)];
        Net::new(net).map_err(|e| Error::new("nicfs: transport", e))
    }

    /// Registers with the coordinator, if there is one, as who has the region and is about to be ready.
    fn register(
        config: &NicfsConfig,
        region: &FileRegion,
        (net, keys): (&Net, &Option<Keys>),
        incarnation: u64,
        state: DataState,
    ) -> Result<Option<Beat>, Error> {
        let Membership::Coordinator(address) = &config.membership else { return Ok(None) };
        let before = match state {
            DataState::Fresh => Vec::new(),
            DataState::Intact { .. } => noted_processes(&config.region),
        };
        // Before it is in anybody's place: whoever comes after it has to know of it.
        note_processes(&config.region, &with_process(before.clone(), incarnation))?;
        let (tcp, run_dir) = match &config.transport {
            PeerTransport::Tcp => (net.tcp_address(), String::new()),
            PeerTransport::Shm(dir) => (None, dir.display().to_string()),
        };
        let superblock = storage::volume::read_superblocks(region)
            .map_err(|e| Error::new("nicfs: superblock", e))?;
        let uuid = superblock.into_iter().flatten().next().map(|s| s.uuid);
        let registration = Registration {
            volume: config.cluster.clone(),
            node: config.node,
            incarnation,
            position: StreamSeq(0),
            state,
            tcp,
            run_dir,
            info: String::new(),
            before,
            region: uuid.map_or(0, u128::from_be_bytes),
            opening: true,
        };
        // Longer than nicfs waits for hostd.
        let patience = match config.durability {
            Durability::Disk => Duration::from_secs(3),
            _ => Duration::ZERO,
        };
        let client = ClientConfig {
            coordinator: address.clone(),
            cluster: cluster::coordinator::identity(&config.cluster),
            registration,
            keys: keys.clone(),
        };
        let beat = Beat::start(client, patience);
        beat.map(Some).map_err(|e| Error::new("nicfs: coordinator", e))
    }

    /// Is ready: the coordinator hears of it. Without one this node stands alone.
    fn join(&mut self) {
        if self.coordinator.is_some() {
            self.serving = Some(Serving::begin(|event| self.deliver(event)));
            // When this copy was published last, for a person who has to choose between copies.
            let info = self.node.volume().root().time.to_string();
            if let Some(beat) = &self.coordinator {
                beat.opened(self.node.position(), info);
            }
            return;
        }
        let event = Event::View {
            epoch: Epoch(1),
            chain: vec![self.config.node],
            syncing: Vec::new(),
            lapse: 0,
        };
        self.deliver(event);
        // Nobody can take the place of a node that stands alone.
        self.deliver(Event::ServesUntil(u64::MAX));
    }

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
            if self.pool.has_ended() {
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
                self.deliver(Event::Tick);
            }
            // What others have said already comes before background work.
            busy = !heard.is_empty() || self.background() || !self.rung.is_empty();
            while self.host.as_ref().is_some_and(|host| host.has_heard()) {
                self.host_speaks();
            }
            if let Some(failure) = self.node.failure() {
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

    /// Nobody hears these clients ring.
    fn look_at_mute(&mut self) {
        if self.mute.is_empty() || Instant::now() < self.look_at_mute {
            return;
        }
        self.look_at_mute = Instant::now() + MUTE_LOOK;
        for client in self.mute.iter().copied().collect::<Vec<_>>() {
            self.deliver(Event::Doorbell(client));
        }
    }

    /// Those who rang, one after the other; whoever is not heard now is before who rings later.
    fn answer_bells(&mut self) -> Result<(), Error> {
        let begin = Instant::now();
        while begin.elapsed() < BELLS_TIME
            && let Some(token) = self.rung.pop_front()
        {
            self.ready(token)?;
        }
        Ok(())
    }

    fn background(&mut self) -> bool {
        let begin = Instant::now();
        for _ in 0..SLICES {
            if begin.elapsed() >= SLICES_TIME {
                return true;
            }
            let mut effects = Vec::new();
            let more = self.node.work(self.now(), &mut effects);
            self.carry_out(effects);
            if !more {
                return false;
            }
        }
        true
    }

    /// Passes on for how long the coordinator counts this node in. What it said before its last
    /// confirmation, a view without this node above all, has been handled when this is called.
    fn check_fence(&mut self) {
        let Some(coordinator) = &self.coordinator else { return };
        let until = coordinator.serves_until();
        let Some(mut serving) = self.serving.take() else { return };
        let until = until.map(|until| nanos(until.saturating_duration_since(self.began)));
        serving.look(until, &mut Began(self.began), |event| self.deliver(event));
        self.serving = Some(serving);
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

    // --- coordinator ---

    fn coordinator_speaks(&mut self) -> Result<(), Error> {
        let heard = self.coordinator.as_mut().map(Beat::hear).unwrap_or_default();
        for event in heard {
            match event {
                CoordEvent::View(view) => self.view(&view)?,
                CoordEvent::Denied(why) => log::warn!("coordinator: {why}"),
                CoordEvent::Trouble(what) => log::warn!("coordinator: {what}"),
                CoordEvent::Connected => log::info!("registered with the coordinator"),
            }
        }
        Ok(())
    }

    fn view(&mut self, view: &View) -> Result<(), Error> {
        let me = self.config.node;
        let member = view.is_member(me, self.incarnation);
        let mut chain = view.chain.clone();
        if !member {
            chain.retain(|n| *n != me);
        }
        if member {
            // Noted before anything is acknowledged or served in the epoch.
            if noted_processes(&self.config.region) != [self.incarnation] {
                note_processes(&self.config.region, &[self.incarnation])?;
            }
            note_epoch(&self.config.region, view.epoch)?;
            self.state = DataState::Intact { epoch: view.epoch };
        }
        let peers: Vec<Peer> = view
            .members
            .iter()
            .filter(|m| m.node != me)
            .filter_map(|m| {
                let address = match (m.tcp, m.run_dir.is_empty()) {
                    (Some(tcp), _) => PeerAddress::Tcp(tcp),
                    (None, false) => PeerAddress::Local(socket_path(Path::new(&m.run_dir), m.node)),
                    (None, true) => return None,
                };
                Some(Peer { node: m.node, address })
            })
            .collect();
        self.net.set_peers(&peers);
        let syncing = view.syncing.clone();
        let lapse = u64::from(view.lapse_ms) * 1_000_000;
        let (members, replicas) = (view.min_replicas.into(), view.replicas.into());
        self.deliver(Event::Needs { members, replicas });
        self.deliver(Event::View { epoch: view.epoch, chain, syncing, lapse });
        self.progress(self.node.position());
        Ok(())
    }

    fn progress(&mut self, position: StreamSeq) {
        let state = self.state;
        if let Some(coordinator) = &self.coordinator {
            coordinator.set_progress(position, state);
        }
    }

    // --- hostd ---

    fn host_arrived(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.host_listener, flags) else { return };
        // The newest hostd is the one that lives.
        self.host_lost();
        if self.net.register(socket.as_fd(), TOKEN_HOST, Interest::READ).is_err() {
            return;
        }
        log::info!("hostd is here");
        let clients = self.node.status().clients;
        let clients = clients.iter().map(|c| (c.client, c.pid, c.start_time));
        for (client, pid, start) in clients.chain(self.node.past_clients()) {
            let packet = Packet::Adopt { client, pid, start };
            let _ = link::send(socket.as_fd(), &packet, None);
        }
        let region = match FileRegion::open(&self.config.region, self.config.durability) {
            Ok(region) => region,
            Err(e) => {
                self.trouble = Some(format!("nicfs: region {}: {e}", self.config.region.display()));
                return;
            }
        };
        let host = Arc::new(HostLink::new(socket, region, self.config.durability));
        self.host = Some(Arc::clone(&host));
        if host.may_end() {
            self.deliver(Event::HostUp(host));
        } else {
            log::warn!("hostd may not be signalled by this user; copies are made without it");
        }
    }

    fn host_lost(&mut self) {
        if let Some(host) = self.host.take() {
            let _ = self.net.deregister(host.socket().as_fd());
            if let Err(why) = host.end() {
                self.trouble = Some(format!("nicfs: hostd does not end its copies: {why}"));
                return;
            }
            log::warn!("hostd is gone; copies are made without it");
            self.attaching.clear();
            self.deliver(Event::HostDown);
        }
    }

    fn host_speaks(&mut self) {
        loop {
            let Some(host) = &self.host else { return };
            match host.receive() {
                Ok(None) => return,
                Ok(Some((packet, fds))) => self.host_packet(packet, fds),
                Err(e) => {
                    if e.kind() != std::io::ErrorKind::UnexpectedEof {
                        log::warn!("hostd: {e}");
                    }
                    self.host_lost();
                    return;
                }
            }
        }
    }

    fn host_packet(&mut self, packet: Packet, fds: Vec<OwnedFd>) {
        match packet {
            Packet::Attach { token, pid, start, uid, gid, lanes, groups } => {
                let Some(bell) = fds.into_iter().next() else { return };
                self.attaching.insert(token, bell);
                let start_time = start;
                self.deliver(Event::Attach { token, pid, start_time, uid, gid, groups, lanes });
            }
            Packet::Gone { client } => {
                self.drop_bell(client);
                self.deliver(Event::ClientGone(client));
            }
            Packet::Bell { client } => {
                if self.mute.remove(&client)
                    && let Some(bell) = fds.into_iter().next()
                {
                    self.take_bell(client, bell);
                    // It may have rung while nobody had it.
                    self.deliver(Event::Doorbell(client));
                }
            }
            Packet::ArenaQuery { token, arena } => {
                self.deliver(Event::ArenaQuery { token, arena });
            }
            Packet::CopiesDone { id, bad } => self.deliver(Event::CopiesDone { id, bad }),
            other => log::warn!("hostd sent {other:?}, which nicfs does not take"),
        }
    }

    fn take_bell(&mut self, client: ClientId, bell: OwnedFd) {
        let number = self.next_bell;
        self.next_bell += 1;
        if self.net.register(bell.as_fd(), number, Interest::READ).is_ok() {
            self.bells.insert(number, (client, bell));
            self.bell_of.insert(client, number);
        }
    }

    fn drop_bell(&mut self, client: ClientId) {
        self.mute.remove(&client);
        if let Some(token) = self.bell_of.remove(&client)
            && let Some((_, fd)) = self.bells.remove(&token)
        {
            let _ = self.net.deregister(fd.as_fd());
        }
    }

    fn tell_host(&mut self, packet: &Packet) -> bool {
        match &self.host {
            Some(host) => host.send(packet),
            None => false,
        }
    }

    // --- effects ---

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, class, kind, body } => self.send(to, class, kind, body),
                Effect::Attached { token, client, segment } => {
                    self.attached(token, client, segment);
                }
                Effect::AttachRefused { token, errno, text } => {
                    self.attaching.remove(&token);
                    self.tell_host(&Packet::Refused { token, errno, text: text.into() });
                }
                Effect::Arena { token, class, bytes } => {
                    self.tell_host(&Packet::Arena { token, class, bytes });
                }
                Effect::Copies { id, items } => self.copies(id, items),
                Effect::Detached(client) => {
                    self.drop_bell(client);
                    self.tell_host(&Packet::Detached { client });
                }
                Effect::Watch { client, pid, start_time } => {
                    self.tell_host(&Packet::Adopt { client, pid, start: start_time });
                }
                Effect::CaughtUp(node, process, epoch) => {
                    if let Some(coordinator) = &self.coordinator {
                        coordinator.caught_up(node, process, epoch);
                    }
                }
                Effect::Suspect(node) => {
                    log::warn!("node {node} does not acknowledge");
                    let epoch = self.node.status().epoch;
                    if let Some(coordinator) = &self.coordinator {
                        coordinator.suspect(node, epoch);
                    }
                }
                Effect::Wipes => self.forget_region(),
                Effect::Position(position) => self.progress(position),
            }
        }
    }

    /// What lies here is about to be replaced: it counts no longer.
    fn forget_region(&mut self) {
        if self.state == DataState::Fresh {
            return;
        }
        match forget_epoch(&self.config.region) {
            Ok(()) => self.state = DataState::Fresh,
            // What was asked for must not come.
            Err(e) => self.trouble = Some(format!("nicfs: {e}")),
        }
        self.progress(self.node.position());
    }

    fn attached(&mut self, token: u64, client: ClientId, segment: u32) {
        let Some(bell) = self.attaching.remove(&token) else { return };
        self.take_bell(client, bell);
        if !self.tell_host(&Packet::Attached { token, client, segment }) {
            self.drop_bell(client);
            self.deliver(Event::ClientGone(client));
        }
    }

    fn copies(&mut self, id: u64, items: Vec<storage::volume::CopyItem>) {
        if !self.host.as_ref().is_some_and(|host| host.ask(id, items)) {
            // All of them are to be done by the node itself.
            self.deliver(Event::CopiesDone { id, bad: vec![0] });
        }
    }

    // --- messages ---

    fn send(&mut self, to: NodeId, class: Class, kind: u16, body: Body) {
        if !self.net.is_up(to) {
            return;
        }
        let line = self.line(to, class);
        let piece = self.packing.send(to, class, kind, body, line);
        self.work(piece);
        self.transmit(to, class);
    }

    fn line(&self, to: NodeId, class: Class) -> Line {
        Line { now: self.now(), queued: self.net.queued(to, class) }
    }

    /// Gives the transport what it takes of what is ready.
    fn transmit(&mut self, to: NodeId, class: Class) {
        while let Some((kind, body)) = self.packing.next(to, class) {
            let line = self.line(to, class);
            match self.net.send(to, class, kind, &[&body]) {
                Ok(()) => self.packing.sent(to, class, body.len(), line),
                Err(SendError::Down) => {}
                Err(SendError::Full) => self.packing.put_back(to, class, kind, body),
                Err(e) => log::error!("message {kind} to node {to}: {e}"),
            }
        }
    }

    fn hear(&mut self, from: NodeId, class: Class, kind: u16, body: Vec<u8>) {
        if self.packing.is_plain(from, class, kind) {
            self.deliver(Event::Frame { from, kind, body });
            return;
        }
        let keep = self.node.passes_on();
        let piece = self.packing.hear(from, class, kind, body, keep);
        self.work(piece);
        self.deliver_heard(from, class);
        while self.packing.is_full() {
            let ended = self.pool.wait();
            if ended.is_empty() {
                break;
            }
            self.take_up(ended);
        }
    }

    fn deliver_heard(&mut self, from: NodeId, class: Class) {
        while let Some(heard) = self.packing.next_heard(from, class) {
            if let Some(packed) = heard.packed {
                self.net.recycle(packed);
            }
            match heard.body {
                Ok(body) => self.deliver(Event::Frame { from, kind: heard.kind, body }),
                Err(damaged) => {
                    log::warn!("message {} of node {from}: {damaged}", heard.kind);
                    match damaged.instead(heard.kind, self.node.status().epoch) {
                        Some(body) => self.deliver(Event::Frame { from, kind: heard.kind, body }),
                        None => self.net.disconnect(from),
                    }
                }
            }
        }
    }

    // --- work ---

    /// Has a piece done, beside this thread if there is room for it.
    fn work(&mut self, piece: Option<packing::Piece>) {
        let Some(piece) = piece else { return };
        let bytes = piece.bytes();
        if let Err(piece) = self.pool.give(bytes, move || Ended::Packing(piece.work())) {
            let ended = piece();
            self.take_up(vec![ended]);
        }
    }

    fn work_ended(&mut self) {
        let ended = self.pool.take();
        self.take_up(ended);
    }

    fn take_up(&mut self, ended: Vec<Ended>) {
        for Ended::Packing(done) in ended {
            match self.packing.done(done) {
                Some(Moved::Out(to, class)) => self.transmit(to, class),
                Some(Moved::In(from, class)) => self.deliver_heard(from, class),
                None => {}
            }
        }
    }

    // --- status ---

    fn answer_status(&mut self) {
        while let Ok((mut stream, _)) = self.admin.accept() {
            let own = status::Own {
                hostd: self.host.is_some(),
                longest_turn: self.longest_turn,
                warnings: self.keys.as_ref().map(Keys::warnings).unwrap_or_default(),
                compression: self.packing.compression(),
                packing: self.packing.counters(),
            };
            let text = status::json(&self.node.status(), &self.net.counters(), own);
            // The socket's buffer holds the answer; a reader that does not read loses it.
            let _ = stream.set_nonblocking(true);
            let _ = std::io::Write::write_all(&mut stream, text.as_bytes());
        }
    }
}

fn epoll_error(e: std::io::Error) -> Error {
    Error::new("nicfs: epoll", e)
}

/// A node that has lost some of what was reserved goes on with what there is.
fn take_up_reserve(region: &FileRegion) -> Result<(), storage::volume::Fault> {
    let parsed = storage::volume::read_superblocks(region)?;
    let Some(superblock) = parsed.into_iter().flatten().next() else { return Ok(()) };
    let full = bytes_when_full(superblock.capacity_blocks * storage::limits::BLOCK_BYTES);
    let missing = region.take_up_reserve(full)?;
    if missing > 0 {
        let at = region.path().display();
        log::warn!("{at}: of the reserved space {} are gone; make room there", in_mib(missing));
    }
    Ok(())
}

fn ring_bytes(media: &dyn Media) -> Result<u64, Error> {
    let parsed =
        storage::volume::read_superblocks(media).map_err(|e| Error::new("nicfs: superblock", e))?;
    let found = parsed.into_iter().reduce(|a, b| if a.is_ok() { a } else { b.or(a) });
    match found {
        Some(Ok(superblock)) => Ok(superblock.stream_bytes),
        Some(Err(e)) if media.size(Segment::Super).is_ok_and(|size| size > 0) => {
            Err(Error(format!("nicfs: {e}")))
        }
        _ => {
            Err(Error("nicfs: the region has no superblock; run `corbel mkfs` on it first".into()))
        }
    }
}
