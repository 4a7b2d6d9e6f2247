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
    /// Whether ends of children were ignored: then the program ignores them, too, and we do not, or nobody could wait for it.
    ignored: bool,
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
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeroes are an action, the default one; the call fills the second.
        let before = unsafe {
            let usual = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            if libc::sigaction(libc::SIGCHLD, &raw const usual, before.as_mut_ptr()) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            before.assume_init()
        };
        let ignored = before.sa_sigaction == libc::SIG_IGN;
        Ok(Self { mask, awaited, ignored, limit: getrlimit(Resource::Nofile) })
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
        let (mask, limit, ignored) = (self.mask, self.limit, self.ignored);
        let before_exec = move || {
            if ignored {
                // SAFETY: no handler.
                unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
            }
            setrlimit(Resource::Nofile, Rlimit { ..limit })?;
            // SAFETY: the set was filled by pthread_sigmask.
            match unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut())
            } {
                0 => Ok(()),
                error => Err(std::io::Error::from_raw_os_error(error)),
            }
        };
        // SAFETY: three system calls, which may be made between fork and exec.
        let command = unsafe { command.pre_exec(before_exec) };
        // What came while there was no program it gets now, a terminal's too.
        let early = self.pending();
        let child = command.spawn()?;
        let pid = rustix::process::Pid::from_child(&child);
        for signal in early.into_iter().filter_map(Signal::from_named_raw) {
            let _ = kill_process(pid, signal);
        }
        Ok(child)
    }

    /// What has come and is to be passed on.
    fn pending(&self) -> Vec<i32> {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut all = Vec::new();
        loop {
            // SAFETY: both are of the types that the call wants.
            let signal = unsafe {
                libc::sigtimedwait(&raw const self.awaited, std::ptr::null_mut(), &raw const now)
            };
            if signal < 0 {
                return all;
            }
            if PASSED_ON.contains(&signal) {
                all.push(signal);
            }
        }
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
            // A terminal's go to its whole foreground group: the program has them already. When it hangs up only the session's leader
            // is told, which the program would be.
            let sent = match info.si_code {
                // SAFETY: a signal that somebody has sent names the sender.
                ..=0 => !is_below(unsafe { info.si_pid() }, pid),
                _ => signal == libc::SIGHUP && leads_session(),
            };
            if sent
                && PASSED_ON.contains(&signal)
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                let _ = kill_process(pid, signal);
            }
        }
    }
}

/// Whether a process is the program, or below it: what it sends to its process group it has sent to the program itself.
fn is_below(mut pid: i32, program: rustix::process::Pid) -> bool {
    // (Who is deeper than that has its signals doubled.)
    for _ in 0..64 {
        if pid == program.as_raw_nonzero().get() {
            return true;
        }
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        // The parent is behind the name, which may have anything in it, and the state.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        match parent.and_then(|parent| parent.parse().ok()) {
            Some(parent) if parent > 1 => pid = parent,
            _ => return false,
        }
    }
    false
}

fn leads_session() -> bool {
    rustix::process::getsid(None).is_ok_and(|session| session == rustix::process::getpid())
}
