//! The control area at the front of a client's log segment: the only memory that a client and the
//! service share. The client maps the whole segment; nothing in it is trusted by the service.
//!
//! ```text
//! offset   written by  content
//! 0x00000  service     descriptor (below), written once before the segment is handed out
//! 0x01000  client      words: sync_request, last_sequence, promised, closed_now, heir, leaves
//! 0x01100  both        closed inodes, CLOSED_SLOTS words (below, "Closed")
//! 0x01300  client      what it has locked itself: SOLE_FILES words, SOLE_LOCKS x 32 bytes (format::sole)
//! 0x02000  client      in-operation words, OP_SLOTS x 64 bytes
//! 0x03000  service     words: settled, published, replicated, epoch/state, doorbell, ...
//! 0x03600  service     files whose locks are the client's alone, SOLE_FILES x 16 bytes (format::sole)
//! 0x04000  client      kept leases, LEASE_SLOTS bits (below, "What a kernel keeps")
//! 0x08000  service     lease table, LEASE_SLOTS x 16 bytes: {inode u64, word u64}
//! 0x208000 both        request slots, RPC_SLOTS x 64 KiB (format::rpc)
//! 0x288000 client      lanes, each `lane_bytes` long: the log itself
//!
//! descriptor
//!      0  8  magic "CORBELOG"     8  4  version 2          12  4  CRC32C of bytes 16..80
//!     16  8  client id           24  4  incarnation        28  4  lanes
//!     32  8  bytes of a lane     40  8  first sequence     48  4  node     52  4  epoch
//!     56  8  bytes of the data capacity of the volume (size of every arena mapping)
//!     64  4  1: what a kernel keeps under its leases is waited for (below); 0: it is not
//!     68 12  reserved, zero
//! ```
//!
//! # Operations and recall
//!
//! A thread of the client claims an in-operation word (in its own memory), makes it odd with a
//! sequentially consistent store, checks its lease words, does its work (copying, appending: never
//! anything that waits), makes it even again. To take a lease back the service stores a new lease
//! word, then looks at the in-operation words: those that are odd must change once before the
//! client's log is complete with respect to that lease. A client that stays inside for longer than
//! `RECALL_TIMEOUT_MS` (stopped in mid-operation) is *expelled*: `state` says so, and `sealed_at`
//! is the last sequence that counts; when it wakes it attaches anew. A thread that waits (for a
//! request, for space, for fsync) is never inside an operation.
//!
//! # What a kernel keeps
//!
//! A client that is a mount lets the kernel cache what it learnt under a lease. It sets the bit of the
//! lease's slot in `KEPT` first and looks at the lease word again then; after a store of 0 to the lease
//! word the service looks at the bit, and while it is set the lease does not count as given back (nobody
//! else is granted one). It adds one to the futex word `RECALLS` when it finds the bit set; the client then
//! empties the kernel's cache of the inode in each slot whose bit is set and whose word is 0, and clears the
//! bit. (Only of a client whose descriptor says so, which is root's: anybody could set bits, and hold others up. Others
//! keep nothing in a kernel.) One that takes longer than `RECALL_TIMEOUT_MS` is expelled. `RECALLS` also grows when leases end
//! without such a wait (the session ends, the node is fenced).
//!
//! # Time
//!
//! A lease word says nothing once the service is stopped or dead, and others have gone on without this
//! node. So leases count only until `LEASES_UNTIL`, which the service raises each time the
//! coordinator confirms that the node is in the chain (`u64::MAX`: nobody can take its place). The client
//! compares it with its clock *after* it has copied what it read, and inside an operation before it
//! appends; when the time is over it waits for the service. The client may use a clock that is up to
//! `CLOCK_LAG_MS` behind; the service allows for it.
//!
//! # Closed
//!
//! What a client has open the service keeps, also without a name. At the last close of an inode on which it holds a lease
//! the client says so in a free word of the table at `CLOSED` (0: free; else the inode's number), and looks at the lease
//! word again then: if the lease is gone, it takes the number out again and says it by a request, as it does where it holds no lease
//! or the table is full. (Where no slot is free for a request it leaves the number there, and sets `CLOSED_NOW`, at which the
//! service looks ten times a second.) Who opens the inode again takes the number out first, and then asks for it. The service
//! takes all of them out when it takes a lease back, after it stored the lease word: nobody removes an inode before its leases
//! are back. So a close costs nobody a message, and what others remove is gone at once.
//!
//! # Room
//!
//! An operation is judged after the call that appended it has returned, and a volume must not say that it took
//! more than it holds. So space is reserved before it is promised. `ROOM` is how many blocks the client may
//! have promised to its callers, in all since it attached: the head has set aside for it what it has not used of
//! them. The client adds what a write may need to `PROMISED` (`entry::blocks_of`, less the blocks that a promised write
//! under the same lease has given the file before, with no other operation in between); if that does not come out above
//! `ROOM` then (this look comes after the addition) the entry says how many, and it cannot be refused for want of space. Else
//! the client takes its addition back, appends the entry all the same (it may need less, or be over what is there),
//! and has it judged before its caller learns that it is done.
//!
//! The service raises `ROOM` as what was promised is judged, and takes back what is not used: it stores what it last saw
//! in `PROMISED`, and looks again at that.
//!
//! # Joint
//!
//! Where several clients make and remove names in one directory, each of them would have to take its write lease from the
//! others for every name. So all of them get a lease of the mode [`LeaseMode::Joint`], under which names are changed by
//! operations that count only if they fit what the others have done before: the head judges them in their order. The client waits
//! until its operation is settled before its caller learns that it is done, and does one of them at a time. If `UNTAKEN_SEQ` is its
//! sequence then, it was not taken (`UNTAKEN_ERRNO` says why), and is as if it had never been: it does not count among
//! `REFUSALS`. What is settled it believes in the time of its leases only: before that a node may have been replaced,
//! and not know it.
//!
//! # Ranges
//!
//! Where several clients write other bytes of one regular file, each of them would have to take its write lease from the others for
//! every write. So all of them get a lease of the mode [`LeaseMode::Joint`] there, too, each with bytes of its own: whole blocks, which
//! nobody else has. Inside the file's size the client reads and writes its bytes as under a write lease, and waits for nobody. All else that
//! is so of the file (its size, its times, other bytes) it does not know under such a lease; who asks for a lease to read or write all of it gets
//! that when all joint ones are back, with all bytes of each. The times of the file become those of the latest write, in whatever order
//! writes of several clients come to the head.
//!
//! The answer that grants bytes says since which generation of its word the client has had the lease all the time: what it was granted under
//! an earlier one it has no more.
//!
//! # Heir
//!
//! With a client all that it has open and locked is free. One that has a number at `HEIR` (16 bytes, a secret; 0: none) may have an
//! heir: a process of the same user that is to go on in its place, and shows the number (`Request::Inherit`). Until then, or for a
//! grace time, the client counts as one that is there and does nothing.
//!
//! If `LEAVES` is 1 the process need not have ended, and the heir may be on any node: a device whose guest moves to another machine. What
//! the client had locked then is the heir's as soon as it shows the number. (It is written behind the number, and cleared before it.)
//!
//! # Waiting
//!
//! The client waits on the 32-bit futex word `EVENT`, after announcing itself in `WAITERS`; the
//! service adds one and wakes after each change that a client can wait for. In the other direction
//! `DOORBELL` says whether the service wants a ring of the eventfd: [`BELL_AWAKE`] no,
//! [`BELL_ASLEEP`] for anything, [`BELL_DOZING`] only for requests and fsync (a timer will collect
//! appended entries). Who rings stores `BELL_AWAKE` first (compare and swap).

