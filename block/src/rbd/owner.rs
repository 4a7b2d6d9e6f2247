//! Who holds an image, by the rules of librbd: a watch of its header, and the lock `rbd_lock` of it, whose cookie names the watch.
//! Another client asks for the lock by a notification; it is told no. Should this process end, its watch does, and others may then
//! break the lock: they shut this client out of the cluster first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::Errno;
use rados::Io;
use rados::librados::{Told, Watch};

use super::header;
use super::map;

const LOCK: &str = "rbd_lock";
/// What tells librbd that the lock is held by its rules.
const TAG: &str = "internal";
const EXCLUSIVE: u8 = 1;
/// A watch that is broken is made anew, and if that fails, once more after this.
const PAUSE: Duration = Duration::from_secs(1);
/// Notifications that ask for something have numbers from this on; the first asks for the lock.
const REQUEST_LOCK: u32 = 2;
const HEADER_UPDATE: u32 = 3;
/// What is said to who asks for the lock, and for anything else.
const WILL_NOT: i32 = -30;
const CANNOT: i32 = -95;

/// What holds it.
pub struct Owner {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    /// Dropped: the thread is to end.
    tell: Option<Sender<Told>>,
}

struct Inner {
    io: Arc<Io>,
    id: String,
    name: String,
    map: bool,
    watch: Mutex<Option<Watch>>,
    lost: Arc<AtomicBool>,
    over: AtomicBool,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend(u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend(text.as_bytes());
}

/// As Ceph encodes what may have more fields one day: version, the oldest that is alike, length.
fn envelope(fields: &[u8]) -> Vec<u8> {
    let mut out = vec![1, 1];
    out.extend(u32::try_from(fields.len()).unwrap_or(0).to_le_bytes());
    out.extend(fields);
    out
}

fn cookie(watch: &Watch) -> String {
    format!("auto {}", watch.cookie())
}

/// What a notification is.
fn kind(payload: &[u8]) -> Option<u32> {
    payload.get(6..10)?.try_into().ok().map(u32::from_le_bytes)
}

impl Inner {
    fn header(&self) -> String {
        header::object(&self.id)
    }

    fn watch(&self, tell: &Sender<Told>) -> Result<Watch, Errno> {
        let tell = tell.clone();
        self.io.watch(&self.header(), Box::new(move |told| drop(tell.send(told))))
    }

