//! The head: judges entries, orders them into the stream, grants leases and inode numbers.

mod known;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos, NodeId, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::rpc::{
    InodeRecord, Span, WANT_EARLY, WANT_JOINT, WANT_PIN, WANT_REACH, WANT_READ, WANT_WRITE,
};
use storage::permission::{R, W};

use super::lease::{Action, LeaseTable, Want};
use super::locks::LockTable;
use super::message::Message;
use super::past::Keeping;
use super::ranges;
use super::reach::SERVICE;
use super::requests::{S_IFDIR, S_IFMT, S_IFREG};
use super::stage::check::Known;
use super::view::View;
use super::{Failure, Node};

/// No inode numbers from here on: far more than a volume can ever use.
pub(super) const NUMBERS_END: u64 = 1 << InodeId::BITS;

/// A lease that is free, but whose inode's latest changes are not everywhere yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldGrant {
    ino: InodeId,
    want: Want,
    /// The stream position that must be on every member ...
    until: StreamSeq,
    /// ... or only in the ring here: whose node has it then waits until it is there, too.
    early: bool,
    /// Somebody else wants it already: it is recalled as soon as it is granted. A recall that
    /// overtook its grant would find nothing, and the grant would then stand against the table.
    recall: bool,
}

impl HeldGrant {
    /// Who gets which lease.
    pub(super) const fn what(&self) -> (ClientId, InodeId, LeaseMode) {
        (self.want.client, self.ino, self.want.mode)
    }
}

/// What a node has as head, and nobody else: begun by a takeover, given up with the view that ends it.
#[derive(Debug)]
pub(super) struct Head {
    /// The chain agreed on the stream; leases may be granted.
    pub ready: bool,
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
    /// What somebody has open no more, or never will (of a client that ended, of a takeover): freed in turns, when the ring has room,
    /// if it has no name.
    pub let_go: BTreeSet<InodeId>,

    pub leases: LeaseTable,
    pub fights: super::joint::Fights,
    pub sharing: ranges::Fights,
    pub held_grants: Vec<HeldGrant>,
    /// Recalls under way, by what they take back.
    pub recall_tokens: BTreeMap<(ClientId, InodeId), u64>,
    /// File locks, and who asked for some during the takeover.
    pub locks: LockTable,
    pub early_locks: Vec<(NodeId, Message)>,
    /// Who asked for a lock, and is answered once it is known whether those who bar it are gone, and when at the latest.
    pub doubtful_locks: Vec<(Nanos, NodeId, Message)>,
    /// Clients that seek what others have left to them.
    pub seeking: Vec<super::sought::Seeking>,
    /// When those were asked last who shall give locks back.
    pub soles_asked: Nanos,
    /// What past sessions have open.
    pub keeping: Keeping,
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
    /// For how long this head has watched the others, without the time that it slept itself; and how long it had when each
    /// was heard of last.
    pub watched: Nanos,
    pub heard: BTreeMap<NodeId, Nanos>,
    /// Bytes of chunks that not all have.
    pub unacked_bytes: u64,
    /// Nothing more is taken from clients.
    pub paused: bool,

    /// Nodes that join and are sent what they have missed of the stream.
    pub catching_up: BTreeMap<NodeId, super::catch_up::CatchingUp>,
    /// Nodes that join without which nothing is acknowledged any more.
    pub followers: BTreeSet<NodeId>,
    /// Which process of a joining node asked for what it is sent.
    pub joining: BTreeMap<NodeId, u64>,
    pub snapshots: BTreeMap<NodeId, super::snapshot::Outgoing>,
    /// Of the one a piece of which is being made: it is not among them meanwhile.
    pub in_the_making: Option<super::snapshot::Start>,
    /// Which process was sent how many snapshots since it joins.
    pub passes: BTreeMap<NodeId, (u64, u32)>,
    /// Those that are to be sent an image, and what they say that they have, if they may have some of the content.
    pub images_wanted: BTreeMap<NodeId, Option<super::history::Claim>>,
    /// Followers that the coordinator was asked to let into the chain, and when last.
    pub promised: BTreeMap<NodeId, Nanos>,
    pub promoted_at: Nanos,
}

