//! The descriptor holder: a socket in `corbel run` that keeps one descriptor of each open file description that was
//! given to the kernel, and that looks at files with code when a process asks (objects.rs).
//!
//! A request is 20 bytes of native integers, one a connection: operation, index, generation, the state's number (of LOOK 0,
//! 0, 0), the session's secret. PUT, LOOK and the reply to GET carry descriptors (SCM_RIGHTS). What is done is answered by 20 bytes; what
//! is refused, by the end of the connection.
//!
//! Who asks says that it is whose state it is (SCM_CREDENTIALS), which the kernel lets pass only from somebody who is that user, or can be
//! again: of several processes that share a description one may have another effective user for the moment.
#![allow(unsafe_code)]

use core::sync::atomic::Ordering;

use crate::calls::limit;
use crate::format::ASKED_MAX;
use crate::sys::{self, nr};
use crate::{lock, session, table};

/// Keep the descriptor sent along.
const PUT: u32 = 1;
/// Send it back.
const GET: u32 = 2;
/// Close it.
const DROP: u32 = 3;
/// Enter the files sent along in the session's table.
const LOOK: u32 = 4;

const BODY: usize = 20;
/// No descriptor came; or one did, and there was no number for it.
const NO_DESCRIPTOR: i32 = -1;
const NO_NUMBER: i32 = -2;
/// `struct cmsghdr`.
const CONTROL: usize = 16;
/// With a `struct ucred`, and what it takes up.
const SAID: usize = CONTROL + 12;
const SAID_WORDS: usize = SAID.div_ceil(8);
/// Words of both, with the most descriptors.
const WORDS: usize = SAID_WORDS + (CONTROL + ASKED_MAX * 4) / 8;
/// Kinds of SOL_SOCKET, which is 1.
const SCM_RIGHTS: u64 = 1;
const SCM_CREDENTIALS: u64 = 2;

#[repr(C)]
struct Message {
    name: usize,
    name_len: usize,
    iov: usize,
    iov_len: usize,
    control: usize,
    control_len: usize,
    flags: usize,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// There is no holder, or no way to it.
    Nobody,
    /// It has heard, and said nothing.
    Refused,
    /// It has answered: the descriptor that came with it.
    Came(i32),
}

/// Sends `body` and `fds`, and waits for the answer.
fn ask(mut body: [u32; BODY / 4], fds: &[i32]) -> Answer {
    let header = session::header();
    let name = &header.holder[..header.holder_len as usize];
    if name.is_empty() || fds.len() > ASKED_MAX {
        return Answer::Nobody;
    }
    // SOCK_SEQPACKET | SOCK_CLOEXEC
    let socket = limit::with_room(|| sys::call3(nr::SOCKET, 1, 5 | 0o2_000_000, 0));
    if sys::failed(socket) {
        return Answer::Nobody;
    }
    let socket = table::raise(socket as i32, true);
    let mut address = [0u8; 112];
    address[0] = 1;
    address[3..3 + name.len()].copy_from_slice(name);
    let at = address.as_ptr() as usize;
    let mut reply = Answer::Nobody;
    // When the holder is gone its name is anybody's.
    let connected = sys::call3(nr::CONNECT, socket as usize, at, 3 + name.len()) == 0;
    if connected && peer(socket).is_some_and(|uid| uid == 0 || uid == session::runner()) {
        reply = exchange(socket, &mut body, fds).map_or(Answer::Refused, Answer::Came);
    }
    table::close_internal(socket);
    reply
}

/// The user whom the kernel knows at the other end.
fn peer(socket: i32) -> Option<u32> {
    // pid, uid, gid; SOL_SOCKET, SO_PEERCRED
    let (mut who, mut len) = ([0u32; 3], 12u32);
    let (at, room) = ((&raw mut who) as usize, (&raw mut len) as usize);
    let got = sys::call6(nr::GETSOCKOPT, socket as usize, 1, 17, at, room, 0);
    (got == 0 && len == 12).then_some(who[1])
}

fn exchange(socket: i32, body: &mut [u32; BODY / 4], fds: &[i32]) -> Option<i32> {
    let mut iov = [(&raw mut *body) as usize, BODY];
    // Length, level and kind, and what it is: who asks; descriptors.
    let mut control = [0u64; WORDS];
    let (pid, gid) = (sys::call0(nr::GETPID) as u64, sys::call0(nr::GETGID) as u64);
    control[..2].copy_from_slice(&[SAID as u64, 1 | SCM_CREDENTIALS << 32]);
    control[2..4].copy_from_slice(&[pid | u64::from(session::owner()) << 32, gid]);
    let rights = &mut control[SAID_WORDS..];
    let len = CONTROL + fds.len() * 4;
    rights[..2].copy_from_slice(&[len as u64, 1 | SCM_RIGHTS << 32]);
    for (i, fd) in fds.iter().enumerate() {
        rights[2 + i / 2] |= u64::from(*fd as u32) << (i % 2 * 32);
    }
    let rights_len = if fds.is_empty() { 0 } else { len.next_multiple_of(8) };
    let start = (&raw mut control) as usize;
    let mut message = Message {
        name: 0,
        name_len: 0,
        iov: (&raw mut iov) as usize,
        iov_len: 1,
        control: start,
        control_len: SAID_WORDS * 8 + rights_len,
        flags: 0,
    };
    let at = (&raw mut message) as usize;
    // MSG_NOSIGNAL
    let mut sent = sys::call3(nr::SENDMSG, socket as usize, at, 0x4000);
    if sys::failed(sent) {
        // The kernel does not let it say that: then as who it is.
        message.control = start + SAID_WORDS * 8;
        message.control_len = rights_len;
        sent = sys::call3(nr::SENDMSG, socket as usize, at, 0x4000);
    }
    if sent != BODY as isize {
        return None;
    }
    message.control = start;
    message.control_len = CONTROL + 8;
    // MSG_CMSG_CLOEXEC. The answer also says that what was sent has arrived.
    let got = sys::call3(nr::RECVMSG, socket as usize, at, 0x4000_0000);
    let fd = match message.control_len {
        // MSG_CTRUNC
        _ if message.flags & 8 != 0 => NO_NUMBER,
        0..20 => NO_DESCRIPTOR,
        _ => control[2] as u32 as i32,
    };
    (got == BODY as isize).then_some(fd)
}

fn about(op: u32, index: usize) -> [u32; BODY / 4] {
    let number = session::counters().number.load(Ordering::Relaxed);
    let generation = table::ofd(index).generation.load(Ordering::Acquire);
    [op, index as u32, generation, number, session::header().secret]
}

/// A descriptor of a description for the others who share it; false if the holder has no room for it. (One that is gone has
/// nobody to keep it for.)
pub fn put(index: usize, fd: i32) -> bool {
    !matches!(ask(about(PUT, index), &[fd]), Answer::Refused)
}

/// The descriptor that somebody has put there; protected.
pub fn get(index: usize) -> Option<i32> {
    let mut answer = ask(about(GET, index), &[]);
    if answer == Answer::Came(NO_NUMBER) {
        limit::room(true);
        answer = ask(about(GET, index), &[]);
        limit::room(false);
    }
    let Answer::Came(fd @ 0..) = answer else { return None };
    Some(lock::raise(table::ofd(index).ino.load(Ordering::Acquire), fd))
}

/// The description is no longer referred to.
pub fn forget(index: usize) {
    let _ = ask(about(DROP, index), &[]);
}

/// Has files with code entered in the session's table.
pub fn look_at(fds: &[i32]) {
    let _ = ask([LOOK, 0, 0, 0, session::header().secret], fds);
}
