//! Planted bugs: whether the crash states show them.

use std::time::Duration;

use base::planted::{Bug, choose};
use base::random::Random;
use storage::format::superblock::Durability;

use crate::planted::worked;

use super::lab::{Effort, Lab, Violation};
use super::run::{Models, directed, models, possible};
use super::workload::{alphabet, sample};

/// How long to look for a bug.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Workloads at most.
    pub workloads: u64,
    /// Processor time at most.
    pub time: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { workloads: 20_000, time: Duration::from_secs(60) }
    }
}

/// How a bug showed.
#[derive(Clone, Debug)]
pub struct Found {
    /// Crash states until then.
    pub checked: u64,
    /// What was violated.
    pub violation: Box<Violation>,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "after {} crash states: {}", self.checked, self.violation)
    }
}

/// Plants the bug, runs random workloads until a crash state shows it, takes it out again. None:
/// it was not found. With [`Bug::None`] anything found is a real one.
///
/// For a quarter of the time, what lies in the region at the beginning was made by a node without the
/// bug; then by one with it, for bugs that need to have been there for a while.
pub fn catch(bug: Bug, budget: Budget) -> Option<Found> {
    let begin = worked();
    let half = Budget { workloads: budget.workloads / 2, time: budget.time / 4 };
    choose(Bug::None);
    let found = grounds().and_then(|(mut lab, models)| {
        choose(bug);
        hunt(&mut lab, &models, half)
    });
    let found = found.or_else(|| {
        choose(bug);
        let (mut lab, models) = grounds()?;
        let time = (budget.time * 3 / 4).saturating_sub(worked() - begin);
        hunt(&mut lab, &models, Budget { time, ..half })
    });
    let found = found.or_else(|| twice(budget.time.saturating_sub(worked() - begin)));
    choose(Bug::None);
    found
}

/// The directed workloads again, with every recovery crashed at every point: what takes two crashes to show.
fn twice(time: Duration) -> Option<Found> {
    let begin = worked();
    let (mut lab, _) = grounds()?;
    lab.effort = lab.effort.twice();
    for workload in directed() {
        if worked() - begin > time {
            break;
        }
        if let Err(violation) = lab.explore(&workload, Durability::Pmem, None) {
            return Some(Found { checked: lab.tally.checked, violation });
        }
    }
    None
}

/// A laboratory in which every ground is made; None if the bug does not let it.
fn grounds() -> Option<(Lab, Models)> {
    let mut lab = Lab::new(Effort::default(), true);
    let models = models(&mut lab).ok()?;
    Some((lab, models))
}

fn hunt(lab: &mut Lab, models: &Models, budget: Budget) -> Option<Found> {
    let (begin, letters) = (worked(), alphabet());
    let mut ready = directed().into_iter();
    for i in 0..budget.workloads {
        if worked() - begin > budget.time {
            break;
        }
        let mut random = Random::new(0xb06 + i);
        let length = 1 + random.below(6) as usize;
        let drawn =
            sample(&mut random, length, &letters, |ground, acts| possible(models.of(ground), acts));
        let workload = ready.next().unwrap_or(drawn);
        if let Err(violation) = lab.explore(&workload, Durability::Pmem, None) {
            return Some(Found { checked: lab.tally.checked, violation });
        }
    }
    None
}
