//! Processes: LibFS itself, with threads whose every step the seed decides. What a thread does is drawn (`draw`) as
//! calls of the `FileSystem` trait (`call`); each entry that appears in the log tells the model what is so from then
//! on (`effects`), and what each call gives must have been so at some moment while it was under way (`judge`).

pub mod call;
mod draw;
pub mod effects;
pub mod host;
pub(crate) mod joint;
mod judge;
mod leases;
mod ledger;
pub(crate) mod locks;
pub mod verdict;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use base::random::Random;
use base::{ClientId, Errno, Nanos};
use client::fs::Handle;
use client::libfs::{Config, LibFsOn, Limits, Verify};
use service::core::Event;
use storage::format::control::{self, Descriptor, LeaseMode};
use storage::format::entry::{self, HEADER_BYTES, Op, claimed_length};
use storage::media::Segment;
use storage::volume::Volume;

use self::call::{Call, Task};
pub(crate) use self::host::Narrow;
use self::host::{Answer, Fiber, Pause, Shared, SimHost};
use crate::model::{BLOCK, Body, Look, Part, State};
use crate::rights::Who;
use crate::world::judge::state_of;
use crate::world::{Item, MS, US, World};

/// Realtime of the simulated machines.
pub const REALTIME: Nanos = 1_700_000_000_000_000_000;
/// The clock of the machine ticks this seldom.
const TICK: Nanos = 4 * MS;
/// hostd answers within this time, or not at all.
const HOSTD_TIMEOUT: Nanos = 200 * MS;

type Client = LibFsOn<SimHost>;
/// Where a process has its client, once it has one.
type Home = Rc<RefCell<Option<Box<Client>>>>;

/// A process.
pub struct Process {
    home: Home,
    pub(crate) threads: Vec<Thread>,
    /// All its threads are stopped until then.
    frozen: Nanos,
    /// Attachments, the last one last.
    pub(crate) attached: Vec<Attached>,
    /// Open files.
    open: BTreeMap<u64, Open>,
    /// Sessions whose losses were told of an inode by fsync without a handle; of all by a sync (0).
    told: BTreeMap<u64, usize>,
    /// Inodes of which it may know what never was.
    tainted: BTreeMap<u64, verdict::Taint>,
    limits: Limits,
    /// It was not given an arena that it asked for.
    unmapped: bool,
    /// One in so many points is a pause.
    chance: u64,
    /// Which places of the code are narrow.
    narrow: Narrow,
    /// Counts the lives of the process.
    pub(crate) life: u64,
    /// By what a life shows that it is the heir of the one before; 0: it is none.
    secret: u128,
    /// What a life that is an heir does first.
    inherits: VecDeque<Call>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// A log that it has, or had.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    /// Its number in the model.
    pub(crate) session: usize,
    client: ClientId,
    memory: Shared,
    descriptor: Descriptor,
    /// The last entry in it.
    last: u64,
    /// Entries that did not count when it ended, and were made again in the next: nobody was told that they are done.
    again: BTreeSet<u64>,
    /// Its leases, as far as somebody looked: the words, and the modes that were given last by inode.
    given: (Vec<u64>, BTreeMap<u64, LeaseMode>),
    /// When, in the model's time, by inode.
    given_at: BTreeMap<u64, u64>,
    ended: bool,
}

impl Attached {
    /// The last entry that counts.
    fn last_counted(&self) -> u64 {
        (1..=self.last).rev().find(|seq| !self.again.contains(seq)).unwrap_or(0)
    }
}

/// A file that it has open.
#[derive(Clone, Debug)]
struct Open {
    ino: u64,
    flags: u32,
    thread: usize,
    /// The model's time at which it was opened.
    since: u64,
    /// Sessions that had ended when it was opened, or when a loss was told.
    ended: usize,
    /// The same when its opening began: what that made may be lost with a session that ended before it returned.
    began: usize,
    /// What it was told of refusals.
    refused: verdict::Told,
    /// Sessions of others of its node that lasted then: what they lose it is told.
    beside: BTreeSet<usize>,
}

impl Open {
    /// Whether it is a directory.
    const fn is_dir(&self) -> bool {
        self.flags & client::fs::O_DIRECTORY != 0
    }
}

/// A thread.
#[derive(Debug)]
pub struct Thread {
    fiber: Fiber,
    waits: Waits,
    /// What it is answered when it goes on.
    answer: Option<Answer>,
    stamp: u64,
    due: Nanos,
    /// Calls that are left.
    pub(crate) ops: u32,
    under_way: Option<UnderWay>,
    /// It rests, and is told then what to do.
    idle: bool,
    /// It has synced all that it did.
    synced: bool,
    ended: bool,
}

