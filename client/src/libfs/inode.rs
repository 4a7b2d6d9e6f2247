//! What the client remembers of an inode while it holds a lease on it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use base::planted::{Bug, planted};
use base::spans::Spans;
use base::{Errno, InodeId, Sequence};
use hashbrown::HashMap;
use storage::format::control::{LeaseMode, LeaseWord};
use storage::format::entry::{Stamp, blocks_of};
use storage::format::rpc::{Granted, InodeRecord};
use storage::limits::BLOCK_BYTES;

use super::host::{EVERYBODY, Host, MS};
use super::joint::Given;
use super::pieces::Pieces;
use super::ranges::{Ranges, Ticket};
use super::session::Session;
use super::sync::RwLock;
use crate::fs::{Attr, LEARNT_ELSEWHERE, Result, S_IFDIR, S_IFMT, S_IFREG, Time};

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

impl Names {
    /// What is known of `name`.
    pub fn get(&self, name: &[u8]) -> Option<Known> {
        match self.known.get(name) {
            Some(&known) => Some(known),
            None if self.complete => Some(Known::Absent),
            None => None,
        }
    }

    /// Remembers, and no more than so many.
    pub fn put(&mut self, name: &[u8], known: Known, most: usize) {
        if self.known.len() >= most {
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
    /// Not every member may have what others had done to the file when the lease was granted (`rpc::WANT_EARLY`): the last own
    /// operation on it then. Whatever was done since is behind that in the stream.
    pub early: Option<Sequence>,
    /// What this client has of a regular file that others write as well (`control`, "Ranges").
    pub own: Own,
    /// It had some the last time that it was to have bytes alone: those that it wants to read are asked for in this way, too, since who asks for
    /// all of the file to read it takes everything from everybody.
    pub shared: bool,
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
    /// Names that this client has given in a directory that others use as well.
    pub given: Given,
    /// Own operation on this inode that came last; survives the loss of the lease.
    pub last: Sequence,
    /// Own operations that may have been refused.
    pub suspects: Suspects,
    /// Extents that reflect less than this are of no use (blocks were moved by an own operation).
    pub extents_after: Sequence,
    /// Blocks that it has for certain, by promised writes.
    pub room: Room,
    /// The service keeps the inode alive for us.
    pub pinned: bool,
    /// The service recorded our right to read.
    pub may_read: bool,
    /// The service recorded our right to write (or needs none).
    pub may_write: bool,
    /// Handles open here.
    pub open: u32,
    /// One of them is for a kernel in front of this, until it has forgotten the directory.
    pub for_kernel: bool,
    /// `record.blocks` is a guess: something was written into a hole, or a file with holes was cut.
    /// Whoever wants to know asks the service.
    pub blocks_guessed: bool,
    /// The file is known to have no capabilities.
    pub no_capability: bool,
    /// Set-id bits have been ended by an own operation, which may be refused: until the service says what mode the file has,
    /// each one that changes its content ends them again.
    pub ended_setid: bool,
    /// How often operations that had returned were lost with a session. Who has it open says so at its next fsync,
    /// once ([`Open::losses`](super::Open)).
    pub losses: u32,
    /// The losses that fsync of the inode itself, which is no open file, has told.
    pub told: u32,
    /// Who changes which bytes, where that takes more than one step.
    pub ranges: Ranges,
    /// Whether what is read of it is written next.
    pub turns: Turns,
    /// See [`Attr::learnt`].
    pub learnt: u64,
}

/// The bytes that a client has of a file under a joint lease.
#[derive(Debug, Default)]
pub struct Own {
    /// Whole blocks, of which nobody else has one.
    pub bytes: Spans,
    /// Since which generation of the lease's word it has had it all the time.
    pub since: u64,
}

/// Whether a client that reads a file which another one has written writes it next, as who takes turns with others does: it
/// asks for the lease to write at once then, or each turn would ask twice. Of no weight but for that: what is held is the
/// segment's to say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    /// The last time it did.
    writes_next: bool,
    /// It has asked to write before it did, and its last operation on the inode was this one then.
    early: Option<Sequence>,
}

impl Turns {
    /// It asks for a lease that it does not have, or (`held`) has to read only; what it had better ask for. `last`: its last operation on
    /// the inode.
    pub fn asks(&mut self, mode: LeaseMode, held: bool, last: Sequence) -> LeaseMode {
        if !held && self.early.take() == Some(last) {
            // It only read, and others had to wait for that.
            self.writes_next = false;
        }
        match mode {
            LeaseMode::Write if held => self.writes_next = true,
            LeaseMode::Read if !held && self.writes_next => {
                self.early = Some(last);
                return LeaseMode::Write;
            }
            _ => {}
        }
        mode
    }
}

/// Which own operations on an inode may have been refused. The service tells how many of a client's it has refused, and
/// not which.
#[derive(Debug, Default)]
pub struct Suspects {
    /// Refusals of the session at the last look.
    seen: AtomicU64,
    /// Operations up to this one may be among those refused ...
    last: AtomicU64,
    /// ... until there were so many.
    count: AtomicU64,
}

impl Suspects {
    /// Before an operation is appended: it is none of those refused until now. `last` is the inode's last one.
    #[inline]
    pub fn look<H: Host>(&self, session: &Session<H>, last: Sequence) {
        let count = session.refusals();
        if count != self.seen.load(Ordering::Relaxed) {
            self.note(session, last, count);
        }
    }

