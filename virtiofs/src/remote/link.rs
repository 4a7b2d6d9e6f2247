//! How the bytes of a connection go: as they are over a Unix socket of this machine, whose other end the kernel names; over TCP in
//! TLS, with the certificates of the cluster.

use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use cluster::tls::{Alone, Keys, Role};
use rustix::io::Errno;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);

/// Where the other side is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// A socket of this machine.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String),
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let port = text
            .rsplit_once(':')
            .and_then(|(host, port)| (!host.is_empty()).then(|| port.parse::<u16>().ok())?);
        port.map(|_| Self::Tcp(text.into()))
            .ok_or_else(|| format!("{text}: a path that begins with /, or HOST:PORT"))
    }
}

/// Who both sides are, where the kernel does not say it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Our keys.
    pub keys: Keys,
    /// Who must be at the other end of a connection. One that we make has to have a name here; others may come from anybody with a
    /// certificate of the cluster, if this is None.
    pub peer: Option<Role>,
}

/// A connection.
pub(super) struct Link {
    socket: OwnedFd,
    tls: Option<Alone>,
    /// Who alone may be at the other end.
    peer: Option<Role>,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Link {
    fn plain(stream: UnixStream) -> Result<Self, String> {
        let who = rustix::net::sockopt::socket_peercred(&stream).map_err(text)?;
        let own = rustix::process::geteuid();
        if who.uid != own && !who.uid.is_root() {
            return Err(format!("user {} is at the other end", who.uid.as_raw()));
        }
        stream.set_nonblocking(true).map_err(text)?;
        Ok(Self { socket: stream.into(), tls: None, peer: None })
    }

    fn secret(stream: TcpStream, tls: Alone, peer: Option<Role>) -> Result<Self, String> {
        stream.set_nodelay(true).map_err(text)?;
        stream.set_nonblocking(true).map_err(text)?;
        Ok(Self { socket: stream.into(), tls: Some(tls), peer })
    }

    /// Makes a connection.
    pub fn dial(address: &Address, identity: Option<&Identity>) -> Result<Self, String> {
        match address {
            Address::Unix(path) => Self::plain(UnixStream::connect(path).map_err(text)?),
            Address::Tcp(name) => {
                let identity = identity.ok_or("without keys nobody is spoken to over TCP")?;
                let peer = identity.peer.ok_or("over TCP it is to be said who is there")?;
                let mut last = format!("{name}: no such address");
                for address in name.to_socket_addrs().map_err(text)? {
                    match TcpStream::connect_timeout(&address, CONNECT) {
                        Ok(stream) => {
                            let tls = Alone::dial(&identity.keys, peer);
                            return Self::secret(stream, tls.map_err(text)?, Some(peer));
                        }
                        Err(error) => last = format!("{address}: {error}"),
                    }
                }
                Err(last)
            }
        }
    }

    /// Who is at the other end, once it has said something.
    pub fn role(&self) -> Option<Role> {
        self.tls.as_ref().and_then(Alone::role)
    }

    /// Whether that is somebody who may be there; in words if not.
    pub fn check_role(&self) -> Result<(), String> {
        let (Some(meant), role) = (self.peer, self.role()) else { return Ok(()) };
        match role {
            Some(role) if role == meant => Ok(()),
            Some(role) => Err(format!("{role} is at the other end, not {meant}")),
            None => Err(format!("nobody knows whether it is {meant} at the other end")),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Appends what is there to `to`; false when nothing is.
    pub fn read(&mut self, to: &mut Vec<u8>, max: usize) -> Result<bool, String> {
        let fd = self.socket.as_fd();
        if let Some(tls) = &mut self.tls {
            return Ok(tls.read(fd, to, max).map_err(text)? > 0);
        }
        let begin = to.len();
        to.resize(begin + max.min(256 << 10), 0);
        let got = rustix::io::read(fd, &mut to[begin..]);
        to.truncate(begin + got.unwrap_or(0));
        match got {
            Ok(0) => Err("closed by the other side".into()),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(text(error)),
        }
    }

    /// Takes as much of `bytes` as there is room for.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let fd = self.socket.as_fd();
        if let Some(tls) = &mut self.tls {
            return tls.write(fd, bytes).map_err(text);
        }
        // Nobody needs a signal to know that the other side is gone.
        match rustix::net::send(fd, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(took) => Ok(took),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => Err(text(error)),
        }
    }

    /// Moves on what was taken and waits for room in the socket; whether some is left.
    pub fn flush(&mut self) -> Result<bool, String> {
        let fd = self.socket.as_fd();
        self.tls.as_mut().map_or(Ok(false), |tls| tls.flush(fd).map_err(text))
    }
}

/// Where connections come in.
#[derive(Debug)]
pub enum Listener {
    /// On this machine.
    Unix(UnixListener),
    /// From others, who must show a certificate.
    Tcp(TcpListener, Box<Identity>),
}

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    /// It is taken, or there are no keys for TCP.
    pub fn bind(address: &Address, identity: Option<Identity>) -> Result<Self, String> {
        match address {
            Address::Unix(path) => {
                let listener = UnixListener::bind(path);
                listener.map(Self::Unix).map_err(|e| format!("{}: {e}", path.display()))
            }
            Address::Tcp(name) => {
                let identity = identity.ok_or("without keys nobody is listened to over TCP")?;
                let listener = TcpListener::bind(name).map_err(|e| format!("{name}: {e}"))?;
                Ok(Self::Tcp(listener, Box::new(identity)))
            }
        }
    }

    /// The next connection.
    pub(super) fn accept(&self) -> Result<Link, String> {
        match self {
            Self::Unix(listener) => Link::plain(listener.accept().map_err(text)?.0),
            Self::Tcp(listener, identity) => {
                let (stream, _) = listener.accept().map_err(text)?;
                let tls = Alone::answer(&identity.keys).map_err(text)?;
                Link::secret(stream, tls, identity.peer)
            }
        }
    }
}
