//! Clients: each speaks the shared-memory protocol (`storage::format::{control, rpc, entry}`) by
//! itself, on the region of its node, one step of virtual time after the other. It does what a
//! correct LibFS may do, in the order in which the seed has it; the model is told of each append,
//! and each view through a lease is compared with the model.

mod operation;
pub(crate) mod operator;
mod plan;
pub(crate) mod quota;
mod requests;

use std::collections::{BTreeMap, BTreeSet};

use base::{ClientId, InodeId, Nanos, Sequence};
use client::libfs::log::Log;
use client::libfs::over_media::{ByHand, OverMedia};
use service::core::Event;
use storage::format::control::{self, Descriptor, LeaseMode, LeaseWord};
use storage::format::entry::{HEADER_BYTES, Op, RawHeader, Stamp, mask};
use storage::format::rpc::{self, InodeReply, Request};
use storage::media::{Media, Segment};

use crate::model::{Body, State};
use crate::process::Process;
use crate::world::{Ended, Item, MS, US, World};

const NAMES: u64 = 5;
const DIRS: usize = 5;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
/// User and group of clients that try what they may not.
pub const GUEST: u32 = 2000;
/// A client that waits looks again after this long, whoever forgot to wake it.
const LOOK_AGAIN: Nanos = 100 * MS;

#[derive(Clone, Debug)]
pub(crate) struct Lease {
    slot: u32,
    word: LeaseWord,
    mode: LeaseMode,
    seen: bool,
    /// Mode, owner, group, quota and times of change as they came with the lease.
    record: (u32, u32, u32, u64, (u64, u64)),
    /// What the client knows of the inode; its extended attributes it asks for each time.
    view: Option<State>,
}

#[derive(Debug)]
pub(crate) struct Session {
    number: usize,
    pub(crate) client: ClientId,
    segment: Segment,
    memory: OverMedia,
    log: Log<ByHand>,
    leases: BTreeMap<u64, Lease>,
    fresh: Vec<u64>,
    event: u64,
    /// Inodes that it ever had a lease on.
    ever: BTreeSet<u64>,
    created: Vec<u64>,
    /// Entries that must be refused.
    dared: BTreeSet<u64>,
    /// Its log ends in garbage: it ends soon.
    spoilt: bool,
    /// Where its newest entry begins in the segment.
    newest_at: u64,
    /// This entry of its own will never be whole, which it does not know: nothing counts from there on.
    broken: Option<u64>,
    /// Its node has been out of the chain since it began.
    doubted: bool,
}

