//! What more cores bring, on a machine that has few: three nodes, the very code that a service runs ([`Node`], [`Packing`], the
//! pieces of work), on a virtual clock. Every step is really done, one after the other on this thread, and takes in virtual time what it
//! has taken (on a quiet machine); what different threads would do beside each other overlaps there.
//!
//! Of each node one core decides, one is hostd's, the others work. What is not measured but said: a message is [`LINK`] under way, and
//! a piece of work [`HOP`] until a thread has it, and again until its end is heard. Links are as memory is: a copy at both ends. The
//! writers are not here: their logs are full when the clock begins.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use base::random::Random;
use base::wire::Reader;
use base::{Epoch, InodeId, Nanos, NodeId, Sequence};
use client::libfs::log::Log;
use client::libfs::over_media::{ByHand, OverMedia};
use client::libfs::requests::{self, Seen};
use cluster::transport::Class;
use service::core::frame::Body;
use service::core::limits::Limits;
use service::core::work::Piece;
use service::core::{Effect, Event, JOIN_STEP, Node, NodeConfig, PerUser, Shares};
use service::packing::{self, Compression, Line, Moved, Packing};
use storage::format::control::{self, Descriptor, LeaseMode};
use storage::format::entry::Op;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Granted, Request};
use storage::format::superblock::Durability;
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{CopyItem, Params, Volume, run_copies};

use super::world::scratch;
use crate::failure::{Failure, Kind, Result};

/// A message is under way for so long.
const LINK: Nanos = 3_000;
/// So long after it was given a thread begins with a piece, and so long after its end that is heard.
const HOP: Nanos = 10_000;
const NODES: u32 = 3;
const WRITERS: usize = 8;
/// The first ones take memory from the machine.
const PASSES: (usize, usize) = (2, 5);
const LANE: u64 = 16 << 20;
/// Bytes of an entry that writes.
const WRITE: usize = 16 << 10;
const SECRET: u128 = 77;
const TICK: Nanos = 100_000_000;
/// As the driver of a service: for how long what has come is gone on with.
const TURN: Nanos = 5_000_000;
/// Nothing takes longer.
const PATIENCE: Nanos = 60_000_000_000;

/// How it is done.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Cores for the services of each node; 1: all is done by the thread that decides (and hostd, which copies what is published).
    cores: usize,
    /// Processes whose logs are full.
    writers: usize,
    /// How often they are, before it counts and when it does: the time in the middle is taken.
    passes: (usize, usize),
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// MB a second, of virtual time, that are on every member.
    pub mb_s: f64,
    /// Share of that time for which the thread that decides was busy, of the node that was so most.
    pub deciding: f64,
    /// Pieces of work that others did, since the clock began.
    pub pieces: u64,
}

/// The time, in nanoseconds. (Asking for the thread's share of the processor takes longer than what is measured.)
fn spent() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

/// Does something; how long that takes.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Nanos) {
    let begin = spent();
    let end = work();
    (end, spent() - begin)
}

/// What comes to a thread that decides.
enum In {
    Frame(NodeId, Class, u16, Vec<u8>),
    /// A piece of a stage has ended.
    Stage(u64),
    Packed(packing::Done),
    Copied(u64),
    Bell(base::ClientId),
}

/// What is to happen.
enum Item {
    To(usize, In),
    Turn(usize),
    Piece(usize, Piece),
    Packing(usize, packing::Piece),
    Copies(usize, u64, Vec<CopyItem>),
}

struct Member {
    node: Node,
    region: Arc<FileRegion>,
    packing: Packing,
    inbox: VecDeque<In>,
    /// When the thread that decides has done what it is at.
    free: Nanos,
    next_turn: Nanos,
    next_tick: Nanos,
    /// When each of those that work has.
    workers: Vec<Nanos>,
    hostd: Nanos,
    /// Pieces that were begun, and when they end.
    begun: Vec<(Piece, Nanos)>,
    slept: bool,
    busy: Nanos,
}

/// The clock, and what happens when.
struct Clockwork {
    members: Vec<Member>,
    now: Nanos,
    items: BinaryHeap<Reverse<(Nanos, u64)>>,
    what: BTreeMap<u64, Item>,
    count: u64,
    attached: Vec<(u64, base::ClientId, u32)>,
    pieces: u64,
    /// When the thread that is at it began, by its own processor's clock and by the virtual one.
    began: (Nanos, Nanos),
}

