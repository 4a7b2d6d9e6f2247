//! The virtio-fs device is killed and started while its guest works on a volume: how long the guest waits, whether anything fails, and
//! whether all is there that was answered.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ::virtiofs::driver::Driver;
use ::virtiofs::witness::{self, Guest};

use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};
use crate::local::own_program;

/// From one death to the next.
const LIFE: Duration = Duration::from_millis(300);

fn failed(what: impl std::fmt::Display) -> Failure {
    Failure::failed(what.to_string(), "see what it says above")
}

/// The device, as a process.
struct Process {
    child: Option<Child>,
    source: PathBuf,
    dir: PathBuf,
}

impl Process {
    fn socket(&self) -> PathBuf {
        self.dir.join("device.sock")
    }

    fn start(&mut self) -> Result<()> {
        let mut command = Command::new(own_program()?);
        command
            .args(["virtiofs", "--log-level", "error", "--sandbox", "none", "--seccomp", "none"])
            .arg("--source")
            .arg(&self.source)
            .arg("--state")
            .arg(self.dir.join("device.state"))
            .arg("--socket-path")
            .arg(self.socket());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        self.child = Some(child.context("corbel virtiofs")?);
        Ok(())
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn connect(&self) -> Result<std::os::unix::net::UnixStream> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            match std::os::unix::net::UnixStream::connect(self.socket()) {
                Ok(stream) => return Ok(stream),
                Err(error) if Instant::now() > end => return Err(failed(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs the bench.
pub fn restart(bench: &Bench<'_>) -> Result<Measured> {
    let world = World::start(bench, World::plan(bench), &[])?;
    let source = world.local.config(1)?.node.socket;
    let mut device = Process { child: None, source, dir: Path::to_path_buf(world.scratch()) };
    device.start()?;
    let driver = Driver::over(device.connect()?, witness::config()).map_err(failed)?;
    let mut guest = Guest::begin(driver).map_err(failed)?;
    let rounds = if bench.quick { 5 } else { 20 };
    let mut usual = Duration::ZERO;
    let mut pauses = Vec::new();
    for round in 0..=rounds {
        crate::signals::check()?;
        let end = Instant::now() + LIFE;
        while Instant::now() < end {
            guest.take(LIFE, true).map_err(failed)?;
        }
        if round == 0 {
            usual = guest.longest();
        } else {
            pauses.push(guest.longest());
        }
        if round < rounds {
            device.kill();
            device.start()?;
            guest.driver.reconnect(device.connect()?).map_err(failed)?;
        }
    }
    while guest.under_way() > 0 {
        if !guest.take(Duration::from_secs(60), false).map_err(failed)? {
            return Err(failed("requests without an answer"));
        }
    }
    let lost = guest.lost().map_err(failed)?;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    pauses.sort_unstable();
    Ok(vec![
        ("restarts", f64::from(rounds)),
        ("answers", guest.answers as f64),
        ("usual_ms", ms(usual)),
        ("median_pause_ms", pauses.get(pauses.len() / 2).copied().map_or(0.0, ms)),
        ("pause_ms", pauses.last().copied().map_or(0.0, ms)),
        ("errors", guest.errors as f64),
        ("lost", lost as f64),
    ])
}
