//! What block devices are made of: the sources that `corbel nbd` and `corbel ublk` serve, and the cache before them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use block::device::{Blocking, Device, Disk, Memory, PlainFile, ReadOnly, Threads, VolumeFile};
use block::layer::{Config, Layered, Stats};
use block::rbd::RbdImage;
use clap::Args;
use client::fs::{Caller, FileSystem};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::units::parse_bytes;

/// Threads that wait for a disk.
const THREADS: usize = 4;

/// The sources, for the help of verbs that serve them.
macro_rules! sources_help {
    () => {
        "Sources:\n  \
        volume:/PATH   a file of the Corbel volume; a flush means all replicas\n  \
        file:PATH      a file or block device of this machine\n  \
        pool:FILE:NAME an image of a pool (corbel pool)\n  \
        rbd:[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE&reads=balance]\n                 \
        an image of Ceph's RBD, through librados (apt install librados2);\n                 \
        reads=balance or localize: replicas are read as well\n  \
        memory:SIZE    memory, gone at the end\n"
    };
}
pub(crate) use sources_help;

/// How sources are opened.
#[derive(Args, Debug, Clone)]
pub struct SourceArgs {
    /// Make files that are not there, of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub size: Option<u64>,
    /// Refuse writes
    #[arg(long, short)]
    pub read_only: bool,
    /// Put a cache of this size before each device, with read-ahead and merging of neighbours (32MiB; 0B: merging alone)
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, num_args = 0..=1, default_missing_value = "32MiB")]
    pub cache: Option<u64>,
    /// Answer writes when they are in the cache; a flush writes them
    #[arg(long, requires = "cache")]
    pub write_back: bool,
    /// Read at most so much ahead of who reads in order (1MiB; 0B: nothing)
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "cache")]
    pub read_ahead: Option<u64>,
    /// Leave requests of neighbours as they are
    #[arg(long, requires = "cache")]
    pub no_merge: bool,
}

fn usage(message: impl Into<String>, remedy: &str) -> Failure {
    Failure::new(Kind::Usage, message, remedy)
}

/// Who waits for a disk that has no cache before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiting {
    /// Whoever submits a request: he has threads for that.
    Caller,
    /// Threads of the device's own: whoever submits may not wait.
    Threads,
}

/// What sources are opened with.
pub struct Opener<'a> {
    global: &'a Global,
    args: &'a SourceArgs,
    waiting: Waiting,
    /// The socket of the volume's node, if it is not the configuration's.
    socket: Option<PathBuf>,
    /// The volume, once it was asked for.
    volume: Option<Arc<dyn FileSystem>>,
    /// What the cache before each source has counted, when it has ended.
    counts: Vec<(String, Arc<OnceLock<Stats>>)>,
}

impl<'a> Opener<'a> {
    /// One that opens as it is told on the command line.
    pub fn new(global: &'a Global, args: &'a SourceArgs, waiting: Waiting) -> Self {
        Self { global, args, waiting, socket: None, volume: None, counts: Vec::new() }
    }

    /// The same, with the volume of the node behind that socket.
    pub fn at(self, socket: Option<PathBuf>) -> Self {
        Self { socket, ..self }
    }

