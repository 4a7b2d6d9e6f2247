//! Pools: images cut into objects, objects into shards, shards in *stores*, each on another one.
//!
//! [`spec`] says which stores there are and how objects are coded; CRUSH places by it. A [`store`] is something that
//! keeps named bytes ([`dir`]: a directory); [`worker`] asks it without waiting for it. A [`shard`] says of itself
//! what it is of, and has checksums. [`image`] reads and writes, [`repair`] finds what is missing, misplaced or
//! damaged, and makes it good.
//!
//! An object is written as a whole, under a version that was never there before, and the version before is removed when
//! enough shards of the new one are durable. So what a crash leaves is either version whole, never a mixture.

pub mod dir;
pub mod image;
pub mod repair;
pub mod shard;
pub mod spec;
pub mod store;
pub mod worker;

pub use image::{Image, Pool};
pub use spec::{Coding, Spec, StoreSpec};
