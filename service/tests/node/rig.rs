//! Nodes, links and clients whose every step the test decides.

use std::collections::VecDeque;
use std::sync::Arc;

use base::random::Random;
use base::wire::Reader;
use base::{ClientId, Epoch, Errno, InodeId, NodeId, Sequence};
use client::libfs::log::Log;
use client::libfs::over_media::{ByHand, OverMedia};
use client::libfs::requests::{self, Seen};
use service::core::work::Piece;
use service::core::{Effect, Event, Node, NodeConfig, PerUser, Shares};
use storage::format::control::{self, Descriptor, LeaseMode, LeaseWord};
use storage::format::entry::Op;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Granted, InodeReply, Request};
use storage::format::superblock::Durability;
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;
use storage::volume::{CopyItem, Params, Volume};

/// Smallest lane that a descriptor may have.
pub const LANE: u64 = 4 * ((1 << 20) + 4096);
pub const STREAM: u64 = 17 << 20;
/// What the clients here know, though real ones do not: they ask as if they had been shown everything.
pub const SECRET: u128 = 77;

/// Shorter than what tests wait for, unless they say otherwise.
pub const GRACE: u64 = 20_000_000;

pub fn config(node: u32) -> NodeConfig {
    NodeConfig {
        limits: service::core::limits::Limits::SHIPPED,
        node: NodeId(node),
        lanes: 1,
        lane_bytes: LANE,
        clients_max: 8,
        clients_per_user: 6,
        per_user: PerUser::SHIPPED,
        scheduler: Default::default(),
        weights: Default::default(),
        ring_bytes: STREAM,
        memory: 16 << 20,
        high: 70,
        low: 30,
        join_step: service::core::JOIN_STEP,
        room: Shares { share: 8, most: 300, least: 4 },
        grace: GRACE,
        boot: 1,
        secret: SECRET,
        incarnation: 1,
    }
}

/// With other bounds than those shipped.
pub fn config_with(limits: service::core::limits::Limits) -> impl Fn(u32) -> NodeConfig {
    move |node| NodeConfig { limits, ..config(node) }
}

pub fn format(node: u32) -> Arc<MemoryRegion> {
    let region = Arc::new(MemoryRegion::new());
    let params = Params {
        uuid: *b"corbel test uuid",
        name: "test".into(),
        node: NodeId(node),
        durability: Durability::Pmem,
        capacity_bytes: 16 << 20,
        stream_bytes: STREAM,
        time: 1_000_000_007,
        uid: 0,
        gid: 0,
        mode: 0o1777,
    };
    Volume::format(Arc::clone(&region) as Arc<dyn Media>, &params).expect("an empty volume");
    region
}

/// Kind and body of each.
type Frames = VecDeque<(u16, Vec<u8>)>;

/// A chain of nodes with links that deliver when told to, in order.
pub struct Rig {
    pub nodes: Vec<Node>,
    pub regions: Vec<Arc<MemoryRegion>>,
    pub now: u64,
    /// Messages under way: to whom, from whom.
    pub links: Vec<(NodeId, NodeId, Frames)>,
    /// Answers to `Attach`.
    attached: Vec<(u64, ClientId, u32)>,
    pub detached: Vec<ClientId>,
    pub refused: Vec<Errno>,
    /// Processes that hostd is to watch although they have no session.
    pub watched: Vec<(ClientId, u32)>,
    /// What heads told the coordinator: which process of which node has everything.
    pub caught_up: Vec<(NodeId, u64, Epoch)>,
    /// Whom heads reported to the coordinator.
    pub suspected: Vec<NodeId>,
    /// What hostd of a node was asked to copy, and by which number.
    pub copies: Vec<(usize, u64, Vec<CopyItem>)>,
    /// This node has no time for anything but messages.
    pub busy: Option<usize>,
    /// Pieces of work that are under way, of which node; done at once unless they are held.
    pub pieces: VecDeque<(usize, Piece)>,
    pub holds_work: bool,
    token: u64,
    /// Tree pages looked at in the longest turn.
    pub longest: u64,
    /// Links that were ended to be renewed.
    pub renewed: usize,
}

