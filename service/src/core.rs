//! The core of nicfs: one state machine that owns everything, and calls nothing but the region's memory. It waits for nothing
//! but the end of a piece of its own work (`work`) that somebody else has begun, and who does one takes no lock that it keeps. What each part of it has is a type, and all share one environment (`env`: configuration,
//! memory, time, counters, what is to be done):
//!
//! - **agent** of the clients on its machine (`agent`, `requests`, `recall`): fetches their logs, answers
//!   their requests, writes and revokes their lease words;
//! - **member** (`member`): keeps the stream in its ring, passes it on, acknowledges, applies it to
//!   its volume and publishes;
//! - and the **part** that the view gives it (`part`): **head** of the chain (`head`), which judges, orders everything into
//!   one stream of chunks, and manages leases and inode numbers; a node that joins (`join`); or neither.
//!
//! What a write passes are the stages (`stage`). What an agent asks of the head goes through `Node::to_head`, also when
//! both are this node.

mod agent;
mod catch_up;
pub mod client;
mod closing;
mod coalesce;
mod env;
pub mod event;
pub mod frame;
mod head;
pub mod heal;
mod heir;
mod history;
pub mod image;
mod invariants;
mod join;
mod joint;
pub mod lease;
pub mod limits;
mod locking;
pub mod locks;
mod losses;
mod member;
pub mod message;
pub mod offer;
mod part;
mod parts;
mod past;
mod ranges;
mod reach;
mod recall;
pub mod reconcile;
mod requests;
mod rest;
mod restart;
pub mod ring;
mod room;
pub mod schedule;
pub mod scrub;
mod share;
pub mod snapshot;
mod sole;
mod sought;
pub mod stage;
mod states;
pub mod table;
mod turn;
mod users;
mod view;
pub mod work;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::random::Random;
use base::wire::Corrupt;
use base::{ClientId, Epoch, Level, Nanos, NodeId, Sequence, StreamSeq};
use cluster::transport::Class;
use storage::format::chunk::ChunkHeader;
use storage::format::entry::{self, Header, Op, entry_bytes};
use storage::format::superblock::Durability;
use storage::media::{Media, MediaError};
use storage::volume::{Fault, Volume};

use client::Client;
use frame::Received;
use history::Claim;
use message::Message;
use ring::Ring;
use stage::apply::Waits;
use table::Table;

pub use event::{Copier, Effect, Event};

/// Why a client's operations were refused: what is not there was refused before, mostly, which is the reason to tell.
fn cause(before: u16, errno: u16) -> u16 {
    let follows = [base::Errno::NOENT.0, base::Errno::STALE.0].contains(&errno);
    if follows && before != 0 { before } else { errno }
}

/// Messages to this node itself handled in one go before the driver gets a turn.
const LOCAL_MAX: usize = 10_000;

/// What the service takes for [`NodeConfig::join_step`]: less than a millisecond.
pub const JOIN_STEP: u32 = 128;

pub use past::GRACE;
pub use room::Shares;
pub use users::PerUser;

/// What the core must know of its surroundings.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// This node.
    pub node: NodeId,
    /// Lanes of a log, unless a client asks for another number.
    pub lanes: u32,
    /// Bytes of a lane.
    pub lane_bytes: u64,
    /// Clients at once.
    pub clients_max: u32,
    /// Clients of one user, but root, at once; as many of its past sessions are remembered.
    pub clients_per_user: u32,
    /// What else one user may have.
    pub per_user: PerUser,
    /// Whose turn it is, where several clients want something.
    pub scheduler: schedule::Scheduler,
    /// Shares of users; who is not named has 1.
    pub weights: BTreeMap<u32, u32>,
    /// Bytes of the stream ring.
    pub ring_bytes: u64,
    /// Bytes of chunks that members have not acknowledged, against which the watermarks count.
    pub memory: u64,
    /// Percent of `memory` above which nothing more is taken from clients.
    pub high: u32,
    /// Percent of `memory` below which it goes on.
    pub low: u32,
    /// Names or inodes looked at for a joining node in one turn ([`JOIN_STEP`]).
    pub join_step: u32,
    /// How space is set aside for clients.
    pub room: Shares,
    /// How much is done at once, and kept.
    pub limits: limits::Limits,
    /// For how long what processes of a lost node have open is kept without a word of it ([`GRACE`]); 0 where no
    /// node can be lost.
    pub grace: Nanos,
    /// Names the boot of the machine: processes of another boot are gone.
    pub boot: u128,
    /// A number that nobody else knows, new at each start: the key of the proofs that clients get
    /// (`storage::format::proof`), unless the region has one already.
    pub secret: u128,
    /// This process of the node, as the coordinator knows it; grows with each start.
    pub incarnation: u64,
}

