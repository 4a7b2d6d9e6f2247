//! Descriptors: which numbers are ours, and the open file descriptions behind them.
//!
//! Invariants:
//! - A table entry is 0 (not ours), [`INTERNAL`], [`LOCKED`], or `ofd + 1` with [`CLOEXEC`].
//! - A number with an entry is an open kernel descriptor too (a placeholder), with the same
//!   close-on-exec flag.
//! - `Ofd::refs` counts the entries of all tables of all processes; `Local::refs` those of the
//!   tables in this address space. When the latter becomes 0 the handle is released, and the reference
//!   of the last entry given back, by the last thread that is at an operation: until then the
//!   description is nobody else's.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use client::fs::Handle;
use client::mutex::Mutex;

use crate::format::{self, OFDS, Ofd, state};
use crate::session;
use crate::sys::{self, err, nr};
use crate::thread;

/// Descriptor numbers looked at; larger ones go to the kernel.
pub const FDS: usize = 65_536;
/// Close-on-exec.
pub const CLOEXEC: u32 = 1 << 31;
/// A kernel descriptor of a locked inode: closing it closes more (see `lock`).
pub const LOCKED: u32 = 0x7fff_fffe;
/// A descriptor of the engine or of LibFS: EBADF for the application.
pub const INTERNAL: u32 = 0x7fff_ffff;

/// What the kernel keeps per process in `files_struct` and `fs_struct`. A vfork child shares the
/// memory but not these, so it gets a copy.
#[derive(Debug)]
pub struct Context {
    /// Table of [`FDS`] entries.
    pub fds: *mut AtomicU32,
    /// One more than the highest number that was ever set, but for the engine's own.
    pub high: AtomicU32,
    /// Inode of the working directory when it is ours, else 0.
    pub cwd: AtomicU64,
    /// File mode creation mask.
    pub umask: AtomicU32,
    /// Context of the parent, for a vfork child.
    pub parent: *mut Context,
    /// The child's references have gone to its new image.
    pub executed: AtomicBool,
    /// What this child of vfork executes is the kernel's (see `path::leave`).
    pub left: AtomicBool,
    /// Memory to be given back by the parent after a vfork child's exec.
    pub scratch: AtomicPtr<u8>,
    /// Its length.
    pub scratch_len: AtomicU64,
}

/// What this process knows of an open file description.
#[derive(Debug)]
pub struct Local {
    refs: AtomicU32,
    /// Operations under way; [`CLOSED`] when `refs` became 0 meanwhile. Also counts, for a moment,
    /// threads that looked at a number just before it was closed: never set to 0 but by [`retire`].
    users: AtomicU32,
    /// Handle plus 1; 0 is none.
    handle: AtomicU64,
}

const CLOSED: u32 = 1 << 31;
/// In `Ofd::lock`: somebody sleeps on it.
const WAITED: u32 = 1 << 31;

static MAIN_FDS: [AtomicU32; FDS] = [const { AtomicU32::new(0) }; FDS];
static LOCALS: [Local; OFDS] = [const {
    Local { refs: AtomicU32::new(0), users: AtomicU32::new(0), handle: AtomicU64::new(0) }
}; OFDS];

struct Main(core::cell::UnsafeCell<Context>);
// SAFETY: all fields but `fds` and `parent` are atomics; those two never change.
unsafe impl Sync for Main {}
static MAIN: Main = Main(core::cell::UnsafeCell::new(Context {
    fds: (&raw const MAIN_FDS).cast_mut().cast(),
    high: AtomicU32::new(0),
    cwd: AtomicU64::new(0),
    umask: AtomicU32::new(0o22),
    parent: core::ptr::null_mut(),
    executed: AtomicBool::new(false),
    left: AtomicBool::new(false),
    scratch: AtomicPtr::new(core::ptr::null_mut()),
    scratch_len: AtomicU64::new(0),
}));

/// The engine's own numbers: where they begin, and one more than the highest.
static OWN: [AtomicU32; 2] = [AtomicU32::new(u32::MAX), AtomicU32::new(0)];

/// Where to begin looking for a free description.
static LOWEST: AtomicU32 = AtomicU32::new(0);

/// The process is ending.
static EXITING: AtomicBool = AtomicBool::new(false);
/// Looks, 0.1 ms apart, at operations of other threads that are under way then.
const EXIT_LOOKS: u32 = 50;