impl Rig {
    /// Nodes `1..=count`, all in the chain of epoch 1.
    pub fn new(count: u32, seed: u64) -> Self {
        let regions: Vec<_> = (1..=count).map(format).collect();
        Self::on(regions, seed)
    }

    /// The same, and whoever joins takes a snapshot, of all that there is.
    pub fn forgetful(count: u32, seed: u64) -> Self {
        let shipped = service::core::limits::Limits::SHIPPED;
        let limits = service::core::limits::Limits { returns: 0, in_place: false, ..shipped };
        Self::with(count, seed, config_with(limits))
    }

    /// The same, configured as is said.
    pub fn with(count: u32, seed: u64, config: impl Fn(u32) -> NodeConfig) -> Self {
        let regions: Vec<_> = (1..=count).map(format).collect();
        let media = regions.iter().map(|r| Arc::clone(r) as Arc<dyn Media>).collect();
        Self::configured(regions, media, seed, config)
    }

    /// The same on regions that exist.
    pub fn on(regions: Vec<Arc<MemoryRegion>>, seed: u64) -> Self {
        let media = regions.iter().map(|r| Arc::clone(r) as Arc<dyn Media>).collect();
        Self::through(regions, media, seed)
    }

    /// The same, with nodes that see their regions through `media`.
    pub fn through(regions: Vec<Arc<MemoryRegion>>, media: Vec<Arc<dyn Media>>, seed: u64) -> Self {
        Self::configured(regions, media, seed, config)
    }

    /// Both.
    pub fn configured(
        regions: Vec<Arc<MemoryRegion>>,
        media: Vec<Arc<dyn Media>>,
        seed: u64,
        config: impl Fn(u32) -> NodeConfig,
    ) -> Self {
        let mut rig = Self::unheard(regions, media, seed, config);
        rig.deliver_all();
        rig
    }

    /// The same, and nothing that the nodes have said has arrived.
    pub fn unheard(
        regions: Vec<Arc<MemoryRegion>>,
        media: Vec<Arc<dyn Media>>,
        seed: u64,
        config: impl Fn(u32) -> NodeConfig,
    ) -> Self {
        let nodes = (1u32..)
            .zip(media)
            .map(|(n, media)| {
                Node::new(config(n), media, Random::new(seed + u64::from(n))).expect("a node")
            })
            .collect::<Vec<_>>();
        let mut links = Vec::new();
        for to in 1..=nodes.len() as u32 {
            for from in (1..=nodes.len() as u32).filter(|from| *from != to) {
                links.push((NodeId(to), NodeId(from), VecDeque::new()));
            }
        }
        let mut rig = Self {
            nodes,
            regions,
            now: 1_000_000,
            links,
            attached: Vec::new(),
            detached: Vec::new(),
            refused: Vec::new(),
            watched: Vec::new(),
            caught_up: Vec::new(),
            suspected: Vec::new(),
            copies: Vec::new(),
            busy: None,
            pieces: VecDeque::new(),
            holds_work: false,
            token: 0,
            longest: 0,
            renewed: 0,
        };
        let chain: Vec<NodeId> = (1..=rig.nodes.len() as u32).map(NodeId).collect();
        for n in 0..rig.nodes.len() {
            let chain = chain.clone();
            rig.event(n, Event::View { epoch: Epoch(1), chain, syncing: Vec::new(), lapse: 0 });
        }
        rig
    }

