//! The coordinator as a server of its own: the machine, its state folder, and TCP. One thread.

use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::Nanos;
use base::planted::{Bug, planted};
use rustix::event::{Timespec, epoll};

use super::link::Link;
use super::machine::{Action, Event, Machine, Patience, Speaker, VolumeSpec};
use super::message::{Message, View};
use super::store::{Seat, Store};
use crate::decode::LinkError;
use crate::limits::STRANGERS_MAX;
use crate::tcp;
use crate::tls::keys::Loaded;
use crate::tls::pool::{self, Pool};
use crate::tls::session::Session;
use crate::tls::{Keys, Role};
use crate::transport::PeerAddress;

/// Connections at once; more are closed.
const CONNECTIONS_MAX: usize = 256;
/// A connection that has said nothing valid by then is closed.
const STRANGER_TIME: Duration = Duration::from_secs(2);
/// How far clocks of nodes may be ahead of this one's.
const AHEAD_MAX: Duration = Duration::from_secs(3600);
const LISTENER: u64 = u64::MAX;
const HANDSHAKES: u64 = u64::MAX - 1;
const EVENTS: usize = 64;
/// Connections accepted in one go.
const ACCEPTS: usize = 16;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen.
    pub listen: PeerAddress,
    /// Where the state lies.
    pub folder: PathBuf,
    /// Identity of the cluster.
    pub cluster: u128,
    /// The volumes.
    pub volumes: Vec<VolumeSpec>,
    /// How patient to be.
    pub patience: Patience,
    /// Who this is over TCP, and whom it believes; without, whoever reaches the port is believed.
    pub keys: Option<Keys>,
}

#[derive(Debug)]
struct Conn {
    link: Link,
    speaker: Option<Speaker>,
    since: Instant,
    watched: bool,
    /// What arrives is not told.
    deaf: bool,
    /// To be closed once its queue is empty.
    last_words: bool,
    /// Says nothing more, so that the other side reads what it was told; what it still sends is dropped.
    parting: bool,
}

/// What the server has refused, for `status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerCounters {
    /// Connections closed because of what they sent.
    pub corrupt: u64,
    /// Registrations and requests turned down.
    pub refused: u64,
    /// States written.
    pub persisted: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Server {
    cluster: u128,
    listener: OwnedFd,
    address: PeerAddress,
    epoll: OwnedFd,
    store: Store,
    machine: Machine,
    conns: Vec<Option<Conn>>,
    start: Instant,
    counters: ServerCounters,
    /// Texts for the log.
    notes: Vec<String>,
    keys: Option<Keys>,
    /// Where handshakes are done, and what it rings with.
    handshakes: Option<(Pool, Arc<OwnedFd>)>,
    /// The keys by which the connections that are there have been judged.
    judged: Option<Arc<Loaded>>,
}

/// A process says when it began. If that is far off, no process of its node could take its place for as long.
fn too_new(registration: &super::Registration) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let most = u64::try_from((now + AHEAD_MAX).as_nanos()).unwrap_or(u64::MAX);
    (registration.incarnation > most).then(|| {
        format!(
            "node {}: incarnation {} lies more than an hour ahead of the coordinator's clock; set the clocks of both",
            registration.node, registration.incarnation
        )
    })
}

fn conn_whence(conns: &[Option<Conn>], index: usize) -> String {
    let conn = conns.get(index).and_then(Option::as_ref);
    conn.map_or_else(String::new, |conn| format!(" (from {})", conn.link.whence()))
}

/// Listens; where, if the port was left to the kernel.
fn listen(at: &PeerAddress) -> std::io::Result<(OwnedFd, PeerAddress)> {
    let at = match at {
        PeerAddress::Tcp(at) => at,
        PeerAddress::Local(path) => {
            return Ok((OwnedFd::from(tcp::listen_local(path)?), at.clone()));
        }
    };
    let listener = TcpListener::bind(at).map_err(|e| {
        let text = format!("cannot listen on {at}: {e}; is it running already?");
        std::io::Error::new(e.kind(), text)
    })?;
    listener.set_nonblocking(true)?;
    let address = PeerAddress::Tcp(listener.local_addr()?);
    Ok((OwnedFd::from(listener), address))
}

