//! `corbel run -- PROGRAM`: an unmodified program on the fast path.
//!
//! The interception library is preloaded into the program and all that it starts. What they share
//! lies in the session memory (run/format.rs), a memfd that every process inherits: configuration,
//! the system call sites to patch, open file descriptions. This process stays as the parent: it
//! holds descriptors for the session (run/holder.rs) and ends with the program's code.
//! docs/interception.md tells the whole.

mod directory;
mod holder;
mod launch;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use corbel_input::sites::libraries;
use corbel_input::{format, sites};
use rustix::fs::MemfdFlags;
use serde_json::json;

use self::directory::Directory;
use self::launch::Launch;
use crate::cli::Global;
use crate::failure::{Context as _, Failure, Kind, Result};
use crate::output::Output;

/// Arguments of `corbel run`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  corbel run -- sqlite3 /corbel/a.db 'select 1'\n  \
    corbel run --audit -- git -C /corbel/tree status\n  \
    CORBEL_BACKEND=dir:/srv/files corbel run --mount /srv/mnt -- bash\n\n\
    Ends with the program's code (128 + N when signal N ended it; 126, 127: it could not be \
    started).")]
pub struct RunArgs {
    /// Mount point whose files are served in the process; without it, the one mounted volume
    #[arg(long, value_name = "DIR", env = "CORBEL_MOUNT")]
    pub mount: Option<PathBuf>,
    /// Socket of the node's hostd; without it, the one behind the mount
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Back end: corbel:/SOCKET, or dir:/PATH for a directory served as it is
    #[arg(long, value_name = "BACKEND", env = "CORBEL_BACKEND")]
    pub backend: Option<String>,
    /// How to reach the files
    #[arg(long, value_enum, default_value = "patch")]
    pub mode: Mode,
    /// What a program gets that uses io_uring: its files through the mount, or ENOSYS, which most programs
    /// answer by falling back to calls that are served in the process
    #[arg(long, value_enum, default_value = "mount", value_name = "WAY")]
    pub io_uring: Ring,
    /// Afterwards, say on standard error how many processes took which path, and (as root) which
    /// requests of processes on the fast path reached the mount all the same
    #[arg(long)]
    pub audit: bool,
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Ways to the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Mode {
    /// In the process, where libc and the loader make their system calls
    #[value(alias = "fast")]
    Patch,
    /// The same, and a net for system calls made elsewhere (inline assembly, generated code)
    Strict,
    /// Through the mount, as without corbel run
    Fuse,
}

/// What io_uring means to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Ring {
    /// From the first ring on, the mount serves the files of the process
    Mount,
    /// ENOSYS, as on a kernel without it
    Refuse,
}

/// Names of the interception library beside the binary or in a library directory.
const LIBRARY: &str = "libintercept.so";
/// For so long a node that is being restarted may have no socket.
const RESTART: Duration = Duration::from_secs(5);

/// Runs the program; the code to end with.
pub fn run(global: &Global, _out: &Output, args: &RunArgs) -> Result<u8> {
    let mut command = Command::new(&args.program[0]);
    command.args(&args.program[1..]);
    let launch = Launch::begin().context("catching signals")?;
    let wait = |child| launch.wait(child).context("waiting for the program");
    if args.mode == Mode::Fuse {
        return Ok(code(wait(spawn(&launch, &mut command, args)?)?));
    }
    let session = Session::make(global, args)?;
    launch.make_room();
    if let Some(reason) = program_path(&args.program[0]).and_then(|path| unhooked(&path)) {
        eprintln!(
            "corbel: {} {reason}: it is served by the mount, not on the fast path",
            Path::new(&args.program[0]).display()
        );
    }
    let [config, state] = [&session.config, &session.state].map(|fd| fd.as_raw_fd());
    command.env(format::ENV, format!("{config},{state},-1"));
    command.env("LD_PRELOAD", preload(&session.library));
    let before = if args.audit { Calls::of(&session.mount) } else { None };
    let status = wait(spawn(&launch, &mut command, args)?)?;
    session.report(args.audit, before)?;
    Ok(code(status))
}

fn code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code & 0xff).unwrap_or(1)
}

fn spawn(launch: &Launch, command: &mut Command, args: &RunArgs) -> Result<Child> {
    launch.spawn(command).map_err(|error| {
        let missing = error.kind() == std::io::ErrorKind::NotFound;
        let mut failure = Failure::io(Path::new(&args.program[0]).display(), &error);
        failure.remedy = "name a program that exists and may be executed".into();
        failure.exit = Some(if missing { 127 } else { 126 });
        failure
    })
}

