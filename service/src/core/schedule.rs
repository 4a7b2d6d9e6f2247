//! Whose turn it is: in which order the clients of a node are looked at that want something at the same time.
//!
//! Those that somebody waits for go first: who asks, or waits for an fsync. Nobody else waits longer than entries may be held
//! back ([`Limits::hold`](super::limits::Limits)). Among them it is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) of users:
//! each has a time of its own, that goes on by what was taken of its clients' logs, divided by its weight, and whose is the least
//! is first. Who was idle begins where the others are, so nothing is saved up; and to have many processes brings nothing: the clients of
//! a user take turns among themselves. What is taken at a time is little while somebody waits (`share`), so this decides who gets how much.

use std::collections::BTreeMap;

use base::ClientId;
use base::planted::{Bug, planted};

use super::Node;

/// How it is decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Scheduler {
    /// As the module says.
    #[default]
    Urgent,
    /// One after the other, whatever they want and whoever they belong to.
    RoundRobin,
}

/// What a chunk costs besides its bytes, as so many.
const CHUNK: u64 = 512;
/// A byte, for a user of weight 1.
const SCALE: u64 = 1000;
/// The largest weight of a user.
pub const WEIGHT_MAX: u32 = 1000;
/// Users whose times are remembered though others may be past them.
const USERS: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// When the last one began that was served.
    clock: u64,
    users: BTreeMap<u32, u64>,
    /// So many were served.
    served: u64,
    /// Somebody could not be served when it was looked at last.
    pub held: bool,
}

impl Schedule {
    /// The time of a user.
    fn time(&self, uid: u32) -> u64 {
        self.users.get(&uid).copied().unwrap_or(0).max(self.clock)
    }

    /// So many bytes of a client of a user of that weight were taken; which one that was, in the order of all.
    fn charge(&mut self, uid: u32, weight: u32, bytes: u64) -> u64 {
        let start = self.time(uid);
        self.clock = start;
        let cost = (bytes + CHUNK).saturating_mul(SCALE) / u64::from(weight.clamp(1, WEIGHT_MAX));
        self.users.insert(uid, start.saturating_add(cost));
        if self.users.len() > USERS {
            let clock = self.clock;
            self.users.retain(|_, time| *time > clock);
        }
        self.served += 1;
        self.served
    }
}

impl Node {
    /// Bytes of a client's log were taken.
    pub(super) fn charge(&mut self, id: ClientId, bytes: usize) {
        let Some(client) = self.agent.clients.get_mut(&id) else { return };
        let uid = client.identity.uid;
        let weight = self.env.config.weights.get(&uid).copied().unwrap_or(1);
        client.served = self.agent.schedule.charge(uid, weight, bytes as u64);
    }

    /// Clients that are looked at in each round, in the order in which they are now.
    pub(super) fn in_order(&self) -> Vec<ClientId> {
        let active = self.agent.active.iter().copied();
        if self.agent.active.len() < 2 || planted(Bug::LowestFirst) {
            return active.collect();
        }
        let by_turns = self.env.config.scheduler == Scheduler::RoundRobin;
        let place = |id: ClientId| {
            let Some(client) = self.agent.clients.get(&id) else { return (false, 0, 0, id) };
            if by_turns {
                return (false, 0, client.served, id);
            }
            let time = self.agent.schedule.time(client.identity.uid);
            (!client.is_waited_for(self.env.now), time, client.served, id)
        };
        let mut order: Vec<_> = active.map(place).collect();
        order.sort_unstable();
        order.into_iter().map(|(.., id)| id).collect()
    }

    /// Whether others are before a client that has rung: it is looked at with them.
    pub(super) fn is_behind_others(&self, id: ClientId) -> bool {
        self.agent.schedule.held && self.is_shared(id) && !planted(Bug::LowestFirst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves whoever is first, of users that always want something; what each got.
    fn serve(weights: &[u32], sizes: &[u64], rounds: u32) -> Vec<u64> {
        let mut schedule = Schedule::default();
        let mut got = vec![0; weights.len()];
        for _ in 0..rounds {
            let first = (0..weights.len()).min_by_key(|u| schedule.time(*u as u32)).unwrap_or(0);
            schedule.charge(first as u32, weights[first], sizes[first]);
            got[first] += sizes[first] + CHUNK;
        }
        got
    }

    #[test]
    fn who_has_more_weight_gets_more_however_it_asks() {
        for (weights, sizes) in [
            (&[1, 1, 1][..], &[1000, 1000, 1000][..]),
            (&[1, 2, 4], &[100_000, 100_000, 100_000]),
            (&[1, 1], &[200_000, 100]),
            (&[3, 1], &[64, 64_000]),
        ] {
            let got = serve(weights, sizes, 100_000);
            let share = |u: usize| got[u] as f64 / f64::from(weights[u]);
            for u in 1..weights.len() {
                let ratio = share(u) / share(0);
                assert!((0.95..1.05).contains(&ratio), "{weights:?} {sizes:?}: {got:?}");
            }
        }
    }

    #[test]
    fn who_was_idle_saves_nothing_up_and_is_not_behind() {
        let mut schedule = Schedule::default();
        for _ in 0..1000 {
            schedule.charge(1, 1, 100_000);
        }
        assert!(schedule.time(2) <= schedule.time(1), "it is first when it comes");
        schedule.charge(2, 1, 100_000);
        schedule.charge(2, 1, 100_000);
        assert!(schedule.time(1) < schedule.time(2), "and has used that up then");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut schedule = Schedule::default();
        for round in 0..10_000 {
            // Whoever is first, as they are served; and those who never come again.
            let first = (0..USERS as u32).min_by_key(|uid| schedule.time(*uid)).unwrap_or(0);
            schedule.charge(first, 1, 1000);
            schedule.charge(1000 + round, WEIGHT_MAX, 0);
            assert!(schedule.users.len() <= 2 * USERS, "{}", schedule.users.len());
        }
    }
}
