//! A lock that ends with its holder: taken for a time, and renewed by a thread.
//!
//! Whether it is still held is known without asking: the cluster counts the time from when it was asked, which is no sooner than we
//! did. A renewal that comes too late may find that it is held nevertheless: then nobody else had it in between. If it ended, and nobody has
//! it, it is taken anew, in another term.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use base::Errno;

use crate::librados::{Io, Lock};

/// It is renewed six times before it would end.
const RENEWALS: u32 = 6;
/// Clocks of two machines do not run alike.
const MARGIN: u64 = 20;
/// Who lets it go waits this long for it at most.
const PARTING: Duration = Duration::from_secs(2);

/// What the thread and the holder share.
struct Inner {
    io: Arc<Io>,
    object: String,
    name: String,
    cookie: String,
    description: String,
    duration: Duration,
    /// Until when it is held, of the clock that does not stop while the machine sleeps.
    until: AtomicU64,
    /// How often it ended and was taken anew.
    term: AtomicU64,
}

/// The lock, until it is dropped.
pub struct Lease {
    inner: Arc<Inner>,
    /// Dropped: the thread is to end.
    stop: Option<mpsc::Sender<()>>,
    ended: Mutex<mpsc::Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("object", &self.inner.object).finish_non_exhaustive()
    }
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

impl Inner {
    /// Takes it, or renews it.
    fn ask(&self, renew: bool) -> Result<(), Errno> {
        let lock = Lock { name: &self.name, cookie: &self.cookie, description: &self.description };
        let asked = now();
        self.io.lock(&self.object, &lock, self.duration, renew)?;
        let length = u64::try_from(self.duration.as_nanos()).unwrap_or(u64::MAX);
        self.until.store(asked + (length - length / MARGIN), Ordering::SeqCst);
        Ok(())
    }

    fn renew(&self, stop: &mpsc::Receiver<()>) {
        while stop.recv_timeout(self.duration / RENEWALS) == Err(mpsc::RecvTimeoutError::Timeout) {
            let asked = match self.ask(true) {
                // It ended, or somebody broke it.
                Err(Errno::NOENT) => {
                    self.until.store(0, Ordering::SeqCst);
                    self.term.fetch_add(1, Ordering::SeqCst);
                    let taken = self.ask(false);
                    log::warn!(
                        "rados: the lock {} of {} had ended, and is {}",
                        self.name,
                        self.object,
                        if taken.is_ok() { "taken anew" } else { "not to be had now" }
                    );
                    taken
                }
                asked => asked,
            };
            match asked {
                Ok(()) => {}
                Err(Errno::BUSY) => {
                    self.until.store(0, Ordering::SeqCst);
                    log::error!(
                        "rados: somebody else has the lock {} of {}",
                        self.name,
                        self.object
                    );
                    return;
                }
                Err(errno) => {
                    log::warn!("rados: the lock {} of {}: {errno}", self.name, self.object);
                }
            }
        }
        let _ = self.io.unlock(&self.object, &self.name, &self.cookie);
    }
}

impl Lease {
    /// Takes a lock of an object for a time, and keeps it. `lock.cookie` is one that nobody else has.
    ///
    /// # Errors
    /// EBUSY: somebody else has it.
    pub fn take(
        io: Arc<Io>,
        object: &str,
        lock: &Lock<'_>,
        duration: Duration,
    ) -> Result<Self, Errno> {
        let inner = Arc::new(Inner {
            io,
            object: object.to_owned(),
            name: lock.name.to_owned(),
            cookie: lock.cookie.to_owned(),
            description: lock.description.to_owned(),
            duration,
            until: AtomicU64::new(0),
            term: AtomicU64::new(0),
        });
        match inner.ask(false) {
            // What was given up may have been done: nobody would let it go.
            Err(Errno::TIMEDOUT) => {
                let _ = inner.io.unlock(&inner.object, &inner.name, &inner.cookie);
                return Err(Errno::TIMEDOUT);
            }
            asked => asked?,
        }
        let (stop, stopped) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let renews = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("rados-lease".into()).spawn(move || {
            renews.renew(&stopped);
            drop(end);
        });
        let Ok(thread) = thread else {
            let _ = inner.io.unlock(&inner.object, &inner.name, &inner.cookie);
            return Err(Errno::AGAIN);
        };
        Ok(Self { inner, stop: Some(stop), ended: Mutex::new(ended), thread: Some(thread) })
    }

    /// The term in which it is held now, so that nobody else has it; another one than before: somebody else may have had it in
    /// between.
    pub fn term(&self) -> Option<u64> {
        // In this order: a new term begins before it is held.
        let until = self.inner.until.load(Ordering::SeqCst);
        let term = self.inner.term.load(Ordering::SeqCst);
        (now() < until).then_some(term)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.inner.until.store(0, Ordering::SeqCst);
        self.stop.take();
        // A cluster that hangs does not hold up who ends: the lock ends by itself then.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let over = ended.recv_timeout(PARTING) == Err(mpsc::RecvTimeoutError::Disconnected);
        if over && let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
