//! A region in memory that can be undone, and that writes down what is done to it.
//!
//! Undoing is what makes a crash state cheap: the bytes that make the state, and everything that
//! recovery then writes, are taken back by their old bytes; nothing is copied but what changes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use storage::media::{Media, MediaError, Segment};

const PAGE: usize = 4096;

/// Who does something to the region. A fence completes only write-backs of its own side, as a
/// store fence does for the CPU that executes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// nicfs.
    Node,
    /// An application with LibFS.
    Client,
    /// hostd.
    Host,
    /// A thread of nicfs that works for the one that decides.
    Worker,
}

impl Side {
    /// How many there are.
    pub const COUNT: usize = Self::Worker as usize + 1;
}

/// One thing that happened, in order.
#[derive(Clone, Debug)]
pub enum Event {
    /// Bytes `at..at + len` of the trace's pool were stored.
    Store {
        /// Where.
        segment: Segment,
        /// Offset in the segment.
        offset: usize,
        /// First byte in the pool.
        at: usize,
        /// How many.
        len: usize,
    },
    /// A range became zeroes.
    Clear {
        /// Where.
        segment: Segment,
        /// First byte.
        offset: usize,
        /// How many.
        len: usize,
    },
    /// Write-back of a range was started.
    Persist {
        /// By whom.
        side: Side,
        /// Where.
        segment: Segment,
        /// First byte.
        offset: usize,
        /// How many.
        len: usize,
    },
    /// Write-backs of that side are complete.
    Fence(Side),
    /// A segment exists with at least that size.
    Ensure(Segment, u64),
    /// A segment is gone.
    Remove(Segment),
    /// That many operations have begun.
    Begun(usize),
    /// That many operations have returned to the application.
    Returned(usize),
    /// That many operations are covered by an fsync that may have returned.
    Synced(usize),
}

/// The word in which the service says how far fsync may return. From its store on, an fsync that
/// asks for no more returns at once: what it covers must survive.
#[derive(Clone, Debug)]
pub struct Acks {
    /// The client's log.
    pub segment: Segment,
    /// The word.
    pub offset: usize,
    /// Sequence of each operation.
    pub sequences: Vec<u64>,
}

/// What was done to a region.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What a store may mean for the client.
    pub acks: Option<Acks>,
    /// In order.
    pub events: Vec<Event>,
    /// Bytes stored.
    pub pool: Vec<u8>,
}

#[derive(Debug)]
struct Bytes {
    segment: Segment,
    data: Vec<u8>,
    /// Pages that may hold something else than zeroes: a bit each.
    touched: Vec<u64>,
}

#[derive(Debug)]
enum Undo {
    Bytes { segment: Segment, offset: usize, at: usize },
    Made(Segment),
    Grown(Segment, usize),
    Removed(Bytes),
}

#[derive(Debug, Default)]
struct State {
    segments: Vec<Bytes>,
    undo: Vec<Undo>,
    old: Vec<u8>,
    trace: Option<Trace>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Region(Mutex<State>);

/// A point to which a region can be taken back.
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize);

impl Bytes {
    fn touch(&mut self, offset: usize, len: usize) {
        if len > 0 {
            for page in offset / PAGE..=(offset + len - 1) / PAGE {
                self.touched[page / 64] |= 1 << (page % 64);
            }
        }
    }

    fn resize(&mut self, size: usize) {
        if self.data.is_empty() {
            // Fresh zeroes of the system cost nothing before they are touched.
            self.data = vec![0; size];
        } else {
            self.data.resize(size, 0);
        }
        self.touched.resize(size.div_ceil(PAGE * 64), 0);
    }

    fn range(&self, offset: u64, len: u64) -> Result<std::ops::Range<usize>, MediaError> {
        let (segment, size) = (self.segment, self.data.len() as u64);
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(offset as usize..end as usize),
            _ => Err(MediaError::OutOfRange { segment, offset, len, size }),
        }
    }
}

impl State {
    fn find(&mut self, segment: Segment) -> Result<&mut Bytes, MediaError> {
        let found = self.segments.iter_mut().find(|b| b.segment == segment);
        found.ok_or(MediaError::Missing(segment))
    }

