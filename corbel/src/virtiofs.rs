//! `corbel virtiofs`: a virtio-fs device for a virtual machine, with the options of virtiofsd.
#![allow(unsafe_code)] // a descriptor that is given by its number

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ::virtiofs::device::{Device, Options};
use ::virtiofs::ids::{IdMap, Rule};
use ::virtiofs::ledger::Ledger;
use ::virtiofs::limits::{Limits, Rate};
use ::virtiofs::remote::back::{Back, Window};
use ::virtiofs::remote::front::{self, Front};
use ::virtiofs::remote::link::{Address, Identity, Listener};
use ::virtiofs::sandbox::{self, Seccomp};
use ::virtiofs::tenant::{self, Tenant};
use ::virtiofs::vhost;
use ::virtiofs::vring::Vrings;
use base::NodeId;
use clap::{Args, ValueEnum};
use client::fs::FileSystem;
use cluster::tls::{Keys, Role};
use frontend::fuse::Guest;
use frontend::process::EndingSignals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::mount::open_source;
use crate::output::Output;
use crate::{local, serve, units};

/// A monitor that has hung up and does not come back within that time is gone, and its guest with it.
const GONE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// What is behind the device.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Backend {
    /// A directory of the volume of a node
    Corbel,
    /// A directory of this machine
    Dir,
    /// Names are kept in memory and data forgotten
    Null,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Sandbox {
    Namespace,
    Chroot,
    None,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Filter {
    None,
    Kill,
    Log,
    Trap,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Cache {
    Auto,
    Always,
    Never,
    Metadata,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Acl {
    Never,
    Auto,
    Always,
}

/// Arguments of `corbel virtiofs`.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = "Examples:\n  corbel virtiofs --socket-path /run/vm1.fs --shared-dir /tenants/one    a directory of the volume\n  \
        corbel virtiofs --backend dir --socket-path /run/vm1.fs --shared-dir /srv/data --xattr\n  \
        qemu-system-x86_64 -object memory-backend-memfd,id=m,size=1G,share=on -numa node,memdev=m \\\n    \
        -chardev socket,id=fs,path=/run/vm1.fs -device vhost-user-fs-pci,chardev=fs,tag=data …\n  \
        mount -t virtiofs data /mnt                                            in the guest"
)]
#[allow(clippy::struct_excessive_bools)] // switches of a command line
pub struct VirtiofsArgs {
    /// Where the virtual machine monitor connects (a Unix socket, made here)
    #[arg(long, value_name = "SOCKET", required_unless_present_any = ["fd", "listen", "print_capabilities"], conflicts_with = "fd")]
    socket_path: Option<PathBuf>,
    /// Descriptor of a socket that listens already
    #[arg(long, value_name = "FD")]
    fd: Option<RawFd>,
    /// Name of the group that may connect to the socket
    #[arg(long, value_name = "GROUP", requires = "socket_path")]
    socket_group: Option<String>,
    /// What is behind the device
    #[arg(long, value_enum, default_value = "corbel")]
    backend: Backend,
    /// The directory that the guest gets: of the volume (backend corbel), or of this machine (dir)
    #[arg(long, value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// Socket of the node (the configuration's if left out); backend corbel
    #[arg(long, value_name = "SOCKET")]
    source: Option<PathBuf>,
    /// Serve the file system to a device on another machine, which is started with --remote: a socket's path, or HOST:PORT
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["fd", "socket_path"])]
    listen: Option<Address>,
    /// Pass all requests on to the machine that has the file system, where --listen was given
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["listen", "backend", "shared_dir", "source", "state"])]
    remote: Option<Address>,
    /// Who is there, by its certificate (over TCP): node-N
    #[arg(long, value_name = "ROLE", requires = "remote")]
    peer: Option<Role>,
    /// Requests that have no answer from there for so many seconds end with EIO (else they wait)
    #[arg(long, value_name = "SECONDS", requires = "remote", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    soft: Option<u64>,
    /// The tag that the device says it has, for monitors that ask it (QEMU has it from its own command line)
    #[arg(long)]
    tag: Option<String>,
    /// Whose device it is, in logs
    #[arg(long, value_name = "NAME", default_value = "guest")]
    tenant: String,
    /// Request queues at most; the monitor says how many there are
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=64))]
    request_queues: u64,
    /// Threads of each queue beside the one that leads it, for what may wait
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=64))]
    thread_pool_size: u64,
    /// Microseconds for which a queue is looked at before its thread sleeps, when requests come fast
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=1000))]
    poll_us: u64,
    /// Cuts off the rest of the machine (the default for root: namespace)
    #[arg(long, value_enum)]
    sandbox: Option<Sandbox>,
    /// What happens at a system call that a device does not need
    #[arg(long, value_enum, default_value = "kill")]
    seccomp: Filter,
    /// Extended attributes
    #[arg(long)]
    xattr: bool,
    /// Access control lists, where the back end keeps them (implies --xattr)
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_value = "never", default_missing_value = "always")]
    posix_acl: Acl,
    /// Accepted; the guest asks each time and sees what others change at once, whatever is said here
    #[arg(long, value_enum, default_value = "auto")]
    cache: Cache,
    /// Accepted and not done: a write is in the file system when it returns
    #[arg(long)]
    writeback: bool,
    /// The guest can change nothing
    #[arg(long)]
    readonly: bool,
    /// Accepted: nothing is mounted below the directory
    #[arg(long, overrides_with = "no_announce_submounts")]
    announce_submounts: bool,
    /// Accepted
    #[arg(long)]
    no_announce_submounts: bool,
    /// Accepted: READDIRPLUS is not used, since nothing may be kept
    #[arg(long)]
    no_readdirplus: bool,
    /// Accepted: always so
    #[arg(long)]
    allow_direct_io: bool,
    /// Users of guest and host: TYPE:SOURCE:TARGET:COUNT, TYPE one of map, guest, host, squash-guest, squash-host,
    /// forbid-guest (repeatable)
    #[arg(long, value_name = "RULE")]
    translate_uid: Vec<Rule>,
    /// The same for groups
    #[arg(long, value_name = "RULE")]
    translate_gid: Vec<Rule>,
    /// Operations a second at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iops: Option<u64>,
    /// Operations at once after a pause (a tenth of a second's if left out)
    #[arg(long, value_name = "N", requires = "iops")]
    iops_burst: Option<u64>,
    /// Bytes a second at most, for example 100M
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes)]
    bandwidth: Option<u64>,
    /// Bytes at once after a pause (a tenth of a second's if left out)
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes, requires = "bandwidth")]
    bandwidth_burst: Option<u64>,
    /// Files and directories that the guest may know at once
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(1..))]
    nodes_max: u64,
    /// Files that it may have open
    #[arg(long, value_name = "N", default_value_t = 1 << 16, value_parser = clap::value_parser!(u64).range(1..))]
    handles_max: u64,
    /// Open files of the process at most
    #[arg(long, value_name = "N")]
    rlimit_nofile: Option<u64>,
    /// File in which the device keeps what it must know of its guest, so that it can be killed and started again without
    /// the guest's noticing more than a pause
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// End when the monitor hangs up
    #[arg(long)]
    once: bool,
    /// Say in JSON what this program can do, for libvirt
    #[arg(long)]
    print_capabilities: bool,
}

fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Kind::Usage, message, "see corbel virtiofs --help")
}

fn environment(message: String) -> Failure {
    Failure::new(Kind::Environment, message, "run as root, or with --sandbox none --seccomp none")
}

impl VirtiofsArgs {
    /// The file system of the device, as the tenant sees it. Opened behind the wall, so that no thread and no descriptor of
    /// it is from before.
    fn open(&self, global: &Global, sandbox: Sandbox) -> Result<Arc<dyn FileSystem>> {
        let text = |path: &Path| {
            let text = path.to_str().map(String::from);
            text.ok_or_else(|| usage(format!("{}: not UTF-8", path.display())))
        };
        let (source, within, keep) = match self.backend {
            Backend::Null => ("null:".into(), PathBuf::from("/"), None),
            Backend::Dir => {
                let dir =
                    self.shared_dir.as_ref().ok_or_else(|| usage("--shared-dir is missing"))?;
                let dir = dir.canonicalize().context(dir.display())?;
                (format!("dir:{}", text(&dir)?), PathBuf::from("/"), Some(dir))
            }
            Backend::Corbel => {
                let source = match &self.source {
                    Some(source) => source.clone(),
                    None => global.load()?.node.socket,
                };
                let source = std::path::absolute(&source).context(source.display())?;
                let parent = source.parent().unwrap_or(Path::new("/"));
                let parent = parent.canonicalize().context(parent.display())?;
                let source = parent.join(source.file_name().unwrap_or_default());
                let within = self.shared_dir.clone().unwrap_or_else(|| PathBuf::from("/"));
                (text(&source)?, within, Some(parent))
            }
        };
        if sandbox != Sandbox::None {
            sandbox::enter_namespaces(keep.as_slice()).map_err(environment)?;
        }
        let fs = open_source(&source)?;
        let acl = self.posix_acl != Acl::Never;
        let translated = !self.translate_uid.is_empty() || !self.translate_gid.is_empty();
        if acl && translated {
            return Err(usage(
                "access lists name users: not with --translate-uid and --translate-gid",
            ));
        }
        if self.posix_acl == Acl::Always && !fs.keeps_acls() {
            return Err(usage("this back end keeps no access lists"));
        }
        let options = tenant::Options {
            users: IdMap::new(&self.translate_uid)
                .map_err(|e| usage(format!("--translate-uid: {e}")))?,
            groups: IdMap::new(&self.translate_gid)
                .map_err(|e| usage(format!("--translate-gid: {e}")))?,
            readonly: self.readonly,
            xattr: self.xattr || acl,
            acl,
        };
        let path = std::os::unix::ffi::OsStrExt::as_bytes(within.as_os_str());
        let tenant = Tenant::new(fs, path, options).map_err(|e| {
            Failure::failed(format!("directory {}: {e}", within.display()), "make it first")
        })?;
        Ok(Arc::new(tenant))
    }

