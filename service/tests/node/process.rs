//! A process on a rig: LibFS itself, with threads of the system. Whoever of them waits for the service lets the rig go on, so
//! that its time passes when somebody waits, and not otherwise. A test can look at, and hold up, what threads do to memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{ClientId, Errno};
use client::libfs::host::{Door, Host, Memory};
use client::libfs::over_media::OverMedia;
use client::libfs::{Config, LibFsOn, Limits};
use service::core::Event;
use storage::format::control;
use storage::media::{Media, Segment};

use crate::rig::{Hand, Rig};

/// LibFS of such a process.
pub type Process = LibFsOn<OnRig>;

/// How much of the rig's time one look at it takes.
const LOOK: u64 = 100_000;

/// What a thread is about to do to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Bytes of an arena are copied out.
    ReadsArena,
    /// Bytes are put into the log.
    WritesLog,
    /// It waits for the service, with nothing locked that others need for long.
    Waits,
    /// It is about to look whether, or which, inodes are said to be closed.
    LooksAtClosed,
    /// It has taken one of them out.
    TookClosed,
}

/// A look at what a thread does.
type Hook = Arc<dyn Fn(Access) + Send + Sync>;

/// The rig, and what its processes share.
#[derive(Default)]
pub struct World {
    rig: Mutex<Option<Rig>>,
    now: AtomicU64,
    hook: Mutex<Option<Hook>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

/// Worlds by their names, which stand for hostd's sockets.
static WORLDS: Mutex<BTreeMap<Vec<u8>, Arc<World>>> = Mutex::new(BTreeMap::new());
static NAMES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HERE: RefCell<Option<(Arc<World>, Arc<Me>)>> = const { RefCell::new(None) };
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// What others may know of a thread.
#[derive(Debug, Default)]
pub struct Me {
    /// It waits for another thread of its process.
    pub waits: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// With that rig, whose clients' leases count.
    pub fn new(mut rig: Rig) -> Arc<Self> {
        (0..rig.nodes.len()).for_each(|n| rig.event(n, Event::ServesUntil(u64::MAX)));
        let world = Self { now: AtomicU64::new(rig.now), ..Self::default() };
        *locked(&world.rig) = Some(rig);
        Arc::new(world)
    }

    /// A process on node `n`, whose first thread is this one.
    pub fn attach(self: &Arc<Self>, n: usize, limits: Limits) -> Process {
        self.attach_until(n, limits, None)
    }

    /// The same; `stop` says whether a thread that waits shall wait no longer.
    pub fn attach_until(
        self: &Arc<Self>,
        n: usize,
        limits: Limits,
        stop: Option<fn() -> bool>,
    ) -> Process {
        self.attach_as(n, |config| Config { limits, stop, ..config })
    }

    /// The same with anything else.
    pub fn attach_as(self: &Arc<Self>, n: usize, how: impl Fn(Config) -> Config) -> Process {
        let name = format!("{n} {}", NAMES.fetch_add(1, Ordering::SeqCst)).into_bytes();
        locked(&WORLDS).insert(name.clone(), Arc::clone(self));
        self.enter();
        Process::attach(how(Config::new(&name))).expect("it attaches")
    }

    /// This thread is one of a process here.
    pub fn enter(self: &Arc<Self>) -> Arc<Me> {
        let me = Arc::<Me>::default();
        HERE.set(Some((Arc::clone(self), Arc::clone(&me))));
        NUMBER.set(NAMES.fetch_add(1, Ordering::SeqCst));
        me
    }

    /// From now on this sees what threads do.
    pub fn look(&self, hook: impl Fn(Access) + Send + Sync + 'static) {
        *locked(&self.hook) = Some(Arc::new(hook));
    }

    /// Does something with the rig; it is nobody else's meanwhile.
    pub fn with<T>(&self, what: impl FnOnce(&mut Rig) -> T) -> T {
        let mut rig = locked(&self.rig);
        let rig = rig.as_mut().expect("the rig is there until the end");
        let done = what(rig);
        self.now.fetch_max(rig.now, Ordering::SeqCst);
        done
    }

    fn go_on(&self) {
        self.with(|rig| {
            rig.pass(LOOK);
            rig.deliver_all();
        });
        std::thread::yield_now();
    }

    fn saw(&self, access: Access) {
        let hook = locked(&self.hook).clone();
        if let Some(hook) = hook {
            hook(access);
        }
    }
}

fn here<T>(then: impl FnOnce(&Arc<World>, &Arc<Me>) -> T) -> T {
    HERE.with_borrow(|here| {
        let (world, me) = here.as_ref().expect("a thread of a process enters its world first");
        then(world, me)
    })
}

/// Whether that is a word in which an inode is said to be closed.
fn says_closed(at: u64) -> bool {
    (control::CLOSED..control::CLOSED + control::CLOSED_SLOTS as u64 * 8).contains(&at)
}

/// A log, or an arena.
#[derive(Clone, Debug)]
pub struct Mem {
    over: OverMedia,
    world: Arc<World>,
    is_arena: bool,
}

impl Memory for Mem {
    fn load(&self, at: u64, order: Ordering) -> u64 {
        if !self.is_arena && says_closed(at) {
            self.world.saw(Access::LooksAtClosed);
        }
        self.over.load(at, order)
    }

