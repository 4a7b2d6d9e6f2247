//! Which call is which, and those on descriptors themselves.

use std::ffi::CString;
use std::os::fd::RawFd;

use super::args::{Args, Bits, Stop, c_string, named};
use super::{SLOTS, Slot, Worker, done, sys};

/// Flags of open.
pub const OPEN: Bits = &[
    ("rd", libc::O_RDONLY as i64),
    ("wr", libc::O_WRONLY as i64),
    ("rdwr", libc::O_RDWR as i64),
    ("creat", libc::O_CREAT as i64),
    ("excl", libc::O_EXCL as i64),
    ("trunc", libc::O_TRUNC as i64),
    ("append", libc::O_APPEND as i64),
    ("dsync", libc::O_DSYNC as i64),
    ("sync", libc::O_SYNC as i64),
    ("direct", libc::O_DIRECT as i64),
    ("tmpfile", libc::O_TMPFILE as i64),
    ("path", libc::O_PATH as i64),
    ("nofollow", libc::O_NOFOLLOW as i64),
    ("directory", libc::O_DIRECTORY as i64),
    ("cloexec", libc::O_CLOEXEC as i64),
    ("nonblock", libc::O_NONBLOCK as i64),
    ("noatime", libc::O_NOATIME as i64),
];

/// A name as calls take it: a directory and a path from there.
#[derive(Debug)]
pub struct Place {
    pub dir: RawFd,
    pub path: CString,
}

impl Place {
    /// Whether it is relative to a descriptor, so that only the `…at` calls will do.
    pub fn is_at(&self) -> bool {
        self.dir != libc::AT_FDCWD
    }
}

impl Worker {
    fn slot(&self, args: &Args<'_>, index: usize) -> Result<&Slot, Stop> {
        let slot = args.named(index, 's', SLOTS)?;
        self.slots[slot].as_ref().ok_or(Stop::NoSlot)
    }

    pub fn fd(&self, args: &Args<'_>, index: usize) -> Result<RawFd, Stop> {
        self.slot(args, index).map(|slot| slot.fd)
    }

    /// A slot that nothing is in yet.
    fn empty(&self, args: &Args<'_>, index: usize) -> Result<usize, Stop> {
        let slot = args.named(index, 's', SLOTS)?;
        if self.slots[slot].is_some() { Err(Stop::NoSlot) } else { Ok(slot) }
    }

    /// `PATH`, `@PATH` from the root of the file system on, or `sN:PATH` from a slot on.
    pub fn place(&self, args: &Args<'_>, index: usize) -> Result<Place, Stop> {
        let token = args.token(index)?;
        let bytes = |token: &str| {
            crate::text::unescape(token).ok_or_else(|| Stop::Bad(format!("argument {index}")))
        };
        if let Some(rest) = token.strip_prefix('@') {
            let path = [&self.start.root[..], b"/", &bytes(rest)?].concat();
            return Ok(Place { dir: libc::AT_FDCWD, path: c_string(path) });
        }
        if let Some((dir, rest)) = token.split_once(':')
            && let Some(slot) = named(dir, 's', SLOTS)
        {
            let dir = self.slots[slot].as_ref().ok_or(Stop::NoSlot)?.fd;
            return Ok(Place { dir, path: c_string(bytes(rest)?) });
        }
        Ok(Place { dir: libc::AT_FDCWD, path: c_string(bytes(token)?) })
    }