/// More than one thread exists, or did.
pub static THREADS: AtomicBool = AtomicBool::new(false);

/// The process's own context.
pub fn main_context() -> *mut Context {
    MAIN.0.get()
}

/// The calling thread's context.
pub fn context() -> &'static Context {
    // SAFETY: points to MAIN or to a vfork child's copy, alive while the child runs.
    unsafe { &*thread::area().context }
}

/// Whether the caller is a vfork child.
pub fn in_vfork() -> bool {
    !context().parent.is_null()
}

/// The table of `context`.
fn table(context: &Context) -> &'static [AtomicU32] {
    // SAFETY: `fds` is FDS entries, static or mapped for the context's life.
    unsafe { core::slice::from_raw_parts(context.fds, FDS) }
}

/// The calling thread's table.
pub fn fds() -> &'static [AtomicU32] {
    table(context())
}

/// Numbers that may have entries other than [`INTERNAL`].
pub fn used() -> core::ops::Range<usize> {
    0..(context().high.load(Ordering::Acquire) as usize).min(FDS)
}

/// Numbers above those of [`used`] that may be the engine's own, looked at only where it matters.
pub fn own() -> core::ops::Range<usize> {
    let [low, high] = [0, 1].map(|i| OWN[i].load(Ordering::Acquire) as usize);
    low.max(used().end)..high.min(FDS)
}

/// Entry of a number; 0 when out of range.
#[inline(always)]
pub fn entry(fd: i32) -> u32 {
    fds().get(fd as u32 as usize).map_or(0, |e| e.load(Ordering::Acquire))
}

/// Index of the entry's open file description, when it is ours.
#[inline(always)]
pub fn index(entry: u32) -> Option<usize> {
    if entry == 0 || entry & !CLOEXEC >= LOCKED {
        return None;
    }
    Some((entry & !CLOEXEC) as usize - 1).filter(|i| *i < OFDS)
}

/// The open file description with the index.
#[inline(always)]
pub fn ofd(index: usize) -> &'static Ofd {
    &session::ofds()[index]
}

/// Marks a number as the engine's own.
pub fn protect(fd: i32) {
    let Some(entry) = fds().get(fd as u32 as usize) else { return };
    OWN[0].fetch_min(fd as u32, Ordering::AcqRel);
    OWN[1].fetch_max(fd as u32 + 1, Ordering::AcqRel);
    entry.store(INTERNAL, Ordering::Release);
}

