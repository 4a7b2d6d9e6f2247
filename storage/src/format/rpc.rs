//! What a client asks of its node service through the request slots of its control area, and what
//! a process asks of hostd over its socket.
//!
//! ```text
//! request slot (64 KiB)
//!      0  4  state     futex: 0 free, 1 request, 2 reply, 3 taken by the service
//!      4  4  length    bytes of the body
//!      8 56  zero
//!     64     body
//!
//! request body: kind u8, 7 zero bytes, after u64 (the client's operations up to this sequence must
//!               be reflected in the answer), proof u64 (format::proof, of the inode that the request
//!               begins with), then by kind
//! reply body:   errno u16 (0 is success), 6 zero bytes, then by kind:
//!   Inode, Lookup,
//!   Range           InodeReply
//!   Names           end u8 (1: no more names follow), names (put_name) up to the end of the body
//!   Extents         reflected u64, complete u8, count u32, extents (from the one that holds the
//!                   offset asked, or the next)
//!   XattrGet        the value; E2BIG if it is longer than a reply
//!   XattrList       the names, each ended by NUL; E2BIG if they are longer
//!   XattrPart       bytes of the value (of the names, if no name is given) from an offset on: as many as fit
//!   Inodes          count u32, then each: inode u64, slot u32, word u64, proof u64. The client holds a write
//!                   lease on each, and each counts as pinned by it until Unpin, Unlink or Rename
//!                   without the OPEN flag, or the client's end
//!   StatFs          block bytes u32, blocks u64, free u64, inodes u64, inodes free u64
//!   Read            the bytes (fewer at the end of the file)
//!   Unpin, Release  nothing
//!   Keep            inodes u64 up to the end of the body: those that are pinned for the client now; then, if there are any, 0 and those
//!                   of them of which something is lost that other clients of its node had done. After such an answer the earlier
//!                   sessions stay until the client has said `last` once more
//!   Lock            nothing; the errno is AGAIN while another owner's lock bars it, DEADLK if to
//!                   wait would be for ever, NOLCK above the bounds (limits)
//!   LockTest        found u8, then, if 1, a lock that bars the one asked for (format::lock)
//!   LockCancel      nothing
//!   Inherit         nothing
//!   Accounts        accounts (Account) up to the end of the body; none: there are no more
//!   Snapshots       snapshots (SnapshotRecord) up to the end of the body; none: there are no more
//!   Differences     uuid of the volume, more u8, key to go on from (inode u64, kind u8, item u64), differences (Difference) up to the end of the body
//! ```
//!
//! An inode of a snapshot (`InodeId::of_snapshot`) is asked for by `Inode`, `Lookup` (with the lease mode `None` and no flags but
//! WANT_READ), `Names`, `XattrGet`, `XattrList`, `XattrPart` and `Read`: it never changes, so no lease is had of it, and no extents are shown.
//! Everybody has been shown the directory of a snapshot.
//!
//! A client that asks for what it holds already gets a new word for the same slot; the answer then
//! reflects all its operations up to `after` and, for extents, has them published.
//!
//! hostd speaks fixed 64-byte messages over a `SOCK_SEQPACKET` Unix socket; descriptors travel
//! beside them (SCM_RIGHTS):
//!
//! ```text
//! request  0 4 magic "CBHR"   4 4 version 7   8 4 kind (1 attach, 2 arena)  12 4 zero  16 8 argument
//! reply    0 4 magic "CBHA"   4 4 version 1   8 2 errno  10 6 zero  16 8 value  24 40 text (UTF-8)
//!   The version of a request is that of everything that a program and its node say to each other: control
//!   area, log entries, requests, replies. Programs and services of different builds do not mix.
//!   attach: argument = lanes wanted (0: the default); descriptors: log segment, doorbell eventfd
//!   arena:  argument = arena number; descriptor: the arena, read-only; value = its size
//! ```

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{ClientId, Errno, InodeId, Sequence};

use super::entry::Stamp;
use super::lock::Lock;
use super::page::Key;
use super::proof::Proof;
use super::{Corrupt, Reader, Writer};
use crate::acl::Acl;
use crate::format::control::{LeaseMode, LeaseWord};

/// Slot state: free.
pub const SLOT_FREE: u32 = 0;
/// Slot state: a request waits.
pub const SLOT_REQUEST: u32 = 1;
/// Slot state: the reply is there.
pub const SLOT_REPLY: u32 = 2;
/// Slot state: the service works on it.
pub const SLOT_TAKEN: u32 = 3;
/// Slot state: the service that had taken it started anew; to be posted again.
pub const SLOT_AGAIN: u32 = 4;
/// Offset of the body in a slot.
pub const SLOT_BODY: u64 = 64;

