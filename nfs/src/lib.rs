//! Files of an NFS export (NFSv3 and v4.0), through libnfs 4: DPFS, section 5, the back end for what a provider has already.
//!
//! - [`url`]: where an export is;
//! - [`libnfs`]: the C library, loaded when it is needed;
//! - [`guard`]: judges what a server sends before the library sees it;
//! - [`rpc`]: a connection, which is made again when it breaks, and requests that wait no longer than they may;
//! - [`xdr`]: how arguments and results are written;
//! - `service`: the port mapper and the mount service;
//! - `proto`: what both versions give; `v3` with `nlm` (locks), and `v4` with `state4`;
//! - `table`: which file a number stands for;
//! - [`NfsFs`]: the [`FileSystem`](client::fs::FileSystem) over these.
//!
//! # Files
//! A file is named by its handle, never by its path: what is renamed stays what it was, whoever renames it. A file that is open and loses its
//! last name gets one of ours (`.nfs…`), as with every client of NFS, until it is closed.
//!
//! # Writes
//! are sent as the protocol's unstable ones, and kept here until the server says that they are durable: a server that begins anew gets
//! them again. `fsync`, and the last close, make them so.

mod fs;
pub mod guard;
mod held;
pub mod libnfs;
mod nlm;
mod proto;
pub mod rpc;
mod service;
mod state4;
mod table;
pub mod url;
mod v3;
mod v4;
pub mod xdr;

pub use fs::NfsFs;