    fn effects(&mut self, n: usize, effects: Vec<Effect>) {
        let from = NodeId(n as u32 + 1);
        for effect in effects {
            match effect {
                Effect::Send { to, kind, body, .. } => {
                    let link = self.links.iter_mut().find(|(t, f, _)| (*t, *f) == (to, from));
                    if let Some((_, _, queue)) = link {
                        queue.push_back((kind, body.to_vec()));
                    }
                }
                Effect::Attached { token, client, segment } => {
                    self.attached.push((token, client, segment));
                }
                Effect::AttachRefused { errno, .. } => self.refused.push(errno),
                Effect::Copies { id, items } => self.copies.push((n, id, items)),
                Effect::Work(piece) => self.pieces.push_back((n, piece)),
                Effect::Detached(client) => self.detached.push(client),
                Effect::Watch { client, pid, .. } => self.watched.push((client, pid)),
                Effect::Renew(node) => self.renew(from, node),
                Effect::Suspect(node) => self.suspected.push(node),
                Effect::CaughtUp(node, process, epoch) => {
                    self.caught_up.push((node, process, epoch))
                }
                _ => {}
            }
        }
    }

    /// A link ends, with what is under way, and is there again.
    pub fn renew(&mut self, one: NodeId, other: NodeId) {
        for (to, from, queue) in &mut self.links {
            if [(one, other), (other, one)].contains(&(*to, *from)) {
                queue.clear();
            }
        }
        self.renewed += 1;
        for (node, peer) in [(one, other), (other, one)] {
            let n = node.0 as usize - 1;
            self.event(n, Event::PeerDown(peer));
            self.event(n, Event::PeerUp(peer));
        }
    }

    /// Gives a node an event.
    pub fn event(&mut self, n: usize, event: Event) {
        let mut out = Vec::new();
        let before = self.visits(n);
        self.nodes[n].apply(self.now, event, &mut out);
        self.priced(n, before);
        self.effects(n, out);
        self.work_on();
    }

    /// Does the work that is not held.
    fn work_on(&mut self) {
        while !self.holds_work && self.end_work(0) {}
    }

    /// Ends a piece of work that is under way; `false`: there are not so many.
    pub fn end_work(&mut self, at: usize) -> bool {
        let Some((n, piece)) = self.pieces.remove(at) else { return false };
        piece.run(&*self.regions[n]);
        let (mut out, now) = (Vec::new(), self.now);
        self.nodes[n].apply(now, Event::WorkEnded(piece.id()), &mut out);
        self.effects(n, out);
        true
    }

    fn visits(&self, n: usize) -> u64 {
        self.nodes[n].volume().tree().visits()
    }

    /// A turn has ended.
    fn priced(&mut self, n: usize, before: u64) {
        self.longest = self.longest.max(self.visits(n).saturating_sub(before));
    }

    /// Time passes: what the driver would do with it.
    pub fn pass(&mut self, nanos: u64) {
        self.now += nanos;
        for n in (0..self.nodes.len()).filter(|n| self.busy != Some(*n)).collect::<Vec<_>>() {
            self.event(n, Event::Tick);
            let mut out = Vec::new();
            if !self.nodes[n].prepare_to_sleep() {
                self.nodes[n].look_around(self.now, &mut out);
            }
            for _ in 0..64 {
                if !self.nodes[n].work(self.now, &mut out) {
                    break;
                }
            }
            self.effects(n, out);
            self.work_on();
        }
    }

    /// What the driver does before it sleeps: no time passes.
    pub fn work(&mut self, n: usize) {
        for _ in 0..64 {
            let mut out = Vec::new();
            let more = self.nodes[n].work(self.now, &mut out);
            self.effects(n, out);
            self.work_on();
            if !more {
                return;
            }
        }
    }

    /// One slice of it.
    pub fn slice(&mut self, n: usize) {
        let mut out = Vec::new();
        let before = self.visits(n);
        self.nodes[n].work(self.now, &mut out);
        self.priced(n, before);
        self.effects(n, out);
        self.work_on();
    }

    /// One round of the driver: a look at clients that were awake, and a slice.
    pub fn turn(&mut self, n: usize) {
        let mut out = Vec::new();
        self.nodes[n].look_around(self.now, &mut out);
        self.effects(n, out);
        self.work_on();
        self.slice(n);
    }