impl Session {
    /// The sequence of what it does next.
    fn next(&self) -> u64 {
        self.log.last().0 + 1
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Create,
    Mkdir,
    Symlink,
    Write,
    Append,
    Truncate,
    Fallocate,
    Punch,
    Zero,
    Clone,
    Chmod,
    Chown,
    Utimes,
    SetXattr,
    RemoveXattr,
    /// An access control list, which the mode follows.
    SetAcl,
    /// Blocks go from the middle of a file, or come into it.
    Shift,
    /// A file without a name is made and written, and gets a name then.
    Tmpfile,
    /// What a directory's new inodes inherit, or no longer.
    SetDefault,
    /// Limits of a user or a directory; in most histories so large that they bar nobody.
    Quota,
    /// A snapshot of the volume, or the end of one.
    Snapshot,
    /// A piece of a file comes back as a snapshot shows it.
    CloneBack,
    /// Another directory's quota counts an inode from now on, or none.
    Project,
    Unlink,
    Rename,
    Exchange,
    Link,
    Read,
    List,
    /// A lock on a file that is open; processes only.
    Lock,
    /// A directory is kept open; processes only.
    OpenDir,
    // What must be refused, whoever does it:
    /// A directory moves into itself.
    Cycle,
    /// A directory with names in it is removed.
    NotEmpty,
    /// An entry of an epoch to come.
    FutureEpoch,
    /// A change without a lease.
    NoLease,
    /// An inode is made under the number of one that was.
    OldNumber,
    /// An inode is freed by a client.
    Reap,
    /// No entry at all.
    Garbage,
}

impl Kind {
    /// For figures.
    const fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Mkdir => "mkdir",
            Self::Symlink => "symlink",
            Self::Write => "write",
            Self::Append => "append",
            Self::Truncate => "truncate",
            Self::Fallocate => "allocate",
            Self::Punch => "punch",
            Self::Zero => "zero",
            Self::Clone => "clone",
            Self::Chmod => "chmod",
            Self::Chown => "chown",
            Self::Utimes => "utimes",
            Self::SetXattr => "setxattr",
            Self::RemoveXattr => "removexattr",
            Self::SetAcl => "acl",
            Self::SetDefault => "default-acl",
            Self::Shift => "shift",
            Self::Tmpfile => "tmpfile",
            Self::Quota => "quota",
            Self::Snapshot => "snapshot",
            Self::CloneBack => "clone-back",
            Self::Project => "project",
            Self::Unlink => "unlink",
            Self::Rename => "rename",
            Self::Exchange => "exchange",
            Self::Link => "link",
            _ => "other",
        }
    }

    const fn is_evil(self) -> bool {
        matches!(
            self,
            Self::Cycle
                | Self::NotEmpty
                | Self::FutureEpoch
                | Self::NoLease
                | Self::OldNumber
                | Self::Reap
                | Self::Garbage
        )
    }

    /// Whether it changes the content of a file.
    const fn content(self) -> bool {
        matches!(
            self,
            Self::Write
                | Self::Append
                | Self::Truncate
                | Self::Fallocate
                | Self::Punch
                | Self::Zero
                | Self::Clone
                | Self::CloneBack
                | Self::Shift
        )
    }

    /// Whether it changes the names of a directory.
    const fn names(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::Mkdir
                | Self::Symlink
                | Self::Tmpfile
                | Self::Quota
                | Self::Unlink
                | Self::Rename
                | Self::Exchange
                | Self::Link
                | Self::Cycle
                | Self::NotEmpty
                | Self::OldNumber
                | Self::Reap
        )
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    kind: Kind,
    dir: u64,
    name: Vec<u8>,
    dir2: u64,
    name2: Vec<u8>,
    tries: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    Inode(u64),
    Names(u64),
    /// Names of a directory, under a lease that the client has had, right after its own operations.
    OwnNames(u64),
    /// One of the two extended attributes of an inode, in the same way.
    OwnXattr(u64, &'static [u8]),
    Numbers,
    Unpin,
    Release,
}

#[derive(Clone, Debug)]
pub(crate) enum Phase {
    Away,
    Attaching(Nanos),
    Idle,
    Working(Plan),
    Asked(Plan, usize, Ask, Vec<u8>),
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
    /// Its user.
    pub uid: u32,
    /// Shall be stopped for so long, inside its next operation.
    pub stop_for: Option<Nanos>,
    stamp: u64,
    due: Nanos,
    ops: u32,
    phase: Phase,
    session: Option<Session>,
    since: Nanos,
    /// It is LibFS itself, and none of the rest here is about it.
    pub(crate) process: Option<crate::process::Process>,
}

/// What a plan needs next.
pub(crate) enum Need {
    Lease(u64, LeaseMode),
    Numbers,
    Nothing,
    GiveUp,
}

impl Actor {
    /// A client on `node` that will do `ops` operations.
    pub fn new(node: usize, uid: u32, ops: u32) -> Self {
        Self {
            node,
            uid,
            stop_for: None,
            stamp: 0,
            due: Nanos::MAX,
            ops,
            phase: Phase::Away,
            session: None,
            since: 0,
            process: None,
        }
    }

    /// A process on `node`.
    pub fn of_process(node: usize, uid: u32, process: crate::process::Process) -> Self {
        Self { process: Some(process), ..Self::new(node, uid, 0) }
    }

    /// All operations are done and synced.
    pub fn is_done(&self) -> bool {
        match &self.process {
            Some(process) => process.is_done(),
            None => matches!(self.phase, Phase::Done),
        }
    }

