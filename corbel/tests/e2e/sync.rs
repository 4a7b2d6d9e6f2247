//! fsync is for the file, whoever has written to it: databases have processes that sync what others have written. What these have lost it
//! says.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use super::harness::{Cluster, wait_for};

/// Does what each line says, and says so.
const PROGRAM: &str = "import errno, os, sys
data, made = os.open('shared', os.O_RDWR), os.open('dir', os.O_RDONLY)
os.pread(data, 1, 0), os.listdir('dir')
print('ready')
for line in sys.stdin:
    what = line.strip()
    if what == 'write': os.pwrite(data, b'y' * 300000, 0)
    elif what == 'make': os.close(os.open('dir/new', os.O_CREAT | os.O_WRONLY))
    try:
        if what == 'sync': os.fsync(data)
        elif what == 'sync dir': os.fsync(made)
    except OSError as error:
        what += ': ' + errno.errorcode[error.errno]
    print(what)
";

struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(mut command: Command) -> Self {
        command.args(["python3", "-u", "-c", PROGRAM]).stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("a program");
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut program = Self { child, input, output: BufReader::new(output) };
        program.says("ready");
        program
    }

    fn says(&mut self, what: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), what);
    }

    fn does(&mut self, what: &str) {
        self.fails(what, what);
    }

    /// Does it, and says what came of it.
    fn fails(&mut self, what: &str, says: &str) {
        writeln!(self.input, "{what}").expect("it listens");
        self.says(says);
    }

    fn ends(mut self) {
        drop(self.input);
        assert!(self.child.wait().expect("a child").success());
    }
}

/// One program does something, another one of the same node syncs it, while a replica takes nothing: when it has come back
/// that replica is not one any more.
fn is_synced(what: &str, sync: &str, other: impl Fn(&Cluster) -> Command) {
    let Some(cluster) = Cluster::new(3, "64MiB") else { return };
    let made = cluster.shell(1, "mkdir dir && echo x > shared && sync shared dir").status();
    assert!(made.expect("bash").success());
    let mut doer = Program::start(cluster.hooked(1, &[]));
    let mut syncer = Program::start(other(&cluster));
    // Whoever syncs has nothing of its own that is not.
    syncer.does(sync);
    cluster.signal_nicfs(3, Signal::STOP);
    doer.does(what);
    syncer.does(sync);
    let chain = cluster.status(1)["chain"].clone();
    cluster.signal_nicfs(3, Signal::CONT);
    assert_eq!(chain, serde_json::json!([1, 2]), "{sync} after {what} has not waited");
    doer.ends();
    syncer.ends();
}

/// A node is silent for so long that the others go on without it, while one of its programs writes and syncs nothing: another one that only
/// syncs the file is told, once, and of that file alone.
fn is_told(other: impl Fn(&Cluster) -> Command) {
    let Some(cluster) = Cluster::new(3, "64MiB") else { return };
    let made = cluster.shell(2, "mkdir dir && echo x > shared && sync shared dir").status();
    assert!(made.expect("bash").success());
    let mut writer = Program::start(cluster.hooked(2, &[]));
    let mut syncer = Program::start(other(&cluster));
    syncer.does("sync");
    // That it may is known, so that nobody need be asked.
    writer.does("write");
    syncer.does("sync");
    writer.does("write");
    writer.does("sync");
    cluster.signal_nicfs(2, Signal::STOP);
    writer.does("write");
    wait_for("a chain without it", Duration::from_secs(60), || {
        (cluster.status(1)["chain"] == serde_json::json!([1, 3])).then_some(())
    });
    cluster.signal_nicfs(2, Signal::CONT);
    syncer.fails("sync", "sync: EIO");
    syncer.does("sync");
    syncer.does("sync dir");
    writer.fails("sync", "sync: EIO");
    writer.does("write");
    writer.does("sync");
    syncer.does("sync");
    writer.ends();
    syncer.ends();
}

#[test]
fn what_one_process_loses_another_one_is_told() {
    is_told(|cluster| cluster.hooked(2, &[]));
}

#[test]
fn what_a_process_loses_who_uses_the_mount_is_told() {
    is_told(|cluster| cluster.native(2));
}

#[test]
fn what_one_process_writes_another_one_syncs() {
    is_synced("write", "sync", |cluster| cluster.hooked(1, &[]));
}

#[test]
fn what_a_process_writes_is_synced_by_who_uses_the_mount() {
    is_synced("write", "sync", |cluster| cluster.native(1));
}

#[test]
fn names_that_one_process_gives_another_one_syncs() {
    is_synced("make", "sync dir", |cluster| cluster.hooked(1, &[]));
    is_synced("make", "sync dir", |cluster| cluster.native(1));
}
