//! Runs a workload: the production node over a region that records, and a client that speaks its
//! protocol and composes log entries as LibFS does. What the oracle expects grows alongside.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::random::Random;
use base::wire::Reader;
use base::{ClientId, Epoch, InodeId, Nanos, NodeId, Sequence};
use client::libfs::log::Log;
use client::libfs::over_media::{ByHand, OverMedia};
use client::libfs::requests::{self, Seen as Slot};
use service::core::ring::{RING_BYTES_MIN, Ring};
use service::core::work::Piece;
use service::core::{Copier, Effect, Event as Input, Node, NodeConfig};
use storage::format::control::{self, Descriptor, LeaseMode, LeaseWord};
use storage::format::entry::{Op, Stamp, mask};
use storage::format::rpc::{self, AccountId, Amount, Granted, InodeReply, Request};
use storage::format::superblock::Durability;
use storage::limits::LANE_BYTES_MIN;
use storage::media::{Media, Segment};
use storage::volume::{CopyItem, Params, Volume, run_copies};

use super::oracle::{LIMIT, Model, Oracle, SNAPSHOTS, Seen, UTIME, content};
use super::trace::{Acks, Event, Region, Side};
use super::workload::{Act, Flag, Pace};

/// The node, or the first of two.
pub const HEAD: NodeId = NodeId(1);
/// The second of two.
pub const MEMBER: NodeId = NodeId(2);
/// Time of mkfs.
pub const MADE: u64 = 1_000_000_000;
/// Realtime at virtual time 0.
const REALTIME: u64 = 1_700_000_000_000_000_000;
/// Looks at the node until it must have answered.
const PATIENCE: u32 = 1000;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

/// hostd. It takes until time passes.
#[derive(Debug)]
struct Host {
    region: Arc<Region>,
    jobs: Mutex<Jobs>,
}

#[derive(Debug, Default)]
struct Jobs {
    /// Copies that it is asked to run.
    asked: Vec<(u64, Vec<CopyItem>)>,
    /// No job up to this one is run any more.
    void: u64,
}

impl Host {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, id: u64, items: Vec<CopyItem>) {
        let mut jobs = self.jobs();
        if id > jobs.void {
            jobs.asked.push((id, items));
        }
    }
}

impl Copier for Host {
    /// It is killed when it has done half of the copies.
    fn settle(&self, job: u64) -> Result<bool, String> {
        let mut jobs = self.jobs();
        jobs.void = jobs.void.max(job);
        let Some(at) = jobs.asked.iter().position(|(id, _)| *id == job) else { return Ok(false) };
        let (_, items) = jobs.asked.remove(at);
        let half = &items[..items.len().div_ceil(2)];
        run_copies(&*self.region.by(Side::Host), half).map_err(|e| format!("hostd: {e}"))?;
        Ok(false)
    }
}

/// A node that runs on a region.
pub struct Machine {
    region: Arc<Region>,
    id: NodeId,
    node: Node,
    now: Nanos,
    out: Vec<Effect>,
    host: Arc<Host>,
    /// Work that takes until time passes.
    pieces: Vec<Piece>,
    /// Messages to the other member.
    frames: Vec<(u16, Vec<u8>)>,
    /// The member after this one.
    peer: Option<Box<Machine>>,
    /// It keeps what it is sent, and does nothing else until everybody is to be quiet.
    lags: bool,
    /// The client's log, and the sequence of each operation's entry.
    log: Option<(Segment, Vec<u64>)>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Machine at {} {:?}", self.now, self.node)
    }
}

/// Makes an empty volume on the region of a node.
pub fn format(
    region: &Arc<Region>,
    node: NodeId,
    durability: Durability,
    blocks: usize,
) -> Result<(), String> {
    let params = Params {
        uuid: [7; 16],
        name: "crash".into(),
        node,
        durability,
        capacity_bytes: blocks as u64 * 4096,
        stream_bytes: RING_BYTES_MIN,
        time: MADE,
        uid: 0,
        gid: 0,
        mode: 0o755,
    };
    Volume::format(region.by(Side::Node), &params).map(drop).map_err(|e| format!("format: {e}"))
}

