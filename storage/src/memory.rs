//! A region in DRAM that can lose power: for tests and the simulator.
//!
//! It keeps two images of every segment: what the CPU sees, and what has surely reached the media.
//! `persist` remembers ranges, `fence` moves those remembered to the second image. A power cut
//! ([`MemoryRegion::cut`]) yields a region as it could be found afterwards: of every line that was
//! stored to but not fenced, each aligned word made it or did not, as a seed decides: the caches
//! may have written any of them back early, and no store larger than a word is atomic.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::random::Random;

use crate::limits::LINE_BYTES;
use crate::media::{Media, MediaError, Segment};

const LINE: usize = LINE_BYTES as usize;

#[derive(Debug, Default, Clone)]
struct Image {
    /// Tells it from others of this name.
    birth: u64,
    seen: Vec<u8>,
    durable: Vec<u8>,
    /// Lines stored to since they were last fenced.
    stored: Lines,
    /// Lines of those whose write-back was started.
    started: Lines,
    /// Ranges of lines in which all of `started` lie.
    persisted: Vec<Range<usize>>,
}

/// A set of lines: a bit each.
#[derive(Debug, Default, Clone)]
struct Lines(Vec<u64>);

impl Lines {
    fn has(&self, line: usize) -> bool {
        self.0.get(line / 64).is_some_and(|word| word >> (line % 64) & 1 == 1)
    }

    fn put(&mut self, line: usize, is_in: bool) {
        if line / 64 >= self.0.len() {
            if !is_in {
                return;
            }
            self.0.resize(line / 64 + 1, 0);
        }
        let bit = 1 << (line % 64);
        self.0[line / 64] = self.0[line / 64] & !bit | if is_in { bit } else { 0 };
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let words = self.0.iter().copied().enumerate().filter(|(_, word)| *word != 0);
        words.flat_map(|(n, word)| {
            (0..64).filter(move |b| word >> b & 1 == 1).map(move |b| n * 64 + b)
        })
    }
}

#[derive(Debug, Default)]
struct State {
    segments: BTreeMap<Segment, Image>,
    /// Logs that were removed, for those who have them mapped...
    unlinked: BTreeMap<Mapped, Vec<u8>>,
    /// ... if there are such.
    is_mapped: bool,
    /// Segments made so far.
    births: u64,
    /// Stores and fences that still succeed; None: all.
    left: Option<u64>,
}

/// A segment as somebody has it mapped: also when it was removed, and another made in its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Mapped {
    segment: Segment,
    birth: u64,
}

/// The region.
#[derive(Debug, Default)]
pub struct MemoryRegion(Mutex<State>);

impl MemoryRegion {
    /// An empty region.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets that many more writes, copies and fences succeed; then the power is gone and each
    /// fails. None lifts the limit.
    pub fn limit(&self, left: Option<u64>) {
        self.state().left = left;
    }

    /// The region as it could be found after a power cut now.
    pub fn cut(&self, random: &mut Random) -> MemoryRegion {
        let (mut segments, is_mapped, births) = {
            let state = self.state();
            (state.segments.clone(), state.is_mapped, state.births)
        };
        for image in segments.values_mut() {
            for line in std::mem::take(&mut image.stored).iter() {
                let (from, to) = (line * LINE, ((line + 1) * LINE).min(image.seen.len()));
                // Whole lines mostly, so that both extremes are met; sometimes word by word.
                let (keep_all, by_word) = (random.chance(1, 2), random.chance(1, 4));
                for word in (from..to).step_by(8) {
                    if if by_word { random.chance(1, 2) } else { keep_all } {
                        let end = (word + 8).min(to);
                        image.durable[word..end].copy_from_slice(&image.seen[word..end]);
                    }
                }
            }
            image.seen = image.durable.clone();
            (image.started, image.persisted) = (Lines::default(), Vec::new());
        }
        MemoryRegion(Mutex::new(State { segments, is_mapped, births, ..State::default() }))
    }

    /// Logs are mapped by clients, who keep them when they are removed.
    pub fn let_map(&self) {
        self.state().is_mapped = true;
    }

    /// Maps a segment as it is now.
    pub fn map(&self, segment: Segment) -> Mapped {
        let birth = self.state().segments.get(&segment).map_or(0, |image| image.birth);
        Mapped { segment, birth }
    }

    /// A word of a mapping. 0 where there is none.
    pub fn mapped_load(&self, mapped: Mapped, offset: u64) -> u64 {
        let mut word = [0; 8];
        self.mapped_read(mapped, offset, &mut word);
        u64::from_le_bytes(word)
    }

    /// Copies bytes out of a mapping; `false` where there are none.
    pub fn mapped_read(&self, mapped: Mapped, offset: u64, buf: &mut [u8]) -> bool {
        let copy = |seen: &[u8]| {
            let from = seen.get(offset as usize..).and_then(|from| from.get(..buf.len()));
            from.is_some_and(|from| {
                buf.copy_from_slice(from);
                true
            })
        };
        self.mapped_view(mapped, copy).unwrap_or(false)
    }

