//! A store in a pool of Ceph: `rados:[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE&reads=balance]`.
//!
//! A name is an object, put in one step and durable on all of its OSDs when that is answered. Several stores may be in one pool of
//! Ceph, by their namespaces or prefixes; a list goes through all names of a namespace, so a pool of ours does well to have its
//! own. Cluster and keys are found as Ceph's own tools find them: `CEPH_CONF`, `CEPH_ARGS`, `/etc/ceph`.
//!
//! Unlike a bucket it has a lock: it is taken for [`LEASE`] and renewed. If that fails for so long, nothing is put or removed
//! until it is held again; whether that counts, the image knows, which has the other stores' locks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::Errno;
pub use rados::Place;
use rados::librados::{Done, Lock as Named};
use rados::{Connection, Io, Lease, PATIENCE, Step, Terms};

use super::ground::{Hold, Lock};
use super::store::Store;

/// So long a lock outlives its holder.
pub const LEASE: Duration = Duration::from_secs(30);
/// Its object, within an image: not listed.
const LOCK: &str = ".lock";
/// Its name.
const LOCK_NAME: &str = "corbel";
/// Bytes of all names together that are listed: those of an image of some TiB.
const NAMES_BYTES_MAX: usize = 512 << 20;

/// The store.
#[derive(Debug)]
pub struct Rados {
    place: Place,
    connection: Arc<Connection>,
    /// What requests go through, once there is a connection.
    io: Mutex<Option<Arc<Io>>>,
    /// Locks of images that this has, or had.
    leases: Mutex<HashMap<String, Terms>>,
    lease: Duration,
}

/// A lock that was given away.
struct Held(Lease);

impl Hold for Held {
    fn term(&self) -> Option<u64> {
        self.0.terms().now()
    }
}

impl Rados {
    /// A store at a place; nothing is asked yet.
    ///
    /// # Errors
    /// librados is not there.
    pub fn new(place: Place) -> Result<Self, String> {
        Self::patient(place, PATIENCE, LEASE)
    }

    /// The same, giving up on an answer, and on a lock, after other times.
    ///
    /// # Errors
    /// As above.
    pub fn patient(place: Place, patience: Duration, lease: Duration) -> Result<Self, String> {
        let (user, conf) = (place.user.as_deref(), place.conf.as_deref());
        let connection = Connection::to(user, conf, patience)?;
        let (io, leases) = (Mutex::default(), Mutex::default());
        Ok(Self { place, connection, io, leases, lease })
    }

    fn io(&self) -> Result<Arc<Io>, Errno> {
        // The log has what is wrong.
        let cluster = self.connection.cluster().map_err(|_| Errno::NODEV)?;
        let mut io = self.io.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(io) = io.as_ref().filter(|io| Arc::ptr_eq(io.cluster(), &cluster)) {
            return Ok(Arc::clone(io));
        }
        let made = cluster.io(&self.place.pool, &self.place.namespace).map_err(|errno| {
            if errno != Errno::NOENT {
                return errno;
            }
            let pool = &self.place.pool;
            log::warn!("pool: there is no {pool} in the cluster: ceph osd pool create {pool}");
            Errno::NODEV
        })?;
        let made = made.reading(self.place.reads).map_err(|why| {
            log::warn!("pool: {} is not read: {why}", self.place.pool);
            Errno::NODEV
        })?;
        Ok(Arc::clone(io.insert(Arc::new(made))))
    }

