//! `corbel demo` (what `make run` runs): three nodes, real programs that know nothing of Corbel on
//! both paths, then the loss of the primary in mid-write.
//!
//! Every step prints what ran and how long it took, and is checked: a step whose result is wrong
//! ends the demonstration with an error.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use crate::bench::load::{self, figures, number};
use crate::bench::world::World;
use crate::bench::{Bench, failover};
use crate::config::Transport;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::process::wait_until;

/// Arguments of `corbel demo`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  corbel demo\n  corbel demo --tree /usr/include --json")]
pub struct DemoArgs {
    /// Source tree that is copied around (default: the current directory)
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,
    /// Fabric between the nodes
    #[arg(long, default_value = "shm", value_parser = ["shm", "tcp"])]
    transport: String,
    /// Leave the cluster's directory (logs, regions) for inspection
    #[arg(long)]
    keep: bool,
}

const NOTES: &str = include_str!("../../bench/notes.py");

/// A way into the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// LibFS in the program.
    Run,
    /// The kernel and the mount.
    Mount,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Run => "corbel run",
            Self::Mount => "mount",
        }
    }
}

struct Demo<'a> {
    world: World,
    out: &'a Output,
    /// What was measured, for --json.
    figures: Map<String, Value>,
    tree: PathBuf,
}

/// Runs `corbel demo`.
pub fn run(args: &DemoArgs, out: &Output) -> Result<()> {
    crate::signals::catch();
    let transport = if args.transport == "shm" { Transport::Shm } else { Transport::Tcp };
    let bench = Bench { replicas: 3, transport, keep: args.keep, quick: false, from: None, out };
    let tree = match &args.tree {
        Some(tree) => tree.clone(),
        None => std::env::current_dir().context("the current directory")?,
    };
    let begin = Instant::now();
    out.step("== three nodes: coordinator, and hostd + nicfs + mount on each");
    let world = World::start(&bench, World::plan(&bench), &[1, 2, 3])?;
    let mut demo = Demo { world, out, figures: Map::new(), tree };
    demo.programs()?;
    demo.latencies()?;
    let acknowledged = demo.lose_the_primary()?;
    demo.return_of_the_primary(acknowledged)?;
    demo.compare_replicas()?;
    demo.figures.insert("seconds".into(), json!(begin.elapsed().as_secs_f64()));
    let figures = std::mem::take(&mut demo.figures);
    drop(demo);
    out.result(&json!({"demo": "done", "figures": figures}), || {
        println!("== all of it worked, {:.1} s", begin.elapsed().as_secs_f64());
    });
    Ok(())
}

