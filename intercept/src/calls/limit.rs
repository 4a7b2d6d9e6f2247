//! RLIMIT_FSIZE: no write makes a file longer than the process's limit.

use core::sync::atomic::{AtomicU64, Ordering};

use super::Reply;
use crate::entry::Regs;
use crate::fsys::fs;
use crate::path::Stop;
use crate::sys::{self, err, nr};
use crate::table::InUse;
use crate::thread;

const RLIMIT_FSIZE: usize = 1;
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
    let ret = sys::call4(r.rax, r.rdi, r.rsi, r.rdx, r.r10);
    let which = if r.rax == nr::SETRLIMIT { r.rdi } else { r.rsi };
    if which as u32 as usize == RLIMIT_FSIZE {
        learn();
    }
    Ok(ret)
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
