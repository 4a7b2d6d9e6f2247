//! `corbel mount`, and the same as `mount.corbel`, which mount(8) runs for lines of fstab.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::{Errno, InodeId};
use clap::Args;
use client::fs::{Caller, FileSystem};
use client::libfs::{self, LibFs, Verify};
use frontend::dev_fuse::Session;
use frontend::fuse::Options;
use frontend::mount_options::MountOptions;
use frontend::process::{EndingSignals, Readiness, Refusal, Side, daemonize};
use frontend::source::open_back_end;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::local;
use crate::output::Output;

/// Descriptors that the client keeps are above those that a service manager hands down.
const FD_MIN: i32 = 64;
/// How long requests in flight may take after an unmount, before the process ends anyway.
const DRAIN: Duration = Duration::from_secs(5);
/// Names under which mount(8) runs us: for lines of fstab, and for what the mount table shows.
const HELPERS: [&str; 2] = ["mount.corbel", "mount.fuse.corbel"];

/// Arguments of `corbel mount`.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = "Examples:\n  corbel mount /mnt/vol                          the volume of the node in the configuration\n  \
        corbel mount /run/corbel/corbel.sock /mnt/vol\n  \
        corbel mount dir:/srv/data /mnt/data -o noatime    a directory, without a cluster\n  \
        corbel mount -f null: /mnt/null                    in the foreground\n  \
        corbel mount /mnt/then -o snapshot=NAME            the directory of a snapshot\n\n\
        fstab (with mount.corbel a link to corbel in /sbin):\n  \
        /run/corbel/corbel.sock /mnt/vol corbel _netdev,nofail 0 0"
)]
pub struct MountArgs {
    /// Source and mount point. The source is the socket of the local node (the configuration's
    /// if left out), dir:/PATH, kv:HOST:PORT#NAME, kv:/SOCKET#NAME, nfs://HOST/EXPORT, lib:/PATH.so#ARGUMENT
    /// (a back end in C: docs/backends.md) or null:
    #[arg(value_names = ["SOURCE", "DIR"], num_args = 1..=2, required = true)]
    paths: Vec<OsString>,
    /// Mount options, as in fstab (repeatable)
    #[arg(short = 'o', long = "options", value_name = "LIST")]
    options: Vec<String>,
    /// Stay in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Check everything, mount nothing (mount -f)
    #[arg(long, hide = true)]
    fake: bool,
    /// Tolerate unknown mount options (mount -s)
    #[arg(long, hide = true)]
    sloppy: bool,
    /// Say nothing when it worked, as helpers of mount(8) do
    #[arg(long, hide = true)]
    silent: bool,
}

/// What is to be mounted, independent of the working directory.
#[derive(Debug)]
struct Request {
    source: String,
    dir: PathBuf,
    options: MountOptions,
    /// Whoever asked reads nothing of success.
    silent: bool,
}

/// The command line of `mount.corbel SOURCE DIR [-sfnv] [-o LIST] [-t TYPE]` as one of `corbel`;
/// None when that is not our name.
pub fn helper_command_line(args: &[OsString]) -> Option<Vec<OsString>> {
    let name = Path::new(args.first()?).file_name()?;
    if !HELPERS.iter().any(|helper| name == *helper) {
        return None;
    }
    let mut line: Vec<OsString> = vec!["corbel".into(), "mount".into(), "--silent".into()];
    let mut rest = args[1..].iter();
    while let Some(arg) = rest.next() {
        match arg.to_str() {
            // mount(8) says which type it found; and there is no namespace to enter.
            Some("-t" | "-N") => drop(rest.next()),
            Some("-o") => line.extend(["-o".into(), rest.next().cloned().unwrap_or_default()]),
            Some(letters) if is_letters(letters) => {
                let long = letters.chars().skip(1).filter_map(|letter| match letter {
                    's' => Some("--sloppy".into()),
                    'f' => Some("--fake".into()),
                    _ => None, // n: there is no mtab; v: there is nothing to tell
                });
                line.extend::<Vec<OsString>>(long.collect());
            }
            _ => line.push(arg.clone()),
        }
    }
    Some(line)
}

/// `-s`, `-fn` and the like.
fn is_letters(arg: &str) -> bool {
    arg.strip_prefix('-').is_some_and(|l| !l.is_empty() && l.chars().all(|c| "sfnv".contains(c)))
}

/// Runs `corbel mount`.
pub fn run(global: &Global, out: &Output, args: &MountArgs) -> Result<()> {
    let request = Request::new(global, args)?;
    if args.fake {
        return Ok(());
    }
    if request.options.remount {
        frontend::remount(&request.dir, &request.options)
            .map_err(|e| Failure::new(Kind::Environment, e.to_string(), "see docs/mount.md"))?;
        request.report(out);
        return Ok(());
    }
    if args.foreground {
        return serve(&request, out, None);
    }
    match daemonize().context("starting the mount's process")? {
        Side::Daemon(readiness) => serve(&request, out, Some(readiness)),
        Side::Parent(Ok(())) => {
            request.report(out);
            Ok(())
        }
        Side::Parent(Err(why)) => {
            let kind = Kind::of_exit(why.code);
            let remedy = match why.remedy.as_str() {
                "" => remedy(&request.source),
                remedy => remedy,
            };
            Err(Failure::new(kind, why.text, remedy))
        }
    }
}

