//! In which order a store is asked: clients first, what nobody waits for behind them, but not for ever, and never by more than half of those
//! that ask.

use std::collections::VecDeque;

use base::Nanos;
use base::planted::{Bug, planted};

/// How many ask a store at the same time.
pub const AT_A_TIME: usize = 4;
/// What waits for its turn: more is refused.
const QUEUE_MAX: usize = 64;
/// Of these, so many may be at what nobody waits for,
const BEHIND: usize = AT_A_TIME / 2;
/// and one is, when none was for so long, although clients have something to ask.
const BEHIND_MAX: Nanos = 50_000_000;

/// What waits for a store.
#[derive(Clone, Debug)]
pub struct Turns<T> {
    front: VecDeque<T>,
    behind: VecDeque<(Nanos, T)>,
    /// What is under way of the latter.
    at_it: usize,
    /// When that was begun last.
    last: Nanos,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { front: VecDeque::new(), behind: VecDeque::new(), at_it: 0, last: 0 }
    }
}

impl<T> Turns<T> {
    /// One more, unless there are too many: then it is given back.
    pub fn push(&mut self, now: Nanos, what: T, behind: bool) -> Result<(), T> {
        let behind = behind && !planted(Bug::RepairInTurn);
        let waiting = if behind { self.behind.len() } else { self.front.len() };
        if waiting >= QUEUE_MAX {
            return Err(what);
        }
        if behind {
            self.behind.push_back((now, what));
        } else {
            self.front.push_back(what);
        }
        Ok(())
    }

    /// Whose turn it is, and whether nobody waits for it: then [`ended`](Self::ended) is told when it is over.
    pub fn take(&mut self, now: Nanos) -> Option<(T, bool)> {
        let overdue = |since: &Nanos| {
            self.at_it == 0 && now.saturating_sub(self.last.max(*since)) >= BEHIND_MAX
        };
        if self.at_it < BEHIND
            && let Some((since, _)) = self.behind.front()
            && (self.front.is_empty() || overdue(since))
            && let Some((_, what)) = self.behind.pop_front()
        {
            self.at_it += 1;
            self.last = now;
            return Some((what, true));
        }
        self.front.pop_front().map(|what| (what, false))
    }

    /// What nobody waits for is over.
    pub fn ended(&mut self) {
        self.at_it -= 1;
    }

    /// How many clients wait.
    pub fn clients(&self) -> usize {
        self.front.len()
    }

    /// All that waits, in no order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        let behind = self.behind.drain(..).map(|(_, what)| what);
        self.front.drain(..).chain(behind)
    }
}

#[cfg(test)]
mod tests {
    use base::random::Random;

    use super::*;

    /// As many servers as there are, each thing takes a while, clients always have something to ask: they are served as without a repair but
    /// for one of the servers, and the repair is served as well.
    #[test]
    fn clients_are_first_and_a_repair_gets_on() {
        for seed in 1..50 {
            let mut random = Random::new(seed);
            let mut turns: Turns<bool> = Turns::default();
            let mut busy: Vec<(Nanos, bool)> = Vec::new();
            let (mut now, mut clients, mut repairs) = (0, 0u64, 0u64);
            while now < 10_000_000_000 {
                while turns.front.len() < 8 {
                    turns.push(now, false, false).unwrap();
                }
                while turns.behind.len() < 8 {
                    turns.push(now, true, true).unwrap();
                }
                while busy.len() < AT_A_TIME {
                    let (what, behind) = turns.take(now).unwrap();
                    assert_eq!(what, behind);
                    busy.push((now + 1_000_000 + random.below(1_000_000), behind));
                }
                let (at, (end, behind)) =
                    busy.iter().copied().enumerate().min_by_key(|(_, (end, _))| *end).unwrap();
                now = end;
                busy.swap_remove(at);
                if behind {
                    turns.ended();
                }
                *(if behind { &mut repairs } else { &mut clients }) += 1;
            }
            assert!(repairs >= 150, "seed {seed}: a repair is asked {repairs} times in 10 s");
            assert!(repairs * 50 < clients, "seed {seed}: {repairs} beside {clients} of clients");
            // Alone it has half of them.
            turns.front.clear();
            while turns.behind.len() < 8 {
                turns.push(now, true, true).unwrap();
            }
            turns.at_it = 0;
            assert!((0..BEHIND).all(|_| turns.take(now).is_some_and(|(_, behind)| behind)));
            assert!(turns.take(now).is_none());
        }
    }

    #[test]
    fn too_much_is_refused() {
        let mut turns = Turns::default();
        for behind in [false, true] {
            assert!((0..QUEUE_MAX).all(|i| turns.push(0, i, behind).is_ok()));
            assert_eq!(turns.push(0, 7, behind), Err(7));
        }
        assert_eq!(turns.clients(), QUEUE_MAX);
        assert_eq!(turns.drain().count(), 2 * QUEUE_MAX);
    }
}
