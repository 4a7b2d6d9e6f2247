//! Acting as the caller: the calling thread's effective user, group and supplementary groups are
//! the caller's while the guard lives, so the backing file system does every permission check and
//! owns new files rightly. The raw system calls change one thread only, unlike libc's wrappers.

use alloc::vec::Vec;

use base::Errno;
use rustix::fs::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::fs::{Caller, Result};

/// A changed identity; dropping it makes the thread root again.
#[derive(Debug)]
pub(super) struct Identity {
    user: bool,
    group: bool,
}

impl Identity {
    /// Takes on `caller`'s identity. The thread must be root's.
    pub(super) fn take(caller: &Caller<'_>) -> Result<Self> {
        let mut identity = Self { user: false, group: false };
        if caller.uid == u32::MAX || caller.gid == u32::MAX {
            return Err(Errno::INVAL); // -1 means "leave it" to the kernel: would stay root
        }
        if caller.uid != 0 {
            let groups: Vec<Gid> = caller
                .groups
                .iter()
                .filter(|&&g| g != u32::MAX)
                .map(|&g| Gid::from_raw(g))
                .collect();
            set_thread_groups(&groups).map_err(|_| Errno::PERM)?;
        }
        if caller.gid != 0 {
            set_thread_res_gid(None, Gid::from_raw(caller.gid), None).map_err(|_| Errno::PERM)?;
            identity.group = true;
        }
        if caller.uid != 0 {
            set_thread_res_uid(None, Uid::from_raw(caller.uid), None).map_err(|_| Errno::PERM)?;
            identity.user = true;
        }
        Ok(identity)
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        // The real and saved ids stayed 0, so this cannot be refused; were it, going on as a
        // stranger would corrupt ownership: better stop.
        if self.user {
            let back = set_thread_res_uid(None, Uid::ROOT, None);
            assert!(back.is_ok(), "cannot become root again");
        }
        if self.group {
            let back = set_thread_res_gid(None, Gid::ROOT, None);
            assert!(back.is_ok(), "cannot become group root again");
        }
        // Supplementary groups are left: as root they grant nothing, and each take() sets its own.
    }
}
