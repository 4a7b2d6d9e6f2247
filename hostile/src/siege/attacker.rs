//! A client worked by hand, over the real socket, with real memory: it keeps no rule that it is not made to keep.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::wire::Reader;
use base::{Errno, InodeId, Sequence};
use client::libfs::host::Memory as _;
use client::libfs::linux::{Linux, Mapping};
use client::libfs::log::Log;
use client::libfs::requests::{self, Seen};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use storage::format::control::{self, Descriptor, LeaseMode};
use storage::format::entry::Op;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Granted, InodeReply, Request};

/// Longer than anything here may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Whose clients were expelled again and again waits before the next may attach, half a minute at the most.
const BARRED: Duration = Duration::from_secs(60);
const DESCRIPTORS: usize = 4;

/// A connection to hostd.
pub fn connect(socket: &Path) -> Result<OwnedFd, String> {
    connect_to(&SocketAddrUnix::new(socket).map_err(|e| e.to_string())?)
}

/// A connection to a socket that speaks in packets.
pub fn connect_to(address: &SocketAddrUnix) -> Result<OwnedFd, String> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let fd = fd.map_err(|e| format!("socket: {e}"))?;
    let limit = rustix::net::sockopt::Timeout::Recv;
    let set = rustix::net::sockopt::set_socket_timeout(&fd, limit, Some(PATIENCE));
    set.map_err(|e| e.to_string())?;
    rustix::net::connect(&fd, address).map_err(|e| format!("connect: {e}"))?;
    Ok(fd)
}

/// Sends bytes.
pub fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<(), String> {
    send_with(socket, bytes, &[])
}

/// Sends bytes with descriptors.
pub fn send_with(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), String> {
    service::link::send_bytes(socket.as_fd(), bytes, fds).map_err(|e| format!("send: {e}"))
}

/// What comes back: bytes, and descriptors.
pub fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
    let mut reply = [0; 256];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut reply)], &mut control, flags)
        .map_err(|e| format!("receive: {e}"))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((reply[..got.bytes].to_vec(), fds))
}

/// Asks hostd.
pub fn ask(
    socket: &OwnedFd,
    kind: u32,
    argument: u64,
) -> Result<(Result<u64, Errno>, Vec<OwnedFd>), String> {
    send(socket, &rpc::host_request(kind, argument))?;
    let (bytes, fds) = receive(socket)?;
    if bytes.is_empty() {
        return Err("hostd has hung up".into());
    }
    Ok((rpc::host_reply_decode(&bytes).map_err(|e| e.to_string())?, fds))
}

/// A client that is attached.
#[derive(Debug)]
pub struct Attacker {
    /// Its connection.
    pub socket: OwnedFd,
    /// Its log.
    pub log_file: OwnedFd,
    /// The same, mapped.
    pub memory: Mapping,
    /// What it was told.
    pub descriptor: Descriptor,
    log: Log<Linux>,
    bell: OwnedFd,
}

impl Attacker {
    /// Attaches.
    pub fn attach(socket: &Path) -> Result<Self, String> {
        Self::on(connect(socket)?)
    }

    /// Attaches on a connection.
    pub fn on(socket: OwnedFd) -> Result<Self, String> {
        let begin = Instant::now();
        let mut fds = loop {
            match ask(&socket, rpc::HOST_ATTACH, 1)? {
                (Ok(_), fds) => break fds,
                (Err(Errno::AGAIN), _) if begin.elapsed() < BARRED => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                (Err(e), _) => return Err(format!("attach: {e:?}")),
            }
        };
        let (Some(bell), Some(log_file)) = (fds.pop(), fds.pop()) else {
            return Err("attach: descriptors are missing".into());
        };
        let size = rustix::fs::fstat(&log_file).map_err(|e| e.to_string())?.st_size as usize;
        let memory = Mapping::new(log_file.as_fd(), size, true).map_err(|e| format!("{e:?}"))?;
        let mut bytes = [0; control::DESCRIPTOR_BYTES];
        let _ = memory.read(0, &mut bytes);
        let descriptor = Descriptor::decode(&bytes).map_err(|e| e.to_string())?;
        let log = Log::new(descriptor);
        Ok(Self { socket, log_file, memory, log, descriptor, bell })
    }

    /// A word of the control area.
    pub fn word(&self, at: u64) -> u64 {
        self.memory.load(at, Ordering::SeqCst)
    }

    /// Stores one.
    pub fn set(&self, at: u64, value: u64) {
        self.memory.store(at, value, Ordering::SeqCst);
    }

