//! The head: judges entries, orders them into the stream, grants leases and inode numbers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos, NodeId, Sequence, StreamSeq};
use storage::format::chunk::ChunkHeader;
use storage::format::control::LeaseMode;
use storage::format::entry::{Header, Op, entry_bytes};
use storage::format::rpc::{WANT_PIN, WANT_READ, WANT_WRITE};
use storage::limits::{CHUNK_BYTES_MAX, LEASE_SLOTS};
use storage::permission::{R, W};
use storage::volume::Refusal;

use super::coalesce::Notes;
use super::frame::Checked;
use super::lease::{Action, LeaseTable, Want};
use super::message::{Message, Raw};
use super::parts::Step;
use super::reach::SERVICE;
use super::stream::send_chunk;
use super::validate::{Known, judge};
use super::{Effect, Failure, Node, entries};

/// No inode numbers from here on: far more than a volume can ever use.
pub(super) const NUMBERS_END: u64 = 1 << 62;
/// Clients' clocks may be so much ahead of the head's.
const AHEAD_MAX: u64 = 10_000_000_000;
/// Room in a chunk for the service's own Reap entries.
const REAP_SLACK: usize = 64 * 1024;

/// A lease that is free, but whose inode's latest changes are not everywhere yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldGrant {
    ino: InodeId,
    want: Want,
    /// The stream position that must be on every member.
    until: StreamSeq,
    /// Somebody else wants it already: it is recalled as soon as it is granted. A recall that
    /// overtook its grant would find nothing, and the grant would then stand against the table.
    recall: bool,
}

/// What a node has as head, and nobody else: begun by a takeover, given up with the view that ends it.
#[derive(Debug)]
pub(super) struct Head {
    /// How far the stream of each member reaches, as it said.
    pub positions: BTreeMap<NodeId, StreamSeq>,
    /// What members asked of a head that was not ready; they ask but once.
    pub unready: VecDeque<(NodeId, Message)>,
    /// Whose questions found no room in that.
    pub missed: BTreeSet<NodeId>,
    /// Clients of which each member's report under way has spoken.
    pub reported: BTreeMap<NodeId, BTreeSet<ClientId>>,
    /// The clients of all members.
    pub known: BTreeMap<ClientId, Known>,
    /// Clients of nodes that left the chain, and when their leases have lapsed for certain.
    pub lingering: BTreeMap<ClientId, Nanos>,

    /// What has to be put into the stream, and found no room.
    pub stalled: VecDeque<(NodeId, Message)>,
    /// What is stalled waits until the state up to there is published.
    pub awaits: Option<StreamSeq>,
    /// Operations of clients that are done in part.
    pub cuts: BTreeMap<ClientId, super::parts::Cut>,
    /// What clients have open no more and did not say, and what is freed in parts: looked at when the ring has room.
    pub let_go: Vec<InodeId>,

    pub leases: LeaseTable,
    pub held_grants: Vec<HeldGrant>,
    /// Recalls under way, by what they take back.
    pub recall_tokens: BTreeMap<(ClientId, InodeId), u64>,
    /// It grants nothing before the leases of all lost nodes have lapsed.
    pub grants_from: Nanos,
    /// The next inode number to be handed out.
    pub next_inode: u64,
    /// Blocks set aside for clients, in all.
    pub reserved: u64,
    pub placing: super::reach::Placing,

    /// How far the others have acknowledged.
    pub acked: BTreeMap<NodeId, StreamSeq>,
    /// For how long some member has not acknowledged what it should have, and when that was looked at.
    pub acks_missing: Nanos,
    pub watched_at: Nanos,
    /// Bytes of chunks that not all have.
    pub unacked_bytes: u64,
    /// Nothing more is taken from clients.
    pub paused: bool,

    /// Nodes that join and have everything.
    pub followers: BTreeSet<NodeId>,
    /// Which process of a joining node asked for what it is sent.
    pub joining: BTreeMap<NodeId, u64>,
    pub snapshots: BTreeMap<NodeId, super::snapshot::Outgoing>,
    /// Followers that the coordinator was asked to let into the chain, and when last.
    pub promised: BTreeMap<NodeId, Nanos>,
    pub promoted_at: Nanos,
}

impl Head {
    /// Of a volume in which all numbers below that one may have been used.
    pub(super) fn new(next_inode: u64) -> Self {
        Self {
            positions: BTreeMap::new(),
            unready: VecDeque::new(),
            missed: BTreeSet::new(),
            reported: BTreeMap::new(),
            known: BTreeMap::new(),
            lingering: BTreeMap::new(),
            stalled: VecDeque::new(),
            awaits: None,
            cuts: BTreeMap::new(),
            let_go: Vec::new(),
            leases: LeaseTable::default(),
            held_grants: Vec::new(),
            recall_tokens: BTreeMap::new(),
            grants_from: 0,
            next_inode,
            reserved: 0,
            placing: super::reach::Placing::default(),
            acked: BTreeMap::new(),
            acks_missing: 0,
            watched_at: 0,
            unacked_bytes: 0,
            paused: false,
            followers: BTreeSet::new(),
            joining: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            promised: BTreeMap::new(),
            promoted_at: 0,
        }
    }
}

/// A chunk in the making.
struct Draft<'a> {
    entries: Entries<'a>,
    count: u32,
    source: (storage::media::Segment, u64),
    reserved: usize,
    seq: StreamSeq,
    /// How many entries were refused, the last of them, and why.
    refused: (u32, Sequence, u16),
    /// What its entries do to each other.
    notes: Notes,
}

/// The entries of a draft: those that came, as they lie there, as long as all of them are taken as they are; else a copy.
struct Entries<'a> {
    raw: &'a [u8],
    /// Where those that were taken begin, and how many bytes they are.
    taken: (usize, usize),
    copy: Option<Checked>,
}

impl<'a> Entries<'a> {
    /// None yet, of those.
    const fn of(raw: &'a [u8]) -> Self {
        Self { raw, taken: (0, 0), copy: None }
    }

    fn len(&self) -> usize {
        self.copy.as_ref().map_or(self.taken.1, Checked::len)
    }

