//! Fetch: the agent takes whole entries out of the logs of its clients (`client::lanes` finds and checks them), in their sequence,
//! and gives them to the head.
//!
//! Much at a time is fetched by a piece of work (`client::reader`), one for each client: clients side by side, and each in its order.
//! Whoever needs a log read to its end, because a lease goes or its client, waits for it ([`Node::drain`]).

use base::ClientId;
use base::planted::{Bug, planted};

use crate::core::client::{Batch, Client};
use crate::core::head::Head;
use crate::core::message::{Message, Raw};
use crate::core::{Effect, Failure, Node, Role};

/// How far a log was fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::core) enum Fetched {
    /// To its end, or as far as it goes on.
    All,
    /// The rest is for the next look.
    Some,
    /// There is no room for more.
    Blocked,
}

impl Node {
    /// Fetches what is complete in a client's log now and hands it to the head. `false` when the
    /// head has no room for it. Never more than the log can hold at one time: what lies beyond
    /// came later, and a client that writes without end must not keep the node.
    pub(in crate::core) fn drain(&mut self, id: ClientId) -> Result<bool, Failure> {
        Ok(self.fetch_all(id, false)? == Fetched::All)
    }

    /// The same for whom nobody else waits: where others wait for their own, a piece at a time.
    pub(in crate::core) fn take_some(&mut self, id: ClientId) -> Result<Fetched, Failure> {
        self.fetch_all(id, true)
    }

