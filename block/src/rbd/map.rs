//! The object map: what there is of an image is marked in it before it is there. Nothing is marked away: an object that is said to
//! be there and is empty costs who looks a look, and one that is there and not said to be would be lost.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Errno;
use rados::{Io, Step};

/// An object is there, and newer than the last snapshot.
const EXISTS: u8 = 1;

/// What is done when an object is marked.
type Then = Box<dyn FnOnce(Result<(), Errno>) + Send>;

#[derive(Default)]
struct State {
    marked: HashSet<u64>,
    /// Those that are being marked, and what waits for it.
    waiting: HashMap<u64, Vec<Then>>,
}

/// The map.
pub struct ObjectMap {
    io: Arc<Io>,
    object: String,
    state: Mutex<State>,
}

/// Name of the object that has it.
pub fn object(id: &str) -> String {
    format!("rbd_object_map.{id}")
}

impl ObjectMap {
    /// That of an image, which the caller holds.
    pub fn new(io: Arc<Io>, id: &str) -> Arc<Self> {
        Arc::new(Self { io, object: object(id), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something when an object is marked: at once, if it is.
    pub fn mark(self: &Arc<Self>, object: u64, then: Then) {
        let mut state = self.state();
        if state.marked.contains(&object) {
            drop(state);
            return then(Ok(()));
        }
        let waiting = state.waiting.entry(object).or_default();
        waiting.push(then);
        if waiting.len() > 1 {
            return;
        }
        drop(state);
        // From, to, what they become; whatever they were.
        let mut input = [object.to_le_bytes(), (object + 1).to_le_bytes()].concat();
        input.extend([EXISTS, 0]);
        let map = Arc::clone(self);
        let step = Step::Exec(c"rbd", c"object_map_update", &input);
        self.io.change(&self.object, &[step], Box::new(move |result| map.marked(object, result)));
    }

    fn marked(&self, object: u64, result: Result<(), Errno>) {
        if let Err(errno) = result {
            log::error!(
                "rbd: {} cannot be kept: {errno}: is the image held by somebody else?",
                self.object
            );
        }
        let mut state = self.state();
        if result.is_ok() {
            state.marked.insert(object);
        }
        let waiting = state.waiting.remove(&object).unwrap_or_default();
        drop(state);
        for then in waiting {
            then(result);
        }
    }
}
