//! File locks that hold across the nodes of a cluster, by programs on the mounts and under
//! `corbel run`; and SQLite, which trusts its data to them.

use super::harness::{CORBEL, Cluster, TESTS, limited, text};

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "128MiB")
}

/// A case of `tests/run/locks.py`.
fn check(cluster: &Cluster, case: &str) {
    let mut command = limited();
    command.arg("python3").arg(format!("{TESTS}/run/locks.py")).arg(case);
    command.arg(cluster.path("")).arg(CORBEL);
    assert_eq!(text(&command.output().expect("python starts")), "fine\n", "{case}");
}

#[test]
fn locks_hold_between_nodes_and_end_with_their_holders() {
    let Some(cluster) = cluster() else { return };
    for case in ["kinds", "waiting", "death", "deadlock"] {
        check(&cluster, case);
    }
}

/// Over io_uring each of them takes a thread of the mount, and an entry of a queue.
#[test]
fn whoever_waits_for_a_lock_holds_nobody_up() {
    let Some(cluster) = Cluster::new(1, "64MiB") else { return };
    let mut command = limited();
    command.args(["python3", "-c"]).arg(
        "import fcntl, os, sys, time
file = sys.argv[1] + '/lock'
def locked(): f = open(file, 'w'); fcntl.flock(f, fcntl.LOCK_EX); return f
held, waiters = locked(), []
for n in range(100):
    pid = os.fork()
    if pid == 0: locked(); os._exit(0)
    waiters.append(pid)
time.sleep(1)
begun = time.monotonic()
for name in range(100): open(f'{sys.argv[1]}/{name}', 'w').write('x')
assert len(os.listdir(sys.argv[1])) == 101
for pid in waiters[:50]: os.kill(pid, 9); assert os.waitpid(pid, 0)[1] == 9
fcntl.flock(held, fcntl.LOCK_UN)
for pid in waiters[50:]: assert os.waitpid(pid, 0)[1] == 0
assert time.monotonic() - begun < 20
print('fine')",
    );
    command.arg(cluster.mount(1));
    assert_eq!(text(&command.output().expect("python starts")), "fine\n");
}

/// A program locks a file a thousand times, asks the head a few times at most, and holds what it got last: a program on another
/// node finds that, and when the first one is killed, has it.
#[test]
fn what_a_mount_grants_itself_is_known_on_other_nodes() {
    let Some(cluster) = cluster() else { return };
    let program = "import fcntl, os, struct, subprocess, sys, time
near, far = sys.argv[1:3]
HOLD = '''
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
for n in range(1000):
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1 + n % 7, 200 + n % 11)
    fcntl.lockf(fd, fcntl.LOCK_UN, 0, 0)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_UN)
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)
fcntl.flock(fd, fcntl.LOCK_SH)
print('held', flush=True)
time.sleep(100)
'''
open(near + '/granted', 'w').close()
holder = subprocess.Popen([sys.executable, '-c', HOLD, near + '/granted'], stdout=subprocess.PIPE, text=True)
assert holder.stdout.readline() == 'held\\n'
fd = os.open(far + '/granted', os.O_RDWR)
def barred(call, *args):
    try: call(*args)
    except BlockingIOError: return True
    return False
def getlk(start, length):
    asked = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, start, length, 0)
    kind, _, start, length, pid = struct.unpack('hhqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return kind, start, length, pid
assert getlk(0, 0) == (fcntl.F_WRLCK, 100, 10, 0), getlk(0, 0)
assert getlk(0, 100)[0] == fcntl.F_UNLCK
NB, EX, SH = fcntl.LOCK_NB, fcntl.LOCK_EX, fcntl.LOCK_SH
assert barred(fcntl.lockf, fd, EX | NB, 1, 109)
assert not barred(fcntl.lockf, fd, EX | NB, 5, 200), 'that was given up'
assert barred(fcntl.flock, fd, EX | NB) and not barred(fcntl.flock, fd, SH | NB)
holder.kill(); holder.wait()
end = time.monotonic() + 20
while barred(fcntl.lockf, fd, EX | NB, 0, 0) or barred(fcntl.flock, fd, EX | NB):
    assert time.monotonic() < end, 'too late'
    time.sleep(0.005)
print('fine')";
    let counter = |what: &str| -> u64 {
        let of = |node| cluster.status(node)["counters"][what].as_u64().expect("a counter");
        (1..=3).map(of).sum()
    };
    // Of what was locked and unlocked the head is asked a few dozen times at rest. How late the mount is told that all is its own depends
    // on how busy the machine is: once it must be told in time for the half.
    let asked = || {
        let before = counter("locks") + counter("locks_refused");
        let mut command = limited();
        command.args(["python3", "-c", program]).arg(cluster.mount(2)).arg(cluster.mount(3));
        assert_eq!(text(&command.output().expect("python starts")), "fine\n");
        counter("locks") + counter("locks_refused") - before
    };
    let mut all = Vec::new();
    while all.len() < 8 && all.last().is_none_or(|asked| *asked >= 4000 / 2) {
        all.push(asked());
    }
    assert!(all.last().is_some_and(|asked| *asked < 4000 / 2), "{all:?} questions to the head");
    assert!(counter("soles") > 0 && counter("soles_back") > 0);
    cluster.assert_nobody_expelled();
}

#[test]
fn locks_survive_the_head() {
    let Some(cluster) = cluster() else { return };
    check(&cluster, "failover");
}

#[test]
fn a_mount_gets_its_locks_back_from_a_restarted_service() {
    let Some(cluster) = cluster() else { return };
    check(&cluster, "restart");
}

/// One database, written at once through two mounts and under `corbel run` on the third node.
#[test]
fn sqlite_on_three_nodes_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let program = "import sqlite3, sys
db = sqlite3.connect('db', timeout=60, isolation_level=None)
db.execute('create table if not exists t (who text, n integer)')
db.execute('create table if not exists sum (n integer)')
for n in range(20):
    db.execute('begin immediate')
    db.execute('insert into t values (?, ?)', (sys.argv[1], n))
    before = db.execute('select count(*) from sum').fetchone()[0]
    db.execute('insert into sum values (?)', (before + 1,))
    db.execute('commit')";
    let children: Vec<_> = (1..=3)
        .map(|node| {
            let mut command =
                if node == 3 { cluster.hooked(node, &[]) } else { cluster.native(node) };
            command.args(["python3", "-c", program]).arg(node.to_string());
            command.spawn().expect("python starts")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("a child").success());
    }
    let check = "import sqlite3
db = sqlite3.connect('db')
print(db.execute('pragma integrity_check').fetchone()[0],
    db.execute('select count(*) from t').fetchone()[0],
    db.execute('select count(distinct n), max(n) from sum').fetchone())";
    for node in 1..=3 {
        let said = cluster.native(node).args(["python3", "-c", check]).output();
        let said = text(&said.expect("python starts"));
        assert_eq!(said, "ok 60 (60, 60)\n", "node {node}");
    }
}
