//! A connection to one service of a server: requests of many threads, each of which waits for its own answer and no longer than it said.
//!
//! One thread per link talks to libnfs and to the server. A connection that breaks, or over which nothing comes although something is
//! waited for, is made again, and what has no answer is sent again under its old number, by which a server with a cache of replies knows
//! it. An answer says whether its request was sent more than once.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io;

use crate::guard::{Guard, marked};
use crate::libnfs::{self, Answer, Context, Request};

/// A connection that is not there after that long is given up.
const CONNECT: Duration = Duration::from_secs(10);
/// Between two tries to connect, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// What is taken from libnfs before the server has taken it.
const AHEAD: usize = 256 << 10;
const PIECE: usize = 64 << 10;
/// Of the thread: pieces are on the heap, and looking up a host is the deepest that it goes.
const STACK: usize = 512 << 10;

/// On whose behalf the server is asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cred {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// More groups; the first 16 are sent.
    pub groups: Vec<u32>,
}

impl Cred {
    /// The super-user, if the server lets us be that.
    pub const ROOT: Self = Self { uid: 0, gid: 0, groups: Vec::new() };
}

/// One procedure of a protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Procedure {
    /// The protocol.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// The procedure.
    pub number: u32,
}

/// What a server said.
#[derive(Debug)]
pub struct Said {
    /// The results.
    pub results: Vec<u8>,
    /// It may have been asked twice, and what it says be about the second time.
    pub again: bool,
}

/// How a request ended.
type Done = Result<Said, Errno>;

#[derive(Default)]
struct Slot {
    done: Mutex<Option<Done>>,
    told: Condvar,
}

struct Job {
    what: Procedure,
    cred: Cred,
    args: Arc<Vec<u8>>,
    sent: u32,
    slot: Arc<Slot>,
}

#[derive(Default)]
struct State {
    /// What has no answer.
    jobs: HashMap<u32, Job>,
    /// What is still to be sent over this connection.
    fresh: Vec<u32>,
    xid: u32,
    /// Why there is no connection.
    trouble: Option<String>,
    /// Connections that were lost.
    breaks: u64,
    ended: bool,
}

struct Shared {
    host: String,
    port: u16,
    patience: Duration,
    state: Mutex<State>,
    wake: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Any number but 0 and the greatest; a counter that is full wakes as well.
        let _ = io::write(&self.wake, &[1; 8]);
    }

    /// Says once that there is trouble.
    fn trouble(&self, what: &str) {
        let mut state = self.state();
        let Shared { host, port, .. } = self;
        if state.trouble.is_none() && !state.jobs.is_empty() {
            log::warn!("NFS server {host} port {port}: {what}; goes on trying");
        }
        state.trouble = Some(what.into());
    }

    fn well(&self) {
        let mut state = self.state();
        if state.trouble.take().is_some() {
            log::info!("NFS server {} port {}: answers", self.host, self.port);
        }
    }

    /// Ends a request. One that nobody waits for any more is passed over.
    fn finish(&self, xid: u32, answer: Answer) {
        let Some(job) = self.state().jobs.remove(&xid) else { return };
        let done = match answer {
            Answer::Results(results) => Ok(Said { results, again: job.sent > 1 }),
            Answer::Refused(what) => {
                let Procedure { program, version, number } = job.what;
                log::warn!(
                    "NFS server {}: procedure {number} of program {program} version {version}: {what}",
                    self.host
                );
                Err(match &what[..] {
                    // Our credentials, or the version of the protocol below.
                    what if what.contains("not accepted") => Errno::ACCES,
                    what if what.contains("responded: P") => Errno::OPNOTSUPP,
                    _ => Errno::IO,
                })
            }
        };
        *job.slot.done.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        job.slot.told.notify_all();
    }
}

/// A connection to one service.
pub struct Link {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shared { host, port, .. } = &*self.shared;
        f.debug_struct("Link").field("host", host).field("port", port).finish_non_exhaustive()
    }
}

