//! `corbel ublk`: block devices of the local kernel, served over io_uring.
//!
//! What a device is made of is kept beside it ([`records`]), so that a server which is started after another one died knows the device
//! again and takes it over.

mod records;

use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::path::Path;

use block::ublk::abi::{DEPTH_MAX, Info, QUEUES_MAX, flag, state};
use block::ublk::{Config, Control, Error, Server};
use clap::{Args, Subcommand};
use frontend::process::EndingSignals;
use serde_json::json;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::source::{Opener, SourceArgs, Waiting, sources_help};
use crate::units::show_bytes;
use records::{Held, Made, Records, Turn};

/// Arguments of `corbel ublk`.
#[derive(Args, Debug, Clone)]
#[command(
    subcommand_negates_reqs = true,
    after_help = concat!("Examples:\n  corbel ublk volume:/disks/vm.img --size 20GiB       /dev/ublkb0, until SIGTERM; the file is made if it is not there\n  \
        corbel ublk pool:/etc/corbel/vm.pool:disk1 --cache --write-back --id 7\n  \
        corbel ublk list\n  \
        corbel ublk delete 7\n\n\
        A server that was killed leaves its device behind, and what uses it waits. Started again with the same\n\
        source, or with --recover ID, it takes the device over, and nothing has failed. With --write-back, or in\n\
        memory, something would be lost of which nobody knows: then the device goes with its server.\n\n", sources_help!(), "\n\
        It takes root, and ublk_drv of Linux 6.5 or later (modprobe ublk_drv). Elsewhere: corbel nbd.")
)]
pub struct UblkArgs {
    /// Devices that are there
    #[command(subcommand)]
    verb: Option<UblkVerb>,
    /// What to serve
    #[arg(value_name = "SOURCE", required_unless_present = "recover")]
    source: Option<String>,
    /// Take over the device /dev/ublkbID, whose server died, with what it was made of
    #[arg(long, value_name = "ID", conflicts_with_all = ["source", "id", "size", "read_only", "cache", "write_back", "read_ahead", "no_merge", "queues", "depth", "copy"])]
    recover: Option<u32>,
    /// Number of the device: /dev/ublkbID (default: the first that is free)
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    id: Option<u32>,
    /// Hardware queues, each with a thread; no more are made than there are processors
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    queues: u16,
    /// Requests of a queue that are under way at the same time
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=i64::from(DEPTH_MAX)))]
    depth: u16,
    /// Copy the data of requests also where the kernel could do without (file:PATH without a cache, Linux 6.16 and later)
    #[arg(long)]
    copy: bool,
    #[command(flatten)]
    how: SourceArgs,
}

/// Verbs of `corbel ublk`.
#[derive(Subcommand, Debug, Clone)]
enum UblkVerb {
    /// List the devices of ublk
    #[command(after_help = "Example:\n  corbel ublk list --json")]
    List,
    /// Remove a device: its server ends, what was under way is carried out first
    #[command(after_help = "Example:\n  corbel ublk delete 7")]
    Delete {
        /// Number of the device
        id: u32,
        /// Also while it is mounted or otherwise in use: whoever uses it gets errors
        #[arg(long)]
        force: bool,
    },
}

/// Marks of devices that are ours have this above.
const OURS: u64 = (u32::from_le_bytes(*b"crbl") as u64) << 32;

fn is_ours(info: &Info) -> bool {
    info.mark >> 32 == OURS >> 32
}

fn node(id: u32) -> String {
    format!("/dev/ublkb{id}")
}

