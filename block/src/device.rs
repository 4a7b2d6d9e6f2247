//! The contract between block front ends (NBD, ublk), the layers in the middle, and what keeps the bytes.
//!
//! A [`Device`] takes [`Request`]s and completes each exactly once, in any order, from any thread, also before
//! `submit` returns. Its promises are a disk's: what was completed before a flush was submitted is durable when
//! that flush is completed; what was not flushed may survive or not, in any order, each sector
//! ([`SECTOR`]) whole. Two requests in flight at the same bytes are the caller's risk.
//!
//! A [`Disk`] is the simple form for what answers at once or is worth waiting for; [`Blocking`] makes a device of it.

mod file;
mod memory;
mod threads;
mod volume;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::Errno;

pub use file::PlainFile;
pub use memory::Memory;
pub use threads::Threads;
pub use volume::VolumeFile;

/// What a device never tears, in bytes.
pub const SECTOR: u64 = 512;
/// Most bytes that one read or write may carry.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// Most extents that one answer holds.
pub const EXTENTS_MAX: usize = 4096;

/// What a request asks for. Offsets and lengths are bytes and were checked against [`Device::size`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Bytes, answered by [`Answer::Data`].
    Read {
        /// First byte.
        offset: u64,
        /// How many, at most [`PAYLOAD_MAX`].
        len: u32,
    },
    /// Bytes to keep.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes, at most [`PAYLOAD_MAX`].
        data: Vec<u8>,
        /// Completed only when they are durable.
        fua: bool,
    },
    /// What was completed before becomes durable.
    Flush,
    /// The bytes are needed no more; what they read as afterwards is not said.
    Trim {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
        /// Completed only when that is durable.
        fua: bool,
    },
    /// The bytes read as zero afterwards.
    Zero {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
        /// What to do.
        how: Zero,
    },
    /// Where there is data and where there is not, answered by [`Answer::Extents`].
    Status {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
}

/// How zeroes are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Zero {
    /// Completed only when they are durable.
    pub fua: bool,
    /// Space stays (or becomes) allocated.
    pub no_hole: bool,
    /// `EOPNOTSUPP` at once if that is no faster than writing zeroes.
    pub fast: bool,
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// No space is allocated.
    pub hole: bool,
    /// It reads as zero.
    pub zero: bool,
}

/// What a request gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It is done.
    Done,
    /// The bytes of a read, all that were asked for.
    Data(Vec<u8>),
    /// Extents from the first byte on, at least one; together they may end before or after what was asked.
    Extents(Vec<Extent>),
}

/// How a request ended.
pub type Outcome = Result<Answer, Errno>;
/// Called once, with how the request ended. It must not wait: it may run on the device's only thread.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// A request and whom to tell.
pub struct Request {
    /// What is asked.
    pub op: Op,
    /// Whom to tell.
    pub done: Done,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("op", &self.op).finish_non_exhaustive()
    }
}

/// What a device is like. Fixed while it is open, except for its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traits {
    /// Offsets and lengths must be multiples of this; a power of two from 1 to 64 KiB.
    pub block_min: u32,
    /// What it does best; a power of two, at least `block_min`.
    pub block_preferred: u32,
    /// Writes fail with `EROFS`.
    pub read_only: bool,
    /// A zeroed or trimmed range costs less than writing it.
    pub fast_zero: bool,
}

impl Traits {
    /// A device of bytes that does best with pages.
    pub const BYTES: Self =
        Self { block_min: 1, block_preferred: 4096, read_only: false, fast_zero: true };
}

/// A block device. The module text has the rules.
pub trait Device: Send + Sync {
    /// What it is like.
    fn traits(&self) -> Traits;
    /// Bytes, now: a device may grow.
    fn size(&self) -> u64;
    /// Takes a request.
    fn submit(&self, request: Request);
    /// Whether `submit` returns at once with a request like that, so that the thread which reads requests may call it.
    fn is_prompt(&self, op: &Op) -> bool;
    /// The file of this machine whose bytes are the device's, at the same offsets: who can may read and write them there himself, without a
    /// request. Everything else is asked of the device, a flush for what was written there included.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Takes several that are in flight together; what they share (one flush for all) is done once.
    fn submit_many(&self, requests: Vec<Request>) {
        for request in requests {
            self.submit(request);
        }
    }
}

impl std::fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("size", &self.size())
            .field("traits", &self.traits())
            .finish()
    }
}

/// How long the calls of a [`Disk`] may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prompt {
    /// Microseconds, all of them.
    Always,
    /// Reads and writes take microseconds, what must become durable longer.
    UnlessDurable,
    /// Any of them may wait for a device.
    Never,
}

