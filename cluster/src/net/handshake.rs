//! Dialling, and the hello in both directions.

use base::planted::{Bug, planted};

use super::*;
use crate::decode::Decoder;
use crate::limits::{RING_BULK, RING_LOW_LATENCY};
use crate::queue::OutQueue;
use crate::shm::{self, Ring};
use crate::tcp::{self, Passing, Stream};
use crate::tls::Role;
use crate::tls::session::Session;
use crate::wire::{Hello, KIND_HELLO, KIND_REFUSAL, KIND_WELCOME, Refusal};
use conn::Io;

fn ring_size(class: Class) -> usize {
    match class {
        Class::LowLatency => RING_LOW_LATENCY,
        Class::Bulk => RING_BULK,
    }
}

fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
    let head = FrameHead::new(kind, &[body]).expect("a hello is far below the limit");
    [&head.encode()[..], body].concat()
}

impl Net {
    /// Begins both connections of a link.
    pub(super) fn dial(&mut self, node: NodeId) {
        self.sessions += 1;
        let session = self.sessions;
        let Some(link) = self.links.get_mut(&node) else { return };
        link.dial_at = None;
        let address = link.address.clone();
        for class in Class::ALL {
            let (opened, local) = match &address {
                PeerAddress::Tcp(at) => (tcp::connect(*at), false),
                PeerAddress::Local(path) => (tcp::connect_local(path), true),
            };
            let added = opened.map_err(std::io::Error::from).and_then(|fd| {
                let phase = if local { Phase::Greeting } else { Phase::Connecting };
                self.add(fd, local, Some(node), class, phase)
            });
            let index = match added {
                Ok(index) => index,
                Err(e) => {
                    return self.close_link(node, DownReason::Io(format!("{address}: {e}")));
                }
            };
            if let Some(conn) = self.conns[index].as_mut() {
                conn.session = session;
            }
            if let Some(link) = self.links.get_mut(&node) {
                link.conns[class as usize] = Some(index);
            }
            if local && let Err(error) = self.say_hello(index) {
                return self.fail(index, error);
            }
        }
    }

    /// The kernel has reached the peer, or has not.
    pub(super) fn connected(&mut self, index: usize) {
        let Some(conn) = self.conns[index].as_mut() else { return };
        conn.phase = Phase::Greeting;
        conn.writable = false;
        let outcome = rustix::net::sockopt::socket_error(conn.fd());
        let result = match outcome {
            Ok(Ok(())) => self.secure(index).and_then(|()| self.say_hello(index)),
            Ok(Err(errno)) | Err(errno) => Err(LinkError::Io(errno.to_string())),
        };
        if let Err(error) = result {
            self.fail(index, error);
        }
    }

    /// TLS, if there are keys. What is said from now on is sent when the other side has shown who it is.
    fn secure(&mut self, index: usize) -> Result<(), LinkError> {
        let Some(conn) = self.conns[index].as_mut() else { return Ok(()) };
        if let (Some(keys), Some(whom)) = (&self.config.keys, conn.node) {
            let pool = self.handshakes.as_ref().map(|(pool, _)| pool);
            conn.tls = Some(Box::new(Session::dial(keys, Role::Node(whom), pool)?));
        }
        conn.flush(&self.epoll).map(|_| ())
    }

    fn say_hello(&mut self, index: usize) -> Result<(), LinkError> {
        let Some(conn) = self.conns[index].as_mut() else { return Ok(()) };
        let Some(to) = conn.node else { return Ok(()) };
        if conn.local {
            conn.ring_bytes = ring_size(conn.class);
            conn.ring_file = Some(shm::create(conn.ring_bytes)?);
        }
        let hello = Hello {
            class: conn.class,
            from: self.config.node,
            to,
            cluster: self.config.cluster,
            incarnation: self.config.incarnation,
            session: conn.session,
            ring_bytes: conn.local.then_some(conn.ring_bytes as u32),
        };
        let bytes = frame(KIND_HELLO, &hello.encode());
        let Io::Socket(fd) = &conn.io else { return Ok(()) };
        let file = conn.ring_file.as_ref().map(AsFd::as_fd);
        tcp::send_first(fd.as_fd(), conn.tls.as_deref_mut(), &bytes, file)
    }

