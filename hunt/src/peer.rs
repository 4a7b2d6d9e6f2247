//! A worker as the director has it: its processes, and a socket to each.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::text;
use crate::worker::{SEAT_FD, SEATS};

/// A worker that says nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Silence {
    /// Its process is gone.
    Dead,
    /// It is still at it.
    Hangs,
}

/// How a worker is started.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// What comes before the program, as `corbel run --`.
    pub prefix: &'a [OsString],
    /// The directory of the worker.
    pub root: &'a Path,
    /// Works on the reference.
    pub reference: bool,
    /// Works on a plain directory of this machine.
    pub plain: bool,
    /// Ends what it has appended with a look for the end, where the kernel does not know it.
    pub ends: bool,
    /// A planted difference.
    pub lie: Option<&'a str>,
    /// Gets what it prints.
    pub log: &'a Path,
}

/// A process of a worker.
#[derive(Debug)]
struct Seat {
    socket: UnixStream,
    process: Option<Process>,
    pending: Vec<u8>,
}

#[derive(Debug)]
struct Process {
    pid: i32,
    handle: OwnedFd,
}

/// A worker.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    seats: Vec<Seat>,
    /// Processes on seats other than the first.
    children: Vec<i32>,
}

fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    #[allow(unsafe_code)]
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    #[allow(unsafe_code)]
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The same socket, its number out of the way of those that workers have.
fn apart(socket: &UnixStream) -> io::Result<OwnedFd> {
    let least = 2 * (SEAT_FD + SEATS as i32);
    // SAFETY: takes numbers only.
    #[allow(unsafe_code)]
    let fd = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    #[allow(unsafe_code)]
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The program that carries out calls: beside this one, or beside the directory of this one, if that is a test.
pub fn program() -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let dirs = own.ancestors().skip(1).take(2);
    let mut programs = dirs.map(|dir| dir.join("corbel-hunt"));
    programs.find(|program| program.is_file()).ok_or_else(|| {
        io::Error::other(format!("no corbel-hunt beside {} (cargo build -p hunt)", own.display()))
    })
}

/// Which of two descriptors can be read within `limit`; none if neither.
fn poll(fds: &[i32], limit: Duration) -> Vec<bool> {
    let mut all: Vec<libc::pollfd> =
        fds.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: the array is ours and of the length that is given.
    #[allow(unsafe_code)]
    unsafe {
        libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, limit);
    }
    all.iter().map(|fd| fd.revents != 0).collect()
}

/// Processes whose parents end become children of this one, which waits for them when it ends workers.
pub fn adopt() {
    // SAFETY: takes numbers only.
    #[allow(unsafe_code)]
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    }
}

