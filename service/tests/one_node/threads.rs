//! Threads of one process, and a second client that takes the leases from them, on few files and
//! directories. Each thread does what it draws; what it then sees must be possible whatever the others
//! did meanwhile. The inode cache is so small that inodes come and go all the time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base::random::Random;
use base::{Errno, InodeId};
use client::fs::{
    Attr, FileSystem, Handle, NewNode, O_APPEND, O_EXCL, O_RDONLY, O_RDWR, Rename, Result, S_IFDIR,
    SetAttr,
};
use client::libfs::{Config, LibFs, Limits};

use super::{World, me};

/// Threads of the first client, and of the second.
const THREADS: [u64; 2] = [5, 2];
const LASTS: Duration = Duration::from_millis(2500);
/// Whoever has not ended by then waits for something that does not come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Inodes that the first client remembers.
const INODES: usize = 12;

/// Regions of a file that each thread has for itself, and their length.
const REGIONS: u64 = 8;
const REGION: usize = 700;
const RECORD: usize = 48;
const NAMES: u64 = 64;

fn attach(world: &World, inodes: usize) -> LibFs {
    let config = Config::new(world.dir.join("sock").as_os_str().as_encoded_bytes());
    drop(world.attach());
    let limits = Limits { inodes, ..Limits::SHIPPED };
    LibFs::attach(Config { limits, ..config }).expect("attach")
}

/// The seed of a run, printed by whoever fails.
pub fn seed() -> u64 {
    let fixed = std::env::var("CORBEL_SEED").ok().and_then(|s| s.parse().ok());
    let seed = fixed.unwrap_or_else(|| {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        time.map_or(1, |t| t.as_nanos() as u64)
    });
    println!("CORBEL_SEED={seed}");
    seed
}

/// Runs the threads; fails if one of them does, or hangs. False where nothing was shown: on a starved machine
/// a thread may stop inside an operation for so long that its client is expelled, and loses what it had.
pub fn together(world: &World, threads: Vec<Box<dyn FnOnce() + Send + '_>>) -> bool {
    let (tell, hear) = mpsc::channel();
    let mut left = threads.len();
    std::thread::scope(|scope| {
        let mut started = Vec::new();
        for thread in threads {
            let tell = tell.clone();
            started.push(scope.spawn(move || {
                // Said also when it fails.
                struct Ended(mpsc::Sender<()>);
                impl Drop for Ended {
                    fn drop(&mut self) {
                        let _ = self.0.send(());
                    }
                }
                let _ended = Ended(tell);
                thread();
            }));
        }
        let end = Instant::now() + PATIENCE;
        while left > 0 {
            if hear.recv_timeout(end.saturating_duration_since(Instant::now())).is_err() {
                eprintln!("{left} threads hang");
                // They cannot be ended, and this one would wait for them.
                world.end_by_force();
                std::process::abort();
            }
            left -= 1;
        }
        let failed = started.into_iter().filter_map(|thread| thread.join().err()).last();
        match failed {
            Some(_) if !world.status().replace(' ', "").contains("\"expelled\":0") => {
                eprintln!("a client was expelled: nothing is shown");
                false
            }
            Some(failed) => std::panic::resume_unwind(failed),
            None => true,
        }
    })
}

/// What all threads work on.
struct Scene {
    end: Instant,
    dir: InodeId,
    /// Where things are replaced and removed.
    heap: InodeId,
    /// Written in regions that belong to threads.
    shared: [InodeId; 2],
    log: InodeId,
    /// Attempts to make a name, and how many of them were the first.
    names: AtomicU64,
    tried: [AtomicU32; NAMES as usize],
    made: [AtomicU32; NAMES as usize],
    appended: [AtomicU64; 8],
    failed: AtomicBool,
}

fn mkdir(fs: &LibFs, parent: InodeId, name: &str) -> Attr {
    let node = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: &[] };
    fs.mknod(&me(), parent, name.as_bytes(), &node).expect("mkdir")
}

