//! Other people's clients at our server: libnbd's tools, its shell, nbdkit's plugin `nbd`, qemu's, fio. What is not installed is said and left out.

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
        eprintln!(
            "SKIPPED: no {name} here (apt-get install libnbd-bin python3-libnbd nbdkit qemu-utils fio)"
        );
        return None;
    }
    let mut command = Command::new("timeout");
    // fio leaves a file of its state where it stands.
    command.current_dir(std::env::temp_dir());
    command.args(["-k", "5", "100", name]).args(args);
    // nbdsh takes the first python3 that there is: the module is the system's.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:/bin:{path}"));
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

/// A plain file behind a write-back cache, which is smaller than what goes through it.
fn cached(path: &Path, size: u64) -> Arc<dyn Device> {
    let disk = PlainFile::open(path, false, Some(size)).unwrap();
    let below = Arc::new(Threads::new(disk, 4).unwrap());
    let config = Config { cache_bytes: 1 << 20, write_back: true, ..Config::default() };
    Arc::new(Layered::new(below, config).unwrap())
}

/// nbdkit's plugin `nbd` is a client of ours and serves what it finds: nbdcopy copies to it and back, and fio's bytes come
/// back through it, by four connections that it shares one of ours for, and each by one of its own.
#[test]
fn nbdkit_serves_what_we_serve() {
    for shared in ["shared=true", "shared=false"] {
        let scratch = Scratch::new("nbdkit");
        let (from, back, backing) =
            (scratch.path("from"), scratch.path("back"), scratch.path("disk"));
        let bytes = source(&from, 13);
        let _server = serve(&scratch, cached(&backing, bytes.len() as u64));
        let uri = format!("uri={}", uri(&scratch, "disk"));
        let script = format!(
            "set -e; nbdinfo --json \"$uri\"; nbdcopy --connections=4 --flush --target-is-zero {from} \"$uri\"; \
             nbdcopy --connections=4 \"$uri\" {back}; nbdinfo --map \"$uri\"",
            from = from.display(),
            back = back.display()
        );
        let args = ["-U", "-", "nbd", &uri, shared, "--run", &script];
        let Some(output) = run("nbdkit", &args) else { return };
        let text = said(&output);
        // It passes on what we say that we can do.
        for part in [
            "\"export-size\": 9437184",
            "\"can_multi_conn\": true",
            "\"can_fua\": true",
            "\"can_trim\": true",
            "\"can_zero\": true",
            "\"can_fast_zero\": true",
            "\"is_read_only\": false",
            "hole,zero",
        ] {
            assert!(text.contains(part), "{shared}: {part}: {text}");
        }
        assert!(std::fs::read(&backing).unwrap() == bytes, "{shared}: what lies there");
        assert!(std::fs::read(&back).unwrap() == bytes, "{shared}: what came back");
    }
}

/// What libnbd's shell does at random, by two connections and with many requests in flight, beside a copy of it in memory.
const SHELL: &str = r#"
import errno, random
seed = 17
random.seed(seed)
size = h.get_size()
assert h.can_multi_conn() and h.get_structured_replies_negotiated()
other = nbd.NBD()
other.connect_uri(h.get_uri())
image = bytearray(size)
def span(most):
    at = random.randrange(size // 512) * 512
    return at, min(random.randint(1, most) * 512, size - at)
for turn in range(600):
    c = random.choice((h, other))
    at, n = span(300)
    what = random.randrange(8)
    if what < 3:
        data = random.randbytes(n)
        c.pwrite(data, at, nbd.CMD_FLAG_FUA if what == 0 else 0)
        image[at:at + n] = data
    elif what < 5:
        c.zero(n, at, random.choice((0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FUA)))
        image[at:at + n] = bytes(n)
    elif what == 5:
        c.flush()
    else:
        assert c.pread(n, at) == image[at:at + n], f"seed {seed}, turn {turn}: {n} bytes at {at}"
# Sixty-four in flight, each at its own place; and reads of all of them after their answers.
places = random.sample(range(size // 4096), 640)
for first in range(0, len(places), 64):
    cookies = []
    for block in places[first:first + 64]:
        data = random.randbytes(4096)
        image[block * 4096:(block + 1) * 4096] = data
        cookies.append((h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), block * 4096), block))
    for cookie, _ in cookies:
        while not h.aio_command_completed(cookie):
            h.poll(-1)
    buffers = [(other.aio_pread(buffer, block * 4096), block, buffer) for _, block in cookies for buffer in [nbd.Buffer(4096)]]
    for cookie, block, buffer in buffers:
        while not other.aio_command_completed(cookie):
            other.poll(-1)
        assert buffer.to_bytearray() == image[block * 4096:(block + 1) * 4096], f"seed {seed}, block {block}"
# Chunks of a structured read cover it once.
seen = bytearray(size)
def chunk(data, offset, status, error):
    assert status in (nbd.READ_DATA, nbd.READ_HOLE)
    seen[offset:offset + len(data)] = data
for at in range(0, size, 1 << 20):
    h.pread_structured(min(1 << 20, size - at), at, chunk)
assert seen == image
# What is told to be zero is zero, and the extents cover the disk.
at = 0
def extents(context, offset, entries, error):
    global at
    for length, flags in zip(entries[::2], entries[1::2]):
        if flags & nbd.STATE_ZERO:
            assert not any(image[at:at + length]), f"{length} bytes at {at} are told to be zero"
        at += length
h.flush()
while at < size:
    was = at
    h.block_status(size - at, at, extents)
    assert at > was
# What does not fit is refused, and the connection lives.
h.set_strict_mode(0)
def refused(number, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum == number, f"{call.__name__}{args[1:]}: {error}"
    else:
        raise AssertionError(f"{call.__name__} is not refused")
refused(errno.EINVAL, h.pread, 512, size)
refused(errno.EINVAL, h.pread, 1024, size - 512)
refused(errno.ENOSPC, h.pwrite, bytes(1024), size - 512)
refused(errno.EINVAL, h.trim, 1024, size - 512)
refused(errno.ENOSPC, h.zero, 512, size)
h.trim(1 << 20, 1 << 20)
h.cache(4096, 0)
image[1 << 20:2 << 20] = h.pread(1 << 20, 1 << 20)
assert h.pread(size, 0) == image
h.flush()
other.shutdown()
print("the same", len(image))
"#;

#[test]
fn nbdsh_compares_byte_for_byte() {
    let scratch = Scratch::new("nbdsh");
    let backing = scratch.path("disk");
    let _server = serve(&scratch, cached(&backing, 9 << 20));
    let uri = uri(&scratch, "disk");
    let args = ["--base-allocation", "-u", &uri, "-c", SHELL];
    let Some(output) = run("nbdsh", &args) else { return };
    assert!(said(&output).contains("the same 9437184"));
    // And through nbdkit, which is a client of ours.
    let script = scratch.path("script");
    std::fs::write(&script, SHELL).unwrap();
    let through = format!("nbdsh --base-allocation -u \"$uri\" -c \"$(cat {})\"", script.display());
    let fresh = [&format!("nbdsh -u '{uri}' -c 'h.zero(h.get_size(), 0)' && {through}")];
    let from = format!("uri={uri}");
    let args = ["-U", "-", "nbd", &from, "shared=true", "--run", fresh[0]];
    let Some(output) = run("nbdkit", &args) else { return };
    assert!(said(&output).contains("the same 9437184"));
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
