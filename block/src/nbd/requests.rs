//! What follows the negotiation: requests of the client, judged, and the replies to them. No socket here either.

use base::Errno;

use super::proto::{
    BASE_ALLOCATION_ID, CHUNK_MAGIC, Fields, Put, REQUEST_BYTES, REQUEST_MAGIC, SIMPLE_MAGIC,
    STATE_HOLE, STATE_ZERO, chunk, command, error_number, flag,
};
use crate::device::{Answer, Extent, Op, Outcome, PAYLOAD_MAX, Traits, Zero};

/// What requests are judged by.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of the export, now.
    pub size: u64,
    /// What it is like.
    pub traits: Traits,
    /// Replies come in chunks.
    pub structured: bool,
    /// Block status may be asked for.
    pub block_status: bool,
}

/// What a reply must know of its request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The client's mark.
    pub cookie: u64,
    /// Which command.
    pub command: u16,
    /// First byte.
    pub offset: u64,
    /// How many.
    pub len: u32,
    /// One extent will do.
    pub one: bool,
}

/// What the bytes at hand amount to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Taken {
    /// Nothing yet: so many bytes are needed in all.
    More(usize),
    /// A request to carry out.
    Do(Asked, Op),
    /// A request to answer at once.
    Answer(Asked, Outcome),
    /// The client says farewell.
    Farewell,
    /// No request: where the next one begins nobody knows.
    Broken(&'static str),
}

/// The last byte of a range plus one, if the range is good for the export.
fn check_range(rules: &Rules, asked: &Asked, beyond: Errno) -> Result<(), Errno> {
    let mask = u64::from(rules.traits.block_min) - 1;
    if asked.offset & mask != 0 || u64::from(asked.len) & mask != 0 || asked.len == 0 {
        return Err(Errno::INVAL);
    }
    let end = asked.offset.checked_add(asked.len.into()).ok_or(beyond)?;
    if end > rules.size { Err(beyond) } else { Ok(()) }
}

/// Takes one request off the front of `bytes`: how many bytes it was (0 with [`Taken::More`]).
pub fn take(bytes: &[u8], rules: &Rules) -> (usize, Taken) {
    let mut fields = Fields(bytes);
    let head = (|| {
        Some((
            fields.u32()?,
            fields.u16()?,
            fields.u16()?,
            fields.u64()?,
            fields.u64()?,
            fields.u32()?,
        ))
    })();
    let Some((magic, flags, command, cookie, offset, len)) = head else {
        return (0, Taken::More(REQUEST_BYTES));
    };
    if magic != REQUEST_MAGIC {
        return (bytes.len(), Taken::Broken("a request without its magic number"));
    }
    let one = flags & flag::REQ_ONE != 0;
    let asked = Asked { cookie, command, offset, len, one };
    let payload = if command == command::WRITE { len as usize } else { 0 };
    if payload > PAYLOAD_MAX as usize {
        return (bytes.len(), Taken::Broken("a write of more than 32 MiB"));
    }
    let Some(data) = fields.bytes(payload) else {
        return (0, Taken::More(REQUEST_BYTES + payload));
    };
    let taken = match judge(rules, &asked, flags, data) {
        _ if command == command::DISC => Taken::Farewell,
        Ok(Some(op)) => Taken::Do(asked, op),
        Ok(None) => Taken::Answer(asked, Ok(Answer::Done)),
        Err(errno) => Taken::Answer(asked, Err(errno)),
    };
    (REQUEST_BYTES + payload, taken)
}

