//! hostd: the small privileged daemon of the host. It checks who asks, hands out log segments and
//! arenas as descriptors, watches processes, and copies memory when nicfs tells it to. It keeps
//! nothing that nicfs does not have: after a restart nicfs tells it whom to watch.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use base::{ClientId, Errno};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, UCred};
use rustix::process::{Pid, PidfdFlags};
use storage::format::control::{self, Descriptor};
use storage::format::item::ReadClass;
use storage::format::rpc;
use storage::media::{Media, MediaError, Segment};
use storage::region::FileRegion;
use storage::volume::{CopyItem, run_copies};

use crate::config::{Error, HostdConfig, private_socket};
use crate::host::hung_up;
use crate::link::{self, Packet};
use crate::signal::Signals;

const LISTENER: u64 = 1;
const NICFS: u64 = 2;
const SIGNALS: u64 = 3;
const FIRST: u64 = 16;
/// Processes connected at once.
const CONNECTIONS_MAX: usize = 8192;
/// Of these only root takes the last.
const FOR_ROOT: usize = CONNECTIONS_MAX / 8;
/// Arenas that a process may have asked for and not been told of.
const QUESTIONS_EACH: u32 = 64;
/// Connections taken in a turn.
const ACCEPTED: usize = 16;
/// Before the next look for a connection when there was no descriptor for it.
const NO_DESCRIPTOR: Duration = Duration::from_millis(10);
/// How long it is taken for true which logs the region has: less than a client waits before it asks.
const LOGS_KNOWN: Duration = Duration::from_secs(1);

/// Who a process is, by the kernel's word at the time it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pid: u32,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl Peer {
    /// Whether the peer may map an arena of that class: the class is that of the files in it, so
    /// whoever may map it may read every byte there.
    pub fn may_map(&self, class: ReadClass) -> bool {
        match class {
            ReadClass::World => true,
            ReadClass::Group { uid, gid } => {
                self.uid == 0 || self.uid == uid || self.gid == gid || self.groups.contains(&gid)
            }
            ReadClass::Owner { uid } => self.uid == 0 || self.uid == uid,
            _ => false,
        }
    }
}

#[derive(Debug)]
struct Conn {
    socket: OwnedFd,
    peer: Peer,
    client: Option<ClientId>,
    /// Its doorbell, for a nicfs that starts again.
    bell: Option<OwnedFd>,
    attaching: bool,
    /// Arenas that it has asked for and nicfs has not answered.
    asking: u32,
}

struct Hostd {
    region: FileRegion,
    epoll: OwnedFd,
    nicfs: Option<OwnedFd>,
    conns: BTreeMap<u64, Conn>,
    /// How many of them each user has.
    users: BTreeMap<u32, usize>,
    pidfds: BTreeMap<u64, (ClientId, OwnedFd)>,
    connections_per_user: usize,
    next: u64,
    /// Connection and arena of each question, which has a number of its own: the answer to one must never be taken for that to
    /// another, though both come from the same process.
    queries: BTreeMap<u64, (u64, u32)>,
    /// Requests that could not be read.
    bad: u64,
    /// Clients whose sockets ended while nicfs was away.
    ended: BTreeSet<ClientId>,
    /// Whose logs the region had, and when.
    logs: Option<(Instant, BTreeSet<ClientId>)>,
}

