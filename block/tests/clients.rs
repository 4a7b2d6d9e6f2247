//! Other people's clients at our server: libnbd's tools, qemu's, fio. What is not installed is said and left out.

mod rig;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use base::random::Random;
use block::device::{Blocking, Device, Memory, PlainFile, Threads};
use block::layer::{Config, Layered};
use block::nbd::connection::{Bounds, Common};
use block::nbd::handshake::TlsPolicy;
use block::nbd::proto::command;
use block::nbd::{Address, Exports, Limits, Server};

use rig::{Scratch, export, program, serve};

/// Runs a program with a limit of time; `None`: it is not installed.
fn run(name: &str, args: &[&str]) -> Option<Output> {
    if program(name).is_none() {
        eprintln!("SKIPPED: no {name} here (apt-get install libnbd-bin qemu-utils fio)");
        return None;
    }
    let mut command = Command::new("timeout");
    // fio leaves a file of its state where it stands.
    command.current_dir(std::env::temp_dir());
    command.args(["-k", "5", "100", name]).args(args);
    Some(command.output().expect("timeout starts"))
}

/// What a program said that succeeded.
fn said(output: &Output) -> String {
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?}: {text}{errors}", output.status);
    text.into_owned()
}

fn memory(size: u64) -> Arc<dyn Device> {
    Arc::new(Blocking(Memory::new(size)))
}

fn uri(scratch: &Scratch, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", scratch.path("nbd.sock").display())
}

