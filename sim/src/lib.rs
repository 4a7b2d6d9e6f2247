//! The cluster in one thread: the production state machines of the nodes
//! ([`service::core::Node`]) and of the coordinator ([`cluster::coordinator::machine::Machine`])
//! over regions in memory, with simulated clients, fabric, faults and clock. One seed gives one
//! history. docs/testing.md is the legend.

mod acl;
pub mod actor;
pub mod block;
pub mod crash;
pub mod faults;
pub mod host;
pub mod hostd;
pub mod model;
#[cfg(feature = "planted")]
pub mod planted;
mod process;
mod rights;
pub mod scenario;
pub mod world;

pub use world::{Flavour, Outcome, Preset, run};
