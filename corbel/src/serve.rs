//! `corbel serve`: the services of a node, each a process of its own, kept running.
//!
//! Without a role it is the supervisor: it starts hostd and nicfs as children, starts them again
//! when they end (at once, then after 0.1 s, and longer each time, up to 5 s), and ends them when it is ended.
//! They end with it even when it is killed. Pid files and the sockets that answer `corbel status`
//! lie beside the socket of hostd.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use cluster::coordinator::View;
use cluster::coordinator::embedded::{Server, ServerConfig};
use cluster::coordinator::machine::{Patience, VolumeSpec};
use cluster::tls::{KeyPlace, Keys};
use cluster::transport::PeerAddress;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::config::{Authentication, Config, Encryption};
use crate::failure::{Context, Failure, Kind, Result};
use crate::local;
use crate::metrics;
use crate::process::{self, Identity};
use crate::signals;

/// Arguments of `corbel serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// What to serve; without it hostd and nicfs of this node, supervised
    #[arg(value_enum)]
    pub role: Option<Role>,
}

/// One service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Role {
    /// The node service, on the offload processor
    Nicfs,
    /// The owner of the persistent memory, on the host
    Hostd,
    /// Membership and epochs of the cluster
    Coordinator,
}

impl Role {
    /// Its name in files and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nicfs => "nicfs",
            Self::Hostd => "hostd",
            Self::Coordinator => "coordinator",
        }
    }
}

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A child that ran this long is not in a loop of failures.
const SETTLED: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(3);

/// The run directory of a node: pid files, sockets.
pub fn run_dir(config: &Config) -> PathBuf {
    config.node.socket.parent().unwrap_or(Path::new("/")).to_path_buf()
}

/// Writes the pid file of this process.
pub fn announce(dir: &Path, name: &str) -> Result<()> {
    let own = Identity::own().ok_or_else(|| {
        Failure::failed("cannot read /proc/self/stat", "mount /proc; pid files need it")
    })?;
    std::fs::create_dir_all(dir).context(dir.display())?;
    let path = dir.join(format!("{name}.pid"));
    match process::read_pid_file(&path) {
        Some(other) if other != own => Err(Failure::failed(
            format!("{name} runs already, as process {} ({})", other.pid, path.display()),
            "end it first, or give this node another node.socket",
        )),
        _ => process::write_pid_file(&path, own),
    }
}

/// A child that is kept running.
#[derive(Debug)]
struct Kept {
    role: Role,
    identity: Option<Identity>,
    since: Instant,
    pause: Duration,
    due: Option<Instant>,
}

/// The supervisor of hostd and nicfs.
pub fn supervise(global: &Global) -> Result<()> {
    let config = global.load()?;
    // Said once, and not by services that are started again and again.
    drop(keys(&config, cluster::tls::Role::Node(base::NodeId(config.node.id)))?);
    announce(&run_dir(&config), "serve")?;
    signals::catch();
    signals::catch_again();
    let bell = signals::bell().context("the supervisor's bell")?;
    let (ends, ended) = mpsc::channel();
    let mut kept: Vec<Kept> = [Role::Hostd, Role::Nicfs]
        .map(|role| Kept {
            role,
            identity: None,
            since: Instant::now(),
            pause: Duration::ZERO,
            due: Some(Instant::now()),
        })
        .into();
    while signals::pending().is_none() {
        if signals::take_again() {
            let nicfs = kept.iter().filter(|one| one.role == Role::Nicfs);
            nicfs.filter_map(|one| one.identity).for_each(|nicfs| {
                nicfs.signal(rustix::process::Signal::HUP);
            });
        }
        for one in &mut kept {
            if one.due.is_some_and(|due| due <= Instant::now()) {
                start(one, global, &ends)?;
            }
        }
        // Nothing to do until a child ends or is due, or a signal comes.
        let due = kept.iter().filter_map(|one| one.due).min();
        let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = wait.and_then(|wait| rustix::event::Timespec::try_from(wait).ok());
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(bell, rustix::event::PollFlags::IN)];
        // Interrupted is as good as woken.
        let _ = rustix::event::poll(&mut fds, wait.as_ref());
        let _ = rustix::io::read(bell, &mut [0u8; 8]);
        for (role, how) in ended.try_iter() {
            note_end(&mut kept, role, &how);
        }
    }
    log::info!("ending");
    for one in kept.iter().rev() {
        if one.identity.is_some_and(|identity| identity.end(PATIENCE)) {
            log::warn!("{} did not end in time and was killed", one.role.name());
        }
    }
    Ok(())
}

