//! One connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use base::NodeId;
use rustix::event::epoll;

use super::{TAG_CONN, data};
use crate::decode::{Decoder, LinkError, Pool};
use crate::limits::TURN_BYTES;
use crate::queue::OutQueue;
use crate::shm::Ring;
use crate::tcp::{self, Stream};
use crate::tls::session::Session;
use crate::transport::{Class, NetEvent};
use crate::wire::{FRAME_HEAD, FrameHead};

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The kernel has not reached the peer yet.
    Connecting,
    /// The hello, or its answer, is awaited.
    Greeting,
    /// Frames flow.
    Open,
    /// It was not let in; what it still sends is dropped.
    Parting,
}

/// What carries the bytes.
#[derive(Debug)]
pub enum Io {
    Socket(OwnedFd),
    Ring(Box<Ring>),
}

/// See the module. Which fields are set follows from the phase: `node` from the hello on (for a
/// dialler from the start), `ring_file` while a ring was passed but is not open, `deadline` until
/// the link is up.
#[derive(Debug)]
pub struct Conn {
    pub generation: u32,
    pub index: usize,
    pub io: Io,
    /// TLS, over TCP with keys.
    pub tls: Option<Box<Session>>,
    /// A local socket: rings are agreed on over it.
    pub local: bool,
    pub phase: Phase,
    pub dialled: bool,
    pub node: Option<NodeId>,
    pub class: Class,
    pub session: u64,
    pub decoder: Decoder,
    pub queue: OutQueue,
    pub ring_file: Option<OwnedFd>,
    pub ring_bytes: usize,
    pub deadline: Option<Instant>,
    /// epoll said so, and nothing has shown the opposite since.
    pub readable: bool,
    pub writable: bool,
    /// epoll watches for room.
    pub watched: bool,
    /// The peer of a ring is gone; what it has written is still taken.
    pub ended: bool,
}

impl Conn {
    pub fn fd(&self) -> BorrowedFd<'_> {
        match &self.io {
            Io::Socket(fd) => fd.as_fd(),
            Io::Ring(ring) => ring.socket(),
        }
    }

    pub fn doorbells(&self) -> u64 {
        match &self.io {
            Io::Socket(_) => 0,
            Io::Ring(ring) => ring.doorbells,
        }
    }

    /// Whether a turn would find something to do.
    pub fn wants_turn(&self) -> bool {
        let input = match &self.io {
            Io::Ring(ring) if self.phase == Phase::Open => ring.has_input(),
            _ => false,
        };
        input || self.readable || self.writable && self.has_output()
    }

    /// Whether something waits for room in the socket, or in the ring.
    fn has_output(&self) -> bool {
        !self.queue.is_empty() || self.tls.as_ref().is_some_and(|session| session.is_pending())
    }

    /// See [`Ring::sleep`].
    pub fn sleep(&self) -> bool {
        match &self.io {
            Io::Socket(_) => true,
            Io::Ring(ring) => ring.sleep(),
        }
    }

    /// See [`Ring::awake`].
    pub fn awake(&self) {
        if let Io::Ring(ring) = &self.io {
            ring.awake();
        }
    }

    /// Sends a frame, or queues what does not fit.
    pub fn send(
        &mut self,
        head: &FrameHead,
        parts: &[&[u8]],
        epoll: &OwnedFd,
    ) -> Result<(), LinkError> {
        let head = head.encode();
        let mut all: [&[u8]; 8] = [&[]; 8];
        let joined;
        let all = if parts.len() < all.len() {
            all[0] = &head;
            all[1..=parts.len()].copy_from_slice(parts);
            &all[..=parts.len()]
        } else {
            joined = parts.concat();
            all[0] = &head;
            all[1] = &joined;
            &all[..2]
        };
        let was_empty = !self.has_output();
        match &mut self.io {
            Io::Socket(fd) => {
                let session = self.tls.as_deref_mut();
                self.queue.send(all, &mut Stream::new(fd.as_fd(), session))?;
            }
            Io::Ring(ring) => self.queue.send(all, &mut **ring)?,
        }
        if was_empty && self.has_output() {
            self.flush(epoll)?;
        }
        Ok(())
    }

    /// Moves on what is queued, and has us told when there is room for the rest. True if the queue
    /// had been full and no longer is.
    pub fn flush(&mut self, epoll: &OwnedFd) -> Result<bool, LinkError> {
        self.writable = false;
        match &mut self.io {
            Io::Socket(fd) => {
                if let Some(session) = &mut self.tls {
                    session.flush(fd.as_fd())?;
                }
                if self.queue.is_empty() && !self.watched && !self.has_output() {
                    return Ok(false);
                }
                let Io::Socket(fd) = &self.io else { return Ok(false) };
                let session = self.tls.as_deref_mut();
                let drained = self.queue.flush(&mut Stream::new(fd.as_fd(), session))?;
                self.watch(epoll)?;
                Ok(drained)
            }
            Io::Ring(ring) => {
                let mut drained = false;
                while !self.queue.is_empty() {
                    drained |= self.queue.flush(&mut **ring)?;
                    if !self.queue.is_empty() && ring.wait_for_room()? {
                        break;
                    }
                }
                Ok(drained)
            }
        }
    }

    /// Watches for room exactly while something is queued.
    fn watch(&mut self, epoll: &OwnedFd) -> Result<(), LinkError> {
        let wanted = self.has_output();
        if wanted == self.watched {
            return Ok(());
        }
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, wanted);
        epoll::modify(epoll, self.fd(), data(TAG_CONN, self.generation, self.index), flags)
            .map_err(|e| LinkError::Io(e.to_string()))?;
        self.watched = wanted;
        Ok(())
    }

    /// Whether epoll tells what arrives: while a part of the handshake is done elsewhere it would tell the same all the time.
    pub fn listen(&self, epoll: &OwnedFd, on: bool) {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, on);
        flags.set(epoll::EventFlags::OUT, self.watched);
        // If it fails, epoll tells too much, or the connection ends when its time is over.
        let _ = epoll::modify(epoll, self.fd(), data(TAG_CONN, self.generation, self.index), flags);
    }

    /// Takes the doorbells of a ring. To be done before it is looked whether there is room, never after: a
    /// doorbell that says so would be taken for one that was known, and nobody would ring again.
    pub fn hear(&mut self) {
        if let Io::Ring(ring) = &self.io
            && std::mem::take(&mut self.readable)
        {
            self.ended |= tcp::drain(ring.socket()).is_err();
        }
    }

    /// Takes frames for one turn.
    pub fn receive(
        &mut self,
        pool: &mut Pool,
        events: &mut Vec<NetEvent>,
    ) -> Result<(), LinkError> {
        let Some(from) = self.node else { return Ok(()) };
        let class = self.class;
        let mut stream;
        let source: &mut dyn crate::decode::Source = match &mut self.io {
            Io::Socket(fd) => {
                if !self.readable {
                    return Ok(());
                }
                stream = Stream::new(AsFd::as_fd(&*fd), self.tls.as_deref_mut());
                &mut stream
            }
            Io::Ring(ring) => &mut **ring,
        };
        let mut taken = 0;
        while taken < TURN_BYTES {
            match self.decoder.next(source, pool)? {
                Some((kind, body)) => {
                    taken += FRAME_HEAD + body.len();
                    events.push(NetEvent::Frame { from, class, kind, body });
                }
                None if self.ended => return Err(LinkError::Closed),
                None => {
                    self.readable = false;
                    return Ok(());
                }
            }
        }
        self.readable |= self.ended;
        Ok(())
    }
}