use alloc::vec::Vec;

use base::{ClientId, Epoch, NodeId, Sequence, crc32c};

use super::sole::{SOLE_BYTES, SOLE_FILES, SOLE_LOCKS};
use super::{Corrupt, Reader, Writer};
use crate::limits::{LANE_BYTES_MAX, LANE_BYTES_MIN, LANES_MAX, LEASE_SLOTS, LINE_BYTES};
use crate::limits::{RPC_SLOT_BYTES, RPC_SLOTS};

/// Client word: highest sequence for which durability on every member was asked (fsync).
pub const SYNC_REQUEST: u64 = 0x1000;
/// Client word: highest sequence handed out when durability was last asked for; the service takes
/// no request beyond it seriously.
pub const LAST_SEQUENCE: u64 = 0x1040;
/// Client word: see "Room".
pub const PROMISED: u64 = 0x1080;
/// Shared word: see "Closed".
pub const CLOSED_NOW: u64 = 0x10c0;
/// Client words, two: see "Heir".
pub const HEIR: u64 = 0x10d0;
/// Client word: see "Heir".
pub const LEAVES: u64 = 0x10e0;
/// Shared words: see "Closed".
pub const CLOSED: u64 = 0x1100;
/// Number of them.
pub const CLOSED_SLOTS: usize = 64;
/// Client words, one a file: see [`sole`](super::sole).
pub const SOLE_USED: u64 = 0x1300;
/// Client records of 32 bytes: see [`sole`](super::sole).
pub const SOLE_TABLE: u64 = 0x1380;
/// Client bits, one a lease slot: a kernel may cache what was learnt under the lease.
pub const KEPT: u64 = 0x4000;
/// First in-operation word; the others follow at a distance of a line.
pub const IN_OP: u64 = 0x2000;
/// Service word: entries up to here were validated (applied or refused), by the head.
pub const SETTLED: u64 = 0x3000;
/// Service word, for the service's own use: blocks that were promised to entries up to `SETTLED`; same line.
pub const ROOM_USED: u64 = 0x3008;
/// Service word: entries up to here are in this node's public tree and arenas.
pub const PUBLISHED: u64 = 0x3040;
/// Service word: entries up to here are persistent on every member of the chain.
pub const REPLICATED: u64 = 0x3080;
/// Service word: epoch that new entries carry.
pub const EPOCH: u64 = 0x30c0;
/// Service word: 0 attached, 1 expelled, 2 the service is gone; same line as the epoch.
pub const STATE: u64 = 0x30c8;
/// Service word: when expelled, the last sequence that counts; same line as the epoch.
pub const SEALED_AT: u64 = 0x30d0;
/// Service word: the leases count until this time (CLOCK_MONOTONIC, nanoseconds), see "Time"; same
/// line as the epoch.
pub const LEASES_UNTIL: u64 = 0x30d8;
/// Service word: see "Room"; same line as the epoch.
pub const ROOM: u64 = 0x30e0;
/// Shared word: see "Waiting".
pub const DOORBELL: u64 = 0x3100;
/// Service word: how many entries were refused.
pub const REFUSALS: u64 = 0x3140;
/// Service word: sequence of the entry refused last.
pub const REFUSED_SEQ: u64 = 0x3148;
/// Service word: why (an errno).
pub const REFUSED_ERRNO: u64 = 0x3150;
/// Service word: sequence of the operation under a joint lease that was refused last; see "Joint".
pub const UNTAKEN_SEQ: u64 = 0x3158;
/// Service word: why (an errno); same line.
pub const UNTAKEN_ERRNO: u64 = 0x3160;
/// Futex word (32 bits): grows with each change that a client can wait for.
pub const EVENT: u64 = 0x3180;
/// Service word: grows when a file lock that this client waits for may be free; same line as
/// `EVENT`, which grows with it.
pub const LOCK_EVENT: u64 = 0x3188;
/// Service word: names the run of the service that knows this client's file locks; with another
/// value (never 0) the client asks for what it holds again. Same line as `EVENT`.
pub const LOCK_RUN: u64 = 0x3190;
/// Client word: threads waiting on `EVENT`.
pub const WAITERS: u64 = 0x31c0;
/// Service word, a futex (32 bits): grows when kept leases have been taken back.
pub const RECALLS: u64 = 0x3200;
/// Service words, one a line and lane: logical position up to which the lane may be overwritten.
pub const RECLAIM: u64 = 0x3400;
/// Service words, two a file, an inode and a word: see [`sole`](super::sole).
pub const SOLES: u64 = 0x3600;
/// First slot of the lease table.
pub const LEASES: u64 = 0x8000;
/// First request slot.
pub const RPC: u64 = LEASES + LEASE_SLOTS as u64 * 16;
/// First lane.
pub const LANES: u64 = RPC + (RPC_SLOTS * RPC_SLOT_BYTES) as u64;

