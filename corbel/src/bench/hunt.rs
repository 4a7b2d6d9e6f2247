//! `corbel bench hunt`: the differential hunter (the crate `hunt`) on a cluster of its own, the services of
//! which are disturbed meanwhile.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use hunt::{Ground, Hunt, Services, View};
use rustix::process::Signal;
use serde_json::json;

use super::built;
use super::world::scratch;
use crate::config::{CAPACITY, Transport};
use crate::failure::{Failure, Kind, Result};
use crate::links::Links;
use crate::local::{Local, Plan};
use crate::output::Output;
use crate::process::{Identity, wait_until};
use crate::units::parse_bytes;

/// Options of `corbel bench hunt`.
#[derive(Args, Debug, Clone)]
pub struct Options {
    /// What is hunted
    #[command(flatten)]
    hunt: hunt::Options,
    /// Nodes, each a member of the chain
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=5))]
    nodes: u32,
    /// Size of the volume
    #[arg(long, default_value = "512MiB", value_parser = parse_bytes)]
    capacity: u64,
    /// Ways into the files: mount, run
    #[arg(long, value_name = "LIST", default_value = "mount,run", value_delimiter = ',', value_parser = ["mount", "run"])]
    views: Vec<String>,
    /// No cluster: a directory of this machine takes its place, to try the hunter itself
    #[arg(long, value_name = "DIR")]
    plain: Option<PathBuf>,
}

/// A service that was killed is there again, and the chain is whole, by then, however busy the machine.
const BACK_WITHIN: Duration = Duration::from_secs(120);
/// For so long nobody loses his place any more for having been silent.
const VERDICT: Duration = Duration::from_secs(1);

/// Runs `corbel bench hunt`; whether nothing was found.
pub fn run(out: &Output, options: &Options) -> Result<bool> {
    crate::signals::catch();
    let wrong = |error: io::Error| {
        Failure::failed(format!("hunt: {error}"), "see the logs of the services")
    };
    let ground = match &options.plain {
        Some(dir) => Ground::plain(dir, options.nodes),
        None => served(options)?,
    };
    // A result is the last line: with --json the only one on standard output.
    let say: fn(&str) =
        if out.json { |text| eprintln!("{text}") } else { |text| println!("{text}") };
    let stopped = || crate::signals::pending().is_some();
    let mut hunt = Hunt::new(&options.hunt, ground, say, stopped).map_err(|error| {
        Failure::new(
            Kind::Environment,
            format!("hunt: {error}"),
            "see --reference, --plain and --lie",
        )
    })?;
    let report = hunt.run().map_err(wrong)?;
    drop(hunt);
    let figures = json!({
        "operations": report.operations, "histories": report.histories, "differences": report.differences,
        "barred": report.barred, "faults": report.faults, "seconds": report.seconds, "seed": report.seed,
    });
    out.result(&json!({"bench": "hunt", "figures": figures}), || {
        println!(
            "{} operations in {} histories ({} ended at a known limit), {} faults, {} differences; {} s, first seed {}",
            report.operations,
            report.histories,
            report.barred,
            report.faults,
            report.differences,
            report.seconds,
            report.seed
        );
    });
    if report.differences == 0 {
        crate::signals::check()?;
    }
    Ok(report.differences == 0)
}

fn served(options: &Options) -> Result<Ground> {
    if !CAPACITY.contains(&options.capacity) {
        return Err(Failure::new(
            Kind::Usage,
            "--capacity is out of range",
            "see corbel cluster up --help",
        ));
    }
    let dir = scratch()?;
    let mut plan = Plan { capacity: options.capacity, ..Plan::of(options.nodes) };
    if options.hunt.faults > 0 && options.nodes > 1 && Links::are_possible() {
        (plan.apart, plan.transport) = (true, Transport::Tcp);
    }
    let local = Local::create(&dir.join("cluster"), plan)?.tied();
    let cluster = Cluster { local, dir };
    let local = &cluster.local;
    local.up(Duration::from_secs(30))?;
    let mut views = Vec::new();
    for node in local.nodes() {
        let root = local.mount(node)?;
        let command = local.run_command(node)?;
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let prefix: Vec<OsString> = words.map(OsString::from).collect();
        let has = |view: &str| options.views.iter().any(|wanted| wanted == view);
        if has("mount") {
            let (name, root) = (format!("m{node}"), root.clone());
            views.push(View { name, node, root, prefix: Vec::new() });
        }
        if has("run") {
            built::intercept()?;
            views.push(View { name: format!("r{node}"), node, root, prefix });
        }
    }
    Ok(Ground::served(views, Arc::new(cluster)))
}

/// The cluster of a hunt.
#[derive(Debug)]
struct Cluster {
    local: Local,
    dir: PathBuf,
}

