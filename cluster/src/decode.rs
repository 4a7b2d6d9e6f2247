//! From a stream of bytes to frames; the same for sockets and rings.
//!
//! Always true: what is allocated for a body is what its head claims, and that is at most
//! `body_max`; nothing is handed out before its checksum was compared.

use base::wire::Corrupt;

use crate::limits::{BODY_MAX, CHECKED_BODY_MAX, RECEIVE_BYTES};
use crate::wire::{FRAME_HEAD, FrameHead};

/// Why a connection cannot go on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LinkError {
    /// The other side closed it.
    Closed,
    /// The operating system's error.
    Io(String),
    /// The peer broke the protocol.
    Protocol(String),
    /// One of both is not whom the other takes for whom it should be; what to do.
    Refused(String),
}

impl core::fmt::Display for LinkError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by the other side"),
            Self::Io(text) | Self::Protocol(text) | Self::Refused(text) => f.write_str(text),
        }
    }
}

impl From<Corrupt> for LinkError {
    fn from(corrupt: Corrupt) -> Self {
        Self::Protocol(corrupt.to_string())
    }
}

/// Bytes come from here.
pub trait Source {
    /// Appends up to `max` (at least 1) bytes to `dst`, which has that much spare capacity.
    /// 0: nothing there now.
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError>;
}

/// Buffers of large bodies that were given back.
#[derive(Debug, Default)]
pub struct Pool {
    buffers: Vec<Vec<u8>>,
}

impl Pool {
    const KEPT: usize = 8;

    /// An empty buffer with room for `len` bytes.
    fn take(&mut self, len: usize) -> Vec<u8> {
        if len > CHECKED_BODY_MAX
            && let Some(at) = self.buffers.iter().position(|b| b.capacity() >= len)
        {
            return self.buffers.swap_remove(at);
        }
        Vec::with_capacity(len)
    }

    /// Keeps `buffer` for later if it is worth it.
    pub fn give(&mut self, mut buffer: Vec<u8>) {
        let useful = buffer.capacity() > CHECKED_BODY_MAX && buffer.capacity() <= 2 * BODY_MAX;
        if useful && self.buffers.len() < Self::KEPT {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }
}

/// Frames of one connection.
#[derive(Debug)]
pub struct Decoder {
    /// Bytes read ahead of the frame in progress; those before `start` are used up.
    ahead: Vec<u8>,
    start: usize,
    ahead_max: usize,
    body_max: usize,
    partial: Option<(FrameHead, Vec<u8>)>,
}

impl Decoder {
    /// For a socket: reads ahead, since each read is a system call.
    pub fn for_socket(body_max: usize) -> Self {
        Self::new(RECEIVE_BYTES, body_max)
    }

    /// For a ring: reads exactly, since the bytes are in memory already.
    pub fn for_ring() -> Self {
        Self::new(FRAME_HEAD, BODY_MAX)
    }

    fn new(ahead_max: usize, body_max: usize) -> Self {
        Self { ahead: Vec::with_capacity(ahead_max), start: 0, ahead_max, body_max, partial: None }
    }

    /// Accepts bodies of full length from now on.
    pub fn trust(&mut self) {
        self.body_max = BODY_MAX;
    }

    /// The next whole frame, kind and body; [`None`] if the source has no more bytes for one now.
    pub fn next(
        &mut self,
        source: &mut dyn Source,
        pool: &mut Pool,
    ) -> Result<Option<(u16, Vec<u8>)>, LinkError> {
        loop {
            if let Some((head, mut body)) = self.partial.take() {
                let missing = head.len as usize - body.len();
                if missing == 0 {
                    head.check(&body)?;
                    return Ok(Some((head.kind, body)));
                }
                let got = source.read(&mut body, missing)?;
                self.partial = Some((head, body));
                if got == 0 {
                    return Ok(None);
                }
                continue;
            }
            let have = self.ahead.len() - self.start;
            if have < FRAME_HEAD {
                self.ahead.drain(..self.start);
                self.start = 0;
                if source.read(&mut self.ahead, self.ahead_max - have)? == 0 {
                    return Ok(None);
                }
                continue;
            }
            self.begin(pool)?;
        }
    }

    /// Reads the head at the front, and what is there of its body.
    fn begin(&mut self, pool: &mut Pool) -> Result<(), LinkError> {
        let head = FrameHead::decode(&self.ahead[self.start..], self.body_max)?;
        self.start += FRAME_HEAD;
        let len = head.len as usize;
        let mut body = pool.take(len);
        let there = len.min(self.ahead.len() - self.start);
        body.extend_from_slice(&self.ahead[self.start..self.start + there]);
        self.start += there;
        self.partial = Some((head, body));
        Ok(())
    }
}
