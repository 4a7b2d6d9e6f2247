//! A fabric that is slower than memory: each operation waits a fixed time, to stand for PCIe in
//! measurements (DESIGN section 2).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use storage::media::{Media, MediaError, Segment, Spare};

/// `M` with a delay before each operation.
#[derive(Debug)]
pub struct Delayed<M> {
    inner: M,
    delay: Duration,
}

impl<M: Media> Delayed<M> {
    /// Delays each operation by `nanos`.
    pub fn new(inner: M, nanos: u64) -> Self {
        Self { inner, delay: Duration::from_nanos(nanos) }
    }

    fn wait(&self) -> &M {
        let end = Instant::now() + self.delay;
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        &self.inner
    }
}

impl<M: Media> Media for Delayed<M> {
    fn size(&self, segment: Segment) -> Result<u64, MediaError> {
        self.inner.size(segment)
    }
    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        self.wait().read(segment, offset, buf)
    }
    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        self.wait().write(segment, offset, data)
    }
    fn persist(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        self.wait().persist(segment, offset, len)
    }
    fn fence(&self) -> Result<(), MediaError> {
        self.wait().fence()
    }
    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        self.wait().load64(segment, offset)
    }
    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError> {
        self.wait().store64(segment, offset, value)
    }
    fn cas64(
        &self,
        segment: Segment,
        offset: u64,
        expect: u64,
        value: u64,
    ) -> Result<u64, MediaError> {
        self.wait().cas64(segment, offset, expect, value)
    }
    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        self.wait().copy(from, to, len)
    }
    fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError> {
        self.wait().ensure(segment, size)
    }
    fn discard(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        self.wait().discard(segment, offset, len)
    }
    fn back(&self, ranges: &[(Segment, u64, u64)]) -> Result<(), MediaError> {
        self.inner.back(ranges)
    }
    fn spare(&self) -> Result<Option<Spare>, MediaError> {
        self.inner.spare()
    }
    fn taken_from(&self, offset: u64) -> Result<u64, MediaError> {
        self.inner.taken_from(offset)
    }
    fn mend(&self, segment: Segment, size: u64) -> Result<bool, MediaError> {
        self.inner.mend(segment, size)
    }
    fn leave(&self, log: Segment, user: u32, bytes: u64) -> Result<bool, MediaError> {
        self.wait().leave(log, user, bytes)
    }
    fn look_at_left(&self) -> Result<BTreeMap<u32, usize>, MediaError> {
        self.inner.look_at_left()
    }
    fn remove(&self, segment: Segment) -> Result<(), MediaError> {
        self.wait().remove(segment)
    }
    fn segments(&self) -> Result<Vec<Segment>, MediaError> {
        self.wait().segments()
    }
    fn wake(&self, segment: Segment, offset: u64) -> Result<(), MediaError> {
        self.wait().wake(segment, offset)
    }
}
