//! A node's end of the embedded coordinator: never blocks, one descriptor to wait on.
//!
//! The descriptor is an epoll of its own with the socket and a timer, so that it stays the same
//! over reconnections and heartbeats are sent by whoever polls when it is readable.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use base::{Epoch, NodeId, StreamSeq};
use rustix::event::{Timespec, epoll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::link::Link;
use super::message::{
    Choice, Copies, DataState, MESSAGE_MAX, Message, PROTOCOL, Registration, View,
};
use super::{CoordEvent, Coordinator};
use crate::decode::LinkError;
use crate::tcp;
use crate::tls::session::{self, Session};
use crate::tls::{Keys, Role};
use crate::transport::PeerAddress;
use crate::wire::{FRAME_HEAD, FrameHead};

/// Pause between attempts to connect: short, since a node is fenced meanwhile.
const RETRY: Duration = Duration::from_millis(20);
/// The same after the coordinator has refused this node: a person has to act.
const RETRY_REFUSED: Duration = Duration::from_millis(500);
/// An attempt to connect and register that takes longer is given up.
const PATIENCE: Duration = Duration::from_secs(1);
/// After the connection has ended, a node fences itself this soon: before the coordinator, which
/// takes the end of a connection for the end of a process, evicts it (`lost_connection_ms`,
/// at least 100).
const FENCE_DISCONNECTED: Duration = Duration::from_millis(75);
/// Heartbeats whose times are remembered.
const UNCONFIRMED: usize = 64;

const TOKEN_TIMER: u64 = 0;
const TOKEN_SOCKET: u64 = 1;

/// How to register.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Where the coordinator listens.
    pub coordinator: PeerAddress,
    /// Identity of the cluster.
    pub cluster: u128,
    /// What the node says of itself.
    pub registration: Registration,
    /// Who the node is over TCP, and whom it believes; without, whoever answers there is believed.
    pub keys: Option<Keys>,
}

#[derive(Debug)]
enum Phase {
    Down { retry_at: Instant },
    Connecting { link: Link, since: Instant },
    Registering { link: Link, since: Instant },
    Ready { link: Link },
    Left,
}

/// See the module.
#[derive(Debug)]
pub struct Client {
    config: ClientConfig,
    epoll: OwnedFd,
    timer: OwnedFd,
    phase: Phase,
    /// When the timer goes off.
    armed: Option<Instant>,
    /// The socket is watched for room.
    wants_room: bool,
    view: Option<View>,
    heartbeat: Duration,
    fence_after: Duration,
    next_heartbeat: Instant,
    /// What the coordinator told of its patience.
    failure_timeout: Option<Duration>,
    /// No heartbeats.
    held: bool,
    number: u64,
    sent: VecDeque<(u64, Instant)>,
    /// When the newest heartbeat (or registration) that was confirmed had been sent.
    confirmed: Option<Instant>,
    disconnected: Option<Instant>,
    trouble: String,
    out: Vec<CoordEvent>,
}

