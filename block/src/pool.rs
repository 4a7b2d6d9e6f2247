//! Pools: images cut into objects, objects into shards, shards in *stores*, each on another one.
//!
//! [`spec`] says which stores there are and how objects are coded; CRUSH places by it. A [`store`] is something that
//! keeps named bytes ([`dir`]: a directory, [`s3`]: a bucket, [`rados`]: a pool of Ceph); [`worker`] asks it without waiting for it. A [`shard`] says of itself
//! what it is of, and has checksums; so does a [`patch`]. [`image`] reads and writes, [`repair`] finds what is missing, misplaced or
//! damaged, and makes it good. One thread has several objects under way (`flight`): parity, and what is lost, is computed by tasks
//! ([`placement::dispatch`]), and stores are asked and given more meanwhile.
//!
//! A large write makes an object anew, under a version that was never there before, and the version before is removed when
//! enough shards of the new one are durable. A small one lays a patch over it, in as many stores as it takes; when they have become
//! many, the object is made anew with all of them. So what a crash leaves is all of a write or nothing, never a mixture.

pub mod dir;
mod flight;
mod gather;
pub mod ground;
pub mod image;
mod opened;
pub mod patch;
pub mod rados;
pub mod repair;
pub mod s3;
pub mod shard;
pub mod spec;
pub mod store;
mod survey;
pub mod turns;
pub mod worker;
pub mod write;

pub use image::Image;
pub use opened::{Info, Pool};
pub use spec::{Coding, Spec, StoreSpec};
