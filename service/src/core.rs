//! The core of nicfs: one state machine that owns everything, waits for nothing and calls nothing
//! but the region's memory. One node plays several parts at once:
//!
//! - **agent** of the clients on its machine (`agent`, `requests`): fetches their logs, answers
//!   their requests, writes and revokes their lease words;
//! - **head** of the chain, if it is the first of it (`head`): validates, orders everything into one
//!   stream of chunks, manages leases and inode numbers;
//! - **member** (`stream`): keeps the stream in its ring, passes it on, acknowledges, applies it to
//!   its volume and publishes.
//!
//! What an agent asks of the head goes through `Node::to_head`, also when both are this node.

mod agent;
pub mod client;
mod closing;
mod coalesce;
pub mod event;
pub mod frame;
mod head;
mod join;
pub mod lease;
pub mod limits;
mod locking;
pub mod locks;
mod member;
pub mod message;
mod parts;
mod past;
mod publish;
mod reach;
mod requests;
mod restart;
pub mod ring;
mod room;
mod share;
mod snapshot;
mod stream;
pub mod table;
mod turn;
mod users;
pub mod validate;
mod view;

use std::collections::VecDeque;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::random::Random;
use base::wire::Corrupt;
use base::{ClientId, Epoch, Nanos, NodeId, Sequence, StreamSeq};
use cluster::transport::Class;
use storage::format::chunk::ChunkHeader;
use storage::format::entry::{self, Header, Op, entry_bytes};
use storage::format::superblock::Durability;
use storage::media::{Media, MediaError};
use storage::volume::{Fault, Volume};

use client::Client;
use message::Message;
use ring::Ring;
use stream::Waits;
use table::Table;

pub use event::{Copier, Effect, Event};

/// Why a client's operations were refused: what is not there was refused before, mostly, which is the reason to tell.
fn cause(before: u16, errno: u16) -> u16 {
    let follows = [base::Errno::NOENT.0, base::Errno::STALE.0].contains(&errno);
    if follows && before != 0 { before } else { errno }
}

/// Bodies above this travel in the bulk class.
const BULK_MIN: usize = 64 * 1024;
/// Messages to this node itself handled in one go before the driver gets a turn.
const LOCAL_MAX: usize = 10_000;
/// Messages kept of epochs to come. (What is beyond it is lost, and only a link that is renewed repeats it.)
const EARLY_MAX: usize = 4096;

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
    /// hostd copies, and cannot be stopped.
    Host(String),
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
    pub publishes: u64,
    pub copied_bytes: u64,
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
    /// Bytes of snapshots that this node took in to join.
    pub snapshot_bytes: u64,
    /// Nodes that came back, and were sent what they had missed of the stream.
    pub returns: u64,
    pub locks: u64,
    pub locks_refused: u64,
    /// Entries that are parts of operations too long for a turn.
    pub parts: u64,
    /// Writes that were taken out of chunks because their ends do not show them, and their bytes.
    pub coalesced: u64,
    pub coalesced_bytes: u64,
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
    config: NodeConfig,
    media: Arc<dyn Media>,
    random: Random,
    volume: Volume,
    ring: Ring,
    /// Why nothing works any more.
    failure: Option<Failure>,
    counters: Counters,
    realtime_offset: u64,

    epoch: Epoch,
    chain: Vec<NodeId>,
    syncing: Vec<NodeId>,
    /// So many members must hold what is acknowledged.
    least: usize,
    /// So many the chain has when it is whole.
    wanted: usize,
    fenced: bool,
    /// The service is about to end.
    closing: Option<closing::Closing>,
    /// As the clients were told.
    serves_until: Nanos,
    /// The chain agreed on the stream; leases may be granted.
    ready: bool,
    /// Messages of views that are not here yet.
    early: VecDeque<(NodeId, Epoch, Message)>,
    /// What this node's parts have to say to each other.
    local: VecDeque<Message>,
    next_token: u64,
    /// What was done in this turn.
    turn: turn::Turn,
    /// Locks of files: of clients here, and, at the head, of all.
    locking: locking::Locking,
    /// Sessions that have ended while their processes live: those of this node, and, at the head, of all.
    keeping: past::Keeping,

    agent: agent::Agent,
    member: member::Member,
    join: join::Join,
    /// Made anew by each takeover, and empty elsewhere.
    head: head::Head,
    now: Nanos,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("node", &self.config.node)
            .field("epoch", &self.epoch)
            .field("chain", &self.chain)
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

