//! A file system for virtual machines: virtio-fs devices (virtio 1.3, 5.11) with any
//! [`FileSystem`](client::fs::FileSystem) behind them. DPFS, sections 3 and 4.
//!
//! - [`hal`]: what a transport gives: queues, requests as scatter lists, completion;
//! - [`device`]: takes requests from queues and serves them, on threads bound to each, which wait as [`pace`] finds best, with
//!   [`slice`]s that let them in soon;
//! - [`vring`] and [`vhost`]: the first transport, vhost-user on a Unix socket, with [`inflight`] for what a device that
//!   was killed had begun;
//! - [`ledger`]: what the next device must know, if this one is killed; `again`: requests that come to it a second time;
//!   [`transfer`]: what one on another machine must know;
//! - [`remote`]: the second transport: a connection to another machine, and the side that passes a guest's requests on;
//! - [`memory`]: the guest's memory; [`dirty`]: which of its pages were written, for a monitor that moves it;
//! - [`tenant`]: a directory of a file system, and nothing beside it, with users mapped ([`ids`]) and [`limits`]; [`share`]: many of
//!   them in one process, by weight;
//! - [`sandbox`]: what the process gives up before it serves;
//! - [`driver`]: the other side, without a virtual machine, for tests and benches ([`measure`], [`witness`]).

mod again;
pub mod device;
pub mod dirty;
pub mod driver;
mod fair;
pub mod hal;
pub mod ids;
pub mod inflight;
pub mod ledger;
pub mod limits;
pub mod measure;
pub mod memory;
pub mod pace;
mod price;
pub mod remote;
pub mod sandbox;
pub mod share;
pub mod slice;
pub mod tenant;
pub mod transfer;
mod usage;
pub mod vhost;
pub mod vring;
pub mod witness;
