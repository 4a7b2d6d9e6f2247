//! Devices in front of a key-value server, and of a directory with a quota.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ::virtiofs::driver::{Config, Driver};
use frontend::fuse::wire::*;
use zerocopy::{FromBytes, IntoBytes};

use super::super::harness::{Cluster, Scratch, corbel, limited, text, wait_for};
use super::{Device, ROOT, found, fsync, made, made_dir, opened, read, write};

/// A key-value server that ends with its test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// None, and a word, where there is no such program. (Debian's package of tools has the server under another name.)
    fn start(scratch: &Scratch, password: &str) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let file = |name: &str| -> Option<PathBuf> {
            std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
        };
        let names = ["redis-server", "valkey-server", "redis-check-rdb", "valkey-check-rdb"];
        let Some(program) = names.iter().find_map(|name| file(name)) else {
            println!("skipped: no redis-server here (scripts/prepare.sh tools installs it)");
            return None;
        };
        let socket = scratch.path("redis");
        let mut command = Command::new(program);
        command.arg0("redis-server").args(["--port", "0", "--save", "", "--requirepass", password]);
        command.arg("--dir").arg(scratch.path("")).arg("--unixsocket").arg(&socket);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
        let server = Self(child);
        wait_for("the server", Duration::from_secs(60), || {
            std::os::unix::net::UnixStream::connect(&socket).ok()
        });
        Some(server)
    }
}

fn renamed(guest: &mut Driver, (dir, name): (u64, &str), (to, new): (u64, &str)) -> i32 {
    let arg = Rename2In { newdir: to.into(), ..Rename2In::default() };
    let names = format!("{name}\0{new}\0");
    guest.call(op::RENAME2, dir, &[arg.as_bytes(), names.as_bytes()]).expect("a reply").error
}

