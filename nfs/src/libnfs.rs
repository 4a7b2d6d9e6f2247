//! libnfs 4 (`libnfs.so.13`), loaded when it is needed: a program that uses this crate builds and runs without it.
//!
//! What it does: it connects (from a reserved port where it may, as exports want it), writes the heads of requests with their credentials, sends,
//! and finds the request that an answer is for. Arguments and results stay bytes here ([`crate::xdr`] reads and writes them), because
//! its own decoders write outside of their buffers when a server lies about lengths. For the same reason it does not see the server's
//! connection but one end of a pair of sockets, at whose other end [`crate::guard`] stands ([`Context::part`]).
//!
//! Its contexts are of one thread each.
#![allow(unsafe_code)] // a C library

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

use base::library::Library;
use base::library_functions;
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// The library; 13 is libnfs 4.
const LIBNFS: Library = Library {
    name: c"libnfs.so.13",
    title: "libnfs 4",
    lacking: "it is not libnfs 4.0.0",
    remedy: "install it: apt install libnfs13",
};
/// The machine's name in credentials; servers do not look at it.
const MACHINE: &CStr = c"corbel";
/// Groups that AUTH_SYS carries.
pub const GROUPS_MAX: usize = 16;
/// Room for what the library writes behind the arguments.
const SLACK: usize = 64;

/// `struct ZDR` of `nfsc/libnfs-zdr.h`: where an answer is read.
#[repr(C)]
#[derive(Debug)]
pub struct Zdr {
    op: c_uint,
    buf: *mut c_char,
    size: c_int,
    pos: c_int,
    mem: *mut c_void,
}

/// The first fields of `struct rpc_pdu`, up to where arguments are written. It is in no header that is installed: [`Lib::check`] looks
/// whether it is so.
#[repr(C)]
struct PduHead {
    next: *mut c_void,
    xid: u32,
    zdr: Zdr,
}

/// Sizes and offsets that a test compares with the header: name in C, of us.
pub const LAYOUT: [(&str, usize); 7] = [
    ("sizeof(struct ZDR)", size_of::<Zdr>()),
    ("offsetof(struct ZDR, x_op)", offset_of!(Zdr, op)),
    ("offsetof(struct ZDR, buf)", offset_of!(Zdr, buf)),
    ("offsetof(struct ZDR, size)", offset_of!(Zdr, size)),
    ("offsetof(struct ZDR, pos)", offset_of!(Zdr, pos)),
    ("offsetof(struct ZDR, mem)", offset_of!(Zdr, mem)),
    ("sizeof(((struct ZDR *)0)->x_op)", size_of::<c_uint>()),
];

/// Values of the header that are used here.
pub const VALUES: [(&str, i64); 3] =
    [("RPC_STATUS_SUCCESS", SUCCESS as i64), ("ZDR_ENCODE", ENCODE as i64), ("AUTH_UNIX", 1)];

const SUCCESS: c_int = 0;
const ENCODE: c_uint = 0;

/// Where the results of an answer are while its callback runs.
#[repr(C)]
struct Span {
    at: *const u8,
    len: usize,
}

type Rpc = c_void;
// SAFETY: libnfs calls these with its own stream and with what it was given beside them, which live as long as the call.
type Decode = unsafe extern "C" fn(*mut Zdr, *mut c_void) -> u32;
type Callback = unsafe extern "C" fn(*mut Rpc, c_int, *mut c_void, *mut c_void);

library_functions! {
    /// The functions of the library that are used, as version 4.0.0 declares them.
    struct Lib;
    init: c"rpc_init_context", fn() -> *mut Rpc;
    destroy: c"rpc_destroy_context", fn(*mut Rpc);
    connect: c"rpc_connect_async", fn(*mut Rpc, *const c_char, c_int, Option<Callback>, *mut c_void) -> c_int;
    get_fd: c"rpc_get_fd", fn(*mut Rpc) -> c_int;
    which_events: c"rpc_which_events", fn(*mut Rpc) -> c_int;
    service: c"rpc_service", fn(*mut Rpc, c_int) -> c_int;
    get_error: c"rpc_get_error", fn(*mut Rpc) -> *const c_char;
    set_auth: c"rpc_set_auth", fn(*mut Rpc, *mut c_void);
    next_xid: c"rpc_set_next_xid", fn(*mut Rpc, u32);
    auth: c"libnfs_authunix_create", fn(*const c_char, u32, u32, u32, *const u32) -> *mut c_void;
    allocate: c"rpc_allocate_pdu2", fn(*mut Rpc, c_int, c_int, c_int, Callback, *mut c_void, Decode, c_int, usize) -> *mut PduHead;
    queue: c"rpc_queue_pdu", fn(*mut Rpc, *mut PduHead) -> c_int;
    opaque: c"libnfs_zdr_opaque", fn(*mut Zdr, *const c_char, u32) -> u32;
}

