//! The differential hunter: that it finds what is planted, that it finds nothing in a few fixed histories, and that
//! what it found once stays mended.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

use super::harness::{self, CORBEL, Scratch, TESTS, json, may_mount};

/// Shrinking included, on a busy machine.
const LIMIT: [&str; 4] = ["timeout", "-k", "5", "600"];

/// Planted differences that one run tries.
const LIES: usize = 2;

/// The program that carries out calls.
fn worker() {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| harness::built("hunt", "corbel-hunt"));
}

fn hunt(scratch: &Scratch, args: &[&str]) -> (Output, Value) {
    worker();
    let reference = scratch.path("reference");
    std::fs::create_dir_all(&reference).unwrap();
    let mut command = Command::new(LIMIT[0]);
    command.args(&LIMIT[1..]).arg(CORBEL).args(["bench", "hunt", "--json", "--reference"]);
    let output = command.arg(&reference).args(args).output().expect("corbel starts");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    let said = json(&output);
    assert_eq!(said["bench"], "hunt", "{said}");
    (output, said["figures"].clone())
}

fn clean(args: &[&str]) -> Value {
    let (output, figures) = hunt(&Scratch::new(), args);
    assert_eq!(figures["differences"], 0, "{figures}");
    assert!(output.status.success(), "{:?}", output.status);
    assert!(figures["operations"].as_u64() > Some(0), "{figures}");
    figures
}

/// A number that changes with each commit.
fn of_this_commit() -> Option<usize> {
    let out = Command::new("git").args(["rev-parse", "HEAD"]).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    usize::from_str_radix(text.get(..8)?, 16).ok()
}

/// Without a cluster, a difference is planted into what plays Corbel's part: two that the commit draws, or all of
/// them in the soak (`CORBEL_LIES=all`).
#[test]
fn planted_differences_are_found_and_made_short() {
    if !may_mount() {
        return;
    }
    let mut lies = [
        ("shift", "data", "read"),
        ("chmod", "mode,stat", "mode"),
        ("forget", "data,mode", "read"),
        ("offset", "data,dup", ""),
        ("ghost", "names,stat", ""),
        ("lock", "lock", "lock"),
        ("time", "time,stat", "time"),
        ("attribute", "xattr", "xattr"),
        ("tail", "data,size", ""),
        ("set-id", "data,mode,owner,cred,stat", "mode"),
    ];
    let all = std::env::var("CORBEL_LIES").is_ok_and(|which| which == "all");
    let count = lies.len();
    lies.rotate_left(of_this_commit().unwrap_or_default() % count);
    for (lie, only, kind) in lies.into_iter().take(if all { count } else { LIES }) {
        eprintln!("planted: {lie}");
        let scratch = Scratch::new();
        let (plain, found) = (scratch.path("plain"), scratch.path("found"));
        std::fs::create_dir(&plain).unwrap();
        let dirs = [plain.to_str().unwrap(), found.to_str().unwrap()];
        let (output, figures) = hunt(
            &scratch,
            &[
                "--plain",
                dirs[0],
                "--lie",
                lie,
                "--seed",
                "1",
                "--histories",
                "400",
                "--calls",
                "60",
                "--only",
                only,
                "--differences",
                "1",
                "--shrink",
                "5",
                "--found",
                dirs[1],
            ],
        );
        assert_eq!(figures["differences"], 1, "{lie}: {figures}");
        assert_eq!(output.status.code(), Some(1), "{lie}");
        let scripts: Vec<_> = std::fs::read_dir(&found)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "txt"))
            .collect();
        let script = std::fs::read_to_string(&scripts[0]).unwrap();
        let steps = script.lines().filter(|l| !l.starts_with('#') && !l.starts_with("actor"));
        assert!(script.contains(kind), "{lie}: {script}");
        // A dozen calls; more where time was short.
        assert!(steps.count() <= 60, "{lie}: {script}");
    }
}

#[test]
fn a_plain_directory_is_like_another() {
    if !may_mount() {
        return;
    }
    let scratch = Scratch::new();
    let plain = scratch.path("plain");
    std::fs::create_dir(&plain).unwrap();
    let args =
        ["--plain", plain.to_str().unwrap(), "--seed", "1", "--ops", "500", "--without", "cred"];
    clean(&args);
}

#[test]
fn a_few_histories_differ_in_nothing() {
    if !may_mount() {
        return;
    }
    harness::library();
    clean(&["--seed", "10", "--histories", "3", "--calls", "100", "--faults", "0"]);
}

#[test]
fn a_history_with_faults_loses_nothing() {
    if !may_mount() {
        return;
    }
    harness::library();
    let args = ["--seed", "20", "--histories", "1", "--calls", "60", "--faults", "20"];
    let figures = clean(&args);
    assert!(figures["faults"].as_u64() > Some(0), "{figures}");
}

/// Each script differed once; its first lines say how.
#[test]
fn what_was_found_stays_mended() {
    if !may_mount() || !harness::others_reach() {
        return;
    }
    harness::library();
    let mut scripts: Vec<_> = std::fs::read_dir(format!("{TESTS}/hunt"))
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_string())
        .collect();
    scripts.sort();
    let mut args = vec!["--faults", "0"];
    scripts.iter().for_each(|script| args.extend(["--replay", script]));
    clean(&args);
}
