//! What the workers stand on: a cluster of its own with several views of one volume, or a plain
//! directory, by which the hunter itself is tested.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A way into the files.
#[derive(Clone, Debug)]
pub struct View {
    /// As `m1`: the mount of node 1; `r2`: under `corbel run` on node 2.
    pub name: String,
    /// The node, from 1 on.
    pub node: u32,
    /// Where the volume is.
    pub root: PathBuf,
    /// What comes before a program.
    pub prefix: Vec<OsString>,
}

/// The ground.
#[derive(Debug)]
pub struct Ground {
    /// Ways into it.
    pub views: Vec<View>,
    cluster: Option<Cluster>,
    /// A fault that goes on beside the calls.
    under_way: Option<JoinHandle<io::Result<()>>>,
    /// Faults so far.
    pub faults: u64,
}

/// A cluster of this program's own.
#[derive(Clone, Debug)]
struct Cluster {
    corbel: PathBuf,
    dir: PathBuf,
}

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The binary.
    pub corbel: PathBuf,
    /// Its directory, which must not be there.
    pub dir: PathBuf,
    /// Nodes.
    pub nodes: u32,
    /// Size of the volume.
    pub capacity: String,
    /// Views to be used: mounts, `corbel run`, or both.
    pub mounts: bool,
    /// Programs under `corbel run`.
    pub runs: bool,
}

/// A service that is killed is there again after that time, however busy the machine.
const BACK_WITHIN: Duration = Duration::from_secs(60);

impl Ground {
    /// A directory; every view leads there.
    pub fn plain(dir: &Path, nodes: u32) -> Self {
        let name = |node| [format!("m{node}"), format!("r{node}")].map(|name| (name, node));
        let views = (1..=nodes).flat_map(name).map(|(name, node)| View {
            name,
            node,
            root: dir.to_path_buf(),
            prefix: Vec::new(),
        });
        Self { views: views.collect(), cluster: None, under_way: None, faults: 0 }
    }

    /// Starts a cluster.
    pub fn cluster(plan: &Plan) -> io::Result<Self> {
        let cluster = Cluster { corbel: plan.corbel.clone(), dir: plan.dir.clone() };
        let nodes = plan.nodes.to_string();
        cluster.corbel(&["cluster", "up", "--nodes", &nodes, "--capacity", &plan.capacity])?;
        let mut views = Vec::new();
        for node in 1..=plan.nodes {
            let at = cluster.dir.join(format!("n{node}"));
            let root = at.join("mnt");
            let mut prefix: Vec<OsString> = vec![cluster.corbel.clone().into(), "run".into()];
            prefix.extend(["--mount".into(), root.clone().into(), "--socket".into()]);
            prefix.extend([at.join("run/hostd.sock").into(), OsString::from("--")]);
            if plan.mounts {
                views.push(View {
                    name: format!("m{node}"),
                    node,
                    root: root.clone(),
                    prefix: Vec::new(),
                });
            }
            if plan.runs {
                views.push(View { name: format!("r{node}"), node, root, prefix });
            }
        }
        Ok(Self { views, cluster: Some(cluster), under_way: None, faults: 0 })
    }

    /// The view of that name, or another if there is none: scripts outlive the clusters they were found on.
    pub fn view(&self, name: &str) -> &View {
        let same = |view: &&View| view.name == name;
        let alike = |view: &&View| view.name[..1] == name[..1];
        let found = self.views.iter().find(same).or_else(|| self.views.iter().find(alike));
        found.unwrap_or(&self.views[0])
    }

    /// Whether it is a cluster, or a plain directory.
    pub fn is_cluster(&self) -> bool {
        self.cluster.is_some()
    }

    /// Brings about a fault, and waits until all is well again, unless its last word is `&`.
    ///
    /// ```text
    /// nicfs N         kill -9 of the service, which its supervisor starts again
    /// hostd N         the same
    /// stop N WHO MS   SIGSTOP of nicfs or hostd for some milliseconds
    /// term N          the services of a node end in order, and are started
    /// node N          kill -9 of all services of a node, and start
    /// ```
    pub fn fault(&mut self, what: &str) -> io::Result<()> {
        self.heal()?;
        let Some(cluster) = self.cluster.clone() else { return Ok(()) };
        self.faults += 1;
        let words: Vec<String> = what.split_whitespace().map(str::to_owned).collect();
        let beside = words.last().is_some_and(|word| word == "&");
        let bring = move || {
            let words: Vec<&str> = words.iter().map(String::as_str).filter(|w| *w != "&").collect();
            cluster.fault(&words)
        };
        if beside {
            self.under_way = Some(std::thread::spawn(bring));
            return Ok(());
        }
        bring()
    }

