//! Queues here, the file system there, and TCP between them: who may speak, and what a guest sees when the other side dies.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ::virtiofs::driver::{Config, Driver};
use frontend::fuse::wire::*;
use zerocopy::IntoBytes;

use super::super::harness::{CORBEL, Scratch, corbel, text, wait_for};
use super::{Device, ROOT, answer, ask, made, read, write};

const LONG: Duration = Duration::from_secs(60);

/// Keys of nodes, of an authority.
fn keys(folder: &Path, nodes: &[u32]) {
    let place = folder.display().to_string();
    text(&corbel(["cert", "authority", "--dir", &place]));
    for node in nodes {
        let role = format!("node-{node}");
        text(&corbel(["cert", "issue", &role, "--authority", &place, "--out", &place]));
    }
}

/// Options by which a process is a node of these keys.
fn node(number: u32, folder: &Path) -> [String; 4] {
    let (id, keys) = (format!("node.id={number}"), format!("cluster.keys={}", folder.display()));
    ["--set".into(), id, "--set".into(), keys]
}

/// The side with the file system.
struct Back {
    child: Child,
    args: Vec<String>,
    log: PathBuf,
}

impl Back {
    fn start(args: Vec<String>, log: PathBuf) -> Self {
        Self { child: Self::spawn(&args, &log), args, log }
    }

