//! The transport of a node: one epoll loop over TCP connections and shared memory rings.
//!
//! A *link* to a peer is two connections, one a class. The node with the lower id dials both, with
//! one session number; the other answers. A link is up when both are open and down when either
//! ends, so that a user sees exactly one Up before, and one Down after, the frames of a link.
//! A dialler that comes again with a newer (incarnation, session) replaces its old link, an older
//! one is refused: a half-dead connection never keeps a peer out, nor does a late process get in.
//!
//! Always true: a connection in `peers[n].conns[c]` has `node == n` and `class == c`; every
//! connection of a link that is not up has a deadline; a link is up only if both are open.

mod conn;
mod handshake;
mod setup;

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::NodeId;
use rustix::event::epoll;
use rustix::event::{EventfdFlags, Timespec};

use crate::decode::{LinkError, Pool};
use crate::limits::{BODY_MAX, DIAL_PAUSE_MAX, DIAL_PAUSE_MIN};
use crate::tcp;
use crate::tls::keys::Loaded;
use crate::tls::{self, Keys};
use crate::transport::{
    Class, Counters, DownReason, Interest, NetEvent, Peer, PeerAddress, SendError, Transport,
    socket_path,
};
use crate::wire::{FrameHead, KIND_RESERVED};
use conn::{Conn, Phase};

/// How a node takes part.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// This node.
    pub node: NodeId,
    /// Grows with each start of the service on this node.
    pub incarnation: u64,
    /// Identity of the cluster; others are refused.
    pub cluster: u128,
    /// Where to listen for TCP; port 0 takes a free one ([`Net::tcp_address`]).
    pub tcp: Option<SocketAddr>,
    /// Run directory for the local socket; it must exist, and only the owner may enter it.
    pub run_dir: Option<PathBuf>,
    /// How long `poll` looks for more after traffic before it sleeps.
    pub spin: Duration,
    /// High watermark of the queue to a peer, low latency and bulk.
    pub queue_high: [usize; 2],
    /// Who this node is over TCP, and whom it believes; without, whoever reaches the port is believed.
    pub keys: Option<Keys>,
}

impl NetConfig {
    /// A config with the measured defaults.
    pub fn new(node: NodeId, incarnation: u64, cluster: u128) -> Self {
        Self {
            node,
            incarnation,
            cluster,
            tcp: None,
            run_dir: None,
            spin: SPIN,
            queue_high: [1 << 20, 16 << 20],
            keys: None,
        }
    }
}

/// Default of [`NetConfig::spin`]; docs/protocol.md has the measurements behind it.
pub const SPIN: Duration = Duration::from_micros(50);

/// Polls that may return early with low latency frames before everything else gets a turn.
const SKIPS_MAX: u32 = 8;
/// Looks at the rings between two looks at epoll while spinning.
const RING_LOOKS: u32 = 32;
/// Events taken from epoll in one go.
const EVENTS: usize = 64;
/// Connections accepted in one go.
const ACCEPTS: usize = 16;
/// Pause after the process ran out of descriptors, before connections are accepted again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const TAG_EXTRA: u64 = 0;
const TAG_TCP: u64 = 1;
const TAG_LOCAL: u64 = 2;
const TAG_CONN: u64 = 3;
const TAG_TLS: u64 = 4;

fn data(tag: u64, generation: u32, index: usize) -> epoll::EventData {
    epoll::EventData::new_u64(tag << 56 | u64::from(generation & 0xff_ffff) << 32 | index as u64)
}

/// A peer and its link.
#[derive(Debug)]
struct Link {
    address: PeerAddress,
    conns: [Option<usize>; 2],
    up: bool,
    /// Newest seen of the peer.
    incarnation: u64,
    session: u64,
    pause: Duration,
    dial_at: Option<Instant>,
    /// Last trouble that was reported, so that each is reported once.
    trouble: String,
}

