//! Tenants of one process: what a polite one waits beside seven that flood, and what each gets by its weight.
//!
//! In life guests have processors of their own. Here those that flood beside the polite one are threads of lowest priority, so that they do not
//! take the device's; and those whose shares are measured have the highest, so that it is the device for which they wait.
//!
//! A share is of the requests that were done, all of which ask for the same: what guests see. What the device has charged says nothing of it, being counted by
//! what is tested. The shares of the time of a processor that the threads of each device have had, as the kernel says, are told as well (`share_of_time_error`): they
//! differ by what the same request costs more for who has the smallest share, since others have had the caches meanwhile, and more of its requests are the first of a turn.
//!
//! Where a polite request waits is told apart: `flood_waits_for_place_us` is what it waited for the device to let it in; the rest is the kernel's.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ::virtiofs::driver::{Config, Driver};
use ::virtiofs::measure::{self, Load, Target};

use super::world::scratch;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};
use crate::local::own_program;

/// Turns; the one in the middle counts. Many short ones: what others do on the machine changes from one to the next.
const TURNS: usize = 15;
/// In a turn of those whose shares are measured it begins to count after so long.
const RUN_UP: Duration = Duration::from_millis(50);
const FLOODS: usize = 7;
const FILE: u64 = 8 << 20;
/// Bytes of a request of those whose shares are measured: so many that the device, and not a guest, has the work.
const DATA: usize = 256 << 10;
/// Requests at once of those that flood beside the polite one.
const DEPTH: usize = 32;
/// Of those whose shares are measured: enough to have some left whenever it is their turn, though their guests are threads that want a processor
/// as well.
const DEPTH_OF_SHARES: usize = 96;
/// Between two requests of the polite one.
const PAUSE: Duration = Duration::from_millis(1);
const WEIGHTS: [u32; 3] = [1, 2, 4];

/// A process with a device for each weight, and a guest at each. Gone when dropped.
struct House {
    root: PathBuf,
    child: Child,
    depth: usize,
    guests: Vec<(Driver, Target)>,
    metrics: SocketAddr,
}

/// An address of this machine that nobody has at the moment.
fn free_address() -> Result<SocketAddr> {
    let found = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|l| l.local_addr());
    found.context("an address")
}

impl Drop for House {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn failed(what: impl std::fmt::Display) -> Failure {
    Failure::failed(what.to_string(), "see what it says above")
}

impl House {
    fn start(weights: &[u32], depth: usize, threads: Option<u32>) -> Result<Self> {
        let root = scratch()?;
        let mut text = String::new();
        for (n, weight) in weights.iter().enumerate() {
            let dir = root.join(format!("d{n}"));
            std::fs::create_dir(&dir).context(dir.display())?;
            text += &format!(
                "[[tenant]]\ntenant = \"t{n}\"\nsocket-path = \"{}\"\nbackend = \"dir\"\nshared-dir = \"{}\"\n\
                 weight = {weight}\nrequest-queues = 1\n",
                root.join(format!("s{n}")).display(),
                dir.display()
            );
        }
        let file = root.join("tenants.toml");
        std::fs::write(&file, text).context(file.display())?;
        let mut command = Command::new(own_program()?);
        command.args([
            "virtiofs",
            "--log-level",
            "error",
            "--sandbox",
            "none",
            "--seccomp",
            "none",
        ]);
        let metrics = free_address()?;
        command.arg("--tenants").arg(&file).args(["--metrics", &metrics.to_string()]);
        if let Some(threads) = threads {
            command.args(["--threads-at-once", &threads.to_string()]);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let (child, guests) = (child.context("corbel virtiofs")?, Vec::new());
        let mut house = Self { root, child, depth, guests, metrics };
        for n in 0..weights.len() {
            let guest = house.guest(&house.root.join(format!("s{n}")))?;
            house.guests.push(guest);
        }
        Ok(house)
    }

    /// Seconds for which the first tenant has waited for a place, as the device says.
    fn waited(&self) -> Result<f64> {
        let mut stream = TcpStream::connect(self.metrics).context(self.metrics)?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").context("asking the device")?;
        let mut text = String::new();
        stream.read_to_string(&mut text).context("what the device says")?;
        let begins = "corbel_virtiofs_waited_seconds_total{tenant=\"t0\"} ";
        let value = text.lines().find_map(|line| line.strip_prefix(begins)?.parse().ok());
        value.ok_or_else(|| failed(format!("no {begins}in what the device says")))
    }

    fn guest(&self, socket: &Path) -> Result<(Driver, Target)> {
        let end = Instant::now() + Duration::from_secs(30);
        while !socket.exists() && Instant::now() < end {
            crate::signals::check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let config =
            Config { queues: 1, size: 1024, slots: self.depth, data: DATA, ..Config::default() };
        let mut driver = Driver::connect(socket, config).map_err(failed)?;
        driver.init().map_err(failed)?;
        let target = measure::target(&mut driver, "bench", FILE).map_err(failed)?;
        Ok((driver, target))
    }
}

/// A guest that asks for as much as it gets, until it is told to stop; `begun`: how much it has asked for.
fn flood(
    guest: &mut (Driver, Target),
    load: Load,
    depth: usize,
    (stop, begun): (&AtomicBool, &AtomicUsize),
    seed: u64,
) -> Result<()> {
    let (driver, target) = guest;
    let more = |count: usize| {
        begun.store(count, Ordering::Relaxed);
        !stop.load(Ordering::Relaxed)
    };
    measure::run_while(&mut driver.queues[1], load, *target, depth, seed, more).map_err(failed)?;
    Ok(())
}

/// Of this thread only, as Linux has it. Where it is not allowed the figures are those of a busy machine.
fn priority(nice: i32) {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), nice);
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(failed("a thread of the driver died")))
}