/// Why the node cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The region cannot be reached.
    Media(MediaError),
    /// The published state is damaged.
    Volume(Fault),
    /// The stream holds what this volume refuses: it is not the same volume any more.
    Diverged(StreamSeq, String),
    /// The head goes on from that chunk, without what all members had acknowledged up to the other one, and is here.
    Acknowledged(StreamSeq, StreamSeq),
    /// hostd copies, and cannot be stopped.
    Host(String),
    /// What is written to the region does not stay there.
    Medium(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Media(e) => write!(f, "the region cannot be reached: {e}"),
            Self::Volume(e) => write!(f, "the volume is damaged: {e}; run fsck on the region"),
            Self::Diverged(seq, why) => write!(
                f,
                "chunk {seq} of the stream does not fit this volume ({why}); give up its copy, so \
                 that the node joins anew: `corbel mkfs --force --uuid UUID` with the uuid that the other nodes have"
            ),
            Self::Acknowledged(seq, acked) => write!(
                f,
                "the head goes on from chunk {seq} of the stream, but all members had acknowledged what comes up to \
                 chunk {acked}, and this node has it: keep a copy of the region before the node is started again, \
                 which gives that up, and find out why the head is without it"
            ),
            Self::Medium(why) => write!(
                f,
                "the medium of the region keeps failing ({why}): this copy is given up, the others go on; replace the \
                 medium, and let the node join anew: `corbel mkfs --force --uuid UUID` with the uuid that the other nodes have"
            ),
            Self::Host(why) => write!(f, "hostd does not end its copies ({why}); end it by hand"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<MediaError> for Failure {
    fn from(e: MediaError) -> Self {
        Self::Media(e)
    }
}

impl From<Fault> for Failure {
    fn from(e: Fault) -> Self {
        match e {
            Fault::Media(e) => Self::Media(e),
            other => Self::Volume(other),
        }
    }
}

/// Counters, for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counters {
    pub chunks: u64,
    pub entries: u64,
    pub entry_bytes: u64,
    pub refused: u64,
    /// Of those, what did not fit what others had done in a directory that is used jointly.
    pub untaken: u64,
    pub publishes: u64,
    pub copied_bytes: u64,
    /// Bytes of copies that hostd was asked for.
    pub hosted_bytes: u64,
    pub host_copies: u64,
    pub isolated_copies: u64,
    /// Jobs of hostd that were not waited for.
    pub settled_copies: u64,
    pub leases_granted: u64,
    pub recalls: u64,
    pub expelled: u64,
    /// Logs that did not go on although more lies in them, or was to come.
    pub broken_logs: u64,
    /// Clients that were expelled because they made their logs longer or shorter.
    pub resized_logs: u64,
    /// Processes that were not attached because there were too many, of all or of their user.
    pub crowded_out: u64,
    /// Processes that were not attached because clients of their user were expelled again and again.
    pub barred: u64,
    /// Looks at requests that had to wait because their user asked too fast.
    pub throttled: u64,
    /// Leases that were taken back because their user had too many.
    pub leases_over: u64,
    pub requests: u64,
    pub bad_requests: u64,
    pub bad_messages: u64,
    pub foreign: u64,
    /// Messages of nodes that have no such part in the epoch, refused.
    pub not_due: u64,
    /// Requests about inodes that their client was not shown.
    pub unshown: u64,
    pub old_epoch: u64,
    pub syncs: u64,
    pub snapshots: u64,
    /// Bytes that were copied out of the logs of clients of this node, and into the ring; and of these the chunks that the thread that
    /// decides has put there itself.
    pub fetched_bytes: u64,
    pub kept_bytes: u64,
    pub kept_inline: u64,
    /// Bytes of snapshots that this node took in to join, and bytes of its own that it took over instead.
    pub snapshot_bytes: u64,
    pub taken_over_bytes: u64,
    /// Nodes that came back, and were sent what they had missed of the stream.
    pub returns: u64,
    pub locks: u64,
    pub locks_refused: u64,
    /// Files whose locks were left to a client of this node.
    pub soles: u64,
    /// Those that came back.
    pub soles_back: u64,
    /// Entries that are parts of operations too long for a turn.
    pub parts: u64,
    /// Writes that were taken out of chunks because their ends do not show them, and their bytes.
    pub coalesced: u64,
    pub coalesced_bytes: u64,
    /// Bytes of pages and content that scrubs have read.
    pub scrubbed_bytes: u64,
    /// Blocks and pages that were found rotten, and those that were mended and read again.
    pub rotten: u64,
    pub mended: u64,
}

/// The part that a node has in the current view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// No view yet, or not in it.
    Outside,
    /// First of the chain.
    Head,
    /// In the chain, not first.
    Member,
    /// Fetching the state in order to join.
    Syncing,
}