/// Flag of `Inode` and `Lookup`: keep the inode alive while unlinked, until `Unpin`.
pub const WANT_PIN: u8 = 1;
/// Flag: check read permission (open for reading).
pub const WANT_READ: u8 = 2;
/// Flag: check write permission and remember the right to write (open for writing).
pub const WANT_WRITE: u8 = 4;
/// Flag: of a directory a lease of the mode [`LeaseMode::Joint`] will do, if others use its names as well.
pub const WANT_JOINT: u8 = 8;
/// Flag of `Inode`: its leases on inodes with lower numbers the client needs together with this one. They are not taken back while it
/// waits for this one, if that is not for long. Who asks for several in the order of their numbers, each with this flag, gets them all:
/// of two who do so one has the higher number and waits for nobody who waits for him.
pub const WANT_TOGETHER: u8 = 16;
/// Flag of `Inode` and `Lookup`: a lease on a regular file will do of which not every member has yet what others did to it, if this client's
/// node has, and is lost only with the client's session. Who asks so vouches for nothing by the lease: before an fsync returns that has
/// nothing of the client's own to wait for, done under it, it asks with [`WANT_REACH`].
pub const WANT_EARLY: u8 = 32;
/// Flag of `Inode`: no lease is wanted; the answer comes when every member has what others had done to the inode, as far as the head
/// knows of it. For a directory that several clients use jointly: nobody's lease says that there.
pub const WANT_REACH: u8 = 128;

/// A request.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Request<'a> {
    /// Attributes (and extents, target) of an inode, with a lease.
    Inode {
        ino: InodeId,
        mode: LeaseMode,
        flags: u8,
    },
    /// The same with a write lease. If others use other bytes of the regular file, a lease of the mode [`LeaseMode::Joint`] will do, for the
    /// bytes `from..to` (see [`control`](super::control), "Ranges"): it is the head's to give. If the client has one already, under which
    /// it has other bytes, the answer may leave the extents out.
    Range {
        ino: InodeId,
        flags: u8,
        from: u64,
        to: u64,
    },
    /// The same for a name; the name's absence is the errno NOENT.
    Lookup {
        dir: InodeId,
        name: &'a [u8],
        mode: LeaseMode,
        flags: u8,
    },
    /// Names after a cookie.
    Names {
        dir: InodeId,
        cookie: u64,
    },
    /// Extents from an offset on.
    Extents {
        ino: InodeId,
        from: u64,
    },
    XattrGet {
        ino: InodeId,
        name: &'a [u8],
    },
    XattrList {
        ino: InodeId,
    },
    /// Part of a value, or (with an empty name) of the list of names, that no reply can hold.
    XattrPart {
        ino: InodeId,
        name: &'a [u8],
        from: u32,
    },
    /// Fresh inode numbers, each with a write lease.
    Inodes {
        count: u32,
    },
    /// The client has these open no longer.
    Unpin {
        inodes: Vec<InodeId>,
    },
    /// In a new session: of what the process had open in these earlier ones it still has these open. With
    /// `last` there are no more: all else that was pinned for them is free.
    Keep {
        before: Vec<ClientId>,
        inodes: Vec<InodeId>,
        last: bool,
    },
    StatFs,
    /// The client gives these lease slots back.
    Release {
        slots: Vec<u32>,
    },
    /// Bytes of a file whose arena the client may not map although it may read the file.
    Read {
        ino: InodeId,
        offset: u64,
        len: u32,
    },
    /// Locks or unlocks (kind `None`) part of a file that the client has open. When the answer is
    /// AGAIN and `wait` is not 0, the client waits under that number of its own: `LOCK_EVENT` grows
    /// when it should ask again. It also asks again on its own within `LOCK_POLL_MS`, which tells
    /// that it still waits.
    Lock {
        ino: InodeId,
        wait: u64,
        lock: Lock,
    },
    /// Which lock would bar this one?
    LockTest {
        ino: InodeId,
        lock: Lock,
    },
    /// What was locked by clients of this user that have ended and had this number at `control::HEIR` is this client's now.
    Inherit {
        heir: u128,
    },
    /// Accounts after one, or from the first: the super-user's all, of others their own and those of
    /// directories.
    Accounts {
        after: Option<AccountId>,
    },
    /// Snapshots with a higher number, from the oldest on.
    Snapshots {
        after: u64,
    },
    /// What the snapshot `number` has otherwise than the earlier one `before` (0: than an empty volume), from a key of the tree on.
    /// For the super-user.
    Differences {
        before: u64,
        number: u64,
        from: Key,
    },
    /// The client no longer waits. Under [`LOCK_LEAVING`] it never does: a descriptor of the file was closed through which
    /// somebody has locked it; if it was the last one, its locks are about to be given up, and for a moment nobody is told
    /// that they bar him.
    LockCancel {
        ino: InodeId,
        wait: u64,
    },
}

/// Whose use is counted. Users come before directories.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AccountId {
    /// What a user owns.
    User(u32),
    /// What was made or put under a directory.
    Directory(InodeId),
}

/// Space and number of inodes; as limits, 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amount {
    /// Blocks of 4 KiB.
    pub blocks: u64,
    /// Inodes.
    pub inodes: u64,
}

/// An account: 1 byte (1 user, 2 directory), user or inode, limits in blocks and inodes, use in both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Account {
    /// Whose.
    pub id: AccountId,
    /// How much it may take.
    pub limit: Amount,
    /// How much it takes.
    pub used: Amount,
}

/// Bytes of an account as it travels.
pub const ACCOUNT_BYTES: usize = 41;

impl AccountId {
    /// Kind and number.
    pub const fn parts(self) -> (u8, u64) {
        match self {
            Self::User(uid) => (1, uid as u64),
            Self::Directory(ino) => (2, ino.0),
        }
    }

