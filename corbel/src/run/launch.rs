//! The program as it would be without us: it begins with the signal mask and the limits that we were started with, and
//! what is sent to us goes on to it.
#![allow(unsafe_code)] // signal masks, and what a child does before it is the program

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

/// What people and supervisors send to a program that they started.
const PASSED_ON: [i32; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// How this process was started.
pub struct Launch {
    mask: libc::sigset_t,
    awaited: libc::sigset_t,
    limit: Rlimit,
}

impl Launch {
    /// Blocks the signals that are passed on, in this thread and all that it starts from now on: from here on none is lost.
    pub fn begin() -> std::io::Result<Self> {
        let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
        let mut awaited = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset and pthread_sigmask fill the sets that they are given.
        let (mask, awaited) = unsafe {
            libc::sigemptyset(awaited.as_mut_ptr());
            for signal in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(awaited.as_mut_ptr(), signal);
            }
            let done = libc::pthread_sigmask(libc::SIG_BLOCK, awaited.as_ptr(), mask.as_mut_ptr());
            if done != 0 {
                return Err(std::io::Error::from_raw_os_error(done));
            }
            (mask.assume_init(), awaited.assume_init())
        };
        Ok(Self { mask, awaited, limit: getrlimit(Resource::Nofile) })
    }

    /// As many descriptors as this process may have: it keeps some for the session.
    pub fn make_room(&self) {
        // Without it there is less room.
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit { current: self.limit.maximum, maximum: self.limit.maximum },
        );
    }

    /// Starts the program.
    pub fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        let (mask, limit) = (self.mask, self.limit);
        let before_exec = move || {
            setrlimit(Resource::Nofile, Rlimit { ..limit })?;
            // SAFETY: the set was filled by pthread_sigmask.
            match unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut())
            } {
                0 => Ok(()),
                error => Err(std::io::Error::from_raw_os_error(error)),
            }
        };
        // SAFETY: two system calls, which may be made between fork and exec.
        unsafe { command.pre_exec(before_exec) }.spawn()
    }

    /// Waits for its end.
    pub fn wait(&self, mut child: Child) -> std::io::Result<ExitStatus> {
        let pid = rustix::process::Pid::from_child(&child);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: both are of the type that the call wants, and it fills the second if it answers a signal.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.awaited, info.as_mut_ptr()) };
            // SAFETY: zeroes are a siginfo.
            let info = unsafe { info.assume_init() };
            // A terminal's go to its whole foreground group: the program has them already.
            let sent = info.si_code <= 0;
            if sent
                && PASSED_ON.contains(&signal)
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                let _ = kill_process(pid, signal);
            }
        }
    }
}