fn program_path(name: &std::ffi::OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Why the dynamic loader would not load the library into a program.
fn unhooked(path: &Path) -> Option<&'static str> {
    // Of anything else exec says what is wrong; to open a pipe would wait for its other end.
    let meta = fs::metadata(path).ok().filter(|meta| meta.is_file())?;
    if meta.mode() & 0o4000 != 0 || meta.mode() & 0o2010 == 0o2010 {
        return Some("is a set-id program");
    }
    let mut head = vec![0; 4096];
    let got = fs::File::open(path).ok()?.read(&mut head).ok()?;
    head.truncate(got);
    if !head.starts_with(b"\x7fELF") {
        return None; // a script: its interpreter decides
    }
    if head.get(4) != Some(&2) || head.get(18..20) != Some(&[62, 0]) {
        return Some("is not a 64-bit x86 program");
    }
    let dynamic = head.windows(21).any(|w| w == b"/ld-linux-x86-64.so.2");
    (!dynamic).then_some("is statically linked, or not linked with glibc")
}

fn preload(library: &Path) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        value.push(":");
        value.push(others);
    }
    value
}

/// The interception library.
pub fn find_library() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let places = [
        std::env::var_os("CORBEL_LIBRARY").map(PathBuf::from),
        Some(beside.join(LIBRARY)),
        Some(beside.join("../lib/corbel").join(LIBRARY)),
    ];
    let found = places.into_iter().flatten().find(|path| path.is_file());
    let found = found.ok_or_else(|| {
        Failure::new(
            Kind::Environment,
            format!("{LIBRARY} is not beside {}", own.display()),
            "build it (cargo build -p intercept), or name it in CORBEL_LIBRARY",
        )
    })?;
    fs::canonicalize(&found).context(found.display())
}

/// The mounts of volumes: source and directory of each.
pub(crate) fn volumes() -> Result<Vec<(Vec<u8>, PathBuf)>> {
    let mounts = fs::read("/proc/self/mounts").context("/proc/self/mounts")?;
    let volume = |line: &[u8]| {
        let mut words = line.split(|byte| *byte == b' ');
        let (source, dir, kind) = (words.next()?, words.next()?, words.next()?);
        let dir = PathBuf::from(OsString::from_vec(unescaped(dir)));
        (kind == b"fuse.corbel").then(|| (unescaped(source), dir))
    };
    Ok(mounts.split(|byte| *byte == b'\n').filter_map(volume).collect())
}

/// A field of the mount table, which has spaces and the like as `\040`.
fn unescaped(mut field: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some((&byte, rest)) = field.split_first() {
        let digits = rest.get(..3).filter(|_| byte == b'\\').and_then(|d| str::from_utf8(d).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(meant) => {
                out.push(meant);
                field = &rest[3..];
            }
            None => {
                out.push(byte);
                field = rest;
            }
        }
    }
    out
}

/// The back end: the one asked for, else the one behind the mount, else that of the configuration.
fn back_end(global: &Global, args: &RunArgs, mount: &Path) -> Result<Vec<u8>> {
    let behind = |path: &Path| [b"corbel:", path.as_os_str().as_bytes()].concat();
    let back_end = match (&args.backend, &args.socket) {
        (Some(back_end), _) => back_end.clone().into_bytes(),
        (None, Some(socket)) => behind(&std::path::absolute(socket).context(socket.display())?),
        (None, None) => match volumes()?.into_iter().rfind(|(_, dir)| dir == mount) {
            Some((source, _)) if source.starts_with(b"dir:/") => source,
            Some((source, _)) if source.starts_with(b"/") => [b"corbel:", &source[..]].concat(),
            _ => behind(&global.load()?.node.socket),
        },
    };
    let Some(socket) = back_end.strip_prefix(b"corbel:").filter(|path| path.starts_with(b"/"))
    else {
        if back_end.starts_with(b"dir:/") {
            return Ok(back_end);
        }
        return Err(Failure::new(
            Kind::Usage,
            format!("back end {:?} is unknown", String::from_utf8_lossy(&back_end)),
            "use corbel:/SOCKET or dir:/PATH",
        ));
    };
    let socket = Path::new(OsStr::from_bytes(socket));
    if !appears(socket) {
        return Err(Failure::new(
            Kind::Unreachable,
            format!("no node serves at {}", socket.display()),
            "start it (corbel serve), or say where one serves: --socket PATH",
        ));
    }
    Ok(back_end)
}

