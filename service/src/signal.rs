//! SIGTERM and SIGINT as a descriptor, for loops that wait in epoll.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Readable once the process shall end.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the two signals for this thread (and those it starts) and makes the descriptor.
    pub fn catch() -> std::io::Result<Self> {
        // SAFETY: the set is initialised by sigemptyset before it is used; the calls take valid
        // pointers to it and keep none.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
