//! `corbel bench rados`: the device of an RBD image beside librbd, which fio's engine `rbd` drives, on one image of a cluster that runs
//! ([`Options::conf`]). They take turns, in the same minutes: who comes after whom changes, and of the turns the median counts.
//!
//! - `vs_librbd_write`, `vs_librbd_read`: our latency (median) over librbd's, random 4 KiB and 128 KiB at depth 1 and 16; the geometric
//!   mean of the four.
//! - `cpu_ratio`: processor time that the client takes for a request, all its threads, over that of librbd's; the geometric mean of the
//!   eight cases.
//! - The `worst` of these, and the same with `cached`: librbd's cache (`rbd_cache`) beside our layer with write-back.
//!
//! What counts is without caches: librbd's answers a write before the cluster has it. librbd's figures are fio's own latencies, from when it
//! submits until it has the answer, as ours are; its processor time is that of fio's process, of which a run of one request is taken off, since
//! fio counts one of its threads alone.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ::block::device::{Device, Op, Request};
use ::block::layer::{Config, Layered};
use ::block::rbd::RbdImage;
use base::random::Random;
use clap::Args;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::steady::median;
use super::straw2::children_seconds;
use super::world::scratch;
use super::{Asked, Figures};
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;

/// Bytes of the image.
const IMAGE: u64 = 256 << 20;
/// How much is written at a time to fill it.
const OBJECT: u64 = 4 << 20;
/// Turns of each contender in each case.
const TURNS: u64 = 3;
/// Both caches, in bytes.
const CACHE: u64 = 32 << 20;
/// An image that was open a moment ago may be held still.
const TRIES: u32 = 40;
/// After this an image that cannot be removed is left.
const PARTING: Duration = Duration::from_secs(40);

/// What is asked.
pub const ASKED: &[(&str, Asked)] = &[
    ("vs_librbd_write", Asked::Max(0.8)),
    ("vs_librbd_read", Asked::Max(0.8)),
    ("cpu_ratio", Asked::Max(0.6)),
];

/// Which cluster, and how long.
#[derive(Args, Debug, Default, Clone)]
pub struct Options {
    /// Configuration of a Ceph cluster that runs (scripts/ceph.sh start DIR makes a small one, with DIR/ceph.conf)
    #[arg(long, value_name = "FILE")]
    pub conf: Option<PathBuf>,
    /// Pool in which the image is made, and removed at the end
    #[arg(long, value_name = "POOL", default_value = "rbd")]
    pub pool: String,
    /// Seconds of each turn
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub seconds: u32,
    /// One turn of each instead of three
    #[arg(long)]
    pub quick: bool,
}

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    write: bool,
    bytes: u32,
    depth: usize,
}

impl Case {
    /// All of them: writes first.
    fn all() -> impl Iterator<Item = Self> {
        [true, false].into_iter().flat_map(|write| {
            [4 << 10, 128 << 10].into_iter().flat_map(move |bytes| {
                [1, 16].into_iter().map(move |depth| Self { write, bytes, depth })
            })
        })
    }

    fn name(self) -> String {
        let what = if self.write { "write" } else { "read" };
        format!("{what} {} KiB, depth {}", self.bytes >> 10, self.depth)
    }
}

/// Who does it: Corbel or librbd, without a cache and with one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Who {
    Corbel,
    Librbd,
    CorbelCached,
    LibrbdCached,
}

