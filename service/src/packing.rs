//! What travels packed: bulk messages are compressed on their way to another node, where that pays, and only there.
//! Every member keeps what was packed as it was.
//!
//! A message of kind [`PACKED`] holds another one (a chunk, log entries, a piece of a snapshot):
//!
//! ```text
//! offset  size  field
//!      0     4  epoch       of the message in it
//!      4     2  kind        of the message in it
//!      6     1  codec       1 LZ4 block, 2 Zstandard frame, 3 a chunk without what its pads stand for ([`thin`])
//!      7     1  clear       bytes of the message that follow as they are: all of its fields that change on the way
//!      8     4  raw bytes   of the rest, unpacked
//!     12     4  raw crc     CRC32C of the rest, unpacked
//!     16     4  head crc    CRC32C of bytes 0..16 and of the clear bytes
//!     20        clear bytes
//!               packed bytes
//! ```
//!
//! What it says of lengths is judged before any memory is taken: the rest is no longer than a frame may be, shorter when
//! packed, and, but for pads, not more than [`RATIO_MAX`] times as long as it was packed. The sender keeps to that.
//!
//! [`Packing`] is the state of it on a node, and decides; [`Piece`] is the work, which somebody else does, and which may end
//! late and in any order. The checksums of long chunks and entries are compared by a piece, too, packed or not. Messages of one
//! link and class leave, and are delivered, in the order in which they were sent all the same.

mod incoming;
mod outgoing;
mod thin;

use base::planted::{Bug, planted};
use base::wire::{Corrupt, Reader, Writer};
use base::{Epoch, NodeId, crc32c};
use cluster::limits::BODY_MAX;
use cluster::transport::Class;
use placement::codec::Codec;

use crate::core::frame::{Body, Received};
use crate::core::message::{CHUNK, CHUNK_PREFIX, ENTRIES, IMAGE, PACKED, SNAPSHOT};
use incoming::Incoming;
pub use incoming::{Damaged, Heard};
pub use outgoing::Line;
use outgoing::Outgoing;

/// Bytes may be so many times as long as they were packed, and no more: as far as LZ4 goes.
pub const RATIO_MAX: usize = 256;
/// Bytes before what is in the clear.
const HEAD: usize = 20;
const NAME: &str = "packed message";

/// When messages to other nodes are packed, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// Never.
    None,
    /// Each that is long enough, by LZ4.
    Lz4,
    /// The same by Zstandard.
    Zstd,
    /// When the link is slower than packing is, as what had to wait for it has shown lately, and they look as if they would
    /// gain something.
    #[default]
    Auto,
}

impl Compression {
    /// Its word in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Auto => "auto",
        }
    }
}

/// How long messages are for which it is worth something, and how much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Shorter ones are never packed.
    pub short: usize,
    /// Shorter ones are packed only if they have to wait for the link anyhow.
    pub long: usize,
    /// What is no longer than this, unpacked, is unpacked at once: a hop to another thread takes longer.
    pub inline: usize,
    /// Of entries in a message that is no longer than this the core compares the checksums; `usize::MAX`: of all.
    pub verify: usize,
    /// Bytes of packed chunks that are kept to be passed on as they came.
    pub kept: usize,
    /// Bytes of messages that have come and wait for their turn, beyond which nothing more is heard.
    pub held: usize,
}

impl Limits {
    /// What is shipped, but for `verify`, which is configured.
    pub const SHIPPED: Self = Self {
        short: 8 << 10,
        long: 64 << 10,
        inline: 16 << 10,
        verify: usize::MAX,
        kept: 8 << 20,
        held: 64 << 20,
    };
}

/// What was done, for `status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    /// Bytes of all messages to other nodes, before packing.
    pub raw_out: u64,
    /// The same as they were given to the transport.
    pub wire_out: u64,
    pub packed: u64,
    /// Bytes of those that were packed here, before and after.
    pub packed_from: u64,
    pub packed_to: u64,
    /// Messages that were tried and did not shrink.
    pub not_worth: u64,
    /// Chunks that were passed on packed, as they came.
    pub passed_on: u64,
    pub unpacked: u64,
    pub unpacked_to: u64,
    /// Packed messages that were refused.
    pub bad: u64,
}