/// See the module.
pub struct Node {
    env: env::Env,
    volume: Volume,
    ring: Ring,
    /// Why nothing works any more.
    failure: Option<Failure>,

    view: view::View,
    fenced: bool,
    /// The service is about to end.
    closing: Option<closing::Closing>,
    /// As the clients were told.
    serves_until: Nanos,
    /// Messages of views that are not here yet.
    early: VecDeque<(NodeId, Epoch, Message)>,
    /// Who said more than those have room for, and of which epoch: it is not heard until its link is renewed, when the view is here.
    unheard: BTreeMap<NodeId, Epoch>,
    /// What this node's parts have to say to each other.
    local: VecDeque<Message>,
    next_token: u64,
    /// What was done in this turn.
    turn: turn::Turn,

    agent: agent::Agent,
    member: member::Member,
    part: part::Part,
    scrub: scrub::Scrub,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("node", &self.env.config.node)
            .field("epoch", &self.view.epoch)
            .field("chain", &self.view.chain)
            .field("stream", &self.ring.last())
            .finish_non_exhaustive()
    }
}

/// The entries of a chunk's body: offset of the entry, header, operation.
pub fn entries(
    body: &[u8],
    incarnation: u32,
) -> impl Iterator<Item = Result<(usize, Header, Op<'_>), Corrupt>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = body.get(at..).filter(|r| !r.is_empty())?;
        match entry::decode(rest, incarnation) {
            Ok((header, op)) => {
                let offset = at;
                at = (at + entry_bytes(header.length as usize)).min(body.len());
                Some(Ok((offset, header, op)))
            }
            Err(e) => {
                at = body.len();
                Some(Err(e))
            }
        }
    })
}

impl Node {
    /// Opens the node's region and replays what its stream ring holds beyond the published state.
    pub fn new(config: NodeConfig, media: Arc<dyn Media>, random: Random) -> Result<Self, Failure> {
        if storage::volume::end_upgrade(&*media)? {
            log::warn!("an upgrade of the region was interrupted at its very end; it is ended");
        }
        let volume = Volume::open(Arc::clone(&media))?;
        storage::volume::drop_half_roots(&*media, &volume.superblock().uuid)?;
        let published = volume.root().stream_seq;
        let ring = Ring::open(Arc::clone(&media), config.ring_bytes, published)?;
        let durability = volume.superblock().durability;
        let strict = durability == Durability::Pmem;
        let (table, found) = Table::open(Arc::clone(&media), strict, config.boot, config.secret)?;
        // A copy: what else is drawn stays as it was.
        let run = random.clone().next_u64() | 1;
        let mut node = Self {
            env: env::Env::new(config, media, random),
            volume,
            ring,
            failure: None,
            view: view::View::default(),
            fenced: false,
            closing: None,
            serves_until: 0,
            early: VecDeque::new(),
            unheard: BTreeMap::new(),
            local: VecDeque::new(),
            // Another run's answers are none to this one's questions.
            next_token: run >> 34 << 32,
            turn: turn::Turn::default(),
            agent: agent::Agent::new(table, locking::Locking::new(run)),
            member: member::Member::new(published),
            part: part::Part::Outside,
            scrub: scrub::Scrub::default(),
        };
        node.load_history()?;
        if node.ring.oldest().0 > published.0 + 1 {
            // Ended in the middle of joining: what lies here is no state of the volume, and the
            // coordinator was not told that it is.
            log::warn!("the region holds half a snapshot; the node joins anew");
            node.ring.restart(published, Epoch(0))?;
            let found = match node.agent.table.rebooted {
                true => found,
                false => {
                    found.into_iter().for_each(|row| node.take_past(row));
                    Vec::new()
                }
            };
            node.drop_logs(found)?;
            return Ok(node);
        }
        if planted(Bug::ReplayForgotten) {
            node.ring.restart(published, Epoch(0))?;
        }
        let mut replayed = restart::Replayed::default();
        node.member.replayed = node.ring.last();
        node.volume.begin_replay();
        while node.member.applied < node.ring.last() {
            node.apply_next(Waits::Never)?;
            node.note_replayed(&mut replayed)?;
        }
        node.volume.end_replay();
        let lost = node.agent.table.rebooted && !strict && !found.is_empty();
        if lost || planted(Bug::LogsDropped) {
            // Pages of the logs may be there or not, in any order: only the stream counts.
            log::warn!("the machine was started anew: what was not fsynced is lost");
            node.drop_logs(found)?;
        } else {
            node.take_up(found, &replayed)?;
        }
        Ok(node)
    }

    /// The difference between the realtime and the monotonic clock, for time stamps.
    pub fn set_realtime_offset(&mut self, offset: u64) {
        self.env.realtime_offset = offset;
    }

