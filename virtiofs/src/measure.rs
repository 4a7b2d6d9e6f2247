//! Loads for a device, from a [`Driver`]: how long operations take, at which depth, over how many queues. The device may be anybody's.

use std::time::{Duration, Instant};

use base::random::Random;
use frontend::fuse::wire::{
    CreateIn, EntryOut, FsyncIn, GetattrIn, InHeader, OpenOut, OutHeader, ReadIn, ReleaseIn,
    WriteIn, op,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::{Driver, DriverQueue, Result};

/// One kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// Reads of so many bytes, at random places.
    Read(usize),
    /// Writes.
    Write(usize),
    /// Reads and writes by turns.
    Mixed(usize),
    /// A look at attributes.
    Getattr,
    /// A write of 4 KiB, and fsync: two requests, one operation.
    WriteFsync,
}

/// A file to work in.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its node.
    pub node: u64,
    /// It is open for reading and writing.
    pub fh: u64,
    /// Bytes in it.
    pub len: u64,
}

/// Makes a file of `len` bytes in the root, and opens it.
///
/// # Errors
/// What the device refused.
pub fn target(driver: &mut Driver, name: &str, len: u64) -> Result<Target> {
    let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
    let reply = driver.call(op::CREATE, 1, &[arg.as_bytes(), name.as_bytes(), b"\0"])?;
    if reply.error != 0 {
        return Err(format!("making {name}: error {}", -reply.error));
    }
    let (entry, rest) = EntryOut::read_from_prefix(&reply.body).map_err(|_| "short entry")?;
    let (open, _) = OpenOut::read_from_prefix(rest).map_err(|_| "short open")?;
    let target = Target { node: entry.nodeid.get(), fh: open.fh.get(), len };
    let data = vec![0x5a; 64 << 10];
    let mut at = 0;
    while at < len {
        let part = data.len().min(usize::try_from(len - at).unwrap_or(usize::MAX));
        let arg = write_in(target.fh, at, part);
        let wrote =
            driver.call_on(1, op::WRITE, target.node, &[arg.as_bytes()], &data[..part], 0)?;
        if wrote.error != 0 {
            return Err(format!("filling {name}: error {}", -wrote.error));
        }
        at += part as u64;
    }
    Ok(target)
}

/// Closes the file, takes its name away and forgets it.
///
/// # Errors
/// What the device refused.
pub fn remove(driver: &mut Driver, name: &str, target: Target) -> Result<()> {
    let release = ReleaseIn { fh: target.fh.into(), ..ReleaseIn::default() };
    driver.call(op::RELEASE, target.node, &[release.as_bytes()])?;
    driver.call(op::UNLINK, 1, &[name.as_bytes(), b"\0"])?;
    let forget = frontend::fuse::wire::ForgetIn { nlookup: 1.into() };
    driver.tell(op::FORGET, target.node, &[forget.as_bytes()])
}

fn write_in(fh: u64, at: u64, len: usize) -> WriteIn {
    let size = u32::try_from(len).unwrap_or(0);
    WriteIn { fh: fh.into(), offset: at.into(), size: size.into(), ..WriteIn::default() }
}

fn request(opcode: u32, target: Target, arg: &[u8], data: usize) -> Vec<u8> {
    let len = size_of::<InHeader>() + arg.len() + data;
    let header = InHeader {
        len: u32::try_from(len).unwrap_or(0).into(),
        opcode: opcode.into(),
        unique: 2.into(),
        nodeid: target.node.into(),
        pid: 1.into(),
        ..InHeader::default()
    };
    [header.as_bytes(), arg].concat()
}

/// What a run took.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Of each operation, in order of completion.
    pub each: Vec<Duration>,
    /// From the first to the last.
    pub all: Duration,
}

impl Taken {
    /// The value below which that part of the operations lies, in microseconds.
    pub fn quantile_us(&self, part: f64) -> f64 {
        let mut sorted = self.each.clone();
        sorted.sort_unstable();
        let at = ((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1));
        sorted.get(at).map_or(0.0, |d| d.as_secs_f64() * 1e6)
    }

    /// Microseconds for one operation, with as many at once as there were.
    pub fn mean_us(&self) -> f64 {
        self.all.as_secs_f64() * 1e6 / self.each.len().max(1) as f64
    }
}