/// See the module.
#[derive(Debug)]
pub struct Net {
    config: NetConfig,
    epoll: OwnedFd,
    tcp: Option<OwnedFd>,
    local: Option<OwnedFd>,
    tcp_address: Option<SocketAddr>,
    accept_at: Option<Instant>,
    /// Where handshakes are done, and what it rings with.
    handshakes: Option<(tls::pool::Pool, Arc<OwnedFd>)>,
    /// The keys by which the connections that are there have been judged.
    judged: Option<Arc<Loaded>>,
    links: BTreeMap<NodeId, Link>,
    conns: Vec<Option<Conn>>,
    generation: u32,
    sessions: u64,
    extras: Vec<Option<(RawFd, u64)>>,
    pool: Pool,
    events: Vec<NetEvent>,
    skips: u32,
    traffic: Option<Instant>,
    counters: Counters,
}

impl Net {
    fn conn(&self, to: NodeId, class: Class) -> Option<&Conn> {
        let link = self.links.get(&to).filter(|l| l.up)?;
        self.conns[link.conns[class as usize]?].as_ref()
    }

    /// Where this node listens for TCP.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp_address
    }

    /// What the last attempt to reach `node` failed with; empty after success.
    pub fn trouble(&self, node: NodeId) -> &str {
        self.links.get(&node).map_or("", |l| l.trouble.as_str())
    }

    fn report(&mut self, node: NodeId, what: String) {
        let Some(link) = self.links.get_mut(&node) else { return };
        if link.trouble != what {
            link.trouble.clone_from(&what);
            self.events.push(NetEvent::Rejected { node: Some(node), what });
        }
    }

    /// Ends one connection, and with it its link.
    fn close(&mut self, index: usize, reason: DownReason) {
        let Some(conn) = self.conns.get_mut(index).and_then(Option::take) else { return };
        self.counters.doorbells += conn.doorbells();
        let Some(node) = conn.node else {
            let what = match &reason {
                DownReason::Protocol(what) => {
                    self.counters.corrupt += 1;
                    what.clone()
                }
                DownReason::Refused(what) => {
                    self.counters.refused += 1;
                    format!("refused: {what}")
                }
                _ => return,
            };
            let what = format!("{what} (from {})", tcp::whence(conn.fd()));
            self.events.push(NetEvent::Rejected { node: None, what });
            if conn.tls.is_some() {
                self.part(index, conn);
            }
            return;
        };
        drop(conn);
        self.close_link(node, reason);
    }

    /// Leaves a stranger the time to read why it is not let in.
    fn part(&mut self, index: usize, mut conn: Conn) {
        tcp::end_speaking(conn.fd());
        conn.phase = Phase::Parting;
        conn.tls = None;
        self.conns[index] = Some(conn);
    }

    /// Ends the links of peers whose certificates have been revoked, and says what became of the keys.
    fn look_at_keys(&mut self) {
        let Some(keys) = &self.config.keys else { return };
        let now = keys.current();
        for what in keys.take_notes() {
            self.events.push(NetEvent::Rejected { node: None, what });
        }
        if self.judged.as_ref().is_some_and(|before| Arc::ptr_eq(before, &now)) {
            return;
        }
        for index in 0..self.conns.len() {
            let Some(conn) = self.conns[index].as_ref() else { continue };
            if conn.tls.as_ref().is_some_and(|session| session.is_revoked(&now)) {
                let what = "the certificate of its other end was revoked".to_owned();
                self.close(index, DownReason::Refused(what));
            }
        }
        self.judged = Some(now);
    }

    /// Ends both connections of a link, whichever are there.
    fn close_link(&mut self, node: NodeId, reason: DownReason) {
        let Some(link) = self.links.get_mut(&node) else { return };
        let conns = std::mem::take(&mut link.conns);
        let was_up = std::mem::take(&mut link.up);
        link.dial_at = (self.config.node < node).then(|| Instant::now() + link.pause);
        link.pause = match reason {
            // A person has to act.
            DownReason::Refused(_) => DIAL_PAUSE_MAX,
            _ => (link.pause * 2).min(DIAL_PAUSE_MAX),
        };
        for index in conns.into_iter().flatten() {
            if let Some(conn) = self.conns[index].take() {
                self.counters.doorbells += conn.doorbells();
            }
        }
        if let DownReason::Protocol(_) = reason {
            self.counters.corrupt += 1;
        }
        if was_up {
            self.events.push(NetEvent::Down { node, reason });
        } else if reason != DownReason::Ours {
            self.report(node, format!("cannot reach node {node}: {reason}"));
        }
    }

    fn fail(&mut self, index: usize, error: LinkError) {
        self.close(index, error.into());
    }

    /// Both connections are open.
    fn maybe_up(&mut self, node: NodeId) {
        let Some(link) = self.links.get_mut(&node) else { return };
        let open = |slot: &Option<usize>| {
            slot.and_then(|i| self.conns[i].as_ref()).is_some_and(|c| c.phase == Phase::Open)
        };
        if !link.up && link.conns.iter().all(open) {
            link.up = true;
            link.pause = DIAL_PAUSE_MIN;
            link.dial_at = None;
            link.trouble.clear();
            let incarnation = link.incarnation;
            for index in link.conns.into_iter().flatten() {
                if let Some(conn) = self.conns[index].as_mut() {
                    conn.deadline = None;
                    // What was read ahead, or came before the link was up, epoll will not tell.
                    conn.readable = true;
                }
            }
            self.events.push(NetEvent::Up { node, incarnation });
        }
    }

    /// Gives every connection of one class its turn; strangers count as low latency.
    fn turn(&mut self, class: Class) {
        for index in 0..self.conns.len() {
            let Some(conn) = self.conns[index].as_mut() else { continue };
            if conn.class != class || !conn.wants_turn() {
                continue;
            }
            match conn.phase {
                Phase::Open => self.turn_open(index),
                Phase::Parting => {
                    conn.readable = false;
                    if tcp::discard(conn.fd()).is_err() {
                        self.conns[index] = None;
                    }
                }
                Phase::Connecting | Phase::Greeting => {
                    if let Err(error) = conn.flush(&self.epoll) {
                        self.fail(index, error);
                    } else if conn.readable {
                        self.greet(index);
                    }
                }
            }
        }
    }

    fn turn_open(&mut self, index: usize) {
        let Some(conn) = self.conns[index].as_mut() else { return };
        let Some(node) = conn.node else { return };
        let class = conn.class;
        if !self.links.get(&node).is_some_and(|l| l.up) {
            // Its sibling is not open yet: frames wait until the link is up.
            conn.readable = false;
            return;
        }
        let before = self.events.len();
        conn.hear();
        let drained = conn.flush(&self.epoll);
        let taken = drained.clone().and_then(|_| conn.receive(&mut self.pool, &mut self.events));
        for event in &self.events[before..] {
            if let NetEvent::Frame { body, .. } = event {
                self.counters.frames_in += 1;
                self.counters.bytes_in += body.len() as u64;
            }
        }
        if drained == Ok(true) {
            self.events.push(NetEvent::Drained { node, class });
        }
        if let Err(error) = taken {
            self.fail(index, error);
        }
    }

    /// How long to wait in epoll: nothing while spinning, else until the nearest deadline.
    fn wait_time(&self, deadline: Option<Instant>) -> Option<Duration> {
        let now = Instant::now();
        if self.traffic.is_some_and(|t| now.duration_since(t) < self.config.spin) {
            return Some(Duration::ZERO);
        }
        let dials = self.links.values().filter_map(|l| l.dial_at);
        let greetings = self.conns.iter().flatten().filter_map(|c| c.deadline);
        let nearest = dials.chain(greetings).chain(deadline).chain(self.accept_at).min();
        nearest.map(|at| at.saturating_duration_since(now))
    }

    /// Looks at epoll, after having told the rings' other sides if this one is going to sleep.
    fn wait(&mut self, wait: Option<Duration>) {
        let mut wait = wait;
        if wait == Some(Duration::ZERO) {
            for _ in 0..RING_LOOKS {
                if self.conns.iter().flatten().any(Conn::wants_turn) {
                    break;
                }
                std::hint::spin_loop();
            }
        } else {
            let quiet = self.conns.iter().flatten().all(|c| !c.wants_turn() && c.sleep());
            if quiet {
                self.counters.sleeps += 1;
            } else {
                wait = Some(Duration::ZERO);
            }
        }
        let sleeping = wait != Some(Duration::ZERO);
        let timeout = wait.and_then(|w| Timespec::try_from(w).ok());
        let mut ready = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let result = epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref());
        for conn in self.conns.iter().flatten() {
            conn.awake();
        }
        match result {
            Ok((events, _)) => {
                if events.is_empty() && !sleeping {
                    rustix::thread::sched_yield();
                }
                for event in events {
                    self.dispatch(*event);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("epoll failed, which it does only on a wrong descriptor: {errno}"),
        }
    }

    fn dispatch(&mut self, event: epoll::Event) {
        let word = event.data.u64();
        let (tag, generation, index) = (word >> 56, word >> 32 & 0xff_ffff, word as u32 as usize);
        let flags = event.flags; // The struct is packed: no reference into it.
        let failed = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
        let readable = failed || flags.contains(epoll::EventFlags::IN);
        let writable = failed || flags.contains(epoll::EventFlags::OUT);
        match tag {
            TAG_EXTRA => {
                if let Some(Some((_, token))) = self.extras.get(index) {
                    self.events.push(NetEvent::Ready { token: *token, readable, writable });
                }
            }
            TAG_TCP | TAG_LOCAL => {
                // Several: who waits behind many others is not kept waiting by them.
                (0..ACCEPTS).all(|_| self.accept(tag == TAG_TCP));
            }
            TAG_CONN => {
                let Some(Some(conn)) = self.conns.get_mut(index) else { return };
                if u64::from(conn.generation & 0xff_ffff) != generation {
                    return; // It was closed while its event was on the way.
                }
                conn.readable |= readable;
                conn.writable |= writable;
                if writable && conn.phase == Phase::Connecting {
                    self.connected(index);
                }
            }
            TAG_TLS => self.handshakes_back(),
            _ => unreachable!("only these tags are ever registered"),
        }
    }

    /// Parts of handshakes are done: those connections have their turn.
    fn handshakes_back(&mut self) {
        if let Some((_, bell)) = &self.handshakes {
            tls::pool::heard(bell);
        }
        for conn in self.conns.iter_mut().flatten() {
            if conn.tls.as_ref().is_some_and(|session| session.is_back()) {
                conn.readable = true;
                conn.listen(&self.epoll, true);
            }
        }
    }

    /// Dials what is due, and closes strangers that took too long.
    fn timers(&mut self) {
        let now = Instant::now();
        let due: Vec<NodeId> = self
            .links
            .iter()
            .filter(|(_, l)| l.dial_at.is_some_and(|at| at <= now))
            .map(|(node, _)| *node)
            .collect();
        for node in due {
            self.dial(node);
        }
        self.look_at_keys();
        for index in 0..self.conns.len() {
            let late = self.conns[index].as_ref().and_then(|c| c.deadline).is_some_and(|d| d < now);
            if late {
                self.close(index, DownReason::Io("no answer to the hello in time".to_owned()));
            }
        }
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            self.watch_listeners(true);
        }
    }
}

