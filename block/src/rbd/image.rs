//! An image of RBD as a device: requests are cut at the objects' borders, a bounded number of parts is under way at a time, and
//! whoever completes the last part completes the request.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use base::Errno;
use rados::{Cluster, ImagePlace, Io, PATIENCE, Purpose, SHUT_OUT, Step};

use super::header::{self, Header, Snapshots};
use super::map::ObjectMap;
use super::owner::{Image, Owner, Standing};
use crate::device::{Answer, Device, Done, Extent, Op, Request, Traits};

/// Parts of a request that are under way together.
const WINDOW: usize = 16;
/// An image that is not open by then is given up.
const OPENING: Duration = Duration::from_secs(30);
/// Who closes an image waits so long for those who have ended its last requests.
const LETTING_GO: Duration = Duration::from_millis(100);
/// Who waits for what is under way looks so often whether that is of use still.
const LOOK: Duration = Duration::from_millis(200);

/// The image.
pub struct RbdImage {
    inner: Arc<Inner>,
    read_only: bool,
    /// Held as long as this is open to write.
    _owner: Option<Owner>,
}

impl std::fmt::Debug for RbdImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdImage").field("name", &self.inner.name).finish_non_exhaustive()
    }
}

struct Inner {
    /// What is read, and what the image says of itself.
    io: Arc<Io>,
    name: String,
    header: Header,
    size: AtomicU64,
    writing: Mutex<Writing>,
    /// One looks at a time: what was read first would be kept last.
    looking: Mutex<()>,
    map: Option<Arc<ObjectMap>>,
    standing: Arc<Standing>,
}

/// What writes go through as long as there are the same snapshots.
struct Epoch {
    io: Arc<Io>,
    snapshots: Snapshots,
    /// Goes when the last write has ended.
    _end: Sender<()>,
}

/// Told what to write through; an error: not at all.
type Begin = Box<dyn FnOnce(Result<Arc<Epoch>, Errno>) + Send>;

struct Writing {
    now: Arc<Epoch>,
    /// Closed when nothing goes through it any more.
    ended: Receiver<()>,
    /// There may be snapshots that are not known: writes wait.
    held: Option<Vec<Begin>>,
}

impl Writing {
    fn new(io: &Io, snapshots: Snapshots) -> Result<Self, Errno> {
        let (end, ended) = channel();
        let io = Arc::new(io.with_snapshots(snapshots.sequence, &snapshots.all)?);
        Ok(Self { now: Arc::new(Epoch { io, snapshots, _end: end }), ended, held: None })
    }
}

impl RbdImage {
    /// Opens an image; to write, unless `read_only`.
    ///
    /// # Errors
    /// What is wrong with it, or who else holds it, and what to do.
    pub fn open(at: &ImagePlace, read_only: bool) -> Result<Self, String> {
        let (tell, told) = channel();
        let at = at.clone();
        let name = header::full_name(&at);
        // What comes too late ends there: an OSD is waited for as long as it takes.
        let opening = std::thread::Builder::new().name("rbd-open".into()).spawn(move || {
            let _ = tell.send(Self::open_now(&at, read_only));
        });
        opening.map_err(|error| format!("starting a thread: {error}"))?;
        told.recv_timeout(OPENING).unwrap_or_else(|_| {
            let seconds = OPENING.as_secs();
            Err(format!(
                "image {name}: the cluster does not answer within {seconds} s: see ceph -s"
            ))
        })
    }

