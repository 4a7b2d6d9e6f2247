//! A node of the simulated cluster: its region, its nicfs while it lives, and what the driver
//! (`service::nicfs`) knows beside the core.

use std::sync::Arc;

use base::random::Random;
use base::{Epoch, Level, Nanos, NodeId, StreamSeq};
use cluster::coordinator::message::BEFORE_MAX;
use service::core::limits::Limits;
use service::core::ring::RING_BYTES_MIN;
use service::core::schedule::Scheduler;
use service::core::{Event, Node, NodeConfig, PerUser, Shares};
use service::packing::{self, Compression, Packing};
use service::serving::Serving;
use storage::format::chunk::ChunkHeader;
use storage::format::control::CLOCK_LAG_MS;
use storage::format::superblock::Durability;
use storage::memory::MemoryRegion;
use storage::volume::{Params, Volume};

use crate::hostd::Hostd;
use crate::process::REALTIME;
use crate::world::{Item, MS};

/// Heartbeat of the core.
pub const TICK: Nanos = 100_000_000;
/// A node fences itself after this long without the coordinator: what `fence_after` says of the
/// failure timeout that the coordinator here has.
pub const FENCE_AFTER: Nanos = cluster::coordinator::fence_after(500_000_000);
/// After the connection has ended, this soon (as `cluster::coordinator::client` does).
pub const FENCE_DISCONNECTED: Nanos = 75_000_000;
/// Key of the proofs that clients get.
pub const SECRET: u128 = 77;
/// When the volume was made.
pub const CREATED: Nanos = 1_000_000_000;
/// How long what is open on a lost node is kept: no longer than anybody waits here for a history's end ...
pub const GRACE_SHORT: Nanos = 50_000_000;
/// ... or longer than any history.
pub const GRACE_LONG: Nanos = 1_000_000_000_000;

/// Nearly everything is long enough to be packed here.
const PACKING: packing::Limits = packing::Limits {
    short: 60,
    long: 250,
    inline: 400,
    verify: 700,
    kept: 30_000,
    held: usize::MAX,
};

/// What the regions of a history are like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes for data.
    pub capacity: u64,
    /// Permission bits of the root directory.
    pub mode: u32,
    /// The promise that the volume makes.
    pub durability: Durability,
}

/// A clock that goes wrong: by its start, and by up to half a percent in rate, so that two differ by one
/// at most.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Nanos,
    /// Millionths.
    rate: u64,
}

impl Clock {
    /// Some clock.
    pub fn draw(random: &mut Random) -> Self {
        Self { start: random.below(1 << 50), rate: 995_000 + random.below(10_001) }
    }

    /// What it shows at a time of the world.
    pub fn local(self, world: Nanos) -> Nanos {
        self.start + self.elapsed(world)
    }

    fn elapsed(self, world: Nanos) -> Nanos {
        (u128::from(world) * u128::from(self.rate) / 1_000_000) as Nanos
    }

    /// The first moment at which it shows that.
    pub fn world(self, local: Nanos) -> Nanos {
        self.lasts(local.saturating_sub(self.start))
    }

    /// How long such a time by this clock is.
    pub fn lasts(self, local: Nanos) -> Nanos {
        (u128::from(local) * 1_000_000).div_ceil(u128::from(self.rate)) as Nanos
    }
}