impl Who {
    const ALL: [Self; 4] = [Self::Corbel, Self::Librbd, Self::CorbelCached, Self::LibrbdCached];
    const NAMES: [&'static str; 4] = ["corbel", "librbd", "corbel_cached", "librbd_cached"];
}

/// What a turn took.
#[derive(Clone, Copy, Debug)]
struct Turn {
    p50_us: f64,
    p99_us: f64,
    per_s: f64,
    /// Processor time of a request.
    cpu_us: f64,
}

/// The image, the files beside it, and what is needed to use them; all of it goes with this.
struct Stage<'a> {
    options: &'a Options,
    conf: PathBuf,
    dir: PathBuf,
    image: String,
    /// The image may be there.
    made: bool,
    /// Processor seconds of fio with one request: with and without a cache, each to read and to write.
    fio_base: [[f64; 2]; 2],
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // Who watched it a moment ago is forgotten after half a minute; a cluster that is gone is not waited for.
        let end = Instant::now() + PARTING;
        while self.made
            && let Err(failure) = self.rbd(&["rm", "--no-progress", &self.named()])
        {
            if Instant::now() > end || crate::signals::check().is_err() {
                log::warn!("bench rados: image {} is left: {failure}", self.named());
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A cluster is needed, and tools.
fn missing(what: impl std::fmt::Display) -> Failure {
    Failure::new(
        Kind::Environment,
        format!("bench rados: {what}"),
        "apt install --no-install-recommends ceph-mon ceph-mgr ceph-osd ceph-common librados2 librbd1 fio; scripts/ceph.sh start DIR; then --conf DIR/ceph.conf",
    )
}

fn failed(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("{what}: {error}"), "see ceph -s; run with --log-level debug")
}

/// A program that is ended when it takes longer, whether it will or not: what a cluster does not answer is not waited for.
fn bounded(program: &str, seconds: u32) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5"]).arg(seconds.to_string()).arg(program);
    command
}

/// Output of a program that is to succeed; else what it said.
fn output(name: &str, command: &mut Command) -> std::result::Result<String, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|e| format!("{name}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().rev().find(|line| !line.trim().is_empty());
        return Err(format!("{name}: {}", said.unwrap_or("it failed and does not say why")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl<'a> Stage<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        let named =
            options.conf.clone().or_else(|| std::env::var_os("CEPH_CONF").map(PathBuf::from));
        let conf = named.ok_or_else(|| missing("no cluster is named"))?;
        let text = std::fs::read_to_string(&conf)
            .map_err(|error| missing(format_args!("{}: {error}", conf.display())))?;
        let has_engine =
            output("fio", Command::new("fio").arg("--enghelp=rbd")).map_err(missing)?;
        if !has_engine.contains("rbdname") {
            return Err(missing("fio has no engine rbd"));
        }
        let dir = scratch()?;
        let image = format!("corbel-bench-{}", std::process::id());
        let conf = dir.join("cold.conf");
        let fio_base = Default::default();
        let mut stage = Self { options, conf, dir, image, made: false, fio_base };
        // fio reads a file of configuration, and nothing else. What hangs is to be told rather than waited for.
        for (file, cache) in [("cold", "false"), ("cached", "true")] {
            let text = format!(
                "{text}\n[client]\nclient_mount_timeout = 10\nrados_mon_op_timeout = 10\nrbd_cache = {cache}\n\
                 rbd_cache_size = {CACHE}\nrbd_cache_policy = writeback\n\
                 rbd_cache_writethrough_until_flush = false\n"
            );
            let path = stage.dir.join(format!("{file}.conf"));
            // There may be a key in it.
            let file =
                std::fs::File::options().create_new(true).write(true).mode(0o600).open(&path);
            file.and_then(|mut file| file.write_all(text.as_bytes())).context(path.display())?;
        }
        stage.made = true;
        stage.rbd(&["create", "--size", &format!("{}M", IMAGE >> 20), &stage.named()]).map_err(
            |error| {
                missing(format_args!("an image cannot be made in pool {}: {error}", options.pool))
            },
        )?;
        Ok(stage)
    }

    fn named(&self) -> String {
        format!("{}/{}", self.options.pool, self.image)
    }

    /// Ceph's tool for images.
    fn rbd(&self, args: &[&str]) -> std::result::Result<(), String> {
        output("rbd", bounded("rbd", 60).arg("-c").arg(&self.conf).args(args)).map(drop)
    }

    fn open(&self) -> Result<RbdImage> {
        let at = format!("{}?conf={}", self.named(), self.conf.display());
        let at = at.parse().map_err(|e: String| failed("the image", e))?;
        // Who had it before may have ended just now.
        let mut tries = 0;
        loop {
            match RbdImage::open(&at, false) {
                Ok(image) => return Ok(image),
                Err(error) if tries == TRIES => return Err(failed("opening the image", error)),
                Err(_) => {
                    crate::signals::check()?;
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(250));
                }
            }
        }
    }

    /// All objects are there, so that nobody makes one while he is measured.
    fn fill(&self) -> Result<()> {
        let image = self.open()?;
        let mut data = vec![0; OBJECT as usize];
        Random::new(1).fill(&mut data);
        for offset in (0..IMAGE).step_by(OBJECT as usize) {
            crate::signals::check()?;
            let op = Op::Write { offset, data: data.clone(), fua: false };
            one(&image, op)?;
        }
        Ok(())
    }

    fn turn(&self, who: Who, case: Case, seed: u64) -> Result<Turn> {
        crate::signals::check()?;
        let time = Duration::from_secs(self.options.seconds.into());
        match who {
            Who::Corbel => load(&self.open()?, case, time, seed),
            Who::CorbelCached => {
                let config = Config { cache_bytes: CACHE, write_back: true, ..Config::default() };
                let layered = Layered::new(Arc::new(self.open()?), config);
                load(&layered.context("starting the layer's thread")?, case, time, seed)
            }
            Who::Librbd => self.fio("cold", case, seed, None),
            Who::LibrbdCached => self.fio("cached", case, seed, None),
        }
    }

    /// The same by fio, or one request alone.
    fn fio(&self, conf: &str, case: Case, seed: u64, only: Option<f64>) -> Result<Turn> {
        let conf_file = self.dir.join(format!("{conf}.conf"));
        let before = children_seconds().unwrap_or(f64::NAN);
        let mut command = bounded("fio", self.options.seconds + 60);
        command.env("CEPH_CONF", &conf_file).current_dir(&self.dir);
        let rw = if case.write { "randwrite" } else { "randread" };
        command.args([
            "--name=rbd",
            "--ioengine=rbd",
            "--clientname=admin",
            "--output-format=json",
        ]);
        command.args(["--norandommap", "--lat_percentiles=1", "--clat_percentiles=0"]);
        command.args(["--percentile_list=50:99", "--eta=never"]);
        command
            .arg(format!("--pool={}", self.options.pool))
            .arg(format!("--rbdname={}", self.image));
        command.arg(format!("--rw={rw}")).arg(format!("--bs={}", case.bytes));
        command.arg(format!("--iodepth={}", case.depth)).arg(format!("--randseed={}", seed + 1));
        if only.is_some() {
            command.arg("--number_ios=1");
        } else {
            command.arg("--time_based").arg(format!("--runtime={}", self.options.seconds));
        }
        let said = output("fio", &mut command).map_err(|e| failed("the peer", e))?;
        let cpu = children_seconds().unwrap_or(f64::NAN) - before;
        // What it says before that are warnings.
        let json = said.find('{').map_or("", |at| &said[at..]);
        let all: Value = serde_json::from_str(json).map_err(|e| failed("what fio says", e))?;
        let told = &all["jobs"][0][if case.write { "write" } else { "read" }];
        let number = |value: &Value| {
            value.as_f64().ok_or_else(|| failed("what fio says", "a figure is not there"))
        };
        let percentile = &told["lat_ns"]["percentile"];
        let (count, millis) = (number(&told["total_ios"])?, number(&told["runtime"])?);
        let base = self.fio_base[usize::from(conf == "cached")][usize::from(case.write)];
        Ok(Turn {
            p50_us: number(&percentile["50.000000"])? / 1e3,
            p99_us: number(&percentile["99.000000"])? / 1e3,
            per_s: count / millis.max(1.0) * 1e3,
            cpu_us: (cpu - base) / count.max(1.0) * 1e6,
        })
    }

    /// What fio takes to start, to connect, and to end.
    fn measure_base(&mut self) -> Result<()> {
        for (i, conf) in ["cold", "cached"].into_iter().enumerate() {
            for write in [false, true] {
                let case = Case { write, bytes: 4096, depth: 1 };
                let mut all = Vec::new();
                for seed in 0..5 {
                    all.push(self.fio(conf, case, seed, Some(1.0))?.cpu_us / 1e6);
                }
                self.fio_base[i][usize::from(write)] = median(all);
            }
        }
        Ok(())
    }
}

fn processor() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// What a request has come to. A cluster may never say: then whoever waits is to be able to end it, and it is no measurement.
fn heard<T>(from: &Receiver<T>) -> Result<T> {
    let end = Instant::now() + PARTING;
    loop {
        match from.recv_timeout(Duration::from_secs(1)) {
            Ok(told) => return Ok(told),
            Err(RecvTimeoutError::Timeout) if Instant::now() < end => crate::signals::check()?,
            Err(error) => return Err(failed("a request", error)),
        }
    }
}

/// One request, to its end.
fn one(device: &dyn Device, op: Op) -> Result<()> {
    let (told, hear) = channel();
    device.submit(Request { op, done: Box::new(move |end| drop(told.send(end))) });
    heard(&hear)?.map(drop).map_err(|e| failed("a request", e))
}

/// So many requests in flight, for so long; the thread that submits them waits for their answers, as fio's does.
fn load(device: &dyn Device, case: Case, time: Duration, seed: u64) -> Result<Turn> {
    let mut random = Random::new(seed);
    let mut data = vec![0; case.bytes as usize];
    random.fill(&mut data);
    let (to, from) = channel();
    let mut submit = || {
        let offset = random.below(IMAGE / u64::from(case.bytes)) * u64::from(case.bytes);
        let begun = Instant::now();
        let op = if case.write {
            Op::Write { offset, data: data.clone(), fua: false }
        } else {
            Op::Read { offset, len: case.bytes }
        };
        let to = to.clone();
        let done = Box::new(move |outcome| drop(to.send((begun, outcome))));
        device.submit(Request { op, done });
    };
    let cpu = processor();
    let begun = Instant::now();
    let mut all = Vec::new();
    let mut under_way = 0;
    loop {
        let is_over = begun.elapsed() >= time;
        if is_over && under_way == 0 {
            break;
        }
        while !is_over && under_way < case.depth {
            submit();
            under_way += 1;
        }
        let (begun, outcome) = heard(&from)?;
        outcome.map_err(|e| failed("a request", e))?;
        all.push(begun.elapsed().as_secs_f64() * 1e6);
        under_way -= 1;
    }
    let wall = begun.elapsed().as_secs_f64();
    // What a cache has kept back is to be paid for as well, as when fio closes its image.
    one(device, Op::Flush)?;
    let cpu = processor() - cpu;
    let count = all.len() as f64;
    all.sort_by(f64::total_cmp);
    Ok(Turn {
        p50_us: all[all.len() / 2],
        p99_us: all[all.len() * 99 / 100],
        per_s: count / wall,
        cpu_us: cpu / count * 1e6,
    })
}

/// Medians of turns, of each figure.
fn of_turns(turns: &[Turn]) -> Turn {
    let of = |figure: fn(&Turn) -> f64| median(turns.iter().map(figure).collect());
    Turn {
        p50_us: of(|t| t.p50_us),
        p99_us: of(|t| t.p99_us),
        per_s: of(|t| t.per_s),
        cpu_us: of(|t| t.cpu_us),
    }
}

fn mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}

