//! File locks, in the forms that do not wait.

use super::args::{Args, Bits, Stop};
use super::calls::number;
use super::{Worker, done, sys};

const KIND: Bits =
    &[("r", libc::F_RDLCK as i64), ("w", libc::F_WRLCK as i64), ("u", libc::F_UNLCK as i64)];
const WHENCE: Bits = &[
    ("set", libc::SEEK_SET as i64),
    ("cur", libc::SEEK_CUR as i64),
    ("end", libc::SEEK_END as i64),
];

fn range(args: &Args<'_>) -> Result<libc::flock, Stop> {
    Ok(libc::flock {
        l_type: args.bits(2, KIND)? as i16,
        l_whence: args.bits(3, WHENCE)? as i16,
        l_start: args.number(4)?,
        l_len: args.number(5)?,
        l_pid: 0,
    })
}

impl Worker {
    /// A kernel counts from the end of the file as it knows it, and does not ask before (docs/mount.md).
    fn ask_for_size(&self, args: &Args<'_>) -> Result<(), Stop> {
        if args.token(3)? == "end" {
            let mut about = super::meta::empty_stat();
            done(sys!(fstat(self.fd(args, 0)?, &raw mut about)))?;
        }
        Ok(())
    }

    /// Positions in directories are each file system's own, and so are their sizes (of one that is gone some say 0): a range from
    /// there on means nothing.
    fn refuse_position(&self, args: &Args<'_>) -> Result<(), Stop> {
        let from_here = args.token(3)? != "set";
        let refuse = from_here && super::calls::is_directory(self.fd(args, 0)?);
        if refuse { Err(Stop::NoSlot) } else { Ok(()) }
    }

    /// `lock SLOT posix|ofd r|w|u WHENCE START LENGTH`.
    pub fn lock(&self, args: &Args<'_>) -> Result<String, Stop> {
        let command = if args.token(1)? == "ofd" { libc::F_OFD_SETLK } else { libc::F_SETLK };
        let range = range(args)?;
        self.refuse_position(args)?;
        self.ask_for_size(args)?;
        number(done(sys!(fcntl(self.fd(args, 0)?, command, &raw const range))))
    }

    /// `getlk SLOT posix|ofd r|w WHENCE START LENGTH`: who is in the way.
    pub fn getlk(&self, args: &Args<'_>) -> Result<String, Stop> {
        let command = if args.token(1)? == "ofd" { libc::F_OFD_GETLK } else { libc::F_GETLK };
        let mut range = range(args)?;
        self.refuse_position(args)?;
        self.ask_for_size(args)?;
        done(sys!(fcntl(self.fd(args, 0)?, command, &raw mut range)))?;
        Ok(format!(
            "0 0 type={} whence={} start={} length={} pid={}",
            range.l_type, range.l_whence, range.l_start, range.l_len, range.l_pid
        ))
    }

    /// `flock SLOT sh|ex|un`.
    pub fn flock(&self, args: &Args<'_>) -> Result<String, Stop> {
        let operation = match args.token(1)? {
            "sh" => libc::LOCK_SH,
            "ex" => libc::LOCK_EX,
            "un" => libc::LOCK_UN,
            _ => return Err(Stop::Bad("argument 1".into())),
        };
        number(done(sys!(flock(self.fd(args, 0)?, operation | libc::LOCK_NB))))
    }
}
