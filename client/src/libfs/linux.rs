//! LibFS in a real process: mapped memory, futexes, the kernel's clocks, hostd's socket. Makes its system calls
//! itself (no libc), so that it can live in strangers' processes.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use base::{ClientId, Errno};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec, clock_gettime};
use storage::format::control::{self, Descriptor};
use storage::format::rpc;
use storage::format::sum::arena_bytes;
use storage::limits::BLOCK_BYTES;
use storage::persist;

use super::host::{Door, Host, MS, Memory, NO_LIMIT};
use super::limits::Config;
use super::sync::RwLock;
use super::verify::Verify;
use crate::fs::Result;
use crate::kept::Kept;

/// Attempts to get an arena, 20 ms apart, while the services restart.
const ARENA_TRIES: u32 = 1500;
/// Between two of them.
const ARENA_PAUSE: u64 = 20 * MS;
/// How long a thread that may be told to wait no longer waits for hostd.
const STOP_LIMIT: Duration = Duration::from_millis(1000);
/// How long who waits for nicfs waits for what hostd says of that.
const KNOWS_LIMIT: Duration = Duration::from_millis(200);
/// Descriptors received with a message, at most.
const FDS_MAX: usize = 2;

fn errno(e: rustix::io::Errno) -> Errno {
    Errno(e.raw_os_error() as u16)
}

fn time_of(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

fn span(nanos: u64) -> Timespec {
    Timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 }
}

