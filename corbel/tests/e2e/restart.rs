//! nicfs of a single node is killed under programs that never fsync: they go on, and everything is
//! there.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::harness::{Cluster, signal, wait_for};

/// A Python program under the library.
fn python(cluster: &Cluster, program: &str) -> Child {
    let mut command = cluster.hooked(1, &[]);
    command.args(["python3", "-u", "-c", program]).stdout(Stdio::piped());
    command.spawn().expect("a program")
}

fn clients(cluster: &Cluster) -> usize {
    cluster.status(1)["clients"].as_array().map_or(0, Vec::len)
}

/// The numbers that a program prints, as they come.
fn numbers(child: &mut Child) -> impl Iterator<Item = u32> {
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    lines.map_while(Result::ok).filter_map(|line| line.parse().ok())
}

const WRITER: &str = "import os, time
fd = os.open('numbers', os.O_RDWR | os.O_CREAT)
temp = os.open('temp', os.O_RDWR | os.O_CREAT); os.write(temp, b'nameless'); os.unlink('temp')
for i in range(COUNT):
    os.write(fd, b'%d\\n' % i)
    if i % 10 == 0:
        one = os.open('one%d' % i, os.O_WRONLY | os.O_CREAT); os.write(one, b'%d' % i); os.close(one)
        assert os.pread(temp, 100, 0) == b'nameless'
    print(i)
    time.sleep(0.004)
";

#[test]
fn a_program_goes_on_while_nicfs_is_killed_again_and_again() {
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let program = WRITER.replace("COUNT", "600");
    let mut child = python(&cluster, &program);
    for n in numbers(&mut child) {
        if n == 100 || n == 250 || n == 400 {
            cluster.restart_nicfs(1);
        }
    }
    assert!(child.wait().expect("a child").success());
    let wanted: String = (0..600).map(|i| format!("{i}\n")).collect();
    let found = fs::read_to_string(cluster.mount(1).join("numbers")).expect("a file");
    assert!(found == wanted, "{} of {} bytes", found.len(), wanted.len());
    for i in (0..600).step_by(10) {
        let one = fs::read_to_string(cluster.mount(1).join(format!("one{i}"))).expect("a file");
        assert_eq!(one, i.to_string());
    }
    assert!(!cluster.mount(1).join("temp").exists());
    cluster.assert_nothing_refused();
}

#[test]
fn what_a_killed_program_wrote_is_there_after_a_restart() {
    let Some(cluster) = Cluster::new(1, "256MiB") else { return };
    let program = WRITER.replace("COUNT", "100000");
    let mut child = python(&cluster, &program);
    let mut last = 0;
    for n in numbers(&mut child) {
        last = n;
        if n == 200 {
            cluster.restart_nicfs(1);
        }
        if n == 300 {
            break;
        }
    }
    let before = clients(&cluster);
    // `timeout` passes it on; whatever the program printed it had written.
    let pids =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).expect("proc");
    for pid in pids.split_whitespace().filter_map(|p| p.parse().ok()) {
        signal(Pid::from_raw(pid).expect("a process"), Signal::KILL);
    }
    cluster.restart_nicfs(1);
    assert!(!child.wait().expect("a child").success());
    let found = fs::read_to_string(cluster.mount(1).join("numbers")).expect("a file");
    let wanted: String = (0..=last).map(|i| format!("{i}\n")).collect();
    assert!(found.starts_with(&wanted), "{} of {} bytes", found.len(), wanted.len());
    wait_for("a list without the dead program", Duration::from_secs(20), || {
        (clients(&cluster) < before).then_some(())
    });
}
