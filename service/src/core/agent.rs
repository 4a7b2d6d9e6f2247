//! The agent: serves the clients of this machine.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Nanos, Sequence, StreamSeq};
use storage::format::clients::{GROUPS_MAX, Record};
use storage::format::control::{self, Descriptor, LeaseMode};
use storage::format::entry::Op;
use storage::limits::{LANES_MAX, RPC_SLOTS};
use storage::media::{MediaError, Segment};

use super::client::{Client, LogFile};
use super::limits::Limits;
use super::locking::Locking;
use super::message::{Identity, Message};
use super::past::Past;
use super::recall::Recall;
use super::requests::Pending;
use super::rest::Rests;
use super::schedule::Schedule;
use super::share::Waiting;
use super::stage::fetch::Fetched;
use super::table::Table;
use super::users::Users;
use super::{Effect, Failure, Node};

/// Why a client is expelled: its process takes the space of others.
const RESIZED: &str = "its log was made longer or shorter";
/// Between two looks at the sizes of logs.
const LOGS_PAUSE: Nanos = 20_000_000;
/// How long it is taken for true what the file system below has left...
const LEFT_KNOWN: Nanos = 20_000_000;
/// ... if that is room for so many logs: no writer fills it meanwhile.
const LEFT_LOGS_MANY: u64 = 16;
/// Logs of ended sessions that a user may keep, beside one who may be a client. A library keeps that of the session before, and
/// while it attaches anew that of the one which has just ended: as all do at once whose node has lost its place twice.
const LEFT_LOGS: usize = 3;
/// The same of all, beside one client of all that there may be.
const ALL_LEFT_LOGS: usize = 8;

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
    /// Where who is asked for a lease is done with it.
    pub rests: Rests,
    /// Leases that are being taken back.
    pub recalls: Vec<Recall>,
    /// Logs that are being read for the head.
    pub readings: Vec<super::read_up::Reading>,
    pub next_segment: u32,
    /// Who waits beside whom.
    pub waiting: Waiting,
    /// Whose turn it is.
    pub schedule: Schedule,
    /// Locks of files.
    pub locking: Locking,
    /// Sessions that have ended while their processes live, the oldest first.
    pub past: Vec<Past>,
    pub logs_seen: Nanos,
    /// What the file system below had left, less the logs made since, and when that was.
    pub left_below: Option<(Nanos, u64)>,
    /// Of each user, how many logs of sessions that are over somebody still has open.
    pub left: BTreeMap<u32, usize>,
    /// When somebody got no space although some was set aside.
    pub room_sought: Option<Nanos>,
    /// Ends of clients, and of what was still to come of them: whoever waits for one looks again when it has changed.
    pub ends: u64,
    /// Clients that are forgotten, although not all are known to have what they did: how far the stream was then.
    pub ended: BTreeMap<ClientId, StreamSeq>,
    /// Files of which clients here were shown what others did, before all were known to have it: up to where in the stream.
    pub seen_early: BTreeMap<InodeId, StreamSeq>,
}

impl Agent {
    /// Without clients.
    pub(super) fn new(table: Table, locking: Locking) -> Self {
        Self {
            clients: BTreeMap::new(),
            active: BTreeSet::new(),
            table,
            taken_up: false,
            users: Users::default(),
            requests: Vec::new(),
            recalls: Vec::new(),
            readings: Vec::new(),
            rests: Rests::default(),
            next_segment: 0,
            waiting: Waiting::default(),
            schedule: Schedule::default(),
            locking,
            past: Vec::new(),
            logs_seen: 0,
            left_below: None,
            left: BTreeMap::new(),
            room_sought: None,
            ends: 0,
            ended: BTreeMap::new(),
            seen_early: BTreeMap::new(),
        }
    }
}

impl Node {
    /// Why a process of this user finds no place. Some are left for root: nobody shuts the administrator out.
    fn crowd(&self, uid: u32) -> Option<&'static str> {
        // Those who wait for heirs are bounded apart.
        let counts = |c: &&Client| c.heir_until.is_none();
        let all = self.agent.clients.values().filter(counts).count();
        let own = self.agent.clients.values().filter(counts);
        if uid != 0 && self.keeps_logs(uid) {
            return Some("too many logs of ended sessions are still open");
        }

