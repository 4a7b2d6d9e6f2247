//! How images are written: whole objects anew, small changes as patches over them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};

use base::planted::{Bug, planted};
use base::{Errno, Nanos};
use placement::dispatch::{Buffers, Work};

use super::flight::{AT_A_TIME, Flight, Leg, Line, TASKS};
use super::gather::{HEDGE_MAX, HEDGE_MIN};
use super::image::Image;
use super::opened::{GRACE, PATIENCE};
use super::patch::{self, PATCHES_MAX, Patch};
use super::shard::{self, EPOCH_SHIFT, VERSIONS, Version};
use super::survey::{Held, State};
use super::worker::{Answer, Ask, Piece, Told};
use crate::device::{Disk, Extent, Prompt, Traits, push_extent};

/// A patch has at most one part in so many of its object.
const SHARE: usize = 8;
const PATCH_BYTES_MAX: usize = 1 << 20;
/// Bytes of objects that one request makes anew at the same time, unless one object has more.
const FLIGHT_BYTES: usize = 16 << 20;
/// Names that one request removes.
const FORGET_AT_A_TIME: usize = 64;

impl Image {
    /// Nobody else writes the object until the result is dropped.
    pub(super) fn own(&self, object: u64) -> Owned<'_> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while !busy.insert(object) {
            busy = self.idle.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        Owned { image: self, object }
    }

    /// The same, if nobody writes it now.
    pub(super) fn try_own(&self, object: u64) -> Option<Owned<'_>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.insert(object).then(|| Owned { image: self, object })
    }

    /// A version after all that there are of an object: those of which nobody here has heard are of writers before this one.
    fn next_version(&self, newest: u64) -> Result<Version, Errno> {
        let first = if planted(Bug::EpochNotCounted) { 0 } else { self.epoch << EPOCH_SHIFT };
        let number = newest.max(first) + 1;
        if number >= VERSIONS {
            return Err(Errno::OVERFLOW);
        }
        Ok(Version { number, drawn: self.pool.ground.draw() as u32 })
    }

    /// Begins to write an object as a new version; no bytes: zeroes. Its data goes to the stores at once, its parity when that is there.
    /// `alone`: whoever asks for it has nothing else to do meanwhile.
    fn begin_write<'a>(
        &'a self,
        owned: Owned<'a>,
        bytes: Option<Vec<u8>>,
        line: Line,
        alone: bool,
    ) -> Result<Writing<'a>, Errno> {
        let (coding, chunk) = (self.info.coding, self.info.shard_bytes());
        let object = owned.object;
        let before = self.state(object);
        let hole = bytes.is_none();
        let version = self.next_version(before.newest)?;
        let stores = self.pool.places.of(self.info.id, object);
        let mut writing = Writing {
            image: self,
            line,
            _owned: owned,
            object,
            before,
            version,
            hole,
            stores,
            at: vec![None; coding.width()],
            done: 0,
            left: coding.width(),
            computed: false,
            end: self.pool.ground.now() + PATIENCE,
        };
        let Some(mut bytes) = bytes else {
            (0..coding.width()).for_each(|number| writing.put(number, Piece::default()));
            return Ok(writing);
        };
        bytes.resize(chunk * coding.data(), 0);
        let bytes = Arc::new(bytes);
        let Some(code) = &self.pool.code else {
            // One buffer for all of them.
            (0..coding.width())
                .for_each(|number| writing.put(number, Piece::new(&bytes, 0..chunk)));
            return Ok(writing);
        };
        let piece = |i: usize| Piece::new(&bytes, i * chunk..(i + 1) * chunk);
        let inputs: Arc<[Piece]> = (0..coding.data()).map(piece).collect();
        for (number, input) in inputs.iter().enumerate() {
            writing.put(number, input.clone());
        }
        let outputs = vec![vec![0; chunk]; coding.width() - coding.data()];
        let stripes = vec![Buffers { inputs, outputs }];
        let work = Work::Encode { code: Arc::clone(code), stripes };
        writing.computed = true;
        writing.line.compute(self, work, TASKS, alone);
        Ok(writing)
    }

    /// Whether a change is worth a patch: small, and not one too many.
    fn is_patch(&self, state: &State, len: usize, zero: bool) -> bool {
        let object = self.info.object_bytes as usize;
        let bytes: usize = state.patches.iter().map(|held| held.patch.bytes()).sum();
        let small = zero || (len <= (object / SHARE).min(PATCH_BYTES_MAX) && bytes + len <= object);
        small && state.patches.len() < PATCHES_MAX && !state.uncertain && !state.failed
    }

    /// Lays a patch over an object; `None`: zeroes. The caller owns it.
    fn write_patch(
        &self,
        object: u64,
        before: State,
        range: Range<usize>,
        data: Option<&[u8]>,
    ) -> Result<(), Errno> {
        let (coding, ground) = (self.info.coding, &*self.pool.ground);
        let version = self.next_version(before.newest)?;
        let patch = Patch {
            version,
            base: before.base(),
            place: before.patches.len() as u16,
            offset: range.start as u32,
            len: range.len() as u32,
            zero: data.is_none(),
        };
        let body = Piece::from(data.unwrap_or_default().to_vec());
        let head = Piece::from(patch::encode(self.of(object), &patch, &body));
        let (to, from) = channel();
        // Those that answer first; among equals another one for each write.
        let mut stores = self.pool.places.of(self.info.id, object);
        stores.rotate_left(version.number as usize % coding.width());
        let load = |store: usize| self.pool.stores[store].load();
        let passed_over = |store: usize| {
            let store = &self.pool.stores[store];
            store.is_suspect() || store.is_late()
        };
        stores.sort_by_cached_key(|store| (passed_over(*store), load(*store)));
        let mut asked = 0;
        let mut at: Vec<usize> = Vec::new();
        let mut give = |at: &mut Vec<usize>| {
            let Some(store) = stores.get(asked) else { return false };
            let name = self.patch_name(object, &patch);
            let ask = Ask::Put(name, head.clone(), body.clone());
            self.pool.stores[*store].ask(ask, *store, &to);
            at.push(*store);
            asked += 1;
            true
        };
        let needed = if planted(Bug::PatchWithoutQuorum) { 1 } else { coding.copies() };
        let mut hedge = HEDGE_MIN;
        for _ in 0..needed {
            give(&mut at);
            let load = at.last().map_or(0, |store| load(*store));
            hedge = hedge.max((4 * load).min(HEDGE_MAX));
        }
        // A pool of copies has all of them everywhere.
        while at.len() < coding.copies_wanted() && give(&mut at) {}
        let end = ground.now() + PATIENCE;
        let mut late = ground.now() + hedge;
        let mut done = 0;
        // As long as enough may still take it.
        while done < needed && at.len() >= needed && ground.now() < end {
            match ground.wait(&from, late.min(end)) {
                Some((_, Ok(_))) => done += 1,
                Some((store, Err(_))) => {
                    at.retain(|other| *other != store);
                    give(&mut at);
                }
                // Others take it instead.
                None => {
                    late = ground.now() + hedge;
                    give(&mut at);
                }
            }
        }
        let newest = version.number;
        let alone = self.is_alone();
        if done < needed || !alone {
            // It was never there; what of it may be there after all, the next takes the place of.
            let mut gone = Forgotten::default();
            for store in stores[..asked].iter().filter(|_| alone) {
                gone.add(Some(*store), || self.patch_name(object, &patch));
            }
            self.forget(gone);
            // But zeroes over what has nothing are not written at all, unless that is known not to be so.
            let failed = before.failed || before.is_empty() && !planted(Bug::ZeroesUnwritten);
            self.set_state(object, State { newest, failed, undone: newest, ..before });
            return Err(Errno::IO);
        }
        let mut patches = before.patches.clone();
        patches.push(Arc::new(Held::new(patch, at)));
        self.set_state(object, State { patches, newest, ..before });
        Ok(())
    }

    pub(super) fn patch_name(&self, object: u64, patch: &Patch) -> String {
        format!("{}/{}", self.name, patch::name(object, patch))
    }

    /// Removes names, whenever their stores come to it.
    pub(super) fn forget(&self, gone: Forgotten) {
        let (to, _) = channel();
        for (store, names) in gone.0 {
            for names in names.chunks(FORGET_AT_A_TIME) {
                self.pool.stores[store].ask(Ask::Remove(names.to_vec()), 0, &to);
            }
        }
    }

    /// Calls `each` with an object, the range within it, and where that lies in the whole.
    fn each(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, Range<usize>, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let size = u64::from(self.info.object_bytes);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let object = at / size;
            let from = at % size;
            let n = (size - from).min(end - at);
            each(object, from as usize..(from + n) as usize, (at - offset) as usize)?;
            at += n;
        }
        Ok(())
    }

    /// Changes a range; `None`: zeroes. Several objects at a time are made anew.
    fn change(&self, offset: u64, len: u64, data: Option<&[u8]>) -> Result<(), Errno> {
        let mut changes = Changes { image: self, flight: Flight::new(self, false), failed: None };
        let all = self.each(offset, len, |object, range, at| {
            let is_last = (at + range.len()) as u64 == len;
            let data = data.map(|data| &data[at..at + range.len()]);
            changes.change(object, range, data, is_last)
        });
        let ended = changes.finish();
        all.and(ended)
    }
}

