//! What a fault costs a program that keeps writing: the primary node is killed with the program,
//! a replica is killed, a replica hangs. Every acknowledged record must be there afterwards.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::load::{figures, number};
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Result};
use crate::process::wait_until;

/// A record that was acknowledged: its number, and when (monotonic nanoseconds).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// Number.
    pub number: u64,
    /// When fsync had returned.
    pub at: u64,
}

/// So often the lines of a writing program are read; a pipe holds those of 50 ms.
const READ_AGAIN: Duration = Duration::from_millis(5);

/// A program that appends numbered records and says each acknowledgement on a line.
#[derive(Debug)]
pub struct Writer {
    child: Child,
    acks: Arc<Mutex<Vec<Ack>>>,
    reader: std::thread::JoinHandle<()>,
}

/// Monotonic nanoseconds, on the clock of the load program.
pub fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

fn read_ack(line: &str) -> Option<Ack> {
    let mut words = line.split_whitespace();
    Some(Ack { number: words.next()?.parse().ok()?, at: words.next()?.parse().ok()? })
}

impl Writer {
    /// Starts it.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        let mut child = command.spawn().context("the writing program")?;
        let acks = Arc::new(Mutex::new(Vec::new()));
        let (shared, stdout) = (Arc::clone(&acks), child.stdout.take());
        let collect = move || {
            let mut out = BufReader::with_capacity(64 << 10, stdout.expect("piped above"));
            let mut line = String::new();
            while out.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                if let (Some(ack), Ok(mut acks)) = (read_ack(&line), shared.lock()) {
                    acks.push(ack);
                }
                line.clear();
                if out.buffer().is_empty() {
                    // Not woken by each line: that would take the processor from those who are measured.
                    std::thread::sleep(READ_AGAIN);
                }
            }
        };
        Ok(Self { child, acks, reader: std::thread::spawn(collect) })
    }

    /// What was acknowledged so far.
    pub fn acks(&self) -> Vec<Ack> {
        self.acks.lock().map(|acks| acks.clone()).unwrap_or_default()
    }

    /// Waits for the first acknowledgements.
    pub fn wait_acks(&mut self, count: usize, limit: Duration) -> Result<()> {
        wait_until(&format!("{count} acknowledged records"), limit, || {
            if self.acks().len() >= count {
                return Ok(Some(()));
            }
            match self.child.try_wait().context("the writing program")? {
                None => Ok(None),
                Some(status) => Err(Failure::failed(
                    format!("the writing program ended ({status}): {}", self.said()),
                    "see the logs of the services; --keep leaves them",
                )),
            }
        })
    }

    /// Whether it runs no longer.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn said(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut stderr, &mut text);
        }
        text.trim().to_string()
    }

    /// kill -9 of it and of what it started (`corbel run` stays as the parent of the program).
    pub fn kill(&mut self) {
        // While the child has not been waited for, the number cannot mean another group.
        if !self.has_ended() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }

    /// Waits for its end, at most `limit`; every acknowledgement.
    pub fn finish(mut self, limit: Duration) -> Vec<Ack> {
        let end = Instant::now() + limit;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.end();
        self.acks()
    }

    fn end(&mut self) {
        self.kill();
        let _ = self.child.wait();
        // What it had said is in the pipe and is read at once; but a child of the program may hold
        // the other end open for longer than this.
        let end = Instant::now() + Duration::from_millis(500);
        while !self.reader.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Longest pause between acknowledgements after `since`, in milliseconds.
fn longest_stall(acks: &[Ack], since: u64) -> f64 {
    let mut last = since;
    let mut longest = 0;
    for ack in acks.iter().filter(|ack| ack.at > since) {
        longest = longest.max(ack.at - last);
        last = ack.at;
    }
    longest as f64 / 1e6
}

/// Highest acknowledged number.
pub fn highest(acks: &[Ack]) -> u64 {
    acks.iter().map(|ack| ack.number).max().unwrap_or(0)
}

/// Records of `path` as another node sees them: acknowledged and not there, or damaged.
fn lost(world: &World, node: u32, path: &str, acknowledged: u64) -> Result<f64> {
    let seen = figures(world.under_run(node, &["verify", path])?)?;
    Ok((acknowledged as f64 - number(&seen, "records")?).max(0.0))
}

const RECORDS: &str = "1000000";

/// Lets the writer run until the cluster is in its ordinary state: for the first 1.5 s after its
/// own start the coordinator evicts nobody (everybody's heartbeats may still be on their way).
fn settle(writer: &mut Writer) -> Result<()> {
    let begin = Instant::now();
    writer.wait_acks(500, Duration::from_secs(20))?;
    while begin.elapsed() < Duration::from_secs(3) {
        crate::signals::check()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn writer(world: &World, node: u32, seconds: &str) -> Result<Writer> {
    let path = world.file(node, "records");
    Writer::start(world.under_run(node, &["records", &path, RECORDS, seconds])?)
}

/// detect, first write, lost.
fn primary(bench: &Bench<'_>) -> Result<(f64, f64, f64)> {
    let world = World::start(bench, World::plan(bench), &[1, 2, 3])?;
    let mut first = writer(&world, 1, "60")?;
    settle(&mut first)?;
    let before = world.local.epoch(2)?;
    let killed = monotonic();
    world.local.signal_node(1, Signal::KILL);
    first.kill();
    let acked = first.finish(Duration::from_secs(2));
    let mut second = writer(&world, 2, "1")?;
    let mut detected = None;
    wait_until("the first write on a survivor", Duration::from_secs(30), || {
        if detected.is_none() && world.local.epoch(2).is_ok_and(|epoch| epoch > before) {
            detected = Some(monotonic());
        }
        // Started again when it was refused, as whoever watches a program does.
        if second.acks().is_empty() && second.has_ended() {
            second = writer(&world, 2, "1")?;
        }
        Ok((!second.acks().is_empty() && detected.is_some()).then_some(()))
    })?;
    let after = second.finish(Duration::from_secs(10));
    let first_write = after.first().map_or(killed, |ack| ack.at);
    let path = world.file(3, "records");
    let lost = lost(&world, 3, &path, highest(&acked).max(highest(&after)))?;
    let ms = |at: u64| at.saturating_sub(killed) as f64 / 1e6;
    Ok((ms(detected.unwrap_or(killed)), ms(first_write), lost))
}

/// stall, lost.
fn replica(bench: &Bench<'_>, signal: Signal) -> Result<(f64, f64)> {
    let world = World::start(bench, World::plan(bench), &[1, 2])?;
    let victim = bench.replicas;
    let mut running = writer(&world, 1, "8")?;
    settle(&mut running)?;
    let since = monotonic();
    world.local.signal_node(victim, signal);
    let acks = running.finish(Duration::from_secs(40));
    let stall = match acks.iter().any(|ack| ack.at > since) {
        true => longest_stall(&acks, since),
        false => (monotonic() - since) as f64 / 1e6,
    };
    let path = world.file(2, "records");
    Ok((stall, lost(&world, 2, &path, highest(&acks))?))
}

/// The bench.
pub fn failover(bench: &Bench<'_>) -> Result<Measured> {
    if bench.replicas < 3 {
        return Err(Failure::new(
            crate::failure::Kind::Usage,
            format!("failover with {} replicas", bench.replicas),
            "it kills one and looks from another: --replicas 3 or more",
        ));
    }
    let (detect, first_write, lost_primary) = primary(bench)?;
    let (kill_stall, lost_kill) = replica(bench, Signal::KILL)?;
    let (hang_stall, lost_hang) = replica(bench, Signal::STOP)?;
    Ok(vec![
        ("detect_ms", detect),
        ("first_write_ms", first_write),
        ("replica_kill_stall_ms", kill_stall),
        ("replica_hang_stall_ms", hang_stall),
        ("lost", lost_primary + lost_kill + lost_hang),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_and_acknowledgements() {
        let acks: Vec<Ack> = [(1, 10), (2, 20), (3, 2_000_000), (4, 2_000_010)]
            .iter()
            .map(|(number, at)| Ack { number: *number, at: *at })
            .collect();
        assert_eq!(longest_stall(&acks, 15), (2_000_000 - 20) as f64 / 1e6);
        assert_eq!(longest_stall(&acks, 1_999_999), 10.0 / 1e6);
        assert_eq!(highest(&acks), 4);
        assert_eq!(read_ack("7 123"), Some(Ack { number: 7, at: 123 }));
        assert_eq!(read_ack("start 0 5"), None);
        assert_eq!(read_ack(""), None);
    }

    #[test]
    fn a_writer_is_followed_and_killed() {
        let mut sh = Command::new("sh");
        sh.args(["-c", "echo start 0 1; echo 1 10; echo 2 20; sleep 30"]);
        let mut writer = Writer::start(sh).unwrap();
        writer.wait_acks(2, Duration::from_secs(10)).unwrap();
        assert!(writer.wait_acks(3, Duration::from_millis(20)).is_err());
        let begin = Instant::now();
        writer.kill();
        assert_eq!(highest(&writer.finish(Duration::from_secs(5))), 2);
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}
