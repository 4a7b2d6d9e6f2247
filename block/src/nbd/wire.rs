//! A connected socket, plain or with TLS in it: bytes in, bytes out.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustls::ServerConnection;

/// How often a thread that waits for bytes looks whether it shall still wait.
pub(super) const TICK: Duration = Duration::from_millis(500);
/// Bytes read at a time. What is read together is flushed together: as many requests of 4 KiB as are mostly in flight go into it.
const PIECE: usize = 256 << 10;
/// Most that is kept for requests to come.
const KEPT: usize = 1 << 20;
/// Records of TLS read at a time.
const RECORDS: usize = 64 << 10;
/// Most buffers that one call sends.
const SLICES_MAX: usize = 64;

/// The socket.
pub(super) struct Wire {
    socket: OwnedFd,
    tls: Option<Mutex<ServerConnection>>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("secure", &self.tls.is_some()).finish_non_exhaustive()
    }
}

/// What a wait for bytes came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Received {
    /// There are more.
    Bytes,
    /// None came for a [`TICK`].
    Nothing,
    /// None will.
    End,
}

/// Bytes that came and were not taken yet.
#[derive(Debug)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

impl Inbox {
    pub fn new() -> Self {
        Self { bytes: vec![0; PIECE], from: 0, to: 0 }
    }

    /// What is there.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }

    /// Takes the first `n` away.
    pub fn take(&mut self, n: usize) {
        self.from += n;
        debug_assert!(self.from <= self.to);
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
            // One large write is no reason to hold its room for ever.
            if self.bytes.len() > KEPT {
                self.bytes.truncate(PIECE);
                self.bytes.shrink_to_fit();
            }
        }
    }

    /// Makes room for a message of `len` bytes in all (of which some are there).
    pub fn expect(&mut self, len: usize) {
        if self.from + len > self.bytes.len() {
            self.bytes.copy_within(self.from..self.to, 0);
            self.to -= self.from;
            self.from = 0;
            if len > self.bytes.len() {
                self.bytes.resize(len, 0);
            }
        }
    }

    fn room(&mut self) -> &mut [u8] {
        if self.to == self.bytes.len() {
            self.expect(self.to - self.from + PIECE);
        }
        &mut self.bytes[self.to..]
    }

    fn append(&mut self, bytes: &[u8]) {
        self.expect(self.to - self.from + bytes.len());
        self.bytes[self.to..self.to + bytes.len()].copy_from_slice(bytes);
        self.to += bytes.len();
    }
}

fn broken(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

impl Wire {
    /// Takes a connected socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(TICK),
        )?;
        // Fails on a Unix socket, where there is nothing to be set.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        Ok(Self { socket, tls: None })
    }

    /// Nothing comes or goes any more; whoever waits is woken.
    pub fn shut(&self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    fn tls(&self) -> Option<MutexGuard<'_, ServerConnection>> {
        Some(self.tls.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for bytes and puts them into `inbox`.
    pub fn receive(&self, inbox: &mut Inbox) -> io::Result<Received> {
        if self.tls.is_none() {
            return Ok(match self.receive_raw(inbox.room())? {
                None => Received::Nothing,
                Some(0) => Received::End,
                Some(n) => {
                    inbox.to += n;
                    Received::Bytes
                }
            });
        }
        let mut raw = vec![0; RECORDS];
        let n = match self.receive_raw(&mut raw)? {
            None => return Ok(Received::Nothing),
            Some(0) => return Ok(Received::End),
            Some(n) => n,
        };
        let Some(mut tls) = self.tls() else { return Ok(Received::End) };
        let mut rest = &raw[..n];
        let mut got = Received::Nothing;
        let mut plain = vec![0; RECORDS];
        while !rest.is_empty() {
            tls.read_tls(&mut rest)?;
            let state = tls.process_new_packets().map_err(broken)?;
            let mut left = state.plaintext_bytes_to_read();
            while left > 0 {
                let read = tls.reader().read(&mut plain)?;
                if read == 0 {
                    break;
                }
                inbox.append(&plain[..read]);
                left -= read;
                got = Received::Bytes;
            }
            if state.peer_has_closed() {
                return Ok(if got == Received::Bytes { got } else { Received::End });
            }
        }
        Ok(got)
    }

    fn receive_raw(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::net::recv(&self.socket, &mut *buf, RecvFlags::empty()) {
                Ok((n, _)) => return Ok(Some(n)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends from the front of `pieces` what the socket takes without waiting: how many bytes.
    pub fn send_now(&self, pieces: &[&[u8]]) -> io::Result<usize> {
        let slices: Vec<IoSlice<'_>> =
            pieces.iter().take(SLICES_MAX).map(|piece| IoSlice::new(piece)).collect();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let sent = rustix::net::sendmsg(
                &self.socket,
                &slices,
                &mut rustix::net::SendAncillaryBuffer::default(),
                flags,
            );
            match sent {
                Ok(n) => return Ok(n),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until the socket takes bytes; false: it did not in that time.
    pub fn await_room(&self, limit: Duration) -> io::Result<bool> {
        let limit = rustix::event::Timespec::try_from(limit).map_err(broken)?;
        let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
        match poll(&mut fds, Some(&limit)) {
            Ok(n) => Ok(n > 0),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Bytes as they go over the socket: the same, or records of TLS.
    pub fn encode(&self, pieces: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
        let Some(mut tls) = self.tls() else { return Ok(pieces) };
        let mut records = Vec::new();
        for piece in pieces {
            tls.writer().write_all(&piece)?;
            while tls.wants_write() {
                tls.write_tls(&mut records)?;
            }
        }
        while tls.wants_write() {
            tls.write_tls(&mut records)?;
        }
        Ok(if records.is_empty() { Vec::new() } else { vec![records] })
    }

    /// Sends all of `bytes`, until the deadline; for the negotiation.
    pub fn send_all(&self, bytes: Vec<u8>, deadline: Instant) -> io::Result<()> {
        for piece in self.encode(vec![bytes])? {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let sent = self.send_now(&[rest])?;
                rest = &rest[sent..];
                if sent == 0 {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || !self.await_room(left)? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
            }
        }
        Ok(())
    }

    /// The server's half of a TLS handshake, until the deadline.
    pub fn secure(self, mut tls: ServerConnection, deadline: Instant) -> io::Result<Self> {
        tls.set_buffer_limit(None);
        let mut raw = vec![0; RECORDS];
        loop {
            let mut out = Vec::new();
            while tls.wants_write() {
                tls.write_tls(&mut out)?;
            }
            self.send_all(out, deadline)?;
            if !tls.is_handshaking() {
                break;
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.receive_raw(&mut raw)? {
                None => {}
                Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(n) => {
                    let mut rest = &raw[..n];
                    while !rest.is_empty() {
                        tls.read_tls(&mut rest)?;
                        if let Err(error) = tls.process_new_packets() {
                            // The client is told why, if it listens.
                            let mut alert = Vec::new();
                            let _ = tls.write_tls(&mut alert);
                            let _ = self.send_all(alert, deadline);
                            return Err(broken(error));
                        }
                    }
                }
            }
        }
        Ok(Self { socket: self.socket, tls: Some(Mutex::new(tls)) })
    }

    /// Plain bytes that came with the end of the TLS handshake.
    pub fn drain(&self, inbox: &mut Inbox) -> io::Result<()> {
        let Some(mut tls) = self.tls() else { return Ok(()) };
        let mut plain = vec![0; RECORDS];
        loop {
            match tls.reader().read(&mut plain) {
                Ok(0) => return Ok(()),
                Ok(n) => inbox.append(&plain[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