/// Class of a Chunk message of that length.
fn class_of(len: usize) -> Class {
    if len > BULK_MIN { Class::Bulk } else { Class::LowLatency }
}

impl Node {
    /// Opens the node's region and replays what its stream ring holds beyond the published state.
    pub fn new(config: NodeConfig, media: Arc<dyn Media>, random: Random) -> Result<Self, Failure> {
        let volume = Volume::open(Arc::clone(&media))?;
        storage::volume::drop_half_roots(&*media, &volume.superblock().uuid)?;
        let published = volume.root().stream_seq;
        let ring = Ring::open(Arc::clone(&media), config.ring_bytes, published)?;
        let durability = volume.superblock().durability;
        let strict = durability == Durability::Pmem;
        let (table, found) = Table::open(Arc::clone(&media), strict, config.boot, config.secret)?;
        let next_inode = volume.last_inode().0.saturating_add(1);
        // A copy: what else is drawn stays as it was.
        let run = random.clone().next_u64() | 1;
        let mut node = Self {
            config,
            media,
            random,
            volume,
            ring,
            failure: None,
            counters: Counters::default(),
            realtime_offset: 0,
            epoch: Epoch(0),
            chain: Vec::new(),
            syncing: Vec::new(),
            least: 1,
            wanted: 1,
            fenced: false,
            closing: None,
            serves_until: 0,
            ready: false,
            early: VecDeque::new(),
            local: VecDeque::new(),
            next_token: 1,
            turn: turn::Turn::default(),
            locking: locking::Locking::new(run),
            keeping: past::Keeping::default(),
            agent: agent::Agent::new(table),
            member: member::Member::new(published),
            join: join::Join::default(),
            head: head::Head::new(next_inode),
            now: 0,
        };
        if node.ring.oldest().0 > published.0 + 1 {
            // Ended in the middle of joining: what lies here is no state of the volume, and the
            // coordinator was not told that it is.
            log::warn!("the region holds half a snapshot; the node joins anew");
            node.ring.restart(published)?;
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
            node.ring.restart(published)?;
        }
        let mut replayed = restart::Replayed::default();
        while node.member.applied < node.ring.last() {
            node.apply_next(Waits::Never)?;
            node.note_replayed(&mut replayed)?;
        }
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
        self.realtime_offset = offset;
    }

    /// Takes note of what happened.
    pub fn apply(&mut self, now: Nanos, event: Event, out: &mut Vec<Effect>) {
        self.now = now;
        if self.failure.is_some() {
            return;
        }
        self.begin_turn();
        if let Err(failure) = self.handle(event, out) {
            self.fail(failure);
        }
    }

    fn handle(&mut self, event: Event, out: &mut Vec<Effect>) -> Result<(), Failure> {
        match event {
            Event::Tick => self.tick(out)?,
            Event::Doorbell(client) => self.rang(client, out)?,
            Event::Frame { from, kind, body } => self.frame(from, kind, body, out)?,
            Event::PeerUp(node) => self.peer_up(node, out)?,
            Event::PeerDown(node) => self.peer_down(node),
            Event::View { epoch, chain, syncing, lapse } => {
                self.on_view(epoch, chain, syncing, lapse, out)?;
            }
            Event::Needs { members, replicas } => {
                self.wanted = replicas;
                self.needs(members, out)?;
            }
            Event::ServesUntil(until) => self.serves_until(until),
            Event::Fenced(fenced) => self.fence(fenced, out)?,
            Event::Attach { token, pid, start_time, uid, gid, groups, lanes } => {
                let identity = message::Identity { uid, gid, groups };
                self.attach(token, (pid, start_time), identity, lanes, out)?;
            }
            Event::ClientGone(client) => self.client_gone(client, out)?,
            Event::ArenaQuery { token, arena } => {
                let class = self.volume.arena_class(arena);
                let bytes = self.arena_bytes();
                out.push(Effect::Arena { token, class, bytes });
            }
            Event::CopiesDone { id, bad } => self.copies_done(id, &bad)?,
            Event::HostUp(host) => self.member.host = Some(host),
            Event::HostDown => self.host_down(),
            Event::Closing => {
                self.begin_closing();
                self.closing_step(out)?;
            }
            Event::Shutdown => self.shutdown(out)?,
        }
        self.settle_down(out)
    }

