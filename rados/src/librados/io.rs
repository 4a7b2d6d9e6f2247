//! Objects: what is read and changed, and listed.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::Errno;

use super::library::{Lib, Raw};
use super::{Cluster, called_back, text, told};
use crate::osdmap::{Kind, OCTOPUS};
use crate::place::Reads;

/// `LIBRADOS_OPERATION_FULL_TRY`: a full cluster says so, rather than let everybody wait.
const FULL_TRY: c_int = 64;
/// `LIBRADOS_OPERATION_BALANCE_READS`.
const BALANCE_READS: c_int = 1;
/// `LIBRADOS_OPERATION_LOCALIZE_READS`.
const LOCALIZE_READS: c_int = 2;
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
    /// The library reads from it until then.
    io: Arc<Io>,
    done: Done<Vec<u8>>,
    /// Where what is read goes: room for it, and nothing in it yet.
    buffer: Vec<u8>,
    /// Of a read that is a step of an operation, where the library says how much that was, and how it ended.
    step: Option<(usize, c_int)>,
}

// SAFETY: only the library calls it, once for each request, with the completion and the box that this was given.
/// The callback of every request.
unsafe extern "C" fn finished(completion: Raw, pending: *mut c_void) {
    called_back();
    // SAFETY: `pending` is the box that the request was given, and the library calls once.
    let pending = unsafe { Box::from_raw(pending.cast::<Pending>()) };
    let Pending { io, done, mut buffer, step } = *pending;
    let lib = io.cluster.lib;
    // SAFETY: the completion is done, and not released yet.
    let code = unsafe {
        let code = (lib.returned)(completion);
        (lib.release)(completion);
        code
    };
    drop(io);
    let result = told(code).and_then(|read| match step {
        Some((read, code)) => told(code).map(|_| read),
        None => Ok(usize::try_from(read).unwrap_or(0)),
    });
    done(result.map(|read| {
        let read = read.min(buffer.capacity());
        // SAFETY: a read has filled so many bytes of the room that it was given; anything else was given none.
        unsafe { buffer.set_len(read) };
        buffer
    }));
}

/// The objects of a pool in a namespace.
pub struct Io {
    pub(super) cluster: Arc<Cluster>,
    pub(super) raw: Raw,
    namespace: CString,
    reads: Reads,
}

// SAFETY: as of `Cluster`; what would change for other threads (the namespace, the snapshots) is set before others have it.
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
        // SAFETY: made by the library and ended once; requests under way kept it alive.
        unsafe { (self.cluster.lib.io_destroy)(self.raw) };
    }
}

impl Io {
    /// Takes a handle that nobody else has.
    pub(super) fn new(cluster: &Arc<Cluster>, raw: Raw, namespace: CString) -> Self {
        // SAFETY: the new handle is this thread's alone so far, and the name ends in NUL.
        unsafe { (cluster.lib.set_namespace)(raw, namespace.as_ptr()) };
        Self { cluster: Arc::clone(cluster), raw, namespace, reads: Reads::Primary }
    }

    /// The cluster that they are in.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// The number of the pool.
    pub fn pool_id(&self) -> i64 {
        // SAFETY: the handle lives.
        unsafe { (self.cluster.lib.io_id)(self.raw) }
    }

    /// Begins a request: `operate` has the completion, and where its bytes go.
    fn begin(
        self: &Arc<Self>,
        len: usize,
        done: Done<Vec<u8>>,
        operate: impl FnOnce(&Lib, Raw, *mut Pending) -> c_int,
    ) {
        let lib = self.cluster.lib;
        let buffer = Vec::with_capacity(len);
        let pending = Pending { io: Arc::clone(self), done, buffer, step: None };
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
    pub fn change(self: &Arc<Self>, name: &str, steps: &[Step<'_>], done: Done<()>) {
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
    pub fn read(self: &Arc<Self>, name: &str, offset: u64, len: usize, done: Done<Vec<u8>>) {
        let Ok(name) = text(name) else { return done(Err(Errno::INVAL)) };
        if len == 0 {
            // To the library that is all of it.
            return done(Ok(Vec::new()));
        }
        let flags = match self.reads {
            Reads::Primary => return self.read_first(&name, offset, len, done),
            Reads::Balance => BALANCE_READS,
            Reads::Localize => LOCALIZE_READS,
        };
        self.begin(len, done, |lib, completion, pending| {
            // SAFETY: as below; the box has room for what the library says of the step as well, and the operation is released when the
            // request has taken it.
            unsafe {
                let pending = pending.as_mut_unchecked();
                let (read, code) = pending.step.insert((0, 0));
                let buffer = pending.buffer.as_mut_ptr();
                let op = (lib.read_op)();
                (lib.op_read)(op, offset, len, buffer.cast(), read, code);
                let code = (lib.operate)(op, self.raw, completion, name.as_ptr(), flags);
                (lib.read_op_release)(op);
                code
            }
        });
    }

    /// Reads from whoever also takes what is written.
    fn read_first(self: &Arc<Self>, name: &CStr, offset: u64, len: usize, done: Done<Vec<u8>>) {
        self.begin(len, done, |lib, completion, pending| {
            // SAFETY: the box lives until the callback, its buffer is the library's until then and has room for so many bytes, and
            // the name ends in NUL and is copied. That an OSD answers with no more than it was asked for the library trusts it, as all
            // do that it authenticates.
            unsafe {
                let buffer = (&raw mut (*pending).buffer).as_mut_unchecked().as_mut_ptr();
                (lib.read)(self.raw, name.as_ptr(), completion, buffer.cast(), len, offset)
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

    /// The same objects, of which reads ask other OSDs than the first one of each.
    ///
    /// # Errors
    /// That is not safe in this cluster, or does nothing in this pool; with what to do.
    pub fn reading(mut self, reads: Reads) -> Result<Self, String> {
        if reads == Reads::Primary {
            return Ok(self);
        }
        let map = self.cluster.osd_map()?;
        if map.release < OCTOPUS {
            return Err(format!(
                "replicas may be read from since Ceph 15 (Octopus), and this cluster has OSDs of release {} or does not say that it has none: ceph osd require-osd-release octopus, or no reads=",
                map.release
            ));
        }
        let pool = map.pools.get(&self.pool_id());
        if pool.is_some_and(|pool| pool.kind == Kind::Erasure) {
            return Err(
                "the pool is erasure-coded, and so has no replicas to read from: no reads=".into(),
            );
        }
        self.reads = reads;
        Ok(self)
    }

    /// The same objects, of which what is overwritten is kept for these snapshots, the newest first.
    ///
    /// A handle of its own: the library does not change one while others use it.
    pub fn with_snapshots(&self, sequence: u64, snapshots: &[u64]) -> Result<Self, Errno> {
        let count = c_int::try_from(snapshots.len()).map_err(|_| Errno::INVAL)?;
        let mut snapshots = snapshots.to_vec();
        let (lib, mut raw) = (self.cluster.lib, null_mut());
        // SAFETY: the handle of the cluster lives, and there is room for the new one.
        told(unsafe { (lib.io_create_of)(self.cluster.raw, self.pool_id(), &raw mut raw) })?;
        let mut io = Self::new(&self.cluster, raw, self.namespace.clone());
        io.reads = self.reads;
        // SAFETY: the new handle is this thread's alone so far, and there are so many numbers.
        told(unsafe { (lib.set_snaps)(raw, sequence, snapshots.as_mut_ptr(), count) })?;
        Ok(io)
    }
}