    /// From kind and number.
    pub fn from_parts(kind: u8, number: u64) -> Option<Self> {
        match kind {
            1 => u32::try_from(number).ok().map(Self::User),
            2 if number != 0 => Some(Self::Directory(InodeId(number))),
            _ => None,
        }
    }
}

impl Account {
    /// Appends the account.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (kind, number) = self.id.parts();
        let mut w = Writer(out);
        w.u8(kind).u64(number);
        for amount in [self.limit, self.used] {
            w.u64(amount.blocks).u64(amount.inodes);
        }
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (kind, number) = (r.u8()?, r.u64()?);
        let id = AccountId::from_parts(kind, number);
        let id = id.ok_or(Corrupt::new(REPLY, "has an account of nobody"))?;
        let mut amount =
            || -> Result<_, Corrupt> { Ok(Amount { blocks: r.u64()?, inodes: r.u64()? }) };
        Ok(Self { id, limit: amount()?, used: amount()? })
    }
}

/// A snapshot: number u64, slot u16, directory u64, time u64, inodes u64, own blocks u64, proof u64, name length u8, name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotRecord {
    /// Numbers grow, and are not given again.
    pub number: u64,
    /// What its inodes are told by ([`InodeId::in_snapshot`]).
    pub slot: u16,
    /// The directory that it shows, as a number of the volume.
    pub dir: InodeId,
    /// When it was made, in realtime nanoseconds.
    pub time: u64,
    /// Inodes of the volume then.
    pub inodes: u64,
    /// Blocks that are free once it alone is removed.
    pub own_blocks: u64,
    /// Proof of the directory in it.
    pub proof: Proof,
    /// Name.
    pub name: Vec<u8>,
}

impl SnapshotRecord {
    /// Appends the record.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.u64(self.number).u16(self.slot).u64(self.dir.0).u64(self.time).u64(self.inodes);
        w.u64(self.own_blocks).u64(self.proof.0).u8(self.name.len() as u8).bytes(&self.name);
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (number, slot, dir) = (r.u64()?, r.u16()?, InodeId(r.u64()?));
        let (time, inodes, own_blocks) = (r.u64()?, r.u64()?, r.u64()?);
        let (proof, len) = (Proof(r.u64()?), r.u8()?);
        let name = r.bytes(len.into())?.to_vec();
        Ok(Self { number, slot, dir, time, inodes, own_blocks, proof, name })
    }
}

fn put_key(w: &mut Writer<'_>, key: Key) {
    w.u64(key.ino).u8(key.kind).u64(key.item);
}

fn take_key(r: &mut Reader<'_>) -> Result<Key, Corrupt> {
    Ok(Key::new(r.u64()?, r.u8()?, r.u64()?))
}

/// What a snapshot has otherwise than another: 1 byte that tells them apart, and the fields in their order; of names the length
/// as u8 before them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Difference {
    /// Attributes of an inode, extended ones as well; or it is gone.
    Touched {
        /// The inode.
        ino: InodeId,
    },
    /// Content of a file, as bytes; there may be less of it by now.
    Content {
        /// The file.
        ino: InodeId,
        /// Where it begins.
        offset: u64,
        /// How much it is.
        len: u64,
    },
    /// A directory has this name.
    Named {
        /// The directory.
        dir: InodeId,
        /// What the name leads to.
        ino: InodeId,
        /// Type bits of its mode.
        kind: u32,
        /// The name.
        name: Vec<u8>,
    },
    /// A directory had this name, or it led to something else.
    Unnamed {
        /// The directory.
        dir: InodeId,
        /// What the name led to.
        ino: InodeId,
        /// The name.
        name: Vec<u8>,
    },
}

impl Difference {
    /// The inode under which it is told of.
    pub const fn of(&self) -> InodeId {
        match *self {
            Self::Touched { ino } | Self::Content { ino, .. } => ino,
            Self::Named { dir, .. } | Self::Unnamed { dir, .. } => dir,
        }
    }

    /// Appends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match self {
            Self::Touched { ino } => {
                w.u8(1).u64(ino.0);
            }
            Self::Content { ino, offset, len } => {
                w.u8(2).u64(ino.0).u64(*offset).u64(*len);
            }
            Self::Named { dir, ino, kind, name } => {
                w.u8(3).u64(dir.0).u64(ino.0).u32(*kind).u8(name.len() as u8).bytes(name);
            }
            Self::Unnamed { dir, ino, name } => {
                w.u8(4).u64(dir.0).u64(ino.0).u8(name.len() as u8).bytes(name);
            }
        }
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (what, of) = (r.u8()?, InodeId(r.u64()?));
        Ok(match what {
            1 => Self::Touched { ino: of },
            2 => Self::Content { ino: of, offset: r.u64()?, len: r.u64()? },
            3 | 4 => {
                let ino = InodeId(r.u64()?);
                let kind = if what == 3 { r.u32()? } else { 0 };
                let len = r.u8()?;
                let name = r.bytes(len.into())?.to_vec();
                match what {
                    3 => Self::Named { dir: of, ino, kind, name },
                    _ => Self::Unnamed { dir: of, ino, name },
                }
            }
            _ => return Err(Corrupt::new(REPLY, "has a difference of an unknown kind")),
        })
    }
}

