//! What starts virtiofsd starts this: under its name, with the options that it had before it had long ones (`-o LIST`), and with a source
//! that says by itself what it is. libvirt is such a one: it knows a program by one path, and says nothing of back ends.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ::virtiofs::ids::Rule;
use base::InodeId;
use log::LevelFilter;

use super::{Acl, Backend, Cache, Sandbox, VirtiofsArgs, usage};
use crate::failure::Result;

/// Names under which we are virtiofsd.
const NAMES: [&str; 2] = ["corbel-virtiofsd", "virtiofsd"];

/// The command line of virtiofsd as one of `corbel`; None when that is not our name.
pub fn command_line(args: &[OsString]) -> Option<Vec<OsString>> {
    let name = Path::new(args.first()?).file_name()?;
    if !NAMES.iter().any(|ours| name == *ours) {
        return None;
    }
    let verb = ["corbel", "virtiofs", "--like-virtiofsd"].map(OsString::from);
    Some(verb.into_iter().chain(args[1..].iter().cloned()).collect())
}

/// One of what `-o` lists.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Setting {
    Source(String),
    Cache(Cache),
    Sandbox(Sandbox),
    LogLevel(LevelFilter),
    Xattr(bool),
    Acl(bool),
    Writeback(bool),
    AnnounceSubmounts(bool),
    Readdirplus(bool),
    DirectIo(bool),
    /// Locks hold across guests.
    SharedLocks,
    /// It is so anyway, or changes nothing.
    Nothing,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (key, value) =
            text.split_once('=').map_or((text, None), |(key, value)| (key, Some(value)));
        let wrong = |known: &str| Err(format!("{text}: {key} is one of {known}"));
        Ok(match (key, value) {
            ("source", Some("")) => return Err(format!("{text}: a directory is missing")),
            ("source", Some(source)) => Self::Source(source.into()),
            ("cache", Some("none" | "never")) => Self::Cache(Cache::Never),
            ("cache", Some("auto")) => Self::Cache(Cache::Auto),
            ("cache", Some("always")) => Self::Cache(Cache::Always),
            ("cache", Some("metadata")) => Self::Cache(Cache::Metadata),
            ("cache", Some(_)) => return wrong("none, auto, metadata, always"),
            ("sandbox", Some("namespace")) => Self::Sandbox(Sandbox::Namespace),
            ("sandbox", Some("chroot")) => Self::Sandbox(Sandbox::Chroot),
            ("sandbox", Some("none")) => Self::Sandbox(Sandbox::None),
            ("sandbox", Some(_)) => return wrong("namespace, chroot, none"),
            ("log_level" | "loglevel", Some("err")) => Self::LogLevel(LevelFilter::Error),
            ("log_level" | "loglevel", Some(level)) => match level.parse() {
                Ok(level) => Self::LogLevel(level),
                Err(_) => return wrong("err, warn, info, debug"),
            },
            ("xattr", None) => Self::Xattr(true),
            ("no_xattr", None) => Self::Xattr(false),
            ("posix_acl", None) => Self::Acl(true),
            ("no_posix_acl", None) => Self::Acl(false),
            ("writeback", None) => Self::Writeback(true),
            ("no_writeback", None) => Self::Writeback(false),
            ("announce_submounts", None) => Self::AnnounceSubmounts(true),
            ("no_announce_submounts", None) => Self::AnnounceSubmounts(false),
            ("readdirplus", None) => Self::Readdirplus(true),
            ("no_readdirplus", None) => Self::Readdirplus(false),
            ("allow_direct_io", None) => Self::DirectIo(true),
            ("no_allow_direct_io", None) => Self::DirectIo(false),
            ("flock" | "posix_lock", None) => Self::SharedLocks,
            ("no_flock" | "no_posix_lock", None) => Self::Nothing,
            // A write takes set-user-ID from a file, as the guest's kernel is told; labels are extended attributes.
            ("killpriv_v2" | "no_security_label", None) => Self::Nothing,
            _ => {
                return Err(format!(
                    "{text}: not known; there are source=, cache=, sandbox=, log_level=, and with or without no_ before them \
                     xattr, posix_acl, flock, posix_lock, announce_submounts, readdirplus, allow_direct_io"
                ));
            }
        })
    }
}

