//! Objects of a Ceph cluster: RADOS, through librados, which is loaded when it is needed and by nobody else.
//!
//! [`librados`] is the library, and the only file with `unsafe` in it. [`Place`] is how objects are named, a [`Connection`] makes
//! itself when it is first needed and again after it was lost, a [`Lease`] is a lock that ends with its holder.
//!
//! Nothing waits for ever: whatever a cluster does not answer is given up after [`PATIENCE`].

mod connection;
mod lease;
pub mod librados;
mod place;

use std::time::Duration;

pub use connection::Connection;
pub use lease::{Lease, Terms};
pub use librados::{Cluster, Io, Step};
pub use place::{ImagePlace, Place};

/// After this a request is given up: of an OSD, of a monitor, for a connection.
pub const PATIENCE: Duration = Duration::from_secs(10);
