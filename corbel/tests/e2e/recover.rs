//! The chain has lost its data, an older copy is left: nobody goes on with it but a person, by `corbel recover`.

use std::process::Output;
use std::time::Duration;

use serde_json::Value;

use super::harness::{CORBEL, Cluster, corbel, json, limited, text, wait_for};

fn recover(cluster: &Cluster, args: &[&str]) -> Output {
    let config = cluster.path("n1/corbel.toml").display().to_string();
    corbel([&["--json", "--config", &config, "recover"][..], args].concat())
}

/// What a node has, and the answer.
fn copy(cluster: &Cluster, node: usize) -> (Value, Value) {
    let said = json(&recover(cluster, &[]));
    let copies = said["copies"].as_array().cloned().unwrap_or_default();
    let copy = copies.into_iter().find(|copy| copy["node"] == node).unwrap_or_default();
    (copy, said)
}

fn begin(cluster: &Cluster, node: &str) -> std::process::Child {
    let mut start = limited();
    start.arg(CORBEL).args(["cluster", "start", node, "--dir"]).arg(cluster.path(""));
    start.spawn().expect("corbel starts")
}

#[test]
fn an_older_copy_is_gone_on_with_only_if_a_person_says_so() {
    let Some(cluster) = Cluster::new(2, "64MiB") else { return };
    let until = |what: &str, done: &dyn Fn() -> bool| {
        wait_for(what, Duration::from_secs(20), || done().then_some(()));
    };
    text(&cluster.shell(1, "echo early > early; sync early").output().unwrap());
    let refused = recover(&cluster, &["--go-on-with", "2", "--confirm"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(json(&refused)["error"]["message"].as_str().unwrap().contains("chain lives"));

    let (well, said) = copy(&cluster, 2);
    assert_eq!((&said["lives"], &well["in_chain"]), (&true.into(), &true.into()), "{said}");
    assert_eq!(well["may_be_chosen"], false, "{said}");
    let config = cluster.path("n1/corbel.toml").display().to_string();
    let shown = text(&corbel(["--config", &config, "recover"]));
    assert!(shown.contains("node 2: in the chain") && !shown.contains("no copy"), "{shown}");

    // Node 1 goes on alone, and loses its region.
    text(&cluster.corbel(&["cluster", "kill", "2"]));
    until("node 1 alone", &|| {
        let said = cluster.status(1);
        said["chain"] == serde_json::json!([1]) && said["ready"] == true
    });
    // (Not synced: the two are to hold what is acknowledged.)
    text(&cluster.shell(1, "echo late > late").output().unwrap());
    text(&cluster.corbel(&["cluster", "kill", "1"]));
    let config = |node: usize| cluster.path(&format!("n{node}/corbel.toml")).display().to_string();
    // The volume's uuid, as its superblock has it (docs/format.md).
    let uuid = std::fs::read(cluster.path("n2/region/super")).unwrap()[16..32].to_vec();
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    text(&corbel(["--config", &config(1), "mkfs", "--force", "--uuid", &uuid]));
    let mut starts = [begin(&cluster, "1"), begin(&cluster, "2")];
    until("both nodes to register", &|| {
        copy(&cluster, 2).0["may_be_chosen"] == true && copy(&cluster, 1).0["reachable"] == true
    });

    let (old, said) = copy(&cluster, 2);
    assert_eq!((&said["lives"], &old["in_chain"]), (&false.into(), &false.into()), "{said}");
    assert!(old["published_ns"].as_u64() > Some(1_700_000_000_000_000_000), "{old}");
    let (lost, _) = copy(&cluster, 1);
    assert_eq!((&lost["epoch"], &lost["in_chain"]), (&Value::Null, &true.into()));
    let (code, message) = error(&recover(&cluster, &["--go-on-with", "1", "--confirm"]));
    assert!(code == 1 && message.contains("no copy"), "{message}");
    let (code, message) = error(&recover(&cluster, &["--go-on-with", "2"]));
    assert!(code == 2 && message.contains("lost for good"), "{message}");
    assert_eq!(copy(&cluster, 2).1["lives"], false, "nothing was done");
    let (code, message) = error(&recover(&cluster, &["--go-on-with", "7", "--confirm"]));
    assert!(code == 1 && message.contains("not registered"), "{message}");

    let done = recover(&cluster, &["--go-on-with", "2", "--confirm"]);
    assert_eq!(json(&done)["gone_on_with"], 2, "{done:?}");
    for start in &mut starts {
        assert!(start.wait().unwrap().success());
    }
    until("a whole chain", &|| cluster.status(1)["chain"] == serde_json::json!([2, 1]));
    // Also on node 1, whose mount was there before its region was made anew.
    for node in [2, 1] {
        let names = text(&cluster.shell(node, "cat early; ls").output().unwrap());
        assert_eq!(names, "early\nearly\n", "what node 2 had, and no more");
    }
}

fn error(output: &Output) -> (i32, String) {
    let said = json(output);
    let message = said["error"]["message"].as_str().unwrap_or_default().to_owned();
    (output.status.code().unwrap_or_default(), message)
}