fn rename(fs: &LibFs, from: (InodeId, &str), to: (InodeId, &str)) -> Result<()> {
    let (name, new_name) = (from.1.as_bytes(), to.1.as_bytes());
    let rename = Rename { parent: from.0, name, new_parent: to.0, new_name, flags: 0 };
    fs.rename(&me(), &rename)
}

/// A version of the file that is replaced: one number, again and again.
fn version(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(400)
}

fn put(fs: &LibFs, dir: InodeId, name: &str, data: &[u8]) {
    let (_, file) = fs.create(&me(), dir, name.as_bytes(), 0o644, O_RDWR | O_EXCL).expect("create");
    assert_eq!(fs.write(file, 0, data, false).expect("write").len, data.len());
    fs.release(file);
}

impl Scene {
    fn new(fs: &LibFs) -> Self {
        let (dir, heap) = (mkdir(fs, InodeId::ROOT, "dir"), mkdir(fs, InodeId::ROOT, "heap"));
        let file = |name: &str| {
            put(fs, dir.ino, name, b"");
            fs.lookup(&me(), dir.ino, name.as_bytes()).expect("it was made").ino
        };
        let scene = Self {
            end: Instant::now() + LASTS,
            dir: dir.ino,
            heap: heap.ino,
            shared: [file("shared0"), file("shared1")],
            log: file("log"),
            names: AtomicU64::new(0),
            tried: [const { AtomicU32::new(0) }; NAMES as usize],
            made: [const { AtomicU32::new(0) }; NAMES as usize],
            appended: [const { AtomicU64::new(0) }; 8],
            failed: AtomicBool::new(false),
        };
        put(fs, heap.ino, "replaced", &version(0));
        put(fs, heap.ino, "here", b"");
        scene
    }
}

/// One thread.
struct Actor<'a> {
    fs: &'a LibFs,
    scene: &'a Scene,
    number: u64,
    random: Random,
    /// What it wrote last, by file and region.
    wrote: BTreeMap<(usize, u64), u64>,
    log_size: u64,
    count: u64,
}

