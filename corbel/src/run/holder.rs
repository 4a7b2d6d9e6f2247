//! The descriptor holder: keeps the kernel's open file descriptions that programs of a session
//! share, so that a description given to the kernel by one of them is the same one for all.
//!
//! One request a connection (SOCK_SEQPACKET, abstract address), 16 bytes of native integers:
//! operation (1 put, 2 get, 3 drop), description, generation, 0. Every request is answered by 16
//! bytes; the answer to a get that succeeds carries the descriptor.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::failure::{Context as _, Result};

const PUT: u32 = 1;
const GET: u32 = 2;
const DROP: u32 = 3;
/// Descriptors kept; more are refused, and their sharers reopen.
const KEPT_MAX: usize = 4096;

type Kept = HashMap<u32, (u32, OwnedFd)>;

/// Starts the holder in a thread; its abstract address without the leading NUL.
pub fn start() -> Result<Vec<u8>> {
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
    std::thread::spawn(move || {
        let mut kept = Kept::new();
        loop {
            let Ok(peer) = net::accept_with(&socket, SocketFlags::CLOEXEC) else { continue };
            if let Err(error) = serve(&peer, &mut kept) {
                log::debug!("holder: {error}");
            }
        }
    });
    Ok(name.into_bytes())
}

fn serve(peer: &OwnedFd, kept: &mut Kept) -> rustix::io::Result<()> {
    let uid = sockopt::socket_peercred(peer)?.uid;
    if uid != rustix::process::getuid() && !uid.is_root() {
        return Err(rustix::io::Errno::ACCESS);
    }
    let patience = std::time::Duration::from_secs(1);
    sockopt::set_socket_timeout(peer, sockopt::Timeout::Recv, Some(patience))?;
    let mut body = [0u8; 16];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let got = net::recvmsg(
        peer,
        &mut [IoSliceMut::new(&mut body)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut passed = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            passed = fds.last();
        }
    }
    if got.bytes != body.len() {
        return Err(rustix::io::Errno::INVAL);
    }
    let word = |i: usize| u32::from_le_bytes([body[i], body[i + 1], body[i + 2], body[i + 3]]);
    let (op, index, generation) = (word(0), word(4), word(8));
    let mut answer = None;
    match op {
        PUT if kept.len() < KEPT_MAX => {
            if let Some(fd) = passed {
                kept.insert(index, (generation, fd));
            }
        }
        GET => answer = kept.get(&index).filter(|(g, _)| *g == generation),
        DROP if kept.get(&index).is_some_and(|(g, _)| *g == generation) => {
            kept.remove(&index);
        }
        _ => {}
    }
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    let fds = answer.map(|(_, fd)| [fd.as_fd()]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    net::sendmsg(peer, &[IoSlice::new(&body)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
