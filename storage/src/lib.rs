//! What lies on media: formats, limits, region, log, tree, checker. Knows no network.
//!
//! Reading order: [`limits`], [`format`] (every structure, no logic), [`media`] (the trait through
//! which all memory is reached) and [`region`] (its file-backed implementation), [`persist`]
//! (non-temporal stores, write-back, fence), [`tree`] (pages on media), [`volume`] (what they hold,
//! and the one `apply` that changes it), [`check`] (fsck), [`memory`] (a region that loses power,
//! for tests and the simulator).
//!
//! `no_std + alloc` without the feature `std`: then only what a client needs remains.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod acl;
#[cfg(feature = "std")]
mod apart;
#[cfg(feature = "std")]
mod backing;
#[cfg(feature = "std")]
pub mod check;
pub mod format;
#[cfg(feature = "std")]
mod guard;
#[cfg(feature = "std")]
mod left;
pub mod limits;
pub mod locks;
pub mod media;
#[cfg(feature = "std")]
pub mod memory;
pub mod permission;
pub mod persist;
#[cfg(feature = "std")]
pub mod region;
#[cfg(feature = "std")]
pub mod tree;
#[cfg(feature = "std")]
mod untouched;
#[cfg(feature = "std")]
pub mod volume;
