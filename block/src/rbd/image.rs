//! An image of RBD as a device: requests are cut at the objects' borders, a bounded number of parts is under way at a time, and
//! whoever completes the last part completes the request.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Errno;
use rados::{Connection, ImagePlace, Io, PATIENCE, Step};

use super::header::{self, Header, Snapshots};
use super::map::ObjectMap;
use super::owner::Owner;
use crate::device::{Answer, Device, Done, Extent, Op, Request, Traits};

/// Parts of a request that are under way together.
const WINDOW: usize = 16;

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
    io: Arc<Io>,
    name: String,
    pool: String,
    header: Header,
    size: AtomicU64,
    snapshots: Mutex<Snapshots>,
    map: Option<Arc<ObjectMap>>,
    /// Somebody else may write: nothing is written any more.
    lost: Arc<AtomicBool>,
}

impl RbdImage {
    /// Opens an image; to write, unless `read_only`.
    ///
    /// # Errors
    /// What is wrong with it, or who else holds it, and what to do.
    pub fn open(at: &ImagePlace, read_only: bool) -> Result<Self, String> {
        let place = &at.place;
        let name = header::full_name(at);
        let connection = Connection::to(place.user.as_deref(), place.conf.as_deref(), PATIENCE)?;
        let cluster = connection.cluster()?;
        let io = cluster.io(&place.pool, &place.namespace).map_err(|errno| match errno {
            Errno::NOENT => {
                format!("image {name}: there is no pool {}: see ceph osd lspools", place.pool)
            }
            _ => format!("image {name}: the pool {}: {errno}", place.pool),
        })?;
        let io = Arc::new(io);
        let seen = Header::read(&io, at)?;
        let lost = Arc::new(AtomicBool::new(false));
        // What changes before the image is held is read after it is.
        let changes = Arc::new(Mutex::new(std::sync::Weak::<Inner>::new()));
        let owner = if read_only {
            None
        } else {
            let changes = Arc::clone(&changes);
            let changed = Box::new(move || {
                let inner = changes.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
                if let Some(inner) = inner {
                    inner.look_again();
                }
            });
            Some(Owner::take(&io, &seen.id, &name, seen.object_map, &lost, changed)?)
        };
        let header = Header::read(&io, at)?;
        if header.id != seen.id || header.object_map != seen.object_map {
            return Err(format!("image {name} was changed while it was opened: try again"));
        }
        let map = header.object_map.then(|| ObjectMap::new(Arc::clone(&io), &header.id));
        let inner = Arc::new(Inner {
            name,
            pool: place.pool.clone(),
            size: AtomicU64::new(header.size),
            snapshots: Mutex::default(),
            map,
            lost,
            header,
            io,
        });
        if !read_only {
            inner.keep_snapshots(inner.header.snapshots.clone())?;
        }
        *changes.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&inner);
        inner.look_again();
        Ok(Self { inner, read_only, _owner: owner })
    }
}

impl Inner {
    /// What is overwritten from now on is kept for these.
    fn keep_snapshots(&self, snapshots: Snapshots) -> Result<(), String> {
        let mut kept = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        if *kept == snapshots {
            return Ok(());
        }
        self.io.set_snapshots(snapshots.sequence, &snapshots.all).map_err(|errno| {
            format!("image {}: its snapshots cannot be kept: {errno}", self.name)
        })?;
        *kept = snapshots;
        Ok(())
    }

    /// The image may have grown, or have other snapshots.
    fn look_again(&self) {
        let id = &self.header.id;
        let looked = header::size(&self.io, id).and_then(|(size, _)| {
            self.size.fetch_max(size, Ordering::SeqCst);
            header::snapshots(&self.io, id)
        });
        let kept = looked.map_err(|errno| format!("image {}: its header: {errno}", self.name));
        if let Err(why) = kept.and_then(|snapshots| self.keep_snapshots(snapshots)) {
            log::warn!("rbd: {why}");
        }
    }

    fn object_bytes(&self) -> u64 {
        1 << self.header.order
    }

    fn object(&self, number: u64) -> String {
        format!("{}.{number:016x}", self.header.prefix)
    }

    /// What an error of a request means. An object that is not there is one of zeroes, unless the pool is not there.
    fn absent(&self, errno: Errno) -> Result<(), Errno> {
        let there = || self.io.cluster().pool_id(&self.pool) == Ok(self.io.pool_id());
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
                Err(errno) => inner.absent(errno).map(|()| vec![0; len]),
            });
        });
        self.io.read(&self.object(part.object), part.within.start as u64, len, done);
    }

    fn write(self: &Arc<Self>, part: &Part, bytes: Arc<Vec<u8>>, then: Then) {
        let (inner, part) = (Arc::clone(self), part.clone());
        let (number, name) = (part.object, self.object(part.object));
        let write = move |result: Result<(), Errno>| match result {
            Ok(()) => {
                let step = Step::Write(part.within.start as u64, &bytes[part.at.clone()]);
                let done =
                    Box::new(move |result: Result<(), Errno>| then(result.map(|()| Vec::new())));
                inner.io.change(&name, &[step], done);
            }
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
        let inner = Arc::clone(self);
        let done = Box::new(move |result: Result<(), Errno>| {
            let result = result.or_else(|errno| inner.absent(errno));
            then(result.map(|()| Vec::new()));
        });
        self.io.change(&self.object(part.object), &[step], done);
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
        let then: Then = Box::new(move |result| {
            let mut held = lock(&shared);
            held.active -= 1;
            match (result, &mut held.what) {
                (Err(errno), _) => held.failed = Some(errno),
                (Ok(bytes), What::Read(all)) => all[at].copy_from_slice(&bytes),
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
            Op::Read { offset, len } => (What::Read(vec![0; len as usize]), offset, len.into()),
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
            if self.inner.lost.load(Ordering::SeqCst) {
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
