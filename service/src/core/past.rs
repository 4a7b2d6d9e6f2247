//! Sessions that have ended while their processes live.
//!
//! An open file lives until its last close, whatever becomes of the session in which it was opened: its node may have lost
//! its place, in order or not, or the client may have been expelled. A process that goes on attaches anew when it needs
//! the service, perhaps hours later. Until then what it had open must stay there, for a file without a name would be gone.
//!
//! **The agent** keeps of such a session what it had open ([`Past`]): its row of the client table, without a log. hostd
//! watches the process; when that ends the row goes. A process that has attached anew says what it still has open
//! (`Keep`): that is pinned for the new session, and the rest is free.
//!
//! **The head** is told of every past session (`Kept`), and counts its pins like a client's. While a node is away nobody can
//! say what becomes of its processes: what they had open is kept for a grace time ([`NodeConfig::grace`]), and no longer if
//! the node does not come back. As soon as it asks to join it tells its past sessions, and they last as long as it stays.
//!
//! **A new head** does not know what the clients of lost nodes had open, those of its predecessor above all. Until all of
//! these nodes have told it, or the grace time is over, it frees no file without a name that may be older than itself. It
//! waits for those only that were lost since it has joined, if the head that let it in waited for nobody: else what was removed
//! within a minute of any restart would go on taking space.
//!
//! [`NodeConfig::grace`]: super::NodeConfig::grace

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos, NodeId, StreamSeq};
use storage::format::clients::{PIN_CLOSED, PIN_LOST, PIN_OPEN, PIN_READ, PIN_WRITE};
use storage::media::MediaError;

use super::client::Client;
use super::losses::Lost;
use super::message::Message;
use super::table::{Found, Row};
use super::view::View;
use super::{Effect, Failure, Node, Role};

/// What is kept of what a pin says: what its process was allowed, and what it is to be told.
const KEPT: u32 = PIN_READ | PIN_WRITE | PIN_LOST;
/// What [`NodeConfig::grace`](super::NodeConfig::grace) is in service: a service is started again, and a network mended,
/// within it; and nobody misses the space for so long.
pub const GRACE: Nanos = 60_000_000_000;

/// What is kept of a session.
#[derive(Debug)]
pub(super) struct Past {
    client: ClientId,
    /// Number and start time.
    process: (u32, u64),
    /// Its user.
    uid: u32,
    row: Row,
    /// What it has open.
    pins: BTreeMap<InodeId, Open>,
}

/// What a process has open since an earlier session.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Where it is written down; `None`: there was no room.
    slot: Option<u32>,
    /// The rights that it was given then (`PIN_READ`, `PIN_WRITE`), and `PIN_LOST`.
    what: u32,
}

/// What a process is told of what it still has open.
#[derive(Debug, Default)]
pub(super) struct StillOpen {
    /// Is pinned for it from now on.
    pub kept: Vec<InodeId>,
    /// Of that: what others have lost something of.
    pub lost: Vec<InodeId>,
}

/// What the processes of some past session have open, as the head knows it.
#[derive(Debug)]
struct Kept {
    pins: BTreeSet<InodeId>,
    /// `Nanos::MAX`: as long as its node stays.
    until: Nanos,
}

/// What the head keeps of past sessions, everybody's.
#[derive(Debug)]
pub(super) struct Keeping {
    kept: BTreeMap<ClientId, Kept>,
    /// Nodes that are to say what is open there.
    unheard: BTreeSet<NodeId>,
    /// They are waited for until then.
    unheard_until: Nanos,
    /// Inodes from this number on were made under this head.
    first_number: u64,
    /// When nobody is waited for any more, all that has no name is to be looked at.
    sweep: bool,
}

impl Keeping {
    /// Of a node that becomes head, and knows only what those in the chain tell.
    pub(super) fn of_new_head(view: &View, until: Nanos) -> Self {
        let unheard = view.seen.iter().copied().filter(|n| !view.chain.contains(n)).collect();
        let kept = BTreeMap::new();
        Self { kept, unheard, unheard_until: until, first_number: u64::MAX, sweep: true }
    }

    /// What it was told as head of an epoch before, it knows.
    pub(super) fn inherit(&mut self, before: &mut Self) {
        self.kept = std::mem::take(&mut before.kept);
    }

    /// Numbers handed out from here on are this head's.
    pub(super) const fn note_first_number(&mut self, number: u64) {
        self.first_number = number;
    }