/// A file of random bytes with a hole in the middle.
fn source(path: &Path, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; 9 << 20];
    let mut random = Random::new(seed);
    random.fill(&mut bytes[..3 << 20]);
    random.fill(&mut bytes[7 << 20..]);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn nbdinfo_sees_what_there_is() {
    let scratch = Scratch::new("nbdinfo");
    let _server = serve(&scratch, memory(10 << 20));
    let Some(output) = run("nbdinfo", &["--json", &uri(&scratch, "disk")]) else { return };
    let text = said(&output);
    for part in [
        "\"export-size\": 10485760",
        "\"can_multi_conn\": true",
        "\"can_fua\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"can_fast_zero\": true",
        "\"can_df\": true",
        "\"is_read_only\": false",
        "\"base:allocation\"",
        "\"description\": \"a disk\"",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let listed = run("nbdinfo", &["--list", &uri(&scratch, "")]).expect("it was there");
    assert!(said(&listed).contains("export=\"disk\""));
    let wrong = run("nbdinfo", &[&uri(&scratch, "other")]).expect("it was there");
    assert!(!wrong.status.success());
}

/// A file goes in by nbdcopy over four connections, comes out the same, and its hole is still one.
#[test]
fn nbdcopy_copies_there_and_back() {
    let scratch = Scratch::new("nbdcopy");
    let (from, back) = (scratch.path("from"), scratch.path("back"));
    let bytes = source(&from, 3);
    let backing = scratch.path("disk");
    let disk = PlainFile::open(&backing, false, Some(bytes.len() as u64)).unwrap();
    let _server = serve(&scratch, Arc::new(Blocking(disk)));
    let uri = uri(&scratch, "disk");
    let from = from.display().to_string();
    let args = ["--connections=4", "--flush", "--target-is-zero", &from, &uri];
    let Some(output) = run("nbdcopy", &args) else { return };
    said(&output);
    assert!(std::fs::read(&backing).unwrap() == bytes);
    let back = back.display().to_string();
    said(&run("nbdcopy", &[&uri, &back]).expect("it was there"));
    assert!(std::fs::read(&back).unwrap() == bytes);
    let map = said(&run("nbdinfo", &["--map", &uri]).expect("it comes with nbdcopy"));
    assert!(map.lines().any(|line| line.contains("hole,zero")), "{map}");
}

#[test]
fn qemu_reads_and_writes() {
    let scratch = Scratch::new("qemu");
    let from = scratch.path("from");
    let bytes = source(&from, 5);
    let _server = serve(&scratch, memory(bytes.len() as u64));
    let uri = uri(&scratch, "disk");
    let from = from.display().to_string();
    let convert = ["convert", "-n", "-O", "raw", "-f", "raw", &from, &uri];
    let Some(output) = run("qemu-img", &convert) else { return };
    said(&output);
    let same = ["compare", "-f", "raw", "-F", "raw", &from, &uri];
    assert!(said(&run("qemu-img", &same).expect("it was there")).contains("identical"));
    let commands = [
        "write -P 0x55 0 64k",
        "read -P 0x55 0 64k",
        "write -f -P 0x66 4096 512",
        "read -P 0x66 4096 512",
        "read -P 0x55 4608 512",
        "write -z 8k 8k",
        "read -P 0 8k 8k",
        "discard 0 1M",
        "flush",
    ];
    let mut args = vec!["-f", "raw"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(&uri);
    let output = run("qemu-io", &args).expect("it comes with qemu-img");
    let text = said(&output);
    assert!(!text.contains("failed") && !text.contains("verification"), "{text}");
}

/// fio writes at random with many in flight, syncs, reads back and compares.
#[test]
fn fio_verifies_what_it_wrote() {
    let scratch = Scratch::new("fio");
    let _server = serve(&scratch, memory(16 << 20));
    let uri = format!("--uri={}", uri(&scratch, "disk"));
    let args = [
        "--name=t",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bsrange=512-64k",
        "--bs_unaligned=0",
        "--iodepth=32",
        "--size=16m",
        "--fsync=50",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--randseed=9",
    ];
    let Some(output) = run("fio", &args) else { return };
    let text = said(&output);
    assert!(text.contains("err= 0"), "{text}");
}

/// The same through the cache, write-back, over a file: and what a flush has covered lies in the file.
#[test]
fn fio_verifies_through_the_cache() {
    let scratch = Scratch::new("fio-cache");
    let disk = PlainFile::open(&scratch.path("disk"), false, Some(16 << 20)).unwrap();
    let below = Arc::new(Threads::new(disk, 4).unwrap());
    let config = Config { cache_bytes: 1 << 20, write_back: true, ..Config::default() };
    let layered = Arc::new(Layered::new(below, config).unwrap());
    let server = serve(&scratch, Arc::clone(&layered) as Arc<dyn Device>);
    let uri = format!("--uri={}", uri(&scratch, "disk"));
    let args = [
        "--name=t",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bsrange=512-64k",
        "--iodepth=32",
        "--size=16m",
        "--fsync=50",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--randseed=9",
    ];
    let Some(output) = run("fio", &args) else { return };
    assert!(said(&output).contains("err= 0"));
    let mut client = block::nbd::client::Client::open(&server.addresses()[0], "disk").unwrap();
    client.call((command::FLUSH, 0), 0, 0, b"").unwrap().result.unwrap();
    let seen = client.call((command::READ, 0), 0, 16 << 20, b"").unwrap().result.unwrap();
    assert!(seen == std::fs::read(scratch.path("disk")).unwrap());
    assert!(layered.stats().device_writes > 0);
}

/// TLS of GnuTLS, as libnbd speaks it, with certificates on both sides.
#[test]
fn libnbd_comes_by_tls() {
    let scratch = Scratch::new("nbds");
    rig::certificates(&scratch);
    let mut exports = Exports::new();
    exports.add("disk", export(memory(8 << 20))).unwrap();
    let common = Common {
        exports: Arc::new(exports),
        tls: TlsPolicy::Required,
        config: Some(block::nbd::tls::read(&scratch.path("server"), true).unwrap()),
        bounds: Bounds::default(),
    };
    let listen = [Address::Tcp("127.0.0.1:0".parse().unwrap())];
    let server = Server::start(common, &listen, Limits::default()).unwrap();
    let keys = scratch.path("client");
    let at = server.addresses()[0].to_string().replace("127.0.0.1", "localhost");
    let uri = format!("nbds://{at}/disk?tls-certificates={}", keys.display());
    let Some(output) = run("nbdinfo", &["--size", &uri]) else { return };
    assert_eq!(said(&output).trim(), "8388608");
    let from = scratch.path("from");
    std::fs::write(&from, vec![7; 8 << 20]).unwrap();
    said(&run("nbdcopy", &[&from.display().to_string(), &uri]).expect("it comes with nbdinfo"));
    let back = scratch.path("back").display().to_string();
    said(&run("nbdcopy", &[&uri, &back]).expect("it comes with nbdinfo"));
    assert!(std::fs::read(back).unwrap() == vec![7; 8 << 20]);
    let plain = run("nbdinfo", &["--size", &format!("nbd://{at}/disk")]).expect("it was there");
    assert!(!plain.status.success());
}
