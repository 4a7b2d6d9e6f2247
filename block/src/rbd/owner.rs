//! Who holds an image, by the rules of librbd: a watch of its header, and the lock `rbd_lock` of it, whose cookie names the watch.
//! Another client asks for the lock by a notification; it is told no. If a process ends without letting go, its watch ends 30 s later:
//! then whoever comes shuts its client out of the cluster, so that nothing of it arrives any more, and breaks the lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::Errno;
use rados::librados::{Lock, Locker, Told, Watch, envelope, outside};
use rados::{Io, SHUT_OUT};

use super::header::{self, Header};
use super::map;

const LOCK: &str = "rbd_lock";
/// What tells librbd that the lock is held by its rules.
const TAG: &str = "internal";
/// A watch that is broken is made anew, and if that fails, once more after this.
const PAUSE: Duration = Duration::from_secs(1);
/// Who watches has so long to say so.
const WATCHERS_PATIENCE: Duration = Duration::from_secs(5);
/// Who has died is shut out for so long, as librbd does it.
const SHUT_OUT_TIME: Duration = Duration::from_secs(3600);
/// Notifications that wait to be heard. Others send them: what is more is not answered.
const HEARD_MAX: usize = 1024;
/// Who lets an image go waits so long for the cluster.
const PARTING: Duration = Duration::from_secs(10);
/// Notifications that ask for something have numbers from this on; the first asks for the lock.
const REQUEST_LOCK: u32 = 2;
const HEADER_UPDATE: u32 = 3;
/// What is said to who asks for the lock, and for anything else.
const WILL_NOT: i32 = -30;
const CANNOT: i32 = -95;

/// How an image is held.
#[derive(Default)]
pub struct Standing {
    /// Somebody else may write: nothing is written any more.
    lost: AtomicBool,
    /// Something was given up that may be carried out yet.
    left: AtomicBool,
}

impl Standing {
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Something under way is not waited for any more.
    pub fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
    }

    /// A change has failed.
    pub fn heard(&self, errno: Errno) {
        match errno {
            SHUT_OUT => self.lose(),
            Errno::TIMEDOUT => self.leave(),
            _ => {}
        }
    }
}

/// The image that is held.
pub trait Image: Send {
    /// It may have changed, and that cannot be known now: what is to be written waits until [`look`](Self::look) has succeeded.
    fn hold(&self);

    /// It may have changed. Until `over` this may wait for what is under way.
    ///
    /// # Errors
    /// That cannot be known now: as above.
    fn look(&self, over: &AtomicBool) -> Result<(), Errno>;
}

/// What holds it.
pub struct Owner {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

/// What a watch is told, on its way to who listens.
struct Ears {
    tell: SyncSender<Heard>,
    /// The watch is broken.
    broken: Mutex<Option<Errno>>,
    /// There was more than had room.
    missed: AtomicBool,
}

enum Heard {
    /// The number of a notification, and what it is.
    Notified(u64, Option<u32>),
    /// There is something else to look at.
    Wake,
}

impl Ears {
    fn hear(&self, told: Told) {
        match told {
            Told::Notified(id, payload) => {
                if self.tell.try_send(Heard::Notified(id, kind(&payload))).is_err() {
                    self.missed.store(true, Ordering::SeqCst);
                }
            }
            Told::Broken(errno) => {
                *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(errno);
                self.wake();
            }
        }
    }