    /// Waits until a fault that went on beside the calls is over.
    pub fn heal(&mut self) -> io::Result<()> {
        match self.under_way.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("a fault could not be brought about")),
            None => Ok(()),
        }
    }

    /// Keeps what the services have logged.
    pub fn keep_logs(&self, to: &Path) {
        let Some(cluster) = &self.cluster else { return };
        let _ = fs::create_dir_all(to);
        for view in &self.views {
            let from = cluster.dir.join(format!("n{}/run", view.node));
            for log in ["log", "mount.log"] {
                let _ = fs::copy(from.join(log), to.join(format!("n{}-{log}", view.node)));
            }
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = self.heal();
        if let Some(cluster) = &self.cluster
            && let Err(error) = cluster.corbel(&["cluster", "down"])
        {
            eprintln!("hunt: {error}");
        }
    }
}

impl Cluster {
    fn corbel(&self, args: &[&str]) -> io::Result<String> {
        let mut command = Command::new(&self.corbel);
        command.args(args).arg("--dir").arg(&self.dir).env_remove("CORBEL_CONFIG");
        let output = command.stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(io::Error::other(format!("corbel {}: {}", args.join(" "), said.trim())))
    }

    /// The process of a service, with the time at which it began.
    fn service(&self, node: &str, name: &str) -> Option<(i32, String)> {
        let text = fs::read_to_string(self.dir.join(format!("n{node}/run/{name}.pid"))).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let pid: i32 = pid.parse().ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, fields) = stat.rsplit_once(')')?;
        // A number that was given to another process has another time.
        (fields.split_whitespace().nth(19)? == start).then(|| (pid, start.to_string()))
    }

    fn signal(&self, node: &str, name: &str, number: i32) -> io::Result<(i32, String)> {
        let gone = || io::Error::other(format!("{name} of node {node} does not run"));
        let service = wait(BACK_WITHIN, || self.service(node, name)).ok_or_else(gone)?;
        // SAFETY: takes numbers only.
        #[allow(unsafe_code)]
        if unsafe { libc::kill(service.0, number) } == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(service)
    }

    fn fault(&self, words: &[&str]) -> io::Result<()> {
        match words {
            [name @ ("nicfs" | "hostd"), node] => {
                let old = self.signal(node, name, libc::SIGKILL)?;
                let new = || self.service(node, name).filter(|new| *new != old);
                wait(BACK_WITHIN, new).map(drop).ok_or_else(|| {
                    io::Error::other(format!("{name} of node {node} did not come back"))
                })?;
                self.wait_ready()
            }
            ["stop", node, name, ms] => {
                let ms = ms.parse().map_err(io::Error::other)?;
                self.signal(node, name, libc::SIGSTOP)?;
                std::thread::sleep(Duration::from_millis(ms));
                self.signal(node, name, libc::SIGCONT)?;
                self.wait_ready()
            }
            [how @ ("term" | "node"), node] => {
                let signal = if *how == "term" { "TERM" } else { "KILL" };
                self.corbel(&["cluster", "kill", node, "--signal", signal])?;
                if *how == "term" {
                    let ended = || {
                        ["serve", "nicfs", "hostd"].iter().all(|n| self.service(node, n).is_none())
                    };
                    let over = wait(BACK_WITHIN, || ended().then_some(()));
                    over.ok_or_else(|| io::Error::other(format!("node {node} does not end")))?;
                }
                self.corbel(&["cluster", "start", node])?;
                self.wait_ready()
            }
            _ => Err(io::Error::other(format!("no fault: {}", words.join(" ")))),
        }
    }

    /// Waits until every node is ready, and all see a chain of the same length.
    fn wait_ready(&self) -> io::Result<()> {
        let ready = || {
            let said = self.corbel(&["--json", "cluster", "status"]).ok()?;
            let said: serde_json::Value = serde_json::from_str(said.lines().last()?).ok()?;
            let nodes = said["nodes"].as_array()?;
            let whole = nodes.iter().all(|node| {
                let status = &node["status"];
                let members = status["chain"].as_array().map_or(0, Vec::len);
                status["ready"] == true && status["hostd"] == true && members == nodes.len()
            });
            whole.then_some(())
        };
        let late = || io::Error::other("the chain is not whole again");
        wait(BACK_WITHIN, ready).ok_or_else(late)
    }
}

/// Asks until there is an answer.
fn wait<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