    fn lock(&self, object: &str, cookie: &str, tag: &str) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, LOCK);
        fields.push(EXCLUSIVE);
        put_text(&mut fields, cookie);
        put_text(&mut fields, tag);
        put_text(&mut fields, "corbel");
        // For ever, and not renewed.
        fields.extend([0; 9]);
        self.io.exec(object, c"lock", c"lock", &envelope(&fields), 0).map(drop)
    }

    /// Gives the lock another cookie.
    fn set_cookie(&self, old: &str, new: &str) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, LOCK);
        fields.push(EXCLUSIVE);
        for text in [old, TAG, new] {
            put_text(&mut fields, text);
        }
        self.io.exec(&self.header(), c"lock", c"set_cookie", &envelope(&fields), 0).map(drop)
    }

    /// A watch that is broken is made anew, and the lock named after it.
    fn watch_again(&self, tell: &Sender<Told>) {
        let mut held = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = held.take() else { return };
        let old_cookie = cookie(&old);
        drop(old);
        while !self.over.load(Ordering::SeqCst) {
            let again = self.watch(tell).and_then(|new| {
                self.set_cookie(&old_cookie, &cookie(&new))?;
                Ok(new)
            });
            match again {
                Ok(new) => {
                    *held = Some(new);
                    return;
                }
                Err(errno @ (Errno::NOENT | Errno::BUSY | Errno(108))) => {
                    self.lost.store(true, Ordering::SeqCst);
                    log::error!(
                        "rbd: the lock of image {} is lost ({errno}): nothing is written any more until it is served anew",
                        self.name
                    );
                    return;
                }
                Err(errno) => log::warn!("rbd: the watch of image {}: {errno}", self.name),
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn hear(&self, told: &Receiver<Told>, tell: &Sender<Told>, changed: &dyn Fn()) {
        while !self.over.load(Ordering::SeqCst) {
            match told.recv_timeout(PAUSE) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(Told::Broken(errno)) => {
                    log::warn!("rbd: the watch of image {} broke: {errno}", self.name);
                    self.watch_again(tell);
                    changed();
                }
                Ok(Told::Notified(id, payload)) => {
                    let kind = kind(&payload);
                    if kind == Some(HEADER_UPDATE) {
                        // Before it is acknowledged: whoever made a snapshot waits for that.
                        changed();
                    }
                    let answer = match kind {
                        Some(REQUEST_LOCK) => envelope(&WILL_NOT.to_le_bytes()),
                        Some(kind) if kind > HEADER_UPDATE + 2 => envelope(&CANNOT.to_le_bytes()),
                        _ => Vec::new(),
                    };
                    let held = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(watch) = &*held {
                        let _ = watch.acknowledge(id, &answer);
                    }
                }
            }
        }
    }
}

impl Owner {
    /// Takes an image. `lost` is set when it is not held any more; `changed` is called when it may have changed.
    ///
    /// # Errors
    /// Somebody else holds it; with what to do.
    pub fn take(
        io: &Arc<Io>,
        id: &str,
        name: &str,
        object_map: bool,
        lost: &Arc<AtomicBool>,
        changed: Box<dyn Fn() + Send>,
    ) -> Result<Self, String> {
        let inner = Arc::new(Inner {
            io: Arc::clone(io),
            id: id.to_owned(),
            name: name.to_owned(),
            map: object_map,
            watch: Mutex::default(),
            lost: Arc::clone(lost),
            over: AtomicBool::new(false),
        });
        let (tell, told) = channel();
        let watch = inner.watch(&tell).map_err(|errno| {
            format!("image {name} cannot be watched: {errno}: has the user osd caps for it (profile rbd)?")
        })?;
        let header = inner.header();
        inner.lock(&header, &cookie(&watch), TAG).map_err(|errno| {
            let lockers = io.lockers(&header, LOCK).unwrap_or_default();
            match lockers.first().filter(|_| errno == Errno::BUSY) {
                Some(at) => format!(
                    "image {name} is open at {} ({}): end that, or if it is no more: rbd lock rm {name} '{}' {}",
                    at.address, at.client, at.cookie, at.client
                ),
                None => format!("image {name} cannot be locked: {errno}"),
            }
        })?;
        *inner.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        // From here on all is let go with this.
        let mut owner = Self { inner, thread: None, tell: Some(tell.clone()) };
        if object_map {
            let object = map::object(id);
            // Whoever has it without the lock of the header has died: librbd breaks it as well.
            if owner.inner.lock(&object, "", "") == Err(Errno::BUSY) {
                for at in io.lockers(&object, LOCK).unwrap_or_default() {
                    let _ = io.break_lock(&object, LOCK, &at);
                }
                owner.inner.lock(&object, "", "").map_err(|errno| {
                    format!("the object map of image {name} cannot be locked: {errno}: rbd feature disable {name} fast-diff object-map")
                })?;
            }
        }
        let hears = Arc::clone(&owner.inner);
        let thread = std::thread::Builder::new().name("rbd-owner".into());
        let started = thread.spawn(move || hears.hear(&told, &tell, &*changed));
        owner.thread = Some(started.map_err(|error| format!("starting a thread: {error}"))?);
        Ok(owner)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        self.tell.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let (io, inner) = (&self.inner.io, &self.inner);
        if inner.map {
            let _ = io.unlock(&map::object(&inner.id), LOCK, "");
        }
        let watch = inner.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(watch) = watch {
            let _ = io.unlock(&inner.header(), LOCK, &cookie(&watch));
        }
    }
}
