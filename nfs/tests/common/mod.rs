//! NFS-Ganesha in namespaces of its own: the thread of a test leaves for a network and a tree of mounts that only its servers share, so that ports are
//! free and nothing of the machine is touched. Servers end with the thread, by their process ids.
#![allow(unsafe_code, dead_code)] // system calls; not every test uses all of it

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nfs::NfsFs;
use nfs::url::Url;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A server, its port mapper and its status monitor.
pub struct Server {
    pub dir: PathBuf,
    children: Vec<Child>,
    ganesha: Option<Child>,
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
        let mut server = Self { dir, children: Vec::new(), ganesha: None };
        server.children.push(spawn(&rpcbind, &["-f"]));
        until("rpcbind", || listens(111) && Path::new("/run/rpcbind.sock").exists());
        server.children.push(spawn(&statd, &["-F", "--no-notify"]));
        server.again();
        Some(server)
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
        self.launch("config");
    }

    /// The same; it begins with a time in which only what was locked before can be locked.
    pub fn again_with_grace(&mut self) {
        self.launch("config-grace");
    }

    /// Kills it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.ganesha.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Where its files are on this machine, for who is in its mounts.
    pub fn files(&self) -> PathBuf {
        self.dir.join("files")
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
