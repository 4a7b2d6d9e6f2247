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
//! It is kept no longer than its node's place in the chain, and not over a start of the machine.

use base::{ClientId, Nanos};

use super::client::Client;
use super::message::Message;
use super::{Failure, Node};

impl Node {
    /// The log of a client whose process has ended is read: whether it stays all the same, since an heir may come.
    pub(super) fn waits_for_heir(&mut self, id: ClientId) -> Result<bool, Failure> {
        let (now, grace) = (self.env.now, self.env.config.grace);
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        if !client.gone || client.expelled || client.heir() == 0 {
            return Ok(false);
        }
        let first = client.heir_until.is_none();
        let until = *client.heir_until.get_or_insert(now.saturating_add(grace));
        client.dozing_since = None;
        if first {
            for ino in client.soles().collect::<Vec<_>>() {
                self.return_sole(id, ino)?;
            }
            self.member.publish_now = true;
        }
        self.agent.active.remove(&id);
        Ok(now < until)
    }

    /// Nobody came.
    pub(super) fn end_unclaimed(&mut self) -> Result<(), Failure> {
        let now = self.env.now;
        let over = |c: &&Client| c.heir_until.is_some_and(|until: Nanos| until <= now);
        let over: Vec<_> = self.agent.clients.values().filter(over).map(|c| c.id).collect();
        over.into_iter().try_for_each(|id| self.end_gone(id))
    }

    /// A client shows the secret of others. `false`: one of them is not at its end yet.
    pub(super) fn inherit(&mut self, heir: ClientId, secret: u128) -> Result<bool, Failure> {
        let Some(user) = self.agent.clients.get(&heir).map(|c| c.identity.uid) else {
            return Ok(true);
        };
        let is_of = |c: &&Client| {
            c.id != heir
                && secret != 0
                && c.heir() == secret
                && c.identity.uid == user
                && !c.expelled
        };
        let all: Vec<(ClientId, bool)> = self
            .agent
            .clients
            .values()
            .filter(is_of)
            .map(|c| (c.id, c.heir_until.is_some() && !self.agent.locking.returns_of(c.id)))
            .collect();
        if all.iter().any(|(_, ended)| !ended) {
            return Ok(false);
        }
        for (client, _) in all {
            self.to_head(Message::LockHeir { client, heir });
            self.agent.locking.inherit(client, heir);
            self.end_gone(client)?;
        }
        Ok(true)
    }
}
