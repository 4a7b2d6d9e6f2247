//! A region kept in files: a directory in which each segment is one sparse file, mapped shared.
//!
//! What is always true:
//! - Files have mode 0600 and are opened without following links; nothing but the region's owner
//!   can open them by name. Other processes get descriptors ([`FileRegion::open_segment`]).
//! - A mapping is never longer than its file was when it was made, and this code never makes a
//!   file shorter.
//! - Several processes may open one region. One of them (the holder of [`FileRegion::lock`])
//!   creates and removes segments. The others notice growth at once, and a file put in the place
//!   of another after [`FileRegion::refresh`] (a node that fetches a snapshot makes its tree and
//!   arenas anew).
//!
//! | durability | `write` | `persist` | `fence` |
//! | --- | --- | --- | --- |
//! | pmem | non-temporal stores | write-back by line | store fence |
//! | replicated | copy | nothing | orders the compiler and the CPU |
//! | disk | copy | remembers the range | `msync` of what was remembered |
//!
//! In `disk` mode a failed `msync` condemns the region: the kernel forgets dirty pages that it
//! could not write, so a second attempt that succeeds would prove nothing.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno as OsError;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

use crate::apart::drop_apart;
use crate::backing::{self, Backing, Ballast};
use crate::format::superblock::Durability;
use crate::left::{self, LeftLogs};
use crate::media::{Media, MediaError, Segment, Spare, sum_copied};
use crate::persist;
use crate::untouched;

const PAGE: u64 = 4096;
/// The file whose lock says who copies; it holds nothing.
pub const COPIES_LOCK: &str = "copies.lock";
/// The file that holds the space which a volume promises and has not taken yet (see `backing`).
pub const BALLAST: &str = "ballast";

/// A region in the files of a directory.
#[derive(Debug)]
pub struct FileRegion {
    path: PathBuf,
    dir: OwnedFd,
    durability: Durability,
    maps: RwLock<BTreeMap<Segment, Arc<Map>>>,
    /// Ranges told to `persist` since the last `fence` (disk mode only).
    dirty: Mutex<BTreeMap<Segment, (u64, u64)>>,
    /// Held while a fence writes back, so that a later fence cannot overtake it; holds the first
    /// failure.
    fencing: Mutex<Option<String>>,
    backing: Mutex<Backing>,
    left: Mutex<LeftLogs>,
}

/// See [`FileRegion::copying`].
#[derive(Debug)]
pub struct Copying {
    /// The lock goes with it.
    _file: OwnedFd,
}

/// A shared mapping of a whole segment file.
#[derive(Debug)]
struct Map {
    at: *mut u8,
    len: u64,
    fd: OwnedFd,
    dax: bool,
}

// SAFETY: the mapping is plain shared memory that lives as long as the value; all access goes
// through raw pointers and atomics with ranges checked against `len`.
unsafe impl Send for Map {}
// SAFETY: as above; concurrent access is what the Media contract is about.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        if self.len > 0 {
            crate::guard::forget(self.at as usize);
            // SAFETY: exactly what mmap returned; nothing refers to it after the last owner.
            let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len as usize) };
        }
    }
}

/// A segment's file.
enum Opened {
    /// What is in use is mapped: its descriptor is at hand.
    Mapped(Arc<Map>),
    File(OwnedFd),
}

impl Opened {
    fn fd(&self) -> &OwnedFd {
        match self {
            Self::Mapped(map) => &map.fd,
            Self::File(file) => file,
        }
    }
}

/// The file name of a segment.
pub fn file_name(segment: Segment) -> String {
    match segment {
        Segment::Super => "super".into(),
        Segment::Tree => "tree".into(),
        Segment::Stream => "stream".into(),
        Segment::Clients => "clients".into(),
        Segment::Log(n) => format!("log.{n}"),
        Segment::Arena(n) => format!("arena.{n}"),
    }
}