    /// A view has come: who is away is waited for until then, who is back tells by itself what is open.
    pub(super) fn review(&mut self, view: &View, until: Nanos) {
        for (client, kept) in &mut self.kept {
            if view.has(client.node()) {
                kept.until = Nanos::MAX;
            } else if kept.until == Nanos::MAX {
                kept.until = until;
            }
        }
    }

    /// Whether somebody may come back of whose open files nothing is known here.
    fn awaits_lost(&self, view: &View, now: Nanos) -> bool {
        !planted(Bug::TakeOverFrees)
            && now < self.unheard_until
            && (!self.unheard.is_empty() || now < view.strangers_until)
    }

    /// Whether an inode may be open in a session that is no more.
    pub(super) fn has(&self, ino: InodeId, view: &View, now: Nanos) -> bool {
        let open = |kept: &Kept| now < kept.until && kept.pins.contains(&ino);
        self.kept.values().any(open) || ino.0 < self.first_number && self.awaits_lost(view, now)
    }

    /// Whether somebody who is away, or joins beside that node, may have files open of which the next head does not
    /// hear by itself.
    pub(super) fn waits_for_others_than(&self, joining: NodeId, view: &View, now: Nanos) -> bool {
        let known = |node: NodeId| view.chain.contains(&node) || node == joining;
        let away = self.kept.keys().any(|client| !known(client.node()));
        away || self.awaits_lost(view, now) || view.syncing.iter().any(|node| !known(*node))
    }

    /// A node has told what is open there.
    pub(super) fn heard_of(&mut self, node: NodeId) {
        self.unheard.remove(&node);
    }

    /// Past sessions of which a member did not speak are over: what they had open.
    pub(super) fn end_unnamed(&mut self, node: NodeId, named: &BTreeSet<ClientId>) -> Vec<InodeId> {
        let over = |c: &ClientId, _: &mut Kept| c.node() == node && !named.contains(c);
        let over = self.kept.extract_if(.., over);
        let pins = over.flat_map(|(_, kept)| kept.pins).collect();
        self.heard_of(node);
        pins
    }

    /// When something was kept for long enough.
    pub(super) fn deadline(&self, view: &View) -> Option<Nanos> {
        let kept = self.kept.values().map(|kept| kept.until).filter(|at| *at < Nanos::MAX);
        let strangers = self.unheard.is_empty().then_some(view.strangers_until);
        let awaited = strangers.unwrap_or(Nanos::MAX).min(self.unheard_until);
        kept.chain(self.sweep.then_some(awaited)).min()
    }
}

impl Past {
    /// Of a row whose log counts no more.
    pub(super) fn of_row(found: Found) -> Self {
        let Found { row, record, pins, .. } = found;
        let open = pins.into_iter().filter(|(_, _, what)| what & PIN_CLOSED == 0);
        Self {
            client: record.client,
            process: (record.pid, record.start_time),
            uid: record.uid,
            row,
            pins: open
                .map(|(slot, ino, what)| (ino, Open { slot: Some(slot), what: what & KEPT }))
                .collect(),
        }
    }

    fn of_client(client: Client) -> Self {
        let open = client.open_with_bits();
        let pins = open.map(|(ino, slot, what)| (ino, Open { slot, what: what & KEPT })).collect();
        let (id, process) = (client.id, (client.pid, client.start_time));
        let uid = client.identity.uid;
        Self { client: id, process, uid, row: client.into_row(), pins }
    }

    /// Its row in the client table.
    pub(super) const fn row(&self) -> &Row {
        &self.row
    }

    /// Notes of what it has open others have lost something.
    pub(super) fn mark_lost(&mut self, lost: &Lost) -> Result<(), MediaError> {
        let process = self.process;
        for (ino, open) in self.pins.iter_mut().filter(|(ino, _)| lost.beside(process, **ino)) {
            open.what |= PIN_LOST;
            if let Some(slot) = open.slot {
                self.row.put_pin(slot, *ino, PIN_OPEN | open.what)?;
            }
        }
        Ok(())
    }

    fn report(&self) -> Message {
        Message::Kept { client: self.client, inodes: self.pins.keys().copied().collect() }
    }
}

impl Node {
    // --- agent ---

