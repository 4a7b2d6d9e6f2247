//! Clients: each speaks the shared-memory protocol (`storage::format::{control, rpc, entry}`) by
//! itself, on the region of its node, one step of virtual time after the other. It does what a
//! correct LibFS may do, in the order in which the seed has it; the model is told of each append,
//! and each view through a lease is compared with the model.

use std::collections::BTreeMap;

use base::{ClientId, InodeId, Nanos, Sequence};
use service::core::Event;
use storage::format::control::{self, Descriptor, LeaseMode, LeaseWord};
use storage::format::entry::{HEADER_BYTES, Op, RawHeader, Stamp, entry_bytes, mask, op};
use storage::format::rpc::{self, InodeReply, Request};
use storage::limits::RPC_SLOT_BYTES;
use storage::media::{Media, Segment};

use crate::model::{Body, State};
use crate::world::{Item, MS, US, World};

const NAMES: u64 = 5;
const DIRS: usize = 5;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
/// A client that waits looks again after this long, whoever forgot to wake it.
const LOOK_AGAIN: Nanos = 100 * MS;

#[derive(Clone, Copy, Debug)]
struct Lease {
    slot: u32,
    word: LeaseWord,
    mode: LeaseMode,
    seen: bool,
}

#[derive(Debug)]
struct Session {
    number: usize,
    client: ClientId,
    segment: Segment,
    descriptor: Descriptor,
    heads: Vec<u64>,
    next: u64,
    leases: BTreeMap<u64, Lease>,
    fresh: Vec<u64>,
    event: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Create,
    Mkdir,
    Write,
    Append,
    Truncate,
    Chmod,
    Unlink,
    Rename,
    Link,
    Read,
    List,
}

#[derive(Clone, Debug)]
struct Plan {
    kind: Kind,
    dir: u64,
    name: Vec<u8>,
    dir2: u64,
    name2: Vec<u8>,
    tries: u32,
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Inode(u64),
    Names(u64),
    Numbers,
    Release,
}

#[derive(Clone, Debug)]
enum Phase {
    Away,
    Attaching(Nanos),
    Idle,
    Working(Plan),
    Asked(Plan, usize, Ask),
    Inside(Plan, usize),
    Space(Plan, u64),
    Sync(u64),
    Done,
}

/// See the module.
#[derive(Debug)]
pub struct Actor {
    /// Index of its node.
    pub node: usize,
    /// Shall be stopped for so long, inside its next operation.
    pub stop_for: Option<Nanos>,
    stamp: u64,
    due: Nanos,
    ops: u32,
    phase: Phase,
    session: Option<Session>,
    since: Nanos,
}

/// What a plan needs next.
enum Need {
    Lease(u64, LeaseMode),
    Numbers,
    Nothing,
    GiveUp,
}

impl Actor {
    /// A client on `node` that will do `ops` operations.
    pub fn new(node: usize, ops: u32) -> Self {
        Self {
            node,
            stop_for: None,
            stamp: 0,
            due: Nanos::MAX,
            ops,
            phase: Phase::Away,
            session: None,
            since: 0,
        }
    }

    /// All operations are done and synced.
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// For the report of a client that gets no further.
    pub fn describe(&self) -> String {
        let client = self.session.as_ref().map_or(0, |s| s.client.0);
        format!("{client:#x} {:?} since {} ops left {}", self.phase, self.since, self.ops)
    }

    fn waits(&self) -> bool {
        matches!(self.phase, Phase::Asked(..) | Phase::Space(..) | Phase::Sync(_) | Phase::Done)
    }
}

