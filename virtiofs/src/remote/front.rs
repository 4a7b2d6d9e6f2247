//! The side with the guest: takes requests from its queues and passes them on.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use frontend::fuse::REQUEST_BYTES_MAX;
use frontend::fuse::wire::{InHeader, OutHeader};
use zerocopy::{FromBytes, IntoBytes};

use super::connection::{self, Outbox};
use super::frame::{AGAIN, Header, Hello, MAGIC, VERSIONS, Welcome, frame, kind};
use super::link::{Address, Identity, Link};
use crate::hal::{Chain, Piece, Queue, Transport, Woken, gather};

/// Replies that are acknowledged together, if no request takes the word along.
const ACKS: usize = 32;
/// Between two tries to make a connection.
const RETRY: Duration = Duration::from_millis(200);
/// How often the same reason why there is no connection is said.
const SAID: Duration = Duration::from_secs(60);
/// Room for a reply at most: the longest READ.
const ROOM_MAX: usize = REQUEST_BYTES_MAX;

/// How requests are passed on.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the file system is.
    pub address: Address,
    /// Who we are, over TCP.
    pub identity: Option<Identity>,
    /// Whose device it is.
    pub tenant: String,
    /// A request that has no reply for so long is EIO; None: it waits.
    pub soft: Option<Duration>,
    /// A connection over which nothing comes for so long is given up.
    pub silence: Duration,
}

/// A request without a reply.
struct Out {
    chain: Box<dyn Chain>,
    frame: Vec<u8>,
    cost: u64,
    unique: u64,
    since: Instant,
}

#[derive(Default)]
struct State {
    last: u64,
    out: BTreeMap<u64, Out>,
    bytes: u64,
    acks: Vec<u64>,
    outbox: Option<Arc<Outbox>>,
    /// What the back agreed to.
    requests: usize,
    most: u64,
    ended: bool,
    /// The guest is gone: there is no connection, by which the other side knows it.
    alone: bool,
    /// Since when there is no connection.
    away: Option<Instant>,
}

/// The passing on of one guest's requests.
pub struct Front {
    options: Options,
    session: [u8; 16],
    queues: Vec<Arc<dyn Queue>>,
    state: Mutex<State>,
    room: Condvar,
}

