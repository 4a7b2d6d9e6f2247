//! A device whose file system is served on another machine (DPFS's RVFS): here the guest's queues, there the file system, between
//! them one connection.
//!
//! - [`frame`] is what goes over it; [`link`] how bytes go (plain over a Unix socket, TLS between machines);
//! - [`back`] is the side with the file system: a [`Transport`](crate::hal::Transport) like any other;
//! - [`front`] is the side with the guest: it takes requests from another transport and passes them on.
//!
//! A request is done once. Each has a number (tag); the back keeps a reply until the front has said that it has it. When the
//! connection breaks, the front makes another one and sends again what has no reply; the back answers from what it
//! has kept, or goes on with what it is still at. A connection over which nothing has come for a while is given up. Each side
//! has a window: so many requests, and so many bytes of requests and replies, may be under way.

pub mod back;
mod connection;
pub mod frame;
pub mod front;
pub mod link;