    /// One message of one link arrives; `false` when the link has none.
    pub fn deliver(&mut self, link: usize) -> bool {
        let (to, from, queue) = &mut self.links[link];
        let (to, from) = (*to, *from);
        let Some((kind, body)) = queue.pop_front() else { return false };
        let n = to.0 as usize - 1;
        self.event(n, Event::Frame { from, kind, body: body.into() });
        assert_eq!(self.nodes[n].cheap_invariants(), Ok(()));
        true
    }

    pub fn deliver_all(&mut self) {
        for _ in 0..100_000 {
            let more = (0..self.links.len()).any(|link| self.deliver(link));
            if !more {
                return;
            }
        }
        panic!("the nodes talk for ever");
    }

    /// A view of the nodes `chain`, told to all that are in it; what others say does not arrive any more.
    pub fn cut_to(&mut self, epoch: u32, chain: &[u32]) {
        for n in chain {
            let chain = chain.iter().copied().map(NodeId).collect();
            let event = Event::View { epoch: Epoch(epoch), chain, syncing: Vec::new(), lapse: 0 };
            self.event(*n as usize - 1, event);
        }
        for (to, from, queue) in &mut self.links {
            if !chain.contains(&to.0) || !chain.contains(&from.0) {
                queue.clear();
            }
        }
        self.deliver_all();
    }

    /// Everything comes to rest.
    pub fn settle(&mut self) {
        for _ in 0..40 {
            self.pass(1_000_000);
            self.deliver_all();
        }
        for (n, node) in self.nodes.iter().enumerate() {
            assert_eq!(node.failure(), None);
            // A time that is over, and nothing done about it, would keep the driver awake for ever.
            let due = node.deadline().filter(|at| *at <= self.now && self.busy != Some(n));
            assert_eq!(due, None, "node {} is awake for nothing at {}", n + 1, self.now);
        }
    }

    /// A process attaches to node `n`.
    pub fn attach(&mut self, n: usize, uid: u32) -> Hand {
        self.attach_with(n, uid, 1)
    }

    /// The same with several lanes.
    pub fn attach_with(&mut self, n: usize, uid: u32, lanes: u32) -> Hand {
        let pid = 101 + self.token as u32;
        self.attach_as(n, uid, lanes, pid)
    }

    /// A process of which the node may have too many.
    pub fn try_attach(&mut self, n: usize, uid: u32) -> bool {
        self.token += 1;
        let (token, pid) = (self.token, 101 + self.token as u32);
        let groups = vec![];
        let event = Event::Attach { token, pid, start_time: 1, uid, gid: uid, groups, lanes: 1 };
        self.event(n, event);
        self.deliver_all();
        self.attached.iter().any(|a| a.0 == token)
    }

    /// The client that attached last.
    pub fn last_attached(&self, n: usize, uid: u32) -> Hand {
        self.hand(n, uid, self.token, 100 + self.token as u32)
    }

    /// The process of a client attaches anew.
    pub fn attach_again(&mut self, hand: &Hand) -> Hand {
        self.attach_as(hand.n, hand.uid, 1, hand.pid)
    }

    fn attach_as(&mut self, n: usize, uid: u32, lanes: u32, pid: u32) -> Hand {
        self.token += 1;
        let token = self.token;
        let event =
            Event::Attach { token, pid, start_time: 1, uid, gid: uid, groups: vec![], lanes };
        self.event(n, event);
        self.deliver_all();
        self.hand(n, uid, token, pid)
    }

    fn hand(&self, n: usize, uid: u32, token: u64, pid: u32) -> Hand {
        let (_, client, segment) =
            *self.attached.iter().find(|a| a.0 == token).expect("the node takes clients");
        let media = Arc::clone(&self.regions[n]) as Arc<dyn Media>;
        let mut descriptor = [0; control::DESCRIPTOR_BYTES];
        media.read(Segment::Log(segment), 0, &mut descriptor).expect("a descriptor");
        let descriptor = Descriptor::decode(&descriptor).expect("a descriptor");
        assert_eq!(descriptor.client, client);
        let log = Segment::Log(segment);
        let memory = OverMedia::new(Arc::clone(&media), log);
        let (at, seq, proofs) = (0, 0, true);
        Hand { media, memory, n, uid, pid, client, log, descriptor, at, seq, proofs }
    }

