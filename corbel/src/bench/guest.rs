//! What a guest has of a file system that is somewhere else, in two guests of Debian's kernel, which QEMU emulates.
//!
//! One counts instructions for a read or write of 4 KiB on virtio-fs (our device, and virtiofsd where there is one), and on an NFS mount. QEMU counts
//! them (`-icount`): how busy this machine is changes nothing. The NFS server is NFS-Ganesha in namespaces of its own, which the guest reaches by QEMU's
//! user network. Reads and writes are direct, one after the other, so that neither side has its page cache or reads ahead.
//!
//! The other has a device of each kind side by side, and takes the time of the same loads on them, in turns. The time that the emulator takes for the
//! guest's own part is in it, the same for all.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::virtiofs::{key, middle};
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
/// Reads, and as many writes, whose instructions are counted.
const OPS: u32 = 8192;
/// Loads of which the time is taken, operations in a turn of each, and turns; the one in the middle counts.
const LOADS: [(&str, u32); 5] =
    [("read_4k", 1500), ("write_4k", 1500), ("read_64k", 700), ("write_64k", 700), ("stat", 700)];
const TURNS: u32 = 5;
/// What only a guest that keeps nothing asks for.
const NEVER_KEPT: &str = "stat";
/// Devices that the guest has side by side: its tag, the back end (`None`: virtiofsd), and what the guest may keep.
const BESIDE: [(&str, Option<&str>, &str); 5] = [
    ("null", Some("null"), "never"),
    ("dir", Some("dir"), "never"),
    ("virtiofsd", None, "never"),
    // Names and attributes; virtiofsd lets it have them for a second.
    ("dir_kept", Some("dir"), "metadata"),
    ("virtiofsd_kept", None, "auto"),
];
/// Which are compared.
const PAIRS: [(&str, &str); 3] =
    [("null", "virtiofsd"), ("dir", "virtiofsd"), ("dir_kept", "virtiofsd_kept")];
/// The guest's clock has hundredths of a second, of a nanosecond for an instruction.
const TICK: f64 = 1e7;
/// A busy machine takes minutes.
const LIMIT: Duration = Duration::from_secs(900);
/// Where the server listens. It is alone in its network.
const PORT: u16 = 20_490;

