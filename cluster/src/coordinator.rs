//! Who is a member, who is in the chain, and in which epoch.
//!
//! [`machine`] decides (a pure state machine), [`store`] keeps what it decided, [`embedded`] serves
//! it over TCP, [`client`] is a node's end. A cluster that has etcd puts it behind [`Coordinator`].
//!
//! # What holds
//! 1. The epoch of a volume grows by one with each change of its chain; the change is on the
//!    coordinator's disk before anybody is told.
//! 2. A write is acknowledged only when every member of the chain of its epoch holds it. So *any*
//!    member of the last chain alone holds every acknowledged write, and a restart may form the
//!    new chain from any of them that kept its data (not [`DataState::Fresh`]), whoever comes first;
//!    waiting for the others for a while only saves copying. What was not acknowledged may survive or not;
//!    the member with the longest stream goes first so that the others need only be
//!    completed, never cut.
//! 3. Therefore a node enters a chain only (a) at the volume's birth, (b) from the chain before it,
//!    or (c) from `syncing`, when it has reported to have caught up in the current epoch. From before that
//!    report on the head must wait for that node's acknowledgement too, as if it were
//!    in the chain: else a write acknowledged between the report and the new view is missing there.
//! 4. The last member is never evicted: the data is only there.
//! 5. A node that has not been confirmed for [`fence_after`] (half of `failure_timeout`, measured from
//!    when the confirmed heartbeat was *sent*) is fenced: it knows that it may have been evicted
//!    before the coordinator evicts it for silence. Its clients' leases end at that time by
//!    themselves, whatever has become of the node's processes. Members that are evicted sooner, because
//!    their connection ended or the head suspects them, are no exception: the view says for
//!    how long their clients' leases may still hold ([`View::lapse_ms`]).

pub mod client;
pub mod embedded;
mod link;
pub mod machine;
pub mod message;
pub mod store;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use base::{Epoch, Nanos, NodeId, StreamSeq};

pub use message::{DataState, Member, Registration, View};

/// The identity that goes with the name of a cluster: what nodes and coordinator say to each other
/// in their hello. Not a secret; it keeps clusters apart that were given the same address.
pub fn identity(name: &str) -> u128 {
    // FNV-1a, 128 bits.
    name.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// How long after the sending of a confirmed heartbeat (or registration) a node may serve.
#[must_use]
pub const fn fence_after(failure_timeout: Nanos) -> Nanos {
    failure_timeout / 2
}

/// What a node hears from the coordinator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CoordEvent {
    /// The membership has changed. The epoch has grown if the chain is another one.
    View(View),
    /// A request (caught_up, suspect) was turned down; why. A newer view is on its way, mostly.
    Denied(String),
    /// The coordinator cannot be reached or refuses this node; what to do. Each trouble once.
    Trouble(String),
    /// Registered (again).
    Connected,
}

/// A node's end of the coordinator. Nothing blocks; one thread owns it.
pub trait Coordinator {
    /// Readable when [`Coordinator::poll`] has something to do (timers included): register it in
    /// the loop that waits.
    fn as_fd(&self) -> BorrowedFd<'_>;

    /// Does what is due, and appends what was heard.
    fn poll(&mut self, out: &mut Vec<CoordEvent>);

    /// The newest view heard.
    fn view(&self) -> Option<&View>;

    /// Whether this node may have been evicted without knowing it: then it must neither
    /// acknowledge, nor grant, nor read for others. Cheap; ask before each acknowledgement.
    fn fenced(&self) -> bool;

    /// When this node will be fenced if it hears nothing more: until then its clients may use what
    /// they were granted. `None`: it is fenced.
    fn serves_until(&self) -> Option<Instant>;

    /// What this node has, for heartbeats and the next registration.
    fn set_progress(&mut self, position: StreamSeq, state: DataState);

    /// A node that registered as opening is ready: the end of its stream, and what else it says of itself.
    fn opened(&mut self, position: StreamSeq, info: String);

    /// `node` (this node, or one in `syncing` if this node is the head) has all of the stream, as far as the
    /// process `incarnation` of it goes.
    fn caught_up(&mut self, node: NodeId, incarnation: u64, epoch: Epoch);

    /// `node` does not acknowledge; only the head is listened to.
    fn suspect(&mut self, node: NodeId, epoch: Epoch);

    /// Leaves in order; this node is registered no more, until a new client is made.
    fn leave(&mut self);

    /// After how long without a heartbeat the coordinator takes a node for dead; known once it has
    /// answered.
    fn failure_timeout(&self) -> Option<Duration>;

    /// Sends no heartbeats while `held`: the node does not do its work, and shall not be taken
    /// for alive.
    fn hold(&mut self, held: bool);
}
