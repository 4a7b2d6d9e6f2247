//! What the pool stands on: time, waiting, chance, and stores that are asked without being waited for. Threads and the
//! system's clock in production; the simulator brings its own, and one seed gives one history.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use base::clock::SystemClock;
use base::{Clock, Errno, Nanos};
use placement::dispatch::{Dispatcher, Failure, Work};

use super::worker::{Answer, Ask, Told};

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
    /// Whether it has said nothing at all for longer than it usually takes, although it was asked something: whoever comes now need not
    /// wait for it as well.
    fn is_late(&self) -> bool;
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
    /// Has stripes computed; what was made of them comes as an answer under `number`, whenever it is there. `alone`: whoever asks does
    /// nothing else until then.
    fn compute(
        &self,
        dispatcher: &Dispatcher,
        work: Work,
        number: usize,
        to: &Sender<Answer>,
        alone: bool,
    );
    /// A number that nobody else draws.
    fn draw(&self) -> u64;
}

/// What has become of a task: the chunks that it has made. Where nobody else does it now, it is done here.
pub fn made(mut work: Work, mut result: Result<usize, Failure>) -> Result<Told, Errno> {
    if let Err(failure) = &result
        && !matches!(failure, Failure::Shape(_))
    {
        log::warn!("pool: {failure}: the processor does it");
        result = work.carry_out_here().map(|()| 0).map_err(Failure::Failed);
    }
    match (work, result) {
        (Work::Encode { stripes, .. } | Work::Rebuild { stripes, .. }, Ok(_)) => {
            Ok(Told::Chunks(stripes.into_iter().flat_map(|stripe| stripe.outputs).collect()))
        }
        (_, Ok(_)) => Err(Errno::INVAL),
        (_, Err(failure)) => {
            log::error!("pool: {failure}");
            Err(Errno::IO)
        }
    }
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

    fn compute(
        &self,
        dispatcher: &Dispatcher,
        work: Work,
        number: usize,
        to: &Sender<Answer>,
        alone: bool,
    ) {
        // Whoever asked may have had enough.
        if alone {
            let (work, result) = dispatcher.run(work);
            let _ = to.send((number, made(work, result)));
        } else {
            let to = to.clone();
            dispatcher
                .submit(work, move |work, result| drop(to.send((number, made(work, result)))));
        }
    }

    fn draw(&self) -> u64 {
        super::shard::draw()
    }
}
