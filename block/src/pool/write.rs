//! How images are written: whole objects anew, small changes as patches over them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};

use base::Errno;
use base::planted::{Bug, planted};
use placement::dispatch::{Buffers, Work};

use super::gather::{HEDGE_MAX, HEDGE_MIN};
use super::image::Image;
use super::opened::{GRACE, PATIENCE};
use super::patch::{self, PATCHES_MAX, Patch};
use super::shard::{self, EPOCH_SHIFT, VERSIONS, Version};
use super::survey::{Held, State};
use super::worker::{Ask, Piece};
use crate::device::{Disk, Extent, Prompt, Traits, push_extent};

/// A patch has at most one part in so many of its object.
const SHARE: usize = 8;
const PATCH_BYTES_MAX: usize = 1 << 20;
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

    /// A version after all that there are of an object: those of which nobody here has heard are of writers before this one.
    fn next_version(&self, newest: u64) -> Result<Version, Errno> {
        let first = if planted(Bug::EpochNotCounted) { 0 } else { self.epoch << EPOCH_SHIFT };
        let number = newest.max(first) + 1;
        if number >= VERSIONS {
            return Err(Errno::OVERFLOW);
        }
        Ok(Version { number, drawn: self.pool.ground.draw() as u32 })
    }

    /// Shards of an object, in order.
    fn encode(&self, mut bytes: Vec<u8>) -> Result<Vec<Piece>, Errno> {
        let (coding, chunk) = (self.info.coding, self.info.shard_bytes());
        bytes.resize(chunk * coding.data(), 0);
        let bytes = Arc::new(bytes);
        let Some(code) = &self.pool.code else {
            // One buffer for all of them.
            return Ok((0..coding.width()).map(|_| Piece::new(&bytes, 0..chunk)).collect());
        };
        let piece = |i: usize| Piece::new(&bytes, i * chunk..(i + 1) * chunk);
        let inputs: Vec<Piece> = (0..coding.data()).map(piece).collect();
        let outputs = vec![vec![0; chunk]; coding.width() - coding.data()];
        let stripes = vec![Buffers { inputs: inputs.clone(), outputs }];
        let work = Work::Encode { code: Arc::clone(code), stripes };
        let (work, result) = self.pool.dispatcher.run(work);
        if let Err(failure) = result {
            log::error!("pool: image {}: encoding: {failure}", self.name);
            return Err(Errno::IO);
        }
        let Work::Encode { stripes, .. } = work else { return Err(Errno::IO) };
        let parity = stripes.into_iter().flat_map(|stripe| stripe.outputs).map(Piece::from);
        Ok(inputs.into_iter().chain(parity).collect())
    }

    /// Writes an object as a new version; `None`: zeroes. The caller owns it.
    fn write_object(&self, object: u64, bytes: Option<Vec<u8>>) -> Result<(), Errno> {
        let (coding, ground) = (self.info.coding, &*self.pool.ground);
        let before = self.state(object);
        let hole = bytes.is_none();
        let version = self.next_version(before.newest)?;
        let shards = match bytes {
            Some(bytes) => self.encode(bytes)?,
            None => vec![Piece::default(); coding.width()],
        };
        let stores = self.pool.places.of(self.info.id, object);
        let (to, from) = channel();
        for (number, bytes) in shards.iter().enumerate() {
            let head = self.make_head(object, version, number, hole);
            let head = shard::encode(&head, bytes).into();
            let name = self.shard_name(object, version, number, hole);
            let ask = Ask::Put(name, head, bytes.clone());
            self.pool.stores[stores[number]].ask(ask, number, &to);
        }
        let mut at = vec![None; coding.width()];
        let (mut done, mut left) = (0, coding.width());
        let mut end = ground.now() + PATIENCE;
        let quorum = if planted(Bug::WriteWithoutQuorum) { 1 } else { coding.quorum() };
        while left > 0 {
            let Some((number, told)) = ground.wait(&from, end) else { break };
            left -= 1;
            if told.is_ok() {
                at[number] = Some(stores[number]);
                done += 1;
                if done == quorum {
                    end = end.min(ground.now() + GRACE);
                }
            }
        }
        let newest = version.number;
        let mut gone = Forgotten::default();
        // What was durable while nobody else had the image, the next writer finds; of the rest it may have made something already.
        let alone = self.is_alone();
        if done < quorum || !alone {
            // It was never there.
            for (number, store) in at.iter().enumerate().filter(|_| alone) {
                gone.add(*store, || self.shard_name(object, version, number, hole));
            }
            self.forget(gone);
            let failed = !planted(Bug::FailedForgotten);
            self.set_state(object, State { newest, failed, ..before });
            return Err(Errno::IO);
        }
        let state = State { version: Some(version), hole, at, newest, ..State::default() };
        self.set_state(object, state);
        if let Some(old) = before.version {
            for (number, store) in before.at.iter().enumerate() {
                gone.add(*store, || self.shard_name(object, old, number, before.hole));
            }
        }
        for held in &before.patches {
            for store in &held.at {
                gone.add(Some(*store), || self.patch_name(object, &held.patch));
            }
        }
        self.forget(gone);
        Ok(())
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
        stores.sort_by_cached_key(|store| (self.pool.stores[*store].is_suspect(), load(*store)));
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
            self.set_state(object, State { newest, ..before });
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

    /// Changes a range of an object: by a patch, or reads it, unless all of it is replaced, and writes it anew.
    fn change(&self, object: u64, range: Range<usize>, data: Option<&[u8]>) -> Result<(), Errno> {
        let _owned = self.own(object);
        let state = self.state(object);
        if state.unknown {
            return Err(Errno::IO);
        }
        let whole = range.len() == self.info.object_bytes as usize;
        if data.is_none() && state.is_empty() && !state.failed {
            return Ok(());
        }
        if data.is_none() && (whole || state.is_empty()) {
            return self.write_object(object, None);
        }
        if !whole && self.is_patch(&state, range.len(), data.is_none()) {
            return self.write_patch(object, state, range, data);
        }
        let mut bytes = vec![0; self.info.object_bytes as usize];
        if !whole {
            self.read_object(object, 0, &mut bytes, true)?;
        }
        match data {
            Some(data) => bytes[range].copy_from_slice(data),
            None => bytes[range].fill(0),
        }
        self.write_object(object, Some(bytes))
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
        let len = buf.len() as u64;
        self.each(offset, len, |object, range, at| {
            self.read_object(object, range.start, &mut buf[at..at + range.len()], false)
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, data.len() as u64, |object, range, at| {
            let len = range.len();
            self.change(object, range, Some(&data[at..at + len]))
        })
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
            self.change(object, range, None)
        })
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        if no_hole {
            return Err(Errno::OPNOTSUPP);
        }
        if self.locks.is_none() {
            return Err(Errno::ROFS);
        }
        self.each(offset, len, |object, range, _| self.change(object, range, None))
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
