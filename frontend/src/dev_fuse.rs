//! The local kernel as a client: mounting, and serving requests from `/dev/fuse`.
//!
//! A [`Session`] is a mount with its threads. Each thread has a clone of the device
//! (`FUSE_DEV_IOC_CLONE`), so that replies do not meet on one lock. The session ends when the
//! file system is unmounted, by [`Session::unmount`] or from outside.
#![allow(unsafe_code)] // one ioctl

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use client::fs::{Caching, FileSystem};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use zerocopy::FromBytes;

use crate::dev_uring::{self, Rings};
use crate::fuse::wire::InHeader;
use crate::fuse::{IO_BYTES_MAX, LaterReply, Options, REQUEST_BYTES_MAX, ReplySink, Server};
use crate::mount_options::MountOptions;
use crate::mount_point::{self, MountError};
use crate::notify::{Deferred, KernelCache, Notifier};
use crate::patience::{DEVICE, Flight, Flights, Group};

/// `_IOR(229, 0, u32)`: makes a newly opened device one more channel of an existing connection.
const FUSE_DEV_IOC_CLONE: rustix::ioctl::Opcode = 0x8004_e500;
/// Requests that may come before INIT is agreed upon: one INIT for each side's version.
const INIT_TRIES: u32 = 4;

/// Threads that read the device where requests come over io_uring: all that comes there then is FORGET and
/// INTERRUPT.
const READERS_BESIDE_RINGS: usize = 1;

/// The file system that a session serves.
pub type SharedFs = Arc<dyn FileSystem>;

/// A mounted file system and the threads that serve it.
#[derive(Debug)]
pub struct Session {
    dir: PathBuf,
    server: Arc<Server<dyn FileSystem>>,
    notifier: Arc<Notifier>,
    deferred: Arc<Deferred>,
    flights: Arc<Flights>,
    threads: Vec<JoinHandle<()>>,
    /// Readable when the last serving thread has ended.
    ended: Arc<OwnedFd>,
}

impl Session {
    /// Mounts `fs` on `dir` and starts serving. The mount answers when this returns.
    ///
    /// # Errors
    /// What could not be done, and what to do about it.
    pub fn mount(
        fs: SharedFs,
        dir: &Path,
        mount_options: &MountOptions,
        options: Options,
    ) -> Result<Self, MountError> {
        mount_point::clear_dead(dir)?;
        let dir = dir.canonicalize().map_err(|e| MountError::point(dir, &e))?;
        let device = Arc::new(mount_point::mount(&dir, mount_options)?);
        let queues = mount_options.io_uring.then(dev_uring::queues).flatten();
        let options = Options {
            io_uring: queues.is_some(),
            shared_locks: !mount_options.local_locks,
            kernel_checks: mount_options.default_permissions,
            ..options
        };
        let server = Arc::new(Server::new(fs.clone(), options));
        if let Err(error) = first_requests(&server, &device) {
            let _ = mount_point::unmount(&dir);
            return Err(error);
        }
        let mut session = Self {
            dir,
            server,
            notifier: Arc::new(Notifier::new(device.clone())),
            deferred: Arc::default(),
            flights: Arc::default(),
            threads: Vec::new(),
            ended: Arc::new(
                rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(MountError::from)?,
            ),
        };
        if let Err(error) = session.start(&device, mount_options, queues) {
            let _ = session.unmount();
            return Err(error);
        }
        fs.attach(Arc::new(KernelCache::new(session.notifier.clone(), &session.server)));
        if fs.caching() == Caching::Attributes {
            let flights = session.flights.clone();
            session.threads.push(spawn("fuse-recall", move || {
                // Others wait for what this thread does. Without the right to it, it goes on as it is.
                let _ = rustix::process::nice(-15);
                while !flights.is_closed() {
                    fs.await_recalls();
                }
            })?);
        }
        Ok(session)
    }

