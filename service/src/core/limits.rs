//! Every bound of a node that decides how much it does at once, or keeps: tests and the simulator draw small ones, so that
//! what happens at an edge happens in the first seconds.

use storage::format::rpc;
use storage::format::sole::SOLE_FILES;
use storage::limits::{LEASE_SLOTS, RPC_SLOT_BYTES};

use super::offer::OFFER_BLOCKS;

/// Bytes of a reply's lists.
pub const LIST_BYTES: usize = RPC_SLOT_BYTES - 8192;

/// The bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes that are applied before they are published without waiting for the time.
    pub publish_bytes: u64,
    /// Bytes copied in one slice of work.
    pub slice_bytes: u64,
    /// What a turn may cost, in tree pages looked at (see `turn`): some milliseconds.
    pub turn: u64,
    /// Extents (or counts of owners of shared blocks) that one entry may change: more are changed in several entries.
    pub pieces: u64,
    /// Copies of fewer bytes are not given to hostd.
    pub host_min: u64,
    /// Bytes given to hostd at a time: it must answer while others wait for it.
    pub host_bytes: u64,
    /// Bytes of free blocks that are given back to the medium at a time.
    pub discard_min: u64,
    /// Bytes given back in one slice of work.
    pub discard_max: u64,
    /// What is no longer than this is done by the thread that decides: to hand it to another and hear of its end takes as long.
    /// `usize::MAX`: it does everything.
    pub inline_bytes: usize,
    /// Chunks of different clients that follow within so long (nanoseconds) are beside each other ([`Limits::inline`]).
    pub crowd: u64,
    /// Bytes of chunks that one piece of work puts into the ring, or of what is published that it copies.
    pub piece_bytes: usize,
    /// Pieces that put chunks there at a time. One puts them there whole; of several the thread that decides puts the headers.
    pub keepers: usize,
    /// Bytes of chunks that may be on their way there, before the thread that decides waits for them.
    pub behind_bytes: usize,
    /// Chunks given up at a time: each time costs a persisted record.
    pub release_step: u64,
    /// Bytes of chunks that are kept in memory until they are applied; those beyond are read back from the ring.
    pub recent_bytes: usize,
    /// How often who comes back asks for the rest of the stream, before it asks for a snapshot: a head of an older version
    /// does not answer.
    pub returns: u32,
    /// Blocks of a file that are offered at a time to a node that joins and may have them (`core::offer`); 0: all is sent.
    pub offer_blocks: u64,
    /// Whether a node that comes back may be brought to the head's state in place (`core::reconcile`).
    pub in_place: bool,
    /// Publications of which it is known when they were (`core::history`); 0: nothing is told by that.
    pub history: usize,
    /// Chunks kept that came before others.
    pub stash: usize,
    /// Chunks sent again at a time. The same on all nodes: who asks counts on so many, and asks for those behind them when they have come.
    pub resend: u64,
    /// Bytes fetched of a log at a time by the head.
    pub fetch_bytes: usize,
    /// Bytes fetched of a log at a time while other clients wait for an fsync.
    pub shared_bytes: usize,
    /// Bytes that may be under way then before more of a log is fetched.
    pub shared_window: u64,
    /// Bytes fetched of a log at a time by an agent, for the head.
    pub forward_bytes: usize,
    /// What nobody waits for is fetched this much later, in nanoseconds: what undoes itself meanwhile need not travel.
    pub hold: u64,
    /// Whether it is fetched before that only if somebody asks for an fsync, for what its client holds, or for room in its log.
    pub on_demand: bool,
    /// A directory for whose lease clients waited so often within `joint_within` is used jointly (see `joint`).
    pub joint_after: u32,
    /// In nanoseconds.
    pub joint_within: u64,
    /// For so long after the last time that another client asked for it, in nanoseconds.
    pub joint_for: u64,
    /// Of how many spans of bytes what a client has jointly of one file may consist, before it gets all of it or nothing (see `ranges`); 0: no
    /// file is used jointly.
    pub ranges: usize,
    /// The same of all files and clients of a head.
    pub ranges_all: usize,
    /// Files of whose locks a client may have the sole use at a time, at most `SOLE_FILES`; 0: the head judges all locks.
    pub soles: usize,
    /// What came back so often within `sole_within` is not asked for again for `sole_pause` (see `sole`).
    pub sole_after: u32,
    /// In nanoseconds.
    pub sole_within: u64,
    /// In nanoseconds.
    pub sole_pause: u64,
    /// What was refused is not asked for again before, in nanoseconds.
    pub sole_again: u64,
    /// Whether what a chunk undoes itself is taken out of it.
    pub coalesce: bool,
    /// Questions kept while a head is not ready; those beyond are asked again when it is.
    pub unready: usize,
    /// Messages kept of views that are not here yet; who says more is heard again over a new link when the view is here.
    pub early: usize,
    /// Leases that one client can hold, at most `LEASE_SLOTS`.
    pub lease_slots: usize,
    /// Inode numbers handed out at once.
    pub numbers: u32,
    /// Inodes freed in one chunk, beside a client's operations.
    pub reaps: usize,
    /// Locks in one report to a head.
    pub report: usize,
    /// Bytes of names or of an attribute in one reply.
    pub xattr_bytes: usize,
    /// Extents in one reply.
    pub extents: usize,
    /// Accounts in one reply.
    pub accounts: usize,
    /// Names looked at for one reply.
    pub names: usize,
    /// A scrub begins so long after the one before it has ended, in nanoseconds; 0: only when one is asked for.
    pub scrub_every: u64,
    /// Bytes that one in the background reads in a second.
    pub scrub_rate: u64,
    /// Bytes of a snapshot that are sent to a node that joins in a second, and 64 times as many compared; 0: as it goes.
    pub join_rate: u64,
}

