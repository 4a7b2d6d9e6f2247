//! A real guest: Debian's kernel in QEMU, in software, with one device. What it needs is installed by `scripts/prepare.sh tools`.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::Host;

/// What the guest's kernel needs before it can mount, in this order.
const MODULES: [&str; 7] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "fuse",
    "virtiofs",
];
/// Whoever takes longer hangs: boot takes five seconds, or a minute where others want the processor too.
const LIMIT_SECONDS: &str = "500";

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.exists())
}

/// Kernel, modules and programs, or what is missing.
fn tools() -> Result<(PathBuf, PathBuf), String> {
    let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_path_buf();
    let guest = target.join("tools/guest");
    let programs = ["qemu-system-x86_64", "cpio", "timeout"];
    if let Some(missing) = programs.iter().find(|program| find(program).is_none()) {
        return Err(format!("{missing} is not installed"));
    }
    let busybox = find("busybox").ok_or("busybox is not installed")?;
    if !guest.join("vmlinuz").exists() {
        return Err(format!("no kernel in {}", guest.display()));
    }
    Ok((guest, busybox))
}

/// The first file system of the guest.
fn initrd(guest: &Path, busybox: &Path, root: &Path) -> PathBuf {
    for dir in ["bin", "proc", "sys", "dev", "mnt", "lib"] {
        std::fs::create_dir_all(root.join(dir)).unwrap();
    }
    std::fs::copy(busybox, root.join("bin/busybox")).unwrap();
    for module in MODULES {
        let name = format!("{module}.ko");
        std::fs::copy(guest.join(&name), root.join("lib").join(&name)).unwrap();
    }
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest-init.sh");
    std::fs::copy(init, root.join("init")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(root.join("init"), mode).unwrap();
    let image = root.with_extension("cpio");
    let packed = Command::new("sh")
        .args(["-c", "find . | cpio -o -H newc --quiet > \"$1\"", "sh"])
        .arg(&image)
        .current_dir(root)
        .status()
        .unwrap();
    assert!(packed.success());
    image
}

#[test]
fn debians_kernel_mounts_and_uses_it() {
    let (guest, busybox) = match tools() {
        Ok(tools) => tools,
        Err(missing) => {
            println!("skipped: {missing} (scripts/prepare.sh tools)");
            return;
        }
    };
    let host = Host::dir();
    std::fs::write(host.path("hello"), "hello, guest\n").unwrap();
    let bytes: Vec<u8> =
        (0..1_500_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(host.path("from-host"), &bytes).unwrap();
    std::fs::write(host.outside(), "secret").unwrap();
    let image = initrd(&guest, &busybox, &host.outside().with_file_name("initrd"));
    let chardev = format!("socket,id=fs,path={}", host.socket().display());
    let output = Command::new("timeout")
        .args([LIMIT_SECONDS, "qemu-system-x86_64", "-M", "pc", "-cpu", "max", "-accel", "tcg"])
        .args(["-m", "256M", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"])
        .args(["-object", "memory-backend-memfd,id=m,size=256M,share=on", "-numa", "node,memdev=m"])
        .args(["-chardev", &chardev])
        .args(["-device", "vhost-user-fs-pci,chardev=fs,tag=corbel,num-request-queues=2"])
        .args(["-append", "console=ttyS0 quiet panic=-1 tsc=unstable"])
        .arg("-kernel")
        .arg(guest.join("vmlinuz"))
        .arg("-initrd")
        .arg(&image)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("guest: done"), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("FAILED"), "{said}");
    let script = include_str!("guest-init.sh");
    for name in script.lines().filter_map(|line| line.strip_prefix("ok ")?.split(' ').next()) {
        assert!(said.contains(&format!("guest: ok {name}\r")), "{name}: {said}");
    }
    // What it did is here.
    assert_eq!(std::fs::read(host.path("copy")).unwrap(), bytes);
    assert_eq!(std::fs::read(host.path("direct")).unwrap(), bytes);
    assert_eq!(std::fs::read(host.path("a/b/moved")).unwrap(), b"one\n");
    assert_eq!(std::fs::read(host.path("a/linked")).unwrap(), b"new\n");
    assert_eq!(std::fs::read_link(host.path("s")).unwrap(), Path::new("a/b/moved"));
    assert!(!host.path("many").exists());
}
