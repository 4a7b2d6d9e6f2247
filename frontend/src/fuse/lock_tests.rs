//! Locks: requests as bytes, against a file system that grants and refuses by a table of its own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, DirEntry, FileSystem, Handle, Lock, LockKind, LockSpace, NewNode, Rename, Result,
    SetAttr, StatFs, Whence, Written, XattrMode,
};
use client::null::NullFs;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::wire::*;
use super::{Guest, LaterReply, Ledger, LockOwner, Locked, OpenFile, Options, ReplySink, Server};

/// The null back end with locks of whole owners: one lock a file at a time.
#[derive(Default)]
struct Locking {
    null: NullFs,
    held: Mutex<Vec<(InodeId, Lock)>>,
    waiting: Mutex<Vec<u64>>,
    left: Mutex<Vec<InodeId>>,
    event: AtomicU64,
    /// An unlock stands here while somebody has it; how many have come.
    gate: Mutex<()>,
    unlocks: AtomicU64,
    /// What must be written down before it is asked here.
    notes: OnceLock<Arc<Notes>>,
    /// How often it was asked for what somebody else had locked.
    inherited: AtomicU64,
}

/// A ledger in memory, of locks.
#[derive(Default)]
struct Notes {
    rows: Mutex<BTreeMap<LockOwner, (u64, Vec<Lock>)>>,
    full: AtomicBool,
}

impl Notes {
    fn all(&self) -> Vec<Locked> {
        let rows = self.rows.lock().unwrap();
        let of = |((ino, ..), (fh, all)): (&LockOwner, &(u64, Vec<Lock>))| {
            let (ino, fh) = (*ino, *fh);
            all.iter().map(move |lock| Locked { ino, fh, lock: *lock }).collect::<Vec<_>>()
        };
        rows.iter().flat_map(of).collect()
    }

    fn owners(&self) -> Vec<u64> {
        self.all().iter().map(|locked| locked.lock.owner).collect()
    }
}

impl Ledger for Notes {
    fn begun(&self) {}
    fn told(&self, _: InodeId) {}
    fn forgot(&self, _: InodeId, _: u64) {}
    fn opened(&self, _: &OpenFile) {}
    fn closed(&self, _: u64) {}

    fn locked(&self, owner: LockOwner, fh: u64, all: &[Lock]) -> bool {
        let mut rows = self.rows.lock().unwrap();
        let more = rows.get(&owner).map_or(0, |(_, all)| all.len()) < all.len();
        if more && self.full.load(Ordering::SeqCst) {
            return false;
        }
        if all.is_empty() {
            rows.remove(&owner);
        } else {
            rows.insert(owner, (fh, all.to_vec()));
        }
        true
    }

    fn ended(&self) {
        self.rows.lock().unwrap().clear();
    }
}

macro_rules! pass_on {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> $out { self.null.$name($($arg),*) })*
    };
}

