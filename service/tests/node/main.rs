//! Tests of the service's core alone: nodes on regions in memory, clients that write their logs by
//! hand, time and the network in the hands of the test. A seed that fails is printed.

mod grants;
#[allow(dead_code)]
mod rig;
