//! A local cluster for trying things: a coordinator and N nodes as daemons of one machine, each
//! node with a region, services and a mount of its own below one directory.
//!
//! ```text
//! DIR/cluster.json          what `up` was asked for
//! DIR/coordinator/          state, coordinator.pid, log
//! DIR/keys/                 who is who over TCP, if anything goes there
//! DIR/net/                  network namespaces, if each node has its own
//! DIR/nN/corbel.toml        configuration of node N
//! DIR/nN/region/            its persistent memory
//! DIR/nN/run/               sockets, serve.pid, hostd.pid, nicfs.pid, mount.pid, logs
//! DIR/nN/mnt/               the volume as node N sees it
//! ```
//!
//! Everything is found again through pid files (see [`crate::process`]); nothing is ended by name.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::tls::Role;
use cluster::transport::PeerAddress;
use rustix::process::Signal;

use crate::config::{
    Authentication, Compression, Config, Copies, Durability, Leases, Pipeline, Size, Transport,
};
use crate::failure::{Context, Failure, Kind, Result};
use crate::links::{Links, Side};
use crate::process::{self, Identity};

/// What a local cluster is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Nodes.
    pub nodes: u32,
    /// Members of the chain.
    pub replicas: u32,
    /// Fabric between them.
    pub transport: Transport,
    /// Space for data on each node.
    pub capacity: u64,
    /// Size of the replication stream's ring.
    pub stream: u64,
    /// Lanes of a log.
    pub lanes: u32,
    /// Bytes of a lane.
    pub lane_bytes: u64,
    /// Where node 1 is mounted, if not in its directory.
    pub mount: Option<PathBuf>,
    /// Whether nodes are mounted at all.
    pub mounted: bool,
    /// Whether each node has a network namespace of its own (see [`crate::links`]).
    pub apart: bool,
    /// How they know each other where they speak over TCP.
    pub authentication: Authentication,
    /// How what passes between them is compressed.
    pub compression: Compression,
    /// Who does the work of the stages of the data path.
    pub pipeline: Pipeline,
    /// Who makes the long copies of what is published.
    pub copies: Copies,
    /// What programs are given that write one file at the same time.
    pub leases: Leases,
}

impl Plan {
    /// `nodes` nodes, every one a replica.
    pub fn of(nodes: u32) -> Self {
        Self {
            nodes,
            replicas: nodes,
            transport: Transport::Shm,
            capacity: 4 << 30,
            stream: 256 << 20,
            lanes: 4,
            lane_bytes: 16 << 20,
            mount: None,
            mounted: true,
            apart: false,
            authentication: Authentication::Certificates,
            compression: Compression::Auto,
            pipeline: Pipeline::Pipelined,
            copies: Copies::Hostd,
            leases: Leases::Files,
        }
    }

    /// Whether anything goes over TCP between its services.
    fn has_tcp(&self) -> bool {
        self.apart || self.transport == Transport::Tcp
    }
}

/// A cluster below a directory, running or not.
#[derive(Clone, Debug)]
pub struct Local {
    dir: PathBuf,
    plan: Plan,
    /// Whether what is started ends with this process.
    tied: bool,
}

/// Name of every local cluster.
const NAME: &str = "local";

/// The processes of a node: the supervisor last.
pub const NODE_PROCESSES: [&str; 3] = ["nicfs", "hostd", "serve"];

/// Environment variable: the process that a daemon of ours must not outlive.
pub const TIED: &str = "CORBEL_TIED_TO";

/// Called by daemons: ends with SIGTERM when the process named by [`TIED`] ends.
pub fn tie() {
    let Some(parent) = std::env::var(TIED).ok().and_then(|pid| pid.parse::<i32>().ok()) else {
        return;
    };
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        log::warn!("this process may outlive the one that started it: {error}");
    }
    // It may have ended before the line above.
    if rustix::process::getppid().is_none_or(|pid| pid.as_raw_nonzero().get() != parent) {
        std::process::exit(0);
    }
}

/// Ports of local clusters: below those that kernels hand out by themselves.
const PORTS: std::ops::Range<u16> = 10_240..32_000;
/// Ports that one process looks at first.
const PORTS_EACH: u16 = 64;