impl Link {
    /// A link to a port, over which nothing goes yet. Requests wait for `patience`.
    ///
    /// # Errors
    /// No thread, no descriptor.
    pub fn new(host: &str, port: u16, patience: Duration) -> Result<Self, String> {
        libnfs::load()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(|e| format!("an event: {e}"))?;
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        let state = State { xid: seed as u32, ..State::default() };
        let state = Mutex::new(state);
        let shared = Arc::new(Shared { host: host.into(), port, patience, state, wake });
        let served = shared.clone();
        std::thread::Builder::new()
            .name("nfs".into())
            .stack_size(STACK)
            .spawn(move || serve(&served))
            .map_err(|e| format!("a thread: {e}"))?;
        Ok(Self { shared })
    }

    /// Asks the server, and waits.
    ///
    /// # Errors
    /// EIO: no answer in time. EACCES: it does not take our credentials. EOPNOTSUPP: it has no such thing.
    pub fn call(&self, what: Procedure, cred: &Cred, args: Vec<u8>) -> Done {
        self.call_for(what, cred, args, self.shared.patience)
    }

    /// The same, and waits for so long.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn call_for(
        &self,
        what: Procedure,
        cred: &Cred,
        args: Vec<u8>,
        patience: Duration,
    ) -> Done {
        let slot = Arc::new(Slot::default());
        let job =
            Job { what, cred: cred.clone(), args: Arc::new(args), sent: 0, slot: slot.clone() };
        let xid = {
            let mut state = self.shared.state();
            if state.ended {
                return Err(Errno::IO);
            }
            loop {
                state.xid = state.xid.wrapping_add(1);
                if !state.jobs.contains_key(&state.xid) {
                    break;
                }
            }
            let xid = state.xid;
            state.jobs.insert(xid, job);
            state.fresh.push(xid);
            xid
        };
        self.shared.wake();
        let done = slot.done.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut done, _) = slot
            .told
            .wait_timeout_while(done, patience, |done| done.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(done) = done.take() {
            return done;
        }
        drop(done);
        let mut state = self.shared.state();
        state.jobs.remove(&xid);
        let why = state.trouble.clone().unwrap_or_else(|| "no answer".into());
        drop(state);
        // It may have come just now.
        if let Some(done) = slot.done.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return done;
        }
        let Shared { host, port, .. } = &*self.shared;
        log::warn!(
            "NFS server {host} port {port}: gave up on procedure {} after {patience:?}: {why}",
            what.number
        );
        Err(Errno::IO)
    }

    /// Why there is no connection, if there is none.
    pub fn trouble(&self) -> Option<String> {
        self.shared.state().trouble.clone()
    }

    /// How many connections were lost: the server may have begun anew each time.
    pub fn breaks(&self) -> u64 {
        self.shared.state().breaks
    }

    /// Nothing more is asked; what waits ends with EIO.
    pub fn end(&self) {
        let mut state = self.shared.state();
        state.ended = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        for job in jobs.into_values() {
            *job.slot.done.lock().unwrap_or_else(PoisonError::into_inner) = Some(Err(Errno::IO));
            job.slot.told.notify_all();
        }
        self.shared.wake();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}

/// A connection that is up.
struct Wire {
    context: Context,
    server: OwnedFd,
    /// Where libnfs is spoken to.
    near: OwnedFd,
    guard: Guard,
    /// From libnfs to the server, and how much of it is sent.
    out: (Vec<u8>, usize),
    /// What libnfs was given and has not answered.
    under_way: HashSet<u32>,
    /// Something came, or something was sent after a time of quiet.
    heard: Instant,
    answered: bool,
    /// Room for what is read.
    piece: Vec<u8>,
}

/// What of a read or write there is to do nothing about.
fn quiet(error: io::Errno) -> bool {
    matches!(error, io::Errno::AGAIN | io::Errno::INTR)
}

