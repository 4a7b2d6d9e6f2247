//! Dispatch: one request in, at most one reply out. Knows no transport.
//!
//! - [`Server::handle`] may be called from any number of threads.
//! - Node numbers are inode numbers; numbers with the top bit set are the virtual directory's
//!   (`virtual_dir`). Nothing needs to be remembered to serve a request but open files, so a
//!   kernel that was told a number keeps it across a restart of the server.
//! - File handles are the server's own numbers: a transport's peer cannot name a handle that
//!   another one opened in the same file system, and whatever it leaves open is closed by
//!   DESTROY or by dropping the server.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caching, Caller, FileSystem, Handle, Invalidate, Lock, O_ACCMODE, O_DSYNC, O_RDONLY,
    O_WRONLY, Waiting,
};
use client::fs::{Result, S_IFREG};
use zerocopy::{FromBytes, IntoBytes};

use super::callers::Callers;
use super::files::{goes_past_to_append, told_by};
use super::groups::GroupCache;
use super::locks::{Locks, Owner as LockOwner};
use super::pages::{For, Table, Verdict, unseen};
use super::parse::{Args, Request};
use super::reply::{Answer, CACHE_SECONDS, LaterReply, ReplySink, ended_with, entry_out};
use super::syncs::{AtLast, Syncs};
use super::virtual_dir;
use super::wire::{EntryOut, InHeader, InitIn, InitInExt, InitOut, MAJOR, MINOR, MINOR_MIN};
use super::wire::{OpenOut, OutHeader, init, op};
use crate::planted::{Bug, planted};

/// Longest READ, WRITE and READDIR: 256 pages, what Linux allows by default.
pub const IO_BYTES_MAX: usize = 1 << 20;
/// Longest request: the longest WRITE, with a page for its headers as the kernel requires.
pub const REQUEST_BYTES_MAX: usize = IO_BYTES_MAX + 4096;
/// From this minor version on (Linux 5.10) the kernel drops attributes that were asked for before an
/// invalidation.
const MINOR_VERSIONED: u32 = 32;
/// From this one on (Linux 6.9) direct writes are let in at once only where nobody maps the file or has it
/// open through the cache.
const MINOR_DIRECT: u32 = 40;
/// How long the kernel keeps attributes of what is in a snapshot: at most so long they are seen after its end.
const SNAPSHOT_SECONDS: u64 = 1;
/// Times that a look-up is done which a FORGET overtakes.
const LOOKUP_TRIES: u32 = 16;
/// Requests that the kernel may have in flight for read-ahead and asynchronous I/O.
const BACKGROUND_MAX: u16 = 64;

/// `O_DIRECT`, whose number depends on the architecture; a guest's is that of its host.
pub(super) const O_DIRECT: u32 = rustix::fs::OFlags::DIRECT.bits();

/// Asked whether a caller may open an inode by its bare number, past the permissions of the
/// directories that lead to it.
pub type MayOpenByNumber = dyn Fn(&Caller<'_>, &Attr) -> bool + Send + Sync;
/// Gives text for the end of `.corbel/stats`.
pub type MoreStats = dyn Fn() -> String + Send + Sync;

/// Told that the kernel holds appended data in the wrong place.
pub type OnMisplaced = dyn Fn(InodeId) + Send + Sync;

/// Told that the process of a request has got a signal.
pub type OnInterrupt = dyn Fn(u64) + Send + Sync;

/// How a server behaves.
pub struct Options {
    /// Read supplementary groups from `/proc`: right for the local kernel, wrong for a guest's.
    pub groups_from_proc: bool,
    /// Content of `.corbel/config`.
    pub config_text: String,
    /// The directory that is the root for the kernel. With another than the file system's root there is no `.corbel`.
    pub root: InodeId,
    /// The file system's own lines for `.corbel/stats`.
    pub more_stats: Option<Box<MoreStats>>,
    /// File locks are asked of the file system, if it keeps them; the transport must be able to
    /// reply later, and run [`Server::run_locks`]. Else the kernel keeps those of its own processes.
    pub shared_locks: bool,
    /// The kernel shall check permission (`default_permissions`), which it does in any case by the
    /// access lists of a file system that keeps them.
    pub kernel_checks: bool,
    /// The transport can serve requests over io_uring, if the kernel offers that.
    pub io_uring: bool,
    /// Whoever asks is a virtual machine, which may be hostile.
    pub guest: Option<Guest>,
    /// Where to keep what another server would need.
    pub ledger: Option<Arc<dyn Ledger>>,
    /// The other servers of the same file system, if there are any.
    pub told: Option<Arc<Told>>,
    /// The rule of `.corbel/inode/NUMBER` for those who show no proof; by default root and the owner.
    pub may_open_by_number: Box<MayOpenByNumber>,
}

/// What kernels were told by servers of one file system, where one comes after the other and the one before it may still be at work: the
/// file system keeps one thing of an inode for all of them.
#[derive(Debug, Default)]
pub struct Told(Mutex<Vec<Weak<Table>>>);

impl Told {
    fn join(&self, table: &Arc<Table>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|table| table.strong_count() > 0);
        all.push(Arc::downgrade(table));
    }

    /// Whether one of them may know it.
    fn is_told(&self, ino: InodeId) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).any(|table| table.is_told(ino))
    }
}

/// Told of what a server must know of its guest, so that another server can go on with it after this one was killed
/// ([`Server::resume`]). Each is told before the guest is.
pub trait Ledger: Send + Sync {
    /// INIT was agreed upon.
    fn begun(&self);
    /// The guest was told of an inode once more.
    fn told(&self, ino: InodeId);
    /// It has forgotten it so many times.
    fn forgot(&self, ino: InodeId, count: u64);
    /// It has opened a file or a directory.
    fn opened(&self, open: &OpenFile);
    /// It has closed it.
    fn closed(&self, fh: u64);
    /// That is all that an owner has locked of a file, or is about to, through this open file at last. `false`: there is no room for it,
    /// and what was there still is.
    fn locked(&self, owner: LockOwner, fh: u64, all: &[Lock]) -> bool;
    /// The guest has ended in order: it has nothing any more.
    fn ended(&self);
    /// This server is no more, and has given back what its guest had, locks too.
    fn given_back(&self) {}
}