    fn spawn(args: &[String], log: &Path) -> Child {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("a log");
        let mut command = Command::new(CORBEL);
        command.arg("virtiofs").args(args).env("CORBEL_TIED_TO", std::process::id().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().expect("corbel starts")
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn again(&mut self) {
        self.child = Self::spawn(&self.args, &self.log);
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody has.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// What a guest's first request comes to, whose side gives up after a second.
fn init_of(device: &Device) -> Result<Driver, String> {
    let mut guest = Driver::over(device.connect(), Config::default()).expect("a device");
    guest.init().map(|_| guest)
}

#[test]
fn a_device_on_another_machine_is_who_it_should_be_or_nobody() {
    let scratch = Scratch::new();
    let (ours, theirs) = (scratch.path("ours"), scratch.path("theirs"));
    keys(&ours, &[1, 2, 3]);
    keys(&theirs, &[1, 2]);
    std::fs::create_dir(scratch.path("shared")).expect("a directory");
    let port = free_port();
    let (shared, state) =
        (scratch.path("shared").display().to_string(), scratch.path("state").display().to_string());
    let of_back = [
        "--backend",
        "dir",
        "--shared-dir",
        &shared,
        "--listen",
        &port,
        "--state",
        &state,
        "--tenant",
        "one",
        "--peer",
        "node-2",
        // All of what it has to say, and not the first of ten seconds.
        "--log-level",
        "info",
    ];
    let of_back = of_back.map(String::from).into_iter().chain(node(1, &ours)).collect();
    let mut back = Back::start(of_back, scratch.path("log"));
    let front = |name: &str, number: u32, keys: &Path, more: &[&str]| {
        let of = node(number, keys);
        let of: Vec<&str> = of.iter().map(String::as_str).collect();
        let args = ["--remote", &port, "--tenant", "one"];
        Device::start(scratch.path(name), &[&args[..], &of, more].concat())
    };

    // Whoever may: files, on both sides.
    let device = front("hard", 2, &ours, &["--peer", "node-1"]);
    let mut guest = device.guest(Config::default());
    let file = made(&mut guest, ROOT, "file");
    assert_eq!(write(&mut guest, file, 0, b"from afar"), 0);
    assert_eq!(std::fs::read(scratch.path("shared/file")).expect("it"), b"from afar");

    // The other side is killed: a request waits, and is answered when it is back, which knows what is open.
    back.kill();
    let getattr = |guest: &mut Driver| {
        guest.request(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], 0)
    };
    let request = getattr(&mut guest);
    ask(&mut guest, 0, &request);
    for _ in 0..5 {
        assert_eq!(answer(&mut guest), None, "it waits");
    }
    back.again();
    let error = wait_for("the answer", LONG, || answer(&mut guest));
    assert_eq!(error, 0);
    assert_eq!(read(&mut guest, file, 0, 100), b"from afar");
    assert_eq!(write(&mut guest, file, 0, b"FROM"), 0);
    // So it is in the middle of requests that can be done once only.
    for round in 0..3 {
        let name = format!("made-{round}\0");
        let arg = MkdirIn { mode: 0o755.into(), ..MkdirIn::default() };
        let request = guest.request(op::MKDIR, ROOT, &[arg.as_bytes(), name.as_bytes()], 0);
        ask(&mut guest, 0, &request);
        back.kill();
        back.again();
        let error = wait_for("the answer", LONG, || answer(&mut guest));
        assert_eq!(error, 0, "round {round}");
        assert!(scratch.path("shared").join(name.trim_end_matches('\0')).is_dir());
    }
    guest.hang_up();
    drop(device);

    // With a limit of time it is an error, and then it goes on.
    let device = front("soft", 2, &ours, &["--peer", "node-1", "--soft", "1"]);
    let mut guest = init_of(&device).expect("INIT");
    back.kill();
    for _ in 0..3 {
        let begun = Instant::now();
        let request = getattr(&mut guest);
        ask(&mut guest, 0, &request);
        assert_eq!(wait_for("an error", LONG, || answer(&mut guest)), -libc::EIO);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }
    back.again();
    wait_for("an answer", LONG, || {
        let request = getattr(&mut guest);
        ask(&mut guest, 0, &request);
        (wait_for("any answer", LONG, || answer(&mut guest)) == 0).then_some(())
    });
    drop((guest, device));

    // Strangers: of another authority; of ours, but not who may come; and another one here than is meant there.
    let before = std::fs::read_dir(scratch.path("shared")).expect("it").count();
    // (One whose own side believes ours: so the other side has to look at what it shows.)
    let mixed = scratch.path("mixed");
    std::fs::create_dir(&mixed).expect("a directory");
    let authority = |keys: &Path| std::fs::read(keys.join("authority.pem")).expect("one");
    let both = [authority(&ours), authority(&theirs)].concat();
    std::fs::write(mixed.join("authority.pem"), both).expect("a file");
    std::fs::copy(theirs.join("node-2.pem"), mixed.join("node-2.pem")).expect("a copy");
    for (name, number, keys, peer) in [
        ("other", 2, &theirs, "node-1"),
        ("shown", 2, &mixed, "node-1"),
        ("not-two", 3, &ours, "node-1"),
        ("meant", 2, &ours, "node-3"),
    ] {
        let device = front(name, number, keys, &["--peer", peer, "--soft", "1"]);
        assert_eq!(init_of(&device).err().as_deref(), Some("INIT: error -5"), "{name}");
    }
    for why in [
        // (Of two: the other is what the side with the guest said.)
        "certificate of node-2 of cluster \"corbel\" is of another authority",
        "node-3 is at the other end, not node-2",
    ] {
        wait_for(why, LONG, || back.said().contains(why).then_some(()));
    }
    // Plain words, that would be understood over a Unix socket.
    let mut stream = TcpStream::connect(&port).expect("it listens");
    stream.set_read_timeout(Some(LONG)).expect("a limit");
    let hello = ::virtiofs::remote::frame::Header::of(::virtiofs::remote::frame::kind::HELLO, 0);
    let _ = stream.write_all(&::virtiofs::remote::frame::frame(&hello, &[]));
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    assert_eq!(said.first(), Some(&0x15), "an alert, and no word more: {said:?}");
    assert_eq!(std::fs::read_dir(scratch.path("shared")).expect("it").count(), before);
    // Who may is served as before.
    let device = front("again", 2, &ours, &["--peer", "node-1"]);
    let mut guest = device.guest(Config::default());
    let file = made(&mut guest, ROOT, "after");
    assert_eq!(write(&mut guest, file, 0, b"x"), 0);
    println!("the side with the files:\n{}", back.said());
}

/// Over TCP nobody is spoken to without keys, or without a name for who is there.
#[test]
fn without_keys_or_a_name_no_device_is_on_another_machine() {
    let scratch = Scratch::new();
    keys(&scratch.path("keys"), &[1]);
    let (socket, port) = (scratch.path("s").display().to_string(), free_port());
    let none = scratch.path("none");
    let run = |more: &[&str], keys: &Path| {
        let of = node(1, keys);
        let of: Vec<&str> = of.iter().map(String::as_str).collect();
        corbel([&["virtiofs"][..], &of, more].concat())
    };
    let remote = ["--remote", &port, "--socket-path", &socket];
    let listen = ["--listen", &port, "--backend", "null"];
    let named = [&remote[..], &["--peer", "node-1"]].concat();
    let off = ["--set", "cluster.authentication=none"];
    for (more, keys, code, said) in [
        (&remote[..], &scratch.path("keys"), 2, "--peer"),
        (&named, &none, 3, "authority.pem"),
        (&listen, &none, 3, "authority.pem"),
        (&[&listen[..], &off].concat(), &scratch.path("keys"), 3, "certificates"),
        (&["--backend", "null", "--socket-path", &socket, "--peer", "node-1"], &none, 2, "--peer"),
        (&["--listen", &socket, "--backend", "null", "--peer", "node-1"], &none, 2, "--peer"),
    ] {
        let output = run(more, keys);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{more:?}: {error}");
        assert!(error.contains(said), "{more:?}: {error}");
    }
}