/// The body of a reply with differences, after its status.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Differences {
    /// The volume's uuid.
    pub volume: [u8; 16],
    /// Where to go on, if that was not all.
    pub next: Option<Key>,
    /// In the order of inodes.
    pub all: Vec<Difference>,
}

impl Differences {
    /// Appends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.bytes(&self.volume).u8(self.next.is_some().into());
        put_key(&mut w, self.next.unwrap_or(Key::MIN));
        self.all.iter().for_each(|one| one.encode(out));
    }

    /// Reads it.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let mut volume = [0; 16];
        volume.copy_from_slice(r.bytes(16)?);
        let (more, key) = (r.flag()?, take_key(r)?);
        if !more && key != Key::MIN {
            return Err(r.corrupt("goes on and does not"));
        }
        let mut all = Vec::new();
        while r.left() > 0 {
            all.push(Difference::decode(r)?);
        }
        Ok(Self { volume, next: more.then_some(key), all })
    }
}

/// The number of no waiter (see [`Request::LockCancel`]).
pub const LOCK_LEAVING: u64 = 0;

/// How often a client that waits for a lock asks again at least, in milliseconds.
pub const LOCK_POLL_MS: u64 = 1000;

const REQUEST: &str = "client request";
const REPLY: &str = "service reply";

impl<'a> Request<'a> {
    /// The inode that the request names by number, and must have been shown. Not needed for locks, and to
    /// give something back: that is about what the client holds.
    pub fn names(&self) -> Option<InodeId> {
        match *self {
            Request::Inode { ino, .. }
            | Request::Range { ino, .. }
            | Request::Lookup { dir: ino, .. }
            | Request::Names { dir: ino, .. }
            | Request::Extents { ino, .. }
            | Request::XattrGet { ino, .. }
            | Request::XattrList { ino }
            | Request::XattrPart { ino, .. }
            | Request::Read { ino, .. } => Some(ino),
            Request::Lock { .. }
            | Request::LockTest { .. }
            | Request::LockCancel { .. }
            | Request::Unpin { .. }
            | Request::Keep { .. }
            | Request::Release { .. }
            | Request::Inodes { .. }
            | Request::Accounts { .. }
            | Request::Snapshots { .. }
            | Request::Differences { .. }
            | Request::Inherit { .. }
            | Request::StatFs => None,
        }
    }

    /// Appends the body, without a proof.
    pub fn encode(&self, after: Sequence, out: &mut Vec<u8>) {
        self.encode_shown(after, Proof::NONE, out);
    }

    /// Appends the body.
    pub fn encode_shown(&self, after: Sequence, proof: Proof, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        let kind: u8 = match self {
            Request::Inode { .. } => 1,
            Request::Lookup { .. } => 2,
            Request::Names { .. } => 3,
            Request::Extents { .. } => 4,
            Request::XattrGet { .. } => 5,
            Request::XattrList { .. } => 6,
            Request::Inodes { .. } => 7,
            Request::Unpin { .. } => 8,
            Request::StatFs => 9,
            Request::Release { .. } => 10,
            Request::Read { .. } => 11,
            Request::Lock { .. } => 12,
            Request::LockTest { .. } => 13,
            Request::LockCancel { .. } => 14,
            Request::Accounts { .. } => 15,
            Request::XattrPart { .. } => 16,
            Request::Keep { .. } => 17,
            Request::Inherit { .. } => 18,
            Request::Snapshots { .. } => 19,
            Request::Differences { .. } => 20,
            Request::Range { .. } => 21,
        };
        w.u8(kind).bytes(&[0; 7]).u64(after.0).u64(proof.0);
        match self {
            Request::Inode { ino, mode, flags } => {
                w.u64(ino.0).u8(*mode as u8).u8(*flags);
            }
            Request::Range { ino, flags, from, to } => {
                w.u64(ino.0).u8(*flags).u64(*from).u64(*to);
            }
            Request::Lookup { dir, name, mode, flags } => {
                w.u64(dir.0).u8(*mode as u8).u8(*flags).bytes(name);
            }
            Request::Names { dir, cookie } => {
                w.u64(dir.0).u64(*cookie);
            }
            Request::Extents { ino, from } => {
                w.u64(ino.0).u64(*from);
            }
            Request::XattrGet { ino, name } => {
                w.u64(ino.0).bytes(name);
            }
            Request::XattrList { ino } => {
                w.u64(ino.0);
            }
            Request::XattrPart { ino, name, from } => {
                w.u64(ino.0).u32(*from).bytes(name);
            }
            Request::Inodes { count } => {
                w.u32(*count);
            }
            Request::Unpin { inodes } => inodes.iter().for_each(|i| {
                w.u64(i.0);
            }),
            Request::Keep { before, inodes, last } => {
                w.u8(u8::from(*last)).u32(before.len() as u32);
                before.iter().map(|c| c.0).chain(inodes.iter().map(|i| i.0)).for_each(|number| {
                    w.u64(number);
                });
            }
            Request::StatFs => {}
            Request::Inherit { heir } => {
                w.u128(*heir);
            }
            Request::Release { slots } => slots.iter().for_each(|s| {
                w.u32(*s);
            }),
            Request::Read { ino, offset, len } => {
                w.u64(ino.0).u64(*offset).u32(*len);
            }
            Request::Lock { ino, wait, lock } => {
                w.u64(ino.0).u64(*wait);
                lock.encode(&mut w);
            }
            Request::LockTest { ino, lock } => {
                w.u64(ino.0);
                lock.encode(&mut w);
            }
            Request::LockCancel { ino, wait } => {
                w.u64(ino.0).u64(*wait);
            }
            Request::Accounts { after } => {
                let (kind, number) = after.map_or((0, 0), AccountId::parts);
                w.u8(kind).u64(number);
            }
            Request::Snapshots { after } => {
                w.u64(*after);
            }
            Request::Differences { before, number, from } => {
                w.u64(*before).u64(*number);
                put_key(&mut w, *from);
            }
        }
    }