impl Wire {
    fn new(mut context: Context) -> Result<Self, String> {
        let (server, near) = context.part().map_err(|e| e.to_string())?;
        // Both are wishes.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&server, true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&server, true);
        let (guard, out, under_way) = (Guard::default(), (Vec::new(), 0), HashSet::new());
        let (heard, answered) = (Instant::now(), false);
        let piece = vec![0; PIECE];
        Ok(Self { context, server, near, guard, out, under_way, heard, answered, piece })
    }

    /// Hands what is new to libnfs.
    fn send(&mut self, shared: &Shared) -> Result<(), String> {
        let fresh = std::mem::take(&mut shared.state().fresh);
        for xid in fresh {
            let (what, cred, args) = {
                let mut state = shared.state();
                let Some(job) = state.jobs.get_mut(&xid) else { continue };
                job.sent += 1;
                (job.what, job.cred.clone(), job.args.clone())
            };
            if self.under_way.is_empty() {
                self.heard = Instant::now();
            }
            let Procedure { program, version, number: procedure } = what;
            let who = (cred.uid, cred.gid, &cred.groups[..]);
            self.context.send(&Request { xid, program, version, procedure, who, args: &args })?;
            self.under_way.insert(xid);
        }
        Ok(())
    }

    /// From libnfs to the server, as far as it goes.
    fn outwards(&mut self) -> Result<(), String> {
        loop {
            let (out, sent) = &mut self.out;
            while *sent < out.len() {
                match rustix::net::send(
                    &self.server,
                    &out[*sent..],
                    rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
                ) {
                    Ok(len) => *sent += len,
                    Err(error) if quiet(error) => break,
                    Err(error) => return Err(error.to_string()),
                }
            }
            if *sent == out.len() {
                out.clear();
                *sent = 0;
            }
            if out.len() - *sent >= AHEAD {
                return Ok(());
            }
            if self.context.events().contains(PollFlags::OUT) {
                self.context.service(PollFlags::OUT)?;
            }
            let (out, _) = &mut self.out;
            let old = out.len();
            match io::read(&self.near, &mut self.piece) {
                Ok(0) => return Err("libnfs has hung up".into()),
                Ok(len) => out.extend_from_slice(&self.piece[..len]),
                Err(error) if quiet(error) => {}
                Err(error) => return Err(error.to_string()),
            }
            if out.len() == old {
                return Ok(());
            }
        }
    }

    /// From the server to libnfs, and from there to who waits for it.
    fn inwards(&mut self, shared: &Shared) -> Result<(), String> {
        // Somebody else shall have a turn as well.
        for _ in 0..32 {
            let len = match rustix::net::recv(
                &self.server,
                &mut self.piece[..],
                rustix::net::RecvFlags::DONTWAIT,
            ) {
                Ok((0, _)) => return Err("it has closed the connection".into()),
                Ok((len, _)) => len,
                Err(error) if quiet(error) => break,
                Err(error) => return Err(error.to_string()),
            };
            let mut records = Vec::new();
            self.guard
                .feed(&self.piece[..len], &mut |record| records.push(record))
                .map_err(|_| "what it sends is no answer")?;
            for record in records {
                // What was not asked, or was answered already, is nobody's.
                if !self.under_way.remove(&record.xid) {
                    continue;
                }
                (self.heard, self.answered) = (Instant::now(), true);
                let mut wire = Vec::with_capacity(record.bytes.len() + 4);
                marked(&record.bytes, &mut wire);
                self.tell(&wire)?;
                for (xid, answer) in libnfs::answers() {
                    shared.finish(xid, answer);
                }
            }
        }
        Ok(())
    }

    /// Lets libnfs read.
    fn tell(&mut self, mut wire: &[u8]) -> Result<(), String> {
        while !wire.is_empty() {
            match io::write(&self.near, wire) {
                Ok(len) => wire = &wire[len..],
                Err(error) if quiet(error) => {}
                Err(error) => return Err(error.to_string()),
            }
            self.context.service(PollFlags::IN)?;
        }
        Ok(())
    }