fn failure(what: impl Into<String>) -> Failure {
    Failure::new(Kind::Failed, what, "report it: this is no matter of the machine")
}

/// What a part of a node says of an error.
trait Told<T> {
    fn told(self, what: impl std::fmt::Display) -> Result<T>;
}

impl<T, E: std::fmt::Debug> Told<T> for std::result::Result<T, E> {
    fn told(self, what: impl std::fmt::Display) -> Result<T> {
        self.map_err(|e| failure(format!("{what}: {e:?}")))
    }
}

impl Clockwork {
    fn new(dir: &Path, way: Way) -> Result<Self> {
        let members = (1..=NODES).map(|n| Member::new(&dir.join(format!("n{n}")), n, way));
        let mut this = Self {
            members: members.collect::<Result<_>>()?,
            now: 1_000_000,
            items: BinaryHeap::new(),
            what: BTreeMap::new(),
            count: 0,
            attached: Vec::new(),
            pieces: 0,
            began: (0, 0),
        };
        let chain: Vec<NodeId> = (1..=NODES).map(NodeId).collect();
        for n in 0..this.members.len() {
            let view = Event::View {
                epoch: Epoch(1),
                chain: chain.clone(),
                syncing: Vec::new(),
                lapse: 0,
            };
            this.apply_now(n, view)?;
        }
        Ok(this)
    }

    fn at(&mut self, at: Nanos, item: Item) {
        self.count += 1;
        self.what.insert(self.count, item);
        self.items.push(Reverse((at, self.count)));
    }

    /// The virtual time of the thread that decides and is at it.
    fn moment(&self) -> Nanos {
        self.began.1 + (spent() - self.began.0)
    }

    fn turn_at(&mut self, n: usize, at: Nanos) {
        let at = at.max(self.members[n].free);
        if at < self.members[n].next_turn {
            self.members[n].next_turn = at;
            self.at(at, Item::Turn(n));
        }
    }

    fn apply(&mut self, n: usize, event: Event) -> Result<()> {
        let (now, mut effects) = (self.moment(), Vec::new());
        self.members[n].node.apply(now, event, &mut effects);
        self.wait_for_pieces(n);
        self.carry_out(n, effects)
    }

    /// Beside the clock.
    fn apply_now(&mut self, n: usize, event: Event) -> Result<()> {
        self.began = (spent(), self.now);
        self.apply(n, event)
    }

    /// What the node had need of before it had ended it has waited for.
    fn wait_for_pieces(&mut self, n: usize) {
        let now = self.moment();
        let taken = |(piece, _): &&(Piece, Nanos)| piece.is_taken();
        let begun = &mut self.members[n].begun;
        let until = begun.iter().filter(taken).map(|(_, end)| *end).max().unwrap_or(now);
        begun.retain(|(piece, _)| !piece.is_taken());
        self.began.1 += until.saturating_sub(now);
    }

    fn carry_out(&mut self, n: usize, effects: Vec<Effect>) -> Result<()> {
        for effect in effects {
            match effect {
                Effect::Send { to, class, kind, body } => self.send(n, to, class, kind, body),
                Effect::Attached { token, client, segment } => {
                    self.attached.push((token, client, segment));
                }
                Effect::Work(piece) => {
                    if self.members[n].workers.is_empty() {
                        piece.run(&*self.members[n].region);
                        self.members[n].inbox.push_back(In::Stage(piece.id()));
                        continue;
                    }
                    let at = self.worker(n);
                    self.at(at, Item::Piece(n, piece));
                }
                Effect::Copies { id, items } => {
                    let at = (self.moment() + HOP).max(self.members[n].hostd);
                    self.at(at, Item::Copies(n, id, items));
                }
                _ => {}
            }
        }
        match self.members[n].node.failure() {
            Some(why) => Err(failure(format!("node {}: {why}", n + 1))),
            None => Ok(()),
        }
    }

    /// When somebody is free to work.
    fn worker(&mut self, n: usize) -> Nanos {
        let at = self.moment() + HOP;
        at.max(self.members[n].workers.iter().copied().min().unwrap_or(at))
    }

    /// Somebody is busy for so long from now on; when he has ended.
    fn busy_worker(&mut self, n: usize, took: Nanos) -> Nanos {
        self.pieces += 1;
        let end = self.now + took;
        if let Some(first) = self.members[n].workers.iter_mut().min() {
            *first = end.max(*first);
        }
        end
    }

