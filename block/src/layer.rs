//! The layer between front ends and a device that is far away: a cache, read-ahead, and merging of neighbours.
//!
//! [`core`] decides: it takes requests, answers of the device and the time, and says what to submit and what to
//! complete. It has no threads, no clock and no device, so that a test with a seed drives what is shipped. [`driver`]
//! puts a device below it, and a clock. [`cache`], [`latency`] and [`ahead`] are what it decides by.

pub mod ahead;
pub mod cache;
pub mod core;
pub mod driver;
pub mod latency;

pub use self::core::{Config, Effect, Layer, Stats};
pub use driver::Layered;