    /// Carries out one call.
    pub fn call(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        if let Some(answer) = self.lie_instead(name, args) {
            return answer;
        }
        let answer = match name {
            "open" => self.open(args),
            "creat" => self.creat(args),
            "close" => self.close(args),
            "dup" => self.dup(args),
            "dup2" => self.dup2(args),
            "fdupfd" => self.fdupfd(args),
            "getfl" => self.getfl(args),
            "setfl" => self.setfl(args),
            "getfd" => number(done(sys!(fcntl(self.fd(args, 0)?, libc::F_GETFD)))),
            "setfd" => {
                let flag = args.bits(1, &[("cloexec", libc::FD_CLOEXEC as i64)])?;
                number(done(sys!(fcntl(self.fd(args, 0)?, libc::F_SETFD, flag))))
            }
            "read" | "pread" | "readv" | "preadv2" => self.read(name, args),
            "write" | "pwrite" | "writev" | "pwritev2" => self.write(name, args),
            "lseek" => self.lseek(args),
            "truncate" => self.truncate(args),
            "ftruncate" => number(done(sys!(ftruncate(self.fd(args, 0)?, args.number(1)?)))),
            "fallocate" => self.fallocate(args),
            "copyrange" => self.copy_range(args),
            "sendfile" => self.sendfile(args),
            "clone" => self.clone_whole(args),
            "clonerange" => self.clone_range(args),
            "fsync" | "fdatasync" | "syncfs" | "syncrange" => self.sync(name, args),
            "mmap" => self.mmap(args),
            "munmap" => self.munmap(args),
            "peek" => self.peek(args),
            "poke" => self.poke(args),
            "msync" => self.msync(args),
            "mapcopy" => self.map_copy(args),
            "stat" | "lstat" | "fstat" | "statx" => self.stat(name, args),
            "same" => self.same(args),
            "access" => self.access(args),
            "chmod" | "fchmod" => self.chmod(name, args),
            "chown" | "lchown" | "fchown" => self.chown(name, args),
            "utimens" | "futimens" => self.utimens(name, args),
            "setxattr" | "lsetxattr" | "fsetxattr" => self.setxattr(name, args),
            "getxattr" | "lgetxattr" | "fgetxattr" => self.getxattr(name, args),
            "listxattr" | "llistxattr" | "flistxattr" => self.listxattr(name, args),
            "removexattr" | "lremovexattr" | "fremovexattr" => self.removexattr(name, args),
            "setacl" => self.setacl(args),
            "mkdir" => self.mkdir(args),
            "rmdir" | "unlink" => self.unlink(name, args),
            "rename" => self.rename(args),
            "link" | "linkfd" => self.link(name, args),
            "symlink" => self.symlink(args),
            "readlink" => self.readlink(args),
            "mknod" => self.mknod(args),
            "list" => self.list(args),
            "getdents" => self.getdents(args),
            "seekdir" => self.seekdir(args),
            "chdir" => {
                let path = self.place(args, 0)?;
                number(done(sys!(chdir(path.path.as_ptr()))))
            }
            "fchdir" => number(done(sys!(fchdir(self.fd(args, 0)?)))),
            "getcwd" => self.getcwd(),
            "lock" => self.lock(args),
            "getlk" => self.getlk(args),
            "flock" => self.flock(args),
            "umask" => Ok(format!("{:o} 0", sys!(umask(args.u32(0)?)))),
            "cred" => self.cred(args),
            "fork" | "exec" | "spawn" => self.child(name, args),
            "exit" => super::processes::exit(),
            "reap" => self.reap(args),
            "sweep" => self.sweep(args),
            "syncall" => self.sync_all(),
            "durable" => self.durable(args),
            "sums" => Ok(self.sums()),
            "checkhole" => self.check_hole(args),
            "euid" => Ok(format!("{} 0", sys!(geteuid()))),
            "again" => self.open_again(args),
            "fdof" => Ok(format!("{} 0", self.fd(args, 0)?)),
            "show" => self.show(args),
            _ => Err(Stop::Bad("unknown call".into())),
        }?;
        Ok(self.lie_about(name, args, answer))
    }

    fn open(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let slot = self.empty(args, 0)?;
        let place = self.place(args, 1)?;
        let mut flags = args.bits(2, OPEN)?;
        let mode = args.u32(3)?;
        let direct = flags & libc::O_DIRECT != 0 && flags & libc::O_PATH == 0;
        if self.start.plain {
            // It asks for more than it gives: see the list of exceptions.
            flags &= !libc::O_DIRECT;
        }
        let fd = if place.is_at() {
            sys!(openat(place.dir, place.path.as_ptr(), flags, mode))
        } else {
            sys!(open(place.path.as_ptr(), flags, mode))
        };
        let fd = done(fd)?;
        if self.start.plain && direct && !is(fd as RawFd, libc::S_IFREG) {
            // No file system's directories can be read so, nor its pipes.
            sys!(close(fd as RawFd));
            return Err(Stop::Errno(libc::EINVAL));
        }
        self.opened(slot, fd)
    }