static LIB: OnceLock<Result<Lib, String>> = OnceLock::new();
/// The library counts contexts and ports in variables of its own, which are nobody's.
static MAKING: Mutex<()> = Mutex::new(());

/// Loads the library, once.
///
/// # Errors
/// It is not there, or is another one; with what to do.
pub fn load() -> Result<(), String> {
    lib().map(drop)
}

fn lib() -> Result<&'static Lib, String> {
    LIB.get_or_init(|| Lib::load(LIBNFS)).as_ref().map_err(Clone::clone)
}

/// An answer, or why there is none.
#[derive(Debug)]
pub enum Answer {
    /// The results, as they came.
    Results(Vec<u8>),
    /// What the server refused, in words.
    Refused(String),
}

thread_local! {
    /// What callbacks were told, in the thread that serves their context.
    static ANSWERS: RefCell<Vec<(u32, Answer)>> = const { RefCell::new(Vec::new()) };
}

/// Instead of a decoder: says where the results are, and that all was read.
// SAFETY: libnfs calls it as a [`Decode`], with the stream of the answer and the span that the call was given.
unsafe extern "C" fn note(zdr: *mut Zdr, span: *mut c_void) -> u32 {
    if zdr.is_null() || span.is_null() {
        return 0;
    }
    // SAFETY: the library calls its decoders with the stream that it reads, which it alone uses, for the length of the call.
    let zdr = unsafe { &mut *zdr };
    let (Ok(size), Ok(pos)) = (usize::try_from(zdr.size), usize::try_from(zdr.pos)) else {
        return 0;
    };
    if zdr.op == ENCODE || zdr.buf.is_null() || pos > size {
        return 0;
    }
    // SAFETY: `buf` has `size` bytes, and `pos` is not behind them.
    let at = unsafe { zdr.buf.cast::<u8>().add(pos) };
    // SAFETY: `span` is room that the library made for results: as long as a `Span`, as it was asked for, and aligned to 8.
    unsafe { span.cast::<Span>().write(Span { at, len: size - pos }) };
    zdr.pos = zdr.size;
    1
}

/// Tells the thread what came. `request` is the number of a request, not a pointer.
unsafe extern "C" fn answered(_: *mut Rpc, status: c_int, data: *mut c_void, request: *mut c_void) {
    let Ok(xid) = u32::try_from(request.addr()) else { return };
    let answer = if status == SUCCESS && !data.is_null() {
        // SAFETY: with success, the data are what `note` wrote for this answer, whose record lives until the callback returns.
        let Span { at, len } = unsafe { data.cast::<Span>().read() };
        // SAFETY: as above: `len` bytes from there on are the record's.
        let results = unsafe { std::slice::from_raw_parts(at, len) };
        Answer::Results(results.to_vec())
    } else if data.is_null() {
        Answer::Refused("no answer".into())
    } else {
        // SAFETY: without success, the data are a text that ends in NUL.
        Answer::Refused(unsafe { CStr::from_ptr(data.cast()) }.to_string_lossy().into_owned())
    };
    // A thread that ends has no list any more.
    let _ = ANSWERS.try_with(|answers| answers.borrow_mut().push((xid, answer)));
}

/// What callbacks of this thread were told since the last time.
pub fn answers() -> Vec<(u32, Answer)> {
    ANSWERS.with(|answers| std::mem::take(&mut *answers.borrow_mut()))
}

impl Lib {
    fn load(library: Library) -> Result<Self, String> {
        let lib = Self::find(&library.load()?)?;
        lib.check()?;
        Ok(lib)
    }

