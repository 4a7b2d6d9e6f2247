//! A mount served by another process.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use base::InodeId;
use client::fs::{FileSystem, Invalidate};
use frontend::dev_fuse::Session;
use frontend::fuse::Options;
use frontend::mount_options::MountOptions;

use crate::cache::Caching;

const SERVE: &str = "CORBEL_TEST_SERVE";
/// Source prefix: the kernel may cache until it is told.
const CACHING: &str = "caching:";
/// Seconds that a script may take.
const SCRIPT_SECONDS: &str = "100";

/// Not a test by itself: the server of the others. Serves until it is unmounted; lines on its
/// standard input are notifications to the kernel, each acknowledged by a line.
#[test]
fn serve_child() {
    let Ok(args) = std::env::var(SERVE) else { return };
    let (source, dir) = args.split_once('|').unwrap();
    let plain = source.strip_prefix(CACHING);
    let mut fs = frontend::source::open_back_end(plain.unwrap_or(source)).unwrap().unwrap();
    if plain.is_some() {
        fs = Arc::new(Caching(fs)) as Arc<dyn FileSystem>;
    }
    let mount_options = MountOptions { source: source.into(), ..MountOptions::default() };
    let session = Session::mount(fs, Path::new(dir), &mount_options, Options::default()).unwrap();
    println!("ready");
    let notifier = session.notifier();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            tell(&*notifier, &line.unwrap());
            println!("done");
        }
    });
    session.join(); // until unmounted
    std::process::exit(0); // the reader of the test runner's last words may be gone
}

/// `inode INO`, `entry PARENT NAME` or `store INO TEXT`.
fn tell(kernel: &dyn Invalidate, line: &str) {
    let mut words = line.splitn(3, ' ');
    let what = words.next().unwrap();
    let ino = InodeId(words.next().unwrap().parse().unwrap());
    let rest = words.next().unwrap_or("").as_bytes();
    match what {
        "inode" => kernel.inode(ino, 0, 0),
        "entry" => kernel.entry(ino, rest),
        "store" => kernel.store(ino, 0, rest),
        _ => panic!("{line}"),
    }
}

/// A mount with its backing directory; gone when dropped.
pub struct Mounted {
    pub base: PathBuf,
    pub dir: PathBuf,
    pub server: Child,
    commands: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Mounted {
    /// None, with a notice, where mounting is not possible.
    pub fn new(name: &str) -> Option<Self> {
        Self::with(name, "", |_| {})
    }

    /// The kernel caches until it is told.
    pub fn caching(name: &str) -> Option<Self> {
        Self::with(name, CACHING, |_| {})
    }

    /// The backing directory is prepared before it is served.
    pub fn with_back(name: &str, prepare: impl FnOnce(&Path)) -> Option<Self> {
        Self::with(name, "", prepare)
    }

    fn with(name: &str, prefix: &str, prepare: impl FnOnce(&Path)) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            println!("skipped: no /dev/fuse");
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            println!("skipped: not root");
            return None;
        }
        let base = std::env::temp_dir().join(format!("corbel-mount-{}-{name}", std::process::id()));
        let (back, dir) = (base.join("back"), base.join("mnt"));
        fs::create_dir_all(&back).unwrap();
        fs::create_dir_all(&dir).unwrap();
        prepare(&back);
        let (server, commands, answers) = serve(prefix, &back, &dir);
        Some(Self { base, dir, server, commands: Some(commands), answers })
    }

    /// Starts another server after the first one died.
    pub fn serve_again(&mut self) {
        let (server, commands, answers) = serve("", &self.back(), &self.dir);
        self.server = server;
        self.commands = Some(commands);
        self.answers = answers;
    }

    pub fn back(&self) -> PathBuf {
        self.base.join("back")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Has the server send a notification, and waits until it has.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.commands.as_mut().unwrap(), "{line}").unwrap();
        assert!(self.answers.any(|line| line.unwrap() == "done"));
    }

    /// Runs a script in the mount; it must succeed.
    pub fn sh(&self, script: &str) -> String {
        let output = Command::new("timeout")
            .args([SCRIPT_SECONDS, "bash", "-euo", "pipefail", "-c", script])
            .current_dir(&self.dir)
            .env("LC_ALL", "C")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}\n{script}", output.status);
        text
    }
}

type Server = (Child, ChildStdin, Lines<BufReader<ChildStdout>>);

fn serve(prefix: &str, back: &Path, dir: &Path) -> Server {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "harness::serve_child", "--nocapture"])
        .env(SERVE, format!("{prefix}dir:{}|{}", back.display(), dir.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")), "the server did not come up");
    let commands = child.stdin.take().unwrap();
    (child, commands, lines)
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH;
        let _ = rustix::mount::unmount(&self.dir, flags);
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = rustix::mount::unmount(self.back(), flags);
        let _ = fs::remove_dir_all(&self.base);
    }
}
