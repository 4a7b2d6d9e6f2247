//! What LibFS needs of the world around it, and nothing else of it does: clocks, credentials, threads that wait
//! and wake each other, memory that is shared with the service, and hostd's door.
//!
//! The shipped host is [`Linux`](super::linux::Linux). In the simulator threads are coroutines that one seed
//! interleaves at every [`point`](Host::point), memory is a simulated region, and time is the world's: the rest of
//! LibFS is the same code. So nothing in this crate but the hosts asks the system for anything.

use core::fmt::Debug;
use core::sync::atomic::{AtomicU32, Ordering};

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::ClientId;

use super::limits::Config;
use crate::fs::Result;

/// Memory that is shared with the service: a log segment, or (only read) an arena. Offsets are in bytes from its
/// beginning; words are aligned. Out of range is a bug of the caller where nothing is said.
///
/// The service, which trusts nothing in it, may write part of it at any time, and other threads too: whatever is
/// copied out is judged afterwards, by lease words, positions and time.
pub trait Memory: Send + Sync + Debug {
    /// A word of 64 bits.
    fn load(&self, at: u64, order: Ordering) -> u64;
    /// Stores one.
    fn store(&self, at: u64, value: u64, order: Ordering);
    /// Stores `to` where `from` is; whether it was. Sequentially consistent.
    fn swap(&self, at: u64, from: u64, to: u64) -> bool;
    /// Adds (wrapping), and gives what was there before. Sequentially consistent, like those that follow.
    fn add(&self, at: u64, by: u64) -> u64;
    /// Raises to `value`.
    fn raise(&self, at: u64, value: u64);
    /// Sets bits, and gives what was there before.
    fn set(&self, at: u64, bits: u64) -> u64;
    /// Clears bits.
    fn clear(&self, at: u64, bits: u64);
    /// A word of 32 bits.
    fn load32(&self, at: u64, order: Ordering) -> u32;
    /// Stores one.
    fn store32(&self, at: u64, value: u32, order: Ordering);
    /// Copies out; `false` when the range is not inside.
    #[must_use]
    fn read(&self, at: u64, buf: &mut [u8]) -> bool;
    /// Copies in; nothing when the range is not inside.
    fn write(&self, at: u64, data: &[u8]);
    /// The same so that the next [`fence`](Self::fence) of this thread makes it persistent.
    fn write_persistent(&self, at: u64, data: &[u8]);
    /// Writes persistently as much of the beginning of `data`, whole lines, as can be summed in the same pass; how many
    /// bytes that was, and the CRC32C of what was written, continued from `crc`. Others may change `data` meanwhile.
    #[inline]
    fn write_summed(&self, _at: u64, _data: &[u8], crc: u32) -> (usize, u32) {
        (0, crc)
    }
    /// Makes what this thread has written persistently persistent.
    fn fence(&self);
    /// Waits while the word of 32 bits is `seen`: until woken, or for so many nanoseconds. May return early.
    fn wait(&self, at: u64, seen: u32, limit: u64);
    /// What it shares with others is given up: from now on nothing that is done here is seen elsewhere, nor the other way round.
    /// The first `kept` bytes are as they were, and the others zeroes. Threads may be reading and writing meanwhile.
    fn part(&self, _kept: u64) {}
    /// Told of each entry of the log when its header is there: the service may read it from now on. For those
    /// who judge.
    #[inline]
    fn wrote_entry(&self, _at: u64) {}
}

/// hostd, as an attached client sees it.
pub trait Door: Send + Sync + Debug {
    /// Its memory.
    type Memory: Memory;
    /// An arena of so many bytes; `None` when this process may not map it. Waits for services that restart.
    fn arena(&self, config: &Config, arena: u32, bytes: u64) -> Result<Option<Self::Memory>>;
    /// Wakes the service.
    fn ring(&self);
    /// Whether the node still has the log of this client, by who looks after the node's memory; `None`: nobody answers.
    fn knows(&self, _client: ClientId) -> Option<bool> {
        None
    }
    /// Descriptors that it keeps open.
    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
    /// Nothing is asked for any more, and nobody is woken: it closes them. Threads may still be inside.
    fn shut(&self) {}
}

/// See the module.
pub trait Host: Sized + Send + Sync + Debug + 'static {
    /// Shared memory.
    type Memory: Memory + 'static;
    /// hostd.
    type Door: Door<Memory = Self::Memory> + 'static;

    /// Rounds of a spin before a thread sleeps for the service's answer.
    const SPINS: u32;

    /// Realtime nanoseconds since 1970, of the kernel's last tick.
    fn realtime() -> u64;
    /// Nanoseconds of a clock that only goes forward, of the kernel's last tick: the clock of
    /// `LEASES_UNTIL`.
    fn tick() -> u64;
    /// The same clock, now.
    fn monotonic() -> u64;
    /// Effective user of the process.
    fn euid() -> u32;
    /// Whether the process is in a group.
    fn is_member(gid: u32) -> bool;
    /// A number that tells the calling thread from most others.
    fn thread() -> usize;
    /// Lets others go on.
    fn yield_now();
    /// Once round a short spin.
    fn spin();
    /// Nothing for so many nanoseconds.
    fn sleep(nanos: u64);
    /// Waits while the word, which only threads of this process use, is `seen`: until woken, or for so many
    /// nanoseconds (`u64::MAX`: without limit). May return early.
    fn wait(word: &AtomicU32, seen: u32, limit: u64);
    /// Wakes so many who wait for it.
    fn wake(word: &AtomicU32, count: u32);
    /// A place between two accesses to what threads share: another may go on here. Nothing, in a real process.
    #[inline(always)]
    fn point() {}
    /// Bytes of a caller's memory were copied, and others may have changed them the moment before. Nothing, in a
    /// real process: there they do it themselves.
    #[inline(always)]
    fn copied(_: &mut [u8]) {}
    /// Connects, and gets a log segment: its memory, once its beginning was looked at.
    fn attach(config: &Config) -> Result<(Self::Memory, Self::Door)>;
}

/// An arena: mapped, or not for this process.
pub type Arena<H> = Option<Arc<<H as Host>::Memory>>;

/// All who wait; the kernel takes the count as signed, and a negative one as 1.
pub const EVERYBODY: u32 = i32::MAX as u32;
/// No limit of time.
pub const NO_LIMIT: u64 = u64::MAX;
/// Nanoseconds of a millisecond.
pub const MS: u64 = 1_000_000;