    /// Reads and checks a body.
    pub fn decode(bytes: &'a [u8]) -> Result<(Sequence, Proof, Self), Corrupt> {
        let mut r = Reader::new(REQUEST, bytes);
        let kind = r.u8()?;
        r.zeroes(7)?;
        let (after, proof) = (Sequence(r.u64()?), Proof(r.u64()?));
        // (A joint one is the head's to give, in place of another.)
        let mode = |r: &mut Reader<'_>| {
            LeaseMode::from_u8(r.u8()?)
                .filter(|mode| *mode != LeaseMode::Joint)
                .ok_or(Corrupt::new(REQUEST, "asks for an unknown lease mode"))
        };
        let request = match kind {
            1 => Request::Inode { ino: InodeId(r.u64()?), mode: mode(&mut r)?, flags: r.u8()? },
            2 => Request::Lookup {
                dir: InodeId(r.u64()?),
                mode: mode(&mut r)?,
                flags: r.u8()?,
                name: r.rest(),
            },
            3 => Request::Names { dir: InodeId(r.u64()?), cookie: r.u64()? },
            4 => Request::Extents { ino: InodeId(r.u64()?), from: r.u64()? },
            5 => Request::XattrGet { ino: InodeId(r.u64()?), name: r.rest() },
            6 => Request::XattrList { ino: InodeId(r.u64()?) },
            7 => Request::Inodes { count: r.u32()? },
            8 => {
                let mut inodes = Vec::new();
                while r.left() > 0 {
                    inodes.push(InodeId(r.u64()?));
                }
                Request::Unpin { inodes }
            }
            17 => {
                let (last, n) = (r.flag()?, r.u32()? as usize);
                if n > r.left() / 8 {
                    return Err(r.corrupt("claims more sessions than it holds"));
                }
                let before = (0..n).map(|_| r.u64().map(ClientId)).collect::<Result<_, _>>()?;
                let mut inodes = Vec::new();
                while r.left() > 0 {
                    inodes.push(InodeId(r.u64()?));
                }
                Request::Keep { before, inodes, last }
            }
            18 => Request::Inherit { heir: r.u128()? },
            19 => Request::Snapshots { after: r.u64()? },
            20 => {
                Request::Differences { before: r.u64()?, number: r.u64()?, from: take_key(&mut r)? }
            }
            9 => Request::StatFs,
            10 => {
                let mut slots = Vec::new();
                while r.left() > 0 {
                    slots.push(r.u32()?);
                }
                Request::Release { slots }
            }
            11 => Request::Read { ino: InodeId(r.u64()?), offset: r.u64()?, len: r.u32()? },
            12 => Request::Lock {
                ino: InodeId(r.u64()?),
                wait: r.u64()?,
                lock: Lock::decode(&mut r)?,
            },
            13 => Request::LockTest { ino: InodeId(r.u64()?), lock: Lock::decode(&mut r)? },
            14 => Request::LockCancel { ino: InodeId(r.u64()?), wait: r.u64()? },
            15 => {
                let (kind, number) = (r.u8()?, r.u64()?);
                let after = AccountId::from_parts(kind, number);
                if after.is_none() && (kind, number) != (0, 0) {
                    return Err(r.corrupt("asks for the account of nobody"));
                }
                Request::Accounts { after }
            }
            16 => Request::XattrPart { ino: InodeId(r.u64()?), from: r.u32()?, name: r.rest() },
            21 => {
                let (ino, flags, from, to) = (InodeId(r.u64()?), r.u8()?, r.u64()?, r.u64()?);
                if from >= to {
                    return Err(r.corrupt("asks for no bytes"));
                }
                Request::Range { ino, flags, from, to }
            }
            _ => return Err(r.corrupt("is of an unknown kind")),
        };
        r.end()?;
        Ok((after, proof, request))
    }
}

/// A lease as granted: where its word lies, and what it must say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Granted {
    /// Slot of the lease table.
    pub slot: u32,
    /// The word; the lease holds while the slot's word equals it. 0: no lease was granted.
    pub word: LeaseWord,
}

