//! The head of the chain moves under a device: its guest sees a pause, and what it was told is durable is there.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ::virtiofs::driver::{Config, Driver};

use super::super::harness::{Cluster, text, wait_for};
use super::{Device, ROOT, fsync, made, opened, read, write};

const LONG: Duration = Duration::from_secs(60);
/// Bytes that are written at once.
const RECORD: usize = 512;

fn record(n: u64) -> Vec<u8> {
    n.to_le_bytes().repeat(RECORD / 8)
}

/// Writes records one after the other, each synced, and makes a file now and then, until it is told to end. How many there are, and the
/// longest time that one took.
fn load(guest: &mut Driver, done: &AtomicU64, end: &AtomicBool) -> Duration {
    let file = made(guest, ROOT, "records");
    assert_eq!(fsync(guest, file), 0);
    let mut longest = Duration::ZERO;
    while !end.load(Ordering::Acquire) {
        let n = done.load(Ordering::Relaxed);
        let begun = Instant::now();
        assert_eq!(write(guest, file, n * RECORD as u64, &record(n)), 0, "record {n}");
        assert_eq!(fsync(guest, file), 0, "record {n}");
        if n % 16 == 0 {
            let more = made(guest, ROOT, &format!("file-{n}"));
            assert_eq!(write(guest, more, 0, &record(n)), 0, "file {n}");
            assert_eq!(fsync(guest, more), 0, "file {n}");
        }
        longest = longest.max(begun.elapsed());
        done.store(n + 1, Ordering::Release);
    }
    longest
}

#[test]
fn the_head_moves_under_a_device_that_is_written_to() {
    let cluster = Cluster::unmounted(3, "128MiB");
    let at = |node: usize| {
        let source = cluster.socket(node).display().to_string();
        Device::start(cluster.path(&format!("fs{node}.sock")), &["--source", &source])
    };
    let chain = |node: usize, chain: serde_json::Value| {
        wait_for("the chain", LONG, || {
            let said = cluster.status(node);
            (said["chain"] == chain && said["ready"] == true).then_some(())
        });
    };
    chain(3, serde_json::json!([1, 2, 3]));
    let device = at(3);
    let mut guest = device.guest(Config::default());
    let (done, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let more = |what: &str| {
        let before = done.load(Ordering::Acquire);
        wait_for(what, LONG, || (done.load(Ordering::Acquire) >= before + 20).then_some(()));
    };
    let longest = std::thread::scope(|scope| {
        let writer = scope.spawn(|| load(&mut guest, &done, &end));
        more("the first records");
        // Node 2 is the head, and node 1 comes back behind; then node 3, where the device is.
        for (head, left, whole) in [
            ("1", serde_json::json!([2, 3]), serde_json::json!([2, 3, 1])),
            ("2", serde_json::json!([3, 1]), serde_json::json!([3, 1, 2])),
        ] {
            text(&cluster.corbel(&["cluster", "kill", head]));
            more(&format!("records without node {head}"));
            chain(3, left);
            text(&cluster.corbel(&["cluster", "start", head]));
            chain(3, whole);
            more(&format!("records with node {head} again"));
        }
        end.store(true, Ordering::Release);
        writer.join().expect("no request has failed")
    });
    drop((guest, device));
    // All of it is there, on every node.
    let done = done.into_inner();
    println!("{done} records, the slowest {} ms", longest.as_millis());
    for node in 1..=3 {
        let device = at(node);
        let mut guest = device.guest(Config::default());
        let file = opened(&mut guest, ROOT, "records");
        for n in 0..done {
            let there = read(&mut guest, file, n * RECORD as u64, RECORD);
            assert!(
                there == record(n),
                "node {node}, record {n}: {:?}",
                &there[..there.len().min(16)]
            );
        }
        for n in (0..done).step_by(16) {
            let file = opened(&mut guest, ROOT, &format!("file-{n}"));
            assert!(read(&mut guest, file, 0, RECORD) == record(n), "node {node}, file {n}");
        }
    }
    assert!(longest < Duration::from_secs(30), "a pause of {longest:?}");
}
