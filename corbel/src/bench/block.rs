//! Block devices: NBD beside nbdkit, the cache and its parts beside the same path without them, pools with stores that
//! are lost or hang.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::block::device::{Device, Disk, Op, Outcome, Request, Threads};
use ::block::layer::{Config, Layered};
use ::block::nbd::Address;
use ::block::nbd::client::Client;
use ::block::nbd::proto::{command, flag};
use ::block::pool::dir::Dir;
use ::block::pool::store::Store;
use ::block::pool::{Image, Pool, Spec, StoreSpec};
use base::Errno;
use base::random::Random;

use super::steady::turns;
use super::world::{World, scratch};
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};

/// Bytes of the disks that NBD is measured on.
const DISK: u64 = 64 << 20;
const BLOCK: u32 = 4096;

fn failed(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("{what}: {error}"), "run with --log-level debug")
}

/// A server in a process of its own; ended when dropped.
struct Served(Child, PathBuf);

impl Served {
    fn start(mut command: Command, socket: PathBuf) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context(super::load::name(&command))?;
        let mut served = Self(child, socket);
        let end = Instant::now() + Duration::from_secs(10);
        while served.client().is_err() {
            if Instant::now() > end || served.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Err(failed(&super::load::name(&command), "it does not serve"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(served)
    }

    fn client(&self) -> std::io::Result<Client> {
        let mut client = Client::greet(&Address::Unix(self.1.clone()))?;
        client.agree("", false)?;
        Ok(client)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Medians of a 4 KiB write with a flush after it, and of a 4 KiB read, one at a time; then µs for each of many durable
/// writes and many reads, 32 in flight.
fn latencies(served: &Served, count: usize) -> Result<[f64; 4]> {
    let mut client = served.client().map_err(|e| failed("connecting", e))?;
    let mut random = Random::new(1);
    let data = vec![0x5a; BLOCK as usize];
    let mut place = move || random.below(DISK / u64::from(BLOCK)) * u64::from(BLOCK);
    let told = |e: std::io::Error| failed("a request", e);
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let begun = Instant::now();
        let at = place();
        client.call((command::WRITE, 0), at, BLOCK, &data).map_err(told)?;
        client.call((command::FLUSH, 0), 0, 0, b"").map_err(told)?;
        writes.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    for _ in 0..count {
        let begun = Instant::now();
        client.call((command::READ, 0), place(), BLOCK, b"").map_err(told)?;
        reads.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let mut deep = |what: (u16, u16), data: &[u8]| -> Result<f64> {
        let begun = Instant::now();
        let (mut asked, mut answered) = (0, 0);
        while answered < count {
            let mut out = Vec::new();
            while asked < count && asked - answered < 32 {
                client.put(&mut out, what, place(), BLOCK, data);
                asked += 1;
            }
            client.send(&out).map_err(told)?;
            // Those that have come, at least one.
            client.reply().map_err(told)?;
            answered += 1;
            while answered < asked && client.has_reply() {
                client.reply().map_err(told)?;
                answered += 1;
            }
        }
        Ok(begun.elapsed().as_secs_f64() * 1e6 / count as f64)
    };
    let deep_writes = deep((command::WRITE, flag::FUA), &data)?;
    let deep_reads = deep((command::READ, 0), b"")?;
    Ok([median(writes), median(reads), deep_writes, deep_reads])
}

/// NBD over files of the volume, one replica and several, beside `nbdkit memory`.
pub fn nbd(bench: &Bench<'_>) -> Result<Measured> {
    let one = Bench { replicas: 1, ..*bench };
    let alone = World::start(&one, World::plan(&one), &[])?;
    let chain = World::start(bench, World::plan(bench), &[])?;
    let serve = |world: &World| -> Result<Served> {
        let socket = world.scratch().join("nbd.sock");
        let mut command = world.local.command(1)?;
        command.args(["nbd", "volume:/disk", "--size", "64MiB", "--listen"]).arg(&socket);
        Served::start(command, socket)
    };
    let (single, replicated) = (serve(&alone)?, serve(&chain)?);
    let socket = alone.scratch().join("nbdkit.sock");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(&socket).arg("memory").arg(DISK.to_string());
    let nbdkit = Served::start(command, socket);
    if let Err(failure) = &nbdkit {
        bench.out.step(format!("  without nbdkit (apt-get install nbdkit): {}", failure.message));
    }
    let count = if bench.quick { 300 } else { 2000 };
    let [s0, s1, s2, s3, r0, r1, r2, r3, k0, k1, k2, k3] = turns(|| {
        let s = latencies(&single, count)?;
        let k = match &nbdkit {
            Ok(nbdkit) => latencies(nbdkit, count)?,
            Err(_) => [f64::NAN; 4],
        };
        let r = latencies(&replicated, count)?;
        Ok([s[0], s[1], s[2], s[3], r[0], r[1], r[2], r[3], k[0], k[1], k[2], k[3]])
    })?;
    let mut figures = vec![
        ("write_flush_us", r0),
        ("read_us", r1),
        ("write_fua_qd32_us", r2),
        ("read_qd32_us", r3),
        ("single_write_flush_us", s0),
        ("single_read_us", s1),
        ("single_write_fua_qd32_us", s2),
        ("single_read_qd32_us", s3),
        ("replicas", f64::from(bench.replicas)),
    ];
    if nbdkit.is_ok() {
        // Of four figures each: the geometric mean.
        let mean = |ratios: [f64; 4]| ratios.iter().product::<f64>().powf(0.25);
        figures.extend([
            ("nbdkit_write_flush_us", k0),
            ("nbdkit_read_us", k1),
            ("nbdkit_write_fua_qd32_us", k2),
            ("nbdkit_read_qd32_us", k3),
            ("vs_nbdkit", mean([s0 / k0, s1 / k1, s2 / k2, s3 / k3])),
            ("replicated_vs_nbdkit", mean([r0 / k0, r1 / k1, r2 / k2, r3 / k3])),
        ]);
    }
    Ok(figures)
}

/// A store that takes its time, or all of it.
struct Slow {
    store: Dir,
    takes: Duration,
    hangs: Mutex<bool>,
    goes_on: Condvar,
}

impl Slow {
    fn new(dir: &Path, takes: Duration) -> Result<Arc<Self>> {
        let store = Dir::open(dir).context(dir.display())?;
        Ok(Arc::new(Self { store, takes, hangs: Mutex::new(false), goes_on: Condvar::new() }))
    }

    fn hang(&self, hangs: bool) {
        *self.hangs.lock().unwrap_or_else(PoisonError::into_inner) = hangs;
        self.goes_on.notify_all();
    }

    fn enter(&self) -> &Dir {
        let mut hangs = self.hangs.lock().unwrap_or_else(PoisonError::into_inner);
        while *hangs {
            hangs = self.goes_on.wait(hangs).unwrap_or_else(PoisonError::into_inner);
        }
        drop(hangs);
        if !self.takes.is_zero() {
            std::thread::sleep(self.takes);
        }
        &self.store
    }
}

impl Store for Slow {
    fn put(&self, name: &str, parts: &[&[u8]]) -> std::result::Result<(), Errno> {
        self.enter().put(name, parts)
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> std::result::Result<Vec<u8>, Errno> {
        self.enter().get(name, offset, len)
    }

    fn list(&self, image: &str) -> std::result::Result<Vec<String>, Errno> {
        self.enter().list(image)
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Errno> {
        self.enter().remove(name)
    }

    fn lock(&self, image: &str) -> std::result::Result<block::pool::ground::Lock, Errno> {
        self.store.lock(image)
    }
}

/// A pool in memory, gone when dropped.
struct Stage {
    dir: PathBuf,
    stores: Vec<Arc<Slow>>,
    pool: Arc<Pool>,
}

impl Stage {
    fn new(coding: &str, takes: Duration, size: u64, object_bytes: u32) -> Result<Self> {
        let dir = scratch()?;
        let told = |error: String| failed("a pool", error);
        let coding: ::block::pool::Coding = coding.parse().map_err(told)?;
        let (mut stores, mut specs) = (Vec::new(), Vec::new());
        for i in 0..coding.width() {
            let path = dir.join(format!("s{i}"));
            std::fs::create_dir(&path).context(path.display())?;
            let at = format!("dir:{}", path.display());
            specs.push(StoreSpec { domain: format!("d{i}"), at, out: false });
            stores.push(Slow::new(&path, takes)?);
        }
        let spec = Spec::new(coding, specs).map_err(told)?;
        let over = stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
        let pool = Arc::new(Pool::over(spec, over).map_err(told)?);
        pool.create("vm", size, object_bytes).map_err(told)?;
        Ok(Self { dir, stores, pool })
    }

    fn open(&self) -> Result<Image> {
        Image::open(Arc::clone(&self.pool), "vm", false).map_err(|error| failed("vm", error))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for store in &self.stores {
            store.hang(false);
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Requests a second, so many in flight.
fn rate(
    device: &dyn Device,
    count: usize,
    depth: usize,
    mut next: impl FnMut() -> Op,
) -> Result<f64> {
    let (to, from) = sync_channel(depth);
    let begun = Instant::now();
    for i in 0..count + depth {
        if i >= depth {
            let outcome: Outcome = from.recv().map_err(|e| failed("a request", e))?;
            outcome.map_err(|e| failed("a request", e))?;
        }
        if i < count {
            let to = to.clone();
            let done = Box::new(move |outcome| drop(to.send(outcome)));
            device.submit(Request { op: next(), done });
        }
    }
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// The layer over a pool of stores that take a millisecond, beside the same with everything switched off.
pub fn cache(bench: &Bench<'_>) -> Result<Measured> {
    const SIZE: u64 = 64 << 20;
    let takes = Duration::from_millis(1);
    let count = if bench.quick { 200 } else { 1500 };
    let stage = Stage::new("replicated:3", takes, SIZE, 64 << 10)?;
    let image = stage.open()?;
    for at in (0..SIZE).step_by(1 << 20) {
        image.write(at, &vec![1; 1 << 20]).map_err(|e| failed("filling", e))?;
    }
    let below: Arc<dyn Device> = Arc::new(Threads::new(image, 16).context("threads")?);
    let on = Config::default();
    let off = Config { cache_bytes: 0, coalesce: false, read_ahead: 0, ..on };
    let layered =
        |config| Layered::new(Arc::clone(&below), config).context("starting the layer's thread");
    let read = |offset| Op::Read { offset, len: BLOCK };
    // The image remembers the heads of objects that it has read: of all of them, before anything is measured.
    let mut at = 0;
    rate(&*below, (SIZE >> 16) as usize, 16, || {
        at += 64 << 10;
        read(at % SIZE)
    })?;
    let mut start = 0;
    let [seq_on, seq_off, rand_on, rand_off] = turns(|| {
        start += 4 << 20;
        let random = |config, seed| {
            let device = layered(config)?;
            let mut random = Random::new(seed);
            rate(&device, count, 16, || read(random.below(SIZE / 4096) * 4096))
        };
        let sequential = |config| {
            let device = layered(config)?;
            let mut at = start;
            rate(&device, count, 1, || {
                at = (at + u64::from(BLOCK)) % SIZE;
                read(at)
            })
        };
        // Places of their own, and now one first, now the other.
        let random = if start % (8 << 20) == 0 {
            let first = random(on, start)?;
            [first, random(off, start + 1)?]
        } else {
            let first = random(off, start)?;
            [random(on, start + 1)?, first]
        };
        let sequential = [sequential(off)?, sequential(on)?];
        // What was read ahead last comes before the next begins.
        std::thread::sleep(Duration::from_millis(50));
        Ok([sequential[1], sequential[0], random[0], random[1]])
    })?;
    let with = layered(on)?;
    let mut at = 0;
    rate(&with, count, 16, || {
        at = (at + u64::from(BLOCK)) % SIZE;
        Op::Write { offset: at, data: vec![2; BLOCK as usize], fua: false }
    })?;
    let stats = with.stats();
    drop(with);
    let [cache_gain, ahead_gain, merge_gain] = alone(&below, count, SIZE)?;
    let [large, large_past, flush_ms] = written_back(&below, count, SIZE)?;
    Ok(vec![
        ("seq_ratio", seq_on / seq_off),
        ("rand_ratio", rand_on / rand_off),
        ("coalesce_gain", stats.writes as f64 / stats.device_writes.max(1) as f64),
        ("seq_per_s", seq_on),
        ("rand_per_s", rand_on),
        ("cache_alone_gain", cache_gain),
        ("read_ahead_alone_gain", ahead_gain),
        ("merge_alone_gain", merge_gain),
        ("write_back_128k_ratio", large / large_past),
        ("flush_beside_writes_ms", flush_ms),
    ])
}

/// What each mechanism gains where it is the only one that is switched on, beside none: the cache where the same is read again, read-ahead where
/// is read in order, merging where is written in order.
fn alone(below: &Arc<dyn Device>, count: usize, size: u64) -> Result<[f64; 3]> {
    let none = Config { cache_bytes: 0, coalesce: false, read_ahead: 0, ..Config::default() };
    let usual = Config::default();
    let layered =
        |config| Layered::new(Arc::clone(below), config).context("starting the layer's thread");
    let read = |offset| Op::Read { offset, len: BLOCK };
    let mut turn = 0;
    let gains = turns(|| {
        turn += 1;
        let again = |config| {
            let device = layered(config)?;
            let mut random = Random::new(turn);
            // So few places that each is read several times.
            let places = (count as u64 / 8).max(1);
            rate(&device, count, 16, || read(random.below(places) * 64 * 4096 % size))
        };
        let in_order = |config| {
            let device = layered(config)?;
            let mut at = turn * (4 << 20);
            rate(&device, count / 2, 1, || {
                at = (at + u64::from(BLOCK)) % size;
                read(at)
            })
        };
        let writes = |config| {
            let device = layered(config)?;
            let mut at = turn * (4 << 20);
            rate(&device, count, 16, || {
                at = (at + u64::from(BLOCK)) % size;
                Op::Write { offset: at, data: vec![3; BLOCK as usize], fua: false }
            })
        };
        let cached = Config { cache_bytes: usual.cache_bytes, ..none };
        let ahead = Config { read_ahead: usual.read_ahead, ..cached };
        let merged = Config { coalesce: true, ..none };
        let gains = [
            again(cached)? / again(none)?,
            in_order(ahead)? / in_order(cached)?,
            writes(merged)? / writes(none)?,
        ];
        std::thread::sleep(Duration::from_millis(50));
        Ok(gains)
    })?;
    Ok(gains)
}

/// Random writes of 128 KiB, 16 at a time, with write-back and past the layer, in bytes a second; then how long a write of 4 KiB with a flush takes
/// beside random writes of 4 KiB, 16 at a time, at the worst of some, in milliseconds.
fn written_back(below: &Arc<dyn Device>, count: usize, size: u64) -> Result<[f64; 3]> {
    const LARGE: usize = 128 << 10;
    let back = Config { write_back: true, cache_bytes: 8 << 20, ..Config::default() };
    let layered = || Layered::new(Arc::clone(below), back).context("starting the layer's thread");
    let write = |random: &mut Random, len: usize| {
        let offset = random.below(size / len as u64) * len as u64;
        Op::Write { offset, data: vec![4; len], fua: false }
    };
    let mut seed = 0;
    let [cached, past] = turns(|| {
        seed += 1;
        let device = layered()?;
        let mut random = Random::new(seed);
        let begun = Instant::now();
        rate(&device, count, 16, || write(&mut random, LARGE))?;
        // What is in the cache when it ends is written as well.
        drop(device);
        let cached = (count * LARGE) as f64 / begun.elapsed().as_secs_f64();
        let mut random = Random::new(seed);
        let past = rate(&**below, count, 16, || write(&mut random, LARGE))? * LARGE as f64;
        Ok([cached, past])
    })?;
    let device = layered()?;
    let over = std::sync::atomic::AtomicBool::new(false);
    let goes_on = || !over.load(std::sync::atomic::Ordering::Relaxed);
    let worst = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut random = Random::new(9);
            while goes_on() {
                rate(&device, 256, 16, || write(&mut random, BLOCK as usize))?;
            }
            Ok::<_, Failure>(())
        });
        let mut random = Random::new(10);
        let worst = (0..8).try_fold(0.0, |worst: f64, _| {
            let begun = Instant::now();
            rate(&device, 1, 1, || write(&mut random, BLOCK as usize))?;
            rate(&device, 1, 1, || Op::Flush)?;
            Ok::<_, Failure>(worst.max(begun.elapsed().as_secs_f64() * 1e3))
        });
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        flood.join().unwrap_or_else(|_| Err(failed("writes", "their thread has ended")))?;
        worst
    })?;
    Ok([cached, past, worst])
}

/// RS(6, 3) over nine directories in memory: writes; reads with three of them lost; reads with one that hangs.
pub fn pool(bench: &Bench<'_>) -> Result<Measured> {
    const OBJECT: u64 = 4 << 20;
    let size = if bench.quick { 16 * OBJECT } else { 64 * OBJECT };
    let stage = Stage::new("rs:6,3", Duration::ZERO, size, OBJECT as u32)?;
    let told = |errno: Errno| failed("the image", errno);
    let image = stage.open()?;
    let mut data = vec![0; OBJECT as usize];
    Random::new(1).fill(&mut data);
    let mb_s = |begun: Instant| size as f64 / 1e6 / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    for at in (0..size).step_by(OBJECT as usize) {
        image.write(at, &data).map_err(told)?;
    }
    let write_mb_s = mb_s(begun);
    let mut buf = vec![0; OBJECT as usize];
    let mut read_all = || -> Result<f64> {
        let begun = Instant::now();
        for at in (0..size).step_by(OBJECT as usize) {
            image.read(at, &mut buf).map_err(told)?;
        }
        Ok(mb_s(begun))
    };
    let lose = |lost: bool| -> Result<()> {
        for i in 0..3 {
            let (from, to) = (stage.dir.join(format!("s{i}")), stage.dir.join(format!("lost{i}")));
            let (from, to) = if lost { (from, to) } else { (to, from) };
            std::fs::rename(&from, &to).context(from.display())?;
        }
        Ok(())
    };
    let [healthy, degraded] = turns(|| {
        let healthy = read_all()?;
        lose(true)?;
        let degraded = read_all();
        lose(false)?;
        Ok([healthy, degraded?])
    })?;
    // Small writes, so many on an object that it is made anew in between; beside whole objects.
    let count = if bench.quick { 600 } else { 1500 };
    let mut random = Random::new(7);
    let begun = Instant::now();
    for i in 0..count {
        let object = i % 2 * OBJECT;
        let at = object + random.below(OBJECT / u64::from(BLOCK)) * u64::from(BLOCK);
        image.write(at, &data[..BLOCK as usize]).map_err(told)?;
    }
    let small_write_us = begun.elapsed().as_secs_f64() * 1e6 / count as f64;
    let begun = Instant::now();
    for at in (0..16 * OBJECT).step_by(OBJECT as usize) {
        image.write(at, &data).map_err(told)?;
    }
    let object_write_us = begun.elapsed().as_secs_f64() * 1e6 / 16.0;
    let count = if bench.quick { 1000 } else { 5000 };
    let p99 = |seed| -> Result<f64> {
        let mut random = Random::new(seed);
        let mut small = vec![0; BLOCK as usize];
        let mut all = Vec::new();
        for _ in 0..count {
            let at = random.below(size / u64::from(BLOCK)) * u64::from(BLOCK);
            let begun = Instant::now();
            image.read(at, &mut small).map_err(told)?;
            all.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() * 99 / 100])
    };
    let mut seed = 0;
    let [well, hanging] = turns(|| {
        seed += 1;
        let well = p99(seed)?;
        stage.stores[seed as usize % 9].hang(true);
        let hanging = p99(seed + 100);
        stage.stores[seed as usize % 9].hang(false);
        std::thread::sleep(Duration::from_millis(50));
        Ok([well, hanging?])
    })?;
    Ok(vec![
        ("write_mb_s", write_mb_s),
        ("small_write_us", small_write_us),
        ("object_write_us", object_write_us),
        ("small_write_ratio", small_write_us / object_write_us),
        ("read_mb_s", healthy),
        ("degraded_read_mb_s", degraded),
        ("degraded_read_ratio", degraded / healthy),
        ("p99_us", well),
        ("hang_p99_us", hanging),
        ("hang_p99_ratio", hanging / well),
    ])
}
