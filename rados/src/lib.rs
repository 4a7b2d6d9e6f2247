//! Objects of a Ceph cluster: RADOS, through librados, which is loaded when it is needed and by nobody else.
//!
//! [`librados`] is the library, and all that has `unsafe` in it. [`Place`] is how objects are named, a [`Connection`] makes
//! itself when it is first needed and again after it was lost, a [`Lease`] is a lock that ends with its holder.
//!
//! [`osdmap`] is where objects lie, computed here from the cluster's map, without the library.
//!
//! What a monitor does not answer is given up after [`PATIENCE`], and so is what an OSD does not answer, for stores; a disk waits for
//! an OSD ([`librados::Purpose`]). Notifications and the look for the newest map of a cluster are bounded by the library alone.

mod connection;
mod lease;
pub mod librados;
pub mod osdmap;
mod place;

use std::time::Duration;

use base::Errno;

pub use connection::Connection;
pub use lease::{Lease, Terms};
pub use librados::{Cluster, Io, OSD_MAP_MAX, Purpose, Step};
pub use place::{ImagePlace, Place, Reads};

/// After this a request is given up: of an OSD, of a monitor, for a connection.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// What a cluster says to a client that it has shut out.
pub const SHUT_OUT: Errno = Errno::SHUTDOWN;
