//! The services of a node end and start again under programs: asked to, or killed. They go on, and everything is
//! there; who was asked to end takes nothing from anybody, and nobody gets an error.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use serde_json::Value;

use super::harness::{Cluster, TESTS, signal, text, wait_for};

/// A Python program under the library.
fn python(cluster: &Cluster, program: &str) -> Child {
    let mut command = cluster.hooked(1, &[]);
    command.args(["python3", "-u", "-c", program]).stdout(Stdio::piped());
    command.spawn().expect("a program")
}

/// Processes that node 1 lists as its clients. (Counted, they say nothing: the mount comes and goes as it is used.)
fn clients(cluster: &Cluster) -> Vec<i64> {
    let status = cluster.status(1);
    let all = status["clients"].as_array().into_iter().flatten();
    all.filter_map(|client| client["pid"].as_i64()).collect()
}

/// The children of a process, and theirs.
fn descendants(pid: i32) -> Vec<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.flat_map(|pid| [vec![pid], descendants(pid)].concat()).collect()
}

/// The numbers that a program prints, as they come.
fn numbers(child: &mut Child) -> impl Iterator<Item = u32> + use<> {
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    lines.map_while(Result::ok).filter_map(|line| line.parse().ok())
}

const WRITER: &str = "import os, time
fd = os.open('numbers', os.O_RDWR | os.O_CREAT)
temp = os.open('temp', os.O_RDWR | os.O_CREAT); os.write(temp, b'nameless'); os.unlink('temp')
for i in range(COUNT):
    os.write(fd, b'%d\\n' % i)
    if i % 10 == 0:
        one = os.open('one%d' % i, os.O_WRONLY | os.O_CREAT); os.write(one, b'%d' % i); os.close(one)
        assert os.pread(temp, 100, 0) == b'nameless'
    print(i)
    time.sleep(0.004)
";

#[test]
fn a_program_goes_on_while_nicfs_is_killed_again_and_again() {
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let program = WRITER.replace("COUNT", "600");
    let mut child = python(&cluster, &program);
    for n in numbers(&mut child) {
        if n == 100 || n == 250 || n == 400 {
            cluster.restart_nicfs(1);
        }
    }
    assert!(child.wait().expect("a child").success());
    let wanted: String = (0..600).map(|i| format!("{i}\n")).collect();
    let found = fs::read_to_string(cluster.mount(1).join("numbers")).expect("a file");
    assert!(found == wanted, "{} of {} bytes", found.len(), wanted.len());
    for i in (0..600).step_by(10) {
        let one = fs::read_to_string(cluster.mount(1).join(format!("one{i}"))).expect("a file");
        assert_eq!(one, i.to_string());
    }
    assert!(!cluster.mount(1).join("temp").exists());
    cluster.assert_nothing_refused();
}

#[test]
fn what_a_killed_program_wrote_is_there_after_a_restart() {
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let program = WRITER.replace("COUNT", "100000");
    let mut child = python(&cluster, &program);
    let mut last = 0;
    // Heard to the end: a program whose pipe is closed dies of that, and not of this test.
    let mut said = numbers(&mut child);
    for n in said.by_ref() {
        last = n;
        if n == 200 {
            cluster.restart_nicfs(1);
        }
        if n == 300 {
            break;
        }
    }
    // Whatever the program printed it had written. (It is a child of `corbel run`, which is one of `timeout`.)
    let pids = descendants(i32::try_from(child.id()).expect("a process"));
    let listed = || pids.iter().any(|pid| clients(&cluster).contains(&i64::from(*pid)));
    wait_for("a list with the program", Duration::from_secs(20), || listed().then_some(()));
    for pid in pids.iter().copied() {
        signal(Pid::from_raw(pid).expect("a process"), Signal::KILL);
    }
    cluster.restart_nicfs(1);
    last = said.last().unwrap_or(last);
    assert!(!child.wait().expect("a child").success());
    let found = fs::read_to_string(cluster.mount(1).join("numbers")).expect("a file");
    let wanted: String = (0..=last).map(|i| format!("{i}\n")).collect();
    assert!(found.starts_with(&wanted), "{} of {} bytes", found.len(), wanted.len());
    wait_for("a list without the dead program", Duration::from_secs(20), || {
        (!listed()).then_some(())
    });
}