#[test]
fn a_device_in_front_of_a_key_value_server() {
    let scratch = Scratch::new();
    let Some(_server) = Server::start(&scratch, "secret") else { return };
    let source = format!("{}#vm1", scratch.path("redis").display());
    let login = |name: &str, word: &str| {
        let path = scratch.path(name);
        std::fs::write(&path, word).expect("a file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("one's own");
        path.display().to_string()
    };
    let (right, wrong) = (login("right", "secret\n"), login("wrong", "guess\n"));
    let socket = scratch.path("never").display().to_string();
    for (login, code) in [(&["--login", &wrong][..], 4), (&[], 4)] {
        let args = ["virtiofs", "--backend", "kv", "--source", &source, "--socket-path", &socket];
        let refused = corbel([&args[..], login].concat());
        assert_eq!(refused.status.code(), Some(code), "{login:?}: {refused:?}");
    }
    let args = ["--backend", "kv", "--source", &source, "--login", &right];
    let one = Device::start(scratch.path("one"), &args);
    let two = Device::start(scratch.path("two"), &args);
    let (mut guest, mut other) = (one.guest(Config::default()), two.guest(Config::default()));
    let dir = made_dir(&mut guest, ROOT, "dir");
    let file = made(&mut guest, dir, "file");
    let bytes: Vec<u8> = (0..60_000u32).map(|i| (i % 251) as u8).collect();
    for piece in 0..8 {
        assert_eq!(write(&mut guest, file, piece * 60_000, &bytes), 0);
    }
    assert_eq!(fsync(&mut guest, file), 0);
    // What one did the other sees at once, and the other way round.
    let there = found(&mut other, ROOT, "dir");
    let same = opened(&mut other, there, "file");
    assert_eq!(read(&mut other, same, 420_007, 59_993), bytes[7..]);
    assert_eq!(renamed(&mut other, (there, "file"), (ROOT, "moved")), 0);
    assert_eq!(guest.call(op::LOOKUP, dir, &[b"file\0"]).expect("a reply").error, -libc::ENOENT);
    assert_eq!(found(&mut guest, ROOT, "moved"), file.0);
    assert_eq!(guest.call(op::RMDIR, ROOT, &[b"dir\0"]).expect("a reply").error, 0);
    assert_eq!(write(&mut guest, file, 1, b"changed"), 0);
    assert_eq!(read(&mut other, same, 0, 9), b"\0changed\x08");
    // A file that has no name any more lives while somebody has it open.
    assert_eq!(other.call(op::UNLINK, ROOT, &[b"moved\0"]).expect("a reply").error, 0);
    assert_eq!(read(&mut guest, file, 1, 7), b"changed");
    assert_eq!(guest.call(op::LOOKUP, ROOT, &[b"moved\0"]).expect("a reply").error, -libc::ENOENT);
}

#[test]
fn a_guest_has_the_quota_of_its_directory() {
    let cluster = Cluster::unmounted(2, "128MiB");
    let source = cluster.socket(1).display().to_string();
    let whole = Device::start(cluster.path("whole"), &["--source", &source]);
    let mut host = whole.guest(Config::default());
    let tenants = made_dir(&mut host, ROOT, "tenants");
    let one = made_dir(&mut host, tenants, "one");
    let sync = FsyncIn::default();
    let opened = host.call(op::OPENDIR, one, &[OpenIn::default().as_bytes()]).expect("a reply");
    let fh = OpenOut::read_from_prefix(&opened.body).expect("a handle").0.fh;
    let sync = FsyncIn { fh, ..sync };
    assert_eq!(host.call(op::FSYNCDIR, one, &[sync.as_bytes()]).expect("a reply").error, 0);
    let quota = |args: &[&str]| {
        let mut command = limited();
        command.arg(super::CORBEL).args(["--json", "quota", "--socket"]).arg(cluster.socket(2));
        text(&command.args(args).output().expect("corbel starts"));
    };
    quota(&["set", "--dir", "/tenants/one", "--bytes", "1MiB", "--inodes", "8"]);
    let args = ["--source", &source, "--shared-dir", "/tenants/one"];
    let device = Device::start(cluster.path("one"), &args);
    let mut guest = device.guest(Config::default());
    let statfs = |guest: &mut Driver| {
        let reply = guest.call(op::STATFS, ROOT, &[]).expect("a reply");
        assert_eq!(reply.error, 0);
        let said = StatfsOut::read_from_prefix(&reply.body).expect("figures").0;
        let bytes = |blocks: u64| blocks * u64::from(said.frsize.get());
        (bytes(said.blocks.get()), bytes(said.bavail.get()), said.files.get(), said.ffree.get())
    };
    assert_eq!(statfs(&mut guest), (1 << 20, 1 << 20, 8, 7), "the directory is one of its inodes");
    // As the guest's root: space, then names.
    let file = made(&mut guest, ROOT, "file");
    let piece = vec![7; 32 << 10];
    let mut at = 0;
    let error = loop {
        let (wrote, synced) = (write(&mut guest, file, at, &piece), fsync(&mut guest, file));
        match (wrote, synced) {
            (0, 0) => at += piece.len() as u64,
            (0, error) | (error, _) => break error,
        }
        assert!(at <= 1 << 20, "more than the quota");
    };
    assert_eq!((error, at), (-libc::EDQUOT, 1 << 20));
    assert_eq!(statfs(&mut guest).1, 0);
    let mut names = 0;
    let error = loop {
        let name = format!("name-{names}\0");
        let arg = MkdirIn { mode: 0o755.into(), ..MkdirIn::default() };
        let made = guest.call(op::MKDIR, ROOT, &[arg.as_bytes(), name.as_bytes()]);
        match made.expect("a reply").error {
            0 => names += 1,
            error => break error,
        }
        assert!(names < 8, "more than the quota");
    };
    assert_eq!((error, names), (-libc::EDQUOT, 6));
    assert_eq!(statfs(&mut guest).3, 0);
    // What is beside the directory is not counted, and what is given back can be had again.
    let beside = made(&mut host, tenants, "beside");
    assert_eq!(write(&mut host, beside, 0, &piece), 0);
    assert_eq!(fsync(&mut host, beside), 0);
    let shorter = SetattrIn { valid: fattr::SIZE.into(), ..SetattrIn::default() };
    assert_eq!(guest.call(op::SETATTR, file.0, &[shorter.as_bytes()]).expect("a reply").error, 0);
    assert_eq!(write(&mut guest, file, 0, &piece), 0);
    assert_eq!(fsync(&mut guest, file), 0);
    quota(&["clear", "--dir", "/tenants/one"]);
    wait_for("no quota", Duration::from_secs(20), || (statfs(&mut guest).2 > 8).then_some(()));
    assert_eq!(write(&mut guest, file, 1 << 20, &piece), 0);
    cluster.assert_nobody_expelled();
}