impl Server {
    /// Reads the state and listens.
    pub fn open(config: &ServerConfig) -> std::io::Result<Self> {
        let (store, image) = Store::open(&config.folder)?;
        let machine = Machine::new(config.cluster, &config.volumes, config.patience, image, 0)
            .map_err(std::io::Error::other)?;
        let (listener, address) = listen(&config.listen)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        let handshakes = config.keys.as_ref().map(|_| Pool::start()).transpose()?;
        if let Some((_, bell)) = &handshakes {
            let data = epoll::EventData::new_u64(HANDSHAKES);
            epoll::add(&epoll, bell, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            cluster: config.cluster,
            listener,
            address,
            epoll,
            store,
            machine,
            conns: Vec::new(),
            start: Instant::now(),
            counters: ServerCounters::default(),
            notes: Vec::new(),
            keys: config.keys.clone(),
            handshakes,
            judged: None,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> PeerAddress {
        self.address.clone()
    }

    /// The current views.
    pub fn views(&self) -> Vec<View> {
        self.machine.views()
    }

    /// What it has refused.
    pub fn counters(&self) -> ServerCounters {
        self.counters
    }

    /// What a log should have of it, since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Serves until `stop`. An error means that the state could not be persisted: start again.
    pub fn run(&mut self, stop: &AtomicBool, log: &mut dyn FnMut(&str)) -> std::io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            self.turn(Duration::from_secs(1))?;
            for note in self.take_notes() {
                log(&note);
            }
        }
        Ok(())
    }

    /// Waits, for `most` or until the next look at the clock is due, and serves what has come.
    pub fn turn(&mut self, most: Duration) -> std::io::Result<()> {
        let tick = Duration::from_nanos(self.machine.rest(self.now()));
        let idle = self.conns.iter().all(Option::is_none);
        let wait = if idle { most } else { most.min(tick) };
        let timeout = Timespec::try_from(wait).ok();
        let mut ready = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let (events, _) = match epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref()) {
            Ok(events) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        for event in events {
            match event.data.u64() {
                LISTENER => {
                    // Several: who waits behind many others is not kept waiting by them.
                    (0..ACCEPTS).all(|_| self.accept());
                }
                HANDSHAKES => self.handshakes_back()?,
                index => self.serve(index as usize)?,
            }
        }
        self.close_idle_strangers();
        self.look_at_keys()?;
        self.step(Event::Tick).map(|_| ())
    }

    /// Ends the connections of those whose certificates have been revoked, and says what became of the keys.
    fn look_at_keys(&mut self) -> std::io::Result<()> {
        let Some(keys) = &self.keys else { return Ok(()) };
        let now = keys.current();
        self.notes.append(&mut keys.take_notes());
        if self.judged.as_ref().is_some_and(|before| Arc::ptr_eq(before, &now)) {
            return Ok(());
        }
        for index in 0..self.conns.len() {
            let Some(conn) = self.conns[index].as_ref() else { continue };
            if conn.link.is_revoked(&now) {
                let whose = conn.link.role().map_or_else(String::new, |role| role.to_string());
                self.notes
                    .push(format!("closed a connection: the certificate of {whose} was revoked"));
                self.close(index)?;
            }
        }
        self.judged = Some(now);
        Ok(())
    }

    fn now(&self) -> Nanos {
        Nanos::try_from(self.start.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    /// Lets the machine decide, and does what it says, in its order.
    fn step(&mut self, event: Event) -> std::io::Result<Result<(), String>> {
        let (verdict, actions) = self.machine.step(event, self.now());
        for action in actions {
            match action {
                Action::Persist(image) => {
                    self.store.write(&image)?;
                    self.counters.persisted += 1;
                }
                Action::Push(node, view) => {
                    let to = |s: &Speaker| s.node == node && s.volume == view.volume;
                    let index = self
                        .conns
                        .iter()
                        .position(|c| c.as_ref().and_then(|c| c.speaker.as_ref()).is_some_and(to));
                    if let Some(index) = index {
                        self.say(index, &Message::View(view));
                    }
                }
            }
        }
        Ok(verdict)
    }

    /// Takes one connection; false if there is no other.
    fn accept(&mut self) -> bool {
        let fd = match tcp::accept(self.listener.as_fd()) {
            Ok(Some(fd)) => fd,
            Ok(None) => return false,
            Err(errno) => {
                // Out of descriptors: it would be reported again at once.
                self.notes.push(format!("cannot accept: {errno}; raise the open file limit"));
                std::thread::sleep(Duration::from_millis(10));
                return false;
            }
        };
        let good = match self.address {
            PeerAddress::Tcp(_) => tcp::tune(&fd).is_ok(),
            PeerAddress::Local(_) => tcp::is_ours(&fd),
        };
        self.make_room();
        if self.conns.iter().flatten().count() >= CONNECTIONS_MAX || !good {
            self.counters.refused += 1;
            return true;
        }
        let session = match (&self.keys, &self.address) {
            (Some(keys), PeerAddress::Tcp(_)) => {
                match Session::answer(keys, self.handshakes.as_ref().map(|(pool, _)| pool)) {
                    Ok(session) => Some(session),
                    Err(error) => {
                        self.notes.push(format!("cannot answer a connection: {error}"));
                        return true;
                    }
                }
            }
            _ => None,
        };
        let index = self.conns.iter().position(Option::is_none).unwrap_or(self.conns.len());
        let data = epoll::EventData::new_u64(index as u64);
        if epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN).is_err() {
            return true;
        }
        if index == self.conns.len() {
            self.conns.push(None);
        }
        self.conns[index] = Some(Conn {
            link: Link::new(fd, session),
            speaker: None,
            since: Instant::now(),
            watched: false,
            deaf: false,
            last_words: false,
            parting: false,
        });
        true
    }

    /// Who has said nothing for longest makes room for a newcomer: silent connections keep nobody out.
    fn make_room(&mut self) {
        let since =
            |slot: &Option<Conn>| slot.as_ref().filter(|c| c.speaker.is_none()).map(|c| c.since);
        let strangers = self.conns.iter().filter_map(since).count();
        if strangers < STRANGERS_MAX {
            return;
        }
        let oldest = (0..self.conns.len())
            .filter_map(|index| since(&self.conns[index]).map(|since| (since, index)))
            .min();
        if let Some((_, index)) = oldest {
            self.counters.refused += 1;
            self.conns[index] = None;
        }
    }

    fn close_idle_strangers(&mut self) {
        for slot in &mut self.conns {
            let late = |c: &Conn| c.speaker.is_none() && c.since.elapsed() > STRANGER_TIME;
            if slot.as_ref().is_some_and(late) {
                *slot = None;
            }
        }
    }

    /// Sends; a connection that takes nothing is marked to be closed at its next event.
    fn say(&mut self, index: usize, message: &Message) {
        let Some(conn) = self.conns[index].as_mut() else { return };
        if conn.link.send(message).is_err() {
            conn.last_words = true;
        }
        self.watch(index);
    }

    /// Parts of handshakes are done: those connections are served.
    fn handshakes_back(&mut self) -> std::io::Result<()> {
        if let Some((_, bell)) = &self.handshakes {
            pool::heard(bell);
        }
        let back = |slot: &Option<Conn>| slot.as_ref().is_some_and(|c| c.link.is_back());
        let all: Vec<usize> = (0..self.conns.len()).filter(|i| back(&self.conns[*i])).collect();
        all.into_iter().try_for_each(|index| self.serve(index))
    }

    fn watch(&mut self, index: usize) {
        let Some(conn) = self.conns[index].as_mut() else { return };
        let wanted = conn.link.has_queue() || conn.last_words;
        // What arrives while a part of the handshake is done elsewhere is looked at afterwards.
        let deaf = conn.link.is_away();
        if wanted != conn.watched || deaf != conn.deaf {
            conn.deaf = deaf;
            let mut flags = epoll::EventFlags::empty();
            flags.set(epoll::EventFlags::IN, !deaf);
            flags.set(epoll::EventFlags::OUT, wanted);
            let data = epoll::EventData::new_u64(index as u64);
            let changed = epoll::modify(&self.epoll, conn.link.as_fd(), data, flags);
            conn.watched = wanted && changed.is_ok();
        }
    }

    fn serve(&mut self, index: usize) -> std::io::Result<()> {
        let Some(Some(conn)) = self.conns.get_mut(index) else { return Ok(()) };
        if conn.parting {
            if !conn.link.discard() {
                self.conns[index] = None;
            }
            return Ok(());
        }
        let flushed = conn.link.flush();
        if conn.last_words {
            if flushed != Ok(true) {
                self.part(index)?;
            }
            return Ok(());
        }
        let (messages, ended) = conn.link.receive();
        for message in messages {
            self.hear(index, message)?;
        }
        if let Some(error) = ended.or(flushed.err()) {
            let whence = || conn_whence(&self.conns, index);
            match &error {
                LinkError::Protocol(what) => {
                    self.counters.corrupt += 1;
                    self.notes.push(format!("closed a connection: {what}{}", whence()));
                }
                LinkError::Refused(what) => {
                    self.counters.refused += 1;
                    self.notes.push(format!("refused: {what}{}", whence()));
                }
                LinkError::Closed | LinkError::Io(_) => {}
            }
            return self.part(index);
        }
        self.watch(index);
        Ok(())
    }

    /// Closes a connection whose other side may not have read yet what it was told.
    fn part(&mut self, index: usize) -> std::io::Result<()> {
        let Some(conn) = self.conns[index].as_mut() else { return Ok(()) };
        if conn.speaker.is_some() || !conn.link.part() {
            return self.close(index);
        }
        conn.parting = true;
        let data = epoll::EventData::new_u64(index as u64);
        let _ = epoll::modify(&self.epoll, conn.link.as_fd(), data, epoll::EventFlags::IN);
        Ok(())
    }

    fn close(&mut self, index: usize) -> std::io::Result<()> {
        let Some(conn) = self.conns[index].take() else { return Ok(()) };
        if let Some(speaker) = conn.speaker {
            // Refused if another process of the node has registered since: then it is old news.
            let _ = self.step(Event::Disconnected(speaker))?;
        }
        Ok(())
    }

    fn hear(&mut self, index: usize, message: Message) -> std::io::Result<()> {
        let Some(conn) = self.conns[index].as_ref() else { return Ok(()) };
        if conn.last_words {
            return Ok(());
        }
        let speaker = conn.speaker.clone();
        if let Some(why) = self.forbids(conn, &message) {
            let whence = conn.link.whence();
            self.refuse(index, &format!("{why} (from {whence})"));
            return Ok(());
        }
        match (message, speaker) {
            (Message::Register { protocol, cluster, registration }, None) => {
                self.speaks(index, protocol);
                self.register(index, cluster, registration)
            }
            (Message::Ask { cluster, protocol }, None) if cluster == self.cluster => {
                self.speaks(index, protocol);
                for view in self.machine.views() {
                    self.say(index, &Message::View(view));
                }
                self.say(index, &Message::Done);
                Ok(())
            }
            (Message::Force { cluster, volume }, None) if cluster == self.cluster => {
                match self.step(Event::Force(volume))? {
                    Ok(()) => self.say(index, &Message::Done),
                    Err(why) => self.refuse(index, &why),
                }
                Ok(())
            }
            (Message::Survey { cluster, volume }, None) if cluster == self.cluster => {
                match self.machine.copies(&volume) {
                    Some(copies) => self.say(index, &Message::Copies(copies)),
                    None => self.refuse(index, "there is no such volume"),
                }
                Ok(())
            }
            (Message::Choose { cluster, volume, choice }, None) if cluster == self.cluster => {
                match self.step(Event::Choose(volume, choice))? {
                    Ok(()) => self.say(index, &Message::Done),
                    Err(why) => self.refuse(index, &why),
                }
                Ok(())
            }
            (
                Message::Ask { .. }
                | Message::Force { .. }
                | Message::Survey { .. }
                | Message::Choose { .. },
                None,
            ) => {
                self.refuse(index, "this coordinator serves another cluster; check the config");
                Ok(())
            }
            (Message::Heartbeat { number, position }, Some(by)) => {
                match self.step(Event::Heartbeat(by, position))? {
                    Ok(()) => self.say(index, &Message::Confirm { number }),
                    Err(why) => self.refuse(index, &why),
                }
                Ok(())
            }
            (Message::Opened { position, info }, Some(by)) => {
                self.ask(index, Event::Opened(by, position, info))
            }
            (Message::CaughtUp { node, epoch, incarnation }, Some(by)) => {
                self.ask(index, Event::CaughtUp(by, Seat { node, incarnation }, epoch))
            }
            (Message::Suspect { node, epoch }, Some(by)) => {
                self.ask(index, Event::Suspect(by, node, epoch))
            }
            (Message::Leave, Some(by)) => {
                self.ask(index, Event::Leave(by))?;
                if let Some(conn) = self.conns[index].as_mut() {
                    conn.speaker = None;
                    conn.last_words = true;
                }
                Ok(())
            }
            _ => {
                self.counters.corrupt += 1;
                self.refuse(index, "a message that does not fit the state of the connection");
                Ok(())
            }
        }
    }

    /// Why this side of a connection may not say this, by its certificate. What a node says after it has registered
    /// is held against whom it registered as.
    fn forbids(&self, conn: &Conn, message: &Message) -> Option<String> {
        if self.keys.is_none() || matches!(self.address, PeerAddress::Local(_)) {
            return None;
        }
        let Some(role) = conn.link.role() else {
            return Some("no certificate was shown".to_owned());
        };
        match message {
            Message::Register { registration, .. }
                if role != Role::Node(registration.node)
                    && !planted(Bug::NodeOfCertificateUnchecked) =>
            {
                let node = registration.node;
                Some(format!(
                    "who has the certificate of {role} registers as node {node}; give each node its own: \
                     `corbel cert issue node-{node}`"
                ))
            }
            Message::Force { .. } | Message::Choose { .. }
                if role != Role::Admin && !planted(Bug::RoleUnchecked) =>
            {
                Some(format!(
                    "{role} may not decide what becomes of a volume; ask with the certificate of admin: \
                     `corbel cert issue admin`"
                ))
            }
            _ => None,
        }
    }

    /// What the other side of a connection understands.
    fn speaks(&mut self, index: usize, protocol: u16) {
        if let Some(conn) = self.conns[index].as_mut() {
            conn.link.set_protocol(protocol);
        }
    }

    fn ask(&mut self, index: usize, event: Event) -> std::io::Result<()> {
        if let Err(why) = self.step(event)? {
            self.counters.refused += 1;
            self.say(index, &Message::Denied(why));
        }
        Ok(())
    }

    fn refuse(&mut self, index: usize, why: &str) {
        self.counters.refused += 1;
        self.notes.push(format!("refused: {why}"));
        self.say(index, &Message::Refused(why.to_owned()));
        if let Some(conn) = self.conns[index].as_mut() {
            conn.last_words = true;
        }
        self.watch(index);
    }

    fn register(
        &mut self,
        index: usize,
        cluster: u128,
        registration: super::Registration,
    ) -> std::io::Result<()> {
        if cluster != self.cluster {
            let why = format!(
                "node {} belongs to cluster {cluster:032x}, this coordinator to {:032x}; check the config",
                registration.node, self.cluster
            );
            self.refuse(index, &why);
            return Ok(());
        }
        if let Some(why) = too_new(&registration) {
            self.refuse(index, &why);
            return Ok(());
        }
        let speaker = Speaker {
            volume: registration.volume.clone(),
            node: registration.node,
            incarnation: registration.incarnation,
        };
        if let Err(why) = self.step(Event::Register(registration))? {
            self.refuse(index, &why);
            return Ok(());
        }
        // An older connection of the node is dead, whether or not we were told.
        for slot in &mut self.conns {
            let same = |s: &Speaker| s.node == speaker.node && s.volume == speaker.volume;
            if slot.as_ref().and_then(|c| c.speaker.as_ref()).is_some_and(same) {
                *slot = None;
            }
        }
        let view = self.machine.view(&speaker.volume);
        if let Some(conn) = self.conns[index].as_mut() {
            conn.speaker = Some(speaker);
        }
        let patience = self.machine.patience();
        let (heartbeat_ms, failure_timeout_ms) =
            (patience.heartbeat_ms, patience.failure_timeout_ms);
        self.say(index, &Message::Welcome { heartbeat_ms, failure_timeout_ms });
        if let Some(view) = view {
            self.say(index, &Message::View(view));
        }
        Ok(())
    }
}
