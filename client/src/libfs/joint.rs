//! Names in a directory that other clients use as well. While several clients make and remove names in one directory the head
//! gives it to all of them *jointly* (`storage::format::control`, "Joint"): an operation on its names is appended as always, by
//! what this client takes for so, and counts if it fits what the others have done before. So it is first done by
//! guesses (what is made has a name that nobody has), which cost no question; its caller waits until the head has
//! judged it; and if it was not taken, it is undone here, what it needs is asked for, and it is done again.
//!
//! One thread at a time does so: the service tells of the last operation that was not taken.

use alloc::vec::Vec;

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control::{self, LeaseMode};
use storage::format::rpc::{self, Granted, Request};

use super::LibFsOn;
use super::host::Host;
use super::inode::{Known, Map, State};
use super::names::Locked;
use super::session::Session;
use super::turn::{Step, Stop, Turn, Wait};
use crate::fs::Result;

/// An operation that counts only if it is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joint {
    /// Its entry.
    sequence: Sequence,
    /// How many operations had been refused before it was appended.
    refusals: u64,
    /// What it gives a name to, or takes one from.
    ino: InodeId,
    /// The lease on that.
    lease: Granted,
}

/// How an attempt is to find out what names lead to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// By what was done here, if that is no more than a guess.
    Guess,
    /// By asking.
    Asking,
    /// By asking, with the directories for this client alone: others have been faster again and again.
    Alone,
}

impl By {
    /// The flags with which the lease of a directory is asked for.
    pub(crate) const fn flags(self) -> u8 {
        match self {
            Self::Guess | Self::Asking => rpc::WANT_JOINT,
            Self::Alone => 0,
        }
    }
}

/// So often others may be faster before a directory is asked for alone.
const PATIENCE: u32 = 3;

/// What became of it.
enum Became {
    Taken,
    Untaken(Errno),
    /// The session ended before that was said, or it cannot be told from what others did.
    Unknown,
}

/// Names that this client has given, with the write lease on what they lead to. Who takes a name away from an inode needs that
/// lease: so the name leads there for as long as it is held, whatever others do in the directory.
#[derive(Debug, Default)]
pub struct Given(Map<Vec<u8>, (InodeId, u32, Granted)>);

impl State {
    /// Whether others use the names of the directory, too.
    pub(crate) fn is_joint(&self) -> bool {
        self.mode() == LeaseMode::Joint && !self.shares()
    }

    /// This client is about to take a name away: when it is judged others see that at once, and other threads of this client shall.
    pub(crate) fn take_name(&mut self, name: &[u8]) {
        if !planted(Bug::GivenTillTold) {
            self.given.0.remove(name);
        }
    }
}

impl<H: Host> LibFsOn<H> {
    /// What a name in a directory that others use as well certainly leads to; `state` is the directory's.
    pub(crate) fn given(&self, session: &Session<H>, state: &State, name: &[u8]) -> Option<Known> {
        let &(ino, kind, lease) = state.given.0.get(name)?;
        let held = session.segment.lease_holds(lease.slot, lease.word) && session.segment.in_time();
        (held || planted(Bug::GivenForGood)).then_some(Known::Present(ino, kind))
    }

    /// This client has given the name, and that was taken.
    pub(crate) fn give_name(
        &self,
        dir: InodeId,
        name: &[u8],
        (ino, kind): (InodeId, u32),
        taken: Joint,
    ) {
        let (dir, inode) = (self.inode(dir), self.inode(ino));
        let mut locked = Locked::new(&[&dir, &inode]);
        let lease = taken.lease;
        if locked.get(ino).last != taken.sequence && !planted(Bug::GivenForGood) {
            // Another thread has done something to it since.
            return;
        }
        let state = locked.get(dir.ino);
        if !state.is_joint() {
            return;
        }
        let given = &mut state.given.0;
        if given.len() >= self.config.limits.given {
            given.clear();
        }
        given.insert(name.into(), (ino, kind, lease));
    }

