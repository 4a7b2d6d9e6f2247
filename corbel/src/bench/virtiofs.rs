//! The virtio-fs device beside the Rust virtiofsd: the same driver, without a virtual machine, in turns. Ratios of times: below 1 ours
//! takes less. Without virtiofsd (see [`peer`]) there are only our own times, and the ratios are not there.
//!
//! A guest that waits does so as under KVM, which looks for a while before a virtual processor sleeps ([`HALT_POLL`]). One that sleeps at
//! once is measured as well (`_asleep_`): there both devices' times are those of wake-ups, which the kernel's choice of processors decides.
//!
//! Then the same devices side by side in a real guest (`guest.rs`).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ::virtiofs::driver::{Config, Driver, HALT_POLL};
use ::virtiofs::measure::{self, Load, Target};

use super::world::{World, scratch};
use super::{Bench, Measured, guest};
use crate::failure::{Context, Failure, Result};
use crate::local::own_program;

/// Turns; the one in the middle counts.
const TURNS: u64 = 9;
/// The same of four queues and one, whose turns are short: one that met somebody else on a processor says nothing.
const QUEUE_TURNS: u64 = 15;
/// Bytes of the file that is worked in.
const FILE: u64 = 32 << 20;

/// A load: its figure, depth, operations in a turn.
const LOADS: &[(&str, Load, usize, usize)] = &[
    ("read_4k_qd1", Load::Read(4096), 1, 3000),
    ("read_4k_qd32", Load::Read(4096), 32, 12_000),
    ("read_64k_qd1", Load::Read(65_536), 1, 1500),
    ("read_64k_qd32", Load::Read(65_536), 32, 4000),
    ("write_4k_qd1", Load::Write(4096), 1, 3000),
    ("write_4k_qd32", Load::Write(4096), 32, 12_000),
    ("write_64k_qd1", Load::Write(65_536), 1, 1500),
    ("write_64k_qd32", Load::Write(65_536), 32, 4000),
    ("getattr_qd1", Load::Getattr, 1, 3000),
];

/// Where virtiofsd is: `CORBEL_VIRTIOFSD`, the search path, or where distributions put it.
fn peer() -> Option<PathBuf> {
    let named = std::env::var_os("CORBEL_VIRTIOFSD").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("virtiofsd"));
    let usual = ["/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"].map(PathBuf::from);
    named.into_iter().chain(found).chain(usual).find(|file| file.is_file())
}

