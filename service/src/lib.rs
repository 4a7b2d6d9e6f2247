//! The node service: nicfs and hostd.
//!
//! [`config`] is what they are told; [`nicfs::run`] and [`hostd::run`] block until they end.
//! [`core`] is everything that nicfs decides, without a system call; `link` what the two processes
//! say to each other; `beat` the coordinator, heard on a thread of its own; `host` how nicfs makes sure that hostd copies no more; `status` what a node
//! says of itself; `delayed` a slower fabric; `signal` the end of a service; `process` what a service asks of the system for itself;
//! [`pool`] the threads that work for the one that decides; [`packing`] what travels compressed.

mod beat;
pub mod config;
pub mod core;
mod crew;
mod delayed;
mod host;
pub mod hostd;
pub mod link;
pub mod nicfs;
pub mod packing;
pub mod pool;
pub mod process;
pub mod serving;
pub mod signal;
mod status;

pub use config::{Error, HostdConfig, Membership, NicfsConfig, PeerTransport};
