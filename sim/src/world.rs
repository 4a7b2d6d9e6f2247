//! The world: clock, event queue, and what a history consists of. The parts are in `world/`.

mod coordination;
mod decay;
pub(crate) mod judge;
mod links;
mod mishaps;
mod nodes;

use std::collections::BTreeMap;
use std::sync::Arc;

use base::random::Random;
use base::{ClientId, Level, Nanos, NodeId, StreamSeq, crc32c};
use client::libfs::Limits;
use cluster::coordinator::machine::{
    Action, Event as CoEvent, Machine, Patience, Speaker, VolumeSpec,
};
use cluster::coordinator::store::{Image, Seat};
use cluster::coordinator::{DataState, Registration, View};
use cluster::transport::Class;
use service::core::{Effect, Event, Role};
use service::packing::{Compression, Piece};
use storage::format::superblock::Durability;
use storage::media::{Media, Segment};
use storage::volume::Volume;

use crate::actor::{Actor, GUEST, Kind};
use crate::faults::Fault;
use crate::host::{self, Clock, Host, Shape, TICK, fresh_region};
use crate::hostd::{Hostd, Step};
use crate::model::{Body, Model, State};
use crate::process::Process;
use crate::scenario::{Moment, Script, Stage};

/// Microsecond.
pub const US: Nanos = 1000;
/// Millisecond.
pub const MS: Nanos = 1_000_000;
const VOLUME: &str = "sim";
const CLUSTER: u128 = 42;
/// After healing, everything must be answered and quiet within this time.
const HEAL_LIMIT: Nanos = 30_000 * MS;
/// Events of one history; more is a loop.
const EVENTS_MAX: u64 = 20_000_000;

/// Kinds of histories that can be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flavour {
    /// Nothing special.
    Plain,
    /// Writes of up to 1 MiB: lanes and the stream ring run full.
    Large,
    /// With a client that tries what it may not.
    Hostile,
    /// On a volume that runs full.
    Full,
    /// With limits of users and directories that bar.
    Quota,
    /// Several processes make and remove names in the same directories.
    Joint,
    /// Nodes are cut off from all others, the head mostly, again and again, while clients of all nodes write whole blocks; and hostd
    /// dies with copies under way.
    Parted,
    /// Several processes write and read the same few files at the same time: mostly blocks of their own, and sometimes those of others.
    Bytes,
    /// Two minutes of calls and faults with seconds between them, in which everything that waits for a time comes to its end: what
    /// is idle goes back, leases lapse, who is away for long is given up.
    Long,
}

/// What a history consists of.
#[derive(Clone, Debug)]
pub struct Preset {
    /// Nodes.
    pub nodes: usize,
    /// So many members must hold what is acknowledged; 0: a majority.
    pub min_replicas: u16,
    /// Clients in all.
    pub clients: usize,
    /// Operations of each client.
    pub ops: u32,
    /// Faults at most.
    pub faults: u32,
    /// Smallest write, or so.
    pub write_min: u64,
    /// Largest write.
    pub write_max: u64,
    /// Longest file.
    pub file_max: u64,
    /// One client is a guest that tries what it may not.
    pub hostile: bool,
    /// The volume is small, so that it runs full.
    pub full: bool,
    /// Limits of users and directories are so low that they bar.
    pub quota: bool,
    /// One client, which writes its log by hand, makes snapshots and gives them up.
    pub snapshots: bool,
    /// A node has a program that knows nothing of snapshots, until it is started again.
    pub updated: Option<usize>,
    /// The volume promises what a disk can.
    pub disk: bool,
    /// Faults are drawn from these, if there are any.
    pub focus: Vec<Fault>,
    /// Faults fall into this time.
    pub active: Nanos,
    /// Bytes of the regions for data; 0: as the flavour has it.
    pub capacity: u64,
    /// The nodes of the clients; none: one after the other.
    pub clients_at: Vec<usize>,
    /// When the clients begin, if later than others.
    pub starts: Vec<Nanos>,
    /// All operations are of these, if there are any.
    pub(crate) favour: Vec<Kind>,
    /// A client pauses at most this long, until everything is healed.
    pub pace: Nanos,
    /// A client syncs before one in so many operations.
    pub syncs: u64,
    /// A thread of a process closes a file before one in so many calls.
    pub closes: u64,
    /// Inode numbers that a client asks for at once, if that matters.
    pub numbers: Option<u32>,
    /// Who has written to a file mostly writes to it again.
    pub insists: bool,
    /// hostd hangs at every job.
    pub hostd_deaf: bool,
    /// How nodes pack what they send; none: drawn.
    pub compression: Option<Compression>,
    /// Faults at their moments.
    pub script: Script,
    /// Threads of a process, at most.
    pub threads: u64,
    /// One in so many accesses to what threads share is a pause of the thread, at least.
    pub points: u64,
    /// One in so many processes has narrow places.
    pub narrow: u64,
    /// Those of this file, in all.
    pub narrow_file: Option<&'static str>,
    /// All bounds of processes are small.
    pub tight: bool,
    /// Directories that processes fight for are used by all of them jointly.
    pub joint: bool,
    /// So are files, where they use other bytes of them.
    pub ranges: bool,
    /// Processes mostly use blocks of their own of the same few files.
    pub strides: bool,
}

