//! What it costs that a service is started again: `nicfs` killed at each place of the chain, its supervisor alive, and all
//! services of each node ended in order and started, one node after the other. Programs write and sync on every node all the time:
//! none of them may see an error, nothing of the volume may be copied, and every acknowledged record must be there.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::failover::{Writer, highest, monotonic};
use super::load::{figures, number};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Kind, Result};
use crate::process::wait_until;

const RECORDS: &str = "1000000";
/// After the coordinator's start nobody is evicted for a while, and nothing that is measured then says anything.
const SETTLE: Duration = Duration::from_secs(3);
/// For so long is watched what a restart does.
const WATCH: Duration = Duration::from_millis(2500);
/// Members of the chain.
const NODES: std::ops::RangeInclusive<u32> = 1..=3;

/// A writer on each node.
struct Writers(Vec<(u32, Writer)>);

impl Writers {
    fn start(world: &World) -> Result<Self> {
        let begin = Instant::now();
        let mut all = Vec::new();
        for node in NODES {
            let path = world.file(node, &format!("records-{node}"));
            let command = world.under_run(node, &["records", &path, RECORDS, "600"])?;
            all.push((node, Writer::start(command)?));
        }
        for (_, writer) in &mut all {
            writer.wait_acks(100, Duration::from_secs(20))?;
        }
        while begin.elapsed() < SETTLE {
            crate::signals::check()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self(all))
    }

    /// The longest time in milliseconds for which one of them was not told that its record is safe.
    fn longest_stall(&self, since: u64) -> f64 {
        let now = monotonic();
        let stall = |writer: &Writer| {
            let (mut last, mut longest) = (since, 0);
            let acks = writer.acks();
            for at in acks.iter().map(|ack| ack.at).filter(|at| *at > since).chain([now]) {
                longest = longest.max(at.saturating_sub(last));
                last = at;
            }
            longest
        };
        self.0.iter().map(|(_, writer)| stall(writer)).max().unwrap_or(0) as f64 / 1e6
    }

    /// Ends them: how many had ended by themselves, which they do at the first error, and what is not there of all that was
    /// acknowledged, as another node sees it.
    fn finish(self, world: &World) -> Result<(f64, f64)> {
        let (mut errors, mut lost) = (0.0, 0.0);
        for (node, mut writer) in self.0 {
            errors += f64::from(u8::from(writer.has_ended()));
            writer.kill();
            let acknowledged = highest(&writer.finish(Duration::from_secs(5)));
            let other = node % 3 + 1;
            let path = world.file(other, &format!("records-{node}"));
            let seen = figures(world.under_run(other, &["verify", &path])?)?;
            lost += (acknowledged as f64 - number(&seen, "records")?).max(0.0);
        }
        Ok((errors, lost))
    }
}

fn three(bench: &Bench<'_>) -> Result<World> {
    if bench.replicas != 3 {
        return Err(Failure::new(
            Kind::Usage,
            format!("a restart with {} replicas", bench.replicas),
            "it looks at head, middle and tail: --replicas 3",
        ));
    }
    World::start(bench, World::plan(bench), &[1, 2, 3])
}

/// Waits until every node knows a chain of all.
fn whole(world: &World) -> Result<Vec<u64>> {
    let mut chain = Vec::new();
    wait_until("a whole chain", Duration::from_secs(30), || {
        let of = |node| {
            let status = world.local.status(node).ok()?;
            let list = status["chain"].as_array()?;
            let all = list.iter().filter_map(serde_json::Value::as_u64).collect::<Vec<_>>();
            (all.len() == 3 && status["ready"] == true).then_some(all)
        };
        let all: Option<Vec<_>> = NODES.map(of).collect();
        let same = all.filter(|all| all.windows(2).all(|two| two[0] == two[1]));
        Ok(same.map(|all| chain.clone_from(&all[0])))
    })?;
    Ok(chain)
}

/// Bytes of the volume that a node was sent since its service began.
fn copied(world: &World, node: u32) -> Result<f64> {
    Ok(world.local.status(node)?["counters"]["snapshot_bytes"].as_f64().unwrap_or(f64::NAN))
}

/// The bench `restart`.
pub fn restart(bench: &Bench<'_>) -> Result<Measured> {
    let world = three(bench)?;
    let writers = Writers::start(&world)?;
    let (mut stalls, mut bytes) = ([0.0; 3], 0.0);
    for (place, stall) in stalls.iter_mut().enumerate() {
        let victim = whole(&world)?[place] as u32;
        let killed = monotonic();
        if let Some(nicfs) = world.local.process(victim, "nicfs") {
            nicfs.signal(Signal::KILL);
        }
        std::thread::sleep(WATCH);
        crate::signals::check()?;
        *stall = writers.longest_stall(killed);
        whole(&world)?;
        bytes += copied(&world, victim)?;
    }
    let (errors, lost) = writers.finish(&world)?;
    let [head, middle, tail] = stalls;
    Ok(vec![
        ("stall_ms", head.max(middle).max(tail)),
        ("head_stall_ms", head),
        ("middle_stall_ms", middle),
        ("tail_stall_ms", tail),
        ("bytes", bytes),
        ("errors", errors),
        ("lost", lost),
    ])
}

