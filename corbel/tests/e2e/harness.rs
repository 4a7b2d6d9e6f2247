//! What the tests stand on: a cluster that ends with its test, programs on its mounts and under
//! `corbel run`, and waiting that has an end.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub const CORBEL: &str = env!("CARGO_BIN_EXE_corbel");
/// Scripts, programs and configurations of the tests.
pub const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
/// Of each log, when a test fails.
const LAST_LINES: usize = 25;
/// A program that takes longer hangs, and is ended.
const LIMIT: [&str; 4] = ["timeout", "-k", "5", "120"];

/// Whether this process may mount; says so if not.
pub fn may_mount() -> bool {
    let may = Path::new("/dev/fuse").exists() && rustix::process::geteuid().is_root();
    if !may {
        eprintln!("SKIPPED: no right to mount here");
    }
    may
}

/// The interception library, which is built alone, as it must be: see intercept/Cargo.toml.
pub fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("intercept", "libintercept.so"))
}

/// Builds a package, and says where what comes of it lies beside `corbel`. (`scripts/test.sh` builds all of them before.)
pub fn built(package: &str, file: &str) -> PathBuf {
    let path = Path::new(CORBEL).with_file_name(file);
    let is_built = std::env::var_os("CORBEL_TEST_BUILT").is_some() && package != "intercept";
    if is_built && path.exists() {
        return path;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", package]);
    if package == "intercept" {
        // Without std nothing unwinds, whatever the programs are built for (`scripts/test.sh`).
        cargo.env("CARGO_PROFILE_DEV_PANIC", "abort");
    }
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success(), "{package} builds");
    assert!(path.exists(), "{}", path.display());
    path
}

/// A command with a limit of time; the program and its arguments are to be added.
pub fn limited() -> Command {
    let mut command = Command::new(LIMIT[0]);
    command.args(&LIMIT[1..]);
    command
}

/// `corbel`, with a limit of time.
pub fn corbel<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Output {
    let mut command = limited();
    command.arg(CORBEL).args(args).env_remove("CORBEL_CONFIG");
    command.output().expect("corbel starts")
}

/// What a program printed that succeeded.
pub fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{:?}: {said}{errors}", output.status);
    said
}

/// The last line of standard output as JSON, of a program that may have failed.
pub fn json(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {text:?} {output:?}"))
}

/// Asks again and again until there is an answer, for no longer than `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn signal(pid: Pid, signal: Signal) {
    kill_process(pid, signal).expect("the process runs");
}

/// Whether other users can come to these programs: a tree in somebody's own directory (mode 700) keeps them out, and tests that run as
/// others cannot run there. Says so where it is so.
pub fn others_reach() -> bool {
    let everybody = |dir: &&Path| {
        let meta = fs::metadata(dir).expect("a directory above a program");
        std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 1 != 0
    };
    let program = Path::new(CORBEL);
    let closed = program.ancestors().skip(1).find(|dir| !everybody(dir));
    if let Some(dir) = closed {
        eprintln!(
            "skipped: other users cannot come to {}: chmod o+x {}, or another directory",
            program.display(),
            dir.display()
        );
    }
    closed.is_none()
}

/// What the mount table says of a directory.
pub fn mounted(point: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mounts").expect("/proc");
    let point = format!(" {} ", point.display());
    table.lines().find(|line| line.contains(&point)).map(str::to_owned)
}

