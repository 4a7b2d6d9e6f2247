//! How clients share a node: the stream is one order, so whoever waits for an fsync waits for all bytes that were put into the
//! stream before. While somebody else waits, a client's log is therefore taken in small pieces, and no further than a small window ahead of
//! what all members have. Alone a client has all of it.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos};

use super::Node;

/// Who has waited so lately waits again soon.
const LATELY: Nanos = 20_000_000;

/// The two clients that waited last, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waiting {
    last: (ClientId, Nanos),
    before: (ClientId, Nanos),
}

impl Waiting {
    /// A client waits for an fsync (or its agent has sent what it did, which comes to the same).
    pub(super) fn note(&mut self, client: ClientId, now: Nanos) {
        if self.last.0 != client {
            self.before = self.last;
        }
        self.last = (client, now);
    }

    /// Whether one that is not this one has waited lately.
    fn others(&self, client: ClientId, now: Nanos) -> bool {
        let (who, at) = if self.last.0 == client { self.before } else { self.last };
        who != ClientId(0) && who != client && now < at + LATELY
    }
}

impl Node {
    /// Whether others wait beside this client.
    pub(super) fn is_shared(&self, id: ClientId) -> bool {
        self.agent.waiting.others(id, self.env.now) && !planted(Bug::FloodFirst)
    }

    /// Whether a client has to wait, with what is in its log, for what it has under way: an acknowledgement wakes it.
    pub(super) fn is_held_back(&self, id: ClientId) -> bool {
        self.is_shared(id) && self.under_way(id) >= self.env.config.limits.shared_window
    }

    /// Bytes before the next ones of this client that not all members have, as far as it is known here.
    fn under_way(&self, id: ClientId) -> u64 {
        match self.part.head() {
            Some(head) => head.unacked_bytes,
            None => self.agent.clients.get(&id).map_or(0, |client| client.unreplicated_bytes()),
        }
    }
}
