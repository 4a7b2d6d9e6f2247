//! A kernel in front of the server: its attributes, names and pages, as FUSE and its notifications define them (Linux
//! 5.10 to 6.18), and a file system behind it that others change as well and that keeps its promise (`Caching::Attributes`)
//! as LibFS does. The server is the one that is shipped; requests are bytes. Every step is taken in an order drawn
//! from a seed, and what each call finds must have been so at some moment since it began.
//!
//! For tests, and for the simulator's hunt for planted bugs.

mod calls;
mod fiber;
mod volume;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::InodeId;
use base::random::Random;
use client::fs::Invalidate;
use zerocopy::IntoBytes;

use self::fiber::{Fiber, Pause, pause};
use self::volume::Volume;
use super::ReplySink;
use super::server::{Options, Server};
use super::wire::{InHeader, InitIn, InitInExt, MAJOR, MINOR, OutHeader, init, op};
use crate::notify::until_known;
use crate::planted::Bug;

/// Cells of a page (what a write is made of), pages of a file at most.
const PAGE_CELLS: usize = 2;
const PAGES: usize = 3;
const CELLS: usize = PAGES * PAGE_CELLS;
/// Bytes of a cell.
const CELL: usize = 4;
/// The directory, and the files that are open all the time; others are made.
const DIR: u64 = 2;
const FILES: [u64; 2] = [10, 11];
const NAMES: [&[u8]; 2] = [b"a", b"b"];

/// A file.
#[derive(Clone, Copy, Default, Debug)]
struct File {
    cells: [u32; CELLS],
    /// In cells.
    size: usize,
    mode: u32,
    mtime: i64,
    ctime: i64,
}

/// All that the volume says at a moment.
#[derive(Clone, Default, Debug)]
struct Truth {
    names: [Option<u64>; 2],
    files: BTreeMap<u64, File>,
    dir_time: i64,
}

/// The last state of each inode that somebody has been told of, by its number.
#[derive(Clone, Default, Debug)]
struct Since(BTreeMap<u64, usize>);

impl Since {
    fn of(&self, ino: u64) -> usize {
        self.0.get(&ino).copied().unwrap_or(0)
    }

    fn raise(&mut self, ino: u64, to: usize) {
        let at = self.0.entry(ino).or_default();
        *at = to.max(*at);
    }
}

/// What the client of this node has of an inode.
#[derive(Clone, Default, Debug)]
struct Lease {
    held: bool,
    learnt: u64,
    /// The kernel keeps attributes under it, or names.
    kept: bool,
    /// It is being taken back.
    recalled: bool,
    /// Which attributes were told last (the time of change), and since when.
    told: (i64, u64),
    /// Until when names count that were told, and those that may be wrong.
    until: u64,
    stale_until: u64,
}

/// The kernel's inode.
#[derive(Clone, Default, Debug)]
struct Inode {
    /// How often it was told.
    lookups: u64,
    version: u64,
    /// In cells.
    size: usize,
    mtime: i64,
    mode: u32,
    /// Attributes are kept.
    valid: bool,
    pages: [Option<[u32; PAGE_CELLS]>; PAGES],
    locked: [bool; PAGES],
    /// A write makes the file longer.
    unstable: bool,
    /// Somebody changes it: one at a time.
    writing: bool,
    setting: bool,
}

/// A name that the kernel knows, or knows to be none.
#[derive(Clone, Copy, Debug)]
struct Dentry {
    to: Option<u64>,
    until: u64,
}

/// The kernel.
#[derive(Default, Debug)]
struct Kernel {
    versions: u64,
    inodes: BTreeMap<u64, Inode>,
    names: [Option<Dentry>; 2],
    looking: [bool; 2],
    /// The directory's lock.
    dir_locked: bool,
}

impl Kernel {
    /// An inode that is in use, and so is known.
    fn inode(&mut self, ino: u64) -> &mut Inode {
        self.inodes.entry(ino).or_default()
    }

    fn bump(&mut self, ino: u64) {
        self.versions += 1;
        let version = self.versions;
        self.inode(ino).version = version;
    }
}

struct State {
    random: Random,
    /// What the history is about.
    theme: u64,
    /// All states, and from which on each inode must be seen.
    states: Vec<Truth>,
    returned: Since,
    leases: BTreeMap<u64, Lease>,
    handles: Vec<u64>,
    learnt: u64,
    clock: i64,
    writes: u32,
    /// Writes of this node that are under way.
    early: Vec<u32>,
    made: u64,
    ms: u64,
    dir_changed: u64,
    kernel: Kernel,
    /// What a thread of the transport shall drop.
    deferred: Vec<InodeId>,
    wrong: Option<String>,
    trace: Vec<String>,
}

impl State {
    fn truth(&self) -> &Truth {
        // There is one from the beginning.
        &self.states[self.states.len() - 1]
    }