/// What a request asks of the device; `None`: nothing, it is done.
fn judge(rules: &Rules, asked: &Asked, flags: u16, data: &[u8]) -> Result<Option<Op>, Errno> {
    let allowed = match asked.command {
        command::READ => flag::DF,
        command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
        command::BLOCK_STATUS => flag::REQ_ONE,
        _ => 0,
    };
    // FUA is harmless where it says nothing, and the protocol wants it let through.
    if flags & !(allowed | flag::FUA) != 0 {
        return Err(Errno::INVAL);
    }
    let fua = flags & flag::FUA != 0;
    let (offset, len) = (asked.offset, asked.len);
    let wide = u64::from(len);
    let writes = matches!(asked.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if writes && rules.traits.read_only {
        return Err(Errno::PERM);
    }
    match asked.command {
        command::READ => {
            if len > PAYLOAD_MAX {
                return Err(Errno::OVERFLOW);
            }
            check_range(rules, asked, Errno::INVAL)?;
            Ok(Some(Op::Read { offset, len }))
        }
        command::WRITE => {
            check_range(rules, asked, Errno::NOSPC)?;
            Ok(Some(Op::Write { offset, data: data.to_vec(), fua }))
        }
        command::FLUSH => {
            if offset != 0 || len != 0 {
                Err(Errno::INVAL)
            } else {
                Ok(Some(Op::Flush))
            }
        }
        command::TRIM => {
            check_range(rules, asked, Errno::INVAL)?;
            Ok(Some(Op::Trim { offset, len: wide, fua }))
        }
        command::CACHE => check_range(rules, asked, Errno::INVAL).map(|()| None),
        command::WRITE_ZEROES => {
            check_range(rules, asked, Errno::NOSPC)?;
            let no_hole = flags & flag::NO_HOLE != 0;
            let fast = flags & flag::FAST_ZERO != 0;
            if fast && !rules.traits.fast_zero {
                return Err(Errno::OPNOTSUPP);
            }
            Ok(Some(Op::Zero { offset, len: wide, how: Zero { fua, no_hole, fast } }))
        }
        command::BLOCK_STATUS => {
            if !rules.block_status {
                return Err(Errno::INVAL);
            }
            check_range(rules, asked, Errno::INVAL)?;
            Ok(Some(Op::Status { offset, len: wide }))
        }
        _ => Err(Errno::INVAL),
    }
}

/// A reply: its head, and the bytes that follow.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Head (and everything that is short).
    pub head: Vec<u8>,
    /// The bytes of a read, or none.
    pub data: Vec<u8>,
}

impl Reply {
    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.head.len() + self.data.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The reply to a request.
pub fn reply(asked: &Asked, structured: bool, outcome: Outcome) -> Reply {
    let mut head = Vec::with_capacity(64);
    let outcome = match outcome {
        // What a device owes and does not give is an error of ours, never a broken stream.
        Ok(Answer::Data(data))
            if asked.command == command::READ && data.len() != asked.len as usize =>
        {
            Err(Errno::IO)
        }
        Ok(Answer::Extents(extents)) if extents.is_empty() => Err(Errno::IO),
        Ok(Answer::Done) if matches!(asked.command, command::READ | command::BLOCK_STATUS) => {
            Err(Errno::IO)
        }
        outcome => outcome,
    };
    // A simple reply is right for everything but reads and block status, and shorter.
    let plain = !structured || !matches!(asked.command, command::READ | command::BLOCK_STATUS);
    match outcome {
        Err(errno) if plain => simple(&mut head, error_number(errno), asked.cookie),
        Err(errno) => {
            let text = errno.describe().1.as_bytes();
            start_chunk(&mut head, chunk::ERROR, asked.cookie, 6 + text.len() as u32);
            Put(&mut head).u32(error_number(errno)).u16(text.len() as u16).bytes(text);
        }
        Ok(Answer::Data(data)) if structured => {
            start_chunk(&mut head, chunk::OFFSET_DATA, asked.cookie, 8 + data.len() as u32);
            Put(&mut head).u64(asked.offset);
            return Reply { head, data };
        }
        Ok(Answer::Data(data)) => {
            simple(&mut head, 0, asked.cookie);
            return Reply { head, data };
        }
        Ok(Answer::Extents(extents)) => put_extents(&mut head, asked, &extents),
        Ok(Answer::Done) => simple(&mut head, 0, asked.cookie),
    }
    Reply { head, data: Vec::new() }
}

fn simple(head: &mut Vec<u8>, error: u32, cookie: u64) {
    Put(head).u32(SIMPLE_MAGIC).u32(error).u64(cookie);
}

fn start_chunk(head: &mut Vec<u8>, kind: u16, cookie: u64, len: u32) {
    Put(head).u32(CHUNK_MAGIC).u16(chunk::DONE).u16(kind).u64(cookie).u32(len);
}

fn put_extents(head: &mut Vec<u8>, asked: &Asked, extents: &[Extent]) {
    let count = if asked.one { 1 } else { extents.len() };
    let mut told = Vec::with_capacity(4 + 8 * count);
    Put(&mut told).u32(BASE_ALLOCATION_ID);
    let mut left = u64::from(asked.len);
    for extent in extents.iter().take(count) {
        // With REQ_ONE nothing goes beyond what was asked for; without, only the last one might, and ours do not.
        let len = extent.len.min(left);
        if len == 0 {
            break;
        }
        left -= len;
        let hole = if extent.hole { STATE_HOLE } else { 0 };
        let zero = if extent.zero { STATE_ZERO } else { 0 };
        Put(&mut told).u32(len as u32).u32(hole | zero);
    }
    start_chunk(head, chunk::BLOCK_STATUS, asked.cookie, told.len() as u32);
    head.extend_from_slice(&told);
}
