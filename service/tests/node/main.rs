//! Tests of the service's core alone: nodes on regions in memory, clients that write their logs by
//! hand, time and the network in the hands of the test. A seed that fails is printed.

mod acl;
mod broken;
mod closed;
mod closing;
mod coalesce;
mod crash;
mod crowds;
mod fresh;
mod grants;
mod hostile;
mod joins;
mod least;
mod locks;
mod messages;
mod nameless;
mod past;
mod proofs;
mod quota;
mod reach;
mod restart;
mod returns;
mod rig;
mod room;
mod share;
mod turns;
mod waits;