impl Transport for Net {
    fn node(&self) -> NodeId {
        self.config.node
    }

    fn set_peers(&mut self, peers: &[Peer]) {
        let wanted = |node: &NodeId| peers.iter().any(|p| p.node == *node);
        let gone: Vec<NodeId> = self.links.keys().copied().filter(|n| !wanted(n)).collect();
        for node in gone {
            self.close_link(node, DownReason::Ours);
            self.links.remove(&node);
        }
        for peer in peers.iter().filter(|p| p.node != self.config.node) {
            if let Some(link) = self.links.get_mut(&peer.node) {
                if link.address != peer.address {
                    link.address = peer.address.clone();
                    link.pause = DIAL_PAUSE_MIN;
                    link.dial_at = link.dial_at.map(|_| Instant::now());
                }
                continue;
            }
            let link = Link {
                address: peer.address.clone(),
                conns: [None; 2],
                up: false,
                incarnation: 0,
                session: 0,
                pause: DIAL_PAUSE_MIN,
                dial_at: (self.config.node < peer.node).then(Instant::now),
                trouble: String::new(),
            };
            self.links.insert(peer.node, link);
        }
        self.timers();
    }

    fn send(
        &mut self,
        to: NodeId,
        class: Class,
        kind: u16,
        parts: &[&[u8]],
    ) -> Result<(), SendError> {
        if kind >= KIND_RESERVED {
            return Err(SendError::ReservedKind);
        }
        let link = self.links.get(&to).filter(|l| l.up).ok_or(SendError::Down)?;
        let index = link.conns[class as usize].ok_or(SendError::Down)?;
        let conn = self.conns[index].as_mut().ok_or(SendError::Down)?;
        if conn.queue.is_full() {
            self.counters.full += 1;
            return Err(SendError::Full);
        }
        let head = FrameHead::new(kind, parts).ok_or(SendError::TooLong)?;
        if let Err(error) = conn.send(&head, parts, &self.epoll) {
            self.fail(index, error);
            return Err(SendError::Down);
        }
        debug_assert!(head.len as usize <= BODY_MAX);
        self.counters.frames_out += 1;
        self.counters.bytes_out += u64::from(head.len);
        self.traffic = Some(Instant::now());
        Ok(())
    }