impl Cluster {
    fn service(&self, node: u32, name: &str) -> Result<Identity> {
        wait_until(&format!("{name} of node {node} to run"), BACK_WITHIN, || {
            Ok(self.local.process(node, name))
        })
    }

    /// A process hangs for a while.
    fn stop(process: Identity, ms: u64) {
        process.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(ms));
        process.signal(Signal::CONT);
    }

    fn bring(&self, words: &[&str]) -> Result<()> {
        let unknown = || Failure::new(Kind::Usage, format!("no fault: {}", words.join(" ")), "");
        let number = |word: &str| word.parse::<u64>().map_err(|_| unknown());
        let node = |word: &str| {
            let node = word.parse().map_err(|_| unknown())?;
            if self.local.nodes().contains(&node) { Ok(node) } else { Err(unknown()) }
        };
        match words {
            [name @ ("nicfs" | "hostd"), n] => {
                let n = node(n)?;
                let old = self.service(n, name)?;
                old.signal(Signal::KILL);
                wait_until(&format!("{name} of node {n} to come back"), BACK_WITHIN, || {
                    Ok(self.local.process(n, name).filter(|new| *new != old))
                })?;
            }
            ["stop", n, name @ ("nicfs" | "hostd"), ms] => {
                Self::stop(self.service(node(n)?, name)?, number(ms)?);
            }
            ["cut", n, ms] if self.local.is_apart() => {
                let (n, links) = (node(n)?, self.local.links());
                links.set(n, false)?;
                std::thread::sleep(Duration::from_millis(number(ms)?));
                links.set(n, true)?;
            }
            // A script of a cluster that could: as near as it gets.
            ["cut", n, ms] => Self::stop(self.service(node(n)?, "nicfs")?, number(ms)?),
            ["coordinator", ms] => {
                let coordinator = self.local.coordinator().ok_or_else(unknown)?;
                Self::stop(coordinator, number(ms)?);
            }
            [how @ ("term" | "node"), n] => {
                let n = node(n)?;
                let signal = if *how == "term" { Signal::TERM } else { Signal::KILL };
                // Until the last thread is gone the region is in use.
                let reached = self.local.signal_node(n, signal);
                if !reached.iter().all(|process| process.wait_gone(BACK_WITHIN)) {
                    return Err(Failure::new(Kind::Timeout, format!("node {n} does not end"), ""));
                }
                self.local.start_node(n)?;
            }
            _ => return Err(unknown()),
        }
        let ready = || self.local.nodes().try_for_each(|n| self.local.wait_ready(n, BACK_WITHIN));
        ready()?;
        if matches!(words, ["cut" | "stop" | "coordinator", ..]) {
            self.await_verdict()?;
            ready()?;
        }
        Ok(())
    }

    /// Whoever was silent for a while is told on later, and may lose his place when all looks well again: what is done
    /// until then may be lost. So the epoch has to stay for longer than that takes.
    fn await_verdict(&self) -> Result<()> {
        // Who joins anew says nothing for a moment.
        let epoch = || self.local.nodes().filter_map(|node| self.local.epoch(node).ok()).max();
        let (mut seen, mut since) = (epoch(), Instant::now());
        let end = since + BACK_WITHIN;
        while since.elapsed() < VERDICT && Instant::now() < end {
            crate::signals::check()?;
            std::thread::sleep(VERDICT / 10);
            let now = epoch();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
        }
        Ok(())
    }
}

impl Services for Cluster {
    fn fault(&self, words: &[&str]) -> io::Result<()> {
        self.bring(words).map_err(|failure| {
            io::Error::other(format!("fault {}: {}", words.join(" "), failure.message))
        })
    }

    fn epoch(&self) -> io::Result<u64> {
        let epochs = self.local.nodes().map(|node| self.local.epoch(node));
        let epochs: Result<Vec<u64>> = epochs.collect();
        let epochs = epochs.map_err(|failure| io::Error::other(failure.message))?;
        Ok(epochs.into_iter().max().unwrap_or(0))
    }

    fn can_cut(&self) -> bool {
        self.local.is_apart()
    }

    fn keep_logs(&self, to: &Path) {
        for node in self.local.nodes() {
            for log in ["log", "mount.log"] {
                let from = self.local.node_dir(node).join("run").join(log);
                let _ = std::fs::copy(from, to.join(format!("n{node}-{log}")));
            }
        }
        let _ = std::fs::copy(self.local.dir().join("coordinator/log"), to.join("coordinator"));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(failure) = self.local.down(false) {
            eprintln!("corbel: cleaning up: {failure}");
        }
        // Only if nothing is left in it: what is mounted there would go with it.
        let _ = std::fs::remove_dir(&self.dir);
    }
}
