//! The side with the file system.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, IntoBytes};

use super::connection::{self, Outbox};
use super::frame::{AGAIN, Header, Hello, MAGIC, VERSIONS, Welcome, frame, kind};
use super::link::{Link, Listener};
use crate::hal::{Chain, Fed, Piece, Queue, Transport};

/// Connections at once: the one that counts, and those that have not said yet who they are.
const CONNECTIONS_MAX: usize = 16;
/// How often a warning says that somebody was not let in: whoever reaches the port could fill a disk with it.
const REFUSED: Duration = Duration::from_secs(10);

/// What a front may have under way.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Requests.
    pub requests: u32,
    /// Bytes of these, and of the room for their replies.
    pub bytes: u64,
    /// A connection over which nothing comes for so long is given up.
    pub silence: Duration,
}

impl Default for Window {
    fn default() -> Self {
        Self { requests: 1024, bytes: 64 << 20, silence: Duration::from_secs(5) }
    }
}

#[derive(Default)]
struct State {
    session: [u8; 16],
    /// Of which session a request is.
    life: u64,
    outbox: Option<Arc<Outbox>>,
    /// Requests that are being served: bytes of each.
    going: BTreeMap<u64, u64>,
    bytes: u64,
    /// Replies that the front may not have.
    kept: BTreeMap<u64, Arc<[u8]>>,
}

struct Shared {
    state: Mutex<State>,
    /// Somebody has come, or gone.
    changed: Condvar,
    queues: Vec<Arc<Fed>>,
    tenant: String,
    window: Window,
    /// When somebody was not let in, and it was said.
    refused: Mutex<Option<Instant>>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply_frame(tag: u64, reply: &[u8]) -> Vec<u8> {
        let mut header = Header::of(kind::REPLY, reply.len());
        header.tag = tag.into();
        frame(&header, reply)
    }

    /// A request was served.
    fn finish(&self, life: u64, tag: u64, reply: &[u8]) {
        let mut state = self.state();
        if state.life != life {
            return;
        }
        let Some(bytes) = state.going.remove(&tag) else { return };
        state.bytes -= bytes;
        state.kept.insert(tag, reply.into());
        if let Some(outbox) = &state.outbox {
            outbox.send(Self::reply_frame(tag, reply));
        }
    }

    fn hello(&self, link: &Link, payload: &[u8], outbox: &Arc<Outbox>) -> Result<u64, String> {
        link.check_role()?;
        let (hello, name) = Hello::read_from_prefix(payload).map_err(|_| "a short greeting")?;
        if hello.magic != MAGIC {
            return Err("a greeting of another protocol".into());
        }
        if hello.from.get() > VERSIONS.1 || hello.to.get() < VERSIONS.0 {
            return Err(format!("versions {} to {} are spoken here", VERSIONS.0, VERSIONS.1));
        }
        let version = hello.to.get().min(VERSIONS.1);
        if name != self.tenant.as_bytes() || usize::from(hello.tenant.get()) != name.len() {
            return Err(format!("this device is {}'s", self.tenant));
        }
        if usize::from(hello.queues.get()) > self.queues.len() {
            return Err(format!("there are {} queues here", self.queues.len()));
        }
        log::info!("{}: a guest's side has come, {:?}", self.tenant, link.role());
        let mut state = self.state();
        let resumed = state.session == hello.session;
        if !resumed {
            state.session = hello.session;
            state.life += 1;
            state.going.clear();
            state.kept.clear();
            state.bytes = 0;
        }
        if let Some(old) = state.outbox.replace(outbox.clone()) {
            old.close();
        }
        self.changed.notify_all();
        let welcome = Welcome {
            magic: MAGIC,
            version: version.into(),
            resumed: u16::from(resumed).into(),
            requests: self.window.requests.into(),
            bytes: self.window.bytes.into(),
        };
        let welcome = welcome.as_bytes();
        outbox.send(frame(&Header::of(kind::WELCOME, welcome.len()), welcome));
        Ok(state.life)
    }

    fn request(self: &Arc<Self>, life: u64, header: &Header, payload: &[u8]) -> Result<(), String> {
        let queue = self.queues.get(usize::from(header.queue.get()));
        let queue = queue.ok_or_else(|| format!("there is no queue {}", header.queue.get()))?;
        let (tag, room) = (header.tag.get(), header.room.get() as usize);
        let cost = (payload.len() + room) as u64;
        let mut state = self.state();
        if state.life != life {
            return Err("another connection has taken over".into());
        }
        if state.going.contains_key(&tag) {
            return Ok(()); // it is being served; the reply goes this way
        }
        if let Some(reply) = state.kept.get(&tag) {
            if let Some(outbox) = &state.outbox {
                outbox.send(Self::reply_frame(tag, reply));
            }
            return Ok(());
        }
        let most = self.window.requests as usize;
        if state.going.len() >= most
            || state.kept.len() > 2 * most
            || state.bytes + cost > self.window.bytes
        {
            return Err("more is under way than was agreed upon".into());
        }
        state.going.insert(tag, cost);
        state.bytes += cost;
        drop(state);
        queue.push(Box::new(BackChain::new(
            self.clone(),
            life,
            tag,
            payload,
            room,
            header.flags & AGAIN != 0,
        )));
        Ok(())
    }

    fn acknowledged(&self, life: u64, tag: u64) {
        let mut state = self.state();
        if state.life == life {
            state.kept.remove(&tag);
        }
    }