impl Preset {
    /// The preset that a seed stands for.
    pub fn of(seed: u64) -> Self {
        let mut preset = Self::drawn(seed);
        // (Not drawn from the others' numbers.)
        let small = !preset.doubts() && preset.write_max < 1 << 20;
        if small && Random::new(seed ^ 0xb17e).chance(1, 12) {
            preset.make(Flavour::Bytes);
        }
        preset
    }

    /// One of which no more is drawn: those in which files are shared are asked for.
    pub(crate) fn drawn(seed: u64) -> Self {
        let mut r = Random::new(seed ^ 0x5eed);
        let mut preset = Self {
            nodes: 1 + r.below(3) as usize,
            min_replicas: 0,
            clients: 1 + r.below(4) as usize,
            ops: 20 + r.below(60) as u32,
            faults: r.below(7) as u32,
            write_min: 1,
            write_max: 9000,
            file_max: 40_000,
            hostile: r.chance(1, 3),
            focus: Vec::new(),
            full: r.chance(1, 12),
            quota: false,
            // Not drawn from the others' numbers.
            snapshots: Random::new(seed ^ 0x54a9).chance(1, 3),
            updated: None,
            disk: r.chance(1, 4),
            active: 2000 * MS,
            capacity: 0,
            clients_at: Vec::new(),
            starts: Vec::new(),
            favour: Vec::new(),
            pace: 60 * MS,
            syncs: 8,
            closes: 30,
            numbers: None,
            insists: false,
            hostd_deaf: false,
            compression: None,
            script: Script::default(),
            threads: 1 + r.below(4),
            points: [2, 8, 40, 300][r.below(4) as usize],
            narrow: 2,
            narrow_file: None,
            tight: false,
            // Not drawn from the others' numbers.
            joint: Random::new(seed ^ 0x101e).chance(1, 3),
            ranges: Random::new(seed ^ 0x4a9e).chance(2, 3),
            strides: false,
        };
        if r.chance(2, 3) {
            preset.nodes = 3;
        }
        // Not drawn from the others' numbers: a majority mostly, or all, or the last one alone.
        let all = preset.nodes as u16;
        preset.min_replicas = [0, 0, 0, 0, 1, all][Random::new(seed ^ 0x1ea5).below(6) as usize];
        let mut updates = Random::new(seed ^ 0x1e7e1);
        if updates.chance(1, 3) {
            preset.updated = Some(updates.below(all.into()) as usize);
        }
        preset.pace = [50 * US, 2 * MS, 60 * MS][r.below(3) as usize];
        preset.closes = [3, 12, 60][r.below(3) as usize];
        if preset.full {
            preset.make(Flavour::Full);
        } else if r.chance(1, 16) {
            preset.make(Flavour::Large);
        } else if r.chance(1, 10) {
            preset.make(Flavour::Quota);
        }
        preset
    }

    /// Three nodes, three clients, nothing special, no faults: for a script to add some.
    pub(crate) fn plain(seed: u64) -> Self {
        let mut preset = Self::drawn(seed);
        preset.make(Flavour::Plain);
        (preset.joint, preset.snapshots, preset.updated) = (false, false, None);
        (preset.nodes, preset.clients, preset.ops, preset.faults) = (3, 3, 80, 0);
        preset.min_replicas = 0;
        preset.threads = preset.threads.min(2);
        preset
    }

    /// Only these faults, and more of them; unless there are none.
    pub fn focus(&mut self, faults: Vec<Fault>) {
        if !faults.is_empty() {
            (self.nodes, self.clients, self.faults) = (3, self.clients.max(3), 8);
            self.min_replicas = self.min_replicas.min(2);
            self.active = 1200 * MS;
        }
        self.focus = faults;
    }

    /// It has a script.
    pub(crate) fn is_directed(&self) -> bool {
        !self.script.steps.is_empty()
    }