impl Client {
    /// Begins to connect at the first poll.
    pub fn new(config: ClientConfig) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let data = epoll::EventData::new_u64(TOKEN_TIMER);
        epoll::add(&epoll, &timer, data, epoll::EventFlags::IN)?;
        let now = Instant::now();
        let client = Self {
            fence_after: Duration::ZERO,
            config,
            epoll,
            timer,
            phase: Phase::Down { retry_at: now },
            armed: None,
            wants_room: false,
            view: None,
            heartbeat: Duration::from_millis(100),
            next_heartbeat: now,
            failure_timeout: None,
            held: false,
            number: 0,
            sent: VecDeque::new(),
            confirmed: None,
            disconnected: None,
            trouble: String::new(),
            out: Vec::new(),
        };
        client.set_timer(Duration::from_nanos(1))?;
        Ok(client)
    }

    fn set_timer(&self, after: Duration) -> std::io::Result<()> {
        let after = after.max(Duration::from_nanos(1)); // 0 would disarm it.
        let value = Timespec::try_from(after).map_err(std::io::Error::other)?;
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval: never, it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }

    fn report(&mut self, what: String) {
        if self.trouble != what {
            self.trouble.clone_from(&what);
            self.out.push(CoordEvent::Trouble(what));
        }
    }

    fn down(&mut self, why: &str, retry: Duration) {
        if matches!(self.phase, Phase::Ready { .. }) {
            self.disconnected = Some(Instant::now());
        }
        self.phase = Phase::Down { retry_at: Instant::now() + retry };
        self.report(format!("coordinator at {}: {why}", self.config.coordinator));
    }

    fn connect(&mut self, now: Instant) {
        let opened = match &self.config.coordinator {
            PeerAddress::Tcp(at) => tcp::connect(*at),
            PeerAddress::Local(path) => tcp::connect_local(path),
        };
        let opened = opened.and_then(|fd| {
            let data = epoll::EventData::new_u64(TOKEN_SOCKET);
            epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN | epoll::EventFlags::OUT)?;
            Ok(fd)
        });
        match opened {
            Ok(fd) => {
                self.wants_room = true;
                let session = match (&self.config.keys, &self.config.coordinator) {
                    (Some(keys), PeerAddress::Tcp(_)) => {
                        match Session::dial(keys, Role::Coordinator, None) {
                            Ok(session) => Some(session),
                            Err(error) => return self.down(&error.to_string(), RETRY_REFUSED),
                        }
                    }
                    _ => None,
                };
                self.phase = Phase::Connecting { link: Link::new(fd, session), since: now };
            }
            Err(errno) => self.down(&errno.to_string(), RETRY),
        }
    }

    /// Watches for room exactly while something is queued.
    fn watch(epoll: &OwnedFd, wants_room: &mut bool, link: &Link) -> Result<(), LinkError> {
        if *wants_room == link.has_queue() {
            return Ok(());
        }
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, link.has_queue());
        let data = epoll::EventData::new_u64(TOKEN_SOCKET);
        epoll::modify(epoll, link.as_fd(), data, flags)
            .map_err(|e| LinkError::Io(e.to_string()))?;
        *wants_room = link.has_queue();
        Ok(())
    }

    fn register(&mut self, mut link: Link, now: Instant) {
        let outcome = match rustix::net::sockopt::socket_error(&link) {
            Ok(Ok(())) => link.send(&Message::Register {
                protocol: PROTOCOL,
                cluster: self.config.cluster,
                registration: self.config.registration.clone(),
            }),
            Ok(Err(errno)) | Err(errno) => Err(LinkError::Io(errno.to_string())),
        };
        let (epoll, wants_room) = (&self.epoll, &mut self.wants_room);
        match outcome.and_then(|()| Self::watch(epoll, wants_room, &link)) {
            Ok(()) => self.phase = Phase::Registering { link, since: now },
            Err(error) => self.lost(&error),
        }
    }

    fn lost(&mut self, error: &LinkError) {
        // Where one side does not believe the other, a person has to act.
        let refused = matches!(error, LinkError::Refused(_));
        self.down(&error.to_string(), if refused { RETRY_REFUSED } else { RETRY });
    }

    /// Ends the connection if the coordinator's certificate has been revoked, and says what became of the keys.
    fn look_at_keys(&mut self) {
        let Some(keys) = &self.config.keys else { return };
        let loaded = keys.current();
        let notes = keys.take_notes();
        self.out.extend(notes.into_iter().map(CoordEvent::Trouble));
        if let Phase::Registering { link, .. } | Phase::Ready { link } = &self.phase
            && link.is_revoked(&loaded)
        {
            self.down("its certificate was revoked", RETRY_REFUSED);
        }
    }

    fn receive(&mut self) {
        let (Phase::Registering { link, .. } | Phase::Ready { link }) = &mut self.phase else {
            return;
        };
        let (messages, mut ended) = link.receive();
        if ended.is_none() {
            ended = link.flush().err();
        }
        for message in messages {
            if let Err(error) = self.hear(message) {
                ended = ended.or(Some(error));
                break;
            }
        }
        match ended {
            Some(error) => self.lost(&error),
            None => {
                if let Phase::Registering { link, .. } | Phase::Ready { link } = &self.phase
                    && let Err(error) = Self::watch(&self.epoll, &mut self.wants_room, link)
                {
                    self.lost(&error);
                }
            }
        }
    }

    fn hear(&mut self, message: Message) -> Result<(), LinkError> {
        match message {
            Message::Welcome { heartbeat_ms, failure_timeout_ms } => {
                self.welcome(heartbeat_ms, failure_timeout_ms)
            }
            Message::Refused(why) => {
                self.down(&why, RETRY_REFUSED);
                Ok(())
            }
            Message::Confirm { number } => {
                while let Some((sent, at)) = self.sent.front().copied() {
                    if sent > number {
                        break;
                    }
                    self.sent.pop_front();
                    if sent == number {
                        self.confirmed = Some(at);
                    }
                }
                Ok(())
            }
            Message::View(view) => self.viewed(view),
            Message::Denied(why) => {
                self.out.push(CoordEvent::Denied(why));
                Ok(())
            }
            _ => Err(LinkError::Protocol("a message that is not for nodes".to_owned())),
        }
    }

    fn welcome(&mut self, heartbeat_ms: u32, failure_timeout_ms: u32) -> Result<(), LinkError> {
        if heartbeat_ms == 0 || failure_timeout_ms < heartbeat_ms {
            return Err(LinkError::Protocol("welcome: impossible heartbeat times".to_owned()));
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Left);
        let Phase::Registering { link, since } = phase else {
            self.phase = phase;
            return Err(LinkError::Protocol("welcome: was not asked for".to_owned()));
        };
        self.phase = Phase::Ready { link };
        self.heartbeat = Duration::from_millis(u64::from(heartbeat_ms));
        let timeout = u64::from(failure_timeout_ms) * 1_000_000;
        self.fence_after = Duration::from_nanos(super::fence_after(timeout));
        self.failure_timeout = Some(Duration::from_nanos(timeout));
        self.next_heartbeat = Instant::now() + self.heartbeat;
        self.sent.clear();
        self.confirmed = Some(since);
        self.disconnected = None;
        self.trouble.clear();
        self.out.push(CoordEvent::Connected);
        Ok(())
    }

    fn viewed(&mut self, view: View) -> Result<(), LinkError> {
        if view.volume != self.config.registration.volume {
            return Err(LinkError::Protocol("a view of another volume".to_owned()));
        }
        if let Some(old) = self.view.as_ref().filter(|old| old.epoch > view.epoch) {
            // A coordinator that has lost its state must not turn the clock back.
            let text = format!(
                "tells of epoch {} after {}: its state was lost or replaced; restore its folder",
                view.epoch, old.epoch
            );
            return Err(LinkError::Protocol(text));
        }
        if !self.view.as_ref().is_some_and(|old| old.same(&view)) {
            self.view = Some(view.clone());
            self.out.push(CoordEvent::View(view));
        }
        Ok(())
    }

    fn beat(&mut self, now: Instant) {
        let Phase::Ready { link } = &mut self.phase else { return };
        if now < self.next_heartbeat {
            return;
        }
        if self.held {
            self.next_heartbeat = now + self.heartbeat;
            return;
        }
        if self.sent.len() >= UNCONFIRMED {
            return self.down("does not answer", RETRY);
        }
        self.number += 1;
        let position = self.config.registration.position;
        let sent = link.send(&Message::Heartbeat { number: self.number, position });
        self.sent.push_back((self.number, now));
        // From now, not from when it was due: a loop that was held up sends one, not ten.
        self.next_heartbeat = now + self.heartbeat;
        if let Err(error) = sent {
            self.lost(&error);
        }
    }

    fn request(&mut self, message: &Message) {
        let Phase::Ready { link } = &mut self.phase else {
            let text = "not connected to the coordinator; ask again when it is".to_owned();
            self.out.push(CoordEvent::Denied(text));
            return;
        };
        if let Err(error) = link.send(message) {
            self.lost(&error);
        }
    }

    fn deadline(&self, now: Instant) -> Instant {
        match &self.phase {
            Phase::Down { retry_at } => *retry_at,
            Phase::Connecting { since, .. } | Phase::Registering { since, .. } => *since + PATIENCE,
            Phase::Ready { .. } => self.next_heartbeat,
            Phase::Left => now + Duration::from_secs(3600),
        }
    }

    /// Whether the socket is writable now: a connection under way has been decided.
    fn decided(&self) -> bool {
        let mut ready = [const { MaybeUninit::<epoll::Event>::uninit() }; 4];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut ready[..], Some(&zero)) else {
            return false;
        };
        let over = epoll::EventFlags::OUT | epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        events.iter().any(|event| {
            let flags = event.flags; // Packed: no reference into it.
            event.data.u64() == TOKEN_SOCKET && flags.intersects(over)
        })
    }
}

