//! `corbel send` and `corbel receive`: a snapshot, or what it has otherwise than an earlier one, as a stream, and back.

mod place;
pub mod receive;
pub mod send;
mod take;

use base::Errno;

use crate::failure::{Failure, Kind, Result};

/// Bytes in 1 MiB.
const MIB: u64 = 1 << 20;

fn failed(what: impl std::fmt::Display, error: Errno) -> Failure {
    let remedy = match error {
        Errno::BUSY => {
            "who may come to what has moved is being noted: go on in a moment, or with --no-snapshot"
        }
        Errno::MLINK => "delete some: a volume has no more of them; or go on with --no-snapshot",
        Errno::NOENT | Errno::STALE => {
            "it is not there any more, or was deleted meanwhile: corbel snapshot list"
        }
        Errno::PERM | Errno::ACCES => "run it as the super-user",
        Errno::NOSPC => "make room, and go on: corbel receive --status says how",
        Errno::DQUOT => {
            "raise the quota (corbel quota set), and go on: corbel receive --status says how"
        }
        Errno::OPNOTSUPP => crate::snapshot::UNSUPPORTED,
        Errno::INVAL => "the node may be of an older version: update it",
        _ => "corbel status shows how the node is",
    };
    Failure::failed(format!("{what}: {error}"), remedy)
}

fn interrupted() -> Failure {
    let remedy = "corbel receive --status TARGET, where it was received, says how to go on";
    Failure::new(Kind::Interrupted, "interrupted", remedy)
}

fn stop() -> Result<()> {
    crate::signals::check().map_err(|_| interrupted())
}