    /// No damage on any node.
    pub fn check(&self) {
        for region in &self.regions {
            let report = storage::check::check(&**region).expect("a region that can be read");
            assert!(report.is_sound(), "{:?}", report.findings);
        }
    }
}

/// A client's side of its log, worked by hand.
pub struct Hand {
    pub media: Arc<dyn Media>,
    memory: OverMedia,
    pub n: usize,
    pub uid: u32,
    pub pid: u32,
    pub client: ClientId,
    pub log: Segment,
    pub descriptor: Descriptor,
    /// Position in lane 0.
    pub at: u64,
    /// Sequence used last.
    pub seq: u64,
    /// Asks with proofs, of everything.
    pub proofs: bool,
}

impl Hand {
    /// Its log as the library sees it.
    pub const fn memory(&self) -> &OverMedia {
        &self.memory
    }

    pub fn word(&self, at: u64) -> u64 {
        self.media.load64(self.log, at).expect("a word of the log")
    }

    pub fn set(&self, at: u64, value: u64) {
        self.media.store64(self.log, at, value).expect("a word of the log");
    }

    /// Writes bytes as the next entry of lane 0.
    pub fn put(&mut self, bytes: &[u8]) {
        assert!(self.at + bytes.len() as u64 <= LANE, "the test's log has no laps");
        let at = self.descriptor.lane_offset(0) + self.at;
        self.media.write(self.log, at, bytes).expect("space in the lane");
        // As the library does; together with what the service wrote back by itself.
        self.media.persist(self.log, at, bytes.len() as u64).expect("space in the lane");
        self.media.fence().expect("memory");
        self.at += bytes.len() as u64;
        self.set(control::LAST_SEQUENCE, self.seq);
    }

    pub fn append(&mut self, op: &Op<'_>) -> Sequence {
        self.append_at(op, 77)
    }

    pub fn append_at(&mut self, op: &Op<'_>, time: u64) -> Sequence {
        let log = Log::<ByHand>::resume(self.descriptor, self.at, Sequence(self.seq));
        let place = log.append(&self.memory, 0, op, time).expect("room in the lane");
        self.at = log.next_at(0) - self.descriptor.lane_offset(0);
        assert!(self.at > 0, "the test's log has no laps");
        self.seq = place.sequence.0;
        self.set(control::LAST_SEQUENCE, self.seq);
        place.sequence
    }

    pub fn post(&self, slot: usize, request: &Request<'_>, after: u64) {
        let mut body = Vec::new();
        let named = request.names().filter(|_| self.proofs);
        let proof = named.map_or(Proof::NONE, |ino| Proof::new(SECRET, ino));
        request.encode_shown(Sequence(after), proof, &mut body);
        self.post_raw(slot, &body);
    }

    pub fn post_raw(&self, slot: usize, body: &[u8]) {
        requests::put(&self.memory, slot, body);
    }

    /// Whether there is an answer in a slot.
    pub fn has_reply(&self, slot: usize) -> bool {
        requests::look(&self.memory, slot) == Seen::Reply
    }

