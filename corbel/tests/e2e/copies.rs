//! hostd copies for nicfs, and may hang or die in the middle of it. Nothing of what it was asked for
//! comes late, over newer content: in the end all regions are equal.

use std::process::Child;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use serde_json::Value;

use super::harness::{Cluster, json, wait_for};

/// Writes the same places again and again, in pieces that are hostd's to copy, and copies them inside the
/// volume, which publishes at once what hostd is at.
const WRITER: &str = "import os, time
fd = os.open('rewritten', os.O_RDWR | os.O_CREAT)
to = os.open('copied', os.O_RDWR | os.O_CREAT)
end = time.monotonic() + 8
n = 0
while time.monotonic() < end:
    n += 1
    os.pwrite(fd, bytes([n % 251]) * (1 << 20), (n % 5) << 20)
    if n % 4 == 0:
        os.copy_file_range(fd, to, 1 << 20, (n % 5) << 20, (n % 3) << 20)
    if n % 8 == 0:
        os.fsync(fd)
os.fsync(fd)
os.fsync(to)
print(n)
";

fn hostd(cluster: &Cluster, node: usize) -> Option<Pid> {
    let file = cluster.path(&format!("n{node}/run/hostd.pid"));
    let text = std::fs::read_to_string(file).ok()?;
    Pid::from_raw(text.split_whitespace().next()?.parse().ok()?)
}

fn host_copies(cluster: &Cluster, node: usize) -> u64 {
    cluster.status(node)["counters"]["host_copies"].as_u64().unwrap_or(0)
}

/// Runs the writer on node 1 with `trouble` beside it, and compares the regions of both nodes.
fn judge(trouble: impl FnOnce(&Cluster, &mut Child)) {
    let Some(cluster) = Cluster::new(2, "64MiB") else { return };
    let mut writer = cluster.hooked(1, &[]);
    let mut writer = writer.args(["python3", "-c", WRITER]).spawn().expect("a program");
    trouble(&cluster, &mut writer);
    assert!(writer.wait().expect("a child").success());
    assert!(host_copies(&cluster, 1) > 0, "hostd copied nothing");
    cluster.assert_nothing_refused();
    // A node that was away for long is brought up to date before it is in the chain again.
    wait_for("everything to be published by both", Duration::from_secs(40), || {
        let (first, second) = (cluster.status(1), cluster.status(2));
        let whole = first["chain"].as_array().is_some_and(|chain| chain.len() == 2);
        let end = &first["stream_seq"];
        let published = |status: &Value| status["published"] == *end && end.is_u64();
        (whole && published(&first) && published(&second)).then_some(())
    });
    assert!(cluster.corbel(&["cluster", "down", "--keep"]).status.success());
    let region = |node: usize| cluster.path(&format!("n{node}/region")).display().to_string();
    let (first, second) = (region(1), region(2));
    let args = ["--json", "fsck", "--region", &first, "--compare", &second];
    let fsck = super::harness::corbel(args);
    assert!(fsck.status.success(), "{fsck:?}");
    assert_eq!(json(&fsck)["sound"], true);
}

#[test]
fn a_hostd_that_hangs() {
    judge(|cluster, writer| {
        let mut node = 1;
        while writer.try_wait().expect("a child").is_none() {
            node = 3 - node;
            let Some(pid) = hostd(cluster, node) else { continue };
            // It may be gone: a node that cannot wait for it ends it.
            let _ = kill_process(pid, Signal::STOP);
            std::thread::sleep(Duration::from_millis(300));
            let _ = kill_process(pid, Signal::CONT);
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

#[test]
fn a_hostd_that_dies() {
    judge(|cluster, writer| {
        let mut node = 1;
        while writer.try_wait().expect("a child").is_none() {
            node = 3 - node;
            if let Some(pid) = hostd(cluster, node) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    });
}

/// What hostd was asked for by a nicfs that has died is at its end before the next one goes on.
#[test]
fn a_nicfs_that_dies_while_hostd_hangs() {
    judge(|cluster, _| {
        wait_for("hostd to copy", Duration::from_secs(10), || {
            (host_copies(cluster, 2) > 0).then_some(())
        });
        // Not the node of the writer, who would have to attach anew.
        let Some(pid) = hostd(cluster, 2) else { return };
        let _ = kill_process(pid, Signal::STOP);
        cluster.restart_nicfs(2);
        std::thread::sleep(Duration::from_millis(1500));
        let _ = kill_process(pid, Signal::CONT);
    });
}