/// What the driver says, and what to do about it.
fn failure(error: Error) -> Failure {
    let (kind, remedy) = match &error {
        Error::NoDriver => (
            Kind::Environment,
            "load it: modprobe ublk_drv (Linux 6.5 or later with CONFIG_BLK_DEV_UBLK); or serve the same with corbel nbd",
        ),
        Error::NoRight => {
            (Kind::Environment, "run as root (CAP_SYS_ADMIN); or serve the same with corbel nbd")
        }
        Error::NoRing(_) => (
            Kind::Environment,
            "allow io_uring: sysctl kernel.io_uring_disabled=0, and the container's seccomp filter; or serve the same with corbel nbd",
        ),
        Error::TooOld => {
            (Kind::Environment, "use Linux 6.5 or later; or serve the same with corbel nbd")
        }
        Error::Exists(_) => {
            (Kind::Failed, "choose another --id, or none; corbel ublk list shows what is there")
        }
        Error::NotThere(_) => (Kind::Failed, "corbel ublk list shows what is there"),
        Error::Unfit(_) => {
            (Kind::Failed, "serve what the device was made of; or remove it: corbel ublk delete ID")
        }
        Error::System(..) => {
            (Kind::Failed, "see the operating system's reason, and the kernel's log (dmesg)")
        }
    };
    Failure::new(kind, error.to_string(), remedy)
}

/// Runs `corbel ublk`.
pub fn run(global: &Global, out: &Output, args: &UblkArgs) -> Result<()> {
    let serves = args.source.is_some() || args.recover.is_some() || args.id.is_some();
    if args.verb.is_some() && serves {
        let remedy = "list and delete stand alone: corbel ublk list, corbel ublk delete ID";
        return Err(Failure::new(Kind::Usage, "a device to serve, and something else", remedy));
    }
    match &args.verb {
        Some(UblkVerb::List) => list(out),
        Some(UblkVerb::Delete { id, force }) => delete(out, *id, *force),
        None => serve(global, out, args),
    }
}

/// What is to be served, and the device that is there for it.
struct Plan {
    made: Made,
    how: SourceArgs,
    /// The device to take over.
    over: Option<Held>,
    /// Until it is served, nobody else begins to serve the same.
    turn: Option<Turn>,
}

fn serve(global: &Global, out: &Output, args: &UblkArgs) -> Result<()> {
    crate::local::tie();
    // Before the first thread, so that all of them have the signals blocked.
    let signals = EndingSignals::catch().context("catching signals")?;
    let mut control = Control::open().map_err(failure)?;
    // The kernel may write to the device to have memory for us: then we must not wait for that write.
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        log::warn!("ublk: not an I/O flusher ({error}): when memory is short the device may hang");
    }
    let records = Records::open()?;
    let plan = plan(global, args, &mut control, &records)?;
    let opener = Opener::new(global, &plan.how, Waiting::Threads);
    let mut opener = opener.at(plan.made.socket.clone());
    let device = opener.open(&plan.made.source)?;
    let recovered = plan.over.is_some();
    let (server, held) = match plan.over {
        Some(held) => {
            let (id, mark) = (held.id(), plan.made.mark);
            let server = Server::recover(control, device, id, mark).map_err(failure)?;
            // How it is opened may be another way now.
            let put = (*held.made() != plan.made).then(|| records.put(id, &plan.made));
            let held = match put {
                Some(Ok(now)) => now,
                Some(Err(error)) => {
                    log::warn!("ublk: it is known as it was before: {}", error.message);
                    held
                }
                None => held,
            };
            (server, held)
        }
        None => {
            let config = Config {
                id: args.id,
                queues: args.queues,
                depth: args.depth,
                lasting: plan.made.lasts(),
                zero_copy: !args.copy,
                mark: plan.made.mark,
            };
            let mut record = None;
            let added = Server::add(control, device, &config, |id| {
                record.insert(records.put(id, &plan.made)).is_ok()
            });
            match (added, record) {
                (Ok(server), Some(Ok(held))) => (server, held),
                (_, Some(Err(error))) => return Err(error),
                (added, held) => {
                    held.and_then(Result::ok).into_iter().for_each(Held::remove);
                    return Err(added.map_or_else(failure, |_| {
                        Failure::failed("a device without a record", "try again")
                    }));
                }
            }
        }
    };
    drop(plan.turn);
    let info = server.info();
    let (id, size) = (info.id, server.size());
    let zero_copy = info.flags & flag::AUTO_BUF_REG != 0;
    let told = json!({"device": node(id), "id": id, "size": size, "source": plan.made.source, "recovered": recovered,
        "queues": info.queues, "depth": info.depth, "zero_copy": zero_copy});
    let how = if recovered { ", taken over" } else { "" };
    let text = format!("{}: {}, {}{how}", node(id), plan.made.source, show_bytes(size));
    let line = if out.json { told.to_string() } else { text };
    let mut stdout = std::io::stdout();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        // Whoever uses the disk has not asked to hear it.
        log::warn!("ublk: {} is there, which nobody could be told: {error}", node(id));
    }
    let asked = signals.wait_or(server.over()).context("waiting for signals")?;
    if let Some(why) = server.failure() {
        // It stays as it is, for the next server, or goes.
        let remedy = if plan.made.lasts() {
            "start it again with the same source, which takes it over; see the kernel's log (dmesg)"
        } else {
            "its disk goes with it: unmount it, and start it again; see the kernel's log (dmesg)"
        };
        return Err(Failure::failed(format!("{}: {why}", node(id)), remedy));
    }
    if asked && is_used(id) {
        log::warn!("ublk: {} is in use and goes: whoever uses it gets errors", node(id));
    }
    server.stop().map_err(failure)?;
    held.remove();
    opener.report(out);
    Ok(())
}