    /// A change, which then is so.
    fn change(&mut self, then: impl FnOnce(&mut Truth, i64)) -> usize {
        self.clock += 1;
        let mut truth = self.truth().clone();
        then(&mut truth, self.clock);
        self.states.push(truth);
        self.states.len() - 1
    }

    fn lease(&mut self, ino: u64) -> &mut Lease {
        self.leases.entry(ino).or_default()
    }

    fn object(&mut self, text: String) {
        self.wrong.get_or_insert(text);
    }
}

/// What all threads of a history share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// The kernel checks permissions.
    checks: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until that gives something.
    fn wait<T>(&self, mut then: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let got = then(&mut self.lock());
            match got {
                Some(got) => return got,
                None => pause(Pause::Blocked),
            }
        }
    }

    /// NOTIFY_INVAL_INODE: whether the kernel knew the inode.
    fn invalidate(&self, ino: u64, offset: i64) -> bool {
        pause(Pause::Point);
        {
            let mut state = self.lock();
            if !state.kernel.inodes.contains_key(&ino) {
                return false;
            }
            state.kernel.bump(ino);
            state.kernel.inode(ino).valid = false;
            state.trace.push(format!("invalidate {ino} {offset}"));
        }
        if offset >= 0 {
            pause(Pause::Point);
            self.drop_pages(ino);
        }
        true
    }

    /// invalidate_inode_pages2: locked pages are waited for.
    fn drop_pages(&self, ino: u64) {
        for page in 0..PAGES {
            self.wait(|state| {
                let inode = state.kernel.inode(ino);
                if inode.locked[page] {
                    return None;
                }
                inode.pages[page] = None;
                Some(())
            });
        }
    }
}

/// The way to the kernel's caches that the server has.
struct Notifier(Arc<Shared>);

impl Invalidate for Notifier {
    fn inode(&self, ino: InodeId, offset: i64, _: i64) {
        self.0.invalidate(ino.0, offset);
    }

    fn entry(&self, _: InodeId, _: &[u8]) {}

    /// A page that is not there is not made by a part of it; but the file is that long.
    fn store(&self, ino: InodeId, offset: u64, data: &[u8]) {
        pause(Pause::Point);
        let mut state = self.0.lock();
        if !state.kernel.inodes.contains_key(&ino.0) {
            return;
        }
        let end = (offset as usize + data.len()).div_ceil(CELL);
        state.kernel.bump(ino.0);
        let inode = state.kernel.inode(ino.0);
        inode.size = inode.size.max(end);
        inode.valid = false;
    }
}

/// One history.
struct World {
    shared: Arc<Shared>,
    server: Arc<Server<Volume>>,
}

#[derive(Default)]
struct Sink {
    room: Vec<u8>,
    reply: Vec<u8>,
}

impl ReplySink for Sink {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        self.room.resize(len, 0);
        &mut self.room
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        self.reply = [head, &self.room[..payload_len]].concat();
        true
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let file = File { size: 4, mode: 0o644, mtime: 1, ctime: 1, ..File::default() };
        let truth = Truth {
            names: [Some(FILES[0]), Some(FILES[1])],
            files: FILES.map(|ino| (ino, file)).into(),
            dir_time: 1,
        };
        let state = State {
            random: Random::new(seed),
            theme: seed % 3,
            states: vec![truth],
            returned: Since::default(),
            leases: BTreeMap::new(),
            handles: Vec::new(),
            learnt: 0,
            clock: 1,
            writes: 0,
            early: Vec::new(),
            made: 0,
            ms: 10_000,
            dir_changed: 0,
            kernel: Kernel::default(),
            deferred: Vec::new(),
            wrong: None,
            trace: Vec::new(),
        };
        let checks = !seed.is_multiple_of(4);
        let shared = Arc::new(Shared { state: Mutex::new(state), checks });
        let options =
            Options { groups_from_proc: false, kernel_checks: checks, ..Options::default() };
        let server = Arc::new(Server::new(Arc::new(Volume(shared.clone())), options));
        server.reaches(Arc::new(Notifier(shared.clone())));
        let deferred = shared.clone();
        server.on_misplaced(Box::new(move |ino| deferred.lock().deferred.push(ino)));
        server.known.use_clock_of(shared.clone());
        Self { shared, server }
    }

    /// Error and body of the reply to a request.
    fn call(&self, opcode: u32, ino: u64, parts: &[&[u8]]) -> (i32, Vec<u8>) {
        let body = parts.concat();
        let header = InHeader {
            len: u32::try_from(size_of::<InHeader>() + body.len()).unwrap_or(0).into(),
            opcode: opcode.into(),
            unique: 7.into(),
            nodeid: ino.into(),
            ..InHeader::default()
        };
        self.shared.lock().trace.push(format!("request {opcode} of {ino}"));
        pause(Pause::Point);
        let mut sink = Sink::default();
        self.server.handle(&[header.as_bytes(), &body].concat(), &mut sink);
        pause(Pause::Point);
        let at = size_of::<OutHeader>();
        let error = sink.reply.get(4..8).and_then(|bytes| bytes.try_into().ok());
        let error = error.map_or(0, i32::from_le_bytes);
        self.shared.lock().trace.push(format!("answer {opcode} of {ino}: {error}"));
        (error, sink.reply.get(at..).unwrap_or(&[]).to_vec())
    }

    fn begin(&self) {
        let flags = init::INIT_EXT | init::AUTO_INVAL_DATA | init::DO_READDIRPLUS;
        let asked = InitIn {
            major: MAJOR.into(),
            minor: MINOR.into(),
            flags: u32::try_from(flags).unwrap_or(0).into(),
            ..InitIn::default()
        };
        self.call(op::INIT, 0, &[asked.as_bytes(), InitInExt::default().as_bytes()]);
        self.mount();
    }

    /// The lease on an inode is given to another node, which changes something with it then.
    fn recall(&self, ino: u64, then: impl FnOnce(&mut Truth, i64)) {
        // One at a time.
        let kept = self.shared.wait(|state| {
            let lease = state.lease(ino);
            if lease.recalled {
                return None;
            }
            lease.recalled = true;
            if lease.kept {
                lease.stale_until = lease.until;
            }
            Some(lease.kept)
        });
        if kept {
            let told = || self.server.is_told(InodeId(ino));
            until_known(told, || self.shared.invalidate(ino, -1), || pause(Pause::Blocked));
        }
        let mut state = self.shared.lock();
        let lease = state.lease(ino);
        (lease.held, lease.kept, lease.recalled) = (false, false, false);
        let at = state.change(then);
        state.returned.raise(ino, at);
    }
}