impl World<'_> {
    pub(crate) fn step_in(&mut self, c: usize, delay: Nanos) {
        let at = self.now + delay;
        let actor = &mut self.actors[c];
        if at < actor.due {
            actor.stamp += 1;
            actor.due = at;
            let stamp = actor.stamp;
            self.at(at, Item::Step(c, stamp));
        }
    }

    fn media(&self, c: usize) -> &dyn Media {
        &*self.hosts[self.actors[c].node].region
    }

    fn session(&self, c: usize) -> Option<&Session> {
        self.actors[c].session.as_ref()
    }

    fn word(&self, c: usize, offset: u64) -> u64 {
        let segment = self.session(c).map_or(Segment::Log(u32::MAX), |s| s.segment);
        self.media(c).load64(segment, offset).unwrap_or(0)
    }

    fn put(&self, c: usize, offset: u64, value: u64) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        self.media(c).store64(s.segment, offset, value).map_err(|e| format!("client {c}: {e}"))
    }

    pub(crate) fn actor_has_news(&self, c: usize) -> bool {
        let actor = &self.actors[c];
        actor.waits()
            && actor.session.as_ref().is_some_and(|s| self.word(c, control::EVENT) != s.event)
    }

    /// The session ended, by whatever: what was not vouched for may be lost.
    pub(crate) fn end_session(&mut self, c: usize, why: &str) {
        if let Some(s) = self.actors[c].session.take() {
            self.trace(|| format!("client {c} {:#x} ends: {why}", s.client.0));
            self.model.ended(s.number, s.next - 1);
        }
        let done = self.actors[c].ops == 0;
        self.actors[c].phase =
            if done && self.actors[c].is_done() { Phase::Done } else { Phase::Away };
        let delay = self.between(MS, 20 * MS);
        self.actors[c].due = Nanos::MAX;
        self.step_in(c, delay);
    }

    pub(crate) fn kill_actor(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        let (client, n) = (s.client, self.actors[c].node);
        if matches!(self.actors[c].phase, Phase::Inside(..)) && self.random.chance(1, 2) {
            self.tear(c)?;
        }
        self.end_session(c, "killed");
        let incarnation = self.hosts[n].incarnation;
        let delay = self.between(20 * US, 2 * MS);
        self.at(self.now + delay, Item::To(n, incarnation, Event::ClientGone(client)));
        Ok(())
    }

    /// Half an entry: the client died while it appended.
    fn tear(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        let data = [1; 200];
        let ino = InodeId::ROOT;
        let op = Op::SetXattr { ino, name: b"user.torn", value: &data };
        let bytes =
            op.to_entry(Sequence(s.next), s.descriptor.epoch, 0, 1, s.descriptor.incarnation);
        let lane_bytes = s.descriptor.lane_bytes;
        let at = s.heads[0] % lane_bytes;
        if at + bytes.len() as u64 <= lane_bytes {
            let (segment, at) = (s.segment, s.descriptor.lane_offset(0) + at);
            let cut = if s.next % 2 == 0 { 64 } else { 128 };
            self.media(c).write(segment, at, &bytes[..cut]).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    pub(crate) fn actor_attached(
        &mut self,
        c: usize,
        stamp: u64,
        client: ClientId,
        segment: u32,
    ) -> Result<(), String> {
        let n = self.actors[c].node;
        let wanted =
            matches!(self.actors[c].phase, Phase::Attaching(at) if at & 0xff_ffff_ffff == stamp);
        if !wanted || self.hosts[n].node.is_none() {
            // Nobody waits for it any more.
            let incarnation = self.hosts[n].incarnation;
            self.at(self.now, Item::To(n, incarnation, Event::ClientGone(client)));
            return Ok(());
        }
        let segment = Segment::Log(segment);
        let mut bytes = [0; control::DESCRIPTOR_BYTES];
        if self.media(c).read(segment, 0, &mut bytes).is_err() {
            self.end_session(c, "its log is gone already");
            return Ok(());
        }
        let descriptor = Descriptor::decode(&bytes).map_err(|e| e.to_string())?;
        if descriptor.client != client {
            self.end_session(c, "its log is another one's already");
            return Ok(());
        }
        self.trace(|| format!("client {c} attached as {:#x}", client.0));
        let number = self.model.begin();
        self.actors[c].session = Some(Session {
            number,
            client,
            segment,
            heads: vec![0; descriptor.lanes as usize],
            next: descriptor.first_sequence.0,
            descriptor,
            leases: BTreeMap::new(),
            fresh: Vec::new(),
            event: 0,
        });
        self.actors[c].phase = Phase::Idle;
        self.step_in(c, US);
        Ok(())
    }

    fn ring(&mut self, c: usize, urgent: bool) -> Result<(), String> {
        let bell = self.word(c, control::DOORBELL);
        let wanted = bell == control::BELL_ASLEEP || (urgent && bell == control::BELL_DOZING);
        if wanted && let Some(s) = self.session(c) {
            let (client, n) = (s.client, self.actors[c].node);
            self.put(c, control::DOORBELL, control::BELL_AWAKE)?;
            let incarnation = self.hosts[n].incarnation;
            let delay = self.between(500, 8 * US);
            self.at(self.now + delay, Item::To(n, incarnation, Event::Doorbell(client)));
        }
        Ok(())
    }

    pub(crate) fn step_actor(&mut self, c: usize, stamp: u64) -> Result<(), String> {
        if self.actors[c].stamp != stamp || self.actors[c].due != self.now {
            return Ok(());
        }
        self.actors[c].due = Nanos::MAX;
        let event = self.word(c, control::EVENT);
        if let Some(s) = &mut self.actors[c].session {
            s.event = event;
        }
        if self.session(c).is_some() && !self.check_attached(c)? {
            return Ok(());
        }
        match self.actors[c].phase.clone() {
            Phase::Away => self.attach(c),
            Phase::Attaching(since) => {
                if self.now > since + 200 * MS {
                    self.actors[c].phase = Phase::Away;
                }
                self.step_in(c, 30 * MS);
            }
            Phase::Idle => self.choose(c)?,
            Phase::Working(plan) => self.work(c, plan)?,
            Phase::Asked(plan, slot, ask) => self.look_for_reply(c, plan, slot, ask)?,
            Phase::Inside(plan, slot) => self.finish(c, &plan, slot)?,
            Phase::Space(plan, before) => {
                if self.word(c, control::reclaim(0)) == before {
                    self.wait(c)?;
                } else {
                    self.work(c, plan)?;
                }
            }
            Phase::Sync(seq) => self.look_for_sync(c, seq)?,
            Phase::Done => {}
        }
        Ok(())
    }

    /// Whether the session goes on; nothing of a client that keeps the rules is ever refused.
    fn check_attached(&mut self, c: usize) -> Result<bool, String> {
        let gone = self.session(c).is_some_and(|s| self.media(c).size(s.segment).is_err());
        // A log that was removed: whoever has it mapped reads what was stored last.
        let state = if gone { control::STATE_GONE } else { self.word(c, control::STATE) };
        if state != control::STATE_ATTACHED {
            if state == control::STATE_EXPELLED {
                let sealed = self.word(c, control::SEALED_AT);
                if let Some(s) = self.session(c) {
                    let number = s.number;
                    self.model.ended(number, sealed);
                }
            }
            let why = if state == control::STATE_EXPELLED { "expelled" } else { "dismissed" };
            self.end_session(c, why);
            return Ok(false);
        }
        if self.word(c, control::REFUSALS) != 0 {
            let (seq, errno) =
                (self.word(c, control::REFUSED_SEQ), self.word(c, control::REFUSED_ERRNO));
            let client = self.session(c).map_or(0, |s| s.client.0);
            return Err(format!("client {c} {client:#x}: operation {seq} refused with {errno}"));
        }
        Ok(true)
    }

    fn attach(&mut self, c: usize) {
        let n = self.actors[c].node;
        if self.hosts[n].node.is_some() {
            let token = (c as u64) << 40 | (self.now & 0xff_ffff_ffff);
            let event = Event::Attach {
                token,
                pid: 100 + c as u32,
                start_time: self.now,
                uid: 0,
                gid: 0,
                groups: Vec::new(),
                lanes: 0,
            };
            let incarnation = self.hosts[n].incarnation;
            self.at(self.now + 20 * US, Item::To(n, incarnation, event));
            self.actors[c].phase = Phase::Attaching(self.now);
        }
        self.step_in(c, 30 * MS);
    }

    fn choose(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].since = self.now;
        if self.actors[c].ops == 0 || self.random.chance(1, 8) {
            let last = self.session(c).map_or(0, |s| s.next - 1);
            self.put(c, control::SYNC_REQUEST, last)?;
            self.actors[c].phase = Phase::Sync(last);
            self.ring(c, true)?;
            return self.look_for_sync(c, last);
        }
        self.actors[c].ops -= 1;
        if self.random.chance(1, 20) {
            return self.give_lease_back(c);
        }
        let dirs = self.model.dirs();
        let dir = dirs[self.random.below(dirs.len() as u64) as usize];
        let dir2 = dirs[self.random.below(dirs.len() as u64) as usize];
        let mut name = || vec![b'a' + self.random.below(NAMES) as u8];
        let (name, name2) = (name(), name());
        let kind = match self.random.below(20) {
            0..=2 => Kind::Create,
            3 => Kind::Mkdir,
            4..=6 => Kind::Write,
            7 | 8 => Kind::Append,
            9 => Kind::Truncate,
            10 => Kind::Chmod,
            11 | 12 => Kind::Unlink,
            13 | 14 => Kind::Rename,
            15 => Kind::Link,
            16..=18 => Kind::Read,
            _ => Kind::List,
        };
        self.work(c, Plan { kind, dir, name, dir2, name2, tries: 0 })
    }

    fn give_lease_back(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = &mut self.actors[c].session else { return Ok(()) };
        let Some((_, lease)) = s.leases.pop_last() else { return self.rest(c) };
        let plan = Plan {
            kind: Kind::List,
            dir: 1,
            name: Vec::new(),
            dir2: 1,
            name2: Vec::new(),
            tries: 0,
        };
        self.ask(c, plan, &Request::Release { slots: vec![lease.slot] }, Ask::Release)
    }

    fn rest(&mut self, c: usize) -> Result<(), String> {
        self.actors[c].phase = Phase::Idle;
        let delay = if self.random.chance(1, 3) {
            self.between(US, 40 * US)
        } else if self.healed {
            self.between(10 * US, MS)
        } else {
            self.between(10 * US, 60 * MS)
        };
        self.step_in(c, delay);
        Ok(())
    }

    fn wait(&mut self, c: usize) -> Result<(), String> {
        self.put(c, control::WAITERS, 1)?;
        self.step_in(c, LOOK_AGAIN);
        Ok(())
    }

    fn look_for_sync(&mut self, c: usize, seq: u64) -> Result<(), String> {
        if self.word(c, control::REPLICATED) < seq {
            self.ring(c, true)?;
            return self.wait(c);
        }
        if let Some(s) = self.session(c) {
            let number = s.number;
            self.model.vouched(number, seq);
            self.outcome.fsyncs += 1;
            self.trace(|| format!("client {c} synced {seq}"));
        }
        if self.actors[c].ops == 0 && self.healed {
            self.actors[c].phase = Phase::Done;
            return Ok(());
        }
        if self.actors[c].ops == 0 {
            self.actors[c].phase = Phase::Idle;
            self.step_in(c, 50 * MS);
            return Ok(());
        }
        self.rest(c)
    }

    // --- leases ---

    fn holds(&self, c: usize, ino: u64, mode: LeaseMode) -> bool {
        let Some(lease) = self.session(c).and_then(|s| s.leases.get(&ino)) else { return false };
        lease.seen
            && lease.mode >= mode
            && self.word(c, control::lease_word(lease.slot)) == lease.word.0
    }

    fn target(&self, dir: u64, name: &[u8]) -> Option<u64> {
        match &self.model.current(dir)?.body {
            Body::Dir(names) => names.get(name).copied(),
            _ => None,
        }
    }

    fn is_file(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFREG)
    }

    /// What the plan needs before it can be carried out.
    fn need(&self, c: usize, plan: &Plan) -> Need {
        let w = LeaseMode::Write;
        let dir_mode = match plan.kind {
            Kind::Read | Kind::Write | Kind::Append | Kind::Truncate | Kind::Chmod | Kind::List => {
                LeaseMode::Read
            }
            _ => w,
        };
        if !self.holds(c, plan.dir, dir_mode) {
            return Need::Lease(plan.dir, dir_mode);
        }
        if !matches!(self.model.current(plan.dir).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        let target = self.target(plan.dir, &plan.name);
        match (plan.kind, target) {
            (Kind::List, _) => Need::Nothing,
            (Kind::Create | Kind::Mkdir, None) => {
                let fresh = self.session(c).and_then(|s| s.fresh.last().copied());
                match fresh {
                    Some(ino) if self.holds(c, ino, w) => Need::Nothing,
                    _ => Need::Numbers,
                }
            }
            (Kind::Create | Kind::Mkdir, Some(_)) | (_, None) => Need::GiveUp,
            (Kind::Read, Some(t)) if self.holds(c, t, LeaseMode::Read) => {
                if plan.tries == 0 {
                    Need::Lease(t, LeaseMode::Read)
                } else {
                    Need::Nothing
                }
            }
            (Kind::Read, Some(t)) => Need::Lease(t, LeaseMode::Read),
            (_, Some(t)) if !self.holds(c, t, w) => Need::Lease(t, w),
            (Kind::Write | Kind::Append | Kind::Truncate, Some(t)) if !self.is_file(t) => {
                Need::GiveUp
            }
            (Kind::Rename | Kind::Link, Some(t)) => self.need_second(c, plan, t),
            (Kind::Unlink, Some(t)) => match self.model.current(t).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
            _ => Need::Nothing,
        }
    }

    fn need_second(&self, c: usize, plan: &Plan, target: u64) -> Need {
        let w = LeaseMode::Write;
        // Directories stay where they are, so that no cycle arises.
        if !self.is_file(target) && (plan.kind == Kind::Link || plan.dir != plan.dir2) {
            return Need::GiveUp;
        }
        if !self.holds(c, plan.dir2, w) {
            return Need::Lease(plan.dir2, w);
        }
        if !matches!(self.model.current(plan.dir2).map(|s| &s.body), Some(Body::Dir(_))) {
            return Need::GiveUp;
        }
        match self.target(plan.dir2, &plan.name2) {
            None => Need::Nothing,
            Some(_) if plan.kind == Kind::Link => Need::GiveUp,
            Some(r) if r == target => Need::GiveUp,
            Some(r) if !self.holds(c, r, w) => Need::Lease(r, w),
            Some(r) if self.is_file(r) != self.is_file(target) => Need::GiveUp,
            Some(r) => match self.model.current(r).map(|s| &s.body) {
                Some(Body::Dir(names)) if !names.is_empty() => Need::GiveUp,
                _ => Need::Nothing,
            },
        }
    }

    fn work(&mut self, c: usize, mut plan: Plan) -> Result<(), String> {
        let need = self.need(c, &plan);
        plan.tries += 1;
        if plan.tries > 60 {
            return self.rest(c);
        }
        match need {
            Need::GiveUp => self.rest(c),
            Need::Nothing if matches!(plan.kind, Kind::Read | Kind::List) => self.rest(c),
            Need::Nothing => self.enter(c, plan),
            Need::Numbers => self.ask(c, plan, &Request::Inodes { count: 3 }, Ask::Numbers),
            Need::Lease(ino, mode) => {
                let request = Request::Inode { ino: InodeId(ino), mode, flags: 0 };
                self.ask(c, plan, &request, Ask::Inode(ino))
            }
        }
    }

    fn ask(&mut self, c: usize, plan: Plan, request: &Request<'_>, ask: Ask) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        let (segment, after) = (s.segment, Sequence(s.next - 1));
        let mut body = Vec::new();
        request.encode(after, &mut body);
        let slot = c % storage::limits::RPC_SLOTS;
        let at = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        self.media(c)
            .write(segment, at + rpc::SLOT_BODY, &body)
            .map_err(|e| format!("client {c}: {e}"))?;
        self.put(c, at, u64::from(rpc::SLOT_REQUEST) | (body.len() as u64) << 32)?;
        self.trace(|| format!("client {c} asks {ask:?} after {after}"));
        self.actors[c].phase = Phase::Asked(plan, slot, ask);
        self.ring(c, true)?;
        self.wait(c)
    }

    fn look_for_reply(
        &mut self,
        c: usize,
        plan: Plan,
        slot: usize,
        ask: Ask,
    ) -> Result<(), String> {
        let at = control::RPC + (slot * RPC_SLOT_BYTES) as u64;
        let word = self.word(c, at);
        if word as u32 != rpc::SLOT_REPLY {
            self.ring(c, true)?;
            return self.wait(c);
        }
        let Some(segment) = self.session(c).map(|s| s.segment) else { return Ok(()) };
        let mut body = vec![0; ((word >> 32) as usize).min(RPC_SLOT_BYTES - 64)];
        self.media(c)
            .read(segment, at + rpc::SLOT_BODY, &mut body)
            .map_err(|e| format!("client {c}: {e}"))?;
        self.put(c, at, u64::from(rpc::SLOT_FREE))?;
        let (status, mut r) = rpc::reply_status(&body).map_err(|e| e.to_string())?;
        self.trace(|| format!("client {c} hears {ask:?} {status:?}"));
        let next = match (ask, status) {
            (Ask::Inode(ino), Ok(())) => {
                let reply = InodeReply::decode(&mut r).map_err(|e| e.to_string())?;
                self.inode_reply(c, ino, &reply)?
            }
            (Ask::Inode(ino), Err(base::Errno::NOENT)) => {
                // No lease protects this view: it may be out of date by the time it is read.
                if ino == 1 {
                    return Err(format!("client {c}: there is no root directory"));
                }
                return self.rest(c);
            }
            (Ask::Names(ino), Ok(())) => {
                let mut names = BTreeMap::new();
                let end = r.u8().map_err(|e| e.to_string())?;
                while r.left() > 0 {
                    let name = rpc::take_name(&mut r).map_err(|e| e.to_string())?;
                    if name.name != b"." && name.name != b".." {
                        names.insert(name.name.to_vec(), name.ino.0);
                    }
                }
                if end != 1 {
                    return Err(format!("client {c}: a short list of names has no end"));
                }
                self.names_reply(c, ino, names)?;
                None
            }
            (Ask::Numbers, Ok(())) => {
                self.numbers_reply(c, &mut r).map_err(|e| e.to_string())?;
                None
            }
            (Ask::Release, Ok(())) => return self.rest(c),
            (Ask::Names(_), Err(base::Errno::NOTDIR | base::Errno::NOENT)) => None,
            (_, Err(e)) => return Err(format!("client {c}: {ask:?} refused with {e:?}")),
        };
        match next {
            Some((request_ino, ask)) => {
                let request = Request::Names { dir: InodeId(request_ino), cookie: 0 };
                self.ask(c, plan, &request, ask)
            }
            None => {
                self.actors[c].phase = Phase::Working(plan);
                let delay = self.between(100, 3 * US);
                self.step_in(c, delay);
                Ok(())
            }
        }
    }

    fn inode_reply(
        &mut self,
        c: usize,
        ino: u64,
        reply: &InodeReply,
    ) -> Result<Option<(u64, Ask)>, String> {
        let granted = reply.granted;
        if granted.word.0 == 0 || self.word(c, control::lease_word(granted.slot)) != granted.word.0
        {
            return Ok(None);
        }
        let mode = granted.word.mode();
        let mut lease = Lease { slot: granted.slot, word: granted.word, mode, seen: false };
        self.check_leases(c, ino, mode)?;
        let record = &reply.record;
        if record.mode & S_IFMT == S_IFREG && record.nlink > 0 {
            let bytes = self.file_content(c, reply)?;
            let state = State { mode: record.mode, body: Body::File(bytes, record.nlink) };
            self.see(c, ino, &state)?;
            lease.seen = true;
        } else if record.nlink == 0 {
            self.see(c, ino, &State::gone())?;
        }
        if let Some(s) = &mut self.actors[c].session {
            s.leases.insert(ino, lease);
        }
        let is_dir = record.mode & S_IFMT == S_IFDIR && record.nlink > 0;
        Ok(is_dir.then_some((ino, Ask::Names(ino))))
    }

    fn file_content(&self, c: usize, reply: &InodeReply) -> Result<Vec<u8>, String> {
        let size = reply.record.size;
        let mut bytes = vec![0; size as usize];
        for e in &reply.extents {
            if e.unwritten || e.offset >= size {
                continue;
            }
            let end = (e.offset + e.len).min(size);
            let target = &mut bytes[e.offset as usize..end as usize];
            self.media(c)
                .read(Segment::Arena(e.arena), e.arena_offset, target)
                .map_err(|x| format!("client {c}: extent {e:?}: {x}"))?;
        }
        Ok(bytes)
    }

    fn names_reply(
        &mut self,
        c: usize,
        ino: u64,
        names: BTreeMap<Vec<u8>, u64>,
    ) -> Result<(), String> {
        let Some(lease) = self.session(c).and_then(|s| s.leases.get(&ino)).copied() else {
            return Ok(());
        };
        if self.word(c, control::lease_word(lease.slot)) != lease.word.0 {
            return Ok(());
        }
        // Directories keep the mode that they were made with.
        let mode = self.model.current(ino).map_or(0, |s| s.mode);
        self.see(c, ino, &State { mode, body: Body::Dir(names) })?;
        if let Some(lease) = self.actors[c].session.as_mut().and_then(|s| s.leases.get_mut(&ino)) {
            lease.seen = true;
        }
        Ok(())
    }

    fn numbers_reply(
        &mut self,
        c: usize,
        r: &mut base::wire::Reader<'_>,
    ) -> Result<(), base::wire::Corrupt> {
        let count = r.u32()?;
        for _ in 0..count {
            let (ino, slot, word) = (r.u64()?, r.u32()?, LeaseWord(r.u64()?));
            if let Some(s) = &mut self.actors[c].session {
                let lease = Lease { slot, word, mode: LeaseMode::Write, seen: true };
                s.leases.insert(ino, lease);
                s.fresh.insert(0, ino);
            }
        }
        Ok(())
    }

    fn see(&mut self, c: usize, ino: u64, state: &State) -> Result<(), String> {
        self.outcome.observations += 1;
        let by = self.session(c).map(|s| s.number);
        self.trace(|| format!("client {c} sees {ino}: {}", state.summary()));
        self.model.observe(by, ino, state).map_err(|e| format!("client {c}: {e}"))
    }

    /// Nobody else may hold what excludes this.
    fn check_leases(&self, c: usize, ino: u64, mode: LeaseMode) -> Result<(), String> {
        for other in 0..self.actors.len() {
            let Some(s) = self.session(other) else { continue };
            let Some(lease) = s.leases.get(&ino) else { continue };
            let valid = self.word(other, control::lease_word(lease.slot)) == lease.word.0
                && self.word(other, control::STATE) == control::STATE_ATTACHED;
            let excludes = lease.mode == LeaseMode::Write || mode == LeaseMode::Write;
            if other != c && valid && excludes {
                return Err(format!(
                    "leases conflict: inode {ino} {mode:?} at client {c}, {:?} at client {other}",
                    lease.mode
                ));
            }
        }
        Ok(())
    }

    // --- operations ---

    fn enter(&mut self, c: usize, plan: Plan) -> Result<(), String> {
        let slot = c % 8;
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word | 1)?;
        let delay = match self.actors[c].stop_for.take() {
            Some(lasts) => lasts,
            None => self.between(100, 20 * US),
        };
        self.actors[c].phase = Phase::Inside(plan, slot);
        self.step_in(c, delay);
        Ok(())
    }

    fn leave(&mut self, c: usize, slot: usize) -> Result<(), String> {
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word + 1)
    }

    /// Appends, and leaves the operation.
    fn finish(&mut self, c: usize, plan: &Plan, slot: usize) -> Result<(), String> {
        let n = self.actors[c].node;
        // A node that is cut off suspends its leases; what its clients are about to append cannot
        // count any more if others have taken over.
        let fenced = self.hosts[n].should_fence(self.now)
            || self.hosts[n].node.as_ref().is_none_or(|x| x.status().fenced);
        if fenced {
            self.leave(c, slot)?;
            return self.rest(c);
        }
        let appended = self.perform(c, plan)?;
        self.leave(c, slot)?;
        if appended {
            self.ring(c, false)?;
            return self.rest(c);
        }
        self.actors[c].phase = Phase::Space(plan.clone(), self.word(c, control::reclaim(0)));
        self.ring(c, true)?;
        self.wait(c)
    }

    /// Works out the entry and what it brings about. `false`: the log is full.
    fn perform(&mut self, c: usize, plan: &Plan) -> Result<bool, String> {
        let mut states: BTreeMap<u64, State> = BTreeMap::new();
        let (dir, name) = (plan.dir, plan.name.clone());
        let target = self.target(dir, &name).unwrap_or(0);
        let fresh = self.session(c).and_then(|s| s.fresh.last().copied()).unwrap_or(0);
        for ino in [dir, plan.dir2, target, fresh] {
            if let Some(state) = self.model.current(ino) {
                states.insert(ino, state.clone());
            }
        }
        let (parent, ino) = (InodeId(dir), InodeId(target));
        let mut changed = vec![target];
        let mut data = Vec::new();
        let op = match plan.kind {
            Kind::Create | Kind::Mkdir => {
                let is_dir = plan.kind == Kind::Mkdir && self.model.dirs().len() < DIRS;
                let (mode, body) = if is_dir {
                    (S_IFDIR | 0o755, Body::Dir(BTreeMap::new()))
                } else {
                    (S_IFREG | 0o644, Body::File(Vec::new(), 1))
                };
                states.insert(fresh, State { mode, body });
                put_name(&mut states, dir, &name, Some(fresh));
                changed = vec![fresh, dir];
                let (ino, target) = (InodeId(fresh), &b""[..]);
                Op::Create { ino, parent, mode, rdev: 0, uid: 0, gid: 0, name: &name, target }
            }
            Kind::Write | Kind::Append => {
                let size = file_size(&states, target);
                let len = 1 + self.random.below(self.preset.write_max);
                let offset = if plan.kind == Kind::Append && size + len <= self.preset.file_max {
                    size
                } else {
                    self.random.below(self.preset.file_max.saturating_sub(len) + 1)
                };
                data.resize(len as usize, 0);
                self.random.fill(&mut data);
                if let Some(State { body: Body::File(bytes, _), .. }) = states.get_mut(&target) {
                    let end = offset as usize + data.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[offset as usize..end].copy_from_slice(&data);
                }
                Op::Write { ino, offset, data: &data, clear_setid: false }
            }
            Kind::Truncate => {
                let size = self.random.below(self.preset.file_max);
                if let Some(State { body: Body::File(bytes, _), .. }) = states.get_mut(&target) {
                    bytes.resize(size as usize, 0);
                }
                Op::Truncate { ino, size, clear_setid: false }
            }
            Kind::Chmod => {
                let old = states.get(&target).map_or(0, |s| s.mode);
                let bits = [0o644, 0o600, 0o640, 0o755][self.random.below(4) as usize];
                let mode = if old & S_IFMT == S_IFREG { bits } else { 0o755 };
                if let Some(s) = states.get_mut(&target) {
                    s.mode = old & S_IFMT | mode;
                }
                let (atime, mtime) = (Stamp::from_nanos(self.now), Stamp::from_nanos(self.now));
                Op::SetAttr { ino, mask: mask::MODE, mode, uid: 0, gid: 0, atime, mtime }
            }
            Kind::Unlink => {
                put_name(&mut states, dir, &name, None);
                let is_dir = matches!(states.get(&target).map(|s| &s.body), Some(Body::Dir(_)));
                drop_link(&mut states, target);
                changed = vec![target, dir];
                if is_dir {
                    Op::Rmdir { ino, parent, name: &name }
                } else {
                    Op::Unlink { ino, parent, name: &name, open: false }
                }
            }
            Kind::Link => {
                put_name(&mut states, plan.dir2, &plan.name2, Some(target));
                if let Some(State { body: Body::File(_, links), .. }) = states.get_mut(&target) {
                    *links += 1;
                }
                changed = vec![target, plan.dir2];
                Op::Link { ino, parent: InodeId(plan.dir2), name: &plan.name2 }
            }
            Kind::Rename => {
                let replaced = self.target(plan.dir2, &plan.name2).unwrap_or(0);
                if let Some(state) = self.model.current(replaced) {
                    states.insert(replaced, state.clone());
                    drop_link(&mut states, replaced);
                    changed.push(replaced);
                }
                put_name(&mut states, dir, &name, None);
                put_name(&mut states, plan.dir2, &plan.name2, Some(target));
                changed.extend([dir, plan.dir2]);
                Op::Rename {
                    ino,
                    parent,
                    name: &name,
                    new_parent: InodeId(plan.dir2),
                    new_name: &plan.name2,
                    replaced: InodeId(replaced),
                    noreplace: false,
                    exchange: false,
                    open: false,
                }
            }
            Kind::Read | Kind::List => return Ok(true),
        };
        let Some(seq) = self.append(c, &op)? else { return Ok(false) };
        if matches!(op, Op::Create { .. })
            && let Some(s) = &mut self.actors[c].session
        {
            s.fresh.pop();
        }
        changed.sort_unstable();
        changed.dedup();
        let changes: Vec<(u64, State)> =
            changed.iter().filter_map(|i| Some((*i, states.get(i)?.clone()))).collect();
        self.trace(|| format!("client {c} does {seq} {:?} {}", plan.kind, brief(&op)));
        self.outcome.operations += 1;
        if let Some(s) = self.session(c) {
            let number = s.number;
            self.model.appended(number, seq, changes);
        }
        Ok(true)
    }

    /// Into the log: `None` when there is no room.
    fn append(&mut self, c: usize, op: &Op<'_>) -> Result<Option<u64>, String> {
        let lane = match self.session(c) {
            Some(s) if self.preset.write_max < 100_000 => {
                self.random.below(s.heads.len() as u64) as usize
            }
            _ => 0,
        };
        let epoch = base::Epoch(self.word(c, control::EPOCH) as u32);
        let reclaimed = self.word(c, control::reclaim(lane));
        let time = self.now + 1_700_000_000_000_000_000;
        let Some(s) = self.session(c) else { return Ok(None) };
        let (lane_bytes, incarnation) = (s.descriptor.lane_bytes, s.descriptor.incarnation);
        let (mut head, mut seq) = (s.heads[lane], s.next);
        let segment = s.segment;
        let base = s.descriptor.lane_offset(lane);
        let length = op.to_entry(Sequence(seq), epoch, lane as u8, time, incarnation).len();
        let left = lane_bytes - head % lane_bytes;
        let pad = left < length as u64;
        let end = head + length as u64 + if pad { left } else { 0 };
        if end.saturating_sub(lane_bytes) > reclaimed {
            return Ok(None);
        }
        let write = |at: u64, bytes: &[u8]| {
            let media = self.media(c);
            media.write(segment, at, bytes)?;
            media.persist(segment, at, bytes.len() as u64)
        };
        let fault = |e: storage::media::MediaError| format!("client {c}: {e}");
        if pad {
            let raw = RawHeader {
                op: op::PAD,
                length: (left - HEADER_BYTES as u64) as u32,
                sequence: seq,
                lane: lane as u8,
                epoch: epoch.0,
                ..RawHeader::default()
            };
            write(base + head % lane_bytes, &raw.seal(incarnation, &[])).map_err(fault)?;
            (head, seq) = (head + left, seq + 1);
        }
        let bytes = op.to_entry(Sequence(seq), epoch, lane as u8, time, incarnation);
        debug_assert_eq!(bytes.len(), entry_bytes(bytes.len() - HEADER_BYTES));
        write(base + head % lane_bytes, &bytes).map_err(fault)?;
        self.media(c).fence().map_err(fault)?;
        if let Some(s) = &mut self.actors[c].session {
            (s.heads[lane], s.next) = (head + bytes.len() as u64, seq + 1);
        }
        self.put(c, control::LAST_SEQUENCE, seq)?;
        Ok(Some(seq))
    }
}

fn put_name(states: &mut BTreeMap<u64, State>, dir: u64, name: &[u8], ino: Option<u64>) {
    if let Some(State { body: Body::Dir(names), .. }) = states.get_mut(&dir) {
        match ino {
            Some(ino) => names.insert(name.to_vec(), ino),
            None => names.remove(name),
        };
    }
}

fn drop_link(states: &mut BTreeMap<u64, State>, ino: u64) {
    let Some(state) = states.get_mut(&ino) else { return };
    match &mut state.body {
        Body::File(_, links) if *links > 1 => *links -= 1,
        _ => *state = State::gone(),
    }
}

fn file_size(states: &BTreeMap<u64, State>, ino: u64) -> u64 {
    match states.get(&ino).map(|s| &s.body) {
        Some(Body::File(bytes, _)) => bytes.len() as u64,
        _ => 0,
    }
}

fn brief(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {offset}+{}", data.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(160);
            text
        }
    }
}