    /// Whether something of others has come and waits for its turn outside: a member says for it that it is at work.
    pub fn set_hearing(&mut self, hearing: bool) {
        self.member.hearing = hearing;
    }

    /// Takes note of what happened.
    pub fn apply(&mut self, now: Nanos, event: Event, out: &mut Vec<Effect>) {
        self.env.now = now;
        if self.failure.is_some() {
            return;
        }
        self.begin_turn();
        std::mem::swap(&mut self.env.out, out);
        if let Err(failure) = self.handle(event) {
            self.fail(failure);
        }
        std::mem::swap(&mut self.env.out, out);
        self.check();
    }

    /// In debug builds: what is always true, is.
    fn check(&self) {
        if cfg!(debug_assertions) && self.failure.is_none() {
            assert_eq!(self.cheap_invariants(), Ok(()), "node {}", self.me());
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Tick => self.tick()?,
            Event::Doorbell(client) => self.rang(client)?,
            Event::Frame { from, kind, body } => self.frame(from, kind, body)?,
            Event::PeerUp(node) => self.peer_up(node)?,
            Event::PeerDown(node) => self.peer_down(node),
            Event::View { epoch, chain, syncing, lapse } => {
                self.on_view(epoch, chain, syncing, lapse)?;
            }
            Event::Needs { members, replicas } => {
                self.view.wanted = replicas;
                self.needs(members)?;
            }
            Event::Level(level) => self.view.level = level,
            Event::ServesUntil(until) => self.serves_until(until),
            Event::Fenced(fenced) => self.fence(fenced)?,
            Event::Attach { token, pid, start_time, uid, gid, groups, lanes } => {
                let identity = message::Identity { uid, gid, groups };
                self.attach(token, (pid, start_time), identity, lanes)?;
            }
            Event::ClientGone(client) => self.client_gone(client)?,
            Event::ArenaQuery { token, arena } => {
                let class = self.volume.arena_class(arena);
                let bytes = self.arena_bytes();
                self.env.out.push(Effect::Arena { token, class, bytes });
            }
            Event::CopiesDone { id, bad } => self.copies_done(id, &bad)?,
            Event::CopiesUnasked(id) => self.copies_unasked(id),
            Event::WorkEnded(id) => self.work_ended(id)?,
            Event::HostUp(host) => self.member.host = Some(host),
            Event::HostDown => self.host_down(),
            Event::Scrub => self.scrub_wanted(),
            Event::Closing => {
                self.begin_closing();
                self.closing_step()?;
            }
            Event::Shutdown => self.shutdown()?,
        }
        self.settle_down()
    }

    /// Handles what the event set in motion inside this node.
    fn settle_down(&mut self) -> Result<(), Failure> {
        if self.member.kept_untold {
            self.say_kept()?;
        }
        for _ in 0..LOCAL_MAX {
            if let Some(message) = self.local.pop_front() {
                let me = self.env.config.node;
                self.message(me, message)?;
            } else if !self.step_recalls()?
                && !self.step_returns()?
                && !self.step_sought()?
                && !self.step_requests()?
                && self.local.is_empty()
            {
                return Ok(());
            }
        }
        Ok(())
    }

    fn fail(&mut self, failure: Failure) {
        log::error!("node {} stops: {failure}", self.env.config.node);
        for client in self.agent.clients.values_mut() {
            let settled = client.settled;
            client.dismiss(settled);
        }
        if let Err(e) = self.note_losses(false) {
            log::warn!("who has open what others lose now is not told: {e}");
        }
        self.failure = Some(failure);
    }

    /// Why the node stopped, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// One slice of background work; `true` when there is more to do at once.
    pub fn work(&mut self, now: Nanos, out: &mut Vec<Effect>) -> bool {
        self.env.now = now;
        if self.failure.is_some() {
            return false;
        }
        self.begin_turn();
        std::mem::swap(&mut self.env.out, out);
        let worked = self.work_slice().and_then(|more| {
            self.settle_down()?;
            // A request that was granted its lease just now may wait for a publication: who slept first
            // would answer it at the next timer.
            Ok(more || self.publishes_at_once() || self.turn.unanswered)
        });
        std::mem::swap(&mut self.env.out, out);
        self.check();
        worked.unwrap_or_else(|failure| {
            self.fail(failure);
            false
        })
    }

    fn work_slice(&mut self) -> Result<bool, Failure> {
        // While a snapshot comes, the ring stands at the snapshot's end and the state before it.
        let behind = self.member.incoming.is_none() && self.member.applied < self.ring.kept_to();
        if behind && self.apply_next(Waits::ForPublication)? {
            self.take_over_caught_up()?;
            return Ok(true);
        }
        self.retry_stalled()?;
        let more = self.publish_step()? || self.turn.cut_short;
        // What waited for a publication goes on after it.
        let more = more || behind && self.member.job.is_none();
        let discards = self.discard_step()?;
        let more = self.place_step()? || more;
        let more = self.images_step()? || more;
        // (Nobody who joins waits until all is cleared.)
        let more = more || self.snapshot_step()?;
        Ok(self.scrub_step()? || more || discards)
    }