/// The segment that a file name stands for.
pub fn segment_of(name: &str) -> Option<Segment> {
    let numbered = |text: &str| text.parse::<u32>().ok().filter(|n| n.to_string() == text);
    match name {
        "super" => Some(Segment::Super),
        "tree" => Some(Segment::Tree),
        "stream" => Some(Segment::Stream),
        "clients" => Some(Segment::Clients),
        _ => match name.split_once('.')? {
            ("log", n) => numbered(n).map(Segment::Log),
            ("arena", n) => numbered(n).map(Segment::Arena),
            _ => None,
        },
    }
}

/// Whether a file of that name is a log that counts no more, and that somebody had still.
pub fn is_left(name: &str) -> bool {
    left::is_one(name)
}

fn io(what: &str, path: &Path, error: OsError) -> MediaError {
    MediaError::Io(format!("{what} {}: {error}", path.display()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for FileRegion {
    fn drop(&mut self) {
        // Not left to the descriptor: a child that this process forks a moment before has it, too,
        // and with it the lock, until it executes its program.
        let _ = rustix::fs::flock(&self.dir, FlockOperation::Unlock);
    }
}

impl FileRegion {
    /// Makes the directory (mode 0700; it may exist, but hold no segments) and opens the region.
    pub fn create(path: &Path, durability: Durability) -> Result<Self, MediaError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(OsError::EXIST) => {}
            Err(e) => return Err(io("cannot make the region directory", path, e)),
        }
        let region = Self::open(path, durability)?;
        if region.segments()?.is_empty() {
            return Ok(region);
        }
        let text = format!(
            "{}: a region is there already; remove it or choose another directory",
            path.display()
        );
        Err(MediaError::Io(text))
    }

    /// Opens an existing directory.
    pub fn open(path: &Path, durability: Durability) -> Result<Self, MediaError> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|e| io("cannot open the region directory", path, e))?;
        Ok(Self {
            path: path.to_path_buf(),
            dir,
            durability,
            maps: RwLock::default(),
            dirty: Mutex::default(),
            fencing: Mutex::default(),
            backing: Mutex::default(),
            left: Mutex::default(),
        })
    }

    fn opened(&self, segment: Segment) -> Result<Option<Opened>, MediaError> {
        let mapped =
            self.maps.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned();
        match mapped {
            Some(map) => Ok(Some(Opened::Mapped(map))),
            None => match self.open_file(segment, OFlags::RDONLY) {
                Err(MediaError::Missing(_)) => Ok(None),
                file => Ok(Some(Opened::File(file?))),
            },
        }
    }

    /// Takes the exclusive lock that makes this process the region's service; it is held until
    /// the region is dropped.
    pub fn lock(&self) -> Result<(), MediaError> {
        match rustix::fs::flock(&self.dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(OsError::WOULDBLOCK) => Err(MediaError::Io(format!(
                "{}: another service uses this region; stop it first",
                self.path.display()
            ))),
            Err(e) => Err(io("cannot lock", &self.path, e)),
        }
    }

    fn copies_lock(&self) -> Result<OwnedFd, MediaError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(&self.dir, COPIES_LOCK, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| io("cannot open", &self.path.join(COPIES_LOCK), e))
    }

    /// Says, for as long as the value lives, that this process copies into the region although it
    /// is not its service. To be had before it is asked whether the copies are still wanted.
    pub fn copying(&self) -> Result<Copying, MediaError> {
        let file = self.copies_lock()?;
        // A lock of the process, unlike those of open files, tells whose it is.
        rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive)
            .map_err(|e| io("cannot lock", &self.path.join(COPIES_LOCK), e))?;
        Ok(Copying { _file: file })
    }

    /// The process that holds [`FileRegion::copying`], if any other does.
    pub fn copier(&self) -> Result<Option<i32>, MediaError> {
        let file = self.copies_lock()?;
        // SAFETY: flock is plain numbers, for which zeroes are valid.
        let mut wanted: libc::flock = unsafe { std::mem::zeroed() };
        wanted.l_type = libc::F_WRLCK as libc::c_short;
        wanted.l_whence = libc::SEEK_SET as libc::c_short;
        // SAFETY: the descriptor is open, and the kernel writes into `wanted` alone.
        let failed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut wanted) } != 0;
        if failed {
            let e = std::io::Error::last_os_error();
            let at = self.path.join(COPIES_LOCK);
            return Err(MediaError::Io(format!("{}: cannot ask for the lock: {e}", at.display())));
        }
        Ok((wanted.l_type != libc::F_UNLCK as libc::c_short).then_some(wanted.l_pid))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The durability mode that it was opened with.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Whether a segment is mapped such that stores reach the media without the page cache (`MAP_SYNC`).
    pub fn is_dax(&self, segment: Segment) -> Result<bool, MediaError> {
        Ok(self.map(segment, 0)?.dax)
    }

    /// Whether the directory can hold what the durability mode promises: an error says why not. In `pmem` mode files must
    /// be mapped without a page cache between (DAX, docs/assumptions.md A7); a service that goes on without it
    /// would acknowledge what a power cut takes back.
    pub fn keeps_its_promise(&self) -> Result<(), MediaError> {
        if self.durability != Durability::Pmem {
            return Ok(());
        }
        let what = "cannot try a mapping in";
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let probe = rustix::fs::open(&self.path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| io(what, &self.path, e))?;
        rustix::fs::ftruncate(&probe, PAGE).map_err(|e| io(what, &self.path, e))?;
        let (both, bytes) = (ProtFlags::READ | ProtFlags::WRITE, PAGE as usize);
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        // SAFETY: a new mapping at an address that the kernel chooses, unmapped at once, which nobody has seen.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, both, flags, &probe, 0)
                .and_then(|at| rustix::mm::munmap(at, bytes))
        };
        mapped.map_err(|_| {
            let text = "durability = \"pmem\" needs persistent memory that can be mapped (MAP_SYNC, on a DAX file \
                system), and this directory has none: what fsync has acknowledged would not survive a power cut; \
                use \"disk\" here, or \"replicated\" in memory";
            MediaError::Io(format!("{}: {text}", self.path.display()))
        })
    }

    /// Whether a log segment was made shorter by its client while it was mapped here: what it
    /// holds now is worthless (see `guard`).
    pub fn is_broken(&self, segment: Segment) -> Result<bool, MediaError> {
        Ok(crate::guard::is_broken(self.map(segment, 0)?.at as usize))
    }

    /// Drops the mappings of segments that another process has removed since they were mapped,
    /// also if a new file has their name. To be called wherever that may have happened; it costs a
    /// system call a mapping.
    pub fn refresh(&self) -> Result<(), MediaError> {
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        let mut failed = None;
        maps.retain(|_, map| match rustix::fs::fstat(&map.fd) {
            Ok(stat) => stat.st_nlink > 0,
            Err(e) => {
                failed = Some(e);
                true
            }
        });
        failed.map_or(Ok(()), |e| Err(io("cannot stat a segment of", &self.path, e)))
    }

    /// Bytes that the file system below can still take, if it says so.
    pub fn free_bytes(&self) -> Result<Option<u64>, MediaError> {
        let v = rustix::fs::fstatvfs(&self.dir).map_err(|e| io("cannot stat", &self.path, e))?;
        // A tmpfs without a limit has no number of blocks.
        Ok((v.f_blocks > 0).then(|| v.f_bavail.saturating_mul(v.f_frsize)))
    }

    /// Reserves what tree and arenas may take in all.
    pub fn reserve(&self, bytes: u64) -> Result<(), MediaError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        self.keep_ballast(flags, bytes).map(|_| ())
    }

    /// Takes up what [`FileRegion::reserve`] has reserved, if it has; says how many bytes are missing.
    pub fn take_up_reserve(&self, bytes: u64) -> Result<u64, MediaError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        self.keep_ballast(flags, bytes)
    }

    fn keep_ballast(&self, flags: OFlags, bytes: u64) -> Result<u64, MediaError> {
        let path = self.path.join(BALLAST);
        let file = match rustix::fs::openat(&self.dir, BALLAST, flags, Mode::RUSR | Mode::WUSR) {
            Err(OsError::NOENT) => return Ok(0),
            opened => opened.map_err(|e| io("cannot open", &path, e))?,
        };
        let mut used = 0;
        for segment in self.segments()? {
            if backing::is_promised(segment) {
                let file = self.open_file(segment, OFlags::RDONLY)?;
                used += backing::taken(&file).map_err(|e| io("cannot stat", &self.path, e))?;
            }
        }
        // What is written in the file may have been cut short: it counts as far as it is there.
        let wanted = bytes.saturating_sub(used);
        let mut ballast = Ballast { file, bytes: 0, wanted };
        let settled = ballast.settle();
        if settled.is_err() {
            ballast.bytes = self.ballast_size(&ballast.file)?;
        }
        let missing = wanted.saturating_sub(ballast.bytes);
        lock(&self.backing).ballast = Some(ballast);
        match settled {
            Err(e) if flags.contains(OFlags::CREATE) => {
                let _ = rustix::fs::unlinkat(&self.dir, BALLAST, rustix::fs::AtFlags::empty());
                Err(io("cannot reserve space in", &path, e))
            }
            _ => Ok(missing),
        }
    }

    fn ballast_size(&self, file: &OwnedFd) -> Result<u64, MediaError> {
        backing::taken(file).map_err(|e| io("cannot stat", &self.path.join(BALLAST), e))
    }

    fn no_room(&self, segment: Segment, error: OsError) -> MediaError {
        let text = "what the volume has taken on finds no room in the file system below: make room there, and the node \
            goes on from where it was";
        let path = self.path.join(file_name(segment));
        MediaError::Io(format!("{}: {error}: {text}", path.display()))
    }

    /// A fresh descriptor of a segment, to be handed to another process.
    pub fn open_segment(&self, segment: Segment, writable: bool) -> Result<OwnedFd, MediaError> {
        self.open_file(segment, if writable { OFlags::RDWR } else { OFlags::RDONLY })
    }

    fn open_file(&self, segment: Segment, flags: OFlags) -> Result<OwnedFd, MediaError> {
        let name = file_name(segment);
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.dir, &name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => Ok(fd),
            Err(OsError::NOENT) => Err(MediaError::Missing(segment)),
            Err(e) => Err(io("cannot open", &self.path.join(name), e)),
        }
    }

    /// Knows nothing any more of a segment that goes.
    /// Whoever still uses the mapping has it.
    fn forget(&self, segment: Segment) -> Option<Arc<Map>> {
        lock(&self.backing).forget_all(segment);
        lock(&self.dirty).remove(&segment);
        self.maps.write().unwrap_or_else(PoisonError::into_inner).remove(&segment)
    }

    fn file_size(&self, segment: Segment, fd: &OwnedFd) -> Result<u64, MediaError> {
        let stat = rustix::fs::fstat(fd)
            .map_err(|e| io("cannot stat", &self.path.join(file_name(segment)), e))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// The mapping of a segment, made or made anew when it is shorter than `least`.
    fn map(&self, segment: Segment, least: u64) -> Result<Arc<Map>, MediaError> {
        {
            let maps = self.maps.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(map) = maps.get(&segment)
                && map.len >= least.max(1)
            {
                return Ok(map.clone());
            }
        }
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        let fd = self.open_file(segment, OFlags::RDWR)?;
        let len = self.file_size(segment, &fd)?;
        if let Some(map) = maps.get(&segment)
            && map.len >= len
        {
            return Ok(map.clone());
        }
        let map = Arc::new(self.map_file(segment, fd, len)?);
        maps.insert(segment, map.clone());
        Ok(map)
    }

    fn map_file(&self, segment: Segment, fd: OwnedFd, len: u64) -> Result<Map, MediaError> {
        let path = self.path.join(file_name(segment));
        let Ok(bytes) = usize::try_from(len) else {
            return Err(io("cannot map", &path, OsError::FBIG));
        };
        if bytes == 0 {
            return Ok(Map { at: std::ptr::null_mut(), len: 0, fd, dax: false });
        }
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let map = |flags| {
            // SAFETY: a new mapping at an address that the kernel chooses.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, both, flags, &fd, 0) }
        };
        let synced = match self.durability {
            Durability::Pmem => map(MapFlags::SHARED_VALIDATE | MapFlags::SYNC).ok(),
            _ => None,
        };
        let (at, dax) = match synced {
            Some(at) => (at, true),
            None => (map(MapFlags::SHARED).map_err(|e| io("cannot map", &path, e))?, false),
        };
        crate::guard::watch(at as usize, bytes, matches!(segment, Segment::Log(_)));
        Ok(Map { at: at.cast(), len, fd, dax })
    }

    /// The mapping of a segment, with `offset + len` checked to lie inside.
    fn range(&self, segment: Segment, offset: u64, len: u64) -> Result<Arc<Map>, MediaError> {
        let end = offset.checked_add(len);
        let map = self.map(segment, end.unwrap_or(0))?;
        match end {
            Some(end) if end <= map.len => Ok(map),
            _ => Err(MediaError::OutOfRange { segment, offset, len, size: map.len }),
        }
    }

    fn word(&self, segment: Segment, offset: u64) -> Result<Arc<Map>, MediaError> {
        if !offset.is_multiple_of(8) {
            return Err(MediaError::Io(format!("{segment:?}: word at {offset} is not aligned")));
        }
        self.range(segment, offset, 8)
    }

    /// Writes back what `persist` was told, one range a segment.
    fn sync(&self) -> Result<(), MediaError> {
        let mut failed = lock(&self.fencing);
        if let Some(text) = &*failed {
            return Err(MediaError::Io(text.clone()));
        }
        let dirty = std::mem::take(&mut *lock(&self.dirty));
        for (segment, (from, to)) in dirty {
            let map = match self.range(segment, from, to - from) {
                Ok(map) => map,
                Err(MediaError::Missing(_)) => continue,
                Err(e) => return Err(e),
            };
            let from = from & !(PAGE - 1);
            // SAFETY: the range was checked to lie inside the mapping, which `map` keeps alive.
            let done = unsafe {
                let at = map.at.add(from as usize).cast();
                rustix::mm::msync(at, (to - from) as usize, MsyncFlags::SYNC)
            };
            if let Err(e) = done {
                let path = self.path.join(file_name(segment));
                let text = format!(
                    "cannot write back {}: {e}; what was written last may be lost: restart the \
                     node, and let it recover from its log and its replicas",
                    path.display()
                );
                *failed = Some(text.clone());
                return Err(MediaError::Io(text));
            }
        }
        Ok(())
    }
}

