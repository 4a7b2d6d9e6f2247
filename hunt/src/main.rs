//! `corbel-hunt`: random histories of system calls by several processes on several nodes, beside a
//! reference file system; what differs is shrunk to a script. `docs/testing.md` tells of it.

mod draw;
mod ground;
mod judge;
mod pattern;
mod peer;
mod script;
mod shrink;
mod stage;
mod text;
mod worker;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::random::Random;
use clap::{Args, Parser, Subcommand};

use draw::{AVOIDED, Abilities, Draw, GROUPS, Wish};
use ground::{Ground, Plan};
use judge::Difference;
use script::Script;
use shrink::Bench;
use stage::{Setting, play};

/// The differential hunter.
#[derive(Parser, Debug)]
#[command(name = "corbel-hunt", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Draw histories from a seed, run them, and shrink what differs
    Hunt(HuntArgs),
    /// Run scripts again, and say whether they still differ
    Replay(ReplayArgs),
    /// Carry out calls for a director
    #[command(hide = true)]
    Worker(WorkerArgs),
}

/// Where histories run.
#[derive(Args, Debug, Clone)]
struct Place {
    /// The binary that makes the cluster (default: `corbel` beside this one)
    #[arg(long, value_name = "PATH")]
    corbel: Option<PathBuf>,
    /// Directory of the cluster, which must not be there
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=5))]
    nodes: u32,
    /// Size of the volume
    #[arg(long, default_value = "1GiB")]
    capacity: String,
    /// A directory of the reference file system, in which directories are made
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,
    /// Ways into the files
    #[arg(long, default_value = "mount,run", value_name = "LIST")]
    views: String,
    /// No cluster: a directory of this machine takes its place, to try the hunter itself
    #[arg(long, value_name = "DIR")]
    plain: Option<PathBuf>,
    /// Goes on after differences of this kind, which leave both sides the same
    #[arg(long, value_name = "KIND")]
    tolerate: Vec<String>,
    /// With --plain: a planted difference
    #[arg(long, value_name = "NAME")]
    lie: Option<String>,
    /// Prints the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct HuntArgs {
    #[command(flatten)]
    place: Place,
    /// Seed of the first history; the others count on
    #[arg(long)]
    seed: Option<u64>,
    /// Ends after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Ends after so many calls
    #[arg(long)]
    ops: Option<u64>,
    /// Ends after so many histories
    #[arg(long)]
    histories: Option<u64>,
    /// Calls of each history (drawn, if left out)
    #[arg(long)]
    calls: Option<u64>,
    /// Faults, one in so many turns (300 if no number is given)
    #[arg(long, value_name = "RATE", num_args = 0..=1, default_missing_value = "300")]
    faults: Option<u64>,
    /// All calls are about one file
    #[arg(long)]
    one_file: bool,
    /// Only these kinds of calls
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// Not these kinds of calls
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    without: Vec<String>,
    /// Leaves out what is known to differ (exec-as-other)
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    avoid: Vec<String>,
    /// Ends after so many differences
    #[arg(long, default_value_t = 10)]
    differences: u64,
    /// Seconds that shrinking one of them may take
    #[arg(long, default_value_t = 120)]
    shrink: u64,
    /// Puts a script of each difference there
    #[arg(long, value_name = "DIR")]
    found: Option<PathBuf>,
    /// One line for each history
    #[arg(long)]
    verbose: bool,
}

#[derive(Args, Debug)]
struct ReplayArgs {
    #[command(flatten)]
    place: Place,
    /// How often each is run
    #[arg(long, default_value_t = 1)]
    times: u32,
    /// Shrinks what differs
    #[arg(long)]
    shrink: bool,
    /// Scripts
    #[arg(required = true)]
    scripts: Vec<PathBuf>,
}

#[derive(Args, Debug)]
struct WorkerArgs {
    #[arg(long)]
    root: String,
    #[arg(long, default_value_t = 0)]
    seat: usize,
    #[arg(long, default_value = "")]
    slots: String,
    #[arg(long)]
    reference: bool,
    #[arg(long)]
    plain: bool,
    /// Was started by a worker, and goes on where that was.
    #[arg(long)]
    again: bool,
    #[arg(long)]
    lie: Option<String>,
}

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn note_signal(_: i32) {
    STOP.store(true, Ordering::Relaxed);
}

