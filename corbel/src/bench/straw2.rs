//! The CRUSH part of `corbel bench kernels`: three replicas on a map of 1,000 devices in three
//! levels, against `crushtool --test` and `osdmaptool --test-map-pgs` as child processes, for every
//! bucket kind.
//!
//! Ours is judged by its best turn; theirs by the CPU time of the child, less that of a child
//! with almost nothing to map, so that starting and reading the map is not counted.

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use placement::crush::{Engine, Map, Options, Placer, Workspace};
use placement::engine::Choice;
use serde_json::{Value, json};

use super::race::race;

/// Bucket kinds, as crushtool writes them.
const KINDS: [&str; 5] = ["straw2", "straw", "tree", "list", "uniform"];
const HOSTS: usize = 100;
const DEVICES_PER_HOST: usize = 10;
const HOSTS_PER_RACK: usize = 10;
const DEVICES: usize = HOSTS * DEVICES_PER_HOST;
const REPLICAS: usize = 3;
/// Inputs of one of our turns.
const INPUTS: u32 = 4096;
/// Inputs of a child process; 2^8 placement groups a device, as `osdmaptool` counts them.
const CHILD_INPUTS: u32 = (DEVICES as u32) << 8;
/// What the processes are compared over before they are timed.
const CHECKED: u32 = 2000;
/// Placement in the paper on DeLiBA2, in microseconds: Ceph's software and their FPGA.
const PAPER_US: (f64, f64) = (85.0, 62.0);
/// Clock ticks a second in /proc, fixed by Linux's interface.
const TICKS_PER_SECOND: f64 = 100.0;

/// Placements a second of one bucket kind.
#[derive(Debug)]
pub struct Speed {
    /// Bucket kind.
    pub kind: &'static str,
    /// Ours.
    pub ours: f64,
    /// `crushtool --test`, if it is installed.
    pub crushtool: Option<f64>,
    /// `osdmaptool --test-map-pgs`, if it is installed.
    pub osdmaptool: Option<f64>,
}

impl Speed {
    /// Ours over the faster of theirs.
    pub fn ratio(&self) -> Option<f64> {
        let theirs = self.crushtool.into_iter().chain(self.osdmaptool).reduce(f64::max)?;
        Some(self.ours / theirs)
    }

    /// As a row of the bench.
    pub fn row(&self) -> (Value, String) {
        let micros = 1e6 / self.ours;
        let json = json!({"row": "crush", "kind": self.kind, "placements_s": self.ours.round(),
            "us": (micros * 1000.0).round() / 1000.0, "crushtool_s": self.crushtool.map(f64::round),
            "osdmaptool_s": self.osdmaptool.map(f64::round), "ratio": self.ratio(),
            "deliba2_software_us": PAPER_US.0, "deliba2_fpga_us": PAPER_US.1});
        let million = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.3}", x / 1e6));
        let text = format!(
            "crush {:<8} {:>7.3} M/s ({micros:.3} us; DeLiBA2: software 85, FPGA 62)  crushtool {} M/s  \
             osdmaptool {} M/s  ratio {}",
            self.kind,
            self.ours / 1e6,
            million(self.crushtool),
            million(self.osdmaptool),
            self.ratio().map_or("-".into(), |r| format!("{r:.2}")),
        );
        (json, text)
    }
}

/// Measures every bucket kind with the CRUSH engine nearest to the choice; `note` is told what is
/// left out.
pub fn measure(choice: Choice, mut note: impl FnMut(&str)) -> Vec<Speed> {
    let engine = match choice {
        Choice::Auto => None,
        Choice::Portable | Choice::Ssse3 => Some(Engine::Portable),
        Choice::Avx2 => Some(Engine::Avx2),
        Choice::Avx512 | Choice::Gfni => Some(Engine::Avx512),
    };
    let options = Options { engine, ..Options::default() };
    let tools = ["crushtool", "osdmaptool"].map(|tool| {
        // Help is all that is asked, whatever exit code the tool gives it.
        let mut help = Command::new(tool);
        help.arg("--help").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let found = help.status().is_ok();
        if !found {
            note(&format!("{tool} is not there: install ceph-base to compare with it"));
        }
        found
    });
    let scratch = Scratch::new();
    KINDS.map(|kind| speed(kind, &options, tools, scratch.as_ref())).into()
}