    /// Looks at all of a mapping as it is now; None where there is none. (Who looks may not ask the region for anything else.)
    pub fn mapped_view<R>(&self, mapped: Mapped, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let state = self.state();
        let seen = match state.mapped(mapped) {
            Some(image) => Some(&image.seen),
            None => state.unlinked.get(&mapped),
        };
        seen.map(|seen| look(seen))
    }

    /// Stores into a mapping. Outside of it, or when the power is gone, nothing is stored.
    pub fn mapped_store(&self, mapped: Mapped, offset: u64, data: &[u8]) {
        let mut state = self.state();
        if state.mapped(mapped).is_some() {
            let _ = state.store(mapped.segment, offset, data);
        } else if let Some(seen) = state.unlinked.get_mut(&mapped) {
            let to = seen.get_mut(offset as usize..).and_then(|to| to.get_mut(..data.len()));
            to.into_iter().for_each(|to| to.copy_from_slice(data));
        }
    }

    /// Persists bytes of a mapping.
    pub fn mapped_persist(&self, mapped: Mapped, offset: u64, len: u64) {
        if self.state().mapped(mapped).is_some() {
            let _ = self.persist(mapped.segment, offset, len);
        }
    }

    /// Changes bytes behind everybody's back, as decaying media do.
    pub fn damage(&self, segment: Segment, offset: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let mut state = self.state();
        let image = state.image(segment)?;
        let range = image.range(segment, offset, bytes.len() as u64)?;
        image.seen[range.clone()].copy_from_slice(bytes);
        image.durable[range].copy_from_slice(bytes);
        Ok(())
    }
}

impl State {
    /// The image of a mapping, if it was not removed.
    fn mapped(&self, mapped: Mapped) -> Option<&Image> {
        self.segments.get(&mapped.segment).filter(|image| image.birth == mapped.birth)
    }

    fn image(&mut self, segment: Segment) -> Result<&mut Image, MediaError> {
        self.segments.get_mut(&segment).ok_or(MediaError::Missing(segment))
    }

    fn spend(&mut self) -> Result<(), MediaError> {
        match &mut self.left {
            Some(0) => Err(MediaError::Io("the power is gone".into())),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn store(&mut self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        self.spend()?;
        let image = self.image(segment)?;
        let range = image.range(segment, offset, data.len() as u64)?;
        image.touch(range.clone());
        image.seen[range].copy_from_slice(data);
        Ok(())
    }

    fn word(&mut self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        let image = self.image(segment)?;
        let range = image.range(segment, offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(MediaError::Io(format!("{segment:?}: word at {offset} is not aligned")));
        }
        let mut word = [0; 8];
        word.copy_from_slice(&image.seen[range]);
        Ok(u64::from_le_bytes(word))
    }
}

impl Image {
    fn range(
        &self,
        segment: Segment,
        offset: u64,
        len: u64,
    ) -> Result<std::ops::Range<usize>, MediaError> {
        let size = self.seen.len() as u64;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(offset as usize..end as usize),
            _ => Err(MediaError::OutOfRange { segment, offset, len, size }),
        }
    }

    fn touch(&mut self, range: std::ops::Range<usize>) {
        if !range.is_empty() {
            for line in range.start / LINE..=(range.end - 1) / LINE {
                self.stored.put(line, true);
                self.started.put(line, false);
            }
        }
    }
}

impl Media for MemoryRegion {
    fn size(&self, segment: Segment) -> Result<u64, MediaError> {
        Ok(self.state().image(segment)?.seen.len() as u64)
    }

    fn read(&self, segment: Segment, offset: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        let mut state = self.state();
        let image = state.image(segment)?;
        let range = image.range(segment, offset, buf.len() as u64)?;
        buf.copy_from_slice(&image.seen[range]);
        Ok(())
    }

    fn write(&self, segment: Segment, offset: u64, data: &[u8]) -> Result<(), MediaError> {
        self.state().store(segment, offset, data)
    }

    fn persist(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        let mut state = self.state();
        let image = state.image(segment)?;
        let range = image.range(segment, offset, len)?;
        if !range.is_empty() {
            let lines = range.start / LINE..(range.end - 1) / LINE + 1;
            for line in lines.clone() {
                if image.stored.has(line) {
                    image.started.put(line, true);
                }
            }
            image.persisted.push(lines);
        }
        Ok(())
    }

    fn fence(&self) -> Result<(), MediaError> {
        let mut state = self.state();
        state.spend()?;
        for image in state.segments.values_mut() {
            for line in std::mem::take(&mut image.persisted).into_iter().flatten() {
                if !image.started.has(line) {
                    continue;
                }
                let (from, to) = (line * LINE, ((line + 1) * LINE).min(image.seen.len()));
                image.durable[from..to].copy_from_slice(&image.seen[from..to]);
                image.stored.put(line, false);
                image.started.put(line, false);
            }
        }
        Ok(())
    }