    fn fetch_all(&mut self, id: ClientId, polite: bool) -> Result<Fetched, Failure> {
        let head = self.is_head();
        if !head && self.role() != Role::Member {
            return Ok(Fetched::Blocked);
        }
        let mut left = self.agent.clients.get(&id).map_or(0, Client::capacity);
        let (mut taken, piece) = (0, self.env.config.limits.shared_bytes as u64);
        if self.agent.clients.get(&id).is_some_and(|client| client.reading().is_some()) {
            if polite || planted(Bug::DrainUnread) {
                self.agent.active.insert(id);
                return Ok(if polite { Fetched::Some } else { Fetched::All });
            }
            self.settle_fetch(id)?;
            if head && self.turn_is_over() {
                self.agent.active.insert(id);
                self.turn.cut_short = true;
                return Ok(Fetched::Some);
            }
        }
        loop {
            let blocked = self.part.head().is_some_and(Head::is_blocked);
            if head && (blocked || !self.room_for_batch()?) {
                return Ok(Fetched::Blocked);
            }
            let shared = polite && self.is_shared(id);
            if shared && self.is_held_back(id) {
                self.agent.active.insert(id);
                self.agent.schedule.held = true;
                return Ok(Fetched::Some);
            }
            let most = self.batch_bytes(shared);
            if polite && self.fetch_apart(id, most)? {
                self.agent.active.insert(id);
                return Ok(Fetched::Some);
            }
            let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(Fetched::All) };
            let batch = client.fetch(most)?;
            if batch.last.0 == 0 {
                client.note_standing(self.env.now);
                return Ok(Fetched::All);
            }
            left = left.saturating_sub(batch.taken);
            taken += batch.taken;
            self.env.counters.fetched_bytes += batch.raw.len() as u64;
            self.charge(id, batch.raw.len());
            if head {
                self.ingest(id, batch.first, batch.last, batch.raw)?;
                if self.turn_is_over() || shared && taken >= piece {
                    self.agent.active.insert(id);
                    self.turn.cut_short |= self.turn_is_over();
                    return Ok(Fetched::Some);
                }
            } else {
                self.forward(id, batch);
            }
            if left == 0 {
                return Ok(Fetched::All);
            }
        }
    }

    /// How much is fetched of a log at a time.
    fn batch_bytes(&self, shared: bool) -> usize {
        let limits = &self.env.config.limits;
        let most = if self.is_head() { limits.fetch_bytes } else { limits.forward_bytes };
        if shared { most.min(limits.shared_bytes) } else { most }
    }

    /// Entries travel to the head.
    fn forward(&mut self, client: ClientId, batch: Batch) {
        let Batch { raw, first, last, .. } = batch;
        let raw = Raw::Checked(raw);
        self.to_head(Message::Entries { client, first, last, raw });
    }

    /// Has what is in a log fetched by somebody else, if it is much.
    fn fetch_apart(&mut self, id: ClientId, most: usize) -> Result<bool, Failure> {
        let limits = &self.env.config.limits;
        // Where others wait as well there is other work for who would have to hear of the end.
        let inline = limits.inline(most < self.batch_bytes(false));
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        if inline >= most || client.reading().is_some() || !client.holds_more_than(inline)? {
            return Ok(false);
        }
        self.env.pieces += 1;
        let piece = client.read_apart(self.env.pieces, most);
        self.env.out.push(Effect::Work(piece));
        Ok(true)
    }

    /// A piece of work has ended that is none of the ring's.
    pub(in crate::core) fn fetch_ended(&mut self, number: u64) -> Result<(), Failure> {
        let reads = |client: &&Client| client.reading().is_some_and(|piece| piece.id() == number);
        let Some(id) = self.agent.clients.values().find(reads).map(|client| client.id) else {
            // The log is gone, or was to be read again.
            return Ok(());
        };
        // What comes next is fetched while this is judged.
        self.take_read(id, !self.is_shared(id))?;
        self.persist_alone(id)?;
        self.agent.active.insert(id);
        if self.agent.clients.get(&id).is_some_and(|client| client.gone || client.expelled) {
            return self.drain_gone(id);
        }
        Ok(())
    }

    /// Takes up what is being fetched of a log, now.
    fn settle_fetch(&mut self, id: ClientId) -> Result<(), Failure> {
        if let Some(piece) = self.agent.clients.get(&id).and_then(Client::reading).cloned() {
            piece.settle(&*self.env.media);
            self.take_read(id, false)?;
        }
        Ok(())
    }

    /// Gives the head what was fetched apart, in its place in the order: nothing else of this client was, meanwhile.
    fn take_read(&mut self, id: ClientId, goes_on: bool) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        let Some(batch) = client.take_read()? else { return Ok(()) };
        if batch.last.0 == 0 {
            client.note_standing(self.env.now);
            return Ok(());
        }
        self.env.counters.fetched_bytes += batch.raw.len() as u64;
        self.charge(id, batch.raw.len());
        match self.role() {
            Role::Head => {
                let blocked = self.part.head().is_none_or(Head::is_blocked);
                if blocked || !self.room_for_batch()? {
                    let Batch { raw, first, last, .. } = batch;
                    let raw = Raw::Checked(raw);
                    let (me, waits) =
                        (self.me(), Message::Entries { client: id, first, last, raw });
                    let Some(head) = self.part.head_mut() else { return Ok(()) };
                    head.stalled.push_back((me, waits));
                    return Ok(());
                }
                if goes_on {
                    self.fetch_apart(id, self.batch_bytes(false))?;
                }
                self.ingest(id, batch.first, batch.last, batch.raw)
            }
            Role::Member => {
                if goes_on {
                    self.fetch_apart(id, self.batch_bytes(false))?;
                }
                self.forward(id, batch);
                Ok(())
            }
            // Whatever was fetched and is not settled is fetched again.
            Role::Syncing | Role::Outside => Ok(()),
        }
    }

    /// Room for a batch, made by publishing if that helps.
    pub(in crate::core) fn room_for_batch(&mut self) -> Result<bool, Failure> {
        if !self.ring.has_room() {
            self.publish_all()?;
            self.give_up()?;
        }
        Ok(self.ring.has_room())
    }

    /// A chain of one on a disk: what fsync covers must be on the disk. The stream ring is; this
    /// also starts write-back of the log, so that nothing depends on the ring alone.
    pub(in crate::core) fn persist_alone(&mut self, id: ClientId) -> Result<(), Failure> {
        if self.view.chain.len() == 1
            && let Some(client) = self.agent.clients.get(&id)
        {
            client.persist()?;
        }
        Ok(())
    }
}
