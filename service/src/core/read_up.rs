//! What several clients have done to a file that they use beside each other (`ranges`) lies in their logs, and nobody takes their leases back
//! for an fsync: who syncs the file waits until the head has read each of these logs as far as it was when that was asked, and then until
//! every member has what was found there.
//!
//! The head asks the agents of those who share the file (`Message::ReadUp`); an agent reads the client's log, as before a lease goes back but that
//! none does, sends what it finds, and says so (`Message::HasRead`). Who gives its lease back meanwhile, or ends, has been read to the end as well.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos};
use storage::format::control::{LeaseMode, RECALL_TIMEOUT_MS};

use super::client::Unread;
use super::head::HeldGrant;
use super::lease::Want;
use super::message::Message;
use super::recall::{ARRIVAL, LOOK, STOPPED};
use super::requests::{S_IFMT, S_IFREG};
use super::{Failure, Node, Role};

/// At the head: a client waits until others' logs are read.
#[derive(Debug)]
pub(super) struct Awaited {
    client: ClientId,
    ino: InodeId,
    /// The agent's name for its request.
    token: u64,
    /// Whose are still to be read, and by what name that was asked.
    left: BTreeMap<ClientId, u64>,
}

impl Awaited {
    /// Whether that client waits.
    pub(super) fn is_for(&self, client: ClientId) -> bool {
        self.client == client
    }
}

/// At the agent: a log that is to be read as far as it was when that was asked.
#[derive(Debug)]
pub(super) struct Reading {
    client: ClientId,
    ino: InodeId,
    token: u64,
    pub(super) look_at: Nanos,
    /// Who was in the middle of an operation then; none: that was not looked at yet.
    inside: Option<Vec<(usize, u64)>>,
    give_up_at: Nanos,
    unread: Option<Unread>,
    /// Nobody is inside, and the newest entry is not whole, since then.
    unsound_since: Option<Nanos>,
}

impl Reading {
    /// Of that client.
    pub(super) fn is_of(&self, client: ClientId) -> bool {
        self.client == client
    }
}