/// `STATE`: in use.
pub const STATE_ATTACHED: u64 = 0;
/// `STATE`: stopped for too long inside an operation; entries after `SEALED_AT` do not count.
pub const STATE_EXPELLED: u64 = 1;
/// `STATE`: the service ended or was fenced; attach anew.
pub const STATE_GONE: u64 = 2;

/// `DOORBELL`: the service runs; no ring needed.
pub const BELL_AWAKE: u64 = 0;
/// `DOORBELL`: ring for anything.
pub const BELL_ASLEEP: u64 = 1;
/// `DOORBELL`: ring for requests and fsync only.
pub const BELL_DOZING: u64 = 2;

/// `SEALED_AT` while an expelled client's log is being read for the last time.
pub const SEAL_PENDING: u64 = u64::MAX;

/// How far the clock by which a client judges `LEASES_UNTIL` may be behind, in milliseconds: some ticks
/// of the kernel's coarse clock.
pub const CLOCK_LAG_MS: u64 = 25;

/// How long a recall waits for an operation under way, in milliseconds. An operation takes microseconds; but
/// on a busy machine a process may get no processor for some tenths of a second, and it loses what it
/// was doing when it is expelled.
pub const RECALL_TIMEOUT_MS: u64 = 1000;

const _: () = {
    assert!(RPC == 0x20_8000);
    assert!(LANES == 0x28_8000);
    assert!(CLOSED + CLOSED_SLOTS as u64 * 8 <= SOLE_USED);
    assert!(SOLE_USED + SOLE_FILES as u64 * 8 <= SOLE_TABLE);
    assert!(SOLE_TABLE + (SOLE_LOCKS * SOLE_BYTES) as u64 <= IN_OP);
    assert!(SOLES + SOLE_FILES as u64 * 16 <= KEPT);
    assert!(KEPT + LEASE_SLOTS as u64 / 8 <= LEASES);
    assert!(RECLAIM + 64 * LANES_MAX as u64 <= SOLES);
};