impl Coordinator for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn poll(&mut self, out: &mut Vec<CoordEvent>) {
        let now = Instant::now();
        // AGAIN if it did not go off. (Before its time it cannot have.)
        if self.armed.is_some_and(|at| at <= now)
            && rustix::io::read(&self.timer, &mut [0u8; 8]).is_ok()
        {
            self.armed = None;
        }
        if let Phase::Down { retry_at } = self.phase
            && retry_at <= now
        {
            self.connect(now);
        }
        if let Phase::Connecting { since, .. } | Phase::Registering { since, .. } = self.phase
            && now.duration_since(since) > PATIENCE
        {
            self.down("does not answer", RETRY);
        }
        if matches!(self.phase, Phase::Connecting { .. }) && self.decided() {
            let phase = std::mem::replace(&mut self.phase, Phase::Left);
            if let Phase::Connecting { link, .. } = phase {
                self.register(link, now);
            }
        }
        self.receive();
        self.look_at_keys();
        self.beat(now);
        let now = Instant::now();
        let deadline = self.deadline(now);
        if self.armed != Some(deadline) {
            let armed = self.set_timer(deadline.saturating_duration_since(now));
            debug_assert!(armed.is_ok(), "a timer can be set");
            self.armed = Some(deadline);
        }
        out.append(&mut self.out);
    }

    fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    fn fenced(&self) -> bool {
        self.serves_until().is_none()
    }

    fn serves_until(&self) -> Option<Instant> {
        if matches!(self.phase, Phase::Left) {
            return None;
        }
        let heard = self.confirmed? + self.fence_after;
        let until = self.disconnected.map_or(heard, |at| heard.min(at + FENCE_DISCONNECTED));
        (Instant::now() < until).then_some(until)
    }

    fn set_progress(&mut self, position: StreamSeq, state: DataState) {
        self.config.registration.position = position;
        self.config.registration.state = state;
    }

    fn opened(&mut self, position: StreamSeq, info: String) {
        self.config.registration.position = position;
        self.config.registration.info.clone_from(&info);
        self.config.registration.opening = false;
        // Else it registers as what it is.
        if let Phase::Ready { link } = &mut self.phase
            && let Err(error) = link.send(&Message::Opened { position, info })
        {
            self.lost(&error);
        }
        if matches!(self.phase, Phase::Registering { .. }) {
            self.down("registers anew", Duration::ZERO);
        }
    }

    fn caught_up(&mut self, node: NodeId, incarnation: u64, epoch: Epoch) {
        self.request(&Message::CaughtUp { node, epoch, incarnation });
    }

    fn suspect(&mut self, node: NodeId, epoch: Epoch) {
        self.request(&Message::Suspect { node, epoch });
    }

    fn leave(&mut self) {
        self.request(&Message::Leave);
        self.phase = Phase::Left;
    }

    fn failure_timeout(&self) -> Option<Duration> {
        self.failure_timeout
    }

    fn hold(&mut self, held: bool) {
        self.held = held;
    }
}