/// What a thread waits for, beside time.
#[derive(Debug)]
enum Waits {
    Nothing,
    Shared(Shared, u64, u32),
    Private(usize),
    Hostd(u64),
}

/// A call that has begun.
#[derive(Debug)]
struct UnderWay {
    call: Call,
    /// On whose behalf.
    who: Who,
    umask: u32,
    /// The model's time at which it began.
    since: u64,
    at: Nanos,
    /// Bytes of a write that are in the log.
    wrote: usize,
    entries: u32,
    /// Where the first byte of a write lies.
    first: Option<u64>,
    /// It writes through a handle that appends.
    appends: bool,
    /// What the file has from its sessions so far, for fsync.
    newest: Vec<(usize, u64)>,
    /// Its last entry.
    last_part: Option<Piece>,
    /// The session in which it began.
    current: Option<usize>,
    /// The inode that it has made.
    made: Option<u64>,
    /// Its operations.
    own: Vec<(ClientId, u64)>,
    /// Those of them that count only if they are taken.
    joint: Vec<(ClientId, u64)>,
    /// The last refusal that its process could see when it began.
    refused: u64,
}

/// An entry of a call.
#[derive(Clone, Debug)]
struct Piece {
    session: usize,
    seq: u64,
    /// What it says.
    what: String,
    /// Bytes of the call's write that were in the log before it.
    before: usize,
}

/// The client, for the threads of a process: it lives in its home for as long as they do.
#[derive(Clone, Copy)]
struct Pointer(*const Client);

impl Pointer {
    #[allow(unsafe_code)]
    fn get(&self) -> &Client {
        // SAFETY: the home is emptied when no thread of the process runs any more (`World::end_process`).
        unsafe { &*self.0 }
    }
}

/// What a thread does all the time.
fn work(client: Pointer) {
    let mut answer = host::pause(Pause::Next);
    while let Answer::Call(task) = answer {
        let (reply, walked) = task.perform(client.get());
        host::pause(Pause::Done(reply, walked));
        answer = host::pause(Pause::Next);
    }
}

/// Which reads of a process are compared with checksums. (Not drawn from the numbers of others.)
fn verify_of(limits: &Limits) -> Verify {
    use Verify::{Always, Never, Sample};
    let key = limits.inodes as u64 ^ ((limits.posted as u64) << 8) ^ ((limits.names as u64) << 16);
    [Never, Never, Sample, Always][Random::new(key ^ 0x5e1f).below(4) as usize]
}

/// Whether a process has heirs, which know what it had locked. (Not drawn from the numbers of others.)
fn secret_of(c: usize, limits: &Limits) -> u128 {
    let key =
        limits.inodes as u64 ^ ((limits.requests as u64) << 8) ^ ((limits.posted as u64) << 16);
    let mut random = Random::new(key ^ 0x4e12 ^ (c as u64) << 32);
    if random.chance(1, 2) { u128::from(random.next_u64()) << 64 | (c as u128 + 1) } else { 0 }
}

/// The first thread: it attaches.
fn begin(home: &Home, limits: Limits, heir: u128) {
    let verify = verify_of(&limits);
    let client = loop {
        match Client::attach(Config { limits, verify, heir, ..Config::new(b"") }) {
            Ok(client) => break Box::new(client),
            Err(_) => drop(host::pause(Pause::Sleep(30 * MS))),
        }
    };
    let pointer = Pointer(std::ptr::from_ref(&*client));
    *home.borrow_mut() = Some(client);
    work(pointer);
}

impl Process {
    /// One that has not started, each of whose threads will make so many calls.
    pub fn new(threads: usize, ops: u32, limits: Limits, (chance, narrow): (u64, Narrow)) -> Self {
        let thread = |_| Thread {
            fiber: Fiber::none(),
            waits: Waits::Nothing,
            answer: None,
            stamp: 0,
            due: Nanos::MAX,
            ops,
            under_way: None,
            idle: false,
            synced: false,
            ended: false,
        };
        Self {
            home: Home::default(),
            threads: (0..threads).map(thread).collect(),
            frozen: 0,
            attached: Vec::new(),
            open: BTreeMap::new(),
            told: BTreeMap::new(),
            tainted: BTreeMap::new(),
            limits,
            unmapped: false,
            chance,
            narrow,
            life: 0,
            secret: 0,
            inherits: VecDeque::new(),
        }
    }

