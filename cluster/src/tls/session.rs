//! One connection's TLS: ciphertext on the socket's side, bytes of frames on ours.
//!
//! The handshake goes on by itself as bytes are read; what is written before it is over waits. Memory is bounded by
//! [`INBOX`], [`PENDING`] and one record in each direction, whatever the other side sends or does not take.

use std::io::{BufRead, ErrorKind, IoSlice, Write};
use std::os::fd::BorrowedFd;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection, Connection, Error, ServerConnection};

use super::keys::{self, Fingerprint, Keys, name_of};
use super::signed::{self, Next, Signed};
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
    way: Way,
}

/// How bytes go to and fro.
enum Way {
    /// In records of TLS.
    Encrypted,
    /// The handshake will tell. Until then it is fed record by record, so that nothing is taken for TLS that is not, and what is
    /// written waits here.
    Open { early: Vec<u8> },
    /// Signed; of the data of the record that is being read, what is left, and where the record ends.
    Signed { signed: Box<Signed>, left: core::ops::Range<usize>, end: usize },
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
    fn new(tls: Connection, encrypts: bool) -> Self {
        let way = if encrypts { Way::Encrypted } else { Way::Open { early: Vec::new() } };
        let mut session = Self { tls, inbox: Vec::new(), start: 0, began: false, peer: None, way };
        session.tls.set_buffer_limit(Some(PENDING));
        session
    }

    /// Begins to speak to whom the caller means.
    pub fn dial(keys: &Keys, whom: Role) -> Result<Self, LinkError> {
        let wrong = |e: String| LinkError::Io(format!("TLS: {e}"));
        let name = ServerName::try_from(whom.to_string()).map_err(|e| wrong(e.to_string()))?;
        let loaded = keys.fresh();
        let client =
            ClientConnection::new(loaded.client.clone(), name).map_err(|e| wrong(e.to_string()))?;
        Ok(Self::new(client.into(), keys.encrypts()))
    }

    /// Expects somebody to speak.
    pub fn answer(keys: &Keys) -> Result<Self, LinkError> {
        let server = ServerConnection::new(keys.fresh().server.clone())
            .map_err(|e| LinkError::Io(format!("TLS: {e}")))?;
        Ok(Self::new(server.into(), keys.encrypts()))
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
        let signed =
            matches!(&self.way, Way::Signed { signed, .. } if !signed.pending().is_empty());
        signed || self.tls.wants_write()
    }