/// Appends and syncs, small files and a database, until told to stop. Says what went wrong, and what is missing.
const DILIGENT: &str = "import fcntl, json, os, sqlite3, sys
name, desk = sys.argv[1:3]
fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
db = sqlite3.connect(name + '.db', isolation_level=None)
db.execute('pragma synchronous=full'); db.execute('create table t (n)')
lk = os.open(name + '.db', os.O_RDWR)
n, wrong = 0, []
def small(n):
    one = os.open('%s.%d' % (name, n % 7), os.O_RDWR | os.O_CREAT)
    os.pwrite(one, b'%09d' % n, 0); os.fsync(one); os.close(one)
def tried(what, call, *args):
    try: call(*args)
    except (OSError, sqlite3.Error) as e:
        wrong.append((what, n, '%s %s' % (e, getattr(e, 'sqlite_errorname', ''))))
while not os.path.exists(desk + '/stop'):
    tried('write', os.write, fd, b'%09d\\n' % n)
    tried('fsync', os.fsync, fd)
    if n % 4 == 0: tried('lock', fcntl.lockf, lk, fcntl.LOCK_SH, 10, 100)
    if n % 4 == 0: tried('unlock', fcntl.lockf, lk, fcntl.LOCK_UN, 10, 100)
    if n % 4 == 0: tried('sqlite', db.execute, 'insert into t values (?)', (n,))
    if n % 3 == 0: tried('small', small, n)
    n += 1
    if n % 10 == 0: open(desk + '/' + name, 'w').write('%d' % n)
text = os.pread(fd, 20 * n, 0)
if text != b''.join(b'%09d\\n' % i for i in range(n)): wrong.append(('content', len(text), n))
rows = [row[0] for row in db.execute('select n from t order by n')]
if rows != list(range(0, n, 4)): wrong.append(('rows', len(rows), n))
if db.execute('pragma integrity_check').fetchone()[0] != 'ok': wrong.append(('database', 0, n))
print(json.dumps(wrong))
";

/// What failed, at which round, and why.
type Wrong = Vec<(String, u64, Value)>;

/// Programs at work on a node in both views, and on its neighbour, while there is trouble, so many times: what
/// went wrong.
fn diligent(
    cluster: &Cluster,
    (nodes, node): (usize, usize),
    times: u32,
    trouble: impl Fn(&Cluster),
) -> Vec<(&'static str, Wrong)> {
    let desk = cluster.path("desk");
    fs::create_dir(&desk).expect("a directory");
    let views = [
        ("native", cluster.native(node)),
        ("hooked", cluster.hooked(node, &[])),
        ("other", cluster.native(node % nodes + 1)),
    ];
    let mut programs = Vec::new();
    for (name, mut command) in views {
        command.args(["python3", "-c", DILIGENT, name]).arg(&desk).stdout(Stdio::piped());
        programs.push((name, command.spawn().expect("a program")));
    }
    let done = |name: &str| {
        let said = fs::read_to_string(desk.join(name)).unwrap_or_default();
        said.parse::<u64>().unwrap_or(0)
    };
    let all_go_on = || {
        for name in ["native", "hooked", "other"] {
            let before = done(name);
            let more = || (done(name) >= before + 30).then_some(());
            wait_for(name, Duration::from_secs(60), more);
        }
    };
    for _ in 0..times {
        all_go_on();
        trouble(cluster);
    }
    all_go_on();
    fs::write(desk.join("stop"), "").expect("a file");
    let wrong = programs.into_iter().map(|(name, child)| {
        let output = child.wait_with_output().expect("it ran");
        (name, serde_json::from_str(text(&output).trim()).expect("a list"))
    });
    wrong.collect()
}

/// Nothing is lost, so nothing is an error: neither on the head, nor on another node, nor on one that is alone.
#[test]
fn services_that_are_asked_to_end_take_nothing_from_anybody() {
    for (nodes, node) in [(3, 2), (3, 1), (1, 1)] {
        let Some(cluster) = Cluster::new(nodes, "256MiB") else { return };
        let end = |cluster: &Cluster| cluster.restart_services(node);
        for (view, wrong) in diligent(&cluster, (nodes, node), 2, end) {
            assert_eq!(wrong, [], "node {node} of {nodes}, {view}");
        }
        cluster.assert_nothing_refused();
        cluster.assert_nobody_expelled();
    }
}

