//! Listening sockets, and a thread for each connection.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};

use super::connection::{self, Bounds, Common, Handle};

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// An address of TCP; port 0: any free one.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at the same time; more are closed at once.
    pub connections: usize,
    /// Bounds of each.
    pub bounds: Bounds,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 128, bounds: Bounds::default() }
    }
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    fn bind(address: &Address) -> io::Result<Self> {
        Ok(match address {
            Address::Tcp(address) => Self::Tcp(TcpListener::bind(address)?),
            Address::Unix(path) => {
                remove_dead(path)?;
                Self::Unix(UnixListener::bind(path)?, path.clone())
            }
        })
    }

    fn address(&self) -> io::Result<Address> {
        Ok(match self {
            Self::Tcp(listener) => Address::Tcp(listener.local_addr()?),
            Self::Unix(_, path) => Address::Unix(path.clone()),
        })
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener, _) => listener.set_nonblocking(true),
        }
    }

    /// A connection, with who it is for the log.
    fn accept(&self) -> io::Result<(OwnedFd, String)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok((stream.into(), peer.to_string()))
            }
            Self::Unix(listener, path) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok((stream.into(), path.display().to_string()))
            }
        }
    }
}

/// A socket at which nobody listens any more is in the way.
fn remove_dead(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// A running server. Ends when dropped: connections are ended, what is in flight is carried out first.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<Address>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds every address and begins to serve.
    pub fn start(common: Common, listen: &[Address], limits: Limits) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for address in listen {
            let listener = Listener::bind(address)
                .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
            listener.set_nonblocking()?;
            listeners.push(listener);
        }
        let addresses = listeners.iter().map(Listener::address).collect::<Result<_, _>>()?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let ended = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || accept(common, &listeners, &ended, limits.connections))?;
        Ok(Self { addresses, stop, thread: Some(thread) })
    }

    /// Where it listens, ports as they are.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &[1, 0, 0, 0, 0, 0, 0, 0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for address in &self.addresses {
            if let Address::Unix(path) = address {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

type Running = (JoinHandle<()>, Weak<Handle>);

fn accept(common: Common, listeners: &[Listener], stop: &OwnedFd, connections_max: usize) {
    let common = Arc::new(common);
    let running: Mutex<Vec<Running>> = Mutex::default();
    'serve: loop {
        let mut fds: Vec<PollFd<'_>> =
            listeners.iter().map(|l| PollFd::from_borrowed_fd(l.fd(), PollFlags::IN)).collect();
        fds.push(PollFd::new(stop, PollFlags::IN));
        if let Err(error) = poll(&mut fds, None)
            && error != rustix::io::Errno::INTR
        {
            log::error!("nbd: waiting for connections: {error}");
            break;
        }
        if fds.last().is_some_and(|fd| fd.revents().contains(PollFlags::IN)) {
            break;
        }
        for listener in listeners {
            match listener.accept() {
                Ok((socket, peer)) => admit(&common, &running, connections_max, socket, &peer),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors, most likely: some connection may end.
                    log::warn!("nbd: accepting a connection: {error}");
                    std::thread::sleep(Duration::from_millis(100));
                    continue 'serve;
                }
            }
        }
    }
    let running = running.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (_, handle) in &running {
        if let Some(handle) = handle.upgrade() {
            handle.end();
        }
    }
    for (thread, _) in running {
        let _ = thread.join();
    }
}

fn admit(
    common: &Arc<Common>,
    running: &Mutex<Vec<Running>>,
    connections_max: usize,
    socket: OwnedFd,
    peer: &str,
) {
    let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
    running.retain(|(thread, _)| !thread.is_finished());
    if running.len() >= connections_max {
        log::warn!("nbd: {peer}: refused: there are {connections_max} connections already");
        return;
    }
    let started = Handle::new(&socket).and_then(|handle| {
        let (common, own) = (Arc::clone(common), Arc::clone(&handle));
        let thread = std::thread::Builder::new()
            .name("nbd".into())
            .spawn(move || connection::serve(&common, socket, &own))?;
        Ok((thread, Arc::downgrade(&handle)))
    });
    match started {
        Ok(started) => running.push(started),
        Err(error) => log::warn!("nbd: {peer}: {error}"),
    }
}