    /// Moves what is ready to the socket. True if some is left.
    pub fn flush(&mut self, fd: BorrowedFd<'_>) -> Result<bool, LinkError> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Out(fd)) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) if e.kind() == ErrorKind::BrokenPipe => return Err(LinkError::Closed),
                Err(e) => return Err(LinkError::Io(e.to_string())),
            }
        }
        if let Way::Signed { signed, .. } = &mut self.way {
            while !signed.pending().is_empty() {
                match tcp::send(fd, &[IoSlice::new(signed.pending())])? {
                    0 => return Ok(true),
                    sent => signed.sent(sent),
                }
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
            let sent = self.put(&left[..used])?;
            if sent == 0 {
                return Ok(taken); // The handshake is not over, and enough waits for its end.
            }
            taken += sent;
        }
    }

    /// Takes some of what is to be sent; 0 if enough waits.
    fn put(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
        match &mut self.way {
            Way::Encrypted => Ok(self.tls.writer().write_vectored(parts).unwrap_or(0)),
            Way::Open { early } => {
                let room = PENDING.saturating_sub(early.len());
                let part = parts.iter().find(|part| !part.is_empty());
                let part = part.map_or(&[][..], |part| &part[..part.len().min(room)]);
                early.extend_from_slice(part);
                Ok(part.len())
            }
            Way::Signed { signed, .. } => {
                let mut all: [&[u8]; 16] = [&[]; 16];
                for (slice, part) in all.iter_mut().zip(parts) {
                    *slice = part;
                }
                let mut taken = signed.write(&all)?;
                // More than a record with one call of the system.
                if let [first, ..] = parts {
                    let data: &[u8] = first;
                    while taken < data.len() && signed.pending().len() < PENDING {
                        taken += signed.write(&[&data[taken..]])?;
                    }
                }
                Ok(taken)
            }
        }
    }

    /// The handshake is over: both know by it how they go on.
    fn settle(&mut self) -> Result<(), LinkError> {
        if self.tls.is_handshaking() {
            return Ok(());
        }
        if self.peer.is_none() {
            self.peer = self.tls.peer_certificates().and_then(|chain| {
                let first = chain.first()?;
                Some((name_of(first).ok()?, keys::fingerprint(first)))
            });
        }
        let Way::Open { early } = &mut self.way else { return Ok(()) };
        let early = std::mem::take(early);
        if self.tls.alpn_protocol() == Some(keys::SIGNED) {
            let mut signed = Box::new(Signed::new(&self.tls)?);
            let mut at = 0;
            while at < early.len() {
                at += signed.write(&[&early[at..]])?;
            }
            self.way = Way::Signed { signed, left: 0..0, end: 0 };
        } else {
            self.way = Way::Encrypted;
            // It takes as much as this side keeps.
            let taken = self.tls.writer().write(&early).unwrap_or(0);
            if taken < early.len() {
                return Err(LinkError::Io("too much was said before the handshake".to_owned()));
            }
        }
        Ok(())
    }

    /// As `read`, where not all is TLS.
    fn read_records(
        &mut self,
        fd: BorrowedFd<'_>,
        drained: &mut bool,
        dst: &mut Vec<u8>,
        max: usize,
    ) -> Result<usize, LinkError> {
        loop {
            if let Way::Signed { left, end, .. } = &mut self.way
                && left.start < left.end
            {
                let take = (left.end - left.start).min(max);
                dst.extend_from_slice(&self.inbox[left.start..left.start + take]);
                left.start += take;
                if left.start == left.end {
                    self.start = *end;
                }
                return Ok(take);
            }
            match signed::next(&self.inbox[self.start..])? {
                Next::Tls(len) => {
                    self.feed(fd, len)?;
                    if matches!(self.way, Way::Encrypted) {
                        return Ok(0); // The caller goes on.
                    }
                    continue;
                }
                Next::Signed(len) => {
                    let Way::Signed { signed, left, end } = &mut self.way else {
                        let what = "a signed record came before the handshake was over";
                        return Err(LinkError::Protocol(what.to_owned()));
                    };
                    let (data, whole) = signed.check(&self.inbox[self.start..], len)?;
                    *left = self.start + data.start..self.start + data.end;
                    *end = self.start + whole;
                    continue;
                }
                Next::Part => {}
            }
            if *drained || !self.fill(fd, drained)? {
                return Ok(0);
            }
        }
    }

    /// Gives TLS one record: of the handshake, or why the other side ends it.
    fn feed(&mut self, fd: BorrowedFd<'_>, len: usize) -> Result<(), LinkError> {
        let mut bytes = &self.inbox[self.start..self.start + len];
        while !bytes.is_empty() {
            let used = self.tls.read_tls(&mut bytes).map_err(|e| LinkError::Io(e.to_string()))?;
            if used == 0 {
                return Err(LinkError::Closed);
            }
        }
        self.start += len;
        let processed = self.tls.process_new_packets();
        let flushed = self.flush(fd);
        let state = processed.map_err(|error| failed(&error))?;
        flushed?;
        if state.plaintext_bytes_to_read() > 0 && self.tls.alpn_protocol() == Some(keys::SIGNED) {
            return Err(LinkError::Protocol(
                "TLS came where signed records were agreed on".to_owned(),
            ));
        }
        self.settle()?;
        self.flush(fd).map(|_| ())
    }

    /// Reads more, behind what is left. False if there is nothing now.
    fn fill(&mut self, fd: BorrowedFd<'_>, drained: &mut bool) -> Result<bool, LinkError> {
        self.inbox.drain(..self.start);
        self.start = 0;
        let room = INBOX.saturating_sub(self.inbox.len());
        self.inbox.reserve_exact(room);
        if tcp::receive(fd, drained, &mut self.inbox, room)? == 0 {
            return Ok(false);
        }
        if !std::mem::replace(&mut self.began, true) && self.inbox.starts_with(PLAIN) {
            let _ = tcp::send(fd, &[IoSlice::new(&TO_PLAIN)]);
            return Err(LinkError::Refused(
                "a side without keys has connected: set cluster.authentication there as here"
                    .to_owned(),
            ));
        }
        Ok(true)
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
            if !matches!(self.way, Way::Encrypted) {
                let got = self.read_records(fd, drained, dst, max)?;
                if got > 0 || !matches!(self.way, Way::Encrypted) {
                    return Ok(got);
                }
            }
            let got = self.take(dst, max)?;
            if got > 0 {
                return Ok(got);
            }
            if self.start < self.inbox.len() {
                self.digest(fd)?;
                continue;
            }
            if *drained || !self.fill(fd, drained)? {
                return Ok(0);
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
        self.settle()
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
