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

/// Writes records one after the other into `file`, each synced, and makes a file now and then, until it is told to end or hears of an
/// error: which. And the longest time that one took.
fn load(
    guest: &mut Driver,
    file: (u64, u64),
    done: &AtomicU64,
    end: &AtomicBool,
) -> (Duration, i32) {
    let mut longest = Duration::ZERO;
    while !end.load(Ordering::Acquire) {
        let n = done.load(Ordering::Relaxed);
        let begun = Instant::now();
        let mut error = write(guest, file, n * RECORD as u64, &record(n));
        if error == 0 {
            error = fsync(guest, file);
        }
        if error == 0 && n.is_multiple_of(16) {
            let name = format!("file-{n}");
            let more = made(guest, ROOT, &name);
            error = write(guest, more, 0, &record(n));
            if error == 0 {
                error = fsync(guest, more);
            }
        }
        longest = longest.max(begun.elapsed());
        if error != 0 {
            return (longest, error);
        }
        done.store(n + 1, Ordering::Release);
    }
    (longest, 0)
}

fn at(cluster: &Cluster, node: usize) -> Device {
    let source = cluster.socket(node).display().to_string();
    Device::start(cluster.path(&format!("fs{node}.sock")), &["--source", &source])
}

fn chain(cluster: &Cluster, node: usize, chain: &serde_json::Value) {
    wait_for("the chain", LONG, || {
        let said = cluster.status(node);
        (said["chain"] == *chain && said["ready"] == true).then_some(())
    });
}

/// All that was acknowledged is there, by that node.
fn is_there(cluster: &Cluster, node: usize, done: u64) {
    let device = at(cluster, node);
    let mut guest = device.guest(Config::default());
    let file = opened(&mut guest, ROOT, "records");
    for n in 0..done {
        let there = read(&mut guest, file, n * RECORD as u64, RECORD);
        let begin = &there[..there.len().min(16)];
        assert!(there == record(n), "node {node}, record {n}: {begin:?}");
    }
    for n in (0..done).step_by(16) {
        let file = opened(&mut guest, ROOT, &format!("file-{n}"));
        assert!(read(&mut guest, file, 0, RECORD) == record(n), "node {node}, file {n}");
    }
}

#[test]
fn the_head_moves_under_a_device_that_is_written_to() {
    let cluster = Cluster::unmounted(3, "128MiB");
    chain(&cluster, 3, &serde_json::json!([1, 2, 3]));
    let device = at(&cluster, 3);
    let mut guest = device.guest(Config::default());
    let file = made(&mut guest, ROOT, "records");
    let (done, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let more = |what: &str| {
        let before = done.load(Ordering::Acquire);
        wait_for(what, LONG, || (done.load(Ordering::Acquire) >= before + 20).then_some(()));
    };
    let (longest, error) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| load(&mut guest, file, &done, &end));
        more("the first records");
        // Node 2 is the head, and node 1 comes back behind; then node 3, where the device is.
        for (head, left, whole) in [
            ("1", serde_json::json!([2, 3]), serde_json::json!([2, 3, 1])),
            ("2", serde_json::json!([3, 1]), serde_json::json!([3, 1, 2])),
        ] {
            text(&cluster.corbel(&["cluster", "kill", head]));
            more(&format!("records without node {head}"));
            chain(&cluster, 3, &left);
            text(&cluster.corbel(&["cluster", "start", head]));
            chain(&cluster, 3, &whole);
            more(&format!("records with node {head} again"));
        }
        // The head's nicfs alone, which is the device's own.
        cluster.restart_nicfs(3);
        more("records with another nicfs");
        end.store(true, Ordering::Release);
        writer.join().expect("it ends")
    });
    assert_eq!(error, 0, "no request has failed");
    drop((guest, device));
    let done = done.into_inner();
    println!("{done} records, the slowest {} ms", longest.as_millis());
    (1..=3).for_each(|node| is_there(&cluster, node, done));
    assert!(longest < Duration::from_secs(30), "a pause of {longest:?}");
}

/// The device's own node dies, and with it what was written and not synced: the guest is told so, and goes on when the node is back.
#[test]
fn a_device_whose_node_dies_goes_on_with_all_that_was_acknowledged() {
    let cluster = Cluster::unmounted(3, "128MiB");
    chain(&cluster, 1, &serde_json::json!([1, 2, 3]));
    let device = at(&cluster, 1);
    let mut guest = device.guest(Config::default());
    let file = made(&mut guest, ROOT, "records");
    assert_eq!(fsync(&mut guest, file), 0);
    let (done, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let (longest, error) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| load(&mut guest, file, &done, &end));
        let some = || (done.load(Ordering::Acquire) >= 20).then_some(());
        wait_for("the first records", LONG, some);
        text(&cluster.corbel(&["cluster", "kill", "1"]));
        chain(&cluster, 2, &serde_json::json!([2, 3]));
        std::thread::sleep(Duration::from_millis(500));
        text(&cluster.corbel(&["cluster", "start", "1"]));
        chain(&cluster, 1, &serde_json::json!([2, 3, 1]));
        end.store(true, Ordering::Release);
        writer.join().expect("it ends")
    });
    assert!(error == 0 || error == -libc::EIO, "error {error}");
    println!(
        "error {error} after {} records, the slowest {longest:?}",
        done.load(Ordering::Relaxed)
    );
    // What is opened now is as any other, also by the guest that was told.
    let file = opened(&mut guest, ROOT, "records");
    let n = done.load(Ordering::Relaxed);
    assert_eq!(write(&mut guest, file, n * RECORD as u64, &record(n)), 0);
    assert_eq!(fsync(&mut guest, file), 0);
    drop((guest, device));
    (1..=3).for_each(|node| is_there(&cluster, node, n));
}
