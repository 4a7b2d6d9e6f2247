//! `corbel nbd`: block devices for whoever speaks NBD.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use block::device::{Blocking, Device, Disk, Memory, PlainFile, ReadOnly, Threads, VolumeFile};
use block::layer::{Config, Layered};
use block::nbd::connection::{Bounds, Common};
use block::nbd::handshake::TlsPolicy;
use block::nbd::{Address, Export, Exports, Limits, Server, tls};
use block::rbd::RbdImage;
use clap::Args;
use client::fs::{Caller, FileSystem};
use frontend::process::EndingSignals;
use serde_json::json;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::units::{parse_bytes, parse_duration};

/// Threads that wait for a disk behind the cache.
const THREADS: usize = 4;
/// The port of NBD.
const PORT: u16 = 10809;

/// Arguments of `corbel nbd`.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = "Examples:\n  corbel nbd volume:/disks/vm.img --size 20GiB        a file of the volume, made if it is not there\n  \
        corbel nbd --export a=volume:/a.img --export b=file:/srv/b.img --listen unix:/run/nbd.sock\n  \
        corbel nbd file:/srv/disk.img --listen 0.0.0.0:10809 --tls /etc/corbel/nbd --tls-verify-peer\n\n\
        Sources:\n  \
        volume:/PATH   a file of the Corbel volume; a flush means all replicas\n  \
        file:PATH      a file or block device of this machine\n  \
        pool:FILE:NAME an image of a pool (corbel pool)\n  \
        rbd:[USER@]POOL[/NAMESPACE]/IMAGE[?conf=FILE]\n                 \
        an image of Ceph's RBD, through librados (apt install librados2)\n  \
        memory:SIZE    memory, gone at the end\n\n\
        Clients:\n  nbdinfo nbd://localhost\n  \
        qemu-img info 'nbd+unix:///a?socket=/run/nbd.sock'\n  \
        nbd-client localhost /dev/nbd0 -N a"
)]
pub struct NbdArgs {
    /// What to serve under the empty name
    #[arg(value_name = "SOURCE", required_unless_present = "export")]
    source: Option<String>,
    /// What to serve under a name (repeatable)
    #[arg(long, short = 'e', value_name = "NAME=SOURCE")]
    export: Vec<String>,
    /// Where to listen: HOST:PORT or unix:PATH (repeatable)
    #[arg(long, short, value_name = "ADDRESS", default_value = "127.0.0.1:10809")]
    listen: Vec<String>,
    /// Make files that are not there, of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    size: Option<u64>,
    /// Refuse writes
    #[arg(long, short)]
    read_only: bool,
    /// Offer TLS with server-cert.pem and server-key.pem of a directory
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Serve nobody without TLS
    #[arg(long, requires = "tls")]
    tls_required: bool,
    /// Ask clients for a certificate signed by ca-cert.pem of the directory (implies --tls-required)
    #[arg(long, requires = "tls")]
    tls_verify_peer: bool,
    /// Serve the network without TLS: whoever reaches the port has the disk
    #[arg(long)]
    insecure: bool,
    /// End connections that say nothing for this long
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    idle_timeout: Option<Duration>,
    /// Put a cache of this size before each device, with read-ahead and merging of neighbours (32MiB; 0B: none)
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, num_args = 0..=1, default_missing_value = "32MiB")]
    cache: Option<u64>,
    /// Answer writes when they are in the cache; a flush writes them
    #[arg(long, requires = "cache")]
    write_back: bool,
    /// Connections at the same time
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
}

fn usage(message: impl Into<String>, remedy: &str) -> Failure {
    Failure::new(Kind::Usage, message, remedy)
}

/// `unix:PATH`, a path, `HOST:PORT`, `HOST`.
fn parse_address(text: &str) -> Result<Address> {
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(Address::Unix(path.into()));
    }
    if text.starts_with('/') {
        return Ok(Address::Unix(text.into()));
    }
    use std::net::ToSocketAddrs;
    let resolved = text.to_socket_addrs().or_else(|_| (text, PORT).to_socket_addrs());
    resolved.ok().and_then(|mut found| found.next()).map(Address::Tcp).ok_or_else(|| {
        usage(format!("--listen {text}: no address"), "write HOST:PORT or unix:PATH")
    })
}

/// What sources are opened with.
struct Opener<'a> {
    global: &'a Global,
    args: &'a NbdArgs,
    /// The volume, once it was asked for.
    volume: Option<Arc<dyn FileSystem>>,
}

