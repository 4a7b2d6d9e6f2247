//! `corbel virtiofs --backend nfs` as a process, in front of NFS-Ganesha, driven without a virtual machine.

#[path = "../../../nfs/tests/common/mod.rs"]
mod ganesha;

use std::time::Duration;

use ::virtiofs::driver::{Config, Driver};
use frontend::fuse::wire::*;
use ganesha::Server;
use zerocopy::{FromBytes, IntoBytes};

use super::harness::{Scratch, corbel, wait_for};
use super::virtiofs::{Device, ROOT, made, read, write};

fn lookup(guest: &mut Driver, name: &[u8]) -> std::result::Result<u64, i32> {
    let reply = guest.call(op::LOOKUP, ROOT, &[name, b"\0"]).expect("a reply");
    if reply.error != 0 {
        return Err(reply.error);
    }
    Ok(EntryOut::read_from_prefix(&reply.body).expect("an entry").0.nodeid.get())
}

fn lock(guest: &mut Driver, (node, fh): (u64, u64), owner: u64, kind: u32) -> i32 {
    let lk = FileLock { start: 0.into(), end: 99.into(), kind: kind.into(), pid: 7.into() };
    let arg = LkIn { fh: fh.into(), owner: owner.into(), lk, ..LkIn::default() };
    guest.call(op::SETLK, node, &[arg.as_bytes()]).expect("a reply").error
}

fn sync(guest: &mut Driver, (node, fh): (u64, u64)) -> i32 {
    let arg = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
    guest.call(op::FSYNC, node, &[arg.as_bytes()]).expect("a reply").error
}

fn guests_of_an_export(version: u32) {
    let Some(mut server) = Server::start() else { return };
    drop(server.open(version));
    let scratch = Scratch::new();
    std::fs::create_dir(server.files().join("one")).expect("a directory");
    std::os::unix::fs::chown(server.files().join("one"), Some(100_000), Some(100_000))
        .expect("root");
    let source = server.url(version);
    let source = format!("{source}?version={version}&timeout=30");
    let state = scratch.path("state").display().to_string();
    let rule = "map:0:100000:65536";
    let args = [
        "--backend",
        "nfs",
        "--source",
        &source,
        "--shared-dir",
        "/one",
        "--translate-uid",
        rule,
        "--translate-gid",
        rule,
    ];
    let mut device = Device::start(scratch.path("a"), &[&args[..], &["--state", &state]].concat());
    let second = Device::start(scratch.path("b"), &args);
    let mut guest = device.guest(Config { queues: 2, ..Config::default() });
    let mut other = second.guest(Config { queues: 2, ..Config::default() });
    let file = made(&mut guest, ROOT, "file");
    assert_eq!(device.unfiltered(), [""; 0]);
    let bytes: Vec<u8> = (0..60_000u32).map(|i| (i % 249) as u8).collect();
    assert_eq!((write(&mut guest, file, 0, &bytes), sync(&mut guest, file)), (0, 0));
    // On the server, at its place, as a user of the host.
    let there = server.files().join("one/file");
    assert_eq!(std::fs::read(&there).expect("it"), bytes);
    let meta = std::fs::metadata(&there).expect("it");
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), 100_000);
    // Nothing above its directory.
    let up = guest.call(op::LOOKUP, ROOT, &[b"..\0"]).expect("a reply");
    let above = || EntryOut::read_from_prefix(&up.body).expect("an entry").0.nodeid.get();
    assert!(up.error != 0 || above() == ROOT);
    // Locks hold between guests.
    let node = lookup(&mut other, b"file").expect("a name");
    let open = OpenIn { flags: 2.into(), ..OpenIn::default() };
    let opened = other.call(op::OPEN, node, &[open.as_bytes()]).expect("a reply");
    let theirs = (node, OpenOut::read_from_prefix(&opened.body).expect("a handle").0.fh.get());
    assert_eq!(lock(&mut guest, file, 1, F_WRLCK), 0);
    assert_eq!(lock(&mut other, theirs, 1, F_RDLCK), -11);
    assert_eq!(lock(&mut guest, file, 1, F_UNLCK), 0);
    assert_eq!(lock(&mut other, theirs, 1, F_WRLCK), 0);
    // What is open stays, also where the device is killed and comes again: it has lost what it knew, and finds its files.
    let open = made(&mut guest, ROOT, "gone");
    assert_eq!(write(&mut guest, open, 0, b"still here"), 0);
    assert_eq!(guest.call(op::UNLINK, ROOT, &[b"gone\0"]).expect("a reply").error, 0);
    device.replace(&mut guest);
    assert_eq!(read(&mut guest, open, 0, 100), b"still here");
    assert_eq!(read(&mut guest, file, 0, 10), bytes[..10]);
    assert_eq!(lookup(&mut guest, b"gone"), Err(-2));
    let release = ReleaseIn { fh: open.1.into(), ..ReleaseIn::default() };
    assert_eq!(guest.call(op::RELEASE, open.0, &[release.as_bytes()]).expect("a reply").error, 0);
    wait_for("the name that kept it", Duration::from_secs(30), || {
        (std::fs::read_dir(server.files().join("one")).expect("it").count() == 1).then_some(())
    });
    // A server that begins anew is a pause: the device connects again, behind its filter of system calls.
    server.kill();
    server.again_with_grace();
    assert_eq!((write(&mut guest, file, 5, b"anew"), sync(&mut guest, file)), (0, 0));
    assert_eq!(read(&mut other, theirs, 5, 4), b"anew");
    // And the lock is had again.
    wait_for("the lock", Duration::from_secs(30), || {
        (lock(&mut guest, file, 1, F_RDLCK) == -11).then_some(())
    });
    guest.hang_up();
    other.hang_up();
}

#[test]
fn guests_of_an_export_of_version_3() {
    ganesha::apart(|| guests_of_an_export(3));
}

#[test]
fn guests_of_an_export_of_version_4() {
    ganesha::apart(|| guests_of_an_export(4));
}

#[test]
fn what_is_wrong_with_an_export_is_said() {
    for (wrong, code, says) in [
        (&["--backend", "nfs"][..], 2, "--source nfs://HOST/EXPORT is missing"),
        (&["--backend", "nfs", "--source", "server:/srv"], 2, "nfs://HOST"),
        (&["--backend", "nfs", "--source", "nfs://server/srv?version=2"], 2, "version is 3 or 4"),
        (
            &[
                "--backend",
                "nfs",
                "--source",
                "nfs://127.0.0.1:1/srv?version=4&timeout=1",
                "--sandbox",
                "namespace",
            ],
            2,
            "--sandbox",
        ),
        (&["--backend", "nfs", "--source", "nfs://127.0.0.1:1/srv?version=4&timeout=1"], 0, ""),
    ] {
        let args = ["virtiofs", "--seccomp", "none", "--socket-path", "/dev/shm/corbel-never"];
        let refused = corbel(args.iter().chain(wrong));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains(says), "{wrong:?}: {said}");
        if code != 0 {
            assert_eq!(refused.status.code(), Some(code), "{wrong:?}: {said}");
            continue;
        }
        // Nobody there, or nothing to ask him with: both say what to do.
        assert!(!refused.status.success());
        assert!(said.contains("127.0.0.1") || said.contains("apt install libnfs13"), "{said}");
    }
    let _ = std::fs::remove_file("/dev/shm/corbel-never");
}