/// Says which thread failed, so that the others end too.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl Actor<'_> {
    fn run(mut self) {
        let _alarm = Alarm(&self.scene.failed);
        while Instant::now() < self.scene.end && !self.scene.failed.load(Ordering::Relaxed) {
            match self.random.below(9) {
                0 => self.write_region(),
                1 => self.read_region(),
                2 => self.append(),
                3 => self.make_first(),
                4 => self.move_it(),
                5 => self.look_for_it(),
                6 => self.replace(),
                7 => self.read_replaced(),
                _ => self.make_own(),
            }
        }
    }

    fn open(&self, ino: InodeId, flags: u32) -> Handle {
        self.fs.open(&me(), ino, flags).expect("a file that stays")
    }

    fn place(&mut self) -> (usize, u64) {
        (self.random.below(2) as usize, self.random.below(REGIONS))
    }

    fn at(region: u64, thread: u64) -> u64 {
        (region * 8 + thread) * REGION as u64
    }

    fn write_region(&mut self) {
        let (file, region) = self.place();
        self.count += 1;
        let value = self.number << 32 | self.count;
        let data = value.to_le_bytes().repeat(REGION / 8 + 1);
        let handle = self.open(self.scene.shared[file], O_RDWR);
        let at = Self::at(region, self.number);
        assert_eq!(self.fs.write(handle, at, &data[..REGION], false).expect("write").len, REGION);
        self.wrote.insert((file, region), value);
        if self.random.chance(1, 20) {
            self.fs.fsync(handle, false).expect("fsync");
        }
        self.fs.release(handle);
        let size = self.fs.getattr(&me(), self.scene.shared[file]).expect("getattr").size;
        assert!(size >= at + REGION as u64, "size {size} after a write at {at}");
    }

    fn read_region(&mut self) {
        let (file, region) = self.place();
        let handle = self.open(self.scene.shared[file], O_RDONLY);
        for thread in [self.number, self.random.below(8)] {
            let mut data = [0; REGION];
            let read = self.fs.read(handle, Self::at(region, thread), &mut data).expect("read");
            let whole = data[..read].chunks_exact(8).all(|c| c == &data[..8]);
            assert!(whole, "half a write");
            let value = u64::from_le_bytes(data[..8].try_into().expect("eight"));
            assert!(value == 0 || value >> 32 == thread, "{value:#x} where {thread} writes");
            if thread == self.number {
                let wrote = self.wrote.get(&(file, region)).copied().unwrap_or(0);
                assert_eq!(value, wrote, "file {file}, region {region}");
            }
        }
        self.fs.release(handle);
    }

    fn append(&mut self) {
        let before = self.fs.getattr(&me(), self.scene.log).expect("getattr").size;
        assert!(before >= self.log_size, "the log became shorter");
        let handle = self.open(self.scene.log, O_RDWR | O_APPEND);
        let n = self.scene.appended[self.number as usize].load(Ordering::Relaxed);
        let record = (self.number << 32 | n).to_le_bytes().repeat(RECORD / 8);
        let written = self.fs.write(handle, 0, &record, false).expect("append");
        self.scene.appended[self.number as usize].store(n + 1, Ordering::Relaxed);
        assert_eq!((written.len, written.offset % RECORD as u64), (RECORD, 0));
        assert!(written.offset >= before, "appended before the end");
        let mut back = [0; RECORD];
        assert_eq!(self.fs.read(handle, written.offset, &mut back), Ok(RECORD));
        assert_eq!(&back[..], &record[..], "appended over it");
        self.log_size = written.offset + RECORD as u64;
        self.fs.release(handle);
    }

    /// Several try to make the same name.
    fn make_first(&mut self) {
        let turn = self.scene.names.fetch_add(1, Ordering::Relaxed) / 3;
        if turn >= NAMES {
            return;
        }
        let name = format!("name{turn}");
        self.scene.tried[turn as usize].fetch_add(1, Ordering::Relaxed);
        match self.fs.create(&me(), self.scene.dir, name.as_bytes(), 0o644, O_RDWR | O_EXCL) {
            Ok((_, handle)) => {
                self.scene.made[turn as usize].fetch_add(1, Ordering::Relaxed);
                self.fs.release(handle);
            }
            Err(e) => assert_eq!(e, Errno::EXIST, "{name}"),
        }
        self.fs.lookup(&me(), self.scene.dir, name.as_bytes()).expect("somebody made it");
    }

    fn move_it(&mut self) {
        let names = if self.random.chance(1, 2) { ["here", "there"] } else { ["there", "here"] };
        let heap = self.scene.heap;
        match rename(self.fs, (heap, names[0]), (heap, names[1])) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => panic!("rename: {e}"),
        }
    }

    /// A listing that comes in one answer shows a moved file once.
    fn look_for_it(&mut self) {
        let mut seen = Vec::new();
        let heap = self.scene.heap;
        let listed = self.fs.readdir(&me(), heap, 0, &mut |entry| {
            if [&b"here"[..], b"there"].contains(&entry.name) {
                seen.push(entry.name.to_vec());
            }
            true
        });
        listed.expect("readdir");
        assert_eq!(seen.len(), 1, "{seen:?}");
    }

    /// As editors save: another file takes the name.
    fn replace(&mut self) {
        self.count += 1;
        let name = format!("new{}", self.number);
        let heap = self.scene.heap;
        put(self.fs, heap, &name, &version(self.number << 32 | self.count));
        rename(self.fs, (heap, &name), (heap, "replaced")).expect("replace");
    }

    /// Whatever is open can be read to its end, whoever takes its name and closes it.
    fn read_replaced(&mut self) {
        let found = self.fs.lookup(&me(), self.scene.heap, b"replaced").expect("it is never away");
        let handle = match self.fs.open(&me(), found.ino, O_RDONLY) {
            Ok(handle) => handle,
            // Replaced and gone in between.
            Err(Errno::NOENT | Errno::STALE) => return,
            Err(e) => panic!("open: {e}"),
        };
        for pause in 0..2 {
            let mut data = vec![0; 4000];
            let read = self.fs.read(handle, 0, &mut data);
            assert_eq!(read, Ok(3200), "an open file, {pause}");
            assert!(data[..3200].chunks_exact(8).all(|c| c == &data[..8]), "two versions in one");
            std::thread::yield_now();
        }
        self.fs.release(handle);
    }

    /// A file of its own comes, changes and goes.
    fn make_own(&mut self) {
        let (me, fs, heap) = (me(), self.fs, self.scene.heap);
        let name = format!("own{}", self.number);
        let data: Vec<u8> = (0..5000u32).map(|i| (i ^ self.count as u32) as u8).collect();
        let (attr, handle) =
            fs.create(&me, heap, name.as_bytes(), 0o600, O_RDWR | O_EXCL).expect("create");
        fs.write(handle, 100, &data, false).expect("write");
        let cut = 100 + self.random.below(4000);
        let set = SetAttr { size: Some(cut), handle: Some(handle), ..SetAttr::default() };
        assert_eq!(fs.setattr(&me, attr.ino, &set).expect("truncate").size, cut);
        let other = format!("link{}", self.number);
        let linked = fs.link(&me, attr.ino, heap, other.as_bytes()).expect("link");
        assert_eq!((linked.nlink, linked.size), (2, cut));
        fs.unlink(&me, heap, name.as_bytes()).expect("unlink");
        let mut back = vec![1; 6000];
        assert_eq!(fs.read(handle, 0, &mut back), Ok(cut as usize));
        assert!(
            back[..100].iter().all(|b| *b == 0)
                && back[100..cut as usize] == data[..cut as usize - 100]
        );
        fs.unlink(&me, heap, other.as_bytes()).expect("unlink");
        assert_eq!(fs.fgetattr(handle).expect("fgetattr").nlink, 0);
        assert_eq!(fs.read(handle, 0, &mut back), Ok(cut as usize), "without a name");
        fs.release(handle);
        assert_eq!(fs.lookup(&me, heap, other.as_bytes()).map(|_| ()), Err(Errno::NOENT));
    }
}