    /// Processes that hostd is to watch although they have no session: client, number and start time.
    pub fn past_clients(&self) -> impl Iterator<Item = (ClientId, u32, u64)> + '_ {
        self.agent.past.iter().map(|p| (p.client, p.process.0, p.process.1))
    }

    /// Whether that was a client of this node.
    pub(super) fn is_past(&self, client: ClientId) -> bool {
        self.agent.past.iter().any(|p| p.client == client)
    }

    /// Remembers a session of an earlier run.
    pub(super) fn take_past(&mut self, found: Found) {
        self.agent.next_segment =
            self.agent.next_segment.max(found.record.segment.saturating_add(1));
        self.agent.past.push(Past::of_row(found));
    }

    /// A session is over, its log counts no more, and its process lives.
    pub(super) fn retire(&mut self, id: ClientId) -> Result<(), Failure> {
        let ended =
            self.agent.clients.get(&id).is_none_or(|c| c.gone || planted(Bug::PastForgotten));
        if ended {
            return self.remove_client(id);
        }
        let Some(mut client) = self.agent.clients.remove(&id) else { return Ok(()) };
        self.remember_unreplicated(&client);
        client.collect_closed()?;
        client.close();
        // The row is sealed: without its log it is one of these at the next start.
        self.leave_log(client.log_file())?;
        self.agent.active.remove(&id);
        self.agent.requests.retain(|r| r.client != id);
        let past = Past::of_client(client);
        self.env.out.push(Effect::Watch {
            client: id,
            pid: past.process.0,
            start_time: past.process.1,
        });
        self.agent.past.push(past);
        self.thin_past()
    }

    /// Of too many past sessions the oldest goes: of the user who has too many, else of who has most.
    fn thin_past(&mut self) -> Result<(), Failure> {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for past in &self.agent.past {
            *counts.entry(past.uid).or_default() += 1;
        }
        let Some((uid, most)) = counts.into_iter().max_by_key(|(_, count)| *count) else {
            return Ok(());
        };
        let (all, own) = (self.env.config.clients_max, self.env.config.clients_per_user);
        let alone = uid != 0 && most > own as usize;
        if self.agent.past.len() <= all as usize && !alone {
            return Ok(());
        }
        let Some(oldest) = self.agent.past.iter().position(|p| p.uid == uid) else {
            return Ok(());
        };
        let oldest = self.agent.past.remove(oldest);
        let pid = oldest.process.0;
        log::warn!("too many sessions of user {uid} have ended: what pid {pid} had open may go");
        self.drop_past(oldest)
    }

    fn drop_past(&mut self, past: Past) -> Result<(), Failure> {
        self.env.out.push(Effect::Detached(past.client));
        if matches!(self.role(), Role::Head | Role::Member | Role::Syncing) {
            self.to_head(Message::Kept { client: past.client, inodes: Vec::new() });
        }
        Ok(self.agent.table.remove(past.row)?)
    }

    /// The process of a past session has ended.
    pub(super) fn past_gone(&mut self, client: ClientId) -> Result<(), Failure> {
        let gone = self.agent.past.extract_if(.., |p| p.client == client).collect::<Vec<_>>();
        gone.into_iter().try_for_each(|past| self.drop_past(past))
    }

    /// What processes here have open of past sessions, for a head that does not know; and that these sessions are over:
    /// one that knew them gives back what else they held, their locks above all, for which the processes ask again.
    pub(super) fn past_reports(&self) -> Vec<Message> {
        let over = |past: &Past| Message::ClientGone { client: past.client };
        let ends = |past| (!planted(Bug::EndUnheard)).then(|| over(past));
        let all = self.agent.past.iter();
        all.flat_map(|past| std::iter::once(past.report()).chain(ends(past))).collect()
    }

    /// What the client still has open of what its process had open in earlier sessions is pinned for it from now on;
    /// with `last` the rest is free, unless this tells it of losses: then it says so once more, for this answer may not reach it.
    /// `None`: an earlier session is not over yet.
    pub(super) fn keep_open(
        &mut self,
        id: ClientId,
        (before, inodes, last): (&[ClientId], &[InodeId], bool),
    ) -> Result<Option<StillOpen>, Failure> {
        let process = |c: &Client| (c.pid, c.start_time);
        let Some(own) = self.agent.clients.get(&id).map(process) else {
            return Ok(Some(StillOpen::default()));
        };
        let ends = |other: &ClientId| {
            let client = self.agent.clients.get(other).filter(|c| c.id != id && process(c) == own);
            client.is_some_and(|c| c.expelled && !c.gone)
        };
        if before.iter().any(ends) {
            self.member.publish_now = true;
            return Ok(None);
        }
        // Whose they were is not the client's to say.
        let earlier = |p: &Past| p.process == own && before.contains(&p.client);
        let asked: BTreeSet<InodeId> = inodes.iter().copied().collect();
        let past = self.agent.past.iter().filter(|p| earlier(p));
        let mut all: BTreeMap<InodeId, u32> = BTreeMap::new();
        for (ino, open) in past.flat_map(|p| &p.pins).filter(|(ino, _)| asked.contains(ino)) {
            *all.entry(*ino).or_default() |= open.what;
        }
        let kept: Vec<InodeId> = all.keys().copied().collect();
        let lost: Vec<_> = all.extract_if(.., |_, what| *what & PIN_LOST != 0).collect();
        all.extend(lost.iter().map(|(ino, what)| (*ino, what & !PIN_LOST)));
        let lost: Vec<InodeId> = lost.into_iter().map(|(ino, _)| ino).collect();
        if planted(Bug::RightsOfPastLost) {
            all.values_mut().for_each(|rights| *rights = 0);
        }
        if let Some(client) = self.agent.clients.get_mut(&id) {
            all.iter().try_for_each(|(ino, rights)| client.pin(*ino, *rights))?;
        }
        if !kept.is_empty() {
            let writes = all.iter().filter(|(_, rights)| **rights & PIN_WRITE != 0);
            let rights = writes.map(|(ino, _)| *ino).collect();
            self.to_head(Message::Pinned { client: id, inodes: kept.clone(), rights });
        }
        if last && lost.is_empty() {
            let over = self.agent.past.extract_if(.., |p| earlier(p)).collect::<Vec<_>>();
            over.into_iter().try_for_each(|past| self.drop_past(past))?;
        }
        Ok(Some(StillOpen { kept, lost }))
    }

    /// A view has come: who is lost from here on is known.
    pub(super) fn note_absent(&mut self, skipped: bool) {
        let first = self.view.seen.is_empty() && !self.view.chain.is_empty();
        if first || skipped {
            // Somebody may have come and gone meanwhile.
            // A volume that nobody has changed has no open files.
            let new = self.role() != Role::Syncing && self.ring.last() == StreamSeq(0);
            let until = self.env.now + self.env.config.grace;
            self.view.strangers_until = if new { 0 } else { until };
        }
        let View { chain, syncing, seen, .. } = &mut self.view;
        seen.extend(chain.iter().chain(&*syncing));
    }

    /// The head, whose state this node has taken, waits for nobody: from here on this node sees who is lost.
    pub(super) const fn know_all_lost(&mut self) {
        self.view.strangers_until = 0;
    }

    // --- head ---

    /// An agent says what a past session of its node has open.
    pub(super) fn kept_arrived(
        &mut self,
        client: ClientId,
        inodes: Vec<InodeId>,
    ) -> Result<(), Failure> {
        let until = self.kept_until(client.node());
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.reported.entry(client.node()).or_default().insert(client);
        let pins: BTreeSet<InodeId> = inodes.into_iter().collect();
        let before = head.keeping.kept.remove(&client);
        head.let_go.extend(before.iter().flat_map(|kept| kept.pins.difference(&pins)));
        if !pins.is_empty() {
            head.keeping.kept.insert(client, Kept { pins, until });
        }
        self.reap_let_go()
    }

    /// A client has open what an earlier session of its process had.
    pub(super) fn pinned(&mut self, client: ClientId, inodes: Vec<InodeId>, rights: Vec<InodeId>) {
        let Some(head) = self.part.head_mut() else { return };
        if let Some(known) = head.known.get_mut(&client) {
            known.pins.extend(inodes);
            known.rights.extend(rights);
        }
    }

    fn kept_until(&self, node: NodeId) -> Nanos {
        if self.view.has(node) { Nanos::MAX } else { self.env.now + self.env.config.grace }
    }

    /// A client is forgotten because its node was lost: its process may live, and come back.
    pub(super) fn keep_lost(&mut self, client: ClientId, pins: &BTreeSet<InodeId>) {
        let lost = !self.view.chain.contains(&client.node());
        if !lost || pins.is_empty() || planted(Bug::PinsOfLostFreed) {
            return;
        }
        let until = self.kept_until(client.node());
        if let Some(head) = self.part.head_mut() {
            head.keeping.kept.insert(client, Kept { pins: pins.clone(), until });
        }
    }

    /// What was kept for long enough.
    pub(super) fn forget_kept(&mut self) -> Result<(), Failure> {
        let (now, view) = (self.env.now, &self.view);
        let Some(head) = self.part.head_mut().filter(|head| head.ready) else { return Ok(()) };
        let over = head.keeping.kept.extract_if(.., |_, kept| kept.until <= now);
        head.let_go.extend(over.flat_map(|(_, kept)| kept.pins));
        if head.keeping.sweep && !head.keeping.awaits_lost(view, now) {
            head.keeping.sweep = false;
            head.let_go.extend(self.volume.orphans()?);
        }
        self.reap_let_go()
    }
}
