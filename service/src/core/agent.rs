//! The agent: serves the clients of this machine.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Nanos, Sequence};
use storage::format::clients::{GROUPS_MAX, Record};
use storage::format::control::{self, Descriptor, LeaseMode, RECALL_TIMEOUT_MS};
use storage::format::entry::Op;
use storage::limits::{LANES_MAX, RPC_SLOTS};
use storage::media::{MediaError, Segment};

use super::client::{Batch, Client};
use super::message::{Identity, Message, Raw};
use super::requests::Pending;
use super::share::Waiting;
use super::table::Table;
use super::users::Users;
use super::{Effect, Failure, Node, Role};

/// A lease may be used for at least this long before it is taken back: without it two clients
/// that each need two inodes could take them from each other for ever.
const HOLD: Nanos = 300_000;
/// Between two looks at an operation under way.
const LOOK: Nanos = 50_000;
/// Stores that their thread has done are where others see them after this time; nanoseconds in truth.
const ARRIVAL: Nanos = 1_000_000;

/// Why a client is expelled: it is stopped...
const STOPPED: &str = "it was stopped inside an operation";
/// ... or a mount does not let go.
const KEPT: &str = "its kernel keeps what it may keep no more";
/// ... or a process takes the space of others.
const RESIZED: &str = "its log was made longer or shorter";
/// Between two looks at the sizes of logs.
const LOGS_PAUSE: Nanos = 20_000_000;

/// A lease on its way back.
#[derive(Debug)]
pub(super) struct Recall {
    client: ClientId,
    ino: InodeId,
    token: u64,
    pub(super) look_at: Nanos,
    revoked: bool,
    /// The head was told that the lease is held, and is told when it is not.
    reported: bool,
    give_up_at: Nanos,
    /// The client was told that a kernel of its keeps what it may not.
    told: bool,
    inside: Vec<(usize, u64)>,
    /// Nobody is inside, and the newest entry is not whole, since then.
    unsound_since: Option<Nanos>,
}

impl Recall {
    fn new(client: ClientId, ino: InodeId, token: u64, look_at: Nanos) -> Self {
        let (revoked, reported, told, inside) = (false, false, false, Vec::new());
        let (give_up_at, unsound_since) = (0, None);
        Self {
            client,
            ino,
            token,
            look_at,
            revoked,
            reported,
            give_up_at,
            told,
            inside,
            unsound_since,
        }
    }
}

/// What a node has as the agent of the clients on its machine, whatever its part in the chain.
#[derive(Debug)]
pub(super) struct Agent {
    pub clients: BTreeMap<ClientId, Client>,
    /// Those that are looked at in each round.
    pub active: BTreeSet<ClientId>,
    /// What outlives this process of them.
    pub table: Table,
    /// Clients of an earlier run whose logs count if this node kept its place in the chain.
    pub taken_up: bool,
    /// What users have asked for lately.
    pub users: Users,
    /// Questions that are not answered yet.
    pub requests: Vec<Pending>,
    /// Leases that are being taken back.
    pub recalls: Vec<Recall>,
    pub next_segment: u32,
    /// Who waits beside whom.
    pub waiting: Waiting,
    pub logs_seen: Nanos,
    /// When somebody got no space although some was set aside.
    pub room_sought: Option<Nanos>,
}

impl Agent {
    /// Without clients.
    pub(super) fn new(table: Table) -> Self {
        Self {
            clients: BTreeMap::new(),
            active: BTreeSet::new(),
            table,
            taken_up: false,
            users: Users::default(),
            requests: Vec::new(),
            recalls: Vec::new(),
            next_segment: 0,
            waiting: Waiting::default(),
            logs_seen: 0,
            room_sought: None,
        }
    }
}

