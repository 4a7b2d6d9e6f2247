//! File locks: asked of the head through the service, but for those of files whose locks are left to this client alone
//! ([`sole`](super::sole)), which it judges itself. Nothing waits here: a lock that cannot be had
//! now is EAGAIN, and `LOCK_EVENT` of the control area tells when to ask again.
//!
//! What was granted is remembered, too: if the service forgets (it was restarted, or the client had
//! to attach anew), the locks are asked for again before anything else is locked. One that somebody
//! else has got in between is lost.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::{self, LOCK_LEAVING, Request};
use storage::format::sole::SoleWord;
use storage::locks::FileLocks;

use super::LibFsOn;
use super::host::{Host, Memory};
use super::session::Session;
use super::sole::{Judged, Soles, judge};
use super::sync::RwLock;
use crate::fs::Result;

/// Requests of one owner are asked one after the other, so that what is remembered is what the head
/// did last.
const ORDERS: usize = 16;
/// In what is remembered there is only this client.
const OWN: ClientId = ClientId(0);

/// What a client keeps about file locks.
#[derive(Debug)]
pub struct Locks<H: Host> {
    orders: [RwLock<(), H>; ORDERS],
    granted: RwLock<Granted, H>,
    /// Held by the thread that asks for them again.
    reclaiming: RwLock<(), H>,
    /// To whom the client leaves them, by the secret that it shows.
    leaves: RwLock<Option<u128>, H>,
    /// It did so once.
    has_left: AtomicBool,
    /// The head may know of locks of this client's that are not remembered here: it grants itself nothing.
    asks_anew: AtomicBool,
}

/// What came of a request.
enum Asked<H: Host> {
    /// An answer.
    Answer(Result<Vec<u8>>),
    /// There is another session now: nothing was asked in it.
    Elsewhere,
    /// The service was started anew meanwhile.
    Anew(&'static Session<H>),
}

impl<H: Host> Default for Locks<H> {
    fn default() -> Self {
        let orders = core::array::from_fn(|_| RwLock::default());
        let (granted, reclaiming) = (RwLock::default(), RwLock::default());
        let (has_left, asks_anew) = (AtomicBool::new(false), AtomicBool::new(false));
        let leaves = RwLock::default();
        Self { orders, granted, reclaiming, leaves, has_left, asks_anew }
    }
}

#[derive(Debug, Default)]
struct Granted {
    /// Session, and run of the service, that know of them.
    known_by: (u64, u64),
    files: BTreeMap<InodeId, FileLocks>,
    /// Questions about locks of a file that the head may have answered, and of which `files` does not tell yet.
    asking: BTreeMap<InodeId, usize>,
    soles: Soles,
}

impl Granted {
    fn has(&self, ino: InodeId, lock: &Lock) -> bool {
        self.files.get(&ino).is_some_and(|file| file.iter().any(|held| held.lock == *lock))
    }

    fn asks(&mut self, ino: InodeId) {
        *self.asking.entry(ino).or_default() += 1;
    }

    fn has_asked(&mut self, ino: InodeId) {
        if let Some(count) = self.asking.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                self.asking.remove(&ino);
            }
        }
    }

    fn set(&mut self, ino: InodeId, locks: FileLocks) {
        if locks.is_empty() {
            self.files.remove(&ino);
        } else {
            self.files.insert(ino, locks);
        }
    }

    fn note(&mut self, ino: InodeId, lock: Lock) {
        let file = self.files.entry(ino).or_default();
        // The head has counted it.
        let _ = file.put(OWN, lock, usize::MAX);
        if file.is_empty() {
            self.files.remove(&ino);
        }
    }
}

fn run_of<H: Host>(session: &Session<H>) -> (u64, u64) {
    let run = session.segment.word(control::LOCK_RUN);
    (session.number, run)
}

