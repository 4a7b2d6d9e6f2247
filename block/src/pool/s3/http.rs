//! As much of HTTP/1.1 as it takes to ask a server for named bytes: one request at a time on each connection, connections
//! kept for the next, every length bounded, and an end to waiting.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::answer::{Answers, HEAD_MAX, Response, Source};

/// An address that has not taken a connection for so long is left for the next.
const CONNECT: Duration = Duration::from_secs(3);
/// A request is answered within this time, connections that are made for it and a second try included.
const ANSWER: Duration = Duration::from_secs(10);
/// Connections that are kept.
const IDLE_MAX: usize = 8;

enum Stream {
    Plain(TcpStream),
    Tls(Box<rustls::StreamOwned<rustls::ClientConnection, TcpStream>>),
}

impl Stream {
    fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &stream.sock,
        }
    }

    fn as_io(&mut self) -> &mut dyn ReadWrite {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &mut **stream,
        }
    }
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

/// The bytes of a connection.
struct Wire {
    stream: Stream,
    end: Instant,
}

type Connection = Answers<Wire>;

/// The time until then; an error if it is over.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl Wire {
    /// No longer than until the end.
    fn limit(&self) -> io::Result<()> {
        let left = left(self.end)?;
        self.stream.socket().set_read_timeout(Some(left))?;
        self.stream.socket().set_write_timeout(Some(left))
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.limit()?;
            match self.stream.as_io().write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.limit()?;
        self.stream.as_io().flush()
    }
}

impl Source for Wire {
    fn more(&mut self, ahead: &mut Vec<u8>) -> io::Result<bool> {
        let mut piece = [0; 16 << 10];
        loop {
            self.limit()?;
            match self.stream.as_io().read(&mut piece) {
                Ok(n) => {
                    ahead.extend_from_slice(&piece[..n]);
                    return Ok(n > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A request. `head` is everything before the empty line that ends the headers, with `Host` and `Content-Length`.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The request line and the headers, each with its end.
    pub head: &'a str,
    /// The bytes, in parts.
    pub parts: &'a [&'a [u8]],
    /// Whether the answer has no bytes though its headers say how many there would be.
    pub bodiless: bool,
    /// Most bytes that are taken of an answer; a longer one is an error.
    pub most: usize,
}

/// A client of one server.
pub struct Client {
    host: String,
    port: u16,
    tls: Option<Arc<rustls::ClientConfig>>,
    idle: Mutex<Vec<Connection>>,
    answer: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("host", &self.host)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client that has not connected yet.
    pub fn new(host: &str, port: u16, tls: Option<Arc<rustls::ClientConfig>>) -> Self {
        Self { host: host.to_owned(), port, tls, idle: Mutex::default(), answer: ANSWER }
    }

    /// The same with another end to waiting.
    pub fn patient(self, answer: Duration) -> Self {
        Self { answer, ..self }
    }

    fn connect(&self, end: Instant) -> io::Result<Connection> {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT.min(left(end)?)) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    let stream = match &self.tls {
                        None => Stream::Plain(socket),
                        Some(config) => {
                            let name = self.host.clone().try_into().map_err(io::Error::other)?;
                            let tls = rustls::ClientConnection::new(Arc::clone(config), name);
                            let tls = tls.map_err(io::Error::other)?;
                            Stream::Tls(Box::new(rustls::StreamOwned::new(tls, socket)))
                        }
                    };
                    return Ok(Answers::new(Wire { stream, end }));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Asks, and waits for the answer. Requests must be such that asking twice is asking once: a connection that was kept may be
    /// found closed.
    pub fn ask(&self, request: Request<'_>) -> io::Result<Response> {
        let end = Instant::now() + self.answer;
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(mut connection) = kept {
            connection.source.end = end;
            match Self::ask_on(&mut connection, request) {
                Err(error)
                    if !matches!(
                        error.kind(),
                        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
                    ) => {}
                answer => return self.keep(connection, answer),
            }
        }
        let mut connection = self.connect(end)?;
        let answer = Self::ask_on(&mut connection, request);
        self.keep(connection, answer)
    }

    fn keep(
        &self,
        connection: Connection,
        answer: io::Result<(Response, bool)>,
    ) -> io::Result<Response> {
        let (response, again) = answer?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // What came unasked belongs to nothing.
        if again && connection.is_clean() && idle.len() < IDLE_MAX {
            idle.push(connection);
        }
        Ok(response)
    }

    /// The answer, and whether the connection is good for another.
    fn ask_on(connection: &mut Connection, request: Request<'_>) -> io::Result<(Response, bool)> {
        let small: usize = request.parts.iter().map(|part| part.len()).sum();
        let mut head = Vec::with_capacity(request.head.len() + 2 + small.min(HEAD_MAX));
        head.extend_from_slice(request.head.as_bytes());
        head.extend_from_slice(b"\r\n");
        let wire = &mut connection.source;
        if small <= HEAD_MAX {
            request.parts.iter().for_each(|part| head.extend_from_slice(part));
            wire.send(&head)?;
        } else {
            wire.send(&head)?;
            for part in request.parts {
                wire.send(part)?;
            }
        }
        connection.next(request.bodiless, request.most)
    }
}
