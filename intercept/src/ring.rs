//! Rings of io_uring. What is asked for in a ring is not seen here, so whoever has one goes on with the mount: all
//! its descriptors become the kernel's, and what it opens from then on is the kernel's from the start.
//!
//! A ring is noticed when it is made. One that came another way (over exec, through a socket) is noticed when it is
//! entered, before it can be asked for anything; the thread of a ring that polls works with the files of who made it.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::calls::{self, Reply};
use crate::path::Stop;
use crate::sys::{self, err, nr};
use crate::{demote, session};

/// This process has a ring, or something like it. A child of fork has it too; a new program begins anew.
static RING: AtomicBool = AtomicBool::new(false);

/// Whether files that are opened must be the kernel's.
pub fn has() -> bool {
    RING.load(Ordering::Acquire)
}

/// Without a mount nothing of ours could be used in a ring. Programs answer this by falling back.
fn may() -> Result<(), isize> {
    let may = session::header().no_ring == 0 && demote::is_mounted();
    if may { Ok(()) } else { Err(err::NOSYS) }
}

fn take() -> Result<(), isize> {
    // Files that are being opened right now see this when they have their number.
    RING.store(true, Ordering::SeqCst);
    demote::all()?;
    // Nothing more is to be seen.
    calls::overlook(nr::IO_URING_ENTER);
    calls::overlook(nr::IO_URING_REGISTER);
    Ok(())
}

/// Makes a ring, as asked, and every descriptor of this process the kernel's before it can be used there.
pub fn setup(entries: usize, params: usize) -> Reply {
    may()?;
    let fd = sys::call2(nr::IO_URING_SETUP, entries, params);
    if sys::failed(fd) {
        return Ok(fd);
    }
    if let Err(e) = take() {
        sys::call1(nr::CLOSE, fd as usize);
        return Err(Stop::Error(e));
    }
    Ok(fd)
}

/// `io_uring_enter` and `io_uring_register`.
pub fn enter() -> Reply {
    if !has() {
        may()?;
        take()?;
    }
    Err(Stop::Kernel)
}

/// There is code that may make a ring without our seeing it, or the descriptors are about to be used in another way
/// that is not seen here: as if it had one.
pub fn foresee() {
    if !has() && demote::is_mounted() {
        RING.store(true, Ordering::SeqCst);
        let _ = demote::all();
    }
}
