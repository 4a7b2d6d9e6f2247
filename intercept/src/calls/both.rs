//! Files of the volume that the kernel has, for the few things that it does not pass on to a mount: COLLAPSE_RANGE,
//! INSERT_RANGE, UNSHARE_RANGE, FICLONE. They are opened here for the one call; what the kernel knows of them
//! it is told to forget by the lease that this takes, as with every other client.

use base::InodeId;
use client::fs::{Handle, S_IFMT, S_IFREG};
use core::sync::atomic::Ordering;

use super::regular;
use crate::path::Stop;
use crate::sys::{self, err, nr, o};
use crate::table::{self, InUse};
use crate::{fsys, session};

const F_GETFL: usize = 3;
/// SYNC_FILE_RANGE_WAIT_BEFORE, WRITE, WAIT_AFTER.
const ALL_WRITTEN: usize = 7;

/// A regular file of the volume, whoever has it.
#[derive(Debug)]
pub struct File {
    /// Its handle for this call.
    pub handle: Handle,
    /// `open` flags.
    pub flags: u32,
    served: Option<InUse>,
}

impl Drop for File {
    fn drop(&mut self) {
        if self.served.is_none() {
            fsys::release(self.handle);
        }
    }
}

impl File {
    /// The file behind a number; `None` when it is none of the volume's, or cannot be opened here.
    pub fn of(fd: usize) -> Result<Option<Self>, Stop> {
        if table::index(table::entry(fd as i32)).is_some() {
            match regular(fd) {
                Ok(file) => {
                    let flags = file.ofd().flags.load(Ordering::Acquire);
                    return Ok(Some(Self { handle: file.handle()?, flags, served: Some(file) }));
                }
                Err(Stop::Kernel) => {}
                Err(stop) => return Err(stop),
            }
        }
        if table::entry(fd as i32) & !table::CLOEXEC == table::INTERNAL {
            return Err(Stop::Error(err::BADF));
        }
        let stat = sys::stat_of(fd as i32)?;
        let flags = sys::call3(nr::FCNTL, fd, F_GETFL, 0);
        if sys::failed(flags) || flags as u32 & o::PATH != 0 {
            return Err(Stop::Error(err::BADF));
        }
        let inside = session::is_the_mounts(&stat);
        if table::in_vfork() || stat.mode & S_IFMT != S_IFREG || !inside {
            return Ok(None);
        }
        // What was written by a mapping is there first. (Not by an fsync: that would be told of operations which were
        // lost, once, and the program's own would not.)
        let written = sys::call4(nr::SYNC_FILE_RANGE, fd, 0, 0, ALL_WRITTEN);
        if sys::failed(written) {
            return Err(Stop::Error(written));
        }
        let flags = flags as u32;
        let handle = fsys::reopen(InodeId(stat.ino), flags).ok();
        Ok(handle.map(|handle| Self { handle, flags, served: None }))
    }
}