    /// Waits, and does what there is to do.
    fn turn(&mut self, shared: &Shared) -> Result<(), String> {
        let silence = shared.patience / 3;
        self.send(shared)?;
        self.outwards()?;
        let waits = !self.under_way.is_empty();
        let left = silence.saturating_sub(self.heard.elapsed());
        if waits && left.is_zero() {
            return Err("it does not answer".into());
        }
        let mut wants = PollFlags::IN;
        if !self.out.0.is_empty() {
            wants |= PollFlags::OUT;
        }
        let mut fds = [PollFd::new(&shared.wake, PollFlags::IN), PollFd::new(&self.server, wants)];
        wait(&mut fds, waits.then_some(left));
        let ready = fds[1].revents();
        clear(&shared.wake);
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            self.inwards(shared)?;
        }
        if waits {
            // Before the next look at the clock: what nobody waits for any more does not make a silence.
            let state = shared.state();
            if !self.under_way.iter().any(|xid| state.jobs.contains_key(xid)) {
                drop(state);
                self.heard = Instant::now();
                if self.under_way.len() > 64 {
                    return Err("it does not answer".into());
                }
            }
        }
        Ok(())
    }
}

fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) {
    // A millisecond more than asked, or a short rest would be many looks.
    let limit = limit.map(|limit| limit + Duration::from_millis(1));
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    // What is wrong with a descriptor the next read says.
    let _ = poll(fds, limit.as_ref());
}

fn clear(wake: &OwnedFd) {
    let _ = io::read(wake, &mut [0; 8]);
}

/// Waits until there is a connection.
fn connect(shared: &Shared) -> Result<Option<Wire>, String> {
    let mut context = Context::connect(&shared.host, shared.port)?;
    let begun = Instant::now();
    loop {
        let left = CONNECT.min(shared.patience).saturating_sub(begun.elapsed());
        if left.is_zero() {
            return Err("no connection in time".into());
        }
        let ready = {
            let fd = context.as_fd().ok_or("no connection")?;
            let mut fds = [
                PollFd::from_borrowed_fd(shared.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(fd, PollFlags::OUT),
            ];
            wait(&mut fds, Some(left));
            fds[1].revents()
        };
        clear(&shared.wake);
        if shared.state().ended {
            return Ok(None);
        }
        if ready.is_empty() {
            continue;
        }
        context.service(ready)?;
        return Wire::new(context).map(Some);
    }
}

/// The body of the thread.
fn serve(shared: &Shared) {
    let mut wire: Option<Wire> = None;
    let mut pause = PAUSE.0;
    loop {
        {
            let mut state = shared.state();
            if state.ended {
                return;
            }
            if wire.is_none() {
                // All of it goes over the next connection.
                state.fresh = state.jobs.keys().copied().collect();
            }
        }
        let turned = match &mut wire {
            Some(up) => up.turn(shared),
            None if shared.state().jobs.is_empty() => {
                wait(&mut [PollFd::new(&shared.wake, PollFlags::IN)], None);
                clear(&shared.wake);
                continue;
            }
            None => connect(shared).map(|made| wire = made),
        };
        match turned {
            Ok(()) => {
                // One that lets us connect and says nothing is not well.
                if wire.as_ref().is_some_and(|up| up.answered) {
                    pause = PAUSE.0;
                    shared.well();
                }
            }
            Err(what) => {
                shared.trouble(&what);
                if wire.take().is_some() {
                    shared.state().breaks += 1;
                }
                // What libnfs says of what it was given: that there is no answer.
                libnfs::answers();
                let mut fds = [PollFd::new(&shared.wake, PollFlags::IN)];
                let rested = Instant::now();
                while let Some(left) = pause.checked_sub(rested.elapsed()).filter(|d| !d.is_zero())
                {
                    wait(&mut fds, Some(left));
                    clear(&shared.wake);
                    if shared.state().ended {
                        return;
                    }
                }
                pause = (pause * 2).min(PAUSE.1);
            }
        }
    }
}
