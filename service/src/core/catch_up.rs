//! What a node that joins has missed of the stream while it was sent the volume's state, or was away, is sent to it before anybody
//! waits for it: so much at a time, and more as it acknowledges that. When all the rest is on its way it is *followed*: from then on it is
//! sent every chunk as it is made, and nothing is acknowledged without it, so that whatever is acknowledged when it enters the chain is
//! there. (As rounds of a new server in Raft, section 4.2.1 of Ongaro's thesis.)
//!
//! Clients may write as fast as it catches up. So there are rounds, each up to where the stream ended when the round began: after one in which
//! it has not come nearer it is followed as it is, and clients wait for it. So do they when the ring has no room for what it lacks.

use base::planted::{Bug, planted};
use base::{NodeId, StreamSeq};

use super::head::Head;
use super::message::Message;
use super::{Failure, Node};

/// Bytes of chunks that are on their way to such a node at a time, unless one is longer.
const WINDOW_BYTES: u64 = 1 << 20;

/// A node that catches up.
#[derive(Clone, Copy, Debug)]
pub(super) struct CatchingUp {
    /// It has the stream up to there.
    pub(super) acked: StreamSeq,
    /// It was sent the stream up to there.
    pub(super) sent: StreamSeq,
    /// Where the stream ended when this round began, and how many chunks the node lacked then.
    goal: StreamSeq,
    lacked: u64,
}

impl Node {
    /// A node that joins has the stream up to there, and what follows is in the ring.
    pub(super) fn catches_up(&mut self, node: NodeId, acked: StreamSeq) -> Result<(), Failure> {
        let goal = self.ring.last();
        let lacked = goal.0.saturating_sub(acked.0);
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.snapshots.remove(&node);
        head.images_wanted.remove(&node);
        head.catching_up.insert(node, CatchingUp { acked, sent: acked, goal, lacked });
        if planted(Bug::CatchUpAwaited) {
            head.followers.insert(node);
        }
        self.send_missed(node)
    }

    /// A node has acknowledged something: one that catches up is sent more.
    pub(super) fn caught_up_to(&mut self, node: NodeId, seq: StreamSeq) -> Result<(), Failure> {
        let last = self.ring.last();
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let Some(at) = head.catching_up.get_mut(&node).filter(|at| seq > at.acked) else {
            return Ok(());
        };
        at.acked = seq;
        if head.followers.contains(&node) {
            // It is waited for, and comes nearer, though not to what others have.
            head.acks_missing = 0;
        }
        at.sent = at.sent.max(seq);
        if seq >= at.goal {
            let lacks = last.0.saturating_sub(seq.0);
            // (A quarter, or it would take for ever.)
            let nearer = lacks <= at.lacked - at.lacked.div_ceil(4);
            (at.goal, at.lacked) = (last, lacks);
            if !nearer {
                head.followers.insert(node);
            }
        }
        self.send_missed(node)
    }

    /// Sends as much of what a node has missed as may be on its way.
    fn send_missed(&mut self, node: NodeId) -> Result<(), Failure> {
        let (last, chunks) = (self.ring.last(), (self.env.config.limits.resend / 2).max(1));
        let Some(head) = self.part.head() else { return Ok(()) };
        let Some(mut at) = head.catching_up.get(&node).copied() else { return Ok(()) };
        let bytes_of = |ring: &super::ring::Ring, seq| {
            ring.get(seq).map_or(0, |kept| u64::from(kept.header.body_bytes))
        };
        if at.sent.0 - at.acked.0 > chunks / 2 {
            // (Many at a time cost little more than one.)
            return Ok(());
        }
        let on_way = at.acked.0 + 1..=at.sent.0;
        let mut bytes: u64 = on_way.map(|seq| bytes_of(&self.ring, StreamSeq(seq))).sum();
        while at.sent < last && at.sent.0 - at.acked.0 < chunks {
            let next = StreamSeq(at.sent.0 + 1);
            bytes += bytes_of(&self.ring, next);
            if bytes > WINDOW_BYTES && at.sent > at.acked {
                break;
            }
            if !self.send_kept(node, next)? {
                // It has to begin anew: what has changed since is less than all.
                if let Some(head) = self.part.head_mut() {
                    head.catching_up.remove(&node);
                    head.followers.remove(&node);
                }
                self.send(node, Message::Resume { seq: StreamSeq(0), last });
                return self.followed_no_more();
            }
            at.sent = next;
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if at.sent == last {
            head.catching_up.remove(&node);
            head.followers.insert(node);
        } else {
            head.catching_up.insert(node, at);
        }
        Ok(())
    }
}

impl Head {
    /// Who is sent every chunk as it is made, beside the chain.
    pub(super) fn followed(&self) -> impl Iterator<Item = NodeId> {
        self.followers.iter().filter(|node| !self.catching_up.contains_key(node)).copied()
    }

    /// How many chunks each lacks that catches up with a stream that ends there.
    pub(super) fn lacked(&self, last: StreamSeq) -> Vec<(NodeId, u64)> {
        let of = |(node, at): (&NodeId, &CatchingUp)| (*node, last.0.saturating_sub(at.acked.0));
        self.catching_up.iter().map(of).collect()
    }

    /// There is no room in the ring for what nodes lack that catch up: from now on they are waited for.
    pub(super) fn wait_for_catching_up(&mut self) {
        self.followers.extend(self.catching_up.keys());
    }
}