fn remedy(source: &str) -> &'static str {
    match source {
        "null:" => "see the reason above",
        source if source.starts_with("dir:") => "check that the directory exists and is yours",
        source if source.starts_with("kv:") => "check that the key-value server runs",
        source if source.starts_with("lib:") => "see docs/backends.md",
        source if source.starts_with("nfs://") => "see docs/virtiofs.md, \"Over NFS\"",
        _ => "check that the node runs: corbel status",
    }
}

impl Request {
    fn new(global: &Global, args: &MountArgs) -> Result<Self> {
        let (source, dir) = match args.paths.as_slice() {
            [dir] => (global.load()?.node.socket.into_os_string(), dir),
            [source, dir] => (source.clone(), dir),
            _ => return Err(Failure::new(Kind::Usage, "give [SOURCE] DIR", "see --help")),
        };
        let source = absolute_source(&source)?;
        let mut options = MountOptions { source: source.clone(), ..MountOptions::default() };
        for list in &args.options {
            for option in list.split(',') {
                if let Err(text) = options.apply(option)
                    && !args.sloppy
                {
                    return Err(Failure::new(Kind::Usage, text, "see docs/mount.md"));
                }
            }
        }
        let dir = std::path::absolute(dir).context(dir.display())?;
        Ok(Self { source, dir, options, silent: args.silent })
    }

    fn report(&self, out: &Output) {
        if self.silent {
            return;
        }
        let dir = self.dir.display();
        let said = serde_json::json!({"mounted": dir.to_string()});
        out.result(&said, || println!("mounted on {dir}"));
    }
}

/// Whether a source is a server's, and no path of this machine.
fn names_a_server(source: &str) -> bool {
    source.starts_with("kv:") || source.starts_with("nfs://")
}

/// A source that means the same in every directory.
fn absolute_source(source: &OsStr) -> Result<String> {
    let Some(text) = source.to_str() else {
        let what = format!("source {}: not UTF-8", source.display());
        return Err(Failure::new(Kind::Usage, what, "use another path"));
    };
    let absolute =
        |path: &str| std::path::absolute(path).context(path).map(|path| path.display().to_string());
    if let Some(library) = text.strip_prefix("lib:") {
        let (path, argument) = library.split_once('#').unwrap_or((library, ""));
        return Ok(format!("lib:{}#{argument}", absolute(path)?));
    }
    match text.strip_prefix("dir:") {
        Some(path) => Ok(format!("dir:{}", absolute(path)?)),
        None if text == "null:" || names_a_server(text) => Ok(text.into()),
        None => absolute(text),
    }
}

/// The file system that a source names: a back end, or the volume of the node behind a socket.
pub fn open_source(source: &str) -> Result<Arc<dyn FileSystem>> {
    open_verified(source, Verify::Never, 0)
}

/// The same, as the heir of a process before this one that had the same secret (0: none).
pub fn open_as_heir(source: &str, heir: u128) -> Result<Arc<dyn FileSystem>> {
    open_verified(source, Verify::Never, heir)
}

/// The same; of a volume so many reads are compared with checksums. (Back ends see to that themselves.)
fn open_verified(source: &str, verify: Verify, heir: u128) -> Result<Arc<dyn FileSystem>> {
    if let Some(opened) = open_back_end(source) {
        return opened.map_err(|text| Failure::failed(text, remedy(source)));
    }
    let config = libfs::Config {
        fd_min: FD_MIN,
        stop: Some(frontend::patience::stop),
        patient: true,
        whole_log: true,
        verify,
        heir,
        limits: libfs::Limits {
            inodes: libfs::limits::INODES_MAX,
            // The kernel caches whole files.
            ranges: false,
            ..libfs::Limits::SHIPPED
        },
        ..libfs::Config::new(source.as_bytes())
    };
    let fs = LibFs::attach(config).map_err(|error| {
        let remedy = match error {
            Errno::PROTONOSUPPORT => "mount with the corbel that the node's services are of",
            _ => remedy(source),
        };
        Failure::new(Kind::Unreachable, format!("node at {source}: {error}"), remedy)
    })?;
    Ok(Arc::new(fs))
}