/// The planted bugs that these histories show.
pub const BUGS: &[Bug] = &[
    Bug::PagesByTime,
    Bug::DropUnsent,
    Bug::DropAfterAnswer,
    Bug::DropUnawaited,
    Bug::OwnWriteTrusted,
    Bug::SizeUnstored,
    Bug::OpenKeepsPages,
    Bug::AttrsOverPages,
    Bug::NamesUnawaited,
    Bug::AbsentKept,
    Bug::NamesUnchecked,
    Bug::KeptUncounted,
    Bug::UnknownSkipped,
    Bug::CutTold,
    Bug::ReadUnnoted,
    Bug::CutAsked,
    Bug::MostUnsettled,
    Bug::MisplacedLater,
];

/// How often all threads wait for each other before that counts as wrong.
const STUCK: usize = 400;

/// What went wrong in the history of this seed, if anything.
pub fn history(seed: u64) -> Result<(), String> {
    let world = Arc::new(World::new(seed));
    world.begin();
    let shared = world.shared.clone();
    for _ in 0..40 {
        // Some at once; then time passes, which is when the kernel has taken everything in.
        let count = 1 + shared.lock().random.below(4);
        let mut fibers = Vec::new();
        let cuts = count == 1;
        for number in 0..count {
            fibers.push(calls::draw(&world, number, cuts)?);
        }
        run(&shared, &world, &mut fibers)
            .map_err(|text| format!("seed {seed}: {text}\n{}", shared.lock().trace.join("\n")))?;
        world.forget();
        let mut state = shared.lock();
        let pass = [0, 110, 400, 3000][state.random.below(4) as usize];
        state.ms += pass;
        let last = state.trace.len().saturating_sub(120);
        state.trace.drain(..last);
        state.trace.push(format!("{pass} ms pass"));
    }
    Ok(())
}

fn run(shared: &Shared, world: &Arc<World>, fibers: &mut Vec<Fiber>) -> Result<(), String> {
    let mut stuck = 0;
    let mut slept = false;
    while !fibers.is_empty() {
        let at = shared.lock().random.below(fibers.len() as u64) as usize;
        match fibers[at].resume() {
            None => {
                fibers.remove(at);
                stuck = 0;
            }
            Some(Pause::Point) => stuck = 0,
            Some(Pause::Blocked) => stuck += 1,
            Some(Pause::Sleeps) => (stuck, slept) = (stuck + 1, true),
        }
        if let Some(text) = shared.lock().wrong.take() {
            return Err(text);
        }
        if stuck > 40 && slept {
            shared.lock().ms += 20;
            (stuck, slept) = (0, false);
        }
        if stuck > STUCK {
            return Err(format!("all wait: {}", fibers.len()));
        }
        let deferred = std::mem::take(&mut shared.lock().deferred);
        for ino in deferred {
            let world = world.clone();
            fibers.push(Fiber::new(move || {
                world.shared.invalidate(ino.0, 0);
            })?);
        }
    }
    Ok(())
}

/// Waits in the server, in a history; false: this is none.
pub(super) fn wait_here() -> bool {
    let here = fiber::is_here();
    pause(Pause::Blocked);
    here
}

impl Shared {
    /// The history's clock, in milliseconds.
    pub(super) fn now(&self) -> u64 {
        self.lock().ms
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