/// Attributes as they travel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct InodeRecord {
    pub ino: InodeId,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub size: u64,
    /// Allocated space in units of 512 bytes.
    pub blocks: u64,
    pub atime: Stamp,
    pub mtime: Stamp,
    pub ctime: Stamp,
    pub btime: Stamp,
    /// Of a directory: its parent. Else 0.
    pub parent: InodeId,
    /// Of a directory: number of entries without `.` and `..`. Else 0.
    pub entries: u64,
    /// Whether there are extended attributes.
    pub xattrs: bool,
    /// It has no name, and may be given one.
    pub linkable: bool,
    /// Who may use it, when that is more than the mode says.
    pub acl: Option<Arc<Acl>>,
    /// Of a directory: what is made in it inherits this list.
    pub default_acl: Option<Arc<Acl>>,
    /// The directory whose quota counts it; none: 0.
    pub project: InodeId,
    /// A quota may bar what is made here.
    pub limited: bool,
}

/// A run of a file's bytes in an arena. Bytes in no extent are zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Extent {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Arena.
    pub arena: u32,
    /// Allocated but never written: reads as zeroes.
    pub unwritten: bool,
    /// Others share the blocks: who writes there is given blocks of its own.
    pub shared: bool,
    /// Offset in the arena, in bytes.
    pub arena_offset: u64,
}

/// The bytes `from..to` of a file that a client has under a lease of the mode [`LeaseMode::Joint`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// The first.
    pub from: u64,
    /// Behind the last.
    pub to: u64,
}

impl Span {
    /// No bytes in particular.
    pub const NONE: Self = Self { from: 0, to: 0 };

    /// As a range.
    pub const fn range(self) -> core::ops::Range<u64> {
        self.from..self.to
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.from >= self.to
    }
}

/// Answer to `Inode`, `Range` and `Lookup`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InodeReply {
    /// The lease.
    pub granted: Granted,
    /// The client's operations up to here are reflected (and published, as far as extents go).
    pub reflected: Sequence,
    /// Attributes.
    pub record: InodeRecord,
    /// Extents, as many as fit.
    pub extents: Vec<Extent>,
    /// Whether `extents` is the whole list.
    pub complete: bool,
    /// Target of a symbolic link.
    pub target: Vec<u8>,
    /// Proof of the inode.
    pub proof: Proof,
    /// Proof of the parent of a directory that the client may search.
    pub parent_proof: Proof,
    /// If the lease is a joint one of a regular file: the bytes that it has from now on, beside those that it has got since ...
    pub span: Span,
    /// ... the grant that made a word of this generation, since which it has had the lease all the time.
    pub since: u64,
}

/// Appends an `Extents` reply.
pub fn put_extents(out: &mut Vec<u8>, reflected: Sequence, complete: bool, extents: &[Extent]) {
    reply_ok(out);
    Writer(out).u64(reflected.0).u8(u8::from(complete)).u32(extents.len() as u32);
    for e in extents {
        e.encode(out);
    }
}

/// Reads what follows the status of an `Extents` reply.
pub fn take_extents(r: &mut Reader<'_>) -> Result<(Sequence, bool, Vec<Extent>), Corrupt> {
    let (reflected, complete, count) = (Sequence(r.u64()?), r.flag()?, r.u32()? as usize);
    if count > r.left() / EXTENT_BYTES {
        return Err(r.corrupt("claims more extents than it holds"));
    }
    let extents = (0..count).map(|_| Extent::decode(r)).collect::<Result<_, _>>()?;
    Ok((reflected, complete, extents))
}

/// Appends a `LockTest` reply.
pub fn put_lock_test(out: &mut Vec<u8>, found: Option<&Lock>) {
    reply_ok(out);
    let mut w = Writer(out);
    w.u8(u8::from(found.is_some()));
    if let Some(lock) = found {
        lock.encode(&mut w);
    }
}

/// Reads what follows the status of a `LockTest` reply.
pub fn take_lock_test(r: &mut Reader<'_>) -> Result<Option<Lock>, Corrupt> {
    if r.flag()? { Lock::decode(r).map(Some) } else { Ok(None) }
}

/// One name of a `Names` answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Name<'a> {
    /// Inode.
    pub ino: InodeId,
    /// Type bits of its mode.
    pub kind: u32,
    /// Cookie after it.
    pub next: u64,
    /// Proof of the inode, if the client may search the directory.
    pub proof: Proof,
    /// The name.
    pub name: &'a [u8],
}

/// Begins a reply: success.
pub fn reply_ok(out: &mut Vec<u8>) {
    Writer(out).u16(0).bytes(&[0; 6]);
}

/// What follows in the reply to `Keep`: what is pinned, and of which of it others have lost something.
pub fn put_kept(kept: &[InodeId], lost: &[InodeId], out: &mut Vec<u8>) {
    let end = if lost.is_empty() { &[][..] } else { &[InodeId::NONE] };
    let mut w = Writer(out);
    for ino in kept.iter().chain(end).chain(lost) {
        w.u64(ino.0);
    }
}

/// The same, read.
///
/// # Errors
/// Half a number.
pub fn take_kept(mut r: Reader<'_>) -> Result<(Vec<InodeId>, Vec<InodeId>), Corrupt> {
    let (mut kept, mut lost, mut ended) = (Vec::new(), Vec::new(), false);
    while r.left() > 0 {
        match InodeId(r.u64()?) {
            InodeId::NONE => ended = true,
            ino if ended => lost.push(ino),
            ino => kept.push(ino),
        }
    }
    Ok((kept, lost))
}