    /// It comes to its end soon.
    pub fn hurry(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.ops = thread.ops.min(20));
    }

    /// Whether it has the inode open.
    pub fn has_open(&self, ino: u64) -> bool {
        self.open.values().any(|open| open.ino == ino)
    }

    /// All that it had to do is done, and synced.
    pub fn is_done(&self) -> bool {
        self.threads.iter().all(|thread| thread.ended)
    }

    /// For the report of one that gets no further.
    pub fn describe(&self) -> String {
        let threads = self.threads.iter().filter(|t| !t.ended).map(|t| {
            let call = t.under_way.as_ref().map(|u| format!("{:?} since {}", u.call, u.at));
            format!("[{:?} {} left, due {}, {:?}]", t.waits, t.ops, t.due, call)
        });
        threads.collect()
    }

    /// Points that its threads have passed.
    pub fn points(&self) -> u64 {
        self.threads.iter().map(|t| t.fiber.facts.points.get()).sum()
    }

    /// Whether its last session has not ended.
    pub(crate) fn is_attached(&self) -> bool {
        let last = self.attached.last().filter(|a| !a.ended);
        last.is_some_and(|a| a.memory.peek(control::STATE) == control::STATE_ATTACHED)
    }

    /// Whether that is one of its attachments.
    pub(crate) fn is_client(&self, client: ClientId) -> bool {
        self.attached.iter().any(|a| a.client == client)
    }

    fn session_of(&self, memory: &Shared) -> Option<usize> {
        self.attached.iter().position(|a| a.memory.is(memory))
    }
}

