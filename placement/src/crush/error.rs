//! What can be wrong with a map, its text, or a mapping.

use std::fmt;

/// Why a map was refused or a mapping not made. The message says what, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The binary form is damaged or is not a CRUSH map.
    Malformed {
        /// Byte offset at which reading stopped.
        offset: usize,
        /// What was wrong there.
        what: String,
    },
    /// The text form is wrong.
    Text {
        /// Line, from 1.
        line: usize,
        /// What was wrong there.
        what: String,
    },
    /// The map can be read, but makes no sense.
    Map(String),
    /// The request does not fit the map: unknown rule, engine not available.
    Request(String),
    /// One mapping needed more draws than any sensible map does.
    Budget {
        /// The input that was being mapped.
        x: u32,
    },
}

/// Result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { offset, what } => {
                write!(f, "not a readable CRUSH map, byte {offset}: {what}")
            }
            Self::Text { line, what } => write!(f, "line {line}: {what}"),
            Self::Map(what) => write!(f, "CRUSH map: {what}"),
            Self::Request(what) => f.write_str(what),
            Self::Budget { x } => write!(
                f,
                "mapping input {x} took too many draws; lower the tunables or give devices weight"
            ),
        }
    }
}

impl std::error::Error for Error {}
