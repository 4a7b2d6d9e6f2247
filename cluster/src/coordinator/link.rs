//! A TCP connection that carries coordinator messages; both ends use it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::message::{MESSAGE_MAX, Message};
use crate::decode::{Decoder, LinkError, Pool};
use crate::queue::OutQueue;
use crate::tcp::Stream;
use crate::wire::FrameHead;

/// Bytes that may wait for a side that does not read; beyond, the connection is given up.
const QUEUE_MAX: usize = 4 * MESSAGE_MAX;
/// Messages taken in one turn.
const TURN: usize = 64;

#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
    decoder: Decoder,
    pool: Pool,
    queue: OutQueue,
}

impl Link {
    pub fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            decoder: Decoder::for_socket(MESSAGE_MAX),
            pool: Pool::default(),
            queue: OutQueue::new(QUEUE_MAX),
        }
    }

    /// Sends, or queues what does not fit.
    pub fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        if self.queue.is_full() {
            return Err(LinkError::Io("it does not read what it is sent".to_owned()));
        }
        let (kind, body) = message.encode();
        let head = FrameHead::new(kind, &[&body])
            .ok_or_else(|| LinkError::Io("a message is too long".to_owned()))?;
        self.queue.send(&[&head.encode(), &body], &mut Stream::new(self.fd.as_fd()))
    }

    /// Moves on what is queued. True if something is left.
    pub fn flush(&mut self) -> Result<bool, LinkError> {
        self.queue.flush(&mut Stream::new(self.fd.as_fd()))?;
        Ok(!self.queue.is_empty())
    }

    pub fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }

    /// What has arrived. The error, if the connection has ended, comes with what arrived before.
    pub fn receive(&mut self) -> (Vec<Message>, Option<LinkError>) {
        let mut messages = Vec::new();
        let mut stream = Stream::new(self.fd.as_fd());
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

pub fn describe(error: &LinkError) -> String {
    match error {
        LinkError::Closed => "closed by the other side".to_owned(),
        LinkError::Io(text) | LinkError::Protocol(text) => text.clone(),
    }
}