    fn open_now(at: &ImagePlace, read_only: bool) -> Result<Self, String> {
        let place = &at.place;
        let name = header::full_name(at);
        // A client of its own: what shuts one image out does not shut out others.
        let (user, conf) = (place.user.as_deref(), place.conf.as_deref());
        let cluster = Arc::new(Cluster::connect(user, conf, PATIENCE, Purpose::Disk)?);
        let io = cluster.io(&place.pool, &place.namespace).map_err(|errno| match errno {
            Errno::NOENT => {
                format!("image {name}: there is no pool {}: see ceph osd lspools", place.pool)
            }
            _ => format!("image {name}: the pool {}: {errno}", place.pool),
        })?;
        let io = io.reading(place.reads).map_err(|why| format!("image {name}: {why}"))?;
        let io = Arc::new(io);
        let seen = Header::read(&io, at)?;
        let standing = Arc::new(Standing::default());
        // What changes before the image is held is read after it is.
        let served = Arc::new(OnceLock::new());
        let owner = if read_only {
            None
        } else {
            let image = Box::new(Served(Arc::clone(&served)));
            Some(Owner::take(&io, &seen, &name, &standing, image)?)
        };
        let header = Header::read(&io, at)?;
        let is_same = |a: &Header, b: &Header| {
            (&a.id, a.exclusive, a.object_map) == (&b.id, b.exclusive, b.object_map)
        };
        if !is_same(&header, &seen) {
            return Err(format!("image {name} was changed while it was opened: try again"));
        }
        let map = header.object_map.then(|| ObjectMap::new(Arc::clone(&io), &header.id, &standing));
        let writing = Writing::new(&io, header.snapshots.clone())
            .map_err(|errno| format!("image {name}: its snapshots cannot be kept: {errno}"))?;
        let inner = Arc::new(Inner {
            name,
            size: AtomicU64::new(header.size),
            writing: Mutex::new(writing),
            looking: Mutex::default(),
            map,
            standing,
            header,
            io,
        });
        let _ = served.set(Arc::downgrade(&inner));
        inner
            .look(&AtomicBool::new(false))
            .map_err(|errno| format!("image {}: its header cannot be read: {errno}", inner.name))?;
        Ok(Self { inner, read_only, _owner: owner })
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        // Nobody waits for it any more, but it may be carried out.
        let writing = self.inner.writing();
        if Arc::strong_count(&writing.now) > 1
            || writing.held.as_ref().is_some_and(|h| !h.is_empty())
        {
            self.inner.standing.leave();
        }
        drop(writing);
        // Whoever has told how the last request ended lets go of the image a moment later; as the last one it would end the
        // connection by itself, while whoever closes the image ends the process.
        let end = Instant::now() + LETTING_GO;
        while Arc::strong_count(&self.inner) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The image, once it is served.
struct Served(Arc<OnceLock<Weak<Inner>>>);

impl Image for Served {
    fn hold(&self) {
        if let Some(inner) = self.0.get().and_then(Weak::upgrade) {
            inner.writing().held.get_or_insert_default();
        }
    }

    fn look(&self, over: &AtomicBool) -> Result<(), Errno> {
        self.0.get().and_then(Weak::upgrade).map_or(Ok(()), |inner| inner.look(over))
    }
}

impl Inner {
    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a write: now, unless writes wait, and not if the image is somebody else's.
    fn begin(&self, begin: Begin) {
        if self.standing.is_lost() {
            return begin(Err(Errno::STALE));
        }
        let mut writing = self.writing();
        if let Some(held) = &mut writing.held {
            held.push(begin);
            return;
        }
        let now = Arc::clone(&writing.now);
        drop(writing);
        begin(Ok(now));
    }

    /// Writes do not wait any more.
    fn release(&self) {
        let held = self.writing().held.take();
        for begin in held.into_iter().flatten() {
            self.begin(begin);
        }
    }

    /// The image may have grown, or have other snapshots: of these, everything is kept that is overwritten after this has returned.
    ///
    /// # Errors
    /// That is not known: writes wait until it is, and this is to be asked again.
    fn look(&self, over: &AtomicBool) -> Result<(), Errno> {
        let _alone = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let id = &self.header.id;
        let size = match header::size(&self.io, id) {
            Err(Errno::OVERFLOW) => {
                log::warn!("rbd: image {} says that it is larger than any", self.name);
                Ok(0)
            }
            size => size.map(|(size, _)| size),
        };
        let next = size.and_then(|size| {
            self.size.fetch_max(size, Ordering::SeqCst);
            let snapshots = header::snapshots(&self.io, id)?;
            let is_same = self.writing().now.snapshots == snapshots;
            (!is_same).then(|| Writing::new(&self.io, snapshots)).transpose()
        });
        match next {
            Ok(None) => {}
            Ok(Some(next)) => {
                let ended = {
                    let mut writing = self.writing();
                    writing.now = next.now;
                    std::mem::replace(&mut writing.ended, next.ended)
                };
                self.release();
                // Whoever made a snapshot is not told so while something is under way that does not keep it.
                while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    if over.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                }
            }
            // It is no more, or not for this client.
            Err(errno @ (SHUT_OUT | Errno::NOENT)) => {
                log::error!("rbd: the header of image {} cannot be read: {errno}", self.name);
                self.standing.lose();
            }
            Err(errno) if !self.standing.is_lost() => {
                self.writing().held.get_or_insert_default();
                return Err(errno);
            }
            Err(_) => {}
        }
        self.release();
        Ok(())
    }

    fn object_bytes(&self) -> u64 {
        1 << self.header.order
    }

    fn object(&self, number: u64) -> String {
        format!("{}.{number:016x}", self.header.prefix)
    }

    /// What an error of a request means. An object that is not there is one of zeroes, unless the pool is not there.
    fn absent(&self, errno: Errno) -> Result<(), Errno> {
        let there = || self.io.cluster().has_pool(self.io.pool_id());
        if errno == Errno::NOENT && there() { Ok(()) } else { Err(errno) }
    }

    fn read(self: &Arc<Self>, part: &Part, then: Then) {
        let (inner, len) = (Arc::clone(self), part.within.len());
        let done = Box::new(move |result: Result<Vec<u8>, Errno>| {
            then(match result {
                Ok(mut bytes) => {
                    // It ends before: what comes after it is zero.
                    bytes.resize(len, 0);
                    Ok(bytes)
                }
                Err(errno) => {
                    if errno == SHUT_OUT {
                        inner.standing.lose();
                    }
                    inner.absent(errno).map(|()| vec![0; len])
                }
            });
        });
        self.io.read(&self.object(part.object), part.within.start as u64, len, done);
    }

    /// Begins a write of an object, which `write` is; `then` is told how it ended.
    fn change(
        self: &Arc<Self>,
        then: Then,
        write: impl FnOnce(&Arc<Io>, rados::librados::Done<()>) + Send + 'static,
    ) {
        let inner = Arc::clone(self);
        self.begin(Box::new(move |epoch| {
            let epoch = match epoch {
                Ok(epoch) => epoch,
                Err(errno) => return then(Err(errno)),
            };
            let io = Arc::clone(&epoch.io);
            let done = Box::new(move |result: Result<(), Errno>| {
                drop(epoch);
                if let Err(errno) = result {
                    inner.standing.heard(errno);
                }
                then(result.map(|()| Vec::new()));
            });
            write(&io, done);
        }));
    }

    fn write(self: &Arc<Self>, part: &Part, bytes: Arc<Vec<u8>>, then: Then) {
        let (inner, part) = (Arc::clone(self), part.clone());
        let (number, name) = (part.object, self.object(part.object));
        let write = move |marked: Result<(), Errno>| match marked {
            Ok(()) => inner.change(then, move |io, done| {
                let step = Step::Write(part.within.start as u64, &bytes[part.at]);
                io.change(&name, &[step], done);
            }),
            Err(errno) => then(Err(errno)),
        };
        match &self.map {
            Some(map) => map.mark(number, Box::new(write)),
            None => write(Ok(())),
        }
    }

    /// Makes zeroes: an object of nothing else goes, one of which the end is nothing else ends before.
    fn clear(self: &Arc<Self>, part: &Part, then: Then) {
        let object = self.object_bytes();
        let (from, to) = (part.within.start as u64, part.within.end as u64);
        let last = part.object * object + to >= self.size.load(Ordering::SeqCst);
        let step = if to < object && !last {
            Step::Zero(from, to - from)
        } else if from == 0 && self.map.is_none() {
            Step::Remove
        } else {
            // What the map says is there stays there.
            Step::Truncate(from)
        };
        let (inner, name) = (Arc::clone(self), self.object(part.object));
        let then = Box::new(move |result: Result<Vec<u8>, Errno>| {
            then(result.or_else(|errno| inner.absent(errno).map(|()| Vec::new())));
        });
        self.change(then, move |io, done| io.change(&name, &[step], done));
    }
}

/// Told of a part: its bytes, where it is read.
type Then = Box<dyn FnOnce(Result<Vec<u8>, Errno>) + Send>;

/// A part of a request: of one object.
#[derive(Clone, Debug)]
struct Part {
    object: u64,
    within: Range<usize>,
    /// Where that lies in the request.
    at: Range<usize>,
}

enum What {
    /// What was read; nothing, as long as no part was.
    Read(Vec<u8>),
    Write(Arc<Vec<u8>>),
    /// Zeroes that take room.
    Fill,
    Clear,
}

/// A request under way.
struct Job {
    inner: Arc<Inner>,
    what: What,
    begin: u64,
    at: u64,
    end: u64,
    active: usize,
    failed: Option<Errno>,
    done: Option<Done>,
}

type Shared = Arc<Mutex<Job>>;

fn lock(job: &Shared) -> MutexGuard<'_, Job> {
    job.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// The next part, if one may be begun.
    fn next(&mut self) -> Option<Part> {
        if self.failed.is_some() || self.at >= self.end || self.active >= WINDOW {
            return None;
        }
        let object = self.inner.object_bytes();
        let from = self.at % object;
        let len = (object - from).min(self.end - self.at);
        let at = usize::try_from(self.at - self.begin).unwrap_or(0);
        let part = Part {
            object: self.at / object,
            within: from as usize..(from + len) as usize,
            at: at..at.saturating_add(len as usize),
        };
        self.at += len;
        self.active += 1;
        Some(part)
    }