/// What answers are read from.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

fn stream(
    to: &PeerAddress,
    keys: Option<&Keys>,
    timeout: Duration,
) -> std::io::Result<Box<dyn Stream>> {
    Ok(match to {
        PeerAddress::Tcp(at) => {
            let stream = TcpStream::connect_timeout(at, timeout)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            match keys {
                Some(keys) => Box::new(session::Waiting::dial(keys, Role::Coordinator, stream)?),
                None => Box::new(stream),
            }
        }
        PeerAddress::Local(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Box::new(stream)
        }
    })
}

/// One request over a connection of its own, waiting for the answer: for commands, not for loops.
fn converse(
    coordinator: &PeerAddress,
    keys: Option<&Keys>,
    request: &Message,
    timeout: Duration,
) -> std::io::Result<(Vec<View>, Copies)> {
    let explain = |e: std::io::Error| {
        // Who was refused has been told why.
        let running = if e.kind() == ErrorKind::PermissionDenied { "" } else { "; is it running?" };
        std::io::Error::new(e.kind(), format!("coordinator at {coordinator}: {e}{running}"))
    };
    let other = |text: String| std::io::Error::other(format!("coordinator: {text}"));
    let mut stream = stream(coordinator, keys, timeout).map_err(explain)?;
    let (kind, body) = request.encode();
    let head = FrameHead::new(kind, &[&body]).ok_or_else(|| other("too long".to_owned()))?;
    stream.write_all(&[&head.encode()[..], &body].concat()).map_err(explain)?;
    let mut views = Vec::new();
    loop {
        let mut head = [0u8; FRAME_HEAD];
        stream.read_exact(&mut head).map_err(explain)?;
        let head = FrameHead::decode(&head, MESSAGE_MAX).map_err(|e| other(e.to_string()))?;
        let mut body = vec![0u8; head.len as usize];
        stream.read_exact(&mut body).map_err(explain)?;
        head.check(&body).map_err(|e| other(e.to_string()))?;
        match Message::decode(head.kind, &body).map_err(|e| other(e.to_string()))? {
            Message::View(view) if views.len() < 64 => views.push(view),
            Message::Done => return Ok((views, Copies::default())),
            Message::Copies(copies) => return Ok((views, copies)),
            Message::Refused(why) => return Err(other(why)),
            _ => return Err(other("an answer that does not fit the request".to_owned())),
        }
    }
}

