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
// What the volume's own tests find differences with.
#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../storage/tests/common/whole.rs"]
mod whole;
pub mod world;

pub use world::{Flavour, Outcome, Preset, run};
