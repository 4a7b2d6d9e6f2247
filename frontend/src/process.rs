//! Being a daemon: going to the background once the mount answers, and ending on a signal.
#![allow(unsafe_code)] // fork and signal masks have no safe wrapper

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};

/// Signals that end a mount.
const ENDING: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signals that end a server, taken out of their usual course.
#[derive(Debug)]
pub struct EndingSignals(OwnedFd);

impl EndingSignals {
    /// Blocks the signals in this thread and all that it starts from now on, and makes them
    /// readable. Call it before any thread is started.
    ///
    /// # Errors
    /// When the system is out of descriptors.
    pub fn catch() -> std::io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset fills the set, which is then used by reference only.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in ENDING {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC)
        };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: signalfd has just made this descriptor, nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Waits until one of the signals comes (true) or `other` becomes readable (false).
    ///
    /// # Errors
    /// When waiting fails.
    pub fn wait_or(&self, other: impl AsFd) -> std::io::Result<bool> {
        loop {
            let mut fds = [
                PollFd::new(&self.0, PollFlags::IN),
                PollFd::from_borrowed_fd(other.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(true),
                Ok(_) if !fds[1].revents().is_empty() => return Ok(false),
                Ok(_) => {}
            }
        }
    }
}

/// What the parent of a daemon is told through a pipe: nothing but this byte, or a [`Refusal`].
const READY: u8 = 0;

/// The daemon's end of the pipe on which its parent waits.
#[derive(Debug)]
pub struct Readiness(std::io::PipeWriter);

impl Readiness {
    /// The mount answers: the parent may exit. Standard error goes to the end of `log`, if that
    /// can be written, and the other streams to `/dev/null`.
    ///
    /// # Errors
    /// When `/dev/null` cannot be opened.
    pub fn ready(mut self, log: Option<&Path>) -> std::io::Result<()> {
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(log.and_then(append).as_ref().unwrap_or(&null))?;
        self.0.write_all(&[READY])
    }

    /// It failed: the parent fails too, in the same way.
    pub fn failed(mut self, why: &Refusal) {
        // No text has a NUL, and no failure the code 0, which is [`READY`].
        let line = [&[why.code.max(1)], why.text.as_bytes(), &[0], why.remedy.as_bytes()].concat();
        // If the parent is gone, nobody wants to know.
        let _ = self.0.write_all(&line);
    }
}

/// Opens a log to be added to. Its directory may be another user's, who has less rights than this process: what he
/// could put there that is not his own is left alone.
fn append(path: &Path) -> Option<std::fs::File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut options = std::fs::File::options();
    let file = options.create(true).append(true).custom_flags(flags).open(path).ok()?;
    let (meta, dir) = (file.metadata().ok()?, path.parent()?.metadata().ok()?);
    let own = meta.uid() == rustix::process::geteuid().as_raw() || meta.uid() == dir.uid();
    (meta.is_file() && meta.nlink() == 1 && own).then_some(file)
}

/// Why a daemon could not begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Exit code.
    pub code: u8,
    /// What was wrong.
    pub text: String,
    /// What to do about it.
    pub remedy: String,
}

impl Refusal {
    fn read(said: &[u8]) -> Self {
        let Some((&code, rest)) = said.split_first() else {
            let text = "the server died before its mount was ready".into();
            return Self { code: 1, text, remedy: String::new() };
        };
        let mut parts = rest.splitn(2, |byte| *byte == 0).map(String::from_utf8_lossy);
        let mut next = || parts.next().unwrap_or_default().into_owned();
        Self { code, text: next(), remedy: next() }
    }
}

/// Which side of [`daemonize`] this is.
#[derive(Debug)]
pub enum Side {
    /// The daemon, to mount and report.
    Daemon(Readiness),
    /// The parent, when the daemon has reported.
    Parent(Result<(), Refusal>),
}

/// Forks. The parent returns when the daemon is ready or has failed. Call it before any thread
/// is started.
///
/// # Errors
/// When the system is out of processes or descriptors.
pub fn daemonize() -> std::io::Result<Side> {
    let (mut reader, writer) = std::io::pipe()?;
    // SAFETY: the process has one thread (see above), so the child may do anything.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            drop(reader);
            rustix::process::setsid()?;
            rustix::process::chdir("/")?;
            Ok(Side::Daemon(Readiness(writer)))
        }
        _ => {
            drop(writer);
            let mut said = Vec::new();
            reader.read_to_end(&mut said)?;
            Ok(Side::Parent(match said.as_slice() {
                [READY] => Ok(()),
                said => Err(Refusal::read(said)),
            }))
        }
    }
}
