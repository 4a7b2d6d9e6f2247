//! One connection: negotiation, then requests until the end.
//!
//! The thread that reads carries out what it has read, all requests that came together as one batch: what
//! is quick costs no change of threads, and one flush serves all that ask for durability. Where a batch may
//! take long, another thread of the connection reads on meanwhile. A client that sends one request at a time is
//! answered by one thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::exports::Exports;
use super::handshake::{Agreed, Handshake, Next, TlsPolicy};
use super::output::{Flight, Output};
use super::requests::{Asked, Rules, Taken, reply, take};
use super::wire::{Inbox, Received, Wire};
use crate::device::{Answer, Op, Request};

/// Bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// How long a client may haggle.
    pub handshake: Duration,
    /// How long it may stop in the middle of a request, or not take a reply.
    pub stall: Duration,
    /// How long it may say nothing at all; none: for ever, as kernels do.
    pub idle: Option<Duration>,
    /// Requests that it may have in flight.
    pub requests: usize,
    /// Bytes of payload that these may have.
    pub bytes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            idle: None,
            requests: 256,
            bytes: 64 << 20,
        }
    }
}

/// Threads of one connection that may carry out requests at the same time.
const THREADS_MAX: usize = 4;
/// Requests carried out together.
const BATCH_MAX: usize = 64;

/// What all connections of a server share.
#[derive(Debug)]
pub struct Common {
    /// What is offered.
    pub exports: Arc<Exports>,
    /// Whether TLS is.
    pub tls: TlsPolicy,
    /// Its configuration, unless it is off.
    pub config: Option<Arc<rustls::ServerConfig>>,
    /// Bounds of each connection.
    pub bounds: Bounds,
}

/// A connection that can be ended from outside.
#[derive(Debug)]
pub(super) struct Handle(Mutex<Option<OwnedFd>>);