/// What there is to do: something new, or something to take over.
fn plan(
    global: &Global,
    args: &UblkArgs,
    control: &mut Control,
    records: &Records,
) -> Result<Plan> {
    if let Some(id) = args.recover {
        let info = control.info(id).map_err(failure)?;
        let info = info.ok_or(Error::NotThere(id)).map_err(failure)?;
        let known = || -> Result<Held> {
            let held = records.get(id)?.filter(|held| held.made().mark == info.mark);
            held.ok_or_else(|| {
                let what = format!("{}: not known what it is made of", node(id));
                Failure::failed(what, "remove it: corbel ublk delete ID; and serve its source anew")
            })
        };
        let turn = turn_of(records, known()?.made())?;
        // Who had the turn before may have put another in its place.
        let held = known()?.take(|| served(&node(id), id, Some(&info)))?;
        let made = held.made().clone();
        if !made.lasts() {
            return Err(gone(id, &made.source));
        }
        return Ok(Plan { how: made.how(), made, over: Some(held), turn });
    }
    let source = absolute(args.source.as_deref().unwrap_or_default());
    let socket = match source.starts_with("volume:") {
        true => Some(global.load()?.node.socket),
        false => None,
    };
    let identity = identity(&source, socket.as_deref(), args.how.read_only);
    let drawn = std::hash::RandomState::new().build_hasher().finish();
    let mark = OURS | (drawn & u64::from(u32::MAX));
    let made = Made::new(source, socket, identity, mark, &args.how);
    let turn = turn_of(records, &made)?;
    let mut over = None;
    for held in records.all()? {
        if made.identity.is_none() || held.made().identity != made.identity {
            continue;
        }
        let id = held.id();
        let info = control.info(id).map_err(failure)?;
        let info = info.filter(|info| info.mark == held.made().mark);
        // Also one whose device is gone may have a server that is still at what was written before.
        let held = held.take(|| served(&made.source, id, info.as_ref()))?;
        let Some(info) = info else {
            held.remove();
            continue;
        };
        if info.state == state::DEAD || info.flags & flag::USER_RECOVERY == 0 {
            // It goes with its server, which is gone: nobody can use it any more.
            control.stop(id).and_then(|()| control.delete(id)).map_err(failure)?;
            held.remove();
            continue;
        }
        if args.id.is_some_and(|wanted| wanted != id) {
            let what = format!("{}: it is {} already, whose server died", made.source, node(id));
            return Err(Failure::failed(
                what,
                "leave --id out, or remove that one: corbel ublk delete ID",
            ));
        }
        if !made.lasts() {
            let what =
                format!("{}: it is {} already, which outlives its server", made.source, node(id));
            let remedy =
                "start it without --write-back; or remove that one first: corbel ublk delete ID";
            return Err(Failure::failed(what, remedy));
        }
        over = Some(held);
        break;
    }
    let (made, how) = match &over {
        // The kernel keeps the mark that it had. What was served is there, or it is not what was served: nothing is made.
        Some(held) => {
            (made.marked(held.made().mark), SourceArgs { size: None, ..args.how.clone() })
        }
        None => (made, args.how.clone()),
    };
    Ok(Plan { made, how, over, turn })
}

