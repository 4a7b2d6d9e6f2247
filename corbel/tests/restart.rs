//! nicfs of a single node is killed under programs that never fsync: they go on, and everything is
//! there.
//!
//! Needs root and /dev/fuse for the mount (a container without them says so and passes).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const CORBEL: &str = env!("CARGO_BIN_EXE_corbel");
/// A program that takes longer hangs.
const LIMIT_S: &str = "60";

struct Cluster(PathBuf);

impl Cluster {
    fn new(name: &str) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: no right to mount here");
            return None;
        }
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "intercept"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "intercept builds");
        let dir = PathBuf::from(format!("/dev/shm/corbel-restart-{name}-{}", std::process::id()));
        let cluster = Self(dir);
        let output = cluster.corbel(&["cluster", "up", "--nodes", "1", "--capacity", "256MiB"]);
        assert!(output.status.success(), "{output:?}");
        Some(cluster)
    }

    fn corbel(&self, args: &[&str]) -> Output {
        let mut command = Command::new(CORBEL);
        command.args(args).arg("--dir").arg(&self.0).output().expect("corbel starts")
    }

    fn mount(&self) -> PathBuf {
        self.0.join("n1/mnt")
    }

    /// A Python program under the library.
    fn python(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args([LIMIT_S, CORBEL, "run", "--mount"]).arg(self.mount()).arg("--socket");
        command.arg(self.0.join("n1/run/hostd.sock")).args(["--", "python3", "-u", "-c", program]);
        command.current_dir(self.mount()).stdout(Stdio::piped());
        command
    }

    fn nicfs(&self) -> Option<i32> {
        let text = fs::read_to_string(self.0.join("n1/run/nicfs.pid")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    }

    /// Kills nicfs and waits for the one that the supervisor starts instead.
    fn kill_nicfs(&self) {
        let old = self.nicfs().expect("nicfs runs");
        let pid = rustix::process::Pid::from_raw(old).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("nicfs runs");
        let end = Instant::now() + Duration::from_secs(20);
        while self.nicfs().is_none_or(|new| new == old) {
            assert!(Instant::now() < end, "nicfs is not started again");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn clients(&self) -> usize {
        let output = self.corbel(&["--json", "cluster", "status"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let status: serde_json::Value = serde_json::from_str(text.trim()).expect("JSON");
        status["nodes"][0]["status"]["clients"].as_array().map_or(0, Vec::len)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.corbel(&["cluster", "down"]);
    }
}

/// The numbers that a program prints, as they come.
fn numbers(child: &mut Child) -> impl Iterator<Item = u32> {
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
    let Some(cluster) = Cluster::new("goes-on") else { return };
    let program = WRITER.replace("COUNT", "600");
    let mut child = cluster.python(&program).spawn().expect("a program");
    for n in numbers(&mut child) {
        if n == 100 || n == 250 || n == 400 {
            cluster.kill_nicfs();
        }
    }
    assert!(child.wait().expect("a child").success());
    let wanted: String = (0..600).map(|i| format!("{i}\n")).collect();
    let found = fs::read_to_string(cluster.mount().join("numbers")).expect("a file");
    assert!(found == wanted, "{} of {} bytes", found.len(), wanted.len());
    for i in (0..600).step_by(10) {
        let one = fs::read_to_string(cluster.mount().join(format!("one{i}"))).expect("a file");
        assert_eq!(one, i.to_string());
    }
    assert!(!cluster.mount().join("temp").exists());
    let log = fs::read_to_string(cluster.0.join("n1/run/log")).expect("a log");
    assert!(!log.contains("refused with"), "{log}");
}

#[test]
fn what_a_killed_program_wrote_is_there_after_a_restart() {
    let Some(cluster) = Cluster::new("killed") else { return };
    let program = WRITER.replace("COUNT", "100000");
    let mut child = cluster.python(&program).spawn().expect("a program");
    let mut last = 0;
    for n in numbers(&mut child) {
        last = n;
        if n == 200 {
            cluster.kill_nicfs();
        }
        if n == 300 {
            break;
        }
    }
    let before = cluster.clients();
    // `timeout` passes it on; whatever the program printed it had written.
    let pids =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).expect("proc");
    for pid in pids.split_whitespace().filter_map(|p| p.parse().ok()) {
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    }
    cluster.kill_nicfs();
    assert!(!child.wait().expect("a child").success());
    let found = fs::read_to_string(cluster.mount().join("numbers")).expect("a file");
    let wanted: String = (0..=last).map(|i| format!("{i}\n")).collect();
    assert!(found.starts_with(&wanted), "{} of {} bytes", found.len(), wanted.len());
    let end = Instant::now() + Duration::from_secs(20);
    while cluster.clients() >= before {
        assert!(Instant::now() < end, "the dead program stays listed");
        std::thread::sleep(Duration::from_millis(50));
    }
}
