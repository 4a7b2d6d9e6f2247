//! A lock that ends with its holder: taken for a time, and renewed by a thread.
//!
//! Whether it is still held is known without asking: the cluster counts the time from when it was asked, which is no sooner than we
//! did. A renewal that comes too late may find that it is held nevertheless: then nobody else had it in between. If it ended, and nobody has
//! it, it is taken anew, in another term.
//!
//! The end is counted by the OSD's clock of the day: a step of that ends it early, which the next renewal finds out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::Errno;

use crate::SHUT_OUT;
use crate::librados::{Io, Lock};

/// It is renewed six times before it would end.
const RENEWALS: u32 = 6;
/// Clocks of two machines do not run alike.
const MARGIN: u64 = 20;
/// Who waits for it looks so often.
const LOOK: Duration = Duration::from_millis(50);
/// Who lets it go waits this long for it at most.
const PARTING: Duration = Duration::from_secs(2);

/// What the thread and the holder share.
struct Inner {
    io: Arc<Io>,
    object: String,
    name: String,
    cookie: String,
    description: String,
    tag: String,
    duration: Duration,
    /// Until when it is held, of the clock that does not stop while the machine sleeps.
    until: AtomicU64,
    /// How often it ended and was taken anew.
    term: AtomicU64,
    /// Somebody else has it, or it is not to be had by this client any more.
    lost: AtomicBool,
    /// The holder let it go.
    over: AtomicBool,
    /// The thread is to look.
    wake: mpsc::SyncSender<()>,
}

/// The lock, until it is dropped.
pub struct Lease {
    inner: Arc<Inner>,
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
        let (name, cookie, tag) = (&self.name, &self.cookie, &self.tag);
        let lock = Lock { name, cookie, tag, description: &self.description };
        let asked = now();
        self.io.lock(&self.object, &lock, self.duration, renew)?;
        let length = u64::try_from(self.duration.as_nanos()).unwrap_or(u64::MAX);
        self.until.store(asked + (length - length / MARGIN), Ordering::SeqCst);
        Ok(())
    }

    fn wake(&self) {
        // One that waits already does as well.
        let _ = self.wake.try_send(());
    }

    fn renew(&self, woken: &mpsc::Receiver<()>) {
        loop {
            let is_woken = woken.recv_timeout(self.duration / RENEWALS).is_ok();
            if self.over.load(Ordering::SeqCst) {
                break;
            }
            if is_woken {
                std::thread::sleep(LOOK);
            }
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
                // To who is shut out the cluster never says anything else.
                Err(errno @ (Errno::BUSY | SHUT_OUT)) => {
                    self.until.store(0, Ordering::SeqCst);
                    self.lost.store(true, Ordering::SeqCst);
                    let why = if errno == SHUT_OUT {
                        "the cluster has shut this client out"
                    } else {
                        "somebody else has it"
                    };
                    log::error!("rados: the lock {} of {} is lost: {why}", self.name, self.object);
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
        let (wake, woken) = mpsc::sync_channel(1);
        let inner = Arc::new(Inner {
            io,
            object: object.to_owned(),
            name: lock.name.to_owned(),
            cookie: lock.cookie.to_owned(),
            description: lock.description.to_owned(),
            tag: lock.tag.to_owned(),
            duration,
            until: AtomicU64::new(0),
            term: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            over: AtomicBool::new(false),
            wake,
        });
        match inner.ask(false) {
            // What was given up may have been done: nobody would let it go.
            Err(Errno::TIMEDOUT) => {
                let _ = inner.io.unlock(&inner.object, &inner.name, &inner.cookie);
                return Err(Errno::TIMEDOUT);
            }
            asked => asked?,
        }
        let (end, ended) = mpsc::channel();
        let renews = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("rados-lease".into()).spawn(move || {
            renews.renew(&woken);
            drop(end);
        });
        let Ok(thread) = thread else {
            let _ = inner.io.unlock(&inner.object, &inner.name, &inner.cookie);
            return Err(Errno::AGAIN);
        };
        Ok(Self { inner, ended: Mutex::new(ended), thread: Some(thread) })
    }

    /// What is to be known of it, by others than its holder.
    pub fn terms(&self) -> Terms {
        Terms(Arc::clone(&self.inner))
    }
}

/// Whether a lock is held: of use also when it was dropped.
#[derive(Clone)]
pub struct Terms(Arc<Inner>);

impl std::fmt::Debug for Terms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Terms").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl Terms {
    /// Whether its holder let it go.
    pub fn is_over(&self) -> bool {
        self.0.over.load(Ordering::SeqCst)
    }

    /// The term in which it is held now, so that nobody else has it; another one than before: somebody else may have had it in
    /// between.
    pub fn now(&self) -> Option<u64> {
        // In this order: a new term begins before it is held.
        let until = self.0.until.load(Ordering::SeqCst);
        let term = self.0.term.load(Ordering::SeqCst);
        (now() < until && !self.is_over()).then_some(term)
    }

    /// The same; if it ended, it is tried to take it anew, and waited for so long.
    pub fn wait(&self, patience: Duration) -> Option<u64> {
        let end = Instant::now() + patience;
        loop {
            let term = self.now();
            let is_lost = self.is_over() || self.0.lost.load(Ordering::SeqCst);
            if term.is_some() || is_lost || Instant::now() > end {
                return term;
            }
            self.0.wake();
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        self.inner.wake();
        // A cluster that hangs does not hold up who ends: the lock ends by itself then.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let over = ended.recv_timeout(PARTING) == Err(mpsc::RecvTimeoutError::Disconnected);
        if over && let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