impl Limits {
    /// What is no longer than this is done by the thread that decides: a quarter of `inline_bytes` `beside` others, where that has
    /// other work.
    pub const fn inline(&self, beside: bool) -> usize {
        if beside { self.inline_bytes / 4 } else { self.inline_bytes }
    }

    /// As shipped.
    pub const SHIPPED: Self = Self {
        publish_bytes: 2 << 20,
        slice_bytes: 256 * 1024,
        turn: 20_000,
        pieces: 2048,
        host_min: 128 * 1024,
        host_bytes: 16 << 20,
        discard_min: 256 * 1024,
        discard_max: 2 << 20,
        inline_bytes: 128 * 1024,
        crowd: 1_000_000,
        piece_bytes: 4 << 20,
        keepers: 4,
        behind_bytes: 16 << 20,
        release_step: 32,
        recent_bytes: 8 << 20,
        returns: 4,
        offer_blocks: OFFER_BLOCKS,
        in_place: true,
        history: 1024,
        stash: 256,
        resend: 64,
        fetch_bytes: 1 << 20,
        shared_bytes: 128 * 1024,
        shared_window: 512 * 1024,
        forward_bytes: 256 * 1024,
        hold: 2_000_000,
        on_demand: false,
        joint_after: 4,
        joint_within: 100_000_000,
        joint_for: 1_000_000_000,
        ranges: 8192,
        ranges_all: 1 << 20,
        soles: SOLE_FILES,
        sole_after: 2,
        sole_within: 1_000_000_000,
        sole_pause: 1_000_000_000,
        sole_again: 100_000_000,
        coalesce: true,
        unready: 4096,
        early: 4096,
        lease_slots: LEASE_SLOTS,
        numbers: 256,
        reaps: 256,
        report: 2048,
        xattr_bytes: 60 << 10,
        extents: LIST_BYTES / rpc::EXTENT_BYTES,
        accounts: LIST_BYTES / rpc::ACCOUNT_BYTES,
        names: 4096,
        scrub_every: 0,
        scrub_rate: 64 << 20,
        join_rate: 0,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::SHIPPED
    }
}
