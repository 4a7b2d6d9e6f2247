//! What happens to a node, and what it wants done. The driver turns system calls into the former
//! and the latter into system calls; the simulator does the same without a system.

use std::sync::Arc;

use base::{ClientId, Epoch, Errno, Level, Nanos, NodeId, StreamSeq};
use cluster::transport::Class;
use storage::format::item::ReadClass;
use storage::volume::CopyItem;

use super::frame::{Body, Received};
use super::work::Piece;

/// Ends the copies that hostd runs, for a node that cannot wait for [`Event::CopiesDone`]: it wants to
/// publish at once, or hostd has not answered for too long. Copies that came later would go over
/// newer content.
pub trait Copier: std::fmt::Debug + Send + Sync {
    /// Returns when no copy of the job runs any more or ever will; the node hears no more of it.
    /// `true`: all are done and written back. `false`: perhaps some are. An error says that
    /// they cannot be ended, so that nothing they write to or read from may change any more.
    fn settle(&self, job: u64) -> Result<bool, String>;

    /// The job takes long: hostd perhaps gets too little of the processor, and may be helped to it.
    fn help(&self, _job: u64) {}
}

/// Copies in one job of hostd ([`Effect::Copies`]).
pub const COPIES_MAX: usize = 4000;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time passed: at least every 100 ms, and at [`super::Node::deadline`].
    Tick,
    /// A client rang.
    Doorbell(ClientId),
    /// A message of a peer ([`super::message`]).
    Frame {
        /// Who sent it.
        from: NodeId,
        /// Kind of message.
        kind: u16,
        /// Its body.
        body: Received,
    },
    /// Messages to the peer get through.
    PeerUp(NodeId),
    /// They do not; what was in flight is lost.
    PeerDown(NodeId),
    /// The coordinator's word about the chain.
    View {
        /// Epoch of the chain.
        epoch: Epoch,
        /// Members, head first.
        chain: Vec<NodeId>,
        /// Nodes that are fetching the volume's state in order to join.
        syncing: Vec<NodeId>,
        /// So long from now on clients of nodes that left the chain may still use their leases.
        lapse: Nanos,
    },
    /// So many members must hold what is acknowledged (the coordinator's word, the same on all of them): with fewer in the
    /// chain nothing is. 1 before it is told.
    Needs {
        /// How many; 0: not told.
        members: usize,
        /// Members that the chain has when nobody is away.
        replicas: usize,
    },
    /// What all nodes of the volume understand (the coordinator's word, too): no more is taken. What this program
    /// understands before it is told.
    Level(Level),
    /// Leases of this node's clients hold until this time of the clients' clock (CLOCK_MONOTONIC),
    /// unless it is told again; later than what was said before, or 0.
    ServesUntil(Nanos),
    /// Whether the coordinator has been out of reach for so long that others may have taken over.
    Fenced(bool),
    /// hostd: a process wants a log.
    Attach {
        /// Names the request.
        token: u64,
        /// Process.
        pid: u32,
        /// Its start time, to tell it from a later process of the same number.
        start_time: u64,
        /// Effective user (from the kernel, not from the process).
        uid: u32,
        /// Effective group.
        gid: u32,
        /// Supplementary groups.
        groups: Vec<u32>,
        /// Lanes wanted; 0 the default.
        lanes: u32,
    },
    /// hostd: the process ended or replaced its image.
    ClientGone(ClientId),
    /// hostd: who may read this arena?
    ArenaQuery {
        /// Names the request.
        token: u64,
        /// Arena.
        arena: u32,
    },
    /// hostd: copies are done and written back, except those listed.
    CopiesDone {
        /// Which job.
        id: u64,
        /// Items to be done again by the node itself.
        bad: Vec<u32>,
    },
    /// hostd was not asked for the copies of this job, and never will be.
    CopiesUnasked(u64),
    /// A piece of work ([`Effect::Work`]) has ended, or was found to have. Ends may come late and in any order.
    WorkEnded(u64),
    /// hostd is connected, and can be made to end its copies.
    HostUp(Arc<dyn Copier>),
    /// hostd is not, and none of its copies runs any more: the node copies for itself (isolated
    /// mode).
    HostDown,
    /// All that lies here shall be read and compared with its checksums, now ([`super::scrub`]).
    Scrub,
    /// The service is about to end: nothing new begins, what the clients did is brought to every member
    /// ([`super::Node::is_closed`]).
    Closing,
    /// It ends now. Clients that are at rest are told; the others find out, as if it had been killed.
    Shutdown,
}

/// Something shall be done.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message; if the link is down it is lost, and PeerUp repairs.
    Send {
        /// To whom.
        to: NodeId,
        /// Request class.
        class: Class,
        /// Kind.
        kind: u16,
        /// Body.
        body: Body,
    },
    /// To hostd: hand out `Segment::Log(segment)`.
    Attached {
        /// Of the request.
        token: u64,
        /// The new client.
        client: ClientId,
        /// Number of the log segment.
        segment: u32,
    },
    /// To hostd: no.
    AttachRefused {
        /// Of the request.
        token: u64,
        /// Why.
        errno: Errno,
        /// In words.
        text: &'static str,
    },
    /// To hostd: who may read the arena; `None`: there is no such arena.
    Arena {
        /// Of the request.
        token: u64,
        /// The class.
        class: Option<ReadClass>,
        /// Bytes of the arena's segment.
        bytes: u64,
    },
    /// To hostd: run these copies in order ([`COPIES_MAX`] at most), write them back. A job that is settled before it is
    /// carried out ([`Copier::settle`]) is void.
    Copies {
        /// Of the job.
        id: u64,
        /// What.
        items: Vec<CopyItem>,
    },
    /// Has somebody do this, beside the node or in its place ([`Piece::run`]), who then says so with [`Event::WorkEnded`].
    Work(Piece),
    /// To hostd: forget the client.
    Detached(ClientId),
    /// To hostd: say when this process ends, although the client has no session any more.
    #[allow(missing_docs)]
    Watch { client: ClientId, pid: u32, start_time: u64 },
    /// End the link with this node, so that it is set up anew: something that came over it is lost.
    Renew(NodeId),
    /// To the coordinator: the joining node has everything and is sent everything.
    CaughtUp(NodeId, u64, Epoch),
    /// To the coordinator: the member does not acknowledge.
    Suspect(NodeId),
    /// What lies in the region is about to be replaced, by a snapshot that is asked for with the next `Send`: it counts no
    /// longer as a copy of the volume.
    Wipes,
    /// The stream position changed: tell the coordinator at the next heartbeat.
    Position(StreamSeq),
}