/// A device in a process of its own, and a guest at it.
struct Place {
    name: &'static str,
    child: Child,
    driver: Driver,
    target: Target,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Place {
    fn start(name: &'static str, mut command: Command, dir: &Path, queues: usize) -> Result<Self> {
        let socket = dir.join(format!("{name}.sock"));
        command.arg("--socket-path").arg(&socket);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().context(name)?;
        let end = Instant::now() + Duration::from_secs(30);
        while !socket.exists() && Instant::now() < end {
            crate::signals::check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let config = Config { queues, size: 1024, slots: 32, data: 64 << 10, ..Config::default() };
        let failed = |e: String| Failure::failed(format!("{name}: {e}"), "see what it says above");
        let mut driver = Driver::connect(&socket, config).map_err(failed)?;
        driver.init().map_err(failed)?;
        let target = measure::target(&mut driver, "bench", FILE).map_err(failed)?;
        Ok(Self { name, child, driver, target })
    }

    fn ours(name: &'static str, backend: &[&str], dir: &Path, queues: usize) -> Result<Self> {
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
        command.args(backend);
        Self::start(name, command, dir, queues)
    }

    fn peer(program: &Path, shared: &Path, dir: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["--sandbox", "none", "--seccomp", "none", "--log-level", "error"]);
        command.arg("--shared-dir").arg(shared);
        let _ = std::fs::remove_file(dir.join("virtiofsd.sock"));
        Self::start("virtiofsd", command, dir, 1)
    }

    fn wait(&mut self, halt_poll: Duration) {
        self.driver.queues.iter_mut().for_each(|queue| queue.halt_poll = halt_poll);
    }

    fn mean_us(&mut self, load: Load, depth: usize, count: usize, seed: u64) -> Result<f64> {
        let taken = measure::run(&mut self.driver.queues[1], load, self.target, depth, count, seed);
        let taken = taken.map_err(|e| Failure::failed(format!("{}: {e}", self.name), ""))?;
        Ok(taken.mean_us())
    }

    fn rate(&mut self, queues: usize, load: Load, count: usize) -> Result<f64> {
        measure::run_queues(&mut self.driver, queues, load, self.target, 8, count)
            .map_err(|e| Failure::failed(format!("{}: {e}", self.name), ""))
    }
}

/// Nanoseconds of processor that a process has used.
fn processor(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// The middle of each place's times, and of the ratios to the last place's in the same turn.
fn in_turns(
    places: &mut [Place],
    load: Load,
    depth: usize,
    count: usize,
) -> Result<Vec<(f64, f64)>> {
    let mut times = vec![Vec::new(); places.len()];
    let mut ratios = times.clone();
    for turn in 0..TURNS {
        crate::signals::check()?;
        let mut now = Vec::new();
        for place in places.iter_mut() {
            now.push(place.mean_us(load, depth, count, turn)?);
        }
        let last = now.last().copied().unwrap_or(f64::NAN);
        for ((times, ratios), now) in times.iter_mut().zip(&mut ratios).zip(now) {
            times.push(now);
            ratios.push(now / last);
        }
    }
    Ok(times.iter().map(|all| middle(all)).zip(ratios.iter().map(|all| middle(all))).collect())
}

/// The one in the middle.
pub(super) fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(super) fn key(place: &str, load: &str, end: &str) -> &'static str {
    // A bench runs once or twice in the life of the process.
    Box::leak(format!("{place}_{load}{end}").into_boxed_str())
}

/// A directory that is gone with the bench.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the bench.
pub fn virtiofs(bench: &Bench<'_>) -> Result<Measured> {
    let memory = Disk(scratch()?);
    // On a disk: what virtiofsd's fsync is measured on.
    let base = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    let disk = Disk(base.join(format!("corbel-bench-virtiofs-{}", std::process::id())));
    std::fs::create_dir_all(&disk.0).context(disk.0.display())?;
    // In memory: a disk's own time, and the kernel's when it writes back, belong to neither.
    let (own, others) = (memory.0.join("ours"), memory.0.join("peer"));
    std::fs::create_dir_all(&own).context(own.display())?;
    std::fs::create_dir_all(&others).context(others.display())?;
    let own = own.display().to_string();
    let mut figures = Measured::new();
    let mut places = vec![
        Place::ours("null", &["--backend", "null"], &memory.0, 4)?,
        Place::ours("dir", &["--backend", "dir", "--shared-dir", &own], &memory.0, 4)?,
    ];
    match peer() {
        None => bench.out.step(
            "  no virtiofsd here: figures without a peer (cargo install virtiofsd, then CORBEL_VIRTIOFSD=…/virtiofsd)",
        ),
        Some(program) => places.push(Place::peer(&program, &others, &memory.0)?),
    }
    let has_peer = places.len() > 2;
    let (mut logs, mut asleep) = ([0.0; 2], [0.0; 2]);
    let mut used = [0.0; 3];
    let counts = |count: usize| if bench.quick { count / 10 } else { count };
    for (name, load, depth, count) in LOADS {
        bench.out.step(format!("  {name}"));
        for (sum, (_, ratio)) in
            asleep.iter_mut().zip(in_turns(&mut places, *load, *depth, counts(*count))?)
        {
            *sum += ratio.ln() / LOADS.len() as f64;
        }
        places.iter_mut().for_each(|place| place.wait(HALT_POLL));
        let before: Vec<u64> = places.iter().map(|place| processor(place.child.id())).collect();
        let taken = in_turns(&mut places, *load, *depth, counts(*count))?;
        for ((used, place), before) in used.iter_mut().zip(&places).zip(before) {
            let time = processor(place.child.id()).saturating_sub(before) as f64;
            let each = time / 1e3 / (TURNS as usize * counts(*count)) as f64;
            figures.push((key(place.name, name, "_cpu_us"), each));
            *used += each.ln() / LOADS.len() as f64;
        }
        for (place, (time, ratio)) in places.iter().zip(&taken) {
            figures.push((key(place.name, name, "_us"), *time));
            if has_peer && place.name != "virtiofsd" {
                figures.push((key(place.name, name, "_vs_virtiofsd"), *ratio));
            }
        }
        for (sum, (_, ratio)) in logs.iter_mut().zip(&taken) {
            *sum += ratio.ln() / LOADS.len() as f64;
        }
        places.iter_mut().for_each(|place| place.wait(Duration::ZERO));
    }
    bench.out.step("  four queues and one");
    let (mut one, mut four) = (Vec::new(), Vec::new());
    for _ in 0..QUEUE_TURNS {
        crate::signals::check()?;
        one.push(places[1].rate(1, Load::Read(65_536), counts(8000))?);
        four.push(places[1].rate(4, Load::Read(65_536), counts(2000))?);
    }
    let mut over: Vec<f64> = four.iter().zip(&one).map(|(four, one)| four / one).collect();
    over.sort_by(f64::total_cmp);
    figures.push(("queues_4_over_1", over[over.len() / 2]));
    if has_peer {
        figures.push(("null_vs_virtiofsd", logs[0].exp()));
        figures.push(("dir_vs_virtiofsd", logs[1].exp()));
        figures.push(("null_asleep_vs_virtiofsd", asleep[0].exp()));
        figures.push(("dir_asleep_vs_virtiofsd", asleep[1].exp()));
        figures.push(("null_cpu_vs_virtiofsd", (used[0] - used[2]).exp()));
        figures.push(("dir_cpu_vs_virtiofsd", (used[1] - used[2]).exp()));
    }
    drop(places);
    let program = peer();
    let on_disk = program.as_ref().map(|program| Place::peer(program, &disk.0, &memory.0));
    fsync(bench, on_disk.transpose()?, &mut figures)?;
    // What was measured until here stands, whatever becomes of the guests.
    for (figure, guest) in [
        ("tenant_instructions_ratio", guest::instructions as guest::Guest),
        ("guest_dir_vs_virtiofsd", guest::beside),
    ] {
        if let Err(failure) = guest(bench, &memory.0, program.as_deref(), &mut figures) {
            crate::signals::check()?;
            let said = format!("{} ({})", failure.message, failure.remedy);
            bench.out.step(format!("  no {figure}: {said}"));
        }
    }
    Ok(figures)
}

/// A write and fsync: on every replica of a volume in memory, and by virtiofsd on the disk.
fn fsync(bench: &Bench<'_>, peer: Option<Place>, figures: &mut Measured) -> Result<()> {
    let world = World::start(bench, World::plan(bench), &[])?;
    let socket = world.local.config(1)?.node.socket.display().to_string();
    let ours = Place::ours("corbel", &["--source", &socket], world.scratch(), 1)?;
    let mut places: Vec<Place> = std::iter::once(ours).chain(peer).collect();
    let count = if bench.quick { 50 } else { 400 };
    let taken = in_turns(&mut places, Load::WriteFsync, 1, count)?;
    for (place, (time, _)) in places.iter().zip(&taken) {
        figures.push((key(place.name, "fsync", "_us"), *time));
    }
    if places.len() > 1 {
        figures.push(("corbel_fsync_vs_virtiofsd", taken[0].1));
    }
    Ok(())
}