    /// Our keys, and who must be at the other end, where an address is another machine's.
    fn identity(&self, global: &Global, address: &Address) -> Result<Option<Identity>> {
        if matches!(address, Address::Unix(_)) {
            return Ok(None);
        }
        let config = global.load()?;
        let own = Role::Node(NodeId(config.node.id));
        let place = serve::key_place(&config, own).ok_or_else(|| {
            let what = "over TCP both sides show certificates, and this cluster has none";
            Failure::new(Kind::Config, what, "corbel cert authority, corbel cert issue")
        })?;
        let keys =
            Keys::open(place).map_err(|e| Failure::new(Kind::Config, e, "see docs/cli.md"))?;
        if self.remote.is_some() && self.peer.is_none() {
            return Err(usage("--peer: who is at the other end of --remote, over TCP"));
        }
        Ok(Some(Identity { keys, peer: self.peer.unwrap_or(own) }))
    }

    /// How requests are passed on.
    fn front(&self, global: &Global, address: &Address) -> Result<front::Options> {
        Ok(front::Options {
            address: address.clone(),
            identity: self.identity(global, address)?,
            tenant: self.tenant.clone(),
            soft: self.soft.map(Duration::from_secs),
            silence: Window::default().silence,
        })
    }

    /// Where devices on other machines connect.
    fn links(&self, global: &Global, address: &Address) -> Result<Listener> {
        if let Address::Unix(path) = address {
            free(path)?;
        }
        let identity = self.identity(global, address)?;
        Listener::bind(address, identity)
            .map_err(|e| Failure::new(Kind::Environment, e, "choose another address"))
    }

    /// What the process is cut off from.
    fn wall(&self) -> Result<Sandbox> {
        let tcp = matches!(self.listen, Some(Address::Tcp(_)));
        let reaches_out = tcp || self.remote.is_some();
        if reaches_out && self.sandbox.is_some_and(|sandbox| sandbox != Sandbox::None) {
            return Err(usage("--sandbox: behind a wall no other machine is reached"));
        }
        let is_root = rustix::process::geteuid().is_root();
        let usual = if is_root && !reaches_out { Sandbox::Namespace } else { Sandbox::None };
        Ok(self.sandbox.unwrap_or(usual))
    }