/// A lock, as a [`Ledger`] keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Locked {
    /// Of which file.
    pub ino: InodeId,
    /// The open file through which its owner has locked last.
    pub fh: u64,
    /// The lock.
    pub lock: Lock,
}

/// An open file, as a [`Ledger`] keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenFile {
    /// The guest's handle.
    pub fh: u64,
    /// Its inode.
    pub ino: InodeId,
    /// The flags that it was opened with.
    pub flags: u32,
}

/// What is different for a guest: it has no virtual directory, looks nothing up by `.` and `..`, and names only nodes that
/// it was told of, so that it stays below the root that it was given.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// Nodes that it may know at once; then what would tell it of another is ENOMEM.
    pub nodes_max: usize,
    /// Open files and directories; then ENFILE.
    pub handles_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            groups_from_proc: true,
            config_text: String::new(),
            root: InodeId::ROOT,
            more_stats: None,
            shared_locks: false,
            kernel_checks: true,
            io_uring: false,
            guest: None,
            ledger: None,
            told: None,
            may_open_by_number: Box::new(|caller, attr| caller.uid == 0 || caller.uid == attr.uid),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("groups_from_proc", &self.groups_from_proc)
            .field("config_text", &self.config_text)
            .field("shared_locks", &self.shared_locks)
            .finish_non_exhaustive()
    }
}

/// What is counted.
#[derive(Debug)]
pub(super) struct Counters {
    pub calls: [AtomicU64; op::END],
    pub errors: AtomicU64,
    pub malformed: AtomicU64,
    pub unknown: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
    pub bytes_copied: AtomicU64,
}

impl Counters {
    /// The answer to a request, `unique`, that was begun and has no data.
    pub(super) fn ended(&self, later: Box<dyn LaterReply>, unique: u64, result: Result<()>) {
        match result {
            Ok(()) => ended_with(later, unique, &[]),
            Err(error) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                later.send(OutHeader::alone(unique, -i32::from(error.0)).as_bytes());
            }
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        let zero = AtomicU64::default;
        Self {
            calls: [const { AtomicU64::new(0) }; op::END],
            errors: zero(),
            malformed: zero(),
            unknown: zero(),
            bytes_read: zero(),
            bytes_written: zero(),
            bytes_copied: zero(),
        }
    }
}

/// An open file: the file system's handle and the inode that it must be used with.
#[derive(Clone)]
pub(super) struct Opened {
    pub handle: Handle,
    pub ino: InodeId,
    /// Opened with `O_DIRECT`: see [`Server::goes_direct`].
    pub direct: bool,
    /// Opened for appending: past the cache, too.
    pub appends: bool,
    /// Opened for reading.
    pub reads: bool,
    /// As it was opened.
    pub flags: u32,
    /// Keeps the handle as long as somebody is at it, where the file system relies on that ([`Waiting::Nobody`]).
    pub used: Option<Arc<AtLast>>,
}

impl Opened {
    /// The same if it was opened for writing. A kernel sees to that itself; a guest that means harm does not.
    pub(super) fn writes(self) -> Result<Self> {
        if self.flags & O_ACCMODE == O_RDONLY { Err(Errno::BADF) } else { Ok(self) }
    }
}

/// What is remembered of it.
pub(super) struct Entry {
    opened: Opened,
    /// Gives the handle back at last, where requests may be begun that go on when the kernel has given it back.
    used: Option<Arc<AtLast>>,
    rhythm: Rhythm,
}

/// How an open file is synced. Who writes so and so often and then syncs, again and again, does it once more: between the last write and the
/// sync lies the way of a reply and of a request, in which what the sync takes can be under way.
#[derive(Default)]
struct Rhythm {
    /// Writes since the last sync, and those between the two before that.
    writes: AtomicU32,
    usual: AtomicU32,
    /// Syncs one after the other that came after so many writes.
    kept: AtomicU32,
}

/// After so many it is believed.
const RHYTHM: u32 = 3;

impl Rhythm {
    /// One more write; whether a sync is expected now.
    fn wrote(&self) -> bool {
        let writes = self.writes.load(Ordering::Relaxed).saturating_add(1);
        self.writes.store(writes, Ordering::Relaxed);
        self.kept.load(Ordering::Relaxed) >= RHYTHM && writes == self.usual.load(Ordering::Relaxed)
    }

    fn synced(&self) {
        let writes = self.writes.swap(0, Ordering::Relaxed);
        let same = writes > 0 && writes == self.usual.swap(writes, Ordering::Relaxed);
        let kept = if same { self.kept.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.kept.store(kept, Ordering::Relaxed);
    }
}

/// One request on its way through a handler.
#[derive(Debug)]
pub(super) struct Call<'a> {
    /// Number of the request.
    pub unique: u64,
    pub ino: InodeId,
    pub caller: Caller<'a>,
    /// The data of a WRITE that are not among the arguments.
    pub data: &'a [IoSlice<'a>],
}

type Run<F> = fn(&Server<F>, &Call<'_>, Args<'_>, &mut dyn ReplySink) -> Result<Answer>;

/// Whether a handler asks the file system for permission, and so needs the caller's groups.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    Nothing,
    Permission,
}

/// Whether an operation is about an inode only, and no name.
const fn by_number(opcode: u32) -> bool {
    matches!(
        opcode,
        op::GETATTR
            | op::STATX
            | op::SETATTR
            | op::OPEN
            | op::READLINK
            | op::GETXATTR
            | op::LISTXATTR
            | op::SETXATTR
            | op::REMOVEXATTR
    )
}

