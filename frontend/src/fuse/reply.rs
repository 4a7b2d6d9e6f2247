//! Where replies go, and what they are made of.

use std::io::IoSliceMut;
use std::time::Duration;

use client::fs::{Attr, Time};
use zerocopy::{Immutable, IntoBytes};

use super::wire::{AttrOut, EntryOut, FuseAttr, OutHeader, StatxOut, SxTime};

/// How long the kernel may keep what the file system promised to invalidate.
pub const CACHE_SECONDS: u64 = 3600;
/// I/O size that programs are advised to use.
const ADVISED_IO_BYTES: u32 = 4096;

/// The way back of one request: the device, or a virtio descriptor chain. A transport offers room
/// for payload so that file data is read to where it is sent from.
pub trait ReplySink {
    /// Room for `len` bytes, with any content; less if the transport has less.
    fn payload(&mut self, len: usize) -> &mut [u8];
    /// The place of the payload itself, for `len` bytes or less, if the transport has it in pieces that file
    /// data may be read into, and that count as the room then. Nothing is read from there: others may
    /// write to it (a guest).
    fn pieces(&mut self, _len: usize) -> Option<Vec<IoSliceMut<'_>>> {
        None
    }
    /// The way back for a reply that comes after this call, from any thread; none if the transport
    /// has no such way.
    fn later(&mut self) -> Option<Box<dyn LaterReply>> {
        None
    }
    /// The same for what has begun and goes on after this call, with so many bytes of data: the transport waits for its end before it
    /// takes the queue away. `None` where somebody is rather to wait for it now; with `for_others`, where no others wait.
    fn hold(&mut self, _bytes: usize, _for_others: bool) -> Option<Box<dyn LaterReply>> {
        None
    }
    /// Sends `head`, then the first `payload_len` bytes of the room. Called at most once a
    /// request; not at all for the few that have no reply. False when the request was answered for
    /// us: then nobody has got what the reply gives.
    fn send(&mut self, head: &[u8], payload_len: usize) -> bool;
}

/// The way back of a request that was put off.
pub trait LaterReply: Send {
    /// Sends the whole reply.
    fn send(self: Box<Self>, reply: &[u8]);
    /// The same of a reply in two parts.
    fn send_with(self: Box<Self>, head: &[u8], payload: &[u8]) {
        self.send(&[head, payload].concat());
    }
}

/// The answer to a request, `unique`, that was begun: with data.
pub(super) fn ended_with(later: Box<dyn LaterReply>, unique: u64, data: &[u8]) {
    let len = u32::try_from(size_of::<OutHeader>() + data.len()).unwrap_or(0);
    let head = OutHeader { len: len.into(), error: 0.into(), unique: unique.into() };
    later.send_with(head.as_bytes(), data);
}

/// Longest fixed part of a reply.
const INLINE_BYTES: usize = size_of::<StatxOut>();

/// What a handler answers, after the header.
#[allow(clippy::large_enum_variant)] // lives for one call; a box would cost an allocation each
pub enum Answer {
    /// No reply at all (FORGET).
    Silent,
    /// Success without data.
    Empty,
    /// A fixed structure or two.
    Fixed {
        /// The bytes.
        bytes: [u8; INLINE_BYTES],
        /// How many count.
        len: usize,
    },
    /// So many bytes of the sink's payload room.
    Payload(usize),
}

impl Answer {
    /// One structure.
    pub fn of<T: IntoBytes + Immutable>(value: &T) -> Self {
        Self::pair(value, &())
    }

    /// Two, one after the other.
    pub fn pair<T, U>(first: &T, second: &U) -> Self
    where
        T: IntoBytes + Immutable,
        U: IntoBytes + Immutable,
    {
        const {
            assert!(size_of::<T>() + size_of::<U>() <= INLINE_BYTES);
        }
        let mut bytes = [0; INLINE_BYTES];
        let (a, b) = (first.as_bytes(), second.as_bytes());
        bytes[..a.len()].copy_from_slice(a);
        bytes[a.len()..a.len() + b.len()].copy_from_slice(b);
        Self::Fixed { bytes, len: a.len() + b.len() }
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str("Silent"),
            Self::Empty => f.write_str("Empty"),
            Self::Fixed { len, .. } => write!(f, "Fixed({len})"),
            Self::Payload(len) => write!(f, "Payload({len})"),
        }
    }
}

/// Attributes in the kernel's form.
pub fn fuse_attr(attr: &Attr) -> FuseAttr {
    FuseAttr {
        ino: attr.ino.0.into(),
        size: attr.size.into(),
        blocks: attr.blocks.into(),
        atime: attr.atime.sec.into(),
        mtime: attr.mtime.sec.into(),
        ctime: attr.ctime.sec.into(),
        atimensec: attr.atime.nsec.into(),
        mtimensec: attr.mtime.nsec.into(),
        ctimensec: attr.ctime.nsec.into(),
        mode: attr.mode.into(),
        nlink: attr.nlink.into(),
        uid: attr.uid.into(),
        gid: attr.gid.into(),
        rdev: attr.rdev.into(),
        blksize: ADVISED_IO_BYTES.into(),
        flags: 0.into(),
    }
}

/// Answer to GETATTR and SETATTR; the attributes may be kept for so many seconds.
pub fn attr_out(attr: &Attr, seconds: u64) -> AttrOut {
    AttrOut { attr_valid: seconds.into(), attr: fuse_attr(attr), ..AttrOut::default() }
}

/// Answer to everything that looks a name up or makes one; the name may be kept for `entry`, the attributes for so many
/// seconds.
pub fn entry_out(attr: &Attr, entry: Duration, seconds: u64) -> EntryOut {
    EntryOut {
        nodeid: attr.ino.0.into(),
        entry_valid: entry.as_secs().into(),
        entry_valid_nsec: entry.subsec_nanos().into(),
        attr_valid: seconds.into(),
        attr: fuse_attr(attr),
        ..EntryOut::default()
    }
}

/// "There is no such name, and you may remember that for so long."
pub fn negative_entry(entry: Duration) -> EntryOut {
    EntryOut {
        entry_valid: entry.as_secs().into(),
        entry_valid_nsec: entry.subsec_nanos().into(),
        ..EntryOut::default()
    }
}

/// Answer to STATX; the attributes may be kept for so many seconds.
pub fn statx_out(attr: &Attr, seconds: u64) -> StatxOut {
    let time = |t: Time| SxTime { sec: t.sec.into(), nsec: t.nsec.into(), reserved: 0.into() };
    StatxOut {
        attr_valid: seconds.into(),
        mask: super::wire::STATX_MASK.into(),
        blksize: ADVISED_IO_BYTES.into(),
        nlink: attr.nlink.into(),
        uid: attr.uid.into(),
        gid: attr.gid.into(),
        mode: u16::try_from(attr.mode & 0xffff).unwrap_or(0).into(),
        ino: attr.ino.0.into(),
        size: attr.size.into(),
        blocks: attr.blocks.into(),
        atime: time(attr.atime),
        btime: time(attr.btime),
        ctime: time(attr.ctime),
        mtime: time(attr.mtime),
        rdev_major: ((attr.rdev >> 8) & 0xfff).into(),
        rdev_minor: ((attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xf_ff00)).into(),
        ..StatxOut::default()
    }
}
