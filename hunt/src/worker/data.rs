//! Reading, writing, and what moves bytes.

use std::ffi::c_void;

use super::args::{Args, Bits, Stop};
use super::calls::number;
use super::{Worker, done, errno, sys};
use crate::pattern;

/// Flags of one write.
const WRITE: Bits = &[
    ("append", libc::RWF_APPEND as i64),
    ("dsync", libc::RWF_DSYNC as i64),
    ("sync", libc::RWF_SYNC as i64),
    ("nowait", libc::RWF_NOWAIT as i64),
    ("hipri", libc::RWF_HIPRI as i64),
];

const WHENCE: Bits = &[
    ("set", libc::SEEK_SET as i64),
    ("cur", libc::SEEK_CUR as i64),
    ("end", libc::SEEK_END as i64),
    ("data", libc::SEEK_DATA as i64),
    ("hole", libc::SEEK_HOLE as i64),
];

/// Modes of fallocate.
const ALLOCATE: Bits = &[
    ("keep", libc::FALLOC_FL_KEEP_SIZE as i64),
    ("punch", libc::FALLOC_FL_PUNCH_HOLE as i64),
    ("collapse", libc::FALLOC_FL_COLLAPSE_RANGE as i64),
    ("zero", libc::FALLOC_FL_ZERO_RANGE as i64),
    ("insert", libc::FALLOC_FL_INSERT_RANGE as i64),
    ("unshare", libc::FALLOC_FL_UNSHARE_RANGE as i64),
];

const FICLONE: libc::Ioctl = 0x4004_9409;
const FICLONERANGE: libc::Ioctl = 0x4020_940d;

/// A kernel copies as far as it knows a file to go, and does not ask before (docs/mount.md): programs do.
/// Whether both descriptors lead to one file.
fn look_first(from: i32, to: i32) -> Result<bool, Stop> {
    let (mut one, mut two) = (super::meta::empty_stat(), super::meta::empty_stat());
    done(sys!(fstat(from, &raw mut one)))?;
    done(sys!(fstat(to, &raw mut two)))?;
    Ok((one.st_dev, one.st_ino) == (two.st_dev, two.st_ino))
}

/// Whether `corbel run` serves a descriptor, so that what the kernel has under its number is a placeholder.
fn is_served(fd: i32) -> bool {
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let flags = about.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_PATH != 0)
}

/// Memory that begins at a page, as O_DIRECT wants it.
#[derive(Debug, Default)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// `length` bytes of it.
    pub fn take(&mut self, length: usize) -> &mut [u8] {
        let needed = length + 4096;
        if self.0.len() < needed {
            self.0.resize(needed, 0);
        }
        let first = self.0.as_ptr().align_offset(4096);
        &mut self.0[first..first + length]
    }
}

/// Pieces of `length` bytes of memory.
fn pieces(bytes: &mut [u8], lengths: &[usize]) -> Vec<libc::iovec> {
    let mut rest = bytes;
    let mut all = Vec::new();
    for length in lengths {
        let (piece, after) = rest.split_at_mut(*length);
        all.push(libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: *length });
        rest = after;
    }
    all
}

impl Worker {
    /// `read SLOT LENGTHS`, `pread SLOT LENGTHS OFFSET`, `preadv2 SLOT LENGTHS OFFSET FLAGS`.
    pub fn read(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        let lengths = args.lengths(1)?;
        let offset = if args.0.len() > 2 { args.number(2)? } else { 0 };
        let bytes = self.buffer.take(lengths.iter().sum());
        bytes.fill(0xa5);
        let at = bytes.as_mut_ptr().cast::<c_void>();
        let all = pieces(bytes, &lengths);
        let count = all.len() as i32;
        let got = match name {
            "read" => sys!(read(fd, at, bytes.len())),
            "pread" => sys!(pread(fd, at, bytes.len(), offset)),
            "readv" => sys!(readv(fd, all.as_ptr(), count)),
            _ => sys!(preadv2(fd, all.as_ptr(), count, offset, args.bits(3, WRITE)?)),
        };
        let got = match done(got as i64) {
            // The end of a directory is, for some, so far that the kernel refuses to read beyond.
            Err(Stop::Errno(libc::EINVAL)) if super::calls::is_directory(fd) => {
                return Err(Stop::Errno(libc::EISDIR));
            }
            got => got? as usize,
        };
        self.lies.read(self.start.lie, offset, &mut bytes[..got]);
        let sum = pattern::sum(&bytes[..got]);
        self.last.clear();
        self.last.extend_from_slice(&bytes[..got]);
        Ok(format!("{got} 0 sum={sum:x}"))
    }

