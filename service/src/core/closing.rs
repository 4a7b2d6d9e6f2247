//! An end in order, which is no loss.
//!
//! From [`Event::Closing`](super::Event::Closing) on the clients' leases are suspended, and nothing more is
//! granted or answered: who is in the middle of an operation ends it, and then the logs are final. They are read, ordered, and
//! on every member: every fsync that waits returns. That takes milliseconds. Only then the clients
//! are told that the session is over; they find that all they did is replicated, so nothing is lost and nothing is
//! an error, and attach anew when there is somebody to attach to.
//!
//! A client of which that cannot be said (a thread of it is stopped, the chain is not whole) is left as if nicfs had
//! been killed: its log is taken up by the next nicfs, if the node keeps its place. So are all clients of a
//! node that is the whole chain: nobody can take its place.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{ClientId, Nanos};

use super::{Failure, Node, Role};

/// Between two looks at what is not at rest yet.
const LOOK: Nanos = 1_000_000;

/// An end in order, under way.
#[derive(Debug)]
pub(super) struct Closing {
    /// Operations that were under way when the leases were suspended.
    inside: BTreeMap<ClientId, Vec<(usize, u64)>>,
    look_at: Nanos,
    /// Everything that counts is on every member.
    done: bool,
    /// The end has come, and so many clients are to go on with the next nicfs, in the same session.
    left: Option<u32>,
}

impl Node {
    /// Nothing new begins from here on.
    pub(super) fn begin_closing(&mut self) {
        if self.closing.is_some() {
            return;
        }
        let mut inside = BTreeMap::new();
        for client in self.agent.clients.values_mut() {
            client.suspend_all();
            inside.insert(client.id, client.inside());
        }
        self.closing = Some(Closing { inside, look_at: self.env.now, done: false, left: None });
    }

    /// Whether an end in order has come to its end: [`Event::Shutdown`](super::Event::Shutdown) takes nothing
    /// from anybody.
    pub fn is_closed(&self) -> bool {
        self.closing.as_ref().is_some_and(|closing| closing.done || planted(Bug::ClosedEarly))
    }

    /// When it is to be looked after.
    pub(super) fn closing_deadline(&self) -> Option<Nanos> {
        self.closing.as_ref().filter(|closing| !closing.done).map(|closing| closing.look_at)
    }

    pub(super) fn closing_step(&mut self) -> Result<(), Failure> {
        if self.closing.is_none() {
            return Ok(());
        }
        let mut done = true;
        for id in self.agent.clients.keys().copied().collect::<Vec<_>>() {
            done &= self.is_at_rest(id)?;
        }
        done &= !self.owes_others();
        if let Some(closing) = &mut self.closing {
            (closing.done, closing.look_at) = (done, self.env.now + LOOK);
        }
        Ok(())
    }

    /// Whether the others, who would go on without this head, lack something: of clients that are gone, too, which others may have seen.
    fn owes_others(&self) -> bool {
        let alone = self.view.chain == [self.me()];
        let owes = self.is_head() && !alone && self.member.all_acked < self.ring.last();
        owes && !planted(Bug::ClosedOwing)
    }

    /// Whether all of a client's log is on every member, and nothing comes to it.
    fn is_at_rest(&mut self, id: ClientId) -> Result<bool, Failure> {
        let (Some(closing), Some(client)) = (&mut self.closing, self.agent.clients.get(&id)) else {
            return Ok(true);
        };
        if let Some(inside) = closing.inside.get_mut(&id) {
            inside.retain(|seen| client.still_inside(*seen));
            if !inside.is_empty() {
                return Ok(false);
            }
        }
        if !matches!(self.role(), Role::Head | Role::Member) || !self.drain(id)? {
            return Ok(false);
        }
        let at_rest = |c: &super::Client| c.replicated.0 + 1 >= c.next().0 && !c.is_unsound();
        Ok(self.agent.clients.get(&id).is_none_or(at_rest))
    }

    /// The end. Whoever is not at rest, and whoever nobody can take anything from, goes on with the next nicfs.
    pub(super) fn shutdown(&mut self) -> Result<(), Failure> {
        let alone = self.view.chain == [self.me()];
        let mut left = 0;
        for id in self.agent.clients.keys().copied().collect::<Vec<_>>() {
            let rests = self.is_at_rest(id)? && self.closing.is_some();
            if (!rests || alone) && !planted(Bug::ClosedEarly) {
                left += u32::from(!rests);
            } else if let Some(client) = self.agent.clients.get_mut(&id) {
                client.dismiss(base::Sequence(client.next().0 - 1));
            }
        }
        if left > 0 {
            log::warn!(
                "{left} clients have operations that not every member has: their logs are kept"
            );
        }
        let owes = self.owes_others();
        if let Some(closing) = &mut self.closing {
            closing.left = Some(left);
            closing.done &= !owes;
        }
        self.settle_ring()?;
        if owes {
            // The next head may not have it, and what is published cannot be cut.
            return Ok(());
        }
        self.publish_all()
    }

    /// After the end: whether nobody waits for this node to come back, so that the others can go on without it at once.
    pub fn may_leave(&self) -> bool {
        let done = self.closing.as_ref().is_some_and(|c| c.done && c.left == Some(0));
        done && self.view.chain.len() > 1 && self.view.chain.contains(&self.me())
    }
}
