//! `corbel scrub`: a node reads all that it holds, compares it with its checksums, and mends what is rotten.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;

/// A look at how far it is.
const LOOK: Duration = Duration::from_millis(100);
/// So long after its end what is rotten may still be on its way from another node.
const MENDING: Duration = Duration::from_secs(30);
/// So long a service that was ended may take to be there again, and say that it is another.
const AWAY: Duration = Duration::from_secs(10);

/// Arguments of `corbel scrub`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel scrub --config node1.toml\n  corbel scrub --socket /run/corbel/corbel.sock --no-wait\n\n\
    Exit codes: 0 all is sound, or was mended from another node and read again; 1 the service ended meanwhile; 5 something\n\
    is rotten that no other member has. It needs the rights of the service. The node goes on serving meanwhile.\n\
    In the background this happens as service.scrub_every says."
)]
pub struct ScrubArgs {
    /// The node behind this socket of hostd, whatever the configuration says
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Do not wait for its end: `corbel status --json` says how far it is
    #[arg(long)]
    no_wait: bool,
}

fn number(said: &Value, key: &str) -> u64 {
    let of = if said[key].is_null() { &said["counters"][key] } else { &said[key] };
    of.as_u64().unwrap_or(0)
}

/// Asks for one; what the node said of itself before.
fn begin(path: &Path) -> Result<Value> {
    let unreachable = |why: &dyn std::fmt::Display| {
        Failure::new(
            Kind::Unreachable,
            format!("{}: {why}", path.display()),
            "is the service running, and yours (or are you root)? `corbel serve`, or `corbel cluster status`",
        )
    };
    let mut stream = UnixStream::connect(path).map_err(|e| unreachable(&e))?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).map_err(|e| unreachable(&e))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).map_err(|e| unreachable(&e))?;
    serde_json::from_slice(&text).map_err(|_| unreachable(&"it does not take a scrub from you"))
}

/// How far the pass is that was asked for.
#[derive(Debug, PartialEq, Eq)]
enum Pass {
    Runs,
    Over,
    /// The service was started anew, and knows nothing of it.
    Restarted,
    /// It runs no more, and did not come to its end.
    Dropped,
}

fn pass(before: &Value, now: &Value) -> Pass {
    if now["incarnation"] != before["incarnation"] {
        Pass::Restarted
    } else if number(now, "scrub_passes") != number(before, "scrub_passes") {
        Pass::Over
    } else if now["scrub_running"] == false {
        Pass::Dropped
    } else {
        Pass::Runs
    }
}

/// Waits for the end: what the node says then, and the milliseconds that it took.
fn wait(status: &Path, before: &Value, out: &Output) -> Result<(Value, u64)> {
    let (begun, mut shown, mut ended) = (Instant::now(), Instant::now(), None);
    let mut heard = Instant::now();
    loop {
        std::thread::sleep(LOOK);
        let now = match crate::ask::ask(status, Duration::from_secs(5)) {
            Ok(now) => now,
            Err(e) if e.kind == Kind::Unreachable && heard.elapsed() < AWAY => continue,
            Err(e) if e.kind == Kind::Unreachable => {
                let node = &before["node"];
                let message = format!("node {node}: its service ended before the scrub did");
                return Err(Failure::failed(message, "start it (`corbel serve`), and ask again"));
            }
            Err(e) => return Err(e),
        };
        heard = Instant::now();
        let why = match pass(before, &now) {
            Pass::Restarted => "its service was started anew",
            Pass::Dropped if ended.is_none() => "what it holds was replaced",
            _ => "",
        };
        if !why.is_empty() {
            let message = format!("node {}: the scrub did not come to its end: {why}", now["node"]);
            return Err(Failure::failed(
                message,
                "`corbel status` says when it serves; ask again then",
            ));
        }
        if pass(before, &now) == Pass::Over {
            ended.get_or_insert(heard);
        }
        let waits = number(&now, "rotten_blocks") > number(&now, "lost_blocks");
        if let Some(end) = ended.filter(|end| !waits || end.elapsed() > MENDING) {
            return Ok((now, end.duration_since(begun).as_millis() as u64));
        }
        if shown.elapsed() > Duration::from_secs(2) {
            shown = Instant::now();
            let mib = number(&now, "scrub_bytes") >> 20;
            out.step(format!("  {mib} MiB read, {} rotten", number(&now, "rotten_blocks")));
        }
    }
}

/// Runs `corbel scrub`.
pub fn run(global: &Global, args: &ScrubArgs, out: &Output) -> Result<()> {
    let dir = match &args.socket {
        Some(socket) => socket.parent().unwrap_or(Path::new(".")).to_path_buf(),
        None => crate::serve::run_dir(&global.load()?),
    };
    let status = crate::ask::socket(&dir, "nicfs");
    let before = begin(&service::nicfs::scrub_socket(&status))?;
    if before["checksums"] == false {
        out.step(
            "  blocks have no checksums here: only the tree is looked at; see `corbel upgrade`",
        );
    }
    let (now, millis) = match args.no_wait {
        true => (before.clone(), 0),
        false => wait(&status, &before, out)?,
    };
    let since = |key: &str| number(&now, key).saturating_sub(number(&before, key));
    let (left, bytes) = (number(&now, "rotten_blocks"), number(&now, "scrub_bytes"));
    let object = json!({
        "node": now["node"], "ended": !args.no_wait, "bytes": bytes, "ms": millis,
        "rotten": since("rotten"), "mended": since("mended"), "left": left, "lost": number(&now, "lost_blocks"),
    });
    if left > 0 && !args.no_wait {
        let message = format!(
            "node {}: {left} blocks are rotten and not mended ({} were)",
            now["node"],
            since("mended")
        );
        let remedy = "start the other members of the chain; `corbel fsck --data` says which files they are of";
        return Err(Failure::new(Kind::Damaged, message, remedy));
    }
    out.result(&object, || match args.no_wait {
        true => println!("node {}: a scrub has begun", now["node"]),
        false => println!(
            "node {}: {} MiB read; {} were rotten, and {} are mended",
            now["node"],
            bytes >> 20,
            since("rotten"),
            since("mended")
        ),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_that_nobody_makes_any_more_is_no_end() {
        let of = |incarnation: u64, passes: u64, running: bool| json!({"incarnation": incarnation, "scrub_passes": passes, "scrub_running": running});
        let before = of(7, 2, true);
        assert_eq!(pass(&before, &of(7, 2, true)), Pass::Runs);
        assert_eq!(pass(&before, &of(7, 3, false)), Pass::Over);
        assert_eq!(pass(&before, &of(7, 3, true)), Pass::Over);
        // Its counters begin at 0 again.
        assert_eq!(pass(&before, &of(8, 0, false)), Pass::Restarted);
        assert_eq!(pass(&before, &of(8, 2, true)), Pass::Restarted);
        assert_eq!(pass(&before, &of(7, 2, false)), Pass::Dropped);
    }
}