    fn store(&mut self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        let Self { segments, undo, old, trace } = self;
        let found = segments.iter_mut().find(|b| b.segment == segment);
        let bytes = found.ok_or(MediaError::Missing(segment))?;
        let range = bytes.range(offset, data.len() as u64)?;
        let offset = range.start;
        undo.push(Undo::Bytes { segment, offset, at: old.len() });
        old.extend_from_slice(&bytes.data[range.clone()]);
        bytes.touch(offset, data.len());
        bytes.data[range].copy_from_slice(data);
        if let Some(trace) = trace {
            let at = trace.pool.len();
            trace.pool.extend_from_slice(data);
            trace.events.push(Event::Store { segment, offset, at, len: data.len() });
        }
        Ok(())
    }

    fn word(&mut self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        let bytes = self.find(segment)?;
        let range = bytes.range(offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(MediaError::Io(format!("{segment:?}: word at {offset} is not aligned")));
        }
        let mut word = [0; 8];
        word.copy_from_slice(&bytes.data[range]);
        Ok(u64::from_le_bytes(word))
    }

    fn note(&mut self, event: Event) {
        if let Some(trace) = &mut self.trace {
            trace.events.push(event);
        }
    }

    fn ensure(&mut self, segment: Segment, size: u64) -> Result<(), MediaError> {
        let Ok(want) = usize::try_from(size) else {
            return Err(MediaError::Io(format!("{segment:?}: too large for memory")));
        };
        match self.segments.iter_mut().find(|b| b.segment == segment) {
            Some(bytes) if bytes.data.len() >= want => return Ok(()),
            Some(bytes) => {
                let before = bytes.data.len();
                bytes.resize(want);
                self.undo.push(Undo::Grown(segment, before));
            }
            None => {
                let mut bytes = Bytes { segment, data: Vec::new(), touched: Vec::new() };
                bytes.resize(want);
                self.segments.push(bytes);
                self.undo.push(Undo::Made(segment));
            }
        }
        self.note(Event::Ensure(segment, size));
        Ok(())
    }

    fn clear(&mut self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        let trace = self.trace.take();
        let bytes = self.find(segment)?;
        let range = bytes.range(offset, len)?;
        // Only pages that hold something: a fresh control area is large.
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let end = ((at / PAGE + 1) * PAGE).min(range.end);
            if bytes.touched[at / PAGE / 64] & (1 << (at / PAGE % 64)) != 0 {
                parts.push(at..end);
            }
            at = end;
        }
        for part in parts {
            self.store(segment, part.start as u64, &vec![0; part.len()])?;
        }
        self.trace = trace;
        self.note(Event::Clear { segment, offset: range.start, len: range.len() });
        Ok(())
    }

    fn remove(&mut self, segment: Segment) -> Result<(), MediaError> {
        let found = self.segments.iter().position(|b| b.segment == segment);
        let at = found.ok_or(MediaError::Missing(segment))?;
        let bytes = self.segments.remove(at);
        self.undo.push(Undo::Removed(bytes));
        self.note(Event::Remove(segment));
        Ok(())
    }

    fn undo_to(&mut self, mark: usize) {
        while self.undo.len() > mark {
            match self.undo.pop() {
                Some(Undo::Bytes { segment, offset, at }) => {
                    let old = &self.old[at..];
                    if let Some(b) = self.segments.iter_mut().find(|b| b.segment == segment) {
                        b.data[offset..offset + old.len()].copy_from_slice(old);
                    }
                    self.old.truncate(at);
                }
                Some(Undo::Made(segment)) => self.segments.retain(|b| b.segment != segment),
                Some(Undo::Grown(segment, before)) => {
                    if let Ok(bytes) = self.find(segment) {
                        bytes.data.truncate(before);
                    }
                }
                Some(Undo::Removed(bytes)) => self.segments.push(bytes),
                None => return,
            }
        }
    }
}

impl Region {
    /// An empty region.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The region as one side reaches it.
    pub fn by(self: &Arc<Self>, side: Side) -> Arc<dyn Media> {
        Arc::new(View { region: Arc::clone(self), side })
    }

    /// What is done from here on can be undone.
    pub fn mark(&self) -> Mark {
        Mark(self.state().undo.len())
    }

    /// Takes back everything since the mark.
    pub fn undo_to(&self, mark: Mark) {
        self.state().undo_to(mark.0);
    }

    /// What was done so far stays.
    pub fn settle(&self) {
        let mut state = self.state();
        state.undo.clear();
        state.old = Vec::new();
    }