/// A directory in memory that is gone when the test ends, with what is mounted in it. Its path is
/// short: sockets in it have paths of at most 107 bytes.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = PathBuf::from(format!("/dev/shm/corbel-{}-{count}", std::process::id()));
        fs::create_dir(&dir).expect("a new directory");
        Self(dir)
    }

    pub fn path(&self, part: &str) -> PathBuf {
        self.0.join(part)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(1));
        for point in points.filter(|point| Path::new(point).starts_with(&self.0)) {
            let _ = Command::new("umount").args(["-l", point]).status();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A local cluster, which ends with its test however the test ends.
pub struct Cluster {
    scratch: Scratch,
    nodes: usize,
}

impl Cluster {
    /// A cluster with a mount on each node; none where that is not allowed.
    pub fn new(nodes: usize, capacity: &str) -> Option<Self> {
        if !may_mount() {
            return None;
        }
        library();
        Some(Self::up(nodes, capacity, &[]))
    }

    /// The same, whose nodes speak over TCP.
    pub fn over_tcp(nodes: usize, capacity: &str) -> Option<Self> {
        may_mount().then(|| Self::up(nodes, capacity, &["--transport", "tcp"]))
    }

    /// One without mounts, which needs no rights.
    pub fn unmounted(nodes: usize, capacity: &str) -> Self {
        Self::up(nodes, capacity, &["--no-mount"])
    }

    /// One with more options.
    pub fn up(nodes: usize, capacity: &str, more: &[&str]) -> Self {
        let cluster = Self { scratch: Scratch::new(), nodes };
        let count = nodes.to_string();
        let up = ["--json", "cluster", "up", "--nodes", &count, "--capacity", capacity];
        let said = cluster.corbel(&[&up, more].concat());
        assert_eq!(json(&said)["replicas"], nodes.min(3), "{said:?}");
        cluster
    }

    /// A verb of the local cluster.
    pub fn corbel(&self, args: &[&str]) -> Output {
        let place = [OsStr::new("--dir"), self.scratch.0.as_os_str()];
        corbel(args.iter().map(OsStr::new).chain(place))
    }

    pub fn path(&self, part: &str) -> PathBuf {
        self.scratch.path(part)
    }

    pub fn mount(&self, node: usize) -> PathBuf {
        self.path(&format!("n{node}/mnt"))
    }

    pub fn socket(&self, node: usize) -> PathBuf {
        self.path(&format!("n{node}/run/hostd.sock"))
    }

    /// What the processes of a node have logged.
    pub fn log(&self, node: usize) -> String {
        fs::read_to_string(self.path(&format!("n{node}/run/log"))).expect("a log")
    }

    /// What a node says of itself; null if it says nothing.
    pub fn status(&self, node: usize) -> Value {
        json(&self.corbel(&["--json", "cluster", "status"]))["nodes"][node - 1]["status"].take()
    }

    /// A program in the mount of a node, served by the kernel; it is to be added.
    pub fn native(&self, node: usize) -> Command {
        let mut command = limited();
        command.current_dir(self.mount(node));
        command
    }

    /// The same under `corbel run`.
    pub fn hooked(&self, node: usize, options: &[&str]) -> Command {
        let mut command = self.native(node);
        command.args([CORBEL, "run"]).args(options).arg("--mount").arg(self.mount(node));
        command.arg("--socket").arg(self.socket(node)).arg("--");
        command
    }

    /// A script in the mount of a node.
    pub fn shell(&self, node: usize, script: &str) -> Command {
        let mut command = self.native(node);
        command.args(["bash", "-c", script]);
        command
    }

    /// The same under `corbel run`.
    pub fn run(&self, node: usize, script: &str) -> Command {
        let mut command = self.hooked(node, &[]);
        command.args(["bash", "-c", script]);
        command
    }

    /// The nicfs of a node, if it runs.
    pub fn nicfs(&self, node: usize) -> Option<Pid> {
        let text = fs::read_to_string(self.path(&format!("n{node}/run/nicfs.pid"))).ok()?;
        Pid::from_raw(text.split_whitespace().next()?.parse().ok()?)
    }

    pub fn signal_nicfs(&self, node: usize, number: Signal) {
        signal(self.nicfs(node).expect("nicfs runs"), number);
    }

    /// The services of a node end as the system ends them, and are started again.
    pub fn restart_services(&self, node: usize) {
        self.stop_services(node);
        self.start_services(node);
    }

    /// They end as the system ends them.
    pub fn stop_services(&self, node: usize) {
        let file = self.path(&format!("n{node}/run/serve.pid"));
        let noted = fs::read_to_string(file).expect("the services run");
        let pid = noted.split_whitespace().next().and_then(|pid| pid.parse().ok());
        let pid = pid.and_then(Pid::from_raw).expect("a process");
        signal(pid, Signal::TERM);
        // The supervisor ends last; nobody may have collected it.
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        wait_for("the end of the services", Duration::from_secs(30), || {
            let ended = |stat: String| stat.contains(") Z ");
            fs::read_to_string(&stat).map_or(true, ended).then_some(())
        });
    }

    /// They are started, and in their place.
    pub fn start_services(&self, node: usize) {
        text(&self.corbel(&["cluster", "start", &node.to_string()]));
        wait_for("the node in its place", Duration::from_secs(60), || {
            let status = self.status(node);
            let whole = status["chain"].as_array().is_some_and(|chain| chain.len() == self.nodes);
            (status["ready"] == true && whole).then_some(())
        });
    }

    /// Kills nicfs and waits for the one that the supervisor starts instead.
    pub fn restart_nicfs(&self, node: usize) {
        let old = self.nicfs(node);
        self.signal_nicfs(node, Signal::KILL);
        wait_for("a new nicfs", Duration::from_secs(20), || {
            self.nicfs(node).filter(|new| Some(*new) != old)
        });
    }

    /// The ends of all logs: a failure may never come again.
    fn show_logs(&self) {
        for node in 1..=self.nodes {
            for name in ["log", "mount.log"] {
                let log = self.path(&format!("n{node}/run/{name}"));
                let text = fs::read_to_string(&log).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
                    eprintln!("node {node} {name}: {line}");
                }
            }
        }
    }

    /// Nothing that a program did may have been taken back behind its back.
    pub fn assert_nothing_refused(&self) {
        self.assert_not_logged("refused with");
    }

    /// Nobody may have been expelled for being slow.
    pub fn assert_nobody_expelled(&self) {
        self.assert_not_logged("expelled");
    }

    fn assert_not_logged(&self, word: &str) {
        for node in 1..=self.nodes {
            let log = self.log(node);
            let lines: Vec<&str> = log.lines().filter(|line| line.contains(word)).collect();
            assert!(lines.is_empty(), "node {node}: {lines:#?}");
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        if self.path("cluster.json").exists() {
            let _ = self.corbel(&["cluster", "down"]);
        }
    }
}