/// An object on its way into the stores.
struct Writing<'a> {
    image: &'a Image,
    line: Line,
    _owned: Owned<'a>,
    object: u64,
    before: State,
    version: Version,
    hole: bool,
    stores: Vec<usize>,
    /// Who has taken its shard.
    at: Vec<Option<usize>>,
    done: usize,
    /// Who has not said anything yet.
    left: usize,
    /// Its parity is not there yet.
    computed: bool,
    end: Nanos,
}

impl Writing<'_> {
    fn put(&self, number: usize, bytes: Piece) {
        let image = self.image;
        let head = image.make_head(self.object, self.version, number, self.hole);
        let head = shard::encode(&head, &bytes).into();
        let name = image.shard_name(self.object, self.version, number, self.hole);
        self.line.ask(image, self.stores[number], Ask::Put(name, head, bytes), number);
    }

    fn bytes(&self) -> usize {
        if self.hole { 0 } else { self.image.info.object_bytes as usize }
    }

    /// When it is over: whether it was written.
    fn conclude(self) -> Result<(), Errno> {
        let Self { image, object, before, version, hole, at, done, .. } = self;
        let newest = version.number;
        let mut gone = Forgotten::default();
        // What was durable while nobody else had the image, the next writer finds; of the rest it may have made something already.
        let alone = image.is_alone();
        if done < quorum(image) || !alone {
            // It was never there.
            for (number, store) in at.iter().enumerate().filter(|_| alone) {
                gone.add(*store, || image.shard_name(object, version, number, hole));
            }
            image.forget(gone);
            let failed = !planted(Bug::FailedForgotten);
            image.set_state(object, State { newest, failed, undone: newest, ..before });
            return Err(Errno::IO);
        }
        let state = State { version: Some(version), hole, at, newest, ..State::default() };
        image.set_state(object, state);
        if let Some(old) = before.version {
            for (number, store) in before.at.iter().enumerate() {
                gone.add(*store, || image.shard_name(object, old, number, before.hole));
            }
        }
        for held in &before.patches {
            for store in &held.at {
                gone.add(Some(*store), || image.patch_name(object, &held.patch));
            }
        }
        image.forget(gone);
        Ok(())
    }
}

