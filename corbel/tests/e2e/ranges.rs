//! Processes that write and read other bytes of one file at once, on one node and on several, each under `corbel run`: every byte that
//! any of them sees is judged by what had returned before and had begun after (`ranges.py`), and what is there in the end.

use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use super::harness::{Cluster, may_mount, text};

const SCRIPT: &str = include_str!("ranges.py");
const BLOCK: usize = 4096;
const BLOCKS: usize = 256;
const SECONDS: u32 = 5;

/// Runs a process on each of these nodes. `mode`: whether each keeps to its own blocks. `kill`: the last one is killed in the middle.
fn share(cluster: &Cluster, nodes: &[usize], mode: &str, kill: bool) {
    let name = format!("shared-{mode}-{}-{kill}", nodes.len());
    let truth = cluster.path(&format!("{name}.truth"));
    fs::write(&truth, vec![0; BLOCKS * 16]).unwrap();
    let script = cluster.path("ranges.py");
    fs::write(&script, SCRIPT).unwrap();
    fs::write(cluster.mount(1).join(&name), vec![0; BLOCKS * BLOCK]).unwrap();
    let seed = u64::from(std::process::id());
    eprintln!("{name}: seed {seed}, nodes {nodes:?}");
    let start = |(n, node): (usize, &usize)| -> Child {
        let mut command = cluster.hooked(*node, &[]);
        command.arg("python3").arg(&script).arg(&name).arg(&truth);
        let numbers = [n as u64, nodes.len() as u64, SECONDS.into(), seed];
        command.args(numbers.map(|n| n.to_string())).arg(mode);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let mut all: Vec<Child> = nodes.iter().enumerate().map(start).collect();
    if kill {
        std::thread::sleep(Duration::from_secs(2));
        all.last_mut().unwrap().kill().unwrap();
    }
    for (n, child) in all.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        eprintln!("process {n}: {}", text(&output));
        assert!(output.status.success() || kill && n + 1 == nodes.len(), "process {n}");
    }
    let counts = fs::read(&truth).unwrap();
    let counts: Vec<u64> =
        counts.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    for node in 1..=3 {
        let content = fs::read(cluster.mount(node).join(&name)).unwrap();
        assert_eq!(content.len(), BLOCKS * BLOCK);
        for (b, block) in content.chunks(BLOCK).enumerate() {
            let words = block.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            let (begun, done) = (counts[2 * b], counts[2 * b + 1]);
            assert!(
                words.clone().all(|word| (done..=begun).contains(&word)),
                "node {node}, block {b}: {:?}, not {done} to {begun}",
                words.clone().min().zip(words.max()),
            );
        }
    }
}

fn recalls(cluster: &Cluster) -> f64 {
    let of = |node| cluster.status(node)["counters"]["recalls"].as_f64().expect("a counter");
    (1..=3).map(of).sum()
}

#[test]
fn every_byte_of_a_shared_file_is_one_that_was_written() {
    if !may_mount() {
        return;
    }
    let cluster = Cluster::up(3, "128MiB", &["--leases", "ranges"]);
    for nodes in [&[1, 1, 1][..], &[1, 2, 3, 3]] {
        share(&cluster, nodes, "all", false);
        share(&cluster, nodes, "all", true);
        let before = recalls(&cluster);
        share(&cluster, nodes, "own", false);
        eprintln!("recalls where each keeps to its own: {}", recalls(&cluster) - before);
    }
    cluster.assert_nothing_refused();
    cluster.assert_nobody_expelled();
}
