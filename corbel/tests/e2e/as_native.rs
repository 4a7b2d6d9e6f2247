//! Programs that do what few do, under `corbel run` on a cluster: what they say must be what they say in a plain directory.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::harness::{Cluster, TESTS, limited, others_reach, text, wait_for};

/// Compiles a program of `tests/run`; none without a compiler.
fn compile(cluster: &Cluster, name: &str, args: &[&str]) -> Option<PathBuf> {
    let to = cluster.path(name);
    let mut cc = Command::new("cc");
    cc.args(["-w", "-O1", "-masm=intel"]).arg(format!("{TESTS}/run/{name}.c")).arg("-o").arg(&to);
    cc.args(args).status().is_ok_and(|status| status.success()).then_some(to)
}

fn script(name: &str) -> String {
    format!("{TESTS}/run/{name}")
}

/// A directory for a program, native or hooked, with a `home` of an ordinary user.
fn place(dir: PathBuf) -> PathBuf {
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(dir.join("home")).unwrap();
    fs::set_permissions(dir.join("home"), fs::Permissions::from_mode(0o777)).unwrap();
    chown(dir.join("home"), Some(1000), Some(1000)).unwrap();
    dir
}

/// Runs a program natively and under `corbel run`, with a directory of its own each and more arguments, and compares.
fn same_with(
    cluster: &Cluster,
    options: &[&str],
    before: &[&str],
    program: &[&OsStr],
    more: &[&OsStr],
) -> String {
    let native = place(cluster.path("native/a/same"));
    let hooked = place(cluster.mount(1).join("same"));
    let run = |mut command: Command, dir: PathBuf| {
        command.args(program).arg(dir).args(more).output().unwrap()
    };
    let mut plain = limited();
    plain.args(before);
    let expected = text(&run(plain, native));
    let mut caught = limited();
    caught.args(before).args([super::harness::CORBEL, "run"]).args(options);
    caught.arg("--mount").arg(cluster.mount(1)).arg("--socket").arg(cluster.socket(1)).arg("--");
    let output = run(caught, hooked);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(expected, said, "{program:?} {more:?} {options:?}: {output:?}");
    assert!(output.status.success(), "{output:?}");
    said
}

fn same(cluster: &Cluster, options: &[&str], program: &[&OsStr]) -> String {
    same_with(cluster, options, &[], program, &[])
}

fn python(name: &str) -> [String; 2] {
    ["python3".into(), script(name)]
}

/// A program that is Python's, or the shell's.
fn same_script(cluster: &Cluster, words: &[String; 2]) -> String {
    same(cluster, &[], &words.each_ref().map(|word| word.as_ref()))
}

/// Above a mebibyte a list is appended in parts, between which others append.
#[test]
fn what_others_append_between_the_parts_of_a_list_stays() {
    let Some(cluster) = Cluster::new(1, "512MiB") else { return };
    same_script(&cluster, &python("appends.py"));
}

#[test]
fn private_mappings_are_the_files() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let said = same_script(&cluster, &python("private.py"));
    assert!(said.lines().count() > 60, "{said}");
}

#[test]
fn a_large_buffer_takes_no_memory_but_what_is_read() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let said = same_script(&cluster, &python("large.py"));
    assert!(!said.contains("False"), "{said}");
}

/// Shared mappings of more files than the session has room to note.
#[test]
fn what_is_mapped_is_what_is_read_however_many_files() {
    let Some(cluster) = Cluster::new(1, "128MiB") else { return };
    assert_eq!(same_script(&cluster, &python("mapped.py")), "wrong 0\n");
}

/// Flags and vector registers are the kernel's to keep over a call.
#[test]
fn a_programs_own_call_leaves_its_registers_alone() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "registers", &[]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        same(&cluster, options, &[program.as_os_str()]);
    }
}

#[test]
fn credentials_are_each_threads_and_each_childs() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "identities", &["-pthread"]) else { return };
    same(&cluster, &[], &[program.as_os_str()]);
}

/// Mounts above the prefix, new roots, namespaces of mounts, of users, of processes.
#[test]
fn in_namespaces_of_its_own_a_program_finds_what_is_there() {
    let Some(cluster) = Cluster::new(1, "512MiB") else { return };
    let words = python("elsewhere.py");
    let program = words.each_ref().map(OsStr::new);
    let unshare = ["unshare", "-m", "--propagation", "private"];
    for case in ["own", "over", "relative", "back", "pivot", "child", "pids"] {
        same_with(&cluster, &[], &unshare, &program, &[OsStr::new(case)]);
    }
}

