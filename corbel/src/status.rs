//! `corbel status`: what a node says about itself, and which processes reach the volume how.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::Result;
use crate::local::Local;
use crate::output::Output;

/// Arguments of `corbel status`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel status                        the node of --config, or the local \
    cluster\n  corbel status --json | jq .epoch"
)]
pub struct StatusArgs {
    /// Show all that the node says, not a summary
    #[arg(long)]
    pub all: bool,
    /// The node behind this socket of hostd, whatever the configuration says
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Runs `corbel status`.
pub fn run(global: &Global, args: &StatusArgs, out: &Output) -> Result<()> {
    if let Some(socket) = &args.socket {
        return behind(socket, args.all, out);
    }
    let config = match &global.config {
        None if Local::open(&Local::default_dir()).is_ok() => {
            return crate::cluster::status(out, &Local::default_dir());
        }
        _ => global.load()?,
    };
    let socket = crate::ask::socket(&crate::serve::run_dir(&config), "nicfs");
    let mut said = crate::ask::ask(&socket, Duration::from_secs(2))?;
    let clients = paths(&said);
    said["durability"] = json!(config.node.durability.word());
    said["promise"] = json!(config.node.durability.promise());
    said["paths"] = json!(clients);
    said["socket"] = json!(config.node.socket);
    out.result(&said, || {
        println!("node {}: {}", config.node.id, line(&said));
        println!(
            "  durability {}: {}",
            config.node.durability.word(),
            config.node.durability.promise()
        );
        println!("  socket {}", config.node.socket.display());
        show(&clients, &said, args.all);
    });
    Ok(())
}

/// The node behind a socket: what it says, without what only its configuration knows.
fn behind(socket: &Path, all: bool, out: &Output) -> Result<()> {
    let dir = socket.parent().unwrap_or(Path::new("."));
    let mut said = crate::ask::ask(&crate::ask::socket(dir, "nicfs"), Duration::from_secs(2))?;
    let clients = paths(&said);
    said["paths"] = json!(clients);
    said["socket"] = json!(socket);
    out.result(&said, || {
        println!("node {}: {}", said["node"], line(&said));
        println!("  socket {}", socket.display());
        show(&clients, &said, all);
    });
    Ok(())
}

/// What somebody has to do, soon.
pub fn warnings(said: &Value) -> impl Iterator<Item = &str> {
    said["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn show(clients: &[User], said: &Value, all: bool) {
    for warning in warnings(said) {
        println!("  warning: {warning}");
    }
    for client in clients {
        println!("  {:>8}  {:<6} {}", client.pid, client.path, client.command);
    }
    if all {
        println!("{said:#}");
    }
}

/// One line about a node, from what it says.
pub fn line(said: &Value) -> String {
    if said.is_null() {
        return "does not answer".into();
    }
    let list = |key: &str| -> String {
        let items = said[key].as_array().into_iter().flatten();
        items.map(Value::to_string).collect::<Vec<_>>().join(" > ")
    };
    let word = |key: &str| said[key].as_str().unwrap_or("?").to_string();
    let number = |key: &str| said[key].as_u64().map_or("?".into(), |n| n.to_string());
    let clients = said["clients"].as_array().map_or(0, Vec::len);
    let waits = if said["too_few_replicas"] == true { ", fsync WAITS" } else { "" };
    let (level, newest) = (said["level"].as_u64(), said["newest_level"].as_u64());
    let older = if level < newest { ", waits for older nodes to be updated" } else { "" };
    let each = |key: &str, line: fn(&Value) -> String| -> String {
        said[key].as_array().into_iter().flatten().map(line).collect()
    };
    let joins = each("joins", join_line) + &each("catching_up", catch_up_line);
    format!(
        "{}, epoch {}, chain {}, stream {}, published {}, {clients} clients{waits}{older}{joins}",
        word("role"),
        number("epoch"),
        list("chain"),
        number("stream_seq"),
        number("published"),
    )
}

/// How far a node is that is being filled.
fn join_line(join: &Value) -> String {
    let number = |key: &str| join[key].as_u64().unwrap_or(0);
    let (done, all, sent) = (number("inodes_done"), number("inodes"), number("sent_bytes"));
    let seconds = join["seconds"].as_f64().unwrap_or(0.0).max(0.001);
    let pace = sent as f64 / seconds / f64::from(1 << 20);
    let node = number("node");
    format!(", fills node {node}: {done} of {all} files, {} MiB sent, {pace:.1} MiB/s", sent >> 20)
}

fn catch_up_line(node: &Value) -> String {
    let number = |key: &str| node[key].as_u64().unwrap_or(0);
    format!(", node {} catches up: {} chunks to come", number("node"), number("chunks_missing"))
}

/// A process that uses the volume.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct User {
    /// Process.
    pub pid: u64,
    /// `run` or `library` (LibFS in the process), `mount` (through the kernel).
    pub path: &'static str,
    /// Its command line.
    pub command: String,
}

fn command_line(pid: u64) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = bytes.split(|b| *b == 0).filter(|w| !w.is_empty());
    let text: Vec<_> = words.map(|w| String::from_utf8_lossy(w).into_owned()).collect();
    (!text.is_empty()).then(|| text.join(" ").chars().take(200).collect())
}

