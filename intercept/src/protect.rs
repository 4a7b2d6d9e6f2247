//! What the kernel forbids in directories that everybody may write to, whatever the file system:
//! `/proc/sys/fs/protected_symlinks`, `protected_regular` (proc_sys_fs(5)). (What `protected_hardlinks` says, Corbel says itself.)

use base::InodeId;
use client::fs::Attr;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::calls::limit;
use crate::fsys::{caller, fs};
use crate::path::Stop;
use crate::sys::{self, err, nr, o};

const STICKY: u32 = 0o1000;
const FOR_ALL: u32 = 0o002;
const FOR_GROUP: u32 = 0o020;

/// A setting, asked for once.
struct Setting {
    path: &'static [u8],
    value: AtomicI32,
}

impl Setting {
    const fn new(path: &'static [u8]) -> Self {
        Self { path, value: AtomicI32::new(-1) }
    }

    fn get(&self) -> i32 {
        let known = self.value.load(Ordering::Relaxed);
        if known >= 0 {
            return known;
        }
        let at = self.path.as_ptr() as usize;
        let fd = limit::with_room(|| sys::call3(nr::OPEN, at, o::CLOEXEC as usize, 0));
        let mut digit = [b'0'];
        if !sys::failed(fd) {
            sys::call3(nr::READ, fd as usize, digit.as_mut_ptr() as usize, 1);
            sys::call1(nr::CLOSE, fd as usize);
        }
        let value = i32::from(digit[0].saturating_sub(b'0').min(9));
        self.value.store(value, Ordering::Relaxed);
        value
    }
}

static SYMLINKS: Setting = Setting::new(b"/proc/sys/fs/protected_symlinks\0");
static REGULAR: Setting = Setting::new(b"/proc/sys/fs/protected_regular\0");

/// Before a symbolic link in `dir` is followed: where everybody may put one, only one's own, and the
/// directory's owner's.
pub fn follow(dir: InodeId, link: &Attr) -> Result<(), Stop> {
    let who = caller();
    if who.uid == link.uid || SYMLINKS.get() == 0 {
        return Ok(());
    }
    let dir = fs()?.getattr(&who, dir)?;
    let open = dir.mode & (STICKY | FOR_ALL) == STICKY | FOR_ALL;
    if open && dir.uid != link.uid { Err(Stop::Error(err::ACCES)) } else { Ok(()) }
}

/// Before a file that is there is opened with O_CREAT: where everybody may put one, the same.
pub fn create(dir: InodeId, file: &Attr) -> Result<(), Stop> {
    let who = caller();
    if who.uid == file.uid || REGULAR.get() == 0 {
        return Ok(());
    }
    let dir = fs()?.getattr(&who, dir)?;
    let wide = dir.mode & FOR_ALL != 0 || REGULAR.get() > 1 && dir.mode & FOR_GROUP != 0;
    let open = dir.mode & STICKY != 0 && wide;
    if open && dir.uid != file.uid { Err(Stop::Error(err::ACCES)) } else { Ok(()) }
}
