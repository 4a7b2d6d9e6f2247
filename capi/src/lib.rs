//! The C library: `corbel.h` over LibFS.
//!
//! [`Volume`] is the safe half (paths, descriptors, offsets); [`ffi`] the `extern "C"` half, which
//! only turns pointers into slices and errors into errno.

pub mod ffi;
mod volume;

pub use volume::Volume;