    /// One client writes its log by hand. Where honest operations may be refused, there is none.
    pub(crate) const fn has_attacker(&self) -> bool {
        self.hostile && !self.doubts()
    }

    /// One client writes its log by hand.
    pub(crate) const fn by_hand(&self) -> bool {
        self.has_attacker() || self.has_operator()
    }

    /// One client makes snapshots. Where operations may be refused, there is none.
    pub(crate) const fn has_operator(&self) -> bool {
        self.snapshots && !self.hostile && !self.doubts()
    }

    /// There are several users.
    pub(crate) const fn has_users(&self) -> bool {
        self.hostile || self.quota
    }

    /// Operations may be refused for a while, so that each is synced before the next.
    pub(crate) const fn doubts(&self) -> bool {
        self.full || self.quota
    }

    /// Directories may be used jointly. (Where operations may be refused otherwise, none are.)
    pub(crate) const fn shares(&self) -> bool {
        self.joint && !self.doubts()
    }

    /// Files may be used jointly.
    pub(crate) const fn shares_bytes(&self) -> bool {
        self.ranges && self.shares()
    }

    /// The judges read every chunk.
    pub(crate) const fn hears(&self) -> bool {
        self.doubts() || self.shares()
    }

    fn shape(&self) -> Shape {
        Shape {
            // Of the others none may run full: a refusal for want of space is a violation there.
            capacity: match (self.capacity, self.full) {
                (0, true) => 384 << 10,
                // What is overwritten stays for a while.
                (0, false) if self.has_operator() => 128 << 20,
                (0, false) => 24 << 20,
                (bytes, _) => bytes,
            },
            mode: if self.hostile || self.quota { 0o777 } else { 0o755 },
            durability: if self.disk { Durability::Disk } else { Durability::Pmem },
        }
    }

    /// Makes it one of a certain flavour.
    pub fn make(&mut self, flavour: Flavour) {
        if std::mem::take(&mut self.strides) {
            self.favour.clear();
        }
        match flavour {
            Flavour::Plain => {
                (self.full, self.hostile, self.quota) = (false, false, false);
                (self.write_max, self.file_max) = (9000, 40_000);
            }
            Flavour::Hostile => {
                (self.full, self.hostile, self.quota) = (false, true, false);
                self.clients = self.clients.max(2);
            }
            Flavour::Large => {
                (self.full, self.hostile, self.quota) = (false, false, false);
                self.clients = 4;
                (self.write_max, self.file_max) = (1 << 20, 1 << 20);
            }
            Flavour::Full => {
                self.full = true;
                (self.write_max, self.file_max) = (60_000, 200_000);
            }
            Flavour::Quota => {
                (self.full, self.hostile, self.quota) = (false, false, true);
                self.clients = self.clients.max(2);
            }
            Flavour::Long => {
                self.make(Flavour::Plain);
                (self.active, self.pace, self.faults) = (120_000 * MS, 4000 * MS, 40);
                self.ops = self.ops.max(40);
            }
            Flavour::Parted => {
                use Fault::{Hostd, Partition};
                use Kind::{Clone, Create, Punch, Rename, Truncate, Unlink, Write};
                self.make(Flavour::Plain);
                (self.joint, self.insists, self.disk) = (false, true, false);
                (self.nodes, self.clients, self.threads) = (3, 4, self.threads.min(2));
                self.clients_at = vec![0, 1, 2, 0];
                (self.write_min, self.write_max, self.file_max) = (4096, 20_000, 64_000);
                self.favour = vec![
                    Create, Write, Write, Write, Write, Write, Write, Write, Clone, Punch,
                    Truncate, Rename, Unlink,
                ];
                self.focus =
                    [0, 0, 1, 2].map(Partition).into_iter().chain((0..3).map(Hostd)).collect();
                (self.faults, self.active, self.ops, self.pace) = (32, 6000 * MS, 80, 60 * MS);
            }
            Flavour::Bytes => {
                use Kind::{Clone, Create, Punch, Read, Rename, Truncate, Unlink, Write};
                self.make(Flavour::Plain);
                (self.joint, self.ranges, self.strides) = (true, true, true);
                (self.clients, self.closes) = (self.clients.max(3), 60);
                (self.file_max, self.write_max) = (64 << 10, 6000);
                self.syncs = self.syncs.max(20);
                self.favour = [
                    &[Write; 14][..],
                    &[Read; 8],
                    &[Truncate, Create, Create, Rename, Unlink, Punch, Clone],
                ]
                .concat();
            }
            Flavour::Joint => {
                use Kind::{Create, Exchange, Link, List, Mkdir, Rename, Tmpfile, Unlink, Write};
                self.make(Flavour::Plain);
                (self.joint, self.clients) = (true, self.clients.max(3));
                self.favour = vec![
                    Create, Create, Mkdir, Unlink, Unlink, Rename, Rename, Link, Exchange, List,
                    Tmpfile, Write,
                ];
            }
        }
    }
}

