//! Planted bugs (`base::planted`). The tests of this crate choose theirs for their own thread, since they run beside
//! others, and the feature that builds them in for the simulator is off there.

pub use base::planted::Bug;
#[cfg(not(test))]
pub use base::planted::planted;

#[cfg(test)]
thread_local! {
    static CHOSEN: std::cell::Cell<Bug> = const { std::cell::Cell::new(Bug::None) };
}

/// Whether `bug` is planted.
#[cfg(test)]
pub fn planted(bug: Bug) -> bool {
    CHOSEN.get() == bug
}

/// Plants `bug` for this thread.
#[cfg(test)]
pub fn choose(bug: Bug) {
    CHOSEN.set(bug);
}
