//! The C ABI of the device (`corbel-dpu.h`): one more [`Transport`](virtiofs::hal::Transport), whose requests a program hands in.
//!
//! # Safety
//! Every function trusts its caller as its description in the header says: pointers are null or good, a device came from
//! `corbel_dpu_register` and was not unregistered, the memory of a request stays until it is completed.
#![allow(unsafe_code, clippy::missing_safety_doc)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use base::Errno;
use client::fs::FileSystem;
use client::libfs::{self, LibFs};
use libc::iovec;
use virtiofs::device::{Crew, Device, Options};
use virtiofs::hal::{Chain, Fed, Piece, Queue, Transport, scatter};
use virtiofs::limits::{Limits, Rate};
use virtiofs::tenant::{self, Tenant};
use virtiofs::vring::PIECES_MAX;

/// Descriptors that the client keeps are above those of the program.
const FD_MIN: i32 = 64;
/// Queues beside the first at most.
const QUEUES_MAX: u32 = 64;

/// See the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DpuOptions {
    /// Bytes of the structure.
    pub size: usize,
    /// Where the files are.
    pub source: *const c_char,
    /// Which of them.
    pub directory: *const c_char,
    /// Whose.
    pub tenant: *const c_char,
    /// Request queues.
    pub queues: u32,
    /// Threads of each.
    pub threads: u32,
    /// Operations a second.
    pub iops: u64,
    /// Bytes a second.
    pub bandwidth: u64,
    /// Whether nothing may be changed.
    pub readonly: u32,
}

/// Called when a request is completed.
pub type Done = Option<unsafe extern "C" fn(context: *mut c_void, written: u32)>;

struct Queues {
    all: Vec<Arc<Fed>>,
    tenant: String,
}

impl Transport for Queues {
    fn queues(&self) -> Vec<Arc<dyn Queue>> {
        self.all.iter().map(|queue| queue.clone() as Arc<dyn Queue>).collect()
    }

    fn tenant(&self) -> &str {
        &self.tenant
    }
}

/// A registered device.
pub struct Dpu {
    device: Arc<Device>,
    queues: Queues,
    crew: Option<Crew>,
}

impl std::fmt::Debug for Dpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dpu").field("tenant", &self.queues.tenant).finish_non_exhaustive()
    }
}

/// Where a request is completed.
struct Context(*mut c_void);

// SAFETY: the program gets back what it gave, on whatever thread, as the header says.
unsafe impl Send for Context {}

struct Handed {
    readable: Vec<Piece>,
    writable: Vec<Piece>,
    done: unsafe extern "C" fn(*mut c_void, u32),
    context: Context,
    finished: bool,
    off: bool,
}

impl Handed {
    fn finish(&mut self, written: u32) {
        self.finished = true;
        // SAFETY: the program's own function with its own context, once.
        unsafe { (self.done)(self.context.0, written) };
    }
}

impl Chain for Handed {
    fn readable(&self) -> &[Piece] {
        &self.readable
    }

    fn writable(&self) -> &[Piece] {
        &self.writable
    }

    fn complete(mut self: Box<Self>, written: u32) {
        self.finish(written);
    }

    fn put_off(&mut self) {
        self.off = true;
    }

    fn reply(mut self: Box<Self>, reply: &[u8]) {
        let written = scatter(reply, &self.writable);
        self.finish(u32::try_from(written).unwrap_or(0));
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if !self.finished && !self.off {
            self.finish(0);
        }
    }
}

fn code(error: Errno) -> c_int {
    -c_int::from(error.0)
}

/// A string of the caller's, or its default.
///
/// # Safety
/// It is null, or ends in NUL.
unsafe fn text(text: *const c_char, default: &str) -> Result<&str, Errno> {
    if text.is_null() {
        return Ok(default);
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Errno::INVAL)
}

fn open(source: &str) -> Result<Arc<dyn FileSystem>, Errno> {
    if let Some(opened) = frontend::source::open_back_end(source) {
        return opened.map_err(|_| Errno::NOENT);
    }
    let config = libfs::Config {
        fd_min: FD_MIN,
        patient: true,
        whole_log: true,
        ..libfs::Config::new(source.as_bytes())
    };
    Ok(Arc::new(LibFs::attach(config)?))
}