impl World<'_> {
    fn process(&mut self, c: usize) -> Option<&mut Process> {
        self.actors[c].process.as_mut()
    }

    fn thread(&mut self, c: usize, t: usize) -> Option<&mut Thread> {
        self.process(c)?.threads.get_mut(t)
    }

    /// Starts it, or starts it anew.
    pub(crate) fn boot_process(&mut self, c: usize, life: u64) -> Result<(), String> {
        let n = self.actors[c].node;
        if self.process(c).is_none_or(|p| p.life != life || p.is_done()) {
            return Ok(());
        }
        // (Others need to have been led to what they open by its number.)
        if life == 0 && self.actors[c].uid == 0 {
            self.process(c).into_iter().for_each(|p| p.secret = secret_of(c, &p.limits));
        }
        if self.hosts[n].gone {
            self.process(c)
                .into_iter()
                .for_each(|p| p.threads.iter_mut().for_each(|t| t.ended = true));
            return Ok(());
        }
        let random = Random::new(self.random.next_u64());
        let Some(process) = self.process(c) else { return Ok(()) };
        let (home, limits, secret) = (Rc::clone(&process.home), process.limits, process.secret);
        self.trace(|| format!("process {c} begins, life {life}, {limits:?}"));
        let fiber = Fiber::new(random, move || begin(&home, limits, secret))?;
        self.install_fiber(c, 0, fiber);
        self.go_on(c, 0, 0, Answer::Go);
        Ok(())
    }

    fn install_fiber(&mut self, c: usize, t: usize, fiber: Fiber) {
        let uid = self.actors[c].uid;
        let Some(process) = self.process(c) else { return };
        fiber.facts.uid.set(uid);
        fiber.facts.thread.set(c * 8 + t);
        fiber.facts.chance.set(process.chance);
        fiber.facts.narrow.set(process.narrow);
        process.threads[t].fiber = fiber;
    }

    /// The others begin when the first has attached.
    fn start_others(&mut self, c: usize) -> Result<(), String> {
        let Some(process) = self.process(c) else { return Ok(()) };
        let (count, home) = (process.threads.len(), Rc::clone(&process.home));
        let Some(pointer) = home.borrow().as_ref().map(|c| Pointer(std::ptr::from_ref(&**c)))
        else {
            return Ok(());
        };
        for t in 1..count {
            if self.thread(c, t).is_some_and(|t| !t.ended && t.fiber.is_none()) {
                let random = Random::new(self.random.next_u64());
                let fiber = Fiber::new(random, move || work(pointer))?;
                self.install_fiber(c, t, fiber);
                let delay = self.between(0, 20 * US);
                self.go_on(c, t, delay, Answer::Go);
            }
        }
        Ok(())
    }

    /// A thread goes on after so long, unless something is sooner.
    fn go_on(&mut self, c: usize, t: usize, delay: Nanos, answer: Answer) {
        let at = self.now.saturating_add(delay);
        let Some(thread) = self.thread(c, t) else { return };
        thread.answer = Some(answer);
        if at < thread.due {
            thread.stamp += 1;
            (thread.due, thread.waits) = (at, Waits::Nothing);
            let stamp = thread.stamp;
            self.at(at, Item::Thread(c, t, stamp));
        }
    }

    /// A thread waits for something, and for no longer than that.
    fn wait_for(&mut self, c: usize, t: usize, waits: Waits, limit: Nanos) {
        if let Some(thread) = self.thread(c, t) {
            thread.due = Nanos::MAX;
        }
        if limit != Nanos::MAX {
            self.go_on(c, t, limit, Answer::Go);
        }
        if let Some(thread) = self.thread(c, t) {
            (thread.waits, thread.answer) = (waits, Some(Answer::Go));
        }
    }

    /// The moment of a thread has come.
    pub(crate) fn thread_goes_on(&mut self, c: usize, t: usize, stamp: u64) -> Result<(), String> {
        let now = self.now;
        let Some(process) = self.process(c) else { return Ok(()) };
        let frozen = process.frozen;
        let thread = &mut process.threads[t];
        if thread.stamp != stamp || thread.due != now {
            return Ok(());
        }
        if frozen > now {
            thread.stamp += 1;
            thread.due = frozen;
            let stamp = thread.stamp;
            self.at(frozen, Item::Thread(c, t, stamp));
            return Ok(());
        }
        (thread.due, thread.waits) = (Nanos::MAX, Waits::Nothing);
        let mut answer = thread.answer.take().unwrap_or(Answer::Go);
        if std::mem::take(&mut thread.idle) {
            answer = self.choose_call(c, t);
        }
        self.run_thread(c, t, answer)
    }

    /// Runs it until it waits.
    fn run_thread(&mut self, c: usize, t: usize, answer: Answer) -> Result<(), String> {
        let mut answer = answer;
        loop {
            self.show_facts(c, t);
            let Some(thread) = self.thread(c, t) else { return Ok(()) };
            let Some(pause) = thread.fiber.resume(answer) else {
                thread.ended = true;
                self.trace(|| format!("thread {c}.{t} has done"));
                return Ok(());
            };
            answer = Answer::Go;
            match pause {
                Pause::Point(long) => return self.pause_at_point(c, t, long),
                Pause::Sleep(nanos) => {
                    let lasts = self.hosts[self.actors[c].node].clock.lasts(nanos);
                    self.go_on(c, t, lasts, Answer::Go);
                    return Ok(());
                }
                Pause::Shared(memory, at, seen, limit) => {
                    self.wait_for(c, t, Waits::Shared(memory, at, seen), limit);
                    return Ok(());
                }
                Pause::Private(word, limit) => {
                    self.wait_for(c, t, Waits::Private(word), limit);
                    return Ok(());
                }
                Pause::Woke(word, count) => self.wake_waiters(c, word, count),
                Pause::Ring => self.thread_rings(c),
                Pause::Wrote(memory, at) => self.thread_wrote(c, t, &memory, at)?,
                Pause::Attach => return self.thread_attaches(c, t),
                Pause::Arena(arena) => return self.thread_asks_arena(c, t, arena),
                Pause::Next => match self.next_call(c, t)? {
                    Some(next) => answer = next,
                    None => return Ok(()),
                },
                Pause::Done(reply, walked) => self.call_done(c, t, &reply, &walked)?,
            }
        }
    }

    fn show_facts(&mut self, c: usize, t: usize) {
        let host = &self.hosts[self.actors[c].node];
        let (now, local) = (self.now, host.clock.local(self.now));
        if let Some(thread) = self.thread(c, t) {
            let facts = &thread.fiber.facts;
            facts.now.set(local);
            facts.tick.set(local / TICK * TICK);
            // All machines have the same time of day, for the judges' sake.
            facts.realtime.set((now + REALTIME) / TICK * TICK);
        }
    }

    /// Others may go on. Mostly it is a moment; sometimes the processor is given to somebody else. A process that
    /// shall be stopped inside an operation is.
    fn pause_at_point(&mut self, c: usize, t: usize, long: bool) -> Result<(), String> {
        self.outcome.switches += 1;
        let inside = self.thread(c, t).is_some_and(|thread| thread.fiber.facts.inside.get());
        if inside && let Some(lasts) = self.actors[c].stop_for.take() {
            let until = self.now + lasts;
            self.trace(|| format!("process {c} is stopped inside an operation"));
            self.process(c).into_iter().for_each(|p| p.frozen = until);
        }
        let delay = match self.random.below(1000) {
            _ if long => self.between(10 * US, 300 * US),
            0 => self.between(MS, 30 * MS),
            1..=20 => self.between(10 * US, 300 * US),
            _ => self.between(0, 3 * US),
        };
        self.go_on(c, t, delay, Answer::Go);
        Ok(())
    }

    fn wake_waiters(&mut self, c: usize, word: usize, count: u32) {
        let Some(process) = self.process(c) else { return };
        let waits = |t: &usize| matches!(process.threads[*t].waits, Waits::Private(w) if w == word);
        let who: Vec<usize> = (0..process.threads.len()).filter(waits).collect();
        for t in who.into_iter().take(count as usize) {
            let delay = self.between(100, 20 * US);
            self.go_on(c, t, delay, Answer::Go);
        }
    }

    /// nicfs of a node has done something: who waits for a word that has changed goes on.
    pub(crate) fn look_at_waiters(&mut self, n: usize) {
        for c in 0..self.actors.len() {
            if self.actors[c].node != n {
                continue;
            }
            let Some(process) = self.process(c) else { continue };
            let changed = |t: &usize| match &process.threads[*t].waits {
                Waits::Shared(memory, at, seen) => memory.peek32(*at) != *seen,
                _ => false,
            };
            let who: Vec<usize> = (0..process.threads.len()).filter(changed).collect();
            for t in who {
                let delay = self.between(500, 8 * US);
                self.go_on(c, t, delay, Answer::Go);
            }
        }
    }

    fn thread_rings(&mut self, c: usize) {
        let n = self.actors[c].node;
        let Some(attached) = self.process(c).and_then(|p| p.attached.last()) else { return };
        let client = attached.client;
        let incarnation = self.hosts[n].incarnation;
        let delay = self.between(500, 8 * US);
        self.at(self.now + delay, Item::To(n, incarnation, Event::Doorbell(client)));
    }

    // --- hostd ---

    fn thread_attaches(&mut self, c: usize, t: usize) -> Result<(), String> {
        self.look_at_ended(c)?;
        let n = self.actors[c].node;
        let (pid, life) = (100 + c as u32, self.process(c).map_or(0, |p| p.life));
        if self.hosts[n].node.is_none() || self.hosts[n].hostd_down {
            self.go_on(c, t, 20 * US, Answer::Attached(Err(Errno::NOTCONN)));
            return Ok(());
        }
        let token = (c as u64) << 40 | (t as u64) << 36 | self.now & 0xf_ffff_ffff;
        let Who { uid, gid, groups } = Who::of(self.actors[c].uid);
        let groups = groups.to_vec();
        let event = Event::Attach { token, pid, start_time: life, uid, gid, groups, lanes: 0 };
        let incarnation = self.hosts[n].incarnation;
        self.at(self.now + 20 * US, Item::To(n, incarnation, event));
        self.wait_for(c, t, Waits::Hostd(token), HOSTD_TIMEOUT);
        if let Some(thread) = self.thread(c, t) {
            thread.answer = Some(Answer::Attached(Err(Errno::NOTCONN)));
        }
        Ok(())
    }

    /// hostd has something for who has asked.
    pub(crate) fn given(
        &mut self,
        token: u64,
        incarnation: u64,
        given: Result<(ClientId, u32), Errno>,
    ) -> Result<(), String> {
        let c = (token >> 40) as usize;
        let n = self.actors[c].node;
        let host = &self.hosts[n];
        let there = host.node.is_some() && host.incarnation == incarnation;
        let taken = there && self.process_attached(c, token, given)?;
        if let (Ok((client, _)), false) = (given, taken) {
            // Nobody waits for it any more.
            let incarnation = self.hosts[n].incarnation;
            self.at(self.now, Item::To(n, incarnation, Event::ClientGone(client)));
        }
        Ok(())
    }

    /// hostd has a log for it, or not. `false`: nobody waits for it any more.
    pub(crate) fn process_attached(
        &mut self,
        c: usize,
        token: u64,
        given: Result<(ClientId, u32), Errno>,
    ) -> Result<bool, String> {
        let n = self.actors[c].node;
        let region = std::sync::Arc::clone(&self.hosts[n].region);
        let seated = self.is_seated(n);
        let Some(process) = self.process(c) else { return Ok(false) };
        let waits = |t: &&Thread| matches!(t.waits, Waits::Hostd(w) if w == token);
        let Some(t) = process.threads.iter().position(|t| waits(&t)) else { return Ok(false) };
        let (client, segment) = match given {
            Ok(given) => given,
            Err(errno) => {
                self.go_on(c, t, 0, Answer::Attached(Err(errno)));
                return Ok(true);
            }
        };
        let memory = Shared::new(&region, Segment::Log(segment));
        let bytes = memory.bytes(0, control::DESCRIPTOR_BYTES);
        let good = Descriptor::decode(&bytes).ok().filter(|d| d.client == client);
        let Some(descriptor) = good else {
            self.go_on(c, t, 0, Answer::Attached(Err(Errno::NOTCONN)));
            return Ok(true);
        };
        self.trace(|| format!("client {c} attached as {:#x}", client.0));
        let session = self.model.begin();
        if !seated {
            self.model.headless(session);
        }
        let last = descriptor.first_sequence.0 - 1;
        let attached = Attached {
            session,
            client,
            memory: memory.clone(),
            descriptor,
            last,
            again: BTreeSet::new(),
            given: Default::default(),
            given_at: BTreeMap::new(),
            ended: false,
        };
        self.process(c).into_iter().for_each(|p| p.attached.push(attached.clone()));
        self.go_on(c, t, 0, Answer::Attached(Ok(memory)));
        Ok(true)
    }

    /// Sessions of a process that the service has ended.
    fn look_at_ended(&mut self, c: usize) -> Result<(), String> {
        let Some(process) = self.process(c) else { return Ok(()) };
        let mut ends = Vec::new();
        for attached in process.attached.iter_mut().filter(|a| !a.ended) {
            let state = attached.memory.peek(control::STATE);
            if state != control::STATE_ATTACHED {
                attached.ended = true;
                let sealed = attached.memory.peek(control::SEALED_AT);
                ends.push((attached.session, state, sealed, attached.last));
            }
        }
        for (session, state, sealed, last) in ends {
            self.trace(|| format!("client {c}: session {session} has ended, state {state}"));
            self.locks.doubt(c);
            let expelled = state == control::STATE_EXPELLED && sealed != control::SEAL_PENDING;
            self.model.ended(session, if expelled { sealed.min(last) } else { last });
        }
        Ok(())
    }

    fn thread_asks_arena(&mut self, c: usize, t: usize, arena: u32) -> Result<(), String> {
        use storage::format::item::ReadClass;
        let n = self.actors[c].node;
        let uid = self.actors[c].uid;
        let delay = self.between(20 * US, 200 * US);
        let class = match self.hosts[n].node.as_ref().filter(|_| !self.hosts[n].hostd_down) {
            // hostd looks again until both are there.
            None => {
                let host = &self.hosts[n];
                let gone = host.gone;
                let answer = if gone { Err(Errno::IO) } else { Err(Errno::AGAIN) };
                self.go_on(c, t, 20 * MS, Answer::Arena(answer));
                return Ok(());
            }
            Some(node) => node.volume().arena_class(arena),
        };
        let may = match class {
            Some(ReadClass::World) => true,
            Some(ReadClass::Group { uid: user, gid }) => {
                uid == 0 || uid == user || Who::of(uid).in_group(gid)
            }
            Some(ReadClass::Owner { uid: user }) => uid == 0 || uid == user,
            _ => false,
        };
        if !may && let Some(process) = self.process(c) {
            process.unmapped = true;
        }
        let memory = Shared::new(&self.hosts[n].region, Segment::Arena(arena));
        self.go_on(c, t, delay, Answer::Arena(Ok(may.then_some(memory))));
        Ok(())
    }

    // --- what appears in the log ---

    /// An entry is there: from now on it is so.
    fn thread_wrote(&mut self, c: usize, t: usize, memory: &Shared, at: u64) -> Result<(), String> {
        let Some(process) = self.process(c) else { return Ok(()) };
        let Some(index) = process.session_of(memory) else {
            return Err(format!("client {c}: an entry in a log that it was not given"));
        };
        let attached = &mut process.attached[index];
        let (session, incarnation) = (attached.session, attached.descriptor.incarnation);
        let head = memory.bytes(at, HEADER_BYTES);
        let head: &[u8; HEADER_BYTES] =
            head[..].try_into().map_err(|_| format!("client {c}: no header at {at}"))?;
        let total = HEADER_BYTES + claimed_length(head).unwrap_or(0);
        let bytes = memory.bytes(at, total);
        let (header, op) = entry::decode(&bytes, incarnation)
            .map_err(|e| format!("client {c} wrote an entry that does not validate: {e}"))?;
        let seq = header.sequence.0;
        let (state, sealed) = (memory.peek(control::STATE), memory.peek(control::SEALED_AT));
        if state != control::STATE_ATTACHED {
            if sealed != control::SEAL_PENDING && seq > sealed {
                self.trace(|| format!("client {c} does {seq} in vain {}", brief(&op)));
                return Ok(());
            }
            self.model.headless(session);
        }
        attached_last(self.process(c), index, seq);
        self.settle_touched(c, session, &op)?;
        self.judge_entry(c, t, (session, seq), &op)?;
        self.judge_leases(c, seq, &op)?;
        self.judge_ranges(c, session, &op)?;
        if let Op::Create { ino, .. } | Op::Tmpfile { ino, .. } = op
            && let Some(under_way) = self.thread(c, t).and_then(|t| t.under_way.as_mut())
        {
            under_way.made = Some(ino.0);
        }
        if self.counts_if_taken(c, &op) {
            self.trace(|| format!("client {c}.{t} does {seq} jointly {}", brief(&op)));
            self.outcome.operations += 1;
            *self.outcome.kinds.entry(kind_of(&op)).or_default() += 1;
            if let Some(attached) = self.process(c).and_then(|p| p.attached.get(index)).cloned() {
                self.note_joint((c, t), &attached, &header, bytes.clone());
            }
            return Ok(());
        }
        let changes = effects::effects(&self.model, &op, header.time);
        // (Who was stopped in the middle goes on when his node is out of the chain: nobody will take that. Seed 8943236.)
        let late = !self.model.is_alive(session);
        let void = changes.is_err() && (late || self.may_be_void(c, t, &op));
        let changes = match changes {
            Err(_) if void => Vec::new(),
            other => other.map_err(|e| format!("client {c} does {seq} {}: {e}", brief(&op)))?,
        };
        self.trace(|| format!("client {c}.{t} does {seq} {}", brief(&op)));
        self.outcome.operations += 1;
        *self.outcome.kinds.entry(kind_of(&op)).or_default() += 1;
        self.did(c, (session, seq), &op, header.time, changes);
        if void {
            // It rests on what was refused: its process takes for done what is not.
            self.taint(c, session, seq, effects::touched(&op));
        }
        if let Some(attached) = self.process(c).and_then(|p| p.attached.get(index)).cloned() {
            self.note_done((c, t), &attached, &header, &op, (bytes.clone(), void));
        }
        Ok(())
    }

    /// The model learns what a process has done.
    fn did(
        &mut self,
        c: usize,
        (session, seq): (usize, u64),
        op: &Op<'_>,
        time: u64,
        mut changes: Vec<(u64, State)>,
    ) {
        match *op {
            // Others may write elsewhere in the file.
            Op::Write { ino, offset, data, clear_setid: clears } if self.has_ranges(c, ino.0) => {
                let (offset, loose) = (offset as usize, Vec::new());
                let part = Part { offset, data: data.into(), time, clears, loose };
                if let Some(change) = changes.pop() {
                    self.outcome.parts += 1;
                    self.model.appended_part(session, seq, change, part);
                }
            }
            _ => self.model.appended(session, seq, changes),
        }
    }

    /// What it is that an operation changes must be known: where a fault has left doubt, the state of the node from
    /// which the lease came says it. It must be one that the model allows.
    fn settle_touched(&mut self, c: usize, session: usize, op: &Op<'_>) -> Result<(), String> {
        let n = self.actors[c].node;
        for ino in effects::touched(op) {
            let range = match *op {
                Op::Write { offset, data, .. } if self.has_ranges(c, ino) => {
                    Some(offset..offset + data.len() as u64)
                }
                _ => None,
            };
            let blocks = self.model.unsettled(ino, session, range);
            if blocks.as_ref().is_some_and(Vec::is_empty) {
                continue;
            }
            let attached = self.process(c).and_then(|p| p.attached.last());
            let client = attached.map_or(ClientId(0), |a| a.client);
            let told = |volume: &Volume| {
                let upto = volume.published(client).map_err(|e| format!("{ino}: {e:?}"))?;
                Ok::<_, String>((state_of(volume, ino)?, upto.0))
            };
            let (state, upto) = match &self.hosts[n].node {
                Some(node) => told(node.volume())?,
                None => {
                    let region = std::sync::Arc::clone(&self.hosts[n].region);
                    match Volume::open(region) {
                        Ok(volume) => told(&volume)?,
                        Err(_) => continue,
                    }
                }
            };
            let down = self.hosts[n].node.is_none();
            self.trace(|| format!("inode {ino} is settled: {} {blocks:?}", state.summary()));
            let settled = match (&state.body, blocks) {
                // (What others write elsewhere may not be on its node yet.)
                (Body::File(bytes, _), Some(blocks)) => blocks.into_iter().try_for_each(|block| {
                    let from = block * BLOCK;
                    let got = &bytes[from.min(bytes.len())..bytes.len().min(from + BLOCK)];
                    let mut got = got.to_vec();
                    self.model.lay_own_over((ino, session), upto, from, &mut got);
                    let look = Look::Bytes { from, want: BLOCK, got: &got };
                    self.model.glimpse(&[session], ino, u64::MAX, false, &look)
                }),
                _ => self.model.observe_early(session, ino, &state),
            };
            match settled {
                Err(_) if down => {}
                other => other.map_err(|e| format!("node {} says: {e}", n + 1))?,
            }
        }
        Ok(())
    }

    // --- ends ---

    /// A process whose node ended in order and told it: nothing of it is lost.
    pub(crate) fn judge_dismissed_process(&mut self, c: usize) -> Result<(), String> {
        let Some(process) = self.process(c) else { return Ok(()) };
        let Some(attached) = process.attached.last().filter(|a| !a.ended) else { return Ok(()) };
        let (memory, last) = (&attached.memory, attached.last);
        let (sealed, replicated) =
            (memory.peek(control::SEALED_AT), memory.peek(control::REPLICATED));
        let lost = memory.peek(control::STATE) == control::STATE_GONE
            && sealed != control::SEAL_PENDING
            && replicated < last.min(sealed);
        if lost {
            return Err(format!(
                "client {c}: its node ended in order with {replicated} of {last} replicated"
            ));
        }
        Ok(())
    }

    /// The process ends where it is.
    pub(crate) fn end_process(
        &mut self,
        c: usize,
        (why, has_heir): (&str, bool),
    ) -> Option<(ClientId, usize, u64)> {
        self.leave_locks(c, has_heir);
        let process = self.process(c)?;
        for thread in &mut process.threads {
            thread.fiber.kill();
            thread.stamp += 1;
            (thread.due, thread.waits, thread.under_way) = (Nanos::MAX, Waits::Nothing, None);
            (thread.idle, thread.synced) = (false, false);
            thread.answer = None;
        }
        // None of its threads runs any more.
        *process.home.borrow_mut() = None;
        process.open.clear();
        process.life += 1;
        process.frozen = 0;
        let life = process.life;
        let attached = std::mem::take(&mut process.attached);
        process.told.clear();
        process.tainted.clear();
        let last = attached.last().cloned();
        for attached in attached.iter().filter(|a| !a.ended) {
            self.model.ended(attached.session, attached.last);
        }
        self.trace(|| format!("process {c} ends: {why}"));
        let n = self.actors[c].node;
        for earlier in attached.iter().rev().skip(1) {
            let (incarnation, client) = (self.hosts[n].incarnation, earlier.client);
            let delay = self.between(20 * US, 2 * MS);
            self.at(self.now + delay, Item::To(n, incarnation, Event::ClientGone(client)));
        }
        let delay = self.between(MS, 20 * MS);
        self.at(self.now + delay, Item::Boot(c, life));
        last.map(|a| (a.client, a.session, a.last))
    }
}

