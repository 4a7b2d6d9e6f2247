//! POSIX error numbers: what a caller of the file system sees. Inside, errors have types of their
//! own; they become an [`Errno`] once, at the client's border.

/// A Linux error number (positive).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Errno(pub u16);

macro_rules! errnos {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = $text] pub const $name: Errno = Errno($value);)*

            /// Symbolic name and meaning.
            pub const fn describe(self) -> (&'static str, &'static str) {
                match self.0 {
                    $($value => (stringify!($name), $text),)*
                    _ => ("E?", "unknown error"),
                }
            }
        }
    };
}

errnos! {
    PERM = 1, "operation not permitted";
    NOENT = 2, "no such file or directory";
    INTR = 4, "interrupted system call";
    IO = 5, "input/output error";
    NXIO = 6, "no such device or address";
    TOOBIG = 7, "argument list too long";
    BADF = 9, "bad file descriptor";
    AGAIN = 11, "resource temporarily unavailable";
    NOMEM = 12, "cannot allocate memory";
    ACCES = 13, "permission denied";
    FAULT = 14, "bad address";
    BUSY = 16, "device or resource busy";
    EXIST = 17, "file exists";
    XDEV = 18, "invalid cross-device link";
    NODEV = 19, "no such device";
    NOTDIR = 20, "not a directory";
    ISDIR = 21, "is a directory";
    INVAL = 22, "invalid argument";
    NFILE = 23, "too many open files in system";
    MFILE = 24, "too many open files";
    NOTTY = 25, "inappropriate ioctl for device";
    TXTBSY = 26, "text file busy";
    FBIG = 27, "file too large";
    NOSPC = 28, "no space left on device";
    SPIPE = 29, "illegal seek";
    ROFS = 30, "read-only file system";
    MLINK = 31, "too many links";
    RANGE = 34, "result too large";
    DEADLK = 35, "resource deadlock avoided";
    NAMETOOLONG = 36, "file name too long";
    NOLCK = 37, "no locks available";
    NOSYS = 38, "function not implemented";
    NOTEMPTY = 39, "directory not empty";
    LOOP = 40, "too many levels of symbolic links";
    NODATA = 61, "no such attribute";
    OVERFLOW = 75, "value too large for defined data type";
    PROTONOSUPPORT = 93, "protocol not supported";
    OPNOTSUPP = 95, "operation not supported";
    TIMEDOUT = 110, "connection timed out";
    STALE = 116, "stale file handle";
    DQUOT = 122, "disk quota exceeded";
    NOTCONN = 107, "transport endpoint is not connected";
    SHUTDOWN = 108, "shut out, or shut down";
}

impl core::fmt::Debug for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "E{}", self.describe().0)
    }
}

impl core::fmt::Display for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.describe().1)
    }
}

impl core::error::Error for Errno {}
