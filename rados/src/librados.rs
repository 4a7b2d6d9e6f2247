//! librados (`librados.so.2`), loaded when it is needed: a program that uses this crate builds and runs without it.
//!
//! What is read and written goes through the asynchronous calls; what is asked once (locks, lists, methods of classes) through those
//! that wait, which the time-outs given to [`Cluster::connect`] bound. All of it may be called by any thread.
#![allow(unsafe_code)] // a C library

mod io;
mod library;
mod lock;
mod watch;

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use base::Errno;

use crate::osdmap::OsdMap;

pub use self::io::{Done, Io, Step};
pub use self::library::load;
use self::library::{Lib, Raw, lib};
pub use self::lock::{Lock, Locker, envelope};
pub use self::watch::{Notice, Told, Watch};

/// What the library returns: an error, or something else.
fn told(code: c_int) -> Result<c_int, Errno> {
    if code >= 0 {
        return Ok(code);
    }
    Err(u16::try_from(code.unsigned_abs()).map_or(Errno::IO, Errno))
}

fn text(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| Errno::INVAL)
}

/// Bytes of a map of OSDs at most: that of ten thousand has some ten MiB.
pub const OSD_MAP_MAX: usize = 256 << 20;

thread_local! {
    /// This is a thread of the library.
    static CALLS_BACK: Cell<bool> = const { Cell::new(false) };
}

/// Whoever the library calls says so first.
fn called_back() {
    CALLS_BACK.set(true);
}

/// Ends something for which the library waits until its threads have nothing to do: by another thread, where this is one of them,
/// which would wait for itself.
pub fn outside(end: impl FnOnce() + Send + 'static) {
    if !CALLS_BACK.get() {
        return end();
    }
    if let Err(error) = std::thread::Builder::new().name("rados-end".into()).spawn(end) {
        log::warn!("rados: something is not ended: no thread: {error}");
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A store that others stand in for: what an OSD does not answer in time is given up.
    Store,
    /// A disk: an OSD that fails is waited for until another does what it did, or for as long as the configuration says
    /// (`rados_osd_op_timeout`). To begin a request takes no time, however many there are: who has them bounds them.
    Disk,
}

/// An option of the library, what it is if nobody sets it, and what it is for a client that is one disk's alone: each of its requests
/// goes from thread to thread, and with fewer that send and receive more is found to do by one that was woken. (Not those that call back: one
/// waits for the monitors where a pool is gone, and another one takes what they say.)
const ALONE: (&CStr, &CStr, &CStr) = (c"ms_async_op_threads", c"3", c"1");

/// A connection to a cluster.
pub struct Cluster {
    lib: &'static Lib,
    raw: Raw,
    patience: Duration,
}

/// The library's handle, on its way to who ends it.
struct Ending(&'static Lib, Raw);

// SAFETY: as of `Cluster`.
unsafe impl Send for Ending {}

impl Ending {
    fn end(self) {
        // SAFETY: made by the library, and ended once: nobody else has it any more.
        unsafe { (self.0.shutdown)(self.1) };
    }
}

// SAFETY: librados says of its handles that every thread may use them.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("instance", &self.instance()).finish_non_exhaustive()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // What was made of it (`Io`) kept it alive.
        let ending = Ending(self.lib, self.raw);
        outside(move || ending.end());
    }
}

impl Cluster {
    /// Connects as a user (`admin`, if none is named) by a file of configuration (the usual ones), and gives up after `patience`
    /// then and on everything that is asked of monitors; of OSDs, as the purpose is.
    ///
    /// # Errors
    /// What was wrong and what to do, in words.
    pub fn connect(
        user: Option<&str>,
        conf: Option<&str>,
        patience: Duration,
        purpose: Purpose,
    ) -> Result<Self, String> {
        let lib = lib()?;
        let c = |what: &str| CString::new(what).map_err(|_| format!("{what:?} has a NUL in it"));
        let (name, file) = (user.map(c).transpose()?, conf.map(c).transpose()?);
        let or_null = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        let mut raw = null_mut();
        // SAFETY: room for a handle, and a name or none.
        told(unsafe { (lib.create)(&raw mut raw, or_null(&name)) })
            .map_err(|errno| format!("librados makes no handle: {errno}"))?;
        // From here on it is ended with this.
        let cluster = Self { lib, raw, patience };
        // SAFETY: the handle lives; a path or none.
        told(unsafe { (lib.read_conf)(raw, or_null(&file)) }).map_err(|errno| {
            let at = conf.unwrap_or("CEPH_CONF, /etc/ceph/ceph.conf, ~/.ceph/config, ceph.conf");
            format!("no configuration of Ceph can be read ({at}: {errno}): set CEPH_CONF, or end the name of the store with ?conf=FILE")
        })?;
        // SAFETY: the handle lives; none: CEPH_ARGS.
        told(unsafe { (lib.parse_env)(raw, null()) })
            .map_err(|errno| format!("CEPH_ARGS cannot be read: {errno}"))?;
        let seconds = c(&patience.as_secs().max(1).to_string())?;
        let (seconds, none) = (seconds.as_c_str(), c"0");
        let general = [(c"client_mount_timeout", seconds), (c"rados_mon_op_timeout", seconds)];
        let special = match purpose {
            Purpose::Store => &[(c"rados_osd_op_timeout", seconds)][..],
            // None: no bound.
            Purpose::Disk => {
                &[(c"objecter_inflight_ops", none), (c"objecter_inflight_op_bytes", none)]
            }
        };
        for (option, value) in general.iter().chain(special) {
            // SAFETY: the handle lives, and both texts end in NUL.
            told(unsafe { (lib.set_conf)(raw, option.as_ptr(), value.as_ptr()) }).map_err(
                |errno| format!("librados takes no {}: {errno}", option.to_string_lossy()),
            )?;
        }
        if purpose == Purpose::Disk {
            cluster.prefer();
        }
        // SAFETY: the handle lives and is not connected yet.
        told(unsafe { (lib.connect)(raw) }).map_err(|errno| {
            let what = match errno {
                Errno::TIMEDOUT => "no monitor answers: are those of mon_host there, and up?",
                Errno::ACCES | Errno::PERM => "the monitors refuse the key: see ceph auth get",
                Errno::NOENT => "no monitor is named, or the user has no key: see mon_host and keyring of the configuration",
                _ => "see the configuration",
            };
            let user = user.unwrap_or("admin");
            format!("no connection to the cluster as client.{user}: {errno}: {what}")
        })?;
        Ok(cluster)
    }