impl Opener<'_> {
    fn open(&mut self, source: &str) -> Result<Arc<dyn Device>> {
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
                self.layered(file)?
            }
            "file" => {
                let file = PlainFile::open(Path::new(rest), read_only, create).context(source)?;
                self.layered(file)?
            }
            "pool" => {
                let (file, name) = rest
                    .rsplit_once(':')
                    .ok_or_else(|| usage(format!("{source}: no image"), "write pool:FILE:IMAGE"))?;
                self.layered(crate::pool::open(Path::new(file), name, read_only)?)?
            }
            "rbd" => {
                let at =
                    rest.parse().map_err(|error: String| usage(error, "see corbel nbd --help"))?;
                let image = RbdImage::open(&at, read_only).map_err(|error| {
                    Failure::failed(format!("{source}: {error}"), "see docs/block.md, RBD")
                })?;
                self.cached(Arc::new(image))?
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
    fn layered<D: Disk + 'static>(&self, disk: D) -> Result<Arc<dyn Device>> {
        if self.args.cache.is_none() {
            return Ok(Arc::new(Blocking(disk)));
        }
        self.cached(Arc::new(Threads::new(disk, THREADS).context("starting threads")?))
    }

    /// The same for what never waits.
    fn cached(&self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let Some(cache_bytes) = self.args.cache else { return Ok(device) };
        let config = Config { cache_bytes, write_back: self.args.write_back, ..Config::default() };
        Ok(Arc::new(Layered::new(device, config).context("starting threads")?))
    }

    fn volume(&mut self) -> Result<Arc<dyn FileSystem>> {
        if let Some(fs) = &self.volume {
            return Ok(Arc::clone(fs));
        }
        let socket = self.global.load()?.node.socket;
        let fs = crate::mount::open_source(&socket.display().to_string())?;
        Ok(Arc::clone(self.volume.insert(fs)))
    }
}

/// Runs `corbel nbd`.
pub fn run(global: &Global, out: &Output, args: &NbdArgs) -> Result<()> {
    crate::local::tie();
    let listen: Vec<Address> =
        args.listen.iter().map(|text| parse_address(text)).collect::<Result<_>>()?;
    let (policy, config) = tls_of(args, &listen)?;
    // Before the first thread, so that all of them have the signals blocked.
    let signals = EndingSignals::catch().context("catching signals")?;
    let mut opener = Opener { global, args, volume: None };
    let mut exports = Exports::new();
    let named = args.export.iter().map(|text| {
        text.split_once('=')
            .ok_or_else(|| usage(format!("--export {text}: no name"), "write --export NAME=SOURCE"))
    });
    for named in args.source.iter().map(|source| Ok(("", source.as_str()))).chain(named) {
        let (name, source) = named?;
        let device = opener.open(source)?;
        let export = Export { description: source.to_owned(), device, multi_conn: true };
        exports.add(name, export).map_err(|error| usage(error, "see corbel nbd --help"))?;
    }
    let bounds = Bounds { idle: args.idle_timeout, ..Bounds::default() };
    let limits = Limits { connections: args.connections.into(), bounds };
    let told: Vec<_> = exports
        .iter()
        .map(|(name, export)| json!({"name": name, "size": export.device.size()}))
        .collect();
    let common = Common { exports: Arc::new(exports), tls: policy, config, bounds };
    let server =
        Server::start(common, &listen, limits).map_err(|error| Failure::io("listening", &error))?;
    let addresses: Vec<String> = server.addresses().iter().map(Address::to_string).collect();
    out.result(&json!({"listening": addresses, "exports": told}), || {
        for address in &addresses {
            println!("listening on {address}");
        }
    });
    use std::io::Write;
    std::io::stdout().flush().context("standard output")?;
    let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(|error| Failure::io("eventfd", &error.into()))?;
    signals.wait_or(&never).context("waiting for signals")?;
    drop(server);
    Ok(())
}

type Tls = (TlsPolicy, Option<Arc<rustls::ServerConfig>>);

fn tls_of(args: &NbdArgs, listen: &[Address]) -> Result<Tls> {
    let outside = listen.iter().any(|a| matches!(a, Address::Tcp(at) if !at.ip().is_loopback()));
    let Some(dir) = &args.tls else {
        if outside && !args.insecure {
            return Err(usage(
                "an address that others reach, without TLS",
                "give --tls DIR, listen on a loopback address or a Unix socket, or say --insecure",
            ));
        }
        return Ok((TlsPolicy::Off, None));
    };
    let config = tls::read(dir, args.tls_verify_peer).map_err(|error| {
        Failure::new(Kind::Config, error, "make the certificates as docs/block.md shows")
    })?;
    let required = args.tls_required || args.tls_verify_peer || (outside && !args.insecure);
    Ok((if required { TlsPolicy::Required } else { TlsPolicy::On }, Some(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let tcp = |text: &str| Address::Tcp(text.parse().unwrap());
        assert_eq!(parse_address("127.0.0.1:99").unwrap(), tcp("127.0.0.1:99"));
        assert_eq!(parse_address("127.0.0.1").unwrap(), tcp("127.0.0.1:10809"));
        assert_eq!(parse_address("[::1]:7").unwrap(), tcp("[::1]:7"));
        assert_eq!(parse_address("unix:/a").unwrap(), Address::Unix("/a".into()));
        assert_eq!(parse_address("/a").unwrap(), Address::Unix("/a".into()));
        assert!(parse_address("127.0.0.1:x").is_err());
    }
}