/// See the module.
pub struct Host {
    /// Its number.
    pub id: NodeId,
    /// Of its region.
    pub shape: Shape,
    /// Its clock.
    pub clock: Clock,
    /// How long what is open on a lost node is kept.
    pub grace: Nanos,
    /// It never returns.
    pub gone: bool,
    /// hostd, while it lives.
    pub hostd: Option<Arc<Hostd>>,
    /// nicfs has heard of it: it asks nobody else.
    pub knows_hostd: bool,
    /// It does not, by a fault.
    pub hostd_down: bool,
    /// A bit of its tree has changed; what was noted beside the region before.
    pub rotten: Option<Option<Epoch>>,
    /// Chunks come damaged.
    pub damage: bool,
    /// Its memory.
    pub region: Arc<MemoryRegion>,
    /// nicfs, while it lives.
    pub node: Option<Node>,
    /// How it packs what it sends.
    pub compression: Compression,
    /// What it has packed, and is about to.
    pub packing: Packing,
    /// Work of its stages that is not begun, and perhaps some that is.
    pub pieces: Vec<service::core::work::Piece>,
    /// Judges read every chunk of its ring.
    pub keeps_chunks: bool,
    /// Directories may be used jointly.
    pub joint: bool,
    /// Files may be, too.
    pub ranges: bool,
    /// Some client speaks the protocol by hand.
    pub by_hand: bool,
    /// Chunks of its ring up to here were looked at.
    pub looked: StreamSeq,
    /// What was found there, and nobody has looked at yet.
    pub chunks: Vec<(ChunkHeader, Vec<u8>)>,
    /// Counts the boots of the machine.
    pub boot: u128,
    /// Counts the starts of nicfs.
    pub incarnation: u64,
    /// What it holds of the stream, also while nicfs is away.
    pub holds: StreamSeq,
    /// What it held, and may have said so, when its region was lost.
    pub lost: StreamSeq,
    /// What it has acknowledged as head of the chain.
    pub acknowledged: StreamSeq,
    /// How many steps of its node were judged.
    pub steps: u64,
    /// The epoch noted beside the region.
    pub noted: Option<Epoch>,
    /// Processes that had the region since the one that noted that, this one the last.
    pub processes: Vec<u64>,
    /// Before that nicfs has its region, and is not ready.
    pub opens_at: Nanos,
    /// What its program understands.
    pub level: Level,
    /// Chunks that are sent again at a time, as on all nodes.
    pub resend: u64,
    /// A view has arrived since the start.
    pub has_view: bool,
    /// When `Tick` is due.
    pub next_tick: Nanos,
    /// The next turn of the loop; turns scheduled for another moment are void.
    pub next_run: Nanos,
    /// Whether the loop slept, so that only a bell draws its attention to clients.
    pub slept: bool,
    /// Everything takes its time.
    pub slow: bool,
    /// nicfs is stopped, without noticing.
    pub hung: bool,
    /// It was told to end in order.
    pub leaving: bool,
    /// Its connection to the coordinator ended meanwhile.
    pub dropped_unnoticed: bool,
    /// What has come for it meanwhile.
    pub(crate) held: Vec<Item>,
    /// Cannot reach the coordinator.
    pub cut_off: bool,
    /// Generation of the connection to the coordinator; frames of another one are lost.
    pub connection: u64,
    /// Registered.
    pub connected: bool,
    /// Since when not connected.
    pub disconnected_at: Nanos,
    /// When the last confirmed heartbeat was sent.
    pub confirmed_at: Option<Nanos>,
    /// What the core was told of the coordinator's word.
    pub serving: Option<Serving>,
    /// Last in time on the connection, to and from the coordinator.
    pub order: [Nanos; 2],
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("id", &self.id).field("node", &self.node).finish()
    }
}

/// A region with an empty volume.
pub fn fresh_region(id: NodeId, shape: Shape) -> Result<Arc<MemoryRegion>, String> {
    let region = Arc::new(MemoryRegion::new());
    region.let_map();
    let params = Params {
        uuid: [7; 16],
        name: "sim".into(),
        node: id,
        durability: shape.durability,
        capacity_bytes: shape.capacity,
        stream_bytes: RING_BYTES_MIN,
        time: CREATED,
        uid: 0,
        gid: 0,
        mode: shape.mode,
    };
    let media: Arc<MemoryRegion> = Arc::clone(&region);
    Volume::format(media, &params).map_err(|e| format!("format: {e:?}"))?;
    Ok(region)
}

/// How the locks of files are left to clients. Not drawn from the others' numbers.
fn draw_soles(limits: &mut Limits, random: &mut Random) {
    if random.chance(1, 4) {
        return;
    }
    let mut some = |of: [u64; 4]| of[random.below(4) as usize];
    limits.soles = some([0, 1, 2, 16]) as usize;
    limits.sole_after = some([1, 2, 5, 100]) as u32;
    limits.sole_within = some([MS, 20 * MS, 200 * MS, 1000 * MS]);
    limits.sole_pause = some([1, MS, 20 * MS, 200 * MS]);
    limits.sole_again = some([1, 1, MS, 20 * MS]);
}