impl Machine {
    fn open(region: &Arc<Region>, id: NodeId, epoch: u32) -> Result<Self, String> {
        let config = NodeConfig {
            // Some chunks are put into the ring by the thread that decides, some by another.
            limits: service::core::limits::Limits {
                inline_bytes: 4000,
                ..service::core::limits::Limits::SHIPPED
            },
            node: id,
            lanes: 2,
            lane_bytes: LANE_BYTES_MIN.next_multiple_of(4096),
            clients_max: 16,
            clients_per_user: 16,
            per_user: service::core::PerUser::SHIPPED,
            scheduler: Default::default(),
            weights: Default::default(),
            ring_bytes: RING_BYTES_MIN,
            memory: 64 << 20,
            high: 80,
            low: 50,
            join_step: service::core::JOIN_STEP,
            room: service::core::Shares::SHIPPED,
            grace: 0,
            // Each start is after a power cut.
            boot: epoch.into(),
            secret: 77,
            incarnation: 1,
        };
        let random = Random::new(u64::from(epoch));
        let mut node = Node::new(config, region.by(Side::Node), random)
            .map_err(|e| format!("the node does not start: {e}"))?;
        node.set_realtime_offset(REALTIME);
        Ok(Self {
            region: Arc::clone(region),
            id,
            node,
            now: 1000,
            out: Vec::new(),
            host: Arc::new(Host { region: Arc::clone(region), jobs: Mutex::default() }),
            pieces: Vec::new(),
            frames: Vec::new(),
            peer: None,
            lags: false,
            log: None,
        })
    }

    /// Starts nicfs on what lies in the region, as the only member of its chain.
    pub fn start(region: &Arc<Region>, id: NodeId, epoch: u32, host: bool) -> Result<Self, String> {
        let mut machine = Self::open(region, id, epoch)?;
        if host {
            let host = Arc::clone(&machine.host);
            machine.tell(Input::HostUp(host))?;
        }
        let (chain, syncing) = (vec![id], Vec::new());
        machine.tell(Input::View { epoch: Epoch(epoch), chain, syncing, lapse: 0 })?;
        Ok(machine)
    }

    /// Starts a chain of two.
    pub fn pair(
        head: &Arc<Region>,
        member: &Arc<Region>,
        epoch: u32,
        host: bool,
        lags: bool,
    ) -> Result<Self, String> {
        let mut machine = Self::open(head, HEAD, epoch)?;
        let mut peer = Box::new(Self::open(member, MEMBER, epoch)?);
        peer.lags = lags;
        let (chain, syncing) = (vec![HEAD, MEMBER], Vec::new());
        let view = Input::View { epoch: Epoch(epoch), chain, syncing, lapse: 0 };
        if host {
            let host = Arc::clone(&peer.host);
            peer.tell(Input::HostUp(host))?;
        }
        peer.tell(view.clone())?;
        machine.peer = Some(peer);
        machine.tell(view)?;
        machine.tell(Input::PeerUp(MEMBER))?;
        machine.exchange()?;
        Ok(machine)
    }

    fn tell(&mut self, input: Input) -> Result<(), String> {
        self.node.apply(self.now, input, &mut self.out);
        self.carry_out()
    }

    fn carry_out(&mut self) -> Result<(), String> {
        for effect in std::mem::take(&mut self.out) {
            match effect {
                Effect::Copies { id, items } => self.host.ask(id, items),
                Effect::Work(piece) => self.pieces.push(piece),
                Effect::Attached { .. } | Effect::AttachRefused { .. } => self.out.push(effect),
                Effect::Send { kind, body, .. } => self.frames.push((kind, body.to_vec())),
                _ => {}
            }
        }
        if let Some(failure) = self.node.failure() {
            return Err(format!("node {} failed: {failure}", self.id));
        }
        self.exchange()
    }

    /// What the members say to each other arrives at once.
    fn exchange(&mut self) -> Result<(), String> {
        let Some(mut peer) = self.peer.take() else { return Ok(()) };
        peer.now = self.now;
        let mut done = Ok(());
        while done.is_ok() && !(self.frames.is_empty() && peer.frames.is_empty()) {
            for (kind, body) in std::mem::take(&mut self.frames) {
                let from = self.id;
                done =
                    done.and_then(|()| peer.tell(Input::Frame { from, kind, body: body.into() }));
            }
            for (kind, body) in std::mem::take(&mut peer.frames) {
                let from = peer.id;
                done =
                    done.and_then(|()| self.tell(Input::Frame { from, kind, body: body.into() }));
            }
        }
        self.peer = Some(peer);
        done?;
        self.note_acks()
    }