impl Counters {
    /// How many times as long messages are as what was sent for them.
    pub fn ratio(&self) -> f64 {
        if self.wire_out == 0 { 1.0 } else { self.raw_out as f64 / self.wire_out as f64 }
    }
}

/// Bytes of a message that stay as they are: its epoch, and of a chunk what changes on its way down the chain. None: it is
/// not packed.
const fn clear_of(kind: u16) -> Option<usize> {
    match kind {
        CHUNK => Some(CHUNK_PREFIX),
        ENTRIES | SNAPSHOT | IMAGE => Some(4),
        _ => None,
    }
}

/// How the rest of a message is packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    By(Codec),
    Thin,
}

impl How {
    const THIN: u8 = 3;

    fn of(number: u8) -> Option<Self> {
        if number == Self::THIN { Some(Self::Thin) } else { Codec::of(number).map(Self::By) }
    }

    const fn number(self) -> u8 {
        match self {
            Self::By(codec) => codec as u8,
            Self::Thin => Self::THIN,
        }
    }
}

/// The head of a packed message, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Epoch of the message in it.
    pub epoch: Epoch,
    /// Kind of the message in it.
    pub kind: u16,
    how: How,
    clear: usize,
    raw: usize,
    raw_crc: u32,
}

impl Head {
    /// Reads the head of a packed message, and checks what can be said without unpacking it.
    pub fn read(body: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, body);
        let (epoch, kind) = (Epoch(r.u32()?), r.u16()?);
        let (codec, clear) = (r.u8()?, usize::from(r.u8()?));
        let (raw, raw_crc, head_crc) = (r.u32()? as usize, r.u32()?, r.u32()?);
        // The epoch stands at the front.
        if clear_of(kind).is_none_or(|whole| clear != whole - 4) {
            return Err(r.corrupt("holds a message that does not travel packed"));
        }
        let in_the_clear = r.bytes(clear)?;
        if head_crc != crc32c(crc32c(0, &body[..16]), in_the_clear) {
            return Err(r.corrupt("head does not match its checksum"));
        }
        let how = How::of(codec).ok_or(r.corrupt("names an unknown codec"))?;
        if how == How::Thin && kind != CHUNK {
            return Err(r.corrupt("leaves pads out of what is no chunk"));
        }
        if raw > BODY_MAX - 4 - clear {
            return Err(r.corrupt("claims to be longer than a message may be"));
        }
        if raw <= r.left() {
            return Err(r.corrupt("is no shorter than what it holds"));
        }
        let bomb = how != How::Thin && raw > r.left().saturating_mul(RATIO_MAX);
        if bomb && !planted(Bug::BombTaken) {
            return Err(r.corrupt("claims to hold more than so few bytes can"));
        }
        if how == How::Thin && !thin::fits(r.rest(), raw) && !planted(Bug::BombTaken) {
            return Err(r.corrupt("claims another length than its entries have"));
        }
        Ok(Self { epoch, kind, how, clear, raw, raw_crc })
    }

    /// Bytes of the message in it.
    pub const fn bytes(&self) -> usize {
        4 + self.clear + self.raw
    }

    /// The message in it, whose head this is.
    fn unpack(&self, body: &[u8]) -> Result<Vec<u8>, Corrupt> {
        let packed = &body[HEAD + self.clear..];
        let mut message = vec![0; self.bytes()];
        let (front, rest) = message.split_at_mut(4 + self.clear);
        front[..4].copy_from_slice(&body[..4]);
        front[4..].copy_from_slice(&body[HEAD..HEAD + self.clear]);
        let unpacked = match self.how {
            How::By(codec) => codec.unpack(packed, rest).is_ok(),
            How::Thin => thin::put_in(packed, rest),
        };
        if !unpacked {
            return Err(Corrupt::new(NAME, "does not unpack to what it claims to hold"));
        }
        if self.raw_crc != crc32c(0, rest) && !planted(Bug::PackedSumIgnored) {
            return Err(Corrupt::new(NAME, "holds other bytes than its checksum says"));
        }
        Ok(message)
    }
}

