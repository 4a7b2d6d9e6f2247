//! Listening and accepting.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use super::*;
use crate::decode::Decoder;
use crate::limits::{HELLO_BODY_MAX, HELLO_TIMEOUT, STRANGERS_MAX};
use crate::queue::OutQueue;
use crate::tcp;
use crate::tls::pool;
use crate::tls::session::Session;
use conn::Io;

fn explain(error: std::io::Error, what: &str) -> std::io::Error {
    std::io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn listen_tcp(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address).map_err(|e| {
        explain(e, &format!("cannot listen on {address} (is another node running there?)"))
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl Net {
    /// Listens where the config says. No peers yet.
    pub fn new(config: NetConfig) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let tcp = config.tcp.map(listen_tcp).transpose()?;
        let tcp_address = tcp.as_ref().map(TcpListener::local_addr).transpose()?;
        let local =
            config.run_dir.as_ref().map(|d| tcp::listen_local(&socket_path(d, config.node)));
        let local = local.transpose()?;
        let (tcp, local) = (tcp.map(OwnedFd::from), local.map(OwnedFd::from));
        for (tag, listener) in [(TAG_TCP, &tcp), (TAG_LOCAL, &local)] {
            if let Some(fd) = listener {
                epoll::add(&epoll, fd, data(tag, 0, 0), epoll::EventFlags::IN)?;
            }
        }
        let handshakes = config.keys.as_ref().map(|_| pool::Pool::start()).transpose()?;
        if let Some((_, bell)) = &handshakes {
            epoll::add(&epoll, bell, data(TAG_TLS, 0, 0), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            config,
            epoll,
            tcp,
            local,
            tcp_address,
            accept_at: None,
            handshakes,
            judged: None,
            links: BTreeMap::new(),
            conns: Vec::new(),
            generation: 0,
            sessions: 0,
            extras: Vec::new(),
            pool: Pool::default(),
            events: Vec::new(),
            skips: 0,
            traffic: None,
            counters: Counters::default(),
        })
    }

    pub(super) fn watch_listeners(&mut self, on: bool) {
        let flags = if on { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (tag, listener) in [(TAG_TCP, &self.tcp), (TAG_LOCAL, &self.local)] {
            if let Some(fd) = listener {
                let changed = epoll::modify(&self.epoll, fd, data(tag, 0, 0), flags);
                debug_assert!(changed.is_ok(), "a registered listener can be changed");
            }
        }
    }

    /// Takes one connection; false if there is no other.
    pub(super) fn accept(&mut self, tcp: bool) -> bool {
        let listener = if tcp { &self.tcp } else { &self.local };
        let Some(listener) = listener else { return false };
        let accepted = tcp::accept(listener.as_fd());
        let fd = match accepted {
            Ok(Some(fd)) => fd,
            Ok(None) => return false,
            Err(errno) => {
                // Out of descriptors or memory: the connection stays waiting, and epoll would
                // report it again at once.
                self.watch_listeners(false);
                self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                let what = format!("cannot accept connections: {errno}; raise the open file limit");
                self.events.push(NetEvent::Rejected { node: None, what });
                return false;
            }
        };
        if !tcp && !tcp::is_ours(&fd) {
            self.counters.refused += 1;
            let what = "refused: a local connection of another user".to_owned();
            self.events.push(NetEvent::Rejected { node: None, what });
            return true;
        }
        self.make_room();
        if tcp && let Err(errno) = tcp::tune(&fd) {
            let what = format!("cannot set up an accepted connection: {errno}");
            self.events.push(NetEvent::Rejected { node: None, what });
            return true;
        }
        let tls = match &self.config.keys {
            Some(keys) if tcp => {
                match Session::answer(keys, self.handshakes.as_ref().map(|(pool, _)| pool)) {
                    Ok(session) => Some(Box::new(session)),
                    Err(error) => {
                        let what = format!("cannot answer a connection: {error}");
                        self.events.push(NetEvent::Rejected { node: None, what });
                        return true;
                    }
                }
            }
            _ => None,
        };
        match self.add(fd, !tcp, None, Class::LowLatency, Phase::Greeting) {
            Ok(index) => {
                if let Some(conn) = self.conns[index].as_mut() {
                    conn.tls = tls;
                }
            }
            Err(error) => {
                let what = format!("cannot watch an accepted connection: {error}");
                self.events.push(NetEvent::Rejected { node: None, what });
            }
        }
        true
    }

    /// Who has said no hello for longest makes room for a newcomer: silent connections keep nobody out.
    fn make_room(&mut self) {
        let since = |slot: &Option<Conn>| slot.as_ref().filter(|c| c.node.is_none())?.deadline;
        if self.conns.iter().filter_map(since).count() < STRANGERS_MAX {
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

    /// Takes a new connection into the loop.
    pub(super) fn add(
        &mut self,
        fd: OwnedFd,
        local: bool,
        node: Option<NodeId>,
        class: Class,
        phase: Phase,
    ) -> std::io::Result<usize> {
        let index = self.conns.iter().position(Option::is_none).unwrap_or(self.conns.len());
        self.generation = self.generation.wrapping_add(1);
        let watched = phase == Phase::Connecting;
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, watched);
        epoll::add(&self.epoll, &fd, data(TAG_CONN, self.generation, index), flags)?;
        let conn = Conn {
            generation: self.generation,
            index,
            io: Io::Socket(fd),
            tls: None,
            local,
            phase,
            dialled: node.is_some(),
            node,
            class,
            session: 0,
            decoder: Decoder::for_socket(HELLO_BODY_MAX),
            queue: OutQueue::new(self.config.queue_high[class as usize]),
            ring_file: None,
            ring_bytes: 0,
            deadline: Some(Instant::now() + HELLO_TIMEOUT),
            readable: false,
            writable: false,
            watched,
            ended: false,
        };
        if index == self.conns.len() {
            self.conns.push(None);
        }
        self.conns[index] = Some(conn);
        Ok(index)
    }
}