/// A lease word: mode in the low byte, generation above it; 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LeaseWord(pub u64);

/// Mode of a lease. In their order each allows what those before it allow, but that names are changed under `Joint` and not
/// under `Read`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum LeaseMode {
    /// Nothing may be cached.
    None = 0,
    /// Of a directory, beside others who have the same: it stays where and what it is (mode, owner, lists, limits), while
    /// its names come and go. Nothing that changes with them may be cached. Names may be made and taken away, and
    /// whoever does waits until that is judged (see "Joint"). Of a regular file, beside others who have other bytes of it: some
    /// of its bytes may be cached and changed (see "Ranges").
    Joint = 4,
    /// State may be cached; others may too.
    Read = 1,
    /// State may be changed; nobody else caches it.
    Write = 2,
}

impl Ord for LeaseMode {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        let rank = |mode: &Self| match mode {
            Self::None => 0,
            Self::Joint => 1,
            Self::Read => 2,
            Self::Write => 3,
        };
        rank(self).cmp(&rank(other))
    }
}

impl PartialOrd for LeaseMode {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl LeaseMode {
    /// From its number.
    pub const fn from_u8(mode: u8) -> Option<Self> {
        match mode {
            0 => Some(Self::None),
            1 => Some(Self::Read),
            2 => Some(Self::Write),
            4 => Some(Self::Joint),
            _ => None,
        }
    }
}

impl LeaseWord {
    /// Composes a word.
    pub const fn new(generation: u64, mode: LeaseMode) -> Self {
        Self(generation << 8 | mode as u64)
    }

    /// The mode.
    pub const fn mode(self) -> LeaseMode {
        match self.0 & 0xff {
            1 => LeaseMode::Read,
            2 => LeaseMode::Write,
            4 => LeaseMode::Joint,
            _ => LeaseMode::None,
        }
    }

