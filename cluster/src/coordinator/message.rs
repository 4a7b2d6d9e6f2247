//! Messages between nodes and the coordinator, each the body of a frame ([`crate::wire`]), little-endian.
//! A string is a u16 length and that many bytes of UTF-8; a list is a u16 count and its items.
//!
//! ```text
//! kind  message     from    fields
//!    1  register    node    u16 protocol (1 to 3), u128 cluster, string volume, u32 node, u64 incarnation,
//!                           u64 stream position, u8 state (0 fresh, 1 intact), u32 epoch (0 if fresh),
//!                           string tcp ("" or address:port), string run dir, string info; from protocol 2 on
//!                           list u64 of incarnations before it, u128 volume of the region, u8 opening (1: it is not
//!                           ready yet, and is about to be); from protocol 3 on u16 level (base::level)
//!    2  welcome     coord   u32 heartbeat ms, u32 failure timeout ms
//!    3  refused     coord   string why; the connection is closed
//!    4  heartbeat   node    u64 number, u64 stream position
//!    5  confirm     coord   u64 number
//!    6  view        coord   string volume, u32 epoch, u16 replicas wanted, list chain (head first): u32 node,
//!                           u64 incarnation of the process that is the member,
//!                           list u32 syncing, list member: u32 node, u64 incarnation, u8 reachable,
//!                           u64 stream position, string tcp, string run dir, string info
//!                           u32 lapse ms; to who speaks protocol 1
//!    7  caught up   node    u32 node, u32 epoch, u64 incarnation
//!    8  suspect     node    u32 node, u32 epoch
//!    9  leave       node    -
//!   10  denied      coord   string why
//!   11  ask         anyone  u128 cluster: all views, please; by who speaks protocol 1
//!   12  force       anyone  u128 cluster, string volume: form the chain from those that are there
//!   13  done        coord   - (after the views of an ask, a force, a choice)
//!   14  survey      anyone  u128 cluster, string volume: what every node has, please
//!   15  copies      coord   u32 epoch, u8 whether the chain lives, list of copies: u32 node, u64 incarnation,
//!                           u8 flags (1 reachable, 2 in the chain, 4 may be chosen), u8 state, u32 epoch
//!                           (as in register), u64 stream position, string info
//!   16  choose      anyone  u128 cluster, string volume, u32 node, u64 incarnation, u32 epoch,
//!                           u64 stream position: go on with this copy alone, as it was shown
//!   17  view        coord   the fields of 6, u16 replicas that must hold what is acknowledged; to who speaks protocol 2
//!   20  view        coord   the fields of 17, u16 level of the volume; to who speaks protocol 3
//!   18  ask         anyone  u128 cluster, u16 protocol: all views, please
//!   19  opened      node    u64 stream position, string info: it is ready (after a registration with `opening`)
//! ```
//!
//! Versions: the coordinator is updated first. It speaks to each in the protocol in which that has introduced itself.

use std::net::SocketAddr;

use base::wire::{Corrupt, Reader, Writer};
use base::{Epoch, Level, NodeId, StreamSeq};

/// Longest body of a coordinator message.
pub const MESSAGE_MAX: usize = 256 << 10;
/// Nodes of a volume, members of a list.
pub const NODES_MAX: usize = 64;
/// Longest name of a volume.
pub const NAME_MAX: usize = 64;
/// Longest path of a run directory.
pub const PATH_MAX: usize = 256;
/// Longest free-form info.
pub const INFO_MAX: usize = 1024;
/// Longest text of a refusal.
pub const TEXT_MAX: usize = 1024;
/// What this program speaks.
pub const PROTOCOL: u16 = 3;
/// The oldest that it understands.
pub const PROTOCOL_OLDEST: u16 = 1;
/// Processes of which a region says that they had it, at most.
pub const BEFORE_MAX: usize = 8;
const ADDRESS_MAX: usize = 64;

/// What a node has of the volume's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DataState {
    /// Nothing (yet).
    #[default]
    Fresh,
    /// What it had as a member of the chain of this epoch.
    Intact {
        /// The last epoch that the node knew.
        epoch: Epoch,
    },
}

