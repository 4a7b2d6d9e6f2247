//! Which directories several clients use at once. A lease of the usual kind goes to and fro between them: each time it is
//! taken back, what was done under it is read, put in order and replicated, and who needs two of them (a rename) loses one
//! while it waits for the other. So a directory whose lease is fought for is given to all of them *jointly*
//! ([`LeaseMode::Joint`](storage::format::control::LeaseMode)) for as long as more than one asks for it.

use std::collections::BTreeMap;

use base::{ClientId, InodeId, Nanos};

use super::limits::Limits;

/// Directories of which this is remembered.
const KNOWN_MAX: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Fight {
    /// How often somebody had to wait for somebody else, since `since`.
    times: u32,
    since: Nanos,
    /// It is used jointly until then ...
    until: Nanos,
    /// ... or longer, if somebody else than this one asks before.
    last: ClientId,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fights {
    known: BTreeMap<InodeId, Fight>,
}

impl Fights {
    /// `client`, who would share it, asks for a directory; `waits`: for a lease that somebody else has. Whether it is used
    /// jointly from now on.
    pub(super) fn ask(
        &mut self,
        ino: InodeId,
        client: ClientId,
        waits: bool,
        limits: &Limits,
        now: Nanos,
    ) -> bool {
        if !waits && !self.known.contains_key(&ino) {
            return false;
        }
        if self.known.len() >= KNOWN_MAX {
            let within = limits.joint_within;
            self.known.retain(|_, f| f.until > now || f.since + within > now);
            if self.known.len() >= KNOWN_MAX {
                // Of so many none is fought for in particular.
                self.known.clear();
            }
        }
        let none = Fight { times: 0, since: now, until: 0, last: client };
        let fight = self.known.entry(ino).or_insert(none);
        if fight.until > now {
            if fight.last != client {
                (fight.last, fight.until) = (client, now + limits.joint_for);
            }
            return true;
        }
        if fight.since + limits.joint_within <= now {
            (fight.times, fight.since) = (0, now);
        }
        fight.times += u32::from(waits);
        if fight.times < limits.joint_after {
            return false;
        }
        *fight = Fight { times: 0, since: now, until: now + limits.joint_for, last: client };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);
    const DIR: InodeId = InodeId(7);

    fn limits() -> Limits {
        Limits { joint_after: 3, joint_within: 100, joint_for: 1000, ..Limits::default() }
    }

    #[test]
    fn who_waits_often_in_a_short_time_shares_and_who_is_alone_later_does_not() {
        let (limits, mut fights) = (limits(), Fights::default());
        let mut ask = |client, waits, now| fights.ask(DIR, client, waits, &limits, now);
        assert!(!ask(A, true, 0) && !ask(B, true, 10));
        assert!(!ask(A, false, 20), "nobody was in the way");
        assert!(ask(A, true, 30), "the third time");
        assert!(ask(A, false, 500) && ask(B, false, 900), "both go on");
        assert!(ask(A, false, 1800) && ask(A, false, 2700), "renewed by B, then by A");
        assert!(!ask(A, false, 2800), "alone for long enough");
    }

    #[test]
    fn who_waits_now_and_then_does_not_share() {
        let (limits, mut fights) = (limits(), Fights::default());
        for round in 0..50 {
            let client = if round % 2 == 0 { A } else { B };
            assert!(!fights.ask(DIR, client, true, &limits, round * 60), "round {round}");
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (limits, mut fights) = (limits(), Fights::default());
        for ino in 0..10_000 {
            fights.ask(InodeId(ino), A, true, &limits, 1);
            assert!(fights.known.len() <= KNOWN_MAX);
        }
    }
}