    /// Notes what fsync may say is durable: the words are not in the region that is watched.
    fn note_acks(&self) -> Result<(), String> {
        let Some((segment, sequences)) = self.log.as_ref().filter(|_| self.peer.is_some()) else {
            return Ok(());
        };
        let media = self.region.by(Side::Node);
        let word = media.load64(*segment, control::REPLICATED).map_err(|e| e.to_string())?;
        let covered = sequences.iter().filter(|s| **s <= word).count();
        self.watched().note(Event::Synced(covered));
        Ok(())
    }

    /// One turn of the driver's loop.
    fn turn(&mut self) -> Result<(), String> {
        self.node.look_around(self.now, &mut self.out);
        for _ in 0..PATIENCE {
            if !self.node.work(self.now, &mut self.out) {
                break;
            }
        }
        self.carry_out()
    }

    fn pass(&mut self) -> Result<(), String> {
        let jobs = std::mem::take(&mut self.host.jobs().asked);
        self.tell(Input::Tick)?;
        for (id, items) in jobs {
            let media = self.region.by(Side::Host);
            let done = run_copies(&*media, &items).and_then(|()| media.fence());
            done.map_err(|e| format!("hostd: {e}"))?;
            self.tell(Input::CopiesDone { id, bad: Vec::new() })?;
        }
        self.turn()
    }

    /// The work that is under way comes to its end.
    fn work(&mut self) -> Result<(), String> {
        let mut pieces = std::mem::take(&mut self.pieces);
        if pieces.first().is_some_and(|piece| piece.id() % 2 == 0) {
            // They may end in any order.
            pieces.reverse();
        }
        for piece in pieces {
            piece.run(&*self.region.by(Side::Worker));
            self.tell(Input::WorkEnded(piece.id()))?;
        }
        Ok(())
    }

    fn wait(&mut self, time: Nanos) -> Result<(), String> {
        self.now += time;
        self.work()?;
        if let Some(peer) = &mut self.peer {
            peer.now = self.now;
            peer.work()?;
        }
        self.pass()?;
        if let Some(peer) = self.peer.as_mut().filter(|p| !p.lags) {
            peer.now = self.now;
            peer.pass()?;
        }
        self.exchange()
    }

    fn is_published(&self) -> bool {
        // (What is on its way to the ring is in the stream, and not yet in its position.)
        self.pieces.is_empty()
            && self.node.volume().root().stream_seq >= self.node.status().stream
            && self.peer.as_ref().is_none_or(|p| p.lags || p.is_published())
    }

    /// Goes on until everything in the stream is published, and nothing new comes.
    pub fn quiet(&mut self) -> Result<(), String> {
        let mut still = 0;
        for _ in 0..PATIENCE {
            self.wait(6_000_000)?;
            still = if self.is_published() { still + 1 } else { 0 };
            if still == 2 {
                return Ok(());
            }
        }
        Err("the node does not publish what its stream holds".into())
    }

    /// A member that lagged catches up.
    pub fn catch_up(&mut self) -> Result<(), String> {
        match &mut self.peer {
            Some(peer) => peer.lags = false,
            None => return Ok(()),
        }
        self.quiet()
    }

    /// The region that is looked at: the last member's.
    fn watched(&self) -> &Arc<Region> {
        self.peer.as_ref().map_or(&self.region, |p| &p.region)
    }

    fn ring(&self) -> Result<Ring, String> {
        let published = self.node.volume().root().stream_seq;
        let ring = Ring::open(self.region.by(Side::Node), RING_BYTES_MIN, published);
        ring.map_err(|e| e.to_string())
    }

    /// Bytes to the end of the stream ring's lap.
    pub fn ring_left(&self) -> Result<u64, String> {
        let (_, at) = self.ring()?.next_body(0).ok_or("the stream ring is full")?;
        Ok(RING_BYTES_MIN.next_multiple_of(4096) + 4096 - at)
    }

    /// Chunks that the stream ring keeps.
    pub fn ring_kept(&self) -> Result<u64, String> {
        let ring = self.ring()?;
        Ok(ring.last().0 + 1 - ring.oldest().0)
    }

    /// The volume as the node has it.
    pub fn volume(&self) -> &Volume {
        self.node.volume()
    }
}