impl<H: Host> LibFsOn<H> {
    pub(crate) fn do_lock(&self, ino: InodeId, lock: Lock, wait: u64) -> Result<()> {
        let order = &self.locks.orders[(ino.0 ^ lock.owner) as usize % ORDERS];
        let _order = order.write_unless(|| self.config.stops())?;
        if let Some(done) = self.lock_here(ino, lock, wait) {
            return done;
        }
        self.locks.granted.write().asks(ino);
        let request = Request::Lock { ino, wait, lock };
        let (mut may_be_held, free) = (false, Lock { kind: LockKind::None, ..lock });
        let asked = loop {
            let known_by = match self.reclaim() {
                Ok(known_by) => known_by,
                Err(error) => break Err(error),
            };
            may_be_held = true;
            match self.ask_lock(ino, &request, known_by) {
                Asked::Answer(answer) => break answer.map(|_| ()),
                Asked::Elsewhere => {}
                // Who answered does not know of all that is held here, and may have granted what it bars.
                Asked::Anew(session) => {
                    let request = Request::Lock { ino, wait: 0, lock: free };
                    let _ = session.call(&request, session.last(), &mut Vec::new());
                }
            }
        };
        let unknown = asked == Err(Errno::INTR) && (may_be_held || lock.kind == LockKind::None);
        if unknown && let Some(session) = self.current() {
            // Perhaps it is granted all the same, and then held by somebody who does not know:
            // give it back without waiting. (With it goes what the owner had there before.) Nor may what
            // its owner gives up, who does not come again, be asked for in the next session.
            session.post(&Request::Lock { ino, wait: 0, lock: free }, Sequence(0));
        }
        let mut granted = self.locks.granted.write();
        match asked {
            Ok(()) => granted.note(ino, lock),
            Err(Errno::AGAIN) if lock.space == LockSpace::Flock => {
                // A change of mode gives the old one up first.
                granted.note(ino, free);
            }
            Err(_) if unknown => granted.note(ino, free),
            Err(_) => {}
        }
        granted.has_asked(ino);
        asked
    }

    /// Looks at, and changes, all that is locked of a file, if it is left to this client; `judge` says what is locked from now
    /// on. `None`: the head is to be asked.
    fn alone<T>(
        &self,
        ino: InodeId,
        judge: impl FnOnce(Option<&FileLocks>) -> Option<(T, Option<FileLocks>)>,
    ) -> Option<T> {
        if self.locks.asks_anew.load(Ordering::Relaxed) && !planted(Bug::HeirAlone) {
            return None;
        }
        let session = self.current()?;
        let place = session.segment.sole_of(ino)?;
        let mut granted = self.locks.granted.write();
        let inside = session.segment.enter();
        let done = self.alone_inside(session, &mut granted, (ino, place), judge);
        session.segment.leave(inside);
        done
    }

    fn alone_inside<T>(
        &self,
        session: &Session<H>,
        granted: &mut Granted,
        (ino, place): (InodeId, (usize, SoleWord)),
        judge: impl FnOnce(Option<&FileLocks>) -> Option<(T, Option<FileLocks>)>,
    ) -> Option<T> {
        let segment = &session.segment;
        if !segment.is_sole(place, ino) || !segment.grants() || granted.known_by != run_of(session)
        {
            return None;
        }
        if granted.soles.session() != session.number {
            granted.soles = Soles::of(session.number, self.config.limits.sole_locks);
        }
        let Granted { files, asking, soles, .. } = granted;
        let before = files.get(&ino);
        // What the head has been asked it may have granted, and that is not known here yet.
        let known = !asking.contains_key(&ino) || planted(Bug::SoleWhileAsked);
        let whole = soles.has(place) || known && soles.write(segment, place, before);
        if !whole {
            return None;
        }
        let (value, now) = judge(before)?;
        if let Some(now) = &now
            && !soles.write(segment, place, Some(now))
        {
            return None;
        }
        if !segment.grants() {
            // The session is over, or others may have gone on without it: it was granted too late.
            soles.write(segment, place, before);
            return None;
        }
        if let Some(now) = now {
            granted.set(ino, now);
        }
        Some(value)
    }