    /// Whether nobody is free yet: then when somebody will be.
    fn all_busy(&self, n: usize) -> Option<Nanos> {
        let first = self.members[n].workers.iter().copied().min()?;
        (first > self.now).then_some(first)
    }

    fn send(&mut self, n: usize, to: NodeId, class: Class, kind: u16, body: Body) {
        let line = Line { now: self.moment(), queued: 0 };
        let piece = self.members[n].packing.send(to, class, kind, body, line);
        self.pack(n, piece);
        self.transmit(n, to, class);
    }

    fn pack(&mut self, n: usize, piece: Option<packing::Piece>) {
        let Some(piece) = piece else { return };
        if self.members[n].workers.is_empty() {
            let done = piece.work();
            self.members[n].inbox.push_back(In::Packed(done));
            return;
        }
        let at = self.worker(n);
        self.at(at, Item::Packing(n, piece));
    }

    fn transmit(&mut self, n: usize, to: NodeId, class: Class) {
        let from = NodeId(n as u32 + 1);
        while let Some((kind, body)) = self.members[n].packing.next(to, class) {
            // Into the ring between the two.
            let (bytes, copy) = (body.len(), body.to_vec());
            let at = self.moment() + LINK;
            self.at(at, Item::To(to.0 as usize - 1, In::Frame(from, class, kind, copy)));
            let line = Line { now: self.moment(), queued: 0 };
            self.members[n].packing.sent(to, class, bytes, line);
        }
    }

    fn take_up(&mut self, n: usize, came: In) -> Result<()> {
        match came {
            In::Frame(from, class, kind, body) => {
                // Out of the ring.
                let body = body.clone();
                let member = &mut self.members[n];
                if member.packing.is_plain(from, class, kind, body.len()) {
                    return self.apply(n, Event::Frame { from, kind, body: body.into() });
                }
                let keep = member.node.passes_on();
                let incarnation = member.node.incarnation_of(kind, &body);
                let piece = member.packing.hear(from, class, kind, body, keep, incarnation);
                self.pack(n, piece);
                self.heard(n, from, class)
            }
            In::Stage(id) => self.apply(n, Event::WorkEnded(id)),
            In::Packed(done) => match self.members[n].packing.done(done) {
                Some(Moved::Out(to, class)) => {
                    self.transmit(n, to, class);
                    Ok(())
                }
                Some(Moved::In(from, class)) => self.heard(n, from, class),
                None => Ok(()),
            },
            In::Copied(id) => self.apply(n, Event::CopiesDone { id, bad: Vec::new() }),
            In::Bell(client) => self.apply(n, Event::Doorbell(client)),
        }
    }

    fn heard(&mut self, n: usize, from: NodeId, class: Class) -> Result<()> {
        while let Some(heard) = self.members[n].packing.next_heard(from, class) {
            let Ok(body) = heard.body else { return Err(failure("a message came damaged")) };
            self.apply(n, Event::Frame { from, kind: heard.kind, body })?;
        }
        Ok(())
    }

    /// One turn of the loop of a service, as its driver has it.
    fn turn(&mut self, n: usize) -> Result<()> {
        if self.members[n].next_turn != self.now {
            return Ok(());
        }
        self.members[n].next_turn = Nanos::MAX;
        self.began = (spent(), self.now);
        while self.moment() < self.now + TURN
            && let Some(came) = self.members[n].inbox.pop_front()
        {
            self.take_up(n, came)?;
        }
        if !self.members[n].slept {
            let (now, mut effects) = (self.moment(), Vec::new());
            self.members[n].node.look_around(now, &mut effects);
            self.carry_out(n, effects)?;
        }
        let (now, member) = (self.moment(), &mut self.members[n]);
        let beat = now >= member.next_tick;
        if beat {
            member.next_tick = now + TICK;
        }
        if beat || member.node.deadline().is_some_and(|at| at <= now) {
            self.apply(n, Event::Tick)?;
        }
        let (now, mut effects) = (self.moment(), Vec::new());
        let more = self.members[n].node.work(now, &mut effects);
        self.wait_for_pieces(n);
        self.carry_out(n, effects)?;
        let member = &mut self.members[n];
        let busy = more || !member.inbox.is_empty();
        member.slept = !busy && member.node.prepare_to_sleep();
        let end = self.moment().max(self.now + 1);
        let member = &mut self.members[n];
        member.busy += end - self.now;
        member.free = end;
        let wake = member.node.deadline().map_or(member.next_tick, |at| at.min(member.next_tick));
        let next = if member.slept { wake } else { end };
        self.turn_at(n, next);
        Ok(())
    }