/// The polite guest's p99, in microseconds, while the others do `flooded`.
fn polite(house: &mut House, flooded: bool, count: usize, seed: u64) -> Result<f64> {
    let stop = AtomicBool::new(!flooded);
    let Some(((driver, target), others)) = house.guests.split_first_mut() else { return Ok(0.0) };
    std::thread::scope(|scope| {
        let floods: Vec<_> = others
            .iter_mut()
            .zip(1u64..)
            .map(|(guest, n)| {
                let load = if n % 2 == 0 { Load::Read(65_536) } else { Load::Write(65_536) };
                let stop = &stop;
                scope.spawn(move || {
                    // Of this thread only, as Linux has it. One that may not is a louder neighbour.
                    let _ =
                        rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
                    flood(guest, load, DEPTH, (stop, &AtomicUsize::new(0)), seed + n)
                })
            })
            .collect();
        let guest = scope.spawn(move || {
            priority(-20);
            ::virtiofs::slice::short();
            let load = Load::Read(4096);
            measure::paced(&mut driver.queues[1], load, *target, PAUSE, count, seed).map_err(failed)
        });
        let taken = joined(guest);
        stop.store(true, Ordering::Relaxed);
        floods.into_iter().try_for_each(joined)?;
        Ok(taken?.quantile_us(0.99))
    })
}

/// Nanoseconds of a processor that the threads of each of the devices have had, as the kernel says.
fn processor(pid: u32, tenants: usize) -> Vec<f64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut had = vec![0.0; tenants];
    for task in tasks {
        let text = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (name, ran) = (text("comm"), text("schedstat"));
        let tenant = name.trim().rsplit_once("-t").and_then(|(_, n)| n.parse::<usize>().ok());
        let ran = ran.split(' ').next().and_then(|ran| ran.parse::<f64>().ok());
        if let Some((had, ran)) = tenant.and_then(|n| had.get_mut(n)).zip(ran) {
            *had += ran;
        }
    }
    had
}

/// How much of a processor the devices had, and how many requests each of the guests got done, while all flooded.
fn shares(house: &mut House, time: Duration, seed: u64) -> Result<(Vec<f64>, Vec<f64>)> {
    let stop = AtomicBool::new(false);
    let begun: Vec<AtomicUsize> = house.guests.iter().map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        let all = house.guests.iter_mut().zip(&begun).zip(0u64..);
        let floods: Vec<_> = all
            .map(|((guest, begun), n)| {
                let stop = &stop;
                scope.spawn(move || {
                    priority(-20);
                    let load = Load::Read(DATA);
                    flood(guest, load, DEPTH_OF_SHARES, (stop, begun), seed + n)
                })
            })
            .collect();
        let requests =
            || begun.iter().map(|begun| begun.load(Ordering::Relaxed) as f64).collect::<Vec<_>>();
        let pid = house.child.id();
        let look = || (processor(pid, begun.len()), requests());
        std::thread::sleep(RUN_UP);
        let before = look();
        std::thread::sleep(time);
        let after = look();
        stop.store(true, Ordering::Relaxed);
        floods.into_iter().try_for_each(joined)?;
        let since = |after: Vec<f64>, before: Vec<f64>| -> Vec<f64> {
            after.into_iter().zip(before).map(|(after, before)| after - before).collect()
        };
        Ok((since(after.0, before.0), since(after.1, before.1)))
    })
}

/// By how much of what is due to it the worst off, or best off, differs.
fn error(got: &[f64]) -> f64 {
    let (sum, total): (f64, u32) = (got.iter().sum(), WEIGHTS.iter().sum());
    let each = got.iter().zip(WEIGHTS).map(|(got, weight)| {
        let due = f64::from(weight) / f64::from(total);
        (got / sum / due - 1.0).abs()
    });
    each.fold(0.0, f64::max)
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs the bench.
pub fn tenants(bench: &Bench<'_>) -> Result<Measured> {
    let count = if bench.quick { 100 } else { 500 };
    bench.out.step("  one polite tenant, and seven that flood");
    let mut house = House::start(&[1; FLOODS + 1], DEPTH, None)?;
    let (mut alone, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut waits = Vec::new();
    for turn in 0..TURNS as u64 {
        crate::signals::check()?;
        let before = polite(&mut house, false, count, turn)?;
        let waited = house.waited()?;
        let flooded = polite(&mut house, true, count, turn)?;
        waits.push((house.waited()? - waited) * 1e6 / count as f64);
        alone.push(before);
        beside.push(flooded);
        ratios.push(flooded / before);
    }
    drop(house);
    bench.out.step("  tenants of weights 1, 2 and 4");
    let mut house = House::start(&WEIGHTS, DEPTH_OF_SHARES, Some(1))?;
    let time = Duration::from_millis(if bench.quick { 300 } else { 1000 });
    let (mut errors, mut of_time) = (Vec::new(), Vec::new());
    for turn in 0..TURNS as u64 {
        crate::signals::check()?;
        let (processor, requests) = shares(&mut house, time, turn)?;
        errors.push(error(&requests));
        of_time.push(error(&processor));
    }
    Ok(vec![
        ("alone_p99_us", middle(alone)),
        ("flood_p99_us", middle(beside)),
        ("flood_p99_ratio", middle(ratios)),
        ("flood_waits_for_place_us", middle(waits)),
        ("share_error", middle(errors)),
        ("share_of_time_error", middle(of_time)),
    ])
}
