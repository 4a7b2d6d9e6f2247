//! The descriptor holder: keeps the kernel's open file descriptions that programs of a session
//! share, so that a description given to the kernel by one of them is the same one for all. It also looks at the
//! programs and libraries that they map (directory.rs).
//!
//! One request a connection (SOCK_SEQPACKET, abstract address), 20 bytes of native integers: operation (1 put, 2 get,
//! 3 drop, 4 look), description, generation, the number of the state (of a look 0, 0, 0), the session's secret. What is
//! done is answered by the same 20 bytes, a look when the files that came with it are entered; the answer to a get
//! carries the descriptor, if one is kept. What is refused (a put without room, a look by who does not know the secret) is not
//! answered: its connection ends.
//!
//! A descriptor is kept for a user, the one that a process said it is: any of its real, effective and saved one, of which the kernel vouches
//! (SCM_CREDENTIALS). So processes that share a description get the same one whatever effective user each has for the moment.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
/// Bytes of a request, and of an answer.
const BODY: usize = 20;
/// Descriptors kept for the session's own user, and for each other; more are refused, and stay where they are.
const KEPT_MAX: usize = 4096;
const KEPT_FOR_OTHERS: usize = 512;
/// Other users for whom descriptors are kept.
const OTHERS_MAX: usize = 64;

/// Requests of other users answered at a time.
const STRANGERS_MAX: usize = 16;

/// By state and description: generation, descriptor.
type Kept = HashMap<(u32, u32), (u32, OwnedFd)>;
/// Of each user, who gets nothing of another's.
type KeptOf = HashMap<u32, Kept>;

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
    // Of each request, also of one that comes before its connection is looked at.
    sockopt::set_socket_passcred(&socket, true).map_err(std::io::Error::from).context(&name)?;
    net::bind(&socket, &address).map_err(std::io::Error::from).context(&name)?;
    net::listen(&socket, 64).map_err(std::io::Error::from).context(&name)?;
    Ok(Holder { socket, name: name.into_bytes() })
}

impl Holder {
    /// Answers, in a thread of its own.
    pub fn start(self, directory: Directory, secret: u32) {
        let (strangers, kept) = (AtomicUsize::new(0), Mutex::default());
        let desk = Arc::new(Desk { directory, secret, strangers, kept });
        std::thread::spawn(move || {
            loop {
                let Ok(peer) = net::accept_with(&self.socket, SocketFlags::CLOEXEC) else {
                    continue;
                };
                if let Err(error) = desk.receive(peer) {
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
    kept: Mutex<KeptOf>,
}

impl Desk {
    fn receive(self: &Arc<Self>, peer: OwnedFd) -> rustix::io::Result<()> {
        let uid = sockopt::socket_peercred(&peer)?.uid;
        if uid == rustix::process::getuid() || uid.is_root() {
            let request = Request::receive(peer)?;
            if request.op == LOOK {
                // It may take a second, of a very large program that was never seen before.
                let desk = self.clone();
                std::thread::spawn(move || desk.look(request));
                return Ok(());
            }
            return self.keep(request.said.unwrap_or(uid).as_raw(), request);
        }
        // A process of the session may have become somebody else, and has a session of its own since; nobody waits for
        // others who call.
        if self.strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS_MAX {
            self.strangers.fetch_sub(1, Ordering::Relaxed);
            return Err(rustix::io::Errno::ACCESS);
        }
        let desk = self.clone();
        std::thread::spawn(move || {
            if let Ok(request) = Request::receive(peer) {
                match request.op {
                    LOOK => desk.look(request),
                    _ => drop(desk.keep(request.said.unwrap_or(uid).as_raw(), request)),
                }
            }
            desk.strangers.fetch_sub(1, Ordering::Relaxed);
        });
        Ok(())
    }

    /// Keeps, gives or drops a descriptor of that user's. The last process that shares a description may have become
    /// somebody else since it was put here: who knows the secret drops it whoever has put it.
    fn keep(&self, uid: u32, mut request: Request) -> rustix::io::Result<()> {
        let (key, generation) = ((request.state, request.index), request.generation);
        let own = uid == rustix::process::getuid().as_raw();
        let most = if own { KEPT_MAX } else { KEPT_FOR_OTHERS };
        let mut all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if request.op == DROP && request.secret == self.secret {
            for kept in all.values_mut() {
                kept.retain(|at, (g, _)| *at != key || *g != generation);
            }
            all.retain(|_, kept| !kept.is_empty());
            drop(all);
            return reply(&request.peer, &request.body, None);
        }
        if !all.contains_key(&uid) && all.len() > OTHERS_MAX {
            return Err(rustix::io::Errno::NFILE);
        }
        let kept = all.entry(uid).or_default();
        let mut answer = None;
        match request.op {
            // Without an answer, who asked knows that nothing is kept.
            PUT => match request.fds.pop() {
                Some(fd) if kept.len() < most => drop(kept.insert(key, (generation, fd))),
                _ => return Err(rustix::io::Errno::NFILE),
            },
            GET => answer = kept.get(&key).filter(|(g, _)| *g == generation),
            _ => {}
        }
        let answer = answer.map(|(_, fd)| fd.try_clone()).transpose();
        if kept.is_empty() {
            all.remove(&uid);
        }
        drop(all);
        let answer = answer.map_err(|_| rustix::io::Errno::MFILE)?;
        reply(&request.peer, &request.body, answer.as_ref().map(OwnedFd::as_fd))
    }

    fn look(&self, request: Request) {
        // Who knows the secret is of the session.
        if request.secret != self.secret {
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
    body: [u8; BODY],
    op: u32,
    index: u32,
    generation: u32,
    state: u32,
    secret: u32,
    fds: Vec<OwnedFd>,
    /// Who it says it is.
    said: Option<rustix::process::Uid>,
}

impl Request {
    fn receive(peer: OwnedFd) -> rustix::io::Result<Self> {
        let patience = std::time::Duration::from_secs(1);
        sockopt::set_socket_timeout(&peer, sockopt::Timeout::Recv, Some(patience))?;
        let mut body = [0u8; BODY];
        let mut room =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ASKED_MAX), ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        let got = net::recvmsg(
            &peer,
            &mut [IoSliceMut::new(&mut body)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let (mut fds, mut said) = (Vec::new(), None);
        for message in ancillary.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
                RecvAncillaryMessage::ScmCredentials(who) => said = Some(who.uid),
                _ => {}
            }
        }
        if got.bytes != body.len() {
            return Err(rustix::io::Errno::INVAL);
        }
        let word = |i: usize| u32::from_le_bytes([body[i], body[i + 1], body[i + 2], body[i + 3]]);
        Ok(Self {
            peer,
            body,
            op: word(0),
            index: word(4),
            generation: word(8),
            state: word(12),
            secret: word(16),
            fds,
            said,
        })
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
