//! What the pool stands on: time, waiting, chance, and stores that are asked without being waited for. Threads and the
//! system's clock in production; the simulator brings its own, and one seed gives one history.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use base::clock::SystemClock;
use base::{Clock, Errno, Nanos};

use super::worker::{Answer, Ask};

/// A lock that is held until it is dropped, or ends before.
pub type Lock = Box<dyn Hold>;

/// What holds a lock.
pub trait Hold: Send + Sync {
    /// The term in which it is held now; none: it ended, as one may that is to be renewed. Another one than before: it ended meanwhile,
    /// and was taken anew.
    fn term(&self) -> Option<u64> {
        Some(0)
    }
}

/// A file holds its lock as long as it is open.
impl Hold for std::fs::File {}

/// The lock of what knows no locks.
impl Hold for () {}

/// What a store says to who wants its lock, under the number that the asker gave it.
pub type LockAnswer = (usize, Result<Lock, Errno>);

/// A store that is asked without being waited for.
pub trait Access: Send + Sync {
    /// Asks; the answer comes under `number`. `EAGAIN` comes at once where too much is waiting already.
    fn ask(&self, ask: Ask, number: usize, to: &Sender<Answer>);
    /// Whether something asked of it has had no answer for too long.
    fn is_suspect(&self) -> bool;
    /// How long it takes, in nanoseconds, with what it has to do now.
    fn load(&self) -> Nanos;
    /// Asks for the lock of an image. Where nobody hears the answer any more, the lock is let go at once.
    fn lock(&self, image: &str, number: usize, to: &Sender<LockAnswer>);
    /// How far it is with what it was to remove.
    fn removals(&self) -> Removals;
}

/// Names that a store was to remove, since it was opened.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Removals {
    /// All, by [`Ask::Remove`].
    pub asked: u64,
    /// Those of them that are gone.
    pub done: u64,
    /// Those that are there still, and that nobody will try again: it failed, or there was too much to remember.
    pub failed: u64,
}

impl Removals {
    /// Those that it has not come to.
    pub fn waiting(&self) -> u64 {
        self.asked.saturating_sub(self.done + self.failed)
    }
}

/// Time, waiting, and chance.
pub trait Ground: Send + Sync {
    /// Monotonic nanoseconds.
    fn now(&self) -> Nanos;
    /// The next answer, waited for until `until` and no longer.
    fn wait(&self, answers: &Receiver<Answer>, until: Nanos) -> Option<Answer>;
    /// The same for locks.
    fn wait_for_lock(&self, answers: &Receiver<LockAnswer>, until: Nanos) -> Option<LockAnswer>;
    /// A number that nobody else draws.
    fn draw(&self) -> u64;
}

/// That of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct System(SystemClock);

impl Ground for System {
    fn now(&self) -> Nanos {
        self.0.monotonic()
    }

    fn wait(&self, answers: &Receiver<Answer>, until: Nanos) -> Option<Answer> {
        answers.recv_timeout(Duration::from_nanos(until.saturating_sub(self.now()))).ok()
    }

    fn wait_for_lock(&self, answers: &Receiver<LockAnswer>, until: Nanos) -> Option<LockAnswer> {
        answers.recv_timeout(Duration::from_nanos(until.saturating_sub(self.now()))).ok()
    }

    fn draw(&self) -> u64 {
        super::shard::draw()
    }
}
