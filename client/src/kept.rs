//! Descriptors that the client keeps. In a process that is somebody else's program it says which they are: the
//! program must not close them, and may have every other number.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Told of each number that is kept from now on (true), and of each that will be closed (false).
pub type Watch = fn(RawFd, bool);

/// A descriptor that stays open until it is dropped.
#[derive(Debug)]
pub struct Kept {
    fd: OwnedFd,
    watch: Option<Watch>,
}

impl Kept {
    /// Keeps `fd` at a number from `min` on, out of the program's way; where the limit does not allow it, as it is.
    pub fn new(fd: OwnedFd, min: RawFd, watch: Option<Watch>) -> Self {
        let raised = (fd.as_raw_fd() < min).then(|| rustix::io::fcntl_dupfd_cloexec(&fd, min));
        let fd = if let Some(Ok(high)) = raised { high } else { fd };
        if let Some(watch) = watch {
            watch(fd.as_raw_fd(), true);
        }
        Self { fd, watch }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            watch(self.fd.as_raw_fd(), false);
        }
    }
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Kept {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