    /// For the report of a client that gets no further.
    pub fn describe(&self) -> String {
        if let Some(process) = &self.process {
            return process.describe();
        }
        let client = self.session.as_ref().map_or(0, |s| s.client.0);
        format!("{client:#x} {:?} since {} ops left {}", self.phase, self.since, self.ops)
    }

    pub(crate) fn waits(&self) -> bool {
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

    pub(crate) fn media(&self, c: usize) -> &dyn Media {
        &*self.hosts[self.actors[c].node].region
    }

    pub(crate) fn session(&self, c: usize) -> Option<&Session> {
        self.actors[c].session.as_ref()
    }

    pub(crate) fn word(&self, c: usize, offset: u64) -> u64 {
        let segment = self.session(c).map_or(Segment::Log(u32::MAX), |s| s.segment);
        self.media(c).load64(segment, offset).unwrap_or(0)
    }

    pub(crate) fn put(&self, c: usize, offset: u64, value: u64) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        self.media(c).store64(s.segment, offset, value).map_err(|e| format!("client {c}: {e}"))
    }

    pub(crate) fn actor_has_news(&self, c: usize) -> bool {
        let actor = &self.actors[c];
        actor.waits()
            && actor.session.as_ref().is_some_and(|s| self.word(c, control::EVENT) != s.event)
    }

    /// The client's node is out of the chain.
    pub(crate) fn doubt_session(&mut self, c: usize) {
        if let Some(attached) = self.actors[c].process.as_ref().and_then(|p| p.attached.last()) {
            self.model.headless(attached.session);
            self.locks.doubt(c);
        }
        if self.actors[c].process.as_ref().is_some_and(|p| p.attached.is_empty()) {
            self.locks.doubt(c);
        }
        if let Some(s) = &mut self.actors[c].session {
            s.doubted = true;
            self.model.headless(s.number);
        }
    }

    /// A client whose node ended in order and told it: nothing of it is lost.
    pub(crate) fn judge_dismissed(&mut self, c: usize, n: usize) -> Result<(), String> {
        if self.actors[c].process.is_some() && self.actors[c].node == n {
            return self.judge_dismissed_process(c);
        }
        let Some(s) = self.session(c).filter(|_| self.actors[c].node == n) else { return Ok(()) };
        let (last, ends) = (s.log.last().0, s.broken.is_some() || s.spoilt);
        let there = self.media(c).size(s.segment).is_ok();
        if ends || !there || self.word(c, control::STATE) != control::STATE_GONE {
            return Ok(());
        }
        let replicated = self.word(c, control::REPLICATED);
        if replicated < last {
            return Err(format!(
                "client {c}: its node ended in order with {replicated} of {last} replicated"
            ));
        }
        if let Some(s) = &mut self.actors[c].session {
            // So its node need not keep its place.
            s.doubted = true;
        }
        Ok(())
    }

    /// The session ended, by whatever: what was not vouched for may be lost.
    pub(crate) fn end_session(&mut self, c: usize, why: &str) {
        if let Some(s) = self.actors[c].session.take() {
            self.trace(|| format!("client {c} {:#x} ends: {why}", s.client.0));
            let last = s.broken.map_or(s.log.last().0, |broken| broken - 1);
            self.model.ended(s.number, last);
            self.unpin(s.number);
        }
        let done = self.actors[c].ops == 0;
        self.actors[c].phase =
            if done && self.actors[c].is_done() { Phase::Done } else { Phase::Away };
        let delay = self.between(MS, 20 * MS);
        self.actors[c].due = Nanos::MAX;
        self.step_in(c, delay);
    }