/// The bounds of a node: as shipped, or so small that their edges are met within a few operations.
fn draw_limits(
    random: &mut Random,
    (keeps_chunks, by_hand): (bool, bool),
    (joint, ranges): (bool, bool),
) -> Limits {
    let mut limits = Limits { ranges: 0, ..Limits::SHIPPED };
    if ranges {
        // Not drawn from the others' numbers.
        let mut random = Random::new(random.clone().next_u64() ^ 0x4a9e);
        limits.ranges = [8192, 8192, 3, 1][random.below(4) as usize];
        limits.ranges_all = [1 << 20, 1 << 20, 1 << 20, 4][random.below(4) as usize];
    }
    if joint {
        // Not drawn from the others' numbers.
        let mut random = Random::new(random.clone().next_u64() ^ 0x101e);
        limits.joint_after = 1 + random.below(limits.joint_after.into()) as u32;
        limits.joint_within = [100 * MS, 1000 * MS, 10_000 * MS][random.below(3) as usize];
        limits.joint_for = [MS, 20 * MS, 200 * MS, 1000 * MS][random.below(4) as usize];
    } else {
        limits.joint_after = u32::MAX;
    }
    draw_soles(&mut limits, &mut Random::new(random.clone().next_u64() ^ 0x501e));
    // Nor is this. Work is done apart for whatever is long enough: nothing that is usual here, or nearly everything.
    let mut other = Random::new(random.clone().next_u64() ^ 0x1a1e);
    limits.inline_bytes = [limits.inline_bytes, 0, 300, 3000][other.below(4) as usize];
    limits.piece_bytes = [limits.piece_bytes, 1, 5000][other.below(3) as usize];
    limits.behind_bytes = [limits.behind_bytes, 20_000, 3000][other.below(3) as usize];
    limits.crowd = [limits.crowd, 0, u64::MAX][other.below(3) as usize];
    limits.keepers = 1 + other.below(4) as usize;
    // Nor is whether the nodes of a history take nothing before somebody asks (Assise's way). (What nobody asks for is judged in the
    // end all the same, so it is not left alone for longer than it takes to see that all is quiet.)
    if !by_hand && Random::new(random.clone().next_u64() ^ 0xa551).chance(1, 8) {
        limits.on_demand = true;
        limits.hold = 10 * MS;
    }
    // Nor how much is kept of views to come.
    let mut other = Random::new(random.clone().next_u64() ^ 0xea51);
    limits.early = [limits.early, limits.early, other.below(30) as usize][other.below(3) as usize];
    if random.chance(1, 3) {
        // Where the judges read every verdict in the ring, nothing leaves it before it is full.
        limits.release_step = if keeps_chunks { 1 << 40 } else { limits.release_step };
        return limits;
    }
    let mut offered = Random::new(random.clone().next_u64() ^ 0x0ffe4);
    let offers = [limits.offer_blocks, 0, 1, 1 + offered.below(8)][offered.below(4) as usize];
    let mut small = |shipped: u64, least: u64, most: u64| {
        let drawn = least + random.below(most - least + 1);
        if random.chance(1, 2) { shipped } else { drawn }
    };
    limits.publish_bytes = small(limits.publish_bytes, 1, 20_000);
    limits.turn = small(limits.turn, 1, 400);
    limits.slice_bytes = small(limits.slice_bytes, 500, 9000);
    limits.host_min = small(limits.host_min, 1, 9000);
    limits.host_bytes = small(limits.host_bytes, 1, 9000);
    limits.discard_max = small(limits.discard_max, 4096, 40_000);
    limits.discard_min = small(limits.discard_min, 1, 20_000);
    limits.release_step = small(limits.release_step, 1, 4);
    // Joins by a snapshot in every other history, and not only where too much was missed.
    limits.returns = small(limits.returns.into(), 0, 0) as u32;
    limits.offer_blocks = offers;
    // (Drawn apart, so that what was found before is found again.)
    limits.history = [limits.history, limits.history, 0, 1 + offered.below(6) as usize]
        [offered.below(4) as usize];
    limits.in_place = offered.chance(2, 3);
    limits.stash = small(limits.stash as u64, 0, 3) as usize;
    limits.shared_bytes = small(limits.shared_bytes as u64, 1, 3000) as usize;
    limits.shared_window = small(limits.shared_window, 1, 9000);
    // (For what is the same on all nodes. The others' numbers stay as they were.)
    small(limits.resend, 1, 3);
    limits.recent_bytes = small(limits.recent_bytes as u64, 0, 3000) as usize;
    limits.unready = small(limits.unready as u64, 0, 3) as usize;
    limits.numbers = small(limits.numbers.into(), 1, 3) as u32;
    limits.reaps = small(limits.reaps as u64, 1, 2) as usize;
    let hold = small(limits.hold, 1, 5_000_000);
    limits.hold = if limits.on_demand { limits.hold } else { hold };
    if !by_hand {
        // (Clients by hand read one reply and no more.)
        limits.xattr_bytes = small(limits.xattr_bytes as u64, 16, 300) as usize;
        limits.extents = small(limits.extents as u64, 1, 4) as usize;
        // (A list of several replies is not of one moment, which the judges take it for.)
    }
    if keeps_chunks {
        limits.release_step = 1 << 40;
    }
    limits
}

