//! How long the device takes: the mean of its last answers.

use base::Nanos;

/// Answers that count.
const WINDOW: usize = 64;

/// A rolling mean.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    last: std::collections::VecDeque<Nanos>,
    sum: Nanos,
}

impl Latency {
    /// One more answer.
    pub fn add(&mut self, took: Nanos) {
        // An answer that took minutes says that something hung, nothing of the next one.
        let took = took.min(10_000_000_000);
        self.last.push_back(took);
        self.sum += took;
        if self.last.len() > WINDOW
            && let Some(old) = self.last.pop_front()
        {
            self.sum -= old;
        }
    }

    /// The mean; 0 before the first answer.
    pub fn mean(&self) -> Nanos {
        self.sum / (self.last.len().max(1) as Nanos)
    }
}
