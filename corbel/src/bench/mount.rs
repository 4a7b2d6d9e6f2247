//! The mount beside a local file system and a pass-through: the same program, in turns on ext4 (or
//! what the disk has), on a mount of that same directory by our `dir:` back end, on Corbel's mount,
//! and under `corbel run`. Figures are times of one operation, and ratios of them: below 1 Corbel is
//! faster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::load::{self, figures, number};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};
use crate::process::{self, Identity};

const SOURCE: &str = include_str!("../../../bench/mount.c");
/// Source files of the package that is built.
const UNITS: u32 = 100;
/// How often (full, quick): whatever else the machine does takes its share of a single build.
const BUILDS: (usize, usize) = (5, 1);
/// Parts of a load that can be cut into parts, for the same reason: they run in turns, and the one in the middle counts.
const PARTS: u32 = 5;

/// A load: its name, how often (full, quick), threads, whether `corbel run` is measured as well; in how many parts.
struct Load {
    name: &'static str,
    load: &'static str,
    full: u32,
    quick: u32,
    threads: u32,
    run: bool,
    parts: u32,
}

const fn load(
    name: &'static str,
    load: &'static str,
    counts: (u32, u32),
    threads: u32,
    run: bool,
) -> Load {
    Load { name, load, full: counts.0, quick: counts.1, threads, run, parts: 1 }
}

impl Load {
    /// In parts, as it finds the same again when it begins anew.
    const fn in_parts(self) -> Self {
        Self { parts: PARTS, ..self }
    }
}

/// In this order: some use what others made.
const LOADS: &[Load] = &[
    load("create", "create", (100_000, 3000), 1, true),
    load("stat", "stat", (100_000, 3000), 1, true),
    load("stat_again", "stat", (100_000, 3000), 1, true),
    load("readdir", "readdir", (100_000, 3000), 1, true),
    load("list", "list", (100_000, 3000), 1, true),
    load("unlink", "unlink", (100_000, 3000), 1, true),
    load("reopen", "reopen", (50_000, 5000), 1, true).in_parts(),
    load("seq_write_mib", "fill", (512, 64), 1, true),
    load("seq_rewrite_mib", "rewrite", (512, 64), 1, true).in_parts(),
    load("seq_read_mib", "scan", (512, 64), 1, true).in_parts(),
    load("read_qd1", "read", (200_000, 20_000), 1, true).in_parts(),
    load("read_qd32", "read", (200_000, 20_000), 32, true).in_parts(),
    load("direct_read_qd1", "dread", (50_000, 5000), 1, false).in_parts(),
    load("direct_read_qd32", "dread", (50_000, 5000), 32, false).in_parts(),
    load("write_qd1", "write", (50_000, 5000), 1, true).in_parts(),
    load("write_qd32", "write", (50_000, 5000), 32, true).in_parts(),
    load("direct_write_qd1", "dwrite", (20_000, 2000), 1, false).in_parts(),
    load("direct_write_qd32", "dwrite", (20_000, 2000), 32, false).in_parts(),
    load("mixed_qd1", "mixed", (20_000, 2000), 1, true).in_parts(),
    load("fsync_files", "files", (2000, 200), 1, true).in_parts(),
    load("fsync_append", "append", (2000, 200), 1, true).in_parts(),
];

/// A directory under test: on the disk, passed through, on the mount, under `corbel run`.
struct Place {
    dir: PathBuf,
    under_run: bool,
}

/// A directory on the disk, and its mount by the `dir:` back end. Both go when dropped.
struct PassThrough {
    disk: PathBuf,
    point: PathBuf,
    server: Option<Identity>,
}

