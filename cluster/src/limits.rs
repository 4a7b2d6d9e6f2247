//! Every limit of the crate, with the consequence of changing it.

use std::time::Duration;

/// Longest body of a frame: a chunk of the replication stream (4 MiB) and its headers. A peer can
/// make us allocate this much per connection, not more.
pub const BODY_MAX: usize = (4 << 20) + (64 << 10);
/// Longest body before the hello was accepted: strangers get no more.
pub const HELLO_BODY_MAX: usize = 1024;
/// Bodies up to here are covered by the frame's checksum (4 KiB cost about 0.3 us); longer ones
/// carry checksums of their own inside.
pub const CHECKED_BODY_MAX: usize = 64 << 10;
/// Receive buffer of a connection: frames that fit are parsed out of it without another call.
pub const RECEIVE_BYTES: usize = 64 << 10;
/// Bytes taken from one connection before the others get their turn.
pub const TURN_BYTES: usize = 1 << 20;
/// Connections that have not said hello yet; more are closed at once.
pub const STRANGERS_MAX: usize = 64;
/// A connection must have completed its hello within this time.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// First and longest pause between attempts to reach a peer.
pub const DIAL_PAUSE_MIN: Duration = Duration::from_millis(10);
/// See [`DIAL_PAUSE_MIN`]: a returning node is noticed within this time.
pub const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);
/// TCP: unacknowledged bytes or unanswered probes for this long end the connection. The
/// coordinator is faster; this only frees the socket.
pub const TCP_DEAD: Duration = Duration::from_secs(5);
/// Ring of one direction, low latency: a few hundred 4 KiB frames, and it stays in the L2 cache.
pub const RING_LOW_LATENCY: usize = 512 << 10;
/// Ring of one direction, bulk: a whole chunk, so that it is handed over with one wake-up.
pub const RING_BULK: usize = 8 << 20;
/// Largest ring that a peer may hand us.
pub const RING_MAX: usize = 64 << 20;

const _: () = {
    assert!(RECEIVE_BYTES > HELLO_BODY_MAX + 24);
    assert!(CHECKED_BODY_MAX <= BODY_MAX);
    assert!(RING_BULK.is_power_of_two());
    assert!(RING_LOW_LATENCY.is_power_of_two());
    assert!(RING_BULK <= RING_MAX);
};