impl Head {
    /// Of a volume in which all numbers below that one may have been used.
    pub(super) fn new(next_inode: u64, keeping: Keeping) -> Self {
        Self {
            ready: false,
            positions: BTreeMap::new(),
            unready: VecDeque::new(),
            missed: BTreeSet::new(),
            reported: BTreeMap::new(),
            known: BTreeMap::new(),
            lingering: BTreeMap::new(),
            stalled: VecDeque::new(),
            awaits: None,
            cuts: BTreeMap::new(),
            let_go: BTreeSet::new(),
            leases: LeaseTable::default(),
            fights: super::joint::Fights::default(),
            sharing: ranges::Fights::default(),
            held_grants: Vec::new(),
            recall_tokens: BTreeMap::new(),
            locks: LockTable::default(),
            early_locks: Vec::new(),
            doubtful_locks: Vec::new(),
            seeking: Vec::new(),
            soles_asked: 0,
            keeping,
            next_inode,
            reserved: 0,
            placing: super::reach::Placing::default(),
            acked: BTreeMap::new(),
            acks_missing: 0,
            watched_at: 0,
            watched: 0,
            heard: BTreeMap::new(),
            unacked_bytes: 0,
            paused: false,
            catching_up: BTreeMap::new(),
            followers: BTreeSet::new(),
            joining: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            in_the_making: None,
            passes: BTreeMap::new(),
            images_wanted: BTreeMap::new(),
            promised: BTreeMap::new(),
            promoted_at: 0,
        }
    }

    /// A view has come in which this node is head as before. Who was away is kept for until then.
    pub(super) fn review(&mut self, view: &View, new_epoch: bool, until: Nanos) {
        self.acked.retain(|n, _| view.chain.contains(n));
        self.heard.retain(|n, _| view.chain.contains(n) || view.syncing.contains(n));
        self.keeping.review(view, until);
        self.passes.retain(|n, _| view.syncing.contains(n));
        if !new_epoch {
            self.snapshots.retain(|n, _| view.syncing.contains(n));
            self.images_wanted.retain(|n, _| view.syncing.contains(n));
            self.catching_up.retain(|n, _| view.syncing.contains(n));
            self.followers.retain(|n| view.syncing.contains(n));
            return;
        }
        // Pieces under way are refused as of an old epoch: who joins asks anew.
        self.snapshots.clear();
        self.images_wanted.clear();
        self.catching_up.clear();
        self.followers.clear();
        self.joining.clear();
        self.promised.clear();
        // Who seeks asks again; what was said for it and is lost is said before that.
        self.seeking.iter_mut().for_each(|seeking| seeking.ask_all(&view.chain));
        if planted(Bug::SeekerForgotten) {
            self.seeking.clear();
        }
        if !planted(Bug::NamedBefore) {
            // Whoever has reported does so anew, and what has ended since may be unheard: it was said in an epoch that
            // is over.
            self.reported.clear();
        }
    }
}