    /// What an error of a request means. A pool of Ceph that is not there is a store that is not there, never an empty one.
    fn errno(&self, io: &Arc<Io>, errno: Errno) -> Errno {
        self.connection.heard(io.cluster(), errno);
        if errno != Errno::NOENT || io.cluster().pool_id(&self.place.pool) == Ok(io.pool_id()) {
            return errno;
        }
        log::warn!("pool: {} is in the cluster no more", self.place.pool);
        self.io.lock().unwrap_or_else(PoisonError::into_inner).take();
        Errno::NODEV
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.place.prefix)
    }

    /// Asks, and waits for the answer.
    fn ask<T: Send + 'static>(&self, begin: impl FnOnce(&Arc<Io>, Done<T>)) -> Result<T, Errno> {
        let io = self.io()?;
        Io::wait(self.connection.patience(), |done| begin(&io, done))
            .map_err(|errno| self.errno(&io, errno))
    }

    /// The lock of the image that a name is of, if this has it, or had.
    fn lease(&self, name: &str) -> Option<Terms> {
        let (image, _) = name.split_once('/').unwrap_or((name, ""));
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.get(image).filter(|lease| !lease.is_over()).cloned()
    }

    /// Changes a name; not if this had the lock of its image and has it no more.
    fn change(&self, name: &str, step: Step<'_>) -> Result<(), Errno> {
        let lease = self.lease(name);
        let patience = self.connection.patience();
        let held = |lease: &Terms| lease.wait(patience).ok_or(Errno::STALE);
        let term = lease.as_ref().map(held).transpose()?;
        let name = self.name(name);
        self.ask(|io, done| io.change(&name, &[step], done))?;
        // If it was held until now, who has it next finds what was done.
        let ended = |lease: &Terms| lease.now() != term && !lease.is_over();
        if lease.as_ref().is_some_and(ended) { Err(Errno::STALE) } else { Ok(()) }
    }
}

impl Store for Rados {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        // In one piece: pools of Ceph that are erasure-coded take nothing else.
        self.change(name, Step::WriteFull(&parts.concat()))
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        // To Ceph none means all.
        if len == 0 {
            return Ok(Vec::new());
        }
        let name = self.name(name);
        self.ask(|io, done| io.read(&name, offset, len, done))
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let io = self.io()?;
        let prefix = format!("{}{image}/", self.place.prefix);
        let (mut names, mut bytes) = (Vec::new(), 0);
        io.names(|name| {
            let name = name.strip_prefix(prefix.as_bytes()).and_then(|n| str::from_utf8(n).ok());
            if let Some(name) = name.filter(|name| !name.starts_with('.') && !name.contains('/')) {
                bytes += name.len();
                names.push(name.to_owned());
            }
            bytes <= NAMES_BYTES_MAX
        })
        .map_err(|errno| self.errno(&io, errno))?;
        if bytes > NAMES_BYTES_MAX {
            log::warn!("pool: the list of {prefix} in {} has no end", self.place.pool);
            return Err(Errno::IO);
        }
        // A list of a pool that has gone ends as one of a pool that is empty.
        match self.errno(&io, Errno::NOENT) {
            Errno::NOENT => Ok(names),
            errno => Err(errno),
        }
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        match self.change(name, Step::Remove) {
            Err(Errno::NOENT) => Ok(()),
            removed => removed,
        }
    }

    fn lock(&self, image: &str) -> Result<Lock, Errno> {
        let io = self.io()?;
        let object = self.name(&format!("{image}/{LOCK}"));
        let cookie = format!("{:016x}", super::shard::draw());
        let description = format!("corbel, process {}", std::process::id());
        let named = Named { name: LOCK_NAME, cookie: &cookie, tag: "", description: &description };
        let lease = Lease::take(Arc::clone(&io), &object, &named, self.lease).map_err(|errno| {
            if errno == Errno::BUSY {
                for locker in io.lockers(&object, LOCK_NAME).unwrap_or_default() {
                    if !locker.is_plain() {
                        log::warn!("pool: image {image} is open elsewhere: {locker:?}");
                        continue;
                    }
                    log::warn!(
                        "pool: image {image} is open at {} ({}): if that is no more, its lock ends within {} s, or with: rados -p {} --namespace '{}' lock break '{object}' {LOCK_NAME} {} --lock-cookie '{}'",
                        locker.address,
                        locker.client,
                        self.lease.as_secs(),
                        self.place.pool,
                        self.place.namespace,
                        locker.client,
                        locker.cookie
                    );
                }
            }
            self.errno(&io, errno)
        })?;
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.insert(image.to_owned(), lease.terms());
        Ok(Box::new(Held(lease)))
    }
}