fn speed(
    kind: &'static str,
    options: &Options,
    tools: [bool; 2],
    scratch: Option<&Scratch>,
) -> Speed {
    let map = Map::compile(&text(kind)).expect("the map written here");
    let placer = Placer::new(&map, options).expect("the map written here");
    let mut ours = time(&placer);
    let (mut crushtool, mut osdmaptool) = (None, None);
    if let Some(Scratch(dir)) = scratch {
        let file = dir.join(kind);
        if std::fs::write(&file, map.encode()).is_ok() {
            if tools[0] && same(&placer, &file) {
                crushtool = child_speed(|inputs| {
                    let mut command = Command::new("crushtool");
                    command.arg("-i").arg(&file).args(["--test", "--rule", "0", "--min-x", "0"]);
                    command.args(["--num-rep", "3", "--max-x"]).arg((inputs - 1).to_string());
                    run(&mut command).is_some()
                });
            }
            if tools[1] {
                osdmaptool = osdmaptool_speed(dir, &file);
            }
        }
    }
    // Before and after the others, so that a change of the machine's pace meets both.
    ours = ours.max(time(&placer));
    Speed { kind, ours, crushtool, osdmaptool }
}

/// Our placements a second.
fn time(placer: &Placer) -> f64 {
    let xs: Vec<u32> = (0..INPUTS).collect();
    let reweights = vec![0x10000; DEVICES];
    let mut workspace = Workspace::new();
    let mut place = || {
        let batch = placer.place_many(0, black_box(&xs), REPLICAS, &reweights, &mut workspace);
        black_box(batch.expect("rule 0 is there"));
    };
    let [seconds] = race(20, Duration::from_millis(4), [&mut place]);
    f64::from(INPUTS) / seconds
}

/// Whether crushtool maps as we do; if not there is nothing to compare.
fn same(placer: &Placer, file: &Path) -> bool {
    let mut command = Command::new("crushtool");
    command.arg("-i").arg(file).args(["--test", "--show-mappings", "--rule", "0", "--min-x", "0"]);
    command.args(["--num-rep", "3", "--max-x"]).arg((CHECKED - 1).to_string());
    let Some(theirs) = run(&mut command) else { return false };
    let xs: Vec<u32> = (0..CHECKED).collect();
    let reweights = vec![0x10000; DEVICES];
    let batch = placer
        .place_many(0, &xs, REPLICAS, &reweights, &mut Workspace::new())
        .expect("rule 0 is there");
    let mut ours = String::new();
    for x in 0..CHECKED {
        let items: Vec<String> = batch.get(x as usize).iter().map(i32::to_string).collect();
        let _ = writeln!(ours, "CRUSH rule 0 x {x} [{}]", items.join(","));
    }
    assert!(theirs == ours, "mappings differ from crushtool's on {}", file.display());
    true
}

fn osdmaptool_speed(dir: &Path, map: &Path) -> Option<f64> {
    let files: Vec<(u32, PathBuf)> = [(CHILD_INPUTS, "8"), (DEVICES as u32, "0")]
        .into_iter()
        .map(|(inputs, bits)| {
            let file = dir.join(format!("osdmap-{bits}"));
            let devices = DEVICES.to_string();
            let mut create = Command::new("osdmaptool");
            create.args(["--createsimple", &devices, "--with-default-pool", "--clobber"]);
            create.args(["--pg-bits", bits, "--pgp-bits", bits]).arg(&file);
            run(&mut create)?;
            run(Command::new("osdmaptool").arg(&file).arg("--import-crush").arg(map))?;
            Some((inputs, file))
        })
        .collect::<Option<_>>()?;
    let small = &files[1];
    let rate = child_speed(|inputs| {
        let file = files.iter().find(|f| f.0 == inputs).unwrap_or(small);
        let mut command = Command::new("osdmaptool");
        command.arg(&file.1).args(["--mark-up-in", "--test-map-pgs"]);
        run(&mut command).is_some()
    })?;
    // The small run maps a group for each device.
    Some(rate * f64::from(CHILD_INPUTS - DEVICES as u32) / f64::from(CHILD_INPUTS))
}