/// nicfs is killed, at head, middle and tail, and started again by its supervisor: it goes on in its place, and its clients in their
/// sessions. Nobody sees an error. (If the machine is so busy that it came too late, what was not everywhere is lost, since the
/// others went on without it; then each open file says so, once.)
#[test]
fn a_killed_service_that_is_back_in_time_takes_nothing_from_anybody() {
    let Some(cluster) = Cluster::new(3, "256MiB") else { return };
    for node in 1..=3 {
        let before = cluster.log(node).matches("no longer in the chain").count();
        let kill = |cluster: &Cluster| cluster.restart_nicfs(node);
        let all = diligent(&cluster, (3, node), 2, kill);
        let late = cluster.log(node).matches("no longer in the chain").count() > before;
        for (view, wrong) in all {
            if !late {
                assert_eq!(wrong, [], "nicfs of node {node}, {view}");
                continue;
            }
            eprintln!("nicfs of node {node} was not back in time");
            let mut seen = BTreeSet::new();
            for (what, round, why) in wrong {
                // The small files are seven.
                let file = match &*what {
                    "small" => round % 7,
                    "write" | "fsync" => 7,
                    _ => continue,
                };
                assert!(seen.insert(file), "{view}: {what} failed again at {round}: {why}");
            }
        }
        if !late {
            let copied = &cluster.status(node)["counters"]["snapshot_bytes"];
            assert_eq!(copied, 0, "of the volume, to node {node}");
        }
        for name in ["desk", "n1/mnt"] {
            for entry in fs::read_dir(cluster.path(name)).expect("a directory") {
                fs::remove_file(entry.expect("a name").path()).expect("a file");
            }
        }
        fs::remove_dir(cluster.path("desk")).expect("a directory");
    }
}

/// What resolves specially, and all that a program with a ring opens, is the kernel's: `fsync` of such a directory goes to the mount,
/// which knows nothing of the names that the process made itself.
#[test]
fn names_are_kept_that_were_synced_through_the_kernels_directory() {
    let Some(cluster) = Cluster::new(3, "256MiB") else { return };
    for name in ["a", "b", "c"] {
        let service = cluster.nicfs(2).expect("nicfs runs").as_raw_nonzero().to_string();
        let mut command = cluster.hooked(2, &[]);
        let script = format!("{TESTS}/run/kept.py");
        let output = command.args(["python3", &script, &service, name]).output().unwrap();
        text(&output);
        assert!(cluster.mount(1).join(name).is_dir(), "{name} was synced, and is lost");
        wait_for("the chain to be whole", Duration::from_secs(60), || {
            (1..=3)
                .all(|node| cluster.status(node)["chain"].as_array().map(Vec::len) == Some(3))
                .then_some(())
        });
    }
}

/// Has three files open: one that never had a name, one that lost it, and one whose name another node takes away.
const HOLDER: &str = "import json, os, sys, time
name, desk = sys.argv[1:3]
made = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600); os.write(made, b'made')
gone = os.open(name + '.gone', os.O_RDWR | os.O_CREAT); os.write(gone, b'gone'); os.unlink(name + '.gone')
lost = os.open(name + '.lost', os.O_RDWR | os.O_CREAT); os.write(lost, b'lost')
all = {'made': made, 'gone': gone, 'lost': lost}
for fd in all.values(): os.fsync(fd)
wrong = []
def look():
    for what, fd in all.items():
        try:
            if os.pread(fd, 100, 0) != what.encode(): wrong.append((what, 'content'))
            os.fchmod(fd, 0o640); os.fstat(fd)
        except OSError as e: wrong.append((what, str(e)))
look()
open(desk + '/' + name, 'w').close()
while not os.path.exists(desk + '/stop'):
    time.sleep(0.05)
    if name.startswith('busy'): look()
look()
print(json.dumps(wrong))
";

