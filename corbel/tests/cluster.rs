//! The binary as a person uses it: a local cluster that loses a node and gets it back, and what
//! the command line says when it is used wrongly.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

fn corbel(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corbel"));
    command.args(args).env_remove("CORBEL_CONFIG").output().unwrap()
}

/// The last line of standard output as JSON.
fn json(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {text:?} {output:?}"))
}

/// A cluster that is ended whatever happens to the test.
struct Cluster(PathBuf);

impl Cluster {
    fn run(&self, args: &[&str]) -> Output {
        let dir = self.0.display().to_string();
        let mut all = vec!["--json", "cluster"];
        all.extend(args);
        all.extend(["--dir", &dir]);
        corbel(&all)
    }

    fn node(&self, node: usize) -> Value {
        json(&self.run(&["status"]))["nodes"][node - 1]["status"].clone()
    }

    /// Waits until `done` says yes about what a node says of itself.
    fn wait(&self, node: usize, done: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let said = self.node(node);
            if done(&said) {
                return said;
            }
            assert!(Instant::now() < end, "node {node} says {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.0.join("cluster.json").exists() {
            self.run(&["down"]);
        }
    }
}

fn scrape(config: &std::path::Path) -> String {
    let text = std::fs::read_to_string(config).unwrap();
    let line = text.lines().find(|l| l.starts_with("metrics = ")).unwrap();
    let mut stream = std::net::TcpStream::connect(line.split('"').nth(1).unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn a_node_is_lost_and_returns() {
    let dir = std::env::temp_dir().join(format!("corbel-cluster-{}", std::process::id()));
    let cluster = Cluster(dir.clone());
    let up = cluster.run(&["up", "--nodes", "3", "--no-mount", "--capacity", "64MiB"]);
    assert!(up.status.success(), "{up:?}");
    assert_eq!(json(&up)["replicas"], 3);

    let again = cluster.run(&["up", "--nodes", "3"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(json(&again)["error"]["message"].as_str().unwrap().contains("already"));

    let head = cluster.wait(1, |said| said["role"] == "head");
    assert_eq!(head["chain"], serde_json::json!([1, 2, 3]));
    let metrics = scrape(&dir.join("n1/corbel.toml"));
    let epoch = format!("corbel_epoch {}", head["epoch"]);
    assert!(metrics.lines().any(|line| line == epoch), "{metrics}");

    let busy =
        corbel(&["--json", "fsck", "--region", &dir.join("n1/region").display().to_string()]);
    assert_eq!(busy.status.code(), Some(8), "a region in use is not checked: {busy:?}");

    assert!(cluster.run(&["kill", "1"]).status.success());
    let survivor = cluster.wait(2, |said| said["role"] == "head" && said["ready"] == true);
    assert_eq!(survivor["chain"], serde_json::json!([2, 3]));
    assert!(survivor["epoch"].as_u64() > head["epoch"].as_u64());
    assert_eq!(cluster.run(&["kill", "1"]).status.code(), Some(4), "it is dead already");
    assert_eq!(cluster.run(&["kill", "9"]).status.code(), Some(2));

    let back = cluster.run(&["start", "1"]);
    assert!(back.status.success(), "{back:?}");
    let chain = cluster.wait(1, |said| said["role"] == "member")["chain"].clone();
    assert_eq!(chain, serde_json::json!([2, 3, 1]));

    let down = cluster.run(&["down", "--keep"]);
    assert!(down.status.success(), "{down:?}");
    assert!(!down.stdout.windows(8).any(|w| w == b"(killed)"), "{down:?}");
    let region = |node: u32| dir.join(format!("n{node}/region")).display().to_string();
    let fsck = corbel(&[
        "--json",
        "fsck",
        "--region",
        &region(1),
        "--compare",
        &region(2),
        "--compare",
        &region(3),
    ]);
    assert!(fsck.status.success(), "{fsck:?}");
    assert_eq!(json(&fsck)["sound"], true);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn wrong_use_gets_code_message_and_remedy() {
    let missing = std::env::temp_dir().join("corbel-no-such-file.toml").display().to_string();
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--json", "bench", "fsync-chan"], 2, "usage"),
        (&["--json", "mkfs", "--uuid", "xyz"], 2, "usage"),
        (&["--json", "fsck", "--regoin", "x"], 16, "usage"),
        (&["--json", "config", "check", &missing], 3, "config"),
        (&["--json", "config", "show", "--set", "node.idd=1"], 3, "config"),
        (&["--json", "fsck", "--region", &missing], 8, "failed"),
        (&["--json", "cluster", "status", "--dir", &missing], 4, "unreachable"),
    ];
    for (args, code, word) in cases {
        let output = corbel(args);
        assert_eq!(output.status.code(), Some(code), "{args:?} {output:?}");
        let error = &json(&output)["error"];
        assert_eq!(error["code"], word, "{args:?}");
        for key in ["message", "remedy"] {
            assert!(!error[key].as_str().unwrap().is_empty(), "{args:?}: {error}");
        }
    }
    let human = corbel(&["config", "show", "--set", "node.idd=1"]);
    let said = String::from_utf8_lossy(&human.stderr);
    assert!(said.contains("node.idd") && said.contains("remedy: did you mean \"id\"?"), "{said}");
}

#[test]
fn man_pages_and_completion_know_every_verb() {
    let dir = std::env::temp_dir().join(format!("corbel-man-{}", std::process::id()));
    let man = corbel(&["--json", "man", &dir.display().to_string()]);
    assert!(man.status.success(), "{man:?}");
    let bash = corbel(&["completion", "bash"]);
    let script = String::from_utf8_lossy(&bash.stdout);
    for verb in ["mkfs", "serve", "mount", "run", "status", "fsck", "bench", "cluster", "config"] {
        assert!(dir.join(format!("corbel-{verb}.1")).exists(), "man page of {verb}");
        assert!(script.contains(verb), "completion of {verb}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