    #[cold]
    fn note<H: Host>(&self, session: &Session<H>, last: Sequence, count: u64) {
        let (last, until) = self.as_of(session, last, count);
        self.last.store(last, Ordering::Relaxed);
        self.count.store(until, Ordering::Relaxed);
        self.seen.store(count, Ordering::Relaxed);
    }

    /// The last operation that may be among the first `count` refused, and how many were when that came to light.
    pub fn as_of<H: Host>(&self, session: &Session<H>, last: Sequence, count: u64) -> (u64, u64) {
        let seen = self.seen.load(Ordering::Relaxed);
        if count != seen && last.0 > session.judged_after(seen) {
            (last.0, count)
        } else {
            (self.last.load(Ordering::Relaxed), self.count.load(Ordering::Relaxed))
        }
    }
}

/// An inode of the client's cache.
#[derive(Debug)]
pub struct Inode<H: Host> {
    /// Its number.
    pub ino: InodeId,
    /// What is remembered; the lock also serialises the operations of this process on the inode. Nobody waits for
    /// anything but this process's own threads while he has it.
    pub state: RwLock<State, H>,
    /// Held by the thread that asks the service about the inode; taken before `state`.
    pub asking: RwLock<(), H>,
    /// Grows when somebody has left the queue for a range, in which there are others.
    ended: AtomicU32,
    /// What a kernel was told of it.
    pub told: super::kernel::Told<H>,
    /// Until when it may use names of it.
    pub shown: super::kernel::Shown<H>,
    /// Asked for since room was made last.
    pub used: AtomicBool,
    /// It is open here more than once ([`State::open`]).
    pub opened_twice: AtomicBool,
}

/// A place in the queue for a range of a file ([`Ranges`]), until it is dropped.
#[derive(Debug)]
pub struct Queued<H: Host> {
    inode: Arc<Inode<H>>,
    /// The place.
    pub ticket: Ticket,
}

impl<H: Host> Queued<H> {
    /// Queues up.
    pub fn new(inode: &Arc<Inode<H>>, range: Range<u64>) -> Self {
        let ticket = inode.state.write().ranges.enter(range);
        Self { inode: Arc::clone(inode), ticket }
    }

    /// Whether it is a place in the queue of that inode.
    pub fn is_of(&self, ino: InodeId) -> bool {
        self.inode.ino == ino
    }

    /// Waits until it is its turn: with nothing locked.
    ///
    /// # Errors
    /// INTR when the caller shall wait no longer.
    pub fn wait(&self, stops: impl Fn() -> bool) -> Result<()> {
        loop {
            let seen = self.inode.ended.load(Ordering::SeqCst);
            if self.inode.state.read().ranges.is_due(self.ticket) {
                return Ok(());
            }
            if stops() {
                return Err(Errno::INTR);
            }
            H::wait(&self.inode.ended, seen, 100 * MS);
        }
    }
}

impl<H: Host> Drop for Queued<H> {
    fn drop(&mut self) {
        if self.inode.state.write().ranges.leave(self.ticket) {
            self.inode.ended.fetch_add(1, Ordering::SeqCst);
            H::wake(&self.inode.ended, EVERYBODY);
        }
    }
}

impl<H: Host> Inode<H> {
    /// Whether several threads may want it at once: it is open more than once, or one has waited for another.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.opened_twice.load(Ordering::Relaxed) || self.state.is_contended()
    }

    /// Nothing known yet.
    pub fn new(ino: InodeId) -> Self {
        Self::with(ino, State::default())
    }

    /// What is known.
    pub fn with(ino: InodeId, state: State) -> Self {
        let (told, shown) = Default::default();
        Self {
            ino,
            state: RwLock::new(state),
            asking: RwLock::new(()),
            ended: AtomicU32::new(0),
            told,
            shown,
            used: AtomicBool::new(false),
            opened_twice: AtomicBool::new(false),
        }
    }
}