/// Who calls himself root is whom the service knows.
#[test]
fn in_a_user_namespace_an_ordinary_user_keeps_what_he_makes() {
    if !others_reach() {
        return;
    }
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let words = ["bash".to_owned(), script("users.sh")];
    let user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "env", "HOME=/tmp"];
    let program = words.each_ref().map(OsStr::new);
    let said = same_with(&cluster, &[], &user, &program, &[]);
    assert!(said.contains("made 1000:1000"), "{said}");
    cluster.assert_nothing_refused();
}

/// No signal is blocked for good, lost, or another's, because it came while a process or a program was made.
#[test]
fn masks_and_signals_are_kept_over_fork_vfork_and_exec() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "masks", &[]) else { return };
    same(&cluster, &[], &[program.as_os_str()]);
}

#[test]
fn who_shares_an_offset_with_a_killed_program_goes_on() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    assert_eq!(same_script(&cluster, &python("killed.py")), "went on\n");
}

/// Seccomp: in a filter's eyes the engine's calls are the program's.
#[test]
fn a_program_that_confines_itself_makes_no_calls_but_its_own() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "confined", &[]) else { return };
    same(&cluster, &[], &[program.as_os_str()]);
}

#[test]
fn waiting_for_what_never_comes_of_a_file_takes_as_long() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "waits", &[]) else { return };
    for options in [&[][..], &["--mode", "strict"]] {
        same(&cluster, options, &[program.as_os_str()]);
    }
}

#[test]
fn numbers_beyond_the_table_are_the_file_too() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let said = same_script(&cluster, &["bash".into(), script("high.sh")]);
    if said == "no room\n" {
        eprintln!("SKIPPED: no right to so many descriptors here");
        return;
    }
    assert!(said.lines().count() > 5, "{said}");
}

/// Set-id and unreadable programs, and programs named by a descriptor.
#[test]
fn programs_without_the_library_get_the_files_that_they_are_given() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let Some(program) = compile(&cluster, "static", &["-static"]) else { return };
    let bin = cluster.path("bin");
    fs::create_dir(&bin).unwrap();
    fs::set_permissions(cluster.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let words = ["bash".to_owned(), script("unreadable.sh")];
    let more = [program.as_os_str(), bin.as_os_str()];
    same_with(&cluster, &[], &[], &words.each_ref().map(OsStr::new), &more);
}

/// While the node's services are away a program waits, or is told that something is wrong: never that a file is missing.
#[test]
fn no_file_is_missing_because_nobody_answers() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let (begun, away) = (cluster.path("begun"), cluster.path("away"));
    let script = format!(
        "echo text > there; echo > {}; while [ ! -e {} ]; do sleep 0.1; done; \
         /usr/bin/test -e $PWD/there && echo there || echo missing",
        begun.display(),
        away.display(),
    );
    let mut command = cluster.run(1, &script);
    let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("the program", Duration::from_secs(30), || begun.exists().then_some(()));
    cluster.stop_services(1);
    fs::write(&away, "").unwrap();
    // Longer than a first session is waited for.
    std::thread::sleep(Duration::from_secs(5));
    cluster.start_services(1);
    assert_eq!(text(&child.wait_with_output().unwrap()), "there\n");
}

/// What an ended session leaves open does not add up.
#[test]
fn sessions_that_ended_keep_no_descriptors() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let script = "
import os, sys, time
def kept():
    links = []
    for fd in os.listdir('/proc/self/fd'):
        try: links.append(os.readlink(f'/proc/self/fd/{fd}'))
        except OSError: pass
    return sum(l.startswith('socket:') or 'eventfd' in l for l in links)
for n in range(4):
    open(f'f{n}', 'w').write('text')
    os.sync()
    print(kept(), flush=True)
    sys.stdin.readline()";
    let mut command = cluster.hooked(1, &[]);
    command.args(["python3", "-c", script]);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut counts: Vec<usize> = Vec::new();
    for round in 0..4 {
        counts.push(lines.next().unwrap().unwrap().parse().unwrap());
        if round < 3 {
            cluster.restart_services(1);
        }
        writeln!(child.stdin.as_mut().unwrap()).unwrap();
    }
    assert!(child.wait().unwrap().success());
    // The one there is, and the one before.
    assert!(counts[0] > 0 && counts[3] <= 2 * counts[0], "{counts:?}");
}
