//! A mount whose node is away: nobody hangs who cannot be killed, and when the node is back it goes on.
//!
//! Needs root and /dev/fuse for the mounts (a container without them says so and passes).

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

const CORBEL: &str = env!("CARGO_BIN_EXE_corbel");
/// From a signal to the end of its process; generous, for a busy machine.
const SOON: Duration = Duration::from_secs(5);

struct Cluster(PathBuf);

impl Cluster {
    fn new(name: &str) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: no right to mount here");
            return None;
        }
        let dir = PathBuf::from(format!("/dev/shm/corbel-patience-{name}-{}", std::process::id()));
        let cluster = Self(dir);
        let up = cluster.corbel(&["cluster", "up", "--nodes", "3", "--capacity", "64MiB"]);
        assert!(up.status.success(), "{up:?}");
        Some(cluster)
    }

    fn corbel(&self, args: &[&str]) -> Output {
        let mut command = Command::new(CORBEL);
        command.args(args).arg("--dir").arg(&self.0).output().expect("corbel starts")
    }

    fn mount(&self) -> PathBuf {
        self.0.join("n2/mnt")
    }

    /// A shell in the mount, which ends by itself after 40 s.
    fn shell(&self, script: &str) -> Child {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "40", "bash", "-c", script]);
        command.env("MOUNT", self.mount()).spawn().expect("bash starts")
    }

    fn ok(&self, script: &str) {
        let status = self.shell(script).wait().expect("it ran");
        assert!(status.success(), "{script}: {status:?}");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.corbel(&["cluster", "down"]);
    }
}

/// How a process ended, which must be soon. One that does not is left to its own time limit.
fn ends(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + SOON;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status;
        }
        assert!(Instant::now() < end, "process {} does not end", child.id());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn kill(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).expect("it runs");
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
    let end = Instant::now() + SOON;
    while std::fs::read_to_string(&comm).is_ok_and(|name| name != "goes\n") {
        assert!(Instant::now() < end, "{program}: does not start");
        if child.try_wait().expect("a child").is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(200));
    child
}

#[test]
fn whoever_waits_for_a_dead_node_can_be_killed_and_the_rest_goes_on() {
    let Some(cluster) = Cluster::new("dead") else { return };
    let mount = cluster.mount();
    cluster.ok("cd $MOUNT; mkdir d; echo before > d/f");
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
        kill(waiter, rustix::process::Signal::KILL);
    }
    for waiter in &mut waiters {
        assert_eq!(ends(waiter).signal(), Some(9));
    }
    kill(&holder, rustix::process::Signal::KILL);
    assert_eq!(ends(&mut holder).signal(), Some(9));
    // Ctrl-C, which nobody catches; and one that a program catches.
    let dies =
        "signal.signal(signal.SIGINT, signal.SIG_DFL); go(); os.stat(os.environ['MOUNT'] + '/n')";
    let mut dies = waiting(&mount, dies);
    kill(&dies, rustix::process::Signal::INT);
    assert_eq!(ends(&mut dies).signal(), Some(2));
    let catches = "def caught(*_): raise OSError(4, 'caught')
signal.signal(signal.SIGINT, caught); go()
try: os.stat(os.environ['MOUNT'] + '/n')
except OSError as e: os._exit(e.errno)";
    let mut catches = waiting(&mount, catches);
    kill(&catches, rustix::process::Signal::INT);
    assert_eq!(ends(&mut catches).code(), Some(4));
    // A patient one gets its answer when the node is back.
    let mut patient = cluster.shell("cd $MOUNT && echo after > g && sync g && cat g");
    std::thread::sleep(Duration::from_millis(500));
    assert!(patient.try_wait().unwrap().is_none(), "it waits");
    let started = cluster.corbel(&["cluster", "start", "2"]);
    assert!(started.status.success(), "{started:?}");
    assert!(patient.wait().unwrap().success());
    cluster
        .ok("cd $MOUNT && [ $(cat g) = after ] && echo more > d/h && flock d/h true && rm -r d g");
}

#[test]
fn a_soft_mount_gives_up() {
    let Some(cluster) = Cluster::new("soft") else { return };
    let point = cluster.0.join("soft");
    std::fs::create_dir(&point).unwrap();
    let socket = cluster.0.join("n2/run/hostd.sock");
    let mounted = Command::new(CORBEL)
        .arg("mount")
        .arg(&socket)
        .arg(&point)
        .args(["-o", "soft,timeo=1"])
        .output();
    assert!(mounted.as_ref().is_ok_and(|m| m.status.success()), "{mounted:?}");
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
