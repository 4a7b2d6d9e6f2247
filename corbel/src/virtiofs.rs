//! `corbel virtiofs`: a virtio-fs device for a virtual machine, with the options of virtiofsd.
#![allow(unsafe_code)] // a descriptor that is given by its number

mod compat;
mod figures;
mod tenants;

use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::virtiofs::device::{Crew, Device, Options};
use ::virtiofs::hal::Transport;
use ::virtiofs::ids::{IdMap, Rule};
use ::virtiofs::ledger::{Kept, Ledger};
use ::virtiofs::limits::{Limits, Rate};
use ::virtiofs::remote::back::{Back, Window};
use ::virtiofs::remote::front::{self, Front};
use ::virtiofs::remote::link::{Address, Identity, Listener};
use ::virtiofs::sandbox::{self, Seccomp};
use ::virtiofs::share::{Member, Share};
use ::virtiofs::tenant::{self, Keeps, Tenant};
use ::virtiofs::transfer::{KEY, Key};
use ::virtiofs::vhost::{self, Monitor, Patience};
use base::{InodeId, NodeId};
use clap::{Args, ValueEnum};
use client::fs::{Caller, FileSystem};
use cluster::tls::{Keys, Role};
use frontend::fuse::Guest;
use frontend::process::EndingSignals;
use frontend::{secret, source};
use kv::link::Place;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::mount::open_as_heir;
use crate::output::Output;
use crate::{local, metrics, serve, units};

pub use compat::command_line;

/// A monitor that has hung up and does not come back within that time is gone, and its guest with it.
const GONE: Duration = Duration::from_secs(10);
/// The same of one that has not come back to a device that was started again: its machine may be started again as well.
const GONE_FIRST: Duration = Duration::from_secs(60);
/// The same of a device on another machine: a network may be away for longer, and its guest goes on meanwhile.
const GONE_FAR: Duration = Duration::from_secs(300);

/// The tenant, if nobody says who it is.
const NAMELESS: &str = "guest";

