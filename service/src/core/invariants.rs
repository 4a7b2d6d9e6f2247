//! What is always true of a node between two events. The simulator asks after each step (where a history has no script, for all of it
//! after one in eight, and for what costs little after each); debug builds ask for what costs little by themselves.

use std::collections::BTreeSet;

use base::always;
use base::{ClientId, StreamSeq};

use super::head::Head;
use super::part::Part;
use super::reach::SERVICE;
use super::ring::Ring;
use super::view::View;
use super::{Node, NodeConfig};

impl Node {
    /// Those that cost little; else what is not so.
    pub fn cheap_invariants(&self) -> Result<(), String> {
        if self.failure.is_some() {
            // It does nothing any more, wherever it stopped.
            return Ok(());
        }
        let (role, has) = (self.role(), self.part.role());
        always!(role == has, "it is {role:?} in its view, and has what goes with {has:?}");
        let (ring, member) = (&self.ring, &self.member);
        let (published, applied, last) = (member.published, member.applied, ring.last());
        always!(published <= applied, "{published} is published, and {applied} applied");
        always!(member.all_acked <= last, "{} is acknowledged of {last}", member.all_acked);
        if member.incoming.is_none() {
            always!(applied <= last, "{applied} is applied, and the ring ends with {last}");
            let kept = ring.kept_to();
            always!(published <= kept, "{published} is published, and {kept} is in the ring");
            let acked = member.all_acked;
            always!(acked <= kept, "{acked} is acknowledged, and {kept} is in the ring");
            let oldest = ring.oldest();
            always!(
                oldest.0 <= published.0 + 1,
                "the ring begins with {oldest}, and {published} is published"
            );
        }
        let limits = &self.env.config.limits;
        let (stash, most) = (member.stash.len(), limits.stash);
        always!(stash <= most, "{stash} chunks wait that came early, of at most {most}");
        let early = member.stash.first_key_value().map(|(seq, _)| *seq);
        always!(early.is_none_or(|seq| seq > last), "chunk {early:?} waits, and is in the ring");
        if let Some(upto) = member.job.as_ref().map(|job| job.upto()) {
            let due = published <= upto && upto <= applied;
            always!(due, "{upto} is being published: {published} is, and {applied} is applied");
        }
        let twice = member.job.as_ref().is_some_and(|job| job.is_copied_twice());
        always!(!twice, "hostd copies, and so does a piece of work");
        always!(self.env.out.is_empty(), "effects are left that no event wanted");
        match &self.part {
            Part::Head(head) => head.cheap_invariants(&self.env.config),
            Part::Syncing(join) => {
                let both = join.behind.is_some() && member.incoming.is_some();
                always!(!both, "a snapshot comes and the rest of the stream as well");
                Ok(())
            }
            Part::Member | Part::Outside => Ok(()),
        }
    }

    /// All of them, of the node and of what it consists of.
    pub fn invariants(&self) -> Result<(), String> {
        self.cheap_invariants()?;
        if self.failure.is_some() {
            return Ok(());
        }
        self.ring.invariants().map_err(|e| format!("stream ring: {e}"))?;
        self.volume.invariants().map_err(|e| format!("volume: {e}"))?;
        self.member.recent.invariants(self.env.config.limits.recent_bytes)?;
        let last = self.ring.last();
        let beyond = self.member.dirty.iter().find(|(_, (seq, ..))| *seq > last);
        always!(beyond.is_none(), "{beyond:?} was changed by a chunk that is not there");
        self.agent_invariants()?;
        match self.part.head() {
            Some(head) => head.invariants(&self.view, &self.ring, self.member.all_acked),
            None => Ok(()),
        }
    }

