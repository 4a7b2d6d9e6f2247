//! The faults that the design claims to survive; the only list of them.

use base::Nanos;
use base::random::Random;

/// Something goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// nicfs of the node dies and is started again later; its region stays as it was.
    Crash(usize),
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
        match random.below(12) {
            0 => Self::Crash(node),
            1 => Self::PowerCut(node),
            2 => Self::RegionLost(node),
            3..=5 if nodes > 1 => Self::LinkDown(node, other),
            6 => Self::CutOff(node),
            7 => Self::Reconnect(node),
            8 => Self::Slow(node),
            9 => Self::Coordinator,
            10 => Self::Kill(client),
            _ => Self::Stop(client),
        }
    }

    /// How long it lasts.
    pub fn lasts(self, random: &mut Random) -> Nanos {
        let ms = 1_000_000;
        match self {
            Self::LinkDown(..) if random.chance(1, 2) => random.below(5 * ms),
            Self::LinkDown(..) | Self::CutOff(_) => random.below(1500 * ms),
            Self::Crash(_) | Self::PowerCut(_) | Self::RegionLost(_) => random.below(1200 * ms),
            Self::Slow(_) => random.below(1000 * ms),
            Self::Stop(_) => 20 * ms + random.below(250 * ms),
            Self::Reconnect(_) => random.below(60 * ms),
            Self::Coordinator | Self::Kill(_) => 10 * ms + random.below(300 * ms),
        }
    }

    /// Its kind, for counting.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Crash(_) => "crash",
            Self::PowerCut(_) => "power-cut",
            Self::RegionLost(_) => "region-lost",
            Self::LinkDown(..) => "link-down",
            Self::CutOff(_) => "cut-off",
            Self::Reconnect(_) => "reconnect",
            Self::Slow(_) => "slow",
            Self::Coordinator => "coordinator",
            Self::Kill(_) => "kill",
            Self::Stop(_) => "stop",
        }
    }
}