/// The number is nobody's again.
fn unprotect(fd: i32) {
    if let Some(entry) = fds().get(fd as u32 as usize) {
        let _ = entry.compare_exchange(INTERNAL, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The file system object keeps a descriptor, or is about to close it.
pub fn watch(fd: i32, kept: bool) {
    if kept {
        protect(fd);
    } else {
        unprotect(fd);
    }
}

/// Marks a number of the application's that is the kernel's, and locked.
pub fn mark_locked(fd: i32) {
    if let Some(e) = fds().get(fd as usize) {
        e.store(LOCKED, Ordering::Release);
        context().high.fetch_max(fd as u32 + 1, Ordering::AcqRel);
    }
}

/// How many numbers this process may have.
fn limit() -> usize {
    let mut limit = [0u64; 2];
    let at = (&raw mut limit) as usize;
    sys::call4(nr::PRLIMIT64, 0, 7, 0, at);
    (limit[0] as usize).clamp(64, FDS)
}

/// How many of them are for the engine and LibFS.
pub fn internal_share() -> usize {
    limit() / 8
}

/// Lowest number for descriptors of the engine and of LibFS.
pub fn internal_min() -> i32 {
    format::engine_numbers(limit()) as i32
}

/// Moves an internal descriptor out of the application's way and protects it.
pub fn raise(fd: i32, cloexec: bool) -> i32 {
    let command = if cloexec { sys::F_DUPFD_CLOEXEC } else { 0 };
    let high = sys::call3(nr::FCNTL, fd as usize, command, internal_min() as usize);
    let fd = if sys::failed(high) {
        fd
    } else {
        sys::call1(nr::CLOSE, fd as usize);
        high as i32
    };
    protect(fd);
    fd
}

/// Closes an internal descriptor.
pub fn close_internal(fd: i32) {
    unprotect(fd);
    sys::call1(nr::CLOSE, fd as usize);
}

/// Says which inode a description is of, so that every process of the session may ask about it.
pub fn set_inode(ofd: &Ofd, ino: u64) {
    let proof = if ino == 0 { 0 } else { crate::fsys::proof(ino) };
    ofd.proof.store(proof, Ordering::Relaxed);
    ofd.ino.store(ino, Ordering::Release);
}

/// Takes a free open file description; `None` when there is none.
pub fn new_ofd(kind: u32, ino: u64, flags: u32) -> Option<usize> {
    let start = LOWEST.load(Ordering::Relaxed) as usize;
    for (index, ofd) in session::ofds().iter().enumerate().skip(start) {
        let (free, taken) = (state::FREE, state::TAKEN);
        if ofd.state.load(Ordering::Relaxed) == free
            && ofd.state.compare_exchange(free, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            ofd.generation.fetch_add(1, Ordering::AcqRel);
            set_inode(ofd, ino);
            ofd.offset.store(0, Ordering::Relaxed);
            ofd.flags.store(flags, Ordering::Relaxed);
            ofd.lock.store(0, Ordering::Relaxed);
            let local = &LOCALS[index];
            local.handle.store(0, Ordering::Relaxed);
            local.refs.store(1, Ordering::Release);
            ofd.refs.store(1, Ordering::Release);
            // What is looked at later than this must not be looked at before (see `open::place`).
            ofd.state.swap(kind, Ordering::SeqCst);
            LOWEST.store(index as u32 + 1, Ordering::Relaxed);
            let high = &session::counters().ofds_high;
            high.fetch_max(index as u32 + 1, Ordering::AcqRel);
            return Some(index);
        }
    }
    LOWEST.store(0, Ordering::Relaxed);
    session::counters().exhausted.fetch_add(1, Ordering::Relaxed);
    None
}

/// Enters the description (whose reference the caller has) under a number.
pub fn set(fd: i32, index: usize, cloexec: bool) {
    let entry = (index as u32 + 1) | if cloexec { CLOEXEC } else { 0 };
    context().high.fetch_max(fd as u32 + 1, Ordering::AcqRel);
    let old = fds()[fd as usize].swap(entry, Ordering::AcqRel);
    drop_entry(old);
}

/// Takes one more reference.
pub fn hold(index: usize) {
    ofd(index).refs.fetch_add(1, Ordering::AcqRel);
    LOCALS[index].refs.fetch_add(1, Ordering::AcqRel);
}

/// Takes a reference of nobody's to a description that somebody has; false if nobody has.
pub fn hold_shared(index: usize) -> bool {
    let refs = &ofd(index).refs;
    refs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n > 0).then_some(n + 1)).is_ok()
}

/// Removes a number's entry and gives its reference back. The kernel's descriptor is not touched.
pub fn clear(fd: i32) {
    if let Some(e) = fds().get(fd as u32 as usize) {
        drop_entry(e.swap(0, Ordering::AcqRel));
    }
}

fn drop_entry(entry: u32) {
    let Some(index) = index(entry) else { return };
    let local = &LOCALS[index];
    if local.refs.fetch_sub(1, Ordering::AcqRel) > 1 {
        return drop_shared(index);
    }
    match local.users.fetch_or(CLOSED, Ordering::AcqRel) {
        0 => retire(index),
        // Closed before, and dup'ed by one who is still at it: that reference waits already.
        users if users & CLOSED != 0 => drop_shared(index),
        _ => {}
    }
}

/// The last entry is closed and nobody at an operation.
#[cold]
fn retire(index: usize) {
    let local = &LOCALS[index];
    // Somebody may have come (and will go through here), or have been quicker: one exchange succeeds.
    let last = local.users.compare_exchange(CLOSED, 0, Ordering::AcqRel, Ordering::Relaxed);
    if last.is_err() {
        return;
    }
    // Its last user may have dup'ed it.
    if local.refs.load(Ordering::Acquire) == 0
        && let Some(handle) = local.handle.swap(0, Ordering::AcqRel).checked_sub(1)
    {
        crate::fsys::release(Handle(handle));
    }
    drop_shared(index);
}

/// Gives back a description that got no number.
pub fn drop_new(index: usize) {
    drop_entry(index as u32 + 1);
}

/// A description that was to become the kernel's, and cannot, goes on here; whether it does.
pub fn stays(index: usize) -> bool {
    let (state, handle) = (&ofd(index).state, &LOCALS[index].handle);
    handle.load(Ordering::Acquire) != 0
        && state
            .compare_exchange(state::LEAVING, state::FILE, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
}

/// The first handle of a description that this process has just made.
pub fn install_new(index: usize, handle: Handle) {
    LOCALS[index].handle.store(handle.0 + 1, Ordering::Release);
}

/// Enters a description that came through exec: its shared reference is in the record.
pub fn inherit(fd: usize, entry: u32) {
    let Some(index) = index(entry) else { return };
    LOCALS[index].refs.fetch_add(1, Ordering::AcqRel);
    fds()[fd].store(entry, Ordering::Release);
    context().high.fetch_max(fd as u32 + 1, Ordering::AcqRel);
}

/// Whether other processes (or an exec under way) refer to the description too.
pub fn shared(index: usize) -> bool {
    ofd(index).refs.load(Ordering::Acquire) > LOCALS[index].refs.load(Ordering::Acquire)
}

/// Gives back a reference that has no entry in this process.
pub fn drop_shared(index: usize) {
    let ofd = ofd(index);
    if ofd.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
        if ofd.state.load(Ordering::Acquire) == state::KERNEL {
            crate::holder::forget(index);
        }
        ofd.ino.store(0, Ordering::Release);
        ofd.state.store(state::FREE, Ordering::Release);
        LOWEST.fetch_min(index as u32, Ordering::Relaxed);
    }
}

/// An operation on an open file description; while it lives, the handle does.
#[derive(Debug)]
pub struct InUse {
    /// Which one.
    pub index: usize,
    counted: bool,
}

impl InUse {
    /// The open file behind `fd`; `None` when it is not ours (any more).
    #[inline(always)]
    pub fn of(fd: i32) -> Option<Self> {
        let index = index(entry(fd))?;
        if !THREADS.load(Ordering::Relaxed) {
            return Some(Self { index, counted: false });
        }
        LOCALS[index].users.fetch_add(1, Ordering::AcqRel);
        let this = Self { index, counted: true };
        // Another thread may have closed it between the two looks.
        (self::index(entry(fd)) == Some(index)).then_some(this)
    }

    /// The description.
    #[inline(always)]
    pub fn ofd(&self) -> &'static Ofd {
        ofd(self.index)
    }

    /// The handle in this process, opened on first use.
    #[inline(always)]
    pub fn handle(&self) -> Result<Handle, isize> {
        match LOCALS[self.index].handle.load(Ordering::Acquire) {
            0 => self.open_handle(),
            h => Ok(Handle(h - 1)),
        }
    }

    #[cold]
    fn open_handle(&self) -> Result<Handle, isize> {
        // See `path::start`: nothing is opened in a vfork child.
        if in_vfork() {
            return Err(err::BADF);
        }
        let ofd = self.ofd();
        let flags = ofd.flags.load(Ordering::Acquire);
        let handle = crate::fsys::reopen(crate::fsys::shown(ofd)?, flags)?;
        Ok(self.install(handle))
    }

    /// Keeps the directory that this is, also for a process which got it by fork or exec.
    #[inline(always)]
    pub fn keep(&self) {
        if LOCALS[self.index].handle.load(Ordering::Acquire) == 0 {
            self.keep_first();
        }
    }

    #[cold]
    fn keep_first(&self) {
        if in_vfork() {
            return;
        }
        let kept = crate::fsys::shown(self.ofd()).map(crate::fsys::keep);
        if let Ok(Some(handle)) = kept {
            self.install(handle);
        }
    }

    /// Makes `handle` the description's, unless another thread was first.
    pub fn install(&self, handle: Handle) -> Handle {
        let slot = &LOCALS[self.index].handle;
        match slot.compare_exchange(0, handle.0 + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => handle,
            Err(first) => {
                crate::fsys::release(handle);
                Handle(first - 1)
            }
        }
    }

    /// Locks the offset.
    pub fn lock(&self) -> OffsetLock {
        OffsetLock::take(self.ofd())
    }
}

