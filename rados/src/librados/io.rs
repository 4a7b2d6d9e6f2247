//! Objects: what is read and changed, listed and locked.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::Errno;

use super::library::{Lib, Raw};
use super::{Cluster, text, told};

/// `LIBRADOS_OPERATION_FULL_TRY`: a full cluster says so, rather than let everybody wait.
const FULL_TRY: c_int = 64;
/// `LIBRADOS_LOCK_FLAG_MUST_RENEW`: only who has the lock gets it.
const MUST_RENEW: u8 = 2;
/// The library gives up by itself; should it not, this much later we do.
const SLACK: Duration = Duration::from_secs(2);

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

// SAFETY: only the library calls it, once for each request, with the completion and the box that this was given.
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
    pub(super) cluster: Arc<Cluster>,
    pub(super) raw: Raw,
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
                Ok(_) => {
                    // SAFETY: a name ends in NUL and lives until the next call.
                    let name = unsafe { CStr::from_ptr(name) };
                    if !each(name.to_bytes()) {
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