/// A reply that is an error.
pub fn reply_error(errno: Errno, out: &mut Vec<u8>) {
    out.clear();
    Writer(out).u16(errno.0).bytes(&[0; 6]);
}

/// Splits a reply into its errno and the rest.
pub fn reply_status(bytes: &[u8]) -> Result<(Result<(), Errno>, Reader<'_>), Corrupt> {
    let mut r = Reader::new(REPLY, bytes);
    let errno = r.u16()?;
    r.zeroes(6)?;
    Ok((if errno == 0 { Ok(()) } else { Err(Errno(errno)) }, r))
}

fn put_stamp(w: &mut Writer<'_>, s: Stamp) {
    w.i64(s.sec).u32(s.nsec);
}

fn take_stamp(r: &mut Reader<'_>) -> Result<Stamp, Corrupt> {
    Ok(Stamp { sec: r.i64()?, nsec: r.u32()? })
}

impl InodeRecord {
    /// Appends the fields in the order of the structure; then flags u8: 1 extended
    /// attributes, 2 may be given a name, 4 access list, 8 default list,
    /// 16 a quota may bar what is made here; then each list that is there:
    /// length u16, value.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.u64(self.ino.0).u32(self.mode).u32(self.nlink).u32(self.uid).u32(self.gid);
        w.u32(self.rdev).u64(self.size).u64(self.blocks);
        for s in [self.atime, self.mtime, self.ctime, self.btime] {
            put_stamp(&mut w, s);
        }
        let lists = [&self.acl, &self.default_acl];
        let flags = u8::from(self.xattrs)
            | u8::from(self.linkable) << 1
            | u8::from(lists[0].is_some()) << 2
            | u8::from(lists[1].is_some()) << 3
            | u8::from(self.limited) << 4;
        w.u64(self.parent.0).u64(self.entries).u64(self.project.0).u8(flags);
        for list in lists.into_iter().flatten() {
            let value = list.encode();
            w.u16(value.len() as u16).bytes(&value);
        }
    }

    /// Reads the fields.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let mut record = Self {
            ino: InodeId(r.u64()?),
            mode: r.u32()?,
            nlink: r.u32()?,
            uid: r.u32()?,
            gid: r.u32()?,
            rdev: r.u32()?,
            size: r.u64()?,
            blocks: r.u64()?,
            atime: take_stamp(r)?,
            mtime: take_stamp(r)?,
            ctime: take_stamp(r)?,
            btime: take_stamp(r)?,
            parent: InodeId(r.u64()?),
            entries: r.u64()?,
            project: InodeId(r.u64()?),
            ..Self::default()
        };
        let flags = r.u8()?;
        if flags & !31 != 0 {
            return Err(r.corrupt("has unknown flags"));
        }
        record.limited = flags & 16 != 0;
        (record.xattrs, record.linkable) = (flags & 1 != 0, flags & 2 != 0);
        let mut list = |there: bool| -> Result<_, Corrupt> {
            if !there {
                return Ok(None);
            }
            let len = r.u16()?;
            let value = r.bytes(len.into())?;
            let list = Acl::decode(value)?.filter(|list| list.encode() == value);
            let list = list.ok_or(Corrupt::new(REPLY, "has a list that nobody writes so"))?;
            Ok(Some(Arc::new(list)))
        };
        (record.acl, record.default_acl) = (list(flags & 4 != 0)?, list(flags & 8 != 0)?);
        Ok(record)
    }
}

/// Bytes of an extent as it travels.
pub const EXTENT_BYTES: usize = 32;

impl Extent {
    /// Appends the extent: offset, length, arena, flags (1: unwritten, 2: shared), offset in the arena.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = u32::from(self.unwritten) | u32::from(self.shared) << 1;
        let mut w = Writer(out);
        w.u64(self.offset).u64(self.len).u32(self.arena).u32(flags).u64(self.arena_offset);
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (offset, len, arena, flags) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?);
        if flags > 3 {
            return Err(r.corrupt("has an extent with unknown flags"));
        }
        let (unwritten, shared) = (flags & 1 != 0, flags & 2 != 0);
        Ok(Self { offset, len, arena, unwritten, shared, arena_offset: r.u64()? })
    }
}

impl InodeReply {
    /// Appends a success reply: slot, word, reflected, proof, proof of the parent, span (from, to), since, record, flags (1:
    /// complete), number of extents, length of the target, extents, target.
    pub fn encode(&self, out: &mut Vec<u8>) {
        reply_ok(out);
        Writer(out).u32(self.granted.slot).u64(self.granted.word.0).u64(self.reflected.0);
        Writer(out).u64(self.proof.0).u64(self.parent_proof.0);
        Writer(out).u64(self.span.from).u64(self.span.to).u64(self.since);
        self.record.encode(out);
        let mut w = Writer(out);
        w.u8(u8::from(self.complete)).u32(self.extents.len() as u32).u16(self.target.len() as u16);
        for e in &self.extents {
            e.encode(out);
        }
        out.extend_from_slice(&self.target);
    }