/// Whether a socket is there, or comes to be: a node that is being restarted has none for a moment.
fn appears(socket: &Path) -> bool {
    let may_come = socket.parent().is_some_and(Path::exists);
    let end = Instant::now() + RESTART;
    while !socket.exists() {
        if !may_come || Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// The one mounted volume, when there is exactly one.
fn find_mount() -> Result<PathBuf> {
    let mut found = volumes()?.into_iter().map(|(_, dir)| dir);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(Failure::new(
            Kind::Environment,
            "no volume is mounted",
            "mount one (corbel mount), or name the mount point: --mount DIR",
        )),
        _ => Err(Failure::new(
            Kind::Usage,
            "more than one volume is mounted",
            "say which: --mount DIR",
        )),
    }
}

/// What the processes of one run share.
struct Session {
    /// The configuration, to be read.
    config: OwnedFd,
    /// The state of those who run as this user.
    state: OwnedFd,
    /// Patched text, for every process.
    _overlay: Option<OwnedFd>,
    library: PathBuf,
    mount: PathBuf,
}

/// Requests that the mount has served, by thread and operation (`.corbel/calls`, for root).
struct Calls(BTreeMap<(u32, String), u64>);

impl Calls {
    fn of(mount: &Path) -> Option<Self> {
        let text = fs::read_to_string(mount.join(".corbel/calls")).ok()?;
        let mut calls = BTreeMap::new();
        for line in text.lines() {
            let mut words = line.split(' ');
            let (thread, op, count) = (words.next()?, words.next()?, words.next()?);
            calls.insert((thread.parse().ok()?, op.to_string()), count.parse().ok()?);
        }
        Some(Self(calls))
    }

    /// What came on top for these threads, by operation.
    fn since(&self, before: &Self, threads: &BTreeSet<u32>) -> BTreeMap<&str, u64> {
        let mut sums = BTreeMap::new();
        for (key, count) in self.0.iter().filter(|((thread, _), _)| threads.contains(thread)) {
            let new = count.saturating_sub(before.0.get(key).copied().unwrap_or(0));
            if new > 0 {
                *sums.entry(key.1.as_str()).or_insert(0) += new;
            }
        }
        sums
    }
}

/// Appends `text` in a field of `room` bytes; its length must leave a NUL.
fn field(image: &mut Vec<u8>, what: &str, text: &[u8], room: usize) -> Result<()> {
    if text.len() >= room || text.contains(&0) {
        return Err(Failure::new(
            Kind::Usage,
            format!("{what} is {} bytes long", text.len()),
            format!("use one of at most {} bytes", room - 1),
        ));
    }
    image.extend_from_slice(text);
    image.resize(image.len() + room - text.len(), 0);
    Ok(())
}

impl Session {
    fn make(global: &Global, args: &RunArgs) -> Result<Self> {
        let mount = args.mount.clone().map_or_else(find_mount, Ok)?;
        let mount = fs::canonicalize(&mount).context(mount.display())?;
        if mount == Path::new("/") {
            let what = "the prefix cannot be /";
            return Err(Failure::new(Kind::Usage, what, "name the mount point: --mount DIR"));
        }
        let backend = back_end(global, args, &mount)?;
        let library = find_library()?;
        let libraries = libraries();
        let tables = libraries.iter().map(|l| sites::of(l)).collect::<Result<Vec<_>>>()?;
        if tables.is_empty() || tables.len() > format::TABLES {
            return Err(Failure::new(
                Kind::Environment,
                "this program runs without glibc, so the sites of glibc are not known",
                "build corbel for x86_64-unknown-linux-gnu",
            ));
        }
        let holder = holder::bind()?;
        let secret = secret();
        let tables: Vec<_> = tables
            .into_iter()
            .zip(&libraries)
            .map(|(sites, path)| (sites::overlay(path, &sites), sites))
            .collect();
        // Without one each process writes its jumps itself.
        let overlay = overlay(&tables).ok();
        let texts = (tables.len(), overlay.as_ref());
        let header = header(&mount, &backend, &library, (&holder.name, secret), texts, args)?;
        let (memory, config) = configuration(&header, &tables)?;
        let sites = tables.into_iter().map(|(_, sites)| sites);
        let known = libraries.into_iter().zip(sites).collect();
        holder.start(Directory::new(memory, known), secret);
        Ok(Self { config, state: state()?, _overlay: overlay, library, mount })
    }

    fn counters(&self) -> Result<[u32; 11]> {
        let file = fs::File::from(self.state.try_clone().context("session memory")?);
        let mut bytes = [0u8; 44];
        file.read_exact_at(&mut bytes, 0).context("session memory")?;
        let mut counters = [0; 11];
        for (counter, word) in counters.iter_mut().zip(bytes.chunks_exact(4)) {
            *counter = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        }
        Ok(counters)
    }

    /// Threads that the library served; the last ones if they were very many.
    fn threads(&self) -> Result<BTreeSet<u32>> {
        let file = fs::File::from(self.state.try_clone().context("session memory")?);
        let mut bytes = vec![0u8; format::THREADS * 4];
        file.read_exact_at(&mut bytes, format::THREADS_AT as u64).context("session memory")?;
        let ids = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok(ids.filter(|id| *id != 0).collect())
    }

    /// Says what became of it: always when nothing was caught at all.
    fn report(&self, audit: bool, before: Option<Calls>) -> Result<()> {
        let [
            attached,
            unpatched,
            demoted,
            unhooked,
            kernel_opens,
            exhausted,
            _,
            trapped,
            ..,
            undemoted,
        ] = self.counters()?;
        if unpatched > 0 {
            eprintln!(
                "corbel: {unpatched} processes have another glibc than this machine's and were \
                served by the mount"
            );
        }
        if audit {
            let (threads, after) = (self.threads()?, Calls::of(&self.mount));
            let both = before.as_ref().zip(after.as_ref());
            let fuse = both.map(|(before, after)| after.since(before, &threads));
            let all = json!({
                "fast": attached, "unpatched": unpatched, "unhooked": unhooked,
                "demoted": demoted, "kernel_opens": kernel_opens, "exhausted": exhausted,
                "trapped": trapped, "undemoted": undemoted, "fuse": fuse,
            });
            eprintln!("{all}");
        }
        Ok(())
    }
}

/// A number that nobody can guess; the standard library seeds its hash tables with such.
fn secret() -> u32 {
    let bytes = std::hash::RandomState::new().build_hasher().finish().to_le_bytes();
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The header's bytes: [`format::Header`], field by field.
fn header(
    mount: &Path,
    backend: &[u8],
    library: &Path,
    (holder, secret): (&[u8], u32),
    (tables, overlay): (usize, Option<&OwnedFd>),
    args: &RunArgs,
) -> Result<Vec<u8>> {
    let strict = usize::from(args.mode == Mode::Strict);
    let no_ring = usize::from(args.io_uring == Ring::Refuse);
    let device = fs::metadata(mount).map_or(0, |meta| meta.dev());
    let device = usize::try_from(device).unwrap_or(0);
    let (mount, library) = (mount.as_os_str().as_bytes(), library.as_os_str().as_bytes());
    let mut image = format::MAGIC.to_vec();
    image.extend_from_slice(&format::VERSION.to_le_bytes());
    image.extend_from_slice(&[0; 4]);
    image.extend_from_slice(&(format::CONFIG_BYTES as u64).to_le_bytes());
    let lengths = [tables, mount.len(), backend.len(), library.len(), holder.len()];
    let number = overlay.map_or(0, |fd| fd.as_raw_fd().unsigned_abs() as usize);
    for n in lengths.into_iter().chain([device, strict, no_ring, number]) {
        image.extend_from_slice(&u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
    }
    for n in [secret, base::cpu::tell(), 0] {
        image.extend_from_slice(&n.to_le_bytes());
    }
    let stat = overlay.map(rustix::fs::fstat).transpose();
    let stat = stat.map_err(std::io::Error::from).context("the patched text")?;
    for n in stat.map_or([0; 2], |stat| [stat.st_ino, stat.st_dev]) {
        image.extend_from_slice(&n.to_le_bytes());
    }
    let users = fs::metadata("/proc/self/ns/user").map_or(0, |meta| meta.ino());
    image.extend_from_slice(&users.to_le_bytes());
    field(&mut image, "the mount point", mount, format::PATH_MAX)?;
    field(&mut image, "the back end", backend, format::PATH_MAX)?;
    field(&mut image, "the path of the library", library, format::PATH_MAX)?;
    field(&mut image, "the holder's address", holder, format::SOCKET_MAX + 1)?;
    image.resize(size_of::<format::Header>(), 0);
    let sum = base::crc32c(0, &image);
    image[12..16].copy_from_slice(&sum.to_le_bytes());
    Ok(image)
}

/// [`format::Table`]; `at`: where in the overlay the stubs and the text are, and how long.
fn table(sites: &sites::Sites, at: [usize; 4]) -> Vec<u8> {
    let mut image = Vec::with_capacity(format::TABLE_BYTES);
    for n in [sites.build_id.len(), sites.sites.len()] {
        image.extend_from_slice(&u32::try_from(n).unwrap_or(0).to_le_bytes());
    }
    image.extend_from_slice(&sites.build_id);
    image.resize(8 + format::BUILD_ID_MAX, 0);
    for n in at {
        image.extend_from_slice(&u32::try_from(n).unwrap_or(0).to_le_bytes());
    }
    for site in &sites.sites {
        image.extend_from_slice(&site.at.to_le_bytes());
        image.extend_from_slice(&[site.len, site.syscall, 0, 0]);
    }
    image
}

/// A library's sites, and its patched text if it could be made.
type Patched = (Option<sites::Overlay>, sites::Sites);

/// The text of all libraries, in a memfd that nobody can change any more.
fn overlay(tables: &[Patched]) -> Result<OwnedFd> {
    let what = "making the patched text";
    let parts = tables.iter().filter_map(|(overlay, _)| overlay.as_ref());
    let image = parts.flat_map(|o| [&o.stubs[..], &o.text[..]]).collect::<Vec<_>>().concat();
    let file = memfd("corbel-text", MemfdFlags::EXEC).context(what)?;
    file.write_all_at(&image, 0).context(what)?;
    let seals = rustix::fs::SealFlags::SHRINK
        | rustix::fs::SealFlags::GROW
        | rustix::fs::SealFlags::WRITE
        | rustix::fs::SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(std::io::Error::from).context(what)?;
    inherited(&file)
}

/// A file of memory. Of one that `kind` says whether there are programs in it: some machines refuse what does not say so;
/// kernels before Linux 6.3 do not know it.
fn memfd(name: &str, kind: MemfdFlags) -> std::io::Result<fs::File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let make = |flags| rustix::fs::memfd_create(name, flags);
    let made = match make(flags | kind) {
        Err(rustix::io::Errno::INVAL) => make(flags),
        made => made,
    };
    Ok(made?.into())
}

/// A memfd that keeps its size, and that only this user may write to.
fn memory(name: &str, bytes: usize) -> Result<fs::File> {
    use rustix::fs::SealFlags;
    let make = || {
        let file = memfd(name, MemfdFlags::NOEXEC_SEAL)?;
        file.set_len(bytes as u64)?;
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(format::MODE))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::from_bits_retain(format::SEALS))?;
        Ok::<_, std::io::Error>(file)
    };
    make().context("making the session memory")
}

