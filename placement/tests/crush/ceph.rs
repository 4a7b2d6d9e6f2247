//! Ceph's own tools, where they are installed: the judges of the comparison.

#![allow(dead_code)]

use super::corpus::Case;
use placement::crush::{Batch, Options, Placer, Workspace, hash};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Whether a tool can be run.
pub fn is_there(tool: &str) -> bool {
    let run = Command::new(tool).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok()
}

/// A directory of its own that goes away.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("corbel-crush-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        Self(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What was compared.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    pub mappings: u64,
    pub different: u64,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.mappings += other.mappings;
        self.different += other.different;
    }
}

/// Runs a tool to its end; its standard output.
pub fn output(tool: &str, args: &[&str]) -> String {
    let out = Command::new(tool).args(args).output().expect("the tool runs");
    assert!(
        out.status.success(),
        "{tool} {args:?}: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr).lines().take(5).collect::<Vec<_>>().join("\n")
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Compares every rule and replica count of a case over inputs 0..`inputs` with `crushtool --test`.
pub fn compare(case: &Case, options: &Options, inputs: u32, dir: &Path) -> Tally {
    let file = dir.join("map");
    std::fs::write(&file, case.map.encode()).expect("the map is written");
    let options = Options { choose_args: Some(0), ..*options };
    let placer = Placer::new(&case.map, &options).expect("a sound map");
    let mut workspace = Workspace::new();
    let xs: Vec<u32> = (0..inputs).collect();
    let mut tally = Tally::default();
    for rule in 0..case.map.rules.len() as u32 {
        for replicas in &case.replicas {
            let batch = placer
                .place_many(rule, &xs, *replicas, &case.reweights, &mut workspace)
                .expect("the rule runs");
            let found = crushtool(&file, case, rule, *replicas, &batch);
            assert_eq!(found.mappings, u64::from(inputs), "{} rule {rule}", case.name);
            tally.add(found);
        }
    }
    tally
}

/// Runs `crushtool --test` and compares each line of it.
fn crushtool(file: &Path, case: &Case, rule: u32, replicas: usize, batch: &Batch) -> Tally {
    let mut command = Command::new("crushtool");
    command.arg("-i").arg(file).args(["--test", "--show-mappings", "--min-x", "0", "--max-x"]);
    command.arg((batch.lens.len() - 1).to_string());
    command.arg("--rule").arg(rule.to_string()).arg("--num-rep").arg(replicas.to_string());
    for (device, weight) in case.reweights.iter().enumerate().filter(|(_, w)| **w != 0x1_0000) {
        let weight = f64::from(*weight) / 65_536.0;
        command.arg("--weight").arg(device.to_string()).arg(format!("{weight:.10}"));
    }
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("crushtool");
    let mut tally = Tally::default();
    let mut ours = String::new();
    for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
        let line = line.expect("text");
        let Some(rest) = line.strip_prefix("CRUSH rule ") else { continue };
        let (x, theirs) =
            rest.split_once(" x ").and_then(|(_, r)| r.split_once(' ')).expect("a line");
        let x: usize = x.parse().expect("an input");
        list(batch.get(x), &mut ours);
        tally.mappings += 1;
        if ours != theirs {
            tally.different += 1;
            if tally.different <= 3 {
                eprintln!("{} rule {rule} x {x} n {replicas}: {ours}, Ceph {theirs}", case.name);
            }
        }
    }
    assert!(child.wait().expect("crushtool ends").success(), "{} rule {rule}", case.name);
    tally
}

fn list(items: &[i32], text: &mut String) {
    use std::fmt::Write as _;
    text.clear();
    text.push('[');
    for (i, item) in items.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let _ = write!(text, "{comma}{item}");
    }
    text.push(']');
}

/// Compares `osdmaptool --test-map-pgs-dump` over a pool of 2^`bits` groups a device.
pub fn compare_osdmap(case: &Case, options: &Options, bits: u32, dir: &Path) -> Tally {
    let (osdmap, crush) = (dir.join("osdmap"), dir.join("crush"));
    let (osdmap, crush) = (osdmap.to_str().expect("text"), crush.to_str().expect("text"));
    std::fs::write(crush, case.map.encode()).expect("the map is written");
    let devices = case.map.device_count();
    let bits = bits.to_string();
    let create = ["--createsimple", &devices.to_string(), osdmap, "--clobber"];
    let pool = ["--with-default-pool", "--pg-bits", &bits, "--pgp-bits", &bits];
    output("osdmaptool", &[&create[..], &pool[..]].concat());
    output("osdmaptool", &[osdmap, "--import-crush", crush]);
    let dump = output("osdmaptool", &[osdmap, "--mark-up-in", "--test-map-pgs-dump"]);
    let placer =
        Placer::new(&case.map, &Options { choose_args: Some(1), ..*options }).expect("sound");
    let (mut workspace, mut tally) = (Workspace::new(), Tally::default());
    let (mut out, mut ours) = ([0; 3], String::new());
    let reweights = vec![0x1_0000; devices];
    for line in dump.lines() {
        let mut fields = line.split('\t');
        let group = fields.next().and_then(|g| g.split_once('.'));
        let Some((pool, group)) = group
            .and_then(|(p, g)| Some((p.parse::<u32>().ok()?, u32::from_str_radix(g, 16).ok()?)))
        else {
            continue;
        };
        let x = hash::hash2(group, pool);
        let found = placer.place(0, x, &reweights, &mut out, &mut workspace).expect("rule 0 runs");
        list(&out[..found], &mut ours);
        tally.mappings += 1;
        let theirs = fields.next().unwrap_or("");
        if ours != theirs {
            tally.different += 1;
            if tally.different <= 2 {
                eprintln!("{} group {pool}.{group:x}: {ours}, Ceph {theirs}", case.name);
            }
        }
    }
    tally
}