    /// `write SLOT LENGTHS PATTERN`, `pwrite SLOT LENGTHS PATTERN OFFSET`, `pwritev2 … OFFSET FLAGS`.
    pub fn write(&mut self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        let lengths = args.lengths(1)?;
        let pattern = args.number(2)?.cast_unsigned();
        let offset = if args.0.len() > 3 { args.number(3)? } else { 0 };
        let bytes = self.buffer.take(lengths.iter().sum());
        pattern::fill(pattern, bytes);
        let at = bytes.as_ptr().cast::<c_void>();
        let all = pieces(bytes, &lengths);
        let count = all.len() as i32;
        let put = match name {
            "write" => sys!(write(fd, at, bytes.len())),
            "pwrite" => sys!(pwrite(fd, at, bytes.len(), offset)),
            "writev" => sys!(writev(fd, all.as_ptr(), count)),
            _ => sys!(pwritev2(fd, all.as_ptr(), count, offset, args.bits(4, WRITE)?)),
        };
        let put = done(put as i64)?;
        let moves = !matches!((name, offset), ("pwrite", _) | ("pwritev2", 0..));
        let appends = || sys!(fcntl(fd, libc::F_GETFL)) & libc::O_APPEND != 0;
        // (Nothing that is written moves nothing.)
        if put > 0 && self.start.ends && moves && appends() && !is_served(fd) {
            sys!(lseek(fd, 0, libc::SEEK_END));
        }
        number(Ok(put))
    }

    pub fn lseek(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (fd, whence) = (self.fd(args, 0)?, args.bits(2, WHENCE)?);
        let place = done(sys!(lseek(fd, args.number(1)?, whence)));
        if super::calls::is_directory(fd) {
            // Positions in directories are each file system's own.
            return Ok("directory 0".into());
        }
        number(place)
    }

    /// `checkhole SLOT FROM data|hole RESULT ERRNO`, on the reference: whether another worker's answer to
    /// SEEK_DATA or SEEK_HOLE is right by the bytes of the file. If so it is ours too, and the offset moves.
    pub fn check_hole(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (fd, from) = (self.fd(args, 0)?, args.number(1)?);
        let (found, said) = (args.number(3).unwrap_or(-1), args.token(4)?);
        let mut about = super::meta::empty_stat();
        done(sys!(fstat(fd, &raw mut about)))?;
        if super::calls::is_directory(fd) {
            return Ok(format!("{} {said}", args.token(3)?));
        }
        let here = sys!(lseek(fd, 0, libc::SEEK_CUR));
        let own = done(sys!(lseek(fd, from, args.bits(2, WHENCE)?)));
        let echo = Ok(format!("{found} {said}"));
        match own {
            Err(Stop::Errno(error)) if error != libc::ENXIO => return Err(Stop::Errno(error)),
            _ => {}
        }
        sys!(lseek(fd, here, libc::SEEK_SET));
        let (data, size) = (args.token(2)? == "data", about.st_size);
        if said == "ENXIO" {
            let right = from < 0 || from >= size || (data && self.zeros(fd, from, size)?);
            return if right { echo } else { Ok("there-is-more 0".into()) };
        }
        let within = said == "0" && found >= from && from < size && found <= size - i64::from(data);
        let right = within
            && if data {
                self.zeros(fd, from, found)?
            } else {
                self.zeros(fd, found, (found + 1).min(size))?
            };
        if !right {
            return Ok("elsewhere 0".into());
        }
        sys!(lseek(fd, found, libc::SEEK_SET));
        echo
    }