/// What a registered node has of the volume, for a person who has to choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Copy {
    /// Which node.
    pub node: NodeId,
    /// Of its service.
    pub incarnation: u64,
    /// Heartbeats come.
    pub reachable: bool,
    /// The coordinator counts it (this process or one before it) in the chain.
    pub seated: bool,
    /// It could be gone on with.
    pub may_be_chosen: bool,
    /// What it has.
    pub state: DataState,
    /// End of its stream.
    pub position: StreamSeq,
    /// What it says of itself: when its copy was written last, in nanoseconds since 1970.
    pub info: String,
}

/// All copies of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Copies {
    /// The volume's epoch.
    pub epoch: Epoch,
    /// A process of the chain lives: there is nothing to choose.
    pub lives: bool,
    /// Of every node that is registered.
    pub copies: Vec<Copy>,
}

/// A copy that a person has chosen, as it was shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Which node.
    pub node: NodeId,
    /// Its process.
    pub incarnation: u64,
    /// Epoch of its copy.
    pub epoch: Epoch,
    /// End of its stream.
    pub position: StreamSeq,
}

/// What a node says of itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registration {
    /// Which volume.
    pub volume: String,
    /// Which node.
    pub node: NodeId,
    /// Grows with each start of its service.
    pub incarnation: u64,
    /// End of its stream.
    pub position: StreamSeq,
    /// What it has.
    pub state: DataState,
    /// Where it listens for TCP.
    pub tcp: Option<SocketAddr>,
    /// Run directory of its host, for shared memory; empty if none.
    pub run_dir: String,
    /// Free-form, for `status` and the service.
    pub info: String,
    /// Processes of the node that had its region before, from the last that was a member on, the newest last. None of them
    /// lives: the region belongs to one process at a time.
    pub before: Vec<u64>,
    /// Identity of the volume in the region; 0 if it is not told.
    pub region: u128,
    /// The process has its region, and is not ready to serve yet.
    pub opening: bool,
    /// What its program understands.
    pub level: Level,
}

/// A registered node as others see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Which node.
    pub node: NodeId,
    /// Of its service.
    pub incarnation: u64,
    /// Heartbeats come.
    pub reachable: bool,
    /// End of its stream when it registered.
    pub position: StreamSeq,
    /// Where it listens for TCP.
    pub tcp: Option<SocketAddr>,
    /// Run directory of its host; empty if none.
    pub run_dir: String,
    /// Free-form.
    pub info: String,
}

/// State of a volume's membership.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct View {
    /// Which volume.
    pub volume: String,
    /// 0 until the first chain is formed.
    pub epoch: Epoch,
    /// Replicas wanted; the chain may be shorter for a while.
    pub replicas: u16,
    /// So many members must hold what is acknowledged; 0 if the coordinator is too old to say so.
    pub min_replicas: u16,
    /// What all nodes of the volume understand.
    pub level: Level,
    /// Head first.
    pub chain: Vec<NodeId>,
    /// Of each member of the chain, the process that is one. A node that has restarted still finds
    /// its number in the chain for a moment, but is no member: ask [`View::is_member`].
    pub incarnations: Vec<u64>,
    /// Nodes to be brought up to date by the head.
    pub syncing: Vec<NodeId>,
    /// All that are registered, in the order of their numbers.
    pub members: Vec<Member>,
    /// Milliseconds from now on in which clients of nodes that left the chain may still use
    /// their leases. Differs each time it is told; [`View::same`] leaves it out.
    pub lapse_ms: u32,
}

impl View {
    /// The member `node`.
    pub fn member(&self, node: NodeId) -> Option<&Member> {
        self.members.iter().find(|m| m.node == node)
    }

    /// Whether this very process of `node` is in the chain. One that is notes the epoch durably
    /// before it acknowledges or serves anything in it.
    pub fn is_member(&self, node: NodeId, incarnation: u64) -> bool {
        let mut seats = self.chain.iter().zip(&self.incarnations);
        seats.any(|(n, i)| (*n, *i) == (node, incarnation))
    }