fn worst(ratios: &[f64]) -> f64 {
    ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn round(x: f64) -> Value {
    if x.is_finite() { ((x * 1000.0).round() / 1000.0).into() } else { Value::Null }
}

/// Turns of all in one case, one after the other, each time another one first; the medians.
fn measure(stage: &Stage<'_>, case: Case) -> Result<[Turn; 4]> {
    let mut all: [Vec<Turn>; 4] = Default::default();
    for turn in 0..if stage.options.quick { 1 } else { TURNS } {
        for i in 0..Who::ALL.len() {
            let i = (i + turn as usize) % Who::ALL.len();
            all[i].push(stage.turn(Who::ALL[i], case, turn)?);
        }
    }
    Ok(all.map(|turns| of_turns(&turns)))
}

/// Runs it. Rows are printed as they come: text, or one JSON object a line.
pub fn run(out: &Output, options: &Options) -> Result<Figures> {
    crate::signals::catch();
    let mut stage = Stage::new(options)?;
    out.step(format!("rados: an image of {} MiB in pool {}", IMAGE >> 20, options.pool));
    stage.fill()?;
    stage.measure_base()?;
    let mut cases = Vec::new();
    for case in Case::all() {
        let turns = measure(&stage, case)?;
        for (who, turn) in Who::NAMES.into_iter().zip(turns) {
            let row = json!({"row": case.name(), "who": who, "p50_us": round(turn.p50_us),
                "p99_us": round(turn.p99_us), "per_s": round(turn.per_s), "cpu_us": round(turn.cpu_us)});
            out.result(&row, || {
                println!(
                    "{:<24}{who:<15}p50 {:>9.1} us  p99 {:>10.1} us {:>9.0}/s  cpu {:>7.1} us",
                    case.name(),
                    turn.p50_us,
                    turn.p99_us,
                    turn.per_s,
                    turn.cpu_us
                );
            });
        }
        cases.push((case, turns));
    }
    let mut figures = Figures::new();
    for (prefix, ours, theirs) in [("", 0, 1), ("cached_", 2, 3)] {
        let ratios = |of: fn(Case) -> bool, figure: fn(&Turn) -> f64| -> Vec<f64> {
            let of_kind = cases.iter().filter(|(case, _)| of(*case));
            of_kind.map(|(_, turns)| figure(&turns[ours]) / figure(&turns[theirs])).collect()
        };
        for (name, ratios) in [
            ("vs_librbd_write", ratios(|case| case.write, |turn| turn.p50_us)),
            ("vs_librbd_read", ratios(|case| !case.write, |turn| turn.p50_us)),
            ("cpu_ratio", ratios(|_| true, |turn| turn.cpu_us)),
        ] {
            figures.insert(format!("{prefix}{name}"), round(mean(&ratios)));
            figures.insert(format!("{prefix}{name}_worst"), round(worst(&ratios)));
        }
    }
    Ok(figures)
}
