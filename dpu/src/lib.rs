//! The C ABI of the device (`corbel-dpu.h`): one more [`Transport`](virtiofs::hal::Transport), whose requests a program hands in.
//!
//! # Safety
//! Every function trusts its caller as its description in the header says: pointers are null or good, a device came from
//! `corbel_dpu_register` and was not unregistered, the memory of a request stays until it is completed.
#![allow(unsafe_code, clippy::missing_safety_doc)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base::Errno;
use client::fs::FileSystem;
use client::libfs::{self, LibFs};
use frontend::fuse::Guest;
use libc::iovec;
use virtiofs::device::{Crew, Device, Options};
use virtiofs::hal::{Chain, Fed, Piece, Queue, Transport, scatter};
use virtiofs::ids::{IdMap, Rule};
use virtiofs::ledger::Ledger;
use virtiofs::limits::{Limits, Rate};
use virtiofs::share::Share;
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
    /// Operations at once.
    pub iops_burst: u64,
    /// Bytes at once.
    pub bandwidth_burst: u64,
    /// Users.
    pub translate_uid: *const c_char,
    /// Groups.
    pub translate_gid: *const c_char,
    /// Inodes that the guest may know.
    pub nodes_max: u64,
    /// Files that it may have open.
    pub handles_max: u64,
    /// Share of the processors.
    pub weight: u32,
    /// Whether there are extended attributes.
    pub xattr: u32,
    /// Whether there are access lists.
    pub posix_acl: u32,
    /// 0.
    pub reserved: u32,
    /// Where it is kept what the guest has.
    pub state: *const c_char,
}

/// How long the end of a device waits for requests that are being served.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of the first form of the options.
const FIRST_FORM: usize = std::mem::offset_of!(DpuOptions, iops_burst);

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
    again: bool,
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

    fn is_again(&self) -> bool {
        self.again
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

/// The file system of a source; of a node as the heir of who had the same secret (0: none).
fn open(source: &str, heir: u128) -> Result<Arc<dyn FileSystem>, Errno> {
    if let Some(opened) = frontend::source::open_back_end(source) {
        return opened.map_err(|why| {
            log::error!("{why}");
            Errno::NOENT
        });
    }
    let config = libfs::Config {
        fd_min: FD_MIN,
        patient: true,
        whole_log: true,
        heir,
        // The guest's kernel caches whole files.
        limits: libfs::Limits { ranges: false, ..libfs::Limits::SHIPPED },
        ..libfs::Config::new(source.as_bytes())
    };
    Ok(Arc::new(LibFs::attach(config)?))
}

/// Rules of translation, by commas.
fn ids(rules: &str) -> Result<IdMap, Errno> {
    let rules = rules.split(',').filter(|rule| !rule.is_empty()).map(str::parse);
    let rules: Vec<Rule> = rules.collect::<Result<_, _>>().map_err(|_: String| Errno::INVAL)?;
    IdMap::new(&rules).map_err(|_| Errno::INVAL)
}

fn io_errno(error: &std::io::Error) -> Errno {
    let number = error.raw_os_error().and_then(|number| u16::try_from(number).ok());
    number.map_or(Errno::IO, Errno)
}

/// What the devices of the process that have a weight share: as many threads at once as there are processors.
fn share() -> &'static Arc<Share> {
    static SHARE: OnceLock<Arc<Share>> = OnceLock::new();
    SHARE.get_or_init(|| Share::new(std::thread::available_parallelism().map_or(1, usize::from)))
}