    fn finish(&mut self) -> Option<(Done, Result<Answer, Errno>)> {
        let over = self.active == 0 && (self.failed.is_some() || self.at >= self.end);
        let done = self.done.take_if(|_| over)?;
        let outcome = match (self.failed, &mut self.what) {
            (Some(errno), _) => Err(errno),
            (None, What::Read(bytes)) => Ok(Answer::Data(std::mem::take(bytes))),
            (None, _) => Ok(Answer::Done),
        };
        Some((done, outcome))
    }
}

/// Begins parts as long as there are some and not too many; completes the request after the last.
fn go_on(job: &Shared) {
    loop {
        let mut held = lock(job);
        let Some(part) = held.next() else {
            let finished = held.finish();
            drop(held);
            if let Some((done, outcome)) = finished {
                done(outcome);
            }
            return;
        };
        let inner = Arc::clone(&held.inner);
        let shared = Arc::clone(job);
        let at = part.at.clone();
        let len = usize::try_from(held.end - held.begin).unwrap_or(0);
        let then: Then = Box::new(move |result| {
            let mut held = lock(&shared);
            held.active -= 1;
            match (result, &mut held.what) {
                (Err(errno), _) => held.failed = Some(errno),
                // Of one object: these are the bytes.
                (Ok(bytes), What::Read(all)) if at == (0..len) => *all = bytes,
                (Ok(bytes), What::Read(all)) => {
                    all.resize(len, 0);
                    all[at].copy_from_slice(&bytes);
                }
                (Ok(_), _) => {}
            }
            drop(held);
            go_on(&shared);
        });
        match &held.what {
            What::Read(_) => {
                drop(held);
                inner.read(&part, then);
            }
            What::Write(bytes) => {
                let bytes = Arc::clone(bytes);
                drop(held);
                inner.write(&part, bytes, then);
            }
            What::Fill => {
                drop(held);
                let bytes = Arc::new(vec![0; part.within.len()]);
                let part = Part { at: 0..part.within.len(), ..part };
                inner.write(&part, bytes, then);
            }
            What::Clear => {
                drop(held);
                inner.clear(&part, then);
            }
        }
    }
}