/// What a volume shows.
pub fn view(volume: &Volume) -> Result<Vec<Seen>, String> {
    let (mut seen, mut ids) = (Vec::new(), BTreeMap::new());
    look(volume, InodeId::ROOT, String::new(), &mut ids, &mut seen)
        .map_err(|e| format!("the volume cannot be read: {e}"))?;
    if volume.has_snapshots() {
        // What the node has published, by whoever opens the region.
        let bad = |e: storage::volume::Fault| format!("a snapshot cannot be read: {e}");
        let mut opened = Volume::open(Arc::clone(volume.media())).map_err(bad)?;
        let mut all = volume.snapshots(0, usize::MAX);
        all.sort_by(|a, b| a.snapshot.name.cmp(&b.snapshot.name));
        for stat in all {
            let Some(state) = opened.read_snapshot(stat.snapshot.slot) else {
                return Err("a snapshot is not on media".into());
            };
            let path = format!("{SNAPSHOTS}/{}", String::from_utf8_lossy(&stat.snapshot.name));
            look(state, InodeId::ROOT, path, &mut BTreeMap::new(), &mut seen).map_err(bad)?;
        }
    }
    Ok(seen)
}

fn look(
    volume: &Volume,
    ino: InodeId,
    path: String,
    ids: &mut BTreeMap<u64, usize>,
    seen: &mut Vec<Seen>,
) -> Result<(), storage::volume::Fault> {
    let Some(r) = volume.attr(ino)? else { return Ok(()) };
    let first = ids.len();
    let id = *ids.entry(ino.0).or_insert(first);
    let nanos = |s: Stamp| (s.sec as u64).wrapping_mul(1_000_000_000) + u64::from(s.nsec);
    let (mut body, mut names, mut size) = (Vec::new(), BTreeMap::new(), r.size);
    match r.mode & S_IFMT {
        S_IFREG => {
            body.resize(r.size.min(64 << 20) as usize, 0);
            volume.read_file(ino, 0, &mut body)?;
        }
        S_IFLNK => body = volume.symlink(ino)?,
        _ => {
            size = 0;
            volume.readdir(ino, 2, usize::MAX, &mut |n| {
                names.insert(String::from_utf8_lossy(n.name).into_owned(), n.ino);
                true
            })?;
        }
    }
    let mut xattrs = BTreeMap::new();
    for name in volume.xattrs(ino)? {
        let value = volume.xattr(ino, &name)?.unwrap_or_default();
        xattrs.insert(name, value);
    }
    if path.is_empty() {
        let limit = volume.limits().find(|(id, _)| *id == AccountId::User(7));
        let shown = limit.map(|(_, l)| (LIMIT.to_vec(), l.blocks.to_le_bytes().to_vec()));
        xattrs.extend(shown);
    }
    let below = if path.is_empty() { String::new() } else { format!("{path}/") };
    seen.push(Seen {
        path,
        id,
        mode: r.mode,
        nlink: r.nlink,
        uid: r.uid,
        size,
        mtime: nanos(r.mtime),
        ctime: nanos(r.ctime),
        body,
        xattrs,
    });
    for (name, child) in names {
        look(volume, child, format!("{below}{name}"), ids, seen)?;
    }
    Ok(())
}

/// A client, and what it did.
pub struct Session {
    /// Its node.
    pub machine: Machine,
    /// What it did, as the oracle has it.
    pub oracle: Oracle,
    media: Arc<dyn Media>,
    client: ClientId,
    segment: Segment,
    memory: OverMedia,
    log: Log<ByHand>,
    fresh: Vec<u64>,
    /// Leases held: only the service itself takes them back, to move what it places.
    held: BTreeMap<u64, Granted>,
    /// Real inode numbers of the model's inodes.
    inodes: BTreeMap<u64, u64>,
    step: u64,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session of {:?} on {:?}", self.client, self.machine)
    }
}