/// # Safety
/// As the header says.
unsafe fn register(options: *const DpuOptions) -> Result<Box<Dpu>, Errno> {
    // SAFETY: null or good, by the caller's promise; of what is good the size is there.
    let Some(given) = (unsafe { options.cast::<usize>().as_ref() }) else {
        return Err(Errno::INVAL);
    };
    if *given < FIRST_FORM {
        return Err(Errno::INVAL);
    }
    let len = (*given).min(size_of::<DpuOptions>());
    let mut known = MaybeUninit::<DpuOptions>::zeroed();
    // SAFETY: it is as long as it says; what an older program does not say is 0, which every field may be.
    let options = unsafe {
        std::ptr::copy_nonoverlapping(options.cast::<u8>(), known.as_mut_ptr().cast(), len);
        known.assume_init()
    };
    if options.source.is_null() || options.queues > QUEUES_MAX || options.threads > QUEUES_MAX {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's strings.
    let (source, directory, tenant) = unsafe {
        (text(options.source, "")?, text(options.directory, "/")?, text(options.tenant, "guest")?)
    };
    // SAFETY: as above.
    let (users, groups, state) = unsafe {
        let (users, groups) = (text(options.translate_uid, "")?, text(options.translate_gid, "")?);
        (ids(users)?, ids(groups)?, text(options.state, "")?)
    };
    if options.posix_acl != 0 && !(users.is_empty() && groups.is_empty()) {
        // Those whom a list names would not be translated.
        return Err(Errno::INVAL);
    }
    let rate = |n: u64, burst: u64| {
        let burst = if burst == 0 { n as f64 / 10.0 } else { burst as f64 };
        (n > 0).then(|| Rate { rate: n as f64, burst: burst.max(1.0) })
    };
    let limits = Limits::new(
        rate(options.iops, options.iops_burst),
        rate(options.bandwidth, options.bandwidth_burst),
    );
    let bound = |given: u64, usual: usize| match usize::try_from(given) {
        Ok(0) => usual,
        given => given.unwrap_or(usize::MAX),
    };
    let usual = Options::default();
    let guest = Guest {
        nodes_max: bound(options.nodes_max, usual.guest.nodes_max),
        handles_max: bound(options.handles_max, usual.guest.handles_max),
    };
    let book = (!state.is_empty()).then(|| Ledger::open(Path::new(state), &guest)).transpose();
    let (ledger, mut kept) = book.map_err(|e| io_errno(&e))?.unzip();
    let ledger: Option<Arc<Ledger>> = ledger.map(Arc::new);
    let rules = tenant::Options {
        users,
        groups,
        readonly: options.readonly != 0,
        xattr: options.xattr != 0,
        acl: options.posix_acl != 0,
        ..tenant::Options::default()
    };
    let heir = ledger.as_ref().map_or(0, |ledger| ledger.heir());
    let fs = Tenant::new(open(source, heir)?, directory.as_bytes(), rules)?;
    if let Some(ledger) = &ledger
        && !ledger.claim(fs.mark()?)
    {
        kept = None; // of another directory
    }
    let threads = if options.threads == 0 { 2 } else { options.threads as usize };
    let share = (options.weight > 0).then(|| share().join(options.weight));
    let device = Device::new(
        Arc::new(fs),
        Options {
            threads,
            poll: Duration::ZERO,
            limits: Arc::new(limits),
            guest,
            ledger,
            share,
            ..usual
        },
    );
    if let Some(kept) = kept.flatten() {
        device.resume(kept);
    }
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
    let lists = (input, in_count, output, out_count);
    // SAFETY: as the header says.
    unsafe { submit(device, queue, lists, done, context, false) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_dpu_submit_again(
    device: *mut Dpu,
    queue: u32,
    input: *const iovec,
    in_count: usize,
    output: *const iovec,
    out_count: usize,
    done: Done,
    context: *mut c_void,
) -> c_int {
    let lists = (input, in_count, output, out_count);
    // SAFETY: as the header says.
    unsafe { submit(device, queue, lists, done, context, true) }
}

/// # Safety
/// As the header says.
unsafe fn submit(
    device: *mut Dpu,
    queue: u32,
    (input, in_count, output, out_count): (*const iovec, usize, *const iovec, usize),
    done: Done,
    context: *mut c_void,
    again: bool,
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
    queue.push(Box::new(Handed { readable, writable, done, context, finished, off, again }));
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
    if let Some(crew) = dpu.crew.take()
        && !crew.end(PATIENCE)
    {
        log::warn!("{}: a request does not come back", dpu.queues.tenant);
    }
}