    pub(crate) fn kill_actor(&mut self, c: usize) -> Result<(), String> {
        let n = self.actors[c].node;
        let whole = self.session(c).is_none_or(|s| s.broken.is_none());
        // What a session that has ended left in its log nobody takes.
        let whole = whole && self.actors[c].process.as_ref().is_none_or(Process::is_attached);
        let ended = if self.actors[c].process.is_some() {
            self.end_process(c, ("killed", true))
        } else {
            let ended = self.session(c).map(|s| (s.client, s.number, s.log.last().0));
            // What it writes after it was expelled, and its log removed, nobody reads.
            let there = self.session(c).is_some_and(|s| self.media(c).size(s.segment).is_ok());
            let inside = matches!(self.actors[c].phase, Phase::Inside(..));
            if inside && self.random.chance(1, 2) && there {
                self.tear(c)?;
            }
            ended.inspect(|_| self.end_session(c, "killed"))
        };
        let Some((client, session, last)) = ended else { return Ok(()) };
        let incarnation = self.hosts[n].incarnation;
        if let Some(node) = self.hosts[n].node.as_ref().filter(|_| whole) {
            let epoch = node.status().epoch;
            let ended = Ended { session, last, client, node: n, incarnation, epoch };
            self.at(self.now + 20 * MS, Item::Drained(ended, 0));
        }
        let delay = self.between(20 * US, 2 * MS);
        self.at(self.now + delay, Item::To(n, incarnation, Event::ClientGone(client)));
        Ok(())
    }

    /// The log of a dead process is complete: once its node has done with it, all of it counts. Not if
    /// the chain has changed meanwhile.
    pub(crate) fn look_for_drained(&mut self, ended: Ended, tries: u32) -> Result<(), String> {
        let host = &self.hosts[ended.node];
        let Some(node) = host.node.as_ref().filter(|_| host.incarnation == ended.incarnation)
        else {
            return Ok(());
        };
        let status = node.status();
        // A node that had lost its place before, and knew, has dropped the log.
        let inside = status.chain.contains(&base::NodeId(ended.node as u32 + 1));
        if status.epoch != ended.epoch || !inside || tries > 100 {
            return Ok(());
        }
        // What only this node has is lost with it.
        let everywhere = status.chain.iter().all(|member| {
            let other = self.hosts[member.0 as usize - 1].node.as_ref();
            let other = other.map(service::core::Node::status);
            // (In another epoch it may be another stream, which this node does not know of yet.)
            other.is_some_and(|x| x.stream >= status.stream && x.epoch == status.epoch)
        });
        if !everywhere || status.clients.iter().any(|c| c.client == ended.client) {
            self.at(self.now + 20 * MS, Item::Drained(ended, tries + 1));
            return Ok(());
        }
        self.trace(|| format!("all of {:#x} up to {}", ended.client.0, ended.last));
        self.model.drained(ended.session, ended.last)
    }