impl Session {
    /// Attaches to a node that shows what `model` shows.
    pub fn attach(mut machine: Machine, model: Model, step: u64) -> Result<Self, String> {
        let media = machine.region.by(Side::Client);
        let mut inodes = BTreeMap::new();
        // (Nobody works with what snapshots show.)
        let now = |seen: &Seen| !seen.path.starts_with(SNAPSHOTS);
        for seen in view(machine.volume())?.into_iter().filter(now) {
            let (mut ino, mut id) = (InodeId::ROOT, Some(1));
            if !seen.path.is_empty() {
                id = model.find(&seen.path);
                for part in seen.path.split('/') {
                    let found = machine.volume().lookup(ino, part.as_bytes());
                    let found = found.map_err(|e| e.to_string())?;
                    ino = found.ok_or("a name has gone")?.0;
                }
            }
            inodes.insert(id.ok_or_else(|| format!("{} is not in the model", seen.path))?, ino.0);
        }
        let (pid, start_time, uid, gid) = (100, 1, 0, 0);
        let groups = Vec::new();
        let attach = Input::Attach { token: 1, pid, start_time, uid, gid, groups, lanes: 0 };
        machine.tell(attach)?;
        let attached = machine.out.drain(..).find_map(|e| match e {
            Effect::Attached { client, segment, .. } => Some((client, Segment::Log(segment))),
            _ => None,
        });
        let (client, segment) = attached.ok_or("the node lets nobody attach")?;
        let mut bytes = [0; control::DESCRIPTOR_BYTES];
        media.read(segment, 0, &mut bytes).map_err(|e| e.to_string())?;
        let descriptor = Descriptor::decode(&bytes).map_err(|e| e.to_string())?;
        let oracle = Oracle::new(model);
        machine.log = Some((segment, Vec::new()));
        let mut session = Self {
            machine,
            oracle,
            memory: OverMedia::new(Arc::clone(&media), segment),
            media,
            client,
            segment,
            log: Log::new(descriptor),
            fresh: Vec::new(),
            held: BTreeMap::new(),
            inodes,
            step,
        };
        // All that it needs at once: a request makes the service fetch the log before it.
        for id in session.inodes.keys().copied().collect::<Vec<_>>() {
            session.lease(id)?;
        }
        let first = session.number()?;
        session.fresh.push(first.0);
        Ok(session)
    }

    fn put(&self, offset: u64, value: u64) -> Result<(), String> {
        self.media.store64(self.segment, offset, value).map_err(|e| e.to_string())
    }

    fn word(&self, offset: u64) -> Result<u64, String> {
        self.media.load64(self.segment, offset).map_err(|e| e.to_string())
    }

    fn ring(&mut self) -> Result<(), String> {
        self.machine.now += 1000;
        self.machine.tell(Input::Doorbell(self.client))?;
        self.machine.turn()
    }

    /// Asks the service and waits for the answer.
    fn ask(&mut self, request: &Request<'_>) -> Result<Vec<u8>, String> {
        let mut body = Vec::new();
        request.encode(Sequence(self.log.last().0), &mut body);
        requests::put(&self.memory, 0, &body);
        self.ring()?;
        for _ in 0..PATIENCE {
            if requests::look(&self.memory, 0) == Slot::Reply {
                let mut reply = Vec::new();
                requests::take(&self.memory, 0, &mut reply);
                let (status, mut r) = rpc::reply_status(&reply).map_err(|e| e.to_string())?;
                status.map_err(|e| format!("{request:?} refused with {e:?}"))?;
                return Ok(r.rest().to_vec());
            }
            self.machine.wait(100_000)?;
        }
        Err(format!("{request:?} is not answered"))
    }

    /// Takes a write lease.
    fn lease(&mut self, id: u64) -> Result<InodeId, String> {
        let ino = InodeId(*self.inodes.get(&id).ok_or("an inode without a number")?);
        if !self.held.contains_key(&ino.0) {
            self.take(ino)?;
        }
        Ok(ino)
    }

    fn take(&mut self, ino: InodeId) -> Result<(), String> {
        let reply = self.ask(&Request::Inode { ino, mode: LeaseMode::Write, flags: 0 })?;
        let reply = InodeReply::decode(&mut Reader::new("reply", &reply));
        self.held.insert(ino.0, reply.map_err(|e| e.to_string())?.granted);
        Ok(())
    }

    /// Takes again what it had to give back, before the next operation: nothing moves from then on until that is in the log.
    fn take_again(&mut self) -> Result<(), String> {
        for _ in 0..PATIENCE {
            let mut gone = Vec::new();
            for (ino, granted) in &self.held {
                if self.word(control::lease_word(granted.slot))? != granted.word.0 {
                    gone.push(*ino);
                }
            }
            if gone.is_empty() {
                return Ok(());
            }
            for ino in gone {
                self.held.remove(&ino);
                // What is removed is not there any more.
                let _ = self.take(InodeId(ino));
            }
        }
        Err("its leases are recalled again and again".into())
    }

