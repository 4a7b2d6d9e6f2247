//! Two rings in shared memory between two processes of one host: one connection of one class.
//!
//! The dialler makes the file (a sealed memfd: it cannot shrink under the reader, and it vanishes
//! with the last process that maps it) and passes it over the local socket with its hello. From
//! then on the socket carries doorbells only, a byte each, and its end is how death is noticed.
//!
//! ```text
//! offset  size  field
//!      0     4  magic       "CBRG"
//!      4     4  version     1
//!      8     4  ring bytes  of one direction, a power of two
//!     12     4  reserved    zero
//!  64+256d   8  tail        bytes ever written   (written by the producer of direction d)
//! 128+256d   8  head        bytes ever read      (by the consumer)
//! 192+256d   4  asleep      1: ring the doorbell after writing    (set by the consumer)
//! 256+256d   4  waits       1: ring it when there is room again   (set by the producer)
//!   4096        ring of direction 0 (dialler to acceptor), then of direction 1
//! ```
//!
//! # Safety
//! Both sides map the file; the other side may write anything anywhere at any time. So every
//! counter is read as an atomic and checked before use, indices are masked, bytes are copied out
//! with raw pointers and judged only in the copy, and no reference into the mapping is ever made
//! but to atomics.
#![allow(unsafe_code)]

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::decode::{LinkError, Source};
use crate::limits::{RECEIVE_BYTES, RING_MAX};
use crate::queue::Sink;
use crate::tcp;

const MAGIC: u32 = u32::from_le_bytes(*b"CBRG");
const VERSION: u32 = 1;
const DATA: usize = 4096;
const TAIL: usize = 64;
const HEAD: usize = 128;
const ASLEEP: usize = 192;
const WAITS: usize = 256;
const DIRECTION: usize = 256;

