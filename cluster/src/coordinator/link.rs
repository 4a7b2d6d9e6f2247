//! A TCP connection that carries coordinator messages; both ends use it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::message::{MESSAGE_MAX, Message, PROTOCOL};
use crate::decode::{Decoder, LinkError, Pool};
use crate::queue::OutQueue;
use crate::tcp::{self, Stream};
use crate::tls::Role;
use crate::tls::keys::Loaded;
use crate::tls::session::Session;
use crate::wire::FrameHead;

/// Bytes that may wait for a side that does not read; beyond, the connection is given up.
const QUEUE_MAX: usize = 4 * MESSAGE_MAX;
/// Messages taken in one turn.
const TURN: usize = 64;

#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
    session: Option<Box<Session>>,
    decoder: Decoder,
    pool: Pool,
    queue: OutQueue,
    /// What the other side speaks.
    protocol: u16,
}

impl Link {
    pub fn new(fd: OwnedFd, session: Option<Session>) -> Self {
        Self {
            fd,
            session: session.map(Box::new),
            decoder: Decoder::for_socket(MESSAGE_MAX),
            pool: Pool::default(),
            queue: OutQueue::new(QUEUE_MAX),
            protocol: PROTOCOL,
        }
    }

    /// The other side has said what it speaks.
    pub fn set_protocol(&mut self, protocol: u16) {
        self.protocol = protocol.min(PROTOCOL);
    }

    /// Sends, or queues what does not fit.
    pub fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        if self.queue.is_full() {
            return Err(LinkError::Io("it does not read what it is sent".to_owned()));
        }
        let (kind, body) = message.encode_for(self.protocol);
        let head = FrameHead::new(kind, &[&body])
            .ok_or_else(|| LinkError::Io("a message is too long".to_owned()))?;
        let mut stream = Stream::new(self.fd.as_fd(), self.session.as_deref_mut());
        self.queue.send(&[&head.encode(), &body], &mut stream)
    }

    /// Whose certificate the other side has shown; known when it has said something.
    pub fn role(&self) -> Option<Role> {
        self.session.as_ref().and_then(|session| session.role())
    }

    /// Whether a part of the handshake is being done elsewhere.
    pub fn is_away(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_away())
    }

    /// Whether it is done.
    pub fn is_back(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_back())
    }

    /// Whether the other side's certificate has been revoked since.
    pub fn is_revoked(&self, keys: &Loaded) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_revoked(keys))
    }

    /// Says nothing more. False if there is nothing that the other side would miss.
    pub fn part(&self) -> bool {
        if self.session.is_some() {
            tcp::end_speaking(self.fd.as_fd());
        }
        self.session.is_some()
    }

    /// Drops what the other side still sends. False if it has ended.
    pub fn discard(&self) -> bool {
        tcp::discard(self.fd.as_fd()).is_ok()
    }

    /// Where the other side is, for the log.
    pub fn whence(&self) -> String {
        tcp::whence(self.fd.as_fd())
    }

    /// Moves on what is queued. True if something is left.
    pub fn flush(&mut self) -> Result<bool, LinkError> {
        if let Some(session) = &mut self.session {
            session.flush(self.fd.as_fd())?;
        }
        self.queue.flush(&mut Stream::new(self.fd.as_fd(), self.session.as_deref_mut()))?;
        Ok(self.has_queue())
    }

    pub fn has_queue(&self) -> bool {
        !self.queue.is_empty() || self.session.as_ref().is_some_and(|s| s.is_pending())
    }

    /// What has arrived. The error, if the connection has ended, comes with what arrived before.
    pub fn receive(&mut self) -> (Vec<Message>, Option<LinkError>) {
        let mut messages = Vec::new();
        let mut stream = Stream::new(self.fd.as_fd(), self.session.as_deref_mut());
        while messages.len() < TURN {
            let next = self.decoder.next(&mut stream, &mut self.pool).and_then(|frame| {
                frame
                    .map(|(kind, body)| Message::decode(kind, &body))
                    .transpose()
                    .map_err(Into::into)
            });
            match next {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(error)),
            }
        }
        (messages, None)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
