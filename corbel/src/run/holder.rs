//! The descriptor holder: keeps the kernel's open file descriptions that programs of a session
//! share, so that a description given to the kernel by one of them is the same one for all. It also looks at the
//! programs and libraries that they map (directory.rs).
//!
//! One request a connection (SOCK_SEQPACKET, abstract address), 16 bytes of native integers:
//! operation (1 put, 2 get, 3 drop), description, generation, 0; or 4 (look), the session's secret, 0, 0. Every request is
//! answered by 16 bytes, a look when the files that came with it are entered; the answer to a get that succeeds
//! carries the descriptor.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use corbel_input::format::ASKED_MAX;

use super::directory::Directory;
use crate::failure::{Context as _, Result};

const PUT: u32 = 1;
const GET: u32 = 2;
const DROP: u32 = 3;
const LOOK: u32 = 4;
/// Descriptors kept; more are refused, and their sharers reopen.
const KEPT_MAX: usize = 4096;

/// Requests of other users answered at a time.
const STRANGERS_MAX: usize = 16;

type Kept = HashMap<u32, (u32, OwnedFd)>;

/// A holder that does not answer yet.
pub struct Holder {
    socket: OwnedFd,
    /// Its abstract address without the leading NUL.
    pub name: Vec<u8>,
}

/// Makes the holder's socket.
pub fn bind() -> Result<Holder> {
    let name = format!("corbel-run-{}-{}", rustix::process::getuid().as_raw(), std::process::id());
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(std::io::Error::from)
            .context("making the holder's socket")?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(std::io::Error::from)
        .context(&name)?;
    net::bind(&socket, &address).map_err(std::io::Error::from).context(&name)?;
    net::listen(&socket, 64).map_err(std::io::Error::from).context(&name)?;
    Ok(Holder { socket, name: name.into_bytes() })
}

impl Holder {
    /// Answers, in a thread of its own.
    pub fn start(self, directory: Directory, secret: u32) {
        let desk = Arc::new(Desk { directory, secret, strangers: AtomicUsize::new(0) });
        std::thread::spawn(move || {
            let mut kept = Kept::new();
            loop {
                let Ok(peer) = net::accept_with(&self.socket, SocketFlags::CLOEXEC) else {
                    continue;
                };
                if let Err(error) = desk.receive(peer, &mut kept) {
                    log::debug!("holder: {error}");
                }
            }
        });
    }
}

/// What those who answer share.
struct Desk {
    directory: Directory,
    secret: u32,
    /// Requests of other users under way.
    strangers: AtomicUsize,
}

impl Desk {
    fn receive(self: &Arc<Self>, peer: OwnedFd, kept: &mut Kept) -> rustix::io::Result<()> {
        let uid = sockopt::socket_peercred(&peer)?.uid;
        if uid == rustix::process::getuid() || uid.is_root() {
            let request = Request::receive(peer)?;
            if request.op == LOOK {
                // It may take a second, of a very large program that was never seen before.
                let desk = self.clone();
                std::thread::spawn(move || desk.look(request));
                return Ok(());
            }
            return request.keep(kept);
        }
        // A process of the session may have become somebody else; nobody waits for others who call.
        if self.strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS_MAX {
            self.strangers.fetch_sub(1, Ordering::Relaxed);
            return Err(rustix::io::Errno::ACCESS);
        }
        let desk = self.clone();
        std::thread::spawn(move || {
            if let Ok(request) = Request::receive(peer)
                && request.op == LOOK
            {
                desk.look(request);
            }
            desk.strangers.fetch_sub(1, Ordering::Relaxed);
        });
        Ok(())
    }

    fn look(&self, request: Request) {
        // Who knows the secret is of the session.
        if request.index != self.secret {
            return;
        }
        for fd in request.fds {
            self.directory.look_at(&fd.into());
        }
        let _ = reply(&request.peer, &request.body, None);
    }
}

struct Request {
    peer: OwnedFd,
    body: [u8; 16],
    op: u32,
    index: u32,
    generation: u32,
    fds: Vec<OwnedFd>,
}

impl Request {
    fn receive(peer: OwnedFd) -> rustix::io::Result<Self> {
        let patience = std::time::Duration::from_secs(1);
        sockopt::set_socket_timeout(&peer, sockopt::Timeout::Recv, Some(patience))?;
        let mut body = [0u8; 16];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ASKED_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        let got = net::recvmsg(
            &peer,
            &mut [IoSliceMut::new(&mut body)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.bytes != body.len() {
            return Err(rustix::io::Errno::INVAL);
        }
        let word = |i: usize| u32::from_le_bytes([body[i], body[i + 1], body[i + 2], body[i + 3]]);
        Ok(Self { peer, body, op: word(0), index: word(4), generation: word(8), fds })
    }

    fn keep(mut self, kept: &mut Kept) -> rustix::io::Result<()> {
        let (index, generation) = (self.index, self.generation);
        let mut answer = None;
        match self.op {
            PUT if kept.len() < KEPT_MAX => {
                if let Some(fd) = self.fds.pop() {
                    kept.insert(index, (generation, fd));
                }
            }
            GET => answer = kept.get(&index).filter(|(g, _)| *g == generation),
            DROP if kept.get(&index).is_some_and(|(g, _)| *g == generation) => {
                kept.remove(&index);
            }
            _ => {}
        }
        reply(&self.peer, &self.body, answer.map(|(_, fd)| fd.as_fd()))
    }
}

fn reply(peer: &OwnedFd, body: &[u8], fd: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    net::sendmsg(peer, &[IoSlice::new(body)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