/// Waits on a futex. Any outcome (woken, value changed, signal, time over) means: look again.
fn futex_wait(word: &AtomicU32, flags: futex::Flags, seen: u32, limit: u64) {
    let limit = (limit != NO_LIMIT).then(|| span(limit));
    let _ = futex::wait(word, flags, seen, limit.as_ref());
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Linux;

impl Host for Linux {
    type Memory = Mapping;
    type Door = Connection;

    /// About 10 microseconds.
    const SPINS: u32 = 250;

    #[inline]
    fn realtime() -> u64 {
        time_of(ClockId::RealtimeCoarse)
    }

    #[inline]
    fn tick() -> u64 {
        time_of(ClockId::MonotonicCoarse)
    }

    fn monotonic() -> u64 {
        time_of(ClockId::Monotonic)
    }

    #[inline]
    fn euid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn is_member(gid: u32) -> bool {
        rustix::process::getegid().as_raw() == gid
            || rustix::process::getgroups()
                .is_ok_and(|all| all.iter().any(|group| group.as_raw() == gid))
    }

    #[inline]
    fn thread() -> usize {
        // The stack's address tells threads apart, without thread-local storage.
        let probe = 0u8;
        let stack = core::ptr::from_ref(&probe) as u64 >> 16;
        // Stacks lie at even distances, and the number is taken modulo a power of two.
        (stack.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
    }

    fn yield_now() {
        rustix::thread::sched_yield();
    }

    #[inline]
    fn spin() {
        core::hint::spin_loop();
    }

    fn sleep(nanos: u64) {
        let _ = rustix::thread::nanosleep(&span(nanos));
    }

    fn wait(word: &AtomicU32, seen: u32, limit: u64) {
        futex_wait(word, futex::Flags::PRIVATE, seen, limit);
    }

    fn wake(word: &AtomicU32, count: u32) {
        let _ = futex::wake(word, futex::Flags::PRIVATE, count);
    }

    fn attach(config: &Config) -> Result<(Mapping, Connection)> {
        let (socket, fds) = config.with_room(|| {
            let socket = connect(config, None)?;
            let (_, fds) = ask(socket.as_fd(), rpc::HOST_ATTACH, config.lanes.into(), config)?;
            Ok((socket, fds))
        })?;
        let [log, bell] = <[Kept; 2]>::try_from(fds).map_err(|_| Errno::IO)?;
        let memory = map_log(log.as_fd())?;
        if config.whole_log {
            take_whole(log.as_fd(), memory.len)?;
        }
        Ok((
            memory,
            Connection {
                socket: RwLock::new(Some(socket)),
                bell: RwLock::new(Some(bell)),
                config: config.clone(),
            },
        ))
    }
}

/// Maps a log segment whole, as long as its own beginning says that it is.
fn map_log(log: BorrowedFd<'_>) -> Result<Mapping> {
    let head = Mapping::new(log, 4096, false)?;
    let mut bytes = [0u8; control::DESCRIPTOR_BYTES];
    let _ = head.read(0, &mut bytes);
    let descriptor = Descriptor::decode(&bytes).map_err(|_| Errno::IO)?;
    let size = rustix::fs::fstat(log).map_err(|_| Errno::IO)?.st_size as u64;
    if size < descriptor.segment_bytes() {
        return Err(Errno::IO);
    }
    Mapping::new(log, descriptor.segment_bytes() as usize, true)
}

/// Takes the memory that a log has a right to, where it can be taken before it is touched.
fn take_whole(log: BorrowedFd<'_>, len: usize) -> Result<()> {
    use rustix::io::Errno as OsError;
    loop {
        match rustix::fs::fallocate(log, rustix::fs::FallocateFlags::KEEP_SIZE, 0, len as u64) {
            Err(OsError::INTR) => {}
            Err(OsError::OPNOTSUPP | OsError::NOSYS) => return Ok(()),
            done => return done.map_err(errno),
        }
    }
}

// --- memory ---

/// A shared mapping that lives as long as the value.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory, reached only through atomics and raw copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd`.
    pub fn new(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Result<Self> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let at =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }
                .map_err(errno)?;
        let mapping = NonNull::new(at.cast()).map(|base| Self { base, len }).ok_or(Errno::NOMEM)?;
        // A child of fork has a session of its own, and perhaps other rights: it shall not have this memory.
        // SAFETY: the range is the mapping's own; what a child does not have nobody there refers to, since a child
        // attaches anew (docs/client.md).
        unsafe { rustix::mm::madvise(at, len, rustix::mm::Advice::LinuxDontFork) }
            .map_err(errno)?;
        Ok(mapping)
    }

    /// See [`Memory::part`]: memory of this process's own takes the place of the mapping in one step, so that a file that is
    /// removed is no more when the last who has it open or mapped lets it go.
    fn replace(&self, kept: usize) -> Result<()> {
        let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, self.len);
        let kept = kept.min(len);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let own = unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), len, prot, flags) }
            .map_err(errno)?;
        for at in (0..kept).step_by(BLOCK_BYTES as usize) {
            let len = (kept - at).min(BLOCK_BYTES as usize);
            // SAFETY: both ranges are mapped, and they do not overlap; others may store to the first meanwhile, in words
            // (which nobody asks for any more), and nobody knows the second.
            unsafe {
                let (from, to) = (self.base.as_ptr().add(at), own.cast::<u8>().add(at));
                // What is not stored to takes no memory: most of the table of leases, of each session that ever was.
                let words = from.cast::<u64>();
                if (0..len.div_ceil(8)).any(|i| words.add(i).read_volatile() != 0) {
                    core::ptr::copy_nonoverlapping(from, to, len);
                }
            }
        }
        // SAFETY: the range is the fresh mapping's.
        let moved = unsafe { rustix::mm::madvise(own, len, rustix::mm::Advice::LinuxDontFork) }
            .and_then(|()| {
                let to = self.base.as_ptr().cast();
                let how = rustix::mm::MremapFlags::MAYMOVE;
                // SAFETY: what was mapped there is this value's alone, and stays mapped without a gap, as memory of the same
                // length; it is reached only through atomics and raw copies, whose readers know that it is over
                // (`Log::part`).
                unsafe { rustix::mm::mremap_fixed(own, len, len, how, to) }
            });
        if moved.is_err() {
            // SAFETY: the fresh mapping is where it was made, and nobody knows it.
            let _ = unsafe { rustix::mm::munmap(own, len) };
        }
        moved.map(|_| ()).map_err(errno)
    }

    #[inline]
    fn at(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = usize::try_from(offset).ok()?.checked_add(len)?;
        // SAFETY: offset + len <= self.len, so the pointer stays inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset as usize) })
    }

    #[inline]
    fn word(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at + 8 <= control::LANES);
        // SAFETY: words are asked for of log segments only, whose control area is mapped (its size is part of
        // every segment); the offset is aligned, and shared words are only ever accessed atomically.
        unsafe { &*self.base.as_ptr().add(at as usize).cast::<AtomicU64>() }
    }

    #[inline]
    fn word32(&self, at: u64) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= control::LANES);
        // SAFETY: as in `word`.
        unsafe { &*self.base.as_ptr().add(at as usize).cast::<AtomicU32>() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping made in `new`; nobody borrows from it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Memory for Mapping {
    fn part(&self, kept: u64) {
        // Where that fails it stays shared, which costs memory only.
        let _ = self.replace(usize::try_from(kept).unwrap_or(usize::MAX));
    }

    #[inline]
    fn load(&self, at: u64, order: Ordering) -> u64 {
        self.word(at).load(order)
    }

    #[inline]
    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }

    #[inline]
    fn swap(&self, at: u64, from: u64, to: u64) -> bool {
        self.word(at).compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn add(&self, at: u64, by: u64) -> u64 {
        self.word(at).fetch_add(by, Ordering::SeqCst)
    }

    #[inline]
    fn raise(&self, at: u64, value: u64) {
        self.word(at).fetch_max(value, Ordering::SeqCst);
    }

    #[inline]
    fn set(&self, at: u64, bits: u64) -> u64 {
        self.word(at).fetch_or(bits, Ordering::SeqCst)
    }

    #[inline]
    fn clear(&self, at: u64, bits: u64) {
        self.word(at).fetch_and(!bits, Ordering::SeqCst);
    }

    #[inline]
    fn load32(&self, at: u64, order: Ordering) -> u32 {
        self.word32(at).load(order)
    }

    #[inline]
    fn store32(&self, at: u64, value: u32, order: Ordering) {
        self.word32(at).store(value, order);
    }

    #[inline]
    fn read(&self, at: u64, buf: &mut [u8]) -> bool {
        let Some(at) = self.at(at, buf.len()) else { return false };
        // SAFETY: `at` checked the range; `buf` is memory of our own. The service may be writing
        // the same bytes: callers check lease and position afterwards and then discard the copy.
        unsafe { core::ptr::copy_nonoverlapping(at, buf.as_mut_ptr(), buf.len()) };
        true
    }

    fn write(&self, at: u64, data: &[u8]) {
        if let Some(at) = self.at(at, data.len()) {
            // SAFETY: the range was checked; the caller owns it until it says otherwise by a word.
            unsafe { core::ptr::copy_nonoverlapping(data.as_ptr(), at, data.len()) };
        }
    }

    #[inline]
    fn write_persistent(&self, at: u64, data: &[u8]) {
        if let Some(at) = self.at(at, data.len()) {
            // SAFETY: the range was checked; of our threads only the one that holds the lane's lock writes
            // it, and the service only reads it and validates its copy.
            unsafe { persist::copy_persistent(at, data) };
        }
    }

    #[inline]
    fn write_summed(&self, at: u64, data: &[u8], crc: u32) -> (usize, u32) {
        let Some(at) = self.at(at, data.len()) else { return (0, crc) };
        // SAFETY: as above.
        unsafe { persist::copy_summed(at, data, crc) }
    }

    #[inline]
    fn fence(&self) {
        persist::fence();
    }

    fn wait(&self, at: u64, seen: u32, limit: u64) {
        futex_wait(self.word32(at), futex::Flags::empty(), seen, limit);
    }
}

// --- hostd ---

/// The connection to hostd, and the service's doorbell.
#[derive(Debug)]
pub struct Connection {
    /// Both are there until the door is shut.
    socket: RwLock<Option<Kept>>,
    bell: RwLock<Option<Kept>>,
    config: Config,
}

impl Door for Connection {
    type Memory = Mapping;

    fn arena(&self, config: &Config, arena: u32, bytes: u64) -> Result<Option<Mapping>> {
        match self.ask_arena(config, arena) {
            Ok((_, fds)) => {
                let fd = fds.first().ok_or(Errno::IO)?;
                match Mapping::new(fd.as_fd(), mapped(config, fd.as_fd(), bytes) as usize, false) {
                    // The process may not have that many addresses (`ulimit -v`): the service reads for it.
                    Err(Errno::NOMEM) => Ok(None),
                    made => made.map(Some),
                }
            }
            Err(Errno::ACCES) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn ring(&self) {
        // An eventfd write fails only when its counter is full: then the bell rings already.
        if let Some(bell) = &*self.bell.read() {
            let _ = rustix::io::write(bell.as_fd(), &1u64.to_le_bytes());
        }
    }

    fn knows(&self, client: ClientId) -> Option<bool> {
        let config = &self.config;
        if config.bars() {
            return None;
        }
        // By a connection of its own: the other one may be of a hostd that has ended, and is in use by who asks for arenas.
        let asked = config.with_room(|| {
            let socket = connect(config, Some(KNOWS_LIMIT))?;
            ask(socket.as_fd(), rpc::HOST_KNOWS, client.0, config)
        });
        // A hostd of the version before does not take the question.
        asked.ok().map(|(known, _)| known == 1)
    }

    fn descriptors(&self) -> Vec<i32> {
        let both = [self.socket.read(), self.bell.read()];
        both.iter().filter_map(|fd| fd.as_ref().map(Kept::as_raw_fd)).collect()
    }

    fn shut(&self) {
        for fd in [&self.socket, &self.bell] {
            drop(fd.write().take());
        }
    }
}

/// Bytes to map of an arena: with the checksums behind its blocks where they are wanted and there. (Of regions of the version
/// before there are none.)
fn mapped(config: &Config, fd: BorrowedFd<'_>, bytes: u64) -> u64 {
    let all = arena_bytes(bytes / BLOCK_BYTES);
    let there = || rustix::fs::fstat(fd).is_ok_and(|about| about.st_size as u64 >= all);
    if config.verify != Verify::Never && there() { all } else { bytes }
}

impl Connection {
    fn ask_arena(&self, config: &Config, arena: u32) -> Result<(u64, Vec<Kept>)> {
        let mut socket = self.socket.write();
        for _ in 0..ARENA_TRIES {
            let open = socket.as_ref().ok_or(Errno::NOTCONN)?;
            let ask = || ask(open.as_fd(), rpc::HOST_ARENA, arena.into(), config);
            match config.with_room(ask) {
                // hostd was restarted: it keeps nothing that the service has not told it again.
                Err(Errno::NOTCONN | Errno(104) | Errno(32)) => {
                    if config.bars() {
                        return Err(Errno::IO);
                    }
                    if let Ok(fresh) = connect(config, None) {
                        *socket = Some(fresh);
                        continue;
                    }
                }
                // The node service is being restarted.
                Err(Errno::AGAIN) => {}
                other => return other,
            }
            if config.stops() {
                return Err(Errno::INTR);
            }
            Linux::sleep(ARENA_PAUSE);
        }
        Err(Errno::IO)
    }
}

/// Moves a descriptor up, out of the program's way.
fn raise(fd: OwnedFd, config: &Config) -> Kept {
    Kept::new(fd, config.fd_min, config.watch)
}

fn ask(
    socket: BorrowedFd<'_>,
    kind: u32,
    argument: u64,
    config: &Config,
) -> Result<(u64, Vec<Kept>)> {
    let request = rpc::host_request(kind, argument);
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&request)],
            &mut SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        )
    })
    .map_err(errno)?;
    let mut reply = [0u8; rpc::HOST_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut reply)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    // After a time-out the answer may still come: this connection is of no use any more.
    .map_err(|e| if e == rustix::io::Errno::AGAIN { Errno::NOTCONN } else { errno(e) })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(|fd| raise(fd, config)));
        }
    }
    if received.bytes == 0 {
        return Err(Errno::NOTCONN);
    }
    // What has come along got no number: the program has them all.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    let value = rpc::host_reply_decode(&reply).map_err(|_| Errno::IO)??;
    Ok((value, fds))
}