    /// Whether there are only zeros from `from` to `to`.
    fn zeros(&mut self, fd: i32, from: i64, to: i64) -> Result<bool, Stop> {
        // Who may not read the file cannot judge; opening it anew would, when closed, end locks.
        if sys!(fcntl(fd, libc::F_GETFL)) & libc::O_ACCMODE == libc::O_WRONLY {
            return Ok(true);
        }
        let here = sys!(lseek(fd, 0, libc::SEEK_CUR));
        let mut at = from;
        let mut zeros = true;
        while zeros && at < to {
            // Where the reference has no data there is nothing to look at.
            at = at.max(sys!(lseek(fd, at, libc::SEEK_DATA)));
            if sys!(lseek(fd, at, libc::SEEK_DATA)) == -1 {
                break;
            }
            let wanted = (to - at).clamp(0, 1 << 20) as usize;
            let bytes = self.buffer.take(wanted);
            let got = sys!(pread(fd, bytes.as_mut_ptr().cast(), wanted, at));
            let Some(got) = usize::try_from(got).ok().filter(|got| *got > 0) else { break };
            zeros = bytes[..got].iter().all(|b| *b == 0);
            at += got as i64;
        }
        sys!(lseek(fd, here, libc::SEEK_SET));
        Ok(zeros)
    }

    pub fn truncate(&self, args: &Args<'_>) -> Result<String, Stop> {
        let place = self.place(args, 0)?;
        number(done(sys!(truncate(place.path.as_ptr(), args.number(1)?))))
    }

    /// `fallocate SLOT MODE OFFSET LENGTH`.
    pub fn fallocate(&self, args: &Args<'_>) -> Result<String, Stop> {
        let mut mode = args.bits(1, ALLOCATE)?;
        if self.start.reference {
            // To it there is nothing to be unshared.
            mode &= !libc::FALLOC_FL_UNSHARE_RANGE;
        }
        let fd = self.fd(args, 0)?;
        number(done(sys!(fallocate(fd, mode, args.number(2)?, args.number(3)?))))
    }

    /// `copyrange FROM OFFSET|- TO OFFSET|- LENGTH`.
    pub fn copy_range(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (from, to) = (self.fd(args, 0)?, self.fd(args, 2)?);
        look_first(from, to)?;
        let (mut at, mut onto) = (args.maybe(1)?, args.maybe(3)?);
        let pointer =
            |o: &mut Option<i64>| o.as_mut().map_or(std::ptr::null_mut(), |o| &raw mut *o);
        let length = args.length(4)?;
        let copied =
            sys!(copy_file_range(from, pointer(&mut at), to, pointer(&mut onto), length, 0));
        let copied = done(copied as i64)?;
        let show = |o: Option<i64>| o.map_or("-".into(), |o| o.to_string());
        Ok(format!("{copied} 0 from={} to={}", show(at), show(onto)))
    }

    /// `sendfile TO FROM OFFSET|- LENGTH`.
    pub fn sendfile(&self, args: &Args<'_>) -> Result<String, Stop> {
        let (to, from) = (self.fd(args, 0)?, self.fd(args, 1)?);
        if look_first(from, to)? {
            // What it reads of what it has just written depends on how much it moves at a time.
            return Err(Stop::NoSlot);
        }
        let mut at = args.maybe(2)?;
        if at.is_none() && super::calls::is_directory(from) {
            // Where it stands is each file system's own, and so is whether that is too far.
            return Err(Stop::NoSlot);
        }
        let pointer = at.as_mut().map_or(std::ptr::null_mut(), |o| &raw mut *o);
        let sent = done(sys!(sendfile(to, from, pointer, args.length(3)?)) as i64)?;
        Ok(format!("{sent} 0 from={}", at.map_or("-".into(), |o: i64| o.to_string())))
    }

    /// `clone TO FROM`.
    pub fn clone_whole(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (to, from) = (self.fd(args, 0)?, self.fd(args, 1)?);
        if self.start.reference {
            return self.clone_by_copy(to, from, 0, 0, 0).map(|()| "0 0".into());
        }
        number(done(sys!(ioctl(to, FICLONE, from))))
    }

    /// `clonerange TO FROM OFFSET LENGTH OFFSET`.
    pub fn clone_range(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let (to, from) = (self.fd(args, 0)?, self.fd(args, 1)?);
        let (at, length, onto) = (args.number(2)?, args.number(3)?, args.number(4)?);
        if self.start.reference {
            return self.clone_by_copy(to, from, at, length, onto).map(|()| "0 0".into());
        }
        // struct file_clone_range
        let range = [i64::from(from), at, length, onto];
        number(done(sys!(ioctl(to, FICLONERANGE, range.as_ptr()))))
    }