    /// Opens what a source names.
    pub fn open(&mut self, source: &str) -> Result<Arc<dyn Device>> {
        let (read_only, create) = (self.args.read_only, self.args.size);
        let (kind, rest) = source.split_once(':').unwrap_or((source, ""));
        let device: Arc<dyn Device> = match kind {
            "volume" => {
                let fs = self.volume()?;
                let groups: Vec<u32> = rustix::process::getgroups()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|group| group.as_raw())
                    .collect();
                let caller = Caller {
                    uid: rustix::process::geteuid().as_raw(),
                    gid: rustix::process::getegid().as_raw(),
                    groups: &groups,
                    pid: std::process::id(),
                    umask: 0,
                };
                let file = VolumeFile::open(fs, &caller, rest.as_bytes(), read_only, create)
                    .map_err(|error| {
                        let remedy = "check the path and your rights; --size SIZE makes a file";
                        Failure::failed(format!("{source}: {error}"), remedy)
                    })?;
                self.layered(source, file)?
            }
            "file" => {
                let file = PlainFile::open(Path::new(rest), read_only, create).context(source)?;
                self.layered(source, file)?
            }
            "pool" => {
                let (file, name) = rest
                    .rsplit_once(':')
                    .ok_or_else(|| usage(format!("{source}: no image"), "write pool:FILE:IMAGE"))?;
                self.layered(source, crate::pool::open(Path::new(file), name, read_only)?)?
            }
            "rbd" => {
                let at = rest.parse().map_err(|error: String| {
                    usage(
                        error,
                        "write rbd:[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE&reads=balance]",
                    )
                })?;
                let image = RbdImage::open(&at, read_only).map_err(|error| {
                    Failure::failed(format!("{source}: {error}"), "see docs/block.md, RBD")
                })?;
                self.cached(source, Arc::new(image))?
            }
            "memory" => {
                let size = parse_bytes(rest).map_err(|error| {
                    usage(format!("{source}: {error}"), "write for example memory:1GiB")
                })?;
                Arc::new(Blocking(Memory::new(size)))
            }
            _ => {
                let remedy =
                    "write volume:/PATH, file:PATH, pool:FILE:NAME, rbd:POOL/IMAGE or memory:SIZE";
                return Err(usage(format!("{source:?} is no source"), remedy));
            }
        };
        Ok(if read_only { Arc::new(ReadOnly(device)) } else { device })
    }

    /// What a disk is served through: nothing, or the cache.
    fn layered<D: Disk + 'static>(&mut self, source: &str, disk: D) -> Result<Arc<dyn Device>> {
        if self.args.cache.is_none() {
            return Ok(match self.waiting {
                Waiting::Caller => Arc::new(Blocking(disk)),
                Waiting::Threads => {
                    Arc::new(Threads::for_what_waits(disk, THREADS).context("starting threads")?)
                }
            });
        }
        self.cached(source, Arc::new(Threads::new(disk, THREADS).context("starting threads")?))
    }

    /// The same for what never waits.
    fn cached(&mut self, source: &str, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let Some(cache_bytes) = self.args.cache else { return Ok(device) };
        let usual = Config::default();
        let config = Config {
            cache_bytes,
            write_back: self.args.write_back,
            coalesce: !self.args.no_merge,
            read_ahead: self.args.read_ahead.unwrap_or(usual.read_ahead),
            ..usual
        };
        let layered = Layered::new(device, config).context("starting threads")?;
        self.counts.push((source.to_owned(), layered.ended()));
        Ok(Arc::new(layered))
    }

    /// Says what the caches have counted, when whoever served the devices has ended: one line for each, or with `--json` one object for all.
    pub fn report(&self, out: &Output) {
        let counted = || self.counts.iter().filter_map(|(of, stats)| Some((of, *stats.get()?)));
        if counted().next().is_none() {
            return;
        }
        let each: Vec<Value> = counted()
            .map(|(source, stats)| {
                let mut told: serde_json::Map<_, _> =
                    stats.named().into_iter().map(|(key, n)| (key.to_owned(), json!(n))).collect();
                told.insert("source".into(), json!(source));
                told.into()
            })
            .collect();
        out.result(&json!({"caches": each}), || {
            for (source, stats) in counted() {
                let told: Vec<String> = stats
                    .named()
                    .iter()
                    .map(|(key, n)| format!("{} {n}", key.replace('_', " ")))
                    .collect();
                out.step(format!("cache of {source}: {}", told.join(", ")));
            }
        });
    }

    fn volume(&mut self) -> Result<Arc<dyn FileSystem>> {
        if let Some(fs) = &self.volume {
            return Ok(Arc::clone(fs));
        }
        let socket = match &self.socket {
            Some(socket) => socket.clone(),
            None => self.global.load()?.node.socket,
        };
        let fs = crate::mount::open_source(&socket.display().to_string())?;
        Ok(Arc::clone(self.volume.insert(fs)))
    }
}
