//! The object map, which is read when the image is opened: what there is of an image is marked in it before it is there. Nothing is marked away: an object that is said to
//! be there and is empty costs who looks a look, and one that is there and not said to be would be lost.
//!
//! It also says which objects are as the last snapshot has them, by which Ceph's tools find what changed since: one that is zeroed
//! or cut is marked as well, if it is there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Errno;
use rados::{Io, Step};

use super::owner::Standing;

/// An object is there, and newer than the last snapshot.
const EXISTS: u8 = 1;
/// It is there, and as the last snapshot has it.
const CLEAN: u8 = 3;

/// Most bytes of a map that is read: of sixteen TiB in objects of 4 MiB. One that is longer is as if nothing were known of it.
const MAP_MAX: usize = (1 << 20) + MAP_FRAME;
/// Bytes around the states: header, checksums.
const MAP_FRAME: usize = 4096;

/// What is done when an object is marked.
type Then = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// Some of the objects.
#[derive(Default)]
struct Objects(Vec<u64>);

impl Objects {
    fn has(&self, object: u64) -> bool {
        let word = usize::try_from(object / 64).ok().and_then(|at| self.0.get(at));
        word.is_some_and(|word| word >> (object % 64) & 1 != 0)
    }

    fn add(&mut self, object: u64) {
        let at = usize::try_from(object / 64).unwrap_or(usize::MAX);
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] |= 1 << (object % 64);
    }
}

#[derive(Default)]
struct State {
    marked: Objects,
    /// Those that are not said to be as the last snapshot has them, whether they are there or not.
    changed: Objects,
    /// Those that are being marked, and what waits for it.
    waiting: HashMap<u64, Vec<Then>>,
}

/// The objects that a map says are there, and newer than the last snapshot: two bits each, the first in the highest of their byte, behind
/// a header that has its length before it, in whose end their number is. What follows them are checksums.
fn existing(map: &[u8]) -> Option<Objects> {
    let (len, rest) = map.split_first_chunk()?;
    let (header, states) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let count = u64::from_le_bytes(*header.last_chunk()?);
    let states = states.get(..usize::try_from(count.div_ceil(4)).ok()?)?;
    let mut objects = Objects::default();
    for object in 0..count {
        let byte = states[usize::try_from(object / 4).ok()?];
        if byte >> (6 - 2 * (object % 4)) & 3 == EXISTS {
            objects.add(object);
        }
    }
    Some(objects)
}

/// The map.
pub struct ObjectMap {
    io: Arc<Io>,
    object: String,
    standing: Arc<Standing>,
    state: Mutex<State>,
}

/// Name of the object that has it.
pub fn object(id: &str) -> String {
    format!("rbd_object_map.{id}")
}

impl ObjectMap {
    /// That of an image, which the caller holds. What it says already need not be said again; if that cannot be read, all is.
    pub fn new(io: Arc<Io>, id: &str, standing: &Arc<Standing>) -> Arc<Self> {
        let (object, standing) = (object(id), Arc::clone(standing));
        let said = io.exec(&object, c"rbd", c"object_map_load", &[], MAP_MAX);
        let marked = said.ok().and_then(|said| existing(&said)).unwrap_or_else(|| {
            log::debug!("rbd: {object} cannot be read: each object is marked anew");
            Objects::default()
        });
        let state = Mutex::new(State { marked, ..State::default() });
        Arc::new(Self { io, object, standing, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something when an object is marked: at once, if it is.
    pub fn mark(self: &Arc<Self>, object: u64, then: Then) {
        let mut state = self.state();
        if state.marked.has(object) {
            drop(state);
            return then(Ok(()));
        }
        let waiting = state.waiting.entry(object).or_default();
        waiting.push(then);
        if waiting.len() > 1 {
            return;
        }
        drop(state);
        let map = Arc::clone(self);
        self.update(object..object + 1, None, Box::new(move |result| map.marked(object, result)));
    }

    /// Does something when objects that are about to be zeroed or cut are not said to be unchanged: at once, if that is so. Those
    /// that are not there stay so.
    pub fn mark_changed(self: &Arc<Self>, objects: Range<u64>, then: Then) {
        let is_known = {
            let state = self.state();
            objects.clone().all(|object| state.marked.has(object) || state.changed.has(object))
        };
        if is_known {
            return then(Ok(()));
        }
        let (map, changed) = (Arc::clone(self), objects.clone());
        let done = move |result: Result<(), Errno>| {
            if result.is_ok() {
                let mut state = map.state();
                changed.for_each(|object| state.changed.add(object));
            }
            then(result);
        };
        self.update(objects, Some(CLEAN), Box::new(done));
    }

    /// Objects, those alone that are said to be `only`, or whatever they are said to be, are there from now on.
    fn update(&self, objects: Range<u64>, only: Option<u8>, then: Then) {
        if self.standing.is_lost() {
            return then(Err(Errno::STALE));
        }
        let mut input = [objects.start.to_le_bytes(), objects.end.to_le_bytes()].concat();
        input.push(EXISTS);
        match only {
            Some(only) => input.extend([1, only]),
            None => input.push(0),
        }
        let (object, standing) = (self.object.clone(), Arc::clone(&self.standing));
        let done = move |result: Result<(), Errno>| {
            if let Err(errno) = result {
                standing.heard(errno);
                log::error!(
                    "rbd: {object} cannot be kept: {errno}: is the image held by somebody else?"
                );
            }
            then(result);
        };
        let step = Step::Exec(c"rbd", c"object_map_update", &input);
        self.io.change(&self.object, &[step], Box::new(done));
    }

    fn marked(&self, object: u64, result: Result<(), Errno>) {
        let mut state = self.state();
        if result.is_ok() {
            state.marked.add(object);
        }
        let waiting = state.waiting.remove(&object).unwrap_or_default();
        drop(state);
        for then in waiting {
            then(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map as Ceph has it: its states, and so many bytes of it cut off.
    fn map(states: &[u8], cut: usize) -> Vec<u8> {
        let mut map = [&14u32.to_le_bytes()[..], &[1, 1, 8, 0, 0, 0]].concat();
        map.extend((states.len() as u64).to_le_bytes());
        let pack = |four: &[u8]| {
            four.iter().enumerate().fold(0, |byte, (i, state)| byte | state << (6 - 2 * i))
        };
        map.extend(states.chunks(4).map(pack));
        map.truncate(map.len() - cut);
        map
    }

    #[test]
    fn what_a_map_says_is_known() {
        let states = [0, 1, 2, 3, 1, 1, 0, 1, 3, 1];
        let said = existing(&map(&states, 0)).unwrap();
        for (object, state) in (0..).zip(states) {
            assert_eq!(said.has(object), state == EXISTS, "{object}");
        }
        assert!(!said.has(10) && !said.has(11));
        for cut in 1..=21 {
            assert!(existing(&map(&states, cut)).is_none(), "{cut}");
        }
        let mut endless = map(&states, 0);
        endless[10..18].fill(0xff);
        assert!(existing(&endless).is_none());
    }

    #[test]
    fn objects_are_remembered() {
        let mut some = Objects::default();
        for object in [0, 63, 64, 1000] {
            assert!(!some.has(object));
            some.add(object);
            assert!(some.has(object));
        }
        assert!(!some.has(1) && !some.has(65) && !some.has(999) && !some.has(u64::MAX));
    }
}