fn quorum(image: &Image) -> usize {
    if planted(Bug::WriteWithoutQuorum) { 1 } else { image.info.coding.quorum() }
}

impl Leg for Writing<'_> {
    fn take(&mut self, (number, told): Answer) {
        if number >= TASKS {
            self.computed = false;
            let data = self.image.info.coding.data();
            match told {
                Ok(Told::Chunks(chunks)) => {
                    self.end = self.end.max(self.image.pool.ground.now() + PATIENCE);
                    for (i, chunk) in chunks.into_iter().enumerate() {
                        self.put(data + i, chunk.into());
                    }
                }
                // Nobody is given what is not there.
                _ => self.left -= self.stores.len() - data,
            }
            return;
        }
        self.left -= 1;
        if told.is_ok() {
            self.at[number] = Some(self.stores[number]);
            self.done += 1;
            if self.done == quorum(self.image) {
                self.end = self.end.min(self.image.pool.ground.now() + GRACE);
            }
        }
    }

    fn advance(&mut self) -> bool {
        self.left == 0 || self.image.pool.ground.now() >= self.end
    }

    fn until(&self) -> Nanos {
        self.end
    }
}

/// What one request changes.
struct Changes<'a> {
    image: &'a Image,
    flight: Flight<'a, Writing<'a>>,
    failed: Option<Errno>,
}

