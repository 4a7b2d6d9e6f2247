//! `corbel snapshot`: states of a directory that stay, by hand and by a policy.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use base::{Errno, InodeId};
use clap::{Args, Subcommand};
use client::fs::{Attr, SnapshotRecord};
use client::path::{Found, Walked, walk};
use serde_json::{Value, json};
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time};

use crate::cli::Global;
use crate::clock::rfc3339;
use crate::copy::{self, Copier, Made, Wrong};
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;
use crate::volume::Volume;

/// Bytes of the blocks that are counted.
const BLOCK: u64 = storage::limits::BLOCK_BYTES;
/// Bytes of a name that the name beside it has.
const BESIDE_MAX: usize = 200;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Arguments of `corbel snapshot`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  corbel snapshot create before-upgrade\n  \
    corbel snapshot create a-monday --dir /projects/a\n  corbel snapshot list\n  \
    corbel snapshot delete before-upgrade a-monday\n  \
    corbel snapshot policy --keep-hourly 24 --keep-daily 7      for a timer, every hour\n  \
    ls MNT/.corbel/snapshots/before-upgrade             what was there then\n  \
    corbel mount /mnt/then -o snapshot=before-upgrade\n\nPaths are those of the volume: / is its root. A \
    snapshot is made at one moment for all nodes,\nand takes space for what changes afterwards only. Every user reads in it \
    what it might read\nthen; nobody changes it. The super-user makes and deletes snapshots.")]
