//! How much a tenant may ask for in a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A rate with a burst: a bucket that fills at `rate` a second up to `burst`, and may be overdrawn by one request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// A second.
    pub rate: f64,
    /// At once, after a pause.
    pub burst: f64,
}

#[derive(Debug)]
struct Bucket {
    rate: Rate,
    level: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        Self { rate, level: rate.burst, at: Instant::now() }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + passed * self.rate.rate).min(self.rate.burst);
        self.at = now;
    }

    fn delay(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        // For ever, where nothing comes.
        let wait = || Duration::try_from_secs_f64(-self.level / self.rate.rate);
        (self.level < 0.0).then(|| wait().unwrap_or(Duration::MAX))
    }
}

/// Limits of operations and of bytes a second. A tenant that is over them waits in its queue, and holds up nobody else.
#[derive(Debug, Default)]
pub struct Limits {
    operations: Option<Mutex<Bucket>>,
    bytes: Option<Mutex<Bucket>>,
}

impl Limits {
    /// With these rates; None: unbounded.
    pub fn new(operations: Option<Rate>, bytes: Option<Rate>) -> Self {
        let bucket = |rate: Rate| Mutex::new(Bucket::new(rate));
        Self { operations: operations.map(bucket), bytes: bytes.map(bucket) }
    }

    fn buckets(&self) -> impl Iterator<Item = &Mutex<Bucket>> {
        [&self.operations, &self.bytes].into_iter().flatten()
    }

    /// Whether there are any.
    pub fn is_bounded(&self) -> bool {
        self.buckets().next().is_some()
    }

    /// How long the next request has to wait, if it has to.
    pub fn delay(&self) -> Option<Duration> {
        let now = Instant::now();
        self.buckets()
            .filter_map(|bucket| bucket.lock().unwrap_or_else(PoisonError::into_inner).delay(now))
            .max()
    }

    /// One request was taken, which carries so many bytes.
    pub fn charge(&self, bytes: u64) {
        for (bucket, cost) in [(&self.operations, 1.0), (&self.bytes, bytes as f64)] {
            if let Some(bucket) = bucket {
                bucket.lock().unwrap_or_else(PoisonError::into_inner).level -= cost;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let limits = Limits::new(Some(Rate { rate: 10.0, burst: 5.0 }), None);
        assert!(limits.is_bounded());
        let mut bucket = limits.operations.as_ref().unwrap().lock().unwrap();
        let begun = bucket.at;
        for _ in 0..6 {
            assert_eq!(bucket.delay(begun), None);
            bucket.level -= 1.0;
        }
        assert_eq!(bucket.delay(begun), Some(Duration::from_millis(100)));
        assert_eq!(bucket.delay(begun + Duration::from_millis(100)), None);
        // Never more than the burst, however long it was.
        bucket.delay(begun + Duration::from_secs(1000));
        assert_eq!(bucket.level, 5.0);
    }

    #[test]
    fn who_may_have_nothing_waits_for_ever() {
        let limits = Limits::new(None, Some(Rate { rate: 0.0, burst: 1.0 }));
        limits.charge(1 << 30);
        assert_eq!(limits.delay(), Some(Duration::MAX));
    }

    #[test]
    fn without_limits_nobody_waits() {
        let limits = Limits::default();
        limits.charge(1 << 40);
        assert!(!limits.is_bounded());
        assert_eq!(limits.delay(), None);
    }
}