    /// If there is no room, what is there wakes.
    fn wake(&self) {
        let _ = self.tell.try_send(Heard::Wake);
    }
}

struct Inner {
    io: Arc<Io>,
    id: String,
    name: String,
    /// There is to be one writer by the rules of librbd.
    exclusive: bool,
    /// The lock of the object map is held as well.
    map: AtomicBool,
    watch: Mutex<Option<Watch>>,
    ears: Arc<Ears>,
    standing: Arc<Standing>,
    over: AtomicBool,
}

fn cookie(watch: &Watch) -> String {
    format!("auto {}", watch.cookie())
}

/// Whether the log is to have a try that failed: the first, and then ever more rarely.
fn is_told(tries: u32) -> bool {
    tries.is_power_of_two()
}

/// Names the lock after another watch; it has one of the names of `tried`, of which the last is the one that it should have. What was
/// given up may have been carried out: it is looked which it is.
fn rename(
    tried: &mut Vec<String>,
    new: String,
    set: impl Fn(&str, &str) -> Result<(), Errno>,
    own: impl Fn() -> Result<Vec<String>, Errno>,
) -> Result<(), Errno> {
    let old = tried.last().cloned().unwrap_or_default();
    // It may get this name, whatever is answered.
    tried.push(new);
    let new = &tried[tried.len() - 1];
    match set(&old, new) {
        Err(errno @ (Errno::NOENT | Errno::BUSY)) => {
            match own()?.into_iter().find(|held| tried.contains(held)) {
                Some(held) if held == *new => Ok(()),
                Some(held) => set(&held, new),
                None => Err(errno),
            }
        }
        set => set,
    }
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

    fn watch(&self) -> Result<Watch, Errno> {
        let ears = Arc::clone(&self.ears);
        self.io.watch(&self.header(), Box::new(move |told| ears.hear(told)))
    }

    /// Takes a lock for ever: it is not renewed.
    fn lock(&self, object: &str, cookie: &str, tag: &str) -> Result<(), Errno> {
        let lock = Lock { name: LOCK, cookie, tag, description: "corbel" };
        self.io.lock(object, &lock, Duration::ZERO, false)
    }

    /// The numbers of the clients that watch the header; they look whether it has changed.
    fn watchers(&self) -> Result<Vec<u64>, Errno> {
        let payload = envelope(&HEADER_UPDATE.to_le_bytes());
        watchers(&self.io.notify(&self.header(), &payload, WATCHERS_PATIENCE)?)
    }

    /// Takes the lock from who has died: it is named after a watch, and of the client there is none. Whether there was something to do.
    fn bury(&self) -> Result<bool, Errno> {
        let header = self.header();
        let lockers = self.io.lockers(&header, LOCK)?;
        let Some(dead) = lockers.first().filter(|locker| locker.cookie.starts_with("auto ")) else {
            return Ok(false);
        };
        let watchers = self.watchers()?;
        if dead.number().is_none_or(|number| watchers.contains(&number)) {
            return Ok(false);
        }
        // What it sent may be under way still.
        self.io.cluster().shut_out(&dead.address, SHUT_OUT_TIME)?;
        log::warn!(
            "rbd: image {} was open at {} ({}), which is no more: it is shut out, and its lock broken",
            self.name,
            dead.address,
            dead.client
        );
        self.io.break_lock(&header, LOCK, dead)?;
        Ok(true)
    }

    /// An image without the feature may be written by others, who take no lock, but watch.
    fn alone(&self) -> Result<(), String> {
        let (name, me) = (&self.name, self.io.cluster().instance());
        let watchers = self.watchers().map_err(|errno| {
            format!("image {name}: whether others watch it is not to be known: {errno}")
        })?;
        match watchers.iter().find(|number| **number != me) {
            Some(other) => Err(format!(
                "image {name} is open as client.{other}, and has no exclusive-lock: end that (if it is no more, it is gone in half a minute), or: rbd feature enable {name} exclusive-lock"
            )),
            None => Ok(()),
        }
    }

    /// A watch that is broken is made anew, and the lock named after it.
    fn watch_again(&self) {
        let mut held = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = held.take() else { return };
        let mut tried = vec![cookie(&old)];
        drop(old);
        let header = self.header();
        let set = |old: &str, new: &str| {
            let lock = Lock { name: LOCK, cookie: old, tag: TAG, description: "" };
            self.io.set_cookie(&header, &lock, new)
        };
        let me = self.io.cluster().instance();
        let own = || {
            let lockers = self.io.lockers(&header, LOCK)?.into_iter();
            Ok(lockers.filter(|at| at.number() == Some(me)).map(|at| at.cookie).collect())
        };
        let mut tries = 0;
        while !self.over.load(Ordering::SeqCst) {
            let again = self.watch().and_then(|new| {
                rename(&mut tried, cookie(&new), set, own)?;
                Ok(new)
            });
            match again {
                Ok(new) => {
                    *held = Some(new);
                    return;
                }
                Err(errno @ (Errno::NOENT | Errno::BUSY | SHUT_OUT)) => {
                    self.standing.lose();
                    log::error!(
                        "rbd: the lock of image {} is lost ({errno}): nothing is written any more until it is served anew",
                        self.name
                    );
                    return;
                }
                Err(errno) => {
                    tries += 1;
                    if is_told(tries) {
                        log::warn!("rbd: the watch of image {}: {errno}", self.name);
                    }
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Has the image look until it knows what it is.
    fn look(&self, image: &dyn Image) {
        let mut tries = 0;
        while let Err(errno) = image.look(&self.over) {
            tries += 1;
            if is_told(tries) {
                log::warn!(
                    "rbd: the header of image {} cannot be read ({errno}): what is to be written waits",
                    self.name
                );
            }
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn hear(&self, told: &Receiver<Heard>, image: &dyn Image) {
        while let Ok(heard) = told.recv() {
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            let broken = self.ears.broken.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(errno) = broken {
                log::warn!("rbd: the watch of image {} broke: {errno}", self.name);
                if !self.exclusive {
                    // Others make snapshots, and this is not told.
                    image.hold();
                }
                self.watch_again();
            }
            if broken.is_some() || self.ears.missed.swap(false, Ordering::SeqCst) {
                self.look(image);
            }
            let Heard::Notified(id, kind) = heard else { continue };
            if kind == Some(HEADER_UPDATE) {
                // Before it is acknowledged: whoever made a snapshot waits for that.
                self.look(image);
                if self.over.load(Ordering::SeqCst) {
                    return;
                }
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

    /// Lets go of all that is held.
    fn let_go(&self) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.standing.left.load(Ordering::SeqCst) {
            log::warn!(
                "rbd: image {}: something that was given up may be written yet: its lock stays until who opens it next has shut this client out",
                self.name
            );
            return;
        }
        if self.map.load(Ordering::SeqCst) {
            let _ = self.io.unlock(&map::object(&self.id), LOCK, "");
        }
        if let Some(watch) = watch {
            let _ = self.io.unlock(&self.header(), LOCK, &cookie(&watch));
        }
    }
}

/// Who has an image, and what to do about it.
fn held_by(name: &str, at: &Locker, buried: Result<bool, Errno>) -> String {
    let why = buried.err().map_or_else(String::new, |errno| {
        format!(" (whether that is no more cannot be found out: {errno})")
    });
    if !at.is_plain() {
        return format!("image {name} is open elsewhere: {at:?}{why}");
    }
    format!(
        "image {name} is open at {} ({}){why}: end that; if it is no more, try again in half a minute, or: rbd lock rm {name} '{}' {}",
        at.address, at.client, at.cookie, at.client
    )
}

impl Owner {
    /// Takes an image.
    ///
    /// # Errors
    /// Somebody else holds it; with what to do.
    pub fn take(
        io: &Arc<Io>,
        header: &Header,
        name: &str,
        standing: &Arc<Standing>,
        image: Box<dyn Image>,
    ) -> Result<Self, String> {
        let (tell, told) = sync_channel(HEARD_MAX);
        let inner = Arc::new(Inner {
            io: Arc::clone(io),
            id: header.id.clone(),
            name: name.to_owned(),
            exclusive: header.exclusive,
            map: AtomicBool::new(false),
            watch: Mutex::default(),
            ears: Arc::new(Ears { tell, broken: Mutex::default(), missed: AtomicBool::new(false) }),
            standing: Arc::clone(standing),
            over: AtomicBool::new(false),
        });
        let watch = inner.watch().map_err(|errno| {
            format!("image {name} cannot be watched: {errno}: has the user osd caps for it (profile rbd)?")
        })?;
        let named = cookie(&watch);
        *inner.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        // From here on all is let go with this.
        let mut owner = Self { inner: Arc::clone(&inner), thread: None };
        let hears = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("rbd-owner".into());
        let started = thread.spawn(move || hears.hear(&told, &*image));
        owner.thread = Some(started.map_err(|error| format!("starting a thread: {error}"))?);
        let object = inner.header();
        let mut locked = inner.lock(&object, &named, TAG);
        let mut buried = Ok(false);
        if locked == Err(Errno::BUSY) {
            buried = inner.bury();
            if buried == Ok(true) {
                locked = inner.lock(&object, &named, TAG);
            }
        }
        locked.map_err(|errno| {
            let lockers = io.lockers(&object, LOCK).unwrap_or_default();
            match lockers.first().filter(|_| errno == Errno::BUSY) {
                Some(at) => held_by(name, at, buried),
                None => format!("image {name} cannot be locked: {errno}"),
            }
        })?;
        if !header.exclusive {
            inner.alone()?;
        }
        if header.object_map {
            let object = map::object(&header.id);
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
        self.inner.ears.wake();
        let (inner, thread) = (Arc::clone(&self.inner), self.thread.take());
        // It waits for threads of the library.
        outside(move || {
            let (end, ended) = channel::<()>();
            let name = inner.name.clone();
            let parting = std::thread::Builder::new().name("rbd-parting".into()).spawn(move || {
                if let Some(thread) = thread {
                    let _ = thread.join();
                }
                inner.let_go();
                // If this is the last that has the connection, it is ended before anybody goes on: a process that ends while the library
                // ends it may crash.
                drop(inner);
                drop(end);
            });
            // A cluster that hangs does not hold up who ends.
            if parting.is_err() || ended.recv_timeout(PARTING) == Err(RecvTimeoutError::Timeout) {
                log::warn!(
                    "rbd: image {name} is not let go, since the cluster does not answer: who opens it next shuts this client out"
                );
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cluster that carries out what it does not answer.
    #[test]
    fn a_name_that_was_given_up_is_known_again() {
        let held = Mutex::new("auto 1".to_owned());
        let answers = AtomicBool::new(false);
        let set = |old: &str, new: &str| {
            let mut held = held.lock().unwrap();
            if *held != old {
                return Err(Errno::NOENT);
            }
            *held = new.to_owned();
            if answers.load(Ordering::SeqCst) { Ok(()) } else { Err(Errno::TIMEDOUT) }
        };
        let own = || Ok(vec![held.lock().unwrap().clone()]);
        let mut tried = vec!["auto 1".to_owned()];
        for new in ["auto 2", "auto 3", "auto 4"] {
            assert_eq!(rename(&mut tried, new.into(), set, own), Err(Errno::TIMEDOUT));
            assert_eq!(*held.lock().unwrap(), new);
        }
        // One that was not carried out.
        tried.push("auto 5".into());
        answers.store(true, Ordering::SeqCst);
        assert_eq!(rename(&mut tried, "auto 6".into(), set, own), Ok(()));
        assert_eq!(*held.lock().unwrap(), "auto 6");
        // Somebody else's is not taken.
        *held.lock().unwrap() = "auto 99".into();
        assert_eq!(rename(&mut tried, "auto 7".into(), set, own), Err(Errno::NOENT));
        assert_eq!(*held.lock().unwrap(), "auto 99");
    }

    #[test]
    fn what_has_no_room_is_looked_for() {
        let (tell, told) = sync_channel(2);
        let ears = Ears { tell, broken: Mutex::default(), missed: AtomicBool::new(false) };
        let payload = envelope(&HEADER_UPDATE.to_le_bytes());
        for id in 0..5 {
            ears.hear(Told::Notified(id, payload.clone()));
        }
        ears.hear(Told::Broken(Errno::NOTCONN));
        let heard: Vec<_> = told.try_iter().collect();
        assert!(matches!(
            heard[..],
            [Heard::Notified(0, Some(HEADER_UPDATE)), Heard::Notified(1, Some(HEADER_UPDATE))]
        ));
        assert!(ears.missed.load(Ordering::SeqCst));
        assert_eq!(*ears.broken.lock().unwrap(), Some(Errno::NOTCONN));
    }

    #[test]
    fn no_command_is_made_of_what_others_chose() {
        let at = |cookie: &str| Locker {
            client: "client.7".into(),
            cookie: cookie.into(),
            address: "v1:10.0.0.1:0/1".into(),
        };
        let said = held_by("rbd/a", &at("mine"), Ok(false));
        assert!(said.contains("rbd lock rm rbd/a 'mine' client.7"), "{said}");
        let said = held_by("rbd/a", &at("'; reboot; '"), Err(Errno::PERM));
        assert!(!said.contains("rbd lock rm") && said.contains("found out"), "{said}");
    }
}