/// What is behind the device.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Backend {
    /// A directory of the volume of a node
    Corbel,
    /// A directory of this machine
    Dir,
    /// Names are kept in memory and data forgotten
    Null,
    /// Files kept by a key-value server (the Redis protocol)
    Kv,
    /// An NFS export (version 3 or 4, through libnfs)
    Nfs,
    /// What a shared library has (corbel-fs.h, docs/backends.md)
    Lib,
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
        corbel virtiofs --backend nfs --socket-path /run/vm1.fs --source nfs://server/srv/data?version=4\n  \
        qemu-system-x86_64 -object memory-backend-memfd,id=m,size=1G,share=on -numa node,memdev=m \\\n    \
        -chardev socket,id=fs,path=/run/vm1.fs -device vhost-user-fs-pci,chardev=fs,tag=data …\n  \
        mount -t virtiofs data /mnt                                            in the guest"
)]
#[allow(clippy::struct_excessive_bools)] // switches of a command line
pub struct VirtiofsArgs {
    /// Where the virtual machine monitor connects (a Unix socket, made here)
    #[arg(long, value_name = "SOCKET", alias = "socket", required_unless_present_any = ["fd", "listen", "tenants", "print_capabilities"], conflicts_with = "fd")]
    socket_path: Option<PathBuf>,
    /// Descriptor of a socket that listens already
    #[arg(long, value_name = "FD")]
    fd: Option<RawFd>,
    /// Name of the group that may connect to the socket
    #[arg(long, value_name = "GROUP", requires = "socket_path")]
    socket_group: Option<String>,
    /// What is behind the device [default: corbel; with -o source= what that names]
    #[arg(long, value_enum)]
    backend: Option<Backend>,
    /// The directory that the guest gets: of the volume (backend corbel), or of this machine (dir)
    #[arg(long, value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// Socket of the node (the configuration's if left out; backend corbel), or the key-value server and a name in it:
    /// HOST:PORT#NAME or /SOCKET#NAME (kv), or the export: nfs://HOST/EXPORT?version=4 (nfs; see docs/virtiofs.md for the other options),
    /// or a library: PATH.so#ARGUMENT (lib)
    #[arg(long, value_name = "SOCKET")]
    source: Option<PathBuf>,
    /// File with what the key-value server wants to hear: a password, or a user and on the next line a password (mode 600)
    #[arg(long, value_name = "FILE")]
    login: Option<PathBuf>,
    /// Serve the file system to a device on another machine, which is started with --remote: a socket's path, or HOST:PORT
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["fd", "socket_path"])]
    listen: Option<Address>,
    /// Pass all requests on to the machine that has the file system, where --listen was given
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["listen", "backend", "shared_dir", "source", "state"])]
    remote: Option<Address>,
    /// Who is there, by its certificate (over TCP): node-N. With --listen: who alone may come (anybody of the cluster, if left out)
    #[arg(long, value_name = "ROLE", conflicts_with = "tenants")]
    peer: Option<Role>,
    /// Requests that have no answer from there for so many seconds end with EIO (else they wait)
    #[arg(long, value_name = "SECONDS", requires = "remote", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    soft: Option<u64>,
    /// The tag that the device says it has, for monitors that ask it (QEMU has it from its own command line)
    #[arg(long)]
    tag: Option<String>,
    /// Whose device it is, in logs
    #[arg(long, value_name = "NAME", default_value = NAMELESS)]
    tenant: String,
    /// Devices of several tenants in this process: a file with a table [[tenant]] for each, whose keys are the options above and
    /// below, without their dashes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["fd", "listen", "remote", "socket_path", "backend", "shared_dir", "source", "state"])]
    tenants: Option<PathBuf>,
    /// Threads that serve at once, of all tenants (the number of processors if left out)
    #[arg(long, value_name = "N", requires = "tenants", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads_at_once: Option<u64>,
    /// What a tenant gets of these, beside the others
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    weight: u32,
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
    /// What the guest's kernel keeps without asking. auto: nothing, so that it sees at once what others change, but for pages of files that are
    /// open, which go when the file is seen to have changed; never: not even those, so that a read is one request and not two (before Linux
    /// 6.6 no file can be mapped to be shared then). metadata: names and attributes; always: data as well. These two are for a directory that nobody else changes
    #[arg(long, value_enum, default_value = "auto")]
    cache: Cache,
    /// Refused: a write is in the file system when it returns
    #[arg(long)]
    writeback: bool,
    /// The guest can change nothing
    #[arg(long)]
    readonly: bool,
    /// Accepted, and changes nothing: a guest does not get into what is mounted below the directory (backend dir: EXDEV)
    #[arg(long, overrides_with = "no_announce_submounts")]
    announce_submounts: bool,
    /// The same
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
    /// The same as --translate-uid map:GUEST:HOST:COUNT, as virtiofsd writes it for its user namespace: :GUEST:HOST:COUNT:
    #[arg(long, value_name = "RANGE", value_parser = compat::id_range)]
    uid_map: Vec<Rule>,
    /// The same for groups
    #[arg(long, value_name = "RANGE", value_parser = compat::id_range)]
    gid_map: Vec<Rule>,
    /// Operations a second at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iops: Option<u64>,
    /// Operations at once after a pause (a tenth of a second's if left out)
    #[arg(long, value_name = "N", requires = "iops")]
    iops_burst: Option<u64>,
    /// Bytes a second at most, for example 100M
    #[arg(long, value_name = "BYTES", value_parser = some_bytes)]
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
    /// Address of this machine where /metrics says what each tenant may use and has used, for example 127.0.0.1:9472
    #[arg(long, value_name = "ADDRESS", value_parser = figures::address)]
    metrics: Option<SocketAddr>,
    /// Open files of the process at most
    #[arg(long, value_name = "N")]
    rlimit_nofile: Option<u64>,
    /// File in which the device keeps what it must know of its guest, so that it can be killed and started again without
    /// the guest's noticing more than a pause
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// File with a secret of 32 bytes or more that all devices of a tenant have and its monitors have not (mode 600): then the state of one can
    /// be handed on to another that has the same directory, by vhost-user's device state. Else it is not offered. Needs --tenant, a name of its own for each tenant
    #[arg(long, value_name = "FILE", conflicts_with = "remote")]
    migration_key: Option<PathBuf>,
    /// End when the monitor hangs up
    #[arg(long)]
    once: bool,
    /// Say in JSON what this program can do, for libvirt
    #[arg(long)]
    print_capabilities: bool,
    /// Options as virtiofsd had them before it had long ones: source=DIR, cache=, sandbox=, xattr, flock, … (see docs/virtiofs.md)
    #[arg(short = 'o', value_name = "LIST", conflicts_with = "tenants")]
    old_options: Vec<compat::List>,
    /// The same as --log-level debug
    #[arg(short = 'd')]
    debug: bool,
    /// Accepted: it is always so
    #[arg(short = 'f')]
    foreground: bool,
    /// Started by virtiofsd's name: --shared-dir says by itself what it is
    #[arg(long, hide = true)]
    like_virtiofsd: bool,
    /// Locks are to hold across guests.
    #[arg(skip)]
    shared_locks: bool,
}

