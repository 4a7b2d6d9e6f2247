//! What compression and coalescing save on the wire.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::load::{figures, number};
use super::world::World;
use super::{Bench, Measured};
use crate::config::{Compression, Transport};
use crate::failure::{Context, Failure, Kind, Result};
use crate::links::{Links, Side};
use crate::local::Plan;

/// Bits a second of the links.
const LINE: u64 = 1_000_000_000;
const TURNS: usize = 3;

/// Sequential writes over a chain whose links are limited, of bytes that compress well and of noise, against what one such
/// link takes from a program that sends bytes over TCP and nothing else.
pub fn compress(bench: &Bench<'_>) -> Result<Measured> {
    if !Links::are_possible() {
        let what = "nodes in network namespaces of their own";
        let remedy = "root, unshare and nsenter (util-linux), ip and tc (iproute2) are needed";
        return Err(Failure::new(Kind::Environment, what, remedy));
    }
    let compression = Compression::Auto;
    let plan = Plan { transport: Transport::Tcp, apart: true, compression, ..World::plan(bench) };
    let world = World::start(bench, plan, &[1])?;
    for node in world.local.nodes() {
        world.local.links().limit(node, LINE)?;
    }
    let bytes: usize = if bench.quick { 128 << 20 } else { 512 << 20 };
    let (mut lines, mut well, mut noise) = (Vec::new(), Vec::new(), Vec::new());
    // Memory of the regions comes from the machine when it is first touched.
    mixed(&world, 80, bytes)?;
    for _ in 0..TURNS {
        crate::signals::check()?;
        lines.push(line(&world.local.links(), Duration::from_secs(1))?);
        well.push(mixed(&world, 80, bytes)?);
        noise.push(mixed(&world, 0, bytes / 4)?);
    }
    let sent = |node: u32| -> Result<(f64, f64)> {
        let status = world.local.status(node)?;
        let counter = |key| number(&status["counters"], key);
        Ok((counter("message_bytes")?, counter("message_wire_bytes")?))
    };
    let (raw, wire) = sent(1)?;
    let best = |values: &[f64]| values.iter().copied().fold(f64::NAN, f64::max);
    let line_mb_s = best(&lines);
    Ok(vec![
        ("line_mb_s", line_mb_s),
        ("effective_ratio_80", best(&well) / line_mb_s),
        ("effective_ratio_0", best(&noise) / line_mb_s),
        ("mb_s_80", best(&well)),
        ("mb_s_0", best(&noise)),
        ("head_message_mb", raw / 1e6),
        ("head_wire_mb", wire / 1e6),
    ])
}

/// MB a second that are on every replica when fsync returns.
fn mixed(world: &World, percent: u32, bytes: usize) -> Result<f64> {
    let path = world.file(1, "mixed");
    let (load, count) = (format!("mixed-{percent}"), (bytes / 16384).to_string());
    let got = figures(world.under_run(1, &[&load, &path, "16384", &count])?)?;
    std::fs::remove_file(&path).context(&path)?;
    Ok(bytes as f64 / 1e6 / number(&got, "seconds")?)
}

/// MB a second that a link takes from node 1 to node 2.
fn line(links: &Links, lasts: Duration) -> Result<f64> {
    const PORT: u16 = 9000;
    let address = SocketAddr::new(Side::Node(2).address(), PORT);
    let begun = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let sink = scope.spawn(|| -> Result<(u64, f64)> {
            let listener = links
                .move_to(Side::Node(2))
                .and_then(|()| TcpListener::bind(address).context(address));
            begun.wait();
            let listener = listener?;
            let flags = rustix::event::PollFlags::IN;
            let mut fds = [rustix::event::PollFd::new(&listener, flags)];
            let wait = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
            if rustix::event::poll(&mut fds, Some(&wait)).is_ok_and(|ready| ready == 0) {
                return Err(Failure::failed(format!("{address}: nobody came"), "see --verbose"));
            }
            let (mut stream, _) = listener.accept().context(address)?;
            let (mut buffer, mut sum) = (vec![0; 1 << 18], 0);
            // What comes first may have been let through at once.
            let mut since = None;
            loop {
                let n = stream.read(&mut buffer).context(address)?;
                if n == 0 {
                    break;
                }
                match since {
                    Some(_) => sum += n as u64,
                    None => since = Some(Instant::now()),
                }
            }
            Ok((sum, since.map_or(0.0, |since| since.elapsed().as_secs_f64())))
        });
        let source = scope.spawn(|| -> Result<()> {
            begun.wait();
            links.move_to(Side::Node(1))?;
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(5)).context(address)?;
            let (buffer, begin) = (vec![7; 1 << 18], Instant::now());
            while begin.elapsed() < lasts {
                stream.write_all(&buffer).context(address)?;
            }
            Ok(())
        });
        let panicked = |_| Failure::failed("a thread ended in a panic", "report it");
        source.join().map_err(panicked)??;
        let (sum, seconds) = sink.join().map_err(panicked)??;
        Ok(sum as f64 / 1e6 / seconds)
    })
}

/// Bytes sent to replicas over bytes written: of blocks that are overwritten, and of files that are gone, before the next
/// fsync.
pub fn coalesce(bench: &Bench<'_>) -> Result<Measured> {
    let plan = Plan { compression: Compression::None, ..World::plan(bench) };
    let world = World::start(bench, plan, &[1])?;
    let rounds = if bench.quick { 20 } else { 200 };
    let sent = || -> Result<f64> {
        let status = world.local.status(1)?;
        number(&status["counters"], "message_wire_bytes")
    };
    let share = |load: &str, at: &Path, bytes: usize, each: usize| -> Result<f64> {
        let at = at.display().to_string();
        // Once before: who attaches, and what is made, is sent as well.
        let size = bytes.to_string();
        figures(world.under_run(1, &[load, &at, &size, "1"])?)?;
        let before = sent()?;
        figures(world.under_run(1, &[load, &at, &size, &rounds.to_string()])?)?;
        Ok((sent()? - before) / (rounds * each * bytes) as f64)
    };
    let mount = world.local.mount_point(1);
    Ok(vec![
        ("wire_share_overwrite", share("rewrite", &mount.join("rewritten"), 4096, 128)?),
        ("wire_share_tmpfiles", share("tmp", &mount, 16384, 16)?),
    ])
}