    /// Serves one connection to its end.
    fn connected(self: &Arc<Self>, mut link: Link) {
        let Ok(outbox) = Outbox::new().map(Arc::new) else { return };
        let mut life = None;
        let why = connection::run(
            &mut link,
            &outbox.clone(),
            self.window.silence,
            |link, header, payload| {
                match (header.kind, life) {
                    (kind::HELLO, None) => life = Some(self.hello(link, payload, &outbox)?),
                    (kind::PING, _) => {}
                    (kind::REQUEST, Some(life)) => {
                        self.acknowledged(life, header.done.get());
                        self.request(life, header, payload)?;
                    }
                    (kind::ACK, Some(life)) => {
                        let tags = payload.chunks_exact(8).filter_map(|tag| tag.try_into().ok());
                        tags.for_each(|tag| self.acknowledged(life, u64::from_le_bytes(tag)));
                    }
                    (other, _) => return Err(format!("a frame of kind {other} is out of place")),
                }
                Ok(())
            },
        );
        let mut state = self.state();
        if state.outbox.as_ref().is_some_and(|current| Arc::ptr_eq(current, &outbox)) {
            state.outbox = None;
            self.changed.notify_all();
        }
        // Who was not let in is to be seen by whoever asks why nobody comes.
        let is_news = life.is_none() && {
            let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
            let is_news = refused.is_none_or(|at| at.elapsed() > REFUSED);
            if is_news {
                *refused = Some(Instant::now());
            }
            is_news
        };
        let level = if is_news { log::Level::Warn } else { log::Level::Info };
        log::log!(level, "{}: a connection has ended: {why}", self.tenant);
    }
}

/// A request, in memory of its own.
struct BackChain {
    shared: Arc<Shared>,
    life: u64,
    tag: u64,
    again: bool,
    request: crate::hal::Owned,
    reply: crate::hal::Owned,
    finished: bool,
    off: bool,
}

impl BackChain {
    fn new(
        shared: Arc<Shared>,
        life: u64,
        tag: u64,
        request: &[u8],
        room: usize,
        again: bool,
    ) -> Self {
        let request = crate::hal::Owned::new(request.to_vec());
        let reply = crate::hal::Owned::new(vec![0; room]);
        Self { shared, life, tag, again, request, reply, finished: false, off: false }
    }
}

impl Chain for BackChain {
    fn readable(&self) -> &[Piece] {
        self.request.pieces()
    }

    fn writable(&self) -> &[Piece] {
        self.reply.pieces()
    }

    fn is_again(&self) -> bool {
        self.again
    }

    fn complete(mut self: Box<Self>, written: u32) {
        self.finished = true;
        let mut reply = vec![0; (written as usize).min(self.reply.pieces()[0].len())];
        crate::hal::gather(self.reply.pieces(), &mut reply);
        self.shared.finish(self.life, self.tag, &reply);
    }

    fn put_off(&mut self) {
        self.off = true;
    }

    fn reply(mut self: Box<Self>, reply: &[u8]) {
        self.finished = true;
        self.shared.finish(self.life, self.tag, reply);
    }
}

impl Drop for BackChain {
    fn drop(&mut self) {
        if !self.finished && !self.off {
            self.shared.finish(self.life, self.tag, &[]);
        }
    }
}

/// A device's queues that are filled over connections.
#[derive(Clone)]
pub struct Back(Arc<Shared>);

impl std::fmt::Debug for Back {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Back").field("tenant", &self.0.tenant).finish_non_exhaustive()
    }
}

impl Back {
    /// For a tenant, whose guest has no more than `queues` queues beside the first.
    pub fn new(tenant: &str, queues: usize, window: Window) -> Self {
        let queues = (0..=queues).map(|_| Arc::default()).collect();
        let (state, changed, refused) = (Mutex::default(), Condvar::new(), Mutex::default());
        Self(Arc::new(Shared { state, changed, queues, tenant: tenant.into(), window, refused }))
    }

    /// Says, for ever, when nobody was connected for so long: each time once.
    pub fn watch(&self, patience: Duration, mut gone: impl FnMut()) {
        let there = |state: &mut State| state.outbox.is_some();
        loop {
            let until = Instant::now() + patience;
            let mut state = self.0.state();
            while !there(&mut state) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let waited = self.0.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if !there(&mut state) {
                drop(state);
                log::info!("{}: the guest's side is gone", self.0.tenant);
                gone();
                state = self.0.state();
            }
            let away = |state: &mut State| !there(state);
            let back = self.0.changed.wait_while(state, away);
            let back = back.unwrap_or_else(PoisonError::into_inner);
            drop(self.0.changed.wait_while(back, there).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Takes connections, for ever.
    pub fn listen(&self, listener: &Listener) {
        let there = Arc::new(AtomicUsize::new(0));
        loop {
            let link = match listener.accept() {
                Ok(link) => link,
                Err(why) => {
                    log::warn!("{}: a connection was refused: {why}", self.0.tenant);
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            if there.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
                there.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (shared, count) = (self.0.clone(), there.clone());
            let spawned =
                std::thread::Builder::new().name("virtiofs-link".into()).spawn(move || {
                    shared.connected(link);
                    count.fetch_sub(1, Ordering::AcqRel);
                });
            if spawned.is_err() {
                there.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Tags of requests that are being served, for tests.
    pub fn under_way(&self) -> BTreeSet<u64> {
        self.0.state().going.keys().copied().collect()
    }

    /// Ends the connection that is there, as a network does.
    pub fn cut(&self) {
        if let Some(outbox) = &self.0.state().outbox {
            outbox.close();
        }
    }
}

impl Transport for Back {
    fn queues(&self) -> Vec<Arc<dyn Queue>> {
        self.0.queues.iter().map(|queue| queue.clone() as Arc<dyn Queue>).collect()
    }

    fn tenant(&self) -> &str {
        &self.0.tenant
    }
}