impl FileSystem for Locking {
    pass_on! {
        fn lookup(c: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr>;
        fn getattr(c: &Caller<'_>, ino: InodeId) -> Result<Attr>;
        fn setattr(c: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr>;
        fn readlink(c: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>>;
        fn mknod(c: &Caller<'_>, p: InodeId, name: &[u8], node: &NewNode<'_>) -> Result<Attr>;
        fn unlink(c: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()>;
        fn rmdir(c: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()>;
        fn rename(c: &Caller<'_>, rename: &Rename<'_>) -> Result<()>;
        fn link(c: &Caller<'_>, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attr>;
        fn open(c: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle>;
        fn create(c: &Caller<'_>, p: InodeId, n: &[u8], m: u32, f: u32) -> Result<(Attr, Handle)>;
        fn read(handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize>;
        fn write(handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written>;
        fn fallocate(handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()>;
        fn lseek(handle: Handle, offset: u64, whence: Whence) -> Result<u64>;
        fn fgetattr(handle: Handle) -> Result<Attr>;
        fn fsync(handle: Handle, data_only: bool) -> Result<()>;
        fn fsync_inode(c: &Caller<'_>, ino: InodeId) -> Result<()>;
        fn release(handle: Handle) -> ();
        fn readdir(c: &Caller<'_>, i: InodeId, k: u64, each: &mut dyn FnMut(&DirEntry<'_>) -> bool)
            -> Result<()>;
        fn statfs() -> Result<StatFs>;
        fn getxattr(c: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>>;
        fn listxattr(c: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>>;
        fn setxattr(c: &Caller<'_>, i: InodeId, n: &[u8], v: &[u8], m: XattrMode) -> Result<()>;
        fn removexattr(c: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()>;
    }

    fn keeps_locks(&self) -> bool {
        true
    }

    fn inherit(&self, _: Option<u128>) -> Result<()> {
        self.inherited.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn lock(&self, ino: InodeId, lock: &Lock, wait: u64) -> Result<()> {
        if let Some(notes) = self.notes.get().filter(|_| lock.kind != LockKind::None) {
            // What is asked for is there already, and what it has is there still.
            let (all, held) = (notes.all(), self.held.lock().unwrap());
            let noted = |l: &Lock| all.iter().any(|n| n.ino == ino && n.lock == *l);
            assert!(noted(lock), "{lock:?} in {all:?}");
            let own = held.iter().filter(|(i, l)| *i == ino && l.owner == lock.owner);
            assert!(own.map(|(_, l)| l).all(noted), "{held:?} in {all:?}");
        }
        if lock.kind == LockKind::None {
            self.unlocks.fetch_add(1, Ordering::SeqCst);
            drop(self.gate.lock().unwrap());
        }
        let mut held = self.held.lock().unwrap();
        let same = |i: &InodeId, l: &Lock| *i == ino && l.space == lock.space;
        if lock.kind == LockKind::None {
            held.retain(|(i, l)| !(same(i, l) && l.owner == lock.owner));
            self.event.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        let mut waiting = self.waiting.lock().unwrap();
        waiting.retain(|w| *w != wait);
        if held.iter().any(|(i, l)| same(i, l) && l.owner != lock.owner) {
            if wait != 0 {
                waiting.push(wait);
            }
            return Err(Errno::AGAIN);
        }
        held.push((ino, *lock));
        Ok(())
    }

    fn test_lock(&self, ino: InodeId, lock: &Lock) -> Result<Option<Lock>> {
        let held = self.held.lock().unwrap();
        let bars = |(i, l): &&(InodeId, Lock)| *i == ino && l.owner != lock.owner;
        Ok(held.iter().find(bars).map(|(_, l)| *l))
    }

    fn leaves_locks(&self, ino: InodeId) {
        self.left.lock().unwrap().push(ino);
    }

    fn cancel_lock(&self, _: InodeId, wait: u64) {
        self.waiting.lock().unwrap().retain(|w| *w != wait);
    }

    fn lock_event(&self) -> Result<u64> {
        Ok(self.event.load(Ordering::SeqCst))
    }

    fn await_lock_event(&self, seen: u64, limit_ms: u64) {
        let end = Instant::now() + Duration::from_millis(limit_ms);
        while self.event.load(Ordering::SeqCst) == seen && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

type Replies = Arc<Mutex<Vec<Vec<u8>>>>;

/// Collects replies, also those that come later.
#[derive(Default)]
struct Sink(Replies);

impl ReplySink for Sink {
    fn payload(&mut self, _: usize) -> &mut [u8] {
        &mut []
    }

    fn later(&mut self) -> Option<Box<dyn LaterReply>> {
        Some(Box::new(Later(self.0.clone())))
    }

    fn send(&mut self, head: &[u8], _: usize) -> bool {
        self.0.lock().unwrap().push(head.to_vec());
        true
    }
}

struct Later(Replies);

impl LaterReply for Later {
    fn send(self: Box<Self>, reply: &[u8]) {
        self.0.lock().unwrap().push(reply.to_vec());
    }
}

struct World {
    fs: Arc<Locking>,
    server: Arc<Server<Locking>>,
    replies: Replies,
    thread: Option<std::thread::JoinHandle<()>>,
    unique: AtomicU64,
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.close_locks();
        self.fs.event.fetch_add(1, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl World {
    fn new() -> Self {
        let world = Self::on(Arc::new(Locking::default()), None);
        world.begin();
        world
    }

    fn on(fs: Arc<Locking>, notes: Option<Arc<Notes>>) -> Self {
        Self::of(fs, notes, None)
    }

    fn of(fs: Arc<Locking>, notes: Option<Arc<Notes>>, guest: Option<Guest>) -> Self {
        let (ledger, shared_locks) = (notes.map(|notes| notes as Arc<dyn Ledger>), true);
        let options =
            Options { groups_from_proc: false, shared_locks, ledger, guest, ..Options::default() };
        let server = Arc::new(Server::new(fs.clone(), options));
        let runner = server.clone();
        let thread = Some(std::thread::spawn(move || runner.run_locks()));
        let unique = AtomicU64::new(100);
        Self { fs, server, replies: Replies::default(), thread, unique }
    }

    fn begin(&self) {
        let world = self;
        let init = InitIn {
            major: 7.into(),
            minor: 40.into(),
            flags: u32::MAX.into(),
            ..InitIn::default()
        };
        let (error, body) =
            world.call(op::INIT, 0, &[init.as_bytes(), InitInExt::default().as_bytes()]);
        assert_eq!(error, 0);
        let flags = InitOut::read_from_bytes(&body).unwrap().flags.get();
        let locks = init::POSIX_LOCKS | init::FLOCK_LOCKS;
        assert_eq!(u64::from(flags) & locks, locks, "the kernel is told to ask");
    }

    /// Sends a request; its number.
    fn post(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> u64 {
        let unique = self.unique.fetch_add(2, Ordering::SeqCst);
        self.post_as(unique, opcode, nodeid, parts);
        unique
    }

    fn post_as(&self, unique: u64, opcode: u32, nodeid: u64, parts: &[&[u8]]) {
        let body = parts.concat();
        let header = InHeader {
            len: u32::try_from(40 + body.len()).unwrap().into(),
            opcode: opcode.into(),
            unique: unique.into(),
            nodeid: nodeid.into(),
            ..InHeader::default()
        };
        let request = [header.as_bytes(), &body].concat();
        self.server.handle(&request, &mut Sink(self.replies.clone()));
    }

    /// Error and body of the reply to a request, if it is there.
    fn reply(&self, unique: u64) -> Option<(i32, Vec<u8>)> {
        let mut replies = self.replies.lock().unwrap();
        let header = |r: &Vec<u8>| OutHeader::read_from_prefix(r).unwrap().0;
        let at = replies.iter().position(|r| header(r).unique.get() == unique)?;
        let reply = replies.remove(at);
        let header = header(&reply);
        assert_eq!(header.len.get() as usize, reply.len());
        Some((header.error.get(), reply[16..].to_vec()))
    }

    fn wait(&self, unique: u64) -> i32 {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some((error, _)) = self.reply(unique) {
                return error;
            }
            assert!(Instant::now() < end, "no reply");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn call(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> (i32, Vec<u8>) {
        let unique = self.post(opcode, nodeid, parts);
        self.reply(unique).expect("a reply at once")
    }

    fn file(&self, name: &[u8]) -> (u64, u64) {
        let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
        let (error, body) = self.call(op::CREATE, 1, &[arg.as_bytes(), name, b"\0"]);
        assert_eq!(error, 0);
        let (entry, rest) = EntryOut::read_from_prefix(&body).unwrap();
        (entry.nodeid.get(), OpenOut::read_from_prefix(rest).unwrap().0.fh.get())
    }

    fn open(&self, ino: u64) -> u64 {
        let arg = OpenIn { flags: 2.into(), ..OpenIn::default() };
        let (error, body) = self.call(op::OPEN, ino, &[arg.as_bytes()]);
        assert_eq!(error, 0);
        OpenOut::read_from_prefix(&body).unwrap().0.fh.get()
    }

    fn set(&self, ino: u64, fh: u64, owner: u64, kind: u32, flock: u32) -> i32 {
        self.call(op::SETLK, ino, &[&lk(fh, owner, kind, flock)]).0
    }

    fn flush(&self, ino: u64, fh: u64, owner: u64) {
        let arg = FlushIn { fh: fh.into(), lock_owner: owner.into(), ..FlushIn::default() };
        assert_eq!(self.call(op::FLUSH, ino, &[arg.as_bytes()]).0, 0);
    }

    fn release(&self, ino: u64, fh: u64) {
        let arg = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
        assert_eq!(self.call(op::RELEASE, ino, &[arg.as_bytes()]).0, 0);
    }

    fn held(&self) -> Vec<u64> {
        self.fs.held.lock().unwrap().iter().map(|(_, l)| l.owner).collect()
    }
}

fn bytes<T: IntoBytes + Immutable>(value: &T) -> Vec<u8> {
    value.as_bytes().to_vec()
}

fn lk(fh: u64, owner: u64, kind: u32, flags: u32) -> Vec<u8> {
    let end = (i64::MAX as u64).into();
    let lock = FileLock { end, kind: kind.into(), pid: 42.into(), ..FileLock::default() };
    let (fh, owner, lk_flags) = (fh.into(), owner.into(), flags.into());
    bytes(&LkIn { fh, owner, lk: lock, lk_flags, ..LkIn::default() })
}

/// Owners are what a guest says: of those who have nothing nothing is kept.
#[test]
fn who_has_nothing_is_forgotten() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    assert_eq!(world.set(ino, fh, 7, F_WRLCK, 0), 0);
    for owner in 100..200 {
        assert_eq!(world.set(ino, fh, owner, F_WRLCK, 0), -11);
        let waits = world.post(op::SETLKW, ino, &[&lk(fh, owner, F_WRLCK, 0)]);
        world.post(op::INTERRUPT, 0, &[InterruptIn { unique: waits.into() }.as_bytes()]);
        assert_eq!(world.wait(waits), -4);
    }
    assert_eq!(world.server.locks.uses(), 1);
    // Who waits is known, for what it gets is given back at its close.
    let waits = world.post(op::SETLKW, ino, &[&lk(fh, 8, F_WRLCK, 0)]);
    assert_eq!(world.server.locks.uses(), 2);
    assert_eq!(world.set(ino, fh, 7, F_UNLCK, 0), 0);
    assert_eq!((world.wait(waits), world.server.locks.uses()), (0, 1));
    world.flush(ino, fh, 8);
    assert_eq!((world.held(), world.server.locks.uses()), (vec![], 0));
    for owner in 200..300 {
        assert_eq!(world.set(ino, fh, owner, F_WRLCK, LK_FLOCK), 0);
        assert_eq!(world.set(ino, fh, owner, F_UNLCK, LK_FLOCK), 0);
    }
    assert_eq!(world.server.locks.uses(), 0);
}

/// What a guest locks and gives up piece by piece is remembered, and it may not do that for ever.
#[test]
fn a_guests_owners_are_bounded() {
    let guest = Guest { nodes_max: 10, handles_max: 10 };
    let world = World::of(Arc::new(Locking::default()), None, Some(guest));
    world.begin();
    let (ino, fh) = world.file(b"f");
    let mut owner = 0;
    let refused = loop {
        owner += 1;
        let error = world.set(ino, fh, owner, F_WRLCK, 0);
        if error != 0 || owner > 1 << 17 {
            break error;
        }
        let mut piece = LkIn::read_from_bytes(&lk(fh, owner, F_UNLCK, 0)).unwrap();
        piece.lk.end = 5.into();
        assert_eq!(world.call(op::SETLK, ino, &[piece.as_bytes()]).0, 0);
    };
    assert_eq!((refused, owner), (-37, (1 << 16) + 1));
    assert_eq!(world.server.locks.uses(), 1 << 16);
    let second = world.open(ino);
    assert_eq!(world.call(op::SETLKW, ino, &[&lk(second, 1, F_WRLCK, 0)]).0, -37);
    assert_eq!(world.set(ino, fh, 1, F_WRLCK, 0), 0, "who is known");
    world.release(ino, fh);
    assert_eq!(world.server.locks.uses(), 0);
    assert_eq!(world.set(ino, second, owner, F_WRLCK, 0), 0);
}

#[test]
fn locks_go_when_their_owner_closes() {
    let world = World::new();
    let (ino, first) = world.file(b"f");
    let second = world.open(ino);
    // A process: any descriptor of the file that it closes takes all its locks.
    assert_eq!(world.set(ino, first, 7, F_WRLCK, 0), 0);
    assert_eq!(world.set(ino, second, 8, F_WRLCK, 0), -11);
    world.flush(ino, second, 8);
    assert_eq!(world.held(), [7], "somebody else's close");
    world.flush(ino, second, 7);
    assert_eq!(world.held(), [0; 0]);
    // A process that locks anew through another descriptor keeps that lock.
    assert_eq!(world.set(ino, first, 7, F_WRLCK, 0), 0);
    world.flush(ino, first, 7);
    assert_eq!(world.set(ino, second, 7, F_WRLCK, 0), 0);
    world.release(ino, first);
    assert_eq!(world.held(), [7]);
    world.flush(ino, second, 7);
    // An open file: its locks go with it, whoever closes descriptors before.
    assert_eq!(world.set(ino, second, 99, F_WRLCK, 0), 0);
    assert_eq!(world.set(ino, second, 99, F_WRLCK, LK_FLOCK), 0);
    world.flush(ino, second, 7);
    assert_eq!(world.held(), [99, 99]);
    world.release(ino, second);
    assert_eq!(world.held(), [0; 0]);
}

/// A close returns before the kernel's RELEASE is read, or served: the next try finds its locks gone all the same.
#[test]
fn what_was_locked_by_a_file_that_is_being_closed_bars_nobody() {
    for flags in [0, LK_FLOCK] {
        let world = World::new();
        let (ino, first) = world.file(b"f");
        let second = world.open(ino);
        assert_eq!(world.set(ino, first, 99, F_WRLCK, flags), 0);
        assert_eq!(world.set(ino, second, 98, F_WRLCK, flags), -11, "nobody closes it");
        let third = world.open(ino);
        world.flush(ino, third, 7);
        assert_eq!(*world.fs.left.lock().unwrap(), [], "nobody has locked through that one");
        world.flush(ino, first, 7);
        let told: Vec<u64> = world.fs.left.lock().unwrap().iter().map(|ino| ino.0).collect();
        assert_eq!(told, [ino], "before FLUSH is answered");
        std::thread::scope(|scope| {
            scope.spawn(|| world.release(ino, first));
            assert_eq!(world.set(ino, second, 98, F_WRLCK, flags), 0);
        });
        assert_eq!(world.held(), [98]);
        // One of two descriptors: it is not released.
        world.flush(ino, second, 7);
        assert_eq!(world.set(ino, third, 97, F_WRLCK, flags), -11);
    }
}

/// The last descriptor was closed long ago, and the file was mapped until now: RELEASE comes alone, and takes its time.
#[test]
fn what_was_locked_by_a_file_that_is_being_released_bars_nobody() {
    for flags in [0, LK_FLOCK] {
        let world = World::new();
        let (ino, first) = world.file(b"f");
        let second = world.open(ino);
        assert_eq!(world.set(ino, first, 99, F_WRLCK, flags), 0);
        let (gate, before) =
            (world.fs.gate.lock().unwrap(), world.fs.unlocks.load(Ordering::SeqCst));
        std::thread::scope(|scope| {
            scope.spawn(|| world.release(ino, first));
            while world.fs.unlocks.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
            let set = scope.spawn(|| world.set(ino, second, 98, F_WRLCK, flags));
            // It finds that it is barred, most likely.
            std::thread::sleep(Duration::from_millis(20));
            drop(gate);
            assert_eq!(set.join().unwrap(), 0);
        });
        assert_eq!(world.held(), [98]);
    }
}

#[test]
fn what_bars_a_lock_is_shown() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let ask = || {
        let (error, body) = world.call(op::GETLK, ino, &[&lk(fh, 8, F_RDLCK, 0)]);
        assert_eq!(error, 0);
        LkOut::read_from_bytes(&body).unwrap().lk
    };
    assert_eq!(ask().kind.get(), F_UNLCK);
    assert_eq!(world.set(ino, fh, 7, F_WRLCK, 0), 0);
    let bar = ask();
    assert_eq!((bar.kind.get(), bar.pid.get(), bar.start.get()), (F_WRLCK, 42, 0));
}

#[test]
fn who_waits_holds_nobody_up() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    for flags in [0, LK_FLOCK] {
        assert_eq!(world.set(ino, fh, 7, F_WRLCK, flags), 0);
        let waits: Vec<u64> = (20..40)
            .map(|owner| world.post(op::SETLKW, ino, &[&lk(fh, owner, F_WRLCK, flags)]))
            .collect();
        assert!(waits.iter().all(|w| world.reply(*w).is_none()));
        assert_eq!(world.set(ino, fh, 7, F_UNLCK, flags), 0, "others go on");
        let mut left: Vec<(u64, u64)> = waits.into_iter().zip(20..).collect();
        while !left.is_empty() {
            let end = Instant::now() + Duration::from_secs(10);
            let (at, error) = loop {
                let found = (0..left.len()).find_map(|n| Some((n, world.reply(left[n].0)?.0)));
                if let Some(found) = found {
                    break found;
                }
                assert!(Instant::now() < end, "{} wait for ever", left.len());
                std::thread::sleep(Duration::from_millis(1));
            };
            let (_, owner) = left.remove(at);
            assert_eq!((error, world.held()), (0, vec![owner]), "one at a time");
            assert_eq!(world.set(ino, fh, owner, F_UNLCK, flags), 0);
        }
    }
}

#[test]
fn a_signal_ends_the_wait_whenever_it_comes() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    assert_eq!(world.set(ino, fh, 7, F_WRLCK, 0), 0);
    let interrupt = |unique: u64| {
        let arg = bytes(&InterruptIn { unique: unique.into() });
        world.post(op::INTERRUPT, 0, &[&arg]);
    };
    let waits = world.post(op::SETLKW, ino, &[&lk(fh, 8, F_WRLCK, 0)]);
    interrupt(waits);
    assert_eq!(world.wait(waits), -4);
    // The interrupt was read by a faster thread than the request.
    interrupt(5000);
    world.post_as(5000, op::SETLKW, ino, &[&lk(fh, 8, F_WRLCK, 0)]);
    assert_eq!(world.wait(5000), -4);
    assert!(world.fs.waiting.lock().unwrap().is_empty(), "nobody waits any more");
    interrupt(6000);
    assert_eq!(world.set(ino, fh, 7, F_UNLCK, 0), 0);
    assert!(world.replies.lock().unwrap().is_empty(), "interrupts have no reply");
}

#[test]
fn wrong_locks_are_refused_and_unmounting_frees_the_rest() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let set = |arg: &[u8]| world.call(op::SETLK, ino, &[arg]).0;
    assert_eq!(set(&lk(fh, 7, 3, 0)), -22, "no such type");
    assert_eq!(set(&lk(fh + 1, 7, F_RDLCK, 0)), -9, "not open");
    let mut backwards = LkIn::read_from_bytes(&lk(fh, 7, F_RDLCK, 0)).unwrap();
    (backwards.lk.start, backwards.lk.end) = (9.into(), 8.into());
    assert_eq!(set(backwards.as_bytes()), -22);
    (backwards.lk.start, backwards.lk.end) = (0.into(), u64::MAX.into());
    assert_eq!(set(backwards.as_bytes()), -22);
    assert_eq!(set(&[0; 47]), -22, "too short");
    assert_eq!(world.held(), [0; 0]);
    assert_eq!(world.set(ino, fh, 7, F_WRLCK, 0), 0);
    assert_eq!(world.call(op::DESTROY, 0, &[]).0, 0);
    assert_eq!(world.held(), [0; 0]);
}

/// Whenever the server is killed, the next one knows what is locked, and whose it is.
#[test]
fn what_is_locked_is_written_down_before_and_crossed_out_afterwards() {
    let (fs, notes) = (Arc::new(Locking::default()), Arc::new(Notes::default()));
    fs.notes.set(notes.clone()).ok();
    let world = World::on(fs.clone(), Some(notes.clone()));
    world.begin();
    let (ino, first) = world.file(b"f");
    let second = world.open(ino);
    assert_eq!(world.set(ino, first, 7, F_WRLCK, 0), 0);
    assert_eq!(world.set(ino, second, 8, F_WRLCK, 0), -11);
    assert_eq!(world.set(ino, second, 99, F_WRLCK, LK_FLOCK), 0);
    assert_eq!(notes.owners(), [7, 99], "what was refused is not there");
    let waiter = world.post(op::SETLKW, ino, &[&lk(second, 8, F_WRLCK, 0)]);
    assert_eq!(world.reply(waiter), None);
    assert_eq!(notes.owners(), [7, 99], "nor what is waited for");
    notes.full.store(true, Ordering::SeqCst);
    assert_eq!(world.set(ino, second, 9, F_RDLCK, 0), -libc::ENOLCK);
    notes.full.store(false, Ordering::SeqCst);
    // Another server goes on with it; what waited comes again by itself.
    let kept = notes.all();
    let next = World::on(fs.clone(), Some(notes.clone()));
    let handle = |fh| OpenFile { fh, ino: InodeId(ino), flags: 2 };
    let told = [(InodeId(ino), 1)];
    let lost = next.server.resume(told, [handle(first), handle(second)], &kept, None);
    assert_eq!((lost, fs.inherited.load(Ordering::SeqCst)), ((0, 0), 1));
    assert_eq!(notes.all(), kept);
    // By the rules by which the one before would have: a process's go with its FLUSH, an open file's with its RELEASE.
    next.flush(ino, first, 7);
    assert_eq!(notes.owners(), [99]);
    next.release(ino, second);
    assert_eq!(notes.owners(), [0; 0]);
    assert_eq!(next.held().iter().filter(|owner| **owner != 8).count(), 0);
    // It was killed when it had closed the file, and its locks were still to go.
    assert_eq!(next.set(ino, first, 11, F_WRLCK, LK_FLOCK), 0);
    let kept = notes.all();
    let last = World::on(fs.clone(), Some(notes.clone()));
    assert_eq!(last.server.resume(told, [], &kept, None), (0, 0));
    assert!(!last.held().contains(&11) && notes.owners().iter().all(|owner| *owner != 11));
    // Somebody else has it by now.
    let other = Lock { kind: LockKind::Write, ..Lock::all_of(LockSpace::Flock, 1000) };
    let held = Locked { ino: InodeId(ino), fh: first, lock: Lock { owner: 12, ..other } };
    fs.held.lock().unwrap().push((InodeId(ino), other));
    let after = World::on(fs.clone(), Some(notes.clone()));
    notes.locked((InodeId(ino), LockSpace::Flock, 12), first, &[held.lock]);
    assert_eq!(after.server.resume(told, [handle(first)], &[held], None), (0, 1));
    assert!(!notes.owners().contains(&12));
    assert_eq!(after.call(op::DESTROY, 0, &[]).0, 0);
    assert_eq!(notes.all(), []);
}