    fn tick(&mut self) -> Result<(), Failure> {
        // What clients took of the file system below comes back first.
        self.mend_logs()?;
        self.look_below()?;
        self.return_room();
        self.collect_closed()?;
        self.collect_waiting()?;
        self.collect_dozing()?;
        self.collect_ended()?;
        self.end_unclaimed()?;
        self.seek_again();
        self.forget_seekers();
        self.expel_broken()?;
        self.closing_step()?;
        self.join_again();
        self.say_at_work();
        self.watch_acks();
        self.forget_lingering()?;
        self.forget_kept()?;
        self.release_grants();
        self.serve_early_locks()?;
        self.end_doubts()?;
        self.promote_followers();
        self.remove_finished_clients()?;
        self.retire_expelled()
    }

    /// When `Tick` is due next, besides every 100 ms.
    pub fn deadline(&self) -> Option<Nanos> {
        let recalls = self.agent.recalls.iter().map(|r| r.look_at);
        let hold = self.env.config.limits.hold;
        let dozing = self.agent.clients.values().filter_map(|c| c.dozing_since.map(|t| t + hold));
        let publish = self.publish_deadline();
        let head = self.part.head();
        let lapsed = head.and_then(|head| head.lingering.values().copied().min());
        let granting = head.is_some_and(|head| !head.held_grants.is_empty());
        let from = self.view.grants_from;
        let grants = (granting && self.env.now < from).then_some(from);
        let closing = self.closing_deadline();
        let kept =
            head.filter(|head| head.ready).and_then(|head| head.keeping.deadline(&self.view));
        recalls
            .chain(dozing)
            .chain(publish)
            .chain(lapsed)
            .chain(grants)
            .chain(closing)
            .chain(kept)
            .chain(self.doubts_deadline())
            .chain(self.returns_deadline())
            .chain(self.waiting_deadline())
            .chain(self.scrub_deadline())
            .chain(self.snapshot_deadline())
            .min()
    }

    fn frame(&mut self, from: NodeId, kind: u16, body: Received) -> Result<(), Failure> {
        if self.unheard.contains_key(&from) {
            // What came before it is lost.
            return Ok(());
        }
        if kind == message::CHUNK
            && let Ok((epoch, all_acked)) = message::chunk_prefix(body.bytes())
            && epoch == self.view.epoch
        {
            // The bulk of all bytes: passed on in the memory in which it came.
            if !self.sends_chunks(from) && !planted(Bug::ChunkOfAnyone) {
                self.not_due(from, "sends a chunk");
                return Ok(());
            }
            return self.chunk_arrived(from, all_acked, body);
        }
        match Message::take(kind, body) {
            Err(e) => {
                self.env.counters.bad_messages += 1;
                log::warn!("message of node {from} refused: {e}");
                Ok(())
            }
            Ok((epoch, _)) if epoch < self.view.epoch && !planted(Bug::OldEpochAccepted) => {
                self.env.counters.old_epoch += 1;
                Ok(())
            }
            Ok((epoch, message)) if epoch > self.view.epoch => {
                // The peer knows the new view already; ours is on its way.
                self.keep_early(from, epoch, message);
                Ok(())
            }
            Ok((epoch, message)) if self.may_join(from, &message) => {
                // So may the peer in the same epoch: who joins is in a view of its own.
                self.keep_early(from, epoch, message);
                Ok(())
            }
            Ok((_, message)) => self.message(from, message),
        }
    }

    /// A message of a view that is not here yet. Where there is no room for it, all that comes after it is lost as well, as if the
    /// link had ended there: what a peer says counts on what it has said before, and it says it once.
    fn keep_early(&mut self, from: NodeId, epoch: Epoch, message: Message) {
        if self.early.len() < self.env.config.limits.early {
            self.early.push_back((from, epoch, message));
        } else if !planted(Bug::EarlyLost) {
            log::warn!(
                "node {from} has said more of epoch {epoch} than is kept before that is known here"
            );
            self.unheard.insert(from, epoch);
        }
    }

    /// Whether that is what a node says that joins, and this one is in no view that is known here.
    fn may_join(&self, from: NodeId, message: &Message) -> bool {
        let stranger = !self.view.chain.contains(&from) && !self.view.syncing.contains(&from);
        let joins = matches!(
            message,
            Message::SnapshotWant { .. }
                | Message::SnapshotHad { .. }
                | Message::SnapshotSince { .. }
                | Message::SnapshotInPlace { .. }
                | Message::ImageHad { .. }
                | Message::Return { .. }
                | Message::Position { .. }
                | Message::Kept { .. }
                | Message::ClientGone { .. }
        );
        stranger && joins && !planted(Bug::JoinUnheard)
    }