pub struct SnapshotArgs {
    /// What to do
    #[command(subcommand)]
    pub verb: SnapshotVerb,
    /// Socket of the local node, if it is not the configuration's
    #[arg(long, global = true, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// Verbs of `corbel snapshot`.
#[derive(Subcommand, Debug)]
pub enum SnapshotVerb {
    /// Keep a directory as it is now under a name
    Create {
        /// Name, of at most 255 bytes and without a slash
        name: OsString,
        /// The directory, by its path in the volume
        #[arg(long, value_name = "PATH", default_value = "/")]
        dir: PathBuf,
    },
    /// Show the snapshots: when each was made, of what, and what space is free once it alone is deleted
    List,
    /// Delete snapshots
    Delete {
        /// Their names
        #[arg(required = true)]
        names: Vec<OsString>,
    },
    /// Make a copy of what a snapshot shows that can be changed: its content is shared
    Clone(CloneArgs),
    /// Put a file or a directory of a snapshot back to where it was
    Restore(RestoreArgs),
    /// Make a snapshot if it is time for one, and delete those of this policy that it does not keep
    Policy(Policy),
}

/// What is copied, and where to.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Example:\n  corbel snapshot clone before-upgrade /try-again\n  \
    corbel snapshot clone before-upgrade --path projects/a /projects/a-then\n\nFiles share their blocks with the \
    snapshot: nothing is copied, and space is taken for what is changed later. Where other\npeople could read a file \
    than may read the new one (its directory lets in fewer, or it has another owner) it is\ncopied. Owner, mode, \
    times, attributes, access lists, holes and hard links within it are kept; who is not the super-user\nowns what he \
    makes. It is made beside, as .corbel-clone-NAME, and has its name when it is complete.")]
pub struct CloneArgs {
    /// Name of the snapshot
    pub name: OsString,
    /// The new directory, by its path in the volume
    pub target: PathBuf,
    /// A directory in what the snapshot shows, instead of all of it
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub path: PathBuf,
}

/// What is put back.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Example:\n  corbel snapshot restore before-upgrade projects/a/report\n  \
    corbel snapshot restore --force before-upgrade projects/a\n\nWhat is there now is replaced only with --force, all \
    at once, when what comes back is complete; it is then removed.\nThe directory that has it must be there.")]
pub struct RestoreArgs {
    /// Name of the snapshot
    pub name: OsString,
    /// A file or directory, by its path in what the snapshot shows
    pub path: PathBuf,
    /// Replace what is there, and remove it
    #[arg(long)]
    pub force: bool,
}

/// Which snapshots stay.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = "Example, as root, in crontab(5):\n  0 * * * * corbel snapshot policy --keep-hourly 24 \
    --keep-daily 7\n\nOne snapshot is made in each hour (in each day, if none are kept by the hour), at the first call in it: \
    to\ncall it again does nothing. Its name is the prefix and the time, as in auto-2026-11-28T11-00-05Z. Of the \
    last\nhours and days that have any the newest one stays; the others with such names, of the same directory, \
    are\ndeleted. Others are never touched. Hours and days are those of UTC."
)]
pub struct Policy {
    /// Keep the newest one of each of so many hours
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub keep_hourly: usize,
    /// Keep the newest one of each of so many days
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub keep_daily: usize,
    /// The directory, by its path in the volume
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub dir: PathBuf,
    /// What the names begin with: each policy of a directory has its own
    #[arg(long, value_name = "TEXT", default_value = "auto")]
    pub prefix: String,
    /// Say what would be made and deleted, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Where none can be made.
pub const UNSUPPORTED: &str = "only volumes have snapshots, not the back ends dir: and null: (while a volume's nodes are being updated, new ones wait for \
     the last: corbel status says so)";

fn failed(what: impl std::fmt::Display, error: Errno) -> Failure {
    let remedy = match error {
        Errno::PERM => "only the super-user makes and deletes snapshots",
        Errno::EXIST => "choose another name; corbel snapshot list has those that are taken",
        Errno::NOENT => {
            "corbel snapshot list has the names; paths are those of the volume: / is its root"
        }
        Errno::OPNOTSUPP => UNSUPPORTED,
        Errno::NOSPC => "make room: corbel snapshot list has what each takes",
        Errno::BUSY => {
            "who may come to the directory has just changed, and is being noted in all that is below: try again in a moment"
        }
        Errno::MLINK => "delete some: a volume has no more of them",
        Errno::INVAL | Errno::NAMETOOLONG => {
            "give a name of 1 to 255 bytes, without a slash, that is not . or .. and does not begin with .join-"
        }
        _ => "corbel status shows how the node is",
    };
    Failure::failed(format!("{what}: {error}"), remedy)
}

/// A snapshot's name for people.
fn named(name: &[u8]) -> String {
    format!("snapshot {}", String::from_utf8_lossy(name))
}

/// All snapshots, from the oldest on.
fn all(volume: &Volume) -> Result<Vec<SnapshotRecord>> {
    volume.snapshots().map_err(|e| failed("listing snapshots", e))
}

fn directory(volume: &Volume, path: &Path) -> Result<InodeId> {
    volume.at(path).map_err(|e| failed(path.display(), e))
}

/// Makes one, and returns when every member has it.
fn make(volume: &Volume, dir: InodeId, name: &[u8]) -> std::result::Result<(), Errno> {
    volume.fs.make_snapshot(&volume.caller(), dir, name)?;
    volume.fs.fsync_inode(&volume.caller(), InodeId::ROOT)
}

/// The name that a policy gives to what it makes then.
fn stamped(prefix: &str, seconds: i64) -> String {
    let nanos = u64::try_from(seconds).unwrap_or(0).saturating_mul(1_000_000_000);
    format!("{prefix}-{}", rfc3339(nanos).replace(':', "-"))
}

/// When a policy made the snapshot of that name, if it did.
fn stamp(prefix: &str, name: &[u8]) -> Option<i64> {
    let name = std::str::from_utf8(name).ok()?;
    let text = name.strip_prefix(prefix)?.strip_prefix('-')?;
    let fields: Vec<&str> = text.strip_suffix('Z')?.split(['-', 'T']).collect();
    let [year, month, day, hour, minute, second] = fields.as_slice() else { return None };
    let small = |text: &str| text.parse::<u8>().ok();
    let month = Month::try_from(small(month)?).ok()?;
    let date = Date::from_calendar_date(year.parse().ok()?, month, small(day)?).ok()?;
    let time = Time::from_hms(small(hour)?, small(minute)?, small(second)?).ok()?;
    let at = PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp();
    // One spelling a moment.
    (stamped(prefix, at) == name).then_some(at)
}

/// Adds the newest moment of each of the last `count` periods that have any.
fn keep(newest_first: &[i64], period: i64, count: usize, kept: &mut Vec<i64>) {
    let of = |at: &i64| at.div_euclid(period);
    let periods = newest_first.chunk_by(|a, b| of(a) == of(b));
    kept.extend(periods.take(count).filter_map(|one| one.first()));
}

impl Policy {
    /// In how many seconds one is made.
    const fn period(&self) -> i64 {
        if self.keep_hourly > 0 { HOUR } else { DAY }
    }