    /// Sets what does for one disk, where the file of the configuration and CEPH_ARGS have left it as the library has it. (What the
    /// monitors have configured comes later, and counts less.)
    fn prefer(&self) {
        let (option, default, value) = ALONE;
        let mut now = [0; 16];
        let call = self.lib.get_conf;
        // SAFETY: the handle lives, the text ends in NUL, and there is as much room as is said.
        let code = unsafe { call(self.raw, option.as_ptr(), now.as_mut_ptr().cast(), now.len()) };
        let is_default = CStr::from_bytes_until_nul(&now).is_ok_and(|now| now == default);
        if code >= 0 && is_default {
            // SAFETY: the handle lives, and both texts end in NUL. One that it does not take stays as it is.
            unsafe { (self.lib.set_conf)(self.raw, option.as_ptr(), value.as_ptr()) };
        }
    }

    /// After this what it does not answer is given up.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// What the cluster calls this client.
    pub fn instance(&self) -> u64 {
        // SAFETY: the handle lives and is connected.
        unsafe { (self.lib.instance)(self.raw) }
    }

    /// Shuts a client out, by its address, so that nothing that it sent before arrives any more.
    pub fn shut_out(&self, address: &str, time: Duration) -> Result<(), Errno> {
        let address = text(address)?;
        let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        let call = self.lib.shut_out;
        // SAFETY: the handle lives, and the address ends in NUL and is read only, for all that its type says.
        told(unsafe { call(self.raw, address.as_ptr().cast_mut(), seconds) }).map(drop)
    }

    /// The number of a pool of this name.
    pub fn pool_id(&self, pool: &str) -> Result<i64, Errno> {
        let pool = text(pool)?;
        // SAFETY: the handle lives, and the name ends in NUL.
        let id = unsafe { (self.lib.pool_lookup)(self.raw, pool.as_ptr()) };
        if id >= 0 { Ok(id) } else { Err(u16::try_from(-id).map_or(Errno::IO, Errno)) }
    }

    /// Whether there is a pool of this number, whatever its name is now.
    pub fn has_pool(&self, id: i64) -> bool {
        let mut name = [0; 256];
        // SAFETY: the handle lives, and there is as much room as is said.
        let code = unsafe { (self.lib.pool_name)(self.raw, id, name.as_mut_ptr(), name.len()) };
        // A longer name is one as well.
        told(code).map_or_else(|errno| errno == Errno::RANGE, |_| true)
    }

    /// What a monitor answers to a command, in its form of JSON: at most so many bytes.
    ///
    /// # Errors
    /// EOVERFLOW: it is more.
    pub fn command(&self, command: &str, most: usize) -> Result<Vec<u8>, Errno> {
        let command = text(command)?;
        let mut commands = [command.as_ptr()];
        let (mut at, mut len) = (null_mut(), 0);
        // SAFETY: the handle lives, there is one command, which ends in NUL, no input, and room for where the answer is; of what is said of it
        // in words nothing is wanted.
        let code = unsafe {
            let call = self.lib.command;
            let (commands, at, len) = (commands.as_mut_ptr(), &raw mut at, &raw mut len);
            call(self.raw, commands, 1, null(), 0, at, len, null_mut(), null_mut())
        };
        let mut answer = Ok(Vec::new());
        if !at.is_null() {
            // SAFETY: so many bytes are there, and are the library's to free, once.
            unsafe {
                answer = match len <= most {
                    true => Ok(std::slice::from_raw_parts(at.cast::<u8>(), len).to_vec()),
                    false => Err(Errno::OVERFLOW),
                };
                (self.lib.buffer_free)(at);
            }
        }
        told(code)?;
        answer
    }

    /// The map of its OSDs, as a monitor has it now.
    ///
    /// # Errors
    /// What is wrong and what to do.
    pub fn osd_map(&self) -> Result<OsdMap, String> {
        let bytes = self.command(r#"{"prefix": "osd getmap"}"#, OSD_MAP_MAX).map_err(|errno| {
            let what = match errno {
                Errno::ACCES | Errno::PERM => "the user needs mon 'allow r': see ceph auth get",
                _ => "see ceph -s, and ceph osd getmap",
            };
            format!("the cluster's map of OSDs cannot be had: {errno}: {what}")
        })?;
        OsdMap::decode(&bytes)
    }

    /// The objects of a pool in a namespace (empty: the one without a name).
    ///
    /// # Errors
    /// ENOENT: there is no such pool.
    pub fn io(self: &Arc<Self>, pool: &str, namespace: &str) -> Result<Io, Errno> {
        let (pool, namespace) = (text(pool)?, text(namespace)?);
        let mut raw = null_mut();
        // SAFETY: the handle lives, the name ends in NUL, and there is room for the new handle.
        told(unsafe { (self.lib.io_create)(self.raw, pool.as_ptr(), &raw mut raw) })?;
        Ok(Io::new(self, raw, namespace))
    }
}