/// Whether somebody wants this program to end.
fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

fn catch_signals() {
    peer::adopt();
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        #[allow(unsafe_code)]
        unsafe {
            libc::signal(number, note_signal as *const () as libc::sighandler_t);
        }
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Worker(args) => run_worker(&args),
        Verb::Hunt(args) => hunt(&args),
        Verb::Replay(args) => replay(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("corbel-hunt: {error}");
            ExitCode::from(2)
        }
    }
}

fn run_worker(args: &WorkerArgs) -> io::Result<bool> {
    let wrong = |what: &str| io::Error::other(format!("{what} cannot be read"));
    let slots = args.slots.split(',').filter(|s| !s.is_empty());
    let slots = slots.map(|slot| {
        let (index, fd) = slot.split_once('=')?;
        Some((index.parse().ok()?, fd.parse().ok()?))
    });
    let lie = |name: &String| {
        worker::LIES
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, lie)| *lie)
            .ok_or_else(|| wrong("--lie"))
    };
    let start = worker::Start {
        root: text::unescape(&args.root).ok_or_else(|| wrong("--root"))?,
        seat: args.seat.min(worker::SEATS - 1),
        reference: args.reference,
        plain: args.plain,
        lie: args.lie.as_ref().map(lie).transpose()?,
        slots: slots.collect::<Option<_>>().ok_or_else(|| wrong("--slots"))?,
    };
    let mut worker = worker::Worker::new(start)?;
    if !args.again {
        worker.enter()?;
    }
    worker.serve();
    Ok(true)
}

/// Directories and a cluster that go when it is dropped.
struct Scene {
    ground: Option<Ground>,
    setting: Setting,
    scratch: PathBuf,
}

impl Scene {
    fn set(place: &Place) -> io::Result<Self> {
        let number = std::process::id();
        let base = place.reference.clone().unwrap_or_else(std::env::temp_dir);
        let scratch = base.join(format!("corbel-hunt-{number}"));
        fs::create_dir_all(&scratch)?;
        // Others look at it through descriptors and names.
        let setting = Setting {
            reference: scratch.join("reference"),
            lie: place.lie.clone(),
            tolerated: place.tolerate.clone(),
            log: scratch.join("workers.log"),
        };
        let mut this = Self { ground: None, setting, scratch };
        fs::create_dir_all(&this.setting.reference)?;
        this.ground = Some(match &place.plain {
            Some(dir) => Ground::plain(dir, place.nodes),
            None => {
                let own = std::env::current_exe()?.with_file_name("corbel");
                let has = |view: &str| place.views.split(',').any(|v| v == view);
                let dir = format!("/dev/shm/corbel-hunt-{number}");
                Ground::cluster(&Plan {
                    corbel: place.corbel.clone().unwrap_or(own),
                    dir: place.dir.clone().unwrap_or_else(|| dir.into()),
                    nodes: place.nodes,
                    capacity: place.capacity.clone(),
                    mounts: has("mount"),
                    runs: has("run"),
                })?
            }
        });
        Ok(this)
    }