/// The turn to serve that, if others could serve the same.
fn turn_of(records: &Records, made: &Made) -> Result<Option<Turn>> {
    let taken = || {
        let what = format!("{}: another process begins to serve it at this moment", made.source);
        Failure::failed(what, "corbel ublk list shows what becomes of it; try again")
    };
    made.identity.as_deref().map(|identity| records.turn_of(identity, taken)).transpose()
}

fn served(source: &str, id: u32, info: Option<&Info>) -> Failure {
    let Some(info) = info else {
        let what = format!("{source}: the server of {} is still at its end", node(id));
        return Failure::failed(what, "try again in a moment");
    };
    let what = format!("{source}: it is served already, as {} by process {}", node(id), info.pid);
    Failure::failed(what, "use that one, or end its server first (kill, or corbel ublk delete ID)")
}

fn gone(id: u32, source: &str) -> Failure {
    let what = format!(
        "{}: something of {source} was in the server's memory alone, and is gone with it",
        node(id)
    );
    Failure::failed(what, "remove it: corbel ublk delete ID")
}

/// A source that is the same from every directory: the next server may be started in another one.
fn absolute(source: &str) -> String {
    let whole = |path: &str| match std::path::absolute(path) {
        Ok(path) => path.display().to_string(),
        // What is no path is told by whoever opens it.
        Err(_) => path.to_owned(),
    };
    let (kind, rest) = source.split_once(':').unwrap_or((source, ""));
    match (kind, rest.rsplit_once(':')) {
        ("file", _) => format!("file:{}", whole(rest)),
        ("pool", Some((file, image))) => format!("pool:{}:{image}", whole(file)),
        _ => source.to_owned(),
    }
}

/// What makes two servers serve the same; none where that cannot be: what is in memory goes with its server.
fn identity(source: &str, socket: Option<&Path>, read_only: bool) -> Option<String> {
    // Whatever links lead there. (It may be about to be made.)
    let found = |path: &str| {
        let path = Path::new(path);
        let made = || {
            let (dir, name) = (path.parent()?, path.file_name()?);
            Some(std::fs::canonicalize(dir).ok()?.join(name))
        };
        let found = std::fs::canonicalize(path).ok().or_else(made);
        found.unwrap_or_else(|| path.to_owned()).display().to_string()
    };
    let (kind, rest) = source.split_once(':').unwrap_or((source, ""));
    let what = match (kind, socket, rest.rsplit_once(':')) {
        ("memory", ..) => return None,
        ("volume", Some(socket), _) => format!("volume:{}:{rest}", socket.display()),
        ("file", ..) => format!("file:{}", found(rest)),
        ("pool", _, Some((file, image))) => format!("pool:{}:{image}", found(file)),
        _ => source.to_owned(),
    };
    Some(if read_only { format!("{what} (read only)") } else { what })
}

/// Whether the disk, or a part of it, is mounted here, swapped to, or under another disk. Without asking the disk itself.
fn is_mounted(id: u32) -> bool {
    let disk = std::path::PathBuf::from(format!("/sys/block/ublkb{id}"));
    let parts = std::fs::read_dir(&disk).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut dirs: Vec<_> = parts.filter(|path| path.join("partition").exists()).collect();
    dirs.push(disk);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let (mounts, swaps) = (column(&mounts, 2), column(&swaps, 0));
    dirs.iter().any(|dir| {
        let number = std::fs::read_to_string(dir.join("dev")).unwrap_or_default();
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let held = std::fs::read_dir(dir.join("holders")).is_ok_and(|mut all| all.next().is_some());
        held || mounts.contains(&number.trim()) || swaps.contains(&format!("/dev/{name}").as_str())
    })
}

