//! What a guest's processor has to do for a file system that is somewhere else: instructions for a read or write of 4 KiB on virtio-fs, and on an
//! NFS mount.
//!
//! QEMU emulates the guest, and counts (`-icount`): how busy this machine is changes nothing. The guest is Debian's kernel; the NFS server is
//! NFS-Ganesha in namespaces of its own, which the guest reaches by QEMU's user network. Reads and writes are direct, one after the other, so that
//! neither side has its page cache or reads ahead.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};
use crate::local::own_program;

/// What the guest's kernel needs, in this order.
const MODULES: [&str; 17] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "fuse",
    "virtiofs",
    "failover",
    "net_failover",
    "virtio_net",
    "sunrpc",
    "grace",
    "lockd",
    "netfs",
    "fscache",
    "nfs",
    "dns_resolver",
];
/// The last of them.
const LAST: &str = "nfsv4";
/// Reads, and as many writes.
const OPS: u32 = 8192;
/// The guest's clock has hundredths of a second, of a nanosecond for an instruction.
const TICK: f64 = 1e7;
/// A busy machine takes minutes.
const LIMIT: Duration = Duration::from_secs(900);
/// Where the server listens. It is alone in its network.
const PORT: u16 = 20_490;

/// What is started for it. Ended when dropped, and all that it started with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program(name: &str) -> std::result::Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| format!("{name} is not installed"))
}

/// Kernel and modules: `CORBEL_GUEST`, or where `scripts/prepare.sh tools` puts them, beside the program that was built.
fn kernel() -> std::result::Result<PathBuf, String> {
    let named = std::env::var_os("CORBEL_GUEST").map(PathBuf::from);
    let own = std::env::current_exe().unwrap_or_default();
    let built = own.ancestors().nth(2).map(|target| target.join("tools/guest"));
    let dir = named.or(built).unwrap_or_default();
    for module in MODULES.iter().chain(&[LAST]) {
        if !dir.join(format!("{module}.ko")).is_file() {
            return Err(format!("no kernel with {module}.ko in {}", dir.display()));
        }
    }
    Ok(dir)
}

/// The guest's first file system.
fn initrd(kernel: &Path, busybox: &Path, dir: &Path) -> Result<PathBuf> {
    let root = dir.join("root");
    for part in ["bin", "proc", "sys", "dev", "virtiofs", "nfs", "lib"] {
        std::fs::create_dir_all(root.join(part)).context(root.display())?;
    }
    std::fs::copy(busybox, root.join("bin/busybox")).context("busybox")?;
    let mut order = String::new();
    for module in MODULES.iter().chain(&[LAST]) {
        let file = format!("{module}.ko");
        std::fs::copy(kernel.join(&file), root.join("lib").join(&file)).context(file)?;
        order += &format!("{module} ");
    }
    let init = root.join("init");
    let texts = [
        (root.join("lib/order"), order),
        (root.join("lib/ops"), OPS.to_string()),
        (init.clone(), include_str!("guest-init.sh").to_owned()),
    ];
    for (file, text) in texts {
        std::fs::write(&file, text).context(file.display())?;
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&init, mode).context(init.display())?;
    let image = dir.join("initrd");
    let script = "find . | cpio -o -H newc --quiet > \"$1\"";
    let mut pack = Command::new("sh");
    pack.args(["-c", script, "sh"]).arg(&image).current_dir(&root);
    let packed = pack.status().context("cpio")?;
    if !packed.success() {
        return Err(Failure::failed("cpio could not pack the guest's files", "see what it says"));
    }
    Ok(image)
}

/// The server's configuration, and the script that starts it and then the guest, in a network of their own.
fn script(dir: &Path, kernel: &Path, image: &Path, socket: &Path) -> Result<PathBuf> {
    let files = dir.join("files");
    std::fs::create_dir_all(&files).context(files.display())?;
    let config = format!(
        "NFS_CORE_PARAM {{ Enable_NLM = false; Enable_RQUOTA = false; Protocols = 4; NFS_Port = {PORT}; }}\n\
         NFSV4 {{ RecoveryBackend = fs; Graceless = true; }}\n\
         EXPORT_DEFAULTS {{ SecType = sys; Access_Type = RW; }}\n\
         EXPORT {{ Export_Id = 1; Path = {}; Pseudo = /files; Squash = No_Root_Squash; FSAL {{ Name = VFS; }} }}\n",
        files.display()
    );
    // Whether it listens, `ss` would say; the kernel says it as well, in hexadecimal.
    let text = format!(
        "set -e\n\
         ip link set lo up\n\
         mount -t tmpfs none /run && mkdir /run/ganesha\n\
         mount -t tmpfs none /var/lib && mkdir -p /var/lib/nfs/ganesha/v4recov\n\
         cd {dir}\n\
         ganesha.nfsd -F -f config -L log -p pid &\n\
         n=0\n\
         until grep -qi ':{PORT:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6; do\n\
         n=$((n + 1)); [ $n -lt 600 ] || {{ echo 'guest: FAILED server'; exit 1; }}; sleep 0.1\n\
         done\n\
         exec qemu-system-x86_64 -M pc -cpu max -accel tcg -icount shift=0 -m 256M -nographic -no-reboot -nodefaults \\\n\
         -serial stdio -object memory-backend-memfd,id=m,size=256M,share=on -numa node,memdev=m \\\n\
         -chardev socket,id=fs,path={socket} -device vhost-user-fs-pci,chardev=fs,tag=corbel,num-request-queues=1 \\\n\
         -netdev user,id=n -device virtio-net-pci,netdev=n,romfile= \\\n\
         -append 'console=ttyS0 quiet panic=-1 tsc=unstable' -kernel {kernel} -initrd {image}\n",
        dir = dir.display(),
        socket = socket.display(),
        kernel = kernel.join("vmlinuz").display(),
        image = image.display(),
    );
    let file = dir.join("run.sh");
    for (file, text) in [(dir.join("config"), config), (file.clone(), text)] {
        std::fs::write(&file, text).context(file.display())?;
    }
    Ok(file)
}