    fn agent_invariants(&self) -> Result<(), String> {
        let agent = &self.agent;
        for client in agent.clients.values().filter(|_| !self.ring.is_behind()) {
            // (A head applies what is on its way to the ring.)
            let (applied, settled) = (client.applied, client.settled);
            always!(
                applied <= settled,
                "client {:#x}: applied {applied} of {settled} settled",
                client.id.0
            );
        }
        agent.clients.values().try_for_each(|client| client.invariants())?;
        let past = agent.past.iter().map(|past| past.row());
        agent.table.invariants(agent.clients.values().map(|client| client.row()).chain(past))?;
        let mut logs = BTreeSet::new();
        for client in agent.clients.values() {
            always!(logs.insert(client.segment), "log {} has two clients", client.segment);
            let next = agent.next_segment;
            always!(client.segment < next, "log {} is the next one's, too", client.segment);
        }
        for request in &agent.requests {
            let (id, slot) = request.place();
            let known = agent.clients.get(&id).is_some_and(|client| !client.gone);
            always!(known, "client {:#x} has ended, and slot {slot} of it asks", id.0);
            let same = agent.requests.iter().filter(|other| other.place() == (id, slot)).count();
            always!(same == 1, "slot {slot} of client {:#x} is asked {same} times", id.0);
        }
        Ok(())
    }
}

impl Head {
    fn cheap_invariants(&self, config: &NodeConfig) -> Result<(), String> {
        let low = config.memory.max(1) * u64::from(config.low);
        let due = self.unacked_bytes * 100 > low || !self.paused;
        always!(due, "it waits for members, and only {} bytes are under way", self.unacked_bytes);
        let others = |(client, _): (&ClientId, &_)| !self.known.contains_key(client);
        always!(!self.cuts.iter().any(others), "an operation is done in part, of nobody");
        Ok(())
    }

    fn invariants(&self, view: &View, ring: &Ring, all_acked: StreamSeq) -> Result<(), String> {
        self.leases.invariants().map_err(|e| format!("leases: {e}"))?;
        self.locks.invariants().map_err(|e| format!("locks: {e}"))?;
        let known = |client: &ClientId| *client == SERVICE || self.known.contains_key(client);
        let stranger = self.leases.clients().find(|client| !known(client));
        always!(stranger.is_none(), "a lease of {stranger:?}, whom the head does not know");
        let stranger = self.locks.clients().find(|client| !known(client));
        always!(stranger.is_none(), "a file lock of {stranger:?}, whom the head does not know");
        let stranger = self.recall_tokens.keys().map(|(client, _)| client).find(|c| !known(c));
        always!(stranger.is_none(), "a recall from {stranger:?}, whom the head does not know");
        for grant in &self.held_grants {
            let (client, ino, mode) = grant.what();
            always!(known(&client), "a lease is held for {client:?}, whom the head does not know");
            let has = self.leases.mode(client, ino);
            always!(has >= mode, "{ino} is to be granted to {client:?}, who has {has:?}");
        }
        let room: u64 = self.known.values().map(|known| known.room).sum();
        let reserved = self.reserved;
        always!(room == reserved, "clients have {room} blocks set aside, and {reserved} are");
        for (node, seq) in &self.acked {
            always!(*seq <= ring.last(), "node {node} has acknowledged {seq} of {}", ring.last());
        }
        for (node, at) in &self.catching_up {
            let right = at.acked <= at.sent && at.sent < ring.last();
            always!(right, "node {node} catches up: {at:?} of {}", ring.last());
            always!(
                !self.snapshots.contains_key(node),
                "node {node} catches up, and is sent a snapshot"
            );
        }
        for node in
            self.followers.iter().chain(self.snapshots.keys()).chain(self.catching_up.keys())
        {
            always!(view.syncing.contains(node), "node {node} is being joined, and does not join");
        }
        for seq in self.held() {
            let kept = seq >= ring.last() || ring.get(StreamSeq(seq.0 + 1)).is_some();
            always!(kept, "who joins is to go on from {seq}, and what comes then is not kept");
        }
        let under_way =
            (all_acked.0 + 1..=ring.last().0).filter_map(|seq| ring.get(StreamSeq(seq)));
        let bytes: u64 = under_way.map(|kept| u64::from(kept.header.body_bytes)).sum();
        let counted = self.unacked_bytes;
        always!(counted <= bytes, "{counted} bytes count as under way, of {bytes}");
        Ok(())
    }
}
