//! Work that touches bytes in bulk: pieces of it that others than the thread that decides may do. A piece is an effect
//! ([`Effect::Work`](super::Effect::Work)), its end an event ([`Event::WorkEnded`](super::Event::WorkEnded)).
//!
//! - A piece owns what it works on and decides nothing; it reaches the region through the `Media` of who does it.
//! - Who does it fences its own stores before it says that it has ended: a fence is the processor's that executes it, so nobody
//!   else can do that for him.
//! - A piece is done once, by whoever comes first: the node may have need of its end before anybody has begun ([`Piece::settle`]).
//! - Which pieces there may be at one time, and in which order their ends are taken up, is for who makes them to say.
//!
//! A thread that dies takes its process with it (a panic aborts), so a piece either ends or dies with its node, somewhere in the
//! middle ([`Piece::die`], for the simulator).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use base::planted::{Bug, planted};
use storage::media::{Media, MediaError};
use storage::volume::{CopyItem, back_copies, run_copies};

use super::client::Batch;
use super::client::reader::Reader;
use super::ring::{self, How, Put};

/// The stages of which some is done as work, for those who count it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// Entries are copied out of a log, and their checksums compared.
    Fetch,
    /// Chunks are put into the ring, or what they hold is laid down there.
    Keep,
    /// What is published is copied to where it belongs.
    Publish,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fetch, Self::Keep, Self::Publish];

    /// The name of the stage.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fetch => "fetch",
            Self::Keep => "keep",
            Self::Publish => "publish",
        }
    }
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Job {
    /// So many bytes, from there on.
    Fetch(Reader, usize),
    /// These chunks, one after the other, or what they hold.
    Keep(Vec<Put>, How),
    /// These copies, one after the other.
    Publish(Vec<CopyItem>),
}

/// What has come of it.
#[derive(Debug)]
pub(super) enum End {
    /// The entries, and how far the log is read with them.
    Fetched(Result<Box<(Reader, Batch)>, MediaError>),
    /// That is durable.
    Kept(Result<(), MediaError>),
    /// So are these.
    Copied(Result<(), MediaError>),
}

impl Job {
    fn run(self, media: &dyn Media) -> End {
        match self {
            Self::Fetch(mut reader, max) => {
                End::Fetched(reader.read(media, max).map(|batch| Box::new((reader, batch))))
            }
            Self::Keep(puts, how) => End::Kept(ring::keep_all(media, &puts, how)),
            Self::Publish(items) => End::Copied(copy(media, &items)),
        }
    }
}

fn copy(media: &dyn Media, items: &[CopyItem]) -> Result<(), MediaError> {
    back_copies(media, items)?;
    run_copies(media, items)?;
    if planted(Bug::CopiesUnfenced) { Ok(()) } else { media.fence() }
}

#[derive(Debug)]
enum State {
    Waits(Job),
    Runs,
    Ended(End),
    Taken,
}

#[derive(Debug)]
struct Shared {
    id: u64,
    kind: Kind,
    bytes: usize,
    state: Mutex<State>,
    over: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module. Copies are the same piece.
#[derive(Clone, Debug)]
pub struct Piece(Arc<Shared>);

impl Piece {
    /// A piece about so many bytes.
    pub(super) fn new(id: u64, kind: Kind, bytes: usize, job: Job) -> Self {
        let (state, over) = (Mutex::new(State::Waits(job)), Condvar::new());
        Self(Arc::new(Shared { id, kind, bytes, state, over }))
    }

    /// By this number the node hears of its end.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Of which stage it is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Bytes that it is about.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Does it, unless somebody has begun.
    pub fn run(&self, media: &dyn Media) {
        let job = {
            let mut state = self.0.lock();
            match std::mem::replace(&mut *state, State::Runs) {
                State::Waits(job) => job,
                other => {
                    *state = other;
                    return;
                }
            }
        };
        let end = job.run(media);
        *self.0.lock() = State::Ended(end);
        self.0.over.notify_all();
    }

    /// Returns when it has ended: if nobody has begun it is done here, else it is waited for.
    pub fn settle(&self, media: &dyn Media) {
        self.run(media);
        let mut state = self.0.lock();
        while matches!(*state, State::Runs) {
            state = self.0.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether somebody does it, or did.
    pub fn is_begun(&self) -> bool {
        !matches!(*self.0.lock(), State::Waits(_))
    }

    /// Whether the node has taken up what came of it.
    pub fn is_taken(&self) -> bool {
        matches!(*self.0.lock(), State::Taken)
    }

    /// What has come of it, once.
    pub(super) fn take(&self) -> Option<End> {
        let mut state = self.0.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Ended(end) => Some(end),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Its thread dies with the process, when some of it is done: `share` of 256 parts. It never ends.
    pub fn die(&self, media: &dyn Media, share: u8) {
        let mut state = self.0.lock();
        if let State::Waits(job) = std::mem::replace(&mut *state, State::Taken) {
            match job {
                Job::Fetch(..) => {}
                Job::Keep(puts, how) => ring::keep_some(media, &puts, how, share),
                Job::Publish(items) => {
                    let some = items.len() * usize::from(share) / 256;
                    let _ = copy(media, &items[..some]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use storage::media::Segment;
    use storage::memory::MemoryRegion;

    use super::*;

    fn piece() -> Piece {
        Piece::new(1, Kind::Keep, 0, Job::Keep(Vec::new(), How::Whole))
    }

    #[test]
    fn it_is_done_once_whoever_wants_it() {
        let media = MemoryRegion::new();
        media.ensure(Segment::Stream, 4096).unwrap();
        let piece = piece();
        assert!(piece.take().is_none(), "nobody has begun");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| piece.settle(&media));
            }
        });
        assert!(matches!(piece.take(), Some(End::Kept(Ok(())))));
        piece.settle(&media);
        assert!(piece.take().is_none(), "its end is taken up once");
    }

    #[test]
    fn what_has_died_never_ends() {
        let media = MemoryRegion::new();
        let piece = piece();
        piece.die(&media, 128);
        piece.run(&media);
        assert!(piece.take().is_none());
    }
}