    fn store(&self, at: u64, value: u64, order: Ordering) {
        self.over.store(at, value, order);
    }

    fn swap(&self, at: u64, from: u64, to: u64) -> bool {
        let done = self.over.swap(at, from, to);
        if done && to == 0 && !self.is_arena && says_closed(at) {
            self.world.saw(Access::TookClosed);
        }
        done
    }

    fn add(&self, at: u64, by: u64) -> u64 {
        self.over.add(at, by)
    }

    fn raise(&self, at: u64, value: u64) {
        self.over.raise(at, value);
    }

    fn set(&self, at: u64, bits: u64) -> u64 {
        self.over.set(at, bits)
    }

    fn clear(&self, at: u64, bits: u64) {
        self.over.clear(at, bits);
    }

    fn load32(&self, at: u64, order: Ordering) -> u32 {
        self.over.load32(at, order)
    }

    fn store32(&self, at: u64, value: u32, order: Ordering) {
        self.over.store32(at, value, order);
    }

    fn read(&self, at: u64, buf: &mut [u8]) -> bool {
        if self.is_arena {
            self.world.saw(Access::ReadsArena);
        }
        self.over.read(at, buf)
    }

    fn write(&self, at: u64, data: &[u8]) {
        self.over.write(at, data);
    }

    fn write_persistent(&self, at: u64, data: &[u8]) {
        self.world.saw(Access::WritesLog);
        self.over.write_persistent(at, data);
    }

    fn fence(&self) {
        self.over.fence();
    }

    fn wait(&self, at: u64, seen: u32, _: u64) {
        self.world.saw(Access::Waits);
        if self.load32(at, Ordering::SeqCst) == seen {
            self.world.go_on();
        }
    }
}

/// The rig in the place of hostd.
#[derive(Debug)]
pub struct OfRig {
    world: Arc<World>,
    media: Opaque,
    n: usize,
    client: ClientId,
}

/// The region.
struct Opaque(Arc<dyn Media>);

impl std::fmt::Debug for Opaque {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a region")
    }
}

impl Door for OfRig {
    type Memory = Mem;

    fn arena(&self, _: &Config, arena: u32, _: u64) -> Result<Option<Mem>, Errno> {
        let over = OverMedia::new(Arc::clone(&self.media.0), Segment::Arena(arena));
        Ok(Some(Mem { over, world: Arc::clone(&self.world), is_arena: true }))
    }

    fn ring(&self) {
        self.world.with(|rig| rig.event(self.n, Event::Doorbell(self.client)));
    }
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct OnRig;

impl Host for OnRig {
    type Memory = Mem;
    type Door = OfRig;

    const SPINS: u32 = 1;

    fn realtime() -> u64 {
        1_700_000_000_000_000_000 + Self::monotonic()
    }

    fn tick() -> u64 {
        Self::monotonic()
    }

    fn monotonic() -> u64 {
        here(|world, _| world.now.load(Ordering::SeqCst))
    }

    fn euid() -> u32 {
        0
    }

    fn is_member(_: u32) -> bool {
        false
    }

    fn thread() -> usize {
        NUMBER.get()
    }

    fn yield_now() {
        here(|world, _| Arc::clone(world)).go_on();
    }

    fn spin() {
        std::thread::yield_now();
    }

    fn sleep(_: u64) {
        Self::yield_now();
    }

    fn wait(word: &AtomicU32, seen: u32, _: u64) {
        let me = here(|_, me| Arc::clone(me));
        me.waits.store(true, Ordering::SeqCst);
        // Nobody wakes anybody: each looks again and again.
        if word.load(Ordering::SeqCst) == seen {
            std::thread::sleep(Duration::from_micros(200));
        }
        if word.load(Ordering::SeqCst) != seen {
            me.waits.store(false, Ordering::SeqCst);
        }
    }

    fn wake(_: &AtomicU32, _: u32) {}

    fn attach(config: &Config) -> Result<(Mem, OfRig), Errno> {
        let world = locked(&WORLDS).get(&config.socket).cloned().ok_or(Errno::NOENT)?;
        let n = usize::from(config.socket[0] - b'0');
        let Hand { media, client, log, .. } = world.with(|rig| rig.attach(n, 0));
        let over = OverMedia::new(Arc::clone(&media), log);
        let memory = Mem { over, world: Arc::clone(&world), is_arena: false };
        Ok((memory, OfRig { world, media: Opaque(media), n, client }))
    }
}
