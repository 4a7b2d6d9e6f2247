//! One connection's TLS: ciphertext on the socket's side, bytes of frames on ours.
//!
//! The handshake goes on by itself as bytes are read; what is written before it is over waits. Memory is bounded by
//! [`INBOX`], [`PENDING`] and one record in each direction, whatever the other side sends or does not take.

use std::io::{BufRead, ErrorKind, IoSlice, Write};
use std::os::fd::BorrowedFd;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection, Connection, Error, ServerConnection};

use super::keys::{self, Fingerprint, Keys, name_of};
use super::{Name, Role};
use crate::decode::LinkError;
use crate::tcp;

/// Ciphertext read with one system call.
const INBOX: usize = 128 << 10;
/// Ciphertext that may wait for the socket.
const PENDING: usize = 256 << 10;
/// What a side without keys says first.
const PLAIN: &[u8] = b"CBFR";
/// What it is answered: that a certificate is asked for, as TLS says it, and as often as makes the head of a frame. It
/// knows then what it has met.
const TO_PLAIN: [u8; 28] = {
    let alert = [0x15, 3, 3, 0, 2, 2, 116];
    let mut all = [0; 28];
    let mut at = 0;
    while at < all.len() {
        all[at] = alert[at % alert.len()];
        at += 1;
    }
    all
};

pub struct Session {
    tls: Connection,
    /// Ciphertext that was read and not looked at; what lies before `start` is used up.
    inbox: Vec<u8>,
    start: usize,
    began: bool,
    peer: Option<(Name, Fingerprint)>,
}

impl core::fmt::Debug for Session {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Session").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Ciphertext for the socket.
struct Out<'a>(BorrowedFd<'a>);

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        match tcp::send(self.0, parts) {
            Ok(0) => Err(ErrorKind::WouldBlock.into()),
            Ok(sent) => Ok(sent),
            Err(LinkError::Closed) => Err(ErrorKind::BrokenPipe.into()),
            Err(error) => Err(std::io::Error::other(error.to_string())),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What the other side's last word means, and what to do.
fn heard(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateExpired => {
            "this side's certificate has expired, or clocks differ: renew it with `corbel cert renew`"
        }
        AlertDescription::CertificateRevoked => {
            "this side's certificate was revoked: issue another with `corbel cert issue`"
        }
        AlertDescription::UnknownCA => {
            "this side's certificate is of another authority: all of a cluster have theirs from one"
        }
        AlertDescription::AccessDenied => {
            "this side's certificate is of another cluster, or of another role than was meant there"
        }
        AlertDescription::CertificateRequired => "this side has shown no certificate",
        other => return format!("the other side ended the handshake: {other:?}; its log says why"),
    };
    format!("refused by the other side: {why}")
}

fn failed(error: &Error) -> LinkError {
    if let Some(said) = keys::take_said() {
        return LinkError::Refused(said);
    }
    match error {
        Error::AlertReceived(alert) => LinkError::Refused(heard(*alert)),
        Error::NoCertificatesPresented => {
            LinkError::Refused("a side without a certificate has connected".to_owned())
        }
        Error::InvalidMessage(_) => {
            LinkError::Protocol(format!("what came is no TLS of this side's kind: {error}"))
        }
        other => LinkError::Protocol(format!("TLS: {other}")),
    }
}

impl Session {
    fn new(tls: Connection) -> Self {
        let mut session = Self { tls, inbox: Vec::new(), start: 0, began: false, peer: None };
        session.tls.set_buffer_limit(Some(PENDING));
        session
    }

    /// Begins to speak to whom the caller means.
    pub fn dial(keys: &Keys, whom: Role) -> Result<Self, LinkError> {
        let wrong = |e: String| LinkError::Io(format!("TLS: {e}"));
        let name = ServerName::try_from(whom.to_string()).map_err(|e| wrong(e.to_string()))?;
        let client = ClientConnection::new(keys.fresh().client.clone(), name)
            .map_err(|e| wrong(e.to_string()))?;
        Ok(Self::new(client.into()))
    }

    /// Expects somebody to speak.
    pub fn answer(keys: &Keys) -> Result<Self, LinkError> {
        let server = ServerConnection::new(keys.fresh().server.clone())
            .map_err(|e| LinkError::Io(format!("TLS: {e}")))?;
        Ok(Self::new(server.into()))
    }

    /// Who is at the other end; known when the first byte of a frame is.
    pub fn role(&self) -> Option<Role> {
        self.peer.as_ref().map(|(name, _)| name.role)
    }

    /// Whether the other end's certificate has been revoked since.
    pub fn is_revoked(&self, loaded: &keys::Loaded) -> bool {
        self.peer.as_ref().is_some_and(|(_, fingerprint)| loaded.has_revoked(fingerprint))
    }