/// Free addresses for services that will listen a moment later. A port that the kernel picks may
/// be picked again for another cluster in that moment, so each process tries ports of its own.
fn free_addresses(count: usize) -> Result<Vec<SocketAddr>> {
    let span = PORTS.end - PORTS.start;
    let first = (std::process::id() % u32::from(span / PORTS_EACH)) as u16 * PORTS_EACH;
    let mut held = Vec::new(); // until all are known, so that they differ
    let mut refused = None;
    for step in 0..span {
        let port = PORTS.start + (first + step) % span;
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(listener) => held.push(listener),
            Err(error) => refused = Some(error),
        }
        if held.len() == count {
            return held.iter().map(|l| l.local_addr().context("local address")).collect();
        }
    }
    let error = refused.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into());
    Err(Failure::io("a free port on 127.0.0.1", &error))
}

/// This program.
pub fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("the path of this program")
}

impl Local {
    /// The default directory: of this user, in memory.
    pub fn default_dir() -> PathBuf {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir).join("corbel"),
            _ => format!("/dev/shm/corbel-{}", rustix::process::getuid().as_raw()).into(),
        }
    }

    /// The cluster that `up` made in `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = dir.join("cluster.json");
        let missing = || {
            Failure::new(
                Kind::Unreachable,
                format!("{}: no cluster here", dir.display()),
                "start one with `corbel cluster up`, or name its directory with --dir",
            )
        };
        let text = std::fs::read_to_string(&file).map_err(|_| missing())?;
        let json: serde_json::Value = serde_json::from_str(&text).map_err(|_| missing())?;
        let number = |key: &str| json[key].as_u64().ok_or_else(missing);
        let nodes = u32::try_from(number("nodes")?).ok().filter(|n| (1..=16).contains(n));
        let mut plan = Plan::of(nodes.ok_or_else(missing)?);
        plan.replicas = u32::try_from(number("replicas")?).map_err(|_| missing())?;
        plan.mount = json["mount"].as_str().map(PathBuf::from);
        plan.mounted = json["mounted"] != false;
        plan.apart = json["apart"] == true;
        Ok(Self { dir: dir.to_path_buf(), plan, tied: false })
    }

    /// Makes directories, configurations and empty volumes; starts nothing.
    pub fn create(dir: &Path, plan: Plan) -> Result<Self> {
        if dir.join("cluster.json").exists() {
            return Err(Failure::failed(
                format!("{}: there is a cluster already", dir.display()),
                "end it with `corbel cluster down`, or choose another --dir",
            ));
        }
        // It is written down as text, and read again.
        if let Some(mount) = plan.mount.as_ref().filter(|mount| mount.to_str().is_none()) {
            return Err(Failure::new(
                Kind::Usage,
                format!("{}: a path that is not UTF-8", mount.display()),
                "choose another --mount",
            ));
        }
        let this = Self { dir: dir.to_path_buf(), plan, tied: false };
        let taken = this.made().into_iter().find(|path| path.exists());
        if let Some(path) = taken {
            return Err(Failure::failed(
                format!("{} is in the way", path.display()),
                "remove it if it is left from a cluster that was, or choose another --dir",
            ));
        }
        if let Ok(about) = std::fs::metadata(dir)
            && (about.uid() != rustix::process::geteuid().as_raw() || about.mode() & 0o022 != 0)
        {
            // Whose directory it is may put other files in the place of the cluster's.
            return Err(Failure::failed(
                format!("{}: others may write to it, user {} owns it", dir.display(), about.uid()),
                "choose a --dir of your own, or take away what others may do: chmod go-w",
            ));
        }
        this.fill().inspect_err(|_| this.clear())?;
        Ok(this)
    }

    /// What a cluster consists of in its directory, in which there may be other things.
    fn made(&self) -> Vec<PathBuf> {
        let mut made: Vec<PathBuf> = self.nodes().map(|node| self.node_dir(node)).collect();
        made.extend(
            ["coordinator", "fabric", "keys", "cluster.json"].map(|name| self.dir.join(name)),
        );
        made
    }

    /// Removes what it made itself, as far as that is possible.
    fn clear(&self) {
        for path in self.made() {
            let _ = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
        }
        self.links().remove();
        // Only if nothing else is there.
        let _ = std::fs::remove_dir(&self.dir);
    }

    /// The links between the nodes, if they are apart.
    pub fn links(&self) -> Links {
        Links::of(&self.dir)
    }

    /// Whether each node has a network namespace of its own.
    pub fn is_apart(&self) -> bool {
        self.plan.apart
    }

    /// Removes all that `up` made but the logs; says where these are now, if they say anything.
    pub fn keep_logs(&self) -> Option<PathBuf> {
        let kept = self.dir.join("logs");
        let nodes = self.nodes().map(|n| (self.node_dir(n).join("run/log"), format!("node-{n}")));
        let coordinator = (self.dir.join("coordinator/log"), "coordinator".to_string());
        let mut found = false;
        for (log, name) in nodes.chain([coordinator]) {
            if log.metadata().is_ok_and(|about| about.len() > 0) {
                let _ = std::fs::create_dir_all(&kept);
                found |= std::fs::rename(&log, kept.join(name)).is_ok();
            }
        }
        self.clear();
        found.then_some(kept)
    }

    fn fill(&self) -> Result<()> {
        let (this, dir) = (self, &self.dir);
        let mut own = std::fs::DirBuilder::new();
        own.recursive(true).mode(0o755).create(dir).context(dir.display())?;
        let addresses = this.addresses()?;
        if this.plan.apart {
            this.links().make(this.plan.nodes)?;
        }
        for node in this.nodes() {
            let at = this.node_dir(node);
            for sub in ["run", "mnt"] {
                std::fs::create_dir_all(at.join(sub)).context(at.display())?;
            }
            let config = this.node_config(node, &addresses);
            config.check(&at.display().to_string())?;
            std::fs::write(this.config_file(node), config.render()).context(at.display())?;
        }
        for shared in ["coordinator", "fabric"] {
            let mut private = std::fs::DirBuilder::new();
            private.mode(0o700).create(this.dir.join(shared)).context(dir.display())?;
        }
        if this.plan.has_tcp() && this.plan.authentication == Authentication::Certificates {
            this.make_keys()?;
        }
        let plan = &this.plan;
        let mount = plan.mount.as_ref().and_then(|path| path.to_str());
        let about = serde_json::json!({
            "nodes": plan.nodes, "replicas": plan.replicas, "apart": plan.apart, "mount": mount,
            "mounted": plan.mounted, "version": 1
        });
        std::fs::write(this.dir.join("cluster.json"), about.to_string()).context(dir.display())?;
        let uuid = crate::mkfs::show_uuid(&crate::mkfs::new_uuid()?);
        for node in this.nodes() {
            // For trying things: it takes no more memory than is used.
            this.corbel(node, &["mkfs", "--sparse", "--uuid", &uuid])?;
        }
        Ok(())
    }

    fn keys(&self) -> PathBuf {
        self.dir.join("keys")
    }

    /// An authority of its own, and what it issues: all in one place, since all is on one machine.
    fn make_keys(&self) -> Result<()> {
        let (at, days) = (self.keys(), 3650);
        crate::cert::make_authority(&at, days, false)?;
        let nodes = self.nodes().map(|node| Role::Node(base::NodeId(node)));
        for role in [Role::Coordinator, Role::Admin].into_iter().chain(nodes) {
            crate::cert::issue(&at, &at, NAME, role, days, false)?;
        }
        Ok(())
    }

    /// Of the coordinator, of each node, and for the metrics of each.
    fn addresses(&self) -> Result<Vec<SocketAddr>> {
        if !self.plan.apart {
            return free_addresses(1 + 2 * self.plan.nodes as usize);
        }
        // Nobody else is there.
        let at = |side: Side, port| SocketAddr::new(side.address(), port);
        let nodes = self.nodes().map(|node| at(Side::Node(node), PORTS.start));
        // Metrics are for the machine that they are of.
        let own = SocketAddr::from(([127, 0, 0, 1], PORTS.start + 1));
        let hub = std::iter::once(at(Side::Hub, PORTS.start));
        Ok(hub.chain(nodes).chain(self.nodes().map(|_| own)).collect())
    }

    fn node_config(&self, node: u32, addresses: &[SocketAddr]) -> Config {
        let mut config = Config::default();
        let (at, plan) = (self.node_dir(node), &self.plan);
        config.cluster.id = NAME.into();
        config.cluster.authentication = plan.authentication;
        config.cluster.compression = plan.compression;
        config.service.pipeline = plan.pipeline;
        config.service.copies = plan.copies;
        config.service.leases = plan.leases;
        config.cluster.keys = self.keys();
        config.cluster.coordinator_dir = self.dir.join("coordinator");
        // On one machine there is no port for strangers to knock at.
        config.cluster.coordinator = if plan.has_tcp() {
            PeerAddress::Tcp(addresses[0])
        } else {
            PeerAddress::Local(config.cluster.coordinator_dir.join("coordinator.sock"))
        };
        config.cluster.replicas = plan.replicas;
        config.node.id = node;
        config.node.listen = addresses[node as usize];
        config.node.transport = plan.transport;
        config.node.shm_dir = self.dir.join("fabric");
        config.node.region = at.join("region");
        config.node.durability = Durability::Replicated;
        config.node.capacity = Size(plan.capacity);
        config.node.stream = Size(plan.stream);
        config.node.socket = at.join("run/hostd.sock");
        config.node.metrics = crate::config::Metrics(Some(addresses[(plan.nodes + node) as usize]));
        config.log.lanes = plan.lanes;
        config.log.lane_bytes = Size(plan.lane_bytes);
        config
    }

    /// Numbers of the nodes.
    pub fn nodes(&self) -> std::ops::RangeInclusive<u32> {
        1..=self.plan.nodes
    }

    /// Whether its nodes are mounted.
    pub fn is_mounted(&self) -> bool {
        self.plan.mounted
    }

    /// The directory of the cluster.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Directory of a node.
    pub fn node_dir(&self, node: u32) -> PathBuf {
        self.dir.join(format!("n{node}"))
    }

    /// Configuration file of a node.
    pub fn config_file(&self, node: u32) -> PathBuf {
        self.node_dir(node).join("corbel.toml")
    }

    /// Configuration of a node.
    pub fn config(&self, node: u32) -> Result<Config> {
        Config::load(Some(&self.config_file(node)), &[])
    }

    /// Where the volume is mounted on a node.
    pub fn mount_point(&self, node: u32) -> PathBuf {
        match &self.plan.mount {
            Some(at) if node == 1 => at.clone(),
            _ => self.node_dir(node).join("mnt"),
        }
    }

    fn pid_file(&self, node: u32, name: &str) -> PathBuf {
        self.node_dir(node).join("run").join(format!("{name}.pid"))
    }

    /// A process of a node, if it runs.
    pub fn process(&self, node: u32, name: &str) -> Option<Identity> {
        process::read_pid_file(&self.pid_file(node, name))
    }

    /// The coordinator, if it runs.
    pub fn coordinator(&self) -> Option<Identity> {
        process::read_pid_file(&self.dir.join("coordinator/coordinator.pid"))
    }

    /// Every process of the cluster that runs, with a name for people.
    pub fn processes(&self) -> Vec<(String, Identity)> {
        let mut all = Vec::new();
        all.extend(self.coordinator().map(|p| ("coordinator".to_string(), p)));
        for node in self.nodes() {
            for name in NODE_PROCESSES.iter().chain(&["mount"]) {
                all.extend(self.process(node, name).map(|p| (format!("n{node} {name}"), p)));
            }
        }
        all
    }

    /// A corbel command with the configuration of `node`.
    pub fn command(&self, node: u32) -> Result<Command> {
        let mut command = Command::new(own_program()?);
        command.arg("--config").arg(self.config_file(node));
        Ok(command)
    }

    /// Runs a verb for `node` to its end; its standard output.
    pub fn corbel(&self, node: u32, args: &[&str]) -> Result<String> {
        let output = self.command(node)?.args(args).output().context("corbel")?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let message = said.trim().trim_start_matches("corbel: ").to_string();
        Err(Failure::failed(format!("corbel {} on node {node}: {message}", args.join(" ")), ""))
    }

    /// From now on, what is started ends when this process does, however that happens.
    pub fn tied(self) -> Self {
        Self { tied: true, ..self }
    }

    /// Starts the coordinator and every node; waits until the chain is formed.
    pub fn up(&self, limit: Duration) -> Result<()> {
        self.start_coordinator()?;
        for node in self.nodes() {
            self.start_node(node)?;
        }
        for node in self.nodes() {
            self.wait_ready(node, limit)?;
        }
        Ok(())
    }

    /// Waits until a node serves and the chain has all its members.
    pub fn wait_ready(&self, node: u32, limit: Duration) -> Result<()> {
        let log = self.node_dir(node).join("run/log");
        process::wait_until(&format!("node {node} to join the chain"), limit, || {
            if self.process(node, "serve").is_none() {
                return Err(ended(&format!("node {node}"), &log));
            }
            if self.coordinator().is_none() {
                return Err(ended("the coordinator", &self.dir.join("coordinator/log")));
            }
            let Ok(status) = self.status(node) else { return Ok(None) };
            let members = status["chain"].as_array().map_or(0, Vec::len);
            let serves = status["ready"] == true && status["hostd"] == true;
            Ok((serves && members == self.plan.replicas as usize).then_some(()))
        })
    }

    /// What nicfs of a node says about itself.
    pub fn status(&self, node: u32) -> Result<serde_json::Value> {
        let socket = crate::ask::socket(&self.node_dir(node).join("run"), "nicfs");
        crate::ask::ask(&socket, Duration::from_secs(1))
    }

    /// Epoch of the chain as a node knows it.
    pub fn epoch(&self, node: u32) -> Result<u64> {
        let status = self.status(node)?;
        status["epoch"].as_u64().ok_or_else(|| {
            Failure::failed(format!("node {node} names no epoch: {status}"), "see its log")
        })
    }

    /// `corbel run --` on a node, the program to be added.
    pub fn run_command(&self, node: u32) -> Result<Command> {
        let mut command = self.command(node)?;
        command.args(["run", "--mount"]).arg(self.mount_point(node)).arg("--");
        Ok(command)
    }

    fn start(&self, side: Side, args: &[&str], pid_file: &Path, log: &Path) -> Result<Identity> {
        if let Some(running) = process::read_pid_file(pid_file) {
            return Ok(running);
        }
        let node = if let Side::Node(node) = side { node } else { 1 };
        let mut command = self.command(node)?;
        command.args(args);
        if self.tied {
            command.env(TIED, std::process::id().to_string());
        }
        if self.plan.apart {
            command = self.links().enter(side, &command);
        }
        let (_child, identity) = process::start(command, log)?;
        process::write_pid_file(pid_file, identity)?;
        Ok(identity)
    }

    /// Starts the coordinator.
    pub fn start_coordinator(&self) -> Result<()> {
        let at = self.dir.join("coordinator");
        let args = ["serve", "coordinator"];
        self.start(Side::Hub, &args, &at.join("coordinator.pid"), &at.join("log")).map(drop)
    }

    /// Starts the services of a node.
    pub fn start_node(&self, node: u32) -> Result<()> {
        let log = self.node_dir(node).join("run/log");
        self.start(Side::Node(node), &["serve"], &self.pid_file(node, "serve"), &log).map(drop)
    }

    /// Sends a signal to the services of a node; how many got it.
    pub fn signal_node(&self, node: u32, signal: Signal) -> Vec<Identity> {
        if signal == Signal::KILL
            && let Some(supervisor) = self.process(node, "serve")
        {
            // Else it would start the others again; and if it went first, they would end in order.
            supervisor.signal(Signal::STOP);
        }
        let running = NODE_PROCESSES.iter().filter_map(|name| self.process(node, name));
        running.filter(|process| process.signal(signal)).collect()
    }

    /// Mounts the volume on a node and waits until it is there.
    pub fn mount(&self, node: u32) -> Result<PathBuf> {
        let (at, log) = (self.mount_point(node), self.node_dir(node).join("run/mount.log"));
        std::fs::create_dir_all(&at).context(at.display())?;
        let point = at.display().to_string();
        let args = ["mount", "--foreground", &point];
        let identity = self.start(Side::Node(node), &args, &self.pid_file(node, "mount"), &log)?;
        process::wait_until(&format!("mount on {point}"), Duration::from_secs(10), || {
            if !identity.is_alive() {
                return Err(ended("mount", &log));
            }
            Ok(is_mount_point(&at).then_some(()))
        })?;
        Ok(at)
    }

    /// Whether the mount of a node is there, and the process that serves it.
    pub fn is_mounting(&self, node: u32) -> bool {
        self.process(node, "mount").is_some() && is_mount_point(&self.mount_point(node))
    }

    /// Unmounts on a node.
    pub fn unmount(&self, node: u32) {
        let at = self.mount_point(node);
        if let Some(mount) = self.process(node, "mount") {
            mount.end(Duration::from_secs(3));
        }
        if is_mount_point(&at) {
            lazy_unmount(&at);
        }
        let _ = std::fs::remove_file(self.pid_file(node, "mount"));
    }

    /// Ends everything that runs, unmounts, and removes the directory unless `keep`.
    pub fn down(&self, keep: bool) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        for node in self.nodes() {
            self.unmount(node);
        }
        // The supervisors first, side by side: they end their children, and would start them again
        // if those ended by themselves. The coordinator last, so that nobody misses it.
        let all = self.processes();
        for (_, process) in all.iter().filter(|(name, _)| name.ends_with("serve")) {
            process.signal(Signal::TERM);
            process.signal(Signal::CONT);
        }
        for node in self.nodes() {
            for name in NODE_PROCESSES {
                // A stopped child cannot act on what its supervisor asks.
                if let Some(process) = self.process(node, name) {
                    process.signal(Signal::CONT);
                }
            }
        }
        let deadline = Instant::now() + Duration::from_secs(8);
        let is_supervisor = |name: &str| name.ends_with("serve");
        let (supervisors, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(name, _)| is_supervisor(name));
        let (coordinator, children): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(name, _)| name == "coordinator");
        for (name, process) in supervisors.into_iter().chain(children).chain(coordinator) {
            let left = deadline.saturating_duration_since(Instant::now());
            let forced = process.end(left.max(Duration::from_millis(50)));
            ended.push(if forced { format!("{name} (killed)") } else { name });
        }
        if !keep {
            self.remove()?;
        }
        Ok(ended)
    }

    fn remove(&self) -> Result<()> {
        if let Some(node) = self.nodes().find(|n| is_mount_point(&self.mount_point(*n))) {
            let at = self.mount_point(node);
            return Err(Failure::failed(
                format!("{} is still mounted; nothing was removed", at.display()),
                "end the programs that use it, then run `corbel cluster down` again",
            ));
        }
        for path in self.made().iter().filter(|path| path.is_dir()) {
            std::fs::remove_dir_all(path).context(path.display())?;
        }
        self.links().remove();
        std::fs::remove_file(self.dir.join("cluster.json")).context(self.dir.display())?;
        // Whatever else is there was not made by `up`.
        match std::fs::remove_dir(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::DirectoryNotEmpty => {
                Err(Failure::io(self.dir.display(), &error))
            }
            _ => Ok(()),
        }
    }
}

