//! The frame, the hello and the refusal: all that the transport itself puts on a connection. What
//! lies in the body of other frames is their users' business.
//!
//! ```text
//! frame: offset  size  field
//!             0     4  magic      "CBFR"
//!             4     1  version    1
//!             5     1  flags      1: the body is covered by `body crc`; others zero
//!             6     2  kind       of the body; from 0xff00 on they are the transport's own
//!             8     4  length     of the body, at most limits::BODY_MAX
//!            12     4  body crc   CRC32C of the body if flag 1, else zero
//!            16     4  reserved   zero
//!            20     4  head crc   CRC32C of bytes 0..20
//!            24        body
//!
//! hello: offset  size  field     (kind 0xff01, from the dialler; 0xff02, the answer)
//!             0     2  protocol      3
//!             2     1  class         0 low latency, 1 bulk
//!             3     1  ring          1: a shared memory file comes with this frame, else 0
//!             4     4  from          node that speaks
//!             8     4  to            node that it means to speak to
//!            12     4  reserved      zero
//!            16    16  cluster       identity of the cluster
//!            32     8  incarnation   of the speaker: grows with each start of its service
//!            40     8  session       chosen by the dialler, the same on both classes
//!            48     4  ring bytes    of one direction, if ring is 1, else zero
//!            52     4  reserved      zero
//!
//! refusal: offset size field     (kind 0xff03, instead of the answer; the connection is closed)
//!             0     2  code          Refusal as a number
//!             2        text          UTF-8, at most 512 bytes: what is wrong and what to do
//! ```

use base::wire::{Corrupt, Reader, Writer};
use base::{NodeId, crc32c};

use crate::limits::{BODY_MAX, CHECKED_BODY_MAX};
use crate::transport::Class;

/// Bytes before the body.
pub const FRAME_HEAD: usize = 24;
/// Version of the hello and of all that follows, the messages of the service included; a peer with
/// another one is refused. 2: chunks say what they refuse, snapshots are acknowledged. 3: messages may be packed.
pub const PROTOCOL: u16 = 3;
/// First kind that belongs to the transport.
pub const KIND_RESERVED: u16 = 0xff00;
pub(crate) const KIND_HELLO: u16 = 0xff01;
pub(crate) const KIND_WELCOME: u16 = 0xff02;
pub(crate) const KIND_REFUSAL: u16 = 0xff03;

const MAGIC: u32 = u32::from_le_bytes(*b"CBFR");
const VERSION: u8 = 1;
const FLAG_CHECKED: u8 = 1;
const FRAME: &str = "frame";
const HELLO: &str = "hello";
const REFUSAL: &str = "refusal";
const HELLO_BYTES: usize = 56;
const REFUSAL_TEXT_MAX: usize = 512;

/// The 24 bytes before a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHead {
    /// Kind of the body.
    pub kind: u16,
    /// Length of the body.
    pub len: u32,
    /// Checksum of the body, unless it carries its own.
    pub body_crc: Option<u32>,
}

impl FrameHead {
    /// The head for a body that consists of `parts`; [`None`] if it is longer than [`BODY_MAX`].
    pub fn new(kind: u16, parts: &[&[u8]]) -> Option<Self> {
        let len = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.len()))?;
        if len > BODY_MAX {
            return None;
        }
        let body_crc =
            (len <= CHECKED_BODY_MAX).then(|| parts.iter().fold(0, |crc, part| crc32c(crc, part)));
        Some(Self { kind, len: u32::try_from(len).ok()?, body_crc })
    }

    /// The 24 bytes.
    pub fn encode(&self) -> [u8; FRAME_HEAD] {
        let mut head = [0u8; FRAME_HEAD];
        head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        head[4] = VERSION;
        head[5] = if self.body_crc.is_some() { FLAG_CHECKED } else { 0 };
        head[6..8].copy_from_slice(&self.kind.to_le_bytes());
        head[8..12].copy_from_slice(&self.len.to_le_bytes());
        head[12..16].copy_from_slice(&self.body_crc.unwrap_or(0).to_le_bytes());
        let crc = crc32c(0, &head[..20]);
        head[20..24].copy_from_slice(&crc.to_le_bytes());
        head
    }

    /// Reads and checks a head; bodies above `body_max` are refused.
    pub fn decode(bytes: &[u8], body_max: usize) -> Result<Self, Corrupt> {
        let mut r = Reader::new(FRAME, bytes);
        let head = Reader::new(FRAME, bytes).bytes(FRAME_HEAD)?;
        if matches!(bytes, [0x14..=0x17, 3, ..]) {
            return Err(
                r.corrupt("is one of TLS: one side asks for certificates and the other has none")
            );
        }
        if r.u32()? != MAGIC {
            return Err(r.corrupt("does not begin with its magic: the peer is no Corbel node"));
        }
        let (version, flags, kind) = (r.u8()?, r.u8()?, r.u16()?);
        let (len, body_crc, reserved, head_crc) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        if head_crc != crc32c(0, &head[..20]) {
            return Err(r.corrupt("head does not match its checksum"));
        }
        if version != VERSION {
            return Err(r.corrupt("has an unknown version: run the same release on all nodes"));
        }
        if flags & !FLAG_CHECKED != 0 || reserved != 0 {
            return Err(r.corrupt("has an unknown flag or a reserved field that is not zero"));
        }
        let checked = flags & FLAG_CHECKED != 0;
        if !checked && body_crc != 0 {
            return Err(r.corrupt("has a body checksum without its flag"));
        }
        if len as usize > body_max {
            return Err(r.corrupt("body is longer than the limit"));
        }
        Ok(Self { kind, len, body_crc: checked.then_some(body_crc) })
    }

    /// Checks the body that followed.
    pub fn check(&self, body: &[u8]) -> Result<(), Corrupt> {
        match self.body_crc {
            Some(crc) if crc != crc32c(0, body) => {
                Err(Corrupt::new(FRAME, "body does not match its checksum"))
            }
            _ => Ok(()),
        }
    }
}

