//! File locks that hold across the nodes of a cluster, by programs on the mounts and under
//! `corbel run`; and SQLite, which trusts its data to them.
//!
//! Needs root and /dev/fuse for the mounts (a container without them says so and passes).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

const CORBEL: &str = env!("CARGO_BIN_EXE_corbel");
/// A program that takes longer hangs.
const LIMIT_S: &str = "90";

/// Builds the library (alone, as it must be: see intercept/Cargo.toml).
fn library() {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "intercept"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "intercept builds");
    });
}

struct Cluster(PathBuf);

impl Cluster {
    fn new(name: &str) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: no right to mount here");
            return None;
        }
        library();
        let dir = PathBuf::from(format!("/dev/shm/corbel-locks-{name}-{}", std::process::id()));
        let cluster = Self(dir);
        let up = ["cluster", "up", "--nodes", "3", "--capacity", "128MiB", "--dir"];
        text(&Command::new(CORBEL).args(up).arg(&cluster.0).output().expect("corbel starts"));
        Some(cluster)
    }

    fn mount(&self, node: u32) -> PathBuf {
        self.0.join(format!("n{node}/mnt"))
    }

    /// A case of `tests/run/locks.py`.
    fn case(&self, case: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/locks.py");
        let mut command = Command::new("timeout");
        command.args([LIMIT_S, "python3"]).arg(script).arg(case).arg(&self.0).arg(CORBEL);
        assert_eq!(text(&command.output().expect("python starts")), "fine\n", "{case}");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = Command::new(CORBEL).args(["cluster", "down", "--dir"]).arg(&self.0).output();
    }
}

fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{:?}: {said}{errors}", output.status);
    said
}

#[test]
fn locks_hold_between_nodes_and_end_with_their_holders() {
    let Some(cluster) = Cluster::new("kinds") else { return };
    for case in ["kinds", "waiting", "death", "deadlock"] {
        cluster.case(case);
    }
}

#[test]
fn locks_survive_the_head() {
    let Some(cluster) = Cluster::new("head") else { return };
    cluster.case("failover");
}

#[test]
fn a_mount_gets_its_locks_back_from_a_restarted_service() {
    let Some(cluster) = Cluster::new("restart") else { return };
    cluster.case("restart");
}

/// One database, written at once through two mounts and under `corbel run` on the third node.
#[test]
fn sqlite_on_three_nodes_loses_nothing() {
    let Some(cluster) = Cluster::new("sqlite") else { return };
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
            let mut command = Command::new("timeout");
            command.arg(LIMIT_S);
            if node == 3 {
                command.args([CORBEL, "run", "--mount"]).arg(cluster.mount(node));
                let socket = cluster.0.join("n3/run/hostd.sock");
                command.arg("--socket").arg(socket).arg("--");
            }
            command.args(["python3", "-c", program]).arg(node.to_string());
            command.current_dir(cluster.mount(node)).spawn().expect("python starts")
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
        let mut command = Command::new("timeout");
        command.args([LIMIT_S, "python3", "-c", check]).current_dir(cluster.mount(node));
        let said = text(&command.output().expect("python starts"));
        assert_eq!(said, "ok 60 (60, 60)\n", "node {node}");
    }
}