    /// Rings.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_le_bytes());
    }

    /// Puts a body into a slot.
    pub fn post(&self, slot: usize, body: &[u8]) {
        requests::put(&self.memory, slot, body);
        self.ring();
    }

    /// Waits for a slot's reply.
    pub fn reply(&self, slot: usize) -> Result<Vec<u8>, String> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if requests::look(&self.memory, slot) == Seen::Reply {
                let mut body = Vec::new();
                requests::take(&self.memory, slot, &mut body);
                return Ok(body);
            }
            if self.is_over() {
                return Err("it was expelled".into());
            }
            std::thread::sleep(Duration::from_micros(200));
            self.ring();
        }
        Err("there is no answer".into())
    }

    /// Asks with a proof.
    pub fn request(
        &self,
        request: &Request<'_>,
        proof: Proof,
    ) -> Result<Result<Vec<u8>, Errno>, String> {
        let mut body = Vec::new();
        request.encode_shown(self.log.last(), proof, &mut body);
        self.post(0, &body);
        let reply = self.reply(0)?;
        let (status, mut rest) = rpc::reply_status(&reply).map_err(|e| e.to_string())?;
        Ok(status.map(|()| rest.rest().to_vec()))
    }

    /// A name's inode, with a lease and the proof that it was shown.
    pub fn lookup(
        &self,
        dir: (InodeId, Proof),
        name: &str,
        mode: LeaseMode,
    ) -> Result<Result<InodeReply, Errno>, String> {
        let request = Request::Lookup { dir: dir.0, name: name.as_bytes(), mode, flags: 0 };
        Ok(match self.request(&request, dir.1)? {
            Ok(body) => {
                Ok(InodeReply::decode(&mut Reader::new("reply", &body))
                    .map_err(|e| e.to_string())?)
            }
            Err(e) => Err(e),
        })
    }

    /// The root of the volume, with a lease.
    pub fn root(&self, mode: LeaseMode) -> Result<Result<InodeReply, Errno>, String> {
        let request = Request::Inode { ino: InodeId::ROOT, mode, flags: 0 };
        Ok(match self.request(&request, Proof::NONE)? {
            Ok(body) => {
                Ok(InodeReply::decode(&mut Reader::new("reply", &body))
                    .map_err(|e| e.to_string())?)
            }
            Err(e) => Err(e),
        })
    }

    /// The way to a part of the ground, name by name, as far as it is let.
    pub fn walk(&self, path: &str, mode: LeaseMode) -> Result<Result<InodeReply, Errno>, String> {
        let (mut at, mut last) = ((InodeId::ROOT, Proof::NONE), None);
        let names: Vec<&str> = path.split('/').collect();
        for (i, name) in names.iter().enumerate() {
            let mode = if i + 1 == names.len() { mode } else { LeaseMode::Read };
            match self.lookup(at, name, mode)? {
                Ok(reply) => {
                    at = (reply.record.ino, reply.proof);
                    last = Some(reply);
                }
                Err(e) => return Ok(Err(e)),
            }
        }
        last.map(Ok).ok_or_else(|| "an empty path".into())
    }

    /// Fresh numbers.
    pub fn numbers(&self, count: u32) -> Result<Vec<(InodeId, Granted)>, String> {
        let body =
            self.request(&Request::Inodes { count }, Proof::NONE)?.map_err(|e| format!("{e:?}"))?;
        Ok(crate::rig::take_numbers(&body))
    }

    /// Appends an operation, with nobody to look at leases.
    pub fn append(&self, op: &Op<'_>, time: u64) -> Result<Sequence, String> {
        let place = self.log.append(&self.memory, 0, op, time).map_err(|e| format!("{e:?}"))?;
        self.set(control::LAST_SEQUENCE, place.sequence.0);
        Ok(place.sequence)
    }

    /// Whether it counts no more.
    pub fn is_over(&self) -> bool {
        self.word(control::STATE) != control::STATE_ATTACHED
    }

    /// Asks for an fsync, and waits until all that was appended is judged: `None`, or with what the last refusal was told.
    pub fn judged(&self) -> Result<Option<Errno>, String> {
        let last = self.log.last().0;
        self.set(control::SYNC_REQUEST, last);
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if self.is_over() {
                return Err("it was expelled".into());
            }
            if self.word(control::REPLICATED) >= last {
                let refused =
                    self.word(control::REFUSED_SEQ) == last && self.word(control::REFUSALS) > 0;
                return Ok(refused.then(|| Errno(self.word(control::REFUSED_ERRNO) as u16)));
            }
            self.ring();
            std::thread::sleep(Duration::from_micros(500));
        }
        Err("it is never judged".into())
    }
}