/// What must be there when all have ended.
fn check_scene(fs: &LibFs, scene: &Scene) {
    let log = fs.open(&me(), scene.log, O_RDONLY).expect("open");
    let appended: Vec<u64> = scene.appended.iter().map(|n| n.load(Ordering::Relaxed)).collect();
    let size = fs.fgetattr(log).expect("fgetattr").size;
    assert_eq!(size, appended.iter().sum::<u64>() * RECORD as u64, "{appended:?}");
    let mut data = vec![0; size as usize];
    assert_eq!(fs.read(log, 0, &mut data), Ok(data.len()));
    let mut next = [0; 8];
    for record in data.chunks_exact(RECORD) {
        assert!(record.chunks_exact(8).all(|c| c == &record[..8]), "records that overlap");
        let value = u64::from_le_bytes(record[..8].try_into().expect("eight"));
        let of = &mut next[(value >> 32) as usize];
        assert_eq!(value & 0xffff_ffff, *of, "the records of a thread, in order");
        *of += 1;
    }
    fs.release(log);
    for (name, (tried, made)) in scene.tried.iter().zip(&scene.made).enumerate() {
        let first = u32::from(tried.load(Ordering::Relaxed) > 0);
        assert_eq!(made.load(Ordering::Relaxed), first, "name{name}");
    }
}