    fn ground(&mut self) -> io::Result<&mut Ground> {
        self.ground.as_mut().ok_or_else(|| io::Error::other("no ground"))
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        drop(self.ground.take());
        let said = fs::read_to_string(&self.setting.log).unwrap_or_default();
        for line in said.lines().take(20) {
            eprintln!("worker: {line}");
        }
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// What the reference can do.
fn abilities(dir: &Path) -> io::Result<Abilities> {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let path = dir.join("probe");
    fs::write(&path, [1; 16384])?;
    let file = fs::File::options().read(true).write(true).open(&path)?;
    let fd = file.as_raw_fd();
    let allocate = |mode: i32| {
        // SAFETY: takes numbers only.
        #[allow(unsafe_code)]
        unsafe {
            libc::fallocate(fd, mode, 0, 4096) == 0
        }
    };
    let value = vec![7_u8; 60_000];
    let set = |name: &std::ffi::CStr, length: usize| {
        // SAFETY: the name ends with a zero; the value is as long as is said.
        #[allow(unsafe_code)]
        unsafe {
            libc::fsetxattr(fd, name.as_ptr(), value.as_ptr().cast(), length.min(value.len()), 0)
                == 0
        }
    };
    // SAFETY: the name ends with a zero; there is room for nothing, which asks for the length.
    #[allow(unsafe_code)]
    let list = unsafe {
        libc::fgetxattr(fd, c"system.posix_acl_access".as_ptr(), std::ptr::null_mut(), 0) >= 0
            || io::Error::last_os_error().raw_os_error() == Some(libc::ENODATA)
    };
    let tmpfile = fs::File::options().write(true).custom_flags(libc::O_TMPFILE).open(dir).is_ok();
    let found = Abilities {
        root: stage::is_root(),
        xattrs: set(c"user.probe", 10),
        large_xattrs: set(c"user.probe", 60_000),
        acls: list,
        zero_range: allocate(libc::FALLOC_FL_ZERO_RANGE),
        shift: allocate(libc::FALLOC_FL_INSERT_RANGE) && allocate(libc::FALLOC_FL_COLLAPSE_RANGE),
        tmpfile,
    };
    fs::remove_file(&path)?;
    Ok(found)
}

/// Views of the actors of a history.
fn cast(random: &mut Random, ground: &Ground) -> Vec<String> {
    let count = [1, 1, 2, 2, 3, 4][random.below(6) as usize];
    let views = &ground.views;
    (0..count).map(|_| views[random.below(views.len() as u64) as usize].name.clone()).collect()
}

fn show(difference: &Difference) {
    println!("  difference: {}", difference.kind);
    println!("    at:       {}", difference.text);
    println!("    expected: {}", clipped(&difference.expected));
    println!("    got:      {}", clipped(&difference.got));
    if !difference.detail.is_empty() {
        println!("    {}", difference.detail);
    }
}

fn clipped(text: &str) -> &str {
    text.get(..1000).unwrap_or(text)
}

fn hunt(args: &HuntArgs) -> io::Result<bool> {
    let unknown =
        args.only.iter().chain(&args.without).find(|name| !GROUPS.contains(&name.as_str()));
    if let Some(name) = unknown {
        return Err(io::Error::other(format!(
            "no kind of calls {name:?}; there are {}",
            GROUPS.join(", ")
        )));
    }
    if let Some(name) = args.avoid.iter().find(|name| !AVOIDED.contains(&name.as_str())) {
        return Err(io::Error::other(format!("--avoid knows no {name:?}")));
    }
    catch_signals();
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let first = args.seed.unwrap_or(now.as_secs() * 1000);
    println!("hunt: first seed {first}");
    let mut scene = Scene::set(&args.place)?;
    let abilities = abilities(&scene.setting.reference)?;
    let wish = Wish {
        only: args.only.clone(),
        without: args.without.clone(),
        avoid: args.avoid.clone(),
        one_file: args.one_file,
        faults: args.faults.filter(|_| args.place.plain.is_none()),
        calls: args.calls,
        nodes: args.place.nodes,
    };
    let begin = Instant::now();
    let (mut calls, mut histories, mut differences) = (0, 0, 0);
    let over = |calls: u64, histories: u64, differences: u64| {
        stopped()
            || args.seconds.is_some_and(|limit| begin.elapsed().as_secs() >= limit)
            || args.ops.is_some_and(|limit| calls >= limit)
            || args.histories.is_some_and(|limit| histories >= limit)
            || differences >= args.differences
    };
    while !over(calls, histories, differences) {
        let seed = first + histories;
        histories += 1;
        let mut random = Random::new(seed);
        let setting = scene.setting.clone();
        let ground = scene.ground()?;
        let views = cast(&mut random, ground);
        let mut draw = Draw::new(seed, views.len(), &wish, abilities);
        let about = draw.about();
        if args.verbose {
            println!("seed {seed}: {}; {about}", views.join(" "));
        }
        let outcome = play(ground, &setting, &format!("hunt-{seed}"), &views, &mut draw)?;
        calls += outcome.calls;
        let Some(difference) = outcome.difference else { continue };
        differences += 1;
        println!("\nFOUND by seed {seed} ({}; {about}), call {}", views.join(" "), difference.step);
        show(&difference);
        let name = format!("shrink-{seed}");
        let mut bench = Bench::new(ground, &setting, &name, Duration::from_secs(args.shrink));
        let shrunk = bench.shrink(&outcome.script, &difference.kind)?;
        let (script, difference, about) = match shrunk {
            Some(shrunk) => {
                let (shown, of) = shrunk.shown;
                let about =
                    format!("shown by {shown} of {of} runs; {} runs to shrink it", shrunk.runs);
                (shrunk.script, shrunk.difference, about)
            }
            None => (outcome.script, difference, "not shown again: the whole history".to_string()),
        };
        println!("  {about}: {} steps", script.steps.len());
        if script.steps.len() <= 60 {
            print!("{script}");
        }
        show(&difference);
        if let Some(dir) = &args.found {
            keep(dir, seed, &script, &difference, &about, ground)?;
        }
    }
    let faults = scene.ground()?.faults;
    drop(scene);
    if args.place.json {
        let figures = serde_json::json!({
            "operations": calls, "differences": differences, "faults": faults, "histories": histories,
            "seconds": begin.elapsed().as_secs(), "seed": first,
        });
        println!("{figures}");
    } else {
        println!(
            "{calls} operations in {histories} histories, {faults} faults, {differences} differences; {} s, seeds \
             {first} to {}",
            begin.elapsed().as_secs(),
            first + histories - 1
        );
    }
    Ok(differences == 0)
}

fn keep(
    dir: &Path,
    seed: u64,
    script: &Script,
    difference: &Difference,
    about: &str,
    ground: &Ground,
) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let text = format!(
        "# seed {seed}; {about}\n# {}\n# at:       {}\n# expected: {}\n# got:      {}\n# {}\n{script}",
        difference.kind,
        difference.text,
        clipped(&difference.expected),
        clipped(&difference.got),
        difference.detail
    );
    fs::write(dir.join(format!("{seed}.txt")), text)?;
    ground.keep_logs(&dir.join(format!("{seed}-logs")));
    Ok(())
}

fn replay(args: &ReplayArgs) -> io::Result<bool> {
    catch_signals();
    let mut scripts = Vec::new();
    for path in &args.scripts {
        let text = fs::read_to_string(path)?;
        let script = Script::parse(&text);
        scripts.push((
            path,
            script.map_err(|why| io::Error::other(format!("{}: {why}", path.display())))?,
        ));
    }
    let mut scene = Scene::set(&args.place)?;
    let setting = scene.setting.clone();
    let ground = scene.ground()?;
    let mut differences = 0;
    for (number, (path, script)) in scripts.iter().enumerate() {
        let name = format!("replay-{number}");
        let mut bench = Bench::new(ground, &setting, &name, Duration::from_secs(300));
        let mut shown = 0;
        for _ in 0..args.times {
            if stopped() {
                break;
            }
            let Some(difference) = bench.run(script)? else { continue };
            shown += 1;
            if shown == 1 {
                println!("{}:", path.display());
                show(&difference);
                if args.shrink
                    && let Some(shrunk) = bench.shrink(script, &difference.kind)?
                {
                    print!("{}", shrunk.script);
                    show(&shrunk.difference);
                }
            }
        }
        println!("{}: {shown} of {} runs differ", path.display(), args.times);
        differences += u64::from(shown > 0);
    }
    let faults = ground.faults;
    drop(scene);
    if args.place.json {
        println!(
            "{}",
            serde_json::json!({"scripts": scripts.len(), "differences": differences, "faults": faults})
        );
    }
    Ok(differences == 0)
}