    fn lock_here(&self, ino: InodeId, lock: Lock, wait: u64) -> Option<Result<()>> {
        self.alone(ino, |held| match judge(OWN, held, lock, wait != 0) {
            Judged::Now(locks) => Some((Ok(()), Some(locks))),
            Judged::Barred(locks) => Some((Err(Errno::AGAIN), Some(locks))),
            Judged::Ask => None,
        })
    }

    fn test_here(&self, ino: InodeId, lock: Lock) -> Option<Option<Lock>> {
        self.alone(ino, |held| {
            let barring = held.and_then(|held| held.barring(OWN, lock).next());
            Some((barring.map(|held| held.lock), None))
        })
    }

    pub(crate) fn do_test_lock(&self, ino: InodeId, lock: Lock) -> Result<Option<Lock>> {
        if let Some(found) = self.test_here(ino, lock) {
            return Ok(found);
        }
        let body = loop {
            let known_by = self.reclaim()?;
            if let Asked::Answer(body) =
                self.ask_lock(ino, &Request::LockTest { ino, lock }, known_by)
            {
                break body?;
            }
        };
        let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
        rpc::take_lock_test(&mut r).map_err(|_| Errno::IO)
    }

    pub(crate) fn do_cancel_lock(&self, ino: InodeId, wait: u64) {
        if wait == LOCK_LEAVING && !self.locks.granted.read().files.contains_key(&ino) {
            return;
        }
        // Without an answer the service forgets the waiter by itself, a little later.
        if let Some(session) = self.current() {
            let _ = self.ask_lock(ino, &Request::LockCancel { ino, wait }, run_of(session));
        }
    }

    /// What a process before this one had locked is this one's. It is not remembered here: that comes of asking for it.
    pub(crate) fn do_inherit(&self, secret: Option<u128>) -> Result<()> {
        let heir = secret.unwrap_or(self.config.heir);
        if heir == 0 {
            return Ok(());
        }
        self.locks.asks_anew.store(true, Ordering::Relaxed);
        let request = Request::Inherit { heir };
        self.run(|turn| Ok(turn.session.call(&request, Sequence(0), &mut Vec::new())?))
    }

    /// Leaves what is locked to whoever shows the secret, and forgets it: nobody may ask for it again when it is somebody else's.
    pub(crate) fn do_leave(&self, secret: Option<u128>) -> Result<()> {
        self.locks.has_left.store(true, Ordering::Relaxed);
        *self.locks.leaves.write() = secret;
        self.locks.asks_anew.store(secret.is_some(), Ordering::Relaxed);
        if secret.is_some() {
            self.locks.granted.write().files.clear();
        }
        // (One that begins meanwhile knows it already.)
        let session = self.session()?;
        self.name_heir(session, *self.locks.leaves.read());
        Ok(())
    }

    /// The same in a session that has begun just now.
    pub(crate) fn name_heir_in(&self, session: &Session<H>) {
        if self.config.heir != 0 || self.locks.has_left.load(Ordering::Relaxed) {
            self.name_heir(session, *self.locks.leaves.read());
        }
    }

    fn name_heir(&self, session: &Session<H>, leaves: Option<u128>) {
        let heir = leaves.unwrap_or(self.config.heir);
        let memory = &session.segment.memory;
        memory.store(control::LEAVES, 0, Ordering::Release);
        memory.store(control::HEIR, heir as u64, Ordering::Release);
        memory.store(control::HEIR + 8, (heir >> 64) as u64, Ordering::Release);
        memory.store(control::LEAVES, u64::from(leaves.is_some()), Ordering::Release);
    }

    /// How often a lock that we wait for may have become free.
    pub(crate) fn do_lock_event(&self) -> Result<u64> {
        self.reclaim()?;
        let session = self.session()?;
        let event = session.segment.word(control::LOCK_EVENT);
        // A new session counts from 0, but must not look like the old one.
        Ok(event.wrapping_add(session.number << 32))
    }

