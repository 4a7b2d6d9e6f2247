//! `corbel nbd`: block devices for whoever speaks NBD.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use block::nbd::connection::{Bounds, Common};
use block::nbd::handshake::TlsPolicy;
use block::nbd::{Address, Export, Exports, Limits, Server, tls};
use clap::Args;
use frontend::process::EndingSignals;
use serde_json::json;

use crate::cli::Global;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::source::{Opener, SourceArgs, Waiting, sources_help};
use crate::units::parse_duration;

/// The port of NBD.
const PORT: u16 = 10809;

/// Arguments of `corbel nbd`.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = concat!("Examples:\n  corbel nbd volume:/disks/vm.img --size 20GiB        a file of the volume, made if it is not there\n  \
        corbel nbd --export a=volume:/a.img --export b=file:/srv/b.img --listen unix:/run/nbd.sock\n  \
        corbel nbd file:/srv/disk.img --listen 0.0.0.0:10809 --tls /etc/corbel/nbd --tls-verify-peer\n\n", sources_help!(), "\n\
        Clients:\n  nbdinfo nbd://localhost\n  \
        qemu-img info 'nbd+unix:///a?socket=/run/nbd.sock'\n  \
        nbd-client localhost /dev/nbd0 -N a")
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
    #[command(flatten)]
    how: SourceArgs,
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

/// Runs `corbel nbd`.
pub fn run(global: &Global, out: &Output, args: &NbdArgs) -> Result<()> {
    crate::local::tie();
    let listen: Vec<Address> =
        args.listen.iter().map(|text| parse_address(text)).collect::<Result<_>>()?;
    let (policy, config) = tls_of(args, &listen)?;
    // Before the first thread, so that all of them have the signals blocked.
    let signals = EndingSignals::catch().context("catching signals")?;
    let mut opener = Opener::new(global, &args.how, Waiting::Caller);
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
    opener.report(out);
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
