//! Descriptors under `corbel run` on a cluster: C programs that print what each call answers must print the same as in a
//! plain directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::harness::{Cluster, TESTS, limited, text};

/// Compiles a program of `tests/run`; none without a compiler.
fn compile(cluster: &Cluster, name: &str, args: &[&str]) -> Option<PathBuf> {
    let to = cluster.path(name);
    let mut cc = Command::new("cc");
    cc.args(["-w", "-O1"]).arg(format!("{TESTS}/run/{name}.c")).arg("-o").arg(&to).args(args);
    cc.status().is_ok_and(|status| status.success()).then_some(to)
}

/// Runs a program natively and under `corbel run`, in a directory of its own each, and compares every line.
fn same(cluster: &Cluster, options: &[&str], program: &[&Path]) -> String {
    let (native, hooked) = (cluster.path("native"), cluster.mount(1).join("same"));
    for dir in [&native, &hooked] {
        let _ = fs::remove_dir_all(dir);
        fs::create_dir(dir).unwrap();
    }
    let expected = text(&limited().args(program).arg(&native).output().unwrap());
    let output = cluster.hooked(1, options).args(program).arg(&hooked).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for (i, (a, b)) in expected.lines().zip(said.lines()).enumerate() {
        assert_eq!(a, b, "line {} of {program:?} {options:?}", i + 1);
    }
    assert_eq!(expected, said, "{output:?}");
    assert!(output.status.success(), "{output:?}");
    said
}

/// The first call on a descriptor that was just opened, dup'ed, inherited by a child or by a program.
#[test]
fn every_call_on_a_descriptor_answers_as_the_kernel_does() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let Some(program) = compile(&cluster, "every", &[]) else { return };
    let said = same(&cluster, &[], &[&program]);
    assert!(said.lines().count() > 1000, "{said}");
}

/// In arguments, in memory, in commands of ioctl: loop devices, clones, mounts, rules, watches, other processes.
#[test]
fn descriptors_that_are_handed_to_the_kernel_are_the_files() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let Some(program) = compile(&cluster, "handed", &[]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        let said = same(&cluster, options, &[&program]);
        assert!(said.lines().count() > 40, "{said}");
    }
}

/// The engine has a few numbers in the top eighth of the table; all others are the program's, whoever gave them
/// out. And what needs no number works when there is none.
#[test]
fn every_number_is_the_programs() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "numbers", &[]) else { return };
    let Some(other) = compile(&cluster, "static", &["-static"]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        let said = same(&cluster, options, &[&program, &other]);
        assert!(said.lines().count() > 80, "{said}");
    }
}

/// A process may share its descriptors and not its memory, a thread may have descriptors and a directory of its own.
#[test]
fn tables_belong_to_whoever_has_them() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "tables", &["-pthread"]) else { return };
    let Some(other) = compile(&cluster, "static", &["-static"]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        let said = same(&cluster, options, &[&program, &other]);
        assert!(said.lines().count() > 100, "{said}");
    }
}

/// Signals that come while a call is served reach their handlers, of every kind.
#[test]
fn no_signal_is_lost_in_a_call() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let Some(program) = compile(&cluster, "signals", &[]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        same(&cluster, options, &[&program]);
    }
}