    /// The generation: differs in every grant of a slot.
    pub const fn generation(self) -> u64 {
        self.0 >> 8
    }
}

/// Offset of the word of lease slot `slot` (its inode lies 8 bytes before).
pub const fn lease_word(slot: u32) -> u64 {
    LEASES + slot as u64 * 16 + 8
}

/// Offset of the word of `KEPT` that has the bit of lease slot `slot`, and the bit.
pub const fn kept(slot: u32) -> (u64, u64) {
    (KEPT + slot as u64 / 64 * 8, 1 << (slot % 64))
}

/// Offset of in-operation word `slot`.
pub const fn in_op(slot: usize) -> u64 {
    IN_OP + slot as u64 * LINE_BYTES
}

/// Offset of the reclaim position of `lane`.
pub const fn reclaim(lane: usize) -> u64 {
    RECLAIM + lane as u64 * LINE_BYTES
}

/// The descriptor of a log segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Whose log.
    pub client: ClientId,
    /// Random per attach; seeds the checksums of its entries.
    pub incarnation: u32,
    /// Number of lanes.
    pub lanes: u32,
    /// Bytes of each lane, a multiple of 4096.
    pub lane_bytes: u64,
    /// First sequence to use.
    pub first_sequence: Sequence,
    /// The node.
    pub node: NodeId,
    /// Epoch at the time of attaching.
    pub epoch: Epoch,
    /// Bytes to map of each arena.
    pub arena_bytes: u64,
    /// What a kernel keeps under its leases is waited for: the client is a mount of the super-user's.
    pub keeps: bool,
}

const NAME: &str = "log descriptor";
/// Bytes of the descriptor.
pub const DESCRIPTOR_BYTES: usize = 80;

impl Descriptor {
    /// Bytes of the whole segment.
    pub const fn segment_bytes(&self) -> u64 {
        LANES + self.lanes as u64 * self.lane_bytes
    }

    /// Offset of the first byte of `lane`.
    pub const fn lane_offset(&self, lane: usize) -> u64 {
        LANES + lane as u64 * self.lane_bytes
    }

    /// The 80 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(DESCRIPTOR_BYTES);
        let mut w = Writer(&mut bytes);
        w.bytes(b"CORBELOG").u32(2).u32(0).u64(self.client.0).u32(self.incarnation);
        w.u32(self.lanes).u64(self.lane_bytes).u64(self.first_sequence.0).u32(self.node.0);
        w.u32(self.epoch.0).u64(self.arena_bytes).u32(u32::from(self.keeps)).u32(0).u64(0);
        let crc = crc32c(0, &bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks a descriptor.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, bytes);
        let whole = Reader::new(NAME, bytes).bytes(DESCRIPTOR_BYTES)?;
        if r.bytes(8)? != b"CORBELOG" {
            return Err(r.corrupt("does not begin with its magic"));
        }
        if r.u32()? != 2 {
            return Err(r.corrupt("has an unknown version"));
        }
        if r.u32()? != crc32c(0, &whole[16..]) {
            return Err(r.corrupt("fails its checksum"));
        }
        let this = Self {
            client: ClientId(r.u64()?),
            incarnation: r.u32()?,
            lanes: r.u32()?,
            lane_bytes: r.u64()?,
            first_sequence: Sequence(r.u64()?),
            node: NodeId(r.u32()?),
            epoch: Epoch(r.u32()?),
            arena_bytes: r.u64()?,
            keeps: match r.u32()? {
                0 => false,
                1 => true,
                _ => return Err(r.corrupt("says impossible things of what a kernel keeps")),
            },
        };
        r.zeroes(12)?;
        if this.lanes == 0 || this.lanes as usize > LANES_MAX {
            return Err(r.corrupt("has no lanes or too many"));
        }
        if this.lane_bytes < LANE_BYTES_MIN
            || this.lane_bytes > LANE_BYTES_MAX
            || !this.lane_bytes.is_multiple_of(4096)
        {
            return Err(r.corrupt("has lanes of an impossible size"));
        }
        Ok(this)
    }
}