    /// Whether it is time for one, of a policy that has made these.
    fn is_due(&self, made: &[i64], now: i64) -> bool {
        let this = now.div_euclid(self.period());
        // A clock that was set back makes no more of them meanwhile.
        made.iter().all(|at| at.div_euclid(self.period()) < this)
    }

    /// Which of these stay.
    fn kept(&self, made: &[i64]) -> Vec<i64> {
        let mut newest_first = made.to_vec();
        newest_first.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        let mut kept = Vec::new();
        keep(&newest_first, HOUR, self.keep_hourly, &mut kept);
        keep(&newest_first, DAY, self.keep_daily, &mut kept);
        kept
    }
}

fn create(volume: &Volume, name: &[u8], dir: &Path, out: &Output) -> Result<()> {
    let ino = directory(volume, dir)?;
    make(volume, ino, name).map_err(|e| failed(named(name), e))?;
    let made = json!({"created": String::from_utf8_lossy(name), "dir": dir.display().to_string()});
    out.result(&made, || println!("{}: {} as it is now", named(name), dir.display()));
    Ok(())
}

fn list(volume: &Volume, out: &Output) -> Result<()> {
    let mut paths: HashMap<InodeId, Option<String>> = HashMap::new();
    let mut said = Vec::new();
    for one in all(volume)? {
        // By its name of today; one that is gone has none.
        let path = paths.entry(one.dir).or_insert_with(|| volume.path(one.dir));
        said.push(json!({
            "name": String::from_utf8_lossy(&one.name),
            "number": one.number,
            "time": rfc3339(one.time),
            "dir": path,
            "inode": one.dir.0,
            "inodes": one.inodes,
            "bytes": one.own_blocks.saturating_mul(BLOCK),
        }));
    }
    out.result(&json!({"snapshots": said}), || said.iter().for_each(print));
    Ok(())
}

fn print(said: &Value) {
    let text = |field: &str| said[field].as_str().unwrap_or_default().to_string();
    let dir = match &said["dir"] {
        Value::String(path) => path.clone(),
        _ => format!("inode {} (gone)", said["inode"]),
    };
    println!(
        "{:<32} {} {:>16} bytes  {dir}",
        text("name"),
        text("time"),
        said["bytes"].to_string()
    );
}

fn delete(volume: &Volume, names: &[Vec<u8>], out: &Output) -> Result<()> {
    let mut done: Vec<String> = Vec::new();
    for name in names {
        volume.fs.drop_snapshot(&volume.caller(), name).map_err(|e| {
            let before = match done.as_slice() {
                [] => String::new(),
                done => format!(" (deleted before it: {})", done.join(", ")),
            };
            failed(format!("{}{before}", named(name)), e)
        })?;
        done.push(String::from_utf8_lossy(name).into_owned());
    }
    let caller = volume.caller();
    volume.fs.fsync_inode(&caller, InodeId::ROOT).map_err(|e| failed("deleting snapshots", e))?;
    out.result(&json!({"deleted": done}), || {
        done.iter().for_each(|name| println!("snapshot {name}: deleted"));
    });
    Ok(())
}

/// Makes and deletes what is due. Another node may do the same at the same time: what is done already is.
fn apply(volume: &Volume, policy: &Policy, now: i64, out: &Output) -> Result<()> {
    if policy.keep_hourly == 0 && policy.keep_daily == 0 {
        let remedy = "give --keep-hourly, --keep-daily or both; corbel snapshot delete deletes";
        return Err(Failure::new(Kind::Usage, "the policy keeps no snapshot", remedy));
    }
    if policy.prefix.is_empty() || policy.prefix.contains('/') {
        let message = format!("prefix {:?}: no name begins so", policy.prefix);
        return Err(Failure::new(Kind::Usage, message, "give a word without a slash"));
    }
    let dir = directory(volume, &policy.dir)?;
    let ours = |one: &SnapshotRecord| stamp(&policy.prefix, &one.name).filter(|_| one.dir == dir);
    let mut made: Vec<i64> = all(volume)?.iter().filter_map(ours).collect();
    let (mut created, mut refused) = (None, None);
    if policy.is_due(&made, now) {
        let name = stamped(&policy.prefix, now);
        let done = match policy.dry_run {
            true => Ok(()),
            false => make(volume, dir, name.as_bytes()),
        };
        match done {
            Ok(()) => {
                made.push(now);
                created = Some(name);
            }
            Err(Errno::EXIST) => made.push(now),
            // What is deleted below may be what it takes.
            Err(error) => refused = Some(failed(named(name.as_bytes()), error)),
        }
    }
    let kept = policy.kept(&made);
    let mut deleted = Vec::new();
    for at in made.iter().filter(|at| !kept.contains(at)) {
        let name = stamped(&policy.prefix, *at);
        if !policy.dry_run {
            match volume.fs.drop_snapshot(&volume.caller(), name.as_bytes()) {
                Ok(()) => {}
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(failed(named(name.as_bytes()), e)),
            }
        }
        deleted.push(name);
    }
    if !deleted.is_empty() && !policy.dry_run {
        let caller = volume.caller();
        let synced = volume.fs.fsync_inode(&caller, InodeId::ROOT);
        synced.map_err(|e| failed("deleting snapshots", e))?;
    }
    if let Some(failure) = refused {
        return Err(failure);
    }
    let kept: Vec<String> = {
        let mut kept: Vec<i64> = made.into_iter().filter(|at| kept.contains(at)).collect();
        kept.sort_unstable();
        kept.iter().map(|at| stamped(&policy.prefix, *at)).collect()
    };
    let said =
        json!({"created": created, "deleted": deleted, "kept": kept, "done": !policy.dry_run});
    out.result(&said, || {
        let would = if policy.dry_run { "would be " } else { "" };
        created.iter().for_each(|name| println!("snapshot {name}: {would}created"));
        deleted.iter().for_each(|name| println!("snapshot {name}: {would}deleted"));
        println!("{} kept", kept.len());
    });
    Ok(())
}

/// What a path leads to, from a directory on.
fn walked(
    volume: &Volume,
    start: InodeId,
    path: &Path,
    follow: bool,
) -> std::result::Result<Found, Errno> {
    let path = path.as_os_str().as_bytes();
    let path = path.iter().position(|byte| *byte != b'/').map_or(&b"."[..], |at| &path[at..]);
    match walk(&*volume.fs, &volume.caller(), start, path, follow)? {
        Walked::At(found) => Ok(found),
        Walked::Outside(_) => Err(Errno::XDEV),
    }
}

/// A name beside another, for what is not complete.
fn beside(name: &[u8]) -> Vec<u8> {
    [b".corbel-clone-", &name[..name.len().min(BESIDE_MAX)]].concat()
}

/// Copies what `from` is beside a name, and gives it that name when it is complete.
fn bring(
    volume: &Volume,
    from: &Attr,
    (parent, name): (InodeId, &[u8]),
    (target, replace): (&Path, bool),
    out: &Output,
) -> Result<Made> {
    let temporary = beside(name);
    let path = target.with_file_name(std::ffi::OsStr::from_bytes(&temporary));
    let caller = volume.caller();
    if volume.fs.lookup(&caller, parent, &temporary).is_ok() {
        let message = format!("{}: it is there", path.display());
        let remedy = "another of these commands is at work, or was interrupted: if none is, remove it (rm -r, on a mount)";
        return Err(Failure::failed(message, remedy));
    }
    let wrong = |wrong: Wrong| {
        // (It may be only a part that cannot be removed; the first failure is the one that counts.)
        let left = copy::remove(volume, parent, &temporary).is_err();
        let left = left && volume.fs.lookup(&caller, parent, &temporary).is_ok();
        let left = if left { format!(" (and {} is left)", path.display()) } else { String::new() };
        let remedy = match wrong.error {
            Errno::ACCES | Errno::PERM => {
                "clone what you might read then to where you may write, or do it as the super-user"
            }
            Errno::NOSPC | Errno::DQUOT => {
                "make room: corbel status has what is free, corbel quota the limits"
            }
            Errno::NOENT | Errno::STALE => {
                "the snapshot may have been deleted meanwhile: corbel snapshot list"
            }
            _ => "corbel status shows how the node is",
        };
        Failure::failed(
            format!("{}{}: {}{left}", target.display(), wrong.path, wrong.error),
            remedy,
        )
    };
    let all = |error| wrong(Wrong { path: String::new(), error });
    let before = volume.fs.refused().map_err(all)?;
    let made = Copier::new(volume, out).copy(from, parent, &temporary).map_err(wrong)?;
    // What was taken at first, and then did not fit, is no copy.
    let after = volume.fs.refused().map_err(all)?;
    if before != after {
        let counts = before.0 == after.0 && after.1 > 0;
        return Err(all(if counts { after.2 } else { Errno::IO }));
    }
    let named = copy::put(volume, parent, (&temporary, name), replace);
    named.map_err(all)?;
    if replace {
        copy::remove(volume, parent, &temporary).map_err(|e| {
            let message = format!("{}{}: {}", path.display(), e.path, e.error);
            Failure::failed(message, "it is what was replaced: remove it (rm -r, on a mount)")
        })?;
    }
    let synced = volume.fs.fsync_inode(&caller, InodeId::ROOT);
    synced.map_err(|e| failed(target.display(), e))?;
    Ok(made)
}

fn there(target: &Path, remedy: &str) -> Failure {
    Failure::failed(format!("{}: {}", target.display(), Errno::EXIST), remedy)
}

fn say(what: &str, name: &[u8], target: &Path, made: &Made, out: &Output) {
    let Made { directories, files, shared, copied } = *made;
    let said = json!({
        what: String::from_utf8_lossy(name),
        "target": target.display().to_string(),
        "directories": directories,
        "files": files,
        "shared_bytes": shared,
        "copied_bytes": copied,
    });
    out.result(&said, || {
        println!(
            "{}: {directories} directories and {files} files; {shared} bytes shared, {copied} copied",
            target.display()
        );
    });
}

fn clone(volume: &Volume, args: &CloneArgs, out: &Output) -> Result<()> {
    let name = args.name.as_bytes();
    let root = volume.fs.snapshot(&volume.caller(), name).map_err(|e| failed(named(name), e))?;
    let of = || format!("{}, {}", named(name), args.path.display());
    let from = walked(volume, root, &args.path, true).and_then(|found| found.existing());
    let from = from.map_err(|e| failed(of(), e))?;
    if !from.is_dir() {
        return Err(failed(of(), Errno::NOTDIR));
    }
    let target = walked(volume, InodeId::ROOT, &args.target, false);
    let target = target.map_err(|e| failed(args.target.display(), e))?;
    if target.attr.is_some() {
        return Err(there(&args.target, "give the path of a directory that is not there yet"));
    }
    let made = bring(volume, &from, (target.parent, &target.name), (&args.target, false), out)?;
    say("cloned", name, &args.target, &made, out);
    Ok(())
}

fn restore(volume: &Volume, args: &RestoreArgs, out: &Output) -> Result<()> {
    let name = args.name.as_bytes();
    let root = volume.fs.snapshot(&volume.caller(), name).map_err(|e| failed(named(name), e))?;
    let of = || format!("{}, {}", named(name), args.path.display());
    let from = walked(volume, root, &args.path, false).and_then(|found| found.existing());
    let from = from.map_err(|e| failed(of(), e))?;
    let dir = root.of_snapshot().map_or(InodeId::ROOT, |(_, dir)| dir);
    let target = walked(volume, dir, &args.path, false);
    let target = target.map_err(|e| failed(args.path.display(), e))?;
    if target.name.is_empty() {
        let message = format!("{}: it has no name to be put back to", args.path.display());
        let remedy =
            "corbel snapshot clone copies all that a snapshot shows; or give what is below it";
        return Err(Failure::new(Kind::Usage, message, remedy));
    }
    let replace = target.attr.is_some();
    if replace && !args.force {
        return Err(there(
            &args.path,
            "give --force to replace it, or corbel snapshot clone another target",
        ));
    }
    let made = bring(volume, &from, (target.parent, &target.name), (&args.path, replace), out)?;
    say("restored", name, &args.path, &made, out);
    Ok(())
}

/// Runs `corbel snapshot`.
pub fn run(global: &Global, args: &SnapshotArgs, out: &Output) -> Result<()> {
    let volume = Volume::open(global, args.socket.as_deref())?;
    match &args.verb {
        SnapshotVerb::Create { name, dir } => create(&volume, name.as_bytes(), dir, out),
        SnapshotVerb::List => list(&volume, out),
        SnapshotVerb::Delete { names } => {
            let names: Vec<_> = names.iter().map(|name| name.clone().into_vec()).collect();
            delete(&volume, &names, out)
        }
        SnapshotVerb::Clone(args) => clone(&volume, args, out),
        SnapshotVerb::Restore(args) => restore(&volume, args, out),
        SnapshotVerb::Policy(policy) => {
            apply(&volume, policy, OffsetDateTime::now_utc().unix_timestamp(), out)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(keep_hourly: usize, keep_daily: usize) -> Policy {
        let (dir, prefix) = (PathBuf::from("/"), "auto".to_string());
        Policy { keep_hourly, keep_daily, dir, prefix, dry_run: false }
    }

    /// 2026-11-28T00:00:00Z.
    const MIDNIGHT: i64 = 1_795_824_000;

    #[test]
    fn names_tell_the_moment_and_no_other_name_does() {
        let name = stamped("auto", MIDNIGHT + 11 * HOUR + 5);
        assert_eq!(name, "auto-2026-11-28T11-00-05Z");
        assert_eq!(stamp("auto", name.as_bytes()), Some(MIDNIGHT + 11 * HOUR + 5));
        assert_eq!(stamp("au-to", b"au-to-1970-01-01T00-00-00Z"), Some(0));
        for other in [
            &b"auto"[..],
            b"auto-",
            b"autos-2026-11-28T11-00-05Z",
            b"auto-2026-11-28T11-00-05",
            b"auto-2026-11-28T11:00:05Z",
            b"auto-2026-11-28-11-00-05Z",
            b"auto-2026-13-28T11-00-05Z",
            b"auto-2026-02-30T11-00-05Z",
            b"auto-+026-11-28T11-00-05Z",
            b"auto-2026-11-28T11-00-5Z",
            b"auto-2026-11-28T24-00-05Z",
            b"auto-2026-11-28T11-00-05Z-mine",
            b"auto-2026-11-28T11-00-05Z\xff",
        ] {
            assert_eq!(stamp("auto", other), None, "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn one_is_made_in_each_hour_or_day() {
        let now = MIDNIGHT + 90;
        for (policy, period) in [(policy(1, 0), HOUR), (policy(0, 1), DAY), (policy(2, 2), HOUR)] {
            assert!(policy.is_due(&[], now));
            assert!(!policy.is_due(&[now], now + 1), "it was made");
            assert!(!policy.is_due(&[now - 90], now), "in the same period");
            assert!(policy.is_due(&[now - 91], now), "in the one before");
            assert!(policy.is_due(&[now - 5 * period, now - period], now));
            assert!(!policy.is_due(&[now + period], now), "the clock was set back");
        }
    }

    #[test]
    fn the_newest_of_each_period_stays() {
        let hours = |hours: &[i64]| hours.iter().map(|h| MIDNIGHT + h * HOUR).collect::<Vec<_>>();
        let sorted = |mut kept: Vec<i64>| {
            kept.sort_unstable();
            kept.dedup();
            kept
        };
        // A week and a day of one each hour, up to 11 o'clock.
        let made = hours(&(-7 * 24..12).collect::<Vec<_>>());
        let kept = sorted(policy(24, 7).kept(&made));
        let mut right = hours(&[-121, -97, -73, -49, -25, -1]);
        right.extend(hours(&(-12..12).collect::<Vec<_>>()));
        assert_eq!(kept, sorted(right));
        // The order in which they come does not matter, and those of what stays are the same.
        let mut other = made.clone();
        other.reverse();
        assert_eq!(sorted(policy(24, 7).kept(&other)), kept);
        assert_eq!(sorted(policy(24, 7).kept(&kept)), kept, "again: nothing more goes");
        // Periods that have none do not count: a node that was away for a year loses nothing by that.
        let away = hours(&[-9000, -8999, 0]);
        assert_eq!(sorted(policy(24, 7).kept(&away)), away);
        assert_eq!(sorted(policy(0, 2).kept(&away)), hours(&[-8999, 0]));
        // Two in an hour: the newer one.
        assert_eq!(policy(1, 0).kept(&[MIDNIGHT + 5, MIDNIGHT + 7]), [MIDNIGHT + 7]);
        assert_eq!(policy(1, 0).kept(&[-1, 0]), [0], "also before 1970");
    }
}
