//! What it costs that the doors are shut. A list of parts, each with figures of its own: [`PARTS`].

use super::load::{figures, number};
use super::steady::turns;
use super::world::World;
use super::{Bench, Measured};
use crate::config::{Authentication, Transport};
use crate::failure::{Context, Result};
use crate::local::Plan;

/// A part: what it is about, and what measures it.
type Part = (&'static str, fn(&Bench<'_>) -> Result<Measured>);

/// What is measured, one after the other.
const PARTS: &[Part] = &[("TLS beside plain TCP", tls)];

/// All parts.
pub fn doors(bench: &Bench<'_>) -> Result<Measured> {
    let mut all = Measured::new();
    for (about, part) in PARTS {
        bench.out.step(format!("  {about}"));
        all.extend(part(bench)?);
    }
    Ok(all)
}

/// The same cluster twice, with certificates and without, both over TCP, in turns.
fn tls(bench: &Bench<'_>) -> Result<Measured> {
    let bytes = if bench.quick { 128 << 20 } else { 256 << 20 };
    let count = (bytes / 16384).to_string();
    let plan =
        |authentication| Plan { transport: Transport::Tcp, authentication, ..World::plan(bench) };
    let plain = World::start(bench, plan(Authentication::None), &[1])?;
    let tls = World::start(bench, plan(Authentication::Certificates), &[1])?;
    let fsync = |world: &World, count: &str| -> Result<f64> {
        let path = world.file(1, "fsync");
        let got = figures(world.under_run(1, &["append", &path, "4096", count])?)?;
        Ok(number(&got, "p50_ns")? / 1e3)
    };
    let seq = |world: &World| -> Result<f64> {
        let path = world.file(1, "seq");
        let got = figures(world.under_run(1, &["seq", &path, "16384", &count])?)?;
        std::fs::remove_file(&path).context(&path)?;
        Ok(bytes as f64 / 1e6 / number(&got, "seconds")?)
    };
    // Memory of the regions comes from the machine when it is first touched.
    for world in [&plain, &tls] {
        fsync(world, "500")?;
        seq(world)?;
    }
    let [plain_fsync, tls_fsync] = turns(|| Ok([fsync(&plain, "3000")?, fsync(&tls, "3000")?]))?;
    let [plain_seq, tls_seq] = turns(|| Ok([seq(&plain)?, seq(&tls)?]))?;
    Ok(vec![
        ("tls_fsync_ratio", tls_fsync / plain_fsync),
        ("tls_seq_ratio", tls_seq / plain_seq),
        ("tcp_fsync_p50_us", plain_fsync),
        ("tls_fsync_p50_us", tls_fsync),
        ("tcp_seq_mb_s", plain_seq),
        ("tls_seq_mb_s", tls_seq),
    ])
}