    fn message(&mut self, from: NodeId, message: Message) -> Result<(), Failure> {
        if !self.is_due(from, &message) {
            self.not_due(from, "says what is not its part in this epoch");
            return Ok(());
        }
        let from_head = self.view.chain.first() == Some(&from);
        match message {
            Message::Chunk { all_acked, chunk } => {
                let mut frame = message::chunk_frame(chunk.len());
                frame.extend_from_slice(&chunk);
                self.chunk_arrived(from, all_acked, frame.into())
            }
            Message::StreamWant { from: seq } => {
                self.send_stream(from, seq)?;
                Ok(())
            }
            Message::Position { seq } => self.position_arrived(from, seq),
            Message::Resume { seq, last } if from_head => self.resume(seq, last),
            Message::BlockWant { ino, block } => self.block_wanted(from, ino, block),
            Message::Block { ino, block, seq, answer, bytes } => {
                self.block_arrived(from, (ino, block), seq, answer, bytes)
            }
            Message::Return { incarnation, last, epoch, published } => {
                self.return_wanted(from, incarnation, (last, epoch), published)?;
                Ok(())
            }
            Message::SnapshotWant { incarnation } => {
                self.snapshot_wanted(from, incarnation, (false, false), None)
            }
            Message::SnapshotHad { incarnation } => {
                self.snapshot_wanted(from, incarnation, (true, false), None)
            }
            Message::SnapshotSince { incarnation, had, published, last, epoch } => {
                let claim = Claim { published, last, epoch };
                self.snapshot_wanted(from, incarnation, (had, false), Some(claim))
            }
            Message::SnapshotInPlace { incarnation, published, last, epoch } => {
                let claim = Claim { published, last, epoch };
                self.snapshot_wanted(from, incarnation, (true, true), Some(claim))
            }
            Message::ImageHad { incarnation, published, last, epoch }
                if self.volume.has_snapshots() =>
            {
                let claim = Claim { published, last, epoch };
                self.image_wanted(from, incarnation, Some(claim))
            }
            // (What it says next is of that.)
            Message::ImageHad { .. } => Ok(()),
            Message::SnapshotAck { seq, piece } => {
                self.snapshot_acked(from, seq, piece);
                Ok(())
            }
            Message::SnapshotLack { seq, piece, id, lacks, doubts } => {
                self.offer_answered(from, seq, (piece, id), &lacks, &doubts);
                Ok(())
            }
            Message::SnapshotOffer { seq, piece, id, offers, sure } if from_head => {
                self.offer_arrived(seq, (piece, id), &offers, &sure)
            }
            Message::SnapshotDiffers { seq, piece, id, ranges } => {
                self.ranges_answered(from, seq, (piece, id), &ranges);
                Ok(())
            }
            Message::SnapshotItems { seq, piece, id, last_inode, raw } if from_head => {
                self.items_arrived(seq, (piece, id), last_inode, &raw)
            }
            Message::SnapshotSame { seq, piece, id, parts } if from_head => {
                self.same_arrived(seq, (piece, id), &parts)
            }
            Message::Snapshot { seq, piece, last_inode, end, waits, raw } if from_head => {
                self.snapshot_arrived(seq, piece, last_inode, (end, waits), &raw)
            }
            Message::Image { seq, piece, last_inode, end, waits, raw } if from_head => {
                self.image_arrived(seq, piece, last_inode, (end, waits), &raw)
            }
            Message::Granted { client, ino, token, mode, errno, stream, span } if from_head => {
                self.granted(client, ino, token, (mode, span), errno, stream);
                Ok(())
            }
            Message::Numbers { client, token, first, count } if from_head => {
                self.numbers_arrived(client, token, first, count);
                Ok(())
            }
            Message::Recall { client, ino, token } if from_head => {
                self.recall_wanted(client, ino, token);
                Ok(())
            }
            Message::Room { client, token, blocks } if from_head => {
                self.room_given(client, token, blocks);
                Ok(())
            }
            Message::AskAgain if from_head => {
                self.ask_again();
                Ok(())
            }
            Message::RoomSought if from_head => {
                self.agent.room_sought = Some(self.env.now);
                Ok(())
            }
            Message::LockDone { client, token, errno, found } if from_head => {
                self.lock_answered(client, token, errno, found)
            }
            Message::LockSoleTold { client, ino, token, given } if from_head => {
                self.sole_told(client, (ino, token), given)
            }
            Message::HeirSought { heir, token, user, secret } if from_head => {
                self.heir_sought(heir, token, (user, secret));
                Ok(())
            }
            Message::HeirFound { client, token, given } if from_head => {
                self.heirs_found(client, token, given);
                Ok(())
            }
            Message::LockFree { client } if from_head => {
                self.lock_freed(client);
                Ok(())
            }
            Message::Progress { client, replicated, .. } if from_head => {
                // What every member has this node has as well only where it is one; a client that stays is told anew then.
                if matches!(self.role(), Role::Head | Role::Member)
                    && let Some(client) = self.agent.clients.get_mut(&client)
                {
                    client.set_replicated(replicated);
                }
                Ok(())
            }
            other => self.head_message(from, other),
        }
    }