impl World<'_> {
    /// What becomes of what it has locked.
    fn leave_locks(&mut self, c: usize, has_heir: bool) {
        // Clocks run at rates of their own.
        let until = self.now + self.hosts[self.actors[c].node].grace / 2;
        let Some(process) = self.process(c) else { return };
        let (secret, life) = (process.secret, process.life + 1);
        let whole = process.is_attached() && process.inherits.is_empty();
        process.inherits.clear();
        if secret == 0 {
            self.locks.end_of(c);
            return;
        }
        let mut calls = VecDeque::from([Call::Inherit]);
        if has_heir {
            // (Killed before it had asked for all, or without a session, it has nothing for certain, and is to ask all the same.)
            let locks = self.locks.leave(c, life, if whole { until } else { 0 });
            if !whole {
                self.locks.doubt(c);
            }
            let mut files: Vec<u64> = locks.iter().flat_map(Call::inodes).collect();
            files.sort_unstable();
            files.dedup();
            // Open before the one before ends: what has no name lives as long as that.
            let open = |ino| Call::Open { ino, flags: client::fs::O_RDWR };
            calls = files.into_iter().map(open).chain(calls).chain(locks).collect();
        } else {
            self.locks.end_of(c);
        }
        if let Some(process) = self.process(c) {
            process.inherits = calls;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.threads.clear();
        // What a thread leaves behind knows of it, too.
        self.home.borrow_mut().take();
    }
}