impl Map {
    fn at(&self, offset: u64) -> *mut u8 {
        // SAFETY: only called with offsets that `range` has checked.
        unsafe { self.at.add(offset as usize) }
    }

    fn atomic(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: in range and aligned (`word` has checked both); every process reaches these
        // words atomically or treats them as bytes to be judged after copying.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

impl Media for FileRegion {
    fn size(&self, segment: Segment) -> Result<u64, MediaError> {
        let fd = self.open_file(segment, OFlags::RDONLY)?;
        self.file_size(segment, &fd)
    }

    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        let map = self.range(segment, offset, buf.len() as u64)?;
        // SAFETY: the source range is mapped (checked), the target is a slice of our own. Another
        // process may be storing to the source: then the copy holds a mixture, which the caller
        // judges by its checksum.
        unsafe { std::ptr::copy_nonoverlapping(map.at(offset), buf.as_mut_ptr(), buf.len()) };
        Ok(())
    }

    fn append(
        &self,
        segment: Segment,
        offset: u64,
        len: usize,
        to: &mut Vec<u8>,
    ) -> Result<(), MediaError> {
        let map = self.range(segment, offset, len as u64)?;
        to.reserve(len);
        // SAFETY: as above; the target is spare capacity of a vector of our own, which is that long.
        unsafe {
            std::ptr::copy_nonoverlapping(map.at(offset), to.as_mut_ptr().add(to.len()), len);
            to.set_len(to.len() + len);
        }
        Ok(())
    }

    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        let map = self.range(segment, offset, data.len() as u64)?;
        // SAFETY: the target range is mapped (checked) and no reference covers it.
        unsafe {
            match self.durability {
                Durability::Pmem => persist::copy_persistent(map.at(offset), data),
                _ => std::ptr::copy_nonoverlapping(data.as_ptr(), map.at(offset), data.len()),
            }
        }
        Ok(())
    }

