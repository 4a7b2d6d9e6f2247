//! A machine that is overloaded: slow, and nothing worse.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;

use super::harness::{Cluster, signal, text};

/// Programs that want the whole processor, each in a session of its own: the kernel shares out between sessions first.
struct Busy(Vec<Child>);

impl Busy {
    fn new(count: usize) -> Self {
        let start = |_| {
            let mut command = Command::new("setsid");
            command.args(["timeout", "300", "bash", "-c", "while :; do :; done"]);
            command.stdin(Stdio::null()).spawn().expect("setsid and bash are installed")
        };
        Self((0..count).map(start).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // `timeout` passes it on.
            if let Ok(pid) = i32::try_from(child.id()) {
                Pid::from_raw(pid).into_iter().for_each(|pid| signal(pid, Signal::TERM));
            }
            let _ = child.wait();
        }
    }
}

/// The test, what it starts, and the load have one processor; the other tests have the rest.
fn on_one_processor() {
    let mut one = rustix::thread::sched_getaffinity(None).expect("a set");
    let first = (0..CpuSet::MAX_CPU).find(|cpu| one.is_set(*cpu)).expect("a processor");
    one.clear();
    one.set(first);
    rustix::thread::sched_setaffinity(None, &one).expect("a processor of the set");
}

/// Nobody is killed for being late, nobody is dropped, and every fsync says that all is well.
#[test]
fn a_node_that_gets_little_of_the_processor_is_slow_and_not_dead() {
    on_one_processor();
    let Some(cluster) = Cluster::new(3, "512MiB") else { return };
    let epoch = |node: usize| cluster.status(node)["epoch"].as_u64();
    let before: Vec<_> = (1..=3).map(epoch).collect();
    let busy = Busy::new(8);
    let program = "import os, time
end = time.monotonic() + 15; data = os.urandom(1 << 20); rounds = 0
fd = os.open('f%s' % os.path.basename(os.path.dirname(os.getcwd())), os.O_CREAT | os.O_WRONLY)
while time.monotonic() < end or rounds < 1:
    for n in range(24): assert os.pwrite(fd, data, n << 20) == 1 << 20
    os.fsync(fd); rounds += 1
print('synced', rounds > 0)";
    let begin = Instant::now();
    let writers: Vec<_> = (1..=3)
        .map(|node| {
            let mut command = cluster.native(node);
            command.args(["python3", "-c", program]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a writer")
        })
        .collect();
    let said: Vec<_> = writers.into_iter().map(|w| text(&w.wait_with_output().unwrap())).collect();
    drop(busy);
    assert_eq!(said, ["synced True\n"; 3]);
    assert!(begin.elapsed() >= Duration::from_secs(15));
    for node in 1..=3 {
        let log = cluster.log(node);
        for word in ["is stuck in its copies", "does not acknowledge", "does not answer"] {
            let lines: Vec<_> = log.lines().filter(|line| line.contains(word)).collect();
            assert!(lines.is_empty(), "node {node}: {lines:#?}");
        }
    }
    assert_eq!((1..=3).map(epoch).collect::<Vec<_>>(), before, "nobody was dropped");
    cluster.assert_nobody_expelled();
}