    /// Whether two views say the same of the membership.
    pub fn same(&self, other: &Self) -> bool {
        let Self {
            volume,
            epoch,
            replicas,
            min_replicas,
            level,
            chain,
            incarnations,
            syncing,
            members,
            lapse_ms: _,
        } = self;
        (volume, epoch) == (&other.volume, &other.epoch)
            && (replicas, min_replicas, level)
                == (&other.replicas, &other.min_replicas, &other.level)
            && (chain, incarnations, syncing) == (&other.chain, &other.incarnations, &other.syncing)
            && *members == other.members
    }

    /// First of the chain.
    pub fn head(&self) -> Option<NodeId> {
        self.chain.first().copied()
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// 1
    Register {
        /// What the node speaks.
        protocol: u16,
        /// Identity of the cluster.
        cluster: u128,
        /// What the node says of itself.
        registration: Registration,
    },
    /// 2
    Welcome {
        /// Interval of heartbeats.
        heartbeat_ms: u32,
        /// Silence after which a node is evicted.
        failure_timeout_ms: u32,
    },
    /// 3
    Refused(String),
    /// 19
    Opened {
        /// End of the node's stream.
        position: StreamSeq,
        /// As in its registration.
        info: String,
    },
    /// 4
    Heartbeat {
        /// Echoed by the confirmation.
        number: u64,
        /// End of the node's stream.
        position: StreamSeq,
    },
    /// 5
    Confirm {
        /// Of the heartbeat.
        number: u64,
    },
    /// 20, 17 or 6
    View(View),
    /// 7
    CaughtUp {
        /// Who.
        node: NodeId,
        /// In which epoch.
        epoch: Epoch,
        /// Which process of it: one that was started since may have nothing.
        incarnation: u64,
    },
    /// 8
    Suspect {
        /// Who.
        node: NodeId,
        /// In which epoch.
        epoch: Epoch,
    },
    /// 9
    Leave,
    /// 10
    Denied(String),
    /// 11
    Ask {
        /// Identity of the cluster.
        cluster: u128,
        /// What the asker speaks.
        protocol: u16,
    },
    /// 12
    Force {
        /// Identity of the cluster.
        cluster: u128,
        /// Which volume.
        volume: String,
    },
    /// 13
    Done,
    /// 14
    Survey {
        /// Identity of the cluster.
        cluster: u128,
        /// Which volume.
        volume: String,
    },
    /// 15
    Copies(Copies),
    /// 16
    Choose {
        /// Identity of the cluster.
        cluster: u128,
        /// Which volume.
        volume: String,
        /// Which copy.
        choice: Choice,
    },
}

fn put_text(w: &mut Writer<'_>, text: &str, max: usize) {
    let mut cut = text.len().min(max);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    w.u16(cut as u16).bytes(&text.as_bytes()[..cut]);
}

fn take_text(r: &mut Reader<'_>, max: usize) -> Result<String, Corrupt> {
    let len = usize::from(r.u16()?);
    if len > max {
        return Err(r.corrupt("has a string that is longer than allowed"));
    }
    let bytes = r.bytes(len)?;
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(char::is_control) => Ok(text.to_owned()),
        _ => Err(r.corrupt("has a string that is not printable UTF-8")),
    }
}

/// Checks the name of a volume: 1 to 64 characters of `a-z A-Z 0-9 - _ .`
pub fn valid_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(allowed)
}

fn take_name(r: &mut Reader<'_>) -> Result<String, Corrupt> {
    let name = take_text(r, NAME_MAX)?;
    if valid_name(&name) { Ok(name) } else { Err(r.corrupt("has an invalid volume name")) }
}

fn take_node(r: &mut Reader<'_>) -> Result<NodeId, Corrupt> {
    match r.u32()? {
        0 => Err(r.corrupt("names node 0, which is no node")),
        node => Ok(NodeId(node)),
    }
}

fn put_address(w: &mut Writer<'_>, address: Option<SocketAddr>) {
    put_text(w, &address.map_or(String::new(), |a| a.to_string()), ADDRESS_MAX);
}

fn take_address(r: &mut Reader<'_>) -> Result<Option<SocketAddr>, Corrupt> {
    let text = take_text(r, ADDRESS_MAX)?;
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| r.corrupt("has an address that is no address:port"))
}