/// The inodes of a process, by number.
pub type Inodes<H> = Map<u64, Arc<Inode<H>>>;

/// Blocks `first..end` of a file, which promised writes gave it, or will when they are judged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    first: u64,
    end: u64,
    /// The last of these writes, and the lease under which all of them were done.
    last: Sequence,
    word: LeaseWord,
}

impl State {
    /// What the file certainly has of blocks that were promised; nothing if it may have been given others since.
    pub fn has_room(&self) -> Option<Room> {
        let Room { last, word, .. } = self.room;
        let same = last == self.last && word == self.lease.word && self.extents_after <= last;
        same.then_some(self.room)
    }

    /// How many of the blocks of a write have to be promised.
    #[inline]
    pub fn lacks_room(&self, at: u64, len: u64) -> u64 {
        let had = self.has_room().map_or(0, |room| {
            let end = (at + len).div_ceil(BLOCK_BYTES).min(room.end);
            end.saturating_sub((at / BLOCK_BYTES).max(room.first))
        });
        blocks_of(at, len) - had
    }

    /// The blocks of a write, which `last` is, are promised. `before`: what the file had before it.
    #[inline]
    pub fn promised(&mut self, at: u64, len: u64, before: Option<Room>) {
        let (mut first, mut end) = (at / BLOCK_BYTES, (at + len).div_ceil(BLOCK_BYTES));
        if let Some(room) = before.filter(|room| room.first <= end && first <= room.end) {
            (first, end) = (first.min(room.first), end.max(room.end));
        }
        self.room = Room { first, end, last: self.last, word: self.lease.word };
    }

    /// The operation gives the file other blocks than the extents say.
    pub fn moved(&mut self, sequence: Sequence) {
        self.pieces.forget_extents();
        self.extents_after = self.extents_after.max(sequence);
    }

    /// The mode of the lease held last (whether it still holds is the segment's to say).
    pub fn mode(&self) -> LeaseMode {
        self.lease.word.mode()
    }

    /// Whether the lease held last is one of a regular file of which others have other bytes.
    pub fn shares(&self) -> bool {
        self.mode() == LeaseMode::Joint && self.record.mode & S_IFMT == S_IFREG
    }

    /// Whether these are bytes of such a file that are this client's; what is behind its end nobody has.
    pub fn has_bytes(&self, bytes: &Range<u64>) -> bool {
        self.shares()
            && bytes.end <= self.record.size
            && (self.own.bytes.has_all(bytes) || planted(Bug::RangeReadElsewhere))
    }

    /// Whether the lease held last, and own operations that are on every member, say that others' are, too.
    pub fn vouches(&self) -> bool {
        self.mode() != LeaseMode::Joint
            && (self.early.is_none_or(|last| self.last > last) || planted(Bug::EarlyVouches))
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
        // A directory has no bytes, but programs know none of that size, if it is not gone.
        size: match r.mode & S_IFMT {
            S_IFDIR if r.nlink > 0 => r.size.max(BLOCK_BYTES),
            _ => r.size,
        },
        blocks: r.blocks,
        atime: time(r.atime),
        mtime: time(r.mtime),
        ctime: time(r.ctime),
        btime: time(r.btime),
        learnt: LEARNT_ELSEWHERE,
    }
}

fn time(s: Stamp) -> Time {
    Time { sec: s.sec, nsec: s.nsec }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LeaseMode::{Read, Write};

    #[test]
    fn who_takes_turns_asks_once_a_turn() {
        let mut turns = Turns::default();
        assert_eq!(turns.asks(Read, false, Sequence(0)), Read, "nothing is known");
        assert_eq!(turns.asks(Write, true, Sequence(0)), Write);
        for turn in 1..5 {
            assert_eq!(turns.asks(Read, false, Sequence(turn)), Write, "it wrote the last time");
        }
    }

    #[test]
    fn who_only_reads_goes_back_to_that() {
        let mut turns = Turns::default();
        turns.asks(Write, true, Sequence(3));
        assert_eq!(turns.asks(Read, false, Sequence(4)), Write);
        // What is asked for meanwhile says nothing, as long as the lease is held.
        assert_eq!(turns.asks(Read, true, Sequence(4)), Read);
        assert_eq!(turns.asks(Read, false, Sequence(4)), Read, "it has not written since");
        assert_eq!(turns.asks(Read, false, Sequence(4)), Read);
    }

    #[test]
    fn who_writes_without_reading_asks_for_that() {
        let mut turns = Turns::default();
        assert_eq!(turns.asks(Write, false, Sequence(1)), Write);
        assert_eq!(turns.asks(Read, false, Sequence(2)), Read, "what it read it has not written");
    }
}
