//! librados (`librados.so.2`), loaded when it is needed: a program that uses this crate builds and runs without it.
//!
//! What is read and written goes through the asynchronous calls; what is asked once (locks, lists, methods of classes) through those
//! that wait, which the time-outs given to [`Cluster::connect`] bound. All of it may be called by any thread.
#![allow(unsafe_code)] // a C library

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use base::Errno;

/// The library, by the name that stands for its interface.
const NAME: &CStr = c"librados.so.2";
/// What is said where it is missing.
const REMEDY: &str = "install it: apt install librados2";
/// `LIBRADOS_OPERATION_FULL_TRY`: a full cluster says so, rather than let everybody wait.
const FULL_TRY: c_int = 64;
/// `LIBRADOS_LOCK_FLAG_MUST_RENEW`: only who has the lock gets it.
const MUST_RENEW: u8 = 2;
/// The library gives up by itself; should it not, this much later we do.
const SLACK: Duration = Duration::from_secs(2);

type Raw = *mut c_void;
type Finished = unsafe extern "C" fn(Raw, *mut c_void);
type Notified = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut c_void, usize);
type Broken = unsafe extern "C" fn(*mut c_void, u64, c_int);

macro_rules! library {
    ($($field:ident: $symbol:literal, fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of the library that are used.
        struct Lib {
            $($field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Lib {
            fn find(library: NonNull<c_void>) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let at = symbol(library, $symbol)?;
                        // SAFETY: the symbol is the function of that name, whose C declaration in librados.h is this one since version 14.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(at) }
                    },)*
                })
            }
        }
    };
}

