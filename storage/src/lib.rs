//! What lies on media: formats, region, log, tree, checker. Knows no network.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;