/// Connects to hostd; who waits for an answer waits no longer than that.
fn connect(config: &Config, limit: Option<Duration>) -> Result<Kept> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(errno)?;
    // A hostd that is stopped must not hold a thread for longer than it may wait.
    let limit = limit.or(config.stop.map(|_| STOP_LIMIT));
    if limit.is_some() {
        for direction in [Timeout::Recv, Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(&socket, direction, limit).map_err(errno)?;
        }
    }
    let address = SocketAddrUnix::new(&config.socket[..]).map_err(errno)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(errno)?;
    Ok(raise(socket, config))
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_parts_keeps_its_beginning_and_nothing_goes_through_it() {
        let file =
            rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        let (kept, len) = (control::RPC, control::LANES as usize + (1 << 20));
        rustix::fs::ftruncate(&file, len as u64).expect("memory");
        let [ours, others] =
            [true, true].map(|w| Mapping::new(file.as_fd(), len, w).expect("mapped"));
        ours.store(control::REPLICATED, 7, Ordering::SeqCst);
        ours.write(control::LANES, b"entry");
        // As one would who looks for a lease through the whole table.
        assert!(
            (control::LEASES..kept).step_by(16).all(|at| ours.load(at, Ordering::Relaxed) == 0)
        );
        ours.part(kept);
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let begin = std::format!("{:x}-", ours.base.as_ptr() as usize);
        let mut of_ours = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let resident = of_ours.find_map(|line| line.strip_prefix("Rss:")).expect("a mapping");
        let kib: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
        assert!(kib <= 16, "{kib} KiB of a session that is over stay");
        let mut bytes = [1; 5];
        assert!(ours.read(control::LANES, &mut bytes) && bytes == [0; 5], "{bytes:?}");
        assert_eq!(ours.load(control::REPLICATED, Ordering::SeqCst), 7);
        ours.store(control::REPLICATED, 8, Ordering::SeqCst);
        ours.write(control::LANES, b"later");
        assert!(others.read(control::LANES, &mut bytes) && &bytes == b"entry", "{bytes:?}");
        assert_eq!(others.load(control::REPLICATED, Ordering::SeqCst), 7);
    }
}
