//! Memory through which the service looks, and in which clients do something meanwhile.

use std::sync::{Arc, Mutex};

use storage::format::control;
use storage::format::entry::HEADER_BYTES;
use storage::media::{Media, MediaError, Segment};
use storage::memory::MemoryRegion;

use crate::pass_on::pass_on;

/// Memory through which the service looks, where a client does something just before a word is stored, or between
/// two looks at the same place.
pub struct Between {
    region: Arc<MemoryRegion>,
    /// Whose client, and how many blocks it promises.
    pub armed: Mutex<Option<(Segment, u64)>>,
    /// Where the header of an entry lies that says at the first look that it was promised everything.
    pub boasts: Mutex<Option<(Segment, u64)>>,
    /// Where a header lies of which a program shows other first bytes to whoever looks at the header alone.
    pub flips: Mutex<Option<Flips>>,
    /// What is done just before a word is looked at for the first time.
    meanwhile: Mutex<Option<Meanwhile>>,
}

/// Where the header is, and what is shown.
pub type Flips = ((Segment, u64), Vec<u8>);

/// Where the word is, and what is done.
type Meanwhile = ((Segment, u64), Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Between {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Between").field("armed", &self.armed).finish_non_exhaustive()
    }
}

impl Between {
    pub fn new(region: &Arc<MemoryRegion>) -> Arc<Self> {
        let region = Arc::clone(region);
        Arc::new(Self {
            region,
            armed: Mutex::new(None),
            boasts: Mutex::new(None),
            flips: Mutex::new(None),
            meanwhile: Mutex::new(None),
        })
    }

    /// Does that just before the word is looked at.
    pub fn before(&self, segment: Segment, offset: u64, deed: impl FnOnce() + Send + 'static) {
        let deed: Box<dyn FnOnce() + Send> = Box::new(deed);
        *self.meanwhile.lock().expect("one thread") = Some(((segment, offset), deed));
    }

    /// Whether the word was looked at.
    pub fn is_done(&self) -> bool {
        self.meanwhile.lock().expect("one thread").is_none()
    }

    /// The client promises now, having looked at the room that the service is about to take back.
    fn act(&self, segment: Segment, offset: u64) {
        let mut armed = self.armed.lock().expect("one thread");
        if let Some((log, blocks)) = *armed
            && (log, control::ROOM) == (segment, offset)
        {
            *armed = None;
            let word = |at| self.region.load64(log, at).expect("a word");
            let promised = word(control::PROMISED) + blocks;
            assert!(promised <= word(control::ROOM), "it is in time");
            self.region.store64(log, control::PROMISED, promised).expect("a word");
        }
    }
}

impl Media for Between {
    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        self.region.read(segment, offset, buf)?;
        let mut boasts = self.boasts.lock().expect("one thread");
        if boasts.take_if(|place| *place == (segment, offset)).is_some() {
            buf[40..48].fill(0xff);
        }
        let flips = self.flips.lock().expect("one thread");
        if let Some((place, shown)) = &*flips
            && *place == (segment, offset)
            && buf.len() == HEADER_BYTES
        {
            buf[..shown.len()].copy_from_slice(shown);
        }
        Ok(())
    }
    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        let mut meanwhile = self.meanwhile.lock().expect("one thread");
        let deed = meanwhile.take_if(|(place, _)| *place == (segment, offset));
        drop(meanwhile);
        if let Some((_, deed)) = deed {
            deed();
        }
        self.region.load64(segment, offset)
    }
    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError> {
        self.act(segment, offset);
        self.region.store64(segment, offset, value)
    }
    pass_on!(size write persist fence cas64 copy room segments);
}