    fn not_due(&mut self, from: NodeId, what: &str) {
        self.env.counters.not_due += 1;
        if self.env.counters.not_due.is_power_of_two() {
            log::warn!("node {from} {what}; it is not listened to");
        }
    }

    /// Whether chunks of this epoch may come from `from`: down the chain, from the head (that sends what is missing, and
    /// to who joins), and to a head that takes over from who holds more than it.
    fn sends_chunks(&self, from: NodeId) -> bool {
        let from_head = self.view.chain.first() == Some(&from);
        match self.role() {
            Role::Head => !self.is_ready() && from != self.me() && self.view.chain.contains(&from),
            Role::Member => from_head || self.predecessor() == Some(from),
            Role::Syncing => from_head,
            Role::Outside => false,
        }
    }

    /// Whether `from` has the part in this epoch that goes with the message. Who it is, its link has shown.
    fn is_due(&self, from: NodeId, message: &Message) -> bool {
        let (member, joins) = (self.view.chain.contains(&from), self.view.syncing.contains(&from));
        let from_head = self.view.chain.first() == Some(&from);
        match message {
            Message::Chunk { .. } => self.sends_chunks(from) || planted(Bug::ChunkOfAnyone),
            // All that the volume holds goes out by it.
            Message::StreamWant { .. } => {
                from_head || self.successor() == Some(from) || self.is_head() && joins
            }
            Message::SnapshotWant { .. }
            | Message::SnapshotHad { .. }
            | Message::SnapshotSince { .. }
            | Message::SnapshotInPlace { .. }
            | Message::ImageHad { .. }
            | Message::SnapshotAck { .. }
            | Message::SnapshotDiffers { .. }
            | Message::SnapshotLack { .. }
            | Message::Return { .. } => joins,
            Message::Position { .. }
            | Message::ChunkAck { .. }
            | Message::Kept { .. }
            | Message::ClientGone { .. } => member || joins,
            _ => member,
        }
    }

    fn me(&self) -> NodeId {
        self.env.config.node
    }

    /// The part of this node in the view.
    pub fn role(&self) -> Role {
        self.view.role(self.me())
    }

    /// The chain agreed on the stream; leases may be granted.
    fn is_ready(&self) -> bool {
        match &self.part {
            part::Part::Head(head) => head.ready,
            part::Part::Member => true,
            part::Part::Syncing(_) | part::Part::Outside => false,
        }
    }

    fn is_head(&self) -> bool {
        self.role() == Role::Head
    }

    /// Whether clients are served.
    fn serves(&self) -> bool {
        (!self.fenced || planted(Bug::FencedServes))
            && matches!(self.role(), Role::Head | Role::Member)
    }

    fn send(&mut self, to: NodeId, message: Message) {
        let (kind, body) = message.into_body(self.view.epoch);
        // Only chunks may overtake each other: their sequence puts them in order again. (And acknowledgements bytes that
        // wait for the link: `nicfs::queue_up`.)
        let class = Class::LowLatency;
        self.env.out.push(Effect::Send { to, class, kind, body });
    }

    #[allow(clippy::wrong_self_convention)] // "to" is a direction here, not a conversion
    fn to_head(&mut self, message: Message) {
        match self.view.chain.first().copied() {
            Some(head) if head == self.me() => self.local.push_back(message),
            Some(head) => self.send(head, message),
            None => {}
        }
    }

