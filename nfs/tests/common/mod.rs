//! NFS-Ganesha in namespaces of its own: the thread of a test leaves for a network and a tree of mounts that only its servers share, so that ports are
//! free and nothing of the machine is touched. Servers end with the thread, by their process ids.
//!
//! Or another server that is there already, on a machine of its own: `CORBEL_NFS_SERVER` is the address of a shell there, as that of
//! `scripts/suites/knfsd.sh`. It exports `/files`, and the same as `/squash`; the program `server` stops and starts it. One test at a time has it.
#![allow(unsafe_code, dead_code)] // system calls; not every test uses all of it

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nfs::NfsFs;
use nfs::url::Url;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A server, its port mapper and its status monitor.
pub struct Server {
    dir: PathBuf,
    children: Vec<Child>,
    ganesha: Option<Child>,
    other: Option<Other>,
}

/// A server that was there before.
struct Other {
    shell: String,
    stopped: bool,
    _alone: MutexGuard<'static, ()>,
}

/// Whose test has it.
static ALONE: Mutex<()> = Mutex::new(());

impl Other {
    /// What a script says there.
    fn run(&self, script: &str) -> Vec<u8> {
        let asked = (|| {
            let mut shell = TcpStream::connect(&self.shell)?;
            shell.set_read_timeout(Some(Duration::from_secs(60)))?;
            shell.write_all(format!("set -e\n{script}\nprintf done\n").as_bytes())?;
            shell.shutdown(Shutdown::Write)?;
            let mut said = Vec::new();
            shell.read_to_end(&mut said).map(|_| said)
        })();
        let mut said = asked.unwrap_or_else(|e: std::io::Error| panic!("{}: {e}", self.shell));
        assert!(said.ends_with(b"done"), "{script}: {}", String::from_utf8_lossy(&said));
        said.truncate(said.len() - 4);
        said
    }

    fn server(&mut self, what: &str) {
        self.run(&format!("server {what} >/dev/null"));
        self.stopped = what == "stop";
    }
}

/// A name as a shell takes it.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_str().unwrap().replace('\'', "'\\''"))
}

fn program(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/sbin"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|file| file.is_file())
}

fn check(what: &str, done: libc::c_int) {
    assert!(done == 0, "{what}: {}", std::io::Error::last_os_error());
}

fn mount_tmpfs(on: &str) {
    std::fs::create_dir_all(on).unwrap();
    let on = std::ffi::CString::new(on).unwrap();
    // SAFETY: strings that end in NUL.
    check("mount", unsafe {
        libc::mount(
            c"tmpfs".as_ptr(),
            on.as_ptr(),
            c"tmpfs".as_ptr(),
            0,
            c"mode=755".as_ptr().cast(),
        )
    });
}

/// Runs a test in a thread of its own, which a server may take elsewhere.
pub fn apart(test: impl FnOnce() + Send + 'static) {
    if let Err(panic) = std::thread::spawn(test).join() {
        std::panic::resume_unwind(panic);
    }
}

/// This thread has a network of its own, and mounts that nobody else sees.
fn leave() {
    // SAFETY: concerns this thread only.
    check("unshare", unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) });
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: strings that end in NUL.
    check("private mounts", unsafe {
        libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null())
    });
    // SAFETY: a socket of our own, and a request whose name ends in NUL, as it says.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        assert!(socket >= 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        check("loopback", libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request));
        libc::close(socket);
    }
}

/// A program that ends with this thread.
fn spawn(program: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: a system call that needs no memory.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command.spawn().unwrap()
}

