//! The binary as a person uses it: a local cluster that loses a node and gets it back, and what
//! the command line says when it is used wrongly.

use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::harness::{
    CORBEL, Cluster, Scratch, corbel, json, limited, may_mount, mounted, text, wait_for,
};

/// Waits until `done` says yes about what a node says of itself.
fn wait(cluster: &Cluster, node: usize, done: impl Fn(&Value) -> bool) -> Value {
    wait_for(&format!("node {node}"), Duration::from_secs(20), || {
        Some(cluster.status(node)).filter(&done)
    })
}

fn scrape(config: &Path) -> String {
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
    let cluster = Cluster::unmounted(3, "64MiB");
    let run = |args: &[&str]| cluster.corbel(&[&["--json", "cluster"], args].concat());
    let region = |node: u32| cluster.path(&format!("n{node}/region")).display().to_string();
    let again = run(&["up", "--nodes", "3"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(json(&again)["error"]["message"].as_str().unwrap().contains("already"));

    let head = wait(&cluster, 1, |said| said["role"] == "head");
    assert_eq!(head["chain"], serde_json::json!([1, 2, 3]));
    let metrics = scrape(&cluster.path("n1/corbel.toml"));
    let epoch = format!("corbel_epoch {}", head["epoch"]);
    assert!(metrics.lines().any(|line| line == epoch), "{metrics}");

    let busy = corbel(["--json", "fsck", "--region", &region(1)]);
    assert_eq!(busy.status.code(), Some(8), "a region in use is not checked: {busy:?}");

    assert!(run(&["kill", "1"]).status.success());
    let survivor = wait(&cluster, 2, |said| said["role"] == "head" && said["ready"] == true);
    assert_eq!(survivor["chain"], serde_json::json!([2, 3]));
    assert!(survivor["epoch"].as_u64() > head["epoch"].as_u64());
    assert_eq!(run(&["kill", "1"]).status.code(), Some(4), "it is dead already");
    assert_eq!(run(&["kill", "9"]).status.code(), Some(2));

    let back = run(&["start", "1"]);
    assert!(back.status.success(), "{back:?}");
    let chain = wait(&cluster, 1, |said| said["role"] == "member")["chain"].clone();
    assert_eq!(chain, serde_json::json!([2, 3, 1]));

    let down = run(&["down", "--keep"]);
    assert!(down.status.success(), "{down:?}");
    assert!(!down.stdout.windows(8).any(|w| w == b"(killed)"), "{down:?}");
    let others = ["--compare", &region(2), "--compare", &region(3)];
    let fsck = corbel(["--json", "fsck", "--region", &region(1)].iter().chain(&others));
    assert!(fsck.status.success(), "{fsck:?}");
    assert_eq!(json(&fsck)["sound"], true);
}

/// Whoever waits for the processor looks dead, however full the machine is of others.
/// Also elsewhere; and one that was not mounted is not.
#[test]
fn a_node_that_is_started_again_is_mounted_where_it_was() {
    if !may_mount() {
        return;
    }
    let elsewhere = Scratch::new();
    let at = elsewhere.path("mnt");
    for (more, there) in [(["--mount", at.to_str().unwrap()], true), (["--no-mount"; 2], false)] {
        let more = if there { &more[..] } else { &more[..1] };
        let cluster = Cluster::up(1, "64MiB", more);
        assert_eq!(mounted(&at).is_some(), there);
        assert!(cluster.corbel(&["cluster", "kill", "1"]).status.success());
        let started = cluster.corbel(&["cluster", "start", "1"]);
        assert!(started.status.success(), "{started:?}");
        assert_eq!((mounted(&at).is_some(), mounted(&cluster.mount(1)).is_some()), (there, false));
    }
}

#[test]
fn services_come_before_what_else_runs() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root may raise priorities");
        return;
    }
    let cluster = Cluster::unmounted(1, "16MiB");
    for (file, nice) in [("n1/run/nicfs.pid", "-10"), ("coordinator/coordinator.pid", "-15")] {
        let pid = std::fs::read_to_string(cluster.path(file)).unwrap();
        let pid = pid.split_whitespace().next().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let words: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        assert_eq!(words[16], nice, "nice value of {file}: {stat}");
    }
}

/// `corbel status | head`: whoever reads may have heard enough. And a full disk is said to be one.
#[test]
fn output_that_nobody_takes_is_no_panic() {
    for verb in [&["completion", "bash"][..], &["man"], &["config", "show"]] {
        let ended = |out: std::process::Stdio| {
            let mut command = limited();
            command.arg(CORBEL).args(verb).stdout(out).stderr(std::process::Stdio::piped());
            let output = command.spawn().and_then(|child| child.wait_with_output());
            let output = output.expect("corbel starts");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (read, write) = std::io::pipe().expect("a pipe");
        drop(read);
        assert_eq!(ended(write.into()), (Some(141), String::new()), "{verb:?}");
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("it is there");
        let (code, said) = ended(full.into());
        assert!(code == Some(1) && said.contains("No space") && said.contains("remedy"), "{said}");
    }
}

/// Figures of a library that was left behind by a build would be figures of nothing.
#[test]
fn a_bench_refuses_a_library_of_other_sources() {
    let library = std::env::temp_dir().join(format!("corbel-other-{}.so", std::process::id()));
    std::fs::write(&library, "of other sources").expect("a file");
    let bench = ["--json", "bench", "fsync-chain", "--replicas", "1"];
    let output = limited().arg(CORBEL).args(bench).env("CORBEL_LIBRARY", &library).output();
    let _ = std::fs::remove_file(&library);
    let output = output.expect("corbel starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let file = library.display().to_string();
    assert!(said.contains(&file) && said.contains("-p intercept"), "{said}");
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
    let missing = json(&corbel(["--json", "run"]));
    let message = missing["error"]["message"].as_str().unwrap();
    assert!(message.ends_with("not provided: <PROGRAM>..."), "{message}");
    let human = corbel(["config", "show", "--set", "node.idd=1"]);
    let said = String::from_utf8_lossy(&human.stderr);
    assert!(said.contains("node.idd") && said.contains("remedy: did you mean \"id\"?"), "{said}");
}

#[test]
fn man_pages_and_completion_know_every_verb() {
    let scratch = Scratch::new();
    let man = corbel(["--json", "man", &scratch.path("man").display().to_string()]);
    text(&man);
    let bash = corbel(["completion", "bash"]);
    let script = String::from_utf8_lossy(&bash.stdout);
    for verb in
        ["mkfs", "serve", "mount", "run", "status", "fsck", "bench", "cluster", "config", "recover"]
    {
        assert!(scratch.path(&format!("man/corbel-{verb}.1")).exists(), "man page of {verb}");
        assert!(script.contains(verb), "completion of {verb}");
    }
}