/// # Safety
/// As the header says.
unsafe fn register(options: *const DpuOptions) -> Result<Box<Dpu>, Errno> {
    // SAFETY: null or good, by the caller's promise; of what is good the size is there.
    let Some(given) = (unsafe { options.cast::<usize>().as_ref() }) else {
        return Err(Errno::INVAL);
    };
    // There has been no shorter one.
    if *given < size_of::<DpuOptions>() {
        return Err(Errno::INVAL);
    }
    // SAFETY: it is as long as it says.
    let options = unsafe { *options };
    if options.source.is_null() || options.queues > QUEUES_MAX || options.threads > QUEUES_MAX {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's strings.
    let (source, directory, tenant) = unsafe {
        (text(options.source, "")?, text(options.directory, "/")?, text(options.tenant, "guest")?)
    };
    let rate = |n: u64| (n > 0).then(|| Rate { rate: n as f64, burst: (n as f64 / 10.0).max(1.0) });
    let rules = tenant::Options { readonly: options.readonly != 0, ..tenant::Options::default() };
    let fs = Tenant::new(open(source)?, directory.as_bytes(), rules)?;
    let threads = if options.threads == 0 { 2 } else { options.threads as usize };
    let device = Device::new(
        Arc::new(fs),
        Options {
            threads,
            poll: Duration::ZERO,
            limits: Arc::new(Limits::new(rate(options.iops), rate(options.bandwidth))),
            ..Options::default()
        },
    );
    let all = (0..=options.queues.max(1)).map(|_| Arc::default()).collect();
    let queues = Queues { all, tenant: tenant.into() };
    let crew = device.start(&queues).map_err(|_| Errno::AGAIN)?;
    Ok(Box::new(Dpu { device, queues, crew: Some(crew) }))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_dpu_register(
    options: *const DpuOptions,
    device: *mut *mut Dpu,
) -> c_int {
    if device.is_null() {
        return code(Errno::INVAL);
    }
    // SAFETY: the caller's options.
    match unsafe { register(options) } {
        Ok(made) => {
            // SAFETY: not null, and the caller's to be written.
            unsafe { *device = Box::into_raw(made) };
            0
        }
        Err(error) => code(error),
    }
}

/// The pieces of a list.
///
/// # Safety
/// There are `count` of them at `list`, and their memory stays.
unsafe fn pieces(list: *const iovec, count: usize) -> Result<Vec<Piece>, Errno> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if list.is_null() || count > PIECES_MAX {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    let piece = |v: &iovec| match (v.iov_base.is_null(), v.iov_len) {
        (_, 0) => Ok(None),
        (true, _) => Err(Errno::INVAL),
        // SAFETY: the caller's promise.
        (false, len) => Ok(Some(unsafe { Piece::new(v.iov_base.cast(), len) })),
    };
    list.iter().filter_map(|v| piece(v).transpose()).collect()
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_dpu_submit(
    device: *mut Dpu,
    queue: u32,
    input: *const iovec,
    in_count: usize,
    output: *const iovec,
    out_count: usize,
    done: Done,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a device that is registered, by the caller's promise; null is caught.
    let (Some(dpu), Some(done)) = (unsafe { device.as_ref() }, done) else {
        return code(Errno::INVAL);
    };
    let Some(queue) = dpu.queues.all.get(queue as usize) else { return code(Errno::INVAL) };
    // SAFETY: the caller's lists.
    let lists =
        unsafe { pieces(input, in_count).and_then(|i| Ok((i, pieces(output, out_count)?))) };
    let (readable, writable) = match lists {
        Ok(lists) => lists,
        Err(error) => return code(error),
    };
    let (finished, off, context) = (false, false, Context(context));
    queue.push(Box::new(Handed { readable, writable, done, context, finished, off }));
    0
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_dpu_reset(device: *mut Dpu) {
    // SAFETY: as above.
    if let Some(dpu) = unsafe { device.as_ref() } {
        dpu.device.reset();
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_dpu_unregister(device: *mut Dpu) {
    if device.is_null() {
        return;
    }
    // SAFETY: it came from `corbel_dpu_register`, and is given back once.
    let mut dpu = unsafe { Box::from_raw(device) };
    drop(dpu.crew.take());
}
