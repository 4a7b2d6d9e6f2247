//! What a thread has used: time of a processor, and whether it has waited.
#![allow(unsafe_code)] // clocks of other threads have no safe wrapper

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;

/// The calling thread, or another of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Thread {
    clock: libc::clockid_t,
    id: i32,
}

thread_local! {
    static OWN: Cell<Option<Thread>> = const { Cell::new(None) };
    /// What the kernel says of how the calling thread was let run; None inside: it does not say.
    static RUN: RefCell<Option<Option<File>>> = const { RefCell::new(None) };
}

/// Nanoseconds for which the calling thread wanted a processor that others had. None where the kernel does not say so.
fn kept_off() -> Option<u64> {
    RUN.with_borrow_mut(|run| {
        let open = || File::open("/proc/thread-self/schedstat").ok();
        let mut text = [0; 96];
        let had = run.get_or_insert_with(open).as_ref()?.read_at(&mut text, 0).ok()?;
        // Time of a processor, time in which it wanted one, how often it got one.
        let text = std::str::from_utf8(&text[..had]).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    })
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
    /// Nanoseconds for which it wanted one, and others had it. None where another thread asked, or the kernel does not say so.
    pub kept_off: Option<u64>,
    /// None where another thread asked.
    pub switches: Option<Switches>,
}

impl Reading {
    /// Of the calling thread.
    pub(crate) fn own() -> Option<Self> {
        let processor = Thread::own().processor()?;
        Some(Self { processor, kept_off: kept_off(), switches: Some(switches()) })
    }

    /// Of a thread. None if it is gone.
    pub(crate) fn of(thread: Thread) -> Option<Self> {
        if thread.is_own() {
            return Self::own();
        }
        Some(Self { processor: thread.processor()?, kept_off: None, switches: None })
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

    /// What others took is told from what it slept: on however many processors, threads that want more than there are keep each other off.
    #[test]
    fn who_is_kept_from_the_processor_is_seen_to_be() {
        let Some(before) = kept_off() else { return };
        let (threads, over) = (rivals(), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let since = Instant::now();
            while kept_off().unwrap() - before < 5_000_000 {
                assert!(since.elapsed() < Duration::from_secs(120));
                std::hint::spin_loop();
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let (before, begun) = (kept_off().unwrap(), Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        let slept = u64::try_from(begun.elapsed().as_nanos()).unwrap();
        assert!(kept_off().unwrap() - before < slept, "to sleep is not to want one");
    }

    /// More than there are processors.
    fn rivals() -> usize {
        std::thread::available_parallelism().map_or(8, |n| 2 * n.get())
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