    /// Reads what follows the status.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let granted = Granted { slot: r.u32()?, word: LeaseWord(r.u64()?) };
        let reflected = Sequence(r.u64()?);
        let (proof, parent_proof) = (Proof(r.u64()?), Proof(r.u64()?));
        let (span, since) = (Span { from: r.u64()?, to: r.u64()? }, r.u64()?);
        let record = InodeRecord::decode(r)?;
        let (complete, count, target) = (r.flag()?, r.u32()? as usize, r.u16()?);
        if count > r.left() / EXTENT_BYTES {
            return Err(r.corrupt("claims more extents than it holds"));
        }
        let extents = (0..count).map(|_| Extent::decode(r)).collect::<Result<_, _>>()?;
        let target = r.bytes(target.into())?.to_vec();
        Ok(Self {
            granted,
            reflected,
            record,
            extents,
            complete,
            target,
            proof,
            parent_proof,
            span,
            since,
        })
    }
}

/// Appends one name of a `Names` reply (success, `end` u8, then names): inode u64, kind u32, next
/// u64, proof u64, length u8, bytes.
pub fn put_name(out: &mut Vec<u8>, name: &Name<'_>) {
    let mut w = Writer(out);
    w.u64(name.ino.0).u32(name.kind).u64(name.next).u64(name.proof.0);
    w.u8(name.name.len() as u8).bytes(name.name);
}

/// Reads one name.
pub fn take_name<'a>(r: &mut Reader<'a>) -> Result<Name<'a>, Corrupt> {
    let (ino, kind, next) = (InodeId(r.u64()?), r.u32()?, r.u64()?);
    let (proof, len) = (Proof(r.u64()?), r.u8()?);
    Ok(Name { ino, kind, next, proof, name: r.bytes(len.into())? })
}

/// Bytes of a hostd message.
pub const HOST_MESSAGE_BYTES: usize = 64;
/// hostd request: attach a client.
pub const HOST_ATTACH: u32 = 1;
/// hostd request: map an arena.
pub const HOST_ARENA: u32 = 2;
/// hostd request: whether the region has the log of a client still (1) or not (0). The argument is the client's id.
pub const HOST_KNOWS: u32 = 3;

/// Version of all that programs and their node share.
pub const CLIENT_VERSION: u32 = 7;

/// A request to hostd.
pub fn host_request(kind: u32, argument: u64) -> [u8; HOST_MESSAGE_BYTES] {
    let mut m = [0u8; HOST_MESSAGE_BYTES];
    m[0..4].copy_from_slice(b"CBHR");
    m[4..8].copy_from_slice(&CLIENT_VERSION.to_le_bytes());
    m[8..12].copy_from_slice(&kind.to_le_bytes());
    m[16..24].copy_from_slice(&argument.to_le_bytes());
    m
}

/// Whether these bytes begin a request to hostd by a program of another version.
pub fn is_foreign_host_request(bytes: &[u8]) -> bool {
    let version = bytes.strip_prefix(b"CBHR").and_then(|rest| rest.first_chunk());
    version.is_some_and(|version| u32::from_le_bytes(*version) != CLIENT_VERSION)
}

/// Reads a request to hostd: kind and argument.
pub fn host_request_decode(bytes: &[u8]) -> Result<(u32, u64), Corrupt> {
    let mut r = Reader::new("hostd request", bytes);
    if bytes.len() != HOST_MESSAGE_BYTES || r.bytes(4)? != b"CBHR" {
        return Err(r.corrupt("does not begin with its magic"));
    }
    if r.u32()? != CLIENT_VERSION {
        return Err(r.corrupt("is of a program that was built with another version"));
    }
    let kind = r.u32()?;
    r.zeroes(4)?;
    let argument = r.u64()?;
    r.zeroes(r.left())?;
    Ok((kind, argument))
}

/// A reply of hostd; `text` explains an error (cut to 40 bytes).
pub fn host_reply(status: Result<u64, (Errno, &str)>) -> [u8; HOST_MESSAGE_BYTES] {
    let mut m = [0u8; HOST_MESSAGE_BYTES];
    m[0..4].copy_from_slice(b"CBHA");
    m[4] = 1;
    match status {
        Ok(value) => m[16..24].copy_from_slice(&value.to_le_bytes()),
        Err((errno, text)) => {
            m[8..10].copy_from_slice(&errno.0.to_le_bytes());
            let len = text.len().min(40);
            m[24..24 + len].copy_from_slice(&text.as_bytes()[..len]);
        }
    }
    m
}

/// Reads a reply of hostd.
pub fn host_reply_decode(bytes: &[u8]) -> Result<Result<u64, Errno>, Corrupt> {
    let mut r = Reader::new("hostd reply", bytes);
    if bytes.len() != HOST_MESSAGE_BYTES || r.bytes(4)? != b"CBHA" {
        return Err(r.corrupt("does not begin with its magic"));
    }
    if r.u32()? != 1 {
        return Err(r.corrupt("has an unknown version"));
    }
    let errno = r.u16()?;
    r.zeroes(6)?;
    let value = r.u64()?;
    Ok(if errno == 0 { Ok(value) } else { Err(Errno(errno)) })
}