/// What the guest says that it took, in its ticks.
fn ticks(said: &str, mount: &str) -> Option<f64> {
    let head = format!("guest: {mount} ");
    // Before it there may be what the firmware wrote last, which it leaves without an end.
    let (_, rest) = said.lines().find_map(|line| line.split_once(&head))?;
    rest.trim().parse().ok().filter(|ticks| *ticks > 0.0)
}

/// Adds the figures, or says what is missing here.
pub(super) fn instructions(bench: &Bench<'_>, dir: &Path, figures: &mut Measured) -> Result<()> {
    let skip = |why: &str| {
        let how = "scripts/prepare.sh tools; apt-get install nfs-ganesha nfs-ganesha-vfs";
        bench.out.step(format!("  no tenant_instructions_ratio: {why} ({how})"));
        Ok(())
    };
    if bench.quick {
        bench.out.step("  no tenant_instructions_ratio: it takes minutes, and this is quick");
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return skip("a server with namespaces of its own takes root");
    }
    let (kernel, busybox) = match (kernel(), program("busybox")) {
        (Ok(kernel), Ok(busybox)) => (kernel, busybox),
        (Err(why), _) | (_, Err(why)) => return skip(&why),
    };
    let needed = ["qemu-system-x86_64", "ganesha.nfsd", "cpio", "unshare", "ip", "mount"];
    if let Some(why) = needed.iter().find_map(|name| program(name).err()) {
        return skip(&why);
    }
    bench.out.step("  instructions of a guest, on virtio-fs and on NFS");
    let (dir, shared) = (dir.join("guest"), dir.join("guest-virtiofs"));
    for dir in [&dir, &shared] {
        std::fs::create_dir_all(dir).context(dir.display())?;
    }
    let socket = dir.join("socket");
    let mut device = Command::new(own_program()?);
    device.args(["virtiofs", "--backend", "dir", "--sandbox", "none", "--log-level", "error"]);
    device.arg("--shared-dir").arg(&shared).arg("--socket-path").arg(&socket);
    device.stdin(Stdio::null()).stdout(Stdio::null());
    let _device = Running(device.spawn().context("corbel virtiofs")?);
    let end = Instant::now() + LIMIT;
    while !socket.exists() && Instant::now() < end {
        crate::signals::check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
    let image = initrd(&kernel, &busybox, &dir)?;
    let script = script(&dir, &kernel, &image, &socket)?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
    command.arg(&script).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut guest = Running(command.spawn().context("unshare")?);
    let out = guest.0.stdout.take();
    let said = std::thread::spawn(move || {
        let mut said = Vec::new();
        // What came before it broke off is what there is.
        let _ = out.map(|mut out| out.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    });
    while guest.0.try_wait().context("the guest")?.is_none() && Instant::now() < end {
        crate::signals::check()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(guest);
    let said = said.join().unwrap_or_default();
    let each = |mount| ticks(&said, mount).map(|ticks| ticks * TICK / f64::from(2 * OPS));
    let complete = said.contains("guest: done") && !said.contains("FAILED");
    let (Some(virtiofs), Some(nfs), true) = (each("virtiofs"), each("nfs"), complete) else {
        let last: Vec<&str> = said.lines().filter(|line| line.contains("guest:")).collect();
        let log = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
        let log = log.lines().last().unwrap_or("its server says nothing");
        let what = format!("the guest did not come to its end: {}; {log}", last.join("; "));
        return Err(Failure::failed(what, "a busy machine takes long: try again on a quiet one"));
    };
    figures.push(("virtiofs_instructions", virtiofs));
    figures.push(("nfs_instructions", nfs));
    figures.push(("tenant_instructions_ratio", virtiofs / nfs));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_says_is_understood() {
        let said = "SeaBIOS\r\nguest: virtiofs 46\r\nguest: nfs 146\r\nguest: done\r\n";
        assert_eq!(ticks(said, "virtiofs"), Some(46.0));
        assert_eq!(ticks(said, "nfs"), Some(146.0));
        let said =
            "Booting from ROM..\u{1b}c\u{1b}[?7l\u{1b}[2Jguest: virtiofs 47\r\nguest: nfs 147\r\n";
        assert_eq!((ticks(said, "virtiofs"), ticks(said, "nfs")), (Some(47.0), Some(147.0)));
        for wrong in ["guest: nfs", "guest: nfs x", "guest: nfs 0", "nfs 3", ""] {
            assert_eq!(ticks(wrong, "nfs"), None, "{wrong}");
        }
    }
}