/// Does something again and again; `false` if any of it fails.
struct Again {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<bool>>,
}

impl Again {
    fn start(mut once: impl FnMut() -> bool + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let all = move || {
            let mut good = true;
            while good && !stopped.load(Ordering::Relaxed) {
                good = once();
            }
            good
        };
        Self { stop, thread: Some(std::thread::spawn(all)) }
    }

    /// Compiles through the mount of a node.
    fn build(world: &World, node: u32) -> Result<Self> {
        let dir = PathBuf::from(world.file(node, "build"));
        std::fs::create_dir(&dir).context(dir.display())?;
        Ok(Self::start(move || {
            super::load::compile(&dir).is_ok_and(|program| {
                let ran = std::process::Command::new(&program).output();
                // (It says how it is used.)
                ran.is_ok() && std::fs::remove_file(&program).is_ok()
            })
        }))
    }

    /// fio under `corbel run` on a node: writes here and there, an fsync for each eighth, and reads what it has written. None: it is not
    /// installed.
    fn fio(world: &World, node: u32) -> Result<Option<Self>> {
        let version = std::process::Command::new("fio").arg("--version").output();
        if !version.is_ok_and(|said| said.status.success()) {
            eprintln!("corbel: bench upgrade: fio is not installed: without it");
            return Ok(None);
        }
        let mut command = world.run_command(node)?;
        let file = format!("--filename={}", world.file(node, "fio"));
        command.args(["fio", "--name=verified", &file, "--size=8m", "--bs=4k", "--rw=randwrite"]);
        command.args(["--verify=crc32c", "--do_verify=1", "--fsync=8", "--thread"]);
        // (It would leave that where it is called.)
        command.arg("--verify_state_save=0");
        Ok(Some(Self::start(move || {
            let said = command.output();
            let good = said.as_ref().is_ok_and(|said| said.status.success());
            if !good {
                let words = said.map(|said| String::from_utf8_lossy(&said.stderr).into_owned());
                eprintln!(
                    "corbel: bench upgrade: fio: {}",
                    words.unwrap_or_else(|e| e.to_string())
                );
            }
            good
        })))
    }

    fn finish(mut self) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().is_some_and(|thread| thread.join().unwrap_or(false))
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        // The mount is about to go.
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits until each node says that all understand what it does.
fn updated(world: &World) -> Result<()> {
    let knows = |node| {
        let said = world.local.status(node);
        said.is_ok_and(|said| said["level"].is_u64() && said["level"] == said["newest_level"])
    };
    wait_until("all nodes to be told that all are new", Duration::from_secs(10), || {
        let mut nodes = NODES;
        Ok(nodes.all(knows).then_some(()))
    })
}

/// The bench `upgrade`: by another build's program first, if one is named.
pub fn upgrade(bench: &Bench<'_>) -> Result<Measured> {
    let mut world = match bench.from {
        Some(program) => World::start_by(bench, program, &World::plan(bench))?,
        None => three(bench)?,
    };
    let script = super::load::sqlite_script(world.scratch())?;
    let writers = Writers::start(&world)?;
    let build = Again::build(&world, 3)?;
    let fio = Again::fio(&world, 1)?;
    let mut database = world.run_command(2)?;
    database.arg(super::load::python()?).arg(&script).arg(world.file(2, "upgrade.db")).arg("20000");
    let database = std::thread::spawn(move || figures(database).is_ok());
    let (mut bytes, begun) = (0.0, monotonic());
    // What is started from here on is this build's; the programs go on with what they began with.
    world.program = None;
    if let Some(coordinator) = world.local.coordinator() {
        coordinator.end(Duration::from_secs(10));
        world.local.start_coordinator()?;
    }
    for node in NODES {
        whole(&world)?;
        if let Some(serve) = world.local.process(node, "serve") {
            serve.end(Duration::from_secs(10));
        }
        world.local.start_node(node)?;
        whole(&world)?;
        bytes += copied(&world, node)?;
        crate::signals::check()?;
    }
    let stall = writers.longest_stall(begun);
    let (errors, lost) = writers.finish(&world)?;
    let with_fio = f64::from(u8::from(fio.is_some()));
    let ran = [database.join().unwrap_or(false), build.finish(), fio.is_none_or(Again::finish)];
    let failed = ran.iter().filter(|ran| !**ran).count();
    // All that is new works when all are, as soon as all have been told.
    updated(&world)?;
    world.local.corbel(1, &["snapshot", "create", "upgraded"])?;
    Ok(vec![
        ("errors", errors + failed as f64),
        ("lost", lost),
        ("bytes", bytes),
        ("stall_ms", stall),
        ("with_fio", with_fio),
    ])
}
