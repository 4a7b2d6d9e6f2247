//! Numbers of the protocol, and the forms of its messages. All integers are big-endian.
// Not ours to choose.
#![allow(clippy::big_endian_bytes)]

use base::Errno;

/// First word of a server.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Before each option; second word of a newstyle server.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Before each reply to an option.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Before a simple reply.
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Before a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Flags of server and client in the greeting: options are haggled over.
pub const FIXED_NEWSTYLE: u16 = 1;
/// Nobody needs the 124 zeroes after EXPORT_NAME.
pub const NO_ZEROES: u16 = 2;

/// Options.
pub mod option {
    /// Ends the haggling, in the old way: no error can be told.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the connection.
    pub const ABORT: u32 = 2;
    /// Names of the exports.
    pub const LIST: u32 = 3;
    /// TLS from here on.
    pub const STARTTLS: u32 = 5;
    /// What an export is like.
    pub const INFO: u32 = 6;
    /// The same, and ends the haggling.
    pub const GO: u32 = 7;
    /// Replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Which contexts of block status there are.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Which of them shall be told.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A context of block status.
    pub const META_CONTEXT: u32 = 4;
    /// Not known here.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// Not allowed.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// Malformed, or at the wrong time.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// Only after STARTTLS.
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The server goes down.
    pub const ERR_SHUTDOWN: u32 = 1 << 31 | 7;
    /// The client must ask for the block sizes and keep to them.
    pub const ERR_BLOCK_SIZE_REQD: u32 = 1 << 31 | 8;
    /// More than the server reads.
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// For people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, best and largest block.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes fail.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// A read in one piece.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// FAST_ZERO.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests.
pub mod command {
    /// Bytes, please.
    pub const READ: u16 = 0;
    /// Bytes to keep.
    pub const WRITE: u16 = 1;
    /// Farewell.
    pub const DISC: u16 = 2;
    /// What was answered becomes durable.
    pub const FLUSH: u16 = 3;
    /// Not needed any more.
    pub const TRIM: u16 = 4;
    /// Will be read soon.
    pub const CACHE: u16 = 5;
    /// Reads as zero afterwards.
    pub const WRITE_ZEROES: u16 = 6;
    /// Where there is data.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod flag {
    /// Answered when durable.
    pub const FUA: u16 = 1;
    /// Space stays allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// In one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent will do.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Only if that is quick.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub mod chunk {
    /// Flag: the last one.
    pub const DONE: u16 = 1;
    /// Nothing.
    pub const NONE: u16 = 0;
    /// Bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// What went wrong.
    pub const ERROR: u16 = 1 << 15 | 1;
    /// The same, and where.
    pub const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// The one context of block status.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Its number on our connections.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// No space is allocated.
pub const STATE_HOLE: u32 = 1;
/// Reads as zero.
pub const STATE_ZERO: u32 = 2;

/// Longest name of an export, and longest text of any kind, in bytes.
pub const NAME_MAX: usize = 4096;
/// Bytes of a request's head.
pub const REQUEST_BYTES: usize = 28;

/// An error as the protocol tells it.
pub fn error_number(errno: Errno) -> u32 {
    match errno {
        Errno::PERM | Errno::ROFS | Errno::ACCES => 1,
        Errno::NOMEM => 12,
        Errno::INVAL => 22,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => 28,
        Errno::OVERFLOW => 75,
        Errno::OPNOTSUPP => 95,
        _ => 5,
    }
}

/// The other way round.
pub fn errno(number: u32) -> Errno {
    match number {
        1 => Errno::PERM,
        12 => Errno::NOMEM,
        22 => Errno::INVAL,
        28 => Errno::NOSPC,
        75 => Errno::OVERFLOW,
        95 => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

/// Reads big-endian fields off the front of a slice; `None` past its end.
#[derive(Clone, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// The next `N` bytes.
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

/// Appends big-endian fields.
#[derive(Debug)]
pub struct Put<'a>(pub &'a mut Vec<u8>);

impl Put<'_> {
    /// Two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}