/// What stands in a column of a table of the kernel's.
fn column(table: &str, at: usize) -> Vec<&str> {
    table.lines().filter_map(|line| line.split_whitespace().nth(at)).collect()
}

/// Whether somebody has mounted the disk, or keeps it for himself otherwise.
fn is_used(id: u32) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    matches!(open(Path::new(&node(id)), flags, Mode::empty()), Err(rustix::io::Errno::BUSY))
}

fn delete(out: &Output, id: u32, force: bool) -> Result<()> {
    let mut control = Control::open().map_err(failure)?;
    let info = control.info(id).map_err(failure)?;
    let info = info.ok_or(Error::NotThere(id)).map_err(failure)?;
    if !is_ours(&info) {
        let what = format!("{}: it was not made by corbel", node(id));
        return Err(Failure::failed(what, "remove it with the tool that made it"));
    }
    // (What has no server answers nothing, an opening included.)
    if !force && (is_mounted(id) || info.state == state::LIVE && is_used(id)) {
        let what = format!("{}: it is in use", node(id));
        return Err(Failure::failed(
            what,
            "unmount it first (findmnt, lsblk); or --force, and whoever uses it gets errors",
        ));
    }
    control.stop(id).map_err(failure)?;
    match control.delete(id) {
        // Its server may be faster.
        Ok(()) | Err(Error::NotThere(_)) => {}
        Err(error) => return Err(failure(error)),
    }
    if let Some(held) = Records::open()?.get(id)?.filter(|held| held.made().mark == info.mark) {
        held.remove();
    }
    out.result(&json!({"id": id, "deleted": true}), || println!("{}: removed", node(id)));
    Ok(())
}

fn list(out: &Output) -> Result<()> {
    let mut control = Control::open().map_err(failure)?;
    let records = Records::open()?;
    let mut devices = Vec::new();
    for id in control.ids().map_err(failure)? {
        // It may go meanwhile.
        let Some(info) = control.info(id).map_err(failure)? else { continue };
        let size = control.params(id).map_or(0, |params| params.basic.sectors.saturating_mul(512));
        let held = records.get(id)?.filter(|held| held.made().mark == info.mark);
        let source = held.map(|held| held.made().source.clone());
        let state = match info.state {
            state::DEAD => "dead",
            state::LIVE => "live",
            state::QUIESCED => "quiesced",
            _ => "failing",
        };
        devices.push(json!({"id": id, "device": node(id), "state": state, "size": size, "pid": info.pid,
            "source": source, "ours": is_ours(&info), "recoverable": info.flags & flag::USER_RECOVERY != 0,
            "zero_copy": info.flags & flag::AUTO_BUF_REG != 0, "queues": info.queues, "depth": info.depth}));
    }
    out.result(&json!({"devices": devices}), || {
        for device in &devices {
            println!(
                "{:<14} {:<9} {:>10}  process {:<8} {}",
                device["device"].as_str().unwrap_or_default(),
                device["state"].as_str().unwrap_or_default(),
                show_bytes(device["size"].as_u64().unwrap_or_default()),
                device["pid"],
                device["source"].as_str().unwrap_or("(not known)"),
            );
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_known_however_it_is_written() {
        let socket = Path::new("/run/a");
        let of = |source: &str| identity(&absolute(source), Some(socket), false);
        let here = std::env::current_dir().unwrap();
        assert_eq!(absolute("file:x.img"), format!("file:{}/x.img", here.display()));
        assert_eq!(absolute("rbd:a/b"), "rbd:a/b");
        assert_eq!(of("file:x.img"), of(&format!("file:{}/x.img", here.display())));
        assert_eq!(of("pool:/etc/../etc/p:a"), of("pool:/etc/p:a"));
        assert_ne!(of("pool:/etc/p:a"), of("pool:/etc/p:b"));
        assert_ne!(of("volume:/a"), identity("volume:/a", Some(Path::new("/run/b")), false));
        assert_ne!(of("file:/a"), identity("file:/a", None, true));
        assert_eq!(of("memory:1MiB"), None);
    }
}
