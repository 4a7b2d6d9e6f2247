//! File locks: asked of the head through the service. Nothing waits here: a lock that cannot be had
//! now is EAGAIN, and `LOCK_EVENT` of the control area tells when to ask again.
//!
//! What was granted is remembered, too: if the service forgets (it was restarted, or the client had
//! to attach anew), the locks are asked for again before anything else is locked. One that somebody
//! else has got in between is lost.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::{self, Request};
use storage::locks::FileLocks;

use super::session::Session;
use super::sync::RwLock;
use super::{LibFs, Outcome};
use crate::fs::Result;

/// Requests of one owner are asked one after the other, so that what is remembered is what the head
/// did last.
const ORDERS: usize = 16;
/// In what is remembered there is only this client.
const OWN: ClientId = ClientId(0);

/// What a client keeps about file locks.
#[derive(Debug, Default)]
pub struct Locks {
    orders: [RwLock<()>; ORDERS],
    granted: RwLock<Granted>,
}

#[derive(Debug, Default)]
struct Granted {
    /// Session, and run of the service, that know of them.
    known_by: (u64, u64),
    files: BTreeMap<InodeId, FileLocks>,
}

impl Granted {
    fn note(&mut self, ino: InodeId, lock: Lock) {
        let file = self.files.entry(ino).or_default();
        // The head has counted it.
        let _ = file.put(OWN, lock, usize::MAX);
        if file.is_empty() {
            self.files.remove(&ino);
        }
    }
}

fn run_of(session: &Session) -> (u64, u64) {
    let run = session.segment.word(control::LOCK_RUN).load(Ordering::Acquire);
    (session.number, run)
}

impl LibFs {
    pub(crate) fn do_lock(&self, ino: InodeId, lock: Lock, wait: u64) -> Result<()> {
        let _order = self.locks.orders[(ino.0 ^ lock.owner) as usize % ORDERS].write();
        self.reclaim()?;
        let asked = self.ask_lock(ino, &Request::Lock { ino, wait, lock }).map(|_| ());
        let mut granted = self.locks.granted.write();
        match asked {
            Ok(()) => granted.note(ino, lock),
            Err(Errno::AGAIN) if lock.space == LockSpace::Flock => {
                // A change of mode gives the old one up first.
                granted.note(ino, Lock { kind: LockKind::None, ..lock });
            }
            Err(Errno::INTR) => {
                // Perhaps it is granted all the same, and then held by somebody who does not know:
                // give it back without waiting. (With it goes what the owner had there before.)
                let lock = Lock { kind: LockKind::None, ..lock };
                if let Some(session) = self.current() {
                    session.post(&Request::Lock { ino, wait: 0, lock }, Sequence(0));
                }
                granted.note(ino, lock);
            }
            Err(_) => {}
        }
        asked
    }

    pub(crate) fn do_test_lock(&self, ino: InodeId, lock: Lock) -> Result<Option<Lock>> {
        self.reclaim()?;
        let body = self.ask_lock(ino, &Request::LockTest { ino, lock })?;
        let (_, mut r) = rpc::reply_status(&body).map_err(|_| Errno::IO)?;
        rpc::take_lock_test(&mut r).map_err(|_| Errno::IO)
    }

    pub(crate) fn do_cancel_lock(&self, ino: InodeId, wait: u64) {
        // Without an answer the service forgets the waiter by itself, a little later.
        let _ = self.ask_lock(ino, &Request::LockCancel { ino, wait });
    }

    /// How often a lock that we wait for may have become free.
    pub(crate) fn do_lock_event(&self) -> Result<u64> {
        self.reclaim()?;
        let session = self.session()?;
        let event = session.segment.word(control::LOCK_EVENT).load(Ordering::Acquire);
        // A new session counts from 0, but must not look like the old one.
        Ok(event.wrapping_add(session.number << 32))
    }

    pub(crate) fn do_await_lock_event(&self, seen: u64, limit_ms: u64) {
        let Some(session) = self.current() else { return };
        let word = session.segment.word(control::LOCK_EVENT);
        let base = session.number << 32;
        session
            .segment
            .wait_at_most(limit_ms, || word.load(Ordering::Acquire).wrapping_add(base) != seen);
    }

    /// Asks; an inode that the service does not know to be open here is made known first.
    fn ask_lock(&self, ino: InodeId, request: &Request<'_>) -> Result<Vec<u8>> {
        let mut tried = false;
        self.repeat(|session| {
            let mut body = Vec::new();
            let after = if tried { session.last() } else { Sequence(0) };
            match session.call(request, after, &mut body) {
                Ok(()) => Ok(Outcome::Done(body)),
                Err(Errno::BADF) if !tried => {
                    // Made a moment ago and still in our log only; or opened in an older session.
                    tried = true;
                    self.pin(session, ino)?;
                    Ok(Outcome::Again)
                }
                Err(e) => Err(e),
            }
        })
    }

    fn pin(&self, session: &Session, ino: InodeId) -> Result<()> {
        let inode = self.inode(ino);
        let mut state = inode.state.write();
        // Whatever we believe: the service says that it is not.
        state.pinned = false;
        self.ensure(session, ino, &mut state, LeaseMode::Read, rpc::WANT_PIN)
    }

    /// Asks for everything again that this run of the service does not know of.
    fn reclaim(&self) -> Result<()> {
        let session = self.session()?;
        if self.locks.granted.read().known_by == run_of(session) {
            return Ok(());
        }
        let mut granted = self.locks.granted.write();
        let known_by = run_of(session);
        if granted.known_by == known_by {
            return Ok(());
        }
        let all: Vec<(InodeId, Lock)> = granted
            .files
            .iter()
            .flat_map(|(ino, file)| file.iter().map(|h| (*ino, h.lock)))
            .collect();
        for (ino, lock) in all {
            let mut body = Vec::new();
            let request = Request::Lock { ino, wait: 0, lock };
            let again = self
                .pin(session, ino)
                .and_then(|()| session.call(&request, session.last(), &mut body));
            match again {
                Ok(()) => {}
                // This session ended as well: all of it is asked for in the next.
                Err(Errno::STALE) if !session.segment.attached() => return Ok(()),
                // Whoever was to wait no longer has lost nobody's locks.
                Err(Errno::INTR) => return Err(Errno::INTR),
                Err(_) => granted.note(ino, Lock { kind: LockKind::None, ..lock }),
            }
        }
        granted.known_by = known_by;
        Ok(())
    }
}
