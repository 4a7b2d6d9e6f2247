//! `corbel send` and `corbel receive`: what was sent is in another volume what it was, whatever became of the stream on the way.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::harness::{CORBEL, Cluster, json, text};

/// What changes, cuts and compares.
const SCRIPT: &str = include_str!("transfer.py");

fn verb(cluster: &Cluster, args: &[&str], input: Option<&[u8]>) -> Output {
    let mut command = Command::new(CORBEL);
    command.args(["--json", args[0], "--socket"]).arg(cluster.socket(1)).args(&args[1..]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    // Who refuses a stream does not read all of it.
    let _ = pipe.write_all(input.unwrap_or_default());
    drop(pipe);
    child.wait_with_output().unwrap()
}

fn sent(cluster: &Cluster, args: &[&str]) -> Vec<u8> {
    let output = verb(cluster, &[&["send"], args].concat(), None);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// Exit code and error.
fn refusal(output: &Output) -> (Option<i32>, Value) {
    // What sends leaves standard output to the stream.
    let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    let line = said.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty()).unwrap();
    let said: Value = serde_json::from_slice(line).unwrap();
    (output.status.code(), said["error"].clone())
}

fn message(output: &Output) -> String {
    let (code, error) = refusal(output);
    assert!(matches!(code, Some(1 | 2 | 5)), "{output:?}");
    format!("{}: {}", error["message"].as_str().unwrap(), error["remedy"].as_str().unwrap())
}

#[test]
fn a_copy_elsewhere_is_what_was_sent_whatever_is_cut_and_killed() {
    let Some(one) = Cluster::new(1, "256MiB") else { return };
    let Some(other) = Cluster::new(1, "256MiB") else { return };
    for seed in 0..2u64 {
        let mut python = Command::new("python3");
        python.args(["-c", SCRIPT, CORBEL]).arg(one.socket(1)).arg(one.mount(1));
        python.arg(other.socket(1)).arg(other.mount(1)).args([&seed.to_string(), "6"]);
        let output = python.output().unwrap();
        assert_eq!(text(&output), "the same\n", "seed {seed}");
        let again = "rm -rf src out* copy .copy.receive";
        text(&one.shell(1, again).output().unwrap());
        text(&other.shell(1, again).output().unwrap());
        for cluster in [&one, &other] {
            let all = verb(cluster, &["snapshot", "list"], None);
            for snapshot in json(&all)["snapshots"].as_array().unwrap() {
                let name = snapshot["name"].as_str().unwrap();
                text(&verb(cluster, &["snapshot", "delete", name], None));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let sh = |script: &str| text(&cluster.shell(1, script).output().unwrap());
    let corbel = |args: &[&str]| verb(&cluster, args, None);
    sh(
        "mkdir -p d/sub other; head -c 3000000 /dev/urandom > d/f; echo g > d/g; ln d/g d/sub/h; sync -f .",
    );
    for (name, dir) in [("a", "/d"), ("o", "/other"), ("all", "/")] {
        text(&corbel(&["snapshot", "create", name, "--dir", dir]));
    }
    sh("echo more >> d/f; mv d/g d/sub/g; mkdir d/new; rm d/sub/h; sync -f .");
    text(&corbel(&["snapshot", "create", "b", "--dir", "/d"]));
    let (a, b) = (sent(&cluster, &["a"]), sent(&cluster, &["b", "--from", "a"]));
    assert!(b.len() < 20_000, "{} bytes are sent of what changed", b.len());

    // Snapshots that are none, of two directories, in the wrong order.
    for (args, why) in [
        (vec!["send", "c"], "there is none"),
        (vec!["send", "b", "--from", "o"], "of two directories"),
        (vec!["send", "a", "--from", "b"], "is not earlier"),
        (vec!["send", "a", "--from", "a"], "is not earlier"),
        (vec!["receive", "/", "--status"], "cannot be received into"),
        (vec!["receive", "/copy", "--status"], "nothing was received"),
        (vec!["receive", "/copy", "--abort"], "nothing is being received"),
    ] {
        let said = message(&corbel(&args));
        assert!(said.contains(why), "{args:?}: {said}");
    }
    let into =
        |input: &[u8], args: &[&str]| verb(&cluster, &[&["receive"], args].concat(), Some(input));
    for (input, args, why) in [
        (&b[..], vec!["/copy", "--no-snapshot"], "was sent with --from"),
        (&a, vec!["/copy"], "there is a snapshot a already"),
        (&a, vec!["/d", "--no-snapshot"], "was not made by a receive"),
        (&a[..10], vec!["/copy"], "ends before it begins"),
        (b"something else that is long enough", vec!["/copy"], "it is something else"),
        (&a, vec!["/none/copy"], "no such file"),
    ] {
        let said = message(&into(input, &args));
        assert!(said.contains(why), "{args:?}: {said}");
    }
    assert_eq!(sh("ls -A"), "d\nother\n", "nothing was made");

    // Damaged, cut, gone on with.
    let mut damaged = a.clone();
    damaged[a.len() / 2] ^= 4;
    let said = message(&into(&damaged, &["/copy", "--no-snapshot"]));
    assert!(said.contains("has another checksum") && said.contains("--resume"), "{said}");
    assert_eq!(
        sh("ls -A; cat .copy.receive/tree/f | head -c 1000 | cmp -n 1000 - d/f"),
        ".copy.receive\nd\nother\n"
    );
    let said = message(&into(&sent(&cluster, &["o"]), &["/copy", "--no-snapshot"]));
    assert!(said.contains("another directory"), "{said}");
    let said = message(&into(&b, &["/copy", "--no-snapshot"]));
    assert!(said.contains("between two snapshots") && said.contains("--abort"), "{said}");
    let later = sent(&cluster, &["a", "--resume", "6-0-0"]);
    assert!(message(&into(&later, &["/copy", "--no-snapshot"])).contains("up to"));
    text(&corbel(&["receive", "/copy", "--abort"]));
    assert_eq!(sh("ls -A"), "d\nother\n");
    assert!(message(&into(&later, &["/copy", "--no-snapshot"])).contains("without --resume"));

    text(&into(&a, &["/copy", "--snapshot", "copy of a"]));
    let shown = |dir: &str| {
        sh(&format!("cd '{dir}'; find . -printf '%p %y %n %m %T@\\n' | sort; md5sum f"))
    };
    assert_eq!(shown("copy"), shown(".corbel/snapshots/a"));
    assert!(message(&into(&a, &["/copy", "--no-snapshot"])).contains("as a already"));
    let said = json(&corbel(&["receive", "/copy", "--status"]));
    assert_eq!((&said["complete"]["name"], &said["coming"]), (&"a".into(), &Value::Null), "{said}");
    assert!(message(&corbel(&["receive", "/copy", "--abort"])).contains("first stream has come"));

    // A copy that was changed says so, and is as it should be when that is undone.
    sh("mv copy/g copy/mine; mkdir copy/new");
    let said = message(&into(&b, &["/copy", "--snapshot", "copy of b"]));
    assert!(said.contains("not as it was received"), "{said}");
    sh("mv copy/mine copy/g; rmdir copy/new");
    text(&into(&b, &["/copy", "--snapshot", "copy of b"]));
    assert_eq!(shown("copy"), shown(".corbel/snapshots/b"));
    assert_eq!(shown(".corbel/snapshots/copy of a"), shown(".corbel/snapshots/a"));
    // What the volume does not take is no success, and goes on when it does.
    sh(
        "mkdir q; for i in 1 2 3 4; do echo $i > q/$i; done; chown 65534 q/*; chmod 4755 q/2; sync -f .",
    );
    text(&corbel(&["snapshot", "create", "q1", "--dir", "/q"]));
    text(&corbel(&["quota", "set", "--user", "65534", "--inodes", "6"]));
    let q = sent(&cluster, &["q1"]);
    let said = message(&into(&q, &["/quota", "--no-snapshot"]));
    assert!(said.contains("quota") && said.contains("--resume"), "{said}");
    assert_eq!(
        sh("find .quota.receive -perm -4000 | wc -l"),
        "0\n",
        "nothing runs as somebody else"
    );
    text(&corbel(&["quota", "clear", "--user", "65534"]));
    let said = json(&corbel(&["receive", "/quota", "--status"]));
    let at = said["coming"]["position"].as_str().unwrap();
    text(&into(&sent(&cluster, &["q1", "--resume", at]), &["/quota", "--no-snapshot"]));
    let shown_q = |dir: &str| sh(&format!("cd '{dir}'; stat -c '%n %u %a %Y' *; cat *"));
    assert_eq!(shown_q("quota"), shown_q("q"));

    // Meanwhile nobody sees what he might not in the earlier state, or may not in the later one.
    sh(
        "chmod 600 q/1; head -c 2000000 /dev/urandom > q/1; chmod 644 q/2; chmod 600 q/3; mkdir -m 700 q/p; mv q/4 q/p; sync -f .",
    );
    text(&corbel(&["snapshot", "create", "q2", "--dir", "/q"]));
    let q = sent(&cluster, &["q2", "--from", "q1"]);
    assert_eq!(
        into(&q[..q.len() - 1_000_000], &["/quota", "--no-snapshot"]).status.code(),
        Some(1)
    );
    assert_eq!(
        sh("stat -c '%n %u %a' quota/[123] quota/p quota/p/4"),
        "quota/1 65534 600\nquota/2 65534 644\nquota/3 65534 600\nquota/p 0 700\nquota/p/4 65534 644\n"
    );
    text(&into(&q, &["/quota", "--no-snapshot"]));
    assert_eq!(shown_q("quota/p"), shown_q("q/p"));
    assert_eq!(
        sh("cd quota; stat -c '%n %u %a %Y' ?; md5sum [1-9]"),
        sh("cd q; stat -c '%n %u %a %Y' ?; md5sum [1-9]")
    );
    // What lies beside is root's alone, and the directory where it was.
    sh("mkdir .mine.receive; chown 65534 .mine.receive; mv quota elsewhere");
    assert!(message(&into(&a, &["/mine", "--no-snapshot"])).contains("is not root's alone"));
    sh("mkdir quota; echo more > q/5; sync -f .");
    text(&corbel(&["snapshot", "create", "q3", "--dir", "/q"]));
    let q = sent(&cluster, &["q3", "--from", "q2"]);
    assert!(
        message(&into(&q, &["/quota", "--no-snapshot"]))
            .contains("not the directory that was received")
    );
    sh("rmdir quota; mv elsewhere quota");
    text(&into(&q, &["/quota", "--no-snapshot"]));
    assert_eq!(sh("cat quota/5"), "more\n");

    // Nobody but the super-user.
    let mut stranger = Command::new("setpriv");
    stranger.args(["--reuid=65534", "--regid=65534", "--clear-groups", CORBEL, "send", "a"]);
    let output = stranger.arg("--socket").arg(cluster.socket(1)).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    // All of a volume.
    let all = sent(&cluster, &["all"]);
    text(&into(&all, &["/whole", "--no-snapshot"]));
    assert_eq!(shown("whole/d"), shown(".corbel/snapshots/all/d"));
}
