//! Permission rules of a local file system. The client checks them for the right error number;
//! the service checks them again, because it does not trust the client.

use base::Errno;
use storage::format::rpc::InodeRecord;

use crate::fs::{Caller, Result};

/// Read permission.
pub const R: u32 = 4;
/// Write permission.
pub const W: u32 = 2;
/// Execute or search permission.
pub const X: u32 = 1;

/// Whether `caller` may do `what` (a set of [`R`], [`W`], [`X`]) with the inode.
pub fn may(caller: &Caller<'_>, r: &InodeRecord, what: u32) -> Result<()> {
    if caller.uid == 0 {
        let dir = r.mode & crate::fs::S_IFMT == crate::fs::S_IFDIR;
        if what & X != 0 && !dir && r.mode & 0o111 == 0 {
            return Err(Errno::ACCES);
        }
        return Ok(());
    }
    let shift = if caller.uid == r.uid {
        6
    } else if caller.in_group(r.gid) {
        3
    } else {
        0
    };
    if (r.mode >> shift) & what == what { Ok(()) } else { Err(Errno::ACCES) }
}

/// Whether the caller owns the inode (or is the super-user).
pub fn owns(caller: &Caller<'_>, r: &InodeRecord) -> bool {
    caller.uid == 0 || caller.uid == r.uid
}

/// Sticky rule: in a sticky directory only the owner of the entry or of the directory removes it.
pub fn may_remove(caller: &Caller<'_>, dir: &InodeRecord, victim: &InodeRecord) -> Result<()> {
    may(caller, dir, W | X)?;
    if dir.mode & 0o1000 != 0 && !owns(caller, dir) && caller.uid != victim.uid {
        return Err(Errno::PERM);
    }
    Ok(())
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn the_first_matching_class_decides() {
        let r = InodeRecord { mode: 0o100_074, uid: 7, gid: 8, ..InodeRecord::default() };
        let caller = |uid, gid| Caller { uid, gid, groups: &[9], pid: 0 };
        assert_eq!(may(&caller(7, 8), &r, R), Err(Errno::ACCES), "owner bits, not group bits");
        assert_eq!(may(&caller(6, 8), &r, R | W | X), Ok(()));
        assert_eq!(may(&caller(6, 6), &r, R), Ok(()));
        assert_eq!(may(&caller(6, 6), &r, W), Err(Errno::ACCES));
        assert_eq!(may(&caller(0, 0), &r, R | W), Ok(()));
        let by_group = InodeRecord { gid: 9, mode: 0o100_020, ..r };
        assert_eq!(may(&caller(6, 6), &by_group, W), Ok(()), "supplementary groups count");
    }

    #[test]
    fn sticky_directories_protect_entries() {
        let dir = InodeRecord { mode: 0o041_777, uid: 0, ..InodeRecord::default() };
        let victim = InodeRecord { uid: 5, ..InodeRecord::default() };
        let caller = |uid| Caller { uid, gid: 1, groups: &[], pid: 0 };
        assert_eq!(may_remove(&caller(5), &dir, &victim), Ok(()));
        assert_eq!(may_remove(&caller(6), &dir, &victim), Err(Errno::PERM));
        assert_eq!(may_remove(&caller(0), &dir, &victim), Ok(()));
    }
}
