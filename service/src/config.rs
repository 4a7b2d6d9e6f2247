//! What the two services are told when they start. The command line fills these in.

use std::net::SocketAddr;
use std::path::PathBuf;

use base::NodeId;
use cluster::tls::KeyPlace;
use cluster::transport::PeerAddress;
use storage::format::superblock::Durability;

use crate::core::PerUser;
use crate::core::schedule::Scheduler;
use crate::packing::Compression;

/// How a node of the cluster reaches the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerTransport {
    /// Over the network.
    Tcp,
    /// Shared memory between nodes of one host; the run directory holds their sockets.
    Shm(PathBuf),
}

/// Where the view of the chain comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Membership {
    /// No coordinator: this node alone is the chain, for ever.
    Standalone,
    /// The coordinator at this address.
    Coordinator(PeerAddress),
}

/// Who does the work of the stages, where, and when. Formats, guarantees and answers are the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pipeline {
    /// Others beside the thread that decides, as far as that is worth it (LineFS).
    #[default]
    Pipelined,
    /// That thread, one stage after the other (LineFS-NotParallel).
    Serial,
    /// The same on the cores of the applications (Assise-BgRepl).
    HostBackground,
    /// The same, and not before somebody asks: for an fsync, for what another holds, for room in a log (Assise). Nobody asked: after
    /// [`Self::ASSISE_HOLD`].
    Host,
}

impl Pipeline {
    /// Its word in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pipelined => "pipelined",
            Self::Serial => "serial",
            Self::HostBackground => "host-background",
            Self::Host => "host",
        }
    }

    /// What nobody asks for travels after so long, in nanoseconds: as kernels write back what lies in their caches.
    pub const ASSISE_HOLD: u64 = 30_000_000_000;
}

/// What [`crate::nicfs::run`] needs.
#[derive(Clone, Debug)]
pub struct NicfsConfig {
    /// This node.
    pub node: NodeId,
    /// Name of the cluster; nodes and coordinator of another name are refused.
    pub cluster: String,
    /// Who decides about the chain.
    pub membership: Membership,
    /// Where this node listens for its peers.
    pub listen: SocketAddr,
    /// Transport between nodes.
    pub transport: PeerTransport,
    /// Keys of this node, for everything that goes over TCP; without, whoever reaches a port is believed.
    pub keys: Option<KeyPlace>,
    /// Directory of the region, made by [`crate::nicfs::format`].
    pub region: PathBuf,
    /// What the region promises.
    pub durability: Durability,
    /// hostd's socket for processes; the private socket between nicfs and hostd lies beside it
    /// ([`private_socket`]).
    pub socket: PathBuf,
    /// Unix socket that answers status requests.
    pub admin: PathBuf,
    /// Lanes of a client's log, unless the client asks for another number.
    pub lanes: u32,
    /// Bytes of a lane.
    pub lane_bytes: u64,
    /// Client processes at once.
    pub clients_max: u32,
    /// Client processes of one user, but root, at once.
    pub clients_per_user: u32,
    /// What else one user, but root, may have.
    pub per_user: PerUser,
    /// Whose turn it is, where several clients want something.
    pub scheduler: Scheduler,
    /// Shares of users; who is not named has 1.
    pub weights: std::collections::BTreeMap<u32, u32>,
    /// Bytes of chunks under way; replication pauses at `high` percent and resumes at `low`.
    pub memory: u64,
    /// See `memory`.
    pub high: u32,
    /// See `memory`.
    pub low: u32,
    /// Who does the work of the stages.
    pub pipeline: Pipeline,
    /// Work on no more bytes than that is done by the thread that decides.
    pub inline_bytes: usize,
    /// Whether clients that use other bytes of a file are given these, and not all of it one after the other.
    pub ranges: bool,
    /// Whether hostd makes the copies of what is published where they are long.
    pub host_copies: bool,
    /// Nanoseconds for which entries that nobody waits for may be held back.
    pub hold: u64,
    /// Nanoseconds between two scrubs in the background; 0: none.
    pub scrub_every: u64,
    /// Bytes a second that one reads.
    pub scrub_rate: u64,
    /// Bytes a second that are sent of a snapshot; 0: no limit.
    pub join_rate: u64,
    /// How messages to other nodes are packed.
    pub compression: Compression,
    /// Artificial delay of each fabric operation, in nanoseconds.
    pub fabric_delay: u64,
}

/// What [`crate::hostd::run`] needs.
#[derive(Clone, Debug)]
pub struct HostdConfig {
    /// Directory of the region.
    pub region: PathBuf,
    /// What the region promises.
    pub durability: Durability,
    /// Socket for processes (mode 0666).
    pub socket: PathBuf,
    /// Connections of one user, but root, at once.
    pub connections_per_user: usize,
}

/// The private socket between nicfs (which listens) and hostd, for a public socket.
pub fn private_socket(public: &std::path::Path) -> PathBuf {
    let mut name = public.as_os_str().to_owned();
    name.push(".nicfs");
    name.into()
}

/// Why a service did not start or ended: what was wrong, where, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error(pub String);

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Says what was being done when `cause` happened.
    pub fn new(what: &str, cause: impl core::fmt::Display) -> Self {
        Self(format!("{what}: {cause}"))
    }
}
