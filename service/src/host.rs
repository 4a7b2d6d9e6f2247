//! nicfs' end of the link to hostd, and how it makes sure that hostd copies no more.
//!
//! hostd takes the region's lock for copying, then looks whether its nicfs is still there, then copies
//! (`hostd::Hostd::copy`). So once the link is shut and nobody has the lock, nothing is copied any
//! more and nothing will be: what was asked for over this link is void.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;
use storage::format::superblock::Durability;
use storage::region::FileRegion;
use storage::volume::CopyItem;

use crate::core::Copier;
use crate::core::event::COPIES_MAX;
use crate::link::{self, Packet};
use crate::process::{Thread, Watch};

/// A node that waits for hostd answers nobody meanwhile, so it waits no longer than its peers bear;
/// then hostd is ended. A job is done within milliseconds unless hostd hangs or starves.
const PATIENCE: Duration = Duration::from_millis(200);
/// The same where a job ends with the disk. Nicfs would wait for the
/// disk as well if it copied for itself, and a process that the disk holds does not die of a signal.
const DISK_PATIENCE: Duration = Duration::from_secs(2);
/// A hostd whose link was shut has this long to end by itself what it is at.
const GRACE: Duration = Duration::from_millis(20);
/// One that waits for the processor, and does not get it, has longer: it is slow, and does not hang. (The node's own
/// peers take it for dead after three times that.)
const STARVED: Duration = Duration::from_millis(150);
/// One that has run for so long since it was late, and is not done, hangs.
const ENOUGH: Duration = Duration::from_millis(50);
/// Between two looks at one.
const LOOK: Duration = Duration::from_millis(5);
/// The lowest realtime priority.
const PRIORITY: i32 = 1;
/// A process that is killed is gone within this time, unless the kernel holds it.
const DEATH: Duration = Duration::from_secs(5);

type Heard = (Packet, Vec<OwnedFd>);

/// The link.
#[derive(Debug)]
pub(crate) struct HostLink {
    socket: OwnedFd,
    region: FileRegion,
    patience: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The job that hostd has not answered, and when it was asked.
    job: Option<(u64, Instant)>,
    /// No job up to this one shall be sent any more.
    void: u64,
    /// The job takes long.
    helped: Option<Helped>,
    /// What came while a job was waited for.
    heard: VecDeque<Heard>,
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Whether the descriptor is ready for reading, or at its end, within that time.
fn ready(fd: &OwnedFd, within: Duration) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timespec(within))).is_ok_and(|n| n > 0)
}

/// Whether the other end has closed or shut the link, also if there is something left to read.
pub(crate) fn hung_up(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&timespec(Duration::ZERO)));
    polled.is_err() || fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Returns when nobody copies into the region, which takes force if hostd hangs. No link to a