/// All views, for `status`.
pub fn ask(
    coordinator: &PeerAddress,
    cluster: u128,
    keys: Option<&Keys>,
    timeout: Duration,
) -> std::io::Result<Vec<View>> {
    let ask = Message::Ask { cluster, protocol: PROTOCOL };
    converse(coordinator, keys, &ask, timeout).map(|(views, _)| views)
}

/// What every node has of `volume`.
pub fn survey(
    coordinator: &PeerAddress,
    cluster: u128,
    keys: Option<&Keys>,
    volume: &str,
    timeout: Duration,
) -> std::io::Result<Copies> {
    let volume = volume.to_owned();
    let answer = converse(coordinator, keys, &Message::Survey { cluster, volume }, timeout);
    answer.map(|(_, copies)| copies)
}

/// Goes on with one copy of `volume` alone.
pub fn choose(
    coordinator: &PeerAddress,
    cluster: u128,
    keys: Option<&Keys>,
    volume: &str,
    choice: Choice,
    timeout: Duration,
) -> std::io::Result<()> {
    let volume = volume.to_owned();
    let request = Message::Choose { cluster, volume, choice };
    converse(coordinator, keys, &request, timeout).map(|_| ())
}

/// Forms the chain of `volume` from the nodes that are there, without waiting for the others.
pub fn force(
    coordinator: &PeerAddress,
    cluster: u128,
    keys: Option<&Keys>,
    volume: &str,
    timeout: Duration,
) -> std::io::Result<()> {
    let volume = volume.to_owned();
    converse(coordinator, keys, &Message::Force { cluster, volume }, timeout).map(|_| ())
}