/// What one `-o` says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct List(Vec<Setting>);

impl FromStr for List {
    type Err = String;

    /// Settings between commas; two of these are one of a name, as libvirt writes it.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut words = vec![String::new()];
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match (c, words.last_mut()) {
                (',', Some(word)) if rest.next_if_eq(&',').is_some() => word.push(','),
                (',', _) => words.push(String::new()),
                (c, Some(word)) => word.push(c),
                (_, None) => {}
            }
        }
        words.iter().map(|word| word.parse()).collect::<std::result::Result<_, _>>().map(Self)
    }
}

/// `:OWN:HOST:COUNT:`, as virtiofsd has users of a user namespace: whatever the first character is, it is between the numbers.
pub(super) fn id_range(text: &str) -> std::result::Result<Rule, String> {
    let form = || format!("{text}: it is :GUEST:HOST:COUNT:");
    let between = text.chars().next().filter(|c| !c.is_ascii_alphanumeric()).ok_or_else(form)?;
    let inner = text[between.len_utf8()..].strip_suffix(between).ok_or_else(form)?;
    let numbers: Vec<&str> = inner.split(between).collect();
    if numbers.len() != 3 {
        return Err(form());
    }
    format!("map:{}", numbers.join(":")).parse()
}

/// What a source names.
#[derive(PartialEq, Eq, Debug)]
struct Named {
    backend: Backend,
    /// A node, a server.
    source: Option<PathBuf>,
    /// The directory: of that, or of this machine.
    dir: Option<PathBuf>,
    readonly: bool,
}

impl Named {
    fn new(backend: Backend, source: Option<PathBuf>, dir: Option<PathBuf>) -> Self {
        Self { backend, source, dir, readonly: false }
    }

    /// A source as `corbel mount` takes it, but that a path is a directory if it is not a node's socket; one in a mount of a volume is that of
    /// the volume, so that its locks hold and nobody copies data through the kernel.
    fn of(place: &Path) -> Self {
        let text = place.to_str().unwrap_or_default();
        if text == "null:" {
            return Self::new(Backend::Null, None, None);
        }
        if let Some(server) = text.strip_prefix("kv:") {
            return Self::new(Backend::Kv, Some(server.into()), None);
        }
        if let Some(library) = text.strip_prefix("lib:") {
            return Self::new(Backend::Lib, Some(library.into()), None);
        }
        if text.starts_with("nfs://") {
            return Self::new(Backend::Nfs, Some(place.into()), None);
        }
        if let Some(dir) = text.strip_prefix("dir:") {
            return Self::new(Backend::Dir, None, Some(dir.into()));
        }
        if is_socket(place) {
            return Self::new(Backend::Corbel, Some(place.into()), None);
        }
        Self::in_volume(place).unwrap_or_else(|| Self::new(Backend::Dir, None, Some(place.into())))
    }

    /// The same directory by its node, if it is in a mount of a whole volume.
    fn in_volume(place: &Path) -> Option<Self> {
        let place = place.canonicalize().ok()?;
        let device = place.metadata().ok()?.dev();
        let mounts = crate::run::volumes().ok()?;
        // The one that it is in; not one above that.
        let above = |(_, mount): &(_, PathBuf)| place.starts_with(mount);
        let (source, mount) = mounts.into_iter().rev().find(above)?;
        // Not one of a snapshot, or of a directory that was bound elsewhere; and nothing may be mounted in between.
        let root = mount.metadata().ok()?;
        let whole = root.dev() == device && root.ino() == InodeId::ROOT.0;
        let socket = PathBuf::from(OsString::from_vec(source));
        if !whole || !is_socket(&socket) {
            return None;
        }
        let dir = Path::new("/").join(place.strip_prefix(&mount).ok()?);
        let flags = rustix::fs::statvfs(&place).ok()?.f_flag;
        let readonly = flags.contains(rustix::fs::StatVfsMountFlags::RDONLY);
        Some(Self { readonly, ..Self::new(Backend::Corbel, Some(socket), Some(dir)) })
    }
}

fn is_socket(path: &Path) -> bool {
    path.is_absolute() && path.metadata().is_ok_and(|meta| meta.file_type().is_socket())
}

