//! Processes that outlive the command that started them: pid files that cannot be mistaken for
//! another process's, signals through pidfds, waiting with a limit.
//!
//! A pid file says `PID START`, START being the start time in /proc/PID/stat: a number that was
//! given to another process meanwhile has another start, so nothing is ever signalled that this
//! program did not start. Nothing here goes by name.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;

use crate::failure::{Context, Failure, Kind, Result};

/// A process, told from every other by its start time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub start: u64,
}

/// Fields of /proc/PID/stat after the name, which may itself contain anything.
fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

impl Identity {
    /// Of a running process; `None` when there is none (or it is a zombie).
    pub fn of(pid: i32) -> Option<Self> {
        let fields = stat_fields(pid)?;
        if fields.first()? == "Z" {
            return None;
        }
        Some(Self { pid, start: fields.get(19)?.parse().ok()? })
    }

    /// Of this process.
    pub fn own() -> Option<Self> {
        Self::of(i32::try_from(std::process::id()).ok()?)
    }

    /// Whether it still runs.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// CPU time used so far, in clock ticks (user and system).
    pub fn cpu_ticks(self) -> u64 {
        let fields = stat_fields(self.pid).unwrap_or_default();
        let field = |n: usize| fields.get(n).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
        field(11) + field(12)
    }

    /// Sends a signal, if the process still is the one meant.
    pub fn signal(self, signal: Signal) -> bool {
        let Some(fd) = self.pidfd() else { return false };
        pidfd_send_signal(fd, signal).is_ok()
    }

    /// A descriptor of the process, checked to be the one meant.
    fn pidfd(self) -> Option<OwnedFd> {
        let fd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // Checked after opening: from here on the descriptor cannot come to mean another process.
        self.is_alive().then_some(fd)
    }

    /// Waits for its end, which is that of its last thread: until then its files are open and its
    /// locks are held, also when its first thread is a zombie already.
    pub fn wait_gone(self, limit: Duration) -> bool {
        let Some(pid) = Pid::from_raw(self.pid) else { return true };
        let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
        let start = stat_fields(self.pid).and_then(|f| f.get(19)?.parse::<u64>().ok());
        if start != Some(self.start) {
            return true;
        }
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(_) => {}
            }
        }
    }

    /// Asks it to end; after `patience` makes it end. Returns whether it had to be made to.
    pub fn end(self, patience: Duration) -> bool {
        // A stopped process does not act on SIGTERM until it goes on.
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
        if self.wait_gone(patience) {
            return false;
        }
        self.signal(Signal::KILL);
        self.wait_gone(Duration::from_secs(5));
        true
    }
}

/// Writes a pid file of `identity`, atomically.
pub fn write_pid_file(path: &Path, identity: Identity) -> Result<()> {
    // Who starts a daemon and the daemon itself write the same file at the same moment: with one
    // name for both, the second to rename would find that the first had taken its file away.
    let temporary = path.with_extension(format!("pid.{}", std::process::id()));
    fs::write(&temporary, format!("{} {}\n", identity.pid, identity.start))
        .and_then(|()| fs::rename(&temporary, path))
        .context(path.display())
}

/// Reads a pid file; `None` when it is not there or its process is gone.
pub fn read_pid_file(path: &Path) -> Option<Identity> {
    let text = fs::read_to_string(path).ok()?;
    let mut words = text.split_whitespace();
    let pid = words.next()?.parse().ok()?;
    let identity = Identity { pid, start: words.next()?.parse().ok()? };
    identity.is_alive().then_some(identity)
}

/// Starts `command` in the background, its output appended to `log`; returns who it is.
pub fn start(mut command: Command, log: &Path) -> Result<(Child, Identity)> {
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::process::CommandExt;
    // Who was refused what is nobody else's business.
    let mut file = fs::OpenOptions::new();
    let file = file.create(true).append(true).mode(0o600).open(log).context(log.display())?;
    let copy = file.try_clone().context(log.display())?;
    command.stdin(Stdio::null()).stdout(file).stderr(copy).process_group(0);
    let name = PathBuf::from(command.get_program());
    let child = command.spawn().context(name.display())?;
    let identity = i32::try_from(child.id()).ok().and_then(Identity::of).ok_or_else(|| {
        Failure::failed(
            format!("{} ended at once", name.display()),
            format!("its output is in {}", log.display()),
        )
    })?;
    Ok((child, identity))
}

/// Asks `done` every few milliseconds until it says `Some`, for at most `limit`.
pub fn wait_until<T>(
    what: &str,
    limit: Duration,
    mut done: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = done()? {
            return Ok(value);
        }
        crate::signals::check()?;
        if Instant::now() >= end {
            let message = format!("{what}: not within {:.1} s", limit.as_secs_f64());
            return Err(Failure::new(Kind::Timeout, message, "see the logs of the services"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_means_one_process_only() {
        let dir = std::env::temp_dir().join(format!("corbel-process-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut sleep = Command::new("sleep");
        sleep.arg("30");
        let (mut child, identity) = start(sleep, &dir.join("log")).unwrap();
        let file = dir.join("x.pid");
        write_pid_file(&file, identity).unwrap();
        assert_eq!(read_pid_file(&file), Some(identity));

        let other = Identity { start: identity.start + 1, ..identity };
        assert!(!other.is_alive());
        assert!(!other.signal(Signal::KILL));
        write_pid_file(&file, other).unwrap();
        assert_eq!(read_pid_file(&file), None);
        assert!(identity.is_alive(), "the signal went to a process of another start time");

        let reaper = std::thread::spawn(move || child.wait());
        assert!(!identity.end(Duration::from_secs(5)), "sleep ends at SIGTERM");
        reaper.join().unwrap().unwrap();
        assert!(!identity.is_alive());
        for text in ["", "x", "1", "1 x", "-5 5", "99999999999999999999 1"] {
            fs::write(&file, text).unwrap();
            assert_eq!(read_pid_file(&file), None, "{text:?}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