    /// Handles what the event set in motion inside this node.
    fn settle_down(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        for _ in 0..LOCAL_MAX {
            if let Some(message) = self.local.pop_front() {
                let me = self.config.node;
                self.message(me, message, out)?;
            } else if !self.step_recalls(out)? && !self.step_requests(out)? && self.local.is_empty()
            {
                return Ok(());
            }
        }
        Ok(())
    }

    fn fail(&mut self, failure: Failure) {
        log::error!("node {} stops: {failure}", self.config.node);
        for client in self.agent.clients.values_mut() {
            let settled = client.settled;
            client.dismiss(settled);
        }
        self.failure = Some(failure);
    }

    /// Why the node stopped, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// One slice of background work; `true` when there is more to do at once.
    pub fn work(&mut self, now: Nanos, out: &mut Vec<Effect>) -> bool {
        self.now = now;
        if self.failure.is_some() {
            return false;
        }
        self.begin_turn();
        let worked = self.work_slice(out).and_then(|more| {
            self.settle_down(out)?;
            // A request that was granted its lease just now may wait for a publication: who slept first
            // would answer it at the next timer.
            Ok(more || self.publishes_at_once() || self.turn.unanswered)
        });
        worked.unwrap_or_else(|failure| {
            self.fail(failure);
            false
        })
    }

    fn work_slice(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        // While a snapshot comes, the ring stands at the snapshot's end and the state before it.
        let behind = self.join.incoming.is_none() && self.member.applied < self.ring.last();
        if behind && self.apply_next(Waits::ForPublication)? {
            self.take_over_caught_up(out)?;
            return Ok(true);
        }
        self.retry_stalled(out)?;
        let more = self.publish_step(out)? || self.turn.cut_short;
        // What waited for a publication goes on after it.
        let more = more || behind && self.member.job.is_none();
        let more = self.discard_step()? || more;
        let more = self.place_step(out)? || more;
        Ok(more || self.snapshot_step(out)?)
    }

    fn tick(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        // What clients took of the file system below comes back first.
        self.mend_logs(out)?;
        self.look_below()?;
        self.return_room(out);
        self.collect_closed(out)?;
        self.collect_waiting()?;
        self.collect_dozing(out)?;
        self.collect_ended(out)?;
        self.expel_broken(out)?;
        self.closing_step(out)?;
        self.join_again(out);
        self.watch_acks(out);
        self.forget_lingering(out)?;
        self.forget_kept(out)?;
        self.release_grants(out);
        self.serve_early_locks(out)?;
        self.promote_followers(out);
        self.remove_finished_clients()?;
        self.retire_expelled(out)
    }

    /// When `Tick` is due next, besides every 100 ms.
    pub fn deadline(&self) -> Option<Nanos> {
        let recalls = self.agent.recalls.iter().map(|r| r.look_at);
        let hold = self.config.limits.hold;
        let dozing = self.agent.clients.values().filter_map(|c| c.dozing_since.map(|t| t + hold));
        let publish = self.publish_deadline();
        let lapsed = self.head.lingering.values().copied().min();
        let grants = (!self.head.held_grants.is_empty() && self.now < self.head.grants_from)
            .then_some(self.head.grants_from);
        let closing = self.closing_deadline();
        let kept = self.kept_deadline();
        recalls
            .chain(dozing)
            .chain(publish)
            .chain(lapsed)
            .chain(grants)
            .chain(closing)
            .chain(kept)
            .chain(self.waiting_deadline())
            .min()
    }