/// Of messages about a lease, what they say of whom (`service::core`, LeaseWant to Recalled, and Released; behind their epoch).
fn of_lease(kind: u16, body: &[u8]) -> String {
    let body = body.get(4..).unwrap_or(&[]);
    let (numbers, rest) = body.as_chunks::<8>();
    match (kind, numbers) {
        (6 | 7 | 10 | 11 | 13, [client, ino, token, more @ ..]) => {
            let [client, ino, token] = [client, ino, token].map(|n| u64::from_le_bytes(*n));
            let mode = more.as_flattened().first().or(rest.first()).copied().unwrap_or(0);
            format!(" {client:#x} {ino} token {token:x} mode {mode}")
        }
        _ => String::new(),
    }
}

/// The bounds of a process: as shipped, or so small that their edges are met within a few operations.
fn draw_limits(random: &mut Random, tight: bool, write_max: u64) -> Limits {
    let mut limits = Limits::SHIPPED;
    if random.chance(1, 4) && !tight {
        return limits;
    }
    let mut small = |shipped: u64, least: u64, most: u64| {
        let drawn = least + random.below(most - least + 1);
        if random.chance(1, 2) && !tight { shipped } else { drawn }
    };
    limits.inodes = small(limits.inodes as u64, 6, 24) as usize;
    limits.evict = small(limits.evict as u64, 1, 8) as usize;
    limits.names = small(limits.names as u64, 2, 6) as usize;
    limits.proofs = small(limits.proofs as u64, 2, 16) as usize;
    limits.numbers = small(limits.numbers.into(), 1, 4) as u32;
    limits.posted = small(limits.posted as u64, 1, 6) as usize;
    limits.log_pieces = small(limits.log_pieces as u64, 1, 8) as usize;
    // The model keeps a whole file for each piece that is written: no call is cut into more than some sixty.
    let piece = (write_max / 64).max(1000);
    limits.write_piece = small(limits.write_piece as u64, piece, 9 * piece) as usize;
    limits.append_piece = small(limits.append_piece as u64, 3 * piece, 9 * piece) as usize;
    limits.read_piece = small(limits.read_piece as u64, 500, 9000) as usize;
    limits.remote_read = small(limits.remote_read as u64, 300, 5000) as usize;
    limits.copy_min = small(limits.copy_min, 1, 9000);
    limits.copy_piece = small(limits.copy_piece >> 12, 1, 3) << 12;
    limits.copy_call = small(limits.copy_call >> 12, 1, 8) << 12;
    limits.requests = small(limits.requests as u64, 1, 3) as usize;
    limits.closed = small(limits.closed as u64, 0, 2) as usize;
    limits.given = small(limits.given as u64, 1, 4) as usize;
    // Not drawn from the others' numbers.
    let mut random = Random::new(random.clone().next_u64() ^ 0x501f);
    if random.chance(1, 2) {
        limits.sole_locks = 1 + random.below(4) as usize;
    }
    if random.chance(1, 2) {
        limits.lost = random.below(2) as u32;
    }
    limits
}

/// How nodes pack what they send; not drawn from the numbers of others.
fn draw_compression(seed: u64) -> Compression {
    use Compression::{Auto, Lz4, None, Zstd};
    [None, None, None, Lz4, Zstd, Auto][Random::new(seed ^ 0x9ac7).below(6) as usize]
}

/// What came of a history.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Checksum over the trace.
    pub hash: u64,
    /// What was violated, if anything.
    pub violation: Option<String>,
    /// Events handled.
    pub events: u64,
    /// Virtual time passed.
    pub virtual_ns: Nanos,
    /// Operations of clients that were appended.
    pub operations: u64,
    /// Observations compared with the model.
    pub observations: u64,
    /// How often a thread was stopped between two accesses to what others share, and others went on.
    pub switches: u64,
    /// fsyncs acknowledged.
    pub fsyncs: u64,
    /// Entries that had to be refused.
    pub dared: u64,
    /// Operations for which there was no space.
    pub no_space: u64,
    /// Operations that a limit barred.
    pub over_quota: u64,
    /// Snapshots that members had in the end.
    pub snapshots: u64,
    /// Operations by kind.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Operations on names of directories that are used jointly.
    pub joint: u64,
    /// Writes under leases on ranges.
    pub parts: u64,
    /// Those that did not fit what others had done.
    pub untaken: u64,
    /// Those whose head was lost before anybody else knew of them.
    pub unsaid: u64,
    /// Processes that went on with what the one before had locked.
    pub heirs: u64,
    /// Steps that the script took.
    pub steps: u64,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
}