fn take_count(r: &mut Reader<'_>) -> Result<usize, Corrupt> {
    match usize::from(r.u16()?) {
        count if count > NODES_MAX => Err(r.corrupt("has a list that is longer than allowed")),
        count => Ok(count),
    }
}

fn put_nodes(w: &mut Writer<'_>, nodes: &[NodeId]) {
    w.u16(nodes.len() as u16);
    for node in nodes {
        w.u32(node.0);
    }
}

/// A list of nodes, none of them twice.
fn take_nodes(r: &mut Reader<'_>) -> Result<Vec<NodeId>, Corrupt> {
    let mut nodes = Vec::new();
    for _ in 0..take_count(r)? {
        let node = take_node(r)?;
        if nodes.contains(&node) {
            return Err(r.corrupt("has a node twice in a list"));
        }
        nodes.push(node);
    }
    Ok(nodes)
}

impl Registration {
    fn put(&self, protocol: u16, w: &mut Writer<'_>) {
        put_text(w, &self.volume, NAME_MAX);
        w.u32(self.node.0).u64(self.incarnation).u64(self.position.0);
        put_state(w, self.state);
        put_address(w, self.tcp);
        put_text(w, &self.run_dir, PATH_MAX);
        put_text(w, &self.info, INFO_MAX);
        if protocol >= 2 {
            let newest = &self.before[self.before.len().saturating_sub(BEFORE_MAX)..];
            w.u16(newest.len() as u16);
            for before in newest {
                w.u64(*before);
            }
            w.u128(self.region).u8(u8::from(self.opening));
        }
        if protocol >= 3 {
            w.u16(self.level.0);
        }
    }

    fn take(protocol: u16, r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let volume = take_name(r)?;
        let (node, incarnation) = (take_node(r)?, r.u64()?);
        let position = StreamSeq(r.u64()?);
        let state = take_state(r)?;
        let tcp = take_address(r)?;
        let (run_dir, info) = (take_text(r, PATH_MAX)?, take_text(r, INFO_MAX)?);
        let mut this = Self {
            volume,
            node,
            incarnation,
            position,
            state,
            tcp,
            run_dir,
            info,
            ..Self::default()
        };
        if protocol >= 2 {
            let count = usize::from(r.u16()?);
            if count > BEFORE_MAX {
                return Err(r.corrupt("names more processes of a region than 8"));
            }
            this.before = (0..count).map(|_| r.u64()).collect::<Result<_, _>>()?;
            (this.region, this.opening) = (r.u128()?, r.flag()?);
        }
        if protocol >= 3 {
            this.level = take_level(r)?;
        }
        Ok(this)
    }
}

fn take_level(r: &mut Reader<'_>) -> Result<Level, Corrupt> {
    match r.u16()? {
        0 => Err(r.corrupt("has level 0, which is none")),
        level => Ok(Level(level)),
    }
}

fn put_state(w: &mut Writer<'_>, state: DataState) {
    match state {
        DataState::Fresh => w.u8(0).u32(0),
        DataState::Intact { epoch } => w.u8(1).u32(epoch.0),
    };
}

fn take_state(r: &mut Reader<'_>) -> Result<DataState, Corrupt> {
    match (r.u8()?, r.u32()?) {
        (0, 0) => Ok(DataState::Fresh),
        (1, epoch) => Ok(DataState::Intact { epoch: Epoch(epoch) }),
        _ => Err(r.corrupt("has an unknown data state")),
    }
}

impl Copies {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.epoch.0).u8(u8::from(self.lives)).u16(self.copies.len() as u16);
        for copy in &self.copies {
            let flags = u8::from(copy.reachable)
                | u8::from(copy.seated) << 1
                | u8::from(copy.may_be_chosen) << 2;
            w.u32(copy.node.0).u64(copy.incarnation).u8(flags);
            put_state(w, copy.state);
            w.u64(copy.position.0);
            put_text(w, &copy.info, INFO_MAX);
        }
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let epoch = Epoch(r.u32()?);
        let lives = r.flag()?;
        let mut copies = Vec::new();
        for _ in 0..take_count(r)? {
            let (node, incarnation, flags) = (take_node(r)?, r.u64()?, r.u8()?);
            if flags > 7 {
                return Err(r.corrupt("has an unknown flag"));
            }
            let (reachable, seated) = (flags & 1 != 0, flags & 2 != 0);
            let (may_be_chosen, state) = (flags & 4 != 0, take_state(r)?);
            let (position, info) = (StreamSeq(r.u64()?), take_text(r, INFO_MAX)?);
            copies.push(Copy {
                node,
                incarnation,
                reachable,
                seated,
                may_be_chosen,
                state,
                position,
                info,
            });
        }
        Ok(Self { epoch, lives, copies })
    }
}

