//! Front ends: how programs that know nothing of Corbel reach a
//! [`FileSystem`](client::fs::FileSystem).
//!
//! - [`fuse`]: the FUSE protocol, without a transport;
//! - [`dev_fuse`]: its transport to the local kernel, with mounting ([`mount_options`],
//!   `mount_point`) and the way to the kernel's caches ([`notify`]); `dev_uring` is the same over
//!   io_uring (`ring`), where the kernel offers that;
//! - [`patience`]: how long requests may wait;
//! - [`process`]: being a daemon, and waiting for signals;
//! - [`source`]: which file system a source names.

pub mod dev_fuse;
mod dev_uring;
pub mod fuse;
pub mod mount_options;
mod mount_point;
pub mod notify;
pub mod patience;
mod planted;
pub mod process;
mod ring;
pub mod secret;
pub mod source;

pub use mount_point::{MountError, remount};
