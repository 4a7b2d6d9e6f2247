//! Back ends in C (`corbel-fs.h`) behind what `corbel` serves.

use std::path::Path;
use std::process::Command;

use ::virtiofs::driver::Config;
use frontend::fuse::wire::*;
use zerocopy::IntoBytes;

use super::harness::{Scratch, corbel};
use super::virtiofs::{Device, ROOT, made, read, write};

/// A back end in C, loaded from a shared library: the example that is documented, behind a device, which is as much its guest's as any other.
#[test]
fn a_back_end_in_c_serves_a_guest() {
    let scratch = Scratch::new();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../foreign");
    let library = scratch.path("ram.so");
    let built = Command::new("cc")
        .args(["-O1", "-shared", "-fPIC", "-pthread", "-I"])
        .arg(here.join("include"))
        .arg("-o")
        .args([&library, &here.join("examples/ram.c")])
        .status()
        .expect("a C compiler");
    assert!(built.success());
    let source = format!("{}#100", library.display());
    for sandbox in ["none", "namespace"] {
        if sandbox == "namespace" && !rustix::process::geteuid().is_root() {
            continue;
        }
        let args = ["--backend", "lib", "--source", &source, "--sandbox", sandbox];
        let device = Device::start(scratch.path(sandbox), &args);
        let config = Config { queues: 2, slots: 64, size: 512, ..Config::default() };
        let mut guest = device.guest(config);
        let file = made(&mut guest, ROOT, "f");
        assert_eq!(write(&mut guest, file, 3, b"in C"), 0);
        assert_eq!(read(&mut guest, file, 0, 100), b"\0\0\0in C");
        // Many at once, of which each takes a millisecond in the library.
        for slot in 1..64 {
            let arg = FsyncIn { fh: file.1.into(), ..FsyncIn::default() };
            let request = guest.request(op::FSYNC, file.0, &[arg.as_bytes()], 0);
            let queue = &mut guest.queues[1];
            let head = queue.prepare(slot, &request, &[], 4096, 0);
            queue.offer(head);
        }
        guest.queues[1].notify();
        for _ in 1..64 {
            let (head, written) = guest.queues[1].wait().expect("an answer");
            let slot = guest.queues[1].slot_of(head);
            assert_eq!(guest.reply(1, slot, written, 4096).expect("a reply").error, 0);
        }
        // A node that it was not told of it cannot name, whatever the library thinks of that.
        let asked =
            guest.call(op::GETATTR, 99, &[GetattrIn::default().as_bytes()]).expect("a reply");
        assert_eq!(asked.error, -libc::ESTALE);
    }
    let source = format!("lib:{}#0", library.display());
    let refused = corbel(["mount", "-f", &source, scratch.path("mnt").to_str().expect("UTF-8")]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("does not open \"0\""), "{said}");
}
