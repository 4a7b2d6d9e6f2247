//! Images of Ceph's RBD, as `rbd create` makes them (format 2), served as block devices.
//!
//! [`header`] reads what an image says of itself, and refuses what is not understood by its name. [`owner`] holds the image as
//! librbd does: a watch and the lock `rbd_lock` of the header. [`map`] keeps the object map true. [`image`] is the device.
//!
//! The cluster answers a write when it is durable, so a flush has nothing to do.

pub mod header;
pub mod image;
mod map;
mod owner;

pub use image::RbdImage;