impl Host {
    /// A node that has not started.
    pub fn new(id: NodeId, shape: Shape, clock: Clock, grace: Nanos) -> Result<Self, String> {
        Ok(Self {
            id,
            shape,
            clock,
            grace,
            gone: false,
            hostd: None,
            knows_hostd: false,
            hostd_down: false,
            rotten: None,
            damage: false,
            region: fresh_region(id, shape)?,
            node: None,
            compression: Compression::None,
            packing: Packing::new(Compression::None, 1, PACKING),
            pieces: Vec::new(),
            keeps_chunks: false,
            by_hand: false,
            joint: false,
            ranges: false,
            looked: StreamSeq(0),
            chunks: Vec::new(),
            boot: 1,
            incarnation: 0,
            holds: StreamSeq(0),
            lost: StreamSeq(0),
            acknowledged: StreamSeq(0),
            steps: 0,
            noted: None,
            processes: Vec::new(),
            opens_at: 0,
            level: Level::NEWEST,
            resend: Limits::SHIPPED.resend,
            has_view: false,
            next_tick: 0,
            next_run: Nanos::MAX,
            slept: false,
            slow: false,
            hung: false,
            leaving: false,
            dropped_unnoticed: false,
            held: Vec::new(),
            cut_off: false,
            connection: 0,
            connected: false,
            disconnected_at: 0,
            confirmed_at: None,
            serving: None,
            order: [0; 2],
        })
    }

    /// Whether nobody stays away for longer than he is waited for.
    pub const fn is_patient(&self) -> bool {
        self.grace == GRACE_LONG
    }

    /// Processes that had the region before this one.
    pub fn before(&self) -> Vec<u64> {
        self.processes.iter().copied().filter(|process| *process != self.incarnation).collect()
    }

    /// Whether what nicfs is to hear is still so: a hostd that has ended meanwhile is not there, and another may be.
    pub fn is_so(&mut self, event: &Event) -> bool {
        let Event::HostUp(told) = event else { return true };
        let told = Arc::as_ptr(told).cast::<()>();
        self.knows_hostd = self.hostd.as_ref().is_some_and(|h| Arc::as_ptr(h).cast() == told);
        self.knows_hostd
    }

