//! How long requests may wait. The file system behind a mount waits for its node if that is away, and
//! the kernel waits for the reply, whatever signals the process gets. So that nobody hangs for good:
//!
//! - a request of a process that is being killed is answered (EINTR) by a thread of its own, at most
//!   [`LOOK`] times two after the signal, whatever holds up the thread that serves it. The kernel turns
//!   a Ctrl-C that nobody catches into the same;
//! - a signal that the process catches ends a request that has waited for a second, where it waits
//!   for the service and nothing of it is done yet;
//! - closing a file never waits for long, since a process that exits cannot be killed any more;
//! - with a time limit (`soft`), every request ends with EIO after it;
//! - `umount`, which looks at the mount before it takes it away, is told EIO after a second: it then
//!   relies on the table of mounts;
//! - when all threads are held up, more are started, so that requests that need no node go on.
//!
//! A serving thread tells what it is at in a [`Flight`]. Whoever swaps its number out answers the
//! request; the other finds it taken.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use zerocopy::IntoBytes;

use crate::fuse::wire::{InHeader, OutHeader, op};

/// Between two looks at the requests; only those are looked at that are older than this.
pub const LOOK: Duration = Duration::from_millis(100);
/// After so many looks at which no thread was at anything nobody looks any more, until one is: an idle mount sleeps. (Of many, since
/// to be woken costs the one that wakes it a system call.)
const IDLE_LOOKS: u32 = 10;
/// A signal that its process catches ends a request that has waited for so long.
const CAUGHT: Duration = Duration::from_secs(1);
/// A close that takes longer is answered, and done later.
const CLOSE: Duration = Duration::from_secs(1);
/// `umount` waits for so long.
const UMOUNT: Duration = Duration::from_secs(1);
/// Threads that read the device, when those that there are wait.
const READERS_MAX: usize = 256;
/// Threads in all. With io_uring each lock that is waited for takes one (at most 1000).
const THREADS_MAX: usize = 2048;
/// SIGKILL in a signal set of `/proc`.
const KILL_BIT: u64 = 1 << 8;

thread_local! {
    static FLIGHT: RefCell<Option<Arc<Flight>>> = const { RefCell::new(None) };
}

/// Whether the calling thread shall stop waiting: for file systems that wait.
pub fn stop() -> bool {
    FLIGHT.with_borrow(|flight| flight.as_ref().is_some_and(|flight| flight.shall_stop()))
}

/// Threads that may be given the same requests: those of a queue, by its number, or of the device.
pub type Group = u16;
/// The group of the threads that read `/dev/fuse`.
pub const DEVICE: Group = Group::MAX;

/// How a request is answered by another thread than its own.
pub trait Way: std::fmt::Debug + Send + Sync {
    /// Answers with `error`, at once or soon, if [`Flight::give_up`] says that it is for us to do.
    fn answer(&self, flight: &Arc<Flight>, unique: u64, error: i32);
}

/// By a channel of `/dev/fuse`: the one that the request came from.
impl Way for Arc<OwnedFd> {
    fn answer(&self, flight: &Arc<Flight>, unique: u64, error: i32) {
        if !flight.give_up(unique, error) {
            return;
        }
        // The only failure is that the kernel has it no more.
        let _ = rustix::io::write(&**self, OutHeader::alone(unique, error).as_bytes());
    }
}

/// What a serving thread is at.
#[derive(Debug)]
pub struct Flight {
    way: Box<dyn Way>,
    group: Group,
    begun: Instant,
    /// Number of the request that is not answered yet, or 0.
    open: AtomicU64,
    /// Number of the request that the thread is at.
    current: AtomicU64,
    /// Milliseconds from `begun` to its arrival.
    since: AtomicU64,
    thread: AtomicU32,
    opcode: AtomicU32,
    /// Number of a request that the kernel has interrupted.
    interrupted: AtomicU64,
    /// Number of a request that was answered for its thread, which shall give up.
    given_up: AtomicU64,
    /// The thread waits for the reply to a request that was put off, and serves no other meanwhile.
    parked: AtomicBool,
    /// Of the mount that it serves: rung by whoever begins when nobody looks.
    bell: OnceLock<Arc<Bell>>,
}

