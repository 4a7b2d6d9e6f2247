//! The faults that the design claims to survive; the only list of them.
//!
//! Beside these, without a beginning and an end: the clocks of the nodes differ by up to one percent in rate
//! (docs/assumptions.md, A17) and by anything in value; hostd fails at copies (`world/nodes.rs`); volumes run
//! full; a client tries what it may not (`actor::Kind`). Frames are not duplicated: between nodes they travel
//! in streams (TCP, rings in shared memory), which cannot.

use base::Nanos;
use base::random::Random;

/// Something goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// nicfs of the node dies and is started again later; its region stays as it was, and its clients live.
    Crash(usize),
    /// nicfs of the node is asked to end, which it does in order, and is started again later. Its clients live, and
    /// lose nothing.
    Planned(usize),
    /// nicfs of every node dies, and each is started again at some time; all clients live.
    CrashAll,
    /// nicfs of the node is stopped, without noticing, and goes on later: nothing is closed, what is sent
    /// to it waits. Its clients go on.
    Hang(usize),
    /// Power cut: the same, and what was not fenced is torn.
    PowerCut(usize),
    /// The node loses its region and joins anew (only if another member has everything).
    RegionLost(usize),
    /// The link between two nodes breaks; what was in flight is lost.
    LinkDown(usize, usize),
    /// The node cannot reach the coordinator; no connection is closed.
    CutOff(usize),
    /// The node's connection to the coordinator breaks and comes back.
    Reconnect(usize),
    /// Everything at the node takes its time.
    Slow(usize),
    /// The coordinator dies and is started again from what it had persisted.
    Coordinator,
    /// What one node sends another does not arrive, in one direction only; the connection stands. In
    /// the end it arrives after all, in order (that is what TCP does), or the connection breaks.
    OneWay(usize, usize),
    /// The node hears of nobody, neither coordinator nor other nodes, and nobody of it; no connection is closed. In the end what
    /// was sent arrives after all, or the connections break. Its clients go on. (Drawn by [`Flavour::Parted`] alone.)
    ///
    /// [`Flavour::Parted`]: crate::Flavour::Parted
    Partition(usize),
    /// Chunks arrive at a node with a bit that has changed, as it would get past the transport.
    Damage(usize),
    /// nicfs of the node dies, and a bit of a page of its tree rots until it returns. It is noticed:
    /// the node does not start on it, its region is emptied, it joins anew (only if another member
    /// has everything). (What rots in file content, checksums and pages of a node that
    /// serves is found and mended: `world/decay.rs`, at the end of each history.)
    BitRot(usize),
    /// hostd of the node dies, with the copies under way, and returns.
    Hostd(usize),
    /// The node is lost for good, with its region; its clients are no more. Others must go on without
    /// it. (Only by a script.)
    Gone(usize),
    /// A client is killed, wherever it is.
    Kill(usize),
    /// A client is stopped for a while at its next operation, inside it.
    Stop(usize),
}

impl Fault {
    /// A fault among `nodes` and `clients`.
    pub fn draw(random: &mut Random, nodes: usize, clients: usize) -> Self {
        let node = random.below(nodes as u64) as usize;
        let other = (node + 1 + random.below(nodes.max(2) as u64 - 1) as usize) % nodes;
        let client = random.below(clients as u64) as usize;
        match random.below(22) {
            0 => Self::Crash(node),
            1 => Self::PowerCut(node),
            2 => Self::RegionLost(node),
            3..=5 if nodes > 1 => Self::LinkDown(node, other),
            6 => Self::CutOff(node),
            7 => Self::Reconnect(node),
            8 => Self::Slow(node),
            9 => Self::Coordinator,
            10 => Self::Kill(client),
            11 if nodes > 1 => Self::OneWay(node, other),
            12 => Self::Damage(node),
            13 => Self::BitRot(node),
            14 => Self::Hostd(node),
            15 | 16 => Self::Hang(node),
            17 => Self::CrashAll,
            18 => Self::Crash(node),
            19 | 20 => Self::Planned(node),
            _ => Self::Stop(client),
        }
    }

    /// How long it lasts.
    pub fn lasts(self, random: &mut Random) -> Nanos {
        let ms = 1_000_000;
        match self {
            Self::LinkDown(..) if random.chance(1, 2) => random.below(5 * ms),
            Self::LinkDown(..) | Self::CutOff(_) | Self::OneWay(..) | Self::Partition(_) => {
                random.below(1500 * ms)
            }
            Self::CrashAll if random.chance(1, 2) => random.below(20 * ms),
            Self::Hang(_) => random.below(1500 * ms),
            // Its supervisor starts it again at once.
            Self::Crash(_) if random.chance(1, 2) => random.below(60 * ms),
            Self::Crash(_)
            | Self::Planned(_)
            | Self::CrashAll
            | Self::PowerCut(_)
            | Self::RegionLost(_)
            | Self::BitRot(_) => random.below(1200 * ms),
            Self::Slow(_) | Self::Damage(_) | Self::Hostd(_) => random.below(1000 * ms),
            Self::Stop(_) => 20 * ms + random.below(1800 * ms),
            Self::Reconnect(_) => random.below(60 * ms),
            Self::Coordinator | Self::Kill(_) | Self::Gone(_) => 10 * ms + random.below(300 * ms),
        }
    }

    /// Its kind, for counting.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Crash(_) => "crash",
            Self::Planned(_) => "planned",
            Self::CrashAll => "crash-all",
            Self::Hang(_) => "hang",
            Self::PowerCut(_) => "power-cut",
            Self::RegionLost(_) => "region-lost",
            Self::LinkDown(..) => "link-down",
            Self::CutOff(_) => "cut-off",
            Self::Reconnect(_) => "reconnect",
            Self::Slow(_) => "slow",
            Self::Coordinator => "coordinator",
            Self::OneWay(..) => "one-way",
            Self::Partition(_) => "partition",
            Self::Damage(_) => "damage",
            Self::BitRot(_) => "bit-rot",
            Self::Hostd(_) => "hostd",
            Self::Gone(_) => "gone",
            Self::Kill(_) => "kill",
            Self::Stop(_) => "stop",
        }
    }
}
