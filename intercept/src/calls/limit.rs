//! Limits of the process. RLIMIT_FSIZE: no write makes a file longer. RLIMIT_NOFILE: where the program has used up
//! its numbers, the engine makes room for descriptors of its own above them, for a moment.

use core::sync::atomic::{AtomicU64, Ordering};

use client::mutex::Mutex;

use super::Reply;
use crate::entry::Regs;
use crate::fsys::fs;
use crate::path::Stop;
use crate::sys::{self, err, nr};
use crate::table::{self, InUse};
use crate::thread;

const RLIMIT_FSIZE: usize = 1;
const RLIMIT_NOFILE: usize = 7;
const SIGXFSZ: usize = 25;

/// The soft limit; most processes have none.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Asks the kernel for the limit: when the library is loaded, and whenever it may have changed.
pub fn learn() {
    let mut limit = [u64::MAX; 2];
    sys::call4(nr::PRLIMIT64, 0, RLIMIT_FSIZE, 0, (&raw mut limit) as usize);
    LIMIT.store(limit[0], Ordering::Relaxed);
}

/// `setrlimit`, `prlimit64`. (A limit that another process sets is seen at the next of these, or exec.)
pub fn set(r: &Regs) -> Reply {
    let which = if r.rax == nr::SETRLIMIT { r.rdi } else { r.rsi };
    let call = || sys::call4(r.rax, r.rdi, r.rsi, r.rdx, r.r10);
    if which as u32 as usize == RLIMIT_NOFILE {
        // What the program sees and sets is its own limit.
        let mut room = ROOM.lock();
        return Ok(room.without(call));
    }
    let ret = call();
    // A child of vfork has limits of its own, and its parent's memory.
    if which as u32 as usize == RLIMIT_FSIZE && !table::in_vfork() {
        learn();
    }
    Ok(ret)
}

/// Whether, and from what limit, there is more room than the program has.
#[derive(Debug)]
struct Room {
    users: u32,
    limit: [u64; 2],
}

static ROOM: Mutex<Room> = Mutex::new(Room { users: 0, limit: [0; 2] });

impl Room {
    fn raise(&mut self) {
        sys::call4(nr::PRLIMIT64, 0, RLIMIT_NOFILE, 0, (&raw mut self.limit) as usize);
        let most = [self.limit[1]; 2];
        sys::call4(nr::PRLIMIT64, 0, RLIMIT_NOFILE, (&raw const most) as usize, 0);
    }

    fn lower(&self) {
        sys::call4(nr::PRLIMIT64, 0, RLIMIT_NOFILE, (&raw const self.limit) as usize, 0);
    }

    fn without<T>(&mut self, what: impl FnOnce() -> T) -> T {
        if self.users == 0 {
            return what();
        }
        self.lower();
        let done = what();
        self.raise();
        done
    }
}

/// Makes room for descriptors of the engine's (the soft limit becomes the hard one), or takes it back.
pub fn room(more: bool) {
    let mut room = ROOM.lock();
    if more {
        room.users += 1;
        if room.users == 1 {
            room.raise();
        }
    } else {
        room.users -= 1;
        if room.users == 0 {
            room.lower();
        }
    }
}

/// Does what takes a descriptor, once more with room for it if there was none.
pub fn with_room(mut what: impl FnMut() -> isize) -> isize {
    let done = what();
    if done != err::MFILE {
        return done;
    }
    room(true);
    let done = what();
    room(false);
    done
}

/// Keeps it as it is, for a fork.
pub fn locked() -> impl Drop {
    ROOM.lock()
}

/// In a fork's child, whose other threads are not there.
pub fn forked() {
    let mut room = ROOM.lock();
    if room.users > 0 {
        room.users = 0;
        room.lower();
    }
}

/// Whether there is one.
pub fn is_set() -> bool {
    LIMIT.load(Ordering::Relaxed) != u64::MAX
}

/// How much of `data` may be written at `at`, or at the file's end.
#[inline(always)]
pub fn cut<'a>(file: &InUse, at: u64, append: bool, data: &'a [u8]) -> Result<&'a [u8], Stop> {
    let limit = LIMIT.load(Ordering::Relaxed);
    if limit == u64::MAX { Ok(data) } else { cut_at(limit, file, at, append, data) }
}

#[cold]
fn cut_at<'a>(
    limit: u64,
    file: &InUse,
    at: u64,
    append: bool,
    data: &'a [u8],
) -> Result<&'a [u8], Stop> {
    let at = if append { fs()?.fgetattr(file.handle()?)?.size } else { at };
    let room = limit.saturating_sub(at);
    if room == 0 && !data.is_empty() {
        return Err(exceeded());
    }
    Ok(&data[..data.len().min(usize::try_from(room).unwrap_or(usize::MAX))])
}

/// Whether a file of `now` bytes may become `size` bytes long.
pub fn may_become(size: u64, now: impl FnOnce() -> Result<u64, Stop>) -> Result<(), Stop> {
    if size > LIMIT.load(Ordering::Relaxed) && size > now()? { Err(exceeded()) } else { Ok(()) }
}

/// Whoever wants more gets a signal besides the error.
fn exceeded() -> Stop {
    let (process, thread) = (sys::call0(nr::GETPID) as usize, thread::tid() as usize);
    sys::call3(nr::TGKILL, process, thread, SIGXFSZ);
    Stop::Error(err::FBIG)
}