    /// The next thing happens.
    fn step(&mut self) -> Result<()> {
        let Some(Reverse((at, number))) = self.items.pop() else {
            return Err(failure("nothing is left to be done, and not all is done"));
        };
        self.now = at;
        self.began = (spent(), at);
        match self.what.remove(&number) {
            Some(Item::To(n, came)) => {
                self.members[n].inbox.push_back(came);
                self.turn_at(n, at);
            }
            Some(Item::Turn(n)) => self.turn(n)?,
            Some(Item::Piece(n, piece)) => {
                if let Some(later) = self.all_busy(n) {
                    self.at(later, Item::Piece(n, piece));
                    return Ok(());
                }
                if piece.is_begun() {
                    // The node has done it itself.
                    return Ok(());
                }
                let region = Arc::clone(&self.members[n].region);
                let ((), took) = timed(|| piece.run(&*region));
                let end = self.busy_worker(n, took);
                self.at(end + HOP, Item::To(n, In::Stage(piece.id())));
                self.members[n].begun.push((piece, end));
            }
            Some(Item::Packing(n, piece)) => {
                if let Some(later) = self.all_busy(n) {
                    self.at(later, Item::Packing(n, piece));
                    return Ok(());
                }
                let (done, took) = timed(|| piece.work());
                let end = self.busy_worker(n, took);
                self.at(end + HOP, Item::To(n, In::Packed(done)));
            }
            Some(Item::Copies(n, id, items)) => {
                if self.members[n].hostd > at {
                    let later = self.members[n].hostd;
                    self.at(later, Item::Copies(n, id, items));
                    return Ok(());
                }
                let region = Arc::clone(&self.members[n].region);
                let (copied, took) =
                    timed(|| run_copies(&*region, &items).and_then(|()| region.fence()));
                copied.told("hostd")?;
                self.members[n].hostd = at + took;
                self.at(at + took + HOP, Item::To(n, In::Copied(id)));
            }
            None => {}
        }
        Ok(())
    }

    /// Goes on until something is so.
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        let end = self.now + PATIENCE;
        while !is_so(self) {
            if self.now > end {
                return Err(failure(format!("{what}: it takes for ever")));
            }
            self.step()?;
        }
        Ok(())
    }
}

impl Member {
    fn new(dir: &Path, n: u32, way: Way) -> Result<Self> {
        let at = dir.display();
        let region = FileRegion::create(dir, Durability::Replicated).told(at)?;
        let region = Arc::new(region);
        let media = Arc::clone(&region) as Arc<dyn Media>;
        let stream_bytes = 64 << 20;
        let params = Params {
            uuid: *b"corbel bench vol",
            name: "cores".into(),
            node: NodeId(n),
            durability: Durability::Replicated,
            capacity_bytes: 384 << 20,
            stream_bytes,
            time: 1_000_000_000,
            uid: 0,
            gid: 0,
            mode: 0o1777,
        };
        Volume::format(Arc::clone(&media), &params).told(dir.display())?;
        let shipped = Limits::SHIPPED;
        let inline_bytes = if way.cores > 1 { shipped.inline_bytes } else { usize::MAX };
        let config = NodeConfig {
            limits: Limits { inline_bytes, ..shipped },
            node: NodeId(n),
            lanes: 1,
            lane_bytes: LANE,
            clients_max: 64,
            clients_per_user: 64,
            per_user: PerUser::SHIPPED,
            scheduler: Default::default(),
            weights: Default::default(),
            ring_bytes: stream_bytes,
            memory: 256 << 20,
            high: 70,
            low: 30,
            join_step: JOIN_STEP,
            room: Shares::SHIPPED,
            grace: 0,
            boot: 1,
            secret: SECRET,
            incarnation: 1,
        };
        let node = Node::new(config, media, Random::new(n.into())).told(dir.display())?;
        let limits = packing::Limits { verify: inline_bytes, ..packing::Limits::SHIPPED };
        // One decides, and hostd has one.
        let workers = way.cores.saturating_sub(2);
        Ok(Self {
            node,
            region,
            packing: Packing::new(Compression::None, workers.max(1), limits),
            inbox: VecDeque::new(),
            free: 0,
            next_turn: Nanos::MAX,
            next_tick: 0,
            workers: vec![0; workers],
            hostd: 0,
            begun: Vec::new(),
            slept: false,
            busy: 0,
        })
    }
}

