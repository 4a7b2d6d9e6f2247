//! Whether a thread looks for the next request before it sleeps.
//!
//! Looking saves a wake-up, and takes a processor. Which is faster depends on where the guest's processor runs: beside ours, a wake-up
//! costs tens of microseconds; on the same one it is a switch, and whoever looks keeps the guest from running. No rule knows that beforehand,
//! so both are tried in turns of [`ROUND`] requests, and what took less time for a request is done until the next trial.

use std::time::{Duration, Instant};

/// Requests of a turn.
const ROUND: u32 = 64;
/// Turns between two trials, at first and when the outcome stays the same.
const APART: (u32, u32) = (8, 64);
/// A trial ends after so many requests if each took so much longer than by the other way.
const HOPELESS: (u32, f64) = (8, 1.5);
/// Looking must save so much: a processor is something.
const WORTH: f64 = 0.92;
/// Who waited longer was idle: the turn says nothing.
const IDLE: Duration = Duration::from_micros(500);

/// The two ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Sleep,
    Look,
}

/// How a queue's thread waits.
#[derive(Debug)]
pub struct Pace {
    limit: Duration,
    way: Way,
    /// Nanoseconds for a request, by each way.
    cost: [Option<f64>; 2],
    /// Of this turn.
    begun: Option<Instant>,
    served: u32,
    /// Turns until the other way is tried, and between two trials.
    left: u32,
    apart: u32,
    trial: bool,
    /// The last wait was short.
    close: bool,
}

impl Pace {
    /// Looks for `limit` at most; zero: never.
    pub fn new(limit: Duration) -> Self {
        Self {
            limit,
            way: Way::Sleep,
            cost: [None; 2],
            begun: None,
            served: 0,
            left: 1,
            apart: APART.0,
            trial: false,
            close: false,
        }
    }

    /// For how long to look now.
    pub fn look(&self) -> Duration {
        // Where nothing has come for a while, nothing comes at once.
        if self.way == Way::Look && self.close { self.limit } else { Duration::ZERO }
    }

    /// A wait has ended that began at `since`.
    pub fn waited(&mut self, since: Instant, now: Instant) {
        let took = now.saturating_duration_since(since);
        self.close = took <= self.limit * 4;
        if took > IDLE {
            (self.begun, self.served) = (Some(now), 0);
        }
    }

    /// A request was served; `now` is asked for at the end of a turn, and in a trial.
    pub fn served(&mut self, now: impl FnOnce() -> Instant) {
        if self.limit.is_zero() {
            return;
        }
        self.served += 1;
        let ends = self.served >= ROUND;
        if !(ends || self.trial && self.served >= HOPELESS.0) {
            return;
        }
        let now = now();
        if let Some(begun) = self.begun {
            let took = now.saturating_duration_since(begun).as_nanos() as f64;
            let each = took / f64::from(self.served);
            let other = if self.way == Way::Sleep { Way::Look } else { Way::Sleep };
            let bar = self.cost[other as usize].map_or(f64::INFINITY, |cost| cost * HOPELESS.1);
            if !ends && each < bar {
                return;
            }
            self.end_turn(each);
        }
        (self.begun, self.served) = (Some(now), 0);
    }

    fn end_turn(&mut self, each: f64) {
        let cost = &mut self.cost[self.way as usize];
        // One turn may have met somebody else on the processor. What is known of the other way is old: a trial is believed.
        *cost = Some(match *cost {
            Some(old) if !self.trial => old + (each.min(4.0 * old) - old) / 4.0,
            _ => each,
        });
        self.left = self.left.saturating_sub(1);
        if self.left > 0 && !self.trial {
            return;
        }
        let other = if self.way == Way::Sleep { Way::Look } else { Way::Sleep };
        if !self.trial {
            (self.way, self.trial) = (other, true);
            return;
        }
        // `other` is what was done before the trial.
        let [Some(sleep), Some(look)] = self.cost else { return };
        let best = if look < sleep * WORTH { Way::Look } else { Way::Sleep };
        self.apart = if best == other { (self.apart * 2).min(APART.1) } else { APART.0 };
        (self.way, self.trial, self.left) = (best, false, self.apart);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest whose requests take so long by each way; the share of them for which the thread looked.
    fn play(pace: &mut Pace, sleep: u64, look: u64, count: u32) -> f64 {
        let mut now = pace.begun.unwrap_or_else(Instant::now);
        let mut looked = 0;
        for _ in 0..count {
            let looks = !pace.look().is_zero();
            looked += u32::from(looks);
            let since = now;
            now += Duration::from_nanos(if looks { look } else { sleep });
            pace.waited(since, now);
            pace.served(|| now);
        }
        f64::from(looked) / f64::from(count)
    }

    #[test]
    fn what_is_faster_is_done() {
        let mut pace = Pace::new(Duration::from_micros(20));
        assert!(play(&mut pace, 30_000, 15_000, 20_000) > 0.8);
        // The guest moves to our processor.
        play(&mut pace, 10_000, 40_000, 20_000);
        assert!(play(&mut pace, 10_000, 40_000, 20_000) < 0.1);
        assert!(play(&mut pace, 30_000, 15_000, 40_000) > 0.7);
    }

    #[test]
    fn who_gains_nothing_sleeps() {
        let mut pace = Pace::new(Duration::from_micros(20));
        play(&mut pace, 20_000, 19_500, 10_000);
        assert!(play(&mut pace, 20_000, 19_500, 10_000) < 0.1);
    }

    /// On a machine with more to do than processors whoever looks uses up its time, and is made to wait.
    #[test]
    fn a_hopeless_trial_is_short() {
        let mut pace = Pace::new(Duration::from_micros(20));
        let looked = play(&mut pace, 20_000, 60_000, 100_000);
        assert!(looked < 0.01, "{looked}");
    }

    #[test]
    fn idle_is_idle() {
        let mut pace = Pace::new(Duration::from_micros(20));
        assert!(play(&mut pace, 30_000, 15_000, 20_000) > 0.8);
        // One request in a millisecond: after the first, nobody looks.
        assert!(play(&mut pace, 1_000_000, 1_000_000, 1000) < 0.01);
        let mut never = Pace::new(Duration::ZERO);
        assert!(play(&mut never, 30_000, 1, 10_000) < f64::EPSILON);
    }
}
