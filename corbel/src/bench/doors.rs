//! What it costs that the doors are shut, and whether they hold. A list of parts, each with figures of its own: [`PARTS`].

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::load::{self, figures, number};
use super::steady::turns;
use super::world::World;
use super::{Bench, Measured};
use crate::config::{Authentication, Transport};
use crate::failure::{Context, Result};
use crate::local::Plan;

/// A part: what it is about, and what measures it.
type Part = (&'static str, fn(&Bench<'_>) -> Result<Measured>);

/// What is measured, one after the other.
const PARTS: &[Part] = &[
    ("TLS beside plain TCP", tls),
    ("a program that asks for much", turns_of_one),
    ("twelve writers on a busy machine", storm),
    ("attacks of a local user", siege),
];

/// All parts.
pub fn doors(bench: &Bench<'_>) -> Result<Measured> {
    let mut all = Measured::new();
    for (about, part) in PARTS {
        bench.out.step(format!("  {about}"));
        all.extend(part(bench)?);
    }
    Ok(all)
}

/// How long a node hears nobody else, whatever one program asks for.
fn turns_of_one(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[1])?;
    let greedy = load::compile_greedy(world.scratch())?;
    let dir = world.file(1, "");
    let epoch = world.local.epoch(1)?;
    let loads = match bench.quick {
        false => {
            [("modes", 400, 60), ("extents", 50_000, 1), ("deep", 1500, 1500), ("names", 50_000, 1)]
        }
        true => {
            [("modes", 100, 10), ("extents", 10_000, 1), ("deep", 300, 300), ("names", 10_000, 1)]
        }
    };
    let mut longest = 0.0f64;
    for (name, size, count) in loads {
        let mut command = world.run_command(1)?;
        command.arg(&greedy).args([name, &dir, &size.to_string(), &count.to_string()]);
        figures(command)?;
        for node in world.local.nodes() {
            let status = world.local.status(node)?;
            longest = longest.max(number(&status, "longest_turn_us")? / 1e3);
        }
        bench.out.step(format!("  {name}: {longest:.1} ms so far"));
    }
    let evictions = world.local.epoch(1)? - epoch;
    Ok(vec![("longest_turn_ms", longest), ("greedy_evictions", evictions as f64)])
}

/// Processes that do nothing but take the processor, for as long as this lives.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: usize) -> Result<Self> {
        let mut busy = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new("sh");
            command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
            busy.0.push(command.spawn().context("sh")?);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Programs that write and fsync on a node that is not the head, while everything else takes the processor: nobody loses its place,
/// and no program hears of it.
fn storm(bench: &Bench<'_>) -> Result<Measured> {
    const WRITERS: usize = 12;
    const BUSY: usize = 30;
    let seconds = if bench.quick { 10 } else { 60 };
    let world = World::start(bench, World::plan(bench), &[2])?;
    let epoch = world.local.epoch(2)?;
    let hostd = |node: u32| {
        let pid = world.local.node_dir(node).join("run/hostd.pid");
        std::fs::read_to_string(&pid).context(pid.display())
    };
    let before = world.local.nodes().map(hostd).collect::<Result<Vec<_>>>()?;
    let _busy = Busy::start(BUSY)?;
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let path = world.file(2, &format!("storm-{writer}"));
        let mut command =
            world.under_run(2, &["records", &path, "100000000", &seconds.to_string()])?;
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        writers.push(command.spawn().context("corbel run")?);
    }
    let mut errors = 0;
    for mut writer in writers {
        errors += usize::from(!writer.wait().context("corbel run")?.success());
    }
    // What it may have cost shows a little later, too.
    std::thread::sleep(Duration::from_secs(1));
    let after = world.local.nodes().map(hostd).collect::<Result<Vec<_>>>()?;
    let ended = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    Ok(vec![
        ("storm_evictions", (world.local.epoch(2)? - epoch) as f64),
        ("storm_errors", errors as f64),
        ("storm_hostd_ended", ended as f64),
    ])
}

/// Attacks of a local user (the crate `hostile`), and how many came to something.
fn siege(bench: &Bench<'_>) -> Result<Measured> {
    let program = crate::local::own_program()?.with_file_name("corbel-siege");
    if !rustix::process::geteuid().is_root() || !program.exists() {
        let remedy =
            "run it as root, with corbel-siege beside corbel (cargo build --release -p hostile)";
        bench.out.step(format!("  not attacked: {remedy}"));
        return Ok(Measured::new());
    }
    let world = World::start(bench, World::plan(bench), &[1, 2])?;
    let epoch = world.local.epoch(1)?;
    let mut command = Command::new(&program);
    command.arg(world.local.dir());
    let said = command.stdin(Stdio::null()).output().context(program.display())?;
    crate::signals::check()?;
    let text = String::from_utf8_lossy(&said.stdout);
    for line in text.lines().filter(|line| line.contains("SUCCEEDED") || line.contains("UNTRIED")) {
        bench.out.step(format!("  {line}"));
    }
    let last = text.lines().last().unwrap_or_default();
    let figures: serde_json::Value = serde_json::from_str(last).map_err(|error| {
        crate::failure::Failure::failed(
            format!("corbel-siege: {error}: {last:?}"),
            "run corbel-siege DIR by hand on a cluster with mounts",
        )
    })?;
    // What could not be tried is not held.
    let succeeded = number(&figures, "succeeded")? + number(&figures, "untried")?;
    Ok(vec![
        ("attacks", number(&figures, "attacks")?),
        ("succeeded", succeeded),
        ("siege_evictions", (world.local.epoch(1)? - epoch) as f64),
    ])
}

/// The same cluster twice, with certificates and without, both over TCP, in turns.
fn tls(bench: &Bench<'_>) -> Result<Measured> {
    let bytes = if bench.quick { 128 << 20 } else { 256 << 20 };
    let count = (bytes / 16384).to_string();
    let plan =
        |authentication| Plan { transport: Transport::Tcp, authentication, ..World::plan(bench) };
    let plain = World::start(bench, plan(Authentication::None), &[1])?;
    let tls = World::start(bench, plan(Authentication::Certificates), &[1])?;
    let fsync = |world: &World, count: &str| -> Result<f64> {
        let path = world.file(1, "fsync");
        let got = figures(world.under_run(1, &["append", &path, "4096", count])?)?;
        Ok(number(&got, "p50_ns")? / 1e3)
    };
    let seq = |world: &World| -> Result<f64> {
        let path = world.file(1, "seq");
        let got = figures(world.under_run(1, &["seq", &path, "16384", &count])?)?;
        std::fs::remove_file(&path).context(&path)?;
        Ok(bytes as f64 / 1e6 / number(&got, "seconds")?)
    };
    // Memory of the regions comes from the machine when it is first touched.
    for world in [&plain, &tls] {
        fsync(world, "500")?;
        seq(world)?;
    }
    let [plain_fsync, tls_fsync] = turns(|| Ok([fsync(&plain, "3000")?, fsync(&tls, "3000")?]))?;
    let [plain_seq, tls_seq] = turns(|| Ok([seq(&plain)?, seq(&tls)?]))?;
    Ok(vec![
        ("tls_fsync_ratio", tls_fsync / plain_fsync),
        ("tls_seq_ratio", tls_seq / plain_seq),
        ("tcp_fsync_p50_us", plain_fsync),
        ("tls_fsync_p50_us", tls_fsync),
        ("tcp_seq_mb_s", plain_seq),
        ("tls_seq_mb_s", tls_seq),
    ])
}