/// hostd may be open that has a job.
pub(crate) fn end_copies(region: &FileRegion) -> Result<(), String> {
    let begin = Instant::now();
    let mut helped: Option<Helped> = None;
    while let Some(pid) = region.copier().map_err(|e| e.to_string())? {
        let process = match helped.take_if(|helped| helped.process == pid) {
            Some(process) => process,
            None => Helped::begin(pid),
        };
        let slow = begin.elapsed() < STARVED && process.starves();
        if begin.elapsed() > GRACE && !slow {
            kill(region, pid)?;
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
        helped = Some(process);
    }
    Ok(())
}

/// A hostd that has realtime priority, for as long as it is waited for: on a machine that is overloaded it does in a
/// millisecond then what it would not have begun in a second.
#[derive(Debug)]
struct Helped {
    process: i32,
    watch: Watch,
}

impl Helped {
    fn begin(process: i32) -> Self {
        // Where that is not allowed it may get on by itself.
        Thread::first_of(process).realtime(PRIORITY);
        Self { process, watch: Watch::new(process) }
    }

    fn starves(&self) -> bool {
        self.watch.starves(ENOUGH)
    }
}

impl Drop for Helped {
    fn drop(&mut self) {
        Thread::first_of(self.process).ordinary();
    }
}

fn kill(region: &FileRegion, pid: i32) -> Result<(), String> {
    let Some(process) = Pid::from_raw(pid) else { return Err(format!("it is process {pid}")) };
    let Ok(fd) = pidfd_open(process, PidfdFlags::empty()) else { return Ok(()) };
    // Only now is it certain that the number still means the process that has the lock.
    if region.copier().map_err(|e| e.to_string())? != Some(pid) {
        return Ok(());
    }
    log::warn!("hostd (process {pid}) is stuck in its copies and is ended");
    pidfd_send_signal(&fd, Signal::KILL).map_err(|e| format!("process {pid}: {e}"))?;
    if ready(&fd, DEATH) { Ok(()) } else { Err(format!("process {pid} does not die")) }
}

impl HostLink {
    pub(crate) fn new(socket: OwnedFd, region: FileRegion, durability: Durability) -> Self {
        link::set_buffers(socket.as_fd());
        let patience = match durability {
            Durability::Disk => DISK_PATIENCE,
            _ => PATIENCE,
        };
        Self { socket, region, patience, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor to watch.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Whether this process may end hostd, without which it must not let it copy.
    pub(crate) fn may_end(&self) -> bool {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket);
        peer.is_ok_and(|peer| rustix::process::test_kill_process(peer.pid).is_ok())
    }

    /// Sends a packet.
    pub(crate) fn send(&self, packet: &Packet) -> bool {
        link::send(self.socket.as_fd(), packet, None).is_ok()
    }

    /// Asks for copies; `false` when hostd does not get to know.
    pub(crate) fn ask(&self, id: u64, items: Vec<CopyItem>) -> bool {
        let mut state = self.state();
        if id <= state.void {
            return false;
        }
        let sent = items.len() <= COPIES_MAX && self.send(&Packet::Copies { id, items });
        if sent {
            state.job = Some((id, Instant::now()));
        }
        sent
    }

    /// The next packet, if there is one. An error when the link has ended.
    pub(crate) fn receive(&self) -> std::io::Result<Option<Heard>> {
        let mut state = self.state();
        if let Some(heard) = state.heard.pop_front() {
            return Ok(Some(heard));
        }
        let received = link::receive(&self.socket)?;
        if let Some((Packet::CopiesDone { id, .. }, _)) = &received
            && state.job.take_if(|(job, _)| job == id).is_some()
        {
            state.helped = None;
        }
        Ok(received)
    }

    /// Whether packets wait that came while a job was waited for: the socket does not tell of them.
    pub(crate) fn has_heard(&self) -> bool {
        !self.state().heard.is_empty()
    }

    /// Ends the link; nothing that was asked for over it is copied any more.
    pub(crate) fn end(&self) -> Result<(), String> {
        let job = self.state().job.take();
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        let ended = if job.is_some() { end_copies(&self.region) } else { Ok(()) };
        self.state().helped = None;
        ended
    }

    /// Helps hostd; `false` if it is not there.
    fn help_with(&self, state: &mut State, job: u64) -> bool {
        if state.job.is_none_or(|(id, _)| id != job) || hung_up(&self.socket) {
            return false;
        }
        if let (None, Ok(peer)) =
            (&state.helped, rustix::net::sockopt::socket_peercred(&self.socket))
        {
            state.helped = Some(Helped::begin(peer.pid.as_raw_nonzero().get()));
        }
        state.helped.is_some()
    }

    /// Hostd's answer, late: as long as it has not had the time to give it.
    fn late_answer(&self, job: u64) -> Option<Vec<u32>> {
        let begin = Instant::now();
        while begin.elapsed() < STARVED {
            let mut state = self.state();
            let slow = self.help_with(&mut state, job)
                && state.helped.as_ref().is_some_and(Helped::starves);
            drop(state);
            if !slow {
                break;
            }
            if let Some(bad) = self.answer(job, Instant::now() + LOOK) {
                return Some(bad);
            }
        }
        // It may have answered and gone to sleep since.
        self.answer(job, Instant::now())
    }

    /// Hostd's answer to the job, if it comes in time.
    fn answer(&self, job: u64, until: Instant) -> Option<Vec<u32>> {
        loop {
            match link::receive(&self.socket) {
                Ok(Some((Packet::CopiesDone { id, bad }, _))) if id == job => return Some(bad),
                Ok(Some(other)) => self.state().heard.push_back(other),
                Ok(None) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    ready(&self.socket, left);
                }
                Err(_) => return None,
            }
        }
    }
}

impl Copier for HostLink {
    fn help(&self, job: u64) {
        self.help_with(&mut self.state(), job);
    }

    fn settle(&self, job: u64) -> Result<bool, String> {
        let mut state = self.state();
        state.void = state.void.max(job);
        let asked = state.job.filter(|(id, _)| *id == job);
        drop(state);
        // Not sent, or the link has ended.
        let Some((_, asked)) = asked else { return Ok(false) };
        let answer = self.answer(job, asked + self.patience).or_else(|| self.late_answer(job));
        if let Some(bad) = answer {
            let mut state = self.state();
            (state.job, state.helped) = (None, None);
            return Ok(bad.is_empty());
        }
        log::warn!("hostd does not answer; its link is ended");
        self.end()?;
        Ok(false)
    }
}
