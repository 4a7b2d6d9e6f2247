//! Handshakes, beside the thread that decides. What a side computes in one (signatures, their verification, keys) takes most
//! of a millisecond, and anybody who reaches the port can begin one. So what arrives in a handshake is given to a
//! thread of its own, and until it comes back the connection has nothing to say. Bounded: at most one piece of each connection
//! is there, and connections are.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::Connection;

use super::session::failed;
use crate::decode::LinkError;

/// A side of a connection, and how much of what arrived it has used.
pub(super) struct Back {
    pub tls: Box<Connection>,
    pub used: usize,
    /// Whether bytes of frames came with it; or why it does not go on.
    pub outcome: Result<bool, LinkError>,
}

/// Where it is put when it is ready.
#[derive(Default)]
pub(super) struct Slot(Mutex<Option<Back>>);

impl Slot {
    pub fn take(&self) -> Option<Back> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub fn is_ready(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

struct Job {
    tls: Box<Connection>,
    bytes: Vec<u8>,
    slot: Arc<Slot>,
}

/// The thread; it ends when this, and each session that was made with it, is gone.
#[derive(Clone)]
pub(crate) struct Pool {
    jobs: Sender<Job>,
    bell: Arc<OwnedFd>,
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

thread_local! {
    static WORKED: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has done a part of a handshake itself: for tests of those that should not.
pub fn worked_here() -> u64 {
    WORKED.get()
}

/// What one side does with bytes of a handshake, or of what comes after it.
pub(super) fn work(tls: &mut Connection, bytes: &[u8]) -> (usize, Result<bool, LinkError>) {
    let mut left = bytes;
    if tls.is_handshaking() {
        WORKED.set(WORKED.get() + 1);
    }
    loop {
        let used = match tls.read_tls(&mut left) {
            Ok(used) => used,
            Err(e) => return (bytes.len() - left.len(), Err(LinkError::Io(e.to_string()))),
        };
        let state = match tls.process_new_packets() {
            Ok(state) => state,
            Err(error) => return (bytes.len() - left.len(), Err(failed(&error))),
        };
        if used == 0 {
            // The other side has taken its leave.
            return (bytes.len() - left.len(), Err(LinkError::Closed));
        }
        if left.is_empty() || !tls.is_handshaking() {
            return (bytes.len() - left.len(), Ok(state.plaintext_bytes_to_read() > 0));
        }
    }
}

impl Pool {
    /// Starts the thread. The descriptor that comes with it becomes readable when something is ready.
    pub fn start() -> std::io::Result<(Self, Arc<OwnedFd>)> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = Arc::new(rustix::event::eventfd(0, flags)?);
        let (jobs, todo) = channel::<Job>();
        let rings = Arc::clone(&bell);
        let run = move || {
            for Job { mut tls, bytes, slot } in todo {
                let (used, outcome) = work(&mut tls, &bytes);
                let back = Back { tls, used, outcome };
                *slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(back);
                // It fails only if it rings already.
                let _ = rustix::io::write(rings.as_fd(), &1u64.to_le_bytes());
            }
        };
        std::thread::Builder::new().name("handshakes".to_owned()).spawn(run)?;
        Ok((Self { jobs, bell: Arc::clone(&bell) }, bell))
    }

    /// Gives it a side of a connection and what arrived for it. If the thread is gone, it is done here.
    pub(super) fn give(&self, tls: Box<Connection>, bytes: Vec<u8>) -> Arc<Slot> {
        let slot = Arc::new(Slot::default());
        let job = Job { tls, bytes, slot: Arc::clone(&slot) };
        if let Err(gone) = self.jobs.send(job) {
            let Job { mut tls, bytes, slot } = gone.0;
            let (used, outcome) = work(&mut tls, &bytes);
            *slot.0.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Back { tls, used, outcome });
            let _ = rustix::io::write(self.bell.as_fd(), &1u64.to_le_bytes());
        }
        slot
    }
}

/// The bell was heard.
pub(crate) fn heard(bell: &OwnedFd) {
    let _ = rustix::io::read(bell.as_fd(), &mut [0u8; 8]);
}