impl PassThrough {
    fn start(scratch: &Path) -> Result<Self> {
        let base = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), Into::into);
        let disk = base.join(format!("corbel-bench-mount-{}", std::process::id()));
        std::fs::create_dir_all(disk.join("bare")).context(disk.display())?;
        std::fs::create_dir_all(disk.join("passed")).context(disk.display())?;
        let point = scratch.join("passed");
        std::fs::create_dir_all(&point).context(point.display())?;
        let mut this = Self { disk, point, server: None };
        let mut command = Command::new(crate::local::own_program()?);
        command.args(["mount", "--foreground"]);
        command.arg(format!("dir:{}", this.disk.join("passed").display())).arg(&this.point);
        command.env(crate::local::TIED, std::process::id().to_string());
        let (_child, identity) = process::start(command, &scratch.join("passed.log"))?;
        this.server = Some(identity);
        process::wait_until("the pass-through mount", Duration::from_secs(10), || {
            Ok(crate::local::is_mount_point(&this.point).then_some(()))
        })?;
        Ok(this)
    }
}

impl Drop for PassThrough {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.end(Duration::from_secs(3));
        }
        if crate::local::is_mount_point(&self.point) {
            eprintln!("corbel: {} is still mounted; left as it is", self.point.display());
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.disk) {
            eprintln!("corbel: {}: {error}", self.disk.display());
        }
    }
}

/// The bench.
pub fn mount(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let passed = PassThrough::start(world.scratch())?;
    let (source, program) = (world.scratch().join("mount.c"), world.scratch().join("mount"));
    std::fs::write(&source, SOURCE).context(source.display())?;
    load::cc(&["-O2", "-pthread", "-o"], &[&program, &source], &[])?;
    let corbel = world.local.mount_point(1);
    let places = [
        Place { dir: passed.disk.join("bare"), under_run: false },
        Place { dir: passed.point.join("m"), under_run: false },
        Place { dir: corbel.join("m"), under_run: false },
        Place { dir: corbel.join("r"), under_run: true },
    ];
    let mut measured = Measured::new();
    for load in LOADS {
        let times = in_turns(load.parts as usize, &places, |place, _| {
            one(bench, &world, &program, load, place)
        })?;
        add(&mut measured, load.name, "us", &times);
        bench.out.step(format!("  {}: {times:.1?} µs (disk, passed, mount, run)", load.name));
    }
    let rounds = if bench.quick { BUILDS.1 } else { BUILDS.0 };
    let times = in_turns(rounds, &places, |place, round| build(&world, place, round).map(Some))?;
    add(&mut measured, "build", "s", &times);
    Ok(measured)
}

/// The build alone, as often as it takes to see anything: on the mount, and by processes that have the volume themselves.
pub fn build_bench(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let corbel = world.local.mount_point(1);
    let places = [("m", false), ("r", true)]
        .map(|(dir, under_run)| Place { dir: corbel.join(dir), under_run });
    let rounds = if bench.quick { 3 } else { 9 };
    let times = in_turns(rounds, &places, |place, round| build(&world, place, round).map(Some))?;
    let [Some(mount), Some(run)] = times[..] else { return Ok(Measured::new()) };
    Ok(vec![("mount_s", mount), ("run_s", run), ("run_over_mount", run / mount)])
}

/// What is measured at each place, each time beginning with the next one; the middle of it.
fn in_turns(
    rounds: usize,
    places: &[Place],
    mut measure: impl FnMut(&Place, usize) -> Result<Option<f64>>,
) -> Result<Vec<Option<f64>>> {
    let mut times = vec![Vec::new(); places.len()];
    for round in 0..rounds {
        for at in 0..places.len() {
            let at = (at + round) % places.len();
            times[at].extend(measure(&places[at], round)?);
        }
    }
    let middle = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied()
    };
    Ok(times.iter_mut().map(middle).collect())
}

/// Microseconds of one operation.
fn one(
    bench: &Bench<'_>,
    world: &World,
    program: &Path,
    load: &Load,
    place: &Place,
) -> Result<Option<f64>> {
    if place.under_run && !load.run {
        return Ok(None);
    }
    std::fs::create_dir_all(&place.dir).context(place.dir.display())?;
    let count = if bench.quick { load.quick } else { load.full } / load.parts;
    let mut command = command(world, place, program)?;
    command.arg(load.load).arg(&place.dir).arg(count.to_string()).arg(load.threads.to_string());
    let got = figures(command)?;
    Ok(Some(number(&got, "s")? * 1e6 / number(&got, "ops")?))
}