impl std::fmt::Debug for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Front").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Front {
    /// Begins to pass on what the queues of `transport` have.
    ///
    /// # Errors
    /// Out of threads, or of randomness.
    pub fn start(transport: &dyn Transport, options: Options) -> std::io::Result<Arc<Self>> {
        let mut session = [0; 16];
        rustix::rand::getrandom(&mut session, rustix::rand::GetRandomFlags::empty())?;
        let queues = transport.queues();
        let state = State { away: Some(Instant::now()), ..State::default() };
        let (state, room) = (Mutex::new(state), Condvar::new());
        let front = Arc::new(Self { options, session, queues, state, room });
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).map(drop)
        };
        for index in 0..front.queues.len() {
            let this = front.clone();
            spawn(format!("virtiofs-{index}"), Box::new(move || this.pass_on(index)))?;
        }
        let this = front.clone();
        spawn("virtiofs-link".into(), Box::new(move || this.keep_connected()))?;
        if front.options.soft.is_some() {
            let this = front.clone();
            spawn("virtiofs-watch".into(), Box::new(move || this.watch()))?;
        }
        Ok(front)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests without a reply.
    pub fn under_way(&self) -> usize {
        self.state().out.len()
    }

    /// Whether there is a guest. The other side gives back what one had that stays away.
    pub fn has_guest(&self, has: bool) {
        let mut state = self.state();
        state.alone = !has;
        if let Some(outbox) = state.outbox.as_ref().filter(|_| !has) {
            outbox.close();
        }
        drop(state);
        self.room.notify_all();
    }

    /// Ends all threads.
    pub fn stop(&self) {
        let mut state = self.state();
        state.ended = true;
        if let Some(outbox) = &state.outbox {
            outbox.close();
        }
        drop(state);
        self.room.notify_all();
        self.queues.iter().for_each(|queue| queue.stop());
    }

    /// The body of a queue's thread.
    fn pass_on(&self, index: usize) {
        let queue = &self.queues[index];
        loop {
            match queue.next() {
                Some(chain) => self.send(index, chain),
                None if queue.wait(Duration::ZERO) == Woken::Stop => return,
                None => {}
            }
        }
    }

    fn send(&self, queue: usize, mut chain: Box<dyn Chain>) {
        let len: usize = chain.readable().iter().map(Piece::len).sum();
        let room = chain.writable().iter().map(Piece::len).sum::<usize>().min(ROOM_MAX);
        if !(size_of::<InHeader>()..=REQUEST_BYTES_MAX).contains(&len) {
            chain.complete(0);
            return;
        }
        let mut request = vec![0; len];
        gather(chain.readable(), &mut request);
        let unique = InHeader::read_from_prefix(&request).map_or(0, |(h, _)| h.unique.get());
        let again = chain.is_again();
        // Whoever stops the queue does not wait for another machine.
        chain.put_off();
        let cost = (len + room) as u64;
        let Some(mut state) = self.window(cost) else {
            // (That the other side was not asked at all makes no difference to the guest.)
            if !self.state().ended {
                chain.reply(OutHeader::alone(unique, -i32::from(Errno::IO.0)).as_bytes());
            }
            return;
        };
        state.last += 1;
        let tag = state.last;
        let mut header = Header::of(kind::REQUEST, len);
        header.tag = tag.into();
        header.flags = if again { AGAIN } else { 0 };
        header.queue = u16::try_from(queue).unwrap_or(0).into();
        header.room = u32::try_from(room).unwrap_or(0).into();
        header.done = state.acks.pop().unwrap_or(0).into();
        let frame = frame(&header, &request);
        if let Some(outbox) = &state.outbox {
            outbox.send(frame.clone());
        }
        state.bytes += cost;
        state.out.insert(tag, Out { chain, frame, cost, unique, since: Instant::now() });
    }

    /// Waits until the other side takes a request of that cost; None if it does not within the limit, or all ends.
    fn window(&self, cost: u64) -> Option<MutexGuard<'_, State>> {
        let begun = Instant::now();
        let mut state = self.state();
        while !state.ended
            && (state.requests == 0
                || state.out.len() >= state.requests
                || state.bytes + cost > state.most)
        {
            let Some(limit) = self.options.soft else {
                state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // Requests wait here one after the other: those that find it away for as long as that do not each wait anew.
            let until = state.away.unwrap_or(begun) + limit;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.room.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        (!state.ended).then_some(state)
    }

    fn keep_connected(&self) {
        let mut said: Option<(String, Instant)> = None;
        loop {
            let alone = |state: &mut State| state.alone && !state.ended;
            let state = self.room.wait_while(self.state(), alone);
            if state.unwrap_or_else(PoisonError::into_inner).ended {
                return;
            }
            let why = match Link::dial(&self.options.address, self.options.identity.as_ref()) {
                Ok(mut link) => self.connected(&mut link),
                Err(why) => why,
            };
            let state = self.state();
            if !state.ended && !state.alone {
                drop(state);
                let is_news =
                    |(before, at): &(String, Instant)| *before != why || at.elapsed() > SAID;
                if said.as_ref().is_none_or(is_news) {
                    log::warn!("{:?}: {why}", self.options.address);
                    said = Some((why, Instant::now()));
                }
                std::thread::sleep(RETRY);
            }
        }
    }

    /// One connection, to its end: why.
    fn connected(&self, link: &mut Link) -> String {
        let outbox = match Outbox::new() {
            Ok(outbox) => Arc::new(outbox),
            Err(error) => return error.to_string(),
        };
        let tenant = self.options.tenant.as_bytes();
        let hello = Hello {
            magic: MAGIC,
            from: VERSIONS.0.into(),
            to: VERSIONS.1.into(),
            queues: u16::try_from(self.queues.len()).unwrap_or(u16::MAX).into(),
            tenant: u16::try_from(tenant.len()).unwrap_or(0).into(),
            session: self.session,
        };
        let hello = [hello.as_bytes(), tenant].concat();
        outbox.send(frame(&Header::of(kind::HELLO, hello.len()), &hello));
        let mut welcomed = false;
        let why =
            connection::run(link, &outbox.clone(), self.options.silence, |_, header, payload| {
                match (header.kind, welcomed) {
                    (kind::WELCOME, false) => {
                        self.welcome(payload, &outbox)?;
                        welcomed = true;
                    }
                    (kind::PING, _) => {}
                    (kind::REPLY, true) => self.replied(header.tag.get(), payload),
                    (other, _) => return Err(format!("a frame of kind {other} is out of place")),
                }
                Ok(())
            });
        let mut state = self.state();
        state.outbox = None;
        state.away = state.away.or_else(|| Some(Instant::now()));
        drop(state);
        why
    }

    /// All that has no reply goes out again.
    fn welcome(&self, payload: &[u8], outbox: &Arc<Outbox>) -> Result<(), String> {
        let (welcome, _) = Welcome::read_from_prefix(payload).map_err(|_| "a short greeting")?;
        if welcome.magic != MAGIC {
            return Err("a greeting of another protocol".into());
        }
        if !(VERSIONS.0..=VERSIONS.1).contains(&welcome.version.get()) {
            return Err(format!("it speaks version {}", welcome.version.get()));
        }
        let mut state = self.state();
        state.requests = welcome.requests.get() as usize;
        state.most = welcome.bytes.get();
        for out in state.out.values_mut() {
            if let Ok((header, _)) = Header::mut_from_prefix(&mut out.frame) {
                header.flags |= AGAIN;
            }
            outbox.send(out.frame.clone());
        }
        if state.alone {
            return Err("the guest is gone".into());
        }
        state.outbox = Some(outbox.clone());
        state.away = None;
        drop(state);
        self.room.notify_all();
        Ok(())
    }

    fn replied(&self, tag: u64, reply: &[u8]) {
        let mut state = self.state();
        state.acks.push(tag);
        if state.acks.len() >= ACKS
            && let Some(outbox) = state.outbox.clone()
        {
            let tags: Vec<u8> =
                std::mem::take(&mut state.acks).iter().flat_map(|tag| tag.to_le_bytes()).collect();
            outbox.send(frame(&Header::of(kind::ACK, tags.len()), &tags));
        }
        let Some(out) = state.out.remove(&tag) else { return };
        state.bytes -= out.cost;
        drop(state);
        self.room.notify_all();
        out.chain.reply(reply);
    }

    /// Answers for a back that does not.
    fn watch(&self) {
        let Some(limit) = self.options.soft else { return };
        let error = -i32::from(Errno::IO.0);
        while !self.state().ended {
            std::thread::sleep(Duration::from_millis(100));
            let mut state = self.state();
            let late: Vec<u64> = state
                .out
                .iter()
                .filter(|(_, out)| out.since.elapsed() > limit)
                .map(|(tag, _)| *tag)
                .collect();
            for tag in late {
                let Some(out) = state.out.remove(&tag) else { continue };
                state.bytes -= out.cost;
                out.chain.reply(OutHeader::alone(out.unique, error).as_bytes());
            }
            drop(state);
            self.room.notify_all();
        }
    }
}
