//! Block devices: what serves them, and what they are kept in.
//!
//! [`device`] is the contract: requests are submitted and completed, in any order, by any thread. Behind it
//! are a file of the Corbel volume, a plain file, memory, an image of a pool, or one of Ceph's RBD ([`rbd`]); in front of it stand [`nbd`] and,
//! for the local kernel, [`ublk`], and between the two, where it is wanted, the cache and the merging of requests ([`layer`]).
//!
//! There is no async runtime here: what is quick is done by the thread that asks, what is not is completed by
//! the thread that finishes it.

pub mod device;
pub mod layer;
pub mod nbd;
pub mod pool;
pub mod rbd;
pub mod ublk;

pub use base::Errno;