/// A service ended although it should run.
pub fn ended(what: &str, log: &Path) -> Failure {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    let said = last.into_iter().rev().collect::<Vec<_>>().join(" / ");
    Failure::failed(format!("{what} ended: {said}"), format!("its log is {}", log.display()))
}

/// Whether something is mounted exactly at `path`. Asks the kernel's table, not the file system,
/// which may hang.
pub fn is_mount_point(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let table = std::fs::read("/proc/self/mounts").unwrap_or_default();
    let wanted = escape(path.as_os_str().as_bytes());
    table.split(|b| *b == b'\n').any(|line| line.split(|b| *b == b' ').nth(1) == Some(&wanted))
}

/// As the kernel writes paths in its table.
fn escape(path: &[u8]) -> Vec<u8> {
    path.iter().fold(Vec::new(), |mut out, b| {
        match b {
            b' ' | b'\t' | b'\n' | b'\\' => out.extend(format!("\\{b:03o}").bytes()),
            _ => out.push(*b),
        }
        out
    })
}

/// Detaches a mount whose server is gone or busy.
fn lazy_unmount(path: &Path) {
    if rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH).is_err() {
        let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(path).status();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_found_in_the_kernels_table() {
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self")));
        assert_eq!(escape(b"/a b\\"), b"/a\\040b\\134");
    }

    #[test]
    fn addresses_differ_and_are_free() {
        let found = free_addresses(33).unwrap();
        let mut listeners = Vec::new();
        for address in &found {
            assert!(PORTS.contains(&address.port()), "{address}");
            listeners.push(TcpListener::bind(address).unwrap());
        }
        // What is taken is passed over.
        assert!(free_addresses(33).unwrap().iter().all(|a| !found.contains(a)));
    }

    #[test]
    fn a_mount_point_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStrExt;
        let dir = std::env::temp_dir().join(format!("corbel-text-{}", std::process::id()));
        let mount = Some(PathBuf::from(std::ffi::OsStr::from_bytes(b"/mnt/\xff")));
        let refused = Local::create(&dir, Plan { mount, ..Plan::of(1) }).unwrap_err();
        assert_eq!(refused.kind, Kind::Usage);
        assert!(!dir.exists(), "nothing was made");
    }

    #[test]
    fn there_is_no_cluster_in_an_empty_or_strange_directory() {
        let dir = std::env::temp_dir().join(format!("corbel-local-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for text in ["", "{", "{}", "{\"nodes\":0,\"replicas\":1}", "{\"nodes\":-1}", "[]"] {
            std::fs::write(dir.join("cluster.json"), text).unwrap();
            assert_eq!(Local::open(&dir).unwrap_err().kind, Kind::Unreachable, "{text}");
        }
        std::fs::write(dir.join("cluster.json"), "{\"nodes\":3,\"replicas\":2}").unwrap();
        let local = Local::open(&dir).unwrap();
        assert_eq!(local.nodes(), 1..=3);
        assert!(local.processes().is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