    /// What is accepted for the sake of who starts virtiofsd so, and changes nothing.
    fn without_effect(&self) -> Vec<&'static str> {
        let given = [
            ("--cache", self.cache != Cache::Auto && self.cache != Cache::Never),
            ("--writeback", self.writeback),
            ("--announce-submounts", self.announce_submounts),
            ("--no-announce-submounts", self.no_announce_submounts),
            ("--no-readdirplus", self.no_readdirplus),
            ("--allow-direct-io", self.allow_direct_io),
        ];
        given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect()
    }

    /// The directory of the socket, to remove it at the end: behind the wall its path is not there.
    fn socket_dir(&self) -> Option<OwnedFd> {
        let parent = self.socket_path.as_ref()?.parent()?;
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        std::fs::File::open(parent).ok().map(OwnedFd::from)
    }

    /// Where virtual machine monitors connect.
    fn monitors(&self) -> Result<UnixListener> {
        if let Some(fd) = self.fd {
            if fd < 3 {
                return Err(usage(format!("--fd {fd}: that is a standard stream")));
            }
            // SAFETY: whoever started us says that the descriptor is ours, and it is taken once.
            let owned = unsafe { OwnedFd::from_raw_fd(fd) };
            rustix::net::sockopt::socket_acceptconn(&owned)
                .ok()
                .filter(|listens| *listens)
                .ok_or_else(|| usage(format!("--fd {fd}: not a socket that listens")))?;
            return Ok(UnixListener::from(owned));
        }
        let path = self.socket_path.as_ref().ok_or_else(|| usage("--socket-path is missing"))?;
        free(path)?;
        let old = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path).context(path.display());
        rustix::process::umask(old);
        let listener = listener?;
        if let Some(group) = &self.socket_group {
            let gid = group_id(group)
                .ok_or_else(|| usage(format!("--socket-group: no group {group}")))?;
            std::os::unix::fs::chown(path, None, Some(gid)).context(path.display())?;
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o660);
            std::fs::set_permissions(path, mode).context(path.display())?;
        }
        Ok(listener)
    }

    fn limits(&self) -> Limits {
        let rate = |rate: Option<u64>, burst: Option<u64>| {
            let rate = rate? as f64;
            Some(Rate { rate, burst: burst.map_or(rate / 10.0, |burst| burst as f64).max(1.0) })
        };
        Limits::new(rate(self.iops, self.iops_burst), rate(self.bandwidth, self.bandwidth_burst))
    }
}

/// Takes away the socket of a device that was killed. One that listens is left alone.
fn free(path: &Path) -> Result<()> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        let what = format!("{}: another device listens there", path.display());
        return Err(Failure::failed(what, "end it, or choose another path"));
    }
    if std::fs::symlink_metadata(path)
        .is_ok_and(|m| std::os::unix::fs::FileTypeExt::is_socket(&m.file_type()))
    {
        std::fs::remove_file(path).context(path.display())?;
    }
    Ok(())
}

fn group_id(name: &str) -> Option<u32> {
    let groups = std::fs::read_to_string("/etc/group").ok()?;
    let mut lines = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = lines.find(|fields| fields.first() == Some(&name));
    name.parse().ok().or_else(|| found?.get(2)?.parse().ok())
}

/// Serves one monitor after the other.
fn monitors(
    listener: &UnixListener,
    rings: &Arc<Vrings>,
    device: Option<&Device>,
    tag: Option<&str>,
    once: bool,
) {
    for stream in listener.incoming() {
        match stream {
            Ok(stream) => vhost::serve(rings, tag, stream),
            Err(error) => log::warn!("waiting for a monitor: {error}"),
        }
        if once {
            break;
        }
        // A guest that was killed shall not keep its files and locks for ever. One whose monitor connects again does.
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        let gone = poll(&mut fds, Some(&GONE)).is_ok_and(|ready| ready == 0);
        if let Some(device) = device.filter(|_| gone) {
            device.reset();
        }
    }
}