    fn frame(
        &mut self,
        from: NodeId,
        kind: u16,
        body: Vec<u8>,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if kind == message::CHUNK
            && let Ok((epoch, all_acked)) = message::chunk_prefix(&body)
            && epoch == self.epoch
        {
            // The bulk of all bytes: passed on in the memory in which it came.
            if !self.sends_chunks(from) && !planted(Bug::ChunkOfAnyone) {
                self.not_due(from, "sends a chunk");
                return Ok(());
            }
            return self.chunk_arrived(from, all_acked, body, out);
        }
        match Message::take(kind, body) {
            Err(e) => {
                self.counters.bad_messages += 1;
                log::warn!("message of node {from} refused: {e}");
                Ok(())
            }
            Ok((epoch, _)) if epoch < self.epoch && !planted(Bug::OldEpochAccepted) => {
                self.counters.old_epoch += 1;
                Ok(())
            }
            Ok((epoch, message)) if epoch > self.epoch => {
                // The peer knows the new view already; ours is on its way.
                if self.early.len() < EARLY_MAX {
                    self.early.push_back((from, epoch, message));
                }
                Ok(())
            }
            Ok((epoch, message)) if self.may_join(from, &message) => {
                // So may the peer in the same epoch: who joins is in a view of its own.
                if self.early.len() < EARLY_MAX {
                    self.early.push_back((from, epoch, message));
                }
                Ok(())
            }
            Ok((_, message)) => self.message(from, message, out),
        }
    }

    /// Whether that is what a node says that joins, and this one is in no view that is known here.
    fn may_join(&self, from: NodeId, message: &Message) -> bool {
        let stranger = !self.chain.contains(&from) && !self.syncing.contains(&from);
        let joins = matches!(
            message,
            Message::SnapshotWant { .. }
                | Message::Return { .. }
                | Message::Position { .. }
                | Message::Kept { .. }
                | Message::ClientGone { .. }
        );
        stranger && joins && !planted(Bug::JoinUnheard)
    }

    fn message(
        &mut self,
        from: NodeId,
        message: Message,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.is_due(from, &message) {
            self.not_due(from, "says what is not its part in this epoch");
            return Ok(());
        }
        let from_head = self.chain.first() == Some(&from);
        match message {
            Message::Chunk { all_acked, chunk } => {
                let mut frame = message::chunk_frame(chunk.len());
                frame.extend_from_slice(&chunk);
                self.chunk_arrived(from, all_acked, frame, out)
            }
            Message::StreamWant { from: seq } => {
                self.send_stream(from, seq, out)?;
                Ok(())
            }
            Message::Position { seq } => self.position_arrived(from, seq, out),
            Message::Resume { seq, last } if from_head => self.resume(seq, last, out),
            Message::Return { incarnation, last, epoch, published } => {
                self.return_wanted(from, incarnation, (last, epoch), published, out);
                Ok(())
            }
            Message::SnapshotWant { incarnation } => self.snapshot_wanted(from, incarnation),
            Message::SnapshotAck { seq, piece } => {
                self.snapshot_acked(from, seq, piece);
                Ok(())
            }
            Message::Snapshot { seq, piece, last_inode, end, waits, raw } if from_head => {
                self.snapshot_arrived(seq, piece, last_inode, (end, waits), &raw, out)
            }
            Message::Granted { client, ino, token, mode, errno, stream } if from_head => {
                self.granted(client, ino, token, mode, errno, stream);
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
                self.agent.room_sought = Some(self.now);
                Ok(())
            }
            Message::LockDone { client, token, errno, found } if from_head => {
                self.lock_answered(client, token, errno, found);
                Ok(())
            }
            Message::LockFree { client } if from_head => {
                self.lock_freed(client);
                Ok(())
            }
            Message::Progress { client, replicated, .. } if from_head => {
                if let Some(client) = self.agent.clients.get_mut(&client) {
                    client.set_replicated(replicated);
                }
                Ok(())
            }
            other => self.head_message(from, other, out),
        }
    }

    fn not_due(&mut self, from: NodeId, what: &str) {
        self.counters.not_due += 1;
        if self.counters.not_due.is_power_of_two() {
            log::warn!("node {from} {what}; it is not listened to");
        }
    }

    /// Whether chunks of this epoch may come from `from`: down the chain, from the head (that sends what is missing, and
    /// to who joins), and to a head that takes over from who holds more than it.
    fn sends_chunks(&self, from: NodeId) -> bool {
        let from_head = self.chain.first() == Some(&from);
        match self.role() {
            Role::Head => !self.ready && from != self.me() && self.chain.contains(&from),
            Role::Member => from_head || self.predecessor() == Some(from),
            Role::Syncing => from_head,
            Role::Outside => false,
        }
    }

