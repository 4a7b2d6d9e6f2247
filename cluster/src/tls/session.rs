//! One connection's TLS: ciphertext on the socket's side, bytes of frames on ours.
//!
//! The handshake goes on by itself as bytes are read, on a thread of its own where there is one ([`pool`](super::pool)): then
//! this has nothing to give until it is back. What is written before it is over waits. Memory is bounded by
//! [`INBOX`], [`PENDING`] and one record in each direction, whatever the other side sends or does not take.

use std::io::{BufRead, ErrorKind, IoSlice, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection, Connection, Error, ServerConnection};

use super::keys::{self, Fingerprint, Keys, name_of};
use super::pool::{Pool, Slot, work};
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
    /// Ours, unless the pool has it.
    tls: Option<Box<Connection>>,
    /// Where it comes back to.
    away: Option<Arc<Slot>>,
    pool: Option<Pool>,
    /// What was written before the handshake was over.
    early: Vec<u8>,
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
    /// The handshake will tell. Until then it is fed record by record, so that nothing is taken for TLS that is not.
    Open,
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

pub(super) fn failed(error: &Error) -> LinkError {
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
    fn new(mut tls: Connection, encrypts: bool, pool: Option<&Pool>) -> Self {
        let way = if encrypts { Way::Encrypted } else { Way::Open };
        tls.set_buffer_limit(Some(PENDING));
        Self {
            tls: Some(Box::new(tls)),
            away: None,
            pool: pool.cloned(),
            early: Vec::new(),
            inbox: Vec::new(),
            start: 0,
            began: false,
            peer: None,
            way,
        }
    }

    /// Begins to speak to whom the caller means.
    pub fn dial(keys: &Keys, whom: Role, pool: Option<&Pool>) -> Result<Self, LinkError> {
        let wrong = |e: String| LinkError::Io(format!("TLS: {e}"));
        let name = ServerName::try_from(whom.to_string()).map_err(|e| wrong(e.to_string()))?;
        let loaded = keys.fresh();
        let client =
            ClientConnection::new(loaded.client.clone(), name).map_err(|e| wrong(e.to_string()))?;
        Ok(Self::new(client.into(), keys.encrypts(), pool))
    }

    /// Expects somebody to speak.
    pub fn answer(keys: &Keys, pool: Option<&Pool>) -> Result<Self, LinkError> {
        let server = ServerConnection::new(keys.fresh().server.clone())
            .map_err(|e| LinkError::Io(format!("TLS: {e}")))?;
        Ok(Self::new(server.into(), keys.encrypts(), pool))
    }

    /// Who is at the other end; known when the first byte of a frame is.
    pub fn role(&self) -> Option<Role> {
        self.peer.as_ref().map(|(name, _)| name.role)
    }

    /// Whether the other end's certificate has been revoked since.
    pub fn is_revoked(&self, loaded: &keys::Loaded) -> bool {
        self.peer.as_ref().is_some_and(|(_, fingerprint)| loaded.has_revoked(fingerprint))
    }

    /// Whether a part of the handshake is being done elsewhere: until it is back nothing is read.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Whether a part of the handshake is done, and there may be something to read.
    pub fn is_back(&self) -> bool {
        self.away.as_ref().is_some_and(|slot| slot.is_ready())
    }

    /// Whether something waits for room in the socket.
    pub fn is_pending(&self) -> bool {
        let signed =
            matches!(&self.way, Way::Signed { signed, .. } if !signed.pending().is_empty());
        signed || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Moves what is ready to the socket. True if some is left.
    pub fn flush(&mut self, fd: BorrowedFd<'_>) -> Result<bool, LinkError> {
        while let Some(tls) = self.tls.as_mut().filter(|tls| tls.wants_write()) {
            match tls.write_tls(&mut Out(fd)) {
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
        match (&mut self.way, &mut self.tls) {
            (Way::Encrypted, Some(tls)) if self.early.is_empty() => {
                Ok(tls.writer().write_vectored(parts).unwrap_or(0))
            }
            (Way::Encrypted | Way::Open, _) => {
                let room = PENDING.saturating_sub(self.early.len());
                let part = parts.iter().find(|part| !part.is_empty());
                let part = part.map_or(&[][..], |part| &part[..part.len().min(room)]);
                self.early.extend_from_slice(part);
                Ok(part.len())
            }
            (Way::Signed { signed, .. }, _) => {
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
        let Some(tls) = self.tls.as_mut().filter(|tls| !tls.is_handshaking()) else {
            return Ok(());
        };
        if self.peer.is_none() {
            self.peer = tls.peer_certificates().and_then(|chain| {
                let first = chain.first()?;
                Some((name_of(first).ok()?, keys::fingerprint(first)))
            });
        }
        if matches!(self.way, Way::Signed { .. })
            || matches!(self.way, Way::Encrypted) && self.early.is_empty()
        {
            return Ok(());
        }
        let early = std::mem::take(&mut self.early);
        if matches!(self.way, Way::Open) && tls.alpn_protocol() == Some(keys::SIGNED) {
            let mut signed = Box::new(Signed::new(tls)?);
            let mut at = 0;
            while at < early.len() {
                at += signed.write(&[&early[at..]])?;
            }
            self.way = Way::Signed { signed, left: 0..0, end: 0 };
        } else {
            self.way = Way::Encrypted;
            // It takes as much as this side keeps.
            let taken = tls.writer().write(&early).unwrap_or(0);
            if taken < early.len() {
                return Err(LinkError::Io("too much was said before the handshake".to_owned()));
            }
        }
        Ok(())
    }

    /// Takes back what the pool has done. False if it has it still.
    fn come_back(&mut self, fd: BorrowedFd<'_>) -> Result<bool, LinkError> {
        let Some(slot) = &self.away else { return Ok(true) };
        let Some(back) = slot.take() else { return Ok(false) };
        self.away = None;
        self.tls = Some(back.tls);
        self.go_on(fd, back.used, back.outcome)?;
        Ok(true)
    }

    /// Goes on after a part of a handshake, or of what comes after it.
    fn go_on(
        &mut self,
        fd: BorrowedFd<'_>,
        used: usize,
        outcome: Result<bool, LinkError>,
    ) -> Result<(), LinkError> {
        self.start += used;
        // Its part of the handshake, or why it does not go on.
        let flushed = self.flush(fd);
        let has_bytes = outcome?;
        flushed?;
        let alpn = self.tls.as_ref().and_then(|tls| tls.alpn_protocol());
        if has_bytes && !matches!(self.way, Way::Encrypted) && alpn == Some(keys::SIGNED) {
            return Err(LinkError::Protocol(
                "TLS came where signed records were agreed on".to_owned(),
            ));
        }
        self.settle()?;
        self.flush(fd).map(|_| ())
    }

    /// Gives TLS what was read, up to `end`. What belongs to a handshake is done elsewhere, if there is a place: then there is
    /// nothing more to do now, and the answer is false.
    fn digest(&mut self, fd: BorrowedFd<'_>, end: usize) -> Result<bool, LinkError> {
        let Some(mut tls) = self.tls.take() else { return Ok(false) };
        let bytes = &self.inbox[self.start..end];
        if let Some(pool) = self.pool.as_ref().filter(|_| tls.is_handshaking()) {
            self.away = Some(pool.give(tls, bytes.to_vec()));
            return Ok(false);
        }
        let (used, outcome) = work(&mut tls, bytes);
        self.tls = Some(tls);
        self.go_on(fd, used, outcome)?;
        Ok(true)
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
                    let here = self.digest(fd, self.start + len)?;
                    if !here || matches!(self.way, Way::Encrypted) {
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
            if !self.come_back(fd)? {
                return Ok(0);
            }
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
                if !self.digest(fd, self.inbox.len())? {
                    return Ok(0);
                }
                continue;
            }
            if *drained || !self.fill(fd, drained)? {
                return Ok(0);
            }
        }
    }

    /// Plaintext that is there.
    fn take(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        let Some(tls) = &mut self.tls else { return Ok(0) };
        let mut reader = tls.reader();
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