    #[allow(clippy::wrong_self_convention)] // "to" is a direction here, not a conversion
    fn to_agent(&mut self, client: ClientId, message: Message) {
        if client.node() == self.me() {
            self.local.push_back(message);
        } else {
            self.send(client.node(), message);
        }
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn arena_bytes(&self) -> u64 {
        self.volume.superblock().capacity_blocks * storage::limits::BLOCK_BYTES
    }

    /// Whether chunks that come are passed on to another node.
    pub fn passes_on(&self) -> bool {
        self.successor().is_some()
    }

    /// The incarnation of the log of which a message holds entries, as far as this node is the head and knows it; a chunk says it
    /// itself.
    pub fn incarnation_of(&self, kind: u16, body: &[u8]) -> Option<u32> {
        let client = message::entries_client(kind, body)?;
        self.part.head()?.known.get(&client).map(|known| known.incarnation)
    }

    /// Position in the stream: what is in the ring.
    pub fn position(&self) -> StreamSeq {
        self.ring.kept_to()
    }

    /// Up to where the stream is acknowledged, as far as it is known here.
    pub fn acknowledged(&self) -> StreamSeq {
        self.member.all_acked
    }

    /// What this node holds of the stream: nothing while a snapshot comes.
    pub fn holds(&self) -> StreamSeq {
        if self.member.incoming.is_some() { StreamSeq(0) } else { self.ring.kept_to() }
    }

    /// A chunk that the ring keeps, and its body: for judges, who want to know what became of each operation.
    pub fn chunk(&self, seq: StreamSeq) -> Option<(ChunkHeader, Vec<u8>)> {
        let kept = self.ring.get(seq)?;
        Some((kept.header, self.ring.body(kept).ok()?))
    }

    /// The published state.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// What the node counts.
    pub fn counters(&self) -> &Counters {
        &self.env.counters
    }

    /// Everything that `status` shows.
    pub fn status(&self) -> NodeStatus {
        NodeStatus {
            node: self.me(),
            role: self.role(),
            ready: self.is_ready(),
            fenced: self.fenced,
            epoch: self.view.epoch,
            chain: self.view.chain.clone(),
            syncing: self.view.syncing.clone(),
            min_replicas: self.view.least,
            level: self.view.level,
            too_few: self.too_few(),
            stream: self.ring.last(),
            applied: self.member.applied,
            published: self.member.published,
            all_acked: self.member.all_acked,
            leases: self.part.head().map_or(0, |head| head.leases.len()),
            locks: self.part.head().map_or(0, |head| head.locks.len()),
            own_locks: self.own_locks(),
            unplaced: self.volume.unplaced(),
            scrub: self.scrub_status(),
            snapshots: self.volume.snapshot_count() as u64,
            snapshot_blocks: self.volume.snapshot_blocks(),
            joins: self.join_status(),
            catching_up: self.part.head().map_or(Vec::new(), |head| head.lacked(self.ring.last())),
            requests: self.agent.requests.len(),
            recalls: self.agent.recalls.len(),
            counters: self.env.counters,
            failure: self.failure.as_ref().map(ToString::to_string),
            clients: self
                .agent
                .clients
                .values()
                .map(|c| ClientStatus {
                    client: c.id,
                    pid: c.pid,
                    start_time: c.start_time,
                    uid: c.identity.uid,
                    pending_bytes: c.pending_bytes(),
                    settled: c.settled,
                    published: c.published,
                    replicated: c.replicated,
                    leases: c.lease_count() as usize,
                    refusals: c.refusals,
                })
                .collect(),
        }
    }
}

/// See [`Node::status`].
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct NodeStatus {
    pub node: NodeId,
    pub role: Role,
    pub ready: bool,
    pub fenced: bool,
    pub epoch: Epoch,
    pub chain: Vec<NodeId>,
    pub syncing: Vec<NodeId>,
    /// So many members must hold what is acknowledged.
    pub min_replicas: usize,
    /// What all nodes of the volume understand.
    pub level: Level,
    /// The chain has fewer: nothing is acknowledged.
    pub too_few: bool,
    pub stream: StreamSeq,
    pub applied: StreamSeq,
    pub published: StreamSeq,
    pub all_acked: StreamSeq,
    pub leases: usize,
    /// Ranges of file locks that the head has given out; 0 on others.
    pub locks: usize,
    /// Those that clients of this node have on files that the head has left to them.
    pub own_locks: usize,
    /// Inodes that are not yet where the directories above want them.
    pub unplaced: u64,
    /// Nodes that are sent a snapshot.
    pub joins: Vec<snapshot::JoinStatus>,
    /// Nodes that have that, and how many chunks of the stream each has yet to acknowledge.
    pub catching_up: Vec<(NodeId, u64)>,
    pub scrub: scrub::ScrubStatus,
    /// Snapshots, and blocks that only they have.
    pub snapshots: u64,
    /// See `snapshots`.
    pub snapshot_blocks: u64,
    pub requests: usize,
    pub recalls: usize,
    pub counters: Counters,
    pub failure: Option<String>,
    pub clients: Vec<ClientStatus>,
}

/// A client of [`NodeStatus`].
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct ClientStatus {
    pub client: ClientId,
    pub pid: u32,
    pub start_time: u64,
    pub uid: u32,
    pub pending_bytes: u64,
    pub settled: Sequence,
    pub published: Sequence,
    pub replicated: Sequence,
    pub leases: usize,
    pub refusals: u64,
}