    /// Reads the hello or the answer to it.
    pub(super) fn greet(&mut self, index: usize) {
        let Some(conn) = self.conns[index].as_mut() else { return };
        let Io::Socket(fd) = &conn.io else { return };
        let mut passed = None;
        let next = if conn.local {
            let mut source = Passing { fd: fd.as_fd(), passed: &mut passed };
            conn.decoder.next(&mut source, &mut self.pool)
        } else {
            let mut source = Stream::new(fd.as_fd(), conn.tls.as_deref_mut());
            conn.decoder.next(&mut source, &mut self.pool)
        };
        if passed.is_some() && !conn.dialled {
            conn.ring_file = passed;
        }
        let dialled = conn.dialled;
        let result = match next {
            Ok(None) => {
                conn.readable = false;
                if conn.tls.as_ref().is_some_and(|session| session.is_away()) {
                    conn.listen(&self.epoll, false);
                }
                return;
            }
            Ok(Some((KIND_HELLO, body))) if !dialled => self.on_hello(index, &body),
            Ok(Some((KIND_WELCOME, body))) if dialled => self.on_welcome(index, &body),
            Ok(Some((KIND_REFUSAL, body))) if dialled => self.on_refusal(index, &body),
            Ok(Some((kind, _))) => {
                Err(LinkError::Protocol(format!("frame kind {kind:#x} came before the hello")))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            self.fail(index, error);
        }
    }

    /// Decides about a dialler; `role`: what its certificate says, where one is asked for.
    fn judge(
        &self,
        hello: &Hello,
        local: bool,
        role: Option<Role>,
    ) -> Result<(), (Refusal, String)> {
        let me = self.config.node;
        let from = hello.from;
        if let Some(role) = role.filter(|role| *role != Role::Node(from))
            && !planted(Bug::NodeOfCertificateUnchecked)
        {
            let text = format!(
                "node {from} was said, by who has the certificate of {role}; give each node its own: \
                 `corbel cert issue node-{from}`"
            );
            return Err((Refusal::WrongRole, text));
        }
        if hello.cluster != self.config.cluster {
            let text = format!(
                "node {from} belongs to cluster {:032x}, this one to {:032x}; check the config",
                hello.cluster, self.config.cluster
            );
            return Err((Refusal::WrongCluster, text));
        }
        if hello.to != me {
            let text = format!("node {} was meant, this is node {me}; check addresses", hello.to);
            return Err((Refusal::WrongNode, text));
        }
        let Some(link) = self.links.get(&from) else {
            let text = format!("node {from} is not among the peers of node {me}");
            return Err((Refusal::UnknownPeer, text));
        };
        if from >= me || local != hello.ring_bytes.is_some() {
            let text = "the lower id dials, and a ring comes over a local socket only".to_owned();
            return Err((Refusal::Malformed, text));
        }
        if (hello.incarnation, hello.session) < (link.incarnation, link.session) {
            let text = format!(
                "node {from}: incarnation {} session {} came after {} session {}",
                hello.incarnation, hello.session, link.incarnation, link.session
            );
            return Err((Refusal::OldIncarnation, text));
        }
        Ok(())
    }

    fn on_hello(&mut self, index: usize, body: &[u8]) -> Result<(), LinkError> {
        let hello = Hello::decode(body)?;
        let Some(conn) = self.conns[index].as_ref() else { return Ok(()) };
        let role = match (&self.config.keys, &conn.tls) {
            (Some(_), None) if !conn.local => return Err(LinkError::Closed),
            (_, Some(session)) => Some(session.role().ok_or(LinkError::Closed)?),
            (_, None) => None,
        };
        if let Err((refusal, text)) = self.judge(&hello, conn.local, role) {
            self.say_first(index, KIND_REFUSAL, &refusal.encode(&text)).ok();
            self.counters.refused += 1;
            let Some(conn) = self.conns[index].take() else { return Ok(()) };
            let what = format!("refused: {text} (from {})", tcp::whence(conn.fd()));
            self.events.push(NetEvent::Rejected { node: None, what });
            if conn.tls.is_some() {
                self.part(index, conn);
            }
            return Ok(());
        }
        let Some(link) = self.links.get_mut(&hello.from) else { return Ok(()) };
        if (hello.incarnation, hello.session) > (link.incarnation, link.session) {
            (link.incarnation, link.session) = (hello.incarnation, hello.session);
            if link.conns.iter().any(Option::is_some) {
                self.close_link(hello.from, DownReason::Replaced);
            }
        }
        let Some(link) = self.links.get_mut(&hello.from) else { return Ok(()) };
        let slot = &mut link.conns[hello.class as usize];
        if slot.is_some() {
            return Err(LinkError::Protocol("hello: this class is connected already".to_owned()));
        }
        *slot = Some(index);
        let Some(conn) = self.conns[index].as_mut() else { return Ok(()) };
        conn.node = Some(hello.from);
        conn.class = hello.class;
        conn.session = hello.session;
        conn.queue = OutQueue::new(self.config.queue_high[hello.class as usize]);
        conn.ring_bytes = hello.ring_bytes.unwrap_or(0) as usize;
        let answer = Hello {
            from: self.config.node,
            to: hello.from,
            incarnation: self.config.incarnation,
            ..hello
        };
        self.open(index);
        self.say_first(index, KIND_WELCOME, &answer.encode())?;
        self.maybe_up(hello.from);
        Ok(())
    }

    fn say_first(&mut self, index: usize, kind: u16, body: &[u8]) -> Result<(), LinkError> {
        let Some(conn) = self.conns[index].as_mut() else { return Ok(()) };
        let fd = match &conn.io {
            Io::Socket(fd) => fd.as_fd(),
            Io::Ring(ring) => ring.socket(),
        };
        tcp::send_first(fd, conn.tls.as_deref_mut(), &frame(kind, body), None)
    }

    fn on_welcome(&mut self, index: usize, body: &[u8]) -> Result<(), LinkError> {
        let welcome = Hello::decode(body)?;
        let Some(conn) = self.conns[index].as_ref() else { return Ok(()) };
        let same = welcome.cluster == self.config.cluster
            && Some(welcome.from) == conn.node
            && welcome.to == self.config.node
            && welcome.class == conn.class
            && welcome.session == conn.session
            && welcome.ring_bytes.unwrap_or(0) as usize == conn.ring_bytes;
        if !same {
            let what = "welcome: does not answer the hello that was sent";
            return Err(LinkError::Protocol(what.to_owned()));
        }
        let Some(link) = self.links.get_mut(&welcome.from) else { return Ok(()) };
        let sibling_open = link.conns.iter().flatten().any(|at| {
            *at != index && self.conns[*at].as_ref().is_some_and(|c| c.phase == Phase::Open)
        });
        if welcome.incarnation < link.incarnation
            || sibling_open && welcome.incarnation != link.incarnation
        {
            let what = "welcome: an older incarnation than was seen before";
            return Err(LinkError::Protocol(what.to_owned()));
        }
        link.incarnation = welcome.incarnation;
        self.open(index);
        self.maybe_up(welcome.from);
        Ok(())
    }

    fn on_refusal(&mut self, index: usize, body: &[u8]) -> Result<(), LinkError> {
        let (refusal, text) = Refusal::decode(body)?;
        let Some(conn) = self.conns[index].as_ref() else { return Ok(()) };
        self.counters.refused += 1;
        if let Some(node) = conn.node {
            self.close_link(node, DownReason::Ours);
            self.report(node, format!("refused by node {node} ({refusal:?}): {text}"));
        }
        Ok(())
    }

    /// The handshake is over: frames flow, through rings if they were agreed on. The link is
    /// closed if the ring is none.
    fn open(&mut self, index: usize) {
        let Some(mut conn) = self.conns[index].take() else { return };
        conn.phase = Phase::Open;
        conn.decoder.trust();
        // What a session has read ahead, epoll will not tell of.
        conn.readable = conn.tls.is_some();
        if conn.local {
            let (node, file) = (conn.node, conn.ring_file.take());
            let Io::Socket(socket) = conn.io else { return };
            let opened = match file {
                Some(file) => Ring::open(&file, conn.ring_bytes, conn.dialled, socket),
                None => Err(LinkError::Protocol("shared ring: no file came along".to_owned())),
            };
            match (opened, node) {
                (Ok(ring), _) => conn.io = Io::Ring(Box::new(ring)),
                (Err(error), Some(node)) => return self.close_link(node, error.into()),
                (Err(_), None) => return,
            }
            conn.decoder = Decoder::for_ring();
        }
        self.conns[index] = Some(conn);
    }
}
