//! File locks: asked of the head through the service. Nothing waits here: a lock that cannot be had
//! now is EAGAIN, and `LOCK_EVENT` of the control area tells when to ask again.
//!
//! What was granted is remembered, too: if the service forgets (it was restarted, or the client had
//! to attach anew), the locks are asked for again before anything else is locked. One that somebody
//! else has got in between is lost.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::{self, Request};
use storage::locks::FileLocks;

use super::LibFsOn;
use super::host::Host;
use super::session::Session;
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
}

impl<H: Host> Default for Locks<H> {
    fn default() -> Self {
        Self { orders: core::array::from_fn(|_| RwLock::default()), granted: RwLock::default() }
    }
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

fn run_of<H: Host>(session: &Session<H>) -> (u64, u64) {
    let run = session.segment.word(control::LOCK_RUN);
    (session.number, run)
}

impl<H: Host> LibFsOn<H> {
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

    /// Asks; an inode that the service does not know to be open here is made known first.
    fn ask_lock(&self, ino: InodeId, request: &Request<'_>) -> Result<Vec<u8>> {
        let mut pinned = false;
        loop {
            let asked = self.run(|turn| {
                let mut body = Vec::new();
                let after = if pinned { turn.session.last() } else { Sequence(0) };
                turn.session.call(request, after, &mut body)?;
                Ok(body)
            });
            match asked {
                // Made a moment ago and still in our log only; or opened in an older session.
                Err(Errno::BADF) if !pinned => self.pin(ino)?,
                other => return other,
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
            let again =
                self.pin(ino).and_then(|()| session.call(&request, session.last(), &mut body));
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