/// Whether the interception library is loaded into a process.
fn is_intercepted(pid: u64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .is_ok_and(|maps| maps.contains("libcorbel_intercept") || maps.contains("libintercept"))
}

/// The processes that use the node: those attached to it, and those with files open on a mount
/// that is served from it.
fn paths(said: &Value) -> Vec<User> {
    let mut users = Vec::new();
    let mut mounts = Vec::new();
    for client in said["clients"].as_array().into_iter().flatten() {
        let Some(pid) = client["pid"].as_u64() else { continue };
        let Some(command) = command_line(pid) else { continue };
        let is_mount = served_mounts(pid, &mut mounts);
        let path = match (is_mount, is_intercepted(pid)) {
            (true, _) => "serves",
            (false, true) => "run",
            (false, false) => "library",
        };
        users.push(User { pid, path, command });
    }
    for pid in processes() {
        if !users.iter().any(|user| user.pid == pid) && has_open(pid, &mounts) {
            let command = command_line(pid).unwrap_or_default();
            users.push(User { pid, path: "mount", command });
        }
    }
    users
}

/// Whether a process serves mounts; their mount points are added to `mounts`.
fn served_mounts(pid: u64, mounts: &mut Vec<PathBuf>) -> bool {
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<&[u8]> = command.split(|b| *b == 0).collect();
    if !words.iter().take(8).any(|word| *word == b"mount") {
        return false;
    }
    let points = words.iter().filter_map(|w| std::str::from_utf8(w).ok()).map(Path::new);
    let points = points.filter(|p| p.is_absolute() && crate::local::is_mount_point(p));
    mounts.extend(points.map(Path::to_path_buf));
    true
}

fn processes() -> Vec<u64> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether a process has a file open, or its working directory, below one of `mounts`. Links are
/// read, never followed: a mount that hangs does not hang this.
fn has_open(pid: u64, mounts: &[PathBuf]) -> bool {
    if mounts.is_empty() {
        return false;
    }
    let below = |link: PathBuf| {
        std::fs::read_link(link).is_ok_and(|at| mounts.iter().any(|mount| at.starts_with(mount)))
    };
    let base = PathBuf::from(format!("/proc/{pid}"));
    let fds = std::fs::read_dir(base.join("fd")).into_iter().flatten().flatten();
    below(base.join("cwd")) || fds.map(|entry| entry.path()).any(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_says_in_one_line() {
        let said = json!({"role": "head", "epoch": 3, "chain": [1, 2], "stream_seq": 9,
            "published": 8, "clients": [{"pid": 1}]});
        let text = line(&said);
        assert_eq!(text, "head, epoch 3, chain 1 > 2, stream 9, published 8, 1 clients");
        let mut fills = said;
        fills["joins"] = json!([{"node": 3, "inodes_done": 5, "inodes": 20, "sent_bytes": 6 << 20, "seconds": 2.0}]);
        let text = line(&fills);
        assert!(
            text.ends_with("clients, fills node 3: 5 of 20 files, 6 MiB sent, 3.0 MiB/s"),
            "{text}"
        );
        fills["catching_up"] = json!([{"node": 4, "chunks_missing": 120}]);
        let text = line(&fills);
        assert!(text.ends_with(" MiB/s, node 4 catches up: 120 chunks to come"), "{text}");
        assert_eq!(line(&Value::Null), "does not answer");
        assert!(line(&json!([])).contains('?'), "a strange answer is no panic");
    }

    #[test]
    fn own_process_has_its_directory_open() {
        let cwd = std::env::current_dir().unwrap();
        assert!(has_open(std::process::id().into(), &[cwd]));
        assert!(!has_open(std::process::id().into(), &["/nonexistent".into()]));
        assert!(command_line(std::process::id().into()).is_some());
    }
}
