//! A worker: a program that carries out system calls on a directory, as it is told over a socket,
//! and says what came of them. It knows nothing of what serves the directory.
//!
//! A worker has *seats*: one process sits on each, the first on seat 0, children of `fork`, `exec`
//! and `spawn` on others. Each seat has a socket, by which the director talks to its process.
//! Descriptors are named by *slots* (`s0` …), mappings too (`m0` …); children inherit both.

mod args;
mod calls;
mod data;
mod lies;
mod locks;
mod maps;
mod meta;
pub use meta::without_attributes;
mod names;
mod processes;
mod sweep;

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use args::Stop;
pub use lies::{LIES, Lie};
use maps::Map;

/// Descriptors that a process can name.
pub const SLOTS: usize = 16;
/// Mappings that a process can name.
pub const MAPS: usize = 6;
/// Processes of a worker, over its whole life.
pub const SEATS: usize = 8;
/// Number of the socket of seat 0; the others follow. Above what calls give out, below what
/// an interception library may keep for itself.
pub const SEAT_FD: RawFd = 100;

/// Number of the root of the file system, in processes that have given up rights: they may not open it.
const ROOT_FD: RawFd = SEAT_FD + SEATS as RawFd;

/// The number of a slot, from its token.
pub fn named_slot(token: &str) -> Option<usize> {
    args::named(token, 's', SLOTS)
}

/// How a worker is started.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The directory: all names are relative to it.
    pub root: Vec<u8>,
    /// Which seat this process takes.
    pub seat: usize,
    /// Works on the reference file system: what costs much and changes nothing is left out.
    pub reference: bool,
    /// On a plain directory: no times of access, no O_DIRECT, nothing synced.
    pub plain: bool,
    /// What has been appended ends with a look for the end, unless it is served in the process: a mount's kernel does not
    /// know it (docs/mount.md).
    pub ends: bool,
    /// A planted difference.
    pub lie: Option<Lie>,
    /// Descriptors taken over from the process that called exec.
    pub slots: Vec<(usize, RawFd)>,
}

/// An open descriptor.
#[derive(Clone, Debug)]
struct Slot {
    fd: RawFd,
    /// Tells it from what was in the slot before.
    generation: u64,
    /// Positions after each entry of a directory that was read.
    positions: Vec<i64>,
}

/// State of a process.
#[derive(Debug)]
pub struct Worker {
    start: Start,
    slots: Vec<Option<Slot>>,
    maps: Vec<Option<Map>>,
    generations: u64,
    /// What was read last, for those who ask where it differs.
    last: Vec<u8>,
    buffer: data::Buffer,
    /// Children by seat, not yet waited for.
    children: BTreeMap<usize, libc::pid_t>,
    /// Seats that nobody has sat on.
    free: Vec<usize>,
    lies: lies::Memory,
}

/// A system call through libc, so that whoever replaces libc's calls sees it.
macro_rules! sys {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: pointers among the arguments are to memory that this function owns, of the
        // length that is passed beside them; the call keeps none of them.
        #[allow(unsafe_code)]
        let result = unsafe { libc::$name($($arg),*) };
        result
    }};
}
use sys;

/// The number of the last error.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The result of a call that says -1 when it fails.
fn done(result: impl Into<i64>) -> Result<i64, Stop> {
    match result.into() {
        -1 => Err(Stop::Errno(errno())),
        result => Ok(result),
    }
}

impl Worker {
    /// A worker in its directory.
    pub fn new(start: Start) -> std::io::Result<Self> {
        let free = (start.seat + 1..SEATS).collect();
        let mut this = Self {
            slots: vec![None; SLOTS],
            maps: vec![None; MAPS],
            generations: 0,
            last: Vec::new(),
            buffer: data::Buffer::default(),
            children: BTreeMap::new(),
            free,
            lies: lies::Memory::default(),
            start,
        };
        for (slot, fd) in std::mem::take(&mut this.start.slots) {
            // What was closed by exec is not there any more.
            if slot < SLOTS && sys!(fcntl(fd, libc::F_GETFD)) != -1 {
                this.put(slot, fd);
            }
        }
        processes::close_seats(this.start.seat);
        Ok(this)
    }

    /// Enters the directory.
    pub fn enter(&self) -> std::io::Result<()> {
        if self.start.plain {
            processes::without_atime(&self.start.root);
        }
        let root = args::c_string(self.start.root.clone());
        if sys!(chdir(root.as_ptr())) == -1 {
            return Err(std::io::Error::last_os_error());
        }
        sys!(umask(0o022));
        Ok(())
    }

    fn put(&mut self, slot: usize, fd: RawFd) {
        self.generations += 1;
        self.slots[slot] = Some(Slot { fd, generation: self.generations, positions: Vec::new() });
    }

    /// Serves its seat until the other end is closed.
    pub fn serve(&mut self) {
        self.say(&format!("hello {}", sys!(getpid())));
        let mut pending = Vec::new();
        loop {
            while let Some(end) = pending.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                let answer = match std::str::from_utf8(&line) {
                    Ok(line) => self.carry_out(line.trim()),
                    Err(_) => "bad utf-8".into(),
                };
                self.say(&answer);
            }
            let mut chunk = [0; 16384];
            let got = sys!(read(self.seat_fd(), chunk.as_mut_ptr().cast(), chunk.len()));
            match usize::try_from(got) {
                Ok(0) => processes::exit(),
                Ok(got) => pending.extend_from_slice(&chunk[..got]),
                Err(_) if errno() == libc::EINTR => {}
                Err(_) => processes::exit(),
            }
        }
    }

    fn seat_fd(&self) -> RawFd {
        SEAT_FD + self.start.seat as RawFd
    }

    fn say(&self, line: &str) {
        let line = format!("{line}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            let sent = sys!(write(self.seat_fd(), rest.as_ptr().cast(), rest.len()));
            match usize::try_from(sent) {
                Ok(sent) => rest = &rest[sent..],
                Err(_) if errno() == libc::EINTR => {}
                Err(_) => processes::exit(),
            }
        }
    }

    /// One call: `RESULT ERRNO FIELD=VALUE …`; `noslot` if it names what is not open here, `bad …`
    /// if it makes no sense.
    fn carry_out(&mut self, line: &str) -> String {
        let tokens: Vec<&str> = line.split_whitespace().collect();
        let Some((name, rest)) = tokens.split_first() else { return "bad empty".into() };
        match self.call(name, &args::Args(rest)) {
            Ok(answer) => answer,
            Err(Stop::Errno(number)) => format!("-1 {}", args::errno_name(number)),
            Err(Stop::NoSlot) => "noslot".into(),
            Err(Stop::Bad(why)) => format!("bad {why}: {line}"),
        }
    }
}