    /// A fresh inode number.
    fn number(&mut self) -> Result<InodeId, String> {
        if self.fresh.is_empty() {
            let reply = self.ask(&Request::Inodes { count: 8 })?;
            let mut r = base::wire::Reader::new("numbers", &reply);
            for _ in 0..r.u32().map_err(|e| e.to_string())? {
                let corrupt = |e: base::wire::Corrupt| e.to_string();
                let (ino, slot) = (r.u64().map_err(corrupt)?, r.u32().map_err(corrupt)?);
                let word = LeaseWord(r.u64().map_err(corrupt)?);
                self.fresh.push(ino);
                self.held.insert(ino, Granted { slot, word });
                r.u64().map_err(corrupt)?;
            }
        }
        self.fresh.pop().map(InodeId).ok_or_else(|| "no inode numbers".into())
    }

    /// Does one operation, or an fsync. `Ok(false)`: POSIX refuses it.
    pub fn act(&mut self, act: &Act, pace: Pace) -> Result<bool, String> {
        if *act == Act::Fsync {
            self.sync()?;
            return Ok(true);
        }
        if *act == Act::Pause {
            self.ring()?;
            self.machine.wait(3_000_000)?;
            self.machine.quiet()?;
            return Ok(true);
        }
        self.step += 1;
        self.machine.now += 10_000;
        let time = self.machine.now + REALTIME;
        let mut model = self.oracle.last().clone();
        if model.apply(act, self.step, time).is_none() {
            return Ok(false);
        }
        let fresh = model.next() != self.oracle.last().next();
        let made = if fresh { self.number()? } else { InodeId::NONE };
        if fresh {
            self.inodes.insert(self.oracle.last().next(), made.0);
        }
        self.take_again()?;
        self.perform(act, made, time).map_err(|e| format!("{act}: {e}"))?;
        self.oracle.push(model);
        let done = self.oracle.len();
        self.machine.watched().note(Event::Returned(done));
        match pace {
            Pace::Lazy => {}
            Pace::Fetching => {
                self.ring()?;
                self.machine.wait(3_000_000)?;
            }
            Pace::Eager => {
                self.ring()?;
                self.machine.wait(3_000_000)?;
                self.machine.quiet()?;
            }
        }
        self.refusals()?;
        Ok(true)
    }

    fn refusals(&self) -> Result<(), String> {
        if self.word(control::REFUSALS)? == 0 {
            return Ok(());
        }
        let (seq, errno) = (self.word(control::REFUSED_SEQ)?, self.word(control::REFUSED_ERRNO)?);
        Err(format!("the service refuses operation {seq} with {errno}"))
    }

    /// Where the service says how far fsync may return, and what its words mean.
    pub fn acks(&self) -> Acks {
        let (segment, offset) = (self.segment, control::REPLICATED as usize);
        let sequences = self.machine.log.as_ref().map_or(Vec::new(), |log| log.1.clone());
        Acks { segment, offset, sequences }
    }

    /// Steps done so far: each writes other bytes.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The process ends; its log is published and removed.
    pub fn end(&mut self) -> Result<(), String> {
        self.machine.log = None;
        self.machine.tell(Input::ClientGone(self.client))?;
        self.machine.quiet()
    }

    /// fsync.
    pub fn sync(&mut self) -> Result<(), String> {
        let last = self.log.last().0;
        self.put(control::LAST_SEQUENCE, last)?;
        self.put(control::SYNC_REQUEST, last)?;
        self.ring()?;
        for _ in 0..PATIENCE {
            if self.word(control::REPLICATED)? >= last {
                return self.refusals();
            }
            self.machine.wait(100_000)?;
        }
        Err("fsync does not return".into())
    }

    fn id(&self, path: &str) -> Result<u64, String> {
        self.oracle.last().find(path).ok_or_else(|| format!("{path} is not in the model"))
    }