    /// Begins to write down what is done.
    pub fn record(&self) {
        self.state().trace = Some(Trace::default());
    }

    /// Ends it.
    pub fn recorded(&self) -> Trace {
        self.state().trace.take().unwrap_or_default()
    }

    /// Goes on with what was written down.
    pub fn resume(&self, trace: Trace) {
        self.state().trace = Some(trace);
    }

    /// Notes how far the application is.
    pub fn note(&self, event: Event) {
        self.state().note(event);
    }

    /// Stores bytes.
    pub fn put(&self, segment: Segment, offset: usize, data: &[u8]) -> Result<(), MediaError> {
        self.state().store(segment, offset as u64, data)
    }

    /// Copies bytes out; short where the segment ends.
    pub fn get(&self, segment: Segment, offset: usize, buf: &mut [u8]) -> usize {
        let mut state = self.state();
        let Ok(bytes) = state.find(segment) else { return 0 };
        let end = (offset + buf.len()).min(bytes.data.len());
        let len = end.saturating_sub(offset);
        buf[..len].copy_from_slice(&bytes.data[offset..offset + len]);
        len
    }

    /// Makes a segment.
    pub fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError> {
        self.state().ensure(segment, size)
    }

    /// Removes a segment.
    pub fn remove(&self, segment: Segment) -> Result<(), MediaError> {
        self.state().remove(segment)
    }

    /// Parts of a range that may hold something else than zeroes.
    pub fn touched(&self, segment: Segment, offset: usize, len: usize) -> Vec<(usize, usize)> {
        let mut state = self.state();
        let Ok(bytes) = state.find(segment) else { return Vec::new() };
        let end = (offset + len).min(bytes.data.len());
        let (mut parts, mut at) = (Vec::new(), offset);
        while at < end {
            let next = ((at / PAGE + 1) * PAGE).min(end);
            if bytes.touched[at / PAGE / 64] & (1 << (at / PAGE % 64)) != 0 {
                parts.push((at, next - at));
            }
            at = next;
        }
        parts
    }
}

/// The region as one side reaches it.
#[derive(Debug)]
struct View {
    region: Arc<Region>,
    side: Side,
}

impl Media for View {
    fn size(&self, segment: Segment) -> Result<u64, MediaError> {
        Ok(self.region.state().find(segment)?.data.len() as u64)
    }

    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        let mut state = self.region.state();
        let bytes = state.find(segment)?;
        let range = bytes.range(offset, buf.len() as u64)?;
        buf.copy_from_slice(&bytes.data[range]);
        Ok(())
    }

    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        self.region.state().store(segment, offset, data)
    }

    fn persist(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        let mut state = self.region.state();
        let range = state.find(segment)?.range(offset, len)?;
        let (side, offset, len) = (self.side, range.start, range.len());
        state.note(Event::Persist { side, segment, offset, len });
        Ok(())
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.region.state().note(Event::Fence(self.side));
        Ok(())
    }

    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        self.region.state().word(segment, offset)
    }

    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError> {
        let mut state = self.region.state();
        if state.word(segment, offset)? == value {
            return Ok(());
        }
        state.store(segment, offset, &value.to_le_bytes())
    }

    fn cas64(
        &self,
        segment: Segment,
        offset: u64,
        expect: u64,
        value: u64,
    ) -> Result<u64, MediaError> {
        let mut state = self.region.state();
        let found = state.word(segment, offset)?;
        if found == expect {
            state.store(segment, offset, &value.to_le_bytes())?;
        }
        Ok(found)
    }

    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        let mut state = self.region.state();
        let bytes = state.find(from.0)?;
        let range = bytes.range(from.1, len)?;
        let data = bytes.data[range].to_vec();
        state.store(to.0, to.1, &data)
    }

    fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError> {
        self.region.state().ensure(segment, size)
    }

    fn discard(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        self.region.state().clear(segment, offset, len)
    }

    fn remove(&self, segment: Segment) -> Result<(), MediaError> {
        self.region.state().remove(segment)
    }

    fn segments(&self) -> Result<Vec<Segment>, MediaError> {
        let mut all: Vec<_> = self.region.state().segments.iter().map(|b| b.segment).collect();
        all.sort_unstable();
        Ok(all)
    }

    fn wake(&self, segment: Segment, offset: u64) -> Result<(), MediaError> {
        self.region.state().find(segment)?.range(offset, 4).map(|_| ())
    }
}