#[test]
fn threads_and_another_client_see_nothing_impossible() {
    let (world, seed) = (World::new("threads"), seed());
    let clients = [attach(&world, INODES), attach(&world, 1000)];
    let scene = Scene::new(&clients[0]);
    let mut actors: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::new();
    for (fs, threads) in clients.iter().zip(THREADS) {
        for _ in 0..threads {
            let number = actors.len() as u64;
            let random = Random::new(seed ^ number << 56);
            let (wrote, log_size, count) = (BTreeMap::new(), 0, 0);
            let actor = Actor { fs, scene: &scene, number, random, wrote, log_size, count };
            actors.push(Box::new(|| actor.run()));
        }
    }
    if !together(&world, actors) {
        return;
    }
    clients.iter().for_each(|fs| check_scene(fs, &scene));
    world.check();
}

/// A directory moves while another thread renames one of those that it comes to lie below: the one looks
/// upwards for a cycle, the other comes from above.
#[test]
fn directories_move_while_those_above_are_renamed() {
    let world = World::new("above");
    let fs = attach(&world, 1000);
    let mut below = Vec::from([InodeId::ROOT]);
    for name in ["a", "b", "c"] {
        below.push(mkdir(&fs, below[below.len() - 1], name).ino);
    }
    let top = mkdir(&fs, InodeId::ROOT, "top").ino;
    mkdir(&fs, top, "moved");
    let end = Instant::now() + Duration::from_millis(700);
    let turns = AtomicU64::new(0);
    let (fs, below, turns) = (&fs, &below, &turns);
    let mut threads: Vec<Box<dyn FnOnce() + Send + '_>> = vec![Box::new(move || {
        while Instant::now() < end {
            let (from, to) = ((top, "moved"), (below[3], "moved"));
            rename(fs, from, to).expect("down");
            rename(fs, to, from).expect("up");
            turns.fetch_add(1, Ordering::Relaxed);
        }
    })];
    for (level, name) in ["a", "b", "c"].into_iter().enumerate() {
        threads.push(Box::new(move || {
            while Instant::now() < end {
                rename(fs, (below[level], name), (below[level], "x")).expect("to x");
                rename(fs, (below[level], "x"), (below[level], name)).expect("from x");
            }
        }));
    }
    if !together(&world, threads) {
        return;
    }
    assert!(turns.load(Ordering::Relaxed) > 0);
    world.check();
}

/// The memory of a write is changed by another thread meanwhile (a database whose buffers are shared does that all
/// the time): the checksum of the entry was of other bytes than those in the log, so the log ended there, and
/// fsync waited for ever.
#[test]
fn the_memory_of_a_write_is_changed_meanwhile() {
    const BYTES: usize = 60_000;
    let world = World::new("changed");
    let fs = attach(&world, 1000);
    let (_, file) = fs.create(&me(), InodeId::ROOT, b"shared", 0o644, O_RDWR).expect("create");
    let memory: Vec<AtomicU64> = (0..BYTES / 8).map(|_| AtomicU64::new(0)).collect();
    let end = Instant::now() + Duration::from_millis(700);
    let (fs, memory, turns) = (&fs, &memory, &AtomicU64::new(0));
    let threads: Vec<Box<dyn FnOnce() + Send + '_>> = vec![
        Box::new(move || {
            for n in 1.. {
                memory.iter().for_each(|word| word.store(n, Ordering::Relaxed));
                if Instant::now() >= end {
                    return;
                }
            }
        }),
        Box::new(move || {
            while Instant::now() < end {
                // SAFETY: the words outlive the slice. That they change under it is what is tested; what is
                // read there is copied before anything is made of it.
                let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), BYTES) };
                for len in [BYTES, 700, 5000] {
                    fs.write(file, 0, &bytes[..len], false).expect("write");
                }
                fs.fsync(file, false).expect("fsync");
                turns.fetch_add(1, Ordering::Relaxed);
            }
        }),
    ];
    if !together(&world, threads) {
        return;
    }
    assert!(turns.load(Ordering::Relaxed) > 0);
    assert!(world.status().replace(' ', "").contains("\"refusals\":0"), "{}", world.status());
    world.check();
}