/// Runs `corbel virtiofs`.
pub fn run(global: &Global, out: &Output, args: &VirtiofsArgs) -> Result<()> {
    if args.print_capabilities {
        println!("{{\n  \"type\": \"fs\",\n  \"features\": [\n    \"separate-options\"\n  ]\n}}");
        return Ok(());
    }
    if args.tag.as_ref().is_some_and(|tag| tag.is_empty() || tag.len() > vhost::TAG_MAX) {
        return Err(usage(format!("--tag: 1 to {} bytes", vhost::TAG_MAX)));
    }
    local::tie();
    if let Some(most) = args.rlimit_nofile.filter(|most| *most > 0) {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(Resource::Nofile, limit)
            .map_err(|e| environment(format!("--rlimit-nofile: {e}")))?;
    }
    let sandbox = args.wall()?;
    let listener = if args.listen.is_none() { Some(args.monitors()?) } else { None };
    let links = args.listen.as_ref().map(|address| args.links(global, address)).transpose()?;
    let socket_dir = args.socket_dir();
    let guest = Guest { nodes_max: count(args.nodes_max), handles_max: count(args.handles_max) };
    let (ledger, kept) = match &args.state {
        None => (None, None),
        Some(path) => {
            let (ledger, kept) = Ledger::open(path, &guest).context(path.display())?;
            (Some(Arc::new(ledger)), kept)
        }
    };
    for option in args.without_effect() {
        log::info!("{option} has no effect here");
    }
    let signals = EndingSignals::catch().context("catching signals")?;
    sandbox::no_new_privileges().map_err(environment)?;
    let options = Options {
        threads: count(args.thread_pool_size) + 1,
        poll: Duration::from_micros(args.poll_us),
        limits: Arc::new(args.limits()),
        guest,
        ledger,
    };
    let device = match &args.remote {
        None => Some(Device::new(args.open(global, sandbox)?, options)),
        Some(_) => None,
    };
    sandbox::ban_system_calls(match args.seccomp {
        Filter::None => Seccomp::None,
        Filter::Kill => Seccomp::Kill,
        Filter::Log => Seccomp::Log,
        Filter::Trap => Seccomp::Trap,
    })
    .map_err(environment)?;
    if let Some((kept, device)) = kept.zip(device.as_ref()) {
        let (told, opened) = (kept.told.len(), kept.opened.len());
        let lost = device.resume(kept);
        log::info!(
            "goes on with a guest that knows {told} inodes and has {opened} files open; {lost} of these are lost"
        );
    }
    let (ended, end) = std::io::pipe().context("pipe")?;
    let (tag, once) = (args.tag.clone(), args.once);
    let mut crew = None;
    let body: Box<dyn FnOnce() + Send> = match (links, listener) {
        (Some(links), _) => {
            let back = Back::new(&args.tenant, count(args.request_queues), Window::default());
            if let Some(device) = &device {
                crew = Some(device.start(&back).context("starting threads")?);
            }
            Box::new(move || back.listen(&links))
        }
        (None, Some(listener)) => {
            let rings = vhost::rings(&args.tenant, count(args.request_queues)).context("queues")?;
            match (&args.remote, &device) {
                (Some(address), _) => {
                    Front::start(&*rings, args.front(global, address)?)
                        .context("starting threads")?;
                }
                (None, Some(device)) => {
                    crew = Some(device.start(&*rings).context("starting threads")?);
                }
                (None, None) => {}
            }
            let device = device.clone();
            Box::new(move || monitors(&listener, &rings, device.as_deref(), tag.as_deref(), once))
        }
        (None, None) => return Err(usage("--socket-path, --fd or --listen")),
    };
    std::thread::Builder::new()
        .name("virtiofs-vmm".into())
        .spawn(move || {
            body();
            drop(end);
        })
        .context("starting a thread")?;
    let said = serde_json::json!({"listening": args.socket_path, "tenant": args.tenant});
    out.result(&said, || println!("{}: waiting for a virtual machine", args.tenant));
    signals.wait_or(&ended).context("waiting for signals")?;
    if let Some((dir, name)) =
        socket_dir.zip(args.socket_path.as_ref().and_then(|path| path.file_name()))
    {
        // If it is gone, it need not be removed.
        let _ = rustix::fs::unlinkat(dir, name, rustix::fs::AtFlags::empty());
    }
    if let Some(device) = &device {
        log::info!("{}", device.stats_text().replace('\n', "; "));
    }
    // A request may be waiting for a node that is away: nobody waits for that here. What the guest has open ends with the process, or
    // is in the book for the next one.
    std::mem::forget((crew, device));
    Ok(())
}