    fn place<'a>(&mut self, path: &'a str) -> Result<(InodeId, &'a [u8]), String> {
        let (dir, name) = self.oracle.last().parent(path).ok_or("no directory in the model")?;
        Ok((self.lease(dir)?, name.as_bytes()))
    }

    /// Works out the entry and appends it.
    fn perform(&mut self, act: &Act, made: InodeId, time: u64) -> Result<(), String> {
        let step = self.step;
        match act {
            Act::Create(n) => self.make(n, made, S_IFREG | 0o644, b"", time),
            Act::Mkdir(n) => self.make(n, made, S_IFDIR | 0o755, b"", time),
            Act::Symlink(n, to) => self.make(n, made, S_IFLNK | 0o777, to.as_bytes(), time),
            Act::Unlink(n) => {
                let ((parent, name), id) = (self.place(n)?, self.id(n)?);
                let ino = self.lease(id)?;
                self.append(&Op::Unlink { ino, parent, name, open: false }, time)
            }
            Act::Rmdir(n) => {
                let ((parent, name), id) = (self.place(n)?, self.id(n)?);
                let ino = self.lease(id)?;
                self.append(&Op::Rmdir { ino, parent, name, open: false }, time)
            }
            Act::Link(a, b) => {
                let ((parent, name), id) = (self.place(b)?, self.id(a)?);
                let ino = self.lease(id)?;
                self.append(&Op::Link { ino, parent, name }, time)
            }
            Act::Rename(a, b, flag) => {
                let ((parent, name), (new_parent, new_name)) = (self.place(a)?, self.place(b)?);
                let (id, old) = (self.id(a)?, self.oracle.last().find(b));
                let ino = self.lease(id)?;
                let replaced = old.map_or(Ok(InodeId::NONE), |old| self.lease(old))?;
                let (noreplace, exchange) = (*flag == Flag::NoReplace, *flag == Flag::Exchange);
                let open = false;
                let op = Op::Rename {
                    ino,
                    parent,
                    name,
                    new_parent,
                    new_name,
                    replaced,
                    noreplace,
                    exchange,
                    open,
                };
                self.append(&op, time)
            }
            Act::Write(n, offset, len) => {
                let (ino, data) = (self.inode(n)?, content(step, *len as usize));
                let (offset, clear_setid) = (*offset, false);
                self.append(&Op::Write { ino, offset, data: &data, clear_setid }, time)
            }
            Act::Append(n, len) => {
                let (ino, data) = (self.inode(n)?, content(step, *len as usize));
                let offset = self.oracle.last().size(self.id(n)?);
                self.append(&Op::Write { ino, offset, data: &data, clear_setid: false }, time)
            }
            Act::Truncate(n, size) => {
                let (ino, size) = (self.inode(n)?, *size);
                self.append(&Op::Truncate { ino, size, clear_setid: false }, time)
            }
            Act::Fallocate(n, offset, len, mode @ (8 | 32)) => {
                let (ino, offset, len, insert) = (self.inode(n)?, *offset, *len, *mode == 32);
                let now = self.oracle.last().size(self.id(n)?);
                let size = if insert { now + len } else { now.saturating_sub(len) };
                self.append(&Op::Shift { ino, offset, len, insert, size }, time)
            }
            Act::Fallocate(n, offset, len, mode) => {
                let (ino, offset, len, mode) = (self.inode(n)?, *offset, *len, *mode);
                self.append(&Op::Fallocate { ino, offset, len, mode }, time)
            }
            Act::Clone(a, b) => {
                let (source, ino) = (self.inode(a)?, self.inode(b)?);
                let len = self.oracle.last().size(self.id(a)?);
                let (offset, source_offset) = (0, 0);
                self.append(
                    &Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false },
                    time,
                )
            }
            Act::Back(name, a, b) => {
                let found = self.oracle.last().find_then(name, a);
                let (_, size) = found.ok_or("the snapshot is not in the model")?;
                self.bring(name, a, b, [0, 0, size], time)
            }
            Act::Piece(name, a, b, piece) => self.bring(name, a, b, *piece, time),
            Act::Tmpfile(n, len) => self.tmpfile(n, made, &content(step, *len as usize), time),
            Act::SetAcl(n, user, others) => {
                let (ino, value) = (self.inode(n)?, crate::acl::list(7, *user, *others));
                let name = b"system.posix_acl_access";
                self.append(&Op::SetXattr { ino, name, value: &value }, time)
            }
            Act::Quota(blocks) => {
                let (ino, limit) = (self.lease(1)?, Amount { blocks: *blocks, inodes: 0 });
                self.append(&Op::SetQuota { ino, user: Some(7), limit }, time)
            }
            Act::Snapshot(name) => {
                let name = name.as_bytes();
                self.append(&Op::Snapshot { ino: InodeId::ROOT, name }, time)
            }
            Act::DropSnapshot(name) => {
                let name = name.as_bytes();
                self.append(&Op::DropSnapshot { ino: InodeId::ROOT, name }, time)
            }
            Act::SetXattr(n, name, len) => {
                let (ino, value) = (self.inode(n)?, content(step, *len));
                self.append(&Op::SetXattr { ino, name: name.as_bytes(), value: &value }, time)
            }
            Act::RemoveXattr(n, name) => {
                let ino = self.inode(n)?;
                self.append(&Op::RemoveXattr { ino, name: name.as_bytes() }, time)
            }
            Act::Chmod(n, mode) => self.attributes(n, mask::MODE, *mode, 0, time),
            Act::Chown(n, uid) => self.attributes(n, mask::UID, 0, *uid, time),
            Act::Utime(n) => self.attributes(n, mask::MTIME, 0, 0, time),
            Act::Fsync | Act::Pause => Ok(()),
        }
    }

    /// One operation for the application, three entries, of which the last one counts.
    fn tmpfile(&mut self, path: &str, ino: InodeId, data: &[u8], time: u64) -> Result<(), String> {
        let (parent, name) = self.place(path)?;
        let (mode, uid, gid, linkable) = (S_IFREG | 0o644, 0, 0, true);
        self.append(&Op::Tmpfile { ino, parent, mode, uid, gid, linkable }, time)?;
        self.append(&Op::Write { ino, offset: 0, data, clear_setid: false }, time)?;
        self.append(&Op::Link { ino, parent, name }, time)?;
        if let Some((_, sequences)) = &mut self.machine.log {
            let last = sequences.len() - 1;
            sequences.drain(last - 2..last);
        }
        // Closed: the service holds it open for nobody from here on.
        self.ask(&Request::Unpin { inodes: vec![ino] }).map(|_| ())
    }

    /// A piece of a file as a snapshot has it, which need not be on media yet.
    fn bring(
        &mut self,
        name: &str,
        a: &str,
        b: &str,
        [source_offset, offset, len]: [u64; 3],
        time: u64,
    ) -> Result<(), String> {
        let found = self.oracle.last().find_then(name, a);
        let (id, _) = found.ok_or("the snapshot is not in the model")?;
        let there = *self.inodes.get(&id).ok_or("an inode without a number")?;
        let ino = self.inode(b)?;
        let source = InodeId(there).in_snapshot(self.slot(name)?);
        self.append(
            &Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false },
            time,
        )
    }

    /// The slot of a snapshot: the service says it when it has made one.
    fn slot(&mut self, name: &str) -> Result<u16, String> {
        for _ in 0..PATIENCE {
            if let Some(snapshot) = self.machine.volume().snapshot_named(name.as_bytes()) {
                return Ok(snapshot.slot);
            }
            self.ring()?;
            self.machine.wait(100_000)?;
        }
        Err("the snapshot is never made".into())
    }

    fn inode(&mut self, path: &str) -> Result<InodeId, String> {
        let id = self.id(path)?;
        self.lease(id)
    }

    fn make(
        &mut self,
        path: &str,
        ino: InodeId,
        mode: u32,
        target: &[u8],
        time: u64,
    ) -> Result<(), String> {
        let (parent, name) = self.place(path)?;
        let op = Op::Create { ino, parent, mode, rdev: 0, uid: 0, gid: 0, name, target };
        self.append(&op, time)
    }

    fn attributes(
        &mut self,
        path: &str,
        mask: u64,
        mode: u32,
        uid: u32,
        time: u64,
    ) -> Result<(), String> {
        let ino = self.inode(path)?;
        let mtime = Stamp::from_nanos(UTIME + self.step);
        let op = Op::SetAttr { ino, mask, mode, uid, gid: 0, atime: Stamp::default(), mtime };
        self.append(&op, time)
    }

    /// Into the log, by LibFS's own writer.
    fn append(&mut self, op: &Op<'_>, time: u64) -> Result<(), String> {
        let payload = match op {
            Op::Write { data, .. } => data.len(),
            op => {
                let mut payload = Vec::new();
                op.encode(&mut payload);
                payload.len()
            }
        };
        if self.log.room(&self.memory, 0, payload).is_err() {
            self.sync()?;
            self.machine.quiet()?;
        }
        self.machine.watched().note(Event::Begun(self.oracle.len() + 1));
        let place = self.log.append(&self.memory, 0, op, time);
        let place = place.map_err(|full| format!("the log stays full: {full:?}"))?;
        if let Some((_, sequences)) = &mut self.machine.log {
            sequences.push(place.sequence.0);
        }
        Ok(())
    }
}