/// Serves one file system to one kernel.
pub struct Server<F: FileSystem + ?Sized> {
    pub(super) fs: Arc<F>,
    pub(super) options: Options,
    pub(super) counters: Arc<Counters>,
    /// INIT was agreed upon.
    ready: AtomicBool,
    /// What the kernel may cache: what the file system promises, if the kernel is new enough.
    caching: OnceLock<Caching>,
    /// The kernel takes several direct writes to a file at once.
    direct_writes: AtomicBool,
    /// The kernel waits for the entries of its queues.
    io_uring: AtomicBool,
    groups: GroupCache,
    pub(super) callers: Callers,
    opened: RwLock<HashMap<u64, Entry>>,
    last_handle: AtomicU64,
    pub(super) locks: Locks,
    pub(super) syncs: Syncs,
    /// The inodes that the kernel knows.
    pub(super) known: Arc<Table>,
    /// The file system promises `Attributes`: what the kernel's pages are worth is for us to know.
    pub(super) tends_pages: bool,
    /// Who waits for what takes long.
    pub(super) waiting: Waiting,
    pub(super) misplaced: OnceLock<Box<OnMisplaced>>,
    pub(super) kernel: OnceLock<Arc<dyn Invalidate>>,
    pub(super) interrupts: OnceLock<Box<OnInterrupt>>,
}

impl<F: FileSystem + ?Sized> std::fmt::Debug for Server<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<F: FileSystem + ?Sized> Server<F> {
    /// A server of `fs` that waits for INIT.
    pub fn new(fs: Arc<F>, options: Options) -> Self {
        let tends_pages = fs.caching() == Caching::Attributes;
        let waiting = fs.waiting();
        let known = Arc::default();
        if let Some(told) = &options.told {
            told.join(&known);
        }
        Self {
            fs,
            options,
            counters: Arc::default(),
            ready: AtomicBool::new(false),
            caching: OnceLock::new(),
            direct_writes: AtomicBool::new(false),
            io_uring: AtomicBool::new(false),
            groups: GroupCache::default(),
            callers: Callers::default(),
            opened: RwLock::default(),
            last_handle: AtomicU64::new(0),
            locks: Locks::default(),
            syncs: Syncs::default(),
            known,
            tends_pages,
            waiting,
            misplaced: OnceLock::new(),
            kernel: OnceLock::new(),
            interrupts: OnceLock::new(),
        }
    }

    /// Gives the server the way to drop what the kernel caches of an inode. It is called while a
    /// request is served, so it must only note that down. A second call is ignored.
    pub fn on_misplaced(&self, misplaced: Box<OnMisplaced>) {
        let _ = self.misplaced.set(misplaced);
    }

    /// Gives the server the way to the kernel's pages, which it takes while requests are served: where
    /// their callers hold none. Without it direct writes are not parallel. A second call is ignored.
    pub fn reaches(&self, kernel: Arc<dyn Invalidate>) {
        let _ = self.kernel.set(kernel);
    }

    /// Tells the transport of requests, by their numbers, whose process has got a signal. A second
    /// call is ignored.
    pub fn on_interrupt(&self, interrupt: Box<OnInterrupt>) {
        let _ = self.interrupts.set(interrupt);
    }

    /// Whether the requests after INIT go over io_uring.
    pub fn is_over_io_uring(&self) -> bool {
        self.io_uring.load(Ordering::Acquire)
    }

    /// They do not, after all.
    pub fn not_over_io_uring(&self) {
        self.io_uring.store(false, Ordering::Release);
    }

    /// Whether INIT was agreed upon.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// One row per operation: code, name, what it asks, handler.
    fn row(opcode: u32) -> Option<(&'static str, Asks, Run<F>)> {
        use Asks::{Nothing, Permission};
        let row: (_, _, Run<F>) = match opcode {
            op::LOOKUP => ("lookup", Permission, Self::lookup),
            op::FORGET => ("forget", Nothing, Self::forget),
            op::GETATTR => ("getattr", Nothing, Self::getattr),
            op::SETATTR => ("setattr", Permission, Self::setattr),
            op::READLINK => ("readlink", Nothing, Self::readlink),
            op::SYMLINK => ("symlink", Permission, Self::symlink),
            op::MKNOD => ("mknod", Permission, Self::mknod),
            op::MKDIR => ("mkdir", Permission, Self::mkdir),
            op::UNLINK => ("unlink", Permission, Self::unlink),
            op::RMDIR => ("rmdir", Permission, Self::rmdir),
            op::RENAME => ("rename", Permission, Self::rename),
            op::LINK => ("link", Permission, Self::link),
            op::OPEN => ("open", Permission, Self::open),
            op::READ => ("read", Nothing, Self::read),
            op::WRITE => ("write", Nothing, Self::write),
            op::STATFS => ("statfs", Nothing, Self::statfs),
            op::RELEASE => ("release", Nothing, Self::release),
            op::FSYNC => ("fsync", Nothing, Self::fsync),
            op::SETXATTR => ("setxattr", Permission, Self::setxattr),
            op::GETXATTR => ("getxattr", Permission, Self::getxattr),
            op::LISTXATTR => ("listxattr", Permission, Self::listxattr),
            op::REMOVEXATTR => ("removexattr", Permission, Self::removexattr),
            op::FLUSH => ("flush", Nothing, Self::flush),
            op::INIT => ("init", Nothing, Self::init),
            op::OPENDIR => ("opendir", Permission, Self::opendir),
            op::READDIR => ("readdir", Permission, Self::readdir),
            op::RELEASEDIR => ("releasedir", Nothing, Self::releasedir),
            op::FSYNCDIR => ("fsyncdir", Nothing, Self::fsyncdir),
            op::GETLK => ("getlk", Nothing, Self::getlk),
            op::SETLK => ("setlk", Nothing, Self::setlk),
            op::SETLKW => ("setlkw", Nothing, Self::setlkw),
            op::CREATE => ("create", Permission, Self::create),
            op::INTERRUPT => ("interrupt", Nothing, Self::interrupt),
            op::DESTROY => ("destroy", Nothing, Self::destroy),
            op::BATCH_FORGET => ("batch_forget", Nothing, Self::batch_forget),
            op::FALLOCATE => ("fallocate", Nothing, Self::fallocate),
            op::READDIRPLUS => ("readdirplus", Permission, Self::readdirplus),
            op::RENAME2 => ("rename2", Permission, Self::rename2),
            op::LSEEK => ("lseek", Nothing, Self::lseek),
            op::COPY_FILE_RANGE => ("copy_file_range", Nothing, Self::copy_file_range),
            op::SYNCFS => ("syncfs", Nothing, Self::syncfs),
            op::TMPFILE => ("tmpfile", Permission, Self::tmpfile),
            op::STATX => ("statx", Nothing, Self::statx),
            _ => return None,
        };
        Some(row)
    }