/// The mapping.
#[derive(Debug)]
struct Map {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread; all access to it is through atomics or raw copies.
unsafe impl Send for Map {}

impl Map {
    fn new(file: &OwnedFd, len: usize) -> Result<Self, LinkError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let base = base.map_err(|e| LinkError::Io(format!("cannot map a ring: {e}")))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| LinkError::Io("a ring was mapped at address 0".to_owned()))?;
        Ok(Self { base, len })
    }

    fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= DATA && offset.is_multiple_of(8));
        // SAFETY: inside the mapping (its first page), aligned; atomics may be shared.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset + 4 <= DATA && offset.is_multiple_of(4));
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: nothing refers into the mapping any more: references live as long as `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// One side of a connection: writes one ring and reads the other.
///
/// Always true: `tail - peer's head <= size` and `peer's tail - head <= size`, or the connection
/// is given up; `tail` and `head` here are ours, and never read back from the mapping.
#[derive(Debug)]
pub struct Ring {
    map: Map,
    size: usize,
    /// Direction that this side writes; it reads the other.
    out: usize,
    tail: u64,
    head: u64,
    socket: OwnedFd,
    /// Wake-ups sent.
    pub doorbells: u64,
}

/// A file for rings of `size` bytes a direction.
pub fn create(size: usize) -> Result<OwnedFd, LinkError> {
    let failed = |e: rustix::io::Errno| LinkError::Io(format!("cannot make a ring: {e}"));
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("corbel-ring", flags).map_err(failed)?;
    rustix::fs::ftruncate(&file, (DATA + 2 * size) as u64).map_err(failed)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
    let map = Map::new(&file, DATA)?;
    map.word32(4).store(VERSION, Ordering::Relaxed);
    map.word32(8).store(size as u32, Ordering::Relaxed);
    map.word32(0).store(MAGIC, Ordering::Release);
    Ok(file)
}

impl Ring {
    /// This side of the rings in `file`, whose size the hello gave as `size`.
    pub fn open(
        file: &OwnedFd,
        size: usize,
        dialler: bool,
        socket: OwnedFd,
    ) -> Result<Self, LinkError> {
        let wrong = |what: &str| Err(LinkError::Protocol(format!("shared ring: {what}")));
        if !size.is_power_of_two() || !(4096..=RING_MAX).contains(&size) {
            return wrong("its size is no power of two from 4 KiB to 64 MiB");
        }
        // Unsealed, the peer could cut the file and have us killed by a bus error.
        match rustix::fs::fcntl_get_seals(file) {
            Ok(seals) if seals.contains(SealFlags::SHRINK) => {}
            _ => return wrong("the file is not sealed against shrinking"),
        }
        match rustix::fs::fstat(file) {
            Ok(stat) if stat.st_size == (DATA + 2 * size) as i64 => {}
            _ => return wrong("the file does not have the size that the hello gave"),
        }
        let map = Map::new(file, DATA + 2 * size)?;
        let (magic, version) = (map.word32(0), map.word32(4));
        if magic.load(Ordering::Acquire) != MAGIC || version.load(Ordering::Relaxed) != VERSION {
            return wrong("unknown magic or version");
        }
        if map.word32(8).load(Ordering::Relaxed) as usize != size {
            return wrong("its head and the hello give different sizes");
        }
        let out = usize::from(!dialler);
        Ok(Self { map, size, out, tail: 0, head: 0, socket, doorbells: 0 })
    }

    /// The socket of the doorbells.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn doorbell(&mut self) {
        self.doorbells += 1;
        tcp::ring_doorbell(self.socket.as_fd());
    }

    /// Bytes of direction `d` under way, if the peer's counter makes sense.
    fn used(&self, tail: u64, head: u64) -> Result<usize, LinkError> {
        let used = tail.wrapping_sub(head);
        if used > self.size as u64 {
            return Err(LinkError::Protocol("shared ring: a position is out of range".to_owned()));
        }
        Ok(used as usize)
    }

    fn data(&self, direction: usize, position: u64) -> (*mut u8, usize) {
        let index = position as usize & (self.size - 1);
        // SAFETY: `index < size`, and both rings of `size` bytes lie in the mapping.
        let at = unsafe { self.map.base.as_ptr().add(DATA + direction * self.size + index) };
        (at, self.size - index)
    }

    fn copy_in(&mut self, bytes: &[u8]) {
        let (first, until_end) = self.data(self.out, self.tail);
        let cut = bytes.len().min(until_end);
        // SAFETY: the destination was checked to be free and lies in the mapping, which no slice
        // of ours overlaps; `data` bounds each half.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), first, cut);
            let (start, _) = self.data(self.out, 0);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(cut), start, bytes.len() - cut);
        }
        self.tail = self.tail.wrapping_add(bytes.len() as u64);
    }

    /// Whether the peer has written something that was not read yet.
    pub fn has_input(&self) -> bool {
        let tail = self.map.word64(TAIL + (1 - self.out) * DIRECTION);
        tail.load(Ordering::Acquire) != self.head
    }

    /// Announces that this side goes to sleep. False, and not announced, if there is input.
    pub fn sleep(&self) -> bool {
        let asleep = self.map.word32(ASLEEP + (1 - self.out) * DIRECTION);
        asleep.store(1, Ordering::Relaxed);
        // Against the fence in `write`: either we see its bytes or it sees that we sleep.
        fence(Ordering::SeqCst);
        if self.has_input() {
            asleep.store(0, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Takes the announcement back.
    pub fn awake(&self) {
        self.map.word32(ASLEEP + (1 - self.out) * DIRECTION).store(0, Ordering::Relaxed);
    }

    /// Asks for a doorbell once there is room. False if there is room now.
    pub fn wait_for_room(&self) -> Result<bool, LinkError> {
        let waits = self.map.word32(WAITS + self.out * DIRECTION);
        waits.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let head = self.map.word64(HEAD + self.out * DIRECTION).load(Ordering::Acquire);
        Ok(self.used(self.tail, head)? == self.size)
    }
}

impl Sink for Ring {
    fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
        let head = self.map.word64(HEAD + self.out * DIRECTION).load(Ordering::Acquire);
        let mut room = self.size - self.used(self.tail, head)?;
        let mut written = 0;
        for part in parts {
            let n = part.len().min(room);
            self.copy_in(&part[..n]);
            room -= n;
            written += n;
        }
        if written == 0 {
            return Ok(0);
        }
        self.map.word64(TAIL + self.out * DIRECTION).store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        let asleep = self.map.word32(ASLEEP + self.out * DIRECTION);
        if asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0 {
            self.doorbell();
        }
        Ok(written)
    }
}

impl Source for Ring {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        let direction = 1 - self.out;
        let tail = self.map.word64(TAIL + direction * DIRECTION).load(Ordering::Acquire);
        let there = self.used(tail, self.head)?;
        let n = there.min(max).min(dst.capacity() - dst.len());
        if n == 0 {
            return Ok(0);
        }
        let (first, until_end) = self.data(direction, self.head);
        let cut = n.min(until_end);
        let (start, _) = self.data(direction, 0);
        // SAFETY: `n` is within the spare capacity of `dst` and within what the ring holds; the
        // two halves lie in the mapping. The peer may be writing there: then the copy holds
        // garbage, which its reader finds out from the copy.
        unsafe {
            let to = dst.as_mut_ptr().add(dst.len());
            std::ptr::copy_nonoverlapping(first.cast_const(), to, cut);
            std::ptr::copy_nonoverlapping(start.cast_const(), to.add(cut), n - cut);
            dst.set_len(dst.len() + n);
        }
        self.head = self.head.wrapping_add(n as u64);
        self.map.word64(HEAD + direction * DIRECTION).store(self.head, Ordering::Release);
        // A waiting producer is woken when it is worth it, and surely when the ring is empty.
        if there == n || there - n <= self.size.saturating_sub(RECEIVE_BYTES) / 2 {
            fence(Ordering::SeqCst);
            let waits = self.map.word32(WAITS + direction * DIRECTION);
            if waits.load(Ordering::Relaxed) != 0 && waits.swap(0, Ordering::Relaxed) != 0 {
                self.doorbell();
            }
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    const SIZE: usize = 4096;

    /// Both sides, and a third mapping through which a hostile peer scribbles.
    fn pair() -> (Ring, Ring, Map) {
        let flags = SocketFlags::NONBLOCK;
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("sockets");
        let file = create(SIZE).expect("a ring");
        let map = Map::new(&file, DATA + 2 * SIZE).expect("a mapping");
        let one = Ring::open(&file, SIZE, true, a).expect("the dialler's side");
        (one, Ring::open(&file, SIZE, false, b).expect("the other side"), map)
    }

    #[test]
    fn bytes_arrive_in_order_around_the_end() {
        let (mut one, mut two, _) = pair();
        let mut random = Random::new(1);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for _ in 0..3000 {
            let mut bytes = vec![0u8; random.below(SIZE as u64 + 100) as usize];
            random.fill(&mut bytes);
            let cut = bytes.len() / 3;
            let parts = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            let n = one.write(&parts).expect("a right ring");
            sent.extend_from_slice(&bytes[..n]);
            let max = 1 + random.below(SIZE as u64) as usize;
            got.reserve(max);
            two.read(&mut got, max).expect("a right ring");
        }
        assert!(sent.len() > 1 << 20);
        assert_eq!(got[..], sent[..got.len()]);
        assert!(sent.len() - got.len() <= SIZE);
    }

    #[test]
    fn a_sleeper_is_woken_once_and_never_sleeps_on_input() {
        let (mut one, mut two, _) = pair();
        assert!(two.sleep());
        one.write(&[IoSlice::new(b"a")]).expect("room");
        one.write(&[IoSlice::new(b"b")]).expect("room");
        assert_eq!(one.doorbells, 1);
        assert!(tcp::drain(two.socket()).is_ok());
        assert!(!two.sleep(), "there is input");
        let mut got = Vec::with_capacity(8);
        assert_eq!(two.read(&mut got, 8), Ok(2));
        assert_eq!(two.doorbells, 0, "nobody waits for room");
        one.write(&[IoSlice::new(&[0u8; SIZE])]).expect("room");
        assert_eq!(one.wait_for_room(), Ok(true));
        let mut got = Vec::with_capacity(SIZE);
        two.read(&mut got, SIZE).expect("input");
        assert_eq!(two.doorbells, 1);
        assert_eq!(one.wait_for_room(), Ok(false));
    }

    /// The peer may write any value anywhere: positions out of range end the connection, and no
    /// byte outside the ring is ever read or written (the mapping ends right behind it).
    #[test]
    fn wild_positions_are_found() {
        let mut random = Random::new(2);
        let mut found = 0;
        for _ in 0..2000 {
            let (mut one, mut two, map) = pair();
            one.write(&[IoSlice::new(&[1u8; 100])]).expect("room");
            let wild = match random.below(3) {
                0 => random.next_u64(),
                1 => random.below(3 * SIZE as u64),
                _ => random.below(200).wrapping_sub(100),
            };
            map.word64(TAIL).store(wild, Ordering::Release);
            map.word64(HEAD).store(wild, Ordering::Release);
            let mut got = Vec::with_capacity(2 * SIZE);
            let read = two.read(&mut got, 2 * SIZE);
            assert_eq!(read.is_err(), wild > SIZE as u64, "tail {wild}");
            map.word64(HEAD).store(wild, Ordering::Release);
            let written = one.write(&[IoSlice::new(&[2u8; 2 * SIZE])]);
            assert_eq!(written.is_err(), 100u64.wrapping_sub(wild) > SIZE as u64, "head {wild}");
            found += u32::from(read.is_err()) + u32::from(written.is_err());
        }
        assert!(found > 1000);
    }
}