impl Drop for InUse {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        if LOCALS[self.index].users.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1 {
            retire(self.index);
        }
    }
}

/// The right to use and change the offset; shared between processes, taken over from the dead.
#[derive(Debug)]
pub struct OffsetLock(&'static Ofd);

impl OffsetLock {
    /// Waits for it.
    #[inline(always)]
    pub fn take(ofd: &'static Ofd) -> Self {
        let tid = thread::tid();
        if ofd.lock.compare_exchange(0, tid, Ordering::Acquire, Ordering::Relaxed).is_err() {
            Self::wait(ofd, tid);
        }
        Self(ofd)
    }

    #[cold]
    fn wait(ofd: &Ofd, tid: u32) {
        let word = &ofd.lock;
        loop {
            let Err(seen) =
                word.compare_exchange(0, tid | WAITED, Ordering::Acquire, Ordering::Acquire)
            else {
                return;
            };
            let waited = seen | WAITED;
            if seen != waited
                && word
                    .compare_exchange(seen, waited, Ordering::Relaxed, Ordering::Relaxed)
                    .is_err()
            {
                continue;
            }
            // 10 ms on a shared futex, then see whether the owner lives. It is this thread if another one, whose number
            // it has now, ended with the lock.
            let owner = seen & !WAITED;
            let ended = owner == tid || {
                let timeout = [0i64, 10_000_000];
                let (at, timeout) = ((&raw const *word) as usize, (&raw const timeout) as usize);
                let woken = sys::call4(nr::FUTEX, at, 0, waited as usize, timeout);
                woken == err::TIMEDOUT && thread::has_ended(owner)
            };
            if ended
                && word
                    .compare_exchange(waited, tid | WAITED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
        }
    }
}

impl Drop for OffsetLock {
    #[inline(always)]
    fn drop(&mut self) {
        if self.0.lock.swap(0, Ordering::Release) & WAITED != 0 {
            sys::call3(nr::FUTEX, (&raw const self.0.lock) as usize, 1, 1);
        }
    }
}

/// In a new image: what threads of the process before it had locked, whose numbers are gone or this thread's.
pub fn free_own_locks() {
    let (tid, made) = (thread::tid(), session::counters().ofds_high.load(Ordering::Acquire));
    for ofd in &session::ofds()[..(made as usize).min(OFDS)] {
        let seen = ofd.lock.load(Ordering::Relaxed);
        if seen & !WAITED == tid
            && ofd.lock.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && seen & WAITED != 0
        {
            sys::call3(nr::FUTEX, (&raw const ofd.lock) as usize, 1, 1);
        }
    }
}

/// One fork at a time.
static FORKING: Mutex<()> = Mutex::new(());
/// What is counted for the child of a fork under way, by number: description plus 1.
static HELD: [AtomicU32; FDS] = [const { AtomicU32::new(0) }; FDS];

/// Takes references for the entries of the calling context's table: before a fork. Other threads go on
/// opening and closing meanwhile: what they change until the child has its copy, it is told by
/// [`after_fork`].
pub fn hold_all() -> impl Drop {
    let forking = FORKING.lock();
    for fd in used() {
        let held = InUse::of(fd as i32).map_or(0, |file| {
            file.ofd().refs.fetch_add(1, Ordering::AcqRel);
            file.index as u32 + 1
        });
        if HELD[fd].load(Ordering::Relaxed) != held {
            HELD[fd].store(held, Ordering::Relaxed);
        }
    }
    forking
}

fn take_held(fd: usize) -> Option<usize> {
    let held = &HELD[fd];
    match held.load(Ordering::Relaxed) {
        0 => None,
        h => {
            held.store(0, Ordering::Relaxed);
            Some(h as usize - 1)
        }
    }
}

/// A fork has failed.
pub fn drop_held() {
    used().filter_map(take_held).for_each(drop_shared);
}

/// The process ends: every entry is given back. Other threads run on for a moment; they find nothing that
/// they could give back again.
pub fn drop_all_shared() {
    // Nobody forks any more: the child would be without its files.
    core::mem::forget(FORKING.lock());
    EXITING.store(true, Ordering::SeqCst);
    let mut patience = EXIT_LOOKS;
    for fd in used() {
        let Some(index) = index(fds()[fd].swap(INTERNAL, Ordering::SeqCst)) else { continue };
        while THREADS.load(Ordering::Relaxed)
            && LOCALS[index].users.load(Ordering::SeqCst) & !CLOSED != 0
            && patience > 0
        {
            patience -= 1;
            let pause = [0i64, 100_000];
            sys::call2(nr::NANOSLEEP, (&raw const pause) as usize, 0);
        }
        // One that somebody is still at stays counted, rather than become another's under his hands.
        if LOCALS[index].users.load(Ordering::SeqCst) & !CLOSED == 0 {
            drop_shared(index);
        }
    }
}

/// Waits for the end of a process that is ending: its other threads would find its files closed.
#[cold]
pub fn park_at_exit() {
    while EXITING.load(Ordering::SeqCst) {
        let pause = [1i64, 0];
        sys::call2(nr::NANOSLEEP, (&raw const pause) as usize, 0);
    }
}

/// In a fork's child: the handles were the parent's, and no other thread is left.
pub fn after_fork() {
    THREADS.store(false, Ordering::Relaxed);
    let made = (session::counters().ofds_high.load(Ordering::Acquire) as usize).min(OFDS);
    for local in &LOCALS[..made] {
        for word in [&local.refs, &local.users] {
            // A store makes a page ours.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
        if local.handle.load(Ordering::Relaxed) != 0 {
            local.handle.store(0, Ordering::Relaxed);
        }
    }
    for fd in used() {
        let (held, is) = (take_held(fd), index(entry(fd as i32)));
        if let Some(index) = is.filter(|is| held == Some(*is)) {
            LOCALS[index].refs.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        if let Some(held) = held {
            // Another thread had closed it when the child got its copy.
            drop_shared(held);
        }
        if is.is_some() {
            // Another thread had just opened it: it is not counted for us, and nobody here knows of it.
            fds()[fd].store(0, Ordering::Release);
            sys::call1(nr::CLOSE, fd);
        }
    }
}

/// Before a vfork: a copy of the context becomes the thread's. `None` when out of memory.
pub fn push_context() -> Option<()> {
    let parent = context();
    let len = FDS * 4;
    let base = sys::map_anon(len + 4096)?;
    let new = (base + len) as *mut Context;
    let copy = base as *mut AtomicU32;
    for fd in used().chain(own()) {
        let file = InUse::of(fd as i32);
        let entry = entry(fd as i32);
        if index(entry) != file.as_ref().map(|file| file.index) {
            // Another thread is opening or closing it.
            continue;
        }
        if entry != 0 {
            // SAFETY: `fd` < FDS, within the fresh mapping.
            unsafe { (*copy.add(fd)).store(entry, Ordering::Relaxed) };
            if let Some(file) = file {
                hold(file.index);
            }
        }
    }
    // SAFETY: the page behind the table is mapped and large enough.
    unsafe {
        new.write(Context {
            fds: copy,
            high: AtomicU32::new(parent.high.load(Ordering::Relaxed)),
            cwd: AtomicU64::new(parent.cwd.load(Ordering::Relaxed)),
            umask: AtomicU32::new(parent.umask.load(Ordering::Relaxed)),
            parent: core::ptr::from_ref(parent).cast_mut(),
            executed: AtomicBool::new(false),
            left: AtomicBool::new(parent.left.load(Ordering::Relaxed)),
            scratch: AtomicPtr::new(core::ptr::null_mut()),
            scratch_len: AtomicU64::new(0),
        });
    }
    let area = thread::area();
    area.context = new;
    area.fds = copy;
    Some(())
}

/// After a vfork, in the parent: back to its own context.
pub fn pop_context() {
    let child = context();
    if child.parent.is_null() {
        return;
    }
    // After exec the new image has the references; here only the local count goes.
    let executed = child.executed.load(Ordering::Acquire);
    for fd in used() {
        let Some(index) = index(entry(fd as i32)) else { continue };
        if executed {
            // The one that `clear` gives back.
            ofd(index).refs.fetch_add(1, Ordering::AcqRel);
        }
        clear(fd as i32);
    }
    let scratch = child.scratch.load(Ordering::Acquire);
    if !scratch.is_null() {
        let len = child.scratch_len.load(Ordering::Acquire) as usize;
        sys::call2(nr::MUNMAP, scratch as usize, len);
    }
    let area = thread::area();
    area.context = child.parent;
    // SAFETY: the parent's context outlives the child's.
    area.fds = unsafe { (*child.parent).fds };
    sys::call2(nr::MUNMAP, child.fds as usize, FDS * 4 + 4096);
}

/// EBADF or the entry's index.
pub fn require(fd: i32) -> Result<usize, isize> {
    index(entry(fd)).ok_or(err::BADF)
}