impl VirtiofsArgs {
    fn settings(&self) -> impl Iterator<Item = &Setting> {
        self.old_options.iter().flat_map(|list| &list.0)
    }

    /// How much is logged, if this verb says it.
    pub fn log_level(&self) -> Option<LevelFilter> {
        let said = self.settings().filter_map(|setting| match setting {
            Setting::LogLevel(level) => Some(*level),
            _ => None,
        });
        let said = said.last();
        if self.debug { Some(LevelFilter::Debug) } else { said }
    }

    /// Puts what virtiofsd's command line says in its own way to where it belongs.
    pub(super) fn settle(&mut self) -> Result<()> {
        let mut source = None;
        for setting in self.settings().cloned().collect::<Vec<_>>() {
            match setting {
                Setting::Source(named) => source = Some(PathBuf::from(named)),
                Setting::Cache(cache) => self.cache = cache,
                Setting::Sandbox(sandbox) => self.sandbox = Some(sandbox),
                Setting::Xattr(wanted) => self.xattr = wanted,
                Setting::Acl(wanted) => {
                    self.posix_acl = if wanted { Acl::Always } else { Acl::Never };
                }
                Setting::Writeback(wanted) => self.writeback = wanted,
                Setting::AnnounceSubmounts(wanted) => self.announce_submounts = wanted,
                Setting::Readdirplus(wanted) => self.no_readdirplus = !wanted,
                Setting::DirectIo(wanted) => self.allow_direct_io = wanted,
                Setting::SharedLocks => self.shared_locks = true,
                Setting::LogLevel(_) | Setting::Nothing => {}
            }
        }
        self.translate_uid.append(&mut self.uid_map);
        self.translate_gid.append(&mut self.gid_map);
        if source.is_some() && (self.shared_dir.is_some() || self.source.is_some()) {
            return Err(usage("-o source= is given, and --shared-dir or --source as well: which?"));
        }
        let elsewhere = self.remote.is_some() || self.tenants.is_some();
        if source.is_some() && elsewhere {
            return Err(usage("-o source=: with --remote or --tenants it is said there"));
        }
        if let Some(source) = source {
            self.serve(source)
        } else if self.like_virtiofsd
            && !elsewhere
            && self.backend.is_none()
            && self.source.is_none()
        {
            let missing = || usage("--shared-dir or -o source= is missing");
            let dir = self.shared_dir.take().ok_or_else(missing)?;
            self.serve(dir)
        } else {
            Ok(())
        }
    }

    /// Serves what a source names; that of a back end which is said need not name that.
    fn serve(&mut self, place: PathBuf) -> Result<()> {
        let named = match self.backend {
            Some(backend @ (Backend::Kv | Backend::Nfs | Backend::Lib)) => {
                Named::new(backend, Some(place), None)
            }
            Some(Backend::Null) => Named::new(Backend::Null, None, None),
            Some(Backend::Corbel) if !is_socket(&place) => {
                Named::new(Backend::Corbel, None, Some(place))
            }
            Some(Backend::Dir) => Named::new(Backend::Dir, None, Some(place)),
            Some(Backend::Corbel) | None => Named::of(&place),
        };
        self.backend = Some(named.backend);
        self.source = named.source;
        self.shared_dir = named.dir;
        self.readonly |= named.readonly;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        args: VirtiofsArgs,
    }

    fn args(line: &str) -> std::result::Result<VirtiofsArgs, String> {
        let mut args = Line::try_parse_from(line.split(' ')).map_err(|e| e.to_string())?.args;
        args.settle().map_err(|failure| failure.message)?;
        Ok(args)
    }