    /// Whether a request is laid out as it is in 4.0.0: what is known of one that was just made is looked for in it.
    fn check(&self) -> Result<(), String> {
        const XID: u32 = 0x1234_5678;
        const HINT: usize = 160;
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let strange = || {
            format!(
                "{}: not laid out as libnfs 4.0.0: {}",
                LIBNFS.name.to_string_lossy(),
                LIBNFS.remedy
            )
        };
        // SAFETY: as declared.
        let rpc = NonNull::new(unsafe { (self.init)() }).ok_or_else(strange)?;
        let context = Raw { lib: self, rpc };
        let pdu = context.allocate(XID, 0, 0, 0, HINT).ok_or_else(strange)?;
        // SAFETY: a request of the library is longer than its first fields: these are read, and nothing they point to.
        let head = unsafe { pdu.as_ref() };
        // The least that is sent: its own buffer is 4096 bytes; mark, head, credentials of 28 bytes, no verifier.
        let good = head.next.is_null()
            && head.xid == XID
            && head.zdr.op == ENCODE
            && !head.zdr.buf.is_null()
            && head.zdr.size == 4096 + 160
            && (60..=200).contains(&head.zdr.pos)
            && head.zdr.pos % 4 == 0
            && head.zdr.mem.is_null();
        if !good {
            // Who knows what it is: it is left alone.
            std::mem::forget(context);
            return Err(strange());
        }
        // SAFETY: it was made by this context and is handed over once.
        unsafe { (self.queue)(rpc.as_ptr(), pdu.as_ptr()) };
        drop(context);
        answers();
        Ok(())
    }
}

/// A context of the library that is destroyed with it.
struct Raw<'a> {
    lib: &'a Lib,
    rpc: NonNull<Rpc>,
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed once. Callbacks of what was under way are called meanwhile, and only write to a list.
        unsafe { (self.lib.destroy)(self.rpc.as_ptr()) };
    }
}

impl Raw<'_> {
    /// A request whose arguments, up to `len` bytes, are still to be written.
    fn allocate(
        &self,
        xid: u32,
        program: u32,
        version: u32,
        procedure: u32,
        len: usize,
    ) -> Option<NonNull<PduHead>> {
        let number = |n: u32| n.cast_signed();
        let span = c_int::try_from(size_of::<Span>()).unwrap_or(16);
        // SAFETY: the context lives, and the request's number goes where a pointer may, which nobody follows.
        unsafe {
            (self.lib.next_xid)(self.rpc.as_ptr(), xid);
            NonNull::new((self.lib.allocate)(
                self.rpc.as_ptr(),
                number(program),
                number(version),
                number(procedure),
                answered,
                std::ptr::without_provenance_mut(xid as usize),
                note,
                span,
                len,
            ))
        }
    }

    fn error(&self) -> String {
        // SAFETY: the context lives; the text, if there is one, ends in NUL and lives until the next call.
        let said = unsafe { (self.lib.get_error)(self.rpc.as_ptr()) };
        if said.is_null() {
            return "no connection".into();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
    }
}

/// A request to be sent.
#[derive(Debug)]
pub struct Request<'a> {
    /// Its number, which no other one under way has.
    pub xid: u32,
    /// Of which protocol.
    pub program: u32,
    /// Of which version of it.
    pub version: u32,
    /// Which of its procedures.
    pub procedure: u32,
    /// On whose behalf: user, group, more groups.
    pub who: (u32, u32, &'a [u32]),
    /// The arguments, padded.
    pub args: &'a [u8],
}

/// A connection of the library, of the thread that made it.
pub struct Context {
    raw: Raw<'static>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("fd", &self.fd()).finish_non_exhaustive()
    }
}

impl Context {
    /// Begins to connect. [`service`](Self::service) says how it goes on.
    ///
    /// # Errors
    /// In words: no library, no such host, nobody there.
    pub fn connect(host: &str, port: u16) -> Result<Self, String> {
        let lib = lib()?;
        let host = CString::new(host).map_err(|_| "the host's name has a NUL".to_string())?;
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as declared.
        let rpc = NonNull::new(unsafe { (lib.init)() }).ok_or("no memory for a connection")?;
        let raw = Raw { lib, rpc };
        // SAFETY: the context lives, the name ends in NUL, and no callback is asked for.
        let begun = unsafe {
            (lib.connect)(
                rpc.as_ptr(),
                host.as_ptr(),
                c_int::from(port),
                None,
                std::ptr::null_mut(),
            )
        };
        if begun == 0 { Ok(Self { raw }) } else { Err(raw.error()) }
    }

    /// The descriptor that the library reads from and writes to.
    pub fn fd(&self) -> RawFd {
        // SAFETY: the context lives.
        unsafe { (self.raw.lib.get_fd)(self.raw.rpc.as_ptr()) }
    }

    /// The same, to wait for it.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd();
        // SAFETY: the context keeps it open while it is borrowed.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// What the library waits for.
    pub fn events(&self) -> PollFlags {
        // SAFETY: the context lives.
        let events = unsafe { (self.raw.lib.which_events)(self.raw.rpc.as_ptr()) };
        PollFlags::from_bits_truncate(events as u16)
    }

