//! SIGTERM, SIGINT and SIGHUP as a descriptor, for loops that wait in epoll.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Holds SIGTERM, SIGINT and SIGHUP back from this thread and from those that it starts from now on. To be called
/// before any other thread is started: one that does not hold them back ends the process, and nothing is in
/// order then.
pub fn hold() -> std::io::Result<()> {
    held().map(drop)
}

fn held() -> std::io::Result<libc::sigset_t> {
    // SAFETY: the set is initialised by sigemptyset before it is used; the calls take valid
    // pointers to it and keep none.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::sigaddset(&raw mut set, libc::SIGHUP);
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => Ok(set),
            error => Err(std::io::Error::from_raw_os_error(error)),
        }
    }
}

/// What was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Asked {
    /// To end.
    pub end: bool,
    /// To read files again that may have changed.
    pub again: bool,
}

/// Readable once the process shall do something.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Holds the signals back (see [`hold`]) and makes the descriptor.
    pub fn catch() -> std::io::Result<Self> {
        let set = held()?;
        // SAFETY: the call takes a valid pointer to the set and keeps none; the descriptor is new.
        unsafe {
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Takes the signals that came: the descriptor is readable again when another one comes.
    pub fn take(&self) -> Asked {
        let mut info = [0u8; std::mem::size_of::<libc::signalfd_siginfo>()];
        let mut asked = Asked::default();
        while rustix::io::read(&self.0, &mut info).is_ok_and(|n| n > 0) {
            // The number of the signal comes first, in four bytes; none needs more than one of them.
            let again = info[..4].iter().map(|byte| i32::from(*byte)).sum::<i32>() == libc::SIGHUP;
            asked.again |= again;
            asked.end |= !again;
        }
        asked
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