/// What is measured in a guest: with virtiofsd, if there is one.
pub(super) type Guest = fn(&Bench<'_>, &Path, Option<&Path>, &mut Measured) -> Result<()>;

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
    for part in ["bin", "proc", "sys", "dev", "lib"] {
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
    let loads: String = LOADS.iter().map(|(name, count)| format!("{name} {count}\n")).collect();
    let texts = [
        (root.join("lib/order"), order),
        (root.join("lib/ops"), OPS.to_string()),
        (root.join("lib/loads"), loads),
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

/// A virtio-fs device in a process of its own, for the guest that starts next.
struct Device {
    tag: &'static str,
    socket: PathBuf,
    _running: Running,
}

impl Device {
    fn start(tag: &'static str, mut command: Command, dir: &Path) -> Result<Self> {
        let socket = dir.join(format!("{tag}.sock"));
        let _ = std::fs::remove_file(&socket);
        command.args(["--sandbox", "none", "--log-level", "error"]);
        command.arg("--socket-path").arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
        let running = Running(command.spawn().context(tag)?);
        let end = Instant::now() + Duration::from_secs(60);
        while !socket.exists() && Instant::now() < end {
            crate::signals::check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { tag, socket, _running: running })
    }

    /// A file system of a directory, by a program that takes virtiofsd's options.
    fn of_files(tag: &'static str, mut command: Command, dir: &Path) -> Result<Self> {
        let shared = dir.join(format!("{tag}-files"));
        std::fs::create_dir_all(&shared).context(shared.display())?;
        command.arg("--shared-dir").arg(&shared);
        Self::start(tag, command, dir)
    }
}

fn ours(backend: &str) -> Result<Command> {
    let mut command = Command::new(own_program()?);
    command.args(["virtiofs", "--backend", backend]);
    Ok(command)
}

/// QEMU and its arguments, as words of a shell.
fn machine(devices: &[Device], kernel: &Path, image: &Path, said: &str) -> Vec<String> {
    let mut words: Vec<String> = [
        "qemu-system-x86_64 -M pc -cpu max -accel tcg -m 256M -nographic -no-reboot -nodefaults -serial stdio",
        "-object memory-backend-memfd,id=m,size=256M,share=on -numa node,memdev=m",
    ]
    .iter()
    .flat_map(|line| line.split(' '))
    .map(str::to_owned)
    .collect();
    for Device { tag, socket, .. } in devices {
        words.extend(["-chardev".into(), format!("socket,id={tag},path={}", socket.display())]);
        let device = format!("vhost-user-fs-pci,chardev={tag},tag={tag},num-request-queues=1");
        words.extend(["-device".into(), device]);
    }
    let tags: Vec<&str> = devices.iter().map(|device| device.tag).collect();
    let tags = tags.join(" ");
    words.extend(["-append".into()]);
    words.push(format!("console=ttyS0 quiet panic=-1 tsc=unstable {said} \"devices={tags}\""));
    words.extend(["-kernel".into(), kernel.join("vmlinuz").display().to_string()]);
    words.extend(["-initrd".into(), image.display().to_string()]);
    words
}

/// The server's configuration, and the script that starts it and then the guest, in a network of their own.
fn script(dir: &Path, machine: &[String]) -> Result<PathBuf> {
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
         exec{machine} -icount shift=0 -netdev user,id=n -device virtio-net-pci,netdev=n,romfile=\n",
        dir = dir.display(),
        machine = machine.iter().map(|word| format!(" '{word}'")).collect::<String>(),
    );
    let file = dir.join("run.sh");
    for (file, text) in [(dir.join("config"), config), (file.clone(), text)] {
        std::fs::write(&file, text).context(file.display())?;
    }
    Ok(file)
}

/// What the guest says that something took: in its ticks, or in microseconds of each turn.
fn numbers(said: &str, what: &str) -> Vec<f64> {
    let head = format!("guest: {what} ");
    // Before it there may be what the firmware wrote last, which it leaves without an end.
    let rests = said.lines().filter_map(|line| Some(line.split_once(&head)?.1));
    rests.filter_map(|rest| rest.trim().parse().ok()).filter(|number| *number > 0.0).collect()
}

/// A guest from its start to its end: what it says.
fn told(mut command: Command) -> Result<String> {
    let end = Instant::now() + LIMIT;
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut guest = Running(command.spawn().context("the guest")?);
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
    if said.contains("guest: done") && !said.contains("FAILED") {
        return Ok(said);
    }
    let last: Vec<&str> = said.lines().filter(|line| line.contains("guest:")).collect();
    let what = format!("the guest did not come to its end: {}", last.join("; "));
    Err(Failure::failed(what, "a busy machine takes long: try again on a quiet one"))
}

/// The kernel and busybox, where all programs that are needed are there; else what is missing.
fn tools(programs: &[&str]) -> std::result::Result<(PathBuf, PathBuf), String> {
    let found = (kernel()?, program("busybox")?);
    programs.iter().try_for_each(|name| program(name).map(drop)).map(|()| found)
}

/// Adds the figures, or says what is missing here.
pub(super) fn instructions(
    bench: &Bench<'_>,
    dir: &Path,
    peer: Option<&Path>,
    figures: &mut Measured,
) -> Result<()> {
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
    let needed = ["qemu-system-x86_64", "ganesha.nfsd", "cpio", "unshare", "ip", "mount"];
    let (kernel, busybox) = match tools(&needed) {
        Ok(found) => found,
        Err(why) => return skip(&why),
    };
    bench.out.step("  instructions of a guest, on virtio-fs and on NFS");
    let dir = dir.join("guest");
    std::fs::create_dir_all(&dir).context(dir.display())?;
    let mut devices = vec![Device::of_files("virtiofs", ours("dir")?, &dir)?];
    if let Some(peer) = peer {
        devices.push(Device::of_files("virtiofsd", Command::new(peer), &dir)?);
    }
    let image = initrd(&kernel, &busybox, &dir)?;
    let script = script(&dir, &machine(&devices, &kernel, &image, "mode=instructions"))?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
    command.arg(&script);
    let said = told(command).map_err(|failure| {
        let log = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
        let log = log.lines().last().unwrap_or("its server says nothing");
        Failure::failed(format!("{}; {log}", failure.message), failure.remedy)
    })?;
    let each = |mount| Some(numbers(&said, mount).first()? * TICK / f64::from(2 * OPS));
    let (Some(virtiofs), Some(nfs)) = (each("virtiofs"), each("nfs")) else {
        return Err(Failure::failed("the guest does not say what it counted", "see what it says"));
    };
    figures.push(("virtiofs_instructions", virtiofs));
    figures.push(("nfs_instructions", nfs));
    figures.push(("tenant_instructions_ratio", virtiofs / nfs));
    if let Some(theirs) = each("virtiofsd") {
        figures.push(("virtiofsd_instructions", theirs));
        figures.push(("instructions_vs_virtiofsd", virtiofs / theirs));
    }
    Ok(())
}

/// Our devices and virtiofsd in one guest, in turns: adds the figures, or says what is missing here. Once nothing is kept in the guest, once names
/// and attributes are. Where nothing is, its kernel asks for a file's attributes before each read, unless the device has the file opened past its
/// pages: virtiofsd does, ours with kernels from 6.9 on.
pub(super) fn beside(
    bench: &Bench<'_>,
    dir: &Path,
    peer: Option<&Path>,
    figures: &mut Measured,
) -> Result<()> {
    let skip = |why: &str| {
        bench.out.step(format!("  no guest_dir_vs_virtiofsd: {why}"));
        Ok(())
    };
    let Some(peer) = peer else { return skip("no virtiofsd here") };
    if bench.quick {
        return skip("it takes a minute, and this is quick");
    }
    let (kernel, busybox) = match tools(&["qemu-system-x86_64", "cpio"]) {
        Ok(found) => found,
        Err(why) => return skip(&format!("{why} (scripts/prepare.sh tools)")),
    };
    bench.out.step("  our devices and virtiofsd in one guest");
    let dir = dir.join("guest-beside");
    std::fs::create_dir_all(&dir).context(dir.display())?;
    let mut devices = Vec::new();
    for (tag, backend, cache) in BESIDE {
        let mut command = backend.map_or_else(|| Ok(Command::new(peer)), ours)?;
        command.args(["--cache", cache]);
        devices.push(if backend == Some("null") {
            Device::start(tag, command, &dir)?
        } else {
            Device::of_files(tag, command, &dir)?
        });
    }
    let image = initrd(&kernel, &busybox, &dir)?;
    let words = machine(&devices, &kernel, &image, &format!("mode=durations turns={TURNS}"));
    let (program, args) = words.split_first().unwrap_or_else(|| unreachable!("it has words"));
    let mut command = Command::new(program);
    command.args(args);
    let said = told(command)?;
    let of = |load: &str, tag: &str| numbers(&said, &format!("{load} {tag}"));
    for (tag, ..) in BESIDE {
        for (load, count) in LOADS {
            let each = middle(&of(load, tag)) / f64::from(count);
            figures.push((key(&format!("guest_{tag}"), load, "_us"), each));
        }
    }
    for (tag, beside) in PAIRS {
        let kept = BESIDE.iter().any(|(name, _, cache)| *name == tag && *cache != "never");
        let loads = LOADS.iter().map(|(load, _)| *load).filter(|load| !kept || *load != NEVER_KEPT);
        let mut logs = Vec::new();
        for load in loads {
            let (own, theirs) = (of(load, tag), of(load, beside));
            let ratios: Vec<f64> =
                own.iter().zip(&theirs).map(|(own, theirs)| own / theirs).collect();
            let ratio = middle(&ratios);
            figures.push((key(&format!("guest_{tag}"), load, "_vs_virtiofsd"), ratio));
            logs.push(ratio.ln());
        }
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        figures.push((key("guest", tag, "_vs_virtiofsd"), mean.exp()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_says_is_understood() {
        let said = "SeaBIOS\r\nguest: virtiofs 46\r\nguest: nfs 146\r\nguest: done\r\n";
        assert_eq!(numbers(said, "virtiofs"), [46.0]);
        assert_eq!(numbers(said, "nfs"), [146.0]);
        let said =
            "Booting from ROM..\u{1b}c\u{1b}[?7l\u{1b}[2Jguest: virtiofs 47\r\nguest: nfs 147\r\n";
        assert_eq!((numbers(said, "virtiofs"), numbers(said, "nfs")), (vec![47.0], vec![147.0]));
        let said = "guest: stat dir 9\r\nguest: stat virtiofsd 7\r\nguest: stat dir 8\r\n";
        assert_eq!(numbers(said, "stat dir"), [9.0, 8.0]);
        for wrong in ["guest: nfs", "guest: nfs x", "guest: nfs 0", "nfs 3", "guest: nfsd 3", ""] {
            assert!(numbers(wrong, "nfs").is_empty(), "{wrong}");
        }
    }
}