fn start(one: &mut Kept, global: &Global, ends: &mpsc::Sender<(Role, String)>) -> Result<()> {
    let mut command = Command::new(local::own_program()?);
    if let Some(file) = &global.config {
        command.arg("--config").arg(file);
    }
    for set in &global.set {
        command.arg("--set").arg(set);
    }
    command.arg("--log-level").arg(global.log_level.to_string());
    command.args(["serve", one.role.name()]);
    command.env(local::TIED, std::process::id().to_string());
    let mut child: Child = command.spawn().context(one.role.name())?;
    one.identity = i32::try_from(child.id()).ok().and_then(Identity::of);
    one.since = Instant::now();
    one.due = None;
    let (ends, role) = (ends.clone(), one.role);
    let wait = move || {
        let how = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let _ = ends.send((role, how));
        signals::wake();
    };
    std::thread::Builder::new().name("wait".into()).spawn(wait).context("thread")?;
    Ok(())
}

fn note_end(kept: &mut [Kept], role: Role, how: &str) {
    let Some(one) = kept.iter_mut().find(|one| one.role == role) else { return };
    if one.since.elapsed() > SETTLED {
        // The others wait for it.
        one.pause = Duration::ZERO;
    }
    log::error!("{} ended ({how}); starting it again in {:?}", role.name(), one.pause);
    one.identity = None;
    one.due = Some(Instant::now() + one.pause);
    one.pause = (one.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
}

/// Runs `corbel serve`.
pub fn run(global: &Global, args: &ServeArgs) -> Result<()> {
    local::tie();
    service::process::give_up_rights();
    match args.role {
        None => supervise(global),
        Some(role) => serve(role, &global.load()?),
    }
}

/// What nicfs is told, from the configuration.
pub fn nicfs_config(config: &Config) -> service::NicfsConfig {
    let (node, limits) = (&config.node, &config.limits);
    service::NicfsConfig {
        node: base::NodeId(node.id),
        cluster: config.cluster.id.clone(),
        keys: key_place(config, cluster::tls::Role::Node(base::NodeId(node.id))),
        membership: service::Membership::Coordinator(config.cluster.coordinator.clone()),
        listen: node.listen,
        transport: match node.transport {
            crate::config::Transport::Tcp => service::PeerTransport::Tcp,
            crate::config::Transport::Shm => service::PeerTransport::Shm(node.shm_dir.clone()),
        },
        region: node.region.clone(),
        durability: durability(config),
        socket: node.socket.clone(),
        admin: crate::ask::socket(&run_dir(config), Role::Nicfs.name()),
        lanes: config.log.lanes,
        lane_bytes: config.log.lane_bytes.0,
        clients_max: limits.clients,
        clients_per_user: limits.clients_per_user,
        per_user: service::core::PerUser {
            leases: limits.leases_per_user.into(),
            requests: limits.requests_per_user.into(),
        },
        scheduler: match config.service.scheduler {
            crate::config::Scheduler::Urgent => service::core::schedule::Scheduler::Urgent,
            crate::config::Scheduler::RoundRobin => service::core::schedule::Scheduler::RoundRobin,
        },
        weights: config.service.weights.0.clone(),
        memory: limits.memory.0,
        high: limits.high_watermark,
        low: limits.low_watermark,
        pipeline: match config.service.pipeline {
            crate::config::Pipeline::Pipelined => service::config::Pipeline::Pipelined,
            crate::config::Pipeline::Serial => service::config::Pipeline::Serial,
            crate::config::Pipeline::HostBackground => service::config::Pipeline::HostBackground,
            crate::config::Pipeline::Host => service::config::Pipeline::Host,
        },
        ranges: config.service.leases == crate::config::Leases::Ranges,
        host_copies: config.service.copies == crate::config::Copies::Hostd,
        inline_bytes: usize::try_from(config.service.inline.0).unwrap_or(usize::MAX),
        hold: u64::try_from(config.service.hold_back.as_nanos()).unwrap_or(u64::MAX),
        scrub_every: u64::try_from(config.service.scrub_every.as_nanos()).unwrap_or(u64::MAX),
        scrub_rate: config.service.scrub_rate.0,
        join_rate: config.service.join_rate.0,
        compression: {
            use crate::config::Compression as Word;
            use service::packing::Compression;
            match config.cluster.compression {
                Word::Auto => Compression::Auto,
                Word::None => Compression::None,
                Word::Lz4 => Compression::Lz4,
                Word::Zstd => Compression::Zstd,
            }
        },
        fabric_delay: u64::try_from(node.fabric_delay.as_nanos()).unwrap_or(u64::MAX),
    }
}

/// Where the keys of `role` lie, if it speaks over TCP and has to show who it is.
pub fn key_place(config: &Config, role: cluster::tls::Role) -> Option<KeyPlace> {
    let cluster = &config.cluster;
    let nodes = matches!(role, cluster::tls::Role::Node(_))
        && config.node.transport == crate::config::Transport::Tcp;
    let tcp = nodes || matches!(cluster.coordinator, PeerAddress::Tcp(_));
    (tcp && cluster.authentication == Authentication::Certificates).then(|| KeyPlace {
        folder: cluster.keys.clone(),
        role,
        cluster: cluster.id.clone(),
        encrypts: cluster.encryption == Encryption::On,
    })
}

/// The keys of `role`, if there have to be any.
pub fn keys(config: &Config, role: cluster::tls::Role) -> Result<Option<Keys>> {
    let open = |place| {
        Keys::open(place).map_err(|why| {
            Failure::new(
                Kind::Config,
                format!("cluster.keys: {why}"),
                "`corbel cert --help` shows how three machines get theirs; \
                 cluster.authentication = \"none\" lets whoever reaches the ports read and replace everything",
            )
        })
    };
    key_place(config, role).map(open).transpose()
}

fn durability(config: &Config) -> storage::format::superblock::Durability {
    use storage::format::superblock::Durability as Media;
    match config.node.durability {
        crate::config::Durability::Pmem => Media::Pmem,
        crate::config::Durability::Replicated => Media::Replicated,
        crate::config::Durability::Disk => Media::Disk,
    }
}

/// Runs one service in this process.
fn serve(role: Role, config: &Config) -> Result<()> {
    let dir = match role {
        Role::Coordinator => config.cluster.coordinator_dir.clone(),
        Role::Nicfs | Role::Hostd => run_dir(config),
    };
    let speaks = match role {
        Role::Coordinator => cluster::tls::Role::Coordinator,
        Role::Nicfs | Role::Hostd => cluster::tls::Role::Node(base::NodeId(config.node.id)),
    };
    if role != Role::Hostd {
        drop(keys(config, speaks)?);
    }
    announce(&dir, role.name())?;
    if role != Role::Coordinator {
        service::process::keep_to(&config.service.cores.0).map_err(|why| {
            let remedy = "name cores of this machine that the service may use (nproc --all, taskset -p 1), or \"\"";
            Failure::new(Kind::Config, format!("service.cores: {why}"), remedy)
        })?;
    }
    let ended = |error: service::Error| {
        Failure::failed(format!("{} of node {}: {error}", role.name(), config.node.id), "")
    };
    if role != Role::Coordinator {
        // Before there is a thread beside this one.
        service::signal::hold().context("signals")?;
    }
    match role {
        Role::Nicfs => {
            let nicfs = nicfs_config(config);
            if let Some(address) = config.node.metrics.0 {
                let admin = nicfs.admin.clone();
                let scrape = move || match crate::ask::ask(&admin, Duration::from_secs(1)) {
                    Ok(said) => metrics::from_status(&said),
                    Err(failure) => format!("# {}\n", failure.message.replace('\n', " ")),
                };
                metrics::serve(address, scrape)?;
            }
            service::nicfs::run(nicfs).map_err(ended)
        }
        Role::Hostd => service::hostd::run(service::HostdConfig {
            region: config.node.region.clone(),
            durability: durability(config),
            socket: config.node.socket.clone(),
            connections_per_user: config.limits.connections_per_user as usize,
        })
        .map_err(ended),
        Role::Coordinator => coordinator(config, &dir),
    }
}

/// Serves membership until a signal comes.
fn coordinator(config: &Config, dir: &Path) -> Result<()> {
    signals::catch();
    signals::catch_again();
    // A heartbeat that is handled late looks like a node that died.
    service::process::raise_priority(-15);
    service::process::Thread::current().realtime(2);
    let at = &config.cluster.coordinator;
    let keys = keys(config, cluster::tls::Role::Coordinator)?;
    let mut server = Server::open(&coordinator_config(config, keys.clone())).map_err(|error| {
        Failure::failed(
            format!("coordinator on {at}, state in {}: {error}", dir.display()),
            "check cluster.coordinator, cluster.coordinator_dir and what listens there",
        )
    })?;
    let shown = Arc::new(Mutex::new(json!({})));
    let answer = Arc::clone(&shown);
    let about = move || answer.lock().map_or(Value::Null, |value| value.clone());
    crate::ask::answer(&crate::ask::socket(dir, Role::Coordinator.name()), about)?;
    let mut last = Vec::new();
    while signals::pending().is_none() {
        server.turn(Duration::from_secs(1)).context("coordinator")?;
        if let Some(keys) = keys.as_ref().filter(|_| signals::take_again()) {
            keys.read_again();
        }
        for note in server.take_notes() {
            log::warn!("coordinator: {note}");
        }
        let views = server.views();
        if views != last {
            if let Ok(mut shown) = shown.lock() {
                *shown = json!({"views": views.iter().map(show_view).collect::<Vec<_>>()});
            }
            last = views;
        }
    }
    Ok(())
}

fn coordinator_config(config: &Config, keys: Option<Keys>) -> ServerConfig {
    let cluster = &config.cluster;
    let millis = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
    ServerConfig {
        listen: cluster.coordinator.clone(),
        folder: cluster.coordinator_dir.clone(),
        cluster: cluster::coordinator::identity(&cluster.id),
        volumes: vec![VolumeSpec {
            name: cluster.id.clone(),
            replicas: u16::try_from(cluster.replicas).unwrap_or(u16::MAX),
            min_replicas: u16::try_from(cluster.min_replicas).unwrap_or(u16::MAX),
            nodes: Vec::new(),
        }],
        patience: Patience {
            heartbeat_ms: millis(cluster.heartbeat),
            failure_timeout_ms: millis(cluster.failure_timeout),
            lost_connection_ms: millis(cluster.lost_connection),
            grace_ms: millis(cluster.grace),
            ..Patience::default()
        },
        keys,
    }
}

fn show_view(view: &View) -> Value {
    let numbers = |nodes: &[base::NodeId]| nodes.iter().map(|node| node.0).collect::<Vec<_>>();
    json!({
        "volume": view.volume,
        "epoch": view.epoch.0,
        "replicas": view.replicas,
        "min_replicas": view.min_replicas,
        "level": view.level.0,
        "chain": numbers(&view.chain),
        "syncing": numbers(&view.syncing),
        "members": view.members.iter().map(|m| json!({
            "node": m.node.0, "reachable": m.reachable, "position": m.position.0,
        })).collect::<Vec<_>>(),
    })
}
