//! What the client remembers of an inode while it holds a lease on it.

use alloc::vec::Vec;
use core::sync::atomic::AtomicBool;

use base::{InodeId, Sequence};
use hashbrown::HashMap;
use storage::format::control::LeaseMode;
use storage::format::entry::Stamp;
use storage::format::rpc::{Granted, InodeRecord};
use storage::limits::BLOCK_BYTES;

use super::pieces::Pieces;
use super::sync::RwLock;
use crate::fs::{Attr, S_IFDIR, S_IFMT, Time};

/// Hash of names and numbers: FNV-1a; no secret is needed because each map belongs to one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hash;

/// State of [`Hash`].
#[derive(Clone, Copy, Debug)]
pub struct Fnv(u64);

impl core::hash::BuildHasher for Hash {
    type Hasher = Fnv;
    fn build_hasher(&self) -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl core::hash::Hasher for Fnv {
    fn finish(&self) -> u64 {
        // The table takes its tag from the top bits: spread them.
        self.0 ^ (self.0 << 29)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(27);
    }
}

/// A map with that hash.
pub type Map<K, V> = HashMap<K, V, Hash>;

/// What a name leads to, as far as known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// An inode and its type bits.
    Present(InodeId, u32),
    /// Nothing.
    Absent,
}

/// Names of a directory, as far as known under the lease held.
#[derive(Debug, Default)]
pub struct Names {
    /// What was looked up or made.
    pub known: Map<Vec<u8>, Known>,
    /// Every name that exists is in `known` (directories made by this client).
    pub complete: bool,
}

/// Names remembered per directory, at most: some 25 MB.
const NAMES_MAX: usize = 262_144;

impl Names {
    /// What is known of `name`.
    pub fn get(&self, name: &[u8]) -> Option<Known> {
        match self.known.get(name) {
            Some(&known) => Some(known),
            None if self.complete => Some(Known::Absent),
            None => None,
        }
    }

    /// Remembers.
    pub fn put(&mut self, name: &[u8], known: Known) {
        if self.known.len() >= NAMES_MAX {
            self.known.clear();
            self.complete = false;
        }
        if self.complete && known == Known::Absent {
            self.known.remove(name);
        } else {
            self.known.insert(name.into(), known);
        }
    }
}

/// Cached state, valid while `lease` holds.
#[derive(Debug, Default)]
pub struct State {
    /// The lease under which all of the rest was learnt.
    pub lease: Granted,
    /// Session (attachment) that the lease belongs to.
    pub session: u64,
    /// Attributes, own operations included.
    pub record: InodeRecord,
    /// Bytes of a regular file.
    pub pieces: Pieces,
    /// Target of a symbolic link.
    pub target: Vec<u8>,
    /// Names of a directory.
    pub names: Names,
    /// Own operation on this inode that came last; survives the loss of the lease.
    pub last: Sequence,
    /// Extents that reflect less than this are of no use (blocks were moved by an own operation).
    pub extents_after: Sequence,
    /// The service keeps the inode alive for us.
    pub pinned: bool,
    /// The service recorded our right to write (or needs none).
    pub may_write: bool,
    /// Handles open here.
    pub open: u32,
    /// `record.blocks` is a guess: something was written into a hole, or a file with holes was cut.
    /// Whoever wants to know asks the service.
    pub blocks_guessed: bool,
    /// The file is known to have no capabilities.
    pub no_capability: bool,
    /// Acknowledged operations were lost with an expelled session; the next fsync says so.
    pub lost: bool,
    /// See [`Attr::learnt`].
    pub learnt: u64,
}

/// An inode of the client's cache.
#[derive(Debug)]
pub struct Inode {
    /// Its number.
    pub ino: InodeId,
    /// What is remembered; the lock also serialises the operations of this process on the inode.
    pub state: RwLock<State>,
    /// What a kernel was told of it.
    pub told: super::kernel::Told,
    /// Until when it may use names of it.
    pub shown: super::kernel::Shown,
    /// Asked for since room was made last.
    pub used: AtomicBool,
}

impl Inode {
    /// Nothing known yet.
    pub fn new(ino: InodeId) -> Self {
        Self::with(ino, State::default())
    }

    /// What is known.
    pub fn with(ino: InodeId, state: State) -> Self {
        let (told, shown) = Default::default();
        Self { ino, state: RwLock::new(state), told, shown, used: AtomicBool::new(false) }
    }
}

impl State {
    /// The operation gives the file other blocks than the extents say.
    pub fn moved(&mut self, sequence: Sequence) {
        self.pieces.forget_extents();
        self.extents_after = self.extents_after.max(sequence);
    }

    /// The mode of the lease held last (whether it still holds is the segment's to say).
    pub fn mode(&self) -> LeaseMode {
        self.lease.word.mode()
    }

    /// Attributes as front ends see them.
    pub fn attr(&self) -> Attr {
        Attr { learnt: self.learnt, ..attr(&self.record) }
    }
}

/// Attributes as front ends see them.
pub fn attr(r: &InodeRecord) -> Attr {
    Attr {
        ino: r.ino,
        mode: r.mode,
        nlink: r.nlink,
        uid: r.uid,
        gid: r.gid,
        rdev: r.rdev,
        // A directory has no bytes, but programs know none of that size.
        size: if r.mode & S_IFMT == S_IFDIR { r.size.max(BLOCK_BYTES) } else { r.size },
        blocks: r.blocks,
        atime: time(r.atime),
        mtime: time(r.mtime),
        ctime: time(r.ctime),
        btime: time(r.btime),
        learnt: 0,
    }
}

fn time(s: Stamp) -> Time {
    Time { sec: s.sec, nsec: s.nsec }
}