fn attached_last(process: Option<&mut Process>, index: usize, seq: u64) {
    if let Some(attached) = process.and_then(|p| p.attached.get_mut(index)) {
        attached.last = attached.last.max(seq);
    }
}

/// What an operation is, for figures.
fn kind_of(op: &Op<'_>) -> &'static str {
    match op {
        Op::Pad => "pad",
        Op::Create { .. } => "create",
        Op::Tmpfile { .. } => "tmpfile",
        Op::Unlink { .. } | Op::Rmdir { .. } => "unlink",
        Op::Link { .. } => "link",
        Op::Rename { exchange: true, .. } => "exchange",
        Op::Rename { .. } => "rename",
        Op::Write { .. } => "write",
        Op::Truncate { .. } => "truncate",
        Op::Fallocate { .. } => "allocate",
        Op::Shift { .. } => "shift",
        Op::Move { .. } => "move",
        Op::CloneRange { .. } => "clone",
        Op::SetAttr { .. } => "setattr",
        Op::SetXattr { .. } => "setxattr",
        Op::RemoveXattr { .. } => "removexattr",
        Op::SetProject { .. } => "project",
        Op::SetQuota { .. } => "quota",
        Op::Reap { .. } => "reap",
        Op::Place { .. } => "place",
        Op::Snapshot { .. } => "snapshot",
        Op::DropSnapshot { .. } => "drop",
    }
}

/// An operation in few words.
pub(crate) fn brief(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {offset}+{}", data.len()),
        Op::SetXattr { ino, value, .. } => format!("setxattr {ino} {}", value.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(160);
            text
        }
    }
}

/// Among the flags of an open file: it was made without a name.
const NAMELESS: u32 = 1 << 31;

/// The number of a handle.
const fn number(handle: Handle) -> u64 {
    handle.0
}