/// Reads a packed message: the kind of the one in it, and its body. For tests, and for who has no [`Packing`].
pub fn unpack(body: &[u8]) -> Result<(u16, Vec<u8>), Corrupt> {
    let head = Head::read(body)?;
    head.unpack(body).map(|message| (head.kind, message))
}

/// Packs a message; none if it is of a kind that does not travel packed, or would not get shorter by an eighth at least.
pub fn pack(codec: Codec, kind: u16, body: &[u8]) -> Option<Vec<u8>> {
    let clear = clear_of(kind).filter(|clear| body.len() > *clear)?;
    let raw = &body[clear..];
    let most = raw.len() - raw.len() / 8;
    let most = most.min(raw.len() - 1);
    let mut packed = begin(How::By(codec), kind, body, clear, most)?;
    let bytes = codec.pack(raw, most, &mut packed)?;
    if raw.len() > bytes * RATIO_MAX {
        // As good as nothing is left of it.
        return (codec != Codec::Lz4).then(|| pack(Codec::Lz4, kind, body)).flatten();
    }
    seal(&mut packed, clear - 4);
    Some(packed)
}

/// What stands before the packed bytes of a message whose first `clear` bytes stay as they are, its checksum blank.
fn begin(how: How, kind: u16, body: &[u8], clear: usize, most: usize) -> Option<Vec<u8>> {
    let raw = &body[clear..];
    let mut packed = Vec::with_capacity(HEAD + clear + most);
    let mut w = Writer(&mut packed);
    w.bytes(&body[..4]).u16(kind).u8(how.number()).u8((clear - 4) as u8);
    w.u32(u32::try_from(raw.len()).ok()?).u32(crc32c(0, raw)).u32(0).bytes(&body[4..clear]);
    Some(packed)
}

/// A chunk without what its pads stand for; none if that would not make it shorter by an eighth at least. Pads whose bytes are not
/// zeroes (no node sends any) stay.
pub fn thin(body: &[u8]) -> Option<Vec<u8>> {
    let raw = body.get(CHUNK_PREFIX..)?;
    let saved = thin::saves(raw);
    if saved < raw.len() / 8 || saved == 0 {
        return None;
    }
    let mut packed = begin(How::Thin, CHUNK, body, CHUNK_PREFIX, raw.len() - saved)?;
    if !thin::leave_out(raw, &mut packed) {
        return None;
    }
    seal(&mut packed, CHUNK_PREFIX - 4);
    Some(packed)
}

fn seal(packed: &mut [u8], clear: usize) {
    let crc = crc32c(crc32c(0, &packed[..16]), &packed[HEAD..HEAD + clear]);
    packed[16..HEAD].copy_from_slice(&crc.to_le_bytes());
}

/// A chunk that came packed, to be passed on like that: what precedes it in a message, which is this node's to say, is put in
/// front of it.
fn passed_on(mut packed: Vec<u8>, prefix: &[u8]) -> Vec<u8> {
    packed[..4].copy_from_slice(&prefix[..4]);
    packed[HEAD..HEAD + CHUNK_PREFIX - 4].copy_from_slice(&prefix[4..CHUNK_PREFIX]);
    seal(&mut packed, CHUNK_PREFIX - 4);
    packed
}

/// A piece of work: it owns its buffers and decides nothing.
#[derive(Debug)]
pub struct Piece {
    id: u64,
    job: Job,
}

#[derive(Debug)]
enum Job {
    Pack {
        codec: Codec,
        kind: u16,
        body: Body,
    },
    Unpack {
        head: Head,
        body: Vec<u8>,
    },
    /// Of entries, of a log of that incarnation, if it is one that is known.
    Verify {
        kind: u16,
        body: Vec<u8>,
        incarnation: Option<u32>,
    },
}

/// A piece that was done.
#[derive(Debug)]
pub struct Done {
    id: u64,
    end: End,
}

#[derive(Debug)]
enum End {
    /// Kind and body to be sent; of how many bytes, if it was packed.
    Packed(u16, Body, Option<usize>),
    /// What was in it, and how it came.
    Unpacked(Result<Received, Corrupt>, Vec<u8>),
    Verified(Received),
}

impl Piece {
    /// Bytes that it holds, and will hold.
    pub fn bytes(&self) -> usize {
        match &self.job {
            Job::Pack { body, .. } => 2 * body.len(),
            Job::Unpack { head, body } => head.bytes() + body.len(),
            Job::Verify { body, .. } => body.len(),
        }
    }

