//! The differential hunter: random histories of system calls by several processes on several nodes, beside a
//! reference file system; what differs is shrunk to a script. `docs/testing.md` tells of it,
//! `corbel bench hunt` is its program.

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

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::random::Random;
use clap::Args;

pub use draw::{AVOIDED, GROUPS};
use draw::{Abilities, Draw, Wish};
pub use ground::{Ground, Services, View};
use judge::Difference;
use script::Script;
use shrink::Bench;
use stage::{Setting, play};

/// What is hunted, and how.
#[derive(Args, Debug, Clone)]
#[group(id = "hunted")]
pub struct Options {
    /// Seed of the first history; the others count on (default: the time)
    #[arg(long)]
    pub seed: Option<u64>,
    /// Ends after so many seconds (default: 60, unless --ops or --histories says when)
    #[arg(long)]
    pub seconds: Option<u64>,
    /// Ends after so many calls
    #[arg(long)]
    pub ops: Option<u64>,
    /// Ends after so many histories
    #[arg(long)]
    pub histories: Option<u64>,
    /// Calls of each history (drawn, if left out)
    #[arg(long)]
    pub calls: Option<u64>,
    /// A fault in about so many turns; 0 for none
    #[arg(long, value_name = "TURNS", default_value_t = 300)]
    pub faults: u64,
    /// All calls are about one file
    #[arg(long)]
    pub one_file: bool,
    /// Only these kinds of calls (data, size, hole, copy, clone, sync, map, stat, mode, owner, time, xattr, acl,
    /// names, dirs, lock, dup, child, cred, direct)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = GROUPS)]
    pub only: Vec<String>,
    /// Not these kinds of calls
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = GROUPS)]
    pub without: Vec<String>,
    /// Leaves out what is known to differ
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = AVOIDED)]
    pub avoid: Vec<String>,
    /// Goes on after differences of this kind, which leave both sides the same
    #[arg(long, value_name = "KIND")]
    pub tolerate: Vec<String>,
    /// Ends after so many differences
    #[arg(long, default_value_t = 10)]
    pub differences: u64,
    /// Seconds that shrinking one of them may take
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub shrink: u64,
    /// Puts a script of each difference there, with the logs of the services; of a script that is run again, a
    /// shorter one
    #[arg(long, value_name = "DIR")]
    pub found: Option<PathBuf>,
    /// Runs these scripts again in place of drawing histories
    #[arg(long, value_name = "SCRIPT")]
    pub replay: Vec<PathBuf>,
    /// How often each script is run
    #[arg(long, value_name = "N", default_value_t = 1, requires = "replay")]
    pub times: u32,
    /// A directory of the reference file system, in which directories are made (default: for temporary files)
    #[arg(long, value_name = "DIR")]
    pub reference: Option<PathBuf>,
    /// A planted difference, to try the hunter itself
    #[arg(long, value_name = "NAME", requires = "plain")]
    pub lie: Option<String>,
    /// One line for each history
    #[arg(long)]
    pub verbose: bool,
}

/// How a process that carries out calls is started; the hunter does that.
#[derive(Args, Debug)]
pub struct WorkerArgs {
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
    #[arg(long)]
    ends: bool,
    /// Was started by a worker, and goes on where that was.
    #[arg(long)]
    again: bool,
    #[arg(long)]
    lie: Option<String>,
}

/// What a hunt comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Calls that were made and compared.
    pub operations: u64,
    /// Histories.
    pub histories: u64,
    /// Differences found; of scripts: how many differ.
    pub differences: u64,
    /// Histories that ended early at a known limit: a process under `run` was refused what it has open and could not
    /// open now.
    pub barred: u64,
    /// Faults brought about.
    pub faults: u64,
    /// How long it took.
    pub seconds: u64,
    /// Seed of the first history.
    pub seed: u64,
}

/// Carries out calls for a director, until that ends it.
pub fn work(args: &WorkerArgs) -> io::Result<()> {
    let wrong = |what: &str| io::Error::other(format!("{what} cannot be read"));
    let slots = args.slots.split(',').filter(|s| !s.is_empty());
    let slots = slots.map(|slot| {
        let (index, fd) = slot.split_once('=')?;
        Some((index.parse().ok()?, fd.parse().ok()?))
    });
    let start = worker::Start {
        root: text::unescape(&args.root).ok_or_else(|| wrong("--root"))?,
        seat: args.seat.min(worker::SEATS - 1),
        reference: args.reference,
        plain: args.plain,
        ends: args.ends,
        lie: args.lie.as_deref().map(|name| lie(name).ok_or_else(|| wrong("--lie"))).transpose()?,
        slots: slots.collect::<Option<_>>().ok_or_else(|| wrong("--slots"))?,
    };
    let mut worker = worker::Worker::new(start)?;
    match args.again {
        true => worker.touch(),
        false => worker.enter()?,
    }
    worker.serve();
    Ok(())
}

