//! Certificates for tests, right and wrong ones.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

pub const HOUR: i64 = 3600;

pub fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What a certificate is to say; times in seconds from now.
pub struct Wanted {
    pub names: Vec<String>,
    pub from: i64,
    pub until: i64,
    pub dials: bool,
}

impl Wanted {
    pub fn role(cluster: &str, role: &str) -> Self {
        let names = vec![format!("corbel://{cluster}/{role}")];
        Self { names, from: -2 * HOUR, until: 2 * HOUR, dials: true }
    }
}

pub struct Issued {
    pub der: CertificateDer<'static>,
    pem: String,
    key: KeyPair,
}

impl Issued {
    pub fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::try_from(self.key.serialize_der()).unwrap()
    }

    pub fn cert_pem(&self) -> &str {
        &self.pem
    }

    /// Certificate and key, in the place of what is there.
    pub fn write(&self, path: &Path) {
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .unwrap();
        write!(file, "{}{}", self.pem, self.key.serialize_pem()).unwrap();
        std::fs::rename(new, path).unwrap();
    }
}

pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pem: String,
}

fn at(seconds: i64) -> time::OffsetDateTime {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let at = now.as_secs() as i64 + seconds;
    time::OffsetDateTime::UNIX_EPOCH + Duration::from_secs(at as u64)
}

impl Authority {
    pub fn new() -> Self {
        Self::until(100 * 365 * 24 * HOUR)
    }

    /// One that ends in so many seconds.
    pub fn until(until: i64) -> Self {
        let mut params = CertificateParams::default();
        params.not_after = at(until);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap();
        let (der, pem) = (cert.der().clone(), cert.pem());
        Self { issuer: Issuer::new(params, key), der, pem }
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The authority itself, as if it were somebody.
    pub fn own(&self) -> Issued {
        let key = KeyPair::from_pem(&self.issuer.key().serialize_pem()).unwrap();
        Issued { der: self.der.clone(), pem: self.pem.clone(), key }
    }

    pub fn issue(&self, wanted: &Wanted) -> Issued {
        let mut params = CertificateParams::default();
        let name = |name: &String| SanType::URI(name.as_str().try_into().unwrap());
        params.subject_alt_names = wanted.names.iter().map(name).collect();
        params.not_before = at(wanted.from.min(wanted.until - HOUR));
        params.not_after = at(wanted.until);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if wanted.dials {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Issued { der: cert.der().clone(), pem: cert.pem(), key }
    }
}

/// Believes every certificate.
#[derive(Debug)]
pub struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
