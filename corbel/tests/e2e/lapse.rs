//! Leases end by time: while the service of a node hangs or is dead its programs go on, but none of
//! them reads what others have replaced since.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::harness::Cluster;

/// A Python program.
fn python(mut command: Command, program: &str) -> Child {
    command.args(["python3", "-u", "-c", program]).stdout(Stdio::piped());
    command.spawn().expect("a program")
}

fn hooked(cluster: &Cluster, node: usize, program: &str) -> Child {
    python(cluster.hooked(node, &[]), program)
}

/// Writes numbers that grow, and says when each was written.
const WRITER: &str = "import os, time
fd = os.open('shared', os.O_RDWR | os.O_CREAT)
end = time.monotonic() + 9
n = 0
while time.monotonic() < end:
    n += 1
    os.pwrite(fd, b'%08d' % n, 0)
    os.ftruncate(fd, 8 + n)
    print('written', n, time.monotonic_ns())
    time.sleep(0.02)
";

/// Reads all the time, and says what it saw and when it began to look.
const READER: &str = "import os, time
fd = os.open('shared', os.O_RDONLY)
print('ready')
end = time.monotonic() + 9
last = None
while time.monotonic() < end:
    began = time.monotonic_ns()
    now = (os.pread(fd, 8, 0), time.monotonic_ns() - began > 50000000)
    if now != last or began % 16 == 0:
        print('read', int(now[0]), began)
    last = now
";

/// The same by what the kernel says of the file, which it may cache.
const LOOKER: &str = "import os, time
os.stat('shared')
print('ready')
end = time.monotonic() + 9
last = None
while time.monotonic() < end:
    began = time.monotonic_ns()
    now = os.stat('shared').st_size
    if now != last or began % 16 == 0:
        print('read', now - 8, began)
    last = now
";

/// What was printed: numbers and times.
fn printed(child: &mut Child, word: &str) -> Vec<(u64, u64)> {
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    assert!(child.wait().expect("a child").success());
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next() == Some(word)).then_some(())?;
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

/// A program on `reader`'s node reads what one on `writer`'s writes, while `trouble` happens to the
/// reader's service.
fn judge(name: &str, reader: usize, writer: usize, trouble: impl FnOnce(&Cluster)) {
    judge_by(name, reader, writer, |cluster| hooked(cluster, reader, READER), trouble);
}

fn judge_by(
    name: &str,
    reader: usize,
    writer: usize,
    start: impl FnOnce(&Cluster) -> Child,
    trouble: impl FnOnce(&Cluster),
) {
    let Some(cluster) = Cluster::new(3, "64MiB") else { return };
    std::fs::write(cluster.mount(writer).join("shared"), "00000000").expect("it writes");
    let mut reads = start(&cluster);
    eprintln!("{name}: the reader is on node {reader}");
    let mut line = String::new();
    let mut head = BufReader::with_capacity(1, reads.stdout.take().expect("a pipe"));
    head.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    reads.stdout = Some(head.into_inner());
    let mut writes = hooked(&cluster, writer, WRITER);
    // Pipes hold 64 KiB: both are read while they run.
    let writes = std::thread::spawn(move || printed(&mut writes, "written"));
    let reads = std::thread::spawn(move || printed(&mut reads, "read"));
    std::thread::sleep(Duration::from_secs(2));
    let began = Instant::now();
    trouble(&cluster);
    eprintln!("{name}: the trouble lasted {:?}", began.elapsed());
    let (writes, reads) = (writes.join().expect("it ran"), reads.join().expect("it ran"));
    let mut latest = 0;
    for (seen, at) in &reads {
        let known = writes.partition_point(|(_, when)| when < at);
        let due = if known == 0 { 0 } else { writes[known - 1].0 };
        assert!(*seen >= due, "{name}: read {seen} at {at} although {due} had been written");
        latest = latest.max(*seen);
    }
    eprintln!("{name}: {} writes, {} reads, the last saw {latest}", writes.len(), reads.len());
    let gap = writes.windows(2).map(|w| w[1].1 - w[0].1).max().unwrap_or(0) / 1_000_000;
    eprintln!("{name}: the writer's longest wait was {gap} ms");
    assert!(writes.len() > 50 && latest > 50, "{} writes, saw {latest}", writes.len());
}

#[test]
fn a_member_that_hangs() {
    judge("member-hangs", 3, 1, |cluster| {
        cluster.signal_nicfs(3, Signal::STOP);
        std::thread::sleep(Duration::from_millis(2500));
        cluster.signal_nicfs(3, Signal::CONT);
    });
}

/// The kernel's cache of attributes is no older than the leases.
#[test]
fn a_member_that_hangs_behind_a_mount() {
    let start = |cluster: &Cluster| python(cluster.native(3), LOOKER);
    judge_by("mount", 3, 1, start, |cluster| {
        cluster.signal_nicfs(3, Signal::STOP);
        std::thread::sleep(Duration::from_millis(2500));
        cluster.signal_nicfs(3, Signal::CONT);
    });
}

#[test]
fn a_head_that_hangs() {
    judge("head-hangs", 1, 2, |cluster| {
        cluster.signal_nicfs(1, Signal::STOP);
        std::thread::sleep(Duration::from_millis(2500));
        cluster.signal_nicfs(1, Signal::CONT);
    });
}

#[test]
fn a_head_that_is_killed() {
    judge("head-killed", 1, 2, |cluster| cluster.signal_nicfs(1, Signal::KILL));
}
