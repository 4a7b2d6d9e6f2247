//! Certificates of the server, under the names that other NBD servers look for in a directory.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// Certificate (and what stands between it and its authority), PEM.
pub const SERVER_CERTIFICATE: &str = "server-cert.pem";
/// Its private key, PEM.
pub const SERVER_KEY: &str = "server-key.pem";
/// Authorities that clients' certificates must be signed by, PEM.
pub const AUTHORITY: &str = "ca-cert.pem";

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = || {
        let found = CertificateDer::pem_file_iter(path).map_err(|e| e.to_string())?;
        found.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())
    };
    match read() {
        Ok(list) if list.is_empty() => Err(format!("{}: no certificate in it", path.display())),
        result => result.map_err(|error| format!("{}: {error}", path.display())),
    }
}

/// Reads the directory. With `verify` clients must have a certificate that an authority of the directory has signed.
pub fn read(dir: &Path, verify: bool) -> Result<Arc<ServerConfig>, String> {
    let chain = certificates(&dir.join(SERVER_CERTIFICATE))?;
    let path = dir.join(SERVER_KEY);
    let key = PrivateKeyDer::from_pem_file(&path)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?;
    let builder = if verify {
        let path = dir.join(AUTHORITY);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path)? {
            roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let config = builder
        .with_single_cert(chain, key)
        .map_err(|error| format!("{}: {error}", dir.join(SERVER_CERTIFICATE).display()))?;
    Ok(Arc::new(config))
}