    /// Lets the library read, write, and call back.
    ///
    /// # Errors
    /// The connection is gone; in words.
    pub fn service(&mut self, ready: PollFlags) -> Result<(), String> {
        // SAFETY: the context lives, and this is its thread.
        let done =
            unsafe { (self.raw.lib.service)(self.raw.rpc.as_ptr(), c_int::from(ready.bits())) };
        if done == 0 { Ok(()) } else { Err(self.raw.error()) }
    }

    /// Puts a pair of sockets between the library and the server: the server's connection, and the end at which what the library
    /// sends is to be had, and what it shall read is to be put.
    ///
    /// # Errors
    /// No descriptors.
    pub fn part(&mut self) -> io::Result<(OwnedFd, OwnedFd)> {
        let fd = self.as_fd().ok_or(io::ErrorKind::NotConnected)?;
        let server = rustix::io::fcntl_dupfd_cloexec(fd, 3)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // SAFETY: both are open. What the number stands for is changed, as its owner, the library, allows; nothing else of us has it.
        if unsafe { libc::dup3(far.as_raw_fd(), self.fd(), libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((server, near))
    }

    /// Has a request sent. Its answer is among the [`answers`], some time.
    ///
    /// # Errors
    /// In words: no memory.
    pub fn send(&mut self, request: &Request<'_>) -> Result<(), String> {
        let (uid, gid, groups) = request.who;
        let groups = &groups[..groups.len().min(GROUPS_MAX)];
        let lib = self.raw.lib;
        let rpc = self.raw.rpc.as_ptr();
        let len = u32::try_from(request.args.len()).map_err(|_| "too long a request")?;
        // SAFETY: the machine's name ends in NUL, there are as many groups as is said, and the credentials, copies of these, are handed over
        // to the context.
        unsafe {
            let auth = (lib.auth)(MACHINE.as_ptr(), uid, gid, groups.len() as u32, groups.as_ptr());
            if auth.is_null() {
                return Err("no memory for credentials".into());
            }
            (lib.set_auth)(rpc, auth);
        }
        let Request { xid, program, version, procedure, args, .. } = *request;
        let room = args.len() + SLACK;
        let mut pdu = self
            .raw
            .allocate(xid, program, version, procedure, room)
            .ok_or_else(|| self.raw.error())?;
        // SAFETY: the library made it, and `Lib::check` found its first fields to be these.
        let zdr = unsafe { &mut pdu.as_mut().zdr };
        let left = usize::try_from(zdr.size.saturating_sub(zdr.pos)).unwrap_or(0);
        if left < room {
            return Err("the library has less room than it was asked for".into());
        }
        // SAFETY: there is room for as many bytes, and the request is handed over once.
        let queued = unsafe {
            if len > 0 {
                (lib.opaque)(zdr, args.as_ptr().cast(), len);
            }
            (lib.queue)(rpc, pdu.as_ptr())
        };
        if queued == 0 { Ok(()) } else { Err(self.raw.error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_library_is_missing_the_remedy_is_said() {
        let said =
            Lib::load(Library { name: c"libnfs-that-nobody-has.so.13", ..LIBNFS }).err().unwrap();
        assert!(said.contains("apt install libnfs13"), "{said}");
        // One that is there and is something else.
        let said = Lib::load(Library { name: c"libc.so.6", ..LIBNFS }).err().unwrap();
        assert!(said.contains("rpc_init_context") && said.contains("libnfs13"), "{said}");
    }

    #[test]
    fn a_decoder_says_where_the_results_are_and_no_more() {
        let mut bytes = *b"headRESULTS!";
        let mut zdr = Zdr {
            op: 1,
            buf: bytes.as_mut_ptr().cast(),
            size: 12,
            pos: 4,
            mem: std::ptr::null_mut(),
        };
        let mut span = Span { at: std::ptr::null(), len: 0 };
        let at = (&raw mut span).cast();
        // SAFETY: both live, and the buffer has 12 bytes.
        assert_eq!((unsafe { note(&raw mut zdr, at) }, span.len, zdr.pos), (1, 8, 12));
        for (pos, size) in [(13, 12), (-4, 12), (4, -1)] {
            (zdr.pos, zdr.size) = (pos, size);
            // SAFETY: as above; what is wrong is refused before anything is read.
            assert_eq!(unsafe { note(&raw mut zdr, at) }, 0);
        }
    }
}