fn lie(name: &str) -> Option<worker::Lie> {
    worker::LIES.iter().find(|(known, _)| *known == name).map(|(_, lie)| *lie)
}

/// A hunt under way.
#[derive(Debug)]
pub struct Hunt<'a> {
    options: &'a Options,
    ground: Ground,
    setting: Setting,
    scratch: PathBuf,
    say: fn(&str),
}

impl<'a> Hunt<'a> {
    /// Prepares a hunt on that ground. `say` prints lines for people, `stopped` says whether somebody wants it to end.
    pub fn new(
        options: &'a Options,
        ground: Ground,
        say: fn(&str),
        stopped: fn() -> bool,
    ) -> io::Result<Self> {
        if let Some(name) = options.lie.as_deref().filter(|name| lie(name).is_none()) {
            let known: Vec<&str> = worker::LIES.iter().map(|(name, _)| *name).collect();
            return Err(io::Error::other(format!(
                "no planted difference {name:?}; there are {}",
                known.join(", ")
            )));
        }
        peer::program()?;
        peer::adopt();
        let base = options.reference.clone().unwrap_or_else(std::env::temp_dir);
        let scratch = base.join(format!("corbel-hunt-{}", std::process::id()));
        fs::create_dir_all(&scratch)?;
        let setting = Setting {
            reference: scratch.join("reference"),
            lie: options.lie.clone(),
            tolerated: options.tolerate.clone(),
            log: scratch.join("workers.log"),
            stopped,
        };
        fs::create_dir_all(&setting.reference)?;
        Ok(Self { options, ground, setting, scratch, say })
    }

    /// Runs it to its end.
    pub fn run(&mut self) -> io::Result<Report> {
        if self.options.replay.is_empty() { self.draw() } else { self.replay() }
    }

    fn say(&self, text: &str) {
        (self.say)(text.trim_end_matches('\n'));
    }

    fn over(&self, report: &Report, begin: Instant) -> bool {
        let options = self.options;
        let unlimited = options.ops.is_none() && options.histories.is_none();
        let seconds = options.seconds.or(unlimited.then_some(60));
        (self.setting.stopped)()
            || seconds.is_some_and(|limit| begin.elapsed().as_secs() >= limit)
            || options.ops.is_some_and(|limit| report.operations >= limit)
            || options.histories.is_some_and(|limit| report.histories >= limit)
            || report.differences >= options.differences
    }

    fn draw(&mut self) -> io::Result<Report> {
        let options = self.options;
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let first = options.seed.unwrap_or(now.as_secs() * 1000);
        self.say(&format!("first seed {first}"));
        let abilities = abilities(&self.setting.reference)?;
        let wish = Wish {
            only: options.only.clone(),
            without: options.without.clone(),
            avoid: options.avoid.clone(),
            one_file: options.one_file,
            faults: Some(options.faults).filter(|rate| *rate > 0 && self.ground.has_services()),
            calls: options.calls,
            nodes: self.ground.nodes(),
            links: self.ground.can_cut(),
        };
        let begin = Instant::now();
        let mut report = Report { seed: first, ..Report::default() };
        while !self.over(&report, begin) {
            let seed = first + report.histories;
            report.histories += 1;
            let mut random = Random::new(seed);
            let views = cast(&mut random, &self.ground);
            let mut draw = Draw::new(seed, &views, &wish, abilities);
            let about = draw.about();
            if options.verbose {
                self.say(&format!("seed {seed}: {}; {about}", views.join(" ")));
            }
            let name = format!("hunt-{seed}");
            let outcome = play(&mut self.ground, &self.setting, &name, &views, &mut draw)?;
            report.operations += outcome.calls;
            let Some(difference) = outcome.difference else { continue };
            if difference.kind.starts_with(stage::BARRED) {
                report.barred += 1;
                self.say(&format!("seed {seed} ended at a limit: {}", difference.kind));
                continue;
            }
            report.differences += 1;
            self.say(&format!(
                "\nFOUND by seed {seed} ({}; {about}), call {}\n{}",
                views.join(" "),
                difference.step,
                shown(&difference)
            ));
            self.shrink(seed, outcome.script, difference)?;
        }
        report.faults = self.ground.faults;
        report.seconds = begin.elapsed().as_secs();
        Ok(report)
    }