    /// The entry that lies there is the next.
    fn push(&mut self, at: usize, len: usize) {
        let (begin, have) = self.taken;
        if self.copy.is_none() && (have == 0 || begin + have == at) {
            self.taken = (if have == 0 { at } else { begin }, have + len);
            return;
        }
        let bytes = &self.raw[at..at + len];
        self.copied(len).end().extend_from_slice(bytes);
    }

    /// An entry that was made here is the next.
    fn push_made(&mut self, bytes: &[u8]) {
        self.copied(bytes.len()).end().extend_from_slice(bytes);
    }

    fn copied(&mut self, more: usize) -> &mut Checked {
        let (begin, len) = self.taken;
        let taken = &self.raw[begin..begin + len];
        self.copy.get_or_insert_with(|| {
            let mut copy = Checked::none(0, len + more);
            copy.end().extend_from_slice(taken);
            copy
        })
    }

    /// Where they begin in what came, if they are all of it from there on.
    fn rest_of_all(&self) -> Option<usize> {
        let (begin, len) = self.taken;
        (self.copy.is_none() && len > 0 && begin + len == self.raw.len()).then_some(begin)
    }

    /// Them, in memory of their own.
    fn detach(mut self) -> Checked {
        self.copied(0);
        self.copy.unwrap_or_else(|| Checked::none(0, 0))
    }
}

