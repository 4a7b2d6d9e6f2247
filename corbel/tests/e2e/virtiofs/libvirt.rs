//! As libvirt starts it: by the path of one program, with a socket that listens, in the words of virtiofsd before and since it has
//! long options (`qemuVirtioFSBuildCommandLine` of libvirt).

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ::virtiofs::driver::{Config, Driver};
use frontend::fuse::wire::*;
use rustix::io::{FdFlags, fcntl_setfd};
use zerocopy::FromBytes;

use super::super::harness::{CORBEL, Cluster, Scratch, limited, text};
use super::{ROOT, found, made, read, write};

/// A device by another name, and the guest on it.
struct Started {
    child: Child,
    guest: Driver,
    /// What the device agreed to.
    flags: u64,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program, by the name that libvirt is told.
fn program(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("corbel-virtiofsd");
    std::os::unix::fs::symlink(CORBEL, &path).expect("a link");
    path
}

/// `BINARY --fd=N ARGS`, with the environment that a daemon has.
fn command(program: &Path, listener: &UnixListener, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.arg(format!("--fd={}", listener.as_raw_fd())).args(args).env_clear();
    command.env("CORBEL_TIED_TO", std::process::id().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn start(program: &Path, socket: &Path, args: &[&str]) -> Started {
    let listener = UnixListener::bind(socket).expect("a socket");
    fcntl_setfd(&listener, FdFlags::empty()).expect("it is handed down");
    let child = command(program, &listener, args).spawn().expect("it starts");
    drop(listener);
    let stream = UnixStream::connect(socket).expect("somebody listens");
    let mut guest = Driver::over(stream, Config::default()).expect("a device");
    let init = guest.init().expect("INIT");
    let said = InitOut::read_from_prefix(&init.body).expect("an answer").0;
    Started { child, guest, flags: said.flags.get().into() }
}

/// What it says to a command line by which it does not start.
fn refused(program: &Path, scratch: &Scratch, args: &[&str]) -> Output {
    let socket = scratch.path("refused");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).expect("a socket");
    fcntl_setfd(&listener, FdFlags::empty()).expect("it is handed down");
    let mut with_limit = limited();
    with_limit.arg(program).arg(format!("--fd={}", listener.as_raw_fd())).args(args);
    with_limit.output().expect("it starts")
}

#[test]
fn libvirt_starts_it_by_its_name_in_old_words_and_new_ones() {
    let scratch = Scratch::new();
    let program = program(&scratch);
    std::fs::create_dir(scratch.path("shared")).expect("a directory");
    let shared = scratch.path("shared").display().to_string();
    let asked = limited().arg(&program).arg("--print-capabilities").output();
    let said: serde_json::Value =
        serde_json::from_str(&text(&asked.expect("it starts"))).expect("JSON");
    assert_eq!(said["type"], "fs");
    assert_eq!(said["features"], serde_json::json!(["separate-options"]));
    let packaged = include_str!("../../../../packaging/vhost-user/60-corbel-virtiofsd.json");
    let packaged: serde_json::Value = serde_json::from_str(packaged).expect("JSON");
    assert_eq!((&packaged["type"], &packaged["features"]), (&said["type"], &said["features"]));

    let is_root = rustix::process::geteuid().is_root();
    let sandbox = if is_root { "namespace" } else { "none" };
    let old =
        format!("source={shared},cache=always,sandbox={sandbox},xattr,no_flock,no_posix_lock");
    let uid = format!("--uid-map=:0:{}:1:", rustix::process::geteuid().as_raw());
    let gid = format!("--gid-map=:0:{}:1:", rustix::process::getegid().as_raw());
    let lines = [
        vec!["-o", &old, "--thread-pool-size=2", "-d"],
        vec!["-o", "cache=none", "-o", &old, "-f"],
        vec![
            "--shared-dir",
            &shared,
            "--cache",
            "never",
            "--sandbox",
            sandbox,
            "--xattr",
            "--thread-pool-size=2",
            "--rlimit-nofile=4096",
            "--log-level",
            "debug",
        ],
        // Of a user's session.
        vec!["--shared-dir", &shared, &uid, &gid],
    ];
    for (n, line) in lines.iter().enumerate() {
        let mut device = start(&program, &scratch.path(&format!("s{n}")), line);
        let name = format!("f{n}");
        let file = made(&mut device.guest, ROOT, &name);
        assert_eq!(write(&mut device.guest, file, 0, b"by the guest"), 0, "{line:?}");
        assert_eq!(read(&mut device.guest, file, 3, 100), b"the guest", "{line:?}");
        let there = std::fs::read(scratch.path("shared").join(&name)).expect("it");
        assert_eq!(there, b"by the guest", "{line:?}");
        assert_eq!(device.flags & (init::POSIX_LOCKS | init::FLOCK_LOCKS), 0, "dir has none");
    }
    let source = format!("source={shared}");
    for (wrong, said) in [
        (&["-o", "source=/srv,colour=green"][..], "colour=green"),
        (&["-o", "source=/srv,modcaps=+sys_admin"], "modcaps"),
        (&["-o", "cache=sometimes"], "none, auto, metadata, always"),
        (&["-o", "cache=auto"], "-o source="),
        (&["-o", &source, "--sandbox", "none", "-o", "writeback"], "--writeback"),
        (&["-o", &source, "--sandbox", "none", "-o", "flock"], "keeps no locks"),
        (&["--shared-dir", &shared, "-o", &source], "--shared-dir"),
    ] {
        let output = refused(&program, &scratch, wrong);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {output:?}");
        assert!(error.contains(said) && error.contains("remedy"), "{wrong:?}: {error}");
    }
}

/// A directory in a mount of the volume is the volume's, and so are its locks; a node's socket is all of it.
#[test]
fn a_source_of_libvirt_may_be_a_tenants_directory_of_the_volume() {
    let Some(cluster) = Cluster::new(2, "64MiB") else { return };
    let scratch = Scratch::new();
    let program = program(&scratch);
    std::fs::create_dir_all(cluster.mount(1).join("tenants/one")).expect("a directory");
    let tenant = cluster.mount(2).join("tenants/one").display().to_string();
    let old = format!("source={tenant},sandbox=namespace,flock,posix_lock");
    let socket = format!("source={}", cluster.socket(2).display());
    for (n, line) in
        [vec!["-o", &old], vec!["--shared-dir", &tenant], vec!["-o", &socket]].iter().enumerate()
    {
        let mut device = start(&program, &scratch.path(&format!("s{n}")), line);
        let locks = init::POSIX_LOCKS | init::FLOCK_LOCKS;
        assert_eq!(device.flags & locks, locks, "{line:?}: straight from the node");
        let guest = &mut device.guest;
        let dir = if n < 2 {
            ROOT
        } else {
            let tenants = found(guest, ROOT, "tenants");
            found(guest, tenants, "one")
        };
        let name = format!("f{n}");
        let file = made(guest, dir, &name);
        assert_eq!(write(guest, file, 0, b"by the guest"), 0);
        let there = cluster.mount(1).join("tenants/one").join(&name);
        assert_eq!(std::fs::read(there).expect("it"), b"by the guest", "{line:?}");
    }
    // By a mount that nobody may write to, and by one of a snapshot, which is no directory of the volume: nor is one that was bound elsewhere.
    let node = cluster.socket(2);
    let mut snapshot = limited();
    snapshot.arg(CORBEL).args(["snapshot", "--socket"]).arg(&node).args(["create", "then"]);
    text(&snapshot.output().expect("it starts"));
    let [ro, then, bound] = ["ro", "then", "bound"].map(|name| cluster.path(name));
    // Bound elsewhere, and within the volume, where by its path it would be another directory of that.
    let points = [ro, then, bound, cluster.mount(2).join("other")];
    std::fs::create_dir_all(points[3].join("one")).expect("a directory");
    for (point, option) in points.iter().zip(["ro", "snapshot=then", "", ""]) {
        std::fs::create_dir_all(point).expect("a directory");
        let mut mount = limited();
        if option.is_empty() {
            mount.args(["mount", "--bind"]).arg(cluster.mount(2).join("tenants")).arg(point);
        } else {
            mount.args([CORBEL, "mount"]).arg(&node).arg(point).args(["-o", option]);
        }
        text(&mount.output().expect("it starts"));
    }
    for (point, dir, by_node) in [
        (&points[0], "tenants/one", true),
        (&points[1], "tenants/one", false),
        (&points[2], "one", false),
        (&points[3], "one", false),
    ] {
        let socket = cluster.path("fs").with_extension(point.file_name().expect("a name"));
        let dir = point.join(dir).display().to_string();
        let mut device = start(&program, &socket, &["--shared-dir", &dir]);
        assert_eq!(device.flags & init::POSIX_LOCKS != 0, by_node, "{dir}");
        let guest = &mut device.guest;
        let name = if point == &points[3] { "f1" } else { "f0" };
        found(guest, ROOT, name);
        let name = [name.as_bytes(), b"\0"].concat();
        let gone = guest.call(op::UNLINK, ROOT, &[&name]).expect("a reply").error;
        let is_bound = points[2..].contains(point);
        assert_eq!(gone, if is_bound { 0 } else { -libc::EROFS }, "{dir}");
    }
    for point in &points {
        assert!(limited().arg("umount").arg(point).status().expect("it starts").success());
    }
    cluster.assert_nobody_expelled();
}
