//! The cluster of a bench: in memory, of its own, gone when the bench is.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Bench, built, load};
use crate::config::{Authentication, Transport};
use crate::failure::{Context, Failure, Result};
use crate::local::{Local, Plan};

/// A running cluster with the load program beside it. Ends when dropped.
#[derive(Debug)]
pub struct World {
    /// The cluster.
    pub local: Local,
    /// The compiled load program.
    pub load: PathBuf,
    dir: PathBuf,
    keep: bool,
    /// Another build's `corbel`, whose library programs are run with.
    pub program: Option<PathBuf>,
}

impl World {
    /// Starts `nodes` nodes, waits for the chain, mounts each node of `mounts`.
    pub fn start(bench: &Bench<'_>, plan: Plan, mounts: &[u32]) -> Result<Self> {
        Self::start_on(bench, plan, mounts, |_| Ok(()))
    }

    /// The same, after something is done to the regions.
    pub fn start_on(
        bench: &Bench<'_>,
        plan: Plan,
        mounts: &[u32],
        prepare: impl Fn(&Local) -> Result<()>,
    ) -> Result<Self> {
        let dir = scratch()?;
        let begun = std::time::Instant::now();
        let load = load::compile(&dir)?;
        let local = Local::create(&dir.join("cluster"), plan)?.tied();
        let world = Self { local, load, dir, keep: bench.keep, program: None };
        prepare(&world.local)?;
        world.local.up(Duration::from_secs(30))?;
        for node in mounts {
            world.local.mount(*node)?;
        }
        bench.out.step(format!("  cluster ready after {:.2} s", begun.elapsed().as_secs_f64()));
        Ok(world)
    }

    /// The same by another build's program: all that is there is made, started and mounted by it.
    pub fn start_by(bench: &Bench<'_>, program: &Path, plan: &Plan) -> Result<Self> {
        let dir = scratch()?;
        let load = load::compile(&dir)?;
        let at = dir.join("cluster");
        let transport = match plan.transport {
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
        };
        let mut command = Command::new(program);
        command.args(["cluster", "up", "--transport", transport, "--dir"]).arg(&at);
        command.args(["--nodes", &plan.nodes.to_string()]);
        command.args(["--replicas", &plan.replicas.to_string()]);
        let output = command.output().context(program.display())?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // (What it had started it has ended.)
            std::fs::remove_dir_all(&dir).context(dir.display())?;
            return Err(Failure::failed(format!("{}: {said}", program.display()), ""));
        }
        let program = Some(program.to_path_buf());
        Ok(Self { local: Local::open(&at)?, load, dir, keep: bench.keep, program })
    }

    /// The plan of a bench: every node a replica. TCP is plain, as it was in all figures of before; what TLS costs is
    /// a figure of its own.
    pub fn plan(bench: &Bench<'_>) -> Plan {
        let authentication = Authentication::None;
        Plan { transport: bench.transport, authentication, ..Plan::of(bench.replicas) }
    }

    /// A directory beside the cluster, on tmpfs, for baselines.
    pub fn scratch(&self) -> &Path {
        &self.dir
    }

    /// A file on the volume, by its path on `node`.
    pub fn file(&self, node: u32, name: &str) -> String {
        self.local.mount_point(node).join(name).display().to_string()
    }

    /// The load program outside of the volume.
    pub fn bare(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.load);
        command.args(args);
        command
    }

    /// `corbel run` on `node`, for a program to be added; by a library of the same sources as this program.
    pub fn run_command(&self, node: u32) -> Result<Command> {
        if let Some(program) = &self.program {
            let mut command = Command::new(program);
            command.arg("--config").arg(self.local.config_file(node)).args(["run", "--mount"]);
            command.arg(self.local.mount_point(node)).arg("--");
            return Ok(command);
        }
        built::intercept()?;
        self.local.run_command(node)
    }

    /// The load program under `corbel run` on `node`.
    pub fn under_run(&self, node: u32, args: &[&str]) -> Result<Command> {
        let mut command = self.run_command(node)?;
        command.arg(&self.load).args(args);
        Ok(command)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Err(failure) = self.local.down(true) {
            eprintln!("corbel: cleaning up: {failure}");
        }
        if self.keep {
            eprintln!("corbel: left in {}", self.dir.display());
            return;
        }
        self.local.links().remove();
        // Never across a mount that would not go: that would delete files of the volume.
        let mounted =
            self.local.nodes().any(|n| crate::local::is_mount_point(&self.local.mount_point(n)));
        if mounted {
            eprintln!("corbel: {} is still mounted; left as it is", self.dir.display());
        } else if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("corbel: {}: {error}", self.dir.display());
        }
    }
}

/// A new directory in memory.
pub fn scratch() -> Result<PathBuf> {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.subsec_nanos());
    let name = format!("corbel-bench-{}-{nanos:x}", std::process::id());
    let dir = Path::new("/dev/shm").join(name);
    std::fs::create_dir(&dir).context(dir.display())?;
    Ok(dir)
}