impl Member {
    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.node.0).u64(self.incarnation).u8(u8::from(self.reachable));
        w.u64(self.position.0);
        put_address(w, self.tcp);
        put_text(w, &self.run_dir, PATH_MAX);
        put_text(w, &self.info, INFO_MAX);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (node, incarnation) = (take_node(r)?, r.u64()?);
        let reachable = r.flag()?;
        let position = StreamSeq(r.u64()?);
        let tcp = take_address(r)?;
        let (run_dir, info) = (take_text(r, PATH_MAX)?, take_text(r, INFO_MAX)?);
        Ok(Self { node, incarnation, reachable, position, tcp, run_dir, info })
    }
}

impl View {
    fn put(&self, protocol: u16, w: &mut Writer<'_>) {
        put_text(w, &self.volume, NAME_MAX);
        w.u32(self.epoch.0).u16(self.replicas);
        w.u16(self.chain.len() as u16);
        for (node, incarnation) in self.chain.iter().zip(&self.incarnations) {
            w.u32(node.0).u64(*incarnation);
        }
        put_nodes(w, &self.syncing);
        w.u16(self.members.len() as u16);
        for member in &self.members {
            member.put(w);
        }
        w.u32(self.lapse_ms);
        if protocol >= 2 {
            w.u16(self.min_replicas);
        }
        if protocol >= 3 {
            w.u16(self.level.0);
        }
    }

    fn take(protocol: u16, r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let volume = take_name(r)?;
        let (epoch, replicas) = (Epoch(r.u32()?), r.u16()?);
        let (mut chain, mut incarnations) = (Vec::new(), Vec::new());
        for _ in 0..take_count(r)? {
            let node = take_node(r)?;
            if chain.contains(&node) {
                return Err(r.corrupt("has a node twice in the chain"));
            }
            chain.push(node);
            incarnations.push(r.u64()?);
        }
        let syncing = take_nodes(r)?;
        let mut members = Vec::new();
        for _ in 0..take_count(r)? {
            members.push(Member::take(r)?);
        }
        if chain.iter().any(|node| syncing.contains(node)) {
            return Err(r.corrupt("has a node both in the chain and syncing"));
        }
        let lapse_ms = r.u32()?;
        let min_replicas = if protocol >= 2 { r.u16()? } else { 0 };
        let level = if protocol >= 3 { take_level(r)? } else { Level::FIRST };
        Ok(Self {
            volume,
            epoch,
            replicas,
            min_replicas,
            level,
            chain,
            incarnations,
            syncing,
            members,
            lapse_ms,
        })
    }
}

impl Message {
    /// Kind and body, as this program speaks.
    pub fn encode(&self) -> (u16, Vec<u8>) {
        self.encode_for(PROTOCOL)
    }