/// Wakes whoever looks after the requests.
#[derive(Debug, Default)]
struct Bell {
    /// Nobody looks: there was nothing to look at.
    asleep: AtomicBool,
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// There is something to look at from now on.
    fn ring(&self) {
        // It says that it sleeps, and looks once more; we say what there is, and look at that.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    fn wake(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Until it is rung, unless `busy`.
    fn sleep(&self, busy: impl FnOnce() -> bool) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        if !busy() {
            while !*rung {
                rung = self.changed.wait(rung).unwrap_or_else(PoisonError::into_inner);
            }
        }
        *rung = false;
        self.asleep.store(false, Ordering::Relaxed);
    }
}

impl Flight {
    /// For a thread of that group.
    pub fn new(way: Box<dyn Way>, group: Group) -> Arc<Self> {
        let number = || AtomicU64::new(0);
        let (open, current, since) = (number(), number(), number());
        let (interrupted, given_up) = (number(), number());
        let (thread, opcode) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(Self {
            way,
            group,
            begun: Instant::now(),
            open,
            current,
            since,
            thread,
            opcode,
            interrupted,
            given_up,
            parked: AtomicBool::new(false),
            bell: OnceLock::new(),
        })
    }

    /// Makes this the calling thread's.
    pub fn board(self: &Arc<Self>) {
        FLIGHT.set(Some(self.clone()));
    }

    /// A request has been read.
    pub fn begin(&self, header: &InHeader) {
        let since = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.since.store(since, Ordering::Relaxed);
        self.thread.store(header.pid.get(), Ordering::Relaxed);
        self.opcode.store(header.opcode.get(), Ordering::Relaxed);
        self.current.store(header.unique.get(), Ordering::Relaxed);
        self.open.store(header.unique.get(), Ordering::Release);
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// It is about to be answered, by whoever gets true.
    pub fn take(&self, unique: u64) -> bool {
        self.open.compare_exchange(unique, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// As [`take`](Self::take), for somebody who answers for the thread; that stops waiting if it is to be
    /// told an error.
    pub fn give_up(&self, unique: u64, error: i32) -> bool {
        let is_ours = self.take(unique);
        if is_ours && error != 0 {
            self.given_up.store(unique, Ordering::Release);
        }
        is_ours
    }

    /// The thread waits for a reply that comes from elsewhere, or has got it.
    pub fn park(&self, parked: bool) {
        self.parked.store(parked, Ordering::Release);
        if let Some(bell) = self.bell.get().filter(|_| parked) {
            bell.ring();
        }
    }

    /// Its handler has returned; if it sent no reply, there is none, or one later.
    pub fn end(&self) {
        self.open.store(0, Ordering::Release);
        self.current.store(0, Ordering::Release);
    }

    fn is_at_work(&self) -> bool {
        self.current.load(Ordering::Acquire) != 0 || self.parked.load(Ordering::Acquire)
    }

    fn is_held_up(&self) -> bool {
        self.is_at_work() && (self.parked.load(Ordering::Acquire) || self.age() >= LOOK)
    }

    fn age(&self) -> Duration {
        self.begun
            .elapsed()
            .saturating_sub(Duration::from_millis(self.since.load(Ordering::Relaxed)))
    }

    fn shall_stop(&self) -> bool {
        let current = self.current.load(Ordering::Relaxed);
        if current == 0 {
            return false;
        }
        self.given_up.load(Ordering::Acquire) == current
            || self.interrupted.load(Ordering::Acquire) == current && self.age() >= CAUGHT
    }

    /// What the request shall be told now instead of later, if anything.
    fn verdict(&self, limit: Option<Duration>) -> Option<(u64, i32)> {
        let unique = self.open.load(Ordering::Acquire);
        let age = self.age();
        if unique == 0 || age < LOOK {
            return None;
        }
        let opcode = self.opcode.load(Ordering::Relaxed);
        if matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::DESTROY) {
            return None;
        }
        let answer = if opcode == op::FLUSH && age >= CLOSE {
            0
        } else if is_being_killed(self.thread.load(Ordering::Relaxed)) {
            -i32::from(Errno::INTR.0)
        } else if limit.is_some_and(|limit| age >= limit)
            || age >= UMOUNT && is_umount(self.thread.load(Ordering::Relaxed))
        {
            -i32::from(Errno::IO.0)
        } else {
            return None;
        };
        Some((unique, answer))
    }
}

/// Whether a thread is to die by a signal.
fn is_being_killed(thread: u32) -> bool {
    if thread == 0 {
        return false; // not in our PID namespace
    }
    let Ok(status) = std::fs::read_to_string(format!("/proc/{thread}/status")) else {
        return false;
    };
    status.lines().any(|line| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        set.and_then(|s| u64::from_str_radix(s.trim(), 16).ok()).is_some_and(|s| s & KILL_BIT != 0)
    })
}

/// Whether a thread is umount(8).
fn is_umount(thread: u32) -> bool {
    thread != 0
        && std::fs::read_to_string(format!("/proc/{thread}/comm")).is_ok_and(|n| n == "umount\n")
}

/// All threads of a mount.
#[derive(Debug, Default)]
pub struct Flights {
    all: Mutex<Vec<Arc<Flight>>>,
    closed: AtomicBool,
    bell: Arc<Bell>,
}

impl Flights {
    fn list(&self) -> Vec<Arc<Flight>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a thread's.
    pub fn add(&self, flight: Arc<Flight>) {
        let _ = flight.bell.set(self.bell.clone());
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
        // It may have begun before it had that.
        self.bell.ring();
    }

