//! Suites of others, through the mount and under `corbel run`, on a cluster of three nodes: fsx
//! (random operations on a file, checked against memory) and pjdfstest (one case for each promise
//! of POSIX). `scripts/prepare.sh tools` installs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::harness::{Cluster, TESTS};

const TOOLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/bin");

fn tool(name: &str) -> PathBuf {
    let path = Path::new(TOOLS).join(name);
    assert!(path.is_file(), "{name} is not installed: run scripts/prepare.sh tools");
    path
}

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "512MiB")
}

/// A program in the mount of node 1: served by the kernel, or under `corbel run`.
fn program(cluster: &Cluster, run: bool, program: &Path) -> Command {
    let mut command = if run { cluster.hooked(1, &["--audit"]) } else { cluster.native(1) };
    command.arg(program);
    command
}

fn fsx(cluster: &Cluster, run: bool, config: &str, seed: u32, operations: u32) {
    let name = format!("{config}-{seed}-{run}");
    let mut command = program(cluster, run, &tool("fsx"));
    command.arg("-f").arg(format!("{TESTS}/fsx/{config}.toml"));
    command.args(["-S", &seed.to_string(), "-N", &operations.to_string()]);
    // Beside the mount, to be looked at when it fails.
    command.arg("-P").arg(cluster.path("")).arg(&name);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = said.lines().chain(errors.lines()).rev().take(40).collect();
    assert!(output.status.success(), "fsx {name}: {:?}\n{}", output.status, last.join("\n"));
    if run {
        assert!(errors.contains("\"fast\":1"), "not hooked: {errors}");
    }
}

#[test]
fn fsx_with_mapping() {
    let Some(cluster) = cluster() else { return };
    for seed in 1..=3 {
        fsx(&cluster, false, "all", seed, 1500);
        fsx(&cluster, true, "all", seed, 1500);
    }
}

#[test]
fn fsx_on_the_fast_path() {
    let Some(cluster) = cluster() else { return };
    for seed in 1..=4 {
        fsx(&cluster, true, "calls", seed, 3000);
        fsx(&cluster, false, "calls", seed, 1000);
    }
}

/// The cases that failed and the number of those that passed.
fn pjdfstest(cluster: &Cluster, run: bool) -> (Vec<String>, usize) {
    let (dir, second) = (cluster.mount(1).join("p"), cluster.path("second"));
    fs::create_dir_all(&dir).unwrap();
    fs::create_dir_all(&second).unwrap();
    for open in [&dir, &second] {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(open, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut command = program(cluster, run, &tool("pjdfstest"));
    command.arg("-c").arg(format!("{TESTS}/pjdfstest/config.toml"));
    command.arg("-p").arg(&dir).arg("-s").arg(&second).env("RUST_BACKTRACE", "0");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Summary: "), "it did not end: {output:?}");
    let with = |verdict: &str| -> Vec<String> {
        let cases = text.lines().filter(|l| l.split_whitespace().nth(1) == Some(verdict));
        cases.filter_map(|l| Some(l.split_whitespace().next()?.to_string())).collect()
    };
    (with("FAILED"), with("ok").len())
}

#[test]
fn pjdfstest_through_the_mount() {
    let Some(cluster) = cluster() else { return };
    let (failed, passed) = pjdfstest(&cluster, false);
    assert_eq!(failed, [""; 0]);
    assert!(passed >= 384, "{passed} passed");
}

#[test]
fn pjdfstest_on_the_fast_path() {
    let Some(cluster) = cluster() else { return };
    let (failed, passed) = pjdfstest(&cluster, true);
    assert_eq!(failed, [""; 0]);
    assert!(passed >= 384, "{passed} passed");
}