    pub(crate) fn do_await_lock_event(&self, seen: u64, limit_ms: u64) {
        let Some(session) = self.current() else { return };
        let (segment, base) = (&session.segment, session.number << 32);
        let event = || segment.word(control::LOCK_EVENT).wrapping_add(base);
        segment.wait_at_most(limit_ms, || event() != seen);
    }

    /// Asks where all that is held here is known; an inode that the service does not know to be open here is made known
    /// first.
    fn ask_lock(&self, ino: InodeId, request: &Request<'_>, known_by: (u64, u64)) -> Asked<H> {
        let mut pinned = false;
        loop {
            let mut by = None;
            let asked = self.run(|turn| {
                by = Some(turn.session);
                if turn.session.number != known_by.0 {
                    return Err(Errno::STALE.into());
                }
                let mut body = Vec::new();
                let after = if pinned { turn.session.last() } else { Sequence(0) };
                turn.session.call(request, after, &mut body)?;
                Ok(body)
            });
            match by {
                Some(session) if session.number != known_by.0 => return Asked::Elsewhere,
                Some(session) if run_of(session) != known_by => return Asked::Anew(session),
                _ => {}
            }
            match asked {
                // Made a moment ago and still in our log only; or opened in an older session.
                Err(Errno::BADF) if !pinned => {
                    if let Err(error) = self.pin(ino) {
                        return Asked::Answer(Err(error));
                    }
                }
                other => return Asked::Answer(other),
            }
            pinned = true;
        }
    }

    /// Makes the service know that the inode is open here. Whatever we believe: it says that it is not.
    fn pin(&self, ino: InodeId) -> Result<()> {
        let inode = self.inode(ino);
        let mut asked = false;
        self.run(|turn| {
            let mut state = inode.state.write();
            if !asked {
                (asked, state.pinned) = (true, false);
            }
            self.hold(turn, ino, &mut state, LeaseMode::Read, rpc::WANT_PIN)
        })
    }

    /// Asks for everything again that this run of the service does not know of; who knows it now.
    fn reclaim(&self) -> Result<(u64, u64)> {
        let knows = |session| {
            let known_by = run_of(session);
            (self.locks.granted.read().known_by == known_by).then_some(known_by)
        };
        loop {
            let session = self.session()?;
            if let Some(known_by) = knows(session) {
                return Ok(known_by);
            }
            // What is held stays open to those who give it up meanwhile and do not wait.
            let _one = self.locks.reclaiming.write_unless(|| self.config.stops())?;
            if knows(session).is_none() {
                match self.reclaim_in(session) {
                    // This session ended as well: all of it is asked for in the next.
                    Err(Errno::STALE) if !session.segment.attached() => {}
                    done => done?,
                }
            }
        }
    }

    fn reclaim_in(&self, session: &'static Session<H>) -> Result<()> {
        let known_by = run_of(session);
        let all: Vec<(InodeId, Lock)> = {
            let granted = self.locks.granted.read();
            let files = granted.files.iter();
            files.flat_map(|(ino, file)| file.iter().map(|h| (*ino, h.lock))).collect()
        };
        let ask = |ino, lock| {
            let request = Request::Lock { ino, wait: 0, lock };
            session.call(&request, session.last(), &mut Vec::new())
        };
        for (ino, lock) in all {
            let free = Lock { kind: LockKind::None, ..lock };
            match self.pin(ino).and_then(|()| ask(ino, lock)) {
                Ok(()) => {
                    let is_held = self.locks.granted.read().has(ino, &lock);
                    if !is_held {
                        // Given up meanwhile, or a part of it: once more, with what there is now.
                        return ask(ino, free);
                    }
                }
                Err(Errno::STALE) if !session.segment.attached() => return Err(Errno::STALE),
                // Whoever was to wait no longer has lost nobody's locks.
                Err(Errno::INTR) => return Err(Errno::INTR),
                Err(_) => self.locks.granted.write().note(ino, free),
            }
        }
        self.locks.granted.write().known_by = known_by;
        Ok(())
    }
}