    /// Does it.
    pub fn work(self) -> Done {
        let end = match self.job {
            Job::Pack { codec, kind, body } => match pack(codec, kind, &body) {
                Some(packed) => End::Packed(PACKED, packed.into(), Some(body.len())),
                None => End::Packed(kind, body, None),
            },
            Job::Unpack { head, body } => {
                let message = head.unpack(&body);
                End::Unpacked(message.map(|m| Received::verify(head.kind, m, None)), body)
            }
            Job::Verify { kind, body, incarnation } => {
                End::Verified(Received::verify(kind, body, incarnation))
            }
        };
        Done { id: self.id, end }
    }
}

impl Done {
    /// What was done, in a word, and to how many bytes.
    pub fn what(&self) -> (&'static str, usize) {
        match &self.end {
            End::Packed(_, body, from) => ("pack", from.unwrap_or(body.len())),
            End::Unpacked(Ok(message), _) => ("unpack", message.bytes().len()),
            End::Unpacked(Err(_), packed) => ("unpack", packed.len()),
            End::Verified(message) => ("verify", message.bytes().len()),
        }
    }
}

/// Where something has moved on by the end of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moved {
    /// Messages may be sent ([`Packing::next`]).
    Out(NodeId, Class),
    /// Messages may be delivered ([`Packing::next_heard`]).
    In(NodeId, Class),
}

/// The state of a node: what is on its way to others, and what has come and waits for its turn.
#[derive(Debug)]
pub struct Packing {
    compression: Compression,
    limits: Limits,
    outgoing: Outgoing,
    incoming: Incoming,
    next_piece: u64,
    counters: Counters,
}

/// A packed chunk that may be passed on.
#[derive(Debug)]
struct Kept {
    /// The chunk's header: which it is, beyond doubt.
    header: Vec<u8>,
    /// Bytes of its message.
    bytes: usize,
    packed: Vec<u8>,
}

impl Packing {
    /// Of a node that has `threads` for such work.
    pub fn new(compression: Compression, threads: usize, limits: Limits) -> Self {
        let (outgoing, incoming) = (Outgoing::new(threads), Incoming::default());
        let (next_piece, counters) = (0, Counters::default());
        Self { compression, limits, outgoing, incoming, next_piece, counters }
    }

    fn piece(&mut self, job: Job) -> Piece {
        self.next_piece += 1;
        Piece { id: self.next_piece, job }
    }

    /// Takes up what a piece has come to. What it was for may be gone with its link.
    pub fn done(&mut self, done: Done) -> Option<Moved> {
        match done.end {
            End::Packed(kind, body, from) => {
                match from {
                    Some(from) => {
                        self.counters.packed += 1;
                        self.counters.packed_from += from as u64;
                        self.counters.packed_to += body.len() as u64;
                    }
                    None => self.counters.not_worth += 1,
                }
                let (to, class) = self.outgoing.done(done.id, kind, body)?;
                Some(Moved::Out(to, class))
            }
            End::Unpacked(outcome, packed) => {
                match &outcome {
                    Ok(message) => {
                        self.counters.unpacked += 1;
                        self.counters.unpacked_to += message.bytes().len() as u64;
                    }
                    Err(_) => self.counters.bad += 1,
                }
                let (from, class) =
                    self.incoming.done(done.id, outcome, Some(packed), self.limits)?;
                Some(Moved::In(from, class))
            }
            End::Verified(message) => {
                let (from, class) = self.incoming.done(done.id, Ok(message), None, self.limits)?;
                Some(Moved::In(from, class))
            }
        }
    }

    /// The link to a node ended: what waits there for its turn, in both directions, is lost with it.
    pub fn down(&mut self, node: NodeId) {
        if !planted(Bug::PackedOutlives) {
            self.outgoing.down(node);
            self.incoming.down(node);
        }
    }

    /// How messages are packed.
    pub const fn compression(&self) -> Compression {
        self.compression
    }

    /// What was done.
    pub const fn counters(&self) -> Counters {
        self.counters
    }
}

#[cfg(test)]
mod tests;