    /// Whether `from` has the part in this epoch that goes with the message. Who it is, its link has shown.
    fn is_due(&self, from: NodeId, message: &Message) -> bool {
        let (member, joins) = (self.chain.contains(&from), self.syncing.contains(&from));
        let from_head = self.chain.first() == Some(&from);
        match message {
            Message::Chunk { .. } => self.sends_chunks(from) || planted(Bug::ChunkOfAnyone),
            // All that the volume holds goes out by it.
            Message::StreamWant { .. } => {
                from_head || self.successor() == Some(from) || self.is_head() && joins
            }
            Message::SnapshotWant { .. } | Message::SnapshotAck { .. } | Message::Return { .. } => {
                joins
            }
            Message::Position { .. }
            | Message::ChunkAck { .. }
            | Message::Kept { .. }
            | Message::ClientGone { .. } => member || joins,
            _ => member,
        }
    }

    fn me(&self) -> NodeId {
        self.config.node
    }

    /// The part of this node in the view.
    pub fn role(&self) -> Role {
        if self.chain.first() == Some(&self.me()) {
            Role::Head
        } else if self.chain.contains(&self.me()) {
            Role::Member
        } else if self.syncing.contains(&self.me()) {
            Role::Syncing
        } else {
            Role::Outside
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

    fn send(&self, to: NodeId, message: Message, out: &mut Vec<Effect>) {
        let (kind, body) = message.into_body(self.epoch);
        // Only chunks may overtake each other: their sequence puts them in order again. (And acknowledgements bytes that
        // wait for the link: `nicfs::queue_up`.)
        let class = Class::LowLatency;
        out.push(Effect::Send { to, class, kind, body });
    }

    #[allow(clippy::wrong_self_convention)] // "to" is a direction here, not a conversion
    fn to_head(&mut self, message: Message, out: &mut Vec<Effect>) {
        match self.chain.first().copied() {
            Some(head) if head == self.me() => self.local.push_back(message),
            Some(head) => self.send(head, message, out),
            None => {}
        }
    }

    #[allow(clippy::wrong_self_convention)] // "to" is a direction here, not a conversion
    fn to_agent(&mut self, client: ClientId, message: Message, out: &mut Vec<Effect>) {
        if client.node() == self.me() {
            self.local.push_back(message);
        } else {
            self.send(client.node(), message, out);
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

    /// Position in the stream.
    pub fn position(&self) -> StreamSeq {
        self.ring.last()
    }

    /// Up to where the stream is acknowledged, as far as it is known here.
    pub fn acknowledged(&self) -> StreamSeq {
        self.member.all_acked
    }

    /// What this node holds of the stream: nothing while a snapshot comes.
    pub fn holds(&self) -> StreamSeq {
        if self.join.incoming.is_some() { StreamSeq(0) } else { self.ring.last() }
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
        &self.counters
    }

    /// Everything that `status` shows.
    pub fn status(&self) -> NodeStatus {
        NodeStatus {
            node: self.me(),
            role: self.role(),
            ready: self.ready,
            fenced: self.fenced,
            epoch: self.epoch,
            chain: self.chain.clone(),
            syncing: self.syncing.clone(),
            min_replicas: self.least,
            too_few: self.too_few(),
            stream: self.ring.last(),
            applied: self.member.applied,
            published: self.member.published,
            all_acked: self.member.all_acked,
            leases: self.head.leases.len(),
            locks: self.locking.table.len(),
            unplaced: self.volume.unplaced(),
            requests: self.agent.requests.len(),
            recalls: self.agent.recalls.len(),
            counters: self.counters,
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
                    leases: c.leases().len(),
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
    /// The chain has fewer: nothing is acknowledged.
    pub too_few: bool,
    pub stream: StreamSeq,
    pub applied: StreamSeq,
    pub published: StreamSeq,
    pub all_acked: StreamSeq,
    pub leases: usize,
    /// Ranges of file locks that the head has given out; 0 on others.
    pub locks: usize,
    /// Inodes that are not yet where the directories above want them.
    pub unplaced: u64,
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