    /// Whether the caller is in a group, also for operations that ask for no permission.
    pub(super) fn in_group(&self, call: &Call<'_>, gid: u32) -> bool {
        let Caller { uid, gid: own, pid, .. } = call.caller;
        let more = || self.options.groups_from_proc && self.groups.of(pid, uid, own).contains(&gid);
        call.caller.in_group(gid) || more()
    }

    /// Name of an operation, for statistics.
    pub(super) fn op_name(opcode: u32) -> Option<&'static str> {
        Self::row(opcode).map(|(name, _, _)| name)
    }

    /// Serves one request.
    pub fn handle(&self, request: &[u8], sink: &mut dyn ReplySink) {
        self.handle_pieces(request, &[], sink);
    }

    /// The same where the data of a WRITE, and nothing but these, lie elsewhere than the rest of the request, as pieces
    /// that others may change meanwhile.
    pub fn handle_pieces(&self, request: &[u8], data: &[IoSlice<'_>], sink: &mut dyn ReplySink) {
        let (header, parsed) = Request::parse(request, data);
        let Some(header) = header else {
            // Without a header there is no number to reply to.
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let releases = header.opcode.get() == op::RELEASE;
        let _until_served =
            releases.then(|| self.locks.releasing(InodeId(header.nodeid.get()))).flatten();
        let answer = parsed
            .inspect_err(|_| {
                self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            })
            .and_then(|request| self.dispatch(&request, sink));
        // These two have no reply, not even an error.
        let silent = matches!(header.opcode.get(), op::FORGET | op::BATCH_FORGET);
        if !silent && !self.reply(header, &answer, sink) {
            self.take_back(header, &answer, sink);
        }
    }

    /// Nobody has got this answer: what it gave out is given back.
    fn take_back(&self, header: &InHeader, answer: &Result<Answer>, sink: &mut dyn ReplySink) {
        if let Ok(Answer::Payload(len)) = answer
            && header.opcode.get() == op::READDIRPLUS
        {
            told_by(sink.payload(*len)).for_each(|ino| self.uncount_lookup(ino, 1));
        }
        let Ok(Answer::Fixed { bytes, len }) = answer else { return };
        let given = &bytes[..*len];
        let entry = EntryOut::read_from_prefix(given).ok().map(|(entry, _)| entry);
        let opened = |at: usize| OpenOut::read_from_prefix(given.get(at..)?).ok().map(|(o, _)| o);
        let (entry, open, ino) = match header.opcode.get() {
            op::OPEN | op::OPENDIR => (None, opened(0), self.node(header.nodeid.get())),
            op::CREATE | op::TMPFILE => {
                let ino = entry.as_ref().map_or(0, |entry| entry.nodeid.get());
                (entry, opened(size_of::<EntryOut>()), InodeId(ino))
            }
            op::LOOKUP | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK => {
                (entry, None, InodeId::NONE)
            }
            _ => return,
        };
        if let Some(entry) = open.and_then(|open| self.unregister(open.fh.get(), ino)) {
            self.give_back(entry);
        }
        if let Some(entry) = entry {
            self.uncount_lookup(InodeId(entry.nodeid.get()), 1);
        }
    }

    /// The inode of a node number of the kernel's, for which the root is always 1.
    fn node(&self, number: u64) -> InodeId {
        if number == InodeId::ROOT.0 { self.options.root } else { InodeId(number) }
    }

    fn dispatch(&self, request: &Request<'_>, sink: &mut dyn ReplySink) -> Result<Answer> {
        let header = request.header;
        let opcode = header.opcode.get();
        let Some((_, asks, run)) = Self::row(opcode) else {
            self.counters.unknown.fetch_add(1, Ordering::Relaxed);
            return Err(Errno::NOSYS);
        };
        self.counters.calls[opcode as usize].fetch_add(1, Ordering::Relaxed);
        if !self.is_ready() && opcode != op::INIT {
            return Err(Errno::IO);
        }
        let (uid, gid, pid) = (header.uid.get(), header.gid.get(), header.pid.get());
        let groups = (asks == Asks::Permission && self.options.groups_from_proc)
            .then(|| self.groups.of(pid, uid, gid));
        let groups = groups.as_deref().unwrap_or(&[]);
        let caller = Caller { uid, gid, groups, pid, umask: 0 };
        let (unique, ino) = (header.unique.get(), self.node(header.nodeid.get()));
        let call = Call { unique, ino, caller, data: request.data };
        let args = Args::new(request.body);
        if let Some(guest) = &self.options.guest {
            self.check_guest(guest, opcode, ino)?;
        } else if virtual_dir::is_virtual(call.ino) {
            return self.virtual_call(opcode, &call, args, sink);
        } else {
            self.callers.count(pid, opcode);
        }
        let answer = run(self, &call, args, sink);
        match answer {
            // The name was found a moment ago, and what it led to is gone: the kernel looks again.
            Err(Errno::NOENT) if by_number(opcode) => Err(Errno::STALE),
            answer => answer,
        }
    }

    /// What a guest may name: nodes that it was told of, and no more of them than it may know.
    fn check_guest(&self, guest: &Guest, opcode: u32, ino: InodeId) -> Result<()> {
        // These say nothing by their node, or it is only looked for among those that it was told of.
        let free = matches!(
            opcode,
            op::INIT | op::DESTROY | op::INTERRUPT | op::FORGET | op::BATCH_FORGET | op::SYNCFS
        );
        if !free {
            self.check_told(ino)?;
        }
        let tells = matches!(
            opcode,
            op::LOOKUP
                | op::MKNOD
                | op::MKDIR
                | op::SYMLINK
                | op::LINK
                | op::CREATE
                | op::TMPFILE
                | op::READDIRPLUS
        );
        let opens = matches!(opcode, op::OPEN | op::OPENDIR | op::CREATE | op::TMPFILE);
        if tells && self.known.len() >= guest.nodes_max {
            return Err(Errno::NOMEM);
        }
        let opened = || self.opened.read().unwrap_or_else(PoisonError::into_inner).len();
        if opens && opened() >= guest.handles_max {
            return Err(Errno::NFILE);
        }
        Ok(())
    }

    /// Who is a guest may use a node only after it was told of it. ESTALE if it was not.
    pub(super) fn check_told(&self, ino: InodeId) -> Result<()> {
        let free = self.options.guest.is_none() || ino == InodeId::ROOT;
        if free || self.known.is_told(ino) { Ok(()) } else { Err(Errno::STALE) }
    }

    /// Whether this is the name of the virtual directory, which guests do not have.
    pub(super) fn is_virtual_name(&self, parent: InodeId, name: &[u8]) -> bool {
        self.options.guest.is_none() && virtual_dir::is_its_name(parent, name)
    }

    fn reply(&self, header: &InHeader, answer: &Result<Answer>, sink: &mut dyn ReplySink) -> bool {
        let mut out = OutHeader { unique: header.unique, ..OutHeader::default() };
        let fixed_at = size_of::<OutHeader>();
        let mut head = [0u8; 512];
        let (mut head_len, mut payload_len) = (fixed_at, 0);
        match answer {
            Ok(Answer::Silent) => return true,
            Ok(Answer::Empty) => {}
            Ok(Answer::Fixed { bytes, len }) => {
                head_len += len;
                head[fixed_at..head_len].copy_from_slice(&bytes[..*len]);
            }
            Ok(Answer::Payload(len)) => payload_len = *len,
            Err(error) => {
                self.counters.errors.fetch_add(1, Ordering::Relaxed);
                out.error = (-i32::from(error.0)).into();
            }
        }
        out.len = u32::try_from(head_len + payload_len).unwrap_or(0).into();
        head[..fixed_at].copy_from_slice(out.as_bytes());
        sink.send(&head[..head_len], payload_len)
    }

    fn init(&self, _: &Call<'_>, mut args: Args<'_>, _: &mut dyn ReplySink) -> Result<Answer> {
        let asked: &InitIn = args.take()?;
        let (major, minor) = (asked.major.get(), asked.minor.get());
        let ours = InitOut { major: MAJOR.into(), minor: MINOR.into(), ..InitOut::default() };
        if self.options.guest.is_some() && self.is_ready() {
            return Err(Errno::IO); // a guest that begins anew gets a server of its own
        }
        if major > MAJOR {
            return Ok(Answer::of(&ours)); // the kernel asks again, in our version
        }
        if major < MAJOR || minor < MINOR_MIN {
            log::error!(
                "kernel speaks FUSE {major}.{minor}; {MAJOR}.{MINOR_MIN} (Linux 5.4) is needed"
            );
            return Err(Errno::OPNOTSUPP);
        }
        let _ = self.caching.set(match self.fs.caching() {
            // Before that, attributes that were asked for before an invalidation could come after it.
            Caching::Attributes if minor < MINOR_VERSIONED => Caching::Nothing,
            caching => caching,
        });
        let mut offered = u64::from(asked.flags.get());
        if offered & init::INIT_EXT != 0 {
            let more: &InitInExt = args.take()?;
            offered |= u64::from(more.flags2.get()) << 32;
        }
        let flags = offered & self.wanted_flags();
        let direct = flags & init::DIRECT_IO_ALLOW_MMAP != 0 && minor >= MINOR_DIRECT;
        self.direct_writes.store(direct, Ordering::Release);
        self.io_uring.store(flags & init::OVER_IO_URING != 0, Ordering::Release);
        let (low, high) = (flags & 0xffff_ffff, flags >> 32);
        let out = InitOut {
            minor: minor.min(MINOR).into(),
            max_readahead: asked.max_readahead,
            flags: u32::try_from(low).unwrap_or(0).into(),
            flags2: u32::try_from(high).unwrap_or(0).into(),
            max_background: BACKGROUND_MAX.into(),
            congestion_threshold: (BACKGROUND_MAX / 4 * 3).into(),
            max_write: (IO_BYTES_MAX as u32).into(),
            time_gran: 1.into(),
            max_pages: ((IO_BYTES_MAX / 4096) as u16).into(),
            ..ours
        };
        if let Some(ledger) = &self.options.ledger {
            ledger.begun();
        }
        self.ready.store(true, Ordering::Release);
        Ok(Answer::of(&out))
    }

    /// No WRITEBACK_CACHE: a write is in the file system when it returns. Access lists go with
    /// DONT_MASK, since a default list takes the place of the umask; without them modes come masked.
    fn wanted_flags(&self) -> u64 {
        // A handle that a guest kept would name a node that it no longer knows; and one above another root would lead out of it.
        let whole = self.options.guest.is_none() && self.options.root == InodeId::ROOT;
        let export = if whole { init::EXPORT_SUPPORT } else { 0 };
        let always = init::ASYNC_READ
            | init::ATOMIC_O_TRUNC
            | export
            | init::BIG_WRITES
            | init::ASYNC_DIO
            | init::PARALLEL_DIROPS
            | init::ABORT_ERROR
            | init::MAX_PAGES
            | init::HANDLE_KILLPRIV_V2
            | init::INIT_EXT
            | init::HAS_EXPIRE_ONLY
            // Files open for appending are past the cache, and may be mapped all the same.
            | init::DIRECT_IO_ALLOW_MMAP;
        // With a promise to invalidate, the kernel keeps data until told; without, it drops data
        // whenever time or size are seen to have changed. READDIRPLUS pays only if its
        // attributes may be kept.
        let locks = if self.shares_locks() { init::POSIX_LOCKS | init::FLOCK_LOCKS } else { 0 };
        let acls = if self.fs.keeps_acls() {
            init::DONT_MASK | if self.options.kernel_checks { init::POSIX_ACL } else { 0 }
        } else {
            0
        };
        let rings = if self.options.io_uring { init::OVER_IO_URING } else { 0 };
        always
            | rings
            | locks
            | acls
            | match self.caching() {
                Caching::All => {
                    init::EXPLICIT_INVAL_DATA
                        | init::CACHE_SYMLINKS
                        | init::DO_READDIRPLUS
                        | init::READDIRPLUS_AUTO
                }
                // What a symbolic link says never changes.
                Caching::Attributes => {
                    init::AUTO_INVAL_DATA
                        | init::CACHE_SYMLINKS
                        | init::DO_READDIRPLUS
                        | init::READDIRPLUS_AUTO
                }
                Caching::Nothing => init::AUTO_INVAL_DATA,
            }
    }

    /// Something happened to an inode that the kernel does not know of from its request: what it caches
    /// goes soon.
    pub(super) fn forget_attributes(&self, ino: InodeId) {
        if let Some(misplaced) = self.misplaced.get() {
            misplaced(ino);
        }
    }

    /// The request that is served has changed the mode, which the kernel may not know. It is told at once: after the answer
    /// the caller may have asked for attributes already, which the kernel would throw away, and with them the news that
    /// another node has cut the file. No pages go, which a caller may hold.
    pub(super) fn forget_mode(&self, ino: InodeId) {
        match self.kernel.get() {
            Some(kernel) => kernel.inode(ino, -1, 0),
            _ => self.forget_attributes(ino),
        }
    }

    /// What the kernel wrote went elsewhere than it believes. Where the server tends the pages nothing is sent after the
    /// answer: the kernel would throw away what it asks next, and with it the news of where the file ends. It drops the pages then.
    pub(super) fn forget_size(&self, ino: InodeId) {
        if self.tends_pages && !planted(Bug::MisplacedLater) {
            self.known.misplaced(ino);
        } else {
            self.forget_attributes(ino);
        }
    }

    /// Whether a file opened with these flags goes past the cache for good, so that the kernel takes several
    /// writes to it at once. It drops the pages that a write makes old before the write; not all kernels do so
    /// again after it, so the server does, for the sake of those who map the file.
    pub(super) fn goes_direct(&self, flags: u32) -> bool {
        flags & O_DIRECT != 0
            && self.direct_writes.load(Ordering::Acquire)
            && self.kernel.get().is_some()
    }

    /// Whether a guest reads a file opened with these flags past its pages, and does nothing else with it. A kernel that keeps no attributes
    /// asks for them before each read through its pages, also one with `O_DIRECT`, which has no use for them: a request more.
    pub(super) fn reads_direct(&self, flags: u32) -> bool {
        flags & (O_DIRECT | O_ACCMODE) == O_DIRECT | O_RDONLY
            && self.direct_writes.load(Ordering::Acquire)
            && self.options.guest.is_some()
            && self.caching() == Caching::Nothing
    }

    /// Sees to it that the kernel does not go on with older pages of a file once it was told these attributes.
    /// Either they are gone, or the answer makes it drop them: then it must not be kept. `asked`: the changes that
    /// had ended when they were asked for. `last` reads the last byte.
    pub(super) fn refresh(
        &self,
        attr: &mut Attr,
        what: For,
        asked: u64,
        last: impl FnOnce() -> Option<u8>,
    ) {
        if !self.tends_pages || attr.kind() != S_IFREG {
            return;
        }
        let Some(kernel) = self.kernel.get() else { return };
        match self.known.judge(attr, what, asked) {
            Verdict::Tell | Verdict::Wait => {}
            Verdict::Renew => attr.mtime = unseen(attr),
            Verdict::Drop { extend } => {
                let extend = extend && !planted(Bug::SizeUnstored);
                let byte = if extend { last() } else { None };
                if let Some(byte) = byte {
                    kernel.store(attr.ino, attr.size - 1, &[byte]);
                }
                let done = byte.is_some() || !extend;
                if planted(Bug::DropAfterAnswer) {
                    self.forget_attributes(attr.ino);
                } else if done && !planted(Bug::DropUnsent) {
                    kernel.inode(attr.ino, 0, 0);
                }
                self.known.dropped(attr, done);
            }
        }
    }

    /// Whether the kernel may use what pages it has of a file with these attributes.
    pub(super) fn has_fresh_pages(&self, attr: &Attr) -> bool {
        !self.tends_pages || self.known.is_fresh(attr) || planted(Bug::AttrsOverPages)
    }

    /// Whether it may keep them over an open.
    pub(super) fn may_keep_pages(&self, ino: InodeId, attr: Option<&Attr>) -> bool {
        if self.caching() == Caching::Nothing {
            return false;
        }
        if self.tends_pages {
            attr.is_some_and(|attr| self.known.is_fresh(attr)) || planted(Bug::OpenKeepsPages)
        } else {
            self.fs.has_cached(ino)
        }
    }

    /// What the kernel may cache.
    pub(super) fn caching(&self) -> Caching {
        self.caching.get().copied().unwrap_or(Caching::Nothing)
    }

    /// How long it may keep a name, also one that does not exist. A file system that cannot take names
    /// away relies on the kernel's looking at a directory's permissions before it uses one.
    pub(super) fn name_cache(&self, dir: InodeId, name: &[u8], to: Option<InodeId>) -> Duration {
        match self.caching() {
            Caching::Nothing => return Duration::ZERO,
            Caching::Attributes if !self.options.kernel_checks && !planted(Bug::NamesUnchecked) => {
                return Duration::ZERO;
            }
            _ if to.is_none() && planted(Bug::AbsentKept) => return Duration::from_millis(200),
            _ => {}
        }
        match self.fs.name_cache_ms(dir, name, to) {
            Some(ms) => Duration::from_millis(ms.into()),
            None => Duration::from_secs(CACHE_SECONDS),
        }
    }

    /// For how many seconds it may keep attributes. Of a snapshot they never change, and nobody says when it is gone.
    pub(super) fn attr_seconds(&self, attr: &Attr, until_told: bool) -> u64 {
        match until_told {
            _ if self.fs.is_of_snapshot(attr.ino) => SNAPSHOT_SECONDS,
            true => CACHE_SECONDS,
            false => 0,
        }
    }

    /// Whether it may keep these attributes, and with them what pages it has.
    pub(super) fn may_cache_attr(&self, attr: &Attr) -> bool {
        self.caching() != Caching::Nothing
            && self.has_fresh_pages(attr)
            && self.fs.may_cache_attr(attr)
    }

    /// The same for an inode that it does not know yet.
    fn may_cache_new(&self, attr: &Attr) -> bool {
        self.caching() != Caching::Nothing
            && self.has_fresh_pages(attr)
            && self.fs.may_cache_new_attr(attr)
    }

    /// The same for answers that it takes in without comparing when they were asked for: SETATTR, LINK.
    pub(super) fn may_cache_unversioned(&self, attr: &Attr) -> bool {
        self.caching() == Caching::All && self.fs.may_cache_attr(attr)
    }

    /// Whether it was told this node number and may know it.
    pub fn is_told(&self, ino: InodeId) -> bool {
        self.known.is_told(ino)
    }

    /// Some of the numbers that it was told and may know.
    pub fn some_told(&self, count: usize) -> Vec<InodeId> {
        self.known.some(count)
    }

    fn destroy(&self, _: &Call<'_>, _: Args<'_>, _: &mut dyn ReplySink) -> Result<Answer> {
        self.close_all();
        if let Some(ledger) = &self.options.ledger {
            ledger.ended();
        }
        self.ready.store(false, Ordering::Release);
        Ok(Answer::Empty)
    }

    /// Gives back whatever the kernel left open and known.
    fn close_all(&self) {
        self.unlock_all();
        let opened =
            std::mem::take(&mut *self.opened.write().unwrap_or_else(PoisonError::into_inner));
        opened.into_values().for_each(|entry| self.give_back(entry));
        for ino in self.known.take_all() {
            self.forget_inode(ino);
        }
    }

    /// Goes on where a server was killed that had told its guest of these inodes, so many times each, and had opened and locked these
    /// files for it. How many of them could not be opened again, and how many locks are lost.
    pub fn resume(
        &self,
        told: impl IntoIterator<Item = (InodeId, u64)>,
        opened: impl IntoIterator<Item = OpenFile>,
        locked: &[Locked],
        secret: Option<u128>,
    ) -> (usize, usize) {
        let _ = self.caching.set(Caching::Nothing);
        told.into_iter().for_each(|(ino, lookups)| self.known.restore(ino, lookups));
        let mut lost = 0;
        for OpenFile { fh, ino, flags } in opened {
            self.last_handle.fetch_max(fh, Ordering::Relaxed);
            // Whether it may was asked when it did.
            let handle = match self.fs.open(&Caller::ROOT, ino, flags & (O_ACCMODE | O_DSYNC)) {
                Err(Errno::ISDIR) => self.fs.open_dir(&Caller::ROOT, ino, 0),
                handle => handle,
            };
            let Ok(handle) =
                handle.inspect_err(|e| log::warn!("open file {fh} of inode {ino}: {e}"))
            else {
                lost += 1;
                continue;
            };
            let (direct, reads) = (false, flags & O_ACCMODE != O_WRONLY);
            let appends = goes_past_to_append(flags);
            self.insert(fh, Opened { handle, ino, direct, appends, reads, flags, used: None });
        }
        // Before that somebody else may hold them open: what has no name lives as long as that.
        let unlocked = self.resume_locks(locked, secret);
        self.ready.store(true, Ordering::Release);
        (lost, unlocked)
    }

    /// What [`resume`](Self::resume) of another server takes: the inodes that the guest knows, and what it has open. Nothing may be under
    /// way.
    pub fn state(&self) -> (Vec<(InodeId, u64)>, Vec<OpenFile>) {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.iter().map(|(fh, Entry { opened: open, .. })| OpenFile {
            fh: *fh,
            ino: open.ino,
            flags: open.flags,
        });
        (self.known.all(), opened.collect())
    }

    /// Registers an open file under a number of ours.
    pub(super) fn register(&self, handle: Handle, ino: InodeId, flags: u32) -> u64 {
        let fh = self.last_handle.fetch_add(1, Ordering::Relaxed) + 1;
        let (direct, reads) = (self.goes_direct(flags), flags & O_ACCMODE != O_WRONLY);
        let appends = goes_past_to_append(flags);
        self.insert(fh, Opened { handle, ino, direct, appends, reads, flags, used: None });
        if let Some(ledger) = &self.options.ledger {
            ledger.opened(&OpenFile { fh, ino, flags });
        }
        fh
    }

    /// The open file `fh` of inode `ino`.
    pub(super) fn opened(&self, fh: u64, ino: InodeId) -> Result<Opened> {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        let entry = opened.get(&fh).filter(|entry| entry.opened.ino == ino).ok_or(Errno::BADF)?;
        let used = entry.used.as_ref().filter(|_| self.waiting == Waiting::Nobody);
        Ok(Opened { used: used.cloned(), ..entry.opened.clone() })
    }

    /// What keeps the handle of an open file until a request that is begun has ended.
    pub(super) fn used(&self, fh: u64) -> Result<Arc<AtLast>> {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        opened.get(&fh).and_then(|entry| entry.used.clone()).ok_or(Errno::BADF)
    }

    /// Notes that a file was written to, or synced, and has what a sync takes begun where one is expected.
    pub(super) fn note_rhythm(&self, fh: u64, synced: bool) {
        if self.waiting != Waiting::Together {
            return;
        }
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = opened.get(&fh) else { return };
        if synced {
            entry.rhythm.synced();
        } else if entry.rhythm.wrote() {
            let handle = entry.opened.handle;
            drop(opened);
            self.fs.expect_fsync(handle);
        }
    }

    fn insert(&self, fh: u64, opened: Opened) {
        let used = (self.waiting != Waiting::Each).then(|| {
            let (fs, handle) = (self.fs.clone(), opened.handle);
            self.syncs.at_last(Box::new(move || fs.release(handle)))
        });
        let mut all = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(fh, Entry { opened, used, rhythm: Rhythm::default() });
    }

    /// Gives a handle back to the file system: now, or when what was begun with it has ended.
    pub(super) fn give_back(&self, entry: Entry) {
        match entry.used {
            // Nothing is under way: as others do.
            Some(used) => match Arc::try_unwrap(used) {
                Ok(used) => used.now(),
                Err(used) => drop(used),
            },
            None => self.fs.release(entry.opened.handle),
        }
    }

    /// Takes an open file out of the table; what is left to do is [`give_back`](Self::give_back).
    pub(super) fn unregister(&self, fh: u64, ino: InodeId) -> Option<Entry> {
        let mut opened = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        if opened.get(&fh)?.opened.ino != ino {
            return None;
        }
        if let Some(ledger) = &self.options.ledger {
            ledger.closed(fh);
        }
        opened.remove(&fh)
    }

    /// An answer that tells the kernel a node number, and counts that. `None`: look it up again ([`count_kept`](Self::count_kept)).
    pub(super) fn entry(&self, parent: InodeId, name: &[u8], attr: &Attr) -> Option<EntryOut> {
        let early = planted(Bug::KeptUncounted) && self.may_cache_new(attr);
        // In this order: whoever invalidates must know that the kernel is about to know the inode.
        let is_new = self.count_kept(attr)?;
        let keep = if is_new { self.may_cache_new(attr) } else { self.may_cache_attr(attr) };
        let keep = keep || early;
        Some(entry_out(
            attr,
            self.name_cache(parent, name, Some(attr.ino)),
            self.attr_seconds(attr, keep),
        ))
    }

    /// The same for something made, where the kernel does not compare when it asked: it may keep the
    /// attributes of what it has not known before.
    pub(super) fn new_entry(&self, parent: InodeId, name: &[u8], attr: &Attr) -> EntryOut {
        let is_new = self.count_made(parent, name, attr);
        let keep = is_new && self.may_cache_new(attr) || self.may_cache_unversioned(attr);
        entry_out(
            attr,
            self.name_cache(parent, name, Some(attr.ino)),
            self.attr_seconds(attr, keep),
        )
    }

    /// Looks something up and counts it, until that is kept.
    pub(super) fn until_kept<T>(&self, mut once: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        for _ in 0..LOOKUP_TRIES {
            if let Some(told) = once()? {
                return Ok(told);
            }
        }
        Err(Errno::STALE)
    }

    /// The kernel is about to be told of an inode that was looked up; whether it does not know it. `None`: meanwhile the file
    /// system has forgotten what finds it, for a FORGET of what the kernel was told before. It is not counted then, and must be
    /// looked up again. If it is counted when the file system asks whether it is told ([`forget_inode`](Self::forget_inode)), it
    /// is not forgotten; if it is later, that shows here.
    pub(super) fn count_kept(&self, attr: &Attr) -> Option<bool> {
        let is_new = self.count_lookup(attr);
        if attr.ino == InodeId::ROOT || self.fs.keeps(attr.ino) || planted(Bug::KeptUnasked) {
            return Some(is_new);
        }
        self.uncount_lookup(attr.ino, 1);
        None
    }

    /// The same for something made: it is found again by its name. If that does not lead to it any more, it was told too late, and
    /// has gone or moved: nobody has come to it yet by this answer.
    fn count_made(&self, parent: InodeId, name: &[u8], attr: &Attr) -> bool {
        for _ in 0..LOOKUP_TRIES {
            if let Some(is_new) = self.count_kept(attr) {
                return is_new;
            }
            let found = self.fs.lookup(&Caller::ROOT, parent, name);
            if found.map(|found| found.ino) != Ok(attr.ino) {
                break;
            }
        }
        self.count_lookup(attr)
    }

    /// Counts that the kernel is told of an inode; whether it does not know it.
    fn count_lookup(&self, attr: &Attr) -> bool {
        if attr.ino == InodeId::ROOT {
            return false;
        }
        if let Some(ledger) = &self.options.ledger {
            ledger.told(attr.ino);
        }
        self.known.count(attr)
    }

    /// The kernel dropped `count` of the references that it was given.
    pub(super) fn uncount_lookup(&self, ino: InodeId, count: u64) {
        if let Some(ledger) = &self.options.ledger {
            ledger.forgot(ino, count);
        }
        if self.known.uncount(ino, count) {
            self.forget_inode(ino);
        }
    }

    /// The kernel knew it no more a moment ago. By now it may have been told again, by whom this thread has been overtaken; also by
    /// another server, where this one is the one before it, and late.
    fn forget_inode(&self, ino: InodeId) {
        let told = || match &self.options.told {
            Some(told) => told.is_told(ino),
            None => self.known.is_told(ino),
        };
        self.fs.forget(ino, &|| told() && !planted(Bug::ForgetUnasked));
    }
}

impl<F: FileSystem + ?Sized> Drop for Server<F> {
    fn drop(&mut self) {
        self.close_all();
        if let Some(ledger) = &self.options.ledger {
            ledger.given_back();
        }
    }
}
