//! A small Ceph for tests: `scripts/ceph.sh`, where Ceph is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Scratch, program};

/// Where the script is.
fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/ceph.sh")
}

struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        eprintln!("{}: {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

/// A cluster of three OSDs, each with a pool of its own (`osd0` to `osd2`), and the pool `rbd` over all of them.
pub struct Ceph {
    dir: Scratch,
}

impl Ceph {
    /// Starts one; none where Ceph is not installed, which is said.
    pub fn start(name: &str) -> Option<Self> {
        for tool in ["ceph-mon", "ceph-osd", "ceph", "rados", "python3", "setsid"] {
            if program(tool).is_none() {
                eprintln!(
                    "skipped: no {tool} (apt install --no-install-recommends ceph-mon ceph-mgr ceph-osd ceph-common)"
                );
                return None;
            }
        }
        if let Err(error) = rados::librados::load() {
            eprintln!("skipped: {error}");
            return None;
        }
        // What the code says in the log is what a failure is understood by.
        if log::set_logger(&Stderr).is_ok() {
            log::set_max_level(log::LevelFilter::Info);
        }
        let ceph = Self { dir: Scratch::new(name) };
        let mut start = Command::new(script());
        start.arg("start").arg(ceph.dir.path("")).env("MGR", "no");
        let done = start.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Some(ceph)
    }

    /// What clients need.
    pub fn conf(&self) -> String {
        self.dir.path("ceph.conf").display().to_string()
    }

    /// Runs a tool of Ceph's, which must do it; what it says.
    pub fn run(&self, tool: &str, args: &[&str]) -> String {
        let (done, said) = self.try_run(tool, args);
        assert!(done, "{tool} {args:?}: {said}");
        said
    }

    /// Runs one that may fail, for half a minute at most: whether it did it, and what it says.
    pub fn try_run(&self, tool: &str, args: &[&str]) -> (bool, String) {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60", tool, "-c", &self.conf()]).args(args).stdin(Stdio::null());
        let done = command.output().unwrap();
        let said = [done.stdout, done.stderr].concat();
        (done.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    /// Sends an OSD a signal.
    pub fn signal(&self, osd: usize, signal: &str) {
        let pid = std::fs::read_to_string(self.dir.path(&format!("osd.{osd}.pid"))).unwrap();
        assert!(Command::new("kill").args([signal, pid.trim()]).status().unwrap().success());
    }

    /// Starts an OSD again, and waits until it serves its pool.
    pub fn revive(&self, osd: usize) {
        let mut start = Command::new(script());
        start.arg("osd").arg(self.dir.path("")).arg(osd.to_string());
        assert!(start.status().unwrap().success());
        self.wait_for(osd);
    }

    /// Waits until an OSD serves its pool.
    pub fn wait_for(&self, osd: usize) {
        let (pool, file) = (format!("osd{osd}"), self.conf());
        let end = Instant::now() + Duration::from_secs(90);
        // Names of a pool are read from all of its groups.
        while !self.try_run("rados", &["-p", &pool, "put", ".ready", &file]).0
            || !self.try_run("rados", &["-p", &pool, "ls", "--all"]).0
        {
            assert!(Instant::now() < end, "osd.{osd} does not come back");
        }
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        let _ = Command::new(script()).arg("stop").arg(self.dir.path("")).status();
    }
}
