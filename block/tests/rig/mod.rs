//! What the tests of this crate share: directories that go away, servers, certificates.
#![allow(dead_code)]

pub mod ceph;
pub mod disk;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::device::Device;
use block::nbd::client::{Client, Stream};
use block::nbd::connection::Common;
use block::nbd::handshake::TlsPolicy;
use block::nbd::proto::option;
use block::nbd::{Address, Export, Exports, Limits, Server};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A directory of a test's own.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one.
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("corbel-block-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An export of a device.
pub fn export(device: Arc<dyn Device>) -> Export {
    Export { description: "a disk".into(), device, multi_conn: true }
}

/// A server of some exports at a Unix socket.
pub fn serve_with(scratch: &Scratch, exports: Exports, limits: Limits) -> Server {
    let common = Common {
        exports: Arc::new(exports),
        tls: TlsPolicy::Off,
        config: None,
        bounds: limits.bounds,
    };
    Server::start(common, &[Address::Unix(scratch.path("nbd.sock"))], limits).unwrap()
}

/// A server of one export, called `disk`.
pub fn serve(scratch: &Scratch, device: Arc<dyn Device>) -> Server {
    let mut exports = Exports::new();
    exports.add("disk", export(device)).unwrap();
    serve_with(scratch, exports, Limits::default())
}

/// What a client needs for TLS.
pub struct Keys {
    authority: CertificateDer<'static>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// Makes an authority, a server's certificate in the directory `server` and a client's in `client`.
pub fn certificates(scratch: &Scratch) -> Keys {
    let authority_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&authority_key).unwrap();
    let issuer = Issuer::from_params(&params, &authority_key);
    for (dir, name) in [("server", "localhost"), ("client", "client")] {
        let dir = scratch.path(dir);
        std::fs::create_dir_all(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let names = vec![name.to_owned(), "127.0.0.1".to_owned()];
        let params = CertificateParams::new(names).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let kind = if name == "client" { "client" } else { "server" };
        let write = |file: String, text: String| std::fs::write(dir.join(file), text).unwrap();
        write(format!("{kind}-cert.pem"), certificate.pem());
        write(format!("{kind}-key.pem"), key.serialize_pem());
        write("ca-cert.pem".into(), authority.pem());
    }
    let client = scratch.path("client");
    let read = |name: &str| CertificateDer::from_pem_file(client.join(name)).unwrap();
    Keys {
        authority: read("ca-cert.pem"),
        chain: vec![read("client-cert.pem")],
        key: PrivateKeyDer::from_pem_file(client.join("client-key.pem")).unwrap(),
    }
}

struct Secure(rustls::StreamOwned<rustls::ClientConnection, Box<dyn Stream>>);

impl Read for Secure {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Secure {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Asks for TLS and goes on in it, with a certificate or without.
pub fn secure(mut client: Client, keys: &Keys, known: bool) -> io::Result<Client> {
    client.option(option::STARTTLS, b"")?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(keys.authority.clone()).map_err(io::Error::other)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)?
        .with_root_certificates(roots);
    let config = if known {
        builder
            .with_client_auth_cert(keys.chain.clone(), keys.key.clone_key())
            .map_err(io::Error::other)?
    } else {
        builder.with_no_client_auth()
    };
    let name = "localhost".try_into().map_err(io::Error::other)?;
    let tls = rustls::ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let stream = rustls::StreamOwned::new(tls, client.into_stream());
    Ok(Client::over(Box::new(Secure(stream))))
}

/// A program of the path, if it is installed.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| Path::is_file(file))
}
