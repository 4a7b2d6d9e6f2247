//! Time comes in through a trait, so that the simulator owns it.

/// Nanoseconds; of which clock, the method that returned them says.
pub type Nanos = u64;

/// The two clocks that the core logic may ask.
pub trait Clock {
    /// Monotonic nanoseconds since an arbitrary start; for timeouts and intervals.
    fn monotonic(&self) -> Nanos;
    /// Nanoseconds since 1970-01-01 UTC; for time stamps of files only, never for decisions.
    fn realtime(&self) -> Nanos;
}

/// The operating system's clocks.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

#[cfg(feature = "std")]
impl Default for SystemClock {
    fn default() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

#[cfg(feature = "std")]
impl Clock for SystemClock {
    fn monotonic(&self) -> Nanos {
        Nanos::try_from(self.start.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    fn realtime(&self) -> Nanos {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| Nanos::try_from(d.as_nanos()).unwrap_or(Nanos::MAX))
    }
}
