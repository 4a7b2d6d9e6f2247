//! FUSE: the protocol's structures ([`wire`]), taking requests apart ([`parse`]), replies
//! ([`reply`]) and dispatch onto a [`FileSystem`](client::fs::FileSystem) ([`server`]).
//!
//! Nothing here knows how requests arrive: `/dev/fuse` is [`crate::dev_fuse`], and a virtio-fs
//! device hands the same [`Server`] what it takes from its queues.

mod callers;
mod files;
mod groups;
#[cfg(any(test, feature = "planted"))]
pub mod kernel;
mod lock_book;
mod locks;
mod names;
mod pages;
pub mod parse;
pub mod reply;
pub mod server;
mod syncs;
mod virtual_dir;
pub mod wire;

pub use locks::Owner as LockOwner;
pub use reply::{Answer, LaterReply, ReplySink};
pub use server::{
    Guest, IO_BYTES_MAX, Ledger, Locked, OpenFile, Options, REQUEST_BYTES_MAX, Server, Told,
};

#[cfg(test)]
mod lock_tests;
#[cfg(test)]
mod tests;