    /// Starts nicfs.
    pub fn start(&mut self, now: Nanos, seed: u64) -> Result<(), String> {
        let mut random = Random::new(seed ^ 0x11b5);
        let mut limits =
            draw_limits(&mut random, (self.keeps_chunks, self.by_hand), (self.joint, self.ranges));
        limits.resend = self.resend;
        let config = NodeConfig {
            limits,
            node: self.id,
            lanes: 2,
            lane_bytes: storage::limits::LANE_BYTES_MIN.next_multiple_of(4096),
            clients_max: 16,
            clients_per_user: 16,
            per_user: PerUser::SHIPPED,
            scheduler: [Scheduler::Urgent, Scheduler::RoundRobin][(seed >> 32) as usize % 2],
            weights: [(0, 1 + (seed >> 33) as u32 % 4), (1000, 1 + (seed >> 35) as u32 % 4)].into(),
            ring_bytes: RING_BYTES_MIN,
            memory: 64 << 20,
            high: 80,
            low: 50,
            join_step: [1, 2, 5, 20, 128][(seed >> 20) as usize % 5],
            room: Shares { share: 2 + (seed >> 24) % 8, most: 400, least: 1 + (seed >> 28) % 8 },
            grace: self.grace,
            boot: self.boot,
            secret: SECRET,
            incarnation: self.incarnation + 1,
        };
        let media: Arc<MemoryRegion> = Arc::clone(&self.region);
        let mut node = Node::new(config, media, Random::new(seed))
            .map_err(|e| format!("node {} does not start: {e}", self.id))?;
        // Clocks of machines differ by seconds.
        node.set_realtime_offset(REALTIME + (seed >> 2) % 5_000_000_000);
        let now_there = self.clock.local(now);
        let tell = |event| node.apply(now_there, event, &mut Vec::new());
        self.serving = Some(Serving::begin(tell));
        self.node = Some(node);
        self.packing = Packing::new(self.compression, 2, PACKING);
        self.looked = StreamSeq(0);
        self.acknowledged = StreamSeq(u64::MAX);
        if self.incarnation > 0 {
            // It is updated while nobody runs it.
            self.level = Level::NEWEST;
        }
        self.incarnation += 1;
        self.processes.push(self.incarnation);
        if self.processes.len() > BEFORE_MAX {
            self.processes.remove(1);
        }
        self.has_view = false;
        self.next_tick = now;
        self.slept = false;
        self.connected = false;
        self.connection += 1;
        self.disconnected_at = now;
        self.confirmed_at = None;
        Ok(())
    }

    /// The region is gone, with all that it held.
    pub fn lose(&mut self) {
        self.lost = self.lost.max(self.holds);
        self.holds = StreamSeq(0);
    }

    /// Notes the chunks that its ring holds by now: they may be gone a moment later.
    pub fn collect(&mut self) {
        let Some(node) = &self.node else { return };
        let (last, looked) = (node.position(), self.looked);
        self.chunks.extend((looked.0 + 1..=last.0).filter_map(|seq| node.chunk(StreamSeq(seq))));
        self.looked = last;
    }

    /// nicfs is gone, without a word.
    pub fn stop(&mut self) {
        self.node = None;
        (self.hung, self.leaving) = (false, false);
        self.connected = false;
        self.connection += 1;
        self.next_run = Nanos::MAX;
    }

    /// Whether the node must hold itself for replaced.
    pub fn should_fence(&self, now: Nanos) -> bool {
        let Some(confirmed) = self.confirmed_at else { return true };
        (!self.connected && now - self.disconnected_at > self.clock.lasts(FENCE_DISCONNECTED))
            || now.saturating_sub(confirmed) > self.clock.lasts(FENCE_AFTER)
    }

    /// When that will be for its clients, by its own clock.
    pub fn serves_until(&self) -> Option<Nanos> {
        let heard = self.clock.local(self.confirmed_at?) + FENCE_AFTER;
        let broken = self.clock.local(self.disconnected_at) + FENCE_DISCONNECTED;
        Some(if self.connected { heard } else { heard.min(broken) })
    }

    /// What the clock that the clients judge their leases by shows: it ticks, and seldom.
    pub fn clients_clock(&self, now: Nanos) -> Nanos {
        let tick = CLOCK_LAG_MS * 1_000_000;
        self.clock.local(now) / tick * tick
    }
}
