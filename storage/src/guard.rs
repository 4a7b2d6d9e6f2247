//! Keeps a client that truncates its own log from killing the service with SIGBUS.
//!
//! A client holds a writable descriptor of its log segment, so it can make the file shorter than
//! our mapping of it; the next access beyond the new end raises SIGBUS. The handler here replaces
//! a watched mapping that faulted by private zeroes, and marks it: the access goes on, what it
//! reads fails its checksum, and [`is_broken`] tells the service to expel the client. So it is where a log has a hole
//! and the file system below is full. Faults outside of the region go to the handler that was there before.
//!
//! Nothing that a volume holds may turn into zeroes unnoticed: a fault in another segment, whose blocks are
//! taken before they are written to (`backing`), ends the process, in order and with a word. It means that the file system
//! has lost blocks that it had given.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings watched at once; logs beyond that are not guarded.
const SLOTS: usize = 4096;
/// What a service ends with whose region cannot be read or written: the same as of any failure.
const FAILED: libc::c_int = 1;
const LAST_WORDS: &[u8] =
    b"corbel: a block of the region is missing: the file system below is full or has failed; \
    make room there, and the service goes on from where it was\n";

struct Slot {
    /// 0: free; 1: being changed.
    at: AtomicUsize,
    len: AtomicUsize,
    /// It is a client's log.
    log: AtomicBool,
    broken: AtomicBool,
}

static WATCHED: [Slot; SLOTS] = [const {
    Slot {
        at: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        log: AtomicBool::new(false),
        broken: AtomicBool::new(false),
    }
}; SLOTS];

/// The handler that was there before; written once, before ours is installed.
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();

/// Watches a mapping; installs the handler at the first.
pub(crate) fn watch(at: usize, len: usize, log: bool) {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    for slot in &WATCHED {
        if slot.at.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            slot.len.store(len, Ordering::SeqCst);
            slot.log.store(log, Ordering::SeqCst);
            slot.broken.store(false, Ordering::SeqCst);
            slot.at.store(at, Ordering::SeqCst);
            return;
        }
    }
    log_full();
}

fn log_full() {
    // Not reached with the service's limit on clients; said once, since it weakens a promise.
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        eprintln!("corbel: more than {SLOTS} segments are mapped; not all are guarded")
    });
}

/// Ends the watch of a mapping that begins at `at`, before it is unmapped.
pub(crate) fn forget(at: usize) {
    if let Some(slot) = find(at) {
        slot.at.store(0, Ordering::SeqCst);
    }
}

/// Whether the mapping that begins at `at` was found shorter than it had been.
pub(crate) fn is_broken(at: usize) -> bool {
    find(at).is_some_and(|slot| slot.broken.load(Ordering::SeqCst))
}

fn find(at: usize) -> Option<&'static Slot> {
    WATCHED.iter().find(|slot| at > 1 && slot.at.load(Ordering::SeqCst) == at)
}

fn install() {
    // SAFETY: runs once, before the handler can run; both structures are plain data, and zero is
    // a valid value of each field that is not set.
    unsafe {
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut ours.sa_mask);
        libc::sigaction(libc::SIGBUS, &ours, (&raw mut BEFORE).cast());
    }
}

/// Async-signal-safe: atomics and two system calls.
extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler of SIGBUS.
    let fault = unsafe { (*info).si_addr() } as usize;
    for slot in &WATCHED {
        let (at, len) = (slot.at.load(Ordering::SeqCst), slot.len.load(Ordering::SeqCst));
        if at > 1 && fault >= at && fault - at < len {
            if !slot.log.load(Ordering::SeqCst) {
                // SAFETY: both are async-signal-safe; the words are there for ever.
                unsafe {
                    libc::write(2, LAST_WORDS.as_ptr().cast(), LAST_WORDS.len());
                    libc::_exit(FAILED);
                }
            }
            slot.broken.store(true, Ordering::SeqCst);
            // SAFETY: exactly the range of a mapping that is alive: the thread that faulted in it
            // holds it. Replacing it changes contents only, which are the client's to change.
            let done = unsafe {
                libc::mmap(
                    at as *mut libc::c_void,
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if done != libc::MAP_FAILED {
                return;
            }
        }
    }
    // Not ours: the access is repeated under the former handler, which ends the process.
    // SAFETY: BEFORE was written before this handler was installed.
    unsafe {
        libc::sigaction(libc::SIGBUS, (&raw const BEFORE).cast(), std::ptr::null_mut());
    }
}