    /// Takes away that of a thread that ends while others go on.
    pub fn remove(&self, flight: &Arc<Flight>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| !Arc::ptr_eq(other, flight));
    }

    /// How many threads of a group could take a request now.
    pub fn idle(&self, group: Group) -> usize {
        self.list().iter().filter(|f| f.group == group && !f.is_at_work()).count()
    }

    /// Whether one more thread may be started.
    pub fn has_room(&self) -> bool {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).len() < THREADS_MAX
    }

    /// The kernel says that the process of a request has got a signal.
    pub fn interrupted(&self, unique: u64) {
        let all = self.list();
        if let Some(flight) = all.iter().find(|f| f.open.load(Ordering::Acquire) == unique) {
            flight.interrupted.store(unique, Ordering::Release);
        }
    }

    /// Whether all threads have ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends [`watch`](Self::watch).
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.wake();
    }

    /// Looks after the requests until closed: the body of a thread. `more` starts one more thread of
    /// a group.
    pub fn watch(&self, limit: Option<Duration>, groups: &[Group], more: impl Fn(Group)) {
        let mut idle = 0;
        while !self.closed.load(Ordering::Acquire) {
            std::thread::sleep(LOOK);
            let all = self.list();
            let busy = || self.is_closed() || self.list().iter().any(|f| f.is_at_work());
            idle = if busy() { 0 } else { idle + 1 };
            if idle > IDLE_LOOKS {
                self.bell.sleep(busy);
                idle = 0;
                continue;
            }
            for flight in &all {
                if let Some((unique, error)) = flight.verdict(limit) {
                    flight.way.answer(flight, unique, error);
                }
            }
            for group in groups {
                let most = if *group == DEVICE { READERS_MAX } else { THREADS_MAX };
                let of_group = || all.iter().filter(|f| f.group == *group);
                if all.len() < THREADS_MAX
                    && of_group().count() < most
                    && of_group().all(|f| f.is_held_up())
                {
                    more(*group);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use zerocopy::FromZeros;

    use super::*;

    #[derive(Debug)]
    struct Told(Mutex<Sender<(u64, i32)>>);

    impl Way for Told {
        fn answer(&self, flight: &Arc<Flight>, unique: u64, error: i32) {
            if flight.give_up(unique, error) {
                self.0.lock().unwrap().send((unique, error)).unwrap();
            }
        }
    }

    /// Nobody looks after an idle mount; a request that comes then, and takes too long, is answered all the same, and so is
    /// the next; and its end is noticed.
    #[test]
    fn who_comes_to_an_idle_mount_is_looked_after() {
        let (tell, told) = channel();
        let flights = Arc::new(Flights::default());
        let flight = Flight::new(Box::new(Told(Mutex::new(tell))), DEVICE);
        flights.add(flight.clone());
        let watched = flights.clone();
        let thread = std::thread::spawn(move || {
            watched.watch(Some(LOOK), &[], |_| unreachable!("no group"))
        });
        let sleeps = || {
            let since = Instant::now();
            while !flights.bell.asleep.load(Ordering::Relaxed) {
                assert!(since.elapsed() < Duration::from_secs(120), "it goes on looking");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        for unique in [4, 6] {
            sleeps();
            let mut header = InHeader::new_zeroed();
            header.unique.set(unique);
            flight.begin(&header);
            let answer = told.recv_timeout(Duration::from_secs(120));
            assert_eq!(answer, Ok((unique, -i32::from(Errno::IO.0))));
            flight.end();
        }
        sleeps();
        flights.close();
        thread.join().unwrap();
    }
}
