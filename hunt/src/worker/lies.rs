//! Planted differences: what a worker does wrong on purpose, to show that the hunter finds it.

use super::args::{Args, Stop};
use super::{Worker, sys};

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lie {
    /// A read that begins within a page gets its last byte from the one before.
    Shift,
    /// A mode without rights for others is not set by a descriptor.
    Chmod,
    /// After the mode was changed by a name, a read that does not begin at the beginning finds zeros.
    Forget,
    /// A duplicate has an offset of its own.
    Offset,
    /// A name that was renamed over something is still there.
    Ghost,
    /// Locks of processes are never in the way.
    Lock,
    /// Times lose what is below a microsecond.
    Time,
    /// An attribute that is replaced keeps its old value.
    Attribute,
    /// What is cut off is there again when the file grows.
    Tail,
    /// Writing does not end set-id bits.
    SetId,
}

/// All of them, by name.
pub const LIES: &[(&str, Lie)] = &[
    ("shift", Lie::Shift),
    ("chmod", Lie::Chmod),
    ("forget", Lie::Forget),
    ("offset", Lie::Offset),
    ("ghost", Lie::Ghost),
    ("lock", Lie::Lock),
    ("time", Lie::Time),
    ("attribute", Lie::Attribute),
    ("tail", Lie::Tail),
    ("set-id", Lie::SetId),
];

/// What lying needs to be remembered.
#[derive(Debug, Default)]
pub struct Memory {
    changed_mode: bool,
}

impl Memory {
    /// Bytes that were read at an offset.
    pub fn read(&mut self, lie: Option<Lie>, offset: i64, bytes: &mut [u8]) {
        match lie {
            Some(Lie::Shift) if offset % 4096 != 0 && bytes.len() > 1 => {
                let last = bytes.len() - 1;
                bytes[last] = bytes[last - 1];
            }
            Some(Lie::Forget) if self.changed_mode && offset > 0 => {
                bytes.fill(0);
                self.changed_mode = false;
            }
            _ => {}
        }
    }
}

impl Worker {
    /// An answer without a call, or after another one.
    pub fn lie_instead(&mut self, name: &str, args: &Args<'_>) -> Option<Result<String, Stop>> {
        let fine = || Some(Ok("0 0".into()));
        match (self.start.lie?, name) {
            (Lie::Chmod, "fchmod") if args.u32(1).ok()? & 0o7 == 0 && self.fd(args, 0).is_ok() => {
                fine()
            }
            (Lie::Lock, "lock") if args.token(1).ok()? == "posix" && self.fd(args, 0).is_ok() => {
                fine()
            }
            (Lie::Attribute, "setxattr" | "fsetxattr") if args.token(4).ok()? == "replace" => {
                let probe = [args.token(0).ok()?, args.token(1).ok()?, "0"];
                let probe = self.getxattr(&name.replace("set", "get"), &Args(&probe));
                Some(probe.map(|_| "0 0".into()))
            }
            (Lie::Offset, "dup") => {
                let fd = self.fd(args, 0).ok()?;
                let path = super::args::c_string(format!("/proc/self/fd/{fd}").into_bytes());
                let flags = sys!(fcntl(fd, libc::F_GETFL));
                let again = sys!(open(path.as_ptr(), flags));
                let to = args.named(1, 's', super::SLOTS).ok()?;
                if again == -1 || self.slots[to].is_some() {
                    sys!(close(again));
                    return None;
                }
                self.put(to, again);
                Some(Ok(format!("{again} 0")))
            }
            (Lie::Tail, "ftruncate") => {
                // Shorter, it is not cut; what is beyond comes with it when it grows.
                let fd = self.fd(args, 0).ok()?;
                let mut about = super::meta::empty_stat();
                sys!(fstat(fd, &raw mut about));
                let wanted = args.number(1).ok()?;
                (wanted > about.st_size && about.st_size > 0).then(|| {
                    let bytes = self.buffer.take(1);
                    bytes[0] = 1;
                    sys!(pwrite(fd, bytes.as_ptr().cast(), 1, about.st_size));
                    super::calls::number(super::done(sys!(ftruncate(fd, wanted))))
                })
            }
            _ => None,
        }
    }

    /// What is said, and done, after a call that succeeded.
    pub fn lie_about(&mut self, name: &str, args: &Args<'_>, answer: String) -> String {
        match (self.start.lie, name) {
            (Some(Lie::Forget), "chmod") => self.lies.changed_mode = true,
            (Some(Lie::Ghost), "rename") if args.token(2).is_ok_and(|f| f == "-") => {
                if let (Ok(from), Ok(to)) = (self.place(args, 0), self.place(args, 1)) {
                    sys!(linkat(to.dir, to.path.as_ptr(), from.dir, from.path.as_ptr(), 0));
                }
            }
            (Some(Lie::SetId), "pwrite") => {
                if let Ok(fd) = self.fd(args, 0)
                    && sys!(geteuid()) != 0
                {
                    sys!(fchmod(fd, 0o6755));
                }
            }
            (Some(Lie::Time), "fstat" | "stat" | "lstat") => {
                let shorten = |field: &str| match field.split_once('.') {
                    Some((head, tail)) if head.starts_with("mtime") && tail.len() == 9 => {
                        format!("{head}.{}000", &tail[..6])
                    }
                    _ => field.to_string(),
                };
                return answer.split(' ').map(shorten).collect::<Vec<_>>().join(" ");
            }
            _ => {}
        }
        answer
    }
}