/// First frame of a connection, and the answer to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Class of the connection.
    pub class: Class,
    /// Who speaks.
    pub from: NodeId,
    /// Whom it means.
    pub to: NodeId,
    /// Identity of the cluster.
    pub cluster: u128,
    /// Incarnation of the speaker.
    pub incarnation: u64,
    /// Joins the connections of both classes.
    pub session: u64,
    /// Bytes of one direction of the ring that comes with the frame.
    pub ring_bytes: Option<u32>,
}

impl Hello {
    /// The body.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        let mut w = Writer(&mut bytes);
        w.u16(PROTOCOL).u8(self.class as u8).u8(u8::from(self.ring_bytes.is_some()));
        w.u32(self.from.0).u32(self.to.0).u32(0).u128(self.cluster).u64(self.incarnation);
        w.u64(self.session).u32(self.ring_bytes.unwrap_or(0)).u32(0);
        bytes
    }

    /// Reads and checks a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut r = Reader::new(HELLO, bytes);
        if r.u16()? != PROTOCOL {
            return Err(r.corrupt("speaks another protocol version: update the older node"));
        }
        let class = match r.u8()? {
            0 => Class::LowLatency,
            1 => Class::Bulk,
            _ => return Err(r.corrupt("names an unknown class")),
        };
        let ring = r.u8()?;
        let (from, to, zero) = (NodeId(r.u32()?), NodeId(r.u32()?), r.u32()?);
        let (cluster, incarnation, session) = (r.u128()?, r.u64()?, r.u64()?);
        let (ring_bytes, zero_too) = (r.u32()?, r.u32()?);
        r.end()?;
        if zero != 0 || zero_too != 0 {
            return Err(r.corrupt("has a reserved field that is not zero"));
        }
        let ring_bytes = match (ring, ring_bytes) {
            (0, 0) => None,
            (1, bytes) if bytes != 0 => Some(bytes),
            _ => return Err(r.corrupt("has a ring size without a ring, or a ring without size")),
        };
        if from.0 == 0 || to.0 == 0 {
            return Err(r.corrupt("names node 0, which is no node"));
        }
        Ok(Self { class, from, to, cluster, incarnation, session, ring_bytes })
    }
}

/// Why a connection is not wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Refusal {
    /// The dialler belongs to another cluster.
    WrongCluster = 1,
    /// The dialler meant another node.
    WrongNode = 2,
    /// The dialler is not (yet) among our peers.
    UnknownPeer = 3,
    /// A newer incarnation of the dialler is or was connected.
    OldIncarnation = 4,
    /// The hello, or the ring that came with it, breaks its format.
    Malformed = 5,
    /// The dialler's certificate is another one's.
    WrongRole = 6,
}

impl Refusal {
    const ALL: [Self; 6] = [
        Self::WrongCluster,
        Self::WrongNode,
        Self::UnknownPeer,
        Self::OldIncarnation,
        Self::Malformed,
        Self::WrongRole,
    ];

    /// The body: the code and a text for people.
    pub fn encode(self, text: &str) -> Vec<u8> {
        let mut cut = text.len().min(REFUSAL_TEXT_MAX);
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        let mut bytes = Vec::with_capacity(2 + cut);
        Writer(&mut bytes).u16(self as u16).bytes(&text.as_bytes()[..cut]);
        bytes
    }

    /// Reads and checks a body.
    pub fn decode(bytes: &[u8]) -> Result<(Self, String), Corrupt> {
        let mut r = Reader::new(REFUSAL, bytes);
        let code = r.u16()?;
        let Some(refusal) = Self::ALL.into_iter().find(|r| *r as u16 == code) else {
            return Err(r.corrupt("has an unknown code"));
        };
        let text = r.rest();
        if text.len() > REFUSAL_TEXT_MAX {
            return Err(r.corrupt("text is longer than 512 bytes"));
        }
        // For people only: control characters from a stranger must not reach a terminal.
        let text = String::from_utf8_lossy(text)
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        Ok((refusal, text))
    }
}