fn command(world: &World, place: &Place, program: &Path) -> Result<Command> {
    if !place.under_run {
        return Ok(Command::new(program));
    }
    let mut command = world.run_command(1)?;
    command.arg(program);
    Ok(command)
}

/// Seconds to unpack and build a package of C.
fn build(world: &World, place: &Place, round: usize) -> Result<f64> {
    let dir = place.dir.join(format!("package{round}"));
    std::fs::create_dir_all(&dir).context(dir.display())?;
    let begun = Instant::now();
    std::fs::write(dir.join("all.h"), header()).context(dir.display())?;
    for unit in 0..UNITS {
        std::fs::write(dir.join(format!("unit{unit}.c")), source(unit)).context(dir.display())?;
    }
    std::fs::write(dir.join("Makefile"), MAKEFILE).context(dir.display())?;
    let mut command = command(world, place, Path::new("make"))?;
    command.args(["-s", "-j2", "-C"]).arg(&dir).stdin(Stdio::null());
    let output = command.output().context("make")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Failure::failed(format!("make: {}", said.trim()), "apt-get install make gcc"));
    }
    Ok(begun.elapsed().as_secs_f64())
}

const MAKEFILE: &str = "UNITS := $(patsubst %.c,%.o,$(wildcard unit*.c))
program: $(UNITS)
\tcc -o $@ $^
%.o: %.c all.h
\tcc -O0 -c -o $@ $<
";

fn header() -> String {
    let lines = (0..UNITS).map(|unit| format!("int unit{unit}(int);\n"));
    format!("#include <stdio.h>\n#include <string.h>\n{}", lines.collect::<String>())
}

fn source(unit: u32) -> String {
    let next = (unit + 1) % UNITS;
    let main = if unit == 0 { "int main(void) { return unit0(3) != 0; }\n" } else { "" };
    format!(
        "#include \"all.h\"\nint unit{unit}(int n) {{ return n <= 0 ? 0 : unit{next}(n - 1); }}\n{main}"
    )
}

/// Figures of one load: times, and Corbel's in relation to the others'.
fn add(measured: &mut Measured, name: &str, unit: &str, times: &[Option<f64>]) {
    let key = |suffix: &str| -> &'static str { format!("{name}_{suffix}").leak() };
    let [Some(disk), Some(passed), Some(mount), run] = times else { return };
    for (place, time) in [("disk", disk), ("passed", passed), ("mount", mount)] {
        measured.push((key(&format!("{place}_{unit}")), *time));
    }
    if let Some(run) = run {
        measured.push((key(&format!("run_{unit}")), *run));
        measured.push((key("run_vs_disk"), run / disk));
    }
    measured.push((key("vs_disk"), mount / disk));
    measured.push((key("vs_passed"), mount / passed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_what_was_measured_in_turns_counts() {
        let place = |run| Place { dir: PathBuf::new(), under_run: run };
        let (mut order, mut next) = (Vec::new(), [9.0, 5.0, 1.0].into_iter());
        let times = in_turns(3, &[place(false), place(true)], |place, round| {
            order.push((place.under_run, round));
            Ok((!place.under_run).then(|| next.next().unwrap()))
        });
        assert_eq!(times.unwrap(), [Some(5.0), None]);
        let begun: Vec<bool> = order.chunks(2).map(|turn| turn[0].0).collect();
        assert_eq!((begun, order.len()), (vec![false, true, false], 6));
    }

    #[test]
    fn ratios_are_of_the_mount() {
        let mut measured = Measured::new();
        add(&mut measured, "x", "us", &[Some(2.0), Some(4.0), Some(6.0), None]);
        let of = |key: &str| measured.iter().find(|f| f.0 == key).map(|f| f.1);
        assert_eq!((of("x_vs_disk"), of("x_vs_passed")), (Some(3.0), Some(1.5)));
        assert_eq!((of("x_mount_us"), of("x_run_us")), (Some(6.0), None));
    }

    #[test]
    fn the_package_names_every_unit_once() {
        assert_eq!(header().matches("int unit").count(), UNITS as usize);
        assert!(source(UNITS - 1).contains("unit0(n - 1)") && source(0).contains("main"));
    }
}