fn until(what: &str, ready: impl Fn() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn listens(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
}

impl Server {
    /// None, and a word, where there is none.
    pub fn start() -> Option<Self> {
        if let Some(shell) = std::env::var_os("CORBEL_NFS_SERVER") {
            return Some(Self::there(shell.into_string().unwrap()));
        }
        let found = (program("ganesha.nfsd"), program("rpcbind"), program("rpc.statd"));
        let (Some(_), Some(rpcbind), Some(statd)) = found else {
            println!("skipped: no NFS-Ganesha here (scripts/prepare.sh tools installs it)");
            return None;
        };
        // SAFETY: asks only.
        if unsafe { libc::geteuid() } != 0 {
            println!("skipped: a server with namespaces of its own takes root");
            return None;
        }
        if let Err(why) = nfs::libnfs::load() {
            println!("skipped: {why} (scripts/prepare.sh tools installs it)");
            return None;
        }
        leave();
        for dir in ["/run", "/var/lib/nfs"] {
            mount_tmpfs(dir);
        }
        for dir in [
            "/run/rpcbind",
            "/run/ganesha",
            "/run/sendsigs.omit.d",
            "/var/lib/nfs/ganesha/v4recov",
            "/var/lib/nfs/sm",
            "/var/lib/nfs/sm.bak",
        ] {
            std::fs::create_dir_all(dir).unwrap();
        }
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("nfs-{}-{n}", std::process::id()));
        mount_tmpfs(dir.to_str().unwrap());
        std::fs::create_dir(dir.join("files")).unwrap();
        let (files, log) = (dir.join("files"), dir.join("log"));
        let files = files.display();
        let config = format!(
            "NFS_CORE_PARAM {{ Enable_NLM = true; Enable_RQUOTA = false; Protocols = 3,4; mount_path_pseudo = true; \
               NFS_Port = 2049; MNT_Port = 20048; NLM_Port = 32803; }}\n\
             NFSV4 {{ Grace_Period = 4; Lease_Lifetime = 6; RecoveryBackend = fs; Graceless = GRACELESS; }}\n\
             EXPORT_DEFAULTS {{ SecType = sys; Access_Type = RW; Attr_Expiration_Time = 0; }}\n\
             EXPORT {{ Export_Id = 1; Path = {files}; Pseudo = /files; Squash = No_Root_Squash; FSAL {{ Name = VFS; }} }}\n\
             EXPORT {{ Export_Id = 2; Path = {files}; Pseudo = /squash; Squash = Root_Squash; FSAL {{ Name = VFS; }} }}\n\
             LOG {{ Default_Log_Level = EVENT; }}\n"
        );
        std::fs::write(dir.join("config"), config.replace("GRACELESS", "true")).unwrap();
        std::fs::write(dir.join("config-grace"), config.replace("GRACELESS", "false")).unwrap();
        std::fs::write(&log, "").unwrap();
        let mut server = Self { dir, children: Vec::new(), ganesha: None, other: None };
        server.children.push(spawn(&rpcbind, &["-f"]));
        until("rpcbind", || listens(111) && Path::new("/run/rpcbind.sock").exists());
        server.children.push(spawn(&statd, &["-F", "--no-notify"]));
        server.again();
        Some(server)
    }

    /// One that was started before, with nothing in it.
    fn there(shell: String) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let other = Other { shell, stopped: false, _alone: alone };
        // (A test that failed may have left it as it was then.)
        other.run("[ $(cat /proc/fs/nfsd/threads) != 0 ] || server now >/dev/null");
        other.run("cd /files\nrm -rf -- * .[!.]*\nchmod 755 .\nchown 0:0 .");
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("nfs-{}-{n}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self { dir, children: Vec::new(), ganesha: None, other: Some(other) }
    }

    fn launch(&mut self, config: &str) {
        let (config, log, pid) =
            (self.dir.join(config), self.dir.join("log"), self.dir.join("pid"));
        let path = |path: &Path| path.to_str().unwrap().to_string();
        let args = ["-F", "-f", &path(&config), "-L", &path(&log), "-p", &path(&pid)];
        self.ganesha = Some(spawn(&program("ganesha.nfsd").unwrap(), &args));
        until("ganesha", || listens(2049) && listens(20_048) && listens(32_803));
    }

    /// Starts it (again).
    pub fn again(&mut self) {
        if let Some(other) = &mut self.other {
            return other.server("now");
        }
        self.launch("config");
    }

    /// The same; it begins with a time in which only what was locked before can be locked.
    pub fn again_with_grace(&mut self) {
        if let Some(other) = &mut self.other {
            return other.server("grace");
        }
        self.launch("config-grace");
    }

    /// Kills it.
    pub fn kill(&mut self) {
        if let Some(other) = &mut self.other {
            return other.server("stop");
        }
        if let Some(mut child) = self.ganesha.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Where the files of a server of this machine are, for who is in its mounts.
    pub fn files(&self) -> PathBuf {
        self.dir.join("files")
    }

    /// A directory of this machine, on another file system than the server's.
    pub fn beside(&self) -> PathBuf {
        let dir = self.dir.join("beside");
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    /// What is exported, on the server's machine (which is this one for who is in its mounts), and the shell there if that is another one.
    fn at(&self, name: &str) -> (PathBuf, Option<&Other>) {
        let other = self.other.as_ref();
        let files = other.map_or_else(|| self.files(), |_| "/files".into());
        (if name.is_empty() { files } else { files.join(name) }, other)
    }

    /// A file, as who is on the server's machine sees it.
    pub fn read(&self, name: &str) -> Vec<u8> {
        let (file, other) = self.at(name);
        other.map_or_else(
            || std::fs::read(&file).unwrap(),
            |other| other.run(&format!("cat {}", quoted(&file))),
        )
    }

    /// Somebody there writes it, whole.
    pub fn write(&self, name: &str, text: &str) {
        let (file, other) = self.at(name);
        match other {
            None => std::fs::write(file, text).unwrap(),
            Some(other) => {
                let (text, file) = (quoted(Path::new(text)), quoted(&file));
                other.run(&format!("printf %s {text} >{file}"));
            }
        }
    }

    /// Empty files, named by a number behind what all their names begin with.
    pub fn write_many(&self, name: &str, count: usize) {
        let (file, other) = self.at(name);
        match other {
            None => (0..count).for_each(|n| self.write(&format!("{name}{n}"), "")),
            Some(other) => {
                let each =
                    format!("for n in $(seq 0 {}); do : >{}$n; done", count - 1, quoted(&file));
                other.run(&each);
            }
        }
    }

    /// Somebody there makes a directory.
    pub fn mkdir(&self, name: &str) {
        let (dir, other) = self.at(name);
        match other {
            None => std::fs::create_dir(dir).unwrap(),
            Some(other) => drop(other.run(&format!("mkdir {}", quoted(&dir)))),
        }
    }

    /// Somebody there renames it.
    pub fn rename(&self, from: &str, to: &str) {
        let ((from, other), (to, _)) = (self.at(from), self.at(to));
        match other {
            None => std::fs::rename(from, to).unwrap(),
            Some(other) => drop(other.run(&format!("mv {} {}", quoted(&from), quoted(&to)))),
        }
    }

    /// Somebody there changes its mode.
    pub fn chmod(&self, name: &str, mode: u32) {
        let (file, other) = self.at(name);
        match other {
            None => std::fs::set_permissions(file, PermissionsExt::from_mode(mode)).unwrap(),
            Some(other) => drop(other.run(&format!("chmod {mode:o} {}", quoted(&file)))),
        }
    }

    /// Its user and group there.
    pub fn owner(&self, name: &str) -> (u32, u32) {
        let (file, other) = self.at(name);
        let Some(other) = other else {
            let there = std::fs::metadata(file).unwrap();
            return (there.uid(), there.gid());
        };
        let said = other.run(&format!("stat -c '%u %g' {}", quoted(&file)));
        let said = String::from_utf8(said).unwrap();
        let (user, group) = said.trim().split_once(' ').unwrap();
        (user.parse().unwrap(), group.parse().unwrap())
    }

    /// The names in the root there.
    pub fn count(&self) -> usize {
        let (files, other) = self.at("");
        let Some(other) = other else { return std::fs::read_dir(files).unwrap().count() };
        let said = String::from_utf8(other.run(&format!("ls -A {} | wc -l", quoted(&files))));
        said.unwrap().trim().parse().unwrap()
    }

    /// Whether it is a directory there.
    pub fn is_dir(&self, name: &str) -> bool {
        let (dir, other) = self.at(name);
        other.map_or_else(
            || dir.is_dir(),
            |other| {
                other.run(&format!("[ ! -d {} ] || printf yes", quoted(&dir))).starts_with(b"yes")
            },
        )
    }

    pub fn url(&self, version: u32) -> Url {
        format!("nfs://127.0.0.1/files?version={version}&timeout=30").parse().unwrap()
    }

    pub fn open(&self, version: u32) -> NfsFs {
        self.open_at(&self.url(version))
    }

    pub fn open_at(&self, url: &Url) -> NfsFs {
        let begun = Instant::now();
        loop {
            match NfsFs::open(url) {
                Ok(fs) => return fs,
                // It listens before it knows its exports, and tells the port mapper one program after the other.
                Err(why) if begun.elapsed() > Duration::from_secs(30) => {
                    panic!(
                        "{why}\n{}",
                        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
                    )
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(other) = &mut self.other {
            // (A test that has failed already says why.)
            if other.stopped && !std::thread::panicking() {
                other.server("now");
            }
            let _ = std::fs::remove_dir_all(&self.dir);
            return;
        }
        self.kill();
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let dir = std::ffi::CString::new(self.dir.to_str().unwrap()).unwrap();
        // SAFETY: a string that ends in NUL.
        unsafe { libc::umount2(dir.as_ptr(), libc::MNT_DETACH) };
        let _ = std::fs::remove_dir(&self.dir);
    }
}
