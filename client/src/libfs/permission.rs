//! [`storage::permission`] for a [`Caller`].

use storage::format::rpc::InodeRecord;
pub use storage::permission::{R, W, X};

use crate::fs::{Caller, Result};

fn creds<'a>(caller: &Caller<'a>) -> storage::permission::Creds<'a> {
    storage::permission::Creds { uid: caller.uid, gid: caller.gid, groups: caller.groups }
}

/// Whether `caller` may do `what` with the inode.
pub fn may(caller: &Caller<'_>, r: &InodeRecord, what: u32) -> Result<()> {
    creds(caller).may(r, what)
}

/// Whether the caller owns the inode (or is the super-user).
pub fn owns(caller: &Caller<'_>, r: &InodeRecord) -> bool {
    creds(caller).owns(r)
}

/// Whether the caller may give the inode one more name.
pub fn may_link(caller: &Caller<'_>, r: &InodeRecord) -> Result<()> {
    creds(caller).may_link(r)
}

/// Whether the caller may take `victim` out of `dir`.
pub fn may_remove(caller: &Caller<'_>, dir: &InodeRecord, victim: &InodeRecord) -> Result<()> {
    creds(caller).may_remove(dir, victim)
}