impl Demo<'_> {
    fn at(&self, node: u32, name: &str) -> String {
        self.world.file(node, name)
    }

    /// A shell script on `node`, by `way`, in directory `dir` of the volume.
    fn shell(&self, node: u32, way: Way, script: &str) -> Result<Command> {
        let mut command = match way {
            Way::Run => self.world.run_command(node)?,
            Way::Mount => Command::new("env"),
        };
        // A script that cannot enter the volume ends (-e, and no `cd … &&`), and it begins where
        // nothing is: it must never work on the user's own files instead.
        command.current_dir(self.world.scratch()).args(["sh", "-euc", script]);
        command.env("M", self.world.local.mount_point(node)).env("TREE", &self.tree);
        // Nothing of the user's own settings: the same run for everybody.
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
        for role in ["AUTHOR", "COMMITTER"] {
            command.env(format!("GIT_{role}_NAME"), "Demo");
            command.env(format!("GIT_{role}_EMAIL"), "demo@example.invalid");
        }
        Ok(command)
    }

    /// Runs a step to its end; what it printed.
    fn step(&mut self, what: &str, way: Way, mut command: Command) -> Result<String> {
        let begin = Instant::now();
        let output = command.stdin(Stdio::null()).output().context(load::name(&command))?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        crate::signals::check()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
            return Err(Failure::failed(
                format!("{what} ({}): {}: {text} {said}", way.name(), output.status),
                "corbel demo --keep leaves regions and logs for a look",
            ));
        }
        let last = text.lines().last().unwrap_or("").to_string();
        self.out.step(format!("  {took:>8.0} ms  {:<10}  {what}: {last}", way.name()));
        self.figures.insert(format!("{what} ({}) ms", way.name()), json!(took.round()));
        Ok(text)
    }

    fn programs(&mut self) -> Result<()> {
        self.out.step("== programs that know nothing of Corbel, on node 1");
        for way in [Way::Run, Way::Mount] {
            self.sqlite(way)?;
            self.git(way)?;
            self.tree(way)?;
            self.python(way)?;
        }
        self.out.step("== the same files, seen from node 3");
        let seen =
            self.shell(3, Way::Mount, "cd $M/git-run; git fsck --strict; git log --oneline")?;
        self.step("git fsck, git log", Way::Mount, seen)?;
        Ok(())
    }

    fn sqlite(&mut self, way: Way) -> Result<()> {
        let suffix = suffix(way);
        let script = format!(
            "db=$M/demo-{suffix}.db
             {{ echo 'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE t (n INT, s TEXT);'
               i=0; while [ $i -lt 300 ]; do echo \"INSERT INTO t VALUES ($i, 'row $i');\"; i=$((i+1)); done
             }} | sqlite3 $db >/dev/null
             test \"$(sqlite3 $db 'PRAGMA integrity_check')\" = ok
             sqlite3 $db \"SELECT count(*) || ' transactions' FROM t\""
        );
        let text = self.step("sqlite3, 300 transactions", way, self.shell(1, way, &script)?)?;
        expect(&text, "300 transactions")
    }

    fn git(&mut self, way: Way) -> Result<()> {
        let dir = suffix(way);
        let script = format!(
            "mkdir $M/git-{dir}; cd $M/git-{dir}; git init -q .
             tar -C $TREE --exclude=./target --exclude=./.git --exclude=./fuzz/target -cf - . | tar xf -
             git add -A; git commit -qm first
             echo changed >> README.md; git commit -qam second
             git fsck --strict 2>&1; git status --porcelain
             git log --oneline | wc -l"
        );
        let text =
            self.step("git init, add, commit, log, fsck", way, self.shell(1, way, &script)?)?;
        expect(text.lines().last().unwrap_or(""), "2")
    }

    fn tree(&mut self, way: Way) -> Result<()> {
        let dir = suffix(way);
        let script = format!(
            "mkdir $M/tree-{dir}; cd $M/tree-{dir}
             tar -C $TREE --exclude=./target --exclude=./.git --exclude=./fuzz/target -cf - . > a.tar
             mkdir a; tar -C a -xf a.tar; cp -a a b
             sums() {{ (cd $1 && find . -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum; }}
             test \"$(sums a)\" = \"$(sums b)\"
             (cd a && find . -type f -exec cmp {{}} $TREE/{{}} \\;)
             test -z \"$(find a -newermt 2200-01-01)\"
             find a b -type f | wc -l"
        );
        let text =
            self.step("tar, cp -a, find, sha256sum, cmp", way, self.shell(1, way, &script)?)?;
        match text.parse::<u64>() {
            Ok(files) if files > 0 => Ok(()),
            _ => Err(wrong(&text, "a number of files and no difference")),
        }
    }

    fn python(&mut self, way: Way) -> Result<()> {
        let script = self.world.scratch().join("notes.py");
        std::fs::write(&script, NOTES).context(script.display())?;
        let python = load::python()?;
        let line = format!("{} {} $M/notes-{}", python.display(), script.display(), suffix(way));
        let text = self.step("python script", way, self.shell(1, way, &line)?)?;
        expect(&text, "200 notes written, renamed, listed and read back")
    }

    fn latencies(&mut self) -> Result<()> {
        self.out.step("== latencies, three replicas");
        let path = self.at(1, "latency");
        for (what, args) in [
            ("write 4 KiB", ["write", &path, "4096", "20000"]),
            ("append 4 KiB + fsync", ["append", &path, "4096", "2000"]),
            ("read 4 KiB", ["read", &path, "4096", "20000"]),
        ] {
            let got = figures(self.world.under_run(1, &args)?)?;
            let (p50, p99) = (number(&got, "p50_ns")? / 1e3, number(&got, "p99_ns")? / 1e3);
            self.out.step(format!("  {what:<22} median {p50:>8.2} us   p99 {p99:>8.2} us"));
            self.figures.insert(format!("{what} p50_us"), json!(p50));
        }
        Ok(())
    }

    fn follower(&self, node: u32, seconds: &str) -> Result<failover::Writer> {
        let script = load::sqlite_script(self.world.scratch())?;
        let mut command = self.world.run_command(node)?;
        command.arg(load::python()?).arg(script);
        command.args([&self.at(node, "ledger.db"), "follow", seconds]);
        failover::Writer::start(command)
    }

    /// kill -9 of everything of node 1 while a program writes; the program goes on, on node 2.
    fn lose_the_primary(&mut self) -> Result<u64> {
        self.out.step("== kill -9 of node 1's services, mount and program, in mid-write");
        let mut first = self.follower(1, "60")?;
        first.wait_acks(300, Duration::from_secs(30))?;
        let killed = failover::monotonic();
        self.world.local.signal_node(1, Signal::KILL);
        if let Some(mount) = self.world.local.process(1, "mount") {
            mount.signal(Signal::KILL);
        }
        first.kill();
        let before = failover::highest(&first.finish(Duration::from_secs(2)));
        self.out.step(format!("  {before} transactions were acknowledged"));
        let mut second = self.follower(2, "3")?;
        wait_until("the first transaction on node 2", Duration::from_secs(30), || {
            if second.acks().is_empty() && second.has_ended() {
                second = self.follower(2, "3")?;
            }
            Ok((!second.acks().is_empty()).then_some(()))
        })?;
        let after = second.finish(Duration::from_secs(20));
        let first_ms = after.first().map_or(0, |ack| ack.at.saturating_sub(killed)) as f64 / 1e6;
        self.out.step(format!(
            "  first transaction on node 2 acknowledged {first_ms:.0} ms after the kill"
        ));
        self.figures.insert("failover_ms".into(), json!(first_ms));
        let acknowledged = before.max(failover::highest(&after));
        self.check_ledger(2, acknowledged)?;
        Ok(acknowledged)
    }

    /// Every acknowledged transaction is there, and the database is whole.
    fn check_ledger(&mut self, node: u32, acknowledged: u64) -> Result<()> {
        let script = load::sqlite_script(self.world.scratch())?;
        let mut command = self.world.run_command(node)?;
        command.arg(load::python()?).arg(script).args([&self.at(node, "ledger.db"), "check"]);
        let got = figures(command)?;
        let rows = got["rows"].as_u64().unwrap_or(0);
        if got["integrity"] != "ok" || rows < acknowledged || got["last"] != got["rows"] {
            let message = format!("node {node}: acknowledged {acknowledged}, but there is {got}");
            return Err(Failure::new(Kind::Damaged, message, "this is a bug: please report it"));
        }
        self.out.step(format!(
            "  node {node}: all {acknowledged} acknowledged transactions are there ({rows} rows)"
        ));
        self.figures.insert("lost".into(), json!(0));
        Ok(())
    }

    fn return_of_the_primary(&mut self, acknowledged: u64) -> Result<()> {
        self.out.step("== node 1 comes back and fetches what it missed");
        let begin = Instant::now();
        self.world.local.unmount(1);
        self.world.local.start_node(1)?;
        self.world.local.wait_ready(1, Duration::from_secs(60))?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        self.out.step(format!("  in the chain again after {took:.0} ms"));
        self.figures.insert("return_ms".into(), json!(took));
        self.world.local.mount(1)?;
        self.check_ledger(1, acknowledged)
    }

    /// The files through every mount, then, with the services stopped, the regions themselves.
    fn compare_replicas(&mut self) -> Result<()> {
        self.out.step("== the replicas");
        let script = "cd $M; find . -path ./.corbel -prune -o -type f -print0 | sort -z \
            | xargs -0 sha256sum | sha256sum";
        let mut sums = Vec::new();
        for node in self.world.local.nodes() {
            let command = self.shell(node, Way::Mount, script)?;
            sums.push(self.step(
                &format!("sha256sum of all files, node {node}"),
                Way::Mount,
                command,
            )?);
        }
        if sums.iter().any(|sum| *sum != sums[0]) {
            return Err(wrong(&sums.join(" / "), "the same on every node"));
        }
        self.wait_published()?;
        let ended = self.world.local.down(true)?;
        if let Some(killed) = ended.iter().find(|name| name.ends_with("(killed)")) {
            return Err(Failure::failed(format!("{killed} did not end in time"), "see its log"));
        }
        let regions: Vec<PathBuf> =
            self.world.local.nodes().map(|n| self.world.local.node_dir(n).join("region")).collect();
        let digest = crate::fsck::agree(&regions)?;
        self.out.step(format!("  fsck: {} regions sound, and equal byte for byte", regions.len()));
        self.out.step(format!("  digest {digest:016x}"));
        self.figures.insert("digest".into(), json!(format!("{digest:016x}")));
        Ok(())
    }

    /// Until every node has published all of the stream.
    fn wait_published(&self) -> Result<()> {
        wait_until("every node to publish the whole stream", Duration::from_secs(20), || {
            let mut positions = Vec::new();
            for node in self.world.local.nodes() {
                let said = self.world.local.status(node)?;
                positions.push((said["stream_seq"].as_u64(), said["published"].as_u64()));
            }
            let same = positions.iter().all(|p| p.0 == positions[0].0 && p.0 == p.1);
            Ok(same.then_some(()))
        })
    }
}

fn suffix(way: Way) -> &'static str {
    match way {
        Way::Run => "run",
        Way::Mount => "mount",
    }
}

fn wrong(got: &str, wanted: &str) -> Failure {
    let message = format!("printed {got:?}, expected {wanted}");
    Failure::new(Kind::Damaged, message, "this is a bug: please report it")
}

fn expect(got: &str, wanted: &str) -> Result<()> {
    if got.trim() == wanted { Ok(()) } else { Err(wrong(got, wanted)) }
}
