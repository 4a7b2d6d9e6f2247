//! Planted bugs: deliberately broken variants of the production code, for proving that the tests which look for
//! such bugs can find them.
//!
//! A place that a variant breaks asks `planted(Bug::X)`. Without the feature `planted` (every shipped build) that
//! is the constant `false` and the broken branch is not compiled; with it, one bug at a time can be chosen by
//! [`choose`]. Nothing but the crates that hunt for the bugs may turn the feature on, and only by a feature of
//! their own, since cargo unites the features of a workspace.

/// A deliberately broken variant. Each says what goes wrong, so that the list is the list of what the tests prove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// None: the code as it is shipped.
    None = 0,
}

impl Bug {
    /// Every bug that can be planted, with the name that selects it and what it breaks.
    pub const ALL: &'static [(Bug, &'static str, &'static str)] = &[];

    /// The bug called `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Bug> {
        Self::ALL.iter().find(|bug| bug.1 == name).map(|bug| bug.0)
    }
}

#[cfg(feature = "planted")]
static CHOSEN: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);

/// Plants `bug`, and takes out the one before it. For the whole process: run the variants one after the other.
#[cfg(feature = "planted")]
pub fn choose(bug: Bug) {
    CHOSEN.store(bug as u8, core::sync::atomic::Ordering::SeqCst);
}

/// Whether `bug` is planted.
#[cfg(feature = "planted")]
#[inline]
#[must_use]
pub fn planted(bug: Bug) -> bool {
    CHOSEN.load(core::sync::atomic::Ordering::Relaxed) == bug as u8
}

/// Whether `bug` is planted: in a build that is shipped, never.
#[cfg(not(feature = "planted"))]
#[inline(always)]
#[must_use]
pub const fn planted(_bug: Bug) -> bool {
    false
}
