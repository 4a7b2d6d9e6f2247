//! SIGINT and SIGTERM as a question that every wait loop asks, so that what was started is cleaned
//! up by the ordinary path of an error.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::failure::{Failure, Kind, Result};

static PENDING: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    PENDING.store(signal, Ordering::Relaxed);
    wake();
}

/// What [`bell`] gave; -1: nobody has asked for it.
static BELL: AtomicI32 = AtomicI32::new(-1);

/// Readable when a signal has been noted, or [`wake`] was called; for loops that sleep until something happens.
///
/// # Errors
/// What the kernel said: there are no descriptors left.
pub fn bell() -> std::io::Result<std::os::fd::BorrowedFd<'static>> {
    use rustix::event::EventfdFlags;
    use std::os::fd::{AsRawFd as _, OwnedFd};
    static OPEN: std::sync::OnceLock<OwnedFd> = std::sync::OnceLock::new();
    if OPEN.get().is_none() {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        BELL.store(OPEN.get_or_init(|| fd).as_raw_fd(), Ordering::Relaxed);
    }
    OPEN.get().map(std::os::fd::AsFd::as_fd).ok_or_else(|| std::io::Error::other("no bell"))
}

/// Rings the bell. Async-signal-safe.
pub fn wake() {
    let (fd, one) = (BELL.load(Ordering::Relaxed), 1u64);
    if fd >= 0 {
        // SAFETY: the eight bytes are there; a descriptor that was stored is never closed. (Full is rung.) What was interrupted finds
        // its thread's errno as it was.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(fd, (&raw const one).cast(), 8);
            *libc::__errno_location() = errno;
        }
    }
}

/// From now on SIGINT and SIGTERM are noted instead of ending the process.
pub fn catch() {
    // SAFETY: the handler only stores to an atomic, which is async-signal-safe; the structure is fully initialised; SA_RESTART is left out so that
    // sleeping calls return early.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut());
        libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut());
    }
}

static AGAIN: AtomicBool = AtomicBool::new(false);

extern "C" fn note_again(_: libc::c_int) {
    AGAIN.store(true, Ordering::Relaxed);
    wake();
}

/// From now on SIGHUP is noted, for services: what they read at the start is to be read again.
pub fn catch_again() {
    // SAFETY: as above.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note_again as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGHUP, &action, std::ptr::null_mut());
    }
}

/// Whether SIGHUP came since the last call.
pub fn take_again() -> bool {
    AGAIN.swap(false, Ordering::Relaxed)
}

/// The signal that came, if one did.
pub fn pending() -> Option<i32> {
    Some(PENDING.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

/// Fails when a signal came.
pub fn check() -> Result<()> {
    match pending() {
        None => Ok(()),
        Some(signal) => {
            let mut failure =
                Failure::new(Kind::Interrupted, format!("ended by signal {signal}"), "");
            failure.exit = Some(u8::try_from(128 + signal).unwrap_or(130));
            Err(failure)
        }
    }
}