    fn shrink(&mut self, seed: u64, script: Script, difference: Difference) -> io::Result<()> {
        let limit = Duration::from_secs(self.options.shrink);
        let name = format!("shrink-{seed}");
        let mut bench = Bench::new(&mut self.ground, &self.setting, &name, limit);
        let (script, difference, about) = match bench.shrink(&script, &difference.kind)? {
            Some(shrunk) => {
                let (times, of) = shrunk.shown;
                let about =
                    format!("shown by {times} of {of} runs; {} runs to shrink it", shrunk.runs);
                (shrunk.script, shrunk.difference, about)
            }
            None => (script, difference, "not shown again: the whole history".to_string()),
        };
        self.say(&format!("  {about}: {} steps", script.steps.len()));
        if script.steps.len() <= 60 {
            self.say(&script.to_string());
        }
        self.say(&shown(&difference));
        if let Some(dir) = &self.options.found {
            self.keep(dir, seed, &script, &difference, &about)?;
        }
        Ok(())
    }

    fn keep(
        &self,
        dir: &Path,
        seed: u64,
        script: &Script,
        difference: &Difference,
        about: &str,
    ) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        let comment: String = shown(difference).lines().fold(String::new(), |mut all, line| {
            let _ = writeln!(all, "# {}", line.trim());
            all
        });
        let text = format!("# seed {seed}; {about}\n{comment}{script}");
        fs::write(dir.join(format!("{seed}.txt")), text)?;
        // A whole tree may be too long to be shown.
        let whole = format!("{}\n\n{}\n", difference.expected, difference.got);
        if whole.len() > 1000 {
            fs::write(dir.join(format!("{seed}-whole.txt")), whole)?;
        }
        self.ground.keep_logs(&dir.join(format!("{seed}-logs")));
        Ok(())
    }

    fn replay(&mut self) -> io::Result<Report> {
        let begin = Instant::now();
        let mut report = Report::default();
        for (number, path) in self.options.replay.iter().enumerate() {
            let text = fs::read_to_string(path)?;
            let script = Script::parse(&text)
                .map_err(|why| io::Error::other(format!("{}: {why}", path.display())))?;
            let name = format!("replay-{number}");
            let limit = Duration::from_secs(self.options.shrink);
            let mut shown_by = 0;
            for _ in 0..self.options.times {
                if (self.setting.stopped)() {
                    break;
                }
                let mut bench = Bench::new(&mut self.ground, &self.setting, &name, limit);
                let difference = bench.run(&script)?;
                report.histories += 1;
                report.operations += script.steps.len() as u64;
                let Some(difference) = difference else { continue };
                if difference.kind.starts_with(stage::BARRED) {
                    report.barred += 1;
                    self.say(&format!("{}: {}", path.display(), difference.kind));
                    continue;
                }
                shown_by += 1;
                if shown_by == 1 {
                    self.say(&format!("{}:\n{}", path.display(), shown(&difference)));
                    if self.options.found.is_some() {
                        self.shrink(number as u64, script.clone(), difference)?;
                    }
                }
            }
            let times = self.options.times;
            self.say(&format!("{}: {shown_by} of {times} runs differ", path.display()));
            report.differences += u64::from(shown_by > 0);
        }
        report.faults = self.ground.faults;
        report.seconds = begin.elapsed().as_secs();
        Ok(report)
    }
}

impl Drop for Hunt<'_> {
    fn drop(&mut self) {
        let said = fs::read_to_string(&self.setting.log).unwrap_or_default();
        for line in said.lines().take(20) {
            self.say(&format!("worker: {line}"));
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

fn shown(difference: &Difference) -> String {
    let mut text = format!(
        "  difference: {}\n    at:       {}\n    expected: {}\n    got:      {}\n",
        difference.kind,
        difference.text,
        clipped(&difference.expected),
        clipped(&difference.got)
    );
    if !difference.detail.is_empty() {
        let _ = writeln!(text, "    {}", difference.detail);
    }
    text
}

fn clipped(text: &str) -> &str {
    text.get(..1000).unwrap_or(text)
}