/// Makes the configuration: to be written by this process, and to be read by all others.
fn configuration(header: &[u8], tables: &[Patched]) -> Result<(fs::File, OwnedFd)> {
    let what = "making the session memory";
    let file = memory("corbel-run", format::CONFIG_BYTES)?;
    file.write_all_at(header, 0).context(what)?;
    let mut from = 0;
    for (i, (overlay, sites)) in tables.iter().enumerate() {
        let [stubs, text] =
            overlay.as_ref().map_or([0; 2], |overlay| [overlay.stubs.len(), overlay.text.len()]);
        let at = format::TABLES_AT + i * format::TABLE_BYTES;
        let table = table(sites, [from, stubs, from + stubs, text]);
        file.write_all_at(&table, at as u64).context(what)?;
        from += stubs + text;
    }
    // Opened anew: what goes along must not be written to by a program that gives up rights.
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let along = inherited(&fs::File::open(own).context(what)?)?;
    Ok((file, along))
}

/// Makes the state of those who run as this user.
fn state() -> Result<OwnedFd> {
    inherited(&memory("corbel-state", format::STATE_BYTES)?)
}

/// Moves a descriptor to a high number, open across exec.
fn inherited(file: &fs::File) -> Result<OwnedFd> {
    let what = "a descriptor for the session";
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.unwrap_or(65_536).clamp(64, 65_536);
    let high = format::engine_numbers(usize::try_from(limit).unwrap_or(1024));
    let high = i32::try_from(high).unwrap_or(896);
    let fd =
        rustix::io::fcntl_dupfd_cloexec(file, high).map_err(std::io::Error::from).context(what)?;
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())
        .map_err(std::io::Error::from)
        .context(what)?;
    Ok(fd)
}