impl Device for RbdImage {
    fn traits(&self) -> Traits {
        Traits { block_preferred: 64 << 10, read_only: self.read_only, ..Traits::BYTES }
    }

    fn size(&self) -> u64 {
        self.inner.size.load(Ordering::SeqCst)
    }

    fn is_prompt(&self, _: &Op) -> bool {
        true
    }

    fn submit(&self, request: Request) {
        let (what, offset, len) = match request.op {
            // Everything that was completed is durable.
            Op::Flush => return (request.done)(Ok(Answer::Done)),
            Op::Status { len, .. } => {
                let all = Extent { len, hole: false, zero: false };
                return (request.done)(Ok(Answer::Extents(vec![all])));
            }
            Op::Zero { how, .. } if how.no_hole && how.fast => {
                return (request.done)(Err(Errno::OPNOTSUPP));
            }
            Op::Read { offset, len } => (What::Read(Vec::new()), offset, len.into()),
            Op::Write { offset, data, .. } => {
                let len = data.len() as u64;
                (What::Write(Arc::new(data)), offset, len)
            }
            Op::Zero { offset, len, how } if how.no_hole => (What::Fill, offset, len),
            Op::Zero { offset, len, .. } | Op::Trim { offset, len, .. } => {
                (What::Clear, offset, len)
            }
        };
        if !matches!(what, What::Read(_)) {
            if self.read_only {
                return (request.done)(Err(Errno::ROFS));
            }
            if self.inner.standing.is_lost() {
                return (request.done)(Err(Errno::STALE));
            }
        }
        let job = Job {
            inner: Arc::clone(&self.inner),
            what,
            begin: offset,
            at: offset,
            end: offset + len,
            active: 0,
            failed: None,
            done: Some(request.done),
        };
        let clears = matches!(job.what, What::Clear) && len > 0;
        let job = Arc::new(Mutex::new(job));
        match self.inner.map.as_ref().filter(|_| clears) {
            Some(map) => {
                let object = self.inner.object_bytes();
                let objects = offset / object..(offset + len - 1) / object + 1;
                let marked = Box::new(move |result: Result<(), Errno>| {
                    lock(&job).failed = result.err();
                    go_on(&job);
                });
                map.mark_changed(objects, marked);
            }
            None => go_on(&job),
        }
    }
}
