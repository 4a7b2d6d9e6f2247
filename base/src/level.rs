//! What a program understands, as one number that grows.
//!
//! The nodes of a volume are updated one after the other. Meanwhile none of them may do what another cannot follow: a kind
//! of entry in the stream, a page in the tree, a message. Each tells the coordinator its level; the volume has the lowest of them,
//! and what is above it is refused until the last node has been updated. A level never falls: the new formats may be in use.

use core::fmt;

/// See the module. 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Level(pub u16);

impl Level {
    /// All that programs understood before there were levels.
    pub const FIRST: Self = Self(1);
    /// Snapshots of directories, and clones of what they have. (Programs just before this one know them as well, and
    /// do not tell.)
    pub const SNAPSHOTS: Self = Self(2);
    /// That of this program.
    pub const NEWEST: Self = Self::SNAPSHOTS;
}

impl Default for Level {
    fn default() -> Self {
        Self::FIRST
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