/// A process of the first node, worked by hand.
struct Writer {
    client: base::ClientId,
    media: Arc<dyn Media>,
    memory: OverMedia,
    segment: Segment,
    log: Log<ByHand>,
}

impl Writer {
    fn attach(clock: &mut Clockwork, token: u64) -> Result<Self> {
        let pid = 100 + token as u32;
        let attach = Event::Attach {
            token,
            pid,
            start_time: 1,
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            lanes: 1,
        };
        clock.apply_now(0, attach)?;
        clock.until("attach", |clock| clock.attached.iter().any(|a| a.0 == token))?;
        let known = clock.attached.iter().find(|a| a.0 == token);
        let (_, client, segment) = *known.ok_or_else(|| failure("attach: no answer"))?;
        let media = Arc::clone(&clock.members[0].region) as Arc<dyn Media>;
        let segment = Segment::Log(segment);
        let mut bytes = [0; control::DESCRIPTOR_BYTES];
        media.read(segment, 0, &mut bytes).told("a log")?;
        let descriptor = Descriptor::decode(&bytes).told("a log")?;
        let memory = OverMedia::new(Arc::clone(&media), segment);
        let log = Log::<ByHand>::resume(descriptor, 0, Sequence(0));
        Ok(Self { client, media, memory, segment, log })
    }

    fn ring(&self, clock: &mut Clockwork) {
        let now = clock.now;
        clock.at(now, Item::To(0, In::Bell(self.client)));
    }

    /// Asks, and waits for the answer.
    fn call(&self, clock: &mut Clockwork, request: &Request<'_>) -> Result<Vec<u8>> {
        let proof = request.names().map_or(Proof::NONE, |ino| Proof::new(SECRET, ino));
        let mut body = Vec::new();
        request.encode_shown(self.log.last(), proof, &mut body);
        requests::put(&self.memory, 0, &body);
        self.ring(clock);
        clock.until("a request", |_| requests::look(&self.memory, 0) == Seen::Reply)?;
        let mut body = Vec::new();
        requests::take(&self.memory, 0, &mut body);
        let (status, _) = rpc::reply_status(&body).told("a reply")?;
        status.map_err(|e| failure(format!("{request:?}: {e:?}")))?;
        Ok(body[8..].to_vec())
    }

    fn word(&self, at: u64) -> u64 {
        self.media.load64(self.segment, at).unwrap_or(0)
    }

    fn append(&mut self, op: &Op<'_>) -> bool {
        let done = self.log.append(&self.memory, 0, op, 77).is_ok();
        let last = self.log.last().0;
        done && self.media.store64(self.segment, control::LAST_SEQUENCE, last).is_ok()
    }

    /// A file of its own.
    fn create(&mut self, clock: &mut Clockwork, name: &str) -> Result<InodeId> {
        let body = self.call(clock, &Request::Inodes { count: 1 })?;
        let mut numbers = Reader::new("numbers", &body);
        numbers.u32().told("numbers")?;
        let ino = InodeId(numbers.u64().told("numbers")?);
        let root = InodeId::ROOT;
        let flags = rpc::WANT_READ | rpc::WANT_WRITE;
        for _ in 0..100 {
            let ask = Request::Inode { ino: root, mode: LeaseMode::Write, flags };
            let body = self.call(clock, &ask)?;
            let reply = rpc::InodeReply::decode(&mut Reader::new("reply", &body)).told("reply")?;
            let Granted { slot, word } = reply.granted;
            if word.0 != 0 && self.word(control::lease_word(slot)) == word.0 {
                let (name, target) = (name.as_bytes(), &b""[..]);
                let (mode, rdev, uid, gid) = (0o100_644, 0, 0, 0);
                self.append(&Op::Create { ino, parent: root, mode, rdev, uid, gid, name, target });
                // The service may have gone to sleep since it replied, as it may between a program's reply and its entry.
                self.ring(clock);
                return Ok(ino);
            }
        }
        Err(failure("no lease lasts"))
    }

    /// As many writes as its log has room for; bytes.
    fn fill(&mut self, ino: InodeId, data: &[u8]) -> u64 {
        let mut offset = 0;
        let room = LANE - (4 << 20);
        while offset < room && self.append(&Op::Write { ino, offset, data, clear_setid: false }) {
            offset += data.len() as u64;
        }
        offset
    }

