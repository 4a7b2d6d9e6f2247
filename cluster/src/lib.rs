//! Who talks to whom, and who is in charge: frames, transports between nodes, the coordinator.
//! Knows nothing of what lies on media.
//!
//! Reading order: [`limits`]; [`wire`] (the frame and the hello, field by field); [`transport`]
//! (the trait a service loop drives) and its implementations: [`net`] (one epoll loop over
//! `tcp` sockets and `shm` rings) and [`mem`] (in one process, deterministic); [`tls`] (who speaks);
//! [`coordinator`] (membership, epochs, chains).

pub mod coordinator;
pub mod decode;
pub mod limits;
pub mod mem;
pub mod net;
mod queue;
mod shm;
mod tcp;
pub mod tls;
pub mod transport;
pub mod wire;

pub use transport::{
    Class, Counters, DownReason, Interest, NetEvent, Peer, PeerAddress, SendError, Transport,
};
