//! Processes that end and are started again where they were, with all that they had open and locked: the device of a virtual machine,
//! whose guest goes on meanwhile.
//!
//! With a client all that it has is free. One that wrote a secret into its control area (`control::HEIR`) is kept when its
//! process ends, for the grace time: its log is read to the end, its leases come back when somebody wants them, what it had granted
//! itself of locks is the head's to judge again, and what it has open and locked stays. Nothing more comes of it.
//!
//! A new client of the same user that shows the secret is its *heir* (`Inherit`): the head gives it the locks in one step, so that nobody
//! who waits gets one in between; then the old client ends as any does. What was open the heir has opened itself before, as long as
//! the old one kept it.
//!
//! A client that *leaves* (`control::LEAVES`: its guest moves to another machine) need not have ended: whoever shows its secret gets its locks
//! while it lives, and may be a client of another node ([`sought`](super::sought)).
//!
//! It is kept no longer than its node's place in the chain, and not over a start of the machine. Its locks do not outlive the process of a
//! head beside which it ended: nobody tells the next one of them.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos};

use super::client::Client;
use super::message::Message;
use super::{Failure, Node};

/// What became of an [`Inherit`](storage::format::rpc::Request::Inherit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Inherited {
    /// Nobody (any more) had the secret.
    Nobody,
    /// One: there may be more.
    One,
    /// There may be some, in the next turn.
    Later,
    /// Not yet: one of those who had the secret is not at its end.
    Waits,
}

impl Node {
    /// The log of a client whose process has ended is read: whether it stays all the same, since an heir may come.
    pub(super) fn waits_for_heir(&mut self, id: ClientId) -> Result<bool, Failure> {
        let (now, grace) = (self.env.now, self.env.config.grace);
        let Some(client) = self.agent.clients.get(&id) else { return Ok(false) };
        if !client.gone || client.expelled || client.heir() == 0 {
            return Ok(false);
        }
        let first = client.heir_until.is_none();
        if first && !(self.leaves_something(client) && self.has_room_to_wait(client)) {
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        let until = *client.heir_until.get_or_insert(now.saturating_add(grace));
        client.dozing_since = None;
        if first {
            for ino in client.soles().collect::<Vec<_>>() {
                self.return_sole(id, ino)?;
            }
            self.member.publish_now = true;
            self.agent.ends += 1;
        }
        self.agent.active.remove(&id);
        Ok(now < until)
    }

    /// Whether a client that is to end has anything that an heir would want.
    fn leaves_something(&self, client: &Client) -> bool {
        let locking = &self.agent.locking;
        !client.open().is_empty() || client.soles().next().is_some() || locking.may_hold(client.id)
    }

    /// Whether those who wait for heirs may be one more. They are counted apart, so that they take no place from who attaches: an heir
    /// above all.
    fn has_room_to_wait(&self, client: &Client) -> bool {
        let uid = client.identity.uid;
        let waits = |c: &&Client| c.heir_until.is_some();
        let waiting = self.agent.clients.values().filter(waits);
        let own = waiting.clone().filter(|c| c.identity.uid == uid).count();
        self.no_room_beside(uid, own, waiting.count()).is_none()
    }

    /// Nobody came.
    pub(super) fn end_unclaimed(&mut self) -> Result<(), Failure> {
        let now = self.env.now;
        let over = |c: &&Client| c.heir_until.is_some_and(|until: Nanos| until <= now);
        let over: Vec<_> = self.agent.clients.values().filter(over).map(|c| c.id).collect();
        over.into_iter().try_for_each(|id| self.end_gone(id))
    }

    /// A client shows the secret of others. One of them is inherited in a turn, of whomever.
    pub(super) fn inherit(&mut self, heir: ClientId, secret: u128) -> Result<Inherited, Failure> {
        let Some(user) = self.agent.clients.get(&heir).map(|c| c.identity.uid) else {
            return Ok(Inherited::Nobody);
        };
        if secret == 0 {
            return Ok(Inherited::Nobody);
        }
        self.leave_one(heir, (user, secret), true)
    }

    /// One of the clients of this node that had the secret leaves what it has locked to `heir`; if that is one of this node too (`beside`), those
    /// are waited for that have not ended.
    pub(super) fn leave_one(
        &mut self,
        heir: ClientId,
        (user, secret): (u32, u128),
        beside: bool,
    ) -> Result<Inherited, Failure> {
        if self.turn.inherited {
            return Ok(Inherited::Later);
        }
        // What lies in shared memory is looked at last.
        let is_of = |c: &&Client| {
            c.id != heir
                && (c.identity.uid == user || planted(Bug::HeirOfAnyUser))
                && !c.expelled
                && c.left != Some((heir, secret))
                && c.heir() == secret
        };
        let (mut who, mut waits) = (None, false);
        for client in self.agent.clients.values().filter(is_of) {
            let ended = client.heir_until.is_some();
            let leaves = !client.gone && (client.leaves() || planted(Bug::HeirOfTheLiving));
            if ended || leaves {
                who = Some((client.id, ended));
            } else {
                waits |= beside;
            }
        }
        if waits {
            return Ok(Inherited::Waits);
        }
        let Some((client, ended)) = who else { return Ok(Inherited::Nobody) };
        if !ended && !planted(Bug::HeirSolesLeft) {
            let soles = self.agent.clients.get(&client).map(|c| c.soles().collect::<Vec<_>>());
            soles.into_iter().flatten().try_for_each(|ino| self.return_sole(client, ino))?;
        }
        if self.agent.locking.returns_of(client) {
            return Ok(Inherited::Waits);
        }
        self.turn.inherited = true;
        let now = self.env.now;
        if !planted(Bug::HeirUntold) {
            self.to_head(Message::LockHeir { client, heir });
        }
        self.agent.locking.inherit(client, heir, (self.next_token, beside, now));
        if ended {
            self.end_gone(client)?;
        } else if let Some(client) = self.agent.clients.get_mut(&client) {
            client.left = Some((heir, secret));
        }
        Ok(Inherited::One)
    }
}