    fn start(
        &mut self,
        device: &Arc<OwnedFd>,
        options: &MountOptions,
        queues: Option<u16>,
    ) -> Result<(), MountError> {
        let deferred = self.deferred.clone();
        self.server.on_misplaced(Box::new(move |ino| deferred.push(ino)));
        self.server.reaches(self.notifier.clone());
        let flights = self.flights.clone();
        self.server.on_interrupt(Box::new(move |unique| flights.interrupted(unique)));
        let (deferred, notifier) = (self.deferred.clone(), self.notifier.clone());
        self.threads.push(spawn("fuse-notify", move || deferred.run(&notifier))?);
        if self.server.shares_locks() {
            let server = self.server.clone();
            self.threads.push(spawn("fuse-locks", move || server.run_locks())?);
        }
        let crew = Arc::new(Crew {
            server: self.server.clone(),
            deferred: self.deferred.clone(),
            flights: self.flights.clone(),
            ended: self.ended.clone(),
            running: AtomicUsize::new(0),
        });
        let pool = Pool { device: device.clone(), crew: crew.clone() };
        for _ in 0..READERS_BESIDE_RINGS {
            self.threads.push(pool.add()?);
        }
        let queues = queues.filter(|_| self.server.is_over_io_uring()).unwrap_or(0);
        let rings = Rings::new(crew, device.clone(), queues);
        if queues == 0 || !rings.start(options.threads)? {
            self.server.not_over_io_uring();
            for _ in READERS_BESIDE_RINGS..options.threads {
                self.threads.push(pool.add()?);
            }
        }
        let limit = options.limit();
        let flights = self.flights.clone();
        let over_rings = self.server.is_over_io_uring();
        let groups: Vec<Group> =
            (0..queues).filter(|_| over_rings).chain(std::iter::once(DEVICE)).collect();
        // Its threads end with the others; who waits for the end looks at `ended` first.
        self.threads.push(spawn("fuse-watch", move || {
            flights.watch(limit, &groups, |group| {
                let added = match group {
                    DEVICE => pool.add().map(drop),
                    queue => rings.more(queue, None),
                };
                if let Err(error) = added {
                    log::warn!("all threads of the mount wait, and {error}");
                }
            });
        })?);
        Ok(())
    }

    /// The mount point, as an absolute path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Counters as text, as in `.corbel/stats`.
    pub fn stats_text(&self) -> String {
        self.server.stats_text()
    }

    /// The way to the kernel's caches.
    pub fn notifier(&self) -> Arc<Notifier> {
        self.notifier.clone()
    }

    /// Becomes readable when the session has ended.
    pub fn ended(&self) -> impl AsFd + '_ {
        self.ended.as_fd()
    }

    /// Takes the file system out of the tree; open files make it vanish later.
    ///
    /// # Errors
    /// When the kernel or fusermount3 refuses.
    pub fn unmount(&self) -> Result<(), MountError> {
        mount_point::unmount(&self.dir)
    }

    /// After an unmount: waits until what is in flight is done, but not longer than `limit`.
    /// Requests of those who still use a busy mount, or wait for a node that is away, end with the
    /// process.
    pub fn drain(self, limit: Duration) {
        let end = std::time::Instant::now() + limit;
        let Ok(limit) = rustix::time::Timespec::try_from(limit) else { return };
        let mut fds = [PollFd::new(&self.ended, PollFlags::IN)];
        if !poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0) {
            return;
        }
        while std::time::Instant::now() < end && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all threads have ended: after an unmount.
    pub fn join(self) {
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// All serving threads of a mount, and what they share.
pub(crate) struct Crew {
    pub server: Arc<Server<dyn FileSystem>>,
    pub flights: Arc<Flights>,
    deferred: Arc<Deferred>,
    ended: Arc<OwnedFd>,
    /// Threads that serve; the mount is over when there are none.
    running: AtomicUsize,
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("running", &self.running).finish_non_exhaustive()
    }
}

impl Crew {
    /// One more serves.
    pub fn enter(&self) {
        self.running.fetch_add(1, Ordering::AcqRel);
    }

    /// One less.
    pub fn leave(&self) {
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.deferred.close();
            self.server.close_locks();
            self.flights.close();
            // Nothing to do about a failure: whoever waits also joins the threads.
            let _ = rustix::io::write(&*self.ended, &1u64.to_le_bytes());
        }
    }

    /// Starts a thread that serves as long as `body` runs.
    pub fn spawn(
        self: &Arc<Self>,
        name: &str,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, MountError> {
        let crew = self.clone();
        self.enter();
        let spawned = spawn(name, move || {
            body();
            crew.leave();
        });
        if spawned.is_err() {
            self.running.fetch_sub(1, Ordering::AcqRel); // it never served
        }
        spawned
    }
}

/// The threads that read the device.
struct Pool {
    device: Arc<OwnedFd>,
    crew: Arc<Crew>,
}

