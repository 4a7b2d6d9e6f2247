//! The start: the region is taken, the coordinator told, the node opened, and a driver put around it, on sockets and shared memory.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::random::Random;
use base::{Clock, clock::SystemClock};
use cluster::coordinator::DataState;
use cluster::net::{Net, NetConfig};
use cluster::tls::Keys;
use cluster::transport::{Interest, Transport};
use storage::format::superblock::Durability;
use storage::media::Media;
use storage::region::FileRegion;

use super::coordination::register;
use super::format::{ring_bytes, take_up_reserve};
use super::noted::{is_given_up, noted_epoch};
use super::{
    Driver, TOKEN_ADMIN, TOKEN_BELLS, TOKEN_COORDINATOR, TOKEN_HOST_LISTENER, TOKEN_SCRUB,
    TOKEN_SIGNAL, TOKEN_WORK, epoll_error, scrub_socket,
};
use crate::config::{Error, Membership, NicfsConfig, PeerTransport, Pipeline, private_socket};
use crate::core::limits::Limits;
use crate::core::{GRACE, JOIN_STEP, Node, NodeConfig};
use crate::host::end_copies;
use crate::hostd::listen;
use crate::packing::{self, Compression, Packing};
use crate::pool::{self, Pool};
use crate::signal::Signals;

/// A new number at each start: nanoseconds since 1970.
fn incarnation() -> u64 {
    SystemClock::default().realtime()
}

/// What is no longer than this is done by the thread that decides.
const fn inline_bytes(config: &NicfsConfig) -> usize {
    match config.pipeline {
        Pipeline::Pipelined => config.inline_bytes,
        Pipeline::Serial | Pipeline::HostBackground | Pipeline::Host => usize::MAX,
    }
}

fn node_config(
    config: &NicfsConfig,
    ring_bytes: u64,
    incarnation: u64,
) -> Result<NodeConfig, Error> {
    Ok(NodeConfig {
        limits: Limits {
            inline_bytes: inline_bytes(config),
            hold: match config.pipeline {
                Pipeline::Host => Pipeline::ASSISE_HOLD,
                _ => config.hold,
            },
            // A fence is a wait for the disk there: not for the thread that decides.
            keepers: match config.durability {
                Durability::Pmem | Durability::Replicated => Limits::SHIPPED.keepers,
                Durability::Disk => 1,
            },
            ranges: if config.ranges { Limits::SHIPPED.ranges } else { 0 },
            host_min: if config.host_copies { Limits::SHIPPED.host_min } else { u64::MAX },
            on_demand: config.pipeline == Pipeline::Host,
            scrub_every: config.scrub_every,
            scrub_rate: config.scrub_rate,
            join_rate: config.join_rate,
            ..Limits::SHIPPED
        },
        node: config.node,
        lanes: config.lanes,
        lane_bytes: config.lane_bytes,
        clients_max: config.clients_max,
        clients_per_user: config.clients_per_user,
        per_user: config.per_user,
        scheduler: config.scheduler,
        weights: config.weights.clone(),
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
    })
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

impl Driver<Net> {
    pub(super) fn start(config: NicfsConfig, signals: Signals) -> Result<Self, Error> {
        let region_at = format!("nicfs: region {}", config.region.display());
        let region = FileRegion::open(&config.region, config.durability)
            .map_err(|e| Error::new(&region_at, e))?;
        region.lock().map_err(|e| Error::new(&region_at, e))?;
        region.keeps_its_promise().map_err(|e| Error::new(&region_at, e))?;
        is_given_up(&config.region)?;
        let incarnation = incarnation();
        let keys = config.keys.clone().map(Keys::open).transpose();
        let keys = keys.map_err(|e| Error(format!("nicfs: keys: {e}")))?;
        let mut net = net(&config, keys.clone(), incarnation)?;
        let state = noted_epoch(&config.region)
            .map_or(DataState::Fresh, |epoch| DataState::Intact { epoch });
        // Before anything that takes long: the others wait for who is about to be back.
        let crew = Arc::default();
        let beat = register(&config, &region, (&net, &keys), incarnation, state, &crew)?;
        // What the service before this one asked for must not come over what this one publishes.
        end_copies(&region).map_err(|e| Error(format!("{region_at}: hostd: {e}")))?;
        take_up_reserve(&region).map_err(|e| Error::new(&region_at, e))?;
        let media: Arc<dyn Media> = if config.fabric_delay > 0 {
            Arc::new(crate::delayed::Delayed::new(region, config.fabric_delay))
        } else {
            Arc::new(region)
        };
        let ring_bytes = ring_bytes(&*media)?;
        let node_config = node_config(&config, ring_bytes, incarnation)?;
        let mut node = Node::new(node_config, Arc::clone(&media), Random::new(incarnation))
            .map_err(|e| Error::new(&region_at, e))?;
        let clock = SystemClock::default();
        node.set_realtime_offset(clock.realtime().wrapping_sub(clock.monotonic()));
        let private = private_socket(&config.socket);
        let host_listener = listen(&private, 0o600)
            .map_err(|e| Error::new(&format!("nicfs: socket {}", private.display()), e))?;
        let scrubs = scrub_socket(&config.admin);
        let _ = std::fs::remove_file(&scrubs);
        let scrubs = UnixListener::bind(&scrubs)
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(|e| Error::new(&format!("nicfs: socket {}", scrubs.display()), e))?;
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
        let packing_limits =
            packing::Limits { verify: inline_bytes(&config), ..packing::Limits::SHIPPED };
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
            unhurried: false,
            raised: false,
            admin,
            scrubs,
            bells: BTreeMap::new(),
            bell_of: BTreeMap::new(),
            rung: VecDeque::new(),
            next_bell: TOKEN_BELLS,
            mute,
            look_at_mute: Instant::now(),
            attaching: BTreeMap::new(),
            packing: Packing::new(compression, limits.threads, packing_limits),
            media,
            pool: Pool::watched(limits, crew).map_err(|e| Error::new("nicfs: pool", e))?,
            ended_here: Vec::new(),
            pipeline: config.pipeline,
            worked: BTreeMap::new(),
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
        let fd = driver.scrubs.as_fd();
        driver.net.register(fd, TOKEN_SCRUB, Interest::READ).map_err(epoll_error)?;
        driver.net.register(driver.pool.bell(), TOKEN_WORK, Interest::READ).map_err(epoll_error)?;
        driver.join();
        Ok(driver)
    }
}