    /// Half an entry: the client died while it appended.
    pub(crate) fn tear(&mut self, c: usize) -> Result<(), String> {
        let Some(s) = self.session(c) else { return Ok(()) };
        let data = [1; 200];
        let ino = InodeId::ROOT;
        let op = Op::SetXattr { ino, name: b"user.torn", value: &data };
        let &Descriptor { epoch, incarnation, .. } = s.log.descriptor();
        let bytes = op.to_entry(Sequence(s.next()), epoch, 0, 1, incarnation);
        let at = s.log.next_at(0);
        if at + bytes.len() as u64 <= s.log.descriptor().lane_offset(1) {
            let cut = if s.next() % 2 == 0 { 64 } else { 128 };
            self.media(c).write(s.segment, at, &bytes[..cut]).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    pub(crate) fn actor_attached(
        &mut self,
        c: usize,
        (stamp, incarnation): (u64, u64),
        client: ClientId,
        segment: u32,
    ) -> Result<(), String> {
        let n = self.actors[c].node;
        let wanted =
            matches!(self.actors[c].phase, Phase::Attaching(at) if at & 0xff_ffff_ffff == stamp);
        let host = &self.hosts[n];
        if !wanted || host.node.is_none() || host.incarnation != incarnation {
            // Nobody waits for it any more.
            let incarnation = host.incarnation;
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
        let region = std::sync::Arc::clone(&self.hosts[n].region);
        let memory = OverMedia::new(region, segment);
        self.actors[c].session = Some(Session {
            number,
            client,
            segment,
            memory,
            log: Log::new(descriptor),
            leases: BTreeMap::new(),
            fresh: Vec::new(),
            event: 0,
            ever: BTreeSet::new(),
            created: Vec::new(),
            dared: BTreeSet::new(),
            spoilt: false,
            newest_at: 0,
            broken: None,
            doubted: false,
        });
        if !self.is_seated(n) {
            self.doubt_session(c);
        }
        self.actors[c].phase = Phase::Idle;
        self.step_in(c, US);
        Ok(())
    }

    pub(crate) fn ring(&mut self, c: usize, urgent: bool) -> Result<(), String> {
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
        if self.session(c).is_some_and(|s| s.spoilt) {
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
            Phase::Asked(plan, slot, ask, body) => {
                self.look_for_reply(c, plan, slot, ask, body)?;
            }
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
    pub(crate) fn check_attached(&mut self, c: usize) -> Result<bool, String> {
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
            if let Some(number) = self.session(c).filter(|_| !gone).map(|s| s.number) {
                // What the client believes of what it did.
                self.model.vouched(number, self.word(c, control::REPLICATED))?;
            }
            let why = if state == control::STATE_EXPELLED { "expelled" } else { "dismissed" };
            let stopped = self.outcome.faults.contains_key("stop");
            let doubted = self.session(c).is_some_and(|s| s.doubted || s.broken.is_some());
            if !doubted && state == control::STATE_GONE && !stopped {
                // Nobody else can have served: a restarted nicfs goes on with its clients. (The
                // log of one that was expelled may be removed before it looks again.)
                return Err(format!("client {c} was dismissed by a node that kept its place"));
            }
            self.end_session(c, why);
            return Ok(false);
        }
        let lawful = |seq: u64| self.session(c).is_none_or(|s| !s.dared.contains(&seq));
        if self.word(c, control::REFUSALS) != 0 && lawful(self.word(c, control::REFUSED_SEQ)) {
            let (seq, errno) =
                (self.word(c, control::REFUSED_SEQ), self.word(c, control::REFUSED_ERRNO));
            if seq == 0 && self.session(c).is_some_and(|s| !s.dared.is_empty()) {
                return Ok(true);
            }
            let client = self.session(c).map_or(0, |s| s.client.0);
            return Err(format!("client {c} {client:#x}: operation {seq} refused with {errno}"));
        }
        Ok(true)
    }

    /// By the time that everything is synced, every entry that must be refused has been.
    pub(crate) fn check_dared(&mut self, c: usize, seq: u64) -> Result<(), String> {
        let refusals = self.word(c, control::REFUSALS);
        let epoch = self.word(c, control::EPOCH);
        let Some(s) = self.session(c) else { return Ok(()) };
        // A new head counts anew.
        let counts = epoch == u64::from(s.log.descriptor().epoch.0);
        let due = s.dared.range(..=seq).count() as u64;
        if counts && refusals < due {
            return Err(format!("hostile client {c}: {due} entries to refuse, {refusals} refused"));
        }
        Ok(())
    }

    pub(crate) fn attach(&mut self, c: usize) {
        let n = self.actors[c].node;
        if self.hosts[n].gone {
            self.actors[c].phase = Phase::Done;
            return;
        }
        if self.hosts[n].node.is_some() {
            let token = (c as u64) << 40 | (self.now & 0xff_ffff_ffff);
            let event = Event::Attach {
                token,
                pid: 100 + c as u32,
                start_time: self.now,
                uid: self.actors[c].uid,
                gid: self.actors[c].uid,
                groups: Vec::new(),
                lanes: 0,
            };
            let incarnation = self.hosts[n].incarnation;
            self.at(self.now + 20 * US, Item::To(n, incarnation, event));
            self.actors[c].phase = Phase::Attaching(self.now);
        }
        self.step_in(c, 30 * MS);
    }
}