impl Pool {
    fn add(&self) -> Result<JoinHandle<()>, MountError> {
        let channel = clone_device(&self.device).map_or_else(|_| self.device.clone(), Arc::new);
        let mut worker = Worker::new(channel);
        let (flight, server) = (worker.sink.flight.clone(), self.crew.server.clone());
        // One that never runs would seem to be idle.
        let spawned = self.crew.spawn("fuse", move || worker.run(&server))?;
        self.crew.flights.add(flight);
        Ok(spawned)
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, MountError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map_err(|e| MountError::new(format!("cannot start a thread: {e}")))
}

/// The kernel's first request is INIT; the mount is of no use until it is answered.
fn first_requests(
    server: &Server<dyn FileSystem>,
    device: &Arc<OwnedFd>,
) -> Result<(), MountError> {
    let mut worker = Worker::new(device.clone());
    for _ in 0..INIT_TRIES {
        if !worker.serve_one(server) {
            break;
        }
        if server.is_ready() {
            return Ok(());
        }
    }
    Err(MountError::new(
        "the kernel and Corbel did not agree on a FUSE version (7.31 is needed)".into(),
    ))
}

fn clone_device(device: &OwnedFd) -> Result<OwnedFd, std::io::Error> {
    let channel: OwnedFd = File::options().read(true).write(true).open("/dev/fuse")?.into();
    let fd = u32::try_from(device.as_raw_fd()).map_err(|_| std::io::ErrorKind::InvalidInput)?;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32, which the Setter passes a pointer to.
    let request = unsafe { rustix::ioctl::Setter::<FUSE_DEV_IOC_CLONE, u32>::new(fd) };
    // SAFETY: the channel is a FUSE device, and the request is as the kernel defines it.
    unsafe { rustix::ioctl::ioctl(&channel, request) }?;
    Ok(channel)
}

/// A thread's channel and buffers.
struct Worker {
    request: Vec<u8>,
    sink: DeviceSink,
}

/// Replies go to the device in one write.
struct DeviceSink {
    channel: Arc<OwnedFd>,
    payload: Vec<u8>,
    flight: Arc<Flight>,
}

impl ReplySink for DeviceSink {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.payload.len());
        &mut self.payload[..len]
    }

    fn later(&mut self) -> Option<Box<dyn LaterReply>> {
        Some(Box::new(LaterOnDevice(self.channel.clone())))
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        let unique = head.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        if !self.flight.take(unique) {
            return false;
        }
        let payload = &self.payload[..payload_len.min(self.payload.len())];
        let slices = [IoSlice::new(head), IoSlice::new(payload)];
        let count = if payload.is_empty() { 1 } else { 2 };
        match rustix::io::writev(&*self.channel, &slices[..count]) {
            Ok(_) => true,
            // The caller was killed and its request with it.
            Err(Errno::NOENT) => false,
            Err(error) => {
                log::warn!("kernel refused a reply of {} bytes: {error}", head.len());
                false
            }
        }
    }
}

/// A reply must go to the channel that the request came from.
struct LaterOnDevice(Arc<OwnedFd>);

impl LaterReply for LaterOnDevice {
    fn send(self: Box<Self>, reply: &[u8]) {
        match rustix::io::write(&*self.0, reply) {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => log::warn!("kernel refused a reply of {} bytes: {error}", reply.len()),
        }
    }
}

impl Worker {
    fn new(channel: Arc<OwnedFd>) -> Self {
        let (payload, flight) =
            (vec![0; IO_BYTES_MAX], Flight::new(Box::new(channel.clone()), DEVICE));
        let sink = DeviceSink { channel, payload, flight };
        Self { request: vec![0; REQUEST_BYTES_MAX], sink }
    }

    fn run(&mut self, server: &Server<dyn FileSystem>) {
        self.sink.flight.board();
        while self.serve_one(server) {}
    }

    /// Serves the next request; false when there will be no more.
    fn serve_one(&mut self, server: &Server<dyn FileSystem>) -> bool {
        match rustix::io::read(&*self.sink.channel, &mut self.request[..]) {
            Ok(len) => {
                let request = &self.request[..len];
                if let Ok((header, _)) = InHeader::ref_from_prefix(request) {
                    self.sink.flight.begin(header);
                }
                server.handle(request, &mut self.sink);
                self.sink.flight.end();
            }
            // Interrupted, or the request was withdrawn before it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV | Errno::CONNABORTED) => return false, // unmounted
            Err(error) => {
                log::error!("reading from /dev/fuse failed, serving ends: {error}");
                return false;
            }
        }
        true
    }
}
