//! The NBD protocol (`doc/proto.md` of the NBD project): newstyle negotiation, structured replies, many requests
//! in flight, several connections to one export.
//!
//! [`proto`] has the numbers and the forms of messages, [`handshake`] the negotiation as a machine that takes
//! bytes and gives bytes, [`requests`] what follows it, likewise. Neither knows a socket, so that tests and the
//! fuzzer drive what the server runs. [`server`] and [`connection`] have the sockets and threads, [`tls`] the
//! certificates, [`client`] is a small client for tests and benches.

pub mod client;
pub mod connection;
pub mod exports;
pub mod handshake;
mod output;
pub mod proto;
pub mod requests;
pub mod server;
pub mod tls;
mod wire;

pub use exports::{Export, Exports};
pub use server::{Address, Limits, Server};
