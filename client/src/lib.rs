//! LibFS, the client: the [`FileSystem`](fs::FileSystem) trait that every front end speaks, and
//! its implementation over a private operation log and public memory.
//!
//! `no_std + alloc` without the feature `std`: the interception library loads this crate into
//! strangers' processes, where libc, thread-local storage and the application's allocator are
//! out of bounds.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod dir;
pub mod fs;
pub mod kept;
pub mod libfs;
pub mod mutex;
pub mod null;
mod pass_on;
pub mod path;
pub mod slots;

pub use base::{Errno, InodeId};