/// What is open lives until the last close, whatever becomes of the node's services: programs that look all the time,
/// and such as only come back to it when all is over.
#[test]
fn open_files_without_a_name_outlive_the_services() {
    let planned = |cluster: &Cluster, node: usize| cluster.restart_services(node);
    let killed = |cluster: &Cluster, node: usize| {
        cluster.restart_nicfs(node);
        wait_for("the chain to be whole", Duration::from_secs(60), || {
            let whole = cluster.status(node)["chain"].as_array().map(Vec::len) == Some(3);
            whole.then_some(())
        });
    };
    type Trouble<'a> = &'a dyn Fn(&Cluster, usize);
    for (node, trouble) in [(2, &planned as Trouble<'_>), (1, &planned), (2, &killed), (1, &killed)]
    {
        let Some(cluster) = Cluster::new(3, "256MiB") else { return };
        let desk = cluster.path("desk");
        fs::create_dir(&desk).expect("a directory");
        let mut programs = Vec::new();
        for name in ["busy-native", "busy-hooked", "idle-native", "idle-hooked"] {
            let mut command = match name.ends_with("hooked") {
                true => cluster.hooked(node, &[]),
                false => cluster.native(node),
            };
            command.args(["python3", "-c", HOLDER, name]).arg(&desk).stdout(Stdio::piped());
            programs.push((name, command.spawn().expect("a program")));
        }
        for (name, _) in &programs {
            let ready = || desk.join(name).exists().then_some(());
            wait_for(name, Duration::from_secs(60), ready);
        }
        trouble(&cluster, node);
        for (name, _) in &programs {
            let lost = cluster.mount(node % 3 + 1).join(format!("{name}.lost"));
            fs::remove_file(lost).expect("a name");
        }
        // Once more, with what was taken over from the session before.
        trouble(&cluster, node);
        fs::write(desk.join("stop"), "").expect("a file");
        for (name, child) in programs {
            let output = child.wait_with_output().expect("it ran");
            let wrong: Value = serde_json::from_str(text(&output).trim()).expect("a list");
            assert_eq!(wrong, serde_json::json!([]), "node {node}, {name}");
        }
    }
}

/// How many logs a process has mapped that are removed.
fn removed_logs(pid: &str) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", pid.trim())).expect("it runs");
    maps.lines().filter(|map| map.contains("/log.") && map.ends_with("(deleted)")).count()
}

const PATIENT: &str = "import os
fd = os.open('patient', os.O_RDWR | os.O_CREAT)
print(os.getpid())
for i in range(100):
    assert os.pread(fd, 1 << 20, 0) == b'x' * (i << 12), i
    os.pwrite(fd, b'x' * 4096, i << 12)
    os.fsync(fd)
    input()
    print(i)
";

/// Who outlives the services holds on to no log of before: each is as large as its lanes, and a mount lives for months.
#[test]
fn logs_of_before_are_given_back() {
    const TIMES: usize = 6;
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let mut command = cluster.hooked(1, &[]);
    command.args(["python3", "-u", "-c", PATIENT]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut said = || lines.next().expect("it goes on").expect("a line");
    let pid = said();
    let mount = fs::read_to_string(cluster.path("n1/run/mount.pid")).expect("it is mounted");
    let mount = mount.split_whitespace().next().expect("a number");
    let mut go_on = child.stdin.take().expect("a pipe");
    for i in 0..TIMES {
        go_on.write_all(b"\n").expect("it reads");
        assert_eq!(said(), i.to_string());
        fs::write(cluster.mount(1).join("file"), i.to_string()).expect("a file");
        cluster.restart_services(1);
    }
    go_on.write_all(b"\n").expect("it reads");
    assert_eq!(said(), TIMES.to_string());
    let last = fs::read_to_string(cluster.mount(1).join("file")).expect("a file");
    assert_eq!(last, (TIMES - 1).to_string());
    for (who, process) in [("the program", &*pid), ("the mount", mount)] {
        assert!((0..=1).contains(&removed_logs(process)), "{who}: {}", removed_logs(process));
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    cluster.assert_nothing_refused();
}

/// hostd's socket is away for a moment while its supervisor starts it again: a program that begins just then begins.
#[test]
fn a_program_that_begins_while_its_node_is_restarted_begins() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let socket = cluster.socket(1);
    let away = socket.with_extension("away");
    fs::rename(&socket, &away).expect("a socket");
    let mut command = cluster.hooked(1, &[]);
    let program = command.args(["sh", "-c", "echo text > f && cat f"]).stdout(Stdio::piped());
    let program = program.stderr(Stdio::piped()).spawn().expect("runs");
    std::thread::sleep(Duration::from_millis(300));
    fs::rename(&away, &socket).expect("the socket of before");
    assert_eq!(text(&program.wait_with_output().unwrap()), "text\n");
}