/// What answers in the thread that asks.
pub trait Disk: Send + Sync {
    /// What it is like.
    fn traits(&self) -> Traits;
    /// Bytes, now.
    fn size(&self) -> u64;
    /// How long its calls take.
    fn prompt(&self) -> Prompt;
    /// Fills `buf`, whose range lies within the size.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno>;
    /// Writes all of `data`, whose range lies within the size.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno>;
    /// What was written, trimmed and zeroed before becomes durable.
    fn flush(&self) -> Result<(), Errno>;
    /// Gives space back.
    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno>;
    /// Makes zeroes; `EOPNOTSUPP` where that is not to be had better than by writing them.
    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno>;
    /// Extents from `offset`, as [`Answer::Extents`].
    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno>;
    /// As [`Device::file`].
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A [`Disk`] as a device: requests are done where they are submitted.
#[derive(Debug)]
pub struct Blocking<D>(pub D);

/// Bytes of zeroes written at a time where a disk has no better way.
const ZEROES: usize = 256 << 10;

impl<D: Disk> Blocking<D> {
    /// Does all but making it durable. Whether that is asked for as well.
    fn carry_out(&self, op: Op) -> (Outcome, bool) {
        let disk = &self.0;
        match op {
            Op::Read { offset, len } => {
                let mut data = vec![0; len as usize];
                (disk.read(offset, &mut data).map(|()| Answer::Data(data)), false)
            }
            Op::Write { offset, data, fua } => {
                (disk.write(offset, &data).map(|()| Answer::Done), fua)
            }
            Op::Flush => (Ok(Answer::Done), true),
            Op::Trim { offset, len, fua } => (disk.trim(offset, len).map(|()| Answer::Done), fua),
            Op::Zero { offset, len, how } => {
                (self.zero(offset, len, how).map(|()| Answer::Done), how.fua)
            }
            Op::Status { offset, len } => (disk.extents(offset, len).map(Answer::Extents), false),
        }
    }

    fn zero(&self, offset: u64, len: u64, how: Zero) -> Result<(), Errno> {
        match self.0.zero(offset, len, how.no_hole) {
            Err(Errno::OPNOTSUPP) if !how.fast => {
                let zeroes = vec![0; ZEROES.min(usize::try_from(len).unwrap_or(ZEROES))];
                let (mut at, end) = (offset, offset + len);
                while at < end {
                    let n = zeroes.len().min(usize::try_from(end - at).unwrap_or(ZEROES));
                    self.0.write(at, &zeroes[..n])?;
                    at += n as u64;
                }
                Ok(())
            }
            result => result,
        }
    }
}

impl<D: Disk> Device for Blocking<D> {
    fn traits(&self) -> Traits {
        self.0.traits()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn submit(&self, request: Request) {
        let (mut outcome, durable) = self.carry_out(request.op);
        if durable && outcome.is_ok() {
            outcome = self.0.flush().map(|()| Answer::Done);
        }
        (request.done)(outcome);
    }

    fn is_prompt(&self, op: &Op) -> bool {
        match self.0.prompt() {
            Prompt::Always => true,
            Prompt::Never => false,
            Prompt::UnlessDurable => {
                matches!(op, Op::Read { .. } | Op::Write { fua: false, .. })
            }
        }
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }

    /// All are carried out first, in their order, and then one flush serves every one that asks for durability:
    /// a flush owes nothing to what had not been completed when it came, and here it gives more than it owes.
    fn submit_many(&self, requests: Vec<Request>) {
        let mut wait = Vec::new();
        for request in requests {
            let (outcome, durable) = self.carry_out(request.op);
            if durable && outcome.is_ok() {
                wait.push(request.done);
            } else {
                (request.done)(outcome);
            }
        }
        if wait.is_empty() {
            return;
        }
        let outcome = self.0.flush().map(|()| Answer::Done);
        for done in wait {
            done(outcome.clone());
        }
    }
}

/// A device that may be read only, whatever is behind it.
#[derive(Debug)]
pub struct ReadOnly(pub Arc<dyn Device>);

impl Device for ReadOnly {
    fn traits(&self) -> Traits {
        Traits { read_only: true, ..self.0.traits() }
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn submit(&self, request: Request) {
        match request.op {
            Op::Write { .. } | Op::Trim { .. } | Op::Zero { .. } => {
                (request.done)(Err(Errno::ROFS));
            }
            Op::Read { .. } | Op::Flush | Op::Status { .. } => self.0.submit(request),
        }
    }

    fn is_prompt(&self, op: &Op) -> bool {
        self.0.is_prompt(op)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }
}

/// Submits one request and waits for it.
pub fn wait_for(device: &dyn Device, op: Op) -> Outcome {
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let done: Done = Box::new(move |outcome| drop(tell.send(outcome)));
    device.submit(Request { op, done });
    // A device that drops a request has lost it.
    told.recv().unwrap_or(Err(Errno::IO))
}

/// Adds an extent, to the one before where they are of one kind. Whether there is room for more.
pub fn push_extent(extents: &mut Vec<Extent>, extent: Extent) -> bool {
    if extent.len == 0 {
        return extents.len() < EXTENTS_MAX;
    }
    let full = extents.len() == EXTENTS_MAX;
    match extents.last_mut() {
        Some(last) if last.hole == extent.hole && last.zero == extent.zero => {
            last.len += extent.len;
        }
        _ if full => return false,
        _ => extents.push(extent),
    }
    extents.len() < EXTENTS_MAX
}