/// Who may have no bytes at all could wait for ever.
fn some_bytes(text: &str) -> std::result::Result<u64, String> {
    match units::parse_bytes(text)? {
        0 => Err("0 bytes a second: that is for ever".into()),
        bytes => Ok(bytes),
    }
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

/// Where a back end is.
#[derive(Debug)]
enum Origin {
    /// As a mount names it.
    Source(String),
    Kv(kv::link::Address),
    Nfs(nfs::url::Url),
}

/// What a tenant's device serves, before it is opened.
#[derive(Debug)]
struct Ground {
    origin: Origin,
    /// The directory in it.
    within: PathBuf,
    /// What it needs of this machine's files.
    keep: Option<PathBuf>,
}

/// What a tenant's device serves.
struct Opened {
    tenant: Arc<Tenant>,
    server: Option<Server>,
}

/// A server that is to be told when the process ends.
enum Server {
    /// It forgets us.
    Kv(Arc<kv::KvFs>),
    /// What it has it makes durable.
    Nfs(Arc<nfs::NfsFs>),
}

impl Server {
    fn end(&self) {
        match self {
            Self::Kv(fs) => fs.end(),
            Self::Nfs(fs) => {
                if let Err(error) = fs.fsync_inode(&Caller::ROOT, InodeId::ROOT) {
                    log::error!("the NFS server does not say that all is durable: {error}");
                }
                fs.end();
            }
        }
    }
}

/// The directory of a socket, and the socket's path by it.
fn beside(socket: &Path) -> Result<(PathBuf, PathBuf)> {
    let socket = std::path::absolute(socket).context(socket.display())?;
    let parent = socket.parent().unwrap_or(Path::new("/"));
    let parent = parent.canonicalize().context(parent.display())?;
    let socket = parent.join(socket.file_name().unwrap_or_default());
    Ok((parent, socket))
}

impl VirtiofsArgs {
    fn backend(&self) -> Backend {
        self.backend.unwrap_or(Backend::Corbel)
    }

    /// What is behind the device.
    fn ground(&self, global: &Global) -> Result<Ground> {
        let text = |path: &Path| {
            let text = path.to_str().map(String::from);
            text.ok_or_else(|| usage(format!("{}: not UTF-8", path.display())))
        };
        let root = PathBuf::from("/");
        let shared = self.shared_dir.clone().unwrap_or_else(|| root.clone());
        if self.login.is_some() && self.backend() != Backend::Kv {
            return Err(usage("--login is for the backend kv"));
        }
        let (origin, within, keep) = match self.backend() {
            Backend::Null => (Origin::Source("null:".into()), root, None),
            Backend::Dir => {
                let dir =
                    self.shared_dir.as_ref().ok_or_else(|| usage("--shared-dir is missing"))?;
                let dir = dir.canonicalize().context(dir.display())?;
                (Origin::Source(format!("dir:{}", text(&dir)?)), root, Some(dir))
            }
            Backend::Corbel => {
                let source = match &self.source {
                    Some(source) => source.clone(),
                    None => global.load()?.node.socket,
                };
                let (parent, source) = beside(&source)?;
                (Origin::Source(text(&source)?), shared, Some(parent))
            }
            Backend::Kv => {
                let mut address = self.kv_address()?;
                let keep = match &mut address.place {
                    Place::Tcp(_) => None,
                    Place::Unix(socket) => {
                        let (parent, path) = beside(socket)?;
                        *socket = path;
                        Some(parent)
                    }
                };
                if let Some(file) = &self.login {
                    let login = source::login(file).map_err(|what| {
                        let what = format!("--login {what}");
                        Failure::new(Kind::Config, what, "see docs/virtiofs.md")
                    })?;
                    address.login = Some(login);
                }
                (Origin::Kv(address), shared, keep)
            }
            Backend::Nfs => (Origin::Nfs(self.nfs_url()?), shared, None),
            Backend::Lib => {
                let source = self.source.as_ref().and_then(|source| source.to_str());
                let source = source
                    .ok_or_else(|| usage("--source PATH.so#ARGUMENT is missing (backend lib)"))?;
                let (path, argument) = source.split_once('#').unwrap_or((source, ""));
                let (parent, path) = beside(Path::new(path))?;
                (Origin::Source(format!("lib:{}#{argument}", text(&path)?)), shared, Some(parent))
            }
        };
        Ok(Ground { origin, within, keep })
    }

    fn kv_address(&self) -> Result<kv::link::Address> {
        let source = self.source.as_ref().and_then(|source| source.to_str());
        let source =
            source.ok_or_else(|| usage("--source HOST:PORT#NAME is missing (backend kv)"))?;
        source.parse().map_err(|e| usage(format!("--source: {e}")))
    }

    fn nfs_url(&self) -> Result<nfs::url::Url> {
        let source = self.source.as_ref().and_then(|source| source.to_str());
        let source =
            source.ok_or_else(|| usage("--source nfs://HOST/EXPORT is missing (backend nfs)"))?;
        source.parse().map_err(|e| usage(format!("--source: {e}")))
    }

    /// The file system of the device, as the tenant sees it. Opened behind the wall, so that no thread and no descriptor of
    /// it is from before.
    fn open(&self, ground: &Ground, heir: u128) -> Result<Opened> {
        let mut server = None;
        let fs: Arc<dyn FileSystem> = match &ground.origin {
            Origin::Source(source) => open_as_heir(source, heir)?,
            Origin::Kv(address) => {
                let opened = kv::KvFs::open(address.clone(), kv::Options::default());
                let opened = Arc::new(opened.map_err(|e| {
                    Failure::new(
                        Kind::Unreachable,
                        e,
                        "see docs/virtiofs.md, \"Over a key-value server\"",
                    )
                })?);
                server = Some(Server::Kv(opened.clone()));
                opened
            }
            Origin::Nfs(url) => {
                let opened = nfs::NfsFs::open(url).map_err(|e| {
                    Failure::new(Kind::Unreachable, e, "see docs/virtiofs.md, \"Over NFS\"")
                })?;
                let opened = Arc::new(opened);
                server = Some(Server::Nfs(opened.clone()));
                opened
            }
        };
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
        if self.shared_locks && !fs.keeps_locks() {
            return Err(usage(
                "-o flock, posix_lock: this back end keeps no locks, they are the guest's own; leave these out",
            ));
        }
        let options = tenant::Options {
            users: IdMap::new(&self.translate_uid)
                .map_err(|e| usage(format!("--translate-uid: {e}")))?,
            groups: IdMap::new(&self.translate_gid)
                .map_err(|e| usage(format!("--translate-gid: {e}")))?,
            readonly: self.readonly,
            xattr: self.xattr || acl,
            acl,
            keeps: match self.cache {
                Cache::Never => Keeps::NoPages,
                Cache::Auto => Keeps::Nothing,
                Cache::Metadata => Keeps::Metadata,
                Cache::Always => Keeps::All,
            },
        };
        let within = &ground.within;
        let path = std::os::unix::ffi::OsStrExt::as_bytes(within.as_os_str());
        let tenant = Tenant::new(fs, path, options).map_err(|e| {
            Failure::failed(format!("directory {}: {e}", within.display()), "make it first")
        })?;
        Ok(Opened { tenant: Arc::new(tenant), server })
    }

    /// Our keys, and who must be at the other end, where an address is another machine's.
    fn identity(&self, global: &Global, address: &Address) -> Result<Option<Identity>> {
        if matches!(address, Address::Unix(_)) {
            if self.peer.is_some() {
                return Err(usage("--peer: over a Unix socket the kernel says who is there"));
            }
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
        Ok(Some(Identity { keys, peer: self.peer }))
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
    fn wall(&self, tenants: &[Self]) -> Result<Sandbox> {
        let tcp = matches!(self.listen, Some(Address::Tcp(_)));
        let reaches_out = tcp || self.remote.is_some() || tenants.iter().any(Self::asks_far);
        if reaches_out && self.sandbox.is_some_and(|sandbox| sandbox != Sandbox::None) {
            return Err(usage("--sandbox: behind a wall no other machine is reached"));
        }
        let is_root = rustix::process::geteuid().is_root();
        // What a library needs of the machine nobody here knows.
        let loads = tenants.iter().any(|tenant| tenant.backend() == Backend::Lib);
        let cut_off = is_root && !reaches_out && !loads;
        let usual = if cut_off { Sandbox::Namespace } else { Sandbox::None };
        Ok(self.sandbox.unwrap_or(usual))
    }

    /// Whether its back end is a server of another machine.
    fn asks_far(&self) -> bool {
        let far = |address: kv::link::Address| matches!(address.place, Place::Tcp(_));
        self.backend() == Backend::Nfs
            || self.backend() == Backend::Kv && self.kv_address().is_ok_and(far)
    }

    /// Whether it makes connections over TCP also when the device serves already: NFS servers want them from ports of our choice, and
    /// a host that is looked up takes a socket that is bound.
    fn binds(&self) -> bool {
        self.asks_far() || matches!(self.remote, Some(Address::Tcp(_)))
    }

    /// What is accepted for the sake of who starts virtiofsd so, and changes nothing.
    fn without_effect(&self) -> Vec<&'static str> {
        let given = [
            ("--announce-submounts", self.announce_submounts),
            ("--no-announce-submounts", self.no_announce_submounts),
            ("--no-readdirplus", self.no_readdirplus),
            ("--allow-direct-io", self.allow_direct_io),
            ("-f", self.foreground),
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
            let listener = UnixListener::from(owned);
            listener.set_nonblocking(false).context(format!("--fd {fd}"))?;
            return Ok(listener);
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

    fn guest(&self) -> Guest {
        Guest { nodes_max: count(self.nodes_max), handles_max: count(self.handles_max) }
    }

    /// By what the state of the device is sealed.
    fn key(&self) -> Result<Option<Key>> {
        let Some(file) = &self.migration_key else { return Ok(None) };
        if self.tenant == NAMELESS {
            return Err(usage(
                "--migration-key: name the tenant (--tenant), or one's device would take another's state",
            ));
        }
        let secret = secret::read(file, *KEY.end()).map_err(|what| {
            Failure::new(Kind::Config, format!("--migration-key {what}"), "see docs/virtiofs.md")
        })?;
        let key = Key::new(&secret, &self.tenant);
        key.map(Some).map_err(|e| usage(format!("--migration-key {}: {e}", file.display())))
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

/// A device that is about to serve.
struct Up {
    args: VirtiofsArgs,
    monitors: Option<UnixListener>,
    socket_dir: Option<OwnedFd>,
    ground: Option<Ground>,
    ledger: Option<Arc<Ledger>>,
    key: Option<Key>,
    kept: Option<Kept>,
    device: Option<Arc<Device>>,
    member: Option<Member>,
    server: Option<Server>,
}

/// What a thread of a tenant's does.
type Body = Box<dyn FnOnce() -> Result<()> + Send>;

/// Goes on for the guest of the device before, and starts the threads of the queues, which run from then on.
fn begin(device: &Arc<Device>, kept: Option<Kept>, transport: &dyn Transport) -> Result<()> {
    if let Some(kept) = kept {
        let (told, opened, locked) = (kept.told.len(), kept.opened.len(), kept.locked.len());
        let (lost, unlocked) = device.resume(kept);
        log::info!(
            "goes on with a guest that knows {told} inodes, has {opened} files open and {locked} locks; {lost} files and {unlocked} locks are lost"
        );
    }
    let crew: Crew = device.start(transport).context("starting threads")?;
    // A request may be waiting for a node that is away: nobody waits for that at the end.
    std::mem::forget(crew);
    Ok(())
}

impl Up {
    /// What needs the machine as it is: sockets, files, directories.
    fn prepare(global: &Global, args: VirtiofsArgs) -> Result<Self> {
        if args.tag.as_ref().is_some_and(|tag| tag.is_empty() || tag.len() > vhost::TAG_MAX) {
            return Err(usage(format!("--tag: 1 to {} bytes", vhost::TAG_MAX)));
        }
        if args.writeback {
            return Err(usage(
                "--writeback: a write is in the file system when it returns, and a guest's kernel holds none back; leave it out",
            ));
        }
        if args.peer.is_some() && args.remote.is_none() && args.listen.is_none() {
            return Err(usage(
                "--peer: who is at the other end of --remote or --listen; none is given",
            ));
        }
        let monitors = if args.listen.is_none() { Some(args.monitors()?) } else { None };
        let socket_dir = args.socket_dir();
        let (ledger, kept) = match &args.state {
            None if args.migration_key.is_some() => {
                let ledger = Ledger::anonymous(&args.guest()).context("what a guest has")?;
                (Some(Arc::new(ledger)), None)
            }
            None => (None, None),
            Some(path) => {
                let (ledger, kept) = Ledger::open(path, &args.guest()).context(path.display())?;
                if args.backend() == Backend::Corbel && !rustix::process::geteuid().is_root() {
                    log::warn!(
                        "--state: a node gives what the device before had open to root only; started again, this one has lost the guest's files"
                    );
                }
                (Some(Arc::new(ledger)), kept)
            }
        };
        for option in args.without_effect() {
            log::info!("{option} has no effect here");
        }
        let ground = if args.remote.is_none() { Some(args.ground(global)?) } else { None };
        let key = args.key()?;
        let (device, member, server) = (None, None, None);
        Ok(Self { args, monitors, socket_dir, ground, ledger, key, kept, device, member, server })
    }

    /// Opens the file system.
    fn open(&mut self, share: Option<&Arc<Share>>) -> Result<()> {
        let Some(ground) = self.ground.take() else { return Ok(()) };
        // Without a state file nobody comes after this process.
        let book = self.ledger.as_ref().filter(|_| self.args.state.is_some());
        let heir = book.map_or(0, |ledger| ledger.heir());
        let Opened { tenant, server } = self.args.open(&ground, heir)?;
        let seal = self.key.take().map(|key| key.seal(&tenant)).transpose();
        let seal = seal.map_err(|e| {
            Failure::failed(format!("the directory of {}: {e}", self.args.tenant), "see the log")
        })?;
        if let Some(ledger) = &self.ledger {
            let mark = tenant.mark().map_err(|e| {
                Failure::failed(
                    format!("the directory of {}: {e}", self.args.tenant),
                    "see the log",
                )
            })?;
            if !ledger.claim(mark) && self.kept.take().is_some() {
                log::warn!("the state is that of a guest of another directory: it is forgotten");
            }
        }
        self.server = server;
        self.member = share.map(|share| share.join(self.args.weight));
        let options = Options {
            threads: count(self.args.thread_pool_size) + 1,
            poll: Duration::from_micros(self.args.poll_us),
            limits: Arc::new(self.args.limits()),
            guest: self.args.guest(),
            ledger: self.ledger.clone(),
            share: self.member.clone(),
            seal,
        };
        self.device = Some(Device::new(tenant, options));
        Ok(())
    }

    /// What the thread does that waits for monitors, or for other machines: it goes on for the guest that was there, starts the threads of the
    /// queues, and serves. A tenant whose node keeps it waiting keeps nobody else waiting.
    fn start(&mut self, global: &Global, links: Option<Listener>) -> Result<Body> {
        let args = &self.args;
        let (device, kept) = (self.device.clone(), self.kept.take());
        let resumed = kept.is_some();
        if let Some(links) = links {
            let back = Back::new(&args.tenant, count(args.request_queues), Window::default());
            return Ok(Box::new(move || {
                if let Some(device) = device {
                    begin(&device, kept, &back)?;
                    let there = back.clone();
                    let watch = move || there.watch(GONE_FAR, || device.forget_guest());
                    std::thread::Builder::new()
                        .name("virtiofs-gone".into())
                        .spawn(watch)
                        .context("starting a thread")?;
                }
                back.listen(&links);
                Ok(())
            }));
        }
        let listener =
            self.monitors.take().ok_or_else(|| usage("--socket-path, --fd or --listen"))?;
        let rings = vhost::rings(&args.tenant, count(args.request_queues)).context("queues")?;
        let front = args.remote.as_ref().map(|address| args.front(global, address)).transpose()?;
        let (tag, once) = (args.tag.clone(), args.once);
        Ok(Box::new(move || {
            let front = front.map(|options| Front::start(&*rings, options)).transpose();
            let front = front.context("starting threads")?;
            if let Some(device) = &device {
                begin(device, kept, &*rings)?;
            }
            let patience = Patience { first: resumed.then_some(GONE_FIRST), next: GONE };
            let serve = |stream| vhost::serve(&rings, device.as_ref(), tag.as_deref(), stream);
            vhost::serve_all(&listener, patience, once, serve, |monitor| {
                if let Some(front) = &front {
                    front.has_guest(monitor == Monitor::Here);
                }
                if let Some(device) = device.as_ref().filter(|_| monitor == Monitor::Gone) {
                    device.forget_guest();
                }
            });
            Ok(())
        }))
    }

    /// What is left of it at the end.
    fn end(self) {
        let name = self.args.socket_path.as_ref().and_then(|path| path.file_name());
        if let Some((dir, name)) = self.socket_dir.zip(name) {
            // If it is gone, it need not be removed.
            let _ = rustix::fs::unlinkat(dir, name, rustix::fs::AtFlags::empty());
        }
        if let Some(device) = &self.device {
            log::info!("{}: {}", self.args.tenant, device.stats_text().replace('\n', "; "));
        }
        if let Some(server) = &self.server {
            server.end();
        }
        // A request may be waiting for a node that is away: nobody waits for that here. What the guest has open ends with the
        // process, or is in the book for the next one.
        std::mem::forget(self.device);
    }
}

/// Runs `corbel virtiofs`.
pub fn run(global: &Global, out: &Output, args: &VirtiofsArgs) -> Result<()> {
    if args.print_capabilities {
        println!("{{\n  \"type\": \"fs\",\n  \"features\": [\n    \"separate-options\"\n  ]\n}}");
        return Ok(());
    }
    let mut args = args.clone();
    args.settle()?;
    let args = &args;
    let tenants = match &args.tenants {
        Some(file) => tenants::read(file)?,
        None => vec![args.clone()],
    };
    local::tie();
    if let Some(most) = args.rlimit_nofile.filter(|most| *most > 0) {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(Resource::Nofile, limit)
            .map_err(|e| environment(format!("--rlimit-nofile: {e}")))?;
    }
    let sandbox = args.wall(&tenants)?;
    let mut links = args.listen.as_ref().map(|address| args.links(global, address)).transpose()?;
    let metrics = args.metrics.map(metrics::bind).transpose()?;
    let all = tenants.into_iter().map(|args| Up::prepare(global, args));
    let mut all = all.collect::<Result<Vec<Up>>>()?;
    let signals = EndingSignals::catch().context("catching signals")?;
    sandbox::no_new_privileges().map_err(environment)?;
    if sandbox != Sandbox::None && args.remote.is_none() {
        let grounds = all.iter().filter_map(|up| up.ground.as_ref());
        let mut keep: Vec<PathBuf> = grounds.filter_map(|ground| ground.keep.clone()).collect();
        keep.sort();
        keep.dedup();
        sandbox::enter_namespaces(&keep).map_err(environment)?;
    }
    let share = args.tenants.is_some().then(|| {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Share::new(args.threads_at_once.map_or(processors, count))
    });
    for up in &mut all {
        up.open(share.as_ref())?;
    }
    let seccomp = match args.seccomp {
        Filter::None => Seccomp::None,
        Filter::Kill => Seccomp::Kill,
        Filter::Log => Seccomp::Log,
        Filter::Trap => Seccomp::Trap,
    };
    sandbox::ban_system_calls(seccomp, all.iter().any(|up| up.args.binds()))
        .map_err(environment)?;
    if let Some(listener) = metrics {
        let figures: Vec<_> = all.iter().filter_map(figures::Figures::of).collect();
        metrics::serve_on(listener, move || figures::text(&figures))?;
    }
    let (ended, end) = std::io::pipe().context("pipe")?;
    let failed: Arc<Mutex<Option<Failure>>> = Arc::default();
    for up in &mut all {
        let body = up.start(global, links.take())?;
        let end = end.try_clone().context("pipe")?;
        let (failed, name) = (failed.clone(), up.args.tenant.clone());
        std::thread::Builder::new()
            .name("virtiofs-vmm".into())
            .spawn(move || {
                if let Err(failure) = body() {
                    // The others go on.
                    log::error!("{name}: {failure}");
                    failed.lock().unwrap_or_else(PoisonError::into_inner).replace(failure);
                }
                drop(end);
            })
            .context("starting a thread")?;
    }
    drop(end);
    for up in &all {
        let Up { args, .. } = up;
        let said = serde_json::json!({"listening": args.socket_path, "tenant": args.tenant});
        out.result(&said, || println!("{}: waiting for a virtual machine", args.tenant));
    }
    signals.wait_or(&ended).context("waiting for signals")?;
    all.into_iter().for_each(Up::end);
    match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}