impl Node {
    /// A client asks how far its state must reach that all is in it which was done to an inode.
    pub(super) fn reach_wanted(
        &mut self,
        client: ClientId,
        ino: InodeId,
        token: u64,
    ) -> Result<(), Failure> {
        let is_file = self.volume.attr(ino)?.is_some_and(|r| r.mode & S_IFMT == S_IFREG);
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let sharers = match is_file && !planted(Bug::SyncSharedAlone) {
            true => head.leases.sharers(client, ino),
            false => Vec::new(),
        };
        let mut left = BTreeMap::new();
        for sharer in sharers {
            left.insert(sharer, self.ask_to_read(sharer, ino));
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.awaited.push(Awaited { client, ino, token, left });
        self.have_been_read();
        self.release_grants();
        Ok(())
    }

    fn ask_to_read(&mut self, client: ClientId, ino: InodeId) -> u64 {
        let token = self.token();
        self.to_agent(client, Message::ReadUp { client, ino, token });
        token
    }

    /// What was asked of a client's agent may be lost: it is asked again.
    pub(super) fn ask_to_read_again(&mut self, client: ClientId) {
        let Some(head) = self.part.head_mut() else { return };
        // (What that client waits for itself its agent asks for anew.)
        head.awaited.retain(|awaited| awaited.client != client);
        let asked = head.awaited.iter().filter(|a| a.left.contains_key(&client));
        for ino in asked.map(|awaited| awaited.ino).collect::<Vec<_>>() {
            let token = self.ask_to_read(client, ino);
            let Some(head) = self.part.head_mut() else { return };
            let same = head.awaited.iter_mut().filter(|a| a.ino == ino);
            same.filter_map(|a| a.left.get_mut(&client)).for_each(|left| *left = token);
        }
    }

    /// An agent has read a client's log.
    pub(super) fn has_read(&mut self, client: ClientId, ino: InodeId, token: u64) {
        let Some(head) = self.part.head_mut() else { return };
        for awaited in head.awaited.iter_mut().filter(|awaited| awaited.ino == ino) {
            if awaited.left.get(&client).is_some_and(|asked| *asked <= token) {
                awaited.left.remove(&client);
            }
        }
        self.have_been_read();
        self.release_grants();
    }

    /// Whoever waits for nobody any more waits for the members.
    pub(super) fn have_been_read(&mut self) {
        let Some(head) = self.part.head_mut() else { return };
        if head.awaited.is_empty() {
            return;
        }
        for Awaited { ino, left, .. } in &mut head.awaited {
            let leases = &head.leases;
            left.retain(|sharer, _| leases.mode(*sharer, *ino) == LeaseMode::Joint);
        }
        let all = std::mem::take(&mut head.awaited);
        let (read, unread): (Vec<_>, Vec<_>) = all.into_iter().partition(|a| a.left.is_empty());
        head.awaited = unread;
        for Awaited { client, ino, token, .. } in read {
            let until = self.changed_by_others(ino, client);
            let want = Want::all(client, token, LeaseMode::None);
            let Some(head) = self.part.head_mut() else { return };
            head.held_grants.push(HeldGrant::reach(ino, want, until));
        }
    }

    /// The head wants a client's log read.
    pub(super) fn read_wanted(&mut self, client: ClientId, ino: InodeId, token: u64) {
        if !matches!(self.role(), Role::Head | Role::Member) {
            return;
        }
        let (inside, unread, unsound_since) = (None, None, None);
        let (look_at, give_up_at) = (self.env.now, 0);
        let reading =
            Reading { client, ino, token, look_at, inside, give_up_at, unread, unsound_since };
        self.agent.readings.push(reading);
    }

    /// Reads on; `true` when one was read.
    pub(super) fn step_readings(&mut self) -> Result<bool, Failure> {
        if self.agent.readings.is_empty() {
            return Ok(false);
        }
        let mut ended = false;
        let mut kept = Vec::new();
        for mut reading in std::mem::take(&mut self.agent.readings) {
            if reading.look_at > self.env.now || !self.step_reading(&mut reading)? {
                kept.push(reading);
            } else {
                ended = true;
            }
        }
        kept.append(&mut self.agent.readings);
        self.agent.readings = kept;
        Ok(ended)
    }

    fn step_reading(&mut self, reading: &mut Reading) -> Result<bool, Failure> {
        let (id, ino, token) = (reading.client, reading.ino, reading.token);
        let now = self.env.now;
        let said = Message::HasRead { client: id, ino, token };
        let Some(client) = self.agent.clients.get_mut(&id) else {
            // It has ended, which the head was told before.
            self.to_head(said);
            return Ok(true);
        };
        if client.is_being_expelled() {
            reading.look_at = now + LOOK;
            return Ok(false);
        }
        let inside = reading.inside.get_or_insert_with(|| client.inside());
        if reading.give_up_at == 0 {
            reading.give_up_at = now + RECALL_TIMEOUT_MS * 1_000_000;
        }
        inside.retain(|seen| client.still_inside(*seen));
        if !inside.is_empty() {
            reading.look_at = now + LOOK;
            if now >= reading.give_up_at {
                self.expel(id, STOPPED)?;
            }
            return Ok(false);
        }
        let unread = reading.unread.get_or_insert(client.unread());
        let emptied = self.drain(id)?;
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        let all_read = client.has_read(unread);
        let gap = client.has_gap()?;
        if !all_read && (!emptied || gap) {
            // (A number before those that are meant, which another thread has and has not used yet.)
            reading.look_at = now + LOOK;
            if gap && now >= reading.give_up_at {
                self.expel(id, STOPPED)?;
            }
            return Ok(false);
        }
        // The stores of a payload may arrive a little later than the word that says that its writer is out.
        let since = *reading.unsound_since.get_or_insert(now);
        let unsound = !all_read && (client.is_unsound() || client.claims_later()?);
        if unsound && !client.gone && now < since + ARRIVAL {
            reading.look_at = now + LOOK;
            return Ok(false);
        }
        self.to_head(said);
        Ok(true)
    }
}