/// What became of an entry.
enum Taken<'a> {
    /// It is in the draft, or refused.
    Up(Draft<'a>),
    /// A part of it is in the draft; the rest comes in further turns.
    Part(Draft<'a>),
    /// It waits until what was done before is published.
    Later(Draft<'a>),
}

/// What is left of a draft beside its entries.
struct Ended {
    count: u32,
    reserved: usize,
    seq: StreamSeq,
    refused: (u32, Sequence, u16),
    notes: Notes,
}

impl Draft<'_> {
    /// Bytes of the entries.
    fn len(&self) -> usize {
        self.entries.len()
    }

    /// Its entries apart, or where they begin in what came, all of which they are from there on.
    fn end(self) -> (Ended, Result<Checked, usize>) {
        let Self { entries, count, reserved, seq, refused, notes, .. } = self;
        let ended = Ended { count, reserved, seq, refused, notes };
        (ended, entries.rest_of_all().map_or_else(|| Ok(entries.detach()), Err))
    }

    /// Its entries, in memory of their own.
    fn end_apart(self) -> (Ended, Checked) {
        let Self { entries, count, reserved, seq, refused, notes, .. } = self;
        (Ended { count, reserved, seq, refused, notes }, entries.detach())
    }
}

impl Node {
    /// Messages that only a head takes.
    pub(super) fn head_message(
        &mut self,
        from: NodeId,
        message: Message,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.is_head() {
            self.counters.bad_messages += 1;
            return Ok(());
        }
        if let Some(client) = message.speaks_for()
            && client.node() != from
        {
            // An agent speaks for the clients of its own machine and for nobody else.
            self.counters.foreign += 1;
            if self.counters.foreign.is_power_of_two() {
                log::warn!("node {from} speaks for client {:#x} of another node", client.0);
            }
            return Ok(());
        }
        let asks = matches!(message, Message::LeaseWant { .. } | Message::NumbersWant { .. });
        if asks && !self.ready && from != self.me() {
            if self.head.unready.len() < self.config.limits.unready {
                self.head.unready.push_back((from, message));
            } else if !planted(Bug::MissedUntold) {
                self.head.missed.insert(from);
            }
            return Ok(());
        }
        let ordered = matches!(
            message,
            Message::Entries { .. }
                | Message::Recalled { .. }
                | Message::ClientGone { .. }
                | Message::Unpin { .. }
        ) || matches!(message, Message::Released { .. })
            && !planted(Bug::ReleaseOvertakes);
        let unready = !self.ready && !planted(Bug::UnreadyOrders);
        if ordered && (unready || !self.head.stalled.is_empty()) {
            // Before all members have said what they hold, the stream may go on beyond what is here:
            // nothing may be put into it.
            self.head.stalled.push_back((from, message));
            return Ok(());
        }
        match message {
            Message::ChunkAck { seq } => self.acked(from, seq, out),
            Message::ClientUp {
                client,
                incarnation,
                settled,
                identity,
                leases,
                pins,
                rights,
                room,
            } => {
                let rights = rights.into_iter().collect();
                let known = Known { identity, incarnation, rights, ..Known::default() };
                self.client_up(client, known, settled, &leases, &pins, out)?;
                self.open_room(client, room, settled)
            }
            Message::RoomBack { client, token, blocks } => {
                self.room_returned(client, token, blocks);
                Ok(())
            }
            Message::ClientGone { .. } | Message::Unpin { .. } if !self.ring.has_room() => {
                self.head.stalled.push_back((from, message));
                Ok(())
            }
            Message::ClientGone { client } => self.forget_client(client, out),
            Message::Entries { client, first, last, raw } => {
                if !self.ring.has_room() || self.head.paused {
                    let message = Message::Entries { client, first, last, raw };
                    self.head.stalled.push_back((from, message));
                    return Ok(());
                }
                let Some(known) = self.head.known.get(&client) else { return Ok(()) };
                if client.node() != self.config.node {
                    self.agent.waiting.note(client, self.now);
                }
                let (raw, wrong) = raw.check(known.incarnation);
                if let Some(e) = wrong {
                    // Only an agent of this cluster sends these, and it checked them.
                    log::warn!("entries of client {client:?}: {e}");
                    self.counters.bad_messages += 1;
                }
                self.ingest(client, first, last, raw, out)
            }
            Message::LeaseWant { client, ino, token, mode, flags } => {
                self.lease_wanted(client, ino, token, mode, flags, out)
            }
            Message::NumbersWant { client, token, count } => {
                self.numbers_wanted(client, token, count, out);
                Ok(())
            }
            Message::Recalled { client, ino, token } => {
                // The answer to a recall that a report of the client made void, or that crossed a
                // return of the lease, says nothing of what the client was granted since.
                let stale = self.head.recall_tokens.get(&(client, ino)) != Some(&token);
                if stale && !planted(Bug::StaleRecall) {
                    return Ok(());
                }
                self.head.recall_tokens.remove(&(client, ino));
                let mut actions = Vec::new();
                self.head.leases.released(client, ino, &mut actions);
                self.act(actions, out)
            }
            want @ Message::LockWant { .. } => self.lock_wanted(from, want, out),
            Message::LockHeld { client, first, locks } => {
                self.locks_reported(from, client, first, &locks, out);
                Ok(())
            }
            Message::Unpin { client, inodes } => self.unpinned(client, &inodes, out),
            Message::Kept { client, inodes } => self.kept_arrived(client, inodes, out),
            Message::Pinned { client, inodes, rights } => {
                self.pinned(client, inodes, rights);
                Ok(())
            }
            Message::Released { client, ino, token } => {
                let crossed = self.head.leases.token(client, ino) != Some(token);
                if crossed && !planted(Bug::ReleaseUnnamed) {
                    // It crossed a grant, which stands.
                    return Ok(());
                }
                let mut actions = Vec::new();
                self.head.recall_tokens.remove(&(client, ino));
                self.head.leases.released(client, ino, &mut actions);
                self.act(actions, out)
            }
            _ => {
                self.counters.bad_messages += 1;
                Ok(())
            }
        }
    }

    /// Messages put off because the ring was full.
    pub(super) fn retry_stalled(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        self.reap_let_go(out)?;
        // What held chunks back may be gone without a word (a snapshot for a node that is in the chain now).
        self.turn.cut_short = !self.head.let_go.is_empty() && self.ready && self.ring.has_room();
        if self.head.stalled.is_empty() || !self.ready || self.head.paused {
            return Ok(());
        }
        if let Some(upto) = self.head.awaits {
            if self.member.published < upto {
                self.member.publish_now = true;
                return Ok(());
            }
            self.head.awaits = None;
        }
        let sought = planted(Bug::RoomUnsought) || self.room_for_batch()?;
        if !sought || !self.ring.has_room() {
            return Ok(());
        }
        let mut waiting = std::mem::take(&mut self.head.stalled);
        while let Some((from, message)) = waiting.pop_front() {
            self.head_message(from, message, out)?;
            if !self.head.stalled.is_empty() {
                self.head.stalled.append(&mut waiting);
                break;
            }
        }
        Ok(())
    }

    pub(super) fn client_up(
        &mut self,
        client: ClientId,
        known: Known,
        settled: Sequence,
        leases: &[(InodeId, LeaseMode)],
        pins: &[InodeId],
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        self.head.reported.entry(client.node()).or_default().insert(client);
        let unknown = !self.head.known.contains_key(&client);
        let slot = self.head.known.entry(client).or_insert(known);
        let reported: BTreeSet<InodeId> = pins.iter().copied().collect();
        if planted(Bug::UnpinLost) {
            slot.pins.extend(reported);
        } else {
            // A pin that the agent does not name was taken back in a message that was lost with its link, or belongs
            // to a grant that was: that one is asked for again.
            self.head.let_go.extend(slot.pins.difference(&reported));
            slot.pins = reported;
        }
        // What the agent says is what its client holds: grants, recalls and returns that were under
        // way are void.
        let mut actions = Vec::new();
        self.head.cuts.remove(&client);
        self.head.recall_tokens.retain(|(c, _), _| *c != client);
        self.head.leases.replace(client, leases, &mut actions);
        self.head.held_grants.retain(|g| g.want.client != client);
        for (ino, mode) in leases {
            if ino.0 < NUMBERS_END {
                self.head.next_inode = self.head.next_inode.max(ino.0 + 1);
            }
            // A number that does not exist yet, leased for writing and pinned, is one of its fresh ones. What
            // it made and removed is pinned no more: a number is used once. A head that knew the
            // client knows better anyhow.
            if unknown
                && *mode == LeaseMode::Write
                && slot.pins.contains(ino)
                && matches!(self.volume.attr(*ino), Ok(None))
            {
                slot.fresh.insert(*ino);
            }
        }
        let seen = self.settled_of(client).max(settled);
        self.member.settled.insert(client, seen);
        self.tell_progress(client, seen, out);
        self.reap_let_go(out)?;
        self.act(actions, out)
    }

    /// Frees of what clients let go what nobody else has; a head that takes over looks at all there is.
    pub(super) fn reap_let_go(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.head.let_go.is_empty() || !self.ready || !self.ring.has_room() {
            return Ok(());
        }
        let inodes = std::mem::take(&mut self.head.let_go);
        self.reap_unpinned(inodes, out)
    }

    /// What members sent during a takeover says of more that all have it than was known when the clients
    /// were reported.
    pub(super) fn tell_all_progress(&mut self, out: &mut Vec<Effect>) {
        for client in self.head.known.keys().copied().collect::<Vec<_>>() {
            let settled = self.settled_of(client);
            self.tell_progress(client, settled, out);
        }
    }

    /// Says again how far a client is: the message that said it first may be lost, also when the head
    /// that sent it was another one and the client is of this node.
    fn tell_progress(&mut self, client: ClientId, settled: Sequence, out: &mut Vec<Effect>) {
        let unacked = (self.member.all_acked.0 + 1..=self.ring.last().0)
            .filter_map(|seq| self.ring.get(StreamSeq(seq)))
            .any(|kept| kept.header.client == client);
        let unacked = unacked && !planted(Bug::ProgressOverstated);
        let replicated = if unacked { Sequence(0) } else { settled };
        if client.node() == self.me() {
            let local =
                self.agent.clients.get_mut(&client).filter(|_| !planted(Bug::ProgressForgotten));
            local.into_iter().for_each(|local| local.set_replicated(replicated));
            return;
        }
        let message = Message::Progress { client, settled, replicated };
        self.to_agent(client, message, out);
    }

    /// A client ended: what it held is free, what only it had open is freed.
    pub(super) fn forget_client(
        &mut self,
        client: ClientId,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Some(known) = self.head.known.remove(&client) else { return Ok(()) };
        self.head.cuts.remove(&client);
        self.head.reserved -= known.room;
        self.keep_lost(client, &known.pins);
        let mut actions = Vec::new();
        self.head.recall_tokens.retain(|(c, _), _| *c != client);
        self.head.leases.gone(client, &mut actions);
        self.forget_locks(client, out);
        self.head.held_grants.retain(|g| g.want.client != client);
        self.reap_unpinned(known.pins.iter().copied().collect(), out)?;
        // An empty chunk with sequence 0: every member forgets how far it was.
        self.emit(ClientId(client.0), Sequence(0), 0, &[], out)?;
        self.act(actions, out)
    }

    fn unpinned(
        &mut self,
        client: ClientId,
        inodes: &[InodeId],
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Some(known) = self.head.known.get_mut(&client) else { return Ok(()) };
        let dropped: Vec<InodeId> =
            inodes.iter().copied().filter(|i| known.pins.remove(i)).collect();
        // With what is open go the rights that it gave.
        known.rights.retain(|ino| !dropped.contains(ino));
        self.reap_unpinned(dropped, out)
    }

    fn is_pinned(&self, ino: InodeId) -> bool {
        self.head.known.values().any(|k| k.pins.contains(&ino)) || self.is_kept(ino)
    }

    /// Frees those of the inodes that have neither a name nor anybody who has them open.
    pub(super) fn reap_unpinned(
        &mut self,
        inodes: Vec<InodeId>,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let (mut reaps, mut parts) = (Vec::new(), 0);
        for ino in inodes {
            let orphan = self.volume.attr(ino)?.is_some_and(|r| r.nlink == 0);
            if !orphan || self.is_pinned(ino) {
                continue;
            }
            match self.part_to_free(ino)? {
                None => reaps.push(ino),
                // One a turn: what is left is looked at again, and whether nobody has it open by then.
                Some(part) => {
                    if parts == 0 {
                        self.counters.parts += 1;
                        let time = self.realtime();
                        let raw = part.to_entry(Sequence(1), self.epoch, 0, time, 0);
                        let before = self.ring.last();
                        self.emit(ClientId(0), Sequence(1), 0, &raw, out)?;
                        if self.ring.last() == before {
                            // It did not fit: what is published gives room. If nothing is to be, it stays as it is, until
                            // somebody looks at all that has no name.
                            if self.member.applied == self.member.published
                                && self.member.job.is_none()
                            {
                                continue;
                            }
                            self.member.publish_now = true;
                        }
                    }
                    parts += 1;
                    self.head.let_go.push(ino);
                }
            }
        }
        for inodes in reaps.chunks(self.config.limits.reaps) {
            let mut raw = Vec::new();
            for ino in inodes {
                let time = self.realtime();
                raw.extend(Op::Reap { ino: *ino }.to_entry(Sequence(1), self.epoch, 0, time, 0));
            }
            self.emit(ClientId(0), Sequence(1), 0, &raw, out)?;
        }
        Ok(())
    }

    pub(super) fn realtime(&self) -> u64 {
        self.now.wrapping_add(self.realtime_offset)
    }

    /// Judges entries of a client and puts those that pass into the stream.
    pub(super) fn ingest(
        &mut self,
        client: ClientId,
        first: Sequence,
        last: Sequence,
        raw: Checked,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Some(known) = self.head.known.get(&client) else { return Ok(()) };
        let incarnation = known.incarnation;
        let done = self.settled_of(client);
        if last <= done && !planted(Bug::RetryTwice) {
            return Ok(());
        }
        if first.0 > done.0 + 1 {
            // What lies between was lost with a link or an epoch; the agent sends it again.
            self.counters.bad_messages += 1;
            return Ok(());
        }
        let body = raw.body();
        let (mut draft, mut begun) = (self.draft(body.len(), body)?, Sequence(0));
        // Where the rest begins that has to wait, and whether for a publication.
        let mut rest = None;
        for (offset, header, op) in raw.entries() {
            if header.sequence <= done && !planted(Bug::RetryTwice) {
                continue;
            }
            let len = entry_bytes(header.length as usize).min(body.len() - offset);
            if begun.0 > 0 && self.turn_is_over() {
                self.turn.cut_short = true;
                rest = Some((offset, false));
                break;
            }
            self.spend_entry(len);
            if draft.len() + len + REAP_SLACK / 2 > draft.reserved {
                self.close(draft, client, begun, incarnation, out)?;
                draft = self.draft(body.len() - offset, body)?;
            }
            let entry = (offset, len);
            draft = match self.one(draft, client, incarnation, &header, &op, entry, begun, out)? {
                Taken::Up(draft) => draft,
                Taken::Part(draft) => {
                    self.turn.cut_short = true;
                    rest = Some((offset, false));
                    begun = if begun.0 > 0 { begun } else { done };
                    draft
                }
                Taken::Later(draft) => {
                    rest = Some((offset, true));
                    begun = if begun.0 > 0 { begun } else { done };
                    draft
                }
            };
            if rest.is_some() {
                break;
            }
            begun = header.sequence;
        }
        let Some((offset, awaits)) = rest else {
            let (ended, own) = draft.end();
            let entries = own.unwrap_or_else(|begin| raw.from(begin));
            self.issue_settled(ended, entries, client, last, incarnation, out)?;
            self.give_room(client, out);
            return Ok(());
        };
        self.leave(draft, client, incarnation, begun, out)?;
        let first = Sequence(begun.0 + 1);
        if !planted(Bug::RestForgotten) {
            let raw = Raw::Checked(raw.from(offset));
            let rest = Message::Entries { client, first, last, raw };
            self.head.stalled.push_front((client.node(), rest));
        }
        self.give_room(client, out);
        if awaits {
            self.head.awaits = Some(self.member.applied);
            self.member.publish_now = true;
        }
        Ok(())
    }

    /// Ends a draft in the middle of what a client sent; the rest, from the entry after `begun` on, is taken up later.
    fn leave(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        incarnation: u32,
        begun: Sequence,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if begun.0 == 0 {
            // A part of the client's first operation: nothing of its own is settled by it, and a chunk that says so is its end.
            self.close(draft, ClientId(0), Sequence(1), incarnation, out)
        } else {
            self.close(draft, client, begun, incarnation, out)
        }
    }

    /// Judges and applies one entry.
    #[allow(clippy::too_many_arguments)]
    fn one<'a>(
        &mut self,
        mut draft: Draft<'a>,
        client: ClientId,
        incarnation: u32,
        header: &Header,
        op: &Op<'_>,
        (at, len): (usize, usize),
        before: Sequence,
        out: &mut Vec<Effect>,
    ) -> Result<Taken<'a>, Failure> {
        // What a client takes for now may be any number; what is too far ahead is brought back before it is anybody's ctime.
        let told = header.time;
        let header =
            &Header { time: told.min(self.realtime().saturating_add(AHEAD_MAX)), ..*header };
        if planted(Bug::RedeemedTwice) {
            self.redeem(client, header.promised);
        }
        let Some(known) = self.head.known.get(&client) else { return Ok(Taken::Up(draft)) };
        let judged = if header.epoch > self.epoch && !planted(Bug::FutureEpochAccepted) {
            Err(base::Errno::STALE)
        } else {
            judge(&self.volume, &self.head.leases, client, known, op)
        };
        if let Err(errno) = judged {
            self.redeem(client, header.promised);
            self.refuse(&mut draft, client, header, op, errno);
            return Ok(Taken::Up(draft));
        }
        let step = match self.part_of(client, header.sequence, op)? {
            Step::Refuse(errno) => {
                self.redeem(client, header.promised);
                self.refuse(&mut draft, client, header, op, errno);
                return Ok(Taken::Up(draft));
            }
            step => step,
        };
        let part = match &step {
            Step::Part(part, _) | Step::Last(part) => Some(part),
            _ => None,
        };
        let same = |part: &Op<'_>| {
            let Header { sequence, epoch, lane, time, promised, .. } = *header;
            // The next head counts what it was promised with the part that settles it.
            let promised = if matches!(step, Step::Part(..)) { 0 } else { promised };
            part.to_promised_entry(promised, sequence, epoch, lane, time, incarnation)
        };
        let (whole, op, cut_up) = (op, part.unwrap_or(op), part.is_some_and(|part| part != op));
        let other = (cut_up || header.time != told).then(|| same(op));
        let mut tries = 0;
        let applied = loop {
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            // Where the order is made, and nowhere else.
            self.volume.enforce_quotas(true);
            // What it was promised is its own. The account has it until the operation is judged: it may have to wait.
            let own = self.promised_to(client, header);
            self.volume.keep_free(self.kept_free().saturating_sub(own));
            let applied = self.volume.apply(header, op, source);
            self.volume.enforce_quotas(false);
            self.volume.keep_free(0);
            match applied {
                Ok(applied) => break applied,
                Err(Refusal::NeedsPublish) if self.may_wait(&draft) => {
                    // Copying what is to be published first takes as long as it takes: others have their turns meanwhile.
                    return Ok(Taken::Later(draft));
                }
                Err(Refusal::NeedsPublish)
                    if tries == 0 || (tries == 1 && self.volume.views_hold_pages()) =>
                {
                    if tries == 1 {
                        // Space goes before nodes that join; they ask again.
                        log::warn!(
                            "the tree is nearly full: snapshots for joining nodes begin anew"
                        );
                        self.head.snapshots.retain(|_, s| s.is_sent());
                    }
                    tries += 1;
                    // What is in the draft must be in the ring before its copies can run.
                    let (rest, raw) = (draft.reserved, draft.entries.raw);
                    self.close(draft, client, before, incarnation, out)?;
                    self.publish_working(self.member.applied)?;
                    draft = self.draft(rest, raw)?;
                }
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(refusal) => {
                    let errno = match refusal {
                        Refusal::NeedsPublish => base::Errno::NOSPC,
                        other => other.errno(),
                    };
                    self.head.cuts.remove(&client);
                    self.redeem(client, header.promised);
                    self.refuse(&mut draft, client, header, whole, errno);
                    if errno == base::Errno::NOSPC {
                        self.seek_room(out);
                    }
                    return Ok(Taken::Up(draft));
                }
            }
        };
        self.redeem(client, header.promised);
        draft.notes.add(op, draft.len());
        match other {
            Some(bytes) => draft.entries.push_made(&bytes),
            None => draft.entries.push(at, len),
        }
        draft.count += 1;
        self.mark_dirty(op, draft.seq, client);
        self.note_done(client, op)?;
        if matches!(op, Op::CloneRange { .. } | Op::Shift { .. })
            && !planted(Bug::CloneWhileJoining)
        {
            // Alone among the operations they use content that is there. Who joins would do them on
            // content that may be newer: their snapshots begin anew when they ask again.
            self.head.snapshots.retain(|_, s| s.is_sent());
        }
        if let Some(known) = self.head.known.get_mut(&client)
            && let Op::Create { ino, .. } | Op::Tmpfile { ino, .. } = op
        {
            known.fresh.remove(ino);
            known.pins.insert(*ino);
            // Who makes it may write to it, whatever becomes of it, until it has closed it.
            known.rights.insert(*ino);
        }
        if let Some(ino) = applied.orphaned {
            self.orphaned(&mut draft, client, incarnation, header, op, ino)?;
        }
        if let Step::Part(_, next) = step {
            self.counters.parts += 1;
            self.head.cuts.insert(client, next);
            return Ok(Taken::Part(draft));
        }
        self.head.cuts.remove(&client);
        Ok(Taken::Up(draft))
    }

    /// Whether there is something to publish, here or in the draft.
    fn may_wait(&self, draft: &Draft<'_>) -> bool {
        draft.count > 0 || self.member.job.is_some() || self.member.applied > self.member.published
    }

    /// An inode lost its last name: it goes at once unless somebody has it open.
    fn orphaned(
        &mut self,
        draft: &mut Draft<'_>,
        client: ClientId,
        incarnation: u32,
        header: &Header,
        op: &Op<'_>,
        ino: InodeId,
    ) -> Result<(), Failure> {
        let open = matches!(
            op,
            Op::Unlink { open: true, .. }
                | Op::Rmdir { open: true, .. }
                | Op::Rename { open: true, .. }
                | Op::Tmpfile { .. }
        );
        if let Some(known) = self.head.known.get_mut(&client) {
            if open {
                known.pins.insert(ino);
            } else {
                known.pins.remove(&ino);
                known.rights.remove(&ino);
            }
        }
        if self.is_pinned(ino) {
            return Ok(());
        }
        if self.part_to_free(ino)?.is_some() {
            // In parts, behind what is in the making.
            self.head.let_go.push(ino);
            self.turn.cut_short = true;
            return Ok(());
        }
        let reap = Op::Reap { ino };
        let bytes =
            reap.to_entry(header.sequence, self.epoch, header.lane, header.time, incarnation);
        match self.volume.apply(header, &reap, draft.source) {
            Ok(_) => {
                draft.notes.add(&reap, draft.len());
                draft.entries.push_made(&bytes);
                draft.count += 1;
                Ok(())
            }
            Err(Refusal::Fault(fault)) => Err(fault.into()),
            // It stays an orphan; the client's end or the next takeover frees it.
            Err(_) => Ok(()),
        }
    }

    pub(super) fn mark_dirty(&mut self, op: &Op<'_>, seq: StreamSeq, client: ClientId) {
        let mut mark = |ino: InodeId| {
            if ino != InodeId::NONE {
                self.member.dirty.insert(ino, (seq, client));
            }
        };
        match *op {
            Op::Pad => {}
            Op::Create { ino, parent, .. }
            | Op::Link { ino, parent, .. }
            | Op::Unlink { ino, parent, .. }
            | Op::Rmdir { ino, parent, .. } => {
                mark(ino);
                mark(parent);
            }
            // Its blocks are shared from now on, which who asks for it has to learn.
            Op::CloneRange { ino, source, .. } => {
                mark(ino);
                mark(source);
            }
            Op::Rename { ino, parent, new_parent, replaced, .. } => {
                [ino, parent, new_parent, replaced].into_iter().for_each(mark);
            }
            Op::Write { ino, .. }
            | Op::Truncate { ino, .. }
            | Op::Fallocate { ino, .. }
            | Op::SetAttr { ino, .. }
            | Op::SetXattr { ino, .. }
            | Op::RemoveXattr { ino, .. }
            | Op::Shift { ino, .. }
            | Op::Tmpfile { ino, .. }
            | Op::SetQuota { ino, .. }
            | Op::SetProject { ino, .. }
            | Op::Place { ino, .. }
            | Op::Move { ino, .. }
            | Op::Reap { ino } => mark(ino),
        }
    }

    fn refuse(
        &mut self,
        draft: &mut Draft<'_>,
        client: ClientId,
        header: &Header,
        op: &Op<'_>,
        errno: base::Errno,
    ) {
        self.counters.refused += 1;
        draft.refused =
            (draft.refused.0 + 1, header.sequence, super::cause(draft.refused.2, errno.0));
        let Some(known) = self.head.known.get_mut(&client) else { return };
        known.refusals += 1;
        let refusals = known.refusals;
        if refusals.is_power_of_two() {
            // A hostile client cannot fill the log with them.
            log::warn!(
                "client {:#x} (uid {}): operation {} refused with {errno:?} ({refusals} so far): {}",
                client.0,
                known.identity.uid,
                header.sequence,
                summary(op)
            );
        }
    }

    /// Begins a chunk that may become that long, of some of the entries of `raw`.
    fn draft<'a>(&mut self, want: usize, raw: &'a [u8]) -> Result<Draft<'a>, Failure> {
        let reserved = (want + REAP_SLACK).min(CHUNK_BYTES_MAX);
        self.make_room(reserved)?;
        let seq = StreamSeq(self.ring.last().0 + 1);
        match self.ring.next_body(reserved) {
            Some(source) => {
                let (entries, (refused, notes)) = (Entries::of(raw), Default::default());
                Ok(Draft { entries, count: 0, source, reserved, seq, refused, notes })
            }
            // Members lag by a whole ring: only waiting for them, or for their end, helps; the
            // callers check `has_room` before they come here.
            None => Err(Failure::Diverged(seq, "the stream ring is full".into())),
        }
    }

    /// Ends a draft: into the ring, down the chain. `settled` is what it settles.
    fn close(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        settled: Sequence,
        incarnation: u32,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let (ended, entries) = draft.end_apart();
        self.issue_settled(ended, entries, client, settled, incarnation, out)
    }

    /// The same of a draft that has ended.
    fn issue_settled(
        &mut self,
        mut ended: Ended,
        mut entries: Checked,
        client: ClientId,
        settled: Sequence,
        incarnation: u32,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if ended.count == 0 && settled <= self.settled_of(client) {
            return Ok(());
        }
        if self.config.limits.coalesce {
            self.coalesce(&mut ended, &mut entries, incarnation);
        }
        let header = ChunkHeader {
            epoch: self.epoch,
            stream_seq: ended.seq,
            client,
            last_seq: settled,
            incarnation,
            entries: ended.count,
            body_bytes: entries.len() as u32,
            time: self.realtime(),
            refusals: ended.refused.0,
            refused: ended.refused.1,
            errno: ended.refused.2,
        };
        self.issue(header, entries, ended.reserved, out)
    }

    /// Takes out of a chunk what its end does not show.
    fn coalesce(&mut self, ended: &mut Ended, entries: &mut Checked, incarnation: u32) {
        for at in ended.notes.dead() {
            self.counters.coalesced += 1;
            self.counters.coalesced_bytes += entries.pad_over(at, incarnation) as u64;
            if planted(Bug::CoalescedUncounted) {
                ended.refused.0 += 1;
            }
        }
    }

    /// Emits a chunk of the service's own, already judged; applies it here.
    pub(super) fn emit(
        &mut self,
        client: ClientId,
        last: Sequence,
        incarnation: u32,
        raw: &[u8],
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let mut draft = self.draft(raw.len(), raw)?;
        for entry in entries(raw, incarnation).flatten() {
            let (offset, header, op) = entry;
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            match self.volume.apply(&header, &op, source) {
                Ok(_) => {
                    let len = entry_bytes(header.length as usize).min(raw.len() - offset);
                    draft.entries.push(offset, len);
                    draft.count += 1;
                }
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(_) => {}
            }
        }
        if draft.count == 0 && last.0 != 0 {
            return Ok(());
        }
        self.issue_own(draft, client, last, incarnation, self.realtime(), out)
    }

    /// Emits operations of the service's own, one after the other, as long as they can be done and the turn is not over;
    /// how many.
    pub(super) fn emit_some(
        &mut self,
        ops: Vec<Op<'static>>,
        out: &mut Vec<Effect>,
    ) -> Result<usize, Failure> {
        let (time, mut done) = (self.realtime(), 0);
        let most = ops.len() * (entry_bytes(0) + entry_bytes(1));
        let mut draft = self.draft(most, &[])?;
        self.volume.keep_free(self.kept_free());
        for op in &ops {
            if done > 0 && (self.turn_is_over() || draft.len() + REAP_SLACK / 2 > draft.reserved) {
                break;
            }
            let bytes = op.to_entry(Sequence(1), self.epoch, 0, time, 0);
            let Ok((header, _)) = storage::format::entry::decode(&bytes, 0) else { break };
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            match self.volume.apply(&header, op, source) {
                Ok(_) => {}
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(Refusal::NeedsPublish) => {
                    self.member.publish_now = true;
                    break;
                }
                Err(_) => break,
            }
            draft.entries.push_made(&bytes);
            draft.count += 1;
            self.mark_dirty(op, draft.seq, ClientId(0));
            self.spend_entry(bytes.len());
            done += 1;
        }
        self.volume.keep_free(0);
        if done == 0 {
            return Ok(0);
        }
        self.issue_own(draft, ClientId(0), Sequence(1), 0, time, out)?;
        Ok(done)
    }

    /// Ends a draft of the service's own.
    fn issue_own(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        last_seq: Sequence,
        incarnation: u32,
        time: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let (ended, checked) = draft.end_apart();
        let header = ChunkHeader {
            epoch: self.epoch,
            stream_seq: ended.seq,
            client,
            last_seq,
            incarnation,
            entries: ended.count,
            body_bytes: checked.len() as u32,
            time,
            ..ChunkHeader::default()
        };
        self.issue(header, checked, ended.reserved, out)
    }

    fn issue(
        &mut self,
        header: ChunkHeader,
        checked: Checked,
        reserved: usize,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.ring.put(header, checked.body(), reserved)? {
            return Err(Failure::Diverged(header.stream_seq, "the stream ring is full".into()));
        }
        let next = self.chain.get(1).copied();
        let all = self.head.followers.iter().copied().chain(next).collect::<Vec<_>>();
        if !all.is_empty() {
            let body = checked.into_chunk(&header, self.epoch, self.member.all_acked);
            all.into_iter().for_each(|node| send_chunk(node, body.clone(), out));
        }
        self.head.unacked_bytes += u64::from(header.body_bytes);
        self.note_chunk(&header)?;
        self.applied_chunk(&header);
        self.advance_acks(out)
    }

    fn acked(
        &mut self,
        from: NodeId,
        seq: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if seq > self.ring.last() {
            self.counters.bad_messages += 1;
            return Ok(());
        }
        let acked = self.head.acked.entry(from).or_default();
        *acked = (*acked).max(seq);
        self.advance_acks(out)
    }

    /// Works out what every member holds, and tells those who wait for it.
    pub(super) fn advance_acks(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let mut all = self.ring.last();
        if self.too_few() && !planted(Bug::MinReplicasIgnored) {
            // However many of them have it: it is not what the volume promises.
            all = self.member.all_acked;
        }
        for node in self.chain.iter().chain(&self.head.followers) {
            if *node != self.me() && !planted(Bug::EarlyAck) {
                all = all.min(self.acked_by(*node));
            }
        }
        if all > self.member.all_acked {
            let from = self.member.all_acked;
            self.member.all_acked = all;
            self.head.acks_missing = 0;
            for seq in from.0 + 1..=all.0 {
                let Some(header) = self.ring.get(StreamSeq(seq)).map(|k| k.header) else {
                    continue;
                };
                self.head.unacked_bytes =
                    self.head.unacked_bytes.saturating_sub(u64::from(header.body_bytes));
                self.replicated(header.client, header.last_seq, out);
            }
            self.give_up()?;
        }
        if self.member.all_acked == self.ring.last() {
            self.head.unacked_bytes = 0;
        }
        self.flow();
        self.promote_followers(out);
        self.release_grants(out);
        Ok(())
    }

    /// The coordinator says how many members must hold what is acknowledged.
    pub(super) fn needs(&mut self, members: usize, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let members = members.max(1);
        if members == self.least {
            return Ok(());
        }
        self.least = members;
        if self.is_head() && self.ready { self.advance_acks(out) } else { Ok(()) }
    }

    /// The chain, and those who have everything and are about to enter it, are fewer than must hold what is acknowledged.
    pub(super) fn too_few(&self) -> bool {
        self.chain.len() + self.head.followers.len() < self.least
    }

    /// Flow control (LineFS section 4): above the high watermark of what members have not
    /// acknowledged nothing more is taken from clients, until it is below the low one.
    fn flow(&mut self) {
        let memory = self.config.memory.max(1);
        if self.head.unacked_bytes * 100 > memory * u64::from(self.config.high) {
            self.head.paused = true;
        } else if self.head.unacked_bytes * 100 <= memory * u64::from(self.config.low) {
            self.head.paused = false;
        }
    }

    fn replicated(&mut self, client: ClientId, seq: Sequence, out: &mut Vec<Effect>) {
        if seq.0 == 0 || client.0 == 0 {
            return;
        }
        if let Some(local) = self.agent.clients.get_mut(&client) {
            local.set_replicated(seq);
        } else if self.head.known.contains_key(&client) {
            let message = Message::Progress { client, settled: seq, replicated: seq };
            self.to_agent(client, message, out);
        }
    }

    fn lease_wanted(
        &mut self,
        client: ClientId,
        ino: InodeId,
        token: u64,
        mode: LeaseMode,
        flags: u8,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.ready || !self.head.known.contains_key(&client) {
            // Its agent, whose client is not known here, asks again when it has said who there is; so does this node's own.
            return Ok(());
        }
        // Whether the inode is there, and for whom, may lie in a log that is not fetched yet: it is judged
        // when nobody else writes.
        let judge = self.head.leases.is_written_beside(client, ino).then_some(flags);
        let want = Want { client, token, mode, judge };
        if judge.is_none()
            && let Err(errno) = self.open_check(client, ino, flags)?
        {
            self.deny(ino, want, errno, out);
            return Ok(());
        }
        let mut actions = Vec::new();
        self.head.leases.want(ino, want, &mut actions);
        self.act(actions, out)
    }

    fn deny(&mut self, ino: InodeId, want: Want, errno: base::Errno, out: &mut Vec<Effect>) {
        let Want { client, token, mode, .. } = want;
        // What it is judged by.
        let stream = self.member.applied;
        let message = Message::Granted { client, ino, token, mode, errno: errno.0, stream };
        self.to_agent(client, message, out);
    }

    /// Existence and permission of an inode that a client asks for; notes pins and rights.
    fn open_check(
        &mut self,
        client: ClientId,
        ino: InodeId,
        flags: u8,
    ) -> Result<Result<(), base::Errno>, Failure> {
        let Some(known) = self.head.known.get_mut(&client) else {
            return Ok(Err(base::Errno::STALE));
        };
        let Some(record) = self.volume.attr(ino)? else {
            let fresh = known.fresh.contains(&ino);
            return Ok(if fresh { Ok(()) } else { Err(base::Errno::NOENT) });
        };
        for (flag, what) in [(WANT_READ, R), (WANT_WRITE, W)] {
            if flags & flag != 0
                && let Err(errno) = known.creds().may(&record, what)
            {
                return Ok(Err(errno));
            }
        }
        if flags & WANT_WRITE != 0 {
            known.rights.insert(ino);
        }
        if flags & WANT_PIN != 0 {
            known.pins.insert(ino);
            // The agent asks after it has said that the inode is closed, and that may have been put off.
            for (_, put_off) in &mut self.head.stalled {
                if let Message::Unpin { client: by, inodes } = put_off
                    && *by == client
                {
                    inodes.retain(|closed| *closed != ino);
                }
            }
        }
        Ok(Ok(()))
    }

    /// Carries out what the lease table says.
    pub(super) fn act(
        &mut self,
        actions: Vec<Action>,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        for action in actions {
            match action {
                // The service gives back by itself.
                Action::Recall(client, _) if client == SERVICE => {}
                Action::Recall(client, ino) => self.recall_granted(client, ino, out),
                Action::Grant(ino, want) if want.client == SERVICE => self.place_granted(ino),
                Action::Grant(ino, want) => {
                    if let Some(flags) = want.judge
                        && let Err(errno) = self.open_check(want.client, ino, flags)?
                    {
                        self.deny(ino, want, errno, out);
                        // The table says that it has the lease; it may have had a lesser one before.
                        if self.head.leases.take_back(want.client, ino) {
                            self.recall_granted(want.client, ino, out);
                        }
                        continue;
                    }
                    let until = match self.member.dirty.get(&ino) {
                        Some((seq, by))
                            if *by != want.client && !planted(Bug::GrantBeforeReplicated) =>
                        {
                            *seq
                        }
                        _ => StreamSeq(0),
                    };
                    self.head.held_grants.push(HeldGrant { ino, want, until, recall: false });
                }
            }
        }
        self.release_grants(out);
        Ok(())
    }

    /// Grants whose inodes are now on every member.
    pub(super) fn release_grants(&mut self, out: &mut Vec<Effect>) {
        if self.head.held_grants.is_empty() || self.now < self.head.grants_from {
            return;
        }
        let all = self.member.all_acked;
        let (free, held): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.head.held_grants).into_iter().partition(|g| g.until <= all);
        self.head.held_grants = held;
        let mut recalls = Vec::new();
        for HeldGrant { ino, want, until, recall } in free {
            self.counters.leases_granted += 1;
            // Another node may lag behind by everything; this one knows exactly.
            let local = want.client.node() == self.me();
            let stream = if local { until } else { self.member.applied };
            let Want { client, token, mode, .. } = want;
            if mode == LeaseMode::Write {
                self.give_room(client, out);
            }
            let granted = Message::Granted { client, ino, token, mode, errno: 0, stream };
            self.to_agent(client, granted, out);
            if recall && planted(Bug::RecallBetween) {
                self.recall(client, ino, out);
            } else if recall {
                recalls.push((client, ino));
            }
        }
        for (client, ino) in recalls {
            self.recall_granted(client, ino, out);
        }
    }

    /// Takes back what a client has, behind the last grant of it that is still held: several of its threads may
    /// have asked.
    fn recall_granted(&mut self, client: ClientId, ino: InodeId, out: &mut Vec<Effect>) {
        let held = |g: &&mut HeldGrant| g.want.client == client && g.ino == ino;
        let mut grants = self.head.held_grants.iter_mut();
        let last = match planted(Bug::RecallBetween) {
            true => grants.find(held),
            false => grants.rfind(held),
        };
        match last {
            Some(grant) => grant.recall = true,
            None => self.recall(client, ino, out),
        }
    }

    fn recall(&mut self, client: ClientId, ino: InodeId, out: &mut Vec<Effect>) {
        self.counters.recalls += 1;
        let token = self.token();
        self.head.recall_tokens.insert((client, ino), token);
        self.to_agent(client, Message::Recall { client, ino, token }, out);
    }

    fn numbers_wanted(&mut self, client: ClientId, token: u64, count: u32, out: &mut Vec<Effect>) {
        if !self.ready {
            return;
        }
        let Some(known) = self.head.known.get_mut(&client) else { return };
        // A client has no slots for more leases than these.
        let held = known.fresh.len() >= LEASE_SLOTS || self.head.next_inode >= NUMBERS_END;
        let count = if held { 0 } else { count.clamp(1, self.config.limits.numbers) };
        let first = InodeId(self.head.next_inode);
        self.head.next_inode += u64::from(count);
        for n in 0..u64::from(count) {
            let ino = InodeId(first.0 + n);
            known.fresh.insert(ino);
            self.head.leases.adopt(client, ino, LeaseMode::Write);
        }
        self.give_room(client, out);
        self.to_agent(client, Message::Numbers { client, token, first, count }, out);
    }
}

/// An operation without its payload, for the log.
fn summary(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {}+{}", offset, data.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(200);
            text
        }
    }
}