impl Node {
    /// Why a process of this user finds no place. Some are left for root: nobody shuts the administrator out.
    fn crowd(&self, uid: u32) -> Option<&'static str> {
        let (all, most) = (self.agent.clients.len(), self.config.clients_max as usize);
        let own = self.agent.clients.values().filter(|c| c.identity.uid == uid).count();
        let unbound = uid == 0;
        if own >= self.config.clients_per_user as usize && !unbound {
            return Some("too many clients of this user on a node");
        }
        let left = if unbound { 0 } else { most / 16 };
        (all >= most - left).then_some("too many clients on this node")
    }

    pub(super) fn attach(
        &mut self,
        token: u64,
        process: (u32, u64),
        identity: Identity,
        lanes: u32,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let mut refuse = |errno, text| {
            out.push(Effect::AttachRefused { token, errno, text });
            Ok(())
        };
        if !self.serves() {
            return refuse(Errno::AGAIN, "this node is not in the chain");
        }
        if self.closing.is_some() {
            return refuse(Errno::AGAIN, "this node is about to end");
        }
        if self.is_barred(identity.uid) {
            self.counters.barred += 1;
            return refuse(
                Errno::AGAIN,
                "clients of this user were expelled again and again: wait",
            );
        }
        if let Some(text) = self.crowd(identity.uid) {
            self.counters.crowded_out += 1;
            return refuse(Errno::NFILE, text);
        }
        let lanes = if lanes == 0 { self.config.lanes } else { lanes }.clamp(1, LANES_MAX as u32);
        let id = loop {
            let number = (self.random.next_u64() >> 33) as u32 | 1;
            let id = ClientId::new(self.me(), number);
            let unused =
                self.volume.published(id)?.0 == 0 && !self.member.settled.contains_key(&id);
            let unused = unused && !self.is_past(id);
            if unused && !self.agent.clients.contains_key(&id) {
                break id;
            }
        };
        let mut identity = identity;
        if identity.groups.len() > GROUPS_MAX {
            log::warn!("process {}: only its first {GROUPS_MAX} groups count", process.0);
            identity.groups.truncate(GROUPS_MAX);
        }
        let segment = self.agent.next_segment;
        self.agent.next_segment += 1;
        let descriptor = Descriptor {
            client: id,
            incarnation: self.random.next_u64() as u32 | 1,
            lanes,
            lane_bytes: self.config.lane_bytes,
            first_sequence: Sequence(1),
            node: self.me(),
            epoch: self.epoch,
            arena_bytes: self.arena_bytes(),
            keeps: identity.is_mount(),
        };
        let client = match self.make_log(segment, descriptor, &identity, process) {
            Ok(client) => client,
            Err(e) => {
                log::warn!("no log for process {}: {e}", process.0);
                out.push(Effect::AttachRefused {
                    token,
                    errno: Errno::NOSPC,
                    text: "no space for a log in the region",
                });
                return Ok(());
            }
        };
        client.set_lock_run(self.locking.run);
        client.set_leases_until(self.serves_until);
        self.agent.clients.insert(id, client);
        self.agent.active.insert(id);
        let up = Message::ClientUp {
            client: id,
            incarnation: descriptor.incarnation,
            settled: Sequence(0),
            identity,
            leases: Vec::new(),
            pins: Vec::new(),
            rights: Vec::new(),
            room: (0, 0),
        };
        self.to_head(up, out);
        out.push(Effect::Attached { token, client: id, segment });
        Ok(())
    }

    fn make_log(
        &mut self,
        segment: u32,
        descriptor: Descriptor,
        identity: &Identity,
        process: (u32, u64),
    ) -> Result<Client, MediaError> {
        let record = Record {
            client: descriptor.client,
            segment,
            incarnation: descriptor.incarnation,
            lanes: descriptor.lanes,
            lane_bytes: descriptor.lane_bytes,
            pid: process.0,
            start_time: process.1,
            epoch: descriptor.epoch,
            uid: identity.uid,
            gid: identity.gid,
            groups: identity.groups.clone(),
        };
        let bytes = descriptor.segment_bytes();
        if let Some(spare) = self.media.spare()?
            && spare.free < bytes
        {
            let text = "the file system below has no room for a log that is full";
            return Err(MediaError::Io(format!("{text}: {bytes} bytes, and {} left", spare.free)));
        }
        let row = self.agent.table.put(&record)?;
        let starts = self.agent.table.starts();
        let media = std::sync::Arc::clone(&self.media);
        Client::create(media, segment, descriptor, identity.clone(), process, row, starts)
    }

    /// The process is gone: its log is complete as it is.
    pub(super) fn client_gone(
        &mut self,
        id: ClientId,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return self.past_gone(id, out) };
        client.gone = true;
        self.agent.requests.retain(|r| r.client != id);
        self.agent.active.insert(id);
        self.drain_gone(id, out)
    }

    /// Fetches what is left of a dead client; when nothing is, the head is told.
    fn drain_gone(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if !planted(Bug::DeadTailDropped) && !self.drain(id, out)? {
            return Ok(());
        }
        if let Some(client) = self.agent.clients.get_mut(&id) {
            if client.wants_seal() {
                client.seal()?;
            }
            if let Some(why) = client.broken_end()? {
                log::warn!(
                    "client {:#x} (pid {}) has ended, and its log does not go on: {why}. They do not count",
                    id.0,
                    client.pid
                );
                self.counters.broken_logs += 1;
            }
        }
        self.agent.recalls.retain(|r| r.client != id);
        if let Some(client) = self.agent.clients.get_mut(&id)
            && client.expelled
        {
            // Its process goes on with what it has open.
            client.collect_closed()?;
            let inodes = if client.gone { Vec::new() } else { client.open() };
            self.to_head(Message::Kept { client: id, inodes }, out);
        }
        self.to_head(Message::ClientGone { client: id }, out);
        self.locking.drop_client(id);
        self.agent.active.remove(&id);
        self.member.publish_now = true;
        if let Some(client) = self.agent.clients.get_mut(&id) {
            client.dozing_since = None;
        }
        Ok(())
    }

    /// Log segments of dead clients go once everything in them is published.
    pub(super) fn remove_finished_clients(&mut self) -> Result<(), Failure> {
        self.finished(|c| c.gone).into_iter().try_for_each(|id| self.remove_client(id))
    }

    /// The same of expelled ones, whose processes go on.
    pub(super) fn retire_expelled(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        self.finished(|c| c.expelled).into_iter().try_for_each(|id| self.retire(id, out))
    }

    fn finished(&self, which: impl Fn(&Client) -> bool) -> Vec<ClientId> {
        let done =
            |c: &&Client| !self.agent.active.contains(&c.id) && c.published.0 + 1 >= c.next().0;
        self.agent.clients.values().filter(|c| which(c)).filter(done).map(|c| c.id).collect()
    }

    /// The row goes first: a log without one is removed at the next start.
    pub(super) fn remove_client(&mut self, id: ClientId) -> Result<(), Failure> {
        if let Some(client) = self.agent.clients.remove(&id) {
            let (segment, resized) = (Segment::Log(client.segment), client.resized);
            client.close();
            self.agent.table.remove(client.into_row())?;
            self.remove_log(segment, resized)?;
        }
        self.agent.active.remove(&id);
        self.agent.requests.retain(|r| r.client != id);
        Ok(())
    }

    /// Whoever has a descriptor keeps what lies in a file that is removed. From one who has shown what he
    /// does with it everything is taken.
    pub(super) fn remove_log(&mut self, segment: Segment, resized: bool) -> Result<(), Failure> {
        if resized {
            self.media.strip(Some(segment))?;
        }
        Ok(self.media.remove(segment)?)
    }

    /// A client rang its bell.
    pub(super) fn rang(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if !self.agent.clients.contains_key(&id) {
            return Ok(());
        }
        self.agent.active.insert(id);
        self.look_at(id, out)
    }

    /// An operation of a client of this node is in the stream: what it made or unlinked.
    pub(super) fn note_done(&mut self, id: ClientId, op: &Op<'_>) -> Result<(), Failure> {
        if let Op::Create { ino, .. } | Op::Tmpfile { ino, .. } = *op
            && let Some(client) = self.agent.clients.get_mut(&id)
        {
            client.note_made(ino);
        }
        self.note_unlinked(id, op)
    }

    /// A client of this node took the last name of an inode that it does not have open.
    fn note_unlinked(&mut self, id: ClientId, op: &Op<'_>) -> Result<(), Failure> {
        let ino = match *op {
            Op::Unlink { ino, open: false, .. } | Op::Rmdir { ino, open: false, .. } => ino,
            Op::Rename { replaced, open: false, exchange: false, .. } => replaced,
            _ => return Ok(()),
        };
        if let Some(client) = self.agent.clients.get_mut(&id)
            && client.has_pin(ino)
            && self.volume.attr(ino)?.is_none_or(|r| r.nlink == 0)
        {
            client.unpin(ino)?;
        }
        Ok(())
    }

    /// Looks at everything that a client may want.
    fn look_at(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.agent.clients.get(&id).is_some_and(|client| client.gone || client.expelled) {
            // What lies in its slots is asked by nobody.
            return self.drain_gone(id, out);
        }
        self.collect_requests(id)?;
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        if client.sync_request() > client.replicated {
            self.counters.syncs += 1;
            if planted(Bug::AckUnfetched) {
                let asked = client.sync_request();
                client.set_replicated(asked);
                return Ok(());
            }
            self.agent.waiting.note(id, self.now);
            self.take_some(id, out)?;
            self.persist_alone(id)?;
            if let Some(client) = self.agent.clients.get_mut(&id)
                && client.note_sync(self.now)
            {
                client.dozing_since.get_or_insert(self.now);
            }
        } else if client.dozing_since.is_none() {
            client.dozing_since = Some(self.now);
        }
        Ok(())
    }

    /// A chain of one on a disk: what fsync covers must be on the disk. The stream ring is; this
    /// also starts write-back of the log, so that nothing depends on the ring alone.
    fn persist_alone(&mut self, id: ClientId) -> Result<(), Failure> {
        if self.chain.len() == 1
            && let Some(client) = self.agent.clients.get(&id)
        {
            client.persist()?;
        }
        Ok(())
    }

    pub(super) fn collect_requests(&mut self, id: ClientId) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        client.waits_until = None;
        let before = self.agent.requests.len();
        for slot in 0..RPC_SLOTS {
            let Some((word, body)) = client.request(slot) else { continue };
            let parsed = Pending::parse(id, slot, &body);
            let gives_back = parsed.as_ref().is_ok_and(Pending::gives_back);
            if !gives_back
                && let Err(at) =
                    self.agent.users.ask(client.identity.uid, &self.config.per_user, self.now)
            {
                self.counters.throttled += 1;
                client.waits_until = Some(at);
                continue;
            }
            if parsed.as_ref().is_ok_and(Pending::pins) && !planted(Bug::ClosedLater) {
                // What it closed before it opened it again: found later, that would take away the pin that is asked for.
                client.collect_closed()?;
            }
            if !planted(Bug::UnpinTaken) {
                let closes = parsed.as_ref().map_or(&[][..], Pending::closes);
                closes.iter().try_for_each(|ino| client.write_closed(*ino))?;
            }
            if !client.take_request(slot, word) {
                continue;
            }
            self.counters.requests += 1;
            match parsed {
                Ok(pending) => self.agent.requests.push(pending),
                Err(e) => {
                    self.counters.bad_requests += 1;
                    if self.counters.bad_requests.is_power_of_two() {
                        // A hostile client cannot fill the log with them.
                        log::warn!("request of client {:#x} refused: {e}", id.0);
                    }
                    let mut reply = Vec::new();
                    storage::format::rpc::reply_error(Errno::INVAL, &mut reply);
                    client.answer(slot, &reply);
                }
            }
        }
        // The slots do not say which of them came first; who pins again what it unpinned is later.
        self.agent.requests[before..].sort_by_key(|pending| !pending.goes_first());
        Ok(())
    }

    /// Goes on with the logs of ended clients for which the head had no room before.
    pub(super) fn collect_ended(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let ended: Vec<ClientId> = self
            .agent
            .active
            .iter()
            .copied()
            .filter(|id| self.agent.clients.get(id).is_some_and(|c| c.gone || c.expelled))
            .collect();
        ended.into_iter().try_for_each(|id| self.drain_gone(id, out))
    }

    /// Clients whose appended entries have waited long enough.
    pub(super) fn collect_dozing(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let due: Vec<ClientId> = self
            .agent
            .clients
            .values()
            .filter(|c| c.dozing_since.is_some_and(|t| self.now >= t + self.config.limits.hold))
            .map(|c| c.id)
            .collect();
        for id in due {
            if let Some(client) = self.agent.clients.get_mut(&id) {
                client.dozing_since = None;
            }
            if self.take_some(id, out)? {
                self.agent.active.insert(id);
            } else if let Some(client) = self.agent.clients.get_mut(&id) {
                client.dozing_since = Some(self.now);
            }
        }
        Ok(())
    }

    /// Fetches what is complete in a client's log now and hands it to the head. `false` when the
    /// head has no room for it. Never more than the log can hold at one time: what lies beyond
    /// came later, and a client that writes without end must not keep the node.
    pub(super) fn drain(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        self.fetch_all(id, false, out)
    }

    /// The same for whom nobody else waits: where others wait for their own, a piece at a time.
    fn take_some(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        self.fetch_all(id, true, out)
    }

    fn fetch_all(
        &mut self,
        id: ClientId,
        polite: bool,
        out: &mut Vec<Effect>,
    ) -> Result<bool, Failure> {
        let head = self.is_head();
        if !head && self.role() != super::Role::Member {
            return Ok(false);
        }
        let mut left = self.agent.clients.get(&id).map_or(0, Client::capacity);
        let (mut taken, piece) = (0, self.config.limits.shared_bytes as u64);
        loop {
            let blocked = !self.ready || self.head.paused || !self.head.stalled.is_empty();
            if head && (blocked || !self.room_for_batch()?) {
                return Ok(false);
            }
            let shared = polite && self.is_shared(id);
            if shared && self.is_held_back(id) {
                self.agent.active.insert(id);
                return Ok(false);
            }
            let limits = &self.config.limits;
            let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
            let most = if head { limits.fetch_bytes } else { limits.forward_bytes };
            let batch = client.fetch(if shared { most.min(limits.shared_bytes) } else { most })?;
            if batch.last.0 == 0 {
                client.note_standing(self.now);
                return Ok(true);
            }
            left = left.saturating_sub(batch.taken);
            taken += batch.taken;
            if head {
                self.ingest(id, batch.first, batch.last, batch.raw, out)?;
                if self.turn_is_over() || shared && taken >= piece {
                    self.agent.active.insert(id);
                    self.turn.cut_short |= self.turn_is_over();
                    return Ok(false);
                }
            } else {
                let Batch { raw, first, last, .. } = batch;
                let raw = Raw::Checked(raw);
                let message = Message::Entries { client: id, first, last, raw };
                self.to_head(message, out);
            }
            if left == 0 {
                return Ok(true);
            }
        }
    }

    /// Room for a batch, made by publishing if that helps.
    pub(super) fn room_for_batch(&mut self) -> Result<bool, Failure> {
        if !self.ring.has_room() {
            self.publish_all()?;
            self.give_up()?;
        }
        Ok(self.ring.has_room())
    }

    /// Arms the doorbells. `false` when there is something to do after all.
    pub fn prepare_to_sleep(&mut self) -> bool {
        if self.failure.is_some() {
            return true;
        }
        let mut quiet = true;
        let mut still = std::collections::BTreeSet::new();
        for id in std::mem::take(&mut self.agent.active) {
            let Some(client) = self.agent.clients.get(&id) else { continue };
            if client.gone || client.expelled {
                still.insert(id);
                continue;
            }
            let dozing = client.dozing_since.is_some();
            let bell = if dozing { control::BELL_DOZING } else { control::BELL_ASLEEP };
            client.set_word(control::DOORBELL, bell);
            // Whatever was posted before the store above is visible now; whoever posts later rings.
            if client.wants_service(!dozing, self.now) && !self.is_held_back(id) {
                client.set_word(control::DOORBELL, control::BELL_AWAKE);
                still.insert(id);
                quiet = false;
            } else if dozing || self.is_held_back(id) {
                still.insert(id);
            }
        }
        self.agent.active = still;
        quiet
    }

    /// Looks at the clients that may want something, when the driver did not sleep.
    pub fn look_around(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        self.now = now;
        self.begin_turn();
        let active: Vec<ClientId> = self.agent.active.iter().copied().collect();
        for id in active {
            let looked = match self.agent.clients.get(&id) {
                Some(client) if client.gone || client.wants_service(true, now) => {
                    self.look_at(id, out)
                }
                _ => Ok(()),
            };
            if let Err(failure) = looked.and_then(|()| self.settle_down(out)) {
                self.fail(failure);
                return;
            }
        }
    }

    /// The head wants a lease back.
    pub(super) fn recall_wanted(&mut self, client: ClientId, ino: InodeId, token: u64) {
        if !matches!(self.role(), Role::Head | Role::Member) {
            // Its clients are dismissed.
            return;
        }
        self.agent.recalls.push(Recall::new(client, ino, token, self.now));
    }

    /// A client gives a lease back. Taken from it as if recalled: another of its threads may be in
    /// the middle of an operation under it, whose entry must reach the head before the lease does.
    pub(super) fn release_wanted(&mut self, client: ClientId, ino: InodeId) {
        let recall = Recall::new(client, ino, 0, self.now);
        self.agent.recalls.push(Recall { reported: true, ..recall });
    }

    /// What was under way between head and agent is lost: the recalls that were asked for, and the
    /// answers. A lease that was taken back counts as held (`client_ups` says so) until everything
    /// that was done under it is with the head again.
    pub(super) fn renew_recalls(&mut self) {
        let before = std::mem::take(&mut self.agent.recalls);
        for client in self.agent.clients.values() {
            for (ino, _) in client.returned() {
                let same = |r: &&Recall| r.client == client.id && r.ino == ino && r.revoked;
                let under_way = before.iter().find(same);
                self.agent.recalls.push(Recall {
                    client: client.id,
                    ino,
                    token: 0,
                    look_at: self.now,
                    revoked: true,
                    reported: true,
                    give_up_at: under_way.map_or(0, |r| r.give_up_at),
                    told: false,
                    inside: under_way.map_or_else(Vec::new, |r| r.inside.clone()),
                    unsound_since: None,
                });
            }
        }
    }

    /// Advances recalls; `true` when one ended.
    pub(super) fn step_recalls(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        let mut ended = false;
        let mut recalls = std::mem::take(&mut self.agent.recalls);
        let mut kept = Vec::new();
        for mut recall in recalls.drain(..) {
            if recall.look_at > self.now {
                kept.push(recall);
                continue;
            }
            if self.step_recall(&mut recall, out)? {
                ended = true;
            } else {
                kept.push(recall);
            }
        }
        // An expelled client's recalls were dropped with it.
        kept.append(&mut self.agent.recalls);
        kept.retain(|r| {
            self.agent.clients.get(&r.client).is_some_and(|c| !c.expelled) || !r.revoked
        });
        self.agent.recalls = kept;
        Ok(ended)
    }

    fn step_recall(&mut self, recall: &mut Recall, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        let (id, ino, token) = (recall.client, recall.ino, recall.token);
        let recalled = if recall.reported {
            Message::Released { client: id, ino, token }
        } else {
            Message::Recalled { client: id, ino, token }
        };
        if recall.reported && self.agent.requests.iter().any(|r| r.wants(id, ino)) {
            // Its client asks for it again: the head grants what it holds for taken.
            return Ok(true);
        }
        // A lease that was granted and is not written down yet: its client uses it first.
        if !recall.revoked && self.agent.requests.iter().any(|r| r.is_granted(id, ino)) {
            recall.look_at = self.now + LOOK;
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else {
            self.to_head(recalled, out);
            return Ok(true);
        };
        if !recall.revoked {
            if let Some(at) = client.granted_at(ino)
                && !client.gone
                && at + HOLD > self.now
            {
                recall.look_at = at + HOLD;
                return Ok(false);
            }
            let last = client.take_back(ino);
            if recall.reported {
                // Nothing was held: whatever the head grants meanwhile stands.
                recall.token = last.unwrap_or(u64::MAX);
            }
            recall.revoked = true;
            if !planted(Bug::RecallIgnoresOperation) {
                recall.inside = client.inside();
            }
            recall.give_up_at = self.now + RECALL_TIMEOUT_MS * 1_000_000;
        }
        recall.inside.retain(|seen| client.still_inside(*seen));
        if !recall.inside.is_empty() {
            if self.now >= recall.give_up_at {
                recall.look_at = self.now + LOOK;
                return self.expel(id, STOPPED, out);
            }
            recall.look_at = self.now + LOOK;
            return Ok(false);
        }
        if client.keeps(ino) {
            recall.look_at = self.now + LOOK;
            if recall.give_up_at == 0 {
                recall.give_up_at = self.now + RECALL_TIMEOUT_MS * 1_000_000;
            }
            if self.now >= recall.give_up_at {
                return self.expel(id, KEPT, out);
            }
            if !recall.told {
                recall.told = true;
                client.tell_of_recalls();
            }
            return Ok(false);
        }
        if !planted(Bug::ClosedUnheard) {
            client.collect_closed()?;
        }
        if !planted(Bug::RecallSkipsLog) && !self.drain(id, out)? {
            recall.look_at = self.now + LOOK;
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        if client.has_gap()? && !planted(Bug::GapRecalled) {
            // Another thread, which came in later, has a number before those of this lease and has not written yet: they
            // cannot be taken before it.
            recall.look_at = self.now + LOOK;
            if recall.give_up_at == 0 {
                recall.give_up_at = self.now + RECALL_TIMEOUT_MS * 1_000_000;
            }
            if self.now >= recall.give_up_at {
                return self.expel(id, STOPPED, out);
            }
            return Ok(false);
        }
        // Before the lease, for which somebody may wait who removes one of them.
        self.tell_closed(id, out)?;
        if let Some(client) = self.agent.clients.get_mut(&id) {
            // The stores of a payload go around the cache, and may arrive a little later than the word that
            // says that its writer is out: what was done under the lease must be in the log that was read.
            let since = *recall.unsound_since.get_or_insert(self.now);
            let later = client.claims_later()? && !planted(Bug::GapRecalled);
            let unsound = client.is_unsound() || later;
            if unsound && !client.gone && self.now < since + ARRIVAL {
                recall.look_at = self.now + LOOK;
                return Ok(false);
            }
            client.has_returned(ino)?;
        }
        self.to_head(recalled, out);
        Ok(true)
    }

    /// Tells the head what a client has closed; its log was read since it said so.
    fn tell_closed(&mut self, id: ClientId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        let inodes = client.tell_closed()?;
        if !inodes.is_empty() {
            self.to_head(Message::Unpin { client: id, inodes }, out);
        }
        Ok(())
    }

    /// What clients have closed and could not ask for.
    pub(super) fn collect_closed(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let some = |client: &&Client| !client.gone && !client.expelled && client.closes_now();
        for id in self.agent.clients.values().filter(some).map(|c| c.id).collect::<Vec<_>>() {
            self.agent.clients.get_mut(&id).map_or(Ok(()), Client::collect_closed)?;
            let gap = |client: &mut Client| client.has_gap();
            if self.drain(id, out)? && !self.agent.clients.get_mut(&id).map_or(Ok(false), gap)? {
                self.tell_closed(id, out)?;
            }
        }
        Ok(())
    }

    /// Logs that do not go on, and never will: their clients are expelled, so that they learn it.
    pub(super) fn expel_broken(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let mut broken = Vec::new();
        if planted(Bug::BrokenLogKept) {
            return Ok(());
        }
        for client in self.agent.clients.values_mut() {
            if client.stands_for_ever(self.now)? {
                broken.push(client.id);
            }
        }
        for id in broken {
            // The last look comes after it was seen that nobody is inside.
            if !self.drain(id, out)? {
                continue;
            }
            let Some(client) = self.agent.clients.get_mut(&id) else { continue };
            if client.stands_for_ever(self.now)? {
                let why = client.standing_words()?;
                if self.expel(id, &why, out)? {
                    self.counters.broken_logs += 1;
                }
            }
        }
        Ok(())
    }

    /// Logs that were made longer or shorter, or take more than they should: whoever holds a log's descriptor can do
    /// that. They have their size again, and their clients are expelled.
    pub(super) fn mend_logs(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.now < self.agent.logs_seen + LOGS_PAUSE {
            return Ok(());
        }
        self.agent.logs_seen = self.now;
        let mut bad = Vec::new();
        for client in self.agent.clients.values_mut() {
            let log = Segment::Log(client.segment);
            client.resized |= self.media.mend(log, client.descriptor.segment_bytes())?;
            if client.resized && !client.gone && !client.expelled {
                bad.push(client.id);
            }
        }
        for id in bad {
            if self.expel(id, RESIZED, out)? {
                self.counters.resized_logs += 1;
            }
        }
        // Who was expelled may have the descriptor still.
        Ok(self.media.strip(None)?)
    }

    /// `false` when the log could not be read to its end yet.
    fn expel(&mut self, id: ClientId, why: &str, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
        client.begin_expel();
        if !self.drain(id, out)? {
            return Ok(false);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(true) };
        let pid = client.pid;
        log::warn!("client {:#x} (pid {pid}) is expelled: {why}", id.0);
        client.seal()?;
        self.counters.expelled += 1;
        self.price_expulsion(id);
        out.push(Effect::Detached(id));
        self.agent.requests.retain(|r| r.client != id);
        self.drain_gone(id, out)?;
        Ok(true)
    }

    /// Whether others may have taken over because the coordinator is out of reach.
    pub(super) fn fence(&mut self, fenced: bool, _out: &mut Vec<Effect>) -> Result<(), Failure> {
        if fenced && !self.fenced && !planted(Bug::FencedServes) {
            log::warn!("the coordinator is out of reach: leases are suspended");
            for client in self.agent.clients.values_mut() {
                client.suspend_all();
            }
            self.serves_until(0);
        }
        self.fenced = fenced;
        Ok(())
    }

    /// The leases of the clients here count until then, and no longer if nothing more is heard.
    pub(super) fn serves_until(&mut self, until: Nanos) {
        self.serves_until = until;
        self.agent.clients.values().for_each(|client| client.set_leases_until(until));
    }

    /// Gives a lease word for `(client, ino)`, taking back an idle one when the table is full. `token`
    /// is the request's that the head granted; 0 for a fresh inode number.
    pub(super) fn write_lease(
        &mut self,
        id: ClientId,
        ino: InodeId,
        mode: LeaseMode,
        token: u64,
        out: &mut Vec<Effect>,
    ) -> Result<Option<storage::format::rpc::Granted>, Failure> {
        let now = self.now;
        if !self.may_hold_more(id, ino) {
            return Ok(None);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(None) };
        if let Some(spare) = client.spare()
            && client.inside().is_empty()
            && let Some(last) = client.give_up(spare)?
        {
            self.to_head(Message::Released { client: id, ino: spare, token: last }, out);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(None) };
        Ok(client.grant(ino, mode, token, now)?)
    }
}