    /// The answer in a slot, which is free afterwards.
    pub fn reply(&self, slot: usize) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        self.has_reply(slot).then(|| requests::take(&self.memory, slot, &mut body))?;
        Some(body)
    }

    /// Asks and waits.
    pub fn call(&self, rig: &mut Rig, request: &Request<'_>) -> Result<Vec<u8>, Errno> {
        self.post(0, request, self.seq);
        for _ in 0..20_000 {
            rig.event(self.n, Event::Doorbell(self.client));
            rig.deliver_all();
            if let Some(body) = self.reply(0) {
                let status = rpc::reply_status(&body).expect("a reply with a status").0;
                return status.map(|()| body[8..].to_vec());
            }
            rig.pass(100_000);
        }
        panic!("no answer to {request:?}");
    }

    /// A lease on an inode.
    pub fn lease(&self, rig: &mut Rig, ino: InodeId, mode: LeaseMode) -> Result<InodeReply, Errno> {
        let flags = rpc::WANT_READ | if mode == LeaseMode::Write { rpc::WANT_WRITE } else { 0 };
        let body = self.call(rig, &Request::Inode { ino, mode, flags })?;
        let reply = InodeReply::decode(&mut Reader::new("reply", &body));
        Ok(reply.expect("a well formed reply"))
    }

    /// Whether a lease still stands.
    pub fn holds(&self, granted: Granted) -> bool {
        granted.word.0 != 0 && self.word(control::lease_word(granted.slot)) == granted.word.0
    }

    /// Fresh inode numbers with their leases.
    pub fn numbers(&self, rig: &mut Rig, count: u32) -> Vec<(InodeId, Granted)> {
        let body = self.call(rig, &Request::Inodes { count }).expect("numbers");
        take_numbers(&body)
    }

    /// Appends under a write lease on `dir`, which is taken anew whenever it is lost.
    pub fn append_in(&mut self, rig: &mut Rig, dir: InodeId, op: &Op<'_>) -> Sequence {
        for _ in 0..100 {
            let granted = match self.lease(rig, dir, LeaseMode::Write) {
                Ok(reply) => reply.granted,
                Err(e) => panic!(
                    "no lease on {dir}: {e:?}; {} refused, the last {} with {}",
                    self.refusals(),
                    self.word(control::REFUSED_SEQ),
                    self.word(control::REFUSED_ERRNO)
                ),
            };
            if self.holds(granted) {
                return self.append(op);
            }
        }
        panic!("a lease never lasts");
    }

    pub fn create(&mut self, rig: &mut Rig, name: &[u8], mode: u32) -> InodeId {
        let (ino, _) = self.numbers(rig, 1)[0];
        let op = create(ino, InodeId::ROOT, name, mode, self.uid);
        self.append_in(rig, InodeId::ROOT, &op);
        ino
    }

    /// fsync: waits until every member has everything.
    pub fn sync(&self, rig: &mut Rig) {
        self.set(control::SYNC_REQUEST, self.seq);
        for _ in 0..1000 {
            rig.event(self.n, Event::Doorbell(self.client));
            rig.deliver_all();
            if self.word(control::REPLICATED) >= self.seq {
                return;
            }
            rig.pass(100_000);
        }
        panic!("an fsync never ends");
    }

    /// Rings, if the service wants to be rung for an appended entry.
    pub fn ring(&self, rig: &mut Rig) {
        if self.word(control::DOORBELL) == control::BELL_ASLEEP {
            self.set(control::DOORBELL, control::BELL_AWAKE);
            rig.event(self.n, Event::Doorbell(self.client));
        }
    }

    pub fn refusals(&self) -> u64 {
        self.word(control::REFUSALS)
    }
}

pub fn take_numbers(body: &[u8]) -> Vec<(InodeId, Granted)> {
    let mut r = Reader::new("numbers", body);
    let count = r.u32().expect("a count");
    (0..count)
        .map(|_| {
            let ino = InodeId(r.u64().expect("a number"));
            let slot = r.u32().expect("a slot");
            let word = LeaseWord(r.u64().expect("a word"));
            r.u64().expect("a proof");
            (ino, Granted { slot, word })
        })
        .collect()
}

pub fn create(ino: InodeId, parent: InodeId, name: &[u8], mode: u32, uid: u32) -> Op<'_> {
    Op::Create { ino, parent, mode, rdev: 0, uid, gid: uid, name, target: b"" }
}
