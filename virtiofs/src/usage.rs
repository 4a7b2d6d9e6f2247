//! What a thread has used: time of a processor, and whether it has waited.
#![allow(unsafe_code)] // clocks of other threads have no safe wrapper

use std::cell::Cell;
use std::mem::MaybeUninit;

/// The calling thread, or another of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Thread {
    clock: libc::clockid_t,
    id: i32,
}

thread_local! {
    static OWN: Cell<Option<Thread>> = const { Cell::new(None) };
}

impl Thread {
    /// The calling one.
    pub(crate) fn own() -> Self {
        OWN.get().unwrap_or_else(|| {
            let mut clock = libc::CLOCK_THREAD_CPUTIME_ID;
            // SAFETY: the thread is there, it calls; and the clock's number is written to a place of ours.
            let _ = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
            let own = Self { clock, id: rustix::thread::gettid().as_raw_nonzero().get() };
            OWN.set(Some(own));
            own
        })
    }

    /// Whether it is the calling one.
    pub(crate) fn is_own(self) -> bool {
        OWN.get() == Some(self)
    }

    /// Nanoseconds for which it had a processor. None if it is gone.
    pub(crate) fn processor(self) -> Option<u64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // The own one is found without a search.
        let clock = if self.is_own() { libc::CLOCK_THREAD_CPUTIME_ID } else { self.clock };
        // SAFETY: the kernel writes one timespec, and refuses a clock that is not there.
        let got = unsafe { libc::clock_gettime(clock, &raw mut time) };
        let (seconds, rest) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
        (got == 0).then(|| seconds * 1_000_000_000 + rest)
    }

    /// Whether it sleeps, and does not only want for a processor. None where the kernel does not say so.
    pub(crate) fn sleeps(self) -> Option<bool> {
        let text = std::fs::read_to_string(format!("/proc/self/task/{}/stat", self.id)).ok()?;
        // Its name is before that, in parentheses, and may have any in it.
        let state = text.rsplit_once(')')?.1.trim_start().chars().next()?;
        Some(state != 'R')
    }
}

/// How often the calling thread has let go of its processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Switches {
    /// To wait for something.
    pub slept: i64,
    /// Since others wanted it.
    pub pushed: i64,
}

/// Those of the calling thread so far.
fn switches() -> Switches {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one rusage, all of whose fields are numbers, of which zero is one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    Switches { slept: usage.ru_nvcsw, pushed: usage.ru_nivcsw }
}

/// What a thread has used so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reading {
    /// Nanoseconds of a processor.
    pub processor: u64,
    /// None where another thread asked.
    pub switches: Option<Switches>,
}

impl Reading {
    /// Of the calling thread.
    pub(crate) fn own() -> Option<Self> {
        let processor = Thread::own().processor()?;
        Some(Self { processor, switches: Some(switches()) })
    }

    /// Of a thread. None if it is gone.
    pub(crate) fn of(thread: Thread) -> Option<Self> {
        if thread.is_own() {
            return Self::own();
        }
        Some(Self { processor: thread.processor()?, switches: None })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn work() {
        let (begun, since) = (Thread::own().processor().unwrap(), Instant::now());
        while Thread::own().processor().unwrap() - begun < 5_000_000 {
            assert!(since.elapsed() < Duration::from_secs(60));
        }
    }

    #[test]
    fn who_sleeps_uses_no_processor_and_has_waited() {
        let own = Thread::own();
        assert!(own.is_own());
        let (before, slept) = (own.processor().unwrap(), switches().slept);
        std::thread::sleep(Duration::from_millis(200));
        assert!(own.processor().unwrap() - before < 100_000_000);
        assert!(switches().slept > slept);
        assert_eq!(own.sleeps(), Some(false));
        work();
        assert!(own.processor().unwrap() - before >= 5_000_000);
    }

    #[test]
    fn another_thread_is_seen_until_it_is_gone() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            work();
            tell.send(Thread::own()).unwrap();
            let _ = ended.recv();
        });
        let other = told.recv().unwrap();
        assert!(!other.is_own());
        assert!(other.processor().unwrap() >= 5_000_000);
        let since = Instant::now();
        while other.sleeps() != Some(true) {
            assert!(since.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        drop(end);
        thread.join().unwrap();
        // The kernel may need a moment to take it apart.
        let since = Instant::now();
        while other.processor().is_some() {
            assert!(since.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
}
