//! `corbel virtiofs` as a process, in front of a volume and of a directory, driven without a virtual machine.

mod backends;
mod head;
mod libvirt;
mod remote;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ::virtiofs::driver::{Config, Driver};
use frontend::fuse::wire::*;
use zerocopy::{FromBytes, IntoBytes};

use super::harness::{CORBEL, Cluster, Scratch, corbel, json, may_mount, text, wait_for};

pub const ROOT: u64 = 1;

/// A device that ends with its test.
pub struct Device {
    child: Child,
    socket: PathBuf,
    args: Vec<String>,
}

impl Device {
    pub fn start(socket: PathBuf, args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self { child: Self::spawn(&socket, &args), socket, args }
    }

    /// Its threads that may call the kernel as they like.
    pub fn unfiltered(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("threads");
        let status =
            tasks.map(|task| std::fs::read_to_string(task.expect("one").path().join("status")));
        // (One that ends meanwhile has none.)
        status.flatten().filter(|status| !status.contains("\nSeccomp:\t2\n")).collect()
    }

    fn spawn(socket: &Path, args: &[String]) -> Child {
        let mut command = Command::new(CORBEL);
        command.arg("virtiofs").args(args).arg("--socket-path").arg(socket);
        command.env("CORBEL_TIED_TO", std::process::id().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("corbel starts")
    }

    fn connect(&self) -> std::os::unix::net::UnixStream {
        wait_for("the device", Duration::from_secs(60), || {
            std::os::unix::net::UnixStream::connect(&self.socket).ok()
        })
    }

    pub fn guest(&self, config: Config) -> Driver {
        let mut guest = Driver::over(self.connect(), config).expect("a device");
        guest.init().expect("INIT");
        guest
    }

    /// kill -9, and another one in its place.
    pub fn replace(&mut self, guest: &mut Driver) {
        self.kill();
        self.start_again(guest);
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn start_again(&mut self, guest: &mut Driver) {
        self.child = Self::spawn(&self.socket, &self.args);
        guest.reconnect(self.connect()).expect("the device goes on");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn made(guest: &mut Driver, dir: u64, name: &str) -> (u64, u64) {
    let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
    let name = format!("{name}\0");
    let reply = guest.call(op::CREATE, dir, &[arg.as_bytes(), name.as_bytes()]).expect("a reply");
    assert_eq!(reply.error, 0);
    let (entry, rest) = EntryOut::read_from_prefix(&reply.body).expect("an entry");
    (entry.nodeid.get(), OpenOut::read_from_prefix(rest).expect("a handle").0.fh.get())
}

pub fn fsync(guest: &mut Driver, (node, fh): (u64, u64)) -> i32 {
    let sync = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
    guest.call(op::FSYNC, node, &[sync.as_bytes()]).expect("a reply").error
}

/// The inode behind a name.
pub fn found(guest: &mut Driver, dir: u64, name: &str) -> u64 {
    let name = format!("{name}\0");
    let reply = guest.call(op::LOOKUP, dir, &[name.as_bytes()]).expect("a reply");
    assert_eq!(reply.error, 0, "{name}");
    EntryOut::read_from_prefix(&reply.body).expect("an entry").0.nodeid.get()
}

pub fn opened(guest: &mut Driver, dir: u64, name: &str) -> (u64, u64) {
    let node = found(guest, dir, name);
    let open = OpenIn { flags: 2.into(), ..OpenIn::default() };
    let reply = guest.call(op::OPEN, node, &[open.as_bytes()]).expect("a reply");
    assert_eq!(reply.error, 0, "{name}");
    (node, OpenOut::read_from_prefix(&reply.body).expect("a handle").0.fh.get())
}

pub fn made_dir(guest: &mut Driver, dir: u64, name: &str) -> u64 {
    let arg = MkdirIn { mode: 0o777.into(), ..MkdirIn::default() };
    let name = format!("{name}\0");
    let reply = guest.call(op::MKDIR, dir, &[arg.as_bytes(), name.as_bytes()]).expect("a reply");
    assert_eq!(reply.error, 0, "{name}");
    EntryOut::read_from_prefix(&reply.body).expect("an entry").0.nodeid.get()
}

pub fn write(guest: &mut Driver, (node, fh): (u64, u64), at: u64, data: &[u8]) -> i32 {
    let size = u32::try_from(data.len()).expect("short");
    let arg = WriteIn { fh: fh.into(), offset: at.into(), size: size.into(), ..WriteIn::default() };
    guest.call_on(1, op::WRITE, node, &[arg.as_bytes()], data, 0).expect("a reply").error
}

pub fn read(guest: &mut Driver, (node, fh): (u64, u64), at: u64, len: usize) -> Vec<u8> {
    let size = u32::try_from(len).expect("short");
    let arg = ReadIn { fh: fh.into(), offset: at.into(), size: size.into(), ..ReadIn::default() };
    let reply = guest.call_on(1, op::READ, node, &[arg.as_bytes()], &[], len).expect("a reply");
    assert_eq!(reply.error, 0);
    reply.body
}

fn lock(guest: &mut Driver, (node, fh): (u64, u64), opcode: u32, owner: u64, kind: u32) -> Vec<u8> {
    let lk = FileLock { start: 0.into(), end: 99.into(), kind: kind.into(), pid: 7.into() };
    let arg = LkIn { fh: fh.into(), owner: owner.into(), lk, ..LkIn::default() };
    guest.request(opcode, node, &[arg.as_bytes()], 0)
}

#[test]
fn a_tenant_has_its_directory_of_the_volume_and_nothing_else() {
    let Some(cluster) = Cluster::new(3, "128MiB") else { return };
    let mount = cluster.mount(1);
    std::fs::create_dir_all(mount.join("tenants/one")).expect("a directory");
    std::fs::write(mount.join("secret"), "secret").expect("a file");
    let secret =
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(mount.join("secret")).expect("it"));
    let (source, state) =
        (cluster.socket(1).display().to_string(), cluster.path("state").display().to_string());
    let rule = "map:0:100000:65536";
    let mut device = Device::start(
        cluster.path("fs.sock"),
        &[
            "--source",
            &source,
            "--shared-dir",
            "/tenants/one",
            "--state",
            &state,
            "--iops",
            "1000000",
            "--translate-uid",
            rule,
            "--translate-gid",
            rule,
        ],
    );
    std::os::unix::fs::chown(mount.join("tenants/one"), Some(100_000), Some(100_000))
        .expect("root");
    let mut guest = device.guest(Config { queues: 2, ..Config::default() });
    let file = made(&mut guest, ROOT, "file");
    let bytes: Vec<u8> = (0..60_000u32).map(|i| (i % 249) as u8).collect();
    assert_eq!(write(&mut guest, file, 0, &bytes), 0);
    let sync = FsyncIn { fh: file.1.into(), ..FsyncIn::default() };
    assert_eq!(guest.call(op::FSYNC, file.0, &[sync.as_bytes()]).expect("a reply").error, 0);
    // On another node, at its place, and as a user of the host.
    let there = cluster.mount(2).join("tenants/one/file");
    assert_eq!(std::fs::read(&there).expect("it"), bytes);
    let meta = std::fs::metadata(&there).expect("it");
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), 100_000);
    // What another node changes, the guest sees.
    std::fs::write(&there, "changed").expect("a write");
    assert_eq!(read(&mut guest, file, 0, 100), b"changed");
    // Nothing else: by number, by a name that a mount has, upwards.
    for (opcode, node, arg) in [
        (op::GETATTR, secret, GetattrIn::default().as_bytes().to_vec()),
        (op::OPEN, secret, OpenIn::default().as_bytes().to_vec()),
        (op::LOOKUP, ROOT, b"..\0".to_vec()),
        (op::LOOKUP, ROOT, b".corbel\0".to_vec()),
        (op::LOOKUP, 1 << 63 | 2, format!("{secret}\0").into_bytes()),
    ] {
        let reply = guest.call(opcode, node, &[&arg]).expect("a reply");
        assert!([-116, -2].contains(&reply.error), "opcode {opcode}: {}", reply.error);
    }
    // Requests that wait for a lock hold no thread: there are more of them than threads, and the queue goes on.
    let held = lock(&mut guest, file, op::SETLK, 1, F_WRLCK);
    let q = &mut guest.queues[1];
    let head = q.prepare(0, &held, &[], 4096, 0);
    q.offer(head);
    q.notify();
    q.wait().expect("the lock");
    for slot in 1..7 {
        let request = lock(&mut guest, file, op::SETLKW, slot as u64 + 10, F_WRLCK);
        let q = &mut guest.queues[1];
        let head = q.prepare(slot, &request, &[], 4096, 0);
        q.offer(head);
        q.notify();
    }
    assert_eq!(read(&mut guest, file, 0, 4), b"chan");
    let free = lock(&mut guest, file, op::SETLK, 1, F_UNLCK);
    let q = &mut guest.queues[1];
    let head = q.prepare(0, &free, &[], 4096, 0);
    q.offer(head);
    q.notify();
    // The one that unlocks and the one that gets it; no other one.
    for _ in 0..2 {
        q.wait().expect("an answer");
    }
    assert_eq!(q.wait_for(Duration::from_millis(200)).expect("a wait"), None);
    drop(guest);
    // A new guest, whose device is killed under it.
    let mut guest = device.guest(Config::default());
    let file = made(&mut guest, ROOT, "kept");
    assert_eq!(write(&mut guest, file, 0, b"before"), 0);
    let sync = FsyncIn { fh: file.1.into(), ..FsyncIn::default() };
    assert_eq!(guest.call(op::FSYNC, file.0, &[sync.as_bytes()]).expect("a reply").error, 0);
    device.replace(&mut guest);
    assert_eq!(write(&mut guest, file, 6, b" and after"), 0);
    assert_eq!(read(&mut guest, file, 0, 100), b"before and after");
    // The node's service ends and comes back: a pause.
    cluster.restart_nicfs(1);
    assert_eq!(read(&mut guest, file, 0, 6), b"before");
    assert_eq!(write(&mut guest, file, 0, b"BEFORE"), 0);
    cluster.assert_nobody_expelled();
}

/// A request on queue 1, which may have no answer for long.
fn ask(guest: &mut Driver, slot: usize, request: &[u8]) {
    let q = &mut guest.queues[1];
    let head = q.prepare(slot, request, &[], 4096, 0);
    q.offer(head);
    q.notify();
}

/// The error of the only answer that is there, or comes soon.
fn answer(guest: &mut Driver) -> Option<i32> {
    let (head, written) = guest.queues[1].wait_for(Duration::from_millis(300)).expect("a wait")?;
    let slot = guest.queues[1].slot_of(head);
    Some(guest.reply(1, slot, written, 4096).expect("a reply").error)
}

fn asked(guest: &mut Driver, request: &[u8]) -> Option<i32> {
    ask(guest, 0, request);
    answer(guest)
}

/// Nobody gets what a guest has locked while its device is dead and started again, and what it has open without a name is there
/// afterwards.
#[test]
fn a_device_that_is_killed_loses_no_lock_and_no_file_without_a_name() {
    let Some(cluster) = Cluster::new(2, "128MiB") else { return };
    cluster.mount(1);
    let state = cluster.path("state").display().to_string();
    let (one, two) =
        (cluster.socket(1).display().to_string(), cluster.socket(2).display().to_string());
    let mut device =
        Device::start(cluster.path("one.sock"), &["--source", &one, "--state", &state]);
    let other = Device::start(cluster.path("two.sock"), &["--source", &two]);
    let mut guest = device.guest(Config { queues: 2, ..Config::default() });
    let mut rival = other.guest(Config { queues: 2, ..Config::default() });
    let file = made(&mut guest, ROOT, "locked");
    let sync = FsyncIn { fh: file.1.into(), ..FsyncIn::default() };
    assert_eq!(guest.call(op::FSYNC, file.0, &[sync.as_bytes()]).expect("a reply").error, 0);
    let found = rival.call(op::LOOKUP, ROOT, &[b"locked\0"]).expect("a reply");
    let node = EntryOut::read_from_prefix(&found.body).expect("an entry").0.nodeid.get();
    let open = OpenIn { flags: 2.into(), ..OpenIn::default() };
    let opened = rival.call(op::OPEN, node, &[open.as_bytes()]).expect("a reply");
    let same = (node, OpenOut::read_from_prefix(&opened.body).expect("a handle").0.fh.get());
    // One that lost its name, one that never had any.
    let gone = made(&mut guest, ROOT, "gone");
    assert_eq!(write(&mut guest, gone, 0, b"no name"), 0);
    assert_eq!(guest.call(op::UNLINK, ROOT, &[b"gone\0"]).expect("a reply").error, 0);
    let arg = CreateIn { flags: 2.into(), mode: 0o600.into(), ..CreateIn::default() };
    let reply = guest.call(op::TMPFILE, ROOT, &[arg.as_bytes(), b"/\0"]).expect("a reply");
    assert_eq!(reply.error, 0);
    let (entry, rest) = EntryOut::read_from_prefix(&reply.body).expect("an entry");
    let never = (entry.nodeid.get(), OpenOut::read_from_prefix(rest).expect("one").0.fh.get());
    assert_eq!(write(&mut guest, never, 0, b"never had one"), 0);
    for (node, fh) in [gone, never] {
        let sync = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
        assert_eq!(guest.call(op::FSYNC, node, &[sync.as_bytes()]).expect("a reply").error, 0);
    }
    let of_guest = lock(&mut guest, file, op::SETLK, 1, F_WRLCK);
    assert_eq!(asked(&mut guest, &of_guest), Some(0));
    // Somebody waits for it all the time.
    let waits = lock(&mut rival, same, op::SETLKW, 2, F_WRLCK);
    ask(&mut rival, 1, &waits);
    for round in 0..3 {
        device.kill();
        assert_eq!(answer(&mut rival), None, "round {round}: nobody has given it up");
        device.start_again(&mut guest);
        assert_eq!(read(&mut guest, gone, 0, 100), b"no name", "round {round}");
        assert_eq!(read(&mut guest, never, 0, 100), b"never had one", "round {round}");
        assert_eq!(write(&mut guest, gone, 0, b"no NAME"), 0);
        assert_eq!(write(&mut guest, gone, 0, b"no name"), 0);
        assert_eq!(answer(&mut rival), None, "round {round}: the guest has it still");
        assert_eq!(asked(&mut guest, &of_guest), Some(0), "round {round}: it is its own");
    }
    // It is the guest's to give back.
    let free = lock(&mut guest, file, op::SETLK, 1, F_UNLCK);
    assert_eq!(asked(&mut guest, &free), Some(0));
    assert_eq!(answer(&mut rival), Some(0));
    assert_eq!(asked(&mut guest, &of_guest), Some(-libc::EAGAIN));
    cluster.assert_nobody_expelled();
}

/// A guest moves between devices of two nodes, to and fro, while others wait for what it has locked and it waits for what they have. Nobody
/// gets its locks in between, it gets what it waits for where it is by then, and when the move fails in the end, it goes on where it was.
#[test]
fn a_guest_that_moves_keeps_its_locks() {
    let Some(cluster) = Cluster::new(3, "128MiB") else { return };
    cluster.mount(1);
    let key = cluster.path("key");
    std::fs::write(&key, [7; 32]).expect("a key");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("a key of one's own");
    let key = key.display().to_string();
    let start = |node: usize| {
        let (socket, name) = (cluster.socket(node).display().to_string(), format!("{node}.sock"));
        let state = cluster.path(&format!("{node}.state")).display().to_string();
        let keyed = ["--migration-key", &key, "--tenant", "one", "--state", &state];
        let args = [&["--source", &socket][..], if node < 3 { &keyed } else { &[] }].concat();
        Device::start(cluster.path(&name), &args)
    };
    let mut devices = [start(1), start(2)];
    let other = start(3);
    let config = Config { queues: 2, ..Config::default() };
    let (mut guest, mut rival) = (devices[0].guest(config), other.guest(config));
    let (mut own, mut its) = (Vec::new(), Vec::new());
    for name in ["locked", "awaited"] {
        let file = made(&mut guest, ROOT, name);
        let sync = FsyncIn { fh: file.1.into(), ..FsyncIn::default() };
        assert_eq!(guest.call(op::FSYNC, file.0, &[sync.as_bytes()]).expect("a reply").error, 0);
        let z = format!("{name}\0");
        let found = rival.call(op::LOOKUP, ROOT, &[z.as_bytes()]).expect("a reply");
        let node = EntryOut::read_from_prefix(&found.body).expect("an entry").0.nodeid.get();
        let open = OpenIn { flags: 2.into(), ..OpenIn::default() };
        let opened = rival.call(op::OPEN, node, &[open.as_bytes()]).expect("a reply");
        own.push(file);
        its.push((node, OpenOut::read_from_prefix(&opened.body).expect("a handle").0.fh.get()));
    }
    let of_guest = lock(&mut guest, own[0], op::SETLK, 1, F_WRLCK);
    assert_eq!(asked(&mut guest, &of_guest), Some(0));
    let of_rival = lock(&mut rival, its[1], op::SETLK, 2, F_WRLCK);
    assert_eq!(asked(&mut rival, &of_rival), Some(0));
    // Each waits for the other's.
    let waits = lock(&mut rival, its[0], op::SETLKW, 3, F_WRLCK);
    ask(&mut rival, 1, &waits);
    let waits = lock(&mut guest, own[1], op::SETLKW, 4, F_WRLCK);
    ask(&mut guest, 2, &waits);
    assert_eq!((answer(&mut rival), answer(&mut guest)), (None, None));
    let is_whole = |guest: &mut Driver, rival: &mut Driver, what: &str| {
        assert_eq!(answer(rival), None, "{what}: the guest has it");
        let mine = lock(guest, own[0], op::SETLK, 1, F_WRLCK);
        assert_eq!(asked(guest, &mine), Some(0), "{what}: it is its own");
    };
    for round in 1..4usize {
        guest.stop().expect("it stops");
        let state = guest.save().expect("a state");
        assert_eq!(answer(&mut rival), None, "round {round}: nobody has given it up");
        guest.connect_stopped(devices[round % 2].connect()).expect("the other device");
        guest.load(&state).expect("it goes on there");
        guest.start().expect("it starts");
        is_whole(&mut guest, &mut rival, &format!("round {round}"));
    }
    // What it waits for comes to where it is now.
    let free = lock(&mut rival, its[1], op::SETLK, 2, F_UNLCK);
    assert_eq!(asked(&mut rival, &free), Some(0));
    assert_eq!(answer(&mut guest), Some(0));
    assert_eq!(asked(&mut rival, &of_rival), Some(-libc::EAGAIN));
    // A move that fails before and after the other device has taken over.
    for taken in [false, true] {
        guest.stop().expect("it stops");
        let state = guest.save().expect("a state");
        if taken {
            guest.connect_stopped(devices[0].connect()).expect("the other device");
            guest.load(&state).expect("it would go on there");
            guest.connect_stopped(devices[1].connect()).expect("the device");
        }
        guest.start().expect("it goes on here");
        is_whole(&mut guest, &mut rival, if taken { "taken over" } else { "not taken over" });
        assert_eq!(asked(&mut rival, &of_rival), Some(-libc::EAGAIN));
    }
    // The next device is killed when it has taken over, and the guest is not there yet; then the one that it leaves, and it has to go on there.
    for (killed, loaded) in [(0, true), (0, false)] {
        let other = 1 - killed;
        guest.stop().expect("it stops");
        let state = guest.save().expect("a state");
        if loaded {
            guest.connect_stopped(devices[killed].connect()).expect("the other device");
            guest.load(&state).expect("it would go on there");
        }
        let what = format!("{killed} is killed, loaded: {loaded}");
        // Of the guest that it had before it has given all back by then (docs/virtiofs.md, "leaves no heir").
        std::thread::sleep(Duration::from_secs(3));
        devices[killed].replace(&mut guest);
        is_whole(&mut guest, &mut rival, &what);
        assert_eq!(asked(&mut rival, &of_rival), Some(-libc::EAGAIN), "{what}");
        println!("{what}: the guest of device {other} goes on");
    }
    let free = lock(&mut guest, own[0], op::SETLK, 1, F_UNLCK);
    assert_eq!(asked(&mut guest, &free), Some(0));
    assert_eq!(answer(&mut rival), Some(0));
    cluster.assert_nobody_expelled();
}

/// The root of the machine is a directory like others: what is in it is there, and can be changed.
#[test]
fn all_of_a_machine_can_be_shared() {
    use std::os::unix::fs::MetadataExt;
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a sandbox of namespaces takes root");
        return;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("root-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let device = |path: &Path| std::fs::metadata(path).expect("it").dev();
    if dir.ancestors().any(|above| device(above) != device(Path::new("/"))) {
        println!("skipped: the build is on another file system than the root");
        return;
    }
    let scratch = Scratch::new();
    let args = ["--backend", "dir", "--shared-dir", "/", "--sandbox", "namespace"];
    let shared = Device::start(scratch.path("s"), &args);
    let mut guest = shared.guest(Config::default());
    let mut node = ROOT;
    for part in dir.iter().skip(1) {
        let name = std::os::unix::ffi::OsStrExt::as_bytes(part);
        let found = guest.call(op::LOOKUP, node, &[name, b"\0"]).expect("a reply");
        assert_eq!(found.error, 0, "{}", part.display());
        node = EntryOut::read_from_prefix(&found.body).expect("an entry").0.nodeid.get();
    }
    let file = made(&mut guest, node, "file");
    assert_eq!(write(&mut guest, file, 0, b"by the guest"), 0);
    assert_eq!(std::fs::read(dir.join("file")).expect("it"), b"by the guest");
    std::fs::remove_dir_all(&dir).expect("it goes");
}

#[test]
fn it_is_started_as_virtiofsd_is() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("shared")).expect("a directory");
    let shared = scratch.path("shared").display().to_string();
    let said = text(&corbel(["virtiofs", "--print-capabilities"]));
    let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["type"], "fs");
    let device = Device::start(
        scratch.path("s"),
        &[
            "--backend",
            "dir",
            "--shared-dir",
            &shared,
            "--readonly",
            "--xattr",
            "--cache",
            "always",
            "--thread-pool-size",
            "0",
            "--announce-submounts",
            "--sandbox",
            "none",
            "--log-level",
            "error",
        ],
    );
    std::fs::write(scratch.path("shared/f"), "x").expect("a file");
    let mut guest = device.guest(Config::default());
    let found = guest.call(op::LOOKUP, ROOT, &[b"f\0"]).expect("a reply");
    let node = EntryOut::read_from_prefix(&found.body).expect("an entry").0.nodeid.get();
    assert_eq!(guest.call(op::UNLINK, ROOT, &[b"f\0"]).expect("a reply").error, -30);
    let open = OpenIn { flags: 2.into(), ..OpenIn::default() };
    assert_eq!(guest.call(op::OPEN, node, &[open.as_bytes()]).expect("a reply").error, -30);
    // What is mounted below is not served, whatever is announced.
    if may_mount() {
        let below = scratch.path("shared/below");
        std::fs::create_dir(&below).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "tmpfs"]).arg(&below);
        assert!(mount.status().expect("mount starts").success());
        let reply = guest.call(op::LOOKUP, ROOT, &[b"below\0"]).expect("a reply");
        assert_eq!(reply.error, -libc::EXDEV);
    }
    // A second one does not take its place.
    let place = scratch.path("s").display().to_string();
    let refused = corbel(["--json", "virtiofs", "--backend", "null", "--socket-path", &place]);
    assert_eq!(
        (refused.status.code(), json(&refused)["error"]["code"].as_str()),
        (Some(1), Some("failed"))
    );
    for wrong in [
        &["--backend", "dir"][..],
        &["--backend", "null", "--tag", "a tag that is longer than any guest could ever read"],
        &["--backend", "null", "--translate-uid", "map:0:1"],
        &[
            "--backend",
            "dir",
            "--shared-dir",
            &shared,
            "--posix-acl",
            "--translate-uid",
            "map:0:1:1",
        ],
    ] {
        let args = ["virtiofs", "--sandbox", "none", "--socket-path", "/dev/shm/never"];
        let refused = corbel(args.iter().chain(wrong));
        assert_eq!(refused.status.code(), Some(2), "{wrong:?}: {refused:?}");
    }
}