    /// What a clone does, for a reference that cannot. Only called when the clone has succeeded elsewhere.
    fn clone_by_copy(
        &mut self,
        to: i32,
        from: i32,
        at: i64,
        length: i64,
        onto: i64,
    ) -> Result<(), Stop> {
        let mode = |fd: i32| sys!(fcntl(fd, libc::F_GETFL));
        let writable =
            mode(to) & libc::O_ACCMODE != libc::O_RDONLY && mode(to) & libc::O_APPEND == 0;
        if !writable || mode(from) & libc::O_ACCMODE == libc::O_WRONLY {
            return Err(Stop::Errno(libc::EBADF));
        }
        let mut about = super::meta::empty_stat();
        done(sys!(fstat(from, &raw mut about)))?;
        let whole = about.st_size - at;
        let length = if length == 0 { whole } else { length };
        let meets = look_first(from, to)? && at < onto + length && onto < at + length;
        if length > whole || (meets && length > 0) {
            return Err(Stop::Errno(libc::EINVAL));
        }
        let mut copied = 0;
        while copied < length {
            let wanted = (length - copied).min(1 << 20);
            let bytes = self.buffer.take(wanted as usize);
            let got = sys!(pread(from, bytes.as_mut_ptr().cast(), wanted as usize, at + copied));
            let got = done(got as i64)?;
            if got == 0 {
                break;
            }
            done(sys!(pwrite(to, bytes.as_ptr().cast(), got as usize, onto + copied)) as i64)?;
            copied += got;
        }
        Ok(())
    }

    pub fn sync(&self, name: &str, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        if self.start.plain {
            // It need not survive anything; but what makes the call fail must.
            let flags = sys!(fcntl(fd, libc::F_GETFL));
            let refused = flags & libc::O_PATH != 0;
            return if refused { Err(Stop::Errno(libc::EBADF)) } else { Ok("0 0".into()) };
        }
        let result = match name {
            "fsync" => sys!(fsync(fd)),
            "fdatasync" => sys!(fdatasync(fd)),
            "syncfs" => sys!(syncfs(fd)),
            _ => {
                let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
                    | libc::SYNC_FILE_RANGE_WRITE
                    | libc::SYNC_FILE_RANGE_WAIT_AFTER;
                sys!(sync_file_range(fd, args.number(1)?, args.number(2)?, all))
            }
        };
        number(done(result))
    }

    /// Sums of the 512-byte blocks of what was read last.
    pub fn sums(&self) -> String {
        let sums = self.last.chunks(512).map(|block| format!(" {:x}", pattern::sum(block)));
        format!("{} 0{}", self.last.len(), sums.collect::<String>())
    }

    /// `show OFFSET LENGTH`: bytes of what was read last, in hexadecimal.
    pub fn show(&self, args: &Args<'_>) -> Result<String, Stop> {
        let from = args.length(0)?.min(self.last.len());
        let to = (from + args.length(1)?).min(self.last.len());
        let bytes = self.last[from..to].iter().map(|b| format!("{b:02x}"));
        Ok(format!("0 0 bytes={}", bytes.collect::<String>()))
    }

    /// Remembers bytes as read last; their number and sum.
    pub fn seen(&mut self, bytes: Vec<u8>) -> String {
        self.last = bytes;
        format!("{} 0 sum={:x}", self.last.len(), pattern::sum(&self.last))
    }

    /// Moves bytes between a mapping and a pipe, where a bad page is an error and no signal.
    pub fn through_pipe(
        &self,
        address: *mut u8,
        bytes: &mut [u8],
        store: bool,
    ) -> Result<usize, Stop> {
        let mut ends = [0; 2];
        done(sys!(pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC)))?;
        let mut moved = 0;
        let mut failed = None;
        for chunk in bytes.chunks_mut(4096) {
            let there = address.wrapping_add(moved).cast::<c_void>();
            let here = chunk.as_mut_ptr().cast::<c_void>();
            let (first, second) = if store { (here, there) } else { (there, here) };
            let into = sys!(write(ends[1], first, chunk.len()));
            let outof = if into > 0 { sys!(read(ends[0], second, into as usize)) } else { into };
            if outof <= 0 {
                failed = Some(errno());
                break;
            }
            moved += outof as usize;
            if outof as usize != chunk.len() {
                break;
            }
        }
        sys!(close(ends[0]));
        sys!(close(ends[1]));
        match failed {
            Some(error) if moved == 0 => Err(Stop::Errno(error)),
            _ => Ok(moved),
        }
    }
}