impl Outcome {
    /// The sum of several: all numbers, without checksum and violation.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.virtual_ns += other.virtual_ns;
        self.operations += other.operations;
        self.observations += other.observations;
        self.switches += other.switches;
        self.fsyncs += other.fsyncs;
        self.dared += other.dared;
        self.no_space += other.no_space;
        self.over_quota += other.over_quota;
        self.snapshots += other.snapshots;
        self.joint += other.joint;
        self.parts += other.parts;
        self.untaken += other.untaken;
        self.unsaid += other.unsaid;
        self.heirs += other.heirs;
        self.steps += other.steps;
        for (kind, n) in &other.faults {
            *self.faults.entry(kind).or_default() += n;
        }
        for (kind, n) in &other.kinds {
            *self.kinds.entry(kind).or_default() += n;
        }
    }
}

pub(crate) enum Up {
    /// And when it was sent.
    Register(Nanos),
    Beat(Nanos, StreamSeq),
    Opened(StreamSeq),
    Joined(Seat, base::Epoch),
    Suspect(NodeId, base::Epoch),
}

pub(crate) enum Item {
    Frame {
        from: usize,
        to: usize,
        class: Class,
        link: u64,
        kind: u16,
        body: Vec<u8>,
    },
    PeerUp {
        at: usize,
        peer: usize,
        link: u64,
    },
    PeerDown {
        at: usize,
        peer: usize,
        link: u64,
    },
    Run(usize),
    /// For this incarnation of a node only.
    To(usize, u64, Event),
    /// A piece of work of a node, in that incarnation, comes to its end.
    Worked(usize, u64, Piece),
    /// Work of a stage of a node is done, in that incarnation.
    Piece(usize, u64, service::core::work::Piece),
    /// hostd of a node copies some of a job.
    Copies(usize, Arc<Hostd>, u64),
    Connect(usize, u64),
    /// nicfs is ready.
    Opened(usize, u64),
    ToCoordinator(usize, u64, u64, Up),
    Disconnected(usize, u64),
    /// It has said so before it ended.
    Left(usize, u64),
    Registered(usize, u64, Nanos),
    Confirm(usize, u64, Nanos),
    View(usize, u64, View),
    CoordinatorTick,
    Step(usize, u64),
    Attached {
        actor: usize,
        stamp: u64,
        client: ClientId,
        segment: u32,
        incarnation: u64,
    },
    /// A thread of a process goes on.
    Thread(usize, usize, u64),
    /// A process begins its next life.
    Boot(usize, u64),
    /// What hostd has for a process.
    Given {
        token: u64,
        incarnation: u64,
        given: Result<(ClientId, u32), base::Errno>,
    },
    /// A node ends in order: is it time?
    Closing {
        n: usize,
        incarnation: u64,
        by: Nanos,
        lasts: Nanos,
    },
    /// A client was killed: has its node taken its log?
    Drained(Ended, u32),
    Fault(Fault),
    /// A fault of the script, and how long it lasts.
    Deed(Fault, Nanos),
    End(Fault),
    Heal,
}

impl Item {
    /// The node whose nicfs must run for it, if one must.
    const fn wants(&self) -> Option<usize> {
        match self {
            Self::Frame { to: n, .. }
            | Self::PeerUp { at: n, .. }
            | Self::PeerDown { at: n, .. }
            | Self::Run(n)
            | Self::To(n, ..)
            | Self::Worked(n, ..)
            | Self::Piece(n, ..)
            | Self::Closing { n, .. }
            | Self::Connect(n, _)
            | Self::Opened(n, _)
            | Self::Registered(n, ..)
            | Self::Confirm(n, ..)
            | Self::View(n, ..) => Some(*n),
            _ => None,
        }
    }
}

/// A session that ended while its node lived.
#[derive(Clone, Copy)]
pub(crate) struct Ended {
    pub(crate) session: usize,
    pub(crate) last: u64,
    pub(crate) client: ClientId,
    pub(crate) node: usize,
    pub(crate) incarnation: u64,
    pub(crate) epoch: base::Epoch,
}