    /// Whether something waits for room in the socket.
    pub fn is_pending(&self) -> bool {
        self.tls.wants_write()
    }

    /// Moves ciphertext to the socket. True if some is left.
    pub fn flush(&mut self, fd: BorrowedFd<'_>) -> Result<bool, LinkError> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Out(fd)) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) if e.kind() == ErrorKind::BrokenPipe => return Err(LinkError::Closed),
                Err(e) => return Err(LinkError::Io(e.to_string())),
            }
        }
        Ok(false)
    }

    /// Takes as much of `parts` as there is room for.
    pub fn write(&mut self, fd: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
        let mut taken = 0;
        let mut left: [IoSlice<'_>; 16] = [IoSlice::new(&[]); 16];
        loop {
            if self.flush(fd)? {
                return Ok(taken);
            }
            let mut skip = taken;
            let mut used = 0;
            for part in parts.iter().take(left.len()) {
                let from = skip.min(part.len());
                skip -= from;
                if from < part.len() {
                    left[used] = IoSlice::new(&part[from..]);
                    used += 1;
                }
            }
            if used == 0 {
                return Ok(taken);
            }
            let sent = self.tls.writer().write_vectored(&left[..used]).unwrap_or(0);
            if sent == 0 {
                return Ok(taken); // The handshake is not over, and enough waits for its end.
            }
            taken += sent;
        }
    }

    /// Appends at most `max` bytes to `dst`; 0 if there are none now.
    pub fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        drained: &mut bool,
        dst: &mut Vec<u8>,
        max: usize,
    ) -> Result<usize, LinkError> {
        loop {
            let got = self.take(dst, max)?;
            if got > 0 {
                return Ok(got);
            }
            if self.start < self.inbox.len() {
                self.digest(fd)?;
                continue;
            }
            if *drained {
                return Ok(0);
            }
            self.inbox.clear();
            self.start = 0;
            self.inbox.reserve_exact(INBOX);
            if tcp::receive(fd, drained, &mut self.inbox, INBOX)? == 0 {
                return Ok(0);
            }
            if !std::mem::replace(&mut self.began, true) && self.inbox.starts_with(PLAIN) {
                let _ = tcp::send(fd, &[IoSlice::new(&TO_PLAIN)]);
                return Err(LinkError::Refused(
                    "a side without keys has connected: set cluster.authentication there as here"
                        .to_owned(),
                ));
            }
        }
    }

    /// Plaintext that is there.
    fn take(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        let mut reader = self.tls.reader();
        match reader.fill_buf() {
            Ok([]) => Err(LinkError::Closed),
            Ok(bytes) => {
                let got = bytes.len().min(max);
                dst.extend_from_slice(&bytes[..got]);
                reader.consume(got);
                Ok(got)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(_) => Err(LinkError::Closed),
        }
    }

    /// Gives TLS what was read.
    fn digest(&mut self, fd: BorrowedFd<'_>) -> Result<(), LinkError> {
        let mut bytes = &self.inbox[self.start..];
        let used = self.tls.read_tls(&mut bytes).map_err(|e| LinkError::Io(e.to_string()))?;
        self.start += used;
        let processed = self.tls.process_new_packets();
        // Its part of the handshake, or why it does not go on.
        let flushed = self.flush(fd);
        if let Err(error) = processed {
            return Err(failed(&error));
        }
        flushed?;
        if used == 0 {
            return Err(LinkError::Closed); // The other side has taken its leave.
        }
        if self.peer.is_none() && !self.tls.is_handshaking() {
            self.peer = self.tls.peer_certificates().and_then(|chain| {
                let first = chain.first()?;
                Some((name_of(first).ok()?, keys::fingerprint(first)))
            });
        }
        Ok(())
    }
}

/// The same for a command, which waits for its answer.
pub struct Waiting(rustls::StreamOwned<ClientConnection, std::net::TcpStream>);

impl Waiting {
    pub fn dial(keys: &Keys, whom: Role, stream: std::net::TcpStream) -> std::io::Result<Self> {
        let name = ServerName::try_from(whom.to_string()).map_err(std::io::Error::other)?;
        let client = ClientConnection::new(keys.fresh().client.clone(), name)
            .map_err(std::io::Error::other)?;
        Ok(Self(rustls::StreamOwned::new(client, stream)))
    }
}

/// Why TLS does not go on, for people.
fn told(error: std::io::Error) -> std::io::Error {
    let Some(tls) = error.get_ref().and_then(|e| e.downcast_ref::<Error>()) else { return error };
    match failed(tls) {
        LinkError::Refused(text) => std::io::Error::new(ErrorKind::PermissionDenied, text),
        other => std::io::Error::other(other.to_string()),
    }
}

impl std::io::Read for Waiting {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes).map_err(told)
    }
}

impl Write for Waiting {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes).map_err(told)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush().map_err(told)
    }
}
