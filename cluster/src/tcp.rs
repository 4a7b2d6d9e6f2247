//! Stream sockets: TCP between hosts, and the local socket over which rings are agreed on.
#![allow(unsafe_code)] // Bytes are received into the spare capacity of vectors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::decode::{LinkError, Source};
use crate::limits::TCP_DEAD;
use crate::queue::Sink;
use crate::tls::session::Session;

/// Longest path of a local socket (`sun_path` with its NUL).
const SOCKET_PATH_MAX: usize = 107;
const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

fn failed(errno: Errno) -> LinkError {
    match errno {
        Errno::CONNRESET | Errno::PIPE => LinkError::Closed,
        other => LinkError::Io(other.to_string()),
    }
}

/// One turn of reading from, or writing to, a stream socket; through TLS, if there is a session.
#[derive(Debug)]
pub struct Stream<'a> {
    fd: BorrowedFd<'a>,
    session: Option<&'a mut Session>,
    /// The last read got less than it asked for: another would find nothing.
    drained: bool,
}

impl<'a> Stream<'a> {
    pub fn new(fd: BorrowedFd<'a>, session: Option<&'a mut Session>) -> Self {
        Self { fd, session, drained: false }
    }
}

/// Appends at most `max` bytes to `dst`, within its capacity. `drained` is set if another call would find nothing.
pub fn receive(
    fd: BorrowedFd<'_>,
    drained: &mut bool,
    dst: &mut Vec<u8>,
    max: usize,
) -> Result<usize, LinkError> {
    if *drained {
        return Ok(0);
    }
    let spare = dst.spare_capacity_mut();
    let max = max.min(spare.len());
    match rustix::net::recv(fd, &mut spare[..max], RecvFlags::empty()) {
        Ok((_, 0)) => Err(LinkError::Closed),
        Ok((_, got)) => {
            let got = got.min(max);
            *drained = got < max;
            // SAFETY: the kernel has initialised `got` bytes after the end of `dst`, within
            // its capacity.
            unsafe { dst.set_len(dst.len() + got) };
            Ok(got)
        }
        Err(Errno::AGAIN | Errno::INTR) => {
            *drained = true;
            Ok(0)
        }
        Err(errno) => Err(failed(errno)),
    }
}

/// Sends what there is room for; 0: none now.
pub fn send(fd: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
    let mut control = SendAncillaryBuffer::default();
    match rustix::net::sendmsg(fd, parts, &mut control, SendFlags::NOSIGNAL) {
        Ok(sent) => Ok(sent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(errno) => Err(failed(errno)),
    }
}

impl Source for Stream<'_> {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        match &mut self.session {
            Some(session) => session.read(self.fd, &mut self.drained, dst, max),
            None => receive(self.fd, &mut self.drained, dst, max),
        }
    }
}

impl Sink for Stream<'_> {
    fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
        match &mut self.session {
            Some(session) => session.write(self.fd, parts),
            None => send(self.fd, parts),
        }
    }
}

/// Says nothing more, so that the other side reads what was said last before it sees the end: what it has sent and
/// nobody has read would take that from it.
pub fn end_speaking(fd: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
}

/// Takes what has come, and drops it. Closed if the other side is gone.
pub fn discard(fd: BorrowedFd<'_>) -> Result<(), LinkError> {
    let mut bytes = [0u8; 4096];
    match rustix::net::recv(fd, &mut bytes[..], RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Err(LinkError::Closed),
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

/// Who is at the other end, for the log.
pub fn whence(fd: BorrowedFd<'_>) -> String {
    let peer = rustix::net::getpeername(fd).ok().flatten();
    let address = peer.and_then(|any| SocketAddr::try_from(any).ok());
    address.map_or_else(|| "this machine".to_owned(), |at| at.to_string())
}

/// Reads from a local socket and keeps a descriptor that comes along; the last one, if several do.
#[derive(Debug)]
pub struct Passing<'a> {
    pub fd: BorrowedFd<'a>,
    pub passed: &'a mut Option<OwnedFd>,
}

impl Source for Passing<'_> {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        let mut bytes = [0u8; 256];
        let max = max.min(bytes.len());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes[..max])];
        let got = rustix::net::recvmsg(
            self.fd,
            &mut slices,
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for fd in fds {
                    *self.passed = Some(fd);
                }
            }
        }
        match got {
            Ok(got) if got.bytes == 0 => Err(LinkError::Closed),
            Ok(got) => {
                dst.extend_from_slice(&bytes[..got.bytes]);
                Ok(got.bytes)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(failed(errno)),
        }
    }
}

/// Sends the first frame of a connection, with a descriptor if there is one. The socket is fresh,
/// so its buffer, or that of the session, has room for all of it.
pub fn send_first(
    fd: BorrowedFd<'_>,
    session: Option<&mut Session>,
    bytes: &[u8],
    pass: Option<BorrowedFd<'_>>,
) -> Result<(), LinkError> {
    if let Some(session) = session {
        return match session.write(fd, &[IoSlice::new(bytes)])? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(LinkError::Io("the hello was sent only in part".to_owned())),
        };
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds;
    if let Some(pass) = pass {
        fds = [pass];
        if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(LinkError::Io("no room to pass a descriptor".to_owned()));
        }
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, flags) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(LinkError::Io("the hello was sent only in part".to_owned())),
        Err(errno) => Err(failed(errno)),
    }
}

/// Empties a local socket of doorbells. Closed if the peer is gone.
pub fn drain(fd: BorrowedFd<'_>) -> Result<(), LinkError> {
    let mut bytes = [0u8; 64];
    loop {
        match rustix::net::recv(fd, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(LinkError::Closed),
            Ok((_, got)) if got < bytes.len() => return Ok(()),
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        }
    }
}

/// Wakes the peer; nothing to do if it has so many wake-ups already that no more fit.
pub fn ring_doorbell(fd: BorrowedFd<'_>) {
    // An error means that the peer is gone, which the event loop is told by epoll.
    let _ = rustix::net::send(fd, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Begins to connect to `address`.
pub fn connect(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::STREAM, FLAGS, None)?;
    tune(&fd)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
        Err(errno) => Err(errno),
    }
}

/// Connects to a local socket; at once or not at all.
pub fn connect_local(path: &Path) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    rustix::net::connect(&fd, &address)?;
    Ok(fd)
}

/// Listens on a local socket, for processes of the same user and of the super-user only ([`is_ours`]). What a killed
/// process has left there goes.
pub fn listen_local(path: &Path) -> std::io::Result<UnixListener> {
    let explain = |error: std::io::Error, what: &str| {
        std::io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
    };
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let text = format!(
            "socket path {} is longer than {SOCKET_PATH_MAX} bytes; use a shorter directory",
            path.display()
        );
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(explain(e, "cannot remove the old socket"));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path)
        .map_err(|e| explain(e, "cannot listen (does the folder exist?) on"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Whether the process at the other end of a local connection runs as this user, or as the super-user. The kernel says so
/// (SO_PEERCRED): nobody else has anything to say to a service.
pub fn is_ours(fd: &OwnedFd) -> bool {
    let uid = sockopt::socket_peercred(fd).map(|peer| peer.uid);
    uid.is_ok_and(|uid| uid.is_root() || uid == rustix::process::geteuid())
}

/// Takes a waiting connection.
pub fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    match rustix::net::accept_with(listener, FLAGS) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// No delay for small frames; a dead host is noticed in [`TCP_DEAD`].
pub fn tune(fd: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(fd, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(fd, 3)?;
    let dead = u32::try_from(TCP_DEAD.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(fd, dead)
}