    #[test]
    fn by_its_name_it_is_virtiofsd() {
        let line = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let words = command_line(&args)?;
            Some(words.iter().map(|w| w.to_str().unwrap()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(line("/usr/bin/corbel virtiofs --fd=3"), None);
        for name in ["/usr/libexec/virtiofsd", "corbel-virtiofsd"] {
            let said = line(&format!("{name} --fd=3 -o source=/srv")).unwrap();
            assert_eq!(said, "corbel virtiofs --like-virtiofsd --fd=3 -o source=/srv");
        }
    }

    #[test]
    fn what_libvirt_says_is_understood() {
        // Before libvirt 8.5 or so; what knows `separate-options` after it.
        let old = args(
            "--like-virtiofsd --fd=27 -o source=/tmp,cache=always,sandbox=chroot,xattr,no_flock,no_posix_lock \
             --thread-pool-size=4 -d",
        );
        let new = args(
            "--like-virtiofsd --fd=27 --shared-dir /tmp --cache always --sandbox chroot --xattr --thread-pool-size=4 \
             --rlimit-nofile=4096 --uid-map=:0:1000:1: --uid-map=:1:100000:65536: --gid-map=:0:1000:1: --readonly",
        )
        .unwrap();
        let old = old.unwrap();
        for args in [&old, &new] {
            assert_eq!(args.fd, Some(27));
            assert_eq!(
                (args.backend, args.shared_dir.as_deref()),
                (Some(Backend::Dir), Some(Path::new("/tmp")))
            );
            assert_eq!((args.cache, args.sandbox), (Cache::Always, Some(Sandbox::Chroot)));
            assert!(args.xattr && args.thread_pool_size == 4 && !args.shared_locks);
        }
        assert_eq!((old.log_level(), new.log_level()), (Some(LevelFilter::Debug), None));
        let rules =
            |rules: &[&str]| rules.iter().map(|r| r.parse().unwrap()).collect::<Vec<Rule>>();
        assert_eq!(new.translate_uid, rules(&["map:0:1000:1", "map:1:100000:65536"]));
        assert_eq!(new.translate_gid, rules(&["map:0:1000:1"]));
        assert!(new.readonly && new.rlimit_nofile == Some(4096));
        let none =
            args("--fd=27 -o cache=none -o sandbox=none,no_xattr,source=/a,,b,flock -f").unwrap();
        assert_eq!((none.cache, none.sandbox), (Cache::Never, Some(Sandbox::None)));
        assert_eq!(none.shared_dir.as_deref(), Some(Path::new("/a,b")));
        assert!(!none.xattr && none.shared_locks);
        // The last word counts, also over a long option.
        let twice =
            args("--fd=27 --xattr -o source=/a,no_xattr,log_level=err -o loglevel=info").unwrap();
        assert!(!twice.xattr && twice.log_level() == Some(LevelFilter::Info));
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for (wrong, said) in [
            ("-o source=/a,colour", "colour: not known"),
            ("-o source=/a,xattrmap=:map::user.:", "xattrmap"),
            ("-o source=/a,modcaps=+sys_admin", "modcaps"),
            ("-o source=/a,cache=sometimes", "none, auto, metadata, always"),
            ("-o source=/a,sandbox=jail", "namespace, chroot, none"),
            ("-o source=/a,log_level=loud", "debug"),
            ("-o source=/a,xattr=yes", "xattr=yes"),
            ("-o source=", "a directory is missing"),
            ("-o source=/a --shared-dir /b", "which?"),
            ("-o source=/a --remote /b", "--remote"),
            ("--uid-map=0:1000:1", ":GUEST:HOST:COUNT:"),
            ("--uid-map=:0:1000:", ":GUEST:HOST:COUNT:"),
            ("--uid-map=:0:x:1:", "no number"),
            ("--like-virtiofsd", "-o source= is missing"),
        ] {
            let error = args(&format!("--fd=27 {wrong}")).unwrap_err();
            assert!(error.contains(said), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_source_says_what_it_is() {
        let of = |text: &str| {
            let named = Named::of(Path::new(text));
            (named.backend, named.source, named.dir)
        };
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(of("null:"), (Backend::Null, None, None));
        assert_eq!(of("kv:/run/redis.sock#vm1"), (Backend::Kv, path("/run/redis.sock#vm1"), None));
        assert_eq!(of("nfs://server/srv"), (Backend::Nfs, path("nfs://server/srv"), None));
        assert_eq!(of("dir:/srv"), (Backend::Dir, None, path("/srv")));
        assert_eq!(of("/srv/data"), (Backend::Dir, None, path("/srv/data")));
        let socket = std::env::temp_dir().join(format!("corbel-compat-{}", std::process::id()));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(of(socket.to_str().unwrap()), (Backend::Corbel, Some(socket.clone()), None));
        std::fs::remove_file(&socket).unwrap();
    }
}