    /// Does what `attempt` does with names, until it is taken; with the lease on what it was done to, if others use the names as
    /// well. `undo`: it was not, and is as if it had never been; or, if that is not certain (`false`), nothing is known of it.
    /// `shows`: whether what is there now shows that it was.
    pub(crate) fn change_names<T>(
        &self,
        mut attempt: impl FnMut(&mut Turn<H>, By) -> Step<T, H>,
        mut undo: impl FnMut(T, bool),
        shows: impl Fn(&T) -> Result<bool>,
    ) -> Result<(T, Option<Joint>)> {
        let mut by = By::Guess;
        for tries in 0..self.config.limits.attempts {
            let (value, turn) = self.run_to_end(|turn| attempt(turn, by))?;
            let Some(joint) = turn.joint.filter(|_| !planted(Bug::JointUnawaited)) else {
                return Ok((value, None));
            };
            let judged = self.became(turn.session, joint).and_then(|became| match became {
                Became::Unknown if shows(&value)? => Ok(None),
                Became::Unknown => Ok(Some((Errno::STALE, false))),
                Became::Taken => {
                    self.show(joint);
                    Ok(None)
                }
                Became::Untaken(errno) => Ok(Some((errno, true))),
            });
            drop(turn);
            match judged {
                Ok(None) => return Ok((value, Some(joint))),
                Err(errno) => {
                    undo(value, false);
                    return Err(errno);
                }
                Ok(Some((errno, certain))) => {
                    undo(value, certain);
                    let by_names = [
                        Errno::EXIST,
                        Errno::NOENT,
                        Errno::STALE,
                        Errno::NOTDIR,
                        Errno::ISDIR,
                        Errno::NOTEMPTY,
                        Errno::INVAL,
                    ];
                    if by != By::Guess && !by_names.contains(&errno) {
                        return Err(errno);
                    }
                    by = if tries < PATIENCE { By::Asking } else { By::Alone };
                }
            }
        }
        Err(Errno::IO)
    }

    /// Before an operation is appended that counts only if it is taken.
    pub(crate) fn begin_joint(&self, turn: &Turn<H>) -> Step<u64, H> {
        if turn.alone.is_none() {
            return Err(Stop::Wait(Wait::Alone));
        }
        Ok(turn.session.refusals())
    }

    /// It is appended, and done to an inode under that lease.
    pub(crate) fn joint(
        turn: &mut Turn<H>,
        refusals: u64,
        sequence: Sequence,
        (ino, lease): (InodeId, Granted),
    ) {
        turn.joint = Some(Joint { sequence, refusals, ino, lease });
    }

    /// What it was done to is hidden from other threads until it is judged: it may never have been. They ask the service, which
    /// answers when that is known.
    pub(crate) fn hide(state: &mut State) {
        if !planted(Bug::UntakenShown) {
            state.lease = Granted::default();
        }
    }

    /// It was taken: what was hidden is so.
    fn show(&self, joint: Joint) {
        let inode = self.inode(joint.ino);
        let mut state = inode.state.write();
        // (Unless another thread has asked for it meanwhile, or done something to it.)
        if state.last == joint.sequence && state.lease == Granted::default() {
            state.lease = joint.lease;
        }
    }

    /// Waits until the service has judged it.
    fn became(&self, session: &Session<H>, joint: Joint) -> Result<Became> {
        let own = joint.sequence;
        let mut body = Vec::new();
        // (To give nothing back is answered when what was done before is judged.)
        let nothing = Request::Release { slots: Vec::new() };
        match session.call(&nothing, own, &mut body) {
            Ok(()) => {}
            Err(Errno::STALE) if !session.segment.attached() => {}
            Err(e) => return Err(e),
        }
        // A head that hung takes it when it goes on, although others have replaced it and go by their own word: in the time of its
        // leases nobody else has given any.
        if !planted(Bug::JointOutOfTime) {
            match session.segment.wait_in_time() {
                Ok(()) => {}
                Err(Errno::STALE) if !session.segment.attached() => return Ok(Became::Unknown),
                Err(e) => return Err(e),
            }
        }
        if session.segment.word(control::SETTLED) < own.0 {
            return Ok(Became::Unknown);
        }
        if session.segment.word(control::UNTAKEN_SEQ) == own.0 {
            return Ok(Became::Untaken(Errno(session.segment.word(control::UNTAKEN_ERRNO) as u16)));
        }
        // Another thread may have got the directory for this client alone meanwhile: then it is refused like any other.
        if session.refusals() == joint.refusals || session.others(joint.refusals, (own, own)) {
            return Ok(Became::Taken);
        }
        let (last, errno) = (session.segment.word(control::REFUSED_SEQ), session.refusal());
        // Of those that were refused before the last one nobody tells: then it shows by what is there.
        Ok(if last == own.0 { Became::Untaken(errno) } else { Became::Unknown })
    }

    /// Whether a name leads to that inode now.
    pub(crate) fn leads_to(&self, dir: InodeId, name: &[u8], ino: InodeId) -> Result<bool> {
        let inode = self.inode(dir);
        let known = self.run(|turn| {
            let mut state = inode.state.write();
            self.hold(turn, dir, &mut state, LeaseMode::Read, 0)?;
            self.find(turn, dir, &state, name)
        });
        match known {
            Ok(Known::Present(found, _)) => Ok(found == ino),
            Ok(Known::Absent) | Err(Errno::NOENT | Errno::STALE) => Ok(false),
            Err(e) => Err(e),
        }
    }
}
