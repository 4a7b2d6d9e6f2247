//! The node service: nicfs and hostd.
//!
//! [`config`] is what they are told; [`nicfs::run`] and [`hostd::run`] block until they end.

pub mod config;
pub mod core;
pub mod hostd;
pub mod nicfs;

pub use config::{Error, HostdConfig, Membership, NicfsConfig, PeerTransport};