/// Serves processes of this host until a signal ends it.
pub fn run(config: HostdConfig) -> Result<(), Error> {
    let signals = Signals::catch().map_err(|e| Error::new("hostd: signals", e))?;
    crate::process::raise_descriptors();
    let region = FileRegion::open(&config.region, config.durability)
        .map_err(|e| Error::new(&format!("hostd: region {}", config.region.display()), e))?;
    let listener = listen(&config.socket, 0o666)
        .map_err(|e| Error::new(&format!("hostd: socket {}", config.socket.display()), e))?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::new("epoll", e))?;
    let mut hostd = Hostd {
        region,
        epoll,
        nicfs: None,
        conns: BTreeMap::new(),
        users: BTreeMap::new(),
        pidfds: BTreeMap::new(),
        connections_per_user: config.connections_per_user,
        next: FIRST,
        queries: BTreeMap::new(),
        bad: 0,
        ended: BTreeSet::new(),
        logs: None,
    };
    hostd.watch(listener.as_fd(), LISTENER).map_err(|e| Error::new("hostd: epoll", e))?;
    hostd.watch(signals.as_fd(), SIGNALS).map_err(|e| Error::new("hostd: epoll", e))?;
    let private = private_socket(&config.socket);
    loop {
        if hostd.nicfs.is_none() {
            hostd.connect(&private);
        }
        // Without nicfs there is nothing to do but to look for it again.
        let wait = if hostd.nicfs.is_some() { None } else { Some(Duration::from_millis(100)) };
        match hostd.turn(&listener, &signals, wait) {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) => return Err(Error::new("hostd", e)),
        }
    }
    let _ = std::fs::remove_file(&config.socket);
    Ok(())
}

/// A listening seqpacket socket at `path`; a stale file there is replaced.
pub(crate) fn listen(path: &Path, mode: u32) -> std::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let address = SocketAddrUnix::new(path)?;
    rustix::net::bind(&socket, &address)?;
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(path, permissions)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    link::set_buffers(socket.as_fd());
    Ok(socket)
}

/// Credentials of the process at the other end, of which `creds` are known.
fn peer(socket: BorrowedFd<'_>, creds: &UCred) -> std::io::Result<Peer> {
    // (Most have few, and a connection keeps them.)
    let groups = match groups(socket, &mut [0; 64]) {
        Err(e) if e.raw_os_error() == Some(libc::ERANGE) => groups(socket, &mut vec![0; 65_536]),
        found => found,
    }?;
    let pid = creds.pid.as_raw_nonzero().get().unsigned_abs();
    Ok(Peer { pid, uid: creds.uid.as_raw(), gid: creds.gid.as_raw(), groups })
}

/// Supplementary groups of the process at the other end; ERANGE if it has more than there is room for.
fn groups(socket: BorrowedFd<'_>, room: &mut [u32]) -> std::io::Result<Vec<u32>> {
    let mut len = size_of_val(room) as libc::socklen_t;
    // SAFETY: the buffer has the length given; the kernel writes at most that much and sets `len`.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            room.as_mut_ptr().cast(),
            &raw mut len,
        )
    } != 0;
    if failed {
        return Err(std::io::Error::last_os_error());
    }
    Ok(room[..len as usize / 4].to_vec())
}

/// Start time of a process in clock ticks since boot (field 22 of its stat), 0 if it is gone.
fn start_time(pid: u32) -> u64 {
    // (It is shorter, and comes in one piece.)
    let mut room = [0; 1024];
    let read = std::fs::File::open(format!("/proc/{pid}/stat"))
        .and_then(|mut file| std::io::Read::read(&mut file, &mut room));
    let text = String::from_utf8_lossy(&room[..read.unwrap_or(0)]);
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name.split_whitespace().nth(19).and_then(|t| t.parse().ok()).unwrap_or(0)
}

impl Hostd {
    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    fn connect(&mut self, path: &Path) {
        let Ok(socket) = connect(path) else { return };
        if self.watch(socket.as_fd(), NICFS).is_ok() {
            self.nicfs = Some(socket);
        }
    }

