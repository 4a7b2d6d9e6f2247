//! How a client attaches, and every bound that it keeps to: what it remembers, and in which pieces it works. The
//! shipped values say what raising them costs. Tests and the simulator draw small ones, so that what happens at
//! an edge happens in the first seconds.

use alloc::vec::Vec;

use base::Errno;
use storage::format::control::CLOSED_SLOTS;
use storage::format::rpc::SLOT_BODY;
use storage::format::sole::SOLE_LOCKS;
use storage::limits::{LEASE_SLOTS, RPC_SLOT_BYTES, RPC_SLOTS};

use super::verify::Verify;
use crate::fs::Result;
use crate::kept::Watch;

/// The bounds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Inodes remembered, about; each takes some 700 bytes here, and as much of the service's memory.
    pub inodes: usize,
    /// Inodes forgotten at a time, when there are too many of them: a walk over all of them each time.
    pub evict: usize,
    /// Names remembered of a directory: some 100 bytes each.
    pub names: usize,
    /// Proofs remembered: 16 bytes each, and a little.
    pub proofs: usize,
    /// Inode numbers asked for at once: each has a lease slot until it is used.
    pub numbers: u32,
    /// Leases and closes given back, or open inodes named, in one request: what fits a request slot, twice.
    pub posted: usize,
    /// Pieces of log remembered of a file before the extents are asked for again: 60 bytes each.
    pub log_pieces: usize,
    /// Bytes of one log entry of a long write: an operation shall be short, for whoever wants the lease.
    pub write_piece: usize,
    /// Bytes of one log entry of a long append, which others' appends may not cut.
    pub append_piece: usize,
    /// Bytes of a write are copied into the log, and those of a read out of it or an arena, with nothing locked. Without,
    /// threads that share a file wait for each other's copies (for measurements: `corbel bench shared-file`).
    pub aside: bool,
    /// Whether bytes of a file are asked for alone where others use others (`control`, "Ranges"). A kernel in front of this may cache what it
    /// read under a lease of all of the file only.
    pub ranges: bool,
    /// Bytes copied between two looks at the lease.
    pub read_piece: usize,
    /// Bytes asked for at once where the arena may not be mapped: less than a request slot holds.
    pub remote_read: usize,
    /// Shorter copies are sooner done through the log than waited for.
    pub copy_min: u64,
    /// Bytes of one copy by the service: all members do it in one go, and may have to copy them.
    pub copy_piece: u64,
    /// Bytes of one call to copy that may end early.
    pub copy_call: u64,
    /// Requests under way at once.
    pub requests: usize,
    /// Closed inodes that the service finds when it looks, at most (`CLOSED_SLOTS`).
    pub closed: usize,
    /// Locks that the client grants itself, at most (`SOLE_LOCKS`); with more of them the head is asked.
    pub sole_locks: usize,
    /// Names given in a directory that others use as well that are remembered.
    pub given: usize,
    /// So many leases that an operation had are taken back before it asks for all that it needs together: that is a request for each, and
    /// others wait for them.
    pub lost: u32,
    /// Attempts of an operation that keeps losing its leases to others before it gives up with EIO;
    /// each attempt waits for a grant, so this is minutes.
    pub attempts: u32,
}

/// [`Limits::posted`].
const POSTED: usize = 4000;
// The answer to `Keep` names each twice at most, with a zero between.
const _: () = assert!(8 + 8 * (2 * POSTED + 1) + SLOT_BODY as usize <= RPC_SLOT_BYTES);

impl Limits {
    /// As shipped.
    pub const SHIPPED: Self = Self {
        inodes: 24_000,
        evict: 3000,
        names: 262_144,
        proofs: 1 << 20,
        numbers: 64,
        posted: POSTED,
        log_pieces: 8192,
        write_piece: 256 << 10,
        append_piece: 1 << 20,
        aside: true,
        ranges: true,
        read_piece: 256 << 10,
        remote_read: 56 << 10,
        copy_min: 256 << 10,
        copy_piece: 32 << 20,
        copy_call: 256 << 20,
        requests: RPC_SLOTS,
        closed: CLOSED_SLOTS,
        sole_locks: SOLE_LOCKS,
        given: 1024,
        lost: 2,
        attempts: 10_000,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::SHIPPED
    }
}

/// Of so many earlier sessions a new one says what is still open; what was open in more, none of which could say it, goes.
pub const EARLIER_MAX: usize = 32;

/// The most inodes that a client can remember: there must be lease slots for more, since those of
/// evicted inodes are free a little later.
pub const INODES_MAX: usize = LEASE_SLOTS / 8 * 7;

/// How the client shall attach.
#[derive(Clone, Debug)]
pub struct Config {
    /// hostd's socket.
    pub socket: Vec<u8>,
    /// Lanes to ask for; 0 is the service's default.
    pub lanes: u32,
    /// Descriptors that the client keeps get this number or a higher one, so that they stay out
    /// of the way of the program's own.
    pub fd_min: i32,
    /// Told of these descriptors.
    pub watch: Option<Watch>,
    /// Makes room for descriptors of the client's where the program has used up all its numbers (true), and takes it
    /// back.
    pub room: Option<fn(bool)>,
    /// Mount point of the same volume, for people; not used by the client.
    pub mount: Vec<u8>,
    /// Asked by a thread that waits for the service, several times a second: whether it shall stop
    /// and fail with EINTR. What it was about to do is then not done.
    pub stop: Option<fn() -> bool>,
    /// Whether the calling thread may not begin a session, nor open descriptors that stay: the child of a vfork has this memory, and
    /// descriptors that nobody else has.
    pub barred: Option<fn() -> bool>,
    /// Wait without end for a service that is away, instead of half a minute.
    pub patient: bool,
    /// Take all the memory of the log at once: a store that finds none ends the process, which others depend on.
    pub whole_log: bool,
    /// Which reads are compared with the checksums of what is read.
    pub verify: Verify,
    /// A secret by which a process that is started in the place of this one shows that it is its heir, and this one that it is the heir of
    /// another (`FileSystem::inherit`); 0: none.
    pub heir: u128,
    /// Bounds.
    pub limits: Limits,
}

impl Config {
    /// A client of the node whose hostd listens on `socket`.
    pub fn new(socket: &[u8]) -> Self {
        Self {
            socket: socket.to_vec(),
            lanes: 0,
            fd_min: 3,
            watch: None,
            room: None,
            mount: Vec::new(),
            stop: None,
            barred: None,
            patient: false,
            whole_log: false,
            verify: Verify::Never,
            heir: 0,
            limits: Limits::SHIPPED,
        }
    }

    /// Does what takes descriptors, once more with room for them if there was none.
    pub(crate) fn with_room<T>(&self, mut what: impl FnMut() -> Result<T>) -> Result<T> {
        let done = what();
        let Some(room) = self.room.filter(|_| matches!(done, Err(Errno::MFILE))) else {
            return done;
        };
        room(true);
        let done = what();
        room(false);
        done
    }

    /// Whether the calling thread may not begin a session.
    pub(crate) fn bars(&self) -> bool {
        self.barred.is_some_and(|barred| barred())
    }

    /// Whether the calling thread shall wait no longer.
    pub(crate) fn stops(&self) -> bool {
        self.stop.is_some_and(|stop| stop())
    }
}