impl Node {
    /// Messages that only a head takes.
    pub(super) fn head_message(&mut self, from: NodeId, message: Message) -> Result<(), Failure> {
        if !self.is_head() {
            self.env.counters.bad_messages += 1;
            return Ok(());
        }
        if let Some(client) = message.speaks_for()
            && client.node() != from
        {
            // An agent speaks for the clients of its own machine and for nobody else.
            self.env.counters.foreign += 1;
            if self.env.counters.foreign.is_power_of_two() {
                log::warn!("node {from} speaks for client {:#x} of another node", client.0);
            }
            return Ok(());
        }
        let me = self.me();
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let asks = matches!(message, Message::LeaseWant { .. } | Message::NumbersWant { .. });
        if asks && !head.ready && from != me {
            if head.unready.len() < self.env.config.limits.unready {
                head.unready.push_back((from, message));
            } else if !planted(Bug::MissedUntold) {
                head.missed.insert(from);
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
        let unready = !head.ready && !planted(Bug::UnreadyOrders);
        if ordered && (unready || !head.stalled.is_empty()) {
            // Before all members have said what they hold, the stream may go on beyond what is here:
            // nothing may be put into it.
            head.stalled.push_back((from, message));
            return Ok(());
        }
        if matches!(message, Message::LockWant { .. }) {
            self.stand_by_it()?;
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        match message {
            Message::ChunkAck { seq } => self.acked(from, seq),
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
                self.client_up(client, known, settled, &leases, &pins)?;
                self.ask_soles_again(client);
                self.open_room(client, room, settled)
            }
            Message::RoomBack { client, token, blocks } => {
                head.room_returned(client, token, blocks);
                Ok(())
            }
            Message::ClientGone { .. } | Message::Unpin { .. } if !self.ring.has_room() => {
                head.stalled.push_back((from, message));
                Ok(())
            }
            Message::ClientGone { client } => self.forget_client(client),
            Message::Entries { client, first, last, raw } => {
                if !self.ring.has_room() || head.paused {
                    let message = Message::Entries { client, first, last, raw };
                    head.stalled.push_back((from, message));
                    return Ok(());
                }
                let Some(known) = head.known.get(&client) else { return Ok(()) };
                if client.node() != self.env.config.node {
                    self.agent.waiting.note(client, self.env.now);
                }
                let (raw, wrong) = raw.check(known.incarnation);
                if let Some(e) = wrong {
                    // Only an agent of this cluster sends these, and it checked them.
                    log::warn!("entries of client {client:?}: {e}");
                    self.env.counters.bad_messages += 1;
                }
                self.ingest(client, first, last, raw)
            }
            Message::LeaseWant { client, ino, token, mode, flags, span } => {
                self.lease_wanted(client, ino, token, (mode, span), flags)
            }
            Message::NumbersWant { client, token, count } => {
                self.numbers_wanted(client, token, count);
                Ok(())
            }
            Message::Recalled { client, ino, token } => {
                // The answer to a recall that a report of the client made void, or that crossed a
                // return of the lease, says nothing of what the client was granted since.
                let stale = head.recall_tokens.get(&(client, ino)) != Some(&token);
                if stale && !planted(Bug::StaleRecall) {
                    return Ok(());
                }
                head.recall_tokens.remove(&(client, ino));
                let mut actions = Vec::new();
                head.leases.released(client, ino, &mut actions);
                self.act(actions)
            }
            want @ Message::LockWant { .. } => self.lock_wanted(from, want),
            Message::LockHeld { client, first, locks } => {
                self.locks_reported(from, client, first, &locks);
                Ok(())
            }
            Message::LockSole { client, ino, token, says } => {
                self.sole_said(client, (ino, token), says)
            }
            Message::LockHeir { client, heir } => self.locks_inherited(from, client, heir),
            Message::HeirSeek { client, token, secret } => {
                self.seek_heirs_of(from, client, (token, secret));
                Ok(())
            }
            Message::HeirAnswer { heir, token } => {
                self.heir_answered(from, heir, token);
                Ok(())
            }
            Message::Unpin { client, inodes } => self.unpinned(client, &inodes),
            Message::Kept { client, inodes } => self.kept_arrived(client, inodes),
            Message::Pinned { client, inodes, rights } => {
                self.pinned(client, inodes, rights);
                Ok(())
            }
            Message::Released { client, ino, token } => {
                let crossed = head.leases.token(client, ino) != Some(token);
                if crossed && !planted(Bug::ReleaseUnnamed) {
                    // It crossed a grant, which stands.
                    return Ok(());
                }
                let mut actions = Vec::new();
                head.recall_tokens.remove(&(client, ino));
                head.leases.released(client, ino, &mut actions);
                self.act(actions)
            }
            _ => {
                self.env.counters.bad_messages += 1;
                Ok(())
            }
        }
    }

    /// Messages put off because the ring was full.
    pub(super) fn retry_stalled(&mut self) -> Result<(), Failure> {
        self.reap_let_go()?;
        self.turn.cut_short = false;
        let room = self.ring.has_room();
        let Some(head) = self.part.head_mut().filter(|head| head.ready) else { return Ok(()) };
        // What held chunks back may be gone without a word (a snapshot for a node that is in the chain now).
        self.turn.cut_short = !head.let_go.is_empty() && room;
        if head.stalled.is_empty() || head.paused {
            return Ok(());
        }
        if let Some(upto) = head.awaits {
            if self.member.published < upto {
                self.member.publish_now = true;
                return Ok(());
            }
            head.awaits = None;
        }
        let sought = planted(Bug::RoomUnsought) || self.room_for_batch()?;
        if !sought || !self.ring.has_room() {
            return Ok(());
        }
        let mut waiting = self.take_stalled();
        while let Some((from, message)) = waiting.pop_front() {
            self.head_message(from, message)?;
            if let Some(head) = self.part.head_mut().filter(|head| !head.stalled.is_empty()) {
                head.stalled.append(&mut waiting);
                break;
            }
        }
        Ok(())
    }

    fn take_stalled(&mut self) -> VecDeque<(NodeId, Message)> {
        self.part.head_mut().map(|head| std::mem::take(&mut head.stalled)).unwrap_or_default()
    }

    fn lease_wanted(
        &mut self,
        client: ClientId,
        ino: InodeId,
        token: u64,
        (mode, span): (LeaseMode, Span),
        flags: u8,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if !head.ready || !head.known.contains_key(&client) {
            // Its agent, whose client is not known here, asks again when it has said who there is; so does this node's own.
            return Ok(());
        }
        if flags & WANT_REACH != 0 {
            self.reach_wanted(client, ino, token);
            return Ok(());
        }
        // Whether the inode is there, and for whom, may lie in a log that is not fetched yet: it is judged
        // when nobody else writes.
        let judge = head.leases.is_written_beside(client, ino).then_some(flags);
        let early = flags & WANT_EARLY != 0;
        let (none, most) = (Span::NONE, Span::NONE);
        let want = Want { client, token, mode, judge, early, span: none, most };
        if judge.is_none()
            && let Err(errno) = self.open_check(client, ino, flags)?
        {
            return self.deny(ino, want, errno);
        }
        let shared = self.shares_bytes(client, ino, mode, span)?;
        let joint =
            shared.is_some() || flags & WANT_JOINT != 0 && self.is_joint(client, ino, mode)?;
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let mut actions = Vec::new();
        let mode = if joint { LeaseMode::Joint } else { mode };
        let (span, most) = shared.unwrap_or_default();
        head.leases.want(ino, Want { mode, span, most, ..want }, &mut actions);
        self.act(actions)
    }

    /// Whether a client that asks for these bytes of a regular file, which are there, is to have a joint lease of them: which, and as many as
    /// there may be around them.
    fn shares_bytes(
        &mut self,
        client: ClientId,
        ino: InodeId,
        mode: LeaseMode,
        span: Span,
    ) -> Result<Option<(Span, Span)>, Failure> {
        let limits = &self.env.config.limits;
        if mode != LeaseMode::Write || span.is_empty() || limits.ranges == 0 {
            return Ok(None);
        }
        let has = |r: InodeRecord| r.mode & S_IFMT == S_IFREG && span.to <= r.size;
        if !self.volume.attr(ino)?.is_some_and(has) {
            return Ok(None);
        }
        let Some(head) = self.part.head_mut() else { return Ok(None) };
        let (own, all) = head.leases.spans(client, ino);
        if own >= limits.ranges || all >= limits.ranges_all {
            return Ok(None);
        }
        let span = ranges::whole_blocks(span);
        let way = head.leases.way(client, ino, span);
        let most = head.sharing.ask(ino, (client, span), way, limits, self.env.now);
        Ok(most.map(|most| (span, most)))
    }

    /// Whether a client that asks for a directory, and would share it, is to.
    fn is_joint(
        &mut self,
        client: ClientId,
        ino: InodeId,
        mode: LeaseMode,
    ) -> Result<bool, Failure> {
        let is_dir = |r: InodeRecord| r.mode & S_IFMT == S_IFDIR;
        if mode == LeaseMode::None || !self.volume.attr(ino)?.is_some_and(is_dir) {
            return Ok(false);
        }
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        let waits = head.leases.is_in_the_way(client, ino, mode);
        Ok(head.fights.ask(ino, client, waits, &self.env.config.limits, self.env.now))
    }

    /// A client has changed names in directories that it has jointly: who works there does not ask for them.
    pub(super) fn used_jointly(&mut self, client: ClientId, op: &Op<'_>) {
        let Some(head) = self.part.head_mut() else { return };
        for dir in op.facts().dirs.into_iter().flatten() {
            if head.leases.mode(client, dir) == LeaseMode::Joint {
                head.fights.ask(dir, client, false, &self.env.config.limits, self.env.now);
            }
        }
    }

    /// A client that has a directory jointly asks how far its state must reach that what it is about to say of its names is so.
    fn reach_wanted(&mut self, client: ClientId, ino: InodeId, token: u64) {
        let until = self.changed_by_others(ino, client);
        let Some(head) = self.part.head_mut() else { return };
        let want = Want::all(client, token, LeaseMode::None);
        head.held_grants.push(HeldGrant { ino, want, until, early: false, recall: false });
        self.release_grants();
    }

    fn deny(&mut self, ino: InodeId, want: Want, errno: base::Errno) -> Result<(), Failure> {
        self.stand_by_it()?;
        let Want { client, token, mode, .. } = want;
        // What it is judged by.
        let stream = self.member.applied;
        let (errno, span) = (errno.0, Span::NONE);
        let message = Message::Granted { client, ino, token, mode, errno, stream, span };
        self.to_agent(client, message);
        Ok(())
    }

    /// Existence and permission of an inode that a client asks for; notes pins and rights.
    fn open_check(
        &mut self,
        client: ClientId,
        ino: InodeId,
        flags: u8,
    ) -> Result<Result<(), base::Errno>, Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(Err(base::Errno::STALE)) };
        let Some(known) = head.known.get_mut(&client) else {
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
            for (_, put_off) in &mut head.stalled {
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
    pub(super) fn act(&mut self, actions: Vec<Action>) -> Result<(), Failure> {
        let mut denied = Vec::new();
        for action in actions {
            match action {
                // The service gives back by itself.
                Action::Recall(client, _) if client == SERVICE => {}
                Action::Recall(client, ino) => self.recall_granted(client, ino),
                Action::Grant(ino, want) if want.client == SERVICE => self.place_granted(ino),
                Action::Grant(ino, want) => {
                    if let Some(flags) = want.judge
                        && let Err(errno) = self.open_check(want.client, ino, flags)?
                    {
                        self.deny(ino, want, errno)?;
                        denied.push((want.client, ino));
                        continue;
                    }
                    let until = self.changed_by_others(ino, want.client);
                    let is_file = |r: InodeRecord| r.mode & S_IFMT == S_IFREG;
                    let pending = until > self.member.all_acked
                        && self.volume.attr(ino)?.is_some_and(is_file);
                    // Who gets it reads what is published here: that is done while the others take it.
                    self.member.publish_now |= pending && want.client.node() == self.me();
                    let early = want.early && pending;
                    let Some(head) = self.part.head_mut() else { return Ok(()) };
                    head.held_grants.push(HeldGrant { ino, want, until, early, recall: false });
                }
            }
        }
        for (client, ino) in denied {
            // The table says that it has the lease; it may have had a lesser one before. (Behind what other threads of it are granted here.)
            let head = self.part.head_mut();
            if head.is_some_and(|head| head.leases.take_back(client, ino)) {
                self.recall_granted(client, ino);
            }
        }
        self.release_grants();
        Ok(())
    }

    /// The last chunk that changed an inode for another client.
    pub(super) fn changed_by_others(&self, ino: InodeId, client: ClientId) -> StreamSeq {
        match self.member.dirty.get(&ino) {
            Some((seq, by, _)) if *by != client && !planted(Bug::GrantBeforeReplicated) => *seq,
            Some((.., before)) if !planted(Bug::JointBeforeReplicated) => *before,
            _ => StreamSeq(0),
        }
    }

    /// Grants whose inodes are now on every member.
    pub(super) fn release_grants(&mut self) {
        let Some(head) = self.part.head_mut() else { return };
        if head.held_grants.is_empty() || self.env.now < self.view.grants_from {
            return;
        }
        // Who gets it early sees what is in the ring of its node (an agent waits for that; and this one puts there what is on its way, before it
        // answers anybody: `stand_by_it`), and so in the stream of any head under
        // which its session goes on; after any restart it is there before what is done next to it.
        let (all, kept) = (self.member.all_acked, self.ring.kept_to());
        let is_free = |g: &HeldGrant| g.until <= all || g.early && g.until <= kept;
        let (free, held): (Vec<_>, Vec<_>) =
            std::mem::take(&mut head.held_grants).into_iter().partition(is_free);
        head.held_grants = held;
        let mut recalls = Vec::new();
        for HeldGrant { ino, want, until, recall, .. } in free {
            self.env.counters.leases_granted += 1;
            // Another node may lag behind by everything; this one knows exactly.
            let local = want.client.node() == self.me();
            let stream = if local { until } else { self.member.applied };
            let Want { client, token, mode, span, .. } = want;
            if mode == LeaseMode::Write || !span.is_empty() {
                self.give_room(client);
            }
            let granted = Message::Granted { client, ino, token, mode, errno: 0, stream, span };
            self.to_agent(client, granted);
            if recall && planted(Bug::RecallBetween) {
                self.recall(client, ino);
            } else if recall {
                recalls.push((client, ino));
            }
        }
        for (client, ino) in recalls {
            self.recall_granted(client, ino);
        }
    }

    /// Takes back what a client has, behind the last grant of it that is still held: several of its threads may
    /// have asked.
    fn recall_granted(&mut self, client: ClientId, ino: InodeId) {
        let Some(head) = self.part.head_mut() else { return };
        // (Who asks how far the state must reach is granted nothing that could be overtaken.)
        let held = |g: &&mut HeldGrant| {
            g.want.client == client && g.ino == ino && g.want.mode != LeaseMode::None
        };
        let mut grants = head.held_grants.iter_mut();
        let last = match planted(Bug::RecallBetween) {
            true => grants.find(held),
            false => grants.rfind(held),
        };
        match last {
            Some(grant) => grant.recall = true,
            None => self.recall(client, ino),
        }
    }

    fn recall(&mut self, client: ClientId, ino: InodeId) {
        self.env.counters.recalls += 1;
        let token = self.token();
        let Some(head) = self.part.head_mut() else { return };
        head.recall_tokens.insert((client, ino), token);
        self.to_agent(client, Message::Recall { client, ino, token });
    }

    fn numbers_wanted(&mut self, client: ClientId, token: u64, count: u32) {
        let Some(head) = self.part.head_mut().filter(|head| head.ready) else { return };
        let Some(known) = head.known.get_mut(&client) else { return };
        // A client has no slots for more leases than these.
        let held = known.fresh.len() >= self.env.config.limits.lease_slots
            || head.next_inode >= NUMBERS_END;
        let count = if held { 0 } else { count.clamp(1, self.env.config.limits.numbers) };
        let first = InodeId(head.next_inode);
        head.next_inode += u64::from(count);
        for n in 0..u64::from(count) {
            let ino = InodeId(first.0 + n);
            known.fresh.insert(ino);
            head.leases.adopt(client, ino, LeaseMode::Write);
        }
        self.give_room(client);
        self.to_agent(client, Message::Numbers { client, token, first, count });
    }
}
