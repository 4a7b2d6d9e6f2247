//! A log segment reached through the region's [`Media`], and the host of whoever speaks the client's part of the
//! protocol by hand on one thread: the tests of the service, the crash states, hostile clients.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

use base::Errno;
use storage::media::{Media, Segment};

use super::host::{Door, Host, Memory};
use super::limits::Config;
use crate::fs::Result;

/// A segment of a region. What the region refuses (it is gone, or ended) reads as zeroes and is not written.
#[derive(Clone)]
pub struct OverMedia {
    media: Arc<dyn Media>,
    segment: Segment,
}

impl core::fmt::Debug for OverMedia {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("OverMedia").field("segment", &self.segment).finish_non_exhaustive()
    }
}

impl OverMedia {
    /// The segment of that region.
    pub fn new(media: Arc<dyn Media>, segment: Segment) -> Self {
        Self { media, segment }
    }

    /// Changes a word, whatever others do to it meanwhile; gives what was there.
    fn change(&self, at: u64, to: impl Fn(u64) -> u64) -> u64 {
        let mut seen = self.load(at, Ordering::SeqCst);
        loop {
            let Ok(found) = self.media.cas64(self.segment, at, seen, to(seen)) else { return 0 };
            if found == seen {
                return seen;
            }
            seen = found;
        }
    }
}

/// The word of 64 bits that has one of 32, and how far up that lies in it.
const fn half(at: u64) -> (u64, u32) {
    (at & !7, (at as u32 & 4) * 8)
}

impl Memory for OverMedia {
    fn load(&self, at: u64, _: Ordering) -> u64 {
        self.media.load64(self.segment, at).unwrap_or(0)
    }

    fn store(&self, at: u64, value: u64, _: Ordering) {
        let _ = self.media.store64(self.segment, at, value);
    }

    fn swap(&self, at: u64, from: u64, to: u64) -> bool {
        self.media.cas64(self.segment, at, from, to) == Ok(from)
    }

    fn add(&self, at: u64, by: u64) -> u64 {
        self.change(at, |word| word.wrapping_add(by))
    }

    fn raise(&self, at: u64, value: u64) {
        self.change(at, |word| word.max(value));
    }

    fn set(&self, at: u64, bits: u64) -> u64 {
        self.change(at, |word| word | bits)
    }

    fn clear(&self, at: u64, bits: u64) {
        self.change(at, |word| word & !bits);
    }

    fn load32(&self, at: u64, order: Ordering) -> u32 {
        let (at, up) = half(at);
        (self.load(at, order) >> up) as u32
    }

    fn store32(&self, at: u64, value: u32, _: Ordering) {
        let (at, up) = half(at);
        self.change(at, |word| word & !(0xffff_ffff << up) | u64::from(value) << up);
    }

    fn read(&self, at: u64, buf: &mut [u8]) -> bool {
        self.media.read(self.segment, at, buf).is_ok()
    }

    fn write(&self, at: u64, data: &[u8]) {
        let _ = self.media.write(self.segment, at, data);
    }

    fn write_persistent(&self, at: u64, data: &[u8]) {
        let _ = self.media.write(self.segment, at, data);
        let _ = self.media.persist(self.segment, at, data.len() as u64);
    }

    fn fence(&self) {
        let _ = self.media.fence();
    }

    fn wait(&self, _: u64, _: u32, _: u64) {}
}

/// One thread, which never waits, and never attaches by itself.
#[derive(Clone, Copy, Debug)]
pub struct ByHand;

/// Nobody.
#[derive(Clone, Copy, Debug)]
pub struct NoDoor;

impl Door for NoDoor {
    type Memory = OverMedia;

    fn arena(&self, _: &Config, _: u32, _: u64) -> Result<Option<OverMedia>> {
        Ok(None)
    }

    fn ring(&self) {}
}

impl Host for ByHand {
    type Memory = OverMedia;
    type Door = NoDoor;

    const SPINS: u32 = 1;

    fn realtime() -> u64 {
        0
    }

    fn tick() -> u64 {
        0
    }

    fn monotonic() -> u64 {
        0
    }

    fn euid() -> u32 {
        0
    }

    fn is_member(_: u32) -> bool {
        false
    }

    fn thread() -> usize {
        0
    }

    fn yield_now() {}

    fn spin() {}

    fn sleep(_: u64) {}

    fn wait(_: &AtomicU32, _: u32, _: u64) {}

    fn wake(_: &AtomicU32, _: u32) {}

    fn attach(_: &Config) -> Result<(OverMedia, NoDoor)> {
        Err(Errno::NOSYS)
    }
}
