//! Who holds an image, by the rules of librbd: a watch of its header, and the lock `rbd_lock` of it, whose cookie names the watch.
//! Another client asks for the lock by a notification; it is told no. If a process ends without letting go, its watch ends 30 s later:
//! then whoever comes shuts its client out of the cluster, so that nothing of it arrives any more, and breaks the lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
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
/// Who watches has so long to say so.
const WATCHERS_PATIENCE: Duration = Duration::from_secs(5);
/// Who has died is shut out for so long, as librbd does it.
const SHUT_OUT: Duration = Duration::from_secs(3600);
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
    tell: Sender<Told>,
}

struct Inner {
    io: Arc<Io>,
    id: String,
    name: String,
    /// The lock of the object map is held as well.
    map: AtomicBool,
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

/// The numbers of the clients that watch, by what the cluster says of a notification: those that answered, with their answers, and
/// those that did not.
fn watchers(mut said: &[u8]) -> Result<Vec<u64>, Errno> {
    fn take<const N: usize>(said: &mut &[u8]) -> Result<[u8; N], Errno> {
        let (taken, rest) = said.split_first_chunk().ok_or(Errno::IO)?;
        *said = rest;
        Ok(*taken)
    }
    let mut watchers = Vec::new();
    for answered in [true, false] {
        for _ in 0..u32::from_le_bytes(take(&mut said)?) {
            watchers.push(u64::from_le_bytes(take(&mut said)?));
            // Its cookie.
            take::<8>(&mut said)?;
            if answered {
                let len = u32::from_le_bytes(take(&mut said)?) as usize;
                said = said.get(len..).ok_or(Errno::IO)?;
            }
        }
    }
    Ok(watchers)
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

    /// Takes the lock from who has died: it is named after a watch, and of the client there is none. Whether there was something to do.
    fn bury(&self) -> Result<bool, Errno> {
        let header = self.header();
        let lockers = self.io.lockers(&header, LOCK)?;
        let Some(dead) = lockers.first().filter(|locker| locker.cookie.starts_with("auto ")) else {
            return Ok(false);
        };
        let number = dead.client.strip_prefix("client.").and_then(|number| number.parse().ok());
        let payload = envelope(&HEADER_UPDATE.to_le_bytes());
        let said = self.io.notify(&header, &payload, WATCHERS_PATIENCE)?;
        let watchers = watchers(&said)?;
        if number.is_none_or(|number| watchers.contains(&number)) {
            return Ok(false);
        }
        // What it sent may be under way still.
        self.io.cluster().shut_out(&dead.address, SHUT_OUT)?;
        log::warn!(
            "rbd: image {} was open at {} ({}), which is no more: it is shut out, and its lock broken",
            self.name,
            dead.address,
            dead.client
        );
        self.io.break_lock(&header, LOCK, dead)?;
        Ok(true)
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
        while let Ok(told) = told.recv() {
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            match told {
                Told::Broken(errno) => {
                    log::warn!("rbd: the watch of image {} broke: {errno}", self.name);
                    self.watch_again(tell);
                    changed();
                }
                Told::Notified(id, payload) => {
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
            map: AtomicBool::new(false),
            watch: Mutex::default(),
            lost: Arc::clone(lost),
            over: AtomicBool::new(false),
        });
        let (tell, told) = channel();
        let watch = inner.watch(&tell).map_err(|errno| {
            format!("image {name} cannot be watched: {errno}: has the user osd caps for it (profile rbd)?")
        })?;
        let named = cookie(&watch);
        *inner.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        // From here on all is let go with this.
        let mut owner = Self { inner: Arc::clone(&inner), thread: None, tell: tell.clone() };
        let hears = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("rbd-owner".into());
        let started = thread.spawn(move || hears.hear(&told, &tell, &*changed));
        owner.thread = Some(started.map_err(|error| format!("starting a thread: {error}"))?);
        let header = inner.header();
        let mut locked = inner.lock(&header, &named, TAG);
        if locked == Err(Errno::BUSY) && inner.bury().unwrap_or(false) {
            locked = inner.lock(&header, &named, TAG);
        }
        locked.map_err(|errno| {
            let lockers = io.lockers(&header, LOCK).unwrap_or_default();
            match lockers.first().filter(|_| errno == Errno::BUSY) {
                Some(at) => format!(
                    "image {name} is open at {} ({}): end that; if it is no more, try again in half a minute, or: rbd lock rm {name} '{}' {}",
                    at.address, at.client, at.cookie, at.client
                ),
                None => format!("image {name} cannot be locked: {errno}"),
            }
        })?;
        if object_map {
            let object = map::object(id);
            // Whoever has it without the lock of the header has died: librbd breaks it as well.
            let mut locked = inner.lock(&object, "", "");
            if locked == Err(Errno::BUSY) {
                for at in io.lockers(&object, LOCK).unwrap_or_default() {
                    let _ = io.break_lock(&object, LOCK, &at);
                }
                locked = inner.lock(&object, "", "");
            }
            locked.map_err(|errno| {
                format!("the object map of image {name} cannot be locked: {errno}: rbd feature disable {name} fast-diff object-map")
            })?;
            inner.map.store(true, Ordering::SeqCst);
        }
        Ok(owner)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        // Wakes it.
        let _ = self.tell.send(Told::Notified(0, Vec::new()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let (io, inner) = (&self.inner.io, &self.inner);
        if inner.map.load(Ordering::SeqCst) {
            let _ = io.unlock(&map::object(&inner.id), LOCK, "");
        }
        let watch = inner.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(watch) = watch {
            let _ = io.unlock(&inner.header(), LOCK, &cookie(&watch));
        }
    }
}