    /// `again SLOT`: whether what is there could be opened now, with the same rights. It is not: a close ends locks.
    fn open_again(&self, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        let wanted = match sys!(fcntl(fd, libc::F_GETFL)) & libc::O_ACCMODE {
            libc::O_RDONLY => libc::R_OK,
            libc::O_WRONLY => libc::W_OK,
            _ => libc::R_OK | libc::W_OK,
        };
        let path = c_string(format!("/proc/self/fd/{fd}").into_bytes());
        let (from, how) = (libc::AT_FDCWD, libc::AT_EACCESS);
        number(done(sys!(faccessat(from, path.as_ptr(), wanted, how))))
    }

    fn creat(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let slot = self.empty(args, 0)?;
        let place = self.place(args, 1)?;
        let fd = done(sys!(creat(place.path.as_ptr(), args.u32(2)?)))?;
        self.opened(slot, fd)
    }

    /// Pipes and devices are not kept open: what they hold is not the file system's.
    fn opened(&mut self, slot: usize, fd: i64) -> Result<String, Stop> {
        let fd = fd as RawFd;
        let mut about = super::meta::empty_stat();
        sys!(fstat(fd, &raw mut about));
        let kind = about.st_mode & libc::S_IFMT;
        if !matches!(kind, libc::S_IFREG | libc::S_IFDIR | libc::S_IFLNK)
            && sys!(fcntl(fd, libc::F_GETFL)) & libc::O_PATH == 0
        {
            sys!(close(fd));
            return Ok(format!("special 0 kind={kind:o}"));
        }
        self.put(slot, fd);
        Ok(format!("{fd} 0"))
    }

    fn close(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        self.slots[args.named(0, 's', SLOTS)?] = None;
        number(done(sys!(close(fd))))
    }

    fn dup(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let from = self.fd(args, 0)?;
        let to = self.empty(args, 1)?;
        let fd = done(sys!(dup(from)))?;
        self.put(to, fd as RawFd);
        Ok(format!("{fd} 0"))
    }

    /// Over a slot that is in use; with flags dup3.
    fn dup2(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (from, to) = (self.fd(args, 0)?, self.fd(args, 1)?);
        let flags = args.bits(2, OPEN)?;
        let fd = if flags == 0 { sys!(dup2(from, to)) } else { sys!(dup3(from, to, flags)) };
        let fd = done(fd)?;
        if from != to {
            self.put(args.named(1, 's', SLOTS)?, fd as RawFd);
        }
        Ok(format!("{fd} 0"))
    }

    fn fdupfd(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let from = self.fd(args, 0)?;
        let to = self.empty(args, 1)?;
        let least = args.u32(2)?.min(90);
        let fd = done(sys!(fcntl(from, libc::F_DUPFD_CLOEXEC, least)))?;
        self.put(to, fd as RawFd);
        Ok(format!("{fd} 0"))
    }

    fn getfl(&self, args: &Args<'_>) -> Result<String, Stop> {
        let flags = done(sys!(fcntl(self.fd(args, 0)?, libc::F_GETFL)))?;
        // Which the reference does not get, and which says nothing on 64 bits.
        let known = flags as i32 & !(libc::O_DIRECT | libc::O_LARGEFILE | 0x8000);
        Ok(format!("{known:#x} 0"))
    }

    fn setfl(&self, args: &Args<'_>) -> Result<String, Stop> {
        let mut flags = args.bits(1, OPEN)?;
        if self.start.plain {
            flags &= !libc::O_DIRECT;
        }
        number(done(sys!(fcntl(self.fd(args, 0)?, libc::F_SETFL, flags))))
    }

    fn getcwd(&self) -> Result<String, Stop> {
        let mut bytes = vec![0_u8; 8192];
        if sys!(getcwd(bytes.as_mut_ptr().cast(), bytes.len())).is_null() {
            return Err(Stop::Errno(super::errno()));
        }
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(0);
        let path = bytes[..end].strip_prefix(&self.start.root[..]).unwrap_or(b"elsewhere");
        Ok(format!("0 0 path={}", crate::text::escape(path)))
    }
}

/// Whether a descriptor is of a directory.
pub fn is_directory(fd: RawFd) -> bool {
    is(fd, libc::S_IFDIR)
}

/// Whether a descriptor is of something of that kind.
fn is(fd: RawFd, kind: libc::mode_t) -> bool {
    let mut about = super::meta::empty_stat();
    sys!(fstat(fd, &raw mut about)) == 0 && about.st_mode & libc::S_IFMT == kind
}

/// The answer that is only a number.
pub fn number(result: Result<i64, Stop>) -> Result<String, Stop> {
    result.map(|n| format!("{n} 0"))
}