library! {
    create: c"rados_create", fn(*mut Raw, *const c_char) -> c_int;
    read_conf: c"rados_conf_read_file", fn(Raw, *const c_char) -> c_int;
    parse_env: c"rados_conf_parse_env", fn(Raw, *const c_char) -> c_int;
    set_conf: c"rados_conf_set", fn(Raw, *const c_char, *const c_char) -> c_int;
    connect: c"rados_connect", fn(Raw) -> c_int;
    shutdown: c"rados_shutdown", fn(Raw);
    instance: c"rados_get_instance_id", fn(Raw) -> u64;
    pool_lookup: c"rados_pool_lookup", fn(Raw, *const c_char) -> i64;
    io_create: c"rados_ioctx_create", fn(Raw, *const c_char, *mut Raw) -> c_int;
    io_destroy: c"rados_ioctx_destroy", fn(Raw);
    io_id: c"rados_ioctx_get_id", fn(Raw) -> i64;
    set_namespace: c"rados_ioctx_set_namespace", fn(Raw, *const c_char);
    set_snaps: c"rados_ioctx_selfmanaged_snap_set_write_ctx", fn(Raw, u64, *mut u64, c_int) -> c_int;
    list_open: c"rados_nobjects_list_open", fn(Raw, *mut Raw) -> c_int;
    list_next: c"rados_nobjects_list_next", fn(Raw, *mut *const c_char, *mut *const c_char, *mut *const c_char) -> c_int;
    list_close: c"rados_nobjects_list_close", fn(Raw);
    completion: c"rados_aio_create_completion", fn(*mut c_void, Option<Finished>, Option<Finished>, *mut Raw) -> c_int;
    returned: c"rados_aio_get_return_value", fn(Raw) -> c_int;
    release: c"rados_aio_release", fn(Raw);
    write_op: c"rados_create_write_op", fn() -> Raw;
    write_op_release: c"rados_release_write_op", fn(Raw);
    op_write: c"rados_write_op_write", fn(Raw, *const c_char, usize, u64);
    op_write_full: c"rados_write_op_write_full", fn(Raw, *const c_char, usize);
    op_zero: c"rados_write_op_zero", fn(Raw, u64, u64);
    op_truncate: c"rados_write_op_truncate", fn(Raw, u64);
    op_remove: c"rados_write_op_remove", fn(Raw);
    op_exec: c"rados_write_op_exec", fn(Raw, *const c_char, *const c_char, *const c_char, usize, *mut c_int);
    write: c"rados_aio_write_op_operate", fn(Raw, Raw, Raw, *const c_char, *mut libc::time_t, c_int) -> c_int;
    read_op: c"rados_create_read_op", fn() -> Raw;
    read_op_release: c"rados_release_read_op", fn(Raw);
    op_read: c"rados_read_op_read", fn(Raw, u64, usize, *mut c_char, *mut usize, *mut c_int);
    read: c"rados_aio_read_op_operate", fn(Raw, Raw, Raw, *const c_char, c_int) -> c_int;
    exec: c"rados_exec", fn(Raw, *const c_char, *const c_char, *const c_char, *const c_char, usize, *mut c_char, usize) -> c_int;
    lock: c"rados_lock_exclusive", fn(Raw, *const c_char, *const c_char, *const c_char, *const c_char, *mut libc::timeval, u8) -> c_int;
    unlock: c"rados_unlock", fn(Raw, *const c_char, *const c_char, *const c_char) -> c_int;
    lockers: c"rados_list_lockers", fn(Raw, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
    break_lock: c"rados_break_lock", fn(Raw, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;
    watch: c"rados_watch3", fn(Raw, *const c_char, *mut u64, Option<Notified>, Option<Broken>, u32, *mut c_void) -> c_int;
    unwatch: c"rados_unwatch2", fn(Raw, u64) -> c_int;
    watch_flush: c"rados_watch_flush", fn(Raw) -> c_int;
    notify_ack: c"rados_notify_ack", fn(Raw, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
}

fn symbol(library: NonNull<c_void>, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the library is loaded and never unloaded, and the name ends in NUL.
    let at = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    if at.is_null() {
        let (library, name) = (NAME.to_string_lossy(), name.to_string_lossy());
        return Err(format!("{library} has no {name}: it is older than Ceph 14: {REMEDY}"));
    }
    Ok(at)
}

static LIB: OnceLock<Result<Lib, String>> = OnceLock::new();

/// Loads the library, once.
///
/// # Errors
/// It is not there, or is another one; with what to do.
pub fn load() -> Result<(), String> {
    lib().map(drop)
}

fn lib() -> Result<&'static Lib, String> {
    LIB.get_or_init(|| Lib::load(NAME)).as_ref().map_err(Clone::clone)
}

impl Lib {
    fn load(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name ends in NUL. What the library does when it is loaded is its own.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let library = NonNull::new(library).ok_or_else(|| {
            // SAFETY: the text, if there is one, ends in NUL and is this thread's.
            let said = unsafe { libc::dlerror() };
            let said = if said.is_null() {
                name.to_string_lossy()
            } else {
                // SAFETY: as above.
                unsafe { CStr::from_ptr(said) }.to_string_lossy()
            };
            format!("librados cannot be loaded ({said}): {REMEDY}")
        })?;
        Self::find(library)
    }
}

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

/// A connection to a cluster.
pub struct Cluster {
    lib: &'static Lib,
    raw: Raw,
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
        // SAFETY: made by the library and ended once; what was made of it (`Io`) keeps it alive.
        unsafe { (self.lib.shutdown)(self.raw) };
    }
}

impl Cluster {
    /// Connects as a user (`admin`, if none is named) by a file of configuration (the usual ones), and gives up after `patience`
    /// then and on everything that is asked.
    ///
    /// # Errors
    /// What was wrong and what to do, in words.
    pub fn connect(
        user: Option<&str>,
        conf: Option<&str>,
        patience: Duration,
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
        let cluster = Self { lib, raw };
        // SAFETY: the handle lives; a path or none.
        told(unsafe { (lib.read_conf)(raw, or_null(&file)) }).map_err(|errno| {
            let at = conf.unwrap_or("CEPH_CONF, /etc/ceph/ceph.conf, ~/.ceph/config, ceph.conf");
            format!("no configuration of Ceph can be read ({at}: {errno}): set CEPH_CONF, or end the name of the store with ?conf=FILE")
        })?;
        // SAFETY: the handle lives; none: CEPH_ARGS.
        told(unsafe { (lib.parse_env)(raw, null()) })
            .map_err(|errno| format!("CEPH_ARGS cannot be read: {errno}"))?;
        let seconds = c(&patience.as_secs().max(1).to_string())?;
        for option in [c"client_mount_timeout", c"rados_mon_op_timeout", c"rados_osd_op_timeout"] {
            // SAFETY: the handle lives, and both texts end in NUL.
            told(unsafe { (lib.set_conf)(raw, option.as_ptr(), seconds.as_ptr()) }).map_err(
                |errno| format!("librados takes no {}: {errno}", option.to_string_lossy()),
            )?;
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

    /// What the cluster calls this client.
    pub fn instance(&self) -> u64 {
        // SAFETY: the handle lives and is connected.
        unsafe { (self.lib.instance)(self.raw) }
    }

    /// The number of a pool of this name.
    pub fn pool_id(&self, pool: &str) -> Result<i64, Errno> {
        let pool = text(pool)?;
        // SAFETY: the handle lives, and the name ends in NUL.
        let id = unsafe { (self.lib.pool_lookup)(self.raw, pool.as_ptr()) };
        if id >= 0 { Ok(id) } else { Err(u16::try_from(-id).map_or(Errno::IO, Errno)) }
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
        // SAFETY: the new handle is this thread's alone so far.
        unsafe { (self.lib.set_namespace)(raw, namespace.as_ptr()) };
        Ok(Io { cluster: Arc::clone(self), raw })
    }
}

/// Called once, by a thread of the library, which it must not hold up.
pub type Done<T> = Box<dyn FnOnce(Result<T, Errno>) + Send>;

/// What is done to an object. Several are done in one step, or none of them.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// These are all its bytes.
    WriteFull(&'a [u8]),
    /// Bytes from there on.
    Write(u64, &'a [u8]),
    /// Zeroes from there on, so many.
    Zero(u64, u64),
    /// It ends there.
    Truncate(u64),
    /// It is gone.
    Remove,
    /// A method of a class, with its input.
    Exec(&'a CStr, &'a CStr, &'a [u8]),
}

/// What a request's thread of the library needs: lives from the request to its callback.
struct Pending {
    lib: &'static Lib,
    done: Done<Vec<u8>>,
    buffer: Vec<u8>,
    read: usize,
    code: c_int,
}

/// The callback of every request.
unsafe extern "C" fn finished(completion: Raw, pending: *mut c_void) {
    // SAFETY: `pending` is the box that the request was given, and the library calls once.
    let mut pending = unsafe { Box::from_raw(pending.cast::<Pending>()) };
    // SAFETY: the completion is done, and not released yet.
    let code = unsafe {
        let code = (pending.lib.returned)(completion);
        (pending.lib.release)(completion);
        code
    };
    let result = told(code).and_then(|_| told(pending.code)).map(|_| {
        pending.buffer.truncate(pending.read);
        std::mem::take(&mut pending.buffer)
    });
    (pending.done)(result);
}

/// The objects of a pool in a namespace.
pub struct Io {
    cluster: Arc<Cluster>,
    raw: Raw,
}

// SAFETY: as of `Cluster`; what would change for other threads (the namespace) is set before others have it.
unsafe impl Send for Io {}
// SAFETY: as above.
unsafe impl Sync for Io {}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Io").field("pool", &self.pool_id()).finish_non_exhaustive()
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        // SAFETY: made by the library and ended once; requests under way keep what they need of it.
        unsafe { (self.cluster.lib.io_destroy)(self.raw) };
    }
}

impl Io {
    /// The cluster that they are in.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// The number of the pool.
    pub fn pool_id(&self) -> i64 {
        // SAFETY: the handle lives.
        unsafe { (self.cluster.lib.io_id)(self.raw) }
    }

    /// Begins a request: `operate` has the completion, and where its bytes, their count and a code go.
    fn begin(
        &self,
        len: usize,
        done: Done<Vec<u8>>,
        operate: impl FnOnce(&Lib, Raw, *mut Pending) -> c_int,
    ) {
        let lib = self.cluster.lib;
        let pending = Pending { lib, done, buffer: vec![0; len], read: 0, code: 0 };
        let pending = Box::into_raw(Box::new(pending));
        let mut completion = null_mut();
        // SAFETY: the callback is given the box that it takes; there is room for the completion.
        let made =
            unsafe { (lib.completion)(pending.cast(), Some(finished), None, &raw mut completion) };
        let code = if made < 0 { made } else { operate(lib, completion, pending) };
        if code >= 0 {
            return;
        }
        if made >= 0 {
            // SAFETY: it was not taken, so nobody else has it.
            unsafe { (lib.release)(completion) };
        }
        // SAFETY: nor will the callback be called.
        let pending = unsafe { Box::from_raw(pending) };
        (pending.done)(told(code).map(|_| Vec::new()));
    }

    /// Changes an object, durably, in one step.
    pub fn change(&self, name: &str, steps: &[Step<'_>], done: Done<()>) {
        let Ok(name) = text(name) else { return done(Err(Errno::INVAL)) };
        let done = Box::new(move |result: Result<Vec<u8>, Errno>| done(result.map(drop)));
        self.begin(0, done, |lib, completion, _| {
            // SAFETY: steps copy what they are given, texts end in NUL, lengths are those of the slices, and the operation is
            // released when the request has taken it.
            unsafe {
                let op = (lib.write_op)();
                for step in steps {
                    match *step {
                        Step::WriteFull(bytes) => {
                            (lib.op_write_full)(op, bytes.as_ptr().cast(), bytes.len());
                        }
                        Step::Write(at, bytes) => {
                            (lib.op_write)(op, bytes.as_ptr().cast(), bytes.len(), at);
                        }
                        Step::Zero(at, len) => (lib.op_zero)(op, at, len),
                        Step::Truncate(at) => (lib.op_truncate)(op, at),
                        Step::Remove => (lib.op_remove)(op),
                        Step::Exec(class, method, input) => {
                            let (class, method) = (class.as_ptr(), method.as_ptr());
                            let (at, len) = (input.as_ptr().cast(), input.len());
                            (lib.op_exec)(op, class, method, at, len, null_mut());
                        }
                    }
                }
                let code =
                    (lib.write)(op, self.raw, completion, name.as_ptr(), null_mut(), FULL_TRY);
                (lib.write_op_release)(op);
                code
            }
        });
    }

    /// Reads from an object; fewer bytes only at its end.
    pub fn read(&self, name: &str, offset: u64, len: usize, done: Done<Vec<u8>>) {
        let Ok(name) = text(name) else { return done(Err(Errno::INVAL)) };
        self.begin(len, done, |lib, completion, pending| {
            // SAFETY: the box lives until the callback, and its fields are the library's until then; the operation is released when
            // the request has taken it.
            unsafe {
                let op = (lib.read_op)();
                let buffer = (&raw mut (*pending).buffer).as_mut_unchecked().as_mut_ptr();
                let (read, code) = (&raw mut (*pending).read, &raw mut (*pending).code);
                (lib.op_read)(op, offset, len, buffer.cast(), read, code);
                let code = (lib.read)(op, self.raw, completion, name.as_ptr(), 0);
                (lib.read_op_release)(op);
                code
            }
        });
    }

    /// Begins something and waits for it, no longer than `patience` and a little.
    pub fn wait<T: Send + 'static>(
        patience: Duration,
        begin: impl FnOnce(Done<T>),
    ) -> Result<T, Errno> {
        let (tell, told) = mpsc::sync_channel(1);
        begin(Box::new(move |result| drop(tell.send(result))));
        told.recv_timeout(patience + SLACK).unwrap_or(Err(Errno::TIMEDOUT))
    }

    /// Calls `each` with the name of every object, until it says that it is enough.
    pub fn names(&self, mut each: impl FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        let lib = self.cluster.lib;
        let mut list = null_mut();
        // SAFETY: the handle lives; there is room for the list.
        told(unsafe { (lib.list_open)(self.raw, &raw mut list) })?;
        let result = loop {
            let mut name = null();
            // SAFETY: the list is open; of key and namespace nothing is wanted.
            match told(unsafe { (lib.list_next)(list, &raw mut name, null_mut(), null_mut()) }) {
                Err(Errno::NOENT) => break Ok(()),
                Err(errno) => break Err(errno),
                // SAFETY: a name ends in NUL and lives until the next call.
                Ok(_) => {
                    if !each(unsafe { CStr::from_ptr(name) }.to_bytes()) {
                        break Ok(());
                    }
                }
            }
        };
        // SAFETY: it is open, and closed once.
        unsafe { (lib.list_close)(list) };
        result
    }

    /// Takes a lock of an object for so long, or renews it: then only who has it gets it.
    pub fn lock(
        &self,
        name: &str,
        lock: &Lock<'_>,
        duration: Duration,
        renew: bool,
    ) -> Result<(), Errno> {
        let (name, of) = (text(name)?, text(lock.name)?);
        let (cookie, description) = (text(lock.cookie)?, text(lock.description)?);
        let mut duration = libc::timeval {
            tv_sec: libc::time_t::try_from(duration.as_secs()).map_err(|_| Errno::INVAL)?,
            tv_usec: duration.subsec_micros().into(),
        };
        // SAFETY: the handle lives, texts end in NUL, and the time is read only.
        told(unsafe {
            (self.cluster.lib.lock)(
                self.raw,
                name.as_ptr(),
                of.as_ptr(),
                cookie.as_ptr(),
                description.as_ptr(),
                &raw mut duration,
                if renew { MUST_RENEW } else { 0 },
            )
        })
        .map(drop)
    }

    /// Lets a lock go.
    pub fn unlock(&self, name: &str, lock: &str, cookie: &str) -> Result<(), Errno> {
        let (name, lock, cookie) = (text(name)?, text(lock)?, text(cookie)?);
        let unlock = self.cluster.lib.unlock;
        // SAFETY: the handle lives, and texts end in NUL.
        told(unsafe { unlock(self.raw, name.as_ptr(), lock.as_ptr(), cookie.as_ptr()) }).map(drop)
    }

    /// Takes a lock from who has it.
    pub fn break_lock(&self, name: &str, lock: &str, of: &Locker) -> Result<(), Errno> {
        let (name, lock) = (text(name)?, text(lock)?);
        let (client, cookie) = (text(&of.client)?, text(&of.cookie)?);
        let (name, lock) = (name.as_ptr(), lock.as_ptr());
        let call = self.cluster.lib.break_lock;
        // SAFETY: the handle lives, and texts end in NUL.
        told(unsafe { call(self.raw, name, lock, client.as_ptr(), cookie.as_ptr()) }).map(drop)
    }

    /// Who has a lock of an object.
    pub fn lockers(&self, name: &str, lock: &str) -> Result<Vec<Locker>, Errno> {
        const ROOM: usize = 16 << 10;
        let (name, lock) = (text(name)?, text(lock)?);
        let mut exclusive = 0;
        let mut texts = [const { Vec::new() }; 4].map(|_: Vec<u8>| vec![0u8; ROOM]);
        let mut lens = [ROOM; 4];
        let [tag, clients, cookies, addresses] = &mut texts;
        let [tag_len, clients_len, cookies_len, addresses_len] = &mut lens;
        // SAFETY: the handle lives, texts end in NUL, and each buffer is as long as is said.
        let count = unsafe {
            (self.cluster.lib.lockers)(
                self.raw,
                name.as_ptr(),
                lock.as_ptr(),
                &raw mut exclusive,
                tag.as_mut_ptr().cast(),
                tag_len,
                clients.as_mut_ptr().cast(),
                clients_len,
                cookies.as_mut_ptr().cast(),
                cookies_len,
                addresses.as_mut_ptr().cast(),
                addresses_len,
            )
        };
        told(c_int::try_from(count).map_err(|_| Errno::IO)?)?;
        let split = |bytes: &[u8]| -> Vec<String> {
            let parts = bytes.split(|byte| *byte == 0);
            parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect()
        };
        let (clients, cookies, addresses) = (split(clients), split(cookies), split(addresses));
        let lockers = clients.into_iter().zip(cookies).zip(addresses);
        let lockers = lockers.map(|((client, cookie), address)| Locker { client, cookie, address });
        Ok(lockers.take(usize::try_from(count).unwrap_or(0)).collect())
    }

    /// Calls a method of a class on an object, with at most `most` bytes of output.
    pub fn exec(
        &self,
        name: &str,
        class: &CStr,
        method: &CStr,
        input: &[u8],
        most: usize,
    ) -> Result<Vec<u8>, Errno> {
        let name = text(name)?;
        let mut output = vec![0u8; most];
        // SAFETY: the handle lives, texts end in NUL, and the lengths are those of the buffers.
        let len = told(unsafe {
            (self.cluster.lib.exec)(
                self.raw,
                name.as_ptr(),
                class.as_ptr(),
                method.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        })?;
        output.truncate(usize::try_from(len).unwrap_or(0));
        Ok(output)
    }

    /// Says which snapshots there are to keep what is overwritten for, the newest first.
    ///
    /// Requests that are begun at the same time may have the ones before.
    pub fn set_snapshots(&self, sequence: u64, snapshots: &[u64]) -> Result<(), Errno> {
        let count = c_int::try_from(snapshots.len()).map_err(|_| Errno::INVAL)?;
        let mut snapshots = snapshots.to_vec();
        let set = self.cluster.lib.set_snaps;
        // SAFETY: the handle lives, and there are so many numbers.
        told(unsafe { set(self.raw, sequence, snapshots.as_mut_ptr(), count) }).map(drop)
    }

    /// Watches an object: `notice` is called by a thread of the library, which it must not hold up.
    pub fn watch(self: &Arc<Self>, name: &str, notice: Notice) -> Result<Watch, Errno> {
        let name = text(name)?;
        let notice = Box::into_raw(Box::new(notice));
        let mut cookie = 0;
        // SAFETY: the handle lives, the name ends in NUL, and the callbacks are given the box that they look into, which lives until
        // the watch has ended.
        let watched = told(unsafe {
            (self.cluster.lib.watch)(
                self.raw,
                name.as_ptr(),
                &raw mut cookie,
                Some(notified),
                Some(broken),
                0,
                notice.cast(),
            )
        });
        if let Err(errno) = watched {
            // What failed may still call: a box is lost rather than used after its end.
            return Err(errno);
        }
        Ok(Watch { io: Arc::clone(self), name, cookie, notice })
    }
}

/// A lock of an object.
#[derive(Clone, Copy, Debug)]
pub struct Lock<'a> {
    /// Its name: an object may have several.
    pub name: &'a str,
    /// What tells the holder from others of the same client.
    pub cookie: &'a str,
    /// Who that is, for people.
    pub description: &'a str,
}

/// Who has a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Locker {
    /// `client.` and its number.
    pub client: String,
    /// What the client calls it.
    pub cookie: String,
    /// Where the client is.
    pub address: String,
}

/// What a watch is told.
#[derive(Debug)]
pub enum Told {
    /// Somebody notifies; the number is to be acknowledged.
    Notified(u64, Vec<u8>),
    /// The watch is broken: what was said since is not known.
    Broken(Errno),
}

/// Who is told.
pub type Notice = Box<dyn Fn(Told) + Send + Sync>;

unsafe extern "C" fn notified(
    notice: *mut c_void,
    id: u64,
    _: u64,
    _: u64,
    data: *mut c_void,
    len: usize,
) {
    // SAFETY: the box lives until the watch has ended, and is only read.
    let notice = unsafe { &*notice.cast::<Notice>() };
    let bytes = if data.is_null() {
        Vec::new()
    } else {
        // SAFETY: so many bytes are the library's for the length of the call.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
    };
    notice(Told::Notified(id, bytes));
}

unsafe extern "C" fn broken(notice: *mut c_void, _: u64, code: c_int) {
    // SAFETY: as above.
    let notice = unsafe { &*notice.cast::<Notice>() };
    notice(Told::Broken(told(code).err().unwrap_or(Errno::IO)));
}

/// A watch, until it is dropped.
pub struct Watch {
    io: Arc<Io>,
    name: CString,
    cookie: u64,
    notice: *mut Notice,
}

// SAFETY: what is behind the pointer is `Send` and `Sync`.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Sync for Watch {}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Watch {
    /// What the cluster calls it.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Answers a notification.
    pub fn acknowledge(&self, id: u64, answer: &[u8]) -> Result<(), Errno> {
        let len = c_int::try_from(answer.len()).map_err(|_| Errno::INVAL)?;
        let ack = self.io.cluster.lib.notify_ack;
        let (name, at) = (self.name.as_ptr(), answer.as_ptr().cast());
        // SAFETY: the handle lives, the name ends in NUL, and there are so many bytes.
        told(unsafe { ack(self.io.raw, name, id, self.cookie, at, len) }).map(drop)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let lib = self.io.cluster.lib;
        // SAFETY: the watch is ended once; after the flush no callback runs any more, so the box is nobody else's.
        unsafe {
            (lib.unwatch)(self.io.raw, self.cookie);
            if (lib.watch_flush)(self.io.cluster.raw) >= 0 {
                drop(Box::from_raw(self.notice));
            }
        }
    }
}
