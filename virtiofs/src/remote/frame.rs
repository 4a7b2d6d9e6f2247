//! What goes over a connection of [`super`]: frames, little-endian, a header of 32 bytes and a payload.
//!
//! | kind | payload | from |
//! | --- | --- | --- |
//! | `HELLO` | [`Hello`], then the tenant's name | front, first |
//! | `WELCOME` | [`Welcome`] | back, first |
//! | `REQUEST` | a FUSE request | front |
//! | `REPLY` | a FUSE reply, or nothing where there is none | back |
//! | `ACK` | numbers of requests (8 bytes each) whose replies have come | front |
//! | `PING` | | both; answered by nothing but something |
//! | `BYE` | why, in words | both, last |

use frontend::fuse::REQUEST_BYTES_MAX;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What both first payloads begin with.
pub const MAGIC: [u8; 8] = *b"CRBLRVFS";
/// Versions that are spoken here: from, to.
pub const VERSIONS: (u16, u16) = (1, 1);
/// Longest payload.
pub const PAYLOAD_MAX: usize = REQUEST_BYTES_MAX;
/// Longest name of a tenant.
pub const TENANT_MAX: usize = 64;

/// Kinds of frames.
#[allow(missing_docs)] // the table above
pub mod kind {
    pub const HELLO: u8 = 1;
    pub const WELCOME: u8 = 2;
    pub const REQUEST: u8 = 3;
    pub const REPLY: u8 = 4;
    pub const PING: u8 = 5;
    pub const BYE: u8 = 6;
    pub const ACK: u8 = 7;
}

/// Flag of a request: it was sent before, over a connection that broke, or came to a device that was killed.
pub const AGAIN: u8 = 1;

/// Begins every frame.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Bytes of the payload.
    pub len: U32,
    /// One of [`kind`].
    pub kind: u8,
    /// [`AGAIN`] or 0.
    pub flags: u8,
    /// Of a request: the queue that it came from.
    pub queue: U16,
    /// Number of the request, from 1 on.
    pub tag: U64,
    /// Of a request: number of another one whose reply has come, or 0.
    pub done: U64,
    /// Of a request: bytes that its reply may have.
    pub room: U32,
    /// 0.
    pub reserved: U32,
}
const _: () = assert!(size_of::<Header>() == 32);

impl Header {
    /// Of a frame without a request.
    pub fn of(kind: u8, len: usize) -> Self {
        let mut header = Self::new_zeroed();
        header.kind = kind;
        header.len = u32::try_from(len).unwrap_or(0).into();
        header
    }
}

/// Who is here, and wants what.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Oldest version that the front speaks.
    pub from: U16,
    /// Newest.
    pub to: U16,
    /// Queues of the guest.
    pub queues: U16,
    /// Bytes of the tenant's name, which follows.
    pub tenant: U16,
    /// The guest's session: the same when a connection is made again.
    pub session: [u8; 16],
}

/// What it gets.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The version that is spoken.
    pub version: U16,
    /// 1: the session goes on; 0: it is new here, and what was under way is not known.
    pub resumed: U16,
    /// Requests that may be under way.
    pub requests: U32,
    /// Bytes of these, and of their replies.
    pub bytes: U64,
}

/// A whole frame.
pub fn frame(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut all = Vec::with_capacity(size_of::<Header>() + payload.len());
    all.extend_from_slice(header.as_bytes());
    all.extend_from_slice(payload);
    all
}

/// A frame: header, payload, and how long both are.
pub type Taken<'a> = (Header, &'a [u8], usize);

/// Takes the first frame from `bytes`: its header, its payload, and how long both are. None if it is not all there.
///
/// # Errors
/// A frame that is none.
pub fn take(bytes: &[u8]) -> Result<Option<Taken<'_>>, String> {
    let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(None) };
    let len = header.len.get() as usize;
    if !(kind::HELLO..=kind::ACK).contains(&header.kind) {
        return Err(format!("a frame of kind {}", header.kind));
    }
    if len > PAYLOAD_MAX {
        return Err(format!("a frame of {len} bytes"));
    }
    Ok(rest.get(..len).map(|payload| (header, payload, size_of::<Header>() + len)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_whole() {
        let one = frame(&Header::of(kind::BYE, 3), b"why");
        let both = [&one[..], &one].concat();
        for len in 0..one.len() {
            assert!(take(&both[..len]).unwrap().is_none());
        }
        let (header, payload, len) = take(&both).unwrap().unwrap();
        assert_eq!((header.kind, payload, len), (kind::BYE, &b"why"[..], 35));
        for (at, byte) in [(3, 0xff), (4, 0), (4, 8)] {
            let mut bad = one.clone();
            bad[at] = byte;
            assert!(take(&bad).is_err());
        }
    }
}