    /// Kind and body for a side that speaks another protocol.
    pub fn encode_for(&self, protocol: u16) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let w = &mut Writer(&mut body);
        let kind = match self {
            Self::Register { protocol, cluster, registration } => {
                w.u16(*protocol).u128(*cluster);
                registration.put(*protocol, w);
                1
            }
            Self::Welcome { heartbeat_ms, failure_timeout_ms } => {
                w.u32(*heartbeat_ms).u32(*failure_timeout_ms);
                2
            }
            Self::Refused(text) => {
                put_text(w, text, TEXT_MAX);
                3
            }
            Self::Opened { position, info } => {
                w.u64(position.0);
                put_text(w, info, INFO_MAX);
                19
            }
            Self::Heartbeat { number, position } => {
                w.u64(*number).u64(position.0);
                4
            }
            Self::Confirm { number } => {
                w.u64(*number);
                5
            }
            Self::View(view) => {
                view.put(protocol, w);
                match protocol {
                    ..2 => 6,
                    2 => 17,
                    _ => 20,
                }
            }
            Self::CaughtUp { node, epoch, incarnation } => {
                w.u32(node.0).u32(epoch.0).u64(*incarnation);
                7
            }
            Self::Suspect { node, epoch } => {
                w.u32(node.0).u32(epoch.0);
                8
            }
            Self::Leave => 9,
            Self::Denied(text) => {
                put_text(w, text, TEXT_MAX);
                10
            }
            Self::Ask { cluster, protocol } => {
                w.u128(*cluster);
                if *protocol < 2 {
                    11
                } else {
                    w.u16(*protocol);
                    18
                }
            }
            Self::Force { cluster, volume } => {
                w.u128(*cluster);
                put_text(w, volume, NAME_MAX);
                12
            }
            Self::Done => 13,
            Self::Survey { cluster, volume } => {
                w.u128(*cluster);
                put_text(w, volume, NAME_MAX);
                14
            }
            Self::Copies(copies) => {
                copies.put(w);
                15
            }
            Self::Choose { cluster, volume, choice } => {
                w.u128(*cluster);
                put_text(w, volume, NAME_MAX);
                w.u32(choice.node.0).u64(choice.incarnation);
                w.u32(choice.epoch.0).u64(choice.position.0);
                16
            }
        };
        (kind, body)
    }

    /// Reads and checks a body.
    pub fn decode(kind: u16, body: &[u8]) -> Result<Self, Corrupt> {
        let r = &mut Reader::new("coordinator message", body);
        let message = match kind {
            1 => {
                let protocol = r.u16()?;
                if protocol > PROTOCOL {
                    return Err(r.corrupt("speaks a newer protocol: update the coordinator first"));
                }
                if protocol < PROTOCOL_OLDEST {
                    return Err(r.corrupt("speaks a protocol that is too old: update the node"));
                }
                let (cluster, registration) = (r.u128()?, Registration::take(protocol, r)?);
                Self::Register { protocol, cluster, registration }
            }
            2 => Self::Welcome { heartbeat_ms: r.u32()?, failure_timeout_ms: r.u32()? },
            3 => Self::Refused(take_text(r, TEXT_MAX)?),
            4 => Self::Heartbeat { number: r.u64()?, position: StreamSeq(r.u64()?) },
            5 => Self::Confirm { number: r.u64()? },
            6 => Self::View(View::take(1, r)?),
            7 => Self::CaughtUp {
                node: take_node(r)?,
                epoch: Epoch(r.u32()?),
                incarnation: r.u64()?,
            },
            8 => Self::Suspect { node: take_node(r)?, epoch: Epoch(r.u32()?) },
            9 => Self::Leave,
            10 => Self::Denied(take_text(r, TEXT_MAX)?),
            11 => Self::Ask { cluster: r.u128()?, protocol: 1 },
            12 => Self::Force { cluster: r.u128()?, volume: take_name(r)? },
            13 => Self::Done,
            14 => Self::Survey { cluster: r.u128()?, volume: take_name(r)? },
            15 => Self::Copies(Copies::take(r)?),
            16 => {
                let (cluster, volume) = (r.u128()?, take_name(r)?);
                let (node, incarnation) = (take_node(r)?, r.u64()?);
                let (epoch, position) = (Epoch(r.u32()?), StreamSeq(r.u64()?));
                let choice = Choice { node, incarnation, epoch, position };
                Self::Choose { cluster, volume, choice }
            }
            17 => Self::View(View::take(2, r)?),
            20 => Self::View(View::take(3, r)?),
            19 => Self::Opened { position: StreamSeq(r.u64()?), info: take_text(r, INFO_MAX)? },
            18 => match (r.u128()?, r.u16()?) {
                (_, 0 | 1) => return Err(r.corrupt("asks in a protocol that has other words")),
                (cluster, protocol) => Self::Ask { cluster, protocol },
            },
            _ => return Err(r.corrupt("is of an unknown kind")),
        };
        r.end()?;
        Ok(message)
    }
}