    /// Waits and handles what came; `false` when a signal asks to end.
    fn turn(
        &mut self,
        listener: &OwnedFd,
        signals: &Signals,
        wait: Option<Duration>,
    ) -> std::io::Result<bool> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        let timeout = wait.map(|d| rustix::time::Timespec {
            tv_sec: d.as_secs() as i64,
            tv_nsec: d.subsec_nanos().into(),
        });
        let (ready, _) = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(true),
            other => other?,
        };
        let mut tokens: Vec<u64> = ready.iter().map(|e| e.data.u64()).collect();
        // Users may be many, and what nicfs says concerns all.
        tokens.sort_by_key(|token| *token != NICFS);
        for token in tokens {
            match token {
                // Nothing here is read again.
                SIGNALS if signals.take().end => return Ok(false),
                SIGNALS => {}
                LISTENER => self.accept(listener),
                NICFS => self.hear(),
                token if self.pidfds.contains_key(&token) => self.process_ended(token),
                token => self.serve(token),
            }
        }
        Ok(true)
    }

    fn accept(&mut self, listener: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Who connects again and again gets a turn like others: what is left is told of again.
        for _ in 0..ACCEPTED {
            let socket = match rustix::net::accept_with(listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    // It waits still: to look at it again and again would keep a processor busy.
                    log::warn!("hostd has no descriptors left");
                    std::thread::sleep(NO_DESCRIPTOR);
                    return;
                }
                Err(_) => return,
            };
            let Ok(creds) = rustix::net::sockopt::socket_peercred(&socket) else { continue };
            if let Some(text) = self.crowd(creds.uid.as_raw()) {
                let _ = link::send_bytes(
                    socket.as_fd(),
                    &rpc::host_reply(Err((Errno::NFILE, text))),
                    &[],
                );
                continue;
            }
            let Ok(peer) = peer(socket.as_fd(), &creds) else { continue };
            let token = self.next;
            self.next += 1;
            if self.watch(socket.as_fd(), token).is_ok() {
                *self.users.entry(peer.uid).or_default() += 1;
                let conn =
                    Conn { socket, peer, client: None, bell: None, attaching: false, asking: 0 };
                self.conns.insert(token, conn);
            }
        }
    }

    /// A connection has ended.
    fn hung_up(&mut self, token: u64) {
        let Some(conn) = self.conns.remove(&token) else { return };
        if let Some(own) = self.users.get_mut(&conn.peer.uid) {
            *own -= 1;
            if *own == 0 {
                self.users.remove(&conn.peer.uid);
            }
        }
    }

    /// Why there is no place for one more connection of this user.
    fn crowd(&self, uid: u32) -> Option<&'static str> {
        let own = || self.users.get(&uid).copied().unwrap_or(0);
        if uid != 0 && own() >= self.connections_per_user {
            return Some("too many connections of this user");
        }
        let left = if uid == 0 { 0 } else { FOR_ROOT };
        let full = self.conns.len() >= CONNECTIONS_MAX - left;
        full.then_some("too many connections to hostd")
    }

    fn reply(&self, token: u64, status: Result<u64, (Errno, &str)>, fds: &[BorrowedFd<'_>]) {
        if let Some(conn) = self.conns.get(&token) {
            // A process that does not read its answers loses them.
            let _ = link::send_bytes(conn.socket.as_fd(), &rpc::host_reply(status), fds);
        }
    }

    fn tell(&mut self, packet: &Packet, fd: Option<BorrowedFd<'_>>) -> bool {
        let Some(nicfs) = &self.nicfs else { return false };
        if link::send(nicfs.as_fd(), packet, fd).is_ok() {
            return true;
        }
        self.nicfs_lost();
        false
    }

    fn nicfs_lost(&mut self) {
        log::warn!("nicfs is gone");
        self.nicfs = None;
        self.pidfds.clear();
        for (_, (conn, _)) in std::mem::take(&mut self.queries) {
            if let Some(conn) = self.conns.get_mut(&conn) {
                conn.asking = 0;
            }
            self.reply(conn, Err((Errno::AGAIN, "the node service is not running")), &[]);
        }
        let waiting: Vec<u64> =
            self.conns.iter().filter(|(_, c)| c.attaching).map(|(t, _)| *t).collect();
        for token in waiting {
            self.reply(token, Err((Errno::AGAIN, "the node service is not running")), &[]);
            if let Some(conn) = self.conns.get_mut(&token) {
                conn.attaching = false;
            }
        }
    }

    /// A process asks or has gone.
    fn serve(&mut self, token: u64) {
        let Some(conn) = self.conns.get(&token) else { return };
        let mut buffer = [0u8; 256];
        let received = link::receive_bytes(conn.socket.as_fd(), &mut buffer);
        let request = match received {
            Ok((0, _)) | Err(_) => {
                let client = conn.client;
                self.hung_up(token);
                if let Some(client) = client {
                    self.client_ended(client);
                }
                return;
            }
            Ok((n, _)) => rpc::host_request_decode(&buffer[..n]),
        };
        match request {
            Ok((rpc::HOST_ATTACH, lanes)) => self.attach(token, lanes as u32),
            Ok((rpc::HOST_ARENA, arena)) if u32::try_from(arena).is_ok() => {
                self.ask_for(token, arena as u32);
            }
            Ok((rpc::HOST_KNOWS, client)) => {
                let known = self.has_log(ClientId(client));
                let known = known.map(u64::from).map_err(|_| (Errno::IO, "cannot list the region"));
                self.reply(token, known, &[]);
            }
            Ok(_) => self.reply(token, Err((Errno::INVAL, "unknown request")), &[]),
            Err(e) => {
                self.bad += 1;
                // A process cannot fill the log with them.
                if self.bad.is_power_of_two() {
                    let pid = self.conns[&token].peer.pid;
                    log::warn!("request of process {pid}: {e} ({} so far)", self.bad);
                }
                let refusal = if rpc::is_foreign_host_request(&buffer) {
                    (Errno::PROTONOSUPPORT, "program and service are of two versions")
                } else {
                    (Errno::INVAL, "malformed request")
                };
                self.reply(token, Err(refusal), &[]);
            }
        }
    }

    /// Whether the log of a client is there: a client that hears nothing asks, since who takes its region away (to begin the
    /// node anew) has nothing left in which to tell it. It has heard nothing for longer than what was found is kept, so its log was there then.
    fn has_log(&mut self, client: ClientId) -> Result<bool, MediaError> {
        if self.logs.as_ref().is_none_or(|(at, _)| at.elapsed() >= LOGS_KNOWN) {
            self.logs = None;
            self.logs = Some((Instant::now(), self.clients_with_logs()?));
        }
        Ok(self.logs.as_ref().is_some_and(|(_, clients)| clients.contains(&client)))
    }

    /// By what their logs say. All of them, or an error: nobody is to believe that his is not there.
    fn clients_with_logs(&self) -> Result<BTreeSet<ClientId>, MediaError> {
        let mut clients = BTreeSet::new();
        for log in self.region.segments()? {
            if !matches!(log, Segment::Log(_)) {
                continue;
            }
            let file = match self.region.open_segment(log, false) {
                Err(MediaError::Missing(_)) => continue,
                file => file?,
            };
            let mut bytes = [0; control::DESCRIPTOR_BYTES];
            let read = rustix::io::pread(&file, &mut bytes, 0);
            let n = read.map_err(|e| MediaError::Io(format!("cannot read {log:?}: {e}")))?;
            // (One that is just being made has none, and nobody has it.)
            let found = Descriptor::decode(&bytes[..n]).map(|found| found.client);
            clients.extend(found);
        }
        Ok(clients)
    }

    /// Asks nicfs who may map an arena.
    fn ask_for(&mut self, token: u64, arena: u32) {
        let Some(conn) = self.conns.get_mut(&token) else { return };
        let refusal = match (&self.nicfs, conn.asking) {
            (None, _) => Some("the node service is not running"),
            (_, QUESTIONS_EACH..) => Some("too many questions at once"),
            _ => None,
        };
        if let Some(text) = refusal {
            return self.reply(token, Err((Errno::AGAIN, text)), &[]);
        }
        conn.asking += 1;
        let question = self.next;
        self.next += 1;
        // Before it is sent: if nicfs is lost over it, all questions are answered.
        self.queries.insert(question, (token, arena));
        self.tell(&Packet::ArenaQuery { token: question, arena }, None);
    }

    /// Tells nicfs, or the one that comes next.
    fn client_ended(&mut self, client: ClientId) {
        if !self.tell(&Packet::Gone { client }, None) && self.ended.len() < CONNECTIONS_MAX {
            self.ended.insert(client);
        }
    }

    /// nicfs has started again and knows this client from the table.
    fn adopt(&mut self, client: ClientId, pid: u32, start: u64) {
        let lives = !self.ended.remove(&client) && start_time(pid) == start;
        if !lives || !self.watch_process(client, pid) {
            self.tell(&Packet::Gone { client }, None);
            return;
        }
        let bell = self.conns.values().find(|c| c.client == Some(client));
        let bell = bell.and_then(|c| c.bell.as_ref()).and_then(|b| b.try_clone().ok());
        // A hostd that was started anew has none; nicfs then looks at the client without a ring.
        if let Some(bell) = bell {
            self.tell(&Packet::Bell { client }, Some(bell.as_fd()));
        }
    }

    fn attach(&mut self, token: u64, lanes: u32) {
        let Some(conn) = self.conns.get_mut(&token) else { return };
        if conn.client.is_some() || conn.attaching {
            self.reply(token, Err((Errno::BUSY, "attached already on this socket")), &[]);
            return;
        }
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let Ok(bell) = rustix::event::eventfd(0, flags) else {
            self.reply(token, Err((Errno::NFILE, "hostd has no descriptors left")), &[]);
            return;
        };
        let Ok(copy) = bell.try_clone() else { return };
        conn.bell = Some(bell);
        conn.attaching = true;
        let p = conn.peer.clone();
        let packet = Packet::Attach {
            token,
            pid: p.pid,
            start: start_time(p.pid),
            uid: p.uid,
            gid: p.gid,
            lanes,
            groups: p.groups,
        };
        if !self.tell(&packet, Some(copy.as_fd())) {
            if let Some(conn) = self.conns.get_mut(&token) {
                conn.attaching = false;
            }
            self.reply(token, Err((Errno::AGAIN, "the node service is not running")), &[]);
        }
    }

    fn hear(&mut self) {
        loop {
            let Some(nicfs) = &self.nicfs else { return };
            match link::receive(nicfs) {
                Ok(None) => return,
                Ok(Some((packet, _))) => self.obey(packet),
                Err(_) => {
                    self.nicfs_lost();
                    return;
                }
            }
        }
    }

    fn obey(&mut self, packet: Packet) {
        match packet {
            Packet::Attached { token, client, segment } => self.attached(token, client, segment),
            Packet::Refused { token, errno, text } => {
                if let Some(conn) = self.conns.get_mut(&token) {
                    conn.attaching = false;
                }
                self.reply(token, Err((errno, &text)), &[]);
            }
            Packet::Arena { token, class, bytes } => self.hand_out(token, class, bytes),
            Packet::Copies { id, items } => self.copy(id, &items),
            Packet::Detached { client } => {
                for conn in self.conns.values_mut().filter(|c| c.client == Some(client)) {
                    conn.client = None;
                }
                self.pidfds.retain(|_, (c, _)| *c != client);
            }
            Packet::Adopt { client, pid, start } => self.adopt(client, pid, start),
            other => log::warn!("nicfs sent {other:?}, which hostd does not take"),
        }
    }

    /// Copies, unless nicfs has gone or does without: then others may write there.
    fn copy(&mut self, id: u64, items: &[CopyItem]) {
        let copied = self.region.copying().and_then(|copying| {
            // In this order: nicfs shuts the link, then looks who copies (see `host`).
            if self.nicfs.as_ref().is_none_or(hung_up) {
                return Ok(false);
            }
            run_copies(&self.region, items)?;
            self.region.fence()?;
            drop(copying);
            Ok(true)
        });
        let bad = match copied {
            Ok(true) => Vec::new(),
            Ok(false) => return self.nicfs_lost(),
            Err(e) => {
                log::error!("copies: {e}");
                vec![0]
            }
        };
        self.tell(&Packet::CopiesDone { id, bad }, None);
    }

    fn watch_process(&mut self, client: ClientId, pid: u32) -> bool {
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
        let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return false };
        let token = self.next;
        self.next += 1;
        if self.watch(fd.as_fd(), token).is_err() {
            return false;
        }
        self.pidfds.insert(token, (client, fd));
        true
    }

    fn process_ended(&mut self, token: u64) {
        if let Some((client, _)) = self.pidfds.remove(&token) {
            for conn in self.conns.values_mut().filter(|c| c.client == Some(client)) {
                conn.client = None;
            }
            self.client_ended(client);
        }
    }

    fn attached(&mut self, token: u64, client: ClientId, segment: u32) {
        let log = self.region.open_segment(Segment::Log(segment), true);
        let Some(conn) = self.conns.get_mut(&token) else {
            self.tell(&Packet::Gone { client }, None);
            return;
        };
        conn.attaching = false;
        let pid = conn.peer.pid;
        let bell = conn.bell.as_ref().map(OwnedFd::try_clone);
        // The socket's end tells of exec as well as of exit; a forked child may hold it open.
        let (Ok(log), Some(Ok(bell)), true) = (log, bell, self.watch_process(client, pid)) else {
            self.pidfds.retain(|_, (c, _)| *c != client);
            self.tell(&Packet::Gone { client }, None);
            self.reply(token, Err((Errno::NFILE, "hostd cannot hand out the log")), &[]);
            return;
        };
        if let Some(conn) = self.conns.get_mut(&token) {
            conn.client = Some(client);
        }
        self.reply(token, Ok(client.0), &[log.as_fd(), bell.as_fd()]);
    }

    fn hand_out(&mut self, token: u64, class: Option<ReadClass>, bytes: u64) {
        let Some((conn, arena)) = self.queries.remove(&token) else { return };
        if let Some(conn) = self.conns.get_mut(&conn) {
            conn.asking = conn.asking.saturating_sub(1);
        }
        let Some(class) = class else {
            self.reply(conn, Err((Errno::NOENT, "there is no such arena")), &[]);
            return;
        };
        if !self.conns.get(&conn).is_some_and(|c| c.peer.may_map(class)) {
            self.reply(conn, Err((Errno::ACCES, "not yours to read")), &[]);
            return;
        }
        match self.region.open_segment(Segment::Arena(arena), false) {
            Ok(fd) => self.reply(conn, Ok(bytes), &[fd.as_fd()]),
            Err(e) => {
                log::error!("arena {arena}: {e}");
                self.reply(conn, Err((Errno::IO, "the arena cannot be opened")), &[]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_go_to_those_who_may_read() {
        let who = |uid, gid| Peer { pid: 1, uid, gid, groups: vec![50] };
        assert!(who(9, 9).may_map(ReadClass::World));
        assert!(who(9, 9).may_map(ReadClass::Owner { uid: 9 }));
        assert!(!who(8, 9).may_map(ReadClass::Owner { uid: 9 }));
        assert!(who(8, 9).may_map(ReadClass::Group { uid: 1, gid: 9 }));
        assert!(who(8, 9).may_map(ReadClass::Group { uid: 1, gid: 50 }));
        assert!(!who(8, 9).may_map(ReadClass::Group { uid: 1, gid: 2 }));
        assert!(who(0, 0).may_map(ReadClass::Owner { uid: 9 }));
        assert!(!who(0, 0).may_map(ReadClass::Service));
    }

    #[test]
    fn start_times_tell_processes_apart() {
        assert!(start_time(std::process::id()) > 0);
        assert_eq!(start_time(0x7fff_fff0), 0);
    }
}
