//! TLS of a connection that is no link of the fabric: somebody's who has a loop of its own, and must not wait in it.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use super::session::Session;
use super::{Keys, Role};
use crate::decode::LinkError;

/// One connection's TLS. The socket does not block.
pub struct Alone(Session);

impl std::fmt::Debug for Alone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alone").field("role", &self.role()).finish_non_exhaustive()
    }
}

impl Alone {
    /// Begins to speak to whom the caller means.
    ///
    /// # Errors
    /// Keys that are of no use.
    pub fn dial(keys: &Keys, whom: Role) -> Result<Self, LinkError> {
        Session::dial(keys, whom, None).map(Self)
    }

    /// Expects somebody to speak.
    ///
    /// # Errors
    /// Keys that are of no use.
    pub fn answer(keys: &Keys) -> Result<Self, LinkError> {
        Session::answer(keys, None).map(Self)
    }

    /// Who is at the other end; known when the first byte that it says is.
    pub fn role(&self) -> Option<Role> {
        self.0.role()
    }

    /// Appends at most `max` bytes to `to`; 0 if there are none now.
    ///
    /// # Errors
    /// The connection has ended, or is not who it should be.
    pub fn read(
        &mut self,
        socket: BorrowedFd<'_>,
        to: &mut Vec<u8>,
        max: usize,
    ) -> Result<usize, LinkError> {
        let got = self.0.read(socket, &mut false, to, max)?;
        self.0.flush(socket)?;
        Ok(got)
    }

    /// Takes as much of `bytes` as there is room for.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn write(&mut self, socket: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, LinkError> {
        let took = self.0.write(socket, &[IoSlice::new(bytes)])?;
        self.0.flush(socket)?;
        Ok(took)
    }

    /// Moves on what waits for the socket. True if some is left.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, LinkError> {
        self.0.flush(socket)
    }
}