/// Mounts, tells the parent if there is one, and serves until the end.
fn serve(request: &Request, out: &Output, readiness: Option<Readiness>) -> Result<()> {
    if readiness.is_none() {
        local::tie(); // a daemon outlives whoever started it
    }
    let up = up(request);
    let (signals, session) = match (up, readiness) {
        (Ok(up), Some(readiness)) => {
            readiness.ready(log_file(&request.source).as_deref()).context("/dev/null")?;
            log::info!("mounted on {}, process {}", request.dir.display(), std::process::id());
            up
        }
        (Ok(up), None) => {
            request.report(out);
            up
        }
        (Err(failure), Some(readiness)) => {
            let code = failure.exit_code();
            // The parent prints it.
            readiness.failed(&Refusal { code, text: failure.message, remedy: failure.remedy });
            std::process::exit(i32::from(code));
        }
        (Err(failure), None) => return Err(failure),
    };
    if signals.wait_or(session.ended()).context("waiting for signals")? {
        session.unmount().map_err(|e| Failure::failed(e.to_string(), "umount -l the directory"))?;
    }
    session.drain(DRAIN);
    Ok(())
}

/// Where a mount in the background logs: beside the services of its node, whose log is next to
/// their socket. Back ends without a node have none.
fn log_file(source: &str) -> Option<PathBuf> {
    let is_back_end = ["dir:", "lib:"].iter().any(|scheme| source.starts_with(scheme));
    let is_socket = !is_back_end && !names_a_server(source) && source != "null:";
    is_socket.then(|| Path::new(source).with_file_name("log"))
}

/// Signals are blocked before the first thread, so that every thread has them blocked.
fn up(request: &Request) -> Result<(EndingSignals, Session)> {
    let signals = EndingSignals::catch().context("catching signals")?;
    let fs = open_verified(&request.source, request.options.verify, 0)?;
    let root = root(&*fs, request)?;
    let options = Options { config_text: config_text(request), root, ..Options::default() };
    let session = Session::mount(fs, &request.dir, &request.options, options)
        .map_err(|e| Failure::new(Kind::Environment, e.to_string(), "see docs/mount.md"))?;
    Ok((signals, session))
}

/// The directory that is mounted.
fn root(fs: &dyn FileSystem, request: &Request) -> Result<InodeId> {
    let Some(name) = &request.options.snapshot else { return Ok(InodeId::ROOT) };
    fs.snapshot(&Caller::ROOT, name.as_bytes()).map_err(|error| {
        let remedy = match error {
            Errno::OPNOTSUPP => "only volumes have snapshots, not the back ends",
            _ => "corbel snapshot list has the names",
        };
        Failure::failed(format!("snapshot {name} of {}: {error}", request.source), remedy)
    })
}

/// Content of `.corbel/config`.
fn config_text(request: &Request) -> String {
    format!(
        "version {}\nsource {}\ndir {}\nthreads {}\nallow_other {}\ndefault_permissions {}\n",
        env!("CARGO_PKG_VERSION"),
        request.source,
        request.dir.display(),
        request.options.threads,
        request.options.allow_other,
        request.options.default_permissions,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn helper(line: &str) -> Option<String> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let words = helper_command_line(&args)?;
        Some(words.iter().map(|w| w.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn helper_arguments_become_ours() {
        assert_eq!(helper("/usr/bin/corbel mount x y"), None);
        assert_eq!(
            helper("/sbin/mount.corbel /run/s /mnt -n -sv -o rw,noatime -t corbel").unwrap(),
            "corbel mount --silent /run/s /mnt --sloppy -o rw,noatime"
        );
        assert_eq!(
            helper("mount.corbel null: /mnt -fn").unwrap(),
            "corbel mount --silent null: /mnt --fake"
        );
        let line = helper("/sbin/mount.fuse.corbel s /m -o remount,ro,user_id=0 -t fuse.corbel");
        assert_eq!(line.unwrap(), "corbel mount --silent s /m -o remount,ro,user_id=0");
        // What is not known goes through to be refused by name.
        assert_eq!(helper("mount.corbel a b -x").unwrap(), "corbel mount --silent a b -x");
    }

    #[test]
    fn a_mount_logs_beside_the_services() {
        assert_eq!(log_file("/run/corbel/corbel.sock"), Some("/run/corbel/log".into()));
        assert_eq!(log_file("dir:/srv"), None);
        assert_eq!(log_file("null:"), None);
        assert_eq!(log_file("lib:/srv/ram.so#9"), None);
        assert_eq!(log_file("kv:/run/redis.sock#vol"), None);
        assert_eq!(log_file("nfs://server/srv"), None);
    }

    #[test]
    fn sources_do_not_depend_on_the_directory() {
        assert_eq!(absolute_source(OsStr::new("null:")).unwrap(), "null:");
        assert_eq!(absolute_source(OsStr::new("dir:/a/b")).unwrap(), "dir:/a/b");
        assert!(absolute_source(OsStr::new("dir:a")).unwrap().starts_with("dir:/"));
        let library = absolute_source(OsStr::new("lib:./a.so#b/c#d")).unwrap();
        assert!(library.starts_with("lib:/") && library.ends_with("/a.so#b/c#d"), "{library}");
        assert!(absolute_source(OsStr::new("sock")).unwrap().starts_with('/'));
    }
}