/// Inputs a CPU second of a child that maps as many as it is told; the best of three.
fn child_speed(child: impl Fn(u32) -> bool) -> Option<f64> {
    let cost = |inputs| {
        let before = children_seconds()?;
        child(inputs).then(children_seconds)?.map(|after| after - before)
    };
    let mut best: Option<f64> = None;
    for _ in 0..3 {
        let seconds = cost(CHILD_INPUTS)? - cost(1)?;
        if seconds > 0.0 {
            best = Some(best.unwrap_or(0.0).max(f64::from(CHILD_INPUTS) / seconds));
        }
    }
    best
}

/// CPU time of the children waited for (proc(5): cutime and cstime of /proc/self/stat).
pub fn children_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may hold anything; the third field follows it.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let ticks = fields.get(13)?.parse::<f64>().ok()? + fields.get(14)?.parse::<f64>().ok()?;
    Some(ticks / TICKS_PER_SECOND)
}

/// Output of a command that succeeds.
fn run(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    if !output.status.success() {
        // Its first line says what was wrong; a crash fills pages after it.
        let said = String::from_utf8_lossy(&output.stderr);
        log::warn!("{command:?}: {}", said.lines().next().unwrap_or("no reason given"));
        return None;
    }
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A directory that goes away with the bench.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("corbel-bench-{}", std::process::id()));
        std::fs::create_dir(&dir).ok()?;
        Some(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The map in crushtool's text form: devices in hosts, hosts in racks, racks under a root.
fn text(kind: &str) -> String {
    let mut out = String::from(
        "tunable choose_local_tries 0\ntunable choose_local_fallback_tries 0\n\
         tunable choose_total_tries 50\ntunable chooseleaf_descend_once 1\n\
         tunable chooseleaf_vary_r 1\ntunable chooseleaf_stable 1\n\
         tunable straw_calc_version 1\ntunable allowed_bucket_algs 62\n",
    );
    for device in 0..DEVICES {
        let _ = writeln!(out, "device {device} osd.{device}");
    }
    out.push_str("type 0 osd\ntype 1 host\ntype 2 rack\ntype 3 root\n");
    let mut id = 0;
    let mut bucket =
        |out: &mut String, class: &str, name: &str, items: &[String], weight: usize| {
            id -= 1;
            let _ = writeln!(out, "{class} {name} {{\n\tid {id}\n\talg {kind}\n\thash 0");
            for item in items {
                let _ = writeln!(out, "\titem {item} weight {weight}.000");
            }
            out.push_str("}\n");
        };
    let names = |class: &str, from: usize, count: usize| -> Vec<String> {
        (from..from + count).map(|i| format!("{class}{i}")).collect()
    };
    for host in 0..HOSTS {
        let items = names("osd.", host * DEVICES_PER_HOST, DEVICES_PER_HOST);
        bucket(&mut out, "host", &format!("host{host}"), &items, 1);
    }
    let racks = HOSTS / HOSTS_PER_RACK;
    for rack in 0..racks {
        let items = names("host", rack * HOSTS_PER_RACK, HOSTS_PER_RACK);
        bucket(&mut out, "rack", &format!("rack{rack}"), &items, DEVICES_PER_HOST);
    }
    let weight = DEVICES_PER_HOST * HOSTS_PER_RACK;
    bucket(&mut out, "root", "root", &names("rack", 0, racks), weight);
    out.push_str(
        "rule replicated {\n\tid 0\n\ttype replicated\n\tmin_size 1\n\tmax_size 10\n\
         \tstep take root\n\tstep chooseleaf firstn 0 type host\n\tstep emit\n}\n",
    );
    out
}