/// The pair's state as the fabric has it, and as each end believes.
#[derive(Default, Clone)]
struct Link {
    up: bool,
    number: u64,
    cut: u32,
    believes: [Option<u64>; 2],
    order: [[Nanos; 2]; 2],
    /// When each end last learnt, or will, that the link came or went.
    told: [Nanos; 2],
}

/// See the module.
pub struct World<'a> {
    pub(crate) now: Nanos,
    pub(crate) random: Random,
    pub(crate) preset: Preset,
    queue: BTreeMap<(Nanos, u64), Item>,
    number: u64,
    pub(crate) hosts: Vec<Host>,
    links: BTreeMap<(usize, usize), Link>,
    machine: Option<Machine>,
    image: Option<Image>,
    pub(crate) actors: Vec<Actor>,
    pub(crate) model: Model,
    /// Files that clients have open.
    pub(crate) pins: BTreeMap<u64, crate::actor::quota::Pin>,
    pub(crate) outcome: Outcome,
    pub(crate) healed: bool,
    /// When some of what lies on the members began to rot, in the end.
    pub(crate) decayed: Option<Nanos>,
    pub(crate) stage: Stage,
    pub(crate) verdicts: crate::process::verdict::Verdicts,
    pub(crate) locks: crate::process::locks::Locks,
    pub(crate) jointly: crate::process::joint::Jointly,
    /// Of each block of a file that was written under a lease on ranges, who wrote it last, and when in the model's time.
    pub(crate) writers: BTreeMap<(u64, usize), (usize, u64)>,
    pub(crate) history: crate::actor::operator::History,
    sink: Option<&'a mut dyn FnMut(&str)>,
}

impl std::fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("now", &self.now).finish_non_exhaustive()
    }
}

/// Runs the history of `seed`; each event is one line to `sink`.
pub fn run(seed: u64, preset: Preset, sink: Option<&mut dyn FnMut(&str)>) -> Outcome {
    let mut world = match World::new(seed, preset, sink) {
        Ok(world) => world,
        Err(why) => return Outcome { violation: Some(why), ..Outcome::default() },
    };
    if let Err(why) = world.history() {
        world.trace(|| format!("VIOLATION {why}"));
        world.outcome.violation = Some(why);
    }
    world.outcome.virtual_ns = world.now;
    world.outcome
}

impl<'a> World<'a> {
    pub(crate) fn new(
        seed: u64,
        preset: Preset,
        sink: Option<&'a mut dyn FnMut(&str)>,
    ) -> Result<Self, String> {
        let shape = preset.shape();
        let root = State::new(0o40_000 | shape.mode, 0, host::CREATED, Body::Dir(BTreeMap::new()));
        let mut random = Random::new(seed);
        // Not drawn from the others' numbers: half of the histories, of those where nobody counts inodes.
        let patient = !preset.quota && Random::new(seed ^ 0x9a3e).chance(1, 2);
        let grace = if patient { host::GRACE_LONG } else { host::GRACE_SHORT };
        let hosts = (1..=preset.nodes)
            .map(|n| Host::new(NodeId(n as u32), shape, Clock::draw(&mut random), grace));
        let mut hosts = hosts.collect::<Result<Vec<_>, _>>()?;
        for host in &mut hosts {
            (host.keeps_chunks, host.by_hand) = (preset.hears(), preset.by_hand());
            (host.joint, host.ranges) = (preset.shares(), preset.shares_bytes());
            host.compression = preset.compression.unwrap_or_else(|| draw_compression(seed));
        }
        let resend = Random::new(seed ^ 0x2e5e).below(6);
        if (1..=3).contains(&resend) {
            hosts.iter_mut().for_each(|host| host.resend = resend);
        }
        if let Some(host) = preset.updated.and_then(|n| hosts.get_mut(n)) {
            host.level = Level::FIRST;
        }
        let mut world = Self {
            now: 0,
            random,
            queue: BTreeMap::new(),
            number: 0,
            hosts,
            links: BTreeMap::new(),
            machine: None,
            image: None,
            actors: Vec::new(),
            model: Model::new(root),
            pins: BTreeMap::new(),
            outcome: Outcome::default(),
            healed: false,
            decayed: None,
            stage: Stage::default(),
            verdicts: Default::default(),
            locks: Default::default(),
            jointly: Default::default(),
            writers: BTreeMap::new(),
            history: Default::default(),
            sink,
            preset,
        };
        for a in 0..world.preset.nodes {
            for b in a + 1..world.preset.nodes {
                world.links.insert((a, b), Link::default());
            }
        }
        world.start_coordinator()?;
        for n in 0..world.preset.nodes {
            world.start_node(n)?;
        }
        for c in 0..world.preset.clients {
            let node = world.preset.clients_at.get(c).map_or(c % world.preset.nodes, |n| *n);
            let uid =
                if c == 0 && (world.preset.hostile || world.preset.quota) { GUEST } else { 0 };
            if world.is_process(c) {
                let process = world.draw_process();
                let uid = if world.preset.has_users() { world.draw_user() } else { 0 };
                world.actors.push(Actor::of_process(node, uid, process));
                let at = 20 * MS + world.random.below(50 * MS);
                let start = world.preset.starts.get(c).copied().unwrap_or(0);
                world.at(at.max(start), Item::Boot(c, 0));
                continue;
            }
            world.actors.push(Actor::new(node, uid, world.preset.ops));
            let at = 20 * MS + world.random.below(50 * MS);
            let start = world.preset.starts.get(c).copied().unwrap_or(0);
            world.step_in(c, at.max(start));
        }
        world.at(50 * MS, Item::CoordinatorTick);
        for _ in 0..world.random.below(u64::from(world.preset.faults) + 1) {
            let (nodes, clients) = (world.preset.nodes, world.preset.clients);
            let fault = match world.preset.focus.len() as u64 {
                0 => Fault::draw(&mut world.random, nodes, clients),
                n => world.preset.focus[world.random.below(n) as usize],
            };
            let at = 50 * MS + world.random.below(world.preset.active);
            world.at(at, Item::Fault(fault));
        }
        let heal = world.preset.active + 1600 * MS;
        world.at(heal, Item::Heal);
        Ok(world)
    }