/// Puts one operation into a slot.
fn offer(
    q: &mut DriverQueue,
    slot: usize,
    load: Load,
    target: Target,
    random: &mut Random,
    write: bool,
) {
    let places = |len: usize| (target.len / len as u64).max(1);
    let reply = size_of::<OutHeader>();
    let head = match load {
        Load::Read(len) | Load::Write(len) | Load::Mixed(len) => {
            let at = random.below(places(len)) * len as u64;
            if write {
                let arg = write_in(target.fh, at, len);
                let head = request(op::WRITE, target, arg.as_bytes(), len);
                q.prepare_head(slot, &head, len, reply + 8, 0)
            } else {
                let size = u32::try_from(len).unwrap_or(0);
                let (fh, offset) = (target.fh.into(), at.into());
                let arg = ReadIn { fh, offset, size: size.into(), ..ReadIn::default() };
                let head = request(op::READ, target, arg.as_bytes(), 0);
                q.prepare_head(slot, &head, 0, reply, len)
            }
        }
        Load::Getattr => {
            let head = request(op::GETATTR, target, GetattrIn::default().as_bytes(), 0);
            q.prepare_head(slot, &head, 0, reply + 104, 0)
        }
        Load::WriteFsync if write => {
            let at = random.below(places(4096)) * 4096;
            let arg = write_in(target.fh, at, 4096);
            let head = request(op::WRITE, target, arg.as_bytes(), 4096);
            q.prepare_head(slot, &head, 4096, reply + 8, 0)
        }
        Load::WriteFsync => {
            let arg = FsyncIn { fh: target.fh.into(), ..FsyncIn::default() };
            let head = request(op::FSYNC, target, arg.as_bytes(), 0);
            q.prepare_head(slot, &head, 0, reply, 0)
        }
    };
    q.offer(head);
}

/// Runs `count` operations over one queue, `depth` at once.
///
/// # Errors
/// One failed, or there was no answer.
pub fn run(
    q: &mut DriverQueue,
    load: Load,
    target: Target,
    depth: usize,
    count: usize,
    seed: u64,
) -> Result<Taken> {
    run_while(q, load, target, depth, seed, |offered| offered < count)
}

/// The same for as long as `more` says so, which is told how many operations were begun.
///
/// # Errors
/// As [`run`].
pub fn run_while(
    q: &mut DriverQueue,
    load: Load,
    target: Target,
    depth: usize,
    seed: u64,
    mut more: impl FnMut(usize) -> bool,
) -> Result<Taken> {
    let mut random = Random::new(seed);
    let mut begun = vec![None::<(Instant, bool)>; depth];
    let mut taken = Taken::default();
    let (start, mut offered) = (Instant::now(), 0);
    let first = |offered: usize| match load {
        Load::Read(_) | Load::Getattr => false,
        Load::Write(_) | Load::WriteFsync => true,
        Load::Mixed(_) => offered.is_multiple_of(2),
    };
    for (slot, begun) in begun.iter_mut().enumerate() {
        if !more(offered) {
            break;
        }
        let write = first(offered);
        *begun = Some((Instant::now(), write));
        offer(q, slot, load, target, &mut random, write);
        offered += 1;
    }
    q.notify();
    while taken.each.len() < offered {
        let (head, written) = q.wait()?;
        let slot = q.slot_of(head);
        let Some((since, wrote)) = begun.get_mut(slot).and_then(Option::take) else {
            return Err(format!("an answer in slot {slot}, where nothing was asked"));
        };
        let (_, reply_at, _, _) = q.slot(slot);
        let error: u32 = q.get(reply_at + 4);
        if written < 16 || error != 0 {
            return Err(format!("an answer of {written} bytes, error {}", error.cast_signed()));
        }
        if load == Load::WriteFsync && wrote {
            begun[slot] = Some((since, false));
            offer(q, slot, load, target, &mut random, false);
            q.notify();
            continue;
        }
        taken.each.push(since.elapsed());
        if more(offered) {
            let write = first(offered);
            begun[slot] = Some((Instant::now(), write));
            offer(q, slot, load, target, &mut random, write);
            offered += 1;
            q.notify();
        }
    }
    taken.all = start.elapsed();
    Ok(taken)
}

/// One operation after the other, with a pause before each: a guest that asks for little.
///
/// # Errors
/// As [`run`].
pub fn paced(
    q: &mut DriverQueue,
    load: Load,
    target: Target,
    pause: Duration,
    count: usize,
    seed: u64,
) -> Result<Taken> {
    let mut taken = Taken::default();
    for turn in 0..count {
        std::thread::sleep(pause);
        let one = run(q, load, target, 1, 1, seed.wrapping_add(turn as u64))?;
        taken.all += one.all;
        taken.each.extend(one.each);
    }
    Ok(taken)
}

/// The same as [`run`] over several queues at once, by a thread for each: operations a second in all.
///
/// # Errors
/// As [`run`].
pub fn run_queues(
    driver: &mut Driver,
    queues: usize,
    load: Load,
    target: Target,
    depth: usize,
    count: usize,
) -> Result<f64> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = driver.queues[1..]
            .iter_mut()
            .take(queues)
            .zip(1..)
            .map(|(q, seed)| {
                scope.spawn(move || run(q, load, target, depth, count, seed).map(drop))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err("a thread of the driver died".into()))
            })
            .collect::<Result<Vec<()>>>()
    })?;
    Ok((queues * count) as f64 / start.elapsed().as_secs_f64())
}