impl Handle {
    /// For a socket.
    pub fn new(socket: &OwnedFd) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self(Mutex::new(Some(socket.try_clone()?)))))
    }

    /// Ends it: what is in flight is still carried out.
    pub fn end(&self) {
        if let Some(socket) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
        }
    }

    fn close(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Serves one client until it goes, is sent away, or the server ends.
pub(super) fn serve(common: &Common, socket: OwnedFd, handle: &Handle) {
    match negotiate(common, socket) {
        Ok(Some((wire, inbox, agreed))) => Connection::run(common, wire, inbox, *agreed),
        Ok(None) => {}
        Err(error) => log::info!("nbd: a client did not come to terms: {error}"),
    }
    handle.close();
}

type Negotiated = (Wire, Inbox, Box<Agreed>);

fn negotiate(common: &Common, socket: OwnedFd) -> io::Result<Option<Negotiated>> {
    let deadline = Instant::now() + common.bounds.handshake;
    let mut wire = Wire::new(socket)?;
    let mut inbox = Inbox::new();
    let (mut machine, greeting) = Handshake::new(Arc::clone(&common.exports), common.tls);
    wire.send_all(greeting, deadline)?;
    loop {
        let mut out = Vec::new();
        let (taken, next) = machine.take(inbox.bytes(), &mut out);
        inbox.take(taken);
        if !out.is_empty() {
            wire.send_all(out, deadline)?;
        }
        match next {
            Next::Close(None) => return Ok(None),
            Next::Close(Some(why)) => return Err(io::Error::new(io::ErrorKind::InvalidData, why)),
            Next::Transmit(agreed) => return Ok(Some((wire, inbox, agreed))),
            Next::StartTls => {
                // What was sent before the answer was not protected: it may be anybody's.
                if !inbox.bytes().is_empty() {
                    let why = "bytes between STARTTLS and its answer";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                let Some(config) = &common.config else {
                    return Err(io::ErrorKind::Unsupported.into());
                };
                let tls = rustls::ServerConnection::new(Arc::clone(config))
                    .map_err(|e| io::Error::other(e.to_string()))?;
                wire = wire.secure(tls, deadline)?;
                wire.drain(&mut inbox)?;
                machine.secured();
            }
            Next::More if taken > 0 => {}
            Next::More => {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                if wire.receive(&mut inbox)? == Received::End {
                    return Ok(None);
                }
            }
        }
    }
}

/// What only the reading thread touches.
#[derive(Debug)]
struct Reading {
    inbox: Inbox,
    rules: Rules,
    /// When bytes came last.
    heard: Instant,
    /// The batch before was one request.
    alone: bool,
}

/// A connection after the negotiation.
struct Connection {
    wire: Arc<Wire>,
    output: Arc<Output>,
    agreed: Agreed,
    bounds: Bounds,
    reading: Mutex<Reading>,
    threads: AtomicUsize,
    over: AtomicBool,
}

impl Connection {
    fn run(common: &Common, wire: Wire, inbox: Inbox, agreed: Agreed) {
        log::info!("nbd: a client of export {:?}", agreed.name);
        let wire = Arc::new(wire);
        let bounds = common.bounds;
        let flight = Flight { requests: bounds.requests, bytes: bounds.bytes };
        let output = Output::new(Arc::clone(&wire), flight, bounds.stall);
        let device = &agreed.export.device;
        let rules = Rules {
            size: device.size(),
            traits: device.traits(),
            structured: agreed.structured,
            block_status: agreed.block_status,
        };
        let reading = Reading { inbox, rules, heard: Instant::now(), alone: true };
        let connection = Self {
            wire,
            output,
            agreed,
            bounds,
            reading: Mutex::new(reading),
            threads: AtomicUsize::new(1),
            over: AtomicBool::new(false),
        };
        std::thread::scope(|scope| connection.work(scope));
        connection.output.settle();
        connection.wire.shut();
    }

    /// What each thread of the connection does.
    fn work<'s>(&'s self, scope: &'s std::thread::Scope<'s, '_>) {
        loop {
            let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
            if self.over.load(Ordering::Relaxed) {
                return;
            }
            let batch = match self.next_batch(&mut reading) {
                Ok(batch) => batch,
                Err(why) => {
                    if let Some(why) = why {
                        log::info!("nbd: export {:?}: {why}", self.agreed.name);
                    }
                    self.over.store(true, Ordering::Relaxed);
                    return;
                }
            };
            let device = &self.agreed.export.device;
            let alone = batch.len() == 1 && reading.alone;
            reading.alone = batch.len() == 1;
            let prompt = || batch.iter().all(|(_, op)| device.is_prompt(op));
            if alone || prompt() {
                // Nobody else reads meanwhile: one request more would wait for this one at most.
                self.carry_out(batch);
                continue;
            }
            drop(reading);
            if self.threads.load(Ordering::Relaxed) < THREADS_MAX {
                self.threads.fetch_add(1, Ordering::Relaxed);
                let spawned = std::thread::Builder::new()
                    .name("nbd".into())
                    .spawn_scoped(scope, || self.work(scope));
                if spawned.is_err() {
                    // Then with those that there are.
                    self.threads.store(THREADS_MAX, Ordering::Relaxed);
                }
            }
            self.carry_out(batch);
        }
    }

    /// The requests that have come, at least one. `Err`: there is none any more, for that reason.
    fn next_batch(&self, reading: &mut Reading) -> Result<Vec<(Asked, Op)>, Option<String>> {
        let mut batch: Vec<(Asked, Op)> = Vec::new();
        loop {
            let (n, mut taken) = take(reading.inbox.bytes(), &reading.rules);
            if let Taken::Answer(_, Err(_)) = taken {
                // Beyond the end, perhaps: it may have grown.
                let size = self.agreed.export.device.size();
                if size != reading.rules.size {
                    reading.rules.size = size;
                    (_, taken) = take(reading.inbox.bytes(), &reading.rules);
                }
            }
            match taken {
                Taken::Do(asked, op) => {
                    let weight = weight(&op);
                    if !batch.is_empty() && !self.output.has_room(weight) {
                        return Ok(batch);
                    }
                    reading.inbox.take(n);
                    if !self.output.admit(weight) {
                        return Err(None);
                    }
                    batch.push((asked, op));
                    if batch.len() == BATCH_MAX {
                        return Ok(batch);
                    }
                }
                Taken::Answer(asked, outcome) => {
                    if !batch.is_empty() {
                        return Ok(batch);
                    }
                    reading.inbox.take(n);
                    if !self.output.admit(0) {
                        return Err(None);
                    }
                    self.output.finish(reply(&asked, self.agreed.structured, outcome), 0);
                }
                _ if !batch.is_empty() => return Ok(batch),
                Taken::Farewell => return Err(None),
                Taken::Broken(why) => return Err(Some(why.into())),
                Taken::More(len) => {
                    reading.inbox.expect(len);
                    self.receive(reading)?;
                }
            }
        }
    }

    fn receive(&self, reading: &mut Reading) -> Result<(), Option<String>> {
        match self.wire.receive(&mut reading.inbox) {
            Ok(Received::Bytes) => {
                // At most once a batch, and cheap: a read of the vDSO's clock.
                reading.heard = Instant::now();
                Ok(())
            }
            Ok(Received::End) if reading.inbox.bytes().is_empty() => Err(None),
            Ok(Received::End) => Err(Some("ended in the middle of a request".into())),
            Ok(Received::Nothing) => {
                let silent = reading.heard.elapsed();
                if !reading.inbox.bytes().is_empty() && silent >= self.bounds.stall {
                    return Err(Some("stopped in the middle of a request".into()));
                }
                if self.bounds.idle.is_some_and(|limit| silent >= limit) {
                    return Err(Some("said nothing for too long".into()));
                }
                Ok(())
            }
            Err(error) => Err(Some(error.to_string())),
        }
    }

    /// What is quick is answered before the rest is waited for.
    fn carry_out(&self, batch: Vec<(Asked, Op)>) {
        let device = &self.agreed.export.device;
        let (quick, rest): (Vec<_>, _) =
            batch.into_iter().partition(|(_, op)| device.is_prompt(op));
        for part in [quick, rest].into_iter().filter(|part| !part.is_empty()) {
            self.carry_out_together(part);
        }
    }

    fn carry_out_together(&self, batch: Vec<(Asked, Op)>) {
        let structured = self.agreed.structured;
        let requests = batch.into_iter().map(|(asked, op)| {
            let output = Arc::clone(&self.output);
            let bytes = weight(&op);
            let done: crate::device::Done = Box::new(move |outcome: Result<Answer, _>| {
                output.finish(reply(&asked, structured, outcome), bytes);
            });
            Request { op, done }
        });
        let device = &self.agreed.export.device;
        self.output.corked(|| device.submit_many(requests.collect()));
    }
}

/// Bytes of payload that a request or its reply has.
fn weight(op: &Op) -> usize {
    match op {
        Op::Read { len, .. } => *len as usize,
        Op::Write { data, .. } => data.len(),
        _ => 0,
    }
}