    fn load64(&self, segment: Segment, offset: u64) -> Result<u64, MediaError> {
        self.state().word(segment, offset)
    }

    fn store64(&self, segment: Segment, offset: u64, value: u64) -> Result<(), MediaError> {
        let mut state = self.state();
        state.word(segment, offset)?;
        state.store(segment, offset, &value.to_le_bytes())
    }

    fn cas64(
        &self,
        segment: Segment,
        offset: u64,
        expect: u64,
        value: u64,
    ) -> Result<u64, MediaError> {
        let mut state = self.state();
        let found = state.word(segment, offset)?;
        if found == expect {
            state.store(segment, offset, &value.to_le_bytes())?;
        }
        Ok(found)
    }

    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        let mut state = self.state();
        let image = state.image(from.0)?;
        let range = image.range(from.0, from.1, len)?;
        let data = image.seen[range].to_vec();
        state.store(to.0, to.1, &data)
    }

    fn ensure(&self, segment: Segment, size: u64) -> Result<(), MediaError> {
        let Ok(size) = usize::try_from(size) else {
            return Err(MediaError::Io(format!("{segment:?}: too large for memory")));
        };
        let mut state = self.state();
        let State { segments, births, .. } = &mut *state;
        let image = segments.entry(segment).or_insert_with(|| {
            *births += 1;
            Image { birth: *births, ..Image::default() }
        });
        if image.seen.is_empty() {
            // Fresh zeroes of the system cost nothing before they are touched.
            (image.seen, image.durable) = (vec![0; size], vec![0; size]);
        } else if image.seen.len() < size {
            image.seen.resize(size, 0);
            image.durable.resize(size, 0);
        }
        Ok(())
    }

    fn discard(&self, segment: Segment, offset: u64, len: u64) -> Result<(), MediaError> {
        let mut state = self.state();
        let image = state.image(segment)?;
        let range = image.range(segment, offset, len)?;
        image.touch(range.clone());
        image.seen[range].fill(0);
        Ok(())
    }

    fn remove(&self, segment: Segment) -> Result<(), MediaError> {
        let mut state = self.state();
        let removed = state.segments.remove(&segment).ok_or(MediaError::Missing(segment))?;
        if state.is_mapped && matches!(segment, Segment::Log(_)) {
            state.unlinked.insert(Mapped { segment, birth: removed.birth }, removed.seen);
        }
        Ok(())
    }

    fn segments(&self) -> Result<Vec<Segment>, MediaError> {
        Ok(self.state().segments.keys().copied().collect())
    }

    fn wake(&self, segment: Segment, offset: u64) -> Result<(), MediaError> {
        self.state().image(segment)?.range(segment, offset, 4).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_outlives_its_segment_and_the_next_of_that_name() {
        let region = MemoryRegion::new();
        region.let_map();
        let log = Segment::Log(0);
        let make = |byte: u8| {
            region.ensure(log, 64).unwrap();
            region.write(log, 0, &[byte; 8]).unwrap();
            region.map(log)
        };
        let word = |byte: u8| u64::from_le_bytes([byte; 8]);
        let first = make(1);
        region.remove(log).unwrap();
        assert_eq!(region.mapped_load(first, 0), word(1));
        let second = make(2);
        region.mapped_store(first, 0, &[3; 8]);
        assert_eq!(
            (region.mapped_load(first, 0), region.mapped_load(second, 0)),
            (word(3), word(2))
        );
        region.mapped_store(second, 0, &[4; 8]);
        assert_eq!(
            (region.mapped_load(first, 0), region.mapped_load(second, 0)),
            (word(3), word(4))
        );
    }

    #[test]
    fn what_was_fenced_survives_and_the_rest_may_not() {
        let region = MemoryRegion::new();
        region.ensure(Segment::Tree, 4096).unwrap();
        region.write(Segment::Tree, 0, &[1; 64]).unwrap();
        region.persist(Segment::Tree, 0, 64).unwrap();
        region.fence().unwrap();
        region.write(Segment::Tree, 64, &[2; 640]).unwrap();
        region.persist(Segment::Tree, 64, 640).unwrap();
        let (mut lost, mut kept) = (0, 0);
        for seed in 0..20 {
            let after = region.cut(&mut Random::new(seed));
            let mut bytes = [0; 704];
            after.read(Segment::Tree, 0, &mut bytes).unwrap();
            assert_eq!(bytes[..64], [1; 64]);
            lost += bytes[64..].iter().filter(|&&b| b == 0).count();
            kept += bytes[64..].iter().filter(|&&b| b == 2).count();
        }
        assert!(lost > 1000 && kept > 1000, "{lost} {kept}");
        region.limit(Some(1));
        region.write(Segment::Tree, 0, &[1]).unwrap();
        assert!(region.write(Segment::Tree, 0, &[1]).is_err());
    }
}
