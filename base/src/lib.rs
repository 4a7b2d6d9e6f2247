//! What every part of Corbel shares and nothing of a file system: checksum, identifiers, errno,
//! clock, seeded random, packing of fields.
//!
//! `no_std` without the feature `std`, since the client library is loaded into strangers'
//! processes, where neither libc nor thread-local storage may be touched.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

#[doc(hidden)]
pub use alloc::format;

pub mod checksum;
pub mod clock;
pub mod cpu;
pub mod errno;
pub mod id;
pub mod invariant;
pub mod level;
#[cfg(feature = "library")]
pub mod library;
pub mod note;
#[cfg(feature = "std")]
pub mod output;
pub mod planted;
pub mod random;
pub mod siphash;
pub mod spans;
pub mod wire;

pub use checksum::crc32c;
pub use clock::{Clock, Nanos};
pub use errno::Errno;
pub use id::{ClientId, Epoch, InodeId, NodeId, Sequence, StreamSeq};
pub use level::Level;
