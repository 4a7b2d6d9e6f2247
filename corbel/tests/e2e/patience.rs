//! A mount whose node is away: nobody hangs who cannot be killed, and when the node is back it goes on.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::harness::{Cluster, corbel, limited, signal, text, wait_for};

/// From a signal to the end of its process; generous, for a busy machine.
const SOON: Duration = Duration::from_secs(60);

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "64MiB")
}

/// A shell outside of the mount of node 2, which is told where it is.
fn shell(cluster: &Cluster, script: &str) -> Child {
    let mut command = limited();
    command.args(["bash", "-c", script]).env("MOUNT", cluster.mount(2));
    command.spawn().expect("bash starts")
}

fn ok(cluster: &Cluster, script: &str) {
    let status = shell(cluster, script).wait().expect("it ran");
    assert!(status.success(), "{script}: {status:?}");
}

/// How a process ended, which must be soon. One that does not is left to its own time limit.
fn ends(child: &mut Child) -> ExitStatus {
    let what = format!("the end of process {}", child.id());
    wait_for(&what, SOON, || child.try_wait().expect("a child"))
}

fn kill(child: &Child, number: Signal) {
    signal(Pid::from_child(child), number);
}

/// A program that says `go()` when it is about to wait in the mount; returns a moment after that.
fn waiting(mount: &Path, program: &str) -> Child {
    let mut command = Command::new("python3");
    command.arg("-c").arg(format!(
        "import os, signal, fcntl, time
def go(): open('/proc/self/comm', 'w').write('goes')
{program}"
    ));
    let mut child = command.current_dir("/").env("MOUNT", mount).spawn().expect("python3 starts");
    let comm = format!("/proc/{}/comm", child.id());
    wait_for(program, SOON, || {
        let goes = std::fs::read_to_string(&comm).is_ok_and(|name| name == "goes\n");
        (goes || child.try_wait().expect("a child").is_some()).then_some(())
    });
    std::thread::sleep(Duration::from_millis(200));
    child
}

#[test]
fn whoever_waits_for_a_dead_node_can_be_killed_and_the_rest_goes_on() {
    let Some(cluster) = cluster() else { return };
    let mount = cluster.mount(2);
    ok(&cluster, "cd $MOUNT; mkdir d; echo before > d/f");
    // Has a file open and a lock on it, which its end gives back: closing must not wait.
    let holder =
        "fd = os.open(os.environ['MOUNT'] + '/d/f', os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX)
os.write(fd, b'x'); go(); time.sleep(60)";
    let mut holder = waiting(&mount, holder);
    assert!(cluster.corbel(&["cluster", "kill", "2"]).status.success());
    std::thread::sleep(Duration::from_millis(500));

    // More of them than the mount has threads, on the same inode and on others.
    let programs = [
        "go(); os.listdir(os.environ['MOUNT'])",
        "go(); os.stat(os.environ['MOUNT'] + '/nothing')",
        "go(); open(os.environ['MOUNT'] + '/d/new', 'w')",
        "go(); os.unlink(os.environ['MOUNT'] + '/d/f')",
        "go(); fd = os.open(os.environ['MOUNT'], 0); os.fsync(fd)",
    ];
    let mut waiters: Vec<Child> =
        programs.iter().cycle().take(15).map(|program| waiting(&mount, program)).collect();
    for waiter in &mut waiters {
        assert!(waiter.try_wait().unwrap().is_none(), "it waits");
        kill(waiter, Signal::KILL);
    }
    for waiter in &mut waiters {
        assert_eq!(ends(waiter).signal(), Some(9));
    }
    kill(&holder, Signal::KILL);
    assert_eq!(ends(&mut holder).signal(), Some(9));
    // Ctrl-C, which nobody catches; and one that a program catches.
    let dies =
        "signal.signal(signal.SIGINT, signal.SIG_DFL); go(); os.stat(os.environ['MOUNT'] + '/n')";
    let mut dies = waiting(&mount, dies);
    kill(&dies, Signal::INT);
    assert_eq!(ends(&mut dies).signal(), Some(2));
    let catches = "def caught(*_): raise OSError(4, 'caught')
signal.signal(signal.SIGINT, caught); go()
try: os.stat(os.environ['MOUNT'] + '/n')
except OSError as e: os._exit(e.errno)";
    let mut catches = waiting(&mount, catches);
    kill(&catches, Signal::INT);
    assert_eq!(ends(&mut catches).code(), Some(4));
    // A patient one gets its answer when the node is back.
    let mut patient = shell(&cluster, "cd $MOUNT && echo after > g && sync g && cat g");
    std::thread::sleep(Duration::from_millis(500));
    assert!(patient.try_wait().unwrap().is_none(), "it waits");
    let started = cluster.corbel(&["cluster", "start", "2"]);
    assert!(started.status.success(), "{started:?}");
    assert!(patient.wait().unwrap().success());
    ok(
        &cluster,
        "cd $MOUNT && [ $(cat g) = after ] && echo more > d/h && flock d/h true && rm -r d g",
    );
}

#[test]
fn a_soft_mount_gives_up() {
    let Some(cluster) = cluster() else { return };
    let point = cluster.path("soft");
    std::fs::create_dir(&point).unwrap();
    let socket = cluster.socket(2);
    text(&corbel([
        "mount".as_ref(),
        socket.as_os_str(),
        point.as_os_str(),
        "-o".as_ref(),
        "soft,timeo=1".as_ref(),
    ]));
    let waits = "go()\ntry: os.stat(os.environ['MOUNT'] + '/n%d' % os.getpid())\nexcept OSError as e: os._exit(e.errno)";
    let before = waiting(&point, waits).wait().unwrap();
    assert!(cluster.corbel(&["cluster", "kill", "2"]).status.success());
    std::thread::sleep(Duration::from_millis(500));
    let during = ends(&mut waiting(&point, waits));
    let started = cluster.corbel(&["cluster", "start", "2"]);
    let mut after = None;
    for _ in 0..20 {
        after = ends(&mut waiting(&point, waits)).code();
        if after == Some(2) {
            break;
        }
    }
    let unmounted = Command::new("umount").arg(&point).status().unwrap();
    assert_eq!((before.code(), during.code(), after), (Some(2), Some(5), Some(2)));
    assert!(started.status.success() && unmounted.success());
}