impl Peer {
    /// Starts a worker; it is there once it has been [greeted](Self::greet).
    pub fn start(launch: &Launch<'_>) -> io::Result<Self> {
        let mut seats = Vec::new();
        let mut theirs = Vec::new();
        for _ in 0..SEATS {
            let (ours, other) = UnixStream::pair()?;
            seats.push(Seat { socket: ours, process: None, pending: Vec::new() });
            theirs.push(apart(&other)?);
        }
        let program = program()?;
        let mut command = match launch.prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        };
        let root = text::escape(launch.root.as_os_str().as_encoded_bytes());
        command.arg(format!("--root={root}"));
        if launch.reference {
            command.arg("--reference");
        }
        if launch.plain {
            command.arg("--plain");
        }
        if launch.ends {
            command.arg("--ends");
        }
        if let Some(lie) = launch.lie {
            command.arg(format!("--lie={lie}"));
        }
        let log = File::options().create(true).append(true).open(launch.log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let numbers: Vec<i32> = theirs.iter().map(|socket| socket.as_raw_fd()).collect();
        let ready = move || {
            for (seat, fd) in numbers.iter().enumerate() {
                // SAFETY: takes numbers only; between fork and exec.
                #[allow(unsafe_code)]
                if unsafe { libc::dup2(*fd, SEAT_FD + seat as i32) } == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: between fork and exec only dup2 is called.
        #[allow(unsafe_code)]
        unsafe {
            command.pre_exec(ready);
        }
        let child = command.spawn()?;
        Ok(Self { child, seats, children: Vec::new() })
    }

    /// Waits for the process on a seat to say who it is.
    pub fn greet(&mut self, seat: usize, limit: Duration) -> io::Result<()> {
        let hello = self.hear(seat, limit).map_err(|silence| {
            io::Error::other(format!("the worker did not start: {silence:?}"))
        })?;
        let pid = hello.strip_prefix("hello ").and_then(|pid| pid.parse().ok());
        let pid = pid.ok_or_else(|| io::Error::other(format!("a worker said {hello:?}")))?;
        self.seats[seat].process = Some(Process { pid, handle: pidfd(pid)? });
        self.children.extend((seat != 0).then_some(pid));
        Ok(())
    }

    /// Tells the process on a seat to do something.
    pub fn say(&mut self, seat: usize, lines: &str) {
        // One that is gone is noticed when it does not answer.
        let _ = self.seats[seat].socket.write_all(lines.as_bytes());
    }

    /// The next line that the process on a seat says.
    pub fn hear(&mut self, seat: usize, limit: Duration) -> Result<String, Silence> {
        let end = Instant::now() + limit;
        loop {
            let seat = &mut self.seats[seat];
            if let Some(at) = seat.pending.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = seat.pending.drain(..=at).collect();
                return Ok(String::from_utf8_lossy(&line[..at]).into_owned());
            }
            let left = end.saturating_duration_since(Instant::now());
            let mut fds = vec![seat.socket.as_raw_fd()];
            fds.extend(seat.process.as_ref().map(|p| p.handle.as_raw_fd()));
            let ready = poll(&fds, left.min(Duration::from_millis(500)));
            if ready[0] {
                let mut chunk = [0; 65536];
                match seat.socket.read(&mut chunk) {
                    Ok(got) if got > 0 => seat.pending.extend_from_slice(&chunk[..got]),
                    _ => return Err(Silence::Dead),
                }
            } else if ready.get(1) == Some(&true)
                || seat.process.is_none() && !matches!(self.child.try_wait(), Ok(None))
            {
                return Err(Silence::Dead);
            } else if left.is_zero() {
                return Err(Silence::Hangs);
            }
        }
    }

    /// How those of its processes that are ours to wait for have ended, so far.
    pub fn ends(&self) -> String {
        let started = i32::try_from(self.child.id()).unwrap_or(0);
        let pids = std::iter::once(started).chain(self.children.iter().copied());
        let ends = pids.filter_map(|pid| {
            // SAFETY: all zeros is such a structure.
            #[allow(unsafe_code)]
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            // SAFETY: the structure is ours, and filled when the call succeeds.
            #[allow(unsafe_code)]
            let (found, status) = unsafe {
                let done = libc::waitid(libc::P_PID, pid.cast_unsigned(), &raw mut info, options);
                (done == 0 && info.si_pid() != 0, info.si_status())
            };
            let how = if info.si_code == libc::CLD_EXITED { "exit code" } else { "signal" };
            found.then(|| format!("{pid}: {how} {status}"))
        });
        ends.collect::<Vec<_>>().join(", ")
    }

    /// The process on a seat has ended as it should.
    pub fn leave(&mut self, seat: usize) {
        self.seats[seat].process = None;
    }

    /// The process on a seat, if there was one.
    pub fn pid(&self, seat: usize) -> Option<i32> {
        self.seats[seat].process.as_ref().map(|p| p.pid)
    }

    /// The seat of a process.
    pub fn seat_of(&self, pid: i32) -> Option<usize> {
        (0..SEATS).find(|seat| self.pid(*seat) == Some(pid))
    }

    /// Waits until the process on a seat has ended.
    pub fn wait_end(&self, seat: usize, limit: Duration) -> bool {
        let Some(process) = &self.seats[seat].process else { return true };
        poll(&[process.handle.as_raw_fd()], limit)[0]
    }

    /// Sends a signal to every process of it.
    pub fn signal(&self, number: i32) {
        for process in self.seats.iter().filter_map(|seat| seat.process.as_ref()) {
            // SAFETY: takes numbers and a null pointer.
            #[allow(unsafe_code)]
            unsafe {
                let fd = process.handle.as_raw_fd();
                libc::syscall(libc::SYS_pidfd_send_signal, fd, number, std::ptr::null::<u8>(), 0);
            }
        }
    }

    /// Ends every process of it, and waits for that; whether they all went.
    pub fn kill(&mut self) -> bool {
        self.signal(libc::SIGKILL);
        let gone = (0..SEATS).all(|seat| self.wait_end(seat, Duration::from_secs(20)));
        if self.seats[0].process.is_none() {
            let _ = self.child.kill();
        }
        // What it was started by ends with it.
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                self.reap();
                return gone;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        false
    }

    /// Children whose parents have ended are ours (see [`adopt`]).
    fn reap(&mut self) {
        for pid in self.children.drain(..) {
            let mut status = 0;
            // SAFETY: the status is ours.
            #[allow(unsafe_code)]
            unsafe {
                libc::waitpid(pid, &raw mut status, libc::WNOHANG);
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}
