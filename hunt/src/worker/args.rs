//! Arguments of a call, and names of errors.

use std::ffi::CString;

use crate::text;

/// Why a call has no result.
#[derive(Debug)]
pub enum Stop {
    /// The call failed.
    Errno(i32),
    /// It names a slot, mapping or seat with nothing in it.
    NoSlot,
    /// It cannot be read.
    Bad(String),
}

/// Tokens after the name of a call.
#[derive(Debug)]
pub struct Args<'a>(pub &'a [&'a str]);

/// A table of named bits.
pub type Bits = &'static [(&'static str, i64)];

impl<'a> Args<'a> {
    pub fn token(&self, index: usize) -> Result<&'a str, Stop> {
        self.0.get(index).copied().ok_or_else(|| Stop::Bad(format!("no argument {index}")))
    }

    fn bad(&self, index: usize) -> Stop {
        Stop::Bad(format!("argument {index}"))
    }

    pub fn number(&self, index: usize) -> Result<i64, Stop> {
        text::number(self.token(index)?).ok_or_else(|| self.bad(index))
    }

    /// A number that is left out with `-`.
    pub fn maybe(&self, index: usize) -> Result<Option<i64>, Stop> {
        if self.token(index)? == "-" { Ok(None) } else { self.number(index).map(Some) }
    }

    pub fn u32(&self, index: usize) -> Result<u32, Stop> {
        // As C does it: -1 is the largest.
        self.number(index).map(|n| n as u32)
    }

    /// A number of bytes that is allocated here.
    pub fn length(&self, index: usize) -> Result<usize, Stop> {
        usize::try_from(self.number(index)?)
            .ok()
            .filter(|n| *n <= 64 << 20)
            .ok_or_else(|| self.bad(index))
    }

    /// Numbers between commas.
    pub fn lengths(&self, index: usize) -> Result<Vec<usize>, Stop> {
        let parse = |part: &str| part.parse().ok().filter(|n| *n <= 16 << 20);
        let all = self.token(index)?.split(',').map(parse).collect::<Option<Vec<_>>>();
        all.ok_or_else(|| self.bad(index))
    }

    pub fn bits(&self, index: usize, table: Bits) -> Result<i32, Stop> {
        text::bits(self.token(index)?, table).map(|b| b as i32).ok_or_else(|| self.bad(index))
    }

    pub fn bytes(&self, index: usize) -> Result<Vec<u8>, Stop> {
        text::unescape(self.token(index)?).ok_or_else(|| self.bad(index))
    }

    /// The number behind a letter: `s3` is slot 3.
    pub fn named(&self, index: usize, letter: char, count: usize) -> Result<usize, Stop> {
        named(self.token(index)?, letter, count).ok_or_else(|| self.bad(index))
    }
}

/// The number behind a letter, if it is below `count`.
pub fn named(token: &str, letter: char, count: usize) -> Option<usize> {
    token.strip_prefix(letter)?.parse().ok().filter(|n| *n < count)
}

/// For the kernel: bytes up to the first zero.
pub fn c_string(bytes: Vec<u8>) -> CString {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    CString::new(&bytes[..end]).unwrap_or_default()
}

/// Names of errors.
pub const ERRNOS: &[(&str, i32)] = &[
    ("EPERM", libc::EPERM),
    ("ENOENT", libc::ENOENT),
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("ENXIO", libc::ENXIO),
    ("E2BIG", libc::E2BIG),
    ("EBADF", libc::EBADF),
    ("EAGAIN", libc::EAGAIN),
    ("ENOMEM", libc::ENOMEM),
    ("EACCES", libc::EACCES),
    ("EFAULT", libc::EFAULT),
    ("EBUSY", libc::EBUSY),
    ("EEXIST", libc::EEXIST),
    ("EXDEV", libc::EXDEV),
    ("ENODEV", libc::ENODEV),
    ("ENOTDIR", libc::ENOTDIR),
    ("EISDIR", libc::EISDIR),
    ("EINVAL", libc::EINVAL),
    ("ENFILE", libc::ENFILE),
    ("EMFILE", libc::EMFILE),
    ("ENOTTY", libc::ENOTTY),
    ("ETXTBSY", libc::ETXTBSY),
    ("EFBIG", libc::EFBIG),
    ("ENOSPC", libc::ENOSPC),
    ("ESPIPE", libc::ESPIPE),
    ("EROFS", libc::EROFS),
    ("EMLINK", libc::EMLINK),
    ("EPIPE", libc::EPIPE),
    ("ERANGE", libc::ERANGE),
    ("EDEADLK", libc::EDEADLK),
    ("ENAMETOOLONG", libc::ENAMETOOLONG),
    ("ENOLCK", libc::ENOLCK),
    ("ENOSYS", libc::ENOSYS),
    ("ENOTEMPTY", libc::ENOTEMPTY),
    ("ELOOP", libc::ELOOP),
    ("ENODATA", libc::ENODATA),
    ("EOVERFLOW", libc::EOVERFLOW),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
    ("ECONNABORTED", libc::ECONNABORTED),
    ("ECANCELED", libc::ECANCELED),
    ("ENOTCONN", libc::ENOTCONN),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ESTALE", libc::ESTALE),
    ("EDQUOT", libc::EDQUOT),
];

/// As `ENOENT`, or the number.
pub fn errno_name(number: i32) -> String {
    let name = ERRNOS.iter().find(|(_, n)| *n == number).map(|(name, _)| (*name).to_string());
    name.unwrap_or_else(|| format!("E{number}"))
}