    /// Its log has room again.
    fn is_published(&self) -> bool {
        self.word(control::PUBLISHED) >= self.log.last().0
    }

    fn is_replicated(&self) -> bool {
        self.word(control::REPLICATED) >= self.log.last().0
    }
}

/// How many times as fast it is with so many cores as with all of it done by one thread, and what that comes to with the cores; in
/// turns.
pub fn speedup(cores: usize, turns: u32) -> Result<(f64, Run)> {
    let mut both = [Vec::new(), Vec::new()];
    for _ in 0..turns {
        for (runs, cores) in both.iter_mut().zip([1, cores]) {
            runs.push(run(Way { cores, writers: WRITERS, passes: PASSES })?);
        }
    }
    let [one, many] = both.map(middle);
    Ok((many.mb_s / one.mb_s, many))
}

fn middle(mut runs: Vec<Run>) -> Run {
    runs.sort_by(|a, b| a.mb_s.total_cmp(&b.mb_s));
    runs[runs.len() / 2]
}

/// Full logs of that many processes, until every member has it all.
fn run(way: Way) -> Result<Run> {
    service::process::keep_memory();
    let dir = scratch()?;
    let run = run_in(&dir, way);
    let _ = std::fs::remove_dir_all(&dir);
    run
}

fn run_in(dir: &Path, way: Way) -> Result<Run> {
    let mut clock = Clockwork::new(dir, way)?;
    for n in 0..clock.members.len() {
        clock.turn_at(n, clock.now);
    }
    let mut writers = Vec::new();
    for number in 0..way.writers {
        let mut writer = Writer::attach(&mut clock, number as u64 + 1)?;
        let ino = writer.create(&mut clock, &format!("f{number}"))?;
        writers.push((writer, ino));
    }
    let mut data = vec![0; WRITE];
    let mut random = Random::new(1);
    data.chunks_mut(8).for_each(|c| c.copy_from_slice(&random.next_u64().to_le_bytes()[..c.len()]));
    clock.until("the first files", |_| writers.iter().all(|(w, _)| w.is_replicated()))?;
    let mut runs = Vec::new();
    let (warm, counted) = way.passes;
    for number in 0..warm + counted {
        let run = pass(&mut clock, &mut writers, &data)?;
        if number >= warm {
            runs.push(run);
        }
    }
    Ok(middle(runs))
}

/// All logs are filled, and emptied.
fn pass(clock: &mut Clockwork, writers: &mut [(Writer, InodeId)], data: &[u8]) -> Result<Run> {
    let mut bytes = 0;
    for (writer, ino) in &mut *writers {
        bytes += writer.fill(*ino, data);
        let last = writer.log.last().0;
        writer.media.store64(writer.segment, control::SYNC_REQUEST, last).told("a log")?;
    }
    let (begin, before) = (clock.now, clock.members.iter().map(|m| m.busy).collect::<Vec<_>>());
    for (writer, _) in &*writers {
        clock.at(begin, Item::To(0, In::Bell(writer.client)));
    }
    clock.until("the writes", |_| writers.iter().all(|(w, _)| w.is_replicated()))?;
    let took = (clock.now - begin) as f64;
    let busy = clock.members.iter().zip(before).map(|(m, before)| (m.busy - before) as f64 / took);
    let run = Run {
        mb_s: bytes as f64 * 1e3 / took,
        deciding: busy.fold(0.0, f64::max),
        pieces: clock.pieces,
    };
    clock.until("publishing", |_| writers.iter().all(|(w, _)| w.is_published()))?;
    for (writer, _) in &*writers {
        let [count, errno] = [control::REFUSALS, control::REFUSED_ERRNO].map(|at| writer.word(at));
        if count > 0 {
            return Err(failure(format!("{count} writes were refused, the last with {errno}")));
        }
    }
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of one writer and of several; how fast is for the bench to say.
    #[test]
    fn others_work_where_there_are_more_cores_and_all_arrives() {
        for writers in [1, 3] {
            for (cores, helped) in [(1, false), (8, true)] {
                let done = run(Way { cores, writers, passes: (0, 1) }).unwrap();
                assert!(done.deciding > 0.0 && done.mb_s > 0.0, "{done:?}");
                assert_eq!(done.pieces > 0, helped, "{writers} writers, {cores} cores");
            }
        }
    }
}