        self.no_room_beside(uid, own.filter(|c| c.identity.uid == uid).count(), all)
    }

    /// Whether a user keeps too many logs of sessions that are over: each is memory. Of all users together there may be many more, since
    /// nobody shall bar others by what he keeps; but who is many users has an end, too.
    fn keeps_logs(&self, uid: u32) -> bool {
        let (own, all) = (self.agent.left.get(&uid), self.agent.left.values().sum::<usize>());
        own.is_some_and(|own| *own >= LEFT_LOGS * self.env.config.clients_per_user as usize)
            || all >= ALL_LEFT_LOGS * self.env.config.clients_max as usize
    }

    /// Why a user has no place more beside so many of its own and of all.
    pub(super) fn no_room_beside(&self, uid: u32, own: usize, all: usize) -> Option<&'static str> {
        let (most, unbound) = (self.env.config.clients_max as usize, uid == 0);
        if own >= self.env.config.clients_per_user as usize && !unbound {
            return Some("too many clients of this user on a node");
        }
        let left = if unbound { 0 } else { most / 16 };
        (all >= most - left).then_some("too many clients on this node")
    }

    /// Whether a process of this user may attach now; else what it is told.
    fn may_attach(&mut self, uid: u32) -> Result<(), (Errno, &'static str)> {
        if !self.serves() {
            return Err((Errno::AGAIN, "this node is not in the chain"));
        }
        if self.closing.is_some() {
            return Err((Errno::AGAIN, "this node is about to end"));
        }
        if self.is_barred(uid) {
            self.env.counters.barred += 1;
            let text = "clients of this user were expelled again and again: wait";
            return Err((Errno::AGAIN, text));
        }
        if let Some(text) = self.crowd(uid) {
            self.env.counters.crowded_out += 1;
            return Err((Errno::NFILE, text));
        }
        Ok(())
    }

    pub(super) fn attach(
        &mut self,
        token: u64,
        process: (u32, u64),
        identity: Identity,
        lanes: u32,
    ) -> Result<(), Failure> {
        if let Err((errno, text)) = self.may_attach(identity.uid) {
            self.env.out.push(Effect::AttachRefused { token, errno, text });
            return Ok(());
        }
        let lanes =
            if lanes == 0 { self.env.config.lanes } else { lanes }.clamp(1, LANES_MAX as u32);
        let id = loop {
            let number = (self.env.random.next_u64() >> 33) as u32 | 1;
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
            incarnation: self.env.random.next_u64() as u32 | 1,
            lanes,
            lane_bytes: self.env.config.lane_bytes,
            first_sequence: Sequence(1),
            node: self.me(),
            epoch: self.view.epoch,
            arena_bytes: self.arena_bytes(),
            keeps: identity.is_mount(),
        };
        let client = match self.make_log(segment, descriptor, &identity, process) {
            Ok(client) => client,
            Err(e) => {
                log::warn!("no log for process {}: {e}", process.0);
                self.env.out.push(Effect::AttachRefused {
                    token,
                    errno: Errno::NOSPC,
                    text: "no space for a log in the region",
                });
                return Ok(());
            }
        };
        client.set_lock_run(self.agent.locking.run);
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
        self.to_head(up);
        self.env.out.push(Effect::Attached { token, client: id, segment });
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
        if let Some(left) = self.left_below(bytes)?
            && left < bytes
        {
            let text = "the file system below has no room for a log that is full";
            return Err(MediaError::Io(format!("{text}: {bytes} bytes, and {left} left")));
        }
        let row = self.agent.table.put(&record)?;
        let starts = self.agent.table.starts();
        let media = std::sync::Arc::clone(&self.env.media);
        Client::create(media, segment, descriptor, identity.clone(), process, row, starts)
    }

    /// What the file system below has left for a log of so many bytes. To find out is to look at every segment: where it was much
    /// a moment ago, processes that come one after the other go by that, less what they were given.
    fn left_below(&mut self, bytes: u64) -> Result<Option<u64>, MediaError> {
        let now = self.env.now;
        if let Some((at, left)) = &mut self.agent.left_below
            && now < *at + LEFT_KNOWN
            && *left / LEFT_LOGS_MANY >= bytes
        {
            *left -= bytes;
            return Ok(Some(*left));
        }
        let spare = self.env.media.spare()?;
        self.agent.left_below = spare.as_ref().map(|spare| (now, spare.free.saturating_sub(bytes)));
        Ok(spare.map(|spare| spare.free))
    }

    /// The process is gone: its log is complete as it is.
    pub(super) fn client_gone(&mut self, id: ClientId) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return self.past_gone(id) };
        client.gone = true;
        self.agent.requests.retain(|r| r.client != id);
        self.agent.active.insert(id);
        self.drain_gone(id)
    }

    /// Fetches what is left of a dead client; when nothing is, the head is told.
    pub(super) fn drain_gone(&mut self, id: ClientId) -> Result<(), Failure> {
        if !planted(Bug::DeadTailDropped) && !self.drain(id)? {
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
                self.env.counters.broken_logs += 1;
            }
        }
        if self.waits_for_heir(id)? { Ok(()) } else { self.end_gone(id) }
    }

    /// Nothing is left of a dead client but what is to be published.
    pub(super) fn end_gone(&mut self, id: ClientId) -> Result<(), Failure> {
        self.agent.recalls.retain(|r| r.client != id);
        self.agent.readings.retain(|r| !r.is_of(id));
        self.agent.locking.returns.retain(|r| r.client() != id);
        self.agent.ends += 1;
        if let Some(client) = self.agent.clients.get_mut(&id) {
            client.heir_until = None;
            client.disinherit();
        }
        if let Some(client) = self.agent.clients.get_mut(&id)
            && client.expelled
        {
            // Its process goes on with what it has open.
            client.collect_closed()?;
            let inodes = if client.gone { Vec::new() } else { client.open() };
            self.to_head(Message::Kept { client: id, inodes });
        }
        self.to_head(Message::ClientGone { client: id });
        self.agent.locking.drop_client(id);
        self.agent.active.remove(&id);
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        client.dozing_since = None;
        if client.gone && !client.expelled && client.next().0 == 1 {
            // Who has done nothing leaves nothing that is to be published, and the head bids no farewell (`forget_client`).
            return self.remove_client(id);
        }
        self.member.publish_now = true;
        Ok(())
    }

    /// Log segments of dead clients go once everything in them is published.
    pub(super) fn remove_finished_clients(&mut self) -> Result<(), Failure> {
        let over = |c: &Client| c.gone && c.heir_until.is_none();
        self.finished(over).into_iter().try_for_each(|id| self.remove_client(id))
    }

    /// The same of expelled ones, whose processes go on.
    pub(super) fn retire_expelled(&mut self) -> Result<(), Failure> {
        self.finished(|c| c.expelled).into_iter().try_for_each(|id| self.retire(id))
    }

    fn finished(&self, which: impl Fn(&Client) -> bool) -> Vec<ClientId> {
        let done =
            |c: &&Client| !self.agent.active.contains(&c.id) && c.published.0 + 1 >= c.next().0;
        self.agent.clients.values().filter(|c| which(c)).filter(done).map(|c| c.id).collect()
    }

    /// The row goes first: a log without one is removed at the next start.
    pub(super) fn remove_client(&mut self, id: ClientId) -> Result<(), Failure> {
        if let Some(client) = self.agent.clients.remove(&id) {
            self.remember_unreplicated(&client);
            client.close();
            let log = client.log_file();
            self.agent.table.remove(client.into_row())?;
            self.leave_log(log)?;
        }
        self.agent.active.remove(&id);
        self.agent.requests.retain(|r| r.client != id);
        Ok(())
    }

    /// A log counts no more. Its process, and whoever else has its descriptor, keeps what lies in it, and no more than that; of one
    /// who has shown what he does with it, nothing.
    pub(super) fn leave_log(&mut self, log: LogFile) -> Result<(), Failure> {
        if self.env.media.leave(log.segment, log.user, log.bytes)? {
            *self.agent.left.entry(log.user).or_default() += 1;
        }
        Ok(())
    }

    /// A client rang its bell.
    pub(super) fn rang(&mut self, id: ClientId) -> Result<(), Failure> {
        if !self.agent.clients.contains_key(&id) {
            return Ok(());
        }
        let dozes =
            |this: &Self| this.agent.clients.get(&id).is_some_and(|c| c.dozing_since.is_some());
        let (dozed, before) = (dozes(self), self.agent.requests.len());
        self.agent.active.insert(id);
        if self.is_behind_others(id) && !self.is_over(id) && !self.env.config.limits.on_demand {
            return self.collect_requests(id);
        }
        self.look_at(id)?;
        // Who only appends does not ring where somebody dozes. If it has not asked for anything either, it waits for room.
        if self.env.config.limits.on_demand
            && dozed
            && dozes(self)
            && self.agent.requests.len() == before
        {
            self.collect_appended(id)?;
        }
        Ok(())
    }

    /// An operation of a client of this node is in that chunk of the stream: what it made or unlinked.
    pub(super) fn note_done(
        &mut self,
        id: ClientId,
        op: &Op<'_>,
        seq: StreamSeq,
    ) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        let facts = op.facts();
        if let Some(ino) = facts.makes {
            client.note_made(ino, seq);
        }
        // The last name of what the client does not have open.
        if let Some(ino) = facts.unlinks
            && !facts.open
            && client.has_pin(ino)
            && self.volume.attr(ino)?.is_none_or(|r| r.nlink == 0)
        {
            client.unpin(ino)?;
        }
        Ok(())
    }

    /// Whether it is here to be drained only.
    fn is_over(&self, id: ClientId) -> bool {
        self.agent.clients.get(&id).is_some_and(|client| client.gone || client.expelled)
    }

    /// Looks at everything that a client may want.
    fn look_at(&mut self, id: ClientId) -> Result<(), Failure> {
        if self.is_over(id) {
            // What lies in its slots is asked by nobody.
            return self.drain_gone(id);
        }
        self.collect_requests(id)?;
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        if client.sync_request() > client.replicated {
            self.env.counters.syncs += 1;
            if planted(Bug::AckUnfetched) {
                let asked = client.sync_request();
                client.set_replicated(asked);
                return Ok(());
            }
            self.agent.waiting.note(id, self.env.now);
            let fetched = self.take_some(id)?;
            self.persist_alone(id)?;
            // What it waits for may be there, and be left for the next look.
            let left = fetched == Fetched::Some && !planted(Bug::LeftTakenForMissing);
            if let Some(client) = self.agent.clients.get_mut(&id)
                && !left
                && client.note_sync(self.env.now)
            {
                client.dozing_since.get_or_insert(self.env.now);
            }
        } else if client.dozing_since.is_none() {
            client.dozing_since = Some(self.env.now);
        }
        Ok(())
    }

    pub(super) fn collect_requests(&mut self, id: ClientId) -> Result<(), Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(()) };
        client.waits_until = None;
        let before = self.agent.requests.len();
        let mut opens = Vec::new();
        for slot in 0..RPC_SLOTS {
            if self.collect_request(id, slot, |pending| !pending.pins())? {
                opens.push(slot);
            }
        }
        if !opens.is_empty() && !planted(Bug::ClosesOvertaken) {
            // Who opens again what another thread of its process has closed asks after that was said, perhaps in a slot that was
            // looked at before. Found next time, it would take away the pin that is asked for now.
            for slot in 0..RPC_SLOTS {
                self.collect_request(id, slot, Pending::goes_first)?;
            }
        }
        for slot in opens {
            self.collect_request(id, slot, |_| true)?;
        }
        // The slots do not say which of them came first; who pins again what it unpinned is later.
        self.agent.requests[before..].sort_by_key(|pending| !pending.goes_first());
        Ok(())
    }

    /// Takes what a slot holds, if it is wanted now. `true`: it waits there, and is not.
    fn collect_request(
        &mut self,
        id: ClientId,
        slot: usize,
        wanted: impl Fn(&Pending) -> bool,
    ) -> Result<bool, Failure> {
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(false) };
        let Some((word, body)) = client.request(slot) else { return Ok(false) };
        let parsed = Pending::parse(id, slot, &body);
        if parsed.as_ref().is_ok_and(|pending| !wanted(pending)) {
            return Ok(true);
        }
        let gives_back = parsed.as_ref().is_ok_and(Pending::gives_back);
        if !gives_back
            && let Err(at) =
                self.agent.users.ask(client.identity.uid, &self.env.config.per_user, self.env.now)
        {
            self.env.counters.throttled += 1;
            client.waits_until = Some(at);
            return Ok(false);
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
            return Ok(false);
        }
        self.env.counters.requests += 1;
        match parsed {
            Ok(pending) => self.agent.requests.push(pending),
            Err(e) => {
                self.env.counters.bad_requests += 1;
                if self.env.counters.bad_requests.is_power_of_two() {
                    // A hostile client cannot fill the log with them.
                    log::warn!("request of client {:#x} refused: {e}", id.0);
                }
                let mut reply = Vec::new();
                storage::format::rpc::reply_error(Errno::INVAL, &mut reply);
                client.answer(slot, &reply);
            }
        }
        Ok(false)
    }

    /// Goes on with the logs of ended clients for which the head had no room before.
    pub(super) fn collect_ended(&mut self) -> Result<(), Failure> {
        let ended: Vec<ClientId> = self
            .agent
            .active
            .iter()
            .copied()
            .filter(|id| self.agent.clients.get(id).is_some_and(|c| c.gone || c.expelled))
            .collect();
        ended.into_iter().try_for_each(|id| self.drain_gone(id))
    }

    /// Clients whose appended entries have waited long enough.
    pub(super) fn collect_dozing(&mut self) -> Result<(), Failure> {
        let due: Vec<ClientId> = self
            .agent
            .clients
            .values()
            .filter(|c| {
                c.dozing_since.is_some_and(|t| self.env.now >= t + self.env.config.limits.hold)
            })
            .map(|c| c.id)
            .collect();
        due.into_iter().try_for_each(|id| self.collect_appended(id))
    }

    fn collect_appended(&mut self, id: ClientId) -> Result<(), Failure> {
        if let Some(client) = self.agent.clients.get_mut(&id) {
            client.dozing_since = None;
        }
        let limits = &self.env.config.limits;
        // There is more, and it is fetched with this: not at once, since nothing of it may be taken now.
        let soon =
            if limits.on_demand { limits.hold.min(Limits::SHIPPED.hold) } else { limits.hold };
        let again = (self.env.now + soon).saturating_sub(limits.hold);
        if self.take_some(id)? == Fetched::All {
            self.agent.active.insert(id);
        } else if let Some(client) = self.agent.clients.get_mut(&id) {
            client.dozing_since = Some(again);
        }
        Ok(())
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
            if client.wants_service(!dozing, self.env.now) && !self.is_held_back(id) {
                client.set_word(control::DOORBELL, control::BELL_AWAKE);
                still.insert(id);
                quiet = false;
            } else if dozing || client.reading().is_some() || self.is_held_back(id) {
                still.insert(id);
            }
        }
        self.agent.active = still;
        quiet
    }

    /// Looks at the clients that may want something, when the driver did not sleep.
    pub fn look_around(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        self.env.now = now;
        self.begin_turn();
        std::mem::swap(&mut self.env.out, out);
        if let Err(failure) = self.look_at_active() {
            self.fail(failure);
        }
        std::mem::swap(&mut self.env.out, out);
    }

    fn look_at_active(&mut self) -> Result<(), Failure> {
        self.agent.schedule.held = false;
        for id in self.in_order() {
            match self.agent.clients.get(&id) {
                Some(client) if client.gone || client.wants_service(true, self.env.now) => {
                    self.look_at(id)?;
                }
                _ => {}
            }
            self.settle_down()?;
        }
        Ok(())
    }

    /// Logs that were made longer or shorter, or take more than they should: whoever holds a log's descriptor can do
    /// that. They have their size again, and their clients are expelled.
    pub(super) fn mend_logs(&mut self) -> Result<(), Failure> {
        if self.env.now < self.agent.logs_seen + LOGS_PAUSE {
            return Ok(());
        }
        self.agent.logs_seen = self.env.now;
        let mut bad = Vec::new();
        for client in self.agent.clients.values_mut() {
            let log = Segment::Log(client.segment);
            client.resized |= self.env.media.mend(log, client.descriptor.segment_bytes())?;
            if client.resized && !client.gone && !client.expelled {
                bad.push(client.id);
            }
        }
        for id in bad {
            if self.expel(id, RESIZED)? {
                self.env.counters.resized_logs += 1;
            }
        }
        // Whose session is over may have the descriptor still.
        self.agent.left = self.env.media.look_at_left()?;
        Ok(())
    }

    /// Whether others may have taken over because the coordinator is out of reach.
    pub(super) fn fence(&mut self, fenced: bool) -> Result<(), Failure> {
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
    ) -> Result<Option<storage::format::rpc::Granted>, Failure> {
        let (now, slots) = (self.env.now, self.env.config.limits.lease_slots);
        if !self.may_hold_more(id, ino) {
            return Ok(None);
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(None) };
        if let Some(spare) = client.spare(slots)
            && client.inside().is_empty()
            && let Some(last) = client.give_up(spare)?
        {
            self.to_head(Message::Released { client: id, ino: spare, token: last });
        }
        let differs = |client: &Client| client.was_other_than(ino, mode);
        if self.agent.clients.get(&id).is_some_and(differs) {
            // The row says from here on that it may do this: what it did before must count without that.
            self.stand_by_it()?;
        }
        let Some(client) = self.agent.clients.get_mut(&id) else { return Ok(None) };
        Ok(client.grant(ino, mode, token, (now, slots))?)
    }
}