    /// Whether a client is LibFS: all are but the one that tries what it may not.
    fn is_process(&self, c: usize) -> bool {
        !(c == 0 && self.preset.by_hand())
    }

    /// Whose a process is, where there are several: bound to a user, or the super-user's.
    fn draw_user(&mut self) -> u32 {
        [0, 0, GUEST, GUEST, crate::rights::OTHER][self.random.below(5) as usize]
    }

    fn draw_process(&mut self) -> Process {
        let threads = 1 + self.random.below(self.preset.threads) as usize;
        let chance = self.preset.points * (1 + self.random.below(3));
        let narrow = match self.preset.narrow_file {
            Some(file) => crate::process::Narrow::Of(file),
            None if self.random.chance(1, self.preset.narrow) => {
                crate::process::Narrow::Some(self.random.next_u64())
            }
            None => crate::process::Narrow::None,
        };
        let mut limits = draw_limits(&mut self.random, self.preset.tight, self.preset.write_max);
        if let Some(numbers) = self.preset.numbers {
            limits.numbers = numbers;
        }
        // (Not drawn from the numbers of others.)
        let key = self.preset.points ^ limits.inodes as u64 ^ ((limits.posted as u64) << 8);
        limits.aside = Random::new(key ^ 0xa51d).chance(7, 8);
        // Where there is a script, each thread goes on until it has been played.
        let calls = if self.preset.is_directed() {
            self.preset.ops * 2
        } else {
            self.preset.ops * 2 / threads as u32 + 1
        };
        Process::new(threads, calls, limits, (chance, narrow))
    }

    pub(crate) fn trace(&mut self, line: impl FnOnce() -> String) {
        let line = format!("{:>12} {}", self.now, line());
        let half = u64::from(crc32c(self.outcome.hash as u32, line.as_bytes()));
        self.outcome.hash = self.outcome.hash.rotate_left(23) ^ half;
        if let Some(sink) = &mut self.sink {
            sink(&line);
        }
    }

    pub(crate) fn at(&mut self, at: Nanos, item: Item) {
        self.number += 1;
        self.queue.insert((at.max(self.now), self.number), item);
    }

    /// A delay between the two, in nanoseconds.
    pub(crate) fn between(&mut self, least: Nanos, most: Nanos) -> Nanos {
        least + self.random.below(most - least + 1)
    }

    pub(crate) fn history(&mut self) -> Result<(), String> {
        let limit = self.preset.active + 1600 * MS + HEAL_LIMIT;
        let mut look_at = 0;
        while let Some(((at, _), item)) = self.queue.pop_first() {
            self.now = at;
            self.outcome.events += 1;
            if self.outcome.events > EVENTS_MAX {
                return Err(format!("no end after {EVENTS_MAX} events"));
            }
            self.handle(item)?;
            self.follow_script()?;
            if self.healed && self.now >= look_at {
                look_at = self.now + 20 * MS;
                if self.is_quiet() {
                    match self.decayed {
                        None => self.decay()?,
                        Some(_) if self.is_mended() => return self.judge(),
                        Some(at) if self.now > at + HEAL_LIMIT => {
                            return Err(format!("rot is not mended: {}", self.scrubs()));
                        }
                        Some(_) => {}
                    }
                } else if self.now > limit && self.decayed.is_none() {
                    return Err(format!("no progress after healing: {}", self.state_of_affairs()));
                }
            }
        }
        Err("the queue ran empty".into())
    }

