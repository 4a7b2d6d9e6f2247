//! How long the coordinator counts this node in, as the core is told: whether it is fenced, and until when its clients'
//! leases hold by their own clock. Whoever drives the core goes by it: [`crate::nicfs`], and the simulator.
//!
//! Two orders matter, and this is the one place that keeps them. A node begins fenced: a [`Serving`] cannot be had
//! without telling so, and the coordinator is not spoken to without one. And of the two clocks that of the clients is
//! read first: a process that is stopped between the two looks gives its clients too little time, not too much.

use base::Nanos;
use storage::format::control::CLOCK_LAG_MS;

use crate::core::Event;

/// What a confirmation of the coordinator is worth now.
pub trait Clocks {
    /// The clock by which clients judge their leases.
    fn clients(&mut self) -> Nanos;
    /// How long it is until then, by the clock that confirmations are counted by; 0 if it has passed.
    fn left(&mut self, until: Nanos) -> Nanos;
}

/// See the module.
#[derive(Debug)]
pub struct Serving {
    fenced: bool,
    told: Option<Nanos>,
}

impl Serving {
    /// A node that is about to register. Clients of an earlier run may hold what others have by now.
    pub fn begin(mut tell: impl FnMut(Event)) -> Self {
        tell(Event::Fenced(true));
        Self { fenced: true, told: None }
    }

    /// Tells what has changed. `until`: when the coordinator may go on without this node, if it has not yet.
    /// What it said before its last confirmation, a view without this node above all, was told before this.
    pub fn look(
        &mut self,
        until: Option<Nanos>,
        clocks: &mut impl Clocks,
        mut tell: impl FnMut(Event),
    ) {
        let fenced = until.is_none();
        if fenced != self.fenced {
            self.fenced = fenced;
            tell(Event::Fenced(fenced));
        }
        let Some(until) = until.filter(|until| self.told != Some(*until)) else { return };
        self.told = Some(until);
        let now = clocks.clients();
        let left = clocks.left(until).saturating_sub(CLOCK_LAG_MS * 1_000_000);
        tell(Event::ServesUntil(now + left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    /// One clock for both, and a process that is stopped before the look of that number.
    struct Stopped {
        now: Nanos,
        looks: u32,
        before: u32,
    }

    impl Stopped {
        fn look(&mut self) -> Nanos {
            if self.looks == self.before {
                self.now += 700 * MS;
            }
            self.looks += 1;
            self.now += 1;
            self.now
        }
    }

    impl Clocks for Stopped {
        fn clients(&mut self) -> Nanos {
            self.look()
        }

        fn left(&mut self, until: Nanos) -> Nanos {
            until.saturating_sub(self.look())
        }
    }

    #[test]
    fn a_stop_between_two_looks_at_the_clock_gives_clients_no_time() {
        let until = 1250 * MS;
        for before in 0..3 {
            let mut told = Vec::new();
            let mut serving = Serving::begin(|_| {});
            let mut clocks = Stopped { now: 1000 * MS, looks: 0, before };
            serving.look(Some(until), &mut clocks, |event| told.push(event));
            let Some(Event::ServesUntil(at)) = told.last() else { panic!("{told:?}") };
            assert!(*at < until.max(clocks.now + MS), "stopped before look {before}: until {at}");
            let lag = CLOCK_LAG_MS * MS;
            assert!(before < 2 || (at + lag..at + lag + MS).contains(&until), "not stopped: {at}");
        }
    }

    #[test]
    fn who_is_registered_at_once_has_been_fenced_before() {
        let mut told = Vec::new();
        let mut serving = Serving::begin(|event| told.push(event));
        let mut clocks = Stopped { now: 0, looks: 0, before: 9 };
        // The first thing that it hears is that it counts.
        serving.look(Some(250 * MS), &mut clocks, |event| told.push(event));
        serving.look(Some(250 * MS), &mut clocks, |event| told.push(event));
        serving.look(None, &mut clocks, |event| told.push(event));
        let words: Vec<String> = told.iter().map(|event| format!("{event:?}")).collect();
        assert_eq!(words[..2], ["Fenced(true)", "Fenced(false)"]);
        assert!(words[2].starts_with("ServesUntil("), "{words:?}");
        assert_eq!(words[3..], ["Fenced(true)"]);
    }
}