    fn persist(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        match self.durability {
            Durability::Pmem => {
                let map = self.range(segment, offset, len)?;
                // SAFETY: a mapped range.
                unsafe { persist::write_back(map.at(offset), len as usize) };
            }
            Durability::Disk if len > 0 => {
                self.range(segment, offset, len)?;
                let mut dirty = lock(&self.dirty);
                let range = dirty.entry(segment).or_insert((offset, offset + len));
                *range = (range.0.min(offset), range.1.max(offset + len));
            }
            _ => {}
        }
        Ok(())
    }

    fn fence(&self) -> Result<(), MediaError> {
        match self.durability {
            Durability::Pmem => persist::fence(),
            Durability::Replicated => std::sync::atomic::fence(Ordering::SeqCst),
            Durability::Disk => self.sync()?,
        }
        Ok(())
    }

    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        // In one order with `store64`: the service stores a word, then looks what the client did before.
        Ok(self.word(segment, offset)?.atomic(offset).load(Ordering::SeqCst))
    }

    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError> {
        self.word(segment, offset)?.atomic(offset).store(value, Ordering::SeqCst);
        Ok(())
    }

    fn cas64(
        &self,
        segment: Segment,
        offset: u64,
        expect: u64,
        value: u64,
    ) -> Result<u64, MediaError> {
        let map = self.word(segment, offset)?;
        let (yes, no) = (Ordering::SeqCst, Ordering::SeqCst);
        Ok(map.atomic(offset).compare_exchange(expect, value, yes, no).unwrap_or_else(|v| v))
    }

    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        let source = self.range(from.0, from.1, len)?;
        let target = self.range(to.0, to.1, len)?;
        if from.0 == to.0 && from.1 < to.1 + len && to.1 < from.1 + len {
            return Err(MediaError::Io(format!("{:?}: copy onto itself", from.0)));
        }
        if self.durability != Durability::Pmem {
            // SAFETY: both ranges are mapped and do not overlap (checked above).
            unsafe {
                std::ptr::copy_nonoverlapping(source.at(from.1), target.at(to.1), len as usize);
            }
            return Ok(());
        }
        // Through a buffer that stays in the cache: the source may change under us, so no slice
        // may cover it.
        let mut buffer = [0u8; PAGE as usize];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(PAGE) as usize;
            // SAFETY: parts of the two checked ranges.
            unsafe {
                let at = source.at(from.1 + done);
                std::ptr::copy_nonoverlapping(at, buffer.as_mut_ptr(), n);
                persist::copy_persistent(target.at(to.1 + done), &buffer[..n]);
            }
            done += n as u64;
        }
        Ok(())
    }

    fn sum(&self, segment: Segment, offset: u64, len: u64, seed: u32) -> Result<u32, MediaError> {
        let map = self.range(segment, offset, len)?;
        // SAFETY: the range is mapped (checked).
        let (done, crc) =
            unsafe { base::checksum::crc32c_shared(seed, map.at(offset), len as usize) };
        let done = done as u64;
        if done == len {
            Ok(crc)
        } else {
            sum_copied(self, segment, (offset + done, len - done), crc)
        }
    }

    fn copy_run(&self, from: &[(Segment, u64, u64)], to: (Segment, u64)) -> Result<(), MediaError> {
        let len = from.iter().fold(0u64, |all, piece| all.saturating_add(piece.2));
        let target = self.range(to.0, to.1, len)?;
        let mut at = to.1;
        let written = self.durability != Durability::Pmem
            && len >= untouched::WORTH_ASKING
            // (What a file goes on with may begin in a block that it has.)
            && !untouched::has_content(target.at(at + len - 1));
        if written {
            let mut run = untouched::Run::new();
            for &(segment, offset, bytes) in from {
                let source = self.range(segment, offset, bytes)?;
                run.push(source.at(offset), bytes, source);
            }
            let done = run.write(&target.fd, at).map_err(|e| match e {
                OsError::NOSPC | OsError::DQUOT => self.no_room(to.0, e),
                e => io("cannot write to", &self.path.join(file_name(to.0)), e),
            })?;
            // What the kernel did not take in one go is copied as ever.
            at += done;
        }
        let mut skip = at - to.1;
        for &(segment, offset, bytes) in from {
            let gone = skip.min(bytes);
            skip -= gone;
            if gone < bytes {
                self.copy((segment, offset + gone), (to.0, at), bytes - gone)?;
                at += bytes - gone;
            }
        }
        Ok(())
    }

    fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError> {
        let path = self.path.join(file_name(segment));
        let fd = self.open_file(segment, OFlags::RDWR | OFlags::CREATE)?;
        let size = size.div_ceil(PAGE).saturating_mul(PAGE);
        let short = self.file_size(segment, &fd)? < size;
        if short {
            rustix::fs::ftruncate(&fd, size).map_err(|e| io("cannot extend", &path, e))?;
        }
        if backing::is_whole(segment) {
            let mut backing = lock(&self.backing);
            for run in backing.missing(segment, 0, size) {
                backing.take(segment, &fd, run).map_err(|e| self.no_room(segment, e))?;
            }
        }
        if short && self.durability == Durability::Disk {
            rustix::fs::fsync(&fd).map_err(|e| io("cannot sync", &path, e))?;
            rustix::fs::fsync(&self.dir).map_err(|e| io("cannot sync", &self.path, e))?;
        }
        Ok(())
    }

    fn discard(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        let map = self.range(segment, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let mut backing = lock(&self.backing);
        let stat = |e| io("cannot stat", &self.path.join(file_name(segment)), e);
        let before = backing::taken(&map.fd).map_err(stat)?;
        match rustix::fs::fallocate(&map.fd, flags, offset, len) {
            Ok(()) => {
                backing.forget(segment, offset, len);
                let after = backing::taken(&map.fd).map_err(stat)?;
                if backing::is_promised(segment) {
                    backing.gave_back(before.saturating_sub(after));
                }
                Ok(())
            }
            Err(OsError::OPNOTSUPP | OsError::NOSYS) => {
                // SAFETY: a mapped range that no reference covers.
                unsafe { std::ptr::write_bytes(map.at(offset), 0, len as usize) };
                Ok(())
            }
            Err(e) => Err(io("cannot discard in", &self.path.join(file_name(segment)), e)),
        }
    }

    fn back(&self, ranges: &[(Segment, u64, u64)]) -> Result<(), MediaError> {
        let mut backing = lock(&self.backing);
        for &(segment, offset, len) in ranges {
            let missing = backing.missing(segment, offset, len);
            if missing.is_empty() {
                continue;
            }
            let map = self.range(segment, offset, len)?;
            for run in missing {
                backing.take(segment, &map.fd, run).map_err(|e| self.no_room(segment, e))?;
            }
        }
        Ok(())
    }

    fn spare(&self) -> Result<Option<Spare>, MediaError> {
        let Some(free) = self.free_bytes()? else { return Ok(None) };
        let (mut data, mut tree, mut logs) = (0, 0, 0u64);
        for segment in self.segments()? {
            let Some(opened) = self.opened(segment)? else { continue };
            let file = opened.fd();
            let taken = backing::taken(file).map_err(|e| io("cannot stat", &self.path, e))?;
            // A log's file has the size that its client gives it, until that is seen; what it may have is what is mapped.
            let size = match (&opened, segment) {
                (Opened::Mapped(map), Segment::Log(_)) => map.len,
                _ => self.file_size(segment, file)?,
            };
            let missing = size.saturating_sub(taken);
            match segment {
                Segment::Arena(_) => data += taken,
                Segment::Tree => tree = missing,
                Segment::Log(_) => logs += missing,
                _ => {}
            }
        }
        logs += lock(&self.left).missing();
        let ballast = lock(&self.backing).ballast.as_ref().map(|ballast| ballast.bytes);
        // A tree that nothing is reserved for grows with what there is: some of it is kept.
        let kept = if ballast.is_some() { 0 } else { tree.min(free / 8) };
        let reserved = ballast.unwrap_or(0).saturating_sub(tree);
        let free = free.saturating_sub(logs).saturating_sub(kept);
        Ok(Some(Spare { data: data + reserved, reserved, free }))
    }

    fn taken_from(&self, offset: u64) -> Result<u64, MediaError> {
        let mut bytes = 0;
        for segment in self.segments()? {
            if let Segment::Arena(_) = segment
                && let Some(opened) = self.opened(segment)?
            {
                let taken = backing::taken_from(opened.fd(), offset);
                bytes += taken.map_err(|e| io("cannot seek in", &self.path, e))?;
            }
        }
        Ok(bytes)
    }

    fn mend(&self, segment: Segment, size: u64) -> Result<bool, MediaError> {
        let map = self.map(segment, 0)?;
        let path = || self.path.join(file_name(segment));
        if left::is_as_it_was(&map.fd, size).map_err(|e| io("cannot stat", &path(), e))? {
            return Ok(false);
        }
        rustix::fs::ftruncate(&map.fd, size).map_err(|e| io("cannot cut", &path(), e))?;
        Ok(true)
    }

    fn leave(&self, log: Segment, user: u32, bytes: u64) -> Result<bool, MediaError> {
        // (Who has it mapped has it, as far as anybody can tell.)
        drop(self.forget(log));
        let (name, file) = (file_name(log), self.open_file(log, OFlags::RDWR)?);
        // (The last descriptor of it, if nobody else has one: with it go its pages.)
        let last = file.try_clone().ok();
        let left = lock(&self.left).leave(&self.dir, &name, (file, user, bytes));
        drop_apart(last);
        left.map_err(|e| io("cannot leave", &self.path.join(name), e))
    }

    fn look_at_left(&self) -> Result<BTreeMap<u32, usize>, MediaError> {
        let users = lock(&self.left).look(&self.dir);
        users.map_err(|e| io("cannot look after logs that were left in", &self.path, e))
    }

    fn remove(&self, segment: Segment) -> Result<(), MediaError> {
        let name = file_name(segment);
        self.forget(segment);
        match rustix::fs::unlinkat(&self.dir, &name, rustix::fs::AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(OsError::NOENT) => Err(MediaError::Missing(segment)),
            Err(e) => Err(io("cannot remove", &self.path.join(name), e)),
        }
    }

    fn segments(&self) -> Result<Vec<Segment>, MediaError> {
        let failed = |e| io("cannot list", &self.path, e);
        let mut found = Vec::new();
        for entry in rustix::fs::Dir::read_from(self.dir.as_fd()).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            found.extend(entry.file_name().to_str().ok().and_then(segment_of));
        }
        found.sort_unstable();
        Ok(found)
    }

    fn wake(&self, segment: Segment, offset: u64) -> Result<(), MediaError> {
        if !offset.is_multiple_of(4) {
            return Err(MediaError::Io(format!("{segment:?}: futex at {offset} is not aligned")));
        }
        let map = self.range(segment, offset, 4)?;
        // SAFETY: a mapped, aligned word.
        let word = unsafe { AtomicU32::from_ptr(map.at(offset).cast()) };
        rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32)
            .map_err(|e| io("cannot wake a waiter in", &self.path, e))?;
        Ok(())
    }
}
