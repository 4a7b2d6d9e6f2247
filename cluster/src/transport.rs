//! What a service loop asks of a transport. One thread owns it; nothing in it blocks but `poll`.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Duration;

use base::NodeId;

/// Request class; each has a connection of its own between two nodes, so that a small request
/// never waits behind a chunk. Frames of one class arrive in order; across classes nothing is
/// promised.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Class {
    /// fsync, lease, open: small, polled while there is work.
    LowLatency = 0,
    /// Chunks.
    Bulk = 1,
}

impl Class {
    /// Both.
    pub const ALL: [Self; 2] = [Self::LowLatency, Self::Bulk];
}

/// Where a peer listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerAddress {
    /// Over the network.
    Tcp(SocketAddr),
    /// On this host: path of the peer's socket, over which shared memory rings are set up
    /// ([`crate::transport::socket_path`]).
    Local(PathBuf),
}

/// The socket of `node` under the run directory of its host.
pub fn socket_path(run_dir: &std::path::Path, node: NodeId) -> PathBuf {
    run_dir.join(format!("node-{node}.sock"))
}

impl core::str::FromStr for PeerAddress {
    type Err = std::net::AddrParseError;

    /// `IP:PORT`, or an absolute path.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.starts_with('/') {
            return Ok(Self::Local(text.into()));
        }
        text.parse().map(Self::Tcp)
    }
}

impl core::fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Local(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A node to keep a link with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Which.
    pub node: NodeId,
    /// Where it listens; used by the side with the lower id, which dials.
    pub address: PeerAddress,
}

/// Why a frame was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendError {
    /// The queue to this peer is above its high watermark; [`NetEvent::Drained`] will tell when it
    /// is below the low one.
    Full,
    /// No link to this peer; [`NetEvent::Up`] will tell.
    Down,
    /// The body is longer than [`crate::limits::BODY_MAX`].
    TooLong,
    /// The kind is one of the transport's own ([`crate::wire::KIND_RESERVED`] and above).
    ReservedKind,
}

impl core::fmt::Display for SendError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Full => "the queue to the peer is full",
            Self::Down => "the peer is not connected",
            Self::TooLong => "the message is longer than a frame may be",
            Self::ReservedKind => "the message kind is reserved for the transport",
        })
    }
}

impl core::error::Error for SendError {}

/// Why a link ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DownReason {
    /// The peer closed it, in order or by dying.
    Closed,
    /// The operating system reports an error.
    Io(String),
    /// The peer sent what no peer sends; what exactly.
    Protocol(String),
    /// A certificate was not believed, here or there; what to do.
    Refused(String),
    /// The peer has come back (newer incarnation or session) before its old link was seen to end.
    Replaced,
    /// [`Transport::set_peers`] or [`Transport::disconnect`].
    Ours,
}

impl core::fmt::Display for DownReason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by the peer"),
            Self::Io(text) => write!(f, "connection failed: {text}"),
            Self::Protocol(text) => write!(f, "broke the protocol: {text}"),
            Self::Refused(text) => f.write_str(text),
            Self::Replaced => f.write_str("replaced by a newer connection of the peer"),
            Self::Ours => f.write_str("closed by this node"),
        }
    }
}

/// What `poll` reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NetEvent {
    /// Both connections to the node are open.
    Up {
        /// Which.
        node: NodeId,
        /// Of its service.
        incarnation: u64,
    },
    /// The link ended: what was queued is lost, what was in flight may be.
    Down {
        /// Which.
        node: NodeId,
        /// Why.
        reason: DownReason,
    },
    /// A frame, between the Up and the Down of its link.
    Frame {
        /// Who sent it.
        from: NodeId,
        /// On which connection.
        class: Class,
        /// Kind of the body.
        kind: u16,
        /// Body; give it back with [`Transport::recycle`] if it is large.
        body: Vec<u8>,
    },
    /// A queue that had been full is below its low watermark.
    Drained {
        /// To which node.
        node: NodeId,
        /// Of which class.
        class: Class,
    },
    /// A registered descriptor is ready.
    Ready {
        /// As given to [`Transport::register`].
        token: u64,
        /// It can be read, or has ended, or failed.
        readable: bool,
        /// It can be written, or has failed.
        writable: bool,
    },
    /// A connection was turned away, by us or by a peer, or an attempt to connect failed in a way
    /// that a person may have to mend. For the log.
    Rejected {
        /// The peer, if it is known.
        node: Option<NodeId>,
        /// What was wrong.
        what: String,
    },
}

/// What to wait for on a registered descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interest {
    /// Bytes or connections to take.
    pub readable: bool,
    /// Room to write.
    pub writable: bool,
}

impl Interest {
    /// Only reading.
    pub const READ: Self = Self { readable: true, writable: false };
    /// Both.
    pub const BOTH: Self = Self { readable: true, writable: true };
}

/// What a transport has done, for `status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames sent.
    pub frames_out: u64,
    /// Frames received.
    pub frames_in: u64,
    /// Bytes of bodies sent.
    pub bytes_out: u64,
    /// Bytes of bodies received.
    pub bytes_in: u64,
    /// Sends refused because a queue was full.
    pub full: u64,
    /// Connections closed because of what the peer sent.
    pub corrupt: u64,
    /// Connections turned away at the hello (by us or by a peer).
    pub refused: u64,
    /// Times that `poll` went to sleep.
    pub sleeps: u64,
    /// Wake-ups sent to sleeping peers (shared memory).
    pub doorbells: u64,
}

/// Frames between this node and its peers, and the one place where a service waits.
pub trait Transport {
    /// This node.
    fn node(&self) -> NodeId;

    /// Keeps links with exactly these peers from now on (this node itself is skipped). Links to
    /// others are closed; the rest are untouched.
    fn set_peers(&mut self, peers: &[Peer]);

    /// Queues a frame whose body is `parts` joined. Never blocks.
    fn send(
        &mut self,
        to: NodeId,
        class: Class,
        kind: u16,
        parts: &[&[u8]],
    ) -> Result<(), SendError>;

    /// Bytes of frames that wait for the peer to take them.
    fn queued(&self, to: NodeId, class: Class) -> usize;

    /// Whether frames to `node` are taken.
    fn is_up(&self, node: NodeId) -> bool;

    /// Appends what happened to `out`; waits until something does, or `timeout` (none: for ever) has
    /// passed.
    fn poll(&mut self, timeout: Option<Duration>, out: &mut Vec<NetEvent>);

    /// Watches a descriptor of the caller's (level-triggered), or changes what is watched. The
    /// caller deregisters it before closing it.
    fn register(
        &mut self,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> std::io::Result<()>;

    /// Ends watching.
    fn deregister(&mut self, fd: BorrowedFd<'_>) -> std::io::Result<()>;

    /// After traffic, `poll` looks for more without sleeping for up to this long. The default of
    /// the implementation is what was measured to be best.
    fn set_spin(&mut self, spin: Duration);

    /// Ends the link with a peer; it is set up again if the peer is still in the set.
    fn disconnect(&mut self, node: NodeId);

    /// Takes back the body of a large frame, so that the next one needs no fresh memory.
    fn recycle(&mut self, body: Vec<u8>) {
        drop(body);
    }

    /// What it has done.
    fn counters(&self) -> Counters;
}