    pub(crate) fn handle(&mut self, item: Item) -> Result<(), String> {
        if let Some(n) = item.wants()
            && self.hosts[n].hung
        {
            self.hosts[n].held.push(item);
            return Ok(());
        }
        match item {
            Item::Frame { from, to, class, link, kind, mut body } => {
                self.damage(to, kind, &mut body);
                if self.believes(to, from) == Some(link) {
                    self.trace(|| {
                        let crc = crc32c(0, &body);
                        format!(
                            "frame {}>{} kind {kind} {} {crc:08x}{}",
                            from + 1,
                            to + 1,
                            body.len(),
                            of_lease(kind, &body)
                        )
                    });
                    self.arrived(from, to, class, kind, body)?;
                }
            }
            Item::PeerUp { at, peer, link } => self.peer_up(at, peer, link)?,
            Item::PeerDown { at, peer, link } => self.peer_down(at, peer, link)?,
            Item::Run(n) => self.run_node(n)?,
            Item::To(n, incarnation, event) => {
                if self.hosts[n].incarnation == incarnation && self.hosts[n].is_so(&event) {
                    self.deliver(n, event)?;
                }
            }
            Item::Worked(n, incarnation, piece) => self.worked(n, incarnation, piece)?,
            Item::Piece(n, incarnation, piece) => self.do_piece(n, incarnation, &piece),
            Item::Copies(n, hostd, id) => self.hostd_steps(n, hostd, id)?,
            Item::Connect(n, incarnation) => self.connect(n, incarnation),
            Item::Opened(n, incarnation) => {
                if self.hosts[n].incarnation == incarnation
                    && let Some(node) = &self.hosts[n].node
                {
                    let position = node.position();
                    if !self.hosts[n].connected {
                        // What it is about to be registered as is so no more: it registers anew.
                        self.hosts[n].connection += 1;
                    }
                    self.tell_coordinator(n, Up::Opened(position));
                }
            }
            Item::ToCoordinator(n, connection, incarnation, up) => {
                self.coordinator_hears(n, connection, incarnation, up)?;
            }
            Item::Disconnected(n, incarnation) => {
                let by = self.speaker(n, incarnation);
                self.coordinate(CoEvent::Disconnected(by));
            }
            Item::Left(n, incarnation) => {
                let by = self.speaker(n, incarnation);
                self.coordinate(CoEvent::Leave(by));
            }
            Item::Registered(n, connection, sent) => {
                if self.reaches(n, connection) {
                    self.hosts[n].connected = true;
                    self.hosts[n].confirmed_at = Some(sent);
                }
            }
            Item::Confirm(n, connection, sent) => {
                if self.reaches(n, connection) {
                    self.hosts[n].confirmed_at = Some(sent);
                }
            }
            Item::View(n, connection, view) => {
                if self.reaches(n, connection) {
                    self.view_arrived(n, &view)?;
                }
            }
            Item::CoordinatorTick => {
                self.coordinate(CoEvent::Tick);
                self.at(self.now + 50 * MS, Item::CoordinatorTick);
            }
            Item::Step(actor, stamp) => self.step_actor(actor, stamp)?,
            Item::Thread(c, t, stamp) => self.thread_goes_on(c, t, stamp)?,
            Item::Boot(c, life) => self.boot_process(c, life)?,
            Item::Given { token, incarnation, given } => self.given(token, incarnation, given)?,
            Item::Attached { actor, stamp, client, segment, incarnation } => {
                self.actor_attached(actor, (stamp, incarnation), client, segment)?;
            }
            Item::Closing { n, incarnation, by, lasts } => {
                self.close_node((n, incarnation), by, lasts)?;
            }
            Item::Drained(ended, tries) => self.look_for_drained(ended, tries)?,
            Item::Fault(fault) => self.begin_fault(fault)?,
            Item::Deed(fault, lasts) => self.begin_fault_for(fault, Some(lasts))?,
            Item::End(fault) => self.end_fault(fault)?,
            Item::Heal => self.heal()?,
        }
        Ok(())
    }
}