impl<'a> Changes<'a> {
    /// Changes a range of an object: by a patch, or reads it, unless all of it is replaced, and begins to write it anew.
    fn change(
        &mut self,
        object: u64,
        range: Range<usize>,
        data: Option<&[u8]>,
        is_last: bool,
    ) -> Result<(), Errno> {
        let image = self.image;
        // Nobody waits for an object while others wait for what he has.
        let owned = loop {
            match image.try_own(object) {
                Some(owned) => break owned,
                None if self.flight.len() == 0 => break image.own(object),
                None => self.step(),
            }
        };
        let mut state = image.state(object);
        if state.unknown {
            if !image.is_known_by_now(object) {
                return Err(Errno::IO);
            }
            state = image.state(object);
        }
        let object_bytes = image.info.object_bytes as usize;
        let whole = range.len() == object_bytes;
        if data.is_none() && state.is_empty() && !state.failed {
            return Ok(());
        }
        if data.is_none() && (whole || state.is_empty()) {
            return self.begin(owned, None, is_last);
        }
        if !whole {
            // That is waited for here: parity that the others need is not to wait as well.
            while self.flight.legs().any(|writing| writing.computed) {
                self.step();
            }
            if image.is_patch(&state, range.len(), data.is_none()) {
                return image.write_patch(object, state, range, data);
            }
        }
        let mut bytes = vec![0; object_bytes];
        if !whole {
            image.read_object(object, 0, &mut bytes, true)?;
        }
        match data {
            Some(data) => bytes[range].copy_from_slice(data),
            None => bytes[range].fill(0),
        }
        self.begin(owned, Some(bytes), is_last)
    }

    fn begin(
        &mut self,
        owned: Owned<'a>,
        bytes: Option<Vec<u8>>,
        is_last: bool,
    ) -> Result<(), Errno> {
        let more = bytes.as_ref().map_or(0, Vec::len);
        let under_way =
            |flight: &Flight<'_, Writing<'_>>| -> usize { flight.legs().map(Writing::bytes).sum() };
        while self.flight.len() >= AT_A_TIME
            || self.flight.len() > 0 && under_way(&self.flight) + more > FLIGHT_BYTES
        {
            self.step();
        }
        let alone = is_last && self.flight.len() == 0;
        let line = self.flight.line();
        let writing = self.image.begin_write(owned, bytes, line, alone)?;
        self.flight.add(writing);
        Ok(())
    }

    fn step(&mut self) {
        for writing in self.flight.step(Nanos::MAX) {
            if let Err(errno) = writing.conclude() {
                self.failed.get_or_insert(errno);
            }
        }
    }

    /// Waits for all of it.
    fn finish(mut self) -> Result<(), Errno> {
        while self.flight.len() > 0 {
            self.step();
        }
        self.failed.map_or(Ok(()), Err)
    }
}

/// Names to be removed, by store.
#[derive(Debug, Default)]
pub(super) struct Forgotten(BTreeMap<usize, Vec<String>>);

impl Forgotten {
    /// One more, where a store has it.
    pub fn add(&mut self, store: Option<usize>, name: impl FnOnce() -> String) {
        if let Some(store) = store {
            self.0.entry(store).or_default().push(name());
        }
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.0.values().map(|names| names.len() as u64).sum()
    }
}

/// See [`Image::own`].
pub(super) struct Owned<'a> {
    image: &'a Image,
    object: u64,
}

impl Owned<'_> {
    /// Which object.
    pub fn object(&self) -> u64 {
        self.object
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        self.image.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.object);
        self.image.idle.notify_all();
    }
}

impl Disk for Image {
    fn traits(&self) -> Traits {
        Traits {
            block_min: 512,
            block_preferred: 64 << 10,
            read_only: self.locks.is_none(),
            fast_zero: false,
        }
    }

    fn size(&self) -> u64 {
        self.info.size
    }

    fn prompt(&self) -> Prompt {
        Prompt::Never
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut ranges = Vec::new();
        self.each(offset, buf.len() as u64, |object, range, at| {
            ranges.push((object, range, at));
            Ok(())
        })?;
        self.read_objects(ranges, buf)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.change(offset, data.len() as u64, Some(data))
    }

    /// A write is answered when its version is durable.
    fn flush(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, len, |object, range, _| {
            // To write a part of an object anew would cost space rather than give it back.
            if range.len() < self.info.object_bytes as usize {
                return Ok(());
            }
            // Nor is anything promised of what it reads as: where nothing was written, or nothing that is known, nothing is.
            if self.state(object).is_empty() {
                return Ok(());
            }
            let at = object * u64::from(self.info.object_bytes);
            self.change(at, range.len() as u64, None)
        })
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        if no_hole {
            return Err(Errno::OPNOTSUPP);
        }
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.change(offset, len, None)
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        let mut extents = Vec::new();
        let mut room = true;
        self.each(offset, len, |object, range, _| {
            if room {
                let state = self.state(object);
                let hole = state.is_empty();
                let len = range.len() as u64;
                room = push_extent(&mut extents, Extent { len, hole, zero: hole });
            }
            Ok(())
        })?;
        Ok(extents)
    }
}