    fn queued(&self, to: NodeId, class: Class) -> usize {
        self.conn(to, class).map_or(0, |c| c.queue.bytes())
    }

    fn is_up(&self, node: NodeId) -> bool {
        self.links.get(&node).is_some_and(|l| l.up)
    }

    fn poll(&mut self, timeout: Option<Duration>, out: &mut Vec<NetEvent>) {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            self.turn(Class::LowLatency);
            if !self.events.is_empty() && self.skips < SKIPS_MAX {
                self.skips += 1;
                break;
            }
            self.skips = 0;
            let idle = self.events.is_empty();
            let wait = if idle { self.wait_time(deadline) } else { Some(Duration::ZERO) };
            self.wait(wait);
            self.timers();
            self.turn(Class::LowLatency);
            self.turn(Class::Bulk);
            if !self.events.is_empty() || deadline.is_some_and(|d| Instant::now() >= d) {
                break;
            }
        }
        if !self.events.is_empty() {
            self.traffic = Some(Instant::now());
            out.append(&mut self.events);
        }
    }

    fn register(
        &mut self,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> std::io::Result<()> {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, interest.readable);
        flags.set(epoll::EventFlags::OUT, interest.writable);
        let known = |e: &Option<(RawFd, u64)>| e.is_some_and(|(raw, _)| raw == fd.as_raw_fd());
        if let Some(at) = self.extras.iter().position(known) {
            epoll::modify(&self.epoll, fd, data(TAG_EXTRA, 0, at), flags)?;
            self.extras[at] = Some((fd.as_raw_fd(), token));
            return Ok(());
        }
        let at = self.extras.iter().position(Option::is_none).unwrap_or(self.extras.len());
        epoll::add(&self.epoll, fd, data(TAG_EXTRA, 0, at), flags)?;
        if at == self.extras.len() {
            self.extras.push(None);
        }
        self.extras[at] = Some((fd.as_raw_fd(), token));
        Ok(())
    }

    fn deregister(&mut self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        for extra in &mut self.extras {
            if extra.is_some_and(|(raw, _)| raw == fd.as_raw_fd()) {
                *extra = None;
            }
        }
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    fn set_spin(&mut self, spin: Duration) {
        self.config.spin = spin;
    }

    fn disconnect(&mut self, node: NodeId) {
        self.close_link(node, DownReason::Ours);
    }

    fn recycle(&mut self, body: Vec<u8>) {
        self.pool.give(body);
    }

    fn counters(&self) -> Counters {
        let mut counters = self.counters;
        counters.doorbells += self.conns.iter().flatten().map(Conn::doorbells).sum::<u64>();
        counters
    }
}

impl From<LinkError> for DownReason {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Closed => Self::Closed,
            LinkError::Io(text) => Self::Io(text),
            LinkError::Protocol(text) => Self::Protocol(text),
            LinkError::Refused(text) => Self::Refused(text),
        }
    }
}

/// A descriptor that other threads make ready to wake a loop: register it, clear it when ready.
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// A new one, not ready.
    pub fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Makes it ready; from any thread.
    pub fn wake(&self) {
        // It fails only if 2^64 - 2 wake-ups are pending: then it is ready anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_le_bytes());
    }

    /// Makes it not ready.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
