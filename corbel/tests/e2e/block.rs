//! `corbel nbd`, `corbel ublk` and `corbel pool` as people use them, with our own client at the other end.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use block::nbd::Address;
use block::nbd::client::Client;
use block::nbd::proto::{command, flag, transmission};
use rustix::process::{Pid, Signal};

use super::harness::{CORBEL, Cluster, Scratch, corbel, json, signal, text, wait_for};

/// A server, ended with its test.
struct Served(Child, Address);

impl Served {
    fn start(args: &[&str], socket: &Path) -> Self {
        let mut command = Command::new("timeout");
        command.args(["120", CORBEL, "nbd"]).args(args).arg("--listen").arg(socket);
        command.stdout(Stdio::piped()).env_remove("CORBEL_CONFIG");
        let mut child = command.spawn().expect("corbel starts");
        let mut line = String::new();
        let out = child.stdout.take().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("a line");
        assert!(line.contains("listening"), "{line:?}");
        Self(child, Address::Unix(socket.to_owned()))
    }

    fn client(&self, name: &str) -> Client {
        Client::open(&self.1, name).expect("it serves")
    }

    /// Asks it to end, and waits: it ends well.
    fn end(mut self) {
        signal(Pid::from_child(&self.0), Signal::TERM);
        let status = self.0.wait().expect("it ends");
        assert!(status.success(), "{status:?}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

fn write(client: &mut Client, flags: u16, at: u64, data: &[u8]) {
    let len = data.len() as u32;
    client.call((command::WRITE, flags), at, len, data).unwrap().result.unwrap();
}

fn read(client: &mut Client, at: u64, len: u32) -> Vec<u8> {
    client.call((command::READ, 0), at, len, b"").unwrap().result.unwrap()
}

/// What a flush has covered, or was written with FUA, is there when the node that served it is gone.
#[test]
fn a_flush_means_all_replicas() {
    let cluster = Cluster::unmounted(3, "64MiB");
    let serve = |node: usize, more: &[&str]| {
        let set = format!("node.socket={}", cluster.socket(node).display());
        let args = [&["volume:/disk", "--set", &set], more].concat();
        Served::start(&args, &cluster.path(&format!("nbd{node}")))
    };
    let first = serve(1, &["--size", "8MiB"]);
    let mut client = first.client("");
    assert_eq!(client.size, 8 << 20);
    write(&mut client, 0, 0, &[1; 65536]);
    write(&mut client, 0, 1 << 20, &[2; 4096]);
    client.call((command::FLUSH, 0), 0, 0, b"").unwrap().result.unwrap();
    write(&mut client, flag::FUA, 4096, &[3; 512]);
    assert!(cluster.corbel(&["cluster", "kill", "1"]).status.success());
    let second = serve(2, &["--read-only"]);
    let mut client = second.client("");
    assert_ne!(client.flags & transmission::READ_ONLY, 0);
    let mut expected = vec![1; 65536];
    expected[4096..4608].fill(3);
    assert!(read(&mut client, 0, 65536) == expected);
    assert!(read(&mut client, 1 << 20, 8192) == [vec![2; 4096], vec![0; 4096]].concat());
}

/// A pool from the command line: made, served through the cache, some of it lost, repaired, and whole again.
#[test]
fn a_pool_loses_a_store_and_is_repaired() {
    let scratch = Scratch::new();
    let file = scratch.path("vm.pool").display().to_string();
    let mut create = vec!["pool".to_string(), "create".into(), file.clone()];
    create.extend(["--coding".into(), "rs:2,1".into()]);
    for i in 0..4 {
        let dir = scratch.path(&format!("s{i}"));
        std::fs::create_dir(&dir).unwrap();
        create.extend(["--store".into(), format!("d{i}=dir:{}", dir.display())]);
    }
    text(&corbel(&create));
    assert_eq!(corbel(&create).status.code(), Some(1), "it is there already");
    let image = ["pool", "image", &file, "disk", "--size", "4MiB", "--object-size", "256KiB"];
    text(&corbel(image));
    let source = format!("pool:{file}:disk");
    let serve =
        |more: &[&str]| Served::start(&[&[source.as_str()], more].concat(), &scratch.path("nbd"));
    let server = serve(&["--cache", "1MiB", "--write-back"]);
    let mut client = server.client("");
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i / 7) as u8).collect();
    let data = &data[..data.len() / 512 * 512];
    write(&mut client, 0, 0, data);
    write(&mut client, 0, 512, &[9; 512]);
    drop(client);
    // It ends well: what was in its cache only is in the stores then.
    server.end();
    let status = |verb: &str| json(&corbel(["pool", verb, &file, "disk", "--json"]));
    let before = status("status");
    assert_eq!((&before["objects"], &before["whole"]), (&12.into(), &12.into()), "{before}");
    let gone = scratch.path("s1");
    std::fs::remove_dir_all(&gone).unwrap();
    std::fs::create_dir(&gone).unwrap();
    assert_ne!(status("status")["missing"], 0);
    let repaired = status("repair");
    assert!(repaired["rebuilt"].as_u64() > Some(0) && repaired["lost"] == 0, "{repaired}");
    let again = status("scrub");
    assert_eq!((&again["missing"], &again["damaged"]), (&0.into(), &0.into()), "{again}");
    std::fs::remove_dir_all(scratch.path("s0")).unwrap();
    let server = serve(&["--read-only"]);
    let mut client = server.client("");
    let mut expected = data.to_vec();
    expected[512..1024].fill(9);
    assert!(read(&mut client, 0, expected.len() as u32) == expected);
    server.end();
    std::fs::remove_dir_all(scratch.path("s2")).unwrap();
    let lost = corbel(["pool", "status", &file, "disk", "--json"]);
    assert!(!lost.status.success(), "{lost:?}");
}

/// Several exports, and one at a time may write to an image.
#[test]
fn exports_have_names() {
    let scratch = Scratch::new();
    let image = scratch.path("b.img").display().to_string();
    let exports = ["--export", "a=memory:1MiB", "--export", &format!("b=file:{image}")];
    let args = [&exports[..], &["--size", "2MiB"]].concat();
    let server = Served::start(&args, &scratch.path("nbd"));
    assert_eq!((server.client("a").size, server.client("b").size), (1 << 20, 2 << 20));
    assert!(Client::open(&server.1, "c").is_err());
    server.end();
    wait_for("the socket's end", Duration::from_secs(60), || {
        (!scratch.path("nbd").exists()).then_some(())
    });
    let wrong = corbel(["nbd", "memory:1MiB", "--listen", "0.0.0.0:0", "--json"]);
    assert_eq!(
        (wrong.status.code(), json(&wrong)["error"]["code"].clone()),
        (Some(2), "usage".into())
    );
}

/// Without the driver nothing is done, and it is said what to do; a wrong command line is told first. (With it: `scripts/suites/ublk.sh`.)
#[test]
fn ublk_says_what_it_lacks() {
    let code = |args: &[&str]| {
        let out = corbel([&["ublk", "--json"], args].concat());
        (out.status.code(), json(&out)["error"].clone())
    };
    for wrong in [
        &[][..],
        &["memory:1MiB", "--queues", "0"],
        &["memory:1MiB", "--depth", "4097"],
        &["memory:1MiB", "--recover", "1"],
        &["memory:1MiB", "--write-back"],
        &["memory:1MiB", "--id", "-1"],
        &["delete"],
        &["delete", "x"],
        &["memory:1MiB", "list"],
        &["--id", "1", "list"],
    ] {
        let (status, error) = code(wrong);
        assert_eq!((status, &error["code"]), (Some(2), &"usage".into()), "{wrong:?}: {error}");
    }
    if Path::new("/dev/ublk-control").exists() {
        eprintln!("SKIPPED: this kernel has ublk_drv");
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("a.img");
    let file = format!("file:{}", image.display());
    for args in
        [&[file.as_str(), "--size", "1MiB"][..], &["list"], &["delete", "0"], &["--recover", "0"]]
    {
        let (status, error) = code(args);
        assert_eq!((status, &error["code"]), (Some(7), &"environment".into()), "{args:?}: {error}");
        let remedy = error["remedy"].as_str().unwrap();
        assert!(remedy.contains("modprobe ublk_drv") && remedy.contains("corbel nbd"), "{error}");
    }
    assert!(!image.exists(), "nothing was made");
}
